"""How lanes run fastest here: measured, where a grid leaves it open."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax

from jaxaudit.core.batches import Plan, layout
from jaxaudit.core.grid import Grid
from jaxaudit.execution import memory
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import release_memory

TIMED = 3
"""Steps that are timed, after one that is not; the fastest counts."""

FEW = 4
"""Lanes of a GPU or TPU that may be as fast one after the other as side by side: more leave most of it idle."""


def autotune(
    grid: Grid, rows: int, deal: Callable[..., Plan] = layout, resident: bool = False, beside: int = 1
) -> tuple[Grid, dict[str, float]]:
    """A grid with its execution chosen, and lane steps per second of what was tried; none if it was chosen before.

    All devices run their lanes side by side ("vmap") or one after the other ("map"), or one device, or one row of those
    that share a lane, does one lane after the other with all threads to itself. Each is measured on the widest fork
    group's first steps, with as many lanes at a time as it would have; what does not fit in memory is left out. GPUs
    and TPUs that have room for more than a few lanes side by side (`FEW` each) run them so, and "map" is not measured.

    Args:
      grid: what is to run.
      rows: the engine's.
      deal: lays a grid out in batches of at most so many lanes.
      resident, beside: as for `memory.fit`.

    Raises:
      UserError: too little memory for any.
    """
    if grid.program.execution != "auto":
        return grid, {}
    tried = candidates(grid)
    found: dict[str, float] = {}
    idle = False
    for name, candidate in tried.items():
        if idle and candidate.program.execution == "map":
            continue
        try:
            found[name], lanes = _speed(candidate, rows, deal, resident, beside)
            idle = idle or many(candidate, lanes)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            misfit = error
        release_memory()
    if not found:
        raise UserError(f"no way to run the lanes fits in memory: {misfit}")
    return tried[max(found, key=found.__getitem__)], found


def candidates(grid: Grid) -> dict[str, Grid]:
    """The ways there are to run a grid, by name."""
    devices = grid.program.devices
    programs = {name: replace(grid.program, execution=name) for name in ("vmap", "map")}
    shared = grid.program.model_devices
    if len(devices) > shared and devices[0].platform == "cpu":
        name = "map on one device" if shared == 1 else f"map on {shared} devices"
        programs[name] = replace(grid.program, execution="map", devices=devices[:shared])
    return {name: replace(grid, program=program) for name, program in programs.items()}


def many(grid: Grid, lanes: int) -> bool:
    """Whether a batch of so many lanes, one after the other on each device, leaves most of a GPU or TPU idle."""
    return accelerated(grid) and lanes > FEW * grid.program.groups


def accelerated(grid: Grid) -> bool:
    """Whether a grid's devices are GPUs or TPUs, say, and no CPUs."""
    return grid.program.devices[0].platform != "cpu"


def _speed(grid: Grid, rows: int, deal: Callable[..., Plan], resident: bool, beside: int) -> tuple[float, int]:
    """Lane steps per second, and how many lanes a batch had."""
    engine, plan, _ = memory.fit(grid, rows, partial(deal, grid), resident, beside)
    batch = max(plan, key=lambda batch: (batch.disturbed, len(batch.seeds)))
    states, seconds = engine.initial(batch), []
    for step in range(1 + TIMED):
        begun = time.perf_counter()
        states, _ = engine.advance(batch, states, min(step, grid.steps - 1), min(step + 1, grid.steps))
        seconds.append(time.perf_counter() - begun)
    return len(batch.seeds) / min(seconds[1:]), len(batch.seeds)
