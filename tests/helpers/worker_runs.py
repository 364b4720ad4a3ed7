"""Runs trained by workers: a plug-in that they can load, a Ray cluster on this machine, and what was trained how."""

import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace

import pandas as pd
import paused  # noqa: F401  registers the learner
import submitit  # noqa: F401  takes logging's handlers apart when it is imported: not within a test
from places import HELPERS, ROOT
from small_runs import header

from jaxaudit.runs import lifecycle as durable
from jaxaudit.runtime.backends import CallResult
from jaxaudit.spec.document import parse

PAUSED = (
    header(seeds=2, steps=24, learner='kind = "paused"\npause = {pause}', audit="lanes = 2")
    + """[run]
chunk = 2
checkpoint_every = 1
[[perturbation]]
kind = "weight_noise"
magnitude = [1.0, 0.1]
onset = [6, 12]
"""
)
"""Two onsets; one batch of the baseline and three of each fork group."""


def plug_in(folder):
    """Makes the tests' learners known to processes that have a folder, and the tests', on their path."""
    made = folder / "small_plugins-1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: small-plugins\nVersion: 1\n")
    (made / "entry_points.txt").write_text(
        "[jaxaudit.learners]\nquadratic = quadratic:quadratic\npaused = paused:paused\n"
    )
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(HELPERS), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }


def started(*arguments, figures=False, **environment):
    """The command line, in a process of its own; without a report, unless its figures are wanted."""
    code = f"{'' if figures else 'import unreported; '}from jaxaudit.cli.main import entry; entry()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )


def whole(text, planned, folder):
    """A run of the plan of another, in one process, as the command line does it."""
    (folder / "spec.toml").write_text(text)
    done = started("run", folder / "spec.toml", "-o", folder / "whole", "--plan", planned)
    assert done.wait() == 0, done.stderr.read()
    return folder / "whole"


def shards(folder):
    """The run's shards.csv."""
    return pd.read_csv(folder / "shards.csv")


def workers_at(folder, batches, states):
    """Processes of the attempts at some batches that keep at least so many states or onsets, and have not ended."""
    found = {}
    for batch in batches:
        with suppress(FileNotFoundError):  # it is gathered at this moment
            for path in (folder / "batches" / f"{batch:04d}").glob("attempt-*"):
                kept = [*path.glob("state-*"), *path.glob("onset-*")]
                if len(kept) >= states and not (path / "ended.json").exists():
                    worker = json.loads((path / "begun.json").read_text())["worker"]
                    found[batch] = int(worker.rpartition(":")[2])
    return found


def through_accidents(text, folder, workers):
    """A run whose worker at batch 0 is killed, and one at batch 2 or 3 sent away; who trained what of it.

    Both are followed by one that goes on from their states.
    """

    def accidents():
        kill(wait_for(lambda: workers_at(folder, {0}, states=2))[0])
        found = wait_for(lambda: workers_at(folder, {2, 3}, states=2))
        os.kill(next(iter(found.values())), signal.SIGUSR2)

    with meanwhile(accidents):
        durable.run(parse(text), folder, workers)
    told = shards(folder)
    after = told[told.attempt > 1]
    assert len(set(after.batch)) == 2
    assert (after.from_step > after.onset).all(), "they went on from their states"
    return told


@contextmanager
def meanwhile(act):
    """Runs a function in a thread beside what is inside, and raises what it raises."""
    failed = []

    def run():
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(60)
    if failed:
        raise failed[0]


def wait_for(condition, seconds=300):
    """What a condition gives when it gives something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)
    return found


def kill(pid):
    os.kill(pid, signal.SIGKILL)


class Calls:
    """A backend whose workers are this process; what they are given and give goes through files, as with any other."""

    workers = 2
    workers_per_machine = 2

    def __init__(self):
        self.made = []

    def submit(self, call, arguments):
        self.made.append((call, arguments))
        module, _, function = call.partition(":")
        given = pickle.loads(pickle.dumps(arguments))
        value = getattr(importlib.import_module(module), function)(**given)
        return SimpleNamespace(poll=lambda: CallResult(value=pickle.loads(pickle.dumps(value))))

    def opened(self, *asked):
        """Replaces `backends.open_backend`."""
        return nullcontext(self)
