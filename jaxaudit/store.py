"""A run's folder: spec, environment, telemetry, tables. Checkpoints are `checkpoint.py`'s."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xarray as xr
import zarr

from jaxaudit import results
from jaxaudit.grid import Fork, Grid
from jaxaudit.learner import PERFORMANCE, Telemetry

PACKAGES = ("jax", "jaxlib", "flax", "optax", "brax", "mujoco", "mujoco-mjx", "orbax-checkpoint", "numpy")


class Folder:
    """Paths of a run, and how its files are read and written.

    Every file appears complete or not at all (written beside its place, then renamed); telemetry is written in
    place, row by row, and only rows before the latest checkpoint count.
    """

    def __init__(self, path: Path):
        path = Path(path).absolute()
        self.path = path
        self.spec = path / "spec.toml"
        self.environment = path / "environment.json"
        self.checkpoints = path / "checkpoints"
        self.telemetry = path / "telemetry.zarr"
        self.metrics = path / "metrics.csv"
        self.summary = path / "summary.csv"

    def write(self, path: Path, text: str) -> None:
        """Writes a text file, whole or not at all."""
        unfinished = path.with_name(f".unfinished-{path.name}")
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)

    def read_environment(self) -> dict[str, Any]:
        """What the run was made on; empty if that was never written."""
        try:
            return json.loads(self.environment.read_text())
        except (OSError, ValueError):
            return {}

    def update_environment(self, **facts: Any) -> None:
        """Adds or replaces entries of environment.json."""
        self.write(self.environment, json.dumps(self.read_environment() | facts, indent=2) + "\n")

    def create_telemetry(self, grid: Grid, shapes: dict[str, tuple[int, ...]], chunk: int) -> None:
        """Lays out telemetry.zarr, all NaN: channel -> shape of one value; chunks hold all lanes of `chunk` steps."""
        unfinished = self.path / ".unfinished-telemetry.zarr"
        shutil.rmtree(unfinished, ignore_errors=True)
        empty = results.telemetry(grid, {})
        channels = dict.fromkeys([*sorted(shapes), "x_inst", "x_gen"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            empty.to_zarr(unfinished, mode="w", consolidated=False)
            group = zarr.open_group(unfinished, mode="r+")
            lanes = (len(grid.seeds), len(grid.conditions))
            for name in channels:
                own = tuple(shapes.get(name, ()))
                dims = results.DIMS + results.vector_dims(grid, name, own)
                _nan_array(group, name, (*lanes, grid.steps, *own), (*lanes, chunk, *own), dims)
            shape = (lanes[0], grid.steps)
            _nan_array(group, "baseline_performance", shape, (lanes[0], chunk), ("seed", "step"))
            zarr.consolidate_metadata(unfinished)
        os.replace(unfinished, self.telemetry)

    def write_baseline(self, grid: Grid, rows: Telemetry, start: int, stop: int) -> None:
        """Writes the baseline's steps `start` to `stop` (rows `[T, S, ...]`) as the prefix of all later conditions."""
        group = zarr.open_group(self.telemetry, mode="r+")
        performance = np.asarray(rows[PERFORMANCE])[: stop - start, : len(grid.seeds)]
        group["baseline_performance"][:, start:stop] = performance.T
        for fork in grid.forks:
            end = min(stop, fork.onset)
            if end > start:
                self._write(grid, fork, {k: np.asarray(x)[: end - start, None] for k, x in rows.items()}, start, end)

    def write_fork(self, grid: Grid, fork: Fork, rows: Telemetry, start: int, stop: int) -> None:
        """Writes a fork group's steps `start` to `stop`: rows `[T, L, ...]`, condition after condition."""
        count, seeds = len(fork.conditions), len(grid.seeds)
        lanes = {k: np.asarray(x)[: stop - start, : count * seeds] for k, x in rows.items()}
        split = {k: x.reshape(stop - start, count, seeds, *x.shape[2:]) for k, x in lanes.items()}
        self._write(grid, fork, split, start, stop)

    def write_prefix(self, grid: Grid, fork: Fork, rows: dict[str, np.ndarray]) -> None:
        """Writes the steps before a fork's onset: rows `[onset, 1, S, ...]`."""
        self._write(grid, fork, rows, 0, fork.onset)

    def _write(self, grid: Grid, fork: Fork, rows: dict[str, np.ndarray], start: int, stop: int) -> None:
        """Rows `[T, C or 1, S (or more), ...]` into the fork's conditions."""
        group = zarr.open_group(self.telemetry, mode="r+")
        first, count, seeds = fork.conditions[0], len(fork.conditions), len(grid.seeds)
        for name, values in rows.items():
            values = np.moveaxis(values[:, :, :seeds], (0, 1, 2), (2, 1, 0))
            shape = (seeds, count, *values.shape[2:])
            group[name][:, first : first + count, start:stop] = np.broadcast_to(values, shape)

    def read_telemetry(self) -> xr.Dataset:
        """The telemetry in memory, with dims (seed, condition, step)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with xr.open_zarr(self.telemetry, chunks=None) as data:
                return data.load()

    def read_channel(self, name: str) -> np.ndarray:
        """One channel, as far as it was written."""
        return np.asarray(zarr.open_group(self.telemetry, mode="r")[name])

    def write_channel(self, name: str, values: np.ndarray) -> None:
        """Replaces a whole channel."""
        zarr.open_group(self.telemetry, mode="r+")[name][...] = values

    def write_attributes(self, **attributes: Any) -> None:
        """Adds attributes to the telemetry."""
        group = zarr.open_group(self.telemetry, mode="r+")
        group.attrs.update(attributes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            zarr.consolidate_metadata(self.telemetry)


def _nan_array(group: zarr.Group, name: str, shape: tuple, chunks: tuple, dims: tuple[str, ...]) -> None:
    chunks = tuple(min(c, s) for c, s in zip(chunks, shape, strict=True))
    group.create_array(
        name, shape=shape, chunks=chunks, dtype="float32", fill_value=np.nan, dimension_names=list(dims)
    )


def environment(grid: Grid) -> dict[str, Any]:
    """What decides a run's bits besides its spec: software, device, flags, and how lanes were laid out."""
    devices = grid.program.devices
    return {
        "jaxaudit": _version("jaxaudit"),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "cpu": _cpu(),
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "flags": {k: os.environ[k] for k in ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64") if k in os.environ},
        "precision": str(jax.config.jax_default_matmul_precision),
        "lane_layout": {
            "execution": grid.program.execution,
            "baseline_width": grid.width(None),
            "fork_widths": [grid.width(fork) for fork in grid.forks],
        },
        "byteorder": sys.byteorder,
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
