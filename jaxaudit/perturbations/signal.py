"""Learning-signal stability: disturbances of what the learner is told to improve (Tables S1 and S4)."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from jaxaudit.perturbations import transforms
from jaxaudit.perturbations.factory import perturbation


@perturbation("signal", "reward", magnitude=0.5, neutral=0.0, duration="end", limits=(0.0, math.inf))
def reward_noise(key, value, magnitude):
    """Adds Gaussian noise of standard deviation `magnitude` to the reward learned from (Table S4: N(0, 0.5))."""
    return transforms.add_noise(key, value, magnitude)


@perturbation("signal", "reward", magnitude=10.0, neutral=1.0, duration="end")
def reward_scale(key, value, magnitude):
    """Multiplies the reward learned from by `magnitude`; a negative factor inverts the goal."""
    return transforms.scale(value, magnitude)


@perturbation("signal", "reward", magnitude=0.1, neutral=0.0, duration="end", limits=(0.0, 1.0))
def reward_flip(key, value, magnitude):
    """Inverts each reward's sign with probability `magnitude`."""
    return transforms.flip_signs(key, value, magnitude)


@perturbation("signal", "gradient", magnitude=0.1, neutral=0.0, duration=10, limits=(0.0, 1.0))
def gradient_sign_flip(key, value, magnitude):
    """Inverts the sign of a random fraction `magnitude` of the gradient's entries (Table S4: 10%)."""
    return transforms.flip_signs(key, value, magnitude)


@perturbation("signal", "gradient", magnitude=0.1, neutral=0.0, duration=10, limits=(0.0, 1.0))
def gradient_mask(key, value, magnitude):
    """Sets a random fraction `magnitude` of the gradient's entries to zero."""

    def mask(k: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(k, magnitude, jnp.shape(x)), 0.0, x)

    return transforms.map_with_key(mask, key, value)
