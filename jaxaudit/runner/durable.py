"""Durable execution: a grid advanced in chunks of steps, with checkpoints between; it stops anywhere and goes on."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit import results
from jaxaudit.errors import UserError
from jaxaudit.execution import memory
from jaxaudit.execution.choice import settle
from jaxaudit.execution.engine import Engine
from jaxaudit.execution.schedule import Chunk, chunk_size, is_onset, schedule
from jaxaudit.grid import Fork, Grid, Phase
from jaxaudit.learner import ACTING, PERFORMANCE
from jaxaudit.machine import give_back, resident
from jaxaudit.program import telemetry_shapes
from jaxaudit.runner import checkpoint
from jaxaudit.runner.begin import beginning
from jaxaudit.runner.interrupts import Interrupted, interruptible, stoppable
from jaxaudit.runner.progress import Progress, collapsed, performance_level
from jaxaudit.runner.restore import at_onset, onset_paths, restore, save
from jaxaudit.runner.store import Folder, check_space, differences, environment
from jaxaudit.specification.document import Spec, load

__all__ = ["Interrupted", "fork", "is_finished", "open_run", "resume", "run"]


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
    with store.held():
        changed = differences(store.read_environment(), grid)
        for what, then, now in changed:
            print(f"note: {what} was {then} and is {now}: results may not be bitwise the same", file=sys.stderr)
        if changed:
            store.update_environment(resumed_with={what: now for what, _, now in changed})
        _announce(spec, grid)
        _execute(store, spec, Engine(grid, chunk_size(grid.steps, spec.run.chunk)))


def fork(folder: Path, spec: Spec, out: Path) -> None:
    """Runs new conditions from the onsets a finished run stored, in a new folder, for their suffixes' cost.

    Raises:
      UserError: as `run`; or the run is not finished, more than conditions is changed, or an onset is not
        stored.
      Interrupted: Ctrl-C; `resume` then needs the new folder alone.
    """
    source, old, old_grid = open_run(folder)
    if not is_finished(source):
        raise UserError(f"the run in {folder} is not finished; end it with: jaxaudit resume {folder}")
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


def open_run(folder: Path) -> tuple[Folder, Spec, Grid]:
    """The run in a folder, in its batches, and on as many devices as it was begun on if they are there.

    Raises UserError if there is none.
    """
    store = Folder(Path(folder))
    if not store.spec.is_file():
        raise UserError(f"{folder} is not a run's folder: it has no spec.toml")
    spec = load(store.spec)
    grid = spec.build()
    recorded = store.read_environment()
    devices = recorded.get("devices")
    if isinstance(devices, int) and 0 < devices < len(grid.program.devices):
        grid = replace(grid, program=replace(grid.program, devices=grid.program.devices[:devices]))
    layout = recorded.get("lane_layout", {})
    if grid.program.execution == "auto":
        execution = layout.get("execution", "vmap")
        grid = replace(grid, program=replace(grid.program, execution=execution))
    batch = layout.get("lanes", grid.batch)
    return store, spec, replace(grid, batch=batch, tail=0 if recorded.get("forked_from") else grid.tail)


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
            # Before anything is compiled: as it is with the fewest lanes at a time, where that is still open.
            fewest = replace(grid, batch=grid.batch or len(grid.program.devices))
            check_space(fewest, Engine(fewest, rows).lane_bytes, folder)
            _announce(spec, grid)
            grid, measured = interruptible(partial(settle, grid, rows, baseline=source is None))
            _tell_choice(grid, measured)
            engine, _ = interruptible(partial(memory.fit, grid, rows, baseline=source is None))
            grid = engine.grid
            check_space(grid, engine.lane_bytes, folder)
            known = ({"forked_from": str(source.path)} if source else {}) | ({"measured": measured} if measured else {})
            store.make(**environment(grid), **known)
            stack.enter_context(store.held())
            store.create_telemetry(grid, telemetry_shapes(grid.program), rows)
            if source and stored:
                _copy_onsets(source, stored, store, grid)
            spec = _with_its_monitor(spec, store)
            store.write(store.spec, spec.to_toml())
        _execute(store, spec, engine)


def _with_its_monitor(spec: Spec, store: Folder) -> Spec:
    """The spec as it is stored: its monitor, if it has one, is a copy in the run's folder."""
    if spec.monitor is None:
        return spec
    shutil.copyfile(spec.monitor.path, store.monitor)
    return replace(spec, monitor=replace(spec.monitor, file=store.monitor.name, folder=store.path))


def _copy_onsets(source: Folder, stored: dict[int, Fork], store: Folder, grid: Grid) -> None:
    """The baseline's states at the onsets and its telemetry before them, from the run that is forked."""
    store.write_channel("baseline_performance", source.read_channel("baseline_performance"))
    for f in (f for f in grid.forks if f.onset):
        try:
            paths = onset_paths(source, f.onset, range(len(grid.seeds)))
            for path in paths:
                checkpoint.verify(path)
        except checkpoint.Damaged as damage:
            raise UserError(f"{damage}, so nothing can be forked from step {f.onset}") from None
        for path in paths:
            shutil.copytree(path, store.checkpoints / path.name)
        store.copy_prefix(source, stored[f.onset], f)


