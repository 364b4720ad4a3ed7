"""A product with weights and its gradients, against float64 and against the gradients that JAX derives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.layers import product

SHAPES = [(5, 3), (3, 5), (4, 4)]
"""More inputs than outputs, fewer, and equally many."""


def inputs(inputs, outputs, dtype=jnp.float32):
    random = np.random.default_rng(0)
    shapes = [(2, 7, inputs), (inputs, outputs), (2, 7, outputs)]
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in shapes)


def with_gradients(function):
    def compute(x, weights, gradient):
        result, vjp_function = jax.vjp(function, x, weights)
        return result, vjp_function(gradient)

    return jax.jit(compute)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_gradients_are_those_of_float64(shape, dtype):
    """Sums are in float32 for any dtype, and are rounded to it once."""
    x, weights, gradient = inputs(*shape, dtype)

    def exact(a, b, g):
        return a @ b, g @ b.T, a.reshape(-1, shape[0]).T @ g.reshape(-1, shape[1])

    float64_inputs = [np.asarray(part, np.float64) for part in (x, weights, gradient)]
    results = jax.tree.leaves(with_gradients(product)(x, weights, gradient))
    terms = shape[0], shape[1], 2 * 7
    sizes = exact(*map(np.abs, float64_inputs))
    for result, expected, number, size in zip(results, exact(*float64_inputs), terms, sizes, strict=True):
        assert result.dtype == dtype
        # One rounding's error, and the error of summing `number` terms in any order (Higham 2002, section 3.1).
        tolerance = half_ulp(dtype) * np.abs(expected) + number * half_ulp(jnp.float32) * size
        np.testing.assert_array_less(np.abs(np.float64(result) - expected), tolerance)


def half_ulp(dtype):
    """Returns the largest relative error of rounding to a type."""
    return float(jnp.finfo(dtype).eps) / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_and_gradients_are_those_of_jax(shape, dtype):
    """In bfloat16 only shape and dtype agree: XLA of jaxlib 0.11 sums the derived gradient of weights in bfloat16."""
    actual, expected = (with_gradients(function)(*inputs(*shape, dtype)) for function in (product, jnp.matmul))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    if dtype == jnp.float32:
        chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-5)


def test_lanes_have_separate_gradients():
    lanes = [inputs(5, 3), jax.tree.map(lambda part: 2 * part + 1, inputs(5, 3))]
    vmapped = jax.vmap(with_gradients(product))(*jax.tree.map(lambda *parts: jnp.stack(parts), *lanes))
    separate = [with_gradients(product)(*lane) for lane in lanes]
    chex.assert_trees_all_close(vmapped, jax.tree.map(lambda *parts: jnp.stack(parts), *separate), rtol=1e-6)
