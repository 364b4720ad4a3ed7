"""Reads TOML tables with typed values, and writes them back: the syntax of a spec, independent of its meaning."""

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

MAX_INTEGER = 2**32 - 1
"""The largest magnitude of a whole number in a spec; seeds are uint32."""

_REQUIRED = object()
_TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    tuple: "a list",
}
_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a string": "strings"}


class TomlTable:
    """One table of a spec.

    Attributes:
      place: Where the table stands in the spec, at the beginning of every error message.

    Raises:
      UserError: `values` is not a table, or has a key that is not `allowed`; None allows all keys.
    """

    def __init__(self, values: Any, place: str, allowed: Iterable[str] | None = None):
        if not isinstance(values, dict):
            raise UserError(f"{place} must be a table, not {describe_value(values)}")
        self.place = place
        self._values = values
        allowed = list(values if allowed is None else allowed)
        for key in values:
            if key not in allowed:
                raise UserError(f"{place}: {unknown_name_message('key', key, allowed)}")

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, expected: Any, default: Any = _REQUIRED) -> Any:
        """Returns the value of a key as the expected type, or the default if the key is missing.

        Args:
          key: The key.
          expected: A type built of int, float, bool, str, tuples, unions and literals of strings. A whole number is
            accepted for a float; a bool is never accepted for a number, and neither is NaN.
          default: The value of a missing key; without it, the key is required.

        Raises:
          UserError: The value has another type, or a required key is missing.
        """
        if key not in self._values:
            if default is _REQUIRED:
                raise UserError(f"{self.place}: '{key}' is missing; it must be {describe_type(expected)}")
            return default
        value = self._values[key]
        try:
            return _cast(value, expected)
        except TypeError:
            message = f"{key} must be {describe_type(expected)}, not {describe_value(value)}"
            raise UserError(f"{self.place}: {message}") from None
        except (ValueError, OverflowError) as error:
            raise UserError(f"{self.place}: {key} {error}") from None

    def raw(self, key: str) -> Any:
        """Returns the value of a key as TOML gives it, or None if the key is missing."""
        return self._values.get(key)


def _cast(value: Any, expected: Any) -> Any:
    """Returns a TOML value as a type.

    Raises:
      TypeError: The value has another type.
      ValueError: The type is right, but not the value; the message continues the sentence "KEY ...".
    """
    origin = typing.get_origin(expected)
    if origin in (typing.Union, types.UnionType):
        return _cast_union(value, typing.get_args(expected))
    if origin is Literal:
        if not isinstance(value, str) or value not in typing.get_args(expected):
            raise TypeError
        return value
    if expected is tuple or origin is tuple:
        return _cast_tuple(value, typing.get_args(expected))
    if expected in (int, float) and type(value) in (int, float):
        return _cast_number(value, expected)
    if expected in (bool, str) and type(value) is expected:
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


def _cast_tuple(value: Any, item_types: tuple[Any, ...]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError
    if not item_types:
        return tuple(_cast(item, bool | int | float | str) for item in value)
    if len(item_types) == 2 and item_types[1] is Ellipsis:
        return tuple(_cast(item, item_types[0]) for item in value)
    if len(item_types) != len(value):
        raise ValueError(f"must have {len(item_types)} entries, not {len(value)}")
    return tuple(_cast(item, item_type) for item, item_type in zip(value, item_types, strict=True))


def _cast_number(value: int | float, expected: type) -> int | float:
    if value != value:
        raise ValueError("must be a number, not nan")
    if expected is float:
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"must be a number of float64, not {_shorten(to_toml_value(value))}") from None
    if isinstance(value, float):
        raise TypeError
    if abs(value) > MAX_INTEGER:
        number = _shorten(to_toml_value(value))
        raise ValueError(f"must be a whole number of at most {MAX_INTEGER} in magnitude, not {number}")
    return value


