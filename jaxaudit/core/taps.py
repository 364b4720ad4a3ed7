"""The standard sites, and `Taps`, the object that a learner's step calls at each: `value = taps("gradient", value)`.

A learner names the places where something can go wrong. The audit decides for each lane and step what goes wrong there.
A program's structure contains the kinds of perturbation, each in a slot. Magnitudes, windows and targets are data.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.core.perturbation import Kind
from jaxaudit.core.remedy import RemedyKind
from jaxaudit.runtime import tracing
from jaxaudit.runtime.paths import paths_of, spread_over_leaves

SITES = (
    "observation",
    "action",
    "reward",
    "dynamics",
    "tokens",
    "objective",
    "label_smoothing",
    "gradient",
    "clip_norm",
    "learning_rate",
    "optimizer_state",
    "params",
    "difficulty",
    "prompt",
    "tool_result",
    "behaviour",
    "sampled_logits",
    "temperature",
    "log_probability",
    "reward_model",
    "advantage",
    "gae_lambda",
    "kl_coefficient",
    "ratio_clip",
    "reference",
)
"""The standard sites; those from "difficulty" on occur in dialogue learners only. A learner may add its own sites."""

PERSISTENT_SITES = {
    "params": "the trained parameters: training continues from the change; the standard kinds act once",
    "optimizer_state": "the optimizer's state: the change decays as fast as the moments do",
    "reference": "the policy that divergence is measured from: moved once, or further at every step of the window",
}
"""Standard sites whose value a learner keeps from step to step, so that a change there outlasts its window.

