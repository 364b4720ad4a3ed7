"""Interventions: transforms at the same sites as perturbations, which act while a monitor's alarm is on.

They are chained with what they are to help against: `chain(lr_spike(100.0), lower_learning_rate(0.1))`.
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
"""States of a lane that `roll_back` keeps."""


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
    """Moves the optimizer's state to (1 - magnitude) of itself at the beginning of every step with an alarm.

    At 1 it is zero in every entry, counts of steps too: what optax's Adam begins from.

    >>> float(reset_moments(1.0).apply({"mu": 2.0}, alarm=True)["mu"])
    0.0
    """

    def less(x: jax.Array) -> jax.Array:
        # Zero times what has overflowed would be NaN.
        return jnp.where(magnitude >= 1.0, 0.0, (1.0 - magnitude) * x).astype(x.dtype)

    return jax.tree.map(less, value)


@intervention("entropy_coefficient", magnitude=10.0, neutral=1.0, limits=(0.0, math.inf))
def raise_entropy(key, value, magnitude):
    """Multiplies the weight of the entropy bonus by `magnitude` while the alarm is on.

    >>> float(raise_entropy(10.0).apply(1.0, alarm=False))
    1.0
    """
    return transforms.scale(value, magnitude)


@struct.dataclass
class Snapshots:
    """Recent states of a lane, a ring.

    Attributes:
      states: leaves `[SNAPSHOTS, ...]`.
      taken: how many were written since the ring was begun or last gone back to.
      wait: steps until the next is taken.
      rest: steps until the lane may go back again.
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
    """Goes back to the learner's state of `magnitude` steps ago, or up to half as many more, when an alarm is raised.

    Until there is one so old, to the oldest there is. At most once in `magnitude` steps: again and again, to the same
    state, while the alarm stays on. A replay buffer stays as it is (`jaxaudit.core.learner.Lasting`).

    >>> float(roll_back(10).apply({"x": 1.0}, alarm=True)["x"])  # there is nothing yet to go back to
    1.0
    """
    every = jnp.maximum(jnp.ceil(magnitude / (SNAPSHOTS - 1)).astype(jnp.int32), 1)
    restore = alarm & (snapshots.rest <= 0) & (snapshots.taken > 0)
    take = ~alarm & (snapshots.wait <= 0)
    oldest = jnp.where(snapshots.taken < SNAPSHOTS, 0, snapshots.taken % SNAPSHOTS)
    back = jax.tree.map(lambda ring, now: jnp.where(restore, ring[oldest], now), snapshots.states, value)
    # What was taken since then may be what the alarm is about: the state gone back to is the only one left.
    place = jnp.where(restore, 0, snapshots.taken % SNAPSHOTS)
    states = jax.tree.map(
        lambda ring, now: ring.at[place].set(jnp.where(restore | take, now, ring[place])), snapshots.states, back
    )
    return back, Snapshots(
        states,
        taken=jnp.where(restore, 1, snapshots.taken + take),
        wait=jnp.where(restore | take, every, snapshots.wait) - 1,
        rest=jnp.where(restore, magnitude.astype(jnp.int32), jnp.maximum(snapshots.rest, 1)) - 1,
    )
