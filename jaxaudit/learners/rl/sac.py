"""Soft actor-critic (Haarnoja et al., 2018), with the hyper-parameters of the paper's Table S2."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxaudit.core.learner import Learner, Telemetry
from jaxaudit.core.optimizer import OptimizerStats
from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.off_policy import Coefficients, Networks, OffPolicy, OffPolicySettings, Params
from jaxaudit.learners.rl.on_task import on_task
from jaxaudit.learners.rl.replay_buffer import Transitions
from jaxaudit.models.policy import MLP
from jaxaudit.runtime import registry

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds on the logarithm of the standard deviation, as in the authors' code."""


def split(output: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits a network's output `[..., 2d]` into mean and bounded log standard deviation, `[..., d]` each."""
    mean, log_std = jnp.split(output, 2, axis=-1)
    return mean, jnp.clip(log_std, *LOG_STD_RANGE)


def squashed_gaussian(mean: jax.Array, log_std: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the action tanh(mean + std * noise) and its log density.

    The density is computed from the noise, and the derivative of tanh as 1 / cosh^2, so that neither a tiny standard
    deviation nor a saturated action loses digits.

    Args:
      mean, log_std: `[..., d]`.
      noise: standard normal samples, `[..., d]`.

    Returns:
      action `[..., d]` in [-1, 1], log density `[...]`.
    """
    unsquashed = mean + jnp.exp(log_std) * noise
    magnitude = jnp.abs(unsquashed)
    # log(1 + x) is exact enough, as log 2 is added to it, and XLA's CPU backend does not vectorise log1p(x).
    log_derivative = 2.0 * (jnp.log(2.0) - magnitude - jnp.log(1.0 + jnp.exp(-2.0 * magnitude)))
    log_gaussian = -0.5 * (noise**2 + jnp.log(2.0 * jnp.pi)) - log_std
    return jnp.tanh(unsquashed), jnp.sum(log_gaussian - log_derivative, axis=-1)


@dataclass(frozen=True)
class SACSettings(OffPolicySettings):
    """SAC's hyper-parameters, which are those of `OffPolicySettings` and its own.

    Attributes:
      entropy_coefficient: the temperature, or its initial value if it is tuned.
      automatic_entropy: whether the temperature is tuned so that the policy's entropy approaches target_entropy.
      target_entropy: the entropy to approach, in nats. None means minus the number of action entries.
    """

    entropy_coefficient: float = 0.2
    automatic_entropy: bool = False
    target_entropy: float | None = None

    def __post_init__(self):
        super().__post_init__()
        checks.not_negative(self, "entropy_coefficient")
        if self.automatic_entropy:
            checks.positive(self, "entropy_coefficient")
        if self.target_entropy is not None and not math.isfinite(self.target_entropy):
            raise ValueError(f"target_entropy must be finite, not {self.target_entropy}")


class SAC(OffPolicy):
    """SAC: critics of the soft value, a squashed Gaussian actor, and a fixed or tuned temperature."""

    critic_loss_weight = 0.5

    def __init__(self, env: Any, max_episode_steps: int, settings: SACSettings):
        actor = MLP(settings.hidden, 2 * env.action_size, activation=nn.relu, fan_in_uniform=True)
        temperature = ("temperature",) if settings.automatic_entropy else ()
        super().__init__(env, max_episode_steps, settings, actor, ("actor", "critic", *temperature))
        entropy = settings.target_entropy
        self.target_entropy = -float(env.action_size) if entropy is None else entropy

    def init_params(self, key: jax.Array) -> Params:
        """Returns initial parameters, in which "temperature" is the logarithm of the entropy coefficient."""
        params = super().init_params(key)
        if self.settings.automatic_entropy:
            params["temperature"] = jnp.float32(math.log(self.settings.entropy_coefficient))
        return params

    def temperature(self, params: Params) -> jax.Array:
        """Returns alpha, the coefficient of the entropy in both losses."""
        if self.settings.automatic_entropy:
            return jnp.exp(params["temperature"])
        return jnp.float32(self.settings.entropy_coefficient)

    def coefficients(self, params: Params) -> Coefficients:
        """Returns the temperature, under the name of the site that PPO's entropy coefficient has."""
        return {"entropy_coefficient": self.temperature(params)}

    def policy(self, actor: Params, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns mean and log standard deviation before squashing, `[..., A]` each."""
        output: Any = self.actor.apply({"params": actor}, observation)
        return split(output)

    def sample(self, actor: Params, observation: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Samples an action `[..., A]` from the policy, and returns it with its log probability `[...]`."""
        mean, log_std = self.policy(actor, observation)
        return squashed_gaussian(mean, log_std, jax.random.normal(key, mean.shape))

    def act(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the squashed mean of the policy."""
        return jnp.tanh(self.policy(params["actor"], observation)[0])

    def explore(self, params: Params, observation: jax.Array, key: jax.Array) -> jax.Array:
        """Samples an action from the policy, for use in training."""
        return self.sample(params["actor"], observation, key)[0]

    def next_value(
        self, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> jax.Array:
        """Returns the soft value: the smaller target critic's value of a sampled action, plus its entropy term."""
        action, log_probability = self.sample(networks.params["actor"], batch.next_observation, key)
        value = jnp.min(self.q(networks.target["critic"], batch.next_observation, action), axis=0)
        return value - coefficients["entropy_coefficient"] * log_probability

    def actor_loss(
        self, actor: Params, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> tuple[jax.Array, Telemetry]:
        """Returns the mean of alpha log pi(a|s) - Q(s, a), where a is sampled from the policy and Q is the smaller
        critic value.

        The telemetry has the undisturbed temperature.
        """
        action, log_probability = self.sample(actor, batch.observation, key)
        value = jnp.min(self.q(networks.params["critic"], batch.observation, action), axis=0)
        loss = jnp.mean(coefficients["entropy_coefficient"] * log_probability - value)
        return loss, {
            "actor_loss": loss,
            "entropy": -jnp.mean(log_probability),
            "temperature": self.temperature(networks.params),
        }

    def improve_actor(
        self, taps: Taps, networks: Networks, batch: Transitions, key: jax.Array
    ) -> tuple[Networks, Telemetry, dict[str, OptimizerStats]]:
        """Updates the actor once, and the temperature too if it is tuned."""
        networks, metrics, updates = super().improve_actor(taps, networks, batch, key)
        if self.settings.automatic_entropy:
            loss = partial(self.temperature_loss, entropy=metrics["entropy"])
            networks, _, updates["temperature"] = self.improve(taps, networks, "temperature", loss)
        return networks, metrics, updates

    def temperature_loss(self, log_temperature: jax.Array, entropy: jax.Array) -> tuple[jax.Array, Telemetry]:
        """Returns a loss whose descent raises the temperature while the policy's entropy is below its target."""
        return log_temperature * (entropy - self.target_entropy), {}


def sac(task: Any, **settings: Any) -> Learner:
    """Returns SAC (Haarnoja et al., 2018) on a task, for example `sac("HalfCheetah-v5", buffer_size=200_000)`.

    Args:
      task: a task's name, or a task that provides an environment.
      **settings: fields of `SACSettings`.

    Raises:
      ValueError: the task or a setting does not exist, or a setting has a value that is not allowed.
    """
    sac_settings = checks.from_keywords(SACSettings, settings, "sac")
    return on_task(SAC, task, sac_settings, "sac", sac_settings.iteration_steps)


sac.settings = SACSettings  # type: ignore[attr-defined]
registry.learners.register("sac", sac)
