"""Rows of an embedding and their gradients, against sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels import layers

ENTRIES, WIDTH = 50, 8


def zipf(shape, seed=0):
    """Tokens of which few are most."""
    chances = 1 / np.arange(1, ENTRIES + 1)
    return np.random.default_rng(seed).choice(ENTRIES, shape, p=chances / chances.sum())


def summed(tokens, rows):
    total = np.zeros((ENTRIES, WIDTH))
    np.add.at(total, tokens, np.asarray(rows, np.float64))
    return total


def off_by(found, exact):
    return np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("most", [2**25, ENTRIES * 300, 7 * 4000])
@pytest.mark.parametrize("way", [layers.scatter_rows, layers.multiply_rows])
def test_sums_of_rows_are_in_the_type_of_the_table(way, most, dtype, monkeypatch):
    monkeypatch.setattr(layers, "MOST_ONE_HOT", most)
    tokens = zipf(4000)
    rows = jnp.asarray(np.random.default_rng(1).normal(1, 1, (4000, WIDTH)), dtype)
    found = way(jnp.asarray(tokens), rows, entries=ENTRIES, dtype=jnp.float32)
    assert (found.shape, found.dtype) == ((ENTRIES, WIDTH), jnp.float32)
    assert off_by(found, summed(tokens, rows)) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_lookup(dtype):
    """Of lanes: in bfloat16 as it is derived, it is a third off."""
    table = jax.random.normal(jax.random.key(0), (3, ENTRIES, WIDTH))
    tokens, weights = zipf((3, 20, 200)), jax.random.uniform(jax.random.key(1), (3, 20, 200, WIDTH)).astype(dtype)

    def loss(table, tokens, weights, looked_up=layers.lookup):
        return jnp.sum((looked_up(table, tokens, dtype) * weights).astype(jnp.float32))

    found = jax.jit(jax.vmap(jax.grad(loss)))(table, tokens, weights)
    derived = jax.vmap(jax.grad(lambda *x: loss(*x, lambda t, i, _: t.astype(dtype)[i])))(table, tokens, weights)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(jax.grad(loss)(table[0], tokens[0], weights[0]), found[0])  # outside of a program
    for lane in range(3):
        exact = summed(tokens[lane].reshape(-1), weights[lane].reshape(-1, WIDTH))
        assert off_by(found[lane], exact) < 1e-6
        assert (off_by(derived[lane], exact) > 0.05) == (dtype == jnp.bfloat16)


def test_rows_are_those_of_the_table():
    table = jax.random.normal(jax.random.key(0), (ENTRIES, WIDTH))
    tokens = jnp.array([[3, 0], [ENTRIES - 1, ENTRIES]])
    found = np.asarray(layers.lookup(table, tokens, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(found[0, 0], np.asarray(table[3].astype(jnp.bfloat16).astype(jnp.float32)))
    np.testing.assert_array_equal(found[1, 0], np.asarray(table[-1].astype(jnp.bfloat16).astype(jnp.float32)))
    assert np.isnan(found[1, 1]).all()
