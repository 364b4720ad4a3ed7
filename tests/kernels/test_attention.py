"""Causal attention against float64 NumPy, and its gradients against JAX's own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.attention import causal_attention


def inputs(length, dtype=np.float32, heads=3, width=8):
    """Queries, keys, values, and weights of the results in a loss."""
    drawn = 3 * np.random.default_rng(length).normal(size=(4, 2, length, heads, width))
    return [jnp.asarray(x.astype(dtype)) for x in drawn]


def reference(query, key, value):
    """Float64, all places at once."""
    query, key, value = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3)


def plain(query, key, value, block):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@functools.partial(jax.jit, static_argnums=0, static_argnames="block")
def outcome(function, *arrays, block=4):
    """What attention reads, and the gradients of a loss that weighs it with the last of the arrays."""

    def loss(*read):
        found = function(*read, block=block)
        return jnp.sum((arrays[-1] * found).astype(jnp.float32)), found

    (_, found), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays[:-1])
    return found, gradients


@pytest.mark.parametrize(
    ("length", "block"),
    [(1, 4), (11, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 4), (12, 4), (7, 256)))],
)
def test_against_float64_and_jaxs_own_gradient(length, block):
    arrays = inputs(length)
    found, mine = outcome(causal_attention, *arrays, block=block)
    np.testing.assert_allclose(found, reference(*arrays[:-1]), rtol=1e-4, atol=1e-5)
    for a, b in zip(mine, outcome(plain, *arrays)[1], strict=True):
        scale = np.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-3, atol=1e-5)


def test_a_place_sees_nothing_behind_it():
    query, key, value, weights = inputs(11)
    later = np.arange(11)[:, None, None] >= 6
    changed = outcome(causal_attention, query, np.where(later, 1e4, key), np.where(later, 1e4, value), weights)[0]
    np.testing.assert_array_equal(changed[:, :6], outcome(causal_attention, query, key, value, weights)[0][:, :6])


def test_in_half_precision_gradients_are_near_those_in_whole():
    arrays = inputs(11, jnp.bfloat16)
    half = outcome(causal_attention, *arrays)[1]
    whole = outcome(causal_attention, *(x.astype(jnp.float32) for x in arrays))[1]
    for a, b in zip(half, whole, strict=True):
        assert a.dtype == jnp.bfloat16
        scale = np.abs(b).max()
        np.testing.assert_allclose(np.float32(a) / scale, b / scale, atol=0.03)


def test_no_probabilities_are_kept_for_the_backward_pass():
    *arrays, weights = inputs(64)
    back = jax.eval_shape(lambda *arrays: jax.vjp(lambda *a: causal_attention(*a, block=16), *arrays)[1], *arrays)
    kept = [x.size for x in jax.tree.leaves(back)]
    assert 0 < max(kept) <= weights.size
