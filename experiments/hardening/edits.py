"""Edits one value in a file of a finished run's folder, and runs commands on it: they must succeed or print a sentence.

    python experiments/hardening/edits.py --edits 120 --seed 5 [--commands fork export replay report]

The run is that of a small language model. A value, a key or a whole JSON file is replaced by another type or removed.
Digests of checkpoints are updated, as an attacker would do. An edit is held off if every command ends within half a
minute with exit code 0, or with 2 and one sentence. Commands run in this process.
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

from commands import update_digests
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


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of the parts of a JSON value, with the first two entries of lists."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from paths_of(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 2)):
            yield from paths_of(value[index], (*path, index))


def with_replacement(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Returns a JSON value with the part at a path replaced or removed."""
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


def run_command(argv: list[str]) -> tuple[Any, str, float]:
    """Runs a command; returns its exit code or error, its output on stderr, and the seconds it took."""

    def raise_timeout(*_: object) -> None:
        raise TimeoutError

    stderr, start = io.StringIO(), time.monotonic()
    signal.signal(signal.SIGALRM, raise_timeout)
    signal.alarm(2 * SECONDS)
    code: Any
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(stderr):
            code = cli.main(argv)
    except (Exception, SystemExit) as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    return code, stderr.getvalue().strip(), time.monotonic() - start


def problem_of(code: Any, output: str, seconds: float) -> str:
    """Returns what is wrong with the end of a command, or "" if nothing is."""
    sentences = [line for line in output.splitlines() if line.startswith("jaxaudit")]
    if code not in (0, 2):
        return f"ended with {code}"
    if "unexpected" in output or "Traceback" in output or "\x1b" in output:
        return "not a sentence"
    if code == 2 and len(sentences) != 1:
        return f"{len(sentences)} sentences"
    return "too slow" if seconds > SECONDS else ""


def main() -> int:
    """Prints the edits that were not held off, and counts of the commands' results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", nargs="+", default=["fork", "export"])
    arguments = parser.parse_args()
    random_, failures, counts = random.Random(arguments.seed), 0, Counter[str]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "text.txt").write_text("a stitch in time saves nine. " * 400)
        spec = LANGUAGE.format(text=root / "text.txt")
        (root / "spec.toml").write_text(spec)
        (root / "fork.toml").write_text(spec[: spec.index("[[perturbation]]")] + FORKED)
        run, edited_run, target = root / "run", root / "edited", root / "new"
        code, output, _ = run_command(["run", str(root / "spec.toml"), "-o", str(run)])
        assert code == 0, output
        files = [path.relative_to(run) for path in run.rglob("*") if path.is_file() and _is_json(path)]
        for number in range(arguments.edits):
            shutil.rmtree(edited_run, ignore_errors=True)
            shutil.copytree(run, edited_run)
            file = random_.choice(files)
            value = json.loads((edited_run / file).read_text())
            path, replacement = random_.choice(list(paths_of(value))), random_.choice(VALUES)
            (edited_run / file).write_text(json.dumps(with_replacement(value, path, replacement)))
            update_digests(edited_run)
            for command in arguments.commands:
                shutil.rmtree(target, ignore_errors=True)
                code, output, seconds = run_command(
                    {
                        "fork": ["fork", str(edited_run), str(root / "fork.toml"), "-o", str(target)],
                        "export": ["export", str(edited_run), "-o", str(target)],
                    }.get(command, [command, str(edited_run)])
                )
                counts[f"{command} {code}"] += 1
                if problem := problem_of(code, output, seconds):
                    failures += 1
                    description = {
                        "edit": number,
                        "command": command,
                        "file": str(file),
                        "path": path,
                        "value": str(replacement),
                    }
                    print(json.dumps(description | {"wrong": problem, "said": output[-300:]}), flush=True)
    print(dict(counts))
    return 1 if failures else 0


def _is_json(path: Path) -> bool:
    if "telemetry.zarr" in path.parts and path.parent.name != "telemetry.zarr":
        return False  # metadata of arrays must agree with those of the store, which are checked first
    try:
        json.loads(path.read_text())
    except ValueError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
