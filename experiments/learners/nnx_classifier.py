"""A classifier in flax's nnx with batch normalisation and dropout; its state has parameters, averages and random keys.

python experiments/learners/nnx_classifier.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxaudit as ja

FEATURES, CLASSES, BATCH = 8, 4, 64


class Classifier(nnx.Module):
    """A hidden layer of 32 units with batch normalisation and dropout."""

    def __init__(self, rngs: nnx.Rngs):
        self.hidden = nnx.Linear(FEATURES, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


OPTIMIZER = optax.adam(1e-2)


def examples(rows: int = 512) -> tuple[jax.Array, jax.Array]:
    """Returns random features `[rows, FEATURES]`, and the class of each row."""
    features, directions = jax.random.split(jax.random.key(0))
    x = jax.random.normal(features, (rows, FEATURES))
    return x, jnp.argmax(jnp.abs(x @ jax.random.normal(directions, (FEATURES, CLASSES))), axis=-1)


def init(key):
    graph, state = nnx.split(Classifier(nnx.Rngs(key)))
    return {"graph": graph, "model": state, "moments": OPTIMIZER.init(nnx.filter_state(state, nnx.Param))}


def step(state, key, taps):
    x, labels = taps.data
    model = nnx.merge(state["graph"], taps("params", state["model"]))
    model.train()
    rows = jax.random.randint(key, (BATCH,), 0, len(x))

    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x[rows]), labels[rows]).mean()

    value, gradient = nnx.value_and_grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    updates, moments = OPTIMIZER.update(taps("gradient", gradient), state["moments"], params)
    nnx.update(model, optax.apply_updates(params, jax.tree.map(lambda u: taps("learning_rate", 1.0) * u, updates)))
    model.eval()
    accuracy = (jnp.argmax(model(x), axis=-1) == labels).mean()
    model.train()
    after = {"graph": state["graph"], "model": nnx.split(model)[1], "moments": moments}
    return after, {"performance": accuracy, "loss": value}


def learner() -> ja.Learner:
    """The learner, whose performance is the accuracy with running averages and without dropout."""
    return ja.Learner(init, step, "nnx classifier", "update", "accuracy", data=examples())


if __name__ == "__main__":
    spike = ja.lr_spike(ja.sweep(10.0, 1000.0), onset=0.5, duration=5)
    print(ja.audit(learner(), [spike, ja.weight_noise(1.0, onset=0.5)], seeds=8, steps=200).summary.T.to_string())
