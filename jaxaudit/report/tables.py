"""The report's tables: metrics per condition and per lane, key numbers, stored channels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from jaxaudit.stored import Run

NEVER = {"collapse_time", "recovery_time", "recovery_time_median"}
COLUMNS = {
    "condition": "condition",
    "dimension": "dimension",
    "onset": "onset",
    "seeds": "seeds",
    "divergence_probability": "P_div",
    "collapse_probability": "collapse, any time",
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


@dataclass(frozen=True)
class Cell:
    """A table cell: what it shows, its interval, the exact value it sorts by, and why it is empty."""

    text: str
    interval: str = ""
    value: str = ""
    reason: str = ""


@dataclass(frozen=True)
class Table:
    """Column headings, whether each is a number, the rows, numbered notes to them, and the row that stands out."""

    head: list[tuple[str, bool]]
    rows: list[list[Cell]]
    notes: tuple[str, ...] = ()
    marked: int | None = None


def number(value: float, name: str = "", digits: int = 4) -> str:
    """A number with a few significant digits, in words where it stands for something."""
    if math.isnan(value):
        return "n/a"
    if name in NEVER and value == math.inf:
        return "never"
    if name.startswith("recovery_time") and value == -1:
        return "no delay"
    if math.isinf(value):
        return ("" if value > 0 else "\N{MINUS SIGN}") + "\N{INFINITY}"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value)}".replace("-", "\N{MINUS SIGN}")
    text = f"{value:.{digits}g}"
    if abs(value) < 1e6 and "e+" in text:
        text = f"{float(text):.0f}"
    return text.replace("-", "\N{MINUS SIGN}")


def conditions(run: Run) -> Table | None:
    """One row per condition, every population figure with its interval."""
    if run.summary is None:
        return None
    shown = {k: v for k, v in COLUMNS.items() if k in run.summary}
    if run.conditions["onset"].nunique() == 1:
        shown.pop("onset", None)
    reasons = _reasons(run.metrics)
    notes: dict[str, int] = {}
    rows = []
    for _, row in run.summary.iterrows():
        given = reasons.get(str(row.get("condition", "")), [])
        cells = [_cell(row, name, "; ".join(text + share for text, share in given)) for name in shown]
        marks = ", ".join(f"{notes.setdefault(text, len(notes) + 1)}{share}" for text, share in given)
        rows.append([*cells, Cell(marks, value=marks)])
    head = [(v, k not in TEXT) for k, v in shown.items()]
    if not notes:
        return Table(head, [row[:-1] for row in rows])
    return Table([*head, ("note", False)], rows, tuple(notes))


def lanes(run: Run, limit: int = 600) -> Table | None:
    """One row per lane, for runs of at most `limit` lanes."""
    if run.metrics is None or len(run.metrics) > limit:
        return None
    shown = {k: v for k, v in LANE_COLUMNS.items() if k in run.metrics}
    rows = [[_cell(row, name, str(row.get("reason", ""))) for name in shown] for _, row in run.metrics.iterrows()]
    return Table([(v, k not in TEXT) for k, v in shown.items()], rows)


def _cell(row: pd.Series, name: str, why: str) -> Cell:
    raw = row[name]
    if name in TEXT:
        text = {"True": "yes", "False": "no", "nan": ""}.get(str(raw), str(raw))
        return Cell(text, value=text)
    value = float(raw)
    low, high = (float(row.get(f"{name}_{end}", np.nan)) for end in ("low", "high"))
    interval = "" if math.isnan(low) or math.isnan(high) else f"{number(low, digits=3)} to {number(high, digits=3)}"
    reason = (why or "not defined here") if math.isnan(value) else ""
    return Cell(number(value, name), interval, "" if math.isnan(value) else repr(value), reason)


def _reasons(metrics: pd.DataFrame | None) -> dict[str, list[tuple[str, str]]]:
    """Per condition, the reasons its lanes give, each with its share of the seeds unless all give it."""
    if metrics is None or "reason" not in metrics:
        return {}
    found = {}
    for condition, rows in metrics.groupby("condition", sort=False):
        given = rows.loc[~rows["reason"].isin(["", "nan"]), "reason"].str.split("; ").explode()
        found[str(condition)] = [
            (str(text), f" ({count} of {len(rows)} seeds)" if count < len(rows) else "")
            for text, count in given.value_counts(sort=False).items()
        ]
    return found


def key_numbers(run: Run) -> list[tuple[str, str]]:
    """The strip under the headline: (label, value)."""
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


def channels(run: Run) -> list[tuple[str, str]]:
    """Every stored channel with its dims and sizes."""
    sizes = run.telemetry.sizes
    return [
        (str(name), ", ".join(f"{d} {sizes[d]}" for d in values.dims))
        for name, values in run.telemetry.data_vars.items()
    ]
