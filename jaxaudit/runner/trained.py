"""What a run has trained: each batch in a folder that is its own, so that several processes can train side by side.

A batch's folder holds the telemetry of its chunks, one file each, and its latest states. The baseline's states at the
onsets are the run's, for forks begin there; they serve as the baseline's checkpoints, too.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.batches import Batch
from jaxaudit.errors import UserError
from jaxaudit.execution.driver import is_onset
from jaxaudit.execution.engine import Engine, Piece, Source
from jaxaudit.grid import Grid
from jaxaudit.learner import Telemetry
from jaxaudit.program import LaneState
from jaxaudit.runner import checkpoint
from jaxaudit.runner.checkpoint import UNFINISHED
from jaxaudit.runner.store import Folder, held

KEPT_STATES = 2

KEEPING = 0.05
"""The share of a run's time that keeping states may take, where nobody says how often they are to be kept."""

COMPLETE = "complete"


class BatchFolder:
    """The files of one batch.

    Every file appears complete or not at all. Rows of steps after the latest states are trained again, to the same
    bits.
    """

    def __init__(self, store: Folder, batch: Batch):
        self.path = store.batches / f"{batch.id:04d}"
        self._batch = batch

    @contextmanager
    def held(self) -> Iterator[None]:
        """While inside, no other process trains this batch; raises UserError if one does."""
        self.path.mkdir(parents=True, exist_ok=True)
        with held(self.path, f"batch {self._batch.id} of the run in {self.path.parents[1]}"):
            self._sweep()
            yield

    @property
    def complete(self) -> bool:
        """Whether the batch is trained to its end."""
        return (self.path / COMPLETE).exists()

    def make_complete(self) -> None:
        """Says that the batch is trained to its end."""
        (self.path / COMPLETE).touch()

    def write_rows(self, rows: Telemetry, start: int, stop: int) -> None:
        """Keeps the telemetry `[T, L, ...]` of a chunk."""
        place = self.path / f"rows-{start:08d}-{stop:08d}.npz"
        unfinished = place.with_name(f"{UNFINISHED}{place.name}")
        count = len(self._batch.seeds)
        with unfinished.open("wb") as file:
            arrays: dict[str, Any] = {name: np.asarray(x)[: stop - start, :count] for name, x in rows.items()}
            np.savez(file, **arrays)
        os.replace(unfinished, place)

    def rows(self, after: int = 0) -> Iterator[tuple[Telemetry, int, int]]:
        """The telemetry kept, by chunk: (rows, start, stop); from a step on."""
        for path in sorted(self.path.glob("rows-*.npz")):
            start, stop = (int(part) for part in re.findall(r"\d+", path.name))
            if start >= after:
                with np.load(path) as stored:
                    yield {name: stored[name] for name in stored.files}, start, stop

    def save(self, engine: Engine, states: LaneState, step: int) -> None:
        """Keeps the states at a step, and of earlier ones the latest."""
        checkpoint.save(self.state(step), engine.pieces(self._batch, states), {"step": step, "batch": self._batch.id})
        kept = [known for known in self.states() if known <= step][-KEPT_STATES:]  # a later one was damaged
        for known in self.states():
            if known not in kept:
                checkpoint.remove(self.state(known))

    def state(self, step: int) -> Path:
        """Where the states at a step are kept."""
        return self.path / f"state-{step:08d}"

    def states(self) -> list[int]:
        """The steps whose states are kept."""
        return sorted(int(path.name.removeprefix("state-")) for path in self.path.glob("state-*"))

    def _sweep(self) -> None:
        """Removes what a killed process left half written."""
        for path in self.path.glob(f"{UNFINISHED}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove(self) -> None:
        """Removes all of it."""
        shutil.rmtree(self.path, ignore_errors=True)


class InFolder:
    """The place of a run's batches: a `jaxaudit.execution.driver.Place` on disk."""

    def __init__(self, store: Folder, engine: Engine, every: int = 0):
        self.store = store
        self._engine = engine
        self._every = every
        self._chunks = 0
        self._kept, self._cost = time.monotonic(), 0.0

    def source(self, onset: int) -> Source:
        """The baseline's stored states at an onset."""
        return at_onset(self.store, self._engine, onset)

    def restored(self, engine: Engine, batch: Batch) -> tuple[int, LaneState] | None:
        """The latest undamaged states of a batch."""
        step = standing(self.store, engine.grid, batch)
        if step is None:
            return None
        path = _path(self.store, engine.grid, batch, step)
        return step, engine.restored(checkpoint.load(path, engine.lane_shapes(batch)), batch)

    def reached(self, engine: Engine, batch: Batch, states: LaneState, step: int) -> None:
        """Keeps the baseline's states at onsets, and others as often as they are to be kept."""
        if is_onset(engine.grid, batch, step):
            path = self.store.checkpoints / onset_name(step, batch)
            checkpoint.save(path, engine.pieces(batch, states), {"step": step, "batch": batch.id})
        elif batch.onset < step < batch.stop and self.due():
            begun = time.monotonic()
            BatchFolder(self.store, batch).save(engine, states, step)
            self._kept = time.monotonic()
            self._cost = self._kept - begun

    def due(self) -> bool:
        """Whether states are to be kept now: after so many chunks, or as often as takes `KEEPING` of the time."""
        self._chunks += 1
        if self._every:
            return self._chunks % self._every == 0
        return KEEPING * (time.monotonic() - self._kept) >= self._cost

    def rows(self, batch: Batch, rows: Telemetry, start: int, stop: int) -> None:
        """Keeps telemetry."""
        BatchFolder(self.store, batch).write_rows(rows, start, stop)


def onset_name(onset: int, batch: Batch | None = None) -> str:
    """Name of the checkpoint of one of the baseline's batches, the first unless given, at an onset."""
    return f"onset-{onset:08d}" + (f"-{batch.id:04d}" if batch is not None and batch.id else "")


def standing(store: Folder, grid: Grid, batch: Batch) -> int | None:
    """The step of a batch's latest undamaged states; None where it begins.

    Damaged ones are passed over, and removed, with a word on stderr. The baseline does not go on beyond an onset whose
    states are lost.
    """
    folder = BatchFolder(store, batch)
    steps = folder.states()
    if not batch.disturbed:
        onsets = [fork.onset for fork in grid.forks]
        lost = next((onset for onset in onsets if not _undamaged(store.checkpoints / onset_name(onset, batch))), None)
        steps = sorted({step for step in (*steps, *onsets) if lost is None or step < lost})
    for step in reversed(steps):
        path = _path(store, grid, batch, step)
        try:
            checkpoint.verify(path)
        except checkpoint.Damaged as damage:
            print(f"note: {damage}; going back to the one before it", file=sys.stderr)
            checkpoint.remove(path)
        else:
            return step
    return None


def _undamaged(path: Path) -> bool:
    with suppress(checkpoint.Damaged):
        checkpoint.verify(path)
        return True
    return False


def forget_lost(store: Folder, grid: Grid, batch: Batch) -> bool:
    """Whether one of the baseline's batches that is trained has lost its states at an onset, with a word on stderr."""
    lost = []
    for onset in (fork.onset for fork in grid.forks):
        try:
            checkpoint.verify(store.checkpoints / onset_name(onset, batch))
        except checkpoint.Damaged as damage:
            print(f"note: {damage}; training it again", file=sys.stderr)
            lost.append(onset)
    if lost:
        BatchFolder(store, batch).remove()
    return bool(lost)


def _path(store: Folder, grid: Grid, batch: Batch, step: int) -> Path:
    onset = is_onset(grid, batch, step)
    return store.checkpoints / onset_name(step, batch) if onset else BatchFolder(store, batch).state(step)


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
            yield from checkpoint.load(path, engine.onset_shapes(), seeds)
    except checkpoint.Damaged as damage:
        raise UserError(f"{damage}, and what follows from it cannot be computed") from None
