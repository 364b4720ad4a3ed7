"""State-space models of telemetry: a linear recurrent unit, a gated recurrent unit, and a Kalman filter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.kernels.linear_scan import linear_scan
from jaxaudit.models.policy import MLP
from jaxaudit.monitoring.model import Innovations, Params, innovations_all, one_by_one
from jaxaudit.monitoring.scores import StateSpace

LEAST_VARIANCE = 1e-4
"""Of the observation noise, in units of a channel's own variance."""


@struct.dataclass
class KalmanState:
    """What is known of x_t before the telemetry of step t: Gaussian.

    Attributes:
      mean: `[n]`.
      covariance: `[n, n]`.
    """

    mean: jax.Array
    covariance: jax.Array


@dataclass(frozen=True)
class Kalman(StateSpace):
    """x_{t+1} = A x_t + w, y_t = C x_t + v, with w ~ N(0, Q) and v ~ N(0, R), Q and R diagonal.

    Channels are taken one after the other (Durbin and Koopman, 2012, section 6.4), which R's being diagonal allows:
    nothing is inverted, and a channel without a value is left out. A channel's standardised innovation is then that
    given the channels before it, and their squares add up to the usual normalised innovation squared.

    Attributes:
      size: n, of the latent.
    """

    size: int = 8

    def init(self, key: jax.Array, channels: int) -> Params:
        """Fresh parameters: slow, independent latents, seen through random weights."""
        n = self.size
        return {
            "transition": jnp.diag(jnp.linspace(0.5, 0.99, n)),
            "observation": jax.random.normal(key, (channels, n)) / jnp.sqrt(n),
            "log_transition_variance": jnp.full(n, -2.0),
            "log_observation_variance": jnp.full(channels, -1.0),
            "initial_mean": jnp.zeros(n),
            "log_initial_variance": jnp.zeros(n),
        }

    def initial(self, params: Params) -> KalmanState:
        """What is known before the first step."""
        return KalmanState(params["initial_mean"], jnp.diag(jnp.exp(params["log_initial_variance"])))

    def advance(self, params: Params, state: KalmanState, y: jax.Array, seen: jax.Array) -> KalmanState:
        """One step: corrected by the telemetry, and predicted."""
        return self._predict(params, self._correct(params, state, y, seen)[0])

    def advance_all(self, params: Params, y: jax.Array, seen: jax.Array) -> tuple[KalmanState, Innovations]:
        """All steps: `[T, d]` to leaves `[T, ...]`; a correction gives the state and the innovations at once."""

        def step(state: KalmanState, row: tuple[jax.Array, jax.Array]) -> tuple[KalmanState, Any]:
            corrected, found = self._correct(params, state, *row)
            state = self._predict(params, corrected)
            return state, (state, found)

        return jax.lax.scan(step, self.initial(params), (y, seen))[1]

    def innovations(self, params: Params, state: KalmanState, y: jax.Array, seen: jax.Array) -> Innovations:
        """A step's telemetry against the filter's prediction."""
        return self._correct(params, state, y, seen)[1]

    def latent(self, params: Params, state: KalmanState) -> jax.Array:
        return state.mean

    def _predict(self, params: Params, corrected: KalmanState) -> KalmanState:
        transition = params["transition"]
        covariance = transition @ corrected.covariance @ transition.T
        noise = jnp.diag(jnp.exp(params["log_transition_variance"]))
        return KalmanState(transition @ corrected.mean, 0.5 * (covariance + covariance.T) + noise)

    def _correct(
        self, params: Params, state: KalmanState, y: jax.Array, seen: jax.Array
    ) -> tuple[KalmanState, Innovations]:
        noise = LEAST_VARIANCE + jnp.exp(params["log_observation_variance"])

        def channel(state: KalmanState, row: tuple[jax.Array, ...]) -> tuple[KalmanState, tuple[jax.Array, jax.Array]]:
            weights, noise, y, seen = row
            covaries = state.covariance @ weights
            variance = weights @ covaries + noise
            gap = seen * (y - weights @ state.mean)
            gain = seen * covaries / variance
            known = KalmanState(state.mean + gain * gap, state.covariance - jnp.outer(gain, covaries))
            return known, (gap / jnp.sqrt(variance), 0.5 * seen * jnp.log(variance))

        corrected, (standardised, log_std) = jax.lax.scan(channel, state, (params["observation"], noise, y, seen))
        return corrected, Innovations(standardised, log_std, seen)


