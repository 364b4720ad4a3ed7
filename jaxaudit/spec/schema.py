"""A JSON schema of specs, and the keys of their sections with types, defaults and meanings.

Both are read from the dataclasses, their docstrings and the registries, so that they include what plug-ins register.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.perturbations import DIMENSIONS, Kind, Perturbation, Window
from jaxaudit.remedies import RemedyKind
from jaxaudit.runtime import registry
from jaxaudit.runtime.registry import first_docstring_line
from jaxaudit.spec.sections import (
    MAX_SEEDS,
    MAX_STEPS,
    AuditSpec,
    DimensionEntry,
    MonitorSpec,
    RunSpec,
    learner_settings,
    takes_task,
)
from jaxaudit.spec.tables import MAX_INTEGER, describe_type, field_names, to_toml_value

DRAFT = "https://json-schema.org/draft/2020-12/schema"

Schema = dict[str, Any]

REQUIRED = object()
"""The default of a key that must be given."""

_ELSEWHERE = re.compile(r"see `(?:\w+\.)*(\w+)`")
"""The meaning of fields that another class documents."""

_FOR_READERS = ("description", "default", "examples", "x-taplo")
"""The parts of a schema that require nothing."""

_STEPS = {"minimum": 1, "maximum": MAX_STEPS}
_COUNT = {"minimum": 0, "maximum": MAX_STEPS}
_SEEDS = {"minimum": 1, "maximum": MAX_SEEDS}


@dataclass(frozen=True)
class Key:
    """A key of a section.

    Attributes:
      name: The key.
      expected: The type of its value, as `TomlTable.get` takes it.
      meaning: What it says, in one or more sentences.
      default: The value of a missing key; None for a key that may be missing without a value, `REQUIRED` for a key
        that must be given.
    """

    name: str
    expected: Any
    meaning: str
    default: Any = REQUIRED

    @property
    def type_text(self) -> str:
        """The type as error messages state it, such as "a whole number"."""
        return describe_type(self.expected)

    @property
    def default_text(self) -> str:
        """The default as TOML writes it, "required" or "none"."""
        if self.default is REQUIRED:
            return "required"
        return "none" if self.default is None else to_toml_value(self.default)

    def schema(self, **limits: Any) -> Schema:
        """Returns the schema of the value; limits apply to whole numbers."""
        schema = type_schema(self.expected, **limits) | {"description": self.meaning}
        if self.default in (REQUIRED, None) or self.default in (math.inf, -math.inf):
            return schema
        return schema | {"default": list(self.default) if isinstance(self.default, tuple) else self.default}


def documented_names(text: str, heading: str = "Attributes") -> dict[str, str]:
    """Returns the descriptions of names in a section of a docstring, such as "Attributes" or "Args".

    Names that share a description are separated by commas, and each of them has it.
    """
    section = re.search(rf"^{heading}:\n((?:[ ]+\S.*\n|\n)*)", inspect.cleandoc(text) + "\n", re.MULTILINE)
    if section is None:
        return {}
    lines = [line for line in section[1].splitlines() if line.strip()]
    indent = len(lines[0]) - len(lines[0].lstrip())
    entries: list[str] = []
    for line in lines:
        begins = len(line) - len(line.lstrip()) == indent and not (entries and ": " not in entries[-1])
        if begins:
            entries.append(line.strip())
        else:
            entries[-1] += f" {line.strip()}"
    descriptions: dict[str, str] = {}
    for entry in entries:
        names, _, description = entry.partition(": ")
        descriptions |= dict.fromkeys(re.split(r",\s*", names), description)
    return descriptions


def meanings(dataclass: type) -> dict[str, str]:
    """Returns the meanings of a dataclass' fields, from its docstring and those of the classes it is derived from."""
    texts: dict[str, str] = {}
    for parent in reversed(dataclass.__mro__):
        for name, text in documented_names(parent.__doc__ or "").items():
            if reference := _ELSEWHERE.match(text):
                other = getattr(sys.modules[parent.__module__], reference[1], None)
                text = documented_names(getattr(other, "__doc__", "") or "").get(name, text)
            texts[name] = f"{text[:1].upper()}{text[1:]}"
    return texts


def keys_of(dataclass: type, leave_out: Iterable[str] = ()) -> list[Key]:
    """Returns the keys of a table that is read as a dataclass."""
    annotations, texts = typing.get_type_hints(dataclass), meanings(dataclass)
    fields = {field.name: field for field in dataclasses.fields(dataclass)}
    return [
        Key(name, annotations[name], texts.get(name, ""), default_of(fields[name]))
        for name in field_names(dataclass)
        if name not in leave_out
    ]


