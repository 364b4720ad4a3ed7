"""Whether anything got slower: two checkouts' own benchmarks in turns, each with its own package, in one table.

    python two_versions.py BEFORE AFTER [--parts ppo lanes sac td3 gpt2 grpo] [--repetitions 3]

BEFORE and AFTER are folders of checkouts in which `jaxaudit` can be imported (`jaxaudit/kernels` a link to `kernels`).
ppo: the audit of throughput.py, 8 seeds x 4 conditions; lanes: 16 lanes of lanes.py; sac, td3: four lanes of
off_policy.py; gpt2: an audited step of a small GPT-2 as language_model.py times it; grpo: 8 lanes of dialogues.py,
which version 0.1 does not have. Compiling is not timed.
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
    """Runs both sides, part by part."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folders", type=Path, nargs=2, metavar="FOLDER")
    options.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options.add_argument("--repetitions", type=int, default=3)
    options.add_argument("--quick", action="store_true", help="a smoke run; its numbers mean nothing")
    options.add_argument("--json", type=Path, metavar="PATH", help="write the seconds here")
    options.add_argument("--side", choices=PARTS, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.side:
        side(arguments.folders[0], arguments.side, arguments.quick)
        return
    seconds = {part: compared(arguments, part) for part in arguments.parts}
    print("| part | before, s | after, s | after / before, paired |\n| --- | --- | --- | --- |")
    for part, (before, after) in seconds.items():
        ratios = [b / a for a, b in zip(before, after, strict=True)]
        print("|", part, "|", " | ".join(spread(values) for values in (before, after, ratios)), "|")
    if arguments.json:
        from common import machine

        record = {"machine": machine(), "seconds": seconds}
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


def spread(values: list[float]) -> str:
    """Median (lowest - highest)."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} - {max(values):.3g})"


def compared(arguments: argparse.Namespace, part: str) -> tuple[list[float], list[float]]:
    """Seconds of every repetition, before and after, in turns; which begins changes from round to round."""
    folders = [str(folder.resolve()) for folder in arguments.folders]
    command = [sys.executable, __file__, "--side", part, *["--quick"] * arguments.quick]
    running = [
        subprocess.Popen(
            [*command, folder, folder],
            env=os.environ | {"PYTHONPATH": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in folders
    ]
    found: tuple[list[float], list[float]] = ([], [])
    for process in running:
        if read(process) != "ready":
            sys.exit(f"{part} does not run")
    for repetition in range(arguments.repetitions):
        for which in (0, 1) if repetition % 2 == 0 else (1, 0):
            ask = running[which].stdin
            assert ask
            ask.write("go\n")
            ask.flush()
            found[which].append(float(read(running[which])))
    for process in running:
        process.communicate()
    return found


def read(process: subprocess.Popen) -> str:
    """Its next word; "" where it has ended."""
    assert process.stdout
    for line in process.stdout:
        if line.startswith("> "):
            return line.removeprefix("> ").strip()
    return ""


def side(folder: Path, part: str, quick: bool) -> None:
    """Compiles a part with a checkout's own benchmarks, runs it at every word, and says how long that took."""
    sys.path[0] = str(folder / "experiments" / "benchmarks")  # in the place of this script's own
    import common

    common.prepare_jax(1 if part == "gpt2" else common.core_count())
    call = {"ppo": ppo, "lanes": lanes, "sac": sac, "td3": td3, "gpt2": gpt2, "grpo": grpo}[part](common, quick)
    call()
    print("> ready", flush=True)
    for _ in sys.stdin:
        print(">", common.interleave({part: call}, 1)[part].median, flush=True)


def ppo(common, quick: bool):
    """An audit, six iterations."""
    import throughput

    given = argparse.Namespace(
        learner="ppo", seeds=1 if quick else 8, spikes=[3.0, 10.0, 30.0], steps=3 if quick else 6
    )
    return throughput.build(given)[1]


def lanes(common, quick: bool):
    """Sixteen lanes of PPO, two iterations."""
    import jaxaudit as ja

    plan = ja.plan(
        ja.learners.ppo(common.TASK, evaluations=0), [ja.lr_spike(10.0)], seeds=2 if quick else 16, steps=100
    )
    try:
        from jaxaudit.core.batches import layout
    except ImportError:  # up to version 0.3
        from jaxaudit.batches import layout
    given = layout(plan)[0].lanes(plan)
    advance = common.Advance(plan.program, given, 2)
    return lambda: advance(1, 3) and None


def sac(common, quick: bool):
    """Four lanes of SAC, an iteration of 256 env steps and updates."""
    return off_policy(quick, "sac")


def td3(common, quick: bool):
    """The same of TD3."""
    return off_policy(quick, "td3")


def off_policy(quick: bool, name: str):
    """Lanes one after the other on each device."""
    import off_policy

    given = argparse.Namespace(env_steps=64 if quick else 256)
    advance = off_policy.lanes_of(given, name, 2 if quick else 4, "map")
    return lambda: off_policy.untimed(advance, 1, 2)


def gpt2(common, quick: bool):
    """Two audited steps of 8 x 128 tokens; of 11M parameters beside a vocabulary of 50,257."""
    import language_model

    size, length = ("nano", 16) if quick else ("mini", 128)
    return language_model.trainer(argparse.Namespace(size=size, batch=8, length=length, steps=2), True)


def grpo(common, quick: bool):
    """Lanes of GRPO on `hop`, one after the other on each core, twenty iterations."""
    import dialogues

    given = argparse.Namespace(quick=quick, size="micro", iterations=1 if quick else 20, execution=["map"])
    return dialogues.advancing(given, dialogues.learner(given, performance_every=1_000), 2 if quick else 8)[0]


if __name__ == "__main__":
    main()
