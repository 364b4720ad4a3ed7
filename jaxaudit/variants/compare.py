"""`compare(...)`: a learner and variants of it, disturbed alike: what stability each buys, and what is paid."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd

from jaxaudit.auditing import audit
from jaxaudit.grid import plan
from jaxaudit.learner import Learner
from jaxaudit.margins.search import margin
from jaxaudit.metrics import MetricSettings
from jaxaudit.perturbations.core import Chain, Perturbation
from jaxaudit.remedied_learner import remedied, same_beginning
from jaxaudit.remedies import Remedy
from jaxaudit.results import lane_table
from jaxaudit.variants import scoring, timing
from jaxaudit.variants.design import REACH, Line, lines
from jaxaudit.variants.words import cautions, text

PLAIN = "plain"
"""What the learner without the variants' remedies is called."""

Centre = Literal["margin", "given"]
CENTRES: tuple[Centre, ...] = ("margin", "given")

TOLERANCE = 0.1
"""Relative, of the plain learner's margin, which the magnitudes are laid about."""

SCREENED, FRESH = 8, 16
"""Seeds that everything is tried on, and fresh ones for what stands out, unless told otherwise."""


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
      bought: one row for each variant and perturbation; see `scoring.bought`.
      confirmed: those that stood out, on fresh seeds; the same columns with `p_holm` and `confirmed`.
      paid: one row for each variant; see `scoring.paid`; with `step_time`, how many times the plain learner's a step
        takes undisturbed, with `_low` and `_high`, where steps were timed.
      acted: one row for each variant, remedy and perturbation; see `scoring.acted`.
      lines: what was tried.
      structures: names of the variants whose networks or settings make another program of the learner itself: their
        lanes share with the plain learner's the seed alone.
      lanes: the lanes of every variant, "plain" among them, by name: columns as in a run's `metrics.csv`.
      level: coverage of the intervals.
    """

    bought: pd.DataFrame
    confirmed: pd.DataFrame
    paid: pd.DataFrame
    acted: pd.DataFrame
    lines: tuple[Line, ...]
    structures: tuple[str, ...]
    lanes: Mapping[str, pd.DataFrame] = field(repr=False)
    level: float = 0.95

    def json(self) -> dict[str, Any]:
        """The tables as lists of rows, NaN as None, and what to beware of."""
        tables = {"bought": self.bought, "confirmed": self.confirmed, "paid": self.paid, "acted": self.acted}
        found = {name: json.loads(rows.to_json(orient="records")) for name, rows in tables.items()}
        return found | {"cautions": cautions(self.bought, self.structures)}

    def __str__(self) -> str:
        return text(self.bought, self.confirmed, self.paid, self.acted, self.structures, self.level)


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
    turns: int = timing.TURNS,
    **how: Any,
) -> Comparison:
    """Disturbs a learner and variants of it alike, and says what each buys and what is paid for it.

    Each perturbation is tried at five magnitudes, 1/4 to 4 times the plain learner's margin. A seed's score is the
    number of magnitudes that it survives, and scores are compared seed by seed, with exact intervals. What stands out
    is tried again on fresh seeds, and p-values are adjusted for their number (Holm). What is paid is the difference of
    undisturbed performance, and of the time of a step.

    Args:
      learner: the plain one.
      variants: by name, remedies for it, or another learner on the same task.
      perturbations: each with its window and target; magnitudes are where the search for the margin begins.
      seeds: how many, or which, everything is tried on.
      fresh: how many others confirm what stands out; 0: nothing is confirmed.
      steps: of a run.
      centre: "margin": magnitudes are about the plain learner's margin, and about the one given where there is none;
        "given": about the one given, without a search.
      settings: windows of the metrics.
      level: coverage of the intervals.
      turns: in which steps are timed; 0: they are not.
      **how: how lanes run, as in `audit`: execution, devices, model_devices, matmul_precision.

    Raises:
      ValueError: as `audit` and `margin`; no variants, or one of a name that is taken; one sentence.
    """
    if centre not in CENTRES:
        raise ValueError(f"centre must be {' or '.join(map(repr, CENTRES))}, not {centre!r}")
    if isinstance(fresh, bool) or not isinstance(fresh, int) or fresh < 0:
        raise ValueError(f"fresh must be a number of seeds, not {fresh!r}")
    learners = {PLAIN: learner} | learners_of(learner, variants)
    chosen: Any = range(seeds) if isinstance(seeds, int) and not isinstance(seeds, bool) else seeds
    options: dict[str, Any] = {"steps": steps, "settings": settings, **how}
    found = None
    if centre == "margin":
        search: dict[str, Any] = {"tolerance": TOLERANCE, "reach": REACH, "criterion": "collapse", "level": level}
        found = margin(learner, perturbations, seeds=seeds, **options, **search)
    tried = lines(perturbations, steps, found)

    def lanes_of(name: str, some: Sequence[Line], seeds: Sequence[int]) -> pd.DataFrame:
        acting = [one for line in some for one in line.perturbations]
        return lane_table(audit(learners[name], acting, seeds=seeds, **options).lanes)

    lanes = {name: lanes_of(name, tried, chosen) for name in learners}
    plain, others = lanes[PLAIN], {name: own for name, own in lanes.items() if name != PLAIN}
    bought = scoring.bought(plain, others, tried, level)
    confirmed = confirm(bought, tried, others_than(chosen, fresh), lanes_of, level)
    paid = scoring.paid(plain, others, tried, level)
    if turns:
        grids = {name: plan(one, [], seeds=chosen, steps=steps, tail=steps, **how) for name, one in learners.items()}
        times = timing.step_seconds(grids, turns)
        ratios = [timing.relative(times[name], times[PLAIN], level) for name in others]
        paid = paid.assign(**pd.DataFrame(ratios))
    structures = tuple(name for name in others if not same_beginning(learners[name], learner))
    return Comparison(bought, confirmed, paid, scoring.acted(others, tried), tuple(tried), structures, lanes, level)


def learners_of(learner: Learner, variants: Mapping[str, Learner | Remedy | Sequence[Remedy]]) -> dict[str, Learner]:
    """The variants as learners, by name. Raises ValueError, in one sentence."""
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
    """As many seeds after the largest of some."""
    first = int(np.max(seeds)) + 1
    return list(range(first, first + count))


def confirm(
    bought: pd.DataFrame,
    tried: Sequence[Line],
    seeds: Sequence[int],
    lanes_of: Callable[[str, Sequence[Line], Sequence[int]], pd.DataFrame],
    level: float,
) -> pd.DataFrame:
    """The cells that stand out among those screened, measured again on other seeds; no rows where there are none.

    Args:
      bought: what was screened, as `scoring.bought` gives it.
      tried: its lines.
      seeds: the fresh ones; none: nothing is confirmed.
      lanes_of: `lanes_of(name, lines, seeds)`, the lanes of a variant, or of `PLAIN`, on some lines and seeds.
      level: coverage of the intervals.

    Returns:
      the columns of `scoring.confirmed`.
    """
    standing = scoring.standing_out(bought) if seeds else bought.head(0)
    if not len(standing):
        return scoring.confirmed(bought.head(0), level)
    some = [line for line in tried if line.name in set(standing.perturbation)]
    plain = lanes_of(PLAIN, some, seeds)
    variants = {name: lanes_of(name, some, seeds) for name in dict.fromkeys(standing.variant)}
    cells = scoring.bought(plain, variants, some, level)
    wanted = set(zip(standing.variant, standing.perturbation, strict=True))
    keep = [pair in wanted for pair in zip(cells.variant, cells.perturbation, strict=True)]
    return scoring.confirmed(cells[keep].reset_index(drop=True), level)
