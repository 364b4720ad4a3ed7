"""How lanes run fastest here: measured, where a grid leaves it open."""

from __future__ import annotations

import time
from dataclasses import replace

from jaxaudit.execution.engine import Engine
from jaxaudit.grid import Grid, Phase

LANES = 4
"""Lanes of each device in a measurement; fewer where the grid has fewer."""

WARM, TIMED = 1, 2
"""Steps."""


def settle(grid: Grid) -> tuple[Grid, dict[str, float]]:
    """A grid with its execution chosen, and lane steps per second of what was tried; none if it was chosen before.

    All devices run their lanes side by side ("vmap") or one after the other ("map"), or one device does one lane
    after the other with all threads to itself. The widest fork group is what is measured, on its first steps.
    """
    if grid.program.execution != "auto":
        return grid, {}
    found = {name: (candidate, _speed(candidate)) for name, candidate in _candidates(grid).items()}
    best = max(found, key=lambda name: found[name][1])
    return found[best][0], {name: speed for name, (_, speed) in found.items()}


def _candidates(grid: Grid) -> dict[str, Grid]:
    devices = grid.program.devices
    programs = {name: replace(grid.program, execution=name) for name in ("vmap", "map")}
    if len(devices) > 1 and devices[0].platform == "cpu":
        programs["map on one device"] = replace(grid.program, execution="map", devices=devices[:1])
    return {name: replace(grid, program=program) for name, program in programs.items()}


def _speed(grid: Grid) -> float:
    """Lane steps per second."""
    widest = max(grid.groups(baseline=False), key=grid.count)
    lanes = min(grid.batch or grid.count(widest), LANES * len(grid.program.devices))
    engine = Engine(replace(grid, batch=lanes), TIMED)
    phase = Phase(widest)
    states, _ = engine.advance(phase, engine.initial(phase), 0, WARM)
    begun = time.perf_counter()
    engine.advance(phase, states, WARM, WARM + TIMED)
    return TIMED * engine.grid.share(widest) / (time.perf_counter() - begun)
