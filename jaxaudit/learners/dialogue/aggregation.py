"""How the tokens' losses `[N, T]` become one number; given tokens never enter.

Each divides by a count that may be given: of a minibatch that is worked off in parts (whose results are then summed),
or of what sampling kept. Unless given, it is counted in `own`; a row without own tokens is no row.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

AGGREGATIONS = ("token_minibatch", "token_iteration", "sequence", "constant")


@struct.dataclass
class Denominators:
    """What a minibatch's sums are divided by; scalars.

    Attributes:
      tokens: own tokens of the minibatch.
      rows: its rows that have own tokens.
      share: own tokens of the whole iteration over its number of minibatches.
      longest: L_max, the most own tokens a row could have.
    """

    tokens: Any
    rows: Any
    share: Any
    longest: Any


def denominators(own: jax.Array, longest: ArrayLike, share: ArrayLike | None = None) -> Denominators:
    """Counted in `own`, bool `[N, T]`; `share` is the minibatch's own tokens unless given."""
    tokens = jnp.sum(own)
    return Denominators(tokens, jnp.sum(jnp.any(own, -1)), tokens if share is None else share, longest)


def token_minibatch(loss: jax.Array, own: jax.Array, tokens: ArrayLike | None = None) -> jax.Array:
    """Mean over the minibatch's own tokens."""
    return _sum(loss, own) / jnp.maximum(jnp.sum(own) if tokens is None else tokens, 1)


def token_iteration(loss: jax.Array, own: jax.Array, share: ArrayLike) -> jax.Array:
    """Sum over `share`, own tokens per minibatch of the iteration: its tokens all weigh the same (DAPO)."""
    return _sum(loss, own) / jnp.maximum(share, 1)


def sequence(loss: jax.Array, own: jax.Array, rows: ArrayLike | None = None) -> jax.Array:
    """Mean over rows of the mean over a row's own tokens (GRPO)."""
    means = jnp.sum(jnp.where(own, loss, 0), -1) / jnp.maximum(jnp.sum(own, -1, dtype=loss.dtype), 1)
    return jnp.sum(means) / jnp.maximum(jnp.sum(jnp.any(own, -1)) if rows is None else rows, 1)


def constant(loss: jax.Array, own: jax.Array, longest: ArrayLike, rows: ArrayLike | None = None) -> jax.Array:
    """Sum over rows times L_max, whatever the rows' lengths (Dr. GRPO)."""
    rows = jnp.sum(jnp.any(own, -1)) if rows is None else rows
    return _sum(loss, own) / (jnp.maximum(rows, 1) * longest)


def aggregate(how: str, loss: jax.Array, own: jax.Array, counts: Denominators) -> jax.Array:
    """By the name in `AGGREGATIONS`."""
    if how == "token_minibatch":
        return token_minibatch(loss, own, counts.tokens)
    if how == "token_iteration":
        return token_iteration(loss, own, counts.share)
    if how == "sequence":
        return sequence(loss, own, counts.rows)
    return constant(loss, own, counts.longest, counts.rows)


def _sum(loss: jax.Array, own: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(own, loss, 0))
