"""Stability margins: known thresholds, the coverage of their intervals, and what a search counts and reports."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from descent import CURVATURE, LEARNER, RATE
from scipy import stats

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.statistics import ranks, seeds_for
from jaxaudit.runs.margins.bisection import (
    CONTROL,
    Probe,
    SearchConfig,
    estimate_margins,
    fit_bracket,
    is_contradictory,
    next_round,
    outer_bracket,
)
from jaxaudit.runs.margins.directions import Axis, directions
from jaxaudit.runs.margins.search import (
    MarginSettings,
    configure_search,
    pending_probes,
    prepare_engine,
    run_rounds,
    sequential_trainer,
    train_baseline,
)
from jaxaudit.runs.margins.table import Margins
from jaxaudit.runtime import registry

CRITICAL = 2 / (RATE * CURVATURE)
SHORT = MetricSettings(window=10, hold=20)


def spike(*factors, **when):
    return ja.lr_spike(ja.sweep(*factors), **({"onset": 20, "duration": "end"} | when))


# The search.


@pytest.mark.parametrize("n", [1, 2, 4, 5, 6, 8, 9, 20, 101])
def test_the_ranks_cover_the_median_with_their_stated_probability(n):
    low, high, coverage = ranks(n)
    probabilities = stats.binom.pmf(np.arange(n + 1), n, 0.5)
    assert high == n + 1 - low
    if n > 1:
        assert coverage == pytest.approx(probabilities[low:high].sum())
    if n >= 6:
        assert coverage >= 0.95
        assert low + 1 > n // 2 or probabilities[low + 1 : high - 1].sum() < 0.95
    assert seeds_for(0.95) == 6


def test_a_bracket_is_the_step_with_the_fewest_contradictions():
    assert fit_bracket({1.0: False, 2.0: True, 3.0: True}) == (1, 2)
    assert fit_bracket({1.0: False, 2.0: False}) == (2, math.inf)
    assert fit_bracket({1.0: True}) == (-math.inf, 1)
    assert fit_bracket({1.0: True}, floor=0.0) == (0, 1)
    contradictory = {1.0: False, 2.0: True, 3.0: False, 4.0: True, 5.0: True}
    assert fit_bracket(contradictory) == (1, 2), "the milder of two equally good steps is expected"
    assert outer_bracket(contradictory) == (1, 4)
    assert is_contradictory(contradictory)
    assert not is_contradictory({1.0: False, 2.0: True})
    one_harsh_survivor = {1.0: True, 2.0: False, 3.0: False, 4.0: True}
    assert fit_bracket(one_harsh_survivor) == (3, 4)
    assert outer_bracket(one_harsh_survivor) == (-math.inf, 4)


def test_a_kind_with_a_buffer_is_searched_below_the_given_magnitudes_only():
    (direction,) = directions([ja.stale_policy(4, onset=20)], 100, 4, 1000.0)
    assert direction.magnitudes(direction.low) == (1.0,)
    assert direction.magnitudes(direction.high) == (4.0,)


def simulate_search(thresholds, tolerance=0.02, lanes=16, reach=1000.0, standard=10.0):
    """Runs a search on seeds with known thresholds (as magnitudes), without training."""
    (direction,) = directions([ja.gradient_scale(standard, onset=20)], 100, len(thresholds), reach)
    plan = SearchConfig((direction,), {20: 50.0}, tolerance, 0.95, lanes)
    probes = []
    for number in itertools.count(1):
        planned = next_round(plan, 20, probes)
        if not planned:
            return plan, probes, estimate_margins(plan, probes)[0], number
        assert len({(p.seed, p.log_scale) for p in planned}) == len(planned)
        for p in planned:
            collapsed = p.direction != CONTROL and direction.magnitudes(p.log_scale)[0] >= thresholds[p.seed]
            p.collapse_time = 21.0 if collapsed or thresholds[p.seed] == 0 else math.inf
        probes += planned


@pytest.mark.parametrize("n", [1, 2, 7, 8, 30])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_a_search_finds_the_median_and_its_order_statistics(n, spread):
    thresholds = 3.0 * np.exp(spread * np.random.default_rng(n).standard_normal(n))
    plan, probes, estimate, number = simulate_search(thresholds)
    direction = plan.directions[0]
    ordered = np.sort(np.log(thresholds / direction.magnitudes(0.0)[0]))
    clipped = np.clip(ordered, direction.low, direction.high)
    if (clipped == ordered).all():
        assert abs(estimate.median.value - np.median(ordered)) <= plan.log_tolerance / 2 + 1e-9
    if n > 1:
        low, high, _ = ranks(n)
        assert estimate.median.low <= ordered[low - 1] <= ordered[high - 1] <= estimate.median.high
        if clipped[low - 1] == ordered[low - 1]:
            assert estimate.median.low >= ordered[low - 1] - max(
                plan.log_tolerance, 0.15 * (np.median(ordered) - ordered[low - 1])
            )
        if clipped[high - 1] == ordered[high - 1]:
            assert estimate.median.high <= ordered[high - 1] + max(
                plan.log_tolerance, 0.15 * (ordered[high - 1] - np.median(ordered))
            )
    assert estimate.n_contradictory == 0
    assert number < 20
    assert len(probes) < 25 * n + 10 * plan.lanes


def test_seeds_beyond_the_range_are_censored():
    thresholds = [0.0, 1e-9, 2.0, 3.0, 4.0, 5.0, 1e9, 1e9]
    plan, _, estimate, _ = simulate_search(thresholds)
    assert estimate.n_collapsed_undisturbed == 1
    assert estimate.median.low == -math.inf
    assert estimate.median.high == math.inf
    assert plan.directions[0].magnitudes(estimate.median.value)[0] == pytest.approx(math.sqrt(3 * 4), rel=0.02)
    _, _, never, _ = simulate_search([1e9] * 8)
    assert never.median[:3] == (math.inf, plan.directions[0].high, math.inf)
    _, _, always, _ = simulate_search([1e-9] * 8)
    assert always.median[:2] == (-math.inf, -math.inf)
    assert always.median.high == pytest.approx(plan.directions[0].low)
    _, _, split, _ = simulate_search([1e-9] * 4 + [1e9] * 4)
    assert math.isnan(split.median.value)


@pytest.mark.parametrize("n", [1, 4, 6, 7, 8, 20])
def test_the_checked_share_is_that_of_the_margins_magnitude_or_missing(n):
    """A check inside the median's bracket moves the margin away from the checked magnitude."""
    thresholds = 3.0 * np.exp(0.3 * np.random.default_rng(n).standard_normal(n))
    plan, probes, *_ = simulate_search(thresholds)
    row = Margins(plan, tuple(probes), tuple(range(n)), "divergence", 100).table.iloc[0]
    (checked,) = {plan.directions[0].magnitudes(p.log_scale)[0] for p in probes if p.purpose == "check"}
    if checked == row.margin:
        assert (row.checked, row.reason) == (n, "")
        assert row.collapsed_at_margin == (thresholds <= row.margin).sum()
    else:
        assert math.isnan(row.collapsed_at_margin)
        location = f"at {checked:.3g}, where {(thresholds <= checked).sum()} of {n} collapse"
        assert row.reason == f"the margin moved when all seeds were tried {location}"
    assert (checked == row.margin) == (n in (4, 8, 20)), "both cases must occur"


