"""Processes that train a run's lanes together, two with two devices each, against one that has four."""

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
"""Three lanes of the baseline, which four devices fill up to four, and nine of each fork group."""


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
"""A mesh of two lanes side by side, each of two devices."""


@pytest.fixture(autouse=True, scope="module")
def four_devices(tmp_path_factory):
    """The environment of one process; of two, each has half."""
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
    place = tmp_path_factory.mktemp("whole")
    (place / "spec.toml").write_text(SPEC)
    done = start_cli("run", place / "spec.toml", "-o", place / "run")
    assert done.wait() == 0, done.stderr.read()
    return place / "run"


def together(*arguments):
    """The same command in two processes, the first of which writes the report."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    given = ["--coordinator", place, "--processes", 2, "--process"]
    return [start_cli(*arguments, *given, number, figures=True, JAX_NUM_CPU_DEVICES="2") for number in range(2)]


def ended(processes, seconds=120):
    """Exit codes, and what was said."""
    said = [process.communicate(timeout=seconds)[1] for process in processes]
    return [process.returncode for process in processes], said


@pytest.mark.slow
def test_two_processes_end_as_one(spec, reference, tmp_path):
    codes, said = ended(together("run", spec, "-o", tmp_path / "run"))
    assert codes == [0, 0], said
    assert_runs_equal(tmp_path / "run", reference)
    assert "jaxaudit" not in said[1], "the first alone says something"


@pytest.mark.exhaustive
def test_a_process_that_is_killed_is_told_of_and_the_run_goes_on(spec, reference, tmp_path):
    folder = tmp_path / "run"
    processes = together("run", spec, "-o", folder)
    wait_for(lambda: processes[0].poll() is not None or workers_at(folder, {1, 2}, states=2))
    processes[1].send_signal(signal.SIGKILL)
    codes, said = ended(processes, 30)
    assert codes == [1, -signal.SIGKILL], said
    assert "jaxaudit: another process of the run is gone; in as many as before, go on with: jaxaudit resume" in said[0]
    assert "Traceback" not in said[0]
    codes, said = ended(together("resume", folder))
    assert codes == [0, 0], said
    assert_runs_equal(folder, reference)
    told = read_shards(folder)
    assert (told[told.attempt > 1].from_step > told[told.attempt > 1].onset).all()
    assert (told.attempt > 1).any()


@pytest.mark.exhaustive
def test_what_is_wrong_is_told_once(spec, tmp_path):
    spec.write_text(SPEC.replace("weight_noise", "label_smoothing"))
    codes, said = ended(together("run", spec, "-o", tmp_path / "run"))
    assert codes == [2, 2]
    assert said[0].count("jaxaudit: ") == 1
    assert "label_smoothing" in said[0]
    assert "jaxaudit: " not in said[1]
    assert not (tmp_path / "run").exists()
    codes, said = ended([start_cli("run", spec, "-o", tmp_path / "run", "--distributed")])
    assert codes == [2]
    assert "jaxaudit: --distributed determines its processes under srun, mpirun or Kubernetes alone" in said[0]


@pytest.mark.slow
def test_a_mesh_of_lanes_and_parts_of_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text(" ".join(f"word{n % 97} and {n % 89}" for n in range(4000)))
    Path("gpt2.toml").write_text(GPT2)
    one = start_cli("run", "gpt2.toml", "-o", "one")
    assert one.wait() == 0, one.stderr.read()
    processes = together("run", "gpt2.toml", "-o", "two")
    wait_for(lambda: processes[0].poll() is not None or workers_at(tmp_path / "two", {1}, states=1), 400)
    processes[0].send_signal(signal.SIGKILL)
    codes, said = ended(processes, 60)
    assert codes[0] == -signal.SIGKILL
    assert codes[1], said
    codes, said = ended(together("resume", "two"))
    assert codes == [0, 0], said
    assert_runs_equal(tmp_path / "two", tmp_path / "one")
    assert (read_shards(tmp_path / "two").from_step % 4 == 2).any(), "it went on from its states"


@pytest.mark.slow
def test_one_that_hangs_is_told_of_within_30_seconds(spec, tmp_path):
    folder = tmp_path / "run"
    processes = together("run", spec, "-o", folder)
    wait_for(lambda: processes[0].poll() is not None or workers_at(folder, {0}, states=2))
    processes[1].send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    try:
        said = processes[0].communicate(timeout=40)[1]
    finally:
        processes[1].kill()
    assert time.monotonic() - begun < 30
    assert processes[0].returncode
    assert "another task died" in said


@pytest.mark.slow
def test_ctrl_c_stops_both_in_the_same_chunk(spec, reference, tmp_path):
    folder = tmp_path / "run"
    processes = together("run", spec, "-o", folder)
    wait_for(lambda: processes[0].poll() is not None or workers_at(folder, {1, 2}, states=1))
    for process in processes[::-1]:
        process.send_signal(signal.SIGINT)
    codes, said = ended(processes)
    assert codes == [130, 130], said
    assert f"go on with: jaxaudit resume {folder}" in said[0]
    assert "jaxaudit: " not in said[1]
    one = start_cli("resume", folder)  # by one with as many devices
    assert one.wait() == 0, one.stderr.read()
    assert_runs_equal(folder, reference)


def test_an_audit_in_memory_is_one_process(monkeypatch):
    monkeypatch.setattr(Program, "across_hosts", True)
    with pytest.raises(ValueError, match="in the memory of one process"):
        ja.audit(quadratic(None), [], seeds=1, steps=4)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--coordinator", "a:1"], "--coordinator HOST:PORT, --processes N and --process I go together"),
        (["--coordinator", "a:1", "--processes", "2", "--process", "2"], "--process must be from 0 to 1, not 2"),
        (["--distributed", "--on", "local"], "--on trains lanes in workers that are independent of each other"),
        (["--process", "0", "--on", "local"], "--on trains lanes in workers that are independent of each other"),
    ],
)
def test_places_that_cannot_be(given, words, spec, capsys, monkeypatch):
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)
    assert cli.main(["run", str(spec), *given]) == 2
    assert words in capsys.readouterr().err
