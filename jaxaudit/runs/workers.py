"""Trains the batches of a run by workers, side by side: the driver that distributes them, and the call of a worker."""

from __future__ import annotations

import functools
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
"""The time between two checks of what workers have done."""

STOP_SECONDS = 30.0
"""The time that workers have to store their states when they are told to stop."""

TRAIN_BATCH = f"{__name__}:train_batch"


def train_batch(folder: str, number: int, driver: str | None = None) -> None:
    """Trains one batch of a run in an attempt of its own, beside processes that train others; `resume` gathers them.

    A batch of a fork group starts from the baseline's states at its onset, which must be stored.

    Args:
      folder: the run's folder.
      number: the number of the batch.
      driver: the name of the driver that distributes the run's batches; training stops when the run has another one.
        None if there is no driver.

    Raises:
      UserError: there is no run, or no such batch.
      Interrupted: the driver stopped.
    """
    begun = time.time()
    store, spec, grid = _open_run(folder, (Path(folder) / "spec.toml").stat().st_mtime_ns)
    batches = {batch.id: batch for batch in store.read_plan(grid)}
    if number not in batches:
        raise UserError(f"the run in {folder} has no batch {number}; it has 0 to {max(batches)}")
    check_provenance(store, grid)
    if BatchFolder(store, batches[number]).accepted() is None:
        engine = Engine(grid, chunk_size(grid.steps, spec.run.chunk))

        def driver_is_gone() -> bool:
            return driver is not None and store.read_driver() != driver

        sink = _WorkerSink(store, engine, spec.run.checkpoint_every, begun, driver_is_gone)
        run_batch(engine, batches[number], sink)
        sink.end(COMPLETE)


@functools.lru_cache(maxsize=1)
def _open_run(folder: str, spec_modified_ns: int) -> tuple[Folder, Spec, Grid]:
    """Opens a run; the batches that a process trains share the grid and thereby the compiled programs."""
    return open_run(Path(folder))


