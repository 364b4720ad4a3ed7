"""Gradient descent on a quadratic. It diverges if the learning rate is above 2 / curvature."""

import jax
import jax.numpy as jnp

import jaxaudit as ja

CURVATURE, RATE, DIMENSION = 2.0, 0.01, 3


def init(key):
    return jax.random.normal(key, (DIMENSION,))


def step(x, key, taps):
    x = taps("params", x)
    gradient = taps("gradient", CURVATURE * x)
    x = x - taps("learning_rate", RATE) * gradient
    return x, {"performance": -0.5 * CURVATURE * jnp.sum(x**2)}


LEARNER = ja.Learner(init, step)
