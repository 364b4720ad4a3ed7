"""`compare(...)`: how much stability variants of a learner gain, what they cost, and the result as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.results import lane_table
from jaxaudit.analysis.statistics import seeds_for
from jaxaudit.core.grid import plan
from jaxaudit.core.learner import Learner
from jaxaudit.core.perturbation import Chain, Perturbation
from jaxaudit.core.remedied_learner import remedied, same_beginning
from jaxaudit.execution.audit import audit
from jaxaudit.remedies import Remedy
from jaxaudit.runs.margins.search import margin
from jaxaudit.runs.variants import scoring
from jaxaudit.runs.variants.scoring import REACH, Ladder, check_windows, magnitude_ladders
from jaxaudit.runtime.registry import align_columns

PLAIN = "plain"
"""The name of the learner without the variants' remedies."""

Centre = Literal["margin", "given"]
CENTRES: tuple[Centre, ...] = ("margin", "given")

LEVEL = 0.95
"""The default confidence level of the intervals."""

TOLERANCE = 0.1
"""The relative tolerance of the plain learner's margin, on which magnitudes are centred."""

SCREENED, FRESH = 8, 16
"""The default numbers of seeds for screening all variants, and of fresh seeds for confirmation."""

TrainLanes = Callable[[str, Sequence[Ladder], Sequence[int] | None], pd.DataFrame]
"""Trains the learner of a name under ladders, on some fresh seeds or (None) those of the screening.

Returns the table of its lanes, with the columns of a run's `metrics.csv`.
"""

GAIN_HEADINGS = (
    *("variant", "perturbation", "score", "plain", "difference"),
    *("by the plain learner's level", "ratio of thresholds", "verdict"),
)
COST_HEADINGS = ("variant", "performance", "plain", "difference", "time per step")
ACTIVITY_HEADINGS = ("variant", "remedy", "perturbation", "acted", "undisturbed")


@dataclass(frozen=True)
class Comparison:
    """The tables of a comparison of variants with the plain learner.

    Attributes:
      bought: the stability gained, one row for each variant and perturbation; see `scoring.gain_table`.
      confirmed: the rows whose interval excluded zero, measured again on fresh seeds, with `p_holm` and `confirmed`.
      paid: the costs, one row for each variant; see `scoring.cost_table`; and, where steps were timed,
        `step_time`, the time of an undisturbed step divided by the plain learner's, with `_low` and `_high`.
      acted: how often remedies acted, one row for each variant, remedy and perturbation; see
        `scoring.activity_table`.
      ladders: the perturbations and magnitudes that were tried.
      structures: names of the variants with other networks or settings, whose lanes share only the seed with the plain
        learner's.
      lanes: the lanes of every variant and of "plain", by name: columns as in a run's `metrics.csv`.
      level: the confidence level of the intervals.
    """

    bought: pd.DataFrame
    confirmed: pd.DataFrame
    paid: pd.DataFrame
    acted: pd.DataFrame
    ladders: tuple[Ladder, ...]
    structures: tuple[str, ...]
    lanes: Mapping[str, pd.DataFrame] = field(repr=False)
    level: float = 0.95

    def json(self) -> dict[str, Any]:
        """Returns the tables as lists of rows, with None for NaN, and warnings under "cautions"."""
        tables = {"bought": self.bought, "confirmed": self.confirmed, "paid": self.paid, "acted": self.acted}
        rows = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
        tried = [ladder.json() for ladder in self.ladders]
        return rows | {"tried": tried, "cautions": self._cautions()}

    def __str__(self) -> str:
        gains, costs, activity = (table.to_dict("records") for table in (self.bought, self.paid, self.acted))
        lines = ["magnitudes tried", *align_columns([magnitude_cells(ladder.json()) for ladder in self.ladders]), ""]
        rows = [_gain_cells(row, verdict(row, self.confirmed, self.level)) for row in gains]
        lines += ["bought: magnitudes survived, of those tried", *align_columns([GAIN_HEADINGS, *rows]), ""]
        lines += ["paid: undisturbed", *align_columns([COST_HEADINGS, *map(_cost_cells, costs)]), ""]
        if activity:
            lines += [
                "acted: share of a remedy's applications, from the onset on, in which it changed something",
                *align_columns([ACTIVITY_HEADINGS, *map(_activity_cells, activity)]),
                "",
            ]
        lines += _explanations(self.bought, self.confirmed, self.level)
        return "\n".join([*lines, *self._cautions()])

    def _cautions(self) -> list[str]:
        return _cautions(self.bought, self.confirmed, self.structures, self.level)


