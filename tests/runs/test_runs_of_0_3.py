"""Runs that version 0.3.0 stored (data/run_0_3.py) are replayed, resumed and forked by this version: bit for bit where
hardware and software are those of the run."""

import tarfile

import numpy as np
import pytest
import zarr
from directories import DATA
from small_runs import stored_arrays

import jaxaudit as ja
from jaxaudit.analysis.run_reader import load
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.replay import replay
from jaxaudit.spec.document import load as load_spec

pytestmark = [pytest.mark.exhaustive, pytest.mark.long, pytest.mark.default_compilation]

ELSEWHERE = 1e-2
"""The largest deviation from a run that other software or another machine made, relative to the largest value.
It is small because the runs are short."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(DATA / "run-0.3.tar.gz") as archive:
        archive.extractall(folder)
    return folder / "run-0.3"


@pytest.fixture(autouse=True)
def in_their_folder(runs, monkeypatch):
    """Where the checkpoint is that the GRPO run's spec names."""
    monkeypatch.chdir(runs)


def assert_near(one, other):
    """That two runs' telemetry is near each other, as far as it is finite."""
    one, other = (zarr.open_group(folder / "telemetry.zarr", mode="r") for folder in (one, other))
    for name, array in one.arrays():
        new, old = np.asarray(array), np.asarray(other[name])
        if new.dtype.kind == "f":
            both = np.isfinite(new) & np.isfinite(old)
            assert both.mean() > 0.9 * np.isfinite(old).mean()
            np.testing.assert_allclose(new[both], old[both], atol=ELSEWHERE * np.abs(old[both]).max(initial=0.0))


@pytest.mark.parametrize("name", ["ppo", "grpo", "sac"])
def test_a_run_is_replayed(runs, name):
    found = replay(runs / name)
    assert found.lanes == load(runs / name).conditions.shape[0] * 2
    assert found.equal or found.differences, f"nothing is different, and yet:\n{found}"
    if not found.equal:
        assert "largest deviation" in str(found)
        assert "when it was run" in str(found)


def test_a_run_that_was_killed_is_resumed(runs):
    durable.resume(runs / "killed")
    if replay(runs / "ppo", condition="0").equal:
        killed, whole = stored_arrays(runs / "killed"), stored_arrays(runs / "ppo")
        assert killed.keys() == whole.keys()
        assert [name for name in whole if killed[name] != whole[name]] == []
    else:
        assert_near(runs / "killed", runs / "ppo")


def test_a_run_is_forked(runs):
    """The same conditions and another one, from the stored onsets."""
    text = (runs / "ppo" / "spec.toml").read_text()
    more = '[[perturbation]]\nkind = "weight_noise"\nmagnitude = 1.0\nonset = 4\n'
    (runs / "ppo" / "more.toml").write_text(text + more)
    durable.fork(runs / "ppo", load_spec(runs / "ppo" / "more.toml"), runs / "forked")
    forked, stored = load(runs / "forked"), load(runs / "ppo")
    count = stored.channel("performance").shape[1]
    assert forked.channel("performance").shape[1] == count + 1
    one, other = (run.channel("params_norm")[:, :count] for run in (forked, stored))
    np.testing.assert_allclose(one, other, rtol=ELSEWHERE)
    assert not np.allclose(forked.channel("params_norm")[:, count, 4:], one[:, 0, 4:])


def test_the_saved_monitor_scores_as_the_program_did(runs):
    """Alarms and scores of the stored telemetry, made by the program of 0.3.0, and by this version's monitor."""
    run = load(runs / "ppo")
    monitor = ja.Monitor.load(runs / "ppo" / "monitor.npz")
    inside = run.channel("monitor_score") + monitor.threshold(0.5)
    outside = monitor.score(run.telemetry).score.transpose("seed", "condition", "step").values
    finite = np.isfinite(inside)
    np.testing.assert_array_equal(finite, np.isfinite(outside))
    assert finite.any()
    np.testing.assert_allclose(inside[finite], outside[finite], rtol=2e-3, atol=2e-3)
