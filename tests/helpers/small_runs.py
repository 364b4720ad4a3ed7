"""Small runs in folders: their specs, killed processes, and the comparison of two runs."""

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


def spec_header(*, seeds: int = 3, steps: int = 20, learner: str = 'kind = "quadratic"', audit: str = "") -> str:
    """Returns a small run's spec without its perturbations. `audit` contains more lines of its table [audit]."""
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
    spec_header()
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
CHUNKS = 8 + 8 + 5  # the baseline continues for a window after the last onset, and chunks end at onsets

THREE_MAGNITUDES = """[run]
chunk = 4
checkpoint_every = 1
[[perturbation]]
kind = "weight_noise"
magnitude = [1.0, 0.1, 0.01]
onset = 10
"""
SHORT_SPEC = spec_header() + THREE_MAGNITUDES


def stored_arrays(folder):
    """Returns every array of a run's telemetry and checkpoints, as bytes."""
    group = zarr.open_group(folder / "telemetry.zarr", mode="r")
    contents = {name: np.asarray(array).tobytes() for name, array in group.arrays()}
    for path in sorted((folder / "checkpoints").iterdir()):
        assert not path.name.startswith(".")
        for part in sorted(p for p in path.iterdir() if p.is_dir()):
            shapes = ocp.metadata(part).metadata
            template = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
            leaves = jax.tree_util.tree_leaves_with_path(ocp.load(part, template))
            location = f"{path.name} {part.name}"
            contents |= {f"{location} {jax.tree_util.keystr(k)}": np.asarray(x).tobytes() for k, x in leaves}
    return contents


def assert_runs_equal(folder, reference):
    """Asserts that telemetry, tables and checkpoints of two runs are bitwise equal, and no temporary file is left."""
    left, right = stored_arrays(folder), stored_arrays(reference)
    assert left.keys() == right.keys()
    assert [name for name in left if left[name] != right[name]] == []
    for name in ("metrics.csv", "summary.csv", "spec.toml"):
        assert (folder / name).read_bytes() == (reference / name).read_bytes()
    report_files = {"report.html", "figures"}  # only the command line writes these
    assert {p.name for p in folder.iterdir()} - report_files == {p.name for p in reference.iterdir()} - report_files
    reference_environment, environment = (Folder(f).read_environment() for f in (reference, folder))
    assert environment["status"] == "finished"
    assert environment["samples"] == reference_environment["samples"]
    assert not list(folder.rglob("*.partial"))


def chunks_done(folder):
    """Returns the number of a run's stored chunks, over all its batches, and -1 before the run has begun."""
    if not (folder / "spec.toml").exists():
        return -1
    with contextlib.suppress(OSError, ValueError):  # a file is being replaced
        environment = json.loads((folder / "environment.json").read_text())
        gathered = environment.get("gathered", [])
        batches = [path for path in folder.glob("batches/[0-9]*") if int(path.name) not in gathered]
        return environment.get("chunks_done", 0) + sum(len({p.name for p in path.glob("*/rows-*")}) for path in batches)
    return 0


def signal_at_chunk(folder, *signals, chunk, wait=0.0):
    """Returns a function that sends signals to a process, one every half second.

    The first is sent `wait` seconds after `chunk` chunks are stored.
    """

    def watch(pid):
        deadline = time.monotonic() + 120
        while chunks_done(folder) < chunk and time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:1]:
                return
            time.sleep(0.002)
        time.sleep(wait)
        for number, signal_number in enumerate(signals):
            if number:
                time.sleep(0.5)
            os.kill(pid, signal_number)

    return watch


def run_through_kills(server, directory, spec, chunks, kills):
    """Runs a spec to its end through kills: some at its beginning, some at its end, and the others in between.

    Returns the run's folder, and the number of stored chunks at each kill.
    """
    folder = directory / "run"
    (directory / "spec.toml").write_text(spec)
    rng = random.Random(0)
    edge_kills = kills // 7
    early = [(-1, rng.uniform(i, i + 1) / edge_kills * 0.3) for i in range(edge_kills)]
    between = [(chunk, rng.uniform(0, 0.1)) for chunk in sorted(rng.sample(range(chunks), kills - 2 * edge_kills))]
    late = sorted((chunks, rng.uniform(0, 0.5)) for _ in range(edge_kills))
    chunks_at_kill = []
    for chunk, wait in early + between + late:
        if not (folder / "spec.toml").exists():
            command = ("run", directory / "spec.toml", "-o", folder)
        else:
            command = ("resume", folder)
        result = server(*command, watch=signal_at_chunk(folder, signal.SIGKILL, chunk=chunk, wait=wait))
        for word in ("Traceback", "note:", "jaxaudit:"):
            assert word not in result.err, result.err
        if result.code == 0:  # the run finished before the kill
            break
        assert result.code == -signal.SIGKILL
        chunks_at_kill.append(chunks_done(folder))
    print("killed after chunks", chunks_at_kill)
    if Folder(folder).read_environment()["status"] != "finished":
        result = server("resume", folder)
        assert result.code == 0, result.err
    return folder, chunks_at_kill


def flip_byte(path):
    largest = max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(content)


def error_sentence(result, code, *words):
    """Returns the sentence that a command ended with, and asserts that it printed no traceback or library noise."""
    assert result.code == code, result.err
    last = result.err.rstrip("\n").splitlines()[-1]
    assert last.startswith("jaxaudit: ")
    for word in words:
        assert word in last
    for noise in ("Traceback", "Error", "WARNING", "absl", "Exception"):
        assert noise not in result.err, result.err
    return last
