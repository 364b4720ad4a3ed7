"""The [[perturbation]] entries of a spec: one kind, a chain of them, or all those of a dimension."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxaudit import registry
from jaxaudit.errors import UserError
from jaxaudit.perturbations import (
    DIMENSIONS,
    Chain,
    Factory,
    Perturbation,
    Sweep,
    chain,
    sweep,
)
from jaxaudit.specification.tables import Table, given

Onset = int | float
Onsets = int | float | tuple[int | float, ...]
Duration = int | Literal["once", "end"]

MOST_CONDITIONS = 100_000
"""The most conditions one entry may unroll to."""

_SINGLE = ("kind", "magnitude", "onset", "duration", "period", "target")
_CHAIN = ("chain", "onset", "duration")
_DIMENSION = ("dimension", "onset", "duration")


@dataclass(frozen=True)
class SingleSpec:
    """An entry with a `kind`: its magnitude or magnitudes, and when and where it acts.

    Attributes:
      onset: a fraction of the run (float), a step (int), several of them, or, in a chain, None: the chain's.
    """

    kind: str
    magnitude: float | tuple[float, ...]
    onset: Onsets | None
    duration: int | str
    period: int | None = None
    target: str | None = None

    def at(self, onset: Onset) -> Perturbation:
        """The perturbation, opening at `onset` if it has none of its own."""
        own = self.onset if isinstance(self.onset, int | float) else onset
        magnitude = sweep(*self.magnitude) if isinstance(self.magnitude, tuple) else self.magnitude
        return _factory(self.kind)(magnitude, onset=own, duration=self.duration, period=self.period, target=self.target)

    def perturbations(self) -> list[Perturbation | Chain]:
        """One perturbation for every onset."""
        return [self.at(onset) for onset in _each(self.onset)]

    def values(self) -> dict[str, Any]:
        """The entry's keys and values, as TOML has them."""
        return {key: getattr(self, key) for key in _SINGLE}


@dataclass(frozen=True)
class ChainSpec:
    """An entry with a `chain`: parts that act together; `onset` is that of the parts which have none."""

    parts: tuple[SingleSpec, ...]
    onset: Onsets | None = None

    def perturbations(self) -> list[Perturbation | Chain]:
        """One chain for every onset."""
        return [chain(*(part.at(onset) for part in self.parts)) for onset in _each(self.onset)]

    def values(self) -> dict[str, Any]:
        """The entry's keys and values, as TOML has them."""
        return {"onset": self.onset, "chain": [part.values() for part in self.parts]}


@dataclass(frozen=True)
class DimensionSpec:
    """An entry with a `dimension`: each kind of it that the learner's sites allow; None: the kind's own."""

    dimension: str
    onset: Onsets | None = None
    duration: int | str | None = None

    def candidates(self) -> list[SingleSpec]:
        """All registered kinds of the dimension at their standard magnitudes."""
        return [self._timed(_standard(name)) for name in registry.perturbations if self._has(name)]

    def _has(self, name: str) -> bool:
        factory = registry.perturbations[name]
        return isinstance(factory, Factory) and factory.default.dimension == self.dimension

    def _timed(self, standard: SingleSpec) -> SingleSpec:
        onset = standard.onset if self.onset is None else self.onset
        duration = standard.duration if self.duration is None else self.duration
        return replace(standard, onset=onset, duration=duration)

    def values(self) -> dict[str, Any]:
        """The entry's keys and values, as TOML has them."""
        return {"dimension": self.dimension, "onset": self.onset, "duration": self.duration}


Explicit = SingleSpec | ChainSpec
Entry = Explicit | DimensionSpec


def read_entry(values: Any, place: str, steps: int) -> Entry:
    """An entry of a run of `steps`, checked as far as it can be without the learner. Raises UserError."""
    if not isinstance(values, dict):
        raise UserError(f"{place} must be a table, not {given(values)}")
    forms: dict[str, tuple[tuple[str, ...], Callable[[Table], Entry]]] = {
        "kind": (_SINGLE, _read_single),
        "chain": (_CHAIN, _read_chain),
        "dimension": (_DIMENSION, _read_dimension),
    }
    found = [form for form in forms if form in values]
    if len(found) > 1:
        raise UserError(f"{place} has both '{found[0]}' and '{found[1]}'; it must have one of them")
    # Without any of the three, a misspelt one is the likely mistake, and the table names it.
    keys, read = forms[found[0]] if found else (tuple(dict.fromkeys(_SINGLE + _CHAIN + _DIMENSION)), None)
    table = Table(values, place, keys)
    if read is None:
        raise UserError(f"{place} needs one of 'kind', 'chain' and 'dimension'")
    entry = read(table)
    _check(entry, place, steps)
    return entry


