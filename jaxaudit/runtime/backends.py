"""Backends that run calls in other processes: Ray, Slurm through submitit, and processes of this machine.

A call is the name of a function with arguments that JSON can represent.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxaudit.runtime.errors import (
    TRACEBACK,
    Failed,
    UserError,
    error_from_exit_code,
    explain,
    interruptible,
    interrupts_handled,
)
from jaxaudit.runtime.machine import claim_cores, collect_garbage_rarely, core_count, prepare_jax

ENGINES = ("ray", "slurm", "local")
"""The names of the engines; "local" starts processes of this machine, by submitit."""

POLL_SECONDS = 0.2
"""The time between two checks of whether calls have ended."""

MAX_LOSSES = 2
"""The number of lost workers after which a call is given up."""

RAY_STORE_BYTES = 80 * 2**20
"""The size of the object store of a Ray cluster that is started here; arguments and results of calls are small."""

RAY_TIMEOUT_SECONDS = 10.0
"""The time within which the address of a Ray cluster has to answer."""

REQUEUE_SIGNAL_SECONDS = 30
"""The time before a job's time limit at which Slurm tells it to be queued again."""

SLURM_POLL_SECONDS = 60.0
"""The time between two queries of Slurm, which alone knows that a job's node has failed."""

RESULT_TIMEOUT_SECONDS = {"local": 1.0, "slurm": 15.0}
"""The time until the result file of an ended job is visible, which takes longer in a folder that machines share."""


@dataclass(frozen=True)
class CallResult:
    """How a call ended.

    Attributes:
      value: the value that it returned.
      stderr: what it wrote to stderr.
      error: the message of the error that it raised; None if it did not fail.
      code: the exit code that goes with the error.
      lost: why its worker was lost before it ended; None if it ended.
    """

    value: Any = None
    stderr: str = ""
    error: str | None = None
    code: int = 0
    lost: str | None = None


class Job(Protocol):
    """A call that was submitted to a backend."""

    def poll(self) -> CallResult | None:
        """Returns how the call ended; None while it runs."""

    def cancel(self) -> None:
        """Kills the call's process if it has not ended."""


class Backend(Protocol):
    """A pool of worker processes.

    Attributes:
      workers: the number of calls that run side by side.
      workers_per_machine: the most of them that run on one machine and share its memory.
    """

    workers: int
    workers_per_machine: int

    def submit(self, function: str, arguments: dict[str, Any]) -> Job:
        """Submits a call of a function, named `module:function`, which has a process to itself while it runs."""

    def close(self) -> None:
        """Kills all calls that were submitted and have not ended."""


@dataclass(frozen=True)
class Workers:
    """The command line's choice of a backend and of its workers.

    Attributes:
      engine: one of `ENGINES`.
      address: the address of a Ray cluster; empty to use a cluster that Ray finds, or to start one on this machine.
      count: the number of workers side by side; None for as many as the machine or the Ray cluster has room for.
      cpus: the number of cores of each worker.
      gpus: the number of GPUs of each worker.
      minutes: the time limit of a job, after which it is queued again; Ray has none.

    Raises:
      UserError: one of them is out of range.
    """

    engine: str
    address: str = ""
    count: int | None = None
    cpus: int = 1
    gpus: int = 0
    minutes: int = 24 * 60

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UserError(f"--on must be ray, ray:ADDRESS, slurm or local, not {self.engine!r}")
        if self.address and self.engine != "ray":
            raise UserError(f"--on {self.engine} takes no address, and '{self.address}' was given")
        for name, value, least in (
            ("--workers", self.count, 1),
            ("--cpus", self.cpus, 1),
            ("--gpus", self.gpus, 0),
            ("--minutes", self.minutes, 1),
        ):
            if value is not None and value < least:
                raise UserError(f"{name} must be at least {least}, not {value}")
        if self.engine == "slurm" and self.count is None:
            raise UserError("--on slurm needs --workers N, the number of jobs that may run side by side")

    @staticmethod
    def parse(on: str, **options: Any) -> Workers:
        """Parses `ENGINE[:ADDRESS]` of the command line; options that are None get their defaults."""
        engine, _, address = on.partition(":")
        return Workers(engine, address, **{name: value for name, value in options.items() if value is not None})


@contextlib.contextmanager
def open_backend(workers: Workers, folder: Path) -> Iterator[Backend]:
    """Yields a backend, which is closed when the block ends.

    Args:
      workers: the engine and its workers.
      folder: where the engine writes the files of its jobs.

    Raises:
      UserError: the engine is not installed, cannot be reached, or has no room for one worker.
    """
    backend: Backend = RayBackend(workers) if workers.engine == "ray" else SubmititBackend(workers, folder)
    with contextlib.closing(backend):
        yield backend


