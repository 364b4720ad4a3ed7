"""Random permutations by sorting one array of integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def shuffled(key: jax.Array, n: int) -> jax.Array:
    """Returns a uniformly random permutation of 0, ..., n - 1.

    It sorts words whose upper bits are random and whose lower bits are the index: XLA's CPU backend sorts one array of
    words several times faster than the pairs that `jax.random.permutation` sorts. Words with equal random bits keep
    their order, so it sorts twice, with independent bits.

    Args:
      key: PRNG key.
      n: at most 2^16, which leaves 16 random bits.

    Returns:
      int32 `[n]`.

    Raises:
      ValueError: n is out of range.
    """
    if not 1 <= n <= 2**16:
        raise ValueError(f"n must be from 1 to 65536, not {n}")
    low = jnp.uint32((1 << max(1, (n - 1).bit_length())) - 1)

    def shuffle_once(key: jax.Array) -> jax.Array:
        words = (jax.random.bits(key, (n,), jnp.uint32) & ~low) | jnp.arange(n, dtype=jnp.uint32)
        return (jnp.sort(words) & low).astype(jnp.int32)

    first, second = jax.random.split(key)
    return shuffle_once(first)[shuffle_once(second)]
