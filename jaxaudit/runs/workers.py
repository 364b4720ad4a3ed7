"""Batches of a run trained by workers, side by side, and the driver that hands them out."""

from __future__ import annotations

import functools
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxaudit.core.batches import Batch, Plan
from jaxaudit.core.grid import Grid
from jaxaudit.core.program import LaneState
from jaxaudit.execution.driver import chunk_size, run_batch
from jaxaudit.execution.engine import Engine
from jaxaudit.runs.attempts import COMPLETE, STOPPED, BatchFolder, seeds_at_onset
from jaxaudit.runs.collect import GatheredBatches, gather
from jaxaudit.runs.disk_sink import FolderSink
from jaxaudit.runs.progress import ProgressBar, ProgressReporter
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.run_opening import check_provenance, open_run
from jaxaudit.runtime.backends import Backend, Job
from jaxaudit.runtime.errors import Failed, Interrupted, UserError, error_from_exit_code, stoppable
from jaxaudit.spec.document import Spec

POLL_SECONDS = 0.5
"""Between one look at what workers have done and the next."""

STOP_SECONDS = 30.0
"""For workers to keep their states when they are told to stop."""

TRAIN_BATCH = f"{__name__}:train_batch"


def train_batch(folder: str, number: int, driver: str | None = None) -> None:
    """Trains one batch of a run, as an attempt of its own, beside whatever trains others; `resume` gathers them.

    A batch of a fork group begins from the baseline's states at its onset, which must be there.

    Args:
      folder: of the run.
      number: of the batch.
      driver: whoever hands the run's batches out; when it does so no more, this stops. None: nobody does.

    Raises:
      UserError: no run, or no such batch.
      Interrupted: it is told to stop.
    """
    begun = time.time()
    store, spec, grid = _open_run(folder, (Path(folder) / "spec.toml").stat().st_mtime_ns)
    plan = {batch.id: batch for batch in store.read_plan(grid)}
    if number not in plan:
        raise UserError(f"the run in {folder} has no batch {number}; it has 0 to {max(plan)}")
    check_provenance(store, grid)
    if BatchFolder(store, plan[number]).accepted() is None:
        engine = Engine(grid, chunk_size(grid.steps, spec.run.chunk))
        place = _WorkerSink(store, engine, spec.run.checkpoint_every, begun, driver)
        run_batch(engine, plan[number], place)
        place.end(COMPLETE)


@functools.lru_cache(maxsize=1)
def _open_run(folder: str, written: int) -> tuple[Folder, Spec, Grid]:
    """A run, the same grid for each of its batches that a process trains: they share compiled programs."""
    return open_run(Path(folder))


