"""The report page of a comparison of detectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from jaxaudit.analysis.run_reader import read_table
from jaxaudit.monitoring.comparison import CLEAN, best_chart
from jaxaudit.monitoring.transfer import AS_IT_IS, OWN, RECALIBRATED, RESTANDARDISED, UNTRAINED
from jaxaudit.report import monitoring_page, page, score_figures, style
from jaxaudit.runtime import array_store
from jaxaudit.runtime.files import check_contents, read_object

SINGLE_CHANNEL = "deviation of "
"""The prefix of the names of detectors that are one channel's distance from clean runs."""

MAX_SINGLE_CHANNELS = 10
"""The most of these detectors that are always visible: the best ones."""

MAX_BASELINES = 1
"""The most baselines beside the monitor in the table by condition, so that it stays legible."""

COMPARISON = "comparison.json"

TRANSFER = "transfer.csv"
"""The results of monitors fitted to other learners, in the folder that holds the learners' folders."""

METHODS = {
    OWN: "fitted and calibrated on its own clean lanes",
    AS_IT_IS: "unchanged",
    RECALIBRATED: "threshold calibrated on its own clean lanes",
    RESTANDARDISED: "only the model's parameters are kept; scale, envelopes and threshold from its own clean lanes",
    UNTRAINED: "random parameters; all else from its own clean lanes",
}
"""How a monitor is applied to a learner that it was not fitted to."""


def _lead_time(value: float) -> str:
    return "no alarm" if value == -math.inf else page.number(value)


def _lead_time_gain(value: float) -> str:
    return ("+" if value > 0 else "") + page.number(value)


FIGURES: dict[str, tuple[str, page.Formatter]] = {
    "auroc": ("AUROC", page.probability),
    "gain_auroc": ("monitor's gain in AUROC", page.signed),
    "false_alarms": ("false alarms per clean run", page.percent),
    "detected": ("detected", page.percent),
    "lead_time": ("lead time (steps)", _lead_time),
    "gain_lead_time": ("monitor's gain in lead time", _lead_time_gain),
}
"""The columns of `detectors.csv` that are displayed, with their titles and formats."""

DETECTORS_HINT = Markup(
    "Every detector is tested on lanes that it was neither fitted to nor calibrated on. Small print: 95% intervals. "
    "Gains are the monitor's value minus the detector's. Click a heading to sort. Exact values: "
    "<code>detectors.csv</code>."
)
CONDITIONS_HINT = Markup(
    "The table compares the monitor with the best baseline. AUROC: the condition's lanes against the clean ones. Small "
    "print: 95% intervals. Other detectors: <code>conditions.csv</code>."
)
TRANSFER_HINT = Markup(
    "All monitors read only the channels that all learners have. Gain: the AUROC of the monitor fitted to this "
    "learner's own lanes minus the row's, on the same lanes. Small print: 95% intervals. Exact values: "
    "<code>transfer.csv</code>."
)


def build(folder: Path) -> Path:
    """Writes `report.html`, `figures/*.svg` and `figures/*.png` for compared detectors or for monitored runs.

    Args:
      folder: the folder that `jaxaudit detect` or `jaxaudit monitor` wrote.

    Returns:
      The path of the page.

    Raises:
      FileNotFoundError: the folder has the results of neither command.
      UserError: something in the folder is damaged, or a link.
    """
    folder = Path(folder)
    check_contents(folder)
    if (folder / monitoring_page.ABOUT).exists():
        return monitoring_page.build(folder)
    paths = [folder / COMPARISON] if (folder / COMPARISON).exists() else sorted(folder.glob(f"*/{COMPARISON}"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} contains neither compared detectors ({COMPARISON}) nor monitored runs "
            f"({monitoring_page.ABOUT}), so there is nothing to report"
        )
    is_alone = len(paths) == 1
    parts = [_part(path.parent.resolve(), f"learner-{n}", is_alone) for n, path in enumerate(paths, 1)]
    name, summary, _ = parts[0]
    return page.Page(
        kicker="Detectors compared",
        heading=name if is_alone else f"Detectors on {len(parts)} learners",
        summary=summary if is_alone else None,
        sections=[section for _, _, sections in parts for section in sections],
        glossary=page.glossary("detection"),
    ).write(folder)


