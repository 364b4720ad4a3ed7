"""What a grid will need, before anything is compiled, and a refusal where it cannot fit."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxaudit.errors import UserError
from jaxaudit.grid import Grid, forked, initial, lane_step
from jaxaudit.store import DERIVED


@dataclass(frozen=True)
class Estimate:
    """Bytes.

    Attributes:
      states: the lanes' states, as arguments and results of the widest program, and the baseline's at the onsets.
      work: what a step needs besides, over all lanes of the widest program.
      telemetry: one chunk's rows.
      disk: the run's telemetry and checkpoints.
    """

    states: int
    work: int
    telemetry: int
    disk: int

    @property
    def total(self) -> int:
        """Memory in all."""
        return self.states + self.work + self.telemetry


def estimate(grid: Grid, rows: Mapping[str, jax.ShapeDtypeStruct]) -> Estimate:
    """What a grid needs; `rows` are the shapes of a chunk of the baseline's telemetry, `[T, S, ...]`.

    Work is the sum of a step's largest values that live at once, found by following its jaxpr.
    """
    widest = max([grid.width(None), *(grid.width(f) for f in grid.forks)])
    state, work = _per_lane(grid)
    per_step = sum(math.prod(s.shape[2:]) * 4 for s in rows.values())
    count = next(iter(rows.values())).shape[0]
    onsets = len(grid.forks) * grid.width(None) * state
    telemetry_disk = len(grid.seeds) * len(grid.conditions) * grid.steps * (per_step + 4 * len(DERIVED))
    return Estimate(
        states=2 * widest * state + onsets,
        work=work * _at_once(grid, widest),
        telemetry=2 * widest * count * per_step,
        disk=telemetry_disk + onsets + 3 * widest * state,
    )


def check(grid: Grid, rows: Mapping[str, jax.ShapeDtypeStruct], folder: Path) -> None:
    """Raises UserError, with the numbers, where memory or disk cannot hold the grid."""
    needed = estimate(grid, rows)
    available = available_memory(grid.program.devices)
    if available is not None and needed.total > available:
        lanes = max(grid.width(f) for f in grid.forks)
        raise UserError(
            f"the grid needs about {readable(needed.total)} of memory for {lanes} lanes side by side and "
            f"{readable(available)} are available; take fewer seeds or conditions, or a smaller execution batch"
        )
    existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    free = shutil.disk_usage(existing).free
    if needed.disk > free:
        raise UserError(f"the run needs about {readable(needed.disk)} on disk and {existing} has {readable(free)} free")


def available_memory(devices: tuple[jax.Device, ...]) -> int | None:
    """Bytes that can still be taken: of the host for CPU devices, else of all devices; None where unknown."""
    if devices[0].platform == "cpu":
        try:
            with open("/proc/meminfo") as file:
                fields = dict(line.split(":") for line in file)
            return int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    stats = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in s for s in stats):
        return None
    return sum(s["bytes_limit"] - s.get("bytes_in_use", 0) for s in stats)


def readable(size: float) -> str:
    """Bytes in a unit one can read."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _at_once(grid: Grid, widest: int) -> int:
    """Lanes computed at the same time, over all devices."""
    execution, devices = grid.program.execution, max(1, len(grid.program.devices))
    if execution == "vmap":
        return widest
    return min(widest, devices * (1 if execution == "map" else int(execution)))


def _per_lane(grid: Grid) -> tuple[int, int]:
    """Bytes of one lane's state, and of the largest values that live at once in its step."""
    lanes, _ = grid.lanes(grid.forks[0])
    lane = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x)[1:], np.asarray(x).dtype), lanes)
    positions = jax.ShapeDtypeStruct((1,), np.uint32)
    states = jax.eval_shape(lambda s: forked(grid.program, initial(grid.program, s), s), positions)
    state = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), states)
    never = jnp.zeros(len(grid.program.kinds), bool)
    jaxpr = jax.make_jaxpr(lambda s, d: lane_step(grid.program, s, d, jnp.int32(0), never))(state, lane)
    return sum(_bytes(s) for s in jax.tree.leaves(state)), _peak(jaxpr.jaxpr)


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 4)


def _peak(jaxpr: Jaxpr) -> int:
    """Most bytes of results that live at once when the equations run in order; inner programs at their own peak."""
    last_use = {}
    for index, equation in enumerate(jaxpr.eqns):
        for variable in equation.invars:
            if not hasattr(variable, "val"):
                last_use[variable] = index
    for variable in jaxpr.outvars:
        if not hasattr(variable, "val"):
            last_use[variable] = len(jaxpr.eqns)
    alive: dict = {}
    peak = 0
    for index, equation in enumerate(jaxpr.eqns):
        inner = max((_peak(j) for j in _inner(equation.params)), default=0)
        for variable in equation.outvars:
            alive[variable] = _bytes(variable.aval) if hasattr(variable.aval, "shape") else 0
        peak = max(peak, sum(alive.values()) + inner)
        alive = {v: size for v, size in alive.items() if last_use.get(v, -1) > index}
    return peak


def _inner(params: dict) -> list[Jaxpr]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [v.jaxpr if isinstance(v, ClosedJaxpr) else v for v in values if isinstance(v, ClosedJaxpr | Jaxpr)]
