"""Linear regression in the style of optax's tutorials: parameters in a dict, `update`, `apply_updates`.

python experiments/learners/optax_tutorial.py
"""

import jax
import jax.numpy as jnp
import optax

import jaxaudit as ja

WEIGHTS = jnp.array([1.0, -2.0, 0.5])


def learner(rate: float = 0.05) -> ja.Learner:
    """Adam with gradient clipping on noisy rows; performance is the negative distance to the true weights."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

    def compute_loss(params, x, y):
        return optax.l2_loss(x @ params["w"] + params["b"], y).mean()

    def init(key):
        params = {"w": jax.random.normal(key, WEIGHTS.shape), "b": jnp.zeros(())}
        return params, optimizer.init(params)

    def step(state, key, taps):
        params, opt_state = state
        rows, noise = jax.random.split(key)
        x = jax.random.normal(rows, (16, len(WEIGHTS)))
        y = x @ WEIGHTS + 0.1 * jax.random.normal(noise, (16,))
        params, opt_state = taps("params", params), taps("optimizer_state", opt_state)
        loss, grads = jax.value_and_grad(compute_loss)(params, x, y)
        updates, opt_state = optimizer.update(taps("gradient", grads), opt_state)
        factor = taps("learning_rate", 1.0)
        params = optax.apply_updates(params, jax.tree.map(lambda u: factor * u, updates))
        return (params, opt_state), {"performance": -jnp.linalg.norm(params["w"] - WEIGHTS), "loss": loss}

    return ja.Learner(init, step, "linear regression", "update", "-distance to the weights")


if __name__ == "__main__":
    spike = ja.lr_spike(ja.sweep(2.0, 20.0, 200.0), onset=0.5, duration=10)
    print(ja.audit(learner(), [spike, ja.gradient_scale(100.0, onset=0.5)], seeds=8, steps=300).summary.T.to_string())
