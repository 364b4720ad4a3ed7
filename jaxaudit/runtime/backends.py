"""What an engine offers, and which there are."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxaudit.runtime.errors import Failed, UserError, error_of
from jaxaudit.runtime.machine import cores


import contextlib
import importlib
import io
import os
import traceback
from typing import Any

from jaxaudit.runtime.errors import TRACEBACK, explain
from jaxaudit.runtime.errors import interruptible
from jaxaudit.runtime.machine import collect_garbage_seldom, occupy, prepare_jax


import os
import socket
from typing import Any

from jaxaudit.runtime.errors import UserError


import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxaudit.runtime.errors import UserError


def perform(call: str, arguments: dict[str, Any], cpus: int, folder: str) -> dict[str, Any]:
    """Calls a function by its name, `module:function`, with so many cores; gives the fields of an `Ended`.

    JAX is made ready before the function's module is imported.

    Args:
      call: the function.
      arguments: by name.
      cpus: cores; see `jaxaudit.runtime.machine.occupy`.
      folder: where relative paths begin.
    """
    occupy(cpus)
    os.chdir(folder)
    collect_garbage_seldom()
    prepare_jax()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            value = interruptible(lambda: _called(call, arguments))
    except Exception as error:
        code, sentence = explain(error)
        if code == 1 and os.environ.get(TRACEBACK):
            said.write(traceback.format_exc())
        return {"error": sentence, "code": code, "said": said.getvalue()}
    except SystemExit as asked:  # by submitit, to be queued again; a computation still running is not waited for
        os._exit(int(asked.code or 0))
    return {"value": value, "said": said.getvalue()}


def _called(call: str, arguments: dict[str, Any]) -> Any:
    module, _, function = call.partition(":")
    return getattr(importlib.import_module(module), function)(**arguments)


ENGINES = ("ray", "slurm", "local")
"""`local` is processes of this machine, by submitit."""


@dataclass(frozen=True)
class Ended:
    """How a call ended.

    Attributes:
      value: what it returned.
      said: what it wrote to stderr.
      error: the sentence it failed with; None if it did not.
      code: the exit code that goes with it.
      lost: why nobody knows how it ended, its worker being gone; None if somebody does.
    """

    value: Any = None
    said: str = ""
    error: str | None = None
    code: int = 0
    lost: str | None = None


class Job(Protocol):
    """A call that an engine of workers has been given."""

    def ended(self) -> Ended | None:
        """Returns how the call ended; None while it runs."""

    def cancel(self) -> None:
        """Ends it at once, if it has not ended."""


class Backend(Protocol):
    """An engine.

    Attributes:
      workers: how many calls run side by side.
      beside: how many of them on one machine.
    """

    workers: int
    beside: int

    def submit(self, call: str, arguments: dict[str, Any]) -> Job:
        """Hands in a call of a function by its name, `module:function`; it runs in a process with no other call."""

    def close(self) -> None:
        """Ends all calls that were handed in."""


@dataclass(frozen=True)
class Workers:
    """Where work is done, and by how many.

    Attributes:
      engine: one of `ENGINES`.
      address: of a Ray cluster; empty for one that is found, or else begun on this machine.
      count: workers side by side; None: as many as the machine or the Ray cluster has room for.
      cpus: cores of each.
      gpus: of each.
      minutes: a job's limit of time, after which it is queued again; Ray has none.

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
            raise UserError("--on slurm needs --workers, how many jobs may run side by side")

    @staticmethod
    def parse(on: str, **others: Any) -> Workers:
        """Reads `ENGINE[:ADDRESS]` from the command line; options that are None have their defaults."""
        engine, _, address = on.partition(":")
        return Workers(engine, address, **{name: value for name, value in others.items() if value is not None})


POLL_SECONDS = 0.2
"""Between one look at whether a call has ended and the next."""


def called(backend: Backend, call: str, arguments: dict[str, Any]) -> Any:
    """What a call returns, handed in again if its worker is lost once; what it says goes to stderr."""
    return next(values(backend, [(call, arguments)]))[1]


