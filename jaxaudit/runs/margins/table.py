"""The result of a margin search: one row for every perturbation, with a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pandas as pd

from jaxaudit.analysis.result_table import ResultTable, TableCell, count
from jaxaudit.analysis.statistics import FALLEN, seeds_for
from jaxaudit.runs.margins.bisection import CONTROL, MarginEstimate, Probe, SearchConfig, estimate_margins
from jaxaudit.runs.margins.directions import Direction
from jaxaudit.runtime import registry
from jaxaudit.runtime.registry import align_columns

if TYPE_CHECKING:
    import altair

HEADINGS = ("perturbation", "standard", "margin", "interval", "safety factor", "seeds", "evaluations", "verdict")


def verdict(estimate: MarginEstimate) -> str:
    """Returns a sentence that compares a margin with the standard magnitude."""
    direction, (value, low, high, _) = estimate.direction, estimate.median
    mildest, harshest = direction.format(direction.low), direction.format(direction.high)
    if not estimate.seeds:
        return "unknown: no seed has a collapse time"
    if estimate.half_collapse_undisturbed:
        return FALLEN
    if math.isnan(value):
        return f"half of the seeds collapse at {mildest} already, the others not at {harshest}"
    if value == math.inf:
        half = sorted(b.middle for b in estimate.brackets)[(len(estimate.seeds) - 1) // 2]
        if math.isfinite(half):
            return f"half of the seeds collapse from {direction.format(half)} on, the others not up to {harshest}"
        return f"not reached up to {harshest}"
    if value == -math.inf:
        return f"collapses at the mildest magnitude tried, {mildest}"
    # A seed survives at its bracket's low end, and collapses at the high end.
    if high <= 0:
        return f"collapses at {_round_up(math.exp(high)) + ' of ' if high else ''}the standard magnitude or less"
    if low >= 0:
        return f"holds {f'to at least {_round_down(math.exp(low))} times' if low else 'at'} the standard magnitude"
    if math.isnan(low):
        return f"{'collapses below' if value < 0 else 'holds at'} the standard magnitude, on one seed"
    return "too close to the standard magnitude to tell"


def _round_down(value: float) -> str:
    return _to_three_digits(value, math.floor)


def _round_up(value: float) -> str:
    return _to_three_digits(value, math.ceil)


def _to_three_digits(value: float, rounding: Callable[[float], int]) -> str:
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{rounding(round(value / unit, 6)) * unit:.3g}"  # the inner rounding removes floating-point errors


@dataclass(frozen=True)
class Margins:
    """The stability margins that a search has found, with their intervals.

    Attributes:
      plan: the directions that were searched, and how.
      probes: every lane that was trained, including those of an earlier run.
      seeds: the seeds' numbers.
      criterion: "divergence" or "collapse".
      steps: the length of a run.
      trending: the onsets before which performance was itself rising or falling.
    """

    plan: SearchConfig
    probes: tuple[Probe, ...]
    seeds: tuple[int, ...]
    criterion: str
    steps: int
    trending: tuple[int, ...] = ()

    @cached_property
    def estimates(self) -> list[MarginEstimate]:
        """The margin estimate of each direction, as log scales."""
        return estimate_margins(self.plan, self.probes)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The table of margins, with one row for every perturbation.

        Columns: `perturbation`, `onset` and `limit` (steps; a collapse before the limit counts, inf: any), `standard`
        (magnitude), `margin` with `low` and `high` (magnitudes of the interval, from mild to harsh) and `coverage`,
        `safety_factor` with `safety_low` and `safety_high` (how many times the standard; inf where not reached, 0
        where all that was tried collapses), `searched_from` and `searched_to` (magnitudes), `seeds`, of which
        `collapse_undisturbed`, `collapse_at_all_magnitudes`, `never_collapse`, `contradictory` (they survive a
        harsher magnitude than one they collapse at) and `unknown`; `checked` (seeds trained at exactly the margin),
        `collapsed_at_margin` (of them; NaN unless all were, with its `reason`), `evaluations` (lanes trained),
        `verdict`. A chain's magnitudes are its first part's.
        """
        return pd.DataFrame([self._row(estimate) for estimate in self.estimates])

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """The outcomes of all lanes, with one row for every lane, in the order of training.

        Columns: `round` (0: of the run that is searched), `perturbation` ("control" where undisturbed), `onset`,
        `seed`, `magnitude` (of the first part), `u` (the log scale, which is the log of the safety factor), `purpose`
        (control, scan of the magnitudes given, bracket, check of the margin, or run), `trained` (0: planned),
        `collapse_time` (steps; inf if the lane did not collapse while it was trained: in round 0 to the run's end, in
        others until a collapse that counts would have been recognised; NaN where it cannot be known), `collapsed` (1 if
        the collapse counts).
        """
        rows = []
        for p in self.probes:
            direction = None if p.direction == CONTROL else self.plan.directions[p.direction]
            time = math.nan if p.collapse_time is None else p.collapse_time
            rows.append(
                {
                    "round": p.round,
                    "perturbation": direction.name if direction else "control",
                    "onset": p.onset,
                    "seed": self.seeds[p.seed],
                    "magnitude": direction.magnitudes(p.log_scale)[0] if direction else math.nan,
                    "u": p.log_scale,
                    "purpose": p.purpose,
                    "trained": int(p.collapse_time is not None),
                    "collapse_time": time,
                    "collapsed": math.nan if math.isnan(time) else float(time < self.plan.limits[p.onset]),
                }
            )
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        rows = [_cells(estimate, row) for estimate, row in zip(self.estimates, self._rows, strict=True)]
        return "\n".join([*align_columns([HEADINGS, *rows]), "", *self.notes])

    def _repr_html_(self) -> str:
        rows = [[TableCell(text) for text in _cells(*pair)] for pair in zip(self.estimates, self._rows, strict=True)]
        facts = ", ".join([count(len(rows), "perturbation"), count(len(self.seeds), "seed"), count(self.steps, "step")])
        return ResultTable("Stability margins:", f"{facts}.", [], HEADINGS, rows, self.notes).html()

    def plot(self) -> altair.ConcatChart:
        """Draws the margin of each perturbation in multiples of its standard magnitude.

        Each row has the seeds' thresholds, the margin with its interval, and the range of magnitudes that was searched.

        Raises:
          ModuleNotFoundError: altair and vl-convert are not installed.
        """
        return registry.plots["margins"](self)

    @property
    def notes(self) -> list[str]:
        """The notes below the table, each one line of text.

        The first two define the margin and its interval; the second also says if the seeds are too few for the
        confidence level. Further notes name onsets in the second half of the run, where any collapse counts; onsets
        before which performance was itself rising or falling; perturbations with seeds that survive a harsher magnitude
        than one at which they collapse; and those with seeds whose collapse time is unknown.
        """
        level = self.plan.level
        notes = [f"margin: the magnitude from which half of the seeds collapse; {self._criterion_note()}"]
        coverages = sorted({row["coverage"] for row in self._rows})
        ends = dict.fromkeys((coverages[0], coverages[-1])) if coverages else {}
        coverage = " to ".join(f"{100 * end:.3g}%" for end in ends)
        notes.append(f"interval: order statistics of the seeds' thresholds, exact coverage {coverage}")
        fewest = min((row["seeds"] - row["unknown"] for row in self._rows), default=0)
        if fewest < seeds_for(level):
            notes[-1] += f" ({fewest} seeds allow no more; {100 * level:g}% takes {seeds_for(level)})"
        late = [str(onset) for onset, limit in sorted(self.plan.limits.items()) if math.isinf(limit)]
        if self.criterion == "divergence" and late:
            notes.append(f"onset {', '.join(late)}: no step of the run's first half follows, so any collapse counts")
        if self.trending:
            notes.append(
                f"onset {', '.join(map(str, self.trending))}: performance was itself rising or falling before it, "
                "which widens the band that a collapse has to leave, so margins may come out too large; a later "
                "onset, or a smaller window of the metrics, avoids this"
            )
        for row in self._rows:
            if row["contradictory"]:
                notes.append(
                    f"{row['perturbation']}: {row['contradictory']} of {row['seeds']} seeds survive a harsher "
                    "magnitude than one they collapse at; the interval is widened accordingly"
                )
            if row["unknown"]:
                notes.append(f"{row['perturbation']}: for {row['unknown']} seeds no collapse time can be computed")
        return notes

    def _criterion_note(self) -> str:
        first = min(self.plan.limits.values(), default=math.inf)
        if self.criterion == "collapse" or math.isinf(first):
            return "any collapse counts"
        return f"a collapse counts if it begins before step {first:g}, half of the run (P_div)"

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return self.table.to_dict("records")

    def _row(self, estimate: MarginEstimate) -> dict[str, Any]:
        direction, median = estimate.direction, estimate.median
        margin, low, high = (_first_magnitude(direction, log_scale) for log_scale in median[:3])
        if median.value == -math.inf and not estimate.half_collapse_undisturbed:
            margin = math.nan  # it lies between neutral and the mildest magnitude that was tried
        safety, safety_low, safety_high = (math.exp(direction.snap(log_scale)) for log_scale in median[:3])
        return {
            "perturbation": direction.name,
            "onset": direction.onset,
            "limit": self.plan.limits[direction.onset],
            "standard": direction.magnitudes(0.0)[0],
            "margin": margin,
            "low": low,
            "high": high,
            "coverage": median.coverage,
            "safety_factor": safety,
            "safety_low": safety_low,
            "safety_high": safety_high,
            "searched_from": direction.magnitudes(direction.low)[0],
            "searched_to": direction.magnitudes(direction.high)[0],
            "seeds": len(direction.seeds),
            "collapse_undisturbed": estimate.n_collapsed_undisturbed,
            "collapse_at_all_magnitudes": sum(-math.inf < b.high <= direction.low for b in estimate.brackets),
            "never_collapse": sum(direction.high <= b.low for b in estimate.brackets),
            "contradictory": estimate.n_contradictory,
            "unknown": len(direction.seeds) - len(estimate.seeds),
            **self._check(estimate),
            "evaluations": sum(p.direction == estimate.index and p.round > 0 for p in self.probes),
            "verdict": verdict(estimate),
        }

    def _check(self, estimate: MarginEstimate) -> dict[str, Any]:
        """Returns how many seeds were trained at exactly the margin and collapsed, or why that is unknown."""
        margin, n = estimate.median.value, len(estimate.seeds)
        if margin == -math.inf and estimate.half_collapse_undisturbed:
            # The margin is the neutral magnitude.
            return {"checked": n, "collapsed_at_margin": estimate.n_collapsed_undisturbed, "reason": ""}
        at_margin = _outcomes_at(estimate, margin) if math.isfinite(margin) else []
        if at_margin and len(at_margin) == n:
            return {"checked": n, "collapsed_at_margin": sum(at_margin), "reason": ""}
        reason = "there is no margin among the magnitudes tried"
        if math.isfinite(margin):
            reason = f"{len(at_margin)} of {n} seeds were trained at it"
            probes = [p for p in self.probes if p.direction == estimate.index and p.collapse_time is not None]
            checks = [p.log_scale for p in probes if p.purpose == "check"]
            if checks and len(at_check := _outcomes_at(estimate, checks[-1])) == n:
                magnitudes = estimate.direction.format(checks[-1])
                reason = (
                    f"the margin moved when all seeds were tried at {magnitudes}, where {sum(at_check)} of {n} collapse"
                )
        return {"checked": len(at_margin), "collapsed_at_margin": math.nan, "reason": reason}


