"""Durable execution: a grid advanced in chunks of steps, with checkpoints between; it stops anywhere and goes on."""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit import datasets, results
from jaxaudit.batches import Batch, Plan, layout
from jaxaudit.errors import UserError
from jaxaudit.execution import memory
from jaxaudit.execution.choice import settle
from jaxaudit.execution.driver import chunk_size, run_batch, spans
from jaxaudit.execution.engine import Engine
from jaxaudit.grid import Fork, Grid
from jaxaudit.learner import ACTING, PERFORMANCE, Telemetry
from jaxaudit.machine import give_back, resident
from jaxaudit.program import LaneState, telemetry_shapes
from jaxaudit.runner import checkpoint
from jaxaudit.runner.begin import beginning
from jaxaudit.runner.interrupts import Interrupted, interruptible, stoppable
from jaxaudit.runner.progress import Progress, chunks_of, collapsed, performance_level
from jaxaudit.runner.store import VERSION, Folder, check_space, differences, environment
from jaxaudit.runner.trained import BatchFolder, InFolder, forget_lost, onset_paths, standing
from jaxaudit.specification.document import Spec, load

EARLIER = "0.1."
"""How versions begin whose runs cannot be gone on with."""

GATHER_SECONDS = 30.0
"""Between one time that telemetry is gathered from a batch in training and the next."""

__all__ = ["Interrupted", "fork", "is_finished", "open_finished", "open_run", "resume", "run", "train_batch"]


def run(spec: Spec, folder: Path) -> None:
    """Runs a spec in a new folder.

    Raises:
      UserError: the folder is taken or cannot be made, or the grid cannot fit; nothing is created then.
      Interrupted: Ctrl-C; see `resume`.
    """
    spec = spec.expanded()
    _start(spec, spec.build(), Path(folder))


def resume(folder: Path) -> None:
    """Goes on with a run that stopped, from its latest undamaged checkpoint.

    Raises:
      UserError: no run, one that is finished, or one that another process is at work on.
      Interrupted: Ctrl-C.
    """
    store, spec, grid = open_run(folder)
    if is_finished(store):
        raise UserError(f"the run in {folder} is already finished")
    if not store.telemetry.exists():
        raise UserError(f"{folder} has lost its telemetry.zarr, so the run cannot go on; run its spec again")
    _check_provenance(store, grid)
    plan = store.read_plan(grid)
    with store.held():
        changed = differences(store.read_environment(), grid, plan)
        for what, then, now in changed:
            print(f"note: {what} was {then} and is {now}: results may not be bitwise the same", file=sys.stderr)
        if changed:
            store.update_environment(resumed_with={what: now for what, _, now in changed})
        _announce(spec, grid)
        _execute(store, spec, Engine(grid, chunk_size(grid.steps, spec.run.chunk)), plan)


def fork(folder: Path, spec: Spec, out: Path) -> None:
    """Runs new conditions from the onsets a finished run stored, in a new folder, for their suffixes' cost.

    Raises:
      UserError: as `run`; or the run is not finished, more than conditions is changed, or an onset is not
        stored.
      Interrupted: Ctrl-C; `resume` then needs the new folder alone.
    """
    source, old, old_grid = open_finished(folder)
    _check_provenance(source, old_grid)
    differing = [t for t in ("task", "learner") if getattr(old, t) != getattr(spec, t)]
    differing += [k for k in ("seeds", "steps", "telemetry") if getattr(old.audit, k) != getattr(spec.audit, k)]
    if differing:
        raise UserError(f"the spec to fork must keep the run's {' and '.join(differing)}")
    spec = spec.expanded()
    grid = replace(spec.build(), tail=0)
    check_monitor(Path(folder), old_grid, grid)
    stored = {f.onset: f for f in old_grid.forks}
    for onset in (f.onset for f in grid.forks):
        if onset not in stored:
            has = ", ".join(str(o) for o in stored)
            raise UserError(f"no stored onset at step {onset}; the run in {folder} has {has}")
    _start(spec, grid, Path(out), source, stored)


