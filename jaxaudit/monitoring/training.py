"""Maximum likelihood for meta-state models, on clean lanes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jaxaudit.monitoring.model import MetaStateModel, Params, follow
from jaxaudit.runtime.tracing import float32_products


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
      iterations: of Adam.
      learning_rate: at the beginning; it falls to zero along a cosine.
      batch_size: lanes of an iteration, drawn with replacement.
      max_norm: threshold on the gradient's norm.
    """

    iterations: int = 400
    learning_rate: float = 3e-2
    batch_size: int = 16
    max_norm: float = 1.0


def log_likelihood(model: MetaStateModel, params: Params, y: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log likelihood of a lane `[T, d]` in nats, and the number of its values."""
    _, found = follow(model, params, y, seen)
    return found.log_likelihood.sum(), seen.sum()


def train(
    model: MetaStateModel,
    settings: Training,
    y: jax.Array,
    seen: jax.Array,
    key: jax.Array,
    weights: jax.Array,
) -> tuple[Params, jax.Array]:
    """One model on some of the lanes.

    Args:
      model: the model.
      settings: how.
      y: standardised telemetry, `[lanes, T, d]`.
      seen: `[lanes, T, d]`.
      key: PRNG key.
      weights: how often a lane is drawn, `[lanes]`; zero: never.

    Returns:
      parameters, and minus the mean log likelihood of a value at each iteration, `[iterations]`.
    """
    begin_key, draw_key = jax.random.split(key)
    params = model.init(begin_key, y.shape[-1])
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.iterations)
    optimizer = optax.chain(optax.clip_by_global_norm(settings.max_norm), optax.adam(schedule))

    def loss(params: Params, y: jax.Array, seen: jax.Array) -> jax.Array:
        likelihood, values = jax.vmap(partial(log_likelihood, model, params))(y, seen)
        return -likelihood.sum() / jnp.maximum(values.sum(), 1.0)

    def iteration(carry: tuple[Params, Any], key: jax.Array) -> tuple[tuple[Params, Any], jax.Array]:
        params, state = carry
        lanes = jax.random.choice(key, len(y), (settings.batch_size,), p=weights / weights.sum())
        value, gradient = jax.value_and_grad(loss)(params, y[lanes], seen[lanes])
        change, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, change), state), value

    begin = (params, optimizer.init(params))
    (params, _), losses = jax.lax.scan(iteration, begin, jax.random.split(draw_key, settings.iterations))
    return params, losses


def train_members(
    model: MetaStateModel, settings: Training, y: ArrayLike, seen: ArrayLike, weights: ArrayLike, seed: int = 0
) -> tuple[Params, np.ndarray]:
    """Several models side by side, in one program: folds, seeds, or both.

    The arguments are those of `train`, but `weights`, `[members, lanes]`, and `seed`, of the members' keys. So are
    the results, with a leading axis `[members]`.
    """
    weights = jnp.asarray(weights, jnp.float32)
    keys = jax.random.split(jax.random.key(seed), len(weights))
    params, losses = _train_members(model, settings, jnp.asarray(y), jnp.asarray(seen), keys, weights)
    return params, np.asarray(losses)


def train_one(model: MetaStateModel, settings: Training, y: ArrayLike, seen: ArrayLike, seed: int = 0) -> Params:
    """The parameters of one model, trained on all lanes `[lanes, T, d]`; the arguments are those of `train`."""
    members, _ = train_members(model, settings, y, seen, np.ones((1, np.shape(y)[0])), seed)
    return jax.tree.map(lambda x: x[0], members)


@partial(jax.jit, static_argnums=(0, 1))
@float32_products
def _train_members(
    model: MetaStateModel, settings: Training, y: jax.Array, seen: jax.Array, keys: jax.Array, weights: jax.Array
) -> tuple[Params, jax.Array]:
    return jax.vmap(partial(train, model, settings), in_axes=(None, None, 0, 0))(y, seen, keys, weights)
