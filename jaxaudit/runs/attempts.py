"""The files of what has been trained of a run's batches, attempt by attempt.

Each process that trains a batch writes to an attempt, a folder that nobody else writes to. A scheduler may therefore
start a batch twice, or start it again while a worker that it believes dead still runs, without any lock. A later
attempt continues from the latest states of the earlier ones. The first attempt that reaches the end of its batch is
accepted; all attempts give the same bits.
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
"""The number of checkpoints of the latest states that an attempt keeps."""

MAX_TRIES = 3
"""How often an attempt tries to take over an earlier one whose files another process moves or removes meanwhile."""

BEGUN, ENDED = "begun.json", "ended.json"

COMPLETE, STOPPED, LOST = "complete", "stopped", "lost"
"""How an attempt ended: at the end of its batch, because it was told to stop, or in an unknown way."""


class BatchAttempt:
    """The files of one attempt at a batch: telemetry by chunk, latest states, and the baseline's states at onsets.

    Every file appears complete or not at all. Telemetry of steps after the latest states is trained again, to the same
    bits.
    """

    def __init__(self, path: Path, batch: Batch):
        self.path = path
        self.number = int(path.name.removeprefix("attempt-"))
        self._batch = batch

    def begin(self, step: int, worker: str, begun: float, earlier: int | None) -> None:
        """Records the beginning of the attempt.

        Args:
          step: the step that training continues from.
          worker: the host and process that train.
          begun: when that process began, in seconds since the epoch.
          earlier: the number of the attempt whose states are taken over.
        """
        self._write(BEGUN, {"step": step, "worker": worker, "begun": begun, "from_attempt": earlier})

    def end(self, outcome: str, ended: float, compile_seconds: float) -> None:
        """Records how and when the attempt ended, and the seconds that it spent on compilation."""
        self._write(ENDED, {"outcome": outcome, "ended": ended, "compile_seconds": compile_seconds})

    @property
    def beginning(self) -> dict[str, Any] | None:
        """The record that `begin` wrote; None before."""
        return self._read(BEGUN)

    @property
    def ending(self) -> dict[str, Any] | None:
        """The record that `end` wrote; None before, and if the process was killed."""
        return self._read(ENDED)

    @property
    def complete(self) -> bool:
        """Whether the attempt has trained the batch to its end."""
        return (self.ending or {}).get("outcome") == COMPLETE

    def write_rows(self, rows: Telemetry, start: int, stop: int) -> None:
        """Stores the telemetry `[T, L, ...]` of a chunk, without the rows and lanes that only fill it up."""
        path = self.path / f"rows-{start:08d}-{stop:08d}.npz"
        unfinished = path.with_name(f"{UNFINISHED}{path.name}")
        count = len(self._batch.seeds)
        with unfinished.open("wb") as file:
            arrays: dict[str, Any] = {name: np.asarray(x)[: stop - start, :count] for name, x in rows.items()}
            np.savez(file, **arrays)
        os.replace(unfinished, path)

    def chunks(self) -> list[tuple[int, int]]:
        """Returns the chunks whose telemetry is stored, as (start, stop), in order."""
        return [(start, stop) for start, stop, _ in self._row_files()]

    def read_rows(self, after: int = 0) -> Iterator[tuple[Telemetry, int, int]]:
        """Yields the stored telemetry of each chunk from the step `after` on, as (rows, start, stop)."""
        for start, stop, path in self._row_files():
            if start >= after:
                rows: Any = array_store.read_npz(path)
                yield rows, start, stop

    def covers(self, step: int) -> bool:
        """Returns whether the telemetry of every step before `step` is stored."""
        covered = self._batch.onset
        for start, stop in self.chunks():
            covered = stop if start == covered else covered
        return covered >= step

    def save(self, engine: Engine, states: LaneState, step: int) -> None:
        """Stores the states at a step, and removes all but the latest `MAX_STATES` checkpoints."""
        checkpoint.save(self.state(step), engine.pieces(self._batch, states), self._note(step))
        if not hosts.is_leader():
            return
        kept = [stored for stored in self.state_steps() if stored <= step][-MAX_STATES:]  # later ones were damaged
        for stored in self.state_steps():
            if stored not in kept:
                checkpoint.remove(self.state(stored))

    def save_onset(self, engine: Engine, states: LaneState, step: int) -> None:
        """Stores the baseline's states at an onset."""
        checkpoint.save(self.onset(step), engine.pieces(self._batch, states), self._note(step))

    def state(self, step: int) -> Path:
        """Returns the path of the checkpoint of the states at a step."""
        return self.path / f"state-{step:08d}"

    def onset(self, step: int) -> Path:
        """Returns the path of the baseline's checkpoint at an onset until it is published to the run."""
        return self.path / onset_name(step, self._batch)

    def state_steps(self) -> list[int]:
        """Returns the steps whose states are stored, in order."""
        return sorted(int(path.name.removeprefix("state-")) for path in self.path.glob("state-*"))

    def take_over(self, earlier: BatchAttempt, step: int) -> None:
        """Links an earlier attempt's telemetry and checkpoints up to a step; copies where links are not possible."""
        for start, stop, path in earlier._row_files():
            if stop <= step and start < step:
                _link_or_copy(path, self.path / path.name)
        for path in (earlier.state(step), *(p for p in earlier.path.glob("onset-*") if onset_step(p) <= step)):
            if path.exists():
                unfinished = self.path / f"{UNFINISHED}{path.name}"
                shutil.copytree(path, unfinished, copy_function=_link_or_copy)
                unfinished.rename(self.path / path.name)

    def latest_write(self) -> float:
        """Returns the time at which the attempt last stored telemetry, or else began, in seconds since the epoch."""
        return max(path.stat().st_mtime for path in [self.path / BEGUN, *self.path.glob("rows-*")])

    def clear(self) -> None:
        for path in self.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def remove_states(self) -> None:
        """Removes the latest states, which a later attempt has taken over."""
        for step in self.state_steps():
            checkpoint.remove(self.state(step))

    def _note(self, step: int) -> dict[str, int]:
        return {"step": step, "batch": self._batch.id}

    def _row_files(self) -> list[tuple[int, int, Path]]:
        """Returns (start, stop, path) of each file of telemetry, in order."""
        files = []
        for path in sorted(self.path.glob("rows-*.npz")):
            start, stop = (int(part) for part in re.findall(r"\d+", path.name))
            files.append((start, stop, path))
        return files

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
    except OSError:  # the file system has no links
        shutil.copyfile(source, target)


