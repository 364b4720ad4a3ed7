"""Cross entropy of a linear classifier over a large vocabulary, without its `[tokens, vocabulary]` logits.

As the weights of the tokens are known beforehand, so is the gradient: each block of tokens leaves its share of it
behind as soon as its logits are there (Hsu et al., 2024, "Liger Kernel"), and nothing is computed twice.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK_ENTRIES = 2**24
"""Logits held at a time: 64 MiB in float32."""


class CrossEntropy(NamedTuple):
    """Attributes:
    loss: weighted sum over the tokens, scalar; the only part with a gradient.
    losses: of each token, `[N]`, without its weight.
    square: mean square of the logits, scalar.
    """

    loss: jax.Array
    losses: jax.Array
    square: jax.Array


def cross_entropy(
    hidden: jax.Array,
    embedding: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    smoothing: jax.Array | float = 0.0,
    block: int | None = None,
) -> CrossEntropy:
    """`sum_n w_n H(q_n, softmax(h_n E^T))`, q_n = (1 - smoothing) onehot(label) + smoothing / V.

    Differentiable once, by `hidden` and `embedding`. The products are in the inputs' precision, all else in float32.

    Args:
        hidden: `[N, D]`.
        embedding: `[V, D]`.
        labels: int, `[N]`, each from 0 to V - 1.
        weights: float32 `[N]`; 1 / N makes the loss a mean.
        smoothing: scalar in [0, 1] (Szegedy et al., 2016).
        block: tokens at a time; as many as have `BLOCK_ENTRIES` logits unless given.

    Returns:
        what `CrossEntropy` says.
    """
    tokens, vocabulary = hidden.shape[0], embedding.shape[0]
    block = min(tokens, block or max(8, BLOCK_ENTRIES // vocabulary // 8 * 8))
    return _cross_entropy(block, hidden, embedding, labels, weights, jnp.float32(smoothing))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(block, hidden, embedding, labels, weights, smoothing):
    return _blocks(block, hidden, embedding, labels, weights, smoothing, gradient=False)[0]


def _forward(block, hidden, embedding, labels, weights, smoothing):
    return _blocks(block, hidden, embedding, labels, weights, smoothing, gradient=True)


def _backward(block, gradients, cotangent):
    by_hidden, by_embedding = gradients
    scale = cotangent.loss
    return (scale * by_hidden).astype(by_hidden.dtype), (scale * by_embedding).astype(by_embedding.dtype), None, None, None


_cross_entropy.defvjp(_forward, _backward)


def _blocks(block, hidden, embedding, labels, weights, smoothing, gradient):
    """`CrossEntropy`, and the gradients by hidden and embedding where they are wanted."""
    tokens, width = hidden.shape
    vocabulary = embedding.shape[0]
    blocks = -(-tokens // block)

    def split(x):
        padded = jnp.pad(x, [(0, blocks * block - tokens), *[(0, 0)] * (x.ndim - 1)])
        return padded.reshape(blocks, block, *x.shape[1:])

    def one(by_embedding, rows):
        hidden, labels, weights = rows
        logits = jnp.einsum("nd,vd->nv", hidden, embedding, preferred_element_type=jnp.float32)
        largest = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
        exponents = jnp.exp(logits - largest)
        total = exponents.sum(axis=1, keepdims=True)
        normalizer = (jnp.log(total) + largest)[:, 0]
        label_logit = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
        losses = normalizer - (1.0 - smoothing) * label_logit - smoothing * logits.mean(axis=1)
        squares = (logits**2).mean(axis=1)
        if not gradient:
            return None, (losses, squares)
        is_label = jnp.arange(vocabulary) == labels[:, None]
        by_logits = weights[:, None] * (
            exponents / total - (1.0 - smoothing) * is_label - smoothing / vocabulary
        )
        by_logits = by_logits.astype(hidden.dtype)
        by_hidden = jnp.einsum("nv,vd->nd", by_logits, embedding)
        by_embedding += jnp.einsum("nv,nd->vd", by_logits, hidden, preferred_element_type=jnp.float32)
        return by_embedding, (losses, squares, by_hidden)

    start = jnp.zeros((vocabulary, width), jnp.float32) if gradient else None
    by_embedding, outputs = jax.lax.scan(one, start, (split(hidden), split(labels), split(weights)))
    outputs = [x.reshape(-1, *x.shape[2:])[:tokens] for x in outputs]
    losses, squares = outputs[:2]
    result = CrossEntropy(jnp.sum(weights * losses), losses, squares.mean())
    return result, (outputs[2], by_embedding.astype(embedding.dtype)) if gradient else None
