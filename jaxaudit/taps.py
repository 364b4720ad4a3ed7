"""Sites, and the object a step calls at each of them: `value = taps("gradient", value)`.

A learner names the places where something can go wrong; the audit decides, per lane and step, what goes wrong there.
Inside a program the kinds of perturbation are structure, and their magnitudes, windows and targets are data.
"""

from __future__ import annotations

import fnmatch
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
      apply: `apply(key, value, magnitude, **context) -> value`, value's structure, shapes and dtypes kept.
      neutral: the magnitude that disturbs nothing; a lane at it is left untouched.
      needs: names of the context values `apply` takes from the tap's caller.
      occurrence: 0, or 1, 2, ... where one condition chains the same kind several times.
    """

    name: str
    site: str
    apply: Callable[..., Any]
    neutral: float
    needs: tuple[str, ...] = ()
    occurrence: int = 0

    @property
    def stream(self) -> int:
        """A number that tells this kind's random stream from every other kind's, whatever else is in the grid."""
        return zlib.crc32(f"{self.name}/{self.occurrence}".encode()) & 0x7FFFFFFF


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


class Taps:
    """Callable handed to `Learner.step`: `taps(site, value)` returns the value, disturbed where this lane should be.

    Attributes:
      step: the current step, int32 scalar, the same for all lanes (so `lax.cond` on it stays a branch).
      steps: the number of steps of the whole run, or None outside an audit.
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
    ):
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

    def fold_in(self, index: Any) -> Taps:
        """The same taps with randomness of their own: call it with the loop index inside an inner loop."""
        key = self._key if self._key is None else jax.random.fold_in(self._key, index)
        return Taps(
            self.step,
            self.steps,
            kinds=self._kinds,
            paths=self._paths,
            key=key,
            lane=self._lane,
            any_open=self._any_open,
        )

    def _disturb(self, index: int, kind: Kind, call: int, value: Any, label: str, context: dict) -> Any:
        missing = [name for name in kind.needs if name != "selected" and name not in context]
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

        def disturbed(value: Any) -> Any:
            magnitude = lane.magnitude[index]
            opened = jax.tree.map(lambda field: field[index], lane.windows).open(step)
            active = opened & (magnitude != kind.neutral)
            selected = lane.targets[index][rows]
            given = {name: selected if name == "selected" else context[name] for name in kind.needs}
            own = jax.random.fold_in(jax.random.fold_in(key, kind.stream), call)
            return _select(active & selected, kind.apply(own, value, magnitude, **given), value)

        return jax.lax.cond(self._any_open[index], disturbed, lambda value: value, value)


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
    """Taps that change nothing and note what passes: a learner's sites, their leaves and their context."""

    step: Any = 0
    steps: int | None = None
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)
    context: dict[str, set[str]] = field(default_factory=dict)

    def __call__(self, site: str, value: Any, *, label: str = "", **context: Any) -> Any:
        """Notes the site and returns the value."""
        seen = self.paths.get(site, ())
        self.paths[site] = seen + tuple(p for p in paths_of(value, label) if p not in seen)
        self.context[site] = self.context.get(site, set()) | set(context)
        return value

    def fold_in(self, index: Any) -> Recorder:
        """Itself: it has no randomness."""
        return self


@dataclass(frozen=True)
class Sites:
    """Where a learner can be disturbed: `paths[site]` are the leaves there, `context[site]` what the tap offers."""

    paths: Mapping[str, tuple[str, ...]]
    context: Mapping[str, frozenset[str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __contains__(self, site: str) -> bool:
        return site in self.paths


def find_sites(init: Callable, step: Callable, steps: int | None = None) -> Sites:
    """Traces one step abstractly (no computation) and returns the sites it taps."""
    recorder = Recorder(steps=steps)
    key = jax.random.key(0)
    state = jax.eval_shape(init, key)

    # The step index is an argument, as in the audit, so that a learner's arithmetic on it sees a traced int32.
    def traced(state, key, index):
        recorder.step = index
        return step(state, key, recorder)

    jax.eval_shape(traced, state, key, jnp.int32(0))
    return Sites(dict(recorder.paths), {site: frozenset(names) for site, names in recorder.context.items()})
