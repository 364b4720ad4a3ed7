"""Slurm, and processes of this machine, through submitit: one job for each call."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxaudit.runtime.backends.backend import Ended, Workers
from jaxaudit.runtime.backends.worker import perform
from jaxaudit.runtime.errors import UserError

SIGNAL_SECONDS = 30
"""Before its limit of time, a job is told to be queued again."""


LOOK_SECONDS = 60.0
"""Between one time that Slurm is asked how jobs are and the next: what of them is lost it alone knows."""


WORD_SECONDS = {"local": 1.0, "slurm": 15.0}
"""For what a job that has ended returns to be seen, in the second in a folder that machines share."""


class OnSubmitit:
    """Runs each call as a job of submitit, as `jaxaudit.runtime.backends.backend.Backend` describes."""

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
