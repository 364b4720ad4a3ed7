"""Verdicts of `jaxaudit monitor` on logs of runs that break, restart, or log other channels, alone and with others."""

import json
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from log_files import json_lines, user_error, write_file

from jaxaudit.monitoring.monitor_logs import Options, monitor_logs

STEPS = 60


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)


def rows(seed, steps=range(STEPS), **changes):
    """The rows of a run: a falling loss, a norm, and a validation loss at every tenth step."""
    random = np.random.default_rng(seed)
    loss, norm, validation = random.normal(size=(3, STEPS)) * 0.05
    loss += 1 + np.exp(-np.arange(STEPS) / 20)
    result = []
    for k in steps:
        row = {"step": 10 * k, "loss": loss[k], "norm": 1 + norm[k]}
        if k % 10 == 9:
            row["val"] = 2 + validation[k]
        result.append(row | {name: change(k, row) for name, change in changes.items()})
    return result


def log(folder, name, entries):
    return write_file(folder, json_lines(*entries), f"{name}.jsonl")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clean")
    return [log(folder, f"clean{seed}", rows(seed)) for seed in range(20)]


def monitor_output(out, files, clean, **options):
    """Returns the verdicts of the command by the run's name, and its notes."""
    messages = []
    monitor_logs(files, clean, out, Options(**options), messages.append)
    notes = [line.removeprefix("note: ") for line in messages if line.startswith("note: ")]
    verdicts = dict(line.rsplit("/", 1)[-1].split(": ", 1) for line in messages if not line.startswith("note: "))
    return {
        name: re.sub(r"^no alarm, largest score \S+ of \S+", "no alarm", text) for name, text in verdicts.items()
    }, notes


def test_a_run_without_an_alarm_has_its_largest_score_beside_the_threshold(clean, tmp_path):
    lines = []
    monitor_logs([clean[0]], clean[1:], tmp_path / "out", Options(), lines.append)
    largest, limit = map(float, re.search(r"clean0.jsonl: no alarm, largest score (\S+) of (\S+)$", lines[-1]).groups())
    scores = xr.open_zarr(tmp_path / "out" / "monitored.zarr")
    assert largest == pytest.approx(float(scores["score"].max()), abs=0.005)
    stored = json.loads((tmp_path / "out" / "monitored.json").read_text())["threshold"]
    assert largest < limit == pytest.approx(stored, abs=0.005)


def test_non_finite_values_are_alarms_that_name_step_and_channels(clean, tmp_path):
    files = [
        log(
            tmp_path,
            "all",
            rows(
                100,
                loss=lambda k, row: np.nan if k >= 31 else row["loss"],
                norm=lambda k, row: np.nan if k >= 31 else row["norm"],
            ),
        ),
        log(tmp_path, "one", rows(101, norm=lambda k, row: np.inf if k == 17 else row["norm"])),
        log(tmp_path, "text", rows(102, loss=lambda k, row: "OVERFLOW" if k == 40 else row["loss"])),
        log(tmp_path, "up", rows(103, loss=lambda k, row: row["loss"] + (k >= 30))),
        log(tmp_path, "sound", rows(110)),
    ]
    verdicts, notes = monitor_output(tmp_path / "out", files, clean)
    assert verdicts["all.jsonl"] == "alarm at step 310: loss, norm are NaN"
    assert verdicts["one.jsonl"] == "alarm at step 170: norm is infinite"
    assert verdicts["text.jsonl"] == "alarm at step 400: loss is NaN"
    assert re.match(r"alarm at step 3[01]0, furthest: loss ", verdicts["up.jsonl"])
    assert verdicts["sound.jsonl"] == "no alarm"
    assert any("line 41 has loss 'OVERFLOW'" in note for note in notes)
    alarms = pd.read_csv(tmp_path / "out" / "alarms.csv")
    assert list(alarms.kind[:3]) == ["not finite"] * 3
    assert np.isinf(alarms.score[:3]).all()
    both = log(tmp_path, "both", rows(104, loss=lambda k, row: np.nan if k == 50 else row["loss"] + (k >= 30)))
    verdicts, _ = monitor_output(tmp_path / "later", [both], clean)
    assert re.match(r"alarm at step 3[01]0, furthest: loss .*; alarm at step 500: loss is NaN", verdicts["both.jsonl"])
    stored_notes = json.loads((tmp_path / "later" / "monitored.json").read_text())["notes"]
    assert any("both.jsonl: loss is NaN at step 500, after the alarm" in note for note in stored_notes)


