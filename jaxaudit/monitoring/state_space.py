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
from jaxaudit.monitoring.meta_state import Innovations, StateSpace
from jaxaudit.monitoring.scoring import Params

MIN_VARIANCE = 1e-4
"""The smallest variance of the observation noise, in units of a channel's own variance."""


@struct.dataclass
class KalmanState:
    """The Gaussian distribution of x_t given the telemetry before step t.

    Attributes:
      mean: `[n]`.
      covariance: `[n, n]`.
    """

    mean: jax.Array
    covariance: jax.Array


@dataclass(frozen=True)
class Kalman(StateSpace):
    """Linear Gaussian state-space model with its Kalman filter.

    x_{t+1} = A x_t + w, y_t = C x_t + v, with w ~ N(0, Q), v ~ N(0, R), and Q and R diagonal.

    Channels are processed one after the other (Durbin and Koopman, 2012, section 6.4), which a diagonal R allows: no
    matrix is inverted, and a channel without a value is skipped. A channel's standardised innovation is conditional on
    the channels before it, and the squares sum to the usual normalised innovation squared.

    Attributes:
      size: n, the dimension of the latent.
    """

    size: int = 8

    def init(self, key: jax.Array, channels: int) -> Params:
        """Returns initial parameters: slow, independent latents, observed through random weights."""
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
        return KalmanState(params["initial_mean"], jnp.diag(jnp.exp(params["log_initial_variance"])))

    def advance(self, params: Params, state: KalmanState, y: jax.Array, observed: jax.Array) -> KalmanState:
        return self._predict(params, self._correct(params, state, y, observed)[0])

    def advance_all(self, params: Params, y: jax.Array, observed: jax.Array) -> tuple[KalmanState, Innovations]:
        """Returns states and innovations from the same corrections, as `StateSpace.advance_all` does."""

        def step(state: KalmanState, row: tuple[jax.Array, jax.Array]) -> tuple[KalmanState, Any]:
            corrected, innovations = self._correct(params, state, *row)
            state = self._predict(params, corrected)
            return state, (state, innovations)

        return jax.lax.scan(step, self.initial(params), (y, observed))[1]

    def innovations(self, params: Params, state: KalmanState, y: jax.Array, observed: jax.Array) -> Innovations:
        return self._correct(params, state, y, observed)[1]

    def latent(self, params: Params, state: KalmanState) -> jax.Array:
        return state.mean

    def _predict(self, params: Params, corrected: KalmanState) -> KalmanState:
        transition = params["transition"]
        covariance = transition @ corrected.covariance @ transition.T
        noise = jnp.diag(jnp.exp(params["log_transition_variance"]))
        return KalmanState(transition @ corrected.mean, 0.5 * (covariance + covariance.T) + noise)

    def _correct(
        self, params: Params, state: KalmanState, y: jax.Array, observed: jax.Array
    ) -> tuple[KalmanState, Innovations]:
        noise = MIN_VARIANCE + jnp.exp(params["log_observation_variance"])

        def channel(state: KalmanState, row: tuple[jax.Array, ...]) -> tuple[KalmanState, tuple[jax.Array, jax.Array]]:
            weights, noise, y, observed = row
            covariance = state.covariance @ weights
            variance = weights @ covariance + noise
            innovation = observed * (y - weights @ state.mean)
            gain = observed * covariance / variance
            state = KalmanState(state.mean + gain * innovation, state.covariance - jnp.outer(gain, covariance))
            return state, (innovation / jnp.sqrt(variance), 0.5 * observed * jnp.log(variance))

        corrected, (standardised, log_std) = jax.lax.scan(channel, state, (params["observation"], noise, y, observed))
        return corrected, Innovations(standardised, log_std, observed)


MIN_STD = 1e-2
"""The smallest predicted std, in units of a channel's own: no nearly constant channel makes the likelihood infinite."""


@dataclass(frozen=True)
class Readout:
    """Predicts mean and standard deviation of the next telemetry from a latent, by a multi-layer perceptron.

    The mean is each channel's last value times a learned factor, plus an output of the network. The innovations of the
    channels before it shift a channel's mean by learned weights, so that the Gaussian has a covariance.

    Attributes:
      hidden: widths of the network's hidden layers.
    """

    hidden: tuple[int, ...]

    def init(self, key: jax.Array, latent: int, channels: int) -> Params:
        network = self._network(channels).init(key, jnp.zeros(latent))["params"]
        return {
            "network": network,
            "persistence": jnp.full(channels, 0.5),
            "mixing": jnp.zeros((channels, channels)),  # only entries below the diagonal are used
        }

    def innovations(
        self, params: Params, latent: jax.Array, last: jax.Array, y: jax.Array, observed: jax.Array
    ) -> Innovations:
        output: Any = self._network(y.shape[-1]).apply({"params": params["network"]}, latent)
        added_mean, raw_std = jnp.split(output, 2, axis=-1)
        std = MIN_STD + jax.nn.softplus(raw_std)
        marginal = observed * (y - params["persistence"] * last - added_mean)
        conditional = marginal - jnp.tril(params["mixing"], -1) @ marginal
        return Innovations(observed * conditional / std, observed * jnp.log(std), observed)

    def _network(self, channels: int) -> MLP:
        return MLP(self.hidden, 2 * channels, output_scale=0.1)


