"""What a simulated schedule is made of: batches and the seconds they take, workers and their losses, its figures."""

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
      onset, stop: the steps it runs from and to.
      fork: its fork group; None: the baseline's.
      seeds: the positions of its lanes' seeds.
      step_seconds: of one step of all its lanes.
      setup: seconds from its worker's beginning with it to its first step: the run opened, programs compiled.
      keep: seconds that keeping its states takes.
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
      chunk: steps between one time that telemetry is kept and the next.
      every: chunks between one time that states are kept and the next; 0: as often as takes a twentieth of the time.
    """

    shards: tuple[Shard, ...]
    chunk: int
    every: int = 0

    @property
    def onsets(self) -> list[int]:
        """Where conditions fork."""
        return sorted({shard.onset for shard in self.shards if shard.fork is not None})

    def spans(self, shard: Shard) -> list[tuple[int, int]]:
        """A batch's chunks, (start, stop): they end at multiples of `chunk`, and the baseline's at onsets too."""
        also = [onset for onset in self.onsets if shard.fork is None and shard.onset < onset < shard.stop]
        multiples = range(-(-shard.onset // self.chunk) * self.chunk, shard.stop, self.chunk)
        return list(pairwise(sorted({shard.onset, shard.stop, *multiples, *also})))


@dataclass(frozen=True)
class Cluster:
    """Workers, and who hands work to them.

    Attributes:
      workers: how many.
      start: seconds from a batch's being handed in to its worker's beginning with it.
      again: the same to its first step, where the worker has trained one of the same program in a process that is still
        there; None: every batch has a process of its own.
      mtbf: mean seconds between a worker's being there and its loss, exponential, at work or not.
      repair: seconds that a lost one is away.
      detect: seconds until the driver is told of a loss.
      accept: seconds that the driver takes to gather a batch.
      resume: seconds from a run's being given up to its being resumed.
      losses: the seconds at which workers are lost, by number, in place of `mtbf`.
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
    """What came of it, in seconds; from `trained` to `keeping` summed over workers.

    Attributes:
      workers: how many.
      makespan: until the driver has gathered everything.
      first, last: when the first batch was begun, and the last was trained to its end.
      trained: steps, each once.
      twice: steps whose states were lost before they were kept.
      starting: from a batch's being given to a worker to its first step.
      keeping: states kept.
      losses: of workers at work.
      given_up: how often the run was, and was resumed.
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
        """From the first batch's beginning to the last one's end, as `shards.csv` tells it."""
        return self.last - self.first

    @property
    def wasted(self) -> float:
        """The share of the workers' busy time that was for starting, and for steps trained twice."""
        return (self.starting + self.twice) / (self.trained + self.twice + self.starting + self.keeping)

    @property
    def utilisation(self) -> float:
        """The share of all workers' time that trained steps, each once."""
        return self.trained / (self.workers * self.makespan)


def bounds(work: Work, cluster: Cluster) -> tuple[float, float]:
    """What no schedule is shorter than, seconds: all work over all workers; the longest wait for an onset and its fork.

    With one start each, and no loss.
    """

    def start(shard: Shard) -> float:
        fresh = cluster.start + shard.setup
        return fresh if cluster.again is None else min(fresh, cluster.again)

    length = {s.id: start(s) + (s.stop - s.onset) * s.step_seconds for s in work.shards}
    paths = []
    for s in work.shards:
        needed = [b for b in work.shards if s.fork is not None and b.fork is None and b.seeds & s.seeds]
        paths.append(max((start(b) + s.onset * b.step_seconds for b in needed), default=0.0) + length[s.id])
    return sum(length.values()) / cluster.workers, max(paths)
