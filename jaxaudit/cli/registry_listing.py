"""What `jaxaudit list` prints: the names a spec can use, as aligned tables."""

from __future__ import annotations

import dataclasses

from jaxaudit.analysis import metrics as metric_functions
from jaxaudit.perturbations import Kind
from jaxaudit.runtime import registry
from jaxaudit.runtime.registry import align_columns, first_docstring_line
from jaxaudit.spec.sections import learner_settings
from jaxaudit.spec.tables import to_toml_value

TABLE_S5 = (
    "collapse_time",
    "instability_index",
    "divergence_probability",
    "recovery_rate",
    "recovery_time",
    "spike_intensity",
    "meta_state_deviation",
)


def tasks() -> list[str]:
    """The kinds of task, each followed by the names that a spec may give with it."""
    lines = []
    for name in registry.task_kinds:
        kind = registry.task_kinds[name]
        lines += [f"{name}  {first_docstring_line(kind)}", *(f"  {line}" for line in align_columns(kind.listing()))]
    return lines


def learners() -> list[str]:
    """The learners, each followed by its settings and their defaults."""
    lines = []
    for name in registry.learners:
        lines.append(f"{name}  {first_docstring_line(registry.learners[name])}")
        fields = [f for f in dataclasses.fields(learner_settings(name)) if f.name != "telemetry"]
        lines += align_columns([(f"  {f.name}", _default(f)) for f in fields])
    return lines


def remedies() -> list[str]:
    """The remedies, each with where it acts, its standard strength and the one that changes nothing."""
    rows = [("name", "acts on", "strength", "neutral", "what it does")]
    for name in registry.remedies:
        kind = registry.remedies[name]
        neutral = "" if kind.neutral is None else f"{kind.neutral:g}"
        rows.append((name, kind.site or "settings", f"{kind.strength:g}", neutral, first_docstring_line(kind)))
    return align_columns(rows)


def perturbations() -> list[str]:
    """The perturbations, with their standard magnitudes and durations."""
    return _kinds(registry.perturbations)


def interventions() -> list[str]:
    return _kinds(registry.interventions)


def _kinds(known: registry.Registry) -> list[str]:
    rows = [("name", "dimension", "site", "magnitude", "duration", "what it does")]
    for name in known:
        kind = known[name]
        if isinstance(kind, Kind):
            magnitudes = ", ".join(f"{m:g}" for m in kind().magnitudes)
            rows.append(
                (name, kind.dimension, kind.site, magnitudes, str(kind.when.duration), first_docstring_line(kind))
            )
    return align_columns(rows)


def metrics() -> list[str]:
    known = {name: getattr(metric_functions, name) for name in TABLE_S5}
    known |= {name: registry.metrics[name] for name in registry.metrics}
    return align_columns([(name, first_docstring_line(known[name])) for name in known])


def _default(setting: dataclasses.Field) -> str:
    if setting.default is not dataclasses.MISSING:
        return to_toml_value(setting.default)
    if setting.default_factory is not dataclasses.MISSING:
        return to_toml_value(setting.default_factory())
    return "(must be given)"
