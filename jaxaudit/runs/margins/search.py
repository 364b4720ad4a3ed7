"""`margin(...)`: the magnitude at which half of the seeds collapse, by bisection; and the training of its lanes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from jaxaudit.analysis.metrics import Cadence, MetricSettings, collapse_time
from jaxaudit.analysis.results import has_trend
from jaxaudit.core.batches import Batch, layout, padded_width
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid, plan
from jaxaudit.core.learner import Learner, Telemetry
from jaxaudit.core.perturbation import Chain, Perturbation, control
from jaxaudit.core.program import Execution
from jaxaudit.execution import memory
from jaxaudit.execution.autotune import autotune_local
from jaxaudit.execution.driver import BatchSink, MemorySink, chunk_size, run_batch
from jaxaudit.execution.engine import Engine, Source
from jaxaudit.runs.margins.bisection import CONTROL, Probe, SearchConfig, next_round
from jaxaudit.runs.margins.directions import directions
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runtime.tracing import MatmulPrecision

Criterion = Literal["divergence", "collapse"]
CRITERIA: tuple[Criterion, ...] = ("divergence", "collapse")

LANES_PER_CPU = 64
LANES_PER_ACCELERATOR = 256

TrainPools = Callable[[int, Sequence[list[Probe]]], Iterator[list[Probe]]]
"""Trains pools of probes, side by side within a pool, from the onset of a fork group, given by its index.

Yields each pool when the collapse times of its probes are set.
"""


@dataclass(frozen=True)
class MarginSettings:
    """How margins are searched.

    Attributes:
      tolerance: the relative tolerance of the margin, and of its interval's ends where they are near to it.
      reach: the search extends to this many times the given magnitudes, in either direction.
      criterion: what counts: "divergence", T_c before half of the run (P_div, Table S5), or "collapse", any T_c.
      level: the confidence level of the intervals.
      lanes: the largest number of lanes side by side; fewer are trained if memory holds fewer. None: one for each seed
        and perturbation, or several on an accelerator, as long as more lanes make the device faster.

    Raises:
      ValueError: a value is out of range.
    """

    tolerance: float = 0.02
    reach: float = 1000.0
    criterion: Criterion = "divergence"
    level: float = 0.95
    lanes: int | None = None

    def __post_init__(self) -> None:
        if not 1e-5 <= self.tolerance <= 1:
            raise ValueError(f"tolerance must be from 0.00001 to 1, not {self.tolerance!r}")
        if not 1 <= self.reach <= 1e12:
            raise ValueError(f"reach must be from 1 to 1e12, not {self.reach!r}")
        if self.criterion not in CRITERIA:
            raise ValueError(f"criterion must be {' or '.join(CRITERIA)}, not {self.criterion!r}")
        if not 0 < self.level < 1:
            raise ValueError(f"level must lie between 0 and 1, not {self.level!r}")
        if self.lanes is not None and (isinstance(self.lanes, bool) or self.lanes < 1):
            raise ValueError(f"lanes must be at least 1, not {self.lanes!r}")


def margin(
    learner: Learner,
    perturbations: Sequence[Perturbation | Chain],
    *,
    seeds: int | Sequence[int] = 8,
    steps: int,
    settings: MetricSettings | None = None,
    execution: Execution = "vmap",
    devices: Sequence[jax.Device] | None = None,
    model_devices: int = 1,
    matmul_precision: MatmulPrecision = "float32",
    **search: Any,
) -> Margins:
    """Searches the magnitude of each perturbation at which half of the seeds collapse.

    The threshold of every seed is bisected. All lanes are trained by one compiled program, from one baseline. The
    median of the thresholds is the margin. Its interval lies between order statistics and holds for any distribution of
    thresholds. `jaxaudit.runs.margins.directions` says how magnitudes are ordered.

    Args:
      learner: what is trained.
      perturbations: what is searched; the search begins at their magnitudes.
      seeds: the number of seeds, or the seeds.
      steps: the length of a run.
      settings: windows of the metrics.
      execution: how a device runs its lanes, as in `audit`.
      devices: the devices that lanes are distributed over; all of JAX's by default.
      model_devices: the number of devices that share a lane, as in `audit`.
      matmul_precision: of float32 products on GPUs and TPUs, as in `audit`.
      **search: tolerance, reach, criterion, level, lanes; see `MarginSettings`.

    Returns:
      `Margins`: `table` has one row for every perturbation, and `outcomes` one for every lane that was trained.

    Raises:
      ValueError: as `audit`; also if all magnitudes of a perturbation are neutral or infinite, if there is no
        perturbation, or if an onset is before step 2, where J_pre is undefined.
    """
    margin_settings = MarginSettings(**search)
    chunk = chunk_size(steps)
    planned = plan(
        learner,
        perturbations,
        seeds=seeds,
        steps=steps,
        execution=execution,
        devices=devices,
        model_devices=model_devices,
        matmul_precision=matmul_precision,
        tail=0,
    )
    grid, _ = autotune_local(planned, chunk)
    config = configure_search(grid, perturbations, margin_settings)
    engine, batches, config = prepare_engine(grid, config, chunk, baseline=True)
    fork_point_of = train_baseline(engine, batches, settings or MetricSettings())
    probes: list[Probe] = []
    for _ in run_rounds(grid, config, probes, sequential_trainer(engine, config, fork_point_of)):
        pass
    fork_points = map(fork_point_of, range(len(grid.forks)))
    trending = tuple(p.onset for p in fork_points if has_trend(p.baseline_performance, p.settings.window))
    return Margins(config, tuple(probes), grid.seeds, margin_settings.criterion, steps, trending)


def configure_search(
    grid: Grid, perturbations: Sequence[Perturbation | Chain], settings: MarginSettings
) -> SearchConfig:
    """Returns the directions in which a grid's perturbations are searched, and how. Raises ValueError as `margin`."""
    searched = directions(perturbations, grid.steps, len(grid.seeds), settings.reach)
    if not searched:
        raise ValueError("nothing is disturbed, so there is no margin to search")
    early = [fork.onset for fork in grid.forks if fork.onset < 2]
    if early:
        raise ValueError(f"onset {early[0]} leaves no steps to measure J_pre on, which takes 2; take a later one")
    # No step after an onset in the run's second half counts for P_div, so any collapse counts there.
    last = grid.steps / 2 if settings.criterion == "divergence" else 0
    limits = {fork.onset: last if fork.onset < last else math.inf for fork in grid.forks}
    lanes = settings.lanes or _default_lanes(grid, len(searched) * len(grid.seeds))
    return SearchConfig(tuple(searched), limits, settings.tolerance, settings.level, lanes)


