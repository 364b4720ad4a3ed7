"""A log's rows as they are written, and the runs that they make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.logs.cells import MISSING, STEP_BOUND, LogColumn, is_number, whole_number
from jaxaudit.logs.log import Attempt, LeftOut, Log, LogRun, Series, has_no, listed, shown
from jaxaudit.runtime.errors import UserError

RUN_COLUMNS = ("run", "run_id", "run_name", "run name", "exp_name", "experiment", "trial", "trial_id", "seed", "name")
"""Columns that tell runs apart where they have several values, in capitals or not."""

FIELDS = ("field", "metric", "metric_name", "name", "key", "tag", "variable", "series")
VALUES = ("value", "metric_value", "scalar", "y")
"""Columns of a table that has a line for each metric: which one it is, and its value."""

EXTREMES = ("__MIN", "__MAX")
"""Ends of names of columns that W&B exports beside each chart's."""

OF_RUN = " - "
"""Between a run's name and a metric's in the columns of W&B's chart exports."""

_NAMED = 3


@dataclass(frozen=True)
class Part:
    """Rows of one run, or of several that only their steps tell apart.

    Attributes:
      label: what tells it from other parts of the file; "" where there are none.
      steps: int64 `[R]`.
      columns: of numbers.
      texts: more texts than numbers.
    """

    label: str
    steps: np.ndarray
    columns: Mapping[str, LogColumn]
    texts: Mapping[str, LogColumn]

    def of_rows(self, label: str, rows: np.ndarray) -> Part:
        """The part that some rows make, in the order given, under another label."""
        columns, texts = ({n: _rows(c, rows) for n, c in some.items()} for some in (self.columns, self.texts))
        return Part(label, self.steps[rows], columns, texts)


def _rows(column: LogColumn, rows: np.ndarray) -> LogColumn:
    odd = tuple((0, text) for row, text in column.odd if row in set(rows.tolist())) if column.odd else ()
    return LogColumn(column.values[rows], column.present[rows], odd)


def by_metric(cells: Mapping[str, Sequence[Any]], columns: Mapping[str, LogColumn]) -> tuple[str, str] | None:
    """The columns of a table with a line for each metric that name it and have its value; None for another table."""
    folded = {name.casefold(): name for name in reversed(list(cells))}
    field = next((folded[name] for name in FIELDS if name in folded and columns[folded[name]].is_text), None)
    value = next((folded[name] for name in VALUES if name in folded and not columns[folded[name]].is_text), None)
    if field is None or value is None or len(set(map(str, cells[field]))) < 2:
        return None
    return field, value


def of_several_runs(names: Sequence[str]) -> bool:
    """Whether columns, without those of steps, are a W&B chart's: each begins with a run's name."""
    return bool(names) and all(OF_RUN in name for name in names)


def told_apart_by(cells: Mapping[str, Sequence[Any]], rows: int) -> list[str]:
    """The columns whose values are names of runs: several, and each of several rows."""
    found = []
    for name, column in cells.items():
        if name.casefold() in RUN_COLUMNS and 1 < len(set(map(str, column))) <= rows / 2:
            found.append(name)
    return found


def grouped(labels: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], np.ndarray]:
    """The rows of each label, in the order in which labels were met."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for row, label in enumerate(labels):
        groups.setdefault(label, []).append(row)
    return {label: np.array(rows) for label, rows in groups.items()}


def runs_of(name: str, part: Part, notes: list[str]) -> list[LogRun]:
    """The runs of a part: one begins where steps go back to the first, an attempt where they go back to a later one."""
    found: list[list[tuple[int, np.ndarray]]] = []
    for begins, new, rows in _stretches(part):
        if new or not found:
            found.append([])
        found[-1].append((begins, rows))
    label = f"{name} ({part.label})" if part.label else name
    runs, restarts = [], []
    twice: dict[int, None] = {}
    for number, attempts in enumerate(found, 1):
        told = label if len(found) == 1 else f"{label} (run {number} of {len(found)})"
        made: list[Attempt] = []
        before = np.zeros(0, np.int64)
        for begins, rows in attempts:
            if made:
                restarts.append((int(part.steps[before].max()), begins))
            before = np.concatenate([before[part.steps[before] < begins], rows])
            made.append(_attempt(part, begins, before))
            twice |= dict.fromkeys(_repeated(part, before))
        runs.append(LogRun(told, tuple(made)))
    notes += _restart_notes(label, len(found), restarts, twice)
    return runs


def _restart_notes(label: str, runs: int, restarts: list[tuple[int, int]], twice: Mapping[int, None]) -> Iterator[str]:
    if runs > 1:
        yield f"steps begin again {runs - 1} times, so these are {runs} runs"
    if restarts:
        last, first = restarts[0]
        more = f" and {len(restarts) - 1} times more" if len(restarts) > 1 else ""
        yield (
            f"the log goes back from step {last} to {first}{more}, as after a restart from a checkpoint; "
            "each attempt is read by itself"
        )
    if twice:
        more = f" and {len(twice) - 1} more are" if len(twice) > 1 else " is"
        yield f"step {next(iter(twice))}{more} there twice; the last value counts"


def _stretches(part: Part) -> Iterator[tuple[int, bool, np.ndarray]]:
    """Rows between returns: the step they begin at, whether it is the run's first, and the rows."""
    steps = part.steps
    if not len(steps):
        return
    if (np.diff(steps) >= 0).all():
        yield int(steps[0]), True, np.arange(len(steps))
        return
    names = list(part.columns)
    present = np.stack([part.columns[name].present for name in names], axis=1)
    latest: dict[int, int] = {}
    lowest = highest = begins = int(steps[0])
    new = True
    rows: list[int] = []
    for row, step in enumerate(steps.tolist()):
        channels = np.flatnonzero(present[row]).tolist()
        earlier = [latest[channel] for channel in channels if channel in latest] if step < highest else []
        if earlier and min(earlier) > step:
            yield begins, new, np.array(rows, np.int64)
            new, begins, rows, highest = step <= lowest, step, [], step
            latest = {} if new else {channel: min(at, step - 1) for channel, at in latest.items()}
            lowest = step if new else lowest
        lowest, highest = min(lowest, step), max(highest, step)
        latest.update(dict.fromkeys(channels, step))
        rows.append(row)
    yield begins, new, np.array(rows, np.int64)


