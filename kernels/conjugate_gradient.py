"""Conjugate gradients for a matrix known by its products with vectors: no factorisation, so no LAPACK."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

PyTree = Any


def conjugate_gradient(product: Callable[[PyTree], PyTree], b: PyTree, steps: int, tolerance: float = 1e-7) -> PyTree:
    """The solution x of `A x = b` after at most `steps` steps from x = 0 (Hestenes and Stiefel, 1952).

    A system that has converged stays as it is for the rest of the steps: their number is fixed, so that systems
    solved side by side under `vmap` do not wait for the slowest. A `b` of zero gives zero, one with a NaN gives NaN.
    The sums are float32 where `b` is: bring `b` to a length near one before squares could leave its range.

    Args:
        product: `A v` for a `v` like `b`; A symmetric and positive definite.
        b: a pytree of floating-point arrays.
        steps: products to compute, the only cost that matters.
        tolerance: the length of the residual, relative to that of `b`, at which a system has converged.

    Returns:
        x, a pytree like `b`.
    """

    def step(_: int, carry: tuple[PyTree, PyTree, PyTree, jax.Array]):
        x, residual, direction, squared = carry
        image = product(direction)
        converged = squared <= limit
        length = jnp.where(converged, 0.0, squared / inner(direction, image))
        x = along(x, length, direction)
        residual = along(residual, -length, image)
        after = inner(residual, residual)
        turn = jnp.where(converged, 0.0, after / squared)
        return x, residual, along(residual, turn, direction), after

    squared = inner(b, b)
    limit = tolerance**2 * squared
    start = (jax.tree.map(jnp.zeros_like, b), b, b, squared)
    return jax.lax.fori_loop(0, steps, step, start)[0]


def inner(a: PyTree, b: PyTree) -> jax.Array:
    """The inner product of two like pytrees, a scalar."""
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda u, v: jnp.sum(u * v), a, b))


def along(start: PyTree, length: ArrayLike, direction: PyTree) -> PyTree:
    """`start + length * direction`, for like pytrees and a scalar."""
    return jax.tree.map(lambda s, d: s + length * d, start, direction)
