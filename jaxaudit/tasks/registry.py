"""Tasks by name."""

from collections.abc import Collection

import jax

from jaxaudit.registry import UnknownName, tasks, unknown
from jaxaudit.tasks._brax import Env
from jaxaudit.tasks.foreign import FAMILIES, make_foreign
from jaxaudit.tasks.task import MujocoTask

PHYSICS = ("auto", "c", "mjx")


def make(name: str, physics: str = "auto") -> Env:
    """Build a task's environment, unbatched, in brax's `Env` interface.

    Args:
        name: of a registered task: a `MujocoTask`, or a function that makes a brax `Env` of its own, which must
            have `action_low`, `action_high` and `max_episode_steps`; `physics` does not matter to it. Or
            "brax:ant", any of brax's environments, or "playground:CheetahRun", any of MuJoCo Playground's.
        physics: "c" is C MuJoCo on the host's cores, "mjx" is MuJoCo in JAX; "auto" is "c" where JAX runs on
            a CPU, and "mjx" elsewhere. For brax "auto" is the environment's own choice, or "generalized",
            "positional", "spring" or "mjx"; Playground has "mjx" alone.

    Raises:
        ValueError: an unknown task or engine, "c" where JAX does not run on a CPU, or a missing package.
    """
    family, prefixed, rest = name.partition(":")
    if prefixed and family in FAMILIES and name not in tasks:
        return make_foreign(family, rest, physics)
    task = tasks[name]
    _known("physics", physics, PHYSICS)
    if not isinstance(task, MujocoTask):
        return task()
    if physics == "auto":
        physics = "c" if jax.default_backend() == "cpu" else "mjx"
    # Each engine is imported when it is wanted: they are slow to load.
    if physics == "c":
        from jaxaudit.tasks.engine_c import CMujocoEnv

        return CMujocoEnv(task)
    from jaxaudit.tasks.engine_mjx import MjxEnv

    return MjxEnv(task)


def _known(what: str, given: str, allowed: Collection[str]) -> str:
    if given not in allowed:
        raise UnknownName(unknown(what, given, list(allowed)))
    return given
