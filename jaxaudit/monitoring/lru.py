"""A linear recurrent unit (Orvieto et al., 2023): a diagonal complex recurrence, all of a series at once."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.kernels.linear_scan import linear_scan
from jaxaudit.monitoring.model import Innovations, Params, innovations_all
from jaxaudit.monitoring.readout import Readout
from jaxaudit.monitoring.scores import StateSpace

LEAST_DECAY = 1e-5
"""Of log |Lambda| a step, so that |Lambda| is below 1 in float32 whatever the parameters are."""


@struct.dataclass
class LRUState:
    """What a step leaves.

    Attributes:
      hidden: complex `[n]`.
      last: the latest value of each channel `[d]`; zero, the mean, before the first.
    """

    hidden: jax.Array
    last: jax.Array


@dataclass(frozen=True)
class LRU(StateSpace):
    """h_t = Lambda h_{t-1} + exp(gamma) B u_t, Lambda = exp(-exp(nu) + i phase), read out by a perceptron.

    The input u is the telemetry and which of it was seen. The phase is pi sigmoid(theta), where the paper has
    exp(theta), so that it too is finite whatever the parameter is.

    Attributes:
      size: n complex entries; the latent has their 2 n real and imaginary parts.
      hidden: widths of the readout's hidden layers.
      shortest, longest: of the time constants the entries begin with, in steps; evenly spread in logarithm.
    """

    size: int = 8
    hidden: tuple[int, ...] = (32,)
    shortest: float = 2.0
    longest: float = 200.0

    @property
    def readout(self) -> Readout:
        """From real and imaginary parts to the next telemetry."""
        return Readout(self.hidden)

    def init(self, key: jax.Array, channels: int) -> Params:
        """Fresh parameters; gamma begins where the latent's variance is its input's."""
        phase_key, real_key, imaginary_key, readout_key = jax.random.split(key, 4)
        nu = -jnp.linspace(jnp.log(self.shortest), jnp.log(self.longest), self.size)
        scale = 1.0 / jnp.sqrt(2.0 * channels)
        shape = (self.size, 2 * channels)
        return {
            "nu": nu,
            "theta": jax.random.uniform(phase_key, (self.size,), minval=-8.0, maxval=-2.0),
            "gamma": 0.5 * jnp.log(-jnp.expm1(-2.0 * jnp.exp(nu))),
            "input_real": scale * jax.random.normal(real_key, shape),
            "input_imaginary": scale * jax.random.normal(imaginary_key, shape),
            "readout": self.readout.init(readout_key, 2 * self.size, channels),
        }

    def decay(self, params: Params) -> jax.Array:
        """Lambda, complex `[n]`: inside the unit circle."""
        return jnp.exp(-jnp.exp(params["nu"]) - LEAST_DECAY + 1j * jnp.pi * jax.nn.sigmoid(params["theta"]))

    def initial(self, params: Params) -> LRUState:
        """Zeros."""
        channels = params["input_real"].shape[1] // 2
        return LRUState(jnp.zeros(self.size, jnp.complex64), jnp.zeros(channels))

    def advance(self, params: Params, state: LRUState, y: jax.Array, seen: jax.Array) -> LRUState:
        """One step."""
        hidden = self.decay(params) * state.hidden + self._driven(params, y, seen)
        return LRUState(hidden, (1.0 - seen) * state.last + seen * y)

    def advance_all(self, params: Params, y: jax.Array, seen: jax.Array) -> tuple[LRUState, Innovations]:
        """All steps at once: `[T, d]` to leaves `[T, ...]`."""
        hidden = linear_scan(self.decay(params), self._driven(params, y, seen))
        after = LRUState(hidden, linear_scan(1.0 - seen, seen * y))
        return after, innovations_all(self, params, after, y, seen)

    def innovations(self, params: Params, state: LRUState, y: jax.Array, seen: jax.Array) -> Innovations:
        """A step's telemetry against the readout."""
        return self.readout.innovations(params["readout"], self.latent(params, state), state.last, y, seen)

    def latent(self, params: Params, state: LRUState) -> jax.Array:
        """Real and imaginary parts, `[2 n]`."""
        return jnp.concatenate([state.hidden.real, state.hidden.imag], axis=-1)

    def _driven(self, params: Params, y: jax.Array, seen: jax.Array) -> jax.Array:
        inputs = jnp.concatenate([seen * y, seen], axis=-1)
        kernel = params["input_real"] + 1j * params["input_imaginary"]
        return jnp.exp(params["gamma"]) * (inputs @ kernel.T)
