"""Tasks by name: the registered ones, and how a name says of which kind it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import jax

from jaxaudit.core.task_kinds import Task
from jaxaudit.runtime import registry
from jaxaudit.runtime.registry import check, summary, task_kinds, tasks
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
    """Tasks registered by name, of any physics.

    Such a task is a `MujocoTask`, or a function that makes a brax `Env` of its own.

    Attributes:
      name: that it is registered under.
      physics: "c" is C MuJoCo on the host's cores, "mjx" is MuJoCo in JAX; "auto" is "c" where JAX runs on a CPU, and
        "mjx" elsewhere; the spec that a run stores says which. It does not matter to a task that is not MuJoCo's.
    """

    kind: ClassVar[str] = "registered"
    gives: ClassVar[str] = "environment"

    name: str
    physics: Literal["auto", "c", "mjx"] = "auto"

    def __post_init__(self):
        check("task", self.name, tasks)
        check("physics", self.physics, PHYSICS)

    def make(self) -> Env:
        """The environment. Raises ValueError for "c" where JAX does not run on a CPU."""
        task = tasks[self.name]
        if not isinstance(task, MujocoTask):
            return task()
        engine = self.engine_on(jax.default_backend()) if self.physics == "auto" else self.physics
        # Each engine is imported when it is wanted: they are slow to load.
        if engine == "c":
            from jaxaudit.tasks.engine_c import CMujocoEnv

            return CMujocoEnv(task)
        from jaxaudit.tasks.engine_mjx import MjxEnv

        return MjxEnv(task)

    @property
    def engine(self) -> str:
        """Its physics; "" for a task that is not MuJoCo's."""
        return self.physics if isinstance(tasks[self.name], MujocoTask) else ""

    def engine_on(self, platform: str) -> str:
        """The physics that "auto" is on a platform of JAX's."""
        return "c" if platform == "cpu" else "mjx"

    def runs_on(self, platform: str) -> bool:
        """Whether the physics can run there: C MuJoCo needs arrays on the host."""
        return self.engine != "c" or platform == "cpu"

    def simulated_by(self, engine: Any) -> Registered:
        """Returns the same task, simulated by another engine."""
        return replace(self, physics=engine)

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the names of the kind's tasks, with a line on each."""
        return [(name, summary(tasks[name])) for name in tasks if not isinstance(tasks[name], MujocoTask)]


@task_kinds.register("mujoco")
@dataclass(frozen=True)
class Mujoco(Registered):
    """The MuJoCo tasks of Gymnasium, in their version 5.

    The kind has another name than `Registered` and is no other: every registered task goes by both.
    """

    kind: ClassVar[str] = "mujoco"

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the names of the kind's tasks, with a line on each."""
        return [(name, "") for name in tasks if isinstance(tasks[name], MujocoTask)]


def named(name: str, physics: Any = "auto") -> Task:
    """The task of a name: of a registered one, or with its kind before it, "brax:ant".

    Args:
      name: it.
      physics: the engine that moves it; which there are is the kind's.

    Raises:
      ValueError: an unknown task or engine, or a missing package.
    """
    kind, prefixed, rest = name.partition(":")
    if not prefixed or name in tasks or kind not in task_kinds or task_kinds[kind].gives != "environment":
        return Registered(name, physics)
    return task_kinds[kind](rest, **({} if physics == "auto" else {"physics": physics}))


def make(name: str, physics: str = "auto") -> Env:
    """The environment of a task's name, unbatched, in brax's `Env` interface; arguments and errors are `named`'s."""
    return named(name, physics).make()