def compare(
    learner: Learner,
    variants: Mapping[str, Learner | Remedy | Sequence[Remedy]],
    perturbations: Sequence[Perturbation | Chain],
    *,
    seeds: int | Sequence[int] = SCREENED,
    fresh: int = FRESH,
    steps: int,
    centre: Centre = "margin",
    settings: MetricSettings | None = None,
    level: float = LEVEL,
    turns: int = scoring.TURNS,
    **how: Any,
) -> Comparison:
    """Measures how much stability variants of a learner gain under perturbations, and what they cost.

    Each perturbation is applied at five magnitudes, 1/4 to 4 times the plain learner's margin. The score of a seed is
    the number of magnitudes at which it does not collapse. Scores are compared seed by seed, with exact intervals.
    Differences whose interval excludes zero are measured again on fresh seeds, and their p-values are adjusted for
    their number (Holm). The cost is the difference in undisturbed performance, and the relative time of a step.

    Args:
      learner: the plain learner.
      variants: by name, remedies for the plain learner, or another learner on the same task.
      perturbations: each with its window and target; the search for the margin begins at its magnitude.
      seeds: the number of seeds, or the seeds, on which all variants are screened.
      fresh: the number of other seeds for confirmation; 0: no difference is measured again.
      steps: the length of a run.
      centre: "margin": magnitudes are centred on the plain learner's margin, or on the given magnitude where no margin
        is found; "given": on the given magnitude, without a search.
      settings: windows of the metrics.
      level: the confidence level of the intervals.
      turns: how many times steps are timed; 0: they are not.
      **how: how lanes run, as in `audit`: execution, devices, model_devices, matmul_precision.

    Raises:
      ValueError: as for `audit` and `margin`, or there is no variant, or one is called "plain".
    """
    if centre not in CENTRES:
        raise ValueError(f"centre must be {' or '.join(map(repr, CENTRES))}, not {centre!r}")
    if not isinstance(variants, Mapping):
        raise ValueError("variants must be a mapping from names to remedies or learners, such as {'a': [remedy]}")
    if isinstance(fresh, bool) or not isinstance(fresh, int) or fresh < 0:
        raise ValueError(f"fresh must be a number of seeds, not {fresh!r}")
    learners = {PLAIN: learner} | _variant_learners(learner, variants)
    screened: Any = range(seeds) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    options: dict[str, Any] = {"steps": steps, "settings": settings, **how}
    check_windows(magnitude_ladders(perturbations, steps), steps, settings or MetricSettings())
    margins = None
    if centre == "margin":
        search: dict[str, Any] = {"tolerance": TOLERANCE, "reach": REACH, "criterion": "collapse", "level": level}
        margins = margin(learner, perturbations, seeds=seeds, **options, **search)

    def train(name: str, ladders: Sequence[Ladder], fresh_seeds: Sequence[int] | None) -> pd.DataFrame:
        applied = [perturbation for ladder in ladders for perturbation in ladder.perturbations]
        lane_seeds = screened if fresh_seeds is None else fresh_seeds
        return lane_table(audit(learners[name], applied, seeds=lane_seeds, **options).lanes)

    def time_steps() -> pd.DataFrame | None:
        if not turns:
            return None
        grids = {name: plan(one, [], seeds=screened, steps=steps, tail=steps, **how) for name, one in learners.items()}
        return scoring.time_steps(grids.pop(PLAIN), grids, turns)

    return compare_learners(
        learners, magnitude_ladders(perturbations, steps, margins), fresh, train, time_steps, level=level
    )


