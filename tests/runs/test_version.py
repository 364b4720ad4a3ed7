"""Runs that version 0.1 stored, and 0.2 on dialogues or in bfloat16, are read and reported, not gone on with."""

import json
import tarfile

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from directories import DATA
from small_runs import error_sentence

from jaxaudit.report import build
from jaxaudit.runs.run_opening import open_run
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import load

DATA = DATA
COMMANDS = ["resume", "replay", "fork", "margin"]


def unpacked(name, folder):
    with tarfile.open(DATA / f"{name}.tar.gz") as archive:
        archive.extractall(folder)
    return folder / name


@pytest.fixture
def old(tmp_path):
    return unpacked("run-0.1", tmp_path)


@pytest.fixture
def old_dialogue(tmp_path):
    return unpacked("run-0.2-dialogue", tmp_path)


@pytest.mark.exhaustive
def test_a_run_of_version_0_1_is_read_and_reported(old):
    with xr.open_zarr(old / "telemetry.zarr", chunks=None) as telemetry:
        assert dict(telemetry.sizes)["condition"] == 4
        assert np.isfinite(telemetry["performance"].values[:, :, -1]).any()
    assert len(pd.read_csv(old / "metrics.csv")) == 12
    page = build(old).read_text()
    assert "of version 0.1" in page
    assert "lr_spike" in page
    assert "not computed yet" not in page


def test_a_spec_of_version_0_1_is_a_spec(old):
    spec = load(old / "spec.toml")
    assert [entry.perturbation.name for entry in spec.perturbations] == ["lr_spike", "weight_noise+reward_scale"]
    assert [c.onset for c in spec.build().conditions] == [20] * 4


def assert_refused(here, command, run, version):
    """That a command goes not on from a run, says so in one sentence, and leaves nothing behind."""
    there = {path.name for path in run.parent.iterdir()}
    given = (run, run / "spec.toml", "-o", run.parent / "other") if command == "fork" else (run,)
    done = here(command, *given)
    error_sentence(done, 2, f"was made by jaxaudit {version}", "can report and read it, not go on with it")
    assert {path.name for path in run.parent.iterdir()} == there


@pytest.mark.parametrize("command", COMMANDS)
def test_what_goes_on_from_a_run_of_version_0_1_is_refused(command, old, run_cli):
    assert_refused(run_cli, command, old, "0.1.0")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_goes_on_from_a_run_of_version_0_2_on_dialogues_is_refused(command, old_dialogue, run_cli):
    assert_refused(run_cli, command, old_dialogue, "0.2.0")


@pytest.mark.exhaustive
def test_a_run_of_version_0_2_on_dialogues_is_read_and_reported(old_dialogue):
    with xr.open_zarr(old_dialogue / "telemetry.zarr", chunks=None) as telemetry:
        assert dict(telemetry.sizes)["condition"] == 2
        assert np.isfinite(telemetry["performance"].values).all()
        assert "changed_prompt_success" in telemetry
    page = build(old_dialogue).read_text()
    assert "Made by jaxaudit 0.2.0" in page
    assert "tool_error" in page
    error = float(np.nanmedian(telemetry["performance_error"]))
    assert f"with a standard error of {error:.2g} (the median)" in page
    assert "(standard error " in page, "of the rows that are shown, too"


TEXT_RUN = """
[audit]
name = "text"
seeds = 1
steps = 2

[task]
kind = "text"
name = "python-stdlib"

[learner]
kind = "language_model"
size = "nano"
precision = "{}"
"""


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_of_version_0_2_other_learners_are_gone_on_with_but_in_bfloat16(precision, tmp_path):
    """That a run in float32 is opened: whether it can be replayed is its checkpoints' matter."""
    run = tmp_path / "text"
    run.mkdir()
    (run / "spec.toml").write_text(TEXT_RUN.format(precision))
    (run / "environment.json").write_text(json.dumps({"jaxaudit": "0.2.0"}))
    if precision == "float32":
        assert open_run(run)[1].learner.settings.precision == precision
        return
    with pytest.raises(UserError, match=r"made by jaxaudit 0\.2\.0: .* not go on with it"):
        open_run(run)
