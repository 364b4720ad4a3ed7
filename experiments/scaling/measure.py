"""Real runs of one plan by one worker and by two, a core each, and what the simulator predicts of them.

    python measure.py plan OUT             # runs spec.toml once: the plan that the others take, programs compiled
    python measure.py run OUT 1; python measure.py run OUT 2     # and again, in turns; two minutes each at most
    python measure.py run OUT 1 --kill 42  # the worker is killed so many seconds after the first batch was begun
    python measure.py compare OUT          # predicted against measured; OUT or experiments/scaling/results

OUT gets `plan.json` and `spec.toml`, and of every run what its batches took, `shards.csv`, and in `runs.csv` what the
command took and how busy others kept the machine meanwhile: a share of its cores' time. Runs with a worker killed have
files of their own, `shards-killed.csv` and `runs-killed.csv`.
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
"""Until the driver takes a process that is gone for lost: a second for its word, and looks that are apart."""


def main() -> None:
    """One of the commands."""
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
    """Runs the spec by one worker, and keeps its plan."""
    out.mkdir(parents=True, exist_ok=True)
    _train(out / "planned", 1)
    shutil.copyfile(out / "planned" / "plan.json", out / "plan.json")
    shutil.copyfile(SPEC, out / "spec.toml")


def run(out: Path, workers: int, kill: float | None = None) -> None:
    """Runs the same plan by so many workers, and keeps what its batches took."""
    _adopt_descendants()
    kind = "" if kill is None else "-killed"
    runs = out / f"runs{kind}.csv"
    repetition = int((pd.read_csv(runs)["workers"] == workers).sum()) if runs.exists() else 0
    with tempfile.TemporaryDirectory(dir=out) as made:
        folder = Path(made) / "run"
        if kill is not None:
            threading.Thread(target=_kill_one, args=(folder, kill), daemon=True).start()
        begun, busy = time.monotonic(), _busy_seconds()
        _train(folder, workers, "--plan", str(out / "planned"))
        seconds = time.monotonic() - begun
        with suppress(ChildProcessError):
            while True:
                os.wait()
        others = _busy_seconds() - busy - _own_seconds()
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
    """Kills the worker that is at work some seconds after the first batch was begun."""
    while not (begun := list(folder.glob("batches/*/attempt-*/begun.json"))):
        time.sleep(0.1)
    first = json.loads(begun[0].read_text())["begun"]
    time.sleep(max(0.0, first + after - time.time()))
    attempts = [path for path in folder.glob("batches/*/attempt-*") if not (path / "ended.json").exists()]
    worker = json.loads((attempts[0] / "begun.json").read_text())["worker"]
    os.kill(int(worker.rpartition(":")[2]), signal.SIGKILL)


def _train(folder: Path, workers: int, *options: str) -> None:
    command = [sys.executable, "-m", "jaxaudit.cli.main", "run", str(SPEC), "-o", str(folder), *options]
    subprocess.run([*command, "--on", "local", "--workers", str(workers), "--cpus", "1"], check=True)


def _adopt_descendants() -> None:
    """What workers take counts as this process's children's, whoever began them (Linux's PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1)


def _own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _busy_seconds() -> float:
    """Of all cores, since the machine began."""
    user, nice, system, _, _, interrupts, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _append(path: Path, rows: pd.DataFrame) -> None:
    rows.to_csv(path, mode="a", header=not path.exists(), index=False)


def compare(out: Path) -> str:
    """Tables: what the simulator predicts of every run from its own batches' times, and of two workers from one's."""
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
    """A table of the runs whose one worker was killed, simulated with that loss and the times of their own batches."""
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
    """Seconds from the first beginning to the last end, of batches as `recorded` workers took them.

    `killed`: the first worker is lost so many seconds after the first batch was begun, and there again at once.
    """
    start = start_seconds(shards, recorded, POLL)
    losses = {} if killed is None else {0: [start + killed]}
    return simulate(work_of(out, shards), Cluster(workers, start, detect=GONE_SECONDS, losses=losses)).span


def _seconds(shards: pd.DataFrame) -> pd.Series:
    return (shards["ended"] - shards["begun"]).set_axis(shards["batch"])


if __name__ == "__main__":
    main()
