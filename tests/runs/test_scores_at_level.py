"""Scores of variants by the plain learner's level of performance, beside those by each lane's own band."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import jaxaudit as ja
from jaxaudit.runs.variants import compare, scoring
from jaxaudit.runs.variants.scoring import condition_indices, magnitude_ladders

ONSET, STEPS, SEEDS = 40, 80, 8
LADDER = replace(magnitude_ladders([ja.lr_spike(10.0, onset=ONSET, duration="end")], STEPS)[0], centre="margin")


def lanes(*, before: float, std: float, collapses_from: int, final_from: list[float]) -> pd.DataFrame:
    """Returns lanes of 8 seeds: the undisturbed one and five magnitudes, which end at `final_from`.

    Lanes collapse from the `collapses_from`-th magnitude on, counted from 0. Seed n performs n better than seed 0.
    """
    rows = []
    for seed in range(SEEDS):
        for condition, final in zip(condition_indices([LADDER])[0], final_from, strict=True):
            rows.append(
                {
                    "seed": seed,
                    "condition": str(condition),
                    "collapse_time": ONSET + 5.0 if condition > collapses_from else np.inf,
                    "performance_before": before + seed,
                    "performance_std_before": std,
                    "final_performance": final + seed,
                }
            )
    return pd.DataFrame(rows)


def plain() -> pd.DataFrame:
    return lanes(before=100.0, std=5.0, collapses_from=2, final_from=[100, 98, 90, 80, 50, np.nan])


def test_a_lane_survives_if_it_ends_in_the_plain_learners_band_of_its_seed():
    rows = plain()
    ((survived, is_below),) = scoring.scores_at_level(rows, rows, [LADDER])
    np.testing.assert_array_equal(survived, [2] * SEEDS)  # 90 + n is the level itself
    assert not is_below.any()
    rows.loc[rows.seed == 3, "performance_std_before"] = 1.0
    rows.loc[rows.seed == 4, "performance_std_before"] = np.nan
    rows.loc[(rows.seed == 5) & (rows.condition == "0"), "final_performance"] = -np.inf
    ((survived, is_below),) = scoring.scores_at_level(rows, rows, [LADDER])
    np.testing.assert_array_equal(survived, [2, 2, 2, 1, np.nan, 2, 2, 2])
    np.testing.assert_array_equal(np.flatnonzero(is_below), [5])


def unsteady() -> pd.DataFrame:
    """Returns lanes with a wider band, out of which none falls, though all end lower than the plain learner's."""
    return lanes(before=100.0, std=20.0, collapses_from=5, final_from=[95, 85, 80, 75, 70, 65])


def comparison(variant: pd.DataFrame, fresh: pd.DataFrame | None = None) -> compare.Comparison:
    """Returns the comparison of a variant that has these lanes on the seeds screened and on fresh ones."""

    def train(name, ladders, fresh_seeds):
        if name == compare.PLAIN:
            return plain()
        return variant if fresh_seeds is None or fresh is None else fresh

    learner = ja.Learner(lambda key: 0.0, lambda state, key, taps: (state, {"performance": state}))
    learners = {compare.PLAIN: learner, "variant": learner}
    return compare.compare_learners(learners, [LADDER], 8, train, lambda: None, level=0.95)


def test_a_variant_with_a_wider_band_gains_by_its_own_band_and_loses_by_the_plain_learners():
    result = comparison(unsteady())
    (row,) = result.bought.to_dict("records")
    assert (row["score"], row["plain_score"], row["difference"]) == (5.0, 2.0, 3.0)
    assert (row["level_score"], row["plain_level_score"], row["level_difference"]) == (0.0, 2.0, -2.0)
    assert (row["level_difference_low"], row["level_difference_high"]) == (-2.0, -2.0)
    assert (row["below_level"], row["plain_below_level"]) == (0, 0)
    text = str(result)
    assert "helps by its own level only (+3 on fresh seeds, -2 by the plain learner's)" in text
    (caution,) = result.json()["cautions"][:1]
    assert caution.startswith(
        "variant under lr_spike: by a fall out of its own band before the onset the difference is +3"
    )
    assert caution.endswith("the plain learner's, -2 [-2, -2]")
    assert caution in text


def test_a_gain_by_both_levels_is_called_help_without_a_caution():
    result = comparison(lanes(before=100.0, std=5.0, collapses_from=4, final_from=[100, 99, 98, 97, 96, 60]))
    assert "helps (+2 on fresh seeds)" in str(result)
    assert result.json()["cautions"] == []


def test_no_caution_is_given_for_a_difference_that_fresh_seeds_do_not_confirm():
    result = comparison(unsteady(), fresh=plain())
    assert "not confirmed (+0 on fresh seeds)" in str(result)
    assert result.json()["cautions"] == []


def test_a_variant_that_ends_below_the_level_undisturbed_is_pointed_out():
    slow = lanes(before=60.0, std=5.0, collapses_from=2, final_from=[70, 60, 55, 40, 30, 20])
    result = comparison(slow)
    (row,) = result.bought.to_dict("records")
    assert (row["difference"], row["level_difference"], row["below_level"]) == (0.0, -2.0, SEEDS)
    (caution,) = result.json()["cautions"]
    assert caution.startswith("variant: 8 of its undisturbed lanes end below the plain learner's level")


@pytest.mark.parametrize(
    ("difference", "low", "high", "holds"),
    [(2.0, 0.5, 1.0, True), (2.0, -0.5, 1.0, False), (-2.0, -1.0, -0.1, True), (-2.0, -1.0, 0.0, False)],
)
def test_a_difference_holds_at_the_level_where_that_interval_excludes_zero_on_the_same_side(
    difference, low, high, holds
):
    row = {"difference": difference, "level_difference_low": low, "level_difference_high": high}
    assert scoring.holds_at_level(row) is holds
    assert scoring.holds_at_level({"difference": difference})


def test_too_few_seeds_for_an_interval_are_pointed_out():
    few = unsteady().query("seed < 4")
    gains = scoring.gain_table(plain().query("seed < 4"), {"variant": few}, [LADDER])
    (caution,) = compare._cautions(gains, gains.head(0), (), 0.95)
    assert caution == "with 4 seeds no difference has a 95% interval or can be shown: it takes 6"
    eight = scoring.gain_table(plain(), {"variant": plain()}, [LADDER])
    (caution,) = compare._cautions(eight, scoring.adjust_for_multiplicity(gains), (), 0.95)
    assert caution == "with 4 fresh seeds no difference can be confirmed: it takes at least 6"
    (caution,) = compare._cautions(gains, gains.head(0), (), 0.99)
    assert caution == "with 4 seeds no difference has a 99% interval or can be shown: it takes 8"
