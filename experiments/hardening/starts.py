"""Starts a command several times on one folder: one must continue, the others must leave with one sentence.

    python experiments/hardening/starts.py --starts 10 --seed 0
    python experiments/hardening/starts.py --pairs --seed 0

The times of starts are sampled uniformly from the duration of the command. After one `margin` has finished, later ones
find the search finished and succeed, too; of the other commands, all but one must leave with exit code 2. The results
must be those of a single command.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from commands import MARGIN, SPEC, Commands, contents

COMMANDS = ("run", "resume", "fork", "margin", "detect", "monitor", "export")

LANGUAGE = """[audit]
name = "language"
seeds = 2
steps = 12
[task]
kind = "text"
name = "{text}"
[learner]
kind = "language_model"
size = "micro"
context = 16
batch_size = 2
accumulation = 1
held_out = 2
[metrics]
window = 4
hold = 4
horizon = 4
[[perturbation]]
kind = "lr_spike"
magnitude = 3
onset = 6
duration = 2
"""

SENTENCES = ("another process is at work on", "exists and is not empty", "is already finished")
"""Messages of the commands that leave."""

REFUSALS = (*SENTENCES, "is not a run's folder", "is not a search", "is there already", "belongs to", "has another")
"""Messages about a folder in which another command is running, or has run."""


def argv_of(command: str, place: Path, out: Path) -> list[object]:
    """Returns the arguments of a command, whose inputs `prepare` created."""
    spec = place / "spec.toml"
    return {
        "run": ["run", spec, "-o", out],
        "resume": ["resume", out],
        "fork": ["fork", place / "whole", spec, "-o", out],
        "margin": ["margin", place / "whole", "-o", out, *MARGIN],
        "detect": ["detect", place / "many", "-o", out, "--folds", "2"],
        "monitor": ["monitor", place / "new.csv", "--clean", *sorted(place.glob("clean-*.csv")), "-o", out],
        "export": ["export", place / "language", "-o", out],
    }[command]


def prepare(commands: Commands, place: Path, names: Sequence[str]) -> None:
    """Creates the runs and logs that the commands need."""
    (place / "spec.toml").write_text(SPEC)
    commands.run("run", place / "spec.toml", "-o", place / "whole")
    if "detect" in names:
        (place / "many.toml").write_text(SPEC.replace("seeds = 3", "seeds = 60"))
        commands.run("run", place / "many.toml", "-o", place / "many")
    if "export" in names:
        (place / "text.txt").write_text("a stitch in time saves nine. " * 400)
        (place / "language.toml").write_text(LANGUAGE.format(text=place / "text.txt"))
        commands.run("run", place / "language.toml", "-o", place / "language")
    if "monitor" in names:
        random_ = random.Random(1)
        for name in ("new", *(f"clean-{n:02d}" for n in range(12))):
            with (place / f"{name}.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["step", "loss", "reward"])
                table.writerows([step, random_.gauss(0, 1), random_.gauss(0, 1)] for step in range(50))


def at_once(command: str, commands: Commands, place: Path, starts: int, random_: random.Random) -> dict[str, object]:
    """Runs a command alone, then starts it several times concurrently, and returns the result."""
    alone, out = place / f"{command}-alone", place / f"{command}-together"
    if command == "resume":
        stopped = place / "stopped"
        _stop_in_the_middle(commands, place / "spec.toml", stopped)
        for folder in (alone, out):
            shutil.copytree(stopped, folder)
    seconds = commands.run(*argv_of(command, place, alone))
    start, offsets = time.monotonic(), sorted(random_.uniform(0, seconds) for _ in range(starts))
    started = []
    for offset in offsets:
        time.sleep(max(0.0, start + offset - time.monotonic()))
        started.append(commands.start(*argv_of(command, place, out)))
    ends = [command_.wait() for command_ in started]
    succeeded = sum(code == 0 for code, _ in ends)
    sentences = [words.rstrip().splitlines()[-1] for code, words in ends if code]
    failures = [words for code, words in ends if code not in (0, 2)]
    failures += [sentence for sentence in sentences if not any(expected in sentence for expected in SENTENCES)]
    left, right = contents(alone), contents(out)
    different = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    passed = not failures and not different and (succeeded == 1 or (command == "margin" and succeeded >= 1))
    for folder in (alone, out):
        shutil.rmtree(folder)
    return {
        "command": command,
        "starts": starts,
        "went_on": succeeded,
        "different": different,
        "bad": failures,
        "fine": passed,
    }


def any_two(
    commands: Commands, place: Path, names: Sequence[str], random_: random.Random
) -> Iterator[dict[str, object]]:
    """Starts every two different commands on one folder, in both orders, the second while the first is running."""
    reference = {command: contents_alone(command, commands, place) for command in names}
    for first, second in itertools.permutations(names, 2):
        out = place / "pair"
        first_command = commands.start(*argv_of(first, place, out))
        time.sleep(random_.uniform(0, 4))
        second_command = commands.start(*argv_of(second, place, out))
        ends = {name: started.wait() for name, started in ((first, first_command), (second, second_command))}
        succeeded = [name for name, (code, _) in ends.items() if code == 0]
        sentences = [words.rstrip().splitlines()[-1] for code, words in ends.values() if code]
        remaining = contents(out)
        as_alone = bool(succeeded) and reference[succeeded[0]] == remaining
        passed = (
            len(succeeded) == 1 and as_alone and all(any(words in line for words in REFUSALS) for line in sentences)
        )
        yield {"pair": [first, second], "went_on": succeeded, "said": sentences, "as_alone": as_alone, "fine": passed}
        shutil.rmtree(out)


def contents_alone(command: str, commands: Commands, place: Path) -> dict[str, str]:
    """Returns the results of a command that runs alone."""
    out = place / f"{command}-alone"
    commands.run(*argv_of(command, place, out))
    digests = contents(out)
    shutil.rmtree(out)
    return digests


def _stop_in_the_middle(commands: Commands, spec: Path, folder: Path) -> None:
    """Creates a run that is killed while its lanes are trained."""
    for _ in range(5):
        command = commands.start("run", spec, "-o", folder)
        while command.process.is_alive() and not list(folder.glob("batches/0000/attempt-001/state-*")):
            time.sleep(0.002)
        command.kill_after(0)
        if json.loads((folder / "environment.json").read_text())["status"] != "finished":
            return
        shutil.rmtree(folder)
    raise RuntimeError("every run was finished before it could be stopped")


def main() -> int:
    """Prints a line of JSON for every command; returns 1 if one failed, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS, nargs="+", default=COMMANDS)
    parser.add_argument("--pairs", action="store_true", help="every two of them on one folder")
    arguments = parser.parse_args()
    passed = True
    with tempfile.TemporaryDirectory() as folder:
        commands, random_ = Commands(Path(folder)), random.Random(arguments.seed)
        prepare(commands, Path(folder), arguments.only)
        if arguments.pairs:
            for result in any_two(commands, Path(folder), [c for c in arguments.only if c != "resume"], random_):
                print(json.dumps(result | {"seed": arguments.seed}), flush=True)
                passed = passed and bool(result["fine"])
            return 0 if passed else 1
        for command in arguments.only:
            result = at_once(command, commands, Path(folder), arguments.starts, random_)
            print(json.dumps(result | {"seed": arguments.seed}), flush=True)
            passed = passed and bool(result["fine"])
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
