"""ChannelScaler, training and thresholds of the meta-state monitor, on data whose law is known."""

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
"""Two members, trained on the same of the lanes."""


def truth():
    """Two slow latents, one of them turning, seen through four channels."""
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
    """Lanes drawn from `truth`: `[LANES, STEPS, CHANNELS]`, a tenth of the values missing."""
    p, random = jax.tree.map(np.asarray, truth()), np.random.default_rng(0)
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
def likelihoods(model, params, y, seen):
    return jax.vmap(partial(log_likelihood, model, params))(y, seen)


def mean_likelihood(model, params, y, seen):
    likelihood, values = likelihoods(model, params, y, seen)
    return float(likelihood.sum() / values.sum())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "short_of"),
    [
        pytest.param(Kalman(size=2), 0.02, marks=pytest.mark.exhaustive),
        (LRU(size=4), 0.08),
        pytest.param(GRU(size=8), 0.08, marks=pytest.mark.slow),
    ],
    ids=["kalman", "lru", "gru"],
)
def test_a_trained_model_expects_nearly_what_the_true_one_does(linear, trained, model, short_of):
    """Likelihood of lanes it was not trained on, against that of the law they were drawn from; in nats a value."""
    y, seen = linear
    params, losses = trained(model)
    best = mean_likelihood(TRUE, truth(), y[32:], seen[32:])
    for member in range(2):
        mine = jax.tree.map(lambda x: x[member], params)  # noqa: B023
        assert best - short_of < mean_likelihood(model, mine, y[32:], seen[32:]) < best + 0.01
    assert losses.shape == (2, 400)
    assert (losses[:, -20:].mean(1) < losses[:, :20].mean(1) - 0.1).all()


def test_innovations_of_the_true_model_are_standard_normals(linear):
    y, seen = linear
    _, found = jax.jit(jax.vmap(lambda y, seen: TRUE.filter_run(truth(), y, seen)))(y, seen)
    standardised = np.asarray(found.standardised)[seen > 0]
    assert stats.kstest(standardised, "norm").pvalue > 1e-3
    whole = (seen > 0).all(-1)
    assert stats.kstest(np.asarray(found.squared)[whole], "chi2", args=(CHANNELS,)).pvalue > 1e-3


@pytest.mark.exhaustive
def test_a_lane_of_no_weight_is_not_trained_on(linear, trained):
    y, seen = linear
    another = np.where(WEIGHTS[0][:, None, None] > 0, y, np.float32(50))
    other, _ = train_members(TRUE, Training(), another, seen, WEIGHTS)
    chex.assert_trees_all_equal(trained(TRUE)[0], other)


def telemetry():
    random = np.random.default_rng(1)
    shape = (2, 3, 20)
    loss = random.lognormal(size=shape)
    loss[1, 2, 5:] = np.inf
    seldom = np.where(np.arange(20) % 10 == 9, random.normal(size=shape), np.nan)
    return xr.Dataset(
        {
            "loss": (("seed", "condition", "step"), loss),
            "seldom": (("seed", "condition", "step"), seldom),
            "rate": (("seed", "condition", "step"), np.full(shape, 0.1)),
            "norm": (("seed", "condition", "step", "layer"), random.normal(size=(*shape, 2))),
            "final": (("seed", "condition"), random.normal(size=shape[:2])),
        },
        coords={"layer": ["a", "b"]},
    )


def test_series_of_a_dataset():
    found = stack_channels(telemetry())
    assert found.dims == ("seed", "condition", "step", "channel")
    assert list(found.channel.values) == ["loss", "seldom", "rate", "norm[a]", "norm[b]"]
    wanted = telemetry()["norm"].values[..., 1].astype(np.float32)
    np.testing.assert_array_equal(found.sel(channel="norm[b]"), wanted)
    assert list(stack_channels(telemetry(), ["seldom", "loss"]).channel.values) == ["seldom", "loss"]
    with pytest.raises(ValueError, match="no channel 'lost'; there are: loss, norm, rate, seldom"):
        stack_channels(telemetry(), ["lost"])


