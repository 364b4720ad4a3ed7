"""Directions of a margin search, in which the magnitude of a perturbation is mapped to a log scale for bisection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jaxaudit.core.perturbation import INTERVENTION, check_perturbations
from jaxaudit.perturbations import Chain, Condition, Perturbation
from jaxaudit.runtime import registry


@dataclass(frozen=True)
class Axis:
    """Maps the magnitude of one perturbation to a log scale, on which the reference magnitude is 0.

    A magnitude with the sign of the neutral one is a *factor*: the log scale moves its logarithm away from the neutral
    one's. So exp(log scale) is the ratio to the reference, or the reference's ratio to the magnitude where smaller ones
    are harsher (bits, moments that shrink). Any other magnitude is an *amount*: its distance from neutral is
    exp(log scale) times the reference's. An intervention has the reference magnitude at every log scale.

    Attributes:
      perturbation: the perturbation at its reference magnitude.
    """

    perturbation: Perturbation

    @property
    def is_fixed(self) -> bool:
        """Whether the perturbation is an intervention, whose magnitude stays the same."""
        return self.perturbation.dimension == INTERVENTION

    @property
    def is_factor(self) -> bool:
        """Whether the magnitude multiplies a value, so that the neutral magnitude is 1."""
        return _is_factor(self.perturbation, self._reference)

    @property
    def is_increasing(self) -> bool:
        """Whether larger magnitudes are harsher than smaller ones."""
        return self._reference > self.perturbation.neutral

    @property
    def lowest(self) -> float:
        """The log scale of the neutral magnitude."""
        return -abs(math.log(self._reference / self.perturbation.neutral)) if self.is_factor else -math.inf

    @property
    def highest(self) -> float:
        """The log scale of the harshest magnitude that the kind allows; inf where there is no limit."""
        limit = self._limit
        if math.isinf(limit) or (self.is_factor and limit / self.perturbation.neutral <= 0):
            return math.inf
        return self.log_scale(limit)

    def log_scale(self, magnitude: float) -> float:
        """Returns the log scale of a magnitude, which must be on the reference's side of neutral."""
        neutral = self.perturbation.neutral
        if self.is_factor:
            return abs(math.log(magnitude / neutral)) + self.lowest
        return math.log((magnitude - neutral) / (self._reference - neutral))

    def magnitude(self, log_scale: float) -> float:
        """Returns the magnitude at a log scale: the neutral one below `lowest`, and the limit above `highest`."""
        neutral = self.perturbation.neutral
        if self.is_fixed:
            return self._reference
        if log_scale >= self.highest:
            return self._limit
        if self.is_factor:
            log_ratio = math.log(self._reference / neutral)
            magnitude = neutral * math.exp(math.copysign(max(abs(log_ratio) + log_scale, 0.0), log_ratio))
        else:
            magnitude = neutral + (self._reference - neutral) * math.exp(log_scale)
        if self.perturbation.kind.whole:
            return self._round_away_from_neutral(magnitude)
        return float(f"{magnitude:.12g}")  # without the rounding error of the logarithms, as in 3.0000000000000004

    def snap(self, log_scale: float) -> float:
        """Returns the mildest log scale, from this one on, whose magnitude the kind allows."""
        return self.log_scale(self.magnitude(log_scale)) if self.perturbation.kind.whole else log_scale

    def covers(self, other: Perturbation, steps: int) -> bool:
        """Returns whether a perturbation in a run of `steps` is this axis' perturbation at some log scale."""
        mine, theirs = ((p.kind, p.target, p.when.resolve(steps)) for p in (self.perturbation, other))
        magnitude = _single_magnitude(other)
        if self.is_fixed:
            return mine == theirs and magnitude == self._reference
        return (
            mine == theirs
            and _has_direction(other, magnitude)
            and _side(other, magnitude) == _side(self.perturbation, self._reference)
        )

    @property
    def _reference(self) -> float:
        return _single_magnitude(self.perturbation)

    @property
    def _limit(self) -> float:
        return self.perturbation.kind.limits[1 if self.is_increasing else 0]

    def _round_away_from_neutral(self, magnitude: float) -> float:
        nearest = round(magnitude)
        if abs(magnitude - nearest) < 1e-6 and nearest != self.perturbation.neutral:
            return float(nearest)  # the difference is a rounding error
        return float(math.ceil(magnitude) if self.is_increasing else math.floor(magnitude))


