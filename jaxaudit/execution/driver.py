"""The one loop that trains: a batch of lanes from its beginning to its end, in chunks of steps.

What differs between an audit in memory, a run in a folder, a replay and a search for margins is where states come from
and what becomes of what is trained: a `BatchSink`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from jaxaudit.core.batches import Batch
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.engine import Engine, ProgramPiece, Source
from jaxaudit.execution.grid_program import blank_telemetry, place

CHUNKS_PER_RUN = 40


class BatchSink(Protocol):
    """Where a batch begins, and where what it trains goes."""

    def source(self, onset: int) -> Source:
        """Returns the baseline's states at an onset."""

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        """The step up to which a batch is trained already, and its states there; None where it begins."""

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """A batch's states at its beginning and after every chunk; they are trained on when this returns."""

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """The telemetry `[T, L, ...]` of steps `start` to `stop`."""


def run_batch(engine: Engine, batch: Batch, place: BatchSink, advance: Callable[..., Any] | None = None) -> None:
    """Trains a batch from where it stands to its end; `advance` in place of the engine's, e.g. one to interrupt."""
    known = place.restored(engine, batch)
    if known is None:
        step, states = batch.onset, engine.begin(batch, place.source)
        place.reached(engine, batch, states, step)
    else:
        step, states = known
    del known
    for start, stop in spans(engine.grid, batch, engine.rows):
        if start >= step:
            states, rows = (advance or engine.advance)(batch, states, start, stop)
            place.rows(batch, rows, start, stop)
            place.reached(engine, batch, states, stop)


def chunk_size(steps: int, chosen: int = 0) -> int:
    """Steps in a chunk: what was chosen, or a fortieth of the run."""
    return min(chosen or -(-steps // CHUNKS_PER_RUN), steps)


def spans(grid: Grid, batch: Batch, size: int) -> list[tuple[int, int]]:
    """The chunks of a batch, (start, stop): they end at multiples of `size`, and the baseline's at onsets too."""
    also = [] if batch.disturbed else [fork.onset for fork in grid.forks]
    multiples = range(-(-batch.onset // size) * size, batch.stop, size)
    edges = {batch.onset, batch.stop, *multiples, *(e for e in also if batch.onset < e < batch.stop)}
    return list(pairwise(sorted(edges)))


def is_onset(grid: Grid, batch: Batch, step: int) -> bool:
    """Whether a batch is of the baseline and conditions fork from it at a step."""
    return not batch.disturbed and any(fork.onset == step for fork in grid.forks)


class MemorySink:
    """A place in memory: telemetry of the whole grid, and the baseline's states at the onsets.

    Attributes:
      arrays: telemetry by channel, `[seed, condition, step, ...]`.
      trained: the baseline's performance, `[seed, step]`, NaN where it was not trained.
    """

    def __init__(self, grid: Grid, telemetry: bool = True):
        self.arrays = blank_telemetry(grid) if telemetry else {}
        self.trained = np.full((len(grid.seeds), grid.steps), np.nan, np.float32)
        self._grid = grid
        self._pieces: dict[int, list[ProgramPiece]] = {}

    def source(self, onset: int) -> Source:
        """Returns the baseline's states at an onset."""
        return lambda seeds: self._pieces[onset]

    def restored(self, engine: Engine, batch: Batch) -> None:
        """Returns where a batch goes on; None where it begins."""

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Takes the states at a step."""
        if is_onset(self._grid, batch, step):
            self._pieces.setdefault(step, []).extend(engine.copies(batch, states))

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Takes the telemetry of a chunk."""
        if not batch.disturbed:
            self.trained[batch.seeds, start:stop] = np.asarray(rows[PERFORMANCE])[: stop - start, : len(batch.seeds)].T
        if self.arrays:
            place(self.arrays.__getitem__, self._grid, batch, rows, start, stop)
