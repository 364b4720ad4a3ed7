"""The scripts of experiments/findings, on data whose correct result is known."""

import numpy as np
import pandas as pd
import pytest
from directories import EXPERIMENTS

from jaxaudit.runtime import registry

FOLDER = EXPERIMENTS / "findings"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """Makes the scripts importable by name, and undoes what they register."""
    monkeypatch.setattr(registry.perturbations, "_entries", dict(registry.perturbations._entries))
    for folder in (FOLDER.parent, FOLDER):
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def few_repetitions(monkeypatch):
    """Lowers the number of bootstrap repetitions."""
    import basics
    import dissociation

    for module in (basics, dissociation):
        monkeypatch.setattr(module, "REPETITIONS", 60)


def configurations(harm_of, count=12, seeds=6):
    """Rows of lanes: a configuration's final performance grows with its number, and `harm_of` gives the share lost."""
    rows = []
    for point in range(count):
        for seed in range(seeds):
            final = 10.0 + point
            rows.append(
                {
                    "learner": "one",
                    "point": point,
                    "disturbance": "noise",
                    "seed": seed,
                    "learning_rate": 1.0 + point % 3,
                    "first": 0.0,
                    "control": final,
                    "reached": final * (1 - harm_of(point, seed)),
                    "collapse_time": 5.0 if harm_of(point, seed) > 0.5 else np.inf,
                }
            )
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("sign", "expected"), [(1, 1.0), (-1, -1.0)])
def test_harm_that_follows_performance_has_rank_correlation_one(few_repetitions, sign, expected):
    import dissociation

    rows = configurations(lambda point, seed: 0.5 + sign * point / 30)
    table = dissociation.correlation_table(rows, "a").set_index("harm")
    lost = table.loc[dissociation.HARMS["lost"]]
    assert lost["rho"] == pytest.approx(expected)
    assert np.sign(lost["low"]) == np.sign(lost["high"]) == sign


def test_harm_apart_from_performance_has_an_interval_around_zero(few_repetitions):
    import dissociation

    generator = np.random.default_rng(1)
    harm = generator.uniform(0, 1, (40, 6))
    rows = configurations(lambda point, seed: harm[point, seed], count=40)
    lost = dissociation.correlation_table(rows, "a").set_index("harm").loc[dissociation.HARMS["lost"]]
    assert lost["low"] < 0 < lost["high"]


def test_nan_lanes_lose_everything_and_lanes_without_gain_are_left_out():
    import dissociation

    rows = configurations(lambda point, seed: 0.0)
    rows.loc[rows.point == 3, "reached"] = np.nan
    rows.loc[rows.point == 4, "first"] = rows.control
    table = dissociation.Outcomes.of(rows).configurations()
    assert table.lost[3] == 1.0
    assert 4 not in table.index
    assert (table.lost.drop(3) == 0).all()


def test_partial_rank_correlation_removes_a_common_cause():
    import dissociation

    generator = np.random.default_rng(0)
    cause = generator.normal(size=400)
    a, b = (cause + 0.3 * generator.normal(size=400) for _ in range(2))
    assert dissociation.rank_correlation(a, b) > 0.8
    assert abs(dissociation.rank_correlation(a, b, cause)) < 0.15


def test_likeness_compares_shapes_and_distance_compares_sizes():
    import manifold

    shape = np.sin(np.linspace(0, 3, 40))
    assert manifold.likeness([shape, 5 * shape, shape + 1]) == pytest.approx(1.0)
    assert manifold.likeness([shape, -shape]) == pytest.approx(-1.0)
    assert manifold.distance([shape, shape]) == 0.0
    assert manifold.distance([shape, 3 * shape]) == pytest.approx(0.5)
    assert manifold.distance([shape, -shape]) == pytest.approx(1.0)
    assert np.isnan(manifold.likeness([shape, np.zeros(40)]))


