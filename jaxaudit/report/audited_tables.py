"""Tables of a run: metrics per condition and per lane, critical magnitudes, and what is stored."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd

from jaxaudit.analysis.run_reader import Run
from jaxaudit.report import critical, probability
from jaxaudit.report.series import Panel
from jaxaudit.report.tables import Cell, Column, Table, code, estimate, number, plain, table, word
from jaxaudit.report.undisturbed import fallen_controls

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


def conditions(run: Run) -> Table | None:
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


def lanes(run: Run, limit: int = 600) -> Table | None:
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
    for condition, rows in metrics.groupby("condition", sort=False):
        given = rows.loc[~rows["reason"].isin(["", "nan"]), "reason"].str.split("; ").explode()
        found[str(condition)] = [
            (str(text), f" ({count} of {len(rows)} seeds)" if count < len(rows) else "")
            for text, count in given.value_counts(sort=False).items()
        ]
    return found


def criticals(run: Run, groups: Sequence[Panel]) -> Table | None:
    """Of each perturbation P_div's critical magnitude and that of collapse at any time, in words.

    Where controls collapse, both again of the seeds whose control does not.
    """
    head = ["perturbation", "critical magnitude of P_div (collapse before T_max / 2)"]
    head += ["critical magnitude of collapse at any time"]
    columns = [(kind, False) for kind in probability.KINDS]
    if fallen_controls(run, groups) is not None:
        columns += [(kind, True) for kind in probability.KINDS]
        head += ["of P_div, where the control stands", "of collapse, where the control stands"]
    found = [
        (p.title, *(critical.critical_of(run, p, kind, standing=standing).text for kind, standing in columns))
        for p in groups
    ]
    rows = [(title, *(text or "not known" for text in texts)) for title, *texts in found if any(texts)]
    return plain(rows, tuple(head)) if rows else None


def channels(run: Run) -> Table:
    """Every stored channel with its dims and sizes."""
    sizes = run.telemetry.sizes
    stored = run.telemetry.data_vars.items()
    return plain((code(name), ", ".join(f"{d} {sizes[d]}" for d in values.dims)) for name, values in stored)


def environment(run: Run) -> Table:
    """Versions, device and times; what is grouped, last."""
    flat = [(key, value) for key, value in run.environment.items() if not isinstance(value, dict)]
    groups = [(key, group) for key, group in run.environment.items() if isinstance(group, dict)]
    return plain([*flat, *((f"{key}: {name}", value) for key, group in groups for name, value in group.items())])
