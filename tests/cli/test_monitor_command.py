"""`jaxaudit monitor` and `jaxaudit detect`, as a user calls them."""

import contextlib
import io
import json

import noisy  # noqa: F401  registers the learner
import numpy as np
import pandas as pd
import pytest
import xarray as xr

from jaxaudit.cli.main import main
from jaxaudit.monitoring.monitor import DEFAULT, Monitor, scorer
from jaxaudit.monitoring.monitor_logs import _alpha

STEPS = 60


def write_log(folder, name, seed, spike=None, steps=STEPS):
    """Writes a run's log: a falling loss, a correlated gradient norm, a clock, and a schedule."""
    random = np.random.default_rng(seed)
    t = np.arange(steps)
    noise = random.normal(size=(steps, 2)) * 0.05
    loss = 1 + np.exp(-t / 20) + noise[:, 0]
    norm = 0.5 + 0.3 * np.exp(-t / 20) + 0.5 * noise[:, 0] + noise[:, 1]
    if spike is not None:
        loss[spike:] += 1.0
    frame = {"step": 10 * t, "loss": loss, "gradient_norm": norm, "seconds": 0.3 * t + random.random()}
    path = folder / name
    pd.DataFrame(frame | {"rate": 1e-3 * (1 - t / steps)}).to_csv(path, index=False)
    return path


@pytest.fixture(autouse=True, scope="module")
def no_figures():
    """Skips the figures' files, which take most of a report's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    clean = [write_log(folder, f"clean{i}.csv", i) for i in range(40)]
    with_gaps = write_log(folder, "odd.csv", 100)
    frame = pd.read_csv(with_gaps)
    pd.concat([frame[:20], frame[19:20].add([0, 0.01, 0, 0, 0]), frame[30:]]).to_csv(with_gaps, index=False)
    return clean, write_log(folder, "good.csv", 100), write_log(folder, "bad.csv", 101, spike=30), with_gaps


@pytest.fixture(
    scope="module",
    params=[
        "ensemble",
        pytest.param("chart", marks=pytest.mark.exhaustive),
        pytest.param("lru", marks=pytest.mark.slow),
    ],
)
def scored_runs(request, logs, tmp_path_factory):
    """Returns the exit code, the folder, and standard output."""
    clean, *runs = logs
    out = tmp_path_factory.mktemp("out") / "scored"
    with contextlib.redirect_stdout(io.StringIO()) as stdout:
        arguments = [*map(str, runs), "--clean", *map(str, clean), "--model", request.param]
        code = main(["monitor", *arguments, "-o", str(out)])
    return code, out, stdout.getvalue()


@pytest.mark.exhaustive
def test_a_failed_run_raises_an_alarm_and_a_good_one_does_not(scored_runs):
    code, out, _ = scored_runs
    assert code == 0
    alarms = pd.read_csv(out / "alarms.csv")
    names = [path.rsplit("/")[-1] for path in alarms.run]
    assert names == ["bad.csv"]
    assert 300 <= alarms.step[0] <= 330
    assert alarms.channels[0].startswith("loss ")
    monitored = json.loads((out / "monitored.json").read_text())
    assert monitored["channels"] == ["loss", "gradient_norm"]  # the learning rate is scheduled, and the clock rises
    assert (monitored["clean_runs"], monitored["calibrated_on"], monitored["alpha"]) == (40, 20, 0.05)
    assert any("seconds" in note for note in monitored["notes"])
    data = xr.open_zarr(out / "monitored.zarr")
    assert dict(data.sizes) == {"run": 3, "step": STEPS, "channel": 2, "component": 2, "quantile": 3}
    assert float(abs(data.distance.sel(channel="loss").isel(run=1, step=-1))) > 8
    monitor = Monitor.load(out / "monitor.npz")
    assert monitor.threshold(0.05) == monitored["threshold"]
    page = (out / "report.html").read_text()
    assert "bad.csv" in page
    assert "alarm" in page


def test_one_channel_is_enough(logs, tmp_path):
    """The default monitor's meta-state has one entry in this case."""
    clean, _, bad, _ = logs
    out = tmp_path / "out"
    arguments = [str(bad), "--clean", *map(str, clean), "--channels", "loss", "-o", str(out)]
    assert main(["monitor", *arguments]) == 0
    assert 300 <= pd.read_csv(out / "alarms.csv").step[0] <= 330
    assert scorer(DEFAULT) == Monitor.load(out / "monitor.npz").expectation.model


def run_and_get_error(capsys, *arguments):
    """Returns the exit code and standard error."""
    code = main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