def test_spare_lanes_narrow_the_widest_brackets():
    with_few_lanes, with_many_lanes = (simulate_search([2.0] * 4, lanes=lanes) for lanes in (4, 64))
    assert with_many_lanes[3] < with_few_lanes[3]
    assert with_few_lanes[2].median.value == pytest.approx(with_many_lanes[2].median.value, abs=0.02)


# Magnitudes and directions.


def test_every_perturbation_has_an_axis_of_increasing_harm():
    for name in registry.perturbations:
        part = registry.perturbations[name]()
        if part.magnitude == part.neutral:
            continue
        axis = Axis(part)
        assert axis.log_scale(part.magnitude) == pytest.approx(0.0, abs=1e-12), name
        assert axis.magnitude(0.0) == part.magnitude, name
        points = np.linspace(-3, 3, 25)
        distances = [abs(axis.magnitude(u) - part.neutral) for u in points]
        assert (np.diff(distances) >= 0).all(), name
        low, high = part.kind.limits
        assert all(low <= axis.magnitude(u) <= high for u in points), name
        for u in map(axis.snap, points):
            if axis.lowest < u < axis.highest:
                assert axis.log_scale(axis.magnitude(u)) == pytest.approx(u, abs=1e-9), name


@pytest.mark.parametrize(
    ("perturbation", "factor", "magnitude"),
    [
        (ja.lr_spike(10.0), 2.0, 20.0),
        (ja.lr_spike(0.1), 2.0, 0.05),
        (ja.lr_spike(10.0), 0.01, 1.0),
        (ja.second_moment_drift(), 10.0, 0.001),
        (ja.quantize(8.0), 2.0, 4.0),
        (ja.quantize(8.0), 100.0, 2.0),
        (ja.weight_noise(0.01), 3.0, 0.03),
        (ja.reward_scale(-1.0), 2.0, -3.0),
        (ja.reward_scale(-1.0), 0.5, 0.0),
        (ja.lr_schedule_error(-0.3), 2.0, -0.6),
        (ja.lr_schedule_error(-0.3), 100.0, -1.0),
        (ja.reward_flip(0.1), 5.0, 0.5),
        (ja.reward_flip(0.1), 50.0, 1.0),
    ],
)
def test_a_magnitude_times_a_factor_of_harm(perturbation, factor, magnitude):
    assert Axis(perturbation).magnitude(math.log(factor)) == pytest.approx(magnitude)


