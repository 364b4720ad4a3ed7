"""Converts between a grid and arrays: the inputs of `jaxaudit.run`, and telemetry by seed, condition and step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxaudit.core.batches import Batch, layout
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import ForkInputs, Inputs, telemetry_shapes


def inputs(grid: Grid) -> Inputs:
    """Returns the arguments of a grid's program as NumPy arrays, with every fork group in one batch."""
    baseline, *groups = _unlimited_layout(grid)
    by_width: dict[int, list[ForkInputs]] = {}
    for position, batch in enumerate(groups):
        entry = ForkInputs(np.int32(batch.onset), np.int32(position), batch.lanes(grid), batch.positions)
        by_width.setdefault(batch.width, []).append(entry)
    forks = tuple(jax.tree.map(lambda *leaves: np.stack(leaves), *group) for group in by_width.values())
    edges = [0, *(fork.onset for fork in grid.forks), grid.baseline_steps]
    segments = np.array(list(itertools.pairwise(edges)), np.int32)
    return Inputs(grid.data, baseline.lanes(grid), segments, forks)


def arrange(grid: Grid, baseline: Telemetry, forks: tuple[Telemetry, ...]) -> dict[str, np.ndarray]:
    """Returns the result of `run` by channel, float32 `[seed, condition, step, ...]`.

    Before its onset, a condition has the telemetry of the baseline.
    """
    baseline_batch, *groups = _unlimited_layout(grid)
    arrays = blank_telemetry(grid)
    place(arrays.__getitem__, grid, baseline_batch, baseline, 0, grid.steps)
    widths = list(dict.fromkeys(batch.width for batch in groups))
    groups_of_width: Counter[int] = Counter()
    for batch in groups:
        telemetry = forks[widths.index(batch.width)]
        rows = {name: x[groups_of_width[batch.width], batch.onset :] for name, x in telemetry.items()}
        place(arrays.__getitem__, grid, batch, rows, batch.onset, grid.steps)
        groups_of_width[batch.width] += 1
    return arrays


def _unlimited_layout(grid: Grid) -> list[Batch]:
    """Returns one batch for the baseline and one for each fork group."""
    return layout(grid, max_lanes=len(grid.seeds) * len(grid.conditions))


def blank_telemetry(grid: Grid) -> dict[str, np.ndarray]:
    """Returns telemetry by channel that is NaN everywhere, float32 `[seed, condition, step, ...]`."""
    lanes, shapes = (len(grid.seeds), len(grid.conditions), grid.steps), telemetry_shapes(grid.program)
    return {name: np.full((*lanes, *shape), np.nan, np.float32) for name, shape in shapes.items()}


def place(channel: Callable[[str], Any], grid: Grid, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
    """Writes a batch's telemetry into the arrays of its grid.

    The baseline's telemetry is written as the prefix of all conditions with later onsets, in one assignment for each
    span between onsets.

    Args:
      channel: `channel(name)` returns an array `[seed, condition, step, ...]` of NumPy or zarr.
      grid: the grid.
      batch: the batch.
      rows: the batch's telemetry by channel, `[T, L, ...]`.
      start, stop: the first step of the rows, and the step after the last.
    """
    seeds, columns = batch.seeds, batch.columns
    for name, values in rows.items():
        lanes = np.moveaxis(np.asarray(values)[: stop - start, : len(seeds)], 0, 1)
        array = channel(name)
        if not batch.disturbed:
            _place_prefix(array, grid, seeds, lanes, start)
        else:
            region = (slice(None), slice(columns.min(), columns.max() + 1), slice(start, stop))
            shape = (len(grid.seeds), columns.max() - columns.min() + 1, *lanes.shape[1:])
            block = np.empty(shape, np.float32) if len(lanes) == shape[0] * shape[1] else array[region]
            block[seeds, columns - columns.min()] = lanes
            array[region] = block


def _place_prefix(array: Any, grid: Grid, seeds: np.ndarray, lanes: np.ndarray, start: int) -> None:
    """Writes lanes `[L, step, ...]` of the baseline, from step `start` on, to all conditions with later onsets."""
    stop = start + lanes.shape[1]
    edges = [start, *(fork.onset for fork in grid.forks if start < fork.onset < stop), stop]
    for begin, end in itertools.pairwise(edges):
        first = next((fork.conditions[0] for fork in grid.forks if fork.onset >= end), None)
        if first is not None:
            prefix = lanes[:, None, begin - start : end - start]
            shape = (len(seeds), len(grid.conditions) - first, *prefix.shape[2:])
            array[seeds[0] : seeds[-1] + 1, first:, begin:end] = np.broadcast_to(prefix, shape)
