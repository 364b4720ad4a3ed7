"""The command line. Exit codes: 0 for success, 2 for a mistake in the user's input, 1 for other errors, 130 for Ctrl-C.

Each command imports what it needs when it runs, so that help and error messages are not slow.
"""

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

from jaxaudit.cli.arguments import LISTS, MODELS, parser
from jaxaudit.runtime.errors import TRACEBACK, DrawingFailed, UserError, explain, interrupt_handler
from jaxaudit.runtime.machine import claim_cores, collect_garbage_rarely, planned_threads, prepare_jax, use_cpu_only

DRAWING_PACKAGES = {
    "altair": "altair>=6.0,<7",
    "vl_convert": "vl-convert-python>=1.8,<2",
    "jinja2": "jinja2>=3.1,<4",
}
"""The modules that only figures and reports need, and the requirements that install them."""

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys, and those that change the direction of text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; a failure is reported as one sentence on stderr."""
    stderr = sys.stderr
    try:
        arguments = parser().parse_args(argv)
        code = _COMMANDS[arguments.command](arguments)
        sys.stdout.flush()
        return code
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    except BrokenPipeError:  # the reader of stdout has closed it, as `head` does
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
    """Runs `main` and ends the process: the entry point of the console script.

    After Ctrl-C or a failure the process ends at once. It does not wait for a computation that is still running, and
    no library can print anything after the sentence, as Orbax does on exit after a save that failed.
    """
    collect_garbage_rarely()
    signal.signal(signal.SIGINT, interrupt_handler)
    sys.stdout, sys.stderr = _EscapingStream(sys.stdout), _EscapingStream(sys.stderr)  # type: ignore[assignment]
    code = main()
    if code:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


class _EscapingStream:
    """A text stream that writes control characters as escapes, because a terminal would obey them.

    They may occur in names of channels, conditions and files that come from somebody else.
    """

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes the text, with all control characters but line ends, returns and tabs escaped."""
        self._stream.write(_CONTROL_CHARACTERS.sub(lambda match: ascii(match[0])[1:-1], text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _is_distributed(arguments: argparse.Namespace) -> bool:
    """Whether the arguments say that this is one of several processes of a run."""
    options = (getattr(arguments, name, None) for name in ("coordinator", "processes", "process"))
    return getattr(arguments, "distributed", False) or any(value is not None for value in options)


def _workers(arguments: argparse.Namespace, folder: Path | None = None) -> Any:
    """Returns the `jaxaudit.runtime.backends.Workers` to train with; None if this process trains.

    Args:
      arguments: the command's arguments.
      folder: an existing run. By default, workers have as many cores as it was planned for.
    """
    options = {"count": arguments.workers} | {name: getattr(arguments, name) for name in ("cpus", "gpus", "minutes")}
    if arguments.on is None:
        given = [name for name, value in options.items() if value is not None]
        if given:
            raise UserError(f"--{given[0].replace('count', 'workers')} describes workers and needs --on ENGINE")
        return None
    if _is_distributed(arguments):
        raise UserError(
            "--on trains lanes in workers that are independent of each other, and --distributed trains them in several "
            "processes together: use only one of the two"
        )
    from jaxaudit.runtime.backends import Workers

    if folder is not None and (planned := planned_threads(folder)):
        if options["cpus"] not in (None, planned):
            _note(
                f"the run was planned for workers of {planned} cores, not {options['cpus']}, so results may not be "
                "bitwise equal"
            )
        options["cpus"] = options["cpus"] or planned
    return Workers.parse(arguments.on, **options)


def _prepare(workers: Any, folder: Path | None = None, arguments: argparse.Namespace | None = None) -> None:
    """Prepares JAX for training in this process, or for handing out work to workers.

    Args:
      workers: what `_workers` has returned.
      folder: an existing run; this process then uses as many cores as it was planned for.
      arguments: the arguments of a command that several processes may run together, which are joined here.
    """
    if workers is not None:
        use_cpu_only()
        prepare_jax()
        return
    if folder is not None and (threads := planned_threads(folder)):
        claim_cores(threads)
    prepare_jax()
    if arguments is not None and _is_distributed(arguments):
        from jaxaudit.runtime import hosts

        hosts.join_processes(arguments.coordinator, arguments.processes, arguments.process)
        if not hosts.is_leader():  # only the first process prints
            sys.stdout, sys.stderr = io.StringIO(), io.StringIO()


def _quickstart(arguments: argparse.Namespace) -> int:
    name = f"quickstart_{arguments.which}.toml" if arguments.which else "quickstart.toml"
    text = importlib.resources.files("jaxaudit").joinpath(name).read_text(encoding="utf-8")
    if arguments.print_spec:
        print(text, end="")
        return 0
    from jaxaudit.spec.document import parse

    return _start(parse(text, name), arguments, map_is_for_cpus=True)


def _run(arguments: argparse.Namespace) -> int:
    from jaxaudit.spec.document import load

    if arguments.plan is not None:
        _check_run(arguments.plan)
    return _start(load(arguments.spec), arguments, arguments.plan)


def _start(spec: Any, arguments: argparse.Namespace, plan: Path | None = None, map_is_for_cpus: bool = False) -> int:
    workers = _workers(arguments, plan)
    _prepare(workers, plan, arguments)
    from jaxaudit.runs import lifecycle

    folder = arguments.out or Path("runs", spec.audit.slug)
    lifecycle.run(spec, folder, workers, plan, map_is_for_cpus)
    return _report_finished(folder)


def _resume(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    workers = _workers(arguments, arguments.folder)
    _prepare(workers, arguments.folder, arguments)
    from jaxaudit.runs import lifecycle

    lifecycle.resume(arguments.folder, workers)
    return _report_finished(arguments.folder)


def _fork(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    from jaxaudit.spec.document import load

    spec, workers = load(arguments.spec), _workers(arguments, arguments.folder)
    _prepare(workers, arguments.folder, arguments)
    from jaxaudit.runs import lifecycle

    out = arguments.out or Path("runs", spec.audit.slug)
    lifecycle.fork(arguments.folder, spec, out, workers)
    return _report_finished(out)


def _margin(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    from jaxaudit.runtime.errors import error_prefix
    from jaxaudit.spec.document import load

    spec, workers = load(arguments.spec) if arguments.spec else None, _workers(arguments, arguments.folder)
    _prepare(workers, arguments.folder)
    from jaxaudit.runs.margins.folder import search_margins
    from jaxaudit.runs.margins.search import MarginSettings

    with error_prefix("jaxaudit margin"):
        settings = MarginSettings(
            tolerance=arguments.tolerance,
            reach=arguments.reach,
            criterion=arguments.criterion,
            lanes=arguments.lanes,
        )
    print(search_margins(arguments.folder, spec, arguments.out, settings, workers))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from jaxaudit.runs.variants.folder import load

    comparison_spec, workers = load(arguments.spec), _workers(arguments)
    _prepare(workers)
    import json

    from jaxaudit.runs.variants.folder import compare_in

    out = arguments.out or Path("runs", comparison_spec.spec.audit.slug)
    comparison = compare_in(comparison_spec, out, workers)
    print(json.dumps(comparison.json(), indent=2) if arguments.json else comparison)
    _try_report(out, f"the comparison is stored in {out}", quiet=arguments.json)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    _prepare(None, arguments.folder)
    from jaxaudit.runs.replay import replay

    comparison = replay(arguments.folder, arguments.seed, arguments.condition)
    print(comparison)
    return 0 if comparison.equal else 1


def _report(arguments: argparse.Namespace) -> int:
    folder = arguments.folder
    if _is_comparison(folder):
        if not (folder / "compare.json").exists():
            raise UserError(f"the comparison in {folder} is not finished; continue it with the command that started it")
    else:
        _check_run(folder)
        if not (folder / "telemetry.zarr").exists():
            raise UserError(f"the run in {folder} has no telemetry yet, so there is nothing to report")
    if missing := _write_report(folder):
        raise UserError(f"the report cannot be drawn: {missing}")
    return 0


def _sample(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    from jaxaudit.cli.printing import sample

    print(sample(arguments.folder, arguments.seed, arguments.condition, arguments.step))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    _check_run(arguments.folder)
    _prepare(None, arguments.folder)
    from jaxaudit.runs.replay import export

    print(export(arguments.folder, arguments.out, arguments.seed, arguments.condition))
    return 0


def _detect(arguments: argparse.Namespace) -> int:
    for folder in arguments.folders:
        _check_run(folder)
    workers = _workers(arguments)
    prepare_jax()
    from jaxaudit.monitoring.comparison import DetectionSettings
    from jaxaudit.monitoring.detect import detect
    from jaxaudit.monitoring.detector import MonitorDetector
    from jaxaudit.monitoring.monitor import scorer
    from jaxaudit.runtime.errors import error_prefix

    with error_prefix("jaxaudit detect"):
        settings = DetectionSettings(folds=arguments.folds, alpha=arguments.alpha, fitted=arguments.fitted)
    detector = MonitorDetector(scorer(arguments.model))
    for folder in detect(arguments.folders, arguments.out, detector, settings, arguments.channels, workers):
        _report_detection(folder)
    return 0


def _monitor(arguments: argparse.Namespace) -> int:
    if arguments.model != MODELS[0]:  # the ensemble needs no JAX
        prepare_jax()
    from jaxaudit.monitoring.monitor_logs import Options, monitor_logs

    options = Options(arguments.channels, arguments.step, arguments.alpha, arguments.model)
    monitor_logs(arguments.files, arguments.clean, arguments.out, options)
    _report_detection(arguments.out)
    return 0


def _read(arguments: argparse.Namespace) -> int:
    import json

    from jaxaudit.logs import read
    from jaxaudit.logs.log import as_json, as_lines

    for path in arguments.files:
        log = read(path, arguments.step)
        for line in [json.dumps(as_json(log))] if arguments.json else as_lines(log):
            print(line)
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from jaxaudit.cli import printing

    for name in [arguments.what] if arguments.what else LISTS:
        if not arguments.what:
            print(f"{name}:")
        for line in getattr(printing, name)():
            print((line if arguments.what else f"  {line}").rstrip())
    return 0


def _schema(arguments: argparse.Namespace) -> int:
    use_cpu_only()
    import json

    from jaxaudit.runs.variants.schema import schema

    print(json.dumps(schema(), indent=1, allow_nan=False))
    return 0


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "quickstart": _quickstart,
    "run": _run,
    "resume": _resume,
    "fork": _fork,
    "margin": _margin,
    "replay": _replay,
    "report": _report,
    "sample": _sample,
    "export": _export,
    "compare": _compare,
    "detect": _detect,
    "monitor": _monitor,
    "read": _read,
    "list": _list,
    "schema": _schema,
}


def _check_run(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder" if folder.exists() else f"{folder}: there is no such folder")
    if not (folder / "spec.toml").is_file():
        raise UserError(f"{folder} is not a run's folder: it has no spec.toml")


def _is_comparison(folder: Path) -> bool:
    return (folder / "compare.toml").is_file()


def _report_finished(folder: Path) -> int:
    """Writes the report of a finished run; if several processes have trained it, only the first one does."""
    from jaxaudit.runtime import hosts

    if hosts.is_leader():
        _try_report(folder, f"the run is finished and stored in {folder}")
    return 0


def _try_report(folder: Path, achieved: str, quiet: bool = False) -> None:
    """Writes a report; if that fails, prints a note with what was achieved, as the command has still succeeded."""
    try:
        reason = _write_report(folder, quiet)
    except DrawingFailed as error:
        reason = str(error)
    if reason:
        command = shlex.join(["jaxaudit", "report", str(folder)])
        _note(f"{achieved}, but its report was not drawn: {reason}; draw it later with: {command}")


def _write_report(folder: Path, quiet: bool = False) -> str:
    """Writes the report of a run or a comparison; returns why that is impossible if packages are missing, or ""."""
    try:
        if _is_comparison(folder):
            from jaxaudit.report.comparison_page import build
        else:
            from jaxaudit.report import build
    except ImportError as error:
        return _missing_packages(error)
    page = build(folder)
    if not quiet:
        print(f"report: {page}")
    return ""


def _report_detection(folder: Path) -> None:
    """Writes the report of `detect` or `monitor`, or prints a note on why it cannot be drawn."""
    try:
        from jaxaudit.report.detection_page import build
    except ImportError as error:
        code = f"from jaxaudit.report.detection_page import build; build({str(folder)!r})"
        reason = f"{_missing_packages(error)}; draw it later in Python with: {code}"
    else:
        try:
            print(f"report: {build(folder)}")
            return
        except DrawingFailed as error:
            reason = str(error)
    _note(f"the results are stored in {folder}, but their report was not drawn: {reason}")


def _missing_packages(error: ImportError) -> str:
    """Returns which drawing packages are missing and how to install them; raises the error if it is this package's."""
    if (error.name or "").partition(".")[0] == "jaxaudit":
        raise error
    missing = [module for module in DRAWING_PACKAGES if importlib.util.find_spec(module) is None]
    if missing:
        reason = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
    else:
        reason = f"a package that draws figures and reports cannot be imported ({error})"
    requirements = [DRAWING_PACKAGES[module] for module in missing or DRAWING_PACKAGES]
    return f"{reason}; install with: pip install {shlex.join(requirements)}"


def _note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    entry()
