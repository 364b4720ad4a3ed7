"""Durable execution: a grid advanced in chunks of steps, with checkpoints between; it stops anywhere and goes on."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jaxaudit.core.batches import Plan, layout
from jaxaudit.core.grid import Grid
from jaxaudit.core.program import telemetry_shapes
from jaxaudit.execution import memory
from jaxaudit.execution.autotune import autotune, underuses_accelerator
from jaxaudit.execution.driver import chunk_size
from jaxaudit.execution.engine import Engine
from jaxaudit.runs import checkpoint
from jaxaudit.runs.attempts import onset_paths
from jaxaudit.runs.collect import Gathered, finish
from jaxaudit.runs.follower_host import follow
from jaxaudit.runs.local_trainer import train_here
from jaxaudit.runs.run_folder import Folder, check_space, differences, environment
from jaxaudit.runs.run_opening import (
    beginning,
    check_kept,
    check_monitor,
    check_provenance,
    is_finished,
    open_onsets,
    open_run,
)
from jaxaudit.runs.workers import train_by_workers
from jaxaudit.runtime import hosts
from jaxaudit.runtime.backends.backend import Backend, Workers, called, opened
from jaxaudit.runtime.errors import Interrupted, UserError
from jaxaudit.runtime.files import write_text
from jaxaudit.runtime.interrupts import interruptible
from jaxaudit.spec.document import Spec, parse


@dataclass(frozen=True)
class Layout:
    """How the lanes of a new run are dealt out.

    Attributes:
      parts: workers that the batches of the baseline and of each fork group are to go round among evenly.
      beside: batches that are trained side by side on one machine, sharing its memory.
      like: a run whose plan is taken, batch for batch; its spec must be the same but for name and metrics.
      map_is_for_cpus: see `run`.
    """

    parts: int = 1
    beside: int = 1
    like: str | None = None
    map_is_for_cpus: bool = False


def run(
    spec: Spec,
    folder: Path,
    workers: Workers | None = None,
    like: Path | None = None,
    map_is_for_cpus: bool = False,
) -> None:
    """Runs a spec in a new folder.

    Args:
      spec: what to run.
      folder: the new folder; of workers on other machines, one that these share.
      workers: who trains; None: this process.
      like: a run whose plan is taken: which lanes run together, and how; the two then end bitwise equal.
      map_is_for_cpus: the spec says `execution = "map"` for CPUs alone, as a packaged one does; GPUs and TPUs with
        many lanes run them by "vmap". Otherwise "map" is kept everywhere.

    Raises:
      UserError: the folder is taken or cannot be made, or the grid cannot fit; nothing is created then.
      Interrupted: Ctrl-C; see `resume`.
    """
    theirs = None if like is None else str(Path(like).absolute())
    _begin_and_do(spec, Path(folder), workers, Layout(like=theirs, map_is_for_cpus=map_is_for_cpus))


def resume(folder: Path, workers: Workers | None = None) -> None:
    """Goes on with a run that stopped, from its latest undamaged checkpoint, with or without workers.

    Raises:
      UserError: no run, one that is finished, or one that another process is at work on.
      Interrupted: Ctrl-C.
    """
    with ExitStack() as stack:
        begun = hosts.on_leader(lambda: stack.enter_context(_stopped(folder)))
        store, spec, grid, plan = begun or _standing(folder)
        if workers is not None:
            with opened(workers, _jobs(store.path)) as backend:
                _go_on_elsewhere(store, spec, grid, plan, backend)
            return
        if hosts.is_leader():
            _tell_differences(store, grid, plan)
        _go_on_here(store, spec, Engine(grid, chunk_size(grid.steps, spec.run.chunk)), plan)


@contextmanager
def _stopped(folder: Path) -> Iterator[tuple[Folder, Spec, Grid, Plan]]:
    """A run that stopped, locked while inside."""
    store, spec, grid = open_run(folder)
    if is_finished(store):
        raise UserError(f"the run in {folder} is already finished")
    if not store.telemetry.exists():
        raise UserError(f"{folder} has lost its telemetry.zarr, so the run cannot go on; run its spec again")
    check_provenance(store, grid)
    with store.locked():
        if is_finished(store):  # by another process, since that was last asked
            raise UserError(f"the run in {folder} is already finished")
        plan = store.read_plan(grid)
        _announce(spec, grid)
        yield store, spec, grid, plan


def _standing(folder: Path) -> tuple[Folder, Spec, Grid, Plan]:
    """A run that is there, and its plan."""
    store, spec, grid = open_run(folder)
    return store, spec, grid, store.read_plan(grid)


def _tell_differences(store: Folder, grid: Grid, plan: Plan) -> None:
    """What is not as when a run began, on stderr and in its folder."""
    changed = differences(store.read_environment(), grid, plan)
    for what, then, now in changed:
        print(f"note: {what} was {then} and is {now}: results may not be bitwise the same", file=sys.stderr)
    if changed:
        store.update_environment(resumed_with={what: now for what, _, now in changed})


def fork(folder: Path, spec: Spec, out: Path, workers: Workers | None = None) -> None:
    """Runs new conditions from the onsets a finished run stored, in a new folder, for their suffixes' cost.

    Raises:
      UserError: as `run`; or the run is not finished, more than conditions is changed, or an onset is not
        stored.
      Interrupted: Ctrl-C; `resume` then needs the new folder alone.
    """
    _begin_and_do(spec, Path(out), workers, Layout(), Path(folder))


def _begin_and_do(
    spec: Spec, folder: Path, workers: Workers | None, lay_out: Layout, source: Path | None = None
) -> None:
    if workers is None:
        with ExitStack() as stack:
            begun = hosts.on_leader(lambda: stack.enter_context(_begun(spec, folder, lay_out, source)))
            store, spec, engine, plan = begun or _begun_by_the_first(folder)
            _go_on_here(store, spec, engine, plan)
        return
    with beginning(folder) as claim, opened(workers, _jobs(folder)) as backend:
        arguments = {
            "spec": _portable(spec).to_toml(),
            "place": spec.source,
            "folder": str(folder.absolute()),
            "lay_out": vars(replace(lay_out, parts=backend.workers, beside=backend.beside)),
            "source": None if source is None else str(source.absolute()),
        }
        called(backend, f"{__name__}:begin", arguments)
        claim.keep()
        store, spec, grid, plan = _standing(folder)
        _go_on_elsewhere(store, spec, grid, plan, backend)


def _begun_by_the_first(folder: Path) -> tuple[Folder, Spec, Engine, Plan]:
    """A run that this process trains together with the one that has begun it."""
    store, spec, grid, plan = _standing(folder)
    return store, spec, Engine(grid, chunk_size(grid.steps, spec.run.chunk)), plan


def begin(spec: str, place: str, folder: str, lay_out: dict, source: str | None = None) -> None:
    """Fills a new run's folder: what a worker does, on whose kind of machine its batches will be trained.

    Args:
      spec: TOML text.
      place: where it was read, for messages.
      folder: the new folder, which the process that asks for this has claimed.
      lay_out: the fields of `Layout`.
      source: the run that is forked.
    """
    _fill(parse(spec, place), Folder(Path(folder)), Layout(**lay_out), None if source is None else Path(source))


@contextmanager
def _begun(
    spec: Spec, folder: Path, lay_out: Layout, source: Path | None = None
) -> Iterator[tuple[Folder, Spec, Engine, Plan]]:
    """A new run, whose folder is locked while inside."""
    with beginning(folder) as claim:
        store = Folder(folder)
        filled = _fill(spec, store, lay_out, source)
        claim.keep()
        yield store, *filled


def _fill(spec: Spec, store: Folder, lay_out: Layout, source: Path | None) -> tuple[Spec, Engine, Plan]:
    """Writes what a new run needs into its folder: copies of what it needs from a `source`, and its spec last.

    The spec says which engine simulates the task: the one of these devices, or of the run that it goes on from.
    """
    forked = None
    like = None if lay_out.like is None else open_run(Path(lay_out.like))
    if source is None:
        spec = (spec.resolved_like(like[1]) if like else spec.resolved()).expanded()
        grid = spec.build()
    else:
        forked, spec, grid, ran = open_onsets(source, spec)
    baseline = forked is None
    rows = chunk_size(grid.steps, spec.run.chunk)
    # Before anything is compiled: as it is with the fewest lanes at a time, where that is still open.
    fewest = layout(grid, grid.batch or grid.program.groups, baseline)
    check_space(grid, fewest, Engine(grid, rows), store.path)
    _announce(spec, grid)
    deal: Callable[..., Plan] = partial(layout, baseline=baseline, parts=lay_out.parts)
    measured: dict[str, float] = {}
    if hosts.several() and grid.program.execution == "auto":  # to measure takes all
        grid = replace(grid, program=replace(grid.program, execution="vmap"))
    if like is None:
        grid = _mapped(grid, deal(grid, grid.batch), lay_out)
        grid, measured = interruptible(partial(autotune, grid, rows, deal, beside=lay_out.beside))
        _tell_choice(grid, measured)
    else:
        grid, taken = _planned_like(like, spec, grid)
        deal = partial(_given, taken)
    engine, plan, _ = interruptible(partial(memory.fit, grid, rows, partial(deal, grid), beside=lay_out.beside))
    check_space(grid, plan, engine, store.path)
    known = ({"forked_from": str(forked.path)} if forked else {}) | ({"measured": measured} if measured else {})
    store.make(**environment(grid, plan), **known)
    store.create_telemetry(grid, telemetry_shapes(grid.program), rows)
    store.write_plan(plan)
    if forked:
        _copy_onsets(forked, ran, store, grid)
    spec = _with_its_execution(_with_its_monitor(spec, store), grid)
    write_text(store.spec, spec.to_toml())
    return spec, engine, plan


def _mapped(grid: Grid, plan: Plan, lay_out: Layout) -> Grid:
    """A grid that runs its lanes one after the other, or side by side where that is meant; said on stderr.

    It is seen here, where the plan is made, for a driver of workers has no devices of their kind.
    """
    lanes = max(len(batch.seeds) for batch in plan)
    if grid.program.execution != "map" or not underuses_accelerator(grid, lanes):
        return grid
    devices = f"{len(grid.program.devices)} {grid.program.devices[0].platform} device(s)"
    if not lay_out.map_is_for_cpus:
        told = f'execution = "map" runs up to {lanes} lanes on {devices} one after the other; "vmap" runs them at once'
        print(f"note: {told}", file=sys.stderr)
        return grid
    told = f'execution = "map" is meant for CPUs: up to {lanes} lanes run side by side ("vmap") on {devices}'
    print(f"note: {told}", file=sys.stderr)
    return replace(grid, program=replace(grid.program, execution="vmap"))


def _with_its_execution(spec: Spec, grid: Grid) -> Spec:
    """The spec as it is stored: with how its lanes run, so that whoever goes on with the run has them run so."""
    if spec.audit.execution == "auto":  # the environment has what was found
        return spec
    execution: Any = grid.program.execution
    return replace(spec, audit=replace(spec.audit, execution=execution))


def _given(plan: Plan, *_: object) -> Plan:
    return plan


def _planned_like(like: tuple[Folder, Spec, Grid], spec: Spec, grid: Grid) -> tuple[Grid, Plan]:
    """A grid with the execution and devices of another run, which is opened, and that run's plan."""
    store, old, ran = like
    check_kept(spec, old, f"to take the plan of {store.path}, the spec must keep its", "perturbations")
    check_provenance(store, ran)
    check_monitor(store.path, ran, grid)
    plan = store.read_plan(ran)
    theirs = ran.program
    program = replace(
        grid.program, execution=theirs.execution, devices=theirs.devices, model_devices=theirs.model_devices
    )
    return replace(grid, program=program, batch=max(len(batch.seeds) for batch in plan)), plan


