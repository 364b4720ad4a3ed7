"""The order of a run's work: a fixed list of chunks, the baseline's and then each fork group's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from jaxaudit.grid import Grid
from jaxaudit.spec import Spec

CHUNKS_PER_RUN = 40


@dataclass(frozen=True)
class Chunk:
    """Steps `start` to `stop` of the baseline (fork None) or of a fork group."""

    fork: int | None
    start: int
    stop: int


def chunk_size(spec: Spec, grid: Grid) -> int:
    """Steps in a chunk: the spec's, or a fortieth of the run."""
    return min(spec.run.chunk or -(-grid.steps // CHUNKS_PER_RUN), grid.steps)


def schedule(grid: Grid, size: int, baseline: bool = True) -> list[Chunk]:
    """The work in order: chunks end at multiples of `size`, and the baseline's at onsets too."""
    chunks: list[Chunk] = []
    if baseline:
        onsets = {fork.onset for fork in grid.forks}
        chunks += [Chunk(None, *span) for span in _spans(0, grid.baseline_steps, size, onsets)]
    for index, fork in enumerate(grid.forks):
        chunks += [Chunk(index, *span) for span in _spans(fork.onset, grid.steps, size, set())]
    return chunks


def is_onset(grid: Grid, chunk: Chunk) -> bool:
    """Whether a chunk ends with the baseline at an onset."""
    return chunk.fork is None and any(fork.onset == chunk.stop for fork in grid.forks)


def _spans(start: int, stop: int, size: int, also: set[int]) -> list[tuple[int, int]]:
    multiples = range(-(-start // size) * size, stop, size)
    edges = {start, stop, *multiples, *(e for e in also if start < e < stop)}
    return list(pairwise(sorted(edges)))
