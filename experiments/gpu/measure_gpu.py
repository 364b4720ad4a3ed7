"""Starts the parts of the measurement, assigns turns on the device, stops late parts, and prints the table.

    python measure_gpu.py OUT                    # all of PARTS
    python measure_gpu.py OUT --tiny             # the rehearsal: the same code at tiny sizes, on a CPU
    python measure_gpu.py OUT --only grpo trl    # some parts

Parts run in waves, one after another. In a wave, a few parts at a time compile, so few that they do not disturb the
part that measures. Each says "ready" when it has compiled, and then gets the device exclusively.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from table import markdown

HERE = Path(__file__).resolve().parent
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
EXPANDER = f"{DETERMINISTIC} --xla_gpu_enable_scatter_determinism_expander=true"
UNTUNED = "--xla_gpu_autotune_level=0"  # autotuning does not speed up small products and takes minutes
GRAPHS = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
HIGHEST = {
    "JAX_DEFAULT_MATMUL_PRECISION": "highest"
}  # for parts that are no audit; audits compute products in float32 anyway
TF32 = {"JAX_DEFAULT_MATMUL_PRECISION": "tensorfloat32"}
ON_CORES = {"JAX_PLATFORMS": "cpu"}
MOST_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85"}

Kind = Literal["device", "cores", "check", "audit"]


@dataclass(frozen=True)
class Planned:
    """A part of the measurement.

    Attributes:
      name: the name under which its results are stored.
      call: its script, its function, and the arguments of the function.
      kind: "device" has the device exclusively in its turn; "cores" also needs the CPUs, and waits until nothing
        compiles; "check" needs no turn; "audit" shares the device with other audits.
      ready: seconds from its start within which it must request its turn, or end if it is a check.
      turn: the maximal seconds of its turn.
      flags: XLA's flags.
      environment: additional environment variables.
      wave: 1 timings, 2 checks, 3 audits, 4 the same with other flags.
      rehearsed: whether it belongs to a rehearsal; parts that differ from others only in flags do not.
    """

    name: str
    call: str
    kind: Kind
    ready: float
    turn: float = 0.0
    flags: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    wave: int = 1
    rehearsed: bool = True


# Ordered by value, since the last parts are skipped if time runs out. Deterministic operations, which `jaxaudit run`
# requests, are off unless the flags of a part set them.
PARTS = [
    Planned("facts", "speed facts", "device", 120, 30),
    Planned("grpo", "speed grpo micro 8 1024", "device", 300, 60, UNTUNED),
    Planned("torch_gpt2", "baselines torch_gpt2", "cores", 150, 100),  # its kernels are launched one by one from a core
    Planned("trl", "baselines trl", "cores", 150, 60),
    Planned("gpt2", "speed gpt2 bfloat16 1 4", "device", 240, 40, environment=MOST_MEMORY),
    Planned("gpt2_cudnn", "speed gpt2 bfloat16-cudnn 1 4", "device", 240, 40, "", MOST_MEMORY, rehearsed=False),
    Planned("gpt2_deterministic", "speed gpt2 bfloat16 1", "device", 240, 30, DETERMINISTIC, MOST_MEMORY, 1, False),
    Planned(
        "gpt2_cudnn_deterministic",
        "speed gpt2 bfloat16-cudnn 1",
        "device",
        240,
        30,
        DETERMINISTIC,
        MOST_MEMORY,
        1,
        False,
    ),
    Planned("grpo_deterministic", "speed grpo micro 8 1024", "device", 300, 60, DETERMINISTIC, rehearsed=False),
    Planned("ppo", "speed ppo 8 64 1024", "device", 300, 60, UNTUNED),
    Planned("quadratic", "speed quadratic", "device", 120, 20),
    Planned("ppo_wide", "speed ppo 2048 1 16", "device", 300, 50, UNTUNED, rehearsed=False),
    Planned("grpo_tf32", "speed grpo micro 1024", "device", 300, 30, UNTUNED, TF32, rehearsed=False),
    Planned("cpu_ppo", "baselines cpu_ppo", "cores", 200, 40, environment=ON_CORES),
    Planned("sb3", "baselines sb3", "cores", 100, 50),
    Planned("bits", "checks bits", "check", 300, flags=DETERMINISTIC, wave=2),
    Planned("bits_again", "checks bits", "check", 300, flags=DETERMINISTIC, wave=2, rehearsed=False),
    Planned("bits_cudnn", "checks bits gpt2-cudnn", "check", 200, flags=DETERMINISTIC, wave=2, rehearsed=False),
    Planned("attention", "checks attention", "check", 120, wave=2),
    Planned("parity", "checks parity", "check", 300, flags=DETERMINISTIC, environment=HIGHEST, wave=2),
    Planned("folder", "checks folder", "check", 360, wave=2),
    Planned("transformers", "checks transformers", "check", 200, environment=HIGHEST, wave=2),
    Planned("physics", "checks physics HalfCheetah-v5 InvertedPendulum-v5", "check", 240, environment=HIGHEST, wave=2),
    Planned("halfcheetah", "audits audit halfcheetah", "audit", 60, 400, wave=3),
    Planned("gpt2_audit", "audits audit gpt2", "audit", 60, 400, wave=3),
    Planned(
        "grpo_graphs", "speed grpo micro 8 1024", "device", 300, 40, f"{UNTUNED} {GRAPHS}", wave=4, rehearsed=False
    ),
    Planned("ppo_graphs", "speed ppo 8 64 1024", "device", 300, 40, f"{UNTUNED} {GRAPHS}", {}, 4, False),
    Planned("gpt2_expander", "speed gpt2 bfloat16 1", "device", 240, 30, EXPANDER, MOST_MEMORY, 4, False),
    Planned("gpt2_float32", "speed gpt2 float32 1", "device", 240, 25, "", MOST_MEMORY, 4, False),
    Planned("gpt2_tf32", "speed gpt2 float32 1", "device", 240, 25, "", TF32 | MOST_MEMORY, 4, False),
    Planned("grpo_mini", "speed grpo mini 16 64", "device", 240, 30, UNTUNED, wave=4, rehearsed=False),
    Planned("bits_free", "checks bits", "check", 300, flags=UNTUNED, wave=4, rehearsed=False),
    Planned("physics_tf32", "checks physics HalfCheetah-v5", "check", 240, environment=TF32, wave=4, rehearsed=False),
    Planned("parity_tf32", "checks parity", "check", 300, 0, DETERMINISTIC, TF32, 4, False),
    Planned("cpu_grpo", "baselines cpu_grpo", "cores", 200, 40, environment=ON_CORES, wave=4),
]


class Running:
    """The process of a part, and its state."""

    def __init__(self, planned: Planned, arguments: argparse.Namespace, figures: Figures, log: Any):
        self.planned = planned
        self.begun = time.monotonic()
        self.ready = False
        self.turn_ends: float | None = None
        self._figures = figures
        command = [sys.executable, str(HERE / "part.py"), *planned.call.split(), *["--tiny"] * arguments.tiny]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
        self._process = subprocess.Popen(
            command, env=environment(planned, arguments.tiny), start_new_session=True, **pipes
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.strip() == "ready":
                self.ready = True
            elif line.startswith("{"):
                self._figures.add(self.planned.name, json.loads(line))

    def give_turn(self, ends: float) -> None:
        """Starts its turn, which ends at a time."""
        self.turn_ends = ends
        try:
            self._process.stdin.write(f"go {max(1.0, ends - time.monotonic() - 2):.0f}\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # the process has just ended
            pass

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    @property
    def measures(self) -> bool:
        """Whether it has its turn now."""
        return self.turn_ends is not None and not self.ended

    @property
    def compiles(self) -> bool:
        """Whether it uses the cores before its turn; a check does so until its end."""
        return not self.ready and not self.ended

    def late(self, now: float) -> str:
        """Returns why the part must be stopped, or "" if it is in time."""
        if self.turn_ends is not None:
            return "its turn was over" if now > self.turn_ends else ""
        over = now - self.begun > self.planned.ready and not self.ready
        return "" if not over else "not ready in time" if self.planned.kind != "check" else "took too long"

    def stop(self, reason: str) -> None:
        """Kills the process and its descendants."""
        if not self.ended:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._figures.add(self.planned.name, {"what": "stopped", "failed": reason})
        self._reader.join(timeout=5)


class Figures:
    """Stores results of parts as lines of JSON, with the time and the other parts that used the machine."""

    def __init__(self, path: Path, begun: float):
        self._path, self._begun, self._lock = path, begun, threading.Lock()
        self.beside: list[str] = []

    def add(self, part: str, figure: dict[str, Any]) -> None:
        """Appends a result."""
        beside = [name for name in self.beside if name != part]
        line = {"part": part, "second": round(time.monotonic() - self._begun, 1), **figure, "beside": beside}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def environment(planned: Planned, tiny: bool) -> dict[str, str]:
    """Returns the environment variables of a part's process."""
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # many processes share the device
        "JAXAUDIT_CACHE": "off",
        "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if planned.flags:  # the CPU's compiler reads them too, and fails for unknown names
        variables["XLA_FLAGS"] = planned.flags
    if tiny:
        variables["JAX_PLATFORMS"] = "cpu"
    if planned.kind == "audit":  # audits configure themselves by the command line
        variables["XLA_FLAGS"] = f"{DETERMINISTIC.replace('true', 'false')} {UNTUNED}"
        del variables["JAXAUDIT_CACHE"]
    return inherited | variables | planned.environment


