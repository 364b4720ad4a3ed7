"""jaxaudit: how stable is this training run? See the README for the tour."""

from jaxaudit import learners, metrics, statistics, tasks, text
from jaxaudit.audit import audit
from jaxaudit.grid import plan
from jaxaudit.learner import Channel, Learner
from jaxaudit.learners.optimizer import Optimizer
from jaxaudit.margins.search import margin
from jaxaudit.margins.table import Margins
from jaxaudit.metastate.monitor import Monitor
from jaxaudit.perturbations import *  # noqa: F403
from jaxaudit.perturbations import __all__ as _perturbations
from jaxaudit.program import compiled, run
from jaxaudit.registry import register
from jaxaudit.results import Result
from jaxaudit.taps import SITES, Taps
from jaxaudit.whole import inputs

__version__ = "0.2.0"

__all__ = [
    "SITES",
    "Channel",
    "Learner",
    "Margins",
    "Monitor",
    "Optimizer",
    "Result",
    "Taps",
    "audit",
    "compiled",
    "inputs",
    "learners",
    "margin",
    "metrics",
    "plan",
    "register",
    "run",
    "statistics",
    "tasks",
    "text",
    *_perturbations,
]
