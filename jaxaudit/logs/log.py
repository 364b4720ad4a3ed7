"""A log as it is read: runs, their attempts, and channels with steps of their own; and how messages show names."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

LONGEST = 60
"""Characters of a name or value that a message shows."""


@dataclass(frozen=True)
class Series:
    """A channel's values.

    Attributes:
      steps: int64 `[T]`, strictly increasing: those at which it was logged.
      values: float64 `[T]`; NaN and infinity are values that are not finite, and a step without a value is not there.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Attempt:
    """A run from its beginning to its end or the next restart, with what an earlier attempt had before its checkpoint.

    Attributes:
      begins: the first step that it trained itself.
      series: of each channel.
      texts: of each column that holds more texts than numbers, every text as NaN: it may be a channel in other logs.
    """

    begins: int
    series: Mapping[str, Series]
    texts: Mapping[str, Series] = field(default_factory=dict)

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """All steps at which a channel was logged, int64 `[T]`, strictly increasing."""
        found = np.zeros(0, np.int64)
        for one in self.series.values():
            if not np.array_equal(one.steps, found):
                found = np.union1d(found, one.steps)
        return found


@dataclass(frozen=True)
class LogRun:
    """One training run of a log.

    Attributes:
      name: the file's, with what tells it from others of the file.
      attempts: in the order in which they were begun; all but the first follow a restart from a checkpoint.
    """

    name: str
    attempts: tuple[Attempt, ...]

    @property
    def latest(self) -> Attempt:
        """The last attempt, which goes on from a checkpoint of the one before where there are several."""
        return self.attempts[-1]


@dataclass(frozen=True)
class LeftOut:
    """Columns that are not read as channels, and why."""

    names: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"left out, {self.reason}: {listed(self.names)}"


@dataclass(frozen=True)
class Log:
    """What a file or folder holds.

    Attributes:
      path: of the file or folder.
      format: what it was recognised as.
      step: the column that counts steps; None where rows are counted.
      runs: one or more.
      left_out: columns that are no channels.
      notes: sentences on all else that is left out, replaced or missing.
    """

    path: Path
    format: str
    step: str | None
    runs: tuple[LogRun, ...]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of all runs' channels, in the order in which they were met."""
        return tuple(dict.fromkeys(name for run in self.runs for one in run.attempts for name in one.series))


def shown(text: object) -> str:
    """A name or value on one line of a message, not too long."""
    line = str(text) if isinstance(text, str) else repr(text)
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."


def listed(names: Iterable[str]) -> str:
    """Returns names joined by commas, the rest counted."""
    return ", ".join(map(shown, names)) or "none"


def has_no(what: str, given: str, there: Iterable[str]) -> str:
    """The rest of a sentence that begins with a file: what it has not, the nearest that it has, and all of these."""
    there = list(there)
    near = difflib.get_close_matches(given, there, n=1)
    hint = f" (did you mean '{shown(near[0])}'?)" if near else ""
    return f"has no {what} '{shown(given)}'{hint}; it has: {listed(there)}"


def contents(log: Log) -> dict[str, Any]:
    """What a log holds, as JSON has it: channels have first and last step, values, usual cadence, values not finite."""
    return {
        "path": str(log.path),
        "format": log.format,
        "step": log.step,
        "runs": [
            {
                "name": run.name,
                "attempts": [
                    {
                        "begins": attempt.begins,
                        "ends": int(attempt.steps[-1]),
                        "channels": {name: _measures(one) for name, one in attempt.series.items()},
                    }
                    for attempt in run.attempts
                ],
            }
            for run in log.runs
        ],
        "left_out": [{"names": list(one.names), "reason": one.reason} for one in log.left_out],
        "notes": list(log.notes),
    }


def _measures(series: Series) -> dict[str, Any]:
    apart = np.diff(series.steps)
    return {
        "first": int(series.steps[0]),
        "last": int(series.steps[-1]),
        "values": len(series.values),
        "every": int(np.sort(apart)[(len(apart) - 1) // 2]) if len(apart) else None,
        "not_finite": int((~np.isfinite(series.values)).sum()),
    }


def table(log: Log) -> Iterator[str]:
    """What `contents` says, as lines of text with a table of channels for each attempt."""
    steps = "rows are counted" if log.step is None else f"steps are '{shown(log.step)}'"
    yield f"{log.path}: {log.format}, {steps}"
    for run in log.runs:
        for number, attempt in enumerate(run.attempts, 1):
            several = f", attempt {number} of {len(run.attempts)}" if len(run.attempts) > 1 else ""
            yield f"  {run.name}{several}: from step {attempt.begins} to {attempt.steps[-1]}"
            rows: list[tuple[str, ...]] = [("channel", "first", "last", "values", "every", "not finite")]
            for name, one in attempt.series.items():
                told = _measures(one).values()
                rows.append((shown(name), *("" if value is None else str(value) for value in told)))
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for name, *numbers in rows:
                cells = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
                yield f"    {name.ljust(widths[0])}  {'  '.join(cells)}"
    yield from (f"  {one}" for one in (*log.left_out, *log.notes))
