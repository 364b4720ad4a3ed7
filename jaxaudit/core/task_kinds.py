"""The protocol of tasks, which learners train on; each kind of task is one small class.

A kind is a frozen dataclass. Its fields are the keys of a spec's [task] besides `kind`, with their types and defaults,
and `__post_init__` raises ValueError with one sentence for values that are not allowed. One line registers it:

    @ja.register("task kind", "maze")
    @dataclass(frozen=True)
    class Maze:
        \"\"\"Mazes drawn in text files.\"\"\"

        kind: ClassVar[str] = "maze"
        gives: ClassVar[str] = "environment"

        name: str = field(metadata={"path": True, "words": ("smallest",)})
        slippery: float = 0.0

        def __post_init__(self):
            if not 0 <= self.slippery < 1:
                raise ValueError(f"slippery must lie in [0, 1), not {self.slippery}")

        def make(self):
            return MazeEnv(read(self.name), self.slippery)

        @classmethod
        def listing(cls):
            return [("smallest", "one corridor"), ("<path>", "a text file")]

Another package registers its class in the entry-point group `jaxaudit.task_kinds`, under the same name. The metadata
of `name` declare a field that contains a path, except for the `words`. The path of an existing file is made absolute
when a spec is read, so that a run can be continued from any folder.

A kind whose engine "auto" depends on the platform also has the members of `Simulated`, so that a run keeps the engine
that it was started with.

If the name determines the other keys, the fields are `name` and `settings`, and a class method `named(name)` returns
the dataclass of the settings, whose fields are the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxaudit.runtime.registry import task_kinds


class Task(Protocol):
    """A task of some kind: a frozen dataclass, so that what equal tasks make can be cached.

    Attributes:
      kind: the name under which the class is registered.
      gives: what `make` returns: "environment" (a brax `Env`), "text" (a `Corpus`) or "dialogue" (a `Dialogue`). Each
        learner needs one of them. An environment has the attributes `max_episode_steps` and either `actions`, the
        number of discrete actions, or `action_low` and `action_high`.
    """

    kind: ClassVar[str]
    gives: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The name of the task in tables and messages."""

    def make(self) -> Any:
        """Returns what learners train on. Raises ValueError if it is not available."""

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """Returns the names of the tasks of this kind, each with a short description, for a list of tasks."""


@runtime_checkable
class Simulated(Protocol):
    """The additional members of a task whose engine depends on the kind of device, unless a spec names the engine."""

    @property
    def engine(self) -> str:
        """The engine's name; "auto" if the device determines it, "" for a task without a choice of engines."""

    def engine_on(self, platform: str) -> str:
        """Returns the engine that "auto" stands for on a platform of JAX: "cpu", "gpu" or "tpu"."""

    def runs_on(self, platform: str) -> bool:
        """Returns whether the task's engine can run on a platform."""

    def simulated_by(self, engine: str) -> Task:
        """Returns the same task, simulated by another engine."""


def resolved(task: Task | None, platform: str) -> Task | None:
    """Returns the task with its engine on a platform in place of "auto"; other tasks are returned unchanged."""
    if isinstance(task, Simulated) and task.engine == "auto":
        return task.simulated_by(task.engine_on(platform))
    return task


def resolved_like(task: Task | None, other: Task | None) -> Task | None:
    """Returns the task with the engine of another task in place of "auto"; other tasks are returned unchanged."""
    if isinstance(task, Simulated) and task.engine == "auto" and isinstance(other, Simulated) and other.engine:
        return task.simulated_by(other.engine)
    return task


def fitting(task: Any, needs: str, learner: str) -> Any:
    """Returns the task if `make` returns what a learner needs, e.g. "environment", and raises ValueError otherwise."""
    if getattr(task, "gives", None) == needs:
        return task
    kind = repr(getattr(task, "kind", task))
    if needs in task_kinds:
        raise ValueError(f"learner '{learner}' trains on a task of kind '{needs}', not {kind}")
    raise ValueError(f"learner '{learner}' trains on {needs}s, not on a task of kind {kind}")
