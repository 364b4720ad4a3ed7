"""Detectors compared: the figures against closed forms, and disturbances of known kind and onset."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from planted import CHANNELS, ONSET, System
from scipy import stats

from jaxaudit.monitoring import labelled_lanes
from jaxaudit.monitoring.baselines import standard_baselines
from jaxaudit.monitoring.comparison import (
    NEVER,
    DetectionSettings,
    best_chart,
    compare,
    split_lanes,
    summarise,
    summarise_by_condition,
)
from jaxaudit.monitoring.detector import ALL_CHANNELS, ONE_CHANNEL, MonitorDetector
from jaxaudit.monitoring.meta_state import Training
from jaxaudit.monitoring.state_space import LRU
from jaxaudit.runtime.errors import UserError

SETTINGS = DetectionSettings(folds=2, fitted=0.5)
MINE = MonitorDetector(LRU(size=4, hidden=(16,)), Training(iterations=120))


class Level:
    """Scores of the first channel's value itself."""

    name, family = "level", "one channel"

    def fit(self, clean, channels):
        return lambda runs: runs[..., 0]


@pytest.fixture(scope="module")
def planted():
    """A drift that all channels share, a ramp of one channel's noise, a fold, and a change in time alone."""
    return System().lanes(160, 40, drift=0.5, ramp=1.5, fold=0.05, tempo=0.1)


@pytest.fixture(scope="module")
def said(planted):
    return compare(planted, [MINE, *standard_baselines(planted.channels)], SETTINGS)


def test_no_seed_is_on_both_sides(planted):
    tested = []
    for split in split_lanes(planted, SETTINGS):
        seeds = [set(planted.table.seed.iloc[part]) for part in (split.fit, split.calibrate, split.test)]
        assert not seeds[0] & seeds[1]
        assert not (seeds[0] | seeds[1]) & seeds[2]
        assert planted.table.clean.iloc[[*split.fit, *split.calibrate]].all()
        tested += list(split.test)
    assert sorted(tested) == list(range(len(planted.table)))


def test_too_few_clean_lanes_are_refused():
    few = System().lanes(20, 2, drift=1.0)
    with pytest.raises(ValueError, match=r"20 clean lanes are too few for 0\.05 false alarms per run in 2 folds: "):
        split_lanes(few, SETTINGS)


def test_alarms_are_the_first_scores_above_the_threshold(planted):
    said = compare(planted, [Level()], SETTINGS).sort_values("lane")
    values = planted.values[..., 0]
    np.testing.assert_array_equal(said.score, values.max(axis=1))
    for lane, limit, alarm, late in zip(said.lane, said.threshold, said.alarm, said.late_alarm, strict=True):
        above = np.flatnonzero(values[lane] > limit)
        assert alarm == (above[0] if len(above) else NEVER)
        above = above[above >= ONSET]
        assert late == (above[0] if len(above) else NEVER)


def table(clean, disturbed, leads=None, detector="x"):
    """What `compare` gives, of one fold: scores, and each disturbed lane's lead time."""
    lead = np.zeros(len(disturbed)) if leads is None else np.asarray(leads, float)
    alarm = np.where(np.isfinite(lead), 50, NEVER)
    return pd.DataFrame(
        {
            "detector": detector,
            "seed": np.arange(len(clean) + len(disturbed)),
            "lane": np.arange(len(clean) + len(disturbed)),
            "clean": [True] * len(clean) + [False] * len(disturbed),
            "score": [*clean, *disturbed],
            "fold": 0,
            "alarm": [NEVER] * len(clean) + list(alarm),
            "late_alarm": [NEVER] * len(clean) + list(alarm),
            "collapse_time": [np.inf] * len(clean) + [50 + x if np.isfinite(x) else 90 for x in lead],
        }
    )


def test_auroc_is_the_rank_statistic():
    random = np.random.default_rng(0)
    clean, disturbed = random.normal(size=80).round(1), random.normal(0.7, 1, size=60).round(1)
    disturbed[:3] = np.inf
    found = summarise(table(clean, disturbed), "x").iloc[0]
    assert found.auroc == pytest.approx(stats.mannwhitneyu(disturbed, clean).statistic / (80 * 60))
    # Hanley and McNeil's standard error, for the interval's width
    a = found.auroc
    q1, q2 = a / (2 - a), 2 * a * a / (1 + a)
    error = np.sqrt((a * (1 - a) + 59 * (q1 - a * a) + 79 * (q2 - a * a)) / (80 * 60))
    assert (found.auroc_high - found.auroc_low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.2)
    assert found.gain_auroc == found.gain_auroc_low == found.gain_auroc_high == 0


