"""Durable execution: a grid advanced in chunks of steps, with checkpoints between; it stops anywhere and goes on."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit import checkpoint, memory, results
from jaxaudit.begin import beginning
from jaxaudit.engine import Engine
from jaxaudit.errors import UserError
from jaxaudit.grid import Fork, Grid, LaneState
from jaxaudit.interrupts import Interrupted, interruptible, stoppable
from jaxaudit.learner import PERFORMANCE, Telemetry
from jaxaudit.progress import Progress, collapsed, performance_level
from jaxaudit.restore import at_onset, onset_name, restore, save
from jaxaudit.schedule import Chunk, chunk_size, is_onset, schedule
from jaxaudit.spec import Spec, load
from jaxaudit.store import Folder, differences, environment

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
    changed = differences(store.read_environment(), grid)
    for what, then, now in changed:
        print(f"note: {what} was {then} and is {now}: results may not be bitwise the same", file=sys.stderr)
    if changed:
        store.update_environment(resumed_with={what: now for what, _, now in changed})
    _execute(store, spec, grid)


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
    differing = [t for t in ("task", "learner") if getattr(old, t) != getattr(spec, t)]
    differing += [k for k in ("seeds", "steps", "telemetry") if getattr(old.audit, k) != getattr(spec.audit, k)]
    if differing:
        raise UserError(f"the spec to fork must keep the run's {' and '.join(differing)}")
    spec = spec.expanded()
    grid = replace(spec.build(), tail=0)
    stored = {f.onset: f for f in old_grid.forks}
    for onset in (f.onset for f in grid.forks):
        if onset not in stored:
            has = ", ".join(str(o) for o in stored)
            raise UserError(f"no stored onset at step {onset}; the run in {folder} has {has}")
    _start(spec, grid, Path(out), source, stored)


def open_run(folder: Path) -> tuple[Folder, Spec, Grid]:
    """The run in a folder, on as many devices as it was begun on if they are there.

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
    return store, spec, replace(grid, tail=0) if recorded.get("forked_from") else grid


def is_finished(store: Folder) -> bool:
    """Whether a run got to its end."""
    return store.read_environment().get("status") == "finished"


def _start(
    spec: Spec, grid: Grid, folder: Path, source: Folder | None = None, stored: dict[int, Fork] | None = None
) -> None:
    """Begins a run, and does it. What it needs from a `source` is copied before it counts as begun."""
    engine = Engine(grid, chunk_size(spec, grid))
    with beginning(folder) as store:
        memory.check(grid, engine.row_shapes(None), folder)
        store.make(**environment(grid), **({"forked_from": str(source.path)} if source else {}))
        shapes = {name: s.shape[2:] for name, s in engine.row_shapes(None).items()}
        store.create_telemetry(grid, shapes, engine.rows)
        if source and stored:
            _copy_onsets(source, stored, store, grid)
        store.write(store.spec, spec.to_toml())
    _execute(store, spec, grid)


def _copy_onsets(source: Folder, stored: dict[int, Fork], store: Folder, grid: Grid) -> None:
    """The baseline's states at the onsets and its telemetry before them, from the run that is forked."""
    store.write_channel("baseline_performance", source.read_channel("baseline_performance"))
    for f in (f for f in grid.forks if f.onset):
        name = onset_name(f.onset)
        try:
            checkpoint.verify(source.checkpoints / name)
        except checkpoint.Damaged as damage:
            raise UserError(f"{damage}, so nothing can be forked from step {f.onset}") from None
        shutil.copytree(source.checkpoints / name, store.checkpoints / name)
        store.copy_prefix(source, stored[f.onset], f)


def _execute(store: Folder, spec: Spec, grid: Grid) -> None:
    """Does what is left of a run, from its latest undamaged checkpoint to its tables."""
    engine = Engine(grid, chunk_size(spec, grid))
    try:
        with store.held():
            store.sweep()
            recorded = store.read_environment()
            chunks = schedule(grid, engine.rows, baseline="forked_from" not in recorded)
            done, states = restore(store, engine, chunks)
            _tell(spec, grid, engine, done, chunks)
            clock = _clock(recorded, engine)
            store.update_environment(status="running")
            _train(store, spec, engine, chunks, done, states, clock)
            _finish(store, spec, grid)
            lanes = sum(engine.count(chunk.fork) * (chunk.stop - chunk.start) for chunk in chunks)
            samples = lanes * grid.program.learner.samples_per_step
            store.update_environment(status="finished", **clock(), env_steps=samples)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped at once; go on with: jaxaudit resume {store.path}") from None


