"""Sums over bfloat16 values, each one compared with float64 on the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxpr_equations import equations

import jaxaudit as ja
from jaxaudit.core.optimizer import Optimizer
from jaxaudit.core.taps import Taps
from jaxaudit.kernels.attention import causal_attention
from jaxaudit.kernels.layers import layer_norm
from jaxaudit.kernels.output_layer import cross_entropy, token_log_probability
from jaxaudit.models import gpt2

pytestmark = pytest.mark.exhaustive

TOLERANCE = 1e-2
"""The largest allowed error, relative to the Frobenius norm. Summing frequent tokens' rows in bfloat16 gave 24%."""


def bfloat16_values(*shape, seed=0, mean=0.0):
    """Returns random values in bfloat16. With a mean other than zero, sums in bfloat16 grow and lose small terms."""
    return jnp.asarray(np.random.default_rng(seed).normal(mean, 1, shape), jnp.bfloat16)


def as_float64(x):
    return np.asarray(x, np.float64)


def relative_error(result, exact):
    assert result.shape == exact.shape
    return np.linalg.norm(as_float64(result) - exact) / np.linalg.norm(exact)


def assert_close(results, exact):
    for result, expected in zip(results, exact, strict=True):
        assert relative_error(result, expected) < TOLERANCE


def test_layer_norm_and_its_gradients_are_accurate():
    x, scale, bias, weights = (
        bfloat16_values(2048, 64, mean=3),
        jnp.ones(64) * 1.5,
        jnp.ones(64),
        bfloat16_values(2048, 64, seed=1, mean=1),
    )
    result, vjp = jax.vjp(lambda *a: layer_norm(*a, 1e-5, jnp.bfloat16), x, scale, bias)
    z, w = as_float64(x), as_float64(weights)
    inverse = 1 / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
    normal, grad_normal = (z - z.mean(-1, keepdims=True)) * inverse, 1.5 * w
    mean = grad_normal.mean(-1, keepdims=True)
    grad_x = inverse * (grad_normal - mean - normal * (grad_normal * normal).mean(-1, keepdims=True))
    assert_close([result, *vjp(weights)], [1.5 * normal + 1, grad_x, (w * normal).sum(0), w.sum(0)])


