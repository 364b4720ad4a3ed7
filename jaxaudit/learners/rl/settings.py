"""Construction and validation of learners' settings; each check raises ValueError for the first field that fails."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxaudit.runtime import registry


def from_keywords(kind: type, values: Mapping[str, Any], learner: str) -> Any:
    """Returns the settings `kind(**values)` of a learner. Raises ValueError for a name that is not a setting."""
    known = [f.name for f in dataclasses.fields(kind) if f.init]
    for name in values:
        registry.check_name(f"setting of learner '{learner}'", name, known)
    return kind(**values)


def changed(settings: Any, change: Callable[[Any], Mapping[str, Any]], learner: str) -> Any:
    """Returns settings in which the values that `change(settings)` returns by name replace the old ones.

    Raises:
      ValueError: `learner` has no setting of one of the names, or a value is not allowed.
    """
    values = dict(change(settings))
    known = {f.name for f in dataclasses.fields(settings) if f.init}
    if unknown := [name for name in values if name not in known]:
        raise ValueError(f"it changes the setting '{unknown[0]}', which learner '{learner}' does not have")
    return dataclasses.replace(settings, **values)


def at_least_one(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields are at least 1."""
    check_each(settings, names, lambda value: value >= 1, "be at least 1")


def positive(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields are positive and finite."""
    check_each(settings, names, lambda value: 0 < value < math.inf, "be positive")


def not_negative(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields are zero or more."""
    check_each(settings, names, lambda value: value >= 0, "not be negative")


def fractions(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields lie in [0, 1]."""
    check_each(settings, names, lambda value: 0 <= value <= 1, "lie in [0, 1]")


def below_one(settings: Any, *names: str) -> None:
    """Raises ValueError unless the fields lie in [0, 1)."""
    check_each(settings, names, lambda value: 0 <= value < 1, "lie in [0, 1)")


def check_each(settings: Any, names: tuple[str, ...], allowed: Callable[[Any], bool], requirement: str) -> None:
    """Raises ValueError, "NAME must REQUIREMENT, not VALUE", for the first field whose value is not allowed."""
    for name in names:
        value = getattr(settings, name)
        if not allowed(value):
            raise ValueError(f"{name} must {requirement}, not {value}")


def one_of(settings: Any, **allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless each field has one of the values allowed for it."""
    for name, values in allowed.items():
        if getattr(settings, name) not in values:
            raise ValueError(f"{name} must be {', '.join(values)}, not {getattr(settings, name)!r}")


def choices(settings: object, leave_out: Collection[str] = ()) -> None:
    """Raises ValueError unless each field annotated as a `Literal`, except those left out, has one of its values."""
    one_of(settings, **{name: v for name, v in _literals(type(settings)).items() if name not in leave_out})  # type: ignore[arg-type]


@functools.cache
def _literals(kind: type) -> dict[str, tuple[str, ...]]:
    return {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}


def widths(settings: Any) -> None:
    """Makes the field `hidden` a tuple, so that the settings are hashable.

    Raises:
      ValueError: `hidden` is empty or has a width below 1.
    """
    object.__setattr__(settings, "hidden", tuple(settings.hidden))
    if not settings.hidden or min(settings.hidden) < 1:
        raise ValueError(f"hidden must be widths of at least 1, not {list(settings.hidden)}")


def telemetry(level: str) -> None:
    """Raises ValueError unless the level of telemetry is "basic" or "full"."""
    if level not in ("basic", "full"):
        raise ValueError(f"telemetry must be 'basic' or 'full', not {level!r}")
