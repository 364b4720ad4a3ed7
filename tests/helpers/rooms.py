"""A task with known values: rooms that last one step, two steps, or for ever."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.tasks._brax import Env, State

ONE_STEP, TWO_STEPS, SECOND_STEP, FOR_EVER, CHOICE = range(5)
BEST = 0.5


class Rooms(Env):
    """The observation is the room, one-hot. An episode begins in any room except SECOND_STEP.

    ONE_STEP pays 1 and ends. TWO_STEPS pays nothing and leads to SECOND_STEP, which pays 1 and ends. FOR_EVER pays 1
    and goes on until the time limit. CHOICE pays -(action - 0.5)^2 and ends.
    """

    cheap_reset = True
    action_low = np.array([-2.0], np.float32)
    action_high = np.array([2.0], np.float32)
    max_episode_steps = 4
    observation_size, action_size, backend = 5, 1, "none"

    def reset(self, rng):
        sampled = jax.random.randint(rng, (), 0, 4)
        room = jnp.where(sampled >= SECOND_STEP, sampled + 1, sampled)
        return State(None, jax.nn.one_hot(room, 5), jnp.float32(0), jnp.float32(0))

    def step(self, state, action):
        room = jnp.argmax(state.obs)
        reward = jnp.select([room == TWO_STEPS, room == CHOICE], [0.0, -((action[0] - BEST) ** 2)], default=1.0)
        next_room = jnp.where(room == TWO_STEPS, SECOND_STEP, room)
        ends = (room == ONE_STEP) | (room == SECOND_STEP) | (room == CHOICE)
        return state.replace(
            obs=jax.nn.one_hot(next_room, 5), reward=reward.astype(jnp.float32), done=ends.astype(jnp.float32)
        )
