"""What both physics engines share: the model, the reset, and the sizes that brax's interface asks for."""

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