def test_directions_follow_from_sweeps_and_chains():
    perturbations = [
        ja.lr_spike(ja.sweep(0.5, 1.0, 3.0, 30.0), onset=20),
        ja.lr_spike(3.0, onset=20, duration="end"),
        ja.weight_noise(0.1, onset=20, target="critic"),
        ja.weight_noise(0.1, onset=20, target="actor"),
        ja.chain(ja.lr_spike(5.0, onset=20), ja.weight_noise(ja.sweep(0.1, 0.2), onset=20)),
    ]
    result = directions(perturbations, 100, 4, 10.0)
    assert [direction.name for direction in result] == [
        "lr_spike below 1",
        "lr_spike above 1 for 10 steps",
        "lr_spike above 1 for 80 steps",
        "weight_noise on critic",
        "weight_noise on actor",
        "lr_spike 5 + weight_noise 0.1",
        "lr_spike 5 + weight_noise 0.2",
    ]
    swept = result[1]
    assert swept.magnitudes(0.0) == (10.0,), "the standard magnitude, which the sweep does not contain"
    assert [swept.magnitudes(u)[0] for u in swept.initial] == [3.0, 30.0]
    assert swept.magnitudes(swept.low) == (1.0,)
    assert swept.magnitudes(swept.high) == (300.0,)
    assert result[5].magnitudes(math.log(2)) == (10.0, 0.2)
    assert result[5].magnitudes(math.log(0.1)) == (1.0, 0.01), "a neutral part stays neutral"
    onsets = directions([ja.weight_noise(0.1, onset=o) for o in (20, 30)], 100, 4, 10.0)
    assert [direction.name for direction in onsets] == ["weight_noise @20", "weight_noise @30"]