def default_of(field: dataclasses.Field) -> Any:
    """Returns the default of a dataclass' field, or `REQUIRED`."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return REQUIRED if field.default is dataclasses.MISSING else field.default


def type_schema(expected: Any, **limits: Any) -> Schema:
    """Returns the schema of a type that `TomlTable.get` takes; limits apply to whole numbers in it."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        # A whole number is also accepted as a float.
        options = [a for a in arguments if a is not type(None) and not (a is int and float in arguments)]
        schemas = [type_schema(option, **limits) for option in options]
        return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if origin is Literal:
        return {"enum": list(arguments)}
    if expected is tuple or origin is tuple:
        if arguments and arguments[-1] is not Ellipsis:
            return {"type": "array", "prefixItems": [type_schema(item) for item in arguments], "items": False}
        return {"type": "array", "items": type_schema(arguments[0])} if arguments else {"type": "array"}
    if expected is int:
        return {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER} | limits
    known = {float: "number", bool: "boolean", str: "string"}
    return {"type": known[expected]} if expected in known else {}


def table_schema(keys: Sequence[Key], limits: Mapping[str, Mapping[str, Any]] | None = None, **fixed: Any) -> Schema:
    """Returns the schema of a table with these keys and no others.

    Args:
      keys: The keys.
      limits: Limits of the whole numbers of some keys, by name.
      **fixed: Schemas of further keys, which are required, by name.
    """
    limits = limits or {}
    return {
        "type": "object",
        "properties": {**fixed, **{key.name: key.schema(**limits.get(key.name, {})) for key in keys}},
        "required": [*fixed, *(key.name for key in keys if key.default is REQUIRED)],
        "additionalProperties": False,
    }


def discriminated_union(key: str, tables: Mapping[str, Schema], notes: Mapping[str, str], title: str) -> Schema:
    """Returns the schema of a table whose other keys depend on the value of one key.

    Args:
      key: The key whose value selects the table.
      tables: For each of its values, the schema of the table.
      notes: For each of its values, a short description.
      title: The description of the key.
    """
    known: dict[str, list[Schema]] = {}
    for table in tables.values():
        for name, schema in table["properties"].items():
            known.setdefault(name, []).append(schema)
    known.pop(key, None)
    # Editors complete and explain the keys that stand in "properties"; the rules in "then" say which are allowed.
    merged = {name: _merged(schemas) for name, schemas in known.items()}
    rules = [{"if": {"properties": {key: {"const": value}}}, "then": _bare(table)} for value, table in tables.items()]
    return {
        "type": "object",
        "properties": {key: names_schema({value: notes[value] for value in tables}, title), **merged},
        "required": [key],
        "if": {"required": [key]},
        "then": {"allOf": rules},
    }


def _merged(schemas: Sequence[Schema]) -> Schema:
    """Returns the schema of a value that fits one of several schemas; a default is left out unless all have it."""
    if all(schema == schemas[0] for schema in schemas):
        return schemas[0]
    without_default: list[Schema] = []
    for schema in schemas:
        plain = {name: value for name, value in schema.items() if name != "default"}
        if plain not in without_default:
            without_default.append(plain)
    if len(without_default) == 1:
        return without_default[0]
    return {"anyOf": without_default, "description": without_default[0].get("description", "")}


def _bare(schema: Any) -> Any:
    """Returns a schema with what it requires, and without what it says to readers."""
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    bare = {name: _bare(value) for name, value in schema.items() if name not in _FOR_READERS}
    if "properties" in schema:  # whose names are keys of a spec
        bare["properties"] = {name: _bare(value) for name, value in schema["properties"].items()}
    return bare


def names_schema(notes: Mapping[str, str], title: str) -> Schema:
    """Returns the schema of one of some names, which editors show with their descriptions."""
    documented = {"docs": {"enumValues": list(notes.values())}}
    return {"enum": list(notes), "description": title, "x-taplo": documented}


