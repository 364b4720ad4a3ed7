"""Comparison of detectors: statistics against closed forms, and detection of disturbances of known kind and onset."""

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
MODEL_DETECTOR = MonitorDetector(LRU(size=4, hidden=(16,)), Training(iterations=120))


class Level:
    """Scores each step by the value of the first channel."""

    name, family = "level", "one channel"

    def fit(self, clean, channels):
        return lambda runs: runs[..., 0]


@pytest.fixture(scope="module")
def planted_lanes():
    """Lanes with a drift of all channels, a rise of one channel's noise, a fold, and a change of dynamics only."""
    return System().lanes(160, 40, drift=0.5, ramp=1.5, fold=0.05, tempo=0.1)


@pytest.fixture(scope="module")
def comparison(planted_lanes):
    return compare(planted_lanes, [MODEL_DETECTOR, *standard_baselines(planted_lanes.channels)], SETTINGS)


def test_splits_do_not_share_seeds(planted_lanes):
    tested = []
    for split in split_lanes(planted_lanes, SETTINGS):
        seeds = [set(planted_lanes.table.seed.iloc[part]) for part in (split.fit, split.calibrate, split.test)]
        assert not seeds[0] & seeds[1]
        assert not (seeds[0] | seeds[1]) & seeds[2]
        assert planted_lanes.table.clean.iloc[[*split.fit, *split.calibrate]].all()
        tested += list(split.test)
    assert sorted(tested) == list(range(len(planted_lanes.table)))


def test_too_few_clean_lanes_are_refused():
    few = System().lanes(20, 2, drift=1.0)
    with pytest.raises(ValueError, match=r"20 clean lanes are too few for 0\.05 false alarms per run in 2 folds: "):
        split_lanes(few, SETTINGS)


def test_an_alarm_is_the_first_score_above_the_threshold(planted_lanes):
    comparison = compare(planted_lanes, [Level()], SETTINGS).sort_values("lane")
    values = planted_lanes.values[..., 0]
    np.testing.assert_array_equal(comparison.score, values.max(axis=1))
    for lane, limit, alarm, late in zip(
        comparison.lane, comparison.threshold, comparison.alarm, comparison.late_alarm, strict=True
    ):
        above = np.flatnonzero(values[lane] > limit)
        assert alarm == (above[0] if len(above) else NEVER)
        above = above[above >= ONSET]
        assert late == (above[0] if len(above) else NEVER)


def table(clean, disturbed, leads=None, detector="x"):
    """A result of `compare` for one fold, with these scores, and this lead time of each disturbed lane."""
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
    summary = summarise(table(clean, disturbed), "x").iloc[0]
    assert summary.auroc == pytest.approx(stats.mannwhitneyu(disturbed, clean).statistic / (80 * 60))
    # The width of the interval follows the standard error of Hanley and McNeil.
    auroc = summary.auroc
    q1, q2 = auroc / (2 - auroc), 2 * auroc * auroc / (1 + auroc)
    error = np.sqrt((auroc * (1 - auroc) + 59 * (q1 - auroc * auroc) + 79 * (q2 - auroc * auroc)) / (80 * 60))
    assert (summary.auroc_high - summary.auroc_low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.2)
    assert summary.gain_auroc == summary.gain_auroc_low == summary.gain_auroc_high == 0


def test_scores_are_compared_only_within_a_fold():
    """Each fold has a separately fitted detector, so that scores of different folds have different units."""
    random = np.random.default_rng(2)
    folds = [random.normal(size=30).round(1), random.normal(1, 1, size=20).round(1)]
    first_fold, second_fold = table(*folds), table(*(100 - 50 * scores for scores in folds)).assign(fold=1)
    both = pd.concat([first_fold, second_fold.assign(seed=second_fold.seed + 50, lane=second_fold.lane + 50)])
    expected = [stats.mannwhitneyu(folds[1], folds[0]).statistic / (30 * 20)]
    expected.append(1 - expected[0])
    assert summarise(both, "x").auroc[0] == pytest.approx(np.mean(expected))
    shifted = pd.concat(
        [
            first_fold,
            second_fold.assign(seed=second_fold.seed + 50, lane=second_fold.lane + 50, score=100 + first_fold.score),
        ]
    )
    assert summarise(shifted, "x").auroc[0] == pytest.approx(expected[0])


