"""Lines that verl prints among whatever else a process prints: `step:3 - actor/loss:0.25 - critic/score/mean:0.5`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jaxaudit.errors import UserError
from jaxaudit.logs.lines import text_of
from jaxaudit.logs.records import Records

_LINE = re.compile(r"(?<![\w/])step:(\d+) - (.+)")
_NUMPY = re.compile(r"np\.\w+\((.*)\)")
"""As NumPy writes its scalars from version 2 on."""


def is_in(path: Path) -> bool:
    """Whether a file has such a line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return any(_LINE.search(line) for line in file)


def records(path: Path) -> Records:
    """The rows of a file; lines that are none are left out, and a last one without a line end, too.

    Raises:
      UserError: there is no complete one.
    """
    text, last = text_of(path)
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), 1):
        if found := _LINE.search(line):
            rows.append((number, {"step": int(found[1]), **_values(found[2])}))
    if not rows:
        raise UserError(f"{path} has no complete line")
    notes: tuple[str, ...] = ()
    if _LINE.search(last):
        notes = ("the last line has no line end, as one that is being written, and is left out",)
    return Records("line", tuple(dict.fromkeys(name for _, row in rows for name in row)), rows, notes)


def _values(text: str) -> dict[str, str]:
    """The values of a line by name; a name may have colons, a value has none."""
    values = {}
    for part in text.split(" - "):
        name, colon, value = part.strip().rpartition(":")
        if colon and name:
            number = _NUMPY.fullmatch(value)
            values[name] = number[1] if number else value
    return values
