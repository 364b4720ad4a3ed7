"""TOML tables read with types, and written back: a spec's syntax, nothing of its meaning."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import tomli_w

from jaxaudit.runtime.errors import UserError, error_prefix
from jaxaudit.runtime.registry import unknown_name_message

LARGEST = 2**32 - 1
"""The largest whole number a spec may hold: seeds are uint32."""

_REQUIRED = object()
_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
}
_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a string": "strings"}
_GIVEN = {bool: "", int: "the number ", float: "the number "}


class TomlTable:
    """One table of a spec, and the words for where it stands.

    Raises UserError if it is no table, or for keys that are not `allowed` (None: all are).
    """

    def __init__(self, values: Any, place: str, allowed: Iterable[str] | None = None):
        if not isinstance(values, dict):
            raise UserError(f"{place} must be a table, not {given(values)}")
        self.place = place
        self._values = values
        keys = list(values if allowed is None else allowed)
        for key in values:
            if key not in keys:
                raise UserError(f"{place}: {unknown_name_message('key', key, keys)}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, wanted: Any, default: Any = _REQUIRED) -> Any:
        """The key's value as the type `wanted`, or `default`. Raises UserError if it is neither."""
        if key in self._values:
            return convert(self._values[key], wanted, f"{self.place}: {key}")
        if default is _REQUIRED:
            raise UserError(f"{self.place}: '{key}' is missing; it must be {words(wanted)}")
        return default

    def raw(self, key: str) -> Any:
        """The key's value as TOML gave it, or None."""
        return self._values.get(key)


def convert(value: Any, wanted: Any, place: str) -> Any:
    """A TOML value as the type `wanted`; `place` begins the sentence of the UserError otherwise.

    `wanted` is built of int, float, bool, str, tuples, unions and literals. A whole number is accepted for a
    float, a bool never for a number, and NaN never.
    """
    try:
        return _cast(value, wanted)
    except TypeError:
        raise UserError(f"{place} must be {words(wanted)}, not {given(value)}") from None
    except (ValueError, OverflowError) as error:
        raise UserError(f"{place} {error}") from None


def _cast(value: Any, wanted: Any) -> Any:
    origin = typing.get_origin(wanted)
    if origin in (typing.Union, types.UnionType):
        return _cast_union(value, typing.get_args(wanted))
    if origin is Literal:
        if not isinstance(value, str) or value not in typing.get_args(wanted):
            raise TypeError
        return value
    if wanted is tuple or origin is tuple:
        return _cast_tuple(value, typing.get_args(wanted))
    if wanted in (int, float) and type(value) in (int, float):
        return _cast_number(value, wanted)
    if wanted in (bool, str) and type(value) is wanted:
        return value
    raise TypeError


def _cast_union(value: Any, options: tuple[Any, ...]) -> Any:
    exact = [option for option in options if type(value) is option]
    for option in exact or options:
        try:
            return _cast(value, option)
        except TypeError:
            continue
    raise TypeError


def _cast_tuple(value: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError
    if not parts:
        return tuple(_cast(item, bool | int | float | str) for item in value)
    if len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_cast(item, parts[0]) for item in value)
    if len(parts) != len(value):
        raise ValueError(f"must have {len(parts)} entries, not {len(value)}")
    return tuple(_cast(item, part) for item, part in zip(value, parts, strict=True))


def _cast_number(value: int | float, wanted: type) -> int | float:
    if value != value:
        raise ValueError("must be a number, not nan")
    if wanted is float:
        try:
            return float(value)
        except OverflowError:
            raise ValueError("is too large for a number") from None
    if isinstance(value, float):
        raise TypeError
    if abs(value) > LARGEST:
        raise ValueError(f"must be a whole number of at most {LARGEST}, not {_short(to_value(value))}")
    return value


def words(wanted: Any) -> str:
    """A type in words, e.g. "a number or a list of numbers"."""
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (typing.Union, types.UnionType):
        told = [part for part in parts if part is not type(None) and not (part is int and float in parts)]
        return " or ".join(words(part) for part in told)
    if origin is Literal:
        return " or ".join(f'"{part}"' for part in parts)
    if origin is tuple:
        kinds = dict.fromkeys(words(part) for part in parts if part is not Ellipsis)
        return "a list of " + " or ".join(_PLURALS.get(kind, kind) for kind in kinds)
    return _WORDS.get(wanted, str(wanted))


def given(value: Any) -> str:
    """A value the user wrote, in words and short."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"the list {_short(to_value(value))}"
    if isinstance(value, str):
        return f"the string {_short(repr(value))}"
    if type(value) in _GIVEN:
        return _GIVEN[type(value)] + _short(to_value(value))
    return f"the date or time {value}"


def _short(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def to_value(value: Any) -> str:
    """A value as TOML writes it, in one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) and value.bit_length() > 1000:
        return hex(value)  # Python refuses to write very long decimals
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {to_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_value, value))}]"
    return str(value)


def to_text(document: Mapping[str, Any]) -> str:
    """TOML text; None is left out, and every table of a list has its own header, [[name]], however short it is."""
    return "\n".join(part for part in _parts(_known(document), "") if part)


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _known(v) for k, v in value.items() if v is not None}
    return [_known(item) for item in value] if isinstance(value, list | tuple) else value


def _parts(values: dict[str, Any], place: str) -> Iterator[str]:
    """A table without its header, then the tables and the lists of tables in it."""
    lists = {k: v for k, v in values.items() if isinstance(v, list) and v and all(isinstance(one, dict) for one in v)}
    inner = {k: v for k, v in values.items() if isinstance(v, dict)} if place else {}
    yield tomli_w.dumps({k: v for k, v in values.items() if k not in lists and k not in inner})
    for key, one in inner.items():
        yield f"[{place}{key}]\n{tomli_w.dumps(one)}"
    for key, tables in lists.items():
        for table in tables:
            first, *rest = _parts(table, f"{place}{key}.")
            yield f"[[{place}{key}]]\n{first}"
            yield from rest


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
    with error_prefix(table.place):
        return of(**values)


def _absolute(path: str, words: Collection[str]) -> str:
    if not path or path in words or not Path(path).exists():
        return path
    return str(Path(path).absolute())


def _required(f: dataclasses.Field) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
