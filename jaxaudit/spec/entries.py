"""The [[perturbation]] entries of a spec: one kind, a chain of them, or all those of a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxaudit.perturbations import DIMENSIONS, Chain, Kind, Perturbation, Sweep, chain, sweep
from jaxaudit.remedies import Remedy, RemedyKind
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError, placed
from jaxaudit.spec.tables import TomlTable, given

Onset = int | float
Onsets = int | float | tuple[int | float, ...]
Duration = int | Literal["once", "end"]

MOST_CONDITIONS = 100_000
"""The most conditions that the entries of a spec may unroll to, all together."""

_SINGLE = ("kind", "magnitude", "onset", "duration", "period", "target")
_CHAIN = ("chain", "onset", "duration")
_DIMENSION = ("dimension", "onset", "duration")


@dataclass(frozen=True)
class Asked:
    """A perturbation that a spec asks for, at one onset.

    Attributes:
      perturbation: with all its magnitudes.
      place: the table it was read from, in words; it does not count in comparisons.
    """

    perturbation: Perturbation | Chain
    place: str = field(default="", compare=False)

    def values(self) -> dict[str, Any]:
        """A table's keys and values, as TOML has them, from which it is read again."""
        if isinstance(self.perturbation, Chain):
            return {"chain": [_values(part) for part in self.perturbation.parts]}
        return _values(self.perturbation)


@dataclass(frozen=True)
class AskedDimension:
    """All kinds of a dimension that the learner's sites allow, at one onset; None: each kind's own."""

    dimension: str
    onset: Onset | None = None
    duration: int | str | None = None
    place: str = field(default="", compare=False)

    def candidates(self) -> list[Asked]:
        """All registered kinds of the dimension at their standard magnitudes."""
        kinds = [registry.perturbations[name] for name in registry.perturbations]
        return [
            Asked(kind(onset=self.onset, duration=self.duration), self.place)
            for kind in kinds
            if isinstance(kind, Kind) and kind.dimension == self.dimension
        ]

    def values(self) -> dict[str, Any]:
        """The table's keys and values, as TOML has them."""
        return {"dimension": self.dimension, "onset": self.onset, "duration": self.duration}


Entry = Asked | AskedDimension


def _values(part: Perturbation) -> dict[str, Any]:
    magnitude = part.magnitude.values if isinstance(part.magnitude, Sweep) else part.magnitude
    when = part.when
    return dict(zip(_SINGLE, (part.name, magnitude, when.onset, when.duration, when.period, part.target), strict=True))


def read_entries(values: Any, place: str, steps: int) -> list[Entry]:
    """The entries of one table in a run of `steps`, one for every onset, checked as far as it goes without the learner.

    Raises UserError.
    """
    if not isinstance(values, dict):
        raise UserError(f"{place} must be a table, not {given(values)}")
    forms: dict[str, tuple[tuple[str, ...], Callable[[TomlTable], list[Entry]]]] = {
        "kind": (_SINGLE, _read_single),
        "chain": (_CHAIN, _read_chain),
        "dimension": (_DIMENSION, _read_dimension),
    }
    found = [form for form in forms if form in values]
    if len(found) > 1:
        raise UserError(f"{place} has both '{found[0]}' and '{found[1]}'; it must have one of them")
    # Without any of the three, a misspelt one is the likely mistake, and the table names it.
    keys, read = forms[found[0]] if found else (tuple(dict.fromkeys(_SINGLE + _CHAIN + _DIMENSION)), None)
    table = TomlTable(values, place, keys)
    if read is None:
        raise UserError(f"{place} needs one of 'kind', 'chain' and 'dimension'")
    try:
        entries = read(table)
        _check(entries, steps, values.get("onset"))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    return entries


def read_remedy(values: Any, place: str) -> Remedy:
    """The remedy of one table [[remedy]]. Raises UserError."""
    table = TomlTable(values, place, ("kind", "strength"))
    name = table.get("kind", str)
    if name not in registry.remedies:
        if name in registry.perturbations or name in registry.interventions:
            raise UserError(f"{place}: '{name}' is a perturbation, which belongs into a table [[perturbation]]")
        raise UserError(f"{place}: {registry.unknown('remedy', name, list(registry.remedies))}")
    kind = registry.remedies[name]
    if not isinstance(kind, RemedyKind):
        raise UserError(f"{place}: remedy '{name}' was not made by the decorators `remedy` and `setting`")
    strength = table.get("strength", float, None)
    with placed(place):
        return kind(strength)


