"""Environments of other packages as tasks: what their kinds share, and an adapter of those with brax' functions."""

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
    """An environment of another package; the base of kinds of them.

    A kind says which names there are, and what builds the environment of a name without the kind before it.

    Attributes:
        engines: the physics that may be asked for.
        name: with the kind before it, as `tasks.make` takes it: "brax:ant"; it may be given without.
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
        """The environment's name without the kind before it."""
        return self.name.removeprefix(f"{self.kind}:")

    @classmethod
    @abstractmethod
    def names(cls) -> list[str]:
        """The environments' names. Raises ValueError if the package is missing."""

    @abstractmethod
    def make(self) -> Env:
        """The environment. Raises ValueError if the engine cannot run it."""

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """The form that names have: the package may be missing."""
        return [(f"{cls.kind}:<name>", "")]


class ForeignEnv(Env):
    """An environment with brax's functions, made one that learners can use; unbatched.

    Its observations are flat: of several, the one named "state". Episodes run to `max_episode_steps` unless the
    environment ends them, actions are meant to be between -1 and 1, and resets are too dear for every step.

    Attributes:
        env: the environment itself; a state's `pipeline_state` is one of its states.
        max_episode_steps: the time limit. Not enforced here.
        action_low, action_high: `[action_size]` float32.

    Raises:
        ValueError: its observations are images.
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
            raise ValueError(f"task {name!r} has observations of shape {shape}, and a learner needs a vector")
        self._observation_size = shape[0]

    def reset(self, rng: jax.Array) -> State:
        typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        return _seen(self.env.reset(jax.random.key_data(rng) if typed else rng))

    def step(self, state: State, action: jax.Array) -> State:
        """Advance by one env step under an action `[action_size]`."""
        before = state.pipeline_state
        # A scan's carry keeps its types, and not every environment does.
        after = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), self.env.step(before, action), before)
        return _seen(after).replace(info=state.info)

    @property
    def observation_size(self) -> int:
        return self._observation_size

    @property
    def action_size(self) -> int:
        return int(self.env.action_size)

    @property
    def backend(self) -> str:
        return self._backend


def _seen(inner: Any) -> State:
    observation = inner.obs["state"] if isinstance(inner.obs, Mapping) else inner.obs
    flat = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return State(inner, flat(observation), flat(inner.reward), flat(inner.done), dict(inner.metrics))


@task_kinds.register("brax")
@dataclass(frozen=True)
class BraxTask(ForeignTask):
    """brax's environments.

    Their physics are brax's backends, or "auto", the environment's own choice.
    """

    kind: ClassVar[str] = "brax"
    engines: ClassVar[tuple[str, ...]] = ("auto", "generalized", "positional", "spring", "mjx")

    @classmethod
    def names(cls) -> list[str]:
        """Returns the names of the environments."""
        return brax_environments()

    def make(self) -> ForeignEnv:
        """The environment. Raises ValueError if the backend cannot run it."""
        chosen: dict[str, Any] = {} if self.physics == "auto" else {"backend": self.physics}
        env = make_brax(self.bare, **chosen)
        return ForeignEnv(env, self.name, getattr(env, "backend", "none"), max_episode_steps=1000)


@task_kinds.register("playground")
@dataclass(frozen=True)
class PlaygroundTask(ForeignTask):
    """MuJoCo Playground's environments, with the extra jaxaudit[playground]."""

    kind: ClassVar[str] = "playground"
    engines: ClassVar[tuple[str, ...]] = ("auto", "mjx")

    @classmethod
    def names(cls) -> list[str]:
        """The environments' names. Raises ValueError if the package is missing."""
        return list(_playground().ALL_ENVS)

    def make(self) -> ForeignEnv:
        """Returns the environment, with its default parameters."""
        registry = _playground()
        # MJX's other implementation, Warp, is not deterministic on a GPU.
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
        return self._observation_size

    @property
    def action_size(self) -> int:
        """Length of an action: 1 where it is one of several."""
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
    """gymnax' environments, with the extra jaxaudit[gymnax]: classic control, MinAtar, bsuite."""

    kind: ClassVar[str] = "gymnax"

    @classmethod
    def names(cls) -> list[str]:
        """The environments' names. Raises ValueError if the package is missing."""
        return [name for name in _gymnax().registered_envs if name not in DOWNLOADS]

    def make(self) -> GymnaxEnv:
        """Returns the environment, with its default parameters."""
        return GymnaxEnv(*_gymnax().make(self.bare))
