"""Rows of an embedding and their gradients, against sums in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels import layers

ENTRIES, WIDTH = 50, 8


def zipf(shape, seed=0):
    """Returns tokens with a skewed distribution."""
    frequencies = 1 / np.arange(1, ENTRIES + 1)
    return np.random.default_rng(seed).choice(ENTRIES, shape, p=frequencies / frequencies.sum())


def sum_rows(tokens, rows):
    total = np.zeros((ENTRIES, WIDTH))
    np.add.at(total, tokens, np.asarray(rows, np.float64))
    return total


def relative_error(actual, exact):
    return np.linalg.norm(np.asarray(actual, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("max_entries", [2**25, ENTRIES * 300, 7 * 4000])
@pytest.mark.parametrize("method", [layers.scatter_rows, layers.multiply_rows])
def test_sums_of_rows_have_the_tables_type(method, max_entries, dtype, monkeypatch):
    monkeypatch.setattr(layers, "MOST_ONE_HOT", max_entries)
    tokens = zipf(4000)
    rows = jnp.asarray(np.random.default_rng(1).normal(1, 1, (4000, WIDTH)), dtype)
    sums = method(jnp.asarray(tokens), rows, entries=ENTRIES, dtype=jnp.float32)
    assert (sums.shape, sums.dtype) == ((ENTRIES, WIDTH), jnp.float32)
    assert relative_error(sums, sum_rows(tokens, rows)) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_lookup_is_exact(dtype):
    """This holds for vmapped lanes. The gradient that JAX derives in bfloat16 is off by a third."""
    table = jax.random.normal(jax.random.key(0), (3, ENTRIES, WIDTH))
    tokens, weights = zipf((3, 20, 200)), jax.random.uniform(jax.random.key(1), (3, 20, 200, WIDTH)).astype(dtype)

    def loss(table, tokens, weights, lookup=layers.lookup):
        return jnp.sum((lookup(table, tokens, dtype) * weights).astype(jnp.float32))

    gradient = jax.jit(jax.vmap(jax.grad(loss)))(table, tokens, weights)
    derived = jax.vmap(jax.grad(lambda *x: loss(*x, lambda t, i, _: t.astype(dtype)[i])))(table, tokens, weights)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(jax.grad(loss)(table[0], tokens[0], weights[0]), gradient[0])  # also without jit
    for lane in range(3):
        exact = sum_rows(tokens[lane].reshape(-1), weights[lane].reshape(-1, WIDTH))
        assert relative_error(gradient[lane], exact) < 1e-6
        assert (relative_error(derived[lane], exact) > 0.05) == (dtype == jnp.bfloat16)


def test_lookups_return_the_tables_rows():
    table = jax.random.normal(jax.random.key(0), (ENTRIES, WIDTH))
    tokens = jnp.array([[3, 0], [ENTRIES - 1, ENTRIES]])
    rows = np.asarray(layers.lookup(table, tokens, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_array_equal(rows[0, 0], np.asarray(table[3].astype(jnp.bfloat16).astype(jnp.float32)))
    np.testing.assert_array_equal(rows[1, 0], np.asarray(table[-1].astype(jnp.bfloat16).astype(jnp.float32)))
    assert np.isnan(rows[1, 1]).all()
