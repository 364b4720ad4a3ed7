"""The sections of the page of a run on a dialogue: stored rows, token statistics, and which channel reacts first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
import xarray as xr

from jaxaudit.analysis.run_reader import (
    CONTROL,
    HeldOutRow,
    Run,
    has_held_out_rows,
    held_out_cadence,
    held_out_rows,
    nearest_step,
)
from jaxaudit.core.channel_names import PERFORMANCE_ERROR
from jaxaudit.monitoring.telemetry import (
    StepwiseStats,
    duplicate_channels,
    forward_fill,
    stack_channels,
    varying_channels,
)
from jaxaudit.report import page
from jaxaudit.report.line_panels import CONTROL_KEY, Panel, PlotLine
from jaxaudit.report.run_figures import around_onset

MIN_SEEDS = 3
"""The fewest seeds for which one control can be compared with the spread of the others."""

MAX_SIGNALS = 5
"""The most channels per condition in the table of first signals."""

MAX_OPEN_CONDITIONS = 12
"""The most conditions whose rows are visible at once; those of further ones are collapsed."""

PROBABILITIES = (0.9, 0.5, 0.1, 0.01)
"""The limits between the shades of generated tokens: at least 0.9, at least 0.5, ..., and less than 0.01."""

ROUNDING = 1e-9
"""Smaller values count as zero. They are rounding errors of a divergence between two equal distributions."""

CHANNELS: tuple[tuple[str, str, dict[str, tuple[str, ...]]], ...] = (
    ("greedy_success", "greedy success", {}),
    ("no_signal", "rollout groups with equal rewards", {}),
    ("entropy", "entropy", {"stratum": ("text", "tool")}),
    ("kl", "exact KL to the reference", {"stratum": ("text", "tool")}),
    ("row_tokens", "generated tokens per row", {}),
    ("length_quantile", "generated tokens per row", {"quantile": ("q10", "q90")}),
    ("truncated", "truncated rows", {}),
    ("calls", "tool calls per row", {}),
    ("ratio_max", "largest importance ratio", {"stratum": ("text", "tool"), "moment": ("visited",)}),
    ("weight_cvar", "mean of the top 1% of token weights", {"stratum": ("text", "tool"), "moment": ("visited",)}),
    ("weight_tail", "1 / tail index of token weights", {"stratum": ("text", "tool"), "moment": ("visited",)}),
    ("mismatch_kl", "KL between sampler and trainer", {"stratum": ("text", "tool")}),
    ("explained_variance", "explained variance", {}),
    ("pair_margin", "implicit reward, chosen minus rejected", {}),
)
"""The channels that are drawn around the onset: name, title, and the entries of each further dimension to draw."""


def sections(run: Run, groups: Sequence[Panel]) -> list[page.Section]:
    """Returns the sections that the page of a run on a dialogue has in addition; none for other runs."""
    if not has_held_out_rows(run.telemetry):
        return []
    figures = around_onset(run, groups, dict(_drawn_series(run.telemetry)), "tokens", zeros=True)
    hint = (
        "Step 0 is the onset. Text: generated tokens that do not follow a tool's result; tool: those that do. KL "
        "estimators are shown minus the exact KL that they estimate. The weight of a token is the absolute "
        "derivative of the loss by its log-probability. Ratios and weights are taken over all minibatches as they "
        "are visited."
    )
    return [
        page.section("audit", "rows", *_rows_blocks(run, groups)),
        page.section("audit", "tokens", *([hint, *figures] if figures else [])),
        page.section("audit", "signals", *_signals_blocks(run)),
    ]


def _rows_blocks(run: Run, groups: Sequence[Panel]) -> list[page.Block]:
    control = next((line for panel in groups for line in panel.lines if line.key == CONTROL_KEY), None)
    conditions: list[tuple[str, PlotLine, int]] = [("control", control, groups[0].onset)] if control else []
    for panel in groups:
        conditions += [(run.conditions["condition"][line.index], line, panel.onset) for line in panel.disturbed]
    blocks = [block for condition in conditions if (block := _snapshots(run, *condition)) is not None]
    if not blocks:
        return []
    every = held_out_cadence(run.telemetry)
    measured_every = "" if every == 1 else f" Rows are measured every {every} steps."
    hint = (
        "The rows are some of those that performance is measured on, for the seed with the median final performance."
        f"{measured_every} Grey: given tokens; those of tools are in italics. Shaded: generated tokens, the darker the "
        "less probable; the tooltip has the log-probability. The number to the left is the row's reward."
    )
    visible, collapsed = blocks[:MAX_OPEN_CONDITIONS], blocks[MAX_OPEN_CONDITIONS:]
    more = [page.Details(f"{len(collapsed)} more conditions", collapsed)] if collapsed else []
    return [hint, page.SnapshotsBlock("", [page.Snapshot("", [_legend()])]), *visible, *more]


def _legend() -> page.TokenRow:
    shades = [f"at least {limit:g}" for limit in PROBABILITIES] + [f"below {PROBABILITIES[-1]:g}"]
    tokens = [page.Token("given", "given"), page.Token("generated, with probability", "plain")]
    return page.TokenRow("", tokens + [page.Token(text, f"p{shade}") for shade, text in enumerate(shades)])


def _snapshots(run: Run, condition: str, line: PlotLine, onset: int) -> page.SnapshotsBlock | None:
    """Returns rows of one condition at several steps, or None if no row has been measured yet."""
    last = int(run.computed[line.index]) - 1
    if last < held_out_cadence(run.telemetry) - 1:
        return None
    performance = run.performance[:, line.index]
    final = np.where(np.isfinite(performance[:, last]), performance[:, last], -np.inf)
    seed = int(np.argsort(final, kind="stable")[(len(final) - 1) // 2])
    steps: dict[str, int] = {}
    if onset:
        steps["before the onset"] = onset - 1
    if line.key != CONTROL_KEY and onset < last:
        after = performance[seed, onset : last + 1]
        steps["lowest performance"] = onset + int(np.argmin(np.where(np.isfinite(after), after, -np.inf)))
    steps["at the end"] = last
    errors = run.channel(PERFORMANCE_ERROR)
    snapshots = []
    for name, step in steps.items():
        index = nearest_step(run.telemetry, step, last)
        value = page.number(float(performance[seed, index]), digits=3)
        heading = f"{name}: step {int(run.step[index])}, performance {value}"
        if errors is not None:
            heading += f" (standard error {float(errors[seed, line.index, index]):.2g})"
        snapshots.append(
            page.Snapshot(heading, [_token_row(row) for row in held_out_rows(run.telemetry, seed, line.index, index)])
        )
    return page.SnapshotsBlock(f"{condition}, seed {int(run.telemetry['seed'].values[seed])}", snapshots)


def _token_row(row: HeldOutRow) -> page.TokenRow:
    tokens = []
    for token in row.tokens:
        text = "".join(c if c.isprintable() else "\N{OPEN BOX}" for c in token.text)
        if token.is_own:
            probability = math.exp(min(token.log_probability, 0.0))
            shade = sum(probability < limit for limit in PROBABILITIES)
            tokens.append(page.Token(text, f"p{shade}", f"{token.log_probability:.3f}"))
        else:
            tokens.append(page.Token(text, f"given {token.role}"))
    return page.TokenRow(f"{row.reward:.3g}", tokens)


def _drawn_series(data: xr.Dataset) -> Iterator[tuple[str, np.ndarray]]:
    """Yields titles and values, `[seed, condition, step]`, of the stored channels of `CHANNELS`."""
    if "stratum" in data.coords and list(data["stratum"].values) == ["all"]:
        data = data.assign_coords(stratum=["text"])  # without a tool, all generated tokens are text
    for name, title, entries in CHANNELS:
        if name in data:
            yield from _channel_series(data[name], title, entries)
        if name == "kl" and {"kl", "kl_estimate"} <= set(data.data_vars):
            errors = (data["kl_estimate"] - data["kl"]).sel(stratum="text")
            for estimator in errors["estimator"].values:
                yield f"{estimator} minus the exact KL (text)", _lanes(errors.sel(estimator=estimator))


def _channel_series(
    channel: xr.DataArray, title: str, entries: dict[str, tuple[str, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    if set(channel.dims) != {"seed", "condition", "step", *entries}:
        return
    stored = [[label for label in labels if label in channel[dim].values] for dim, labels in entries.items()]
    for labels in itertools.product(*stored):
        selection = dict(zip(entries, labels, strict=True))
        distinct = [label for dim, label in selection.items() if len(entries[dim]) > 1]
        values = _lanes(channel.sel(selection))
        full_title = f"{title} ({', '.join(distinct)})" if distinct else title
        yield full_title, np.where(np.abs(values) < ROUNDING, 0.0, values)


def _lanes(values: xr.DataArray) -> np.ndarray:
    return values.transpose("seed", "condition", "step").values.astype(np.float64)


def _signals_blocks(run: Run) -> list[page.Block]:
    if not run.finished or run.metrics is None:
        return []
    if run.seeds < MIN_SEEDS:
        return [f"At least {MIN_SEEDS} seeds are needed to say what is unusual; this run has {run.seeds}."]
    signals = first_signals(run)
    if signals.empty:
        return ["No seed is known to collapse under any condition, so there is nothing to warn of."]
    hint = (
        "Seeds warned: of the seeds that collapse, those in which the channel leaves the range of the undisturbed "
        "control no later than performance collapses. Times are medians in steps. The limit of a channel is its "
        "largest deviation in any control, each compared with the other seeds. A given channel exceeds it in about "
        f"one of {run.seeds + 1} undisturbed runs, and at least one of many channels does so more often. If a collapse "
        "follows the onset immediately, an early signal shows the onset rather than predicting the collapse."
    )
    return [hint, _signal_table(earliest(signals, MAX_SIGNALS))]


def _signal_table(signals: pd.DataFrame) -> page.Table:
    def warned(row: pd.Series) -> page.Cell:
        return page.Cell(f"{row['warned']} of {row['collapsed']}", value=str(row["warned"] / row["collapsed"]))

    def figure(row: pd.Series, name: str) -> page.Cell:
        return page.Cell(page.number(float(row[name]), digits=3), value=repr(float(row[name])))

    return page.table(
        signals,
        [
            page.text_column("condition"),
            page.text_column("channel", formatter=page.code),
            page.Column("seeds warned", warned),
            page.Column("steps after the onset", partial(figure, name="after_onset")),
            page.Column("steps before the collapse", partial(figure, name="lead")),
            page.Column("deviation / limit", partial(figure, name="score")),
        ],
    )


def first_signals(run: Run) -> pd.DataFrame:
    """Returns which channels leave the control's range in the lanes that collapse, and when.

    The score of a channel is its distance from the mean of the control's other seeds at the same step, in their
    standard deviations (Shewhart, 1931). Its limit is the largest score of any control from the onset on, each control
    compared with the others: with n seeds, about one undisturbed run in n + 1 exceeds it. Channels that are no
    measurements (they are the same in all controls), or that repeat another channel, are left out.

    Returns:
      One row for each condition in which seeds collapse and each channel that exceeds its limit there, with the columns
      condition; channel; collapsed, the number of seeds that collapse; warned, the number of these in which the channel
      exceeds its limit no later than the collapse; and medians over the seeds in which it exceeds its limit:
      after_onset, the steps from the onset to the first time that it does; lead, the steps from then to the collapse;
      and score, the score at that step divided by the limit. The frame is empty if there are too few seeds or no
      collapses.
    """
    columns = ["condition", "channel", "collapsed", "warned", "after_onset", "lead", "score"]
    if run.metrics is None or run.seeds < MIN_SEEDS:
        return pd.DataFrame(columns=columns)
    times = run.metrics.set_index(["seed", "condition"])["collapse_time"]
    values = stack_channels(run.telemetry.load()).transpose("seed", "condition", "step", "channel")
    names = np.array([str(name) for name in values.channel.values])
    rows: list[dict] = []
    for onset, group in run.conditions.groupby("onset"):
        controls = group.index[group["perturbation"] == CONTROL]
        if not len(controls):
            continue
        control = values.values[:, controls[0]].astype(np.float64)
        is_read = varying_channels(control) & ~duplicate_channels(control, list(names))
        limit, score = _limits_and_score(control[..., is_read], int(onset))
        for index in group.index.difference(controls):
            condition = group["condition"][index]
            collapse = np.array([times.get((seed, condition), np.nan) for seed in run.telemetry["seed"].values], float)
            if np.isfinite(collapse).any():
                scores = score(values.values[:, index][..., is_read]) / limit
                rows += _signal_rows(condition, names[is_read], scores, collapse - int(onset))
    return pd.DataFrame(rows, columns=columns)


def _limits_and_score(control: np.ndarray, onset: int) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """Returns the channels' limits `[d]`, and the function that scores lanes of the same seeds.

    Args:
      control: the control lanes, `[n, T, d]`.
      onset: the step from which on scores `[n, T - onset, d]` are returned.
    """
    filled = forward_fill(control)
    others = [StepwiseStats.fit(np.delete(filled, seed, axis=0)) for seed in range(len(filled))]

    def score(lanes: np.ndarray) -> np.ndarray:
        lanes_filled = forward_fill(lanes)
        z = np.concatenate([np.abs(e.standardise(x[None])) for e, x in zip(others, lanes_filled, strict=True)])
        is_lost = ~np.isfinite(lanes) & np.isfinite(control)
        return np.where(np.logical_or.accumulate(is_lost, axis=1), np.inf, z)[:, onset:]

    limit = score(control).max(axis=(0, 1))
    return np.where(limit > 0, limit, 1.0), score


def _signal_rows(condition: str, names: Sequence[str], scores: np.ndarray, collapse: np.ndarray) -> list[dict]:
    """Returns the rows of one condition.

    Args:
      condition: its name.
      names: the channels.
      scores: the scores divided by the limits, `[n, T - onset, d]`.
      collapse: the steps from the onset to the collapse, `[n]`.
    """
    exceeds = scores > 1
    first = np.where(exceeds.any(axis=1), exceeds.argmax(axis=1).astype(float), np.nan)  # [n, d]
    is_collapsed = np.isfinite(collapse)
    rows = []
    for column, name in enumerate(names):
        seeds = is_collapsed & np.isfinite(first[:, column])
        if not seeds.any():
            continue
        after = first[seeds, column]
        lead = collapse[seeds] - after
        rows.append(
            {
                "condition": condition,
                "channel": str(name),
                "collapsed": int(is_collapsed.sum()),
                "warned": int((lead >= 0).sum()),
                "after_onset": float(np.median(after)),
                "lead": float(np.median(lead)),
                "score": float(np.median(scores[seeds, after.astype(int), column])),
            }
        )
    return rows


def earliest(signals: pd.DataFrame, limit: int) -> pd.DataFrame:
    """Returns at most `limit` channels of each condition: those that warn in most seeds, and of these the earliest.

    Of the entries of a vector, only the first is kept. Conditions stay in their order.

    Args:
      signals: the rows that `first_signals` returns.
      limit: the most channels per condition.
    """
    order = signals.sort_values(["warned", "after_onset", "score"], ascending=[False, True, False], kind="stable")
    order = order[~order.assign(vector=order["channel"].str.partition("[")[0]).duplicated(["condition", "vector"])]
    first = order.groupby("condition", sort=False).head(limit)
    position = {condition: i for i, condition in enumerate(signals["condition"].unique())}
    return first.sort_values("condition", key=lambda names: names.map(position), kind="stable")
