"""The report page of an audit: its sections, tables and glossary."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import Run, load
from jaxaudit.report import dialogue, outcomes, page, run_figures
from jaxaudit.report.line_panels import Panel, band_description, panels
from jaxaudit.report.verdict import verdict

MAX_LANES = 600
"""The most lanes whose metrics the page lists one by one."""

MAX_MAP_COLUMNS = 24
"""The most magnitudes in a row of the collapse map."""

COLUMNS = {
    "condition": "condition",
    "dimension": "dimension",
    "onset": "onset",
    "seeds": "seeds",
    "divergence_probability": "P_div",
    "collapse_probability": "collapse at any time",
    "excess_collapse_lost": "seeds that collapse, control survives",
    "excess_collapse_spared": "seeds that survive, control collapses",
    "excess_collapse_probability": "excess over control",
    "acting_collapse_probability": "collapse of acting performance",
    "iqm_final_performance": "final performance (IQM)",
    "paired_difference_final_performance": "difference to control",
    "recovery_rate_median": "recovery rate R_rec",
    "recovery_time_median": "recovery time RT (steps)",
    "spike_intensity_median": "spike intensity SIP",
}
"""The columns of the summary that are displayed, and their titles."""

PAIRED_COLUMNS = {"excess_collapse_probability", "excess_collapse_lost", "excess_collapse_spared"}
"""The columns that repeat others if no control collapses."""

LANE_COLUMNS = {
    "seed": "seed",
    "condition": "condition",
    "collapse_time": "collapse time T_c (step)",
    "collapse_censored": "censored",
    "acting_collapse_time": "T_c of acting performance",
    "recovery_rate": "R_rec",
    "recovery_time": "RT (steps)",
    "spike_intensity": "SIP",
    "performance_before": "J_pre",
    "performance_std_before": "sigma_pre",
    "performance_minimum": "minimum of J",
    "final_performance": "final J",
    "reason": "why n/a",
}
"""The columns of the lanes' metrics that are displayed, and their titles."""

TEXT_COLUMNS = {"condition", "dimension", "reason", "collapse_censored"}


SOURCE = (
    "Metrics follow Table S5 of \u201cTraining instability in deep learning follows low-dimensional dynamical "
    "principles\u201d, with the windows of this run."
)


def build(folder: Path) -> Path:
    """Writes `report.html`, `figures/*.svg` and `figures/*.png` into a run's folder, from what is stored there.

    Args:
      folder: the folder of a finished or partly finished run.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: the folder has no telemetry.
      ValueError: the telemetry has no performance channel.
    """
    run = load(Path(folder))
    groups = panels(run)
    findings = verdict(run, groups)
    learner, task = (run.spec.get(name) for name in ("learner", "task"))
    kind = learner.get("kind", "") if isinstance(learner, dict) else ""
    on_task = f" on {task['name']}" if isinstance(task, dict) and task.get("name") else ""
    windows = {name: run.setting(name, default) for name, default in (("window", 50), ("hold", 100), ("horizon", 500))}
    return page.Page(
        kicker="Stability audit",
        heading=run.name,
        about=f"{kind}{run.remedies}{on_task}",
        summary=page.Summary(findings.lead, findings.sentences, _unfinished_note(run), _key_numbers(run)),
        sections=_sections(run, groups),
        glossary=page.glossary("audit", **windows, half=run.steps / 2),
        source=SOURCE,
        version=str(run.environment.get("jaxaudit", "")),
    ).write(run.folder)


def _sections(run: Run, groups: Sequence[Panel]) -> list[page.Section]:
    drawn_panels = outcomes.most_harmful(run, groups)
    drawn = [outcomes.with_fewer_lines(panel) for panel in drawn_panels]
    dose_response = run_figures.dose_response(run, drawn_panels)
    channels: list[page.Block] = list(run_figures.channels(run, drawn))
    critical = critical_table(run, groups) if dose_response else None
    collapse_map = run_figures.collapse_map(run, [outcomes.with_fewer_lines(p, MAX_MAP_COLUMNS) for p in groups])
    performance = run_figures.performance(run, drawn)
    return [
        page.section("audit", "performance", page.INTERACTION, _omitted(groups, drawn_panels), performance),
        page.section("audit", "map", collapse_map),
        page.section("audit", "dose", dose_response, critical),
        *dialogue.sections(run, drawn),
        page.section("audit", "channels", *([_channels_hint(run), *channels] if channels else [])),
        page.section("audit", "metrics", *_metrics_blocks(run)),
        page.section("audit", "replay", *_data_blocks(run)),
    ]