@dataclass(frozen=True)
class ResumePoint:
    """The states that a batch can be trained on from.

    Attributes:
      step: the step of the latest undamaged states.
      states: the path of their checkpoint.
      attempt: an attempt with the telemetry of all steps before.
    """

    step: int
    states: Path
    attempt: BatchAttempt


class BatchFolder:
    """The folder of one batch, with the attempts at training it."""

    def __init__(self, store: Folder, batch: Batch):
        self.path = store.batches / f"{batch.id:04d}"
        self._store, self._batch = store, batch

    def attempts(self) -> list[BatchAttempt]:
        """Returns all attempts at the batch, in order."""
        return [BatchAttempt(path, self._batch) for path in sorted(self.path.glob("attempt-*"))]

    def accepted(self) -> BatchAttempt | None:
        """Returns the first attempt that reached the end of the batch; None if there is none."""
        return next((attempt for attempt in self.attempts() if attempt.complete), None)

    def newest(self) -> BatchAttempt | None:
        """Returns the attempt that began last; None if there is none."""
        return next((attempt for attempt in reversed(self.attempts()) if attempt.beginning), None)

    def trained_until(self, grid: Grid) -> int:
        """Returns the step up to which the batch is trained and its states are stored."""
        if self.accepted() is not None:
            return self._batch.stop
        point = self.resume_point(grid)
        return self._batch.onset if point is None else point.step

    def begin(self, grid: Grid, worker: str, begun: float) -> tuple[BatchAttempt, ResumePoint | None]:
        """Begins a new attempt; returns it and where it continues from, None where the batch begins.

        While earlier attempts are taken over, their processes may still remove states, and the run publish onsets.
        """
        attempt = self._create_attempt()
        for retry in range(MAX_TRIES):
            point = self.resume_point(grid)
            if point is None:
                attempt.begin(self._batch.onset, worker, begun, None)
                return attempt, None
            step, earlier = point.step, point.attempt
            try:
                attempt.take_over(earlier, step)
            except OSError:
                if retry == MAX_TRIES - 1:
                    raise
                attempt.clear()
                continue
            attempt.begin(step, worker, begun, earlier.number)
            return attempt, ResumePoint(step, self._find_states(attempt, step) or point.states, attempt)
        raise AssertionError

    def _find_states(self, attempt: BatchAttempt, step: int) -> Path | None:
        """Returns the path of the states at a step in an attempt or the run; None if there are none."""
        paths = (attempt.state(step), attempt.onset(step), self._store.checkpoints / attempt.onset(step).name)
        return next((path for path in paths if path.exists()), None)

    def open_attempt(self, number: int, step: int) -> tuple[BatchAttempt, Path | None]:
        """Returns an attempt that the leading process began, and the path of the states that it continues from.

        The path is None if `step` is negative, which means that the attempt starts where the batch begins.
        """
        attempt = BatchAttempt(self.path / f"attempt-{number:03d}", self._batch)
        return attempt, self._find_states(attempt, step) if step >= 0 else None

    def _create_attempt(self) -> BatchAttempt:
        self.path.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(len(self.attempts()) + 1):
            path = self.path / f"attempt-{number:03d}"
            with suppress(FileExistsError):
                path.mkdir()
                return BatchAttempt(path, self._batch)
        raise AssertionError

    def resume_point(self, grid: Grid) -> ResumePoint | None:
        """Returns the latest undamaged states of all attempts; None where the batch begins.

        Damaged states are reported on stderr and removed. The baseline is resumed at or before the first onset whose
        states are lost.
        """
        for step, path, attempt in self._candidates(grid):
            try:
                checkpoint.verify(path)
            except checkpoint.Damaged as damage:
                if path.exists():  # else another process has just moved it
                    print(f"note: {damage}; going back to the one before it", file=sys.stderr)
                    checkpoint.remove(path)
            else:
                return ResumePoint(step, path, attempt)
        return None

    def _candidates(self, grid: Grid) -> list[tuple[int, Path, BatchAttempt]]:
        """Returns (step, states, attempt with the telemetry of all steps before), the latest first."""
        attempts = self.attempts()[::-1]
        candidates = [(step, attempt.state(step), attempt) for attempt in attempts for step in attempt.state_steps()]
        if not self._batch.disturbed:
            lost = None
            for onset in (fork.onset for fork in grid.forks):
                paths = [self._store.checkpoints / onset_name(onset, self._batch), *(a.onset(onset) for a in attempts)]
                undamaged = next((path for path in paths if is_undamaged(path)), None)
                if undamaged is None:
                    lost = onset
                    break
                candidates += [(onset, undamaged, attempt) for attempt in attempts]
            if lost is not None:
                candidates = [candidate for candidate in candidates if candidate[0] < lost]
        covered = [(step, path, attempt) for step, path, attempt in candidates if attempt.covers(step)]
        return sorted(covered, key=lambda candidate: (candidate[0], candidate[2].number), reverse=True)

    def publish_onsets(self) -> None:
        """Moves the baseline's states at the onsets that attempts have reached to the run's checkpoints."""
        for attempt in self.attempts():
            for path in sorted(attempt.path.glob("onset-*")):
                target = self._store.checkpoints / path.name
                if is_undamaged(target):  # another attempt has published the same bits
                    checkpoint.remove(path)
                else:
                    checkpoint.remove(target)
                    path.rename(target)

    def remove_superseded_states(self) -> None:
        """Removes the states of all attempts before the newest one, which has taken over what it needs."""
        newest = self.newest()
        for attempt in self.attempts():
            if newest is not None and attempt.number < newest.number:
                attempt.remove_states()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def is_undamaged(path: Path) -> bool:
    """Returns whether there is a checkpoint at a path whose files are as they were written."""
    with suppress(checkpoint.Damaged):
        checkpoint.verify(path)
        return True
    return False


