"""Comparisons of variants: exact statistics, the design, known answers, the command, and what it refuses."""

import functools
import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import pytest
from directories import EXPERIMENTS, HELPERS
from scipy import stats

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.results import lane_table
from jaxaudit.analysis.statistics.paired import holm, sign_flips
from jaxaudit.cli.main import main
from jaxaudit.execution import engine
from jaxaudit.runs.variants import folder as variants_folder
from jaxaudit.runs.variants import scoring
from jaxaudit.runs.variants.compare import fresh_seeds, verdict
from jaxaudit.runs.variants.folder import load, parse
from jaxaudit.runs.variants.scoring import FACTORS, condition_indices, magnitude_ladders
from jaxaudit.runtime.errors import Interrupted
from jaxaudit.runtime.registry import learners

STEPS, ONSET = 60, 20
WINDOWS = MetricSettings(window=10, hold=10)


@dataclass(frozen=True)
class CliffSettings:
    learning_rate: float = 0.01
    max_norm: float = 1.0


@functools.cache
def cliff(*, learning_rate=0.01, max_norm=1.0):
    """A learner that falls for ever after an update longer than 1.

    Its gradients are longer than the clipping threshold, so an update's length is rate * threshold * scale, where the
    seed's scale is lognormal, times the factor of a spike. A seed falls at the factor 1 / (rate threshold scale).
    """
    optimizer = ja.Optimizer(optax.identity(), learning_rate, max_norm=max_norm)

    def init(key):
        return {"scale": jnp.exp(0.5 * jax.random.normal(key)), "fallen": jnp.zeros(())}

    def step(state, key, taps):
        gradient = {"x": 100.0 + jax.random.uniform(key)}
        params, _, update = optimizer.update({"x": jnp.zeros(())}, optimizer.init({"x": 0.0}), gradient, taps)
        fallen = jnp.maximum(state["fallen"], (jnp.abs(params["x"]) * state["scale"] > 1.0).astype(jnp.float32))
        noise = 0.01 * jax.random.uniform(key, minval=-1.0)  # it never leaves the band of two standard deviations
        return state | {"fallen": fallen}, {"performance": noise - fallen, "update_norm": update.update_norm}

    return ja.Learner(init, step, name="cliff")


cliff.settings = CliffSettings
learners.register("cliff", cliff)

SPIKE = ja.lr_spike(100.0, onset=ONSET, duration=3)


def lane_rows(learner, ladders, seeds):
    perturbations = [perturbation for ladder in ladders for perturbation in ladder.perturbations]
    return lane_table(ja.audit(learner, perturbations, seeds=seeds, steps=STEPS, settings=WINDOWS).lanes)


def rows_of_seeds(rows, first, count):
    """Returns the rows of consecutive seeds, with the seeds relabelled 0, 1, 2, ..."""
    selected = rows[(rows.seed >= first) & (rows.seed < first + count)]
    return selected.assign(seed=selected.seed - first)


# The statistics.


@pytest.mark.parametrize("n", [3, 8, 11])
def test_the_sign_flip_test_is_scipys_exact_permutation_test(n):
    x = np.random.default_rng(n).normal(0.4, 1.0, n)
    expected = stats.permutation_test(
        (x,), np.mean, permutation_type="samples", alternative="two-sided", n_resamples=np.inf
    )
    assert sign_flips(x).p == pytest.approx(expected.pvalue, rel=1e-12)


def test_the_interval_inverts_the_test():
    x = np.random.default_rng(1).normal(0.3, 1.0, 9)
    result = sign_flips(x)
    inside, outside = 1e-6, -1e-6
    for end, sign in ((result.low, 1), (result.high, -1)):
        assert sign_flips(x - (end + sign * inside)).p > 0.05 - 1e-9
        assert sign_flips(x - (end + sign * outside)).p <= 0.05 + 1e-9


def test_the_interval_has_its_stated_coverage():
    rng = np.random.default_rng(0)
    results = [sign_flips(rng.laplace(2.0, 1.0, 8)) for _ in range(2000)]
    covered = np.mean([result.low <= 2.0 <= result.high for result in results])
    assert results[0].coverage == pytest.approx(1 - 12 / 256)
    assert abs(covered - results[0].coverage) < 4 * np.sqrt(0.05 * 0.95 / 2000)


