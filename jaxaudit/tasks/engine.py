"""What both physics engines share: the model, the reset, and the sizes that brax's interface asks for."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct

from jaxaudit.tasks._brax import Env, State
from jaxaudit.tasks.task import Array, MujocoTask, Physics

NAMES = ("friction", "gear", "gravity", "mass")

# MuJoCo's fields, each with the factor that scales it.
SCALED = {
    "body_mass": "mass",
    "body_inertia": "mass",
    "body_subtreemass": "mass",
    "geom_friction": "friction",
    "pair_friction": "friction",
    "actuator_gear": "gear",
    "opt.gravity": "gravity",
}


def neutral() -> dict[str, jax.Array]:
    """Return the factors that change nothing: scalars, float32."""
    return {name: jnp.ones((), jnp.float32) for name in NAMES}


def stacked(info: dict[str, Any]) -> jax.Array | None:
    """Return the factors that a state's `info` holds, `[4]` in the order of NAMES, or None if it holds none."""
    if "dynamics" not in info:
        return None
    return jnp.stack([jnp.asarray(info["dynamics"][name], jnp.float32) for name in NAMES])


def valid(factors: Any) -> Any:
    """Tell, `[...]`, which of the factors `[..., 4]` a simulation can run with: finite, and a positive mass."""
    xp = np if isinstance(factors, np.ndarray) else jnp
    return xp.isfinite(factors).all(-1) & (factors[..., NAMES.index("mass")] > 0)


@struct.dataclass
class PhysicsState:
    """The state of a simulation, each value the sum of two float32 numbers.

    Columns: positions, velocities, actuator activations, the accelerations that warm-start the constraint
    solver, and what the task tracks. The sum holds a double's leading 48 bits, so C MuJoCo's trajectories
    survive 32-bit JAX; MJX leaves `low` at zero.

    Attributes:
        high: `[..., nq + nv + na + nv + k]` float32, NaN once the simulation has diverged.
        low: the same shape, what rounding `high` lost.
    """

    high: jax.Array
    low: jax.Array


@functools.cache
def _silence() -> None:
    """Stop MuJoCo, in this process, from printing warnings and writing them to MUJOCO_LOG.TXT."""
    config = mujoco.MjLogConfig.get()
    config.logto_console = False
    config.logto_file = False
    mujoco.MjLogConfig.set(config)


@functools.cache
def load_model(task: MujocoTask) -> mujoco.MjModel:
    """Return the task's model as Gymnasium loads it; one per process, so do not change it."""
    _silence()
    return mujoco.MjModel.from_xml_path(str(task.path))


class MujocoEnv(Env):
    """A task on an engine; a subclass adds `step`, `first_look` and `backend`. Batch it with `jax.vmap`.

    A state's `info["dynamics"]`, if it has one, holds factors on the model's parameters, as `dynamics` does;
    factors that are not finite, or a mass that is not positive, do what a non-finite action does.

    Attributes:
        task: the definition.
        max_episode_steps: the task's time limit. Not enforced here.
        action_low, action_high: `[action_size]` float32, the bounds of Gymnasium's action space. Actions
            outside are clamped by the physics, and paid for unclamped.
        cheap_reset: whether a full reset each step costs nothing worth saving.
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
        """The factors on friction, gear, gravity and mass that change nothing: scalars, float32."""
        return neutral()

    def reset(self, rng: jax.Array) -> State:
        """Draw an initial state from the task's distribution."""
        qpos, qvel = self.task.reset(rng, self._init_qpos, self._init_qvel)
        observation, track = self.first_look(qpos, qvel)
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

    def first_look(self, qpos: jax.Array, qvel: jax.Array) -> tuple[jax.Array, PhysicsState]:
        """Return a new episode's observation `[O]` and tracked positions `[k]`, from `[nq]` and `[nv]`."""
        observation = self.task.observe(Physics(qpos, qvel)).astype(jnp.float32)
        return observation, PhysicsState(jnp.zeros(0), jnp.zeros(0))

    def physics(self, columns: Array, derived: Mapping[str, Array] | None = None) -> Physics:
        """Name the columns of a physics state `[..., n]` that a definition looks at, beside derived quantities.

        With these, `track` is made of them; without, it is the columns'.
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
