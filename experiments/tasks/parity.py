"""Errors of this package's tasks against Gymnasium, after one env step from each of Gymnasium's states.

Gymnasium steps under random actions, a tenth of them out of range. Each of its states is then stepped once by this
package. Errors are relative to the largest component of Gymnasium's observation (or to its reward), or to 1.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from fusion_emitters import emitters

from jaxaudit.tasks import TASKS, make
from jaxaudit.tasks.engine import MujocoEnv, PhysicsState
from jaxaudit.tasks.engine_mjx import MjxEnv

OPTIONS = emitters(False) if jax.default_backend() == "cpu" else None


@dataclass(frozen=True)
class Reference:
    """T steps of Gymnasium: the state before each `[T, n]`, the action, and the results."""

    columns: np.ndarray
    action: np.ndarray
    observation: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray


def reference(env: MujocoEnv, steps: int) -> Reference:
    """Steps Gymnasium, and resets it at the ends of episodes."""
    rng = np.random.default_rng(0)
    gymnasium_env = gymnasium.make(env.task.name)
    data, space = gymnasium_env.unwrapped.data, gymnasium_env.action_space
    rows = []
    ended = True
    for t in range(steps):
        if ended:
            gymnasium_env.reset(seed=t)
        before = columns(env, data)
        action = (1.5 if t % 10 == 0 else 1.0) * rng.uniform(space.low, space.high)
        action = action.astype(np.float32).astype(np.float64)
        observation, reward, terminated, truncated, _ = gymnasium_env.step(action)
        ended = terminated or truncated
        rows.append((before, action, observation, reward, terminated))
    return Reference(*(np.array(column) for column in zip(*rows, strict=True)))


def columns(env: MujocoEnv, data) -> np.ndarray:
    """Returns the columns of `PhysicsState` for an MjData."""
    core = np.concatenate([data.qpos, data.qvel, data.act, data.qacc_warmstart])
    if not env.tracked:
        return core
    derived = {name: getattr(data, name).copy() for name in env.task.needs}
    return np.concatenate([core, env.physics(core, derived).track])


@dataclass(frozen=True)
class Errors:
    """Relative errors and whether the termination differs, `[T]` each, and env steps per second."""

    observation: np.ndarray
    reward: np.ndarray
    termination: np.ndarray
    rate: float


def errors(env: MujocoEnv, reference_: Reference, width: int) -> Errors:
    """Steps once from every state, `width` states at a time."""
    high = reference_.columns.astype(np.float32)
    low = (reference_.columns - high).astype(np.float32) * (env.backend == "c")
    state = jax.jit(jax.vmap(env.reset), compiler_options=OPTIONS)(jax.random.split(jax.random.key(0), width))
    step = jax.jit(jax.vmap(env.step), compiler_options=OPTIONS)
    results, seconds = [], []
    for first in range(0, len(high), width):
        rows = np.arange(first, first + width) % len(high)
        start = state.replace(pipeline_state=PhysicsState(jnp.array(high[rows]), jnp.array(low[rows])))
        action = jnp.array(reference_.action[rows], jnp.float32)
        start_time = time.perf_counter()
        results.append(jax.block_until_ready(step(start, action)))
        seconds.append(time.perf_counter() - start_time)
    steps = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(high)].astype(np.float64), *results)
    scale = np.maximum(1.0, np.abs(reference_.observation).max(1))
    return Errors(
        np.abs(steps.obs - reference_.observation).max(1) / scale,
        np.abs(steps.reward - reference_.reward) / np.maximum(1.0, np.abs(reference_.reward)),
        (steps.done > 0.5) != reference_.terminated,
        width / min(seconds),
    )


def build(name: str, physics: str, iterations: int | None = None, ls_iterations: int | None = None) -> MujocoEnv:
    """Returns the task on a physics engine, on MJX optionally with other solver settings."""
    if iterations is None or ls_iterations is None:
        return make(name, physics)
    return MjxEnv(replace(TASKS[name], iterations=iterations, ls_iterations=ls_iterations))


def row(label: str, task_errors: Errors) -> str:
    """Returns a line of the table."""
    numbers = [f"{np.quantile(e, 0.99):.1e} ({e.max():.1e})" for e in (task_errors.observation, task_errors.reward)]
    return f"| {label} | {numbers[0]} | {numbers[1]} | {task_errors.termination.sum()} | {task_errors.rate:,.0f} |"


HEADER = """\
| {} | observation: 99th percentile (largest) | reward | other terminations | env steps/s |
|---|---|---|---|---|"""


def main() -> None:
    """Prints the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("tasks", nargs="*", default=sorted(TASKS), help="all of them")
    options.add_argument("--physics", choices=("c", "mjx"), default="c")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--width", type=int, default=100, help="MJX on a CPU can hang at many hundreds")
    arguments = options.parse_args()
    print(HEADER.format(f"task, physics = {arguments.physics}"))
    for name in arguments.tasks:
        env = build(name, arguments.physics)
        print(row(name, errors(env, reference(env, arguments.steps), arguments.width)), flush=True)


if __name__ == "__main__":
    main()