def test_channels_are_standardised_by_clean_runs():
    whole = stack_channels(telemetry())
    names = [str(name) for name in whole.channel.values]
    clean = whole.isel(condition=[0, 1])
    channels = ChannelScaler.fit(names, clean.values)
    assert channels.names == ("loss", "seldom", "norm[a]", "norm[b]")  # the rate never moves
    assert list(channels.complete) == [True, False, True, True]
    np.testing.assert_allclose(channels.center[0], np.median(clean.sel(channel="loss")), rtol=1e-6)
    np.testing.assert_allclose(channels.scale[0], stats.iqr(clean.sel(channel="loss"), scale="normal"), rtol=1e-4)
    y, seen = channels.standardise(channels.select(whole))
    assert y.shape == seen.shape == (2, 3, 20, 4)
    assert np.isfinite(y).all()
    assert (seen[1, 2, 5:, 0] == 0).all()
    assert (y[1, 2, 5:, 0] == 0).all()
    assert seen[..., 1].sum() == 2 * 3 * 2
    np.testing.assert_allclose(
        np.sinh(y[..., 2]) * channels.scale[2] + channels.center[2], whole.sel(channel="norm[a]"), rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ValueError, match="reads channel 'loss', which is not there"):
        channels.select(whole.sel(channel=["seldom"]))
    with pytest.raises(ValueError, match="none of the channels differs between the clean runs: rate"):
        ChannelScaler.fit(["rate"], whole.sel(channel=["rate"]).values)


@pytest.mark.parametrize("names", [("acting_performance", "performance"), ("performance", "acting_performance")])
def test_of_channels_that_say_the_same_the_performance_is_read(names):
    """Whatever stands first; of others, the first."""
    random = np.random.default_rng(4)
    told, other = random.normal(size=(2, 5, 20))
    clean = np.stack([told, other, told, other, random.normal(size=(5, 20))], axis=-1)
    channels = ChannelScaler.fit((names[0], "a", names[1], "b", "c"), clean)
    assert sorted(channels.names) == ["a", "c", "performance"]
    almost = clean.copy()
    almost[2, 7, 2] += 1e-9
    assert set(names) <= set(ChannelScaler.fit((names[0], "a", names[1], "b", "c"), almost).names)


@pytest.mark.parametrize(("alpha", "runs"), [(0.05, 19), (0.05, 100), (0.01, 99), (0.2, 30)])
def test_false_alarms_are_as_many_as_stated(alpha, runs):
    """Over many calibrations, against the exact law: the share above the k-th of n is Beta(n + 1 - k, k)."""
    random = np.random.default_rng(int(1e4 * alpha) + runs)
    rank = int(np.ceil(round((runs + 1) * (1 - alpha), 9)))
    shares = [stats.norm.sf(threshold(random.normal(size=runs), alpha)) for _ in range(2000)]
    assert stats.kstest(shares, "beta", args=(runs + 1 - rank, rank)).pvalue > 1e-3
    assert np.mean(shares) <= alpha + 3 * np.std(shares) / np.sqrt(2000)


def test_a_threshold_that_cannot_be_had_is_refused():
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
def test_the_false_alarm_rate_of_one_set_of_runs_is_beta_distributed(runs, alpha):
    """Of uniform scores a threshold's false-alarm rate is one minus it; the average over sets is what is promised."""
    scores = np.random.default_rng(0).random((4000, runs))
    rates = np.array([1 - threshold(own, alpha) for own in scores])
    assert rates.mean() <= alpha + 4 * rates.std() / np.sqrt(len(rates))
    for coverage in (0.5, 0.9):
        low, high = false_alarm_interval(runs, alpha, coverage)
        assert ((low <= rates) & (rates <= high)).mean() == pytest.approx(coverage, abs=0.03)
    assert high > alpha  # a single set promises less than the average does