def describe_type(expected: Any) -> str:
    """Describes a type for messages, for example "a number or a list of numbers"."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        # A whole number is also accepted as a float, so it is not named beside it.
        options = [a for a in arguments if a is not type(None) and not (a is int and float in arguments)]
        return " or ".join(map(describe_type, options))
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin is tuple:
        items = dict.fromkeys(describe_type(item) for item in arguments if item is not Ellipsis)
        return "a list of " + " or ".join(_PLURALS.get(item, item) for item in items)
    return _TYPE_NAMES.get(expected, str(expected))


def describe_value(value: Any) -> str:
    """Describes a TOML value for messages in a few words, for example "the number 3"."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"the list {_shorten(to_toml_value(value))}"
    if isinstance(value, str):
        return f"the string {_shorten(repr(value))}"
    if isinstance(value, bool):
        return to_toml_value(value)
    if isinstance(value, int | float):
        return f"the number {_shorten(to_toml_value(value))}"
    return f"the date or time {value}"


def _shorten(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line if len(line) <= 60 else f"{line[:57]}..."


def to_toml_value(value: Any) -> str:
    """Returns a value as TOML writes it, on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int) and value.bit_length() > 1000:
        return hex(value)  # Python refuses to write very long decimals
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {to_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml_value, value))}]"
    return str(value)


def to_toml_text(document: Mapping[str, Any]) -> str:
    """Returns TOML text without keys whose value is None.

    Unlike tomli_w, it writes every table of a list under its own header [[name]], however short the table is.
    """
    return "\n".join(text for text in _table_texts(_without_none(document)) if text)


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _table_texts(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields a table's text without its header, then the texts of its inner tables and lists of tables."""
    tables = {key: [value] for key, value in table.items() if isinstance(value, dict)}
    lists = {key: value for key, value in table.items() if _is_table_list(value)}
    yield tomli_w.dumps({key: value for key, value in table.items() if key not in tables and key not in lists})
    for key, items in (tables | lists).items():
        name = f"[{prefix}{key}]"
        for item in items:
            first, *rest = _table_texts(item, f"{prefix}{key}.")
            yield f"{name if key in tables else f'[{name}]'}\n{first}"
            yield from rest


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def read_section(sections: TomlTable, name: str, allowed: Collection[str] | None, default: Any = None) -> TomlTable:
    """Returns the table [name] of a spec, or one made of the default if it is missing.

    Raises:
      UserError: The table is missing without a default, is not a table, or has a key that is not `allowed`.
    """
    values = sections.raw(name) if name in sections else default
    if values is None:
        raise UserError(f"{sections.place}: the table [{name}] is missing")
    return TomlTable(values, f"{sections.place}: [{name}]", allowed)


def read_table_list(sections: TomlTable, name: str) -> Iterator[tuple[Any, str]]:
    """Yields the values of each table [[name]], of which there may be none, and its place in the spec.

    Raises:
      UserError: `name` is not a list. Its entries are not checked.
    """
    tables = sections.raw(name)
    if isinstance(tables, dict):
        raise UserError(f"{sections.place}: [{name}] must be written [[{name}]], in double brackets")
    if tables is not None and not isinstance(tables, list):
        raise UserError(f"{sections.place}: {name} must be tables [[{name}]], not {describe_value(tables)}")
    for number, values in enumerate(tables or (), 1):
        yield values, f"{sections.place}: [[{name}]] {number}"


def field_names(dataclass: type) -> list[str]:
    """Returns the names of the fields that a dataclass is constructed with."""
    return [field.name for field in dataclasses.fields(dataclass) if field.init]


def read_dataclass(table: TomlTable, dataclass: type, **fixed: Any) -> Any:
    """Returns an instance of a dataclass with the values that a table has for its fields, converted to their types.

    A path whose field has a true "path" in its metadata is made absolute if it exists, because a run may be resumed in
    another working directory. The metadata's "words" are values of the field that are not paths.

    Args:
      table: The table; its keys that are not fields are ignored.
      dataclass: The dataclass.
      **fixed: Values of fields that are not read from the table.

    Raises:
      UserError: A value has another type, a required one is missing, or the dataclass refuses one.
    """
    types = typing.get_type_hints(dataclass)
    values = dict(fixed)
    for field in dataclasses.fields(dataclass):
        if field.init and field.name not in fixed and (field.name in table or _is_required(field)):
            value = table.get(field.name, types[field.name])
            if field.metadata.get("path"):
                value = _absolute_path(value, field.metadata.get("words", ()))
            values[field.name] = value
    with error_prefix(table.place):
        return dataclass(**values)


def _absolute_path(path: str, words: Collection[str]) -> str:
    if not path or path in words or not Path(path).exists():
        return path
    return str(Path(path).absolute())


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