def test_a_verdict_does_not_depend_on_the_other_runs(clean, tmp_path):
    broken = log(
        tmp_path, "bad", rows(100, val=lambda k, row: row["val"] + 3 if k >= 29 and "val" in row else row.get("val"))
    )
    unfinished = log(tmp_path, "begun", rows(101, range(8)))
    without_loss = log(tmp_path, "other", [{"step": row["step"], "norm": row["norm"]} for row in rows(102)])
    verdicts_alone, _ = monitor_output(tmp_path / "alone", [broken], clean)
    verdicts_beside, notes = monitor_output(tmp_path / "beside", [without_loss, broken, unfinished], clean)
    assert re.match(r"alarm at step (290|3[01]0), furthest: val ", verdicts_alone["bad.jsonl"])
    assert verdicts_beside["bad.jsonl"] == verdicts_alone["bad.jsonl"]
    assert verdicts_beside["begun.jsonl"] == verdicts_beside["other.jsonl"] == "no alarm"
    assert any(note.endswith("not read, missing: val") and "begun" in note and "other" in note for note in notes)
    assert any(note.endswith("not read, missing: loss") and "begun" not in note for note in notes)
    assert (tmp_path / "beside" / "monitored.zarr").is_dir()


def test_stored_scores_have_one_threshold_for_all_channel_sets(clean, tmp_path):
    """Each set of channels has a separate monitor and threshold, but stored scores have one common threshold."""
    raised = [log(tmp_path, f"raised{k}", rows(100 + k, loss=lambda k, row: row["loss"] + (k >= 30))) for k in range(3)]
    without_norm = [{name: value for name, value in row.items() if name != "norm"} for row in rows(103)]
    for row in without_norm:
        row["loss"] += row["step"] >= 300
    files = [*raised, log(tmp_path, "without", without_norm)]
    monitor_output(tmp_path / "out", files, clean)
    monitor_output(tmp_path / "alone", files[-1:], clean)
    excess = []
    for folder in (tmp_path / "out", tmp_path / "alone"):
        threshold = json.loads((folder / "monitored.json").read_text())["threshold"]
        alarms = pd.read_csv(folder / "alarms.csv").set_index("run")
        stored = xr.open_zarr(folder / "monitored.zarr").score - threshold
        for run in alarms.index:
            first = int((stored.sel(run=run) > 0).argmax())
            assert int(stored.step[first]) == alarms.step[run]
            np.testing.assert_allclose(stored.sel(run=run)[first], alarms.score[run] - threshold, rtol=1e-4)
        excess.append(stored.sel(run=str(files[-1])))
    np.testing.assert_allclose(*excess, rtol=1e-3, atol=1e-4)


def test_with_under_four_clean_runs_only_certain_alarms_are_raised(clean, tmp_path):
    broken = log(tmp_path, "broken", rows(100, loss=lambda k, row: np.nan if k == 20 else row["loss"]))
    silent = log(
        tmp_path,
        "silent",
        [row if row["step"] < 150 else {n: v for n, v in row.items() if n != "val"} for row in rows(101)],
    )
    for count in (2, 3):
        verdicts, notes = monitor_output(tmp_path / f"out{count}", [broken, silent, clean[5]], clean[:count])
        assert verdicts["broken.jsonl"] == "alarm at step 200: loss is NaN"
        assert verdicts["silent.jsonl"] == "alarm at step 200: val is silent"
        assert verdicts["clean5.jsonl"] == "no alarm"
        assert any("too few to fit a monitor to, which takes 4" in note for note in notes)
        assert json.loads((tmp_path / f"out{count}" / "monitored.json").read_text())["alpha"] is None
    assert "two earlier runs or more, not 1" in user_error(monitor_output, tmp_path / "out1", [broken], clean[:1])