def test_attention_and_its_gradients_are_accurate():
    query, key, value, weights = (bfloat16_values(1, 2, 256, 16, seed=seed, mean=seed / 3) for seed in range(4))
    q, k, v, w = map(as_float64, (query, key, value, weights))
    result, vjp = jax.vjp(attend, query, key, value)
    scores = np.where(np.tril(np.ones((256, 256), bool)), q @ k.swapaxes(-1, -2) / 4, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    grad_p = w @ v.swapaxes(-1, -2)
    grad_scores = p * (grad_p - (p * grad_p).sum(-1, keepdims=True)) / 4
    gradients = [grad_scores @ k, grad_scores.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ w]
    assert_close([result, *vjp(weights)], [p @ v, *gradients])


def attend(query, key, value):
    """Computes attention of `[B, heads, T, d]`."""
    transposed = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
    return jnp.swapaxes(causal_attention(*transposed), 1, 2)


@pytest.mark.parametrize("block", [None, 500])
def test_the_loss_and_log_probabilities_are_accurate(block):
    """The distribution of tokens is as skewed as that of words."""
    count, entries, width = 4000, 200, 32
    frequencies = 1 / np.arange(1, entries + 1)
    tokens = np.random.default_rng(0).choice(entries, count, p=frequencies / frequencies.sum())
    hidden, embedding, weights = (
        bfloat16_values(count, width, mean=0.3),
        bfloat16_values(entries, width, seed=1),
        np.full(count, 1 / count),
    )
    h, e = as_float64(hidden), as_float64(embedding)
    logits = h @ e.T
    log_probs = logits - logits.max(1, keepdims=True)
    log_probs -= np.log(np.exp(log_probs).sum(1, keepdims=True))
    token_log_probs, entropy = log_probs[np.arange(count), tokens], -(np.exp(log_probs) * log_probs).sum(1)
    grad_logits = (np.exp(log_probs) - np.eye(entries)[tokens]) / count
    gradients = [grad_logits @ e, grad_logits.T @ h]

    def loss(hidden, embedding):
        return cross_entropy(hidden, embedding, tokens, jnp.float32(weights), block=block).loss

    def negative(hidden, embedding):
        return -jnp.mean(token_log_probability(hidden, embedding, tokens, block=block)[0])

    for function in (loss, negative):
        value, grads = jax.value_and_grad(function, (0, 1))(hidden, embedding)
        assert_close([value, *grads], [-token_log_probs.mean(), *gradients])
    assert_close(token_log_probability(hidden, embedding, tokens, block=block), [token_log_probs, entropy])


def test_gradients_over_thousands_of_rows_are_accurate():
    x, weights = bfloat16_values(8192, 24, mean=1), bfloat16_values(8192, 16, seed=1, mean=1)
    layer = gpt2.dense(16, 0.02, jnp.bfloat16, "layer")
    params = layer.init(jax.random.key(0), x)
    grads = jax.grad(lambda p: jnp.sum((layer.apply(p, x) * weights).astype(jnp.float32)))(params)["params"]
    assert grads["bias"].dtype == grads["kernel"].dtype == jnp.float32
    assert_close([grads["kernel"], grads["bias"]], [as_float64(x).T @ as_float64(weights), as_float64(weights).sum(0)])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_clipping_norms_and_moments_are_accurate(dtype):
    """The gradients have either type, over as many steps as the second moment remembers."""
    gradients = bfloat16_values(1000, 3000, mean=0.1)
    optimizer = Optimizer(optax.scale_by_adam(b1=0.9, b2=0.999), 1e-3, max_norm=1.0)
    params = {"w": jnp.zeros(3000)}

    def step(carry, gradient):
        params, state, update = optimizer.update(*carry, {"w": gradient.astype(dtype)}, Taps())
        return (params, state), (update.gradient_norm, update.update_norm)

    (params, state), (norms, _) = jax.lax.scan(step, (params, optimizer.init(params)), gradients)
    exact = as_float64(gradients)
    expected_norms = np.linalg.norm(exact, axis=1)
    clipped = exact / np.maximum(expected_norms, 1.0)[:, None]
    first, second, w = np.zeros(3000), np.zeros(3000), np.zeros(3000)
    for t, g in enumerate(clipped, 1):
        first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2
        w -= 1e-3 * (first / (1 - 0.9**t)) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
    assert state.mu["w"].dtype == state.nu["w"].dtype == params["w"].dtype == norms.dtype == jnp.float32
    assert_close([norms, state.mu["w"], state.nu["w"], params["w"]], [expected_norms, first, second, w])


def language_model(corpus):
    settings = {"context": 16, "batch_size": 2, "accumulation": 2, "held_out": 2}
    return ja.learners.language_model(corpus, size="nano", precision="bfloat16", **settings)


def grpo(_):
    settings = {"prompts": 2, "group_size": 2, "performance_rows": 2, "warm_start": 2, "warm_start_rows": 2}
    return ja.learners.grpo("hop", precision="bfloat16", **settings)


@pytest.mark.parametrize("make", [language_model, pytest.param(grpo, marks=pytest.mark.exhaustive)])
def test_a_learners_sums_and_state_are_float32(make, corpus):
    """The sum that is the derivative of a broadcast has the broadcast's type, and a GPU may accumulate in that type."""
    learner = make(corpus)

    def step(state, key, data):
        return learner.step(state, key, Taps(0, 10, data=data))

    traced = jax.make_jaxpr(step)(learner.state_shapes, jax.random.key(0), learner.shapes.tree)
    sums = [e for e in equations(traced.jaxpr) if e.primitive.name in ("reduce_sum", "cumsum", "scatter-add")]
    assert sums
    assert jnp.bfloat16 not in {equation.outvars[0].aval.dtype for equation in sums}
    floats = [x for x in jax.tree.leaves(learner.state_shapes) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}


def test_gradients_of_position_embeddings_are_accurate():
    """The gradients of position embeddings over a batch. `test_embedding.py` tests those of tokens."""
    positions, weights = gpt2.Embedding(10, 8, dtype=jnp.bfloat16), bfloat16_values(4000, 6, 8, mean=1)
    params = {"params": {"embedding": jnp.ones((10, 8))}}

    def weighted(params):
        return jnp.sum((positions.apply(params, weights.shape, method="first") * weights).astype(jnp.float32))

    gradient = jax.grad(weighted)(params)["params"]["embedding"]
    assert gradient.dtype == jnp.float32
    assert relative_error(gradient, np.pad(as_float64(weights).sum(0), ((0, 4), (0, 0)))) < 1e-5
