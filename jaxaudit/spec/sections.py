"""A spec's tables [audit], [task], [learner], [metrics], [monitor] and [run], each with its reader."""

from __future__ import annotations

import inspect
import math
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core.task_kinds import Task
from jaxaudit.monitoring.monitor import Monitor
from jaxaudit.perturbations import DIMENSIONS, Chain, Kind, Perturbation, Sweep, chain, sweep
from jaxaudit.remedies import Remedy, RemedyKind
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError, error_prefix
from jaxaudit.runtime.tracing import MatmulPrecision
from jaxaudit.spec.tables import TomlTable, given, keys, read, section

Onset = int | float
Onsets = int | float | tuple[int | float, ...]
Duration = int | Literal["once", "end"]

MOST_CONDITIONS = 100_000
"""The most conditions that the entries of a spec may unroll to, all together."""

_SINGLE = ("kind", "magnitude", "onset", "duration", "period", "target")
_CHAIN = ("chain", "onset", "duration")
_DIMENSION = ("dimension", "onset", "duration")


@dataclass(frozen=True)
class Asked:
    """A perturbation that a spec asks for, at one onset.

    Attributes:
      perturbation: with all its magnitudes.
      place: the table it was read from, in words; it does not count in comparisons.
    """

    perturbation: Perturbation | Chain
    place: str = field(default="", compare=False)

    def values(self) -> dict[str, Any]:
        """A table's keys and values, as TOML has them, from which it is read again."""
        if isinstance(self.perturbation, Chain):
            return {"chain": [_values(part) for part in self.perturbation.parts]}
        return _values(self.perturbation)


@dataclass(frozen=True)
class AskedDimension:
    """All kinds of a dimension that the learner's sites allow, at one onset; None: each kind's own."""

    dimension: str
    onset: Onset | None = None
    duration: int | str | None = None
    place: str = field(default="", compare=False)

    def candidates(self) -> list[Asked]:
        """All registered kinds of the dimension at their standard magnitudes."""
        kinds = [registry.perturbations[name] for name in registry.perturbations]
        return [
            Asked(kind(onset=self.onset, duration=self.duration), self.place)
            for kind in kinds
            if isinstance(kind, Kind) and kind.dimension == self.dimension
        ]

    def values(self) -> dict[str, Any]:
        """The table's keys and values, as TOML has them."""
        return {"dimension": self.dimension, "onset": self.onset, "duration": self.duration}


Entry = Asked | AskedDimension


def _values(part: Perturbation) -> dict[str, Any]:
    magnitude = part.magnitude.values if isinstance(part.magnitude, Sweep) else part.magnitude
    when = part.when
    return dict(zip(_SINGLE, (part.name, magnitude, when.onset, when.duration, when.period, part.target), strict=True))


def read_entries(values: Any, place: str, steps: int) -> list[Entry]:
    """The entries of one table in a run of `steps`, one for every onset, checked as far as it goes without the learner.

    Raises UserError.
    """
    if not isinstance(values, dict):
        raise UserError(f"{place} must be a table, not {given(values)}")
    forms: dict[str, tuple[tuple[str, ...], Callable[[TomlTable], list[Entry]]]] = {
        "kind": (_SINGLE, _read_single),
        "chain": (_CHAIN, _read_chain),
        "dimension": (_DIMENSION, _read_dimension),
    }
    found = [form for form in forms if form in values]
    if len(found) > 1:
        raise UserError(f"{place} has both '{found[0]}' and '{found[1]}'; it must have one of them")
    # Without any of the three, a misspelt one is the likely mistake, and the table names it.
    keys, read = forms[found[0]] if found else (tuple(dict.fromkeys(_SINGLE + _CHAIN + _DIMENSION)), None)
    table = TomlTable(values, place, keys)
    if read is None:
        raise UserError(f"{place} needs one of 'kind', 'chain' and 'dimension'")
    try:
        entries = read(table)
        _check(entries, steps, values.get("onset"))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    return entries


def read_remedy(values: Any, place: str) -> Remedy:
    """The remedy of one table [[remedy]]. Raises UserError."""
    table = TomlTable(values, place, ("kind", "strength"))
    name = table.get("kind", str)
    if name not in registry.remedies:
        if name in registry.perturbations or name in registry.interventions:
            raise UserError(f"{place}: '{name}' is a perturbation, which belongs into a table [[perturbation]]")
        raise UserError(f"{place}: {registry.unknown_name_message('remedy', name, list(registry.remedies))}")
    kind = registry.remedies[name]
    if not isinstance(kind, RemedyKind):
        raise UserError(f"{place}: remedy '{name}' was not made by the decorators `remedy` and `setting`")
    strength = table.get("strength", float, None)
    with error_prefix(place):
        return kind(strength)


