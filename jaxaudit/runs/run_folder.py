"""A run's folder: spec, environment, telemetry, tables. Checkpoints are `checkpoint.py`'s."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import xarray as xr
import zarr

from jaxaudit.analysis import datasets
from jaxaudit.core.batches import Batch, Plan, as_json, from_json
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Fork, Grid
from jaxaudit.core.learner import Channel, Telemetry
from jaxaudit.core.program import telemetry_shapes
from jaxaudit.execution.engine import Engine
from jaxaudit.execution.grid_program import place
from jaxaudit.runtime import source_tree, zarr_store
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import UNFINISHED, locked, read_object, remove, write_text
from jaxaudit.runtime.machine import cores, processor, read_environment, readable


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


VERSION = source_tree.version()

DERIVED = ("x_inst", "x_gen")
"""Channels computed from the telemetry when a run ends."""

SIGHT = 2**20
"""Bytes after which the compressor (Zstandard, whose window is 2 MiB) still finds that values are there already."""

STARTING = "starting"
"""The status of a run until its spec is written, which is what makes the folder a run."""

PACKAGES = ("jax", "jaxlib", "flax", "optax", "brax", "mujoco", "mujoco-mjx", "orbax-checkpoint", "numpy")


class Folder:
    """Paths of a run, and how its files are read and written.

    Every file appears complete or not at all (written beside its place, then renamed). One process at a time, the
    driver, writes them, but for the attempts at batches (`jaxaudit.runs.attempts`), from which it gathers telemetry.
    """

    def __init__(self, path: Path):
        path = Path(path).absolute()
        self.path = path
        self.spec = path / "spec.toml"
        self.environment = path / "environment.json"
        self.monitor = path / "monitor.npz"
        self.plan = path / "plan.json"
        self.batches = path / "batches"
        self.checkpoints = path / "checkpoints"
        self.telemetry = path / "telemetry.zarr"
        self.metrics = path / "metrics.csv"
        self.summary = path / "summary.csv"
        self.shards = path / "shards.csv"

    def make(self, **facts: Any) -> None:
        """Fills the folder of a run about to start, environment.json first, which tells it from other folders.

        Raises FileExistsError if another process has filled it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.update_environment(**facts, status=STARTING)
        self.checkpoints.mkdir()

    def read_environment(self) -> dict[str, Any]:
        """What the run was made on; empty if that was never written. Raises UserError if it is damaged."""
        return read_environment(self.environment)

    def update_environment(self, **facts: Any) -> None:
        """Adds entries to environment.json, or replaces them."""
        write_text(self.environment, json.dumps(self.read_environment() | facts, indent=2) + "\n")

    def locked(self) -> AbstractContextManager[None]:
        """Keeps other processes from working on this run while inside; raises UserError if one does."""
        return locked(self.path, f"the run in {self.path}")

    def sweep(self) -> None:
        """Removes what a killed process left half written."""
        for folder in (self.path, self.checkpoints):
            for path in folder.glob(f"{UNFINISHED}*"):
                remove(path)
        for path in self.telemetry.rglob("*.partial"):  # zarr's
            path.unlink()

    def write_driver(self, name: str) -> None:
        """Says who hands out the run's batches; workers of any other stop. Empty: nobody does."""
        self.batches.mkdir(exist_ok=True)
        write_text(self.batches / "driver", name)

    def read_driver(self) -> str:
        """Who hands out the run's batches; empty if nobody does."""
        try:
            return (self.batches / "driver").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def write_plan(self, plan: Plan) -> None:
        """Keeps how lanes are batched, and on how many threads they began to be trained."""
        write_text(self.plan, json.dumps({"threads": cores(), "batches": as_json(plan)}) + "\n")

    def read_plan(self, grid: Grid) -> list[Batch]:
        """How the lanes of a run's grid are batched. Raises UserError if it cannot be told."""
        try:
            return from_json(read_object(self.plan)["batches"], grid)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{self.plan} is damaged: which lanes run together cannot be told ({error!r})") from None

    def create_telemetry(self, grid: Grid, shapes: dict[str, tuple[int, ...]], chunk: int) -> None:
        """Lays out telemetry.zarr, all missing: channel -> shape of one value; a file holds all lanes' `chunk` steps.

        Or fewer, where the values are so large that a lane's would be out of the compressor's sight (`SIGHT`). Every
        lane has its prefix, which is the baseline's, and a file has it once for each seed, and references to it.
        """
        empty = datasets.telemetry(grid, {})
        channels = dict.fromkeys([*sorted(shapes), *DERIVED])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty.to_zarr(self.telemetry, mode="w", consolidated=False, zarr_format=zarr_store.FORMAT)
            group = zarr_store.open_group(self.telemetry, "r+")
            lanes = (len(grid.seeds), len(grid.conditions))
            for name in channels:
                own = tuple(shapes.get(name, ()))
                dims = datasets.DIMS + datasets.channel_dims(grid, name, own)
                known = grid.program.learner.channel(name)
                steps = _steps_in_sight(chunk, math.prod(own) * np.dtype(known.dtype).itemsize)
                _empty_array(group, name, known, (*lanes, grid.steps, *own), (*lanes, steps, *own), dims)
            shape = (lanes[0], grid.steps)
            _empty_array(group, "baseline_performance", Channel(), shape, (lanes[0], chunk), ("seed", "step"))
            zarr.consolidate_metadata(self.telemetry)

    def write_rows(self, grid: Grid, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Writes a batch's steps `start` to `stop`, rows `[T, L, ...]`, into the run's telemetry."""
        if not batch.disturbed:
            performance = np.asarray(rows[PERFORMANCE])[: stop - start, : len(batch.seeds)]
            seeds = slice(batch.seeds[0], batch.seeds[-1] + 1)
            self._channel("baseline_performance", "r+")[seeds, start:stop] = performance.T
        place(partial(self._channel, mode="r+"), grid, batch, rows, start, stop)

    def copy_prefix(self, source: Folder, theirs: Fork, ours: Fork) -> None:
        """Copies the steps before an onset from another run of the same seeds and channels."""
        first, count, onset = ours.conditions[0], len(ours.conditions), ours.onset
        for name in zarr_store.open_group(self.telemetry, "r").array_keys():
            array = self._channel(name, "r+")
            if array.ndim >= len(datasets.DIMS) and name not in DERIVED:
                prefix = source.read_channel(name, slice(theirs.conditions[0], theirs.conditions[0] + 1), slice(onset))
                shape = (prefix.shape[0], count, *prefix.shape[2:])
                array[:, first : first + count, :onset] = np.broadcast_to(prefix, shape)

    def read_telemetry(self, channels: Collection[str] | None = None) -> xr.Dataset:
        """The telemetry in memory, all or some channels, with dims (seed, condition, step)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with zarr_store.open_dataset(self.telemetry) as data:
                return (data if channels is None else data[list(channels)]).load()

    def read_channel(self, name: str, *columns: slice) -> np.ndarray:
        """One channel, all seeds, as far as it was written; `columns` slice the later dimensions."""
        return np.asarray(self._channel(name, "r")[(slice(None), *columns)])

    def write_channel(self, name: str, values: np.ndarray) -> None:
        """Replaces the stored values of a channel."""
        self._channel(name, "r+")[...] = values

    def _channel(self, name: str, mode: Literal["r", "r+"]) -> zarr.Array:
        return zarr_store.open_array(self.telemetry / name, mode)

    def write_attributes(self, **attributes: Any) -> None:
        """Adds attributes to the stored telemetry."""
        group = zarr_store.open_group(self.telemetry, "r+")
        group.attrs.update(attributes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(self.telemetry)


def _steps_in_sight(chunk: int, size: int) -> int:
    """Steps of a file: a divisor of the chunk's, so that a lane's values of `size` bytes a step are within `SIGHT`."""
    return next(steps for steps in range(chunk, 0, -1) if steps == 1 or (chunk % steps == 0 and steps * size <= SIGHT))


def _empty_array(
    group: zarr.Group, name: str, channel: Channel, shape: tuple, chunks: tuple, dims: tuple[str, ...]
) -> None:
    chunks = tuple(min(c, s) for c, s in zip(chunks, shape, strict=True))
    group.create_array(
        name,
        shape=shape,
        chunks=chunks,
        dtype=channel.dtype,
        fill_value=channel.missing,
        attributes=dict(channel.attributes),
        dimension_names=list(dims),
    )


def check_space(grid: Grid, plan: Plan, engine: Engine, folder: Path) -> None:
    """Raises UserError, with the numbers, where a run's telemetry and checkpoints would fill the disk."""
    values = 4 * (sum(math.prod(shape) for shape in telemetry_shapes(grid.program).values()) + len(DERIVED))
    telemetry = values * len(grid.seeds) * len(grid.conditions) * grid.steps
    kept = len(grid.forks) * len(grid.seeds) * engine.onset_lane_bytes()
    latest = max(
        3 * len(batch.seeds) * engine.lane_bytes(batch) + values * len(batch.seeds) * (batch.stop - batch.onset)
        for batch in plan
    )
    existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    needed, free = telemetry + kept + latest, shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(f"the run needs about {readable(needed)} on disk and {existing} has {readable(free)} free")


def environment(grid: Grid, plan: Plan) -> dict[str, Any]:
    """What decides a run's bits besides its spec: software, device, flags, and how lanes were laid out."""
    layout = {
        "execution": grid.program.execution,
        "lanes": max(len(batch.seeds) for batch in plan),
        "widths": sorted({batch.width for batch in plan}),
    }
    return software(grid) | {"lane_layout": layout}


def software(grid: Grid) -> dict[str, Any]:
    """What a grid is trained with: software, device and flags, and what it depends on besides."""
    devices = grid.program.devices
    return {
        "jaxaudit": source_tree.version(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": processor(),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "model_devices": grid.program.model_devices,
        "flags": {k: os.environ[k] for k in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64") if k in os.environ},
        "precision": str(jax.config.jax_default_matmul_precision),  # type: ignore[attr-defined]
        "matmul_precision": grid.program.matmul_precision or "float32",
        "byteorder": sys.byteorder,
        "provenance": grid.provenance,
    }


def differences(then: dict[str, Any], grid: Grid, plan: Plan) -> list[tuple[str, str, str]]:
    """What is not as `then`, an earlier `environment`, says: (what, then, now)."""
    now = environment(grid, plan)
    then = {"model_devices": 1, "matmul_precision": now["matmul_precision"]} | then  # older runs say neither
    pairs = {key: (then.get(key), value) for key, value in now.items() if key != "packages"}
    pairs |= {f"package {k}": (then.get("packages", {}).get(k), v) for k, v in now["packages"].items()}
    return [(what, str(a), str(b)) for what, (a, b) in pairs.items() if a != b]
