"""This package's tasks by name, registered."""

from jaxaudit.runtime import registry
from jaxaudit.tasks import gymnasium_v5
from jaxaudit.tasks.task import MujocoTask as MujocoTask
from jaxaudit.tasks.task import Physics as Physics

TASKS = {task.name: task for task in gymnasium_v5.ALL}

for _name, _task in TASKS.items():
    registry.tasks.register(_name, _task)
