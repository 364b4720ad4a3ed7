"""Transformations of pytrees that several perturbations use."""

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
"""The number of random draws among which an adversary chooses."""

JOINT_DRAW_LIMIT = 2**20
"""The number of entries of a tree from which on random numbers are drawn leaf by leaf."""


def scale(value: Any, factor: Any) -> Any:
    """Returns the tree with every leaf multiplied by `factor`."""
    return jax.tree.map(lambda x: x * factor, value)


def map_with_draws(
    change: Callable[[jax.Array, jax.Array], jax.Array],
    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array],
    key: jax.Array,
    value: Any,
) -> Any:
    """Returns `change(leaf, draws)` for every leaf, with independent random numbers `draw(key, leaf.shape)`.

    The leaves of a small tree share one draw, which compiles faster. The leaves of a large tree, which may be on
    several devices, have separate draws.
    """
    leaves, structure = jax.tree.flatten(value)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    sizes = [math.prod(shape) for shape in shapes]
    if len(leaves) > 1 and sum(sizes) < JOINT_DRAW_LIMIT:
        parts = jnp.split(draw(key, (sum(sizes),)), np.cumsum(sizes)[:-1])
        draws = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
    else:
        draws = [draw(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)]
    return jax.tree.unflatten(structure, list(map(change, leaves, draws)))


def map_tensors(change: Callable[[jax.Array], jax.Array], value: Any) -> Any:
    """Returns `change(tensor)` for every leaf, and for each layer of the leaves of a `Stack`."""

    def map_node(node: Any) -> Any:
        return jax.tree.map(jax.vmap(change) if isinstance(node, Stack) else change, node)

    return jax.tree.map(map_node, value, is_leaf=lambda x: isinstance(x, Stack))


def add_noise(key: jax.Array, value: Any, std: Any) -> Any:
    """Adds independent Gaussian noise of standard deviation `std` to every entry."""
    return map_with_draws(lambda x, noise: x + std * noise, jax.random.normal, key, value)


def flip_signs(key: jax.Array, value: Any, probability: Any) -> Any:
    """Inverts the sign of each entry with `probability`, independently."""
    return map_with_draws(lambda x, uniform: jnp.where(uniform < probability, -x, x), jax.random.uniform, key, value)


def drop(key: jax.Array, value: Any, probability: Any) -> Any:
    """Sets each entry to zero with `probability`, independently."""
    return map_with_draws(lambda x, uniform: jnp.where(uniform < probability, 0.0, x), jax.random.uniform, key, value)


def replace(key: jax.Array, value: jax.Array, probability: Any, other: Any) -> jax.Array:
    """Replaces each entry by the entry of `other`, an array of the same shape or a number, with `probability`."""
    return jnp.where(jax.random.bernoulli(key, probability, value.shape), other, value)


