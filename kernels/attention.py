"""Causal attention with a backward rule that stores no `[queries, keys]` probabilities, and attention's entropy.

The backward pass computes the probabilities again (Dao et al., 2022, "FlashAttention").
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

QUERIES = 256
"""Number of queries whose attention is computed at a time."""


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, block: int = QUERIES, first: jax.Array | None = None
) -> jax.Array:
    """Returns `softmax(q k^T / sqrt(d)) v`, where each token attends to itself and the tokens before it.

    Differentiable once. The products are in the inputs' dtype, the softmax is in float32.

    Args:
        query, key, value: `[B, T, heads, d]`.
        block: number of queries at a time. A block is computed with the keys up to its last query only, so that most
            masked products are skipped.
        first: int `[B, T]`, the index of the first token that each token attends to, at most its own; 0 by default.

    Returns:
        the attention's output `[B, T, heads, d]`, in the inputs' dtype.
    """
    length = query.shape[1]
    query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    spans = [(start, min(start + block, length)) for start in range(0, length, block)]
    parts = [
        _attend(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], _mask(start, stop, first))
        for start, stop in spans
    ]
    return jnp.swapaxes(parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2), 1, 2)


def attention_entropy(query: jax.Array, key: jax.Array, first: jax.Array | None = None) -> jax.Array:
    """Returns the mean entropy of causal attention over sequences, queries and heads, in nats, float32.

    Args:
        query, key: `[B, T, heads, d]`.
        first: as for `causal_attention`.
    """
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32) / np.sqrt(query.shape[-1])
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if first is not None:
        mask &= jnp.arange(key.shape[1]) >= first[:, None, :, None]
    logits = jax.nn.log_softmax(jnp.where(mask, scores, -jnp.inf))
    return -jnp.mean(jnp.sum(jnp.where(mask, jnp.exp(logits) * logits, 0.0), axis=-1))


def _mask(start, stop, first):
    """Returns which keys before `stop` the queries from `start` to `stop` attend to, `[B or 1, 1, queries, keys]`."""
    causal = jnp.tril(jnp.ones((stop - start, stop), bool), start)[None, None]
    return causal if first is None else causal & (jnp.arange(stop) >= first[:, None, start:stop, None])


# The heads are the second axis, `[B, heads, queries, d]`, because XLA's CPU backend is fast with this layout.
@jax.custom_vjp
def _attend(query, key, value, mask):
    return jnp.einsum("bhqk,bhkd->bhqd", _probabilities(query, key, mask).astype(value.dtype), value)


def _probabilities(query, key, mask):
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    return jax.nn.softmax(jnp.where(mask, scores / np.sqrt(query.shape[-1]), -jnp.inf))


def _forward(query, key, value, mask):
    return _attend(query, key, value, mask), (query, key, value, mask)


def _backward(residuals, gradient):
    query, key, value, mask = residuals
    probabilities = _probabilities(query, key, mask)
    by_value = jnp.einsum("bhqk,bhqd->bhkd", probabilities.astype(gradient.dtype), gradient)
    by_probabilities = jnp.einsum("bhqd,bhkd->bhqk", gradient, value, preferred_element_type=jnp.float32)
    mean = jnp.sum(probabilities * by_probabilities, axis=-1, keepdims=True)
    by_scores = (probabilities * (by_probabilities - mean) / np.sqrt(query.shape[-1])).astype(query.dtype)
    by_query = jnp.einsum("bhqk,bhkd->bhqd", by_scores, key)
    by_key = jnp.einsum("bhqk,bhqd->bhkd", by_scores, query)
    return by_query, by_key, by_value, None


_attend.defvjp(_forward, _backward)
