"""Gradient coherence of K minibatch gradients, from their unit vectors u_i = g_i / ||g_i||.

Gradients are pytrees. The functions on a *stack* take leaves `[K, ...]` (one plain array `[K, P]` is such a
tree); `CoherenceSum` takes one gradient at a time inside a scan and never holds the stack.

A zero gradient has no direction: its unit vector is zero and it is left out of K. A NaN or infinite gradient
makes every result NaN. Norms are taken after scaling by the largest entry, so that a gradient of 1e25 has a
direction in float32 too.
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
    """McCandlish et al. (2018): `|G|^2`, `S` (trace of the per-sample covariance) and `S / |G|^2`."""

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
    """Largest absolute entry of a pytree, to divide by.

    It may miss a NaN, as XLA's maxima do; sums of what was divided are NaN all the same, of infinite entries, too.
    """
    return jax.tree.reduce(jnp.maximum, jax.tree.map(lambda leaf: jnp.abs(leaf).max(initial=0), tree))


def unit_gradient(gradient: PyTree) -> tuple[PyTree, jax.Array]:
    """A gradient's direction and its length.

    Args:
        gradient: one pytree.

    Returns:
        the unit vector with the same structure (zero for a zero gradient, NaN for a non-finite one), and the
        norm, a scalar.
    """
    gradient = _float32(gradient)
    largest = _largest(gradient)
    scaled = jax.tree.map(lambda leaf: leaf / jnp.where(largest == 0, 1, largest), gradient)
    length = jnp.sqrt(_squared_norm(scaled))
    unit = jax.tree.map(lambda leaf: leaf / jnp.where(length == 0, 1, length), scaled)
    return unit, length * largest


def _units(gradients: PyTree) -> tuple[PyTree, jax.Array]:
    """Unit vectors of a stack, leaves `[K, ...]`, and the number of them that are not zero."""
    units, norms = jax.vmap(unit_gradient)(gradients)
    return units, (norms != 0).sum()


def _mean_pairwise(squared_sum: jax.Array, count: jax.Array) -> jax.Array:
    pairs = count * (count - 1)
    return jnp.where(pairs > 0, (squared_sum - count) / jnp.maximum(pairs, 1), jnp.nan)


def gram(gradients: PyTree) -> jax.Array:
    """Inner products of K vectors, added up leaf by leaf so that the flattened `[K, P]` is never built.

    Args:
        gradients: leaves `[K, ...]`.

    Returns:
        `[K, K]`, symmetric.
    """

    def products(leaf: jax.Array) -> jax.Array:
        if is_split():  # a flat one has no axes to be split along
            return jnp.tensordot(leaf, jnp.moveaxis(leaf, 0, -1), leaf.ndim - 1, precision=jax.lax.Precision.HIGHEST)
        flat = leaf.reshape(leaf.shape[0], -1)
        return jnp.matmul(flat, flat.T, precision=jax.lax.Precision.HIGHEST)

    return _total(jax.tree.map(products, _float32(gradients)))


def mean_pairwise_cosine(gradients: PyTree) -> jax.Array:
    """Mean cosine over all pairs, `c = (||sum u_i||^2 - K) / (K (K - 1))`: alignment, signs included.

    Args:
        gradients: leaves `[K, ...]`.

    Returns:
        scalar in [-1/(K-1), 1]; NaN with fewer than two non-zero gradients.
    """
    units, count = _units(gradients)
    return _mean_pairwise(_squared_norm(jax.tree.map(lambda leaf: leaf.sum(0), units)), count)


def dominant_share(gradients: PyTree) -> jax.Array:
    """`lambda_1 / K` of the Gram matrix of the u_i: the share along one axis, whatever their signs.

    Args:
        gradients: leaves `[K, ...]`.

    Returns:
        scalar in [1/K, 1]; NaN when every gradient is zero.
    """
    gradients = _float32(gradients)
    largest = jax.vmap(_largest)(gradients)
    scale = jnp.where(largest == 0, 1, largest)
    # Scaled leaf by leaf, and made unit vectors' in the end: no second stack is held.
    inner = gram(jax.tree.map(lambda leaf: leaf / scale.reshape(-1, *(1,) * (leaf.ndim - 1)), gradients))
    lengths = jnp.sqrt(jnp.where(largest == 0, 1, jnp.diagonal(inner)))
    count = (largest != 0).sum()
    return largest_eigenvalue(inner / jnp.outer(lengths, lengths)) / jnp.where(count > 0, count, jnp.nan)


def largest_eigenvalue(matrix: jax.Array) -> jax.Array:
    """Largest eigenvalue of a positive semi-definite matrix, by repeated squaring and a Rayleigh quotient.

    Matrix products alone: batched LAPACK calls can block one another for ever where XLA's CPU threads are few.
    With p = 2^16 squarings' power the quotient is at worst a fraction ln(K) / 2p below the eigenvalue.

    Args:
        matrix: `[K, K]`.

    Returns:
        scalar; NaN where an entry is not finite.
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
    """`||sum g_i||^2 / sum ||g_i||^2` (Chatterjee and Zielinski, 2020): 1 when orthogonal, K when equal.

    Args:
        gradients: leaves `[K, ...]`.

    Returns:
        scalar in [0, K]; NaN when every gradient is zero.
    """
    gradients = _float32(gradients)
    largest = _largest(gradients)
    scaled = jax.tree.map(lambda leaf: leaf / jnp.where(largest == 0, 1, largest), gradients)
    together = _squared_norm(jax.tree.map(lambda leaf: leaf.sum(0), scaled))
    return together / _squared_norm(scaled)


