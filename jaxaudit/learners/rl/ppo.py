"""Proximal policy optimization (Schulman et al., 2017), with the hyper-parameters of the paper's Table S2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.core.learner import Learner
from jaxaudit.core.optimizer import Adam, Optimizer, OptimizerStats, linear_to_zero
from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.on_policy import OnPolicy, OnPolicySettings, Samples
from jaxaudit.learners.rl.on_task import on_task
from jaxaudit.learners.rl.telemetry import gradient_coherence
from jaxaudit.runtime import registry


@dataclass(frozen=True)
class PPOSettings(OnPolicySettings):
    """PPO's hyper-parameters, which are those of `OnPolicySettings` and its own.

    The defaults are those of the paper's Table S2, and those of published results where the table has none.

    Attributes:
      epochs: number of passes over an iteration's samples.
      learning_rate: Adam's learning rate.
      anneal: whether the learning rate decreases linearly to zero over the run.
      clip: clipping parameter of the probability ratio.
      clip_value: whether the change of the value is clipped by the same parameter.
      entropy_coefficient: weight of the entropy bonus.
      value_coefficient: weight of the value loss.
      max_grad_norm: the gradient's global norm above which it is clipped.
    """

    epochs: int = 10
    learning_rate: float = 3e-4
    anneal: bool = True
    clip: float = 0.2
    clip_value: bool = True
    entropy_coefficient: float = 0.01
    value_coefficient: float = 0.5
    max_grad_norm: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        checks.at_least_one(self, "epochs")
        checks.positive(self, "learning_rate", "max_grad_norm")
        checks.not_negative(self, "clip", "entropy_coefficient", "value_coefficient")


class PPO(OnPolicy):
    """PPO, which improves actor and critic together over epochs of shuffled minibatches."""

    settings: PPOSettings

    def __init__(self, env: Any, max_episode_steps: int, settings: PPOSettings):
        rate = settings.learning_rate
        optimizer = Optimizer(
            Adam(epsilon=1e-5),
            linear_to_zero(rate) if settings.anneal else rate,
            settings.max_grad_norm,
        )
        super().__init__(env, max_episode_steps, settings, optimizer)

    def improve(
        self, params: Any, optimizer: Any, samples: Samples, key: jax.Array, taps: Taps
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Trains for epochs of minibatch updates, and returns parameters, optimizer state and telemetry."""

        def minibatch(taps: Taps, carry: tuple[Any, Any], batch: Samples):
            weight = taps("entropy_coefficient", jnp.float32(self.settings.entropy_coefficient))
            bounds = self.ratio_bounds(taps)

            def objective(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
                loss, parts = self.loss(params, batch, weight, bounds)
                return taps("objective", loss), parts

            gradient, parts = jax.grad(objective, has_aux=True)(carry[0])
            params, optimizer, update = self.optimizer.update(
                *carry,
                gradient,
                taps,
                loss=parts["loss"],
                approximate_kl=parts["approximate_kl"],
                learner=self,
                gradient_of=lambda term, key: jax.grad(term)(carry[0], self.random_minibatch(samples, key)),
            )
            return (params, optimizer), (parts, update)

        coherence = self.coherence(params, samples, key)
        (params, optimizer), (parts, updates) = self.epochs(
            minibatch, (params, optimizer), samples, self.settings.epochs, key, taps
        )
        return params, optimizer, coherence | self.update_telemetry(parts, updates)

    def ratio_bounds(self, taps: Taps) -> tuple[Any, Any]:
        """Returns how far below and how far above 1 the ratio may gain.

        The two bounds are Python numbers, which are compiled in, unless a perturbation or remedy acts on "ratio_clip".
        """
        clip = self.settings.clip
        if not taps.acts("ratio_clip"):
            return clip, clip
        bounds = taps("ratio_clip", jnp.float32([clip, clip]))
        return bounds[0], bounds[1]

    def outside(self, ratio: jax.Array, bounds: tuple[Any, Any]) -> jax.Array:
        """Returns where a ratio is outside of its bounds, as bools of the ratio's shape."""
        if not isinstance(bounds[0], jax.Array):
            return jnp.abs(ratio - 1.0) > self.settings.clip
        return (ratio < 1.0 - bounds[0]) | (ratio > 1.0 + bounds[1])

    def coherence(self, params: Any, samples: Samples, key: jax.Array) -> dict[str, jax.Array]:
        """Measures the coherence of the first epoch's minibatch gradients, at the parameters before the epoch."""

        def gradient(rows: jax.Array) -> Any:
            batch = jax.tree.map(lambda x: x[rows], data)
            return jax.grad(self.loss, has_aux=True)(params, batch, self.settings.entropy_coefficient)[0]

        data = self.flat(samples)
        first_epoch = jax.random.split(key, self.settings.epochs)[0]
        return gradient_coherence(gradient, self.order(first_epoch), self.settings.telemetry)

    def loss(
        self,
        params: Any,
        batch: Samples,
        entropy_coefficient: float | jax.Array,
        bounds: tuple[Any, Any] | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the clipped surrogate, the value loss and the entropy bonus of a minibatch.

        Args:
          params: actor, critic and head.
          batch: the minibatch, `[minibatch_size, ...]`.
          entropy_coefficient: weight of the entropy bonus.
          bounds: the ratio's bounds as `ratio_bounds` returns them. None means the settings' bounds.

        Returns:
          the loss, a scalar, and its parts by the names of their channels.
        """
        settings = self.settings
        low, high = bounds = (settings.clip, settings.clip) if bounds is None else bounds
        distribution = self.policy(params, batch.observation)
        log_ratio = self.head.log_probability(distribution, batch.action) - batch.log_probability
        ratio = jnp.exp(log_ratio)
        advantage = self.scaled_advantages(batch.advantage)
        clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
        policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
        value = self.value(params, batch.observation)
        squared_error = (value - batch.target) ** 2
        if settings.clip_value:
            clipped_value = batch.value + jnp.clip(value - batch.value, -settings.clip, settings.clip)
            squared_error = jnp.maximum(squared_error, (clipped_value - batch.target) ** 2)
        value_loss = 0.5 * jnp.mean(squared_error)
        entropy = jnp.mean(self.head.entropy(distribution))
        loss = policy_loss + settings.value_coefficient * value_loss - entropy_coefficient * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "approximate_kl": jnp.mean(ratio - 1.0 - log_ratio),
            "clip_fraction": jnp.mean(self.outside(ratio, bounds).astype(jnp.float32)),
        }

    def update_telemetry(self, parts: dict[str, jax.Array], updates: OptimizerStats) -> dict[str, jax.Array]:
        """Averages the minibatches' statistics over an iteration.

        The distances from the old policy are averaged over the last epoch only.
        """
        last_epoch = ("approximate_kl", "clip_fraction")
        telemetry = {name: jnp.mean(x[-1] if name in last_epoch else x) for name, x in parts.items()}
        return telemetry | {
            "learning_rate": jnp.mean(updates.learning_rate),
            "gradient_norm": jnp.mean(updates.gradient_norm),
            "clipped_fraction": jnp.mean(updates.clipped),
            "x_mem": jnp.mean(updates.persistence),
            "x_used": jnp.mean(updates.used),
        }


def ppo(task: Any, **settings: Any) -> Learner:
    """Returns PPO (Schulman et al., 2017) on a task, for example `ppo("HalfCheetah-v5", num_envs=16)`.

    Args:
      task: a task's name, or a task that provides an environment.
      **settings: fields of `PPOSettings`.

    Raises:
      ValueError: the task or a setting does not exist, or a setting has a value that is not allowed.
    """
    ppo_settings = checks.from_keywords(PPOSettings, settings, "ppo")
    return on_task(PPO, task, ppo_settings, "ppo", ppo_settings.batch_size)


ppo.settings = PPOSettings  # type: ignore[attr-defined]
registry.learners.register("ppo", ppo)
