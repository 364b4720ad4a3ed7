"""`remedied(learner, *remedies)` returns a learner that trains with remedies and is audited like any other learner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.core.channel_names import ACTED
from jaxaudit.core.learner import Channel, Learner
from jaxaudit.core.remedy import HOOKS, Remedy, RemedyKind
from jaxaudit.core.sites import Recorder, RemedyPoint, Sites, find_sites
from jaxaudit.core.taps import REMEDY_OFFERED, ROOT, States, Taps
from jaxaudit.runtime.sharding import Partition


@struct.dataclass
class RemediedState:
    """The state of a learner with remedies.

    Attributes:
      learner: the state of the learner inside.
      remedies: the states of the stateful remedies, by name and label.
    """

    learner: Any
    remedies: States


@struct.dataclass
class RemediedData:
    """The data of a learner with remedies.

    Attributes:
      learner: the data of the learner inside.
      strengths: the strengths of the remedies by name, float32 scalars.
    """

    learner: Any
    strengths: dict[str, Any]


def remedied(learner: Learner, *remedies: Remedy) -> Learner:
    """Returns a learner that trains with remedies: `remedied(ja.learners.ppo("Ant-v5"), ja.remedies.l2_init(1e-3))`.

    The state contains the learner's state and the remedies' states. The strengths of remedies that act during training
    are data, so that learners that differ only in strengths share one compiled program. Remedies at one place act in
    the order given, before the remedies that the learner has already. At a site, all of them act before perturbations.
    Closed taps, with which performance is measured, have no remedies. Telemetry has an additional channel `acted_NAME`
    for each remedy that acts during training. It is the share of the remedy's applications in a step that changed a
    value, or NaN in a step without applications.

    Raises:
      ValueError: there is no remedy, a remedy is given twice, two remedies change the same setting, or a remedy does
        not fit the learner.
    """
    if not remedies:
        raise ValueError("remedied() needs at least one remedy")
    for remedy in remedies:
        if isinstance(remedy, RemedyKind):
            raise ValueError(f"'{remedy.name}' is a kind of remedy; call it for a remedy: {remedy.name}()")
        if not isinstance(remedy, Remedy):
            raise ValueError(f"remedied() takes remedies, such as ja.remedies.l2_init(1e-3), not {remedy!r}")
    names = [*(remedy.name for remedy in remedies), *remedy_names(learner)]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"remedy '{duplicate}' is there twice; a learner has each remedy once")
    base = learner
    for remedy in remedies:
        base = _with_settings(base, remedy)
    acting = tuple(remedy for remedy in remedies if remedy.kind.apply is not None)
    if not acting:
        return base
    sites = find_sites(base)
    for remedy in acting:
        if reason := remedy_misfit(remedy.kind, sites):
            raise ValueError(reason)
    functions = _remedied(base.without_data, tuple(remedy.kind for remedy in acting))
    return replace(
        base,
        init=functions.init,
        step=functions.step,
        name=" with ".join((base.name, *(remedy.name for remedy in acting))),
        data=RemediedData(base.data, {remedy.name: np.float32(remedy.strength) for remedy in acting}),
        init_reads_data=True,
        save=None if base.save is None else functions.save,
        partition=None if base.partition is None else functions.partition,
        changed=None if base.changed is None else _Changed(base.changed, acting, _changed_settings(base)),
        channels={**base.channels, **{ACTED + name: Channel(monitored=False) for name in functions.counted}},
    )


def remedy_names(learner: Learner) -> tuple[str, ...]:
    """Returns the names of a learner's remedies, first of those that act in training, then of changed settings."""
    return tuple(dict.fromkeys((*_acting_names(learner), *_changed_settings(learner).values())))


def _acting_names(learner: Learner) -> tuple[str, ...]:
    inner = getattr(learner.step, "__self__", None)
    if not isinstance(inner, Remedied):
        return ()
    return (*(kind.name for kind in inner.kinds), *_acting_names(inner.learner))