def train_batch(folder: Path, number: int) -> None:
    """Trains one batch of a run, in its own folder, beside whatever trains others; `resume` gathers them.

    A batch of a fork group begins from the baseline's states at its onset, which must be there.

    Raises:
      UserError: no run, no such batch, or another process is at work on it.
    """
    store, spec, grid = open_run(folder)
    plan = {batch.id: batch for batch in store.read_plan(grid)}
    if number not in plan:
        raise UserError(f"the run in {folder} has no batch {number}; it has 0 to {max(plan)}")
    _check_provenance(store, grid)
    mine = BatchFolder(store, plan[number])
    with mine.held():
        if not mine.complete:
            engine = Engine(grid, chunk_size(grid.steps, spec.run.chunk))
            run_batch(engine, plan[number], InFolder(store, engine, spec.run.checkpoint_every))
            mine.make_complete()


def open_run(folder: Path) -> tuple[Folder, Spec, Grid]:
    """The run in a folder, on as many devices as it was begun on if they are there.

    Raises UserError if there is none, or it is an earlier version's.
    """
    store = Folder(Path(folder))
    if not store.spec.is_file():
        raise UserError(f"{folder} is not a run's folder: it has no spec.toml")
    recorded = store.read_environment()
    if (made := str(recorded.get("jaxaudit", VERSION))).startswith(EARLIER):
        raise UserError(
            f"the run in {folder} was made by jaxaudit {made}: {VERSION} can report and read it, not go on with it; "
            "run its spec again"
        )
    spec = load(store.spec)
    grid = spec.build()
    devices = recorded.get("devices")
    if isinstance(devices, int) and 0 < devices < len(grid.program.devices):
        grid = replace(grid, program=replace(grid.program, devices=grid.program.devices[:devices]))
    if grid.program.execution == "auto":
        execution = recorded.get("lane_layout", {}).get("execution", "vmap")
        grid = replace(grid, program=replace(grid.program, execution=execution))
    if recorded.get("forked_from"):
        grid = replace(grid, tail=0)
    return store, spec, grid


def open_finished(folder: Path) -> tuple[Folder, Spec, Grid]:
    """As `open_run`; raises UserError, too, if the run is not finished."""
    store, spec, grid = open_run(folder)
    if not is_finished(store):
        raise UserError(f"the run in {folder} is not finished; end it with: jaxaudit resume {folder}")
    return store, spec, grid


def _check_provenance(store: Folder, grid: Grid) -> None:
    """Raises UserError where what a run depends on, e.g. a corpus or a monitor, is not what it began with."""
    then = store.read_environment().get("provenance", {})
    for what, now in grid.provenance.items():
        if then.get(what) != now:
            raise UserError(f"the run in {store.path} began with another {what}: {then.get(what)}, and now it is {now}")


def check_monitor(folder: Path, ran: Grid, grid: Grid) -> None:
    """Raises UserError where a grid that goes on from a run's onsets has another monitor than the run."""
    then, now = (one.provenance.get("monitor") for one in (ran, grid))
    if then is None and now is not None:
        raise UserError(f"the run in {folder} has no monitor to go on with, and the spec has a [monitor]")
    if then != now:
        raise UserError(f"the spec must keep the run's [monitor], {Folder(folder).monitor}, and its alpha")


def is_finished(store: Folder) -> bool:
    """Whether a run got to its end."""
    return store.read_environment().get("status") == "finished"


def _start(
    spec: Spec, grid: Grid, folder: Path, source: Folder | None = None, stored: dict[int, Fork] | None = None
) -> None:
    """Begins a run, and does it. What it needs from a `source` is copied before it counts as begun."""
    with ExitStack() as stack:
        with beginning(folder) as store:
            rows = chunk_size(grid.steps, spec.run.chunk)
            laid_out = partial(layout, grid, baseline=source is None)
            # Before anything is compiled: as it is with the fewest lanes at a time, where that is still open.
            fewest = laid_out(grid.batch or len(grid.program.devices))
            check_space(grid, fewest, Engine(grid, rows), folder)
            _announce(spec, grid)
            grid, measured = interruptible(partial(settle, grid, rows, baseline=source is None))
            _tell_choice(grid, measured)
            laid_out = partial(layout, grid, baseline=source is None)
            engine, plan, _ = interruptible(partial(memory.fit, grid, rows, laid_out))
            check_space(grid, plan, engine, folder)
            known = ({"forked_from": str(source.path)} if source else {}) | ({"measured": measured} if measured else {})
            store.make(**environment(grid, plan), **known)
            stack.enter_context(store.held())
            store.create_telemetry(grid, telemetry_shapes(grid.program), rows)
            store.write_plan(plan)
            if source and stored:
                _copy_onsets(source, stored, store, grid)
            spec = _with_its_monitor(spec, store)
            store.write(store.spec, spec.to_toml())
        _execute(store, spec, engine, plan)