def _default_lanes(grid: Grid, thresholds: int) -> int:
    """Returns one lane for each threshold, or several on accelerators, but not more than speed up the device."""
    groups = grid.program.groups
    if grid.program.devices[0].platform == "cpu":
        return min(thresholds, groups * LANES_PER_CPU)
    return min(4 * thresholds, groups * LANES_PER_ACCELERATOR)


def prepare_engine(
    grid: Grid, config: SearchConfig, chunk: int, baseline: bool, processes: int = 1
) -> tuple[Engine, list[Batch], SearchConfig]:
    """Returns an engine, the baseline's batches, and the config with as many lanes as memory holds.

    Args:
      grid: the lanes' grid.
      config: the search; `lanes` is the largest number of lanes side by side.
      chunk: the steps that a program advances at a time.
      baseline: whether the baseline is to be trained, too; there are no batches otherwise.
      processes: the number of processes that share the memory.

    Raises:
      UserError: there is too little memory.
    """

    def batches(most: int | None) -> list[Batch]:
        lanes = min(config.lanes, most or config.lanes)
        unassigned = np.zeros(lanes, int)
        width = padded_width(grid.program, lanes)
        pool = Batch(0, 0, grid.forks[0].onset, grid.steps, 0, unassigned, unassigned, (), width)
        return [*(batch for batch in layout(grid, most) if baseline and not batch.disturbed), pool]

    engine, fitting, _ = memory.fit(replace(grid, batch=None), chunk, batches, beside=processes)
    return engine, [batch for batch in fitting if not batch.disturbed], replace(config, lanes=fitting[-1].width)


@dataclass(frozen=True)
class ForkPoint:
    """The state of the baseline at an onset, from which probes are trained.

    Attributes:
      fork: the index of the onset's fork group in the grid.
      onset: the step.
      source: the baseline's states at the onset.
      baseline_performance: the baseline's performance before the onset, at the steps `baseline_steps`, `[S, W]`.
      settings: windows of the metrics.
    """

    fork: int
    onset: int
    source: Source
    baseline_performance: np.ndarray
    settings: MetricSettings


def train_baseline(engine: Engine, batches: Sequence[Batch], settings: MetricSettings) -> Callable[[int], ForkPoint]:
    """Trains the baseline up to the last onset, and returns a function that maps a fork group's index to its point."""
    grid = engine.grid
    sink = MemorySink(grid, telemetry=False)
    for batch in batches:
        run_batch(engine, batch, sink)

    def fork_point(fork: int) -> ForkPoint:
        onset = grid.forks[fork].onset
        performance = sink.trained[:, baseline_steps(onset, grid, settings)]
        return ForkPoint(fork, onset, sink.source(onset), performance, settings)

    return fork_point


