"""Interventions: transformations at the same sites as perturbations that act while a monitor's alarm is on.

They are chained with the perturbations that they counteract: `chain(lr_spike(100.0), lower_learning_rate(0.1))`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.perturbation import intervention
from jaxaudit.perturbations import transforms

SNAPSHOTS = 3
"""The number of states of a lane that `roll_back` stores."""


@intervention("learning_rate", magnitude=0.1, neutral=1.0, limits=(0.0, math.inf))
def lower_learning_rate(key, value, magnitude):
    """Multiplies the learning rate by `magnitude` while the alarm is on; zero skips the update.

    >>> float(lower_learning_rate(0.5).apply(1.0, alarm=True))
    0.5
    """
    return transforms.scale(value, magnitude)


@intervention("clip_norm", magnitude=0.1, neutral=1.0, limits=(0.0, math.inf))
def tighten_clip(key, value, magnitude):
    """Multiplies the gradient-clipping threshold by `magnitude` while the alarm is on.

    >>> float(tighten_clip(0.5).apply(1.0, alarm=True))
    0.5
    """
    return transforms.scale(value, magnitude)


@intervention("optimizer_state", magnitude=1.0, neutral=0.0, limits=(0.0, 1.0))
def reset_moments(key, value, magnitude):
    """Multiplies the optimizer's state by 1 - magnitude at the beginning of every step with an alarm.

    At 1 all entries, including counts of steps, become zero, as in the first state of optax's Adam.

    >>> float(reset_moments(1.0).apply({"mu": 2.0}, alarm=True)["mu"])
    0.0
    """

    def shrink(x: jax.Array) -> jax.Array:
        # Zero times an infinite entry would be NaN.
        return jnp.where(magnitude >= 1.0, 0.0, (1.0 - magnitude) * x).astype(x.dtype)

    return jax.tree.map(shrink, value)


@intervention("entropy_coefficient", magnitude=10.0, neutral=1.0, limits=(0.0, math.inf))
def raise_entropy(key, value, magnitude):
    """Multiplies the weight of the entropy bonus by `magnitude` while the alarm is on.

    >>> float(raise_entropy(10.0).apply(1.0, alarm=False))
    1.0
    """
    return transforms.scale(value, magnitude)


@struct.dataclass
class Snapshots:
    """The state of `roll_back`: a ring buffer of recent states of a lane.

    Attributes:
      states: the snapshots, with leaves `[SNAPSHOTS, ...]`.
      taken: the number of snapshots since the window opened or a snapshot was restored.
      wait: the number of steps until the next snapshot.
      rest: the number of steps until a snapshot may be restored again.
    """

    states: Any
    taken: Any
    wait: Any
    rest: Any


def no_snapshots(value: Any) -> Snapshots:
    states = jax.tree.map(lambda x: jnp.zeros((SNAPSHOTS, *x.shape), x.dtype), value)
    return Snapshots(states, jnp.int32(0), jnp.int32(0), jnp.int32(0))


@intervention("state", magnitude=10, neutral=0, limits=(0, math.inf), init=no_snapshots, whole=True)
def roll_back(key, value, magnitude, snapshots, *, alarm):
    """Restores the learner's state of `magnitude` steps ago, or up to half as many more, when an alarm is raised.

    Until there is one so old, it restores the oldest state. It does so at most once in `magnitude` steps: repeatedly,
    with the same state, while the alarm stays on. A replay buffer is not changed (`jaxaudit.core.learner.Lasting`).

    >>> float(roll_back(10).apply({"x": 1.0}, alarm=True)["x"])  # there is no earlier state yet
    1.0
    """
    every = jnp.maximum(jnp.ceil(magnitude / (SNAPSHOTS - 1)).astype(jnp.int32), 1)
    restore = alarm & (snapshots.rest <= 0) & (snapshots.taken > 0)
    take = ~alarm & (snapshots.wait <= 0)
    oldest = jnp.where(snapshots.taken < SNAPSHOTS, 0, snapshots.taken % SNAPSHOTS)
    restored = jax.tree.map(lambda ring, now: jnp.where(restore, ring[oldest], now), snapshots.states, value)
    # Later snapshots may already show the problem behind the alarm, so that the restored state is the only one kept.
    index = jnp.where(restore, 0, snapshots.taken % SNAPSHOTS)
    states = jax.tree.map(
        lambda ring, now: ring.at[index].set(jnp.where(restore | take, now, ring[index])), snapshots.states, restored
    )
    return restored, Snapshots(
        states,
        taken=jnp.where(restore, 1, snapshots.taken + take),
        wait=jnp.where(restore | take, every, snapshots.wait) - 1,
        rest=jnp.where(restore, magnitude.astype(jnp.int32), jnp.maximum(snapshots.rest, 1)) - 1,
    )
