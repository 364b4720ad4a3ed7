"""Reads a spec from TOML text, writes it back with every default, and builds its grid.

Nothing in a spec runs code: names are looked up in the registries, and values are checked for their types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.grid import Grid, plan, site_misfit
from jaxaudit.core.learner import Learner
from jaxaudit.core.remedied_learner import remedied
from jaxaudit.core.sites import Recorder, trace
from jaxaudit.core.taps import OFFERED
from jaxaudit.core.task_kinds import Task, resolved, resolved_like
from jaxaudit.monitoring.watch import MonitorWatch
from jaxaudit.perturbations import Chain, Perturbation
from jaxaudit.remedies import Remedy
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError, error_prefix
from jaxaudit.runtime.files import MAX_FILE_BYTES, parse_toml
from jaxaudit.runtime.paths import paths_of
from jaxaudit.spec.sections import (
    MAX_CONDITIONS,
    AuditSpec,
    DimensionEntry,
    Entry,
    LearnerSpec,
    MonitorSpec,
    PerturbationEntry,
    RunSpec,
    condition_count,
    read_audit,
    read_entries,
    read_learner,
    read_metrics,
    read_monitor,
    read_remedy,
    read_run,
    read_task,
    task_table,
)
from jaxaudit.spec.tables import TomlTable, field_names, read_table_list, to_toml_text


@dataclass
class _TrialTaps(Recorder):
    """Taps that apply perturbations to the values that pass, note which are refused, and return the values unchanged.

    Attributes:
      perturbations: The perturbations to try.
      refused: The error message of each perturbation that failed, by its index.
    """

    perturbations: Sequence[Perturbation] = ()
    refused: dict[int, str] = field(default_factory=dict)

    def disturb(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Tries every perturbation of the site whose needs the context of the tap satisfies."""
        for index, perturbation in enumerate(self.perturbations):
            needs = set(perturbation.kind.needs) - set(OFFERED)
            if perturbation.site == site and needs <= set(context) and index not in self.refused:
                self._try(index, perturbation, value, label, context)
        return super().disturb(site, value, label=label, **context)

    def _try(self, index: int, perturbation: Perturbation, value: Any, label: str, context: dict) -> None:
        selected = jnp.ones(len(paths_of(value, label)), bool)
        offered = {"selected": selected, "elapsed": jnp.float32(1.0), "alarm": jnp.bool_(True), **context}
        try:
            perturbation.apply(value, **{name: offered[name] for name in perturbation.kind.needs})
        except ValueError as error:
            self.refused[index] = str(error)


def misfits(
    learner: Learner, perturbations: Sequence[Perturbation | Chain], steps: int, monitored: bool = False
) -> list[str | None]:
    """Checks which perturbations can disturb a learner, by one traced step.

    Args:
      learner: The learner.
      perturbations: Perturbations and chains.
      steps: The number of steps of the run.
      monitored: Whether a monitor raises alarms that interventions can wait for.

    Returns:
      For each perturbation None, or a sentence on why it cannot disturb the learner.
    """
    parts = [part for perturbation in perturbations for part in perturbation.parts]
    trial = _TrialTaps(steps=steps, perturbations=parts)
    trace(learner, trial)
    sites = trial.sites.with_bounds_of(learner)
    reasons = iter(
        [
            trial.refused.get(i) or site_misfit(part, sites) or (None if monitored else _alarm_misfit(part))
            for i, part in enumerate(parts)
        ]
    )
    reasons_by_perturbation = [[next(reasons) for _ in perturbation.parts] for perturbation in perturbations]
    return [next(filter(None, part_reasons), None) for part_reasons in reasons_by_perturbation]


def _alarm_misfit(part: Perturbation) -> str | None:
    if "alarm" not in part.kind.needs:
        return None
    return f"'{part.name}' waits for a monitor's alarm, so the spec must have a table [monitor]"