def spec_schema(**sections: Schema) -> Schema:
    """Returns the JSON schema (draft 2020-12) of specs, with all names that are registered.

    A spec that does not fit the schema is refused by `jaxaudit run`. The reverse does not hold: the schema knows no
    rules between keys, such as an onset within the run, and no limits of learners' settings.

    Args:
      **sections: Schemas of further sections, by name.
    """
    with_task = [kind for kind in registry.learners if takes_task(kind)]
    trains_on_task = {"properties": {"learner": {"properties": {"kind": {"enum": with_task}}, "required": ["kind"]}}}
    return {
        "$schema": DRAFT,
        "title": "jaxaudit spec",
        "description": "What an audit trains, how it is disturbed, and how it is measured.",
        "type": "object",
        "properties": {
            "audit": _audit(),
            "task": _task(),
            "learner": learner_schema(),
            "remedy": remedies_schema(),
            "metrics": table_schema(keys_of(MetricSettings), dict.fromkeys(field_names(MetricSettings), _STEPS))
            | {"description": "The windows of the metrics, in steps."},
            "run": table_schema(keys_of(RunSpec), {"chunk": _COUNT, "checkpoint_every": _COUNT})
            | {"description": "How a stored run advances and is checkpointed."},
            "monitor": _monitor(),
            "perturbation": {
                "type": "array",
                "items": perturbation_schema(),
                "description": "What disturbs the learner: a perturbation, a chain or a dimension.",
            },
            **sections,
        },
        "required": ["audit", "learner"],
        "additionalProperties": False,
        "if": trains_on_task,
        "then": {"required": ["task"]},
        "else": {"properties": {"task": False}},
    }


def _audit() -> Schema:
    limits = dict.fromkeys(("steps", "execution", "lanes", "model_devices"), _STEPS)
    schema = table_schema(keys_of(AuditSpec), limits | {"seeds": _SEEDS})
    properties = schema["properties"]
    properties["name"] |= {"minLength": 1, "maxLength": 100}
    properties["seeds"]["anyOf"][1] = {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER},
        "minItems": 1,
        "maxItems": MAX_SEEDS,
        "uniqueItems": True,
    }
    return schema | {"description": "The size of the audit, and how it is computed."}


def monitor_keys() -> list[Key]:
    """Returns the keys that a spec may have in [monitor]: the fields of `MonitorSpec`, except for `folder`."""
    return keys_of(MonitorSpec, leave_out=["folder"])


def _monitor() -> Schema:
    schema = table_schema(monitor_keys())
    schema["properties"]["file"] |= {"minLength": 1}
    schema["properties"]["alpha"] |= {"exclusiveMinimum": 0, "exclusiveMaximum": 1}
    return schema | {"description": "The monitor that scores every lane, and raises alarms."}


def task_settings(kind: str) -> dict[str, list[Key]]:
    """Returns the keys of [task] beside `kind` and a `name` that decides them, by this name ("" where none does)."""
    task = registry.task_kinds[kind]
    if not hasattr(task, "named"):
        return {"": keys_of(task)}
    settings = {}
    for name, _ in task.listing():
        with contextlib.suppress(ValueError):  # a plug-in's entry that no spec can name
            settings[name] = keys_of(task.named(name))
    return settings


def _task() -> Schema:
    tables: dict[str, Schema] = {}
    for kind in registry.task_kinds:
        settings = task_settings(kind)
        fixed: Any = {"kind": {"const": kind}}
        if "" in settings:
            tables[kind] = table_schema(settings[""], **fixed)
            known = [name for name, _ in registry.task_kinds[kind].listing() if "<" not in name]
            if known and "name" in tables[kind]["properties"]:
                tables[kind]["properties"]["name"] |= {"examples": known}
        else:
            by_name = {name: table_schema(keys, **fixed, name={"const": name}) for name, keys in settings.items()}
            tables[kind] = discriminated_union(
                "name", by_name, dict(registry.task_kinds[kind].listing()), "The task's name."
            )
    notes = {kind: first_docstring_line(registry.task_kinds[kind]) for kind in tables}
    return discriminated_union("kind", tables, notes, "The kind of task.") | {
        "description": "What the learner trains on."
    }


def learner_keys(kind: str) -> list[Key]:
    """Returns the keys of [learner] beside `kind`, for a kind of learner."""
    return keys_of(learner_settings(kind), leave_out=["telemetry"])


def learner_schema() -> Schema:
    """Returns the schema of the section [learner], whose keys depend on its `kind`."""
    tables = {kind: table_schema(learner_keys(kind), kind={"const": kind}) for kind in registry.learners}
    notes = {kind: first_docstring_line(registry.learners[kind]) for kind in tables}
    return discriminated_union("kind", tables, notes, "The learning algorithm.") | {
        "description": "The learner's settings."
    }


