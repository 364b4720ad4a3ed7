"""A whole grid as one pure function of arrays: what `jaxaudit.run` takes, and what to make of what it gives."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import numpy as np

from jaxaudit.core.batches import Batch, layout
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import ForkInputs, Inputs
from jaxaudit.execution.telemetry_layout import blank_telemetry, place


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
    return layout(grid, most=len(grid.seeds) * len(grid.conditions))