MIN_DECAY = 1e-5
"""The smallest -log |Lambda| per step, which keeps |Lambda| below 1 in float32 for all parameters."""


@struct.dataclass
class RecurrentState:
    """The state of a recurrent unit after a step.

    Attributes:
      hidden: the hidden state, `[n]`; complex for an LRU.
      last: the latest value of each channel, `[d]`; zero, which is the mean, before the first.
    """

    hidden: jax.Array
    last: jax.Array


@dataclass(frozen=True)
class LRU(StateSpace):
    """Linear recurrent unit (Orvieto et al., 2023) with a perceptron as readout.

    h_t = Lambda h_{t-1} + exp(gamma) B u_t, with Lambda = exp(-exp(nu) + i phase). The input u is the telemetry and its
    mask of observed values. The phase is pi sigmoid(theta), where the paper has exp(theta), so that it is finite for
    all parameters.

    Attributes:
      size: n complex entries; the latent has their 2 n real and imaginary parts.
      hidden: widths of the readout's hidden layers.
      shortest, longest: the range of the initial time constants in steps; they are evenly spaced in logarithm.
    """

    size: int = 8
    hidden: tuple[int, ...] = (32,)
    shortest: float = 2.0
    longest: float = 200.0

    @property
    def readout(self) -> Readout:
        """The network that predicts the next telemetry from the latent."""
        return Readout(self.hidden)

    def init(self, key: jax.Array, channels: int) -> Params:
        """Returns initial parameters; with the initial gamma, the latent has the variance of its input."""
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
        """Returns Lambda, complex `[n]`, inside the unit circle."""
        return jnp.exp(-jnp.exp(params["nu"]) - MIN_DECAY + 1j * jnp.pi * jax.nn.sigmoid(params["theta"]))

    def initial(self, params: Params) -> RecurrentState:
        channels = params["input_real"].shape[1] // 2
        return RecurrentState(jnp.zeros(self.size, jnp.complex64), jnp.zeros(channels))

    def advance(self, params: Params, state: RecurrentState, y: jax.Array, observed: jax.Array) -> RecurrentState:
        hidden = self.decay(params) * state.hidden + self._input(params, y, observed)
        return RecurrentState(hidden, (1.0 - observed) * state.last + observed * y)

    def advance_all(self, params: Params, y: jax.Array, observed: jax.Array) -> tuple[RecurrentState, Innovations]:
        """Returns states from parallel scans, as `StateSpace.advance_all` does."""
        hidden = linear_scan(self.decay(params), self._input(params, y, observed))
        after = RecurrentState(hidden, linear_scan(1.0 - observed, observed * y))
        return after, self.innovations_all(params, after, y, observed)

    def innovations(self, params: Params, state: RecurrentState, y: jax.Array, observed: jax.Array) -> Innovations:
        return self.readout.innovations(params["readout"], self.latent(params, state), state.last, y, observed)

    def latent(self, params: Params, state: RecurrentState) -> jax.Array:
        return jnp.concatenate([state.hidden.real, state.hidden.imag], axis=-1)

    def _input(self, params: Params, y: jax.Array, observed: jax.Array) -> jax.Array:
        inputs = jnp.concatenate([observed * y, observed], axis=-1)
        kernel = params["input_real"] + 1j * params["input_imaginary"]
        return jnp.exp(params["gamma"]) * (inputs @ kernel.T)


@dataclass(frozen=True)
class GRU(StateSpace):
    """Flax's GRU cell with a perceptron as readout; its input is the telemetry and its mask of observed values.

    Attributes:
      size: n, the dimension of the latent.
      hidden: widths of the readout's hidden layers.
    """

    size: int = 16
    hidden: tuple[int, ...] = (32,)

    @property
    def readout(self) -> Readout:
        """The network that predicts the next telemetry from the latent."""
        return Readout(self.hidden)

    @property
    def cell(self) -> nn.GRUCell:
        return nn.GRUCell(self.size)

    def init(self, key: jax.Array, channels: int) -> Params:
        cell_key, readout_key = jax.random.split(key)
        cell = self.cell.init(cell_key, jnp.zeros(self.size), jnp.zeros(2 * channels))["params"]
        return {"cell": cell, "readout": self.readout.init(readout_key, self.size, channels)}

    def initial(self, params: Params) -> RecurrentState:
        return RecurrentState(jnp.zeros(self.size), jnp.zeros(params["readout"]["persistence"].shape))

    def advance(self, params: Params, state: RecurrentState, y: jax.Array, observed: jax.Array) -> RecurrentState:
        inputs = jnp.concatenate([observed * y, observed], axis=-1)
        hidden: Any = self.cell.apply({"params": params["cell"]}, state.hidden, inputs)
        return RecurrentState(hidden[0], (1.0 - observed) * state.last + observed * y)

    def innovations(self, params: Params, state: RecurrentState, y: jax.Array, observed: jax.Array) -> Innovations:
        return self.readout.innovations(params["readout"], state.hidden, state.last, y, observed)

    def latent(self, params: Params, state: RecurrentState) -> jax.Array:
        return state.hidden
