"""A cheap learner for tests of specs and commands: gradient descent on a quadratic."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jaxaudit import Learner, Optimizer
from jaxaudit.runtime import registry


@dataclass(frozen=True)
class QuadraticSettings:
    learning_rate: float = 0.1
    size: int = 3
    adam: bool = True
    label: str = ""
    widths: tuple[int, ...] = (2, 2)
    telemetry: str = "full"

    def __post_init__(self):
        if not 1 <= self.size <= 100:
            raise ValueError(f"size must be from 1 to 100, not {self.size}")
        if not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"learning_rate must be positive, not {self.learning_rate}")


@functools.cache  # equal learners share compiled programs, which are most of these tests' cost
def quadratic(task, **settings):
    """Descends |x|^2 from a random x. With `adam = false` the optimizer keeps no moments."""
    values = QuadraticSettings(**settings)
    optimizer = Optimizer(
        optax.scale_by_adam() if values.adam else optax.identity(), values.learning_rate, max_norm=1.0
    )

    def fresh(key):
        return {"critic": {"kernel": jax.random.normal(key, (values.size,)), "bias": jnp.zeros(1)}}

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        params, moments = optimizer.disturb(state[0], state[1], taps, fresh)
        gradient = jax.tree.map(lambda x: 2 * x, params)
        params, moments, update = optimizer.update(params, moments, gradient, taps)
        loss = sum(jnp.sum(x**2) for x in jax.tree.leaves(params))
        return (params, moments), {"performance": -loss, "update_norm": update.update_norm}

    return Learner(init, step, name="quadratic", samples_per_step=1)


quadratic.settings = QuadraticSettings
registry.learners.register("quadratic", quadratic)