class _WorkerSink(FolderSink):
    """Stores what is trained, and stops after a chunk on request."""

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Stores states as `FolderSink` does; raises Interrupted if a stop is requested."""
        super().reached(engine, batch, states, step)
        if batch.onset < step < batch.stop and self.stop_requested():
            self.end(STOPPED)
            raise Interrupted("told to stop")


@dataclass
class _Task:
    """A batch that is to be trained by a worker.

    Attributes:
      batch: the batch.
      job: the call of the worker that trains it; None if there is none.
      reported_until: the step up to which its progress was reported.
      losses: the steps up to which telemetry was stored whenever a worker was lost.
    """

    batch: Batch
    job: Job | None = None
    reported_until: int = 0
    losses: list[int] = field(default_factory=list)


def train_by_workers(
    store: Folder, spec: Spec, grid: Grid, plan: Plan, gathered: GatheredBatches, backend: Backend
) -> None:
    """Trains the batches of a plan that are not gathered yet by the workers of a backend, and gathers each.

    The baseline's come first; a fork group's follow as soon as the states are stored that they start from. A batch
    that loses its worker is submitted again and continues from its latest states.

    Raises:
      Interrupted: Ctrl-C was pressed.
      Failed: a batch lost its worker twice in the same chunk.
      UserError, Failed: a worker failed.
    """
    remaining = gathered.remaining(plan)
    trained = {batch.id: BatchFolder(store, batch).trained_until(grid) for batch in remaining}
    chunk = chunk_size(grid.steps, spec.run.chunk)
    print(f"{len(remaining)} of {len(plan)} batches to train, {backend.workers} at a time", file=sys.stderr)
    with stoppable() as stop_requested, ProgressBar(grid, plan, chunk, trained) as progress:
        reporter = ProgressReporter(store, grid, spec.metrics.window, progress)
        driver = _Driver(store, grid, gathered, backend, reporter)
        try:
            driver.train([_Task(batch, reported_until=trained[batch.id]) for batch in remaining], stop_requested)
        finally:
            driver.stop()
        if driver.waiting or driver.running:
            store.update_environment(status="interrupted", **gathered.elapsed())
            raise Interrupted(progress.stop_message(store.path))


class _Driver:
    """Distributes a run's batches to workers.

    Attributes:
      waiting: the batches that have no worker yet.
      running: the batches that have one.
    """

    def __init__(
        self, store: Folder, grid: Grid, gathered: GatheredBatches, backend: Backend, reporter: ProgressReporter
    ):
        self.waiting: list[_Task] = []
        self.running: list[_Task] = []
        self._store, self._grid, self._gathered = store, grid, gathered
        self._backend, self._reporter = backend, reporter
        self._name = secrets.token_hex(8)

    def train(self, tasks: Sequence[_Task], stop_requested: Callable[[], bool]) -> None:
        """Has the batches trained until all are done or a stop is requested."""
        self._store.write_driver(self._name)
        self.waiting = list(tasks)
        while (self.waiting or self.running) and not stop_requested():
            self._submit_ready()
            done = [task for task in self.running if self._check(task)]
            self.running = [task for task in self.running if task not in done and task not in self.waiting]
            self._submit_ready()  # keeps workers busy while the batches that are done are gathered
            for task in done:
                self._gathered.accept(task.batch, self._reporter.progress.chunks_done)
            if not done:
                time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Tells workers to stop, kills those that do not within `STOP_SECONDS`, and gathers their telemetry."""
        self._store.write_driver("")
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and any(task.job and task.job.poll() is None for task in self.running):
            time.sleep(POLL_SECONDS)
        for task in self.running:
            if task.job:
                task.job.cancel()
            if attempt := BatchFolder(self._store, task.batch).newest():
                gather(self._store, self._grid, task.batch, attempt)

    def _submit_ready(self) -> None:
        """Submits the waiting batches that can start, as far as there are workers."""
        seeds: dict[int, set[int]] = {}
        for task in list(self.waiting):
            batch = task.batch
            if len(self.running) >= self._backend.workers:
                return
            if batch.disturbed and batch.onset not in seeds:
                seeds[batch.onset] = seeds_at_onset(self._store, batch.onset)
            if not batch.disturbed or seeds[batch.onset].issuperset(batch.seeds.tolist()):
                self.waiting.remove(task)
                self.running.append(task)
                if BatchFolder(self._store, batch).accepted() is None:
                    arguments = {"folder": str(self._store.path), "number": batch.id, "driver": self._name}
                    task.job = self._backend.submit(TRAIN_BATCH, arguments)

    def _check(self, task: _Task) -> bool:
        """Reports what a worker has trained since the last check; returns whether its batch is done.

        Raises:
          UserError, Interrupted, Failed: the worker failed.
        """
        batch, folder = task.batch, BatchFolder(self._store, task.batch)
        result = task.job.poll() if task.job else None  # before its files are read, which are then complete
        if not batch.disturbed:
            folder.publish_onsets()
        if newest := folder.newest():
            folder.remove_superseded_states()
            for rows, start, stop in newest.read_rows(task.reported_until):
                if not batch.disturbed:
                    self._store.write_rows(
                        self._grid, batch, rows, start, stop
                    )  # the collapse of forks is judged by it
                self._reporter.report(batch, rows, start, stop)
                task.reported_until = stop
        if result is not None and result.lost is None:
            for line in result.stderr.splitlines():
                print(line, file=sys.stderr)
        if (accepted := folder.accepted()) is not None:
            if task.job and newest and accepted.number < newest.number:  # an earlier worker, believed lost, was faster
                task.job.cancel()
            return True
        if result is not None and result.lost is not None:
            self._resubmit(task, result.lost)
        elif result is not None:
            raise error_from_exit_code(result.code or 1, result.error or f"a worker left batch {batch.id} untrained")
        return False

    def _resubmit(self, task: _Task, reason: str) -> None:
        """Puts a batch that lost its worker back in the queue; raises Failed if that happened twice in one chunk."""
        newest = BatchFolder(self._store, task.batch).newest()
        chunks = newest.chunks() if newest else []
        step = max((stop for _, stop in chunks), default=task.batch.onset)
        if task.losses[-1:] == [step]:
            raise Failed(
                f"batch {task.batch.id} lost its worker twice after step {step} ({reason}), so it is given up; "
                f"go on with: jaxaudit resume {self._store.path}"
            )
        task.losses.append(step)
        print(f"note: batch {task.batch.id} lost its worker after step {step} ({reason})", file=sys.stderr)
        self.waiting.insert(0, task)
        task.job = None
