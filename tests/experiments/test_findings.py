"""The findings' scripts, on numbers whose answer is known."""

import numpy as np
import pandas as pd
import pytest
from places import EXPERIMENTS

from jaxaudit.runtime import registry

FOLDER = EXPERIMENTS / "findings"


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """They are found by name, and what one registers is not known to other tests."""
    monkeypatch.setattr(registry.perturbations, "_entries", dict(registry.perturbations._entries))
    for folder in (FOLDER.parent, FOLDER):
        monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def few(monkeypatch):
    """Fewer repetitions of the bootstraps."""
    import basics
    import dissociation

    for module in (basics, dissociation):
        monkeypatch.setattr(module, "REPETITIONS", 60)


def configurations(harm_of, count=12, seeds=6):
    """Rows of lanes whose final performance is the configuration's number, and whose loss is `harm_of` it."""
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
def test_harm_that_follows_performance_has_rank_correlation_one(few, sign, expected):
    import dissociation

    rows = configurations(lambda point, seed: 0.5 + sign * point / 30)
    told = dissociation.tell(rows, "a").set_index("harm")
    lost = told.loc[dissociation.HARMS["lost"]]
    assert lost["rho"] == pytest.approx(expected)
    assert np.sign(lost["low"]) == np.sign(lost["high"]) == sign


def test_harm_apart_from_performance_has_an_interval_around_zero(few):
    import dissociation

    generator = np.random.default_rng(1)
    harm = generator.uniform(0, 1, (40, 6))
    rows = configurations(lambda point, seed: harm[point, seed], count=40)
    lost = dissociation.tell(rows, "a").set_index("harm").loc[dissociation.HARMS["lost"]]
    assert lost["low"] < 0 < lost["high"]


def test_a_lane_that_became_nan_has_lost_all_and_what_gains_nothing_is_left_out():
    import dissociation

    rows = configurations(lambda point, seed: 0.0)
    rows.loc[rows.point == 3, "reached"] = np.nan
    rows.loc[rows.point == 4, "first"] = rows.control
    table = dissociation.Outcomes.of(rows).configurations()
    assert table.lost[3] == 1.0
    assert 4 not in table.index
    assert (table.lost.drop(3) == 0).all()


def test_partial_rank_correlation_takes_away_what_the_third_explains():
    import dissociation

    generator = np.random.default_rng(0)
    cause = generator.normal(size=400)
    a, b = (cause + 0.3 * generator.normal(size=400) for _ in range(2))
    assert dissociation.rank_correlation(a, b) > 0.8
    assert abs(dissociation.rank_correlation(a, b, cause)) < 0.15


def test_profiles_of_one_shape_are_alike_and_their_size_is_a_distance():
    import manifold

    shape = np.sin(np.linspace(0, 3, 40))
    assert manifold.likeness([shape, 5 * shape, shape + 1]) == pytest.approx(1.0)
    assert manifold.likeness([shape, -shape]) == pytest.approx(-1.0)
    assert manifold.distance([shape, shape]) == 0.0
    assert manifold.distance([shape, 3 * shape]) == pytest.approx(0.5)
    assert manifold.distance([shape, -shape]) == pytest.approx(1.0)
    assert np.isnan(manifold.likeness([shape, np.zeros(40)]))


def test_a_fall_is_told_from_a_rise_and_from_nothing(few):
    import manifold

    generator = np.random.default_rng(0)
    z = {name: generator.normal(0, 0.1, (12, 50)) for name in ("falls", "rises", "not told apart")}
    z["falls"][:, manifold.BEFORE :] -= 2
    z["rises"][:, manifold.BEFORE :] += 2
    seeds = [str(i) for i in range(12)]
    found = manifold.Profiles(z, dict.fromkeys(z, seeds), dict.fromkeys(z, 0))
    rows, alike = manifold.tell("a", found, "x_grad")
    assert [row["verdict"] for row in rows] == list(z)
    assert (alike["falls"], alike["rises"]) == (1, 1)


def test_a_lane_that_became_nan_keeps_its_last_value():
    import manifold

    series = np.array([[1.0, 2.0, np.nan, np.nan], [np.nan, 1.0, 2.0, np.inf]])
    assert np.array_equal(manifold.held(series), [[1, 2, 2, 2], [0, 1, 2, 2]])


def test_an_alarm_is_before_at_or_after_the_collapse_or_never_given():
    import ordering

    rows = pd.DataFrame({"late_alarm": [10, 20, 30, -1], "collapse_time": [20.0] * 4})
    leads = ordering.lead(rows)
    assert list(leads) == [10, 0, -10, -np.inf]
    assert list(ordering.when(leads)) == ["before", "at", "after", "never"]
    assert ordering.middle(leads, np.array([1, 1, 1, 0])) == 0
    assert ordering.middle(leads, np.array([3, 1, 1, 0])) == 10


def test_others_alarms_count_between_a_collapsed_lanes_onset_and_collapse():
    import ordering

    others = pd.DataFrame({"fold": [0, 0, 0, 0, 1]})
    collapsed = pd.DataFrame({"fold": [0], "onset": [5], "collapse_time": [10.0]})
    first = np.array([4, 5, 9, 10, 7])
    assert ordering.elsewhere(others, first, collapsed) == 0.5


def test_the_deviation_is_table_s5s_from_the_latent_that_the_window_opens_on():
    import deviation

    from jaxaudit.analysis.metrics import meta_state_deviation

    generator = np.random.default_rng(0)
    latent, control = generator.normal(size=(2, 60, 4))
    matrix = generator.normal(size=(4, 4))
    control[:25] = latent[:25]
    found = deviation.distances(latent, control, 25, matrix)
    raw = meta_state_deviation(latent, 24, horizon=60)
    corrected = meta_state_deviation(latent, 24, horizon=60, control=control, whitening=matrix)
    assert found["raw"].max() == pytest.approx(float(raw), rel=1e-5)
    assert found["corrected"].max() == pytest.approx(float(corrected), rel=1e-5)
    assert not found["raw"][:25].any()


def test_a_collapse_at_the_onset_has_no_step_before_it():
    import deviation

    steps = np.arange(100.0)
    table = pd.DataFrame({"seed": [0, 1, 2], "onset": 50, "collapse_time": [50.0, 60.0, np.inf]})
    found = deviation.Moved(table, {"raw": np.tile(np.where(steps >= 50, steps, 0), (3, 1))})
    over = deviation.largest(found, "raw")
    assert list(over["whole"]) == [99, 99, 99]
    assert np.array_equal(over["before collapse, or the end"], [np.nan, 59, 99], equal_nan=True)
    assert np.array_equal(over["before collapse, or same"], [np.nan, 59, 59], equal_nan=True)


def test_a_control_lane_that_goes_astray_does_not_set_the_unit():
    import manifold

    control = np.random.default_rng(0).normal(0, 2, (20, 200))
    control[3] += 1000
    assert manifold.spread(control, slice(0, 200)) == pytest.approx(2, rel=0.2)
    flat = np.where(np.arange(200) < 100, control[:1], 0.0)
    assert manifold.spread(flat, slice(120, 160)) == pytest.approx(flat.std())
    assert manifold.spread(np.ones((5, 200)), slice(0, 200)) == 1.0