def call_worker(backend: Backend, function: str, arguments: dict[str, Any]) -> Any:
    """Returns the value of one call; see `run_calls`."""
    return next(run_calls(backend, [(function, arguments)]))[1]


def run_calls(backend: Backend, calls: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[int, Any]]:
    """Yields the index and the value of each call, (function, arguments), as the calls end.

    What the calls write to stderr is printed there. A call whose worker is lost once is submitted again.

    Raises:
      UserError, Interrupted, Failed: what a call fails with; Failed if it loses its worker twice.
    """
    waiting = list(range(len(calls)))
    running: dict[int, Job] = {}
    losses: Counter[int] = Counter()
    while waiting or running:
        while waiting and len(running) < backend.workers:
            index = waiting.pop(0)
            running[index] = backend.submit(*calls[index])
        time.sleep(POLL_SECONDS)
        for index, job in list(running.items()):
            if (result := job.poll()) is None:
                continue
            del running[index]
            for line in result.stderr.splitlines():
                print(line, file=sys.stderr)
            if result.error is not None:
                raise error_from_exit_code(result.code, result.error)
            if result.lost is None:
                yield index, result.value
                continue
            losses[index] += 1
            if losses[index] == MAX_LOSSES:
                raise Failed(f"a worker was lost twice ({result.lost}), so its work is given up")
            waiting.insert(0, index)


def perform(function: str, arguments: dict[str, Any], cpus: int, folder: str) -> dict[str, Any]:
    """Calls a function in this worker process, after JAX was configured, and returns the fields of a `CallResult`.

    Args:
      function: its name, `module:function`.
      arguments: its arguments by name.
      cpus: the number of cores to use; see `jaxaudit.runtime.machine.claim_cores`.
      folder: the working directory.
    """
    claim_cores(cpus)
    os.chdir(folder)
    collect_garbage_rarely()
    prepare_jax()
    output = io.StringIO()
    try:
        with contextlib.redirect_stderr(output):
            value = interruptible(lambda: _call_by_name(function, arguments))
    except Exception as error:
        code, message = explain(error)
        if code == 1 and os.environ.get(TRACEBACK):
            output.write(traceback.format_exc())
        return {"error": message, "code": code, "stderr": output.getvalue()}
    except SystemExit as request:  # raised by submitit to be queued again, while the computation may still run
        os._exit(int(request.code or 0))
    return {"value": value, "stderr": output.getvalue()}


def _call_by_name(name: str, arguments: dict[str, Any]) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(**arguments)


