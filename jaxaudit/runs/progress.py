"""What a run tells while it trains: rate, time left, lanes collapsed so far, and what the learner has to say."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping

import numpy as np
from tqdm import tqdm

from jaxaudit.analysis.metrics import Cadence, due_steps
from jaxaudit.core.batches import Batch, Plan
from jaxaudit.core.channel_names import PERFORMANCE
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.execution.driver import spans
from jaxaudit.runs.collect import remarks
from jaxaudit.runs.run_folder import Folder

BAR_FORMAT = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def performance_level(before: np.ndarray, window: int, when: Cadence | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each seed's performance in the last `window` steps before an onset, `[S, T]`.

    Of those at which it was measured; NaN where these are fewer than two.
    """
    every, sparse = when or Cadence()
    due = due_steps(before.shape[1], every)
    data = before[:, due[due >= before.shape[1] - window]]
    measured = ~np.isnan(data) if sparse else np.ones(data.shape, bool)
    count = measured.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(measured, data, 0).sum(axis=1) / count
        squares = np.where(measured, (data - mean[:, None]) ** 2, 0).sum(axis=1)
        std = np.sqrt(squares / count)
    return np.where(count < 2, np.nan, mean), np.where(count < 2, np.nan, std)


def count_collapsed(
    grid: Grid,
    batch: Batch,
    rows: Telemetry,
    start: int,
    stop: int,
    level: tuple[np.ndarray, np.ndarray] | None,
) -> int | None:
    """Lanes of a batch that stood two deviations below their level, or at a non-finite value, when last measured.

    None where that was not in these steps.
    """
    every, sparse = grid.program.learner.cadence
    latest = stop // every * every - 1
    if level is None or latest < start:
        return None
    now = np.asarray(rows[PERFORMANCE])[latest - start, : len(batch.seeds)]
    mean, std = level[0][batch.seeds], level[1][batch.seeds]
    lost = np.isinf(now) if sparse else ~np.isfinite(now)
    return int(((now < mean - 2 * std) | lost).sum())


def count_chunks(grid: Grid, plan: Plan, size: int, begun: Mapping[int, int]) -> tuple[int, int]:
    """How many chunks of a plan are done, and how many there are; `begun` says where batches not done stand."""
    ends = [(stop, begun.get(batch.id, batch.stop)) for batch in plan for _, stop in spans(grid, batch, size)]
    return sum(stop <= at for stop, at in ends), len(ends)


class ProgressBar:
    """Counts samples (env steps, tokens; learner steps where a learner does not say) over all lanes.

    Attributes:
      chunks_done, chunks: of the plan.
    """

    def __init__(self, grid: Grid, plan: Plan, size: int, begun: Mapping[int, int]):
        self.chunks_done, self.chunks = count_chunks(grid, plan, size, begun)
        samples = grid.program.learner.samples_per_step
        self._unit = samples or 1
        self._collapsed: dict[int, int] = {}
        self._batches = Counter(batch.fork for batch in plan)
        self._order = {
            batch.id: number for f in self._batches for number, batch in enumerate(_fork_batches(plan, f), 1)
        }
        terminal = sys.stderr.isatty()
        done = ((batch, begun.get(batch.id, batch.stop)) for batch in plan)
        self._bar = tqdm(
            total=sum(self._samples(batch, batch.onset, batch.stop) for batch in plan),
            initial=sum(self._samples(batch, batch.onset, at) for batch, at in done),
            unit=" samples" if samples else " steps",
            unit_scale=True,
            desc="baseline",
            smoothing=0.1,
            mininterval=0.1 if terminal else 10.0,
            dynamic_ncols=terminal,
            bar_format=BAR_FORMAT,
        )

    def advance(self, batch: Batch, start: int, stop: int, collapsed: int | None) -> None:
        """A chunk is done; `collapsed` lanes of its batch stand collapsed now, or, None, as many as before."""
        self.chunks_done += 1
        group = f"fork at {batch.onset}" if batch.disturbed else "baseline"
        batches = self._batches[batch.fork]
        which = "" if batches == 1 else f", batch {self._order[batch.id]} of {batches}"
        self._bar.set_description_str(group + which, refresh=False)
        if batch.disturbed:
            self._collapsed[batch.id] = self._collapsed.get(batch.id, 0) if collapsed is None else collapsed
            self._bar.set_postfix_str(f"{sum(self._collapsed.values())} lanes collapsed", refresh=False)
        self._bar.update(self._samples(batch, start, stop))

    def _samples(self, batch: Batch, start: int, stop: int) -> int:
        return len(batch.seeds) * (stop - start) * self._unit

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


def _fork_batches(plan: Plan, fork: int | None) -> list[Batch]:
    return [batch for batch in plan if batch.fork == fork]


class ProgressReporter:
    """Tells of telemetry as it comes: what the learner has to say of the beginning, and how lanes fare."""

    def __init__(self, store: Folder, grid: Grid, window: int, progress: ProgressBar):
        self.progress = progress
        self._store, self._grid, self._window = store, grid, window
        self._levels: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def tell(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Prints the progress after a chunk's telemetry `[T, L, ...]`."""
        if not batch.disturbed and start == batch.onset:
            self._tell_remarks(batch, rows, stop - start)
        if batch.disturbed and batch.onset not in self._levels:
            before = self._store.read_channel("baseline_performance")[:, : batch.onset]
            self._levels[batch.onset] = performance_level(before, self._window, self._grid.program.learner.cadence)
        level = self._levels.get(batch.onset) if batch.disturbed else None
        self.progress.advance(batch, start, stop, count_collapsed(self._grid, batch, rows, start, stop, level))

    def _tell_remarks(self, batch: Batch, rows: Telemetry, count: int) -> None:
        """On stderr, and kept for a report."""
        lanes = {name: np.moveaxis(np.asarray(x)[:count, : len(batch.seeds)], 0, 1) for name, x in rows.items()}
        said = remarks(self._grid, lanes)
        for sentence in said:
            print(f"note: {sentence}", file=sys.stderr)
        if said:
            self._store.update_environment(remarks=said)
