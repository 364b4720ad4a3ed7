"""Finds where a learner can be disturbed, by tracing one of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.learner import Learner, without_lasting
from jaxaudit.core.taps import NEVER, STATE, Taps, misplaced_tap, only_numbers, state_lost, state_not_carried
from jaxaudit.runtime import tracing
from jaxaudit.runtime.paths import paths_of

_NUMBERS = (int, float, np.integer, np.floating)


class RemedyPoint(NamedTuple):
    """A value that remedies can act on.

    Attributes:
      value: the shapes and dtypes of the value.
      context: what every tap at this place passes beside the value, by name: shapes and dtypes of arrays and numbers,
        and other objects, such as functions, as they are.
      state_lost: why no state can be kept there, or None.
    """

    value: Any
    context: Mapping[str, Any]
    state_lost: str | None


def _shape(x: Any) -> Any:
    is_array = hasattr(x, "dtype") or isinstance(x, _NUMBERS)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) if is_array else x


@dataclass(frozen=True)
class Sites:
    """Where a learner can be disturbed.

    Attributes:
      paths: for every site, the paths of its leaves.
      context: for every site, the names of the context that all of its taps pass.
      values: for every site, the shapes and dtypes of the value, by label.
      stateless: for sites where stateful perturbations cannot act, a clause on why.
      blocked: for sites where no perturbation can act, a clause on why.
      numbers: for every site, the Python numbers in its context and the learner's `numbers` there, by name.
      absent: for missing sites, context and labels, the learner's explanation.
      remedy_points: for every site and hook, the values that remedies can act on, by label.
    """

    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    context: dict[str, frozenset[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    stateless: dict[str, str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    remedy_points: dict[str, dict[str, RemedyPoint]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __contains__(self, site: str) -> bool:
        return site in self.paths

    def with_bounds_of(self, learner: Learner) -> Sites:
        """Returns a copy with the learner's `numbers`, which bound the magnitudes that mean something.

        Learners that compare equal share a program, but may have different bounds.
        """
        numbers = {site: {**self.numbers[site], **learner.numbers.get(site, {})} for site in self}
        return replace(self, numbers=numbers)

    def reason_absent(self, name: str) -> str:
        """Returns the learner's reason for not having a site, as a clause ", for ..."; "" if it gives none."""
        return f", for {self.absent[name]}" if name in self.absent else ""


