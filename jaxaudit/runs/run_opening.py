"""Runs that are there already: opened, and held against what they began with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax

from jaxaudit.core.grid import Grid
from jaxaudit.core.task_kinds import Simulated
from jaxaudit.runs.run_folder import STARTING, VERSION, Folder
from jaxaudit.runtime import array_store
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import UNFINISHED, Claim, check_contents, check_path_encoding, claimed, entry_names
from jaxaudit.runtime.machine import recorded_platform
from jaxaudit.spec.document import Spec, load


@contextmanager
def claim_new_run(folder: Path) -> Iterator[Claim]:
    """Claims a folder for a new run, see `jaxaudit.runtime.files.claimed`; it is locked until the block ends.

    The block keeps the claim when the run's spec is written. What a process that was killed before left there is
    removed.

    Raises:
      UserError: the folder is taken or cannot be made.
    """
    hint = f"; to go on with it: jaxaudit resume {folder}" if os.path.exists(folder / "spec.toml") else ""
    with claimed(folder, is_leftover=_is_leftover, hint=hint) as claim:
        try:
            yield claim
        except OSError as error:
            if claim.kept:
                raise
            raise UserError(f"cannot make the folder {folder}: {error.strerror or error}") from None


def _is_leftover(folder: Path) -> bool:
    """Whether a folder holds a run that was killed before its spec was written, and nothing else."""
    store = Folder(folder)
    ours = {path.name for path in (store.environment, store.plan, store.checkpoints, store.telemetry, store.monitor)}
    found = {name for name in entry_names(folder) if not name.startswith(UNFINISHED)}
    return not found or (found <= ours and store.read_environment().get("status") == STARTING)


UNRESUMABLE_PREFIX = "0.1."
"""How versions begin whose runs cannot be gone on with."""

PREFIX_0_2 = "0.2."
"""How versions begin whose runs on dialogues, or in bfloat16, had other numbers, and cannot be gone on with either."""


def open_run(folder: Path) -> tuple[Folder, Spec, Grid]:
    """The run in a folder, on as many devices as it was begun on if they are there.

    How many share a lane is the spec's to say: states are the same in a checkpoint. Its physics are those it was begun
    with: runs of earlier versions stored "auto", which is what the devices had that they were begun on.

    Raises UserError if there is none, it is damaged or an earlier version's, or its physics cannot run here.
    """
    store = Folder(Path(folder))
    check_path_encoding(store.path)
    if not store.spec.is_file():
        raise UserError(f"{folder} is not a run's folder: it has no spec.toml")
    check_contents(store.path)
    if store.telemetry.exists():
        array_store.check(store.telemetry)
    recorded = store.read_environment()
    made = str(recorded.get("jaxaudit", VERSION))
    _check_version(folder, made, made.startswith(UNRESUMABLE_PREFIX))
    spec = load(store.spec).resolved(recorded_platform(recorded))
    _check_version(folder, made, made.startswith(PREFIX_0_2) and _computed_otherwise_before_0_3(spec))
    _check_engine(folder, spec)
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
    """As `open_run`; raises UserError, too, if the run is not finished, or what it depends on has changed."""
    store, spec, grid = open_run(folder)
    if not is_finished(store):
        raise UserError(f"the run in {folder} is not finished; end it with: jaxaudit resume {folder}")
    check_provenance(store, grid)
    return store, spec, grid


def open_onsets(folder: Path, spec: Spec | None = None) -> tuple[Folder, Spec, Grid, Grid]:
    """A finished run from whose stored onsets other lanes begin: it, their spec, their grid, and the run's own grid.

    Args:
      folder: the run's.
      spec: of those lanes; None: the run's own.

    Raises UserError: it is not finished, what it depends on has changed, more than conditions is changed, or an onset
    is not stored.
    """
    store, old, ran = open_finished(folder)
    if spec is None:
        return store, replace(old, source=str(store.spec)), replace(ran, tail=0), ran
    spec = spec.resolved_like(old)
    check_unchanged(spec, old, "the spec must keep the run's")
    spec = spec.expanded()
    grid = replace(spec.build(), tail=0)
    check_same_monitor(folder, ran, grid)
    stored = [fork.onset for fork in ran.forks]
    for onset in (fork.onset for fork in grid.forks):
        if onset not in stored:
            has = ", ".join(map(str, stored))
            raise UserError(f"no stored onset at step {onset}; the run in {folder} has {has}")
    return store, spec, grid, ran


def check_unchanged(spec: Spec, old: Spec, must: str, *also: str) -> None:
    """Raises UserError where a spec differs from another in what is trained."""
    differing = [t for t in ("task", "learner", "remedies", *also) if getattr(old, t) != getattr(spec, t)]
    if "task" in differing and isinstance(old.task, Simulated) and isinstance(spec.task, Simulated):
        then, now = old.task.engine, spec.task.engine
        if then and spec.task.simulated_by(then) == old.task:
            differing[0] = f"task (physics {then!r}, not {now!r})"
    differing += [k for k in ("seeds", "steps", "telemetry") if getattr(old.audit, k) != getattr(spec.audit, k)]
    if differing:
        raise UserError(f"{must} {' and '.join(differing)}")


def _check_version(folder: Path, made: str, too_old: bool) -> None:
    """Raises UserError where a run is of a version whose numbers were others."""
    if too_old:
        raise UserError(
            f"the run in {folder} was made by jaxaudit {made}: {VERSION} can report and read it, not go on with it; "
            "run its spec again"
        )


def _computed_otherwise_before_0_3(spec: Spec) -> bool:
    """Whether versions before 0.3 had other numbers: on dialogues, and in bfloat16."""
    on_dialogues = spec.task is not None and spec.task.kind == "dialogue"
    return on_dialogues or getattr(spec.learner.settings, "precision", None) == "bfloat16"


def _check_engine(folder: Path, spec: Spec) -> None:
    """Raises UserError where what simulates a run's task cannot run on the devices here."""
    task, here = spec.task, jax.default_backend()
    if isinstance(task, Simulated) and not task.runs_on(here):
        raise UserError(
            f"the run in {folder} was begun with physics {task.engine!r} and needs it, and here, where JAX runs on "
            f"{here!r}, physics would be {task.engine_on(here)!r}: set JAX_PLATFORMS=cpu to keep JAX to the CPU, or "
            "run its spec again in another folder"
        )


def check_provenance(store: Folder, grid: Grid) -> None:
    """Raises UserError where what a run depends on, e.g. a corpus or a monitor, is not what it began with."""
    then = store.read_environment().get("provenance", {})
    for what, now in grid.provenance.items():
        if then.get(what) != now:
            raise UserError(f"the run in {store.path} began with another {what}: {then.get(what)}, and now it is {now}")


def check_same_monitor(folder: Path, ran: Grid, grid: Grid) -> None:
    """Raises UserError where a grid that goes on from a run's onsets has another monitor than the run."""
    then, now = (one.provenance.get("monitor") for one in (ran, grid))
    if then is None and now is not None:
        raise UserError(f"the run in {folder} has no monitor to go on with, and the spec has a [monitor]")
    if then != now:
        raise UserError(f"the spec must keep the run's [monitor], {Folder(folder).monitor}, and its alpha")


def is_finished(store: Folder) -> bool:
    """Whether a run got to its end."""
    return store.read_environment().get("status") == "finished"
