"""Reads logs in structured text: separated values (CSV, TSV), JSON, and MLflow's folders of metric files."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

from jaxaudit.logs.cells import flatten, is_number, read_complete_lines
from jaxaudit.logs.log import shorten
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

DELIMITERS = (",", ";", "\t")

_COMMENT = "#"
"""Begins a comment before the header, as in the monitor files of Stable-Baselines3, or the header itself."""

_COLUMN_NAME = re.compile(r"[A-Za-z_][\w./@ -]{0,99}")

CsvTable = tuple[list[int], dict[str, list[Any]], list[int]]
"""The line number of each row, the cells by column, and the numbers of the lines that repeat the header."""


def read_csv(path: Path) -> Records:
    """Reads a file of separated values: a header, then one line for each row.

    A last line without a line end is left out, because more digits of its last number may follow.

    Raises:
      UserError: The file has no header, no rows or a column name twice, or a line has more or fewer fields than the
        header.
    """
    text, unfinished = read_complete_lines(path)
    places, columns, repeated_headers = _split_unquoted(path, text) or _parse_csv(path, text)
    notes = []
    if unfinished:
        notes.append("the last line has no line end, as if it were still being written, and is left out")
    if repeated_headers:
        more = f" and {len(repeated_headers) - 1} more lines repeat" if len(repeated_headers) > 1 else " repeats"
        notes.append(f"line {repeated_headers[0]}{more} the header, as after a run was resumed")
    if columns.pop("", None) is not None:
        # pandas writes the index of a table as a column without a name.
        notes.append("a column without a name is left out")
    return Records("separated values", "line", places, columns, tuple(notes))


def looks_like_csv(head: str) -> bool:
    """Whether a text begins like separated values: a header, and lines with as many fields as it."""
    lines = [line for line in io.StringIO(head) if not _precedes_header(line)]
    complete = lines[:-1] if len(lines) > 1 and not head.endswith("\n") else lines
    delimiter = _delimiter(next(iter(complete), ""))
    try:
        rows = [fields for fields in csv.reader(complete[:20], delimiter=delimiter, strict=True) if fields]
    except csv.Error:
        return False
    return bool(rows) and len(rows[0]) > 1 and all(len(fields) == len(rows[0]) for fields in rows)


def _precedes_header(line: str) -> bool:
    return not line.strip() or (line.startswith(_COMMENT) and not _is_commented_header(line))


def _is_commented_header(line: str) -> bool:
    """Whether a comment is a header, such as "# step,loss", and not anything else, such as JSON."""
    text = line.removeprefix(_COMMENT).strip()
    names = text.split(_delimiter(text))
    return len(names) > 1 and all(_COLUMN_NAME.fullmatch(name.strip()) for name in names)


def _split_unquoted(path: Path, text: str) -> CsvTable | None:
    """Returns what `_parse_csv` returns, more than twice as fast, or None for a text that it leaves to `_parse_csv`.

    None is returned if the text has quotes, carriage returns, NULs, blank lines after the header, a single column, or a
    line with more or fewer fields than the header; if its last line has no end; or if the header may be repeated in it.

    Args:
      path: the file, for messages.
      text: its complete lines.

    Raises:
      UserError: the header has only numbers, or one name twice.
    """
    if '"' in text or "\r" in text or "\0" in text:
        return None
    stream = io.StringIO(text, newline="")
    first, line = next(((n, line) for n, line in enumerate(stream, 1) if not _precedes_header(line)), (0, ""))
    body = stream.read()
    if not body.endswith("\n"):
        return None
    delimiter = _delimiter(line)
    header = _header(path, first, line.removesuffix("\n").split(delimiter))
    if len(header) == 1 or not any(name and name not in body for name in header):
        return None
    # A NUL is inserted between lines. If it is not exactly after each line's last field, some line has more or fewer
    # fields than the header.
    fields = body.replace("\n", f"{delimiter}\0{delimiter}").split(delimiter)
    width = len(header) + 1
    count = len(fields) // width
    if len(fields) != count * width + 1 or fields[width - 1 :: width].count("\0") != count:
        return None
    columns: dict[str, list[Any]] = {name: fields[k:-1:width] for k, name in enumerate(header)}
    return list(range(first + 1, first + 1 + count)), columns, []


def _parse_csv(path: Path, text: str) -> CsvTable:
    places, rows = _csv_rows(path, text)
    header = _header(path, places[0], rows[0]) if rows else []
    places, rows = places[1:], rows[1:]
    for line, fields in zip(places, rows, strict=True):
        if len(fields) != len(header):
            raise UserError(f"{path}: line {line} has {len(fields)} fields, but the header has {len(header)}")
    repeated_headers = [line for line, fields in zip(places, rows, strict=True) if _repeats_header(fields, header)]
    if repeated_headers:
        kept = [i for i, fields in enumerate(rows) if not _repeats_header(fields, header)]
        places, rows = [places[i] for i in kept], [rows[i] for i in kept]
    if not rows:
        raise UserError(f"{path} has no complete line" + (" after its header" if header else ""))
    return places, dict(zip(header, map(list, zip(*rows, strict=True)), strict=True)), repeated_headers


def _delimiter(header: str) -> str:
    """Returns the most frequent delimiter of the header; others may be part of a name."""
    return max(DELIMITERS, key=header.count)


def _csv_rows(path: Path, text: str) -> tuple[list[int], list[list[str]]]:
    """Returns the line numbers and fields of the header and of each line after it that is not blank."""
    lines = list(io.StringIO(text, newline=""))
    first = next((number for number, line in enumerate(lines) if not _precedes_header(line)), len(lines))
    reader = csv.reader(lines[first:], delimiter=_delimiter("".join(lines[first : first + 1])), strict=True)
    places, rows = [], []
    try:
        for fields in reader:
            if fields:
                places.append(first + reader.line_num)
                rows.append(fields)
    except csv.Error as error:
        raise UserError(f"{path}: line {first + reader.line_num} is not separated values: {error}") from None
    return places, rows


def _repeats_header(fields: list[str], header: list[str]) -> bool:
    return (
        header[0] in fields[0]
        and fields[0].strip(_COMMENT + " ") == header[0]
        and [field.strip() for field in fields[1:]] == header[1:]
    )


def _header(path: Path, line: int, fields: list[str]) -> list[str]:
    names = [field.strip() for field in fields]
    names[0] = names[0].removeprefix(_COMMENT).strip()
    if all(map(is_number, names)):
        raise UserError(f"{path}: line {line} must be a header with the names of the columns, but has only numbers")
    repeated = [name for i, name in enumerate(names) if name in names[:i]]
    if repeated:
        raise UserError(f"{path}: line {line}, the header, has two columns '{shorten(repeated[0])}'")
    return names


HISTORY = "log_history"
"""The key of the log in a trainer_state.json of Hugging Face's trainers."""


