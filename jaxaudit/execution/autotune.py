"""Chooses the fastest way to run a grid's lanes, by measuring it if the grid leaves it open."""

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

TIMED_STEPS = 3
"""The number of timed steps, of which the fastest counts; they follow one untimed step."""

FEW_LANES = 4
"""The number of lanes per GPU or TPU up to which they may be as fast one after the other as side by side."""


def autotune_local(grid: Grid, rows: int, resident: bool = False) -> tuple[Grid, dict[str, float]]:
    """Returns `autotune` of a grid that this process trains alone; raises ValueError for devices of several processes.

    `rows` and `resident` are as in `memory.fit`.
    """
    if grid.program.across_hosts:
        raise ValueError(
            "audit() and margin() train in the memory of one process, on jax.local_devices(); to train on several "
            "hosts, write a spec and use: jaxaudit run --distributed"
        )
    return autotune(grid, rows, resident=resident)


def autotune(
    grid: Grid, rows: int, deal: Callable[..., Plan] = layout, resident: bool = False, beside: int = 1
) -> tuple[Grid, dict[str, float]]:
    """Returns a grid with its execution chosen, and the lane steps per second of each candidate that was measured.

    Nothing is measured if the grid's execution is not "auto". Candidates are: all devices run their lanes side by side
    ("vmap"), all run them one after the other ("map"), or, on CPUs, a single device or row of devices that share a lane
    runs them one after the other with all threads. Each is measured on the first steps of the widest fork group, with
    as many lanes at a time as a run would have. Candidates that do not fit in memory are left out. GPUs and TPUs that
    have memory for more than `FEW_LANES` lanes each run them side by side, and "map" is not measured.

    Args:
      grid: the grid.
      rows: the largest number of steps in a call of the engine.
      deal: `deal(grid, max_lanes)` returns a plan with batches of at most `max_lanes` lanes.
      resident, beside: as in `memory.fit`.

    Raises:
      UserError: no candidate fits in memory.
    """
    if grid.program.execution != "auto":
        return grid, {}
    grids = candidates(grid)
    speeds: dict[str, float] = {}
    skip_map = False
    for name, candidate in grids.items():
        if skip_map and candidate.program.execution == "map":
            continue
        try:
            speeds[name], lanes = _speed(candidate, rows, deal, resident, beside)
            skip_map = skip_map or underuses_accelerator(candidate, lanes)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
                raise
            misfit = error
        release_memory()
    if not speeds:
        raise UserError(f"no way to run the lanes fits in memory: {misfit}")
    return grids[max(speeds, key=speeds.__getitem__)], speeds


def candidates(grid: Grid) -> dict[str, Grid]:
    """Returns the grid with each execution that `autotune` considers, by the name of the execution."""
    devices = grid.program.devices
    programs = {name: replace(grid.program, execution=name) for name in ("vmap", "map")}
    shared = grid.program.model_devices
    if len(devices) > shared and devices[0].platform == "cpu":
        name = "map on one device" if shared == 1 else f"map on {shared} devices"
        programs[name] = replace(grid.program, execution="map", devices=devices[:shared])
    return {name: replace(grid, program=program) for name, program in programs.items()}


def underuses_accelerator(grid: Grid, lanes: int) -> bool:
    """Returns whether `lanes` lanes, one after the other on each device, would leave most of a GPU or TPU idle."""
    return accelerated(grid) and lanes > FEW_LANES * grid.program.groups


def accelerated(grid: Grid) -> bool:
    """Returns whether a grid's devices are accelerators, such as GPUs or TPUs."""
    return grid.program.devices[0].platform != "cpu"


def _speed(grid: Grid, rows: int, deal: Callable[..., Plan], resident: bool, beside: int) -> tuple[float, int]:
    """Returns the lane steps per second of a grid's widest batch, and its number of lanes."""
    engine, batches, _ = memory.fit(grid, rows, partial(deal, grid), resident, beside)
    batch = max(batches, key=lambda batch: (batch.disturbed, len(batch.seeds)))
    states, seconds = engine.initial(batch), []
    for step in range(1 + TIMED_STEPS):
        start = time.perf_counter()
        states, _ = engine.advance(batch, states, min(step, grid.steps - 1), min(step + 1, grid.steps))
        seconds.append(time.perf_counter() - start)
    return len(batch.seeds) / min(seconds[1:]), len(batch.seeds)