def test_an_intervention_keeps_its_magnitude_along_a_direction():
    with_intervention = ja.chain(ja.lr_spike(5.0, onset=20), ja.roll_back(ja.sweep(4, 8), onset=20))
    result = directions([with_intervention, ja.roll_back(4, onset=20)], 100, 4, 10.0)
    assert [direction.name for direction in result] == ["lr_spike 5 + roll_back 4", "lr_spike 5 + roll_back 8"]
    assert result[1].magnitudes(math.log(2)) == (10.0, 8.0)
    assert result[1].magnitudes(result[1].low) == (1.0, 8.0)
    assert result[1].magnitudes(result[1].high) == (50.0, 8.0)
    condition = result[1].condition(math.log(2))
    assert result[1].log_scale(condition, 100) == pytest.approx(math.log(2))
    assert result[0].log_scale(condition, 100) is None


@pytest.mark.parametrize(
    ("first", "low", "safety", "verdict"),
    [
        (7, 6.0, 1.75, "holds to at least 1.5 times the standard magnitude"),
        (5, 4.0, 1.25, "holds at the standard magnitude"),
        (4, 3.0, 1.0, "collapses at the standard magnitude or less"),
        (2, 1.0, 0.5, "collapses at 0.5 of the standard magnitude or less"),
    ],
)
def test_whole_magnitudes_stay_whole(first, low, safety, verdict):
    """Each of four seeds survives below `first`, and collapses from there on."""
    late = ja.Kind("late", "data", "observation", lambda *_: None, 4.0, limits=(0.0, 32.0), whole=True)
    (direction,) = directions([late(onset=20, duration="end")], 100, 4, 100.0)
    assert direction.magnitudes(direction.low) == (1.0,)
    assert direction.magnitudes(direction.high) == (32.0,)
    assert direction.magnitudes(direction.snap(math.log(1.1))) == (5.0,)
    plan = SearchConfig((direction,), {20: 50.0}, 0.02, 0.95, 8)
    probes = []
    while planned := next_round(plan, 20, probes):
        for p in planned:
            p.collapse_time = (
                21.0 if p.direction != CONTROL and direction.magnitudes(p.log_scale)[0] >= first else math.inf
            )
        probes += planned
    row = Margins(plan, tuple(probes), (0, 1, 2, 3), "divergence", 100).table.iloc[0]
    assert (row.low, row.high) == (low, first)
    assert row.margin == first, "the smallest magnitude at which half collapse"
    assert row.safety_factor == pytest.approx(safety)
    assert (row.checked, row.collapsed_at_margin) == (4, 4)
    assert row.verdict == verdict


def test_a_margin_is_unchecked_unless_all_seeds_were_trained_at_it():
    (direction,) = directions([spike(10.0)], 100, 4, 100.0)
    plan, u = SearchConfig((direction,), {20: 50.0}, 0.02, 0.95, 8), math.log(2)
    controls = [Probe(1, CONTROL, 20, seed, -math.inf, "control", math.inf) for seed in range(4)]
    at_margin = [Probe(1, 0, 20, seed, u, "bracket", 21.0) for seed in range(3)]
    of_run = [Probe(0, 0, 20, seed, u / 2, "run", math.inf) for seed in range(4)]
    probes = (*controls, *of_run, *at_margin)
    (estimate,) = estimate_margins(plan, probes)
    at_u = dataclasses.replace(estimate, median=estimate.median._replace(value=u))
    margins = Margins(plan, probes, (0, 1, 2, 3), "divergence", 100)
    check = margins._check(at_u)
    assert math.isnan(check["collapsed_at_margin"])
    assert (check["checked"], check["reason"]) == (3, "3 of 4 seeds were trained at it")
    assert margins.table.iloc[0].evaluations == 3, "trainings of the run itself are counted"


def test_planned_probes_are_pending_at_their_onset():
    waiting, later = (Probe(1, 0, onset, 0, 0.0, "scan") for onset in (20, 40))
    trained = Probe(1, 0, 20, 1, 0.0, "scan", 21.0)
    assert pending_probes([waiting, trained, later], 20) == [waiting]


# Known thresholds.