@dataclass(frozen=True)
class Spec:
    """A whole audit.

    Attributes:
      audit: The section [audit].
      task: The task of the section [task], or None.
      learner: The section [learner].
      perturbations: The tables [[perturbation]], one entry for each onset.
      metrics: The section [metrics].
      run: The section [run].
      monitor: The section [monitor], or None.
      remedies: The tables [[remedy]].
      source: The file that the spec was read from, for error messages. Equality ignores it.
    """

    audit: AuditSpec
    task: Task | None
    learner: LearnerSpec
    perturbations: tuple[Entry, ...]
    metrics: MetricSettings = field(default_factory=MetricSettings)
    run: RunSpec = field(default_factory=RunSpec)
    monitor: MonitorSpec | None = None
    remedies: tuple[Remedy, ...] = ()
    source: str = field(default="spec", compare=False)

    def to_toml(self) -> str:
        """Returns TOML text with every default, from which `parse` reads an equal spec."""
        return to_toml_text(self.tables())

    def tables(self) -> dict[str, Any]:
        """Returns the tables of the TOML text by name; None stands for a table that is left out."""
        settings = dataclasses.asdict(self.learner.settings)
        settings.pop("telemetry", None)
        return {
            "audit": dataclasses.asdict(self.audit),
            "task": task_table(self.task),
            "learner": {"kind": self.learner.kind, **settings},
            "metrics": dataclasses.asdict(self.metrics),
            "remedy": remedy_tables(self.remedies),
            "monitor": {"file": m.file, "alpha": m.alpha} if (m := self.monitor) else None,
            "run": dataclasses.asdict(self.run),
            "perturbation": [entry.to_table() for entry in self.perturbations] or None,
        }

    def resolved(self, platform: str = "") -> Spec:
        """Returns the spec with the physics engine that `physics = "auto"` chooses on a platform.

        Args:
          platform: JAX's name of the kind of device; by default that of this process.
        """
        return dataclasses.replace(self, task=resolved(self.task, platform or jax.default_backend()))

    def resolved_like(self, other: Spec) -> Spec:
        """Returns the spec with the physics engine of another spec in the place of `physics = "auto"`."""
        return dataclasses.replace(self, task=resolved_like(self.task, other.task))

    def expanded(self) -> Spec:
        """Returns the spec with every dimension replaced by those of its kinds that fit the learner.

        Raises:
          UserError: The learner cannot be made, or no kind of a dimension fits it.
        """
        if not any(isinstance(entry, DimensionEntry) for entry in self.perturbations):
            return self
        return dataclasses.replace(self, perturbations=tuple(self._fitting_entries(self._learner())))

    def build(self) -> Grid:
        """Makes the learner and returns the grid of the audit.

        Raises:
          UserError: The learner or the monitor cannot be made, or a perturbation does not fit the learner.
        """
        learner, audit = self._learner(), self.audit
        perturbations = [entry.perturbation for entry in self._fitting_entries(learner)]
        with error_prefix(self.source):
            return plan(
                learner,
                perturbations,
                seeds=audit.seeds,
                steps=audit.steps,
                execution=audit.execution,
                lanes=audit.lanes,
                model_devices=audit.model_devices,
                matmul_precision=audit.matmul_precision,
                tail=self.metrics.window,
                watch=self._watch(),
            )

    def _learner(self) -> Learner:
        settings = self.learner.settings
        arguments = {name: getattr(settings, name) for name in field_names(type(settings))}
        with error_prefix(f"{self.source}: [task] and [learner]"):
            task = () if self.task is None else (self.task,)
            learner = registry.learners[self.learner.kind](*task, **arguments)
        if not self.remedies:
            return learner
        with error_prefix(f"{self.source}: [[remedy]]"):
            return remedied(learner, *self.remedies)

    def _watch(self) -> Callable[..., MonitorWatch] | None:
        """Returns a function that makes the monitor score a learner's telemetry, or None without a monitor.

        Both this method and the function raise UserError if that is impossible.
        """
        if self.monitor is None:
            return None
        place, alpha = f"{self.source}: [monitor]", self.monitor.alpha
        with error_prefix(place):
            monitor = self.monitor.load()

        def watch(*telemetry: Any) -> MonitorWatch:
            with error_prefix(place):
                return MonitorWatch.for_telemetry(monitor, alpha, *telemetry)

        return watch

    def _fitting_entries(self, learner: Learner) -> list[PerturbationEntry]:
        """Returns the entries, with each dimension replaced by those of its kinds that fit the learner.

        Raises:
          UserError: A perturbation does not fit the learner, or no kind of a dimension does.
        """
        candidates = [entry.candidates() for entry in self.perturbations]
        perturbations = [candidate.perturbation for group in candidates for candidate in group]
        with error_prefix(self.source):
            reasons = iter(misfits(learner, perturbations, self.audit.steps, monitored=self.monitor is not None))
        fitting: list[PerturbationEntry] = []
        for entry, group in zip(self.perturbations, candidates, strict=True):
            group_reasons = [next(reasons) for _ in group]
            if None not in group_reasons:
                if isinstance(entry, DimensionEntry):
                    raise UserError(f"{entry.place}: no perturbation of '{entry.dimension}' fits the learner's sites")
                raise UserError(f"{entry.place}: {group_reasons[0]}")
            fitting += [c for c, reason in zip(group, group_reasons, strict=True) if reason is None]
        return fitting


def load(path: str | Path) -> Spec:
    """Reads a spec from a file. Raises UserError if it cannot be read or is not a spec."""
    return parse(read_spec_text(path), str(path), Path(path).parent)


def read_spec_text(path: str | Path) -> str:
    """Returns the text of a spec file, without a byte order mark. Raises UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a spec file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB, the most that a spec may have")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None


def parse(text: str, source: str = "spec", folder: Path = Path()) -> Spec:
    """Reads a spec from TOML text.

    Args:
      text: The TOML text.
      source: The name of the spec at the beginning of error messages.
      folder: The folder that the path of a monitor is relative to.

    Raises:
      UserError: The text is not TOML, or not a spec.
    """
    return read_spec(parse_toml(text, source), source, folder)


def read_spec(document: dict[str, Any], source: str = "spec", folder: Path = Path()) -> Spec:
    """Reads a spec from its TOML tables; the other arguments and errors are those of `parse`."""
    tables = ("audit", "task", "learner", "remedy", "metrics", "run", "monitor", "perturbation")
    sections = TomlTable(document, source, tables)
    audit = read_audit(sections)
    return Spec(
        audit=audit,
        task=read_task(sections),
        learner=read_learner(sections, audit),
        perturbations=_read_perturbations(sections, audit.steps),
        metrics=read_metrics(sections),
        run=read_run(sections),
        monitor=read_monitor(sections, folder),
        remedies=tuple(read_remedy(values, place) for values, place in read_table_list(sections, "remedy")),
        source=source,
    )


def remedy_tables(remedies: Sequence[Remedy]) -> list[dict[str, Any]] | None:
    """Returns the keys and values of the tables [[remedy]], or None without remedies."""
    return [{"kind": remedy.name, "strength": remedy.strength} for remedy in remedies] or None


def _read_perturbations(sections: TomlTable, steps: int) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    count = 0
    for values, place in read_table_list(sections, "perturbation"):
        table_entries = read_entries(values, place, steps)
        entries += table_entries
        count += sum(map(condition_count, table_entries))
        if count > MAX_CONDITIONS:
            raise UserError(
                f"{place}: a spec may have at most {MAX_CONDITIONS} conditions, and its tables up to here make {count}"
            )
    return tuple(entries)
