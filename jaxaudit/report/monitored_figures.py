"""Figures of monitored runs: their score, what moved, and where their latent went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.report import latent, lines, style
from jaxaudit.report.distances import distance_map, furthest
from jaxaudit.report.panel import Axes, Figure, draw, pick, zoom
from jaxaudit.report.scored import at_edge, names_of, score_scale, steps, values
from jaxaudit.report.series import CONTROL_KEY, Panel, PlotLine, thin

PICKED = 6
"""Most runs with a line of their own."""

DRAWN = 6
"""Most channels whose values are drawn."""


def all_of(seen: xr.Dataset, threshold: float, starts: dict[str, int]) -> dict[str, Figure]:
    """Every figure there are values for.

    Args:
      seen: stored series of runs.
      threshold: of the score.
      starts: the step of the first alarm, by run.
    """
    if not len(steps(seen)) or not seen.sizes.get("run"):
        return {}
    ranked = _ranked(seen)
    moved = furthest(seen, ranked[:PICKED])
    found = {
        "score": _score(seen, ranked, threshold, starts),
        "distance": distance_map(seen, ranked, moved),
        "moved": _values(seen, ranked, moved, starts),
        "latents": _latents(seen, ranked, starts),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def _ranked(seen: xr.Dataset) -> list[int]:
    """Runs, the highest score first."""
    score = values(seen, "score", "run", "step")
    if score is None:
        return list(range(seen.sizes["run"]))
    peak = np.where(np.isnan(score), -np.inf, score).max(axis=1)
    return [int(run) for run in np.argsort(-peak, kind="stable")]


def _shown(seen: xr.Dataset, ranked: Sequence[int]) -> list[PlotLine]:
    """The runs with the highest scores, the highest last."""
    names = names_of(seen, "run")
    picked = ranked[:PICKED][::-1]
    return [PlotLine(run, f"m{rank}", names[run], float("nan")) for rank, run in enumerate(picked)]


def _panel(shown: Sequence[PlotLine]) -> Panel:
    return Panel("", "", "", 0, (), tuple(shown), float("-inf"))


def _span(seen: xr.Dataset) -> tuple[int, int]:
    step = steps(seen)
    return int(step[0]), max(int(step[-1]), int(step[0]) + 1)


def _kept(seen: xr.Dataset, starts: dict[str, int], limit: int) -> np.ndarray:
    """Places of the steps to draw, every one of them near the first alarm."""
    step = steps(seen)
    centre = min(starts.values(), default=int(step[len(step) // 2]))
    return thin(step, centre, len(step) // 10, limit)


def _lines(seen: xr.Dataset, block: np.ndarray, shown: Sequence[PlotLine], kept: np.ndarray) -> pd.DataFrame:
    """Runs `[run, T]` in long form, without bands."""
    step = steps(seen)[kept]
    parts = [
        pd.DataFrame({"step": step, "key": line.key, "label": line.label, "median": block[line.index, kept]})
        for line in shown
    ]
    return pd.concat(parts, ignore_index=True).assign(low=np.nan, high=np.nan)


def _score(seen: xr.Dataset, ranked: list[int], threshold: float, starts: dict[str, int]) -> Figure | None:
    score = values(seen, "score", "run", "step")
    if score is None or np.isnan(score).all():
        return None
    shown, names = _shown(seen, ranked), names_of(seen, "run")
    data, scale, extra, cut = score_scale(_lines(seen, score, shown, _kept(seen, starts, 500)), threshold)
    top = float(scale["domain"][1])
    others = _others(seen, score, ranked[PICKED:])
    step = steps(seen)
    marks: list[dict[str, Any]] = [
        {"step": at, "score": min(float(score[names.index(run), np.searchsorted(step, at)]), top), "run": run}
        for run, at in starts.items()
        if run in names and step[0] <= at <= step[-1]
    ]
    alarm = alt.Chart(alt.InlineData(values=[mark for mark in marks if mark["score"] <= top])).mark_point(
        shape="diamond", filled=True, size=110, color=style.INK, opacity=1
    )
    tips = [alt.Tooltip("run:N"), alt.Tooltip("step:Q", title="first alarm")]
    axes = Axes(False, "score", _span(seen), scale, zoom("zoom_0"), pick("pick_0"), "0", letters=170)
    layers = [*others, *extra, *([alarm.encode(x=alt.X("step:Q"), y=alt.Y("score:Q"), tooltip=tips)] if marks else [])]
    chart = draw(_panel(shown), data, axes, "", layers).properties(width=860, height=260)
    parts = [
        "Dotted: the threshold. Diamond: a run's first alarm. A wide range has a logarithmic axis, linear about zero."
    ]
    if others:
        parts.append(f"In colour the {PICKED} runs with the highest scores, in grey the other {len(ranked) - PICKED}.")
    if cut:
        parts.append("The axis leaves out the lowest scores; a cross marks where one turns infinite, at the edge.")
    finished = style.finish([chart], 1, shared=False, width=300, limit=1120, gutter=60)
    return Figure("score", "", finished, " ".join(parts))


def _others(seen: xr.Dataset, score: np.ndarray, runs: Sequence[int]) -> list[alt.Chart]:
    """Thin grey lines of runs without one of their own."""
    if not runs:
        return []
    kept = np.unique(np.linspace(0, score.shape[1] - 1, 150).round().astype(int))
    parts = [pd.DataFrame({"step": steps(seen)[kept], "run": run, "score": score[run, kept]}) for run in runs]
    base = alt.Chart(style.table(pd.concat(parts, ignore_index=True)))
    line = base.mark_line(color=style.GREY, strokeWidth=0.7, opacity=0.6, clip=True)
    return [line.encode(x=alt.X("step:Q"), y=alt.Y("score:Q"), detail=alt.Detail("run:N"))]


def _values(seen: xr.Dataset, ranked: list[int], moved: list[int], starts: dict[str, int]) -> Figure | None:
    """The values of the channels that moved most, over the clean runs' band."""
    block = values(seen, "values", "run", "channel", "step")
    if block is None:
        return None
    clean = values(seen, "clean_values", "channel", "step", "quantile")
    shown = _shown(seen, ranked)
    calm = [] if clean is None else [PlotLine(0, CONTROL_KEY, "clean runs", float("nan"))]
    channels, kept = names_of(seen, "channel"), _kept(seen, starts, 300)
    zooming, picking = zoom("zoom_0"), pick("pick_0")
    charts: list[Any] = []
    for channel in moved[:DRAWN]:
        data = _lines(seen, block[:, channel], shown, kept)
        if clean is not None:
            low, median, high = clean[channel, kept].T
            band = {"step": steps(seen)[kept], "key": CONTROL_KEY, "label": "clean runs", "median": median}
            data = pd.concat([pd.DataFrame({**band, "low": low, "high": high}), data], ignore_index=True)
        if not np.isfinite(data["median"]).any():
            continue
        data, scale = lines.channel_scale(data)
        data = at_edge(data, float(scale["domain"][1]))
        heading = alt.TitleParams(channels[channel][:48], fontSize=11.5, fontWeight="normal", color=style.MUTED)
        axes = Axes(
            False, None, _span(seen), scale, zooming, picking, f"0_{len(charts)}", owner=not charts, letters=170
        )
        charts.append(draw(_panel([*calm, *shown]), data, axes, heading, []).properties(width=270, height=150))
    if not charts:
        return None
    caption = "Grey: median of clean runs and their 10% to 90% range. " if clean is not None else ""
    caption += "Wide positive ranges have a logarithmic axis."
    return Figure("values", "", style.finish(charts, 3, shared=True, width=220, limit=520, gutter=66), caption)


def _latents(seen: xr.Dataset, ranked: list[int], starts: dict[str, int]) -> Figure | None:
    paths = values(seen, "latent", "run", "step", "component")
    if paths is None or paths.shape[-1] < 2:
        return None
    clean = values(seen, "clean_latent", "step", "component", "quantile")
    shown = [line for line in _shown(seen, ranked)[::-1] if np.isfinite(paths[line.index]).all(axis=1).any()]
    colours = style.ramp(len(shown))[::-1] if shown else []
    panels = []
    for line, colour in zip(shown, colours, strict=True):
        since = int(np.searchsorted(steps(seen), starts.get(line.label, steps(seen)[0])))
        told = f"alarm at step {starts[line.label]}" if line.label in starts else "no alarm"
        calm = None if clean is None else clean[:, :2]
        panels.append(latent.panel(calm, [paths[line.index, :, :2]], since, colour, line.label, told))
    words = "Thin grey: the run before its alarm; colour: from it on, or the whole of a run without one. Ring: where "
    return latent.figure("latent", panels, f"{words}the colour begins;") if panels else None