def test_six_differences_have_a_bounded_interval_and_five_do_not():
    x = np.array([3.0, -1.0, 0.5, 2.0, 4.0, 1.5])
    result = sign_flips(x)
    assert (result.low, result.high, result.n) == (-1.0, 4.0, 6)
    assert np.isnan(sign_flips(x[:5]).low)
    assert sign_flips([]).p == 1


def test_sampled_sign_flips_agree_with_students_t():
    x = np.random.default_rng(2).normal(0.5, 1.0, 40)
    result, t = sign_flips(x), stats.ttest_1samp(x, 0)
    interval = t.confidence_interval(0.95)
    assert result.p == pytest.approx(t.pvalue, abs=0.01)
    assert (result.low, result.high) == pytest.approx((interval.low, interval.high), abs=0.05)


def test_a_detectable_difference_is_detected_four_times_out_of_five():
    rng = np.random.default_rng(3)
    sizes = [sign_flips(rng.normal(0, 1.0, 10)).detectable for _ in range(200)]
    detected = [sign_flips(rng.normal(np.mean(sizes), 1.0, 10)).p <= 0.05 for _ in range(400)]
    assert 0.72 < np.mean(detected) < 0.92


def test_holms_adjustment_is_that_of_the_textbook():
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    assert holm([]).size == 0


# The design.


def test_magnitudes_are_multiples_of_the_margin_or_the_given_magnitude():
    (ladder,) = magnitude_ladders([SPIKE], STEPS)
    assert ladder.centre == "given"
    np.testing.assert_allclose(ladder.magnitudes, np.array(FACTORS) * 100.0)
    (ladder,) = magnitude_ladders([ja.lr_spike(onset=ONSET)], STEPS)
    np.testing.assert_allclose(ladder.magnitudes, np.array(FACTORS) * 10.0)
    margins = ja.margin(cliff(), [SPIKE], seeds=8, steps=STEPS, settings=WINDOWS, criterion="collapse", tolerance=0.05)
    (ladder,) = magnitude_ladders([SPIKE], STEPS, margins)
    assert ladder.centre == "margin"
    np.testing.assert_allclose(ladder.magnitudes, np.array(FACTORS) * margins.table.margin[0], rtol=1e-6)


def test_magnitudes_beyond_the_largest_possible_one_are_tried_once():
    (ladder,) = magnitude_ladders([ja.reward_flip(0.5, onset=ONSET)], STEPS)
    assert max(ladder.magnitudes) == 1.0
    assert len(set(ladder.magnitudes)) == len(ladder.magnitudes) < len(FACTORS)


def test_the_parts_of_a_chain_grow_together():
    (ladder,) = magnitude_ladders([ja.chain(ja.lr_spike(10.0, onset=ONSET), ja.weight_noise(0.1, onset=ONSET))], STEPS)
    assert [[part.magnitude for part in chain.parts] for chain in ladder.perturbations][-1] == pytest.approx(
        [40.0, 0.4]
    )


# Known answers.


@functools.cache
def rows_of_800_seeds():
    """Returns the ladders, and rows of 800 seeds: plain, with half the rate, and with half the clipping threshold."""
    (ladder,) = magnitude_ladders([SPIKE], STEPS)
    ladders = (ladder,)
    half_rate = ja.remedied(cliff(), remedies.learning_rate_scale(0.5))
    return ladders, {
        "plain": lane_rows(cliff(), ladders, 800),
        "rate": lane_rows(half_rate, ladders, 800),
        "clip": lane_rows(cliff(max_norm=0.5), ladders, 800),
    }


