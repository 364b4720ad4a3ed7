"""Environments of other packages as tasks: `brax:ant`, `gymnax:Breakout-MinAtar`, `playground:CheetahRun`."""

import contextlib
import importlib.util
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.registry import UnknownName, unknown
from jaxaudit.tasks import gymnax_env
from jaxaudit.tasks._brax import Env, State, brax_environments, make_brax


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


@dataclass(frozen=True)
class Family:
    """Tasks of another package, which a name reaches as `family:name`.

    Attributes:
        about: what they are, for a list of the tasks.
        physics: the engines that may be asked for.
        names: gives the tasks' names. Raises ValueError if the package is missing.
        build: `(name, physics) -> environment`.
    """

    about: str
    physics: tuple[str, ...]
    names: Callable[[], list[str]]
    build: Callable[[str, str], Env]


def _build_brax(name: str, physics: str) -> ForeignEnv:
    env = make_brax(name, **({} if physics == "auto" else {"backend": physics}))
    return ForeignEnv(env, f"brax:{name}", getattr(env, "backend", "none"), max_episode_steps=1000)


def _playground() -> Any:
    if importlib.util.find_spec("mujoco_playground") is None:
        raise ValueError("MuJoCo Playground's tasks need the package 'playground': pip install 'jaxaudit[playground]'")
    with contextlib.redirect_stdout(io.StringIO()):
        from mujoco_playground import registry

    return registry


def _build_playground(name: str, physics: str) -> ForeignEnv:
    registry = _playground()
    # MJX's other implementation, Warp, is not deterministic on a GPU.
    env = registry.load(name, config_overrides={"impl": "jax"})
    limit = int(registry.get_default_config(name).episode_length)
    return ForeignEnv(env, f"playground:{name}", "mjx", limit)


FAMILIES = {
    "brax": Family(
        "brax's environments",
        ("auto", "generalized", "positional", "spring", "mjx"),
        brax_environments,
        _build_brax,
    ),
    "gymnax": Family(
        "gymnax', with the extra jaxaudit[gymnax]: classic control, MinAtar, bsuite",
        ("auto",),
        gymnax_env.names,
        gymnax_env.build,
    ),
    "playground": Family(
        "MuJoCo Playground's, with the extra jaxaudit[playground]",
        ("auto", "mjx"),
        lambda: list(_playground().ALL_ENVS),
        _build_playground,
    ),
}


def make_foreign(family: str, name: str, physics: str) -> Env:
    """Build a task of a family's.

    Raises:
        ValueError: an unknown task or engine, one that the engine cannot run, or a package that is missing.
    """
    check(family, name, physics)
    return FAMILIES[family].build(name, physics)


def check(family: str, name: str, physics: str) -> None:
    """Raise ValueError if a family has no task of that name, or none on that engine."""
    known = FAMILIES[family]
    if name not in (names := known.names()):
        raise UnknownName(unknown(f"{family} task", name, names))
    if physics not in known.physics:
        raise UnknownName(unknown(f"physics of a {family} task", physics, list(known.physics)))
