"""The command line. Exit codes: 0 done; 2 the user's input is wrong; 1 anything else; 130 Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import importlib.resources
import importlib.util
import io
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxaudit.runtime import source_tree
from jaxaudit.runtime.errors import TRACEBACK, Undrawn, UserError, explain
from jaxaudit.runtime.interrupts import interrupt
from jaxaudit.runtime.machine import collect_garbage_seldom, occupy, planned_threads, prepare_jax, use_cpus

# Everything else is imported where it is wanted: a word of help should not wait for a task's physics.

LISTS = ("tasks", "learners", "remedies", "perturbations", "interventions", "metrics")

DRAWN_WITH = {
    "altair": "altair>=6.0,<7",
    "vl_convert": "vl-convert-python>=1.8,<2",
    "jinja2": "jinja2>=3.1,<4",
}
"""What draws figures and reports, and trains nothing: modules, and what installs them."""

QUICKSTARTS = ("llm",)
"""Packaged specs beside the first one."""

MODELS = ("ensemble", "chart", "lru", "gru", "kalman")
"""Of a monitor, `metastate.monitor.MODELS`; the first is what it has where none is named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a failure is one sentence on stderr."""
    stderr = sys.stderr
    try:
        arguments = _parser().parse_args(argv)
        code = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    except BrokenPipeError:  # whoever read has read enough, as `head` does
        return 128 + signal.SIGPIPE
    except (Exception, KeyboardInterrupt) as error:
        code, sentence = explain(error)
        if code == 1 and os.environ.get(TRACEBACK):
            traceback.print_exc(file=stderr)
        if sentence:
            with contextlib.suppress(OSError):
                print(f"jaxaudit: {' '.join(sentence.split())}", file=stderr)
        return code


def entry() -> NoReturn:
    """The console's entry: `main`, and out.

    After Ctrl-C or a failure at once: a computation still running is not waited for, and no library has a word after
    the sentence (what Orbax leaves of a save that failed speaks when the interpreter takes it apart).
    """
    collect_garbage_seldom()
    signal.signal(signal.SIGINT, interrupt)
    sys.stdout, sys.stderr = _Printable(sys.stdout), _Printable(sys.stderr)  # type: ignore[assignment]
    code = main()
    if code:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that command a terminal, and those that change the direction of text."""