def _read_single(table: TomlTable) -> list[Entry]:
    onsets = _each(_distinct(table, "onset", Onsets, None))
    return [Asked(_single(table, onset), table.place) for onset in onsets]


def _single(table: TomlTable, onset: Onset | None, duration: int | str | None = None) -> Perturbation:
    try:
        kind = _kind(table.get("kind", str))
    except ValueError as error:
        raise UserError(f"{table.place}: {error}") from None
    magnitude = _distinct(table, "magnitude", float | tuple[float, ...], None)
    if isinstance(magnitude, tuple) and len(magnitude) > MOST_CONDITIONS:
        raise ValueError(f"{len(magnitude)} conditions are more than the {MOST_CONDITIONS} a spec may have")
    return kind(
        sweep(*magnitude) if isinstance(magnitude, tuple) else magnitude,
        onset=onset,
        duration=table.get("duration", Duration, duration),
        period=table.get("period", int, None),
        target=table.get("target", str, None),
    )


def _read_chain(table: TomlTable) -> list[Entry]:
    listed = table.raw("chain")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{table.place}: chain must be a list of tables, not {given(listed)}")
    onsets = _distinct(table, "onset", Onsets, None)
    duration = table.get("duration", Duration, None)
    parts = [TomlTable(values, f"{table.place}, chain part {n}", _SINGLE) for n, values in enumerate(listed, 1)]
    for key, outer in (("duration", duration), ("onset", onsets)):
        if outer is not None and all(key in part for part in parts):
            raise UserError(
                f"{table.place}: {key} says nothing, since every part of the chain has "
                f"{'an' if key == 'onset' else 'a'} {key} of its own"
            )

    def at(onset: Onset | None) -> Chain:
        return chain(*(_single(part, part.get("onset", Onset, onset), duration) for part in parts))

    return [Asked(at(onset), table.place) for onset in _each(onsets)]


def _read_dimension(table: TomlTable) -> list[Entry]:
    dimension = table.get("dimension", str)
    if dimension not in DIMENSIONS:
        raise UserError(f"{table.place}: {registry.unknown_name_message('dimension', dimension, list(DIMENSIONS))}")
    duration = table.get("duration", Duration, None)
    onsets = _each(_distinct(table, "onset", Onsets, None))
    return [AskedDimension(dimension, onset, duration, table.place) for onset in onsets]


def _distinct(table: TomlTable, key: str, wanted: Any, default: Any) -> Any:
    value = table.get(key, wanted, default)
    if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
        raise UserError(f"{table.place}: {key} must list at least one number, and each once, not {list(value)}")
    return value


def _each(onsets: Onsets | None) -> tuple[Onset | None, ...]:
    return onsets if isinstance(onsets, tuple) else (onsets,)


def _check(entries: list[Entry], steps: int, onsets: Any) -> None:
    """Raises ValueError where the entries of a table are too many, or do not fit into a run of `steps`."""
    asked = [e.candidates() if isinstance(e, AskedDimension) else [e] for e in entries]
    parts = [[part for one in each for part in one.perturbation.parts] for each in asked]
    if (count := sum(count_of(entry) for entry in entries)) > MOST_CONDITIONS:
        raise ValueError(f"{count} conditions are more than the {MOST_CONDITIONS} a spec may have")
    starts = [min(part.when.resolve(steps)[0] for part in each) for each in parts]
    if len(set(starts)) < len(starts):
        raise ValueError(f"onsets {onsets} are steps {starts}, of which each must be another")
    for part in (part for each in parts for part in each):
        if part.when.period is not None and part.when.period > steps:
            raise ValueError(f"period {part.when.period} is longer than the run of {steps} steps")


def count_of(entry: Entry) -> int:
    """How many conditions an entry unrolls to, all kinds of a dimension among them."""
    ones = entry.candidates() if isinstance(entry, AskedDimension) else [entry]
    return sum(math.prod(len(part.magnitudes) for part in one.perturbation.parts) for one in ones)


def _kind(name: str) -> Kind:
    kinds = (registry.perturbations, registry.interventions)
    known = next((registered for registered in kinds if name in registered), None)
    if known is None and name in registry.remedies:
        raise ValueError(f"'{name}' is a remedy, which is a part of the learner: it belongs into a table [[remedy]]")
    if known is None:
        raise registry.UnknownName(
            registry.unknown_name_message("perturbation", name, [name for known in kinds for name in known])
        )
    kind = known[name]
    if not isinstance(kind, Kind):
        raise ValueError(f"perturbation '{name}' was not made by the decorator `perturbation`")
    return kind