@pytest.mark.exhaustive
def test_the_known_ratio_of_thresholds_is_covered_and_detected():
    """Both variants halve an update's length, so that a spike may be twice as high.

    There are 100 repetitions of 8 seeds.
    """
    ladders, all_rows = rows_of_800_seeds()
    covered, detected, closed = {"rate": 0, "clip": 0}, {"rate": 0, "clip": 0}, 0
    for first in range(0, 800, 8):
        rows_by_variant = {name: rows_of_seeds(rows, first, 8) for name, rows in all_rows.items()}
        cells = scoring.gain_table(
            rows_by_variant["plain"], {"rate": rows_by_variant["rate"], "clip": rows_by_variant["clip"]}, ladders
        )
        for row in cells.itertuples():
            has_ratio = not np.isnan(row.ratio)
            closed += has_ratio
            covered[row.variant] += (not has_ratio) or (row.ratio_low <= 2.0 <= row.ratio_high)
            detected[row.variant] += row.difference_low > 0
            assert row.difference > 0
    assert closed > 100  # of 200: brackets are closed in enough seeds
    assert min(covered.values()) >= 90
    assert min(detected.values()) >= 90


@pytest.mark.exhaustive
def test_equal_variants_on_independent_seeds_rarely_differ():
    ladders, all_rows = rows_of_800_seeds()
    differ = 0
    for first in range(0, 400, 4):
        first_rows, second_rows = (
            rows_of_seeds(all_rows["plain"], 2 * first % 800, 8),
            rows_of_seeds(all_rows["plain"], (2 * first + 400) % 800, 8),
        )
        (row,) = scoring.gain_table(first_rows, {"other": second_rows}, ladders).itertuples()
        differ += row.difference_low > 0 or row.difference_high < 0
    assert differ <= 10


def test_seeds_that_collapse_undisturbed_are_counted_without_score():
    (ladder,) = magnitude_ladders([SPIKE], STEPS)
    conditions = condition_indices([ladder])[0]
    names = [str(condition) for condition in conditions]
    never = dict.fromkeys(names, np.inf)
    rows = []
    for seed, times in enumerate(
        [never, never | {"0": 30.0}, never | {"5": 25.0}, never | {"4": 25.0, "5": 25.0}, never | {"3": np.nan}]
    ):
        rows += [{"seed": seed, "condition": name, "collapse_time": times[name]} for name in names]
    (scores,) = scoring.scores(pd.DataFrame(rows), [ladder])
    np.testing.assert_array_equal(scores.survived, [5, np.nan, 4, 3, np.nan])
    np.testing.assert_array_equal(scores.collapsed_undisturbed, [False, True, False, False, False])
    np.testing.assert_allclose(scores.low, [400.0, np.nan, 200.0, 100.0, np.nan])
    np.testing.assert_allclose(scores.high, [np.nan, np.nan, 400.0, 200.0, np.nan])


def test_the_cost_is_the_difference_of_undisturbed_performance():
    (ladder,) = magnitude_ladders([SPIKE], STEPS)

    def rows(undisturbed):
        return pd.DataFrame(
            [
                {"seed": seed, "condition": str(condition), "final_performance": value if condition == 0 else -99.0}
                for seed, value in enumerate(undisturbed)
                for condition in condition_indices([ladder])[0]
            ]
        )

    plain = np.arange(8.0)
    (row,) = scoring.cost_table(rows(plain), {"worse": rows(plain - 2.0)}, [ladder]).itertuples()
    assert (row.performance, row.plain_performance) == (1.5, 3.5)
    assert (row.performance_difference, row.performance_difference_low, row.performance_difference_high) == (-2, -2, -2)
    (row,) = scoring.cost_table(rows(plain), {"lost": rows(np.r_[np.nan, plain[1:] + 1])}, [ladder]).itertuples()
    assert (row.performance_difference, row.performance_seeds) == (1, 7)


def test_a_remedys_activity_is_separate_for_disturbed_and_undisturbed_lanes():
    ladders = magnitude_ladders([SPIKE, ja.weight_noise(0.1, onset=ONSET)], STEPS)
    control, spiked, noisy = 0, range(1, 6), range(6, 11)
    assert [set(conditions) for conditions in condition_indices(ladders)] == [{control, *spiked}, {control, *noisy}]
    rows = pd.DataFrame(
        {
            "seed": seed,
            "condition": str(condition),
            "acted_zclip": (0.1 if condition in spiked else 0.6) + seed,
            "acted_spam": 1.0,
        }
        for seed in (0, 1)
        for condition in (control, *spiked, *noisy)
    )
    rows.loc[rows.condition == str(control), "acted_zclip"] = [0.0, np.nan]
    table = scoring.activity_table({"helped": rows, "other": rows[["seed", "condition"]]}, ladders)
    assert set(table.variant) == {"helped"}
    clipped = table[table.remedy == "zclip"].set_index("perturbation")
    np.testing.assert_allclose(clipped.acted, [0.6, 1.1])
    np.testing.assert_allclose(clipped.acted_undisturbed, [0.0, 0.0])
    assert (table[table.remedy == "spam"].acted == 1.0).all()


