"""Log-probabilities and entropies over a vocabulary, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.output_layer import token_log_probability

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 21, 6, 13, 0.7


def case(seed=0):
    """Hidden states, embedding, tokens, and weights of both outputs in a loss."""
    random = np.random.default_rng(seed)
    hidden, embedding = random.normal(size=(TOKENS, WIDTH)), random.normal(size=(VOCABULARY, WIDTH))
    tokens = random.integers(0, VOCABULARY, TOKENS)
    return [np.float32(x) for x in (hidden, embedding)] + [
        np.int32(tokens),
        np.float32(random.normal(size=(2, TOKENS))),
    ]


def logs_of(hidden, embedding, temperature=TEMPERATURE):
    """Logarithms of the chances, float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(embedding, np.float64).T / temperature
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def reference(hidden, embedding, tokens, weights):
    """Both outputs, and the gradients of their weighted sum by the inputs, from their definitions."""
    logs = logs_of(hidden, embedding)
    chances, is_token = np.exp(logs), np.eye(VOCABULARY)[tokens]
    entropy = -(chances * logs).sum(1)
    by_token, by_entropy = np.asarray(weights, np.float64)[..., None]
    by_logits = by_token * (is_token - chances) - by_entropy * chances * (logs + entropy[:, None])
    by_logits /= TEMPERATURE
    return (logs * is_token).sum(1), entropy, by_logits @ embedding, by_logits.T @ hidden


@functools.partial(jax.jit, static_argnames="block")
def found(hidden, embedding, tokens, weights, block):
    def loss(hidden, embedding):
        outputs = token_log_probability(hidden, embedding, tokens, TEMPERATURE, block)
        return sum(jnp.sum(w * x) for w, x in zip(weights, outputs, strict=True)), outputs

    gradients, outputs = jax.grad(loss, (0, 1), has_aux=True)(hidden, embedding)
    return *outputs, *gradients


@pytest.mark.parametrize("block", [None, 1, 8, 64])
def test_both_outputs_and_their_gradients_are_those_of_float64(block):
    for mine, wanted in zip(found(*case(), block=block), reference(*case()), strict=True):
        assert np.abs(mine - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_lanes_share_what_they_share():
    """With embeddings of one's own and hidden states shared, as with hidden states of one's own."""
    hidden, embedding, tokens, weights = case()
    several = np.stack([embedding, 2 * embedding])
    lanes = jax.vmap(lambda e: found(hidden, e, tokens, weights, block=8))(several)
    for lane, own in enumerate(several):
        for mine, wanted in zip(lanes, reference(hidden, own, tokens, weights), strict=True):
            assert np.abs(mine[lane] - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    def differentiated(hidden, embedding, tokens):
        return jax.grad(lambda *of: sum(map(jnp.sum, token_log_probability(*of, tokens))), (0, 1))(hidden, embedding)

    def temporaries(count, vocabulary=80_000):
        hidden, embedding = (jax.ShapeDtypeStruct((n, 16), np.float32) for n in (count, vocabulary))
        given = (hidden, embedding, jax.ShapeDtypeStruct((count,), np.int32))
        return jax.jit(differentiated).lower(*given).compile().memory_analysis().temp_size_in_bytes

    some, more = temporaries(65_536), temporaries(262_144)
    assert some < 4 * 65_536 * 80_000 / 10
    assert more - some < 8 * 4 * 16 * (262_144 - 65_536)
