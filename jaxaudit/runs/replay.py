"""Trains lanes of a finished run again from its stored onsets: exact replay, and export of a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxaudit.analysis import datasets
from jaxaudit.core import contract
from jaxaudit.core.batches import Batch
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.learner import State, Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.driver import BatchSink, chunk_size, run_batch
from jaxaudit.execution.engine import Engine, Source
from jaxaudit.runs.disk_sink import onset_source
from jaxaudit.runs.run_folder import Folder, differences
from jaxaudit.runs.run_opening import open_finished
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import claimed


@dataclass(frozen=True)
class Replay:
    """The result of a replay.

    Attributes:
      lanes: the number of lanes that were compared.
      steps: the number of steps that were compared, summed over lanes.
      deviations: the largest |replayed - stored| of every channel that is not bitwise equal; inf where only one of the
        values is finite.
      differences: what has changed since the run was made, as (key, value then, value now).
    """

    lanes: int
    steps: int
    deviations: dict[str, float]
    differences: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether every value is bitwise equal to the stored one."""
        return not self.deviations

    def __str__(self) -> str:
        compared = f"{self.lanes} lanes, {self.steps} lane steps"
        changed = [f"  {key}: {then} when it was run, {now} now" for key, then, now in self.differences]
        if self.equal:
            return "\n".join([f"bitwise equal: {compared}", *changed])
        worst = max(self.deviations, key=lambda name: self.deviations[name])
        lines = [f"not equal: {compared}; largest deviation {self.deviations[worst]:g} in {worst}"]
        lines += [f"  {name}: {value:g}" for name, value in sorted(self.deviations.items())]
        why = changed or ["  software, device and lane layout are as recorded: the program is not deterministic here"]
        return "\n".join([*lines, "why:", *why])


def replay(folder: Path, seed: int | None = None, condition: str | None = None) -> Replay:
    """Trains a finished run's lanes again with the program that made them, and compares their telemetry.

    The baseline, and with it the steps of every condition before its onset, is replayed if no condition is chosen.
    A chosen lane is compared alone, but its whole batch is computed, since another width gives other bits.

    Args:
      folder: the folder of a finished run.
      seed: the seed whose lanes are compared; None for all.
      condition: the label or the position of the condition that is compared; None for all.

    Raises:
      UserError: there is no run, it is not finished, it has no such seed or condition, or a checkpoint is damaged.
    """
    store, spec, grid = open_finished(folder)
    recorded = store.read_environment()
    plan = store.read_plan(grid)
    names, labels = [str(s) for s in grid.seeds], datasets.condition_labels(grid)
    seeds = list(range(len(names))) if seed is None else [datasets.find_index("seed", seed, names)]
    columns = list(range(len(labels))) if condition is None else [datasets.find_index("condition", condition, labels)]
    engine = Engine(grid, chunk_size(grid.steps, spec.run.chunk))
    sink = _ComparisonSink(store, engine, seeds, columns)
    for batch in plan:
        if (batch.disturbed or condition is None) and sink.compared(batch).any():
            run_batch(engine, batch, sink)
    changed = differences(recorded, grid, plan)
    present = {key: value for key, _, value in differences({}, grid, plan)}
    for key, value in recorded.get("resumed_with", {}).items():
        if value != present.get(key):
            changed.append((f"{key}, when it was resumed", value, str(present.get(key))))
    return Replay(len(seeds) * len(columns), sink.steps, sink.deviations, tuple(changed))


class _StoredOnsetSink(BatchSink):
    """A sink whose batches start from a run's stored onsets."""

    def __init__(self, store: Folder, engine: Engine):
        self._store, self._engine = store, engine

    def source(self, onset: int) -> Source:
        return onset_source(self._store, self._engine, onset)