def _read_single(table: TomlTable) -> list[Entry]:
    onsets = _each(_distinct(table, "onset", Onsets, None))
    return [Asked(_single(table, onset), table.place) for onset in onsets]


def _single(table: TomlTable, onset: Onset | None, duration: int | str | None = None) -> Perturbation:
    try:
        kind = _kind(table.get("kind", str))
    except ValueError as error:
        raise UserError(f"{table.place}: {error}") from None
    magnitude = _distinct(table, "magnitude", float | tuple[float, ...], None)
    if isinstance(magnitude, tuple) and len(magnitude) > MOST_CONDITIONS:
        raise ValueError(f"{len(magnitude)} conditions are more than the {MOST_CONDITIONS} a spec may have")
    return kind(
        sweep(*magnitude) if isinstance(magnitude, tuple) else magnitude,
        onset=onset,
        duration=table.get("duration", Duration, duration),
        period=table.get("period", int, None),
        target=table.get("target", str, None),
    )


def _read_chain(table: TomlTable) -> list[Entry]:
    listed = table.raw("chain")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{table.place}: chain must be a list of tables, not {given(listed)}")
    onsets = _distinct(table, "onset", Onsets, None)
    duration = table.get("duration", Duration, None)
    parts = [TomlTable(values, f"{table.place}, chain part {n}", _SINGLE) for n, values in enumerate(listed, 1)]
    for key, outer in (("duration", duration), ("onset", onsets)):
        if outer is not None and all(key in part for part in parts):
            raise UserError(
                f"{table.place}: {key} says nothing, since every part of the chain has "
                f"{'an' if key == 'onset' else 'a'} {key} of its own"
            )

    def at(onset: Onset | None) -> Chain:
        return chain(*(_single(part, part.get("onset", Onset, onset), duration) for part in parts))

    return [Asked(at(onset), table.place) for onset in _each(onsets)]


def _read_dimension(table: TomlTable) -> list[Entry]:
    dimension = table.get("dimension", str)
    if dimension not in DIMENSIONS:
        raise UserError(f"{table.place}: {registry.unknown('dimension', dimension, list(DIMENSIONS))}")
    duration = table.get("duration", Duration, None)
    onsets = _each(_distinct(table, "onset", Onsets, None))
    return [AskedDimension(dimension, onset, duration, table.place) for onset in onsets]


def _distinct(table: TomlTable, key: str, wanted: Any, default: Any) -> Any:
    value = table.get(key, wanted, default)
    if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
        raise UserError(f"{table.place}: {key} must list at least one number, and each once, not {list(value)}")
    return value


def _each(onsets: Onsets | None) -> tuple[Onset | None, ...]:
    return onsets if isinstance(onsets, tuple) else (onsets,)


def _check(entries: list[Entry], steps: int, onsets: Any) -> None:
    """Raises ValueError where the entries of a table are too many, or do not fit into a run of `steps`."""
    asked = [e.candidates() if isinstance(e, AskedDimension) else [e] for e in entries]
    parts = [[part for one in each for part in one.perturbation.parts] for each in asked]
    if (count := sum(count_of(entry) for entry in entries)) > MOST_CONDITIONS:
        raise ValueError(f"{count} conditions are more than the {MOST_CONDITIONS} a spec may have")
    starts = [min(part.when.resolve(steps)[0] for part in each) for each in parts]
    if len(set(starts)) < len(starts):
        raise ValueError(f"onsets {onsets} are steps {starts}, of which each must be another")
    for part in (part for each in parts for part in each):
        if part.when.period is not None and part.when.period > steps:
            raise ValueError(f"period {part.when.period} is longer than the run of {steps} steps")


def count_of(entry: Entry) -> int:
    """How many conditions an entry unrolls to, all kinds of a dimension among them."""
    ones = entry.candidates() if isinstance(entry, AskedDimension) else [entry]
    return sum(math.prod(len(part.magnitudes) for part in one.perturbation.parts) for one in ones)


def _kind(name: str) -> Kind:
    kinds = (registry.perturbations, registry.interventions)
    known = next((registered for registered in kinds if name in registered), None)
    if known is None and name in registry.remedies:
        raise ValueError(f"'{name}' is a remedy, which is a part of the learner: it belongs into a table [[remedy]]")
    if known is None:
        raise registry.UnknownName(registry.unknown("perturbation", name, [name for known in kinds for name in known]))
    kind = known[name]
    if not isinstance(kind, Kind):
        raise ValueError(f"perturbation '{name}' was not made by the decorator `perturbation`")
    return kind
