"""Runs that processes of this machine train through submitit, and that are killed, preempted, or reach a time limit."""

import pytest
from paused import DISK_FULL_VARIABLE
from small_runs import assert_runs_equal
from worker_runs import PAUSED_SPEC, install_plugin, read_shards, run_in_one_process, run_through_failures

from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime.backends import Workers
from jaxaudit.runtime.errors import Failed, UserError
from jaxaudit.spec.document import parse

pytestmark = pytest.mark.default_compilation

SPEC = PAUSED_SPEC.format(pause=0.05).replace("[1.0, 0.1]", "1.0").replace("[6, 12]", "6")
"""The baseline has two batches and one fork group has two. Each batch has a process."""

TWO_WORKERS = Workers("local", count=2)


@pytest.fixture(autouse=True, scope="module")
def plugin_environment(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in install_plugin(tmp_path_factory.mktemp("plugin")).items():
            patch.setenv(name, value)
        yield


@pytest.mark.exhaustive
def test_a_killed_and_a_preempted_worker_are_replaced(tmp_path):
    folder = tmp_path / "run"
    shards = run_through_failures(SPEC, folder, TWO_WORKERS)
    assert_runs_equal(folder, run_in_one_process(SPEC, folder, tmp_path))
    assert (shards[shards.outcome == "complete"].groupby("batch").size() == 1).all()
    assert not folder.with_name(f".{folder.name}.jobs").exists()


@pytest.mark.slow
def test_workers_with_a_time_limit_finish_the_run(tmp_path):
    text = SPEC.replace("pause = 0.05", "pause = 2.4")
    durable.run(parse(text), tmp_path / "run", Workers("local", count=2, minutes=1))
    shards = read_shards(tmp_path / "run")
    assert (shards.attempt > 1).any()
    assert (shards[shards.attempt > 1].from_step > shards[shards.attempt > 1].onset).all()
    assert set(shards.outcome) == {"complete", "lost"}
    assert_runs_equal(tmp_path / "run", run_in_one_process(text, tmp_path / "run", tmp_path))


@pytest.mark.slow
def test_a_full_disk_is_reported_and_the_run_resumes_with_more_space(tmp_path, monkeypatch):
    text, folder = SPEC.replace("pause = 0.05", "full_at = 10"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setenv(DISK_FULL_VARIABLE, "1")
        with pytest.raises(Failed, match="the disk is full; with more space, go on with: jaxaudit resume"):
            durable.run(parse(text), folder, TWO_WORKERS)
    assert Folder(folder).read_environment()["status"] != "finished"
    durable.resume(folder, TWO_WORKERS)
    assert_runs_equal(folder, run_in_one_process(text, folder, tmp_path))


@pytest.mark.exhaustive
def test_a_spec_error_that_a_worker_detects_is_reported_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="label_smoothing"):
        durable.run(parse(SPEC.replace("weight_noise", "label_smoothing")), tmp_path / "run", TWO_WORKERS)
    assert not (tmp_path / "run").exists()
