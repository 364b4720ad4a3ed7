"""Runs jaxaudit's commands in separate processes that start fast and can be killed."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

SPEC = """[audit]
name = "hardening"
seeds = 3
steps = 24
[task]
kind = "registered"
name = "CartPole-v1"
[learner]
kind = "ppo"
num_envs = 2
rollout_length = 16
minibatch_size = 16
evaluations = 1
evaluation_episodes = 1
[metrics]
window = 4
hold = 4
horizon = 4
[run]
chunk = 2
checkpoint_every = 1
[[perturbation]]
kind = "lr_spike"
magnitude = [3, 3000]
onset = [8, 12]
duration = 4
[[perturbation]]
kind = "weight_noise"
magnitude = 1.0
onset = 12
"""

MARGIN = ("--tolerance", "0.3", "--reach", "10", "--lanes", "3")

PRELOADED = (
    "jaxaudit.cli.main",
    "jaxaudit.runs.lifecycle",
    "jaxaudit.learners",
    "jaxaudit.tasks",
    "jaxaudit.runs.margins.folder",
    "jaxaudit.report.audit_page",
)

LEFT_OUT = ("environment.json", "shards.csv", "search.json", "report.html")
"""Files with times, durations or places, which are not compared."""


@dataclass
class Command:
    """A running command; `words` is the file of its output."""

    process: multiprocessing.process.BaseProcess
    words: Path

    def kill_after(self, seconds: float) -> bool:
        """Sends SIGKILL after some seconds; returns whether the command was still running."""
        self.process.join(seconds)
        alive = self.process.is_alive()
        self.process.kill()
        self.process.join()
        return alive

    def interrupt_after(self, seconds: float) -> bool:
        """Sends SIGINT after some seconds; returns whether the command was still running.

        Raises RuntimeError if it does not end with exit code 130 and one sentence, as after Ctrl-C.
        """
        self.process.join(seconds)
        if not self.process.is_alive():
            return False
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)
        code, words = self.wait()
        if code == 0:
            return False
        if code != 130 or "Traceback" in words or not words.splitlines()[-1].startswith("jaxaudit: "):
            raise RuntimeError(f"ended with {code} after Ctrl-C at {seconds:.1f} s: {words}")
        return True

    def wait(self, seconds: float = 300) -> tuple[int, str]:
        """Waits for the command, and returns its exit code and its output."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            raise TimeoutError(f"not finished after {seconds} s: {self.words.read_text()}")
        assert self.process.exitcode is not None
        return self.process.exitcode, self.words.read_text(errors="replace")


class Commands:
    """Starts commands by a server that imports jaxaudit once and forks for each; JAX is not used before the fork."""

    def __init__(self, place: Path):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ["JAX_NUM_CPU_DEVICES"] = "2"
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(place / "programs")
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(PRELOADED))
        self._place = place
        self._count = 0

    def start(self, *argv: object) -> Command:
        """Starts `jaxaudit ARGV`."""
        self._count += 1
        words = self._place / f"command-{self._count}.txt"
        words.touch()
        process = self._context.Process(target=_main, args=([str(a) for a in argv], str(words)))
        process.start()
        return Command(process, words)

    def run(self, *argv: object) -> float:
        """Runs a command, which must succeed, and returns the seconds it took."""
        begun = time.monotonic()
        code, words = self.start(*argv).wait()
        if code:
            raise RuntimeError(f"jaxaudit {' '.join(map(str, argv))} ended with {code}: {words}")
        return time.monotonic() - begun


def _main(argv: list[str], words: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    descriptor = os.open(words, os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = ["jaxaudit", *argv]
    from jaxaudit.cli import main as cli

    cli.entry()


def contents(folder: Path) -> dict[str, str]:
    """Returns a digest of every file of a run's or a search's folder, except for files with times and places.

    For checkpoints, it is the digest of the states that are read from them, since the files contain times.
    """
    digests = {}
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        compared = path.name not in LEFT_OUT and relative.parts[0] not in ("figures", "checkpoints")
        if path.is_file() and compared and "figures" not in relative.parts:
            digests[str(relative)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return digests | _states(folder / "checkpoints")


def _states(folder: Path) -> dict[str, str]:
    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    digests = {}
    for piece in sorted(folder.glob("*/lanes-*")):
        shapes = ocp.metadata(piece).metadata
        leaves = jax.tree.leaves(ocp.load(piece, jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)))
        content = b"".join(np.asarray(leaf).tobytes() for leaf in leaves)
        digests[str(piece.relative_to(folder.parent))] = hashlib.sha256(content).hexdigest()
    return digests


def update_digests(folder: Path) -> None:
    """Updates the digests of a folder's checkpoints to their content, where they are still JSON objects."""
    for path in folder.rglob("digest.json"):
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            continue
        content.pop("digest", None)
        if isinstance(content.get("files"), dict):
            content["files"] = {
                name: hashlib.sha256((path.parent / name).read_bytes()).hexdigest()
                for name in content["files"]
                if (path.parent / name).is_file()
            }
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps(content | {"digest": digest}))