def _variant_learners(
    learner: Learner, variants: Mapping[str, Learner | Remedy | Sequence[Remedy]]
) -> dict[str, Learner]:
    """Returns the variants as learners, by name. Raises ValueError if one cannot be made."""
    if not variants:
        raise ValueError("there are no variants to compare with the plain learner")
    if PLAIN in variants:
        raise ValueError(f"a variant cannot be called '{PLAIN}', which is the learner without remedies")
    learners = {}
    for name, variant in variants.items():
        if isinstance(variant, Learner):
            learners[name] = variant
            continue
        remedies = (variant,) if isinstance(variant, Remedy) else tuple(variant)
        try:
            learners[name] = remedied(learner, *remedies)
        except ValueError as error:
            raise ValueError(f"variant '{name}': {error}") from None
    return learners


def compare_learners(
    learners: Mapping[str, Learner],
    ladders: Sequence[Ladder],
    fresh: int,
    train: TrainLanes,
    time_steps: Callable[[], pd.DataFrame | None],
    *,
    level: float,
    store: Callable[[str, pd.DataFrame], None] = lambda name, table: None,
) -> Comparison:
    """Trains the plain learner and its variants under perturbations, and returns the tables of their comparison.

    Args:
      learners: by name, the plain one as `PLAIN`.
      ladders: the perturbations and magnitudes that are tried.
      fresh: the number of fresh seeds for confirmation.
      train: trains one of the learners.
      time_steps: returns the table of `scoring.time_steps`, or None if steps are not timed.
      level: the confidence level of the intervals.
      store: is called with each table when it is complete, and the name of its field in `Comparison`.
    """
    lanes = {name: train(name, ladders, None) for name in learners}
    plain, variants = lanes[PLAIN], {name: rows for name, rows in lanes.items() if name != PLAIN}
    gains = scoring.gain_table(plain, variants, ladders, level)
    store("bought", gains)
    confirmed = _confirm(gains, ladders, fresh_seeds(plain.seed, fresh), train, level)
    store("confirmed", confirmed)
    costs = scoring.cost_table(plain, variants, ladders, level)
    times = time_steps()
    if times is not None:
        turns = {name: times[times.variant == name] for name in variants}
        ratios = [scoring.relative_step_time(rows.seconds, rows.plain_seconds, level) for rows in turns.values()]
        costs = costs.assign(**pd.DataFrame(ratios))
    store("paid", costs)
    activity = scoring.activity_table(variants, ladders)
    store("acted", activity)
    structures = tuple(name for name in variants if not same_beginning(learners[name], learners[PLAIN]))
    return Comparison(gains, confirmed, costs, activity, tuple(ladders), structures, lanes, level)


def fresh_seeds(seeds: Sequence[int] | pd.Series, count: int) -> list[int]:
    """Returns `count` seeds above the largest of `seeds`."""
    first = int(np.max(seeds)) + 1
    return list(range(first, first + count))


def _confirm(
    gains: pd.DataFrame, ladders: Sequence[Ladder], seeds: Sequence[int], train: TrainLanes, level: float
) -> pd.DataFrame:
    """Measures the significant gains again on fresh seeds, and adjusts their p-values for multiplicity.

    Returns a table without rows if no gain is significant or there are no seeds.
    """
    significant = scoring.significant_gains(gains) if seeds else gains.head(0)
    if not len(significant):
        return scoring.adjust_for_multiplicity(gains.head(0), level)
    repeated = [ladder for ladder in ladders if ladder.name in set(significant.perturbation)]
    plain = train(PLAIN, repeated, seeds)
    variants = {name: train(name, repeated, seeds) for name in dict.fromkeys(significant.variant)}
    repeated_gains = scoring.gain_table(plain, variants, repeated, level)
    repeated_gains = repeated_gains.merge(significant[["variant", "perturbation"]], on=["variant", "perturbation"])
    return scoring.adjust_for_multiplicity(repeated_gains, level)


