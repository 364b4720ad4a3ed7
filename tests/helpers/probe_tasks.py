"""Tasks whose values are known in closed form, and the training of agents on them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.core.taps import Taps
from jaxaudit.tasks._brax import Env, State

UNNORMALIZED_SETTINGS = {
    "num_envs": 4,
    "rollout_length": 32,
    "minibatch_size": 64,
    "learning_rate": 3e-3,
    "normalize_rewards": False,
    "normalize_observations": False,
    "evaluations": 0,
    "telemetry": "basic",
}
"""Settings of small learners that use rewards and observations without normalization."""


class ProbeTask(Env):
    """A task with one observation and one action.

    The reward is `reward(action)`, and an episode ends at every step or never.
    """

    cheap_reset = True
    action_low = np.array([-2.0], np.float32)
    action_high = np.array([2.0], np.float32)
    observation_size, action_size, backend = 1, 1, "none"

    def __init__(self, reward, terminates):
        self._reward, self._terminates = reward, jnp.float32(terminates)

    def reset(self, rng):
        return State(None, jnp.ones(1), jnp.float32(0), jnp.float32(0))

    def step(self, state, action):
        return state.replace(reward=self._reward(action[0]), done=self._terminates)


def train(agent, iterations):
    """Returns an agent's state after some iterations, and its telemetry `[iterations]`."""

    def iterate(carry, index):
        return agent.step(carry, jax.random.fold_in(jax.random.key(1), index), Taps(index, iterations))

    return jax.lax.scan(iterate, agent.init(jax.random.key(0)), jnp.arange(iterations))
