"""What has been trained of a run's batches, attempt by attempt.

Whoever trains a batch makes an attempt: a folder that nobody else writes to, so that schedulers may start a batch
twice, or one that they took for dead may live on, and nothing is lost, with no lock anywhere. A later attempt goes on
from the latest states of the earlier ones. One that has come to its end is accepted, and all attempts give the same
bits.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxaudit.core.batches import Batch
from jaxaudit.core.grid import Grid
from jaxaudit.core.learner import Telemetry
from jaxaudit.core.program import LaneState
from jaxaudit.execution.engine import Engine
from jaxaudit.runs import checkpoint
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import array_store, hosts
from jaxaudit.runtime.files import UNFINISHED, read_object, write_text

MAX_STATES = 2

MAX_TRIES = 3
"""How often an attempt tries to take over an earlier one that is not as it was a moment ago."""

BEGUN, ENDED = "begun.json", "ended.json"

COMPLETE, STOPPED, LOST = "complete", "stopped", "lost"
"""How an attempt ended: it came to the end of its batch, it was told to stop, or nobody knows."""


class Attempt:
    """The files of one attempt at a batch: telemetry of its chunks, its latest states, the baseline's at the onsets.

    Every file appears complete or not at all. Rows of steps after the latest states are trained again, to the same
    bits.
    """

    def __init__(self, path: Path, batch: Batch):
        self.path = path
        self.number = int(path.name.removeprefix("attempt-"))
        self._batch = batch

    def begin(self, step: int, worker: str, begun: float, earlier: int | None) -> None:
        """Says that it goes on from a step, who trains it since when, and whose states these are."""
        self._write(BEGUN, {"step": step, "worker": worker, "begun": begun, "from_attempt": earlier})

    def end(self, outcome: str, ended: float, compile_seconds: float) -> None:
        """Says how and when it ended, and what of its time was compilation."""
        self._write(ENDED, {"outcome": outcome, "ended": ended, "compile_seconds": compile_seconds})

    @property
    def begun(self) -> dict[str, Any] | None:
        """Returns what `begin` has written; None before."""
        return self._read(BEGUN)

    @property
    def ended(self) -> dict[str, Any] | None:
        """What `end` said; None before, and for ever if it was killed."""
        return self._read(ENDED)

    @property
    def complete(self) -> bool:
        """Whether it has trained the batch to its end."""
        return (self.ended or {}).get("outcome") == COMPLETE

    def write_rows(self, rows: Telemetry, start: int, stop: int) -> None:
        """Keeps the telemetry `[T, L, ...]` of a chunk."""
        place = self.path / f"rows-{start:08d}-{stop:08d}.npz"
        unfinished = place.with_name(f"{UNFINISHED}{place.name}")
        count = len(self._batch.seeds)
        with unfinished.open("wb") as file:
            arrays: dict[str, Any] = {name: np.asarray(x)[: stop - start, :count] for name, x in rows.items()}
            np.savez(file, **arrays)
        os.replace(unfinished, place)

    def spans(self) -> list[tuple[int, int]]:
        """The chunks whose telemetry is kept, (start, stop), in order."""
        return [(start, stop) for start, stop, _ in self._rows()]

    def rows(self, after: int = 0) -> Iterator[tuple[Telemetry, int, int]]:
        """The telemetry kept, by chunk: (rows, start, stop); from a step on."""
        for start, stop, path in self._rows():
            if start >= after:
                stored: Any = array_store.read_npz(path)
                yield stored, start, stop

    def covers(self, step: int) -> bool:
        """Whether telemetry of every step before one is kept."""
        reached = self._batch.onset
        for start, stop in self.spans():
            reached = stop if start == reached else reached
        return reached >= step

    def save(self, engine: Engine, states: LaneState, step: int) -> None:
        """Keeps the states at a step, and of earlier ones the latest."""
        checkpoint.save(self.state(step), engine.pieces(self._batch, states), self._note(step))
        if not hosts.is_leader():
            return
        kept = [known for known in self.states() if known <= step][-MAX_STATES:]  # a later one was damaged
        for known in self.states():
            if known not in kept:
                checkpoint.remove(self.state(known))

    def save_onset(self, engine: Engine, states: LaneState, step: int) -> None:
        """Keeps the baseline's states at an onset."""
        checkpoint.save(self.onset(step), engine.pieces(self._batch, states), self._note(step))

    def state(self, step: int) -> Path:
        """Where the states at a step are kept."""
        return self.path / f"state-{step:08d}"

    def onset(self, step: int) -> Path:
        """Where the baseline's states at an onset are kept, until the run has them."""
        return self.path / onset_name(step, self._batch)

    def states(self) -> list[int]:
        """Returns the steps whose states are stored."""
        return sorted(int(path.name.removeprefix("state-")) for path in self.path.glob("state-*"))

    def take_over(self, earlier: Attempt, step: int) -> None:
        """Makes an earlier attempt's telemetry and states up to a step its own, as links where these are possible."""
        for start, stop, path in earlier._rows():
            if stop <= step and start < step:
                _link_or_copy(path, self.path / path.name)
        for path in (earlier.state(step), *(p for p in earlier.path.glob("onset-*") if onset_step(p) <= step)):
            if path.exists():
                unfinished = self.path / f"{UNFINISHED}{path.name}"
                shutil.copytree(path, unfinished, copy_function=_link_or_copy)
                unfinished.rename(self.path / path.name)

    def latest(self) -> float:
        """When it last kept telemetry, or began, in seconds since the epoch."""
        return max(path.stat().st_mtime for path in [self.path / BEGUN, *self.path.glob("rows-*")])

    def clear(self) -> None:
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def forget_states(self) -> None:
        """Removes the states, which a later attempt has taken over."""
        for step in self.states():
            checkpoint.remove(self.state(step))

    def _note(self, step: int) -> dict[str, int]:
        return {"step": step, "batch": self._batch.id}

    def _rows(self) -> list[tuple[int, int, Path]]:
        found = []
        for path in sorted(self.path.glob("rows-*.npz")):
            start, stop = (int(part) for part in re.findall(r"\d+", path.name))
            found.append((start, stop, path))
        return found

    def _write(self, name: str, content: dict[str, Any]) -> None:
        write_text(self.path / name, json.dumps(content))

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            return read_object(self.path / name)
        except FileNotFoundError:
            return None