def verdict(row: dict[str, Any], confirmed: pd.DataFrame, level: float) -> str:
    """Returns a short verdict on a variant under a perturbation, from its row of gains."""
    if not row["seeds"]:
        return "every seed collapses undisturbed, in the variant or in the plain learner"
    matches = confirmed[(confirmed.variant == row["variant"]) & (confirmed.perturbation == row["perturbation"])]
    if len(matches):
        fresh = matches.iloc[0].to_dict()
        if not (fresh["confirmed"] and (fresh["difference"] > 0) == (row["difference"] > 0)):
            return f"not confirmed ({fresh['difference']:+.2g} on fresh seeds)"
        direction = "helps" if fresh["difference"] > 0 else "harms"
        if not scoring.holds_at_level(fresh):
            return (
                f"{direction} by its own level only ({fresh['difference']:+.2g} on fresh seeds, "
                f"{fresh['level_difference']:+.2g} by the plain learner's)"
            )
        return f"{direction} ({fresh['difference']:+.2g} on fresh seeds)"
    if row["difference_low"] > 0 or row["difference_high"] < 0:
        only = "" if scoring.holds_at_level(row) else " by its own level only"
        return f"{'helps' if row['difference'] > 0 else 'harms'}{only}, on the seeds screened"
    if row["score"] == row["plain_score"] == row["magnitudes"]:
        return "both survive every magnitude: too mild to tell, or there is no performance to lose"
    if row["score"] == row["plain_score"] == 0:
        return "both survive no magnitude: too harsh to tell"
    if math.isnan(row["difference_low"]):
        return "too few seeds to tell"
    detectable = row["detectable"]
    return "no difference detected" + ("" if math.isnan(detectable) else f" ({detectable:.2g} would)")


def _explanations(gains: pd.DataFrame, confirmed: pd.DataFrame, level: float) -> list[str]:
    sentences = [
        "difference: score of the variant minus the plain learner's, mean over the seeds whose undisturbed lanes "
        f"collapse in neither, with its exact {100 * level:g}% interval (a sign-flip permutation test)"
    ]
    sentences.append(
        "by the plain learner's level: the same difference where a lane survives if it ends at or above one level for "
        "all variants, two standard deviations below the mean of the plain learner's undisturbed lane before the onset"
    )
    if gains.detectable.notna().any():
        sentences.append(
            "(... would): the true difference that this comparison would have detected with a probability of 0.8"
        )
    if len(confirmed):
        sentences.append(
            f"fresh seeds: the differences whose interval excluded zero ({len(confirmed)}), measured again; confirmed "
            f"where the p-value, adjusted by Holm's method, is at most {1 - level:.2g}"
        )
    else:
        sentences.append("no difference was measured again on fresh seeds")
    return sentences


