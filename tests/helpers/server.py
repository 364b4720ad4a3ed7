"""Commands in processes of their own that start fast: a server imports everything once and forks for each.

Nothing of JAX runs before the fork, so a command's process is as fresh as one from a shell. It can be killed.
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
class Done:
    """How a command ended: code is minus the signal's number where one ended it."""

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
        first: str = "",
        watch: Callable[[int], None] | None = None,
    ) -> Done:
        """Runs a command; `first` is Python its process runs before, `watch` gets its id and may kill it."""
        out, err = self._folder / "out.txt", self._folder / "err.txt"
        begun = time.monotonic()
        pid = self._ask(argv=[str(a) for a in argv], first=first, out=str(out), err=str(err))
        if watch:
            watch(pid)
        code = self._ask(wait=pid)
        return Done(code, out.read_text(), err.read_text(), time.monotonic() - begun)

    def together(self, *argv: object, waits: Sequence[float]) -> list[Done]:
        """Starts a command several times, each so many seconds after the one before, and waits for all."""
        begun, started = time.monotonic(), []
        for number, wait in enumerate(waits):
            time.sleep(wait)
            out, err = (self._folder / f"{stream}-{number}.txt" for stream in ("out", "err"))
            started.append((self._ask(argv=[str(a) for a in argv], first="", out=str(out), err=str(err)), out, err))
        codes = [self._ask(wait=pid) for pid, _, _ in started]
        seconds = time.monotonic() - begun
        return [
            Done(code, out.read_text(), err.read_text(), seconds)
            for code, (_, out, err) in zip(codes, started, strict=True)
        ]

    def _ask(self, **question: object) -> int:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(10)


def _serve() -> None:
    import noisy  # noqa: F401  registers its learner
    import quadratic  # noqa: F401  so does this
    import unreported  # noqa: F401

    import jaxaudit.learners
    import jaxaudit.runs.lifecycle
    import jaxaudit.tasks  # noqa: F401
    from jaxaudit.cli import main as cli

    gc.freeze()  # or each process would look for garbage in what was imported
    sys.argv[0] = "jaxaudit"
    for line in sys.stdin:
        question = json.loads(line)
        if "wait" in question:
            _, status = os.waitpid(question["wait"], 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
            continue
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor, name in ((1, question["out"]), (2, question["err"])):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        exec(question["first"], {})
        sys.argv[1:] = question["argv"]
        cli.entry()


if __name__ == "__main__":
    _serve()
