"""Trains the batches of a run in this process, one after the other, alone or together with processes on other hosts."""

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
from jaxaudit.execution.driver import BatchSink, is_onset, run_batch
from jaxaudit.execution.engine import Engine, Source
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import COMPLETE, STOPPED, BatchAttempt, BatchFolder
from jaxaudit.runs.collect import GatheredBatches, gather
from jaxaudit.runs.disk_sink import FolderSink, onset_source
from jaxaudit.runs.progress import ProgressBar, ProgressReporter, count_chunks
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import hosts
from jaxaudit.runtime.errors import Interrupted, interruptible, stoppable
from jaxaudit.runtime.machine import format_bytes, release_memory, resident_memory
from jaxaudit.spec.document import Spec

GATHER_SECONDS = 30.0
"""The time between two times at which the telemetry of a batch in training is gathered."""


def train_locally(store: Folder, spec: Spec, engine: Engine, plan: Plan, gathered: GatheredBatches) -> None:
    """Trains and gathers the batches of a plan that are not gathered yet.

    In a run of several processes this is the leader's part; the others `follow`.

    Raises:
      Interrupted: Ctrl-C was pressed.
    """
    grid = engine.grid
    remaining = gathered.remaining(plan)
    trained = {batch.id: BatchFolder(store, batch).trained_until(grid) for batch in remaining}
    _print_plan(engine, remaining, plan, trained)
    with stoppable() as stop_requested, ProgressBar(grid, plan, engine.rows, trained) as progress:
        sink = _LeaderSink(store, engine, spec, plan, gathered, stop_requested, progress)
        for batch in plan:
            is_remaining = batch in remaining
            if hosts.broadcast(is_remaining and BatchFolder(store, batch).accepted() is None)[0]:
                run_batch(engine, batch, sink, partial(_advance_interruptibly, engine))
                sink.end()
            if is_remaining:
                gathered.accept(batch, progress.chunks_done)


def follow(store: Folder, engine: Engine, plan: Plan) -> None:
    """Trains, on this process's devices, the batches that `train_locally` trains in the leader.

    Raises:
      Interrupted: the leader was told to stop; Ctrl-C in this process has no effect.
    """
    sink = _FollowerSink(store, engine)
    with stoppable():
        for batch in plan:
            if hosts.broadcast(False)[0]:
                run_batch(engine, batch, sink, partial(_advance_interruptibly, engine))


def _advance_interruptibly(engine: Engine, *arguments: Any) -> Any:
    return interruptible(partial(engine.advance, *arguments))


class _LeaderSink(FolderSink):
    """Stores what is trained, reports progress, gathers telemetry now and then, and stops on request."""

    def __init__(
        self,
        store: Folder,
        engine: Engine,
        spec: Spec,
        plan: Plan,
        gathered: GatheredBatches,
        stop_requested: Callable[[], bool],
        progress: ProgressBar,
    ):
        super().__init__(store, engine, spec.run.checkpoint_every, stop_requested=stop_requested)
        self._plan, self._gathered, self._progress = plan, gathered, progress
        self._reporter = ProgressReporter(store, engine.grid, spec.metrics.window, progress)
        self._gathered_until: dict[int, int] = {}
        self._latest_gathering = time.monotonic()

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        """Begins an attempt as `FolderSink` does, and removes the states of earlier ones."""
        restored = super().restored(engine, batch)
        BatchFolder(self.store, batch).remove_superseded_states()
        return restored

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        super().rows(batch, rows, start, stop)
        self._reporter.report(batch, rows, start, stop)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Stores states as `FolderSink` does; raises Interrupted if a stop was requested."""
        super().reached(engine, batch, states, step)
        if is_onset(engine.grid, batch, step):
            BatchFolder(self.store, batch).publish_onsets()
        if step == batch.onset:
            return
        stopping = self.stop_requested() and not (batch is self._plan[-1] and step == batch.stop)
        hosts.broadcast(stopping)
        if stopping or time.monotonic() - self._latest_gathering > GATHER_SECONDS:
            after = self._gathered_until.get(batch.id, 0)
            self._gathered_until[batch.id] = gather(self.store, engine.grid, batch, self.attempt, after)
            self.store.update_environment(**self._gathered.elapsed())
            self._latest_gathering = time.monotonic()
        if stopping:
            self.end(COMPLETE if step == batch.stop else STOPPED)
            self.store.update_environment(status="interrupted", **self._gathered.elapsed())
            raise Interrupted(self._progress.stop_message(self.store.path))


class _FollowerSink(BatchSink):
    """A sink that does what the leader broadcasts."""

    attempt: BatchAttempt

    def __init__(self, store: Folder, engine: Engine):
        self._store, self._engine = store, engine

    def source(self, onset: int) -> Source:
        return onset_source(self._store, self._engine, onset)

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        number, step = hosts.broadcast(0, 0)
        self.attempt, states = BatchFolder(self._store, batch).open_attempt(number, step)
        if states is None:
            return None
        return step, engine.restored(checkpoint.load(states, engine.lane_shapes(batch)), batch)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        if is_onset(engine.grid, batch, step):
            self.attempt.save_onset(engine, states, step)
        elif batch.onset < step < batch.stop and hosts.broadcast(False)[0]:
            self.attempt.save(engine, states, step)
        if step > batch.onset and hosts.broadcast(False)[0]:
            raise Interrupted("")  # the leader prints how to continue


def _print_plan(engine: Engine, remaining: Plan, plan: Plan, trained: dict[int, int]) -> None:
    """Prints the memory that the remaining batches need and the chunks already done; compiles their programs."""
    if not remaining:
        return
    grid = engine.grid
    needed = interruptible(partial(memory.needs, engine, remaining))
    release_memory()
    groups = Counter(batch.fork for batch in remaining)
    width = max(len(batch.seeds) for batch in remaining)
    at_a_time = f"{width} lanes at a time" if max(groups.values()) > 1 else "all lanes at a time"
    free = memory.available_memory(grid.program.devices)
    warning = "" if free is None or needed.total <= free else f"; only {format_bytes(free)} are available"
    host = f" and {format_bytes(needed.host)} of the host's" if needed.host else ""
    in_use = resident_memory() if grid.program.devices[0].platform == "cpu" else 0
    total, lane = format_bytes(in_use + needed.total), format_bytes(needed.lane)
    part_in_use = f" ({format_bytes(in_use)} of it in use now)" if in_use else ""
    print(f"expected memory: {total}{part_in_use}{host}, {lane} a lane, {at_a_time}{warning}", file=sys.stderr)
    done, chunks = count_chunks(grid, plan, engine.rows, trained)
    if done:
        print(f"going on after {done} of {chunks} chunks", file=sys.stderr)
