"""Computes the memory that a grid needs from its compiled programs, and how many lanes at a time fit in free memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax

from jaxaudit.core.batches import Batch, Plan, layout
from jaxaudit.core.grid import Grid
from jaxaudit.core.program import VECTOR, WHOLE_VECTORS_FROM, telemetry_shapes
from jaxaudit.execution.engine import Engine
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import available_host_memory, format_bytes

SHARE = 0.9
"""The share of the free memory that batches may need, which leaves some for other processes."""

LIBRARIES = 2**25
"""The bytes that the libraries need which read and write a run's files."""

PlanOf = Callable[[int | None], Plan]
"""A function that returns a plan whose batches have at most the given number of lanes."""


@dataclass(frozen=True)
class Needs:
    """The peak memory of some batches, in bytes.

    Attributes:
      total: the memory of the devices, which for CPUs is the host's.
      host: the memory of the host besides; zero for CPUs.
      lane: the share of one lane in the largest program.
    """

    total: int
    host: int
    lane: int


def fit(
    grid: Grid, rows: int, plan_of: PlanOf | None = None, resident: bool = False, beside: int = 1
) -> tuple[Engine, Plan, Needs]:
    """Returns an engine, a plan of batches that fit in the free memory, and the memory that they need.

    If the grid does not set the batch size, batches are as large as possible. The bytes of a compiled program are
    assumed to be linear in its number of lanes. The chosen program is compiled, checked, and then used by the engine.

    Args:
      grid: the grid; if `batch` is None, the batch size is chosen.
      rows: the largest number of steps in a call of the engine.
      plan_of: returns the plan for a largest number of lanes in a batch, or without limit for None; by default the
        grid's `layout`.
      resident: as in `needs`.
      beside: the number of processes that share the memory, each with a separate batch.

    Raises:
      UserError: there is too little memory; the message contains the numbers.
    """
    plan_of = plan_of or partial(layout, grid)
    free, groups = available_memory(grid.program.devices), grid.program.groups
    free = None if free is None else free // beside
    engine, max_lanes, measured = Engine(grid, rows), grid.batch, []
    while True:
        plan = plan_of(max_lanes)
        widest = max(plan, key=lambda batch: batch.width)
        width = widest.width
        estimate = width * engine.placed_bytes(widest) + (_resident_bytes(engine, resident) if _on_cpus(grid) else 0)
        limit = math.inf if free is None else free if grid.batch else SHARE * free
        if grid.batch or estimate <= limit:
            engine.compile([widest, *plan])
            needed = needs(engine, plan if grid.batch else [widest], resident)
            if needed.total <= limit:
                needed = needs(engine, plan, resident)
            if needed.total <= limit:
                _check_host_memory(needed)
                return engine, plan, needed
            measured.append((width, estimate := needed.total))
        if grid.batch:
            raise UserError(
                f"{width} lanes at a time need about {format_bytes(estimate)} of memory and {format_bytes(free or 0)} "
                'are available; take fewer, or lanes = "auto"'
            )
        if width <= groups:
            few = "one lane" if groups == 1 else f"{groups} lanes, one on {_each(grid)},"
            raise UserError(
                f"{few} and their data need about {format_bytes(estimate)} of memory and {format_bytes(free or 0)} are "
                "available"
            )
        max_lanes = _fewer(measured or [(width, estimate)], width - 1, limit, groups)


def _each(grid: Grid) -> str:
    shared = grid.program.model_devices
    return "each device" if shared == 1 else f"every {shared} devices"


def _check_host_memory(needed: Needs) -> None:
    free = available_host_memory() if needed.host else 0
    if needed.host > free:
        raise UserError(
            f"the grid needs about {format_bytes(needed.host)} of the host's memory and {format_bytes(free)} are free"
        )


def _fewer(measured: list[tuple[int, int]], max_lanes: int, free: float, groups: int) -> int:
    """Returns a number of lanes, at most `max_lanes`, that should fit in `free` bytes, in whole vectors per group.

    It extrapolates the last two of the `measured` pairs (lanes, bytes) linearly.
    """
    (above, high), (below, low) = measured[-1], measured[-2] if len(measured) > 1 else (0, 0)
    slope = (high - low) / (above - below)
    fitting = above - (high - free) / slope if slope > 0 else above / 2
    each = max(1, min(max_lanes, int(max(fitting, 0))) // groups)
    return groups * (each // VECTOR * VECTOR if each > WHOLE_VECTORS_FROM else each)


def needs(engine: Engine, plan: Plan, resident: bool = False) -> Needs:
    """Returns the memory that batches need when they run one after the other; this compiles their programs.

    `resident` says whether the baseline's states at the onsets and all telemetry stay on the host.
    """
    batches = list({(batch.fork, batch.width): batch for batch in plan}.values())
    phases = [phase for batch in batches for phase in _phases(engine, batch)]
    always = _resident_bytes(engine, resident)
    lane = max(engine.program_bytes(batch) // batch.width for batch in batches)
    if _on_cpus(engine.grid):
        return Needs(max(map(sum, phases)) + always, 0, lane)
    return Needs(max(devices for devices, _ in phases), max(host for _, host in phases) + always, lane)


def _phases(engine: Engine, batch: Batch) -> Iterator[tuple[int, int]]:
    """Yields the bytes on the devices, and on the host besides, while a batch begins, is stored, and runs."""
    states = batch.width * engine.placed_bytes(batch)
    if batch.disturbed:
        piece = engine.piece_bytes()
        yield states + piece, piece
    else:
        yield engine.initial_bytes(batch), 0
    piece = engine.piece_bytes(batch)
    yield states, piece if _on_cpus(engine.grid) else 2 * piece
    yield engine.program_bytes(batch), 0


def _resident_bytes(engine: Engine, resident: bool) -> int:
    """Returns the bytes on the host that are needed during the whole run."""
    if not resident:
        return LIBRARIES
    grid = engine.grid
    onsets = len(grid.forks) * len(grid.seeds) * engine.lane_bytes()
    values = sum(math.prod(shape) for shape in telemetry_shapes(grid.program).values())
    return onsets + 4 * values * len(grid.seeds) * len(grid.conditions) * grid.steps


def _on_cpus(grid: Grid) -> bool:
    return grid.program.devices[0].platform == "cpu"


def available_memory(devices: tuple[jax.Device, ...]) -> int | None:
    """Returns the free bytes of the host for CPU devices, else of all devices together; None if they are unknown.

    Devices of other hosts are assumed to have as much free memory as the local ones.
    """
    if devices[0].platform == "cpu":
        return available_host_memory()
    local = [device for device in devices if device in jax.local_devices()]
    stats = [device.memory_stats() or {} for device in local]
    if not all("bytes_limit" in s for s in stats):
        return None
    return sum(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats) * len(devices) // len(local)
