"""The base of PPO and TRPO: settings, running moments, rollouts with advantages, and one iteration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxaudit.core.optimizer import Optimizer, finish
from jaxaudit.core.taps import Taps
from jaxaudit.kernels.gae import gae
from jaxaudit.kernels.shuffle import shuffled
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.telemetry import episode_telemetry
from jaxaudit.models.policy import MLP, Distribution, head_of
from jaxaudit.runtime.paths import paths_of
from jaxaudit.tasks.episodes import CleanEnvs, Episodes, EpisodeState, Undisturbed

Params = Any

LARGEST = 1e15
"""Values of this magnitude or more are left out of `Moments`: they would make a float32 variance infinite for ever."""


@dataclass(frozen=True)
class OnPolicySettings:
    """The settings that PPO and TRPO share.

    Attributes:
      num_envs: number of environments that a lane steps in parallel.
      rollout_length: number of steps of each environment in one iteration.
      minibatch_size: number of samples in a minibatch. It divides num_envs * rollout_length.
      gamma: discount factor.
      gae_lambda: lambda of generalised advantage estimation.
      normalize_observations: whether observations are normalised by their running mean and variance.
      normalize_rewards: whether rewards are divided by the running standard deviation of the discounted return.
      normalize_advantages: whether advantages are normalised before they enter the policy loss.
      orthogonal: whether weights are initialised orthogonally.
      hidden: widths of the hidden layers of actor and critic.
      critic_layer_norm: whether the critic has layer normalisation before each activation.
      log_std: initial logarithm of the policy's standard deviation. It matters to continuous actions only.
      evaluations: how many times in a run the policy's mode is evaluated, evenly spaced. 0 means never.
      evaluation_episodes: number of episodes in each evaluation.
      telemetry: "basic", or "full", which adds per-layer norms and the dominant share of the gradients' Gram matrix.
    """

    num_envs: int = 8
    rollout_length: int = 256
    minibatch_size: int = 64
    gamma: float = 0.99
    gae_lambda: float = 0.95
    normalize_observations: bool = True
    normalize_rewards: bool = True
    normalize_advantages: bool = True
    orthogonal: bool = True
    hidden: tuple[int, ...] = (64, 64)
    critic_layer_norm: bool = False
    log_std: float = 0.0
    evaluations: int = 10
    evaluation_episodes: int = 4
    telemetry: str = "full"

    def __post_init__(self):
        checks.at_least_one(self, "num_envs", "rollout_length", "minibatch_size", "evaluation_episodes")
        checks.not_negative(self, "evaluations")
        checks.fractions(self, "gamma", "gae_lambda")
        checks.widths(self)
        checks.telemetry(self.telemetry)
        if self.batch_size > 2**16:
            raise ValueError(f"num_envs * rollout_length must be at most 65536, not {self.batch_size}")
        if self.batch_size % self.minibatch_size:
            raise ValueError(
                f"minibatch_size {self.minibatch_size} does not divide the {self.batch_size} samples of an iteration "
                "(num_envs * rollout_length)"
            )

    @property
    def batch_size(self) -> int:
        """The number of environment steps in one iteration."""
        return self.num_envs * self.rollout_length

    @property
    def minibatches(self) -> int:
        """The number of minibatches in one pass over an iteration's samples."""
        return self.batch_size // self.minibatch_size


