"""Paths: the names of a pytree's leaves, by which targets pick them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.runtime.sharding import is_split


@struct.dataclass
class Stack:
    """Equal layers kept as one tree, as a scan over layers has them: each leaf's leading axis is the layer.

    Everything that names or picks leaves sees the layers one by one: "h/3/attention/kernel". A tree of parameters
    with a `Stack` in it gives gradients and moments with one, too.

    Attributes:
      layers: the tree, leaves `[layers, ...]`.
    """

    layers: Any


class Place(NamedTuple):
    """Where an entry of a pytree is.

    Attributes:
      path: of its leaf, or of its layer's part of a `Stack`'s leaf.
      layer: that layer's path, or "".
    """

    path: str
    layer: str


def paths_of(value: Any, label: str = "") -> tuple[str, ...]:
    """The paths of a pytree's leaves, e.g. ("actor/Dense_0/kernel", ...), each begun with `label`.

    A leaf of a `Stack` has one for each layer.
    """
    return tuple(place.path for places in places_of(value, label) for place in places)


def places_of(value: Any, label: str = "") -> list[tuple[Place, ...]]:
    """The places of each leaf: one, or one for each layer of a `Stack`."""
    found: list[tuple[Place, ...]] = []
    for outer, node in jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: isinstance(x, Stack))[0]:
        path = (label, *map(_component, outer))
        if not isinstance(node, Stack):
            found.append((Place(_joined(path), ""),))
            continue
        for inner, leaf in jax.tree_util.tree_flatten_with_path(node.layers)[0]:
            layers = [(*path, str(layer)) for layer in range(jnp.shape(leaf)[0])]
            found.append(tuple(Place(_joined((*layer, *map(_component, inner))), _joined(layer)) for layer in layers))
    return found


def groups_of(value: Any) -> tuple[str, ...]:
    """The groups of a pytree's leaves: each layer of a `Stack`, and each other entry of the outermost tree."""
    return tuple(dict.fromkeys(_group(place) for places in places_of(value) for place in places))


def squares_by_group(value: Any) -> jax.Array:
    """Sum of squares of each group's entries, float32 `[groups]`, in the order of `groups_of`."""
    groups = groups_of(value)
    total = jnp.zeros(len(groups))
    for leaf, places in zip(jax.tree.leaves(value), places_of(value), strict=True):
        squares = jnp.square(leaf.astype(jnp.float32))
        if is_split():  # flat rows have no axes to be split along
            apart = squares if places[0].layer else squares[None]
            rows = jnp.sum(apart, axis=range(1, apart.ndim))
        else:
            rows = jnp.sum(squares.reshape(len(places), -1), axis=1)
        own = jnp.array([groups.index(_group(place)) for place in places])  # a leaf's layers are of a group each
        total = total.at[own].add(rows, unique_indices=True)
    return total


def _group(place: Place) -> str:
    return place.layer or place.path.partition("/")[0]


def along_paths(values: jax.Array, tree: Any) -> Any:
    """Hands out `values` `[paths]`: a tree like `tree` whose leaves broadcast against its own."""
    leaves, structure = jax.tree.flatten(tree)
    handed, begin = [], 0
    for leaf, places in zip(leaves, places_of(tree), strict=True):
        own = values[begin : begin + len(places)]
        handed.append(own.reshape(len(places), *(1,) * (jnp.ndim(leaf) - 1)) if places[0].layer else own[0])
        begin += len(places)
    return jax.tree.unflatten(structure, handed)


def _joined(components: Iterable[str]) -> str:
    return "/".join(filter(None, components))


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