class _ComparisonSink(_StoredOnsetSink):
    """Compares telemetry with the stored one.

    Attributes:
      deviations: the largest deviation of every channel that differs.
      steps: the number of lane steps compared.
    """

    def __init__(self, store: Folder, engine: Engine, seeds: list[int], columns: list[int]):
        super().__init__(store, engine)
        self.deviations: dict[str, float] = {}
        self.steps = 0
        self._grid, self._seeds, self._columns = engine.grid, seeds, columns

    def compared(self, batch: Batch) -> np.ndarray:
        """Returns which lanes of a batch are compared, bool `[L]`."""
        mask = np.isin(batch.seeds, self._seeds)
        return mask & np.isin(batch.columns, self._columns) if batch.disturbed else mask

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Compares a chunk's rows `[T, L, ...]`; the baseline's also with the prefixes of all conditions."""
        count = stop - start
        mask = self.compared(batch)
        conditions, seeds = batch.columns[mask], batch.seeds[mask]
        new = {name: np.moveaxis(np.asarray(x)[:count, : len(mask)], 0, 1)[mask] for name, x in rows.items()}
        if not batch.disturbed:
            stored = self._store.read_channel("baseline_performance", slice(start, stop))[seeds]
            self._note("baseline_performance", new[PERFORMANCE], stored)
            self._compare_prefixes(new, seeds, start)
        else:
            self._compare(new, conditions, seeds, start)
        self.steps += len(seeds) * count

    def _compare_prefixes(self, new: dict[str, np.ndarray], seeds: np.ndarray, start: int) -> None:
        """Compares the baseline, `[lane, step, ...]` from step `start` on, with all conditions of later onsets."""
        forks = [fork for fork in self._grid.forks if fork.onset > start]
        for name, values in new.items() if forks else ():
            first, stop = forks[0].conditions[0], min(start + values.shape[1], forks[-1].onset)
            stored = self._store.read_channel(name, slice(first, None), slice(start, stop))[seeds]
            for fork in forks:
                columns = slice(fork.conditions[0] - first, fork.conditions[-1] + 1 - first)
                old = stored[:, columns, : fork.onset - start]
                self._note(name, np.broadcast_to(values[:, None, : old.shape[2]], old.shape), old)

    def _compare(self, new: dict[str, np.ndarray], conditions: np.ndarray, seeds: np.ndarray, start: int) -> None:
        """Compares new telemetry of a fork group's lanes with the stored one, and notes the channels that differ.

        Args:
          new: the new values by channel, `[lane, step, ...]`.
          conditions, seeds: the positions of each lane's condition and seed in the grid, int `[lane]`.
          start: the first step of `new`.
        """
        first, last = conditions.min(), conditions.max()
        for name, values in new.items():
            if values.shape[1]:
                steps = slice(start, start + values.shape[1])
                stored = self._store.read_channel(name, slice(first, last + 1), steps)
                self._note(name, values, stored[seeds, conditions - first])

    def _note(self, name: str, new: np.ndarray, old: np.ndarray) -> None:
        """Notes a channel's largest deviation unless all bits agree, where any NaN equals any NaN."""
        differ = (_bits(new) != _bits(old)) & ~(np.isnan(new) & np.isnan(old))
        if differ.any():
            with np.errstate(invalid="ignore"):
                deviations = np.abs(new[differ].astype(np.float64) - old[differ])
            largest = float(np.where(np.isnan(deviations), np.inf, deviations).max())
            self.deviations[name] = max(largest, self.deviations.get(name, 0.0))


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def export(folder: Path, out: Path, seed: int | None = None, condition: str | None = None) -> str:
    """Writes the model that a lane of a finished run had at its end, and returns a sentence that describes it.

    A run stores the states at its onsets and not the last ones, so the lane's batch is trained again from there with
    the program that made it.

    Args:
      folder: the folder of a finished run.
      out: a new or empty folder.
      seed: the lane's seed; None for the first.
      condition: the label or the position of its condition; None for the first control.

    Raises:
      UserError: there is no run, it is not finished, its learner exports nothing, it has no such seed or condition, a
        checkpoint is damaged, or `out` is taken.
    """
    store, spec, grid = open_finished(folder)
    learner = grid.program.learner
    if learner.save is None:
        raise UserError(f"learner '{learner.name}' has nothing to export: language models have")
    labels = datasets.condition_labels(grid)
    row = 0 if seed is None else datasets.find_index("seed", seed, [str(s) for s in grid.seeds])
    column = 0 if condition is None else datasets.find_index("condition", condition, labels)
    plan = store.read_plan(grid)
    with claimed(out) as claim:
        engine = Engine(grid, chunk_size(grid.steps, spec.run.chunk))
        for batch in plan:
            lanes = np.flatnonzero((batch.seeds == row) & (batch.columns == column))
            if batch.disturbed and lanes.size:
                sink = _LastStateSink(store, engine, int(batch.numbers[lanes[0]]))
                run_batch(engine, batch, sink)
                learner.save(out, contract.unwrap_functions(sink.state), grid.data)
        claim.keep()
    return f"{out}: seed {grid.seeds[row]}, {labels[column]}, after {grid.steps} steps"


class _LastStateSink(_StoredOnsetSink):
    """Keeps the learner's state of one lane at the end of its batch.

    Attributes:
      state: that state, on the host; None before the end.
    """

    def __init__(self, store: Folder, engine: Engine, number: int):
        super().__init__(store, engine)
        self.state: State = None
        self._number = number

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Keeps the learner's state of the lane that the sink was created for, if `step` is the end of the batch."""
        for piece in engine.pieces(batch, states) if step == batch.stop else ():
            index = self._number - piece.first
            if 0 <= index < piece.lanes:
                self.state = jax.tree.map(lambda x, i=index: np.array(x[i]), piece.states.learner)