def baseline_steps(onset: int, grid: Grid, settings: MetricSettings) -> slice:
    """Returns the steps before an onset that J_pre is computed from.

    The first one is a step at which J is measured, so that the cadence counts from it as from step 0.
    """
    every = grid.program.learner.cadence.every
    return slice(max(0, onset - settings.window) // every * every, onset)


def run_rounds(grid: Grid, config: SearchConfig, probes: list[Probe], train: TrainPools) -> Iterator[list[Probe]]:
    """Runs a search to its end and appends the new probes to `probes`. Probes that are not trained yet come first.

    Yields the probes of every round when it is planned, and every pool of probes when it is trained.

    Args:
      grid: the grid whose fork groups are searched.
      config: the search.
      probes: the probes of an earlier search, or of a run.
      train: trains pools of probes.
    """
    for fork, group in enumerate(grid.forks):
        while True:
            new = pending_probes(probes, group.onset)
            if not new:
                new = next_round(config, group.onset, probes)
                probes += new
            if not new:
                break
            yield new
            yield from train(fork, [new[i : i + config.lanes] for i in range(0, len(new), config.lanes)])


def sequential_trainer(
    engine: Engine,
    config: SearchConfig,
    fork_point_of: Callable[[int], ForkPoint],
    advance: Callable[..., Any] | None = None,
) -> TrainPools:
    """Returns a function that trains pools by one engine, one after the other.

    Args:
      engine: the engine of `prepare_engine`.
      config: the search.
      fork_point_of: returns the fork point of a fork group, by its index; called only if there are pools to train.
      advance: replaces the engine's `advance`, by one that can be interrupted, for example.
    """

    def train(fork: int, pools: Sequence[list[Probe]]) -> Iterator[list[Probe]]:
        fork_point = fork_point_of(fork)
        for pool in pools:
            train_pool(engine, config, fork_point, pool, advance or engine.advance)
            yield pool

    return train


def pending_probes(probes: Sequence[Probe], onset: int) -> list[Probe]:
    """Returns the probes of an onset that are planned and not trained."""
    return [p for p in probes if p.onset == onset and p.collapse_time is None]


def train_pool(
    engine: Engine, config: SearchConfig, fork_point: ForkPoint, probes: Sequence[Probe], advance: Callable[..., Any]
) -> None:
    """Trains probes side by side and sets their collapse times.

    Training stops when a collapse before the limit would have been recognised, `hold` steps after the limit.
    """
    grid, settings = engine.grid, fork_point.settings
    limit, stop = config.limits[fork_point.onset], grid.steps
    if math.isfinite(limit):
        stop = min(stop, math.ceil(limit) + settings.hold - 1)
    seeds = np.array([p.seed for p in probes])
    conditions = tuple(
        control(p.onset) if p.direction == CONTROL else config.directions[p.direction].condition(p.log_scale)
        for p in probes
    )
    batch = Batch(0, fork_point.fork, fork_point.onset, stop, 0, seeds, seeds * 0, conditions, config.lanes)
    sink = _PerformanceSink(fork_point)
    run_batch(engine, batch, sink, advance)
    series = np.concatenate([fork_point.baseline_performance[seeds], *sink.chunks], axis=1)
    n_before = fork_point.baseline_performance.shape[1]
    times = collapse_times(series, n_before, settings, grid.program.learner.cadence)
    for probe, time in zip(probes, times, strict=True):
        probe.collapse_time = float(time) + fork_point.onset - n_before


class _PerformanceSink(BatchSink):
    """A sink that begins at a fork point and keeps the performance of each chunk, `[L, T]`."""

    def __init__(self, fork_point: ForkPoint):
        self.chunks: list[np.ndarray] = []
        self._fork_point = fork_point

    def source(self, onset: int) -> Source:
        return self._fork_point.source

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        self.chunks.append(np.asarray(rows[PERFORMANCE])[: stop - start, : len(batch.seeds)].T)


def collapse_times(series: np.ndarray, onset: int, settings: MetricSettings, cadence: Cadence) -> np.ndarray:
    """Returns the collapse times T_c of lanes that share an onset, float64 `[L]`, from their performance `[L, T]`."""
    return np.asarray(_collapse_times(series, onset, settings.window, settings.hold, cadence), np.float64)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _collapse_times(performance: Any, onset: Any, window: int, hold: int, cadence: Cadence) -> jax.Array:
    return jax.vmap(lambda lane: collapse_time(lane, onset, window=window, hold=hold, **cadence._asdict()))(performance)
