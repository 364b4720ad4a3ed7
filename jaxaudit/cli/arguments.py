"""The commands of `jaxaudit` with their arguments and help texts; it imports nothing that would slow help down."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn

from jaxaudit.runtime import machine
from jaxaudit.runtime.errors import UserError

LISTS = ("tasks", "learners", "remedies", "perturbations", "interventions", "metrics")

QUICKSTARTS = ("llm",)
"""The packaged specs beside the default one."""

MODELS = ("ensemble", "chart", "lru", "gru", "kalman")
"""The models of `jaxaudit.monitoring.monitor.MODELS`; the first one is the default."""

COMMANDS = {
    "quickstart": "run a small audit, from its spec to its report, in a few minutes",
    "run": "train and measure what a spec says, in a new folder",
    "resume": "continue a run that was interrupted",
    "fork": "train other conditions from the states that a finished run stored at its onsets",
    "margin": "find the magnitude of each perturbation at which a finished run's learner collapses",
    "replay": "repeat a finished run and compare the results bit for bit",
    "report": "write the report of a run or a comparison again",
    "sample": "print the held-out prompts and completions that a run on a dialogue stored",
    "export": "export a finished run's trained language model in Hugging Face's format",
    "compare": "measure what variants of a learner gain in stability, and what they cost",
    "detect": "measure how well a monitor and its baselines detect the disturbances of finished runs",
    "monitor": "score logs of training runs with a monitor that is fitted to earlier runs",
    "read": "show how logs are read: their steps, runs, restarts and channels, and what is skipped",
    "list": "list the names that a spec can use",
    "schema": "print a JSON schema of specs, with which editors check and complete them",
}


class _Parser(argparse.ArgumentParser):
    """A parser that raises UserError with one sentence instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands; its result has the command's name as `command`."""
    root = _Parser(prog="jaxaudit", description="Measures how stable a training algorithm is.", allow_abbrev=False)
    root.add_argument("--version", action="version", version=f"jaxaudit {machine.installed_version()}")
    subparsers = root.add_subparsers(metavar="COMMAND", required=True, dest="command")
    commands = {
        name: subparsers.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        for name, text in COMMANDS.items()
    }

    def add(names: str, argument: str, text: str, **options: Any) -> None:
        for name in names.split():
            commands[name].add_argument(argument, help=text, **options)

    def add_path(names: str, argument: str, metavar: str, text: str, **options: Any) -> None:
        add(names, argument, text, metavar=metavar, type=Path, **options)

    def add_number(names: str, argument: str, default: float, text: str, **options: Any) -> None:
        add(names, argument, f"{text} (default: {default:g})", default=default, type=type(default), **options)

    add(
        "quickstart",
        "which",
        "llm: GRPO on a dialogue (default: PPO on a control task)",
        nargs="?",
        choices=QUICKSTARTS,
    )
    add("quickstart", "--print-spec", "print the spec and run nothing", action="store_true")
    add_path("resume fork margin replay report sample export", "folder", "DIR", "the folder of a run")
    add_path("run", "spec", "SPEC", "the spec, a TOML file")
    add_path("fork", "spec", "SPEC", "a TOML file with the new perturbations")
    add_path("margin", "spec", "SPEC", "a TOML file with the perturbations (default: those of the run)", nargs="?")
    add_path("compare", "spec", "SPEC", "a TOML file with tables [[variant]]")
    add_path("quickstart run fork", "-o", "DIR", "the new folder (default: runs/NAME)", dest="out")
    add_path("margin", "-o", "OUT", "the folder of the results (default: DIR/margins)", dest="out")
    add_path("compare", "-o", "DIR", "the folder, new or to be continued (default: runs/NAME)", dest="out")
    add_path("export", "-o", "OUT", "the new folder", dest="out", required=True)
    add_path("run", "--plan", "DIR", "use the plan of this run of the same spec, to get bitwise equal results")
    add_number("margin", "--tolerance", 0.02, "relative tolerance of a threshold", metavar="X")
    add_number("margin", "--reach", 1000.0, "search up to this factor beyond the given magnitudes", metavar="X")
    text = "count collapses in the first half of the run, as P_div of Table S5 does (the default), or at any time"
    add("margin", "--criterion", text, choices=("divergence", "collapse"), default="divergence")
    add("margin", "--lanes", "the number of lanes to train side by side", type=int, metavar="N")
    add("compare", "--json", "print the tables as JSON", action="store_true")
    add("replay", "--seed", "compare only this seed", type=int, metavar="N")
    add("replay", "--condition", "compare only this condition, given by its label or number", metavar="LABEL")
    add("sample export", "--seed", "the lane's seed (default: the first)", type=int, metavar="N")
    text = "the lane's condition, given by its label or number (default: the control)"
    add("sample export", "--condition", text, metavar="LABEL")
    text = "the step, or the nearest one that was measured (default: the last)"
    add("sample", "--step", text, type=int, metavar="N")
    add_path("detect", "folders", "RUN", "folders of runs; runs of the same learner are pooled", nargs="+")
    add_number("detect", "--alpha", 0.05, "allowed false alarms per clean run", metavar="X")
    add_number("detect", "--folds", 4, "folds of the cross-validation over seeds", metavar="N")
    text = "the share of a fold's clean lanes to fit detectors to; the others calibrate them"
    add_number("detect", "--fitted", 0.35, text, metavar="SHARE")
    add_path("monitor read", "files", "LOG", "files that trainers write or print", nargs="+")
    add_path("monitor", "--clean", "LOG", "logs of earlier runs that went well", nargs="+", required=True)
    text = "allowed false alarms per clean run (default: 0.05, or more if there are few clean runs)"
    add("monitor", "--alpha", text, type=float, metavar="X")
    add("monitor read", "--step", "the column with the step", metavar="NAME")
    add("read", "--json", "print one line of JSON for each log", action="store_true")
    text = "what scores the runs: control charts (ensemble, chart), or a state-space model (default: %(default)s)"
    add("detect monitor", "--model", text, choices=MODELS, default=MODELS[0])
    add("detect monitor", "--channels", "the channels to read (default: all)", metavar="A,B,...", type=_names)
    add_path("detect monitor", "-o", "OUT", "the new folder", dest="out", required=True)
    add("list", "what", "what to list (default: everything)", nargs="?", choices=LISTS)
    for name in ("quickstart", "run", "resume", "fork", "margin", "compare", "detect"):
        _add_workers(commands[name])
    for name in ("quickstart", "run", "resume", "fork"):
        _add_processes(commands[name])
    return root


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _add_workers(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("workers")
    group.add_argument(
        "--on",
        metavar="ENGINE",
        help="train in workers of ray, ray:ADDRESS or slurm, or in local processes (default: in this process)",
    )
    for name, text in (
        ("workers", "the number of workers at a time (default: as many as fit)"),
        ("cpus", "cores of each worker (default: 1)"),
        ("gpus", "GPUs of each worker (default: 0)"),
        ("minutes", "the time limit of a Slurm job, after which it is queued again (default: 1440)"),
    ):
        group.add_argument(f"--{name}", metavar="N", type=int, help=text)


def _add_processes(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("several processes, for lanes that need more devices than a host has")
    group.add_argument(
        "--distributed", action="store_true", help="this is one of several processes of srun, mpirun or Kubernetes"
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="the address of the first process, if no launcher provides it"
    )
    group.add_argument("--processes", metavar="N", type=int, help="the number of processes")
    group.add_argument("--process", metavar="I", type=int, help="the number of this process, from 0")
