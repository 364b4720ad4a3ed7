"""Stable-Baselines3's PPO with Table S2's settings: warms up, says "ready", trains at a word, gives seconds.

Called by throughput.py: `python sb3.py THREADS ENVS ITERATIONS`.
"""

from __future__ import annotations

import json
import sys
import time

import gymnasium
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

ENV_STEPS = 2048


def main(threads: int, envs: int, iterations: int) -> None:
    """Trains."""
    torch.set_num_threads(threads)
    env = VecNormalize(DummyVecEnv([lambda: gymnasium.make("HalfCheetah-v5")] * envs))
    agent = PPO(
        "MlpPolicy",
        env,
        learning_rate=lambda remaining: 3e-4 * remaining,
        n_steps=ENV_STEPS // envs,
        batch_size=64,
        n_epochs=10,
        clip_range_vf=0.2,
        ent_coef=0.01,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
        device="cpu",
        seed=0,
    )
    agent.learn(ENV_STEPS)
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    agent.learn(iterations * ENV_STEPS)
    print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
