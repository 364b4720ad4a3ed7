"""Speed and errors of MJX by solver settings, compared with Gymnasium."""

from __future__ import annotations

import argparse

import parity

from jaxaudit.tasks import TASKS

SETTINGS = ("3/6", "4/6", "5/8", "6/8", "8/8", "10/10")


def main() -> None:
    """Prints a table for each task."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("tasks", nargs="*", default=sorted(TASKS), help="all of them")
    options.add_argument("--settings", nargs="*", default=SETTINGS, help="iterations/ls_iterations (%(default)s)")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--width", type=int, default=100, help="MJX on a CPU can hang at many hundreds")
    arguments = options.parse_args()
    for name in arguments.tasks:
        print("\n" + parity.HEADER.format(f"{name}, iterations/ls_iterations"))
        reference = None
        for setting in arguments.settings:
            env = parity.build(name, "mjx", *map(int, setting.split("/")))
            reference = reference or parity.reference(env, arguments.steps)
            print(parity.row(setting, parity.errors(env, reference, arguments.width)), flush=True)


if __name__ == "__main__":
    main()
