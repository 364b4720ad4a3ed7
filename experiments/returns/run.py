"""Learning curves of this package's learners, with a lane for every seed and a CSV file for each learner and task.

    python run.py LEARNER TASK STEPS OUT.csv [--seeds 5] [--set name=value ...]

Columns: seed, env_steps, performance (mean return of the latest complete episodes, with exploration noise), evaluation
(mean return of ten episodes under the mean action, at twenty points of the run).
"""

from __future__ import annotations

import argparse
import ast
import time
from pathlib import Path

import numpy as np
import pandas as pd

import jaxaudit as ja
from jaxaudit.cli.main import prepare_jax
from jaxaudit.core.batches import layout
from jaxaudit.execution.engine import Engine
from jaxaudit.runtime import registry

CHUNK = 10


def train(learner: ja.Learner, seeds: int, steps: int) -> dict[str, np.ndarray]:
    """Trains undisturbed, and returns telemetry `[steps, seeds]`: performance and evaluation_return."""
    neutral = ja.lr_spike(1.0, onset=steps - 1, duration=1)
    engine = Engine(ja.plan(learner, [neutral], seeds=seeds, steps=steps, tail=1), CHUNK)
    baseline = layout(engine.grid)[0]
    states = engine.initial(baseline)
    rows: dict[str, list[np.ndarray]] = {"performance": [], "evaluation_return": []}
    begin = time.perf_counter()
    for start in range(0, steps, CHUNK):
        stop = min(start + CHUNK, steps)
        states, telemetry = engine.advance(baseline, states, start, stop)
        for name, chunks in rows.items():
            chunks.append(np.asarray(telemetry[name])[: stop - start, :seeds])
        env_steps, seconds = stop * learner.samples_per_step * seeds, time.perf_counter() - begin
        print(
            f"{stop}/{steps} {rows['performance'][-1][-1].mean():.0f} {env_steps / seconds:.0f} env steps/s", flush=True
        )
    return {name: np.concatenate(chunks) for name, chunks in rows.items()}


def main() -> None:
    """Trains, and writes the curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("learner")
    parser.add_argument("task")
    parser.add_argument("steps", type=int, help="environment steps of each seed")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the learner")
    arguments = parser.parse_args()
    prepare_jax()
    settings = {"evaluations": 20, "evaluation_episodes": 10, "telemetry": "basic"}
    settings |= {name: ast.literal_eval(value) for name, value in (option.split("=") for option in arguments.set)}
    learner = registry.learners[arguments.learner](arguments.task, **settings)
    steps = -(-arguments.steps // learner.samples_per_step)
    telemetry = train(learner, arguments.seeds, steps)
    frame = pd.DataFrame(
        {
            "seed": np.tile(np.arange(arguments.seeds), steps),
            "env_steps": np.repeat((np.arange(steps) + 1) * learner.samples_per_step, arguments.seeds),
            "performance": telemetry["performance"].ravel(),
            "evaluation": telemetry["evaluation_return"].ravel(),
        }
    )
    frame.to_csv(arguments.out, index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