def _omitted(groups: Sequence[Panel], drawn: Sequence[Panel]) -> str | None:
    """Returns which panels and magnitudes are not drawn, or None if all are."""
    sentences = []
    if len(drawn) < len(groups):
        sentences.append(
            f"The figures of performance, dose-response and channels show {len(drawn)} of {len(groups)} panels (a "
            "panel is one perturbation at one onset): those that collapse the most seeds, and after these the ones "
            "that lower final performance the most."
        )
    if any(len(panel.disturbed) > outcomes.MAX_LINES for panel in drawn):
        sentences.append(f"A panel shows at most {outcomes.MAX_LINES} magnitudes, from the weakest to the strongest.")
    return " ".join([*sentences, "The tables contain all of them."]) if sentences else None


def _channels_hint(run: Run) -> str:
    band = band_description(run.seeds)
    lines = f"Line: median over {run.seeds} seeds; band: {band}, of the seeds with a finite value."
    return (
        f"Step 0 is the onset. {lines if band else 'One seed: no band.'} Grey: the control. The panels of a figure "
        "share their legend and their zoom. Positive values over a wide range have a logarithmic axis."
    )


def critical_table(run: Run, groups: Sequence[Panel]) -> page.Table | None:
    """Returns a table of each perturbation's critical magnitudes, of P_div and of collapse at any time.

    If controls collapse, the table has both again for only the seeds whose control survives.
    """
    columns = {
        "critical magnitude of P_div (collapse before T_max / 2)": ("divergence_probability", False),
        "critical magnitude of collapse at any time": ("collapse_probability", False),
    }
    if outcomes.collapsed_controls(run, groups) is not None:
        columns |= {
            "P_div, where the control survives": ("divergence_probability", True),
            "collapse, where the control survives": ("collapse_probability", True),
        }
    rows = []
    for panel in groups:
        texts = [
            outcomes.critical_magnitude(run, panel, kind, surviving_controls=only).text
            for kind, only in columns.values()
        ]
        if any(texts):
            rows.append((panel.title, *(text or "unknown" for text in texts)))
    return page.plain_table(rows, ("perturbation", *columns)) if rows else None


def _metrics_blocks(run: Run) -> list[page.Block]:
    conditions = condition_table(run)
    if conditions is None:
        return []
    hint = Markup(
        "Small print: 95% intervals over seeds{}. R_rec, RT and SIP are medians over seeds. Click a heading to sort. "
        "Exact values: {}."
    ).format("" if run.seeds > 1 else " (none, as there is one seed)", page.code("summary.csv"))
    blocks: list[page.Block] = [hint, conditions]
    if (lanes := lane_table(run)) is not None:
        blocks.append(page.Details(f"Every lane ({len(lanes.rows)})", [lanes]))
    elif run.metrics is not None:
        blocks.append(
            Markup("The metrics of all {} lanes are in {}.").format(len(run.metrics), page.code("metrics.csv"))
        )
    return blocks


def condition_table(run: Run) -> page.Table | None:
    """Returns a table with one row per condition and the intervals of its metrics; None if there is no summary."""
    summary = run.summary
    if summary is None:
        return None
    reasons = _missing_reasons(run.metrics)
    notes: dict[str, int] = {}
    for reason, _ in (pair for name in summary["condition"] for pair in reasons.get(str(name), [])):
        notes.setdefault(reason, len(notes) + 1)

    def tooltip(row: pd.Series) -> str:
        return "; ".join(reason + share for reason, share in reasons.get(str(row["condition"]), []))

    def note_numbers(row: pd.Series) -> page.Cell:
        text = ", ".join(f"{notes[reason]}{share}" for reason, share in reasons.get(str(row["condition"]), []))
        return page.Cell(text, value=text)

    survivors = "excess_collapse_standing"
    omitted = {"onset"} if run.conditions["onset"].nunique() == 1 else set()
    if survivors not in summary or not (summary[survivors] < summary["seeds"]).any():
        omitted |= PAIRED_COLUMNS
    columns = [
        _column(name, title, tooltip) for name, title in COLUMNS.items() if name in summary and name not in omitted
    ]
    columns += [page.Column("note", note_numbers, numeric=False)] if notes else []
    return page.table(summary, columns, notes=tuple(notes))


def lane_table(run: Run) -> page.Table | None:
    """Returns a table with one row per lane: seed, condition, and the metrics of the lane.

    Its columns are those of `LANE_COLUMNS` that the run's metrics have. None if the run has no metrics, or more than
    `MAX_LANES` lanes.
    """
    if run.metrics is None or len(run.metrics) > MAX_LANES:
        return None
    columns = {name: title for name, title in LANE_COLUMNS.items() if name in run.metrics}
    return page.table(
        run.metrics, [_column(name, title, lambda row: str(row.get("reason", ""))) for name, title in columns.items()]
    )


