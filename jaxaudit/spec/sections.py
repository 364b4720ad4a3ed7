"""The sections of a spec as dataclasses, each with the function that reads it from its TOML table."""

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
from jaxaudit.spec.tables import TomlTable, describe_value, field_names, read_dataclass, read_section

Onset = int | float
Onsets = int | float | tuple[int | float, ...]
Duration = int | Literal["once", "end"]

MAX_CONDITIONS = 100_000
"""The most conditions that all entries of a spec may expand to."""

MAX_STEPS = 10_000_000
MAX_SEEDS = 100_000

_SINGLE_KEYS = ("kind", "magnitude", "onset", "duration", "period", "target")
_CHAIN_KEYS = ("chain", "onset", "duration")
_DIMENSION_KEYS = ("dimension", "onset", "duration")


@dataclass(frozen=True)
class PerturbationEntry:
    """A perturbation or chain of a spec, at one onset.

    Attributes:
      perturbation: The perturbation with all its magnitudes.
      place: Where its table stands in the spec, for messages. Equality ignores it.
    """

    perturbation: Perturbation | Chain
    place: str = field(default="", compare=False)

    def candidates(self) -> list[PerturbationEntry]:
        """Returns this entry as the only candidate, like `DimensionEntry.candidates`."""
        return [self]

    def to_table(self) -> dict[str, Any]:
        """Returns the keys and values of a TOML table from which the entry can be read again."""
        if isinstance(self.perturbation, Chain):
            return {"chain": [_single_table(part) for part in self.perturbation.parts]}
        return _single_table(self.perturbation)


@dataclass(frozen=True)
class DimensionEntry:
    """All perturbation kinds of a dimension that the learner's sites allow, at one onset.

    Attributes:
      dimension: The name of the dimension.
      onset: The onset of all kinds; None is the default of each kind.
      duration: The duration of all kinds; None is the default of each kind.
      place: Where the table stands in the spec, for messages. Equality ignores it.
    """

    dimension: str
    onset: Onset | None = None
    duration: int | str | None = None
    place: str = field(default="", compare=False)

    def candidates(self) -> list[PerturbationEntry]:
        """Returns all registered kinds of the dimension at their standard magnitudes."""
        return [
            PerturbationEntry(kind(onset=self.onset, duration=self.duration), self.place)
            for _, kind in registry.perturbations.items()
            if isinstance(kind, Kind) and kind.dimension == self.dimension
        ]

    def to_table(self) -> dict[str, Any]:
        """Returns the keys and values of a TOML table from which the entry can be read again."""
        return {"dimension": self.dimension, "onset": self.onset, "duration": self.duration}


Entry = PerturbationEntry | DimensionEntry


def _single_table(part: Perturbation) -> dict[str, Any]:
    magnitude = part.magnitude.values if isinstance(part.magnitude, Sweep) else part.magnitude
    window = part.when
    values = (part.name, magnitude, window.onset, window.duration, window.period, part.target)
    return dict(zip(_SINGLE_KEYS, values, strict=True))


def read_entries(values: Any, place: str, steps: int) -> list[Entry]:
    """Reads one table [[perturbation]] of a run of `steps`, and checks what can be checked without the learner.

    Returns:
      One entry for each onset.

    Raises:
      UserError: The table is not a valid perturbation, chain or dimension.
    """
    table = TomlTable(values, place)
    forms: dict[str, tuple[tuple[str, ...], Callable[[TomlTable], list[Entry]]]] = {
        "kind": (_SINGLE_KEYS, _read_single),
        "chain": (_CHAIN_KEYS, _read_chain),
        "dimension": (_DIMENSION_KEYS, _read_dimension),
    }
    matches = [form for form in forms if form in table]
    if not matches:
        # One of the three keys may be misspelt, in which case the error about an unknown key suggests the right one.
        TomlTable(values, place, dict.fromkeys(_SINGLE_KEYS + _CHAIN_KEYS + _DIMENSION_KEYS))
    if len(matches) != 1:
        given = " and ".join(f"'{form}'" for form in matches) or "none of them"
        raise UserError(f"{place} must have exactly one of 'kind', 'chain' and 'dimension', not {given}")
    allowed, read = forms[matches[0]]
    with error_prefix(place):
        entries = read(TomlTable(values, place, allowed))
        _check_entries(entries, steps, table.raw("onset"))
    return entries


