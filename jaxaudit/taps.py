"""Sites, and the object a step calls at each of them: `value = taps("gradient", value)`.

A learner names the places where something can go wrong; the audit decides, per lane and step, what goes wrong there.
Inside a program the kinds of perturbation are structure, and their magnitudes, windows and targets are data.
"""

from __future__ import annotations

import fnmatch
import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

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
      targets: for each kind, which leaves of its site's value it may touch: bool `[leaves]`.
    """

    magnitude: Any
    windows: Windows
    targets: tuple[Any, ...]


OFFERED = ("selected", "elapsed")
"""Context every tap offers: which leaves the target selects (bool `[leaves]`), and `Windows.elapsed`."""

Memory = dict[str, dict[str, Any]]
"""What stateful kinds remember in one lane, by the kind's id and the tap's label (ROOT where it has none)."""

ROOT = "value"


class Taps:
    """Callable handed to `Learner.step`: `taps(site, value)` returns the value, disturbed where this lane should be.

    Attributes:
      step: the current step, int32 scalar, the same for all lanes (so `lax.cond` on it stays a branch).
      steps: the number of steps of the whole run, or None outside an audit.
      memory: what the perturbations that keep state remember; each call at their site moves it on. None where it
        cannot be kept: in a loop that does not carry it (see `scan`).
    """

    def __init__(
        self,
        step: Any = 0,
        steps: int | None = None,
        *,
        kinds: tuple[Kind, ...] = (),
        paths: Mapping[str, tuple[str, ...]] | None = None,
        key: jax.Array | None = None,
        lane: Disturbance | None = None,
        any_open: Any = None,
        memory: Memory | None = None,
    ):
        self.memory = memory
        self.step = step
        self.steps = steps
        self._kinds = kinds
        self._paths = paths or {}
        self._key = key
        self._lane = lane
        self._any_open = any_open
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
            shapes = jax.eval_shape(lambda carry: body(Taps(self.step, self.steps), carry)[1], carry)
            return carry, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), memory

        carry, y, self.memory = jax.lax.cond(chosen, do, skip, carry, self.memory)
        return carry, y

    def _within(self, index: Any, memory: Memory | None) -> Taps:
        key = self._key if self._key is None else jax.random.fold_in(self._key, index)
        taps = Taps(
            self.step,
            self.steps,
            kinds=self._kinds,
            paths=self._paths,
            key=key,
            lane=self._lane,
            any_open=self._any_open,
            memory=memory,
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
            offered = {"selected": selected, "elapsed": windows.elapsed(step), **context}
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


def initial_memory(kinds: tuple[Kind, ...], sites: Sites) -> Memory:
    """What stateful kinds remember when their windows open, for one lane."""
    return {
        kind.id: {label or ROOT: kind.memory(value) for label, value in sites.values[kind.site].items()}
        for kind in kinds
        if kind.memory is not None
    }


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
    """Leaf i of `new` where `chosen[i]`, of `old` elsewhere, in old's dtypes."""
    old_leaves, structure = jax.tree.flatten(old)
    new_leaves = jax.tree.leaves(new)
    return jax.tree.unflatten(
        structure,
        [
            jnp.where(chosen[i], jnp.asarray(new).astype(old.dtype), old)
            for i, (new, old) in enumerate(zip(new_leaves, old_leaves, strict=True))
        ],
    )


def paths_of(value: Any, label: str = "") -> tuple[str, ...]:
    """The path of each leaf of a pytree, e.g. ("actor/Dense_0/kernel", ...), each begun with `label`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(value)
    return tuple("/".join(filter(None, (label, *map(_component, path)))) for path, _ in flat)


def _component(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def matches(target: str | None, path: str) -> bool:
    """Whether a leaf's path is in a target: components of `target` (globs) stand in a row somewhere in the path.

    "critic" matches "critic/Dense_0/kernel"; "Dense_*/kernel" matches the kernels of all dense layers.
    """
    if target is None:
        return True
    wanted, parts = target.split("/"), path.split("/")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(fnmatch.fnmatchcase(p, w) for p, w in zip(parts[s:], wanted, strict=False)) for s in starts)


@dataclass
class Recorder:
    """Taps that change nothing and note what passes: a learner's sites, their leaves and their context.

    Attributes:
      step, steps: as in `Taps`.
      paths: for every site, the paths of its leaves.
      context: for every site, the names of the context given at each of its taps.
      values: for every site, the shapes and dtypes seen, by label.
      loose: sites tapped in a loop that carries no memory.
      carried: whether this place can keep memory.
    """

    step: Any = 0
    steps: int | None = None
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


@functools.lru_cache(maxsize=64)
def find_sites(init: Callable, step: Callable, steps: int | None = None) -> Sites:
    """Traces one step abstractly (no computation) and returns the sites it taps."""
    recorder = Recorder(steps=steps)
    trace(init, step, recorder)
    return recorder.sites


def trace(init: Callable, step: Callable, recorder: Recorder) -> None:
    """Traces one step of a learner with `recorder` for its taps."""

    # The step index is an argument, as in the audit, so that a learner's arithmetic on it sees a traced int32.
    def traced(state, key, index):
        recorder.step = index
        return step(state, key, recorder)

    key = jax.random.key(0)
    jax.eval_shape(traced, jax.eval_shape(init, key), key, jnp.int32(0))
