"""A ring of transitions, as pure functions on one array: the store, `[rows, width]`.

One row is one transition, packed, so that writing is one slice and sampling one gather. How much was written is
not kept in the store: it is counted in vector steps and handed in. Lanes trained side by side share that count, and
must not have a copy each: with a pointer of its own for each lane, XLA could not write in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

DTYPES = ("float32", "bfloat16", "float16")
"""What a store can hold. bfloat16 rounds to 3 digits (a constant reward of 0.3 becomes 0.3008); float16 rounds to
4 digits and makes what is beyond 65504 infinite, which destroys the lane."""


class Transitions(NamedTuple):
    """Steps of an environment; leading axis `[num_envs]` written, `[batch]` sampled.

    Attributes:
      observation, next_observation: `[..., O]`.
      action: `[..., A]`.
      reward: `[...]`.
      terminated: `[...]`, 1.0 where there is no value after this step, else 0.0.
    """

    observation: jax.Array
    action: jax.Array
    reward: jax.Array
    next_observation: jax.Array
    terminated: jax.Array


@dataclass(frozen=True)
class ReplayBuffer:
    """The sizes of a ring, and its functions.

    Attributes:
      observation_size, action_size: O, A.
      num_envs: transitions written at once.
      capacity: transitions wanted; rounded down to a multiple of num_envs, at least one of it.
      dtype: of the store, one of `DTYPES`; what is sampled is float32.
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

    @property
    def nbytes(self) -> int:
        """The size of one lane's buffer, in bytes."""
        return self.rows * self.width * jnp.dtype(self.dtype).itemsize

    def init(self) -> jax.Array:
        return jnp.zeros((self.rows, self.width), self.dtype)

    def write(self, store: jax.Array, transitions: Transitions, count: jax.Array) -> jax.Array:
        """The store with `transitions` `[num_envs, ...]` in it, the oldest overwritten where it is full.

        Args:
          store: `[rows, width]`.
          transitions: of one vector step.
          count: vector steps written before; the same in all lanes.
        """
        columns = [x.reshape(self.num_envs, -1) for x in transitions]
        packed = jnp.concatenate(columns, axis=-1).astype(store.dtype)
        row = jnp.asarray(count, jnp.int32) % self.slots * self.num_envs
        return jax.lax.dynamic_update_slice(store, packed, (row, jnp.int32(0)))

    def sample(self, store: jax.Array, key: jax.Array, batch_size: int, count: jax.Array) -> Transitions:
        """`[batch_size, ...]` transitions, uniform with replacement from those written.

        Args:
          store: `[rows, width]`.
          key: PRNG key.
          batch_size: how many.
          count: vector steps written so far, at least one; the same in all lanes.
        """
        filled = jnp.minimum(jnp.asarray(count, jnp.int32), self.slots) * self.num_envs
        chosen = jax.random.randint(key, (batch_size,), 0, filled)
        packed = store.at[chosen].get(mode="promise_in_bounds").astype(jnp.float32)
        o, a = self.observation_size, self.action_size
        observation, action, reward, next_observation, terminated = jnp.split(
            packed, (o, o + a, o + a + 1, 2 * o + a + 1), axis=-1
        )
        return Transitions(observation, action, reward[:, 0], next_observation, terminated[:, 0])
