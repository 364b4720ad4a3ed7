"""jaxaudit: how stable is this training run? See the README for the tour."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from jaxaudit import source_tree

# ruff: noqa: F401, F403
if TYPE_CHECKING:  # for type checkers and editors; in a program a name is imported when it is first asked for
    from jaxaudit import dialogues, learners, metrics, remedies, statistics, tasks, text
    from jaxaudit.auditing import audit
    from jaxaudit.dialogues import Dialogue
    from jaxaudit.grid import plan
    from jaxaudit.learner import Channel, Learner
    from jaxaudit.margins.search import margin
    from jaxaudit.margins.table import Margins
    from jaxaudit.metastate.monitor import Monitor
    from jaxaudit.models.sampling import generate
    from jaxaudit.optimizer import Adam, Optimizer
    from jaxaudit.perturbations import *
    from jaxaudit.program import compiled, run
    from jaxaudit.registry import register
    from jaxaudit.remedied_learner import remedied
    from jaxaudit.results import Result
    from jaxaudit.taps import SITES, Taps
    from jaxaudit.variants.compare import Comparison, compare
    from jaxaudit.whole import inputs

__version__ = "0.3.0"

source_tree.find_kernels()

_PACKAGES = ("dialogues", "learners", "metrics", "remedies", "statistics", "tasks", "text")

_HOMES = {
    "Adam": "optimizer",
    "SITES": "taps",
    "Channel": "learner",
    "Comparison": "variants.compare",
    "Dialogue": "dialogues",
    "Learner": "learner",
    "Margins": "margins.table",
    "Monitor": "metastate.monitor",
    "Optimizer": "optimizer",
    "Result": "results",
    "Taps": "taps",
    "audit": "auditing",
    "compare": "variants.compare",
    "compiled": "program",
    "generate": "models.sampling",
    "inputs": "whole",
    "margin": "margins.search",
    "plan": "grid",
    "register": "registry",
    "remedied": "remedied_learner",
    "run": "program",
}
"""Where the public names are; the others are perturbations."""


def __getattr__(name: str) -> Any:
    if name == "__all__":
        value: Any = __dir__()
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
    return sorted([*_PACKAGES, *_HOMES, *_perturbations()])


def _perturbations() -> list[str]:
    return importlib.import_module(f"{__name__}.perturbations").__all__
