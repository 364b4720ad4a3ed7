"""Two action-value networks side by side (clipped double Q-learning, Fujimoto et al., 2018)."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxaudit.models.mlp import MLP


class TwinCritic(nn.Module):
    """Two independent critics Q(s, a), with the parameters "first" and "second".

    Attributes:
      hidden: widths of the hidden layers, with ReLU between.
      layer_norm: as `MLP`'s.
    """

    hidden: tuple[int, ...]
    layer_norm: bool = False

    def setup(self) -> None:
        """Makes the two networks."""
        self.first = MLP(self.hidden, 1, activation=nn.relu, fan_in_uniform=True, layer_norm=self.layer_norm)
        self.second = MLP(self.hidden, 1, activation=nn.relu, fan_in_uniform=True, layer_norm=self.layer_norm)

    def __call__(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Both values: `[..., O]`, `[..., A]` to `[2, ...]`."""
        seen = jnp.concatenate([observation, action], axis=-1)
        return jnp.stack([self.first(seen)[..., 0], self.second(seen)[..., 0]])

    def one(self, observation: jax.Array, action: jax.Array) -> jax.Array:
        """The first critic's value alone: `[..., O]`, `[..., A]` to `[...]`."""
        return self.first(jnp.concatenate([observation, action], axis=-1))[..., 0]
