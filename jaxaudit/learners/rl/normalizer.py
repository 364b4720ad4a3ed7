"""Running mean and variance that a NaN cannot poison, nor a number whose square is none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

LARGEST = 1e15
"""In size; greater ones would leave a variance in float32 infinite for ever."""


@struct.dataclass
class Moments:
    """Mean and population variance of everything seen, for values of shape `[d]` (or scalars).

    Attributes:
      count: values seen for each entry, those left out not counted; shape `[d]`.
      mean: `[d]`.
      variance: `[d]`; 1 before anything was seen.
    """

    count: jax.Array
    mean: jax.Array
    variance: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Moments:
        """Nothing seen yet: normalising with it changes nothing."""
        return cls(jnp.zeros(shape), jnp.zeros(shape), jnp.ones(shape))

    def update(self, values: jax.Array) -> Moments:
        """With a batch `[..., d]` added (Chan et al., 1983). Entries not below `LARGEST` in size are left out."""
        axes = tuple(range(values.ndim - self.mean.ndim))
        finite = jnp.abs(values) < LARGEST
        count = jnp.sum(finite, axes, dtype=jnp.float32)
        safe = jnp.maximum(count, 1.0)
        mean = jnp.sum(jnp.where(finite, values, 0.0), axes) / safe
        variance = jnp.sum(jnp.where(finite, (values - mean) ** 2, 0.0), axes) / safe
        total = jnp.maximum(self.count + count, 1.0)
        delta = mean - self.mean
        seen = self.variance * self.count + variance * count + delta**2 * self.count * count / total
        return Moments(
            self.count + count,
            self.mean + delta * count / total,
            jnp.where(self.count + count > 0, seen / total, 1.0),
        )

    def normalize(self, values: jax.Array, limit: float = 10.0) -> jax.Array:
        """Values with the mean taken off and divided by the standard deviation, clipped to +-`limit`."""
        return jnp.clip((values - self.mean) / self.deviation(), -limit, limit)

    def deviation(self) -> jax.Array:
        """By which `scale` divides: `[d]`."""
        return jnp.sqrt(self.variance + 1e-8)

    def scale(self, values: jax.Array, limit: float = 10.0) -> jax.Array:
        """Values divided by the standard deviation, clipped to +-`limit`."""
        return jnp.clip(values / self.deviation(), -limit, limit)
