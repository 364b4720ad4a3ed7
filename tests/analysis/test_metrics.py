"""The metrics against an independent float64 implementation, written as loops from the definitions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr
from scipy import stats

from jaxaudit.analysis import metrics
from jaxaudit.analysis.results import has_trend, onsets_in_trend

STEPS, WINDOW, HOLD = 240, 20, 30
SETTINGS = metrics.MetricSettings(window=WINDOW, hold=HOLD, horizon=60)
EVALUATE = jax.jit(metrics.evaluate, static_argnames="settings")
LANES = jax.jit(jax.vmap(lambda x, onset: metrics.evaluate(x, onset, settings=SETTINGS)))
DEVIATION = jax.jit(metrics.meta_state_deviation, static_argnames="horizon")
NAMES = (
    "pre_mean",
    "pre_std",
    "collapse_time",
    "collapse_censored",
    "diverged",
    "recovery_rate",
    "recovery_time",
    "spike_intensity",
)


def naive_level(J, onset, W):
    before = [J[t] for t in range(max(onset - W, 0), onset)]
    if len(before) < 2 or not all(math.isfinite(v) for v in before):
        return math.nan, math.nan
    mean = math.fsum(before) / len(before)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in before) / len(before))


def naive_index(J, t, W):
    if t < W - 1:
        return math.nan
    last = [J[i] for i in range(t - W + 1, t + 1)]
    if not all(math.isfinite(v) for v in last):
        return math.nan
    mean = math.fsum(last) / W
    return math.fsum((v - mean) ** 2 for v in last) / W


def naive_metrics(J, onset, W, hold):
    J = [float(v) for v in J]
    T = len(J)
    mean, std = naive_level(J, onset, W)
    edge = mean - 2 * std
    broken = next((t for t in range(onset, T) if not math.isfinite(J[t])), None)

    def is_out(t):
        return (broken is not None and t >= broken) or J[t] < edge

    time, censored = math.inf, False
    if math.isnan(mean):
        time = math.nan if broken is None else float(broken)
    else:
        for t in range(onset, T):
            if all(is_out(s) for s in range(t, min(t + hold, T))):
                time, censored = float(t), T - t < hold and broken is None
                break

    rate = math.nan
    if not math.isnan(mean) and broken is None:
        lowest = min(J[onset:])
        fully = math.isfinite(time) and J[-1] - lowest <= 2 * std
        if lowest < mean and not fully:
            rate = (J[-1] - lowest) / (mean - lowest)

    if math.isnan(mean):
        recovery = math.nan
    elif broken is not None:
        recovery = math.inf
    else:
        first_out = next((t for t in range(onset, T) if is_out(t)), None)
        if first_out is None:
            recovery = -1.0
        else:
            recovery = next((float(t - onset) for t in range(first_out, T) if not is_out(t)), math.inf)

    spike = math.nan
    if onset >= W and naive_index(J, onset - 1, W) > 0:
        after = [naive_index(J, t, W) for t in range(onset, min(onset + W, T))]
        if not any(math.isnan(v) for v in after):
            spike = max(after) / naive_index(J, onset - 1, W)
    early = math.nan if math.isnan(time) else float(time < T / 2)
    return dict(zip(NAMES, (mean, std, time, censored, early, rate, recovery, spike), strict=True))


def random_curves():
    """Yields curves of several kinds with random onsets, as (kind, J, onset)."""
    rng = np.random.default_rng(7)
    t = np.arange(STEPS)
    for i in range(220):
        onset = int(rng.integers(2, STEPS - 2)) if i % 4 == 0 else int(rng.integers(WINDOW, STEPS // 2))
        noise = rng.normal(size=STEPS) * rng.choice([1e-3, 1.0, 30.0])
        scale = noise.std()
        after = np.maximum(t - onset, 0)
        drop = rng.choice([0, 3, 10, 100]) * scale
        curve = {
            0: noise,
            1: noise.cumsum(),
            2: noise - drop * (after > 0) * np.exp(-after / rng.integers(3, 80)),
            3: noise - drop * (t > onset + rng.integers(0, 40)),
            4: noise + 0.05 * scale * t - drop * (after > 0) * (after < rng.integers(5, 90)),
        }[i % 5]
        curve = curve + rng.choice([0.0, -50.0, 1e4, 1e6]) * max(scale, 1e-2)
        if i % 7 == 6:
            curve[rng.integers(0, STEPS)] = rng.choice([np.nan, np.inf, -np.inf])
        yield f"random-{i % 5}", curve, onset


def flat(onset=60, level=0.0):
    """A curve that alternates between `level` - 1 and `level` + 1, so that its standard deviation is exactly 1."""
    return level + np.where(np.arange(STEPS) % 2 == 0, 1.0, -1.0), onset


def dip(length, depth=-10.0, start=70):
    curve, onset = flat()
    curve[start : start + length] = depth
    return curve, onset


def with_value(value, *where):
    curve, onset = flat()
    curve[list(where)] = value
    return curve, onset


EXPLICIT_CURVES = {
    "never": flat(),
    "constant": (np.full(STEPS, 0.1), 60),
    "constant-then-lower": (np.where(np.arange(STEPS) < 60, 0.1, 0.0999), 60),
    "constant-then-higher": (np.where(np.arange(STEPS) < 60, 0.1, 0.2), 60),
    "last-step": dip(1, start=STEPS - 1),
    "last-steps": dip(HOLD - 1, start=STEPS - HOLD + 1),
    "last-hold-steps": dip(HOLD, start=STEPS - HOLD),
    "hold-less-one": dip(HOLD - 1),
    "hold": dip(HOLD),
    "hold-and-one": dip(HOLD + 1),
    "at-onset": dip(HOLD, start=60),
    "from-before-onset": dip(HOLD + 10, start=50),
    "exactly-on-the-edge": dip(HOLD, depth=-2.0),
    "below-the-edge": dip(HOLD, depth=-2.001),
    "to-the-end": dip(STEPS),
    "twice": (np.where((np.arange(STEPS) > 150) & (np.arange(STEPS) < 190), -9.0, dip(5)[0]), 60),
    "huge-offset": (1e4 + 0.0078125 * (flat()[0] - 40 * (np.arange(STEPS) >= 100)), 60),
    "rises": (flat()[0] + 50 * (np.arange(STEPS) > 80), 60),
    "nan-long-before": with_value(np.nan, 10),
    "nan-just-before": with_value(np.nan, 59),
    "nan-first-of-window": with_value(np.nan, 40),
    "nan-before-window": with_value(np.nan, 39),
    "nan-at-onset": with_value(np.nan, 60),
    "nan-after": with_value(np.nan, 90),
    "inf-after": with_value(np.inf, 90),
    "minus-inf-after": with_value(-np.inf, 90, 91),
    "nan-last": with_value(np.nan, STEPS - 1),
    "nan-before-and-after": with_value(np.nan, 55, 120),
    "nan-while-down": (np.where(np.arange(STEPS) == 90, np.nan, dip(25)[0]), 60),
    "all-nan": (np.full(STEPS, np.nan), 60),
    "onset-0": (flat()[0], 0),
    "onset-1": (flat()[0], 1),
    "onset-2": (flat()[0], 2),
    "onset-short-window": (flat()[0], WINDOW - 1),
    "onset-full-window": (flat()[0], WINDOW),
    "onset-last": (flat()[0], STEPS - 1),
    "onset-0-nan": (with_value(np.nan, 30)[0], 0),
}


@pytest.fixture(scope="module")
def evaluated():
    cases = [(name, *pair) for name, pair in EXPLICIT_CURVES.items()] + list(random_curves())
    names, curves, onsets = zip(*cases, strict=True)
    series = np.stack(curves).astype(np.float32)
    return names, series, onsets, jax.tree.map(np.asarray, LANES(series, np.array(onsets)))


@pytest.mark.parametrize("metric", NAMES)
def test_metrics_equal_the_naive_reference(evaluated, metric):
    names, series, onsets, result = evaluated
    assert len(names) >= 250
    for i, name in enumerate(names):
        expected = naive_metrics(series[i], onsets[i], WINDOW, HOLD)[metric]
        # The mean of a large J is rounded to float32; the other metrics depend on its fluctuations only.
        np.testing.assert_allclose(
            float(result[metric][i]), expected, rtol=2e-4, atol=1e-6, err_msg=f"{metric} of {name} (case {i})"
        )


def test_random_curves_cover_every_outcome(evaluated):
    _, _, _, result = evaluated
    time, rate, recovery = result["collapse_time"], result["recovery_rate"], result["recovery_time"]
    for mask in (np.isnan(time), np.isinf(time), np.isfinite(time), np.isnan(rate), np.isfinite(rate)):
        assert mask.sum() > 5
    for mask in (
        recovery == -1,
        np.isinf(recovery),
        recovery > 0,
        result["collapse_censored"],
        result["diverged"] == 1,
    ):
        assert mask.sum() > 5


def test_explicit_curves_have_the_expected_outcomes(evaluated):
    names, _, _, result = evaluated

    def value_of(name, metric):
        return float(result[metric][names.index(name)])

    assert value_of("hold-less-one", "collapse_time") == np.inf
    assert value_of("hold", "collapse_time") == 70
    assert value_of("last-step", "collapse_time") == STEPS - 1
    assert value_of("last-step", "collapse_censored") == 1
    assert value_of("last-hold-steps", "collapse_censored") == 0
    assert value_of("exactly-on-the-edge", "collapse_time") == np.inf
    assert value_of("nan-after", "collapse_time") == 90
    assert value_of("nan-last", "collapse_censored") == 0
    assert value_of("nan-while-down", "collapse_time") == 70
    assert value_of("nan-before-and-after", "collapse_time") == 120
    assert value_of("constant", "collapse_time") == np.inf
    assert value_of("constant", "recovery_time") == -1
    assert value_of("constant-then-lower", "collapse_time") == 60
    assert value_of("rises", "recovery_time") == -1
    assert value_of("hold", "recovery_time") == 70 + HOLD - 60
    assert value_of("to-the-end", "recovery_time") == np.inf


def test_every_nan_has_a_reason(evaluated):
    names, series, onsets, result = evaluated
    for i, name in enumerate(names):
        values = {metric: result[metric][i] for metric in result}
        reasons = metrics.explain(series[i], onsets[i], settings=SETTINGS, values=values)
        assert set(reasons) == {k for k, v in values.items() if np.isnan(v)}, name
        assert not any("overflow" in text for text in reasons.values()), (name, reasons)


@pytest.mark.parametrize(
    ("name", "metric", "message"),
    [
        ("nan-just-before", "collapse_time", "at step 59"),
        ("onset-1", "pre_mean", "at least 2 steps"),
        ("onset-short-window", "spike_intensity", "only 19 of window = 20"),
        ("nan-after", "recovery_rate", "turned non-finite at step 90"),
        ("constant", "recovery_rate", "never fell below"),
        ("constant", "spike_intensity", "did not vary"),
        ("to-the-end", "recovery_rate", "fully collapsed"),
    ],
)
def test_reasons_name_the_cause(name, metric, message):
    curve, onset = EXPLICIT_CURVES[name]
    assert message in metrics.explain(curve.astype(np.float32), onset, settings=SETTINGS)[metric]


@pytest.mark.parametrize("onset", [-1, STEPS, STEPS + 5])
def test_onset_outside_the_run_is_nan(onset):
    values = EVALUATE(flat()[0], onset, settings=SETTINGS, latents=np.zeros((STEPS, 3)))
    for name in set(values) - {"collapse_censored", "pre_mean", "pre_std"}:
        assert np.isnan(values[name]), name
        assert "outside" in metrics.explain(flat()[0], onset, settings=SETTINGS, values=values)[name]


@pytest.mark.parametrize("broken_step", [None, 100])
def test_instability_index_equals_the_naive_reference(broken_step):
    rng = np.random.default_rng(3)
    curves = np.stack([offset + 0.02 * rng.normal(size=STEPS) for offset in (0, 1e4, -3e4)]).astype(np.float32)
    curves = np.concatenate([curves, curves.cumsum(1)])
    if broken_step is not None:
        curves[:, broken_step] = [np.nan, np.inf, -np.inf] * 2
    result = jax.jit(jax.vmap(lambda x: metrics.instability_index(x, window=WINDOW)))(curves)
    expected = [[naive_index([float(v) for v in row], t, WINDOW) for t in range(STEPS)] for row in curves]
    np.testing.assert_allclose(result, expected, rtol=1e-4)


def test_a_small_standard_deviation_survives_a_huge_offset():
    x = (1e4 + 1e-2 * np.random.default_rng(0).normal(size=STEPS)).astype(np.float32)
    _, std = jax.jit(metrics.pre_onset_level)(x, 100)
    assert float(std) == pytest.approx(x[50:100].astype(np.float64).std(), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_level_survives_extreme_scales(scale):
    x = (scale * np.random.default_rng(0).normal(size=STEPS)).astype(np.float32)
    mean, std = jax.jit(metrics.pre_onset_level)(x, 100)
    assert float(mean) == pytest.approx(x[50:100].astype(np.float64).mean(), rel=1e-4)
    assert float(std) == pytest.approx(x[50:100].astype(np.float64).std(), rel=1e-5)


def test_windows_longer_than_the_run_give_nan_not_an_error():
    values = EVALUATE(np.arange(10.0), 5)
    assert np.isnan(values["spike_intensity"])
    assert np.isinf(values["collapse_time"])
    assert np.isnan(jax.jit(metrics.instability_index)(np.arange(10.0))).all()
    assert np.isfinite(metrics.instability_index(np.arange(10.0), window=10)).tolist() == [False] * 9 + [True]
    endless = jax.make_jaxpr(lambda x: metrics.instability_index(x, window=10**9))(np.arange(10.0))
    assert "while" not in str(endless)


def test_defaults_are_those_of_table_s5():
    curve = np.concatenate([np.sin(np.arange(300.0)), -9 + np.zeros(99), np.sin(np.arange(200.0))])
    collapse_time = jax.jit(metrics.collapse_time)
    assert np.isinf(collapse_time(curve, 250))
    curve[399] = -9
    assert collapse_time(curve, 250) == 300
    assert metrics.MetricSettings() == metrics.MetricSettings(window=50, hold=100, horizon=500)
    for name, value in EVALUATE(curve, 250).items():
        expected = naive_metrics(curve.astype(np.float32), 250, 50, 100)[name]
        np.testing.assert_allclose(float(value), expected, rtol=1e-4, err_msg=name)


def test_divergence_probability():
    times = jnp.array([10.0, 49.0, 50.0, jnp.inf])
    assert metrics.divergence_probability(times, 100) == 0.5
    assert np.isnan(metrics.divergence_probability(times.at[0].set(jnp.nan), 100))
    assert np.isnan(metrics.divergence_probability(jnp.zeros(0), 100))


def naive_deviation(h, onset, horizon, control=None, matrix=None):
    largest = 0.0
    for t in range(onset, min(onset + horizon, len(h) - 1) + 1):
        displacement = h[t] - h[onset]
        if control is not None:
            displacement = displacement - (control[t] - control[onset])
        if matrix is not None:
            displacement = displacement @ matrix
        largest = max(largest, math.sqrt(sum(float(v) ** 2 for v in displacement)))
    return largest


@pytest.mark.parametrize("onset", [0, 17, STEPS - 30, STEPS - 1])
@pytest.mark.parametrize("options", [(), ("control",), ("matrix",), ("control", "matrix")])
def test_meta_state_deviation_equals_the_naive_reference(onset, options):
    rng = np.random.default_rng(onset)
    h, control = rng.normal(size=(2, STEPS, 4)).cumsum(1)
    arrays = {"control": control, "matrix": rng.normal(size=(4, 4))}
    expected = naive_deviation(h, onset, 60, **{k: arrays[k] for k in options})
    names = {"control": "control", "matrix": "whitening"}
    result = DEVIATION(h, onset, horizon=60, **{names[k]: arrays[k] for k in options})
    assert float(result) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_meta_state_deviation_is_nan_only_for_nan_within_its_horizon():
    h = np.zeros((STEPS, 3))
    h[100] = np.nan
    for onset, finite in ((20, True), (100, False), (101, True), (40, False)):
        assert np.isnan(DEVIATION(h, onset, horizon=60)) != finite
    values = EVALUATE(flat()[0], 60, settings=SETTINGS, latents=h)
    reasons = metrics.explain(flat()[0], 60, settings=SETTINGS, values=values)
    assert "latent" in reasons["meta_state_deviation"]


def test_nan_in_one_lane_does_not_change_other_lanes(evaluated):
    _, series, onsets, _ = evaluated
    clean = np.random.default_rng(0).normal(size=series.shape).astype(np.float32)
    broken = clean.copy()
    broken[1, 90:] = np.nan
    a, b = (LANES(curves, np.full(len(onsets), 60)) for curves in (clean, broken))
    for name in a:
        np.testing.assert_array_equal(np.delete(a[name], 1), np.delete(b[name], 1), err_msg=name)


def test_settings_warn_about_runs_that_are_too_short():
    settings = metrics.MetricSettings()
    assert settings.validate(1000, 300) == settings.validate(1000, 600) == []
    for steps, onset, message in [
        (100, 100, "outside"),
        (1000, 1, "at least 2"),
        (1000, 30, "spike_intensity is NaN"),
        (1000, 960, "spike_intensity is cut short"),
        (1000, 901, "every collapse is censored"),
        (1000, 500, "meta_state_deviation is cut short"),
    ]:
        assert any(message in warning for warning in settings.validate(steps, onset, latents=True)), message


@pytest.mark.parametrize("options", [{"window": 1}, {"hold": 0}, {"horizon": 0}, {"window": 2.5}, {"hold": True}])
def test_settings_refuse_invalid_values(options):
    with pytest.raises(ValueError, match="must be an integer of at least"):
        metrics.MetricSettings(**options)


def test_a_batch_of_lanes_without_vmap_is_refused():
    with pytest.raises(ValueError, match=r"use jax\.vmap"):
        metrics.collapse_time(np.zeros((2, STEPS)), 60)
    with pytest.raises(ValueError, match=r"use jax\.vmap"):
        metrics.meta_state_deviation(np.zeros(STEPS), 60)


def with_r_squared(*values):
    """Returns one seed's performance `[S, 30]` for each value of R squared, with rising and falling lines."""
    time, rng = np.arange(30) - 14.5, np.random.default_rng(0)
    rows = []
    for number, value in enumerate(values):
        residual = rng.normal(size=30)
        residual -= residual.mean()
        residual -= (residual @ time) / (time @ time) * time
        line = (-1) ** number * np.sqrt(value) * time / np.linalg.norm(time)
        rows.append(1000 + line + np.sqrt(1 - value) * residual / np.linalg.norm(residual))
        assert stats.linregress(time, rows[-1]).rvalue ** 2 == pytest.approx(value)
    return np.array(rows)


