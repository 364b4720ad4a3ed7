"""Collapses compared with the undisturbed control of the same seed: counts, intervals, and sentences of the report."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from parameters import partly_exhaustive
from synthetic_runs import condition_table, dataset, write_run

import jaxaudit as ja
from jaxaudit.analysis import results, statistics
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.run_reader import Run, load
from jaxaudit.analysis.statistics.paired import excess, excess_columns, paired_proportions
from jaxaudit.monitoring.labelled_lanes import load_lanes
from jaxaudit.report import line_panels, outcomes
from jaxaudit.report.outcomes import collapsed_controls
from jaxaudit.report.verdict import verdict

pytestmark = pytest.mark.exhaustive

STEPS, ONSET = 200, 60
KINDS = {"lr_spike": ("optimization", (3.0, 10.0), 14.0), "weight_noise": ("parametric", (0.1, 1.0, 2.0), 1.0)}


@functools.cache
def steady_lanes(seeds, kinds):
    """Telemetry of lanes that do not collapse, and their metrics."""
    conditions = condition_table(dict(kinds), onsets=(ONSET,), duration=1)
    performance = np.random.default_rng(0).uniform(399, 401, (seeds, len(conditions), STEPS)).astype(np.float32)
    data = dataset(conditions, performance, ())
    return data, results.lane_metrics(data, MetricSettings())


def run_of(times, kinds=KINDS):
    """A run whose lanes collapse at these times `[seeds, conditions]`; the first condition is the control."""
    data, lanes = steady_lanes(len(times), tuple(kinds.items()))
    lanes = lanes.assign(collapse_time=(("seed", "condition"), times.astype(np.float32)))
    return Run(None, {}, "", {}, data, results.lane_table(lanes), results.summary_table(lanes, STEPS))


def times_of(rng, seeds, conditions, control_share, missing_share=0.0):
    """Random collapse times, of which some may be NaN; a share of the controls collapses."""
    share = np.array([control_share, *rng.uniform(0, 1, conditions - 1)])
    times = np.where(
        rng.uniform(size=(seeds, conditions)) < share, rng.integers(ONSET, STEPS, (seeds, conditions)), np.inf
    )
    return np.where(rng.uniform(size=times.shape) < missing_share, np.nan, times)


def report_texts(run):
    run_verdict = verdict(run, line_panels.panels(run))
    return [re.sub(r"<.*?>", "", str(text)) for text in (run_verdict.lead, *run_verdict.sentences)]


def count_pairs(lanes, control):
    """Counts seeds lost and spared (the discordant pairs b and c), with a surviving control, and missing."""
    lost = spared = standing = missing = 0
    for time, control_time in zip(lanes, control, strict=True):
        if np.isnan(time) or np.isnan(control_time):
            missing += 1
            continue
        standing += control_time == np.inf
        lost += time < np.inf and control_time == np.inf
        spared += time == np.inf and control_time < np.inf
    return lost, spared, standing, missing


# The interval


@pytest.mark.parametrize(
    ("table", "low", "high"),
    [
        ((36, 12, 2, 0), 0.0569, 0.3404),
        ((14, 5, 0, 22), 0.0115, 0.2265),
        ((59, 6, 16, 80), -0.1186, -0.0046),
        ((1, 1, 7, 12), -0.5069, -0.0256),
    ],
    ids=["Newcombe 1998", "Altman et al. 2000, table 6.2", "Cavo et al. 2012", "Bentur et al. 2009"],
)
def test_newcombes_interval_equals_published_examples(table, low, high):
    """The first example is Newcombe's, the others are from books by Altman and by Fagerland, Lydersen and Laake."""
    both, first, second, neither = table
    interval = paired_proportions(both, first, second, neither)
    assert interval.value == (first - second) / sum(table)
    assert interval[1:3] == pytest.approx((low, high), abs=6e-5)
    swapped = paired_proportions(both, second, first, neither)
    assert swapped[:3] == pytest.approx((-interval.value, -interval.high, -interval.low))


@pytest.mark.parametrize("table", [(5, 0, 0, 5), (0, 8, 0, 0), (0, 0, 0, 7), (3, 2, 2, 1), (0, 5, 5, 0)])
def test_the_interval_contains_the_difference_within_its_bounds(table):
    interval = paired_proportions(*table)
    assert -1 <= interval.low <= interval.value <= interval.high <= 1
    assert interval.low < interval.high


