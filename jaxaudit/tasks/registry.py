"""Tasks by name: the registered tasks, and the tasks of other kinds, whose names have the kind as a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax

from jaxaudit.core.task_kinds import Task
from jaxaudit.runtime import registry
from jaxaudit.runtime.registry import check_name, first_docstring_line, task_kinds, tasks
from jaxaudit.tasks import gymnasium_v5
from jaxaudit.tasks._brax import Env
from jaxaudit.tasks.engine import MujocoTask
from jaxaudit.tasks.engine import Physics as Physics

TASKS = {task.name: task for task in gymnasium_v5.ALL}

for _name, _task in TASKS.items():
    registry.tasks.register(_name, _task)


PHYSICS = ("auto", "c", "mjx")


@task_kinds.register("registered")
@dataclass(frozen=True)
class Registered:
    """Tasks that are registered by name, with any physics.

    The task is a `MujocoTask`, or a function that creates a brax `Env`.

    Attributes:
      name: the name under which the task is registered.
      physics: "c" for C MuJoCo on the host's cores, "mjx" for MuJoCo in JAX, or "auto", which is "c" if JAX runs on a
        CPU and "mjx" otherwise. A run stores the choice in its spec. It has no effect on tasks without MuJoCo.
    """

    kind: ClassVar[str] = "registered"
    gives: ClassVar[str] = "environment"

    name: str
    physics: Literal["auto", "c", "mjx"] = "auto"

    def __post_init__(self):
        check_name("task", self.name, tasks)
        check_name("physics", self.physics, PHYSICS)

    def make(self) -> Env:
        """Returns the environment. Raises ValueError for "c" if JAX does not run on a CPU."""
        task = tasks[self.name]
        if not isinstance(task, MujocoTask):
            return task()
        engine = self.engine_on(jax.default_backend()) if self.physics == "auto" else self.physics
        # The engines are imported on demand, because they are slow to load.
        if engine == "c":
            from jaxaudit.tasks.engine_c import CMujocoEnv

            return CMujocoEnv(task)
        from jaxaudit.tasks.engine_mjx import MjxEnv

        return MjxEnv(task)

    @property
    def engine(self) -> str:
        """The task's physics, or "" if the task does not use MuJoCo."""
        return self.physics if isinstance(tasks[self.name], MujocoTask) else ""

    def engine_on(self, platform: str) -> str:
        """Returns the physics that "auto" stands for on a platform, which is one of JAX's names."""
        return "c" if platform == "cpu" else "mjx"

    def runs_on(self, platform: str) -> bool:
        """Returns whether the physics can run on a platform: C MuJoCo needs arrays on the host."""
        return self.engine != "c" or platform == "cpu"

    def simulated_by(self, engine: Any) -> Registered:
        """Returns the same task with another engine."""
        return replace(self, physics=engine)

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the names of the kind's tasks, with a one-line summary of each."""
        return [(name, first_docstring_line(tasks[name])) for name in tasks if not isinstance(tasks[name], MujocoTask)]


@task_kinds.register("mujoco")
@dataclass(frozen=True)
class Mujoco(Registered):
    """The MuJoCo tasks of Gymnasium in version 5.

    The kind is another name of `Registered`: every registered task can be given by both.
    """

    kind: ClassVar[str] = "mujoco"

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the names of the kind's tasks, with empty summaries."""
        return [(name, "") for name in tasks if isinstance(tasks[name], MujocoTask)]


def named(name: str, physics: Any = "auto") -> Task:
    """Returns the task with a name: a registered task, or with a kind as a prefix, as in "brax:ant", a task of that
    kind.

    Args:
      name: the task's name.
      physics: the physics engine, one of those of the kind.

    Raises:
      ValueError: the task or engine is unknown, or a package is missing.
    """
    kind, colon, rest = name.partition(":")
    if not colon or name in tasks or kind not in task_kinds or task_kinds[kind].gives != "environment":
        return Registered(name, physics)
    return task_kinds[kind](rest, **({} if physics == "auto" else {"physics": physics}))


def make(name: str, physics: str = "auto") -> Env:
    """Returns a task's unbatched environment in brax's `Env` interface; arguments and errors are as for `named`."""
    return named(name, physics).make()
