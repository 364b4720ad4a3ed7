"""A run on a dialogue, as its readers want to see it: rows of words, statistics of tokens, and what warned first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis.run_reader import CONTROL, Run, cadence, has_rows, measured_near, rows_at
from jaxaudit.core.channel_names import PERFORMANCE_ERROR
from jaxaudit.monitoring.telemetry import (
    StepwiseStats,
    duplicate_channels,
    forward_fill,
    stack_channels,
    varying_channels,
)
from jaxaudit.report import lines
from jaxaudit.report.page import Block, Details, RowsSection, Section, Shown, ShownRow, ShownWord
from jaxaudit.report.series import CONTROL_KEY, Panel, PlotLine
from jaxaudit.report.tables import Cell, Column, Table, code, number, table, word

FEWEST_SEEDS = 3
"""That a spread among undisturbed lanes takes, when one of them is held against the others."""


def first_signals(run: Run) -> pd.DataFrame:
    """How each channel warned of each condition's collapses.

    A channel's score is how many standard deviations of the control's other seeds it is from their mean at that step
    (Shewhart, 1931), and its limit the largest score from the onset on of any control, each held against the others:
    of n seeds, about one undisturbed run in n + 1 goes beyond. A channel that is no measurement (the same in all
    controls), or says what another does, is not read.

    Returns:
      one row for each condition that collapses in some seed and each channel that ever goes beyond its limit there:
      condition, channel, collapsed (seeds), warned (of them, those in which the channel goes beyond its limit no later
      than the collapse), after_onset and lead (medians over the seeds in which it goes beyond, in steps: from the onset
      to the first time, and from then to the collapse), score (median over those seeds, in limits, the first time);
      empty where there are too few seeds or no collapses.
    """
    columns = ["condition", "channel", "collapsed", "warned", "after_onset", "lead", "score"]
    if run.metrics is None or run.seeds < FEWEST_SEEDS:
        return pd.DataFrame(columns=columns)
    times = run.metrics.set_index(["seed", "condition"])["collapse_time"]
    values = stack_channels(run.telemetry.load()).transpose("seed", "condition", "step", "channel")
    names = [str(name) for name in values.channel.values]
    found: list[dict] = []
    for onset, group in run.conditions.groupby("onset"):
        controls = group.index[group["perturbation"] == CONTROL]
        if not len(controls):
            continue
        clean = values.values[:, controls[0]].astype(np.float64)
        kept = varying_channels(clean) & ~duplicate_channels(clean, names)
        read = [name for name, wanted in zip(names, kept, strict=True) if wanted]
        limit, judged = _judge(clean[..., kept], int(onset))
        for index in group.index.difference(controls):
            label = group["condition"][index]
            when = np.array([times.get((seed, label), np.nan) for seed in run.telemetry["seed"].values], float)
            if np.isfinite(when).any():
                scores = judged(values.values[:, index][..., kept])
                found += _signal_rows(label, read, scores / limit, when, int(onset))
    return pd.DataFrame(found, columns=columns)


def _judge(clean: np.ndarray, onset: int) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Limits `[d]` of controls `[n, T, d]`, and what gives scores `[n, T - onset, d]` of lanes of the same seeds."""
    filled = forward_fill(clean)
    others = [StepwiseStats.fit(np.delete(filled, seed, axis=0)) for seed in range(len(filled))]

    def scores(lanes: np.ndarray) -> np.ndarray:
        whole = forward_fill(lanes)
        z = np.concatenate([np.abs(e.standardise(x[None])) for e, x in zip(others, whole, strict=True)])
        lost = ~np.isfinite(lanes) & np.isfinite(clean)
        return np.where(np.logical_or.accumulate(lost, axis=1), np.inf, z)[:, onset:]

    limit = scores(clean).max(axis=(0, 1))
    return np.where(limit > 0, limit, 1.0), scores


def _signal_rows(label: str, names: list[str], scores: np.ndarray, times: np.ndarray, onset: int) -> list[dict]:
    """Of one condition: scores `[n, T - onset, d]` in limits, and the seeds' collapse times `[n]`."""
    beyond = scores > 1
    first = np.where(beyond.any(axis=1), beyond.argmax(axis=1).astype(float), np.nan)  # [n, d]
    collapsed = np.isfinite(times)
    rows = []
    for column, name in enumerate(names):
        mine = collapsed & np.isfinite(first[:, column])
        if not mine.any():
            continue
        after = first[mine, column]
        lead = times[mine] - onset - after
        rows.append(
            {
                "condition": label,
                "channel": name,
                "collapsed": int(collapsed.sum()),
                "warned": int((lead >= 0).sum()),
                "after_onset": float(np.median(after)),
                "lead": float(np.median(lead)),
                "score": float(np.median(scores[mine, after.astype(int), column])),
            }
        )
    return rows


