"""Transforms of pytrees that several perturbations share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.moments import FIRST_MOMENT, SECOND_MOMENT
from jaxaudit.runtime.paths import Stack, paths_of

CANDIDATES = 8
"""Draws an adversary chooses from."""

DRAWN_AT_ONCE = 2**20
"""Entries of a tree from which on its leaves' randomness is drawn leaf by leaf."""


def scale(value: Any, factor: Any) -> Any:
    """Every leaf times `factor`."""
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
