"""Multi-layer perceptrons for control."""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.kernels.orthogonal import orthogonal


class MLP(nn.Module):
    """Dense layers with an activation between: `[..., d] -> [..., features]`.

    Attributes:
      hidden: widths of the hidden layers.
      features: width of the output.
      output_scale: gain of the output layer's orthogonal initialisation.
      orthogonal: orthogonal initialisation with gain sqrt(2) in the hidden layers (Andrychowicz et al., 2021);
        otherwise LeCun normal.
      activation: what follows each hidden layer.
      fan_in_uniform: instead of the two above, kernels and biases uniform within 1 / sqrt(layer's inputs), which is
        PyTorch's default and what published results of SAC and TD3 began from.
      layer_norm: layer normalisation of each hidden layer, before its activation.
    """

    hidden: tuple[int, ...]
    features: int
    output_scale: float = 1.0
    orthogonal: bool = True
    activation: Callable[[jax.Array], jax.Array] = jnp.tanh
    fan_in_uniform: bool = False
    layer_norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The network's output."""
        for width in self.hidden:
            x = self._dense(x, width, np.sqrt(2.0))
            x = self.activation(nn.LayerNorm()(x) if self.layer_norm else x)
        return self._dense(x, self.features, self.output_scale)

    def _dense(self, x: jax.Array, width: int, gain: float) -> jax.Array:
        if self.fan_in_uniform:
            within = _uniform(1.0 / np.sqrt(x.shape[-1]))
            return nn.Dense(width, kernel_init=within, bias_init=within)(x)
        return nn.Dense(width, kernel_init=self._initializer(gain))(x)

    def _initializer(self, gain: float) -> nn.initializers.Initializer:
        if not self.orthogonal:
            return nn.initializers.lecun_normal()
        return lambda key, shape, dtype=jnp.float32, **_: orthogonal(key, shape, gain).astype(dtype)


def _uniform(bound: float) -> nn.initializers.Initializer:
    return lambda key, shape, dtype=jnp.float32, **_: jax.random.uniform(key, shape, dtype, -bound, bound)


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