@dataclass(frozen=True)
class _Changed:
    """`Learner.changed` of a learner with remedies: returns it with other settings and the same remedies.

    Attributes:
      inner: `Learner.changed` of the learner inside.
      acting: the remedies that act during training.
      settings: the names of changed settings, each with the name of the remedy that changed it.
    """

    inner: Callable[..., Learner]
    acting: tuple[Remedy, ...]
    settings: Mapping[str, str]

    def __call__(self, change: Callable[..., Any]) -> Learner:
        learner = self.inner(change)
        learner = replace(learner, changed=_Changed(_inner_changed(learner), (), self.settings))
        return remedied(learner, *self.acting) if self.acting else learner


def _inner_changed(learner: Learner) -> Callable[..., Learner]:
    assert learner.changed is not None, "changed settings can be changed again"
    return learner.changed


def _changed_settings(learner: Learner) -> Mapping[str, str]:
    return learner.changed.settings if isinstance(learner.changed, _Changed) else {}


def same_beginning(first: Learner, second: Learner) -> bool:
    """Returns whether two learners differ at most in remedies that act in training, so that their lanes begin alike."""
    return _without_remedies(first).without_data == _without_remedies(second).without_data


def _without_remedies(learner: Learner) -> Learner:
    inner = getattr(learner.step, "__self__", None)
    return _without_remedies(inner.learner) if isinstance(inner, Remedied) else learner


def remedy_misfit(kind: RemedyKind, sites: Sites) -> str | None:
    """Returns a sentence on why a remedy cannot act in a learner with these sites, or None if it can."""
    if kind.site not in sites.remedy_points:
        if kind.site == "betas" and "guard" in sites.remedy_points:
            return (
                f"remedy '{kind.name}' changes Adam's decay rates, which a jaxaudit.Optimizer lets it do only with a "
                "jaxaudit.Adam as its transform"
            )
        if kind.site == "trained":
            return (
                f"remedy '{kind.name}' acts on trained parameters, which the learner does not hand over at the end of "
                "a step (jaxaudit.Optimizer.finish)"
            )
        if kind.site in HOOKS:
            return f"remedy '{kind.name}' acts on what a jaxaudit.Optimizer does, and the learner uses none"
        known = ", ".join(sorted(sites))
        return (
            f"remedy '{kind.name}' acts at site '{kind.site}', which the learner does not "
            f"tap{sites.reason_absent(kind.site)}; its sites: {known}; in a jaxaudit.Optimizer: {', '.join(HOOKS)}"
        )
    points = sites.remedy_points[kind.site].values()
    offered = frozenset.intersection(*(frozenset(point.context) for point in points)) | set(REMEDY_OFFERED)
    if missing := sorted(set(kind.needs) - offered):
        return (
            f"remedy '{kind.name}' needs {', '.join(missing)} at '{kind.site}', which the learner does not give there"
        )
    if kind.keeps_state and (lost := next((point.state_lost for point in points if point.state_lost), None)):
        return f"remedy '{kind.name}' {lost}"
    return next((error for point in points if (error := _error_at(kind, point)) is not None), None)


def _error_at(kind: RemedyKind, point: RemedyPoint) -> str | None:
    """Returns the text of the ValueError that a remedy's function raises for a value at its site, or None."""
    assert kind.apply is not None, "a remedy that acts at a site has a function"
    available = {"minibatch": jnp.int32(0), "progress": jnp.float32(0.0), "key": jax.random.key(0), **point.context}
    needed = {name: available[name] for name in kind.needs}
    arrays = {name: value for name, value in needed.items() if all(hasattr(x, "dtype") for x in jax.tree.leaves(value))}
    apply = functools.partial(kind.apply, **{name: needed[name] for name in needed if name not in arrays})
    try:
        jax.eval_shape(
            lambda value, strength, arrays: apply(value, strength, kind.init(value), **arrays),
            point.value,
            jnp.float32(kind.strength),
            arrays,
        )
    except ValueError as error:
        return f"remedy '{kind.name}': {error}"
    return None


