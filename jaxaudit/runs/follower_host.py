"""Batches of a run trained together with the process that leads: it decides, and has all files but checkpoints."""

from __future__ import annotations

from functools import partial

from jaxaudit.core.batches import Batch, Plan
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.driver import is_onset, run_batch
from jaxaudit.execution.engine import Engine, Source
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import BatchFolder, LaneAttempt
from jaxaudit.runs.disk_sink import at_onset
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import hosts
from jaxaudit.runtime.errors import Interrupted
from jaxaudit.runtime.interrupts import interruptible, stoppable


def follow(store: Folder, engine: Engine, plan: Plan) -> None:
    """Trains what `jaxaudit.runs.local_trainer.train_here` trains in the leading process, on this process's devices.

    Raises Interrupted: the first process was told to stop; Ctrl-C here is its affair.
    """
    place = _Following(store, engine)
    with stoppable():
        for batch in plan:
            if hosts.broadcast(False)[0]:
                run_batch(engine, batch, place, lambda *arguments: interruptible(partial(engine.advance, *arguments)))


class _Following:
    """A `jaxaudit.execution.driver.BatchSink` that does as the first process does."""

    attempt: LaneAttempt

    def __init__(self, store: Folder, engine: Engine):
        self._store, self._engine = store, engine

    def source(self, onset: int) -> Source:
        return at_onset(self._store, self._engine, onset)

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        number, step = hosts.broadcast(0, 0)
        self.attempt, states = BatchFolder(self._store, batch).joined(number, step)
        if states is None:
            return None
        return step, engine.restored(checkpoint.load(states, engine.lane_shapes(batch)), batch)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        if is_onset(engine.grid, batch, step):
            self.attempt.save_onset(engine, states, step)
        elif batch.onset < step < batch.stop and hosts.broadcast(False)[0]:
            self.attempt.save(engine, states, step)
        if step > batch.onset and hosts.broadcast(False)[0]:
            raise Interrupted("")  # the first says how to go on

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        pass
