"""What comes before reinforcement learning: a policy, a reward model and a value model that know something already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaudit.dialogues import automaton
from jaxaudit.dialogues.protocol import END, GOLD, Dialogue
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.rows import Rows

SEEN = "seen"
"""The reward by which pairs for a reward model are labelled, where a dialogue tells it beside the gold one: flawed."""

LOOKS = 15
"""Updates of a warm start from one look at the sampled success to the next."""


def demonstrated(dialogue: Dialogue, keys: jax.Array, difficulty: jax.Array, right: jax.Array) -> Rows:
    """Demonstrations of the prompts of `keys` `[N]`, right ones where `right` (bool `[N]`) says so."""

    def one(key: jax.Array, right: jax.Array) -> Rows:
        tokens = dialogue.demonstration(key, difficulty, right)
        seen = automaton.replay(dialogue, key, difficulty, tokens)
        nothing = jnp.zeros(tokens.shape)
        return Rows(
            tokens=jnp.maximum(tokens, 0),
            role=jnp.where(tokens >= 0, seen.role, END),
            position=seen.position,
            first=seen.chunk,
            log_probability=nothing,
            entropy=nothing,
            cut=nothing,
            calls=jnp.zeros(()),
            truncated=jnp.zeros((), bool),
            rewards=seen.reward,
        )

    return jax.vmap(one)(keys, right)


def warmed_up(
    policy: Network,
    params: Any,
    dialogue: Dialogue,
    key: jax.Array,
    success_of: Callable[[Any, jax.Array], jax.Array],
    *,
    updates: int,
    rows: int,
    right: jax.Array,
    rate: jax.Array,
    enough: jax.Array,
    difficulty: jax.Array,
    temperature: jax.Array,
) -> tuple[Any, jax.Array]:
    """A policy trained on demonstrations until its sampled success is `enough`, and that success.

    It stays as it is from the first look that finds so much, every `LOOKS` updates.

    Args:
      policy, params: it, before.
      dialogue: bound to its data.
      key: decides the demonstrations.
      success_of: `success_of(params, key)`, of sampled rows.
      updates: at most.
      rows: demonstrations of an update.
      right: share of them that is right.
      rate: Adam's.
      enough: success to stop at.
      difficulty, temperature: of the prompts, of the policy.
    """
    adam = optax.scale_by_adam(0.9, 0.95)

    def loss(params: Any, shown: Rows) -> jax.Array:
        told = policy.log_probabilities(params, None, shown, temperature)[0]
        return -jnp.sum(jnp.where(shown.own, told, 0.0)) / jnp.maximum(jnp.sum(shown.own), 1)

    def update(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, moments = carry
        chosen_key, prompts_key = jax.random.split(key)
        chosen = jax.random.bernoulli(chosen_key, right, (rows,))
        shown = demonstrated(dialogue, jax.random.split(prompts_key, rows), difficulty, chosen)
        direction, moments = adam.update(jax.grad(loss)(params, shown), moments)
        return (jax.tree.map(lambda p, d: p - rate * d, params, direction), moments), None

    def look(carry: tuple[Any, Any, jax.Array], turn: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        params, moments, success = carry
        key, number = turn
        update_key, look_key = jax.random.split(key)
        success = jnp.where(success < enough, success_of(params, look_key), success)

        def update_if_due(carry: tuple[Any, Any], one: tuple[jax.Array, jax.Array]) -> tuple[tuple[Any, Any], None]:
            key, place = one
            due = (success < enough) & (number * LOOKS + place < updates)
            after = update(carry, key)[0]
            return jax.tree.map(lambda new, old: jnp.where(due, new, old), after, carry), None

        keys = jax.random.split(update_key, LOOKS)
        kept = jax.lax.scan(update_if_due, (params, moments), (keys, jnp.arange(LOOKS)))[0]
        return (*kept, success), None

    turns = -(-updates // LOOKS) + 1  # the last one looks and leaves it at that
    begun = params, adam.init(params), jnp.float32(-1.0)
    (params, _, success), _ = jax.lax.scan(look, begun, (jax.random.split(key, turns), jnp.arange(turns)))
    return params, success


def reward_model(
    network: Network,
    params: Any,
    base: Any,
    dialogue: Dialogue,
    key: jax.Array,
    *,
    updates: int,
    pairs: int,
    rate: jax.Array,
    difficulty: jax.Array,
) -> Any:
    """A reward model trained on pairs of demonstrations of one prompt (Bradley and Terry, 1952).

    The better of a pair is the one of the higher reward `SEEN`, or gold where there is no other; equal ones teach
    nothing.
    """
    adam = optax.scale_by_adam(0.9, 0.95)

    def loss(params: Any, good: Rows, poor: Rows) -> jax.Array:
        margin = network.score(params, base, good) - network.score(params, base, poor)
        gap = _seen(good) - _seen(poor)
        return -jnp.mean(jnp.where(gap == 0, 0.0, jax.nn.log_sigmoid(jnp.sign(gap) * margin)))

    def update(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, moments = carry
        keys = jax.random.split(key, pairs)
        sides = (demonstrated(dialogue, keys, difficulty, jnp.full(pairs, right)) for right in (True, False))
        direction, moments = adam.update(jax.grad(loss)(params, *sides), moments)
        return (jax.tree.map(lambda p, d: p - rate * d, params, direction), moments), None

    (params, _), _ = jax.lax.scan(update, (params, adam.init(params)), jax.random.split(key, updates))
    return params


def _seen(rows: Rows) -> jax.Array:
    return rows.rewards.get(SEEN, rows.rewards[GOLD])


def value_model(
    network: Network,
    params: Any,
    base: Any,
    rows: Rows,
    returns: jax.Array,
    key: jax.Array,
    *,
    updates: int,
    minibatch: int,
    rate: jax.Array,
) -> Any:
    """A value model fitted to a fixed policy's returns (value pretraining; Yuan et al., 2025).

    Args:
      network, params, base: the value model, before.
      rows, returns: of the policy, and what each own token of them returns, `[N, T]`.
      key: decides which rows an update takes.
      updates: how many.
      minibatch: rows of each, any of the N.
      rate: Adam's at first; it falls linearly to 0, for most of what a row returns is chance.
    """
    adam = optax.scale_by_adam(0.9, 0.95)

    def loss(params: Any, rows: Rows, returns: jax.Array) -> jax.Array:
        errors = jnp.where(rows.own, network.values(params, base, rows) - returns, 0.0)
        return 0.5 * jnp.sum(errors**2) / jnp.maximum(jnp.sum(rows.own), 1)

    def update(carry: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, moments = carry
        chosen = jax.random.randint(jax.random.fold_in(key, number), (minibatch,), 0, returns.shape[0])
        gradient = jax.grad(loss)(params, *jax.tree.map(lambda x: x[chosen], (rows, returns)))
        direction, moments = adam.update(gradient, moments)
        step = rate * (1.0 - number / updates)
        return (jax.tree.map(lambda p, d: p - step * d, params, direction), moments), None

    return jax.lax.scan(update, (params, adam.init(params)), jnp.arange(updates))[0][0]
