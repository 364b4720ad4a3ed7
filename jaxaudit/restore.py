"""Which checkpoints a run writes and keeps, and where it goes on after a stop.

A checkpoint is named by how many chunks were done and holds the states of the phase they ended in. The
baseline's states at the onsets are kept for good, for the forks; they serve as checkpoints too.
"""

from __future__ import annotations

import sys

from jaxaudit import checkpoint
from jaxaudit.engine import Engine
from jaxaudit.errors import UserError
from jaxaudit.grid import LaneState
from jaxaudit.schedule import Chunk, is_onset
from jaxaudit.store import Folder

KEPT_CHECKPOINTS = 2


def onset_name(onset: int) -> str:
    """Name of the checkpoint of the baseline at an onset."""
    return f"onset-{onset:08d}"


def save(store: Folder, engine: Engine, chunk: Chunk, states: LaneState, done: int) -> None:
    """Writes the checkpoint after `done` chunks, `chunk` the last; keeps two, and those at onsets."""
    name = onset_name(chunk.stop) if is_onset(engine.grid, chunk) else f"chunk-{done:06d}"
    note = {"chunks_done": done, "step": chunk.stop, "fork": chunk.fork}
    checkpoint.save(store.checkpoints / name, engine.stored(chunk.fork, states), note)
    numbers = _numbers(store)
    kept = [n for n in numbers if n <= done][-KEPT_CHECKPOINTS:]  # a later one was passed over by `restore`
    for number in numbers:
        if number not in kept:
            checkpoint.remove(store.checkpoints / f"chunk-{number:06d}")


def restore(store: Folder, engine: Engine, chunks: list[Chunk]) -> tuple[int, LaneState | None]:
    """How many chunks are done, and the states there (None: the next chunk begins its phase).

    A damaged checkpoint is passed over for the one before it, with a word on stderr.
    """
    onsets = {n: onset_name(c.stop) for n, c in enumerate(chunks, 1) if is_onset(engine.grid, c)}
    most = _most(store, onsets, len(chunks))
    places: dict[int, str | None] = {n: name for n, name in onsets.items() if n <= most}
    for number in _numbers(store):
        if number <= most:
            places[number] = f"chunk-{number:06d}"
            if (fork := chunks[number - 1].fork) is not None:  # so its group begins after work that was done
                places[next(i for i, c in enumerate(chunks) if c.fork == fork)] = None
    for done in sorted(places, reverse=True):
        name = places[done]
        if name is None:
            return done, None
        fork = chunks[done - 1].fork
        try:
            stored, _ = checkpoint.load(store.checkpoints / name, engine.stored_shapes(fork))
        except checkpoint.Damaged as damage:
            print(f"note: {damage}; going back to the one before it", file=sys.stderr)
        else:
            return done, engine.restored(fork, stored)
    return 0, None


def at_onset(store: Folder, engine: Engine, onset: int) -> LaneState:
    """The baseline's stored states at an onset. Raises UserError if they are damaged."""
    if onset == 0:
        return engine.initial()
    try:
        return checkpoint.load(store.checkpoints / onset_name(onset), engine.stored_shapes(None))[0]
    except checkpoint.Damaged as damage:
        raise UserError(f"{damage}, and what follows from it cannot be computed") from None


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
