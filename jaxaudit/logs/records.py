"""The rows of a log as its file has them, and their division into runs and attempts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.logs.cells import MISSING, STEP_BOUND, LogColumn, is_number, parse_whole_number
from jaxaudit.logs.log import Attempt, LeftOut, Log, LogRun, Series, describe_missing, join_names, shorten, step_spacing
from jaxaudit.runtime.errors import UserError

STEP_COLUMNS = (
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
"""Names of step columns in order of preference, without regard to case."""

_SOMETIMES_FRACTIONAL = ("epoch", "update")
"""Names in STEP_COLUMNS that some loggers count in fractions, such as 0.5 of an epoch."""

RUN_COLUMNS = ("run", "run_id", "run_name", "run name", "exp_name", "experiment", "trial", "trial_id", "seed", "name")
"""Names of columns that distinguish runs if they have several values, without regard to case."""

METRIC_NAME_COLUMNS = ("field", "metric", "metric_name", "name", "key", "tag", "variable", "series")
METRIC_VALUE_COLUMNS = ("value", "metric_value", "scalar", "y")
"""Names of the two columns of a long table, in which each line has the name and value of one metric."""

WANDB_EXTREMES = ("__MIN", "__MAX")
"""Suffixes of the columns of minima and maxima in W&B's chart exports."""

WANDB_SEPARATOR = " - "
"""What separates the names of the run and the metric in the columns of W&B's chart exports."""

MAX_CELLS = 2**27
"""The most cells of a table: 1 GiB as float64 numbers."""

_MAX_NAMED_GAPS = 3


