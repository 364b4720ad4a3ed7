"""Kills commands at random times, and compares their final results bitwise with an undisturbed run.

    python experiments/hardening/kills.py --kills 200 --seed 0

SIGKILL is sent at a time sampled uniformly from the duration of the undisturbed command, which is from before the
folder is claimed to after the report is written. The command is started again, as a user would do, until it finishes:
`run` until the run's spec is written, then `resume`; `margin` with the same arguments; and a driver of two Ray workers
as `run`, then `resume`, on a Ray cluster that persists.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from commands import MARGIN, SPEC, Command, Commands, contents

SHARES = {"run": 0.55, "margin": 0.4, "ray": 0.05}
"""Shares of the kills; a run by two Ray workers takes a minute."""


def kill_through(
    start: Callable[[], Command],
    report: Callable[[], Command],
    kill: Callable[[Command, float], bool],
    seconds: float,
    random_: random.Random,
    max_kills: int,
) -> int:
    """Starts a command repeatedly until it finishes, with at most `most` kills; returns the number of kills."""
    kills = 0
    while True:
        command = start()
        if kills < max_kills and kill(command, random_.uniform(0, seconds)):
            kills += 1
            continue
        code, words = command.wait()
        if code and "is already finished" in words:  # it was killed while the report was written
            code, words = report().wait()
        if code:
            raise RuntimeError(f"ended with {code} after {kills} kills: {words}")
        return kills


def different_files_of(folder: Path, reference: dict[str, str]) -> list[str]:
    """Returns the files of a folder that differ from the reference, or exist in only one of the two."""
    found = contents(folder)
    return sorted(name for name in found.keys() | reference.keys() if found.get(name) != reference.get(name))


def kill_command(
    target: str,
    commands: Commands,
    place: Path,
    kills: int,
    random_: random.Random,
    kill: Callable[[Command, float], bool] = Command.kill_after,
    options: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Kills one kind of command a number of times, and returns the result."""
    spec, finished = place / "spec.toml", place / "whole"
    spec.write_text(SPEC)
    if not finished.exists():
        commands.run("run", spec, "-o", finished)
    reference, seconds = contents(finished), commands.run("run", spec, "-o", place / "timed", *options)
    if target == "margin":
        commands.run("margin", finished, "-o", place / "whole-margins", *MARGIN)
        seconds = commands.run("margin", finished, "-o", place / "timed-margins", *MARGIN)
        reference = contents(place / "whole-margins")
        shutil.rmtree(place / "timed-margins")
    elif target == "ray":  # two workers distribute lanes differently than one process
        reference = contents(place / "timed")
    elif different := different_files_of(place / "timed", reference):
        raise RuntimeError(f"two undisturbed runs differ in {different}")
    shutil.rmtree(place / "timed")
    kill_count, rounds, different_files = 0, 0, []
    out = place / "killed"

    def start() -> Command:
        if target == "margin":
            return commands.start("margin", finished, "-o", out, *MARGIN)
        exists = (out / "spec.toml").exists()
        return commands.start(*(("resume", out) if exists else ("run", spec, "-o", out)), *options)

    while kill_count < kills:
        kill_count += kill_through(
            start, lambda: commands.start("report", out), kill, seconds, random_, kills - kill_count
        )
        rounds += 1
        different_files += different_files_of(out, reference)
        shutil.rmtree(out)
    return {
        "command": target,
        "kills": kill_count,
        "rounds": rounds,
        "seconds": round(seconds, 1),
        "different": different_files,
    }


def main() -> int:
    """Prints a line of JSON for every kind of command; returns 1 if any result differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SHARES)
    parser.add_argument("--interrupt", action="store_true", help="Ctrl-C (SIGINT) instead of SIGKILL")
    arguments = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        place, random_ = Path(folder), random.Random(arguments.seed)
        commands = Commands(place)
        kill = Command.interrupt_after if arguments.interrupt else Command.kill_after
        for target in [arguments.only] if arguments.only else SHARES:
            kills = arguments.kills if arguments.only else round(arguments.kills * SHARES[target])
            start = time.monotonic()
            with _cluster() if target == "ray" else contextlib.nullcontext(()) as options:
                result = kill_command(target, commands, place, kills, random_, kill, options)
            print(json.dumps(result | {"seed": arguments.seed, "took": round(time.monotonic() - start)}), flush=True)
            different += len(result["different"])
    return 1 if different else 0


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, ...]]:
    """Runs a Ray cluster of two workers on this machine; yields the options of commands that use it."""
    _ray("start", "--head", "--num-cpus=2", "--port=6399", "--include-dashboard=false", "--disable-usage-stats")
    try:
        yield "--on", "ray:127.0.0.1:6399", "--workers", "2"
    finally:
        _ray("stop", "--force")


def _ray(*argv: str) -> None:
    subprocess.run([Path(sys.executable).with_name("ray"), *argv], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
