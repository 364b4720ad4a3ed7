"""How arrays are sharded over devices: lanes along one axis of a device mesh, and each lane along a second one.

Lanes are divided evenly and in order. The second axis exists where several devices share a lane, and is left to XLA's
partitioner: the functions of a learner see whole arrays, and constrain the layout of a few (`constrain`,
`constrain_tree`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.sharding import Mesh, PartitionSpec

LANE_AXIS = "lanes"
"""The mesh axis along which lanes are divided."""

MODEL_AXIS = "model"
"""The mesh axis of the devices that share a lane, where several do."""

REPLICATED = PartitionSpec()
"""The sharding of an array that every device has whole."""

LANES = PartitionSpec(LANE_AXIS)
"""The sharding of arrays `[L, ...]`, whose first axis is the lane."""

ROWS = PartitionSpec(None, LANE_AXIS)
"""The sharding of telemetry `[T, L, ...]`."""

EMPTY_ARGUMENTS_CRASH = jaxlib.version.__version_info__[:2] == (0, 11)
"""Whether XLA crashes while it compiles a `jax.shard_map` with an argument or a captured constant of size zero.

A pass of its partitioner does in jaxlib 0.11, on any kind of device; 0.10 and 0.12 compile such functions.
"""

Partition = Callable[[str, tuple[int, ...]], tuple[str | None, ...]]
"""`partition(path, shape)` returns "model" for each axis of an array that is split, None for others; () for no axis."""


def device_mesh(devices: tuple[jax.Device, ...], model_devices: int = 1) -> Mesh:
    """Returns the mesh of the devices, with axes ("lanes",), or ("lanes", "model") if several devices share a lane."""
    if model_devices == 1:
        return Mesh(np.array(devices), (LANE_AXIS,))
    return Mesh(np.array(devices).reshape(-1, model_devices), (LANE_AXIS, MODEL_AXIS))


def map_over_devices(
    devices: tuple[jax.Device, ...], function: Callable, in_specs: Any, out_specs: Any, model_devices: int = 1
) -> Callable:
    """Returns a function that applies `function` on each device, or group of devices, to the lanes it has.

    With one device or none the function itself is returned.

    Args:
      devices: the devices of the mesh.
      function: a function of the lanes of one device, or of one group of devices that share lanes.
      in_specs: the shardings of its arguments, as `jax.shard_map` takes them.
      out_specs: the shardings of its results.
      model_devices: the number of devices that share a lane.
    """
    if len(devices) <= 1:
        return function
    mesh, manual = device_mesh(devices, model_devices), frozenset({LANE_AXIS})

    def sharded(function: Callable) -> Callable:
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
        )

    return _with_local_empty_arrays(function, sharded, in_specs, mesh) if EMPTY_ARGUMENTS_CRASH else sharded(function)


def _with_local_empty_arrays(
    function: Callable, sharded: Callable[[Callable], Callable], in_specs: Sequence[PartitionSpec], mesh: Mesh
) -> Callable:
    """Returns `sharded(function)`, in which each device creates arguments and constants of size zero for itself."""

    def empty(shape: Sequence[int], dtype: Any) -> jax.Array:
        return jax.lax.full(shape, 0, dtype)

    def local_part(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        divisors = [mesh.shape[axis] if axis else 1 for axis in (*spec, *(None,) * (x.ndim - len(spec)))]
        return empty([n // devices for n, devices in zip(x.shape, divisors, strict=True)], x.dtype)

    def call(*arguments: Any) -> Any:
        nonempty = [jax.tree.map(lambda x: x if x.size else None, argument) for argument in arguments]

        def completed(*nonempty: Any) -> Any:
            parts = [
                jax.tree.map(lambda x, part, spec=spec: part if x.size else local_part(x, spec), argument, part)
                for argument, part, spec in zip(arguments, nonempty, in_specs, strict=True)
            ]
            traced, shapes = jax.make_jaxpr(function, return_shape=True)(*parts)
            constants = [x if np.size(x) else empty(x.shape, x.dtype) for x in traced.consts]
            results = jax.core.eval_jaxpr(traced.jaxpr, constants, *jax.tree.leaves(parts))
            return jax.tree.unflatten(jax.tree.structure(shapes), results)

        return sharded(completed)(*nonempty)

    return call


def map_with_paths(function: Callable[[str, Any], Any], tree: Any) -> Any:
    """Returns the tree of `function(path, leaf)`.

    A leaf of a `Stack` has one path for all layers, such as "h/layers/attention/kernel".
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, x: function(jax.tree_util.keystr(path, simple=True, separator="/"), x), tree
    )


def is_split() -> bool:
    """Returns whether the function traced now runs on lanes that several devices share."""
    return MODEL_AXIS in jax.sharding.get_abstract_mesh().axis_names


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrains the layout of an array where several devices share a lane: `MODEL_AXIS` or None for each axis."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*axes)) if is_split() else x


def constrain_tree(tree: Any, partition: Partition, leading: int = 0) -> Any:
    """Constrains the layout of a tree's arrays by a partition where several devices share a lane.

    Args:
      tree: the arrays.
      partition: the axes to split, by the leaves' paths and shapes.
      leading: the number of leading axes that `partition` does not know of and that are not split.
    """
    if not is_split():
        return tree

    def constrain_leaf(path: str, x: Any) -> Any:
        return constrain(x, *(None,) * leading, *partition(path, x.shape[leading:])) if x.ndim > leading else x

    return map_with_paths(constrain_leaf, tree)
