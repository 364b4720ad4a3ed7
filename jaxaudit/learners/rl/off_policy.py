"""The base of SAC and TD3: settings, collection into a replay buffer, updates, target networks and telemetry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxaudit.core.learner import Lasting, Telemetry
from jaxaudit.core.optimizer import Adam, Optimizer, OptimizerStats, finish
from jaxaudit.core.taps import Taps
from jaxaudit.kernels.coherence import unit_gradient
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.replay_buffer import ReplayBuffer, Transitions
from jaxaudit.learners.rl.telemetry import episode_telemetry, gradient_coherence
from jaxaudit.models.policy import TwinCritic
from jaxaudit.runtime.paths import paths_of
from jaxaudit.tasks.episodes import CleanEnvs, Episodes, EpisodeState, Transition, Undisturbed

Params = Any
Coefficients = dict[str, jax.Array]

UPDATES_PER_PROBE = 64
FEWEST_PROBES, MOST_PROBES = 4, 16
"""Gradient coherence compares one minibatch for every 64 updates of an iteration, but at least 4 and at most 16."""


@dataclass(frozen=True)
class OffPolicySettings:
    """The settings that SAC and TD3 share.

    The defaults are those of the paper's Table S2, and those of published results where the table has none.

    Attributes:
      num_envs: number of environments that a lane steps in parallel.
      iteration_steps: number of environment steps in one iteration, a multiple of num_envs.
      learning_starts: number of environment steps at the beginning with uniformly random actions and without updates.
      updates_per_step: number of gradient updates per environment step.
      batch_size: number of transitions in a minibatch.
      buffer_size: number of transitions in the replay buffer, rounded down to a multiple of num_envs. A run writes at
        most its steps times iteration_steps transitions. Every lane and every onset holds a buffer.
      buffer_dtype: dtype of the replay buffer: "float32", or "bfloat16" or "float16", which halve its memory and round
        observations, actions and rewards (see `replay_buffer.DTYPES`).
      learning_rate: Adam's learning rate for every network.
      gamma: discount factor.
      tau: share of the distance to the networks that the target networks move at each of their updates.
      max_grad_norm: global norm above which each gradient is clipped. 0 means no clipping and no site clip_norm.
      hidden: widths of the hidden layers of actor and critics.
      critic_layer_norm: whether the critics have layer normalisation before each activation.
      evaluations: how many times in a run the policy's mean action is evaluated, evenly spaced. 0 means never.
      evaluation_episodes: number of episodes in each evaluation.
      telemetry: "basic", or "full", which adds per-layer norms and the dominant share of the gradients' Gram matrix.
    """

    num_envs: int = 8
    iteration_steps: int = 2048
    learning_starts: int = 10_000
    updates_per_step: float = 1.0
    batch_size: int = 256
    buffer_size: int = 1_000_000
    buffer_dtype: str = "float32"
    learning_rate: float = 3e-4
    gamma: float = 0.99
    tau: float = 5e-3
    max_grad_norm: float = 0.0
    hidden: tuple[int, ...] = (256, 256)
    critic_layer_norm: bool = False
    evaluations: int = 10
    evaluation_episodes: int = 4
    telemetry: str = "full"

    def __post_init__(self):
        checks.at_least_one(self, "num_envs", "iteration_steps", "batch_size", "buffer_size", "evaluation_episodes")
        checks.positive(self, "learning_rate", "updates_per_step")
        checks.not_negative(self, "learning_starts", "max_grad_norm", "evaluations")
        checks.fractions(self, "gamma", "tau")
        checks.widths(self)
        checks.telemetry(self.telemetry)
        ReplayBuffer(1, 1, self.num_envs, self.buffer_size, self.buffer_dtype)
        if self.iteration_steps % self.num_envs:
            raise ValueError(f"num_envs {self.num_envs} does not divide iteration_steps {self.iteration_steps}")
        if self.num_envs * self.updates_per_step % self.actor_delay:
            delay = "" if self.actor_delay == 1 else f" that policy_delay {self.actor_delay} divides"
            raise ValueError(
                f"updates_per_step {self.updates_per_step} times num_envs {self.num_envs} must be a whole number{delay}"
            )

    @property
    def actor_delay(self) -> int:
        """The number of critic updates per update of the actor and the target networks."""
        return 1

    @property
    def vector_steps(self) -> int:
        """The number of steps of each environment in one iteration."""
        return self.iteration_steps // self.num_envs

    @property
    def rounds(self) -> int:
        """The number of rounds of updates after a vector step, each of which ends with an update of the actor."""
        return round(self.num_envs * self.updates_per_step) // self.actor_delay

    @property
    def probes(self) -> int:
        """The number of minibatches whose gradients an iteration compares: few relative to its updates, to limit the
        cost.
        """
        updates = self.vector_steps * self.rounds * self.actor_delay
        return min(max(FEWEST_PROBES, updates // UPDATES_PER_PROBE), MOST_PROBES)


@struct.dataclass
class Networks:
    """The parameters and optimizer states that updates change.

    Attributes:
      params: {"actor": ..., "critic": ...}, and whatever else a subclass trains.
      target: the target networks, under the same names as their online networks.
      optimizer: the state of each optimizer, by the name of the parameters that it trains.
    """

    params: Any
    target: Any
    optimizer: Any


@struct.dataclass
class OffPolicyState:
    """The learner's state between two iterations.

    Attributes:
      networks: parameters, target networks and optimizer states.
      episodes: the training environments.
      copies: undisturbed copies of the environments, which are in use while a perturbation affects acting.
      buffer: the replay buffer's store, `[rows, width]`. It is `Lasting`: a rollback of the networks keeps it.
    """

    networks: Networks
    episodes: EpisodeState
    copies: CleanEnvs
    buffer: Lasting


class OffPolicy:
    """An off-policy learner, which improves critics, actor and target networks after every step of the environments.

    Actions are in [-1, 1] in the networks and in the buffer, and in the task's units in the environment. The number of
    transitions in the buffer follows from `taps.step`: every step of a run writes some, and no rollback of the state
    removes them.

    Subclasses implement `act`, `explore`, `next_value` and `actor_loss`.

    Args:
      env: a brax `Env`, unbatched.
      max_episode_steps: the time limit of an episode.
      settings: the subclass's settings.
      actor: the actor's network.
      parts: the names of the trained parameters, each of which has an optimizer of its own.
    """

    discrete = False
    targets: tuple[str, ...] = ("critic",)
    critic_loss_weight = 1.0

    def __init__(
        self, env: Any, max_episode_steps: int, settings: Any, actor: Any, parts: tuple[str, ...] = ("actor", "critic")
    ):
        self.env = env
        self.settings = settings
        self.max_episode_steps = max_episode_steps
        self.episodes = Episodes(env, settings.num_envs, max_episode_steps)
        self.undisturbed = Undisturbed(self.episodes, settings.vector_steps)
        self.buffer = ReplayBuffer(
            env.observation_size, env.action_size, settings.num_envs, settings.buffer_size, settings.buffer_dtype
        )
        self.actor = actor
        self.critic = TwinCritic(settings.hidden, settings.critic_layer_norm)
        limit = settings.max_grad_norm or None
        self.optimizers = {name: Optimizer(Adam(), settings.learning_rate, limit, label=name) for name in parts}

    def act(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the greedy action: observations `[..., O]` to actions `[..., A]`."""
        raise NotImplementedError

    def explore(self, params: Params, observation: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the action to take in training: observations `[..., O]` to actions `[..., A]`."""
        raise NotImplementedError

    def coefficients(self, params: Params) -> Coefficients:
        """Returns the weights of terms of the losses, by the site at which each can be disturbed."""
        return {}

    def next_value(
        self, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> jax.Array:
        """Returns the target networks' value of a minibatch's next observations, `[batch]`."""
        raise NotImplementedError

    def actor_loss(
        self, actor: Params, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> tuple[jax.Array, Telemetry]:
        """Returns the actor's loss on a minibatch, and its telemetry."""
        raise NotImplementedError

    def init(self, key: jax.Array) -> OffPolicyState:
        params_key, episodes_key = jax.random.split(key)
        params = self.init_params(params_key)
        optimizer = self.new_moments(params)
        target = {name: params[name] for name in self.targets}
        begin = self.episodes.init(episodes_key)
        copies = self.undisturbed.init(begin)
        return OffPolicyState(Networks(params, target, optimizer), begin, copies, Lasting(self.buffer.init()))

    def init_params(self, key: jax.Array) -> Params:
        actor_key, critic_key = jax.random.split(key)
        observation, action = jnp.zeros(self.env.observation_size), jnp.zeros(self.env.action_size)
        return {
            "actor": self.actor.init(actor_key, observation)["params"],
            "critic": self.critic.init(critic_key, observation, action)["params"],
        }

    def step(self, state: OffPolicyState, key: jax.Array, taps: Taps) -> tuple[OffPolicyState, Telemetry]:
        """Trains for one iteration of `iteration_steps` environment steps."""
        settings = self.settings
        steps_key, probe_key, evaluation_key, refresh_key = jax.random.split(key, 4)
        networks = dataclasses.replace(
            state.networks,
            params=taps("params", state.networks.params, reinitialise=self.init_params),
            optimizer=taps("optimizer_state", state.networks.optimizer),
        )
        copies = self.undisturbed.begin(state.copies, state.episodes, taps)
        begin = OffPolicyState(networks, self.episodes.refresh(state.episodes, refresh_key), copies, state.buffer)
        # All lanes share this number of vector steps. A count in the state would be batched over lanes, so that
        # "has learning started" would be no branch and the buffer's pointer no single place in memory.
        before = jnp.asarray(taps.step, jnp.int32) * settings.vector_steps

        def vector_step(taps: Taps, state: OffPolicyState, index: jax.Array):
            act_key, learn_key = jax.random.split(jax.random.fold_in(steps_key, index))
            count = before + index
            state = self.collect(taps, state, act_key, count)
            learn = partial(self.learn, buffer=state.buffer.value, key=learn_key, count=count + 1)
            networks, metrics = taps.cond(self.learning(count + 1), learn, state.networks)
            return dataclasses.replace(state, networks=networks), metrics

        state, metrics = taps.scan(vector_step, begin, jnp.arange(settings.vector_steps))
        state = dataclasses.replace(state, networks=self.finish(state.networks, taps))
        after = before + settings.vector_steps
        learned = jnp.sum(self.learning(before + 1 + jnp.arange(settings.vector_steps)))
        parts, updates = jax.tree.map(lambda x: jnp.sum(x) / learned, metrics)
        params = state.networks.params
        telemetry = parts | self.update_telemetry(updates)
        telemetry |= nan_unless(
            self.learning(after), lambda: self.coherence(state.networks, state.buffer.value, probe_key, after)
        )

        def greedy(observation: jax.Array) -> jax.Array:
            return self.to_action_space(self.act(params, observation))

        return state, telemetry | episode_telemetry(self, state, greedy, evaluation_key, taps) | {
            "params_norm": optax.tree.norm(params),
            "update_norm": optax.tree.norm(jax.tree.map(jnp.subtract, params, networks.params)),
        }

    def finish(self, networks: Networks, taps: Taps) -> Networks:
        """Applies the remedies of trained parameters to all networks, among them the targets, under "target"."""
        if not taps.helps("trained"):
            return networks

        def with_targets(params: Params) -> Params:
            return {**params, "target": {name: params[name] for name in self.targets}}

        params, optimizer = finish(
            {**networks.params, "target": networks.target},
            networks.optimizer,
            taps,
            reinitialise=lambda key: with_targets(self.init_params(key)),
            new_moments=self.new_moments,
        )
        online = {name: params[name] for name in networks.params}
        return Networks(online, params["target"], optimizer)

    def new_moments(self, params: Params) -> dict[str, Any]:
        """Returns the state of each optimizer before its first update."""
        return {name: optimizer.init(params[name]) for name, optimizer in self.optimizers.items()}

    def learning(self, count: jax.Array) -> jax.Array:
        """Returns whether updates follow the vector step that brings the number of vector steps to `count`."""
        return count * self.settings.num_envs > self.settings.learning_starts

    def to_action_space(self, action: jax.Array) -> jax.Array:
        """Converts an action in [-1, 1] to the task's units."""
        low, high = self.env.action_low, self.env.action_high
        return low + 0.5 * (action + 1.0) * (high - low)

    def value(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the smaller critic value of the greedy action: observations `[..., O]` to `[...]`."""
        return jnp.min(self.q(params["critic"], observation, self.act(params, observation)), axis=0)

    def q(self, critic: Params, observation: jax.Array, action: jax.Array) -> jax.Array:
        """Returns the values of both critics, `[2, ...]`."""
        values: Any = self.critic.apply({"params": critic}, observation, action)
        return values

    def collect(self, taps: Taps, state: OffPolicyState, key: jax.Array, count: jax.Array) -> OffPolicyState:
        """Steps every environment once, as vector step number `count`, and stores the transitions."""
        explore_key, random_key, env_key = jax.random.split(key, 3)
        params = state.networks.params

        def act(taps: Taps, begin: EpisodeState) -> tuple[EpisodeState, jax.Array, Transition]:
            policy_action = self.explore(params, begin.observation, explore_key)
            uniform = jax.random.uniform(random_key, policy_action.shape, minval=-1.0, maxval=1.0)
            action = jnp.where(count * self.settings.num_envs < self.settings.learning_starts, uniform, policy_action)
            after, transition = self.episodes.step(
                begin,
                env_key,
                self.to_action_space(action),
                taps,
                lambda observation: self.value(params, observation),
                self.settings.gamma,
            )
            return after, action, transition

        env_state, action, transition = act(taps, state.episodes)
        done = transition.terminated | transition.truncated
        copies, env_state = self.undisturbed.follow(
            state.copies, env_state, done, taps, lambda taps, begin: act(taps, begin)[0]
        )
        stored = Transitions(
            transition.observation,
            action,
            transition.reward,
            transition.final_observation,
            transition.terminated.astype(jnp.float32),
        )
        store = self.buffer.write(state.buffer.value, stored, count)
        return OffPolicyState(state.networks, env_state, copies, Lasting(store))

    def learn(
        self, taps: Taps, networks: Networks, *, buffer: jax.Array, key: jax.Array, count: jax.Array
    ) -> tuple[Networks, tuple[Telemetry, dict[str, OptimizerStats]]]:
        """Performs the updates that follow a vector step, and returns the networks and the means of their metrics."""
        settings = self.settings

        def improve_critics(taps: Taps, networks: Networks, key: jax.Array):
            sample_key, noise_key = jax.random.split(key)
            batch = self.buffer.sample(buffer, sample_key, settings.batch_size, count)
            coefficients = self.tapped_coefficients(taps, networks)
            loss = partial(self.critic_loss, networks=networks, batch=batch, key=noise_key, coefficients=coefficients)
            networks, metrics, update = self.improve(taps, networks, "critic", loss)
            return networks, (batch, metrics, update)

        def learn_round(taps: Taps, networks: Networks, key: jax.Array):
            critic_key, actor_key = jax.random.split(key)
            critic_keys = jax.random.split(critic_key, settings.actor_delay)
            networks, (batches, critic, update) = taps.scan(improve_critics, networks, critic_keys)
            batch = jax.tree.map(lambda x: x[-1], batches)
            networks, actor, updates = self.improve_actor(taps, networks, batch, actor_key)
            critic, update = jax.tree.map(jnp.mean, (critic, update))
            return self.move_targets(networks), (critic | actor, {"critic": update} | updates)

        networks, metrics = taps.scan(learn_round, networks, jax.random.split(key, settings.rounds))
        return networks, jax.tree.map(jnp.mean, metrics)

    def improve(
        self, taps: Taps, networks: Networks, name: str, loss: Callable[[Params], tuple[jax.Array, Telemetry]]
    ) -> tuple[Networks, Telemetry, OptimizerStats]:
        """Updates the parameters `name` once along the gradient of `loss(parameters) -> (scalar, telemetry)`."""

        def objective(params: Params) -> tuple[jax.Array, tuple[jax.Array, Telemetry]]:
            value, metrics = loss(params)
            return taps("objective", value, label=name), (value, metrics)

        gradient, (value, metrics) = jax.grad(objective, has_aux=True)(networks.params[name])
        part, optimizer, update = self.optimizers[name].update(
            networks.params[name], networks.optimizer[name], gradient, taps, loss=value, learner=self
        )
        networks = dataclasses.replace(
            networks,
            params=networks.params | {name: part},
            optimizer=networks.optimizer | {name: optimizer},
        )
        return networks, metrics, update

    def improve_actor(
        self, taps: Taps, networks: Networks, batch: Transitions, key: jax.Array
    ) -> tuple[Networks, Telemetry, dict[str, OptimizerStats]]:
        """Updates the actor once, and whatever else a subclass trains at the same rate."""
        coefficients = self.tapped_coefficients(taps, networks)
        loss = partial(self.actor_loss, networks=networks, batch=batch, key=key, coefficients=coefficients)
        networks, metrics, update = self.improve(taps, networks, "actor", loss)
        return networks, metrics, {"actor": update}

    def tapped_coefficients(self, taps: Taps, networks: Networks) -> Coefficients:
        """Returns the coefficients after each has passed the tap of its site."""
        return {site: taps(site, value) for site, value in self.coefficients(networks.params).items()}

    def critic_loss(
        self, critic: Params, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> tuple[jax.Array, Telemetry]:
        """Returns the sum of both critics' mean squared errors with respect to the same target, and its telemetry.

        The target includes the next value after a time limit, but not after a termination.
        """
        next_value = self.next_value(networks, batch, key, coefficients)
        target = batch.reward + self.settings.gamma * (1.0 - batch.terminated) * next_value
        values = self.q(critic, batch.observation, batch.action)
        loss = self.critic_loss_weight * jnp.sum(jnp.mean((values - target) ** 2, axis=-1))
        return loss, {"critic_loss": loss, "q_mean": jnp.mean(values)}

    def move_targets(self, networks: Networks) -> Networks:
        """Moves the target networks a share tau of the distance towards the networks (Polyak averaging)."""
        tau = self.settings.tau
        online = {name: networks.params[name] for name in self.targets}
        target = jax.tree.map(lambda old, new: old + tau * (new - old), networks.target, online)
        return dataclasses.replace(networks, target=target)

    def update_telemetry(self, updates: dict[str, OptimizerStats]) -> Telemetry:
        """Reports gradient norms and learning rates of actor and critics, and their joint norm and averages."""
        actor, critic = updates["actor"], updates["critic"]
        return {
            "actor_gradient_norm": actor.gradient_norm,
            "critic_gradient_norm": critic.gradient_norm,
            "gradient_norm": jnp.sqrt(actor.gradient_norm**2 + critic.gradient_norm**2),
            "actor_learning_rate": actor.learning_rate,
            "critic_learning_rate": critic.learning_rate,
            "learning_rate": (actor.learning_rate + critic.learning_rate) / 2,
            "clipped_fraction": (actor.clipped + critic.clipped) / 2,
            "x_mem": (actor.persistence + critic.persistence) / 2,
            "x_used": (actor.used + critic.used) / 2,
        }

    def coherence(self, networks: Networks, buffer: jax.Array, key: jax.Array, count: jax.Array) -> Telemetry:
        """Measures how far the gradients of new minibatches agree, at the parameters after the iteration.

        Actor and critics have equal weight, because each has an Adam of its own: the compared vector is the pair of
        their gradients' directions, each of unit length.
        """

        def gradient(key: jax.Array) -> dict[str, Params]:
            sample_key, noise_key = jax.random.split(key)
            batch = self.buffer.sample(buffer, sample_key, self.settings.batch_size, count)
            arguments = {"networks": networks, "batch": batch, "key": noise_key, "coefficients": coefficients}
            losses = {"actor": partial(self.actor_loss, **arguments), "critic": partial(self.critic_loss, **arguments)}
            return {name: jax.grad(loss, has_aux=True)(networks.params[name])[0] for name, loss in losses.items()}

        def directions(gradient: dict[str, Params]) -> dict[str, Params]:
            return {name: unit_gradient(part)[0] for name, part in gradient.items()}

        coefficients = self.coefficients(networks.params)
        keys = jax.random.split(key, self.settings.probes)
        return gradient_coherence(gradient, keys, self.settings.telemetry, directions)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the parameters, in the order of the channel "layer_gradient_norm"."""
        params = jax.eval_shape(self.init_params, jax.random.key(0))
        return paths_of({name: params[name] for name in ("actor", "critic")})


def nan_unless(condition: jax.Array, measure: Callable[[], Telemetry]) -> Telemetry:
    """Returns `measure()` where the condition holds, and NaN of the same shapes elsewhere."""
    shapes = jax.eval_shape(measure)
    return jax.lax.cond(condition, measure, lambda: {name: jnp.full(s.shape, jnp.nan) for name, s in shapes.items()})
