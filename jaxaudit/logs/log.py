"""The contents of a log (runs, their attempts, and channels with steps of their own), and how messages show them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MAX_SHOWN = 60
"""Characters of a name or value that a message shows."""


@dataclass(frozen=True)
class Series:
    """The values of a channel.

    Attributes:
      steps: int64 `[T]`, strictly increasing; the steps at which the channel was logged.
      values: float64 `[T]`. NaN and infinity are values that were logged; a step without a value is not in `steps`.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Attempt:
    """The telemetry of a run up to its end or the next restart.

    An attempt that continues from a checkpoint includes the values that earlier attempts logged before it.

    Attributes:
      begins: The first step that this attempt trained itself.
      series: The values of each channel.
      texts: The steps of each column with more texts than numbers; every text is NaN, because the column may be a
        channel in other logs.
    """

    begins: int
    series: Mapping[str, Series]
    texts: Mapping[str, Series] = field(default_factory=dict)

    @functools.cached_property
    def steps(self) -> np.ndarray:
        """All steps at which a channel was logged, int64 `[T]`, strictly increasing."""
        steps = np.zeros(0, np.int64)
        for series in self.series.values():
            if not np.array_equal(series.steps, steps):
                steps = np.union1d(steps, series.steps)
        return steps


@dataclass(frozen=True)
class LogRun:
    """One training run of a log.

    Attributes:
      name: The file's path, followed by what distinguishes the run from others in the same file.
      attempts: The attempts in the order in which they began. All but the first follow a restart from a checkpoint.
    """

    name: str
    attempts: tuple[Attempt, ...]

    @property
    def latest(self) -> Attempt:
        """The last attempt, which has the run's values up to its end."""
        return self.attempts[-1]


@dataclass(frozen=True)
class LeftOut:
    """Columns that are not read as channels, and the reason, which follows the word "because"."""

    names: tuple[str, ...]
    reason: str

    def __str__(self) -> str:
        return f"left out because {self.reason}: {join_names(self.names)}"


@dataclass(frozen=True)
class Log:
    """The contents of a log file or folder.

    Attributes:
      path: The path of the file or folder.
      format: The name of the recognised format.
      step: The column that counts steps, or None if rows are counted.
      runs: One or more runs.
      left_out: The columns that are not channels.
      notes: Sentences on anything else that is left out, replaced or missing.
    """

    path: Path
    format: str
    step: str | None
    runs: tuple[LogRun, ...]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the channels of all runs, in the order in which they first occur."""
        return tuple(dict.fromkeys(name for run in self.runs for attempt in run.attempts for name in attempt.series))


def shorten(text: object) -> str:
    """Returns a name or value as one printable line of at most about MAX_SHOWN characters."""
    line = str(text) if isinstance(text, str) else repr(text)
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}..."


def join_names(names: Iterable[str]) -> str:
    """Returns shortened names joined by commas, or "none"."""
    return ", ".join(map(shorten, names)) or "none"


def describe_missing(kind: str, name: str, available: Iterable[str]) -> str:
    """Returns "has no KIND 'NAME'", the most similar available name, and all available names, to follow a file name."""
    available = list(available)
    near = difflib.get_close_matches(name, available, n=1)
    hint = f" (did you mean '{shorten(near[0])}'?)" if near else ""
    return f"has no {kind} '{shorten(name)}'{hint}; it has: {join_names(available)}"


def step_spacing(steps: np.ndarray) -> int:
    """Returns the lower median of the differences of at least two increasing int64 steps `[T]`."""
    spacings = np.sort(np.diff(steps))
    return int(spacings[(len(spacings) - 1) // 2])


def as_json(log: Log) -> dict[str, Any]:
    """Returns the contents of a log without the values, as JSON types; each channel has a `_series_summary`."""
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
                        "channels": {name: _series_summary(series) for name, series in attempt.series.items()},
                    }
                    for attempt in run.attempts
                ],
            }
            for run in log.runs
        ],
        "left_out": [{"names": list(columns.names), "reason": columns.reason} for columns in log.left_out],
        "notes": list(log.notes),
    }


def _series_summary(series: Series) -> dict[str, Any]:
    """Returns the first and last step, number of values, usual spacing of steps, and number of non-finite values."""
    return {
        "first": int(series.steps[0]),
        "last": int(series.steps[-1]),
        "values": len(series.values),
        "every": step_spacing(series.steps) if len(series.steps) > 1 else None,
        "not_finite": int((~np.isfinite(series.values)).sum()),
    }


def as_lines(log: Log) -> Iterator[str]:
    """Yields what `as_json` returns as lines of text, with a table of channels for each attempt."""
    steps = "rows are counted" if log.step is None else f"steps are '{shorten(log.step)}'"
    yield f"{log.path}: {log.format}, {steps}"
    for run in log.runs:
        for number, attempt in enumerate(run.attempts, 1):
            several = f", attempt {number} of {len(run.attempts)}" if len(run.attempts) > 1 else ""
            yield f"  {run.name}{several}: from step {attempt.begins} to {attempt.steps[-1]}"
            rows: list[tuple[str, ...]] = [("channel", "first", "last", "values", "every", "not finite")]
            for name, series in attempt.series.items():
                summary = _series_summary(series).values()
                rows.append((shorten(name), *("" if value is None else str(value) for value in summary)))
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            for name, *numbers in rows:
                cells = (number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))
                yield f"    {name.ljust(widths[0])}  {'  '.join(cells)}"
    yield from (f"  {remark}" for remark in (*log.left_out, *log.notes))
