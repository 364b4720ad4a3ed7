"""Starts, resumes and forks runs in folders, which may be interrupted at any time."""

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
from jaxaudit.runs.collect import GatheredBatches, write_results
from jaxaudit.runs.local_trainer import follow, train_locally
from jaxaudit.runs.run_folder import Folder, check_space, differences, environment
from jaxaudit.runs.run_opening import (
    check_provenance,
    check_same_monitor,
    check_unchanged,
    claim_new_run,
    is_finished,
    open_onsets,
    open_run,
)
from jaxaudit.runs.workers import train_by_workers
from jaxaudit.runtime import hosts
from jaxaudit.runtime.backends import Backend, Workers, call_worker, open_backend
from jaxaudit.runtime.errors import Interrupted, UserError, interruptible
from jaxaudit.runtime.files import write_text
from jaxaudit.spec.document import Spec, parse


@dataclass(frozen=True)
class PlanOptions:
    """How the lanes of a new run are divided into batches.

    Attributes:
      workers: the number of workers among which the batches of the baseline and of each fork group are divided evenly.
      workers_per_machine: the number of batches that are trained on one machine at a time and share its memory.
      like: the folder of a run whose batches are taken; its spec may differ in name and metrics alone.
      map_is_for_cpus: see `run`.
    """

    workers: int = 1
    workers_per_machine: int = 1
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
      folder: the new folder, which workers on other machines must be able to access.
      workers: the workers that train; None to train in this process.
      like: a run of the same spec whose plan is taken: which lanes run together, and how. Both runs then end bitwise
        equal.
      map_is_for_cpus: whether `execution = "map"` in the spec is meant for CPUs alone, as in a packaged spec; GPUs and
        TPUs with many lanes then run them by "vmap". Otherwise "map" is kept everywhere.

    Raises:
      UserError: the folder is taken or cannot be created, or the grid does not fit in memory or on the disk; nothing
        is created then.
      Interrupted: Ctrl-C was pressed; see `resume`.
    """
    options = PlanOptions(like=None if like is None else str(Path(like).absolute()), map_is_for_cpus=map_is_for_cpus)
    _start_and_train(spec, Path(folder), workers, options)


def resume(folder: Path, workers: Workers | None = None) -> None:
    """Continues a run that stopped from its latest undamaged checkpoints, with or without workers.

    Raises:
      UserError: there is no run, it is finished, or another process works on it.
      Interrupted: Ctrl-C was pressed.
    """
    with ExitStack() as stack:
        opened = hosts.on_leader(partial(_open_stopped, folder, stack))
        store, spec, grid, plan = opened or _open_with_plan(folder)
        if workers is not None:
            with open_backend(workers, _jobs_folder(store.path)) as backend:
                _train_by_workers(store, spec, grid, plan, backend)
            return
        if hosts.is_leader():
            _report_differences(store, grid, plan)
        _train_here(store, spec, Engine(grid, chunk_size(grid.steps, spec.run.chunk)), plan)


def _open_stopped(folder: Path, stack: ExitStack) -> tuple[Folder, Spec, Grid, Plan]:
    """Opens a run that stopped and locks it until `stack` is closed."""
    store, spec, grid = open_run(folder)
    _check_unfinished(store, folder)
    if not store.telemetry.exists():
        raise UserError(f"{folder} has lost its telemetry.zarr, so the run cannot go on; run its spec again")
    check_provenance(store, grid)
    stack.enter_context(store.locked())
    _check_unfinished(store, folder)  # another process may have finished it before it was locked
    plan = store.read_plan(grid)
    _announce(spec, grid)
    return store, spec, grid, plan


def _check_unfinished(store: Folder, folder: Path) -> None:
    if is_finished(store):
        raise UserError(f"the run in {folder} is already finished")


def _open_with_plan(folder: Path) -> tuple[Folder, Spec, Grid, Plan]:
    store, spec, grid = open_run(folder)
    return store, spec, grid, store.read_plan(grid)


def _report_differences(store: Folder, grid: Grid, plan: Plan) -> None:
    """Reports on stderr, and records in the run, what has changed in the environment since the run began."""
    changed = differences(store.read_environment(), grid, plan)
    for key, then, now in changed:
        print(f"note: {key} was {then} and is {now}: results may not be bitwise the same", file=sys.stderr)
    if changed:
        store.update_environment(resumed_with={key: now for key, _, now in changed})


def fork(folder: Path, spec: Spec, out: Path, workers: Workers | None = None) -> None:
    """Runs new conditions in a new folder from the onsets that a finished run stored; only their suffixes are trained.

    Args:
      folder: the folder of the finished run.
      spec: the spec of the new conditions.
      out: the new folder.
      workers: the workers that train; None to train in this process.

    Raises:
      UserError: as `run`; or the run is not finished, the spec changes more than conditions, or an onset is not stored.
      Interrupted: Ctrl-C was pressed; `resume` then needs the new folder alone.
    """
    _start_and_train(spec, Path(out), workers, PlanOptions(), Path(folder))


def _start_and_train(
    spec: Spec, folder: Path, workers: Workers | None, options: PlanOptions, source: Path | None = None
) -> None:
    if workers is None:
        with ExitStack() as stack:
            started = hosts.on_leader(lambda: stack.enter_context(_start(spec, folder, options, source)))
            if started is None:  # in a process that follows the leader
                store, spec, grid, plan = _open_with_plan(folder)
                started = store, spec, Engine(grid, chunk_size(grid.steps, spec.run.chunk)), plan
            _train_here(*started)
        return
    with claim_new_run(folder) as claim, open_backend(workers, _jobs_folder(folder)) as backend:
        worker_options = replace(options, workers=backend.workers, workers_per_machine=backend.workers_per_machine)
        arguments = {
            "spec": _with_absolute_paths(spec).to_toml(),
            "spec_source": spec.source,
            "folder": str(folder.absolute()),
            "options": vars(worker_options),
            "source": None if source is None else str(source.absolute()),
        }
        call_worker(backend, f"{__name__}:begin", arguments)
        claim.keep()
        store, spec, grid, plan = _open_with_plan(folder)
        _train_by_workers(store, spec, grid, plan, backend)


def begin(spec: str, spec_source: str, folder: str, options: dict, source: str | None = None) -> None:
    """Fills the folder of a new run; called in a worker, since plans depend on the machine that trains.

    Args:
      spec: the spec's TOML text.
      spec_source: where the spec was read, for messages.
      folder: the new folder, which the calling process has claimed.
      options: the fields of `PlanOptions`.
      source: the folder of the run that is forked; None for a run of its own.
    """
    store = Folder(Path(folder))
    _fill(parse(spec, spec_source), store, PlanOptions(**options), None if source is None else Path(source))


@contextmanager
def _start(
    spec: Spec, folder: Path, options: PlanOptions, source: Path | None
) -> Iterator[tuple[Folder, Spec, Engine, Plan]]:
    """Creates a new run, whose folder is locked until the block ends."""
    with claim_new_run(folder) as claim:
        store = Folder(folder)
        filled = _fill(spec, store, options, source)
        claim.keep()
        yield store, *filled


def _fill(spec: Spec, store: Folder, options: PlanOptions, source: Path | None) -> tuple[Spec, Engine, Plan]:
    """Writes the files of a new run, with copies of what it needs from a `source`, and its spec last.

    The stored spec names the physics engine: the one of these devices, or of the run that is forked or taken as plan.
    """
    forked = None
    like = None if options.like is None else open_run(Path(options.like))
    if source is None:
        spec = (spec.resolved_like(like[1]) if like else spec.resolved()).expanded()
        grid = spec.build()
    else:
        forked, spec, grid, forked_grid = open_onsets(source, spec)
    baseline = forked is None
    chunk = chunk_size(grid.steps, spec.run.chunk)
    # Checked before anything is compiled, with the fewest lanes in a batch if their number is not decided yet.
    smallest = layout(grid, grid.batch or grid.program.groups, baseline)
    check_space(grid, smallest, Engine(grid, chunk), store.path)
    _announce(spec, grid)
    make_plan: Callable[..., Plan] = partial(layout, baseline=baseline, parts=options.workers)
    measured: dict[str, float] = {}
    if hosts.is_distributed() and grid.program.execution == "auto":  # all processes would have to measure together
        grid = replace(grid, program=replace(grid.program, execution="vmap"))
    if like is None:
        grid = _resolve_map_execution(grid, make_plan(grid, grid.batch), options.map_is_for_cpus)
        grid, measured = interruptible(partial(autotune, grid, chunk, make_plan, beside=options.workers_per_machine))
        _print_choice(grid, measured)
    else:
        grid, like_plan = _take_plan(like, spec, grid)
        make_plan = partial(_fixed_plan, like_plan)
    engine, plan, _ = interruptible(
        partial(memory.fit, grid, chunk, partial(make_plan, grid), beside=options.workers_per_machine)
    )
    check_space(grid, plan, engine, store.path)
    facts = ({"forked_from": str(forked.path)} if forked else {}) | ({"measured": measured} if measured else {})
    store.make(**environment(grid, plan), **facts)
    store.create_telemetry(grid, telemetry_shapes(grid.program), chunk)
    store.write_plan(plan)
    if forked:
        _copy_onsets(forked, forked_grid, store, grid)
    spec = _with_stored_execution(_with_stored_monitor(spec, store), grid)
    write_text(store.spec, spec.to_toml())
    return spec, engine, plan


def _resolve_map_execution(grid: Grid, plan: Plan, map_is_for_cpus: bool) -> Grid:
    """Returns the grid, with "vmap" in place of "map" if many lanes run and "map" is meant for CPUs; prints a note.

    This is decided where the plan is made, since a driver of workers does not have devices like theirs.
    """
    lanes = max(len(batch.seeds) for batch in plan)
    if grid.program.execution != "map" or not underuses_accelerator(grid, lanes):
        return grid
    devices = f"{len(grid.program.devices)} {grid.program.devices[0].platform} device(s)"
    if map_is_for_cpus:
        note = f'is meant for CPUs: up to {lanes} lanes run side by side ("vmap") on {devices}'
        grid = replace(grid, program=replace(grid.program, execution="vmap"))
    else:
        note = f'runs up to {lanes} lanes on {devices} one after the other; "vmap" runs them at once'
    print(f'note: execution = "map" {note}', file=sys.stderr)
    return grid


def _with_stored_execution(spec: Spec, grid: Grid) -> Spec:
    """Returns the spec to store, with the grid's execution, so that the run is resumed with the same."""
    if spec.audit.execution == "auto":  # environment.json records what was chosen
        return spec
    execution: Any = grid.program.execution
    return replace(spec, audit=replace(spec.audit, execution=execution))