At all other sites a disturbance ends with its window, because the tapped value is a copy (of the behaviour policy or of
the reward model, whose parameters are part of a dialogue learner's state), is computed anew in each step, or is a
setting.
"""

ACTING_SITES = ("observation", "action", "dynamics")
"""Sites at which a disturbance changes the returns that a learner collects at once, even if the policy is unchanged."""

STATE = "state"
"""The site that every learner has: its whole state before a step, except for its `Lasting` parts."""


@dataclass(frozen=True)
class Slot:
    """A place in a program where perturbations of one kind act.

    Attributes:
      kind: the kind of perturbation.
      occurrence: the index of this occurrence of the kind within a condition, which may chain one kind several times.
      copy: the index of this copy of the slot; there are several if chains order the kinds of one site differently.
      max_magnitude: the largest magnitude in the grid if the kind is `sized`, else None.
    """

    kind: Kind
    occurrence: int = 0
    copy: int = 0
    max_magnitude: float | None = None

    @property
    def id(self) -> str:
        """An identifier that is unique within a program: "kind/occurrence/copy"."""
        return f"{self.kind.name}/{self.occurrence}/{self.copy}"

    @property
    def stream(self) -> int:
        """The number that is folded into the random key; it depends on the kind's name and occurrence alone."""
        return zlib.crc32(f"{self.kind.name}/{self.occurrence}".encode()) & 0x7FFFFFFF

    def init(self, value: Any) -> Any:
        """Returns the perturbation's state when the window opens, for a value with the shapes and dtypes of `value`."""
        return self.kind.init(value, self.max_magnitude) if self.kind.sized else self.kind.init(value)


NEVER = 2**30
"""The number of steps that `Windows.idle` returns for a window that has not been open yet."""


@struct.dataclass
class Windows:
    """The steps t in which perturbations act: `start <= t < stop` and `(t - start) % period < length`.

    All fields are int32 arrays of one shape.
    """

    start: Any
    stop: Any
    period: Any
    length: Any

    def idle(self, step: jax.Array) -> jax.Array:
        """Returns the steps since each window was last open: 0 if it is open at `step` (a scalar int), or `NEVER`."""
        since = jnp.minimum(step, self.stop - 1) - self.start
        latest = since - jnp.maximum(since % self.period - (self.length - 1), 0)
        return jnp.where((since >= 0) & (self.length > 0), step - self.start - latest, NEVER)

    def open(self, step: jax.Array) -> jax.Array:
        """Returns whether each window is open at `step`, bool in the shape of the fields."""
        return self.idle(step) == 0

    def opening(self, step: jax.Array) -> jax.Array:
        """Returns whether each window is open at `step` and was closed at the step before."""
        return self.open(step) & ~self.open(step - 1)

    def elapsed(self, step: jax.Array) -> jax.Array:
        """Returns the share of each window's span, from start to stop, that has passed at the end of `step`.

        It is 0 before `start`, rises linearly, and is 1 from the last step, `stop - 1`, on. `step` is a scalar int, and
        the result has the shape of the fields.
        """
        return jnp.clip((step - self.start + 1) / jnp.maximum(self.stop - self.start, 1), 0.0, 1.0)


@struct.dataclass
class Disturbance:
    """The perturbations of one lane in the program's K slots, or of L lanes if all arrays have a leading axis L.

    Attributes:
      magnitude: the magnitudes, float32 `[K]`.
      windows: the windows, with fields `[K]`.
      targets: for each slot, which paths of its site's value the perturbation may change, bool `[paths]`.
    """

    magnitude: Any
    windows: Windows
    targets: tuple[Any, ...]


OFFERED = ("selected", "elapsed", "alarm")
"""Context that every tap offers to perturbations.

"selected" are the paths that the target selects (bool `[paths]`), "elapsed" is `Windows.elapsed`, and "alarm" is
whether the lane's monitor raised an alarm.
"""

REMEDY_OFFERED = ("minibatch", "progress", "key")
"""Context that every tap offers to remedies.

"minibatch" (int32) counts the iterations of the surrounding `Taps.scan` and `Taps.repeat` loops within this step, from
0 through all loops. "progress" is the share of the run that has passed after this step, or 1 outside of runs. "key" is
a random key.
"""

States = dict[str, dict[str, Any]]
"""The states of one lane's stateful perturbations by slot id and tap label (ROOT if the tap has none).

The states of its remedies are stored by remedy name and label likewise.
"""

ROOT = "value"


def only_numbers(value: Any) -> Any:
    """Returns a pytree with None in place of its random keys and functions, which cannot be disturbed.

    The same object is returned if the pytree has neither.
    """
    if all(map(_is_number, jax.tree.leaves(value))):
        return value
    return jax.tree.map(lambda x: x if _is_number(x) else None, value)


def replace_numbers(value: Any, numbers: Any) -> Any:
    """Returns `value` with the leaves of `numbers`, a pytree in the structure of `only_numbers(value)`."""
    return jax.tree.map(lambda x, y: y if _is_number(x) else x, value, numbers)


def _is_number(x: Any) -> bool:
    if hasattr(x, "dtype"):
        return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return not callable(x)


Counts = dict[str, jax.Array]
"""For each remedy, by name, how often it changed a value in this step and how often it was applied, float32 `[2]`."""

CarriedStates = tuple[States | None, States | None, Counts | None]
"""The states of perturbations, the states of remedies, and the remedies' counts; None where they cannot be carried."""


class Taps:
    """The object that a learner's `step` calls at its sites: `taps(site, value)` returns the value, which is disturbed
    in disturbed lanes.

    Taps belong to the trace in which they were created. A loop, a batch or a branch inside a step needs taps of its
    own, which `scan`, `repeat`, `cond` and `fold_in` create. The step's taps can be used under `jax.grad` and
    `jax.checkpoint`, unless a perturbation of the site is stateful.

    A perturbation is computed only while its window is open in some lane, in a branch of `jax.lax.cond`. On a GPU the
    host decides each branch inside a loop, which takes time. If `branch_in_loops` is false, elementwise perturbations
    inside loops are therefore computed in every iteration, and their result is selected.

    Attributes:
      step: the current step, an int32 scalar that is the same in all lanes, so that `lax.cond` on it stays a branch.
      steps: the number of steps of the run, or None outside of an audit.
      data: the learner's `data`.
      states: the states of stateful perturbations, which each call at their site advances. None in a loop that does
        not carry them (see `scan`).
      remedy_states: the states of stateful remedies, likewise.
      remedy_counts: how often each remedy has acted in this step.
    """

    def __init__(
        self,
        step: Any = 0,
        steps: int | None = None,
        *,
        data: Any = None,
        slots: tuple[Slot, ...] = (),
        paths: Mapping[str, tuple[str, ...]] | None = None,
        key: jax.Array | None = None,
        lane: Disturbance | None = None,
        idle: Any = None,
        states: States | None = None,
        alarm: jax.Array | None = None,
        branch_in_loops: bool = True,
    ):
        self.states = states
        self.remedy_states: States | None = {}
        self.remedy_counts: Counts | None = {}
        self.step = step
        self.steps = steps
        self.data = data
        self._slots = slots
        self._paths = paths or {}
        self._key = key
        self._lane = lane
        self._idle = idle
        self._alarm = alarm
        self._branch_in_loops = branch_in_loops
        self._remedies: tuple[tuple[RemedyKind, jax.Array], ...] = ()
        self._in_loop = False
        self._iterations: tuple[tuple[Any, Any], ...] = ()
        self._calls: dict[str, int] = {}
        self._origin = tracing.current_trace()

    def __call__(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Passes `value` (any pytree) through the perturbations of `site`.

        `label` distinguishes several values of one site (e.g. the learning rates of two optimizers) and is the first
        component of their paths. `context` contains what some perturbations need besides the value, e.g. `schedule` at
        the learning rate. While no window is open, the value is returned bit for bit. Random keys and functions in it
        are never changed.
        """
        return self.disturb(site, self.remedy(site, value, label=label, **context), label=label, **context)

    def disturb(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Passes `value` through the perturbations of `site` only; `taps(site, value)` calls `remedy` before."""
        call = self._calls.get(site, 0)
        self._calls[site] = call + 1
        for index, slot in enumerate(self._slots):
            if slot.kind.site == site:
                if reason := misplaced_tap(site, self._origin, slot.kind.keeps_state):
                    raise ValueError(f"perturbation '{slot.kind.name}' {reason}")
                numbers = value if site == STATE else only_numbers(value)
                disturbed = self._disturb(index, slot, call, numbers, label, context)
                value = disturbed if numbers is value else replace_numbers(value, disturbed)
        return value

    def remedy(self, place: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Passes `value`, any pytree, through the remedies of a site or hook in their order, but not through the
        perturbations.

        `label` and `context` are as in a call of the taps. A remedy at its neutral strength returns the value bit for
        bit.
        """
        for kind, strength in self._remedies:
            if kind.site == place:
                value = self._apply_remedy(kind, strength, value, label, context)
        return value

    def helps(self, *places: str) -> bool:
        """Returns whether any remedy acts at one of `places`, sites or hooks; known when the program is traced."""
        return any(kind.site in places for kind, _ in self._remedies)

    def acts(self, *sites: str) -> bool:
        """Returns whether any perturbation or remedy acts at one of `sites`; known when the program is traced."""
        return self.disturbs(*sites) or self.helps(*sites)

    def with_remedies(
        self, remedies: tuple[tuple[RemedyKind, jax.Array], ...], states: States, data: Any, counted: Iterable[str] = ()
    ) -> Taps:
        """Returns a copy of the taps with additional remedies, which act after the present ones, and with other data.

        Args:
          remedies: the kinds of remedies with their strengths.
          states: the states of the stateful remedies.
          data: replaces `Taps.data`.
          counted: the names of the remedies whose actions are counted.
        """
        taps = copy.copy(self)
        taps._remedies = (*self._remedies, *remedies)
        taps.remedy_states = {**(self.remedy_states or {}), **states}
        taps.remedy_counts = {**(self.remedy_counts or {}), **{name: jnp.zeros(2) for name in counted}}
        taps.data = data
        return taps

    def take_back(self, taps: Taps) -> tuple[States, Counts]:
        """Takes over the states of `taps`, which `with_remedies` returned and with which a step was made.

        Returns the states and the counts of the remedies that `with_remedies` added.
        """
        assert taps.remedy_states is not None, "with_remedies sets it"
        assert taps.remedy_counts is not None, "with_remedies sets it"
        states, counts = self.remedy_states or {}, self.remedy_counts or {}
        self.states, self._calls = taps.states, taps._calls
        self.remedy_states = {name: taps.remedy_states[name] for name in states}
        self.remedy_counts = {name: taps.remedy_counts[name] for name in counts}
        return (
            {name: state for name, state in taps.remedy_states.items() if name not in states},
            {name: count for name, count in taps.remedy_counts.items() if name not in counts},
        )

    @property
    def closed(self) -> Taps:
        """Taps without perturbations and remedies, to measure the learner's own performance with."""
        return Taps(self.step, self.steps, data=self.data)

    def disturbs(self, *sites: str) -> bool:
        """Returns whether any lane is ever disturbed at one of `sites`; known when the program is traced."""
        return any(slot.kind.site in sites for slot in self._slots)

    def disturbed(self, *sites: str) -> jax.Array:
        """Returns whether this lane is disturbed at one of `sites` in this step, a bool scalar."""
        if self._lane is None:
            return jnp.zeros((), bool)
        neutral = np.array([slot.kind.neutral for slot in self._slots], np.float32)
        active = self._lane.windows.open(self.step) & (self._lane.magnitude != neutral)
        return jnp.any(active & np.array([slot.kind.site in sites for slot in self._slots], bool))

    def idle(self, *sites: str) -> jax.Array:
        """Returns how many steps ago a window at one of `sites` was last open in any lane of the program.

        The result is an int32 scalar: 0 if a window is open, `NEVER` if none has been open. It is not batched, so that
        `lax.cond` on it stays a branch.
        """
        idle = [self._idle[index] for index, slot in enumerate(self._slots) if slot.kind.site in sites]
        return jnp.min(jnp.stack(idle)) if idle else jnp.int32(NEVER)

    def fold_in(self, index: Any) -> Taps:
        """Returns a copy of the taps with its own randomness, for the body of a loop that knows its index.

        Stateful perturbations raise an error there; `scan` carries their states. Two loops that use the same index get
        the same randomness, as does the iteration of a `scan` with that index.
        """
        return self._in_iteration(index, (None, None, None))

    def scan(
        self, body: Callable[[Taps, Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None
    ) -> tuple[Any, Any]:
        """Runs `jax.lax.scan` over `body(taps, carry, x) -> (carry, y)`, with separate taps in each iteration.

        The states of perturbations and remedies are carried from iteration to iteration.
        """

        def iteration(carried: tuple[Any, CarriedStates], numbered: tuple[jax.Array, Any]):
            carry, states = carried
            index, x = numbered
            inner = self._in_iteration(index, states)
            inner._iterations = (*self._iterations, (index, iterations))
            carry, y = body(inner, carry, x)
            calls.update(inner._calls)
            return (carry, inner._carried), y

        calls: dict[str, int] = {}
        iterations = jax.tree.leaves(xs)[0].shape[0] if length is None else length
        (carry, self._carried), ys = jax.lax.scan(iteration, (init, self._carried), (jnp.arange(iterations), xs))
        self._calls |= calls  # so that a later loop draws different random numbers
        return carry, ys

    def repeat(
        self,
        body: Callable[[Taps, Any, jax.Array], Any],
        init: Any,
        times: Any,
        until: Callable[[Any], jax.Array] | None = None,
    ) -> Any:
        """Calls `body(taps, carry, number) -> carry` for the numbers from 0 to `times` - 1, with separate taps in each
        iteration.

        The states of perturbations and remedies are carried from iteration to iteration.

        Args:
          body: the body of the loop.
          init: the first carry.
          times: the number of iterations, an int scalar. It may be traced, as in `jax.lax.while_loop`, but then there
            is no gradient through the loop.
          until: `until(carry)`, a bool scalar, returns whether further iterations would change nothing. They are
            skipped, unless a perturbation is stateful, because its state may count them. Under `vmap` the result should
            not be batched (that of `jaxaudit.models.sampling.all_finished` is not), or each iteration copies the carry.
        """

        def iteration(number: jax.Array, carried: tuple[Any, CarriedStates]) -> tuple[Any, CarriedStates]:
            before, states = carried
            inner = self._in_iteration(number, states)
            inner._iterations = (*self._iterations, (number, times))
            carry = body(inner, before, number)
            calls.update(inner._calls)
            if until is not None and (inner.remedy_states or inner.remedy_counts):
                # Remedies do not count the iterations that a program without stateful perturbations skips.
                over = until(before)
                inner.remedy_states = _where(over, states[1], inner.remedy_states)
                inner.remedy_counts = _where(over, states[2], inner.remedy_counts)
            return carry, inner._carried

        calls: dict[str, int] = {}
        if until is None or self.states:
            carry, self._carried = jax.lax.fori_loop(0, times, iteration, (init, self._carried))
        else:
            _, (carry, self._carried) = jax.lax.while_loop(
                lambda loop: (loop[0] < times) & ~until(loop[1][0]),
                lambda loop: (loop[0] + 1, iteration(*loop)),
                (jnp.int32(0), (init, self._carried)),
            )
        self._calls |= calls
        return carry

    def cond(self, chosen: jax.Array, body: Callable[[Taps, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
        """Returns `body(taps, carry) -> (carry, y)` if `chosen`, else the carry and zeros in the shape of y, by
        `jax.lax.cond`.

        The states of perturbations and remedies are carried through both branches.
        """

        def do(carry: Any, states: CarriedStates) -> tuple[Any, Any, CarriedStates]:
            inner = self._in_current_trace(self._key, states)
            carry, y = body(inner, carry)
            calls.update(inner._calls)
            return carry, y, inner._carried

        def skip(carry: Any, states: CarriedStates) -> tuple[Any, Any, CarriedStates]:
            shapes = jax.eval_shape(lambda carry: body(self.closed, carry)[1], carry)
            return carry, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), states

        calls: dict[str, int] = {}
        carry, y, self._carried = jax.lax.cond(chosen, do, skip, carry, self._carried)
        self._calls |= calls
        return carry, y

    @property
    def _carried(self) -> CarriedStates:
        return self.states, self.remedy_states, self.remedy_counts

    @_carried.setter
    def _carried(self, states: CarriedStates) -> None:
        self.states, self.remedy_states, self.remedy_counts = states

    def _in_iteration(self, index: Any, states: CarriedStates) -> Taps:
        taps = self._in_current_trace(self._key if self._key is None else jax.random.fold_in(self._key, index), states)
        taps._in_loop = True
        return taps

    def _in_current_trace(self, key: jax.Array | None, states: CarriedStates) -> Taps:
        taps = copy.copy(self)
        taps._key, taps._carried, taps._calls, taps._origin = key, states, dict(self._calls), tracing.current_trace()
        return taps

    def _apply_remedy(self, kind: RemedyKind, strength: jax.Array, value: Any, label: str, context: dict) -> Any:
        if missing := [name for name in kind.needs if name not in REMEDY_OFFERED and name not in context]:
            raise ValueError(
                f"remedy '{kind.name}' needs {', '.join(missing)} at '{kind.site}', and the learner does not give it"
            )
        available = dict(context)
        if "minibatch" in kind.needs:
            available["minibatch"] = functools.reduce(
                lambda total, loop: total * loop[1] + loop[0], self._iterations, jnp.int32(0)
            )
        if "progress" in kind.needs:
            available["progress"] = (jnp.asarray(self.step, jnp.float32) + 1) / self.steps if self.steps else 1.0
        if "key" in kind.needs:
            available["key"] = self._remedy_key(kind)
        state: Any = ()
        if kind.keeps_state:
            if reason := state_lost(kind.site, self._origin):
                raise ValueError(f"remedy '{kind.name}' {reason}")
            if self.remedy_states is None:
                raise ValueError(f"remedy '{kind.name}' {state_not_carried(kind.site)}")
            state = self.remedy_states[kind.name][label or ROOT]
        assert kind.apply is not None, "a remedy that acts at a site has a function"
        changed, after = kind.apply(value, strength, state, **{name: available[name] for name in kind.needs})
        if kind.keeps_state:
            assert self.remedy_states is not None, "the state was read above"
            by_label = {**self.remedy_states[kind.name], label or ROOT: _cast_like(after, state)}
            self.remedy_states = {**self.remedy_states, kind.name: by_label}
        acts = jnp.asarray(strength != kind.neutral)
        after_remedy = _where_changed(acts, changed, value)
        counts = self.remedy_counts
        if counts is not None and kind.name in counts and state_lost(kind.site, self._origin) is None:
            count = counts[kind.name] + jnp.stack([jnp.where(acts, _differs(after_remedy, value), 0.0), 1.0])
            self.remedy_counts = {**counts, kind.name: count}
        return after_remedy

    def _remedy_key(self, kind: RemedyKind) -> jax.Array:
        if self._key is None:
            raise ValueError(f"remedy '{kind.name}' draws random numbers, but these taps have no random key")
        call = self._calls.get(f"remedy/{kind.name}", 0)
        self._calls[f"remedy/{kind.name}"] = call + 1
        stream = zlib.crc32(f"remedy/{kind.name}".encode()) & 0x7FFFFFFF
        return jax.random.fold_in(jax.random.fold_in(self._key, stream), call)

    def _disturb(self, index: int, slot: Slot, call: int, value: Any, label: str, context: dict) -> Any:
        kind = slot.kind
        missing = [name for name in kind.needs if name not in OFFERED and name not in context]
        if missing:
            raise ValueError(
                f"perturbation '{kind.name}' needs {', '.join(missing)} at site '{kind.site}', "
                "and the learner's tap there does not give it"
            )
        value = jax.tree.map(jnp.asarray, value)
        lane, key, step = self._lane, self._key, self.step
        assert lane is not None, "an audit passes a lane to its taps"
        assert key is not None, "an audit passes a key to its taps"
        site_paths = self._paths[kind.site]
        leaf_paths = paths_of(value, label)
        rows = np.array([site_paths.index(path) for path in leaf_paths], dtype=np.int32)

        def apply(value: Any, state: Any, magnitude: jax.Array, windows: Windows, selected: jax.Array) -> Any:
            alarm = jnp.zeros((), bool) if self._alarm is None else self._alarm
            available = {"selected": selected, "elapsed": windows.elapsed(step), "alarm": alarm, **context}
            needed = {name: available[name] for name in kind.needs}
            call_key = jax.random.fold_in(jax.random.fold_in(key, slot.stream), call)
            returned = kind.apply(call_key, value, magnitude, state, **needed)
            if not (isinstance(returned, tuple) and len(returned) == 2):
                raise ValueError(f"perturbation '{kind.name}' keeps a state, so its function returns (value, state)")
            _check_alike(f"perturbation '{kind.name}' returned a value", returned[0], value)
            _check_alike(f"perturbation '{kind.name}' returned a state", returned[1], state)
            return returned

        def disturbed(value: Any, state: Any) -> tuple[Any, Any]:
            magnitude = lane.magnitude[index]
            windows = jax.tree.map(lambda field: field[index], lane.windows)
            active = windows.open(step) & (magnitude != kind.neutral)
            selected = lane.targets[index][rows]
            changed, after = apply(value, state, magnitude, windows, selected)
            return _select(active & selected, changed, value), _where(active, after, state)

        def elementwise(value: Any, state: Any) -> bool:
            any_window = Windows(*4 * [jnp.int32(1)])
            return tracing.is_elementwise(apply, value, state, jnp.float32(1), any_window, jnp.ones(len(rows), bool))

        state = self._state(slot, label)
        if self._in_loop and not self._branch_in_loops and elementwise(value, state):
            value, after = disturbed(value, state)
        else:
            value, after = jax.lax.cond(
                self._idle[index] == 0, disturbed, lambda value, state: (value, state), value, state
            )
        if kind.keeps_state:
            assert self.states is not None, "the state was read above"
            self.states = {**self.states, slot.id: {**self.states[slot.id], label or ROOT: after}}
        return value

    def _state(self, slot: Slot, label: str) -> Any:
        if not slot.kind.keeps_state:
            return ()
        if self.states is None:
            raise ValueError(f"perturbation '{slot.kind.name}' {state_not_carried(slot.kind.site)}")
        return self.states[slot.id][label or ROOT]


def misplaced_tap(site: str, origin: Any, keeps_state: bool) -> str | None:
    """Returns why a perturbation cannot act at a tap in the current trace, or None if it can.

    A function that is traced once but runs several times would draw the same noise each time, and lose the state.

    Args:
      site: the site that is tapped.
      origin: the trace in which the taps were created.
      keeps_state: whether the perturbation is stateful.
    """
    transformations = tracing.transformations_since(origin)
    if loop := next((name for name in transformations if tracing.may_repeat(name)), None):
        alternative = ALTERNATIVES.get(loop, ALTERNATIVES["scan"])
        return f"cannot act at '{site}', which the learner taps inside {loop} with taps from outside; {alternative}"
    return state_lost(site, origin) if keeps_state else None


def state_lost(site: str, origin: Any) -> str | None:
    """Returns why a tap in the current trace would lose a state, or None if it keeps it.

    `origin` is the trace in which the taps were created.
    """
    transformations = tracing.transformations_since(origin)
    if not transformations:
        return None
    innermost = transformations[0]
    alternative = ", or with the taps of taps.cond" if innermost == "cond" else ""
    return f"keeps state, and the learner taps '{site}' inside {innermost}, which loses it; tap outside{alternative}"


ALTERNATIVES = {
    "scan": "write that loop with taps.scan",
    "vmap": "tap the whole batch outside, write a loop with taps.scan, or give each row taps.fold_in(its number)",
    "jit": "leave out the inner jit: a whole audit is compiled as one program, and loops are written with taps.scan",
}
"""For each transformation, what a learner can do instead of using taps from outside inside of it."""


def state_not_carried(site: str) -> str:
    """Returns why a stateful perturbation or remedy cannot act at a site that is tapped with taps of `fold_in`."""
    return (
        f"keeps state, and the learner taps '{site}' in a loop that does not carry it; write that loop with taps.scan"
    )


def reset_opening_states(
    states: States, slots: tuple[Slot, ...], windows: Windows, step: jax.Array, initial: States
) -> States:
    """Returns the states of one lane's perturbations, reset to `initial` in slots whose window opens at `step`."""
    opening = {slot.id: windows.opening(step)[index] for index, slot in enumerate(slots)}
    return {name: _where(opening[name], initial[name], state) for name, state in states.items()}


def _where(chosen: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(chosen, n, o).astype(jnp.asarray(o).dtype), new, old)


def _check_alike(what: str, new: Any, old: Any) -> None:
    """Raises ValueError if a tree has another structure or other shapes than the one that it replaces."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (new, old)]
    if structures[0] != structures[1]:
        raise ValueError(f"{what} of the structure {structures[0]} for one of {structures[1]}")
    for (path, leaf), old_leaf in zip(jax.tree_util.tree_leaves_with_path(new), jax.tree.leaves(old), strict=True):
        if jnp.shape(leaf) != jnp.shape(old_leaf):
            place = f" at {name}" if (name := jax.tree_util.keystr(path)) else ""
            raise ValueError(f"{what} of shape {jnp.shape(leaf)} for one of {jnp.shape(old_leaf)}{place}")


def _cast_like(new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.asarray(n).astype(jnp.asarray(o).dtype), new, old)


def _where_changed(chosen: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` if `chosen`, else `old`, in the dtypes of `old`; leaves that are the same object are returned."""

    def select(new: Any, old: Any) -> Any:
        if new is old:
            return old
        old = jnp.asarray(old)
        return jnp.where(chosen, jnp.asarray(new).astype(old.dtype), old)

    return jax.tree.map(select, new, old)


def _differs(new: Any, old: Any) -> jax.Array:
    """Returns 1 if any entry of two trees of the same structure differs, else 0, a float32 scalar. NaN equals NaN."""

    def leaf_differs(new: Any, old: Any) -> jax.Array:
        new, old = jnp.asarray(new), jnp.asarray(old)
        return jnp.any((new != old) & ~((new != new) & (old != old)))

    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    differences = [leaf_differs(n, o) for n, o in pairs if n is not o]
    return jnp.any(jnp.stack(differences)).astype(jnp.float32) if differences else jnp.float32(0)


def _select(chosen: jax.Array, new: Any, old: Any) -> Any:
    """Returns `new` at the paths that are `chosen` (bool `[paths]`), else `old`, in the dtypes of `old`."""

    def select(leaf_chosen: jax.Array, new: Any, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new)
        return jnp.where(leaf_chosen, new if new.dtype == old.dtype else new.astype(old.dtype), old)

    return jax.tree.map(select, spread_over_leaves(chosen, old), new, old)
