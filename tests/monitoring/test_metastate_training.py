"""ChannelScaler, training and thresholds of the meta-state monitor, on data of a known distribution."""

from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from scipy import stats

from jaxaudit.monitoring.meta_state import Training, log_likelihood, train_members
from jaxaudit.monitoring.scoring import false_alarm_interval, min_calibration_runs, threshold
from jaxaudit.monitoring.state_space import GRU, LRU, Kalman
from jaxaudit.monitoring.telemetry import ChannelScaler, stack_channels

LANES, STEPS, CHANNELS = 48, 100, 4
TRUE = Kalman(size=2)
WEIGHTS = np.tile(np.float32(np.arange(LANES) < 32), (2, 1))
"""Weights of the lanes for two members of the ensemble, which are trained on the same 32 lanes."""


def true_params():
    """Parameters of a process with two slow, rotating latents, observed in four channels."""
    turn = 0.95 * np.array([[np.cos(0.2), -np.sin(0.2)], [np.sin(0.2), np.cos(0.2)]])
    weights = np.array([[1.0, 0.0], [0.0, 1.0], [0.7, -0.7], [0.5, 0.5]])
    return {
        "transition": jnp.asarray(turn, jnp.float32),
        "observation": jnp.asarray(weights, jnp.float32),
        "log_transition_variance": jnp.log(jnp.array([0.1, 0.1])),
        "log_observation_variance": jnp.log(jnp.full(4, 0.05)),
        "initial_mean": jnp.zeros(2),
        "log_initial_variance": jnp.zeros(2),
    }


@pytest.fixture(scope="module")
def linear():
    """Lanes sampled from `true_params`, `[LANES, STEPS, CHANNELS]`, and a mask by which a tenth is missing."""
    p, random = jax.tree.map(np.asarray, true_params()), np.random.default_rng(0)
    y = np.empty((LANES, STEPS, CHANNELS), np.float32)
    x = random.normal(size=(LANES, 2))
    for t in range(STEPS):
        y[:, t] = x @ p["observation"].T + np.sqrt(0.05 + 1e-4) * random.normal(size=(LANES, CHANNELS))
        x = x @ p["transition"].T + np.sqrt(0.1) * random.normal(size=(LANES, 2))
    return y, (random.random(y.shape) < 0.9).astype(np.float32)


@pytest.fixture(scope="module")
def trained(linear):
    """Parameters and losses of a model, trained once for all tests."""
    return cache(lambda model: train_members(model, Training(), *linear, WEIGHTS))


@partial(jax.jit, static_argnums=0)
def likelihoods(model, params, y, observed):
    return jax.vmap(partial(log_likelihood, model, params))(y, observed)


def mean_likelihood(model, params, y, observed):
    likelihood, counts = likelihoods(model, params, y, observed)
    return float(likelihood.sum() / counts.sum())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "tolerance"),
    [
        pytest.param(Kalman(size=2), 0.02, marks=pytest.mark.exhaustive),
        (LRU(size=4), 0.08),
        pytest.param(GRU(size=8), 0.08, marks=pytest.mark.slow),
    ],
    ids=["kalman", "lru", "gru"],
)
def test_a_trained_model_is_nearly_as_likely_as_the_true_one(linear, trained, model, tolerance):
    """Compares log-likelihoods of test lanes under the trained model and the true one, in nats per value."""
    y, observed = linear
    params, losses = trained(model)
    best = mean_likelihood(TRUE, true_params(), y[32:], observed[32:])
    for member in range(2):
        member_params = jax.tree.map(lambda x: x[member], params)  # noqa: B023
        assert best - tolerance < mean_likelihood(model, member_params, y[32:], observed[32:]) < best + 0.01
    assert losses.shape == (2, 400)
    assert (losses[:, -20:].mean(1) < losses[:, :20].mean(1) - 0.1).all()


def test_innovations_of_the_true_model_are_standard_normal(linear):
    y, observed = linear
    _, innovations = jax.jit(jax.vmap(lambda y, observed: TRUE.filter_run(true_params(), y, observed)))(y, observed)
    standardised = np.asarray(innovations.standardised)[observed > 0]
    assert stats.kstest(standardised, "norm").pvalue > 1e-3
    complete = (observed > 0).all(-1)
    assert stats.kstest(np.asarray(innovations.squared)[complete], "chi2", args=(CHANNELS,)).pvalue > 1e-3


@pytest.mark.exhaustive
def test_lanes_without_weight_do_not_affect_training(linear, trained):
    y, observed = linear
    changed = np.where(WEIGHTS[0][:, None, None] > 0, y, np.float32(50))
    params, _ = train_members(TRUE, Training(), changed, observed, WEIGHTS)
    chex.assert_trees_all_equal(trained(TRUE)[0], params)


def telemetry():
    random = np.random.default_rng(1)
    shape = (2, 3, 20)
    loss = random.lognormal(size=shape)
    loss[1, 2, 5:] = np.inf
    rare = np.where(np.arange(20) % 10 == 9, random.normal(size=shape), np.nan)
    return xr.Dataset(
        {
            "loss": (("seed", "condition", "step"), loss),
            "seldom": (("seed", "condition", "step"), rare),
            "rate": (("seed", "condition", "step"), np.full(shape, 0.1)),
            "norm": (("seed", "condition", "step", "layer"), random.normal(size=(*shape, 2))),
            "final": (("seed", "condition"), random.normal(size=shape[:2])),
        },
        coords={"layer": ["a", "b"]},
    )