def values(backend: Backend, calls: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[tuple[int, Any]]:
    """What calls return, (position, value), as they end; each is handed in again if its worker is lost once.

    Raises what a call fails with, or Failed where it loses its worker twice. What they say goes to stderr.
    """
    waiting = list(range(len(calls)))
    running: dict[int, Job] = {}
    lost: Counter[int] = Counter()
    while waiting or running:
        while waiting and len(running) < backend.workers:
            position = waiting.pop(0)
            running[position] = backend.submit(*calls[position])
        time.sleep(POLL_SECONDS)
        for position, job in list(running.items()):
            if (ended := job.ended()) is None:
                continue
            del running[position]
            for line in ended.said.splitlines():
                print(line, file=sys.stderr)
            if ended.error is not None:
                raise error_of(ended.code, ended.error)
            if ended.lost is None:
                yield position, ended.value
                continue
            lost[position] += 1
            if lost[position] == LOSSES:
                raise Failed(f"a worker was lost twice ({ended.lost}), so its work is given up")
            waiting.insert(0, position)


LOSSES = 2
"""Of workers, after which a call is given up."""


@contextmanager
def opened(asked: Workers, folder: Path) -> Iterator[Backend]:
    """An engine, which is closed again. What it needs to write goes to a folder.

    Raises:
      UserError: it is not installed, not there, or has no room for one worker.
    """
    if asked.engine == "ray":
        pass  # merged

        backend: Backend = OnRay(asked)
    else:
        pass  # merged

        backend = OnSubmitit(asked, folder, asked.count or max(1, cores() // asked.cpus))
    try:
        yield backend
    finally:
        backend.close()


STORE_BYTES = 80 * 2**20
"""Of Ray's memory for objects where it is begun here: calls hand over a few names."""


ANSWER_SECONDS = 10.0
"""For a cluster's address to answer."""


class OnRay:
    """Ray, connected to or begun here. See `jaxaudit.runtime.backends.Backend`."""

    def __init__(self, asked: Workers):
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise UserError("--on ray needs the extra 'ray': pip install 'jaxaudit[ray]'") from None
        self._ray, self._asked = ray, asked
        given = asked.address or os.environ.get("RAY_ADDRESS", "")
        _check_answers(given)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        try:
            ray.init(address=asked.address or "auto", **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if given:
                raise UserError(f"no Ray cluster answers at {given}: {str(error).splitlines()[0]}") from None
            ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        room = [self._room(node["Resources"]) for node in ray.nodes() if node["Alive"]]
        if not sum(room):
            self.close()
            raise UserError(f"no node of the Ray cluster has {asked.cpus} CPUs and {asked.gpus} GPUs for a worker")
        self.workers = asked.count or sum(room)
        self.beside = min(self.workers, max(room))
        self._task = ray.remote(
            num_cpus=asked.cpus,
            num_gpus=asked.gpus,
            max_calls=1 if asked.gpus else 0,  # a process keeps its programs for the next call, but no GPU's memory
            max_retries=0,  # who hands it in decides
            scheduling_strategy="SPREAD",
        )(perform)

    def _room(self, resources: dict[str, float]) -> int:
        """Workers a node with such resources has room for."""
        room = resources.get("CPU", 0) // self._asked.cpus
        return int(min(room, resources.get("GPU", 0) // self._asked.gpus) if self._asked.gpus else room)

    def submit(self, call: str, arguments: dict[str, Any]) -> _RayJob:
        return _RayJob(self._ray, self._task.remote(call, arguments, self._asked.cpus, os.getcwd()))

    def close(self) -> None:
        """Ends all that was handed in; of a cluster begun here, everything."""
        self._ray.shutdown()


def _check_answers(address: str) -> None:
    """Raises UserError where nothing listens at HOST:PORT: Ray itself asks again for minutes."""
    host, _, port = address.rpartition("://")[2].partition(":")
    if port.isdigit():
        try:
            socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
        except OSError as error:
            raise UserError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


class _RayJob:
    def __init__(self, ray: Any, reference: Any):
        self._ray, self._reference = ray, reference

    def ended(self) -> Ended | None:
        if not self._ray.wait([self._reference], timeout=0)[0]:
            return None
        try:
            return Ended(**self._ray.get(self._reference))
        except self._ray.exceptions.RayTaskError as error:  # before the call, e.g. jaxaudit is not there
            return Ended(error=f"a Ray worker could not begin: {str(error).strip().splitlines()[-1]}", code=1)
        except self._ray.exceptions.RayError as error:
            return Ended(lost=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")

    def cancel(self) -> None:
        """Ends it at once, if it has not ended."""
        self._ray.cancel(self._reference, force=True)


SIGNAL_SECONDS = 30
"""Before its limit of time, a job is told to be queued again."""


LOOK_SECONDS = 60.0
"""Between one time that Slurm is asked how jobs are and the next: what of them is lost it alone knows."""


WORD_SECONDS = {"local": 1.0, "slurm": 15.0}
"""For what a job that has ended returns to be seen, in the second in a folder that machines share."""


class OnSubmitit:
    """Runs each call as a job of submitit, as `jaxaudit.runtime.backends.Backend` describes."""

    def __init__(self, asked: Workers, folder: Path, workers: int):
        try:
            import submitit
        except ImportError:
            raise UserError(f"--on {asked.engine} needs the extra 'slurm': pip install 'jaxaudit[slurm]'") from None
        if asked.engine == "slurm" and shutil.which("sbatch") is None:
            raise UserError("--on slurm needs Slurm, and there is no sbatch on this machine")
        self.errors, self._asked, self.workers = submitit.core.utils, asked, workers
        self.local = asked.engine == "local"
        self.beside = workers if self.local else 1  # Slurm gives each job memory of its own
        # Who hands jobs in decides when it has been often enough.
        often = {f"{asked.engine}_max_num_timeout": sys.maxsize}
        self._executor = submitit.AutoExecutor(folder, cluster=asked.engine, **often)
        chosen = {"gpus_per_node": asked.gpus} if asked.gpus else {}
        if not self.local:
            chosen["slurm_signal_delay_s"] = SIGNAL_SECONDS
        self._executor.update_parameters(
            name="jaxaudit", timeout_min=asked.minutes, cpus_per_task=asked.cpus, tasks_per_node=1, **chosen
        )
        self._jobs: list[_SubmititJob] = []
        self._looked = time.monotonic()
        self.word_seconds = WORD_SECONDS[asked.engine]

    def submit(self, call: str, arguments: dict[str, Any]) -> _SubmititJob:
        with _no_interrupts():
            job = self._executor.submit(_Again(), call, arguments, self._asked.cpus, os.getcwd())
        self._jobs.append(_SubmititJob(job, self))
        return self._jobs[-1]

    def look(self) -> bool:
        """Whether it is time to ask Slurm, about all jobs at once; submitit itself would in ten minutes."""
        if self.local or time.monotonic() - self._looked < LOOK_SECONDS:
            return False
        self._looked = time.monotonic()
        return True

    def close(self) -> None:
        for job in self._jobs:
            job.cancel()


class _Again:
    """`perform`, which submitit begins again when a job has come to its limit of time or was preempted."""

    def __call__(self, call: str, arguments: dict[str, Any], cpus: int, cwd: str) -> dict[str, Any]:
        with suppress(OSError):
            os.setpgid(0, 0)  # Ctrl-C at the terminal of who handed it in is not for this process
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return perform(call, arguments, cpus, cwd)

    def checkpoint(self, *arguments: Any) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


class _no_interrupts:
    """While inside, what is begun is deaf to Ctrl-C."""

    def __enter__(self) -> None:
        self._before: Any = None
        with suppress(ValueError):  # not in the main thread
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *exception: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)


class _SubmititJob:
    def __init__(self, job: Any, backend: OnSubmitit):
        self._job, self._backend = job, backend
        self._ended: Ended | None = None
        self._silent: float | None = None

    def ended(self) -> Ended | None:
        if self._ended is None and self._job.done(force_check=self._backend.look()):
            if not self._job.paths.result_pickle.exists():  # submitit would wait for it, and nobody be looked after
                self._silent = self._silent or time.monotonic()
                if time.monotonic() - self._silent > self._backend.word_seconds:
                    self._ended = Ended(lost=f"job {self._job.job_id} ended without a word")
                return self._ended
            try:
                self._ended = Ended(**self._job.result())
            except self._backend.errors.FailedJobError as error:
                trace = str(error).split("-" * 22)[1].strip()
                self._ended = Ended(error=f"a worker could not begin: {trace.splitlines()[-1]}", code=1)
            except self._backend.errors.UncompletedJobError as error:
                self._ended = Ended(lost=str(error).splitlines()[0])
        return self._ended

    def cancel(self) -> None:
        """Ends it at once, if it has not ended."""
        if self._job.done():
            return
        if not self._backend.local:
            self._job.cancel(check=False)
            return
        with suppress(OSError, ValueError):  # it has just ended
            children = Path(f"/proc/{self._job.job_id}/task/{self._job.job_id}/children").read_text().split()
            for child in (*children, self._job.job_id):
                os.kill(int(child), signal.SIGKILL)
