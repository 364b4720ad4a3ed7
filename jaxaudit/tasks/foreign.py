"""Environments of other packages as tasks: what their kinds share, and an adapter of those with brax' functions."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.runtime.registry import check
from jaxaudit.tasks._brax import Env, State


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
        check(f"{self.kind} task", self.bare, self.names())
        check(f"physics of a {self.kind} task", self.physics, self.engines)
        object.__setattr__(self, "name", f"{self.kind}:{self.bare}")

    @property
    def bare(self) -> str:
        """The name without the kind."""
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
        """Draw an initial state."""
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
        """Length of an observation."""
        return self._observation_size

    @property
    def action_size(self) -> int:
        """Length of an action."""
        return int(self.env.action_size)

    @property
    def backend(self) -> str:
        """The physics engine's name."""
        return self._backend


def _seen(inner: Any) -> State:
    observation = inner.obs["state"] if isinstance(inner.obs, Mapping) else inner.obs
    flat = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return State(inner, flat(observation), flat(inner.reward), flat(inner.done), dict(inner.metrics))