MOST_STEPS = 10_000_000
MOST_SEEDS = 100_000


@dataclass(frozen=True)
class AuditSpec:
    """[audit]: what is measured.

    Attributes:
      name: what the report calls it.
      seeds: how many (0, 1, 2, ...), or which.
      steps: of a run.
      telemetry: which channels the learner gives.
      execution: how the lanes of a device run: "vmap", "map" (one after the other), a batch size, or "auto", what is
        fastest in a measurement at the run's beginning.
      lanes: the most lanes that are in memory at a time, or "auto": as many as it can hold.
      model_devices: how many devices share a lane, whose parameters are split among them.
      matmul_precision: of float32 products on GPUs and TPUs: "float32", or "tf32" for networks alone.
    """

    name: str
    seeds: int | tuple[int, ...]
    steps: int
    telemetry: Literal["basic", "full"] = "full"
    execution: int | Literal["auto", "vmap", "map"] = "vmap"
    lanes: int | Literal["auto"] = "auto"
    model_devices: int = 1
    matmul_precision: MatmulPrecision = "float32"

    @property
    def slug(self) -> str:
        """The audit's name, as a folder may be called."""
        plain = unicodedata.normalize("NFKD", self.name).encode("ascii", "ignore").decode()
        return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-.").lower() or "audit"


@dataclass(frozen=True)
class LearnerSpec:
    """[learner]: a registered learner and its settings, an instance of the dataclass its factory names."""

    kind: str
    settings: Any


@dataclass(frozen=True)
class RunSpec:
    """[run]: durable execution.

    Attributes:
      chunk: steps between one look at the run and the next; 0: chosen by the runner.
      checkpoint_every: chunks between one checkpoint and the next; 0: as often as takes a twentieth of the time.
    """

    chunk: int = 0
    checkpoint_every: int = 0


@dataclass(frozen=True)
class MonitorSpec:
    """[monitor]: what follows every lane, and raises the alarms that interventions wait for.

    Attributes:
      file: what `Monitor.save` wrote; a relative path begins at `folder`.
      alpha: false alarms per clean run, at most.
      folder: the spec's.
    """

    file: str
    alpha: float = 0.05
    folder: Path = field(default=Path(), compare=False)

    @property
    def path(self) -> Path:
        """The path of the monitor's file."""
        return self.folder / self.file

    def read(self) -> Monitor:
        """The monitor. Raises ValueError if it cannot be read."""
        try:
            return Monitor.load(self.path)
        except FileNotFoundError:
            raise ValueError(f"there is no file {self.path}") from None
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror or error}") from None


def read_audit(sections: TomlTable) -> AuditSpec:
    """Reads the table [audit] of a spec. Raises UserError."""
    table = section(sections, "audit", keys(AuditSpec))
    spec = AuditSpec(
        name=table.get("name", str, "audit"),
        seeds=table.get("seeds", int | tuple[int, ...]),
        steps=table.get("steps", int),
        telemetry=table.get("telemetry", Literal["basic", "full"], AuditSpec.telemetry),
        execution=table.get("execution", int | Literal["auto", "vmap", "map"], AuditSpec.execution),
        lanes=table.get("lanes", int | Literal["auto"], AuditSpec.lanes),
        model_devices=table.get("model_devices", int, AuditSpec.model_devices),
        matmul_precision=table.get("matmul_precision", MatmulPrecision, AuditSpec.matmul_precision),
    )
    _check_audit(table, spec)
    return spec


def _check_audit(table: TomlTable, spec: AuditSpec) -> None:
    if not (0 < len(spec.name) <= 100 and spec.name.isprintable() and spec.name.strip()):
        raise UserError(f"{table.place}: name must be 1 to 100 printable characters, not {given(spec.name)}")
    if isinstance(spec.seeds, int) and not 1 <= spec.seeds <= MOST_SEEDS:
        raise UserError(f"{table.place}: seeds must be from 1 to {MOST_SEEDS}, or a list, not {spec.seeds}")
    if isinstance(spec.seeds, tuple) and len(spec.seeds) > MOST_SEEDS:
        raise UserError(f"{table.place}: seeds must list at most {MOST_SEEDS} seeds, not {len(spec.seeds)}")
    if isinstance(spec.seeds, tuple) and (
        not spec.seeds or min(spec.seeds) < 0 or len(set(spec.seeds)) < len(spec.seeds)
    ):
        raise UserError(
            f"{table.place}: seeds must list at least one seed, all different and none negative, "
            f"not {given(list(spec.seeds))}"
        )
    _at_least(table, "steps", spec.steps, 1)
    if isinstance(spec.execution, int):
        _at_least(table, "execution", spec.execution, 1)
    if isinstance(spec.lanes, int):
        _at_least(table, "lanes", spec.lanes, 1)
    _at_least(table, "model_devices", spec.model_devices, 1)


