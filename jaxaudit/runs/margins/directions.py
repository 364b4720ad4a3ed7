"""From neutral to as harsh as one likes: a perturbation's magnitudes on one axis, u, on which zero is the standard."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxaudit.analysis.statistics import ranks
from jaxaudit.core.perturbation import INTERVENTION
from jaxaudit.perturbations import Chain, Condition, Perturbation
from jaxaudit.runtime import registry

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
    """Returns the interval from below the mildest collapse to above the harshest survival, usually `bracket`."""
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


@dataclass(frozen=True)
class Axis:
    """One perturbation's magnitude as a function of u.

    Attributes:
      part: the perturbation at its reference magnitude, which is u = 0.

    A magnitude of the neutral one's sign is a *factor*: u moves its logarithm away from the neutral one's, so
    exp(u) is the ratio to the reference, or the reference's to it where less is worse (bits, moments that
    shrink). Any other is an *amount*: its distance from neutral is exp(u) times the reference's. An intervention's
    is the reference at every u.
    """

    part: Perturbation

    @property
    def fixed(self) -> bool:
        """Whether it is an intervention's: what helps grows no harsher."""
        return self.part.dimension == INTERVENTION

    @property
    def _reference(self) -> float:
        return _magnitude(self.part)

    @property
    def factor(self) -> bool:
        """Whether magnitudes multiply a value, so that the neutral one is 1."""
        return is_factor(self.part, self._reference)

    @property
    def up(self) -> bool:
        """Whether harm grows with the magnitude."""
        return self._reference > self.part.neutral

    @property
    def lowest(self) -> float:
        """The log scale of the neutral magnitude."""
        return -abs(math.log(self._reference / self.part.neutral)) if self.factor else -math.inf

    @property
    def highest(self) -> float:
        """The u of the harshest magnitude that means something; inf where there is none."""
        limit = self.part.kind.limits[1 if self.up else 0]
        if math.isinf(limit) or (self.factor and limit / self.part.neutral <= 0):
            return math.inf
        return self.u(limit)

    def u(self, magnitude: float) -> float:
        """Where a magnitude lies; it must be on the reference's side of neutral."""
        if self.factor:
            apart = abs(math.log(magnitude / self.part.neutral))
            return apart + self.lowest
        return math.log((magnitude - self.part.neutral) / (self._reference - self.part.neutral))

    def magnitude(self, u: float) -> float:
        """The magnitude at u: neutral below `lowest`, the limit above `highest`."""
        neutral = self.part.neutral
        if self.fixed:
            return self._reference
        if u >= self.highest:
            return self.part.kind.limits[1 if self.up else 0]
        if self.factor:
            ratio = self._reference / neutral
            magnitude = neutral * math.exp(math.copysign(max(abs(math.log(ratio)) + u, 0.0), math.log(ratio)))
        else:
            magnitude = neutral + (self._reference - neutral) * math.exp(u)
        # The logarithms' rounding is not worth showing: 3.0000000000000004.
        return self._whole(magnitude) if self.part.kind.whole else float(f"{magnitude:.12g}")

    def snap(self, u: float) -> float:
        """The mildest u, from this one on, whose magnitude means something."""
        return self.u(self.magnitude(u)) if self.part.kind.whole else u

    def _whole(self, magnitude: float) -> float:
        """The next whole magnitude away from neutral; what is whole but for rounding stays."""
        near = round(magnitude)
        if abs(magnitude - near) < 1e-6 and near != self.part.neutral:
            return float(near)
        return float(math.ceil(magnitude) if self.up else math.floor(magnitude))


@dataclass(frozen=True)
class Direction:
    """What is searched: a perturbation in one direction from neutral, or a chain whose parts grow together.

    Attributes:
      name: its own among the rays of a search.
      axes: one for each part.
      onset: step.
      points: u of the magnitudes that were asked for.
      range: what may be tried.
      seeds: positions of the seeds it is searched on.
    """

    name: str
    axes: tuple[Axis, ...]
    onset: int
    points: tuple[float, ...]
    range: Range
    seeds: tuple[int, ...]

    def magnitudes(self, u: float) -> tuple[float, ...]:
        """Returns the magnitude of each part of a chain."""
        return tuple(axis.magnitude(u) for axis in self.axes)

    def condition(self, u: float) -> Condition:
        """The perturbation at u, as a column of a grid."""
        parts = tuple(replace(axis.part, magnitude=axis.magnitude(u)) for axis in self.axes)
        return Condition(parts, self.onset, self.name, "")

    def position(self, condition: Condition, steps: int) -> float | None:
        """The u at which this ray is a condition of a run of `steps`; None if it nowhere is."""
        if len(condition.parts) != len(self.axes) or condition.onset != self.onset:
            return None
        if any(not _same(axis, part, steps) for axis, part in zip(self.axes, condition.parts, strict=True)):
            return None
        parts = zip(self.axes, condition.parts, strict=True)
        found = [axis.u(_magnitude(part)) for axis, part in parts if not axis.fixed]
        if max(found) - min(found) > 1e-9 or self.range.snap(found[0]) - found[0] > 1e-9:
            return None
        return found[0]


def is_factor(part: Perturbation, magnitude: float) -> bool:
    """Whether a magnitude of a perturbation is a multiple of its neutral one, of the same sign."""
    return part.neutral != 0 and magnitude / part.neutral > 0


