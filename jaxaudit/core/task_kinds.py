"""What a learner trains on: tasks of several kinds, each kind one small class.

A kind is a frozen dataclass. Its fields are the keys that a spec's [task] has beside `kind`, with their types and
defaults, and `__post_init__` says in one sentence what is wrong with them; one registration makes it known:

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

Another package registers its class in the entry-point group `jaxaudit.task_kinds`, under the same name. A field that is
a path says so, as `name` does here: the path of what exists is made absolute when a spec is read, so that a run goes on
from any folder, and the `words` are no paths.

A kind whose "auto" is one simulation on a CPU and another on a GPU has the members of `Simulated` beside these, so that
a run keeps the one that it was begun with.

Where the name decides what keys there are beside it, the fields are `name` and `settings`, and a class method
`named(name)` gives the dataclass of the settings, whose fields the keys are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from jaxaudit.runtime.registry import task_kinds


class Task(Protocol):
    """A task of some kind: a frozen dataclass, so that equal ones can be made once.

    Attributes:
      kind: the name that the class is registered under.
      gives: what `make` gives, in one word, by which a learner says what it needs: "environment", a brax `Env`,
        "text", a `Corpus`, or "dialogue", a `Dialogue`. An environment has the attributes `max_episode_steps`, and
        `actions` (how many discrete ones there are) or `action_low` and `action_high`.
    """

    kind: ClassVar[str]
    gives: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The name of the task in tables and messages."""

    def make(self) -> Any:
        """What learners train on. Raises ValueError where it cannot be had."""

    @classmethod
    def listing(cls) -> Sequence[tuple[str, str]]:
        """The names there are, each with what it is: for a list of the tasks."""


@runtime_checkable
class Simulated(Protocol):
    """What a task has besides where the kind of device decides which engine simulates it, unless a spec does."""

    @property
    def engine(self) -> str:
        """The engine's name; "auto" where it is left to the device, "" for a task that has no choice of engines."""

    def engine_on(self, platform: str) -> str:
        """The engine that "auto" is on a platform, by JAX's name: "cpu", "gpu" or "tpu"."""

    def runs_on(self, platform: str) -> bool:
        """Whether the task's engine can run on a platform."""

    def simulated_by(self, engine: str) -> Task:
        """Returns the same task, simulated by another engine."""


def resolved(task: Task | None, platform: str) -> Task | None:
    """The task with the engine that it has on a platform, where that is left to the device."""
    if isinstance(task, Simulated) and task.engine == "auto":
        return task.simulated_by(task.engine_on(platform))
    return task


def resolved_like(task: Task | None, other: Task | None) -> Task | None:
    """The task with the engine of another, where its own is left to the device; as it is where the other has none."""
    if isinstance(task, Simulated) and task.engine == "auto" and isinstance(other, Simulated) and other.engine:
        return task.simulated_by(other.engine)
    return task


def fitting(task: Any, needs: str, learner: str) -> Any:
    """A task, if it gives what a learner needs.

    Raises:
      ValueError: it does not, or is no task.
    """
    if getattr(task, "gives", None) == needs:
        return task
    kind = repr(getattr(task, "kind", task))
    if needs in task_kinds:
        raise ValueError(f"learner '{learner}' trains on a task of kind '{needs}', not {kind}")
    raise ValueError(f"learner '{learner}' trains on {needs}s, not on a task of kind {kind}")
