"""Measures runs of one plan by one worker and by two, with a core each, and compares them with the simulator.

    python measure.py plan OUT             # runs spec.toml once, which gives the common plan and compiled programs
    python measure.py run OUT 1; python measure.py run OUT 2     # repeat in turns; two minutes each at most
    python measure.py run OUT 1 --kill 42  # kills the worker 42 seconds after the start of the first batch
    python measure.py compare OUT          # predicted and measured times; OUT or experiments/scaling/results

OUT gets `plan.json` and `spec.toml`, the times of the batches of every run in `shards.csv`, and in `runs.csv` the time
of the command and the share of the cores' time that other processes used. Runs with a killed worker have separate
files, `shards-killed.csv` and `runs-killed.csv`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
from recorded import span, start_seconds, work_of
from schedule import Cluster, bounds
from simulate import POLL, simulate

SPEC = Path(__file__).with_name("spec.toml")

RULE = "| --- " * 5 + "|"

GONE_SECONDS = 1.5
"""Seconds until the driver considers an ended process as lost: a second of waiting, and the polling interval."""


def main() -> None:
    """Runs one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("plan", "run", "compare"))
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("workers", type=int, nargs="?", default=1)
    parser.add_argument("--kill", type=float, metavar="S")
    arguments = parser.parse_args()
    if arguments.command == "plan":
        plan(arguments.out)
    elif arguments.command == "run":
        run(arguments.out, arguments.workers, arguments.kill)
    else:
        print(compare(arguments.out))


def plan(out: Path) -> None:
    """Runs the spec by one worker, and stores its plan."""
    out.mkdir(parents=True, exist_ok=True)
    _train(out / "planned", 1)
    shutil.copyfile(out / "planned" / "plan.json", out / "plan.json")
    shutil.copyfile(SPEC, out / "spec.toml")


def run(out: Path, workers: int, kill: float | None = None) -> None:
    """Runs the same plan by a number of workers, and stores the times of its batches."""
    _adopt_descendants()
    kind = "" if kill is None else "-killed"
    runs = out / f"runs{kind}.csv"
    repetition = int((pd.read_csv(runs)["workers"] == workers).sum()) if runs.exists() else 0
    with tempfile.TemporaryDirectory(dir=out) as temporary:
        folder = Path(temporary) / "run"
        if kill is not None:
            threading.Thread(target=_kill_one, args=(folder, kill), daemon=True).start()
        start, busy_before = time.monotonic(), _busy_seconds()
        _train(folder, workers, "--plan", str(out / "planned"))
        seconds = time.monotonic() - start
        with suppress(ChildProcessError):
            while True:
                os.wait()
        others = _busy_seconds() - busy_before - _own_seconds()
        shards = pd.read_csv(folder / "shards.csv")
    row = {
        "workers": workers,
        "repetition": repetition,
        "command_seconds": round(seconds, 1),
        "others": round(others / seconds / os.cpu_count(), 3),
    }
    _append(runs, pd.DataFrame([row | ({} if kill is None else {"killed_after": kill})]))
    _append(out / f"shards{kind}.csv", shards.assign(workers=workers, repetition=repetition))


def _kill_one(folder: Path, after: float) -> None:
    """Kills the running worker some seconds after the start of the first batch."""
    while not (started := list(folder.glob("batches/*/attempt-*/begun.json"))):
        time.sleep(0.1)
    first = json.loads(started[0].read_text())["begun"]
    time.sleep(max(0.0, first + after - time.time()))
    attempts = [path for path in folder.glob("batches/*/attempt-*") if not (path / "ended.json").exists()]
    worker = json.loads((attempts[0] / "begun.json").read_text())["worker"]
    os.kill(int(worker.rpartition(":")[2]), signal.SIGKILL)


