"""Reads the logs of other trainers: CSV, JSON, printed text, and the files of TensorBoard and MLflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxaudit.logs import events, printed, structured
from jaxaudit.logs.log import Attempt, Log, LogRun, Series
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

__all__ = ["Attempt", "Log", "LogRun", "Series", "read"]

_BY_SUFFIX: dict[str, Callable[[Path], Records]] = {
    ".csv": structured.read_csv,
    ".tsv": structured.read_csv,
    ".jsonl": structured.read_json,
    ".ndjson": structured.read_json,
    ".json": structured.read_json,
}

_HEAD = 4096
"""Bytes at the beginning of a file by which its format is recognised."""


def read(path: Path, step: str | None = None) -> Log:
    """Reads the telemetry of the runs in a log; nothing in the log is executed.

    Args:
      path: A file of comma-, semicolon- or tab-separated values with a header, of JSON objects on separate lines or in
        a list, or of what a trainer printed; a TensorBoard event file, or a folder of them; or an MLflow folder of
        metrics.
      step: The column of steps; by default the first of `records.STEP_COLUMNS` that exists, or else rows are counted.

    Raises:
      UserError: The file does not exist, has none of these formats, is damaged, or has no numbers or no steps.
    """
    path = Path(path)
    try:
        records = _recognise(path)(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    return records.to_log(path, step)


def _recognise(path: Path) -> Callable[[Path], Records]:
    """Returns the reader for the format of a file or folder."""
    if path.is_dir():
        return structured.read_mlflow if structured.is_mlflow_folder(path) else events.read_events
    if not path.is_file():
        raise UserError(f"{path} is not a file" if path.exists() else f"there is no file {path}")
    if events.FILE_MARK in path.name:
        return events.read_events
    return _BY_SUFFIX.get(path.suffix.lower()) or _recognise_content(path)


def _recognise_content(path: Path) -> Callable[[Path], Records]:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head.strip():
        raise UserError(f"{path} is empty")
    if events.CONTENT_MARK in head:
        return events.read_events
    text = head.decode("utf-8-sig", errors="replace").lstrip()
    if "\0" in text:
        raise UserError(f"{path} is not a log: it is neither text nor an event file of TensorBoard")
    if text.startswith(('{"', "[{", "{ ", "{\n", "{}")):
        return structured.read_json
    if (records := printed.read_printed(path)) is not None:
        return lambda _: records
    if structured.looks_like_csv(text):
        return structured.read_csv
    raise UserError(f"{path} is text in which no rows of metrics are recognised; recognised are {printed.FORMATS}")
