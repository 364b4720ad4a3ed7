"""Which conditions significantly cost final performance: of many that do nothing, hardly ever one."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from synthetic_runs import dataset, grid, tables

from jaxaudit.analysis.run_reader import Run
from jaxaudit.report import line_panels
from jaxaudit.report.outcomes import DIFFERENCE, CostTests, _paired_differences, cost_tests
from jaxaudit.report.verdict import verdict

KINDS = 40
CONDITIONS = grid({f"kind_{i}": ("data", (1.0, 2.0), 1.0) for i in range(KINDS // 2)}, duration=1)
NAMES = [str(name) for name in CONDITIONS.condition[1:]]


def run_of(final, summary=None):
    """A run that ends in these performances `[seeds, conditions]`, within the band up to there."""
    rng = np.random.default_rng(0)
    performance = 400 + rng.uniform(-1, 1, (*final.shape, 200))
    performance[..., :120] = performance[:, :1, :120]
    performance[..., -1] = final
    data = dataset(CONDITIONS.assign(onset=120), performance.astype(np.float32), ())
    metrics, told = tables(CONDITIONS.assign(onset=120), performance.astype(np.float32), 200)
    return Run(None, {}, "", {}, data, metrics, told if summary is None else summary)


def test_final_performance_is_compared_with_the_control_of_the_same_onset_and_seed():
    """Seeds are far apart, and so are the controls of two onsets; the differences are the same for all seeds."""
    conditions = grid({"lr_spike": ("optimization", (3.0, 10.0), 14.0)}, onsets=(80, 120))
    final = 100.0 * np.arange(1, 9)[:, None] + np.array([0, -1, -2, 50, 47, 46])
    performance = np.random.default_rng(0).uniform(399, 401, (8, 6, 200)).astype(np.float32)
    performance[..., -1] = final
    metrics, summary = tables(conditions, performance, 200)
    for end in ("", "_low", "_high"):
        np.testing.assert_allclose(summary[DIFFERENCE + end], [0, -1, -2, 0, -3, -4])
    run = Run(None, {}, "", {}, dataset(conditions, performance, ()), metrics, summary)
    assert cost_tests(run, line_panels.panels(run)).significant == {
        f"lr_spike {m} @{at}" for m in (3, 10) for at in (80, 120)
    }
    found = list(_paired_differences(run, line_panels.panels(run)).values())
    np.testing.assert_allclose(found, np.broadcast_to([[-1], [-2], [-3], [-4]], (4, 8)))


def test_where_no_control_is_drawn_nothing_is_compared():
    run = run_of(by_chance(np.random.default_rng(1)))
    panels = [dataclasses.replace(panel, lines=panel.lines[1:]) for panel in line_panels.panels(run)]
    assert cost_tests(run, panels).count == 0


def by_chance(rng, seeds=8):
    return 400 + rng.uniform(-1, 1, (seeds, 1 + KINDS))


def told(run):
    return [str(sentence) for sentence in verdict(run, line_panels.panels(run)).sentences]


def test_of_many_conditions_without_effect_none_is_said_to_cost_performance():
    """Some intervals leave zero out, as of so many they must."""
    run = run_of(by_chance(np.random.default_rng(1)))
    assert (run.summary.collapse_probability == 0).all()
    assert (run.summary[f"{DIFFERENCE}_high"] < 0).any()
    sentences = told(run)
    assert not any("seed, but final performance is significantly below" in sentence for sentence in sentences)
    (how,) = (sentence for sentence in sentences if "false discovery rate" in sentence)
    assert "all 40 conditions" in how
    assert how.endswith("With 8 seeds, a difference can be significant only if at least 4 are.")


def test_one_condition_is_told_of_as_one():
    sentence = str(CostTests(1, frozenset(), 8).sentence)
    assert sentence.endswith("by a one-sided signed-rank test at a significance level of 5%.")
    assert str(CostTests(1, frozenset(), 3).sentence).endswith("of 5%. With 3 seeds, none can be significant.")


def test_as_many_conditions_as_it_takes_are_enough():
    """Of five seeds the least p-value is 1/32, which two conditions at 5% allow, each of them."""
    sentence = str(CostTests(2, frozenset(), 5).sentence)
    assert sentence.endswith("With 5 seeds, a difference can be significant only if at least 2 are.")


def test_what_costs_performance_is_told_with_every_magnitude_that_does():
    rng = np.random.default_rng(1)
    final = by_chance(rng)
    final[:, 1:6] = final[:, :1] - rng.uniform(0.05, 0.1, (8, 5))
    run = run_of(np.maximum(final, 399))
    found = [sentence for sentence in told(run) if "seed, but final performance is significantly below" in sentence]
    assert len(found) == 3
    said = "collapses no seed, but final performance is significantly below the control's at"
    assert found[0].startswith(f"<b>kind_0</b> {said} magnitudes 1, 2: at worst ")
    assert found[2].startswith(f"<b>kind_2</b> {said} magnitude 1: \N{MINUS SIGN}")
    assert not any("-" in sentence for sentence in found), "one sign for the figure and its interval"


@pytest.mark.parametrize("harmed", [0, 10])
def test_of_those_told_the_share_of_false_ones_is_as_stated(harmed):
    """Were all intervals below zero; conditions share their control, so that they err together."""
    below = pd.DataFrame({"condition": NAMES, f"{DIFFERENCE}_high": -1.0})
    one = run_of(by_chance(np.random.default_rng(0)))
    panels = line_panels.panels(one)
    rng = np.random.default_rng(2)
    false, power = [], []
    for _ in range(200):
        final = by_chance(rng)
        final[:, 1 : 1 + harmed] -= 3
        lanes = one.metrics.assign(final_performance=final.ravel())
        found = cost_tests(Run(None, {}, "", {}, one.telemetry, lanes, below), panels)
        wrong = found.significant - set(NAMES[:harmed])
        false.append(len(wrong) / max(len(found.significant), 1))
        power.append(len(found.significant - wrong) / max(harmed, 1))
    assert found.count == KINDS
    assert np.mean(false) <= 0.05 + 0.02
    assert not harmed or np.mean(power) > 0.9


def test_too_few_seeds_are_not_judged():
    run = run_of(by_chance(np.random.default_rng(1), seeds=4))
    assert cost_tests(run, line_panels.panels(run)).count == 0
    assert not any("false discovery rate" in sentence for sentence in told(run))
