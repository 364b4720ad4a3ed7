"""The linear-Gaussian meta-state model: a Kalman filter whose matrices are learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.monitoring.model import Innovations, Params
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
        """The mean, `[n]`."""
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
