"""Helpers of the benchmarks: JAX's devices, compiled lanes, interleaved timing, tables, and files of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxaudit.runtime.machine import core_count, processor_name

TASK = "HalfCheetah-v5"


def parser(description: str, repetitions: int = 5) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="a smoke run of seconds; its numbers mean nothing")
    options.add_argument("--json", type=Path, metavar="PATH", help="write the numbers here")
    options.add_argument("--repetitions", type=int, default=repetitions, help="timed rounds (%(default)s)")
    options.add_argument("--devices", type=int, default=core_count(), help="CPU devices (%(default)s, one per core)")
    return options


def prepare_jax(devices: int) -> None:
    """Sets the number of CPU devices, and turns the compilation cache off, so that compilations are timed.

    If JAX finds a GPU, programs run there and the CPU devices are idle.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    os.environ["JAXAUDIT_CACHE"] = "off"


@dataclass(frozen=True)
class Timing:
    """The seconds of each repetition."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over repetitions."""
        return statistics.median(self.seconds)

    def rate(self, work: float) -> str:
        """Returns `work` per second as text: median (lowest - highest)."""
        low, high = work / max(self.seconds), work / min(self.seconds)
        return f"{work / self.median:,.0f} ({low:,.0f} - {high:,.0f})"

    def __str__(self) -> str:
        return f"{self.median:.4g} ({min(self.seconds):.4g} - {max(self.seconds):.4g})"


def interleave(candidates: Mapping[str, Callable[[], float | None]], repetitions: int) -> dict[str, Timing]:
    """Runs the candidates in turns, A B C A B C ..., so that a slow phase of the machine affects all of them.

    A candidate may measure its own time and return the seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repetitions):
        for name, candidate in candidates.items():
            start = time.perf_counter()
            reported = candidate()
            seconds[name].append(time.perf_counter() - start if reported is None else reported)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def paired_ratio(above: Timing, below: Timing) -> Timing:
    """Returns the ratio above / below of each repetition."""
    return Timing(tuple(a / b for a, b in zip(above.seconds, below.seconds, strict=True)))


def sb3(python: str, learner: str, steps: int, processes: int, threads: int, envs: int = 8) -> float:
    """Returns the seconds that concurrent trainings of Stable-Baselines3 take, without their warm-up."""
    return time_script(python, "sb3.py", (learner, threads, envs, steps), processes)


def time_script(python: str, script: str, arguments: Sequence[Any], processes: int = 1) -> float:
    """Returns the seconds that concurrent processes of a script take under another Python, without their warm-up."""
    with WarmProcesses(python, script, arguments, processes) as running:
        running.wait_until_ready()
        return running.seconds()


class WarmProcesses:
    """Processes of a script that warm up, print "ready", start on a line of input, and print the seconds they took.

    A script may do this several times, once for each of its variants.

    Args:
      python: the interpreter; if it is not the current one, PYTHONPATH is not passed on.
      script: its path relative to this folder.
      arguments: command-line arguments of the script.
      processes: the number of concurrent processes.
      environment: additional environment variables.
      errors: the target of the processes' standard error.
    """

    def __init__(
        self,
        python: str,
        script: str,
        arguments: Sequence[Any],
        processes: int = 1,
        environment: Mapping[str, str] | None = None,
        errors: int | None = subprocess.DEVNULL,
    ):
        self._name = f"{script} under {python}"
        command = [python, str((Path(__file__).resolve().parent / script).resolve()), *map(str, arguments)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "text": True}
        same = python == sys.executable  # another Python has other packages
        inherited = {name: value for name, value in os.environ.items() if same or name != "PYTHONPATH"}
        variables = inherited | dict(environment or {})
        # MuJoCo writes a log of warnings into the working directory.
        self._running = [
            subprocess.Popen(command, cwd=tempfile.gettempdir(), env=variables, **pipes) for _ in range(processes)
        ]

    def wait_until_ready(self) -> None:
        """Waits until every process is ready. Raises RuntimeError if one ends before."""
        for process in self._running:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError(f"{self._name} does not run: pip install -e .[bench]")

    def seconds(self) -> float:
        """Starts all processes at once, and returns the seconds of the slowest."""
        for process in self._running:
            process.stdin.write("go\n")
            process.stdin.flush()
        return max(json.loads(process.stdout.readline())["seconds"] for process in self._running)

    def __enter__(self) -> WarmProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.stdin.close()
        for process in self._running:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


class Lanes:
    """Lanes of a learner, compiled by the engine that runs audits, and trained by `train()`.

    Compilation starts in the background, so that several numbers of lanes compile concurrently, until `wait()`.

    Args:
      learner: the learner.
      seeds: their number. With perturbations, each has a lane for every condition and the control; else one lane.
      rows: the steps of one call of `train`.
      perturbations: perturbations with a common onset, whose windows are data of the compiled program.
      execution: how a device runs its lanes.
      steps: the length of a run, which schedules depend on.
    """

    def __init__(
        self,
        learner: Any,
        seeds: int,
        rows: int,
        perturbations: Sequence[Any] = (),
        execution: str | int = "vmap",
        steps: int = 10_000,
    ):
        from jaxaudit.core.batches import layout
        from jaxaudit.core.grid import plan
        from jaxaudit.execution.engine import Engine

        self._begun = time.perf_counter()
        grid = plan(learner, list(perturbations), seeds=seeds, steps=steps, tail=0, execution=execution)
        self._engine, self._batch = Engine(grid, rows), layout(grid)[-1 if perturbations else 0]
        self._engine.compile([self._batch])
        self.lanes, self.rows = len(self._batch.seeds), rows
        self._states: Any = None
        self._step = 0

    def wait(self) -> None:
        """Waits for the compiler, and sets `planned_bytes`, the memory of the program, and `compile_seconds`."""
        self.planned_bytes = self._engine.program_bytes(self._batch)
        self._engine.initial_bytes(self._batch)
        self.compile_seconds = time.perf_counter() - self._begun

    def begin(self) -> None:
        """Initializes the lanes' states on the device, and waits."""
        self._states, self._step = jax.block_until_ready(self._engine.initial(self._batch)), 0

    def train(self) -> Mapping[str, Any]:
        """Trains all lanes for `rows` steps, and returns their telemetry `[rows, lanes, ...]`."""
        if self._states is None:
            self.begin()
        stop = self._step + self.rows
        self._states, telemetry = self._engine.advance(self._batch, self._states, self._step, stop)
        self._step = stop
        return telemetry

    def free(self) -> None:
        """Releases the memory of the states."""
        self._states = None


