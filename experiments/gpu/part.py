"""What a part of the measurement shares with the schedule: it records figures, and waits for its turn on the device.

A part is a process: `python part.py SCRIPT FUNCTION [--tiny] [ARGUMENT ...]` calls `FUNCTION(part, *ARGUMENTS)` of
`SCRIPT.py`. Its standard output is read by `measure_gpu.py`: a line "ready" asks for the device, every other line is a
figure as JSON. The schedule answers "go SECONDS" on its standard input. Run by hand, a part gets its turn at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "experiments" / "benchmarks"


class Part:
    """A part's side of the schedule.

    Attributes:
      tiny: whether it is a rehearsal, whose numbers mean nothing.
    """

    def __init__(self, tiny: bool, out: TextIO, words: TextIO):
        self.tiny = tiny
        self._out, self._words = out, words
        self._end = float("inf")

    def record(self, what: str, **figures: Any) -> None:
        """Hands a figure to the schedule, which writes it at once."""
        print(json.dumps({"what": what, **figures}, default=str), file=self._out, flush=True)

    def wait_for_turn(self) -> None:
        """Returns when no other part measures on the device."""
        print("ready", file=self._out, flush=True)
        word = self._words.readline().split()
        self._end = time.monotonic() + float(word[1]) if len(word) == 2 else float("inf")

    @property
    def seconds_left(self) -> float:
        """Of its turn."""
        return self._end - time.monotonic()

    def failed(self, what: str, error: BaseException, **figures: Any) -> None:
        """Records that something was tried and did not work."""
        self.record(what, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", **figures)


def device_memory() -> dict[str, int | None]:
    """Bytes of the first device that are in use, that were at most, and that there are; none on a CPU."""
    import jax

    found = jax.devices()[0].memory_stats() or {}
    return {name: found.get(name) for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")}


def compile_quickly() -> None:
    """For a rehearsal on a CPU: XLA leaves out most of its optimisations."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("function")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    # What libraries print belongs to the log.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    part = Part(given.tiny, os.fdopen(descriptor, "w"), sys.stdin)
    # Appended, not inserted: the folder has a kernels.py, and transformers looks for a package of that name.
    sys.path.append(str(BENCHMARKS))
    os.environ.setdefault("JAXAUDIT_CACHE", "off")
    begun = time.monotonic()
    try:
        getattr(importlib.import_module(given.script), given.function)(part, *given.arguments)
    except BaseException as error:
        traceback.print_exc()
        part.failed("part", error)
        raise SystemExit(1) from error
    part.record("done", seconds=round(time.monotonic() - begun, 1))


if __name__ == "__main__":
    main()
