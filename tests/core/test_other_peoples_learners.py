"""Audits of learners that are written as users of other libraries write them (experiments/learners)."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import EXPERIMENTS

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings

pytestmark = pytest.mark.exhaustive

EXAMPLES = sorted((EXPERIMENTS / "learners").glob("*.py"))
NAMES = [path.stem for path in EXAMPLES]
SEEDS, STEPS = 3, 40


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES[NAMES.index(name)])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DEFAULT_EXAMPLES = ("optax_tutorial", "purejaxrl_ppo")


@pytest.fixture(
    scope="module",
    params=[n if n in DEFAULT_EXAMPLES else pytest.param(n, marks=pytest.mark.exhaustive) for n in NAMES],
)
def audited_example(request):
    """Returns an example and its audit, in which one condition ruins the parameters and another is neutral."""
    module = load_example(request.param)
    noise = ja.weight_noise(ja.sweep(0.0, 30.0), onset=0.5)
    settings = MetricSettings(window=20, hold=6)
    return module, ja.audit(module.learner(), [noise], seeds=SEEDS, steps=STEPS, settings=settings)


def test_there_is_an_example_of_every_kind():
    assert NAMES == [
        "equinox_regression",
        "gymnasium_callback",
        "nnx_classifier",
        "optax_tutorial",
        "purejaxrl_ppo",
    ]
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 100, path.name


def test_a_perturbation_harms_and_a_neutral_one_changes_nothing(audited_example):
    _, result = audited_example
    for name, values in result.telemetry.data_vars.items():
        if "condition" in values.dims:
            control, neutral = values.isel(condition=0).values, values.isel(condition=1).values
            assert np.array_equal(control, neutral, equal_nan=True), name
    performance = result.telemetry["performance"]
    before, after = (performance.isel(condition=2, step=steps).values for steps in (slice(10, 20), slice(20, 23)))
    assert np.nanmean(after) < np.nanmean(before)
    np.testing.assert_array_equal(performance.values[:, 0, :20], performance.values[:, 2, :20])


def test_an_undisturbed_lane_learns(audited_example):
    _, result = audited_example
    control = result.telemetry["performance"].values[:, 0]
    assert np.nanmean(control[:, -8:]) > np.nanmean(control[:, :8])


@pytest.mark.exhaustive
def test_performance_may_be_missing_in_some_steps():
    result = ja.audit(load_example("purejaxrl_ppo").learner(), [ja.weight_noise(0.0, onset=0.5)], seeds=2, steps=30)
    assert 0 < np.isnan(result.telemetry["performance"].values).mean() < 1
    assert (result.metrics["collapse_time"].values == np.inf).all()


def test_a_state_may_contain_functions():
    """Each trace has another function object, as with a lambda in `init`, and taps receive the entire state."""

    def init(key):
        return {"scale": jax.random.uniform(key, (3,)), "activation": lambda x: jnp.tanh(x)}

    def step(state, key, taps):
        assert callable(state["activation"])
        state = taps("params", state)
        next_state = {"scale": state["scale"] * 0.9, "activation": lambda x: x}
        return next_state, {"performance": state["activation"](state["scale"]).sum()}

    noise = ja.weight_noise(ja.sweep(0.0, 3.0), onset=0.5)
    performance = ja.audit(ja.Learner(init, step), [noise], seeds=2, steps=30).telemetry["performance"].values
    assert np.array_equal(performance[:, 0], performance[:, 1])
    assert (performance[:, 0, 15] != performance[:, 2, 15]).all()
    assert (performance[:, 0] < 3 * np.tanh(0.9**15)).any()
