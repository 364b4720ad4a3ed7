"""Kills commands at random instants and compares what they end with, bit for bit, with a run that nothing happened to.

    python experiments/hardening/kills.py --kills 200 --seed 0

SIGKILL is sent at an instant drawn uniformly from the time that the command takes when nothing happens to it: from
before the folder is claimed to after the report is drawn. The command is started again, as its user would, until it
ends by itself: `run` until the run's spec is written, then `resume`; `margin` with the same arguments; the driver of
two Ray workers as `run`, then `resume`, on a Ray cluster that stays.
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
"""Of the kills: a run by two Ray workers takes a minute."""


def kill_through(
    start: Callable[[], Command],
    draw_report: Callable[[], Command],
    kill: Callable[[Command, float], bool],
    seconds: float,
    draw: random.Random,
    most: int,
) -> int:
    """Starts a command again and again until it ends by itself, with at most so many kills; how many there were."""
    kills = 0
    while True:
        command = start()
        if kills < most and kill(command, draw.uniform(0, seconds)):
            kills += 1
            continue
        code, words = command.ended()
        if code and "is already finished" in words:  # it was killed while its report was drawn
            code, words = draw_report().ended()
        if code:
            raise RuntimeError(f"ended with {code} after {kills} kills: {words}")
        return kills


def lost(folder: Path, reference: dict[str, str]) -> list[str]:
    """The files of a folder that are not as in the reference, or are in one of the two alone."""
    found = contents(folder)
    return sorted(name for name in found.keys() | reference.keys() if found.get(name) != reference.get(name))


def through(
    target: str,
    commands: Commands,
    place: Path,
    kills: int,
    draw: random.Random,
    kill: Callable[[Command, float], bool] = Command.kill_after,
    on: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Kills one kind of command so often; what came of it."""
    spec, whole = place / "spec.toml", place / "whole"
    spec.write_text(SPEC)
    if not whole.exists():
        commands.run("run", spec, "-o", whole)
    reference, seconds = contents(whole), commands.run("run", spec, "-o", place / "timed", *on)
    if target == "margin":
        commands.run("margin", whole, "-o", place / "whole-margins", *MARGIN)
        seconds = commands.run("margin", whole, "-o", place / "timed-margins", *MARGIN)
        reference = contents(place / "whole-margins")
        shutil.rmtree(place / "timed-margins")
    elif target == "ray":  # two workers lay lanes out otherwise than one process does
        reference = contents(place / "timed")
    elif different := lost(place / "timed", reference):
        raise RuntimeError(f"two runs that nothing happened to differ in {different}")
    shutil.rmtree(place / "timed")
    done, rounds, wrong = 0, 0, []
    out = place / "killed"

    def start() -> Command:
        if target == "margin":
            return commands.start("margin", whole, "-o", out, *MARGIN)
        begun = (out / "spec.toml").exists()
        return commands.start(*(("resume", out) if begun else ("run", spec, "-o", out)), *on)

    while done < kills:
        done += kill_through(start, lambda: commands.start("report", out), kill, seconds, draw, kills - done)
        rounds += 1
        wrong += lost(out, reference)
        shutil.rmtree(out)
    return {"command": target, "kills": done, "rounds": rounds, "seconds": round(seconds, 1), "different": wrong}


def main() -> int:
    """Prints a line of JSON for every kind of command; the exit code is 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SHARES)
    parser.add_argument("--interrupt", action="store_true", help="Ctrl-C (SIGINT) in place of SIGKILL")
    chosen = parser.parse_args()
    different = 0
    with tempfile.TemporaryDirectory() as folder:
        place, draw = Path(folder), random.Random(chosen.seed)
        commands = Commands(place)
        kill = Command.interrupt_after if chosen.interrupt else Command.kill_after
        for target in [chosen.only] if chosen.only else SHARES:
            kills = chosen.kills if chosen.only else round(chosen.kills * SHARES[target])
            begun = time.monotonic()
            with _cluster() if target == "ray" else contextlib.nullcontext(()) as on:
                result = through(target, commands, place, kills, draw, kill, on)
            print(json.dumps(result | {"seed": chosen.seed, "took": round(time.monotonic() - begun)}), flush=True)
            different += len(result["different"])
    return 1 if different else 0


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, ...]]:
    """A Ray cluster of two workers on this machine; the options that have a command use it."""
    _ray("start", "--head", "--num-cpus=2", "--port=6399", "--include-dashboard=false", "--disable-usage-stats")
    try:
        yield "--on", "ray:127.0.0.1:6399", "--workers", "2"
    finally:
        _ray("stop", "--force")


def _ray(*argv: str) -> None:
    subprocess.run([Path(sys.executable).with_name("ray"), *argv], check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
