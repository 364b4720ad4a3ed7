"""A ring buffer of transitions, as pure functions on one array, the store `[rows, width]`.

A row is one packed transition, so that writing is one slice and sampling one gather. The number of vector steps written
so far is not part of the store but an argument. Lanes that are trained side by side share this number: with a pointer
for each lane, XLA could not write in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of a store. bfloat16 rounds to 3 digits (a constant reward of 0.3 becomes 0.3008). float16 rounds to 4
digits, and numbers beyond 65504 become infinite, which destroys the lane."""


class Transitions(NamedTuple):
    """Environment steps with the leading axis `[num_envs]` when written and `[batch]` when sampled.

    Attributes:
      observation, next_observation: `[..., O]`.
      action: `[..., A]`.
      reward: `[...]`.
      terminated: `[...]`, 1.0 where the step ended the task, so that no value follows it, and 0.0 elsewhere.
    """

    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    next_observation: jax.Array
    terminated: jax.Array


@dataclass(frozen=True)
class ReplayBuffer:
    """The sizes of a ring buffer, and its functions.

    Attributes:
      observation_size, action_size: O and A.
      num_envs: number of transitions that are written at once.
      capacity: number of transitions to hold. It is rounded down to a multiple of num_envs, and must be at least
        num_envs.
      dtype: the store's dtype, one of `DTYPES`. Samples are float32.
    """

    observation_size: int
    action_size: int
    num_envs: int
    capacity: int
    dtype: str = "float32"

    def __post_init__(self):
        if self.capacity < self.num_envs:
            raise ValueError(f"buffer_size must be at least num_envs, {self.num_envs}, not {self.capacity}")
        if self.dtype not in DTYPES:
            raise ValueError(f"buffer_dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")

    @property
    def slots(self) -> int:
        """The number of vector steps that the buffer holds."""
        return self.capacity // self.num_envs

    @property
    def rows(self) -> int:
        """The number of transitions that the buffer holds."""
        return self.slots * self.num_envs

    @property
    def width(self) -> int:
        """The number of floats in a transition."""
        return 2 * self.observation_size + self.action_size + 2

    def init(self) -> jax.Array:
        return jnp.zeros((self.rows, self.width), self.dtype)

    def write(self, store: jax.Array, transitions: Transitions, count: jax.Array) -> jax.Array:
        """Returns the store with the transitions of one vector step, which overwrite the oldest ones of a full buffer.

        Args:
          store: `[rows, width]`.
          transitions: `[num_envs, ...]`.
          count: number of vector steps written before, the same in all lanes.
        """
        columns = [x.reshape(self.num_envs, -1) for x in transitions]
        packed = jnp.concatenate(columns, axis=-1).astype(store.dtype)
        row = jnp.asarray(count, jnp.int32) % self.slots * self.num_envs
        return jax.lax.dynamic_update_slice(store, packed, (row, jnp.int32(0)))

    def sample(self, store: jax.Array, key: jax.Array, batch_size: int, count: jax.Array) -> Transitions:
        """Draws transitions `[batch_size, ...]` uniformly and with replacement from those written.

        Args:
          store: `[rows, width]`.
          key: PRNG key.
          batch_size: number of transitions to draw.
          count: number of vector steps written so far, at least one, the same in all lanes.
        """
        filled = jnp.minimum(jnp.asarray(count, jnp.int32), self.slots) * self.num_envs
        rows = jax.random.randint(key, (batch_size,), 0, filled)
        packed = store.at[rows].get(mode="promise_in_bounds").astype(jnp.float32)
        o, a = self.observation_size, self.action_size
        observation, action, reward, next_observation, terminated = jnp.split(
            packed, (o, o + a, o + a + 1, 2 * o + a + 1), axis=-1
        )
        return Transitions(observation, action, reward[:, 0], next_observation, terminated[:, 0])