def test_stack_channels_splits_array_channels_and_omits_scalars():
    stacked = stack_channels(telemetry())
    assert stacked.dims == ("seed", "condition", "step", "channel")
    assert list(stacked.channel.values) == ["loss", "seldom", "rate", "norm[a]", "norm[b]"]
    expected = telemetry()["norm"].values[..., 1].astype(np.float32)
    np.testing.assert_array_equal(stacked.sel(channel="norm[b]"), expected)
    assert list(stack_channels(telemetry(), ["seldom", "loss"]).channel.values) == ["seldom", "loss"]
    with pytest.raises(ValueError, match="no channel 'lost'; there are: loss, norm, rate, seldom"):
        stack_channels(telemetry(), ["lost"])


def test_channels_are_standardised_by_clean_runs():
    stacked = stack_channels(telemetry())
    names = [str(name) for name in stacked.channel.values]
    clean = stacked.isel(condition=[0, 1])
    channels = ChannelScaler.fit(names, clean.values)
    assert channels.names == ("loss", "seldom", "norm[a]", "norm[b]")  # the rate is constant
    assert list(channels.complete) == [True, False, True, True]
    np.testing.assert_allclose(channels.center[0], np.median(clean.sel(channel="loss")), rtol=1e-6)
    np.testing.assert_allclose(channels.scale[0], stats.iqr(clean.sel(channel="loss"), scale="normal"), rtol=1e-4)
    y, observed = channels.standardise(channels.select(stacked))
    assert y.shape == observed.shape == (2, 3, 20, 4)
    assert np.isfinite(y).all()
    assert (observed[1, 2, 5:, 0] == 0).all()
    assert (y[1, 2, 5:, 0] == 0).all()
    assert observed[..., 1].sum() == 2 * 3 * 2
    np.testing.assert_allclose(
        np.sinh(y[..., 2]) * channels.scale[2] + channels.center[2],
        stacked.sel(channel="norm[a]"),
        rtol=1e-4,
        atol=1e-5,
    )
    with pytest.raises(ValueError, match="reads channel 'loss', which is not there"):
        channels.select(stacked.sel(channel=["seldom"]))
    with pytest.raises(ValueError, match="none of the channels differs between the clean runs: rate"):
        ChannelScaler.fit(["rate"], stacked.sel(channel=["rate"]).values)


@pytest.mark.parametrize("names", [("acting_performance", "performance"), ("performance", "acting_performance")])
def test_of_identical_channels_the_performance_is_kept(names):
    """Of identical channels the performance is kept, whatever the order; without it, the first one."""
    random = np.random.default_rng(4)
    first, second = random.normal(size=(2, 5, 20))
    clean = np.stack([first, second, first, second, random.normal(size=(5, 20))], axis=-1)
    channels = ChannelScaler.fit((names[0], "a", names[1], "b", "c"), clean)
    assert sorted(channels.names) == ["a", "c", "performance"]
    nearly_equal = clean.copy()
    nearly_equal[2, 7, 2] += 1e-9
    assert set(names) <= set(ChannelScaler.fit((names[0], "a", names[1], "b", "c"), nearly_equal).names)


@pytest.mark.parametrize(("alpha", "runs"), [(0.05, 19), (0.05, 100), (0.01, 99), (0.2, 30)])
def test_the_false_alarm_rate_is_the_stated_one(alpha, runs):
    """Over many calibrations, the share above the k-th of n scores has the distribution Beta(n + 1 - k, k)."""
    random = np.random.default_rng(int(1e4 * alpha) + runs)
    rank = int(np.ceil(round((runs + 1) * (1 - alpha), 9)))
    shares = [stats.norm.sf(threshold(random.normal(size=runs), alpha)) for _ in range(2000)]
    assert stats.kstest(shares, "beta", args=(runs + 1 - rank, rank)).pvalue > 1e-3
    assert np.mean(shares) <= alpha + 3 * np.std(shares) / np.sqrt(2000)


def test_thresholds_from_too_few_or_invalid_scores_are_refused():
    assert min_calibration_runs(0.05) == 19
    assert min_calibration_runs(0.01) == 99
    with pytest.raises(ValueError, match=r"18 clean runs are too few for a false-alarm rate of 0\.05: it takes 19"):
        threshold(np.zeros(18), 0.05)
    with pytest.raises(ValueError, match="NaN"):
        threshold([1.0, np.nan], 0.5)
    with pytest.raises(ValueError, match=r"alpha must lie in \(0, 1\), not 1"):
        threshold(np.zeros(100), 1)
    assert threshold([1.0, np.inf, 2.0], 0.25) == np.inf


@pytest.mark.parametrize(("runs", "alpha"), [(19, 0.05), (30, 0.1), (200, 0.05)])
def test_the_false_alarm_rate_of_one_calibration_is_beta_distributed(runs, alpha):
    """The false-alarm rate of a threshold on uniform scores is one minus the threshold, and alpha bounds its mean."""
    scores = np.random.default_rng(0).random((4000, runs))
    rates = np.array([1 - threshold(row, alpha) for row in scores])
    assert rates.mean() <= alpha + 4 * rates.std() / np.sqrt(len(rates))
    for coverage in (0.5, 0.9):
        low, high = false_alarm_interval(runs, alpha, coverage)
        assert ((low <= rates) & (rates <= high)).mean() == pytest.approx(coverage, abs=0.03)
    assert high > alpha  # a single calibration set may exceed alpha