LEAST_STD = 1e-2
"""In units of a channel's own spread: a channel that hardly moves must not make the likelihood infinite."""


@dataclass(frozen=True)
class Readout:
    """From a latent to mean and standard deviation of the next telemetry, through a multi-layer perceptron.

    The mean is a share of each channel's last value, learned by channel, and what the network adds to it. What the
    channels before it differed by shifts a channel's mean, by learned weights, so that the Gaussian has a covariance.

    Attributes:
      hidden: widths of the network's hidden layers.
    """

    hidden: tuple[int, ...]

    def init(self, key: jax.Array, latent: int, channels: int) -> Params:
        network = self._network(channels).init(key, jnp.zeros(latent))["params"]
        return {
            "network": network,
            "persistence": jnp.full(channels, 0.5),
            "mixing": jnp.zeros((channels, channels)),  # only what is below the diagonal counts
        }

    def innovations(
        self, params: Params, latent: jax.Array, last: jax.Array, y: jax.Array, seen: jax.Array
    ) -> Innovations:
        output: Any = self._network(y.shape[-1]).apply({"params": params["network"]}, latent)
        added, width = jnp.split(output, 2, axis=-1)
        std = LEAST_STD + jax.nn.softplus(width)
        gap = seen * (y - params["persistence"] * last - added)
        alone = gap - jnp.tril(params["mixing"], -1) @ gap
        return Innovations(seen * alone / std, seen * jnp.log(std), seen)

    def _network(self, channels: int) -> MLP:
        return MLP(self.hidden, 2 * channels, output_scale=0.1)


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
        channels = params["input_real"].shape[1] // 2
        return LRUState(jnp.zeros(self.size, jnp.complex64), jnp.zeros(channels))

    def advance(self, params: Params, state: LRUState, y: jax.Array, seen: jax.Array) -> LRUState:
        hidden = self.decay(params) * state.hidden + self._driven(params, y, seen)
        return LRUState(hidden, (1.0 - seen) * state.last + seen * y)

    def advance_all(self, params: Params, y: jax.Array, seen: jax.Array) -> tuple[LRUState, Innovations]:
        """All steps at once: `[T, d]` to leaves `[T, ...]`."""
        hidden = linear_scan(self.decay(params), self._driven(params, y, seen))
        after = LRUState(hidden, linear_scan(1.0 - seen, seen * y))
        return after, innovations_all(self, params, after, y, seen)

    def innovations(self, params: Params, state: LRUState, y: jax.Array, seen: jax.Array) -> Innovations:
        return self.readout.innovations(params["readout"], self.latent(params, state), state.last, y, seen)

    def latent(self, params: Params, state: LRUState) -> jax.Array:
        return jnp.concatenate([state.hidden.real, state.hidden.imag], axis=-1)

    def _driven(self, params: Params, y: jax.Array, seen: jax.Array) -> jax.Array:
        inputs = jnp.concatenate([seen * y, seen], axis=-1)
        kernel = params["input_real"] + 1j * params["input_imaginary"]
        return jnp.exp(params["gamma"]) * (inputs @ kernel.T)


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
        return nn.GRUCell(self.size)

    def init(self, key: jax.Array, channels: int) -> Params:
        cell_key, readout_key = jax.random.split(key)
        cell = self.cell.init(cell_key, jnp.zeros(self.size), jnp.zeros(2 * channels))["params"]
        return {"cell": cell, "readout": self.readout.init(readout_key, self.size, channels)}

    def initial(self, params: Params) -> GRUState:
        return GRUState(jnp.zeros(self.size), jnp.zeros(params["readout"]["persistence"].shape))

    def advance(self, params: Params, state: GRUState, y: jax.Array, seen: jax.Array) -> GRUState:
        inputs = jnp.concatenate([seen * y, seen], axis=-1)
        hidden: Any = self.cell.apply({"params": params["cell"]}, state.hidden, inputs)
        return GRUState(hidden[0], (1.0 - seen) * state.last + seen * y)

    def advance_all(self, params: Params, y: jax.Array, seen: jax.Array) -> tuple[GRUState, Innovations]:
        """All steps: `[T, d]` to leaves `[T, ...]`."""
        after = one_by_one(self, params, y, seen)
        return after, innovations_all(self, params, after, y, seen)

    def innovations(self, params: Params, state: GRUState, y: jax.Array, seen: jax.Array) -> Innovations:
        return self.readout.innovations(params["readout"], state.hidden, state.last, y, seen)

    def latent(self, params: Params, state: GRUState) -> jax.Array:
        return state.hidden
