"""Logs of JSON objects: one a line, or a list of them in one document, as Hugging Face's trainer keeps it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from jaxaudit.logs.cells import text_of
from jaxaudit.logs.log import shown
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

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
    return Records.of_rows("JSON lines", "line", rows, notes)


def _document(text: str) -> dict | list | None:
    """What a file is as a whole; None where its first line is an object of its own, or it is no document."""
    first, _, rest = text.strip().partition("\n")
    whole = _parsed(first)
    if isinstance(whole, dict) and HISTORY not in whole and (rest or not _is_document(whole)):
        return None
    document = whole if whole is not None and not rest else _parsed(text)
    return document if isinstance(document, dict | list) else None


def _is_document(given: dict) -> bool:
    """Whether an object that is all of a file holds rows, or has none: it is no row by itself."""
    return all(isinstance(value, dict | list) for value in given.values()) or any(map(_is_rows, given.values()))


def _parsed(text: str) -> object:
    """What JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _entries(path: Path, document: dict | list) -> Records:
    """The rows of a document: a list of objects, one in an object, or lists of numbers of one length by name."""
    if isinstance(document, dict):
        if HISTORY not in document and (histories := _histories(path, document)) is not None:
            return histories
        lists = [name for name, value in document.items() if _is_rows(value)]
        if HISTORY not in document and len(lists) != 1:
            raise UserError(
                f"{path} is one JSON object without a list '{HISTORY}' or another of rows, "
                "where each line must be an object"
            )
        listed = document[HISTORY if HISTORY in document else lists[0]]
    else:
        listed = document
    if not isinstance(listed, list):
        raise UserError(f"{path} is one JSON object whose '{HISTORY}' is not a list, where each line must be an object")
    rows = []
    for number, entry in enumerate(listed, 1):
        if not isinstance(entry, dict):
            raise UserError(f"{path}: entry {number} is not a JSON object: '{shown(entry)}'")
        rows.append((number, _flattened(entry)))
    if not rows:
        raise UserError(f"{path} has no entries")
    return Records.of_rows("a list of JSON objects", "entry", rows)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(entry, dict) for entry in value)


def _histories(path: Path, document: dict) -> Records | None:
    """Lists of values by name, as Keras' history has them, or each with its steps, as Sacred's metrics; else None."""
    if all(isinstance(value, list) and not _is_rows(value) for value in document.values()) and document:
        if len({len(value) for value in document.values()}) > 1:
            raise UserError(f"{path} has lists of different lengths, where each must have a value for every step")
        rows = enumerate(zip(*document.values(), strict=True), 1)
        each = ((number, dict(zip(document, row, strict=True))) for number, row in rows)
        return Records.of_rows("lists of values by name", "entry", each)
    if all(isinstance(value, dict) and {"steps", "values"} <= value.keys() for value in document.values()) and document:
        entries: list[tuple[int, dict]] = []
        for name, value in document.items():
            steps, values = value["steps"], value["values"]
            if not (isinstance(steps, list) and isinstance(values, list) and len(steps) == len(values)):
                raise UserError(f"{path}: '{shown(name)}' must have as many steps as values")
            for step, one in zip(steps, values, strict=True):
                entries.append((len(entries) + 1, {"step": step, name: one}))
        return Records.of_rows("values and their steps by name", "entry", entries)
    return None


def _flat(line: str) -> dict[str, object]:
    given = json.loads(line)
    if not isinstance(given, dict):
        raise ValueError("not an object")
    return _flattened(given)


def _flattened(given: dict) -> dict[str, object]:
    if given.keys() == {"step", "data"} and isinstance(given["data"], dict):  # verl's file logger: NaN is null
        inner = {name: math.nan if value is None else value for name, value in given["data"].items()}
        given = {"step": given["step"], **inner}
    entries: dict[str, object] = {}
    _flatten(given, "", entries)
    return entries


def _flatten(given: dict, label: str, entries: dict[str, object]) -> None:
    for name, value in given.items():
        if isinstance(value, dict):
            _flatten(value, f"{label}{name}/", entries)
        else:
            entries[label + name] = value