def test_scores_are_compared_within_a_fold_alone():
    """Every fold has a detector of its own, in whose units its scores are."""
    random = np.random.default_rng(2)
    folds = [random.normal(size=30).round(1), random.normal(1, 1, size=20).round(1)]
    low, high = table(*folds), table(*(100 - 50 * scores for scores in folds)).assign(fold=1)
    both = pd.concat([low, high.assign(seed=high.seed + 50, lane=high.lane + 50)])
    each = [stats.mannwhitneyu(folds[1], folds[0]).statistic / (30 * 20)]
    each.append(1 - each[0])
    assert summarise(both, "x").auroc[0] == pytest.approx(np.mean(each))
    one_sided = pd.concat([low, high.assign(seed=high.seed + 50, lane=high.lane + 50, score=100 + low.score)])
    assert summarise(one_sided, "x").auroc[0] == pytest.approx(each[0])


def test_lead_time_is_the_median_and_no_alarm_the_worst():
    lead = [10, 3, 7, -4, -np.inf]
    assert summarise(table(np.zeros(5), np.ones(5), lead), "x").lead_time[0] == 3
    lead = [10, -np.inf, 7, -np.inf, -np.inf]
    found = summarise(table(np.zeros(5), np.ones(5), lead), "x")
    assert found.lead_time[0] == -np.inf
    assert found.gain_lead_time[0] == 0
    both = pd.concat([table(np.zeros(5), np.ones(5), [4] * 5), table(np.zeros(5), np.ones(5), [1] * 5, "y")])
    found = summarise(both, "x").set_index("detector")
    assert found.gain_lead_time["y"] == found.gain_lead_time_low["y"] == 3


def test_the_gain_is_paired():
    """Two detectors that agree but for a shift differ by nothing, however wide each one's interval."""
    random = np.random.default_rng(1)
    clean, disturbed = random.normal(size=30), random.normal(0.5, 1, size=30)
    both = pd.concat([table(clean, disturbed), table(clean + 5, disturbed + 5, detector="y")])
    found = summarise(both, "x").set_index("detector")
    assert found.auroc_high["y"] - found.auroc_low["y"] > 0.1
    assert found.gain_auroc_low["y"] == found.gain_auroc_high["y"] == 0


def of_seeds(hits, copies=1):
    """A clean lane of every seed, and its disturbed ones, bool `[seeds, conditions]`, each so often."""
    hits = np.repeat(hits, copies, axis=1)
    seeds, conditions = hits.shape
    said = table(np.zeros(seeds), np.ones(hits.size), np.where(hits.ravel(), 0.0, -np.inf))
    said["seed"] = [*range(seeds), *np.repeat(np.arange(seeds), conditions)]
    return said.assign(condition=["control"] * seeds + [f"x {i // copies}" for i in range(conditions)] * seeds)


def detected(found):
    return found.detected, found.detected_low, found.detected_high


def test_the_share_over_conditions_has_an_interval_over_seeds():
    """Seeds differ in how much of them is detected: their lanes are not so many trials."""
    random = np.random.default_rng(0)
    inside = []
    for _ in range(100):
        hits = random.random((24, 10)) < random.beta(0.5, 0.5, (24, 1))
        _, low, high = detected(summarise(of_seeds(hits), "x").iloc[0])
        inside.append(low <= 0.5 <= high)
    assert 0.9 <= np.mean(inside) <= 0.99
    error = hits.mean(axis=1).std() / np.sqrt(24)
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_what_is_said_twice_of_a_seed_tells_nothing_more(share):
    """Of all lanes and of a condition's; of seeds that are detected wholly or not at all the interval is Wilson's."""
    hits = np.random.default_rng(1).random((12, 3)) < share
    for whole in (hits, hits[:, :1]):
        once, twice = (detected(summarise(of_seeds(whole, copies), "x").iloc[0]) for copies in (1, 2))
        assert once == twice
    wilson = stats.binomtest(int(hits[:, 0].sum()), 12).proportion_ci(method="wilson")
    assert once[1:] == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    for copies in (1, 2):
        found = summarise_by_condition(of_seeds(hits, copies), ["x"]).set_index("condition").loc["x 0"]
        assert detected(found)[1:] == pytest.approx((wilson.low, wilson.high), abs=1e-12)