def _cautions(gains: pd.DataFrame, confirmed: pd.DataFrame, structures: Collection[str], level: float) -> list[str]:
    """Returns sentences on what limits the comparison, such as seeds without a score."""
    sentences = []
    seeds, needed = int(gains.seeds.max()), seeds_for(level)
    if seeds < needed:
        sentences.append(
            f"with {seeds} seeds no difference has a {100 * level:g}% interval or can be shown: it takes {needed}"
        )
    if len(confirmed) and (fresh := int(confirmed.seeds.max())) < needed:
        sentences.append(f"with {fresh} fresh seeds no difference can be confirmed: it takes at least {needed}")
    sentences += [
        f"{row['variant']} under {row['perturbation']}: by a fall out of its own band before the onset the difference "
        f"is {row['difference']:+.2g}, by one level for all variants, the plain learner's, "
        f"{_with_interval(row, 'level_difference', '+.2g')}"
        for row in _latest_significant(gains, confirmed)
        if not scoring.holds_at_level(row)
    ]
    for row in gains[gains.below_level > gains.seeds / 2].drop_duplicates(["variant", "onset"]).to_dict("records"):
        sentences.append(
            f"{row['variant']}: {row['below_level']} of its undisturbed lanes end below the plain learner's level, so "
            "that differences by that level show its lower performance rather than the perturbation's effect"
        )
    with_collapses = gains[(gains.fallen > 0) | (gains.plain_fallen > 0)]
    for row in with_collapses.drop_duplicates(["variant", "onset"]).to_dict("records"):
        sentences.append(
            f"{row['variant']}: {row['fallen']} of its seeds and {row['plain_fallen']} of the plain learner's collapse "
            "undisturbed; they have no score"
        )
    without_margin = list(dict.fromkeys(gains[gains.centre == "given"].perturbation))
    if without_margin:
        sentences.append(f"magnitudes are centred on the one given, not on a margin: {', '.join(without_margin)}")
    if structures:
        sentences.append(
            f"{', '.join(structures)}: another network or other settings, so that lanes share only the seed with the "
            "plain learner's, not its randomness, and differences are less precise"
        )
    return sentences


def _latest_significant(gains: pd.DataFrame, confirmed: pd.DataFrame) -> list[dict[str, Any]]:
    """Returns the rows whose interval excludes zero, as measured on fresh seeds where that was done and confirmed."""
    fresh = {(row["variant"], row["perturbation"]): row for row in confirmed.to_dict("records")}
    significant = gains[(gains.difference_low > 0) | (gains.difference_high < 0)].to_dict("records")
    latest = [fresh.get((row["variant"], row["perturbation"]), row) for row in significant]
    return [row for row in latest if row.get("confirmed", True)]


def magnitude_cells(ladder: Mapping[str, Any]) -> list[str]:
    """Returns the cells of a ladder, given as `Ladder.json`: perturbation, onset, magnitudes, and the central one."""
    magnitudes = ", ".join(f"{magnitude:.3g}" for magnitude in ladder["magnitudes"])
    centre = "the plain learner's margin" if ladder["centre"] == "margin" else "the magnitude given"
    return [ladder["perturbation"], f"from step {ladder['onset']}", magnitudes, f"(centred on {centre})"]


def _gain_cells(row: dict[str, Any], row_verdict: str) -> list[str]:
    return [
        row["variant"],
        row["perturbation"],
        _number(row["score"]),
        _number(row["plain_score"]),
        _with_interval(row, "difference", "+.2g"),
        _with_interval(row, "level_difference", "+.2g"),
        _with_interval(row, "ratio", ".2g"),
        row_verdict,
    ]


def _cost_cells(row: dict[str, Any]) -> list[str]:
    return [
        row["variant"],
        _number(row["performance"]),
        _number(row["plain_performance"]),
        _with_interval(row, "performance_difference", "+.3g"),
        _with_interval(row, "step_time", ".3f") if "step_time" in row else "-",
    ]


def _activity_cells(row: dict[str, Any]) -> list[str]:
    shares = (row["acted"], row["acted_undisturbed"])
    cells = ["-" if math.isnan(share) else f"{share:.1%}" for share in shares]
    return [row["variant"], row["remedy"], row["perturbation"], *cells]


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3g}"


def _with_interval(row: dict[str, Any], name: str, spec: str) -> str:
    value, low, high = (row[name + end] for end in ("", "_low", "_high"))
    if math.isnan(value):
        return "-"
    return f"{value:{spec}}" if math.isnan(low) else f"{value:{spec}} [{low:{spec}}, {high:{spec}}]"