@pytest.mark.parametrize(
    ("performance", "trend"),
    [
        (with_r_squared(0.52), True),
        (with_r_squared(0.48), False),
        (with_r_squared(0.52, 0.52, 0.1), True),
        (with_r_squared(0.9, 0.48, 0.4), False),
        (np.full((3, 30), 7.0), False),
        (np.where(np.arange(30) == 3, np.nan, with_r_squared(0.9)), False),
    ],
)
def test_a_trend_is_a_line_that_explains_half_of_the_variance_of_most_seeds(performance, trend):
    assert has_trend(performance, 30) is trend


@pytest.mark.parametrize(("onset", "rising"), [(8, False), (20, True), (24, True), (30, False)])
def test_only_the_last_window_decides_whether_performance_rises(onset, rising):
    performance = np.minimum(np.arange(30), 20) + np.random.default_rng(0).normal(0, 0.1, (3, 30))
    assert has_trend(performance[:, :onset], 10) is rising


def test_each_onset_is_judged_by_the_steps_before_it():
    performance = np.minimum(np.arange(60), 20) + np.random.default_rng(0).normal(0, 0.1, (3, 60))
    lanes = np.repeat(performance[:, None], 4, axis=1)
    onsets = ("condition", [50, 20, 50, 25])
    data = xr.Dataset({"performance": (("seed", "condition", "step"), lanes)}, {"onset": onsets})
    assert onsets_in_trend(data, 10) == [20, 25]
