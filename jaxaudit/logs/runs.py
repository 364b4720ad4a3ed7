"""Rows of a log dealt out to runs, and a run's to its attempts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxaudit.logs.cells import LogColumn
from jaxaudit.logs.log import Attempt, LogRun, Series

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