@dataclass(frozen=True)
class Direction:
    """One search for a margin: a perturbation on one side of neutral, or a chain whose parts are scaled together.

    Attributes:
      name: a name that no other direction of the search has.
      axes: one axis for each part.
      onset: the step at which the perturbation's window opens.
      initial: the log scales of the magnitudes that were given, where the search begins.
      reach: how many times beyond its initial magnitudes the search extends.
      seeds: indices of the seeds on which the margin is searched.
    """

    name: str
    axes: tuple[Axis, ...]
    onset: int
    initial: tuple[float, ...]
    reach: float
    seeds: tuple[int, ...]

    @cached_property
    def floor(self) -> float:
        """The log scale of the neutral magnitude, at which seeds collapse only if their control does; often -inf."""
        return min(axis.lowest for axis in self._scaled_axes)

    @cached_property
    def low(self) -> float:
        """The mildest log scale that can be tried, which is `floor` if that is finite."""
        return self.floor if math.isfinite(self.floor) else self.snap(min(self.initial) - math.log(self.reach))

    @cached_property
    def high(self) -> float:
        """The harshest log scale that can be tried."""
        if any(axis.perturbation.kind.sized for axis in self._scaled_axes):
            return max(self.initial)  # lanes have room for the largest magnitude that was given, and no larger one
        return min(max(self.initial) + math.log(self.reach), max(axis.highest for axis in self._scaled_axes))

    def snap(self, log_scale: float) -> float:
        """Returns the mildest log scale, from this one on, that can be tried; it may be infinite."""
        return self.axes[0].snap(log_scale) if len(self.axes) == 1 and math.isfinite(log_scale) else log_scale

    def magnitudes(self, log_scale: float) -> tuple[float, ...]:
        """Returns the magnitude of each part at a log scale."""
        return tuple(axis.magnitude(log_scale) for axis in self.axes)

    def format(self, log_scale: float) -> str:
        """Returns the magnitudes of the parts at a log scale, as text."""
        return "+".join(f"{magnitude:.3g}" for magnitude in self.magnitudes(log_scale))

    def parts(self, log_scale: float) -> tuple[Perturbation, ...]:
        """Returns the perturbation, or the parts of the chain, at a log scale."""
        return tuple(replace(axis.perturbation, magnitude=axis.magnitude(log_scale)) for axis in self.axes)

    def condition(self, log_scale: float) -> Condition:
        """Returns the perturbation or chain at a log scale as a condition of a grid."""
        return Condition(self.parts(log_scale), self.onset, self.name, "")

    def log_scale(self, condition: Condition, steps: int) -> float | None:
        """Returns the log scale at which this direction is a condition of a run of `steps`; None if there is none."""
        if len(condition.parts) != len(self.axes) or condition.onset != self.onset:
            return None
        pairs = list(zip(self.axes, condition.parts, strict=True))
        if not all(axis.covers(part, steps) for axis, part in pairs):
            return None
        scales = [axis.log_scale(_single_magnitude(part)) for axis, part in pairs if not axis.is_fixed]
        if max(scales) - min(scales) > 1e-9 or self.snap(scales[0]) - scales[0] > 1e-9:
            return None
        return scales[0]

    @property
    def _scaled_axes(self) -> list[Axis]:
        return [axis for axis in self.axes if not axis.is_fixed]


def directions(
    perturbations: Sequence[Perturbation | Chain], steps: int, n_seeds: int, reach: float
) -> list[Direction]:
    """Returns the directions in which the margins of perturbations are searched.

    The magnitudes of a sweep that are on one side of neutral belong to one direction. Its reference is the kind's
    standard magnitude if that is on the same side, and the first magnitude given otherwise. Each combination of a
    chain's magnitudes has a direction of its own. Neutral and infinite magnitudes are ignored, and so are
    perturbations that consist of interventions alone.

    Args:
      perturbations: perturbations and chains, with magnitudes or sweeps.
      steps: the length of the runs.
      n_seeds: the number of seeds; every direction is searched on all.
      reach: how many times beyond its given magnitudes a direction extends, up to the magnitude's limit.

    Raises:
      ValueError: all magnitudes of a perturbation are neutral or infinite, so that they have no direction.
    """
    check_perturbations(perturbations)
    unnamed = []
    for perturbation in perturbations:
        if perturbation.dimension == INTERVENTION:
            continue
        onset = min(part.when.resolve(steps)[0] for part in perturbation.parts)
        for name, axes, initial in _axes(perturbation):
            unnamed.append(Direction(name, axes, onset, initial, reach, tuple(range(n_seeds))))
    names = _unique_names(unnamed, steps)
    return [replace(direction, name=name) for direction, name in zip(unnamed, names, strict=True)]


