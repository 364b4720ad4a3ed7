"""Opens the folders of new and existing runs, and checks that what a run depends on has not changed."""

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
    """Claims a folder for a new run and locks it until the block ends; see `jaxaudit.runtime.files.claimed`.

    The block calls the claim's `keep` once the run's spec is written. Files of a process that was killed before that
    are removed.

    Raises:
      UserError: the folder is taken or cannot be created.
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
    """Returns whether a folder has nothing but the files of a run that was killed before its spec was written."""
    store = Folder(folder)
    expected = {
        path.name for path in (store.environment, store.plan, store.checkpoints, store.telemetry, store.monitor)
    }
    names = {name for name in entry_names(folder) if not name.startswith(UNFINISHED)}
    return not names or (names <= expected and store.read_environment().get("status") == STARTING)


def open_run(folder: Path) -> tuple[Folder, Spec, Grid]:
    """Opens the run in a folder, with as many devices as it was begun with if this process has them.

    The number of devices that share a lane is the spec's. The physics engine is the one the run was begun with: runs
    of earlier versions stored "auto", which meant the engine of the recorded devices.

    Raises:
      UserError: there is no run, it is damaged or of an earlier version, or its physics engine cannot run here.
    """
    store = Folder(Path(folder))
    check_path_encoding(store.path)
    if not store.spec.is_file():
        raise UserError(f"{folder} is not a run's folder: it has no spec.toml")
    check_contents(store.path)
    if store.telemetry.exists():
        array_store.check(store.telemetry)
    recorded = store.read_environment()
    version = str(recorded.get("jaxaudit", VERSION))
    _check_version(folder, version, version.startswith("0.1."))
    spec = load(store.spec).resolved(recorded_platform(recorded))
    _check_version(folder, version, version.startswith("0.2.") and _changed_since_0_2(spec))
    _check_engine(folder, spec)
    grid = spec.build()
    program = grid.program
    devices = recorded.get("devices")
    if isinstance(devices, int) and 0 < devices < len(program.devices):
        program = replace(program, devices=program.devices[:devices])
    if program.execution == "auto":
        program = replace(program, execution=recorded.get("lane_layout", {}).get("execution", "vmap"))
    grid = replace(grid, program=program)
    if recorded.get("forked_from"):
        grid = replace(grid, tail=0)
    return store, spec, grid


def open_finished(folder: Path) -> tuple[Folder, Spec, Grid]:
    """Opens a finished run as `open_run` does.

    Raises:
      UserError: as `open_run`; or the run is not finished, or what it depends on has changed.
    """
    store, spec, grid = open_run(folder)
    if not is_finished(store):
        raise UserError(f"the run in {folder} is not finished; end it with: jaxaudit resume {folder}")
    check_provenance(store, grid)
    return store, spec, grid


def open_onsets(folder: Path, spec: Spec | None = None) -> tuple[Folder, Spec, Grid, Grid]:
    """Opens a finished run whose stored states at the onsets other lanes start from.

    Args:
      folder: the run's folder.
      spec: the spec of the other lanes; None for the run's own.

    Returns:
      The run's folder, the spec and the grid of the other lanes, and the run's own grid.

    Raises:
      UserError: the run is not finished, what it depends on has changed, the spec changes more than conditions, or an
        onset is not stored.
    """
    store, run_spec, run_grid = open_finished(folder)
    if spec is None:
        return store, replace(run_spec, source=str(store.spec)), replace(run_grid, tail=0), run_grid
    spec = spec.resolved_like(run_spec)
    check_unchanged(spec, run_spec, "the spec must keep the run's")
    spec = spec.expanded()
    grid = replace(spec.build(), tail=0)
    check_same_monitor(folder, run_grid, grid)
    stored = [fork.onset for fork in run_grid.forks]
    for onset in (fork.onset for fork in grid.forks):
        if onset not in stored:
            onsets = ", ".join(map(str, stored))
            raise UserError(f"no stored onset at step {onset}; the run in {folder} has {onsets}")
    return store, spec, grid, run_grid


def check_unchanged(spec: Spec, run_spec: Spec, message: str, *sections: str) -> None:
    """Raises UserError if a spec trains anything else than a run's spec does.

    Args:
      spec: the spec to check.
      run_spec: the run's spec.
      message: the beginning of the error message, which the names of what differs complete.
      sections: sections of the spec to compare besides [task], [learner] and [remedies].
    """
    differing = [s for s in ("task", "learner", "remedies", *sections) if getattr(run_spec, s) != getattr(spec, s)]
    if "task" in differing and isinstance(run_spec.task, Simulated) and isinstance(spec.task, Simulated):
        run_engine, engine = run_spec.task.engine, spec.task.engine
        if run_engine and spec.task.simulated_by(run_engine) == run_spec.task:
            differing[0] = f"task (physics {run_engine!r}, not {engine!r})"
    differing += [k for k in ("seeds", "steps", "telemetry") if getattr(run_spec.audit, k) != getattr(spec.audit, k)]
    if differing:
        raise UserError(f"{message} {' and '.join(differing)}")


def _check_version(folder: Path, version: str, too_old: bool) -> None:
    if too_old:
        raise UserError(
            f"the run in {folder} was made by jaxaudit {version}: {VERSION} can report and read it, not go on with it; "
            "run its spec again"
        )


def _changed_since_0_2(spec: Spec) -> bool:
    """Returns whether version 0.2 gave other numbers for a spec: on dialogues, and in bfloat16."""
    on_dialogues = spec.task is not None and spec.task.kind == "dialogue"
    return on_dialogues or getattr(spec.learner.settings, "precision", None) == "bfloat16"


def _check_engine(folder: Path, spec: Spec) -> None:
    """Raises UserError if the physics engine of a run's task cannot run on the devices of this process."""
    task, backend = spec.task, jax.default_backend()
    if isinstance(task, Simulated) and not task.runs_on(backend):
        raise UserError(
            f"the run in {folder} was begun with physics {task.engine!r} and needs it, and here, where JAX runs on "
            f"{backend!r}, physics would be {task.engine_on(backend)!r}: set JAX_PLATFORMS=cpu to keep JAX to the CPU, "
            "or run its spec again in another folder"
        )


def check_provenance(store: Folder, grid: Grid) -> None:
    """Raises UserError if a file that a run depends on, such as a corpus or a monitor, has changed since it began."""
    recorded = store.read_environment().get("provenance", {})
    for kind, digest in grid.provenance.items():
        if recorded.get(kind) != digest:
            raise UserError(
                f"the run in {store.path} began with another {kind}: {recorded.get(kind)}, and now it is {digest}"
            )


def check_same_monitor(folder: Path, run_grid: Grid, grid: Grid) -> None:
    """Raises UserError if a grid that starts from a run's onsets has another monitor than the run."""
    run_monitor, monitor = run_grid.provenance.get("monitor"), grid.provenance.get("monitor")
    if run_monitor is None and monitor is not None:
        raise UserError(f"the run in {folder} has no monitor to go on with, and the spec has a [monitor]")
    if run_monitor != monitor:
        raise UserError(f"the spec must keep the run's [monitor], {Folder(folder).monitor}, and its alpha")


def is_finished(store: Folder) -> bool:
    """Returns whether the status of a run is "finished"."""
    return store.read_environment().get("status") == "finished"