@struct.dataclass
class Moments:
    """Running mean and population variance of values of shape `[d]`, or of scalars.

    Attributes:
      count: `[d]`, number of values that each entry has accumulated; values that were left out are not counted.
      mean: `[d]`.
      variance: `[d]`; 1 before the first update.
    """

    count: jax.Array
    mean: jax.Array
    variance: jax.Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Moments:
        """Returns the moments of no values, whose normalisation is the identity."""
        return cls(jnp.zeros(shape), jnp.zeros(shape), jnp.ones(shape))

    def update(self, values: jax.Array) -> Moments:
        """Returns the moments with a batch `[..., d]` accumulated (Chan et al., 1983).

        NaN entries and entries of magnitude `LARGEST` or more are left out.
        """
        axes = tuple(range(values.ndim - self.mean.ndim))
        finite = jnp.abs(values) < LARGEST
        count = jnp.sum(finite, axes, dtype=jnp.float32)
        safe = jnp.maximum(count, 1.0)
        mean = jnp.sum(jnp.where(finite, values, 0.0), axes) / safe
        variance = jnp.sum(jnp.where(finite, (values - mean) ** 2, 0.0), axes) / safe
        total = jnp.maximum(self.count + count, 1.0)
        delta = mean - self.mean
        squares = self.variance * self.count + variance * count + delta**2 * self.count * count / total
        return Moments(
            self.count + count,
            self.mean + delta * count / total,
            jnp.where(self.count + count > 0, squares / total, 1.0),
        )

    def normalize(self, values: jax.Array, limit: float = 10.0) -> jax.Array:
        """Returns values minus the mean, divided by the standard deviation, and clipped to [-limit, limit]."""
        return jnp.clip((values - self.mean) / self.deviation(), -limit, limit)

    def deviation(self) -> jax.Array:
        """Returns the standard deviation that `normalize` and `scale` divide by, `[d]`."""
        return jnp.sqrt(self.variance + 1e-8)

    def scale(self, values: jax.Array, limit: float = 10.0) -> jax.Array:
        """Returns values divided by the standard deviation and clipped to [-limit, limit]."""
        return jnp.clip(values / self.deviation(), -limit, limit)


@struct.dataclass
class OnPolicyState:
    """The learner's state between two iterations.

    Attributes:
      params: {"actor": ..., "critic": ...}, and the parameters of the policy's head: a Gaussian's {"log_std":
        `[actions]`}.
      optimizer: Adam's moments.
      episodes: the training environments.
      copies: undisturbed copies of the environments, which are in use while a perturbation affects acting.
      observations: running moments of the observations, `[observations]`.
      returns: running moments of the discounted return, scalar.
      discounted: discounted return of each environment's running episode, `[num_envs]`.
    """

    params: Params
    optimizer: Any
    episodes: EpisodeState
    copies: CleanEnvs
    observations: Moments
    returns: Moments
    discounted: jax.Array


class Samples(NamedTuple):
    """The inputs of the losses for each step, `[rollout_length, num_envs, ...]` or, in a minibatch, `[batch, ...]`."""

    observation: jax.Array
    action: jax.Array
    log_probability: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


