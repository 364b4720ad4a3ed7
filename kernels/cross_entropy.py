"""Cross entropy of a linear classifier over a large vocabulary, without its `[tokens, vocabulary]` logits.

As the weights of the tokens are known beforehand, so is the gradient: each block of tokens leaves its share of it
behind as soon as its logits are there (Hsu et al., 2024, "Liger Kernel"), and nothing is computed twice.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

BLOCK_ENTRIES = 2**26
"""The most logits held at a time: 256 MiB in float32. A quarter of them would cost a third more time on a CPU."""


class CrossEntropy(NamedTuple):
    """Attributes:
    loss: weighted sum over the tokens, scalar; the part whose gradient costs nothing more.
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

    Differentiable once, by `hidden`, `embedding` and `weights`; `losses` and `square` for the cost of their logits once
    more. The products are in the inputs' precision, all else in float32.

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
        block = block_of(tokens, vocabulary)
    return _cross_entropy(min(tokens, block), hidden, embedding, labels, weights, jnp.float32(smoothing))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(block, *inputs):
    return _losses(block, *inputs)


def _forward(block, *inputs):
    inputs = tuple(each.value for each in inputs)
    result, gradients = _losses_and_gradients(block, *inputs)
    return result, (gradients, inputs)


def _backward(block, kept, cotangent):
    gradients, inputs = kept
    if all(isinstance(one, SymbolicZero) for one in (cotangent.losses, cotangent.square)):
        by_hidden, by_embedding, by_weights = ((cotangent.loss * g).astype(g.dtype) for g in gradients)
        return by_hidden, by_embedding, None, by_weights, None
    # Which weights the tokens' gradients have was not known beforehand, so they are computed again.
    hidden, embedding, labels, weights, smoothing = inputs
    of_loss, of_losses, of_square = (_dense(one) for one in cotangent)
    by_loss = of_loss * weights + of_losses
    by_square = jnp.full_like(weights, of_square / (weights.shape[0] * embedding.shape[0]))
    (by_hidden, by_embedding), outputs = _gradients(block, hidden, embedding, labels, by_loss, smoothing, by_square)
    return by_hidden, by_embedding, None, (of_loss * outputs.losses).astype(weights.dtype), None


def _dense(cotangent):
    zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if zero else cotangent


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _losses(block, hidden, embedding, labels, weights, smoothing):
    def one(_, rows):
        logits = _Logits(rows, embedding, smoothing)
        return None, (logits.losses, logits.squares)

    _, outputs = jax.lax.scan(one, None, split(block, hidden, labels, weights))
    return _result(weights, *outputs)


def _losses_and_gradients(block, hidden, embedding, labels, weights, smoothing):
    by_inputs, outputs = _gradients(block, hidden, embedding, labels, weights, smoothing)
    result = _result(weights, outputs.losses, outputs.squares)
    return result, (*by_inputs, result.losses)


class _Outputs(NamedTuple):
    """Of each token, `[N]`."""

    losses: jax.Array
    squares: jax.Array


def _gradients(block, hidden, embedding, labels, by_loss, smoothing, by_square=None):
    """The gradient of `sum_n by_loss_n H_n + by_square_n |logits_n|^2` by hidden and embedding; and what it is of."""

    def one(by_embedding, rows):
        logits = _Logits(rows[:3], embedding, smoothing)
        by_logits = logits.gradient
        if by_square is not None:
            by_logits += 2.0 * rows[3][:, None] * logits.values
        by_logits = by_logits.astype(hidden.dtype)
        by_hidden = jnp.einsum("nv,vd->nd", by_logits, embedding)
        by_embedding += jnp.einsum("nv,nd->vd", by_logits, rows[0], preferred_element_type=jnp.float32)
        return by_embedding, (logits.losses, logits.squares, by_hidden)

    zeros = jnp.zeros(embedding.shape, jnp.float32)
    rows = split(block, *(x for x in (hidden, labels, by_loss, by_square) if x is not None))
    by_embedding, (losses, squares, by_hidden) = jax.lax.scan(one, zeros, rows)
    tokens = hidden.shape[0]
    by_hidden = by_hidden.reshape(-1, hidden.shape[1])[:tokens]
    outputs = _Outputs(losses.reshape(-1)[:tokens], squares.reshape(-1)[:tokens])
    return (by_hidden, by_embedding.astype(embedding.dtype)), outputs


class _Logits:
    """The logits of a block of tokens, `[block, V]`, and what follows from them."""

    def __init__(self, rows, embedding, smoothing):
        hidden, self._labels, self._weights = rows
        self._smoothing = smoothing
        self.values = jnp.einsum("nd,vd->nv", hidden, embedding, preferred_element_type=jnp.float32)
        self._largest = self.values.max(axis=1, keepdims=True)
        self._exponentials = jnp.exp(self.values - self._largest)
        self._total = self._exponentials.sum(axis=1, keepdims=True)

    @property
    def losses(self) -> jax.Array:
        of_label = jnp.take_along_axis(self.values, self._labels[:, None], axis=1)[:, 0]
        normalizer = (jnp.log(self._total) + self._largest)[:, 0]
        return normalizer - (1.0 - self._smoothing) * of_label - self._smoothing * self.values.mean(axis=1)

    @property
    def squares(self) -> jax.Array:
        """Mean squared logit of each token, `[block]`."""
        return (self.values**2).mean(axis=1)

    @property
    def gradient(self) -> jax.Array:
        """Returns the gradient of the weighted losses with respect to the logits, `[block, V]`."""
        vocabulary = self.values.shape[1]
        is_label = jnp.arange(vocabulary) == self._labels[:, None]
        wanted = (1.0 - self._smoothing) * is_label + self._smoothing / vocabulary
        return self._weights[:, None] * (self._exponentials / self._total - wanted)


def block_of(tokens: int, vocabulary: int) -> int:
    """How many tokens at a time make equal parts of at most `BLOCK_ENTRIES` logits."""
    parts = -(-tokens * vocabulary // BLOCK_ENTRIES)
    return -(-tokens // parts // 8) * 8


def split(block, *rows):
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