def mix(key: jax.Array, value: jax.Array, share: Any, other: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Replaces each row of `value` `[N, ...]` by that of `other(key)`, of the same shape, with probability `share`."""
    draw_key, other_key = jax.random.split(key)
    chosen = jax.random.bernoulli(draw_key, share, value.shape[:1])
    return jnp.where(broadcast_rows(chosen, value), other(other_key), value)


def towards(value: Any, other: Any, share: Any) -> Any:
    """Returns (1 - share) value + share other, for trees of the same structure."""

    def interpolate(old: jax.Array, new: jax.Array) -> jax.Array:
        # With a share of 1 the formula would keep NaN and infinity.
        return jnp.where(share >= 1.0, new, (1.0 - share) * old + share * new)

    return jax.tree.map(interpolate, value, other)


def round_to_bits(value: Any, bits: Any) -> Any:
    """Rounds every entry to `bits` bits, symmetric and uniform over each tensor's range."""
    levels = 2.0 ** (bits - 1.0) - 1.0

    def rounded(x: jax.Array) -> jax.Array:
        largest = jnp.max(jnp.abs(x))
        unit = jnp.where(largest > 0, largest, 1.0) / levels
        return jnp.round(x / unit) * unit

    return map_tensors(rounded, value)


def most_harmful_draw(
    key: jax.Array, value: jax.Array, radius: Any, harm: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Replaces each row of `value` `[N, ...]` by the most harmful of `CANDIDATES` uniform draws around it.

    The entries of a draw are at most `radius` away. A row stays the same if no draw has a larger `harm(value) -> [N]`.
    A harm of NaN counts as minus infinity.
    """
    offsets = radius * jax.random.uniform(key, (CANDIDATES, *value.shape), value.dtype, -1.0, 1.0)
    candidates = jnp.concatenate([value[None], value + offsets])
    harms = jax.vmap(harm)(candidates)
    worst = jnp.argmax(jnp.where(jnp.isnan(harms), -jnp.inf, harms), axis=0)
    return jnp.take_along_axis(candidates, broadcast_rows(worst, value)[None], axis=0)[0]


def broadcast_rows(rows: jax.Array, value: jax.Array) -> jax.Array:
    """Returns `rows` `[N]` in a shape that broadcasts against `value` `[N, ...]`."""
    return rows.reshape(rows.shape + (1,) * (value.ndim - rows.ndim))


def on_moments(names: tuple[str, ...], change: Callable[[Any], Any], value: Any) -> Any:
    """Returns an optimizer state whose moments with one of `names` are replaced by `change(list of their leaves)`.

    Raises ValueError if the state has no such moments.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(value)
    leaves = [leaf for _, leaf in flat]
    indices = [i for i, (path, _) in enumerate(flat) if _moment(path) in names]
    if not indices:
        raise ValueError(f"the optimizer state has no {' or '.join(names)}; its leaves: {', '.join(paths_of(value))}")
    for i, new in zip(indices, change([leaves[i] for i in indices]), strict=True):
        leaves[i] = new
    return jax.tree.unflatten(structure, leaves)


def _moment(path: tuple[Any, ...]) -> str | None:
    """Returns the name of the moment to which a leaf of an optimizer state belongs, or None.

    A network's layer may also be called "mu", so a field of the state takes precedence, and then the outermost name.
    """
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    keys = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    return next((name for name in (*fields, *keys) if name in FIRST_MOMENT + SECOND_MOMENT), None)


MAX_DELAY = 32
"""The largest delay of an observation or action, in env steps."""

MAX_REWARD_DELAY = 128
"""The largest delay of a reward, in env steps."""


@struct.dataclass
class HeldValue:
    """The state of `stick`: entries that stay at their row's first valid value.

    Attributes:
      value: the first valid values, `[N, ...]`.
      stuck: whether each entry is stuck, bool `[N, ...]`.
      known: whether each row has had a valid value, bool `[N]`.
    """

    value: Any
    stuck: Any
    known: Any


def no_held_values(value: Any) -> Any:
    """Returns the first state of `stick`, a `HeldValue` for each leaf of `value`."""
    return jax.tree.map(
        lambda x: HeldValue(jnp.zeros(x.shape, x.dtype), jnp.zeros(x.shape, bool), jnp.zeros(x.shape[:1], bool)), value
    )


def stick(key: jax.Array, value: Any, share: Any, state: Any, valid: jax.Array) -> tuple[Any, Any]:
    """Keeps a random `share` of the entries at their row's first `valid` value, at which they are drawn."""

    def stick_leaf(index: int, x: jax.Array, held: HeldValue) -> tuple[jax.Array, HeldValue]:
        first = broadcast_rows(valid & ~held.known, x)
        sticks = jax.random.bernoulli(jax.random.fold_in(key, index), share, x.shape)
        held = HeldValue(
            value=jnp.where(first, x, held.value),
            stuck=jnp.where(first, sticks, held.stuck),
            known=held.known | valid,
        )
        return jnp.where(held.stuck, held.value, x), held

    return _map_with_state(stick_leaf, value, state)


@struct.dataclass
class DelayLine:
    """The state of `delay`: a ring buffer of the latest values of each row.

    Attributes:
      values: the values, `[MAX_DELAY + 1, N, ...]`, with a row's i-th value at index i modulo the length.
      count: the number of the row's values since its episode began or the window opened, int32 `[N]`.
    """

    values: Any
    count: Any


def empty_delay_lines(value: Any) -> Any:
    """Returns the first state of `delay`, a `DelayLine` for each leaf of `value`."""
    return jax.tree.map(
        lambda x: DelayLine(jnp.zeros((MAX_DELAY + 1, *x.shape), x.dtype), jnp.zeros(x.shape[:1], jnp.int32)), value
    )


def delay(value: Any, steps: Any, state: Any, begins: jax.Array, valid: jax.Array) -> tuple[Any, Any]:
    """Returns each row's value of `steps` ago, or its first value since it `begins`; only `valid` rows are stored."""

    def delay_leaf(index: int, x: jax.Array, line: DelayLine) -> tuple[jax.Array, DelayLine]:
        length = line.values.shape[0]
        number = jnp.where(begins, 0, line.count)
        latest = _slots(length, x) == broadcast_rows(number % length, x)
        values = jnp.where(latest & broadcast_rows(valid, x), x, line.values)
        due = number - jnp.minimum(_to_steps(steps), number)
        late = jnp.take_along_axis(values, broadcast_rows(due % length, x)[None], axis=0)[0]
        return late, DelayLine(values, jnp.where(valid, number + 1, line.count))

    return _map_with_state(delay_leaf, value, state)


@struct.dataclass
class Due:
    """The state of `delay_rewards`: a ring buffer of rewards that have not been paid.

    Attributes:
      rewards: the rewards, `[MAX_REWARD_DELAY + 1, N]`, with that of step t at index t modulo the length; zero after it
        was paid.
      step: the number of steps so far, an int32 scalar.
    """

    rewards: Any
    step: Any


def no_pending_rewards(value: Any) -> Any:
    """Returns the first state of `delay_rewards`, a `Due` for each leaf of `value`."""
    return jax.tree.map(lambda x: Due(jnp.zeros((MAX_REWARD_DELAY + 1, *x.shape), x.dtype), jnp.int32(0)), value)


def delay_rewards(value: Any, steps: Any, state: Any, ends: jax.Array) -> tuple[Any, Any]:
    """Returns each row's reward of `steps` ago; where its episode `ends`, plus all of its pending rewards."""

    def delay_leaf(index: int, x: jax.Array, due: Due) -> tuple[jax.Array, Due]:
        length = due.rewards.shape[0]
        slots = _slots(length, x)
        rewards = jnp.where(slots == due.step % length, x, due.rewards)
        paid = (slots == (due.step - _to_steps(steps)) % length) | broadcast_rows(ends, x)
        arriving = jnp.where(paid, rewards, 0.0).sum(axis=0)
        return arriving, Due(jnp.where(paid, 0.0, rewards), due.step + 1)

    return _map_with_state(delay_leaf, value, state)


def _slots(length: int, value: jax.Array) -> jax.Array:
    """Returns the indices of a ring buffer's slots in a shape that broadcasts against a value, `[length, 1, ...]`."""
    return jnp.arange(length).reshape(length, *(1,) * value.ndim)


def _to_steps(steps: Any) -> jax.Array:
    return jnp.round(steps).astype(jnp.int32)


def _map_with_state(change: Callable[..., tuple[Any, Any]], value: Any, state: Any) -> tuple[Any, Any]:
    """Returns the trees of new leaves and new states from `change(index, leaf, state) -> (leaf, state)`."""
    structure: Any = jax.tree.structure(value)
    leaves = zip(jax.tree.leaves(value), structure.flatten_up_to(state), strict=True)
    pairs = [change(index, leaf, leaf_state) for index, (leaf, leaf_state) in enumerate(leaves)]
    new_value = jax.tree.unflatten(structure, [leaf for leaf, _ in pairs])
    return new_value, jax.tree.unflatten(structure, [leaf_state for _, leaf_state in pairs])
