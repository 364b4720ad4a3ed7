"""Each seed's threshold by bisection, and the median of the thresholds: arithmetic alone, nothing is trained here.

The axis u rises with harm. Seeds keep their random numbers whatever the magnitude, so whether one collapses is a
function of u: a step at the seed's threshold, if harm only grows. The share of collapsed seeds then crosses one half
at the median of the thresholds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxaudit.analysis.statistics import ranks

DECADE = math.log(10.0)


class Bracket(NamedTuple):
    """Where a threshold lies: above `low`, at or below `high`; infinite where no magnitude bounds it."""

    low: float
    high: float

    @property
    def width(self) -> float:
        """Its length; zero where both ends are the same infinity."""
        return 0.0 if self.low == self.high else self.high - self.low

    @property
    def middle(self) -> float:
        """Its middle; infinite where an end is."""
        return self.low if self.low == self.high else (self.low + self.high) / 2


ALWAYS = Bracket(-math.inf, -math.inf)
"""The threshold of a seed that collapses undisturbed."""


def _as_it_is(u: float) -> float:
    return u


@dataclass(frozen=True)
class Range:
    """What may be tried.

    Attributes:
      low, high: the mildest and the harshest u.
      neutral: whether `low` disturbs nothing, so that its outcome is the control's.
      snap: the mildest u, from a given one on, that can be tried.
    """

    low: float
    high: float
    neutral: bool = False
    snap: Callable[[float], float] = _as_it_is

    @property
    def floor(self) -> float:
        """A u that is known not to collapse a seed whose control does not."""
        return self.low if self.neutral else -math.inf


def bracket(outcomes: Mapping[float, bool], floor: float = -math.inf) -> Bracket:
    """The neighbours around the step that contradicts the fewest outcomes (u -> collapsed), the mildest of several."""
    points = sorted(outcomes)
    fell = np.array([outcomes[u] for u in points], bool)
    wrong = np.r_[0, fell.cumsum()] + np.r_[(~fell)[::-1].cumsum()[::-1], 0]
    cut = int(wrong.argmin())
    return Bracket(points[cut - 1] if cut else floor, points[cut] if cut < len(points) else math.inf)


def envelope(outcomes: Mapping[float, bool], floor: float = -math.inf) -> Bracket:
    """From below the mildest collapse to above the harshest survival: `bracket`, unless outcomes are contradictory."""
    points = sorted(outcomes)
    first = next((i for i, u in enumerate(points) if outcomes[u]), len(points))
    last = next((i for i in reversed(range(len(points))) if not outcomes[points[i]]), -1)
    low = points[first - 1] if first else floor
    return Bracket(low, points[last + 1] if last + 1 < len(points) else math.inf)


def contradictory(outcomes: Mapping[float, bool]) -> bool:
    """Whether a harsher u than one that collapsed did not collapse."""
    fell = [outcomes[u] for u in sorted(outcomes)]
    return fell != sorted(fell)


def is_open(one: Bracket, allowed: Range, tolerance: float) -> bool:
    """Whether a bracket is wider than the tolerance and something inside it can be tried."""
    return one.width > tolerance and bool(proposals(one, 1, allowed))


def proposals(one: Bracket, count: int, allowed: Range) -> list[float]:
    """At most `count` u inside a bracket: evenly spaced, or decade after decade where a side is unbounded."""
    if math.isfinite(one.low) and math.isfinite(one.high):
        tries = [one.low + one.width * i / (count + 1) for i in range(1, count + 1)]
    elif math.isfinite(one.low):
        tries = [min(one.low + DECADE * i, allowed.high) for i in range(1, count + 1)]
    elif math.isfinite(one.high):
        tries = [max(one.high - DECADE * i, allowed.low) for i in range(1, count + 1)]
    else:
        tries = []
    return sorted({u for u in map(allowed.snap, tries) if one.low < u < one.high})


class Median(NamedTuple):
    """The median threshold with its interval, on the axis u; -inf or inf where it lies beyond what was tried."""

    value: float
    low: float
    high: float
    coverage: float


def median(brackets: Sequence[Bracket], envelopes: Sequence[Bracket], level: float = 0.95) -> Median:
    """The median of thresholds known by brackets, with the interval of `ranks` between the envelopes' outer ends.

    NaN where half of the thresholds are -inf and half inf, or there are none; the interval is NaN for a single one.
    """
    n = len(brackets)
    if not n:
        return Median(math.nan, math.nan, math.nan, 0.0)
    middles = sorted(one.middle for one in brackets)
    with np.errstate(invalid="ignore"):
        value = float(np.mean([middles[(n - 1) // 2], middles[n // 2]]))
    low, high, coverage = ranks(n, level)
    if n < 2:
        return Median(value, math.nan, math.nan, coverage)
    ends = sorted(one.low for one in envelopes)[low - 1], sorted(one.high for one in envelopes)[high - 1]
    return Median(value, *ends, coverage)


END = 0.1
"""How well an end of the interval is found, as a share of its distance from the median."""


def needed(brackets: Sequence[Bracket], tolerance: float, level: float = 0.95) -> list[bool]:
    """Which brackets still matter to the median, or to its interval's ends.

    The q-th smallest threshold lies between the q-th smallest lower and the q-th smallest upper end; a bracket
    that touches none of these spans has nothing more to tell, nor where the spans it touches are within the
    tolerance; for an end far from the median that is a share of the distance.
    """
    n = len(brackets)
    first, last, _ = ranks(n, level)
    lows, highs = sorted(b.low for b in brackets), sorted(b.high for b in brackets)
    low, mid, mid_too, high = (Bracket(lows[q - 1], highs[q - 1]) for q in (first, (n + 1) // 2, n // 2 + 1, last))
    spans = [(mid, 0.0), (mid_too, 0.0), (low, mid.low - low.high), (high, high.low - mid_too.high)]
    unsure = [span for span, away in spans if span.width > max(tolerance, END * away)]
    return [any(b.low < span.high and span.low < b.high for span in unsure) for b in brackets]


def room(one: Bracket, allowed: Range, tolerance: float) -> tuple[float, int]:
    """How wide a bracket is inside what may be tried, and the most `proposals` it has a use for."""
    inside = Bracket(max(one.low, allowed.low), min(one.high, allowed.high))
    bounded = math.isfinite(one.low) and math.isfinite(one.high)
    pieces = one.width / tolerance - 1 if bounded else inside.width / DECADE
    return inside.width, max(1, math.ceil(pieces - 1e-9))


def deal(rooms: Sequence[tuple[float, int]], lanes: int) -> list[int]:
    """How many of the `lanes` each open bracket of some `room` gets: one, then more where the pieces are widest."""
    counts = [1] * len(rooms)
    widest = [(-width / 2, i) for i, (width, most) in enumerate(rooms) if most > 1]
    heapq.heapify(widest)
    for _ in range(lanes - len(counts)):
        if not widest:
            break
        _, i = heapq.heappop(widest)
        counts[i] += 1
        width, most = rooms[i]
        if counts[i] < most:
            heapq.heappush(widest, (-width / (counts[i] + 1), i))
    return counts
