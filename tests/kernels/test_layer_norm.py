"""Layer normalization and its gradients against float64, and against those of flax."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxaudit.kernels.layers import layer_norm, sum_by_product, sum_by_reduction

EPSILON = 1e-5


def inputs(dtype=jnp.float32, width=40):
    random = np.random.default_rng(0)
    x, weights = random.normal(size=(2, 2, 7, width))
    scale, bias = random.normal(size=(2, width)).astype(np.float32)
    return (3.0 + 2.0 * x).astype(dtype), scale, bias, weights.astype(dtype)


def reference(x, scale, bias, weights):
    """Returns the result and its gradients in float64, from the explicit Jacobian of the normalization."""
    x, scale, bias, weights = (np.asarray(a, np.float64) for a in (x, scale, bias, weights))
    width = x.shape[-1]
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1) + EPSILON)[..., None]
    normal = centred / deviation
    jacobian = (np.eye(width) - 1 / width - normal[..., :, None] * normal[..., None, :] / width) / deviation[..., None]
    grad_x = np.einsum("btij,bti->btj", jacobian, weights * scale)
    return normal * scale + bias, (grad_x, (weights * normal).sum((0, 1)), weights.sum((0, 1)))


@jax.jit
def layer_norm_with_gradients(x, scale, bias, weights):
    result, vjp_function = jax.vjp(lambda *a: layer_norm(*a, EPSILON, x.dtype), x, scale, bias)
    return result, vjp_function(weights)


def flax_with_gradients(x, scale, bias, weights):
    module = nn.LayerNorm(epsilon=EPSILON, dtype=x.dtype)
    result, vjp_function = jax.vjp(lambda x, s, b: module.apply({"params": {"scale": s, "bias": b}}, x), x, scale, bias)
    return result, vjp_function(weights)


def test_layer_norm_is_that_of_float64():
    chex.assert_trees_all_close(layer_norm_with_gradients(*inputs()), reference(*inputs()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_layer_norm_is_that_of_flax(dtype):
    actual, expected = layer_norm_with_gradients(*inputs(dtype)), jax.jit(flax_with_gradients)(*inputs(dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-7, atol=1e-4 if dtype == jnp.float32 else 0.05)


def test_a_constant_row_becomes_the_bias():
    x, scale, bias, _ = inputs()
    np.testing.assert_allclose(layer_norm_with_gradients(np.ones_like(x), scale, bias, x)[0][0, 0], bias, atol=1e-3)


@pytest.mark.parametrize("method", [sum_by_product, sum_by_reduction])
def test_both_methods_sum_rows_exactly(method):
    """One method is for CPUs, and the other for all other devices."""
    x = np.random.default_rng(0).normal(3, 1, (2, 5, 700)).astype(np.float32)
    sums = np.asarray(method(x))
    assert sums.shape == (2, 5, 1)
    np.testing.assert_allclose(sums, x.astype(np.float64).sum(-1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(("platform", "products"), [("cpu", 4), ("cuda", 0), ("tpu", 0)])
def test_sums_are_matrix_products_only_on_cpus(platform, products):
    """The forward and the backward pass have two products each."""
    shapes = [jax.ShapeDtypeStruct(np.shape(x), jnp.float32) for x in inputs()[:3]]

    def gradient(x, scale, bias):
        return jax.grad(lambda x: jnp.sum(layer_norm(x, scale, bias, 1e-5, jnp.float32) ** 2))(x)

    module = export.export(jax.jit(gradient), platforms=[platform])(*shapes).mlir_module()
    assert module.count("stablehlo.dot_general") == products
