"""Exact replay: the stored onsets and spec, run again, compared bit for bit with the stored telemetry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxaudit.analysis import datasets
from jaxaudit.core import contract
from jaxaudit.core.batches import Batch
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.learner import State, Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.driver import chunk_size, run_batch
from jaxaudit.execution.engine import Engine
from jaxaudit.runs.disk_sink import onset_source
from jaxaudit.runs.run_folder import Folder, differences
from jaxaudit.runs.run_opening import open_finished
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.files import claimed


def export(folder: Path, out: Path, seed: int | None = None, condition: str | None = None) -> str:
    """Writes what a lane of a finished run had trained at its end, and says in a sentence what that is.

    A run keeps the states at its onsets and no last ones, so the lane's batch is trained again from there, by the
    program that made it.

    Args:
      folder: of a finished run.
      out: a new or empty folder.
      seed: the lane's; None: the first.
      condition: its label or its position; None: the first control.

    Raises:
      UserError: no run, not finished, of a learner that saves nothing, a seed or condition it does not have, a damaged
        checkpoint, or `out` is taken.
    """
    store, spec, grid = open_finished(folder)
    learner = grid.program.learner
    if learner.save is None:
        raise UserError(f"learner '{learner.name}' has nothing to export: language models have")
    labels = datasets.labels(grid)
    place = 0 if seed is None else datasets.position("seed", seed, [str(s) for s in grid.seeds])
    column = 0 if condition is None else datasets.position("condition", condition, labels)
    plan = store.read_plan(grid)
    with claimed(out) as claim:
        engine = Engine(grid, chunk_size(grid.steps, spec.run.chunk))
        for batch in plan:
            mine = np.flatnonzero((batch.seeds == place) & (batch.columns == column))
            if batch.disturbed and mine.size:
                last = _LastState(store, engine, int(batch.numbers[mine[0]]))
                run_batch(engine, batch, last)
                learner.save(out, contract.functions_as_leaves(last.state), grid.data)
        claim.keep()
    return f"{out}: seed {grid.seeds[place]}, {labels[column]}, after {grid.steps} steps"


class _LastState:
    """The place of a batch that begins from the stored onset, and of which one lane's last state is kept.

    Attributes:
      state: that lane's, of the learner, on the host; None before the end.
    """

    def __init__(self, store: Folder, engine: Engine, number: int):
        self.source = partial(onset_source, store, engine)
        self.state: State = None
        self._number = number

    def restored(self, engine: Engine, batch: Batch) -> None:
        """None: all is trained again."""

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Keeps the lane's state at the end."""
        for piece in engine.pieces(batch, states) if step == batch.stop else ():
            index = self._number - piece.first
            if 0 <= index < piece.lanes:
                self.state = jax.tree.map(lambda x, i=index: np.array(x[i]), piece.states.learner)

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> Any:
        """Telemetry is there already."""


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
      lanes: how many were compared.
      steps: how many steps of each, summed over lanes.
      deviations: largest |replayed - stored| of every channel not bitwise equal; inf where only one is finite.
      differences: what is not as it was when the run was made: (what, then, now).
    """

    lanes: int
    steps: int
    deviations: dict[str, float]
    differences: tuple[tuple[str, str, str], ...]

    @property
    def equal(self) -> bool:
        """Whether every value is bitwise what was stored."""
        return not self.deviations

    def __str__(self) -> str:
        compared = f"{self.lanes} lanes, {self.steps} lane steps"
        changed = [f"  {what}: {then} when it was run, {now} now" for what, then, now in self.differences]
        if self.equal:
            return "\n".join([f"bitwise equal: {compared}", *changed])
        worst = max(self.deviations, key=lambda name: self.deviations[name])
        lines = [f"not equal: {compared}; largest deviation {self.deviations[worst]:g} in {worst}"]
        lines += [f"  {name}: {value:g}" for name, value in sorted(self.deviations.items())]
        why = changed or ["  software, device and lane layout are as recorded: the program is not deterministic here"]
        return "\n".join([*lines, "why:", *why])


def replay(folder: Path, seed: int | None = None, condition: str | None = None) -> Replay:
    """Runs a finished run's lanes again from its stored onsets, by the program that made them, and compares.

    The baseline, and with it every condition's steps before its onset, is replayed when no condition is chosen.
    A chosen lane is compared alone, but its whole batch is computed: at another width it is not bitwise the same.

    Args:
      folder: of a finished run.
      seed: compare only this seed's lanes.
      condition: compare only this condition: its label or its position.

    Raises:
      UserError: no run, not finished, a seed or condition it does not have, or a damaged checkpoint.
    """
    store, spec, grid = open_finished(folder)
    recorded = store.read_environment()
    plan = store.read_plan(grid)
    names, labels = [str(s) for s in grid.seeds], datasets.labels(grid)
    seeds = list(range(len(names))) if seed is None else [datasets.position("seed", seed, names)]
    members = list(range(len(labels))) if condition is None else [datasets.position("condition", condition, labels)]
    engine = Engine(grid, chunk_size(grid.steps, spec.run.chunk))
    compared = _Comparison(store, engine, seeds, members)
    for batch in plan:
        if (batch.disturbed or condition is None) and compared.lanes(batch).any():
            run_batch(engine, batch, compared)
    changed = differences(recorded, grid, plan)
    now = {what: value for what, _, value in differences({}, grid, plan)}
    for what, value in recorded.get("resumed_with", {}).items():
        if value != now.get(what):
            changed.append((f"{what}, when it was resumed", value, str(now.get(what))))
    return Replay(len(seeds) * len(members), compared.steps, compared.deviations, tuple(changed))


class _Comparison:
    """The place of a replay's batches: they begin from the stored onsets, and are held against the stored telemetry.

    Attributes:
      deviations: largest deviation of every channel that differs.
      steps: lane steps compared.
    """

    def __init__(self, store: Folder, engine: Engine, seeds: list[int], members: list[int]):
        self.deviations: dict[str, float] = {}
        self.steps = 0
        self._store, self._grid, self._seeds, self._members = store, engine.grid, seeds, members
        self.source = partial(onset_source, store, engine)

    def lanes(self, batch: Batch) -> np.ndarray:
        """Which of a batch's lanes are compared."""
        mine = np.isin(batch.seeds, self._seeds)
        return mine & np.isin(batch.columns, self._members) if batch.disturbed else mine

    def restored(self, engine: Engine, batch: Batch) -> None:
        """None: all is trained again."""

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """States are not compared."""

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Compares a chunk's rows `[T, L, ...]`: a fork group's own, or the baseline's with every prefix it is."""
        count = stop - start
        mine = self.lanes(batch)
        conditions, seeds = batch.columns[mine], batch.seeds[mine]
        new = {name: np.moveaxis(np.asarray(x)[:count, : len(mine)], 0, 1)[mine] for name, x in rows.items()}
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
        """Compares lanes `[lane, step, ...]` from step `start` on."""
        first, last = conditions.min(), conditions.max()
        for name, values in new.items():
            if values.shape[1]:
                span = slice(start, start + values.shape[1])
                stored = self._store.read_channel(name, slice(first, last + 1), span)
                self._note(name, values, stored[seeds, conditions - first])

    def _note(self, name: str, new: np.ndarray, old: np.ndarray) -> None:
        """Notes the largest deviation, unless all bits agree (any NaN equals any NaN)."""
        differ = (_bits(new) != _bits(old)) & ~(np.isnan(new) & np.isnan(old))
        if differ.any():
            with np.errstate(invalid="ignore"):
                apart = np.abs(new[differ].astype(np.float64) - old[differ])
            largest = float(np.where(np.isnan(apart), np.inf, apart).max())
            self.deviations[name] = max(largest, self.deviations.get(name, 0.0))


def _bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)
