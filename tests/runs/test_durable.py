"""Runs that are killed, stopped, short of disk space or damaged end like runs without interruption."""

import errno
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from small_runs import (
    CHUNKS,
    SHORT_SPEC,
    SPEC,
    THREE_MAGNITUDES,
    assert_runs_equal,
    chunks_done,
    error_sentence,
    flip_byte,
    run_through_kills,
    signal_at_chunk,
    spec_header,
    stored_arrays,
)

from jaxaudit.core.batches import Batch
from jaxaudit.execution import engine, memory
from jaxaudit.execution.engine import Engine, ProgramPiece
from jaxaudit.runs import checkpoint
from jaxaudit.runs import disk_sink as trained
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.disk_sink import FolderSink
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime.errors import UserError, interrupt_handler
from jaxaudit.spec.document import parse

pytestmark = [pytest.mark.long, pytest.mark.default_compilation]

EARLY, LATE = 6, CHUNKS - 2
BATCHES = spec_header(audit="lanes = 2") + THREE_MAGNITUDES

TRAINING = """kind = "ppo"
num_envs = 2
rollout_length = 32"""
PPO = (
    spec_header(seeds=2, steps=40, learner=TRAINING)
    + """[run]
chunk = 1
checkpoint_every = 1
[[perturbation]]
kind = "lr_spike"
magnitude = [3, 30]
onset = 10
duration = 5
[[perturbation]]
kind = "observation_noise"
magnitude = 0.5
onset = 10
duration = "end"
"""
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, and copies of its folder after `EARLY` and `LATE` chunks."""
    folder = tmp_path_factory.mktemp("runs")

    def reached(self, *arguments, original=FolderSink.reached):
        original(self, *arguments)
        chunks = self._progress.chunks_done
        if chunks in (EARLY, LATE) and not (folder / str(chunks)).exists():
            shutil.copytree(self.store.path, folder / str(chunks))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSink, "reached", reached)
        durable.run(parse(SPEC), folder / "run")
    return folder


@pytest.fixture(scope="module")
def reference(runs):
    return runs / "run"


@pytest.fixture
def stopped(runs, tmp_path):
    """A copy of a run that was killed in its last fork group."""
    return shutil.copytree(runs / str(LATE), tmp_path / "run")


@pytest.mark.parametrize(
    "kills", [pytest.param(7, marks=pytest.mark.exhaustive), pytest.param(20, marks=pytest.mark.slow)]
)
def test_a_run_killed_at_many_instants_resumes_bitwise(kills, server, reference, tmp_path):
    folder, chunks_at_kill = run_through_kills(server, tmp_path, SPEC, CHUNKS, kills)
    assert len(chunks_at_kill) >= kills - 2
    assert len(set(chunks_at_kill)) >= (kills + 1) // 2  # a chunk may be stored before its kill arrives
    assert_runs_equal(folder, reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["run", "resume"])
def test_only_one_of_several_concurrent_starts_trains(command, server, runs, reference, tmp_path):
    folder = tmp_path / "run"
    if command == "resume":
        shutil.copytree(runs / str(EARLY), folder)
        argv = ("resume", folder)
    else:
        (tmp_path / "spec.toml").write_text(SPEC)
        argv = ("run", tmp_path / "spec.toml", "-o", folder)
    rng = random.Random(1)
    results = server.run_concurrently(*argv, delays=[rng.uniform(0, 1.0) for _ in range(5)])
    assert sorted(result.code for result in results) == [0, 2, 2, 2, 2]
    for result in results:
        if result.code:
            words = error_sentence(result, 2)
            assert any(reason in words for reason in ("another process is at work", "not empty", "already finished"))
    assert_runs_equal(folder, reference)


@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.exhaustive), pytest.param(7, marks=pytest.mark.slow)]
)
def test_a_run_in_batches_that_is_killed_resumes_bitwise(kills, server, run_cli, tmp_path):
    """The baseline has two batches, and the fork group six."""
    (tmp_path / "spec.toml").write_text(BATCHES)
    result = run_cli("run", tmp_path / "spec.toml", "-o", tmp_path / "whole")
    assert result.code == 0, result.err
    assert "2 lanes at a time" in result.err
    folder, chunks_at_kill = run_through_kills(server, tmp_path, BATCHES, 2 * 5 + 6 * 3, kills)
    assert len(set(chunks_at_kill)) >= kills - 2
    assert_runs_equal(folder, tmp_path / "whole")
    names = {path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("onset")}
    assert names == {"onset-00000010", "onset-00000010-0001"}


@pytest.mark.slow
def test_a_ppo_run_that_is_killed_resumes_bitwise(server, tmp_path):
    (tmp_path / "spec.toml").write_text(PPO)
    result = server("run", tmp_path / "spec.toml", "-o", tmp_path / "whole")
    assert result.code == 0, result.err
    folder, _ = run_through_kills(server, tmp_path, PPO, 14 + 30, kills=7)
    assert_runs_equal(folder, tmp_path / "whole")


def truncate(path):
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def delete(path):
    next(p for p in sorted(path.rglob("*")) if p.is_file()).unlink()


def change_digest(path):
    digest = path / "digest.json"
    digest.write_text(digest.read_text().replace('"step": ', '"step": 1'))


DAMAGES = {
    "flipped": ([-1], [flip_byte], ["going back"]),
    "truncated": ([-1], [truncate], ["going back"]),
    "a file deleted": ([-1], [delete], ["going back"]),
    "another digest": ([-1], [change_digest], ["going back"]),
    "empty": ([-1], [lambda path: [shutil.rmtree(path), path.mkdir()]], ["going back"]),
    "both": ([-1, -2], [flip_byte, delete], ["going back", "going back"]),
    "the onset": (["onset-00000010"], [flip_byte], ["training it again"]),
    "an onset gone": (["onset-00000005"], [shutil.rmtree], ["training it again"]),
    "everything": (
        [-1, -2, "onset-00000005", "onset-00000010"],
        [flip_byte] * 4,
        ["training it again"] * 2 + ["going back"] * 2,
    ),
}


RARE_DAMAGES = ("another digest", "empty", "both", "an onset gone", "flipped", "everything", "a file deleted")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.exhaustive if case in RARE_DAMAGES else ()) for case in DAMAGES]
)
def test_damaged_checkpoints_are_detected_and_trained_again(case, run_cli, stopped, reference):
    targets, damages, words = DAMAGES[case]
    chunks = sorted(stopped.glob("batches/*/*/state-*"))
    for target, damage in zip(targets, damages, strict=True):
        damage(chunks[target] if isinstance(target, int) else stopped / "checkpoints" / target)
    result = run_cli("resume", stopped)
    assert result.code == 0, result.err
    notes = [line for line in result.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(words), result.err
    assert all(word in note for word, note in zip(words, notes, strict=True))
    assert_runs_equal(stopped, reference)


@pytest.mark.exhaustive
def test_a_run_killed_while_an_onset_is_trained_again_resumes_bitwise(server, run_cli, stopped, reference):
    flip_byte(stopped / "checkpoints" / "onset-00000010")
    watch = signal_at_chunk(stopped, signal.SIGKILL, chunk=0, wait=2.0)
    server("resume", stopped, watch=watch)
    result = run_cli("resume", stopped)
    assert result.code in (0, 2), result.err
    assert_runs_equal(stopped, reference)


def test_the_error_sentence_is_the_last_output(server, tmp_path):
    setup = "import atexit, os; atexit.register(os.write, 2, b'RuntimeError: Event loop is closed')"
    error_sentence(server("resume", tmp_path / "nothing", setup=setup), 2, "nothing")


def limit_file_size(size):
    """Returns code that limits the size of files, without a compilation cache, whose entries would stay truncated."""
    cache = "import jax; jax.config.update('jax_enable_compilation_cache', False)"
    return f"{cache}; import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"


def test_a_limit_on_file_size_is_reported_and_the_run_resumes(server, run_cli, stopped, reference):
    error_sentence(server("resume", stopped, setup=limit_file_size(600)), 1, "full", "jaxaudit resume")
    assert run_cli("resume", stopped).code == 0
    assert_runs_equal(stopped, reference)


@pytest.fixture
def small_disk(tmp_path):
    """A small file system, which tests fill up. It needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount file systems")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("free", [0, *(pytest.param(free, marks=pytest.mark.slow) for free in (8, 100))])
def test_a_full_disk_is_reported_and_the_run_resumes(free, server, run_cli, runs, reference, small_disk):
    """The disk has `free` KiB left when training continues."""
    folder = shutil.copytree(runs / str(EARLY), small_disk / "run")
    filler = small_disk / "filler"
    filler_size = shutil.disk_usage(small_disk).free - free * 1024
    filler.write_bytes(bytes(max(0, filler_size)))
    error_sentence(server("resume", folder), 1, "the disk is full; with more space, go on with: jaxaudit resume")
    filler.unlink()
    result = run_cli("resume", folder)
    assert result.code == 0, result.err
    assert_runs_equal(folder, reference)


def process_state():
    """Returns the hooks, log levels and warning filters of the process."""
    loggers = [logging.getLogger(name).level for name in (None, "absl", "asyncio")]
    return threading.excepthook, sys.unraisablehook, sys.excepthook, loggers, list(warnings.filters)


def test_half_written_checkpoints_are_removed(run_cli, stopped, reference):
    (stopped / "checkpoints" / ".unfinished-onset-00000010-0001").mkdir()
    assert run_cli("resume", stopped).code == 0
    assert_runs_equal(stopped, reference)


def test_a_save_does_not_change_the_process_state(tmp_path):
    """Errors of another thread must still be reported during a save."""

    def pieces():
        during.append(process_state())
        yield ProgramPiece(0, 2, {"x": np.arange(6.0).reshape(2, 3)})
        during.append(process_state())

    before, during = process_state(), []
    checkpoint.save(tmp_path / "x", pieces(), {})
    assert during == [before] * 2
    assert process_state() == before


def test_a_save_keeps_what_another_process_writes_under_a_longer_name(tmp_path):
    """The second batch's onset, `onset-00000010-0001`, is written beside the first's."""
    others = tmp_path / ".unfinished-x-0001" / "lanes-000002"
    others.mkdir(parents=True)
    leftovers = [tmp_path / ".unfinished-x" / "old", tmp_path / ".unfinished-x.orbax-checkpoint-tmp" / "old"]
    for folder in leftovers:
        folder.mkdir(parents=True)
    checkpoint.save(tmp_path / "x", [ProgramPiece(0, 2, {"x": np.arange(6.0).reshape(2, 3)})], {})
    assert others.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"x", ".unfinished-x-0001"}
    assert not (tmp_path / "x" / "old").exists()


