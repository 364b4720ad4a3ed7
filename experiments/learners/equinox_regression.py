"""A regression in Equinox, whose modules contain activation functions besides arrays.

python experiments/learners/equinox_regression.py      # needs: pip install equinox
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxaudit as ja

BATCH = 32
OPTIMIZER = optax.adam(3e-3)


def init(key):
    model = eqx.nn.MLP(1, 1, width_size=32, depth=2, activation=jax.nn.gelu, key=key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def target(x):
    return jnp.sin(3 * x)


def step(state, key, taps):
    model, moments = state
    model = taps("params", model)

    @eqx.filter_value_and_grad
    def loss(model, x):
        return ((jax.vmap(model)(x) - target(x)) ** 2).mean()

    value, gradient = loss(model, jax.random.uniform(key, (BATCH, 1), minval=-1.0))
    updates, moments = OPTIMIZER.update(taps("gradient", gradient), moments)
    model = eqx.apply_updates(model, updates)
    x = jnp.linspace(-1, 1, 64)[:, None]
    return (model, moments), {"performance": -((jax.vmap(model)(x) - target(x)) ** 2).mean(), "loss": value}


def learner() -> ja.Learner:
    """The learner, whose performance is the negative mean squared error on a grid."""
    return ja.Learner(init, step, "Equinox regression", "update", "-mean squared error")


if __name__ == "__main__":
    noise = ja.weight_noise(ja.sweep(0.01, 1.0), onset=0.5)
    print(ja.audit(learner(), [noise], seeds=8, steps=300).summary.T.to_string())
