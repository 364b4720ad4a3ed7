"""The names of a pytree's leaves, by which the targets of perturbations select them."""

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
    """Equal layers kept as one tree, as a scan over layers needs them: the leading axis of each leaf is the layer.

    Functions that name or select leaves treat the layers as separate: "h/3/attention/kernel". Gradients and moments of
    parameters with a `Stack` have one, too.

    Attributes:
      layers: the tree, with leaves `[layers, ...]`.
    """

    layers: Any


class Place(NamedTuple):
    """The place of an entry in a pytree.

    Attributes:
      path: the path of its leaf; in a `Stack`, the path of its layer's part of the leaf.
      layer: the path of its layer in a `Stack`, else "".
    """

    path: str
    layer: str


def paths_of(value: Any, label: str = "") -> tuple[str, ...]:
    """Returns the paths of a pytree's leaves, such as ("actor/Dense_0/kernel", ...), each prefixed with `label`.

    A leaf of a `Stack` has one path for each layer.
    """
    return tuple(place.path for places in places_of(value, label) for place in places)


def places_of(value: Any, label: str = "") -> list[tuple[Place, ...]]:
    """Returns the places of each leaf: one, or in a `Stack` one for each layer."""
    places: list[tuple[Place, ...]] = []
    for outer, node in jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: isinstance(x, Stack))[0]:
        path = (label, *map(_component, outer))
        if not isinstance(node, Stack):
            places.append((Place(_join(path), ""),))
            continue
        for inner, leaf in jax.tree_util.tree_flatten_with_path(node.layers)[0]:
            layers = [(*path, str(layer)) for layer in range(jnp.shape(leaf)[0])]
            places.append(tuple(Place(_join((*layer, *map(_component, inner))), _join(layer)) for layer in layers))
    return places


def groups_of(value: Any) -> tuple[str, ...]:
    """Returns the groups of a pytree's leaves: each layer of a `Stack`, and each other entry of the outermost tree."""
    return tuple(dict.fromkeys(_group(place) for places in places_of(value) for place in places))


def squares_by_group(value: Any) -> jax.Array:
    """Returns the sum of the squared entries of each group of a pytree's leaves, float32 `[groups]`.

    A group is one layer of a `Stack`, or another entry of the outermost tree. `groups_of` returns the groups' names in
    the same order.
    """
    groups = groups_of(value)
    total = jnp.zeros(len(groups))
    for leaf, places in zip(jax.tree.leaves(value), places_of(value), strict=True):
        squares = jnp.square(leaf.astype(jnp.float32))
        if is_split():  # flattened rows would have no axes along which devices can split them
            layers = squares if places[0].layer else squares[None]
            rows = jnp.sum(layers, axis=range(1, layers.ndim))
        else:
            rows = jnp.sum(squares.reshape(len(places), -1), axis=1)
        indices = jnp.array([groups.index(_group(place)) for place in places])  # each layer is a group of its own
        total = total.at[indices].add(rows, unique_indices=True)
    return total


def _group(place: Place) -> str:
    return place.layer or place.path.partition("/")[0]


def spread_over_leaves(values: jax.Array, tree: Any) -> Any:
    """Returns a tree like `tree` with the entries of `values` `[paths]`, which broadcast against the leaves of `tree`.

    An entry belongs to the path at the same index of `paths_of(tree)`.
    """
    leaves, structure = jax.tree.flatten(tree)
    spread, start = [], 0
    for leaf, places in zip(leaves, places_of(tree), strict=True):
        part = values[start : start + len(places)]
        spread.append(part.reshape(len(places), *(1,) * (jnp.ndim(leaf) - 1)) if places[0].layer else part[0])
        start += len(places)
    return jax.tree.unflatten(structure, spread)


def _join(components: Iterable[str]) -> str:
    return "/".join(filter(None, components))


def _component(key: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def matches(target: str | None, path: str) -> bool:
    """Returns whether a target selects a leaf's path; None selects all.

    The components of `target`, which are globs, must match consecutive components of the path. "critic" matches
    "critic/Dense_0/kernel", and "Dense_*/kernel" matches the kernels of all dense layers.
    """
    if target is None:
        return True
    patterns, parts = target.split("/"), path.split("/")
    starts = range(len(parts) - len(patterns) + 1)
    return any(all(fnmatch.fnmatchcase(p, w) for p, w in zip(parts[s:], patterns, strict=False)) for s in starts)
