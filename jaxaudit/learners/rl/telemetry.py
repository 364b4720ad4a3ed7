"""Measurements that several learners report: gradient coherence, episodes, and evaluations at equal intervals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.taps import Taps
from jaxaudit.kernels.coherence import CoherenceSum, dominant_share, mean_pairwise_cosine
from jaxaudit.tasks.episodes import evaluate, mean_length, performance

Params = Any


def gradient_coherence(
    gradient: Callable[[Any], Params],
    minibatches: Any,
    telemetry: str,
    direction: Callable[[Params], Params] = lambda gradient: gradient,
) -> dict[str, jax.Array]:
    """Measures how far the gradients of several minibatches agree, all taken at the same parameters.

    Args:
      gradient: maps a minibatch to its undisturbed gradient.
      minibatches: leaves `[K, ...]`; their K entries are passed to `gradient` one after the other.
      telemetry: "basic" holds one gradient at a time in memory, "full" all K.
      direction: maps a gradient to the vector that is compared.

    Returns:
      the channel x_grad and, with "full" telemetry, x_grad_dominant and layer_gradient_norm `[layers]`.
    """
    if telemetry == "basic":
        first = jax.tree.map(lambda x: x[0], minibatches)
        empty = CoherenceSum.zeros(jax.eval_shape(lambda batch: direction(gradient(batch)), first), raw=False)
        total, _ = jax.lax.scan(lambda total, batch: (total.add(direction(gradient(batch))), None), empty, minibatches)
        return {"x_grad": total.mean_pairwise_cosine()}

    def vector_and_squared_norms(batch: Any) -> tuple[Params, jax.Array]:
        gradients = gradient(batch)
        return direction(gradients), jnp.stack([jnp.sum(g**2) for g in jax.tree.leaves(gradients)])

    vectors, squared_norms = jax.lax.map(vector_and_squared_norms, minibatches)
    return {
        "x_grad": mean_pairwise_cosine(vectors),
        "x_grad_dominant": dominant_share(vectors),
        "layer_gradient_norm": jnp.sqrt(jnp.mean(squared_norms, axis=0)),
    }


def episode_telemetry(
    learner: Any, state: Any, policy: Callable[[jax.Array], jax.Array], key: jax.Array, taps: Taps
) -> dict[str, jax.Array]:
    """Returns the scalar channels on episodes: performance, acting_performance, evaluation_return, episode_length.

    `evaluation_return` is the mean return of new, undisturbed episodes at the steps of `when_due`, and NaN at all
    others.

    Args:
      learner: an `OnPolicy` or `OffPolicy` learner.
      state: its state after the step.
      policy: maps observations `[episodes, O]` to actions as `Episodes.step` takes them, without exploration.
      key: PRNG key of the evaluation's initial states.
      taps: the step's taps, which know the step and the length of the run.
    """
    settings = learner.settings

    def mean_return() -> jax.Array:
        return jnp.mean(evaluate(learner.env, policy, key, settings.evaluation_episodes, learner.max_episode_steps))

    return {
        "performance": performance(learner.undisturbed.clean(state.copies, state.episodes)),
        "acting_performance": performance(state.episodes),
        "evaluation_return": when_due(taps, settings.evaluations, mean_return),
        "episode_length": mean_length(state.episodes),
    }


def when_due(taps: Taps, times: int, measure: Callable[[], jax.Array]) -> jax.Array:
    """Returns the scalar `measure()` at `times` evenly spaced steps of a run, and NaN at all others.

    The last of these steps is the run's last step. Outside a run the value is always NaN.
    """
    if not times or not taps.steps:
        return jnp.float32(jnp.nan)
    times = min(times, taps.steps)
    due_steps = -(-np.arange(1, times + 1) * taps.steps // times)  # rounded up, so that the last one is the run's
    return jax.lax.cond(jnp.any(jnp.asarray(taps.step) + 1 == due_steps), measure, lambda: jnp.float32(jnp.nan))
