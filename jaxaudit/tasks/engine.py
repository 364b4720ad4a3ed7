"""MuJoCo tasks independent of the physics engine, and the base class of their environments on both engines."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct

from jaxaudit.tasks._brax import Env, State

Array = Any  # numpy.ndarray or jax.Array


class Physics(NamedTuple):
    """The physical quantities that a task's functions can use, `[..., n]`: NumPy float64 on C MuJoCo, traced float32 on
    MJX.

    Derived quantities have MuJoCo's names. Only those in the task's `needs` are present. They describe MuJoCo's last
    evaluation, as in Gymnasium: after a step that is the start of the last substep or, under Runge-Kutta, its last
    stage, slightly before `qpos`.

    Attributes:
      qpos, qvel: generalised positions `[..., nq]` and velocities `[..., nv]`.
      track: `[..., k]`, the result of the task's `track`.
      xpos: `[..., nbody, 3]`, origins of the bodies' frames.
      site_xpos: `[..., nsite, 3]`.
      subtree_com: `[..., nbody, 3]`, centres of mass of the bodies' subtrees.
      cinert, cvel: `[..., nbody, 10]` and `[..., nbody, 6]`, inertia and velocity about the centre of mass.
      qfrc_actuator, qfrc_constraint: `[..., nv]`, generalised forces.
      cfrc_ext: `[..., nbody, 6]`, contact forces on the bodies: zero after a reset, as in Gymnasium.
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
        """The array namespace of the quantities: NumPy's or JAX's."""
        return self.qpos.__array_namespace__()


def never(after: Physics) -> Array:
    """Returns False for all environments, for tasks whose episodes are never terminated."""
    return after.xp.zeros(after.qpos.shape[:-1], dtype=bool)


@dataclasses.dataclass(frozen=True)
class MujocoTask:
    """A MuJoCo task, independent of the physics engine.

    Attributes:
      name: Gymnasium's name of the task.
      xml: model file among the assets of the gymnasium wheel.
      frame_skip: number of physics steps in an env step, during which the action is constant.
      reset: `(key, init_qpos, init_qvel) -> (qpos, qvel)`, a sample of the initial distribution, in JAX.
      observe: `(physics) -> [..., observation_size]`.
      reward: `(before, after, action, dt) -> {part: [...]}`; the reward is the sum of the parts. The action is not yet
        clamped to the control range. `dt` is the duration of an env step in seconds. `before` has positions, velocities
        and `track` only.
      terminated: `(after) -> [...]`, boolean.
      max_episode_steps: the time limit, which the episode wrapper enforces.
      needs: the derived quantities that these functions use, fields of `Physics`. No others are computed.
      track: `(physics) -> [..., k]`, derived positions whose change over a step is rewarded. They are kept from one
        step to the next, because they lag behind the positions.
      iterations, ls_iterations: iterations of MJX's Newton solver and its line search. Fewer would simulate another
        robot (measured in experiments/tasks).
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
        """The path of the model file in the gymnasium wheel."""
        gymnasium = importlib.util.find_spec("gymnasium")
        assert gymnasium is not None, "gymnasium is a dependency"
        assert gymnasium.submodule_search_locations, "gymnasium is a package"
        return Path(gymnasium.submodule_search_locations[0]) / "envs" / "mujoco" / "assets" / self.xml


def uniform(key: jax.Array, centre: Array, scale: float) -> jax.Array:
    """Draws from the uniform distribution on the box of half-width `scale` around `centre`, in float32."""
    centre = jnp.asarray(centre, jnp.float32)
    return centre + jax.random.uniform(key, centre.shape, minval=-scale, maxval=scale)


def normal(key: jax.Array, centre: Array, scale: float) -> jax.Array:
    """Draws from the normal distribution around `centre` with standard deviation `scale`, in float32."""
    centre = jnp.asarray(centre, jnp.float32)
    return centre + scale * jax.random.normal(key, centre.shape)


def reset_around_start(
    scale: float, velocity: Callable[[jax.Array, Array, float], jax.Array] = uniform
) -> Callable[[jax.Array, Array, Array], tuple[jax.Array, jax.Array]]:
    """Returns a reset that adds noise to the initial state: uniform in position, `uniform` or `normal` in velocity."""

    def reset(key: jax.Array, init_qpos: Array, init_qvel: Array) -> tuple[jax.Array, jax.Array]:
        position_key, velocity_key = jax.random.split(key)
        return uniform(position_key, init_qpos, scale), velocity(velocity_key, init_qvel, scale)

    return reset


def control_cost(action: Array, weight: float) -> Array:
    """Returns the cost of an action `[..., nu]` as a negative reward `[...]`."""
    return -weight * (action**2).sum(-1)


FACTORS = ("friction", "gear", "gravity", "mass")
"""The names of the factors on a model's parameters, in the order of arrays of them."""

SCALED_FIELDS = {
    "body_mass": "mass",
    "body_inertia": "mass",
    "body_subtreemass": "mass",
    "geom_friction": "friction",
    "pair_friction": "friction",
    "actuator_gear": "gear",
    "opt.gravity": "gravity",
}
"""MuJoCo's fields, each with the name of the factor that scales it."""


def neutral_factors() -> dict[str, jax.Array]:
    """Returns the factors that leave the dynamics unchanged: scalars, float32."""
    return {name: jnp.ones((), jnp.float32) for name in FACTORS}


