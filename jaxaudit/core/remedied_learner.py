"""`remedied(learner, *remedies)`: a learner with remedies is a learner, which is audited as any other."""

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
from jaxaudit.core.sites import Helped, Recorder, Sites, find_sites
from jaxaudit.core.taps import REMEDY_OFFERED, ROOT, States, Taps
from jaxaudit.runtime.sharding import Partition


@struct.dataclass
class RemediedState:
    """What a lane of a learner with remedies carries.

    Attributes:
      learner: the learner's state.
      remedies: the states of the remedies that keep one, by name and label.
    """

    learner: Any
    remedies: States


@struct.dataclass
class RemediedData:
    """What all lanes of a learner with remedies read.

    Attributes:
      learner: the learner's data.
      strengths: of the remedies, float32 scalars by name.
    """

    learner: Any
    strengths: dict[str, Any]


def remedied(learner: Learner, *remedies: Remedy) -> Learner:
    """Returns a learner that trains with remedies: `remedied(ja.learners.ppo("Ant-v5"), ja.remedies.l2_init(1e-3))`.

    Its state is the learner's and the remedies' own, and the strengths of remedies that act while it trains are data:
    learners that differ in them alone share one compiled program. Remedies at one place act in the order given, before
    those that the learner has already; at a site, all act before perturbations. Taps that are `closed`, which
    performance is measured with, have no remedies. Telemetry gets a channel `acted_NAME` for each remedy that acts
    while the learner trains: the share of its applications in a step in which it changed a value; NaN in a step without
    any.

    Raises:
      ValueError: there is no remedy, one is there twice, two change the same setting, or the learner cannot have one:
        one sentence.
    """
    if not remedies:
        raise ValueError("remedied() needs at least one remedy")
    for one in remedies:
        if isinstance(one, RemedyKind):
            raise ValueError(f"'{one.name}' is a kind of remedy; call it for a remedy: {one.name}()")
        if not isinstance(one, Remedy):
            raise ValueError(f"remedied() takes remedies, such as ja.remedies.l2_init(1e-3), not {one!r}")
    present = [*(one.name for one in remedies), *remedy_names(learner)]
    if twice := next((name for name in present if present.count(name) > 1), None):
        raise ValueError(f"remedy '{twice}' is there twice; a learner has each remedy once")
    base = learner
    for one in remedies:
        base = _with_settings(base, one)
    acting = tuple(one for one in remedies if one.kind.apply is not None)
    if not acting:
        return base
    sites = find_sites(base)
    for one in acting:
        if reason := misfit(one.kind, sites):
            raise ValueError(reason)
    made = _made(base.without_data, tuple(one.kind for one in acting))
    return replace(
        base,
        init=made.init,
        step=made.step,
        name=" with ".join((base.name, *(one.name for one in acting))),
        data=RemediedData(base.data, {one.name: np.float32(one.strength) for one in acting}),
        init_reads_data=True,
        save=None if base.save is None else made.save,
        partition=None if base.partition is None else made.partition,
        changed=None if base.changed is None else _Changed(base.changed, acting, _settings_changed(base)),
        channels={**base.channels, **{ACTED + name: Channel(monitored=False) for name in made.counted}},
    )


def remedy_names(learner: Learner) -> tuple[str, ...]:
    """Returns the names of a learner's remedies: those that act while it trains, then those that changed settings."""
    return tuple(dict.fromkeys((*_acting_names(learner), *_settings_changed(learner).values())))


def _acting_names(learner: Learner) -> tuple[str, ...]:
    inner = getattr(learner.step, "__self__", None)
    if not isinstance(inner, Remedied):
        return ()
    return (*(kind.name for kind in inner.kinds), *_acting_names(inner.learner))


@dataclass(frozen=True)
class _Changed:
    """`Learner.changed` of a learner with remedies: makes it with other settings and the same remedies.

    Attributes:
      inner: that of the learner inside.
      acting: remedies that act while it trains.
      settings: by name of a setting, the remedy that changed it.
    """

    inner: Callable[..., Learner]
    acting: tuple[Remedy, ...]
    settings: Mapping[str, str]

    def __call__(self, change: Callable[..., Any]) -> Learner:
        learner = self.inner(change)
        learner = replace(learner, changed=_Changed(_inner_changed(learner), (), self.settings))
        return remedied(learner, *self.acting) if self.acting else learner


def _inner_changed(learner: Learner) -> Callable[..., Learner]:
    assert learner.changed is not None, "settings that were changed can be changed again"
    return learner.changed


def _settings_changed(learner: Learner) -> Mapping[str, str]:
    """By name of a setting, the remedy that changed it."""
    return learner.changed.settings if isinstance(learner.changed, _Changed) else {}


def same_beginning(one: Learner, other: Learner) -> bool:
    """Whether two learners are the same but for remedies that act while they train, so that their lanes begin alike."""
    return _inside(one).without_data == _inside(other).without_data


def _inside(learner: Learner) -> Learner:
    """The learner that remedies act in, without its data."""
    inner = getattr(learner.step, "__self__", None)
    return _inside(inner.learner) if isinstance(inner, Remedied) else learner