def _part(folder: Path, part: str, is_alone: bool) -> tuple[str, page.Summary, list[page.Section]]:
    """Returns a learner's name, its summary and its sections.

    If it is not alone, a section with the summary comes first, and only that one is in the navigation bar.

    Args:
      folder: the folder with the learner's results.
      part: the prefix of the sections' ids.
      is_alone: whether the page is about this learner only.
    """
    about = read_object(folder / COMPARISON)
    slug = style.slug(folder.name)
    name, monitor = str(about.get("learner") or slug), str(about.get("monitor", ""))
    sections: list[page.Section] = []

    def add(id: str, *blocks: page.Block | None) -> None:
        sections.append(page.section("detection", id, *blocks, prefix=f"{part}-", is_listed=is_alone))

    detectors = read_table(folder / "detectors.csv", ("detector", "family"))
    if detectors is not None:
        detectors = detectors.sort_values("auroc", ascending=False, kind="stable")
        single = detectors["detector"].str.startswith(SINGLE_CHANNEL)
        hidden = single & (single.cumsum() > MAX_SINGLE_CHANNELS)
        more = page.Details(f"Further single channels ({hidden.sum()})", [detector_table(detectors[hidden], monitor)])
        add("detectors", DETECTORS_HINT, detector_table(detectors[~hidden], monitor), more if hidden.any() else None)
    conditions = read_table(folder / "conditions.csv", ("condition", "perturbation"))
    if conditions is not None and (names := detectors_by_condition(conditions)):
        names.sort(key=lambda detector: detector != monitor)
        shares = score_figures.detection_map(conditions, monitor, names, slug)
        compared = condition_table(conditions, names[: MAX_BASELINES + (names[0] == monitor)])
        add("conditions", shares, CONDITIONS_HINT, compared)
    transfer = read_table(folder.parent / TRANSFER, ("tested", "fitted_to", "way"))
    if transfer is not None and (tested := transfer["tested"] == about.get("learner")).any():
        add("transfer", TRANSFER_HINT, transfer_table(transfer[tested]))
    store = folder / "trajectories.zarr"
    if store.exists():
        array_store.check(store)
        data = array_store.open_dataset(store)
        if figure := score_figures.around_onset(data, slug):
            add("onset", page.INTERACTION, figure)
        add("latents", score_figures.latent_trajectories(data, slug))
    runs = page.collapsed_list("Runs compared", about.get("runs"))
    channels = page.collapsed_list("Channels", about.get("channels"))
    sections.append(page.Section(f"{part}-about", "", "", "", [runs, channels]))
    summary = _summary(about, detectors, monitor)
    if is_alone:
        return name, summary, sections
    return name, summary, [page.Section(part, name, name, "", [summary], is_part=True), *sections]


def _summary(about: dict[str, Any], detectors: pd.DataFrame | None, monitor: str) -> page.Summary:
    labels = {
        "clean": "clean lanes",
        "disturbed": "disturbed lanes",
        "collapsing_controls": "controls that collapse",
        "steps": "steps",
        "folds": "folds",
    }
    keys = [(label, f"{about[key]}") for key, label in labels.items() if about.get(key)]
    if detectors is not None:
        keys.append(("detectors", f"{len(detectors)}"))
    if "channels" in about:
        keys.append(("channels", f"{len(about['channels'])}"))
    return page.Summary(verdict(detectors, monitor, about.get("alpha"), about.get("clean")), keys=keys)


def verdict(rows: pd.DataFrame | None, monitor: str, alpha: float | None, n_clean: int | None) -> Markup:
    """Returns which detector is best, how the monitor compares with the best baselines, and its false alarms.

    Args:
      rows: the rows of `detectors.csv`, with the highest AUROC first.
      monitor: the monitor's name.
      alpha: the false alarms per clean run that were allowed.
      n_clean: the number of clean runs.
    """
    if rows is None or rows["auroc"].isna().all():
        return Markup("No detector has an AUROC yet, so there is no verdict.")
    best = rows.iloc[0]
    text = Markup("<b>{}</b> has the highest AUROC, {:.3f}{}.").format(
        best["detector"], best["auroc"], _interval(best, "auroc", page.probability)
    )
    own, baselines = rows[rows["detector"] == monitor], rows[rows["detector"] != monitor]
    if own.empty:
        return text
    if len(baselines):
        text += _gain_over_baseline(baselines.iloc[0], is_best=best["detector"] == monitor)
    chart = best_chart(rows, monitor)
    if chart is not None and chart["detector"] != baselines.iloc[0]["detector"]:
        text += Markup(
            " Over the best control chart of all channels without a model, <b>{}</b>, the monitor gains {}{}."
        ).format(
            chart["detector"], page.signed(float(chart["gain_auroc"])), _interval(chart, "gain_auroc", page.signed)
        )
    return text + _false_alarm_text(own.iloc[0], alpha, n_clean)


