"""How lanes lie on devices: dealt out evenly and in order along one axis of a mesh, and each split along a second one.

The second axis is there where several devices share a lane, and is left to XLA's partitioner: a learner's functions are
of whole arrays, and say at a few places (`along`, `split`) how these lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "lanes"
"""The mesh's axis of lanes."""

MODEL = "model"
"""The mesh's axis of the devices that share a lane, where several do."""

EVERYWHERE = PartitionSpec()
"""The same on every device."""

LANES = PartitionSpec(AXIS)
"""Of arrays `[L, ...]`: each device has lanes of its own."""

ROWS = PartitionSpec(None, AXIS)
"""Of telemetry `[T, L, ...]`, likewise."""

EMPTY_ARGUMENTS_CRASH = jaxlib.version.__version_info__[:2] == (0, 11)
"""Whether XLA ends the process while it compiles a `jax.shard_map` that is given an array of size zero.

In jaxlib 0.11 a pass of its partitioner does, on any kind of device, and a constant that the function closes over is
given to it, too. 0.10 and 0.12 compile such a function.
"""

Partition = Callable[[str, tuple[int, ...]], tuple[str | None, ...]]
"""`partition(path, shape)`: for each axis of a lane's array "model", which is split, or None; () for a whole array."""


def mesh(devices: tuple[jax.Device, ...], model_devices: int = 1) -> Mesh:
    """The devices in a row, or in rows of those that share a lane."""
    if model_devices == 1:
        return Mesh(np.array(devices), (AXIS,))
    return Mesh(np.array(devices).reshape(-1, model_devices), (AXIS, MODEL))


def laid(devices: tuple[jax.Device, ...], spec: PartitionSpec, model_devices: int = 1) -> NamedSharding:
    """Where on the devices an array lies."""
    return NamedSharding(mesh(devices, model_devices), spec)


def on_devices(
    devices: tuple[jax.Device, ...], function: Callable, in_specs: Any, out_specs: Any, model_devices: int = 1
) -> Callable:
    """A function of lanes that each device runs for its own; that function itself where there is one device or none.

    Args:
      devices: of the mesh.
      function: what a device, or those that share a lane, do with their lanes, as if there were no others.
      in_specs, out_specs: of its arguments and results, as `jax.shard_map` takes them.
      model_devices: how many share a lane.
    """
    if len(devices) <= 1:
        return function
    across, manual = mesh(devices, model_devices), frozenset({AXIS})

    def dealt(function: Callable) -> Callable:
        return jax.shard_map(
            function, mesh=across, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
        )

    return _empty_made_inside(function, dealt, in_specs, across) if EMPTY_ARGUMENTS_CRASH else dealt(function)


def _empty_made_inside(
    function: Callable, dealt: Callable[[Callable], Callable], in_specs: Sequence[PartitionSpec], across: Mesh
) -> Callable:
    """`dealt(function)`, where each device makes arguments and constants of size zero for itself.

    They hold nothing to be given.
    """

    def empty(shape: Sequence[int], dtype: Any) -> jax.Array:
        return jax.lax.full(shape, 0, dtype)

    def own_part(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        over = [across.shape[axis] if axis else 1 for axis in (*spec, *(None,) * (x.ndim - len(spec)))]
        return empty([n // devices for n, devices in zip(x.shape, over, strict=True)], x.dtype)

    def call(*arguments: Any) -> Any:
        given = [jax.tree.map(lambda x: x if x.size else None, argument) for argument in arguments]

        def completed(*given: Any) -> Any:
            parts = [
                jax.tree.map(lambda x, part, spec=spec: part if x.size else own_part(x, spec), argument, part)
                for argument, part, spec in zip(arguments, given, in_specs, strict=True)
            ]
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*parts)
            constants = [x if np.size(x) else empty(x.shape, x.dtype) for x in traced.consts]
            found = jax.core.eval_jaxpr(traced.jaxpr, constants, *jax.tree.leaves(parts))
            return jax.tree.unflatten(jax.tree.structure(shapes), found)

        return dealt(completed)(*given)

    return call


def leaf_paths(tree: Any) -> list[str]:
    """The path of each leaf, one for all layers of a `Stack`: "h/layers/attention/kernel"."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in found]


def is_split() -> bool:
    """Whether what is traced now is a lane's that several devices share."""
    return MODEL in jax.sharding.get_abstract_mesh().axis_names


def along(x: jax.Array, *axes: str | None) -> jax.Array:
    """An array, laid out so where several devices share a lane: each axis `MODEL` or None."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes)) if is_split() else x


def split(tree: Any, partition: Partition, leading: int = 0) -> Any:
    """A tree laid out by a partition, but for some leading axes, where several devices share a lane."""
    if not is_split():
        return tree
    leaves, structure = jax.tree.flatten(tree)
    laid_out = [
        along(x, *(None,) * leading, *partition(path, x.shape[leading:])) if x.ndim > leading else x
        for path, x in zip(leaf_paths(tree), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, laid_out)
