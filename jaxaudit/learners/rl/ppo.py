"""Proximal policy optimization (Schulman et al., 2017), with Table S2's hyper-parameters."""

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
    """PPO's hyper-parameters, beside `OnPolicySettings`; the defaults are Table S2's, else those of published results.

    Attributes:
      epochs: passes over an iteration's data.
      learning_rate: Adam's.
      anneal: learning rate goes linearly to zero over the run.
      clip: clipping parameter of the probability ratio.
      clip_value: clip the value's change by the same parameter.
      entropy_coefficient: weight of the entropy bonus.
      value_coefficient: weight of the value loss.
      max_grad_norm: threshold on the gradient's global norm.
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
    """One iteration: collect, estimate advantages, improve actor and critic together over shuffled minibatches."""

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
        """Epochs of minibatch updates: where they end, and what they tell."""

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
        """How far below and above 1 the ratio may gain; numbers that are compiled in, unless something acts on them."""
        clip = self.settings.clip
        if not taps.acts("ratio_clip"):
            return clip, clip
        bounds = taps("ratio_clip", jnp.float32([clip, clip]))
        return bounds[0], bounds[1]

    def beyond(self, ratio: jax.Array, bounds: tuple[Any, Any]) -> jax.Array:
        """Where a ratio is outside of its bounds: bool, the ratio's shape."""
        if not isinstance(bounds[0], jax.Array):
            return jnp.abs(ratio - 1.0) > self.settings.clip
        return (ratio < 1.0 - bounds[0]) | (ratio > 1.0 + bounds[1])

    def coherence(self, params: Any, samples: Samples, key: jax.Array) -> dict[str, jax.Array]:
        """How far the gradients of the first epoch's minibatches agree, all taken where the epoch begins."""

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
        """Clipped surrogate, value loss and entropy bonus of one minibatch: scalar, and its parts.

        `bounds` are of the ratio, as `ratio_bounds` gives them; None: those of the settings.
        """
        settings = self.settings
        low, high = bounds = (settings.clip, settings.clip) if bounds is None else bounds
        distribution = self.policy(params, batch.observation)
        log_ratio = self.head.log_probability(distribution, batch.action) - batch.log_probability
        ratio = jnp.exp(log_ratio)
        advantage = batch.advantage
        if settings.normalize_advantages:
            advantage = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
        clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
        policy_loss = -jnp.mean(jnp.minimum(ratio * advantage, clipped * advantage))
        value = self.value(params, batch.observation)
        squared_error = (value - batch.target) ** 2
        if settings.clip_value:
            near = batch.value + jnp.clip(value - batch.value, -settings.clip, settings.clip)
            squared_error = jnp.maximum(squared_error, (near - batch.target) ** 2)
        value_loss = 0.5 * jnp.mean(squared_error)
        entropy = jnp.mean(self.head.entropy(distribution))
        loss = policy_loss + settings.value_coefficient * value_loss - entropy_coefficient * entropy
        return loss, {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "approximate_kl": jnp.mean(ratio - 1.0 - log_ratio),
            "clip_fraction": jnp.mean(self.beyond(ratio, bounds).astype(jnp.float32)),
        }

    def update_telemetry(self, parts: dict[str, jax.Array], updates: OptimizerStats) -> dict[str, jax.Array]:
        """Means over the minibatches; distances from the old policy over the last epoch."""
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
    """PPO (Schulman et al., 2017) on a task: `ppo("HalfCheetah-v5", num_envs=16)`.

    Args:
      task: a task's name, or a task that gives an environment.
      **settings: fields of `PPOSettings`.

    Raises:
      ValueError: for a task or setting that does not exist or makes no sense.
    """
    chosen = checks.from_keywords(PPOSettings, settings, "ppo")
    return on_task(PPO, task, chosen, "ppo", chosen.batch_size)


ppo.settings = PPOSettings  # type: ignore[attr-defined]
registry.learners.register("ppo", ppo)
