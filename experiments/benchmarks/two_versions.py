"""Compares the speed of two checkouts: runs the benchmarks of each with its package, in turns, and prints one table.

    python two_versions.py BEFORE AFTER [--parts ppo lanes sac td3 gpt2 grpo] [--repetitions 3]

BEFORE and AFTER are folders of checkouts in which `jaxaudit` can be imported (`jaxaudit/kernels` is a link to
`kernels`). The parts are: ppo, the audit of throughput.py with 8 seeds x 4 conditions; lanes, 16 lanes of lanes.py;
sac and td3, four lanes of off_policy.py; gpt2, an audited step of a small GPT-2 as in language_model.py; grpo, 8 lanes
of dialogues.py, which version 0.1 does not have. Compilation is not timed. Each checkout runs the parts of its own
`two_versions.py`, because benchmarks import names that a version may have renamed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PARTS = ("ppo", "lanes", "sac", "td3", "gpt2", "grpo")


def main() -> None:
    """Runs both checkouts, part by part."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folders", type=Path, nargs=2, metavar="FOLDER")
    options.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--quick", action="store_true", help="a smoke run; its numbers mean nothing")
    options.add_argument("--json", type=Path, metavar="PATH", help="write the seconds here")
    options.add_argument("--side", choices=PARTS, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.side:
        side(arguments.side, arguments.quick)
        return
    seconds = {part: compare_part(arguments, part) for part in arguments.parts}
    print("| part | before, s | after, s | after / before, paired |\n| --- | --- | --- | --- |")
    for part, (before, after) in seconds.items():
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        print("|", part, "|", " | ".join(spread(values) for values in (before, after, ratios)), "|")
    if arguments.json:
        from common import machine

        record = {"machine": machine(), "seconds": seconds}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def spread(values: list[float]) -> str:
    """Formats values as median (lowest - highest)."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def compare_part(arguments: argparse.Namespace, part: str) -> tuple[list[float], list[float]]:
    """Returns the seconds of each repetition, before and after; the order alternates between repetitions."""
    folders = [str(folder.resolve()) for folder in arguments.folders]
    running = [
        subprocess.Popen(
            [
                *(sys.executable, f"{folder}/experiments/benchmarks/two_versions.py", "--side", part),
                *(["--quick"] * arguments.quick),
                *(folder, folder),
            ],
            env=os.environ | {"PYTHONPATH": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    seconds: tuple[list[float], list[float]] = ([], [])
    for process in running:
        if read_message(process) != "ready":
            sys.exit(f"{part} does not run")
    for repetition in range(arguments.repetitions):
        for index in (0, 1) if repetition % 2 == 0 else (1, 0):
            stdin = running[index].stdin
            assert stdin
            stdin.write("go\n")
            stdin.flush()
            seconds[index].append(float(read_message(running[index])))
    for process in running:
        process.communicate()
    return seconds


def read_message(process: subprocess.Popen) -> str:
    """Returns the next message of a process, or "" if it has ended."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("> "):
            return line.removeprefix("> ").strip()
    return ""


def side(part: str, quick: bool) -> None:
    """Compiles a part, runs it for each line of input, and prints the seconds."""
    import common

    common.prepare_jax(1 if part == "gpt2" else common.core_count())
    call = {"ppo": ppo, "lanes": lanes, "sac": sac, "td3": td3, "gpt2": gpt2, "grpo": grpo}[part](common, quick)
    call()
    print("> ready", flush=True)
    for _ in sys.stdin:
        print(">", common.interleave({part: call}, 1)[part].median, flush=True)


def ppo(common, quick: bool):
    """An audit of six iterations."""
    import throughput

    options = argparse.Namespace(
        learner="ppo", seeds=1 if quick else 8, spikes=[3.0, 10.0, 30.0], steps=3 if quick else 6
    )
    return throughput.build(options)[1]


def lanes(common, quick: bool):
    """Two iterations of sixteen lanes of PPO."""
    import jaxaudit as ja
    from jaxaudit.core.batches import layout

    plan = ja.plan(
        ja.learners.ppo(common.TASK, evaluations=0), [ja.lr_spike(10.0)], seeds=2 if quick else 16, steps=100
    )
    options = layout(plan)[0].lanes(plan)
    advance = common.Advance(plan.program, options, 2)
    return lambda: advance(1, 3) and None


def sac(common, quick: bool):
    """One iteration of 256 env steps and updates of four lanes of SAC."""
    return off_policy(quick, "sac")


def td3(common, quick: bool):
    """The same for TD3."""
    return off_policy(quick, "td3")


def off_policy(quick: bool, name: str):
    """One iteration of lanes that run one after another on each device."""
    import off_policy

    options = argparse.Namespace(env_steps=64 if quick else 256)
    advance = off_policy.lanes_of(options, name, 2 if quick else 4, "map")
    return lambda: off_policy.untimed(advance, 1, 2)


def gpt2(common, quick: bool):
    """Two audited steps of 8 x 128 tokens of a model of 11M parameters and a vocabulary of 50,257."""
    import language_model

    size, length = ("nano", 16) if quick else ("mini", 128)
    return language_model.trainer(argparse.Namespace(size=size, batch=8, length=length, steps=2), True)


def grpo(common, quick: bool):
    """Twenty iterations of lanes of GRPO on `hop` that run one after another on each core."""
    import dialogues

    options = argparse.Namespace(quick=quick, size="micro", iterations=1 if quick else 20, execution=["map"])
    return dialogues.advancing(options, dialogues.learner(options, performance_every=1_000), 2 if quick else 8)[0]


if __name__ == "__main__":
    main()
