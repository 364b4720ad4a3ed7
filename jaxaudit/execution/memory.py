"""What a grid needs, by its compiled programs, and how many lanes at a time the free memory can hold."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import jax

from jaxaudit.errors import UserError
from jaxaudit.execution.engine import Engine
from jaxaudit.grid import Grid, Phase
from jaxaudit.program import VECTOR, WHOLE_VECTORS_FROM, telemetry_shapes

SHARE = 0.9
"""How much of the free memory batches are made for: other processes come to need some, too."""

LIBRARIES = 2**25
"""Bytes that the libraries come to need which read and write a run's files."""

CGROUPS = Path("/sys/fs/cgroup")


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


def fit(grid: Grid, rows: int, baseline: bool = True, resident: bool = False) -> tuple[Engine, Needs]:
    """An engine for a grid in batches that the free memory can hold: as large as can be if the grid leaves it open.

    The bytes of a compiled program are taken as linear in its lanes; what is chosen is compiled and checked, and is
    the program that then runs.

    Args:
      grid: `batch` None leaves the size open.
      rows: the engine's.
      baseline: whether the baseline is trained, too.
      resident: see `needs`.

    Raises:
      UserError: too little memory, with the numbers.
    """
    free, devices = available_memory(grid.program.devices), len(grid.program.devices)
    if grid.batch is not None:
        engine = Engine(grid, rows)
        needed = needs(engine, grid.phases(baseline), resident)
        if free is not None and needed.total > free:
            raise UserError(
                f"{_widest(engine, baseline)[1]} lanes at a time need about {readable(needed.total)} of memory and "
                f'{readable(free)} are available; take fewer, or lanes = "auto"'
            )
        return _with_host(engine, needed)
    most, seen = max(grid.count(group) for group in grid.groups(baseline)), []
    while True:
        engine = Engine(replace(grid, batch=most), rows)
        phase, width = _widest(engine, baseline)
        least = width * engine.lane_bytes(phase) + (_kept(engine, resident) if _on_cpus(grid) else 0)
        if free is None or least <= SHARE * free:
            needed = needs(engine, [phase], resident)
            if free is None or needed.total <= SHARE * free:
                needed = needs(engine, engine.grid.phases(baseline), resident)
            if free is None or needed.total <= SHARE * free:
                return _with_host(engine, needed)
            seen.append((width, least := needed.total))
        if width <= devices:
            few = "one lane" if devices == 1 else f"{devices} lanes, one on each device,"
            raise UserError(
                f"{few} and what goes with it need about {readable(least)} of memory and {readable(free)} are available"
            )
        most = _fewer(seen or [(width, least)], width - 1, SHARE * free, devices)


def _with_host(engine: Engine, needed: Needs) -> tuple[Engine, Needs]:
    free = host_memory() if needed.host else 0
    if needed.host > free:
        raise UserError(
            f"the grid needs about {readable(needed.host)} of the host's memory and {readable(free)} are free"
        )
    return engine, needed


def _fewer(seen: list[tuple[int, int]], most: int, free: float, devices: int) -> int:
    """Lanes, at most `most`, that should fit by the latest of the (lanes, bytes) seen; whole vectors on all devices."""
    (above, high), (below, low) = seen[-1], seen[-2] if len(seen) > 1 else (0, 0)
    slope = (high - low) / (above - below)
    fitting = above - (high - free) / slope if slope > 0 else above / 2
    each = max(1, min(most, int(max(fitting, 0))) // devices)
    return devices * (each // VECTOR * VECTOR if each > WHOLE_VECTORS_FROM else each)


def _widest(engine: Engine, baseline: bool) -> tuple[Phase, int]:
    grid = engine.grid
    return max(((phase, grid.width(phase.fork)) for phase in grid.phases(baseline)), key=lambda pair: pair[1])


def needs(engine: Engine, phases: Iterable[Phase], resident: bool = False) -> Needs:
    """What some phases of a grid need, one after the other; their programs are compiled for it.

    `resident`: the baseline's states at the onsets, and all telemetry, stay on the host.
    """
    groups = list({phase.fork: phase for phase in phases}.values())
    moments = [moment for phase in groups for moment in _moments(engine, phase)]
    kept = _kept(engine, resident)
    lane = max(engine.program_bytes(phase) // engine.grid.width(phase.fork) for phase in groups)
    if _on_cpus(engine.grid):
        return Needs(max(map(sum, moments)) + kept, 0, lane)
    return Needs(max(devices for devices, _ in moments), max(host for _, host in moments) + kept, lane)


def _moments(engine: Engine, phase: Phase) -> Iterator[tuple[int, int]]:
    """Bytes on the devices, and on the host besides, while a phase begins, is stored, and runs."""
    grid = engine.grid
    states = grid.width(phase.fork) * engine.lane_bytes(phase)
    if grid.onset(phase) == 0:
        yield engine.initial_bytes(phase), 0
    else:
        piece = engine.piece_bytes(Phase(None))
        yield states + piece, piece
    piece = engine.piece_bytes(phase)
    yield states, piece if _on_cpus(grid) else 2 * piece
    yield engine.program_bytes(phase), 0


def _kept(engine: Engine, resident: bool) -> int:
    """Bytes on the host from the beginning to the end."""
    if not resident:
        return LIBRARIES
    grid = engine.grid
    onsets = sum(fork.onset > 0 for fork in grid.forks) * len(grid.seeds) * engine.lane_bytes(Phase(None))
    values = sum(math.prod(shape) for shape in telemetry_shapes(grid.program).values())
    return onsets + 4 * values * len(grid.seeds) * len(grid.conditions) * grid.steps


def _on_cpus(grid: Grid) -> bool:
    return grid.program.devices[0].platform == "cpu"


def available_memory(devices: tuple[jax.Device, ...]) -> int | None:
    """Bytes that can still be taken: of the host for CPU devices, else of all devices; None where unknown."""
    if devices[0].platform == "cpu":
        return host_memory()
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in s for s in stats):
        return None
    return sum(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats)


def host_memory() -> int:
    """Bytes of the host that can still be taken by this process and those it shares a limit with."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([free, *_cgroup_limits()])


def _cgroup_limits() -> Iterator[int]:
    """What is left of the limits of this process's control groups (version 2); pages of files can be given back."""
    try:
        entries = Path("/proc/self/cgroup").read_text().split()
    except OSError:
        return
    own = next((entry.removeprefix("0::/") for entry in entries if entry.startswith("0::/")), None)
    for place in () if own is None else [CGROUPS / own, *(CGROUPS / own).parents]:
        try:
            limit, used = ((place / f"memory.{name}").read_text().strip() for name in ("max", "current"))
            fields = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            yield int(limit) - int(used) + int(fields["inactive_file"]) + int(fields["active_file"])
        except (OSError, KeyError, ValueError):  # the root has no limit, and "max" is none
            continue


def readable(size: float) -> str:
    """Bytes in a unit one can read, to four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"
