"""`run_batch`, the only loop that trains: it trains a batch of lanes from beginning to end in chunks of steps.

An audit in memory, a run in a folder, a replay and a margin search differ in their `BatchSink`, which provides initial
states and receives states and telemetry.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from jaxaudit.core.batches import Batch
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.engine import Engine, ProgramPiece, Source
from jaxaudit.execution.grid_program import blank_telemetry, place

CHUNKS_PER_RUN = 40


class BatchSink:
    """Provides the first states of batches, and receives the states and telemetry of their training.

    A subclass overrides what it needs: this class starts every batch at its onset and stores nothing.
    """

    def source(self, onset: int) -> Source:
        """Returns the `Source` of the baseline's states at an onset."""
        raise NotImplementedError

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        """Returns the step up to which a batch has been trained and its states there; None if it has not started."""
        return None

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Receives a batch's states at its onset and after every chunk; training donates them afterwards."""

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Receives the telemetry `[T, L, ...]` of the steps `start` to `stop`."""


def run_batch(engine: Engine, batch: Batch, sink: BatchSink, advance: Callable[..., Any] | None = None) -> None:
    """Trains a batch to its end, from its onset or from the step that `sink.restored` returns.

    `advance` replaces `engine.advance`, e.g. by a function that can be interrupted.
    """
    restored = sink.restored(engine, batch)
    if restored is None:
        step, states = batch.onset, engine.begin(batch, sink.source)
        sink.reached(engine, batch, states, step)
    else:
        step, states = restored
    del restored  # or the states could not be donated
    for start, stop in spans(engine.grid, batch, engine.rows):
        if start >= step:
            states, rows = (advance or engine.advance)(batch, states, start, stop)
            sink.rows(batch, rows, start, stop)
            sink.reached(engine, batch, states, stop)


def chunk_size(steps: int, requested: int = 0) -> int:
    """Returns the number of steps in a chunk: the requested number, or a fortieth of the run."""
    return min(requested or -(-steps // CHUNKS_PER_RUN), steps)


def spans(grid: Grid, batch: Batch, size: int) -> list[tuple[int, int]]:
    """Returns the chunks of a batch as pairs (start, stop).

    They end at multiples of `size`, and those of the baseline at onsets as well.
    """
    onsets = [] if batch.disturbed else [fork.onset for fork in grid.forks]
    multiples = range(-(-batch.onset // size) * size, batch.stop, size)
    edges = {batch.onset, batch.stop, *multiples, *(onset for onset in onsets if batch.onset < onset < batch.stop)}
    return list(pairwise(sorted(edges)))


def is_onset(grid: Grid, batch: Batch, step: int) -> bool:
    """Returns whether a batch belongs to the baseline and conditions fork from it at a step."""
    return not batch.disturbed and any(fork.onset == step for fork in grid.forks)


class MemorySink(BatchSink):
    """A sink in memory, for the telemetry of the whole grid and the baseline's states at the onsets.

    Attributes:
      arrays: the telemetry by channel, `[seed, condition, step, ...]`.
      trained: the baseline's performance, `[seed, step]`, NaN at steps for which it was not trained.
    """

    def __init__(self, grid: Grid, telemetry: bool = True):
        self.arrays = blank_telemetry(grid) if telemetry else {}
        self.trained = np.full((len(grid.seeds), grid.steps), np.nan, np.float32)
        self._grid = grid
        self._pieces: dict[int, list[ProgramPiece]] = {}

    def source(self, onset: int) -> Source:
        """Returns the baseline's states at an onset."""
        return lambda seeds: self._pieces[onset]

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Copies the baseline's states if the step is an onset."""
        if is_onset(self._grid, batch, step):
            self._pieces.setdefault(step, []).extend(engine.copies(batch, states))

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Writes the telemetry of a chunk into `arrays`, and the baseline's performance into `trained`."""
        if not batch.disturbed:
            self.trained[batch.seeds, start:stop] = np.asarray(rows[PERFORMANCE])[: stop - start, : len(batch.seeds)].T
        if self.arrays:
            place(self.arrays.__getitem__, self._grid, batch, rows, start, stop)