def test_a_save_without_disk_space_fails_before_writing(tmp_path, monkeypatch):
    state = {"x": np.arange(6.0).reshape(2, 3)}
    checkpoint.save(tmp_path / "x", [ProgramPiece(0, 2, state)], {"kept": 1})
    sizes = []

    def no_space(descriptor, offset, size):
        sizes.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    monkeypatch.setattr(checkpoint.ocp, "save", lambda *_: pytest.fail("something was written"))
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "x", [ProgramPiece(0, 2, state)], {"kept": 2})
    assert sizes[0] > state["x"].nbytes
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert checkpoint.verify(tmp_path / "x") == {"kept": 1}


def test_large_pieces_are_in_memory_one_at_a_time(tmp_path, monkeypatch):
    """Objects in a reference cycle are freed before the next piece, although garbage is rarely collected."""

    class Cycle:
        def __init__(self, states):
            self.states, self.self = states, self

    def make_piece(first):
        cycle = Cycle({"x": np.zeros(4)})
        cycles.append(weakref.ref(cycle))
        return ProgramPiece(first, 1, cycle.states)

    def pieces():
        for first in range(3):
            assert [cycle for cycle in cycles if cycle() is not None] == []
            yield make_piece(first)

    cycles = []
    monkeypatch.setattr(engine, "LARGE", 1)
    gc.disable()
    try:
        checkpoint.save(tmp_path / "x", pieces(), {})
    finally:
        gc.enable()
    assert len(cycles) == 3


