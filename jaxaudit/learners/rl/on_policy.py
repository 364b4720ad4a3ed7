"""What PPO and TRPO share: settings, an iteration's outline, loops over minibatches, evaluation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaudit.core.optimizer import Optimizer, finish
from jaxaudit.core.taps import Taps
from jaxaudit.kernels.shuffle import shuffled
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.evaluation import evaluate_when_due
from jaxaudit.learners.rl.rollout import Moments, OnPolicyState, Params, Rollouts, Samples
from jaxaudit.tasks import episodes


@dataclass(frozen=True)
class OnPolicySettings:
    """The settings PPO and TRPO share.

    Attributes:
      num_envs: environments a lane steps side by side.
      rollout_length: steps of each environment in one iteration.
      minibatch_size: samples in a minibatch; divides num_envs * rollout_length.
      gamma: discount factor.
      gae_lambda: lambda of generalised advantage estimation.
      normalize_observations: by their running mean and variance.
      normalize_rewards: by the running variance of the discounted return.
      normalize_advantages: where the policy's loss takes them.
      orthogonal: orthogonal initialisation.
      hidden: widths of the hidden layers of actor and critic.
      critic_layer_norm: layer normalisation in the critic, before each activation.
      log_std: initial logarithm of the policy's standard deviation, where actions are continuous.
      evaluations: how often in a run the policy's likeliest action is evaluated, evenly spaced; 0: never.
      evaluation_episodes: episodes of each evaluation.
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


class OnPolicy(Rollouts):
    """One iteration: collect samples, `improve` actor and critic with them; subclasses say how.

    Args:
      env, max_episode_steps, settings: as in `Rollouts`.
      optimizer: its label begins the paths of what it trains.
    """

    def __init__(self, env: Any, max_episode_steps: int, settings: Any, optimizer: Optimizer):
        super().__init__(env, max_episode_steps, settings)
        self.optimizer = optimizer

    def improve(
        self, params: Params, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Params, Any, dict[str, jax.Array]]:
        """Parameters and optimizer state after learning from `samples` `[rollout_length, num_envs]`, and telemetry."""
        raise NotImplementedError

    def trained(self, params: Params) -> Params:
        """The part of the parameters that the optimizer trains."""
        return params

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

    def step(self, state: OnPolicyState, key: jax.Array, taps: Taps) -> tuple[OnPolicyState, dict[str, jax.Array]]:
        """One iteration of `num_envs * rollout_length` environment steps."""
        collect_key, improve_key, evaluation_key = jax.random.split(key, 3)
        # One tap over all parameters, whoever trains them: "one layer" is one of actor and critic together.
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

        return state, telemetry | {
            "performance": episodes.performance(self.undisturbed.clean(state.copies, state.episodes)),
            "acting_performance": episodes.performance(state.episodes),
            "evaluation_return": evaluate_when_due(
                self.env,
                best_action,
                evaluation_key,
                taps,
                times=self.settings.evaluations,
                episodes=self.settings.evaluation_episodes,
                max_episode_steps=self.max_episode_steps,
            ),
            "episode_length": episodes.mean_length(state.episodes),
            "explained_variance": 1.0 - jnp.var(samples.target - samples.value) / jnp.var(samples.target),
            "entropy": jnp.mean(self.head.entropy(self.policy(state.params, samples.observation))),
            "params_norm": optax.tree.norm(state.params),
            "update_norm": optax.tree.norm(jax.tree.map(jnp.subtract, state.params, params)),
        }

    def flat(self, samples: Samples) -> Samples:
        """The samples of an iteration in one row, `[batch_size, ...]`."""
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
        """Scans `minibatch(taps, carry, batch) -> (carry, y)` over the samples, `times` times in a new order.

        Returns the last carry, and every y: `[times, minibatches, ...]`.
        """
        data = self.flat(samples)

        def epoch(taps: Taps, carry: Any, epoch_key: jax.Array):
            rows = self.order(epoch_key)  # gathered once: in the loop each array would be a kernel on a GPU
            return taps.scan(minibatch, carry, jax.tree.map(lambda x: x[rows], data))

        return taps.scan(epoch, carry, jax.random.split(key, times))

    def random_minibatch(self, samples: Samples, key: jax.Array) -> Samples:
        """A minibatch of an iteration's samples `[rollout_length, num_envs]`, drawn with replacement."""
        rows = jax.random.randint(key, (self.settings.minibatch_size,), 0, self.settings.batch_size)
        return jax.tree.map(lambda x: x[rows], self.flat(samples))

    def order(self, key: jax.Array) -> jax.Array:
        """The rows of `flat` samples in random order, as minibatches: int, `[minibatches, minibatch_size]`."""
        order = shuffled(key, self.settings.batch_size)
        return order.reshape(self.settings.minibatches, self.settings.minibatch_size)
