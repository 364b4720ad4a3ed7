"""Reports a run's progress: rate, time left, lanes that have collapsed so far, and the learner's remarks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

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


def performance_level(before: np.ndarray, window: int, cadence: Cadence | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and standard deviation of each seed's performance in the last `window` steps before an onset.

    Args:
      before: the performance before the onset, `[S, T]`.
      window: the number of steps.
      cadence: the steps at which performance is measured; None for every step.

    Returns:
      Two arrays `[S]`, NaN for seeds with fewer than two measurements.
    """
    every, sparse = cadence or Cadence()
    due = due_steps(before.shape[1], every)
    data = before[:, due[due >= before.shape[1] - window]]
    measured = ~np.isnan(data) if sparse else np.ones(data.shape, bool)
    count = measured.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(measured, data, 0).sum(axis=1) / count
        squares = np.where(measured, (data - mean[:, None]) ** 2, 0).sum(axis=1)
        std = np.sqrt(squares / count)
    return np.where(count < 2, np.nan, mean), np.where(count < 2, np.nan, std)


def count_chunks(grid: Grid, plan: Plan, size: int, trained: Mapping[int, int]) -> tuple[int, int]:
    """Returns how many chunks of a plan are done, and how many there are.

    Args:
      grid: the grid of the plan.
      plan: the batches.
      size: the steps of a chunk.
      trained: the step up to which each batch that is not gathered is trained, by the batch's id.
    """
    ends = [(stop, trained.get(batch.id, batch.stop)) for batch in plan for _, stop in spans(grid, batch, size)]
    return sum(stop <= reached for stop, reached in ends), len(ends)


class ProgressBar:
    """A progress bar that counts samples of all lanes: environment steps, tokens, or else the learner's steps.

    Attributes:
      chunks_done: the number of chunks of the plan that are done.
      chunks: the number of all chunks of the plan.

    Args:
      grid: the run's grid.
      plan: the run's batches.
      size: the steps of a chunk.
      trained: the step up to which each batch that is not gathered is trained, by the batch's id.
    """

    def __init__(self, grid: Grid, plan: Plan, size: int, trained: Mapping[int, int]):
        self.chunks_done, self.chunks = count_chunks(grid, plan, size, trained)
        samples = grid.program.learner.samples_per_step
        self._samples_per_step = samples or 1
        self._collapsed: dict[int, int] = {}
        self._fork_batches: dict[int | None, list[int]] = {}
        for batch in plan:
            self._fork_batches.setdefault(batch.fork, []).append(batch.id)
        terminal = sys.stderr.isatty()
        reached = ((batch, trained.get(batch.id, batch.stop)) for batch in plan)
        self._bar = tqdm(
            total=sum(self._samples(batch, batch.onset, batch.stop) for batch in plan),
            initial=sum(self._samples(batch, batch.onset, step) for batch, step in reached),
            unit=" samples" if samples else " steps",
            unit_scale=True,
            desc="baseline",
            smoothing=0.1,
            mininterval=0.1 if terminal else 10.0,
            dynamic_ncols=terminal,
            bar_format=BAR_FORMAT,
        )

    def advance(self, batch: Batch, start: int, stop: int, collapsed: int | None) -> None:
        """Counts the chunk of steps `start` to `stop` as done.

        Args:
          batch: the batch of the chunk.
          start: the chunk's first step.
          stop: the step after the chunk's last.
          collapsed: how many lanes of the batch have collapsed; None if that is not known to have changed.
        """
        self.chunks_done += 1
        group = f"fork at {batch.onset}" if batch.disturbed else "baseline"
        batches = self._fork_batches[batch.fork]
        suffix = "" if len(batches) == 1 else f", batch {batches.index(batch.id) + 1} of {len(batches)}"
        self._bar.set_description_str(group + suffix, refresh=False)
        if batch.disturbed:
            self._collapsed[batch.id] = self._collapsed.get(batch.id, 0) if collapsed is None else collapsed
            self._bar.set_postfix_str(f"{sum(self._collapsed.values())} lanes collapsed", refresh=False)
        self._bar.update(self._samples(batch, start, stop))

    def stop_message(self, folder: Path) -> str:
        """Returns the message for a run that stops before all chunks are done."""
        return f"stopped after {self.chunks_done} of {self.chunks} chunks; go on with: jaxaudit resume {folder}"

    def _samples(self, batch: Batch, start: int, stop: int) -> int:
        return len(batch.seeds) * (stop - start) * self._samples_per_step

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()


class ProgressReporter:
    """Reports a run's progress from the telemetry of its chunks, in the order in which they are trained."""

    def __init__(self, store: Folder, grid: Grid, window: int, progress: ProgressBar):
        self.progress = progress
        self._store, self._grid, self._window = store, grid, window
        self._levels: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def report(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Updates the progress bar after a chunk with the telemetry `[T, L, ...]`."""
        if not batch.disturbed and start == batch.onset:
            self._report_remarks(batch, rows, stop - start)
        self.progress.advance(batch, start, stop, self._count_collapsed(batch, rows, start, stop))

    def _count_collapsed(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> int | None:
        """Counts the lanes that are two deviations below their level, or not finite, at the last measurement.

        Returns None for the baseline, and if performance was not measured in these steps.
        """
        cadence = self._grid.program.learner.cadence
        latest = stop // cadence.every * cadence.every - 1
        if not batch.disturbed or latest < start:
            return None
        if batch.onset not in self._levels:
            before = self._store.read_channel("baseline_performance")[:, : batch.onset]
            self._levels[batch.onset] = performance_level(before, self._window, cadence)
        mean, std = (moment[batch.seeds] for moment in self._levels[batch.onset])
        performance = np.asarray(rows[PERFORMANCE])[latest - start, : len(batch.seeds)]
        not_finite = np.isinf(performance) if cadence.sparse else ~np.isfinite(performance)
        return int(((performance < mean - 2 * std) | not_finite).sum())

    def _report_remarks(self, batch: Batch, rows: Telemetry, count: int) -> None:
        """Prints the learner's remarks on stderr and stores them in environment.json for the report."""
        lanes = {name: np.moveaxis(np.asarray(x)[:count, : len(batch.seeds)], 0, 1) for name, x in rows.items()}
        sentences = remarks(self._grid, lanes)
        for sentence in sentences:
            print(f"note: {sentence}", file=sys.stderr)
        if sentences:
            self._store.update_environment(remarks=sentences)
