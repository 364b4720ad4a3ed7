"""Simulated workers: they train what is handed in, keep its states now and then, and may be lost."""

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
"""The share of its time for which a worker keeps states, where nobody says how often: that of `FolderSink`."""


class Reached(NamedTuple):
    """The end of a chunk: when it is trained, its last step, and when its states are kept (None: they are not)."""

    time: float
    step: int
    kept: float | None


@dataclass
class Attempt:
    """A worker's at a batch.

    Attributes:
      first: the step that it goes on from.
      worker: None before there is one.
      given, begun, first_step: when it was given to the worker, was begun, and its first step began.
      chunks: what it will come to, if nothing happens.
      left: when the worker left it.
      outcome: how: "complete", "lost" or "stopped"; None before.
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
        """When it comes to its end, if nothing happens."""
        return max(self.chunks[-1].time, self.chunks[-1].kept or 0.0)


@dataclass
class Task:
    """A batch, and how far it is.

    Attributes:
      kept: the step up to which its states are kept.
      seen: the last step of which its latest attempt has telemetry.
      onsets: when its states at onsets were kept.
      died: where its workers were when they were lost.
    """

    shard: Shard
    kept: int
    seen: int
    attempt: Attempt | None = None
    onsets: dict[int, float] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether it is trained to its end."""
        return self.kept == self.shard.stop

    def has_onset(self, onset: int, now: float) -> bool:
        """Whether its states at an onset are kept by now."""
        return self.onsets.get(onset, math.inf) <= now


class Engine:
    """Gives what is handed in, in order, to workers that are free and there."""

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
        """Hands in a batch."""
        task.attempt = Attempt(task)
        self._queue.append(task.attempt)
        self._deal(now)

    def next_event(self) -> float:
        """When something happens next."""
        return self._events[0][0]

    def advance(self, now: float) -> None:
        """All that happens until then."""
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
        """Tells workers to stop after their chunk, and ends those that do not in time; returns when all have."""
        self._queue.clear()
        ends = [now]
        for number, attempt in enumerate(self._at):
            if attempt is None:
                continue
            place = next((p for p, chunk in enumerate(attempt.chunks) if chunk.time > now), len(attempt.chunks) - 1)
            if place < len(attempt.chunks) - 1:
                kept = attempt.chunks[place].time + attempt.task.shard.keep
                attempt.chunks[place:] = [attempt.chunks[place]._replace(kept=kept)]
                self._push(min(kept, now + patience), "stopped", number, attempt)
            elif attempt.finish > now + patience:
                self._push(now + patience, "stopped", number, attempt)
            ends.append(min(attempt.finish, now + patience))
        self.advance(max(ends))
        return max(ends)

    def _lives_of(self, number: int, seed: int) -> Iterator[float]:
        """How long a worker is there before it is lost, again and again; where losses are given, when these are."""
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
            if due := self._is_onset(shard, stop):
                now += shard.keep
            elif stop < shard.stop:
                count += 1
                due = count % work.every == 0 if work.every else KEEPING * (now - latest) >= cost
                if due:
                    now += shard.keep
                    latest, cost = now, shard.keep
            yield Reached(now - shard.keep * due, stop, now if due else None)

    def _lose(self, number: int, now: float) -> None:
        self._away.add(number)
        self._knows[number].clear()
        self._push(now + self._cluster.repair, "back", number)
        if (attempt := self._at[number]) is not None:
            self._outcome.losses += 1
            self._push(now + self._cluster.detect, "told", number)
            self._leave(attempt, now, "lost")

    def _keep(self, attempt: Attempt, now: float) -> float:
        """What an attempt has kept by now counts; returns the seconds that keeping it took, since it was given."""
        task, seconds = attempt.task, 0.0
        for reached in attempt.chunks:
            if reached.kept is not None and reached.kept <= now:
                seconds += reached.kept - reached.time
                task.kept = max(task.kept, reached.step)
                if self._is_onset(task.shard, reached.step):
                    task.onsets.setdefault(reached.step, reached.kept)
        return seconds

    def _leave(self, attempt: Attempt, now: float, outcome: str) -> None:
        task, shard, told = attempt.task, attempt.task.shard, self._outcome
        assert attempt.worker is not None
        attempt.left, attempt.outcome, self._at[attempt.worker] = now, outcome, None
        keeping = self._keep(attempt, now)
        if outcome == "complete":
            task.kept = shard.stop
            told.last = max(told.last, now)
            self._knows[attempt.worker].add(shard.fork is None)
        if now >= attempt.begun:
            task.seen = max([attempt.first, *(reached.step for reached in attempt.chunks if reached.time <= now)])
        starting = min(now, attempt.first_step) - attempt.given
        trained = (task.kept - attempt.first) * shard.step_seconds
        told.starting += starting
        told.keeping += keeping
        told.trained += trained
        told.twice += max(0.0, now - attempt.given - starting - trained - keeping)
