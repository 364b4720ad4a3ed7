"""Runs on a local Ray cluster of a head without cores and two nodes of one core, whose processes are killed."""

import os
import signal
from pathlib import Path

import pytest
from small_runs import assert_runs_equal
from worker_runs import (
    PAUSED_SPEC,
    install_plugin,
    kill,
    read_shards,
    run_in_one_process,
    start_cli,
    wait_for,
    workers_at,
)

from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime.backends import Workers
from jaxaudit.runtime.errors import Failed, UserError
from jaxaudit.spec.document import parse

pytestmark = pytest.mark.default_compilation

MIB = 2**20
SPEC = PAUSED_SPEC.format(pause=0.05)

PPO = """
[audit]
name = "pendulum"
seeds = 2
steps = 24
lanes = 2
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "ppo"
[run]
chunk = 2
checkpoint_every = 1
[metrics]
window = 4
hold = 4
[[perturbation]]
kind = "lr_spike"
magnitude = [10, 100]
onset = [6, 12]
"""
"""This run has as many batches as `SPEC`."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in install_plugin(tmp_path_factory.mktemp("plugin")).items():
            patch.setenv(name, value)
        head = {"num_cpus": 0, "object_store_memory": 80 * MIB, "include_dashboard": False}
        ray_cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            ray_cluster.add_node(num_cpus=1, object_store_memory=80 * MIB)
        yield ray_cluster
        ray_cluster.shutdown()


@pytest.fixture
def ray_workers(cluster):
    return Workers("ray", cluster.address)


@pytest.fixture(scope="module")
def undisturbed_run(cluster, tmp_path_factory):
    """A run of two workers without failures."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    durable.run(parse(SPEC), folder, Workers("ray", cluster.address))
    return folder


@pytest.fixture(scope="module")
def reference(undisturbed_run, tmp_path_factory):
    """The same plan in one process of this machine."""
    return run_in_one_process(SPEC, undisturbed_run, tmp_path_factory.mktemp("whole"))


@pytest.mark.exhaustive
def test_two_workers_give_the_run_of_one_process(undisturbed_run, reference):
    assert_runs_equal(undisturbed_run, reference)
    trained = read_shards(undisturbed_run)
    assert list(trained.outcome) == ["complete"] * 8
    assert trained.worker.nunique() == 2
    assert (trained.from_step == trained.onset).all()
    baseline = trained[trained.fork.isna()]
    assert trained[trained.onset == 6].begun.min() < baseline.ended.max(), "no fork began before the baseline ended"


def node_of_worker(cluster, worker):
    """Returns the node of a worker process."""
    parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    nodes = cluster.list_all_nodes()
    return next(n for n in nodes if any(p.process.pid == parent for p in n.all_processes["raylet"]))


def inject_failures(cluster, folder, driver, failures):
    """Injects failures, one after the other, into a run that a driver distributes."""

    def wait_for_workers(batches):
        return wait_for(lambda: driver.poll() is not None or workers_at(folder, batches, states=2))

    forks = iter([range(2, 5), range(5, 8)])
    for failure in failures:
        pids = wait_for_workers({0} if failure == "worker" else next(forks))
        if failure == "worker":
            kill(pids[0])
        if failure == "node":
            cluster.remove_node(node_of_worker(cluster, next(iter(pids.values()))), allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=80 * MIB)
        if failure == "driver":
            driver.send_signal(signal.SIGKILL)


