"""Learners as other libraries' users write them (experiments/learners), audited as they are."""

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


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES[NAMES.index(name)])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


QUICK = ("optax_tutorial", "purejaxrl_ppo")


@pytest.fixture(
    scope="module", params=[n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in NAMES]
)
def audited(request):
    """An example, and an audit of it: parameters are ruined in one condition, and not disturbed in another."""
    module = example(request.param)
    ruin = ja.weight_noise(ja.sweep(0.0, 30.0), onset=0.5)
    settings = MetricSettings(window=20, hold=6)
    return module, ja.audit(module.learner(), [ruin], seeds=SEEDS, steps=STEPS, settings=settings)


def test_examples_are_those_of_the_kinds_that_are_promised():
    assert NAMES == [
        "equinox_regression",
        "gymnasium_callback",
        "nnx_classifier",
        "optax_tutorial",
        "purejaxrl_ppo",
    ]
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) < 100, path.name


def test_a_disturbance_harms_and_an_idle_one_changes_nothing(audited):
    _, found = audited
    for name, values in found.telemetry.data_vars.items():
        if "condition" in values.dims:
            control, idle = values.isel(condition=0).values, values.isel(condition=1).values
            assert np.array_equal(control, idle, equal_nan=True), name
    performance = found.telemetry["performance"]
    before, after = (performance.isel(condition=2, step=steps).values for steps in (slice(10, 20), slice(20, 23)))
    assert np.nanmean(after) < np.nanmean(before)
    np.testing.assert_array_equal(performance.values[:, 0, :20], performance.values[:, 2, :20])


def test_an_undisturbed_lane_learns(audited):
    _, found = audited
    control = found.telemetry["performance"].values[:, 0]
    assert np.nanmean(control[:, -8:]) > np.nanmean(control[:, :8])


@pytest.mark.exhaustive
def test_a_performance_that_is_missing_in_some_steps_is_declared():
    found = ja.audit(example("purejaxrl_ppo").learner(), [ja.weight_noise(0.0, onset=0.5)], seeds=2, steps=30)
    assert 0 < np.isnan(found.telemetry["performance"].values).mean() < 1
    assert (found.metrics["collapse_time"].values == np.inf).all()


def test_a_function_among_the_leaves_of_a_state_is_that_of_its_author():
    """Another function object in each trace, as a lambda in `init` is, in a state that taps see whole."""

    def init(key):
        return {"scale": jax.random.uniform(key, (3,)), "activation": lambda x: jnp.tanh(x)}

    def step(state, key, taps):
        assert callable(state["activation"])
        state = taps("params", state)
        moved = {"scale": state["scale"] * 0.9, "activation": lambda x: x}
        return moved, {"performance": state["activation"](state["scale"]).sum()}

    noise = ja.weight_noise(ja.sweep(0.0, 3.0), onset=0.5)
    found = ja.audit(ja.Learner(init, step), [noise], seeds=2, steps=30).telemetry["performance"].values
    assert np.array_equal(found[:, 0], found[:, 1])
    assert (found[:, 0, 15] != found[:, 2, 15]).all()
    assert (found[:, 0] < 3 * np.tanh(0.9**15)).any()
