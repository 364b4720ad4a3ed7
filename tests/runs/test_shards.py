"""Batches of one run, trained by processes of their own side by side."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from directories import HELPERS, ROOT
from small_runs import SHORT_SPEC, assert_runs_equal

from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.workers import train_batch
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import parse

pytestmark = pytest.mark.default_compilation

BATCHES = SHORT_SPEC.replace("steps = 20", "steps = 20\nlanes = 2")
"""Two batches of the baseline and six of the fork group."""

WORKER = """
import sys
sys.path.insert(0, {here!r})
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
import quadratic
from jaxaudit.runs.workers import train_batch
sys.stdin.readline()  # all workers begin at once
for number in {numbers}:
    train_batch({folder!r}, number)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    durable.run(parse(BATCHES), folder)
    return folder


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run whose batches are planned, and none trained."""
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_execute", lambda *arguments: None)
        durable.run(parse(BATCHES), tmp_path / "run")
    return tmp_path / "run"


def side_by_side(folder, *shares):
    """Trains shares of a run's batches, each in a process of its own."""
    cache = str(ROOT / ".pytest_cache" / "xla")
    programs = [
        WORKER.format(here=str(HELPERS), cache=cache, folder=str(folder), numbers=list(numbers)) for numbers in shares
    ]
    workers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for program in programs
    ]
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    failed = [worker.communicate(timeout=120)[1] for worker in workers]
    assert not any(worker.returncode for worker in workers), failed


@pytest.mark.exhaustive
def test_two_processes_that_write_batches_at_once_lose_nothing(begun, reference):
    side_by_side(begun, [0], [1])
    assert {p.name for p in begun.glob("batches/*/attempt-001/onset-*")} == {"onset-00000010", "onset-00000010-0001"}
    side_by_side(begun, [2, 4, 6], [3, 5, 7])
    store = Folder(begun)
    assert np.isnan(store.read_telemetry(["performance"])["performance"]).all(), "telemetry is the driver's to write"
    assert {p.name for p in store.batches.iterdir()} == {f"{n:04d}" for n in range(8)}
    durable.resume(begun)
    assert_runs_equal(begun, reference)


@pytest.mark.exhaustive
def test_what_others_have_not_trained_is_trained_by_the_one_that_gathers(begun, reference):
    train_batch(begun, 0)
    train_batch(begun, 1)
    train_batch(begun, 5)
    durable.resume(begun)
    assert_runs_equal(begun, reference)


def test_a_batch_that_is_none_and_a_fork_without_its_onset_are_refused(begun):
    with pytest.raises(UserError, match="has no batch 8; it has 0 to 7"):
        train_batch(begun, 8)
    with pytest.raises(
        UserError, match=r"onset-00000010 is missing, so the lanes that start from it cannot be trained"
    ):
        train_batch(begun, 2)


def test_a_damaged_plan_is_one_sentence(begun):
    plan = Folder(begun).plan
    whole = plan.read_text()
    for text in ("{", "[]", whole.replace('"lanes": [[0, -1]', '"lanes": [[9, -1]')):
        plan.write_text(text)
        with pytest.raises(UserError, match=r"plan.json is damaged: it is no plan of the run's lanes"):
            durable.resume(begun)
    shutil.rmtree(begun)