def _link_or_copy(source: Any, target: Any) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class ResumePoint:
    """How far a batch has been trained.

    Attributes:
      step: of its latest undamaged states.
      states: where they are.
      attempt: which has telemetry of all steps before.
    """

    step: int
    states: Path
    attempt: Attempt


class BatchFolder:
    """The folder of one batch, with the attempts at training it."""

    def __init__(self, store: Folder, batch: Batch):
        self.path = store.batches / f"{batch.id:04d}"
        self._store, self._batch = store, batch

    def attempts(self) -> list[Attempt]:
        """Returns all attempts at the batch, in order."""
        return [Attempt(path, self._batch) for path in sorted(self.path.glob("attempt-*"))]

    def accepted(self) -> Attempt | None:
        """The first that has come to its end."""
        return next((attempt for attempt in self.attempts() if attempt.complete), None)

    def newest(self) -> Attempt | None:
        """Returns the attempt that began last; None where there is none."""
        return next((attempt for attempt in reversed(self.attempts()) if attempt.begun), None)

    def reached(self, grid: Grid) -> int:
        """The step up to which the batch is trained, as far as its states are kept."""
        if self.accepted() is not None:
            return self._batch.stop
        standing = self.standing(grid)
        return self._batch.onset if standing is None else standing.step

    def begin(self, grid: Grid, worker: str, begun: float) -> tuple[Attempt, ResumePoint | None]:
        """A new attempt, and where it goes on from; None where the batch begins.

        Meanwhile earlier attempts, not as dead as they seemed, may forget states, and the run take them.
        """
        attempt = self._make()
        for turn in range(MAX_TRIES):
            standing = self.standing(grid)
            if standing is None:
                attempt.begin(self._batch.onset, worker, begun, None)
                return attempt, None
            step, earlier = standing.step, standing.attempt
            try:
                attempt.take_over(earlier, step)
            except OSError:
                if turn == MAX_TRIES - 1:
                    raise
                attempt.clear()
                continue
            attempt.begin(step, worker, begun, earlier.number)
            return attempt, ResumePoint(step, self._states(attempt, step) or standing.states, attempt)
        raise AssertionError

    def _states(self, attempt: Attempt, step: int) -> Path | None:
        """Where an attempt finds the states at a step; None where there are none."""
        places = (attempt.state(step), attempt.onset(step), self._store.checkpoints / attempt.onset(step).name)
        return next((path for path in places if path.exists()), None)

    def joined(self, number: int, step: int) -> tuple[Attempt, Path | None]:
        """The attempt of a number, which another process began, and the states at the step it goes on from.

        A step below zero: it begins where the batch does.
        """
        attempt = Attempt(self.path / f"attempt-{number:03d}", self._batch)
        return attempt, self._states(attempt, step) if step >= 0 else None

    def _make(self) -> Attempt:
        self.path.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(len(self.attempts()) + 1):
            path = self.path / f"attempt-{number:03d}"
            with suppress(FileExistsError):
                path.mkdir()
                return Attempt(path, self._batch)
        raise AssertionError

    def standing(self, grid: Grid) -> ResumePoint | None:
        """The latest undamaged states of all attempts; None where the batch begins.

        Damaged ones are passed over, and removed, with a word on stderr. The baseline does not go on beyond an onset
        whose states are lost.
        """
        for step, path, attempt in self._candidates(grid):
            try:
                checkpoint.verify(path)
            except checkpoint.Damaged as damage:
                if path.exists():  # or another process has just put it elsewhere
                    print(f"note: {damage}; going back to the one before it", file=sys.stderr)
                    checkpoint.remove(path)
            else:
                return ResumePoint(step, path, attempt)
        return None

    def _candidates(self, grid: Grid) -> list[tuple[int, Path, Attempt]]:
        """(step, states, attempt with telemetry of all steps before), the latest first."""
        attempts = self.attempts()[::-1]
        found = [(step, attempt.state(step), attempt) for attempt in attempts for step in attempt.states()]
        if not self._batch.disturbed:
            lost = None
            for onset in (fork.onset for fork in grid.forks):
                paths = [self._store.checkpoints / onset_name(onset, self._batch), *(a.onset(onset) for a in attempts)]
                sound = next((path for path in paths if is_undamaged(path)), None)
                if sound is None:
                    lost = onset
                    break
                found += [(onset, sound, attempt) for attempt in attempts]
            found = [one for one in found if lost is None or one[0] < lost]
        found = [one for one in found if one[2].covers(one[0])]
        return sorted(found, key=lambda one: (one[0], one[2].number), reverse=True)

    def publish(self) -> None:
        """Gives the run the baseline's states at the onsets that attempts have come to."""
        for attempt in self.attempts():
            for path in sorted(attempt.path.glob("onset-*")):
                target = self._store.checkpoints / path.name
                if is_undamaged(target):  # another attempt's, of the same bits
                    checkpoint.remove(path)
                else:
                    checkpoint.remove(target)
                    path.rename(target)

    def forget_earlier(self) -> None:
        """Removes the states of attempts that a later one has begun after: it has what it needs of them."""
        newest = self.newest()
        for attempt in self.attempts():
            if newest is not None and attempt.number < newest.number:
                attempt.forget_states()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def is_undamaged(path: Path) -> bool:
    """Whether a checkpoint is there and is what was written."""
    with suppress(checkpoint.Damaged):
        checkpoint.verify(path)
        return True
    return False


