"""Starts a command several times at once on one folder: one goes on, the others leave in one sentence, nothing is lost.

    python experiments/hardening/starts.py --starts 10 --seed 0
    python experiments/hardening/starts.py --pairs --seed 0

Each start comes at an instant drawn uniformly from the time that the command takes by itself. Where one has ended well,
a later one of `margin` finds the search done and ends well, too; of the others all but one must leave with exit code 2.
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
"""What those say that leave."""

REFUSALS = (*SENTENCES, "is not a run's folder", "is not a search", "is there already", "belongs to", "has another")
"""What they say of a folder in which another command is at work, or has been."""


def argv_of(command: str, place: Path, out: Path) -> list[object]:
    """What is started; whatever it needs was made by `prepare`."""
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


def prepare(commands: Commands, place: Path, chosen: Sequence[str]) -> None:
    """Makes the runs and logs that the commands start from."""
    (place / "spec.toml").write_text(SPEC)
    commands.run("run", place / "spec.toml", "-o", place / "whole")
    if "detect" in chosen:
        (place / "many.toml").write_text(SPEC.replace("seeds = 3", "seeds = 60"))
        commands.run("run", place / "many.toml", "-o", place / "many")
    if "export" in chosen:
        (place / "text.txt").write_text("a stitch in time saves nine. " * 400)
        (place / "language.toml").write_text(LANGUAGE.format(text=place / "text.txt"))
        commands.run("run", place / "language.toml", "-o", place / "language")
    if "monitor" in chosen:
        draw = random.Random(1)
        for name in ("new", *(f"clean-{n:02d}" for n in range(12))):
            with (place / f"{name}.csv").open("w", newline="") as file:
                table = csv.writer(file)
                table.writerow(["step", "loss", "reward"])
                table.writerows([step, draw.gauss(0, 1), draw.gauss(0, 1)] for step in range(50))


def at_once(command: str, commands: Commands, place: Path, starts: int, draw: random.Random) -> dict[str, object]:
    """Starts a command so often at once, after it has run alone; what came of it."""
    alone, out = place / f"{command}-alone", place / f"{command}-together"
    if command == "resume":
        stopped = place / "stopped"
        _stop_in_the_middle(commands, place / "spec.toml", stopped)
        for folder in (alone, out):
            shutil.copytree(stopped, folder)
    seconds = commands.run(*argv_of(command, place, alone))
    begun_at, offsets = time.monotonic(), sorted(draw.uniform(0, seconds) for _ in range(starts))
    started = []
    for offset in offsets:
        time.sleep(max(0.0, begun_at + offset - time.monotonic()))
        started.append(commands.start(*argv_of(command, place, out)))
    ends = [one.ended() for one in started]
    went_on = sum(code == 0 for code, _ in ends)
    sentences = [words.rstrip().splitlines()[-1] for code, words in ends if code]
    bad = [words for code, words in ends if code not in (0, 2)]
    bad += [said for said in sentences if not any(known in said for known in SENTENCES)]
    left, right = contents(alone), contents(out)
    different = sorted(name for name in left.keys() | right.keys() if left.get(name) != right.get(name))
    fine = not bad and not different and (went_on == 1 or (command == "margin" and went_on >= 1))
    for folder in (alone, out):
        shutil.rmtree(folder)
    return {"command": command, "starts": starts, "went_on": went_on, "different": different, "bad": bad, "fine": fine}


def any_two(commands: Commands, place: Path, chosen: Sequence[str], draw: random.Random) -> Iterator[dict[str, object]]:
    """Starts every two different commands into one folder, in either order, the second while the first is at work."""
    whole = {command: contents_alone(command, commands, place) for command in chosen}
    for first, second in itertools.permutations(chosen, 2):
        out = place / "pair"
        one = commands.start(*argv_of(first, place, out))
        time.sleep(draw.uniform(0, 4))
        two = commands.start(*argv_of(second, place, out))
        ends = {name: started.ended() for name, started in ((first, one), (second, two))}
        won = [name for name, (code, _) in ends.items() if code == 0]
        said = [words.rstrip().splitlines()[-1] for code, words in ends.values() if code]
        left = contents(out)
        known = bool(won) and whole[won[0]] == left
        fine = len(won) == 1 and known and all(any(words in line for words in REFUSALS) for line in said)
        yield {"pair": [first, second], "went_on": won, "said": said, "as_alone": known, "fine": fine}
        shutil.rmtree(out)


def contents_alone(command: str, commands: Commands, place: Path) -> dict[str, str]:
    """What a command leaves that nothing else is at work beside."""
    out = place / f"{command}-alone"
    commands.run(*argv_of(command, place, out))
    found = contents(out)
    shutil.rmtree(out)
    return found


def _stop_in_the_middle(commands: Commands, spec: Path, folder: Path) -> None:
    """Makes a run that was killed while its lanes were trained."""
    for _ in range(5):
        begun = commands.start("run", spec, "-o", folder)
        while begun.process.is_alive() and not list(folder.glob("batches/0000/attempt-001/state-*")):
            time.sleep(0.002)
        begun.kill_after(0)
        if json.loads((folder / "environment.json").read_text())["status"] != "finished":
            return
        shutil.rmtree(folder)
    raise RuntimeError("every run was finished before it could be stopped")


def main() -> int:
    """Prints a line of JSON for every command; the exit code is 1 if one did not go as it must."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=COMMANDS, nargs="+", default=COMMANDS)
    parser.add_argument("--pairs", action="store_true", help="every two of them, into one folder")
    chosen = parser.parse_args()
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        commands, draw = Commands(Path(folder)), random.Random(chosen.seed)
        prepare(commands, Path(folder), chosen.only)
        if chosen.pairs:
            for result in any_two(commands, Path(folder), [c for c in chosen.only if c != "resume"], draw):
                print(json.dumps(result | {"seed": chosen.seed}), flush=True)
                fine = fine and bool(result["fine"])
            return 0 if fine else 1
        for command in chosen.only:
            result = at_once(command, commands, Path(folder), chosen.starts, draw)
            print(json.dumps(result | {"seed": chosen.seed}), flush=True)
            fine = fine and bool(result["fine"])
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