def _read_single(table: Table) -> SingleSpec:
    return _single(table, Onsets)


def _single(table: Table, onsets: Any, standard_onset: bool = True, duration: int | str | None = None) -> SingleSpec:
    kind = table.get("kind", str)
    try:
        standard = _standard(kind)
    except ValueError as error:
        raise UserError(f"{table.place}: {error}") from None
    return SingleSpec(
        kind,
        _distinct(table, "magnitude", float | tuple[float, ...], standard.magnitude),
        _distinct(table, "onset", onsets, standard.onset if standard_onset else None),
        table.get("duration", Duration, standard.duration if duration is None else duration),
        table.get("period", int, None),
        table.get("target", str, _factory(kind).default.target),
    )


def _read_chain(table: Table) -> ChainSpec:
    listed = table.raw("chain")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{table.place}: chain must be a list of tables, not {given(listed)}")
    onset = _distinct(table, "onset", Onsets, None)
    duration = table.get("duration", Duration, None)
    if duration is not None and all("duration" in values for values in listed if isinstance(values, dict)):
        raise UserError(
            f"{table.place}: duration says nothing, since every part of the chain has a duration of its own"
        )
    parts = []
    for number, values in enumerate(listed, 1):
        part = Table(values, f"{table.place}, chain part {number}", _SINGLE)
        parts.append(_single(part, Onset, onset is None, duration))
    if onset is not None and all(part.onset is not None for part in parts):
        raise UserError(f"{table.place}: onset says nothing, since every part of the chain has an onset of its own")
    return ChainSpec(tuple(parts), onset)


def _read_dimension(table: Table) -> DimensionSpec:
    dimension = table.get("dimension", str)
    if dimension not in DIMENSIONS:
        raise UserError(f"{table.place}: {registry.unknown('dimension', dimension, list(DIMENSIONS))}")
    return DimensionSpec(dimension, _distinct(table, "onset", Onsets, None), table.get("duration", Duration, None))


def _distinct(table: Table, key: str, wanted: Any, default: Any) -> Any:
    value = table.get(key, wanted, default)
    if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
        raise UserError(f"{table.place}: {key} must list at least one number, and each once, not {list(value)}")
    return value


def _check(entry: Entry, place: str, steps: int) -> None:
    entries = entry.candidates() if isinstance(entry, DimensionSpec) else [entry]
    parts = [part for e in entries for part in (e.parts if isinstance(e, ChainSpec) else (e,))]
    try:
        for one in entries:
            _check_size(one)
            starts = [min(q.when.resolve(steps)[0] for q in p.parts) for p in one.perturbations()]
            if isinstance(one.onset, tuple) and len(set(starts)) < len(starts):
                raise ValueError(f"onsets {list(one.onset)} are steps {starts}, of which each must be another")
        for part in parts:
            if part.period is not None and part.period > steps:
                raise ValueError(f"period {part.period} is longer than the run of {steps} steps")
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None


def _check_size(entry: Explicit) -> None:
    parts = entry.parts if isinstance(entry, ChainSpec) else (entry,)
    counts = [len(part.magnitude) for part in parts if isinstance(part.magnitude, tuple)]
    count = math.prod(counts) * len(_each(entry.onset))
    if count > MOST_CONDITIONS:
        raise ValueError(f"{count} conditions are more than the {MOST_CONDITIONS} an entry may have")


def _each(onset: Onsets | None) -> tuple[Onset, ...]:
    if isinstance(onset, tuple):
        return onset
    return (0 if onset is None else onset,)


def _factory(kind: str) -> Factory:
    kinds = (registry.perturbations, registry.interventions)
    known = next((registered for registered in kinds if kind in registered), None)
    if known is None:
        raise registry.UnknownName(registry.unknown("perturbation", kind, [name for known in kinds for name in known]))
    factory = known[kind]
    if not isinstance(factory, Factory):
        raise ValueError(f"perturbation '{kind}' was not made by the decorator `perturbation`")
    return factory


def _standard(kind: str) -> SingleSpec:
    default = _factory(kind).default
    swept = default.magnitude.values if isinstance(default.magnitude, Sweep) else float(default.magnitude)
    return SingleSpec(kind, swept, default.when.onset, default.when.duration, target=default.target)
