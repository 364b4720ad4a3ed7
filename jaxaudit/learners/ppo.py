"""Proximal policy optimization (Schulman et al., 2017) for continuous control, with Table S2's hyper-parameters."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxaudit import registry
from jaxaudit.kernels.coherence import CoherenceSum, dominant_share
from jaxaudit.kernels.gae import gae
from jaxaudit.kernels.shuffle import shuffled
from jaxaudit.learner import Learner
from jaxaudit.learners import settings as checks
from jaxaudit.learners.evaluation import evaluate_when_due
from jaxaudit.learners.normalizer import Moments
from jaxaudit.learners.optimizer import Optimizer, Update, linear_to_zero
from jaxaudit.models.mlp import MLP, gaussian_entropy, gaussian_log_probability
from jaxaudit.taps import Taps, paths_of
from jaxaudit.tasks import episodes, make
from jaxaudit.tasks.episodes import Episodes, EpisodeState


@dataclass(frozen=True)
class PPOSettings:
    """PPO's hyper-parameters; the defaults are Table S2's, and beyond it those of published results.

    Attributes:
      num_envs: environments a lane steps side by side.
      rollout_length: steps of each environment in one iteration.
      epochs: passes over an iteration's data.
      minibatch_size: samples in a minibatch; divides num_envs * rollout_length.
      learning_rate: Adam's.
      anneal: learning rate goes linearly to zero over the run.
      gamma: discount factor.
      gae_lambda: lambda of generalised advantage estimation.
      clip: clipping parameter of the probability ratio.
      clip_value: clip the value's change by the same parameter.
      entropy_coefficient: weight of the entropy bonus.
      value_coefficient: weight of the value loss.
      max_grad_norm: threshold on the gradient's global norm.
      normalize_observations: by their running mean and variance.
      normalize_rewards: by the running variance of the discounted return.
      normalize_advantages: in every minibatch.
      orthogonal: orthogonal initialisation.
      hidden: widths of the hidden layers of actor and critic.
      log_std: initial logarithm of the policy's standard deviation.
      evaluations: how often in a run the policy's mean action is evaluated, evenly spaced; 0: never.
      evaluation_episodes: episodes of each evaluation.
      telemetry: "basic", or "full", which adds per-layer norms and the dominant share of the gradients' Gram matrix.
    """

    num_envs: int = 8
    rollout_length: int = 256
    epochs: int = 10
    minibatch_size: int = 64
    learning_rate: float = 3e-4
    anneal: bool = True
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    clip_value: bool = True
    entropy_coefficient: float = 0.01
    value_coefficient: float = 0.5
    max_grad_norm: float = 0.5
    normalize_observations: bool = True
    normalize_rewards: bool = True
    normalize_advantages: bool = True
    orthogonal: bool = True
    hidden: tuple[int, ...] = (64, 64)
    log_std: float = 0.0
    evaluations: int = 10
    evaluation_episodes: int = 4
    telemetry: str = "full"

    def __post_init__(self):
        checks.at_least_one(self, "num_envs", "rollout_length", "epochs", "minibatch_size", "evaluation_episodes")
        checks.positive(self, "learning_rate", "max_grad_norm")
        checks.not_negative(self, "clip", "entropy_coefficient", "value_coefficient", "evaluations")
        checks.fractions(self, "gamma", "gae_lambda")
        checks.widths(self.hidden)
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
        """Environment steps in one iteration."""
        return self.num_envs * self.rollout_length


@struct.dataclass
class PPOState:
    """What PPO carries from one iteration to the next.

    Attributes:
      params: {"actor": ..., "critic": ..., "log_std": `[actions]`}.
      optimizer: Adam's moments.
      episodes: the environments.
      observations: running moments of the observations, `[observations]`.
      returns: running moments of the discounted return, scalar.
      discounted: each environment's discounted return so far, `[num_envs]`.
    """

    params: Any
    optimizer: Any
    episodes: EpisodeState
    observations: Moments
    returns: Moments
    discounted: jax.Array


class Samples(NamedTuple):
    """What the losses need of each step; leading axes `[rollout_length, num_envs]`, then `[minibatch_size]`."""

    observation: jax.Array
    action: jax.Array
    log_probability: jax.Array
    value: jax.Array
    advantage: jax.Array
    target: jax.Array


@struct.dataclass
class Progress:
    """What the loop over minibatches carries.

    Attributes:
      params, optimizer: as updated so far.
      coherence: of the first epoch's gradients, taken at nearly one point; later epochs see the same samples again.
      gradients: the first epoch's, `[minibatches, ...]`, or None in basic telemetry.
      index: minibatches done; the same in all lanes.
    """

    params: Any
    optimizer: Any
    coherence: CoherenceSum
    gradients: Any
    index: jax.Array


class PPO:
    """One iteration: collect, estimate advantages, improve actor and critic over shuffled minibatches."""

    def __init__(self, env: Any, max_episode_steps: int, settings: PPOSettings):
        self.env = env
        self.settings = settings
        self.max_episode_steps = max_episode_steps
        self.episodes = Episodes(env, settings.num_envs, max_episode_steps)
        self.actor = MLP(settings.hidden, env.action_size, 0.01, settings.orthogonal)
        self.critic = MLP(settings.hidden, 1, 1.0, settings.orthogonal)
        rate = settings.learning_rate
        self.optimizer = Optimizer(
            optax.scale_by_adam(eps=1e-5),
            linear_to_zero(rate) if settings.anneal else rate,
            settings.max_grad_norm,
        )
        self.minibatches = settings.batch_size // settings.minibatch_size

    def init(self, key: jax.Array) -> PPOState:
        """The state before the first iteration."""
        params_key, episodes_key = jax.random.split(key)
        params = self.init_params(params_key)
        return PPOState(
            params=params,
            optimizer=self.optimizer.init(params),
            episodes=self.episodes.init(episodes_key),
            observations=Moments.zeros((self.env.observation_size,)),
            returns=Moments.zeros(()),
            discounted=jnp.zeros(self.settings.num_envs),
        )

    def init_params(self, key: jax.Array) -> Any:
        """Fresh parameters."""
        actor_key, critic_key = jax.random.split(key)
        observation = jnp.zeros(self.env.observation_size)
        return {
            "actor": self.actor.init(actor_key, observation)["params"],
            "critic": self.critic.init(critic_key, observation)["params"],
            "log_std": jnp.full(self.env.action_size, self.settings.log_std),
        }

    def step(self, state: PPOState, key: jax.Array, taps: Taps) -> tuple[PPOState, dict[str, jax.Array]]:
        """One iteration of `num_envs * rollout_length` environment steps."""
        collect_key, shuffle_key, evaluation_key = jax.random.split(key, 3)
        params, optimizer = self.optimizer.disturb(state.params, state.optimizer, taps, self.init_params)
        state = dataclasses.replace(state, params=params, optimizer=optimizer)
        state, samples = self.collect(state, collect_key, taps)
        improved, telemetry = self.improve(params, optimizer, samples, shuffle_key, taps)
        state = dataclasses.replace(state, params=improved.params, optimizer=improved.optimizer)
        telemetry |= {
            "performance": episodes.performance(state.episodes),
            "evaluation_return": evaluate_when_due(
                self.env,
                lambda observation: self.to_action_space(
                    self.policy(state.params, self.normalized(state, observation))[0]
                ),
                evaluation_key,
                taps,
                times=self.settings.evaluations,
                episodes=self.settings.evaluation_episodes,
                max_episode_steps=self.max_episode_steps,
            ),
            "episode_length": jnp.mean(state.episodes.last_length),
            "explained_variance": 1.0 - jnp.var(samples.target - samples.value) / jnp.var(samples.target),
            "entropy": gaussian_entropy(state.params["log_std"]),
            "params_norm": optax.tree.norm(state.params),
        }
        return state, telemetry

    def policy(self, params: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and log standard deviation of the action: `[..., actions]`, `[actions]`."""
        mean: Any = self.actor.apply({"params": params["actor"]}, observation)
        return mean, params["log_std"]

    def value(self, params: Any, observation: jax.Array) -> jax.Array:
        """The critic's value: `[...]`."""
        value: Any = self.critic.apply({"params": params["critic"]}, observation)
        return value[..., 0]

    def normalized(self, state: PPOState, observation: jax.Array) -> jax.Array:
        """The observation as the networks see it."""
        return state.observations.normalize(observation) if self.settings.normalize_observations else observation

    def to_action_space(self, action: jax.Array) -> jax.Array:
        """The policy's action clipped to what the task accepts."""
        return jnp.clip(action, self.env.action_low, self.env.action_high)

    def collect(self, state: PPOState, key: jax.Array, taps: Taps) -> tuple[PPOState, Samples]:
        """Steps the environments, and returns samples with advantages, `[rollout_length, num_envs, ...]`."""

        def value(observation: jax.Array) -> jax.Array:
            return self.value(state.params, self.normalized(state, observation))

        def step(taps: Taps, env_state: EpisodeState, index: jax.Array):
            policy_key, env_key = jax.random.split(jax.random.fold_in(key, index))
            mean, log_std = self.policy(state.params, self.normalized(state, env_state.observation))
            action = mean + jnp.exp(log_std) * jax.random.normal(policy_key, mean.shape)
            taken = self.to_action_space(action)
            after, transition = self.episodes.step(env_state, env_key, taken, taps, value, self.settings.gamma)
            return after, (env_state.observation, action, mean, transition)

        length = self.settings.rollout_length
        begin = self.episodes.refresh(state.episodes, jax.random.fold_in(key, length))
        env_state, (observations, actions, means, transitions) = taps.scan(step, begin, jnp.arange(length))
        seen = self.normalized(state, observations)
        values = self.value(state.params, seen)
        next_values = value(transitions.final_observation)
        done = transitions.terminated | transitions.truncated
        rewards, returns, discounted = self.scaled_rewards(state, transitions.reward, done)
        advantages = gae(
            rewards,
            values,
            next_values,
            transitions.terminated,
            done,
            self.settings.gamma,
            self.settings.gae_lambda,
        )
        log_probability = gaussian_log_probability(actions, means, state.params["log_std"])
        samples = Samples(seen, actions, log_probability, values, advantages, advantages + values)
        state = dataclasses.replace(
            state,
            episodes=env_state,
            observations=state.observations.update(observations),
            returns=returns,
            discounted=discounted,
        )
        return state, samples

    def scaled_rewards(
        self, state: PPOState, rewards: jax.Array, done: jax.Array
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

    def improve(
        self, params: Any, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Progress, dict[str, jax.Array]]:
        """Epochs of minibatch updates: where they end, and what they tell."""
        settings = self.settings
        data = jax.tree.map(lambda x: x.reshape(settings.batch_size, *x.shape[2:]), samples)

        def minibatch(taps: Taps, progress: Progress, rows: jax.Array):
            batch = jax.tree.map(lambda x: x[rows], data)
            gradient, parts = jax.grad(self.loss, has_aux=True)(progress.params, batch)
            params, optimizer, update = self.optimizer.update(progress.params, progress.optimizer, gradient, taps)
            kept = self.keep_gradient(progress, gradient)
            coherence = jax.lax.cond(
                progress.index < self.minibatches, progress.coherence.add, lambda _: progress.coherence, gradient
            )
            return Progress(params, optimizer, coherence, kept, progress.index + 1), (parts, update)

        def epoch(taps: Taps, progress: Progress, epoch_key: jax.Array):
            order = shuffled(epoch_key, settings.batch_size)
            return taps.scan(minibatch, progress, order.reshape(self.minibatches, settings.minibatch_size))

        gradients = None
        if settings.telemetry == "full":
            gradients = jax.tree.map(lambda p: jnp.zeros((self.minibatches, *p.shape)), params)
        progress = Progress(params, optimizer, CoherenceSum.zeros(params, raw=False), gradients, jnp.int32(0))
        progress, (parts, updates) = taps.scan(epoch, progress, jax.random.split(key, settings.epochs))
        return progress, self.update_telemetry(params, progress, parts, updates)

    def loss(self, params: Any, batch: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Clipped surrogate, value loss and entropy bonus of one minibatch: scalar, and its parts."""
        settings = self.settings
        mean, log_std = self.policy(params, batch.observation)
        log_ratio = gaussian_log_probability(batch.action, mean, log_std) - batch.log_probability
        ratio = jnp.exp(log_ratio)
        advantage = batch.advantage
        if settings.normalize_advantages:
            advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
        clipped = jnp.clip(ratio, 1.0 - settings.clip, 1.0 + settings.clip)
        policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
        value = self.value(params, batch.observation)
        squared_error = (value - batch.target) ** 2
        if settings.clip_value:
            near = batch.value + jnp.clip(value - batch.value, -settings.clip, settings.clip)
            squared_error = jnp.maximum(squared_error, (near - batch.target) ** 2)
        value_loss = 0.5 * jnp.mean(squared_error)
        loss = (
            policy_loss
            + settings.value_coefficient * value_loss
            - settings.entropy_coefficient * gaussian_entropy(log_std)
        )
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "approximate_kl": jnp.mean(ratio - 1.0 - log_ratio),
            "clip_fraction": jnp.mean((jnp.abs(ratio - 1.0) > settings.clip).astype(jnp.float32)),
        }

    def keep_gradient(self, progress: Progress, gradient: Any) -> Any:
        """The first epoch's gradients, `[minibatches, ...]`, with this one at its place; None in basic telemetry."""
        if progress.gradients is None:
            return None
        row = jnp.where(progress.index < self.minibatches, progress.index, self.minibatches)
        return jax.tree.map(lambda kept, g: kept.at[row].set(g, mode="drop"), progress.gradients, gradient)

    def update_telemetry(
        self, before: Any, progress: Progress, parts: dict[str, jax.Array], updates: Update
    ) -> dict[str, jax.Array]:
        """Means over the minibatches; distances from the old policy over the last epoch, coherence over the first."""
        last_epoch = ("approximate_kl", "clip_fraction")
        telemetry = {name: jnp.mean(x[-1] if name in last_epoch else x) for name, x in parts.items()}
        telemetry |= {
            "learning_rate": jnp.mean(updates.learning_rate),
            "gradient_norm": jnp.mean(updates.gradient_norm),
            "clipped_fraction": jnp.mean(updates.clipped),
            "update_norm": optax.tree.norm(jax.tree.map(jnp.subtract, progress.params, before)),
            "x_mem": jnp.mean(updates.memory),
            "x_grad": progress.coherence.mean_pairwise_cosine(),
        }
        if progress.gradients is not None:
            telemetry["x_grad_dominant"] = dominant_share(progress.gradients)
            telemetry["layer_gradient_norm"] = jnp.stack(
                [
                    jnp.sqrt(jnp.mean(jnp.sum(g**2, axis=tuple(range(1, g.ndim)))))
                    for g in jax.tree.leaves(progress.gradients)
                ]
            )
        return telemetry

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the parameters, in the order of "layer_gradient_norm"."""
        return paths_of(jax.eval_shape(self.init_params, jax.random.key(0)))


def ppo(task: Any, **settings: Any) -> Learner:
    """PPO on a task: `ppo("HalfCheetah-v5", num_envs=16)`.

    Args:
      task: a task's name, or a [task] table of a spec.
      **settings: fields of `PPOSettings`.

    Raises:
      ValueError: for a task or setting that does not exist or makes no sense.
    """
    chosen = PPOSettings(**settings)
    env = make(task) if isinstance(task, str) else make(task.name, physics=task.physics)
    agent = PPO(env, env.max_episode_steps, chosen)
    full = chosen.telemetry == "full"
    return Learner(
        agent.init,
        agent.step,
        name="ppo",
        step_unit=f"{chosen.batch_size} env steps",
        performance_name="mean return of the latest episodes",
        samples_per_step=chosen.batch_size,
        vectors={"layer_gradient_norm": ("layer", agent.layers)} if full else {},
    )


ppo.settings = PPOSettings  # type: ignore[attr-defined]
registry.learners.register("ppo", ppo)
