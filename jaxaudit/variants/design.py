"""What a comparison tries: each perturbation at five magnitudes about the margin of the plain learner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxaudit.margins.rays import Ray, rays
from jaxaudit.margins.table import Margins
from jaxaudit.perturbations.core import Chain, Perturbation, Sweep

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""The magnitudes tried, as multiples of the margin of the plain learner, or of the magnitude given."""

REACH = 100.0
"""How many times beyond the magnitudes given the margin of the plain learner is looked for."""


@dataclass(frozen=True)
class Line:
    """A perturbation at several magnitudes, from mild to harsh.

    Attributes:
      name: its own among the lines of a comparison.
      onset: step.
      perturbations: what acts at each magnitude; for a single perturbation one with a sweep.
      magnitudes: of the first part, by rising harm.
      factors: each magnitude as a multiple of the centre.
      centre: "margin" or "given".
    """

    name: str
    onset: int
    perturbations: tuple[Perturbation | Chain, ...]
    magnitudes: tuple[float, ...]
    factors: tuple[float, ...]
    centre: str


def lines(perturbations: Sequence[Perturbation | Chain], steps: int, margins: Margins | None = None) -> list[Line]:
    """The lines of a comparison in runs of `steps`; without margins the centre of each is the magnitude given.

    A magnitude that is the neutral one, or beyond what means something, is left out.

    Raises:
      ValueError: a perturbation has neutral or infinite magnitudes alone, or there is nothing that disturbs.
    """
    found = list(rays(perturbations, steps, 1, REACH)) if margins is None else list(margins.plan.rays)
    if not found:
        raise ValueError("nothing is disturbed, so there is nothing to compare at")
    middles = [math.nan] * len(found) if margins is None else [one.middle.value for one in margins.found]
    return [_line(ray, u) for ray, u in zip(found, middles, strict=True)]


def _line(ray: Ray, margin: float) -> Line:
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
    return Line(ray.name, ray.onset, acting, first, tuple(tried.values()), "margin" if known else "given")


def conditions_of(found: Sequence[Line]) -> list[tuple[int, ...]]:
    """For each line the positions of its control and its conditions in a grid of all lines' perturbations."""
    places: list[tuple[int, ...]] = [()] * len(found)
    position = 0
    for onset in sorted({line.onset for line in found}):
        control, position = position, position + 1
        for number, line in enumerate(found):
            if line.onset == onset:
                places[number] = (control, *range(position, position + len(line.magnitudes)))
                position += len(line.magnitudes)
    return places