class _Printable:
    """A text stream on which control characters appear as escapes.

    Names of channels, conditions and files may come from somebody else, and a terminal obeys what is written to it.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text, with control characters other than line ends, returns and tabs escaped."""
        self._stream.write(_CONTROL.sub(lambda found: ascii(found[0])[1:-1], text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError in place of printing the usage."""
        raise UserError(f"{message}; see: {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxaudit", description="How stable is this training run?", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxaudit {source_tree.version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="name")

    def add(name: str, command: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=words, description=words, allow_abbrev=False)
        added.set_defaults(command=command)
        return added

    quickstart = add("quickstart", _quickstart, "a small audit, from its spec to its report, in minutes")
    quickstart.add_argument("which", nargs="?", choices=QUICKSTARTS, help="llm: GRPO on a dialogue (else PPO)")
    quickstart.add_argument("--print-spec", action="store_true", help="show the spec and run nothing")
    run = add("run", _run, "run a spec in a new folder")
    run.add_argument("spec", metavar="SPEC", type=Path, help="a TOML file")
    resume = add("resume", _resume, "go on with a run that stopped")
    fork = add("fork", _fork, "run new conditions from the onsets a finished run stored")
    margin = add("margin", _margin, "how far a finished run is from collapse, for every perturbation")
    replay = add("replay", _replay, "run a finished run again and compare, bit for bit")
    report = add("report", _report, "write the report of a run or a comparison again")
    sample = add("sample", _sample, "print the held-out rows that a run on a dialogue stored")
    export = add("export", _export, "write a finished run's trained language model in Hugging Face's format")
    for command in (resume, fork, margin, replay, report, sample, export):
        command.add_argument("folder", metavar="DIR", type=Path, help="a run's folder")
    fork.add_argument("spec", metavar="SPEC", type=Path, help="a TOML file with the new perturbations")
    export.add_argument("-o", dest="out", metavar="OUT", type=Path, required=True, help="the new folder")
    export.add_argument("--seed", type=int, metavar="N", help="of the lane (the first)")
    export.add_argument("--condition", metavar="LABEL", help="of the lane, or its number (the control)")
    for command in (quickstart, run, fork):
        command.add_argument("-o", dest="out", metavar="DIR", type=Path, help="the new folder (runs/NAME)")
    run.add_argument(
        "--plan", metavar="DIR", type=Path, help="take the plan of this run of the same spec: the two end bitwise equal"
    )
    margin.add_argument(
        "spec", metavar="SPEC", type=Path, nargs="?", help="a TOML file with the perturbations to search (the run's)"
    )
    margin.add_argument("-o", dest="out", metavar="OUT", type=Path, help="folder of the results (DIR/margins)")
    margin.add_argument("--tolerance", type=float, default=0.02, metavar="X", help="relative, of a threshold (0.02)")
    margin.add_argument(
        "--reach", type=float, default=1000.0, metavar="X", help="times beyond the magnitudes given (1000)"
    )
    margin.add_argument(
        "--criterion",
        choices=("divergence", "collapse"),
        default="divergence",
        help="a collapse in the run's first half (Table S5's P_div; the default), or any",
    )
    margin.add_argument("--lanes", type=int, metavar="N", help="lanes side by side")
    compare = add("compare", _compare, "what stability variants of a learner buy, and what is paid for it")
    compare.add_argument("spec", metavar="SPEC", type=Path, help="a TOML file with tables [[variant]]")
    compare.add_argument("-o", dest="out", metavar="DIR", type=Path, help="the folder (runs/NAME); it goes on there")
    compare.add_argument("--json", action="store_true", help="print the tables as JSON")
    replay.add_argument("--seed", type=int, metavar="N", help="compare this seed alone")
    replay.add_argument("--condition", metavar="LABEL", help="compare this condition (or its number) alone")
    sample.add_argument("--seed", type=int, metavar="N", help="of the lane (the first)")
    sample.add_argument("--condition", metavar="LABEL", help="of the lane, or its number (the control)")
    sample.add_argument("--step", type=int, metavar="N", help="or the nearest that was measured (the last)")
    detect = add("detect", _detect, "how well a monitor and its baselines notice the disturbances of finished runs")
    detect.add_argument("folders", metavar="RUN", type=Path, nargs="+", help="runs' folders; a learner's count as one")
    detect.add_argument("--alpha", type=float, default=0.05, metavar="X", help="false alarms per clean run (0.05)")
    detect.add_argument("--folds", type=int, default=4, metavar="N", help="of the seeds (4)")
    detect.add_argument(
        "--fitted", type=float, default=0.35, metavar="SHARE", help="of a fold's clean lanes, fitted to (0.35)"
    )
    watch = add("monitor", _monitor, "score logs of your own training runs by a monitor of your earlier ones")
    watch.add_argument(
        "files", metavar="LOG", type=Path, nargs="+", help="what trainers write and print; see `jaxaudit read`"
    )
    watch.add_argument("--clean", metavar="LOG", type=Path, nargs="+", required=True, help="earlier, sound runs")
    watch.add_argument("--step", metavar="NAME", help="the column that counts steps")
    watch.add_argument("--alpha", type=float, metavar="X", help="false alarms per clean run (0.05)")
    read = add("read", _read, "what a log holds: steps, runs, restarts, channels, and what is left out")
    read.add_argument("files", metavar="LOG", type=Path, nargs="+", help="as of monitor")
    read.add_argument("--step", metavar="NAME", help="the column that counts steps")
    read.add_argument("--json", action="store_true", help="a line of JSON for each log")
    for command in (detect, watch):
        command.add_argument(
            "--model",
            choices=MODELS,
            default=MODELS[0],
            help="what the monitor scores runs by: control charts, or a state-space model (%(default)s)",
        )
        command.add_argument("--channels", metavar="A,B,...", type=_names, help="what is read (all there is)")
        command.add_argument("-o", dest="out", metavar="OUT", type=Path, required=True, help="the new folder")
    for command in (quickstart, run, resume, fork, margin, compare, detect):
        _add_workers(command)
    for command in (quickstart, run, resume, fork):
        _add_processes(command)
    names = add("list", _list, "what a spec can name")
    names.add_argument("what", nargs="?", choices=LISTS, help="all of them if none is named")
    return parser


def _add_workers(command: argparse.ArgumentParser) -> None:
    """Who trains: this process, unless --on says otherwise."""
    group = command.add_argument_group("workers")
    group.add_argument("--on", metavar="ENGINE", help="ray, ray:ADDRESS, slurm, or local for processes of this machine")
    for name, words in (
        ("workers", "side by side (as many as there is room for)"),
        ("cpus", "cores of each (1)"),
        ("gpus", "GPUs of each (0)"),
        ("minutes", "a Slurm job's limit of time; it is queued again after (1440)"),
    ):
        group.add_argument(f"--{name}", metavar="N", type=int, help=words)


def _add_processes(command: argparse.ArgumentParser) -> None:
    """Whether this is one of several processes that train the same lanes together."""
    group = command.add_argument_group("several processes, for lanes that need more devices than a host has")
    group.add_argument("--distributed", action="store_true", help="this is one: srun, mpirun or Kubernetes says which")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where the first is, if nobody says so")
    group.add_argument("--processes", metavar="N", type=int, help="how many there are")
    group.add_argument("--process", metavar="I", type=int, help="which this is, from 0")


def _is_one_of_several(arguments: argparse.Namespace) -> bool:
    """Whether this process was told, in any way, that it is one of a run's; no command that cannot be is."""
    told = (getattr(arguments, name, None) for name in ("coordinator", "processes", "process"))
    return getattr(arguments, "distributed", False) or any(value is not None for value in told)


def _join(arguments: argparse.Namespace) -> None:
    """Joins the other processes of a run, where it has several; all but the first say no more than how they end."""
    if not _is_one_of_several(arguments):
        return
    from jaxaudit.runtime import hosts

    hosts.join(arguments.coordinator, arguments.processes, arguments.process)
    if not hosts.is_leader():
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()


def _workers(arguments: argparse.Namespace, like: Path | None = None) -> Any:
    """Who trains, `jaxaudit.runtime.backends.backend.Workers`; None: this process.

    Of a run that is there, `like`, workers have as many cores as it was planned for, unless another number is asked.
    """
    asked = {"count": arguments.workers} | {name: getattr(arguments, name) for name in ("cpus", "gpus", "minutes")}
    if arguments.on is not None and _is_one_of_several(arguments):
        raise UserError("--on has workers train lanes apart, and --distributed processes train them together: take one")
    if arguments.on is None:
        given = [name for name, value in asked.items() if value is not None]
        if given:
            raise UserError(f"--{given[0].replace('count', 'workers')} says how workers are, and needs --on")
        return None
    from jaxaudit.runtime.backends.backend import Workers

    if like is not None and (planned := planned_threads(like)):
        if asked["cpus"] not in (None, planned):
            told = f"the cores of a worker were {planned} and are {asked['cpus']}"
            print(f"note: {told}: results may not be bitwise the same", file=sys.stderr)
        asked["cpus"] = asked["cpus"] or planned
    return Workers.parse(arguments.on, **asked)


def _prepare(workers: Any, like: Path | None = None, joined: argparse.Namespace | None = None) -> None:
    """Makes JAX ready: to train here, on as many cores as the run in a folder was planned for; or not to train.

    `joined`: the arguments of a command that several processes may do together.
    """
    if workers is None:
        if like is not None and (threads := planned_threads(like)):
            occupy(threads)
        prepare_jax()
        if joined is not None:
            _join(joined)
    else:
        use_cpus()
        prepare_jax()


def _quickstart(arguments: argparse.Namespace) -> int:
    name = f"quickstart_{arguments.which}.toml" if arguments.which else "quickstart.toml"
    text = importlib.resources.files("jaxaudit").joinpath(name).read_text(encoding="utf-8")
    if arguments.print_spec:
        print(text, end="")
        return 0
    from jaxaudit.spec.document import parse

    return _start(lambda: parse(text, name), arguments, map_is_for_cpus=True)


def _run(arguments: argparse.Namespace) -> int:
    from jaxaudit.spec.document import load

    if arguments.plan is not None:
        _check_run(arguments.plan)
    return _start(lambda: load(arguments.spec), arguments, arguments.plan)


def _start(
    read: Callable[[], Any], arguments: argparse.Namespace, like: Path | None = None, map_is_for_cpus: bool = False
) -> int:
    spec, workers = read(), _workers(arguments, like)
    _prepare(workers, like, arguments)
    from jaxaudit.runs import lifecycle as durable

    folder = arguments.out or Path("runs", spec.audit.slug)
    durable.run(spec, folder, workers, like, map_is_for_cpus)
    return _end(folder)


def _resume(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    workers = _workers(arguments, arguments.folder)
    _prepare(workers, arguments.folder, arguments)
    from jaxaudit.runs import lifecycle as durable

    durable.resume(arguments.folder, workers)
    return _end(arguments.folder)


def _fork(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    from jaxaudit.spec.document import load

    spec, workers = load(arguments.spec), _workers(arguments, arguments.folder)
    _prepare(workers, arguments.folder, arguments)
    from jaxaudit.runs import lifecycle as durable

    out = arguments.out or Path("runs", spec.audit.slug)
    durable.fork(arguments.folder, spec, out, workers)
    return _end(out)


def _margin(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    from jaxaudit.runtime.errors import placed
    from jaxaudit.spec.document import load

    spec, workers = load(arguments.spec) if arguments.spec else None, _workers(arguments, arguments.folder)
    _prepare(workers, arguments.folder)
    from jaxaudit.runs.margins.folder import margin_of
    from jaxaudit.runs.margins.search import MarginSettings

    with placed("jaxaudit margin"):
        chosen = MarginSettings(
            tolerance=arguments.tolerance,
            reach=arguments.reach,
            criterion=arguments.criterion,
            lanes=arguments.lanes,
        )
    print(margin_of(arguments.folder, spec, arguments.out, chosen, workers))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from jaxaudit.runs.variants.folder import load

    asked, workers = load(arguments.spec), _workers(arguments)
    _prepare(workers)
    import json

    from jaxaudit.runs.variants.folder import compare_in

    out = arguments.out or Path("runs", asked.spec.audit.slug)
    found = compare_in(asked, out, workers)
    print(json.dumps(found.json(), indent=2) if arguments.json else found)
    try:
        undrawn = _write_report(out, quiet=arguments.json)
    except Undrawn as error:
        undrawn = str(error)
    if undrawn:
        later = shlex.join(["jaxaudit", "report", str(out)])
        _note(f"the comparison is stored in {out}, but not drawn: {undrawn}, and draw it with: {later}")
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    _prepare(None, arguments.folder)
    from jaxaudit.runs.replay import replay

    replayed = replay(arguments.folder, arguments.seed, arguments.condition)
    print(replayed)
    return 0 if replayed.equal else 1


def _report(arguments: argparse.Namespace) -> int:
    compared = _is_comparison(arguments.folder)
    if not compared:
        _check_run(arguments.folder)
    if compared and not (arguments.folder / "compare.json").exists():
        raise UserError(f"the comparison in {arguments.folder} is not finished; go on with the command that began it")
    if not compared and not (arguments.folder / "telemetry.zarr").exists():
        raise UserError(f"the run in {arguments.folder} has no telemetry yet, so there is nothing to report")
    if missing := _write_report(arguments.folder):
        raise UserError(f"nothing was drawn: {missing}")
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    from jaxaudit.cli.sample import sample

    print(sample(arguments.folder, arguments.seed, arguments.condition, arguments.step))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    _prepare(None, arguments.folder)
    from jaxaudit.runs.export import export

    print(export(arguments.folder, arguments.out, arguments.seed, arguments.condition))
    return 0


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _detect(arguments: argparse.Namespace) -> int:
    for folder in arguments.folders:
        _check_run(folder)
    workers = _workers(arguments)
    prepare_jax()
    from jaxaudit.monitoring.comparison import DetectionSettings
    from jaxaudit.monitoring.detect import detect
    from jaxaudit.monitoring.detector import MonitorDetector
    from jaxaudit.monitoring.monitor import scorer
    from jaxaudit.runtime.errors import placed

    with placed("jaxaudit detect"):
        settings = DetectionSettings(folds=arguments.folds, alpha=arguments.alpha, fitted=arguments.fitted)
    detector = MonitorDetector(scorer(arguments.model))
    for folder in detect(arguments.folders, arguments.out, detector, settings, arguments.channels, workers):
        _draw_detection(folder)
    return 0


def _monitor(arguments: argparse.Namespace) -> int:
    if arguments.model != MODELS[0]:  # which is NumPy alone
        prepare_jax()
    from jaxaudit.monitoring.monitor_logs import Options, monitor_logs

    options = Options(arguments.channels, arguments.step, arguments.alpha, arguments.model)
    monitor_logs(arguments.files, arguments.clean, arguments.out, options)
    _draw_detection(arguments.out)
    return 0


def _read(arguments: argparse.Namespace) -> int:
    import json

    from jaxaudit.logs.log import contents, table
    from jaxaudit.logs.reading import read

    for path in arguments.files:
        log = read(path, arguments.step)
        for line in [json.dumps(contents(log))] if arguments.json else table(log):
            print(line)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from jaxaudit.cli import registry_listing as listing

    for name in [arguments.what] if arguments.what else LISTS:
        if not arguments.what:
            print(f"{name}:")
        for line in getattr(listing, name)():
            print((line if arguments.what else f"  {line}").rstrip())
    return 0


def _check_run(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder" if folder.exists() else f"{folder}: there is no such folder")
    if not (folder / "spec.toml").is_file():
        raise UserError(f"{folder} is not a run's folder: it has no spec.toml")


def _end(folder: Path) -> int:
    """A finished run's report; of several processes the first writes it.

    The run has succeeded where only its drawing fails: that is a note, with how to draw it later.
    """
    from jaxaudit.runtime import hosts

    if not hosts.is_leader():
        return 0
    later = shlex.join(["jaxaudit", "report", str(folder)])
    try:
        undrawn = _write_report(folder)
    except Undrawn as error:
        undrawn = str(error)
    if undrawn:
        _note(f"the run is finished and stored in {folder}, but not drawn: {undrawn}, and draw it with: {later}")
    return 0


def _write_report(folder: Path, quiet: bool = False) -> str:
    """Writes figures and report of a run or a comparison; if what draws them is missing, says what to do instead."""
    try:
        if _is_comparison(folder):
            from jaxaudit.report.compared import build
        else:
            from jaxaudit.report import build
    except ImportError as error:
        return _undrawn(error)
    page = build(folder)
    if not quiet:
        print(f"report: {page}")
    return ""


def _is_comparison(folder: Path) -> bool:
    return (folder / "compare.toml").is_file()


def _draw_detection(folder: Path) -> None:
    """Writes the report of what `detect` or `monitor` left in a folder; a note where what draws it is missing."""
    try:
        from jaxaudit.report.detection import build
    except ImportError as error:
        later = f"from jaxaudit.report.detection import build; build({str(folder)!r})"
        _note(f"the results are stored in {folder}, but not drawn: {_undrawn(error)}, and draw them in Python: {later}")
        return
    try:
        print(f"report: {build(folder)}")
    except Undrawn as error:
        _note(f"the results are stored in {folder}, but not drawn: {error}")


def _undrawn(error: ImportError) -> str:
    """Why figures and reports cannot be drawn, and what to install. Raises the error if it is of this package."""
    if (error.name or "").partition(".")[0] == "jaxaudit":
        raise error
    missing = [module for module in DRAWN_WITH if importlib.util.find_spec(module) is None]
    if missing:
        why = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    else:
        why = f"what draws figures and reports cannot be imported ({error})"
    wanted = [DRAWN_WITH[module] for module in missing or DRAWN_WITH]
    return f"{why}; install what is missing with: pip install {shlex.join(wanted)}"


def _note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    entry()
