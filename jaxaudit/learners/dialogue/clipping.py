"""The clipped surrogate of PPO (Schulman et al., 2017), with two bounds of their own, and dual clipping."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike


@struct.dataclass
class Surrogate:
    """What is maximised, and where it is flat; all `[N, T]`, or `[N, 1]` where ratio and advantage are.

    Attributes:
      objective: `min(rho A, clip(rho, 1 - low, 1 + high) A)`, and not below `dual A` where A < 0.
      low, high, dual: bool, where a bound holds, so that the gradient is zero.
    """

    objective: Any
    low: Any
    high: Any
    dual: Any


def surrogate(
    log_ratio: jax.Array, advantage: jax.Array, low: ArrayLike, high: ArrayLike, dual: ArrayLike | None = None
) -> Surrogate:
    """The surrogate of tokens whose log-ratios are `log_ratio`.

    On a bound the gradient goes through. Where a bound holds, and where the advantage is zero, the ratio does not enter
    even if it is infinite.

    Args:
        log_ratio: `[N, T]`, or `[N, 1]` of rows.
        advantage: a constant, `[N, T]`.
        low, high: how far below and above 1 the ratio may gain; scalars.
        dual: the largest ratio that counts where A < 0, above 1 (Ye et al., 2020); None or infinity: no such bound.
    """
    dual = jnp.inf if dual is None else dual
    advantage = jax.lax.stop_gradient(advantage)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    losing = advantage < 0
    is_low = losing & (ratio < 1 - low)
    is_high = (advantage > 0) & (ratio > 1 + high)
    is_dual = losing & (ratio > dual)
    bound = jnp.where(is_dual, dual, jnp.where(is_low, 1 - low, 1 + high))
    flat = is_low | is_high | is_dual
    free = jnp.exp(jnp.where(flat | (advantage == 0), 0, log_ratio))
    # The bound is finite where it holds; elsewhere it may be the infinite one.
    objective = advantage * jnp.where(flat, bound, free)
    return Surrogate(objective, is_low, is_high, is_dual)
