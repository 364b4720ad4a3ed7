"""Monitors of some learners' clean lanes, tested on another's, where it is known what carries over."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from planted import System
from worker_runs import Calls

from jaxaudit.monitoring import detect
from jaxaudit.monitoring.charts import Chart
from jaxaudit.monitoring.comparison import DetectionSettings, split_lanes
from jaxaudit.monitoring.detect import write_comparisons
from jaxaudit.monitoring.detector import ALL_CHANNELS, CHARTS, ONE_CHANNEL, MonitorDetector
from jaxaudit.monitoring.meta_state import Training
from jaxaudit.monitoring.monitor import Monitor
from jaxaudit.monitoring.state_space import LRU
from jaxaudit.monitoring.transfer import AS_IT_IS, OWN, RECALIBRATED, RESTANDARDISED, UNTRAINED, transfer
from jaxaudit.report import detection_page as report
from jaxaudit.report.detection_page import detectors_by_condition
from jaxaudit.runtime.backends import Workers

SETTINGS = DetectionSettings(folds=2, alpha=0.1, fitted=0.5)
MONITOR = MonitorDetector(LRU(size=2, hidden=(8,)), Training(iterations=40))
READ = 5


def learner(name, seed, scale=1.0, steps=120):
    """Lanes of one law, five channels of it in units of their own, and one more that no other learner has."""
    lanes = System().lanes(48, 16, seed=seed, drift=3.0)
    values = np.concatenate([scale * lanes.values[:, :steps, :READ] + scale, lanes.values[:, :steps, -1:]], axis=-1)
    table = lanes.table.assign(seed=lanes.table.seed % 48)
    return replace(lanes, learner=name, values=values, channels=(*lanes.channels[:READ], f"only {name}"), table=table)


@pytest.fixture(scope="module")
def learners():
    """Two alike, and one of another scale."""
    return [learner("a", 0), learner("b", 5), learner("far", 9, scale=30.0)]


@pytest.fixture(scope="module")
def found(learners):
    told = []
    table = transfer(learners, MONITOR, SETTINGS, told.append)
    assert len(told) == 6
    assert all(f"{READ} channels" in line for line in told)
    return table.set_index(["tested", "fitted_to", "way"])


@pytest.mark.exhaustive
def test_every_learner_is_tested_by_every_other_and_by_all_others(found, learners):
    for tested in learners:
        others = [other.learner for other in learners if other is not tested]
        sources = [*others, " and ".join(others)]
        rows = [(name, way) for name in sources for way in (AS_IT_IS, RECALIBRATED, RESTANDARDISED)]
        assert list(found.loc[tested.learner].index) == [(tested.learner, OWN), *rows, ("nothing", UNTRAINED)]


@pytest.mark.exhaustive
def test_a_learner_of_the_same_law_and_scale_needs_nothing_of_its_own(found):
    for tested, other in (("a", "b"), ("b", "a")):
        row = found.loc[tested, other, AS_IT_IS]
        assert row.false_alarms < 0.3
        assert row.detected_low > 0.6
        assert row.auroc == pytest.approx(found.loc[tested, tested, OWN].auroc, abs=0.05)


@pytest.mark.exhaustive
def test_in_another_learners_units_everything_or_nothing_is_an_alarm(found):
    """Of 30 times the scale all is out of bounds; with the scales exchanged nothing is."""
    for other, expected in (("a", 1), ("b", 1)):
        row = found.loc["far", other, AS_IT_IS]
        assert (row.false_alarms, row.detected) == (expected, expected)
    row = found.loc["a", "far", AS_IT_IS]
    assert (row.false_alarms, row.detected) == (0, 0)


@pytest.mark.exhaustive
def test_with_the_tested_learners_threshold_false_alarms_are_as_stated_and_with_its_units_it_detects(found):
    for tested, other in (("a", "far"), ("far", "a"), ("far", "a and b")):
        row = found.xs((tested, other), level=("tested", "fitted_to"))
        assert (row.false_alarms[[RECALIBRATED, RESTANDARDISED]] < 0.35).all()
        assert row.auroc[AS_IT_IS] == row.auroc[RECALIBRATED]
        assert row.auroc_low[RESTANDARDISED] > 0.9
        assert row.gain_auroc[RESTANDARDISED] == pytest.approx(0, abs=0.05)


@pytest.mark.exhaustive
def test_units_cancel():
    """The same lanes in other units: an own monitor is the same, and so is one of parameters from the first fold."""
    table = transfer([learner("a", 0), learner("b", 0, scale=8.0)], MONITOR, SETTINGS, lambda _: None)
    table = table.set_index(["tested", "way"])[["auroc", "detected", "false_alarms"]]
    np.testing.assert_allclose(table.loc["a", OWN], table.loc["b", OWN], atol=1e-6)
    np.testing.assert_allclose(table.loc["a", RESTANDARDISED], table.loc["b", RESTANDARDISED], atol=1e-6)


@pytest.mark.slow  # programs of another shape are compiled
def test_lengths_may_differ():
    """A step later than those fitted to is compared to their last, and what was disturbed there is detected."""
    long, short = learner("a", 0), learner("b", 5, steps=90)
    table = transfer([long, short], MONITOR, SETTINGS, lambda _: None).set_index(["tested", "way"])
    assert table.loc["a", AS_IT_IS].detected > 0.8
    assert table.loc["a", AS_IT_IS].false_alarms < 0.4
    assert np.isfinite(table.auroc).all()


def test_learners_without_a_common_channel_are_left_alone():
    one = learner("a", 0)
    other = replace(one, learner="b", channels=tuple(f"other {name}" for name in one.channels))
    assert transfer([one, other], MONITOR, SETTINGS).empty


def in_common(lanes):
    """Without the channel that no other learner has."""
    return replace(lanes, values=lanes.values[..., :READ], channels=lanes.channels[:READ])


@pytest.mark.exhaustive
def test_workers_write_what_one_process_writes(learners, tmp_path, monkeypatch):
    backend, told = Calls(), []
    compared = [in_common(lanes) for lanes in learners[:2]]
    monkeypatch.setattr(detect, "load_lanes", lambda runs, channels: compared)
    monkeypatch.setattr(detect, "open_backend", backend.opened)
    there = detect.detect([tmp_path], tmp_path / "theirs", MONITOR, SETTINGS, None, Workers("local"), told.append)
    here = detect.detect([tmp_path], tmp_path / "ours", MONITOR, SETTINGS, say=lambda _: None)
    assert [arguments["number"] for _, arguments in backend.made] == [0, 1]
    assert told[:2] == ["a: 48 clean and 16 disturbed lanes", "b: 48 clean and 16 disturbed lanes"]
    assert [path.name for path in there] == [path.name for path in here]
    found, expected = (
        sorted(p.relative_to(out) for p in out.rglob("*.csv")) for out in (there[0].parent, here[0].parent)
    )
    assert found == expected
    for name in expected:
        assert (there[0].parent / name).read_bytes() == (here[0].parent / name).read_bytes()
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.exhaustive
def test_files(learners, tmp_path):
    compared = [in_common(lanes) for lanes in learners[:2]]
    folders = write_comparisons(compared, tmp_path, MONITOR, SETTINGS, lambda _: None)
    assert [folder.name for folder in folders] == ["a", "b"]
    assert list(pd.read_csv(tmp_path / "transfer.csv").tested) == ["a"] * 5 + ["b"] * 5
    conditions = pd.read_csv(folders[1] / "conditions.csv").set_index("condition")
    assert list(conditions.index) == ["clean", "drift"]
    lanes = pd.read_csv(folders[1] / "lanes.csv")
    detectors = pd.read_csv(folders[1] / "detectors.csv").set_index("detector")
    for name in detectors_by_condition(conditions):
        # of one condition alone, its figures are those of all
        row = conditions.loc["drift"]
        assert row[f"{name} auroc"] == pytest.approx(detectors.auroc[name])
        assert row[f"{name} auroc_low"] == pytest.approx(detectors.auroc_low[name])
        assert row[name] == detectors.detected[name]
        assert conditions[name]["clean"] == detectors.false_alarms[name]
        mine = lanes[lanes.detector == name]
        assert row[name] == (mine.late_alarm[~mine.clean] >= 0).mean()
    assert detectors_by_condition(conditions)[0] == MONITOR.name
    monitor = Monitor.load(folders[1] / "monitor.npz")
    fit = split_lanes(learners[1], SETTINGS)[0].fit
    assert len(monitor.clean) == 48 - len(fit)
    first = lanes[(lanes.detector == MONITOR.name) & lanes.clean & (lanes.fold == 0)]
    assert set(np.float32(first.score)) <= set(np.float32(monitor.clean))


@pytest.mark.exhaustive
def test_the_gain_over_the_best_chart_is_told_by_name_and_the_monitors_own_chart_is_no_baseline(learners, tmp_path):
    mewma = MonitorDetector(Chart(departure=(0.1,)))
    (folder,) = write_comparisons([in_common(learners[0])], tmp_path / "chart", mewma, SETTINGS, lambda _: None)
    detectors = pd.read_csv(folder / "detectors.csv").set_index("detector")
    charts = detectors[detectors.family == ALL_CHANNELS]
    assert len(charts) == len(CHARTS) - 1
    assert detectors.family[mewma.name] == "monitor"
    assert (detectors.family[[name for name in detectors.index if "deviation of" in name]] == ONE_CHANNEL).all()
    told = json.loads((folder / "comparison.json").read_text())["best_chart"]
    assert told["detector"] == charts.auroc.idxmax()
    row = charts.loc[told.pop("detector")]
    assert told == pytest.approx({name: row[name] for name in told})
    assert row.gain_auroc == pytest.approx(detectors.auroc[mewma.name] - row.auroc)
    assert row.gain_detected == pytest.approx(detectors.detected[mewma.name] - row.detected)
    seen = xr.open_zarr(folder / "trajectories.zarr")
    assert np.isfinite(seen.deviation.isel(step=slice(10, None))).all()
    assert Monitor.load(folder / "monitor.npz").expectation.model == mewma.model
    assert "<b>" in report.build(folder).read_text()


def test_of_a_chart_there_are_no_parameters_to_carry_over(learners):
    table = transfer(learners[:2], MonitorDetector(Chart()), SETTINGS, lambda _: None)
    assert list(table.way) == [OWN, AS_IT_IS, RECALIBRATED] * 2


@pytest.mark.exhaustive
def test_one_learner_alone_is_tested_on_no_other(learners, tmp_path):
    write_comparisons([in_common(learners[0])], tmp_path, MONITOR, SETTINGS, lambda _: None)
    assert not (tmp_path / "transfer.csv").exists()