def _with_settings(learner: Learner, remedy: Remedy) -> Learner:
    change = remedy.kind.settings
    if change is None:
        return learner
    if learner.changed is None:
        raise ValueError(f"remedy '{remedy.name}' changes settings, and '{learner.name}' has none that can be changed")
    earlier = _changed_settings(learner)
    new: dict[str, str] = {}

    def changes_of(settings: Any) -> Mapping[str, Any]:
        changes = change(settings, remedy.strength)
        for name in changes:
            if name in earlier:
                raise ValueError(f"it changes the setting '{name}', and so does remedy '{earlier[name]}'")
            new[name] = remedy.name
        return changes

    try:
        changed = learner.changed(changes_of)
    except ValueError as error:
        raise ValueError(f"remedy '{remedy.name}': {error}") from None
    return replace(changed, changed=_Changed(_inner_changed(changed), (), {**earlier, **new}))


@functools.lru_cache(maxsize=64)
def _remedied(learner: Learner, kinds: tuple[RemedyKind, ...]) -> Remedied:
    """Returns the same object for equal arguments, because compiled programs are cached by its methods."""
    return Remedied(learner, kinds)


class Remedied:
    """The pure functions `init` and `step` of a learner, given without its data, with kinds of remedies.

    Attributes:
      learner: the learner inside.
      kinds: the kinds of remedies, in the order in which they act.
      counted: the names of the remedies whose actions are counted.
      shapes: the stateful kinds by name, each with the shapes of the values at its site by label.
    """

    def __init__(self, learner: Learner, kinds: tuple[RemedyKind, ...]):
        self.learner, self.kinds = learner, kinds
        points = find_sites(learner).remedy_points
        self.counted = tuple(
            kind.name for kind in kinds if not any(point.state_lost for point in points[kind.site].values())
        )
        self.shapes = {
            kind.name: (kind, {label or ROOT: point.value for label, point in points[kind.site].items()})
            for kind in kinds
            if kind.keeps_state
        }

    def init(self, key: jax.Array, data: RemediedData) -> RemediedState:
        """Returns the state of the learner and of the remedies before the first step."""
        learner = self.learner
        state = learner.init(key, data.learner) if learner.init_reads_data else learner.init(key)
        remedies = {
            name: {label: kind.init(value) for label, value in values.items()}
            for name, (kind, values) in self.shapes.items()
        }
        return RemediedState(state, remedies)

    def step(
        self, state: RemediedState, key: jax.Array, taps: Taps | Recorder
    ) -> tuple[RemediedState, dict[str, jax.Array]]:
        """Returns the state and telemetry after a step of the learner with taps in which the remedies act."""
        data: RemediedData = taps.data
        remedies = tuple((kind, data.strengths[kind.name]) for kind in self.kinds)
        inner_taps = taps.with_remedies(remedies, state.remedies, data.learner, self.counted)
        after, telemetry = self.learner.step(state.learner, key, inner_taps)  # type: ignore[arg-type]
        states, counts = taps.take_back(inner_taps)  # type: ignore[arg-type]
        acted = {ACTED + name: count[0] / count[1] for name, count in counts.items()}
        return RemediedState(after, states), telemetry | acted

    def save(self, folder: Path, state: RemediedState, data: RemediedData) -> None:
        """Saves the trained parameters as the learner inside does."""
        assert self.learner.save is not None, "remedied() has no `save` for a learner without one"
        self.learner.save(folder, state.learner, data.learner)

    @property
    def partition(self) -> Partition:
        """The learner's partition, which applies to arrays in remedies' states that are shaped like parameters, too."""
        return _inner_partition(self.learner.partition)


@functools.lru_cache(maxsize=64)
def _inner_partition(inner: Partition) -> Partition:
    """Returns the partition of a learner with remedies; the same function for the same partition of its learner."""

    def partition(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
        field, _, rest = path.partition("/")
        return inner(rest, shape) if field in ("learner", "remedies") else ()

    return partition
