"""Losses of a linear output layer over a large vocabulary, without its `[tokens, vocabulary]` logits in memory.

Logits are computed for a block of tokens at a time. The weights of the tokens' cross entropies are known in the forward
pass, and so is their gradient: each block adds its share of the gradient as soon as it has its logits, so that nothing
is computed twice (Hsu et al., 2024, "Liger Kernel"). Log-probabilities have no weights, so that the backward pass
computes their logits again, unless the vocabulary is small enough to hold all logits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

BLOCK_ENTRIES = 2**26
"""The largest number of logits in a block: 256 MiB in float32. A quarter would take a third more time on a CPU."""

HELD_ENTRIES = 2**22
"""The largest number of logits of which `token_log_probability` holds all: 16 MiB in float32."""


class CrossEntropy(NamedTuple):
    """The cross entropy of tokens.

    Attributes:
      loss: weighted sum over the tokens, scalar. Its gradient adds no cost.
      losses: cross entropy of each token, `[N]`, without its weight.
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
    """Returns `sum_n w_n H(q_n, softmax(h_n E^T))`, where q_n = (1 - smoothing) onehot(label) + smoothing / V.

    Differentiable once, with respect to `hidden`, `embedding` and `weights`. The gradients of `losses` and `square`
    compute the logits again. The products are in the inputs' dtype, all else is in float32.

    Args:
        hidden: `[N, D]`.
        embedding: `[V, D]`.
        labels: int, `[N]`, each from 0 to V - 1.
        weights: float32 `[N]`; 1 / N makes the loss a mean.
        smoothing: scalar in [0, 1] (Szegedy et al., 2016), without a gradient.
        block: number of tokens in a block; by default equal blocks of at most `BLOCK_ENTRIES` logits.
    """
    tokens, vocabulary = hidden.shape[0], embedding.shape[0]
    if block is None:
        block = _block_size(tokens, vocabulary)
    return _cross_entropy(min(tokens, block), hidden, embedding, labels, weights, jnp.float32(smoothing))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(block, *inputs):
    return _losses(block, *inputs)


def _cross_entropy_forward(block, *inputs):
    inputs = tuple(each.value for each in inputs)
    result, gradients = _losses_and_gradients(block, *inputs)
    return result, (gradients, inputs)


def _cross_entropy_backward(block, residuals, cotangent):
    gradients, inputs = residuals
    if all(isinstance(part, SymbolicZero) for part in (cotangent.losses, cotangent.square)):
        by_hidden, by_embedding, by_weights = ((cotangent.loss * g).astype(g.dtype) for g in gradients)
        return by_hidden, by_embedding, None, by_weights, None
    # The weights of the tokens' gradients were not known in the forward pass, so that they are computed again.
    hidden, embedding, labels, weights, smoothing = inputs
    of_loss, of_losses, of_square = (_dense(part) for part in cotangent)
    by_loss = of_loss * weights + of_losses
    by_square = jnp.full_like(weights, of_square / (weights.shape[0] * embedding.shape[0]))
    (by_hidden, by_embedding), outputs = _gradients(block, hidden, embedding, labels, by_loss, smoothing, by_square)
    return by_hidden, by_embedding, None, (of_loss * outputs.losses).astype(weights.dtype), None


def _dense(cotangent):
    zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if zero else cotangent


_cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward, symbolic_zeros=True)


def _losses(block, hidden, embedding, labels, weights, smoothing):
    def block_losses(_, rows):
        logits = _Logits(rows, embedding, smoothing)
        return None, (logits.losses, logits.squares)

    _, outputs = jax.lax.scan(block_losses, None, _split(block, hidden, labels, weights))
    return _result(weights, *outputs)


def _losses_and_gradients(block, hidden, embedding, labels, weights, smoothing):
    by_inputs, outputs = _gradients(block, hidden, embedding, labels, weights, smoothing)
    result = _result(weights, outputs.losses, outputs.squares)
    return result, (*by_inputs, result.losses)


