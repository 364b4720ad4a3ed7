"""Task kinds for environments of other packages: brax, MuJoCo Playground and gymnax."""

import contextlib
import importlib.util
import io
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.runtime.registry import check_name, task_kinds
from jaxaudit.tasks._brax import Env, State, brax_environments, make_brax


@dataclass(frozen=True)
class ForeignTask(ABC):
    """An environment of another package; the base class of task kinds that subclasses define by `names` and `make`.

    Attributes:
      engines: the allowed values of `physics`.
      name: the environment's name with the kind as a prefix, for example "brax:ant". The constructor also accepts the
        name without the prefix.
      physics: one of `engines`.
    """

    kind: ClassVar[str]
    gives: ClassVar[str] = "environment"
    engines: ClassVar[tuple[str, ...]] = ("auto",)

    name: str
    physics: str = "auto"

    def __post_init__(self):
        check_name(f"{self.kind} task", self.bare, self.names())
        check_name(f"physics of a {self.kind} task", self.physics, self.engines)
        object.__setattr__(self, "name", f"{self.kind}:{self.bare}")

    @property
    def bare(self) -> str:
        """The environment's name without the prefix of its kind."""
        return self.name.removeprefix(f"{self.kind}:")

    @classmethod
    @abstractmethod
    def names(cls) -> list[str]:
        """Returns the environments' names. Raises ValueError if the package is missing."""

    @abstractmethod
    def make(self) -> Env:
        """Returns the environment. Raises ValueError if the engine cannot run it."""

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the form of the kind's names only, because the package may be missing."""
        return [(f"{cls.kind}:<name>", "")]


class ForeignEnv(Env):
    """An adapter of an unbatched environment with brax's functions for learners.

    Observations are flat vectors; of several observations, the one named "state" is used. Episodes last
    `max_episode_steps` steps unless the environment ends them. Actions are between -1 and 1, and resets are too
    expensive for every step.

    Attributes:
      env: the adapted environment, whose state is a state's `pipeline_state`.
      max_episode_steps: the time limit, which is not enforced here.
      action_low, action_high: `[action_size]` float32.

    Raises:
      ValueError: the observations are images.
    """

    cheap_reset = False

    def __init__(self, env: Any, name: str, backend: str, max_episode_steps: int):
        self.env = env
        self.max_episode_steps = max_episode_steps
        self._backend = backend
        self.action_high = np.ones(self.action_size, np.float32)
        self.action_low = -self.action_high
        shape = jax.eval_shape(self.reset, jax.random.key(0)).obs.shape
        if len(shape) != 1:
            raise ValueError(f"task {name!r} has observations of shape {shape}, but a learner needs vectors")
        self._observation_size = shape[0]

    def reset(self, rng: jax.Array) -> State:
        typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        return _brax_state(self.env.reset(jax.random.key_data(rng) if typed else rng))

    def step(self, state: State, action: jax.Array) -> State:
        """Advances by one env step under an action `[action_size]`."""
        before = state.pipeline_state
        # A scan's carry must keep its dtypes, which not every environment does.
        after = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), self.env.step(before, action), before)
        return _brax_state(after).replace(info=state.info)

    @property
    def observation_size(self) -> int:
        return self._observation_size

    @property
    def action_size(self) -> int:
        return int(self.env.action_size)

    @property
    def backend(self) -> str:
        return self._backend


def _brax_state(inner: Any) -> State:
    observation = inner.obs["state"] if isinstance(inner.obs, Mapping) else inner.obs
    observation, reward, done = (jnp.asarray(x, jnp.float32) for x in (observation, inner.reward, inner.done))
    return State(inner, observation, reward, done, dict(inner.metrics))


@task_kinds.register("brax")
@dataclass(frozen=True)
class BraxTask(ForeignTask):
    """Environments of brax.

    The physics is one of brax's backends, or "auto" for the environment's own choice.
    """

    kind: ClassVar[str] = "brax"
    engines: ClassVar[tuple[str, ...]] = ("auto", "generalized", "positional", "spring", "mjx")

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of the environments that brax registers."""
        return brax_environments()

    def make(self) -> ForeignEnv:
        """Returns the environment. Raises ValueError if the backend cannot run it."""
        options: dict[str, Any] = {} if self.physics == "auto" else {"backend": self.physics}
        env = make_brax(self.bare, **options)
        return ForeignEnv(env, self.name, getattr(env, "backend", "none"), max_episode_steps=1000)


@task_kinds.register("playground")
@dataclass(frozen=True)
class PlaygroundTask(ForeignTask):
    """Environments of MuJoCo Playground, which need the extra jaxaudit[playground]."""

    kind: ClassVar[str] = "playground"
    engines: ClassVar[tuple[str, ...]] = ("auto", "mjx")

    @classmethod
    def names(cls) -> list[str]:
        """Returns the environments' names. Raises ValueError if the package is missing."""
        return list(_playground().ALL_ENVS)

    def make(self) -> ForeignEnv:
        """Returns the environment, with its default parameters."""
        registry = _playground()
        # The other implementation of MJX, Warp, is not deterministic on a GPU.
        env = registry.load(self.bare, config_overrides={"impl": "jax"})
        limit = int(registry.get_default_config(self.bare).episode_length)
        return ForeignEnv(env, self.name, "mjx", limit)


