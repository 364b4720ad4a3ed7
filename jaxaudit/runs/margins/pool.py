"""Pools of lanes that train what a search for margins asks for, from one baseline and by one compiled program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxaudit.analysis.metrics import Cadence, MetricSettings, collapse_time
from jaxaudit.core.batches import Batch, layout, padded_width
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.perturbation import control
from jaxaudit.core.program import LaneState
from jaxaudit.execution import memory
from jaxaudit.execution.driver import MemorySink, run_batch
from jaxaudit.execution.engine import Engine, Source
from jaxaudit.runs.margins.rounds import CONTROL, Probe, SearchConfig, next_round

Train = Callable[[int, Sequence[list[Probe]]], Iterator[list[Probe]]]
"""Trains pools of lanes, each a probe, that begin where a fork group does; yields each when its times are noted."""


def fit(
    grid: Grid, lines: SearchConfig, rows: int, baseline: bool, beside: int = 1
) -> tuple[Engine, list[Batch], SearchConfig]:
    """An engine, the baseline's batches, and a plan with as many lanes side by side as memory holds.

    `beside` processes share the memory. Raises UserError: too little memory.
    """

    def laid_out(most: int | None) -> list[Batch]:
        lanes = min(lines.lanes, most or lines.lanes)
        nowhere = np.zeros(lanes, int)
        width = padded_width(grid.program, lanes)
        pool = Batch(0, 0, grid.forks[0].onset, grid.steps, 0, nowhere, nowhere, (), width)
        return [*(b for b in layout(grid, most) if baseline and not b.disturbed), pool]

    engine, plan, _ = memory.fit(replace(grid, batch=None), rows, laid_out, beside=beside)
    return engine, [b for b in plan if not b.disturbed], replace(lines, lanes=plan[-1].width)


@dataclass(frozen=True)
class Stage:
    """Where the lanes of one onset begin.

    Attributes:
      fork: position of the onset's fork group.
      onset: step.
      source: the baseline's states there.
      before: its performance in the steps `before` the onset, `[S, W]`.
      windows: of the metrics.
    """

    fork: int
    onset: int
    source: Source
    before: np.ndarray
    windows: MetricSettings


def baseline(engine: Engine, batches: Sequence[Batch], windows: MetricSettings) -> list[Stage]:
    """Trains the baseline up to the last onset."""
    grid = engine.grid
    held = MemorySink(grid, telemetry=False)
    for batch in batches:
        run_batch(engine, batch, held)
    return [
        Stage(
            position, fork.onset, held.source(fork.onset), held.trained[:, before(fork.onset, grid, windows)], windows
        )
        for position, fork in enumerate(grid.forks)
    ]


def before(onset: int, grid: Grid, windows: MetricSettings) -> slice:
    """The steps before an onset that J_pre needs; from one on at which steps between measurements are counted anew."""
    every = grid.program.learner.cadence.every
    return slice(max(0, onset - windows.window) // every * every, onset)


def rounds(grid: Grid, lines: SearchConfig, probes: list[Probe], train: Train) -> Iterator[list[Probe]]:
    """Searches to the end, adding to `probes`; first trains those that were planned before and not trained.

    Yields every round when it is planned, and every pool of lanes when it is trained.

    Args:
      grid: whose fork groups are searched.
      lines: what is searched.
      probes: what is known already.
      train: trains pools.
    """
    for fork, group in enumerate(grid.forks):
        while True:
            asked = pending(probes, group.onset)
            if not asked:
                asked = next_round(lines, group.onset, probes)
                probes += asked
            if not asked:
                break
            yield asked
            pools = [asked[first : first + lines.lanes] for first in range(0, len(asked), lines.lanes)]
            yield from train(fork, pools)


def in_turn(
    engine: Engine, lines: SearchConfig, stage_of: Callable[[int], Stage], advance: Callable[..., Any] | None = None
) -> Train:
    """Trains pools by an engine, one after the other.

    Args:
      engine: of `fit`.
      lines: what is searched.
      stage_of: a fork group's stage, by its position; asked for where there is something to train.
      advance: in place of the engine's, e.g. one that can be interrupted.
    """

    def train(fork: int, pools: Sequence[list[Probe]]) -> Iterator[list[Probe]]:
        stage = stage_of(fork)
        for pool in pools:
            train_pool(engine, lines, stage, pool, advance or engine.advance)
            yield pool

    return train


def pending(probes: Sequence[Probe], onset: int) -> list[Probe]:
    """What was planned at an onset and not trained."""
    return [p for p in probes if p.onset == onset and p.time is None]


def train_pool(
    engine: Engine, lines: SearchConfig, stage: Stage, probes: Sequence[Probe], advance: Callable[..., Any]
) -> None:
    """Trains a pool of lanes, each a probe, and notes their collapse times.

    No further than it takes to tell: to the limit, and a `hold` beyond it.
    """
    grid, windows = engine.grid, stage.windows
    last, steps = lines.limits[stage.onset], grid.steps
    stop = steps if math.isinf(last) else min(steps, math.ceil(last) + windows.hold - 1)
    seeds = np.array([p.seed for p in probes])
    conditions = tuple(control(p.onset) if p.ray == CONTROL else lines.rays[p.ray].condition(p.u) for p in probes)
    pool = Batch(0, stage.fork, stage.onset, stop, 0, seeds, seeds * 0, conditions, lines.lanes)
    seen = _Performance(stage)
    run_batch(engine, pool, seen, advance)
    series = np.concatenate([stage.before[seeds], *seen.rows_by_chunk], axis=1)
    known, when = stage.before.shape[1], grid.program.learner.cadence
    for probe, time in zip(probes, collapse_times(series, known, windows, when), strict=True):
        probe.time = float(time) + stage.onset - known


class _Performance:
    """A place for a pool: it begins where its stage is, and of its telemetry the performance is kept, `[L, T]`."""

    def __init__(self, stage: Stage):
        self.rows_by_chunk: list[np.ndarray] = []
        self._stage = stage

    def source(self, onset: int) -> Source:
        return self._stage.source

    def restored(self, engine: Engine, batch: Batch) -> None:
        return None

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        pass

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        self.rows_by_chunk.append(np.asarray(rows[PERFORMANCE])[: stop - start, : len(batch.seeds)].T)


def collapse_times(series: np.ndarray, onset: int, windows: MetricSettings, when: Cadence) -> np.ndarray:
    """T_c of lanes `[L, T]` that share an onset, float64 `[L]`; `when` says when J is measured."""
    return np.asarray(_collapse_times(series, onset, windows.window, windows.hold, when), np.float64)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _collapse_times(series: Any, onset: Any, window: int, hold: int, when: Cadence) -> jax.Array:
    return jax.vmap(lambda one: collapse_time(one, onset, window=window, hold=hold, **when._asdict()))(series)
