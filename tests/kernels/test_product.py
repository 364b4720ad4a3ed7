"""A product with weights and its gradients against float64, and against what JAX derives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.layers import product

SHAPES = [(5, 3), (3, 5), (4, 4)]
"""More inputs than outputs, fewer, and as many."""


def inputs(inputs, outputs, dtype=jnp.float32):
    random = np.random.default_rng(0)
    shapes = [(2, 7, inputs), (inputs, outputs), (2, 7, outputs)]
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def with_gradients(function):
    def found(x, weights, gradient):
        result, back = jax.vjp(function, x, weights)
        return result, back(gradient)

    return jax.jit(found)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype):
    """Sums are of float32, whatever the dtype, and are rounded to it once."""
    x, weights, gradient = inputs(*shape, dtype)

    def exact(a, b, g):
        return a @ b, g @ b.T, a.reshape(-1, shape[0]).T @ g.reshape(-1, shape[1])

    whole = [np.asarray(part, np.float64) for part in (x, weights, gradient)]
    found = jax.tree.leaves(with_gradients(product)(x, weights, gradient))
    terms = shape[0], shape[1], 2 * 7
    sizes = exact(*map(np.abs, whole))
    for mine, wanted, number, size in zip(found, exact(*whole), terms, sizes, strict=True):
        assert mine.dtype == dtype
        # What one rounding may change, and what summing so many terms in any order may (Higham 2002, section 3.1).
        allowed = half_ulp(dtype) * np.abs(wanted) + number * half_ulp(jnp.float32) * size
        np.testing.assert_array_less(np.abs(np.float64(mine) - wanted), allowed)


def half_ulp(dtype):
    """By how much, relatively, a number is changed at most when it is rounded."""
    return float(jnp.finfo(dtype).eps) / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_jax_derives_it(shape, dtype):
    """In bfloat16 by shape and dtype alone: XLA of jaxlib 0.11 sums the derived gradient of weights in bfloat16."""
    found, wanted = (with_gradients(f)(*inputs(*shape, dtype)) for f in (product, jnp.matmul))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    if dtype == jnp.float32:
        chex.assert_trees_all_close(found, wanted, rtol=1e-6, atol=1e-5)


def test_lanes_have_gradients_of_their_own():
    lanes = [inputs(5, 3), jax.tree.map(lambda part: 2 * part + 1, inputs(5, 3))]
    together = jax.vmap(with_gradients(product))(*jax.tree.map(lambda *parts: jnp.stack(parts), *lanes))
    apart = [with_gradients(product)(*lane) for lane in lanes]
    chex.assert_trees_all_close(together, jax.tree.map(lambda *parts: jnp.stack(parts), *apart), rtol=1e-6)
