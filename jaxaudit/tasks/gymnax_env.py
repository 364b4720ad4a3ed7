"""gymnax' environments as tasks, with discrete actions or continuous ones: `gymnax:Breakout-MinAtar`."""

import importlib.util
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.runtime.registry import task_kinds
from jaxaudit.tasks._brax import Env, State
from jaxaudit.tasks.foreign import ForeignTask

DOWNLOADS = ("MNISTBandit-bsuite",)
"""Environments that fetch data from the internet when they are made."""


@struct.dataclass
class GymnaxState:
    """A simulation.

    Attributes:
        env: gymnax' state.
        words: uint32 `[2]`, the key of its next step's randomness.
    """

    env: Any
    words: jax.Array


class GymnaxEnv(Env):
    """An environment with gymnax' functions, in brax's interface; unbatched.

    Observations are vectors: images are flattened, and an integer becomes a one-hot vector. An action that is not
    finite, or not one of the discrete ones, gives NaN observation and reward, leaves the simulation where it was and
    does not end the episode.

    Args:
        env: an `Environment` of gymnax'.
        params: its parameters.

    Attributes:
        actions: how many discrete ones there are; None if they are continuous.
        action_low, action_high: `[action_size]` float32, of continuous actions.
        max_episode_steps: the time limit. Not enforced here.
        cheap_reset: gymnax itself resets at every step.
    """

    cheap_reset = True

    def __init__(self, env: Any, params: Any):
        self.env, self.params = env, params
        self.max_episode_steps = int(params.max_steps_in_episode)
        space = env.action_space(params)
        self._action_shape = space.shape
        self.actions: int | None = int(space.n) if hasattr(space, "n") else None
        if self.actions is None:
            self.action_low, self.action_high = (
                np.broadcast_to(np.asarray(bound, np.float32), space.shape).ravel() for bound in (space.low, space.high)
            )
        self._numbers = getattr(env.observation_space(params), "n", None)
        self._observation_size = int(jax.eval_shape(self.reset, jax.random.key(0)).obs.size)

    def reset(self, rng: jax.Array) -> State:
        """Draw an initial state."""
        reset_key, steps_key = jax.random.split(rng)
        observation, inner = self.env.reset_env(reset_key, self.params)
        # Some values are Python's numbers, and a scan's carry wants arrays of one type.
        inner = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), inner)
        zero = jnp.zeros((), jnp.float32)
        words = jax.random.bits(steps_key, (2,), jnp.uint32)
        return State(GymnaxState(inner, words), self._vector(observation), zero, zero)

    def step(self, state: State, action: jax.Array) -> State:
        """Advance by one env step under an action: a scalar int32, or `[action_size]` where actions are continuous."""
        before: GymnaxState = state.pipeline_state
        key = jax.random.wrap_key_data(before.words, impl="threefry2x32")
        step_key, next_key = jax.random.split(key)
        if self.actions is None:
            possible = jnp.isfinite(action).all()
        else:
            possible = (action >= 0) & (action < self.actions)
        # Rules are written for possible actions alone; what they make of another is not looked at.
        observation, moved, reward, done, _ = self.env.step_env(
            step_key, before.env, action.reshape(self._action_shape), self.params
        )
        kept = jax.tree.map(lambda new, old: jnp.where(possible, new, old).astype(old.dtype), moved, before.env)
        unless_impossible = jnp.where(possible, 0.0, jnp.nan)
        return state.replace(
            pipeline_state=GymnaxState(kept, jax.random.key_data(next_key)),
            obs=self._vector(observation) + unless_impossible,
            reward=jnp.asarray(reward, jnp.float32).reshape(()) + unless_impossible,
            done=(jnp.reshape(done, ()) & possible).astype(jnp.float32),
        )

    def _vector(self, observation: jax.Array) -> jax.Array:
        if self._numbers is not None:
            return jax.nn.one_hot(observation, self._numbers)
        return jnp.asarray(observation, jnp.float32).ravel()

    @property
    def observation_size(self) -> int:
        """Length of an observation."""
        return self._observation_size

    @property
    def action_size(self) -> int:
        """Length of an action: 1 where it is one of several."""
        return int(np.prod(self._action_shape))

    @property
    def backend(self) -> str:
        """The physics engine's name."""
        return "jax"


def _gymnax() -> Any:
    if importlib.util.find_spec("gymnax") is None:
        raise ValueError("gymnax' tasks need the package 'gymnax': pip install 'jaxaudit[gymnax]'")
    import gymnax

    return gymnax


@task_kinds.register("gymnax")
@dataclass(frozen=True)
class GymnaxTask(ForeignTask):
    """gymnax' environments, with the extra jaxaudit[gymnax]: classic control, MinAtar, bsuite."""

    kind: ClassVar[str] = "gymnax"

    @classmethod
    def names(cls) -> list[str]:
        """The environments' names. Raises ValueError if the package is missing."""
        return [name for name in _gymnax().registered_envs if name not in DOWNLOADS]

    def make(self) -> GymnaxEnv:
        """The environment, with its default parameters."""
        return GymnaxEnv(*_gymnax().make(self.bare))