def misfit(kind: RemedyKind, sites: Sites) -> str | None:
    """Returns a sentence on why a remedy cannot act in a learner with these sites, or None where it can."""
    if kind.site not in sites.helped:
        if kind.site == "betas" and "guard" in sites.helped:
            return (
                f"remedy '{kind.name}' changes Adam's decay rates, which a jaxaudit.Optimizer lets it do only with a "
                "jaxaudit.Adam as its transform"
            )
        why = f", for {sites.absent[kind.site]}" if kind.site in sites.absent else ""
        if kind.site == "trained":
            return (
                f"remedy '{kind.name}' acts on trained parameters, which the learner does not hand over at the end of "
                "a step (jaxaudit.Optimizer.finish)"
            )
        if kind.site in HOOKS:
            return f"remedy '{kind.name}' acts on what a jaxaudit.Optimizer does, and the learner uses none"
        known = ", ".join(sorted(sites))
        return (
            f"remedy '{kind.name}' acts at site '{kind.site}', which the learner does not tap{why}; its sites: {known}"
        )
    seen = sites.helped[kind.site].values()
    offered = frozenset.intersection(*(frozenset(one.context) for one in seen)) | set(REMEDY_OFFERED)
    if missing := sorted(set(kind.needs) - offered):
        return (
            f"remedy '{kind.name}' needs {', '.join(missing)} at '{kind.site}', which the learner does not give there"
        )
    if kind.keeps_state and (lost := next((one.lost for one in seen if one.lost), None)):
        return f"remedy '{kind.name}' {lost}"
    return next((reason for one in seen if (reason := _refusal(kind, one)) is not None), None)


def _refusal(kind: RemedyKind, passed: Helped) -> str | None:
    """None, or the sentence of the ValueError with which a remedy's function refuses what passes at its site."""
    assert kind.apply is not None, "it is at a site"
    given = {"minibatch": jnp.int32(0), "progress": jnp.float32(0.0), "key": jax.random.key(0), **passed.context}
    needed = {name: given[name] for name in kind.needs}
    arrays = {name: value for name, value in needed.items() if all(hasattr(x, "dtype") for x in jax.tree.leaves(value))}
    apply = functools.partial(kind.apply, **{name: needed[name] for name in needed if name not in arrays})
    try:
        jax.eval_shape(
            lambda value, strength, arrays: apply(value, strength, kind.init(value), **arrays),
            passed.value,
            jnp.float32(kind.strength),
            arrays,
        )
    except ValueError as error:
        return f"remedy '{kind.name}': {error}"
    return None


def _with_settings(learner: Learner, one: Remedy) -> Learner:
    change = one.kind.settings
    if change is None:
        return learner
    if learner.changed is None:
        raise ValueError(f"remedy '{one.name}' changes settings, and '{learner.name}' has none that can be changed")
    before = _settings_changed(learner)
    new: dict[str, str] = {}

    def changes(settings: Any) -> Mapping[str, Any]:
        found = change(settings, one.strength)
        for name in found:
            if name in before:
                raise ValueError(f"it changes the setting '{name}', and so does remedy '{before[name]}'")
            new[name] = one.name
        return found

    try:
        found = learner.changed(changes)
    except ValueError as error:
        raise ValueError(f"remedy '{one.name}': {error}") from None
    return replace(found, changed=_Changed(_inner_changed(found), (), {**before, **new}))


@functools.lru_cache(maxsize=64)
def _made(learner: Learner, kinds: tuple[RemedyKind, ...]) -> Remedied:
    """The same object for equal arguments, for its methods are what programs are known by."""
    return Remedied(learner, kinds)


class Remedied:
    """Pure functions `init` and `step` of a learner, without its data, with kinds of remedies."""

    def __init__(self, learner: Learner, kinds: tuple[RemedyKind, ...]):
        self.learner, self.kinds = learner, kinds
        helped = find_sites(learner).helped
        self.counted = tuple(kind.name for kind in kinds if not any(one.lost for one in helped[kind.site].values()))
        self.shapes = {
            kind.name: (kind, {label or ROOT: one.value for label, one in helped[kind.site].items()})
            for kind in kinds
            if kind.keeps_state
        }

    def init(self, key: jax.Array, data: RemediedData) -> RemediedState:
        """The learner's first state, and the remedies'."""
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
        """A step of the learner, with taps that the remedies act in."""
        data: RemediedData = taps.data
        remedies = tuple((kind, data.strengths[kind.name]) for kind in self.kinds)
        inside = taps.with_remedies(remedies, state.remedies, data.learner, self.counted)
        after, telemetry = self.learner.step(state.learner, key, inside)  # type: ignore[arg-type]
        states, counts = taps.take_back(inside)  # type: ignore[arg-type]
        acted = {ACTED + name: count[0] / count[1] for name, count in counts.items()}
        return RemediedState(after, states), telemetry | acted

    def save(self, folder: Path, state: RemediedState, data: RemediedData) -> None:
        """As the learner saves what it has trained."""
        assert self.learner.save is not None, "or it would not be asked for"
        self.learner.save(folder, state.learner, data.learner)

    @property
    def partition(self) -> Partition:
        """The learner's: what remedies keep of parameters lies as these do."""
        return _partition(self.learner.partition)


@functools.lru_cache(maxsize=64)
def _partition(of: Partition) -> Partition:
    """The partition of a learner for a learner with remedies; the same function for the same one."""

    def partition(path: str, shape: tuple[int, ...]) -> tuple[str | None, ...]:
        whose, _, rest = path.partition("/")
        return of(rest, shape) if whose in ("learner", "remedies") else ()

    return partition
