"""Singular values without LAPACK, and what is said of representations by them: effective and stable rank; linear CKA.

On XLA's CPU backend a batched LAPACK call inside a step can wait for its own thread pool for ever (seen with jaxlib
0.10). So a matrix is made bidiagonal by Householder's reflections, matrix-vector products alone, and the singular
values of that are bisected, all at once. Nothing is squared: they are right to a few roundings of the largest, where
those from the Gram matrix are lost in noise below 3e-4 of it, which an effective rank would count.
"""

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


def orthogonal(key: jax.Array, shape: tuple[int, int], scale: float = 1.0) -> jax.Array:
    """A matrix with orthonormal rows or columns, whichever are fewer, times `scale`; uniform (Haar) distribution.

    Gram-Schmidt, twice over each vector, on a Gaussian matrix (Giraud et al., 2005: twice is enough).

    Args:
        key: PRNG key.
        shape: (rows, columns).
        scale: gain.

    Returns:
        float32, of the shape given.
    """
    rows, columns = shape
    few, many = min(shape), max(shape)
    gaussian = jax.random.normal(key, (few, many))

    def orthogonalise(index: int, basis: jax.Array) -> jax.Array:
        before = (jnp.arange(few) < index)[:, None]
        vector = basis[index]
        for _ in range(2):
            earlier = jnp.where(before, basis, 0.0)
            along = jnp.matmul(earlier, vector, precision=jax.lax.Precision.HIGHEST)
            vector = vector - jnp.matmul(along, earlier, precision=jax.lax.Precision.HIGHEST)
            vector = vector / jnp.sqrt(jnp.sum(vector**2))
        return basis.at[index].set(vector)

    basis = jax.lax.fori_loop(0, few, orthogonalise, gaussian)
    return scale * (basis if rows <= columns else basis.T)


_POINTS = 7
"""Where a bracket is cut at a time, into 8 parts: three bits."""

_PASSES = 9
"""27 bits, more than float32 has."""


def singular_values(matrix: ArrayLike) -> jax.Array:
    """All singular values, the largest first.

    Args:
      matrix: `[B, D]`.

    Returns:
      float32 `[min(B, D)]`, right to about 1e-6 of the largest; NaN where an entry is not finite.
    """
    z = jnp.asarray(matrix, jnp.float32)
    z = z.T if z.shape[0] < z.shape[1] else z
    largest = jnp.max(jnp.abs(z), initial=0.0)
    scaled = z / jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    diagonal, above = _bidiagonal(jnp.where(jnp.isfinite(scaled), scaled, 0.0))
    return jnp.where(jnp.isfinite(largest), _bisected(diagonal, above) * largest, jnp.nan)


