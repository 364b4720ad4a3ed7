"""MLflow's folder of metrics: a file for each, whose lines are a time, a value and a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxaudit.logs.cells import text_of
from jaxaudit.logs.log import shown
from jaxaudit.logs.records import Records
from jaxaudit.runtime.errors import UserError

FOLDER = "metrics"
"""The name of the folder of metrics in a run's folder."""


def is_in(path: Path) -> bool:
    """Whether a folder is a run's, or the one of its metrics."""
    return (path / FOLDER).is_dir() or path.name == FOLDER


def records(path: Path) -> Records:
    """The metrics of a run's folder, or of the one in it that has them; links are not followed.

    Raises:
      UserError: there are none, or a line is of another kind.
    """
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    files = sorted(_files(folder))
    if not files:
        raise UserError(f"{folder} has no files of metrics")
    rows: list[tuple[int, dict[str, Any]]] = []
    for file in files:
        text, last = text_of(file)
        name = file.relative_to(folder).as_posix()
        for number, line in enumerate([*text.splitlines(), last], 1):
            fields = line.split()
            if fields and len(fields) != 3:
                raise UserError(f"{file}: line {number} is not a time, a value and a step: '{shown(line)}'")
            if fields:
                rows.append((number, {"step": fields[2], name: fields[1]}))
    return Records.of_rows("MLflow's folder of metrics", "line", rows)


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder, followlinks=False):
        for name in names:
            file = Path(place) / name
            if file.is_file() and not file.is_symlink() and not name.startswith("."):
                yield file