def test_a_share_of_few_seeds_has_no_interval_where_they_disagree_within():
    hits = np.tile([True, False], (4, 1))
    value, low, high = detected(summarise(of_seeds(hits), "x").iloc[0])
    assert value == 0.5
    assert np.isnan([low, high]).all()


def interval(row):
    return f"{row.detected:.3f} [{row.detected_low:.3f}, {row.detected_high:.3f}]"


def of_kind(said, kind):
    """The figures of a condition by detector, and the detectors' families."""
    found = summarise_by_condition(said, list(said.detector.unique())).set_index(["condition", "detector"]).loc[kind]
    return found, said.groupby("detector").family.first()


@pytest.mark.exhaustive
def test_a_drift_of_all_channels_together_is_seen_by_the_monitor_and_by_charts_of_all_channels(said):
    """At the same false alarms, every detector of one channel misses most of what they find."""
    found, family = of_kind(said, "drift")
    others, charts = (found[family[found.index] == kind] for kind in (ONE_CHANNEL, ALL_CHANNELS))
    assert len(others) == CHANNELS + 9
    mine, best = found.loc[MINE.name], charts.loc[charts.auroc.idxmax()]
    print(f"drift: monitor {interval(mine)}; {best.name}: {interval(best)}; one channel {others.detected.max():.3f}")
    for one in (mine, best):
        assert one.detected_low > others.detected_high.max()
        assert one.auroc_low > others.auroc_high.max()
    assert best.auroc == pytest.approx(mine.auroc, abs=0.03)
    mine = said[said.detector == MINE.name]
    alarms = mine.late_alarm[(mine.condition == "drift") & (mine.late_alarm != NEVER)]
    assert (alarms - ONSET).median() < 80


@pytest.mark.exhaustive
def test_a_change_in_time_alone_is_seen_by_the_model_alone(said):
    """Every step's distribution stays what it was, so that no comparison with clean runs at that step can tell."""
    found, _ = of_kind(said, "tempo")
    mine, others = found.loc[MINE.name], found.drop(MINE.name)
    best = others.loc[others.detected.idxmax()]
    print(f"tempo: monitor {interval(mine)}; best of {len(others)} baselines, {best.name}: {interval(best)}")
    assert mine.auroc_low > others.auroc_high.max()
    assert mine.detected_low > others.detected_high.max()


@pytest.mark.exhaustive
def test_what_one_channel_shows_the_monitor_sees_too(said):
    found = summarise_by_condition(said, [MINE.name]).set_index("condition")
    print(*(f"{kind}: {interval(found.loc[kind])}" for kind in ("ramp", "fold")))
    assert found.detected_low["ramp"] > 0.8
    assert found.detected_low["fold"] > 0.5


@pytest.mark.exhaustive
def test_false_alarms_are_as_many_as_stated_for_every_detector(said):
    """The mean over detectors, and each within what 160 runs allow."""
    clean = said[said.clean]
    shares = (clean.alarm != NEVER).groupby(clean.detector).mean()
    assert shares.mean() == pytest.approx(0.05, abs=0.02)
    assert (shares <= stats.binom.ppf(0.9999, 160, 0.05) / 160 + 0.03).all()


def test_an_interval_takes_five_seeds_on_either_side():
    random = np.random.default_rng(3)
    for clean, disturbed in ((4, 20), (20, 4)):
        found = summarise(table(random.normal(size=clean), random.normal(size=disturbed)), "x").iloc[0]
        assert np.isfinite(found.auroc)
        assert np.isnan([found.auroc_low, found.auroc_high]).all()


def test_a_chart_without_a_figure_is_not_the_best():
    figures = pd.DataFrame({"detector": ["a", "b"], "family": ALL_CHANNELS, "auroc": [np.nan, 0.4]})
    assert best_chart(figures, "mine").detector == "b"


def test_a_run_that_is_not_finished_is_refused(monkeypatch, tmp_path):
    """Though it has metrics of the lanes that are."""
    monkeypatch.setattr(labelled_lanes, "load", lambda folder: SimpleNamespace(finished=False, metrics=pd.DataFrame()))
    with pytest.raises(UserError, match="is not finished; go on with: jaxaudit resume"):
        labelled_lanes.load_lanes([tmp_path])
