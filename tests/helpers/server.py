"""Runs commands in fresh processes that start fast: a server imports everything once, and forks for each command.

Nothing of JAX runs before the fork, so a command's process is as fresh as one started from a shell, and can be killed.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FAST = {"JAX_NUM_CPU_DEVICES": "2", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True)
class CommandResult:
    """The result of a command. If a signal ended the process, `code` is minus the signal's number."""

    code: int
    out: str
    err: str
    seconds: float


class Server:
    """Runs `jaxaudit` commands, one at a time."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | FAST | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")},
        )

    def __call__(
        self,
        *argv: object,
        setup: str = "",
        watch: Callable[[int], None] | None = None,
    ) -> CommandResult:
        """Runs a command.

        Args:
          argv: The command's arguments.
          setup: Python code that the command's process runs first.
          watch: A function that is called with the process id, and may kill the process.
        """
        out, err = self._folder / "out.txt", self._folder / "err.txt"
        start = time.monotonic()
        pid = self._request(argv=[str(argument) for argument in argv], setup=setup, out=str(out), err=str(err))
        if watch:
            watch(pid)
        code = self._request(wait=pid)
        return CommandResult(code, out.read_text(), err.read_text(), time.monotonic() - start)

    def run_concurrently(self, *argv: object, delays: Sequence[float]) -> list[CommandResult]:
        """Starts a command several times, each `delays` seconds after the one before, and waits for all."""
        start, started = time.monotonic(), []
        for number, delay in enumerate(delays):
            time.sleep(delay)
            out, err = (self._folder / f"{stream}-{number}.txt" for stream in ("out", "err"))
            started.append(
                (
                    self._request(argv=[str(argument) for argument in argv], setup="", out=str(out), err=str(err)),
                    out,
                    err,
                )
            )
        codes = [self._request(wait=pid) for pid, _, _ in started]
        seconds = time.monotonic() - start
        return [
            CommandResult(code, out.read_text(), err.read_text(), seconds)
            for code, (_, out, err) in zip(codes, started, strict=True)
        ]

    def _request(self, **request: object) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


def _serve() -> None:
    import noisy  # noqa: F401  registers the learner
    import quadratic  # noqa: F401  registers the learner
    import without_reports  # noqa: F401

    import jaxaudit.learners
    import jaxaudit.runs.lifecycle
    import jaxaudit.tasks  # noqa: F401
    from jaxaudit.cli import main as cli

    gc.freeze()  # otherwise each process would collect garbage among the imported modules
    sys.argv[0] = "jaxaudit"
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, name in ((1, request["out"]), (2, request["err"])):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        exec(request["setup"], {})
        sys.argv[1:] = request["argv"]
        cli.entry()


if __name__ == "__main__":
    _serve()