class OnPolicy:
    """An on-policy learner, whose iteration collects samples and improves actor and critic with them.

    Subclasses implement `improve`.

    Args:
      env: a brax `Env` with flat observations. It has the attribute `actions`, the number of discrete actions, or the
        attributes `action_low` and `action_high`.
      max_episode_steps: the time limit of an episode.
      settings: `OnPolicySettings`.
      optimizer: the optimizer, whose label begins the paths of the parameters that it trains.
    """

    discrete = True

    def __init__(self, env: Any, max_episode_steps: int, settings: Any, optimizer: Optimizer):
        self.env = env
        self.settings = settings
        self.max_episode_steps = max_episode_steps
        self.episodes = Episodes(env, settings.num_envs, max_episode_steps)
        self.undisturbed = Undisturbed(self.episodes, settings.rollout_length)
        self.head = head_of(env, settings.log_std)
        self.actor = MLP(settings.hidden, self.head.outputs, 0.01, settings.orthogonal)
        self.critic = MLP(settings.hidden, 1, 1.0, settings.orthogonal, layer_norm=settings.critic_layer_norm)
        self.optimizer = optimizer

    def improve(
        self, params: Params, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Params, Any, dict[str, jax.Array]]:
        """Trains on samples `[rollout_length, num_envs]`, and returns parameters, optimizer state and telemetry."""
        raise NotImplementedError

    def trained(self, params: Params) -> Params:
        """Returns the part of the parameters that the optimizer trains."""
        return params

    def init_params(self, key: jax.Array) -> Params:
        actor_key, critic_key = jax.random.split(key)
        observation = jnp.zeros(self.env.observation_size)
        return {
            "actor": self.actor.init(actor_key, observation)["params"],
            "critic": self.critic.init(critic_key, observation)["params"],
            **self.head.init_params(),
        }

    def init(self, key: jax.Array) -> OnPolicyState:
        params_key, episodes_key = jax.random.split(key)
        params = self.init_params(params_key)
        begin = self.episodes.init(episodes_key)
        return OnPolicyState(
            params=params,
            optimizer=self.optimizer.init(self.trained(params)),
            episodes=begin,
            copies=self.undisturbed.init(begin),
            observations=Moments.zeros((self.env.observation_size,)),
            returns=Moments.zeros(()),
            discounted=jnp.zeros(self.settings.num_envs),
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the channel "layer_gradient_norm"."""
        return paths_of(jax.eval_shape(self.init_params, jax.random.key(0)))

    def policy(self, params: Params, observation: jax.Array) -> Distribution:
        """Returns the distribution of the action for normalised observations."""
        return self.head.distribution(self.output(params, observation), params)

    def output(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the actor's output for normalised observations, `[..., outputs]`."""
        output: Any = self.actor.apply({"params": params["actor"]}, observation)
        return output

    def value(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the critic's value of observations, `[...]`."""
        value: Any = self.critic.apply({"params": params["critic"]}, observation)
        return value[..., 0]

    def normalized(self, state: OnPolicyState, observation: jax.Array) -> jax.Array:
        """Returns the observation as the networks receive it."""
        return state.observations.normalize(observation) if self.settings.normalize_observations else observation

    def step(self, state: OnPolicyState, key: jax.Array, taps: Taps) -> tuple[OnPolicyState, dict[str, jax.Array]]:
        """Trains for one iteration of `num_envs * rollout_length` environment steps."""
        collect_key, improve_key, evaluation_key = jax.random.split(key, 3)
        # All parameters pass one tap, so that a perturbation of "one layer" chooses among those of actor and critic.
        params = taps("params", state.params, reinitialise=self.init_params)
        optimizer = taps("optimizer_state", state.optimizer, label=self.optimizer.label)
        state, samples = self.collect(dataclasses.replace(state, params=params), collect_key, taps)
        improved, optimizer, telemetry = self.improve(params, optimizer, samples, improve_key, taps)
        improved, optimizer = finish(
            improved,
            optimizer,
            taps,
            reinitialise=self.init_params,
            new_moments=lambda params: self.optimizer.init(self.trained(params)),
        )
        state = dataclasses.replace(state, params=improved, optimizer=optimizer)

        def best_action(observation: jax.Array) -> jax.Array:
            return self.head.to_task(self.head.mode(self.policy(state.params, self.normalized(state, observation))))

        return state, telemetry | episode_telemetry(self, state, best_action, evaluation_key, taps) | {
            "explained_variance": 1.0 - jnp.var(samples.target - samples.value) / jnp.var(samples.target),
            "entropy": jnp.mean(self.head.entropy(self.policy(state.params, samples.observation))),
            "params_norm": optax.tree.norm(state.params),
            "update_norm": optax.tree.norm(jax.tree.map(jnp.subtract, state.params, params)),
        }

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
            next_env_state, transition = self.episodes.step(
                env_state, env_key, self.head.to_task(action), taps, value_in_rewards, self.settings.gamma
            )
            return next_env_state, (env_state.observation, action, output, transition)

        length = self.settings.rollout_length
        indices = jnp.arange(length)
        copies = self.undisturbed.begin(state.copies, state.episodes, taps)
        begin = self.episodes.refresh(state.episodes, jax.random.fold_in(key, length))
        env_state, (observations, actions, outputs, transitions) = taps.scan(step, begin, indices)
        normalized = self.normalized(state, observations)
        values = self.value(state.params, normalized)
        next_values = value(transitions.final_observation)
        done = transitions.terminated | transitions.truncated
        copies, env_state = self.undisturbed.follow(
            copies, env_state, done.any(0), taps, lambda taps, begin: taps.scan(step, begin, indices)[0]
        )
        rewards, returns, discounted = self.scaled_rewards(state, transitions.reward, done)

        def estimate(lam: Any) -> jax.Array:
            return gae(rewards, values, next_values, transitions.terminated, done, self.settings.gamma, lam)

        lam: Any = self.settings.gae_lambda
        if taps.acts("gae_lambda"):
            lam = taps("gae_lambda", jnp.float32(lam))
        advantages = critic_advantages = estimate(lam)
        if taps.acts("critic_lambda"):
            critic_advantages = estimate(taps("critic_lambda", jnp.asarray(lam, jnp.float32)))
        if taps.acts("advantage"):
            advantages = taps("advantage", advantages, own=jnp.ones(advantages.shape, bool))
        log_probability = self.head.log_probability(self.head.distribution(outputs, state.params), actions)
        samples = Samples(normalized, actions, log_probability, values, advantages, critic_advantages + values)
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
        """Divides rewards `[T, N]` by the running standard deviation of the discounted return.

        The moments of the returns are updated with this rollout first.

        Returns:
          the scaled rewards, and the new values of the state's fields `returns` and `discounted`.
        """
        if not self.settings.normalize_rewards:
            return rewards, state.returns, state.discounted

        def accumulate(discounted: jax.Array, step: tuple[jax.Array, jax.Array]):
            reward, ended = step
            discounted = self.settings.gamma * discounted + jnp.where(jnp.isfinite(reward), reward, 0.0)
            return jnp.where(ended, 0.0, discounted), discounted

        discounted, history = jax.lax.scan(accumulate, state.discounted, (rewards, done))
        returns = state.returns.update(history)
        return returns.scale(rewards), returns, discounted

    def scaled_advantages(self, advantages: jax.Array) -> jax.Array:
        """Returns advantages as the policy loss uses them: standardised, unless the settings turn that off."""
        if not self.settings.normalize_advantages:
            return advantages
        return (advantages - jnp.mean(advantages)) / (jnp.std(advantages) + 1e-8)

    def flat(self, samples: Samples) -> Samples:
        """Returns an iteration's samples with the first two axes joined, `[batch_size, ...]`."""
        return jax.tree.map(lambda x: x.reshape(self.settings.batch_size, *x.shape[2:]), samples)

    def epochs(
        self,
        minibatch: Callable[[Taps, Any, Samples], tuple[Any, Any]],
        carry: Any,
        samples: Samples,
        times: int,
        key: jax.Array,
        taps: Taps,
    ) -> tuple[Any, Any]:
        """Scans `minibatch(taps, carry, batch) -> (carry, y)` over `times` epochs, each in a new random order.

        Returns:
          the last carry, and every y, `[times, minibatches, ...]`.
        """
        data = self.flat(samples)

        def epoch(taps: Taps, carry: Any, epoch_key: jax.Array):
            # The rows are gathered before the loop: within it, each array would take a kernel of its own on a GPU.
            rows = self.order(epoch_key)
            return taps.scan(minibatch, carry, jax.tree.map(lambda x: x[rows], data))

        return taps.scan(epoch, carry, jax.random.split(key, times))

    def random_minibatch(self, samples: Samples, key: jax.Array) -> Samples:
        """Draws a minibatch with replacement from an iteration's samples `[rollout_length, num_envs]`."""
        rows = jax.random.randint(key, (self.settings.minibatch_size,), 0, self.settings.batch_size)
        return jax.tree.map(lambda x: x[rows], self.flat(samples))

    def order(self, key: jax.Array) -> jax.Array:
        """Returns a random order of the rows of `flat` samples, as int `[minibatches, minibatch_size]`."""
        order = shuffled(key, self.settings.batch_size)
        return order.reshape(self.settings.minibatches, self.settings.minibatch_size)
