"""Stable-Baselines3's SAC or TD3 with Table S2's settings: warms up, says "ready", trains at a word, gives seconds.

Called by off_policy.py: `python sb3_off_policy.py LEARNER THREADS STEPS`. The settings are those of ../returns/sb3.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "returns"))

import sb3 as returns

WARM_UP = 512


def main(learner: str, threads: int, steps: int) -> None:
    """Trains."""
    torch.set_num_threads(threads)
    agent = {"sac": returns.sac, "td3": returns.td3}[learner]("HalfCheetah-v5", 0)
    agent.learning_starts = WARM_UP // 2
    agent.learn(WARM_UP)
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    agent.learn(steps, reset_num_timesteps=False)
    print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
