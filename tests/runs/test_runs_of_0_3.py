"""Runs that version 0.3.0 stored (data/run_0_3.py) are replayed, resumed and forked by this version.

Results are bitwise equal where hardware and software are those of the run.
"""

import re
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

TOLERANCE = 1e-2
"""The largest deviation from a run of other software or another machine, relative to the largest value.

It is small because the runs are short.
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(DATA / "run-0.3.tar.gz") as archive:
        archive.extractall(folder)
    runs = folder / "run-0.3"
    # The stored spec has the absolute path that the checkpoint had where the run was made.
    spec = runs / "grpo" / "spec.toml"
    text, replacements = re.subn(r'checkpoint = "[^"]+/gpt2"', f'checkpoint = "{runs / "gpt2"}"', spec.read_text())
    assert replacements == 1
    spec.write_text(text)
    return runs


@pytest.fixture(autouse=True)
def in_the_runs_folder(runs, monkeypatch):
    """Changes to the folder that contains the checkpoint of the GRPO run's spec."""
    monkeypatch.chdir(runs)


def assert_near(actual, expected):
    """Asserts that the finite telemetry of two runs is nearly equal."""
    actual, expected = (zarr.open_group(folder / "telemetry.zarr", mode="r") for folder in (actual, expected))
    for name, array in actual.arrays():
        new, old = np.asarray(array), np.asarray(expected[name])
        if new.dtype.kind == "f":
            finite_in_both = np.isfinite(new) & np.isfinite(old)
            assert finite_in_both.mean() > 0.9 * np.isfinite(old).mean()
            np.testing.assert_allclose(
                new[finite_in_both], old[finite_in_both], atol=TOLERANCE * np.abs(old[finite_in_both]).max(initial=0.0)
            )


@pytest.mark.parametrize("name", ["ppo", "grpo", "sac"])
def test_a_run_is_replayed(runs, name):
    result = replay(runs / name)
    assert result.lanes == load(runs / name).conditions.shape[0] * 2
    assert result.equal or result.differences, f"the results differ, but the environment does not:\n{result}"
    if not result.equal:
        assert "largest deviation" in str(result)
        assert "when it was run" in str(result)


def test_a_killed_run_is_resumed(runs):
    durable.resume(runs / "killed")
    if replay(runs / "ppo", condition="0").equal:
        killed, whole = stored_arrays(runs / "killed"), stored_arrays(runs / "ppo")
        assert killed.keys() == whole.keys()
        assert [name for name in whole if killed[name] != whole[name]] == []
    else:
        assert_near(runs / "killed", runs / "ppo")


def test_a_run_is_forked(runs):
    """The fork has the same conditions and another one, from the stored onsets."""
    text = (runs / "ppo" / "spec.toml").read_text()
    another_condition = '[[perturbation]]\nkind = "weight_noise"\nmagnitude = 1.0\nonset = 4\n'
    (runs / "ppo" / "more.toml").write_text(text + another_condition)
    durable.fork(runs / "ppo", load_spec(runs / "ppo" / "more.toml"), runs / "forked")
    forked, stored = load(runs / "forked"), load(runs / "ppo")
    count = stored.channel("performance").shape[1]
    assert forked.channel("performance").shape[1] == count + 1
    forked_norm, stored_norm = (run.channel("params_norm")[:, :count] for run in (forked, stored))
    np.testing.assert_allclose(forked_norm, stored_norm, rtol=TOLERANCE)
    assert not np.allclose(forked.channel("params_norm")[:, count, 4:], forked_norm[:, 0, 4:])


def test_the_saved_monitor_scores_as_during_training(runs):
    """The scores of the stored telemetry, computed by 0.3.0 during training, equal those of this version's monitor."""
    run = load(runs / "ppo")
    monitor = ja.Monitor.load(runs / "ppo" / "monitor.npz")
    in_training = run.channel("monitor_score") + monitor.threshold(0.5)
    afterwards = monitor.score(run.telemetry).score.transpose("seed", "condition", "step").values
    finite = np.isfinite(in_training)
    np.testing.assert_array_equal(finite, np.isfinite(afterwards))
    assert finite.any()
    np.testing.assert_allclose(in_training[finite], afterwards[finite], rtol=2e-3, atol=2e-3)
