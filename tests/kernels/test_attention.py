"""Causal attention against float64 NumPy, and its gradients against those of JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.attention import causal_attention


def inputs(length, dtype=np.float32, heads=3, width=8):
    """Returns queries, keys, values, and weights of the results in a loss."""
    sampled = 3 * np.random.default_rng(length).normal(size=(4, 2, length, heads, width))
    return [jnp.asarray(x.astype(dtype)) for x in sampled]


def reference(query, key, value):
    """Computes attention in float64, at all positions at once."""
    query, key, value = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3)


def jax_attention(query, key, value, block):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@functools.partial(jax.jit, static_argnums=0, static_argnames="block")
def attend_with_gradients(function, *arrays, block=4):
    """Returns attention's result, and the gradients of a loss that weighs it with the last of the arrays."""

    def loss(*arguments):
        result = function(*arguments, block=block)
        return jnp.sum((arrays[-1] * result).astype(jnp.float32)), result

    (_, result), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays[:-1])
    return result, gradients


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, 4), (11, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 4), (12, 4), (7, 256)))],
)
def test_attention_is_that_of_float64_and_its_gradient_that_of_jax(length, block):
    arrays = inputs(length)
    result, gradients = attend_with_gradients(causal_attention, *arrays, block=block)
    np.testing.assert_allclose(result, reference(*arrays[:-1]), rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients, attend_with_gradients(jax_attention, *arrays)[1], strict=True):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-3, atol=1e-5)


def test_a_position_ignores_later_ones():
    query, key, value, weights = inputs(11)
    later = np.arange(11)[:, None, None] >= 6
    changed = attend_with_gradients(
        causal_attention, query, np.where(later, 1e4, key), np.where(later, 1e4, value), weights
    )[0]
    np.testing.assert_array_equal(
        changed[:, :6], attend_with_gradients(causal_attention, query, key, value, weights)[0][:, :6]
    )


def test_gradients_in_bfloat16_are_near_those_in_float32():
    arrays = inputs(11, jnp.bfloat16)
    bfloat16_gradients = attend_with_gradients(causal_attention, *arrays)[1]
    float32_gradients = attend_with_gradients(causal_attention, *(x.astype(jnp.float32) for x in arrays))[1]
    for a, b in zip(bfloat16_gradients, float32_gradients, strict=True):
        assert a.dtype == jnp.bfloat16
        scale = np.abs(b).max()
        np.testing.assert_allclose(np.float32(a) / scale, b / scale, atol=0.03)


def test_no_probabilities_are_stored_for_the_backward_pass():
    *arrays, weights = inputs(64)
    vjp_function = jax.eval_shape(
        lambda *arrays: jax.vjp(lambda *a: causal_attention(*a, block=16), *arrays)[1], *arrays
    )
    stored = [x.size for x in jax.tree.leaves(vjp_function)]
    assert 0 < max(stored) <= weights.size
