"""A run's folder: the paths of its files, how telemetry is stored, and what environment.json records."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Collection
from contextlib import ExitStack
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
from jaxaudit.runtime import array_store, machine
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import UNFINISHED, locked, read_object, remove, write_text
from jaxaudit.runtime.machine import core_count, format_bytes, processor_name, read_environment


def _package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


VERSION = machine.installed_version()

DERIVED_CHANNELS = ("x_inst", "x_gen")
"""The channels that are computed from the telemetry when a run ends."""

COMPRESSION_WINDOW_BYTES = 2**20
"""The distance in bytes within which the compressor (Zstandard, with a window of 2 MiB) finds repeated values."""

STARTING = "starting"
"""The status of a run until its spec is written, which is what makes the folder a run."""

RECORDED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "brax", "mujoco", "mujoco-mjx", "orbax-checkpoint", "numpy")


class Folder:
    """The paths of a run's files, with methods that read and write them.

    Every file appears complete or not at all. One process at a time, the driver, writes them, except for the attempts
    at batches (`jaxaudit.runs.attempts`), from which the driver gathers telemetry.
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
        """Writes environment.json, which marks the folder as a run's, and creates the folder of checkpoints.

        Raises:
          FileExistsError: another process has created the checkpoints.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.update_environment(**facts, status=STARTING)
        self.checkpoints.mkdir()

    def read_environment(self) -> dict[str, Any]:
        """Returns the contents of environment.json, {} if there is none; raises UserError if it is damaged."""
        return read_environment(self.environment)

    def update_environment(self, **facts: Any) -> None:
        """Adds entries to environment.json and replaces those that exist."""
        write_text(self.environment, json.dumps(self.read_environment() | facts, indent=2) + "\n")

    def locked(self) -> ExitStack:
        """Locks the run for other processes until the block ends; raises UserError if another one has locked it."""
        return locked(self.path, f"the run in {self.path}")

    def remove_unfinished(self) -> None:
        """Removes the incomplete files that a killed process left."""
        for folder in (self.path, self.checkpoints):
            for path in folder.glob(f"{UNFINISHED}*"):
                remove(path)
        for path in self.telemetry.rglob("*.partial"):  # zarr's
            path.unlink()

    def write_driver(self, name: str) -> None:
        """Stores the name of the driver that distributes the run's batches; workers of others stop. "" for none."""
        self.batches.mkdir(exist_ok=True)
        write_text(self.batches / "driver", name)

    def read_driver(self) -> str:
        """Returns the name of the driver that distributes the run's batches; "" if there is none."""
        try:
            return (self.batches / "driver").read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def write_plan(self, plan: Plan) -> None:
        """Writes plan.json: the lanes of each batch, and the number of cores that this process may use.

        The latter is stored so that a later process can use as many.
        """
        write_text(self.plan, json.dumps({"threads": core_count(), "batches": as_json(plan)}) + "\n")

    def read_plan(self, grid: Grid) -> list[Batch]:
        """Returns the batches that plan.json stores: which lanes of the grid are trained side by side.

        Raises UserError if plan.json is missing or damaged, or if its lanes are not those of `grid`.
        """
        try:
            return from_json(read_object(self.plan)["batches"], grid)
        except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, OverflowError) as error:
            raise UserError(f"{self.plan} is damaged: it is no plan of the run's lanes ({error!r})") from None

    def create_telemetry(self, grid: Grid, shapes: dict[str, tuple[int, ...]], chunk: int) -> None:
        """Creates telemetry.zarr with all values missing.

        A file holds `chunk` steps of all lanes, or fewer if values are so large that the compressor would not find
        that the lanes of a seed repeat their prefix, the baseline's steps before the onset.

        Args:
          grid: the run's grid.
          shapes: the shape of one value of each channel.
          chunk: the steps of a chunk.
        """
        empty = datasets.telemetry_dataset(grid, {})
        channels = dict.fromkeys([*sorted(shapes), *DERIVED_CHANNELS])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty.to_zarr(self.telemetry, mode="w", consolidated=False, zarr_format=array_store.FORMAT)
            group = array_store.open_group(self.telemetry, "r+")
            lanes = (len(grid.seeds), len(grid.conditions))
            for name in channels:
                value_shape = tuple(shapes.get(name, ()))
                dims = datasets.DIMS + datasets.channel_dims(grid, name, value_shape)
                channel = grid.program.learner.channel(name)
                steps = _steps_per_file(chunk, math.prod(value_shape) * np.dtype(channel.dtype).itemsize)
                shape, chunks = (*lanes, grid.steps, *value_shape), (*lanes, steps, *value_shape)
                _create_array(group, name, channel, shape, chunks, dims)
            shape, chunks = (lanes[0], grid.steps), (lanes[0], chunk)
            _create_array(group, "baseline_performance", Channel(), shape, chunks, ("seed", "step"))
        array_store.consolidate(self.telemetry)

    def write_rows(self, grid: Grid, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Writes the telemetry `[T, L, ...]` of a batch's steps `start` to `stop` into the run's."""
        if not batch.disturbed:
            performance = np.asarray(rows[PERFORMANCE])[: stop - start, : len(batch.seeds)]
            seeds = slice(batch.seeds[0], batch.seeds[-1] + 1)
            self._channel("baseline_performance", "r+")[seeds, start:stop] = performance.T
        place(partial(self._channel, mode="r+"), grid, batch, rows, start, stop)

    def copy_prefix(self, source: Folder, source_fork: Fork, fork: Fork) -> None:
        """Copies the steps before an onset from another run of the same seeds and channels.

        Args:
          source: the other run.
          source_fork: its fork group of the same onset.
          fork: the fork group of this run.
        """
        first, count, onset = fork.conditions[0], len(fork.conditions), fork.onset
        column = source_fork.conditions[0]
        for name in array_store.open_group(self.telemetry, "r").array_keys():
            array = self._channel(name, "r+")
            if array.ndim >= len(datasets.DIMS) and name not in DERIVED_CHANNELS:
                prefix = source.read_channel(name, slice(column, column + 1), slice(onset))
                shape = (prefix.shape[0], count, *prefix.shape[2:])
                array[:, first : first + count, :onset] = np.broadcast_to(prefix, shape)

    def read_telemetry(self, channels: Collection[str] | None = None) -> xr.Dataset:
        """Returns some channels, by default all, in memory, with dims (seed, condition, step)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with array_store.open_dataset(self.telemetry) as data:
                return (data if channels is None else data[list(channels)]).load()

    def read_channel(self, name: str, *columns: slice) -> np.ndarray:
        """Returns the values of a channel for all seeds; `columns` slice the dimensions after the seed."""
        return np.asarray(self._channel(name, "r")[(slice(None), *columns)])

    def write_channel(self, name: str, values: np.ndarray) -> None:
        """Replaces the stored values of a channel."""
        self._channel(name, "r+")[...] = values

    def _channel(self, name: str, mode: Literal["r", "r+"]) -> zarr.Array:
        return array_store.open_array(self.telemetry / name, mode)

    def write_attributes(self, **attributes: Any) -> None:
        """Adds attributes to the root group of the telemetry."""
        group = array_store.open_group(self.telemetry, "r+")
        group.attrs.update(attributes)
        array_store.consolidate(self.telemetry)


def _steps_per_file(chunk: int, size: int) -> int:
    """Returns the steps of a file of telemetry: the largest divisor of a chunk's that fits in the compressor's window.

    Args:
      chunk: the steps of a chunk.
      size: the bytes of a lane's values at one step.
    """
    divisors = (steps for steps in range(chunk, 0, -1) if chunk % steps == 0)
    return next(steps for steps in divisors if steps == 1 or steps * size <= COMPRESSION_WINDOW_BYTES)


def _create_array(
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
    """Raises UserError if a run's telemetry and checkpoints need more bytes than are free on the disk."""
    values = sum(math.prod(shape) for shape in telemetry_shapes(grid.program).values()) + len(DERIVED_CHANNELS)
    row_bytes = 4 * values
    telemetry = row_bytes * len(grid.seeds) * len(grid.conditions) * grid.steps
    onsets = len(grid.forks) * len(grid.seeds) * engine.lane_bytes()
    largest_batch = max(
        len(batch.seeds) * (3 * engine.lane_bytes(batch) + row_bytes * (batch.stop - batch.onset)) for batch in plan
    )
    existing = next(p for p in [folder, *folder.absolute().parents] if p.exists())
    needed, free = telemetry + onsets + largest_batch, shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"the run needs about {format_bytes(needed)} on disk and {existing} has {format_bytes(free)} free"
        )


def environment(grid: Grid, plan: Plan) -> dict[str, Any]:
    """Returns what a run's bits depend on besides its spec: software, device, flags, and how lanes are batched."""
    layout = {
        "execution": grid.program.execution,
        "lanes": max(len(batch.seeds) for batch in plan),
        "widths": sorted({batch.width for batch in plan}),
    }
    return software(grid) | {"lane_layout": layout}


def software(grid: Grid) -> dict[str, Any]:
    """Returns the software, device and flags that a grid is trained with, and the digests of its inputs."""
    devices = grid.program.devices
    return {
        "jaxaudit": VERSION,
        "python": platform.python_version(),
        "packages": {name: _package_version(name) for name in RECORDED_PACKAGES},
        "platform": platform.platform(),
        "cpu": processor_name(),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "model_devices": grid.program.model_devices,
        "flags": {k: os.environ[k] for k in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64") if k in os.environ},
        "precision": str(jax.config.jax_default_matmul_precision),  # type: ignore[attr-defined]
        "matmul_precision": grid.program.matmul_precision or "float32",
        "byteorder": sys.byteorder,
        "provenance": grid.provenance,
    }


def differences(recorded: dict[str, Any], grid: Grid, plan: Plan) -> list[tuple[str, str, str]]:
    """Returns (key, recorded value, present value) of each entry in which an `environment` differs from the present."""
    present = environment(grid, plan)
    defaults = {"model_devices": 1, "matmul_precision": present["matmul_precision"]}  # older runs record neither
    recorded = defaults | recorded
    pairs = {key: (recorded.get(key), value) for key, value in present.items() if key != "packages"}
    packages = recorded.get("packages", {})
    pairs |= {f"package {name}": (packages.get(name), version) for name, version in present["packages"].items()}
    return [(key, str(old), str(new)) for key, (old, new) in pairs.items() if old != new]
