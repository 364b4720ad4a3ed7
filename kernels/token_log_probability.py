"""Log-probabilities of tokens and entropies under a linear classifier over a vocabulary.

For a small vocabulary all logits are held. For a large one a block of tokens at a time, computed again in the backward
pass, so that `[tokens, vocabulary]` never is.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxaudit.kernels.cross_entropy import block_of, split

HELD_ENTRIES = 2**22
"""Up to so many logits are held whole: 16 MiB in float32."""


def token_log_probability(
    hidden: jax.Array,
    embedding: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array | float = 1.0,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Each token's log-probability under softmax(h E^T / temperature), and that distribution's entropy, in nats.

    Differentiable once, by `hidden` and `embedding`, through both. The products are in the inputs' precision, all else
    in float32.

    Args:
        hidden: `[N, D]`.
        embedding: `[V, D]`.
        tokens: int `[N]`, each from 0 to V - 1.
        temperature: scalar; a constant to the gradient.
        block: tokens at a time; unless given all, or where that makes over `HELD_ENTRIES` logits, equal parts of at
            most `BLOCK_ENTRIES`.

    Returns:
        log-probabilities and entropies, float32 `[N]` each.
    """
    count, vocabulary = hidden.shape[0], embedding.shape[0]
    temperature = jax.lax.stop_gradient(jnp.float32(temperature))
    if block is None and count * vocabulary <= HELD_ENTRIES:
        return _whole(hidden, embedding, tokens, temperature)
    if block is None:
        block = block_of(count, vocabulary)
    return _blocked(min(block, count), hidden, embedding, tokens, temperature)


def _whole(hidden, embedding, tokens, temperature):
    logits = _logits(hidden, embedding, temperature)
    logs = jax.nn.log_softmax(logits)
    # A product, and not an index, whose gradient would scatter: XLA's CPU backend does that entry by entry.
    of_token = jnp.sum(jnp.where(jnp.arange(logits.shape[1]) == tokens[:, None], logs, 0.0), axis=1)
    return of_token, -jnp.sum(jnp.exp(logs) * logs, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(block, hidden, embedding, tokens, temperature):
    return _forward(block, hidden, embedding, tokens, temperature)[0]


def _forward(block, hidden, embedding, tokens, temperature):
    def one(_, rows):
        logits = _logits(rows[0], embedding, temperature)
        normalizer = jax.nn.logsumexp(logits, axis=1)
        logs = logits - normalizer[:, None]
        of_token = jnp.take_along_axis(logs, rows[1][:, None], axis=1)[:, 0]
        return None, (of_token, -jnp.sum(jnp.exp(logs) * logs, axis=1), normalizer)

    _, found = jax.lax.scan(one, None, split(block, hidden, tokens))
    of_token, entropy, normalizer = (x.reshape(-1)[: hidden.shape[0]] for x in found)
    return (of_token, entropy), (hidden, embedding, tokens, temperature, normalizer, entropy)


def _backward(block, kept, cotangents):
    hidden, embedding, tokens, temperature, normalizer, entropy = kept

    def one(by_embedding, rows):
        hidden, tokens, normalizer, entropy, by_token, by_entropy = rows
        logs = _logits(hidden, embedding, temperature) - normalizer[:, None]
        chances = jnp.exp(logs)
        is_token = jnp.arange(logs.shape[1]) == tokens[:, None]
        by_logits = by_token[:, None] * (is_token - chances)
        by_logits -= by_entropy[:, None] * chances * (logs + entropy[:, None])
        by_logits = (by_logits / temperature).astype(hidden.dtype)
        by_embedding += jnp.einsum("nv,nd->vd", by_logits, hidden, preferred_element_type=jnp.float32)
        return by_embedding, jnp.einsum("nv,vd->nd", by_logits, embedding)

    rows = split(block, hidden, tokens, normalizer, entropy, *cotangents)
    by_embedding, by_hidden = jax.lax.scan(one, jnp.zeros(embedding.shape, jnp.float32), rows)
    by_hidden = by_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return by_hidden, by_embedding.astype(embedding.dtype), None, jnp.zeros_like(temperature)


_blocked.defvjp(_forward, _backward)


def _logits(hidden, embedding, temperature):
    return jnp.einsum("nd,vd->nv", hidden, embedding, preferred_element_type=jnp.float32) / temperature
