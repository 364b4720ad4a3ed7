"""Edits one value in a file of a finished run's folder, and has commands read it: a sentence, or what they always do.

    python experiments/hardening/edits.py --edits 120 --seed 5 [--commands fork export replay report]

The run is of a small language model. A value, a key or a whole file of JSON is replaced by one of another type, or
removed; digests of checkpoints are made to fit, as somebody would who wants the edit read. An edit is held if every
command ends within half a minute with exit code 0, or with 2 and one sentence. Commands run in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from commands import sealed
from starts import LANGUAGE

from jaxaudit.cli import main as cli

SECONDS = 30

REMOVED = object()
VALUES = (None, True, -1, 0, 3, 10**12, 1e308, "", "x", "/etc/passwd", "../../x", [], [1], {}, {"a": 1}, [[0, 1]])
VALUES += ([None], float("nan"), "\u001b[31m", REMOVED, REMOVED, REMOVED)

FORKED = """
[[perturbation]]
kind = "weight_noise"
magnitude = 0.1
onset = 6
"""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of a JSON value's parts; of a list the first two."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from places(value[index], (*path, index))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A JSON value with another part at a path, or without it."""
    if not path:
        return None if new is REMOVED else new
    value = copy.deepcopy(value)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    if new is REMOVED:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return value


def ended(argv: list[str]) -> tuple[Any, str, float]:
    """A command's exit code or error, what it said on stderr, and the seconds it took."""

    def late(*_: object) -> None:
        raise TimeoutError

    said, begun = io.StringIO(), time.monotonic()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(2 * SECONDS)
    code: Any
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = cli.main(argv)
    except (Exception, SystemExit) as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return code, said.getvalue().strip(), time.monotonic() - begun


def harm(code: Any, said: str, seconds: float) -> str:
    """What is wrong with how a command ended; empty if nothing is."""
    sentences = [line for line in said.splitlines() if line.startswith("jaxaudit")]
    if code not in (0, 2):
        return f"ended with {code}"
    if "unexpected" in said or "Traceback" in said or "\x1b" in said:
        return "not a sentence"
    if code == 2 and len(sentences) != 1:
        return f"{len(sentences)} sentences"
    return "too slow" if seconds > SECONDS else ""


def main() -> int:
    """Prints what was not held, and how often each command ended how."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="+", default=["fork", "export"])
    asked = parser.parse_args()
    draw, bad, ends = random.Random(asked.seed), 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "text.txt").write_text("a stitch in time saves nine. " * 400)
        spec = LANGUAGE.format(text=root / "text.txt")
        (root / "spec.toml").write_text(spec)
        (root / "fork.toml").write_text(spec[: spec.index("[[perturbation]]")] + FORKED)
        run, edited, new = root / "run", root / "edited", root / "new"
        code, said, _ = ended(["run", str(root / "spec.toml"), "-o", str(run)])
        assert code == 0, said
        files = [path.relative_to(run) for path in run.rglob("*") if path.is_file() and _is_json(path)]
        for number in range(asked.edits):
            shutil.rmtree(edited, ignore_errors=True)
            shutil.copytree(run, edited)
            file = draw.choice(files)
            value = json.loads((edited / file).read_text())
            path, change = draw.choice(list(places(value))), draw.choice(VALUES)
            (edited / file).write_text(json.dumps(replaced(value, path, change)))
            sealed(edited)
            for command in asked.commands:
                shutil.rmtree(new, ignore_errors=True)
                code, said, seconds = ended(
                    {
                        "fork": ["fork", str(edited), str(root / "fork.toml"), "-o", str(new)],
                        "export": ["export", str(edited), "-o", str(new)],
                    }.get(command, [command, str(edited)])
                )
                ends[f"{command} {code}"] += 1
                if wrong := harm(code, said, seconds):
                    bad += 1
                    told = {"edit": number, "command": command, "file": str(file), "path": path, "value": str(change)}
                    print(json.dumps(told | {"wrong": wrong, "said": said[-300:]}), flush=True)
    print(dict(ends))
    return 1 if bad else 0


def _is_json(path: Path) -> bool:
    if "telemetry.zarr" in path.parts and path.parent.name != "telemetry.zarr":
        return False  # the metadata of every array must be as the store's are, which is checked first
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
