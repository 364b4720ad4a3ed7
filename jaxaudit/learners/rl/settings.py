"""Checks that the settings of several learners share: each raises ValueError, in one sentence, for the first misfit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxaudit.runtime import registry


def from_keywords(kind: type, given: Mapping[str, Any], learner: str) -> Any:
    """Returns the settings of a learner, `kind(**given)`. Raises ValueError for a name that is no setting."""
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for name in given:
        registry.check_name(f"setting of learner '{learner}'", name, known)
    return kind(**given)


def changed(settings: Any, change: Callable[[Any], Mapping[str, Any]], learner: str) -> Any:
    """Settings with the values that `change(settings)` gives, by name, in the place of theirs.

    Raises:
      ValueError: `learner` has no setting of such a name, or the value makes no sense.
    """
    values = dict(change(settings))
    known = {f.name for f in dataclasses.fields(settings) if f.init}
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"it changes the setting '{unknown[0]}', which learner '{learner}' does not have")
    return dataclasses.replace(settings, **values)


def at_least_one(settings: Any, *names: str) -> None:
    """The fields are counts of at least 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(settings, name)}")


def positive(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields are positive and finite."""
    for name in names:
        if not 0 < getattr(settings, name) < float("inf"):
            raise ValueError(f"{name} must be positive, not {getattr(settings, name)}")


def not_negative(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields are zero or more."""
    for name in names:
        if not getattr(settings, name) >= 0:
            raise ValueError(f"{name} must not be negative, not {getattr(settings, name)}")


def fractions(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields lie in [0, 1]."""
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} must lie in [0, 1], not {getattr(settings, name)}")


def below_one(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields lie in [0, 1)."""
    for name in names:
        if not 0 <= getattr(settings, name) < 1:
            raise ValueError(f"{name} must lie in [0, 1), not {getattr(settings, name)}")


def one_of(settings: Any, **allowed: tuple[str, ...]) -> None:
    """Each field is one of the words it allows."""
    for name, words in allowed.items():
        if getattr(settings, name) not in words:
            raise ValueError(f"{name} must be {', '.join(words)}, not {getattr(settings, name)!r}")


def widths(settings: Any) -> None:
    """`hidden` is widths of a network's layers; a list of them becomes a tuple, so that the settings are hashable."""
    object.__setattr__(settings, "hidden", tuple(settings.hidden))
    if not settings.hidden or min(settings.hidden) < 1:
        raise ValueError(f"hidden must be widths of at least 1, not {list(settings.hidden)}")


def telemetry(chosen: str) -> None:
    """Raises ValueError unless the field is one of the levels of telemetry."""
    if chosen not in ("basic", "full"):
        raise ValueError(f"telemetry must be 'basic' or 'full', not {chosen!r}")