def read_json(path: Path) -> Records:
    """Reads JSON objects, one on each line or in a list within a single document; nested names are joined with "/".

    A last line without a line end is left out if it is not a complete object.

    Raises:
      UserError: A line is not a JSON object, or a document has no list of objects.
    """
    text, last = read_complete_lines(path)
    if (document := _whole_document(text + last)) is not None:
        return _read_document(path, document)
    lines = text.split("\n")
    rows, notes = [], []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append((number, _parse_row(line)))
            except (ValueError, RecursionError):
                raise UserError(f"{path}: line {number} is not a JSON object: '{shorten(line.strip())}'") from None
    if last:
        try:
            rows.append((len(lines), _parse_row(last)))
        except (ValueError, RecursionError):
            notes.append(f"line {len(lines)} is cut off, as if it were still being written, and is left out")
    if not rows:
        raise UserError(f"{path} has no complete line")
    return Records.from_rows("JSON lines", "line", rows, notes)


def _whole_document(text: str) -> dict | list | None:
    """Returns the JSON document that a text is, or None if its first line is a row or the text is not one document."""
    first, _, rest = text.strip().partition("\n")
    value = _parse_json(first)
    if isinstance(value, dict) and HISTORY not in value and (rest or not _contains_rows(value)):
        return None
    document = value if value is not None and not rest else _parse_json(text)
    return document if isinstance(document, dict | list) else None


def _contains_rows(document: dict) -> bool:
    """Whether an object contains rows, or nothing but objects and lists, so that it cannot be a row itself."""
    return all(isinstance(value, dict | list) for value in document.values()) or any(map(_is_rows, document.values()))