def check_run_with_failures(cluster, reference, tmp_path, text, *failures):
    folder, spec = tmp_path / "run", tmp_path / "spec.toml"
    spec.write_text(text)
    driver = start_cli("run", spec, "-o", folder, "--on", f"ray:{cluster.address}", "--plan", reference)
    inject_failures(cluster, folder, driver, failures)
    code = driver.wait()
    assert code == (-signal.SIGKILL if "driver" in failures else 0), driver.stderr.read()
    if code:
        durable.resume(folder, Workers("ray", cluster.address))
    assert_runs_equal(folder, reference)
    shards = read_shards(folder)
    lost, retries = shards[shards.outcome == "lost"], shards[shards.attempt > 1]
    assert len(lost)
    assert (retries.from_step > retries.onset).any(), "no attempt continued from stored states"
    assert (shards[shards.outcome == "complete"].groupby("batch").size() == 1).all()
    for _, retry in retries.iterrows():
        previous = shards[(shards.batch == retry.batch) & (shards.attempt == retry.attempt - 1)]
        assert (previous.to_step >= retry.from_step).all(), "a stored step was trained twice"


@pytest.mark.exhaustive
def test_a_run_survives_a_killed_worker_node_and_driver(cluster, reference, tmp_path):
    check_run_with_failures(cluster, reference, tmp_path, SPEC, "worker", "node", "driver")


@pytest.fixture(scope="module")
def ppo_run(cluster, tmp_path_factory):
    """A PPO grid in one process, after it was compared with that of two workers."""
    folder = tmp_path_factory.mktemp("ppo")
    durable.run(parse(PPO), folder / "run", Workers("ray", cluster.address))
    assert_runs_equal(folder / "run", reference := run_in_one_process(PPO, folder / "run", folder))
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("failures", [("worker",), ("node",), ("worker", "node"), ("driver",)], ids="-".join)
def test_a_grid_of_ppo_survives_failures(cluster, ppo_run, tmp_path, failures):
    check_run_with_failures(cluster, ppo_run, tmp_path, PPO, *failures)


@pytest.mark.slow
def test_ctrl_c_stores_states_and_another_backend_resumes(cluster, reference, tmp_path):
    folder, spec = tmp_path / "run", tmp_path / "spec.toml"
    spec.write_text(SPEC)
    driver = start_cli("run", spec, "-o", folder, "--on", f"ray:{cluster.address}", "--plan", reference)
    wait_for(lambda: driver.poll() is not None or workers_at(folder, range(2, 5), states=1))
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60) == 130
    stderr = driver.stderr.read()
    assert f"go on with: jaxaudit resume {folder}" in stderr
    assert "Traceback" not in stderr
    assert Folder(folder).read_environment()["status"] == "interrupted"
    assert start_cli("resume", folder).wait() == 0
    assert_runs_equal(folder, reference)
    assert "stopped" in set(read_shards(folder).outcome)


@pytest.mark.slow
def test_an_error_of_the_program_is_reported_and_not_retried(ray_workers, tmp_path, capsys):
    text = SPEC.replace("pause = 0.05", "fails_at = 8")
    with pytest.raises(Failed, match="a failure on purpose"):
        durable.run(parse(text), tmp_path / "run", ray_workers)
    assert "lost its worker" not in capsys.readouterr().err


@pytest.mark.slow
def test_two_workers_that_die_in_one_chunk_end_the_run(ray_workers, tmp_path, capsys):
    text = SPEC.replace("pause = 0.05", "dies_at = 8")
    with pytest.raises(Failed, match=r"batch \d lost its worker twice after step 8 .* given up; go on with"):
        durable.run(parse(text), tmp_path / "run", ray_workers)
    assert capsys.readouterr().err.count("note: batch 0 lost its worker") == 1


@pytest.mark.exhaustive
def test_a_wrong_spec_and_a_too_small_cluster_are_reported_in_one_sentence(cluster, ray_workers, tmp_path):
    with pytest.raises(UserError, match="label_smoothing"):
        durable.run(parse(SPEC.replace("weight_noise", "label_smoothing")), tmp_path / "run", ray_workers)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="no node of the Ray cluster has 64 CPUs and 0 GPUs for a worker"):
        durable.run(parse(SPEC), tmp_path / "run", Workers("ray", cluster.address, cpus=64))
    with pytest.raises(UserError, match=r"no Ray cluster answers at 127.0.0.1:1"):
        durable.run(parse(SPEC), tmp_path / "run", Workers("ray", "127.0.0.1:1"))
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