def test_a_disk_too_full_to_begin_is_refused(run_cli, small_disk, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - 20 * 1024))
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", small_disk / "a" / "run"), 2, "cannot make the folder")
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize(("save", "chunk"), [(3.0, 10.0), (3.0, 0.5), (0.01, 10.0)])
def test_checkpoints_take_a_twentieth_of_the_time(save, chunk, monkeypatch):
    """The first is saved after the first chunk. A spec may set another interval."""
    clock, saved_steps = [0.0], []

    def save_state(folder, engine, states, step):
        clock[0] += save
        saved_steps.append(step)

    monkeypatch.setattr(trained, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(trained.BatchAttempt, "save", save_state)
    zeros = np.zeros(1, int)
    batch = Batch(id=0, fork=0, onset=0, stop=5000, first=0, seeds=zeros, columns=zeros, conditions=(), width=1)
    trainer = SimpleNamespace(grid=None)
    sink = FolderSink(Folder(Path("run")), trainer)
    sink.attempt = trained.BatchAttempt(Path("attempt-001"), batch)
    for step in range(1, 1000):
        clock[0] += chunk
        sink.reached(trainer, batch, None, step)
    time_share = save * len(saved_steps) / clock[0]
    assert saved_steps[0] == 1
    assert time_share == pytest.approx(0.05, rel=0.1) if save == 3.0 else saved_steps == list(range(1, 1000))


@pytest.mark.parametrize("path", ["file/run", "file", "/proc/run", "x" * 300])
def test_an_impossible_folder_is_refused(path, run_cli, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "file").write_text("mine")
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", tmp_path / path), 2, Path(path).name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "spec.toml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission_is_refused(run_cli, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "shut").mkdir(mode=0o500)
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", tmp_path / "shut" / "run"), 2, "Permission denied")
    assert not any((tmp_path / "shut").iterdir())


def test_leftovers_of_a_killed_start_are_replaced(run_cli, tmp_path, monkeypatch):
    (tmp_path / "spec.toml").write_text(SPEC)
    folder = tmp_path / "run"
    Folder(folder).make(jaxaudit="0")
    (folder / ".unfinished-spec.toml").write_text("[aud")
    (folder / "telemetry.zarr").mkdir()
    monkeypatch.setattr(durable, "_execute", lambda *arguments: None)
    assert run_cli("run", tmp_path / "spec.toml", "-o", folder).code == 0
    assert (folder / "spec.toml").exists()


@pytest.mark.parametrize("name", ["notes.txt", "environment.json", "checkpoints", "telemetry.zarr"])
def test_files_of_the_user_are_kept_and_refused(name, run_cli, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / name).write_text("{}")
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", folder), 2, "exists and is not empty")
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(name, "{}")]