def _execute(store: Folder, spec: Spec, engine: Engine) -> None:
    """Does what is left of a run that is held, from its latest undamaged checkpoint to its tables."""
    grid = engine.grid
    try:
        store.sweep()
        recorded = store.read_environment()
        chunks = schedule(grid, engine.rows, baseline="forked_from" not in recorded)
        clock = _clock(recorded, engine)
        _train(store, spec, engine, chunks, clock)
        _finish(store, spec, grid)
        lanes = sum(len(grid.numbers(chunk.phase)) * (chunk.stop - chunk.start) for chunk in chunks)
        learner = grid.program.learner
        samples = lanes * learner.samples_per_step
        store.update_environment(status="finished", **clock(), samples=samples, sample=learner.sample)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped at once; go on with: jaxaudit resume {store.path}") from None


def _train(
    store: Folder, spec: Spec, engine: Engine, chunks: list[Chunk], clock: Callable[[], dict[str, float]]
) -> None:
    grid = engine.grid
    states: Any
    store.update_environment(status="running")
    done, states = restore(store, engine, chunks)
    _tell(engine, {chunk.phase for chunk in chunks[done:]}, done, len(chunks))
    level: tuple[np.ndarray, np.ndarray] | None = None
    samples = grid.program.learner.samples_per_step
    with stoppable() as stopping, Progress(grid, chunks, done, samples) as progress:
        for index in range(done, len(chunks)):
            chunk = chunks[index]
            if chunk.start == grid.onset(chunk.phase):
                states, level = None, None  # before memory is taken for others
                states = engine.begin(chunk.phase, partial(at_onset, store, engine))
            states, rows = interruptible(partial(engine.advance, chunk.phase, states, chunk.start, chunk.stop))
            store.write_rows(grid, chunk.phase, rows, chunk.start, chunk.stop)
            if chunk.phase.fork is not None and level is None:
                before = store.read_channel("baseline_performance")[:, : grid.onset(chunk.phase)]
                level = performance_level(before, spec.metrics.window, grid.program.learner.performance_every)
            progress.advance(chunk, collapsed(grid, chunk, rows, level))
            ended = index + 1
            last = ended == len(chunks)
            if stopping() or last or ended % spec.run.checkpoint_every == 0 or is_onset(grid, chunk):
                save(store, engine, chunk, states, ended)
                store.update_environment(**clock())
            if stopping() and not last:
                store.update_environment(status="interrupted")
                after = f"stopped after {ended} of {len(chunks)} chunks"
                raise Interrupted(f"{after}; go on with: jaxaudit resume {store.path}")


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


def _tell(engine: Engine, phases: Collection[Phase], done: int, chunks: int) -> None:
    """How what is left is about to run, on stderr; its programs are compiled for it."""
    if not phases:
        return
    grid = engine.grid
    needed = interruptible(partial(memory.needs, engine, phases))
    give_back()
    split = any(grid.share(phase.fork) < grid.count(phase.fork) for phase in phases)
    shares = f"{max(grid.share(phase.fork) for phase in phases)} lanes at a time" if split else "all lanes at a time"
    free = memory.available_memory(grid.program.devices)
    short = "" if free is None or needed.total <= free else f"; only {memory.readable(free)} are available"
    host = f" and {memory.readable(needed.host)} of the host's" if needed.host else ""
    held = resident() if grid.program.devices[0].platform == "cpu" else 0
    total, lane = memory.readable(held + needed.total), memory.readable(needed.lane)
    already = f" ({memory.readable(held)} of it in use now)" if held else ""
    print(f"expected memory: {total}{already}{host}, {lane} a lane, {shares}{short}", file=sys.stderr)
    if done:
        print(f"going on after {done} of {chunks} chunks", file=sys.stderr)


def _finish(store: Folder, spec: Spec, grid: Grid) -> None:
    """Derived channels, metrics.csv and summary.csv from the finished telemetry."""
    told = [name for name in (PERFORMANCE, ACTING) if name in telemetry_shapes(grid.program)]
    data = store.read_telemetry([*told, "baseline_performance"])
    every = grid.program.learner.performance_every
    for name, values in results.derived(data[PERFORMANCE].values, spec.metrics, every).items():
        store.write_channel(name, values)
    floor = results.noise_floor(data, data["baseline_performance"].values, grid.forks[-1].onset)
    store.write_attributes(noise_floor=floor)
    lanes = results.lane_metrics(data, spec.metrics)
    store.write(store.metrics, results.lane_table(lanes).to_csv(index=False))
    store.write(store.summary, results.summary_table(lanes, grid.steps).to_csv(index=False))
