"""A whole grid as one pure function of arrays: what `jaxaudit.run` takes, and what to make of what it gives."""

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


def inputs(grid: Grid) -> Inputs:
    """Returns the arguments of a grid's program as NumPy arrays, every fork group in one batch."""
    baseline, *groups = _whole(grid)
    by_width: dict[int, list[ForkInputs]] = {}
    for position, batch in enumerate(groups):
        entry = ForkInputs(np.int32(batch.onset), np.int32(position), batch.lanes(grid), batch.positions)
        by_width.setdefault(batch.width, []).append(entry)
    forks = tuple(jax.tree.map(lambda *leaves: np.stack(leaves), *group) for group in by_width.values())
    edges = [0, *(fork.onset for fork in grid.forks), grid.baseline_steps]
    segments = np.array(list(itertools.pairwise(edges)), np.int32)
    return Inputs(grid.data, baseline.lanes(grid), segments, forks)


def arrange(grid: Grid, baseline: Telemetry, forks: tuple[Telemetry, ...]) -> dict[str, np.ndarray]:
    """What `run` gave, by channel, float32 `[seed, condition, step, ...]`; before an onset it is the baseline's."""
    first, *groups = _whole(grid)
    arrays = blank_telemetry(grid)
    place(arrays.__getitem__, grid, first, baseline, 0, grid.steps)
    widths = list(dict.fromkeys(batch.width for batch in groups))
    taken: Counter[int] = Counter()
    for batch in groups:
        here = forks[widths.index(batch.width)]
        rows = {name: x[taken[batch.width], batch.onset :] for name, x in here.items()}
        place(arrays.__getitem__, grid, batch, rows, batch.onset, grid.steps)
        taken[batch.width] += 1
    return arrays


def _whole(grid: Grid) -> list[Batch]:
    """One batch for the baseline and each fork group."""
    return layout(grid, max_lanes=len(grid.seeds) * len(grid.conditions))
