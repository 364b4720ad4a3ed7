"""Simulated workers, which train submitted batches, store states from time to time, and may be lost."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from schedule import Cluster, Outcome, Shard, Work

KEEPING = 0.05
"""The share of its time that a worker spends on storing states by default, as in `FolderSink`."""


class Reached(NamedTuple):
    """The end of a chunk: its time, its last step, and when its states are stored (None: they are not)."""

    time: float
    step: int
    kept: float | None


@dataclass
class Attempt:
    """An attempt of a worker at a batch.

    Attributes:
      task: the batch.
      first: the step that it continues from.
      worker: the worker, or None before it is assigned.
      given, begun, first_step: the times when it is assigned, starts, and trains its first step.
      chunks: the ends of its chunks, if the worker is not lost.
      left: the time when it ended.
      outcome: how it ended: "complete", "lost" or "stopped"; None before.
    """

    task: Task
    first: int = 0
    worker: int | None = None
    given: float = 0.0
    begun: float = 0.0
    first_step: float = 0.0
    chunks: list[Reached] = field(default_factory=list)
    left: float = math.inf
    outcome: str | None = None

    @property
    def finish(self) -> float:
        """The time of its end, if the worker is not lost."""
        return max(self.chunks[-1].time, self.chunks[-1].kept or 0.0)


@dataclass
class Task:
    """A batch and its progress.

    Attributes:
      shard: the batch.
      kept: the step of the latest stored states.
      seen: the last step of the latest attempt with telemetry.
      attempt: the latest attempt.
      onsets: the times when its states at onsets were stored.
      died: the steps at which its workers were lost.
    """

    shard: Shard
    kept: int
    seen: int
    attempt: Attempt | None = None
    onsets: dict[int, float] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether it is completely trained."""
        return self.kept == self.shard.stop

    def has_onset(self, onset: int, now: float) -> bool:
        """Returns whether its states at an onset are stored."""
        return self.onsets.get(onset, math.inf) <= now


