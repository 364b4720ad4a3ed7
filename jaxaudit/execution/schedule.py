"""The order of a grid's work: a fixed list of chunks, the baseline's and then each fork group's, batch after batch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jaxaudit.grid import Grid, Phase

CHUNKS_PER_RUN = 40


@dataclass(frozen=True)
class Chunk:
    """Steps `start` to `stop` of a phase."""

    phase: Phase
    start: int
    stop: int


def chunk_size(steps: int, chosen: int = 0) -> int:
    """Steps in a chunk: what was chosen, or a fortieth of the run."""
    return min(chosen or -(-steps // CHUNKS_PER_RUN), steps)


def schedule(grid: Grid, size: int, baseline: bool = True) -> list[Chunk]:
    """The work in order: chunks end at multiples of `size`, and the baseline's at onsets too."""
    chunks: list[Chunk] = []
    onsets = {fork.onset for fork in grid.forks}
    for phase in grid.phases(baseline):
        stop, edges = (grid.baseline_steps, onsets) if phase.fork is None else (grid.steps, set())
        chunks += [Chunk(phase, *span) for span in _spans(grid.onset(phase), stop, size, edges)]
    return chunks


def is_onset(grid: Grid, chunk: Chunk) -> bool:
    """Whether a chunk ends with the baseline at an onset."""
    return chunk.phase.fork is None and any(fork.onset == chunk.stop for fork in grid.forks)


def _spans(start: int, stop: int, size: int, also: set[int]) -> list[tuple[int, int]]:
    multiples = range(-(-start // size) * size, stop, size)
    edges = {start, stop, *multiples, *(e for e in also if start < e < stop)}
    return list(pairwise(sorted(edges)))
