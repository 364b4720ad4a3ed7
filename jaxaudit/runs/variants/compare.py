"""`compare(...)`: how much stability variants of a learner gain, and what they cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.results import lane_table
from jaxaudit.core.grid import plan
from jaxaudit.core.learner import Learner
from jaxaudit.core.perturbation import Chain, Perturbation
from jaxaudit.core.remedied_learner import remedied, same_beginning
from jaxaudit.execution.audit import audit
from jaxaudit.remedies import Remedy
from jaxaudit.runs.margins.search import margin
from jaxaudit.runs.variants import scoring
from jaxaudit.runs.variants.design import REACH, Ladder, check_windows, magnitude_ladders
from jaxaudit.runs.variants.words import cautions, text

PLAIN = "plain"
"""The name of the learner without the variants' remedies."""

Centre = Literal["margin", "given"]
CENTRES: tuple[Centre, ...] = ("margin", "given")

TOLERANCE = 0.1
"""The relative tolerance of the plain learner's margin, on which magnitudes are centred."""

SCREENED, FRESH = 8, 16
"""The default numbers of seeds on which all is screened, and of fresh seeds for confirmation."""


@dataclass(frozen=True)
class Comparison:
    """The tables of a comparison of variants with the plain learner.

    Attributes:
      bought: one row for each variant and perturbation; see `scoring.bought`.
      confirmed: the rows whose interval excluded zero, measured again on fresh seeds, with `p_holm` and `confirmed`.
      paid: one row for each variant; see `scoring.paid`; and, where steps were timed,
        `step_time`, the time of an undisturbed step divided by the plain learner's, with `_low` and `_high`.
      acted: one row for each variant, remedy and perturbation; see `scoring.acted`.
      ladders: the perturbations and magnitudes that were tried.
      structures: names of the variants with other networks or settings, whose lanes share only the seed with the plain
        learner's.
      lanes: the lanes of every variant, "plain" among them, by name: columns as in a run's `metrics.csv`.
      level: coverage of the intervals.
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
        found = {name: json.loads(rows.to_json(orient="records")) for name, rows in tables.items()}
        tried = [ladder.json() for ladder in self.ladders]
        return found | {"tried": tried, "cautions": cautions(self.bought, self.structures)}

    def __str__(self) -> str:
        tables = (self.bought, self.confirmed, self.paid, self.acted)
        return text(*tables, [ladder.json() for ladder in self.ladders], self.structures, self.level)


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
    level: float = 0.95,
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
      centre: "margin": magnitudes are centred on the plain learner's margin, or on the magnitude given where no margin
        is found; "given": on the magnitude given, without a search.
      settings: windows of the metrics.
      level: coverage of the intervals.
      turns: how many times steps are timed; 0: they are not.
      **how: how lanes run, as in `audit`: execution, devices, model_devices, matmul_precision.

    Raises:
      ValueError: as for `audit` and `margin`, or there is no variant, or one is called "plain".
    """
    if centre not in CENTRES:
        raise ValueError(f"centre must be {' or '.join(map(repr, CENTRES))}, not {centre!r}")
    if isinstance(fresh, bool) or not isinstance(fresh, int) or fresh < 0:
        raise ValueError(f"fresh must be a number of seeds, not {fresh!r}")
    learners = {PLAIN: learner} | learners_of(learner, variants)
    chosen: Any = range(seeds) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    options: dict[str, Any] = {"steps": steps, "settings": settings, **how}
    check_windows(magnitude_ladders(perturbations, steps), steps, settings or MetricSettings())
    found = None
    if centre == "margin":
        search: dict[str, Any] = {"tolerance": TOLERANCE, "reach": REACH, "criterion": "collapse", "level": level}
        found = margin(learner, perturbations, seeds=seeds, **options, **search)
    tried = magnitude_ladders(perturbations, steps, found)

    def lanes_of(name: str, some: Sequence[Ladder], seeds: Sequence[int]) -> pd.DataFrame:
        acting = [one for ladder in some for one in ladder.perturbations]
        return lane_table(audit(learners[name], acting, seeds=seeds, **options).lanes)

    lanes = {name: lanes_of(name, tried, chosen) for name in learners}
    plain, others = lanes[PLAIN], {name: own for name, own in lanes.items() if name != PLAIN}
    bought = scoring.bought(plain, others, tried, level)
    confirmed = confirm(bought, tried, others_than(chosen, fresh), lanes_of, level)
    paid = scoring.paid(plain, others, tried, level)
    if turns:
        grids = {name: plan(one, [], seeds=chosen, steps=steps, tail=steps, **how) for name, one in learners.items()}
        times = scoring.step_seconds(grids, turns)
        ratios = [scoring.relative(times[name], times[PLAIN], level) for name in others]
        paid = paid.assign(**pd.DataFrame(ratios))
    structures = tuple(name for name in others if not same_beginning(learners[name], learner))
    return Comparison(bought, confirmed, paid, scoring.acted(others, tried), tuple(tried), structures, lanes, level)


def learners_of(learner: Learner, variants: Mapping[str, Learner | Remedy | Sequence[Remedy]]) -> dict[str, Learner]:
    """Returns the variants as learners, by name. Raises ValueError if one cannot be made."""
    if not variants:
        raise ValueError("there are no variants to compare with the plain learner")
    if PLAIN in variants:
        raise ValueError(f"a variant cannot be called '{PLAIN}', which is the learner without remedies")
    found = {}
    for name, variant in variants.items():
        if isinstance(variant, Learner):
            found[name] = variant
            continue
        remedies = (variant,) if isinstance(variant, Remedy) else tuple(variant)
        try:
            found[name] = remedied(learner, *remedies)
        except ValueError as error:
            raise ValueError(f"variant '{name}': {error}") from None
    return found


def others_than(seeds: Sequence[int], count: int) -> list[int]:
    """Returns `count` seeds above the largest of `seeds`."""
    first = int(np.max(seeds)) + 1
    return list(range(first, first + count))


def confirm(
    bought: pd.DataFrame,
    tried: Sequence[Ladder],
    seeds: Sequence[int],
    lanes_of: Callable[[str, Sequence[Ladder], Sequence[int]], pd.DataFrame],
    level: float,
) -> pd.DataFrame:
    """Measures the rows of `bought` whose interval excludes zero again, on fresh seeds.

    Args:
      bought: the table of `scoring.bought`.
      tried: the ladders of that table.
      seeds: the fresh seeds; with none, nothing is measured.
      lanes_of: `lanes_of(name, ladders, seeds)` trains a variant, or `PLAIN`, and returns its lanes' table.
      level: coverage of the intervals.

    Returns:
      the table of `scoring.confirmed`; no rows where no interval excludes zero.
    """
    standing = scoring.standing_out(bought) if seeds else bought.head(0)
    if not len(standing):
        return scoring.confirmed(bought.head(0), level)
    some = [ladder for ladder in tried if ladder.name in set(standing.perturbation)]
    plain = lanes_of(PLAIN, some, seeds)
    variants = {name: lanes_of(name, some, seeds) for name in dict.fromkeys(standing.variant)}
    cells = scoring.bought(plain, variants, some, level)
    wanted = set(zip(standing.variant, standing.perturbation, strict=True))
    keep = [pair in wanted for pair in zip(cells.variant, cells.perturbation, strict=True)]
    return scoring.confirmed(cells[keep].reset_index(drop=True), level)
