"""What a meta-state model is: a latent that follows the telemetry, and says what it expects of the next step."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Params = Any
State = Any


class Innovations(NamedTuple):
    """How a step's telemetry differs from what was expected: `[..., d]` each, zero where nothing was seen.

    Attributes:
      standardised: (y - expected) / standard deviation; independent standard normals where the model holds.
      log_std: log of that standard deviation.
      seen: 1 where there was a value, else 0.
    """

    standardised: jax.Array
    log_std: jax.Array
    seen: jax.Array

    @property
    def log_likelihood(self) -> jax.Array:
        """Log density of the values seen, in nats: `[...]`."""
        each = -0.5 * self.standardised**2 - self.log_std - 0.5 * jnp.log(2.0 * jnp.pi) * self.seen
        return each.sum(-1)

    @property
    def squared(self) -> jax.Array:
        """Normalised innovation squared, chi-squared with as many degrees of freedom as were seen: `[...]`."""
        return jnp.sum(self.standardised**2, axis=-1)


class MetaStateModel(Protocol):
    """h_{t+1} = f(h_t, y_t), and a Gaussian for y_t given h_t.

    `seen` is 1 where a channel has a value at a step, else 0; there `y` may be anything finite.
    """

    def init(self, key: jax.Array, channels: int) -> Params:
        """Returns fresh parameters for d channels."""

    def initial(self, params: Params) -> State:
        """Returns the state before the first step."""

    def advance(self, params: Params, state: State, y: jax.Array, seen: jax.Array) -> State:
        """The state after a step's telemetry, `[d]`."""

    def advance_all(self, params: Params, y: jax.Array, seen: jax.Array) -> tuple[State, Innovations]:
        """States after each of T steps, leaves `[T, ...]`, and all innovations; `y` and `seen` are `[T, d]`."""

    def innovations(self, params: Params, state: State, y: jax.Array, seen: jax.Array) -> Innovations:
        """A step's telemetry `[d]`, against what the state before it expects."""

    def latent(self, params: Params, state: State) -> jax.Array:
        """Returns the meta-state, `[n]`."""


def one_by_one(model: MetaStateModel, params: Params, y: jax.Array, seen: jax.Array) -> State:
    """The states of `advance_all`, of a model that can only take a step after the other."""

    def step(state: State, row: tuple[jax.Array, jax.Array]) -> tuple[State, State]:
        state = model.advance(params, state, *row)
        return state, state

    return jax.lax.scan(step, model.initial(params), (y, seen))[1]


def innovations_all(model: MetaStateModel, params: Params, after: State, y: jax.Array, seen: jax.Array) -> Innovations:
    """The innovations of `advance_all`, all at once from the states after each step."""
    before = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest[:-1]]), model.initial(params), after)
    return jax.vmap(model.innovations, in_axes=(None, 0, 0, 0))(params, before, y, seen)


def follow(model: MetaStateModel, params: Params, y: jax.Array, seen: jax.Array) -> tuple[jax.Array, Innovations]:
    """A whole series at once.

    Args:
      model: the model.
      params: its parameters.
      y: telemetry `[T, d]`.
      seen: `[T, d]`.

    Returns:
      the latents after each step `[T, n]`, and each step's innovations, given the steps before it.
    """
    after, found = model.advance_all(params, y, seen)
    return jax.vmap(model.latent, in_axes=(None, 0))(params, after), found
