"""Causal attention that keeps no `[places, places]` probabilities for its backward pass, and skips most masked ones.

Probabilities are computed again when they are needed, and a row's sum of probability times gradient is that of output
times gradient (Dao et al., 2022, "FlashAttention").
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
    spans = [(start, min(start + block, length)) for start in range(0, length, block)]
    parts = [
        _attend(query[:, start:stop], key[:, :stop], value[:, :stop], None if first is None else first[:, start:stop])
        for start, stop in spans
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


@jax.custom_vjp
def _attend(query, key, value, first):
    """Attention of the last places of a text."""
    return jax.nn.dot_product_attention(query, key, value, mask=_seen(query, key, first))


def _forward(query, key, value, first):
    output = _attend(query, key, value, first)
    return output, (query, key, value, first, output)


def _backward(residuals, gradient):
    query, key, value, first, output = residuals
    scale = 1 / np.sqrt(query.shape[-1])
    scores = scale * jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(_seen(query, key, first), scores, -jnp.inf))
    by_value = jnp.einsum("bhqk,bqhd->bkhd", probabilities.astype(gradient.dtype), gradient)
    by_probabilities = jnp.einsum("bqhd,bkhd->bhqk", gradient, value, preferred_element_type=jnp.float32)
    mean = jnp.einsum("bqhd,bqhd->bhq", gradient, output, preferred_element_type=jnp.float32)
    by_scores = (scale * probabilities * (by_probabilities - mean[..., None])).astype(query.dtype)
    by_query = jnp.einsum("bhqk,bkhd->bqhd", by_scores, key)
    by_key = jnp.einsum("bhqk,bqhd->bkhd", by_scores, query)
    return by_query, by_key, by_value, None


_attend.defvjp(_forward, _backward)


def _seen(query, key, first):
    """Which keys the last places see, `[B or 1, 1, queries, keys]`."""
    queries, keys = query.shape[1], key.shape[1]
    causal = jnp.tril(jnp.ones((queries, keys), bool), keys - queries)[None, None]
    return causal if first is None else causal & (jnp.arange(keys) >= first[:, None, :, None])
