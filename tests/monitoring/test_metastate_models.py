"""Meta-state models: one interface, online as offline, and the linear-Gaussian one against statsmodels."""

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
followed = jax.jit(StateSpace.filter_run, static_argnums=0)
initialised = jax.jit(lambda model, key: model.init(key, CHANNELS), static_argnums=0)


@pytest.fixture(params=MODELS)
def model(request):
    return MODELS[request.param]


def telemetry(seed, steps=STEPS, share=0.8):
    """Channels that wander together, some values missing."""
    random = np.random.default_rng(seed)
    common = np.cumsum(random.normal(size=(steps, 1)), axis=0) / np.sqrt(steps)
    y = common * random.normal(size=CHANNELS) + 0.3 * random.normal(size=(steps, CHANNELS))
    return y.astype(np.float32), (random.random((steps, CHANNELS)) < share).astype(np.float32)


@pytest.mark.exhaustive
def test_step_by_step_is_all_at_once(model):
    y, seen = telemetry(0)
    params = initialised(model, jax.random.key(0))
    latents, found = followed(model, params, y, seen)

    @jax.jit
    def one(state, y, seen):
        innovations = model.innovations(params, state, y, seen)
        state = model.advance(params, state, y, seen)
        return state, model.latent(params, state), innovations

    state = model.initial(params)
    for t in range(STEPS):
        state, latent, innovations = one(state, y[t], seen[t])
        whole = jax.tree.map(lambda x: x[t], (latents, found))  # noqa: B023
        chex.assert_trees_all_close(whole, (latent, innovations), rtol=1e-4, atol=1e-5)


def test_what_is_not_seen_does_not_matter(model):
    y, seen = telemetry(1)
    params = initialised(model, jax.random.key(0))
    found, without = (followed(model, params, values, seen) for values in (y, np.where(seen, y, np.float32(1e6))))
    chex.assert_trees_all_equal(found, without)
    assert not np.asarray(found[1].standardised)[seen == 0].any()


def test_the_future_does_not_matter(model):
    y, seen = telemetry(2)
    params = initialised(model, jax.random.key(0))
    later = np.where(np.arange(STEPS)[:, None] < 150, y, y + 3)
    before, after = (followed(model, params, values, seen) for values in (y, later))
    chex.assert_trees_all_close(*(jax.tree.map(lambda x: x[:150], x) for x in (before, after)), rtol=1e-5, atol=1e-6)
    chex.assert_tree_all_finite(after)


def test_a_likelihood_is_that_of_a_normal(model):
    """The density of one step integrates to one, whatever the state."""
    y, seen = telemetry(3)
    params = initialised(model, jax.random.key(0))
    only = np.float32(np.arange(CHANNELS) == 2)
    values = np.linspace(-30, 30, 20001, dtype=np.float32)

    @jax.jit
    def densities(values):
        state = model.initial(params)
        state, _ = jax.lax.scan(lambda s, row: (model.advance(params, s, *row), None), state, (y[:5], seen[:5]))
        return jax.vmap(lambda v: jnp.exp(model.innovations(params, state, only * v, only).log_likelihood))(values)

    assert np.trapezoid(densities(values), values) == pytest.approx(1.0, abs=1e-3)


decay = jax.jit(MODELS["lru"].decay)


@settings(max_examples=200, deadline=None)
@given(st.floats(-(2.0**100), 2.0**100, width=32), st.floats(-(2.0**100), 2.0**100, width=32))
def test_the_recurrence_is_stable_for_every_parameter(nu, theta):
    assert abs(np.complex64(decay({"nu": np.float32(nu), "theta": np.float32(theta)}))) < 1.0


def test_the_recurrence_is_that_of_its_formula():
    """5,000 steps against float64 NumPy."""
    model = MODELS["lru"]
    y, seen = telemetry(4, steps=5000)
    params = initialised(model, jax.random.key(1))
    found, _ = followed(model, params, y, seen)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    decays = np.asarray(decay(params), np.complex128)
    np.testing.assert_allclose(np.abs(decays), np.exp(-np.exp(p["nu"]) - 1e-5), rtol=1e-6)
    np.testing.assert_allclose(np.exp(p["gamma"]) ** 2 + np.exp(-2 * np.exp(p["nu"])), 1.0, rtol=1e-5)
    kernel = np.exp(p["gamma"])[:, None] * (p["input_real"] + 1j * p["input_imaginary"])
    h = np.zeros((5000, model.size), complex)
    for t in range(5000):
        h[t] = decays * h[t - 1] + kernel @ np.concatenate([seen[t] * y[t], seen[t]]).astype(np.float64)
    gap = np.abs(found - np.concatenate([h.real, h.imag], axis=1)).max(axis=1)
    assert (gap <= 1e-5 * np.maximum(1, np.abs(h).max(axis=1))).all()


def test_kalman_is_statsmodels():
    y, seen = telemetry(5)
    with jax.enable_x64(True):
        model = Kalman(size=4)
        random = np.random.default_rng(6)
        params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), model.init(jax.random.key(2), CHANNELS))
        params["transition"] = jnp.asarray(0.95 * np.linalg.qr(random.normal(size=(4, 4)))[0])
        params["initial_mean"] = jnp.asarray(random.normal(size=4))
        double = jnp.asarray(y, jnp.float64), jnp.asarray(seen, jnp.float64)
        latents, found = jax.jit(lambda *a: model.filter_run(*a))(params, *double)
        latents, likelihood, squared = map(np.asarray, (latents, found.log_likelihood, found.squared))
    p = jax.tree.map(np.asarray, params)
    reference = KalmanFilter(k_endog=CHANNELS, k_states=4, k_posdef=4)
    reference.bind(np.where(seen, y, np.nan).astype(np.float64))
    reference["design"], reference["transition"], reference["selection"] = p["observation"], p["transition"], np.eye(4)
    reference["obs_cov"] = np.diag(MIN_VARIANCE + np.exp(p["log_observation_variance"]))
    reference["state_cov"] = np.diag(np.exp(p["log_transition_variance"]))
    reference.initialize_known(p["initial_mean"], np.diag(np.exp(p["log_initial_variance"])))
    result = reference.filter()
    np.testing.assert_allclose(latents, result.predicted_state.T[1:], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(likelihood, result.llf_obs, rtol=1e-6)
    for t in range(STEPS):
        kept = seen[t] > 0
        gap = result.forecasts_error[kept, t]
        wanted = gap @ np.linalg.solve(result.forecasts_error_cov[:, :, t][np.ix_(kept, kept)], gap)
        assert squared[t] == pytest.approx(wanted, rel=1e-6, abs=1e-9)
