"""The protocol between a part of the measurement and the schedule: recording results, and waiting for the device.

A part is a process: `python part.py SCRIPT FUNCTION [--tiny] [ARGUMENT ...]` calls `FUNCTION(part, *ARGUMENTS)` of
`SCRIPT.py`. `measure_gpu.py` reads its standard output: a line "ready" requests the device, and every other line is a
result as JSON. The schedule answers "go SECONDS" on its standard input. A part that is started manually gets its turn
with the first line of input.
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
    """The part's side of the protocol.

    Attributes:
      tiny: whether this is a rehearsal, whose numbers are meaningless.
    """

    def __init__(self, tiny: bool, out: TextIO, words: TextIO):
        self.tiny = tiny
        self._out, self._words = out, words
        self._end = float("inf")

    def record(self, what: str, **figures: Any) -> None:
        """Sends a result to the schedule, which stores it immediately."""
        print(json.dumps({"what": what, **figures}, default=str), file=self._out, flush=True)

    def wait_for_turn(self) -> None:
        """Waits until no other part measures on the device."""
        print("ready", file=self._out, flush=True)
        word = self._words.readline().split()
        self._end = time.monotonic() + float(word[1]) if len(word) == 2 else float("inf")

    @property
    def seconds_left(self) -> float:
        """The remaining seconds of the turn."""
        return self._end - time.monotonic()

    def failed(self, what: str, error: BaseException, **figures: Any) -> None:
        """Records that a measurement failed."""
        self.record(what, failed=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", **figures)


def device_memory() -> dict[str, int | None]:
    """Returns the bytes of the first device in use, at the peak and in total, or None on a CPU."""
    import jax

    statistics = jax.devices()[0].memory_stats() or {}
    return {name: statistics.get(name) for name in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")}


def compile_quickly() -> None:
    """Disables most optimisations of XLA, for a rehearsal on a CPU."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)


def main() -> None:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script")
    parser.add_argument("function")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    # Output of libraries goes to the log.
    descriptor = os.dup(1)
    os.dup2(2, 1)
    part = Part(arguments.tiny, os.fdopen(descriptor, "w"), sys.stdin)
    # Appended, since the folder has a kernels.py, which would shadow a package that transformers imports.
    sys.path.append(str(BENCHMARKS))
    os.environ.setdefault("JAXAUDIT_CACHE", "off")
    start = time.monotonic()
    try:
        getattr(importlib.import_module(arguments.script), arguments.function)(part, *arguments.arguments)
    except BaseException as error:
        traceback.print_exc()
        part.failed("part", error)
        raise SystemExit(1) from error
    part.record("done", seconds=round(time.monotonic() - start, 1))


if __name__ == "__main__":
    main()
