"""Which conditions the report says cost final performance significantly, with the rate of false claims controlled."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from synthetic_runs import condition_table, dataset, metric_tables

from jaxaudit.analysis.run_reader import Run
from jaxaudit.report import line_panels
from jaxaudit.report.outcomes import DIFFERENCE, CostTests, _paired_differences, cost_tests
from jaxaudit.report.verdict import verdict

KINDS = 40
CONDITIONS = condition_table({f"kind_{i}": ("data", (1.0, 2.0), 1.0) for i in range(KINDS // 2)}, duration=1)
NAMES = [str(name) for name in CONDITIONS.condition[1:]]


def run_of(final, summary=None):
    """A run with these final performances `[seeds, conditions]`, which stays within the band before."""
    rng = np.random.default_rng(0)
    performance = 400 + rng.uniform(-1, 1, (*final.shape, 200))
    performance[..., :120] = performance[:, :1, :120]
    performance[..., -1] = final
    data = dataset(CONDITIONS.assign(onset=120), performance.astype(np.float32), ())
    metrics, computed_summary = metric_tables(CONDITIONS.assign(onset=120), performance.astype(np.float32), 200)
    return Run(None, {}, "", {}, data, metrics, computed_summary if summary is None else summary)


def test_final_performance_is_paired_with_the_control_by_onset_and_seed():
    """Seeds and the controls of two onsets differ much, while the differences are the same for all seeds."""
    conditions = condition_table({"lr_spike": ("optimization", (3.0, 10.0), 14.0)}, onsets=(80, 120))
    final = 100.0 * np.arange(1, 9)[:, None] + np.array([0, -1, -2, 50, 47, 46])
    performance = np.random.default_rng(0).uniform(399, 401, (8, 6, 200)).astype(np.float32)
    performance[..., -1] = final
    metrics, summary = metric_tables(conditions, performance, 200)
    for end in ("", "_low", "_high"):
        np.testing.assert_allclose(summary[DIFFERENCE + end], [0, -1, -2, 0, -3, -4])
    run = Run(None, {}, "", {}, dataset(conditions, performance, ()), metrics, summary)
    assert cost_tests(run, line_panels.panels(run)).significant == {
        f"lr_spike {m} @{at}" for m in (3, 10) for at in (80, 120)
    }
    result = list(_paired_differences(run, line_panels.panels(run)).values())
    np.testing.assert_allclose(result, np.broadcast_to([[-1], [-2], [-3], [-4]], (4, 8)))


def test_without_a_control_in_the_figure_nothing_is_compared():
    run = run_of(final_by_chance(np.random.default_rng(1)))
    panels = [dataclasses.replace(panel, lines=panel.lines[1:]) for panel in line_panels.panels(run)]
    assert cost_tests(run, panels).count == 0


def final_by_chance(rng, seeds=8):
    return 400 + rng.uniform(-1, 1, (seeds, 1 + KINDS))


def sentences_of(run):
    return [str(sentence) for sentence in verdict(run, line_panels.panels(run)).sentences]


def test_conditions_without_effect_are_not_said_to_cost_performance():
    """With this many conditions, some intervals exclude zero by chance."""
    run = run_of(final_by_chance(np.random.default_rng(1)))
    assert (run.summary.collapse_probability == 0).all()
    assert (run.summary[f"{DIFFERENCE}_high"] < 0).any()
    sentences = sentences_of(run)
    assert not any("seed, but final performance is significantly below" in sentence for sentence in sentences)
    (method,) = (sentence for sentence in sentences if "false discovery rate" in sentence)
    assert "all 40 conditions" in method
    assert method.endswith("With 8 seeds, a difference can be significant only if at least 4 are.")


def test_the_sentence_for_a_single_condition():
    sentence = str(CostTests(1, frozenset(), 8).sentence)
    assert sentence.endswith("by a one-sided signed-rank test at a significance level of 5%.")
    assert str(CostTests(1, frozenset(), 3).sentence).endswith("of 5%. With 3 seeds, none can be significant.")


def test_the_sentence_says_how_many_conditions_must_be_significant():
    """The smallest p-value of five seeds is 1/32, which suffices if both of two conditions are significant at 5%."""
    sentence = str(CostTests(2, frozenset(), 5).sentence)
    assert sentence.endswith("With 5 seeds, a difference can be significant only if at least 2 are.")


def test_costs_are_reported_with_every_significant_magnitude():
    rng = np.random.default_rng(1)
    final = final_by_chance(rng)
    final[:, 1:6] = final[:, :1] - rng.uniform(0.05, 0.1, (8, 5))
    run = run_of(np.maximum(final, 399))
    result = [
        sentence for sentence in sentences_of(run) if "seed, but final performance is significantly below" in sentence
    ]
    assert len(result) == 3
    claim = "collapses no seed, but final performance is significantly below the control's at"
    assert result[0].startswith(f"<b>kind_0</b> {claim} magnitudes 1, 2: at worst ")
    assert result[2].startswith(f"<b>kind_2</b> {claim} magnitude 1: \N{MINUS SIGN}")
    assert not any("-" in sentence for sentence in result), "numbers use the same minus sign as their intervals"


@pytest.mark.parametrize("harmed", [0, 10])
def test_the_false_discovery_rate_is_controlled(harmed):
    """All intervals are set below zero; conditions share their control, so that their errors are correlated."""
    below = pd.DataFrame({"condition": NAMES, f"{DIFFERENCE}_high": -1.0})
    run = run_of(final_by_chance(np.random.default_rng(0)))
    panels = line_panels.panels(run)
    rng = np.random.default_rng(2)
    false_shares, power = [], []
    for _ in range(200):
        final = final_by_chance(rng)
        final[:, 1 : 1 + harmed] -= 3
        lanes = run.metrics.assign(final_performance=final.ravel())
        result = cost_tests(Run(None, {}, "", {}, run.telemetry, lanes, below), panels)
        false_claims = result.significant - set(NAMES[:harmed])
        false_shares.append(len(false_claims) / max(len(result.significant), 1))
        power.append(len(result.significant - false_claims) / max(harmed, 1))
    assert result.count == KINDS
    assert np.mean(false_shares) <= 0.05 + 0.02
    assert not harmed or np.mean(power) > 0.9


def test_with_too_few_seeds_nothing_is_tested():
    run = run_of(final_by_chance(np.random.default_rng(1), seeds=4))
    assert cost_tests(run, line_panels.panels(run)).count == 0
    assert not any("false discovery rate" in sentence for sentence in sentences_of(run))
