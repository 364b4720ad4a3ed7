"""A lane's trained model from a run's folder, for other programs: the lane is trained again from its stored onset."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxaudit.analysis import datasets
from jaxaudit.core import contract
from jaxaudit.core.batches import Batch
from jaxaudit.core.learner import State, Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.driver import chunk_size, run_batch
from jaxaudit.execution.engine import Engine
from jaxaudit.runs.disk_sink import at_onset
from jaxaudit.runs.run_folder import Folder
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
                last = _Last(store, engine, int(batch.numbers[mine[0]]))
                run_batch(engine, batch, last)
                learner.save(out, contract.unwrap_functions(last.state), grid.data)
        claim.keep()
    return f"{out}: seed {grid.seeds[place]}, {labels[column]}, after {grid.steps} steps"


class _Last:
    """The place of a batch that begins from the stored onset, and of which one lane's last state is kept.

    Attributes:
      state: that lane's, of the learner, on the host; None before the end.
    """

    def __init__(self, store: Folder, engine: Engine, number: int):
        self.source = partial(at_onset, store, engine)
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
