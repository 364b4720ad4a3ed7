"""Transfer of monitors: fitted to the clean lanes of some learners and tested on another, on simulated lanes.

The simulated learners follow the same process in different units, so that it is known what carries over.
"""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from planted import System
from worker_runs import InProcessBackend

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
DETECTOR = MonitorDetector(LRU(size=2, hidden=(8,)), Training(iterations=40))
COMMON_CHANNELS = 5


def learner(name, seed, scale=1.0, steps=120):
    """Simulated lanes: five common channels, scaled and shifted by `scale`, and one that no other learner has."""
    lanes = System().lanes(48, 16, seed=seed, drift=3.0)
    values = np.concatenate(
        [scale * lanes.values[:, :steps, :COMMON_CHANNELS] + scale, lanes.values[:, :steps, -1:]], axis=-1
    )
    table = lanes.table.assign(seed=lanes.table.seed % 48)
    return replace(
        lanes, learner=name, values=values, channels=(*lanes.channels[:COMMON_CHANNELS], f"only {name}"), table=table
    )


@pytest.fixture(scope="module")
def learners():
    """Two learners of the same scale, and one of another scale."""
    return [learner("a", 0), learner("b", 5), learner("far", 9, scale=30.0)]


@pytest.fixture(scope="module")
def transfers(learners):
    messages = []
    table = transfer(learners, DETECTOR, SETTINGS, messages.append)
    assert len(messages) == 6
    assert all(f"{COMMON_CHANNELS} channels" in line for line in messages)
    return table.set_index(["tested", "fitted_to", "way"])


@pytest.mark.exhaustive
def test_every_learner_is_tested_with_each_other_and_all_others(transfers, learners):
    for tested in learners:
        others = [source.learner for source in learners if source is not tested]
        sources = [*others, " and ".join(others)]
        rows = [(name, way) for name in sources for way in (AS_IT_IS, RECALIBRATED, RESTANDARDISED)]
        assert list(transfers.loc[tested.learner].index) == [(tested.learner, OWN), *rows, ("nothing", UNTRAINED)]


@pytest.mark.exhaustive
def test_a_monitor_transfers_to_a_learner_of_the_same_scale(transfers):
    for tested, source in (("a", "b"), ("b", "a")):
        row = transfers.loc[tested, source, AS_IT_IS]
        assert row.false_alarms < 0.3
        assert row.detected_low > 0.6
        assert row.auroc == pytest.approx(transfers.loc[tested, tested, OWN].auroc, abs=0.05)


@pytest.mark.exhaustive
def test_in_units_of_another_learner_all_or_no_lanes_are_alarms(transfers):
    """At 30 times the scale every lane is an alarm; with the scales exchanged, none is."""
    for source, expected in (("a", 1), ("b", 1)):
        row = transfers.loc["far", source, AS_IT_IS]
        assert (row.false_alarms, row.detected) == (expected, expected)
    row = transfers.loc["a", "far", AS_IT_IS]
    assert (row.false_alarms, row.detected) == (0, 0)


@pytest.mark.exhaustive
def test_recalibration_restores_false_alarms_and_units_detection(transfers):
    for tested, source in (("a", "far"), ("far", "a"), ("far", "a and b")):
        row = transfers.xs((tested, source), level=("tested", "fitted_to"))
        assert (row.false_alarms[[RECALIBRATED, RESTANDARDISED]] < 0.35).all()
        assert row.auroc[AS_IT_IS] == row.auroc[RECALIBRATED]
        assert row.auroc_low[RESTANDARDISED] > 0.9
        assert row.gain_auroc[RESTANDARDISED] == pytest.approx(0, abs=0.05)


@pytest.mark.exhaustive
def test_restandardised_monitors_do_not_depend_on_units():
    """A learner with the same lanes in other units has the same results, both fitted to itself and restandardised."""
    table = transfer([learner("a", 0), learner("b", 0, scale=8.0)], DETECTOR, SETTINGS, lambda _: None)
    table = table.set_index(["tested", "way"])[["auroc", "detected", "false_alarms"]]
    np.testing.assert_allclose(table.loc["a", OWN], table.loc["b", OWN], atol=1e-6)
    np.testing.assert_allclose(table.loc["a", RESTANDARDISED], table.loc["b", RESTANDARDISED], atol=1e-6)


@pytest.mark.slow  # compiles programs of another shape
def test_learners_may_have_runs_of_different_lengths():
    """Steps beyond the fitted ones are compared with the last fitted one, and disturbances there are detected."""
    long, short = learner("a", 0), learner("b", 5, steps=90)
    table = transfer([long, short], DETECTOR, SETTINGS, lambda _: None).set_index(["tested", "way"])
    assert table.loc["a", AS_IT_IS].detected > 0.8
    assert table.loc["a", AS_IT_IS].false_alarms < 0.4
    assert np.isfinite(table.auroc).all()


def test_learners_without_a_common_channel_are_not_compared():
    first = learner("a", 0)
    second = replace(first, learner="b", channels=tuple(f"other {name}" for name in first.channels))
    assert transfer([first, second], DETECTOR, SETTINGS).empty


def without_private_channel(lanes):
    """Removes the channel that no other learner has."""
    return replace(lanes, values=lanes.values[..., :COMMON_CHANNELS], channels=lanes.channels[:COMMON_CHANNELS])


