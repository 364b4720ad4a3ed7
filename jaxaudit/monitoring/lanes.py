"""The lanes of stored runs, as detectors are compared on them: clean ones and disturbed ones of one learner."""

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
from jaxaudit.monitoring.channels import series
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.machine import recorded_platform


@dataclass(frozen=True)
class LabelledLanes:
    """Clean and disturbed trainings of one learner on one task.

    Attributes:
      learner: "ppo on InvertedPendulum-v5"; with a number where several of those compared are called so.
      channels: d names.
      values: telemetry, float32 `[lanes, T, d]`, not finite where there is no value.
      table: a row for each lane: seed, clean (bool), condition, perturbation, magnitude, onset (step), collapse_time
        (step, or infinite).
      runs: the folders they come from.
      collapsing: how many seeds have a control that collapses undisturbed, which is therefore no clean lane.
    """

    learner: str
    channels: tuple[str, ...]
    values: np.ndarray
    table: pd.DataFrame
    runs: tuple[Path, ...] = ()
    collapsing: int = 0


def gather(folders: Sequence[Path], channels: Sequence[str] | None = None) -> list[LabelledLanes]:
    """The lanes of finished runs, those of the same learner, task and number of steps together.

    A seed's first control is its clean lane unless one of its controls collapses, and a seed that is in several runs is
    the same training.

    Args:
      folders: of the runs.
      channels: which to read; None: all.

    Raises:
      UserError: a folder holds no finished run, runs of one learner differ in their channels, or there are no
        disturbed or too few clean lanes.
    """
    groups: dict[str, list[Run]] = {}
    for folder in folders:
        run = _finished(folder)
        groups.setdefault(_same(run), []).append(run)
    titles = _distinct([_title(runs[0]) for runs in groups.values()])
    return [_lanes(title, runs, channels) for title, runs in zip(titles, groups.values(), strict=True)]


def _finished(folder: Path) -> Run:
    try:
        run = load(folder)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from None
    if not run.finished or run.metrics is None:
        raise UserError(f"the run in {folder} is not finished; go on with: jaxaudit resume {folder}")
    return run


def _same(run: Run) -> str:
    """What runs of one learner have in common."""
    return repr((_task(run), run.spec.get("learner"), run.spec.get("remedy"), run.steps))


def _task(run: Run) -> Any:
    """A run's [task]; physics "auto", which earlier versions stored, are replaced by those that its devices had."""
    task, platform = run.spec.get("task"), recorded_platform(run.environment)
    if not isinstance(task, dict) or task.get("physics") != "auto" or not platform:
        return task
    try:
        settings = {name: value for name, value in task.items() if name != "kind"}
        simulated = registry.task_kinds[task["kind"]](**settings)
        if not isinstance(simulated, Simulated) or simulated.engine != "auto":
            return task
        return task | {"physics": simulated.engine_on(platform)}
    except (KeyError, TypeError, ValueError):  # of a kind, or by a name, that is not known here
        return task


def _lanes(title: str, runs: Sequence[Run], channels: Sequence[str] | None) -> LabelledLanes:
    collapsing = {seed for run in runs for seed in _collapsing(run)}
    known = set(collapsing)
    values, tables = [], []
    names: tuple[str, ...] = ()
    for run in runs:
        found = _series(run, channels)
        here = tuple(str(name) for name in found.channel.values)
        if names and here != names:
            other = sorted(set(names) ^ set(here))
            raise UserError(f"{run.folder} and {runs[0].folder} differ in their channels: {', '.join(other)}")
        names = here
        table = _table(run, known)
        known |= set(table.seed)
        cells = found.values.reshape(-1, *found.shape[2:])
        values.append(cells[table.index])
        tables.append(table)
    table = pd.concat(tables, ignore_index=True)
    return LabelledLanes(
        title, names, np.concatenate(values), table, tuple(run.folder for run in runs), len(collapsing)
    )


def _collapsing(run: Run) -> set[int]:
    """The seeds of which a control collapses, whatever its onset."""
    assert run.metrics is not None, "a finished run has them"
    controls = run.conditions["condition"][run.conditions["perturbation"] == CONTROL]
    lanes = run.metrics[run.metrics["condition"].isin(controls)]
    return set(lanes["seed"][np.isfinite(lanes["collapse_time"])].astype(int))


def _series(run: Run, channels: Sequence[str] | None) -> xr.DataArray:
    try:
        return series(run.telemetry.load(), channels).transpose("seed", "condition", "step", "channel")
    except ValueError as error:
        raise UserError(f"{run.folder}: {error}") from None


def _table(run: Run, known: set[int]) -> pd.DataFrame:
    """A row for each lane that counts; the index is its number, condition after condition within a seed.

    A lane with an intervention does not count: what it shows is the help too.
    """
    assert run.metrics is not None, "a finished run has them"
    seeds, conditions = run.telemetry["seed"].values, run.conditions
    whole = pd.concat([conditions] * len(seeds), ignore_index=True)
    whole.insert(0, "seed", np.repeat(seeds, len(conditions)).astype(int))
    whole["clean"] = whole["perturbation"] == CONTROL
    times = run.metrics.set_index(["seed", "condition"])["collapse_time"]
    whole["collapse_time"] = times.reindex(pd.MultiIndex.from_frame(whole[["seed", "condition"]])).to_numpy()
    first = whole.clean & ~whole.duplicated(["seed", "clean"]) & ~whole.seed.isin(known)
    helps = {n: any(part in registry.interventions for part in n.split("+")) for n in whole.perturbation.unique()}
    disturbed = ~whole.clean & (whole.magnitude != whole.neutral) & ~whole.perturbation.map(helps)
    columns = ["seed", "clean", "condition", "perturbation", "magnitude", "onset", "collapse_time"]
    return whole.loc[first | disturbed, columns]


def _title(run: Run) -> str:
    sections: dict[str, Any] = run.spec
    learner = sections.get("learner", {}).get("kind", run.name) + run.remedies
    return f"{learner} on {sections['task'].get('name', 'a task')}" if "task" in sections else str(learner)


def _distinct(titles: Sequence[str]) -> list[str]:
    """The titles, those that are there already with a number."""
    counts = [titles[:place].count(title) for place, title in enumerate(titles)]
    return [f"{title} ({count + 1})" if count else title for title, count in zip(titles, counts, strict=True)]
