"""A thousand lanes of GPT-2 124M on 8, 64 and 512 GPUs: estimates, and simulated schedules with losses of workers.

    python gpt2_lanes.py            # the tables of the page
    python gpt2_lanes.py --memory   # the bytes that the compiler plans for a step of four and of eight lanes, on a CPU

Nothing was measured on a GPU. The assumptions are listed in `Assumed`.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from schedule import Cluster, Shard, Work
from simulate import HEADER, row

SEEDS, CONDITIONS, STEPS, ONSET, TAIL = 20, 50, 50_000, 15_000, 50
"""A grid of 1,000 lanes: the steps of `experiments/language_models/124m.full.toml`, and the standard window after."""

WORKERS, MTBF_HOURS = (8, 64, 512), (math.inf, 1000.0, 100.0)

PARAMETERS = 124_439_808
"""The number of parameters of GPT-2 124M."""

STATE_BYTES = 3 * 4 * PARAMETERS
"""Bytes of one lane's stored state: parameters and Adam's two moments in float32."""


@dataclass(frozen=True)
class Assumed:
    """Assumptions.

    Attributes:
      step_seconds: seconds of one lane's step of 32 x 1,024 tokens: 28 TFLOP at 100 TFLOP/s, and 7% for telemetry.
      fit: lanes on a GPU of 80 GiB, of which nine tenths are used: 10 GiB and 2.8 GiB per lane, as planned for a CPU.
      bandwidth: bytes per second at which a worker writes states.
      start: seconds until a worker has started Python and JAX.
      setup: seconds of opening the run, reading states and compiling.
      repair, detect, resume: seconds, as in `Cluster`.
    """

    step_seconds: float = 0.30
    fit: int = 22
    bandwidth: float = 1e9
    start: float = 30.0
    setup: float = 120.0
    repair: float = 600.0
    detect: float = 60.0
    resume: float = 300.0


def shares(lanes: int, most: int, parts: int) -> list[int]:
    """Returns the number of lanes of each batch of a group, as in `jaxaudit.core.batches.layout`."""
    needed = -(-lanes // min(most, lanes))
    share = -(-lanes // min(-(-needed // parts) * parts, lanes))
    return [min(share, lanes - first) for first in range(0, lanes, share)]


def work_of(workers: int, assumed: Assumed, chunk: int) -> Work:
    """Returns the plan of the grid for a number of workers."""
    baseline, forks = (shares(count, assumed.fit, workers) for count in (SEEDS, SEEDS * CONDITIONS))
    shards, first = [], 0
    for lanes in baseline:
        seeds = range(first, first + lanes)
        shards.append(_shard(len(shards), 0, ONSET + TAIL, None, seeds, assumed))
        first += lanes
    first = 0
    for lanes in forks:
        seeds = (lane % SEEDS for lane in range(first, first + lanes))
        shards.append(_shard(len(shards), ONSET, STEPS, 0, seeds, assumed, lanes))
        first += lanes
    return Work(tuple(shards), chunk)


def _shard(number, onset, stop, fork, seeds, assumed, lanes=None) -> Shard:
    seed_set = frozenset(seeds)
    count = len(seed_set) if lanes is None else lanes
    return Shard(
        id=number,
        onset=onset,
        stop=stop,
        fork=fork,
        seeds=seed_set,
        step_seconds=count * assumed.step_seconds,
        setup=assumed.setup,
        keep=count * STATE_BYTES / assumed.bandwidth,
    )


def cluster_of(workers: int, hours: float, assumed: Assumed) -> Cluster:
    """Returns a cluster whose workers are each lost every `hours` hours on average."""
    return Cluster(
        workers,
        assumed.start,
        mtbf=hours * 3600,
        repair=assumed.repair,
        detect=assumed.detect,
        accept=1.0,
        resume=assumed.resume,
    )


def tables(seeds: int) -> str:
    """Returns tables for states stored as in the spec, ten times as often, and by default."""
    parts = []
    for title, chunk, every in (
        ("`checkpoint_every = 5`, chunks of 1,250 steps", 1250, 5),
        ("`checkpoint_every = 5`, `chunk = 125`", 125, 5),
        ("neither", 1250, 0),
    ):
        parts.append(f"{title}:\n\n{HEADER}")
        for workers in WORKERS:
            work = replace(work_of(workers, Assumed(), chunk), every=every)
            parts += [row(work, cluster_of(workers, hours, Assumed()), seeds) for hours in MTBF_HOURS]
        parts.append("")
    return "\n".join(parts)


def sizes() -> str:
    """Returns a table of the distribution of lanes."""
    lines = ["| workers | batches of the baseline | batches of forks | a chunk of 1,250 steps | states of a batch |"]
    lines.append("| --- " * 5 + "|")
    for workers in WORKERS:
        baseline, forks = (shares(count, Assumed().fit, workers) for count in (SEEDS, SEEDS * CONDITIONS))
        cells = (
            workers,
            f"{len(baseline)} x {baseline[0]}",
            f"{len(forks)} x {forks[0]}",
            f"{1250 * forks[0] * Assumed().step_seconds / 60:,.0f} min",
            f"{forks[0] * STATE_BYTES / 1e9:,.1f} GB",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def planned(precision: str = "float32") -> str:
    """Returns the bytes planned for a step of lanes in turns, with 32 x 1,024 tokens in 8 microbatches each."""
    sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
    import common
    import language_model

    common.prepare_jax(1)
    import jaxaudit as ja
    from jaxaudit.core.batches import layout
    from jaxaudit.core.grid import plan
    from jaxaudit.execution.engine import Engine

    lines = []
    for lanes in (4, 8):
        learner, _ = language_model.learner_of("124m", 32, 1024, True, accumulation=8, precision=precision)
        spike = ja.lr_spike(10.0, onset=1, duration=1)
        engine = Engine(plan(learner, [spike], seeds=lanes, steps=4, execution="map"), 1)
        baseline = layout(engine.grid)[0]
        needed = engine.program_bytes(baseline) / 2**30
        lines.append(f"{lanes} lanes: {needed:.2f} GiB; a state: {engine.lane_bytes(baseline):,} bytes")
    return "\n".join(lines)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="plan a step's memory")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="seeds of the losses (%(default)s)")
    arguments = parser.parse_args()
    print(planned() if arguments.memory else f"{sizes()}\n\n{tables(arguments.seeds)}")


if __name__ == "__main__":
    main()