def _fixed_plan(plan: Plan, *_: object) -> Plan:
    return plan


def _take_plan(like: tuple[Folder, Spec, Grid], spec: Spec, grid: Grid) -> tuple[Grid, Plan]:
    """Returns the grid with the execution and devices of another, opened run, and that run's plan."""
    store, like_spec, like_grid = like
    check_unchanged(spec, like_spec, f"to take the plan of {store.path}, the spec must keep its", "perturbations")
    check_provenance(store, like_grid)
    check_same_monitor(store.path, like_grid, grid)
    plan = store.read_plan(like_grid)
    program = replace(
        grid.program,
        execution=like_grid.program.execution,
        devices=like_grid.program.devices,
        model_devices=like_grid.program.model_devices,
    )
    return replace(grid, program=program, batch=max(len(batch.seeds) for batch in plan)), plan


def _jobs_folder(folder: Path) -> Path:
    """Returns the folder for a backend's files of a run's jobs, beside the run's folder, which the workers share."""
    return folder.absolute().with_name(f".{folder.name}.jobs")


def _with_absolute_paths(spec: Spec) -> Spec:
    if spec.monitor is None:
        return spec
    return replace(spec, monitor=replace(spec.monitor, file=str(spec.monitor.path.absolute())))


def _with_stored_monitor(spec: Spec, store: Folder) -> Spec:
    """Copies the spec's monitor, if it has one, to the run's folder; returns the spec with the copy's path."""
    if spec.monitor is None:
        return spec
    shutil.copyfile(spec.monitor.path, store.monitor)
    return replace(spec, monitor=replace(spec.monitor, file=store.monitor.name, folder=store.path))