@pytest.mark.exhaustive
def test_workers_write_the_same_files_as_one_process(learners, tmp_path, monkeypatch):
    backend, messages = InProcessBackend(), []
    compared = [without_private_channel(lanes) for lanes in learners[:2]]
    monkeypatch.setattr(detect, "load_lanes", lambda runs, channels: compared)
    monkeypatch.setattr(detect, "open_backend", backend.open_backend)
    from_workers = detect.detect(
        [tmp_path], tmp_path / "theirs", DETECTOR, SETTINGS, None, Workers("local"), messages.append
    )
    from_process = detect.detect([tmp_path], tmp_path / "ours", DETECTOR, SETTINGS, say=lambda _: None)
    assert [arguments["number"] for _, arguments in backend.submitted] == [0, 1]
    assert messages[:2] == ["a: 48 clean and 16 disturbed lanes", "b: 48 clean and 16 disturbed lanes"]
    assert [path.name for path in from_workers] == [path.name for path in from_process]
    files, expected = (
        sorted(p.relative_to(out) for p in out.rglob("*.csv"))
        for out in (from_workers[0].parent, from_process[0].parent)
    )
    assert files == expected
    for name in expected:
        assert (from_workers[0].parent / name).read_bytes() == (from_process[0].parent / name).read_bytes()
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.exhaustive
def test_the_written_tables_agree_with_each_other(learners, tmp_path):
    compared = [without_private_channel(lanes) for lanes in learners[:2]]
    folders = write_comparisons(compared, tmp_path, DETECTOR, SETTINGS, lambda _: None)
    assert [folder.name for folder in folders] == ["a", "b"]
    assert list(pd.read_csv(tmp_path / "transfer.csv").tested) == ["a"] * 5 + ["b"] * 5
    conditions = pd.read_csv(folders[1] / "conditions.csv").set_index("condition")
    assert list(conditions.index) == ["clean", "drift"]
    lanes = pd.read_csv(folders[1] / "lanes.csv")
    detectors = pd.read_csv(folders[1] / "detectors.csv").set_index("detector")
    for name in detectors_by_condition(conditions):
        # there is only one disturbed condition, so its numbers equal those over all conditions
        row = conditions.loc["drift"]
        assert row[f"{name} auroc"] == pytest.approx(detectors.auroc[name])
        assert row[f"{name} auroc_low"] == pytest.approx(detectors.auroc_low[name])
        assert row[name] == detectors.detected[name]
        assert conditions[name]["clean"] == detectors.false_alarms[name]
        detector_lanes = lanes[lanes.detector == name]
        assert row[name] == (detector_lanes.late_alarm[~detector_lanes.clean] >= 0).mean()
    assert detectors_by_condition(conditions)[0] == DETECTOR.name
    monitor = Monitor.load(folders[1] / "monitor.npz")
    fit = split_lanes(learners[1], SETTINGS)[0].fit
    assert len(monitor.clean) == 48 - len(fit)
    first = lanes[(lanes.detector == DETECTOR.name) & lanes.clean & (lanes.fold == 0)]
    assert set(np.float32(first.score)) <= set(np.float32(monitor.clean))


@pytest.mark.exhaustive
def test_the_best_chart_is_named_and_excludes_the_monitors_own(learners, tmp_path):
    mewma = MonitorDetector(Chart(departure=(0.1,)))
    (folder,) = write_comparisons(
        [without_private_channel(learners[0])], tmp_path / "chart", mewma, SETTINGS, lambda _: None
    )
    detectors = pd.read_csv(folder / "detectors.csv").set_index("detector")
    charts = detectors[detectors.family == ALL_CHANNELS]
    assert len(charts) == len(CHARTS) - 1
    assert detectors.family[mewma.name] == "monitor"
    assert (detectors.family[[name for name in detectors.index if "deviation of" in name]] == ONE_CHANNEL).all()
    best_chart = json.loads((folder / "comparison.json").read_text())["best_chart"]
    assert best_chart["detector"] == charts.auroc.idxmax()
    row = charts.loc[best_chart.pop("detector")]
    assert best_chart == pytest.approx({name: row[name] for name in best_chart})
    assert row.gain_auroc == pytest.approx(detectors.auroc[mewma.name] - row.auroc)
    assert row.gain_detected == pytest.approx(detectors.detected[mewma.name] - row.detected)
    trajectories = xr.open_zarr(folder / "trajectories.zarr")
    assert np.isfinite(trajectories.deviation.isel(step=slice(10, None))).all()
    assert Monitor.load(folder / "monitor.npz").expectation.model == mewma.model
    assert "<b>" in report.build(folder).read_text()


def test_charts_have_no_parameters_to_transfer(learners):
    table = transfer(learners[:2], MonitorDetector(Chart()), SETTINGS, lambda _: None)
    assert list(table.way) == [OWN, AS_IT_IS, RECALIBRATED] * 2


@pytest.mark.exhaustive
def test_a_single_learner_has_no_transfer_table(learners, tmp_path):
    write_comparisons([without_private_channel(learners[0])], tmp_path, DETECTOR, SETTINGS, lambda _: None)
    assert not (tmp_path / "transfer.csv").exists()