def gradient_noise_scale(
    small_squared: ArrayLike, big_squared: ArrayLike, small_batch: ArrayLike, big_batch: ArrayLike
) -> NoiseScale:
    """Gradient noise scale from squared norms at two batch sizes (McCandlish et al., 2018, appendix A.1).

    Args:
        small_squared: `|g_small|^2`, best a mean over minibatches, scalar.
        big_squared: `|g_big|^2`, scalar.
        small_batch: samples in a small batch.
        big_batch: samples in the big batch, more than `small_batch`.

    Returns:
        scalars; `noise_scale`, in samples, is NaN where the estimate of `|G|^2` is not positive.
    """
    small_squared, big_squared = jnp.asarray(small_squared), jnp.asarray(big_squared)
    small, big = jnp.asarray(small_batch, jnp.float32), jnp.asarray(big_batch, jnp.float32)
    signal = (big * big_squared - small * small_squared) / (big - small)
    noise = (small_squared - big_squared) / (1 / small - 1 / big)
    return NoiseScale(signal, noise, jnp.where(signal > 0, noise / jnp.where(signal > 0, signal, 1), jnp.nan))


@struct.dataclass
class CoherenceSum:
    """What a scan over minibatches carries to measure coherence in one cheap pass.

    Fields:
        unit_sum: sum of the unit gradients, a pytree like one gradient.
        gradient_sum: sum of the raw gradients, the same; None where it is not wanted.
        squared_norms: sum of `||g_i||^2`, scalar.
        count: minibatches seen, scalar int32.
        nonzero: those of them with a non-zero gradient, scalar int32.
    """

    unit_sum: PyTree
    gradient_sum: PyTree
    squared_norms: jax.Array
    count: jax.Array
    nonzero: jax.Array

    @classmethod
    def zeros(cls, gradient: PyTree, *, raw: bool = True) -> CoherenceSum:
        """The empty sum for gradients shaped like `gradient`; `raw=False` leaves out `gradient_sum`."""
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), gradient)
        none = jnp.zeros((), jnp.int32)
        return cls(empty, empty if raw else None, jnp.zeros(()), none, none)

    def add(self, gradient: PyTree) -> CoherenceSum:
        """The sum with one more minibatch's gradient."""
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
        """As `m_coherence` of the stack; scalar. NaN where the squares overflow or vanish in float32."""
        return _squared_norm(self._raw()) / self.squared_norms

    def noise_scale(self, batch: ArrayLike) -> NoiseScale:
        """Gradient noise scale; a minibatch holds `batch` samples, all of them together are the big batch."""
        small = self.squared_norms / self.count
        big = _squared_norm(self._raw()) / self.count**2
        return gradient_noise_scale(small, big, batch, jnp.asarray(batch) * self.count)

    def _raw(self) -> PyTree:
        if self.gradient_sum is None:
            raise ValueError("this CoherenceSum was made with raw=False, which leaves out the sum of the raw gradients")
        return self.gradient_sum
