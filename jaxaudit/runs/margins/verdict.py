"""A margin in words."""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxaudit.analysis.statistics import FALLEN
from jaxaudit.runs.margins.directions import Direction
from jaxaudit.runs.margins.rounds import MarginEstimate


def text(ray: Direction, u: float) -> str:
    """Each part's magnitude at u."""
    return "+".join(f"{m:.3g}" for m in ray.magnitudes(u))


def verdict(ray: Direction, one: MarginEstimate) -> str:
    """A margin in words."""
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