def _axes(perturbation: Perturbation | Chain) -> Iterator[tuple[str, tuple[Axis, ...], tuple[float, ...]]]:
    """Yields the name, the axes and the initial log scales of each direction of a perturbation or chain."""
    magnitudes = [_searchable_magnitudes(part) for part in perturbation.parts]
    if isinstance(perturbation, Chain):
        for values in itertools.product(*magnitudes):
            parts = [replace(p, magnitude=value) for p, value in zip(perturbation.parts, values, strict=True)]
            yield " + ".join(f"{p.name} {p.magnitude:g}" for p in parts), tuple(map(Axis, parts)), (0.0,)
        return
    sides: dict[tuple[bool, bool], list[float]] = {}
    for magnitude in magnitudes[0]:
        sides.setdefault(_side(perturbation, magnitude), []).append(magnitude)
    standard = _standard_magnitude(perturbation)
    for side, on_side in sides.items():
        reference = standard if standard is not None and _side(perturbation, standard) == side else on_side[0]
        axis = Axis(replace(perturbation, magnitude=reference))
        yield perturbation.name, (axis,), tuple(sorted({axis.log_scale(magnitude) for magnitude in on_side}))


def _searchable_magnitudes(part: Perturbation) -> list[float]:
    if part.dimension == INTERVENTION:
        return list(part.magnitudes)
    searchable = [magnitude for magnitude in part.magnitudes if _has_direction(part, magnitude)]
    if not searchable:
        magnitude = part.magnitudes[0]
        reason = "disturbs nothing" if magnitude == part.neutral else "is infinite"
        raise ValueError(f"magnitude {magnitude:g} of '{part.name}' {reason}, so there is no margin to search from it")
    return searchable


def _has_direction(part: Perturbation, magnitude: float) -> bool:
    return magnitude != part.neutral and math.isfinite(magnitude)


def _is_factor(part: Perturbation, magnitude: float) -> bool:
    return part.neutral != 0 and magnitude / part.neutral > 0


def _side(part: Perturbation, magnitude: float) -> tuple[bool, bool]:
    return _is_factor(part, magnitude), magnitude > part.neutral


def _standard_magnitude(part: Perturbation) -> float | None:
    """Returns the standard magnitude of a registered kind; None if the kind has no searchable one."""
    if part.name not in registry.perturbations or registry.perturbations[part.name] != part.kind:
        return None
    standard = part.kind().magnitudes[0]
    return None if standard == part.neutral or math.isinf(standard) else standard


def _single_magnitude(part: Perturbation) -> float:
    return float(part.magnitude)  # type: ignore[arg-type]  # a sweep has been unrolled


def _unique_names(unnamed: Sequence[Direction], steps: int) -> list[str]:
    """Returns names with the details (onset, target, side, duration) by which directions of the same name differ."""
    several_onsets = len({direction.onset for direction in unnamed}) > 1
    names = [f"{direction.name} @{direction.onset}" if several_onsets else direction.name for direction in unnamed]
    for suffix in (_target_suffix, _side_suffix, lambda direction: _duration_suffix(direction, steps)):
        namesakes = [[i for i, name in enumerate(names) if name == own_name] for own_name in names]
        for i, indices in enumerate(namesakes):
            if len({suffix(unnamed[j]) for j in indices}) > 1:
                names[i] += suffix(unnamed[i])
    occurrences: dict[str, int] = {}
    for i, name in enumerate(names):
        occurrences[name] = occurrences.get(name, 0) + 1
        if occurrences[name] > 1:
            names[i] = f"{name} #{occurrences[name]}"
    return names


def _target_suffix(direction: Direction) -> str:
    targets = dict.fromkeys(axis.perturbation.target for axis in direction.axes if axis.perturbation.target)
    return f" on {', '.join(targets)}" if targets else ""


def _side_suffix(direction: Direction) -> str:
    axis = direction.axes[0]
    if not axis.is_factor and axis.perturbation.neutral:
        return " inverted"
    return f" {'above' if axis.is_increasing else 'below'} {axis.perturbation.neutral:g}"


def _duration_suffix(direction: Direction, steps: int) -> str:
    start, stop, *_ = direction.axes[0].perturbation.when.resolve(steps)
    return f" for {stop - start} steps"
