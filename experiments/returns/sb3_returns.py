"""Trains Stable-Baselines3 with the settings of this package's learners, and writes the learning curve as CSV.

    python sb3_returns.py LEARNER TASK STEPS SEED OUT.csv

There is a row every 2048 env steps with the mean return of the latest complete episode of each environment
("performance", as in this package), and a last row with the mean return of ten episodes under the mean action
("evaluation").
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import gymnasium
import numpy as np
import torch
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

ENVS = 8
ITERATION = 2048


class Curve(BaseCallback):
    """Records the mean of the environments' latest returns at every iteration."""

    def __init__(self):
        super().__init__()
        self.latest = np.full(ENVS, np.nan)
        self.rows: list[tuple[int, float]] = []

    def _on_step(self) -> bool:
        for index, info in enumerate(self.locals["infos"]):
            if "episode" in info:
                self.latest[index] = info["episode"]["r"]
        if self.num_timesteps % ITERATION == 0:
            finished = self.latest[~np.isnan(self.latest)]
            self.rows.append((self.num_timesteps, float(finished.mean()) if finished.size else float("nan")))
        return True


def ppo(task: str, seed: int, envs: int = ENVS) -> PPO:
    """PPO with normalised observations and rewards, and an annealed learning rate.

    Its value loss is the mean squared error, which is twice this package's. It clips changes of values, while this
    package takes the maximum of the clipped and the unclipped loss.
    """
    return PPO(
        "MlpPolicy",
        VecNormalize(_environments(task, envs)),
        learning_rate=lambda remaining: 3e-4 * remaining,
        n_epochs=10,
        clip_range_vf=0.2,
        ent_coef=0.01,
        vf_coef=0.25,
        **_on_policy(seed, envs),
    )


def trpo(task: str, seed: int, envs: int = ENVS) -> BaseAlgorithm:
    """TRPO of sb3-contrib with normalised observations and rewards."""
    from sb3_contrib import TRPO

    return TRPO("MlpPolicy", VecNormalize(_environments(task, envs)), **_on_policy(seed, envs))


def sac(task: str, seed: int, envs: int = ENVS) -> SAC:
    """SAC with the fixed temperature of Table S2."""
    return SAC("MlpPolicy", _environments(task, envs), ent_coef=0.2, **_off_policy(seed, envs))


def td3(task: str, seed: int, envs: int = ENVS) -> TD3:
    """TD3 with exploration noise 0.1."""
    env = _environments(task, envs)
    size = env.action_space.shape[0]
    noise = VectorizedActionNoise(NormalActionNoise(np.zeros(size), 0.1 * np.ones(size)), envs)
    return TD3("MlpPolicy", env, action_noise=noise, **_off_policy(seed, envs))


LEARNERS = {"ppo": ppo, "trpo": trpo, "sac": sac, "td3": td3}


def _on_policy(seed: int, envs: int) -> dict:
    return {
        "n_steps": ITERATION // envs,
        "batch_size": 64,
        "policy_kwargs": {"net_arch": [64, 64], "activation_fn": torch.nn.Tanh},
        "device": "cpu",
        "seed": seed,
    }


def _off_policy(seed: int, envs: int) -> dict:
    return {
        "learning_rate": 3e-4,
        "batch_size": 256,
        "buffer_size": 1_000_000,
        "learning_starts": 10_000,
        "train_freq": 1,
        "gradient_steps": envs,
        "policy_kwargs": {"net_arch": [256, 256]},
        "device": "cpu",
        "seed": seed,
    }


def _environments(task: str, envs: int) -> DummyVecEnv:
    make = lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(task))  # noqa: E731
    return DummyVecEnv([make] * envs)


def evaluate(agent: BaseAlgorithm, task: str, episodes: int = 10) -> float:
    """Returns the mean return under the mean action."""
    env = gymnasium.make(task)
    normalize = agent.get_vec_normalize_env()
    returns = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=1000 + episode)
        total, done = 0.0, False
        while not done:
            normalised = observation if normalize is None else normalize.normalize_obs(observation)
            action, _ = agent.predict(normalised, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total, done = total + float(reward), terminated or truncated
        returns.append(total)
    return float(np.mean(returns))


def main(learner: str, task: str, steps: int, seed: int, out: Path) -> None:
    """Trains, evaluates, and writes the curve."""
    torch.set_num_threads(1)
    agent = LEARNERS[learner](task, seed)
    curve = Curve()
    agent.learn(steps, callback=curve)
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["env_steps", "performance", "evaluation"])
        writer.writerows((steps, value, "") for steps, value in curve.rows)
        writer.writerow([agent.num_timesteps, curve.rows[-1][1], evaluate(agent, task)])


if __name__ == "__main__":
    name, task_name, count, seed_given, path = sys.argv[1:]
    main(name, task_name, int(count), int(seed_given), Path(path))