def test_the_interval_covers_the_difference_of_correlated_events():
    """For 30 positively correlated pairs, Newcombe's tables have coverages of 0.93 to 0.98 at a level of 95%."""
    rng = np.random.default_rng(0)
    probabilities = np.array([0.3, 0.2, 0.05, 0.45])
    tables = rng.multinomial(30, probabilities, 2000)
    intervals = [paired_proportions(*map(int, table)) for table in tables]
    covered = np.mean([interval.low <= 0.15 <= interval.high for interval in intervals])
    assert 0.93 <= covered <= 0.98


def test_invalid_counts_are_refused():
    for table in ((0, 0, 0, 0), (-1, 2, 3, 4)):
        with pytest.raises(ValueError, match="must not be negative, nor all be zero"):
            paired_proportions(*table)
    with pytest.raises(ValueError, match=r"must have the same shape \[seeds\]"):
        excess([0, 1], [0])
    with pytest.raises(ValueError, match="events must be 0, 1 or NaN"):
        excess([0, 2], [0, 1])


def test_seeds_that_are_nan_on_either_side_are_missing():
    lanes, control = np.array([1, 0, np.nan, 1, 0]), np.array([0, 1, 0, np.nan, 0])
    strict, count_pairs = excess(lanes, control), excess(lanes, control, missing="count")
    assert strict[1:] == count_pairs[1:] == (1, 1, 2)
    assert np.isnan(strict.difference.value)
    assert "2 of the 5 seeds" in strict.difference.reason
    assert (count_pairs.difference.value, count_pairs.difference.n, count_pairs.difference.n_missing) == (0, 3, 2)
    assert "no seed" in excess([np.nan], [0]).difference.reason


# Counts and sentences


@pytest.mark.parametrize("number", partly_exhaustive(20, total=200))
def test_the_verdict_agrees_with_counts_of_pairs(number):
    rng = np.random.default_rng(number)
    seeds, conditions = int(rng.integers(2, 12)), 6
    missing_share = 0.05 if number % 3 == 0 else 0.0
    times = times_of(rng, seeds, conditions, rng.choice([0.2, 0.5, 0.8]), missing_share)
    run = run_of(times)
    counts = [count_pairs(times[:, c], times[:, 0]) for c in range(conditions)]
    early = [count_pairs(*np.where(pair >= STEPS / 2, np.inf, pair)) for pair in _pairs(times)]
    for c, (lost, spared, standing, missing) in enumerate(counts):
        row = run.summary.iloc[c]
        assert tuple(row[[f"excess_collapse_{name}" for name in ("lost", "spared", "standing")]]) == counts[c][:3]
        assert tuple(row[[f"excess_divergence_{name}" for name in ("lost", "spared", "standing")]]) == early[c][:3]
        value = np.nan if missing else (lost - spared) / seeds
        assert row["excess_collapse_probability"] == pytest.approx(value, nan_ok=True)
        if c and not missing and lost + standing:
            low, high = row["excess_collapse_probability_low"], row["excess_collapse_probability_high"]
            assert low <= value <= high
    text = report_texts(run)
    for panel in line_panels.panels(run):
        rows = [counts[line.index] for line in panel.disturbed]
        shares = [lost / standing for lost, _, standing, missing in rows if standing and not missing]
        joined = " ".join(joined for joined in text[1:] if panel.title in joined)
        assert ("collapses the learner" in joined) == any(share >= 0.5 for share in shares)
        some_collapse = any(shares) and max(shares) < 0.5
        assert ("collapses some seeds but fewer than half" in joined) == some_collapse
    controls = times[:, 0]
    collapsed = int(np.isfinite(controls).sum())
    lead = (
        f"{collapsed} of {int((~np.isnan(controls)).sum())} seeds collapse{'s' if collapsed == 1 else ''} undisturbed"
    )
    assert text[0].startswith(lead) == bool(collapsed)


def _pairs(times):
    return [np.stack([times[:, c], times[:, 0]]) for c in range(times.shape[1])]