def test_the_lead_time_is_a_median_with_missed_alarms_as_the_worst():
    lead = [10, 3, 7, -4, -np.inf]
    assert summarise(table(np.zeros(5), np.ones(5), lead), "x").lead_time[0] == 3
    lead = [10, -np.inf, 7, -np.inf, -np.inf]
    summary = summarise(table(np.zeros(5), np.ones(5), lead), "x")
    assert summary.lead_time[0] == -np.inf
    assert summary.gain_lead_time[0] == 0
    both = pd.concat([table(np.zeros(5), np.ones(5), [4] * 5), table(np.zeros(5), np.ones(5), [1] * 5, "y")])
    summary = summarise(both, "x").set_index("detector")
    assert summary.gain_lead_time["y"] == summary.gain_lead_time_low["y"] == 3


def test_gains_are_paired_differences():
    """Two detectors whose scores differ by a constant have no gain, although the interval of each is wide."""
    random = np.random.default_rng(1)
    clean, disturbed = random.normal(size=30), random.normal(0.5, 1, size=30)
    both = pd.concat([table(clean, disturbed), table(clean + 5, disturbed + 5, detector="y")])
    summary = summarise(both, "x").set_index("detector")
    assert summary.auroc_high["y"] - summary.auroc_low["y"] > 0.1
    assert summary.gain_auroc_low["y"] == summary.gain_auroc_high["y"] == 0


def comparison_of_hits(hits, copies=1):
    """A result with a clean lane of each seed, and disturbed ones, detected by `hits`, bool `[seeds, conditions]`."""
    hits = np.repeat(hits, copies, axis=1)
    seeds, conditions = hits.shape
    comparison = table(np.zeros(seeds), np.ones(hits.size), np.where(hits.ravel(), 0.0, -np.inf))
    comparison["seed"] = [*range(seeds), *np.repeat(np.arange(seeds), conditions)]
    return comparison.assign(condition=["control"] * seeds + [f"x {i // copies}" for i in range(conditions)] * seeds)


def detection_interval(summary):
    return summary.detected, summary.detected_low, summary.detected_high


def test_the_detected_share_has_an_interval_over_seeds():
    """The lanes of one seed are not independent trials, since seeds differ in how many of them are detected."""
    random = np.random.default_rng(0)
    inside = []
    for _ in range(100):
        hits = random.random((24, 10)) < random.beta(0.5, 0.5, (24, 1))
        _, low, high = detection_interval(summarise(comparison_of_hits(hits), "x").iloc[0])
        inside.append(low <= 0.5 <= high)
    assert 0.9 <= np.mean(inside) <= 0.99
    error = hits.mean(axis=1).std() / np.sqrt(24)
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_repeated_lanes_of_a_seed_do_not_narrow_the_interval(share):
    """Copies of lanes do not narrow intervals; if seeds are detected in all lanes or none, the interval is Wilson's."""
    hits = np.random.default_rng(1).random((12, 3)) < share
    for selected in (hits, hits[:, :1]):
        once, twice = (
            detection_interval(summarise(comparison_of_hits(selected, copies), "x").iloc[0]) for copies in (1, 2)
        )
        assert once == twice
    wilson = stats.binomtest(int(hits[:, 0].sum()), 12).proportion_ci(method="wilson")
    assert once[1:] == pytest.approx((wilson.low, wilson.high), abs=1e-12)
    for copies in (1, 2):
        summary = summarise_by_condition(comparison_of_hits(hits, copies), ["x"]).set_index("condition").loc["x 0"]
        assert detection_interval(summary)[1:] == pytest.approx((wilson.low, wilson.high), abs=1e-12)


def test_few_seeds_with_partial_detection_have_no_interval():
    hits = np.tile([True, False], (4, 1))
    value, low, high = detection_interval(summarise(comparison_of_hits(hits), "x").iloc[0])
    assert value == 0.5
    assert np.isnan([low, high]).all()


def interval(row):
    return f"{row.detected:.3f} [{row.detected_low:.3f}, {row.detected_high:.3f}]"


