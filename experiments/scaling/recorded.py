"""What the batches of a real run took: from its plan and its `shards.csv` to what is simulated."""

from __future__ import annotations

import itertools
import json
import statistics
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
from schedule import Shard, Work

CHUNKS_PER_RUN = 40
"""Where a spec does not say how long a chunk is: that of `jaxaudit.execution.driver`."""


def work_of(run: Path, shards: pd.DataFrame | None = None) -> Work:
    """A run's batches with the seconds that they took.

    Args:
      run: a folder with `plan.json`, `spec.toml` and `shards.csv`.
      shards: rows of `shards.csv`, where they are not in the folder.
    """
    shards = pd.read_csv(run / "shards.csv") if shards is None else shards
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))["batches"]
    spec = tomllib.loads((run / "spec.toml").read_text(encoding="utf-8"))
    chosen = spec.get("run", {})
    setup = setup_seconds(shards)
    return Work(
        tuple(_shard(batch, shards[shards["batch"] == batch["id"]], setup) for batch in plan),
        chosen.get("chunk") or -(-spec["audit"]["steps"] // CHUNKS_PER_RUN),
        chosen.get("checkpoint_every", 0),
    )


def setup_seconds(shards: pd.DataFrame) -> float:
    """What a batch's worker takes before its first step: where a straight line through seconds by steps begins.

    Of the fork groups' batches, if there are some of different lengths; else what was compiled, the rest being unknown.
    """
    whole = shards[(shards["outcome"] == "complete") & (shards["from_step"] == shards["onset"])]
    forks = whole[whole["fork"].notna()]
    steps, seconds = forks["to_step"] - forks["from_step"], forks["ended"] - forks["begun"]
    if steps.nunique() < 2:
        return float(whole["compile_seconds"].median())
    begins = np.polynomial.Polynomial.fit(steps, seconds, 1).convert().coef[0]
    return float(np.clip(begins, 0.0, (whole["ended"] - whole["begun"]).min()))


def _shard(batch: dict, attempts: pd.DataFrame, setup: float) -> Shard:
    """One batch; of several attempts at it, the one that has trained the most steps says how long one takes."""
    steps = attempts["to_step"] - attempts["from_step"]
    longest = attempts.loc[steps.idxmax()]
    seconds = longest["ended"] - longest["begun"] - setup
    return Shard(
        id=batch["id"],
        onset=batch["onset"],
        stop=batch["stop"],
        fork=batch["fork"],
        seeds=frozenset(seed for seed, _ in batch["lanes"]),
        step_seconds=float(max(0.0, seconds) / steps.max()),
        setup=setup,
    )


def workers_of(shards: pd.DataFrame) -> int:
    """How many workers trained side by side, at most."""
    changes = [(begun, 1) for begun in shards["begun"]] + [(ended, -1) for ended in shards["ended"]]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def start_seconds(shards: pd.DataFrame, workers: int, poll: float) -> float:
    """From a batch's being handed in to its being begun: the median time for which a worker had none.

    Less half of `poll`, the time between two looks of the driver, who hands in the next batch when it sees that one is
    done.
    """
    begun, ended = sorted(shards["begun"]), sorted(shards["ended"])
    return statistics.median(b - e for b, e in zip(begun[workers:], ended, strict=False)) - poll / 2


def span(shards: pd.DataFrame) -> float:
    """Seconds from the first batch's beginning to the last one's end."""
    return float(shards["ended"].max() - shards["begun"].min())