def may_begin(candidate: Running, parts: list[Running]) -> bool:
    """Returns whether a part that is ready may measure now."""
    kind = candidate.planned.kind
    busy = {part.planned.kind for part in parts if part.measures}
    if kind == "cores" and any(part.compiles for part in parts):
        return False
    return not busy or (kind == "audit" and busy == {"audit"})


def run(arguments: argparse.Namespace, out: Path, begun: float) -> list[str]:
    """Runs the chosen parts until they end or time is up; returns the names of parts that were not started."""
    waiting = select_parts(arguments)
    priority = {planned.name: place for place, planned in enumerate(waiting)}
    parts: list[Running] = []
    figures = Figures(out / "figures.jsonl", begun)
    end = begun + arguments.seconds
    with (out / "log.txt").open("a", buffering=1) as log:
        while time.monotonic() < end and (waiting or not all(part.ended for part in parts)):
            now = time.monotonic()
            compiling = sum(part.compiles for part in parts)
            same_wave = waiting and all(part.ended or part.planned.wave == waiting[0].wave for part in parts)
            if same_wave and compiling < arguments.side_by_side:
                parts.append(Running(waiting.pop(0), arguments, figures, log))
            figures.beside = [part.planned.name for part in parts if part.compiles or part.measures]
            for part in parts:
                if not part.ended and (why := part.late(now)):
                    part.stop(why)
            for part in sorted(parts, key=lambda part: priority[part.planned.name]):
                if part.ready and not part.ended and part.turn_ends is None and may_begin(part, parts):
                    part.give_turn(min(now + part.planned.turn, end))
            time.sleep(0.05)
        for part in parts:
            part.stop("the time was up")
    return [planned.name for planned in waiting]


