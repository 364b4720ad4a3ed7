"""Stacks of layers: targets, resets and rounding treat the layers separately."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaudit as ja
from jaxaudit.runtime.paths import Stack, paths_of, spread_over_leaves

DEPTH = 4
KEY = jax.random.key(3)


def fresh(key):
    keys = jax.random.split(key, DEPTH)
    layers = jax.vmap(lambda key: {"kernel": jax.random.normal(key, (5, 2)), "bias": jax.random.normal(key, (2,))})
    return {"embedding": jax.random.normal(key, (3,)), "h": Stack(layers(keys))}


def descent():
    optimizer = ja.Optimizer(optax.scale_by_adam(), 1e-3, max_norm=1.0)

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        params, moments = optimizer.disturb(*state, taps, fresh)
        params_before = params
        params, moments, _ = optimizer.update(params, moments, jax.tree.map(lambda x: 2 * x, params), taps)
        telemetry = {f"{i}": x for i, x in enumerate(jax.tree.leaves(params_before))}
        return (params, moments), {"performance": -optax.tree.norm(params)} | telemetry

    return ja.Learner(init, step)


LEARNER = descent()
TARGETS = ["h/2", "h/2/kernel", "kernel", "embedding", None]
CONDITIONS = [
    *(ja.weight_noise(1.0, onset=2, target=target) for target in TARGETS),
    ja.layer_reset(ja.sweep(1.0, 3.0), onset=2),
    ja.layer_reset(1.0, onset=2, target="h/1"),
    ja.layer_reset(1.0, onset=2, target="embedding"),
    ja.momentum_noise(1.0, onset=2, duration=1, target="mu/h/1"),
]
RESETS, EMBEDDING_RESET, MOMENTUM = [6, 7, 8], 9, 10


@pytest.fixture(scope="module")
def leaves():
    """Embedding, biases and kernels at every step, `[seed, condition, step, ...]`.

    The first condition is the control.
    """
    telemetry = ja.audit(LEARNER, CONDITIONS, seeds=2, steps=4).telemetry
    return [telemetry[f"{i}"].values for i in range(3)]


@pytest.fixture(scope="module")
def params():
    return jax.jit(fresh)(KEY)


def test_every_layer_has_separate_paths(params):
    assert paths_of(params, "actor") == (
        "actor/embedding",
        *(f"actor/h/{i}/bias" for i in range(DEPTH)),
        *(f"actor/h/{i}/kernel" for i in range(DEPTH)),
    )
    assert paths_of(Stack(jnp.zeros((2, 3)))) == ("0", "1")


def test_values_along_paths_broadcast_against_the_leaves(params):
    spread = spread_over_leaves(np.arange(9.0), params)
    assert spread["embedding"].shape == ()
    np.testing.assert_array_equal(spread["h"].layers["bias"].ravel(), [1, 2, 3, 4])
    assert spread["h"].layers["kernel"].shape == (DEPTH, 1, 1)
    np.testing.assert_array_equal(spread["h"].layers["kernel"].ravel(), [5, 6, 7, 8])


@pytest.mark.parametrize(("condition", "target"), enumerate(TARGETS, 1))
def test_a_target_is_a_layer_a_parameter_or_both(condition, target, leaves):
    embedding, bias, kernel = (leaf[:, [0, condition], 2] for leaf in leaves)
    changed = {"embedding": (embedding[:, 0] != embedding[:, 1]).any()}
    for layer in range(DEPTH):
        changed[f"h/{layer}/bias"] = (bias[:, 0, layer] != bias[:, 1, layer]).any()
        changed[f"h/{layer}/kernel"] = (kernel[:, 0, layer] != kernel[:, 1, layer]).any()
    assert {path for path, different in changed.items() if different} == {
        path for path in changed if target is None or target in path
    }


def test_a_reset_samples_layers_of_the_stack_and_keeps_the_rest(leaves):
    embedding, bias, kernel = (leaf[:, [0, *RESETS], 2] for leaf in leaves)
    np.testing.assert_array_equal(embedding, np.broadcast_to(embedding[:, :1], embedding.shape))
    different = (kernel != kernel[:, :1]).any((3, 4))
    np.testing.assert_array_equal(different, (bias != bias[:, :1]).any(3))
    np.testing.assert_array_equal(different.sum(2), [[0, 1, 3, 1]] * 2)
    assert different[:, 3, 1].all()


def test_a_reset_of_other_parameters_needs_them_as_target(leaves):
    embedding, bias, kernel = (leaf[:, [0, EMBEDDING_RESET], 2] for leaf in leaves)
    assert (embedding[:, 1] != embedding[:, 0]).any()
    for unchanged in (bias, kernel):
        np.testing.assert_array_equal(unchanged[:, 1], unchanged[:, 0])


def test_reset_layers_are_sampled_uniformly(params):
    all_paths = np.ones(9, bool)

    def reset_layers(key):
        reset = ja.layer_reset().apply(params, key, reinitialise=fresh, selected=all_paths)
        return (reset["h"].layers["bias"] != params["h"].layers["bias"]).any(1)

    counts = np.asarray(jax.jit(jax.vmap(reset_layers))(jax.random.split(KEY, 2000))).sum(0)
    assert counts.sum() == 2000
    assert (abs(counts - 500) < 4 * np.sqrt(2000 * 0.25 * 0.75)).all()


def test_each_layer_is_rounded_within_its_range():
    value = {"h": Stack({"kernel": jnp.array([[1.0, 0.3], [100.0, 30.0]])})}
    rounded = ja.quantize(3.0).apply(value)["h"].layers["kernel"]
    np.testing.assert_allclose(rounded, [[1.0, 1 / 3], [100.0, 100 / 3]], rtol=1e-6)


def test_moments_of_a_layer_can_be_a_target(leaves):
    grid = ja.plan(LEARNER, CONDITIONS, seeds=1, steps=4)
    paths = dict(grid.program.paths)["optimizer_state"]
    assert "0/mu/h/1/kernel" in paths or "mu/h/1/kernel" in paths
    kernel = leaves[2][0, :, 3]
    different = (kernel[0] != kernel[MOMENTUM]).any((1, 2))
    np.testing.assert_array_equal(different, [False, True, False, False])
