"""A monitor inside a training program: it follows a lane step by step, and raises an alarm."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.learner import Channel
from jaxaudit.monitoring.channels import standardise
from jaxaudit.monitoring.monitor import Expectation, Monitor
from jaxaudit.monitoring.scorer import Carry


@dataclass(frozen=True, eq=False)
class MonitorWatch:
    """A monitor as a program's `InLoopMonitor`. One is equal to itself alone, so that a program is compiled for it.

    Attributes:
      expectation: the monitor's.
      threshold: the score above which there is an alarm.
      places: where each of its channels is in the telemetry: the variable, and the entry, flattened.
    """

    expectation: Expectation
    threshold: float
    places: tuple[tuple[str, int], ...]

    @classmethod
    def of(
        cls,
        monitor: Monitor,
        alpha: float,
        shapes: Mapping[str, tuple[int, ...]],
        channels: Mapping[str, Channel],
    ) -> MonitorWatch:
        """For a learner's telemetry.

        Args:
          monitor: it.
          alpha: false alarms per clean run, at most.
          shapes: of the telemetry's variables.
          channels: the labels of their dimensions, as a `Learner` has them.

        Raises:
          ValueError: the telemetry lacks a channel the monitor reads, or it was calibrated on too few runs for alpha.
        """
        known = {
            channel: (name, entry)
            for name, shape in shapes.items()
            for entry, channel in enumerate(channel_names(name, shape, channels))
        }
        names = monitor.expectation.channels.names
        missing = [name for name in names if name not in known]
        if missing:
            raise ValueError(
                f"the monitor reads channel '{missing[0]}', which the learner's step does not give; fit it to "
                f"channels it does: {', '.join(sorted(known))}"
            )
        return cls(monitor.expectation, monitor.threshold(alpha), tuple(known[name] for name in names))

    @cached_property
    def provenance(self) -> str:
        """A hash of all that its alarms depend on, SHA-256 in hexadecimal."""
        known = self.expectation
        channels = known.channels
        arrays = (channels.center, channels.scale, channels.complete, known.params, known.reference, known.yardstick)
        found = hashlib.sha256(repr((known.model, channels.names, self.threshold)).encode())
        for leaf in jax.tree.leaves(arrays):
            found.update(np.asarray(leaf).tobytes())
        return found.hexdigest()

    def begin(self) -> Carry:
        """Returns what the monitor carries before the first step."""
        return self.expectation.model.begin(self.expectation.params, len(self.places))

    def follow(self, watched: Carry, telemetry: Mapping[str, jax.Array]) -> tuple[Carry, jax.Array]:
        """A step on: what is carried, and the score less the threshold."""
        known = self.expectation
        values = jnp.stack([telemetry[name].reshape(-1)[entry] for name, entry in self.places])
        center, scale = (np.float32(x) for x in (known.channels.center, known.channels.scale))
        y, seen = standardise(values, center, scale, jnp)
        watched, scores = known.model.score(known.params, known.reference, watched, y, seen.astype(jnp.float32))
        gone = jnp.any(~seen & known.channels.complete)
        return watched, jnp.where(gone, jnp.inf, known.yardstick.combine(scores, jnp) - self.threshold)


def channel_names(name: str, shape: tuple[int, ...], channels: Mapping[str, Channel]) -> list[str]:
    """What `channels.series` calls the entries of a variable, flattened."""
    if not shape:
        return [name]
    dims = channels.get(name, Channel()).dims
    labels = [labels for _, labels in dims] if dims else [range(size) for size in shape]
    return [f"{name}[{', '.join(map(str, entry))}]" for entry in itertools.product(*labels)]
