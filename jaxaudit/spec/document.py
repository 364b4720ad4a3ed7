"""A spec: TOML text to validated dataclasses, back to TOML with every default written out, and on to a grid.

Nothing in a spec runs code: names are looked up in the registries, and values have the types written here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
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
from jaxaudit.runtime.errors import UserError, placed
from jaxaudit.runtime.files import MOST_BYTES, parse_toml
from jaxaudit.runtime.paths import paths_of
from jaxaudit.spec.sections import (
    MOST_CONDITIONS,
    Asked,
    AskedDimension,
    AuditSpec,
    Entry,
    LearnerSpec,
    MonitorSpec,
    RunSpec,
    count_of,
    read_audit,
    read_entries,
    read_learner,
    read_metrics,
    read_monitor,
    read_remedy,
    read_run,
    read_task,
    task_values,
)
from jaxaudit.spec.tables import TomlTable, given, to_text


@dataclass
class _Trial(Recorder):
    """Taps that try perturbations on the values that pass, and pass the values on as they are."""

    perturbations: Sequence[Perturbation] = ()
    refused: dict[int, str] = field(default_factory=dict)

    def disturb(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Tries every perturbation of the site that the tap's context suffices for."""
        for index, perturbation in enumerate(self.perturbations):
            needs = set(perturbation.kind.needs) - set(OFFERED)
            if perturbation.site == site and needs <= set(context) and index not in self.refused:
                self._try(index, perturbation, value, label, context)
        return super().disturb(site, value, label=label, **context)

    def _try(self, index: int, perturbation: Perturbation, value: Any, label: str, context: dict) -> None:
        selected = jnp.ones(len(paths_of(value, label)), bool)
        offered = {"selected": selected, "elapsed": jnp.float32(1.0), "alarm": jnp.bool_(True), **context}
        given = {name: offered[name] for name in perturbation.kind.needs}
        try:
            perturbation.apply(value, **given)
        except ValueError as error:
            self.refused[index] = str(error)


def misfits(
    learner: Learner, perturbations: Sequence[Perturbation | Chain], steps: int, monitored: bool = False
) -> list[str | None]:
    """For each perturbation None, or a sentence on why the learner cannot be disturbed by it.

    `monitored` says whether there are alarms for interventions to wait for.
    """
    parts = [part for perturbation in perturbations for part in perturbation.parts]
    trial = _Trial(steps=steps, perturbations=parts)
    trace(learner, trial)
    sites = trial.sites.with_bounds_of(learner)
    reasons = iter(
        [
            trial.refused.get(i) or site_misfit(part, sites) or (None if monitored else _waits(part))
            for i, part in enumerate(parts)
        ]
    )
    by_perturbation = [[next(reasons) for _ in perturbation.parts] for perturbation in perturbations]
    return [next(filter(None, found), None) for found in by_perturbation]


def _waits(part: Perturbation) -> str | None:
    if "alarm" not in part.kind.needs:
        return None
    return f"'{part.name}' waits for a monitor's alarm, which a spec has none of without a table [monitor]"