@pytest.fixture(scope="module")
def quadratic_margins():
    """The margins of gradient descent on a quadratic, where the critical factor is 2 / (rate x curvature) = 100."""
    perturbations = [spike(3.0, 10.0), ja.gradient_sign_flip(onset=20), spike(0.5)]
    return ja.margin(LEARNER, perturbations, seeds=6, steps=300, settings=SHORT, tolerance=0.01)


def test_the_margin_is_the_stability_limit(quadratic_margins):
    row = quadratic_margins.table.iloc[0]
    assert row.perturbation == "lr_spike above 1"
    assert abs(row.margin / CRITICAL - 1) < 0.02
    assert row.low <= CRITICAL <= row.high * 1.005, "just above the limit, growth is too slow for the run's length"
    assert row.high / row.low < 1.011
    assert row.safety_factor == pytest.approx(row.margin / 10)
    assert row.verdict == "holds to at least 10 times the standard magnitude"
    assert row.evaluations < 6 * 20


def test_an_onset_at_which_performance_still_rises_is_noted(quadratic_margins):
    [note] = [note for note in quadratic_margins.notes if "rising" in note]
    assert note.startswith("onset 20: performance was itself rising or falling before it")


def test_a_perturbation_that_never_causes_collapse_is_reported(quadratic_margins):
    flip, slow = quadratic_margins.table.iloc[1], quadratic_margins.table.iloc[2]
    assert flip.verdict == "not reached up to 1"
    assert slow.verdict == "not reached up to 0.0005"
    for row in (flip, slow):
        assert row.never_collapse == 6
        assert math.isnan(row.margin)
        assert math.isnan(row.collapsed_at_margin)
        assert row.reason == "there is no margin among the magnitudes tried"
        assert row.safety_factor == math.inf
        assert row.low == row.searched_to
    text = str(quadratic_margins)
    assert "beyond 1 " in text
    assert "exact coverage 96.9%" in text
    assert "before step 150" in text


def init_with_curvature(key):
    """Returns a state of a quadratic whose curvature is lognormal around 2."""
    position_key, curvature_key = jax.random.split(key)
    return jax.random.normal(position_key, (3,)), CURVATURE * jnp.exp(0.5 * jax.random.normal(curvature_key))


def step_with_curvature(state, key, taps):
    x, curvature = state
    x = x - taps("learning_rate", RATE) * curvature * x
    return (x, curvature), {"performance": -0.5 * jnp.sum(x**2)}


VARIED_CURVATURE = ja.Learner(init_with_curvature, step_with_curvature)


@pytest.mark.exhaustive
def test_the_interval_covers_the_true_median_in_at_least_90_of_100_audits():
    """100 audits of 8 seeds each in one grid. The critical factor is lognormal over seeds with median 100."""
    repetitions, seeds = 100, 8
    perturbations = [spike(30.0)]
    grid = ja.plan(VARIED_CURVATURE, perturbations, seeds=repetitions * seeds, steps=200, tail=0)
    config = configure_search(grid, perturbations, MarginSettings(lanes=repetitions * seeds))
    groups = np.arange(repetitions * seeds).reshape(repetitions, seeds).tolist()
    config = dataclasses.replace(
        config, directions=tuple(dataclasses.replace(config.directions[0], seeds=tuple(g)) for g in groups)
    )
    engine, batches, config = prepare_engine(grid, config, chunk=200, baseline=True)
    probes = []
    for _ in run_rounds(
        grid, config, probes, sequential_trainer(engine, config, train_baseline(engine, batches, SHORT))
    ):
        pass
    table = Margins(config, tuple(probes), grid.seeds, "divergence", 200).table
    covered = (table.low <= CRITICAL) & (table.high >= CRITICAL)
    print(f"covered in {covered.sum()} of {repetitions}; median width {np.median(table.high / table.low):.2f}")
    assert covered.sum() >= 90
    assert np.median(table.high / table.low) < 6, "the intervals are too wide for a meaningful coverage"
    assert abs(np.log(table.margin / CRITICAL)).median() < 0.3
    assert (table.contradictory == 0).all()


