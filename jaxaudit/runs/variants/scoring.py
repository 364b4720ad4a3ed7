"""Magnitudes at which variants are compared, their scores paired by seed with the plain learner's, and their costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from jaxaudit.analysis.metrics import BAND, MetricSettings
from jaxaudit.analysis.statistics import collapsed, ranks, seeds_for
from jaxaudit.analysis.statistics.intervals import interval_columns
from jaxaudit.analysis.statistics.paired import holm, sign_flips
from jaxaudit.core.batches import Batch, Plan, layout
from jaxaudit.core.channel_names import ACTED
from jaxaudit.core.grid import Grid
from jaxaudit.core.perturbation import Chain, Perturbation, Sweep
from jaxaudit.core.program import LaneState
from jaxaudit.execution import memory
from jaxaudit.runs.margins.directions import Direction, directions
from jaxaudit.runs.margins.table import Margins

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The magnitudes at which variants are compared, as multiples of the plain learner's margin or the given magnitude."""

REACH = 100.0
"""How many times beyond the given magnitude the plain learner's margin is searched."""

MAX_CONFIRMED = 12
"""The largest number of pairs of variant and perturbation that are measured again on fresh seeds."""

TURNS = 11
"""How many times every program is timed; with 11 the interval of the median has a coverage of 0.99."""

MIN_SECONDS = 0.3
"""The shortest duration of one timing, as far as the number of steps in a run allows."""


@dataclass(frozen=True)
class Ladder:
    """A perturbation at several magnitudes, from mild to harsh.

    Attributes:
      name: the perturbation's name, unique among the ladders of a comparison.
      onset: the step at which it begins.
      perturbations: what is audited: one perturbation with a sweep of magnitudes, or a chain for each magnitude.
      magnitudes: the magnitudes of the perturbation, or of a chain's first part, from the mildest to the harshest.
      centre: what the central magnitude is: "margin", the plain learner's, or "given", the one in the spec.
    """

    name: str
    onset: int
    perturbations: tuple[Perturbation | Chain, ...]
    magnitudes: tuple[float, ...]
    centre: str

    def json(self) -> dict[str, Any]:
        """Returns the perturbation and its magnitudes as JSON types."""
        return {
            "perturbation": self.name,
            "onset": self.onset,
            "centre": self.centre,
            "magnitudes": list(self.magnitudes),
        }


def magnitude_ladders(
    perturbations: Sequence[Perturbation | Chain], steps: int, margins: Margins | None = None
) -> list[Ladder]:
    """Returns a ladder of magnitudes for each perturbation.

    Magnitudes that are neutral or outside the range of the perturbation are left out.

    Args:
      perturbations: each with its window, target and given magnitude.
      steps: the length of the runs.
      margins: the plain learner's margins; None: each ladder is centred on the given magnitude.

    Raises:
      ValueError: a perturbation has only neutral or infinite magnitudes, or there is no perturbation.
    """
    if margins is None:
        ladders = [_ladder(direction, math.nan) for direction in directions(perturbations, steps, 1, REACH)]
    else:
        ladders = [
            _ladder(direction, estimate.median.value)
            for direction, estimate in zip(margins.plan.directions, margins.estimates, strict=True)
        ]
    if not ladders:
        raise ValueError("there is no perturbation to compare variants under")
    return ladders


