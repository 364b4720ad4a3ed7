"""What a search for margins found: one row for every perturbation, and a verdict in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from jaxaudit.analysis.statistics import FALLEN, seeds_for
from jaxaudit.runs.margins.directions import Direction
from jaxaudit.runs.margins.rounds import CONTROL, MarginEstimate, Probe, SearchConfig, found
from jaxaudit.runtime.registry import align_columns


def text(ray: Direction, u: float) -> str:
    """Returns the magnitudes of the parts, as text."""
    return "+".join(f"{m:.3g}" for m in ray.magnitudes(u))


def verdict(ray: Direction, one: MarginEstimate) -> str:
    """Returns a sentence on the margin."""
    value, low, high, _ = one.middle
    mildest, harshest = text(ray, ray.range.low), text(ray, ray.range.high)
    if not one.seeds:
        return "unknown: no seed has a collapse time"
    if one.fallen * 2 >= len(one.seeds):
        return FALLEN
    if math.isnan(value):
        return f"half of the seeds collapse at {mildest} already, the others not at {harshest}"
    if value == math.inf:
        half = sorted(b.middle for b in one.brackets)[(len(one.seeds) - 1) // 2]
        if math.isfinite(half):
            return f"half of the seeds collapse from {text(ray, half)} on, the others not up to {harshest}"
        return f"not reached up to {harshest}"
    if value == -math.inf:
        return f"collapses at the mildest magnitude tried, {mildest}"
    # A threshold lies above its bracket's low end, which was survived, and at its high end at most.
    if high <= 0:
        return f"collapses at {_up(math.exp(high)) + ' of ' if high else ''}the standard magnitude or less"
    if low >= 0:
        return f"holds {f'to at least {_down(math.exp(low))} times' if low else 'at'} the standard magnitude"
    if math.isnan(low):
        return f"{'collapses below' if value < 0 else 'holds at'} the standard magnitude, on one seed"
    return "too close to the standard magnitude to tell"


def _down(value: float) -> str:
    """Three digits, and not more than the value but for rounding."""
    return _to_three_digits(value, math.floor)


def _up(value: float) -> str:
    """Three digits, and not less than the value but for rounding."""
    return _to_three_digits(value, math.ceil)


def _to_three_digits(value: float, towards: Callable[[float], int]) -> str:
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return f"{towards(round(value / unit, 6)) * unit:.3g}"


HEADINGS = ("perturbation", "standard", "margin", "interval", "safety factor", "seeds", "evaluations", "verdict")


@dataclass(frozen=True)
class Margins:
    """The stability margins that a search has found, and how certain they are.

    Attributes:
      plan: what was searched, and how.
      probes: every lane that was trained, those of an earlier run among them.
      seeds: the seeds' numbers.
      criterion: "divergence" or "collapse".
      steps: the length of a run.
    """

    plan: SearchConfig
    probes: tuple[Probe, ...]
    seeds: tuple[int, ...]
    criterion: str
    steps: int

    @cached_property
    def found(self) -> list[MarginEstimate]:
        """Returns the estimates of all directions."""
        return found(self.plan, self.probes)

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row for every perturbation.

        Columns: `perturbation`, `onset` and `limit` (steps; a collapse before the limit counts, inf: any), `standard`
        (magnitude), `margin` with `low` and `high` (magnitudes of the interval, by rising harm) and `coverage`,
        `safety_factor` with `safety_low` and `safety_high` (how many times the standard; inf where not reached, 0
        where all that was tried collapses), `searched_from` and `searched_to` (magnitudes), `seeds`, of which
        `collapse_undisturbed`, `collapse_at_all_magnitudes`, `never_collapse`, `contradictory` (they survive a
        harsher magnitude than one they collapse at) and `unknown`; `checked` (seeds trained at exactly the margin),
        `collapsed_at_margin` (of them; NaN unless all were, with its `reason`), `evaluations` (lanes trained),
        `verdict`. A chain's magnitudes are its first part's.
        """
        return pd.DataFrame([self._row(one) for one in self.found])

    @cached_property
    def outcomes(self) -> pd.DataFrame:
        """One row for every lane, in the order of training.

        Columns: `round` (0: of the run that is searched), `perturbation` ("control" where undisturbed), `onset`,
        `seed`, `magnitude` (of the first part), `u` (log of the safety factor), `purpose` (control, scan of the
        magnitudes given, bracket, check of the margin, or run), `trained` (0: planned), `collapse_time` (steps; inf
        where there was none as far as the lane was trained: to the last step at which one that counts shows, or, in
        round 0, to the end; NaN where it cannot be known), `collapsed` (1 where it counts).
        """
        rows = []
        for p in self.probes:
            ray = None if p.ray == CONTROL else self.plan.rays[p.ray]
            time = math.nan if p.time is None else p.time
            fell = math.nan if math.isnan(time) else float(time < self.plan.limits[p.onset])
            rows.append(
                {
                    "round": p.round,
                    "perturbation": ray.name if ray else "control",
                    "onset": p.onset,
                    "seed": self.seeds[p.seed],
                    "magnitude": ray.magnitudes(p.u)[0] if ray else math.nan,
                    "u": p.u,
                    "purpose": p.purpose,
                    "trained": int(p.time is not None),
                    "collapse_time": time,
                    "collapsed": fell,
                }
            )
        return pd.DataFrame(rows)

    def __str__(self) -> str:
        rows = [_cells(self.plan.rays[one.ray], one, row) for row, one in zip(self._rows, self.found, strict=True)]
        return "\n".join([*align_columns([HEADINGS, *rows]), "", *self.notes])

    @property
    def notes(self) -> list[str]:
        """Returns sentences on how to read the table."""
        level = self.plan.level
        notes = [f"margin: the magnitude from which half of the seeds collapse; {self._counted()}"]
        fewest = min((row["seeds"] - row["unknown"] for row in self._rows), default=0)
        covers = sorted({row["coverage"] for row in self._rows})
        reach = " to ".join(f"{100 * c:.3g}%" for c in dict.fromkeys((covers[0], covers[-1]))) if covers else ""
        notes.append(f"interval: order statistics of the seeds' thresholds, exact coverage {reach}")
        if fewest < seeds_for(level):
            notes[-1] += f" ({fewest} seeds allow no more; {100 * level:g}% takes {seeds_for(level)})"
        late = sorted({str(o) for o, limit in self.plan.limits.items() if math.isinf(limit)}, key=int)
        if self.criterion == "divergence" and late:
            notes.append(f"onset {', '.join(late)}: no step of the run's first half follows, so any collapse counts")
        for row in self._rows:
            if row["contradictory"]:
                notes.append(
                    f"{row['perturbation']}: {row['contradictory']} of {row['seeds']} seeds survive a harsher "
                    "magnitude than one they collapse at; the interval is widened accordingly"
                )
            if row["unknown"]:
                notes.append(f"{row['perturbation']}: for {row['unknown']} seeds no collapse time can be computed")
        return notes

    def _counted(self) -> str:
        limits = sorted(set(self.plan.limits.values()))
        if self.criterion == "collapse" or all(map(math.isinf, limits)):
            return "any collapse counts"
        return f"a collapse counts if it begins before step {limits[0]:g}, half of the run (P_div)"

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        return self.table.to_dict("records")

    def _row(self, one: MarginEstimate) -> dict[str, Any]:
        ray, middle, plan = self.plan.rays[one.ray], one.middle, self.plan
        always = sum(-math.inf < b.high <= ray.range.low for b in one.brackets)
        row: dict[str, Any] = {
            "perturbation": ray.name,
            "onset": ray.onset,
            "limit": plan.limits[ray.onset],
            "standard": ray.magnitudes(0.0)[0],
        }
        for name, u in zip(("margin", "low", "high"), middle[:3], strict=True):
            row[name] = _magnitude(ray, u)
        if middle.value == -math.inf and one.fallen * 2 < len(one.seeds):
            row["margin"] = math.nan  # somewhere between neutral and the mildest that was tried
        row["coverage"] = middle.coverage
        for name, u in zip(("safety_factor", "safety_low", "safety_high"), middle[:3], strict=True):
            row[name] = math.exp(_snapped(ray, u))
        return row | {
            "searched_from": ray.magnitudes(ray.range.low)[0],
            "searched_to": ray.magnitudes(ray.range.high)[0],
            "seeds": len(ray.seeds),
            "collapse_undisturbed": one.fallen,
            "collapse_at_all_magnitudes": always,
            "never_collapse": sum(ray.range.high <= b.low for b in one.brackets),
            "contradictory": one.contradictory,
            "unknown": one.unknown,
            **self._check(one),
            "evaluations": sum(p.ray == one.ray and p.round > 0 for p in self.probes),
            "verdict": verdict(ray, one),
        }

    def _check(self, one: MarginEstimate) -> dict[str, Any]:
        """How many seeds were trained at exactly the margin and collapsed, or why that cannot be said."""
        ray, value, n = self.plan.rays[one.ray], one.middle.value, len(one.seeds)
        if value == -math.inf and one.fallen * 2 >= n:
            return {"checked": n, "collapsed_at_margin": one.fallen, "reason": ""}  # the margin is neutral
        there = _at(ray, one, value) if math.isfinite(value) else []
        if there and len(there) == n:
            return {"checked": n, "collapsed_at_margin": sum(there), "reason": ""}
        reason = "there is no margin among the magnitudes tried"
        if math.isfinite(value):
            reason = f"{len(there)} of {n} seeds were trained at it"
            checks = [p.u for p in self.probes if p.ray == one.ray and p.purpose == "check" and p.time is not None]
            if checks and len(nearby := _at(ray, one, checks[-1])) == n:
                reason = (
                    f"it moved when seeds were tried at {text(ray, checks[-1])}, where {sum(nearby)} of {n} collapse"
                )
        return {"checked": len(there), "collapsed_at_margin": math.nan, "reason": reason}