def _jobs(folder: Path) -> Path:
    """Where an engine keeps what it must of a run's jobs: beside the run's folder, on what the workers share."""
    return folder.absolute().with_name(f".{folder.name}.jobs")


def _portable(spec: Spec) -> Spec:
    """A spec that can be read elsewhere: its monitor's path is absolute."""
    if spec.monitor is None:
        return spec
    return replace(spec, monitor=replace(spec.monitor, file=str(spec.monitor.path.absolute())))


def _with_its_monitor(spec: Spec, store: Folder) -> Spec:
    """The spec as it is stored: its monitor, if it has one, is a copy in the run's folder."""
    if spec.monitor is None:
        return spec
    shutil.copyfile(spec.monitor.path, store.monitor)
    return replace(spec, monitor=replace(spec.monitor, file=store.monitor.name, folder=store.path))


def _copy_onsets(source: Folder, ran: Grid, store: Folder, grid: Grid) -> None:
    """The baseline's states at the onsets and its telemetry before them, from the run that is forked."""
    stored = {fork.onset: fork for fork in ran.forks}
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


def _go_on_here(store: Folder, spec: Spec, engine: Engine, plan: Plan) -> None:
    if not hosts.is_leader():
        follow(store, engine, plan)
        hosts.broadcast()  # the first has written what there is to write
        return
    gathered = Gathered(store, engine.grid, plan, lambda: engine.compile_seconds)
    _execute(store, spec, engine.grid, plan, gathered, lambda: train_here(store, spec, engine, plan, gathered))
    hosts.broadcast()