def _playground() -> Any:
    if importlib.util.find_spec("mujoco_playground") is None:
        raise ValueError("MuJoCo Playground's tasks need the package 'playground': pip install 'jaxaudit[playground]'")
    with contextlib.redirect_stdout(io.StringIO()):
        from mujoco_playground import registry

    return registry


DOWNLOADS = ("MNISTBandit-bsuite",)
"""Environments that download data when they are created."""


@struct.dataclass
class GymnaxState:
    """The state of a gymnax simulation.

    Attributes:
      env: gymnax's state.
      words: uint32 `[2]`, the data of the PRNG key of the next step.
    """

    env: Any
    words: jax.Array


class GymnaxEnv(Env):
    """An adapter of an unbatched environment with gymnax's functions to brax's interface.

    Observations are vectors: images are flattened, and an integer becomes a one-hot vector. If an action is not finite,
    or not one of the discrete actions, observation and reward are NaN, the simulation stays unchanged, and the episode
    does not end.

    Args:
      env: an `Environment` of gymnax.
      params: the environment's parameters.

    Attributes:
      actions: number of discrete actions; None if actions are continuous.
      action_low, action_high: `[action_size]` float32, bounds of continuous actions.
      max_episode_steps: the time limit, which is not enforced here.
      cheap_reset: True, because gymnax itself resets in every step.
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
        self._observation_values = getattr(env.observation_space(params), "n", None)
        self._observation_size = int(jax.eval_shape(self.reset, jax.random.key(0)).obs.size)

    def reset(self, rng: jax.Array) -> State:
        reset_key, steps_key = jax.random.split(rng)
        observation, inner = self.env.reset_env(reset_key, self.params)
        # Some values are Python numbers, while a scan's carry needs arrays of constant dtype.
        inner = jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), inner)
        zero = jnp.zeros((), jnp.float32)
        words = jax.random.bits(steps_key, (2,), jnp.uint32)
        return State(GymnaxState(inner, words), self._vector(observation), zero, zero)

    def step(self, state: State, action: jax.Array) -> State:
        """Advances by one env step under an action, int32 scalar, or `[action_size]` if actions are continuous."""
        before: GymnaxState = state.pipeline_state
        key = jax.random.wrap_key_data(before.words, impl="threefry2x32")
        step_key, next_key = jax.random.split(key)
        if self.actions is None:
            valid = jnp.isfinite(action).all()
        else:
            valid = (action >= 0) & (action < self.actions)
        # The environment defines its rules for valid actions only, so that its result for others is discarded.
        observation, stepped, reward, done, _ = self.env.step_env(
            step_key, before.env, action.reshape(self._action_shape), self.params
        )
        after = jax.tree.map(lambda new, old: jnp.where(valid, new, old).astype(old.dtype), stepped, before.env)
        nan_if_invalid = jnp.where(valid, 0.0, jnp.nan)
        return state.replace(
            pipeline_state=GymnaxState(after, jax.random.key_data(next_key)),
            obs=self._vector(observation) + nan_if_invalid,
            reward=jnp.asarray(reward, jnp.float32).reshape(()) + nan_if_invalid,
            done=(jnp.reshape(done, ()) & valid).astype(jnp.float32),
        )

    def _vector(self, observation: jax.Array) -> jax.Array:
        if self._observation_values is not None:
            return jax.nn.one_hot(observation, self._observation_values)
        return jnp.asarray(observation, jnp.float32).ravel()

    @property
    def observation_size(self) -> int:
        return self._observation_size

    @property
    def action_size(self) -> int:
        """The length of an action, 1 if actions are discrete."""
        return int(np.prod(self._action_shape))

    @property
    def backend(self) -> str:
        return "jax"


def _gymnax() -> Any:
    if importlib.util.find_spec("gymnax") is None:
        raise ValueError("gymnax' tasks need the package 'gymnax': pip install 'jaxaudit[gymnax]'")
    import gymnax

    return gymnax


@task_kinds.register("gymnax")
@dataclass(frozen=True)
class GymnaxTask(ForeignTask):
    """Environments of gymnax (classic control, MinAtar, bsuite), which need the extra jaxaudit[gymnax]."""

    kind: ClassVar[str] = "gymnax"

    @classmethod
    def names(cls) -> list[str]:
        """Returns the environments' names. Raises ValueError if the package is missing."""
        return [name for name in _gymnax().registered_envs if name not in DOWNLOADS]

    def make(self) -> GymnaxEnv:
        """Returns the environment, with its default parameters."""
        return GymnaxEnv(*_gymnax().make(self.bare))