@pytest.mark.parametrize("number", partly_exhaustive(10, total=40))
def test_without_collapsed_controls_pairs_change_nothing(number):
    """Numbers and sentences are the same for a summary with and without the columns of pairs."""
    rng = np.random.default_rng(number)
    run = run_of(times_of(rng, int(rng.integers(2, 10)), 6, 0.0))
    summary = run.summary
    for kind in ("divergence", "collapse"):
        assert np.array_equal(summary[f"excess_{kind}_probability"], summary[f"{kind}_probability"])
        assert (summary[f"excess_{kind}_spared"] == 0).all()
    plain = Run(None, {}, "", {}, run.telemetry, run.metrics, summary[[c for c in summary if "excess" not in c]])
    assert report_texts(run) == report_texts(plain)
    assert not any(
        "undisturbed" in text or "control survives" in text or "survive when disturbed" in text
        for text in report_texts(run)
    )
    for panel in line_panels.panels(run):
        kind = "collapse_probability"
        all_seeds, standing = (
            outcomes.critical_magnitude(run, panel, kind, surviving_controls=flag) for flag in (False, True)
        )
        assert str(all_seeds) == str(standing)


def test_the_verdict_counts_lost_and_spared_seeds():
    control = np.array([70.0] * 5 + [np.inf] * 5)
    times = np.stack([control, control[::-1]], 1)
    lead, sentence, *_ = report_texts(run_of(times, {"weight_noise": ("parametric", (0.1,), 1.0)}))
    assert lead.startswith("5 of 10 seeds collapse undisturbed at step 70; weight_noise collapses at least half of the")
    assert (
        "5 of the 5 seeds whose control survives; 5 of the other 5 survive when disturbed; excess over the control +0"
        in sentence
    )


@pytest.mark.parametrize(
    ("magnitudes", "expected"),
    [
        ((0.1,), "the magnitude tried adds no collapse."),
        ((0.1, 1.0), "neither magnitude adds a collapse."),
        ((0.1, 1.0, 2.0), "no magnitude adds a collapse."),
    ],
)
def test_a_harmless_perturbation_is_not_blamed(magnitudes, expected):
    control = np.array([70.0, 75.0, np.inf, np.inf])
    run = run_of(np.stack([control] * (1 + len(magnitudes)), 1), {"weight_noise": ("parametric", magnitudes, 1.0)})
    lead, *sentences = report_texts(run)
    assert lead.startswith(f"2 of 4 seeds collapse undisturbed between steps 70 and 75; {expected}")
    assert any("collapse" in text and "no seed whose control survives" in text for text in sentences)
    assert not any("critical magnitude" in text for text in sentences)


def test_the_lead_counts_perturbations_and_spared_seeds():
    control = np.array([70.0, np.inf, np.inf, np.inf])
    lead = report_texts(run_of(np.stack([control] * 6, 1)))[0]
    assert lead.startswith("1 of 4 seeds collapses undisturbed at step 70; neither perturbation adds a collapse.")
    times = np.stack([control] * 6, 1)
    times[0, 1:] = np.inf
    lead = report_texts(run_of(times))[0]
    assert "neither perturbation adds a collapse, and up to 1 of them survive when disturbed." in lead


def test_the_lead_names_the_first_onset_of_equal_counts():
    """A control whose J is not finite from step 70 on has already collapsed at the later onset."""
    conditions = condition_table({"weight_noise": ("parametric", (0.1, 1.0), 1.0)}, onsets=(60, 120), duration=1)
    performance = np.random.default_rng(0).uniform(399, 401, (4, len(conditions), STEPS)).astype(np.float32)
    performance[:2, :, 70:] = np.nan
    data = dataset(conditions, performance, ())
    lanes = results.lane_metrics(data, MetricSettings(window=20, hold=20))
    run = Run(None, {}, "", {}, data, results.lane_table(lanes), results.summary_table(lanes, STEPS))
    assert report_texts(run)[0] == "2 of 4 seeds collapse undisturbed at step 70; neither magnitude adds a collapse."
    panels_of_later_onset = [panel for panel in line_panels.panels(run) if panel.onset == 120]
    assert (
        str(collapsed_controls(run, panels_of_later_onset).sentence) == "2 of 4 seeds collapse undisturbed by step 120"
    )


def test_unknown_collapses_are_not_reported_as_none():
    control = np.array([70.0, np.inf, np.inf, np.inf])
    times = np.stack([control] * 6, 1)
    times[1, 2] = np.nan
    assert "neither perturbation adds a collapse, as far as is known." in report_texts(run_of(times))[0]
    lead = report_texts(run_of(times[:1]))[0]
    assert lead.startswith("The one seed collapses undisturbed at step 70; no seed is left")