class RayBackend:
    """Runs each call as a task of a Ray cluster, which is started on this machine if there is none."""

    def __init__(self, workers: Workers):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise UserError("--on ray needs the extra 'ray': pip install 'jaxaudit[ray]'") from None
        self._ray, self._options = ray, workers
        address = workers.address or os.environ.get("RAY_ADDRESS", "")
        _check_reachable(address)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=workers.address or "auto", **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if address:
                raise UserError(f"no Ray cluster answers at {address}: {str(error).splitlines()[0]}") from None
            ray.init(address="local", include_dashboard=False, object_store_memory=RAY_STORE_BYTES, **quiet)
        capacities = [self._capacity(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        if not sum(capacities):
            self.close()
            raise UserError(f"no node of the Ray cluster has {workers.cpus} CPUs and {workers.gpus} GPUs for a worker")
        self.workers = workers.count or sum(capacities)
        self.workers_per_machine = min(self.workers, max(capacities))
        self._task = ray.remote(
            num_cpus=workers.cpus,
            num_gpus=workers.gpus,
            max_calls=1 if workers.gpus else 0,  # a process may keep compiled programs for its next call, but no GPU
            max_retries=0,  # the caller decides what is submitted again
            scheduling_strategy="SPREAD",
        )(perform)

    def _capacity(self, resources: dict[str, float]) -> int:
        """Returns the number of workers that fit on a node with these resources."""
        capacity = resources.get("CPU", 0) // self._options.cpus
        if self._options.gpus:
            capacity = min(capacity, resources.get("GPU", 0) // self._options.gpus)
        return int(capacity)

    def submit(self, function: str, arguments: dict[str, Any]) -> _RayJob:
        return _RayJob(self._ray, self._task.remote(function, arguments, self._options.cpus, os.getcwd()))

    def close(self) -> None:
        """Kills all calls, and the cluster if it was started here."""
        self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raises UserError if nothing listens at HOST:PORT, since Ray itself would try again for minutes."""
    host, _, port = address.rpartition("://")[2].partition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), RAY_TIMEOUT_SECONDS).close()
        except OSError as error:
            raise UserError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


class _RayJob:
    def __init__(self, ray: Any, reference: Any):
        self._ray, self._reference = ray, reference

    def poll(self) -> CallResult | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return CallResult(**self._ray.get(self._reference))
        except self._ray.exceptions.RayTaskError as error:  # before the call, for example if jaxaudit is missing
            return CallResult(error=f"a Ray worker could not begin: {str(error).strip().splitlines()[-1]}", code=1)
        except self._ray.exceptions.RayError as error:
            return CallResult(lost=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")

    def cancel(self) -> None:
        self._ray.cancel(self._reference, force=True)


class SubmititBackend:
    """Runs each call as a job of submitit, in Slurm or as a process of this machine."""

    def __init__(self, options: Workers, folder: Path):
        try:
            import submitit
        except ImportError:
            raise UserError(f"--on {options.engine} needs the extra 'slurm': pip install 'jaxaudit[slurm]'") from None
        if options.engine == "slurm" and shutil.which("sbatch") is None:
            raise UserError("--on slurm needs Slurm, and there is no sbatch on this machine")
        self.errors, self._options = submitit.core.utils, options
        self.local = options.engine == "local"
        self.workers = options.count or max(1, core_count() // options.cpus)
        self.workers_per_machine = self.workers if self.local else 1  # Slurm gives each job memory of its own
        # The caller decides how often a call is submitted again, so submitit has no limit.
        unlimited = {f"{options.engine}_max_num_timeout": sys.maxsize}
        self._executor = submitit.AutoExecutor(folder, cluster=options.engine, **unlimited)
        resources = {"gpus_per_node": options.gpus} if options.gpus else {}
        if not self.local:
            resources["slurm_signal_delay_s"] = REQUEUE_SIGNAL_SECONDS
        self._executor.update_parameters(
            name="jaxaudit", timeout_min=options.minutes, cpus_per_task=options.cpus, tasks_per_node=1, **resources
        )
        self._jobs: list[_SubmititJob] = []
        self._latest_query = time.monotonic()
        self.result_timeout = RESULT_TIMEOUT_SECONDS[options.engine]

    def submit(self, function: str, arguments: dict[str, Any]) -> _SubmititJob:
        with interrupts_handled(signal.SIG_IGN):  # the process that is started ignores Ctrl-C from its beginning
            job = self._executor.submit(_RequeuedCall(), function, arguments, self._options.cpus, os.getcwd())
        self._jobs.append(_SubmititJob(job, self))
        return self._jobs[-1]

    def query_due(self) -> bool:
        """Returns whether to query Slurm now, and if so records the time; submitit's own interval is 10 minutes."""
        if self.local or time.monotonic() - self._latest_query < SLURM_POLL_SECONDS:
            return False
        self._latest_query = time.monotonic()
        return True

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()


class _RequeuedCall:
    """`perform` as a callable that submitit runs again when a job reached its time limit or was preempted."""

    def __call__(self, function: str, arguments: dict[str, Any], cpus: int, folder: str) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)  # leaves the process group of the caller's terminal, to which Ctrl-C is sent
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return perform(function, arguments, cpus, folder)

    def checkpoint(self, *arguments: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class _SubmititJob:
    def __init__(self, job: Any, backend: SubmititBackend):
        self._job, self._backend = job, backend
        self._result: CallResult | None = None
        self._silent_since: float | None = None

    def poll(self) -> CallResult | None:
        if self._result is None and self._job.done(force_check=self._backend.query_due()):
            if not self._job.paths.result_pickle.exists():  # submitit would block until it does
                self._silent_since = self._silent_since or time.monotonic()
                if time.monotonic() - self._silent_since > self._backend.result_timeout:
                    self._result = CallResult(lost=f"job {self._job.job_id} ended without a result")
                return self._result
            try:
                self._result = CallResult(**self._job.result())
            except self._backend.errors.FailedJobError as error:
                trace = str(error).split("-" * 22)[1].strip()
                self._result = CallResult(error=f"a worker could not begin: {trace.splitlines()[-1]}", code=1)
            except self._backend.errors.UncompletedJobError as error:
                self._result = CallResult(lost=str(error).splitlines()[0])
        return self._result

    def cancel(self) -> None:
        if self._job.done():
            return
        if not self._backend.local:
            self._job.cancel(check=False)
            return
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            children = Path(f"/proc/{self._job.job_id}/task/{self._job.job_id}/children").read_text().split()
            for child in (*children, self._job.job_id):
                os.kill(int(child), signal.SIGKILL)
