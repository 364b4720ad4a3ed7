"""What a grid needs, by its compiled programs, and how many lanes at a time the free memory can hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax

from jaxaudit.core.batches import Batch, Plan, layout
from jaxaudit.core.grid import Grid
from jaxaudit.core.program import VECTOR, WHOLE_VECTORS_FROM, telemetry_shapes
from jaxaudit.execution.engine import Engine
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import available_host_memory, format_bytes

SHARE = 0.9
"""How much of the free memory batches are made for: other processes come to need some, too."""

LIBRARIES = 2**25
"""Bytes that the libraries come to need which read and write a run's files."""


PlanOf = Callable[[int | None], Plan]
"""A plan of batches of at most so many lanes."""


@dataclass(frozen=True)
class Needs:
    """Bytes, at the moment that takes most.

    Attributes:
      total: of the memory that lanes live in: the devices', which for CPUs is the host's.
      host: of the host's besides; zero for CPUs.
      lane: one lane's share of the largest program.
    """

    total: int
    host: int
    lane: int


def fit(
    grid: Grid, rows: int, plan_of: PlanOf | None = None, resident: bool = False, beside: int = 1
) -> tuple[Engine, Plan, Needs]:
    """An engine, and a plan of batches that the free memory can hold: as large as can be if the grid leaves it open.

    The bytes of a compiled program are taken as linear in its lanes; what is chosen is compiled and checked, and is
    the program that then runs.

    Args:
      grid: `batch` None leaves the size open.
      rows: the engine's.
      plan_of: the plan in batches of at most so many lanes, None being as many as there are; the grid's own layout.
      resident: see `needs`.
      beside: processes that share the memory, each with a batch of its own.

    Raises:
      UserError: too little memory, with the numbers.
    """
    laid_out = plan_of or (lambda most: layout(grid, most))
    free, groups = available_memory(grid.program.devices), grid.program.groups
    free = None if free is None else free // beside
    engine, most, seen = Engine(grid, rows), grid.batch, []
    while True:
        plan = laid_out(most)
        widest = max(plan, key=lambda batch: batch.width)
        width = widest.width
        least = width * engine.placed_bytes(widest) + (_kept(engine, resident) if _on_cpus(grid) else 0)
        limit = math.inf if free is None else free if grid.batch else SHARE * free
        if grid.batch or least <= limit:
            engine.compile([widest, *plan])
            needed = needs(engine, plan if grid.batch else [widest], resident)
            if needed.total <= limit:
                needed = needs(engine, plan, resident)
            if needed.total <= limit:
                return engine, plan, _checked_on_host(needed)
            seen.append((width, least := needed.total))
        if grid.batch:
            raise UserError(
                f"{width} lanes at a time need about {format_bytes(least)} of memory and {format_bytes(free or 0)} are "
                'available; take fewer, or lanes = "auto"'
            )
        if width <= groups:
            few = "one lane" if groups == 1 else f"{groups} lanes, one on {_each(grid)},"
            raise UserError(
                f"{few} and what goes with it need about {format_bytes(least)} of memory and "
                f"{format_bytes(free or 0)} are available"
            )
        most = _fewer(seen or [(width, least)], width - 1, limit, groups)


def _each(grid: Grid) -> str:
    shared = grid.program.model_devices
    return "each device" if shared == 1 else f"every {shared} devices"


def _checked_on_host(needed: Needs) -> Needs:
    free = available_host_memory() if needed.host else 0
    if needed.host > free:
        raise UserError(
            f"the grid needs about {format_bytes(needed.host)} of the host's memory and {format_bytes(free)} are free"
        )
    return needed


def _fewer(seen: list[tuple[int, int]], most: int, free: float, groups: int) -> int:
    """Lanes, at most `most`, that should fit by the latest of the (lanes, bytes) seen; whole vectors in all groups."""
    (above, high), (below, low) = seen[-1], seen[-2] if len(seen) > 1 else (0, 0)
    slope = (high - low) / (above - below)
    fitting = above - (high - free) / slope if slope > 0 else above / 2
    each = max(1, min(most, int(max(fitting, 0))) // groups)
    return groups * (each // VECTOR * VECTOR if each > WHOLE_VECTORS_FROM else each)


def needs(engine: Engine, plan: Plan, resident: bool = False) -> Needs:
    """What some batches need, one after the other; their programs are compiled for it.

    `resident`: the baseline's states at the onsets, and all telemetry, stay on the host.
    """
    alike = list({(batch.fork, batch.width): batch for batch in plan}.values())
    moments = [moment for batch in alike for moment in _moments(engine, batch)]
    kept = _kept(engine, resident)
    lane = max(engine.program_bytes(batch) // batch.width for batch in alike)
    if _on_cpus(engine.grid):
        return Needs(max(map(sum, moments)) + kept, 0, lane)
    return Needs(max(devices for devices, _ in moments), max(host for _, host in moments) + kept, lane)


def _moments(engine: Engine, batch: Batch) -> Iterator[tuple[int, int]]:
    """Bytes on the devices, and on the host besides, while a batch begins, is stored, and runs."""
    states = batch.width * engine.placed_bytes(batch)
    if batch.disturbed:
        piece = engine.onset_piece_bytes()
        yield states + piece, piece
    else:
        yield engine.initial_bytes(batch), 0
    piece = engine.piece_bytes(batch)
    yield states, piece if _on_cpus(engine.grid) else 2 * piece
    yield engine.program_bytes(batch), 0


def _kept(engine: Engine, resident: bool) -> int:
    """Bytes on the host from the beginning to the end."""
    if not resident:
        return LIBRARIES
    grid = engine.grid
    onsets = len(grid.forks) * len(grid.seeds) * engine.onset_lane_bytes()
    values = sum(math.prod(shape) for shape in telemetry_shapes(grid.program).values())
    return onsets + 4 * values * len(grid.seeds) * len(grid.conditions) * grid.steps


def _on_cpus(grid: Grid) -> bool:
    return grid.program.devices[0].platform == "cpu"


def available_memory(devices: tuple[jax.Device, ...]) -> int | None:
    """Bytes that can still be taken: of the host for CPU devices, else of all devices; None where unknown.

    Other hosts' devices are taken to be as free as those here.
    """
    if devices[0].platform == "cpu":
        return available_host_memory()
    here = [device for device in devices if device in jax.local_devices()]
    stats = [device.memory_stats() or {} for device in here]
    if not all("bytes_limit" in s for s in stats):
        return None
    return sum(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats) * len(devices) // len(here)
