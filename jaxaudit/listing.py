"""What `jaxaudit list` prints: the names a spec can use, as aligned tables."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence

from jaxaudit import metrics as metric_functions
from jaxaudit import registry
from jaxaudit.perturbations import Kind
from jaxaudit.specification.sections import learner_settings, task_names
from jaxaudit.specification.tables import to_value
from jaxaudit.text.documents import BUILT_IN

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
    """The tasks, one a line, the other packages' that a spec may name, and texts."""
    from jaxaudit.tasks import foreign  # slow, so not before it is needed

    families = [(f"{kind}:<name>", family.about) for kind, family in foreign.FAMILIES.items()]
    texts = [(name, _summary(read)) for name, read in BUILT_IN.items()]
    texts.append(("<path>", "a file or folder of .txt, or of tokens .bin (nanoGPT's or llm.c's)"))
    return task_names() + aligned(families) + ['kind "text":', *(f"  {line}" for line in aligned(texts))]


def learners() -> list[str]:
    """The learners, each followed by its settings and their defaults."""
    from jaxaudit import learners as _  # noqa: F401  registers this package's learners

    lines = []
    for name in registry.learners:
        lines.append(f"{name}  {_summary(registry.learners[name])}")
        fields = [f for f in dataclasses.fields(learner_settings(name)) if f.name != "telemetry"]
        lines += aligned([(f"  {f.name}", _default(f)) for f in fields])
    return lines


def perturbations() -> list[str]:
    """The perturbations, with their standard magnitudes and durations."""
    return _kinds(registry.perturbations)


def interventions() -> list[str]:
    """The interventions, with their standard magnitudes."""
    return _kinds(registry.interventions)


def _kinds(known: registry.Registry) -> list[str]:
    rows = [("name", "dimension", "site", "magnitude", "duration", "what it does")]
    for name in known:
        kind = known[name]
        if isinstance(kind, Kind):
            magnitudes = ", ".join(f"{m:g}" for m in kind().magnitudes)
            rows.append((name, kind.dimension, kind.site, magnitudes, str(kind.when.duration), _summary(kind)))
    return aligned(rows)


def metrics() -> list[str]:
    """The metrics, one a line."""
    known = {name: getattr(metric_functions, name) for name in TABLE_S5}
    known |= {name: registry.metrics[name] for name in registry.metrics}
    return aligned([(name, _summary(known[name])) for name in known])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with their columns set under each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _summary(entry: object) -> str:
    return (inspect.getdoc(entry) or "").partition("\n")[0]


def _default(setting: dataclasses.Field) -> str:
    if setting.default is not dataclasses.MISSING:
        return to_value(setting.default)
    if setting.default_factory is not dataclasses.MISSING:
        return to_value(setting.default_factory())
    return "(must be given)"