def summary_of_kind(comparison, kind):
    """Returns the summary of a condition by detector, and the families of the detectors."""
    summary = (
        summarise_by_condition(comparison, list(comparison.detector.unique()))
        .set_index(["condition", "detector"])
        .loc[kind]
    )
    return summary, comparison.groupby("detector").family.first()


@pytest.mark.exhaustive
def test_a_common_drift_is_detected_by_models_and_multichannel_charts(comparison):
    """At the same rate of false alarms, detectors of one channel miss most of these drifts."""
    summary, family = summary_of_kind(comparison, "drift")
    others, charts = (summary[family[summary.index] == kind] for kind in (ONE_CHANNEL, ALL_CHANNELS))
    assert len(others) == CHANNELS + 9
    model_row, best = summary.loc[MODEL_DETECTOR.name], charts.loc[charts.auroc.idxmax()]
    print(
        f"drift: monitor {interval(model_row)}; {best.name}: {interval(best)}; one channel {others.detected.max():.3f}"
    )
    for row in (model_row, best):
        assert row.detected_low > others.detected_high.max()
        assert row.auroc_low > others.auroc_high.max()
    assert best.auroc == pytest.approx(model_row.auroc, abs=0.03)
    model_row = comparison[comparison.detector == MODEL_DETECTOR.name]
    alarms = model_row.late_alarm[(model_row.condition == "drift") & (model_row.late_alarm != NEVER)]
    assert (alarms - ONSET).median() < 80


@pytest.mark.exhaustive
def test_a_change_of_dynamics_is_detected_only_by_the_model(comparison):
    """The distribution at each step is unchanged, so comparisons with clean runs at the same step cannot detect it."""
    summary, _ = summary_of_kind(comparison, "tempo")
    model_row, others = summary.loc[MODEL_DETECTOR.name], summary.drop(MODEL_DETECTOR.name)
    best = others.loc[others.detected.idxmax()]
    print(f"tempo: monitor {interval(model_row)}; best of {len(others)} baselines, {best.name}: {interval(best)}")
    assert model_row.auroc_low > others.auroc_high.max()
    assert model_row.detected_low > others.detected_high.max()


@pytest.mark.exhaustive
def test_the_model_detects_changes_of_a_single_channel(comparison):
    summary = summarise_by_condition(comparison, [MODEL_DETECTOR.name]).set_index("condition")
    print(*(f"{kind}: {interval(summary.loc[kind])}" for kind in ("ramp", "fold")))
    assert summary.detected_low["ramp"] > 0.8
    assert summary.detected_low["fold"] > 0.5


@pytest.mark.exhaustive
def test_every_detector_keeps_the_false_alarm_rate(comparison):
    """Checks the mean over detectors, and each detector within the sampling error of 160 runs."""
    clean = comparison[comparison.clean]
    shares = (clean.alarm != NEVER).groupby(clean.detector).mean()
    assert shares.mean() == pytest.approx(0.05, abs=0.02)
    assert (shares <= stats.binom.ppf(0.9999, 160, 0.05) / 160 + 0.03).all()


def test_an_interval_of_auroc_needs_five_lanes_on_either_side():
    random = np.random.default_rng(3)
    for clean, disturbed in ((4, 20), (20, 4)):
        summary = summarise(table(random.normal(size=clean), random.normal(size=disturbed)), "x").iloc[0]
        assert np.isfinite(summary.auroc)
        assert np.isnan([summary.auroc_low, summary.auroc_high]).all()


def test_a_chart_without_a_value_is_not_the_best_chart():
    figures = pd.DataFrame({"detector": ["a", "b"], "family": ALL_CHANNELS, "auroc": [np.nan, 0.4]})
    assert best_chart(figures, "mine").detector == "b"


def test_unfinished_runs_are_refused(monkeypatch, tmp_path):
    """An unfinished run is refused even if it has metrics of its finished lanes."""
    monkeypatch.setattr(labelled_lanes, "load", lambda folder: SimpleNamespace(finished=False, metrics=pd.DataFrame()))
    with pytest.raises(UserError, match="is not finished; go on with: jaxaudit resume"):
        labelled_lanes.load_lanes([tmp_path])
