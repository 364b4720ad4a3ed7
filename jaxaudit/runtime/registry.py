"""Names under which tasks, their kinds, learners, perturbations and metrics are found, here and in other packages."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line for each row, whose cells are padded so that columns are aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


class UnknownName(ValueError):
    """A name that is not registered; the message says what was given and what is allowed."""


class Registry:
    """Objects by name. Other packages add theirs through the entry-point group `jaxaudit.<what>s`: `jaxaudit.tasks`.
    An entry point is an entry, or a module that registers one of its name when it is imported.

    `own` are the modules of this package that register entries as they are imported, which is when one is asked for.
    `plural` is of `what`, where it is not with an s.
    """

    def __init__(self, what: str, *own: str, plural: str = ""):
        self.what = what
        self._own = own
        self._group = f"jaxaudit.{(plural or what + 's').replace(' ', '_')}"
        self._entries: dict[str, Any] = {}
        self._complete = False

    def register(self, name: str, entry: Any = None) -> Any:
        """Adds `entry` under `name`; without `entry`, a decorator. Raises ValueError if the name is taken."""
        if entry is None:
            return lambda decorated: self.register(name, decorated)
        if self._entries.get(name, entry) is not entry:
            raise ValueError(f"{self.what} '{name}' is already registered")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> Any:
        self._load()
        if name not in self._entries:
            raise UnknownName(unknown(self.what, name, list(self)))
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def _load(self) -> None:
        if not self._complete:
            self._complete = True
            for module in self._own:
                import_module(f"jaxaudit.{module}")
            for point in entry_points(group=self._group):
                found = point.load()
                if not isinstance(found, ModuleType):
                    self.register(point.name, found)
                elif point.name not in self._entries:
                    raise ValueError(
                        f"the entry point '{point.name}' of {self._group} is the module "
                        f"{found.__name__}, which registers no {self.what} of that name"
                    )


def unknown(what: str, given: object, allowed: list[str]) -> str:
    """One sentence for a name that is not known, with the nearest known one."""
    near = difflib.get_close_matches(str(given), allowed, n=1)
    hint = f" (did you mean '{near[0]}'?)" if near else ""
    return f"unknown {what} {given!r}{hint}; allowed: {', '.join(sorted(allowed)) or 'none'}"


def check(what: str, given: str, allowed: Collection[str] | Registry) -> None:
    """Raises UnknownName for a name that is not allowed."""
    if given not in allowed:
        raise UnknownName(unknown(what, given, list(allowed)))


def named_like(function: Callable[..., Any], entry: Any) -> Any:
    """Returns a frozen entry with the name, module and docstring of a function, which help() and doctest read."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        object.__setattr__(entry, name, getattr(function, name))
    object.__setattr__(entry, "__wrapped__", function)
    return entry


def summary(entry: object) -> str:
    """What an entry says of itself: the first line of its docstring."""
    return (inspect.getdoc(entry) or "").partition("\n")[0]


tasks = Registry("task", "tasks")
task_kinds = Registry("task kind", "tasks", "text", "dialogues")
dialogues = Registry("dialogue", "dialogues")
learners = Registry("learner", "learners")
perturbations = Registry("perturbation", "perturbations")
interventions = Registry("intervention", "perturbations")
remedies = Registry("remedy", "remedies", plural="remedies")
metrics = Registry("metric")


def register(kind: str, name: str) -> Callable[[Any], Any]:
    """Decorator that registers an entry of a kind, e.g. a learner: `@register("learner", "my_learner")`."""
    known = (tasks, task_kinds, dialogues, learners, perturbations, interventions, remedies, metrics)
    registries = {r.what: r for r in known}
    if kind not in registries:
        raise UnknownName(unknown("kind of entry", kind, list(registries)))
    return registries[kind].register(name)
