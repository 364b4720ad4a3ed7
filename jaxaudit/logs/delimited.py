"""Logs of separated values: a header, then a line for each row."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxaudit.errors import UserError
from jaxaudit.logs.lines import text_of
from jaxaudit.logs.log import shown
from jaxaudit.logs.records import Records, is_number

DELIMITERS = (",", ";", "\t")

_COMMENT = "#"
"""Begins a line before the header, as in the monitor files of Stable-Baselines3."""


def records(path: Path) -> Records:
    """The rows of a file.

    A last line without a line end is left out: more digits of its last number may come.

    Raises:
      UserError: it has no header or no rows, a name twice, or a line with more or fewer fields than the header.
    """
    text, unfinished = text_of(path)
    header: list[str] = []
    rows: list[tuple[int, dict[str, Any]]] = []
    for line, fields in _fields(path, text):
        if not header:
            header = _header(path, line, fields)
        elif len(fields) != len(header):
            raise UserError(f"{path}: line {line} has {len(fields)} fields, and the header {len(header)}")
        else:
            rows.append((line, dict(zip(header, fields, strict=True))))
    if not rows:
        raise UserError(f"{path} has no complete line" + (" after its header" if header else ""))
    notes = []
    if unfinished:
        notes.append("the last line has no line end, as one that is being written, and is left out")
    if "" in header:
        # The index of a table, as pandas writes it, tells nothing of the run.
        notes.append("a column without a name is left out")
        for _, row in rows:
            del row[""]
    return Records("line", tuple(filter(None, header)), rows, tuple(notes))


def has_delimiter(head: str) -> bool:
    """Whether the header has several fields, if text that begins so has one."""
    lines = io.StringIO(head)
    header = next((line for line in lines if not _before_header(line)), "")
    return any(delimiter in header for delimiter in DELIMITERS)


def _before_header(line: str) -> bool:
    return not line.strip() or line.startswith(_COMMENT)


def _fields(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """The number and the fields of the header and of each line after it that is not blank."""
    lines = list(io.StringIO(text, newline=""))
    first = next((number for number, line in enumerate(lines) if not _before_header(line)), len(lines))
    header = "".join(lines[first : first + 1])
    # A delimiter may be part of a name, so the one that is there most often.
    reader = csv.reader(lines[first:], delimiter=max(DELIMITERS, key=header.count), strict=True)
    try:
        for fields in reader:
            if fields:
                yield first + reader.line_num, fields
    except csv.Error as error:
        raise UserError(f"{path}: line {first + reader.line_num} is not of separated values: {error}") from None


def _header(path: Path, line: int, fields: list[str]) -> list[str]:
    names = [field.strip() for field in fields]
    if all(map(is_number, names)):
        raise UserError(f"{path}: line {line} must be a header, the names of the columns, and has numbers alone")
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise UserError(f"{path}: line {line}, the header, has two columns '{shown(twice[0])}'")
    return names
