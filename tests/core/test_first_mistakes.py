"""Mistakes in the first version of a learner: each gives one sentence with its place in the code, before training."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxaudit as ja
from jaxaudit.core.program import find_sites


def init(key):
    return jax.random.normal(key, (3,))


def descend(x, taps):
    return x - taps("learning_rate", 0.1) * taps("gradient", x)


def step(x, key, taps):
    return descend(x, taps), {"performance": -jnp.sum(x**2)}


def step_with(state=lambda x: x, **channels):
    """Returns a step with these functions of the state."""

    def step(x, key, taps):
        telemetry = {name: channel(x) for name, channel in channels.items()}
        return state(descend(x, taps)), telemetry

    return step


def total(x):
    return jnp.sum(x)


MISTAKES = {
    "arguments in another order": (
        {"step": lambda key, x, taps: step(x, key, taps)},
        r"step computes with a random key \(test_first_mistakes.py, line \d+: .*\); it is called as step",
    ),
    "telemetry alone": (
        {"step": lambda x, key, taps: {"performance": total(x)}},
        "step returns a dict, where it must return",
    ),
    "three values": ({"step": lambda x, key, taps: (x, {}, 1)}, "step returns 3 values, where it must return two"),
    "nothing": ({"step": lambda x, key, taps: None}, "step returns a NoneType, where it must return two"),
    "a list for telemetry": ({"step": lambda x, key, taps: (x, [1.0])}, "step returns a list for telemetry"),
    "no performance": ({"step": step_with(loss=total)}, "telemetry has no 'performance'; it has: loss"),
    "performance of each environment": (
        {"step": step_with(performance=lambda x: x)},
        r"an array of shape \(3,\) for 'performance', which must be one number",
    ),
    "float()": (
        {"step": step_with(performance=lambda x: float(total(x)))},
        r"step takes the value of an array in Python \(test_first_mistakes.py, line \d+: .*float\(total\(x\)\)",
    ),
    "if": (
        {"step": lambda x, key, taps: (x if x[0] > 0 else -x, {"performance": total(x)})},
        "use jnp.where or jax.lax.cond for if",
    ),
    "NumPy on a traced array": (
        {"step": step_with(performance=lambda x: np.sum(np.asarray(x)))},
        "step takes the value of an array in Python .*jax.numpy for NumPy",
    ),
    "another type": (
        {"step": step_with(lambda x: x.astype(jnp.bfloat16), performance=total)},
        r"step returns bfloat16\[3\] at the root, where it got float32\[3\]",
    ),
    "a longer state": (
        {"step": step_with(lambda x: jnp.append(x, 1.0), performance=total)},
        r"step returns float32\[4\] at the root, where it got float32\[3\]",
    ),
    "a string for a channel": (
        {"step": step_with(performance=total, note=lambda x: "hi")},
        r"step's telemetry has 'hi' \(str\) for 'note'",
    ),
    "a list of strings": (
        {"step": step_with(performance=total, tags=lambda x: ["a", "b"])},
        "telemetry has .* for 'tags'",
    ),
    "None for a channel": (
        {"step": step_with(performance=total, loss=lambda x: None)},
        r"'None' \(NoneType\) for 'loss'",
    ),
    "a key for a channel": (
        {"step": lambda x, key, taps: (descend(x, taps), {"performance": total(x), "key": key})},
        "telemetry has .* for 'key'",
    ),
    "channels in a dict": (
        {"step": step_with(performance=total, losses=lambda x: {"actor": total(x)})},
        "a dict for 'losses'; make its entries channels, as 'losses/actor'",
    ),
    "a string in the state": (
        {"init": lambda key: {"x": init(key), "name": "ppo"}},
        "init returns a str at 'name', where a state has arrays and numbers",
    ),
    "a corpus as a list of texts in the state": (
        {"init": lambda key: {"x": init(key), "texts": ["a", "b"]}},
        "init returns a str at 'texts/0', where a state has arrays and numbers",
    ),
    "a part of the state less": (
        {
            "init": lambda key: {"x": init(key), "t": jnp.int32(0)},
            "step": lambda s, key, taps: ({"x": descend(s["x"], taps)}, {"performance": total(s["x"])}),
        },
        "step returns a state with no array at 't', where there was one",
    ),
    "a part of the state more": (
        {
            "init": lambda key: {"x": init(key)},
            "step": lambda s, key, taps: ({**s, "old": descend(s["x"], taps)}, {"performance": total(s["x"])}),
        },
        "step returns a state with an array at 'old', which was not there",
    ),
    "a callback": (
        {
            "step": step_with(
                performance=lambda x: jax.pure_callback(
                    lambda v: np.float32(v.sum()), jax.ShapeDtypeStruct((), jnp.float32), x
                )
            )
        },
        "step has a callback .* give it vmap_method='sequential'",
    ),
    "no taps": ({"step": lambda x, key, taps: (0.9 * x, {"performance": total(x)})}, "which the learner does not tap"),
    "taps in a scan": (
        {
            "step": lambda x, key, taps: (
                jax.lax.scan(lambda c, _: (descend(c, taps), None), x, None, 3)[0],
                {"performance": total(x)},
            )
        },
        "taps inside scan with taps from outside; write that loop with taps.scan",
    ),
    "an init that looks at a value": (
        {"init": lambda key: init(key) if jax.random.uniform(key) > 0.5 else jnp.zeros(3)},
        "init takes the value of an array in Python",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_in_one_sentence(name):
    functions, words = MISTAKES[name]
    learner = ja.Learner(**{"init": init, "step": step, **functions})
    with pytest.raises(ValueError, match=words) as error:
        ja.audit(learner, [ja.lr_spike(3.0, onset=0.5)], seeds=2, steps=30)
    assert "\n" not in str(error.value)


def train(learner, *perturbations):
    result = ja.audit(learner, perturbations, seeds=3, steps=30)
    assert np.isfinite(result.telemetry.performance).all()
    return result.telemetry.performance.values


def test_an_optimizer_may_be_created_in_init():
    """As in flax' tutorials and purejaxrl: each trace has another function object in the state's tree."""

    def make(tx):
        def begin(key):
            return TrainState.create(apply_fn=None, params={"w": init(key)}, tx=tx())

        def advance(state, key, taps):
            state = state.replace(params=taps("params", state.params))
            gradient = taps("gradient", state.params)
            return state.apply_gradients(grads=gradient), {"performance": -jnp.sum(state.params["w"] ** 2)}

        return ja.Learner(begin, advance)

    shared = optax.adam(0.1)
    noise = ja.weight_noise(0.1, onset=0.5)
    inside, outside = train(make(lambda: optax.adam(0.1)), noise), train(make(lambda: shared), noise)
    np.testing.assert_array_equal(inside, outside)
    assert (inside[:, 0] != inside[:, 1]).any()


def test_a_step_may_recreate_its_optimizer():
    def begin(key):
        return TrainState.create(apply_fn=None, params={"w": init(key)}, tx=optax.sgd(0.1))

    def advance(state, key, taps):
        state = state.replace(params=taps("params", state.params), tx=optax.sgd(0.1))
        return state.apply_gradients(grads=state.params), {"performance": -jnp.sum(state.params["w"] ** 2)}

    train(ja.Learner(begin, advance), ja.weight_noise(0.1, onset=0.5))


@pytest.mark.parametrize(
    "perturbation", [ja.weight_noise(0.5, onset=0.5), ja.quantize(4.0, onset=0.5)], ids=["noise", "bits"]
)
def test_random_keys_among_parameters_are_not_perturbed(perturbation):
    """As in all NNX modules with Dropout."""

    def begin(key):
        return {"w": init(key), "dropout": key}

    def advance(state, key, taps):
        state = taps("params", state)
        keep_mask = jax.random.bernoulli(jax.random.fold_in(state["dropout"], 1), 0.9, (3,))
        w = state["w"] - 0.1 * keep_mask * state["w"]
        key_word = jax.random.key_data(state["dropout"])[0].astype(jnp.float32)
        return {**state, "w": w}, {"performance": -jnp.sum(w**2), "key": key_word}

    learner = ja.Learner(begin, advance)
    assert find_sites(learner).paths["params"] == ("w",)
    telemetry = ja.audit(learner, [perturbation], seeds=3, steps=30).telemetry
    assert (telemetry.key.isel(condition=0) == telemetry.key.isel(condition=1)).all()
    assert (telemetry.performance.isel(condition=0, step=-1) != telemetry.performance.isel(condition=1, step=-1)).any()
