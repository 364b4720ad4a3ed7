"""Figures and the script of a page, drawn by a process of its own (`vega_process.py`)."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxaudit.report import style
from jaxaudit.report.panel import Figure
from jaxaudit.runtime.errors import Undrawn, UserError
from jaxaudit.runtime.files import UNFINISHED, claimed, locked, names, remove

if importlib.util.find_spec("vl_convert") is None:  # imported where it draws, but missed here
    raise ModuleNotFoundError("No module named 'vl_convert'", name="vl_convert")

_UNDRAWABLE = re.compile(r"(\\\\)|\\u(?:00[01][0-9a-f]|fff[ef])")
"""Escapes in JSON of characters that an SVG, being XML, may not have (and, to be kept, backslashes)."""

PROGRAM = Path(__file__).with_name("vega_process.py")


def write_figures(folder: Path, figures: Iterable[Figure]) -> None:
    """Writes every figure as `folder/*.svg` and `*.png`, and removes those of figures that there are no more.

    A figure's two files are known by their common name; other files in the folder are left alone.

    Raises:
      Undrawn: the process that draws has failed; the files are as they were.
    """
    folder.mkdir(exist_ok=True)
    _remove_leftovers(folder)
    place = folder.with_name(f"{UNFINISHED}{os.getpid()}-{folder.name}")
    with claimed(place):
        _draw(place, ({"file": one.file, "spec": style.static(one.spec, one.title)} for one in figures))
        drawn = set(names(place))
        earlier = {path.name for path in folder.glob("*.svg") if path.with_suffix(".png").is_file()}
        for name in sorted(drawn):
            os.replace(place / name, folder / name)
    for name in earlier - drawn:
        (folder / name).unlink()
        (folder / name).with_suffix(".png").unlink()


def _remove_leftovers(folder: Path) -> None:
    """Removes the unfinished figures of killed processes. Processes that are drawing hold a lock on theirs."""
    for place in folder.parent.glob(f"{UNFINISHED}*-{folder.name}"):
        if place.is_dir():
            with suppress(UserError, OSError), locked(place, "these figures"):
                remove(place)


@functools.cache
def script() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script.

    Raises:
      Undrawn: the process that makes it has failed.
    """
    with tempfile.TemporaryDirectory() as place:
        _draw(Path(place), [{"bundle": "vega.js"}])
        return (Path(place) / "vega.js").read_text(encoding="utf-8")


def _draw(folder: Path, asked: Iterable[Mapping[str, Any]]) -> None:
    """Has a process draw what is asked for into a folder; each is made while the one before is drawn."""
    command = [sys.executable, "-P", str(PROGRAM), str(folder)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdin is not None
        try:
            for one in asked:
                process.stdin.write(_UNDRAWABLE.sub(lambda found: found[1] or r"\ufffd", json.dumps(one)) + "\n")
                process.stdin.flush()
            process.stdin.close()
            code = process.wait()
        except BrokenPipeError:
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if code < 0:
        raise Undrawn(f"the process that draws figures was ended by {signal.Signals(-code).name}: is memory short?")
    if code:
        raise Undrawn(f"the process that draws figures failed ({said[-1] if said else f'exit code {code}'})")