def _train(folder: Path, workers: int, *options: str) -> None:
    command = [sys.executable, "-m", "jaxaudit.cli.main", "run", str(SPEC), "-o", str(folder), *options]
    subprocess.run([*command, "--on", "local", "--workers", str(workers), "--cpus", "1"], check=True)


def _adopt_descendants() -> None:
    """Makes all descendants count as children of this process (Linux's PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1)


def _own_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _busy_seconds() -> float:
    """Returns the busy seconds of all cores since the machine was started."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _append(path: Path, rows: pd.DataFrame) -> None:
    rows.to_csv(path, mode="a", header=not path.exists(), index=False)


def compare(out: Path) -> str:
    """Returns tables of predictions of each run from the times of its batches, and of two workers from those of one."""
    runs = pd.read_csv(out / "runs.csv")
    shards = dict(list(pd.read_csv(out / "shards.csv").groupby(["workers", "repetition"])))
    lines = ["| workers | others' share | measured | simulated, of its own batches' times | difference |", RULE]
    for run in runs.itertuples():
        rows = shards[run.workers, run.repetition]
        measured, predicted = span(rows), _predicted(out, rows, run.workers, run.workers)
        cells = (run.workers, f"{run.others:.0%}", f"{measured:.1f} s", f"{predicted:.1f} s")
        lines.append(f"| {' | '.join(map(str, cells))} | {predicted / measured - 1:+.1%} |")
    lines += [
        "",
        "| two workers, from one's times | measured | simulated | difference | a batch, by two / by one |",
        RULE,
    ]
    errors = []
    for repetition in sorted(runs["repetition"].unique()):
        one, two = shards[1, repetition], shards[2, repetition]
        measured, predicted = span(two), _predicted(out, one, 1, 2)
        errors.append(predicted / measured - 1)
        slower = (_seconds(two) / _seconds(one)).median()
        cells = (repetition + 1, f"{measured:.1f} s", f"{predicted:.1f} s", f"{errors[-1]:+.1%}", f"{slower:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"median difference: {statistics.median(errors):+.1%}"]
    halves, path = bounds(work_of(out, one), Cluster(2, start_seconds(one, 1, POLL)))
    lines += [f"all work / 2: {halves:.1f} s; longest path: {path:.1f} s"]
    return "\n".join([*lines, "", *_killed(out)])


def _killed(out: Path) -> list[str]:
    """Returns a table of the runs whose worker was killed, simulated with that loss and the times of their batches."""
    runs, rows = pd.read_csv(out / "runs-killed.csv"), pd.read_csv(out / "shards-killed.csv")
    lines = ["| killed after | batch, went on from step | measured | simulated | difference |", RULE]
    for run in runs.itertuples():
        shards = rows[rows["repetition"] == run.repetition]
        lost, second = shards[shards["outcome"] == "lost"].iloc[0], shards[shards["attempt"] == 2].iloc[0]
        measured, predicted = span(shards), _predicted(out, shards, 1, 1, run.killed_after)
        where = f"{lost['batch']}, {second['from_step']}"
        cells = (f"{run.killed_after:.0f} s", where, f"{measured:.1f} s", f"{predicted:.1f} s")
        lines.append(f"| {' | '.join(cells)} | {predicted / measured - 1:+.1%} |")
    return lines


def _predicted(out: Path, shards: pd.DataFrame, recorded: int, workers: int, killed: float | None = None) -> float:
    """Returns the predicted seconds from the first start to the last end, from times recorded with `recorded` workers.

    With `killed`, the first worker is lost this many seconds after the start of the first batch, and replaced at once.
    """
    start = start_seconds(shards, recorded, POLL)
    losses = {} if killed is None else {0: [start + killed]}
    return simulate(work_of(out, shards), Cluster(workers, start, detect=GONE_SECONDS, losses=losses)).span


def _seconds(shards: pd.DataFrame) -> pd.Series:
    return (shards["ended"] - shards["begun"]).set_axis(shards["batch"])


if __name__ == "__main__":
    main()