def _magnitude(ray: Direction, u: float) -> float:
    """The first part's magnitude: neutral at -inf; NaN at inf, for none is known there."""
    return math.nan if math.isnan(u) or u == math.inf else ray.magnitudes(u)[0]


def _at(ray: Direction, one: MarginEstimate, u: float) -> list[bool]:
    """Whether they collapsed, of the seeds trained at the magnitudes of u."""
    there = ray.magnitudes(u)
    known = ([fell for tried, fell in seen.items() if ray.magnitudes(tried) == there] for seen in one.outcomes)
    return [fell[0] for fell in known if fell]


def _snapped(ray: Direction, u: float) -> float:
    """The u of the magnitude that is meant, which may have to be a whole number."""
    return ray.range.snap(u) if math.isfinite(u) else u


def _cells(ray: Direction, one: MarginEstimate, row: dict[str, Any]) -> list[str]:
    value, low, high, _ = one.middle
    return [
        ray.name,
        text(ray, 0.0),
        text(ray, value) if math.isfinite(value) else "-",
        _interval(ray, low, high),
        f"{math.exp(_snapped(ray, value)):.3g}" if math.isfinite(value) else "-",
        str(row["seeds"]),
        str(row["evaluations"]),
        row["verdict"],
    ]


def _interval(ray: Direction, low: float, high: float) -> str:
    if math.isnan(low):
        return "-"
    if low >= ray.range.high:
        return f"beyond {text(ray, ray.range.high)}"
    beyond = f"beyond {text(ray, ray.range.high)}"
    return f"{text(ray, low)} to {text(ray, high) if math.isfinite(high) else beyond}"
