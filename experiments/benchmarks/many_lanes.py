"""Thousands of lanes of a learner without cost: time, memory and disk space of a run, by phase.

    python many_lanes.py [--before FOLDER]

Each measurement is `jaxaudit run` of the quadratic learner of the tests for 400 steps, and its report, in a separate
process. With `--before`, the folder of another checkout in which `jaxaudit` can be imported, the two take turns.

Every second is attributed to one phase. Planning is from the spec to the stored plan, with the lanes' disturbances as
arrays; compiling is waiting for XLA; storing is of states, rows and telemetry; metrics are derived channels and tables.
The remaining time is reported as other. Imports are not timed.
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
"""Seeds, onsets, magnitudes of each kind, kinds. Conditions are onsets x (kinds x magnitudes + the control)."""

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
    options.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in this folder")
    options.add_argument("--one", choices=GRIDS, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.steps, arguments.grids = 1, 60, arguments.grids[:1]
    if arguments.one:
        print(json.dumps(measure_here(arguments)))
        return
    versions = {"before": arguments.before.resolve()} if arguments.before else {}
    versions["now"] = ROOT
    results = {grid: {name: [] for name in versions} for grid in arguments.grids}
    for repetition in range(arguments.repetitions):
        for grid in arguments.grids:
            for name in versions if repetition % 2 == 0 else reversed(versions):
                results[grid][name].append(measure_apart(arguments, grid, name, versions[name]))
    common.prepare_jax(arguments.devices)
    common.finish(arguments, table(results), {"runs": results})


def table(results: dict[str, dict[str, list[dict]]]) -> str:
    """Returns a table with medians over repetitions, one row for each grid and version."""
    rows = []
    for grid, versions in results.items():
        for name, runs in versions.items():
            seconds = [common.Timing(tuple(run["seconds"][phase] for run in runs)).median for phase in PHASES]
            total = common.Timing(tuple(sum(run["seconds"].values()) for run in runs))
            latest = runs[-1]
            rows.append(
                (
                    f"{grid}, {name}",
                    *(f"{s:.2f}" for s in seconds),
                    f"{total.median:.1f} ({min(total.seconds):.1f} - {max(total.seconds):.1f})",
                    *(f"{max(run[name] for run in runs) / 2**20:,.0f}" for name in ("run_peak_bytes", "peak_bytes")),
                    f"{latest['bytes'] / 2**20:.1f}",
                    f"{latest['telemetry_bytes'] / 2**20:.1f}",
                    f"{latest['files']:,}",
                )
            )
    header = ("seeds x conditions", *(f"{phase}, s" for phase in PHASES), "all, s: median (lowest - highest)")
    return common.table(
        (*header, "peak of the run, MiB", "with its report", "disk, MiB", "of it telemetry", "files"), rows
    )


def measure_apart(arguments: argparse.Namespace, grid: str, name: str, checkout: Path) -> dict[str, Any]:
    """Measures one run of a checkout's package in a separate process."""
    command = [sys.executable, __file__, "--one", grid, "--steps", str(arguments.steps)]
    command += ["--devices", str(arguments.devices)]
    if arguments.keep:
        command += ["--keep", str(arguments.keep / name)]
    path = os.pathsep.join(str(folder) for folder in (checkout, ROOT / "tests" / "helpers"))
    process = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, check=True
    )
    print(f"{grid}, {name}: done", file=sys.stderr, flush=True)
    return json.loads(process.stdout.splitlines()[-1])


class Clock:
    """Attributes every second to the phase of the innermost watched function."""

    def __init__(self, phase: str):
        self.seconds: dict[str, float] = defaultdict(float)
        self._phases = [phase]
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Enters a nested phase."""
        self._tick()
        self._phases.append(phase)

    def leave(self) -> None:
        """Returns to the enclosing phase."""
        self._tick()
        self._phases.pop()

    def become(self, phase: str) -> None:
        """Changes the outermost phase."""
        self._tick()
        self._phases[0] = phase

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Attributes calls of a function of a module or class to a phase, if there is such a function."""
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


def measure_here(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures one run in this process."""
    common.prepare_jax(arguments.devices)
    import jax
    import quadratic  # noqa: F401  registers the learner

    from jaxaudit import report
    from jaxaudit.core.batches import Batch
    from jaxaudit.execution.engine import Engine
    from jaxaudit.runs import disk_sink, lifecycle, local_trainer
    from jaxaudit.runs.collect import GatheredBatches
    from jaxaudit.spec import document

    jax.devices()
    seeds, onsets, magnitudes, kinds = GRIDS[arguments.one]
    with tempfile.TemporaryDirectory() as workspace:
        folder = (arguments.keep or Path(workspace)) / arguments.one
        text = spec_of(arguments.steps, seeds, onsets, magnitudes, KINDS[:kinds])
        (Path(workspace) / "spec.toml").write_text(text)
        document.load(Path(workspace) / "spec.toml")  # imports the modules of the learner and the task
        clock = Clock("planning")
        for owner, name, phase in (
            (Engine, "compile", "compiling"),
            (Engine, "_timed", "compiling"),
            (Engine, "advance", "training"),
            (Engine, "begin", "training"),
            (Batch, "lanes", "planning"),
            *((local_trainer._LeaderSink, name, "storing") for name in ("restored", "rows", "reached")),
            *((disk_sink.FolderSink, name, "storing") for name in ("end", "source")),
            (disk_sink, "_load_onset", "storing"),
            (GatheredBatches, "__init__", "storing"),
            (GatheredBatches, "accept", "storing"),
            (lifecycle, "write_results", "metrics"),
            (report, "build", "report"),
        ):
            clock.watch(owner, name, phase)
        train_here = lifecycle._train_here
        lifecycle._train_here = lambda *arguments_: (clock.become("other"), train_here(*arguments_))
        lifecycle.run(document.load(Path(workspace) / "spec.toml"), folder)
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
    """Returns a spec whose onsets are spaced evenly between a quarter and three quarters of the run."""
    onset_steps = [round(steps * (0.25 + 0.5 * i / max(1, onsets - 1))) for i in range(onsets)]
    sweep = [round(0.05 * 16 ** (i / max(1, magnitudes - 1)), 5) for i in range(magnitudes)]
    entries = [
        ENTRY.format(
            kind=kind, magnitudes=sweep, onsets=onset_steps, duration='"once"' if kind == "weight_noise" else 5
        )
        for kind in kinds
    ]
    return SPEC.format(seeds=seeds, steps=steps) + "".join(entries)


def size(folder: Path) -> int:
    """Returns the bytes of a folder on disk."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    main()
