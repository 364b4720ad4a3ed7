"""The Gymnasium v5 MuJoCo tasks, each written once for every physics engine.

Observation, reward and termination take arrays with any leading batch axes, and work alike on NumPy float64
(in C MuJoCo's host callback) and on traced JAX arrays (MJX).
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxaudit import registry

Array = Any  # numpy.ndarray or jax.Array


class Physics(NamedTuple):
    """What a definition may look at: generalised positions `[..., nq]` and velocities `[..., nv]`."""

    qpos: Array
    qvel: Array


@dataclasses.dataclass(frozen=True)
class MujocoTask:
    """One task, independent of the engine that moves it.

    Attributes:
        name: Gymnasium's name for it.
        xml: model file among the assets of the gymnasium wheel.
        frame_skip: physics steps in one env step; the action is held constant.
        reset: `(key, init_qpos, init_qvel) -> (qpos, qvel)`, a draw from the initial distribution, in JAX.
        observe: `(physics) -> [..., observation_size]`.
        reward: `(before, after, action, dt) -> {part: [...]}`; the reward is the sum of the parts. The action
            is the one given, not the one clamped to the control range; `dt` is an env step's duration in
        seconds. terminated: `(after) -> [...]`, boolean.
        max_episode_steps: the time limit, which the episode wrapper enforces.
        iterations, ls_iterations: MJX's Newton solver. 4 and 6 are as exact as the model's own settings on
            every Gymnasium task but Ant; fewer simulate another robot.
    """

    name: str
    xml: str
    frame_skip: int
    reset: Callable[[jax.Array, Array, Array], tuple[jax.Array, jax.Array]]
    observe: Callable[[Physics], Array]
    reward: Callable[[Physics, Physics, Array, float], dict[str, Array]]
    terminated: Callable[[Physics], Array]
    max_episode_steps: int = 1000
    iterations: int = 4
    ls_iterations: int = 6

    @property
    def path(self) -> Path:
        """Where the gymnasium wheel keeps the model."""
        gymnasium = importlib.util.find_spec("gymnasium")
        assert gymnasium is not None, "gymnasium is a dependency"
        assert gymnasium.submodule_search_locations, "gymnasium is a package"
        return Path(gymnasium.submodule_search_locations[0]) / "envs" / "mujoco" / "assets" / self.xml


def _uniform(key: jax.Array, centre: Array, scale: float) -> jax.Array:
    centre = jnp.asarray(centre, jnp.float32)
    return centre + jax.random.uniform(key, centre.shape, minval=-scale, maxval=scale)


def _normal(key: jax.Array, centre: Array, scale: float) -> jax.Array:
    centre = jnp.asarray(centre, jnp.float32)
    return centre + scale * jax.random.normal(key, centre.shape)


def _pendulum_reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
    position_key, velocity_key = jax.random.split(key)
    return _uniform(position_key, init_qpos, 0.01), _uniform(velocity_key, init_qvel, 0.01)


def _pendulum_observe(physics: Physics) -> Array:
    xp = physics.qpos.__array_namespace__()
    return xp.concat([physics.qpos, physics.qvel], axis=-1)


def _pendulum_terminated(after: Physics) -> Array:
    observation = _pendulum_observe(after)
    xp = observation.__array_namespace__()
    return ~xp.isfinite(observation).all(-1) | (abs(after.qpos[..., 1]) > 0.2)


def _pendulum_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {"reward_survive": (~_pendulum_terminated(after)).astype(after.qpos.dtype)}


def _cheetah_reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
    position_key, velocity_key = jax.random.split(key)
    return _uniform(position_key, init_qpos, 0.1), _normal(velocity_key, init_qvel, 0.1)


def _cheetah_observe(physics: Physics) -> Array:
    xp = physics.qpos.__array_namespace__()
    return xp.concat([physics.qpos[..., 1:], physics.qvel], axis=-1)


def _cheetah_reward(before: Physics, after: Physics, action: Array, dt: float) -> dict[str, Array]:
    return {
        "reward_forward": (after.qpos[..., 0] - before.qpos[..., 0]) / dt,
        "reward_ctrl": -0.1 * (action**2).sum(-1),
    }


def _never(after: Physics) -> Array:
    xp = after.qpos.__array_namespace__()
    return xp.zeros(after.qpos.shape[:-1], dtype=bool)


INVERTED_PENDULUM = MujocoTask(
    name="InvertedPendulum-v5",
    xml="inverted_pendulum.xml",
    frame_skip=2,
    reset=_pendulum_reset,
    observe=_pendulum_observe,
    reward=_pendulum_reward,
    terminated=_pendulum_terminated,
)

HALF_CHEETAH = MujocoTask(
    name="HalfCheetah-v5",
    xml="half_cheetah.xml",
    frame_skip=5,
    reset=_cheetah_reset,
    observe=_cheetah_observe,
    reward=_cheetah_reward,
    terminated=_never,
)

TASKS = {task.name: task for task in (INVERTED_PENDULUM, HALF_CHEETAH)}

for _name, _task in TASKS.items():
    registry.tasks.register(_name, _task)
