"""Build the report: figures as files, and the page that embeds them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from jaxaudit.report import critical, glossary, lines, probability, tables
from jaxaudit.report.output import write_figures, write_page
from jaxaudit.report.series import band_name, panels
from jaxaudit.report.verdict import verdict
from jaxaudit.stored import Run, load


def build(folder: Path) -> Path:
    """Write `report.html` and `figures/*.svg|png` into a run's folder, from what is stored there.

    Args:
      folder: a finished or partly finished run's folder.

    Returns:
      the page's path: one self-contained file that loads nothing.

    Raises:
      FileNotFoundError: the folder has no telemetry.
      ValueError: the telemetry has no performance channel.
    """
    run = load(Path(folder))
    groups = panels(run)
    figures: dict[str, Any] = {
        "performance": lines.performance(run, groups),
        "map": probability.collapse_map(run, groups),
        "dose": probability.dose_response(run, groups),
        "channels": lines.channels(run, groups),
    }
    _write_figures(run.folder / "figures", figures)
    return write_page(run.folder / "report.html", "page.html", **_context(run, figures))


def _write_figures(folder: Path, figures: dict[str, Any]) -> None:
    flat = [figures["performance"], figures["map"], figures["dose"], *figures["channels"]]
    write_figures(folder, [figure for figure in flat if figure is not None])


def _context(run: Run, figures: dict[str, Any]) -> dict[str, Any]:
    """What the template is filled with."""
    groups = panels(run)
    words = glossary.entries(
        run.setting("window", 50), run.setting("hold", 100), run.setting("horizon", 500), run.steps
    )
    return {
        "run": run,
        "env": run.environment,
        "banner": _banner(run),
        "verdict": verdict(run, groups),
        "keys": tables.key_numbers(run),
        "figures": figures,
        "criticals": _criticals(run, groups),
        "metrics": tables.conditions(run),
        "lanes": tables.lanes(run),
        "channels": tables.channels(run),
        "commands": _commands(run),
        "glossary": words,
        "band": band_name(run.seeds),
        "number": tables.number,
    }


def _banner(run: Run) -> str:
    if run.finished:
        return ""
    done = int(run.computed.max(initial=0))
    status = str(run.environment.get("status", "not finished"))
    status = "not finished" if status == "finished" else status
    behind = sorted({int(v) for v in run.computed})
    reach = f"step {done}" if len(behind) == 1 else f"between step {behind[0]} and step {behind[-1]}"
    return f"This run is {status}: its conditions reached {reach} of {run.steps}. All figures are provisional."


def _criticals(run: Run, groups: list[Any]) -> list[tuple[str, str, str]]:
    """(perturbation, P_div's critical magnitude, that of collapse at any time), in words."""
    found = []
    for panel in groups:
        early, ever = (critical.critical_of(run, panel, kind).text for kind in probability.KINDS)
        if early or ever:
            found.append((panel.title, early, ever))
    return found


def _commands(run: Run) -> list[tuple[str, str]]:
    folder = shlex.quote(run.folder.resolve().name)
    return [
        (f"jaxaudit replay {folder}", "run it again from the stored spec and compare bit by bit"),
        (f"jaxaudit resume {folder}", "go on where an interrupted run stopped"),
        (
            f"jaxaudit fork {folder} SPEC",
            "try new conditions from the stored onsets, paying only for what follows",
        ),
        (f"jaxaudit report {folder}", "make this page again"),
    ]
