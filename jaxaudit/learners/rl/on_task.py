"""Construction of a `Learner` from a learning algorithm, a task and settings."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxaudit.core.learner import Channel, Learner
from jaxaudit.core.task_kinds import Task, fitting
from jaxaudit.learners.rl import settings as checks
from jaxaudit.tasks import named


def on_task(algorithm: Callable[[Any, int, Any], Any], task: Any, settings: Any, name: str, env_steps: int) -> Learner:
    """Returns the learner `name`, which runs `algorithm(env, max_episode_steps, settings)` on a task.

    Learners of equal arguments share compilations.

    Args:
      algorithm: makes an object with the methods `init` and `step` and the attribute `layers`, the names of its
        parameters. Its attribute `discrete` says whether it supports discrete actions.
      task: a task's name, or a task that provides an environment.
      settings: the algorithm's settings, hashable.
      name: the learner's name.
      env_steps: number of environment steps in one iteration.

    Raises:
      ValueError: the task does not exist, or the algorithm does not support its actions.
    """
    checked = fitting(named(task) if isinstance(task, str) else task, "environment", name)
    instance = _cached(algorithm, name, checked, settings)
    channels = {"layer_gradient_norm": Channel.vector("layer", instance.layers)}

    def changed(change: Callable[[Any], Mapping[str, Any]]) -> Learner:
        return on_task(algorithm, task, checks.changed(settings, change, name), name, env_steps)

    return Learner(
        instance.init,
        instance.step,
        name=name,
        step_unit=f"{env_steps} env steps",
        performance_name="mean return of the latest episodes",
        samples_per_step=env_steps,
        channels=channels if settings.telemetry == "full" else {},
        changed=changed,
    )


@functools.lru_cache(maxsize=64)
def _cached(algorithm: Callable[[Any, int, Any], Any], name: str, task: Task, settings: Any) -> Any:
    """Returns the same object for equal arguments, because programs are identified by its bound methods."""
    env = task.make()
    actions = getattr(env, "actions", None)
    if actions is not None and not getattr(algorithm, "discrete", False):
        raise ValueError(f"learner '{name}' needs continuous actions; task '{task.name}' has {actions} discrete ones")
    return algorithm(env, env.max_episode_steps, settings)
