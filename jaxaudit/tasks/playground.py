"""MuJoCo Playground's environments as tasks: `playground:CheetahRun`."""

import contextlib
import importlib.util
import io
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxaudit.runtime.registry import task_kinds
from jaxaudit.tasks.foreign import ForeignEnv, ForeignTask


@task_kinds.register("playground")
@dataclass(frozen=True)
class PlaygroundTask(ForeignTask):
    """MuJoCo Playground's environments, with the extra jaxaudit[playground]."""

    kind: ClassVar[str] = "playground"
    engines: ClassVar[tuple[str, ...]] = ("auto", "mjx")

    @classmethod
    def names(cls) -> list[str]:
        """The environments' names. Raises ValueError if the package is missing."""
        return list(_playground().ALL_ENVS)

    def make(self) -> ForeignEnv:
        """The environment."""
        registry = _playground()
        # MJX's other implementation, Warp, is not deterministic on a GPU.
        env = registry.load(self.bare, config_overrides={"impl": "jax"})
        limit = int(registry.get_default_config(self.bare).episode_length)
        return ForeignEnv(env, self.name, "mjx", limit)


def _playground() -> Any:
    if importlib.util.find_spec("mujoco_playground") is None:
        raise ValueError("MuJoCo Playground's tasks need the package 'playground': pip install 'jaxaudit[playground]'")
    with contextlib.redirect_stdout(io.StringIO()):
        from mujoco_playground import registry

    return registry