@dataclass(frozen=True)
class Spec:
    """A whole audit. `source` is where it was read, for messages; it does not count in comparisons."""

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
        """TOML text with every default written out; `parse` gives the same spec again."""
        return to_text(self.tables())

    def tables(self) -> dict[str, Any]:
        """The tables of its TOML text, by name; None where there is none."""
        settings = dataclasses.asdict(self.learner.settings)
        settings.pop("telemetry", None)
        return {
            "audit": dataclasses.asdict(self.audit),
            "task": task_values(self.task),
            "learner": {"kind": self.learner.kind, **settings},
            "metrics": dataclasses.asdict(self.metrics),
            "remedy": remedy_values(self.remedies),
            "monitor": {"file": m.file, "alpha": m.alpha} if (m := self.monitor) else None,
            "run": dataclasses.asdict(self.run),
            "perturbation": [entry.values() for entry in self.perturbations] or None,
        }

    def resolved(self, platform: str = "") -> Spec:
        """The spec with the engine of its task named, where `physics = "auto"` leaves that to the device.

        `platform`: JAX's name of the kind of device; empty: the kind there is here.
        """
        return dataclasses.replace(self, task=resolved(self.task, platform or jax.default_backend()))

    def resolved_like(self, other: Spec) -> Spec:
        """The spec with the engine of another's task, where `physics = "auto"` leaves it open."""
        return dataclasses.replace(self, task=resolved_like(self.task, other.task))

    def expanded(self) -> Spec:
        """The spec with every `dimension` entry replaced by the kinds it stands for.

        Raises UserError if the learner cannot be made, or allows none of a dimension's kinds.
        """
        if not any(isinstance(entry, AskedDimension) for entry in self.perturbations):
            return self
        return dataclasses.replace(self, perturbations=tuple(self._fitting(self._learner())))

    def build(self) -> Grid:
        """Makes the learner and lays out the grid. Raises UserError, with the place in the spec."""
        learner, audit = self._learner(), self.audit
        perturbations = [entry.perturbation for entry in self._fitting(learner)]
        with placed(self.source):
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
        chosen = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.init}
        with placed(f"{self.source}: [task] and [learner]"):
            task = () if self.task is None else (self.task,)
            learner = registry.learners[self.learner.kind](*task, **chosen)
        if not self.remedies:
            return learner
        with placed(f"{self.source}: [[remedy]]"):
            return remedied(learner, *self.remedies)

    def _watch(self) -> Callable[..., MonitorWatch] | None:
        """What makes the monitor the watch of a learner's telemetry. Raises UserError, as it does itself."""
        if self.monitor is None:
            return None
        place, alpha = f"{self.source}: [monitor]", self.monitor.alpha
        with placed(place):
            monitor = self.monitor.read()

        def watch(*telemetry: Any) -> MonitorWatch:
            with placed(place):
                return MonitorWatch.of(monitor, alpha, *telemetry)

        return watch

    def _fitting(self, learner: Learner) -> list[Asked]:
        """The entries, dimensions replaced by what the learner's sites allow. Raises UserError."""
        options = [(e, e.candidates() if isinstance(e, AskedDimension) else [e]) for e in self.perturbations]
        tried = [one.perturbation for _, ones in options for one in ones]
        with placed(self.source):
            reasons = iter(misfits(learner, tried, self.audit.steps, monitored=self.monitor is not None))
        fitting: list[Asked] = []
        for entry, ones in options:
            judged = [(one, next(reasons)) for one in ones]
            found = [one for one, reason in judged if reason is None]
            if not found and isinstance(entry, AskedDimension):
                raise UserError(f"{entry.place}: no perturbation of '{entry.dimension}' fits the learner's sites")
            if not found:
                raise UserError(f"{entry.place}: {judged[0][1]}")
            fitting += found
        return fitting


def load(path: str | Path) -> Spec:
    """Reads a spec file. Raises UserError if it cannot be read, is not TOML, or is not a spec."""
    return parse(spec_text(path), str(path), Path(path).parent)


def spec_text(path: str | Path) -> str:
    """What a spec file holds. Raises UserError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"{path} is larger than {MOST_BYTES >> 20} MiB, which no spec is")
        text = content.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a spec file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} cannot be read") from None
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return text


def parse(text: str, source: str = "spec", folder: Path = Path()) -> Spec:
    """Reads a spec from TOML text; `source` begins the sentence of every UserError, `folder` a monitor's path."""
    return read(parse_toml(text, source), source, folder)


def remedy_values(remedies: Sequence[Remedy]) -> list[dict[str, Any]] | None:
    """Tables [[remedy]], as TOML has them; None of none."""
    return [{"kind": one.name, "strength": one.strength} for one in remedies] or None


def read(document: dict[str, Any], source: str = "spec", folder: Path = Path()) -> Spec:
    """Reads a spec from the tables of its TOML text; see `parse`."""
    tables = ("audit", "task", "learner", "remedy", "metrics", "run", "monitor", "perturbation")
    sections = TomlTable(document, source, tables)
    audit = read_audit(sections)
    return Spec(
        audit=audit,
        task=read_task(sections),
        learner=read_learner(sections, audit),
        perturbations=_read_entries(sections, audit.steps),
        metrics=read_metrics(sections),
        run=read_run(sections),
        monitor=read_monitor(sections, folder),
        remedies=tuple(read_remedy(values, place) for values, place in listed(sections, "remedy")),
        source=source,
    )


def listed(sections: TomlTable, name: str) -> Iterator[tuple[Any, str]]:
    """The tables of a list [[name]], which may be missing, each with its place. Raises UserError if it is no list."""
    tables = sections.raw(name)
    if isinstance(tables, dict):
        raise UserError(f"{sections.place}: [{name}] must be written [[{name}]], in two brackets")
    if tables is not None and not isinstance(tables, list):
        raise UserError(f"{sections.place}: {name} must be tables [[{name}]], not {given(tables)}")
    for number, values in enumerate(tables or (), 1):
        yield values, f"{sections.place}: [[{name}]] {number}"


def _read_entries(sections: TomlTable, steps: int) -> tuple[Entry, ...]:
    found: list[Entry] = []
    count = 0
    for values, place in listed(sections, "perturbation"):
        found += (new := read_entries(values, place, steps))
        count += sum(map(count_of, new))
        if count > MOST_CONDITIONS:
            raise UserError(f"{sections.place}: there are more than the {MOST_CONDITIONS} conditions a spec may have")
    return tuple(found)
