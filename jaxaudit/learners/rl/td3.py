"""Twin delayed deep deterministic policy gradient (TD3; Fujimoto et al., 2018), with Table S2's hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxaudit.core.learner import Learner, Telemetry
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.off_policy import Coefficients, Networks, OffPolicy, OffPolicySettings, Params
from jaxaudit.learners.rl.on_task import on_task
from jaxaudit.learners.rl.replay_buffer import Transitions
from jaxaudit.models.policy import MLP, TwinCritic
from jaxaudit.runtime import registry


@dataclass(frozen=True)
class TD3Settings(OffPolicySettings):
    """TD3's hyper-parameters, in addition to `OffPolicySettings`; noise is in units of half the action's range.

    Attributes:
      policy_delay: number of critic updates per update of the actor and the target networks. It divides the number of
        updates after a vector step, num_envs * updates_per_step.
      exploration_noise: standard deviation of the noise on actions in training.
      target_noise: standard deviation of the noise that smooths the target actions.
      target_noise_clip: bound on the magnitude of the target noise.
    """

    policy_delay: int = 2
    exploration_noise: float = 0.1
    target_noise: float = 0.2
    target_noise_clip: float = 0.5

    def __post_init__(self):
        checks.at_least_one(self, "policy_delay")
        checks.not_negative(self, "exploration_noise", "target_noise", "target_noise_clip")
        super().__post_init__()

    @property
    def actor_delay(self) -> int:
        """The number of critic updates per update of the actor and the target networks."""
        return self.policy_delay


class TD3(OffPolicy):
    """TD3: critics with smoothed target actions, and a deterministic actor that is updated less often."""

    targets = ("actor", "critic")

    def __init__(self, env: Any, max_episode_steps: int, settings: TD3Settings):
        actor = MLP(settings.hidden, env.action_size, activation=nn.relu, fan_in_uniform=True)
        super().__init__(env, max_episode_steps, settings, actor)

    def mu(self, actor: Params, observation: jax.Array) -> jax.Array:
        """Returns the deterministic policy's action: observations `[..., O]` to actions `[..., A]`."""
        output: Any = self.actor.apply({"params": actor}, observation)
        return jnp.tanh(output)

    def act(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the policy's action in [-1, 1], without exploration noise."""
        return self.mu(params["actor"], observation)

    def explore(self, params: Params, observation: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the policy's action with Gaussian noise, clipped to [-1, 1]."""
        action = self.act(params, observation)
        return jnp.clip(action + self.settings.exploration_noise * jax.random.normal(key, action.shape), -1.0, 1.0)

    def next_value(
        self, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> jax.Array:
        """Returns the smaller target critic's value of the target actor's action under clipped smoothing noise."""
        action = self.mu(networks.target["actor"], batch.next_observation)
        limit = self.settings.target_noise_clip
        noise = jnp.clip(self.settings.target_noise * jax.random.normal(key, action.shape), -limit, limit)
        smoothed = jnp.clip(action + noise, -1.0, 1.0)
        return jnp.min(self.q(networks.target["critic"], batch.next_observation, smoothed), axis=0)

    def actor_loss(
        self, actor: Params, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> tuple[jax.Array, Telemetry]:
        """Returns the mean of -Q(s, mu(s)) under the first critic; `key` and `coefficients` are not used."""
        value: Any = self.critic.apply(
            {"params": networks.params["critic"]},
            batch.observation,
            self.mu(actor, batch.observation),
            method=TwinCritic.first_value,
        )
        loss = -jnp.mean(value)
        return loss, {"actor_loss": loss}


def td3(task: Any, **settings: Any) -> Learner:
    """Returns TD3 (Fujimoto et al., 2018) on a task, for example `td3("HalfCheetah-v5", buffer_size=200_000)`.

    Args:
      task: a task's name, or a task that provides an environment.
      **settings: fields of `TD3Settings`.

    Raises:
      ValueError: the task or a setting does not exist, or a setting has a value that is not allowed.
    """
    td3_settings = checks.from_keywords(TD3Settings, settings, "td3")
    return on_task(TD3, task, td3_settings, "td3", td3_settings.iteration_steps)


td3.settings = TD3Settings  # type: ignore[attr-defined]
registry.learners.register("td3", td3)