@dataclass
class Recorder:
    """Taps that change nothing and record a learner's sites, the leaves of their values and their context.

    Attributes:
      step, steps, data: as in `Taps`.
      sites: what was recorded; its `numbers` are the entries of the context that are Python numbers and the same at all
        taps of a site.
      carries_state: whether the current loop or branch carries states.
      origin: the trace in which the recorder was created.
      inner_states, inner_counts: the states and counts of remedies that the learner has already.
    """

    step: Any = 0
    steps: int | None = None
    data: Any = None
    sites: Sites = field(default_factory=Sites)
    carries_state: bool = True
    origin: Any = field(default_factory=tracing.current_trace)
    inner_states: Any = None
    inner_counts: Any = None

    def __call__(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Records the site and returns the value."""
        return self.disturb(site, self.remedy(site, value, label=label, **context), label=label, **context)

    def disturb(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Records that perturbations can act here, and returns the value."""
        tapped = value if site == STATE else only_numbers(value)
        sites, earlier = self.sites, self.sites.paths.get(site, ())
        sites.paths[site] = earlier + tuple(path for path in paths_of(tapped, label) if path not in earlier)
        sites.context[site] = sites.context.get(site, frozenset(context)) & frozenset(context)
        numbers = {name: float(entry) for name, entry in context.items() if isinstance(entry, _NUMBERS)}
        sites.numbers[site] = dict(sites.numbers.get(site, numbers).items() & numbers.items())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tapped)
        sites.values.setdefault(site, {})[label] = shapes
        if reason := misplaced_tap(site, self.origin, keeps_state=False):
            sites.blocked[site] = reason
        if reason := misplaced_tap(site, self.origin, keeps_state=True) or self._not_carried(site):
            sites.stateless[site] = reason
        return value

    def remedy(self, place: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Records that remedies can act here, and returns the value."""
        shapes, offered = jax.tree.map(_shape, (value, context))
        reason = state_lost(place, self.origin) or self._not_carried(place)
        points = self.sites.remedy_points.setdefault(place, {})
        if earlier := points.get(label):
            offered = {name: entry for name, entry in earlier.context.items() if name in offered}
            reason = earlier.state_lost or reason
        points[label] = RemedyPoint(shapes, offered, reason)
        return value

    def _not_carried(self, place: str) -> str | None:
        return None if self.carries_state else state_not_carried(place)

    def helps(self, *places: str) -> bool:
        """Returns True, so that every place where remedies could act is recorded."""
        return True

    def acts(self, *sites: str) -> bool:
        """Returns True, so that every place where perturbations or remedies could act is recorded."""
        return True

    def with_remedies(self, remedies: Any, states: Any, data: Any, counted: Iterable[str] = ()) -> Recorder:
        """Returns a recorder of the same sites for the learner inside a remedied one, which reads other data."""
        return replace(self, data=data, inner_states=states, inner_counts={name: jnp.zeros(2) for name in counted})

    def take_back(self, recorder: Recorder) -> tuple[Any, Any]:
        """Returns the states and counts that `with_remedies` was called with, which nothing has changed."""
        return recorder.inner_states, recorder.inner_counts

    @property
    def closed(self) -> Taps:
        """Taps that neither disturb nor record a site."""
        return Taps(self.step, self.steps, data=self.data)

    def disturbs(self, *sites: str) -> bool:
        """Returns True, so that every place where perturbations could act is recorded."""
        return True

    def disturbed(self, *sites: str) -> jax.Array:
        return jnp.zeros((), bool)

    def idle(self, *sites: str) -> jax.Array:
        return jnp.int32(NEVER)

    def fold_in(self, index: Any) -> Recorder:
        """Returns a recorder of the same sites for a loop that does not carry states."""
        return replace(self, carries_state=False, origin=tracing.current_trace())

    def scan(self, body: Callable, init: Any, xs: Any = None, length: int | None = None) -> tuple[Any, Any]:
        """Runs `jax.lax.scan` over `body(recorder, carry, x)` with a recorder of the same sites."""

        def iteration(carry: Any, x: Any) -> tuple[Any, Any]:
            return body(replace(self, origin=tracing.current_trace()), carry, x)

        return jax.lax.scan(iteration, init, xs, length)

    def repeat(self, body: Callable, init: Any, times: Any, until: Callable | None = None) -> Any:
        """Runs `jax.lax.fori_loop` over `body(recorder, carry, number)` with a recorder of the same sites."""
        return jax.lax.fori_loop(
            0, times, lambda number, carry: body(replace(self, origin=tracing.current_trace()), carry, number), init
        )

    def cond(self, chosen: jax.Array, body: Callable, carry: Any) -> tuple[Any, Any]:
        """Returns `body(recorder, carry)`, so that the sites in the branch are recorded."""
        return body(self, carry)


def find_sites(learner: Learner, steps: int | None = None) -> Sites:
    """Traces one step abstractly, without computing anything, and returns the sites that it taps."""
    return _traced(learner, steps)[0].with_bounds_of(learner)


def step_telemetry(learner: Learner, steps: int | None = None) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each channel of a learner's telemetry, from the trace that finds its sites."""
    return dict(_traced(learner, steps)[1])


def trace(learner: Learner, recorder: Recorder) -> None:
    """Traces one step of a learner with `recorder` for its taps; `find_sites` uses the result of the latest trace."""
    recorder.sites = Sites(absent=learner.absent)

    # The step index is an argument, as in the audit, so that a learner's arithmetic on it sees a traced int32.
    def step(state, key, index, data):
        recorder.step, recorder.data, recorder.origin = index, data, tracing.current_trace()
        recorder(STATE, without_lasting(state))
        return learner.advance(state, key, recorder)[1]  # type: ignore[arg-type]  # a recorder stands in for taps

    telemetry = jax.eval_shape(step, learner.state_shapes, jax.random.key(0), jnp.int32(0), learner.shapes.tree)
    shapes = {name: value.shape for name, value in telemetry.items()}
    _TRACES[learner.without_data, recorder.steps] = recorder.sites, shapes
    if len(_TRACES) > _MAX_TRACES:
        del _TRACES[next(iter(_TRACES))]


_MAX_TRACES = 64
_TRACES: dict[tuple[Learner, int | None], tuple[Sites, dict[str, tuple[int, ...]]]] = {}
"""The sites and telemetry shapes of the latest traces by learner and number of steps, the oldest first."""


def _traced(learner: Learner, steps: int | None) -> tuple[Sites, dict[str, tuple[int, ...]]]:
    key = learner.without_data, steps
    if key not in _TRACES:
        trace(learner, Recorder(steps=steps))
    return _TRACES[key]
