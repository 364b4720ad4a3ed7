"""Linear recurrences, all steps at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Affine = tuple[jax.Array, jax.Array]
"""The map h -> a h + b, as (a, b)."""


def linear_scan(decay: ArrayLike, inputs: ArrayLike, initial: ArrayLike | None = None) -> jax.Array:
    """The states of `h_t = a_t h_{t-1} + b_t`, entry by entry, by an associative scan of log2(T) rounds.

    Args:
        decay: a, real or complex, `[T, ...]`; `[...]` or `[1, ...]` where it is the same at every step.
        inputs: b, `[T, ...]`.
        initial: h before the first step, `[...]`; zero if not given.

    Returns:
        h, `[T, ...]`.

    Source: Blelloch (1990), section 1.4; for state-space models Smith et al. (2023), S5, appendix H.
    """
    inputs = jnp.asarray(inputs)
    decay = jnp.broadcast_to(jnp.asarray(decay), inputs.shape)
    if initial is not None:
        inputs = inputs.at[0].add(decay[0] * jnp.asarray(initial))

    def after(first: Affine, second: Affine) -> Affine:
        return second[0] * first[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(after, (decay, inputs))[1]
