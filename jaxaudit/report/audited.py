"""Builds the report of a run: its sections, figures and tables."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import Run, load
from jaxaudit.report import dialogue, glossary, lines, outcomes, probability
from jaxaudit.report.outcomes import rows
from jaxaudit.report.page import HANDLING, Block, Details, Page, Section, Summary, TextBlock
from jaxaudit.report.probability import fallen_controls
from jaxaudit.report.series import Panel, band_name, panels
from jaxaudit.report.tables import Cell, Column, Table, code, estimate, number, plain, table, word
from jaxaudit.report.verdict import verdict

COLUMNS = {
    "condition": "condition",
    "dimension": "dimension",
    "onset": "onset",
    "seeds": "seeds",
    "divergence_probability": "P_div",
    "collapse_probability": "collapse, any time",
    "excess_collapse_lost": "collapse, control stands",
    "excess_collapse_spared": "spared, control collapses",
    "excess_collapse_probability": "excess over the control",
    "acting_collapse_probability": "of acting",
    "iqm_final_performance": "final performance (IQM)",
    "paired_difference_final_performance": "difference to control",
    "recovery_rate_median": "R_rec",
    "recovery_time_median": "RT (steps)",
    "spike_intensity_median": "SIP",
}
LANE_COLUMNS = {
    "seed": "seed",
    "condition": "condition",
    "collapse_time": "T_c (step)",
    "collapse_censored": "censored",
    "acting_collapse_time": "T_c of acting",
    "recovery_rate": "R_rec",
    "recovery_time": "RT (steps)",
    "spike_intensity": "SIP",
    "performance_before": "J_pre",
    "performance_std_before": "sigma_pre",
    "performance_minimum": "J minimum",
    "final_performance": "J final",
    "reason": "why n/a",
}
TEXT = {"condition", "dimension", "reason", "why", "collapse_censored"}


def condition_table(run: Run) -> Table | None:
    """One row per condition, every population figure with its interval."""
    if run.summary is None:
        return None
    reasons = _reasons(run.metrics)
    notes: dict[str, int] = {}
    for text, _ in (given for name in run.summary["condition"] for given in reasons.get(str(name), [])):
        notes.setdefault(text, len(notes) + 1)

    def why(row: pd.Series) -> str:
        return "; ".join(text + share for text, share in reasons.get(str(row["condition"]), []))

    def marks(row: pd.Series) -> Cell:
        text = ", ".join(f"{notes[text]}{share}" for text, share in reasons.get(str(row["condition"]), []))
        return Cell(text, value=text)

    left_out = {"onset"} if run.conditions["onset"].nunique() == 1 else set()
    if not _controls_collapse(run.summary):
        left_out |= {"excess_collapse_probability", "excess_collapse_lost", "excess_collapse_spared"}
    columns = [_column(k, v, why) for k, v in COLUMNS.items() if k in run.summary and k not in left_out]
    columns += [Column("note", marks, numeric=False)] if notes else []
    return table(run.summary, columns, notes=tuple(notes))


def _controls_collapse(summary: pd.DataFrame) -> bool:
    standing = "excess_collapse_standing"
    return standing in summary and bool((summary[standing] < summary["seeds"]).any())


def lane_table(run: Run, limit: int = 600) -> Table | None:
    """One row per lane, for runs of at most `limit` lanes."""
    if run.metrics is None or len(run.metrics) > limit:
        return None
    shown = {k: v for k, v in LANE_COLUMNS.items() if k in run.metrics}
    return table(run.metrics, [_column(k, v, lambda row: str(row.get("reason", ""))) for k, v in shown.items()])


def _column(name: str, title: str, why) -> Column:
    if name in TEXT:
        return word(name, title, lambda raw: {"True": "yes", "False": "no", "nan": ""}.get(str(raw), str(raw)))
    show, ends = partial(number, name=name), partial(number, digits=3)
    return Column(title, lambda row: estimate(row, name, show, ends=ends, reason=why(row) or "not defined here"))


def _reasons(metrics: pd.DataFrame | None) -> dict[str, list[tuple[str, str]]]:
    """Per condition, the reasons its lanes give, each with its share of the seeds unless all give it."""
    if metrics is None or "reason" not in metrics:
        return {}
    found = {}
    for condition, lanes in metrics.groupby("condition", sort=False):
        given = lanes.loc[~lanes["reason"].isin(["", "nan"]), "reason"].str.split("; ").explode()
        found[str(condition)] = [
            (str(text), f" ({count} of {len(lanes)} seeds)" if count < len(lanes) else "")
            for text, count in given.value_counts(sort=False).items()
        ]
    return found


def critical_table(run: Run, groups: Sequence[Panel]) -> Table | None:
    """Returns a table of each perturbation's critical magnitudes, of P_div and of collapse at any time, in words.

    Where controls collapse, both again of the seeds whose control does not.
    """
    head = ["perturbation", "critical magnitude of P_div (collapse before T_max / 2)"]
    head += ["critical magnitude of collapse at any time"]
    columns = [(kind, False) for kind in probability.KINDS]
    if fallen_controls(run, groups) is not None:
        columns += [(kind, True) for kind in probability.KINDS]
        head += ["of P_div, where the control stands", "of collapse, where the control stands"]
    found = [
        (p.title, *(outcomes.critical_of(run, p, kind, standing=standing).text for kind, standing in columns))
        for p in groups
    ]
    rows = [(title, *(text or "not known" for text in texts)) for title, *texts in found if any(texts)]
    return plain(rows, tuple(head)) if rows else None


def channel_table(run: Run) -> Table:
    """Every stored channel with its dims and sizes."""
    sizes = run.telemetry.sizes
    stored = run.telemetry.data_vars.items()
    return plain((code(name), ", ".join(f"{d} {sizes[d]}" for d in values.dims)) for name, values in stored)


def environment_table(run: Run) -> Table:
    """Versions, device and times; what is grouped, last."""
    flat = [(key, value) for key, value in run.environment.items() if not isinstance(value, dict)]
    groups = [(key, group) for key, group in run.environment.items() if isinstance(group, dict)]
    return plain([*flat, *((f"{key}: {name}", value) for key, group in groups for name, value in group.items())])


MOST_PANELS = 12
"""In a figure; beyond, nobody finds their way through it."""

MOST_LINES = 12
"""Disturbed ones in a panel: more colours cannot be told apart."""

MOST_COLUMNS = 24
"""Magnitudes in a row of the map."""


def foremost(run: Run, groups: Sequence[Panel], most: int = MOST_PANELS) -> list[Panel]:
    """At most so many panels, in their order: those whose conditions collapse most seeds, then cost performance."""
    if len(groups) <= most:
        return list(groups)
    order = sorted(range(len(groups)), key=lambda place: _harm(run, groups[place]), reverse=True)
    return [groups[place] for place in sorted(order[:most])]


def _harm(run: Run, panel: Panel) -> tuple[float, float, float]:
    """The largest share of seeds that collapse beside their control, their sum, and the largest cost; or -inf."""
    found = rows(run, panel)
    share, change = (
        found[name].dropna() if name in found else np.empty(0)
        for name in ("lost_share", "paired_difference_final_performance")
    )
    if not len(share):
        return -np.inf, -np.inf, -np.inf
    return float(share.max()), float(share.sum()), float(-change.min()) if len(change) else -np.inf


def thinned(panel: Panel, most: int = MOST_LINES) -> Panel:
    """A panel with at most so many disturbed lines, evenly chosen from the weakest to the strongest."""
    disturbed = panel.disturbed
    if len(disturbed) <= most:
        return panel
    kept = {disturbed[place].key for place in np.linspace(0, len(disturbed) - 1, most).round().astype(int)}
    return replace(panel, lines=tuple(x for x in panel.lines if x.key in kept or x not in disturbed))


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
            [dose, critical_table(run, groups)] if dose else [],
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
    found, lanes = condition_table(run), lane_table(run)
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
    channels = channel_table(run)
    return [
        plain((code(command), why) for command, why in commands.items()),
        TextBlock(snippet),
        Details(f"Stored channels ({len(channels.rows)})", [channels]),
        Details("Environment", [environment_table(run)]),
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
