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
        from jaxaudit.runtime.backends.on_ray import OnRay

        backend: Backend = OnRay(asked)
    else:
        from jaxaudit.runtime.backends.on_submitit import OnSubmitit

        backend = OnSubmitit(asked, folder, asked.count or max(1, cores() // asked.cpus))
    try:
        yield backend
    finally:
        backend.close()