def _bidiagonal(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Diagonal `[D]` and superdiagonal `[D - 1]`, up to signs, of `[B, D]`, B >= D (Golub and Kahan, 1965)."""
    rows, columns = jnp.arange(z.shape[0]), jnp.arange(z.shape[1])

    def reflector(x: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """v and b such that (I - b v v^T) x is a multiple of the unit vector `first`, and that multiple."""
        largest = jnp.max(jnp.abs(x))
        x = x / jnp.where(largest > 0, largest, 1.0)
        head = jnp.sum(jnp.where(first, x, 0.0))
        length = jnp.sqrt(jnp.sum(x**2))
        onto = -jnp.where(head < 0, -length, length)
        v = jnp.where(first, head - onto, x)
        square = jnp.sum(v**2)
        return v, jnp.where(square > 0, 2.0 / jnp.where(square > 0, square, 1.0), 0.0), onto * largest

    def step(k: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        z, diagonal, above = carry
        v, b, onto = reflector(jnp.where(rows >= k, z[:, k], 0.0), rows == k)
        z = z - (b * v)[:, None] * jnp.matmul(v, z, precision=jax.lax.Precision.HIGHEST)[None, :]
        diagonal = diagonal.at[k].set(onto)
        u, c, onto = reflector(jnp.where(columns > k, z[k], 0.0), columns == k + 1)
        z = z - (c * jnp.matmul(z, u, precision=jax.lax.Precision.HIGHEST))[:, None] * u[None, :]
        return z, diagonal, above.at[k].set(onto)

    zeros = jnp.zeros(z.shape[1])
    _, diagonal, above = jax.lax.fori_loop(0, z.shape[1], step, (z, zeros, zeros))
    return diagonal, above[:-1]


def _bisected(diagonal: jax.Array, above: jax.Array) -> jax.Array:
    """Singular values of a bidiagonal matrix, the largest first, by counts of how many lie below a point.

    The count is of the negative pivots of B^T B - x^2 I in their differential form (Fernando, 1998), which does not
    form the product.
    """
    size = diagonal.shape[0]
    q, e = diagonal**2, jnp.pad(above**2, (0, 1))
    tiny = jnp.finfo(jnp.float32).tiny

    def below(x: jax.Array) -> jax.Array:
        square = x**2

        def pivot(carry: tuple[jax.Array, jax.Array], entries: tuple[jax.Array, jax.Array]):
            shift, count = carry
            d = entries[0] + shift
            d = jnp.where(jnp.abs(d) < tiny, -tiny, d)
            return (shift * (entries[1] / d) - square, count + (d < 0)), None

        start = (-square, jnp.zeros(x.shape, jnp.int32))
        return jax.lax.scan(pivot, start, (q, e), unroll=8)[0][1]

    wanted = size - jnp.arange(size)  # so many values are not above the one searched for
    parts = jnp.arange(1, _POINTS + 1, dtype=jnp.float32)[:, None]

    def narrow(_: int, bracket: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, width = bracket
        width = width / (_POINTS + 1)
        passed = jnp.sum(below(low + parts * width) < wanted, axis=0)
        return low + passed * width, width

    # Gershgorin: no singular value is longer than the sum of an entry and its neighbours.
    most = jnp.max(jnp.abs(diagonal) + jnp.pad(jnp.abs(above), (0, 1)) + jnp.pad(jnp.abs(above), (1, 0)))
    low, width = jax.lax.fori_loop(0, _PASSES, narrow, (jnp.zeros(size), jnp.full(size, most)))
    return low + width / 2


def effective_rank(values: ArrayLike) -> jax.Array:
    """exp(-sum p log p), p = s / sum s, of singular values s (Roy and Vetterli, 2007): from 1 to their number.

    0 where all are zero.
    """
    s = jnp.asarray(values)
    total = jnp.sum(s)
    p = s / jnp.where(total == 0, 1.0, total)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p == 0, 1.0, p)))
    return jnp.where(total == 0, 0.0, jnp.exp(entropy))


def stable_rank(values: ArrayLike) -> jax.Array:
    """||Z||_F^2 / ||Z||_2^2 of singular values, the largest first: from 1 to their number; 0 where all are zero."""
    s = jnp.asarray(values)
    largest = jnp.where(s[0] == 0, 1.0, s[0])
    return jnp.sum((s / largest) ** 2)


def linear_cka(x: ArrayLike, y: ArrayLike, mask: ArrayLike | None = None) -> jax.Array:
    """Linear centred kernel alignment of two representations of the same rows (Kornblith et al., 2019): 0 to 1.

    1 where one is the other turned, scaled or moved; 0 where either is constant.

    Args:
      x: `[B, D]`.
      y: `[B, E]`.
      mask: the rows that count, bool `[B]`; None: all.
    """
    there = jnp.ones(len(jnp.asarray(x)), bool) if mask is None else jnp.asarray(mask)
    x, y = (_centred(jnp.asarray(z, jnp.float32), there) for z in (x, y))

    def cross(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.sum(jnp.matmul(a.T, b, precision=jax.lax.Precision.HIGHEST) ** 2)

    own = jnp.sqrt(cross(x, x)) * jnp.sqrt(cross(y, y))
    return jnp.minimum(cross(x, y) / jnp.where(own == 0, 1.0, own), 1.0)  # not above by a rounding


def _centred(z: jax.Array, there: jax.Array) -> jax.Array:
    """Rows less their mean, zero where they do not count, brought to a largest entry of one."""
    z = jnp.where(there[:, None], z, 0.0)
    z = jnp.where(there[:, None], z - jnp.sum(z, axis=0) / jnp.maximum(jnp.sum(there), 1), 0.0)
    largest = jnp.max(jnp.abs(z), initial=0.0)
    return z / jnp.where(largest == 0, 1.0, largest)
