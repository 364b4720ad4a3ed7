"""Sites, and the object a step calls at each of them: `value = taps("gradient", value)`.

A learner names the places where something can go wrong; the audit decides, per lane and step, what goes wrong there.
Inside a program kinds of perturbation, each in a slot, are structure; their magnitudes, windows and targets are data.
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
"""The standard sites, those from the difficulty on of dialogues; a learner may add its own."""

PERSISTENT_SITES = {
    "params": "what is trained: a change stays, and is trained on from; the standard kinds act once",
    "optimizer_state": "what it is trained with: a change stays, until the moments have forgotten it",
    "reference": "the policy that divergence is measured from: moved once, or further at every step of the window",
}
"""Standard sites whose value a learner keeps from step to step, so that a change there outlasts its window.

At all others a disturbance ends with its window: what is tapped is a copy (of the behaviour policy or the reward model,
whose parameters are part of a dialogue learner's state), is made anew in each step, or is a setting.
"""

ACTING_SITES = ("observation", "action", "dynamics")
"""Sites at which a disturbance touches how a learner fares at once, whether it has got worse or not."""

STATE = "state"
"""The site that every learner has: its whole state before a step, but for what is `Lasting` in it."""


@dataclass(frozen=True)
class Slot:
    """A place in a program where perturbations of one kind act.

    Attributes:
      kind: of perturbation.
      occurrence: 0, or 1, 2, ... where one condition chains the same kind several times.
      copy: 0, or 1, 2, ... where chains have it in different orders among the kinds of its site.
      most: the largest magnitude of the grid, for kinds whose state depends on it.
    """

    kind: Kind
    occurrence: int = 0
    copy: int = 0
    most: float | None = None

    @property
    def id(self) -> str:
        """Tells this slot from every other one of a program."""
        return f"{self.kind.name}/{self.occurrence}/{self.copy}"

    @property
    def stream(self) -> int:
        """A number that tells this kind's random stream from every other kind's, whatever else is in the grid."""
        return zlib.crc32(f"{self.kind.name}/{self.occurrence}".encode()) & 0x7FFFFFFF

    def init(self, value: Any) -> Any:
        """The state, for values like this one, when the window opens."""
        return self.kind.init(value, self.most) if self.kind.sized else self.kind.init(value)


NEVER = 2**30
"""Steps since a window was open that has not been."""


@struct.dataclass
class Windows:
    """When a perturbation is open, in steps: `start <= t < stop`, and `(t - start) % period < length`.

    All fields are int32 arrays of one shape.
    """

    start: Any
    stop: Any
    period: Any
    length: Any

    def idle(self, step: jax.Array) -> jax.Array:
        """Steps since each window was last open: 0 where it is open at `step` (scalar int), `NEVER` if it was not."""
        since = jnp.minimum(step, self.stop - 1) - self.start
        latest = since - jnp.maximum(since % self.period - (self.length - 1), 0)
        return jnp.where((since >= 0) & (self.length > 0), step - self.start - latest, NEVER)

    def open(self, step: jax.Array) -> jax.Array:
        """Whether each window is open at `step`: bool, the fields' shape."""
        return self.idle(step) == 0

    def opening(self, step: jax.Array) -> jax.Array:
        """Whether each window is open at `step` and was not before."""
        return self.open(step) & ~self.open(step - 1)

    def elapsed(self, step: jax.Array) -> jax.Array:
        """The share of the span from start to stop that has passed when `step` is over: 1 at its last step."""
        return jnp.clip((step - self.start + 1) / jnp.maximum(self.stop - self.start, 1), 0.0, 1.0)


@struct.dataclass
class Disturbance:
    """What one lane does in each of the program's K slots; with a leading axis, what each of L lanes does.

    Attributes:
      magnitude: float32 `[K]`.
      windows: fields `[K]`.
      targets: for each slot, which paths of its site's value it may touch: bool `[paths]`.
    """

    magnitude: Any
    windows: Windows
    targets: tuple[Any, ...]


OFFERED = ("selected", "elapsed", "alarm")
"""Context every tap offers: the paths the target selects (bool `[paths]`), `Windows.elapsed`, and the lane's alarm."""

REMEDY_OFFERED = ("minibatch", "progress", "key")
"""Context every tap offers to remedies.

"minibatch", int32, is the number of the value's turn in this step: of the loops of `Taps.scan` and `Taps.repeat` around
it, counted from 0 through all of them. "progress" is the share of the run that is over after this step, 1 outside of
runs, and "key" is a random key.
"""

States = dict[str, dict[str, Any]]
"""Of one lane's perturbations that keep state, by the slot's id and the tap's label (ROOT where it has none).

Likewise of its remedies, by the remedy's name and the label.
"""

ROOT = "value"


def numbers_of(value: Any) -> Any:
    """A pytree with None for its random keys and functions, which nothing can disturb; itself if it has none."""
    if all(map(_is_number, jax.tree.leaves(value))):
        return value
    return jax.tree.map(lambda x: x if _is_number(x) else None, value)


def with_numbers(value: Any, numbers: Any) -> Any:
    """A pytree with the numbers that another has, which was made from its `numbers_of`."""
    return jax.tree.map(lambda x, y: y if _is_number(x) else x, value, numbers)


def _is_number(x: Any) -> bool:
    if hasattr(x, "dtype"):
        return not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return not callable(x)


Counts = dict[str, jax.Array]
"""By a remedy's name, float32 `[2]`: how often it changed a value in this step, and how often it was applied."""

Kept = tuple[States | None, States | None, Counts | None]
"""The states of perturbations and of remedies, and the remedies' counts; None where they cannot be kept."""


class Taps:
    """What a learner's `step` calls at its sites: `taps(site, value)` returns the value, disturbed in disturbed lanes.

    Taps belong to the trace in which they were made. A loop, a batch or a branch inside a step needs taps of its own,
    which `scan`, `repeat`, `cond` and `fold_in` make. Under `jax.grad` and `jax.checkpoint` the step's taps can be
    used, unless a perturbation of the site keeps a state.

    A perturbation is computed only while its window is open in some lane, in a branch of `jax.lax.cond`. On a GPU the
    host decides each branch inside a loop, which takes time. Where `branch_in_loops` is false, perturbations that are
    computed entry by entry are therefore computed in every turn of a loop, and selected.

    Attributes:
      step: the current step, an int32 scalar that is the same in all lanes, so that `lax.cond` on it stays a branch.
      steps: the number of steps of the run, or None outside of an audit.
      data: the learner's `data`.
      states: the states of perturbations that keep one. Each call at their site advances them. None where they cannot
        be kept: in a loop that does not carry them (see `scan`).
      remedy_states: the states of remedies that keep one, likewise.
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
        self._turns: tuple[tuple[Any, Any], ...] = ()
        self._calls: dict[str, int] = {}
        self._home = tracing.current_trace()

    def __call__(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Passes `value` (any pytree) through the perturbations of `site`.

        `label` tells apart several values of one site (two optimizers' learning rates) and begins their paths.
        `context` is what some perturbations need beside the value, e.g. `schedule` at the learning rate.
        A closed window returns the value bit for bit, and random keys and functions in it are always what they were.
        """
        return self.disturb(site, self.remedy(site, value, label=label, **context), label=label, **context)

    def disturb(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Passes `value` through the perturbations of `site` alone: `taps(site, value)` is this after `remedy`."""
        call = self._calls.get(site, 0)
        self._calls[site] = call + 1
        for index, slot in enumerate(self._slots):
            if slot.kind.site == site:
                if reason := misplaced(site, self._home, slot.kind.keeps_state):
                    raise ValueError(f"perturbation '{slot.kind.name}' {reason}")
                bare = value if site == STATE else numbers_of(value)
                disturbed = self._disturb(index, slot, call, bare, label, context)
                value = disturbed if bare is value else with_numbers(value, disturbed)
        return value

    def remedy(self, place: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Passes `value`, any pytree, through the remedies of a site or hook, in their order, and through no
        perturbation.

        `label` and `context` are those of a tap. The value is unchanged, bit for bit, where a remedy has its neutral
        strength.
        """
        for kind, strength in self._remedies:
            if kind.site == place:
                value = self._apply_remedy(kind, strength, value, label, context)
        return value

    def helps(self, *places: str) -> bool:
        """Returns whether any remedy acts at one of some sites or hooks; known when the program is traced."""
        return any(kind.site in places for kind, _ in self._remedies)

    def acts(self, *sites: str) -> bool:
        """Returns whether any perturbation or remedy acts at one of some sites; known when the program is traced."""
        return self.disturbs(*sites) or self.helps(*sites)

    def with_remedies(
        self, remedies: tuple[tuple[RemedyKind, jax.Array], ...], states: States, data: Any, counted: Iterable[str] = ()
    ) -> Taps:
        """Returns these taps with further remedies, which act after those there are, and with other data.

        `remedies` are kinds and strengths, `states` the states of those that keep one, and `counted` the names of those
        whose actions can be counted.
        """
        taps = copy.copy(self)
        taps._remedies = (*self._remedies, *remedies)
        taps.remedy_states = {**(self.remedy_states or {}), **states}
        taps.remedy_counts = {**(self.remedy_counts or {}), **{name: jnp.zeros(2) for name in counted}}
        taps.data = data
        return taps

    def take_back(self, taps: Taps) -> tuple[States, Counts]:
        """Continues after a step that was made with taps which `with_remedies` returned.

        Returns the states and the counts of the remedies that `with_remedies` added.
        """
        assert taps.remedy_states is not None, "with_remedies gives it"
        assert taps.remedy_counts is not None, "likewise"
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
        """Taps that disturb nothing, to measure with: what is read through them is the learner's own."""
        return Taps(self.step, self.steps, data=self.data)

    def disturbs(self, *sites: str) -> bool:
        """Returns whether any lane is ever disturbed at one of some sites; known when the program is traced."""
        return any(slot.kind.site in sites for slot in self._slots)

    def disturbed(self, *sites: str) -> jax.Array:
        """Returns whether this lane is disturbed at one of some sites in this step, a bool scalar."""
        if self._lane is None:
            return jnp.zeros((), bool)
        neutral = np.array([slot.kind.neutral for slot in self._slots], np.float32)
        active = self._lane.windows.open(self.step) & (self._lane.magnitude != neutral)
        return jnp.any(active & np.array([slot.kind.site in sites for slot in self._slots], bool))

    def idle(self, *sites: str) -> jax.Array:
        """Returns how many steps ago a window at one of some sites was last open, in any lane of the program.

        It is an int32 scalar: 0 where a window is open, `NEVER` where none was. It is not batched, so that `lax.cond`
        on it stays a branch.
        """
        counted = [self._idle[index] for index, slot in enumerate(self._slots) if slot.kind.site in sites]
        return jnp.min(jnp.stack(counted)) if counted else jnp.int32(NEVER)

    def fold_in(self, index: Any) -> Taps:
        """Returns the same taps with their own randomness, for the body of a loop that knows its index.

        Perturbations that keep a state refuse to act there; `scan` carries their states. Two loops that use the same
        index get the same randomness, and so do the turns of a `scan` of that number.
        """
        return self._within(index, (None, None, None))

    def scan(
        self, body: Callable[[Taps, Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None
    ) -> tuple[Any, Any]:
        """Does as `jax.lax.scan` for `body(taps, carry, x) -> (carry, y)`; each turn has its own taps.

        The states of perturbations and remedies are carried from turn to turn.
        """

        def turn(carried: tuple[Any, Kept], numbered: tuple[jax.Array, Any]):
            carry, kept = carried
            index, x = numbered
            here = self._within(index, kept)
            here._turns = (*self._turns, (index, turns))
            carry, y = body(here, carry, x)
            calls.update(here._calls)
            return (carry, here._kept), y

        calls: dict[str, int] = {}
        turns = jax.tree.leaves(xs)[0].shape[0] if length is None else length
        (carry, self._kept), ys = jax.lax.scan(turn, (init, self._kept), (jnp.arange(turns), xs))
        self._calls |= calls  # the turns of another loop draw other randomness
        return carry, ys

    def repeat(
        self,
        body: Callable[[Taps, Any, jax.Array], Any],
        init: Any,
        times: Any,
        until: Callable[[Any], jax.Array] | None = None,
    ) -> Any:
        """Calls `body(taps, carry, number) -> carry` for the numbers from 0 to `times` - 1; each turn has its own taps.

        `times`, an int scalar, may be traced, as in `jax.lax.while_loop`; there is no gradient through the loop then.
        The states of perturbations and remedies are carried from turn to turn.

        `until(carry)`, a bool scalar, says that further turns would change nothing. They are left out, unless a
        perturbation keeps a state, which may count them. Under `vmap` it should not be batched
        (`jaxaudit.models.sampling.all_finished` is not), or every turn copies the carry.
        """

        def turn(number: jax.Array, carried: tuple[Any, Kept]) -> tuple[Any, Kept]:
            before, kept = carried
            here = self._within(number, kept)
            here._turns = (*self._turns, (number, times))
            carry = body(here, before, number)
            calls.update(here._calls)
            if until is not None and (
                here.remedy_states or here.remedy_counts
            ):  # the turns that others leave out are no turns to remedies
                over = until(before)
                here.remedy_states = _where(over, kept[1], here.remedy_states)
                here.remedy_counts = _where(over, kept[2], here.remedy_counts)
            return carry, here._kept

        calls: dict[str, int] = {}
        if until is None or self.states:
            carry, self._kept = jax.lax.fori_loop(0, times, turn, (init, self._kept))
        else:
            _, (carry, self._kept) = jax.lax.while_loop(
                lambda loop: (loop[0] < times) & ~until(loop[1][0]),
                lambda loop: (loop[0] + 1, turn(*loop)),
                (jnp.int32(0), (init, self._kept)),
            )
        self._calls |= calls
        return carry

    def cond(self, chosen: jax.Array, body: Callable[[Taps, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
        """Returns `body(taps, carry) -> (carry, y)` where `chosen`, and otherwise the carry and zeros; as
        `jax.lax.cond`.

        The states of perturbations and remedies are carried through both branches.
        """

        def do(carry: Any, kept: Kept) -> tuple[Any, Any, Kept]:
            here = self._here(self._key, kept)
            carry, y = body(here, carry)
            calls.update(here._calls)
            return carry, y, here._kept

        def skip(carry: Any, kept: Kept) -> tuple[Any, Any, Kept]:
            shapes = jax.eval_shape(lambda carry: body(self.closed, carry)[1], carry)
            return carry, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), kept

        calls: dict[str, int] = {}
        carry, y, self._kept = jax.lax.cond(chosen, do, skip, carry, self._kept)
        self._calls |= calls
        return carry, y

    @property
    def _kept(self) -> Kept:
        """The states of perturbations and remedies, and the counts, which loops and branches carry."""
        return self.states, self.remedy_states, self.remedy_counts

    @_kept.setter
    def _kept(self, kept: Kept) -> None:
        self.states, self.remedy_states, self.remedy_counts = kept

    def _within(self, index: Any, kept: Kept) -> Taps:
        taps = self._here(self._key if self._key is None else jax.random.fold_in(self._key, index), kept)
        taps._in_loop = True
        return taps

    def _here(self, key: jax.Array | None, kept: Kept) -> Taps:
        """The same taps at the place where this is called."""
        taps = copy.copy(self)
        taps._key, taps._kept, taps._calls, taps._home = key, kept, dict(self._calls), tracing.current_trace()
        return taps

    def _apply_remedy(self, kind: RemedyKind, strength: jax.Array, value: Any, label: str, context: dict) -> Any:
        if missing := [name for name in kind.needs if name not in REMEDY_OFFERED and name not in context]:
            raise ValueError(
                f"remedy '{kind.name}' needs {', '.join(missing)} at '{kind.site}', and the learner does not give it"
            )
        offered = dict(context)
        if "minibatch" in kind.needs:
            offered["minibatch"] = functools.reduce(lambda n, turn: n * turn[1] + turn[0], self._turns, jnp.int32(0))
        if "progress" in kind.needs:
            offered["progress"] = (jnp.asarray(self.step, jnp.float32) + 1) / self.steps if self.steps else 1.0
        if "key" in kind.needs:
            offered["key"] = self._remedy_key(kind)
        state: Any = ()
        if kind.keeps_state:
            if reason := lost_state(kind.site, self._home):
                raise ValueError(f"remedy '{kind.name}' {reason}")
            if self.remedy_states is None:
                raise ValueError(f"remedy '{kind.name}' {loose(kind.site)}")
            state = self.remedy_states[kind.name][label or ROOT]
        assert kind.apply is not None, "it is at a site"
        changed, after = kind.apply(value, strength, state, **{name: offered[name] for name in kind.needs})
        if kind.keeps_state:
            assert self.remedy_states is not None, "or its state could not have been read"
            own = {**self.remedy_states[kind.name], label or ROOT: _as(after, state)}
            self.remedy_states = {**self.remedy_states, kind.name: own}
        acts = jnp.asarray(strength != kind.neutral)
        after_remedy = _unless_same(acts, changed, value)
        counts = self.remedy_counts
        if counts is not None and kind.name in counts and lost_state(kind.site, self._home) is None:
            count = counts[kind.name] + jnp.stack([jnp.where(acts, _differs(after_remedy, value), 0.0), 1.0])
            self.remedy_counts = {**counts, kind.name: count}
        return after_remedy

    def _remedy_key(self, kind: RemedyKind) -> jax.Array:
        if self._key is None:
            raise ValueError(f"remedy '{kind.name}' draws randomness, which taps without a key have none of")
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
        assert lane is not None, "an audit gives its taps a lane"
        assert key is not None, "and a key"
        known = self._paths[kind.site]
        leaf_paths = paths_of(value, label)
        rows = np.array([known.index(path) for path in leaf_paths], dtype=np.int32)

        def apply(value: Any, state: Any, magnitude: jax.Array, windows: Windows, selected: jax.Array) -> Any:
            alarm = jnp.zeros((), bool) if self._alarm is None else self._alarm
            offered = {"selected": selected, "elapsed": windows.elapsed(step), "alarm": alarm, **context}
            given = {name: offered[name] for name in kind.needs}
            own = jax.random.fold_in(jax.random.fold_in(key, slot.stream), call)
            return kind.apply(own, value, magnitude, state, **given)

        def disturbed(value: Any, state: Any) -> tuple[Any, Any]:
            magnitude = lane.magnitude[index]
            windows = jax.tree.map(lambda field: field[index], lane.windows)
            active = windows.open(step) & (magnitude != kind.neutral)
            selected = lane.targets[index][rows]
            changed, after = apply(value, state, magnitude, windows, selected)
            return _select(active & selected, changed, value), _where(active, after, state)

        def elementwise(value: Any, state: Any) -> bool:
            always = Windows(*4 * [jnp.int32(1)])
            return tracing.is_elementwise(apply, value, state, jnp.float32(1), always, jnp.ones(len(rows), bool))

        state = self._state(slot, label)
        if self._in_loop and not self._branch_in_loops and elementwise(value, state):
            value, after = disturbed(value, state)
        else:
            value, after = jax.lax.cond(
                self._idle[index] == 0, disturbed, lambda value, state: (value, state), value, state
            )
        if kind.keeps_state:
            assert self.states is not None, "or it could not have been read"
            self.states = {**self.states, slot.id: {**self.states[slot.id], label or ROOT: after}}
        return value

    def _state(self, slot: Slot, label: str) -> Any:
        if not slot.kind.keeps_state:
            return ()
        if self.states is None:
            raise ValueError(f"perturbation '{slot.kind.name}' {loose(slot.kind.site)}")
        return self.states[slot.id][label or ROOT]


def misplaced(site: str, home: Any, keeps_state: bool) -> str | None:
    """Returns what to say of a perturbation at a tap called here whose taps were made at `home`, if it fails there; or
    None.

    Where a body runs several times, all turns would draw the same noise; and a state would be lost.
    """
    around = tracing.transformations_since(home)
    if loop := next((name for name in around if tracing.may_repeat(name)), None):
        instead = INSIDE.get(loop, INSIDE["scan"])
        return f"cannot act at '{site}', which the learner taps inside {loop} with taps from outside; {instead}"
    return lost_state(site, home) if keeps_state else None


def lost_state(site: str, home: Any) -> str | None:
    """Returns what to say of a state that is kept at a tap called here whose taps were made at `home`; or None."""
    around = tracing.transformations_since(home)
    if not around:
        return None
    instead = ", or with the taps of taps.cond" if around[0] == "cond" else ""
    return f"keeps state, and the learner taps '{site}' inside {around[0]}, which loses it; tap outside{instead}"


INSIDE = {
    "scan": "write that loop with taps.scan",
    "vmap": "tap the whole batch outside, write a loop with taps.scan, or give each row taps.fold_in(its number)",
    "jit": "leave out the inner jit: a whole audit is compiled as one program, and loops are written with taps.scan",
}
"""What to do instead."""


def loose(site: str) -> str:
    """What to say of a perturbation that keeps state, at a site tapped where none can be kept."""
    return (
        f"keeps state, and the learner taps '{site}' in a loop that does not carry it; write that loop with taps.scan"
    )


def forget(states: States, slots: tuple[Slot, ...], windows: Windows, step: jax.Array, initial: States) -> States:
    """The states of one lane at the beginning of `step`: the initial ones for slots whose window opens there."""
    opening = {slot.id: windows.opening(step)[index] for index, slot in enumerate(slots)}
    return {name: _where(opening[name], initial[name], kept) for name, kept in states.items()}


def _where(chosen: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(chosen, n, o).astype(jnp.asarray(o).dtype), new, old)


def _as(new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.asarray(n).astype(jnp.asarray(o).dtype), new, old)


def _unless_same(chosen: jax.Array, new: Any, old: Any) -> Any:
    """`new` where `chosen`, else `old`, in old's dtypes; a leaf that is the same in both is not selected."""

    def one(new: Any, old: Any) -> Any:
        if new is old:
            return old
        old = jnp.asarray(old)
        return jnp.where(chosen, jnp.asarray(new).astype(old.dtype), old)

    return jax.tree.map(one, new, old)


def _differs(new: Any, old: Any) -> jax.Array:
    """1 if any entry of two trees of the same structure differs, else 0: float32 scalar. NaN equals NaN."""

    def one(new: Any, old: Any) -> jax.Array:
        new, old = jnp.asarray(new), jnp.asarray(old)
        return jnp.any((new != old) & ~((new != new) & (old != old)))

    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
    found = [one(n, o) for n, o in pairs if n is not o]
    return jnp.any(jnp.stack(found)).astype(jnp.float32) if found else jnp.float32(0)


def _select(chosen: jax.Array, new: Any, old: Any) -> Any:
    """`new` at the paths that are `chosen`, `old` elsewhere, in old's dtypes."""

    def one(picked: jax.Array, new: Any, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new)
        return jnp.where(picked, new if new.dtype == old.dtype else new.astype(old.dtype), old)

    return jax.tree.map(one, spread_over_leaves(chosen, old), new, old)
