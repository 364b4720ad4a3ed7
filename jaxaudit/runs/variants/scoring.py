"""Scores of variants, paired by seed with the plain learner's, and what the variants cost, with exact intervals."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from jaxaudit.analysis.statistics import ranks, seeds_for
from jaxaudit.analysis.statistics.paired import collapsed, holm, sign_flips
from jaxaudit.core.batches import Batch, Plan, layout
from jaxaudit.core.channel_names import ACTED
from jaxaudit.core.grid import Grid
from jaxaudit.core.program import LaneState
from jaxaudit.execution import memory
from jaxaudit.runs.variants.design import Ladder, conditions_of

TURNS = 11
"""How many times every program is timed; with 11 the interval of the median has a coverage of 0.99."""

SECONDS = 0.3
"""The least duration of one timing, as far as the number of steps in a run allows."""


def step_seconds(grids: Mapping[str, Grid], turns: int = TURNS) -> dict[str, list[float]]:
    """Times the undisturbed lanes of several grids, one grid after the other in each turn.

    Args:
      grids: by name; all have the same number of seeds.
      turns: how many times each is timed.

    Returns:
      for each name, seconds per step of all its lanes together, one number for each turn.
    """
    timed = {name: _Timed(grid) for name, grid in grids.items()}
    found: dict[str, list[float]] = {name: [] for name in grids}
    for _ in range(turns):
        for name, one in timed.items():
            found[name].append(one.turn())
    return found


def relative(times: Sequence[float], plain: Sequence[float], level: float = 0.95) -> dict[str, float]:
    """Returns the median over turns of the ratio of two times, `step_time`, with its interval `_low` and `_high`."""
    ratios = np.sort(np.asarray(times) / np.asarray(plain))
    low, high, coverage = ranks(ratios.size, level)
    bounds = (ratios[low - 1], ratios[high - 1]) if coverage >= level else (math.nan, math.nan)
    names = ("step_time", "step_time_low", "step_time_high")
    return dict(zip(names, map(float, (np.median(ratios), *bounds)), strict=True))


class _Timed:
    """The undisturbed program of a grid, compiled, and the state of its lanes."""

    def __init__(self, grid: Grid):
        def undisturbed(most: int | None) -> Plan:
            return [batch for batch in layout(grid, most) if not batch.disturbed]

        self._engine, plan, _ = memory.fit(grid, grid.steps, undisturbed)
        self._batch: Batch = max(plan, key=lambda batch: len(batch.seeds))
        self._steps = grid.steps
        self._each = 1
        self._begin()
        self._go()
        once = self._go()
        self._each = max(1, min(math.ceil(SECONDS / once), grid.steps - 1))
        self._begin()

    def _begin(self) -> None:
        self._states: LaneState = self._engine.initial(self._batch)
        self._at = 0

    def _go(self) -> float:
        start, stop = self._at, min(self._at + self._each, self._steps)
        begun = time.perf_counter()
        self._states, _ = self._engine.advance(self._batch, self._states, start, stop)
        self._at = stop
        return (time.perf_counter() - begun) / (stop - start)

    def turn(self) -> float:
        """Trains some steps further, or from the beginning at the end of the run, and returns seconds per step."""
        if self._at + self._each > self._steps:
            self._begin()
        return self._go()


MOST_CONFIRMED = 12
"""How many pairs of variant and perturbation are tried again on fresh seeds, at most."""


@dataclass(frozen=True)
class Scores:
    """The scores of one variant under one perturbation.

    Attributes:
      survived: for each seed, the number of magnitudes at which its lane does not collapse, float `[seeds]`; NaN where
        the undisturbed lane collapses or a collapse time is unknown.
      fallen: bool `[seeds]`, whether the undisturbed lane collapses.
      low, high: `[seeds]`, the harshest magnitude that a seed survives and the mildest at which it collapses, which
        bracket its threshold; NaN where there is none, or a seed survives a magnitude harsher than one at which it
        collapses.
    """

    survived: np.ndarray
    fallen: np.ndarray
    low: np.ndarray
    high: np.ndarray


def score(lanes: pd.DataFrame, ladders: Sequence[Ladder]) -> list[Scores]:
    """Returns the scores of a run's lanes for each ladder, seeds in ascending order."""
    times = _wide(lanes, "collapse_time")
    return [_scores(times, ladder, places) for ladder, places in zip(ladders, conditions_of(ladders), strict=True)]


