"""Sites, and the object a step calls at each of them: `value = taps("gradient", value)`.

A learner names the places where something can go wrong; the audit decides, per lane and step, what goes wrong there.
Inside a program the kinds of perturbation are structure, and their magnitudes, windows and targets are data.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.paths import along_paths, paths_of

SITES = (
    "observation",
    "action",
    "reward",
    "dynamics",
    "tokens",
    "objective",
    "gradient",
    "clip_norm",
    "learning_rate",
    "optimizer_state",
    "params",
)
"""The standard sites; a learner may add its own."""

STATE = "state"
"""The site that every learner has: its whole state, before a step."""


@dataclass(frozen=True)
class Kind:
    """What a program must know of a perturbation before it is compiled.

    Attributes:
      name: identifies its random stream, with `occurrence`.
      site: where it acts.
      apply: `apply(key, value, magnitude, **context) -> value`, value's structure, shapes and dtypes kept; with a
        memory, `apply(key, value, magnitude, memory, **context) -> (value, memory)`.
      neutral: the magnitude that disturbs nothing; a lane at it is left untouched.
      needs: names of the context values `apply` takes from the tap's caller.
      occurrence: 0, or 1, 2, ... where one condition chains the same kind several times.
      memory: None, or `memory(value) -> pytree`, what the kind remembers when its window opens; only shapes and
        dtypes of `value` can be read.
    """

    name: str
    site: str
    apply: Callable[..., Any]
    neutral: float
    needs: tuple[str, ...] = ()
    occurrence: int = 0
    memory: Callable[[Any], Any] | None = None

    @property
    def id(self) -> str:
        """Tells this kind from every other kind of a program."""
        return f"{self.name}/{self.occurrence}"

    @property
    def stream(self) -> int:
        """A number that tells this kind's random stream from every other kind's, whatever else is in the grid."""
        return zlib.crc32(self.id.encode()) & 0x7FFFFFFF


@struct.dataclass
class Windows:
    """When a perturbation is open, in steps: `start <= t < stop`, and `(t - start) % period < length`.

    All fields are int32 arrays of one shape.
    """

    start: Any
    stop: Any
    period: Any
    length: Any

    def open(self, step: jax.Array) -> jax.Array:
        """Whether each window is open at `step` (scalar int): bool, the fields' shape."""
        since = step - self.start
        return (since >= 0) & (step < self.stop) & (since % self.period < self.length)

    def opening(self, step: jax.Array) -> jax.Array:
        """Whether each window is open at `step` and was not before."""
        return self.open(step) & ~self.open(step - 1)

    def elapsed(self, step: jax.Array) -> jax.Array:
        """The share of the span from start to stop that has passed when `step` is over: 1 at its last step."""
        return jnp.clip((step - self.start + 1) / jnp.maximum(self.stop - self.start, 1), 0.0, 1.0)


@struct.dataclass
class Disturbance:
    """What one lane does at each of the program's K kinds; with a leading axis, what each of L lanes does.

    Attributes:
      magnitude: float32 `[K]`.
      windows: fields `[K]`.
      targets: for each kind, which paths of its site's value it may touch: bool `[paths]`.
    """

    magnitude: Any
    windows: Windows
    targets: tuple[Any, ...]


OFFERED = ("selected", "elapsed", "alarm")
"""Context every tap offers: the paths the target selects (bool `[paths]`), `Windows.elapsed`, and the lane's alarm."""

Memory = dict[str, dict[str, Any]]
"""What stateful kinds remember in one lane, by the kind's id and the tap's label (ROOT where it has none)."""

ROOT = "value"


