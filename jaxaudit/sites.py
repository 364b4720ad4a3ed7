"""Where a learner can be disturbed: found by tracing one step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.learner import Learner
from jaxaudit.paths import paths_of
from jaxaudit.taps import ROOT, STATE, Kind, Memory


@dataclass
class Recorder:
    """Taps that change nothing and note what passes: a learner's sites, their leaves and their context.

    Attributes:
      step, steps, data: as in `Taps`.
      paths: for every site, the paths of its leaves.
      context: for every site, the names of the context given at each of its taps.
      values: for every site, the shapes and dtypes seen, by label.
      loose: sites tapped in a loop that carries no memory.
      carried: whether this place can keep memory.
    """

    step: Any = 0
    steps: int | None = None
    data: Any = None
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    context: dict[str, set[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)
    carried: bool = True

    def __call__(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Notes the site and returns the value."""
        seen = self.paths.get(site, ())
        self.paths[site] = seen + tuple(p for p in paths_of(value, label) if p not in seen)
        self.context[site] = self.context.get(site, set(context)) & set(context)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)
        self.values.setdefault(site, {})[label] = shapes
        if not self.carried:
            self.loose.add(site)
        return value

    def disturbs(self, site: str) -> bool:
        """True: what could be disturbed is to be noted."""
        return True

    def fold_in(self, index: Any) -> Recorder:
        """A recorder of the same sites, at a place that keeps no memory."""
        return replace(self, carried=False)

    def scan(self, body: Callable, init: Any, xs: Any = None, length: int | None = None) -> tuple[Any, Any]:
        """`jax.lax.scan` whose body gets this recorder."""
        return jax.lax.scan(lambda carry, x: body(self, carry, x), init, xs, length)

    def cond(self, chosen: jax.Array, body: Callable, carry: Any) -> tuple[Any, Any]:
        """`body` with this recorder: what could be tapped is to be noted."""
        return body(self, carry)

    @property
    def sites(self) -> Sites:
        """What was noted."""
        context = {site: frozenset(names) for site, names in self.context.items()}
        return Sites(dict(self.paths), context, dict(self.values), frozenset(self.loose))


@dataclass(frozen=True)
class Sites:
    """Where a learner can be disturbed: `paths[site]` are the leaves there, `context[site]` what the tap offers.

    `values[site][label]` are the shapes that pass, and `loose` the sites where no memory is kept.
    """

    paths: Mapping[str, tuple[str, ...]]
    context: Mapping[str, frozenset[str]]
    values: Mapping[str, Mapping[str, Any]]
    loose: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __contains__(self, site: str) -> bool:
        return site in self.paths


def find_sites(learner: Learner, steps: int | None = None) -> Sites:
    """Traces one step abstractly (no computation) and returns the sites it taps."""
    return _found(learner.without_data, steps)


@functools.lru_cache(maxsize=64)
def _found(learner: Learner, steps: int | None) -> Sites:
    recorder = Recorder(steps=steps)
    trace(learner, recorder)
    return recorder.sites


def trace(learner: Learner, recorder: Recorder) -> None:
    """Traces one step of a learner with `recorder` for its taps."""

    # The step index is an argument, as in the audit, so that a learner's arithmetic on it sees a traced int32.
    def traced(state, key, index, data):
        recorder.step, recorder.data = index, data
        recorder(STATE, state)
        return learner.step(state, key, recorder)  # type: ignore[arg-type]  # it stands in for taps

    key = jax.random.key(0)
    jax.eval_shape(traced, jax.eval_shape(learner.init, key), key, jnp.int32(0), learner.shapes.tree)


def initial_memory(kinds: tuple[Kind, ...], sites: Sites) -> Memory:
    """What stateful kinds remember when their windows open, for one lane."""
    return {
        kind.id: {label or ROOT: kind.memory(value) for label, value in sites.values[kind.site].items()}
        for kind in kinds
        if kind.memory is not None
    }