def test_if_all_controls_collapse_no_claim_is_made():
    times = np.full((6, 6), 70.0)
    lead, *sentences = report_texts(run_of(times))
    assert lead.startswith(
        "6 of 6 seeds collapse undisturbed at step 70; no seed is left that a perturbation could collapse"
    )
    assert sum("every control of the same onset collapses" in text for text in sentences) == 1


def test_if_collapses_cannot_be_computed_the_verdict_says_so():
    """An example is an onset at step 0, which has no performance before it to compare with."""
    lead, *sentences = report_texts(run_of(np.full((6, 6), np.nan)))
    assert lead.startswith("It could not be computed whether any perturbation collapses this learner.")
    assert sum("the collapse probability could not be computed" in text for text in sentences) == 1
    assert not any("every control" in text for text in sentences)
    run = run_of(np.full((6, 6), np.nan))
    run.metrics["reason"] = "diverged: another; collapse_time: nothing comes before the onset; pre_std: a third"
    assert any(": nothing comes before the onset." in text and "another" not in text for text in report_texts(run))


# The critical magnitude


def collapse_table(threshold, magnitudes=(1.0, 3.0, 10.0, 30.0)):
    """Which seeds have collapsed at each magnitude, `[seeds, M]`."""
    return (np.array(magnitudes) >= np.array(threshold)[:, None]).astype(float)


def test_no_critical_magnitude_if_half_of_the_controls_collapse():
    magnitudes = (1.0, 3.0, 10.0, 30.0)
    collapsed = collapse_table([5.0] * 8)
    plain = statistics.critical_magnitude(magnitudes, collapsed)
    three_of_eight = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    assert statistics.critical_beside(magnitudes, collapsed, three_of_eight) == plain
    with_half = statistics.critical_beside(magnitudes, collapsed, 1.0 * (np.arange(8) < 4))
    assert with_half.reason == "half of the seeds collapse undisturbed"
    assert np.isnan(with_half[:3]).all()


def test_the_critical_magnitude_of_seeds_with_a_surviving_control():
    """Seeds whose control collapses collapse at every magnitude, the others from 5 on."""
    magnitudes = (1.0, 3.0, 10.0, 30.0)
    control = np.arange(10) < 6
    collapsed = collapse_table(np.where(control, 0.0, 5.0))
    result = statistics.critical_beside(magnitudes, collapsed, control, standing=True)
    assert result.value == pytest.approx(30**0.5)
    assert result.n == 4
    assert statistics.critical_beside(magnitudes, collapsed, control).reason == statistics.FALLEN
    without_survivors = statistics.critical_beside(magnitudes, collapsed, np.ones(10), standing=True)
    assert (without_survivors.n, without_survivors.reason) == (0, "no seed's control is known to stand")
    with pytest.raises(ValueError, match=r"control must have shape \[10\]"):
        statistics.critical_beside(magnitudes, collapsed, [0, 1])


# From end to end


def collapsing_learner(share=0.5, step=70):
    """A learner that collapses under spikes of 5 and more, and in a share of its undisturbed seeds."""

    def init(key):
        doomed = jax.random.uniform(key) < share
        return jnp.bool_(False), jnp.where(doomed, step, 10_000), jnp.int32(0)

    def advance(state, key, taps):
        broken, collapse_step, step_number = state
        broken = broken | (taps("learning_rate", 1.0) >= 5.0) | (step_number >= collapse_step)
        performance = jnp.where(broken, 0.0, 1.0) + 0.01 * jax.random.normal(key)
        return (broken, collapse_step, step_number + 1), {"performance": performance}

    return ja.Learner(init, advance)


SETTINGS = MetricSettings(window=20, hold=20)


@pytest.fixture(scope="module")
def audit_result():
    spikes = ja.lr_spike(ja.sweep(2.0, 4.0, 8.0, 16.0), onset=0.3)
    return ja.audit(collapsing_learner(), [spikes], seeds=16, steps=STEPS, settings=SETTINGS)


