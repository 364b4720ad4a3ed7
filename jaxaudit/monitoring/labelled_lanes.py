"""Lanes of stored runs on which detectors are compared: clean and disturbed lanes of one learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis.run_reader import CONTROL, Run, load
from jaxaudit.core.task_kinds import Simulated
from jaxaudit.monitoring.telemetry import stack_channels
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import recorded_platform


@dataclass(frozen=True)
class LabelledLanes:
    """Clean and disturbed lanes of one learner on one task.

    Attributes:
      learner: a title such as "ppo on InvertedPendulum-v5", with a number if several compared learners have the same.
      channels: the names of the d channels.
      values: telemetry, float32 `[lanes, T, d]`, not finite where there is no value.
      table: a row per lane: seed, clean (bool), condition, perturbation, magnitude, onset (step), collapse_time
        (step, or infinite).
      runs: the folders of the runs.
      collapsing: the number of seeds whose undisturbed control collapses, and which have no clean lane.
    """

    learner: str
    channels: tuple[str, ...]
    values: np.ndarray
    table: pd.DataFrame
    runs: tuple[Path, ...] = ()
    collapsing: int = 0


def load_lanes(folders: Sequence[Path], channels: Sequence[str] | None = None) -> list[LabelledLanes]:
    """Reads the lanes of finished runs, and groups them by learner, task and number of steps.

    A seed's first control is its clean lane, unless one of its controls collapses. A seed that is in several runs is
    the same training.

    Args:
      folders: the folders of the runs.
      channels: the channels to read; None reads all.

    Raises:
      UserError: a folder holds no finished run, runs of one learner differ in their channels, or a run lacks one of
        `channels`.
    """
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        run = _load_finished(folder)
        groups.setdefault(group_key(run), []).append(run)
    titles = _numbered([_title(runs[0]) for runs in groups.values()])
    return [_group_lanes(title, runs, channels) for title, runs in zip(titles, groups.values(), strict=True)]


def _load_finished(folder: Path) -> Run:
    try:
        run = load(folder)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from None
    if not run.finished or run.metrics is None:
        raise UserError(f"the run in {folder} is not finished; go on with: jaxaudit resume {folder}")
    return run


def group_key(run: Run) -> str:
    """Returns a text that runs have in common if their lanes are compared together."""
    return repr((_task(run), run.spec.get("learner"), run.spec.get("remedy"), run.steps))


def _task(run: Run) -> Any:
    """Returns a run's [task], with physics "auto", which earlier versions stored, replaced by its devices' engine."""
    task, platform = run.spec.get("task"), recorded_platform(run.environment)
    if not isinstance(task, dict) or task.get("physics") != "auto" or not platform:
        return task
    try:
        settings = {name: value for name, value in task.items() if name != "kind"}
        simulated = registry.task_kinds[task["kind"]](**settings)
        if not isinstance(simulated, Simulated) or simulated.engine != "auto":
            return task
        return task | {"physics": simulated.engine_on(platform)}
    except (KeyError, TypeError, ValueError):  # This version does not know the kind, or a task of this name.
        return task


def _group_lanes(title: str, runs: Sequence[Run], channels: Sequence[str] | None) -> LabelledLanes:
    collapsing = {seed for run in runs for seed in _collapsing_seeds(run)}
    excluded = set(collapsing)
    values, tables = [], []
    names: tuple[str, ...] = ()
    for run in runs:
        telemetry = _read_channels(run, channels)
        run_names = tuple(str(name) for name in telemetry.channel.values)
        if names and run_names != names:
            differing = sorted(set(names) ^ set(run_names))
            raise UserError(f"{run.folder} and {runs[0].folder} differ in their channels: {', '.join(differing)}")
        names = run_names
        table = _lane_table(run, excluded)
        excluded |= set(table.seed)
        values.append(telemetry.values.reshape(-1, *telemetry.shape[2:])[table.index])
        tables.append(table)
    table = pd.concat(tables, ignore_index=True)
    folders = tuple(run.folder for run in runs)
    return LabelledLanes(title, names, np.concatenate(values), table, folders, len(collapsing))


def _collapsing_seeds(run: Run) -> set[int]:
    """Returns the seeds of which a control collapses, whatever its onset."""
    assert run.metrics is not None, "a finished run has metrics"
    controls = run.conditions["condition"][run.conditions["perturbation"] == CONTROL]
    lanes = run.metrics[run.metrics["condition"].isin(controls)]
    return set(lanes["seed"][np.isfinite(lanes["collapse_time"])].astype(int))


def _read_channels(run: Run, channels: Sequence[str] | None) -> xr.DataArray:
    try:
        return stack_channels(run.telemetry.load(), channels).transpose("seed", "condition", "step", "channel")
    except ValueError as error:
        raise UserError(f"{run.folder}: {error}") from None


def _lane_table(run: Run, excluded: set[int]) -> pd.DataFrame:
    """Returns a row for each lane to compare on; the index counts all conditions of a seed, seed by seed.

    Lanes with an intervention are left out, because their telemetry shows its effect. So are clean lanes of the seeds
    in `excluded`.
    """
    assert run.metrics is not None, "a finished run has metrics"
    seeds, conditions = run.telemetry["seed"].values, run.conditions
    table = pd.concat([conditions] * len(seeds), ignore_index=True)
    table.insert(0, "seed", np.repeat(seeds, len(conditions)).astype(int))
    table["clean"] = table["perturbation"] == CONTROL
    times = run.metrics.set_index(["seed", "condition"])["collapse_time"]
    table["collapse_time"] = times.reindex(pd.MultiIndex.from_frame(table[["seed", "condition"]])).to_numpy()
    first_control = table.clean & ~table.duplicated(["seed", "clean"]) & ~table.seed.isin(excluded)
    intervenes = {
        name: any(part in registry.interventions for part in name.split("+")) for name in table.perturbation.unique()
    }
    disturbed = ~table.clean & (table.magnitude != table.neutral) & ~table.perturbation.map(intervenes)
    columns = ["seed", "clean", "condition", "perturbation", "magnitude", "onset", "collapse_time"]
    return table.loc[first_control | disturbed, columns]


def _title(run: Run) -> str:
    spec: dict[str, Any] = run.spec
    learner = spec.get("learner", {}).get("kind", run.name) + run.remedies
    return f"{learner} on {spec['task'].get('name', 'a task')}" if "task" in spec else str(learner)


def _numbered(titles: Sequence[str]) -> list[str]:
    """Returns the titles, with a number added to those that occur before."""
    counts = [titles[:index].count(title) for index, title in enumerate(titles)]
    return [f"{title} ({count + 1})" if count else title for title, count in zip(titles, counts, strict=True)]