class _Outputs(NamedTuple):
    """Loss and mean squared logit of each token, `[N]`."""

    losses: jax.Array
    squares: jax.Array


def _gradients(block, hidden, embedding, labels, by_loss, smoothing, by_square=None):
    """Returns the gradient of `sum_n by_loss_n H_n + by_square_n |logits_n|^2` by hidden and embedding, and H_n."""

    def block_gradients(by_embedding, rows):
        logits = _Logits(rows[:3], embedding, smoothing)
        by_logits = logits.gradient
        if by_square is not None:
            by_logits += 2.0 * rows[3][:, None] * logits.values
        by_logits = by_logits.astype(hidden.dtype)
        by_hidden = jnp.einsum("nv,vd->nd", by_logits, embedding)
        by_embedding += jnp.einsum("nv,nd->vd", by_logits, rows[0], preferred_element_type=jnp.float32)
        return by_embedding, (logits.losses, logits.squares, by_hidden)

    zeros = jnp.zeros(embedding.shape, jnp.float32)
    rows = _split(block, *(x for x in (hidden, labels, by_loss, by_square) if x is not None))
    by_embedding, (losses, squares, by_hidden) = jax.lax.scan(block_gradients, zeros, rows)
    tokens = hidden.shape[0]
    by_hidden = by_hidden.reshape(-1, hidden.shape[1])[:tokens]
    outputs = _Outputs(losses.reshape(-1)[:tokens], squares.reshape(-1)[:tokens])
    return (by_hidden, by_embedding.astype(embedding.dtype)), outputs


class _Logits:
    """The logits of a block of tokens, `[block, V]`, with their losses and gradient."""

    def __init__(self, rows, embedding, smoothing):
        hidden, self._labels, self._weights = rows
        self._smoothing = smoothing
        self.values = jnp.einsum("nd,vd->nv", hidden, embedding, preferred_element_type=jnp.float32)
        self._largest = self.values.max(axis=1, keepdims=True)
        self._exponentials = jnp.exp(self.values - self._largest)
        self._total = self._exponentials.sum(axis=1, keepdims=True)

    @property
    def losses(self) -> jax.Array:
        label_logits = jnp.take_along_axis(self.values, self._labels[:, None], axis=1)[:, 0]
        normalizer = (jnp.log(self._total) + self._largest)[:, 0]
        return normalizer - (1.0 - self._smoothing) * label_logits - self._smoothing * self.values.mean(axis=1)

    @property
    def squares(self) -> jax.Array:
        """The mean squared logit of each token, `[block]`."""
        return (self.values**2).mean(axis=1)

    @property
    def gradient(self) -> jax.Array:
        """The gradient of the weighted losses with respect to the logits, `[block, V]`."""
        vocabulary = self.values.shape[1]
        is_label = jnp.arange(vocabulary) == self._labels[:, None]
        target = (1.0 - self._smoothing) * is_label + self._smoothing / vocabulary
        return self._weights[:, None] * (self._exponentials / self._total - target)


def _result(weights, losses, squares):
    tokens = weights.shape[0]
    losses, squares = losses.reshape(-1)[:tokens], squares.reshape(-1)[:tokens]
    return CrossEntropy(jnp.sum(weights * losses), losses, squares.mean())


