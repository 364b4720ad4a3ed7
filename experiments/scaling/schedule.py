"""Inputs and results of a simulated schedule: batches and their times, workers and their losses, and statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Shard:
    """A batch.

    Attributes:
      id: its number in the plan.
      onset, stop: its first and last step.
      fork: its fork group, or None for the baseline.
      seeds: the positions of its lanes' seeds.
      step_seconds: seconds of one step of all its lanes.
      setup: seconds from its start to its first step, for opening the run and compiling.
      keep: seconds of storing its states.
    """

    id: int
    onset: int
    stop: int
    fork: int | None
    seeds: frozenset[int]
    step_seconds: float
    setup: float = 0.0
    keep: float = 0.0


@dataclass(frozen=True)
class Work:
    """A plan.

    Attributes:
      shards: its batches, in order.
      chunk: steps of a chunk, after which telemetry is stored.
      every: chunks after which states are stored; 0: so often that it takes a twentieth of the time.
    """

    shards: tuple[Shard, ...]
    chunk: int
    every: int = 0

    @property
    def onsets(self) -> list[int]:
        """The steps at which conditions fork."""
        return sorted({shard.onset for shard in self.shards if shard.fork is not None})

    def spans(self, shard: Shard) -> list[tuple[int, int]]:
        """Returns a batch's chunks (start, stop), which end at multiples of `chunk`, and for the baseline at onsets."""
        onsets_within = [onset for onset in self.onsets if shard.fork is None and shard.onset < onset < shard.stop]
        multiples = range(-(-shard.onset // self.chunk) * self.chunk, shard.stop, self.chunk)
        return list(pairwise(sorted({shard.onset, shard.stop, *multiples, *onsets_within})))


@dataclass(frozen=True)
class Cluster:
    """Workers and their driver.

    Attributes:
      workers: the number of workers.
      start: seconds from the submission of a batch to its start.
      again: seconds from submission to the first step, if the worker's process has already trained a batch of the same
        program; None: every batch has a new process.
      mtbf: mean seconds until a worker is lost, exponentially distributed, busy or not.
      repair: seconds until a lost worker is replaced.
      detect: seconds until the driver detects a loss.
      accept: seconds that the driver needs to collect a batch.
      resume: seconds from giving up a run to resuming it.
      losses: seconds at which workers are lost, by number, instead of `mtbf`.
    """

    workers: int
    start: float = 0.0
    again: float | None = None
    mtbf: float = math.inf
    repair: float = 0.0
    detect: float = 0.0
    accept: float = 0.0
    resume: float = 0.0
    losses: Mapping[int, Sequence[float]] = field(default_factory=dict)


@dataclass
class Outcome:
    """Results in seconds; `trained` to `keeping` are summed over workers.

    Attributes:
      workers: the number of workers.
      makespan: the time until the driver has collected everything.
      first, last: the times when the first batch started and the last one ended.
      trained: training, with each step counted once.
      twice: training of steps that were lost before they were stored.
      starting: from the assignment of a batch to its first step.
      keeping: storing states.
      losses: the number of losses of busy workers.
      given_up: how often the run was given up and resumed.
    """

    workers: int
    makespan: float = 0.0
    first: float = math.inf
    last: float = 0.0
    trained: float = 0.0
    twice: float = 0.0
    starting: float = 0.0
    keeping: float = 0.0
    losses: int = 0
    given_up: int = 0

    @property
    def span(self) -> float:
        """Seconds from the start of the first batch to the end of the last, as in `shards.csv`."""
        return self.last - self.first

    @property
    def wasted(self) -> float:
        """The share of the workers' busy time that was spent on starting and on steps trained twice."""
        return (self.starting + self.twice) / (self.trained + self.twice + self.starting + self.keeping)

    @property
    def utilisation(self) -> float:
        """The share of all workers' time that was spent on training, with each step counted once."""
        return self.trained / (self.workers * self.makespan)


def bounds(work: Work, cluster: Cluster) -> tuple[float, float]:
    """Returns lower bounds of a schedule in seconds: all work divided by the workers, and the longest dependent path.

    Each batch is started once, and no worker is lost.
    """

    def start(shard: Shard) -> float:
        new_process = cluster.start + shard.setup
        return new_process if cluster.again is None else min(new_process, cluster.again)

    length = {s.id: start(s) + (s.stop - s.onset) * s.step_seconds for s in work.shards}
    paths = []
    for s in work.shards:
        required = [b for b in work.shards if s.fork is not None and b.fork is None and b.seeds & s.seeds]
        paths.append(max((start(b) + s.onset * b.step_seconds for b in required), default=0.0) + length[s.id])
    return sum(length.values()) / cluster.workers, max(paths)