def test_every_attempt_has_a_verdict(clean, tmp_path):
    """A restart does not hide a collapse before it."""
    first = rows(100, range(40), loss=lambda k, row: row["loss"] + (k >= 30))
    restarted = log(tmp_path, "restarted", [*first, *rows(100, range(25, STEPS))])
    verdicts, notes = monitor_output(tmp_path / "out", [restarted], clean)
    assert re.match(r"alarm at step 3[01]0, furthest: loss", verdicts["restarted.jsonl, attempt 1 of 2"])
    assert verdicts["restarted.jsonl, attempt 2 of 2"] == "no alarm"
    assert any("goes back from step 390 to 250" in note for note in notes)


def test_each_run_in_a_file_has_a_verdict(clean, tmp_path):
    entries = [row | {"seed": seed} for seed in (7, 8) for row in rows(seed + 100)]
    entries += [row | {"seed": 9, "loss": row["loss"] + (row["step"] >= 300)} for row in rows(109)]
    verdicts, _ = monitor_output(tmp_path / "out", [log(tmp_path, "seeds", entries)], clean)
    assert verdicts["seeds.jsonl (seed 7)"] == verdicts["seeds.jsonl (seed 8)"] == "no alarm"
    assert re.match(r"alarm at step 3[01]0", verdicts["seeds.jsonl (seed 9)"])


def test_a_broken_calibration_run_counts_as_a_run_with_an_alarm(clean, tmp_path):
    broken = [
        log(tmp_path, f"broken{i}", rows(i, norm=lambda k, row: np.nan if k == 20 else row["norm"])) for i in range(20)
    ]
    new = [log(tmp_path, "new", rows(100))]
    order = np.random.default_rng(0).permutation(20)
    mixed = list(clean)
    mixed[order[0]] = broken[order[0]]
    _, notes = monitor_output(tmp_path / "one", new, mixed, alpha=0.2)
    assert any("norm is NaN at step 200, so it counts as a run with an alarm" in note for note in notes)
    for index in order[:5]:
        mixed[index] = broken[index]
    assert "leave out" in user_error(lambda: monitor_output(tmp_path / "five", new, mixed, alpha=0.2))
    mixed = list(clean)
    mixed[order[-1]] = broken[order[-1]]
    verdicts, notes = monitor_output(tmp_path / "fitted", [*new, broken[0]], mixed)
    assert any("norm may be not finite (NaN) without an alarm" in note for note in notes)
    assert verdicts["broken0.jsonl"] == "no alarm"


def test_a_longer_run_is_scored_up_to_the_length_of_clean_runs(clean, tmp_path):
    longer = [*rows(100), *({"step": 10 * k, "loss": 9.0, "norm": 9.0} for k in range(STEPS, STEPS + 20))]
    verdicts, notes = monitor_output(tmp_path / "out", [log(tmp_path, "longer", longer)], clean)
    assert verdicts["longer.jsonl"] == "no alarm"
    assert any("ends at step 790, the clean runs at 590" in note for note in notes)


@pytest.mark.parametrize("every", [1, 2])
def test_the_false_alarm_rate_holds_at_full_and_half_cadence(clean, tmp_path, every):
    """The rate is 5% on average over calibration sets; with one set of 90 runs it exceeds 14% once in 3,000."""
    more = [log(tmp_path, f"clean{seed}", rows(seed)) for seed in range(1000, 1160)]
    new = [
        log(tmp_path, f"new{seed}", rows(seed, range(0 if every == 1 else 1, STEPS, every)))
        for seed in range(2000, 2200)
    ]
    verdicts, _ = monitor_output(tmp_path / "out", new, [*clean, *more])
    assert len(verdicts) == 200
    assert np.mean([verdict != "no alarm" for verdict in verdicts.values()]) <= 0.14


def test_the_default_monitor_imports_no_heavy_packages():
    """Other packages are imported only when a page is written."""
    code = (
        "import sys; import jaxaudit.monitoring.monitor_logs, jaxaudit.monitoring.ensemble; "
        "print([name for name in ('jax', 'flax', 'scipy', 'pandas', 'xarray') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
