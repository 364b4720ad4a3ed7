"""Several processes that train a run's lanes together: two with two devices each, compared with one that has four."""

import signal
import socket
import time
from pathlib import Path

import pytest
from quadratic import quadratic
from small_runs import assert_runs_equal
from worker_runs import PAUSED_SPEC, install_plugin, read_shards, start_cli, wait_for, workers_at

import jaxaudit as ja
from jaxaudit.cli import main as cli
from jaxaudit.core.program import Program

pytestmark = pytest.mark.long

SPEC = PAUSED_SPEC.format(pause=0.02).replace("seeds = 2", "seeds = 3").replace("lanes = 2", "")
"""The baseline has three lanes, padded to four for four devices, and each fork group has nine."""


GPT2 = """
[audit]
name = "gpt2"
seeds = 2
steps = 8
model_devices = 2
[task]
kind = "text"
name = "corpus.txt"
tokenizer = "bytes"
[learner]
kind = "language_model"
size = "nano"
context = 16
batch_size = 4
accumulation = 2
held_out = 4
[run]
chunk = 2
checkpoint_every = 1
[metrics]
window = 2
hold = 2
[[perturbation]]
kind = "lr_spike"
magnitude = 10
onset = 4
duration = 2
"""
"""A mesh of two lanes side by side, with two devices for each lane."""


@pytest.fixture(autouse=True, scope="module")
def four_devices(tmp_path_factory):
    """Sets the environment of a process with four devices. Each of two processes gets two."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in install_plugin(tmp_path_factory.mktemp("plugin")).items():
            patch.setenv(name, value)
        patch.setenv("JAX_NUM_CPU_DEVICES", "4")
        yield


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    return tmp_path / "spec.toml"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    (folder / "spec.toml").write_text(SPEC)
    process = start_cli("run", folder / "spec.toml", "-o", folder / "run")
    assert process.wait() == 0, process.stderr.read()
    return folder / "run"


def start_two_processes(*arguments):
    """Starts the same command in two processes, of which the first writes the report."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free_socket.getsockname()[1]}"
    options = ["--coordinator", address, "--processes", 2, "--process"]
    return [start_cli(*arguments, *options, number, figures=True, JAX_NUM_CPU_DEVICES="2") for number in range(2)]


def wait_for_exit(processes, seconds=120):
    """Returns exit codes and standard error."""
    stderr = [process.communicate(timeout=seconds)[1] for process in processes]
    return [process.returncode for process in processes], stderr


@pytest.mark.slow
def test_two_processes_give_the_run_of_one(spec, reference, tmp_path):
    codes, stderr = wait_for_exit(start_two_processes("run", spec, "-o", tmp_path / "run"))
    assert codes == [0, 0], stderr
    assert_runs_equal(tmp_path / "run", reference)
    assert "jaxaudit" not in stderr[1], "the second process printed something"


@pytest.mark.exhaustive
def test_a_killed_process_is_reported_and_the_run_can_be_resumed(spec, reference, tmp_path):
    folder = tmp_path / "run"
    processes = start_two_processes("run", spec, "-o", folder)
    wait_for(lambda: processes[0].poll() is not None or workers_at(folder, {1, 2}, states=2))
    processes[1].send_signal(signal.SIGKILL)
    codes, stderr = wait_for_exit(processes, 30)
    assert codes == [1, -signal.SIGKILL], stderr
    assert (
        "jaxaudit: another process of the run is gone; in as many as before, go on with: jaxaudit resume" in stderr[0]
    )
    assert "Traceback" not in stderr[0]
    codes, stderr = wait_for_exit(start_two_processes("resume", folder))
    assert codes == [0, 0], stderr
    assert_runs_equal(folder, reference)
    shards = read_shards(folder)
    assert (shards[shards.attempt > 1].from_step > shards[shards.attempt > 1].onset).all()
    assert (shards.attempt > 1).any()


