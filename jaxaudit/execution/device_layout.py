"""How the states of lanes are laid out on devices: whole on one device, or split among the devices that share a lane.

The split axes of an array are padded with zeros to a length that divides evenly. A program removes the padding at its
beginning and adds it at its end, and copies on the host have none, so that states do not depend on the number of
devices that share a lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxaudit.core.program import Program
from jaxaudit.runtime.sharding import LANE_AXIS, MODEL_AXIS, REPLICATED, device_mesh, map_with_paths


def named_sharding(program: Program, spec: PartitionSpec = REPLICATED) -> NamedSharding:
    """Returns the sharding `spec` over all of a program's devices."""
    return NamedSharding(device_mesh(program.devices, program.model_devices), spec)


def padded(program: Program, tree: Any, leading: int) -> Any:
    """Returns the arrays with their split axes padded by zeros; NumPy arrays stay on the host."""

    def pad(x: Any, axes: tuple[str | None, ...]) -> Any:
        padding = _padding(program, jnp.shape(x), axes, leading)
        if not any(padding):
            return x
        return (np if isinstance(x, np.ndarray) else jnp).pad(x, [(0, zeros) for zeros in padding])

    return _map_with_axes(pad, program, tree, leading)


def unpadded(tree: Any, shapes: Any, leading: int = 1) -> Any:
    """Returns the arrays without padding, by their original `shapes`; the leading axes are not changed."""

    def unpad(x: Any, original: Any) -> Any:
        shape = original.shape[leading:]
        return x if x.shape[leading:] == shape else x[(slice(None),) * leading + tuple(map(slice, shape))]

    return jax.tree.map(unpad, tree, shapes)


def lane_shardings(program: Program, tree: Any) -> Any:
    """Returns the sharding over all devices of each array `[L, ...]`."""
    return _map_with_axes(lambda _, axes: named_sharding(program, PartitionSpec(LANE_AXIS, *axes)), program, tree, 1)


def piece_shardings(program: Program, tree: Any, full: bool) -> Any:
    """Returns the sharding over all devices of each array `[L, ...]` without padding.

    Axes that cannot be divided evenly are not split; `full` tells whether the axis of lanes can.
    """
    lanes = LANE_AXIS if full else None

    def sharding(x: Any, axes: tuple[str | None, ...]) -> NamedSharding:
        uneven = any(_padding(program, x.shape, axes, 1))
        return named_sharding(program, PartitionSpec(lanes, *(() if uneven else axes)))

    return _map_with_axes(sharding, program, tree, 1)


def data_shardings(program: Program, tree: Any) -> Any:
    """Returns the sharding over all devices of each array that all lanes read."""
    return _map_with_axes(lambda _, axes: named_sharding(program, PartitionSpec(*axes)), program, tree, 0)


def group_shardings(program: Program, tree: Any, group: int) -> Any:
    """Returns the sharding of each array `[L, ...]` of one group of lanes over the group's devices."""
    devices = group_devices(program, group)
    if len(devices) == 1:
        return jax.tree.map(lambda _: SingleDeviceSharding(devices[0]), tree)
    mesh = Mesh(np.array(devices), (MODEL_AXIS,))
    return _map_with_axes(lambda _, axes: NamedSharding(mesh, PartitionSpec(None, *axes)), program, tree, 1)


def group_devices(program: Program, group: int) -> tuple[jax.Device, ...]:
    """Returns the devices of a group of lanes: one, or those that share each lane."""
    first = group * program.model_devices
    return program.devices[first : first + program.model_devices]


def local_groups(program: Program) -> list[int]:
    """Returns the groups of lanes that have a device of this process."""
    process = jax.process_index()
    return [g for g in range(program.groups) if any(d.process_index == process for d in group_devices(program, g))]


def put_group(program: Program, states: Any, group: int) -> Any:
    """Pads states `[L, ...]` on the host, and puts them on a group's devices."""
    arrays, shardings = padded(program, states, 1), group_shardings(program, states, group)
    if all(device.process_index == jax.process_index() for device in group_devices(program, group)):
        return jax.device_put(arrays, shardings)
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__), arrays, shardings)


def join_groups(program: Program, lanes: int, blocks: Sequence[Any]) -> Any:
    """Returns the states of all lanes, assembled without copies from the states of each local group."""

    def join(sharding: Sharding, *parts: jax.Array) -> jax.Array:
        arrays = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays((lanes, *parts[0].shape[1:]), sharding, arrays)

    return jax.tree.map(join, lane_shardings(program, blocks[0]), *blocks)


def group_on_host(program: Program, states: Any, group: int) -> Any:
    """Returns one group's part of states `[L, ...]` as NumPy arrays, including the padding."""
    devices = group_devices(program, group)

    def on_host(x: jax.Array, sharding: Sharding) -> np.ndarray:
        shards = {shard.device: shard.data for shard in x.addressable_shards}
        if len(devices) == 1:
            return np.asarray(shards[devices[0]])
        shape = (x.shape[0] // program.groups, *x.shape[1:])
        return np.asarray(jax.make_array_from_single_device_arrays(shape, sharding, [shards[d] for d in devices]))

    return jax.tree.map(on_host, states, group_shardings(program, states, group))


def device_bytes(program: Program, lane: Any) -> int:
    """Returns the bytes on each device that shares a lane, for arrays with the shapes of one lane."""

    def leaf_bytes(x: Any, axes: tuple[str | None, ...]) -> int:
        size = math.prod(n + zeros for n, zeros in zip(x.shape, _padding(program, x.shape, axes, 0), strict=True))
        return size * x.dtype.itemsize // (program.model_devices if MODEL_AXIS in axes else 1)

    return sum(jax.tree.leaves(_map_with_axes(leaf_bytes, program, lane, 0)))


def _padding(program: Program, shape: tuple[int, ...], axes: tuple[str | None, ...], leading: int) -> list[int]:
    """Returns the number of zeros by which each axis is padded, so that split axes divide evenly."""
    constrain_tree = [False] * leading + [axis == MODEL_AXIS for axis in axes]
    constrain_tree += [False] * (len(shape) - len(constrain_tree))
    return [-n % program.model_devices if is_split else 0 for n, is_split in zip(shape, constrain_tree, strict=True)]


def _map_with_axes(function: Callable, program: Program, tree: Any, leading: int) -> Any:
    """Maps `function(leaf, axes)`; `axes` are the partition of the axes after the leading ones, () if not split."""
    partition = program.learner.partition
    if partition is None or program.model_devices == 1:
        return jax.tree.map(lambda x: function(x, ()), tree)
    return map_with_paths(lambda path, x: function(x, partition(path, jnp.shape(x)[leading:])), tree)