def earliest(signals: pd.DataFrame, most: int) -> pd.DataFrame:
    """The first channels of each condition, at most `most`: those that warn in most seeds, of these the earliest.

    Of a vector's entries the first alone.
    """
    order = signals.sort_values(["warned", "after_onset", "score"], ascending=[False, True, False], kind="stable")
    order = order[~order.assign(vector=order["channel"].str.partition("[")[0]).duplicated(["condition", "vector"])]
    first = order.groupby("condition", sort=False).head(most)
    place = {condition: number for number, condition in enumerate(signals["condition"].unique())}
    return first.sort_values("condition", key=lambda names: names.map(place), kind="stable")


PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
"""Between the shades in which own tokens are shown: at least 0.9, at least 0.5, ..., and less than 0.01."""

OPEN = 12
"""Conditions whose rows stand on the page as it opens; those of more are to be unfolded."""

ROUNDING = 1e-9
"""Smaller values are rounding errors: of a divergence of two computations of the same probabilities."""

CHANNELS: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    ("greedy_success", "greedy success", {}),
    ("no_signal", "rollout groups without signal", {}),
    ("entropy", "entropy", {"stratum": ("text", "tool")}),
    ("kl", "exact KL to the reference", {"stratum": ("text", "tool")}),
    ("row_tokens", "own tokens of a row", {}),
    ("length_quantile", "own tokens of a row", {"quantile": ("q10", "q90")}),
    ("truncated", "rows that ran out of slots", {}),
    ("calls", "tool calls of a row", {}),
    ("ratio_max", "largest ratio", {"stratum": ("text", "tool"), "moment": ("visited",)}),
    ("weight_cvar", "top 1% of weights in the gradient", {"stratum": ("text", "tool"), "moment": ("visited",)}),
    ("weight_tail", "1 / tail index of it", {"stratum": ("text", "tool"), "moment": ("visited",)}),
    ("mismatch_kl", "KL of sampler and trainer", {"stratum": ("text", "tool")}),
    ("explained_variance", "explained variance", {}),
    ("pair_margin", "implicit reward of chosen less rejected", {}),
)
"""Channels round the onset: name, words, and what of their dimensions is shown side by side."""


def sections(run: Run, groups: Sequence[Panel]) -> list[Section]:
    """What is added to the page of a run on a dialogue; nothing to that of another."""
    if not has_rows(run.telemetry):
        return []
    figures = lines.aligned(run, list(groups), dict(_series(run.telemetry)), "tokens", zeros=True)
    hint = (
        "Step 0 is the injection. Text: own tokens that do not follow a tool's result; tool: those that do. KL "
        "estimators are shown less the exact KL that they estimate. Of ratios and weights: over all minibatches as "
        "visited."
    )
    return [
        Section("rows", "What the policy writes", "Rows", _rows(run, groups)),
        Section("tokens", "Tokens around the injection", "Tokens", [hint, *figures] if figures else []),
        Section("signals", "Which signal fires first", "First signals", _signals(run)),
    ]


def _rows(run: Run, groups: Sequence[Panel]) -> list[Block]:
    control = next((line for panel in groups for line in panel.lines if line.key == CONTROL_KEY), None)
    conditions: list[tuple[str, PlotLine, int]] = [("control", control, groups[0].onset)] if control else []
    for panel in groups:
        conditions += [(run.conditions["condition"][line.index], line, panel.onset) for line in panel.disturbed]
    blocks = [block for each in conditions if (block := _moments(run, *each)) is not None]
    if not blocks:
        return []
    every = cadence(run.telemetry)
    measured = "" if every == 1 else f", which are measured every {every} steps"
    hint = (
        "Stored rows of those that tell the performance, of the seed whose final one is the median: right before the "
        f"onset, where its performance is lowest after it, and at the end{measured}. Grey: given tokens, of tools in "
        "italics. Shaded: the policy's own, the darker the less probable; point at one for its log-probability. At the "
        "left: the row's reward."
    )
    shown, folded = blocks[:OPEN], blocks[OPEN:]
    legend = RowsSection("", (Shown("", (_legend(),)),))
    return [hint, legend, *shown, *([Details(f"{len(folded)} more conditions", folded)] if folded else [])]


def _legend() -> ShownRow:
    ends = [*PROBABILITIES, 0.0]
    words = [
        ShownWord(f"{'at least ' if end else 'below '}{end or PROBABILITIES[-1]:g}", f"p{shade}", "")
        for shade, end in enumerate(ends)
    ]
    return ShownRow("", (ShownWord("given", "given", ""), ShownWord("own, of probability", "plain", ""), *words))


