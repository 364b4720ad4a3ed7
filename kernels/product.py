"""A product with weights, with a backward rule of its own.

As it is derived, the weights' gradient is a product of transposed rows for which XLA's CPU backend has no fast form
(measured by `kernels.py` in experiments/benchmarks), and whose bfloat16 form sums in bfloat16 from jaxlib 0.11 on.
"""

from __future__ import annotations

import jax


@jax.custom_vjp
def product(x: jax.Array, weights: jax.Array) -> jax.Array:
    """`x @ weights`: `[..., inputs]` and `[inputs, outputs]` to `[..., outputs]`.

    Differentiable once.
    """
    return x @ weights


def _forward(x, weights):
    return x @ weights, (x, weights)


def _backward(residuals, gradient):
    x, weights = residuals
    rows = tuple(range(x.ndim - 1))
    by_x = jax.lax.dot_general(gradient, weights, (((x.ndim - 1,), (1,)), ((), ())))
    if x.shape[-1] <= gradient.shape[-1]:
        return by_x, jax.lax.dot_general(x, gradient, ((rows, rows), ((), ())))
    # The narrower of the two is transposed; without the barrier XLA turns that around.
    turned = jax.lax.dot_general(gradient, x, ((rows, rows), ((), ())))
    return by_x, jax.lax.optimization_barrier(turned).T


product.defvjp(_forward, _backward)
