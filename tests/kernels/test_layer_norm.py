"""Layer normalisation and its gradients against float64, and against flax's."""

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
    """The result, and its gradients, from the normalisation's Jacobian, written out, in float64."""
    x, scale, bias, weights = (np.asarray(a, np.float64) for a in (x, scale, bias, weights))
    width = x.shape[-1]
    centred = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(-1) + EPSILON)[..., None]
    normal = centred / deviation
    jacobian = (np.eye(width) - 1 / width - normal[..., :, None] * normal[..., None, :] / width) / deviation[..., None]
    by_x = np.einsum("btij,bti->btj", jacobian, weights * scale)
    return normal * scale + bias, (by_x, (weights * normal).sum((0, 1)), weights.sum((0, 1)))


@jax.jit
def mine(x, scale, bias, weights):
    result, back = jax.vjp(lambda *a: layer_norm(*a, EPSILON, x.dtype), x, scale, bias)
    return result, back(weights)


def by_flax(x, scale, bias, weights):
    module = nn.LayerNorm(epsilon=EPSILON, dtype=x.dtype)
    result, back = jax.vjp(lambda x, s, b: module.apply({"params": {"scale": s, "bias": b}}, x), x, scale, bias)
    return result, back(weights)


def test_against_float64():
    chex.assert_trees_all_close(mine(*inputs()), reference(*inputs()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_as_flaxs_does(dtype):
    found, wanted = mine(*inputs(dtype)), jax.jit(by_flax)(*inputs(dtype))
    chex.assert_trees_all_equal_shapes_and_dtypes(found, wanted)
    chex.assert_trees_all_close(found, wanted, rtol=1e-7, atol=1e-4 if dtype == jnp.float32 else 0.05)


def test_a_constant_row_becomes_the_bias():
    x, scale, bias, _ = inputs()
    np.testing.assert_allclose(mine(np.ones_like(x), scale, bias, x)[0][0, 0], bias, atol=1e-3)


@pytest.mark.parametrize("way", [sum_by_product, sum_by_reduction])
def test_sums_of_rows_either_way(way):
    """One is for CPUs, and the other for all else."""
    x = np.random.default_rng(0).normal(3, 1, (2, 5, 700)).astype(np.float32)
    found = np.asarray(way(x))
    assert found.shape == (2, 5, 1)
    np.testing.assert_allclose(found, x.astype(np.float64).sum(-1, keepdims=True), rtol=1e-6)


@pytest.mark.parametrize(("platform", "products"), [("cpu", 4), ("cuda", 0), ("tpu", 0)])
def test_sums_are_products_on_cpus_alone(platform, products):
    """With the gradient: two each way."""
    given = [jax.ShapeDtypeStruct(np.shape(x), jnp.float32) for x in inputs()[:3]]

    def gradient(x, scale, bias):
        return jax.grad(lambda x: jnp.sum(layer_norm(x, scale, bias, 1e-5, jnp.float32) ** 2))(x)

    module = export.export(jax.jit(gradient), platforms=[platform])(*given).mlir_module()
    assert module.count("stablehlo.dot_general") == products