def _with_its_monitor(spec: Spec, store: Folder) -> Spec:
    """The spec as it is stored: its monitor, if it has one, is a copy in the run's folder."""
    if spec.monitor is None:
        return spec
    shutil.copyfile(spec.monitor.path, store.monitor)
    return replace(spec, monitor=replace(spec.monitor, file=store.monitor.name, folder=store.path))


def _copy_onsets(source: Folder, stored: dict[int, Fork], store: Folder, grid: Grid) -> None:
    """The baseline's states at the onsets and its telemetry before them, from the run that is forked."""
    store.write_channel("baseline_performance", source.read_channel("baseline_performance"))
    for f in grid.forks:
        try:
            paths = onset_paths(source, f.onset, range(len(grid.seeds)))
            for path in paths:
                checkpoint.verify(path)
        except checkpoint.Damaged as damage:
            raise UserError(f"{damage}, so nothing can be forked from step {f.onset}") from None
        for path in paths:
            shutil.copytree(path, store.checkpoints / path.name)
        store.copy_prefix(source, stored[f.onset], f)


def _execute(store: Folder, spec: Spec, engine: Engine, plan: Plan) -> None:
    """Does what is left of a run that is held, from each batch's latest undamaged states to the run's tables."""
    try:
        store.sweep()
        recorded = store.read_environment()
        clock = _clock(recorded, engine)
        store.update_environment(status="running")
        _train(store, spec, engine, plan, clock)
        store.sweep_checkpoints()
        _finish(store, spec, engine.grid)
        lanes = sum(len(batch.seeds) * (batch.stop - batch.onset) for batch in plan)
        learner = engine.grid.program.learner
        samples = lanes * learner.samples_per_step
        begun = _remarks(engine.grid, _first_chunk(store, engine, plan[0]))
        facts = {"samples": samples, "sample": learner.sample} | ({"remarks": begun} if begun else {})
        store.update_environment(status="finished", **clock(), **facts)
        shutil.rmtree(store.batches, ignore_errors=True)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped at once; go on with: jaxaudit resume {store.path}") from None


def _train(store: Folder, spec: Spec, engine: Engine, plan: Plan, clock: Callable[[], dict[str, float]]) -> None:
    """Trains the batches that are not gathered yet, one after the other, and gathers each."""
    grid = engine.grid
    gathered = set(store.read_environment().get("gathered", []))
    for batch in plan:
        trained = batch.id in gathered or BatchFolder(store, batch).complete
        if trained and not batch.disturbed and forget_lost(store, grid, batch):
            gathered.discard(batch.id)
    left = [batch for batch in plan if batch.id not in gathered]
    begun = {batch.id: standing(store, grid, batch) or batch.onset for batch in left}
    _tell(engine, left, plan, begun)
    with stoppable() as stopping, Progress(grid, plan, engine.rows, begun) as progress:
        place = _Watched(store, engine, spec, plan, clock, stopping, progress)
        for batch in left:
            folder = BatchFolder(store, batch)
            with folder.held():
                if not folder.complete:
                    run_batch(engine, batch, place, partial(_interruptible, engine))
                    folder.make_complete()
            gather(store, grid, batch)
            gathered.add(batch.id)
            store.update_environment(gathered=sorted(gathered), chunks_done=progress.chunks_done, **clock())
            folder.remove()


