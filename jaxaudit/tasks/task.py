"""What a MuJoCo task is, independent of the engine that moves it."""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Array = Any  # numpy.ndarray or jax.Array


class Physics(NamedTuple):
    """What a definition may look at, `[..., n]`; NumPy float64 on the C engine, traced float32 on MJX.

    The derived quantities carry MuJoCo's names, and there are only those that the definition's `needs` lists.
    They describe what MuJoCo last evaluated, as in Gymnasium: after a step the last substep's start or, under
    Runge-Kutta, its last stage, a little before `qpos`.

    Attributes:
        qpos, qvel: generalised positions `[..., nq]` and velocities `[..., nv]`.
        track: `[..., k]`, what the definition's `track` gave.
        xpos: `[..., nbody, 3]`, origins of the bodies' frames.
        site_xpos: `[..., nsite, 3]`.
        subtree_com: `[..., nbody, 3]`, mass centres of the bodies' subtrees.
        cinert, cvel: `[..., nbody, 10]` and `[..., nbody, 6]`, inertia and velocity about the mass centre.
        qfrc_actuator, qfrc_constraint: `[..., nv]`, generalised forces.
        cfrc_ext: `[..., nbody, 6]`, the bodies' contact forces: zero after a reset, as in Gymnasium.
    """

    qpos: Array
    qvel: Array
    track: Array = None
    xpos: Array = None
    site_xpos: Array = None
    subtree_com: Array = None
    cinert: Array = None
    cvel: Array = None
    qfrc_actuator: Array = None
    qfrc_constraint: Array = None
    cfrc_ext: Array = None

    @property
    def xp(self) -> ModuleType:
        """The arrays' own namespace: NumPy's or JAX's."""
        return self.qpos.__array_namespace__()


def never(after: Physics) -> Array:
    """Returns False for all environments: no episode is terminated."""
    return after.xp.zeros(after.qpos.shape[:-1], dtype=bool)


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
            seconds. Of `before` there are positions, velocities and `track`.
        terminated: `(after) -> [...]`, boolean.
        max_episode_steps: the time limit, which the episode wrapper enforces.
        needs: the derived quantities that the functions here look at, fields of `Physics`. What is not named
            is not computed.
        track: `(physics) -> [..., k]`, derived positions whose change over a step is rewarded. They are kept
            from one step to the next, because they lag behind the positions.
        iterations, ls_iterations: MJX's Newton solver; fewer simulate another robot. Measured in
            experiments/tasks.
    """

    name: str
    xml: str
    frame_skip: int
    reset: Callable[[jax.Array, Array, Array], tuple[jax.Array, jax.Array]]
    observe: Callable[[Physics], Array]
    reward: Callable[[Physics, Physics, Array, float], dict[str, Array]]
    terminated: Callable[[Physics], Array] = never
    max_episode_steps: int = 1000
    needs: tuple[str, ...] = ()
    track: Callable[[Physics], Array] | None = None
    iterations: int = 4
    ls_iterations: int = 6

    @property
    def path(self) -> Path:
        """Where the gymnasium wheel keeps the model."""
        gymnasium = importlib.util.find_spec("gymnasium")
        assert gymnasium is not None, "gymnasium is a dependency"
        assert gymnasium.submodule_search_locations, "gymnasium is a package"
        return Path(gymnasium.submodule_search_locations[0]) / "envs" / "mujoco" / "assets" / self.xml


def uniform(key: jax.Array, centre: Array, scale: float) -> jax.Array:
    """Draw uniformly from the box of half-width `scale` around `centre`, in float32."""
    centre = jnp.asarray(centre, jnp.float32)
    return centre + jax.random.uniform(key, centre.shape, minval=-scale, maxval=scale)


def normal(key: jax.Array, centre: Array, scale: float) -> jax.Array:
    """Draw from the normal distribution around `centre`, in float32."""
    centre = jnp.asarray(centre, jnp.float32)
    return centre + scale * jax.random.normal(key, centre.shape)


def reset_around_start(
    scale: float, velocity: Callable[[jax.Array, Array, float], jax.Array] = uniform
) -> Callable[[jax.Array, Array, Array], tuple[jax.Array, jax.Array]]:
    """Make a reset that adds noise to the initial state: uniform in position, `uniform` or `normal` in velocity."""

    def reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
        position_key, velocity_key = jax.random.split(key)
        return uniform(position_key, init_qpos, scale), velocity(velocity_key, init_qvel, scale)

    return reset


def control_cost(action: Array, weight: float) -> Array:
    """Charge for the action `[..., nu]`, as a reward `[...]`."""
    return -weight * (action**2).sum(-1)