def test_ctrl_c_stores_states_and_the_run_resumes_bitwise(server, run_cli, reference, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "spec.toml").write_text(SPEC)
    watch = signal_at_chunk(folder, signal.SIGINT, chunk=7)
    result = server("run", tmp_path / "spec.toml", "-o", folder, watch=watch)
    last = error_sentence(result, 130, f"of {CHUNKS} chunks; go on with: jaxaudit resume {folder}")
    assert "stopping after this chunk" in result.err
    environment = Folder(folder).read_environment()
    assert environment["status"] == "interrupted"
    assert int(last.split()[3]) >= 7
    assert run_cli("resume", folder).code == 0
    assert_runs_equal(folder, reference)
    assert Folder(folder).read_environment()["wall_seconds"] > environment["wall_seconds"]


def test_ctrl_c_stores_states_even_if_checkpoints_are_rare(server, run_cli, reference, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "spec.toml").write_text(SPEC.replace("checkpoint_every = 1", "checkpoint_every = 1000"))
    watch = signal_at_chunk(folder, signal.SIGINT, chunk=9)  # among forks, whose states are not those of an onset
    result = server("run", tmp_path / "spec.toml", "-o", folder, watch=watch)
    stopped = error_sentence(result, 130, f"of {CHUNKS} chunks").partition("stopped after ")[2].partition(";")[0]
    result = run_cli("resume", folder)
    assert result.code == 0
    assert f"going on after {stopped}" in result.err
    assert stored_arrays(folder) == stored_arrays(reference)


SLEEPY = """
import jax, time, numpy
from jaxaudit.core import program
def sleepy(structure, data, state, lane, step, idle, inner=program.lane_step):
    def wait(t):
        time.sleep(60 if t == 8 else 0)
        return numpy.float32(0)
    zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), "float32"), step, vmap_method="sequential")
    state, telemetry = inner(structure, data, state, lane, step, idle)
    return state, telemetry | {"performance": telemetry["performance"] + zero}
program.lane_step = sleepy
"""


@pytest.mark.exhaustive
def test_a_second_ctrl_c_stops_at_once(server, run_cli, tmp_path):
    """It stops even while a step of a minute runs in a host callback."""
    folder = tmp_path / "run"
    (tmp_path / "spec.toml").write_text(SHORT_SPEC)
    send_signals = signal_at_chunk(folder, signal.SIGINT, signal.SIGINT, chunk=2, wait=0.5)
    sent = []

    def watch(pid):
        send_signals(pid)
        sent.append(time.monotonic())

    result = server("run", tmp_path / "spec.toml", "-o", folder, watch=watch, setup=SLEEPY)
    assert time.monotonic() - sent[0] < 30
    error_sentence(result, 130, f"stopped at once; go on with: jaxaudit resume {folder}")
    assert chunks_done(folder) == 2
    assert run_cli("resume", folder).code == 0