def directions(perturbations: Sequence[Perturbation | Chain], steps: int, seeds: int, reach: float) -> list[Direction]:
    """The rays through the magnitudes of some perturbations, in a run of `steps` with that many `seeds`.

    A sweep's magnitudes on one side of neutral are points of one ray, whose reference is the kind's standard
    magnitude if that is on this side, else the first given. Every combination of a chain's is a ray. A ray reaches
    `reach` times beyond its points, or to the magnitude's limit. Neutral and infinite magnitudes are passed over, and
    so is what has interventions alone.

    Raises:
      ValueError: a perturbation has no other magnitudes, and so neither a direction nor a distance.
    """
    disturbing = [one for one in perturbations if one.dimension != INTERVENTION]
    found = [ray for one in disturbing for ray in _rays(one, steps, tuple(range(seeds)), reach)]
    return [replace(ray, name=name) for ray, name in zip(found, _names(found, steps), strict=True)]


def _rays(one: Perturbation | Chain, steps: int, seeds: tuple[int, ...], reach: float) -> Iterator[Direction]:
    onset = min(part.when.resolve(steps)[0] for part in one.parts)
    magnitudes = [_usable(part) for part in one.parts]
    if isinstance(one, Chain):
        for values in itertools.product(*magnitudes):
            axes = tuple(Axis(replace(p, magnitude=v)) for p, v in zip(one.parts, values, strict=True))
            name = " + ".join(f"{axis.part.name} {axis.part.magnitude:g}" for axis in axes)
            yield Direction(name, axes, onset, (0.0,), _range(axes, (0.0,), reach), seeds)
        return
    sides: dict[tuple[bool, bool], list[float]] = {}
    for magnitude in magnitudes[0]:
        sides.setdefault(_side(one, magnitude), []).append(magnitude)
    standard = _standard(one)
    for side, given in sides.items():
        reference = standard if standard is not None and _side(one, standard) == side else given[0]
        axes = (Axis(replace(one, magnitude=reference)),)
        points = tuple(sorted({axes[0].u(m) for m in given}))
        yield Direction(one.name, axes, onset, points, _range(axes, points, reach), seeds)


def _usable(part: Perturbation) -> list[float]:
    """The magnitudes that have a direction and a distance from neutral; of an intervention, all."""
    if part.dimension == INTERVENTION:
        return list(part.magnitudes)
    found = [m for m in part.magnitudes if m != part.neutral and math.isfinite(m)]
    if not found:
        magnitude = part.magnitudes[0]
        why = "disturbs nothing" if magnitude == part.neutral else "is infinite"
        raise ValueError(f"magnitude {magnitude:g} of '{part.name}' {why}, so there is no margin to search from it")
    return found


def _side(part: Perturbation, magnitude: float) -> tuple[bool, bool]:
    return is_factor(part, magnitude), magnitude > part.neutral


def _standard(part: Perturbation) -> float | None:
    """The standard magnitude of a perturbation's kind; None if the kind is not registered."""
    if part.name not in registry.perturbations or registry.perturbations[part.name] != part.kind:
        return None
    standard = part.kind().magnitudes[0]
    return None if standard == part.neutral or math.isinf(standard) else standard


def _range(axes: tuple[Axis, ...], points: tuple[float, ...], reach: float) -> Range:
    free = [axis for axis in axes if not axis.fixed]
    if any(axis.part.kind.sized for axis in free):
        reach = 1.0  # lanes have room for the largest magnitude that was asked for
    neutral = min(axis.lowest for axis in free)
    high = min(max(points) + math.log(reach), max(axis.highest for axis in free))
    low = neutral if math.isfinite(neutral) else min(points) - math.log(reach)
    found = Range(low, high, math.isfinite(neutral))
    if len(axes) > 1:
        return found
    return replace(found, low=low if found.neutral else axes[0].snap(low), snap=axes[0].snap)


def _magnitude(part: Perturbation) -> float:
    """The one magnitude of a part whose sweep is unrolled."""
    return float(part.magnitude)  # type: ignore[arg-type]


def _same(axis: Axis, part: Perturbation, steps: int) -> bool:
    """Whether `part` is what the axis varies, at some magnitude on its side."""
    mine, theirs = ((p.kind, p.target, p.when.resolve(steps)) for p in (axis.part, part))
    magnitude, own = _magnitude(part), _magnitude(axis.part)
    if axis.fixed:
        return mine == theirs and magnitude == own
    usable = magnitude != part.neutral and math.isfinite(magnitude)
    return mine == theirs and usable and _side(part, magnitude) == _side(part, own)


def _names(found: Sequence[Direction], steps: int) -> list[str]:
    """Each ray's name, with as much of its target, onset, duration and direction as tells it from its namesakes."""
    several = len({ray.onset for ray in found}) > 1
    names = [f"{ray.name} @{ray.onset}" if several else ray.name for ray in found]
    for detail in (_target, _direction, lambda ray: _duration(ray, steps)):
        alike = [[i for i, name in enumerate(names) if name == mine] for mine in names]
        for i, same in enumerate(alike):
            if len({detail(found[j]) for j in same}) > 1:
                names[i] += detail(found[i])
    seen: dict[str, int] = {}
    for i, name in enumerate(names):
        seen[name] = seen.get(name, 0) + 1
        names[i] = name if seen[name] == 1 else f"{name} #{seen[name]}"
    return names


def _target(ray: Direction) -> str:
    targets = dict.fromkeys(axis.part.target for axis in ray.axes if axis.part.target)
    return f" on {', '.join(targets)}" if targets else ""


def _direction(ray: Direction) -> str:
    axis = ray.axes[0]
    if not axis.factor and axis.part.neutral:
        return " inverted"
    return f" {'above' if axis.up else 'below'} {axis.part.neutral:g}"


def _duration(ray: Direction, steps: int) -> str:
    start, stop, *_ = ray.axes[0].part.when.resolve(steps)
    return f" for {stop - start} steps"
