"""Recognises the format of a log, and reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxaudit.logs import delimited, events, json_lines, mlflow, printed
from jaxaudit.logs.log import Log
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

_BY_SUFFIX: dict[str, Callable[[Path], Records]] = {
    ".csv": delimited.records,
    ".tsv": delimited.records,
    ".jsonl": json_lines.records,
    ".ndjson": json_lines.records,
    ".json": json_lines.records,
}

_HEAD = 4096
"""Bytes by which a file of another name is recognised."""


def read(path: Path, step: str | None = None) -> Log:
    """The telemetry of the runs in a log; nothing in it is ever executed.

    Args:
      path: a file of comma-, semicolon- or tab-separated values with a header, of JSON objects one a line or in a list,
        or of what a trainer printed; an event file of TensorBoard, or a folder of them; or MLflow's folder of metrics.
      step: the column of steps; None: the first of `records.STEPS` that there is, else rows are counted.

    Raises:
      UserError: in one sentence: the file is not there, none of these or damaged, or has no numbers or no steps.
    """
    path = Path(path)
    try:
        found = _format(path)(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    return found.log(path, step)


def _format(path: Path) -> Callable[[Path], Records]:
    if path.is_dir():
        return mlflow.records if mlflow.is_in(path) else events.records
    if not path.is_file():
        raise UserError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
    if events.NAME in path.name:
        return events.records
    return _BY_SUFFIX.get(path.suffix.lower()) or _by_content(path)


def _by_content(path: Path) -> Callable[[Path], Records]:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head.strip():
        raise UserError(f"{path} is empty")
    if events.MARK in head:
        return events.records
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if "\0" in text:
        raise UserError(f"{path} is not a log: it is neither text nor an event file of TensorBoard")
    if text.startswith(('{"', "[{", "{ ", "{\n", "{}")):
        return json_lines.records
    if (found := printed.recognised(path)) is not None:
        return lambda _: found
    if delimited.is_separated(text):
        return delimited.records
    raise UserError(f"{path} is text in which no rows of metrics are recognised; {printed.ADVICE}")
