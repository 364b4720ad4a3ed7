"""Sampled held-out dialogues as `jaxaudit sample` prints them and the report shows them, and the first warning signals.

A channel's first signal is the step at which it first leaves the range of the undisturbed lanes.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import quadratic  # noqa: F401  registers the learner
import xarray as xr
from cli_errors import cli_error
from small_runs import spec_header
from synthetic_runs import condition_table, simulate, without_scripts, write_run

from jaxaudit import report
from jaxaudit.analysis.run_reader import load, nearest_step
from jaxaudit.cli import main as cli
from jaxaudit.core.learner import Channel
from jaxaudit.monitoring.telemetry import StepwiseStats
from jaxaudit.report import dialogue
from jaxaudit.report.dialogue import earliest, first_signals
from jaxaudit.runtime import registry

pytestmark = pytest.mark.exhaustive

WORDS = ["a", "b", "call", "<script>", "end"]
ROLES = ["own", "prompt", "tool", "end"]
EVERY, SEEDS, STEPS, SLOTS, ONSET = 5, 4, 400, 6, 120
KINDS = {"lr_spike": ("optimization", (3.0, 100.0), 14.0)}


@pytest.fixture(scope="module")
def dialogue_run(tmp_path_factory):
    """A run of 4 seeds and 3 conditions with dialogues sampled every 5 steps: its folder, performance and telemetry."""
    folder, conditions = tmp_path_factory.mktemp("runs") / "rows", condition_table(KINDS)
    performance = simulate(conditions, SEEDS, STEPS)
    write_run(folder, conditions, performance=performance, name="hop rows", channels=("gradient_norm",))
    lanes = (SEEDS, len(conditions), STEPS)
    rng = np.random.default_rng(3)
    tokens = rng.integers(0, len(WORDS), (*lanes, 2, SLOTS)).astype(np.int32)
    roles = np.broadcast_to(np.array([1, 0, 2, 0, 0, 3], np.int8), tokens.shape)
    log_probs = np.where(roles == 0, -rng.exponential(1.0, tokens.shape), 0).astype(np.float32)
    reward = rng.integers(0, 2, (*lanes, 2)).astype(np.float32)
    entropy = np.stack([np.full(lanes, 0.5), 0.1 * rng.random(lanes)], -1).astype(np.float32)
    entropy[:, 2, ONSET + 7 :, 0] += 1.0  # the text stratum of the stronger spike
    entropy[..., 0] += 0.01 * rng.random(lanes)
    dims, row_dims = ("seed", "condition", "step"), ("shown", "slot")
    attributes = Channel(every=EVERY, monitored=False).attributes
    kl = rng.random((*lanes, 2)).astype(np.float32)
    estimate = np.stack([kl + 0.25, kl], -1)
    added = {
        "shown_token": (
            (*dims, *row_dims),
            tokens,
            Channel(every=EVERY, monitored=False, words=tuple(WORDS)).attributes,
        ),
        "shown_role": ((*dims, *row_dims), roles, Channel(every=EVERY, monitored=False, words=tuple(ROLES)).attributes),
        "shown_log_probability": ((*dims, *row_dims), log_probs, attributes),
        "shown_reward": ((*dims, "shown"), reward, attributes),
        "entropy": ((*dims, "stratum"), entropy),
        "kl": ((*dims, "stratum"), kl),
        "kl_estimate": ((*dims, "stratum", "estimator"), estimate.astype(np.float32)),
    }
    data = xr.Dataset(added, {"stratum": ["text", "tool"], "estimator": ["k1", "k2"]})
    data.to_zarr(folder / "telemetry.zarr", mode="a")
    return folder, performance, data


@pytest.fixture(autouse=True)
def _keep_jax_settings(monkeypatch):
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)


def sample_output(capsys, folder, *options):
    assert cli.main(["sample", str(folder), *options]) == 0
    return capsys.readouterr().out


def test_sample_prints_policy_tokens_apart_from_prompt_and_tool_tokens(dialogue_run, capsys):
    folder, _, data = dialogue_run
    text = sample_output(capsys, folder, "--seed", "2", "--condition", "lr_spike 100", "--step", "129")
    lines = text.splitlines()
    assert lines[0] == "hop rows: seed 2, lr_spike 100, step 129, 9 after the onset"
    lane = data.isel(seed=2, condition=2, step=129, shown=0)
    words = [WORDS[token] for token in lane.shown_token.values]
    log_probs = [f"{x:.2f}" for x in lane.shown_log_probability.values]
    policy_positions = [1, 3, 4]
    total = lane.shown_log_probability.values[policy_positions].sum()
    assert lines[2] == (
        f"row 1: reward {int(lane.shown_reward)}, 3 generated tokens with a total log-probability of {total:.2f}"
    )
    turns = [(line.split()[0], line.split()[1:]) for line in lines[3:9]]
    assert turns == [
        ("prompt", [words[0]]),
        ("policy", [words[1]]),
        (log_probs[1], []),
        ("tool", [words[2]]),
        ("policy", [words[3], words[4]]),
        (log_probs[3], [log_probs[4]]),
    ]
    for above, below in ((lines[4], lines[5]), (lines[7], lines[8])):  # each log-probability stands below its token
        assert above.index(above.split()[1]) == below.index(below.split()[0])


def test_sample_prints_the_controls_last_step_by_default(dialogue_run, capsys):
    folder, *_ = dialogue_run
    text = sample_output(capsys, folder)
    assert text.startswith("hop rows: seed 0, control, step 399\n")
    assert text.count("row ") == 2
    assert sample_output(capsys, folder, "--condition", "0") == text


@pytest.mark.parametrize(("requested", "measured"), [(6, 4), (7, 9), (0, 4), (9, 9)])
def test_sample_shows_the_nearest_measured_step_and_says_so(dialogue_run, capsys, requested, measured):
    folder, *_ = dialogue_run
    heading = sample_output(capsys, folder, "--step", str(requested)).splitlines()[0]
    note = "" if requested == measured else f" (the measured step nearest to {requested})"
    assert heading == f"hop rows: seed 0, control, step {measured}{note}"


def test_nearest_step_prefers_the_later_of_two_but_not_beyond_the_end(dialogue_run):
    data = dialogue_run[2]["shown_token"].copy()
    data.attrs["every"] = 2
    assert nearest_step(xr.Dataset({"shown_token": data}), 2, 9) == 3
    assert nearest_step(xr.Dataset({"shown_token": data}), 4, 4) == 3
    with pytest.raises(ValueError, match="measured every 2 steps, and none is up to step 0"):
        nearest_step(xr.Dataset({"shown_token": data}), 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "9"], "unknown seed 9; allowed: 0, 1, 2, 3"),
        (["--condition", "lr_spikes 3"], "unknown condition 'lr_spikes 3' (did you mean 'lr_spike 3'?)"),
        (["--condition", "7"], "unknown condition '7'"),
        (["--step", "400"], "step must be from 0 to 399, the last that 'control' was trained to, not 400"),
        (["--step", "-1"], "step must be from 0 to 399"),
        (["--seed", "one"], "argument --seed: invalid int value: 'one'"),
    ],
)
def test_sample_refuses_unknown_seeds_conditions_and_steps(dialogue_run, capsys, options, message, monkeypatch):
    monkeypatch.chdir(dialogue_run[0].parent)
    assert message in cli_error(capsys, "sample", "rows", *options)


def test_sample_refuses_runs_without_dialogues(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "plain", condition_table({}), seeds=2)
    assert 'a dialogue does, with telemetry = "full"' in cli_error(capsys, "sample", "plain")
    assert "nowhere: there is no such folder" in cli_error(capsys, "sample", "nowhere")


def test_the_report_shows_dialogues_tokens_and_first_signals(dialogue_run, monkeypatch):
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    folder, performance, data = dialogue_run
    page = without_scripts(report.build(folder).read_text())
    rows = page.split('id="rows"')[1].split("</section>")[0]
    seed = int(np.argsort(performance[:, 2, -1])[1])
    assert f"<h3>lr_spike 100, seed {seed}</h3>" in rows
    lane_html = rows.split(f"<h3>lr_spike 100, seed {seed}</h3>")[1]
    lowest = ONSET + int(np.argmin(performance[seed, 2, ONSET:]))
    steps = [int(text.split(",")[0]) for text in lane_html.split(": step ")[1:]]
    assert steps == [119, steps[1], 399]
    assert abs(steps[1] - lowest) <= EVERY // 2
    last = data.isel(seed=seed, condition=2, step=399, shown=0)
    token, log_prob = WORDS[int(last.shown_token[1])], float(last.shown_log_probability[1])
    shade = sum(np.exp(log_prob) < end for end in (0.9, 0.5, 0.1, 0.01))
    text = token.replace("<", "&lt;").replace(">", "&gt;")
    end = lane_html.split("at the end")[1]
    assert f"<b>{int(last.shown_reward)}</b>" in end
    assert f'<span class="p{shade}" title="{log_prob:.3f}">{text}</span>' in end
    assert 'class="given tool"' in end
    assert "<script>" not in rows
    signals = page.split('id="signals"')[1].split("</section>")[0]
    assert "entropy[text]" in signals
    assert 'id="tokens"' in page


def test_the_report_compares_kl_estimators_with_the_exact_kl(dialogue_run, monkeypatch):
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    page = report.build(dialogue_run[0]).read_text()
    assert "k1 minus the exact KL (text)" in page
    assert "k2 minus the exact KL (text)" not in page  # k2 equals the exact KL in this run
    assert "entropy (tool)" in page


def test_without_tools_all_policy_tokens_are_shown_as_text(dialogue_run):
    data = dialogue_run[2].isel(stratum=[0]).assign_coords(stratum=["all"])
    series = dict(dialogue._drawn_series(data))
    assert "k1 minus the exact KL (text)" in series
    np.testing.assert_array_equal(series["entropy (text)"], data["entropy"].sel(stratum="all"))


def test_the_first_signal_is_at_the_planted_step(dialogue_run):
    run = load(dialogue_run[0])
    signals = first_signals(run)
    rows_by_channel = signals[signals.condition == "lr_spike 100"].set_index("channel")
    times = run.metrics[run.metrics.condition == "lr_spike 100"].collapse_time.to_numpy()
    assert np.isfinite(times).all()
    planted = rows_by_channel.loc["entropy[text]"]
    assert (planted.collapsed, planted.after_onset) == (SEEDS, 7)
    assert planted.warned == (times >= ONSET + 7).sum()
    assert planted.lead == np.median(times - ONSET - 7)
    assert "layer_gradient_norm[0]" not in rows_by_channel.index  # it is constant
    assert not any(name.startswith("shown_") for name in rows_by_channel.index)
    first = earliest(signals, 2)
    assert len(first) == 2 * signals.condition.nunique()
    assert list(first.condition.unique()) == list(signals.condition.unique())
    assert not any(rows.channel.str.partition("[")[0].duplicated().any() for _, rows in first.groupby("condition"))


def test_limits_come_from_each_control_scored_by_the_others(dialogue_run):
    """Recomputes the limit of one channel in float64, with each control scored by the statistics of the others."""
    run = load(dialogue_run[0])
    table = first_signals(run)
    control = run.telemetry["performance"].values[:, 0].astype(float)
    disturbed = run.telemetry["performance"].values[:, 2].astype(float)
    scores, limit = [], 0.0
    for seed in range(SEEDS):
        others = StepwiseStats.fit(np.delete(control, seed, 0))
        limit = max(limit, np.abs((control[seed] - others.mean) / others.std)[ONSET:].max())
        scores.append(np.abs((disturbed[seed] - others.mean) / others.std)[ONSET:])
    first = [int(np.argmax(score > limit)) for score in scores]
    row = table[(table.condition == "lr_spike 100") & (table.channel == "performance")].iloc[0]
    assert row.after_onset == np.median(first)
    assert row.score == pytest.approx(np.median([s[f] for s, f in zip(scores, first, strict=True)]) / limit, rel=1e-5)


@pytest.mark.exhaustive
def test_a_learners_remarks_are_printed_stored_and_reported(tmp_path, monkeypatch, capsys):
    """`remarks` gets the first chunk of the undisturbed lanes; its sentences are printed, stored and reported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    received = []

    def remarks(telemetry):
        received.append(telemetry["performance"])
        return ["it <begins> badly, so read on"]

    factory = registry.learners["quadratic"]

    def remarking(task, **settings):
        return dataclasses.replace(factory(task, **settings), remarks=remarks)

    monkeypatch.setitem(registry.learners._entries, "remarking", remarking)
    spec = (
        spec_header(learner='kind = "remarking"')
        + '[run]\nchunk = 4\n[[perturbation]]\nkind = "lr_spike"\nonset = 10\n'
    )
    Path("spec.toml").write_text(spec)
    assert cli.main(["run", "spec.toml"]) == 0
    assert capsys.readouterr().err.count("note: it <begins> badly, so read on\n") == 1
    assert len(received) == 2
    assert received[0].shape == (3, 4)
    np.testing.assert_array_equal(*received)
    data = load(Path("runs/small")).telemetry["performance"]
    np.testing.assert_array_equal(received[0], data.values[:, 0, :4])
    assert json.loads(Path("runs/small/environment.json").read_text())["remarks"] == ["it <begins> badly, so read on"]
    assert "<li>It &lt;begins&gt; badly, so read on.</li>" in Path("runs/small/report.html").read_text()
