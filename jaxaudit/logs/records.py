"""A log's rows as they are written, and the log that they make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.errors import UserError
from jaxaudit.logs.attempts import Attempts, gaps
from jaxaudit.logs.log import Log, has_no, listed, shown

STEPS = (
    "step",
    "_step",
    "global_step",
    "iteration",
    "iter",
    "update",
    "epoch",
    "timestep",
    "total_timesteps",
    "trainer/global_step",
    "time/total_timesteps",
)
"""Columns of steps: the first that a log has counts, in capitals or not."""

_ABSENT = frozenset(("", "none", "null", "na", "n/a", "#n/a", "<na>"))
_TRUTH = {"true": 1.0, "false": 0.0}
_STEP_BOUND = 2**62
"""Below it, the difference of two steps is still an int64."""


@dataclass(frozen=True)
class Records:
    """What a file has.

    Attributes:
      place: what its rows are: "line" or "event".
      names: of all columns.
      rows: of each its number in the file, and its entries by column: numbers, texts or anything else.
      notes: on what is left out.
    """

    place: str
    names: tuple[str, ...]
    rows: list[tuple[int, dict[str, Any]]]
    notes: tuple[str, ...]

    def log(self, path: Path, step: str | None = None) -> Log:
        """The numbers, one row for each step.

        Raises:
          UserError: there is no such column of steps, a step is not a whole number, all are the same, or there are no
            numbers.
        """
        step = self._step_column(path, step)
        rows = self.rows if step is None else [row for row in self.rows if step in row[1]]
        steps = [] if step is None else [self._step_of(path, number, step, entries[step]) for number, entries in rows]
        numbers, texts = _numbers([entries for _, entries in rows], step)
        if not any(numbers):
            raise UserError(f"{path} has no column of numbers beside its steps; it has: {listed(self.names)}")
        # A row of texts alone, as "checkpoint saved", is none of telemetry.
        with_numbers = [row for row, values in enumerate(numbers) if values]
        attempts = Attempts()
        for count, row in enumerate(with_numbers):
            attempts.add(count if step is None else steps[row], numbers[row])
        every = np.asarray(attempts.steps, np.int64)
        if len(every) == 1 < len(with_numbers) and attempts.twice:
            raise UserError(
                f"{path}: all {len(with_numbers)} rows have {shown(step)} {every[0]}, where steps must differ"
            )
        channels = tuple(name for name in self.names if name != step and name not in texts)
        values = [[attempts.rows[at].get(name, math.nan) for name in channels] for at in attempts.steps]
        left_out = self._left_out(step, len(self.rows) - len(rows), texts)
        notes = (*self.notes, *left_out, *attempts.notes(), *gaps(every))
        return Log(path, channels, every, np.asarray(values, np.float64), notes)

    def _step_column(self, path: Path, given: str | None) -> str | None:
        if given is not None:
            if given not in self.names:
                raise UserError(f"{path} {has_no('column', given, self.names)}")
            return given
        folded = {name.casefold(): name for name in reversed(self.names)}
        for wanted in STEPS:
            if wanted in folded and not (wanted == "epoch" and self._has_fractions(folded[wanted])):
                return folded[wanted]
        return None

    def _left_out(self, step: str | None, without_step: int, texts: Iterable[str]) -> Iterator[str]:
        if texts:
            yield f"left out, as not of numbers: {listed(texts)}"
        if step is None:
            yield "there is no column of steps, so rows are counted from 0"
        if without_step:
            yield f"left out, as without '{shown(step)}': {without_step} of {len(self.rows)} {self.place}s"

    def _has_fractions(self, name: str) -> bool:
        """Whether epochs are counted in parts, as some loggers do; such are no steps."""
        given = (entries[name] for _, entries in self.rows if name in entries)
        return any(is_number(value) and _whole(value) is None for value in given)

    def _step_of(self, path: Path, number: int, step: str, value: Any) -> int:
        whole = _whole(value)
        if whole is None:
            raise UserError(
                f"{path}: {self.place} {number} has {shown(step)} '{shown(value)}', which must be a whole number"
            )
        return whole


def is_number(value: Any) -> bool:
    """Whether a value or its text is a number: NaN and infinity are, and so is what is true or false."""
    try:
        return _number(value) is not None
    except ValueError:
        return False


def _numbers(rows: list[dict[str, Any]], step: str | None) -> tuple[list[dict[str, float]], dict[str, None]]:
    """The numbers of each row, and the names of the columns that have something else."""
    numbers: list[dict[str, float]] = []
    texts: dict[str, None] = {}
    for entries in rows:
        here = {}
        for name, value in entries.items():
            if name != step and name not in texts:
                try:
                    number = _number(value)
                except ValueError:
                    texts[name] = None
                    continue
                if number is not None:
                    here[name] = number
        numbers.append(here)
    if texts:
        numbers = [{name: value for name, value in here.items() if name not in texts} for here in numbers]
    return numbers, texts


def _number(value: Any) -> float | None:
    """The number that a value or its text is; None where there is none.

    Raises:
      ValueError: it is something else.
    """
    if isinstance(value, float):
        return value
    if isinstance(value, str):
        text = value.strip()
        try:
            return float(text) if text else None
        except ValueError:
            word = text.casefold()
            if word not in _TRUTH and word not in _ABSENT:
                raise
            return _TRUTH.get(word)
    if value is None:
        return None
    if not isinstance(value, int):
        raise ValueError("not a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _whole(value: Any) -> int | None:
    """The whole number that a value or its text is, or None."""
    try:
        if isinstance(value, str):
            value = int(value) if value.strip().lstrip("+-").isdecimal() else float(value)
        whole = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return whole if whole == value and abs(whole) < _STEP_BOUND else None
