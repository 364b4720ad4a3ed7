"""Logs of JSON objects, one a line."""

from __future__ import annotations

import json
from pathlib import Path

from jaxaudit.errors import UserError
from jaxaudit.logs.lines import text_of
from jaxaudit.logs.log import shown
from jaxaudit.logs.records import Records


def records(path: Path) -> Records:
    """The objects of a file; those within others are flattened, names joined by "/".

    A last line without a line end is left out if it is not a whole object.

    Raises:
      UserError: a line is not a JSON object.
    """
    text, last = text_of(path)
    lines = text.split("\n")
    rows, notes = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((number, _flat(line)))
            except (ValueError, RecursionError):
                raise UserError(f"{path}: line {number} is not a JSON object: '{shown(line.strip())}'") from None
    if last:
        try:
            rows.append((len(lines), _flat(last)))
        except (ValueError, RecursionError):
            notes.append(f"line {len(lines)} is cut off, as one that is being written, and is left out")
    if not rows:
        raise UserError(f"{path} has no complete line")
    names = tuple(dict.fromkeys(name for _, row in rows for name in row))
    return Records("line", names, rows, tuple(notes))


def _flat(line: str) -> dict[str, object]:
    given = json.loads(line)
    if not isinstance(given, dict):
        raise ValueError("not an object")
    entries: dict[str, object] = {}
    _flatten(given, "", entries)
    return entries


def _flatten(given: dict, label: str, entries: dict[str, object]) -> None:
    for name, value in given.items():
        if isinstance(value, dict):
            _flatten(value, f"{label}{name}/", entries)
        else:
            entries[label + name] = value
