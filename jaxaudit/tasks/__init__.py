"""Environments: kinds of tasks that provide them, physics engines, and vectorised episodes."""

from jaxaudit.tasks import cartpole as cartpole
from jaxaudit.tasks import foreign as foreign
from jaxaudit.tasks.episodes import Episodes as Episodes
from jaxaudit.tasks.episodes import EpisodeState as EpisodeState
from jaxaudit.tasks.episodes import Transition as Transition
from jaxaudit.tasks.episodes import evaluate as evaluate
from jaxaudit.tasks.episodes import performance as performance
from jaxaudit.tasks.registry import TASKS as TASKS
from jaxaudit.tasks.registry import Mujoco as Mujoco
from jaxaudit.tasks.registry import MujocoTask as MujocoTask
from jaxaudit.tasks.registry import Registered as Registered
from jaxaudit.tasks.registry import make as make
from jaxaudit.tasks.registry import named as named
