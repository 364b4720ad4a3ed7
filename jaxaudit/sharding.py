"""How lanes lie on devices: one mesh, along which they are dealt out evenly and in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "lanes"
"""The mesh's only axis."""

EVERYWHERE = PartitionSpec()
"""The same on every device."""

LANES = PartitionSpec(AXIS)
"""Of arrays `[L, ...]`: each device has lanes of its own."""

ROWS = PartitionSpec(None, AXIS)
"""Of telemetry `[T, L, ...]`, likewise."""


def mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    """The devices in a row."""
    return Mesh(np.array(devices), (AXIS,))


def laid(devices: tuple[jax.Device, ...], spec: PartitionSpec) -> NamedSharding:
    """Where on the devices an array lies."""
    return NamedSharding(mesh(devices), spec)


def on_devices(devices: tuple[jax.Device, ...], function: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """A function of lanes that each device runs for its own; that function itself where there is one device or none.

    Args:
      devices: of the mesh.
      function: what a device does with its lanes, as if there were no others.
      in_specs, out_specs: of its arguments and results, as `jax.shard_map` takes them.
    """
    if len(devices) <= 1:
        return function
    return jax.shard_map(function, mesh=mesh(devices), in_specs=in_specs, out_specs=out_specs, check_vma=False)