def _copy_onsets(source: Folder, source_grid: Grid, store: Folder, grid: Grid) -> None:
    """Copies the baseline's states at the onsets, and its telemetry before them, from the run that is forked."""
    source_forks = {fork.onset: fork for fork in source_grid.forks}
    store.write_channel("baseline_performance", source.read_channel("baseline_performance"))
    for fork in grid.forks:
        try:
            paths = onset_paths(source, fork.onset, range(len(grid.seeds)))
            for path in paths:
                checkpoint.verify(path)
        except checkpoint.Damaged as damage:
            raise UserError(f"{damage}, so nothing can be forked from step {fork.onset}") from None
        for path in paths:
            shutil.copytree(path, store.checkpoints / path.name)
        store.copy_prefix(source, source_forks[fork.onset], fork)


def _train_here(store: Folder, spec: Spec, engine: Engine, plan: Plan) -> None:
    if not hosts.is_leader():
        follow(store, engine, plan)
        hosts.broadcast()  # waits until the leader has written all files
        return
    gathered = GatheredBatches(store, engine.grid, plan, lambda: engine.compile_seconds)
    _execute(store, spec, engine.grid, plan, gathered, lambda: train_locally(store, spec, engine, plan, gathered))
    hosts.broadcast()


def _train_by_workers(store: Folder, spec: Spec, grid: Grid, plan: Plan, backend: Backend) -> None:
    gathered = GatheredBatches(store, grid, plan)
    train = partial(train_by_workers, store, spec, grid, plan, gathered, backend)
    _execute(store, spec, grid, plan, gathered, train)
    shutil.rmtree(_jobs_folder(store.path), ignore_errors=True)


