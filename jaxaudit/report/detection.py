"""The page of a comparison of detectors, and the choice between it and the page of monitored runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr
from markupsafe import Markup

from jaxaudit.analysis.run_reader import read_table as stored
from jaxaudit.monitoring.comparison import CLEAN, best_chart
from jaxaudit.monitoring.transfer import AS_IT_IS, OWN, RECALIBRATED, RESTANDARDISED, UNTRAINED
from jaxaudit.report import lines, monitored, scored, style
from jaxaudit.report.page import HANDLING, Block, Details, Page, Section, Summary, listing
from jaxaudit.report.panel import Axes, Figure, draw, pick, zoom
from jaxaudit.report.scored import at_edge, names_of, score_scale, steps, values
from jaxaudit.report.series import CONTROL_KEY, Panel, PlotLine, thin
from jaxaudit.report.tables import (
    Cell,
    Column,
    Show,
    Table,
    estimate,
    figures,
    number,
    percent,
    share,
    signed,
    table,
    word,
)
from jaxaudit.runtime import array_store
from jaxaudit.runtime.files import check_contents, read_object

SINGLE = "deviation of "
"""How the names of detectors that are one channel's distance begin."""

SHOWN = 10
"""Of them, the best that are always shown."""


def further(rows: pd.DataFrame) -> pd.Series:
    """Which rows, the best first, are single channels that are not among the SHOWN best of them."""
    single = rows["detector"].str.startswith(SINGLE)
    return single & (single.cumsum() > SHOWN)


def verdict(rows: pd.DataFrame | None, mine: str, alpha: float | None, clean: int | None) -> Markup:
    """Who is best, how the monitor compares to the best baseline and to the best chart, and its false alarms.

    Args:
      rows: detectors, the best AUROC first.
      mine: the monitor's name.
      alpha: false alarms per clean run that were allowed.
      clean: how many clean runs there are.
    """
    if rows is None or rows["auroc"].isna().all():
        return Markup("No detector has an AUROC yet, so there is no verdict.")
    best = rows.iloc[0]
    text = Markup("<b>{}</b> has the highest AUROC, {:.3f}{}.").format(
        best["detector"], best["auroc"], _interval(best, "auroc", share)
    )
    own, others = rows[rows["detector"] == mine], rows[rows["detector"] != mine]
    if own.empty:
        return text
    if len(others):
        text += _against(others.iloc[0], best["detector"] == mine)
    chart = best_chart(rows, mine)
    if chart is not None and chart["detector"] != others.iloc[0]["detector"]:
        text += _over_chart(chart)
    return text + _false_alarms(own.iloc[0], alpha, clean)


def _false_alarms(row: pd.Series, alpha: float | None, clean: int | None) -> Markup:
    alarms = float(row.get("false_alarms", np.nan))
    if math.isnan(alarms):
        return Markup("")
    allowed = "" if alpha is None else f", where {number(100 * alpha, digits=3)}% was allowed"
    runs = "clean runs" if clean is None else f"{clean} clean runs"
    return Markup(" The monitor gave a false alarm in {} of {}{}{}.").format(
        percent(alarms), runs, _interval(row, "false_alarms", percent), allowed
    )


def _against(baseline: pd.Series, leads: bool) -> Markup:
    """The monitor's gain in AUROC over the best baseline, in words."""
    gain, low, high = (float(baseline.get(f"gain_auroc{end}", np.nan)) for end in ("", "_low", "_high"))
    if math.isnan(gain):
        return Markup("")
    who = "It" if leads else "The monitor"
    best = Markup("the best baseline, <b>{}</b>").format(baseline["detector"]) if leads else "it"
    if low > 0 or high < 0:
        verb = "beats" if low > 0 else "is beaten by"
        return Markup(" {} {} {}, by {}{}.").format(
            who, verb, best, f"{abs(gain):.3f}", _interval(baseline, "gain_auroc", share, flip=high < 0)
        )
    return Markup(" {} does not differ significantly from {}: its AUROC differs by {}{}.").format(
        who, best, signed(gain), _interval(baseline, "gain_auroc", signed)
    )


def _over_chart(chart: pd.Series) -> Markup:
    """The monitor's gain in AUROC over the best chart of all channels, in words."""
    return Markup(" Over the best chart of all channels without a model, <b>{}</b>, the monitor gains {}{}.").format(
        chart["detector"], signed(float(chart["gain_auroc"])), _interval(chart, "gain_auroc", signed)
    )


