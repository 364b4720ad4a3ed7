"""Gradient coherence of K minibatch gradients, from their unit vectors u_i = g_i / ||g_i||.

Gradients are pytrees. Functions of a *stack* take leaves `[K, ...]`, of which one array `[K, P]` is a special case.
`CoherenceSum` takes one gradient at a time inside a scan and never holds the stack.

A zero gradient has no direction: its unit vector is zero, and K does not count it. A NaN or infinite gradient makes
every result NaN. Norms are computed after division by the largest entry, so that a gradient of 1e25 has a direction in
float32 too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from jaxaudit.runtime.sharding import is_split

PyTree = Any


class NoiseScale(NamedTuple):
    """Estimates of McCandlish et al. (2018): `|G|^2`, the trace `S` of the per-sample covariance, and `S / |G|^2`."""

    squared_gradient: jax.Array
    covariance_trace: jax.Array
    noise_scale: jax.Array


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf).astype(jnp.promote_types(leaf.dtype, jnp.float32)), tree)


def _total(tree: PyTree) -> jax.Array:
    return jax.tree.reduce(jnp.add, tree)


def _squared_norm(tree: PyTree) -> jax.Array:
    return _total(jax.tree.map(lambda leaf: jnp.sum(leaf**2), tree))


def _largest(tree: PyTree) -> jax.Array:
    """Returns the largest absolute entry of a pytree, as a divisor.

    It may miss a NaN, as XLA's maxima do. Sums of the quotients are NaN nevertheless, for infinite entries too.
    """
    return jax.tree.reduce(jnp.maximum, jax.tree.map(lambda leaf: jnp.abs(leaf).max(initial=0), tree))


def unit_gradient(gradient: PyTree) -> tuple[PyTree, jax.Array]:
    """Returns a gradient's direction and its norm.

    Args:
      gradient: a pytree.

    Returns:
      the unit vector with the same structure (zero for a zero gradient, NaN for a non-finite one), and the norm, a
        scalar.
    """
    gradient = _float32(gradient)
    largest = _largest(gradient)
    scaled = jax.tree.map(lambda leaf: leaf / jnp.where(largest == 0, 1, largest), gradient)
    length = jnp.sqrt(_squared_norm(scaled))
    unit = jax.tree.map(lambda leaf: leaf / jnp.where(length == 0, 1, length), scaled)
    return unit, length * largest


def _units(gradients: PyTree) -> tuple[PyTree, jax.Array]:
    """Returns the unit vectors of a stack, leaves `[K, ...]`, and the number of those that are not zero."""
    units, norms = jax.vmap(unit_gradient)(gradients)
    return units, (norms != 0).sum()


def _mean_pairwise(squared_sum: jax.Array, count: jax.Array) -> jax.Array:
    pairs = count * (count - 1)
    return jnp.where(pairs > 0, (squared_sum - count) / jnp.maximum(pairs, 1), jnp.nan)


def gram(gradients: PyTree) -> jax.Array:
    """Returns the inner products of K gradients, `[K, K]`, summed leaf by leaf without flattening the pytree.

    Args:
      gradients: leaves `[K, ...]`.
    """

    def products(leaf: jax.Array) -> jax.Array:
        if is_split():  # a flat array would have no axes to split
            return jnp.tensordot(leaf, jnp.moveaxis(leaf, 0, -1), leaf.ndim - 1, precision=jax.lax.Precision.HIGHEST)
        flat = leaf.reshape(leaf.shape[0], -1)
        return jnp.matmul(flat, flat.T, precision=jax.lax.Precision.HIGHEST)

    return _total(jax.tree.map(products, _float32(gradients)))


def mean_pairwise_cosine(gradients: PyTree) -> jax.Array:
    """Returns the mean cosine over all pairs, `c = (||sum u_i||^2 - K) / (K (K - 1))`, which depends on signs.

    Args:
      gradients: leaves `[K, ...]`.

    Returns:
      scalar in [-1/(K-1), 1]; NaN with fewer than two non-zero gradients.
    """
    units, count = _units(gradients)
    return _mean_pairwise(_squared_norm(jax.tree.map(lambda leaf: leaf.sum(0), units)), count)


def dominant_share(gradients: PyTree) -> jax.Array:
    """Returns `lambda_1 / K` of the Gram matrix of the u_i: the share along the dominant axis, which ignores signs.

    Args:
      gradients: leaves `[K, ...]`.

    Returns:
      scalar in [1/K, 1]; NaN if every gradient is zero.
    """
    gradients = _float32(gradients)
    largest = jax.vmap(_largest)(gradients)
    scale = jnp.where(largest == 0, 1, largest)
    # Leaves are scaled one by one, and the products are normalised at the end, so that no second stack is held.
    products = gram(jax.tree.map(lambda leaf: leaf / scale.reshape(-1, *(1,) * (leaf.ndim - 1)), gradients))
    lengths = jnp.sqrt(jnp.where(largest == 0, 1, jnp.diagonal(products)))
    count = (largest != 0).sum()
    return largest_eigenvalue(products / jnp.outer(lengths, lengths)) / jnp.where(count > 0, count, jnp.nan)


def largest_eigenvalue(matrix: jax.Array) -> jax.Array:
    """Returns the largest eigenvalue of a positive semi-definite matrix, by repeated squaring and a Rayleigh quotient.

    It uses products of matrices only, because batched LAPACK calls can deadlock where XLA's CPU backend has few
    threads. With the power p = 2^16 of 16 squarings, the quotient is at most a fraction ln(K) / 2p below the
    eigenvalue.

    Args:
      matrix: `[K, K]`.

    Returns:
      scalar; NaN if an entry is not finite.
    """
    finite = jnp.isfinite(matrix).all()
    safe = jnp.where(finite, matrix, 0.0)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)

    def inner(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.vdot(a, b, precision=jax.lax.Precision.HIGHEST)

    def square(_: int, power: jax.Array) -> jax.Array:
        trace = jnp.trace(power)
        power = power / jnp.where(trace > 0, trace, 1.0)
        return product(power, power)

    power = jax.lax.fori_loop(0, 16, square, safe)
    vector = power[jnp.argmax(jnp.diagonal(power))]
    length = inner(vector, vector)
    quotient = inner(vector, product(safe, vector)) / jnp.where(length > 0, length, 1.0)
    return jnp.where(finite, quotient, jnp.nan)


def m_coherence(gradients: PyTree) -> jax.Array:
    """Returns `||sum g_i||^2 / sum ||g_i||^2` (Chatterjee and Zielinski, 2020): 1 if orthogonal, K if equal.

    Args:
      gradients: leaves `[K, ...]`.

    Returns:
      scalar in [0, K]; NaN if every gradient is zero.
    """
    gradients = _float32(gradients)
    largest = _largest(gradients)
    scaled = jax.tree.map(lambda leaf: leaf / jnp.where(largest == 0, 1, largest), gradients)
    squared_sum = _squared_norm(jax.tree.map(lambda leaf: leaf.sum(0), scaled))
    return squared_sum / _squared_norm(scaled)


def gradient_noise_scale(
    small_squared: ArrayLike, big_squared: ArrayLike, small_batch: ArrayLike, big_batch: ArrayLike
) -> NoiseScale:
    """Returns the gradient noise scale from squared norms at two batch sizes (McCandlish et al., 2018, appendix A.1).

    Args:
      small_squared: `|g_small|^2`, preferably a mean over minibatches, scalar.
      big_squared: `|g_big|^2`, scalar.
      small_batch: number of samples in a small batch.
      big_batch: number of samples in the big batch, more than `small_batch`.

    Returns:
      scalars. `noise_scale`, in samples, is NaN if the estimate of `|G|^2` is not positive.
    """
    small_squared, big_squared = jnp.asarray(small_squared), jnp.asarray(big_squared)
    small, big = jnp.asarray(small_batch, jnp.float32), jnp.asarray(big_batch, jnp.float32)
    signal = (big * big_squared - small * small_squared) / (big - small)
    noise = (small_squared - big_squared) / (1 / small - 1 / big)
    return NoiseScale(signal, noise, jnp.where(signal > 0, noise / jnp.where(signal > 0, signal, 1), jnp.nan))


@struct.dataclass
class CoherenceSum:
    """The carry of a scan over minibatches that measures coherence in one pass.

    Attributes:
      unit_sum: sum of the unit gradients, a pytree like one gradient.
      gradient_sum: sum of the gradients, likewise; None if it is not needed.
      squared_norms: sum of `||g_i||^2`, scalar.
      count: number of minibatches, scalar int32.
      nonzero: number of minibatches with a non-zero gradient, scalar int32.
    """

    unit_sum: PyTree
    gradient_sum: PyTree
    squared_norms: jax.Array
    count: jax.Array
    nonzero: jax.Array

    @classmethod
    def zeros(cls, gradient: PyTree, *, raw: bool = True) -> CoherenceSum:
        """Returns the empty sum for gradients with the shapes of `gradient`; `raw=False` leaves out `gradient_sum`."""
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), gradient)
        zero = jnp.zeros((), jnp.int32)
        return cls(empty, empty if raw else None, jnp.zeros(()), zero, zero)

    def add(self, gradient: PyTree) -> CoherenceSum:
        """Returns the sum with the gradient of one more minibatch."""
        unit, norm = unit_gradient(gradient)
        raw = self.gradient_sum
        return CoherenceSum(
            unit_sum=jax.tree.map(jnp.add, self.unit_sum, unit),
            gradient_sum=None if raw is None else jax.tree.map(jnp.add, raw, _float32(gradient)),
            squared_norms=self.squared_norms + norm**2,
            count=self.count + 1,
            nonzero=self.nonzero + (norm != 0),
        )

    def mean_pairwise_cosine(self) -> jax.Array:
        return _mean_pairwise(_squared_norm(self.unit_sum), self.nonzero)

    def m_coherence(self) -> jax.Array:
        """Returns `m_coherence` of the stack, scalar. NaN if the squares overflow or vanish in float32."""
        return _squared_norm(self._raw()) / self.squared_norms

    def noise_scale(self, batch: ArrayLike) -> NoiseScale:
        """Returns the gradient noise scale for minibatches of `batch` samples; all of them are the big batch."""
        small = self.squared_norms / self.count
        big = _squared_norm(self._raw()) / self.count**2
        return gradient_noise_scale(small, big, batch, jnp.asarray(batch) * self.count)

    def _raw(self) -> PyTree:
        if self.gradient_sum is None:
            raise ValueError("this CoherenceSum was made with raw=False, so it has no sum of the raw gradients")
        return self.gradient_sum