def read_remedy(values: Any, place: str) -> Remedy:
    """Reads one table [[remedy]]. Raises UserError if it is not valid."""
    table = TomlTable(values, place, ("kind", "strength"))
    name = table.get("kind", str)
    if name not in registry.remedies:
        if name in registry.perturbations or name in registry.interventions:
            raise UserError(f"{place}: kind '{name}' is a perturbation, which belongs in a table [[perturbation]]")
        raise UserError(f"{place}: {registry.unknown_name_message('remedy', name, list(registry.remedies))}")
    kind = registry.remedies[name]
    if not isinstance(kind, RemedyKind):
        raise UserError(f"{place}: kind '{name}' was not made by one of the decorators `remedy` and `setting`")
    strength = table.get("strength", float, None)
    with error_prefix(place):
        return kind(strength)


def _read_single(table: TomlTable) -> list[Entry]:
    onsets = _each_onset(_get_distinct(table, "onset", Onsets))
    return [PerturbationEntry(_perturbation(table, onset), table.place) for onset in onsets]


def _perturbation(table: TomlTable, onset: Onset | None, duration: int | str | None = None) -> Perturbation:
    """Returns the perturbation of a table at an onset; the duration is the default of a missing one."""
    with error_prefix(table.place):
        kind = _kind(table.get("kind", str))
    magnitude = _get_distinct(table, "magnitude", float | tuple[float, ...])
    if isinstance(magnitude, tuple):
        _check_condition_count(len(magnitude))
        magnitude = sweep(*magnitude)
    return kind(
        magnitude,
        onset=onset,
        duration=table.get("duration", Duration, duration),
        period=table.get("period", int, None),
        target=table.get("target", str, None),
    )


def _read_chain(table: TomlTable) -> list[Entry]:
    tables = table.raw("chain")
    if not isinstance(tables, list) or not tables:
        raise UserError(f"{table.place}: chain must be a list of tables, not {describe_value(tables)}")
    onsets = _get_distinct(table, "onset", Onsets)
    duration = table.get("duration", Duration, None)
    parts = [TomlTable(values, f"{table.place}, chain part {n}", _SINGLE_KEYS) for n, values in enumerate(tables, 1)]
    for key, value in (("duration", duration), ("onset", onsets)):
        if value is not None and all(key in part for part in parts):
            raise UserError(
                f"{table.place}: {key} has no effect, because every part of the chain has its own {key}; "
                "remove it here, or from a part"
            )

    def chain_at(onset: Onset | None) -> Chain:
        return chain(*(_perturbation(part, part.get("onset", Onset, onset), duration) for part in parts))

    return [PerturbationEntry(chain_at(onset), table.place) for onset in _each_onset(onsets)]


def _read_dimension(table: TomlTable) -> list[Entry]:
    dimension = table.get("dimension", str)
    if dimension not in DIMENSIONS:
        raise UserError(f"{table.place}: {registry.unknown_name_message('dimension', dimension, list(DIMENSIONS))}")
    duration = table.get("duration", Duration, None)
    onsets = _each_onset(_get_distinct(table, "onset", Onsets))
    return [DimensionEntry(dimension, onset, duration, table.place) for onset in onsets]


def _get_distinct(table: TomlTable, key: str, expected: Any) -> Any:
    """Returns the value of a key, or None; a list must have at least one number, and none twice."""
    value = table.get(key, expected, None)
    if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
        raise UserError(f"{table.place}: {key} must list at least one number, and each once, not {list(value)}")
    return value


def _each_onset(onsets: Onsets | None) -> tuple[Onset | None, ...]:
    return onsets if isinstance(onsets, tuple) else (onsets,)


def _check_entries(entries: list[Entry], steps: int, onsets: Any) -> None:
    """Raises ValueError if the entries of a table are too many, or do not fit into a run of `steps`."""
    _check_condition_count(sum(map(condition_count, entries)))
    parts_by_entry = [[part for c in entry.candidates() for part in c.perturbation.parts] for entry in entries]
    starts = [min(part.when.resolve(steps)[0] for part in parts) for parts in parts_by_entry]
    if len(set(starts)) < len(starts):
        raise ValueError(f"onset = {onsets} stands for the steps {starts}, which must all be different")
    for part in (part for parts in parts_by_entry for part in parts):
        if part.when.period is not None and part.when.period > steps:
            raise ValueError(f"period must be at most {steps}, the steps of the run, not {part.when.period}")


def _check_condition_count(count: int) -> None:
    if count > MAX_CONDITIONS:
        raise ValueError(f"a spec may have at most {MAX_CONDITIONS} conditions, not {count}")


def condition_count(entry: Entry) -> int:
    """Returns the number of conditions that an entry expands to, including all kinds of a dimension."""
    return sum(math.prod(len(part.magnitudes) for part in c.perturbation.parts) for c in entry.candidates())


