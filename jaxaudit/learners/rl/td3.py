"""Twin delayed deep deterministic policy gradient (TD3; Fujimoto et al., 2018) with Table S2's hyper-parameters."""

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
    """TD3's hyper-parameters; the defaults are Table S2's, and beyond it the paper's.

    Noise is in units of half the action's range.

    Attributes: those of `OffPolicySettings`, and
      policy_delay: updates of the critics for each update of the actor and the target networks; divides the updates
        that follow a vector step, num_envs * updates_per_step.
      exploration_noise: standard deviation of the noise on actions in training.
      target_noise: standard deviation of the noise that smooths the target actions.
      target_noise_clip: bound on that noise.
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
        """Updates of the critics for each update of the actor and the target networks."""
        return self.policy_delay


class TD3(OffPolicy):
    """Critics that aim at smoothed target actions, and a deterministic actor updated less often."""

    targets = ("actor", "critic")

    def __init__(self, env: Any, max_episode_steps: int, settings: TD3Settings):
        actor = MLP(settings.hidden, env.action_size, activation=nn.relu, fan_in_uniform=True)
        super().__init__(env, max_episode_steps, settings, actor)

    def mu(self, actor: Params, observation: jax.Array) -> jax.Array:
        """The deterministic policy: `[..., O]` to `[..., A]`."""
        output: Any = self.actor.apply({"params": actor}, observation)
        return jnp.tanh(output)

    def act(self, params: Params, observation: jax.Array) -> jax.Array:
        """Returns the policy's action, without noise."""
        return self.mu(params["actor"], observation)

    def explore(self, params: Params, observation: jax.Array, key: jax.Array) -> jax.Array:
        """Returns the policy's action with Gaussian noise, clipped to the bounds of actions."""
        action = self.act(params, observation)
        return jnp.clip(action + self.settings.exploration_noise * jax.random.normal(key, action.shape), -1.0, 1.0)

    def next_value(
        self, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> jax.Array:
        """The lesser target critic's value of the target actor's action, with clipped noise (target smoothing)."""
        action = self.mu(networks.target["actor"], batch.next_observation)
        limit = self.settings.target_noise_clip
        noise = jnp.clip(self.settings.target_noise * jax.random.normal(key, action.shape), -limit, limit)
        smoothed = jnp.clip(action + noise, -1.0, 1.0)
        return jnp.min(self.q(networks.target["critic"], batch.next_observation, smoothed), axis=0)

    def actor_loss(
        self, actor: Params, networks: Networks, batch: Transitions, key: jax.Array, coefficients: Coefficients
    ) -> tuple[jax.Array, Telemetry]:
        """-Q(s, mu(s)) under the first critic; neither `key` nor `coefficients` are needed."""
        value: Any = self.critic.apply(
            {"params": networks.params["critic"]},
            batch.observation,
            self.mu(actor, batch.observation),
            method=TwinCritic.one,
        )
        loss = -jnp.mean(value)
        return loss, {"actor_loss": loss}


def td3(task: Any, **settings: Any) -> Learner:
    """TD3 (Fujimoto et al., 2018) on a task: `td3("HalfCheetah-v5", buffer_size=200_000)`.

    Args:
      task: a task's name, or a task that gives an environment.
      **settings: fields of `TD3Settings`.

    Raises:
      ValueError: for a task or setting that does not exist or makes no sense.
    """
    chosen = checks.from_keywords(TD3Settings, settings, "td3")
    return on_task(TD3, task, chosen, "td3", chosen.iteration_steps)


td3.settings = TD3Settings  # type: ignore[attr-defined]
registry.learners.register("td3", td3)
