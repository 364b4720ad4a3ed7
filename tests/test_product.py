"""A product with weights and its gradients against float64, and against what JAX derives."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.kernels.product import product

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


@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape):
    x, weights, gradient = inputs(*shape)
    a, b, g = (np.asarray(part, np.float64) for part in (x, weights, gradient))
    wanted = a @ b, (g @ b.T, a.reshape(-1, shape[0]).T @ g.reshape(-1, shape[1]))
    chex.assert_trees_all_close(with_gradients(product)(x, weights, gradient), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_as_jax_derives_it(shape, dtype):
    found, wanted = (with_gradients(f)(*inputs(*shape, dtype)) for f in (product, jnp.matmul))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_trees_all_close(found, wanted, rtol=1e-6 if dtype == jnp.float32 else 0.02, atol=1e-5)


def test_lanes_have_gradients_of_their_own():
    lanes = [inputs(5, 3), jax.tree.map(lambda part: 2 * part + 1, inputs(5, 3))]
    together = jax.vmap(with_gradients(product))(*jax.tree.map(lambda *parts: jnp.stack(parts), *lanes))
    apart = [with_gradients(product)(*lane) for lane in lanes]
    chex.assert_trees_all_close(together, jax.tree.map(lambda *parts: jnp.stack(parts), *apart), rtol=1e-6)
