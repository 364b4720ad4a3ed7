"""Tasks by name."""

from collections.abc import Collection

import jax

from jaxaudit.registry import UnknownName, unknown
from jaxaudit.tasks._brax import Env
from jaxaudit.tasks.definitions import TASKS

PHYSICS = ("auto", "c", "mjx")


def make(name: str, physics: str = "auto") -> Env:
    """Build a task's environment, unbatched, in brax's `Env` interface.

    Args:
        name: a Gymnasium v5 MuJoCo task, one of `TASKS`.
        physics: "c" is C MuJoCo on the host's cores, "mjx" is MuJoCo in JAX; "auto" is "c" where JAX runs on
            a CPU, and "mjx" elsewhere.

    Raises:
        ValueError: an unknown task or engine, or "c" where JAX does not run on a CPU.
    """
    task = TASKS[_known("task", name, TASKS)]
    if _known("physics", physics, PHYSICS) == "auto":
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
