"""Blockwise cross entropy against float64 NumPy, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.output_layer import cross_entropy

TOKENS, WIDTH, VOCABULARY = 50, 12, 77


def case(seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    hidden = scale * random.normal(size=(TOKENS, WIDTH))
    embedding = random.normal(size=(VOCABULARY, WIDTH))
    labels = random.integers(0, VOCABULARY, TOKENS)
    weights = random.random(TOKENS)
    return [x.astype(np.float32) for x in (hidden, embedding)] + [labels.astype(np.int32), weights.astype(np.float32)]


def reference(hidden, embedding, labels, weights, smoothing):
    """Returns the loss, the tokens' losses, the mean squared logit, and gradients by both inputs, in float64."""
    hidden, embedding, weights = (np.asarray(x, np.float64) for x in (hidden, embedding, weights))
    logits = hidden @ embedding.T
    shifted = logits - logits.max(1, keepdims=True)
    log_probability = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    target = np.full_like(logits, smoothing / len(embedding))
    target[np.arange(len(labels)), labels] += 1 - smoothing
    losses = -(target * log_probability).sum(1)
    grad_logits = weights[:, None] * (np.exp(log_probability) - target)
    return (weights * losses).sum(), losses, (logits**2).mean(), grad_logits @ embedding, grad_logits.T @ hidden


@functools.partial(jax.jit, static_argnames="block")
def compute_with_gradients(hidden, embedding, labels, weights, smoothing=0.0, block=None):
    """Returns the result of `cross_entropy`, with and without differentiation, and the gradients by both inputs."""

    def loss(hidden, embedding):
        result = cross_entropy(hidden, embedding, labels, weights, smoothing, block)
        return result.loss, result

    (_, result), gradients = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, embedding)
    return (result, cross_entropy(hidden, embedding, labels, weights, smoothing, block)), gradients


@pytest.mark.parametrize("block", [None, 1, 7, pytest.param(16, marks=pytest.mark.slow), 50, 64])
@pytest.mark.parametrize("smoothing", [0.0, 0.2, 1.0])
def test_values_and_gradients_are_those_of_float64(block, smoothing):
    results, gradients = compute_with_gradients(*case(), smoothing, block=block)
    total, losses, square, grad_hidden, grad_embedding = reference(*case(), smoothing)
    for result in results:
        np.testing.assert_allclose(result.loss, total, rtol=1e-5)
        np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
        np.testing.assert_allclose(result.square, square, rtol=1e-5)
    for gradient, expected in zip(gradients, (grad_hidden, grad_embedding), strict=True):
        assert np.abs(gradient - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("block", [None, 7])
def test_losses_and_squared_logits_have_gradients(block):
    """A combination of all three outputs has the gradients of the float64 reference with other weights."""
    hidden, embedding, labels, weights = case(5)
    loss_weights = np.random.default_rng(6).normal(size=TOKENS).astype(np.float32)

    def combination(hidden, embedding, weights):
        result = cross_entropy(hidden, embedding, labels, weights, 0.1, block)
        return 2.0 * result.loss + jnp.sum(loss_weights * result.losses) + 3.0 * result.square

    grad_hidden, grad_embedding, grad_weights = jax.jit(jax.grad(combination, argnums=(0, 1, 2)))(
        hidden, embedding, weights
    )
    _, losses, _, *expected = reference(hidden, embedding, labels, 2.0 * np.float64(weights) + loss_weights, 0.1)
    hidden, embedding = np.float64(hidden), np.float64(embedding)
    grad_logits = 3.0 * 2.0 * hidden @ embedding.T / (TOKENS * VOCABULARY)
    for gradient, exact in zip(
        (grad_hidden, grad_embedding),
        (expected[0] + grad_logits @ embedding, expected[1] + grad_logits.T @ hidden),
        strict=True,
    ):
        assert np.abs(gradient - exact).max() < 1e-5 * np.abs(exact).max()
    np.testing.assert_allclose(grad_weights, 2.0 * losses, rtol=1e-5)


def test_the_gradient_of_the_loss_alone_needs_fewer_products():
    hidden, embedding, labels, weights = case(7)

    def operations(loss):
        gradient = jax.grad(lambda h: loss(cross_entropy(h, embedding, labels, weights)))
        return str(jax.make_jaxpr(gradient)(hidden)).count("dot_general")

    assert operations(lambda result: result.loss) == 3
    assert operations(lambda result: result.loss + result.losses.sum()) == 6


def test_large_logits_and_a_scaled_loss_have_exact_gradients():
    hidden, *rest = case(1, scale=300.0)
    gradient = jax.jit(jax.grad(lambda hidden: 7.0 * cross_entropy(hidden, *rest).loss))(hidden)
    expected = 7.0 * reference(hidden, *rest, 0.0)[3]
    assert np.abs(gradient - expected).max() < 1e-5 * np.abs(expected).max()


def test_lanes_may_have_different_smoothings():
    hidden, *rest = case(2)
    smoothings = np.float32([0.0, 0.3])

    def grad_hidden(smoothing):
        return jax.grad(lambda h: cross_entropy(h, *rest, smoothing, 16).loss)(hidden)

    for lane, smoothing in zip(jax.jit(jax.vmap(grad_hidden))(smoothings), smoothings, strict=True):
        expected = reference(hidden, *rest, float(smoothing))[3]
        assert np.abs(lane - expected).max() < 1e-5 * np.abs(expected).max()


def test_bfloat16_products_keep_the_inputs_types():
    hidden, embedding, *rest = case(3)
    rounded = [jnp.asarray(x.astype(jnp.bfloat16)) for x in (hidden, embedding)]
    (result, _), gradients = compute_with_gradients(*rounded, *rest)
    assert result.loss.dtype == jnp.float32
    assert all(x.dtype == jnp.bfloat16 for x in gradients)
    expected = reference(*(np.float32(x) for x in rounded), *rest, 0.0)
    np.testing.assert_allclose(result.loss, expected[0], rtol=1e-3)
    for gradient, exact in zip(gradients, expected[3:], strict=True):
        assert np.abs(np.float32(gradient) - exact).max() < 0.02 * np.abs(exact).max()


def test_the_gradient_by_weights_is_the_losses():
    hidden, embedding, labels, weights = case(4)
    gradient = jax.jit(jax.grad(lambda w: 3.0 * cross_entropy(hidden, embedding, labels, w, 0.1).loss))(weights)
    np.testing.assert_allclose(gradient, 3.0 * reference(hidden, embedding, labels, weights, 0.1)[1], rtol=1e-5)


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    def temporaries(tokens, vocabulary):
        hidden, embedding = (jax.ShapeDtypeStruct((n, 16), np.float32) for n in (tokens, vocabulary))
        labels, weights = (jax.ShapeDtypeStruct((tokens,), t) for t in (np.int32, np.float32))

        def loss(hidden, embedding, labels, weights):
            return cross_entropy(hidden, embedding, labels, weights).loss

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(hidden, embedding, labels, weights).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temporaries(65536, 5_000), temporaries(65536, 80_000)
    logits = 4 * 65536 * 80_000
    gradient = 4 * 16 * (80_000 - 5_000)
    assert large < logits / 10
    assert large - small < 3 * gradient