def _kind(name: str) -> Kind:
    registries = (registry.perturbations, registry.interventions)
    found = next((kinds for kinds in registries if name in kinds), None)
    if found is None:
        if name in registry.remedies:
            raise ValueError(f"kind '{name}' is a remedy, which belongs in a table [[remedy]]")
        known = [known_name for kinds in registries for known_name in kinds]
        raise registry.UnknownName(registry.unknown_name_message("perturbation", name, known))
    kind = found[name]
    if not isinstance(kind, Kind):
        raise ValueError(f"kind '{name}' was not made by the decorator `perturbation`")
    return kind


@dataclass(frozen=True, kw_only=True)
class AuditSpec:
    """The section [audit]: the size of the audit, and how it is computed.

    Attributes:
      name: The title of the report.
      seeds: The number of seeds (0, 1, 2, ...), or a tuple of seeds.
      steps: The number of steps of a run.
      telemetry: The set of channels that the learner returns.
      execution: How a device runs its lanes: "vmap", "map" (one after the other), a batch size, or "auto" for the
        fastest, which is measured when the run begins.
      lanes: The most lanes in memory at a time, or "auto" for as many as fit.
      model_devices: The number of devices that the parameters of a lane are split among.
      matmul_precision: The precision of float32 matrix products on GPUs and TPUs: "float32", or "tf32" in networks.
    """

    name: str = "audit"
    seeds: int | tuple[int, ...]
    steps: int
    telemetry: Literal["basic", "full"] = "full"
    execution: int | Literal["auto", "vmap", "map"] = "vmap"
    lanes: int | Literal["auto"] = "auto"
    model_devices: int = 1
    matmul_precision: MatmulPrecision = "float32"

    @property
    def slug(self) -> str:
        """The audit's name as the name of a folder."""
        plain = unicodedata.normalize("NFKD", self.name).encode("ascii", "ignore").decode()
        return re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-.").lower() or "audit"


@dataclass(frozen=True)
class LearnerSpec:
    """The section [learner].

    Attributes:
      kind: The name of a registered learner.
      settings: An instance of the settings dataclass of the learner's factory.
    """

    kind: str
    settings: Any


@dataclass(frozen=True)
class RunSpec:
    """The section [run]: how a stored run advances and is checkpointed.

    Attributes:
      chunk: Steps that a compiled program advances at a time; 0 lets the runner choose.
      checkpoint_every: Chunks between two checkpoints; 0 spends about a twentieth of the time on checkpoints.
    """

    chunk: int = 0
    checkpoint_every: int = 0


@dataclass(frozen=True)
class MonitorSpec:
    """The section [monitor]: the monitor that scores every lane, and raises the alarms that interventions wait for.

    Attributes:
      file: The path of a file written by `Monitor.save`, absolute or relative to the spec's folder.
      alpha: The false-alarm rate per clean run.
      folder: The folder of the spec.
    """

    file: str
    alpha: float = 0.05
    folder: Path = field(default=Path(), compare=False)

    @property
    def path(self) -> Path:
        """The path of the monitor's file, which the spec gives relative to its folder."""
        return self.folder / self.file

    def load(self) -> Monitor:
        """Returns the monitor. Raises ValueError if its file cannot be read."""
        try:
            return Monitor.load(self.path)
        except FileNotFoundError:
            raise ValueError(f"there is no file {self.path}") from None
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror or error}") from None


def read_audit(sections: TomlTable) -> AuditSpec:
    """Reads the section [audit]. Raises UserError if it is not valid."""
    table = read_section(sections, "audit", field_names(AuditSpec))
    spec = read_dataclass(table, AuditSpec)
    if not (0 < len(spec.name) <= 100 and spec.name.isprintable() and spec.name.strip()):
        raise UserError(f"{table.place}: name must be 1 to 100 printable characters, not {describe_value(spec.name)}")
    _check_seeds(table, spec.seeds)
    for key in ("steps", "execution", "lanes", "model_devices"):
        if isinstance(value := getattr(spec, key), int):
            _check_range(table, key, value, 1)
    return spec


def _check_seeds(table: TomlTable, seeds: int | tuple[int, ...]) -> None:
    if isinstance(seeds, int):
        if not 1 <= seeds <= MAX_SEEDS:
            raise UserError(f"{table.place}: seeds must be from 1 to {MAX_SEEDS}, or a list, not {seeds}")
        return
    if len(seeds) > MAX_SEEDS:
        raise UserError(f"{table.place}: seeds must list at most {MAX_SEEDS} seeds, not {len(seeds)}")
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise UserError(
            f"{table.place}: seeds must list at least one seed, all different and none negative, "
            f"not {describe_value(list(seeds))}"
        )


