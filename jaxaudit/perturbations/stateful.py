"""Transforms that keep a state: sensors and actuators that stick or lag, rewards that come late.

Values are environments side by side, leading axis `[N]`, of which each begins and ends its episodes in its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.perturbations.transforms import along

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