def _wide(lanes: pd.DataFrame, column: str) -> pd.DataFrame:
    """Returns a column of the lanes' table with a row for each seed, ascending, and a column for each condition."""
    wide = lanes.pivot(index="seed", columns="condition", values=column).sort_index()
    in_order = wide[list(dict.fromkeys(lanes.condition))]
    return in_order.set_axis(range(in_order.shape[1]), axis=1)


def _scores(times: pd.DataFrame, ladder: Ladder, places: tuple[int, ...]) -> Scores:
    control = collapsed(times[places[0]])
    fell = np.stack([collapsed(times[place]) for place in places[1:]], axis=1)
    survived = np.where(control == 0, (1.0 - fell).sum(axis=1), np.nan)
    magnitudes = np.array(ladder.magnitudes)
    low, high = np.full(len(fell), np.nan), np.full(len(fell), np.nan)
    for seed, row in enumerate(fell):
        if control[seed] or np.isnan(row).any() or (np.diff(row) < 0).any():
            continue
        count = int((row == 0).sum())
        low[seed] = magnitudes[count - 1] if count else np.nan
        high[seed] = magnitudes[count] if count < len(magnitudes) else np.nan
    return Scores(survived, control == 1, low, high)


def cell(plain: Scores, variant: Scores, ladder: Ladder, level: float) -> dict[str, Any]:
    """Compares a variant with the plain learner on the same seeds, under one perturbation; columns as in `bought`."""
    both = ~np.isnan(plain.survived) & ~np.isnan(variant.survived)
    found = sign_flips(variant.survived[both] - plain.survived[both], level=level)
    ratio = ratio_of_thresholds(plain, variant, level)
    return {
        "magnitudes": len(ladder.magnitudes),
        "centre": ladder.centre,
        "score": _mean(variant.survived[both]),
        "plain_score": _mean(plain.survived[both]),
        "difference": found.value,
        "difference_low": found.low,
        "difference_high": found.high,
        "p": found.p,
        "seeds": found.n,
        "detectable": found.detectable,
        "fallen": int(variant.fallen.sum()),
        "plain_fallen": int(plain.fallen.sum()),
        **ratio,
    }


def ratio_of_thresholds(plain: Scores, variant: Scores, level: float) -> dict[str, float]:
    """Returns the median ratio of the variant's threshold to the plain learner's, with an interval.

    Only seeds whose threshold is bracketed in both count. The ends of the brackets bound each seed's ratio, and order
    statistics of these bounds are the interval of the median. The estimate is the median ratio of the brackets'
    geometric means. NaN where there are too few of these seeds for an interval.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        least, most = np.log(variant.low / plain.high), np.log(variant.high / plain.low)
    closed = np.isfinite(least) & np.isfinite(most)
    n = int(closed.sum())
    names = ("ratio", "ratio_low", "ratio_high", "ratio_seeds")
    if n < seeds_for(level):
        return dict(zip(names, (math.nan, math.nan, math.nan, n), strict=True))
    lows, highs = np.sort(np.minimum(least, most)[closed]), np.sort(np.maximum(least, most)[closed])
    middle = np.median((least + most)[closed] / 2)
    first, last, _ = ranks(n, level)
    return dict(zip(names, (*np.exp([middle, lows[first - 1], highs[last - 1]]).tolist(), n), strict=True))


def bought(
    plain: pd.DataFrame, variants: Mapping[str, pd.DataFrame], ladders: Sequence[Ladder], level: float = 0.95
) -> pd.DataFrame:
    """Returns how many more magnitudes each variant survives than the plain learner, for each perturbation.

    Args:
        plain, variants: lanes of the plain learner and, by name, of variants on the same seeds: columns seed, condition
            and collapse_time, the conditions in the order of `design.conditions_of`.
        ladders: the perturbations and magnitudes that were tried.
        level: coverage of the intervals.

    Returns:
        columns `variant`, `perturbation`, `onset`; `score` and `plain_score`, means over the seeds whose undisturbed
        lanes collapse in neither; `difference` with its exact interval `_low` and `_high`, `p`, and the number of these
        `seeds`; `detectable`, see `SignFlips`; `fallen` and `plain_fallen`, the number of seeds whose undisturbed lane
        collapses; `ratio` of thresholds with `_low`, `_high` and `ratio_seeds`; `magnitudes`, how many were tried, and
        their `centre`.
    """
    before = score(plain, ladders)
    rows = []
    for name, lanes in variants.items():
        for ladder, one, other in zip(ladders, before, score(lanes, ladders), strict=True):
            rows.append(
                {"variant": name, "perturbation": ladder.name, "onset": ladder.onset, **cell(one, other, ladder, level)}
            )
    return pd.DataFrame(rows)


def standing_out(cells: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows whose interval excludes zero, at most `MOST_CONFIRMED`, by p and then by size."""
    apart = cells[(cells.difference_low > 0) | (cells.difference_high < 0)]
    order = np.lexsort((-apart.difference.abs(), apart.p))
    return apart.iloc[order[:MOST_CONFIRMED]]


