"""jaxaudit measures how stable training runs are; the README gives an introduction."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jaxaudit.runtime import machine

# ruff: noqa: F401, F403
if TYPE_CHECKING:  # for type checkers and editors; at run time, names are imported at their first use
    from jaxaudit import dialogues, learners, remedies, tasks, text
    from jaxaudit.analysis import metrics, statistics
    from jaxaudit.analysis.results import Result
    from jaxaudit.core.grid import plan
    from jaxaudit.core.learner import Channel, Learner
    from jaxaudit.core.optimizer import Adam, Optimizer
    from jaxaudit.core.program import compiled, run
    from jaxaudit.core.remedied_learner import remedied
    from jaxaudit.core.taps import SITES, Taps
    from jaxaudit.dialogues import Dialogue
    from jaxaudit.execution.audit import audit
    from jaxaudit.execution.grid_program import inputs
    from jaxaudit.models.sampling import generate
    from jaxaudit.monitoring.monitor import Monitor
    from jaxaudit.perturbations import *
    from jaxaudit.runs.margins.search import margin
    from jaxaudit.runs.margins.table import Margins
    from jaxaudit.runs.variants.compare import Comparison, compare
    from jaxaudit.runtime.registry import register

__version__ = "0.3.0"

machine.install_kernels_finder()

_MODULES = {
    "dialogues": "dialogues",
    "learners": "learners",
    "metrics": "analysis.metrics",
    "remedies": "remedies",
    "statistics": "analysis.statistics",
    "tasks": "tasks",
    "text": "text",
}
"""The public modules by name, with their paths in this package."""

_HOMES = {
    "Adam": "core.optimizer",
    "SITES": "core.taps",
    "Channel": "core.learner",
    "Comparison": "runs.variants.compare",
    "Dialogue": "dialogues",
    "Learner": "core.learner",
    "Margins": "runs.margins.table",
    "Monitor": "monitoring.monitor",
    "Optimizer": "core.optimizer",
    "Result": "analysis.results",
    "Taps": "core.taps",
    "audit": "execution.audit",
    "compare": "runs.variants.compare",
    "compiled": "core.program",
    "generate": "models.sampling",
    "inputs": "execution.grid_program",
    "margin": "runs.margins.search",
    "plan": "core.grid",
    "register": "runtime.registry",
    "remedied": "core.remedied_learner",
    "run": "core.program",
}
"""The public names, with the modules that define them; all other public names are defined in `perturbations`."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        value: Any = __dir__()
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    elif name in _HOMES:
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    elif name in _perturbations():
        value = getattr(importlib.import_module(f"{__name__}.perturbations"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULES, *_HOMES, *_perturbations()])


def _perturbations() -> list[str]:
    return importlib.import_module(f"{__name__}.perturbations").__all__