def select_parts(arguments: argparse.Namespace) -> list[Planned]:
    """Returns the requested parts, ordered by wave."""
    if arguments.only:
        requested = [planned for planned in PARTS if planned.name in arguments.only]
    else:
        requested = [planned for planned in PARTS if planned.rehearsed or not arguments.tiny]
    return sorted(
        (planned for planned in requested if planned.wave in arguments.waves), key=lambda planned: planned.wave
    )


def main() -> None:
    """Runs the measurement."""
    side_by_side = max(2, (os.cpu_count() or 2) // 3)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for figures.jsonl, log.txt, table.md and the audits' archives")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU; its numbers mean nothing")
    parser.add_argument("--only", nargs="+", choices=[p.name for p in PARTS], metavar="PART", help="some parts")
    parser.add_argument(
        "--seconds", type=float, default=500, help="time after which all parts are stopped (%(default)s)"
    )
    waves = "1 timings, 2 checks, 3 audits, 4 other flags (all)"
    parser.add_argument("--waves", type=int, nargs="+", default=[1, 2, 3, 4], help=waves)
    parser.add_argument("--side-by-side", type=int, default=side_by_side, help="parts that compile (%(default)s)")
    arguments = parser.parse_args()
    begun = time.monotonic()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.environ["MEASUREMENT"] = str(out)
    os.environ.setdefault("AUDITS", str(out / "audits"))
    not_started = run(arguments, out, begun)
    figures = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    table = markdown(figures)
    if not_started:
        table += f"\n\nnever started: {', '.join(not_started)}"
    (out / "table.md").write_text(table + "\n")
    print(table, f"\n\n{time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