def onset_name(onset: int, batch: Batch | None = None) -> str:
    """Returns the name of the checkpoint of a batch of the baseline, by default the first, at an onset."""
    return f"onset-{onset:08d}" + (f"-{batch.id:04d}" if batch is not None and batch.id else "")


def onset_step(path: Path) -> int:
    """Returns the onset in the name of a checkpoint, which `onset_name` made."""
    return int(path.name.split("-")[1])


def onset_paths(store: Folder, onset: int, seeds: Collection[int]) -> list[Path]:
    """Returns the checkpoints with the baseline's states at an onset for some seeds.

    They are the run's, or an attempt's as long as they are not published.

    Args:
      store: the run.
      onset: the step.
      seeds: positions of the seeds.

    Raises:
      checkpoint.Damaged: a seed is in none of the checkpoints, or a checkpoint does not say which seeds it has.
    """
    paths: dict[str, Path] = {}
    for folder in (store.checkpoints, *sorted(store.batches.glob("*/attempt-*"))):
        for path in _glob_onset(folder, onset):
            paths.setdefault(path.name, path)
    first = paths.setdefault(onset_name(onset), store.checkpoints / onset_name(onset))
    stored_seeds = {path: checkpoint.lanes(path) for _, path in sorted(paths.items())}
    if missing := set(seeds).difference(*stored_seeds.values()):
        raise checkpoint.Damaged(f"checkpoint {first} is without the seeds at positions {sorted(missing)}")
    return [path for path, stored in stored_seeds.items() if set(stored) & set(seeds)]


def seeds_at_onset(store: Folder, onset: int) -> set[int]:
    """Returns the positions of the seeds whose states at an onset are among the run's own checkpoints."""
    seeds: set[int] = set()
    for path in _glob_onset(store.checkpoints, onset):
        with suppress(checkpoint.Damaged):  # reported when a fork loads it
            seeds |= checkpoint.lanes(path)
    return seeds


def _glob_onset(folder: Path, onset: int) -> Iterator[Path]:
    """Yields the checkpoints of an onset in a folder, of all batches."""
    name = re.compile(rf"{onset_name(onset)}(-\d+)?")
    return (path for path in folder.glob(f"{onset_name(onset)}*") if name.fullmatch(path.name))


def discard_if_onset_lost(store: Folder, grid: Grid, batch: Batch) -> bool:
    """Removes a trained batch of the baseline if its states at an onset are damaged, so that it is trained again.

    Returns:
      Whether the batch was removed, which is also reported on stderr.
    """
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
