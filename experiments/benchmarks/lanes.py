"""Throughput and memory of PPO on HalfCheetah-v5 by the number of lanes, for each execution.

Each point is measured in a separate process. Memory is reported as the compiled program's (arguments, results and
work space of all devices), the growth of the process in a run beyond its size after compilation, and its peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import common

ENV_STEPS = 2048


def main() -> None:
    """Runs the benchmark, or one point of it."""
    options = common.parser(__doc__.splitlines()[0], repetitions=3)
    options.add_argument("--lanes", type=int, nargs="+", default=[8, 16, 32, 64])
    options.add_argument("--execution", nargs="+", default=["vmap", "8", "map"], help="vmap, map, batch size")
    options.add_argument("--steps", type=int, default=3, help="iterations a timing takes (%(default)s)")
    options.add_argument("--point", action="store_true", help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.quick:
        arguments.repetitions, arguments.steps = 1, 1
        arguments.lanes = arguments.lanes if arguments.point else [2, 4]
        arguments.execution = arguments.execution if arguments.point else ["vmap", "1"]
    if arguments.point:
        print(json.dumps(point(arguments)))
        return
    points = [measure(arguments, lanes, e) for e in arguments.execution for lanes in arguments.lanes]
    rows = []
    for p in points:
        rate = common.Timing(tuple(p["seconds"])).rate(p["lanes"] * arguments.steps * p["env_steps"])
        megabytes = [f"{p[key] / p['lanes'] / 2**20:.2f}" for key in ("compiled_bytes", "run_bytes")]
        peak, compiling = f"{p['peak_bytes'] / 2**20:,.0f}", f"{p['compile_seconds']:.0f}"
        rows.append((p["lanes"], p["execution"], rate, *megabytes, peak, compiling))
    header = (
        "lanes",
        "execution",
        "env steps/s: median (lowest - highest)",
        "MiB per lane, compiled program",
        "MiB per lane, process growth in a run",
        "MiB, process peak",
        "compile s",
    )
    common.prepare_jax(arguments.devices)
    common.finish(arguments, common.table(header, rows), {"points": points})


def measure(arguments, lanes: int, execution: str) -> dict:
    """Measures one point in a separate process."""
    command = [
        sys.executable,
        str(Path(__file__)),
        "--point",
        "--lanes",
        str(lanes),
        "--execution",
        execution,
    ]
    for name in ("repetitions", "steps", "devices"):
        command += [f"--{name}", str(getattr(arguments, name))]
    process = subprocess.run(command + ["--quick"] * arguments.quick, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{lanes} lanes, {execution}: done", file=sys.stderr, flush=True)
    return json.loads(process.stdout.splitlines()[-1])


def point(arguments) -> dict:
    """Measures one point in this process."""
    common.prepare_jax(arguments.devices)
    import jaxaudit as ja

    lanes, execution = arguments.lanes[0], arguments.execution[0]
    execution = int(execution) if execution.isdigit() else execution
    small = {"num_envs": 2, "rollout_length": 64} if arguments.quick else {}
    learner = ja.learners.ppo(common.TASK, evaluations=0, **small)
    point = common.Lanes(learner, lanes, arguments.steps, execution=execution)
    point.wait()
    unit = 1 if sys.platform == "darwin" else 1024
    compiling = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    before = forget_peak()
    point.train()
    timing = common.interleave({"train": lambda: point.train() and None}, arguments.repetitions)["train"]
    peak = max(compiling, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
    return {
        "lanes": lanes,
        "execution": str(execution),
        "env_steps": learner.samples_per_step,
        "seconds": list(timing.seconds),
        "compile_seconds": point.compile_seconds,
        "compiled_bytes": point.planned_bytes,
        "run_bytes": max(0, status("VmHWM") - before) if before else float("nan"),
        "peak_bytes": peak,
    }


def forget_peak() -> int:
    """Resets the peak VmHWM and returns the resident bytes, or 0 if the system has no such counters."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return status("VmRSS")
    except OSError:
        return 0


def status(field: str) -> int:
    """Returns a size of this process in bytes, from its /proc status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