class _WorkerSink(FolderSink):
    """A run's batches in its folder, and a stop when their driver is there no more, or another is."""

    def __init__(self, store: Folder, engine: Engine, every: int, begun: float, driver: str | None):
        super().__init__(store, engine, every, begun)
        self._driver = driver

    def due(self) -> bool:
        """Whether states are to be kept: as often as was asked for, and before a stop."""
        return super().due() or self._stopping()

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Keeps states, and stops if that is asked."""
        super().reached(engine, batch, states, step)
        if batch.onset < step < batch.stop and self._stopping():
            self.end(STOPPED)
            raise Interrupted("told to stop")

    def _stopping(self) -> bool:
        return self._driver is not None and self.store.read_driver() != self._driver


@dataclass
class _Task:
    """A batch that a worker trains.

    Attributes:
      seen: the step up to which its telemetry was told of.
      died: where its workers were when they were lost, the steps up to which there was telemetry.
    """

    batch: Batch
    job: Job | None = None
    seen: int = 0
    died: list[int] = field(default_factory=list)


def train_by_workers(
    store: Folder, spec: Spec, grid: Grid, plan: Plan, gathered: GatheredBatches, backend: Backend
) -> None:
    """Has the batches that are not gathered yet trained by an engine's workers, and gathers each.

    The baseline's come first, and a fork group's as soon as the states they begin from are there. One whose worker was
    lost is handed in again and goes on from its latest states; an error of the program ends the run.

    Raises:
      Interrupted: Ctrl-C.
      Failed: a batch lost its worker twice in the same chunk.
      UserError, Failed: what a worker failed with.
    """
    left = gathered.left(plan)
    begun = {batch.id: BatchFolder(store, batch).reached(grid) for batch in left}
    rows = chunk_size(grid.steps, spec.run.chunk)
    print(f"{len(left)} of {len(plan)} batches to train, {backend.workers} at a time", file=sys.stderr)
    with stoppable() as stopping, ProgressBar(grid, plan, rows, begun) as progress:
        driver = _Driver(store, grid, gathered, backend, ProgressReporter(store, grid, spec.metrics.window, progress))
        try:
            driver.train([_Task(batch, seen=begun[batch.id]) for batch in left], stopping)
        finally:
            driver.stop()
        if driver.waiting or driver.running:
            store.update_environment(status="interrupted", **gathered.clock())
            after = f"stopped after {progress.chunks_done} of {progress.chunks} chunks"
            raise Interrupted(f"{after}; go on with: jaxaudit resume {store.path}")


class _Driver:
    """Hands out a run's batches.

    Attributes:
      waiting, running: those not trained yet.
    """

    def __init__(
        self, store: Folder, grid: Grid, gathered: GatheredBatches, backend: Backend, teller: ProgressReporter
    ):
        self.waiting: list[_Task] = []
        self.running: list[_Task] = []
        self._store, self._grid, self._gathered = store, grid, gathered
        self._backend, self._teller = backend, teller
        self._name = secrets.token_hex(8)

    def train(self, tasks: Sequence[_Task], stopping: Any) -> None:
        """Has them trained, to the end or until told to stop."""
        self._store.write_driver(self._name)
        self.waiting = list(tasks)
        while (self.waiting or self.running) and not stopping():
            self._hand_out()
            done = [task for task in self.running if self._look(task)]
            self.running = [task for task in self.running if task not in done and task not in self.waiting]
            self._hand_out()  # before what is done is gathered, which takes its time
            for task in done:
                self._gathered.accept(task.batch, self._teller.progress.chunks_done)
            if not done:
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Tells workers to stop, ends those that do not, and gathers what there is of their telemetry."""
        self._store.write_driver("")
        until = time.monotonic() + STOP_SECONDS
        while time.monotonic() < until and any(task.job and task.job.ended() is None for task in self.running):
            time.sleep(POLL_SECONDS)
        for task in self.running:
            if task.job:
                task.job.cancel()
            if attempt := BatchFolder(self._store, task.batch).newest():
                gather(self._store, self._grid, task.batch, attempt)

    def _hand_out(self) -> None:
        """Hands in what is ready, as far as there are workers."""
        held: dict[int, set[int]] = {}
        for task in list(self.waiting):
            batch = task.batch
            if len(self.running) >= self._backend.workers:
                return
            if batch.disturbed and batch.onset not in held:
                held[batch.onset] = seeds_at_onset(self._store, batch.onset)
            if not batch.disturbed or held[batch.onset].issuperset(batch.seeds.tolist()):
                self.waiting.remove(task)
                self.running.append(task)
                if BatchFolder(self._store, batch).accepted() is None:
                    arguments = {"folder": str(self._store.path), "number": batch.id, "driver": self._name}
                    task.job = self._backend.submit(TRAIN_BATCH, arguments)

    def _look(self, task: _Task) -> bool:
        """Tells of what a worker has done since; whether its batch is trained to its end."""
        batch, folder = task.batch, BatchFolder(self._store, task.batch)
        ended = task.job.ended() if task.job else None  # before its files are looked at: they are all there then
        if not batch.disturbed:
            folder.publish()
        if newest := folder.newest():
            folder.forget_earlier()
            for rows, start, stop in newest.rows(task.seen):
                if not batch.disturbed:
                    self._store.write_rows(self._grid, batch, rows, start, stop)  # forks are measured against it
                self._teller.tell(batch, rows, start, stop)
                task.seen = stop
        if ended is not None and ended.lost is None:
            for line in ended.said.splitlines():
                print(line, file=sys.stderr)
        if (accepted := folder.accepted()) is not None:
            if task.job and newest and accepted.number < newest.number:  # one that was taken for lost was first
                task.job.cancel()
            return True
        if ended is not None and ended.lost is not None:
            self._lost(task, ended.lost)
        elif ended is not None:
            raise error_from_exit_code(ended.code or 1, ended.error or f"a worker left batch {batch.id} untrained")
        return False

    def _lost(self, task: _Task, why: str) -> None:
        """Hands a batch in again whose worker was lost, unless that was in the same chunk as the time before."""
        newest = BatchFolder(self._store, task.batch).newest()
        spans = newest.spans() if newest else []
        task.died.append(max((stop for _, stop in spans), default=task.batch.onset))
        if task.died[-2:] == [task.died[-1]] * 2:
            raise Failed(
                f"batch {task.batch.id} lost its worker twice after step {task.died[-1]} ({why}), so it is given up; "
                f"go on with: jaxaudit resume {self._store.path}"
            )
        print(f"note: batch {task.batch.id} lost its worker after step {task.died[-1]} ({why})", file=sys.stderr)
        self.waiting.insert(0, task)
        task.job = None
