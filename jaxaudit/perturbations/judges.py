"""Learning-signal stability: disturbances of the models that a policy is judged by, its reward model and reference.

Values are pytrees of parameters. Standard magnitudes are ours.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.perturbations import transforms
from jaxaudit.perturbations.kinds import perturbation


@perturbation("signal", "reward_model", magnitude=0.01, neutral=0.0, duration="end", limits=(0.0, math.inf))
def reward_model_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the reward model's parameters, drawn anew every step.

    Rows of one step are judged by one model.

    >>> reward_model_noise(0.01).apply({"kernel": jnp.zeros((2, 3))})["kernel"].shape
    (2, 3)
    """
    return transforms.add_noise(key, value, magnitude)


@struct.dataclass
class DriftDirection:
    """What a direction in the space of parameters is drawn with.

    Attributes:
      key: key data, uint32 `[...]`.
      known: bool, whether the window has opened.
    """

    key: Any
    known: Any


def no_direction(value: Any) -> DriftDirection:
    """Nothing drawn yet."""
    return DriftDirection(jnp.zeros_like(jax.random.key_data(jax.random.key(0))), jnp.zeros((), bool))


@perturbation(
    "signal",
    "reward_model",
    magnitude=0.03,
    neutral=0.0,
    duration="end",
    limits=(0.0, math.inf),
    needs=("elapsed",),
    init=no_direction,
)
def reward_model_drift(key, value, magnitude, state, *, elapsed):
    """The reward model's parameters drift away, in a random direction, linearly over the window.

    Their distance at its last step is that of Gaussian noise of standard deviation `magnitude`. The direction is drawn
    when the window opens: it is not noise, and does not average out.

    >>> reward_model_drift(0.03).apply({"kernel": jnp.zeros((2, 3))}, elapsed=0.5)["kernel"].shape
    (2, 3)
    """
    data = jnp.where(state.known, state.key, jax.random.key_data(key))
    drawn = jax.random.wrap_key_data(data)
    return transforms.add_noise(drawn, value, magnitude * elapsed), DriftDirection(data, jnp.ones((), bool))


@perturbation("signal", "reference", magnitude=1.0, neutral=0.0, duration="once", limits=(0.0, 1.0), needs=("policy",))
def reference_reset(key, value, magnitude, *, policy):
    """The reference becomes the policy as it is, or moves a share `magnitude` of the way: what it learned is forgiven.

    The penalty on leaving the reference begins anew from there.

    >>> float(reference_reset().apply({"kernel": 2.0}, policy={"kernel": 3.0})["kernel"])
    3.0
    """
    return transforms.towards(value, policy, magnitude)


@perturbation("signal", "reference", magnitude=0.05, neutral=0.0, duration="end", limits=(0.0, 1.0), needs=("policy",))
def reference_drift(key, value, magnitude, *, policy):
    """The reference moves a share `magnitude` of the way towards the policy at every step, and does not hold it.

    >>> float(reference_drift(0.25).apply({"kernel": 2.0}, policy={"kernel": 6.0})["kernel"])
    3.0
    """
    return transforms.towards(value, policy, magnitude)
