"""Batches of one run that several processes train side by side."""

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
"""The baseline has two batches, and the fork group six."""

WORKER = """
import sys
sys.path.insert(0, {helpers!r})
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
import quadratic
from jaxaudit.runs.workers import train_batch
sys.stdin.readline()  # all workers begin at the same time
for number in {numbers}:
    train_batch({folder!r}, number)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    durable.run(parse(BATCHES), folder)
    return folder


@pytest.fixture
def planned_run(tmp_path, monkeypatch):
    """A run whose batches are planned and not trained."""
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_execute", lambda *arguments: None)
        durable.run(parse(BATCHES), tmp_path / "run")
    return tmp_path / "run"


def train_in_processes(folder, *shares):
    """Trains shares of a run's batches, each in a separate process."""
    cache = str(ROOT / ".pytest_cache" / "xla")
    programs = [
        WORKER.format(helpers=str(HELPERS), cache=cache, folder=str(folder), numbers=list(numbers))
        for numbers in shares
    ]
    workers = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for program in programs
    ]
    for worker in workers:
        worker.stdin.write("\n")
        worker.stdin.flush()
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert not any(worker.returncode for worker in workers), errors


@pytest.mark.exhaustive
def test_two_processes_that_write_batches_concurrently_lose_nothing(planned_run, reference):
    train_in_processes(planned_run, [0], [1])
    assert {p.name for p in planned_run.glob("batches/*/attempt-001/onset-*")} == {
        "onset-00000010",
        "onset-00000010-0001",
    }
    train_in_processes(planned_run, [2, 4, 6], [3, 5, 7])
    store = Folder(planned_run)
    assert np.isnan(store.read_telemetry(["performance"])["performance"]).all(), (
        "a worker has written telemetry, which only the driver may do"
    )
    assert {p.name for p in store.batches.iterdir()} == {f"{n:04d}" for n in range(8)}
    durable.resume(planned_run)
    assert_runs_equal(planned_run, reference)


@pytest.mark.exhaustive
def test_the_gathering_process_trains_the_remaining_batches(planned_run, reference):
    train_batch(planned_run, 0)
    train_batch(planned_run, 1)
    train_batch(planned_run, 5)
    durable.resume(planned_run)
    assert_runs_equal(planned_run, reference)


def test_an_unknown_batch_and_a_fork_without_onset_are_refused(planned_run):
    with pytest.raises(UserError, match="has no batch 8; it has 0 to 7"):
        train_batch(planned_run, 8)
    with pytest.raises(
        UserError, match=r"onset-00000010 is missing, so the lanes that start from it cannot be trained"
    ):
        train_batch(planned_run, 2)


def test_a_damaged_plan_is_refused_in_one_sentence(planned_run):
    plan = Folder(planned_run).plan
    text_before = plan.read_text()
    for text in ("{", "[]", text_before.replace('"lanes": [[0, -1]', '"lanes": [[9, -1]')):
        plan.write_text(text)
        with pytest.raises(UserError, match=r"plan.json is damaged: it is no plan of the run's lanes"):
            durable.resume(planned_run)
    shutil.rmtree(planned_run)
