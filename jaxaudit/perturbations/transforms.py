"""Transforms of pytrees that several perturbations share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxaudit.core.optimizer import FIRST_MOMENT, SECOND_MOMENT
from jaxaudit.runtime.paths import Stack, paths_of

CANDIDATES = 8
"""Draws an adversary chooses from."""

DRAWN_AT_ONCE = 2**20
"""Entries of a tree from which on its leaves' randomness is drawn leaf by leaf."""


def scale(value: Any, factor: Any) -> Any:
    """Returns the tree with every leaf multiplied by `factor`."""
    return jax.tree.map(lambda x: x * factor, value)


def map_drawn(
    change: Callable[[jax.Array, jax.Array], jax.Array],
    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    key: jax.Array,
    value: Any,
) -> Any:
    """`change(leaf, drawn)` for every leaf, with `draw(key, shape)` of the leaf's shape, independent of the others'.

    The leaves of a small tree share one draw, which takes a fraction of the time to compile; a large tree's leaves,
    which may lie on several devices, have each their own.
    """
    leaves, structure = jax.tree.flatten(value)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    sizes = [math.prod(shape) for shape in shapes]
    if len(leaves) > 1 and sum(sizes) < DRAWN_AT_ONCE:
        parts = jnp.split(draw(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
        drawn = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    else:
        drawn = [draw(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)]
    return jax.tree.unflatten(structure, list(map(change, leaves, drawn)))


def map_tensors(change: Callable[[jax.Array], jax.Array], value: Any) -> Any:
    """`change(tensor)` for every leaf, and for every layer's part of a `Stack`'s leaf."""

    def one(node: Any) -> Any:
        return jax.tree.map(jax.vmap(change) if isinstance(node, Stack) else change, node)

    return jax.tree.map(one, value, is_leaf=lambda x: isinstance(x, Stack))


def add_noise(key: jax.Array, value: Any, std: Any) -> Any:
    """Independent Gaussian noise of standard deviation `std` on every entry."""
    return map_drawn(lambda x, drawn: x + std * drawn, jax.random.normal, key, value)


def flip_signs(key: jax.Array, value: Any, probability: Any) -> Any:
    """Each entry's sign is inverted with `probability`, independently."""
    return map_drawn(lambda x, drawn: jnp.where(drawn < probability, -x, x), jax.random.uniform, key, value)


def drop(key: jax.Array, value: Any, probability: Any) -> Any:
    """Each entry is zero with `probability`, independently."""
    return map_drawn(lambda x, drawn: jnp.where(drawn < probability, 0.0, x), jax.random.uniform, key, value)


def replace(key: jax.Array, value: jax.Array, probability: Any, other: Any) -> jax.Array:
    """Each entry of `value` is that of `other`, an array like it or a number, with `probability`, independently."""
    return jnp.where(jax.random.bernoulli(key, probability, value.shape), other, value)


def mix(key: jax.Array, value: jax.Array, share: Any, other: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Each row of `value` `[N, ...]` is that of `other(key)`, of the same shape, with probability `share`."""
    draw_key, other_key = jax.random.split(key)
    chosen = jax.random.bernoulli(draw_key, share, value.shape[:1])
    return jnp.where(along(chosen, value), other(other_key), value)


def towards(value: Any, other: Any, share: Any) -> Any:
    """Every leaf a `share` of the way to that of `other`, a tree like it: (1 - share) value + share other."""

    def moved(old: jax.Array, new: jax.Array) -> jax.Array:
        # All the way heals what is not finite, which the formula would keep.
        return jnp.where(share >= 1.0, new, (1.0 - share) * old + share * new)

    return jax.tree.map(moved, value, other)


def round_to_bits(value: Any, bits: Any) -> Any:
    """Every entry rounded to `bits`, symmetric and uniform over each tensor's range."""
    levels = 2.0 ** (bits - 1.0) - 1.0

    def rounded(x: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(x))
        unit = jnp.where(largest > 0, largest, 1.0) / levels
        return jnp.round(x / unit) * unit

    return map_tensors(rounded, value)


def worst_draw(key: jax.Array, value: jax.Array, radius: Any, harm: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """For each row of `value` `[N, ...]` the most harmful of `CANDIDATES` draws from the cube around it.

    The cube's entries are within `radius`. A row stays as it is where no draw does more harm than it, by
    `harm(value) -> [N]`; a harm that is NaN counts as none.
    """
    offsets = radius * jax.random.uniform(key, (CANDIDATES, *value.shape), value.dtype, -1.0, 1.0)
    candidates = jnp.concatenate([value[None], value + offsets])
    harms = jax.vmap(harm)(candidates)
    worst = jnp.argmax(jnp.where(jnp.isnan(harms), -jnp.inf, harms), axis=0)
    return jnp.take_along_axis(candidates, along(worst, value)[None], axis=0)[0]


def along(rows: jax.Array, value: jax.Array) -> jax.Array:
    """`rows` `[N]` in a shape that broadcasts against `value` `[N, ...]`."""
    return rows.reshape(rows.shape + (1,) * (value.ndim - rows.ndim))


def on_moments(names: tuple[str, ...], change: Callable[[Any], Any], value: Any) -> Any:
    """`change(list of leaves)` on the leaves of an optimizer's moments called `names`, the others as they are.

    Raises ValueError if there are none.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(value)
    leaves = [leaf for _, leaf in flat]
    picked = [i for i, (path, _) in enumerate(flat) if _moment(path) in names]
    if not picked:
        raise ValueError(f"the optimizer state has no {' or '.join(names)}; its leaves: {', '.join(paths_of(value))}")
    for i, new in zip(picked, change([leaves[i] for i in picked]), strict=True):
        leaves[i] = new
    return jax.tree.unflatten(structure, leaves)


def _moment(path: tuple[Any, ...]) -> str | None:
    """The name of the moment that a leaf of an optimizer's state belongs to.

    A network's layer may be called "mu", too: what counts is the field of the state, or else the outermost name.
    """
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    return next((name for name in (*fields, *keys) if name in FIRST_MOMENT + SECOND_MOMENT), None)


MOST_STEPS = 32
"""The longest delay of an observation or action, in env steps."""

MOST_REWARD_STEPS = 128
"""The longest delay of a reward, in env steps."""


@struct.dataclass
class HeldValue:
    """Entries that stay at the value at which their row was first looked at.

    Attributes:
      value: `[N, ...]`, those values.
      stuck: bool `[N, ...]`, which entries stay.
      known: bool `[N]`, whether the row has been looked at.
    """

    value: Any
    stuck: Any
    known: Any


def nothing_held(value: Any) -> Any:
    """A `HeldValue` for each leaf of `value`, nothing looked at."""
    return jax.tree.map(
        lambda x: HeldValue(jnp.zeros(x.shape, x.dtype), jnp.zeros(x.shape, bool), jnp.zeros(x.shape[:1], bool)), value
    )


def stick(key: jax.Array, value: Any, share: Any, state: Any, valid: jax.Array) -> tuple[Any, Any]:
    """A random `share` of the entries, drawn at a row's first look, stays as it was then; rows not `valid` wait."""

    def one(index: int, x: jax.Array, held: HeldValue) -> tuple[jax.Array, HeldValue]:
        first = along(valid & ~held.known, x)
        drawn = jax.random.bernoulli(jax.random.fold_in(key, index), share, x.shape)
        held = HeldValue(
            value=jnp.where(first, x, held.value),
            stuck=jnp.where(first, drawn, held.stuck),
            known=held.known | valid,
        )
        return jnp.where(held.stuck, held.value, x), held

    return _map_with_state(one, value, state)


@struct.dataclass
class DelayLine:
    """The latest values of each row.

    Attributes:
      values: `[MOST_STEPS + 1, N, ...]`, a row's i-th value at i modulo the length.
      count: int32 `[N]`, the row's values since its episode began or the window opened.
    """

    values: Any
    count: Any


def empty_line(value: Any) -> Any:
    """A `DelayLine` for each leaf of `value`."""
    return jax.tree.map(
        lambda x: DelayLine(jnp.zeros((MOST_STEPS + 1, *x.shape), x.dtype), jnp.zeros(x.shape[:1], jnp.int32)), value
    )


def arrive_late(value: Any, steps: Any, state: Any, begins: jax.Array, valid: jax.Array) -> tuple[Any, Any]:
    """Each row's value of `steps` ago, or its first since it `begins`; rows not `valid` are not looked at."""

    def one(index: int, x: jax.Array, line: DelayLine) -> tuple[jax.Array, DelayLine]:
        length = line.values.shape[0]
        number = jnp.where(begins, 0, line.count)
        latest = _slots(length, x) == along(number % length, x)
        values = jnp.where(latest & along(valid, x), x, line.values)
        due = number - jnp.minimum(_whole(steps), number)
        late = jnp.take_along_axis(values, along(due % length, x)[None], axis=0)[0]
        return late, DelayLine(values, jnp.where(valid, number + 1, line.count))

    return _map_with_state(one, value, state)


@struct.dataclass
class Due:
    """Rewards not yet paid.

    Attributes:
      rewards: `[MOST_REWARD_STEPS + 1, N]`, that of step t at t modulo the length, zero once it is paid.
      step: int32, steps so far.
    """

    rewards: Any
    step: Any


def nothing_due(value: Any) -> Any:
    """A `Due` for each leaf of `value`."""
    return jax.tree.map(lambda x: Due(jnp.zeros((MOST_REWARD_STEPS + 1, *x.shape), x.dtype), jnp.int32(0)), value)


def pay_late(value: Any, steps: Any, state: Any, ends: jax.Array) -> tuple[Any, Any]:
    """Each row's reward of `steps` ago, and all that is still due where its episode `ends`."""

    def one(index: int, x: jax.Array, due: Due) -> tuple[jax.Array, Due]:
        length = due.rewards.shape[0]
        slots = _slots(length, x)
        rewards = jnp.where(slots == due.step % length, x, due.rewards)
        paid = (slots == (due.step - _whole(steps)) % length) | along(ends, x)
        arriving = jnp.where(paid, rewards, 0.0).sum(axis=0)
        return arriving, Due(jnp.where(paid, 0.0, rewards), due.step + 1)

    return _map_with_state(one, value, state)


def _slots(length: int, value: jax.Array) -> jax.Array:
    """The numbers of a ring's slots, `[length, 1, ...]`, to compare with a value's rows."""
    return jnp.arange(length).reshape(length, *(1,) * value.ndim)


def _whole(steps: Any) -> jax.Array:
    return jnp.round(steps).astype(jnp.int32)


def _map_with_state(change: Callable[..., tuple[Any, Any]], value: Any, state: Any) -> tuple[Any, Any]:
    """`change(index, leaf, its state) -> (leaf, state)` for every leaf."""
    indices = jax.tree.unflatten(jax.tree.structure(value), range(len(jax.tree.leaves(value))))
    pairs = jax.tree.map(change, indices, value, state)
    new, kept = (jax.tree.map(lambda _, pair, side=side: pair[side], value, pairs) for side in (0, 1))
    return new, kept
