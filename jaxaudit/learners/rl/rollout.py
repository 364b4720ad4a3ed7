"""Rollouts of a policy with a critic beside it: what on-policy learners learn from."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.taps import Taps
from jaxaudit.kernels.gae import gae
from jaxaudit.models.policy import MLP, Distribution, head_of
from jaxaudit.runtime.paths import paths_of
from jaxaudit.tasks.episodes import CleanEnvs, Episodes, EpisodeState, Undisturbed

LARGEST = 1e15
"""In size; greater ones would leave a variance in float32 infinite for ever."""


@struct.dataclass
class Moments:
    """Mean and population variance of everything seen, for values of shape `[d]` (or scalars).

    Attributes:
      count: values seen for each entry, those left out not counted; shape `[d]`.
      mean: `[d]`.
      variance: `[d]`; 1 before anything was seen.
    """

    count: jax.Array
    mean: jax.Array
    variance: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Moments:
        """Returns statistics of no observations, which normalise nothing."""
        return cls(jnp.zeros(shape), jnp.zeros(shape), jnp.ones(shape))

    def update(self, values: jax.Array) -> Moments:
        """With a batch `[..., d]` added (Chan et al., 1983). Entries not below `LARGEST` in size are left out."""
        axes = tuple(range(values.ndim - self.mean.ndim))
        finite = jnp.abs(values) < LARGEST
        count = jnp.sum(finite, axes, dtype=jnp.float32)
        safe = jnp.maximum(count, 1.0)
        mean = jnp.sum(jnp.where(finite, values, 0.0), axes) / safe
        variance = jnp.sum(jnp.where(finite, (values - mean) ** 2, 0.0), axes) / safe
        total = jnp.maximum(self.count + count, 1.0)
        delta = mean - self.mean
        seen = self.variance * self.count + variance * count + delta**2 * self.count * count / total
        return Moments(
            self.count + count,
            self.mean + delta * count / total,
            jnp.where(self.count + count > 0, seen / total, 1.0),
        )

    def normalize(self, values: jax.Array, limit: float = 10.0) -> jax.Array:
        """Values with the mean taken off and divided by the standard deviation, clipped to +-`limit`."""
        return jnp.clip((values - self.mean) / self.deviation(), -limit, limit)

    def deviation(self) -> jax.Array:
        """The standard deviation that `scale` divides by, `[d]`."""
        return jnp.sqrt(self.variance + 1e-8)

    def scale(self, values: jax.Array, limit: float = 10.0) -> jax.Array:
        """Values divided by the standard deviation, clipped to +-`limit`."""
        return jnp.clip(values / self.deviation(), -limit, limit)


Params = Any


@struct.dataclass
class OnPolicyState:
    """What is carried from one iteration to the next.

    Attributes:
      params: {"actor": ..., "critic": ...}, and what the policy's head trains: a Gaussian {"log_std": `[actions]`}.
      optimizer: Adam's moments.
      episodes: the environments.
      copies: of them, where a disturbance touches acting.
      observations: running moments of the observations, `[observations]`.
      returns: running moments of the discounted return, scalar.
      discounted: each environment's discounted return so far, `[num_envs]`.
    """

    params: Params
    optimizer: Any
    episodes: EpisodeState
    copies: CleanEnvs
    observations: Moments
    returns: Moments
    discounted: jax.Array


class Samples(NamedTuple):
    """What the losses need of each step; leading axes `[rollout_length, num_envs]`, then `[batch]`."""

    observation: jax.Array
    action: jax.Array
    log_probability: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


class Rollouts:
    """Networks, and environments to run them in.

    Args:
      env: a brax `Env` with flat observations, and the attribute `actions` (how many discrete ones there are), or
        `action_low` and `action_high`.
      max_episode_steps: the time limit.
      settings: `OnPolicySettings`.
    """

    discrete = True

    def __init__(self, env: Any, max_episode_steps: int, settings: Any):
        self.env = env
        self.settings = settings
        self.max_episode_steps = max_episode_steps
        self.episodes = Episodes(env, settings.num_envs, max_episode_steps)
        self.undisturbed = Undisturbed(self.episodes, settings.rollout_length)
        self.head = head_of(env, settings.log_std)
        self.actor = MLP(settings.hidden, self.head.outputs, 0.01, settings.orthogonal)
        self.critic = MLP(settings.hidden, 1, 1.0, settings.orthogonal, layer_norm=settings.critic_layer_norm)

    def init_params(self, key: jax.Array) -> Params:
        actor_key, critic_key = jax.random.split(key)
        observation = jnp.zeros(self.env.observation_size)
        return {
            "actor": self.actor.init(actor_key, observation)["params"],
            "critic": self.critic.init(critic_key, observation)["params"],
            **self.head.init_params(),
        }

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of "layer_gradient_norm"."""
        return paths_of(jax.eval_shape(self.init_params, jax.random.key(0)))

    def policy(self, params: Params, observation: jax.Array) -> Distribution:
        """Returns the distribution of the action."""
        return self.head.distribution(self.output(params, observation), params)

    def output(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the actor's output, `[..., outputs]`."""
        output: Any = self.actor.apply({"params": params["actor"]}, observation)
        return output

    def value(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the critic's value of observations, `[...]`."""
        value: Any = self.critic.apply({"params": params["critic"]}, observation)
        return value[..., 0]

    def normalized(self, state: OnPolicyState, observation: jax.Array) -> jax.Array:
        """The observation as the networks see it."""
        return state.observations.normalize(observation) if self.settings.normalize_observations else observation

    def collect(self, state: OnPolicyState, key: jax.Array, taps: Taps) -> tuple[OnPolicyState, Samples]:
        """Steps the environments, and returns samples with advantages, `[rollout_length, num_envs, ...]`."""

        def value(observation: jax.Array) -> jax.Array:
            return self.value(state.params, self.normalized(state, observation))

        def value_in_rewards(observation: jax.Array) -> jax.Array:
            return value(observation) * (state.returns.deviation() if self.settings.normalize_rewards else 1.0)

        def step(taps: Taps, env_state: EpisodeState, index: jax.Array):
            policy_key, env_key = jax.random.split(jax.random.fold_in(key, index))
            output = self.output(state.params, self.normalized(state, env_state.observation))
            action = self.head.sample(policy_key, self.head.distribution(output, state.params))
            taken = self.head.to_task(action)
            after, transition = self.episodes.step(
                env_state, env_key, taken, taps, value_in_rewards, self.settings.gamma
            )
            return after, (env_state.observation, action, output, transition)

        length = self.settings.rollout_length
        turns = jnp.arange(length)
        copies = self.undisturbed.begin(state.copies, state.episodes, taps)
        begin = self.episodes.refresh(state.episodes, jax.random.fold_in(key, length))
        env_state, (observations, actions, outputs, transitions) = taps.scan(step, begin, turns)
        seen = self.normalized(state, observations)
        values = self.value(state.params, seen)
        next_values = value(transitions.final_observation)
        done = transitions.terminated | transitions.truncated
        copies, env_state = self.undisturbed.follow(
            copies, env_state, done.any(0), taps, lambda taps, begin: taps.scan(step, begin, turns)[0]
        )
        rewards, returns, discounted = self.scaled_rewards(state, transitions.reward, done)

        def estimate(lam: Any) -> jax.Array:
            return gae(rewards, values, next_values, transitions.terminated, done, self.settings.gamma, lam)

        lam: Any = self.settings.gae_lambda
        if taps.acts("gae_lambda"):
            lam = taps("gae_lambda", jnp.float32(lam))
        advantages = estimated = estimate(lam)
        if taps.acts("critic_lambda"):
            estimated = estimate(taps("critic_lambda", jnp.asarray(lam, jnp.float32)))
        if taps.acts("advantage"):
            advantages = taps("advantage", advantages, own=jnp.ones(advantages.shape, bool))
        log_probability = self.head.log_probability(self.head.distribution(outputs, state.params), actions)
        samples = Samples(seen, actions, log_probability, values, advantages, estimated + values)
        state = dataclasses.replace(
            state,
            episodes=env_state,
            copies=copies,
            observations=state.observations.update(observations),
            returns=returns,
            discounted=discounted,
        )
        return state, samples

    def scaled_rewards(
        self, state: OnPolicyState, rewards: jax.Array, done: jax.Array
    ) -> tuple[jax.Array, Moments, jax.Array]:
        """Rewards `[T, N]` divided by the standard deviation of the discounted return, and what that carries on."""
        if not self.settings.normalize_rewards:
            return rewards, state.returns, state.discounted

        def accumulate(discounted: jax.Array, step: tuple[jax.Array, jax.Array]):
            reward, ended = step
            discounted = self.settings.gamma * discounted + jnp.where(jnp.isfinite(reward), reward, 0.0)
            return jnp.where(ended, 0.0, discounted), discounted

        discounted, history = jax.lax.scan(accumulate, state.discounted, (rewards, done))
        returns = state.returns.update(history)
        return returns.scale(rewards), returns, discounted