def _ladder(direction: Direction, margin: float) -> Ladder:
    """Returns the ladder around a margin, a log scale; around the given magnitude if the margin is not finite."""
    centre = "margin" if math.isfinite(margin) else "given"
    middle = margin if centre == "margin" else direction.initial[(len(direction.initial) - 1) // 2]
    rungs: dict[tuple[float, ...], tuple[Perturbation, ...]] = {}
    for factor in FACTORS:
        parts = direction.parts(middle + math.log(factor))
        if parts[0].magnitude != parts[0].neutral:
            rungs[direction.magnitudes(middle + math.log(factor))] = parts
    magnitudes = tuple(first for first, *_ in rungs)
    perturbations: tuple[Perturbation | Chain, ...] = tuple(map(Chain, rungs.values()))
    if len(direction.axes) == 1:
        perturbations = (replace(direction.axes[0].perturbation, magnitude=Sweep(magnitudes)),)
    return Ladder(direction.name, direction.onset, perturbations, magnitudes, centre)


def check_windows(ladders: Sequence[Ladder], steps: int, settings: MetricSettings) -> None:
    """Raises ValueError if a run is too short for a collapse to be recognised."""
    for ladder in ladders:
        left = steps - ladder.onset
        if left < settings.hold:
            raise ValueError(
                f"no collapse could be recognised: only {left} steps follow the onset of {ladder.name}, fewer than "
                f"hold = {settings.hold} in the metrics' windows"
            )


def condition_indices(ladders: Sequence[Ladder]) -> list[tuple[int, ...]]:
    """Returns, for each ladder, the indices of its control and its conditions in the grid of all ladders."""
    indices: list[tuple[int, ...]] = [()] * len(ladders)
    position = 0
    for onset in sorted({ladder.onset for ladder in ladders}):
        control, position = position, position + 1
        for i, ladder in enumerate(ladders):
            if ladder.onset == onset:
                indices[i] = (control, *range(position, position + len(ladder.magnitudes)))
                position += len(ladder.magnitudes)
    return indices


@dataclass(frozen=True)
class Scores:
    """The scores of one variant under one perturbation.

    Attributes:
      survived: for each seed, the number of magnitudes at which its lane does not collapse, float `[seeds]`; NaN where
        the undisturbed lane collapses or a collapse time is unknown.
      collapsed_undisturbed: whether the undisturbed lane collapses, bool `[seeds]`.
      low, high: the bracket of each seed's threshold, `[seeds]`: the harshest magnitude that it survives, and the
        mildest at which it collapses; NaN where there is none, or the seed survives a magnitude harsher than one at
        which it collapses.
    """

    survived: np.ndarray
    collapsed_undisturbed: np.ndarray
    low: np.ndarray
    high: np.ndarray


def scores(lanes: pd.DataFrame, ladders: Sequence[Ladder]) -> list[Scores]:
    """Returns the scores of a run's lanes for each ladder, seeds in ascending order."""
    times = _by_seed_and_condition(lanes, "collapse_time")
    return [
        _scores(collapsed(times[control]), collapsed(times[disturbed]), np.array(ladder.magnitudes))
        for ladder, (control, *disturbed) in zip(ladders, condition_indices(ladders), strict=True)
    ]


def _by_seed_and_condition(lanes: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns a column of a lane table as `[seeds, conditions]`: seeds ascending, conditions numbered in order."""
    wide = lanes.pivot(index="seed", columns="condition", values=column).sort_index()
    ordered = wide[list(dict.fromkeys(lanes.condition))]
    return ordered.set_axis(range(ordered.shape[1]), axis=1)


def _scores(control: np.ndarray, outcomes: np.ndarray, magnitudes: np.ndarray) -> Scores:
    survived = np.where(control == 0, (1.0 - outcomes).sum(axis=1), np.nan)
    bounds = np.r_[np.nan, magnitudes, np.nan]
    low, high = np.full(len(outcomes), np.nan), np.full(len(outcomes), np.nan)
    for seed, row in enumerate(outcomes):
        if not (control[seed] or np.isnan(row).any() or (np.diff(row) < 0).any()):
            count = int((row == 0).sum())
            low[seed], high[seed] = bounds[count], bounds[count + 1]
    return Scores(survived, control == 1, low, high)


def scores_at_level(
    lanes: pd.DataFrame, plain: pd.DataFrame, ladders: Sequence[Ladder]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the scores of a run's lanes by one level of performance for all variants, seeds in ascending order.

    The level is the lower end of the band of the plain learner's undisturbed lane of the same seed, two standard
    deviations below its mean before the onset. A collapse, in contrast, is a fall out of a lane's own band, so that a
    variant that performs worse or less steadily before the onset may survive more without ending any better.

    Args: as for `gain_table`.

    Returns:
        for each ladder, the number of magnitudes at which the final performance is at or above the level, float
        `[seeds]`, NaN where the plain learner has no band; and whether that of the undisturbed lane is below it, bool
        `[seeds]`.
    """
    mean, std = (_by_seed_and_condition(plain, f"performance_{part}before") for part in ("", "std_"))
    # A lane without a final performance has become non-finite: it is below every level.
    final = _by_seed_and_condition(lanes, "final_performance").fillna(-math.inf)
    results = []
    for control, *disturbed in condition_indices(ladders):
        level = (mean[control] - BAND * std[control]).to_numpy(float)
        survived = (final[disturbed].to_numpy(float) >= level[:, None]).sum(axis=1)
        results.append((np.where(np.isnan(level), np.nan, survived), final[control].to_numpy(float) < level))
    return results


def gain_table(
    plain: pd.DataFrame, variants: Mapping[str, pd.DataFrame], ladders: Sequence[Ladder], level: float = 0.95
) -> pd.DataFrame:
    """Returns how many more magnitudes each variant survives than the plain learner, for each perturbation.

    Args:
        plain, variants: lanes of the plain learner and, by name, of variants on the same seeds: columns seed,
            condition, collapse_time, performance_before, performance_std_before and final_performance, the conditions
            in the order of `condition_indices`.
        ladders: the perturbations and magnitudes that were tried.
        level: the confidence level of the intervals.

    Returns:
        columns `variant`, `perturbation`, `onset`; `score` and `plain_score`, means over the seeds whose undisturbed
        lanes collapse in neither; `difference` with its exact interval `_low` and `_high`, `p`, and the number of these
        `seeds`; `detectable`, see `SignFlips`; `fallen` and `plain_fallen`, the number of seeds whose undisturbed lane
        collapses; `ratio` of thresholds with `_low`, `_high` and `ratio_seeds`; `magnitudes`, how many were tried, and
        their `centre`; and, by the level of `scores_at_level`, `level_score`, `plain_level_score`, `level_difference`
        with `_low` and `_high`, and `below_level` and `plain_below_level`, the number of seeds whose undisturbed lane
        ends below it.
    """
    plain_scores, plain_at_level = scores(plain, ladders), scores_at_level(plain, plain, ladders)
    rows = []
    for name, lanes in variants.items():
        variant_scores, at_level = scores(lanes, ladders), scores_at_level(lanes, plain, ladders)
        for i, ladder in enumerate(ladders):
            rows.append(
                {
                    "variant": name,
                    "perturbation": ladder.name,
                    "onset": ladder.onset,
                    **_gain(plain_scores[i], variant_scores[i], ladder, level),
                    **_gain_at_level(*plain_at_level[i], *at_level[i], level),
                }
            )
    return pd.DataFrame(rows)


def _gain(plain: Scores, variant: Scores, ladder: Ladder, level: float) -> dict[str, Any]:
    in_both = ~np.isnan(plain.survived) & ~np.isnan(variant.survived)
    gain = sign_flips(variant.survived[in_both] - plain.survived[in_both], level=level)
    return {
        "magnitudes": len(ladder.magnitudes),
        "centre": ladder.centre,
        "score": _nan_mean(variant.survived[in_both]),
        "plain_score": _nan_mean(plain.survived[in_both]),
        **interval_columns("difference", *gain[:3]),
        "p": gain.p,
        "seeds": gain.n,
        "detectable": gain.detectable,
        "fallen": int(variant.collapsed_undisturbed.sum()),
        "plain_fallen": int(plain.collapsed_undisturbed.sum()),
        **_threshold_ratio(plain, variant, level),
    }


def _gain_at_level(
    plain: np.ndarray, plain_below: np.ndarray, variant: np.ndarray, below: np.ndarray, level: float
) -> dict[str, Any]:
    difference = variant - plain
    gain = sign_flips(difference[~np.isnan(difference)], level=level)
    return {
        "level_score": _nan_mean(variant),
        "plain_level_score": _nan_mean(plain),
        **interval_columns("level_difference", *gain[:3]),
        "below_level": int(below.sum()),
        "plain_below_level": int(plain_below.sum()),
    }


def _threshold_ratio(plain: Scores, variant: Scores, level: float) -> dict[str, float]:
    """Returns the median ratio of the variant's threshold to the plain learner's, with an interval.

    Only seeds whose threshold is bracketed in both count. The ends of the brackets bound each seed's ratio, and order
    statistics of these bounds are the interval of the median. The estimate is the median ratio of the brackets'
    geometric means. All are NaN where there are too few of these seeds for an interval.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        least, most = np.log(variant.low / plain.high), np.log(variant.high / plain.low)
    bracketed = np.isfinite(least) & np.isfinite(most)
    n = int(bracketed.sum())
    if n < seeds_for(level):
        return interval_columns("ratio", math.nan, math.nan, math.nan) | {"ratio_seeds": n}
    lows, highs = np.sort(np.minimum(least, most)[bracketed]), np.sort(np.maximum(least, most)[bracketed])
    middle = np.median((least + most)[bracketed] / 2)
    first, last, _ = ranks(n, level)
    ratio = np.exp([middle, lows[first - 1], highs[last - 1]]).tolist()
    return interval_columns("ratio", *ratio) | {"ratio_seeds": n}


def holds_at_level(row: Mapping[str, Any]) -> bool:
    """Returns whether a difference has the same sign by the level of `scores_at_level`, where its interval excludes 0.

    A row of a table without these columns, made by an earlier version, is not contradicted.
    """
    low, high = row.get("level_difference_low", math.nan), row.get("level_difference_high", math.nan)
    return math.isnan(low) or (low > 0 if row["difference"] > 0 else high < 0)


def significant_gains(gains: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows whose interval excludes zero, at most `MAX_CONFIRMED`, by p and then by size."""
    significant = gains[(gains.difference_low > 0) | (gains.difference_high < 0)]
    order = np.lexsort((-significant.difference.abs(), significant.p))
    return significant.iloc[order[:MAX_CONFIRMED]]


def adjust_for_multiplicity(gains: pd.DataFrame, level: float = 0.95) -> pd.DataFrame:
    """Adds `p_holm`, the p-value adjusted for the number of rows, and `confirmed`, whether it is at most 1 - level."""
    adjusted = holm(gains.p)
    return gains.assign(p_holm=adjusted, confirmed=adjusted <= 1 - level)


def cost_table(
    plain: pd.DataFrame, variants: Mapping[str, pd.DataFrame], ladders: Sequence[Ladder], level: float = 0.95
) -> pd.DataFrame:
    """Returns what each variant costs in undisturbed performance, paired by seed; one row for each.

    Args: as for `gain_table`, with the column final_performance.

    Returns:
        columns `variant`; `performance` and `plain_performance`, means over seeds at the end of undisturbed lanes;
        `performance_difference` with `_low`, `_high`, `performance_p`, and `performance_seeds`, the number of seeds
        that are finite in both.
    """
    control = min(indices[0] for indices in condition_indices(ladders))

    def undisturbed(lanes: pd.DataFrame) -> np.ndarray:
        return _by_seed_and_condition(lanes, "final_performance")[control].to_numpy(float)

    rows, plain_performance = [], undisturbed(plain)
    for name, lanes in variants.items():
        performance = undisturbed(lanes)
        finite = np.isfinite(performance) & np.isfinite(plain_performance)
        difference = sign_flips(performance[finite] - plain_performance[finite], level=level)
        rows.append(
            {
                "variant": name,
                "performance": _nan_mean(performance[finite]),
                "plain_performance": _nan_mean(plain_performance[finite]),
                **interval_columns("performance_difference", *difference[:3]),
                "performance_p": difference.p,
                "performance_seeds": difference.n,
            }
        )
    return pd.DataFrame(rows)


def activity_table(variants: Mapping[str, pd.DataFrame], ladders: Sequence[Ladder]) -> pd.DataFrame:
    """Returns how often remedies acted: a row for each variant, remedy that acts while it trains, and perturbation.

    Args: as for `gain_table`, with columns acted_NAME where lanes have remedies.

    Returns:
        columns `variant`, `remedy`, `perturbation`; `acted`, the share of the remedy's applications from the onset on
        in which it changed a value, mean over the disturbed lanes; `acted_undisturbed`, the same of undisturbed lanes.
    """
    rows = []
    for variant, lanes in variants.items():
        for column in (str(name) for name in lanes if str(name).startswith(ACTED)):
            shares = _by_seed_and_condition(lanes, column)
            for ladder, (control, *disturbed) in zip(ladders, condition_indices(ladders), strict=True):
                rows.append(
                    {
                        "variant": variant,
                        "remedy": column.removeprefix(ACTED),
                        "perturbation": ladder.name,
                        "acted": _nan_mean(shares[disturbed].to_numpy(float)),
                        "acted_undisturbed": _nan_mean(shares[control].to_numpy(float)),
                    }
                )
    return pd.DataFrame(rows, columns=["variant", "remedy", "perturbation", "acted", "acted_undisturbed"])


def _nan_mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan


def time_steps(
    plain: Grid, variants: Mapping[str, Grid], turns: int = TURNS, say: Callable[[str], object] = lambda line: None
) -> pd.DataFrame:
    """Times the undisturbed lanes of each variant beside those of the plain learner, in turns.

    The programs of all variants together may have more memory maps than the system allows a process, so that no more
    than two are timed at once.

    Args:
      plain: the grid of the plain learner.
      variants: the other grids, by name; all have the same number of seeds.
      turns: how many times each grid is timed.
      say: receives a line before each variant is timed.

    Returns:
      a table with a row for each variant and turn: `variant`, `turn`, and the seconds per step of all lanes together,
      `seconds` and `plain_seconds`.
    """
    rows = []
    plain_timer = _StepTimer(plain)
    for name, grid in variants.items():
        say(f"time of a step: {name}, in turns with the plain learner")
        timers = _StepTimer(grid), plain_timer
        for timer in timers:
            timer.measure()  # compiles the program again if it was dropped meanwhile
        for turn in range(turns):
            seconds, plain_seconds = (timer.measure() for timer in timers)
            rows.append({"variant": name, "turn": turn, "seconds": seconds, "plain_seconds": plain_seconds})
    return pd.DataFrame(rows)


def relative_step_time(times: Sequence[float], plain: Sequence[float], level: float = 0.95) -> dict[str, float]:
    """Returns the median over turns of the ratio of two times, `step_time`, with its interval `_low` and `_high`."""
    ratios = np.sort(np.asarray(times) / np.asarray(plain))
    low, high, coverage = ranks(ratios.size, level)
    ends = (ratios[low - 1], ratios[high - 1]) if coverage >= level else (math.nan, math.nan)
    return interval_columns("step_time", *map(float, (np.median(ratios), *ends)))


class _StepTimer:
    """The compiled program of a grid's undisturbed lanes, and the state of its lanes."""

    def __init__(self, grid: Grid):
        def undisturbed(most: int | None) -> Plan:
            return [batch for batch in layout(grid, most) if not batch.disturbed]

        self._engine, plan, _ = memory.fit(grid, grid.steps, undisturbed)
        self._batch: Batch = max(plan, key=lambda batch: len(batch.seeds))
        self._steps = grid.steps
        self._steps_per_turn = 1
        self._restart()
        self._advance()  # a warm-up
        seconds = self._advance()
        self._steps_per_turn = max(1, min(math.ceil(MIN_SECONDS / seconds), grid.steps - 1))

    def _restart(self) -> None:
        self._states: LaneState = self._engine.initial(self._batch)
        self._step = 0

    def _advance(self) -> float:
        start, stop = self._step, min(self._step + self._steps_per_turn, self._steps)
        begin = time.perf_counter()
        self._states, _ = self._engine.advance(self._batch, self._states, start, stop)
        self._step = stop
        return (time.perf_counter() - begin) / (stop - start)

    def measure(self) -> float:
        """Trains some more steps, after the run's end from its beginning again, and returns the seconds per step."""
        if self._step + self._steps_per_turn > self._steps:
            self._restart()
        return self._advance()
