"""A learner with a known limit of stability and noisy telemetry, for tests of monitors."""

import functools

import jax
import jax.numpy as jnp
import optax

from jaxaudit import Channel, Learner, Optimizer
from jaxaudit.runtime import registry

SIZE = 8


@functools.cache
def noisy_descent(learning_rate: float = 0.1, momentum: float = 0.5):
    """Stochastic gradient descent on |x|^2 / 2 from a random x. It diverges if the learning rate is above 3."""
    optimizer = Optimizer(optax.trace(decay=momentum), learning_rate, max_norm=100.0)

    def fresh(key):
        return {"x": jax.random.normal(key, (SIZE,))}

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        params, moments = optimizer.disturb(*state, taps, fresh)
        gradient = {"x": params["x"] + 0.3 * jax.random.normal(key, (SIZE,))}
        changed, moments, update = optimizer.update(params, moments, gradient, taps)
        loss = 0.5 * jnp.sum(changed["x"] ** 2)
        telemetry = {
            "performance": -loss,
            "gradient_norm": update.gradient_norm,
            "update_norm": update.update_norm,
            "distance": jnp.abs(changed["x"][:3]),
        }
        return (changed, moments), telemetry

    return Learner(init, step, name="noisy-descent", channels={"distance": Channel.vector("entry", "abc")})


registry.learners.register("noisy_descent", lambda task: noisy_descent())
