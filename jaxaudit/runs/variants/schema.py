"""The JSON schema of specs of runs and of comparisons, which `jaxaudit schema` prints."""

from __future__ import annotations

import inspect
import typing
from typing import Any

from jaxaudit.runs.variants.compare import compare
from jaxaudit.runs.variants.folder import MOST_FRESH
from jaxaudit.spec.schema import Key, documented_names, learner_schema, remedies_schema, spec_schema, table_schema


def compare_keys() -> list[Key]:
    """Returns the keys of [compare], which are arguments of `jaxaudit.compare`."""
    annotations, parameters = typing.get_type_hints(compare), inspect.signature(compare).parameters
    texts = documented_names(compare.__doc__ or "", "Args")
    return [
        Key(name, annotations[name], f"{texts[name][0].upper()}{texts[name][1:]}", parameters[name].default)
        for name in ("centre", "fresh")
    ]


def schema() -> dict[str, Any]:
    """Returns `spec_schema` with the sections of `jaxaudit compare` as well."""
    settings = learner_schema()["properties"]
    variant = {
        "type": "object",
        "properties": {
            "name": {
                "type": "string",
                "minLength": 1,
                "maxLength": 100,
                "description": "The variant's name in tables.",
            },
            "learner": {
                "type": "object",
                "properties": settings,
                "additionalProperties": False,
                "description": "Settings that differ from [learner].",
            },
            "remedy": remedies_schema(),
        },
        "required": ["name"],
        "anyOf": [{"required": ["learner"]}, {"required": ["remedy"]}],
        "additionalProperties": False,
    }
    return spec_schema(
        compare=table_schema(compare_keys(), {"fresh": {"minimum": 0, "maximum": MOST_FRESH}})
        | {"description": "How variants are compared; for `jaxaudit compare`."},
        variant={
            "type": "array",
            "items": variant,
            "description": "Other settings of the learner, or remedies; for `jaxaudit compare`.",
        },
    )
