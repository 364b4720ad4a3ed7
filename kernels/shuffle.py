"""Random permutations by sorting one array of integers."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def shuffled(key: jax.Array, n: int) -> jax.Array:
    """A uniformly random order of 0, ..., n - 1.

    Random bits above, the index below, in one word: XLA's CPU backend sorts one array of words several times faster
    than the pairs `jax.random.permutation` sorts. Done twice, so that the words whose random bits tie, which keep
    their order, are not the same ones.

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

    def once(key: jax.Array) -> jax.Array:
        words = (jax.random.bits(key, (n,), jnp.uint32) & ~low) | jnp.arange(n, dtype=jnp.uint32)
        return (jnp.sort(words) & low).astype(jnp.int32)

    first, second = jax.random.split(key)
    return once(first)[once(second)]
