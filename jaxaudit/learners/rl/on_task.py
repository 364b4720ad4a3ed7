"""A learning algorithm on a task, as a `Learner`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxaudit.core.learner import Channel, Learner
from jaxaudit.core.task_kinds import Task, fitting
from jaxaudit.learners.rl import settings as checks
from jaxaudit.tasks import named


def on_task(algorithm: Callable[[Any, int, Any], Any], task: Any, settings: Any, name: str, env_steps: int) -> Learner:
    """The learner `name`: `algorithm(env, max_episode_steps, settings)` on a task; equal ones share compilations.

    Args:
      algorithm: makes an object with `init`, `step` and `layers`, the names of its parameters. Its attribute
        `discrete` says whether it can choose among discrete actions.
      task: a task's name, or a task that gives an environment.
      settings: the algorithm's, hashable.
      name: the learner's.
      env_steps: environment steps in one iteration.

    Raises:
      ValueError: for a task that does not exist, or whose actions the algorithm cannot choose.
    """
    chosen = fitting(named(task) if isinstance(task, str) else task, "environment", name)
    made = _made(algorithm, name, chosen, settings)

    def changed(change: Callable[[Any], Mapping[str, Any]]) -> Learner:
        return on_task(algorithm, task, checks.changed(settings, change, name), name, env_steps)

    return Learner(
        made.init,
        made.step,
        name=name,
        step_unit=f"{env_steps} env steps",
        performance_name="mean return of the latest episodes",
        samples_per_step=env_steps,
        channels={"layer_gradient_norm": Channel.vector("layer", made.layers)} if settings.telemetry == "full" else {},
        changed=changed,
    )


@functools.lru_cache(maxsize=64)
def _made(algorithm: Callable[[Any, int, Any], Any], name: str, task: Task, settings: Any) -> Any:
    """The algorithm's object; the same one for equal arguments, for its methods are what programs are known by."""
    env = task.make()
    actions = getattr(env, "actions", None)
    if actions is not None and not getattr(algorithm, "discrete", False):
        raise ValueError(f"learner '{name}' needs continuous actions; task '{task.name}' has {actions} discrete ones")
    return algorithm(env, env.max_episode_steps, settings)