def _gain_over_baseline(baseline: pd.Series, is_best: bool) -> Markup:
    """Returns a sentence on the gain in AUROC over the best baseline; `is_best`: the monitor has the highest AUROC."""
    gain, low, high = (float(baseline.get(f"gain_auroc{end}", np.nan)) for end in ("", "_low", "_high"))
    if math.isnan(gain):
        return Markup("")
    subject = "It" if is_best else "The monitor"
    other = Markup("the best baseline, <b>{}</b>").format(baseline["detector"]) if is_best else "it"
    if low > 0 or high < 0:
        verb = "beats" if low > 0 else "is beaten by"
        return Markup(" {} {} {}, by {}{}.").format(
            subject,
            verb,
            other,
            f"{abs(gain):.3f}",
            _interval(baseline, "gain_auroc", page.probability, negate=high < 0),
        )
    return Markup(" {} does not differ significantly from {}: its AUROC differs by {}{}.").format(
        subject, other, page.signed(gain), _interval(baseline, "gain_auroc", page.signed)
    )


def _false_alarm_text(row: pd.Series, alpha: float | None, n_clean: int | None) -> Markup:
    false_alarms = float(row.get("false_alarms", np.nan))
    if math.isnan(false_alarms):
        return Markup("")
    allowed = "" if alpha is None else f", where {page.number(100 * alpha, digits=3)}% was allowed"
    runs = "clean runs" if n_clean is None else f"{n_clean} clean runs"
    return Markup(" The monitor gave a false alarm in {} of {}{}{}.").format(
        page.percent(false_alarms), runs, _interval(row, "false_alarms", page.percent), allowed
    )


def _interval(row: pd.Series, name: str, formatter: page.Formatter, *, negate: bool = False) -> str:
    """Returns an estimate's interval in brackets, empty if there is none; `negate`: that of minus the estimate."""
    low, high = (float(row.get(f"{name}_{end}", np.nan)) for end in ("low", "high"))
    if math.isnan(low) or math.isnan(high):
        return ""
    low, high = (-high, -low) if negate else (low, high)
    return f" (95% interval {formatter(low)} to {formatter(high)})"


def detector_table(rows: pd.DataFrame, monitor: str) -> page.Table:
    """Returns a table with a row for each detector; the monitor's is highlighted."""
    is_monitor = rows["detector"] == monitor
    columns = [page.text_column("detector"), *([page.text_column("family", "reads")] if "family" in rows else [])]
    columns += [
        page.Column(title, partial(_figure_cell, name=name, formatter=formatter, is_own=is_monitor))
        for name, (title, formatter) in FIGURES.items()
        if name in rows
    ]
    return page.table(rows, columns, is_monitor, look="sortable roomy")


def _figure_cell(row: pd.Series, name: str, formatter: page.Formatter, is_own: pd.Series) -> page.Cell:
    """Returns the cell of one of `FIGURES`, which is empty for the monitor's gain over itself."""
    if name.startswith("gain_") and is_own[row.name]:
        return page.Cell("")
    if math.isnan(row[name]) and "lead_time" in name:
        return page.Cell("none collapsed", reason="no disturbed lane collapsed, so there is no lead time")
    cell = page.estimate(row, name, formatter)
    return replace(cell, text="no alarm in most") if name == "lead_time" and row[name] == -math.inf else cell


def detectors_by_condition(conditions: pd.DataFrame) -> list[str]:
    """Returns the detectors that `conditions.csv` has columns for, in their order there."""
    return [name for name in conditions.columns if f"{name} auroc" in conditions]


def condition_table(rows: pd.DataFrame, detectors: Sequence[str]) -> page.Table:
    """Returns a table with a row for each condition: its lanes, and each detector's share detected and AUROC."""

    def detected(row: pd.Series, name: str) -> page.Cell:
        return page.estimate(row, f"{name} detected", page.percent, value=float(row[name]))

    def auroc(row: pd.Series, name: str) -> page.Cell:
        return page.Cell("") if row["condition"] == CLEAN else page.estimate(row, f"{name} auroc", page.probability)

    columns = [
        page.text_column("condition", formatter=lambda name: score_figures.CLEAN_ROW if name == CLEAN else name),
        page.number_column("lanes", "lanes", "{:.0f}".format),
        page.number_column("collapsed", "collapsed", "{:.0f}".format),
    ]
    for name in detectors:
        columns.append(page.Column(f"{name}: detected", partial(detected, name=name)))
        columns.append(page.Column(f"{name}: AUROC", partial(auroc, name=name)))
    return page.table(rows, columns)


def transfer_table(rows: pd.DataFrame) -> page.Table:
    """Returns a table with a row for each monitor that was tested on one learner; its own monitor is highlighted."""
    is_own = rows["way"] == OWN
    columns = [
        page.text_column("fitted_to", "fitted to"),
        page.text_column("way", "method", lambda way: METHODS.get(way, way)),
    ]
    for name in ("auroc", "gain_auroc", "false_alarms", "detected"):
        title, formatter = FIGURES[name]
        title = title.replace("monitor's", "own monitor's")
        columns.append(page.Column(title, partial(_figure_cell, name=name, formatter=formatter, is_own=is_own)))
    return page.table(rows, columns, is_own, look="sortable roomy")
