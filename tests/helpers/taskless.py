"""A learner that needs no task, for tests of specs and commands."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxaudit import Learner, register


@dataclass(frozen=True)
class Settings:
    size: int = 3


@register("learner", "taskless")
def taskless(*, size):
    """Descends |x|^2."""

    def step(x, key, taps):
        x = x - taps("learning_rate", 0.1) * taps("gradient", x)
        return x, {"performance": -jnp.sum(x**2)}

    return Learner(lambda key: jax.random.normal(key, (size,)), step)


taskless.settings = Settings
