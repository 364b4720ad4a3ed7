"""The nonlinear Gaussian readout that the recurrent models share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.models.mlp import MLP
from jaxaudit.monitoring.model import Innovations, Params

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
        """Fresh parameters."""
        network = self._network(channels).init(key, jnp.zeros(latent))["params"]
        return {
            "network": network,
            "persistence": jnp.full(channels, 0.5),
            "mixing": jnp.zeros((channels, channels)),  # only what is below the diagonal counts
        }

    def innovations(
        self, params: Params, latent: jax.Array, last: jax.Array, y: jax.Array, seen: jax.Array
    ) -> Innovations:
        """`latent` is `[n]`, the rest `[d]`."""
        output: Any = self._network(y.shape[-1]).apply({"params": params["network"]}, latent)
        added, width = jnp.split(output, 2, axis=-1)
        std = LEAST_STD + jax.nn.softplus(width)
        gap = seen * (y - params["persistence"] * last - added)
        alone = gap - jnp.tril(params["mixing"], -1) @ gap
        return Innovations(seen * alone / std, seen * jnp.log(std), seen)

    def _network(self, channels: int) -> MLP:
        return MLP(self.hidden, 2 * channels, output_scale=0.1)
