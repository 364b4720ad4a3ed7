"""Where the states of lanes lie: whole on a device, or each split among the devices that share a lane.

On those an array's split axes are filled up with zeros to what divides evenly. A program cuts these off where it
begins and adds them where it ends, and a copy on the host has none: states are the same however many share a lane.
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
from jaxaudit.runtime.sharding import LANE_AXIS, MODEL_AXIS, device_mesh, leaf_paths


def axes_of(program: Program, tree: Any, leading: int) -> list[tuple[str | None, ...]]:
    """For each leaf of arrays or shapes, how its axes lie, but for some leading ones; () of one that is whole."""
    partition, leaves = program.learner.partition, jax.tree.leaves(tree)
    if partition is None or program.model_devices == 1:
        return [()] * len(leaves)
    return [partition(path, jnp.shape(x)[leading:]) for path, x in zip(leaf_paths(tree), leaves, strict=True)]


def filled(program: Program, tree: Any, leading: int) -> Any:
    """Arrays with what fills their split axes up; NumPy's stay on the host."""

    def one(x: Any, axes: tuple[str | None, ...]) -> Any:
        missing = _missing(program, jnp.shape(x), axes, leading)
        if not any(missing):
            return x
        return (np if isinstance(x, np.ndarray) else jnp).pad(x, [(0, more) for more in missing])

    return _over(one, program, tree, leading)


def filled_shapes(program: Program, tree: Any, leading: int) -> Any:

    def one(x: Any, axes: tuple[str | None, ...]) -> jax.ShapeDtypeStruct:
        missing = _missing(program, x.shape, axes, leading)
        return jax.ShapeDtypeStruct(tuple(map(sum, zip(x.shape, missing, strict=True))), x.dtype)

    return _over(one, program, tree, leading)


def cut(tree: Any, shapes: Any, leading: int = 1) -> Any:
    """Arrays without what filled them up, by the shapes they had; leading axes stay as long as they are."""

    def one(x: Any, whole: Any) -> Any:
        kept = whole.shape[leading:]
        return x if x.shape[leading:] == kept else x[(slice(None),) * leading + tuple(map(slice, kept))]

    return jax.tree.map(one, tree, shapes)


def of_lanes(program: Program, tree: Any) -> Any:
    """How arrays `[L, ...]` lie on all devices."""
    across = device_mesh(program.devices, program.model_devices)
    return _over(lambda _, axes: NamedSharding(across, PartitionSpec(LANE_AXIS, *axes)), program, tree, 1)


def of_pieces(program: Program, tree: Any, full: bool) -> Any:
    """How arrays `[L, ...]` that nothing fills up lie on all devices: what cannot be dealt out evenly is on each.

    `full`: the lanes can.
    """
    across, lanes = device_mesh(program.devices, program.model_devices), LANE_AXIS if full else None

    def one(x: Any, axes: tuple[str | None, ...]) -> NamedSharding:
        odd = any(_missing(program, x.shape, axes, 1))
        return NamedSharding(across, PartitionSpec(lanes, *(() if odd else axes)))

    return _over(one, program, tree, 1)


def of_data(program: Program, tree: Any) -> Any:
    """How arrays that all lanes read lie on all devices."""
    across = device_mesh(program.devices, program.model_devices)
    return _over(lambda _, axes: NamedSharding(across, PartitionSpec(*axes)), program, tree, 0)


def of_group(program: Program, tree: Any, group: int) -> Any:
    """How arrays `[L, ...]` of the lanes of one group lie on its device, or devices."""
    devices = group_devices(program, group)
    if len(devices) == 1:
        return jax.tree.map(lambda _: SingleDeviceSharding(devices[0]), tree)
    across = Mesh(np.array(devices), (MODEL_AXIS,))
    return _over(lambda _, axes: NamedSharding(across, PartitionSpec(None, *axes)), program, tree, 1)


def group_devices(program: Program, group: int) -> tuple[jax.Device, ...]:
    """Returns the devices that a group of lanes lies on."""
    first = group * program.model_devices
    return program.devices[first : first + program.model_devices]


def groups_here(program: Program) -> list[int]:
    """The groups that a device of this process is of."""
    own = jax.process_index()
    return [g for g in range(program.groups) if any(d.process_index == own for d in group_devices(program, g))]


def put(program: Program, states: Any, group: int) -> Any:
    """States `[L, ...]` on the host, on a group's device or devices."""
    whole, laid_out = filled(program, states, 1), of_group(program, states, group)
    if all(device.process_index == jax.process_index() for device in group_devices(program, group)):
        return jax.device_put(whole, laid_out)
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, x.__getitem__), whole, laid_out)


def joined(program: Program, lanes: int, blocks: Sequence[Any]) -> Any:
    """The states of all lanes, by those of each group that has a device here."""

    def one(sharding: Sharding, *parts: jax.Array) -> jax.Array:
        arrays = [shard.data for part in parts for shard in part.addressable_shards]
        return jax.make_array_from_single_device_arrays((lanes, *parts[0].shape[1:]), sharding, arrays)

    return jax.tree.map(one, of_lanes(program, blocks[0]), *blocks)


def on_host(program: Program, states: Any, group: int) -> Any:
    """A group's part of states `[L, ...]`, still filled up."""
    devices = group_devices(program, group)

    def one(x: jax.Array, sharding: Sharding) -> np.ndarray:
        found = {shard.device: shard.data for shard in x.addressable_shards}
        if len(devices) == 1:
            return np.asarray(found[devices[0]])
        shape = (x.shape[0] // program.groups, *x.shape[1:])
        return np.asarray(jax.make_array_from_single_device_arrays(shape, sharding, [found[d] for d in devices]))

    return jax.tree.map(one, states, of_group(program, states, group))


def device_bytes(program: Program, lane: Any) -> int:
    """Bytes of an array tree, the shapes of one lane's, on each device that shares it."""

    def one(x: Any, axes: tuple[str | None, ...]) -> int:
        whole = math.prod(n + more for n, more in zip(x.shape, _missing(program, x.shape, axes, 0), strict=True))
        return whole * x.dtype.itemsize // (program.model_devices if MODEL_AXIS in axes else 1)

    return sum(jax.tree.leaves(_over(one, program, lane, 0)))


def _missing(program: Program, shape: tuple[int, ...], axes: tuple[str | None, ...], leading: int) -> list[int]:
    """What each axis lacks to be divided evenly."""
    split = [False] * leading + [axis == MODEL_AXIS for axis in axes]
    split += [False] * (len(shape) - len(split))
    return [-n % program.model_devices if is_split else 0 for n, is_split in zip(shape, split, strict=True)]


def _over(function: Callable, program: Program, tree: Any, leading: int) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    found = [function(x, axes) for x, axes in zip(leaves, axes_of(program, tree, leading), strict=True)]
    return jax.tree.unflatten(structure, found)
