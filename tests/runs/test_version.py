"""Runs of version 0.1, and of 0.2 on dialogues or in bfloat16, can be read and reported, but not resumed."""

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


def unpack(name, folder):
    with tarfile.open(DATA / f"{name}.tar.gz") as archive:
        archive.extractall(folder)
    return folder / name


@pytest.fixture
def run_0_1(tmp_path):
    return unpack("run-0.1", tmp_path)


@pytest.fixture
def dialogue_run_0_2(tmp_path):
    return unpack("run-0.2-dialogue", tmp_path)


@pytest.mark.exhaustive
def test_a_run_of_version_0_1_is_read_and_reported(run_0_1):
    with xr.open_zarr(run_0_1 / "telemetry.zarr", chunks=None) as telemetry:
        assert dict(telemetry.sizes)["condition"] == 4
        assert np.isfinite(telemetry["performance"].values[:, :, -1]).any()
    assert len(pd.read_csv(run_0_1 / "metrics.csv")) == 12
    page = build(run_0_1).read_text()
    assert "of version 0.1" in page
    assert "lr_spike" in page
    assert "not computed yet" not in page


def test_a_spec_of_version_0_1_is_valid(run_0_1):
    spec = load(run_0_1 / "spec.toml")
    assert [entry.perturbation.name for entry in spec.perturbations] == ["lr_spike", "weight_noise+reward_scale"]
    assert [c.onset for c in spec.build().conditions] == [20] * 4


def assert_refused(run_cli, command, run, version):
    """Asserts that a command refuses to continue from a run, in one sentence, and leaves nothing behind."""
    names = {path.name for path in run.parent.iterdir()}
    arguments = (run, run / "spec.toml", "-o", run.parent / "other") if command == "fork" else (run,)
    result = run_cli(command, *arguments)
    error_sentence(result, 2, f"was made by jaxaudit {version}", "can report and read it, not go on with it")
    assert {path.name for path in run.parent.iterdir()} == names


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_continue_a_run_of_version_0_1_are_refused(command, run_0_1, run_cli):
    assert_refused(run_cli, command, run_0_1, "0.1.0")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_that_continue_a_dialogue_run_of_0_2_are_refused(command, dialogue_run_0_2, run_cli):
    assert_refused(run_cli, command, dialogue_run_0_2, "0.2.0")


@pytest.mark.exhaustive
def test_a_run_of_version_0_2_on_dialogues_is_read_and_reported(dialogue_run_0_2):
    with xr.open_zarr(dialogue_run_0_2 / "telemetry.zarr", chunks=None) as telemetry:
        assert dict(telemetry.sizes)["condition"] == 2
        assert np.isfinite(telemetry["performance"].values).all()
        assert "changed_prompt_success" in telemetry
    page = build(dialogue_run_0_2).read_text()
    assert "Made by jaxaudit 0.2.0" in page
    assert "tool_error" in page
    error = float(np.nanmedian(telemetry["performance_error"]))
    assert f"with a standard error of {error:.2g} (the median)" in page
    assert "(standard error " in page, "the standard error is missing for the displayed rows"


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
@pytest.mark.exhaustive
def test_other_runs_of_version_0_2_can_be_resumed_unless_in_bfloat16(precision, tmp_path):
    """A run in float32 is opened. Whether it can be replayed depends on its checkpoints."""
    run = tmp_path / "text"
    run.mkdir()
    (run / "spec.toml").write_text(TEXT_RUN.format(precision))
    (run / "environment.json").write_text(json.dumps({"jaxaudit": "0.2.0"}))
    if precision == "float32":
        assert open_run(run)[1].learner.settings.precision == precision
        return
    with pytest.raises(UserError, match=r"made by jaxaudit 0\.2\.0: .* not go on with it"):
        open_run(run)
