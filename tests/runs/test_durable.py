"""Runs that are killed, stopped, short of disk or damaged end as if nothing had been."""

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
    """A run that nothing happened to, and what a kill leaves of it after so many chunks."""
    place = tmp_path_factory.mktemp("runs")

    def reached(self, *arguments, before=FolderSink.reached):
        before(self, *arguments)
        done = self._progress.chunks_done
        if done in (EARLY, LATE) and not (place / str(done)).exists():
            shutil.copytree(self.store.path, place / str(done))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FolderSink, "reached", reached)
        durable.run(parse(SPEC), place / "run")
    return place


@pytest.fixture(scope="module")
def reference(runs):
    return runs / "run"


@pytest.fixture
def stopped(runs, tmp_path):
    """What is left of a run that was killed in its last fork group."""
    return shutil.copytree(runs / str(LATE), tmp_path / "run")


@pytest.mark.parametrize("kills", [7, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_many_instants(kills, server, reference, tmp_path):
    folder, landed = run_through_kills(server, tmp_path, SPEC, CHUNKS, kills)
    assert len(landed) >= kills - 2
    assert len(set(landed)) >= (kills + 1) // 2  # a chunk may be done before its kill comes
    assert_runs_equal(folder, reference)


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", ["run", "resume"])
def test_of_several_starts_at_once_one_goes_on(command, server, runs, reference, tmp_path):
    folder = tmp_path / "run"
    if command == "resume":
        shutil.copytree(runs / str(EARLY), folder)
        argv = ("resume", folder)
    else:
        (tmp_path / "spec.toml").write_text(SPEC)
        argv = ("run", tmp_path / "spec.toml", "-o", folder)
    draw = random.Random(1)
    ends = server.run_concurrently(*argv, delays=[draw.uniform(0, 1.0) for _ in range(5)])
    assert sorted(done.code for done in ends) == [0, 2, 2, 2, 2]
    for done in ends:
        if done.code:
            words = error_sentence(done, 2)
            assert any(known in words for known in ("another process is at work", "not empty", "already finished"))
    assert_runs_equal(folder, reference)


@pytest.mark.parametrize(
    "kills", [pytest.param(4, marks=pytest.mark.exhaustive), pytest.param(7, marks=pytest.mark.slow)]
)
def test_killed_in_batches(kills, server, run_cli, tmp_path):
    """Two batches of the baseline, six of the fork group."""
    (tmp_path / "spec.toml").write_text(BATCHES)
    done = run_cli("run", tmp_path / "spec.toml", "-o", tmp_path / "whole")
    assert done.code == 0, done.err
    assert "2 lanes at a time" in done.err
    folder, landed = run_through_kills(server, tmp_path, BATCHES, 2 * 5 + 6 * 3, kills)
    assert len(set(landed)) >= kills - 2
    assert_runs_equal(folder, tmp_path / "whole")
    names = {path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith("onset")}
    assert names == {"onset-00000010", "onset-00000010-0001"}


@pytest.mark.slow
def test_ppo_killed(server, tmp_path):
    (tmp_path / "spec.toml").write_text(PPO)
    done = server("run", tmp_path / "spec.toml", "-o", tmp_path / "whole")
    assert done.code == 0, done.err
    folder, _ = run_through_kills(server, tmp_path, PPO, 14 + 30, kills=7)
    assert_runs_equal(folder, tmp_path / "whole")


def truncate(path):
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def delete(path):
    next(p for p in sorted(path.rglob("*")) if p.is_file()).unlink()


def undigest(path):
    digest = path / "digest.json"
    digest.write_text(digest.read_text().replace('"step": ', '"step": 1'))


DAMAGES = {
    "flipped": ([-1], [flip_byte], ["going back"]),
    "truncated": ([-1], [truncate], ["going back"]),
    "a file deleted": ([-1], [delete], ["going back"]),
    "another digest": ([-1], [undigest], ["going back"]),
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


RARE_DAMAGES = ("another digest", "empty", "both", "an onset gone")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.exhaustive if case in RARE_DAMAGES else ()) for case in DAMAGES]
)
def test_damaged_checkpoints(case, run_cli, stopped, reference):
    which, how, words = DAMAGES[case]
    chunks = sorted(stopped.glob("batches/*/*/state-*"))
    for one, damage in zip(which, how, strict=True):
        damage(chunks[one] if isinstance(one, int) else stopped / "checkpoints" / one)
    done = run_cli("resume", stopped)
    assert done.code == 0, done.err
    notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(words), done.err
    assert all(word in note for word, note in zip(words, notes, strict=True))
    assert_runs_equal(stopped, reference)