def token_log_probability(
    hidden: jax.Array,
    embedding: jax.Array,
    tokens: jax.Array,
    temperature: jax.Array | float = 1.0,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns each token's log-probability under softmax(h E^T / temperature), and the distribution's entropy in nats.

    Differentiable once, with respect to `hidden` and `embedding`, through both results. The products are in the inputs'
    dtype, all else is in float32.

    Args:
        hidden: `[N, D]`.
        embedding: `[V, D]`.
        tokens: int `[N]`, each from 0 to V - 1.
        temperature: scalar, without a gradient.
        block: number of tokens in a block. By default all logits are held if they are at most `HELD_ENTRIES`; otherwise
            there are equal blocks of at most `BLOCK_ENTRIES` logits.

    Returns:
        log-probabilities and entropies, float32 `[N]` each.
    """
    count, vocabulary = hidden.shape[0], embedding.shape[0]
    temperature = jax.lax.stop_gradient(jnp.float32(temperature))
    if block is None and count * vocabulary <= HELD_ENTRIES:
        return _unblocked_log_probability(hidden, embedding, tokens, temperature)
    if block is None:
        block = _block_size(count, vocabulary)
    return _log_probability(min(block, count), hidden, embedding, tokens, temperature)


def _unblocked_log_probability(hidden, embedding, tokens, temperature):
    logits = _scaled_logits(hidden, embedding, temperature)
    log_probs = jax.nn.log_softmax(logits)
    # A product instead of an index, whose gradient is a scatter, which XLA's CPU backend computes entry by entry.
    by_token = jnp.sum(jnp.where(jnp.arange(logits.shape[1]) == tokens[:, None], log_probs, 0.0), axis=1)
    return by_token, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_probability(block, hidden, embedding, tokens, temperature):
    return _log_probability_forward(block, hidden, embedding, tokens, temperature)[0]


def _log_probability_forward(block, hidden, embedding, tokens, temperature):
    def block_outputs(_, rows):
        logits = _scaled_logits(rows[0], embedding, temperature)
        normalizer = jax.nn.logsumexp(logits, axis=1)
        log_probs = logits - normalizer[:, None]
        by_token = jnp.take_along_axis(log_probs, rows[1][:, None], axis=1)[:, 0]
        return None, (by_token, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1), normalizer)

    _, outputs = jax.lax.scan(block_outputs, None, _split(block, hidden, tokens))
    by_token, entropy, normalizer = (x.reshape(-1)[: hidden.shape[0]] for x in outputs)
    return (by_token, entropy), (hidden, embedding, tokens, temperature, normalizer, entropy)


def _log_probability_backward(block, residuals, cotangents):
    hidden, embedding, tokens, temperature, normalizer, entropy = residuals

    def block_gradients(by_embedding, rows):
        hidden, tokens, normalizer, entropy, by_log_prob, by_entropy = rows
        log_probs = _scaled_logits(hidden, embedding, temperature) - normalizer[:, None]
        probs = jnp.exp(log_probs)
        is_token = jnp.arange(log_probs.shape[1]) == tokens[:, None]
        by_logits = by_log_prob[:, None] * (is_token - probs)
        by_logits -= by_entropy[:, None] * probs * (log_probs + entropy[:, None])
        by_logits = (by_logits / temperature).astype(hidden.dtype)
        by_embedding += jnp.einsum("nv,nd->vd", by_logits, hidden, preferred_element_type=jnp.float32)
        return by_embedding, jnp.einsum("nv,vd->nd", by_logits, embedding)

    rows = _split(block, hidden, tokens, normalizer, entropy, *cotangents)
    by_embedding, by_hidden = jax.lax.scan(block_gradients, jnp.zeros(embedding.shape, jnp.float32), rows)
    by_hidden = by_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
    return by_hidden, by_embedding.astype(embedding.dtype), None, jnp.zeros_like(temperature)


_log_probability.defvjp(_log_probability_forward, _log_probability_backward)


def _scaled_logits(hidden, embedding, temperature):
    return jnp.einsum("nd,vd->nv", hidden, embedding, preferred_element_type=jnp.float32) / temperature


def _block_size(tokens: int, vocabulary: int) -> int:
    """Returns the number of tokens in each of several equal blocks of at most `BLOCK_ENTRIES` logits."""
    blocks = -(-tokens * vocabulary // BLOCK_ENTRIES)
    return -(-tokens // blocks // 8) * 8


def _split(block, *arrays):
    """Splits arrays `[N, ...]` into blocks, `[blocks, block, ...]`, the last of which is padded with zeros."""

    def split(x):
        blocks = -(-x.shape[0] // block)
        padded = jnp.pad(x, [(0, blocks * block - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
        return padded.reshape(blocks, block, *x.shape[1:])

    return tuple(split(x) for x in arrays)
