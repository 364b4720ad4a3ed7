"""Tables of a spec whose keys are the fields of a dataclass: [task], [learner], [metrics] and [run]."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxaudit.runtime.errors import UserError, placed
from jaxaudit.spec.tables import TomlTable


def section(sections: TomlTable, name: str, keys: Collection[str] | None, default: Any = None) -> TomlTable:
    """A table of a spec, which has no other keys than these (None: any). Raises UserError if it is missing."""
    values = sections.raw(name) if name in sections else default
    if values is None:
        raise UserError(f"{sections.place}: the table [{name}] is missing")
    return TomlTable(values, f"{sections.place}: [{name}]", keys)


def keys(of: type) -> list[str]:
    """The names of the fields that make an instance of a dataclass."""
    return [f.name for f in dataclasses.fields(of) if f.init]


def read(table: TomlTable, of: type, **set_apart: Any) -> Any:
    """An instance of a dataclass, from the values that a table gives for its fields.

    A value has its field's type. Where the field's metadata has a true "path", it is made absolute if something is
    there, for a run may be gone on with from another folder; not if it is one of the metadata's "words".

    Args:
      table: has the values; other keys than the fields' are not looked at.
      of: the dataclass.
      **set_apart: values of fields that the table does not give.

    Raises:
      UserError: for a value of another type, a missing one, or one that the dataclass refuses.
    """
    types = typing.get_type_hints(of)
    values = dict(set_apart)
    for f in dataclasses.fields(of):
        if f.init and f.name not in set_apart and (f.name in table or _required(f)):
            value = table.get(f.name, types[f.name])
            values[f.name] = _absolute(value, f.metadata.get("words", ())) if f.metadata.get("path") else value
    with placed(table.place):
        return of(**values)


def _absolute(path: str, words: Collection[str]) -> str:
    if not path or path in words or not Path(path).exists():
        return path
    return str(Path(path).absolute())


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
