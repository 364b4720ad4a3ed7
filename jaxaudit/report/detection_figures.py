"""Figures of a comparison of detectors: what the monitor saw of clean and of disturbed lanes, and what was detected."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.report import latent, lines, style
from jaxaudit.report.detection_tables import CLEAN, told
from jaxaudit.report.panel import Axes, Figure, draw, pick, zoom
from jaxaudit.report.scored import at_edge, names_of, score_scale, steps, values
from jaxaudit.report.series import CONTROL_KEY, Panel, PlotLine, thin

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
        panels.append(latent.panel(clean, _distinct(samples[place]), since, colour, names[place]))
    words = "Thin grey: lanes before the onset; colour: after it. Axes: the two directions of the latent in which "
    words += "lanes vary most, in standard deviations of the clean runs. Ring: the onset;"
    return latent.figure(f"{file}_latent", panels, words)


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


def shares(table: pd.DataFrame, mine: str, file: str) -> Figure | None:
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
