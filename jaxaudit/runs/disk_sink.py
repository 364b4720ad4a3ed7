"""The sink of a run's batches on disk: reads the states they start from, and stores what is trained."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from functools import partial

from jaxaudit.core.batches import Batch
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.driver import BatchSink, is_onset
from jaxaudit.execution.engine import Engine, ProgramPiece, Source
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import COMPLETE, BatchAttempt, BatchFolder, onset_paths
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import hosts
from jaxaudit.runtime.errors import UserError

CHECKPOINT_TIME_SHARE = 0.05
"""The share of a run's time that writing checkpoints may take if the spec does not say how often to write them."""


class FolderSink(BatchSink):
    """A sink that stores what is trained in the run's folder.

    Attributes:
      store: the run.
      attempt: the attempt at the batch that was started last.

    Args:
      store: the run.
      engine: the engine that trains the batches.
      every: the number of chunks from one checkpoint to the next; 0 for as often as `CHECKPOINT_TIME_SHARE` allows.
      begun: when this process began to work on the batch, in seconds since the epoch; None for the time at which a
        batch starts.
      stop_requested: returns whether training is to stop, before which a checkpoint is written.
    """

    attempt: BatchAttempt

    def __init__(
        self,
        store: Folder,
        engine: Engine,
        every: int = 0,
        begun: float | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        self.store = store
        self.stop_requested = stop_requested
        self._engine = engine
        self._every = every
        self._chunks = 0
        self._last_checkpoint, self._checkpoint_seconds = time.monotonic(), 0.0
        self._compiled_before = 0.0
        self._begun = begun

    def source(self, onset: int) -> Source:
        """Returns the baseline's stored states at an onset."""
        return onset_source(self.store, self._engine, onset)

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        """Begins an attempt at a batch; returns the latest undamaged states and their step, None if there are none."""
        self._compiled_before = engine.compile_seconds
        worker = f"{platform.node()}:{os.getpid()}"
        self.attempt, point = BatchFolder(self.store, batch).begin(engine.grid, worker, self._begun or time.time())
        hosts.broadcast(self.attempt.number, -1 if point is None else point.step)
        if point is None:
            return None
        return point.step, engine.restored(checkpoint.load(point.states, engine.lane_shapes(batch)), batch)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Stores the baseline's states at onsets, and other states when a checkpoint is due."""
        if is_onset(engine.grid, batch, step):
            self.attempt.save_onset(engine, states, step)
        elif batch.onset < step < batch.stop and hosts.broadcast(self._checkpoint_due())[0]:
            start = time.monotonic()
            self.attempt.save(engine, states, step)
            self._last_checkpoint = time.monotonic()
            self._checkpoint_seconds = self._last_checkpoint - start

    def _checkpoint_due(self) -> bool:
        self._chunks += 1
        if self._every:
            due = self._chunks % self._every == 0
        else:
            due = CHECKPOINT_TIME_SHARE * (time.monotonic() - self._last_checkpoint) >= self._checkpoint_seconds
        return due or self.stop_requested()

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        self.attempt.write_rows(rows, start, stop)

    def end(self, outcome: str = COMPLETE) -> None:
        """Records how the attempt ended: `COMPLETE` or `STOPPED`."""
        self.attempt.end(outcome, time.time(), self._engine.compile_seconds - self._compiled_before)


def onset_source(store: Folder, engine: Engine, onset: int) -> Source:
    """Returns a function that loads the baseline's stored states at an onset.

    The function takes the positions of the seeds to load and raises UserError if their states are damaged.
    """
    return partial(_load_onset, store, engine, onset)


def _load_onset(store: Folder, engine: Engine, onset: int, seeds: set[int]) -> Iterator[ProgramPiece]:
    try:
        for path in onset_paths(store, onset, seeds):
            yield from checkpoint.load(path, engine.lane_shapes(), seeds)
    except checkpoint.Damaged as damage:
        raise UserError(f"{damage}, so the lanes that start from it cannot be trained") from None
