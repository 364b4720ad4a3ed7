"""A log as it is read, and how its names and values are shown in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LONGEST = 60
"""Characters of a name or value that a message shows."""


@dataclass(frozen=True)
class Log:
    """Telemetry of one run.

    Attributes:
      path: of the file or folder.
      channels: the names of the d columns of numbers, in the order in which the log has them.
      steps: int64 `[T]`, strictly increasing.
      values: float64 `[T, d]`, NaN where there is no value.
      notes: sentences on what is left out, replaced or missing.
    """

    path: Path
    channels: tuple[str, ...]
    steps: np.ndarray
    values: np.ndarray
    notes: tuple[str, ...]


def shown(text: object) -> str:
    """A name or value on one line of a message, not too long."""
    line = str(text) if isinstance(text, str) else repr(text)
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def listed(names: Iterable[str]) -> str:
    """Names, one after the other."""
    return ", ".join(map(shown, names)) or "none"


def has_no(what: str, given: str, there: Iterable[str]) -> str:
    """The rest of a sentence that begins with a file: what it has not, the nearest that it has, and all of these."""
    there = list(there)
    near = difflib.get_close_matches(given, there, n=1)
    hint = f" (did you mean '{shown(near[0])}'?)" if near else ""
    return f"has no {what} '{shown(given)}'{hint}; it has: {listed(there)}"