def test_a_seed_that_survives_a_harsher_magnitude_has_no_bracket():
    (ladder,) = magnitude_ladders([SPIKE], STEPS)
    times = {0: np.inf, 1: np.inf, 2: 25.0, 3: np.inf, 4: 25.0, 5: 25.0}
    rows = pd.DataFrame([{"seed": 0, "condition": str(c), "collapse_time": t} for c, t in times.items()])
    (scores,) = scoring.scores(rows, [ladder])
    assert scores.survived[0] == 2
    assert np.isnan([scores.low[0], scores.high[0]]).all()


def test_significant_gains_are_at_most_twelve_the_clearest_first():
    cells = pd.DataFrame(
        {
            "difference_low": [0.1] * 14 + [-1.0],
            "difference_high": [1.0] * 15,
            "difference": np.r_[np.linspace(1, 2, 14), 3.0],
            "p": [0.02] * 13 + [0.001, 0.5],
        }
    )
    gains = scoring.significant_gains(cells)
    assert len(gains) == 12
    assert gains.index[0] == 13
    assert 14 not in gains.index
    assert list(gains.difference[1:]) == sorted(gains.difference[1:], reverse=True)


def test_time_per_step_is_the_median_ratio_with_its_order_statistics():
    plain = np.array([1.0, 2.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    result = scoring.relative_step_time(plain * np.linspace(1.0, 2.0, 11), plain)
    assert result["step_time"] == pytest.approx(1.5)
    assert (result["step_time_low"], result["step_time_high"]) == pytest.approx((1.1, 1.9))


def test_each_variant_is_timed_in_turns_beside_the_plain_learner(monkeypatch):
    class Timer:
        """A timer that measures 1, 2, 3, ... times its grid's number."""

        def __init__(self, grid):
            self.grid, self.calls = grid, 0

        def measure(self):
            self.calls += 1
            return self.grid * self.calls

    monkeypatch.setattr(scoring, "_StepTimer", Timer)
    table = scoring.time_steps(10.0, {"a": 1.0, "b": 2.0}, turns=3)
    assert list(table.variant) == ["a"] * 3 + ["b"] * 3
    assert list(table.seconds) == [2, 3, 4, 4, 6, 8]  # the first measurement of each pair is a warm-up
    assert list(table.plain_seconds) == [20, 30, 40, 60, 70, 80]


# An entire comparison.


@functools.cache
def comparison():
    variants = {
        "half": remedies.learning_rate_scale(0.5),
        "double": [remedies.learning_rate_scale(2.0)],
        "nothing": remedies.learning_rate_scale(1.0),
        "other clip": cliff(max_norm=0.5),
    }
    return ja.compare(cliff(), variants, [SPIKE], seeds=8, fresh=16, steps=STEPS, settings=WINDOWS, turns=3)


def test_a_comparison_reports_help_harm_and_no_difference():
    result = comparison()
    gains = {row["variant"]: row for row in result.bought.to_dict("records")}
    assert gains["half"]["difference"] > 0 > gains["double"]["difference"]
    assert gains["nothing"]["difference"] == 0
    confirmed = result.confirmed.set_index("variant")
    assert set(confirmed.index) == {"half", "double", "other clip"}
    assert confirmed.confirmed.all()
    assert (confirmed.seeds == 16).all()
    assert (result.paid.performance_difference.abs() < 0.02).all()
    assert result.paid.step_time.notna().all()
    text = str(result)
    activity = result.acted.set_index("variant")
    assert dict(activity.acted) == {"half": 1.0, "double": 1.0, "nothing": 0.0}
    assert result.json()["tried"] == [
        {
            "perturbation": "lr_spike",
            "onset": ONSET,
            "centre": "margin",
            "magnitudes": list(result.ladders[0].magnitudes),
        }
    ]
    for words in (
        "helps (",
        "harms (",
        "no difference detected",
        "half",
        "time per step",
        "acted: ",
        "magnitudes tried",
    ):
        assert words in text


def test_a_variant_with_another_structure_is_reported_as_such():
    assert comparison().structures == ("other clip",)


@pytest.mark.exhaustive
def test_confirmation_uses_other_seeds(folder):
    assert fresh_seeds([3, 9, 1], 2) == [10, 11]
    for name in ("plain", "half-the-rate"):
        metrics = pd.read_csv(folder / "out" / "confirmation" / name / "metrics.csv")
        assert set(metrics.seed) == set(range(8, 16))
    result = comparison()
    assert set(result.lanes["plain"].seed) == set(range(8))
    assert result.json()["confirmed"][0]["seeds"] == 16


@pytest.mark.parametrize(
    ("variants", "options", "words"),
    [
        ({}, {}, "there are no variants"),
        ([remedies.nonfinite_skip()], {}, "variants must be a mapping from names"),
        ({"plain": remedies.nonfinite_skip()}, {}, "cannot be called 'plain'"),
        ({"a": remedies.clip_higher()}, {}, "variant 'a': remedy 'clip_higher' acts at site 'ratio_clip'"),
        ({"a": remedies.critic_layer_norm()}, {}, "'cliff' has none that can be changed"),
        ({"a": []}, {}, "needs at least one remedy"),
        ({"a": remedies.learning_rate_scale()}, {"centre": "median"}, "centre must be 'margin' or 'given'"),
        ({"a": remedies.learning_rate_scale()}, {"fresh": -1}, "fresh must be a number of seeds"),
    ],
)
def test_an_impossible_comparison_is_refused_in_one_sentence(variants, options, words):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        ja.compare(cliff(), variants, [SPIKE], steps=STEPS, **options)
    assert "\n" not in str(error.value)


# The command.

SPEC = """
[audit]
name = "cliffs"
seeds = 8
steps = 60
[learner]
kind = "cliff"
[metrics]
window = 10
hold = 10
[compare]
centre = "given"
fresh = 8
[[variant]]
name = "half the rate"
[[variant.remedy]]
kind = "learning_rate_scale"
strength = 0.5
[[variant]]
name = "half the clip"
learner = { max_norm = 0.5 }
[[perturbation]]
kind = "lr_spike"
onset = 20
duration = 3
magnitude = 100
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    (root / "spec.toml").write_text(SPEC)
    assert main(["compare", str(root / "spec.toml"), "-o", str(root / "out")]) == 0
    return root


@pytest.mark.exhaustive
def test_a_run_of_a_comparison_begins_without_the_programs_of_earlier_ones(tmp_path, monkeypatch):
    kept, train = [], variants_folder.durable.run

    def run(*arguments):
        kept.append(engine._compiled.cache_info().currsize)
        train(*arguments)

    monkeypatch.setattr(variants_folder.durable, "run", run)
    monkeypatch.setattr(variants_folder, "_step_times", lambda *arguments: None)
    engine.forget_programs()
    (tmp_path / "spec.toml").write_text(SPEC.replace("fresh = 8", "fresh = 0"))
    assert main(["compare", str(tmp_path / "spec.toml"), "-o", str(tmp_path / "out")]) == 0
    assert kept == [0, 0, 0]


@pytest.mark.exhaustive
def test_the_command_writes_runs_tables_and_a_page(folder, capsys):
    out = folder / "out"
    for name in ("variants/plain", "variants/half-the-rate", "variants/half-the-clip", "confirmation/plain"):
        assert (out / name / "spec.toml").exists(), name
        assert (out / name / "metrics.csv").exists(), name
    bought = pd.read_csv(out / "bought.csv")
    assert list(bought.variant) == ["half the rate", "half the clip"]
    assert (bought.difference > 0).all()
    assert pd.read_csv(out / "confirmed.csv").confirmed.all()
    (acted,) = pd.read_csv(out / "acted.csv").itertuples()
    assert (acted.variant, acted.remedy, acted.acted) == ("half the rate", "learning_rate_scale", 1.0)
    page = (out / "report.html").read_text()
    assert "half the rate" in page
    assert "confirmed on fresh seeds" in page
    assert main(["report", str(out)]) == 0
    heading = re.compile(r"<th[^>]*>(?:<button[^>]*>)?difference by the plain learner")
    assert len(heading.findall(page)) == 2, "of the gains, and of those on fresh seeds"
    # Tables of earlier versions lack these columns.
    earlier = folder / "earlier"
    shutil.copytree(out, earlier)
    for name in ("bought.csv", "confirmed.csv"):
        table = pd.read_csv(out / name)
        table.drop(columns=[c for c in table if "level" in c]).to_csv(earlier / name, index=False)
    assert main(["report", str(earlier)]) == 0
    assert not heading.search((earlier / "report.html").read_text())


@pytest.mark.exhaustive
def test_the_command_first_searches_the_plain_learners_margin(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC.replace('centre = "given"', "").replace("fresh = 8", "fresh = 0"))
    assert main(["compare", str(tmp_path / "spec.toml"), "-o", str(tmp_path / "out")]) == 0
    margin = pd.read_csv(tmp_path / "out" / "pilot" / "margins" / "margins.csv").margin[0]
    magnitudes = pd.read_csv(tmp_path / "out" / "variants" / "plain" / "metrics.csv").magnitude.dropna().unique()
    np.testing.assert_allclose(sorted(magnitudes), np.array(FACTORS) * margin, rtol=1e-5)
    assert (pd.read_csv(tmp_path / "out" / "bought.csv").centre == "margin").all()


@pytest.mark.exhaustive
def test_the_command_continues_a_comparison_and_prints_json(folder, capsys):
    before = {path: path.stat().st_mtime_ns for path in (folder / "out").glob("*/*/metrics.csv")}
    assert main(["compare", str(folder / "spec.toml"), "-o", str(folder / "out"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert {row["variant"] for row in printed["bought"]} == {"half the rate", "half the clip"}
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "out").glob("*/*/metrics.csv")}


@pytest.mark.exhaustive
@pytest.mark.parametrize("run_path", ["variants/half-the-rate", "confirmation/plain"])
def test_a_killed_comparison_resumes_to_the_same_tables(folder, tmp_path, run_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    arguments = ["compare", str(tmp_path / "spec.toml"), "-o", str(tmp_path / "out")]
    path = [str(HELPERS), str(HELPERS.parent / "runs")]
    code = f"import sys; sys.path[:0] = {path!r}; import test_compare; test_compare.main({arguments!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "out" / run_path / "spec.toml").exists():
        assert process.poll() is None, "the process ended before it could be killed"
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "out" / run_path / "metrics.csv").exists()
    assert main(arguments) == 0
    for name in ("bought.csv", "confirmed.csv", "acted.csv"):
        assert (tmp_path / "out" / name).read_text() == (folder / "out" / name).read_text(), name


@pytest.mark.exhaustive
def test_a_stored_spec_is_read_unchanged(folder):
    stored = (folder / "out" / "compare.toml").read_text()
    assert parse(stored).to_toml() == stored == parse(SPEC).to_toml()


@pytest.mark.exhaustive
def test_another_comparison_in_the_same_folder_is_refused(folder, capsys):
    (folder / "other.toml").write_text(SPEC.replace("strength = 0.5", "strength = 0.25"))
    assert main(["compare", str(folder / "other.toml"), "-o", str(folder / "out")]) == 2
    assert "holds another comparison" in capsys.readouterr().err


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Interrupted])
def test_an_interrupted_comparison_states_how_to_resume_it(stop, tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise stop

    monkeypatch.setattr("jaxaudit.runs.variants.folder._run_comparison", interrupt)
    (tmp_path / "spec.toml").write_text(SPEC)
    assert main(["compare", str(tmp_path / "spec.toml"), "-o", str(tmp_path / "out")]) == 130
    assert "the same command resumes the comparison" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ((5.0, 5.0), "both survive every magnitude: too mild to tell, or there is no performance to lose"),
        ((0.0, 0.0), "both survive no magnitude: too harsh to tell"),
        ((2.0, 2.0), "no difference detected"),
    ],
)
def test_equal_scores_at_either_end_of_the_magnitudes_are_no_null_result(scores, words):
    row = {"variant": "a", "perturbation": "b", "seeds": 8, "difference": 0.0, "difference_low": 0.0, "magnitudes": 5}
    row |= {"score": scores[0], "plain_score": scores[1], "difference_high": 0.0, "detectable": np.nan}
    assert verdict(row, pd.DataFrame(columns=["variant", "perturbation"]), 0.95) == words


VARIANT = SPEC.index("[[variant]]")
INVALID_SPECS = {
    "too short": (
        SPEC.replace("steps = 60", "steps = 29"),
        "only 9 steps follow the onset of lr_spike, fewer than hold",
    ),
    "no variants": (SPEC[:VARIANT] + SPEC[SPEC.index("[[perturbation]]") :], "there is no table [[variant]]"),
    "misspelt variants": (
        SPEC.replace("[[variant]]", "[[variants]]", 9).replace("[[variant.", "[[variants."),
        "[[variants]]?)",
    ),
    "one bracket": (
        SPEC.replace('[[variant]]\nname = "half the clip"', '[variant2]\nname = "x"'),
        "unknown key 'variant2'",
    ),
    "no perturbations": (SPEC[: SPEC.index("[[perturbation]]")], "there is no table [[perturbation]]"),
    "no name": (SPEC.replace('name = "half the rate"\n', ""), "'name' is missing"),
    "twice": (SPEC.replace("half the clip", "Half the rate"), "cannot be called 'Half the rate'"),
    "plain": (SPEC.replace("half the clip", "plain"), "cannot be called 'plain'"),
    "nothing changes": (SPEC.replace("learner = { max_norm = 0.5 }\n", ""), "has neither a [[variant.remedy]] nor"),
    "unknown remedy": (
        SPEC.replace("learning_rate_scale", "learning_rate_scales"),
        "did you mean 'learning_rate_scale'",
    ),
    "a perturbation": (
        SPEC.replace('kind = "learning_rate_scale"', 'kind = "lr_spike"'),
        "'lr_spike' is a perturbation",
    ),
    "a remedy as a perturbation": (
        SPEC.replace('kind = "lr_spike"\nonset = 20\nduration = 3\nmagnitude = 100', 'kind = "l2_init"'),
        "'l2_init' is a remedy",
    ),
    "strength in words": (SPEC.replace("strength = 0.5", 'strength = "half"'), "strength must be a number"),
    "strength out of range": (SPEC.replace("strength = 0.5", "strength = -0.5"), "is outside its range 0 to inf"),
    "a remedy that does not fit": (SPEC.replace("learning_rate_scale", "clip_higher"), "acts at site 'ratio_clip'"),
    "another kind of learner": (SPEC.replace("{ max_norm", '{ kind = "ppo", max_norm'), "not another kind"),
    "unknown setting": (SPEC.replace("{ max_norm", "{ max_norms"), "unknown key 'max_norms'"),
    "unknown key": (SPEC.replace("fresh = 8", "freshly = 8"), "unknown key 'freshly'"),
    "unknown centre": (SPEC.replace('centre = "given"', 'centre = "median"'), 'centre must be "margin" or "given"'),
    "fresh": (SPEC.replace("fresh = 8", "fresh = -8"), "fresh must be from 0"),
    "learner is no table": (SPEC.replace("{ max_norm = 0.5 }", "3"), "learner must be a table"),
    "a remedy twice": (
        SPEC.replace("strength = 0.5", 'strength = 0.5\n[[variant.remedy]]\nkind = "learning_rate_scale"'),
        "remedy 'learning_rate_scale' is there twice",
    ),
}


@pytest.mark.parametrize("name", INVALID_SPECS)
def test_an_invalid_spec_is_refused_in_one_sentence_without_a_folder(name, tmp_path, capsys):
    text, words = INVALID_SPECS[name]
    assert text != SPEC
    (tmp_path / "spec.toml").write_text(text)
    assert main(["compare", str(tmp_path / "spec.toml"), "-o", str(tmp_path / "out")]) == 2
    sentence = capsys.readouterr().err.strip()
    assert words in sentence
    assert sentence.count("\n") == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", sorted((EXPERIMENTS / "remedies").glob("*.toml")))
def test_specs_of_the_experiments_are_valid(path):
    assert load(path).variants
