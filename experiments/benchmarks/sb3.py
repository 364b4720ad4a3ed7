"""Times a learner of Stable-Baselines3 with the settings of Table S2.

It warms up, prints "ready", trains when it gets a line of input, and prints the seconds. `common.sb3` calls it as
`python sb3.py LEARNER THREADS ENVS STEPS`. The settings are those of ../returns/sb3_returns.py.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "returns"))

import sb3_returns

WARM_UP = {"ppo": 2048, "trpo": 2048, "sac": 512, "td3": 512}


def main(learner: str, threads: int, envs: int, steps: int) -> None:
    """Warms up and trains."""
    torch.set_num_threads(threads)
    agent = sb3_returns.LEARNERS[learner]("HalfCheetah-v5", 0, envs)
    agent.learning_starts = WARM_UP[learner] // 2  # for SAC and TD3, so that the second half of the warm-up learns
    agent.learn(WARM_UP[learner])
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    agent.learn(steps, reset_num_timesteps=learner in ("ppo", "trpo"))
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
