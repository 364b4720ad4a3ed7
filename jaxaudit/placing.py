"""Where telemetry belongs in a grid's arrays: lanes by seed and condition, the baseline before every onset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jaxaudit.batches import Batch
from jaxaudit.grid import Grid
from jaxaudit.learner import Telemetry
from jaxaudit.program import telemetry_shapes


def blank_telemetry(grid: Grid) -> dict[str, np.ndarray]:
    """Telemetry by channel, float32 `[seed, condition, step, ...]`, all NaN."""
    lanes, shapes = (len(grid.seeds), len(grid.conditions), grid.steps), telemetry_shapes(grid.program)
    return {name: np.full((*lanes, *shape), np.nan, np.float32) for name, shape in shapes.items()}


def place(channel: Callable[[str], Any], grid: Grid, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
    """Puts a batch's steps `start` to `stop`, rows `[T, L, ...]`, where they belong.

    `channel(name)` is an array `[seed, condition, step, ...]`, NumPy's or one on disk. The baseline is the prefix of
    every condition.
    """
    seeds, columns = batch.seeds, batch.columns
    for name, values in rows.items():
        lanes = np.moveaxis(np.asarray(values)[: stop - start, : len(seeds)], 0, 1)
        array = channel(name)
        if not batch.disturbed:
            for fork in grid.forks:
                if (end := min(stop, fork.onset)) > start:
                    prefix = lanes[:, None, : end - start]
                    shape = (len(seeds), len(fork.conditions), *prefix.shape[2:])
                    across = slice(fork.conditions[0], fork.conditions[-1] + 1)
                    array[seeds[0] : seeds[-1] + 1, across, start:end] = np.broadcast_to(prefix, shape)
        else:
            where = (slice(None), slice(columns.min(), columns.max() + 1), slice(start, stop))
            shape = (len(grid.seeds), columns.max() - columns.min() + 1, *lanes.shape[1:])
            block = np.empty(shape, np.float32) if len(lanes) == shape[0] * shape[1] else array[where]
            block[seeds, columns - columns.min()] = lanes
            array[where] = block
