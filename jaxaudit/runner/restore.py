"""Which checkpoints a run writes and keeps, and where it goes on after a stop.

A checkpoint is named by how many chunks were done and holds the states of the phase they ended in. The
baseline's states at the onsets are kept for good, for the forks; they serve as checkpoints too.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Container, Iterator
from functools import partial
from pathlib import Path

from jaxaudit.errors import UserError
from jaxaudit.execution.engine import Engine, Piece, Source
from jaxaudit.execution.schedule import Chunk, is_onset
from jaxaudit.grid import Phase
from jaxaudit.program import LaneState
from jaxaudit.runner import checkpoint
from jaxaudit.runner.store import Folder

KEPT_CHECKPOINTS = 2


def onset_name(onset: int, batch: int = 0) -> str:
    """Name of the checkpoint of one of the baseline's batches at an onset."""
    return f"onset-{onset:08d}" + (f"-{batch:04d}" if batch else "")


def save(store: Folder, engine: Engine, chunk: Chunk, states: LaneState, done: int) -> None:
    """Writes the checkpoint after `done` chunks, `chunk` the last; keeps two, and those at onsets."""
    phase = chunk.phase
    name = onset_name(chunk.stop, phase.batch) if is_onset(engine.grid, chunk) else f"chunk-{done:06d}"
    note = {"chunks_done": done, "step": chunk.stop, "fork": phase.fork, "batch": phase.batch}
    checkpoint.save(store.checkpoints / name, engine.pieces(phase, states), note)
    numbers = _numbers(store)
    kept = [n for n in numbers if n <= done][-KEPT_CHECKPOINTS:]  # a later one was passed over by `restore`
    for number in numbers:
        if number not in kept:
            checkpoint.remove(store.checkpoints / f"chunk-{number:06d}")


def restore(store: Folder, engine: Engine, chunks: list[Chunk]) -> tuple[int, LaneState | None]:
    """How many chunks are done, and the states there (None: the next chunk begins its phase).

    A damaged checkpoint is passed over for the one before it, with a word on stderr.
    """
    onsets = {n: onset_name(c.stop, c.phase.batch) for n, c in enumerate(chunks, 1) if is_onset(engine.grid, c)}
    most = _most(store, onsets, len(chunks))
    places: dict[int, str | None] = {n: name for n, name in onsets.items() if n <= most}
    for number in _numbers(store):
        if number <= most:
            places[number] = f"chunk-{number:06d}"
            phase = chunks[number - 1].phase  # it began after work that was done
            places[next(i for i, c in enumerate(chunks) if c.phase == phase)] = None
    for done in sorted(places, reverse=True):
        name = places[done]
        if name is None:
            return done, None
        phase = chunks[done - 1].phase
        try:
            stored = _load(store.checkpoints / name, engine, phase)
        except checkpoint.Damaged as damage:
            print(f"note: {damage}; going back to the one before it", file=sys.stderr)
        else:
            ended = done == len(chunks) or chunks[done].phase != phase
            return done, None if ended else engine.restored(stored, phase)
    return 0, None


def at_onset(store: Folder, engine: Engine, onset: int) -> Source:
    """The baseline's stored states at an onset. Raises UserError, when they are taken, if they are damaged."""
    return partial(_stored, store, engine, onset)


def onset_paths(store: Folder, onset: int, seeds: Collection[int]) -> list[Path]:
    """The checkpoints that hold the baseline's states at an onset, of the seeds at some positions.

    Raises Damaged if there are none for some of them, or it cannot be told.
    """
    first = store.checkpoints / onset_name(onset)
    held = {path: checkpoint.lanes(path) for path in sorted([first, *store.checkpoints.glob(f"{first.name}-*")])}
    if missing := set(seeds).difference(*held.values()):
        raise checkpoint.Damaged(f"checkpoint {first} is without the seeds at positions {sorted(missing)}")
    return [path for path, numbers in held.items() if set(numbers) & set(seeds)]


def _stored(store: Folder, engine: Engine, onset: int, seeds: set[int]) -> Iterator[Piece]:
    try:
        for path in onset_paths(store, onset, seeds):
            yield from _load(path, engine, Phase(None), seeds)
    except checkpoint.Damaged as damage:
        raise UserError(f"{damage}, and what follows from it cannot be computed") from None


def _load(path: Path, engine: Engine, phase: Phase, wanted: Container[int] | None = None) -> Iterator[Piece]:
    return checkpoint.load(path, engine.lane_shapes(phase), wanted)


def _numbers(store: Folder) -> list[int]:
    names = (path.name.removeprefix("chunk-") for path in store.checkpoints.glob("chunk-*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _most(store: Folder, onsets: dict[int, str], most: int) -> int:
    """The most chunks that may count as done: an onset they passed must be there, or is trained again."""
    numbers = _numbers(store)
    for done, name in sorted(onsets.items(), reverse=True):
        path = store.checkpoints / name
        try:
            checkpoint.verify(path)
        except checkpoint.Damaged as damage:
            if path.exists() or any(number >= done for number in numbers):
                print(f"note: {damage}; training it again", file=sys.stderr)
            most = done - 1
    return most
