"""Where a learner can be disturbed: found by tracing one step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.learner import Learner, without_lasting
from jaxaudit.core.taps import NEVER, ROOT, STATE, Slot, States, Taps, loose, lost_state, misplaced, numbers_of
from jaxaudit.runtime import tracing
from jaxaudit.runtime.paths import paths_of

_NUMBERS = (int, float, np.integer, np.floating)


class Helped(NamedTuple):
    """A value that remedies may act on.

    Attributes:
      value: its shapes and dtypes.
      context: what every tap there gives beside it, by name: shapes and dtypes, functions and the like as they are.
      lost: why no state can be kept there, or None.
    """

    value: Any
    context: Mapping[str, Any]
    lost: str | None


def _shape(x: Any) -> Any:
    known = hasattr(x, "dtype") or isinstance(x, _NUMBERS)
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) if known else x


@dataclass
class Recorder:
    """Taps that change nothing and note what passes: a learner's sites, their leaves and their context.

    Attributes:
      step, steps, data: as in `Taps`.
      paths: for every site, the paths of its leaves.
      context: for every site, the names of the context given at each of its taps.
      numbers: for every site, those of its context that are plain numbers, the same at each of its taps.
      values: for every site, the shapes and dtypes seen, by label.
      loose: for sites where no state can be kept, a sentence on why.
      lost: for sites that cannot be disturbed at all where they are tapped, a sentence on why.
      helped: where remedies may act: for every site and hook, by label, what passes.
      absent: the learner's, on what is not there.
      carried: whether this place can keep a state.
      home: where it was made.
      inner_states, inner_counts: of the remedies of the learner whose taps it stands in for.
    """

    step: Any = 0
    steps: int | None = None
    data: Any = None
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    context: dict[str, set[str]] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    loose: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    helped: dict[str, dict[str, Helped]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    carried: bool = True
    home: Any = field(default_factory=tracing.current_trace)
    inner_states: Any = None
    inner_counts: Any = None

    def __call__(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Notes the site and returns the value."""
        return self.disturb(site, self.remedy(site, value, label=label, **context), label=label, **context)

    def disturb(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Notes where perturbations may act, and returns the value."""
        whole = value
        value = value if site == STATE else numbers_of(value)
        seen = self.paths.get(site, ())
        self.paths[site] = seen + tuple(p for p in paths_of(value, label) if p not in seen)
        self.context[site] = self.context.get(site, set(context)) & set(context)
        known = {name: float(given) for name, given in context.items() if isinstance(given, _NUMBERS)}
        self.numbers[site] = dict(self.numbers.get(site, known).items() & known.items())
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), value)
        self.values.setdefault(site, {})[label] = shapes
        if reason := misplaced(site, self.home, keeps_state=False):
            self.lost[site] = reason
        if reason := misplaced(site, self.home, keeps_state=True) or (None if self.carried else loose(site)):
            self.loose[site] = reason
        return whole

    def remedy(self, place: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Notes where remedies may act, and returns the value."""
        shapes, given = jax.tree.map(_shape, (value, context))
        reason = lost_state(place, self.home) or (None if self.carried else loose(place))
        seen = self.helped.setdefault(place, {})
        known = seen.get(label)
        kept = given if known is None else {name: known.context[name] for name in known.context if name in given}
        seen[label] = Helped(shapes, kept, reason if known is None else known.lost or reason)
        return value

    def helps(self, *places: str) -> bool:
        """True: where remedies could act is to be noted."""
        return True

    def acts(self, *sites: str) -> bool:
        """True: where perturbations or remedies could act is to be noted."""
        return True

    def with_remedies(self, remedies: Any, states: Any, data: Any, counted: Iterable[str] = ()) -> Recorder:
        """A recorder of the same sites for the learner inside a remedied one, which reads other data."""
        return replace(self, data=data, inner_states=states, inner_counts={name: jnp.zeros(2) for name in counted})

    def take_back(self, recorder: Recorder) -> tuple[Any, Any]:
        """The states and counts of remedies that `with_remedies` was given: nothing has changed them."""
        return recorder.inner_states, recorder.inner_counts

    @property
    def closed(self) -> Taps:
        """Taps that disturb nothing, and of which nothing is noted."""
        return Taps(self.step, self.steps, data=self.data)

    def disturbs(self, *sites: str) -> bool:
        """True: what could be disturbed is to be noted."""
        return True

    def disturbed(self, *sites: str) -> jax.Array:
        return jnp.zeros((), bool)

    def idle(self, *sites: str) -> jax.Array:
        return jnp.int32(NEVER)

    def fold_in(self, index: Any) -> Recorder:
        """A recorder of the same sites, at a place that keeps no state."""
        return replace(self, carried=False, home=tracing.current_trace())

    def scan(self, body: Callable, init: Any, xs: Any = None, length: int | None = None) -> tuple[Any, Any]:
        """`jax.lax.scan` whose body gets a recorder of the same sites."""

        def turn(carry: Any, x: Any) -> tuple[Any, Any]:
            return body(replace(self, home=tracing.current_trace()), carry, x)

        return jax.lax.scan(turn, init, xs, length)

    def repeat(self, body: Callable, init: Any, times: Any, until: Callable | None = None) -> Any:
        """`jax.lax.fori_loop` whose body gets a recorder of the same sites; what ends it early does not matter here."""
        return jax.lax.fori_loop(
            0, times, lambda number, carry: body(replace(self, home=tracing.current_trace()), carry, number), init
        )

    def cond(self, chosen: jax.Array, body: Callable, carry: Any) -> tuple[Any, Any]:
        """`body` with this recorder: what could be tapped is to be noted."""
        return body(self, carry)

    @property
    def sites(self) -> Sites:
        context = {site: frozenset(names) for site, names in self.context.items()}
        numbers = dict(self.numbers)
        return Sites(
            dict(self.paths), context, dict(self.values), self.loose, self.lost, numbers, self.absent, self.helped
        )


@dataclass(frozen=True)
class Sites:
    """Where a learner can be disturbed: `paths[site]` are the leaves there, `context[site]` what the tap offers.

    `values[site][label]` are the shapes that pass, and `loose[site]` and `lost[site]` say why no state can be kept
    there, or nothing disturbed; `numbers[site]` are the plain numbers that the tap offers, and those that the learner
    tells, by name. `absent` says of sites and context that are not there why. `helped` is where remedies may act, hooks
    among the sites.
    """

    paths: Mapping[str, tuple[str, ...]]
    context: Mapping[str, frozenset[str]]
    values: Mapping[str, Mapping[str, Any]]
    loose: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    helped: Mapping[str, Mapping[str, Helped]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __contains__(self, site: str) -> bool:
        return site in self.paths

    def with_bounds_of(self, learner: Learner) -> Sites:
        """Returns a copy with `learner`'s bounds of magnitudes.

        Learners that compare equal share a program, but may have different bounds.
        """
        numbers = {site: {**self.numbers[site], **learner.numbers.get(site, {})} for site in self}
        return replace(self, numbers=numbers)


def find_sites(learner: Learner, steps: int | None = None) -> Sites:
    """Traces one step abstractly (no computation) and returns the sites it taps."""
    return _found(learner, steps)[0].with_bounds_of(learner)


def step_telemetry(learner: Learner, steps: int | None = None) -> dict[str, tuple[int, ...]]:
    """The shape of each channel of a learner's telemetry, from the trace that finds its sites."""
    return dict(_found(learner, steps)[1])


def trace(learner: Learner, recorder: Recorder) -> None:
    """Traces one step of a learner with `recorder` for its taps; `find_sites` needs no trace of its own after it."""
    recorder.absent = learner.absent

    # The step index is an argument, as in the audit, so that a learner's arithmetic on it sees a traced int32.
    def traced(state, key, index, data):
        recorder.step, recorder.data, recorder.home = index, data, tracing.current_trace()
        recorder(STATE, without_lasting(state))
        return learner.advance(state, key, recorder)[1]  # type: ignore[arg-type]  # it stands in for taps

    key = jax.random.key(0)
    data = learner.shapes.tree
    telemetry = jax.eval_shape(traced, learner.state_shapes, key, jnp.int32(0), data)
    shapes = {name: value.shape for name, value in telemetry.items()}
    _LATEST[learner.without_data, recorder.steps] = recorder.sites, shapes
    if len(_LATEST) > _MOST:
        del _LATEST[next(iter(_LATEST))]


_MOST = 64
_LATEST: dict[tuple[Learner, int | None], tuple[Sites, dict[str, tuple[int, ...]]]] = {}
"""What the latest traces found, the oldest first: at most `_MOST`."""


def _found(learner: Learner, steps: int | None) -> tuple[Sites, dict[str, tuple[int, ...]]]:
    key = learner.without_data, steps
    if key not in _LATEST:
        trace(learner, Recorder(steps=steps))
    return _LATEST[key]


def initial_states(slots: tuple[Slot, ...], sites: Sites) -> States:
    """The states of one lane's perturbations when their windows open."""
    return {
        slot.id: {label or ROOT: slot.init(value) for label, value in sites.values[slot.kind.site].items()}
        for slot in slots
        if slot.kind.keeps_state
    }
