"""Linear algebra without LAPACK: orthogonal matrices, conjugate gradients, singular values, ranks and linear CKA.

On XLA's CPU backend a batched LAPACK call waits for threads of the pool it runs in. Two such calls at once can wait for
each other for ever (observed with jaxlib 0.10). The functions here use products of matrices and vectors only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

PyTree = Any


def orthogonal(key: jax.Array, shape: tuple[int, int], scale: float = 1.0) -> jax.Array:
    """Draws a matrix with orthonormal rows or columns, whichever are fewer, times `scale`, from the Haar distribution.

    It applies Gram-Schmidt, twice per vector, to a Gaussian matrix (Giraud et al., 2005: twice is enough).

    Args:
        key: PRNG key.
        shape: (rows, columns).
        scale: gain.

    Returns:
        float32, of the shape `shape`.
    """
    rows, columns = shape
    few, many = min(shape), max(shape)
    gaussian = jax.random.normal(key, (few, many))

    def orthogonalise(index: int, basis: jax.Array) -> jax.Array:
        before = (jnp.arange(few) < index)[:, None]
        vector = basis[index]
        for _ in range(2):
            earlier = jnp.where(before, basis, 0.0)
            coefficients = jnp.matmul(earlier, vector, precision=jax.lax.Precision.HIGHEST)
            vector = vector - jnp.matmul(coefficients, earlier, precision=jax.lax.Precision.HIGHEST)
            vector = vector / jnp.sqrt(jnp.sum(vector**2))
        return basis.at[index].set(vector)

    basis = jax.lax.fori_loop(0, few, orthogonalise, gaussian)
    return scale * (basis if rows <= columns else basis.T)


def conjugate_gradient(product: Callable[[PyTree], PyTree], b: PyTree, steps: int, tolerance: float = 1e-7) -> PyTree:
    """Returns the solution x of `A x = b` after at most `steps` steps from x = 0 (Hestenes and Stiefel, 1952).

    A system that has converged stays unchanged for the rest of the steps. Their number is fixed, so that systems solved
    in parallel under `vmap` do not wait for the slowest. A `b` of zero results in zero, and a `b` with a NaN in NaN.
    The sums are float32 if `b` is; scale `b` to a norm near one if its squares could leave the range of float32.

    Args:
        product: maps a `v` like `b` to `A v`, where A is symmetric and positive definite.
        b: a pytree of floating-point arrays.
        steps: number of products to compute, which determine the cost.
        tolerance: norm of the residual, relative to that of `b`, at which a system has converged.

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
        new_squared = inner(residual, residual)
        beta = jnp.where(converged, 0.0, new_squared / squared)
        return x, residual, along(residual, beta, direction), new_squared

    squared = inner(b, b)
    limit = tolerance**2 * squared
    start = (jax.tree.map(jnp.zeros_like, b), b, b, squared)
    return jax.lax.fori_loop(0, steps, step, start)[0]


def inner(a: PyTree, b: PyTree) -> jax.Array:
    """Returns the inner product of two pytrees of the same structure, a scalar."""
    return jax.tree.reduce(jnp.add, jax.tree.map(lambda u, v: jnp.sum(u * v), a, b))


def along(start: PyTree, length: ArrayLike, direction: PyTree) -> PyTree:
    """Returns `start + length * direction`, for pytrees of the same structure and a scalar."""
    return jax.tree.map(lambda s, d: s + length * d, start, direction)


_POINTS = 7
"""Number of points that a bisection evaluates at a time, which divide a bracket into 8 parts: three bits."""

_PASSES = 9
"""Number of passes of a bisection: 27 bits, more than float32 has."""


def singular_values(matrix: ArrayLike) -> jax.Array:
    """Returns all singular values in descending order.

    The matrix is made bidiagonal by Householder reflections, and the singular values of the bidiagonal matrix are
    bisected in parallel. Nothing is squared, so that the error is a few roundings of the largest singular value. From a
    Gram matrix, values below 3e-4 of the largest would be noise, which an effective rank would count.

    Args:
      matrix: `[B, D]`.

    Returns:
      float32 `[min(B, D)]`, with an error of about 1e-6 of the largest; NaN if an entry is not finite.
    """
    z = jnp.asarray(matrix, jnp.float32)
    z = z.T if z.shape[0] < z.shape[1] else z
    largest = jnp.max(jnp.abs(z), initial=0.0)
    scaled = z / jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    diagonal, above = _bidiagonal(jnp.where(jnp.isfinite(scaled), scaled, 0.0))
    return jnp.where(jnp.isfinite(largest), _bidiagonal_singular_values(diagonal, above) * largest, jnp.nan)


