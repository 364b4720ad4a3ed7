"""Helpers for runs that workers train: a plug-in that they can load, failing workers, and an in-process backend."""

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
import submitit  # noqa: F401  changes logging's handlers on import, which must not happen within a test
from directories import HELPERS, ROOT
from small_runs import spec_header

from jaxaudit.runs import lifecycle as durable
from jaxaudit.runtime.backends import CallResult
from jaxaudit.spec.document import parse

PAUSED_SPEC = (
    spec_header(seeds=2, steps=24, learner='kind = "paused"\npause = {pause}', audit="lanes = 2")
    + """[run]
chunk = 2
checkpoint_every = 1
[[perturbation]]
kind = "weight_noise"
magnitude = [1.0, 0.1]
onset = [6, 12]
"""
)
"""A spec with two onsets. The baseline has one batch, and each fork group three."""


def install_plugin(folder):
    """Installs a plug-in with the tests' learners in a folder, and returns the environment of processes with it."""
    distribution = folder / "small_plugins-1.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: small-plugins\nVersion: 1\n")
    (distribution / "entry_points.txt").write_text(
        "[jaxaudit.learners]\nquadratic = quadratic:quadratic\npaused = paused:paused\n"
    )
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(HELPERS), os.environ.get("PYTHONPATH", "")]),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PLATFORMS": "cpu",
    }


def start_cli(*arguments, figures=False, **environment):
    """Starts the command line in a fresh process, which writes a report only with `figures`."""
    code = f"{'' if figures else 'import without_reports; '}from jaxaudit.cli.main import entry; entry()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )


def run_in_one_process(text, plan_of, folder):
    """Trains the plan of another run in one process, with the command line, and returns the run's folder."""
    (folder / "spec.toml").write_text(text)
    process = start_cli("run", folder / "spec.toml", "-o", folder / "whole", "--plan", plan_of)
    assert process.wait() == 0, process.stderr.read()
    return folder / "whole"


def read_shards(folder):
    """Returns the run's shards.csv."""
    return pd.read_csv(folder / "shards.csv")


def workers_at(folder, batches, states):
    """Returns the process ids, by batch, of unfinished attempts that have stored at least `states` states or onsets."""
    pids = {}
    for batch in batches:
        with suppress(FileNotFoundError):  # the batch is being gathered
            for path in (folder / "batches" / f"{batch:04d}").glob("attempt-*"):
                stored = [*path.glob("state-*"), *path.glob("onset-*")]
                if len(stored) >= states and not (path / "ended.json").exists():
                    worker = json.loads((path / "begun.json").read_text())["worker"]
                    pids[batch] = int(worker.rpartition(":")[2])
    return pids


def run_through_failures(text, folder, workers):
    """Trains a run whose worker of batch 0 is killed, and one of batch 2 or 3 is preempted; returns the run's shards.

    Both batches are continued by another worker from the stored states.
    """

    def fail():
        kill(wait_for(lambda: workers_at(folder, {0}, states=2))[0])
        pids = wait_for(lambda: workers_at(folder, {2, 3}, states=2))
        os.kill(next(iter(pids.values())), signal.SIGUSR2)

    with run_beside(fail):
        durable.run(parse(text), folder, workers)
    shards = read_shards(folder)
    retries = shards[shards.attempt > 1]
    assert len(set(retries.batch)) == 2
    assert (retries.from_step > retries.onset).all(), "later attempts did not continue from the stored states"
    return shards


@contextmanager
def run_beside(function):
    """Runs a function in a thread beside the body of the `with` statement, and raises what the function raises."""
    errors = []

    def run():
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join(60)
    if errors:
        raise errors[0]


def wait_for(condition, seconds=300):
    """Waits until `condition()` is true, and returns its value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.02)
    return value


def kill(pid):
    os.kill(pid, signal.SIGKILL)


class InProcessBackend:
    """A backend that runs every call in this process. Arguments and results are pickled, as with the other backends."""

    workers = 2
    workers_per_machine = 2

    def __init__(self):
        self.submitted = []

    def submit(self, call, arguments):
        self.submitted.append((call, arguments))
        module, _, function = call.partition(":")
        unpickled = pickle.loads(pickle.dumps(arguments))
        value = getattr(importlib.import_module(module), function)(**unpickled)
        return SimpleNamespace(poll=lambda: CallResult(value=pickle.loads(pickle.dumps(value))))

    def open_backend(self, *arguments):
        """A replacement for `backends.open_backend`."""
        return nullcontext(self)
