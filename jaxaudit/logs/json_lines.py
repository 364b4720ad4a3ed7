"""Logs of JSON objects: one a line, or a list of them in one document, as Hugging Face's trainer keeps it."""

from __future__ import annotations

import json
from pathlib import Path

from jaxaudit.errors import UserError
from jaxaudit.logs.lines import text_of
from jaxaudit.logs.log import shown
from jaxaudit.logs.records import Records

HISTORY = "log_history"
"""What a trainer_state.json (Hugging Face's trainer, TRL) has its log in."""


def records(path: Path) -> Records:
    """The objects of a file; those within others are flattened, names joined by "/".

    A last line without a line end is left out if it is not a whole object.

    Raises:
      UserError: a line is not a JSON object; or one document has no list of them.
    """
    text, last = text_of(path)
    if (document := _document(text + last)) is not None:
        return _entries(path, document)
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


def _document(text: str) -> dict | list | None:
    """What a file is as a whole; None where its first line is an object of its own, or it is no document."""
    first = _parsed(text.lstrip().partition("\n")[0])
    if isinstance(first, dict) and HISTORY not in first:
        return None
    document = _parsed(text)
    return document if isinstance(document, dict | list) else None


def _parsed(text: str) -> object:
    """What JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _entries(path: Path, document: dict | list) -> Records:
    """The rows of a document."""
    listed = document.get(HISTORY) if isinstance(document, dict) else document
    if not isinstance(listed, list):
        raise UserError(f"{path} is one JSON object without a list '{HISTORY}', where each line must be an object")
    rows = []
    for number, entry in enumerate(listed, 1):
        if not isinstance(entry, dict):
            raise UserError(f"{path}: entry {number} is not a JSON object: '{shown(entry)}'")
        rows.append((number, _flattened(entry)))
    if not rows:
        raise UserError(f"{path} has no entries")
    return Records("entry", tuple(dict.fromkeys(name for _, row in rows for name in row)), rows, ())


def _flat(line: str) -> dict[str, object]:
    given = json.loads(line)
    if not isinstance(given, dict):
        raise ValueError("not an object")
    return _flattened(given)


def _flattened(given: dict) -> dict[str, object]:
    entries: dict[str, object] = {}
    _flatten(given, "", entries)
    return entries


def _flatten(given: dict, label: str, entries: dict[str, object]) -> None:
    for name, value in given.items():
        if isinstance(value, dict):
            _flatten(value, f"{label}{name}/", entries)
        else:
            entries[label + name] = value
