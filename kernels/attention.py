"""Causal attention that keeps no `[places, places]` probabilities for its backward pass, and skips most masked ones.

Probabilities are computed again when they are needed (Dao et al., 2022, "FlashAttention").
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

QUERIES = 256
"""Places whose attention is computed at a time."""


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, block: int = QUERIES, first: jax.Array | None = None
) -> jax.Array:
    """`softmax(q k^T / sqrt(d)) v` where each place sees itself and those before it: `[B, T, heads, d]`.

    Differentiable once. The products are in the inputs' precision, the softmax in float32.

    Args:
        query, key, value: `[B, T, heads, d]`.
        block: places at a time, each time with the keys up to the last of them.
        first: int `[B, T]`, the first place that each one sees, at most itself; 0 unless given.

    Returns:
        what attention reads at each place, in the inputs' dtype.
    """
    length = query.shape[1]
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    spans = [(start, min(start + block, length)) for start in range(0, length, block)]
    parts = [
        _attend(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], _seen(start, stop, first))
        for start, stop in spans
    ]
    return jnp.swapaxes(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2), 1, 2)


def _seen(start, stop, first):
    """Which of the keys before `stop` the places from `start` to it see, `[B or 1, 1, queries, keys]`."""
    causal = jnp.tril(jnp.ones((stop - start, stop), bool), start)[None, None]
    return causal if first is None else causal & (jnp.arange(stop) >= first[:, None, start:stop, None])


@jax.custom_vjp
def _attend(query, key, value, seen):
    """Attention of the last places, `[B, heads, queries, d]`: heads first is what XLA's CPU backend is fast with."""
    return jnp.einsum("bhqk,bhkd->bhqd", _probabilities(query, key, seen).astype(value.dtype), value)


def _probabilities(query, key, seen):
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(seen, scores / np.sqrt(query.shape[-1]), -jnp.inf))


def _forward(query, key, value, seen):
    return _attend(query, key, value, seen), (query, key, value, seen)


def _backward(residuals, gradient):
    query, key, value, seen = residuals
    probabilities = _probabilities(query, key, seen)
    by_value = jnp.einsum("bhqk,bhqd->bhkd", probabilities.astype(gradient.dtype), gradient)
    by_probabilities = jnp.einsum("bhqd,bhkd->bhqk", gradient, value, preferred_element_type=jnp.float32)
    mean = jnp.sum(probabilities * by_probabilities, axis=-1, keepdims=True)
    by_scores = (probabilities * (by_probabilities - mean) / np.sqrt(query.shape[-1])).astype(query.dtype)
    by_query = jnp.einsum("bhqk,bhkd->bhqd", by_scores, key)
    by_key = jnp.einsum("bhqk,bhqd->bhkd", by_scores, query)
    return by_query, by_key, by_value, None


_attend.defvjp(_forward, _backward)
