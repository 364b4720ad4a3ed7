"""Small runs in folders: their specs, how they are killed, and what tells whether two are the same."""

import contextlib
import json
import os
import random
import signal
import time
from pathlib import Path

import jax
import numpy as np
import quadratic  # noqa: F401  registers the learner
import zarr
from orbax.checkpoint import v1 as ocp

from jaxaudit.runs.run_folder import Folder


def header(*, seeds: int = 3, steps: int = 20, learner: str = 'kind = "quadratic"', audit: str = "") -> str:
    """A small run's spec, but for its perturbations; `audit` is more lines of its [audit]."""
    return f"""
[audit]
name = "small"
seeds = {seeds}
steps = {steps}
{audit}
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
{learner}
[metrics]
window = 4
hold = 4
horizon = 4
"""


SPEC = (
    header()
    + """[run]
chunk = 2
checkpoint_every = 1
[[perturbation]]
kind = "lr_spike"
magnitude = [3, 30]
onset = [5, 10]
duration = 2
[[perturbation]]
kind = "weight_noise"
magnitude = 1.0
onset = [5, 10]
"""
)
CHUNKS = 8 + 8 + 5  # the baseline goes on for a window after the last onset; chunks end at onsets

THREE = """[run]
chunk = 4
checkpoint_every = 1
[[perturbation]]
kind = "weight_noise"
magnitude = [1.0, 0.1, 0.01]
onset = 10
"""
FEW = header() + THREE


def arrays(folder):
    """Every array of a run's telemetry and checkpoints, as bytes."""
    group = zarr.open_group(folder / "telemetry.zarr", mode="r")
    found = {name: np.asarray(array).tobytes() for name, array in group.arrays()}
    for path in sorted((folder / "checkpoints").iterdir()):
        assert not path.name.startswith(".")
        for piece in sorted(p for p in path.iterdir() if p.is_dir()):
            shapes = ocp.metadata(piece).metadata
            blank = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
            leaves = jax.tree_util.tree_leaves_with_path(ocp.load(piece, blank))
            place = f"{path.name} {piece.name}"
            found |= {f"{place} {jax.tree_util.keystr(k)}": np.asarray(x).tobytes() for k, x in leaves}
    return found


def assert_same(folder, reference):
    """Telemetry, tables and checkpoints of two runs are bitwise equal, and nothing is left over."""
    left, right = arrays(folder), arrays(reference)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []
    for name in ("metrics.csv", "summary.csv", "spec.toml"):
        assert (folder / name).read_bytes() == (reference / name).read_bytes()
    page = {"report.html", "figures"}  # made by the command line
    assert {p.name for p in folder.iterdir()} - page == {p.name for p in reference.iterdir()} - page
    then, now = (Folder(f).read_environment() for f in (reference, folder))
    assert now["status"] == "finished"
    assert now["samples"] == then["samples"]
    assert not list(folder.rglob("*.partial"))


def chunks_done(folder):
    """How many chunks of a run's steps are kept, of all its batches; -1 before the run has begun."""
    if not (folder / "spec.toml").exists():
        return -1
    with contextlib.suppress(OSError, ValueError):  # it was being replaced
        told = json.loads((folder / "environment.json").read_text())
        gathered = told.get("gathered", [])
        batches = [path for path in folder.glob("batches/[0-9]*") if int(path.name) not in gathered]
        return told.get("chunks_done", 0) + sum(len({p.name for p in path.glob("*/rows-*")}) for path in batches)
    return 0


def killing(folder, *signals, chunk, wait=0.0):
    """Sends a process signals, one every half second, from `wait` seconds after so many chunks are done."""

    def watch(pid):
        deadline = time.monotonic() + 120
        while chunks_done(folder) < chunk and time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]:
                return
            time.sleep(0.002)
        time.sleep(wait)
        for number, sent in enumerate(signals):
            if number:
                time.sleep(0.5)
            os.kill(pid, sent)

    return watch


def kill_through(server, place, spec, chunks, kills):
    """Runs a spec to its end through kills: some at its beginning, some at its end, the others between.

    Returns its folder, and how many chunks were done at each kill.
    """
    folder = place / "run"
    (place / "spec.toml").write_text(spec)
    draw = random.Random(0)
    few = kills // 7
    begin = [(-1, draw.uniform(i, i + 1) / few * 0.3) for i in range(few)]
    middle = [(chunk, draw.uniform(0, 0.1)) for chunk in sorted(draw.sample(range(chunks), kills - 2 * few))]
    end = sorted((chunks, draw.uniform(0, 0.5)) for _ in range(few))
    landed = []
    for chunk, wait in begin + middle + end:
        if not (folder / "spec.toml").exists():
            command = ("run", place / "spec.toml", "-o", folder)
        else:
            command = ("resume", folder)
        done = server(*command, watch=killing(folder, signal.SIGKILL, chunk=chunk, wait=wait))
        for word in ("Traceback", "note:", "jaxaudit:"):
            assert word not in done.err, done.err
        if done.code == 0:  # it was faster
            break
        assert done.code == -signal.SIGKILL
        landed.append(chunks_done(folder))
    print("killed after chunks", landed)
    if Folder(folder).read_environment()["status"] != "finished":
        done = server("resume", folder)
        assert done.code == 0, done.err
    return folder, landed


def flip(path):
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)


def one_sentence(done, code, *words):
    """The sentence a command ended with, and no traceback or noise of a library."""
    assert done.code == code, done.err
    last = done.err.rstrip("\n").splitlines()[-1]
    assert last.startswith("jaxaudit: ")
    for word in words:
        assert word in last
    for noise in ("Traceback", "Error", "WARNING", "absl", "Exception"):
        assert noise not in done.err, done.err
    return last
