"""Reads the times of a run's batches from its plan and its `shards.csv`, as input of the simulation."""

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
"""Chunks of a run by default, as in `jaxaudit.execution.driver`."""


def work_of(run: Path, shards: pd.DataFrame | None = None) -> Work:
    """Returns a run's batches with the times they took.

    Args:
      run: a folder with `plan.json`, `spec.toml` and `shards.csv`.
      shards: rows of `shards.csv`, if they are not in the folder.
    """
    shards = pd.read_csv(run / "shards.csv") if shards is None else shards
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))["batches"]
    spec = tomllib.loads((run / "spec.toml").read_text(encoding="utf-8"))
    run_settings = spec.get("run", {})
    setup = setup_seconds(shards)
    return Work(
        tuple(_shard(batch, shards[shards["batch"] == batch["id"]], setup) for batch in plan),
        run_settings.get("chunk") or -(-spec["audit"]["steps"] // CHUNKS_PER_RUN),
        run_settings.get("checkpoint_every", 0),
    )


def setup_seconds(shards: pd.DataFrame) -> float:
    """Returns the seconds of a batch before its first step, the intercept of a line through seconds by steps.

    The line is fitted to batches of fork groups, if they have different lengths; otherwise it is the compile time.
    """
    complete = shards[(shards["outcome"] == "complete") & (shards["from_step"] == shards["onset"])]
    forks = complete[complete["fork"].notna()]
    steps, seconds = forks["to_step"] - forks["from_step"], forks["ended"] - forks["begun"]
    if steps.nunique() < 2:
        return float(complete["compile_seconds"].median())
    intercept = np.polynomial.Polynomial.fit(steps, seconds, 1).convert().coef[0]
    return float(np.clip(intercept, 0.0, (complete["ended"] - complete["begun"]).min()))


def _shard(batch: dict, attempts: pd.DataFrame, setup: float) -> Shard:
    """Returns one batch; the time of a step is that of the attempt with the most steps."""
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
    """Returns the largest number of workers that trained concurrently."""
    changes = [(begun, 1) for begun in shards["begun"]] + [(ended, -1) for ended in shards["ended"]]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def start_seconds(shards: pd.DataFrame, workers: int, poll: float) -> float:
    """Returns the seconds from the submission of a batch to its start, the median idle time of workers.

    Half of `poll` is subtracted, the interval at which the driver looks for finished batches and submits the next.
    """
    begun, ended = sorted(shards["begun"]), sorted(shards["ended"])
    return statistics.median(b - e for b, e in zip(begun[workers:], ended, strict=False)) - poll / 2


def span(shards: pd.DataFrame) -> float:
    """Returns the seconds from the start of the first batch to the end of the last."""
    return float(shards["ended"].max() - shards["begun"].min())