def _interval(row: pd.Series, name: str, show: Any, *, flip: bool = False) -> str:
    """A figure's interval in brackets; empty where there is none. `flip`: of minus the figure."""
    low, high = (float(row.get(f"{name}_{end}", np.nan)) for end in ("low", "high"))
    if math.isnan(low) or math.isnan(high):
        return ""
    low, high = (-high, -low) if flip else (low, high)
    return f" (95% interval {show(low)} to {show(high)})"


WAYS = {
    OWN: "fitted to and calibrated on its own clean lanes",
    AS_IT_IS: "not touched",
    RECALIBRATED: "threshold from its own clean lanes",
    RESTANDARDISED: "model's parameters alone; scale, envelopes and threshold from its own clean lanes",
    UNTRAINED: "random parameters; the rest from its own clean lanes",
}


def _lead(value: float) -> str:
    return "no alarm" if value == -math.inf else number(value)


def _gain(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


FIGURES: dict[str, tuple[str, Show]] = {
    "auroc": ("AUROC", share),
    "gain_auroc": ("monitor's gain in AUROC", signed),
    "false_alarms": ("false alarms per clean run", percent),
    "detected": ("detected", percent),
    "lead_time": ("lead time (steps)", _lead),
    "gain_lead_time": ("monitor's gain in lead time", _gain),
}


def detector_table(rows: pd.DataFrame, mine: str) -> Table:
    """A row for each, with intervals; the monitor's stands out."""
    shown = [
        Column(title, partial(_figure, name=name, show=show, own=rows["detector"] == mine))
        for name, (title, show) in FIGURES.items()
        if name in rows
    ]
    words = [word("detector"), *([word("family", "reads")] if "family" in rows else [])]
    return table(rows, [*words, *shown], rows["detector"] == mine, look="sortable roomy")


def _figure(row: pd.Series, name: str, show: Show, own: pd.Series) -> Cell:
    """A figure of a detector; none of what the monitor gains over itself."""
    if name.startswith("gain_") and own[row.name]:
        return Cell("")
    if math.isnan(row[name]) and "lead_time" in name:
        return Cell("none collapsed", reason="no disturbed lane collapsed, so there is nothing to be ahead of")
    cell = estimate(row, name, show)
    return replace(cell, text="no alarm in most") if name == "lead_time" and row[name] == -math.inf else cell


def told(conditions: pd.DataFrame) -> list[str]:
    """The detectors whose figures are stored by condition, as they come."""
    return [name for name in conditions.columns if f"{name} auroc" in conditions]


def condition_table(rows: pd.DataFrame, detectors: Sequence[str]) -> Table:
    """A row for each condition: lanes, how many collapse, and each detector's share detected and AUROC."""

    def detected(row: pd.Series, name: str) -> Cell:
        return estimate(row, f"{name} detected", percent, value=float(row[name]))

    def auroc(row: pd.Series, name: str) -> Cell:
        return Cell("") if row["condition"] == CLEAN else estimate(row, f"{name} auroc", share)

    columns = [word("condition", show=lambda name: "clean: false alarms" if name == CLEAN else name)]
    columns += [figures(name, name, "{:.0f}".format) for name in ("lanes", "collapsed")]
    for name in detectors:
        columns.append(Column(f"{name}: detected", partial(detected, name=name)))
        columns.append(Column(f"{name}: AUROC", partial(auroc, name=name)))
    return table(rows, columns)


def transfer_table(rows: pd.DataFrame) -> Table:
    """A row for each monitor of one tested learner: fitted to whose lanes, what is its own, and the figures."""
    own = rows["way"] == OWN
    columns = [word("fitted_to", "fitted to"), word("way", "how", lambda way: WAYS.get(way, way))]
    for name in ("auroc", "gain_auroc", "false_alarms", "detected"):
        title, show = FIGURES[name]
        title = title.replace("monitor's", "own monitor's")
        columns.append(Column(title, partial(_figure, name=name, show=show, own=own)))
    return table(rows, columns, own, look="sortable roomy")


PICKED = 6
"""Most conditions that are drawn."""

COLLAPSED = "lanes that collapsed"
LABEL = "split(replace(datum.label, '[', ' of ['), ' of ')"
"""A detector's name in rows: what it does, the channel, the entry."""

AROUND = {
    "performance": "performance",
    "deviation": "meta-state deviation",
    "score": "score of the monitor",
}


def onsets(found: xr.Dataset) -> np.ndarray:
    """The onset of every condition, int `[condition]`; the first step where it is not stored."""
    if "onset" not in found.coords:
        return np.full(found.sizes["condition"], steps(found)[0])
    return np.nan_to_num(found["onset"].values.astype(float)).astype(int)


def picked(found: xr.Dataset) -> list[int]:
    """Up to PICKED disturbed conditions by rising deviation, from the least to the most and evenly between."""
    disturbed = np.arange(1, found.sizes["condition"])
    series = values(found, "deviation", "condition", "step", "quantile")
    if series is not None:
        after = steps(found) >= onsets(found)[:, None]
        peak = np.where(after, np.nan_to_num(series[..., 1], posinf=np.inf), 0.0).max(axis=1)
        disturbed = disturbed[np.argsort(peak[disturbed], kind="stable")]
    if not len(disturbed):
        return []
    evenly = np.unique(np.linspace(0, len(disturbed) - 1, PICKED).round().astype(int))
    return [int(place) for place in disturbed[evenly]]


def latents(found: xr.Dataset, file: str) -> Figure | None:
    """Where disturbed lanes go in the plane of the latent, beside the tube of the clean ones; a panel a condition."""
    quantiles = values(found, "latent", "condition", "step", "component", "quantile")
    samples = values(found, "latent_samples", "condition", "sample", "step", "component")
    chosen = picked(found) or [0]
    if samples is None or not len(steps(found)):
        return None
    clean = None if quantiles is None else quantiles[0]
    names, step, onset = names_of(found, "condition"), steps(found), onsets(found)
    panels = []
    for place, colour in zip(chosen, style.ramp(len(chosen)), strict=True):
        since = int(np.clip(np.searchsorted(step, onset[place]), 0, len(step) - 1))
        panels.append(scored.panel(clean, _distinct(samples[place]), since, colour, names[place]))
    words = "Thin grey: lanes before the onset; colour: after it. Axes: the two directions of the latent in which "
    words += "lanes vary most, in standard deviations of the clean runs. Ring: the onset;"
    return scored.figure(f"{file}_latent", panels, words)


def _distinct(samples: np.ndarray) -> list[np.ndarray]:
    """The lanes that have values, each once: where there are few, they are stored several times over."""
    found: list[np.ndarray] = []
    for sample in samples:
        if np.isfinite(sample).any() and not any(np.array_equal(sample, other, equal_nan=True) for other in found):
            found.append(sample)
    return found or [samples[0]]


def around_onset(found: xr.Dataset, file: str) -> Figure | None:
    """Performance, deviation and score against the steps since the onset, one below the other."""
    names, onset = names_of(found, "condition"), onsets(found)
    stored = {name: x for name in AROUND if (x := values(found, name, "condition", "step", "quantile")) is not None}
    stored = {name: x for name, x in stored.items() if np.isfinite(x).any()}
    if not stored or not len(steps(found)):
        return None
    chosen = picked(found)
    disturbed = [PlotLine(place, f"m{rank}", names[place], float("nan")) for rank, place in enumerate(chosen)]
    shown = (PlotLine(0, CONTROL_KEY, CLEAN, float("nan")), *disturbed)
    common = int(np.median(onset[chosen])) if chosen else int(steps(found)[0])
    panel = Panel("", "", "", 0, (0,) if chosen else (), shown, float("-inf"))
    zooming, picking = zoom("zoom_0"), pick("pick_0")
    charts: list[Any] = []
    limit = float(found.attrs.get("threshold", np.nan))
    cut = False
    for name, block in stored.items():
        data = pd.concat([_rows(found, block, line, common) for line in shown], ignore_index=True)
        data, scale, extra, part = _scaled(name, data, block[0], limit)
        cut |= part
        span = (int(data["step"].min()), max(int(data["step"].max()), int(data["step"].min()) + 1))
        heading = alt.TitleParams(AROUND[name], fontSize=11.5, fontWeight="normal", color=style.MUTED)
        axes = Axes(True, None, span, scale, zooming, picking, f"0_{len(charts)}", owner=not charts, letters=170)
        charts.append(draw(panel, data, axes, heading, extra).properties(width=860, height=170))
    chart = style.finish(charts, 1, shared=True, width=300, limit=1120, gutter=60)
    return Figure(f"{file}_onset", "", chart, _caption(found, chosen, stored, common, cut, limit))


def _caption(
    found: xr.Dataset, chosen: list[int], stored: dict[str, np.ndarray], common: int, cut: bool, limit: float
) -> str:
    disturbed = found.sizes["condition"] - 1
    parts = ["Line: median over lanes; band: their 10% to 90% range, from the onset on. Grey: clean runs."]
    if len(chosen) < disturbed:
        parts.append(f"{len(chosen)} of {disturbed} conditions, from the least to the most deviating.")
    if len({int(onsets(found)[place]) for place in chosen}) > 1:
        parts.append(f"Onsets differ; clean runs are aligned at step {common}.")
    if "score" in stored and np.isfinite(limit):
        parts.append(f"Dotted: the threshold of the score, {limit:.3g}; a score above it is an alarm.")
    parts.append("Wide ranges have a logarithmic axis, linear about zero.")
    if cut:
        parts.append("Axes leave out extreme values; a cross marks where a median turns infinite, at the edge.")
    return " ".join(parts)


def _rows(found: xr.Dataset, block: np.ndarray, line: PlotLine, common: int) -> pd.DataFrame:
    """A condition's quantiles against the steps since its onset."""
    since = steps(found) - (common if line.key == CONTROL_KEY else onsets(found)[line.index])
    near = np.flatnonzero(since >= -max(10, int(since[-1]) // 3))
    kept = near[thin(since[near], 0, max(len(near) // 8, 10), 300)]
    low, median, high = block[line.index, kept].T
    if line.key != CONTROL_KEY:
        low, high = (np.where(since[kept] < 0, np.nan, edge) for edge in (low, high))
    rows = {"step": since[kept], "key": line.key, "label": line.label, "median": median, "low": low, "high": high}
    return pd.DataFrame(rows)


def _scaled(
    name: str, data: pd.DataFrame, clean: np.ndarray, limit: float
) -> tuple[pd.DataFrame, alt.Scale, list[alt.Chart], bool]:
    """The data with column `lost`, their vertical scale, what is drawn below them, and whether the scale cuts."""
    if name == "performance":
        ends, cut = style.domain([data[["median", "low", "high"]].to_numpy()], [clean])
        return lines.mark_lost(data, ends[0]), alt.Scale(domain=list(ends), nice=False, zero=False), [], cut
    if name == "score":
        return score_scale(data, limit)
    data, scale = lines.channel_scale(data)
    top = float(scale["domain"][1])
    return at_edge(data, top), scale, [], bool((data[["median", "high"]] > top).to_numpy().any())


def share_figures(table: pd.DataFrame, mine: str, file: str) -> Figure | None:
    """Condition by detector: the share of lanes detected, and of clean lanes with a false alarm."""
    detectors = told(table)
    if not detectors:
        return None
    detectors.sort(key=lambda name: name != mine)
    columns = [*detectors, COLLAPSED] if {"lanes", "collapsed"} <= set(table) else detectors
    cells = _cells(table, columns)
    few = len(columns) <= 8
    rows = max(1 + (" of " in name) + ("[" in name) for name in columns)
    ink: dict[str, Any] = {"domain": False, "ticks": False, "labelColor": style.INK, "labelOverlap": False}
    bold = {"condition": {"test": "datum.index == 0", "value": "bold"}, "value": "normal"}
    weight: dict[str, Any] = {"labelFontWeight": bold} if detectors[0] == mine else {}
    x = alt.X("detector:N", title=None, sort=columns, scale=alt.Scale(paddingInner=0.02),
              axis=alt.Axis(orient="top", labelAngle=0 if few else -35, labelLimit=136, labelLineHeight=13,
                            labelExpr=LABEL if few else "datum.label",
                            labelPadding=13 * rows - 8 if few else 6, **weight, **ink))  # fmt: skip
    y = alt.Y("condition:N", title=None, sort=list(dict.fromkeys(cells["condition"])),
              scale=alt.Scale(paddingInner=0.05),
              axis=alt.Axis(labelLimit=290, labelFontSize=11.5, labelPadding=8, **ink))  # fmt: skip
    base = alt.Chart().encode(x=x, y=y)
    legend = alt.Legend(title="share of lanes", orient="bottom", gradientLength=160, gradientThickness=8, format=".0%")
    colour = alt.Color("p:Q", scale=alt.Scale(domain=[0, 1], range=list(style.SHARE)), legend=legend)
    tips = [alt.Tooltip(f"{name}:N") for name in ("condition", "detector", "share")]
    cell = base.transform_filter("isValid(datum.p)").mark_rect(cornerRadius=3).encode(color=colour, tooltip=tips)
    white = alt.condition("datum.p > 0.55", alt.value("#ffffff"), alt.value(style.INK))
    text = base.mark_text(fontSize=11.5).encode(text=alt.Text("share:N"), color=white)
    chart: Any = alt.layer(cell, text, data=style.table(cells))
    chart = chart.properties(width=120 * len(columns), height=alt.Step(28))
    gutter = round(min(300, 7 * cells["condition"].str.len().max())) + 20
    finished = style.finish([chart], 1, shared=True, width=260, limit=150 * len(columns), gutter=gutter)
    caption = "Share of lanes with an alarm at or after the onset; in the first row, of clean lanes with a false alarm."
    return Figure(f"{file}_conditions", "", finished, caption)


def _cells(table: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """A row for each condition and column: condition, detector, p (NaN where it is no share), share in words."""
    rows = []
    for _, row in table.iterrows():
        name = "clean: false alarms" if row["condition"] == CLEAN else row["condition"]
        for column in columns:
            if column == COLLAPSED:
                counts = row[["collapsed", "lanes"]].astype(float)
                share, told = np.nan, "{:.0f} of {:.0f}".format(*counts) if counts.notna().all() else "n/a"
            else:
                share = float(row[column])
                told = f"{share:.0%}" if np.isfinite(share) else "n/a"
            rows.append((name, column, share, told))
    return pd.DataFrame(rows, columns=["condition", "detector", "p", "share"])


COMPARISON = "comparison.json"

TRANSFER = "transfer.csv"
"""In the folder that holds the learners': monitors of some tested on another."""

BESIDE = 1
"""Baselines beside the monitor in the table by condition, so that it stays legible."""

TESTED = Markup(
    "Every detector is tested on lanes that it was neither fitted to nor calibrated on. Small print: 95% intervals. "
    "Gains: the monitor's figure minus the detector's. Click a heading to sort. Exact values: "
    "<code>detectors.csv</code>."
)
BY_CONDITION = Markup(
    "The monitor and the best baseline. AUROC: the condition's lanes against the clean ones. Small print: 95% "
    "intervals. More detectors: <code>conditions.csv</code>."
)
TRANSFERRED = Markup(
    "The monitor again, fitted to clean lanes of other learners and tested on this one's, over the channels that all "
    "have. Gain: the AUROC of the monitor fitted to this learner's own lanes minus the row's, on the same lanes. Small "
    "print: 95% intervals. Exact values: <code>transfer.csv</code>."
)

GLOSSARY = [
    ("clean run", "A training that nothing disturbs. Detectors are fitted to some and calibrated on others."),
    ("score", "What a detector says of every step of a run, from that step and those before: higher is more unusual."),
    (
        "reads",
        "One channel alone, or all channels together: a control chart of their joint distance from the clean runs at "
        "the same step, which has no model (T2: of a step; MEWMA: of a moving average of that rate; max |z|: of the "
        "furthest channel).",
    ),
    (
        "false alarms per clean run",
        "Share of clean runs with an alarm at any step. The threshold is set on clean runs of its own so that the "
        "probability of one is at most alpha on average over such sets of runs; with one set it varies, the more the "
        "fewer they are. The table has the share that came about.",
    ),
    ("detected", "Share of disturbed lanes with an alarm at or after the onset."),
    (
        "AUROC",
        "Probability that a disturbed lane's largest score is above a clean lane's, both tested by the same detector; "
        "0.5 is chance, 1 is perfect, and no threshold enters.",
    ),
    (
        "lead time",
        "Steps from the first alarm since the onset to the collapse, median over the lanes that collapse; negative "
        "where the alarm comes after it.",
    ),
    (
        "gain",
        "The monitor's figure minus the detector's, on the same lanes.",
    ),
    (
        "intervals",
        "95%, over seeds: lanes of a seed are alike, so a bootstrap takes or leaves them together. A share of seeds "
        "with one lane each, as those of clean runs and of one condition, has Wilson's interval.",
    ),
    (
        "meta-state deviation",
        "Distance of the monitor's latent state, of a chart that of the telemetry itself, from the mean of the clean "
        "runs at the same step, whitened, so that clean runs have a standard deviation of 1 in every direction.",
    ),
    ("onset", "The step at which the perturbation's window opens."),
    (
        "fitted to other learners",
        "Over the channels that all learners have, a monitor is fitted to clean lanes of other learners. Not touched, "
        "it measures in their units; recalibrated, only its threshold is this learner's; with their parameters alone, "
        "channels' scales, the envelopes of clean runs at each step and the threshold are this learner's. Several "
        "learners' runs are cut to the shortest; a step later than theirs is compared to their last.",
    ),
]


def build(folder: Path) -> Path:
    """Write `report.html` and `figures/*.svg|png` for compared detectors or for monitored runs, from what is stored.

    Args:
      folder: what `jaxaudit detect` or `jaxaudit monitor` wrote.

    Returns:
      the page's path.

    Raises:
      FileNotFoundError: the folder holds neither.
      UserError: something in the folder is damaged, or a link.
    """
    folder = Path(folder)
    check_contents(folder)
    if monitored.is_here(folder):
        return monitored.build(folder)
    own = folder / COMPARISON
    found = [own] if own.exists() else sorted(folder.glob(f"*/{COMPARISON}"))
    if not found:
        raise FileNotFoundError(
            f"{folder} holds neither compared detectors ({COMPARISON}) nor monitored runs ({monitored.ABOUT}), so "
            "there is nothing to report"
        )
    parts = [_part(path.parent.resolve(), f"learner-{n}", len(found) == 1) for n, path in enumerate(found, 1)]
    name, summary, _ = parts[0]
    return Page(
        kicker="Detectors compared",
        heading=name if len(parts) == 1 else f"Detectors on {len(parts)} learners",
        summary=summary if len(parts) == 1 else None,
        sections=[section for _, _, sections in parts for section in sections],
        glossary=GLOSSARY,
    ).write(folder)


def _part(folder: Path, part: str, alone: bool) -> tuple[str, Summary, list[Section]]:
    """A learner's name, what was found in short, and its sections, whose anchors begin with `part`.

    Where it is not alone its name stands in the list of sections, in place of theirs, and over the first, which has
    the summary.
    """
    about = read_object(folder / COMPARISON)
    slug = style.slug(folder.name)
    name, mine = str(about.get("learner") or slug), str(about.get("monitor", ""))
    sections: list[Section] = []

    def add(id: str, heading: str, short: str, *blocks: Block | None) -> None:
        sections.append(Section(f"{part}-{id}", heading, short if alone else "", blocks))

    detectors = stored(folder / "detectors.csv", ("detector", "family"))
    if detectors is not None:
        detectors = detectors.sort_values("auroc", ascending=False, kind="stable")
        rest = further(detectors)
        folded = Details(f"Further single channels ({rest.sum()})", [detector_table(detectors[rest], mine)])
        best = detector_table(detectors[~rest], mine)
        add("detectors", "Detectors, the best first", "Detectors", TESTED, best, folded if rest.any() else None)
    conditions = stored(folder / "conditions.csv", ("condition", "perturbation"))
    if conditions is not None and (names := told(conditions)):
        names.sort(key=lambda detector: detector != mine)
        beside = condition_table(conditions, names[: BESIDE + (names[0] == mine)])
        shares = share_figures(conditions, mine, slug)
        add("conditions", "Which disturbance is detected", "Conditions", shares, BY_CONDITION, beside)
    transfer = stored(folder.parent / TRANSFER, ("tested", "fitted_to", "way"))
    if transfer is not None and (tested := transfer["tested"] == about.get("learner")).any():
        add("transfer", "Fitted to other learners", "Other learners", TRANSFERRED, transfer_table(transfer[tested]))
    store = folder / "trajectories.zarr"
    if store.exists():
        array_store.check(store)
        seen = array_store.open_dataset(store)
        if onset := around_onset(seen, slug):
            add("onset", "Around the onset", "Around the onset", HANDLING, onset)
        add("latents", "Latent trajectories", "Latent trajectories", latents(seen, slug))
    lists = {"Runs compared": "runs", "Channels": "channels"}
    add("about", "", "", *(listing(title, about.get(key)) for title, key in lists.items()))
    summary = _summary(about, detectors, mine)
    return name, summary, sections if alone else [Section(part, name, name, [summary], part=True), *sections]


def _summary(about: dict[str, Any], detectors: pd.DataFrame | None, mine: str) -> Summary:
    """Who is best, how the monitor compares to the best baseline, and its false alarms."""
    known = {"clean lanes": "clean", "disturbed lanes": "disturbed", "controls that collapse": "collapsing_controls"}
    known |= {"steps": "steps", "folds": "folds"}
    keys = [(label, f"{about[key]}") for label, key in known.items() if about.get(key)]
    keys += [] if detectors is None else [("detectors", f"{len(detectors)}")]
    keys += [("channels", f"{len(about['channels'])}")] if "channels" in about else []
    return Summary(verdict(detectors, mine, about.get("alpha"), about.get("clean")), keys=keys)