class Engine:
    """Assigns submitted batches in order to free workers."""

    def __init__(self, work: Work, cluster: Cluster, outcome: Outcome, seed: int):
        self._work, self._cluster, self._outcome = work, cluster, outcome
        self._at: list[Attempt | None] = [None] * cluster.workers
        self._away: set[int] = set()
        self._knows: list[set[bool]] = [set() for _ in self._at]
        self._queue: list[Attempt] = []
        self._events: list[tuple[float, int, str, int, Attempt | None]] = []
        self._order = itertools.count()
        self._lives = [self._lives_of(number, seed) for number in range(cluster.workers)]
        for number in range(cluster.workers):
            self._live(number, 0.0)

    def submit(self, task: Task, now: float) -> None:
        """Submits a batch."""
        task.attempt = Attempt(task)
        self._queue.append(task.attempt)
        self._deal(now)

    def next_event(self) -> float:
        """Returns the time of the next event."""
        return self._events[0][0]

    def advance(self, now: float) -> None:
        """Processes all events until a time."""
        while self._events and self._events[0][0] <= now:
            time, _, kind, number, attempt = heapq.heappop(self._events)
            if kind == "lost":
                self._lose(number, time)
            elif kind == "back":
                self._away.discard(number)
                self._live(number, time)
            elif attempt is not None and self._at[number] is attempt:
                if kind == "onset":
                    self._keep(attempt, time)
                else:
                    self._leave(attempt, time, kind)
            self._deal(time)

    def stop(self, now: float, patience: float) -> float:
        """Stops workers after their chunk, or after `patience` seconds; returns the time when all have stopped."""
        self._queue.clear()
        ends = [now]
        for number, attempt in enumerate(self._at):
            if attempt is None:
                continue
            index = next((i for i, chunk in enumerate(attempt.chunks) if chunk.time > now), len(attempt.chunks) - 1)
            if index < len(attempt.chunks) - 1:
                kept = attempt.chunks[index].time + attempt.task.shard.keep
                attempt.chunks[index:] = [attempt.chunks[index]._replace(kept=kept)]
                self._push(min(kept, now + patience), "stopped", number, attempt)
            elif attempt.finish > now + patience:
                self._push(now + patience, "stopped", number, attempt)
            ends.append(min(attempt.finish, now + patience))
        self.advance(max(ends))
        return max(ends)

    def _lives_of(self, number: int, seed: int) -> Iterator[float]:
        """Yields the lifetimes of a worker, or the times of its losses if they are given."""
        if self._cluster.losses or math.isinf(self._cluster.mtbf):
            yield from self._cluster.losses.get(number, ())
            return
        draws = random.Random(f"{seed} {number}")
        while True:
            yield draws.expovariate(1 / self._cluster.mtbf)

    def _live(self, number: int, now: float) -> None:
        if (life := next(self._lives[number], None)) is not None:
            self._push(max(now, life) if self._cluster.losses else now + life, "lost", number)

    def _push(self, time: float, kind: str, number: int, attempt: Attempt | None = None) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, number, attempt))

    def _deal(self, now: float) -> None:
        free = [n for n, at in enumerate(self._at) if at is None and n not in self._away] if self._queue else []
        for number in free[: len(self._queue)]:
            self._begin(self._queue.pop(0), number, now)

    def _begin(self, attempt: Attempt, number: int, now: float) -> None:
        cluster, shard = self._cluster, attempt.task.shard
        attempt.worker, attempt.given, attempt.first = number, now, attempt.task.kept
        if cluster.again is not None and (shard.fork is None) in self._knows[number]:
            attempt.begun = attempt.first_step = now + cluster.again
        else:
            attempt.begun = now + cluster.start
            attempt.first_step = attempt.begun + shard.setup
        attempt.chunks = list(self._chunks(attempt))
        self._at[number] = attempt
        self._outcome.first = min(self._outcome.first, attempt.begun)
        for reached in attempt.chunks:
            if reached.kept is not None and self._is_onset(shard, reached.step):
                self._push(reached.kept, "onset", number, attempt)
        self._push(attempt.finish, "complete", number, attempt)

    def _is_onset(self, shard: Shard, step: int) -> bool:
        return shard.fork is None and step in self._work.onsets

    def _chunks(self, attempt: Attempt) -> Iterator[Reached]:
        work, shard = self._work, attempt.task.shard
        now, latest, cost, count = attempt.first_step, attempt.begun, 0.0, 0
        for start, stop in work.spans(shard):
            if start < attempt.first:
                continue
            now += (stop - start) * shard.step_seconds
            if stores := self._is_onset(shard, stop):
                now += shard.keep
            elif stop < shard.stop:
                count += 1
                stores = count % work.every == 0 if work.every else KEEPING * (now - latest) >= cost
                if stores:
                    now += shard.keep
                    latest, cost = now, shard.keep
            yield Reached(now - shard.keep * stores, stop, now if stores else None)

    def _lose(self, number: int, now: float) -> None:
        self._away.add(number)
        self._knows[number].clear()
        self._push(now + self._cluster.repair, "back", number)
        if (attempt := self._at[number]) is not None:
            self._outcome.losses += 1
            self._push(now + self._cluster.detect, "told", number)
            self._leave(attempt, now, "lost")

    def _keep(self, attempt: Attempt, now: float) -> float:
        """Records what an attempt has stored until now; returns the seconds that storing took."""
        task, seconds = attempt.task, 0.0
        for reached in attempt.chunks:
            if reached.kept is not None and reached.kept <= now:
                seconds += reached.kept - reached.time
                task.kept = max(task.kept, reached.step)
                if self._is_onset(task.shard, reached.step):
                    task.onsets.setdefault(reached.step, reached.kept)
        return seconds

    def _leave(self, attempt: Attempt, now: float, outcome: str) -> None:
        task, shard, outcome_ = attempt.task, attempt.task.shard, self._outcome
        assert attempt.worker is not None
        attempt.left, attempt.outcome, self._at[attempt.worker] = now, outcome, None
        keeping = self._keep(attempt, now)
        if outcome == "complete":
            task.kept = shard.stop
            outcome_.last = max(outcome_.last, now)
            self._knows[attempt.worker].add(shard.fork is None)
        if now >= attempt.begun:
            task.seen = max([attempt.first, *(reached.step for reached in attempt.chunks if reached.time <= now)])
        starting = min(now, attempt.first_step) - attempt.given
        trained = (task.kept - attempt.first) * shard.step_seconds
        outcome_.starting += starting
        outcome_.keeping += keeping
        outcome_.trained += trained
        outcome_.twice += max(0.0, now - attempt.given - starting - trained - keeping)