def confirmed(cells: pd.DataFrame, level: float = 0.95) -> pd.DataFrame:
    """Adds `p_holm`, the p-value adjusted for the number of rows, and `confirmed`, whether it is at most 1 - level."""
    adjusted = holm(cells.p) if len(cells) else np.array([])
    return cells.assign(p_holm=adjusted, confirmed=adjusted <= 1 - level)


def paid(
    plain: pd.DataFrame, variants: Mapping[str, pd.DataFrame], ladders: Sequence[Ladder], level: float = 0.95
) -> pd.DataFrame:
    """Returns what each variant costs in undisturbed performance, paired by seed; one row for each.

    Args: as for `bought`, with the column final_performance.

    Returns:
        columns `variant`; `performance` and `plain_performance`, means over seeds at the end of undisturbed lanes;
        `performance_difference` with `_low`, `_high`, `performance_p`, and `performance_seeds`, those that are finite
        in both.
    """
    control = min(places[0] for places in conditions_of(ladders))

    def last(lanes: pd.DataFrame) -> np.ndarray:
        return _wide(lanes, "final_performance")[control].to_numpy(float)

    rows, before = [], last(plain)
    for name, lanes in variants.items():
        after = last(lanes)
        finite = np.isfinite(after) & np.isfinite(before)
        found = sign_flips(after[finite] - before[finite], level=level)
        rows.append(
            {
                "variant": name,
                "performance": _mean(after[finite]),
                "plain_performance": _mean(before[finite]),
                "performance_difference": found.value,
                "performance_difference_low": found.low,
                "performance_difference_high": found.high,
                "performance_p": found.p,
                "performance_seeds": found.n,
            }
        )
    return pd.DataFrame(rows)


def acted(variants: Mapping[str, pd.DataFrame], ladders: Sequence[Ladder]) -> pd.DataFrame:
    """Returns how often remedies acted: a row for each variant, remedy that acts while it trains, and perturbation.

    Args: as for `bought`, with columns acted_NAME where lanes have remedies.

    Returns:
        columns `variant`, `remedy`, `perturbation`; `acted`, the share of the remedy's applications from the onset on
        in which it changed a value, mean over the disturbed lanes; `acted_undisturbed`, the same of undisturbed lanes.
    """
    rows = []
    for variant, lanes in variants.items():
        for column in (str(name) for name in lanes if str(name).startswith(ACTED)):
            shares = _wide(lanes, column)
            for ladder, (control, *disturbed) in zip(ladders, conditions_of(ladders), strict=True):
                rows.append(
                    {
                        "variant": variant,
                        "remedy": column.removeprefix(ACTED),
                        "perturbation": ladder.name,
                        "acted": _mean(shares[disturbed].to_numpy(float)),
                        "acted_undisturbed": _mean(shares[control].to_numpy(float)),
                    }
                )
    return pd.DataFrame(rows, columns=["variant", "remedy", "perturbation", "acted", "acted_undisturbed"])


def _mean(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else math.nan