@dataclass(frozen=True)
class Part:
    """Rows of one run, or of several runs that only their steps distinguish.

    Attributes:
      label: What distinguishes the part from others of the file; empty if the file has one part.
      steps: int64 `[R]`.
      columns: The numeric columns by name.
      texts: The columns with more texts than numbers, by name.
    """

    label: str
    steps: np.ndarray
    columns: Mapping[str, LogColumn]
    texts: Mapping[str, LogColumn]

    def take(self, label: str, rows: np.ndarray) -> Part:
        """Returns the part that consists of the given rows, in the given order, under another label."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        texts = {name: column.take(rows) for name, column in self.texts.items()}
        return Part(label, self.steps[rows], columns, texts)


def metric_columns(cells: Mapping[str, Sequence[Any]], columns: Mapping[str, LogColumn]) -> tuple[str, str] | None:
    """Returns the columns of metric names and metric values of a long table, or None for any other table."""
    folded = {name.casefold(): name for name in reversed(list(cells))}
    names = [folded[name] for name in METRIC_NAME_COLUMNS if name in folded and columns[folded[name]].is_text]
    values = [folded[name] for name in METRIC_VALUE_COLUMNS if name in folded and not columns[folded[name]].is_text]
    if not names or not values or len(set(map(str, cells[names[0]]))) < 2:
        return None
    return names[0], values[0]


def run_columns(cells: Mapping[str, Sequence[Any]], rows: int) -> list[str]:
    """Returns the columns that distinguish runs: they have several values, and on average two or more rows for each."""
    return [
        name
        for name, column in cells.items()
        if name.casefold() in RUN_COLUMNS and 1 < len(set(map(str, column))) <= rows / 2
    ]


def group_rows(labels: Iterable[Any]) -> dict[Any, np.ndarray]:
    """Returns the row numbers of each label, in the order in which labels first occur."""
    groups: dict[Any, list[int]] = {}
    for row, label in enumerate(labels):
        groups.setdefault(label, []).append(row)
    return {label: np.array(rows) for label, rows in groups.items()}


def runs_of(name: str, part: Part, notes: list[str]) -> list[LogRun]:
    """Returns the runs of a part, and appends notes on restarts and repeated steps.

    A run begins where steps return to or before the first step of the previous run; an attempt begins where they return
    to a later one.
    """
    stretches_by_run: list[list[tuple[int, np.ndarray]]] = []
    for begins, is_new_run, rows in _split_at_returns(part):
        if is_new_run or not stretches_by_run:
            stretches_by_run.append([])
        stretches_by_run[-1].append((begins, rows))
    count = len(stretches_by_run)
    label = f"{name} ({part.label})" if part.label else name
    runs, restarts = [], []
    conflicting: dict[int, None] = {}
    for number, stretches in enumerate(stretches_by_run, 1):
        run_name = label if count == 1 else f"{label} (run {number} of {count})"
        attempts: list[Attempt] = []
        attempt_rows = np.zeros(0, np.int64)
        for begins, rows in stretches:
            if attempts:
                restarts.append((int(part.steps[attempt_rows].max()), begins))
            before_restart = attempt_rows[part.steps[attempt_rows] < begins]
            attempt_rows = np.concatenate([before_restart, rows])
            attempts.append(_attempt(part, begins, attempt_rows))
            conflicting |= dict.fromkeys(_conflicting_steps(part, attempt_rows))
        runs.append(LogRun(run_name, tuple(attempts)))
    notes += _restart_notes(count, restarts, list(conflicting))
    return runs


def _restart_notes(runs: int, restarts: list[tuple[int, int]], conflicting: list[int]) -> Iterator[str]:
    if runs > 1:
        yield f"the steps start again, so the rows are read as {runs} runs"
    if restarts:
        last, first = restarts[0]
        times = f"{len(restarts)} times, first " if len(restarts) > 1 else ""
        yield (
            f"the log goes back {times}from step {last} to {first}, as after a restart from a checkpoint; "
            "each attempt is read separately"
        )
    if conflicting:
        more = f" and {len(conflicting) - 1} more occur" if len(conflicting) > 1 else " occurs"
        yield f"step {conflicting[0]}{more} more than once with different values; the last value is used"


def _split_at_returns(part: Part) -> Iterator[tuple[int, bool, np.ndarray]]:
    """Splits a part where the steps of a channel go back.

    Channels may be logged at steps of their own, so a row goes back only if each of its known channels was logged at a
    later step before.

    Yields:
      The first step of a stretch of rows, whether a new run begins there, and the rows' numbers.
    """
    steps = part.steps
    if not len(steps):
        return
    if (np.diff(steps) >= 0).all():
        yield int(steps[0]), True, np.arange(len(steps))
        return
    present = np.stack([column.present for column in part.columns.values()], axis=1)
    latest: dict[int, int] = {}
    lowest = highest = begins = int(steps[0])
    is_new_run = True
    rows: list[int] = []
    for row, step in enumerate(steps.tolist()):
        channels = np.flatnonzero(present[row]).tolist()
        earlier = [latest[channel] for channel in channels if channel in latest] if step < highest else []
        if earlier and min(earlier) > step:
            yield begins, is_new_run, np.array(rows, np.int64)
            is_new_run, begins, rows, highest = step <= lowest, step, [], step
            if is_new_run:
                latest, lowest = {}, step
            else:
                latest = {channel: min(last, step - 1) for channel, last in latest.items()}
        lowest, highest = min(lowest, step), max(highest, step)
        latest.update(dict.fromkeys(channels, step))
        rows.append(row)
    yield begins, is_new_run, np.array(rows, np.int64)


def _conflicting_steps(part: Part, rows: np.ndarray) -> list[int]:
    """Returns the steps at which a row repeats only channels of earlier rows, and at least one with another value."""
    steps, counts = np.unique(part.steps[rows], return_counts=True)
    conflicting = []
    for step in steps[counts > 1].tolist():
        known: dict[str, float] = {}
        for row in rows[part.steps[rows] == step].tolist():
            values = {name: column.values[row] for name, column in part.columns.items() if column.present[row]}
            if values.keys() <= known.keys() and not all(
                np.array_equal(value, known[name], equal_nan=True) for name, value in values.items()
            ):
                conflicting.append(step)
                break
            known |= values
    return conflicting


def _attempt(part: Part, begins: int, rows: np.ndarray) -> Attempt:
    return Attempt(begins, _series(part.steps, part.columns, rows), _series(part.steps, part.texts, rows))


def _series(steps: np.ndarray, columns: Mapping[str, LogColumn], rows: np.ndarray) -> dict[str, Series]:
    """Returns the series of each column that is present in any of the rows; the last value of a step is used."""
    series = {}
    for name, column in columns.items():
        present_rows = rows[column.present[rows]]
        if not len(present_rows):
            continue
        own_steps = steps[present_rows]
        if len(own_steps) > 1 and not (np.diff(own_steps) > 0).all():
            order = np.argsort(own_steps, kind="stable")
            present_rows, own_steps = present_rows[order], own_steps[order]
            is_last = np.append(np.diff(own_steps) > 0, True)
            present_rows, own_steps = present_rows[is_last], own_steps[is_last]
        series[name] = Series(own_steps, column.values[present_rows])
    return series


def gap_notes(steps: np.ndarray) -> Iterator[str]:
    """Yields a sentence on the stretches of missing steps, given increasing int64 steps `[T]`.

    Nothing is yielded if fewer than half of the steps follow at the median spacing, for example if a line is logged
    whenever an episode ends.
    """
    if len(steps) < 3:
        return
    spacings, usual = np.diff(steps), step_spacing(steps)
    if 2 * (spacings == usual).sum() < len(spacings):
        return
    (before,) = np.nonzero(spacings // usual >= 2)
    gaps = [(int(steps[i]) + usual, int(steps[i + 1]) - usual) for i in before[:_MAX_NAMED_GAPS]]
    if gaps:
        named = [f"from step {first} to {last}" if first < last else f"at step {first}" for first, last in gaps]
        more = f" and in {len(before) - _MAX_NAMED_GAPS} more stretches" if len(before) > _MAX_NAMED_GAPS else ""
        yield f"there is no telemetry {', '.join(named)}{more}; those steps count as missing"


@dataclass(frozen=True)
class Records:
    """The rows of a file.

    Attributes:
      format: The name of the recognised format.
      place: What a row is in the file: "line", "entry" or "event".
      places: The number of each row in the file.
      columns: The cells by column: numbers, texts or other values, None if absent, MISSING if the row has no such cell.
      notes: Sentences on what is left out.
    """

    format: str
    place: str
    places: list[int]
    columns: dict[str, list[Any]]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_rows(
        cls, format: str, place: str, rows: Iterable[tuple[int, Mapping[str, Any]]], notes: Iterable[str] = ()
    ) -> Records:
        """Returns records made of rows, each with its number and its cells by column.

        Raises:
          UserError: The table would have more than MAX_CELLS cells.
        """
        places: list[int] = []
        columns: dict[str, list[Any]] = {}
        for number, row in rows:
            for name, cell in row.items():
                column = columns.setdefault(name, [])
                column.extend([MISSING] * (len(places) - len(column)))
                column.append(cell)
            places.append(number)
            if len(places) * len(columns) > MAX_CELLS:
                raise UserError(f"{place} {number}: the rows and columns up to here make more than {MAX_CELLS} cells")
        for column in columns.values():
            column.extend([MISSING] * (len(places) - len(column)))
        return cls(format, place, places, columns, tuple(notes))

    def to_log(self, path: Path, step: str | None = None) -> Log:
        """Returns the log with its runs.

        Args:
          path: The file, for the names of runs and for messages.
          step: The column of steps; by default the first of STEP_COLUMNS that exists, or else rows are counted.

        Raises:
          UserError: The column of steps does not exist, a step is not a whole number, all steps are the same, or no
            column is numeric.
        """
        step = self._step_column(path, step)
        rows, steps = self._rows_with_steps(path, step)
        cells = {name: column for name, column in rows.columns.items() if name != step}
        columns = {name: LogColumn.parse(column) for name, column in cells.items()}
        notes, left_out = list(self.notes), []
        if without := len(self.places) - len(rows.places):
            lines = f"{without} of {len(self.places)} {self.place}s"
            left_out.append(LeftOut((lines,), f"they have no '{shorten(step)}'"))
        parts = list(rows._parts(steps, cells, columns, left_out))
        if not any(part.columns for part in parts):
            raise UserError(f"{path} has no numeric column besides its steps; it has: {join_names(self.columns)}")
        distinct = len({int(value) for part in parts for value in part.steps})
        if step is not None and distinct == 1 < len(steps) and _repeats_channels(parts):
            raise UserError(f"{path}: all {len(steps)} rows have {shorten(step)} {steps[0]}, but steps must differ")
        if step is None:
            notes.append("there is no column of steps, so rows are counted from 0")
        runs = [run for part in parts for run in runs_of(str(path), part, notes)]
        notes += rows._text_notes(columns)
        if len(runs) == 1:
            notes += gap_notes(runs[0].latest.steps)
        return Log(path, self.format, step, tuple(runs), tuple(left_out), tuple(notes))

    def _parts(
        self,
        steps: np.ndarray,
        cells: Mapping[str, list[Any]],
        columns: Mapping[str, LogColumn],
        left_out: list[LeftOut],
    ) -> Iterator[Part]:
        """Yields the rows of each run that columns distinguish, and appends the columns that are not channels."""
        distinguishing = run_columns(cells, len(steps))
        labels: dict[tuple[str, ...], np.ndarray] = {(): np.arange(len(steps))}
        if distinguishing:
            left_out.append(LeftOut(tuple(distinguishing), "they distinguish runs"))
            labels = group_rows(zip(*(map(str, cells[name]) for name in distinguishing), strict=True))
            columns = {name: column for name, column in columns.items() if name not in distinguishing}
        if (metric := metric_columns(cells, columns)) is not None:
            columns = _pivot(cells[metric[0]], columns[metric[1]])
            left_out.append(LeftOut(metric, "each line has the name and value of one channel"))
        texts = {name: column for name, column in columns.items() if column.is_text}
        numbers = {name: column for name, column in columns.items() if not column.is_text and column.present.any()}
        if texts:
            left_out.append(LeftOut(tuple(texts), "they are not numeric"))
        averages = [name for name in numbers if not name.endswith(WANDB_EXTREMES)]
        if averages and all(WANDB_SEPARATOR in name for name in averages):
            if extremes := tuple(name for name in numbers if name.endswith(WANDB_EXTREMES)):
                left_out.append(LeftOut(extremes, "they are the minima and maxima of averaged columns"))
            yield from _split_wandb_chart(steps, {name: numbers[name] for name in averages})
            return
        part = Part("", steps, numbers, texts)
        for values, rows in labels.items():
            label = ", ".join(f"{name} {shorten(value)}" for name, value in zip(distinguishing, values, strict=True))
            yield part if len(labels) == 1 else part.take(label, rows)

    def _step_column(self, path: Path, step: str | None) -> str | None:
        if step is not None:
            if step not in self.columns:
                raise UserError(f"{path} {describe_missing('column', step, self.columns)}")
            return step
        folded = {name.casefold(): name for name in reversed(list(self.columns))}
        for name in STEP_COLUMNS:
            if name in folded and not (name in _SOMETIMES_FRACTIONAL and self._has_fractions(folded[name])):
                return folded[name]
        return None

    def _has_fractions(self, name: str) -> bool:
        column = LogColumn.parse(self.columns[name])
        values = column.values[column.present & np.isfinite(column.values)]
        return bool((values != np.floor(values)).any())

    def _rows_with_steps(self, path: Path, step: str | None) -> tuple[Records, np.ndarray]:
        """Returns the rows that have a step, and their steps, int64 `[R]`."""
        if step is None:
            return self, np.arange(len(self.places))
        if (steps := _parse_integers(self.columns[step])) is not None:
            return self, steps
        rows = self._drop_rows_without(step)
        return rows, rows._parse_steps(path, step)

    def _drop_rows_without(self, step: str) -> Records:
        """Drops the rows that have no cell for the step, or a blank cell but a step in another step column."""
        others = [cells for name, cells in self.columns.items() if name.casefold() in STEP_COLUMNS and name != step]
        kept = []
        for row, cell in enumerate(self.columns[step]):
            blank = cell is None or (isinstance(cell, str) and not cell.strip())
            if cell is not MISSING and not (blank and any(is_number(cells[row]) for cells in others)):
                kept.append(row)
        if not kept or len(kept) == len(self.places):
            return self
        columns = {name: [cells[row] for row in kept] for name, cells in self.columns.items()}
        return replace(self, places=[self.places[row] for row in kept], columns=columns)

    def _parse_steps(self, path: Path, step: str) -> np.ndarray:
        cells = self.columns[step]
        steps = np.zeros(len(cells), np.int64)
        for row, cell in enumerate(cells):
            number = cell if type(cell) is int and abs(cell) < STEP_BOUND else parse_whole_number(cell)
            if number is None:
                raise UserError(
                    f"{path}: {self.place} {self.places[row]} has {shorten(step)} '{shorten(cell)}', "
                    "which must be a whole number"
                )
            steps[row] = number
        return steps

    def _text_notes(self, columns: Mapping[str, LogColumn]) -> Iterator[str]:
        for name, column in columns.items():
            if column.texts and not column.is_text:
                row, text = column.texts[0]
                more = f", and neither are {len(column.texts) - 1} more of its values" if len(column.texts) > 1 else ""
                yield (
                    f"{self.place} {self.places[row]} has {shorten(name)} '{shorten(text)}', which is not a number"
                    f"{more}; counted as not finite"
                )


def _parse_integers(cells: list[Any]) -> np.ndarray | None:
    """Returns texts of whole numbers as int64, or None if a cell is anything else or too large."""
    if not all(type(cell) is str for cell in cells):
        return None
    try:
        steps = np.fromiter(map(int, cells), np.int64, len(cells))
    except (ValueError, OverflowError):
        return None
    return steps if ((steps > -STEP_BOUND) & (steps < STEP_BOUND)).all() else None


def _repeats_channels(parts: list[Part]) -> bool:
    """Whether every channel of every part has values in more than one row."""
    return all((column.present.sum() > 1) for part in parts for column in part.columns.values())


def _pivot(names: list[Any], values: LogColumn) -> dict[str, LogColumn]:
    """Returns one column for each metric of a long table, given the metric name and the value of each row."""
    columns = {}
    texts = dict(values.texts)
    for name, rows in group_rows(map(str, names)).items():
        numbers = np.full(len(names), np.nan)
        present = np.zeros(len(names), bool)
        numbers[rows], present[rows] = values.values[rows], values.present[rows]
        columns[name] = LogColumn(numbers, present, tuple((row, texts[row]) for row in rows.tolist() if row in texts))
    return columns


def _split_wandb_chart(steps: np.ndarray, columns: Mapping[str, LogColumn]) -> Iterator[Part]:
    """Yields the runs of a W&B chart export, in which each column's name begins with the name of its run."""
    by_run: dict[str, dict[str, LogColumn]] = {}
    for name, column in columns.items():
        run, _, metric = name.rpartition(WANDB_SEPARATOR)
        by_run.setdefault(run, {})[metric] = column
    for run, own_columns in by_run.items():
        yield Part(shorten(run), steps, own_columns, {})