def onset_name(onset: int, batch: Batch | None = None) -> str:
    """Name of the checkpoint of one of the baseline's batches, the first unless given, at an onset."""
    return f"onset-{onset:08d}" + (f"-{batch.id:04d}" if batch is not None and batch.id else "")


def onset_step(path: Path) -> int:
    """The onset of a checkpoint of that name."""
    return int(path.name.split("-")[1])


def onset_paths(store: Folder, onset: int, seeds: Collection[int]) -> list[Path]:
    """The checkpoints that hold the baseline's states at an onset, of the seeds at some positions.

    The run's, or, while nobody has published them, an attempt's. Raises Damaged if there are none for some of them, or
    it cannot be told.
    """
    found = _onset_checkpoints(store, onset)
    first = found.setdefault(onset_name(onset), store.checkpoints / onset_name(onset))
    held = {path: checkpoint.lanes(path) for _, path in sorted(found.items())}
    if missing := set(seeds).difference(*held.values()):
        raise checkpoint.Damaged(f"checkpoint {first} is without the seeds at positions {sorted(missing)}")
    return [path for path, numbers in held.items() if set(numbers) & set(seeds)]


def seeds_at_onset(store: Folder, onset: int) -> set[int]:
    """The positions of the seeds whose states at an onset the run has: those are where they stay."""
    found: set[int] = set()
    for path in _glob_onset(store.checkpoints, onset):
        with suppress(checkpoint.Damaged):  # a fork that needs it will say so
            found |= checkpoint.lanes(path)
    return found


def _onset_checkpoints(store: Folder, onset: int) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for place in (store.checkpoints, *sorted(store.batches.glob("*/attempt-*"))):
        for path in _glob_onset(place, onset):
            found.setdefault(path.name, path)
    return found


def _glob_onset(place: Path, onset: int) -> Iterator[Path]:
    """The checkpoints of an onset in a folder: what `onset_name` calls them, whichever batch's."""
    name = re.compile(rf"{onset_name(onset)}(-\d+)?")
    return (path for path in place.glob(f"{onset_name(onset)}*") if name.fullmatch(path.name))


def discard_if_onset_lost(store: Folder, grid: Grid, batch: Batch) -> bool:
    """Whether one of the baseline's batches that is trained has lost its states at an onset, with a word on stderr."""
    lost = []
    for onset in (fork.onset for fork in grid.forks):
        path = store.checkpoints / onset_name(onset, batch)
        try:
            checkpoint.verify(path)
        except checkpoint.Damaged as damage:
            print(f"note: {damage}; training it again", file=sys.stderr)
            checkpoint.remove(path)
            lost.append(onset)
    if lost:
        BatchFolder(store, batch).remove()
    return bool(lost)