@pytest.mark.exhaustive
def test_a_users_error_is_reported_once(spec, tmp_path):
    spec.write_text(SPEC.replace("weight_noise", "label_smoothing"))
    codes, stderr = wait_for_exit(start_two_processes("run", spec, "-o", tmp_path / "run"))
    assert codes == [2, 2]
    assert stderr[0].count("jaxaudit: ") == 1
    assert "label_smoothing" in stderr[0]
    assert "jaxaudit: " not in stderr[1]
    assert not (tmp_path / "run").exists()
    codes, stderr = wait_for_exit([start_cli("run", spec, "-o", tmp_path / "run", "--distributed")])
    assert codes == [2]
    assert "jaxaudit: --distributed determines its processes under srun, mpirun or Kubernetes alone" in stderr[0]


@pytest.mark.slow
def test_a_mesh_of_lanes_and_model_parts_resumes_bitwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(" ".join(f"word{n % 97} and {n % 89}" for n in range(4000)))
    Path("gpt2.toml").write_text(GPT2)
    process = start_cli("run", "gpt2.toml", "-o", "one")
    assert process.wait() == 0, process.stderr.read()
    processes = start_two_processes("run", "gpt2.toml", "-o", "two")
    wait_for(lambda: processes[0].poll() is not None or workers_at(tmp_path / "two", {1}, states=1), 400)
    processes[0].send_signal(signal.SIGKILL)
    codes, stderr = wait_for_exit(processes, 60)
    assert codes[0] == -signal.SIGKILL
    assert codes[1], stderr
    codes, stderr = wait_for_exit(start_two_processes("resume", "two"))
    assert codes == [0, 0], stderr
    assert_runs_equal(tmp_path / "two", tmp_path / "one")
    assert (read_shards(tmp_path / "two").from_step % 4 == 2).any(), "the run did not continue from its stored states"


@pytest.mark.slow
def test_a_hanging_process_is_reported_within_30_seconds(spec, tmp_path):
    folder = tmp_path / "run"
    processes = start_two_processes("run", spec, "-o", folder)
    wait_for(lambda: processes[0].poll() is not None or workers_at(folder, {0}, states=2))
    processes[1].send_signal(signal.SIGSTOP)
    start = time.monotonic()
    try:
        stderr = processes[0].communicate(timeout=40)[1]
    finally:
        processes[1].kill()
    assert time.monotonic() - start < 30
    assert processes[0].returncode
    assert "another task died" in stderr


@pytest.mark.slow
def test_ctrl_c_stops_both_processes_in_the_same_chunk(spec, reference, tmp_path):
    folder = tmp_path / "run"
    processes = start_two_processes("run", spec, "-o", folder)
    wait_for(lambda: processes[0].poll() is not None or workers_at(folder, {1, 2}, states=1))
    for process in processes[::-1]:
        process.send_signal(signal.SIGINT)
    codes, stderr = wait_for_exit(processes)
    assert codes == [130, 130], stderr
    assert f"go on with: jaxaudit resume {folder}" in stderr[0]
    assert "jaxaudit: " not in stderr[1]
    resumed = start_cli("resume", folder)  # one process with as many devices
    assert resumed.wait() == 0, resumed.stderr.read()
    assert_runs_equal(folder, reference)


def test_an_audit_in_memory_refuses_several_processes(monkeypatch):
    monkeypatch.setattr(Program, "across_hosts", True)
    with pytest.raises(ValueError, match="in the memory of one process"):
        ja.audit(quadratic(None), [], seeds=1, steps=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--coordinator", "a:1"], "--coordinator HOST:PORT, --processes N and --process I go together"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2"], "--process must be from 0 to 1, not 2"),
        (["--distributed", "--on", "local"], "--on trains lanes in workers that are independent of each other"),
        (["--process", "0", "--on", "local"], "--on trains lanes in workers that are independent of each other"),
    ],
)
def test_invalid_options_of_processes_are_refused(options, words, spec, capsys, monkeypatch):
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)
    assert cli.main(["run", str(spec), *options]) == 2
    assert words in capsys.readouterr().err