def _parse_json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_document(path: Path, document: dict | list) -> Records:
    """Returns the rows of a list of objects, of the only such list in an object, or of lists of values by name."""
    entries: object = document
    if isinstance(document, dict):
        if HISTORY not in document and (records := _read_histories(path, document)) is not None:
            return records
        lists = [name for name, value in document.items() if _is_rows(value)]
        if HISTORY not in document and len(lists) != 1:
            raise UserError(
                f"{path} is one JSON object without a list '{HISTORY}' or exactly one other list of objects; "
                "otherwise, each line must be an object"
            )
        entries = document[HISTORY if HISTORY in document else lists[0]]
    if not isinstance(entries, list):
        raise UserError(f"{path} is one JSON object whose '{HISTORY}' is not a list of objects")
    rows = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise UserError(f"{path}: entry {number} is not a JSON object: '{shorten(entry)}'")
        rows.append((number, _flat_row(entry)))
    if not rows:
        raise UserError(f"{path} has no entries")
    return Records.from_rows("a list of JSON objects", "entry", rows)


def _is_rows(value: object) -> bool:
    return isinstance(value, list) and len(value) > 1 and all(isinstance(entry, dict) for entry in value)


def _read_histories(path: Path, document: dict) -> Records | None:
    """Returns the rows of lists of values by name.

    Keras' history has plain lists, Sacred's metrics have lists of steps and values. Returns None for other documents.
    """
    if not document:
        return None
    if all(isinstance(value, list) and not _is_rows(value) for value in document.values()):
        if len({len(value) for value in document.values()}) > 1:
            raise UserError(f"{path} has lists of different lengths, but each must have a value for every step")
        rows = (dict(zip(document, values, strict=True)) for values in zip(*document.values(), strict=True))
        return Records.from_rows("lists of values by name", "entry", enumerate(rows, 1))
    if all(isinstance(value, dict) and {"steps", "values"} <= value.keys() for value in document.values()):
        entries: list[dict] = []
        for name, value in document.items():
            steps, values = value["steps"], value["values"]
            if not (isinstance(steps, list) and isinstance(values, list) and len(steps) == len(values)):
                raise UserError(f"{path}: '{shorten(name)}' must have as many steps as values")
            entries += [{"step": step, name: number} for step, number in zip(steps, values, strict=True)]
        return Records.from_rows("values and their steps by name", "entry", enumerate(entries, 1))
    return None


def _parse_row(line: str) -> dict[str, object]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not an object")
    return _flat_row(row)


def _flat_row(row: dict) -> dict[str, object]:
    if row.keys() == {"step", "data"} and isinstance(row["data"], dict):  # verl's file logger writes NaN as null
        data = {name: math.nan if value is None else value for name, value in row["data"].items()}
        row = {"step": row["step"], **data}
    return dict(flatten(row))


MLFLOW_FOLDER = "metrics"
"""The name of the folder of metric files in an MLflow run's folder."""


def is_mlflow_folder(path: Path) -> bool:
    """Whether a folder is that of an MLflow run, or the folder of its metric files."""
    return (path / MLFLOW_FOLDER).is_dir() or path.name == MLFLOW_FOLDER


def read_mlflow(path: Path) -> Records:
    """Reads the metric files of an MLflow run, whose lines are a time, a value and a step; links are not followed.

    Raises:
      UserError: There are no metric files, or a line is anything else.
    """
    folder = path / MLFLOW_FOLDER if (path / MLFLOW_FOLDER).is_dir() else path
    files = sorted(file for file in folder.rglob("[!.]*") if file.is_file() and not file.is_symlink())
    if not files:
        raise UserError(f"{folder} has no metric files")
    rows: list[tuple[int, dict[str, Any]]] = []
    for file in files:
        text, last = read_complete_lines(file)
        name = file.relative_to(folder).as_posix()
        for number, line in enumerate([*text.splitlines(), last], 1):
            fields = line.split()
            if fields and len(fields) != 3:
                raise UserError(f"{file}: line {number} is not a time, a value and a step: '{shorten(line)}'")
            if fields:
                rows.append((number, {"step": fields[2], name: fields[1]}))
    return Records.from_rows("MLflow's folder of metrics", "line", rows)