def _interruptible(engine: Engine, *arguments: Any) -> Any:
    return interruptible(partial(engine.advance, *arguments))


def gather(store: Folder, grid: Grid, batch: Batch, after: int = 0) -> int:
    """Puts what a batch has trained from a step on into the run's telemetry, and returns the step it has come to."""
    for rows, start, stop in BatchFolder(store, batch).rows(after):
        store.write_rows(grid, batch, rows, start, stop)
        after = stop
    return after


class _Watched(InFolder):
    """A run's batches in its folder, with progress told, telemetry gathered now and then, and a stop when asked."""

    def __init__(
        self,
        store: Folder,
        engine: Engine,
        spec: Spec,
        plan: Plan,
        clock: Callable[[], dict[str, float]],
        stopping: Callable[[], bool],
        progress: Progress,
    ):
        super().__init__(store, engine, spec.run.checkpoint_every)
        self._plan, self._clock, self._stopping, self._progress = plan, clock, stopping, progress
        self._level = partial(_level, store, engine.grid, spec.metrics.window)
        self._levels: dict[int, Any] = {}
        self._gathered: dict[int, int] = {}
        self._latest = time.monotonic()

    def due(self) -> bool:
        """Whether states are to be kept: as often as was asked for, and before a stop."""
        return super().due() or self._stopping()

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Keeps telemetry, and tells of it."""
        super().rows(batch, rows, start, stop)
        if not batch.disturbed and start == batch.onset:
            self._tell_remarks(batch, rows, stop - start)
        if batch.disturbed and batch.onset not in self._levels:
            self._levels[batch.onset] = self._level(batch.onset)
        level = self._levels.get(batch.onset) if batch.disturbed else None
        self._progress.advance(batch, start, stop, collapsed(self._engine.grid, batch, rows, start, stop, level))

    def _tell_remarks(self, batch: Batch, rows: Telemetry, count: int) -> None:
        """What the learner has to say of how a batch of the baseline begins: on stderr, and kept for a report."""
        lanes = {name: np.moveaxis(np.asarray(x)[:count, : len(batch.seeds)], 0, 1) for name, x in rows.items()}
        said = _remarks(self._engine.grid, lanes)
        for sentence in said:
            print(f"note: {sentence}", file=sys.stderr)
        if said:
            self.store.update_environment(remarks=said)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Keeps states, and stops if that is asked."""
        super().reached(engine, batch, states, step)
        if step == batch.onset:
            return
        stopping = self._stopping()
        if stopping or time.monotonic() - self._latest > GATHER_SECONDS:
            self._gathered[batch.id] = gather(self.store, engine.grid, batch, self._gathered.get(batch.id, 0))
            self.store.update_environment(**self._clock())
            self._latest = time.monotonic()
        if stopping and not (batch is self._plan[-1] and step == batch.stop):
            self.store.update_environment(status="interrupted", **self._clock())
            after = f"stopped after {self._progress.chunks_done} of {self._progress.chunks} chunks"
            raise Interrupted(f"{after}; go on with: jaxaudit resume {self.store.path}")


def _level(store: Folder, grid: Grid, window: int, onset: int) -> tuple[np.ndarray, np.ndarray]:
    before = store.read_channel("baseline_performance")[:, :onset]
    return performance_level(before, window, grid.program.learner.performance_every)


def _remarks(grid: Grid, lanes: dict[str, np.ndarray]) -> list[str]:
    """What the learner has to say of undisturbed lanes' first steps, channels `[lane, step, ...]`."""
    remarks = grid.program.learner.remarks
    return list(remarks(lanes)) if remarks else []


def _first_chunk(store: Folder, engine: Engine, first: Batch) -> dict[str, np.ndarray]:
    """The first chunk of the first control, all seeds, as it is stored: channels `[seed, step, ...]`."""
    grid = engine.grid
    known = telemetry_shapes(grid.program) if grid.program.learner.remarks else ()
    stop = min(engine.rows, next((stop for _, stop in spans(grid, first, engine.rows)), engine.rows))
    return {name: store.read_channel(name, slice(0, 1), slice(0, stop))[:, 0] for name in known}


