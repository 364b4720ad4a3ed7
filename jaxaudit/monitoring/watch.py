"""A monitor inside a training program: it follows a lane step by step, and raises alarms."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.learner import Channel
from jaxaudit.monitoring.monitor import Expectation, Monitor
from jaxaudit.monitoring.scoring import Carry
from jaxaudit.monitoring.telemetry import entry_names, standardise


@dataclass(frozen=True, eq=False)
class MonitorWatch:
    """A monitor as a program's `InLoopMonitor`. It equals only itself, so that a program is compiled for each watch.

    Attributes:
      expectation: the monitor's fitted scorer.
      threshold: the score above which there is an alarm.
      places: for each of the monitor's channels the telemetry's variable, and the index of its flattened entry.
    """

    expectation: Expectation
    threshold: float
    places: tuple[tuple[str, int], ...]

    @classmethod
    def for_telemetry(
        cls,
        monitor: Monitor,
        alpha: float,
        shapes: Mapping[str, tuple[int, ...]],
        channels: Mapping[str, Channel],
    ) -> MonitorWatch:
        """Returns a monitor's watch of a learner's telemetry.

        Args:
          monitor: the monitor.
          alpha: the highest false-alarm rate per clean run.
          shapes: the shapes of the telemetry's variables.
          channels: the labels of their dimensions, as in `Learner.channels`.

        Raises:
          ValueError: the telemetry lacks a channel that the monitor reads, or the monitor was calibrated on too few
            runs for alpha.
        """
        places = {
            channel: (name, index)
            for name, shape in shapes.items()
            for index, channel in enumerate(channel_names(name, shape, channels))
        }
        names = monitor.expectation.channels.names
        missing = [name for name in names if name not in places]
        if missing:
            raise ValueError(
                f"the monitor reads channel '{missing[0]}', which the learner's step does not give; fit it to "
                f"channels it does: {', '.join(sorted(places))}"
            )
        return cls(monitor.expectation, monitor.threshold(alpha), tuple(places[name] for name in names))

    @cached_property
    def provenance(self) -> str:
        """The hash of all that the alarms depend on, SHA-256 in hexadecimal."""
        fitted = self.expectation
        channels = fitted.channels
        arrays = (
            channels.center, channels.scale, channels.complete, fitted.params, fitted.reference, fitted.normalizer
        )  # fmt: skip
        digest = hashlib.sha256(repr((fitted.model, channels.names, self.threshold)).encode())
        for leaf in jax.tree.leaves(arrays):
            digest.update(np.asarray(leaf).tobytes())
        return digest.hexdigest()

    def begin(self) -> Carry:
        """Returns what the monitor carries before the first step."""
        return self.expectation.model.begin(self.expectation.params, len(self.places))

    def follow(self, watched: Carry, telemetry: Mapping[str, jax.Array]) -> tuple[Carry, jax.Array]:
        """Returns what is carried after a step with this telemetry, and the step's score minus the threshold."""
        fitted = self.expectation
        values = jnp.stack([telemetry[name].reshape(-1)[index] for name, index in self.places])
        center, scale = (np.float32(x) for x in (fitted.channels.center, fitted.channels.scale))
        y, observed = standardise(values, center, scale, jnp)
        watched, scores = fitted.model.score_step(
            fitted.params, fitted.reference, watched, y, observed.astype(jnp.float32)
        )
        diverged = jnp.any(~observed & fitted.channels.complete)
        return watched, jnp.where(diverged, jnp.inf, fitted.normalizer.combine(scores, jnp) - self.threshold)


def channel_names(name: str, shape: tuple[int, ...], channels: Mapping[str, Channel]) -> list[str]:
    """Returns the names that `stack_channels` gives to the flattened entries of a variable of this shape."""
    if not shape:
        return [name]
    dims = channels.get(name, Channel()).dims
    return entry_names(name, [labels for _, labels in dims] if dims else [range(size) for size in shape])
