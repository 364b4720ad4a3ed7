"""The report of a run."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from jaxaudit.analysis.run_reader import Run, load
from jaxaudit.report import audited_tables, dialogue, glossary, lines, probability
from jaxaudit.report.chosen import MOST_COLUMNS, MOST_LINES, foremost, thinned
from jaxaudit.report.page import HANDLING, Block, Details, Page, Section, Summary, TextBlock
from jaxaudit.report.series import Panel, band_name, panels
from jaxaudit.report.tables import code, plain
from jaxaudit.report.verdict import verdict

SOURCE = (
    "Metrics after Table S5 of \u201cTraining instability in deep learning follows low-dimensional dynamical "
    "principles\u201d, with the windows of this run."
)


def build(folder: Path) -> Path:
    """Write `report.html` and `figures/*.svg|png` into a run's folder, from what is stored there.

    Args:
      folder: a finished or partly finished run's folder.

    Returns:
      the page's path.

    Raises:
      FileNotFoundError: the folder has no telemetry.
      ValueError: the telemetry has no performance channel.
    """
    run = load(Path(folder))
    groups = panels(run)
    said = verdict(run, groups)
    learner, task = (run.spec.get(name) for name in ("learner", "task"))
    kind = learner.get("kind", "") if isinstance(learner, dict) else ""
    on = f" on {task['name']}" if isinstance(task, dict) and task.get("name") else ""
    words = glossary.entries(
        run.setting("window", 50), run.setting("hold", 100), run.setting("horizon", 500), run.steps
    )
    return Page(
        kicker="Stability audit",
        heading=run.name,
        about=f"{kind}{run.remedies}{on}",
        summary=Summary(said.lead, said.sentences, _unfinished(run), _key_numbers(run)),
        sections=_sections(run, groups),
        glossary=words,
        source=SOURCE,
        version=str(run.environment.get("jaxaudit", "")),
    ).write(run.folder)


def _sections(run: Run, groups: Sequence[Panel]) -> list[Section]:
    band, groups = band_name(run.seeds), list(groups)
    chosen = foremost(run, groups)
    drawn = [thinned(panel) for panel in chosen]
    dose = probability.dose_response(run, chosen)
    channels: list[Block] = list(lines.channels(run, drawn))
    if channels:
        many = f"Line: median over {run.seeds} seeds; band: {band}, over the seeds with a finite value."
        hint = f"Step 0 is the injection. {many if band else 'One seed: no band.'} Grey: the control. Panels of a row "
        channels.insert(0, hint + "share their legend and their zoom. Wide positive ranges have a logarithmic axis.")
    return [
        Section(
            "performance",
            "Performance around the onset",
            "Performance",
            [HANDLING, _left_out(groups, chosen), lines.performance(run, drawn)],
        ),
        Section(
            "map",
            "Which disturbance, how strong, collapses how many seeds",
            "Collapse map",
            [probability.collapse_map(run, [thinned(panel, MOST_COLUMNS) for panel in groups])],
        ),
        Section(
            "dose",
            "Dose-response: the critical magnitude",
            "Dose-response",
            [dose, audited_tables.criticals(run, groups)] if dose else [],
        ),
        *dialogue.sections(run, drawn),
        Section("channels", "Channels around the injection", "Channels", channels),
        Section("metrics", "Metrics per condition", "Metrics", _metrics(run, band)),
        Section("replay", "Replay, resume, analyse", "Replay", _replay(run)),
    ]


def _left_out(groups: Sequence[Panel], chosen: Sequence[Panel]) -> str | None:
    """What of many panels and magnitudes is not drawn; None where all is."""
    told = []
    if len(chosen) < len(groups):
        told.append(
            f"Drawn here, and in the figures of dose-response and channels, are {len(chosen)} of {len(groups)} panels, "
            "a perturbation at an onset each: those that collapse most seeds, or else cost most final performance."
        )
    if any(len(panel.disturbed) > MOST_LINES for panel in chosen):
        told.append(f"A panel has {MOST_LINES} magnitudes at most, from the weakest to the strongest.")
    return " ".join([*told, "The tables have all of them."]) if told else None


def _metrics(run: Run, band: str) -> list[Block]:
    found, lanes = audited_tables.conditions(run), audited_tables.lanes(run)
    if found is None:
        return []
    hint = Markup(
        "Small print: 95% intervals over seeds{}. R_rec, RT and SIP are medians over seeds. Click a heading to sort. "
        "Exact values: {}."
    ).format("" if band else " (none: one seed)", code("summary.csv"))
    blocks: list[Block] = [hint, found]
    if lanes is not None:
        blocks.append(Details(f"Every lane ({len(lanes.rows)})", [lanes]))
    elif run.metrics is not None:
        blocks.append(Markup("{} lanes: see {}.").format(len(run.metrics), code("metrics.csv")))
    return blocks


def _replay(run: Run) -> list[Block]:
    folder = shlex.quote(run.folder.resolve().name)
    commands = {
        f"jaxaudit replay {folder}": "run it again from the stored spec and compare bit by bit",
        f"jaxaudit resume {folder}": "go on where an interrupted run stopped",
        f"jaxaudit fork {folder} SPEC": "try new conditions from the stored onsets, paying only for what follows",
        f"jaxaudit report {folder}": "make this page again",
    }
    first = json.dumps(run.conditions["condition"].iloc[0])
    snippet = f"""import pandas, xarray

telemetry = xarray.open_zarr("telemetry.zarr")  # dims: seed, condition, step
metrics = pandas.read_csv("metrics.csv")        # one row per lane
telemetry.performance.sel(condition={first}).median("seed").to_series()"""
    channels = audited_tables.channels(run)
    return [
        plain((code(command), why) for command, why in commands.items()),
        TextBlock(snippet),
        Details(f"Stored channels ({len(channels.rows)})", [channels]),
        Details("Environment", [audited_tables.environment(run)]),
        *([Details("Full spec", [TextBlock(run.spec_text)])] if run.spec_text else []),
    ]


def _unfinished(run: Run) -> list[str]:
    if run.finished:
        return []
    done = int(run.computed.max(initial=0))
    status = str(run.environment.get("status", "not finished"))
    status = "not finished" if status == "finished" else status
    behind = sorted({int(v) for v in run.computed})
    reach = f"step {done}" if len(behind) == 1 else f"between step {behind[0]} and step {behind[-1]}"
    return [f"This run is {status}: its conditions reached {reach} of {run.steps}. All figures are provisional."]


def _key_numbers(run: Run) -> list[tuple[str, str]]:
    env = run.environment
    count = run.telemetry.sizes["condition"]
    found = [
        ("lanes", f"{run.seeds * count}"),
        ("seeds", f"{run.seeds}"),
        ("conditions", f"{count}"),
        ("steps", f"{run.steps}"),
    ]
    if _is_number(env.get("samples")):
        found.append((str(env.get("sample", "samples")), short(env["samples"])))
    if _is_number(env.get("wall_seconds")):
        found.append(("wall time", duration(env["wall_seconds"])))
    if _is_number(env.get("compile_seconds")):
        found.append(("of it compiling", duration(env["compile_seconds"])))
    if env.get("device_kind"):
        devices = env.get("devices")
        many = f"{devices} \N{MULTIPLICATION SIGN} " if isinstance(devices, int) and devices > 1 else ""
        found.append(("device", f"{many}{env['device_kind']}"))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def short(value: float) -> str:
    """A large count with a unit prefix: 4300800 is "4.30 M"."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{value / scale:.3g} {unit}"
    return f"{value:g}"


def duration(seconds: float) -> str:
    """Seconds in words: "2 min 3 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