def read_task(sections: TomlTable) -> Task | None:
    """Reads [task]; None if there is none. Raises UserError."""
    if "task" not in sections:
        return None
    table = section(sections, "task", None)
    kind = table.get("kind", str)
    if kind not in (known := registry.task_kinds):
        raise UserError(f"{table.place}: {registry.unknown_name_message('kind of task', kind, list(known))}")
    if not hasattr(known[kind], "named"):
        return read(section(sections, "task", ["kind", *keys(known[kind])]), known[kind])
    name = table.get("name", str)
    with error_prefix(table.place):
        settings = known[kind].named(name)
    return known[kind](name, read(section(sections, "task", ["kind", "name", *keys(settings)]), settings))


def task_values(task: Task | None) -> dict[str, Any] | None:
    """[task] as `read_task` reads it, every default written out."""
    if task is None:
        return None
    chosen: Any = task
    apart = {"name": task.name} if hasattr(task, "named") else {}
    of = chosen.settings if apart else chosen
    return {"kind": task.kind, **apart, **{key: getattr(of, key) for key in keys(type(of))}}


@dataclass(frozen=True)
class NoSettings:
    """The settings of a learner whose factory names none."""


def takes_task(kind: str) -> bool:
    """Whether a registered learner's factory is called with a task, before its settings by name."""
    wanted = inspect.signature(registry.learners[kind]).parameters.values()
    return any(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.VAR_POSITIONAL) for one in wanted)


def learner_settings(kind: str) -> type:
    """The settings' dataclass of a registered learner. Raises ValueError for an unknown name."""
    return getattr(registry.learners[kind], "settings", NoSettings)


def read_learner(sections: TomlTable, audit: AuditSpec) -> LearnerSpec:
    """Reads [learner], with the telemetry that [audit] wants. Raises UserError."""
    table = section(sections, "learner", None)
    kind = table.get("kind", str)
    with error_prefix(table.place):
        settings = learner_settings(kind)
    if takes_task(kind) and "task" not in sections:
        raise UserError(f"{sections.place}: the table [task] is missing, which learner '{kind}' is made for")
    if not takes_task(kind) and "task" in sections:
        raise UserError(f"{sections.place}: [task]: learner '{kind}' is made for no task")
    apart = {"telemetry": audit.telemetry} if "telemetry" in keys(settings) else {}
    table = section(sections, "learner", ["kind", *(key for key in keys(settings) if key != "telemetry")])
    chosen = read(table, settings, **apart)
    if not apart and audit.telemetry != AuditSpec.telemetry:
        raise UserError(
            f"{sections.place}: [audit]: learner '{kind}' has one kind of telemetry, not {audit.telemetry!r}"
        )
    return LearnerSpec(kind, chosen)


def read_metrics(sections: TomlTable) -> MetricSettings:
    """Reads the table [metrics] of a spec. Raises UserError."""
    table = section(sections, "metrics", keys(MetricSettings), {})
    for name in keys(MetricSettings):
        if name in table:
            _at_least(table, name, table.get(name, int), 1)
    return read(table, MetricSettings)


def read_monitor(sections: TomlTable, folder: Path) -> MonitorSpec | None:
    """Reads [monitor] of a spec in a folder; None if it has none. Raises UserError."""
    if "monitor" not in sections:
        return None
    table = section(sections, "monitor", ["file", "alpha"])
    spec = MonitorSpec(table.get("file", str), table.get("alpha", float, MonitorSpec.alpha), folder)
    if not spec.file or not spec.file.isprintable():
        raise UserError(f"{table.place}: file must be a path, not {given(spec.file)}")
    if not 0 < spec.alpha < 1:
        raise UserError(f"{table.place}: alpha must lie between 0 and 1, not {spec.alpha:g}")
    return spec


def read_run(sections: TomlTable) -> RunSpec:
    """Reads the table [run] of a spec. Raises UserError."""
    table = section(sections, "run", keys(RunSpec), {})
    spec = read(table, RunSpec)
    _at_least(table, "chunk", spec.chunk, 0)
    _at_least(table, "checkpoint_every", spec.checkpoint_every, 0)
    return spec


def _at_least(table: TomlTable, key: str, value: int, least: int) -> None:
    if not least <= value <= MOST_STEPS:
        raise UserError(f"{table.place}: {key} must be from {least} to {MOST_STEPS}, not {value}")