def _bidiagonal(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reduces `[B, D]`, B >= D, to a bidiagonal matrix (Golub and Kahan, 1965).

    Returns:
      its diagonal `[D]` and superdiagonal `[D - 1]`, up to signs.
    """
    rows, columns = jnp.arange(z.shape[0]), jnp.arange(z.shape[1])

    def reflector(x: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns v, b and c such that (I - b v v^T) x is c times the unit vector `first`."""
        largest = jnp.max(jnp.abs(x))
        x = x / jnp.where(largest > 0, largest, 1.0)
        head = jnp.sum(jnp.where(first, x, 0.0))
        length = jnp.sqrt(jnp.sum(x**2))
        image = -jnp.where(head < 0, -length, length)
        v = jnp.where(first, head - image, x)
        square = jnp.sum(v**2)
        return v, jnp.where(square > 0, 2.0 / jnp.where(square > 0, square, 1.0), 0.0), image * largest

    def step(k: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        z, diagonal, above = carry
        v, b, image = reflector(jnp.where(rows >= k, z[:, k], 0.0), rows == k)
        z = z - (b * v)[:, None] * jnp.matmul(v, z, precision=jax.lax.Precision.HIGHEST)[None, :]
        diagonal = diagonal.at[k].set(image)
        v, b, image = reflector(jnp.where(columns > k, z[k], 0.0), columns == k + 1)
        z = z - (b * jnp.matmul(z, v, precision=jax.lax.Precision.HIGHEST))[:, None] * v[None, :]
        return z, diagonal, above.at[k].set(image)

    zeros = jnp.zeros(z.shape[1])
    _, diagonal, above = jax.lax.fori_loop(0, z.shape[1], step, (z, zeros, zeros))
    return diagonal, above[:-1]


def _bidiagonal_singular_values(diagonal: jax.Array, above: jax.Array) -> jax.Array:
    """Bisects the singular values of a bidiagonal matrix, in descending order, by counts of those below a point.

    The count is the number of negative pivots of B^T B - x^2 I in their differential form (Fernando, 1998), which does
    not form the product.
    """
    size = diagonal.shape[0]
    q, e = diagonal**2, jnp.pad(above**2, (0, 1))
    tiny = jnp.finfo(jnp.float32).tiny

    def count_below(x: jax.Array) -> jax.Array:
        square = x**2

        def pivot(carry: tuple[jax.Array, jax.Array], entries: tuple[jax.Array, jax.Array]):
            shift, count = carry
            d = entries[0] + shift
            d = jnp.where(jnp.abs(d) < tiny, -tiny, d)
            return (shift * (entries[1] / d) - square, count + (d < 0)), None

        start = (-square, jnp.zeros(x.shape, jnp.int32))
        return jax.lax.scan(pivot, start, (q, e), unroll=8)[0][1]

    not_above = size - jnp.arange(size)  # the number of singular values that are not above each one
    parts = jnp.arange(1, _POINTS + 1, dtype=jnp.float32)[:, None]

    def narrow(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, width = bracket
        width = width / (_POINTS + 1)
        passed = jnp.sum(count_below(low + parts * width) < not_above, axis=0)
        return low + passed * width, width

    # No singular value exceeds the sum of an entry and its neighbours (Gershgorin).
    bound = jnp.max(jnp.abs(diagonal) + jnp.pad(jnp.abs(above), (0, 1)) + jnp.pad(jnp.abs(above), (1, 0)))
    low, width = jax.lax.fori_loop(0, _PASSES, narrow, (jnp.zeros(size), jnp.full(size, bound)))
    return low + width / 2


def effective_rank(values: ArrayLike) -> jax.Array:
    """Returns exp(-sum p log p), p = s / sum s, for singular values s (Roy and Vetterli, 2007).

    The result is between 1 and the number of values, or 0 if all are zero.
    """
    s = jnp.asarray(values)
    total = jnp.sum(s)
    p = s / jnp.where(total == 0, 1.0, total)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p == 0, 1.0, p)))
    return jnp.where(total == 0, 0.0, jnp.exp(entropy))


def stable_rank(values: ArrayLike) -> jax.Array:
    """Returns ||Z||_F^2 / ||Z||_2^2 from singular values in descending order.

    The result is between 1 and the number of values, or 0 if all are zero.
    """
    s = jnp.asarray(values)
    largest = jnp.where(s[0] == 0, 1.0, s[0])
    return jnp.sum((s / largest) ** 2)


def linear_cka(x: ArrayLike, y: ArrayLike, mask: ArrayLike | None = None) -> jax.Array:
    """Returns the linear centred kernel alignment of two representations of the same rows (Kornblith et al., 2019).

    It is between 0 and 1: 1 if the representations differ by rotation, scale and translation only, and 0 if one of them
    is constant.

    Args:
      x: `[B, D]`.
      y: `[B, E]`.
      mask: bool `[B]`, the rows that are included; None means all.
    """
    mask = jnp.ones(len(jnp.asarray(x)), bool) if mask is None else jnp.asarray(mask)
    x, y = (_centred(jnp.asarray(z, jnp.float32), mask) for z in (x, y))

    def squared_norm_of_product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST) ** 2)

    norms = jnp.sqrt(squared_norm_of_product(x, x)) * jnp.sqrt(squared_norm_of_product(y, y))
    ratio = squared_norm_of_product(x, y) / jnp.where(norms == 0, 1.0, norms)
    return jnp.minimum(ratio, 1.0)  # a rounding could exceed 1


def _centred(z: jax.Array, mask: jax.Array) -> jax.Array:
    """Subtracts the mean of the masked rows, sets all others to zero, and scales the largest entry to one."""
    z = jnp.where(mask[:, None], z, 0.0)
    z = jnp.where(mask[:, None], z - jnp.sum(z, axis=0) / jnp.maximum(jnp.sum(mask), 1), 0.0)
    largest = jnp.max(jnp.abs(z), initial=0.0)
    return z / jnp.where(largest == 0, 1.0, largest)
