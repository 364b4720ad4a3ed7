"""The map of distances from clean runs, channel by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.report import style
from jaxaudit.report.panel import Figure
from jaxaudit.report.scored import names_of, steps, values

RUNS, BINS, CHANNELS = 4, 90, 20
"""Most runs, spans of steps and channels."""

FAR = 10.0
"""Standard deviations at which the colour of a distance is at its darkest."""


def _binned(seen: xr.Dataset, distance: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means over spans of steps `[..., bins]`, the steps where they begin, and where they end."""
    step = steps(seen)
    starts = np.unique(np.linspace(0, len(step), min(BINS, len(step)) + 1).round().astype(int))
    parts = [distance[..., a:b] for a, b in pairwise(starts)]
    count = [np.sum(~np.isnan(part), axis=-1) for part in parts]
    means = [np.nansum(part, axis=-1) / np.where(n, n, np.nan) for part, n in zip(parts, count, strict=True)]
    return np.stack(means, axis=-1), step[starts[:-1]], np.append(step[starts[1:-1]], step[-1] + 1)


def furthest(seen: xr.Dataset, runs: list[int]) -> list[int]:
    """All channels, the one first that was the furthest from the clean runs in a span of steps of these runs."""
    distance = values(seen, "distance", "run", "channel", "step")
    if distance is None:
        return list(range(seen.sizes.get("channel", 0)))
    means, _, _ = _binned(seen, np.abs(distance[runs]))
    peak = np.where(np.isnan(means), -np.inf, means).max(axis=(0, 2))
    return [int(channel) for channel in np.argsort(-peak, kind="stable")]


def distance_map(seen: xr.Dataset, ranked: list[int], moved: list[int]) -> Figure | None:
    """Channel by step: the distance from clean runs; a panel for each of the runs with the highest scores."""
    distance = values(seen, "distance", "run", "channel", "step")
    if distance is None or np.isnan(distance).all():
        return None
    channels, runs = names_of(seen, "channel"), names_of(seen, "run")
    means, begin, end = _binned(seen, np.abs(distance))
    chosen, mapped = moved[:CHANNELS], ranked[:RUNS]
    labels = [channels[place] for place in chosen]
    most = float(np.max(means[mapped], where=np.isfinite(means[mapped]), initial=4.0))
    charts = [
        _map(means[run][chosen], labels, begin, end, min(most, FAR), runs[run] if len(runs) > 1 else "")
        for run in mapped
    ]
    parts = ["Mean distance from the clean runs at the same step, in their standard deviations; channels that moved"]
    parts.append(f"most come first{'' if len(chosen) == len(moved) else f' ({len(chosen)} of {len(moved)})'}.")
    if len(mapped) < len(runs):
        parts.append(f"The {len(mapped)} runs with the highest scores.")
    if most > FAR:
        parts.append(f"Distances above {FAR:g} have the darkest colour.")
    gutter = round(min(250, 6.6 * max(map(len, labels)))) + 30
    finished = style.finish(charts, 2, shared=True, width=260, limit=1000, gutter=gutter)
    return Figure("distance", "", finished, " ".join(parts))


def _map(means: np.ndarray, labels: Sequence[str], begin: np.ndarray, end: np.ndarray, most: float, title: str) -> Any:
    # A span reaches a little under the next, so that no seam shows between them.
    reach = np.minimum(end + 0.25 * (end - begin), end[-1])
    rows = pd.DataFrame(
        {
            "channel": np.repeat(labels, len(begin)),
            "begin": np.tile(begin, len(labels)),
            "end": np.tile(reach, len(labels)),
            "distance": np.where(np.isposinf(means), 1e6, means).ravel(),
        }
    )
    x = alt.X("begin:Q", title="step", scale=alt.Scale(domain=[int(begin[0]), int(end[-1])], nice=False),
              axis=alt.Axis(grid=False))  # fmt: skip
    y = alt.Y("channel:N", title=None, sort=list(labels), axis=alt.Axis(
        labelLimit=250, domain=False, labelPadding=6, ticks=False, labelColor=style.INK,
        labelOverlap=False))  # fmt: skip
    legend = alt.Legend(title="standard deviations", orient="bottom", gradientLength=160, gradientThickness=8)
    scale = alt.Scale(domain=[0, most], range=list(style.SHARE), clamp=True)
    tips = [alt.Tooltip("channel:N"), alt.Tooltip("begin:Q", title="from step"),
            alt.Tooltip("distance:Q", format=".3~g")]  # fmt: skip
    cell = alt.Chart().mark_rect().encode(
        x=x, x2=alt.X2("end:Q"), y=y, color=alt.Color("distance:Q", scale=scale, legend=legend), tooltip=tips
    )  # fmt: skip
    shown = style.table(rows[rows["distance"].notna()])
    return alt.layer(cell, data=shown).properties(width=380, height=alt.Step(16), title=title)
