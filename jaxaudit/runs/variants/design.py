"""The design of a comparison: each perturbation at five magnitudes around the margin of the plain learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.perturbation import Chain, Perturbation, Sweep
from jaxaudit.runs.margins.directions import Direction, directions
from jaxaudit.runs.margins.table import Margins

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The magnitudes that are tried, as multiples of the plain learner's margin, or of the magnitude given."""

REACH = 100.0
"""How far beyond the magnitude given, as a factor, the plain learner's margin is searched for."""


@dataclass(frozen=True)
class Ladder:
    """A perturbation at several magnitudes, from mild to harsh.

    Attributes:
      name: the perturbation's name, unique among the ladders of a comparison.
      onset: the step at which it begins.
      perturbations: what is audited: one perturbation with a sweep of magnitudes, or a chain for each magnitude.
      magnitudes: those of the first part of a chain, from the least to the most harmful.
      factors: each magnitude divided by the one in the centre.
      centre: what the magnitude in the centre is: "margin", the plain learner's, or "given", the one in the spec.
    """

    name: str
    onset: int
    perturbations: tuple[Perturbation | Chain, ...]
    magnitudes: tuple[float, ...]
    factors: tuple[float, ...]
    centre: str

    def json(self) -> dict[str, Any]:
        """Returns what is tried, in JSON's types."""
        return {
            "perturbation": self.name,
            "onset": self.onset,
            "centre": self.centre,
            "magnitudes": list(self.magnitudes),
        }


def magnitude_ladders(
    perturbations: Sequence[Perturbation | Chain], steps: int, margins: Margins | None = None
) -> list[Ladder]:
    """Returns a ladder of magnitudes for each perturbation.

    Magnitudes that are neutral or outside the range of the perturbation are left out.

    Args:
      perturbations: each with its window, target, and the magnitude given.
      steps: the length of the runs.
      margins: the plain learner's margins; None: each ladder is centred on the magnitude given.

    Raises:
      ValueError: a perturbation has only neutral or infinite magnitudes, or there is no perturbation.
    """
    found = list(directions(perturbations, steps, 1, REACH)) if margins is None else list(margins.plan.rays)
    if not found:
        raise ValueError("there is no perturbation to compare variants under")
    middles = [math.nan] * len(found) if margins is None else [one.middle.value for one in margins.found]
    return [_ladder(ray, u) for ray, u in zip(found, middles, strict=True)]


def _ladder(ray: Direction, margin: float) -> Ladder:
    known = math.isfinite(margin)
    begin = margin if known else ray.points[(len(ray.points) - 1) // 2]
    tried: dict[tuple[float, ...], float] = {}
    for factor in FACTORS:
        magnitudes = ray.magnitudes(begin + math.log(factor))
        if magnitudes[0] != ray.axes[0].part.neutral:
            tried.setdefault(magnitudes, factor)
    parts = [
        tuple(replace(axis.part, magnitude=m) for axis, m in zip(ray.axes, magnitudes, strict=True))
        for magnitudes in tried
    ]
    acting: tuple[Perturbation | Chain, ...]
    if len(ray.axes) == 1:
        acting = (replace(parts[0][0], magnitude=Sweep(tuple(magnitudes[0] for magnitudes in tried))),)
    else:
        acting = tuple(Chain(one) for one in parts)
    first = tuple(magnitudes[0] for magnitudes in tried)
    return Ladder(ray.name, ray.onset, acting, first, tuple(tried.values()), "margin" if known else "given")


def check_windows(ladders: Sequence[Ladder], steps: int, settings: MetricSettings) -> None:
    """Raises ValueError if a run is too short for a collapse to be recognised."""
    for ladder in ladders:
        left = steps - ladder.onset
        if left < settings.hold:
            raise ValueError(
                f"no collapse could be recognised: only {left} steps follow the onset of {ladder.name}, fewer than "
                f"hold = {settings.hold} in the metrics' windows"
            )


def conditions_of(found: Sequence[Ladder]) -> list[tuple[int, ...]]:
    """Returns, for each ladder, the positions of its control and its conditions in the grid of all ladders."""
    places: list[tuple[int, ...]] = [()] * len(found)
    position = 0
    for onset in sorted({ladder.onset for ladder in found}):
        control, position = position, position + 1
        for number, ladder in enumerate(found):
            if ladder.onset == onset:
                places[number] = (control, *range(position, position + len(ladder.magnitudes)))
                position += len(ladder.magnitudes)
    return places
