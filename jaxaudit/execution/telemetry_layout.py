"""Where telemetry belongs in a grid's arrays: lanes by seed and condition, the baseline before every onset."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxaudit.core.batches import Batch
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import telemetry_shapes


def blank_telemetry(grid: Grid) -> dict[str, np.ndarray]:
    """Telemetry by channel, float32 `[seed, condition, step, ...]`, all NaN."""
    lanes, shapes = (len(grid.seeds), len(grid.conditions), grid.steps), telemetry_shapes(grid.program)
    return {name: np.full((*lanes, *shape), np.nan, np.float32) for name, shape in shapes.items()}


def place(channel: Callable[[str], Any], grid: Grid, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
    """Puts a batch's steps `start` to `stop`, rows `[T, L, ...]`, where they belong.

    `channel(name)` is an array `[seed, condition, step, ...]`, NumPy's or one on disk. The baseline is the prefix of
    every condition, and each of its steps is written in one go.
    """
    seeds, columns = batch.seeds, batch.columns
    for name, values in rows.items():
        lanes = np.moveaxis(np.asarray(values)[: stop - start, : len(seeds)], 0, 1)
        array = channel(name)
        if not batch.disturbed:
            _place_prefix(array, grid, seeds, lanes, start)
        else:
            where = (slice(None), slice(columns.min(), columns.max() + 1), slice(start, stop))
            shape = (len(grid.seeds), columns.max() - columns.min() + 1, *lanes.shape[1:])
            block = np.empty(shape, np.float32) if len(lanes) == shape[0] * shape[1] else array[where]
            block[seeds, columns - columns.min()] = lanes
            array[where] = block


def _place_prefix(array: Any, grid: Grid, seeds: np.ndarray, lanes: np.ndarray, start: int) -> None:
    """Puts the baseline's lanes `[L, step, ...]`, from a step on, under all conditions of later onsets."""
    stop = start + lanes.shape[1]
    edges = [start, *(fork.onset for fork in grid.forks if start < fork.onset < stop), stop]
    for begin, end in itertools.pairwise(edges):
        first = next((fork.conditions[0] for fork in grid.forks if fork.onset >= end), None)
        if first is not None:
            prefix = lanes[:, None, begin - start : end - start]
            shape = (len(seeds), len(grid.conditions) - first, *prefix.shape[2:])
            array[seeds[0] : seeds[-1] + 1, first:, begin:end] = np.broadcast_to(prefix, shape)