def _repeated(part: Part, rows: np.ndarray) -> list[int]:
    """The steps at which a row has only channels that earlier ones of that step have, too, and another value of one."""
    steps, counts = np.unique(part.steps[rows], return_counts=True)
    found = []
    for step in steps[counts > 1].tolist():
        before: dict[str, float] = {}
        for row in rows[part.steps[rows] == step].tolist():
            here = {name: column.values[row] for name, column in part.columns.items() if column.present[row]}
            if here.keys() <= before.keys() and not all(
                np.array_equal(value, before[name], equal_nan=True) for name, value in here.items()
            ):
                found.append(step)
                break
            before |= here
    return found


def _attempt(part: Part, begins: int, rows: np.ndarray) -> Attempt:
    series: dict[str, Series] = {}
    texts: dict[str, Series] = {}
    for target, columns in ((series, part.columns), (texts, part.texts)):
        for name, column in columns.items():
            own = rows[column.present[rows]]
            if not len(own):
                continue
            steps = part.steps[own]
            if len(steps) > 1 and not (np.diff(steps) > 0).all():
                order = np.argsort(steps, kind="stable")
                own, steps = own[order], steps[order]
                last = np.append(np.diff(steps) > 0, True)
                own, steps = own[last], steps[last]
            target[name] = Series(steps, column.values[own])
    return Attempt(begins, series, texts)


def gaps(steps: np.ndarray) -> Iterator[str]:
    """A sentence on the stretches of int64 steps `[T]` that are missing where their usual spacing goes on.

    There is none where fewer than half are at that spacing, as where a line is logged when an episode ends.
    """
    if len(steps) < 3:
        return
    apart = np.diff(steps)
    usual = int(np.sort(apart)[(len(apart) - 1) // 2])
    if 2 * (apart == usual).sum() < len(apart):
        return
    (before,) = np.nonzero(apart // usual >= 2)
    stretches = [(int(steps[at]) + usual, int(steps[at + 1]) - usual) for at in before[:_NAMED]]
    if stretches:
        named = [f"from step {first} to {last}" if first < last else f"at step {first}" for first, last in stretches]
        more = f" and in {len(before) - _NAMED} more stretches" if len(before) > _NAMED else ""
        yield f"no telemetry {', '.join(named)}{more}; those steps count as not seen"


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
        found = [run for part in parts for run in runs_of(str(path), part, notes)]
        notes += rows._odd(columns)
        if len(found) == 1:
            notes += gaps(found[0].latest.steps)
        return Log(path, self.format, step, tuple(found), tuple(left_out), tuple(notes))

    def _parts(
        self,
        steps: np.ndarray,
        cells: Mapping[str, list[Any]],
        columns: Mapping[str, LogColumn],
        left_out: list[LeftOut],
    ) -> Iterator[Part]:
        """The rows of each run, as far as columns tell; adds what these say of it to what is left out."""
        told = told_apart_by(cells, len(steps))
        labels: dict[tuple[Any, ...], np.ndarray] = {(): np.arange(len(steps))}
        if told:
            left_out.append(LeftOut(tuple(told), "as what tells runs apart"))
            labels = grouped(list(zip(*(map(str, cells[name]) for name in told), strict=True)))
            columns = {name: column for name, column in columns.items() if name not in told}
        if (table := by_metric(cells, columns)) is not None:
            columns = self._pivoted(cells[table[0]], columns[table[1]])
            left_out.append(LeftOut(table, "as each line has one channel's name and value"))
        texts = {name: column for name, column in columns.items() if column.is_text}
        numbers = {name: column for name, column in columns.items() if not column.is_text and column.present.any()}
        if texts:
            left_out.append(LeftOut(tuple(texts), "as not of numbers"))
        whole = Part("", steps, numbers, texts)
        if of_several_runs([name for name in numbers if not name.endswith(EXTREMES)]):
            extremes = tuple(name for name in numbers if name.endswith(EXTREMES))
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
        for name, rows in grouped([(str(name),) for name in names]).items():
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


def _repeats_channels(parts: list[Part]) -> bool:
    """Whether every channel has a value in more than one row."""
    return all((column.present.sum() > 1) for part in parts for column in part.columns.values())


def _by_prefix(part: Part) -> Iterator[Part]:
    """The runs of a W&B chart's export, whose columns begin with their names."""
    found: dict[str, dict[str, LogColumn]] = {}
    for name, column in part.columns.items():
        if not name.endswith(EXTREMES):
            run, _, metric = name.rpartition(OF_RUN)
            found.setdefault(run, {})[metric] = column
    for run, columns in found.items():
        yield Part(shown(run), part.steps, columns, {})