def stack_factors(info: dict[str, Any]) -> jax.Array | None:
    """Returns the factors in a state's `info` as `[4]` in the order of FACTORS, or None if it has none."""
    if "dynamics" not in info:
        return None
    return jnp.stack([jnp.asarray(info["dynamics"][name], jnp.float32) for name in FACTORS])


def valid_factors(factors: Any) -> Any:
    """Returns, `[...]`, whether factors `[..., 4]` are valid for a simulation: finite, with a positive mass."""
    xp = np if isinstance(factors, np.ndarray) else jnp
    return xp.isfinite(factors).all(-1) & (factors[..., FACTORS.index("mass")] > 0)


@struct.dataclass
class PhysicsState:
    """The state of a simulation, each number as a sum of two float32 numbers.

    The columns are positions, velocities, actuator activations, the accelerations that warm-start the constraint
    solver, and the task's `track`. The sum has the leading 48 bits of a double, so that C MuJoCo's trajectories are
    preserved in 32-bit JAX. MJX leaves `low` at zero.

    Attributes:
      high: `[..., nq + nv + na + nv + k]` float32, NaN once the simulation has diverged.
      low: the rounding error of `high`, of the same shape.
    """

    high: jax.Array
    low: jax.Array


@functools.cache
def _disable_warnings() -> None:
    """Stops MuJoCo, in this process, from printing warnings and writing them to MUJOCO_LOG.TXT."""
    config = mujoco.MjLogConfig.get()
    config.logto_console = False
    config.logto_file = False
    mujoco.MjLogConfig.set(config)


@functools.cache
def load_model(task: MujocoTask) -> mujoco.MjModel:
    """Returns the task's model as Gymnasium loads it. The model is shared within a process and must not be changed."""
    _disable_warnings()
    return mujoco.MjModel.from_xml_path(str(task.path))


class MujocoEnv(Env):
    """An environment of a task on a physics engine, to be batched with `jax.vmap`.

    Subclasses implement `step`, `initial_observation` and `backend`. A state's `info["dynamics"]`, if there is one, has
    factors on the model's parameters, as `dynamics` does. Factors that are not finite, or a mass that is not positive,
    have the effect of a non-finite action.

    Attributes:
      task: the task.
      max_episode_steps: the task's time limit, which is not enforced here.
      action_low, action_high: `[action_size]` float32, the bounds of Gymnasium's action space. The physics clamps
        actions outside of them, while the control cost uses them unclamped.
      cheap_reset: whether a full reset in each step costs little.
      parts: names of the parts of the reward, the keys of a state's `metrics`.
    """

    def __init__(self, task: MujocoTask):
        self.task = task
        self.max_episode_steps = task.max_episode_steps
        self.model = load_model(task)
        self.dt = float(self.model.opt.timestep * task.frame_skip)
        self.action_low, self.action_high = self.model.actuator_ctrlrange.astype(np.float32).T
        self.cheap_reset = not task.needs
        # Gymnasium's own initial state is that of a fresh MjData.
        self._init_qpos = self.model.qpos0.copy()
        self._init_qvel = np.zeros(self.model.nv)
        example = self._example()
        self._observation_size = task.observe(example).shape[-1]
        self.parts = tuple(task.reward(example, example, np.zeros(self.model.nu), self.dt))
        self.tracked = 0 if example.track is None else example.track.shape[-1]

    @property
    def dynamics(self) -> dict[str, jax.Array]:
        """The factors on friction, gear, gravity and mass that leave the dynamics unchanged: scalars, float32."""
        return neutral_factors()

    def reset(self, rng: jax.Array) -> State:
        """Draws an initial state from the task's distribution."""
        qpos, qvel = self.task.reset(rng, self._init_qpos, self._init_qvel)
        observation, track = self.initial_observation(qpos, qvel)
        rest = jnp.zeros(self.model.na + self.model.nv)
        high = jnp.concatenate([qpos, qvel, rest, track.high]).astype(jnp.float32)
        low = jnp.zeros_like(high).at[high.size - self.tracked :].set(track.low)
        zero = jnp.zeros((), jnp.float32)
        return State(
            pipeline_state=PhysicsState(high, low),
            obs=observation,
            reward=zero,
            done=zero,
            metrics=dict.fromkeys(self.parts, zero),
        )

    def initial_observation(self, qpos: jax.Array, qvel: jax.Array) -> tuple[jax.Array, PhysicsState]:
        """Returns a new episode's observation `[O]` and `track` `[k]` for positions `[nq]` and velocities `[nv]`."""
        observation = self.task.observe(Physics(qpos, qvel)).astype(jnp.float32)
        return observation, PhysicsState(jnp.zeros(0), jnp.zeros(0))

    def physics(self, columns: Array, derived: Mapping[str, Array] | None = None) -> Physics:
        """Returns the `Physics` of a state's columns `[..., n]` and derived quantities.

        With derived quantities, `track` is computed from them; without, it is taken from the columns.
        """
        nq, nv, na = self.model.nq, self.model.nv, self.model.na
        physics = Physics(columns[..., :nq], columns[..., nq : nq + nv], **(derived or {}))
        if self.task.track is None:
            return physics
        track = columns[..., nq + nv + na + nv :] if derived is None else self.task.track(physics)
        return physics._replace(track=track)

    def _example(self) -> Physics:
        data = mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, data)
        derived = {name: getattr(data, name).copy() for name in self.task.needs}
        return self.physics(np.concatenate([data.qpos, data.qvel, data.act, data.qacc]), derived)

    @property
    def observation_size(self) -> int:
        return self._observation_size

    @property
    def action_size(self) -> int:
        return int(self.model.nu)