def _column(name: str, title: str, tooltip: Callable[[pd.Series], str]) -> page.Column:
    if name in TEXT_COLUMNS:
        return page.text_column(
            name, title, lambda raw: {"True": "yes", "False": "no", "nan": ""}.get(str(raw), str(raw))
        )
    formatter, interval_formatter = partial(page.number, name=name), partial(page.number, digits=3)

    def cell(row: pd.Series) -> page.Cell:
        reason = tooltip(row) or "not defined here"
        return page.estimate(row, name, formatter, interval_formatter=interval_formatter, reason=reason)

    return page.Column(title, cell)


def _missing_reasons(metrics: pd.DataFrame | None) -> dict[str, list[tuple[str, str]]]:
    """Returns why metrics are missing, by condition: each reason with its share of the seeds unless all have it."""
    if metrics is None or "reason" not in metrics:
        return {}
    reasons = {}
    for condition, lanes in metrics.groupby("condition", sort=False):
        stated = lanes.loc[~lanes["reason"].isin(["", "nan"]), "reason"].str.split("; ").explode()
        reasons[str(condition)] = [
            (str(reason), f" ({count} of {len(lanes)} seeds)" if count < len(lanes) else "")
            for reason, count in stated.value_counts(sort=False).items()
        ]
    return reasons


def _data_blocks(run: Run) -> list[page.Block]:
    folder = shlex.quote(run.folder.resolve().name)
    commands = {
        f"jaxaudit replay {folder}": "run it again from the stored spec and compare the results bit for bit",
        f"jaxaudit resume {folder}": "continue an interrupted run where it stopped",
        f"jaxaudit fork {folder} SPEC": "train other conditions from the states stored at the onsets",
        f"jaxaudit report {folder}": "write this page again",
    }
    first = json.dumps(run.conditions["condition"].iloc[0])
    snippet = f"""import pandas, xarray

telemetry = xarray.open_zarr("telemetry.zarr")  # dims: seed, condition, step
metrics = pandas.read_csv("metrics.csv")        # one row per lane
telemetry.performance.sel(condition={first}).median("seed").to_series()"""
    sizes = run.telemetry.sizes
    channels = [
        (page.code(name), ", ".join(f"{dim} {sizes[dim]}" for dim in values.dims))
        for name, values in run.telemetry.data_vars.items()
    ]
    return [
        page.plain_table((page.code(command), purpose) for command, purpose in commands.items()),
        page.TextBlock(snippet),
        page.Details(f"Stored channels ({len(channels)})", [page.plain_table(channels)]),
        page.Details("Environment", [environment_table(run)]),
        *([page.Details("Full spec", [page.TextBlock(run.spec_text)])] if run.spec_text else []),
    ]


def environment_table(run: Run) -> page.Table:
    """Returns a table of versions, device and times; nested entries come last."""
    flat = [(key, value) for key, value in run.environment.items() if not isinstance(value, dict)]
    nested = [
        (f"{key}: {name}", value)
        for key, group in run.environment.items()
        if isinstance(group, dict)
        for name, value in group.items()
    ]
    return page.plain_table([*flat, *nested])


def _unfinished_note(run: Run) -> list[str]:
    if run.finished:
        return []
    status = str(run.environment.get("status", "not finished"))
    status = "not finished" if status == "finished" else status
    first, last = int(run.computed.min(initial=run.steps)), int(run.computed.max(initial=0))
    reached = f"step {last}" if first == last else f"between step {first} and step {last}"
    return [f"This run is {status}: its conditions reached {reached} of {run.steps}. All results are provisional."]


def _key_numbers(run: Run) -> list[tuple[str, str]]:
    environment = run.environment
    conditions = run.telemetry.sizes["condition"]
    keys = [
        ("lanes", f"{run.seeds * conditions}"),
        ("seeds", f"{run.seeds}"),
        ("conditions", f"{conditions}"),
        ("steps", f"{run.steps}"),
    ]
    if _is_number(environment.get("samples")) and environment["samples"]:
        keys.append((str(environment.get("sample", "samples")), _with_prefix(environment["samples"])))
    if _is_number(environment.get("wall_seconds")):
        keys.append(("wall time", _duration(environment["wall_seconds"])))
    if _is_number(environment.get("compile_seconds")):
        keys.append(("of which compiling", _duration(environment["compile_seconds"])))
    if environment.get("device_kind"):
        devices = environment.get("devices")
        count = f"{devices} \N{MULTIPLICATION SIGN} " if isinstance(devices, int) and devices > 1 else ""
        keys.append(("device", f"{count}{environment['device_kind']}"))
    return keys


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _with_prefix(value: float) -> str:
    """Returns a large count with a unit prefix: 4300800 is "4.3 M"."""
    for threshold, scale, prefix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= threshold:
            return f"{value / scale:.3g} {prefix}"
    return f"{value:g}"


def _duration(seconds: float) -> str:
    """Returns a time such as "2 min 3 s"."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
