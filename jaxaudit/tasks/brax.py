"""brax's environments as tasks: `brax:ant`."""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxaudit.runtime.registry import task_kinds
from jaxaudit.tasks._brax import brax_environments, make_brax
from jaxaudit.tasks.foreign import ForeignEnv, ForeignTask


@task_kinds.register("brax")
@dataclass(frozen=True)
class BraxTask(ForeignTask):
    """brax's environments.

    Their physics are brax's backends, or "auto", the environment's own choice.
    """

    kind: ClassVar[str] = "brax"
    engines: ClassVar[tuple[str, ...]] = ("auto", "generalized", "positional", "spring", "mjx")

    @classmethod
    def names(cls) -> list[str]:
        """The environments' names."""
        return brax_environments()

    def make(self) -> ForeignEnv:
        """The environment. Raises ValueError if the backend cannot run it."""
        chosen: dict[str, Any] = {} if self.physics == "auto" else {"backend": self.physics}
        env = make_brax(self.bare, **chosen)
        return ForeignEnv(env, self.name, getattr(env, "backend", "none"), max_episode_steps=1000)
