"""The progress bar of a run: rate, time left, lanes collapsed so far."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from jaxaudit.grid import Grid
from jaxaudit.schedule import Chunk

BAR = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Progress:
    """Counts samples (env steps, tokens; learner steps where a learner does not say) over all lanes."""

    def __init__(self, grid: Grid, chunks: Sequence[Chunk], done: int, samples_per_step: int):
        self._grid = grid
        self._unit = samples_per_step or 1
        self._collapsed: dict[int, int] = {}
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
        """A chunk is done; `collapsed` lanes of its fork group stand collapsed now."""
        if chunk.fork is not None:
            self._bar.set_description_str(f"fork at {self._grid.forks[chunk.fork].onset}", refresh=False)
            self._collapsed[chunk.fork] = collapsed or 0
            self._bar.set_postfix_str(f"{sum(self._collapsed.values())} lanes collapsed", refresh=False)
        self._bar.update(self._samples(chunk))

    def _samples(self, chunk: Chunk) -> int:
        lanes = 1 if chunk.fork is None else len(self._grid.forks[chunk.fork].conditions)
        return lanes * len(self._grid.seeds) * (chunk.stop - chunk.start) * self._unit

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.close()
