"""Meta-state models: online and offline evaluation agree, and the linear-Gaussian model agrees with statsmodels."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.tsa.statespace.kalman_filter import KalmanFilter

from jaxaudit.monitoring.meta_state import StateSpace
from jaxaudit.monitoring.state_space import GRU, LRU, MIN_VARIANCE, Kalman

MODELS = {"lru": LRU(), "gru": GRU(), "kalman": Kalman()}
CHANNELS, STEPS = 5, 200
filter_run = jax.jit(StateSpace.filter_run, static_argnums=0)
init_params = jax.jit(lambda model, key: model.init(key, CHANNELS), static_argnums=0)


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


def telemetry(seed, steps=STEPS, share=0.8):
    """Channels with a common random walk, of which some values are missing: values, and a mask of those present."""
    random = np.random.default_rng(seed)
    common = np.cumsum(random.normal(size=(steps, 1)), axis=0) / np.sqrt(steps)
    y = common * random.normal(size=CHANNELS) + 0.3 * random.normal(size=(steps, CHANNELS))
    return y.astype(np.float32), (random.random((steps, CHANNELS)) < share).astype(np.float32)


@pytest.mark.exhaustive
def test_step_by_step_evaluation_equals_the_whole_run(model):
    y, observed = telemetry(0)
    params = init_params(model, jax.random.key(0))
    latents, innovations = filter_run(model, params, y, observed)

    @jax.jit
    def step(state, y, observed):
        step_innovations = model.innovations(params, state, y, observed)
        state = model.advance(params, state, y, observed)
        return state, model.latent(params, state), step_innovations

    state = model.initial(params)
    for t in range(STEPS):
        state, latent, step_innovations = step(state, y[t], observed[t])
        expected = jax.tree.map(lambda x: x[t], (latents, innovations))  # noqa: B023
        chex.assert_trees_all_close(expected, (latent, step_innovations), rtol=1e-4, atol=1e-5)


def test_missing_values_do_not_matter(model):
    y, observed = telemetry(1)
    params = init_params(model, jax.random.key(0))
    with_values, without = (
        filter_run(model, params, values, observed) for values in (y, np.where(observed, y, np.float32(1e6)))
    )
    chex.assert_trees_all_equal(with_values, without)
    assert not np.asarray(with_values[1].standardised)[observed == 0].any()


def test_later_values_do_not_change_earlier_results(model):
    y, observed = telemetry(2)
    params = init_params(model, jax.random.key(0))
    later = np.where(np.arange(STEPS)[:, None] < 150, y, y + 3)
    before, after = (filter_run(model, params, values, observed) for values in (y, later))
    chex.assert_trees_all_close(*(jax.tree.map(lambda x: x[:150], x) for x in (before, after)), rtol=1e-5, atol=1e-6)
    chex.assert_tree_all_finite(after)


def test_the_likelihood_is_a_density(model):
    """The density of one step integrates to one."""
    y, observed = telemetry(3)
    params = init_params(model, jax.random.key(0))
    mask = np.float32(np.arange(CHANNELS) == 2)
    values = np.linspace(-30, 30, 20001, dtype=np.float32)

    @jax.jit
    def densities(values):
        state = model.initial(params)
        state, _ = jax.lax.scan(lambda s, row: (model.advance(params, s, *row), None), state, (y[:5], observed[:5]))
        return jax.vmap(lambda v: jnp.exp(model.innovations(params, state, mask * v, mask).log_likelihood))(values)

    assert np.trapezoid(densities(values), values) == pytest.approx(1.0, abs=1e-3)


decay = jax.jit(MODELS["lru"].decay)


@settings(max_examples=200, deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(-(2.0**100), 2.0**100, width=32))
def test_the_recurrence_is_stable_for_every_parameter(nu, theta):
    assert abs(np.complex64(decay({"nu": np.float32(nu), "theta": np.float32(theta)}))) < 1.0


def test_the_recurrence_equals_its_formula_in_float64():
    """Compares 5,000 steps with float64 NumPy."""
    model = MODELS["lru"]
    y, observed = telemetry(4, steps=5000)
    params = init_params(model, jax.random.key(1))
    latents, _ = filter_run(model, params, y, observed)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    decays = np.asarray(decay(params), np.complex128)
    np.testing.assert_allclose(np.abs(decays), np.exp(-np.exp(p["nu"]) - 1e-5), rtol=1e-6)
    np.testing.assert_allclose(np.exp(p["gamma"]) ** 2 + np.exp(-2 * np.exp(p["nu"])), 1.0, rtol=1e-5)
    kernel = np.exp(p["gamma"])[:, None] * (p["input_real"] + 1j * p["input_imaginary"])
    h = np.zeros((5000, model.size), complex)
    for t in range(5000):
        h[t] = decays * h[t - 1] + kernel @ np.concatenate([observed[t] * y[t], observed[t]]).astype(np.float64)
    gap = np.abs(latents - np.concatenate([h.real, h.imag], axis=1)).max(axis=1)
    assert (gap <= 1e-5 * np.maximum(1, np.abs(h).max(axis=1))).all()


def test_the_kalman_filter_equals_statsmodels():
    y, observed = telemetry(5)
    with jax.enable_x64(True):
        model = Kalman(size=4)
        random = np.random.default_rng(6)
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model.init(jax.random.key(2), CHANNELS))
        params["transition"] = jnp.asarray(0.95 * np.linalg.qr(random.normal(size=(4, 4)))[0])
        params["initial_mean"] = jnp.asarray(random.normal(size=4))
        double = jnp.asarray(y, jnp.float64), jnp.asarray(observed, jnp.float64)
        latents, innovations = jax.jit(lambda *a: model.filter_run(*a))(params, *double)
        latents, likelihood, squared = map(np.asarray, (latents, innovations.log_likelihood, innovations.squared))
    p = jax.tree.map(np.asarray, params)
    reference = KalmanFilter(k_endog=CHANNELS, k_states=4, k_posdef=4)
    reference.bind(np.where(observed, y, np.nan).astype(np.float64))
    reference["design"], reference["transition"], reference["selection"] = p["observation"], p["transition"], np.eye(4)
    reference["obs_cov"] = np.diag(MIN_VARIANCE + np.exp(p["log_observation_variance"]))
    reference["state_cov"] = np.diag(np.exp(p["log_transition_variance"]))
    reference.initialize_known(p["initial_mean"], np.diag(np.exp(p["log_initial_variance"])))
    result = reference.filter()
    np.testing.assert_allclose(latents, result.predicted_state.T[1:], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(likelihood, result.llf_obs, rtol=1e-6)
    for t in range(STEPS):
        present = observed[t] > 0
        gap = result.forecasts_error[present, t]
        expected = gap @ np.linalg.solve(result.forecasts_error_cov[:, :, t][np.ix_(present, present)], gap)
        assert squared[t] == pytest.approx(expected, rel=1e-6, abs=1e-9)
