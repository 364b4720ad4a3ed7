"""Gradient coherence, x_grad: how far the gradients of several minibatches agree, all taken at one point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.kernels.coherence import CoherenceSum, dominant_share, mean_pairwise_cosine

Params = Any


def gradient_coherence(
    gradient: Callable[[Any], Params],
    minibatches: Any,
    telemetry: str,
    direction: Callable[[Params], Params] = lambda gradient: gradient,
) -> dict[str, jax.Array]:
    """The channels x_grad and, in "full" telemetry, x_grad_dominant and layer_gradient_norm `[layers]`.

    Args:
      gradient: a minibatch's, at parameters that stay; undisturbed.
      minibatches: leaves `[K, ...]`, one after the other to `gradient`.
      telemetry: "basic" holds one gradient at a time, "full" all K.
      direction: what is compared of a gradient.
    """
    if telemetry == "basic":
        first = jax.tree.map(lambda x: x[0], minibatches)
        empty = CoherenceSum.zeros(jax.eval_shape(lambda batch: direction(gradient(batch)), first), raw=False)
        total, _ = jax.lax.scan(lambda total, batch: (total.add(direction(gradient(batch))), None), empty, minibatches)
        return {"x_grad": total.mean_pairwise_cosine()}

    def one(batch: Any) -> tuple[Params, jax.Array]:
        found = gradient(batch)
        return direction(found), jnp.stack([jnp.sum(g**2) for g in jax.tree.leaves(found)])

    compared, squares = jax.lax.map(one, minibatches)
    return {
        "x_grad": mean_pairwise_cosine(compared),
        "x_grad_dominant": dominant_share(compared),
        "layer_gradient_norm": jnp.sqrt(jnp.mean(squares, axis=0)),
    }
