"""PPO of Stable-Baselines3 with a learning-rate spike by a callback; writes the performance of every iteration as CSV.

    python experiments/external/sb3_ppo.py OUT.csv --seeds 20 --magnitudes 30 100 200 400 1000 --processes 2

The settings are those of `sb3_ppo.toml`, which this package audits; see `compare.py`. Changes of values are not
clipped, since the two packages clip them in different ways (`--clip-value`). Needs stable-baselines3 and
gymnasium[mujoco]. Columns: seed, magnitude (1: undisturbed), step (iteration), performance (the mean over environments
of the returns of the latest complete episodes).
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "returns"))

import sb3_returns
from trainings import write_trainings

TASK, ENVS, ROLLOUT = "InvertedPendulum-v5", 4, 64
STEPS, ONSET, DURATION = 200, 80, 5


class Spike(BaseCallback):
    """Multiplies the learning rate in the iterations of a window, and records the performance of each iteration.

    Performance is recorded after the rollout and before the updates of an iteration. This package's learners record it
    after both, but from the same rollout, so that neither includes the updates of the same iteration.
    """

    def __init__(self, magnitude: float, until: int):
        super().__init__()
        self.magnitude, self.until, self.step = magnitude, until, 0
        self.latest = np.full(ENVS, np.nan)
        self.performance: list[float] = []

    def _on_training_start(self) -> None:
        self.usual = self.model.lr_schedule

    def _on_step(self) -> bool:
        for index, info in enumerate(self.locals["infos"]):
            if "episode" in info:
                self.latest[index] = info["episode"]["r"]
        return self.step < self.until

    def _on_rollout_end(self) -> None:
        finished = self.latest[~np.isnan(self.latest)]
        self.performance.append(float(finished.mean()) if finished.size else float("nan"))
        factor = self.magnitude if ONSET <= self.step < ONSET + DURATION else 1.0
        self.model.lr_schedule = lambda remaining: factor * self.usual(remaining)
        self.step += 1


def train(job: tuple[int, float, int, bool]) -> list[tuple[int, float, int, float]]:
    """Runs one training, and returns its rows."""
    seed, magnitude, until, clip_value = job
    torch.set_num_threads(1)
    sb3_returns.ITERATION = ENVS * ROLLOUT
    agent = sb3_returns.ppo(TASK, seed, ENVS)
    if not clip_value:
        agent.clip_range_vf = None
    curve = Spike(magnitude, until)
    try:
        agent.learn(STEPS * ENVS * ROLLOUT, callback=curve)
    except ValueError as error:  # torch refuses to sample actions if parameters are not finite
        print(f"seed {seed}, magnitude {magnitude:g}: {str(error).splitlines()[0][:80]}", flush=True)
        curve.performance += [float("nan")] * (until - len(curve.performance))
    return [(seed, magnitude, step, value) for step, value in enumerate(curve.performance)]


def main() -> None:
    """Trains every seed undisturbed and at every magnitude."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("out", type=Path)
    options.add_argument("--seeds", type=int, default=20)
    options.add_argument("--magnitudes", type=float, nargs="*", default=[30, 100, 200, 400, 1000])
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--until", type=int, default=STEPS, help="iterations to train; the rate is annealed over 200")
    options.add_argument(
        "--clip-value", action="store_true", help="clip changes of values by 0.2, as Stable-Baselines3 does"
    )
    arguments = options.parse_args()
    jobs = list(
        product(range(arguments.seeds), [1.0, *arguments.magnitudes], [arguments.until], [arguments.clip_value])
    )
    write_trainings(arguments.out, train, jobs, arguments.processes)


if __name__ == "__main__":
    main()
