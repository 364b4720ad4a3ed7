"""The time of a step of each variant: undisturbed programs, timed in turns so that all meet the same slow moments."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from jaxaudit.analysis.statistics import ranks
from jaxaudit.core.batches import Batch, Plan, layout
from jaxaudit.core.grid import Grid
from jaxaudit.core.program import LaneState
from jaxaudit.execution import memory

TURNS = 11
"""How many times every program is timed; with 11 the interval of the median has a coverage of 0.99."""

SECONDS = 0.3
"""The least duration of one timing, as far as the number of steps in a run allows."""


def step_seconds(grids: Mapping[str, Grid], turns: int = TURNS) -> dict[str, list[float]]:
    """Times the undisturbed lanes of several grids, one grid after the other in each turn.

    Args:
      grids: by name; all have the same number of seeds.
      turns: how many times each is timed.

    Returns:
      for each name, seconds per step of all its lanes together, one number for each turn.
    """
    timed = {name: _Timed(grid) for name, grid in grids.items()}
    found: dict[str, list[float]] = {name: [] for name in grids}
    for _ in range(turns):
        for name, one in timed.items():
            found[name].append(one.turn())
    return found


def relative(times: Sequence[float], plain: Sequence[float], level: float = 0.95) -> dict[str, float]:
    """Returns the median over turns of the ratio of two times, `step_time`, with its interval `_low` and `_high`."""
    ratios = np.sort(np.asarray(times) / np.asarray(plain))
    low, high, coverage = ranks(ratios.size, level)
    bounds = (ratios[low - 1], ratios[high - 1]) if coverage >= level else (math.nan, math.nan)
    names = ("step_time", "step_time_low", "step_time_high")
    return dict(zip(names, map(float, (np.median(ratios), *bounds)), strict=True))


class _Timed:
    """The undisturbed program of a grid, compiled, and the state of its lanes."""

    def __init__(self, grid: Grid):
        def undisturbed(most: int | None) -> Plan:
            return [batch for batch in layout(grid, most) if not batch.disturbed]

        self._engine, plan, _ = memory.fit(grid, grid.steps, undisturbed)
        self._batch: Batch = max(plan, key=lambda batch: len(batch.seeds))
        self._steps = grid.steps
        self._each = 1
        self._begin()
        self._go()
        once = self._go()
        self._each = max(1, min(math.ceil(SECONDS / once), grid.steps - 1))
        self._begin()

    def _begin(self) -> None:
        self._states: LaneState = self._engine.initial(self._batch)
        self._at = 0

    def _go(self) -> float:
        start, stop = self._at, min(self._at + self._each, self._steps)
        begun = time.perf_counter()
        self._states, _ = self._engine.advance(self._batch, self._states, start, stop)
        self._at = stop
        return (time.perf_counter() - begun) / (stop - start)

    def turn(self) -> float:
        """Trains some steps further, or from the beginning at the end of the run, and returns seconds per step."""
        if self._at + self._each > self._steps:
            self._begin()
        return self._go()