class Taps:
    """Callable handed to `Learner.step`: `taps(site, value)` returns the value, disturbed where this lane should be.

    Attributes:
      step: the current step, int32 scalar, the same for all lanes (so `lax.cond` on it stays a branch).
      steps: the number of steps of the whole run, or None outside an audit.
      data: the learner's `data`.
      memory: what the perturbations that keep state remember; each call at their site moves it on. None where it
        cannot be kept: in a loop that does not carry it (see `scan`).
    """

    def __init__(
        self,
        step: Any = 0,
        steps: int | None = None,
        *,
        data: Any = None,
        kinds: tuple[Kind, ...] = (),
        paths: Mapping[str, tuple[str, ...]] | None = None,
        key: jax.Array | None = None,
        lane: Disturbance | None = None,
        any_open: Any = None,
        memory: Memory | None = None,
        alarm: jax.Array | None = None,
    ):
        self.memory = memory
        self.step = step
        self.steps = steps
        self.data = data
        self._kinds = kinds
        self._paths = paths or {}
        self._key = key
        self._lane = lane
        self._any_open = any_open
        self._alarm = alarm
        self._calls: dict[str, int] = {}

    def __call__(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Passes `value` (any pytree) through the perturbations of `site`.

        `label` tells apart several values of one site (two optimizers' learning rates) and begins their paths.
        `context` is what some perturbations need beside the value, e.g. `schedule` at the learning rate.
        A closed window returns the value bit for bit.
        """
        call = self._calls.get(site, 0)
        self._calls[site] = call + 1
        for index, kind in enumerate(self._kinds):
            if kind.site == site:
                value = self._disturb(index, kind, call, value, label, context)
        return value

    def disturbs(self, site: str) -> bool:
        """Whether any lane is ever disturbed at `site`: a fact of the program, known while it is traced."""
        return any(kind.site == site for kind in self._kinds)

    def fold_in(self, index: Any) -> Taps:
        """The same taps with randomness of their own, for the body of a loop that knows its index.

        Perturbations that keep state refuse to act there; `scan` carries their state. An index used in two loops
        gives both the same randomness, and so do the turns of a `scan` that have its number.
        """
        return self._within(index, None)

    def scan(
        self, body: Callable[[Taps, Any, Any], tuple[Any, Any]], init: Any, xs: Any = None, length: int | None = None
    ) -> tuple[Any, Any]:
        """`jax.lax.scan` for `body(taps, carry, x) -> (carry, y)`, with taps of its own for each turn.

        What a perturbation remembers is carried from turn to turn.
        """

        def turn(state: tuple[Any, Memory | None], numbered: tuple[jax.Array, Any]):
            carry, memory = state
            index, x = numbered
            here = self._within(index, memory)
            carry, y = body(here, carry, x)
            calls.update(here._calls)
            return (carry, here.memory), y

        calls: dict[str, int] = {}
        (carry, self.memory), ys = jax.lax.scan(turn, (init, self.memory), _numbered(xs, length))
        self._calls |= calls  # the turns of another loop draw other randomness
        return carry, ys

    def cond(self, chosen: jax.Array, body: Callable[[Taps, Any], tuple[Any, Any]], carry: Any) -> tuple[Any, Any]:
        """`body(taps, carry) -> (carry, y)` where `chosen`, else the carry as it is and zeros; as `jax.lax.cond`.

        What a perturbation remembers is carried through either branch.
        """

        def do(carry: Any, memory: Memory | None) -> tuple[Any, Any, Memory | None]:
            self.memory = memory
            carry, y = body(self, carry)
            return carry, y, self.memory

        def skip(carry: Any, memory: Memory | None) -> tuple[Any, Any, Memory | None]:
            shapes = jax.eval_shape(lambda carry: body(Taps(self.step, self.steps, data=self.data), carry)[1], carry)
            return carry, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), memory

        carry, y, self.memory = jax.lax.cond(chosen, do, skip, carry, self.memory)
        return carry, y

    def _within(self, index: Any, memory: Memory | None) -> Taps:
        key = self._key if self._key is None else jax.random.fold_in(self._key, index)
        taps = Taps(
            self.step,
            self.steps,
            data=self.data,
            kinds=self._kinds,
            paths=self._paths,
            key=key,
            lane=self._lane,
            any_open=self._any_open,
            memory=memory,
            alarm=self._alarm,
        )
        taps._calls = dict(self._calls)
        return taps

    def _disturb(self, index: int, kind: Kind, call: int, value: Any, label: str, context: dict) -> Any:
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

        def disturbed(value: Any, memory: Any) -> tuple[Any, Any]:
            magnitude = lane.magnitude[index]
            windows = jax.tree.map(lambda field: field[index], lane.windows)
            active = windows.open(step) & (magnitude != kind.neutral)
            selected = lane.targets[index][rows]
            alarm = jnp.zeros((), bool) if self._alarm is None else self._alarm
            offered = {"selected": selected, "elapsed": windows.elapsed(step), "alarm": alarm, **context}
            given = {name: offered[name] for name in kind.needs}
            own = jax.random.fold_in(jax.random.fold_in(key, kind.stream), call)
            if kind.memory is None:
                changed, after = kind.apply(own, value, magnitude, **given), memory
            else:
                changed, after = kind.apply(own, value, magnitude, memory, **given)
            return _select(active & selected, changed, value), _where(active, after, memory)

        remembered = self._remembered(kind, label)
        value, remembered = jax.lax.cond(
            self._any_open[index], disturbed, lambda value, memory: (value, memory), value, remembered
        )
        if kind.memory is not None:
            assert self.memory is not None, "or it could not have been read"
            self.memory = {**self.memory, kind.id: {**self.memory[kind.id], label or ROOT: remembered}}
        return value

    def _remembered(self, kind: Kind, label: str) -> Any:
        if kind.memory is None:
            return None
        if self.memory is None:
            raise ValueError(
                f"perturbation '{kind.name}' keeps state, and the learner taps '{kind.site}' in a loop that does not "
                "carry it; write that loop with taps.scan"
            )
        return self.memory[kind.id][label or ROOT]


def forget(memory: Memory, kinds: tuple[Kind, ...], windows: Windows, step: jax.Array, initial: Memory) -> Memory:
    """The memory of one lane at the beginning of `step`: the initial one for kinds whose window opens there."""
    opening = {kind.id: windows.opening(step)[index] for index, kind in enumerate(kinds)}
    return {name: _where(opening[name], initial[name], kept) for name, kept in memory.items()}


def _where(chosen: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(chosen, n, o).astype(jnp.asarray(o).dtype), new, old)


def _numbered(xs: Any, length: int | None) -> tuple[jax.Array, Any]:
    """The `xs` of a scan with each turn's number before them."""
    if length is None:
        length = jax.tree.leaves(xs)[0].shape[0]
    return jnp.arange(length), xs


def _select(chosen: jax.Array, new: Any, old: Any) -> Any:
    """`new` at the paths that are `chosen`, `old` elsewhere, in old's dtypes."""

    def one(picked: jax.Array, new: Any, old: jax.Array) -> jax.Array:
        new = jnp.asarray(new)
        return jnp.where(picked, new if new.dtype == old.dtype else new.astype(old.dtype), old)

    return jax.tree.map(one, along_paths(chosen, old), new, old)
