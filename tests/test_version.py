"""Runs that version 0.1 stored are read and reported, not gone on with."""

import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from small_runs import one_sentence

from jaxaudit.report import build
from jaxaudit.specification.document import load

STORED = Path(__file__).parent / "data" / "run-0.1.tar.gz"


@pytest.fixture
def old(tmp_path):
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "run-0.1"


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


@pytest.mark.parametrize("command", ["resume", "replay", "fork", "margin"])
def test_what_goes_on_from_a_run_of_version_0_1_is_refused(command, old, here):
    given = (old, old / "spec.toml", "-o", old.parent / "other") if command == "fork" else (old,)
    done = here(command, *given)
    one_sentence(done, 2, "was made by jaxaudit 0.1.0", "can report and read it, not go on with it")
    assert {path.name for path in old.parent.iterdir()} == {"run-0.1"}