def test_falls_rises_and_unchanged_profiles_are_distinguished(few_repetitions):
    import manifold

    generator = np.random.default_rng(0)
    z = {name: generator.normal(0, 0.1, (12, 50)) for name in ("falls", "rises", "not told apart")}
    z["falls"][:, manifold.BEFORE :] -= 2
    z["rises"][:, manifold.BEFORE :] += 2
    seeds = [str(i) for i in range(12)]
    profiles = manifold.Profiles(z, dict.fromkeys(z, seeds), dict.fromkeys(z, 0))
    rows, consistent = manifold.condition_rows("a", profiles, "x_grad")
    assert [row["verdict"] for row in rows] == list(z)
    assert (consistent["falls"], consistent["rises"]) == (1, 1)


def test_a_lane_that_became_nan_keeps_its_last_value():
    import manifold

    series = np.array([[1.0, 2.0, np.nan, np.nan], [np.nan, 1.0, 2.0, np.inf]])
    assert np.array_equal(manifold.fill_forward(series), [[1, 2, 2, 2], [0, 1, 2, 2]])


def test_an_alarm_comes_before_at_or_after_the_collapse_or_never():
    import ordering

    rows = pd.DataFrame({"late_alarm": [10, 20, 30, -1], "collapse_time": [20.0] * 4})
    leads = ordering.lead(rows)
    assert list(leads) == [10, 0, -10, -np.inf]
    assert list(ordering.when(leads)) == ["before", "at", "after", "never"]
    assert ordering.weighted_median(leads, np.array([1, 1, 1, 0])) == 0
    assert ordering.weighted_median(leads, np.array([3, 1, 1, 0])) == 10


def test_alarms_of_other_lanes_count_between_onset_and_collapse():
    import ordering

    others = pd.DataFrame({"fold": [0, 0, 0, 0, 1]})
    collapsed = pd.DataFrame({"fold": [0], "onset": [5], "collapse_time": [10.0]})
    first = np.array([4, 5, 9, 10, 7])
    assert ordering.share_in_window(others, first, collapsed) == 0.5


def test_the_deviation_starts_from_the_latent_before_the_onset():
    import deviation

    from jaxaudit.analysis.metrics import meta_state_deviation

    generator = np.random.default_rng(0)
    latent, control = generator.normal(size=(2, 60, 4))
    matrix = generator.normal(size=(4, 4))
    control[:25] = latent[:25]
    distances = deviation.distances(latent, control, 25, matrix)
    raw = meta_state_deviation(latent, 24, horizon=60)
    corrected = meta_state_deviation(latent, 24, horizon=60, control=control, whitening=matrix)
    assert distances["raw"].max() == pytest.approx(float(raw), rel=1e-5)
    assert distances["corrected"].max() == pytest.approx(float(corrected), rel=1e-5)
    assert not distances["raw"][:25].any()


def test_a_collapse_at_the_onset_has_no_step_before_it():
    import deviation

    steps = np.arange(100.0)
    table = pd.DataFrame({"seed": [0, 1, 2], "onset": 50, "collapse_time": [50.0, 60.0, np.inf]})
    moved = deviation.Displacement(table, {"raw": np.tile(np.where(steps >= 50, steps, 0), (3, 1))})
    maxima = deviation.largest(moved, "raw")
    assert list(maxima["whole"]) == [99, 99, 99]
    assert np.array_equal(maxima["before collapse, or the end"], [np.nan, 59, 99], equal_nan=True)
    assert np.array_equal(maxima["before collapse, or same"], [np.nan, 59, 59], equal_nan=True)


def test_one_outlying_control_lane_does_not_set_the_spread():
    import manifold

    control = np.random.default_rng(0).normal(0, 2, (20, 200))
    control[3] += 1000
    assert manifold.spread(control, slice(0, 200)) == pytest.approx(2, rel=0.2)
    flat = np.where(np.arange(200) < 100, control[:1], 0.0)
    assert manifold.spread(flat, slice(120, 160)) == pytest.approx(flat.std())
    assert manifold.spread(np.ones((5, 200)), slice(0, 200)) == 1.0