class Advance:
    """Compiled lanes of a program: a call with (start, stop) trains them from a state after one step, and waits.

    Args:
      program: the program of a grid.
      lanes: the lanes.
      rows: the steps of telemetry that the compiled program stores.
      data: the data of the learner.
    """

    def __init__(self, program: Any, lanes: Any, rows: int, data: Any = None):
        from jaxaudit.core.program import advance, empty_telemetry, initial_states, with_perturbations

        def begin(seeds, data):
            states = initial_states(program, data, seeds)
            return states if lanes.disturbance is None else with_perturbations(program, states, len(seeds))

        self._lanes = lanes
        self._data = data
        states = jax.jit(begin)(lanes.seed, data)
        self._rows = empty_telemetry(program, rows, lanes.seed.shape[0])

        def run(states, lanes, start, stop, rows, data):
            return advance(program, data, states, lanes, start, stop, rows, start)

        arguments = (states, lanes, 0, 1, self._rows, data)
        begun = time.perf_counter()
        self.compiled = jax.jit(run).lower(*arguments).compile()
        self.compile_seconds = time.perf_counter() - begun
        self._states = states
        self._states = self(0, 1)[0]

    def __call__(self, start: int, stop: int, lanes: Any = None) -> Any:
        """Returns states and telemetry at `stop`; `lanes` may have other data than those of the constructor."""
        arguments = (self._states, self._lanes if lanes is None else lanes, start, stop, self._rows, self._data)
        placed = jax.tree.map(jax.device_put, arguments, self.compiled.input_shardings[0])
        return jax.block_until_ready(self.compiled(*placed))


class Audit:
    """A compiled grid with one onset: a call trains the baseline and, from its states at the onset, every lane.

    Args:
      plan: the grid.
      begun: the step that each call starts from; earlier steps, with a warm start, are trained once.
    """

    def __init__(self, plan: Any, begun: int = 0):
        from jaxaudit.core.batches import layout
        from jaxaudit.execution.engine import Engine

        self._plan = plan
        self._engine = Engine(plan, plan.steps)
        self._baseline, self._forks = layout(plan)
        self._begun, self._held = 0, None
        if begun:
            states, _ = self._engine.advance(self._baseline, self._first(), 0, begun)
            self._begun, self._held = begun, self._engine.copies(self._baseline, states)
        self._train(onset=begun + 1, tail=0, stop=begun + 2)

    def __call__(self) -> None:
        """Trains the whole grid once."""
        plan = self._plan
        onset = plan.forks[0].onset
        self._train(onset, plan.baseline_steps - onset, plan.steps)

    def whole(self, stop: int | None = None) -> None:
        """Trains each lane separately from step 0 by the same program, which the first call compiles."""
        start = self._engine.initial(self._forks)
        self._engine.advance(self._forks, start, 0, self._plan.steps if stop is None else stop)

    def _first(self) -> Any:
        """Returns the states that the baseline starts from."""
        if self._held is None:
            return self._engine.initial(self._baseline)
        return self._engine.restored(self._held, self._baseline)

    def _train(self, onset: int, tail: int, stop: int) -> None:
        engine = self._engine
        states, _ = engine.advance(self._baseline, self._first(), self._begun, onset)
        held = engine.copies(self._baseline, states)
        if tail:
            engine.advance(self._baseline, states, onset, onset + tail)
        engine.advance(self._forks, engine.forked(lambda seeds: held, self._forks), onset, stop)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Formats a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine() -> dict[str, Any]:
    """Describes the machine and the packages that results depend on."""
    names = ("jaxaudit", "jax", "jaxlib", "flax", "optax", "mujoco")
    return {
        "processor": processor_name(),
        "cores": core_count(),
        "devices": [str(device) for device in jax.devices()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names},
        "load_average": os.getloadavg()[0],
    }


def finish(arguments: argparse.Namespace, markdown: str, data: Mapping[str, Any]) -> None:
    """Prints the table, and writes the JSON file if the options name one."""
    print(markdown)
    if arguments.quick:
        print("\n(a smoke run: these numbers mean nothing)")
    if arguments.json:
        left_out = ("json", "python", "trl_python")  # paths on this machine
        options = {name: value for name, value in vars(arguments).items() if name not in left_out}
        record = {"options": options, "machine": machine(), **data}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=2, default=as_json) + "\n")


def as_json(value: Timing | Path) -> list[float] | str:
    """Converts a value that JSON cannot represent."""
    return str(value) if isinstance(value, Path) else list(value.seconds)
