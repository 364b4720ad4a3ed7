"""Evaluates a policy at equal intervals of the run, and holds the latest result in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.taps import Taps
from jaxaudit.kernels.coherence import CoherenceSum, dominant_share, mean_pairwise_cosine
from jaxaudit.tasks.episodes import evaluate

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


def evaluate_when_due(
    env: Any,
    policy: Callable[[jax.Array], jax.Array],
    key: jax.Array,
    taps: Taps,
    *,
    times: int,
    episodes: int,
    max_episode_steps: int,
) -> jax.Array:
    """Mean return of fresh, undisturbed episodes, at `times` steps evenly spaced over the run, of which the
    last is its last; NaN at the others.

    Args:
      env: a brax `Env`, unbatched.
      policy: observations `[episodes, O]` to actions as `Episodes.step` takes them, without exploration.
      key: decides the initial states.
      taps: tell the step and the length of the run; outside a run nothing is due.
      times: evaluations in a run, at most one a step; 0: never.
      episodes: of each evaluation.
      max_episode_steps: the time limit.
    """
    return when_due(taps, times, lambda: jnp.mean(evaluate(env, policy, key, episodes, max_episode_steps)))


def when_due(taps: Taps, times: int, measure: Callable[[], jax.Array]) -> jax.Array:
    """The scalar `measure()` at `times` steps evenly spaced over the run, of which the last is its last; else NaN.

    Outside a run nothing is due.
    """
    if not times or not taps.steps:
        return jnp.float32(jnp.nan)
    times = min(times, taps.steps)
    ends = -(-np.arange(1, times + 1) * taps.steps // times)  # the last is the run's
    return jax.lax.cond(jnp.any(jnp.asarray(taps.step) + 1 == ends), measure, lambda: jnp.float32(jnp.nan))
