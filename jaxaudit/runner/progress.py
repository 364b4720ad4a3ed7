"""The progress bar of a run: rate, time left, lanes collapsed so far."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from jaxaudit.execution.schedule import Chunk
from jaxaudit.grid import Grid, Phase
from jaxaudit.learner import PERFORMANCE, Telemetry
from jaxaudit.metrics import due_steps

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


def performance_level(before: np.ndarray, window: int, every: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each seed's performance in the last `window` steps before an onset, `[S, T]`.

    It was measured at every `every`-th step.
    """
    due = due_steps(before.shape[1], every)
    data = before[:, due[due >= before.shape[1] - window]]
    if data.shape[1] < 2:
        return np.full(len(data), np.nan), np.full(len(data), np.nan)
    return data.mean(axis=1), data.std(axis=1)


def collapsed(grid: Grid, chunk: Chunk, rows: Telemetry, level: tuple[np.ndarray, np.ndarray] | None) -> int | None:
    """Lanes of a batch that stood two deviations below their level, or at a non-finite value, when last measured.

    None where that was not in this chunk.
    """
    every = grid.program.learner.performance_every
    latest = chunk.stop // every * every - 1
    if chunk.phase.fork is None or level is None or latest < chunk.start:
        return None
    seeds = grid.cells(chunk.phase)[1]
    now = np.asarray(rows[PERFORMANCE])[latest - chunk.start, : len(seeds)]
    mean, std = level[0][seeds], level[1][seeds]
    return int(((now < mean - 2 * std) | ~np.isfinite(now)).sum())


class Progress:
    """Counts samples (env steps, tokens; learner steps where a learner does not say) over all lanes."""

    def __init__(self, grid: Grid, chunks: Sequence[Chunk], done: int, samples_per_step: int):
        self._grid = grid
        self._unit = samples_per_step or 1
        self._collapsed: dict[Phase, int] = {}
        self._batches = Counter(phase.fork for phase in grid.phases())
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=sum(self._samples(chunk) for chunk in chunks),
            initial=sum(self._samples(chunk) for chunk in chunks[:done]),
            unit=" samples" if samples_per_step else " steps",
            unit_scale=True,
            desc="baseline",
            smoothing=0.1,
            mininterval=0.1 if terminal else 10.0,
            dynamic_ncols=terminal,
            bar_format=BAR,
        )

    def advance(self, chunk: Chunk, collapsed: int | None) -> None:
        """A chunk is done; `collapsed` lanes of its batch stand collapsed now, or, None, as many as before."""
        phase = chunk.phase
        group = "baseline" if phase.fork is None else f"fork at {self._grid.onset(phase)}"
        batches = self._batches[phase.fork]
        which = "" if batches == 1 else f", batch {phase.batch + 1} of {batches}"
        self._bar.set_description_str(group + which, refresh=False)
        if phase.fork is not None:
            self._collapsed[phase] = self._collapsed.get(phase, 0) if collapsed is None else collapsed
            self._bar.set_postfix_str(f"{sum(self._collapsed.values())} lanes collapsed", refresh=False)
        self._bar.update(self._samples(chunk))

    def _samples(self, chunk: Chunk) -> int:
        return len(self._grid.numbers(chunk.phase)) * (chunk.stop - chunk.start) * self._unit

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
