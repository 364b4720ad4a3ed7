"""The exact divergence of two linear classifiers over a vocabulary, without their `[tokens, vocabulary]` logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxaudit.kernels.cross_entropy import block_of, split


def vocabulary_kl(
    hidden_p: jax.Array,
    embedding_p: jax.Array,
    hidden_q: jax.Array,
    embedding_q: jax.Array,
    temperature: jax.Array | float = 1.0,
    block: int | None = None,
) -> jax.Array:
    """KL(p || q) of each token, in nats, p = softmax(h_p E_p^T / temperature) and q likewise: float32 `[N]`.

    Not meant to be differentiated: the logits would be kept.

    Args:
        hidden_p, hidden_q: `[N, D]`; the two may differ in D.
        embedding_p, embedding_q: `[V, D]`.
        temperature: scalar, of both.
        block: tokens at a time; unless given, equal parts of at most `BLOCK_ENTRIES` logits.
    """
    count, vocabulary = hidden_p.shape[0], embedding_p.shape[0]

    def one(_, rows):
        logs = (
            jax.nn.log_softmax(jnp.einsum("nd,vd->nv", h, e, preferred_element_type=jnp.float32) / temperature)
            for h, e in zip(rows, (embedding_p, embedding_q), strict=True)
        )
        p, q = logs
        return None, jnp.sum(jnp.exp(p) * (p - q), axis=1)

    block = min(count, block_of(count, vocabulary) if block is None else block)
    return jax.lax.scan(one, None, split(block, hidden_p, hidden_q))[1].reshape(-1)[:count]
