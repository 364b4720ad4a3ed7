"""Training before reinforcement learning: warm start of the policy, the reward model, and value pretraining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaudit.dialogues import automaton
from jaxaudit.dialogues.protocol import END, GOLD, Dialogue
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.settings import DialogueSettings, Numbers

LABEL_REWARD = "seen"
"""The name of the flawed reward that labels pairs for a reward model, if the dialogue has one beside gold."""

UPDATES_PER_CHECK = 15
"""Number of warm-start updates between two checks of the sampled success."""


def demonstrate(dialogue: Dialogue, keys: jax.Array, difficulty: jax.Array, right: jax.Array) -> Rows:
    """Returns demonstrations for the prompts of `keys` `[N]`, right ones where `right`, bool `[N]`, is true."""

    def row(key: jax.Array, right: jax.Array) -> Rows:
        tokens = dialogue.demonstration(key, difficulty, right)
        replayed = automaton.replay(dialogue, key, difficulty, tokens)
        zeros = jnp.zeros(tokens.shape)
        return Rows(
            tokens=jnp.maximum(tokens, 0),
            role=jnp.where(tokens >= 0, replayed.role, END),
            position=replayed.position,
            attention_start=replayed.chunk,
            log_prob=zeros,
            entropy=zeros,
            mass_cut=zeros,
            calls=jnp.zeros(()),
            truncated=jnp.zeros((), bool),
            rewards=replayed.reward,
        )

    return jax.vmap(row)(keys, right)


def warm_start_policy(
    policy: Network,
    params: Any,
    dialogue: Dialogue,
    key: jax.Array,
    success_of: Callable[[Any, jax.Array], jax.Array],
    settings: DialogueSettings,
    numbers: Numbers,
) -> tuple[Any, jax.Array]:
    """Trains a policy on demonstrations until its sampled success reaches `warm_start_success`.

    Success is checked every `UPDATES_PER_CHECK` updates, of which there are at most `warm_start`; after the first check
    that reaches the target, the parameters stay as they are.

    Args:
      policy, params: the network, and its parameters before the warm start.
      dialogue: bound to its data.
      key: PRNG key of the demonstrations.
      success_of: `success_of(params, key)` returns the success of sampled rows.
      settings, numbers: the learner's settings; its numeric ones are read from `numbers`.

    Returns:
      the parameters, and their sampled success.
    """
    adam = optax.scale_by_adam(0.9, 0.95)

    def loss(params: Any, shown: Rows) -> jax.Array:
        log_prob = policy.log_prob_and_entropy(params, None, shown, numbers.temperature)[0]
        return -jnp.sum(jnp.where(shown.response_mask, log_prob, 0.0)) / jnp.maximum(jnp.sum(shown.response_mask), 1)

    def update(carry: tuple[Any, Any], key: jax.Array) -> tuple[Any, Any]:
        params, moments = carry
        right_key, prompts_key = jax.random.split(key)
        is_right = jax.random.bernoulli(right_key, numbers.warm_start_right, (settings.warm_start_rows,))
        keys = jax.random.split(prompts_key, settings.warm_start_rows)
        shown = demonstrate(dialogue, keys, numbers.difficulty, is_right)
        return _adam_step(adam, params, moments, jax.grad(loss)(params, shown), numbers.warm_start_learning_rate)

    def check_and_update(carry: tuple[Any, Any, jax.Array], turn: tuple[jax.Array, jax.Array]) -> tuple[Any, None]:
        params, moments, success = carry
        key, number = turn
        update_key, success_key = jax.random.split(key)
        success = jnp.where(success < numbers.warm_start_success, success_of(params, success_key), success)

        def update_if_due(carry: tuple[Any, Any], turn: tuple[jax.Array, jax.Array]) -> tuple[tuple[Any, Any], None]:
            key, index = turn
            is_within = number * UPDATES_PER_CHECK + index < settings.warm_start
            due = (success < numbers.warm_start_success) & is_within
            after = update(carry, key)
            return jax.tree.map(lambda new, old: jnp.where(due, new, old), after, carry), None

        keys = jax.random.split(update_key, UPDATES_PER_CHECK)
        turns = keys, jnp.arange(UPDATES_PER_CHECK)
        (params, moments), _ = jax.lax.scan(update_if_due, (params, moments), turns)
        return (params, moments, success), None

    checks = -(-settings.warm_start // UPDATES_PER_CHECK) + 1  # after the last check no update is due
    initial = params, adam.init(params), jnp.float32(-1.0)
    turns = jax.random.split(key, checks), jnp.arange(checks)
    (params, _, success), _ = jax.lax.scan(check_and_update, initial, turns)
    return params, success


def train_reward_model(
    network: Network,
    params: Any,
    base: Any,
    dialogue: Dialogue,
    key: jax.Array,
    settings: DialogueSettings,
    numbers: Numbers,
) -> Any:
    """Trains a reward model on pairs of demonstrations of one prompt, and returns its parameters.

    The loss is that of Bradley and Terry (1952). The better row of a pair has the higher `LABEL_REWARD`, or gold where
    the dialogue has none; pairs with equal rewards do not count.
    """
    adam = optax.scale_by_adam(0.9, 0.95)

    def loss(params: Any, right: Rows, wrong: Rows) -> jax.Array:
        margin = network.score(params, base, right) - network.score(params, base, wrong)
        gap = _label_reward(right) - _label_reward(wrong)
        return -jnp.mean(jnp.where(gap == 0, 0.0, jax.nn.log_sigmoid(jnp.sign(gap) * margin)))

    def update(carry: tuple[Any, Any], key: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, moments = carry
        keys = jax.random.split(key, settings.reward_model_pairs)
        sides = (demonstrate(dialogue, keys, numbers.difficulty, jnp.full(len(keys), right)) for right in (True, False))
        gradient = jax.grad(loss)(params, *sides)
        return _adam_step(adam, params, moments, gradient, numbers.reward_model_learning_rate), None

    initial = params, adam.init(params)
    return jax.lax.scan(update, initial, jax.random.split(key, settings.reward_model_warm_start))[0][0]


def _label_reward(rows: Rows) -> jax.Array:
    return rows.rewards.get(LABEL_REWARD, rows.rewards[GOLD])


def pretrain_value_model(
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
    """Fits a value model to a fixed policy's returns (value pretraining; Yuan et al., 2025).

    Args:
      network, params, base: the value model, and its parameters before.
      rows, returns: N rows of the policy, and the return of each response token, `[N, T]`.
      key: PRNG key that chooses the rows of each update.
      updates: number of updates.
      minibatch: number of rows per update, any of the N.
      rate: Adam's initial learning rate; it falls linearly to 0, because most of the variance of returns is noise.

    Returns:
      the value model's parameters after the last update.
    """
    adam = optax.scale_by_adam(0.9, 0.95)

    def loss(params: Any, rows: Rows, returns: jax.Array) -> jax.Array:
        errors = jnp.where(rows.response_mask, network.values(params, base, rows) - returns, 0.0)
        return 0.5 * jnp.sum(errors**2) / jnp.maximum(jnp.sum(rows.response_mask), 1)

    def update(carry: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], None]:
        params, moments = carry
        index = jax.random.randint(jax.random.fold_in(key, number), (minibatch,), 0, returns.shape[0])
        gradient = jax.grad(loss)(params, *jax.tree.map(lambda x: x[index], (rows, returns)))
        direction, moments = adam.update(gradient, moments)
        decayed = rate * (1.0 - number / updates)
        return (jax.tree.map(lambda p, d: p - decayed * d, params, direction), moments), None

    return jax.lax.scan(update, (params, adam.init(params)), jnp.arange(updates))[0][0]


def _adam_step(
    adam: optax.GradientTransformation, params: Any, moments: Any, gradient: Any, rate: jax.Array
) -> tuple[Any, Any]:
    direction, moments = adam.update(gradient, moments)
    return jax.tree.map(lambda p, d: p - rate * d, params, direction), moments
