"""What both physics engines share: the model, the reset, and the sizes that brax's interface asks for."""

import functools

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
from flax import struct

from jaxaudit.tasks._brax import Env, State
from jaxaudit.tasks.definitions import MujocoTask, Physics


@struct.dataclass
class PhysicsState:
    """The state of a simulation, each value the sum of two float32 numbers.

    Columns: positions, velocities, actuator activations, and the accelerations that warm-start the constraint
    solver. The sum holds a double's leading 48 bits, so C MuJoCo's trajectories survive 32-bit JAX; MJX
    leaves `low` at zero.

    Attributes:
        high: `[..., nq + nv + na + nv]` float32, NaN once the simulation has diverged.
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
    """A task on an engine; a subclass adds `step` and `backend`. Batch it with `jax.vmap`.

    Attributes:
        task: the definition.
        max_episode_steps: the task's time limit. Not enforced here.
        action_low, action_high: `[action_size]` float32, the bounds of Gymnasium's action space. Actions
            outside are clamped by the physics, and paid for unclamped.
        cheap_reset: True: a full reset each step costs nothing worth saving.
    """

    cheap_reset = True

    def __init__(self, task: MujocoTask):
        self.task = task
        self.max_episode_steps = task.max_episode_steps
        self.model = load_model(task)
        self.dt = float(self.model.opt.timestep * task.frame_skip)
        self.action_low, self.action_high = self.model.actuator_ctrlrange.astype(np.float32).T
        # Gymnasium's own initial state is that of a fresh MjData.
        self._init_qpos = self.model.qpos0.copy()
        self._init_qvel = np.zeros(self.model.nv)

    def reset(self, rng: jax.Array) -> State:
        """Draw an initial state from the task's distribution."""
        qpos, qvel = self.task.reset(rng, self._init_qpos, self._init_qvel)
        rest = jnp.zeros(self.model.na + self.model.nv)
        high = jnp.concatenate([qpos, qvel, rest]).astype(jnp.float32)
        physics = Physics(qpos, qvel)
        parts = jax.eval_shape(
            lambda action: self.task.reward(physics, physics, action, self.dt), jnp.zeros(self.action_size)
        )
        zero = jnp.zeros((), jnp.float32)
        return State(
            pipeline_state=PhysicsState(high, jnp.zeros_like(high)),
            obs=self.task.observe(physics).astype(jnp.float32),
            reward=zero,
            done=zero,
            metrics=dict.fromkeys(parts, zero),
        )

    def physics(self, columns: jax.Array | np.ndarray) -> Physics:
        """Name the columns of a physics state `[..., n]` that a definition looks at."""
        nq, nv = self.model.nq, self.model.nv
        return Physics(columns[..., :nq], columns[..., nq : nq + nv])

    @property
    def observation_size(self) -> int:
        """Length of an observation."""
        return jax.eval_shape(self.reset, jax.random.key(0)).obs.shape[-1]

    @property
    def action_size(self) -> int:
        """Length of an action."""
        return int(self.model.nu)
