"""Log-probabilities and entropies over a vocabulary, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.output_layer import token_log_probability

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 21, 6, 13, 0.7


def case(seed=0):
    """Returns hidden states, an embedding, tokens, and weights of both outputs in a loss."""
    random = np.random.default_rng(seed)
    hidden, embedding = random.normal(size=(TOKENS, WIDTH)), random.normal(size=(VOCABULARY, WIDTH))
    tokens = random.integers(0, VOCABULARY, TOKENS)
    return [np.float32(x) for x in (hidden, embedding)] + [
        np.int32(tokens),
        np.float32(random.normal(size=(2, TOKENS))),
    ]


def log_probs_of(hidden, embedding, temperature=TEMPERATURE):
    """Returns log-probabilities in float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(embedding, np.float64).T / temperature
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def reference(hidden, embedding, tokens, weights):
    """Returns both outputs, and the gradients of their weighted sum by the inputs, from their definitions."""
    log_probs = log_probs_of(hidden, embedding)
    probs, is_token = np.exp(log_probs), np.eye(VOCABULARY)[tokens]
    entropy = -(probs * log_probs).sum(1)
    weight_of_log_prob, weight_of_entropy = np.asarray(weights, np.float64)[..., None]
    grad_logits = weight_of_log_prob * (is_token - probs) - weight_of_entropy * probs * (log_probs + entropy[:, None])
    grad_logits /= TEMPERATURE
    return (log_probs * is_token).sum(1), entropy, grad_logits @ embedding, grad_logits.T @ hidden


@functools.partial(jax.jit, static_argnames="block")
def compute_with_gradients(hidden, embedding, tokens, weights, block):
    def loss(hidden, embedding):
        outputs = token_log_probability(hidden, embedding, tokens, TEMPERATURE, block)
        return sum(jnp.sum(w * x) for w, x in zip(weights, outputs, strict=True)), outputs

    gradients, outputs = jax.grad(loss, (0, 1), has_aux=True)(hidden, embedding)
    return *outputs, *gradients


@pytest.mark.parametrize("block", [None, 1, 8, 64])
def test_both_outputs_and_their_gradients_are_those_of_float64(block):
    for actual, expected in zip(compute_with_gradients(*case(), block=block), reference(*case()), strict=True):
        assert np.abs(actual - expected).max() < 1e-5 * np.abs(expected).max()


def test_vmapped_lanes_may_share_hidden_states():
    """Lanes have different embeddings and the same hidden states."""
    hidden, embedding, tokens, weights = case()
    embeddings = np.stack([embedding, 2 * embedding])
    lanes = jax.vmap(lambda e: compute_with_gradients(hidden, e, tokens, weights, block=8))(embeddings)
    for lane, lane_embedding in enumerate(embeddings):
        for actual, expected in zip(lanes, reference(hidden, lane_embedding, tokens, weights), strict=True):
            assert np.abs(actual[lane] - expected).max() < 1e-5 * np.abs(expected).max()


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    def gradients(hidden, embedding, tokens):
        return jax.grad(lambda *inputs: sum(map(jnp.sum, token_log_probability(*inputs, tokens))), (0, 1))(
            hidden, embedding
        )

    def temporaries(count, vocabulary=80_000):
        hidden, embedding = (jax.ShapeDtypeStruct((n, 16), np.float32) for n in (count, vocabulary))
        shapes = (hidden, embedding, jax.ShapeDtypeStruct((count,), np.int32))
        return jax.jit(gradients).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(65_536), temporaries(262_144)
    assert small < 4 * 65_536 * 80_000 / 10
    assert large - small < 8 * 4 * 16 * (262_144 - 65_536)