# Special cases.


def return_key(key):
    return key


def step_by_rules(key, step_key, taps):
    rules, t = taps.data, taps.step
    rate, uniform = taps("learning_rate", jnp.float32(1.0)), jax.random.uniform(key)
    falls = rate > rules["above"] * jnp.exp(rules["spread"] * jax.random.normal(key))
    falls |= (rate > rules["between"][0]) & (rate < rules["between"][1])
    falls |= (rate > rules["late"]) & (t >= 60)
    falls |= (uniform < rules["undisturbed"]) & (t >= 30)
    gap = (uniform < rules["gap"]) & (t == 15)
    return key, {"performance": jnp.where(gap, jnp.nan, jnp.where(falls, -1.0, 0.0))}


NO_RULES = {
    "above": math.inf,  # the performance falls if the rate is above this,
    "spread": 0.0,  # which is lognormal over the seeds with this spread,
    "between": (math.inf, math.inf),  # or if the rate is between these,
    "late": math.inf,  # or above this from step 60 on;
    "undisturbed": 0.0,  # this share of the seeds falls at step 30 at any rate,
    "gap": 0.0,  # and this share has no performance at step 15
}


def find_margins(rules, *factors, onset=20, **settings):
    """Returns the margins of a learner that stays at zero or falls by `rules`, which are data of one program."""
    defaults = {"seeds": 6, "steps": 100, "settings": SHORT, "devices": jax.devices()[:1], "lanes": 6}
    data = jax.tree.map(np.float32, NO_RULES | rules)
    return ja.margin(
        ja.Learner(return_key, step_by_rules, data=data), [spike(*factors, onset=onset)], **(defaults | settings)
    )


def test_contradictory_outcomes_are_counted_and_widen_the_interval():
    margins = find_margins({"between": (4.0, 6.0), "above": 40.0}, 5.0, 20.0, 100.0)
    row = margins.table.iloc[0]
    assert row.contradictory == 6
    assert row.margin == pytest.approx(4.0, rel=0.02)
    assert row.low < 4
    assert row.high == pytest.approx(100.0)
    assert "6 of 6 seeds survive a harsher magnitude than one they collapse at" in str(margins)


def test_seeds_that_collapse_undisturbed_have_no_margin():
    all_fall = find_margins({"undisturbed": 2.0}, 5.0)
    assert all_fall.table.iloc[0].verdict == "half of the seeds collapse undisturbed"
    assert all_fall.table.iloc[0].collapse_undisturbed == 6
    assert all_fall.table.iloc[0].safety_factor == 0
    assert all_fall.table.iloc[0].margin == 1.0
    assert all_fall.table.iloc[0].collapsed_at_margin == 6
    assert len(all_fall.probes) == 12, "a search was made although half of the seeds collapse undisturbed"
    row = find_margins({"undisturbed": 0.3, "above": 7.0}, 5.0, seeds=20).table.iloc[0]
    assert 0 < row.collapse_undisturbed < 10
    assert row.margin == pytest.approx(7.0, rel=0.02)


def test_a_seed_without_level_before_the_onset_is_excluded_and_counted():
    margins = find_margins({"gap": 0.3, "above": 7.0}, 5.0, seeds=20)
    row = margins.table.iloc[0]
    assert 0 < row.unknown < 20
    assert row.margin == pytest.approx(7.0, rel=0.02)
    assert f"for {row.unknown} seeds no collapse time can be computed" in str(margins)


def test_after_an_onset_in_the_second_half_any_collapse_counts():
    margins = find_margins({"above": 7.0}, 5.0, onset=60)
    assert margins.table.iloc[0].margin == pytest.approx(7.0, rel=0.02)
    assert margins.table.iloc[0].limit == math.inf
    assert "onset 60: no step of the run's first half follows, so any collapse counts" in str(margins)