def _train(
    store: Folder,
    spec: Spec,
    engine: Engine,
    chunks: list[Chunk],
    done: int,
    states: LaneState | None,
    clock: Callable[[], dict[str, float]],
) -> None:
    grid = engine.grid
    level: tuple[np.ndarray, np.ndarray] | None = None
    samples = grid.program.learner.samples_per_step
    with stoppable() as stopping, Progress(grid, chunks, done, samples) as progress:
        for index in range(done, len(chunks)):
            chunk = chunks[index]
            if states is None or (index and chunks[index - 1].fork != chunk.fork):
                states, level = _phase_start(store, engine, chunk), None
            states, rows = interruptible(partial(engine.advance, chunk.fork, states, chunk.start, chunk.stop))
            _write_rows(store, grid, chunk, rows)
            if chunk.fork is not None and level is None:
                before = store.read_channel("baseline_performance")[:, : grid.forks[chunk.fork].onset]
                level = performance_level(before, spec.metrics.window)
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
    """Tells the seconds spent so far, with those of earlier, stopped processes up to their last checkpoint."""
    began = time.monotonic()
    wall, compiling = recorded.get("wall_seconds", 0.0), recorded.get("compile_seconds", 0.0)
    return lambda: {
        "wall_seconds": round(wall + time.monotonic() - began, 1),
        "compile_seconds": round(compiling + engine.compile_seconds, 1),
    }


def _tell(spec: Spec, grid: Grid, engine: Engine, done: int, chunks: list[Chunk]) -> None:
    """What is about to run, on stderr."""
    lanes = len(grid.seeds) * len(grid.conditions)
    unit = grid.program.learner.step_unit
    print(
        f"{spec.audit.name}: {len(grid.seeds)} seeds x {len(grid.conditions)} conditions = {lanes} lanes, "
        f"{grid.steps} steps{'' if unit == 'step' else f' of {unit}'}, on {len(grid.program.devices)} "
        f"{grid.program.devices[0].platform} device(s); expected memory "
        f"{memory.readable(memory.estimate(grid, engine.row_shapes(None)).total)}",
        file=sys.stderr,
    )
    for onset in sorted({f.onset for f in grid.forks}):
        for sentence in spec.metrics.validate(grid.steps, onset):
            print(f"note: {sentence}", file=sys.stderr)
    if done:
        print(f"going on after {done} of {len(chunks)} chunks", file=sys.stderr)


def _phase_start(store: Folder, engine: Engine, chunk: Chunk) -> LaneState:
    if chunk.fork is None:
        return engine.initial()
    onset = engine.grid.forks[chunk.fork].onset
    return engine.forked(at_onset(store, engine, onset), chunk.fork)


def _write_rows(store: Folder, grid: Grid, chunk: Chunk, rows: Telemetry) -> None:
    if chunk.fork is None:
        store.write_baseline(grid, rows, chunk.start, chunk.stop)
    else:
        store.write_fork(grid, grid.forks[chunk.fork], rows, chunk.start, chunk.stop)


def _finish(store: Folder, spec: Spec, grid: Grid) -> None:
    """Derived channels, metrics.csv and summary.csv from the finished telemetry."""
    data = store.read_telemetry([PERFORMANCE, "baseline_performance"])
    for name, values in results.derived(data[PERFORMANCE].values, spec.metrics).items():
        store.write_channel(name, values)
    floor = results.noise_floor(data, data["baseline_performance"].values, grid.forks[-1].onset)
    store.write_attributes(noise_floor=floor)
    lanes = results.lane_metrics(data, spec.metrics)
    store.write(store.metrics, results.lane_table(lanes).to_csv(index=False))
    store.write(store.summary, results.summary_table(lanes, grid.steps).to_csv(index=False))
