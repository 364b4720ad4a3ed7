"""Cross entropy of a linear classifier over a large vocabulary, without its `[tokens, vocabulary]` logits.

As the weights of the tokens are known beforehand, so is the gradient: each block of tokens leaves its share of it
behind as soon as its logits are there (Hsu et al., 2024, "Liger Kernel"), and nothing is computed twice.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK_ENTRIES = 2**26
"""The most logits held at a time: 256 MiB in float32. A quarter of them would cost a third more time on a CPU."""


class CrossEntropy(NamedTuple):
    """Attributes:
    loss: weighted sum over the tokens, scalar; the only part that is differentiable.
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

    Differentiable once, by `hidden`, `embedding` and `weights`. The products are in the inputs' precision, all else in
    float32.

    Args:
        hidden: `[N, D]`.
        embedding: `[V, D]`.
        labels: int, `[N]`, each from 0 to V - 1.
        weights: float32 `[N]`; 1 / N makes the loss a mean.
        smoothing: scalar in [0, 1] (Szegedy et al., 2016); a constant to the gradient.
        block: tokens at a time; unless given, equal parts of at most `BLOCK_ENTRIES` logits.

    Returns:
        what `CrossEntropy` says.
    """
    tokens, vocabulary = hidden.shape[0], embedding.shape[0]
    if block is None:
        parts = -(-tokens * vocabulary // BLOCK_ENTRIES)
        block = -(-tokens // parts // 8) * 8
    return _cross_entropy(min(tokens, block), hidden, embedding, labels, weights, jnp.float32(smoothing))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(block, *inputs):
    return _losses(block, *inputs)


def _forward(block, *inputs):
    return _losses_and_gradients(block, *inputs)


def _backward(block, gradients, cotangent):
    by_hidden, by_embedding, by_weights = ((cotangent.loss * g).astype(g.dtype) for g in gradients)
    return by_hidden, by_embedding, None, by_weights, None


_cross_entropy.defvjp(_forward, _backward)


def _losses(block, hidden, embedding, labels, weights, smoothing):
    def one(_, rows):
        logits = _Logits(rows, embedding, smoothing)
        return None, (logits.losses, logits.squares)

    _, outputs = jax.lax.scan(one, None, _split(block, hidden, labels, weights))
    return _result(weights, *outputs)


def _losses_and_gradients(block, hidden, embedding, labels, weights, smoothing):
    def one(by_embedding, rows):
        logits = _Logits(rows, embedding, smoothing)
        by_logits = logits.gradient.astype(hidden.dtype)
        by_hidden = jnp.einsum("nv,vd->nd", by_logits, embedding)
        by_embedding += jnp.einsum("nv,nd->vd", by_logits, rows[0], preferred_element_type=jnp.float32)
        return by_embedding, (logits.losses, logits.squares, by_hidden)

    zeros = jnp.zeros(embedding.shape, jnp.float32)
    by_embedding, outputs = jax.lax.scan(one, zeros, _split(block, hidden, labels, weights))
    losses, squares, by_hidden = outputs
    by_hidden = by_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    result = _result(weights, losses, squares)
    return result, (by_hidden, by_embedding.astype(embedding.dtype), result.losses)


class _Logits:
    """The logits of a block of tokens, `[block, V]`, and what follows from them."""

    def __init__(self, rows, embedding, smoothing):
        hidden, self._labels, self._weights = rows
        self._smoothing = smoothing
        self._logits = jnp.einsum("nd,vd->nv", hidden, embedding, preferred_element_type=jnp.float32)
        self._largest = self._logits.max(axis=1, keepdims=True)
        self._exponentials = jnp.exp(self._logits - self._largest)
        self._total = self._exponentials.sum(axis=1, keepdims=True)

    @property
    def losses(self) -> jax.Array:
        """Of each token, `[block]`."""
        of_label = jnp.take_along_axis(self._logits, self._labels[:, None], axis=1)[:, 0]
        normalizer = (jnp.log(self._total) + self._largest)[:, 0]
        return normalizer - (1.0 - self._smoothing) * of_label - self._smoothing * self._logits.mean(axis=1)

    @property
    def squares(self) -> jax.Array:
        """Mean squared logit of each token, `[block]`."""
        return (self._logits**2).mean(axis=1)

    @property
    def gradient(self) -> jax.Array:
        """Of the weighted losses by the logits, `[block, V]`."""
        vocabulary = self._logits.shape[1]
        is_label = jnp.arange(vocabulary) == self._labels[:, None]
        wanted = (1.0 - self._smoothing) * is_label + self._smoothing / vocabulary
        return self._weights[:, None] * (self._exponentials / self._total - wanted)


def _split(block, *rows):
    """Arrays `[N, ...]` as blocks, `[blocks, block, ...]`, the last filled up with zeros."""

    def split(x):
        blocks = -(-x.shape[0] // block)
        padded = jnp.pad(x, [(0, blocks * block - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
        return padded.reshape(blocks, block, *x.shape[1:])

    return tuple(split(x) for x in rows)


def _result(weights, losses, squares):
    tokens = weights.shape[0]
    losses, squares = losses.reshape(-1)[:tokens], squares.reshape(-1)[:tokens]
    return CrossEntropy(jnp.sum(weights * losses), losses, squares.mean())