def test_ctrl_c_during_garbage_collection_is_not_lost():
    def work():
        gc.collect()
        time.sleep(5)

    def send_interrupt(phase, info):
        if phase == "stop" and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    sent = []
    previous = signal.signal(signal.SIGINT, interrupt_handler)
    gc.callbacks.append(send_interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        gc.callbacks.remove(send_interrupt)
        signal.signal(signal.SIGINT, previous)
    assert sent


def test_ctrl_c_before_the_run_exists_ends_the_command(server, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    watch = signal_at_chunk(tmp_path / "run", signal.SIGINT, chunk=-1, wait=0.3)
    result = server("run", tmp_path / "spec.toml", "-o", tmp_path / "run", watch=watch)
    error_sentence(result, 130, "stopped")


def test_a_second_process_on_a_run_is_refused(server, run_cli, stopped, reference):
    with Folder(stopped).locked():
        environment = Folder(stopped).environment.read_text()
        Folder(stopped).update_environment(python="2.7")
        error_sentence(server("resume", stopped), 2, "another process is at work")
        assert "resumed_with" not in Folder(stopped).read_environment()
        Folder(stopped).environment.write_text(environment)
    assert run_cli("resume", stopped).code == 0
    assert_runs_equal(stopped, reference)


def test_a_run_that_has_just_begun_is_no_leftover_for_another(server, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    folder = tmp_path / "run"
    Folder(folder).make(jaxaudit="0")
    with Folder(folder).locked():
        error_sentence(server("run", tmp_path / "spec.toml", "-o", folder), 2, "another process is at work")
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "environment.json"]


def test_a_run_resumed_with_other_software_records_it(run_cli, stopped, reference):
    store = Folder(stopped)
    store.update_environment(python="2.7")
    result = run_cli("resume", stopped)
    assert result.code == 0
    assert "note: python was 2.7 and is" in result.err
    assert list(store.read_environment()["resumed_with"]) == ["python"]
    assert_runs_equal(stopped, reference)


@pytest.mark.parametrize(
    "devices", [pytest.param("1", marks=pytest.mark.exhaustive), pytest.param("3", marks=pytest.mark.slow)]
)
def test_a_run_resumed_on_other_devices_records_it(devices, server, stopped):
    setup = f"import jax; jax.config.update('jax_num_cpu_devices', {devices})"
    result = server("resume", stopped, setup=setup)
    assert result.code == 0, result.err
    assert ("note: devices was 2 and is 1" in result.err) == (devices == "1")
    assert "going on after" in result.err
    replayed = server("replay", stopped, "--condition", "lr_spike 30 @10")
    assert replayed.out.startswith(("bitwise equal", "not equal"))
    assert ("devices, when it was resumed: 1" in replayed.out) == (devices == "1")


def test_a_run_without_telemetry_is_refused(run_cli, stopped):
    shutil.rmtree(stopped / "telemetry.zarr")
    error_sentence(run_cli("resume", stopped), 2, "has lost its telemetry.zarr")


def test_a_damaged_environment_is_refused(run_cli, stopped):
    (stopped / "environment.json").write_text("{")
    error_sentence(run_cli("resume", stopped), 2, "environment.json is damaged")


def test_too_little_memory_or_disk_is_refused_before_compilation(monkeypatch, tmp_path):
    spec = parse(SPEC)
    monkeypatch.setattr(Engine, "program", lambda self, fork: pytest.fail("compiled"))
    monkeypatch.setattr(memory, "available_memory", lambda devices: 2048)
    with pytest.raises(UserError, match=r"2 lanes, one on each device, .* need about 32 MiB .* 2 KiB are available"):
        durable.run(spec, tmp_path / "a" / "run")
    monkeypatch.undo()
    monkeypatch.setattr(Engine, "program", lambda self, fork: pytest.fail("compiled"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3000))
    with pytest.raises(UserError, match=r"needs about [\d.]+ KiB on disk and .* has 2.93 KiB free"):
        durable.run(spec, tmp_path / "a" / "run")
    assert not any(tmp_path.iterdir())


def test_disk_space_is_checked_for_the_smallest_batches(monkeypatch, tmp_path):
    """Where the free memory decides the size of batches, a run is not refused for the space of larger ones."""
    spec = parse(SPEC)
    grid = spec.build()
    plans = []
    monkeypatch.setattr(durable, "check_space", lambda grid, plan, *_: plans.append(plan))
    monkeypatch.setattr(memory, "fit", lambda grid, rows, *_, **__: (_ for _ in ()).throw(UserError("enough")))
    with pytest.raises(UserError, match="enough"):
        durable.run(spec, tmp_path / "run")
    assert grid.batch is None
    assert [max(len(batch.seeds) for batch in plan) for plan in plans] == [len(grid.program.devices)]
