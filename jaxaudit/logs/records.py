"""A log's rows as they are written, and the runs that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.logs import runs
from jaxaudit.logs.cells import MISSING, STEP_BOUND, LogColumn, is_number, whole_number
from jaxaudit.logs.log import LeftOut, Log, has_no, listed, shown
from jaxaudit.runtime.errors import UserError

STEPS = (
    "step",
    "_step",
    "global_step",
    "iteration",
    "iter",
    "update",
    "updates",
    "timestep",
    "timesteps",
    "total_timesteps",
    "total timesteps",
    "trainer/global_step",
    "train/global_step",
    "training/global_step",
    "train/step",
    "rollout/step",
    "time/total_timesteps",
    "num_updates",
    "epoch",
    "current_steps",
    "steps",
    "global_step/max_steps",
    "training_iteration",
    "timesteps_total",
    "num_env_steps_sampled_lifetime",
    "env_steps",
    "frames",
    "frame",
    "episode",
    "_tick",
)
"""Columns of steps: the first that a log has counts, in capitals or not."""

_IN_PARTS = ("epoch", "update")
"""Those that some loggers count in fractions, as 0.5 of an epoch."""

MOST_CELLS = 2**27
"""Of a table, that a file's rows make: 1 GiB as numbers."""


@dataclass(frozen=True)
class Records:
    """What a file has.

    Attributes:
      format: what it was recognised as.
      place: what its rows are: "line" or "event".
      places: of each row, its number in the file.
      columns: cells by name: numbers, texts or anything else, None where one is absent, MISSING where a row has none.
      notes: on what is left out.
    """

    format: str
    place: str
    places: list[int]
    columns: dict[str, list[Any]]
    notes: tuple[str, ...] = ()

    @classmethod
    def of_rows(
        cls, format: str, place: str, rows: Iterable[tuple[int, Mapping[str, Any]]], notes: Iterable[str] = ()
    ) -> Records:
        """Those of rows, each with its number and its cells by name.

        Raises:
          UserError: they would make too large a table.
        """
        places: list[int] = []
        columns: dict[str, list[Any]] = {}
        for number, row in rows:
            for name, cell in row.items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = []
                column.extend([MISSING] * (len(places) - len(column)))
                column.append(cell)
            places.append(number)
            if len(places) * len(columns) > MOST_CELLS:
                raise UserError(f"{place} {number}: rows and columns so far make more than {MOST_CELLS} cells")
        for column in columns.values():
            column.extend([MISSING] * (len(places) - len(column)))
        return cls(format, place, places, columns, tuple(notes))

    def log(self, path: Path, step: str | None = None) -> Log:
        """The runs.

        Raises:
          UserError: there is no such column of steps, a step is not a whole number, all are the same, or there are no
            numbers.
        """
        step = self._step_column(path, step)
        quickly = None if step is None else _whole_numbers(self.columns[step])
        rows = self if step is None or quickly is not None else self._with(step)
        steps = rows._steps(path, step) if quickly is None else quickly
        named = {name: cells for name, cells in rows.columns.items() if name != step}
        columns = {name: LogColumn.of(cells) for name, cells in named.items()}
        if not any(column.present.any() and not column.is_text for column in columns.values()):
            raise UserError(f"{path} has no column of numbers beside its steps; it has: {listed(self.columns)}")
        notes, left_out = list(self.notes), list(rows._left_out(self, step))
        parts = list(rows._parts(steps, named, columns, left_out))
        every = len({int(at) for part in parts for at in part.steps})
        if step is not None and every == 1 < len(steps) and _repeats_channels(parts):
            raise UserError(f"{path}: all {len(steps)} rows have {shown(step)} {steps[0]}, where steps must differ")
        if step is None:
            notes.append("there is no column of steps, so rows are counted from 0")
        found = [run for part in parts for run in runs.runs_of(str(path), part, notes)]
        notes += rows._odd(columns)
        if len(found) == 1:
            notes += runs.gaps(found[0].latest.steps)
        return Log(path, self.format, step, tuple(found), tuple(left_out), tuple(notes))

    def _parts(
        self,
        steps: np.ndarray,
        cells: Mapping[str, list[Any]],
        columns: Mapping[str, LogColumn],
        left_out: list[LeftOut],
    ) -> Iterator[runs.Part]:
        """The rows of each run, as far as columns tell; adds what these say of it to what is left out."""
        told = runs.told_apart_by(cells, len(steps))
        labels: dict[tuple[Any, ...], np.ndarray] = {(): np.arange(len(steps))}
        if told:
            left_out.append(LeftOut(tuple(told), "as what tells runs apart"))
            labels = runs.grouped(list(zip(*(map(str, cells[name]) for name in told), strict=True)))
            columns = {name: column for name, column in columns.items() if name not in told}
        if (table := runs.by_metric(cells, columns)) is not None:
            columns = self._pivoted(cells[table[0]], columns[table[1]])
            left_out.append(LeftOut(table, "as each line has one channel's name and value"))
        texts = {name: column for name, column in columns.items() if column.is_text}
        numbers = {name: column for name, column in columns.items() if not column.is_text and column.present.any()}
        if texts:
            left_out.append(LeftOut(tuple(texts), "as not of numbers"))
        whole = runs.Part("", steps, numbers, texts)
        if runs.of_several_runs([name for name in numbers if not name.endswith(runs.EXTREMES)]):
            extremes = tuple(name for name in numbers if name.endswith(runs.EXTREMES))
            if extremes:
                left_out.append(LeftOut(extremes, "as the least and the largest of what is averaged"))
            yield from _by_prefix(whole)
            return
        for label, rows in labels.items():
            words = ", ".join(f"{name} {shown(text)}" for name, text in zip(told, label, strict=True))
            yield whole if len(labels) == 1 else whole.of_rows(words, rows)

    def _pivoted(self, names: list[Any], values: LogColumn) -> dict[str, LogColumn]:
        """A column for each metric of a table that has a line for each."""
        found = {}
        odd = dict(values.odd)
        for name, rows in runs.grouped([(str(name),) for name in names]).items():
            here = np.full(len(names), np.nan)
            present = np.zeros(len(names), bool)
            here[rows], present[rows] = values.values[rows], values.present[rows]
            found[name[0]] = LogColumn(here, present, tuple((row, odd[row]) for row in rows.tolist() if row in odd))
        return found

    def _step_column(self, path: Path, given: str | None) -> str | None:
        if given is not None:
            if given not in self.columns:
                raise UserError(f"{path} {has_no('column', given, self.columns)}")
            return given
        folded = {name.casefold(): name for name in reversed(list(self.columns))}
        for wanted in STEPS:
            if wanted in folded and not (wanted in _IN_PARTS and self._has_fractions(folded[wanted])):
                return folded[wanted]
        return None

    def _has_fractions(self, name: str) -> bool:
        """Whether a column counts in parts of what it names; such are no steps."""
        column = LogColumn.of(self.columns[name])
        values = column.values[column.present & np.isfinite(column.values)]
        return bool((values != np.floor(values)).any())

    def _with(self, step: str) -> Records:
        """The records without the rows that have no step, or a blank one where another column of steps has one."""
        others = [cells for name, cells in self.columns.items() if name.casefold() in STEPS and name != step]
        kept = []
        for row, cell in enumerate(self.columns[step]):
            blank = cell is None or (isinstance(cell, str) and not cell.strip())
            if cell is not MISSING and not (blank and any(is_number(cells[row]) for cells in others)):
                kept.append(row)
        if not kept or len(kept) == len(self.places):
            return self
        columns = {name: [cells[row] for row in kept] for name, cells in self.columns.items()}
        return replace(self, places=[self.places[row] for row in kept], columns=columns)

    def _steps(self, path: Path, step: str | None) -> np.ndarray:
        if step is None:
            return np.arange(len(self.places))
        cells = self.columns[step]
        steps = np.zeros(len(cells), np.int64)
        for row, cell in enumerate(cells):
            whole = cell if type(cell) is int and abs(cell) < 2**62 else whole_number(cell)
            if whole is None:
                raise UserError(
                    f"{path}: {self.place} {self.places[row]} has {shown(step)} '{shown(cell)}', "
                    "which must be a whole number"
                )
            steps[row] = whole
        return steps

    def _left_out(self, whole: Records, step: str | None) -> Iterator[LeftOut]:
        if step is None:
            return
        without = len(whole.places) - len(self.places)
        if without:
            yield LeftOut((f"{without} of {len(whole.places)} {self.place}s",), f"as without '{shown(step)}'")

    def _odd(self, columns: Mapping[str, LogColumn]) -> Iterator[str]:
        for name, column in columns.items():
            if column.odd and not column.is_text:
                row, text = column.odd[0]
                more = f", and {len(column.odd) - 1} more of its values are" if len(column.odd) > 1 else ""
                yield (
                    f"{self.place} {self.places[row]} has {shown(name)} '{shown(text)}', which is no number{more}; "
                    "counted as not finite"
                )


def _whole_numbers(cells: list[Any]) -> np.ndarray | None:
    """Texts of whole numbers; None where a cell is anything else, or a number too large."""
    if not all(type(cell) is str for cell in cells):
        return None
    try:
        steps = np.fromiter(map(int, cells), np.int64, len(cells))
    except (ValueError, OverflowError):
        return None
    return steps if ((steps > -STEP_BOUND) & (steps < STEP_BOUND)).all() else None


def _repeats_channels(parts: list[runs.Part]) -> bool:
    """Whether every channel has a value in more than one row."""
    return all((column.present.sum() > 1) for part in parts for column in part.columns.values())


def _by_prefix(part: runs.Part) -> Iterator[runs.Part]:
    """The runs of a W&B chart's export, whose columns begin with their names."""
    found: dict[str, dict[str, LogColumn]] = {}
    for name, column in part.columns.items():
        if not name.endswith(runs.EXTREMES):
            run, _, metric = name.rpartition(runs.OF_RUN)
            found.setdefault(run, {})[metric] = column
    for run, columns in found.items():
        yield runs.Part(shown(run), part.steps, columns, {})
