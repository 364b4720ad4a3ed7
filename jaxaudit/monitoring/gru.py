"""A gated recurrent unit (Cho et al., 2014) as meta-state model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.monitoring.model import Innovations, Params, innovations_all, one_by_one
from jaxaudit.monitoring.readout import Readout
from jaxaudit.monitoring.scores import StateSpace


@struct.dataclass
class GRUState:
    """What a step leaves.

    Attributes:
      hidden: `[n]`.
      last: the latest value of each channel `[d]`; zero, the mean, before the first.
    """

    hidden: jax.Array
    last: jax.Array


@dataclass(frozen=True)
class GRU(StateSpace):
    """Flax's GRU cell on the telemetry and which of it was seen, read out by a perceptron.

    Attributes:
      size: n, of the latent.
      hidden: widths of the readout's hidden layers.
    """

    size: int = 16
    hidden: tuple[int, ...] = (32,)

    @property
    def readout(self) -> Readout:
        """From the latent to the next telemetry."""
        return Readout(self.hidden)

    @property
    def cell(self) -> nn.GRUCell:
        """The recurrence."""
        return nn.GRUCell(self.size)

    def init(self, key: jax.Array, channels: int) -> Params:
        """Fresh parameters."""
        cell_key, readout_key = jax.random.split(key)
        cell = self.cell.init(cell_key, jnp.zeros(self.size), jnp.zeros(2 * channels))["params"]
        return {"cell": cell, "readout": self.readout.init(readout_key, self.size, channels)}

    def initial(self, params: Params) -> GRUState:
        """Zeros."""
        return GRUState(jnp.zeros(self.size), jnp.zeros(params["readout"]["persistence"].shape))

    def advance(self, params: Params, state: GRUState, y: jax.Array, seen: jax.Array) -> GRUState:
        """One step."""
        inputs = jnp.concatenate([seen * y, seen], axis=-1)
        hidden: Any = self.cell.apply({"params": params["cell"]}, state.hidden, inputs)
        return GRUState(hidden[0], (1.0 - seen) * state.last + seen * y)

    def advance_all(self, params: Params, y: jax.Array, seen: jax.Array) -> tuple[GRUState, Innovations]:
        """All steps: `[T, d]` to leaves `[T, ...]`."""
        after = one_by_one(self, params, y, seen)
        return after, innovations_all(self, params, after, y, seen)

    def innovations(self, params: Params, state: GRUState, y: jax.Array, seen: jax.Array) -> Innovations:
        """A step's telemetry against the readout."""
        return self.readout.innovations(params["readout"], state.hidden, state.last, y, seen)

    def latent(self, params: Params, state: GRUState) -> jax.Array:
        """The hidden units, `[n]`."""
        return state.hidden