def test_the_criterion_decides_what_counts():
    rules = {"late": 3.0, "above": 9.0}
    assert find_margins(rules, 5.0).table.iloc[0].margin == pytest.approx(9.0, rel=0.02)
    assert find_margins(rules, 5.0, criterion="collapse").table.iloc[0].margin == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize(
    ("critical", "verdict"),
    [
        (5.0, "collapses at 0.501 of the standard magnitude or less"),
        (50.0, "holds to at least 4.95 times the standard magnitude"),
        (1.0, "collapses at 0.101 of the standard magnitude or less"),
        (1e9, "not reached up to 1e+04"),
    ],
)
def test_verdicts_follow_from_the_margin(critical, verdict):
    margins = find_margins({"above": critical}, 10.0)
    assert margins.table.iloc[0].verdict == verdict


def test_margins_around_the_standard_magnitude_are_too_close_to_tell():
    margins = find_margins({"above": 6.0, "spread": 1.0}, 10.0, seeds=20)
    assert margins.table.iloc[0].verdict == "too close to the standard magnitude to tell"


def test_few_seeds_have_limited_verdicts():
    one_seed = find_margins({"above": 7.0}, 10.0, seeds=1)
    assert one_seed.table.iloc[0].verdict == "collapses below the standard magnitude, on one seed"
    assert math.isnan(one_seed.table.iloc[0].low)
    four_seeds = find_margins({"above": 7.0}, 10.0, seeds=4)
    assert "exact coverage 87.5% (4 seeds allow no more; 95% takes 6)" in str(four_seeds)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factors": [1.0]}, "magnitude 1 of 'lr_spike' disturbs nothing"),
        ({"factors": [math.inf]}, "magnitude inf of 'lr_spike' is infinite"),
        ({"onset": 0}, "onset 0 leaves no steps to measure J_pre on"),
        ({"tolerance": 0.0}, "tolerance must be from 0.00001 to 1, not 0.0"),
        ({"tolerance": math.nan}, "tolerance must be"),
        ({"reach": 0.5}, "reach must be from 1"),
        ({"criterion": "death"}, "criterion must be divergence or collapse, not 'death'"),
        ({"level": 1.0}, "level must lie between 0 and 1"),
        ({"lanes": 0}, "lanes must be at least 1"),
    ],
)
def test_invalid_settings_are_refused(change, words):
    change = dict(change)
    factors = change.pop("factors", [5.0])
    with pytest.raises(ValueError, match=words):
        find_margins({"above": 7.0}, *factors, **change)


def test_a_search_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing is disturbed, so there is no margin to search"):
        ja.margin(LEARNER, [], seeds=2, steps=30)


def test_a_single_perturbation_in_place_of_a_list_is_refused():
    with pytest.raises(ValueError, match="perturbations must be a list"):
        ja.margin(LEARNER, spike(3.0), seeds=3, steps=100)


def test_no_round_compiles_anything():
    """Magnitudes, windows and seeds are data, so all rounds run the programs of the first."""
    perturbations = [spike(3.0), ja.weight_noise(onset=20), ja.gradient_sign_flip(onset=20, duration=7)]
    grid = ja.plan(LEARNER, perturbations, seeds=3, steps=100, tail=0)
    engine, batches, config = prepare_engine(
        grid, configure_search(grid, perturbations, MarginSettings()), chunk=30, baseline=True
    )
    compiled = []

    def listen(name, *_, **__):
        if "backend_compile" in name:
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        probes, compiled_by_round = [], {}
        for batch in run_rounds(
            grid, config, probes, sequential_trainer(engine, config, train_baseline(engine, batches, SHORT))
        ):
            compiled_by_round[batch[0].round] = len(compiled)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled_by_round) > 5
    assert compiled_by_round[1] > 0, "no compilation was counted"
    assert set(compiled_by_round.values()) == {compiled_by_round[1]}