def _execute(
    store: Folder, spec: Spec, grid: Grid, plan: Plan, gathered: GatheredBatches, train: Callable[[], None]
) -> None:
    """Trains the remaining batches of a locked run, writes its tables and marks it as finished."""
    try:
        store.remove_unfinished()
        store.update_environment(status="running")
        train()
        facts = write_results(store, spec, grid, plan, chunk_size(grid.steps, spec.run.chunk))
        store.update_environment(status="finished", **gathered.elapsed(), **facts)
        shutil.rmtree(store.batches, ignore_errors=True)
    except KeyboardInterrupt:
        raise Interrupted(f"stopped at once; go on with: jaxaudit resume {store.path}") from None


def _announce(spec: Spec, grid: Grid) -> None:
    """Prints the size of a run, the files that it depends on, and notes on its metrics, on stderr."""
    program = grid.program
    seeds, conditions = len(grid.seeds), len(grid.conditions)
    lanes = f"{seeds} seeds x {conditions} conditions = {seeds * conditions} lanes"
    unit = program.learner.step_unit
    steps = f"{grid.steps} steps" + ("" if unit == "step" else f" of {unit}")
    devices = f"{len(program.devices)} {program.devices[0].platform} device(s)"
    if program.model_devices > 1:
        devices += f", {program.model_devices} to a lane"
    print(f"{spec.audit.name}: {lanes}, {steps}, on {devices}", file=sys.stderr)
    for kind, digest in grid.provenance.items():
        print(f"{kind}: {digest}", file=sys.stderr)
    for onset in sorted({fork.onset for fork in grid.forks if len(fork.conditions) > 1}):
        for sentence in spec.metrics.validate(grid.steps, onset, every=program.learner.cadence.every):
            print(f"note: {sentence}", file=sys.stderr)
    if program.execution == "auto":
        print('measuring how the lanes run fastest (execution = "auto")', file=sys.stderr)


def _print_choice(grid: Grid, measured: dict[str, float]) -> None:
    """Prints the execution that was measured to be the fastest, on stderr."""
    if measured:
        speeds = ", ".join(f"{name} {speed:.3g}" for name, speed in measured.items())
        print(
            f"lanes run by {grid.program.execution!r} on {len(grid.program.devices)} device(s); "
            f"lane steps per second: {speeds}",
            file=sys.stderr,
        )