def _first_magnitude(direction: Direction, log_scale: float) -> float:
    """Returns the first part's magnitude: the neutral one at -inf, and NaN at inf, where no magnitude is known."""
    return math.nan if math.isnan(log_scale) or log_scale == math.inf else direction.magnitudes(log_scale)[0]


def _outcomes_at(estimate: MarginEstimate, log_scale: float) -> list[bool]:
    """Returns whether each seed that was trained at the magnitudes of a log scale collapsed."""
    magnitudes_at = estimate.direction.magnitudes
    magnitudes, collapsed_at = magnitudes_at(log_scale), []
    for outcomes in estimate.outcomes:
        matches = [collapsed for other, collapsed in outcomes.items() if magnitudes_at(other) == magnitudes]
        collapsed_at += matches[:1]
    return collapsed_at


def _cells(estimate: MarginEstimate, row: dict[str, Any]) -> list[str]:
    direction, (value, low, high, _) = estimate.direction, estimate.median
    margin = safety_factor = interval = "-"
    if math.isfinite(value):
        margin, safety_factor = direction.format(value), f"{row['safety_factor']:.3g}"
    beyond = f"beyond {direction.format(direction.high)}"
    if low >= direction.high:
        interval = beyond
    elif not math.isnan(low):
        interval = f"{direction.format(low)} to {direction.format(high) if math.isfinite(high) else beyond}"
    counts = [str(row["seeds"]), str(row["evaluations"])]
    return [direction.name, direction.format(0.0), margin, interval, safety_factor, *counts, row["verdict"]]
