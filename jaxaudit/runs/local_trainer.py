"""Batches of a run trained in this process, one after the other."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxaudit.core.batches import Batch, Plan
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution import memory
from jaxaudit.execution.driver import is_onset, run_batch
from jaxaudit.execution.engine import Engine, Source
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import COMPLETE, STOPPED, Attempt, BatchFolder
from jaxaudit.runs.collect import GatheredBatches, gather
from jaxaudit.runs.disk_sink import FolderSink, onset_source
from jaxaudit.runs.progress import ProgressBar, ProgressReporter, count_chunks
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import hosts
from jaxaudit.runtime.errors import Interrupted, interruptible, stoppable
from jaxaudit.runtime.machine import release_memory, resident_memory
from jaxaudit.spec.document import Spec


def follow(store: Folder, engine: Engine, plan: Plan) -> None:
    """Trains what `jaxaudit.runs.local_trainer.train_locally` trains in the leading process, on this process's devices.

    Raises Interrupted: the first process was told to stop; Ctrl-C here is its affair.
    """
    place = _FollowerSink(store, engine)
    with stoppable():
        for batch in plan:
            if hosts.broadcast(False)[0]:
                run_batch(engine, batch, place, lambda *arguments: interruptible(partial(engine.advance, *arguments)))


class _FollowerSink:
    """A `jaxaudit.execution.driver.BatchSink` that does as the first process does."""

    attempt: Attempt

    def __init__(self, store: Folder, engine: Engine):
        self._store, self._engine = store, engine

    def source(self, onset: int) -> Source:
        return onset_source(self._store, self._engine, onset)

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


GATHER_SECONDS = 30.0
"""Between one time that telemetry is gathered from a batch in training and the next."""


def train_locally(store: Folder, spec: Spec, engine: Engine, plan: Plan, gathered: GatheredBatches) -> None:
    """Trains the batches that are not gathered yet, and gathers each.

    Raises Interrupted: Ctrl-C.
    """
    grid = engine.grid
    left = gathered.left(plan)
    begun = {batch.id: BatchFolder(store, batch).reached(grid) for batch in left}
    _print_plan(engine, left, plan, begun)
    with stoppable() as stopping, ProgressBar(grid, plan, engine.rows, begun) as progress:
        place = _LocalSink(store, engine, spec, plan, gathered, stopping, progress)
        for batch in plan:
            waiting = batch in left
            if hosts.broadcast(waiting and BatchFolder(store, batch).accepted() is None)[0]:
                run_batch(engine, batch, place, partial(_advance_interruptibly, engine))
                place.end()
            if waiting:
                gathered.accept(batch, progress.chunks_done)


def _advance_interruptibly(engine: Engine, *arguments: Any) -> Any:
    return interruptible(partial(engine.advance, *arguments))


class _LocalSink(FolderSink):
    """A run's batches in its folder, with progress told, telemetry gathered now and then, and a stop when asked."""

    def __init__(
        self,
        store: Folder,
        engine: Engine,
        spec: Spec,
        plan: Plan,
        gathered: GatheredBatches,
        stopping: Callable[[], bool],
        progress: ProgressBar,
    ):
        super().__init__(store, engine, spec.run.checkpoint_every)
        self._plan, self._done, self._stopping, self._progress = plan, gathered, stopping, progress
        self._teller = ProgressReporter(store, engine.grid, spec.metrics.window, progress)
        self._rows: dict[int, int] = {}
        self._latest = time.monotonic()

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        """The latest undamaged states of a batch; those of earlier attempts are needed no more."""
        found = super().restored(engine, batch)
        BatchFolder(self.store, batch).forget_earlier()
        return found

    def due(self) -> bool:
        """Whether states are to be kept: as often as was asked for, and before a stop."""
        return super().due() or self._stopping()

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        super().rows(batch, rows, start, stop)
        self._teller.tell(batch, rows, start, stop)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Keeps states, and stops if that is asked."""
        super().reached(engine, batch, states, step)
        if is_onset(engine.grid, batch, step):
            BatchFolder(self.store, batch).publish()
        if step == batch.onset:
            return
        stopping = self._stopping() and not (batch is self._plan[-1] and step == batch.stop)
        hosts.broadcast(stopping)
        if stopping or time.monotonic() - self._latest > GATHER_SECONDS:
            self._rows[batch.id] = gather(self.store, engine.grid, batch, self.attempt, self._rows.get(batch.id, 0))
            self.store.update_environment(**self._done.clock())
            self._latest = time.monotonic()
        if stopping:
            self.end(COMPLETE if step == batch.stop else STOPPED)
            self.store.update_environment(status="interrupted", **self._done.clock())
            after = f"stopped after {self._progress.chunks_done} of {self._progress.chunks} chunks"
            raise Interrupted(f"{after}; go on with: jaxaudit resume {self.store.path}")


def _print_plan(engine: Engine, left: Plan, plan: Plan, begun: dict[int, int]) -> None:
    """How what is left is about to run, on stderr; its programs are compiled for it."""
    if not left:
        return
    grid = engine.grid
    needed = interruptible(partial(memory.needs, engine, left))
    release_memory()
    groups = Counter(batch.fork for batch in left)
    most = max(len(batch.seeds) for batch in left)
    shares = f"{most} lanes at a time" if max(groups.values()) > 1 else "all lanes at a time"
    free = memory.available_memory(grid.program.devices)
    short = "" if free is None or needed.total <= free else f"; only {memory.format_bytes(free)} are available"
    host = f" and {memory.format_bytes(needed.host)} of the host's" if needed.host else ""
    held = resident_memory() if grid.program.devices[0].platform == "cpu" else 0
    total, lane = memory.format_bytes(held + needed.total), memory.format_bytes(needed.lane)
    already = f" ({memory.format_bytes(held)} of it in use now)" if held else ""
    print(f"expected memory: {total}{already}{host}, {lane} a lane, {shares}{short}", file=sys.stderr)
    done, chunks = count_chunks(grid, plan, engine.rows, begun)
    if done:
        print(f"going on after {done} of {chunks} chunks", file=sys.stderr)
