"""Registries of tasks, learners, perturbations, metrics and others by name, in this package and in plug-ins."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns one line for each row, with its cells padded to the width of their columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


class UnknownName(ValueError):
    """A name that is not registered; the message names it and the names that are."""


class Registry:
    """Objects of one kind by name.

    Other packages add entries through the entry-point group of the kind, such as `jaxaudit.tasks`. An entry point is
    an entry, or a module that registers an entry of the same name when it is imported.

    Args:
      kind: what the entries are, in the singular, for messages.
      modules: the modules of this package that register entries, which are imported when the first one is looked up.
      plural: the plural of `kind` if it is not formed with an s.
    """

    def __init__(self, kind: str, *modules: str, plural: str = ""):
        self.kind = kind
        self._modules = modules
        self._group = f"jaxaudit.{(plural or kind + 's').replace(' ', '_')}"
        self._entries: dict[str, Any] = {}
        self._complete = False

    def register(self, name: str, entry: Any = None) -> Any:
        """Adds `entry` under `name`, or returns a decorator without `entry`.

        An entry that is defined in a notebook or script (`__main__`) replaces an earlier one from there, so that a cell
        can be executed again.

        Raises:
          ValueError: another entry has the name.
        """
        if entry is None:
            return lambda decorated: self.register(name, decorated)
        earlier = self._entries.get(name, entry)
        modules = {getattr(earlier, "__module__", None), getattr(entry, "__module__", None)}
        if earlier is not entry and modules != {"__main__"}:
            raise ValueError(f"{self.kind} '{name}' is already registered")
        self._entries[name] = entry
        return entry

    def __getitem__(self, name: str) -> Any:
        self._load()
        check_name(self.kind, name, self._entries)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._entries))

    def items(self) -> list[tuple[str, Any]]:
        """Returns the names and their entries, in alphabetical order."""
        self._load()
        return sorted(self._entries.items())

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._entries

    def _load(self) -> None:
        if not self._complete:
            self._complete = True
            try:
                self._import_all()
            except BaseException:
                self._complete = False  # the next look-up gives the same error, such as that of a missing package
                raise

    def _import_all(self) -> None:
        for module in self._modules:
            import_module(f"jaxaudit.{module}")
        for point in entry_points(group=self._group):
            entry = point.load()
            if not isinstance(entry, ModuleType):
                self.register(point.name, entry)
            elif point.name not in self._entries:
                raise ValueError(
                    f"the entry point '{point.name}' of {self._group} is the module "
                    f"{entry.__name__}, which registers no {self.kind} of that name"
                )


def unknown_name_message(kind: str, name: object, allowed: list[str]) -> str:
    """Returns an error message for an unknown name of a kind of entry, with the most similar name that is allowed."""
    similar = difflib.get_close_matches(str(name), allowed, n=1)
    hint = f" (did you mean '{similar[0]}'?)" if similar else ""
    return f"unknown {kind} {name!r}{hint}; allowed: {', '.join(sorted(allowed)) or 'none'}"


def check_name(kind: str, name: str, allowed: Collection[str] | Registry) -> None:
    """Raises UnknownName if a name of a kind of entry is not among those allowed."""
    if name not in allowed:
        raise UnknownName(unknown_name_message(kind, name, list(allowed)))


def copy_function_metadata(function: Callable[..., Any], entry: Any) -> Any:
    """Gives a frozen entry the name, module and docstring of a function, which help() and doctest read; returns it."""
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        object.__setattr__(entry, name, getattr(function, name))
    object.__setattr__(entry, "__wrapped__", function)
    return entry


def first_docstring_line(entry: object) -> str:
    """Returns the first line of an entry's docstring, "" if it has none."""
    return (inspect.getdoc(entry) or "").partition("\n")[0]


tasks = Registry("task", "tasks")
task_kinds = Registry("task kind", "tasks", "text", "dialogues")
dialogues = Registry("dialogue", "dialogues")
learners = Registry("learner", "learners")
perturbations = Registry("perturbation", "perturbations")
interventions = Registry("intervention", "perturbations")
remedies = Registry("remedy", "remedies", plural="remedies")
metrics = Registry("metric")
plots = Registry("plot", "report.notebook")
"""What draws results in notebooks, by the kind of result.

`Result.plot` and `Margins.plot` find it here, because reports stand above what they draw and may not be imported by it.
"""


def register(kind: str, name: str) -> Callable[[Any], Any]:
    """Decorator that registers an entry of a kind, e.g. a learner: `@register("learner", "my_learner")`."""
    known = (tasks, task_kinds, dialogues, learners, perturbations, interventions, remedies, metrics)
    registries = {registry.kind: registry for registry in known}
    check_name("kind of entry", kind, registries)
    return registries[kind].register(name)