def remedies_schema() -> Schema:
    """Returns the schema of the tables [[remedy]]."""
    kinds = {name: kind for name, kind in registry.remedies.items() if isinstance(kind, RemedyKind)}
    meaning = "The remedy's strength; without it, the standard one."
    tables = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name}, "strength": _number(kind) | {"description": meaning}},
            "additionalProperties": False,
        }
        for name, kind in kinds.items()
    }
    notes = {name: first_docstring_line(kind) for name, kind in kinds.items()}
    return {
        "type": "array",
        "items": discriminated_union("kind", tables, notes, "The remedy."),
        "description": "Changes to how the learner trains that are meant to make it more stable.",
    }


def _number(kind: Kind | RemedyKind) -> Schema:
    low, high = kind.limits
    limits = {"minimum": low} if math.isfinite(low) else {}
    limits |= {"maximum": high} if math.isfinite(high) else {}
    return {"type": "integer" if kind.whole else "number", **limits}


def perturbation_kinds() -> dict[str, Kind]:
    """Returns the kinds of perturbations and interventions that a spec can name."""
    kinds = dict(registry.perturbations.items())
    kinds |= {name: kind for name, kind in registry.interventions.items() if name not in kinds}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, Kind)}


def perturbation_keys() -> list[Key]:
    """Returns the keys of a table [[perturbation]] with a `kind`."""
    texts = meanings(Perturbation) | meanings(Window)
    number, onset = float | tuple[float, ...], int | float | tuple[int | float, ...]
    standard = "Without it, the kind's standard"
    return [
        Key("kind", str, "The name of the perturbation or intervention."),
        Key("magnitude", number, f"How strong it is; a list makes a condition of each number. {standard}.", None),
        Key("onset", onset, f"{texts['onset']} A list makes a condition of each. {standard}.", None),
        Key("duration", int | Literal["once", "end"], f"{texts['duration']} {standard}.", None),
        Key("period", int, texts["period"].replace("; None for a single opening", "; without it, it opens once"), None),
        Key("target", str, texts["target"].replace("; None for the whole tree", f". {standard}"), None),
    ]


def perturbation_schema() -> Schema:
    """Returns the schema of a table [[perturbation]]: a perturbation, a chain or a dimension."""
    single, part = _single_schema(several=True), _single_schema(several=False)
    window = {name: single["properties"][name] for name in ("onset", "duration")}
    chain = {
        "type": "array",
        "items": part,
        "minItems": 1,
        "description": "Perturbations that act together, in this order.",
    }
    dimension = {"enum": list(DIMENSIONS), "description": meanings(DimensionEntry)["dimension"]}
    return {
        "type": "object",
        "properties": {**single["properties"], "chain": chain, "dimension": dimension},
        "if": {"required": ["chain"]},
        "then": {"propertyNames": {"enum": ["chain", *window]}},
        "else": {
            "if": {"required": ["dimension"]},
            "then": {"propertyNames": {"enum": ["dimension", *window]}},
            "else": _bare(single),
        },
    }


def _single_schema(several: bool) -> Schema:
    """Returns the schema of one perturbation, at several onsets or at one."""
    kinds = perturbation_kinds()
    meaning = {key.name: {"description": key.meaning} for key in perturbation_keys()}
    onset = {"anyOf": [{"type": "number", "minimum": 0, "exclusiveMaximum": 1}, {"type": "integer", "minimum": 0}]}
    steps = {"type": "integer", "minimum": 1, "maximum": MAX_INTEGER}
    notes = {name: first_docstring_line(kind) for name, kind in kinds.items()}
    by_limits: dict[str, list[str]] = {}
    schemas = {name: _number(kind) for name, kind in kinds.items()}
    for name, schema in schemas.items():
        by_limits.setdefault(repr(schema), []).append(name)
    rules = [
        {
            "if": {"properties": {"kind": {"enum": names}}},
            "then": {"properties": {"magnitude": _one_or_more(schemas[names[0]])}},
        }
        for names in by_limits.values()
        if schemas[names[0]] != {"type": "number"}
    ]
    return {
        "type": "object",
        "properties": {
            "kind": names_schema(notes, meaning["kind"]["description"]),
            "magnitude": _one_or_more({"type": "number"}) | meaning["magnitude"],
            "onset": (_one_or_more(onset) if several else onset) | meaning["onset"],
            "duration": {"anyOf": [steps, {"enum": ["once", "end"]}]} | meaning["duration"],
            "period": steps | meaning["period"],
            "target": {"type": "string"} | meaning["target"],
        },
        "required": ["kind"],
        "additionalProperties": False,
        "if": {"required": ["kind"]},
        "then": {"allOf": rules},
    }


def _one_or_more(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1, "uniqueItems": True}]}