def _go_on_elsewhere(store: Folder, spec: Spec, grid: Grid, plan: Plan, backend: Backend) -> None:
    gathered = Gathered(store, grid, plan)
    train = partial(train_by_workers, store, spec, grid, plan, gathered, backend)
    _execute(store, spec, grid, plan, gathered, train)
    shutil.rmtree(_jobs(store.path), ignore_errors=True)


def _execute(store: Folder, spec: Spec, grid: Grid, plan: Plan, gathered: Gathered, train: Callable[[], None]) -> None:
    """Does what is left of a run that is held, from each batch's latest undamaged states to the run's tables."""
    try:
        store.sweep()
        store.update_environment(status="running")
        train()
        facts = finish(store, spec, grid, plan, chunk_size(grid.steps, spec.run.chunk))
        store.update_environment(status="finished", **gathered.clock(), **facts)
        shutil.rmtree(store.batches, ignore_errors=True)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped at once; go on with: jaxaudit resume {store.path}") from None


def _announce(spec: Spec, grid: Grid) -> None:
    """What is about to run, on stderr."""
    lanes = len(grid.seeds) * len(grid.conditions)
    unit = grid.program.learner.step_unit
    print(
        f"{spec.audit.name}: {len(grid.seeds)} seeds x {len(grid.conditions)} conditions = {lanes} lanes, "
        f"{grid.steps} steps{'' if unit == 'step' else f' of {unit}'}, on {len(grid.program.devices)} "
        f"{grid.program.devices[0].platform} device(s)"
        + (f", {shared} to a lane" if (shared := grid.program.model_devices) > 1 else ""),
        file=sys.stderr,
    )
    for what, value in grid.provenance.items():
        print(f"{what}: {value}", file=sys.stderr)
    for onset in sorted({f.onset for f in grid.forks if len(f.conditions) > 1}):
        for sentence in spec.metrics.validate(grid.steps, onset, every=grid.program.learner.cadence.every):
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
