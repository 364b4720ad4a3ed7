"""Conditions arranged into panels, and their medians and bands over seeds, thinned for drawing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from jaxaudit.analysis.run_reader import CONTROL, Run

CONTROL_KEY = "c"


@dataclass(frozen=True)
class PlotLine:
    """One condition in a panel: its index, the key of its column in the tooltip, and its label."""

    index: int
    key: str
    label: str
    magnitude: float


@dataclass(frozen=True)
class Panel:
    """One perturbation at one onset: its conditions by rising magnitude, and their control.

    Attributes:
      title: the perturbation, with the onset where it has several.
      lines: control first (where there is one).
      durations: window lengths in steps, distinct and rising.
      neutral: the magnitude that disturbs nothing; minus infinity where the run does not tell.
    """

    perturbation: str
    dimension: str
    title: str
    onset: int
    durations: tuple[int, ...]
    lines: tuple[PlotLine, ...]
    neutral: float

    @property
    def disturbed(self) -> tuple[PlotLine, ...]:
        return tuple(line for line in self.lines if line.key != CONTROL_KEY)


def panels(run: Run) -> list[Panel]:
    """One panel per perturbation, target and onset, in the order of the run's conditions."""
    table = run.conditions
    disturbed = table[table["perturbation"] != CONTROL]
    if disturbed.empty:
        return [_panel(table, table.iloc[:0], CONTROL, CONTROL, int(table["onset"].iloc[0]))]
    onsets, targets = (disturbed.groupby("perturbation")[name].nunique() for name in ("onset", "target"))
    found = []
    for (name, target, onset), rows in disturbed.groupby(["perturbation", "target", "onset"], sort=False):
        title = f"{name} of {target or 'all'}" if targets[name] > 1 else str(name)
        title += f" at step {onset}" if onsets[name] > 1 else ""
        found.append(_panel(table, rows, str(name), title, int(onset)))
    return found


def _panel(table: pd.DataFrame, rows: pd.DataFrame, name: str, title: str, onset: int) -> Panel:
    controls = table[table["perturbation"] == CONTROL]
    own = controls[controls["onset"] == onset]
    control = own if len(own) else controls
    lines = [PlotLine(int(i), CONTROL_KEY, CONTROL, float("nan")) for i in control.index[:1]]
    rows = rows.sort_values("magnitude", kind="stable")
    unique = rows["magnitude"].notna().all() and rows["magnitude"].is_unique
    for rank, (index, row) in enumerate(rows.iterrows()):
        label = f"{row['magnitude']:g}" if unique else row["condition"]
        lines.append(PlotLine(int(index), f"m{rank}", label, float(row["magnitude"])))  # type: ignore[call-overload]
    return Panel(
        perturbation=name,
        dimension=str(rows["dimension"].iloc[0]) if len(rows) else CONTROL,
        title=title,
        onset=onset,
        durations=tuple(sorted({int(d) for d in rows["duration"]})),
        lines=tuple(lines),
        neutral=float(rows["neutral"].iloc[0]) if len(rows) else float("-inf"),
    )


def band_name(seeds: int) -> str:
    """What the band over so many seeds is, in words; empty for a single seed."""
    if seeds < 2:
        return ""
    return "the range over seeds" if seeds < 4 else "the interquartile range over seeds"


def spread(values: np.ndarray, *, lost_is_worst: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median and band over seeds.

    Args:
      values: `[seed, T]`; NaN and infinities are lost seeds.
      lost_is_worst: count a lost seed as -inf instead of leaving it out: for performance, where nothing
        worse can happen.

    Returns:
      median, low, high, each `[T]`; -inf where the figure falls on a lost seed, NaN where there is no seed.
    """
    finite = np.isfinite(values)
    x = np.sort(np.where(finite, values, -np.inf if lost_is_worst else np.nan), axis=0)
    count = np.full(x.shape[1], len(x)) if lost_is_worst else finite.sum(0)
    edge = 0.0 if len(x) < 4 else 0.25
    median, low, high = (_at(x, count, q) for q in (0.5, edge, 1 - edge))
    if len(x) < 2:
        low, high = np.full_like(median, np.nan), np.full_like(median, np.nan)
    return median, low, high


def _at(x: np.ndarray, count: np.ndarray, q: float) -> np.ndarray:
    """Quantile of the first `count` of the sorted rows, linear between neighbours; -inf if it touches one."""
    place = q * np.maximum(count - 1, 0)
    below, above = np.floor(place).astype(int), np.ceil(place).astype(int)
    a, b = (np.take_along_axis(x, i[None], axis=0)[0] for i in (below, above))
    with np.errstate(invalid="ignore"):
        mixed = np.where(below == above, a, a + (place - below) * (b - a))
    return np.where(count == 0, np.nan, np.where(np.isneginf(a), -np.inf, mixed))


def thin(steps: np.ndarray, centre: int, radius: int, limit: int = 400) -> np.ndarray:
    """Indices of about `limit` steps at most, half of them within `radius` of `centre`."""
    if len(steps) <= limit:
        return np.arange(len(steps))
    near = np.abs(steps - centre) <= radius
    picked = [_even(np.flatnonzero(part), limit // 2 - 2) for part in (near, ~near)]
    picked.append(np.flatnonzero(np.abs(steps - centre) <= 1))
    return np.unique(np.concatenate(picked))


def _even(indices: np.ndarray, limit: int) -> np.ndarray:
    if len(indices) <= limit:
        return indices
    return indices[np.linspace(0, len(indices) - 1, limit).round().astype(int)]


def frame(run: Run, panel: Panel, values: np.ndarray, kept: np.ndarray, *, lost_is_worst: bool = False) -> pd.DataFrame:
    """A panel's lines in long form: step, key, label, median, low, high.

    Disturbed lines begin one step before the onset: until then they are the control's. Steps at which no line
    of the panel has a value are left out (the channel was not computed there), as are steps not run yet.

    Args:
      values: `[seed, condition, step]`.
      kept: indices of the steps to draw.
    """
    if not panel.lines:
        return pd.DataFrame(columns=["step", "key", "label", "median", "low", "high"])
    ends = run.computed[[line.index for line in panel.lines]]
    kept = kept[kept < ends.max(initial=0)]
    block = values[:, [line.index for line in panel.lines]][..., kept]
    some = ~np.isnan(block).all(axis=(0, 1))
    kept, block = kept[some], block[..., some]
    steps = run.step[kept]
    parts = []
    for place, line in enumerate(panel.lines):
        median, low, high = spread(block[:, place], lost_is_worst=lost_is_worst)
        rows = pd.DataFrame({"step": steps, "median": median, "low": low, "high": high})
        rows.insert(1, "key", line.key)
        rows.insert(2, "label", line.label)
        parts.append(rows if line.key == CONTROL_KEY else rows[rows["step"] >= panel.onset - 1])
    return pd.concat(parts, ignore_index=True)
