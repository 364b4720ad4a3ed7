"""Random orthogonal matrices from matrix-vector products alone.

`jax.nn.initializers.orthogonal` uses LAPACK's QR. On XLA's CPU backend a batched LAPACK call waits for threads of the
pool it runs in; two such calls at once, on two threads, can wait for each other for ever (seen with jaxlib 0.10).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


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
