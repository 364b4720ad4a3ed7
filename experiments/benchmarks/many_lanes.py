"""Thousands of lanes of a learner that costs nothing: where a run's time, memory and disk go.

    python many_lanes.py [--before FOLDER]

`jaxaudit run` of the quadratic learner of the tests, 400 steps, and its report, each time in a process of its own. With
`--before`, a folder of another checkout of this repository in which `jaxaudit` can be imported, the two take turns.

Every second belongs to one phase. Planning: from the spec to the stored plan, and what each lane does as arrays.
Compiling: XLA, waited for. Training. Storing: states, rows, telemetry. Metrics: derived channels and tables. Report.
What is left is told as other. Imports are not timed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[2]

GRIDS = {
    "20x100": (20, 4, 8, 3),
    "200x10": (200, 2, 2, 2),
    "8x250": (8, 10, 8, 3),
    "1x2000": (1, 8, 83, 3),
    "1000x2": (1000, 1, 1, 1),
}
"""Seeds, onsets, magnitudes of every kind, kinds: conditions are onsets x (kinds x magnitudes + the control)."""

KINDS = ("lr_spike", "weight_noise", "gradient_scale")

PHASES = ("planning", "compiling", "training", "storing", "metrics", "report", "other")

SPEC = """
[audit]
name = "many lanes"
seeds = {seeds}
steps = {steps}
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "quadratic"
[metrics]
window = 20
hold = 40
horizon = 100
"""

ENTRY = """[[perturbation]]
kind = "{kind}"
magnitude = {magnitudes}
onset = {onsets}
duration = {duration}
"""


def main() -> None:
    """Runs the benchmark, or one run of it."""
    options = common.parser(__doc__.splitlines()[0], repetitions=3)
    options.add_argument("--before", type=Path, metavar="FOLDER", help="another checkout, measured in turns with this")
    options.add_argument("--grids", nargs="+", choices=GRIDS, default=list(GRIDS)[:3], help="seeds x conditions")
    options.add_argument("--steps", type=int, default=400)
    options.add_argument("--keep", type=Path, metavar="DIR", help="runs into this folder, and leaves them there")
    options.add_argument("--one", choices=GRIDS, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.steps, arguments.grids = 1, 60, arguments.grids[:1]
    if arguments.one:
        print(json.dumps(one(arguments)))
        return
    versions = {"before": arguments.before.resolve()} if arguments.before else {}
    versions["now"] = ROOT
    found = {grid: {name: [] for name in versions} for grid in arguments.grids}
    for repetition in range(arguments.repetitions):
        for grid in arguments.grids:
            for name in versions if repetition % 2 == 0 else reversed(versions):
                found[grid][name].append(apart(arguments, grid, name, versions[name]))
    common.prepare_jax(arguments.devices)
    common.finish(arguments, table(found), {"runs": found})


def table(found: dict[str, dict[str, list[dict]]]) -> str:
    """A row for every grid and version: medians over the repetitions."""
    rows = []
    for grid, versions in found.items():
        for name, runs in versions.items():
            seconds = [common.Timing(tuple(run["seconds"][phase] for run in runs)).median for phase in PHASES]
            whole = common.Timing(tuple(sum(run["seconds"].values()) for run in runs))
            last = runs[-1]
            rows.append(
                (
                    f"{grid}, {name}",
                    *(f"{s:.2f}" for s in seconds),
                    f"{whole.median:.1f} ({min(whole.seconds):.1f} - {max(whole.seconds):.1f})",
                    *(f"{max(run[name] for run in runs) / 2**20:,.0f}" for name in ("run_peak_bytes", "peak_bytes")),
                    f"{last['bytes'] / 2**20:.1f}",
                    f"{last['telemetry_bytes'] / 2**20:.1f}",
                    f"{last['files']:,}",
                )
            )
    header = ("seeds x conditions", *(f"{phase}, s" for phase in PHASES), "all, s: median (lowest - highest)")
    return common.table(
        (*header, "peak of the run, MiB", "with its report", "disk, MiB", "of it telemetry", "files"), rows
    )


def apart(arguments: argparse.Namespace, grid: str, name: str, checkout: Path) -> dict[str, Any]:
    """One run, in a process of its own, by a checkout's package."""
    command = [sys.executable, __file__, "--one", grid, "--steps", str(arguments.steps)]
    command += ["--devices", str(arguments.devices)]
    if arguments.keep:
        command += ["--keep", str(arguments.keep / name)]
    path = os.pathsep.join(str(folder) for folder in (checkout, ROOT / "tests" / "helpers"))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{grid}, {name}: done", file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1])