@pytest.mark.exhaustive
def test_killed_while_an_onset_is_trained_again(server, run_cli, stopped, reference):
    flip_byte(stopped / "checkpoints" / "onset-00000010")
    kill = signal_at_chunk(stopped, signal.SIGKILL, chunk=0, wait=2.0)
    server("resume", stopped, watch=kill)
    done = run_cli("resume", stopped)
    assert done.code in (0, 2), done.err
    assert_runs_equal(stopped, reference)


def test_the_sentence_is_the_last_word(server, tmp_path):
    first = "import atexit, os; atexit.register(os.write, 2, b'RuntimeError: Event loop is closed')"
    error_sentence(server("resume", tmp_path / "nothing", setup=first), 2, "nothing")


def quota(size):
    return f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"


def test_a_limit_on_file_size(server, run_cli, stopped, reference):
    error_sentence(server("resume", stopped, setup=quota(600)), 1, "full", "jaxaudit resume")
    assert run_cli("resume", stopped).code == 0
    assert_runs_equal(stopped, reference)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, full but for what a test leaves free; only where one may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("file systems may not be mounted here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("free", [0, *(pytest.param(free, marks=pytest.mark.slow) for free in (8, 100))])
def test_a_full_disk(free, server, run_cli, runs, reference, small_disk):
    """With so many KiB free when training goes on."""
    folder = shutil.copytree(runs / str(EARLY), small_disk / "run")
    filler = small_disk / "filler"
    left = shutil.disk_usage(small_disk).free - free * 1024
    filler.write_bytes(bytes(max(0, left)))
    error_sentence(server("resume", folder), 1, "the disk is full; with more space, go on with: jaxaudit resume")
    filler.unlink()
    done = run_cli("resume", folder)
    assert done.code == 0, done.err
    assert_runs_equal(folder, reference)


def of_process():
    """What speaks for a whole process, or keeps it silent."""
    loggers = [logging.getLogger(name).level for name in (None, "absl", "asyncio")]
    return threading.excepthook, sys.unraisablehook, sys.excepthook, loggers, list(warnings.filters)


def test_half_written_checkpoints_are_swept(run_cli, stopped, reference):
    (stopped / "checkpoints" / ".unfinished-onset-00000010-0001").mkdir()
    assert run_cli("resume", stopped).code == 0
    assert_runs_equal(stopped, reference)


def test_a_save_leaves_alone_what_is_the_whole_process(tmp_path):
    """Another thread that fails meanwhile must be heard."""

    def pieces():
        during.append(of_process())
        yield ProgramPiece(0, 2, {"x": np.arange(6.0).reshape(2, 3)})
        during.append(of_process())

    before, during = of_process(), []
    checkpoint.save(tmp_path / "x", pieces(), {})
    assert during == [before] * 2
    assert of_process() == before


def test_a_save_leaves_alone_what_another_process_is_writing_under_a_longer_name(tmp_path):
    """The second batch's onset, `onset-00000010-0001`, beside the first's."""
    others = tmp_path / ".unfinished-x-0001" / "lanes-000002"
    others.mkdir(parents=True)
    left = [tmp_path / ".unfinished-x" / "old", tmp_path / ".unfinished-x.orbax-checkpoint-tmp" / "old"]
    for folder in left:
        folder.mkdir(parents=True)
    checkpoint.save(tmp_path / "x", [ProgramPiece(0, 2, {"x": np.arange(6.0).reshape(2, 3)})], {})
    assert others.is_dir()
    assert {path.name for path in tmp_path.iterdir()} == {"x", ".unfinished-x-0001"}
    assert not (tmp_path / "x" / "old").exists()


def test_a_save_without_room_fails_before_it_writes_and_leaves_what_was_there(tmp_path, monkeypatch):
    state = {"x": np.arange(6.0).reshape(2, 3)}
    checkpoint.save(tmp_path / "x", [ProgramPiece(0, 2, state)], {"kept": 1})
    asked = []

    def full(descriptor, offset, size):
        asked.append(size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(checkpoint.ocp, "save", lambda *_: pytest.fail("it wrote"))
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "x", [ProgramPiece(0, 2, state)], {"kept": 2})
    assert asked[0] > state["x"].nbytes
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert checkpoint.verify(tmp_path / "x") == {"kept": 1}


def test_of_large_pieces_one_at_a_time_is_in_memory(tmp_path, monkeypatch):
    """What only a circle refers to is freed before the next piece, however seldom garbage is collected otherwise."""

    class Circle:
        def __init__(self, states):
            self.states, self.self = states, self

    def piece(first):
        circle = Circle({"x": np.zeros(4)})
        circles.append(weakref.ref(circle))
        return ProgramPiece(first, 1, circle.states)

    def pieces():
        for first in range(3):
            assert [circle for circle in circles if circle() is not None] == []
            yield piece(first)

    circles = []
    monkeypatch.setattr(engine, "LARGE", 1)
    gc.disable()
    try:
        checkpoint.save(tmp_path / "x", pieces(), {})
    finally:
        gc.enable()
    assert len(circles) == 3


def test_too_full_to_begin(run_cli, small_disk, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    left = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(left - 20 * 1024))
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", small_disk / "a" / "run"), 2, "cannot make the folder")
    assert [p.name for p in small_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize(("save", "chunk"), [(3.0, 10.0), (3.0, 0.5), (0.01, 10.0)])
def test_states_are_kept_as_often_as_takes_a_twentieth_of_the_time(save, chunk, monkeypatch):
    """Of the run's, unless a spec says how often; the first time after the first chunk."""
    now, kept = [0.0], []

    def saved(folder, engine, states, step):
        now[0] += save
        kept.append(step)

    monkeypatch.setattr(trained, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(trained.BatchAttempt, "save", saved)
    one = np.zeros(1, int)
    batch = Batch(id=0, fork=0, onset=0, stop=5000, first=0, seeds=one, columns=one, conditions=(), width=1)
    trainer = SimpleNamespace(grid=None)
    place = FolderSink(Folder(Path("run")), trainer)
    place.attempt = trained.BatchAttempt(Path("attempt-001"), batch)
    for step in range(1, 1000):
        now[0] += chunk
        place.reached(trainer, batch, None, step)
    share = save * len(kept) / now[0]
    assert kept[0] == 1
    assert share == pytest.approx(0.05, rel=0.1) if save == 3.0 else kept == list(range(1, 1000))


@pytest.mark.parametrize("place", ["file/run", "file", "/proc/run", "x" * 300])
def test_an_impossible_folder(place, run_cli, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "file").write_text("mine")
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", tmp_path / place), 2, Path(place).name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "spec.toml"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_one_may_not_write(run_cli, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    (tmp_path / "shut").mkdir(mode=0o500)
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", tmp_path / "shut" / "run"), 2, "Permission denied")
    assert not any((tmp_path / "shut").iterdir())


def test_what_a_killed_start_left_is_no_obstacle(run_cli, tmp_path, monkeypatch):
    (tmp_path / "spec.toml").write_text(SPEC)
    folder = tmp_path / "run"
    Folder(folder).make(jaxaudit="0")
    (folder / ".unfinished-spec.toml").write_text("[aud")
    (folder / "telemetry.zarr").mkdir()
    monkeypatch.setattr(durable, "_execute", lambda *arguments: None)
    assert run_cli("run", tmp_path / "spec.toml", "-o", folder).code == 0
    assert (folder / "spec.toml").exists()


@pytest.mark.parametrize("mine", ["notes.txt", "environment.json", "checkpoints", "telemetry.zarr"])
def test_what_a_user_left_is_an_obstacle(mine, run_cli, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / mine).write_text("{}")
    error_sentence(run_cli("run", tmp_path / "spec.toml", "-o", folder), 2, "exists and is not empty")
    assert [(p.name, p.read_text()) for p in folder.iterdir()] == [(mine, "{}")]


def test_ctrl_c(server, run_cli, reference, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "spec.toml").write_text(SPEC)
    kill = signal_at_chunk(folder, signal.SIGINT, chunk=7)
    done = server("run", tmp_path / "spec.toml", "-o", folder, watch=kill)
    last = error_sentence(done, 130, f"of {CHUNKS} chunks; go on with: jaxaudit resume {folder}")
    assert "stopping after this chunk" in done.err
    environment = Folder(folder).read_environment()
    assert environment["status"] == "interrupted"
    assert int(last.split()[3]) >= 7
    assert run_cli("resume", folder).code == 0
    assert_runs_equal(folder, reference)
    assert Folder(folder).read_environment()["wall_seconds"] > environment["wall_seconds"]


def test_ctrl_c_keeps_what_was_trained_however_seldom_states_are_kept(server, run_cli, reference, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "spec.toml").write_text(SPEC.replace("checkpoint_every = 1", "checkpoint_every = 1000"))
    kill = signal_at_chunk(folder, signal.SIGINT, chunk=9)  # among forks, whose states are nobody's onset
    done = server("run", tmp_path / "spec.toml", "-o", folder, watch=kill)
    stopped = error_sentence(done, 130, f"of {CHUNKS} chunks").partition("stopped after ")[2].partition(";")[0]
    done = run_cli("resume", folder)
    assert done.code == 0
    assert f"going on after {stopped}" in done.err
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
def test_ctrl_c_twice_stops_at_once(server, run_cli, tmp_path):
    """Even while a step of a minute is in flight, in a host callback."""
    folder = tmp_path / "run"
    (tmp_path / "spec.toml").write_text(SHORT_SPEC)
    kill = signal_at_chunk(folder, signal.SIGINT, signal.SIGINT, chunk=2, wait=0.5)
    sent = []

    def watch(pid):
        kill(pid)
        sent.append(time.monotonic())

    done = server("run", tmp_path / "spec.toml", "-o", folder, watch=watch, setup=SLEEPY)
    assert time.monotonic() - sent[0] < 30
    error_sentence(done, 130, f"stopped at once; go on with: jaxaudit resume {folder}")
    assert chunks_done(folder) == 2
    assert run_cli("resume", folder).code == 0


def test_ctrl_c_in_the_midst_of_garbage_collection_is_not_lost():
    def work():
        gc.collect()
        time.sleep(5)

    def collected(phase, info):
        if phase == "stop" and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGINT))

    sent = []
    previous = signal.signal(signal.SIGINT, interrupt_handler)
    gc.callbacks.append(collected)
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        gc.callbacks.remove(collected)
        signal.signal(signal.SIGINT, previous)
    assert sent


def test_ctrl_c_before_anything_is_there(server, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    watch = signal_at_chunk(tmp_path / "run", signal.SIGINT, chunk=-1, wait=0.3)
    done = server("run", tmp_path / "spec.toml", "-o", tmp_path / "run", watch=watch)
    error_sentence(done, 130, "stopped")


def test_two_processes_on_one_run(server, run_cli, stopped, reference):
    with Folder(stopped).locked():
        environment = Folder(stopped).environment.read_text()
        Folder(stopped).update_environment(python="2.7")
        error_sentence(server("resume", stopped), 2, "another process is at work")
        assert "resumed_with" not in Folder(stopped).read_environment()
        Folder(stopped).environment.write_text(environment)
    assert run_cli("resume", stopped).code == 0
    assert_runs_equal(stopped, reference)


def test_a_run_that_begins_is_no_leftover_to_another(server, tmp_path):
    (tmp_path / "spec.toml").write_text(SPEC)
    folder = tmp_path / "run"
    Folder(folder).make(jaxaudit="0")
    with Folder(folder).locked():
        error_sentence(server("run", tmp_path / "spec.toml", "-o", folder), 2, "another process is at work")
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "environment.json"]


def test_resumed_on_something_else(run_cli, stopped, reference):
    store = Folder(stopped)
    store.update_environment(python="2.7")
    done = run_cli("resume", stopped)
    assert done.code == 0
    assert "note: python was 2.7 and is" in done.err
    assert list(store.read_environment()["resumed_with"]) == ["python"]
    assert_runs_equal(stopped, reference)


@pytest.mark.parametrize(
    "devices", [pytest.param("1", marks=pytest.mark.exhaustive), pytest.param("3", marks=pytest.mark.slow)]
)
def test_resumed_on_other_devices(devices, server, stopped):
    other = f"import jax; jax.config.update('jax_num_cpu_devices', {devices})"
    done = server("resume", stopped, setup=other)
    assert done.code == 0, done.err
    assert ("note: devices was 2 and is 1" in done.err) == (devices == "1")
    assert "going on after" in done.err
    replayed = server("replay", stopped, "--condition", "lr_spike 30 @10")
    assert replayed.out.startswith(("bitwise equal", "not equal"))
    assert ("devices, when it was resumed: 1" in replayed.out) == (devices == "1")


def test_a_run_without_its_telemetry(run_cli, stopped):
    shutil.rmtree(stopped / "telemetry.zarr")
    error_sentence(run_cli("resume", stopped), 2, "has lost its telemetry.zarr")


def test_a_damaged_environment(run_cli, stopped):
    (stopped / "environment.json").write_text("{")
    error_sentence(run_cli("resume", stopped), 2, "environment.json is damaged")


def test_refused_before_anything_is_compiled(monkeypatch, tmp_path):
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


def test_the_disk_is_checked_for_the_lanes_that_will_be_there_at_a_time(monkeypatch, tmp_path):
    """Where memory decides how many those are, a run is not refused for more."""
    spec = parse(SPEC)
    grid = spec.build()
    asked = []
    monkeypatch.setattr(durable, "check_space", lambda grid, plan, *_: asked.append(plan))
    monkeypatch.setattr(memory, "fit", lambda grid, rows, *_, **__: (_ for _ in ()).throw(UserError("enough")))
    with pytest.raises(UserError, match="enough"):
        durable.run(spec, tmp_path / "run")
    assert grid.batch is None
    assert [max(len(batch.seeds) for batch in plan) for plan in asked] == [len(grid.program.devices)]
