"""The table of a result with a heading, warnings and notes, as text or as compact HTML for notebooks.

The HTML has no scripts and loads nothing, and all text in it is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import pandas as pd
import xarray as xr

from jaxaudit.runtime.registry import align_columns

MAX_ROWS = 60
"""The most conditions in the table of an audit; the others are counted below it."""

MAX_UNBROKEN = 40
"""The most characters of a cell that are kept in one line."""

STYLE = """
.jaxaudit-result { font-size: 13px; line-height: 1.45; overflow-x: auto; }
.jaxaudit-result p { margin: 0.3em 0; max-width: 62em; }
.jaxaudit-result table { border-collapse: collapse; margin: 0.5em 0; width: auto; font-size: inherit; }
.jaxaudit-result th, .jaxaudit-result td {
  padding: 2px 12px 2px 0; text-align: left; vertical-align: baseline; border: none; background: none; }
.jaxaudit-result th { font-weight: 600; border-bottom: 1px solid rgba(128, 128, 128, 0.6); vertical-align: bottom; }
.jaxaudit-result td { white-space: nowrap; font-variant-numeric: tabular-nums; }
.jaxaudit-result td.words { white-space: normal; min-width: 10em; }
.jaxaudit-result small, .jaxaudit-result p.note { opacity: 0.75; font-size: 12px; }
.jaxaudit-result p.warning { border-left: 3px solid #c9a227; padding-left: 8px; }
"""
"""The style sheet of a block. It leaves colours to the page, which may be dark."""


@dataclass(frozen=True)
class TableCell:
    """A table cell: its text, and small print such as a confidence interval."""

    text: str
    small: str = ""


def number(value: float) -> str:
    """Returns a number with three significant digits; one from a thousand to a million is rounded to an integer."""
    text = "\N{INFINITY}" if math.isinf(value) else f"{abs(value):.3g}"
    if "e+" in text and abs(value) < 1e6:
        text = f"{abs(value):.0f}"
    return f"\N{MINUS SIGN}{text}" if value < 0 else text


def share(value: float) -> str:
    """Returns a share of seeds, or a difference of shares, with two decimals."""
    return f"\N{MINUS SIGN}{-value:.2f}" if value < 0 else f"{value:.2f}"


def count(size: int, noun: str) -> str:
    """Returns a number and a noun, such as "1 seed" or "8 seeds"."""
    return f"{size} {noun}" if size == 1 else f"{size} {noun}s"


@dataclass(frozen=True)
class ResultTable:
    """A table with what the reader has to know beside it.

    Attributes:
      heading: what the table is of.
      facts: a sentence that follows the heading.
      warnings: sentences on what the reader has to know before reading the table.
      titles: a title for each column.
      rows: the cells of each row.
      notes: sentences that explain the columns.
    """

    heading: str
    facts: str
    warnings: Sequence[str]
    titles: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    notes: Sequence[str]

    def text(self) -> str:
        """Returns the table as text with aligned columns, in which numbers are ASCII."""
        cells = [[" ".join(filter(None, (cell.text, cell.small))) for cell in row] for row in self.rows]
        lines = [f"{self.heading} {self.facts}", *(f"warning: {text}" for text in self.warnings)]
        text = "\n".join([*lines, "", *align_columns([self.titles, *cells]), "", *self.notes])
        return text.replace("\N{MINUS SIGN}", "-").replace("\N{INFINITY}", "inf")

    def html(self) -> str:
        """Returns the table as a block of HTML."""
        lines = ['<div class="jaxaudit-result">', f"<style>{STYLE}</style>"]
        lines.append(f"<p><b>{escape(self.heading)}</b> {escape(self.facts)}</p>")
        lines += [f'<p class="warning">Warning: {escape(text)}</p>' for text in self.warnings]
        lines += ["<table>", f"<thead><tr>{''.join(f'<th>{escape(title)}</th>' for title in self.titles)}</tr></thead>"]
        lines += [
            "<tbody>",
            *(f"<tr>{''.join(map(_cell_html, row))}</tr>" for row in self.rows),
            "</tbody>",
            "</table>",
        ]
        return "\n".join([*lines, *(f'<p class="note">{escape(text)}</p>' for text in self.notes), "</div>"])


def _cell_html(cell: TableCell) -> str:
    small = f" <small>{escape(cell.small)}</small>" if cell.small else ""
    words = ' class="words"' if len(cell.text) > MAX_UNBROKEN else ""
    return f"<td{words}>{escape(cell.text)}{small}</td>"


def audit_table(telemetry: xr.Dataset, summary: pd.DataFrame, warnings: Sequence[str]) -> ResultTable:
    """Returns the table of an audit, with one row for each condition.

    Args:
      telemetry: the telemetry, whose attributes name the learner and its performance.
      summary: the table of `results.summary_table`.
      warnings: sentences on what the reader has to know before reading the table.
    """
    seeds = telemetry.sizes["seed"]
    onsets = list(dict.fromkeys(int(onset) for onset in summary["onset"]))
    is_control = summary["perturbation"] == "control"
    controls_collapse = bool((summary.loc[is_control, "collapse_probability"] > 0).any())
    performance = str(telemetry.attrs.get("performance_name", "performance"))
    titles = ["condition", "onset", "share that collapses", "added to the control", f"final {performance}"]
    titles.append("difference from the control")
    rows = []
    for row in summary.head(MAX_ROWS).to_dict("records"):
        excess = _estimate(row, "excess_collapse_probability", share, seeds)
        difference = _estimate(row, "paired_difference_final_performance", number, seeds)
        is_disturbed = row["perturbation"] != "control"
        rows.append(
            [
                TableCell(str(row["condition"])),
                TableCell(str(row["onset"])),
                _estimate(row, "collapse_probability", share, seeds),
                excess if is_disturbed else TableCell(""),
                _estimate(row, "iqm_final_performance", number, seeds),
                difference if is_disturbed else TableCell(""),
            ]
        )
    shown = [i for i in range(len(titles)) if (i != 1 or len(onsets) > 1) and (i != 3 or controls_collapse)]
    notes = []
    if len(summary) > MAX_ROWS:
        notes.append(f"{count(len(summary) - MAX_ROWS, 'more condition')}: `summary` has all of them.")
    notes.append(
        "Collapse: performance falls out of the band that it had before the onset, and stays out. Final performance "
        "and its difference, paired by seed: interquartile means over seeds."
        + (" In brackets: 95% intervals." if seeds > 1 else "")
    )
    if controls_collapse:
        notes.append("Added to the control: the share of seeds that collapse, minus the share whose control collapses.")
    return ResultTable(
        f"Audit of {telemetry.attrs.get('learner', 'a learner')}:",
        _facts(telemetry, len(summary), onsets),
        warnings,
        [titles[i] for i in shown],
        [[row[i] for i in shown] for row in rows],
        notes,
    )


def _facts(telemetry: xr.Dataset, conditions: int, onsets: Sequence[int]) -> str:
    unit = str(telemetry.attrs.get("step_unit", "step"))
    steps = count(telemetry.sizes["step"], "step") + ("" if unit == "step" else f" of {unit}")
    shown = [str(onset) for onset in (onsets if len(onsets) <= 6 else onsets[:5])]
    shown += [f"{len(onsets) - 5} others"] if len(onsets) > 6 else []
    onset = f"{'onset at step' if len(onsets) == 1 else 'onsets at steps'} {', '.join(shown)}"
    return f"{count(telemetry.sizes['seed'], 'seed')}, {count(conditions, 'condition')}, {steps}; {onset}."


def _estimate(row: dict[Hashable, Any], name: str, formatter: Callable[[float], str], seeds: int) -> TableCell:
    """Returns the cell of an estimate with its interval, or with the reason why there is none."""
    value, low, high = (float(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if math.isnan(value):
        reasons = dict(part.split(": ", 1) for part in str(row["reason"]).split("; ") if ": " in part)
        return TableCell("n/a", reasons.get(name, ""))
    has_interval = seeds > 1 and not math.isnan(low) and not math.isnan(high)
    return TableCell(formatter(value), f"[{formatter(low)}, {formatter(high)}]" if has_interval else "")
