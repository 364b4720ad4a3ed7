"""Causal attention against float64 NumPy, and its gradients against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.attention import causal_attention


def inputs(length, dtype=jnp.float32, heads=3, width=8):
    keys = jax.random.split(jax.random.key(length), 4)
    return [3 * jax.random.normal(key, (2, length, heads, width), dtype) for key in keys]


def reference(query, key, value):
    """Float64, all places at once."""
    query, key, value = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (query, key, value))
    scores = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3)


def plain(query, key, value):
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize(("length", "block"), [(1, 4), (4, 4), (11, 4), (12, 4), (7, 256)])
def test_against_float64_and_jaxs_own_gradient(length, block):
    *arrays, weights = inputs(length)
    loss = lambda function: lambda *arrays: jnp.sum(weights * function(*arrays))  # noqa: E731
    blocked = lambda *arrays: causal_attention(*arrays, block=block)  # noqa: E731
    np.testing.assert_allclose(jax.jit(blocked)(*arrays), reference(*arrays), rtol=1e-4, atol=1e-5)
    mine = jax.jit(jax.grad(loss(blocked), argnums=(0, 1, 2)))(*arrays)
    wanted = jax.jit(jax.grad(loss(plain), argnums=(0, 1, 2)))(*arrays)
    for a, b in zip(mine, wanted, strict=True):
        scale = jnp.abs(b).max()
        np.testing.assert_allclose(a / scale, b / scale, rtol=1e-3, atol=1e-5)


def test_a_place_sees_nothing_behind_it():
    query, key, value, _ = inputs(10)
    attention = jax.jit(lambda *arrays: causal_attention(*arrays, block=4))
    changed = attention(query, key.at[:, 6:].set(1e4), value.at[:, 6:].set(1e4))
    np.testing.assert_array_equal(changed[:, :6], attention(query, key, value)[:, :6])


def test_in_half_precision_gradients_are_near_those_in_whole():
    *arrays, weights = inputs(12, jnp.bfloat16)
    loss = lambda *arrays: jnp.sum((weights * causal_attention(*arrays, block=4)).astype(jnp.float32))  # noqa: E731
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    half = gradients(*arrays)
    whole = gradients(*(x.astype(jnp.float32) for x in arrays))
    for a, b in zip(half, whole, strict=True):
        assert a.dtype == jnp.bfloat16
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(a.astype(jnp.float32) / scale, b / scale, atol=0.03)


def test_no_probabilities_are_kept_for_the_backward_pass():
    *arrays, weights = inputs(64)
    back = jax.eval_shape(lambda *arrays: jax.vjp(lambda *a: causal_attention(*a, block=16), *arrays)[1], *arrays)
    kept = [x.size for x in jax.tree.leaves(back)]
    assert 0 < max(kept) <= weights.size
