"""Pools of lanes that train what a search for margins asks for, from one baseline and by one compiled program."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax
import numpy as np

from jaxaudit.execution import memory
from jaxaudit.execution.engine import Engine, Piece, Source
from jaxaudit.execution.schedule import is_onset, schedule
from jaxaudit.grid import Grid, Phase, lanes_of
from jaxaudit.learner import PERFORMANCE
from jaxaudit.margins.rounds import CONTROL, Plan, Probe, next_round
from jaxaudit.metrics import MetricSettings, collapse_time
from jaxaudit.perturbations.core import control
from jaxaudit.program import Lanes


@dataclass(frozen=True)
class Pool(Grid):
    """A grid whose fork groups are pools of lanes, dealt out anew for every batch: any seed, at any magnitude.

    Magnitudes are data, so all batches of a search, and all searches of one width, run one compiled program.

    Attributes:
      size: the lanes of a pool, unless memory holds fewer.
      dealt: the lanes of the latest batch.
    """

    size: int = 0
    dealt: dict[Phase, tuple[Lanes, np.ndarray]] = field(default_factory=dict, compare=False)

    def count(self, group: int | None) -> int:
        """Lanes of a group."""
        return super().count(None) if group is None else self.size

    def lanes(self, phase: Phase) -> tuple[Lanes, np.ndarray]:
        """The lanes of a phase and each one's seed position."""
        return super().lanes(phase) if phase.fork is None else self.dealt[phase]

    def deal(self, lines: Plan, fork: int, probes: Sequence[Probe]) -> Phase:
        """Gives each lane of a fork group's pool a probe; lanes left over repeat the first."""
        filled = [*probes, *[probes[0]] * (self.width(fork) - len(probes))]
        conditions = [control(p.onset) if p.ray == CONTROL else lines.rays[p.ray].condition(p.u) for p in filled]
        positions = np.array([p.seed for p in filled], np.int32)
        lanes = lanes_of(self.program, np.array(self.seeds)[positions], conditions)
        phase = Phase(fork, 1 + max((phase.batch for phase in self.dealt), default=0))
        self.dealt.clear()
        self.dealt[phase] = lanes, positions
        return phase


def fit(grid: Grid, lines: Plan, rows: int, baseline: bool) -> tuple[Engine, Plan]:
    """An engine of as many of the plan's lanes as memory holds, and the plan for them. Raises UserError: too little."""
    own = {f.name: getattr(grid, f.name) for f in fields(Grid)}
    engine, _ = memory.fit(Pool(**own | {"batch": None}, size=lines.lanes), rows, baseline)
    return engine, replace(lines, lanes=engine.grid.width(0))


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


def baseline(engine: Engine, windows: MetricSettings) -> list[Stage]:
    """Trains the baseline to every onset."""
    grid = engine.grid
    pieces: dict[int, list[Piece]] = {fork.onset: [] for fork in grid.forks}
    performance = np.full((len(grid.seeds), grid.baseline_steps), np.nan, np.float32)
    states: Any = None
    for chunk in schedule(grid, engine.rows):
        if chunk.phase.fork is not None:
            break
        if chunk.start == 0:
            states = None  # before memory is taken for others
            states = engine.initial(chunk.phase)
        states, rows = engine.advance(chunk.phase, states, chunk.start, chunk.stop)
        numbers = list(grid.numbers(chunk.phase))
        performance[numbers, chunk.start : chunk.stop] = np.asarray(rows[PERFORMANCE])[
            : chunk.stop - chunk.start, : len(numbers)
        ].T
        if is_onset(grid, chunk):
            pieces[chunk.stop] += engine.copies(chunk.phase, states)
    return [
        Stage(i, f.onset, _source(pieces[f.onset]), performance[:, before(f.onset, grid, windows)], windows)
        for i, f in enumerate(grid.forks)
    ]


def before(onset: int, grid: Grid, windows: MetricSettings) -> slice:
    """The steps before an onset that J_pre needs; from one on at which steps between measurements are counted anew."""
    every = grid.program.learner.performance_every
    return slice(max(0, onset - windows.window) // every * every, onset)


def _source(pieces: list[Piece]) -> Source:
    return lambda seeds: pieces


def rounds(
    engine: Engine,
    lines: Plan,
    stage_of: Callable[[int], Stage],
    probes: list[Probe],
    advance: Callable[..., Any] | None = None,
) -> Iterator[list[Probe]]:
    """Searches to the end, adding to `probes`; first trains those that were planned before and not trained.

    Yields every round when it is planned, and every pool of lanes when it is trained.

    Args:
      engine: of `fit`.
      lines: what is searched.
      stage_of: a fork group's stage, by its position; asked for where there is something to train.
      probes: what is known already.
      advance: in place of the engine's, e.g. one that can be interrupted.
    """
    for fork, group in enumerate(engine.grid.forks):
        stage = None
        while True:
            asked = pending(probes, group.onset)
            if not asked:
                asked = next_round(lines, group.onset, probes)
                probes += asked
            if not asked:
                break
            yield asked
            stage = stage or stage_of(fork)
            for first in range(0, len(asked), lines.lanes):
                batch = asked[first : first + lines.lanes]
                _train(engine, lines, stage, batch, advance or engine.advance)
                yield batch


def pending(probes: Sequence[Probe], onset: int) -> list[Probe]:
    """What was planned at an onset and not trained."""
    return [p for p in probes if p.onset == onset and p.time is None]


def _train(engine: Engine, lines: Plan, stage: Stage, batch: Sequence[Probe], advance: Callable[..., Any]) -> None:
    """Trains a pool of lanes and notes their collapse times.

    No further than it takes to tell: to the limit, and a `hold` beyond it.
    """
    assert isinstance(engine.grid, Pool)
    last, steps, windows = lines.limits[stage.onset], engine.grid.steps, stage.windows
    stop = steps if math.isinf(last) else min(steps, math.ceil(last) + windows.hold - 1)
    phase = engine.grid.deal(lines, stage.fork, batch)
    states = engine.forked(stage.source, phase)
    series = [stage.before[engine.grid.lanes(phase)[1]]]
    for start in range(stage.onset, stop, engine.rows):
        end = min(start + engine.rows, stop)
        states, rows = advance(phase, states, start, end)
        series.append(np.asarray(rows[PERFORMANCE])[: end - start].T)
    known = stage.before.shape[1]
    every = engine.grid.program.learner.performance_every
    times = collapse_times(np.concatenate(series, axis=1), known, windows, every)
    for probe, time in zip(batch, times, strict=False):  # lanes that fill the pool up come last
        probe.time = float(time) + stage.onset - known


def collapse_times(series: np.ndarray, onset: int, windows: MetricSettings, every: int) -> np.ndarray:
    """T_c of lanes `[L, T]` that share an onset, float64 `[L]`; J is measured at every `every`-th step."""
    return np.asarray(_collapse_times(series, onset, windows.window, windows.hold, every), np.float64)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _collapse_times(series: Any, onset: Any, window: int, hold: int, every: int) -> jax.Array:
    return jax.vmap(lambda one: collapse_time(one, onset, window=window, hold=hold, every=every))(series)
