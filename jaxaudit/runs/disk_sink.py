"""The place of a run's batches on disk: where they begin, and where what is trained of them goes."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from functools import partial

from jaxaudit.core.batches import Batch
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.driver import is_onset
from jaxaudit.execution.engine import Engine, ProgramPiece, Source
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import COMPLETE, Attempt, BatchFolder, onset_paths
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import hosts
from jaxaudit.runtime.errors import UserError

CHECKPOINT_TIME_SHARE = 0.05
"""The share of a run's time that keeping states may take, where nobody says how often they are to be kept."""


class FolderSink:
    """The place of a run's batches: a `jaxaudit.execution.driver.BatchSink` on disk.

    Attributes:
      store: the run.
      attempt: at the batch that was begun last.

    Args:
      engine: trains them.
      every: chunks between one time that states are kept and the next; 0: as `KEEPING` says.
      begun: when this process began with it, in seconds since the epoch; None: when a batch begins.
    """

    attempt: Attempt

    def __init__(self, store: Folder, engine: Engine, every: int = 0, begun: float | None = None):
        self.store = store
        self._engine = engine
        self._every = every
        self._chunks = 0
        self._kept, self._cost = time.monotonic(), 0.0
        self._compiled = 0.0
        self._begun = begun

    def source(self, onset: int) -> Source:
        """The baseline's stored states at an onset."""
        return onset_source(self.store, self._engine, onset)

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        """The latest undamaged states of a batch; a new attempt goes on from them."""
        self._compiled = engine.compile_seconds
        worker = f"{platform.node()}:{os.getpid()}"
        self.attempt, standing = BatchFolder(self.store, batch).begin(engine.grid, worker, self._begun or time.time())
        hosts.broadcast(self.attempt.number, -1 if standing is None else standing.step)
        if standing is None:
            return None
        return standing.step, engine.restored(checkpoint.load(standing.states, engine.lane_shapes(batch)), batch)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Keeps the baseline's states at onsets, and others as often as they are to be kept."""
        if is_onset(engine.grid, batch, step):
            self.attempt.save_onset(engine, states, step)
        elif batch.onset < step < batch.stop and hosts.broadcast(self.due())[0]:
            begun = time.monotonic()
            self.attempt.save(engine, states, step)
            self._kept = time.monotonic()
            self._cost = self._kept - begun

    def due(self) -> bool:
        """Whether states are to be kept now: after so many chunks, or as often as takes `KEEPING` of the time."""
        self._chunks += 1
        if self._every:
            return self._chunks % self._every == 0
        return CHECKPOINT_TIME_SHARE * (time.monotonic() - self._kept) >= self._cost

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        self.attempt.write_rows(rows, start, stop)

    def end(self, outcome: str = COMPLETE) -> None:
        """Says how the attempt ended: at the end of the batch, or it was told to stop."""
        self.attempt.end(outcome, time.time(), self._engine.compile_seconds - self._compiled)


def onset_source(store: Folder, engine: Engine, onset: int) -> Source:
    """The baseline's stored states at an onset. Raises UserError, when they are taken, if they are damaged."""
    return partial(_load_onset, store, engine, onset)


def _load_onset(store: Folder, engine: Engine, onset: int, seeds: set[int]) -> Iterator[ProgramPiece]:
    try:
        for path in onset_paths(store, onset, seeds):
            yield from checkpoint.load(path, engine.onset_shapes(), seeds)
    except checkpoint.Damaged as damage:
        raise UserError(f"{damage}, and what follows from it cannot be computed") from None