def test_an_audit_pairs_each_lane_with_its_control(audit_result):
    lanes, metrics = audit_result.lanes, audit_result.metrics
    control = np.isfinite(lanes["collapse_time"].values[:, 0])
    collapsed = int(control.sum())
    assert 0 < collapsed < 16
    assert list(metrics["excess_collapse_lost"].values) == [0, 0, 0, 16 - collapsed, 16 - collapsed]
    assert (metrics["excess_collapse_spared"] == 0).all()
    assert (metrics["excess_collapse_standing"] == 16 - collapsed).all()
    assert metrics["collapse_probability"].values[1] == collapsed / 16
    assert metrics["excess_collapse_probability"].values[3] == (16 - collapsed) / 16
    critical = audit_result.critical_magnitude("lr_spike", standing=True)
    assert critical.value == pytest.approx(32**0.5)
    if 2 * collapsed >= 16:
        assert audit_result.critical_magnitude("lr_spike").reason == statistics.FALLEN


def test_an_audit_has_no_critical_magnitude_if_half_the_controls_collapse():
    result = ja.audit(
        collapsing_learner(0.8), [ja.lr_spike(ja.sweep(2.0, 8.0), onset=0.3)], seeds=12, steps=STEPS, settings=SETTINGS
    )
    assert result.critical_magnitude("lr_spike").reason == "half of the seeds collapse undisturbed"
    assert result.critical_magnitude("lr_spike", standing=True).value == pytest.approx(4.0)


def test_lanes_are_paired_with_controls_of_the_same_onset():
    """A collapse at step 70 counts for the first onset only, since J is already low before the second."""
    spikes = [ja.lr_spike(2.0, onset=onset) for onset in (0.3, 0.7)]
    metrics = ja.audit(collapsing_learner(0.5), spikes, seeds=16, steps=STEPS, settings=SETTINGS).metrics
    collapsed = int(16 * metrics["collapse_probability"].values[0])
    assert list(metrics["excess_collapse_standing"].values) == [16 - collapsed, 16 - collapsed, 16, 16]
    assert (metrics["excess_collapse_lost"] == 0).all()


def test_summaries_of_earlier_versions_get_the_excess_columns(tmp_path):
    conditions = condition_table(KINDS, duration=1)
    performance = 400 + np.random.default_rng(0).normal(size=(6, len(conditions), 400))
    performance[:3, :, 150:] -= 300
    performance[4:, 2, 150:] -= 300
    write_run(tmp_path, conditions, performance=performance.astype(np.float32))
    summary = load(tmp_path).summary
    assert list(summary["excess_collapse_lost"]) == [0, 0, 2, 0, 0, 0]
    path = tmp_path / "summary.csv"
    stored = pd.read_csv(path, keep_default_na=False, dtype=str)
    stored[[column for column in stored if not column.startswith("excess")]].to_csv(path, index=False)
    reloaded = load(tmp_path).summary
    assert set(reloaded) >= {column for column in summary if column.startswith("excess_collapse")}
    for column in reloaded:
        if column.startswith("excess") and not column.endswith(("low", "high")):
            assert np.array_equal(reloaded[column], summary[column])


def test_divergences_count_only_collapses_before_a_step():
    times, control = np.array([50.0, 150.0, np.inf]), np.array([np.inf, 50.0, np.inf])
    values = excess_columns(times, control, kind="divergence", before=100).values
    assert values["excess_divergence_lost"] == values["excess_divergence_spared"] == 1
    assert values["excess_divergence_standing"] == 2


def test_collapsed_controls_are_not_clean_lanes(tmp_path):
    """A seed whose control collapses in one of two runs is clean in neither."""
    folders = []
    for number, onset in enumerate((120, 300)):
        conditions = condition_table(KINDS, onsets=(onset,), duration=1)
        performance = 400 + np.random.default_rng(0).normal(size=(6, len(conditions), 400))
        if number:
            performance[2, :, 350:] -= 300
        else:
            performance[:2, :, 150:] -= 300
        folders.append(tmp_path / f"run{number}")
        write_run(folders[-1], conditions, performance=performance.astype(np.float32))
    (lanes,) = load_lanes(folders)
    assert lanes.collapsing == 3
    assert set(lanes.table.seed[lanes.table.clean]) == set(load(folders[0]).telemetry.seed.values[3:].tolist())
    assert (~lanes.table.clean).sum() == 2 * 6 * 5