def read_task(sections: TomlTable) -> Task | None:
    """Reads the section [task], or returns None if there is none. Raises UserError if it is not valid."""
    if "task" not in sections:
        return None
    table = read_section(sections, "task", None)
    kind = table.get("kind", str)
    if kind not in (known := registry.task_kinds):
        raise UserError(f"{table.place}: {registry.unknown_name_message('kind of task', kind, list(known))}")
    task_kind = known[kind]
    if not hasattr(task_kind, "named"):
        return read_dataclass(read_section(sections, "task", ["kind", *field_names(task_kind)]), task_kind)
    name = table.get("name", str)
    with error_prefix(table.place):
        settings = task_kind.named(name)
    table = read_section(sections, "task", ["kind", "name", *field_names(settings)])
    return task_kind(name, read_dataclass(table, settings))


def task_table(task: Task | None) -> dict[str, Any] | None:
    """Returns the keys and values of [task] with every default, from which `read_task` reads the same task."""
    if task is None:
        return None
    settings: Any = task
    table = {"kind": task.kind}
    if hasattr(task, "named"):
        settings = settings.settings
        table["name"] = task.name
    return table | {key: getattr(settings, key) for key in field_names(type(settings))}


@dataclass(frozen=True)
class NoSettings:
    """The settings of a learner whose factory has no settings dataclass."""


def takes_task(kind: str) -> bool:
    """Whether the factory of a registered learner has a positional argument, which is the task."""
    parameters = inspect.signature(registry.learners[kind]).parameters.values()
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


def learner_settings(kind: str) -> type:
    """Returns the settings dataclass of a registered learner, or `NoSettings` if its factory has none.

    Raises ValueError if no learner of this name is registered.
    """
    return getattr(registry.learners[kind], "settings", NoSettings)


def read_learner(sections: TomlTable, audit: AuditSpec) -> LearnerSpec:
    """Reads the section [learner], with the telemetry that [audit] asks for. Raises UserError if it is not valid."""
    table = read_section(sections, "learner", None)
    kind = table.get("kind", str)
    with error_prefix(table.place):
        settings = learner_settings(kind)
    if takes_task(kind) and "task" not in sections:
        raise UserError(f"{sections.place}: the table [task] is missing, which learner '{kind}' needs")
    if not takes_task(kind) and "task" in sections:
        raise UserError(f"{sections.place}: the table [task] must be left out, because learner '{kind}' takes no task")
    names = field_names(settings)
    fixed = {"telemetry": audit.telemetry} if "telemetry" in names else {}
    if not fixed and audit.telemetry != AuditSpec.telemetry:
        raise UserError(
            f"{sections.place}: [audit]: telemetry must be '{AuditSpec.telemetry}' for learner '{kind}', "
            f"not '{audit.telemetry}'"
        )
    table = read_section(sections, "learner", ["kind", *(name for name in names if name != "telemetry")])
    return LearnerSpec(kind, read_dataclass(table, settings, **fixed))


def read_metrics(sections: TomlTable) -> MetricSettings:
    """Reads the section [metrics]. Raises UserError if it is not valid."""
    names = field_names(MetricSettings)
    table = read_section(sections, "metrics", names, {})
    for name in names:
        if name in table:
            _check_range(table, name, table.get(name, int), 1)
    return read_dataclass(table, MetricSettings)


def read_monitor(sections: TomlTable, folder: Path) -> MonitorSpec | None:
    """Reads the section [monitor] of a spec in `folder`, or returns None if there is none.

    Raises:
      UserError: The section is not valid.
    """
    if "monitor" not in sections:
        return None
    table = read_section(sections, "monitor", ["file", "alpha"])
    spec = read_dataclass(table, MonitorSpec, folder=folder)
    if not spec.file or not spec.file.isprintable():
        raise UserError(f"{table.place}: file must be the path of a monitor, not {describe_value(spec.file)}")
    if not 0 < spec.alpha < 1:
        raise UserError(f"{table.place}: alpha must lie between 0 and 1, not {spec.alpha:g}")
    return spec


def read_run(sections: TomlTable) -> RunSpec:
    """Reads the section [run]. Raises UserError if it is not valid."""
    table = read_section(sections, "run", field_names(RunSpec), {})
    spec = read_dataclass(table, RunSpec)
    _check_range(table, "chunk", spec.chunk, 0)
    _check_range(table, "checkpoint_every", spec.checkpoint_every, 0)
    return spec


def _check_range(table: TomlTable, key: str, value: int, lowest: int) -> None:
    if not lowest <= value <= MAX_STEPS:
        raise UserError(f"{table.place}: {key} must be from {lowest} to {MAX_STEPS}, not {value}")