def test_users_errors_are_reported_in_one_sentence(logs, tmp_path, capsys):
    clean, good, *_ = logs
    few_runs = list(clean[:4])
    out = tmp_path / "out"
    short = tmp_path / "short.csv"
    short.write_text("step,reward\n0,1.5\n1,2.5\n2,2.0\n")
    cases = [
        ([tmp_path / "no.csv", "--clean", *few_runs], "no.csv"),
        ([good, "--clean", clean[0]], "a monitor learns from two earlier runs or more, not 1"),
        ([good, "--clean", *few_runs, "--channels", "lss"], "did you mean 'loss'?"),
        ([short, "--clean", *few_runs], "no channel of a new run"),
        ([good, "--clean", *few_runs, "--alpha", "0.05"], "too few for a false-alarm rate of 0.05: it takes 19"),
        (
            [good, "--clean", *few_runs, "--channels", "rate"],
            "no channel of a new run differs between the earlier runs",
        ),
    ]
    for arguments, words in cases:
        code, error = run_and_get_error(capsys, "monitor", *arguments, "-o", out)
        assert (code, words in error, error.count("\n")) == (2, True, 1), error
        assert not out.exists()
    out.mkdir()
    (out / "mine").write_text("x")
    code, error = run_and_get_error(capsys, "monitor", good, "--clean", *few_runs, "-o", out)
    assert (code, "exists and is not empty; name another with -o" in error) == (2, True)
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.exhaustive
def test_gaps_and_repeated_steps_are_noted(scored_runs):
    _, out, stdout = scored_runs
    notes = json.loads((out / "monitored.json").read_text())["notes"]
    for words in ("more than once", "from step 200 to 290"):
        assert any(words in note for note in notes), words
        assert words in stdout


def test_few_runs_allow_more_false_alarms():
    notes = []
    assert _alpha(None, 3, notes) == 0.25
    assert notes == ["3 earlier runs to calibrate on allow 25.0% false alarms per clean run, not 5%"]


SPEC = """
[audit]
name = "noisy"
seeds = {seeds}
steps = 60
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "noisy_descent"
[metrics]
window = 10
hold = 10
{perturbation}
"""

SPIKE = """
[[perturbation]]
kind = "lr_spike"
magnitude = 60
onset = 0.5
duration = "end"
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns a folder of clean runs, and one of perturbed runs with other seeds."""
    folder = tmp_path_factory.mktemp("runs")
    folders = []
    for name, seeds, perturbation in (("clean", 60, ""), ("disturbed", list(range(1000, 1008)), SPIKE)):
        spec = folder / f"{name}.toml"
        spec.write_text(SPEC.format(seeds=seeds, perturbation=perturbation))
        assert main(["run", str(spec), "-o", str(folder / name)]) == 0
        folders.append(folder / name)
    return folders


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("ensemble", "chart", "lru")]
)
def test_detect_compares_detectors_over_runs(runs, tmp_path, capsys, model):
    assert main(["detect", *map(str, runs), "-o", str(tmp_path / "out"), "--folds", "2", "--model", model]) == 0
    stdout = capsys.readouterr().out
    controls = pd.concat([pd.read_csv(run / "metrics.csv") for run in runs]).query("condition == 'control'")
    clean = int((~np.isfinite(controls.collapse_time)).sum())
    assert 60 <= clean < len(controls) == 68
    assert f"{clean} clean and 8 disturbed lanes; {68 - clean} control" in stdout
    (folder,) = (tmp_path / "out").iterdir()
    detectors = pd.read_csv(folder / "detectors.csv")
    row = detectors[detectors.detector == scorer(model).title].iloc[0]
    assert row.detected == 1
    assert row.false_alarms <= 0.2
    assert row.auroc > 0.98
    conditions = pd.read_csv(folder / "conditions.csv")
    assert list(conditions.condition) == ["clean", "lr_spike 60"]
    assert list(conditions.lanes) == [clean, 8]
    assert conditions.collapsed[1] == 8
    lanes = pd.read_csv(folder / "lanes.csv")
    assert len(lanes) == (clean + 8) * len(detectors)
    data = xr.open_zarr(folder / "trajectories.zarr")
    assert list(data.condition.values) == ["clean", "lr_spike 60"]
    assert int(data.onset[1]) == 30
    assert (data.score.isel(condition=1, step=-1, quantile=1) > data.threshold).all()
    assert (folder / "report.html").exists()


@pytest.mark.exhaustive
def test_runs_that_cannot_be_compared_are_refused(runs, tmp_path, capsys):
    clean, disturbed = runs
    code, error = run_and_get_error(capsys, "detect", clean, "-o", tmp_path / "out")
    assert (code, "no lane is disturbed" in error) == (2, True)
    code, error = run_and_get_error(capsys, "detect", disturbed, "-o", tmp_path / "out")
    assert (code, "clean lanes are too few" in error) == (2, True)
    code, error = run_and_get_error(capsys, "detect", tmp_path, "-o", tmp_path / "out")
    assert (code, "is not a run's folder" in error) == (2, True)
    code, error = run_and_get_error(capsys, "detect", *runs, "-o", tmp_path / "out", "--channels", "los")
    assert (code, "no channel 'los'" in error) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
def test_a_sweep_of_seeds_needs_no_perturbation(runs):
    data = xr.open_zarr(runs[0] / "telemetry.zarr")
    assert list(data.condition.values) == ["control"]
    assert dict(data.sizes)["seed"] == 60
    assert np.isfinite(data.performance.values).all()
    assert (runs[0] / "report.html").exists()