def _clock(recorded: dict[str, Any], engine: Engine) -> Callable[[], dict[str, float]]:
    """Tells the seconds spent so far, with those of earlier, stopped processes up to their last checkpoint.

    What the engine has compiled by now counts.
    """
    began = time.monotonic() - engine.compile_seconds
    wall, compiling = recorded.get("wall_seconds", 0.0), recorded.get("compile_seconds", 0.0)
    return lambda: {
        "wall_seconds": round(wall + time.monotonic() - began, 1),
        "compile_seconds": round(compiling + engine.compile_seconds, 1),
    }


def _announce(spec: Spec, grid: Grid) -> None:
    """What is about to run, on stderr."""
    lanes = len(grid.seeds) * len(grid.conditions)
    unit = grid.program.learner.step_unit
    print(
        f"{spec.audit.name}: {len(grid.seeds)} seeds x {len(grid.conditions)} conditions = {lanes} lanes, "
        f"{grid.steps} steps{'' if unit == 'step' else f' of {unit}'}, on {len(grid.program.devices)} "
        f"{grid.program.devices[0].platform} device(s)",
        file=sys.stderr,
    )
    for what, value in grid.provenance.items():
        print(f"{what}: {value}", file=sys.stderr)
    for onset in sorted({f.onset for f in grid.forks if len(f.conditions) > 1}):
        for sentence in spec.metrics.validate(grid.steps, onset, every=grid.program.learner.performance_every):
            print(f"note: {sentence}", file=sys.stderr)
    if grid.program.execution == "auto":
        print('measuring how the lanes run fastest (execution = "auto")', file=sys.stderr)


def _tell_choice(grid: Grid, measured: dict[str, float]) -> None:
    """What was found to be fastest, on stderr."""
    if measured:
        speeds = ", ".join(f"{name} {speed:.3g}" for name, speed in measured.items())
        print(
            f"lanes run by {grid.program.execution!r} on {len(grid.program.devices)} device(s); "
            f"lane steps per second: {speeds}",
            file=sys.stderr,
        )


def _tell(engine: Engine, left: Plan, plan: Plan, begun: dict[int, int]) -> None:
    """How what is left is about to run, on stderr; its programs are compiled for it."""
    if not left:
        return
    grid = engine.grid
    needed = interruptible(partial(memory.needs, engine, left))
    give_back()
    groups = Counter(batch.fork for batch in left)
    most = max(len(batch.seeds) for batch in left)
    shares = f"{most} lanes at a time" if max(groups.values()) > 1 else "all lanes at a time"
    free = memory.available_memory(grid.program.devices)
    short = "" if free is None or needed.total <= free else f"; only {memory.readable(free)} are available"
    host = f" and {memory.readable(needed.host)} of the host's" if needed.host else ""
    held = resident() if grid.program.devices[0].platform == "cpu" else 0
    total, lane = memory.readable(held + needed.total), memory.readable(needed.lane)
    already = f" ({memory.readable(held)} of it in use now)" if held else ""
    print(f"expected memory: {total}{already}{host}, {lane} a lane, {shares}{short}", file=sys.stderr)
    done, chunks = chunks_of(grid, plan, engine.rows, begun)
    if done:
        print(f"going on after {done} of {chunks} chunks", file=sys.stderr)


def _finish(store: Folder, spec: Spec, grid: Grid) -> None:
    """Derived channels, metrics.csv and summary.csv from the finished telemetry."""
    told = [name for name in (PERFORMANCE, ACTING) if name in telemetry_shapes(grid.program)]
    data = store.read_telemetry([*told, "baseline_performance"])
    every = grid.program.learner.performance_every
    for name, values in datasets.derived(data[PERFORMANCE].values, spec.metrics, every).items():
        store.write_channel(name, values)
    floor = results.noise_floor(data, data["baseline_performance"].values, grid.forks[-1].onset)
    store.write_attributes(noise_floor=floor)
    lanes = results.lane_metrics(data, spec.metrics)
    store.write(store.metrics, results.lane_table(lanes).to_csv(index=False))
    store.write(store.summary, results.summary_table(lanes, grid.steps).to_csv(index=False))
