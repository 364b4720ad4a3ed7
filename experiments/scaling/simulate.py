"""Simulates the schedule of a run's batches over N workers: makespan and waste, with losses of workers.

    python simulate.py RUN --workers 1 2 8 --mtbf 100 --repair 600 --start 20

RUN is the folder of a finished run, with its plan and the times of its batches in `shards.csv`. The rules are those of
`jaxaudit/runs/workers.py`: batches run in the order of the plan, those of the baseline first, and those of a fork group
as soon as the states at its onset are stored. The driver polls every half second. The batch of a lost worker is
submitted again before all others and continues from its latest stored states. If it is lost twice in the same chunk,
the run is given up, workers stop after their chunk, and the run is resumed.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from engine import Engine, Task
from schedule import Cluster, Outcome, Work, bounds

POLL, PATIENCE = 0.5, 30.0
"""`POLL_SECONDS` and `STOP_SECONDS` of `jaxaudit.runs.workers`."""


def simulate(work: Work, cluster: Cluster, seed: int = 0) -> Outcome:
    """Simulates a plan; the result is reproducible by the seed."""
    return _Driver(work, cluster, seed).run()


class _Driver:
    """Submits batches."""

    def __init__(self, work: Work, cluster: Cluster, seed: int):
        self._cluster = cluster
        self._outcome = Outcome(cluster.workers)
        self._engine = Engine(work, cluster, self._outcome, seed)
        self._tasks = [Task(shard, shard.onset, shard.onset) for shard in work.shards]
        self._baseline = [task for task in self._tasks if task.shard.fork is None]
        self._now = 0.0

    def run(self) -> Outcome:
        """Simulates the whole run, which is resumed each time it is given up."""
        remaining = self._tasks
        while remaining := self._train(remaining):
            self._outcome.given_up += 1
            self._now = self._engine.stop(self._now, PATIENCE)
            self._wait(self._cluster.resume)
        self._outcome.makespan = self._now
        return self._outcome

    def _train(self, tasks: Sequence[Task]) -> list[Task]:
        """Trains batches; returns those that remain if the run is given up."""
        waiting, running, gathered = list(tasks), list[Task](), set[int]()
        for task in tasks:
            task.attempt, task.died = None, []
        while waiting or running:
            self._hand_out(waiting, running)
            done = [task for task in running if task.complete and self._has_left(task)]
            for task in [task for task in running if self._is_lost(task)]:
                task.died.append(task.seen)
                if task.died[-2:] == [task.seen] * 2:
                    return [task for task in tasks if task.shard.id not in gathered]
                running.remove(task)
                waiting.insert(0, task)
            running = [task for task in running if task not in done]
            self._hand_out(waiting, running)
            gathered.update(task.shard.id for task in done)
            if done:
                self._wait(self._cluster.accept * len(done))
            elif waiting or running:
                self._wait(POLL * max(1, math.ceil((self._engine.next_event() - self._now) / POLL)))
        return []

    def _wait(self, seconds: float) -> None:
        self._now += seconds
        self._engine.advance(self._now)

    def _hand_out(self, waiting: list[Task], running: list[Task]) -> None:
        seeds_by_onset: dict[int, set[int]] = {}
        for task in list(waiting):
            if len(running) >= self._cluster.workers:
                return
            shard = task.shard
            if shard.fork is not None and shard.onset not in seeds_by_onset:
                seeds_by_onset[shard.onset] = self._stored_seeds(shard.onset)
            if shard.fork is None or not self._baseline or seeds_by_onset[shard.onset] >= shard.seeds:
                waiting.remove(task)
                running.append(task)
                if not task.complete:
                    self._engine.submit(task, self._now)

    def _stored_seeds(self, onset: int) -> set[int]:
        """Returns the seeds whose states at an onset are stored."""
        return {seed for task in self._baseline if task.has_onset(onset, self._now) for seed in task.shard.seeds}

    def _has_left(self, task: Task) -> bool:
        return task.attempt is None or task.attempt.left <= self._now

    def _is_lost(self, task: Task) -> bool:
        attempt = task.attempt
        lost = attempt is not None and attempt.outcome == "lost"
        return lost and attempt.left + self._cluster.detect <= self._now


def main() -> None:
    """Prints a table for a run's batches."""
    from recorded import start_seconds, work_of, workers_of

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N")
    parser.add_argument(
        "--mtbf",
        type=float,
        nargs="+",
        default=[math.inf],
        metavar="HOURS",
        help="mean time between losses of a worker",
    )
    parser.add_argument("--repair", type=float, default=600.0, metavar="S", help="seconds (%(default)s)")
    parser.add_argument("--detect", type=float, default=30.0, metavar="S", help="seconds (%(default)s)")
    parser.add_argument("--start", type=float, metavar="S", help="seconds to start a process (default: as in the run)")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="seeds of the losses (%(default)s)")
    arguments = parser.parse_args()
    work, start = work_of(arguments.run), arguments.start
    if start is None:
        import pandas as pd

        shards = pd.read_csv(arguments.run / "shards.csv")
        start = start_seconds(shards, workers_of(shards), POLL)
    print(f"simulated, in seconds; a process begins in {start:.1f} s\n\n{HEADER}")
    for workers in arguments.workers:
        for hours in arguments.mtbf:
            cluster = Cluster(
                workers, start, mtbf=hours * 3600, repair=arguments.repair, detect=arguments.detect, resume=start
            )
            print(row(work, cluster, arguments.seeds, 1.0))


COLUMNS = (
    "workers",
    "lost each, every",
    "all work / workers",
    "longest path",
    "makespan, simulated",
    "busy in vain",
    "at work",
    "losses",
    "given up",
)
HEADER = f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|"


def row(work: Work, cluster: Cluster, seeds: int, unit: float = 3600.0) -> str:
    """Returns a line of the table, with medians over seeds of the losses, in units of `unit` seconds."""
    outcomes = [simulate(work, cluster, seed) for seed in range(1 if math.isinf(cluster.mtbf) else seeds)]
    spans = [outcome.makespan / unit for outcome in outcomes]
    all_work, path = (seconds / unit for seconds in bounds(work, cluster))
    spread = f" ({min(spans):.3g} - {max(spans):.3g})" if len(outcomes) > 1 else ""
    cells = (
        cluster.workers,
        "never" if math.isinf(cluster.mtbf) else f"{cluster.mtbf / 3600:g} h",
        f"{all_work:.3g}",
        f"{path:.3g}",
        f"{statistics.median(spans):.3g}{spread}",
        f"{statistics.median(outcome.wasted for outcome in outcomes):.1%}",
        f"{statistics.median(outcome.utilisation for outcome in outcomes):.0%}",
        f"{statistics.median(outcome.losses for outcome in outcomes):g}",
        f"{statistics.mean(outcome.given_up for outcome in outcomes):.2g}",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
