"""Logs of separated values: a header, then a line for each row."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

from jaxaudit.logs.cells import is_number, text_of
from jaxaudit.logs.log import shown
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

DELIMITERS = (",", ";", "\t")

_COMMENT = "#"
"""Begins a line before the header, as in the monitor files of Stable-Baselines3; or the header itself."""

_NAME = re.compile(r"[A-Za-z_][\w./@ -]{0,99}")


def records(path: Path) -> Records:
    """The rows of a file.

    A last line without a line end is left out: more digits of its last number may come.

    Raises:
      UserError: it has no header or no rows, a name twice, or a line with more or fewer fields than the header.
    """
    text, unfinished = text_of(path)
    places, columns, again = _unquoted(path, text) or _parsed(path, text)
    notes = []
    if unfinished:
        notes.append("the last line has no line end, as one that is being written, and is left out")
    if again:
        more = f" and {len(again) - 1} more times" if len(again) > 1 else ""
        notes.append(f"line {again[0]} is the header again{more}, as where a run was resumed")
    if columns.pop("", None) is not None:
        # The index of a table, as pandas writes it, tells nothing of the run.
        notes.append("a column without a name is left out")
    return Records("separated values", "line", places, columns, tuple(notes))


def is_separated(head: str) -> bool:
    """Whether text that begins so is of separated values: a header, and as many fields in each line after it."""
    lines = [line for line in io.StringIO(head) if not _before_header(line)]
    complete = lines[:-1] if len(lines) > 1 and not head.endswith("\n") else lines
    header = next(iter(complete), "")
    delimiter = _delimiter(header)
    try:
        fields = [row for row in csv.reader(complete[:20], delimiter=delimiter, strict=True) if row]
    except csv.Error:
        return False
    return bool(fields) and len(fields[0]) > 1 and all(len(row) == len(fields[0]) for row in fields)


def _before_header(line: str) -> bool:
    return not line.strip() or (line.startswith(_COMMENT) and not _commented_header(line))


def _commented_header(line: str) -> bool:
    """Whether a line is a header after a comment's sign, as "# step,loss"; not what others have there, as JSON."""
    text = line.removeprefix(_COMMENT).strip()
    names = text.split(_delimiter(text))
    return len(names) > 1 and all(_NAME.fullmatch(name.strip()) for name in names)


Table = tuple[list[int], dict[str, list[Any]], list[int]]
"""The numbers of the lines after the header, the columns, and the numbers of lines that are the header again."""


def _unquoted(path: Path, text: str) -> Table | None:
    """As `_parsed`, more than twice as fast; None where there are quotes, blank lines, one column or an error."""
    if '"' in text or "\r" in text or "\0" in text:
        return None
    stream = io.StringIO(text, newline="")
    first, line = next(((n, line) for n, line in enumerate(stream, 1) if not _before_header(line)), (0, ""))
    body = stream.read()
    if not body.endswith("\n"):
        return None
    delimiter = _delimiter(line)
    header = _header(path, first, line.removesuffix("\n").split(delimiter))
    if len(header) == 1 or not any(name and name not in body for name in header):
        return None
    # A NUL between two lines is in every place after a line's last field, or a line has more or fewer fields.
    fields = body.replace("\n", f"{delimiter}\0{delimiter}").split(delimiter)
    width = len(header) + 1
    count = len(fields) // width
    if len(fields) != count * width + 1 or fields[width - 1 :: width].count("\0") != count:
        return None
    columns: dict[str, list[Any]] = {name: fields[k:-1:width] for k, name in enumerate(header)}
    return list(range(first + 1, first + 1 + count)), columns, []


def _parsed(path: Path, text: str) -> Table:
    """The table of any text.

    Raises:
      UserError: as `records`.
    """
    places, rows = _fields(path, text)
    header = _header(path, places[0], rows[0]) if rows else []
    places, rows = places[1:], rows[1:]
    for line, fields in zip(places, rows, strict=True):
        if len(fields) != len(header):
            raise UserError(f"{path}: line {line} has {len(fields)} fields, and the header {len(header)}")
    again = [line for line, fields in zip(places, rows, strict=True) if _is_header(fields, header)]
    if again:
        kept = [(line, fields) for line, fields in zip(places, rows, strict=True) if not _is_header(fields, header)]
        places, rows = [line for line, _ in kept], [fields for _, fields in kept]
    if not rows:
        raise UserError(f"{path} has no complete line" + (" after its header" if header else ""))
    return places, dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)), again


def _delimiter(header: str) -> str:
    """The delimiter that is most often in the header: another may be part of a name."""
    return max(DELIMITERS, key=header.count)


def _fields(path: Path, text: str) -> tuple[list[int], list[list[str]]]:
    """The numbers and the fields of the header and of each line after it that is not blank."""
    lines = list(io.StringIO(text, newline=""))
    first = next((number for number, line in enumerate(lines) if not _before_header(line)), len(lines))
    reader = csv.reader(lines[first:], delimiter=_delimiter("".join(lines[first : first + 1])), strict=True)
    places, rows = [], []
    try:
        for fields in reader:
            if fields:
                places.append(first + reader.line_num)
                rows.append(fields)
    except csv.Error as error:
        raise UserError(f"{path}: line {first + reader.line_num} is not of separated values: {error}") from None
    return places, rows


def _is_header(fields: list[str], header: list[str]) -> bool:
    """Whether a line is the header once more."""
    return (
        header[0] in fields[0]
        and fields[0].strip(_COMMENT + " ") == header[0]
        and [field.strip() for field in fields[1:]] == header[1:]
    )


def _header(path: Path, line: int, fields: list[str]) -> list[str]:
    names = [field.strip() for field in fields]
    names[0] = names[0].removeprefix(_COMMENT).strip()
    if all(map(is_number, names)):
        raise UserError(f"{path}: line {line} must be a header, the names of the columns, and has numbers alone")
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise UserError(f"{path}: line {line}, the header, has two columns '{shown(twice[0])}'")
    return names
