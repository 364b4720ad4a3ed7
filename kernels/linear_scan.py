"""Linear recurrences over all steps of a series."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

Affine = tuple[jax.Array, jax.Array]
"""The map h -> a h + b, as (a, b)."""


def linear_scan(
    decay: ArrayLike,
    inputs: ArrayLike,
    initial: ArrayLike | None = None,
    method: Literal["auto", "associative", "sequential"] = "auto",
) -> jax.Array:
    """Returns the states of `h_t = a_t h_{t-1} + b_t`, entry by entry.

    Args:
      decay: a, real or complex, `[T, ...]`; `[...]` or `[1, ...]` if it is the same at every step.
      inputs: b, `[T, ...]`.
      initial: h before the first step, `[...]`; zero by default.
      method: "associative", a scan of log2(T) rounds; "sequential", one step after the other, which takes about half
        the time on CPUs; or "auto", the faster one on the platform.

    Returns:
      h, `[T, ...]`.

    Source: Blelloch (1990), section 1.4; for state-space models Smith et al. (2023), S5, appendix H.
    """
    inputs = jnp.asarray(inputs)
    decay = jnp.broadcast_to(jnp.asarray(decay), inputs.shape)
    if initial is not None:
        inputs = inputs.at[0].add(decay[0] * jnp.asarray(initial))
    if method == "auto":
        return jax.lax.platform_dependent(decay, inputs, cpu=_sequential, default=_associative)
    return (_sequential if method == "sequential" else _associative)(decay, inputs)


def _associative(decay: jax.Array, inputs: jax.Array) -> jax.Array:
    def compose(first: Affine, second: Affine) -> Affine:
        return second[0] * first[0], second[0] * first[1] + second[1]

    return jax.lax.associative_scan(compose, (decay, inputs))[1]


def _sequential(decay: jax.Array, inputs: jax.Array) -> jax.Array:
    def step(state: jax.Array, row: Affine) -> tuple[jax.Array, jax.Array]:
        state = row[0] * state + row[1]
        return state, state

    begin = jnp.zeros(inputs.shape[1:], jnp.result_type(decay, inputs))
    return jax.lax.scan(step, begin, (decay, inputs))[1]
