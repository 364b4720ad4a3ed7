"""Runs on a Ray cluster of this machine: a head without cores and two nodes of one; workers, nodes, drivers die."""

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
"""As many batches as `SPEC` has."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        for name, value in install_plugin(tmp_path_factory.mktemp("plugin")).items():
            patch.setenv(name, value)
        head = {"num_cpus": 0, "object_store_memory": 80 * MIB, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=80 * MIB)
        yield made
        made.shutdown()


@pytest.fixture
def on(cluster):
    return Workers("ray", cluster.address)


@pytest.fixture(scope="module")
def planned(cluster, tmp_path_factory):
    """A run that nothing happened to, by two workers."""
    folder = tmp_path_factory.mktemp("planned") / "run"
    durable.run(parse(SPEC), folder, Workers("ray", cluster.address))
    return folder


@pytest.fixture(scope="module")
def reference(planned, tmp_path_factory):
    """The same plan on this machine, in one process."""
    return run_in_one_process(SPEC, planned, tmp_path_factory.mktemp("whole"))


@pytest.mark.exhaustive
def test_two_workers_end_as_one_process(planned, reference):
    assert_runs_equal(planned, reference)
    trained = read_shards(planned)
    assert list(trained.outcome) == ["complete"] * 8
    assert trained.worker.nunique() == 2
    assert (trained.from_step == trained.onset).all()
    baseline = trained[trained.fork.isna()]
    assert trained[trained.onset == 6].begun.min() < baseline.ended.max(), "a fork waits for its onset alone"


def node_of(cluster, worker):
    """The node that a worker process is of."""
    parent = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1])
    nodes = cluster.list_all_nodes()
    return next(n for n in nodes if any(p.process.pid == parent for p in n.all_processes["raylet"]))


def hurt(cluster, folder, driver, accidents):
    """Accidents, one after the other, to a run that a driver hands out."""

    def at_work(batches):
        return wait_for(lambda: driver.poll() is not None or workers_at(folder, batches, states=2))

    forks = iter([range(2, 5), range(5, 8)])
    for accident in accidents:
        found = at_work({0} if accident == "worker" else next(forks))
        if accident == "worker":
            kill(found[0])
        if accident == "node":
            cluster.remove_node(node_of(cluster, next(iter(found.values()))), allow_graceful=False)
            cluster.add_node(num_cpus=1, object_store_memory=80 * MIB)
        if accident == "driver":
            driver.send_signal(signal.SIGKILL)


def hurt_and_held_against(cluster, reference, tmp_path, text, *accidents):
    folder, spec = tmp_path / "run", tmp_path / "spec.toml"
    spec.write_text(text)
    driver = start_cli("run", spec, "-o", folder, "--on", f"ray:{cluster.address}", "--plan", reference)
    hurt(cluster, folder, driver, accidents)
    code = driver.wait()
    assert code == (-signal.SIGKILL if "driver" in accidents else 0), driver.stderr.read()
    if code:
        durable.resume(folder, Workers("ray", cluster.address))
    assert_runs_equal(folder, reference)
    told = read_shards(folder)
    lost, after = told[told.outcome == "lost"], told[told.attempt > 1]
    assert len(lost)
    assert (after.from_step > after.onset).any(), "it went on from its states"
    assert (told[told.outcome == "complete"].groupby("batch").size() == 1).all()
    for _, one in after.iterrows():
        earlier = told[(told.batch == one.batch) & (told.attempt == one.attempt - 1)]
        assert (earlier.to_step >= one.from_step).all(), "nothing is trained twice but what was not kept"


@pytest.mark.exhaustive
def test_a_killed_worker_a_removed_node_and_a_killed_driver(cluster, reference, tmp_path):
    hurt_and_held_against(cluster, reference, tmp_path, SPEC, "worker", "node", "driver")


@pytest.fixture(scope="module")
def ppo(cluster, tmp_path_factory):
    """A grid of PPO's, by two workers and by one process."""
    place = tmp_path_factory.mktemp("ppo")
    durable.run(parse(PPO), place / "run", Workers("ray", cluster.address))
    assert_runs_equal(place / "run", reference := run_in_one_process(PPO, place / "run", place))
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("accidents", [("worker",), ("node",), ("worker", "node"), ("driver",)], ids="-".join)
def test_a_grid_of_ppo(cluster, ppo, tmp_path, accidents):
    hurt_and_held_against(cluster, ppo, tmp_path, PPO, *accidents)


@pytest.mark.slow
def test_ctrl_c_keeps_states_and_another_backend_goes_on(cluster, reference, tmp_path):
    folder, spec = tmp_path / "run", tmp_path / "spec.toml"
    spec.write_text(SPEC)
    driver = start_cli("run", spec, "-o", folder, "--on", f"ray:{cluster.address}", "--plan", reference)
    wait_for(lambda: driver.poll() is not None or workers_at(folder, range(2, 5), states=1))
    driver.send_signal(signal.SIGINT)
    assert driver.wait(60) == 130
    said = driver.stderr.read()
    assert f"go on with: jaxaudit resume {folder}" in said
    assert "Traceback" not in said
    assert Folder(folder).read_environment()["status"] == "interrupted"
    assert start_cli("resume", folder).wait() == 0
    assert_runs_equal(folder, reference)
    assert "stopped" in set(read_shards(folder).outcome)


@pytest.mark.slow
def test_an_error_of_the_program_is_one_sentence_and_not_tried_again(on, tmp_path, capsys):
    text = SPEC.replace("pause = 0.05", "fails_at = 8")
    with pytest.raises(Failed, match="the accident of a test"):
        durable.run(parse(text), tmp_path / "run", on)
    assert "lost its worker" not in capsys.readouterr().err


@pytest.mark.slow
def test_two_workers_that_die_in_the_same_chunk_are_enough(on, tmp_path, capsys):
    text = SPEC.replace("pause = 0.05", "dies_at = 8")
    with pytest.raises(Failed, match=r"batch \d lost its worker twice after step 8 .* given up; go on with"):
        durable.run(parse(text), tmp_path / "run", on)
    assert capsys.readouterr().err.count("note: batch 0 lost its worker") == 1


@pytest.mark.exhaustive
def test_a_wrong_spec_and_a_cluster_without_room_are_sentences(cluster, on, tmp_path):
    with pytest.raises(UserError, match="label_smoothing"):
        durable.run(parse(SPEC.replace("weight_noise", "label_smoothing")), tmp_path / "run", on)
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="no node of the Ray cluster has 64 CPUs and 0 GPUs for a worker"):
        durable.run(parse(SPEC), tmp_path / "run", Workers("ray", cluster.address, cpus=64))
    with pytest.raises(UserError, match=r"no Ray cluster answers at 127.0.0.1:1"):
        durable.run(parse(SPEC), tmp_path / "run", Workers("ray", "127.0.0.1:1"))
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