def _moments(run: Run, label: str, line: PlotLine, onset: int) -> RowsSection | None:
    last = int(run.computed[line.index]) - 1
    if last < cadence(run.telemetry) - 1:
        return None
    performance = run.performance[:, line.index]
    final = np.where(np.isfinite(performance[:, last]), performance[:, last], -np.inf)
    seed = int(np.argsort(final, kind="stable")[(len(final) - 1) // 2])
    mine = performance[seed]
    places: dict[str, int] = {}
    if onset:
        places["before the onset"] = onset - 1
    if line.key != CONTROL_KEY and onset < last:
        after = np.where(np.isfinite(mine[onset : last + 1]), mine[onset : last + 1], -np.inf)
        places["lowest"] = onset + int(np.argmin(after))
    places["at the end"] = last
    moments, errors = [], run.channel(PERFORMANCE_ERROR)
    for name, asked in places.items():
        place = measured_near(run.telemetry, asked, last)
        rows = [_row(row) for row in rows_at(run.telemetry, seed, line.index, place)]
        told = f"{name}: step {int(run.step[place])}, performance {number(float(mine[place]), digits=3)}"
        if errors is not None:
            told += f" (standard error {float(errors[seed, line.index, place]):.2g})"
        moments.append(Shown(told, rows))
    which = f"{label}, seed {int(run.telemetry['seed'].values[seed])}"
    return RowsSection(which, moments)


def _row(row) -> ShownRow:
    return ShownRow(f"{row.reward:.3g}", [_shown(one) for one in row.words])


def _shown(one) -> ShownWord:
    text = "".join(c if c.isprintable() else "\N{OPEN BOX}" for c in one.text)
    if not one.own:
        return ShownWord(text, f"given {one.role}", "")
    probability = math.exp(min(one.log_probability, 0.0))
    shade = sum(probability < end for end in PROBABILITIES)
    return ShownWord(text, f"p{shade}", f"{one.log_probability:.3f}")


def _series(data: xr.Dataset) -> Iterator[tuple[str, np.ndarray]]:
    """Titles and values `[seed, condition, step]` of what is shown of the channels that there are."""
    if "stratum" in data.coords and list(data["stratum"].values) == ["all"]:
        data = data.assign_coords(stratum=["text"])  # without a tool, all own tokens are text
    for name, words, wanted in CHANNELS:
        if name in data:
            yield from _entries(data[name], words, wanted)
        if name == "kl":
            yield from _estimators(data)


def _entries(values: xr.DataArray, words: str, wanted: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, np.ndarray]]:
    if set(values.dims) != {"seed", "condition", "step", *wanted}:
        return
    for picked in _combinations(values, list(wanted.items())):
        labels = [str(label) for dim, label in picked.items() if len(wanted[dim]) > 1]
        title = f"{words} ({', '.join(labels)})" if labels else words
        one = values.sel(picked).transpose("seed", "condition", "step")
        seen = one.values.astype(np.float64)
        yield title, np.where(np.abs(seen) < ROUNDING, 0.0, seen)


def _combinations(values: xr.DataArray, wanted: Sequence[tuple[str, Iterable[str]]]) -> Iterator[dict[str, str]]:
    if not wanted:
        yield {}
        return
    (dim, labels), *others = wanted
    for rest in _combinations(values, others):
        for label in labels:
            if label in values[dim].values:
                yield {dim: label, **rest}


def _estimators(data: xr.Dataset) -> Iterator[tuple[str, np.ndarray]]:
    """Each estimator of the KL to the reference, less the exact one."""
    if not {"kl", "kl_estimate"} <= set(data.data_vars):
        return
    apart = (data["kl_estimate"] - data["kl"]).sel(stratum="text")
    for name in apart["estimator"].values:
        one = apart.sel(estimator=name).transpose("seed", "condition", "step")
        yield f"{name} less the exact KL (text)", one.values.astype(np.float64)


def _signals(run: Run) -> list[Block]:
    if not run.finished or run.metrics is None:
        return []
    if run.seeds < FEWEST_SEEDS:
        return [f"It takes at least {FEWEST_SEEDS} seeds to tell what is unusual: {run.seeds} were run."]
    signals = first_signals(run)
    if signals.empty:
        return ["No seed is known to collapse under any condition, so nothing could warn of it."]
    hint = (
        "Of the seeds that collapse under a condition: in how many a channel left the range of the undisturbed control "
        f"before or as performance collapsed, and when (medians, steps). The limit of each channel is its largest "
        f"deviation in any control, held against the other seeds: about one undisturbed run in {run.seeds + 1} goes "
        "beyond it, in some channel far more. A lead over a collapse that follows at once is the onset seen, not a "
        "collapse foreseen."
    )
    return [hint, _signal_table(earliest(signals, 5), run.seeds)]


def _signal_table(rows, seeds: int) -> Table:
    def share(row) -> Cell:
        return Cell(f"{row['warned']} of {row['collapsed']}", value=str(row["warned"] / row["collapsed"]))

    def figure(name: str, row) -> Cell:
        return Cell(number(float(row[name]), digits=3), value=repr(float(row[name])))

    return table(
        rows,
        [
            word("condition"),
            word("channel", show=code),
            Column("seeds warned", share),
            Column("after the onset", partial(figure, "after_onset")),
            Column("before the collapse", partial(figure, "lead")),
            Column("score, in limits", partial(figure, "score")),
        ],
    )