class Clock:
    """Attributes every second to the phase of the innermost watched function that runs."""

    def __init__(self, phase: str):
        self.seconds: dict[str, float] = defaultdict(float)
        self._phases = [phase]
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """A phase within the one that was."""
        self._tick()
        self._phases.append(phase)

    def leave(self) -> None:
        """Back to the one that was."""
        self._tick()
        self._phases.pop()

    def become(self, phase: str) -> None:
        """The outermost one from now on."""
        self._tick()
        self._phases[0] = phase

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Every call of a function of a module or class is of a phase; nothing where there is no such function."""
        if function := getattr(owner, name, None):
            setattr(owner, name, self._watched(function, phase))

    def _watched(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.enter(phase)
            try:
                return function(*arguments, **named)
            finally:
                self.leave()

        return call

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds[self._phases[-1]] += now - self._since
        self._since = now


def one(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run, in this process."""
    common.prepare_jax(arguments.devices)
    import jax
    import quadratic  # noqa: F401  registers the learner

    from jaxaudit import report
    from jaxaudit.core.batches import Batch
    from jaxaudit.execution.engine import Engine
    from jaxaudit.runs import disk_sink as trained
    from jaxaudit.runs import lifecycle as durable
    from jaxaudit.runs import local_trainer as here
    from jaxaudit.runs.collect import GatheredBatches
    from jaxaudit.spec import document

    jax.devices()
    seeds, onsets, magnitudes, kinds = GRIDS[arguments.one]
    with tempfile.TemporaryDirectory() as place:
        folder = (arguments.keep or Path(place)) / arguments.one
        text = spec_of(arguments.steps, seeds, onsets, magnitudes, KINDS[:kinds])
        (Path(place) / "spec.toml").write_text(text)
        document.load(Path(place) / "spec.toml")  # imports what it names
        clock = Clock("planning")
        for owner, name, phase in (
            (Engine, "compile", "compiling"),
            (Engine, "_timed", "compiling"),
            (Engine, "advance", "training"),
            (Engine, "begin", "training"),
            (Batch, "lanes", "planning"),
            *((here._LeaderSink, name, "storing") for name in ("restored", "rows", "reached")),
            *((trained.FolderSink, name, "storing") for name in ("end", "source")),
            (trained, "_load_onset", "storing"),
            (GatheredBatches, "__init__", "storing"),
            (GatheredBatches, "accept", "storing"),
            (durable, "write_results", "metrics"),
            (report, "build", "report"),
        ):
            clock.watch(owner, name, phase)
        go_on = durable._train_here
        durable._train_here = lambda *given: (clock.become("other"), go_on(*given))
        durable.run(document.load(Path(place) / "spec.toml"), folder)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        report.build(folder)
        clock.become("other")
        return {
            "seconds": {phase: clock.seconds[phase] for phase in PHASES},
            "run_peak_bytes": peak,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "files": sum(path.is_file() for path in folder.rglob("*")),
            "bytes": size(folder),
            "telemetry_bytes": size(folder / "telemetry.zarr"),
            "report_bytes": (folder / "report.html").stat().st_size,
        }


def spec_of(steps: int, seeds: int, onsets: int, magnitudes: int, kinds: tuple[str, ...]) -> str:
    """A spec; onsets lie evenly between a quarter and three quarters of the run."""
    at = [round(steps * (0.25 + 0.5 * i / max(1, onsets - 1))) for i in range(onsets)]
    swept = [round(0.05 * 16 ** (i / max(1, magnitudes - 1)), 5) for i in range(magnitudes)]
    entries = [
        ENTRY.format(kind=kind, magnitudes=swept, onsets=at, duration='"once"' if kind == "weight_noise" else 5)
        for kind in kinds
    ]
    return SPEC.format(seeds=seeds, steps=steps) + "".join(entries)


def size(folder: Path) -> int:
    """Bytes that a folder takes on the disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
