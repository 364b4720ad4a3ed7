"""Which families of channels detect a disturbed dialogue training first, and does the share of tool states matter?

    python experiments/dialogues/detection/families.py OUT 1=runs/detect-1/grpo-on-hop 2.5=... 4=... 4=runs/lru-4/...

The inputs are results of `jaxaudit detect` for each difficulty, with every channel alone at equal false alarms.
Channels are grouped into families, and each family is also read by one chart (the default monitor's MEWMA, and the
largest |z|), fitted and calibrated on the same lanes by the same functions. The results are:

- `families.csv` and `charts.csv`: channels alone, and charts, by family.
- `strata.csv`: the same statistic in [tool] and in [text], lane by lane.
- `shares.csv`: shares of policy tokens in the stratum tool, and other statistics of undisturbed lanes.
- `gaps.csv`: differences between [tool] and [text] and between tails and means, by difficulty, and their growth.
- `ordering.csv`: the time of the monitor's first alarm (finding III).
- `detectors.csv`, `conditions.csv`, `lanes.csv`, `clean.csv`: the tables of the command, the metrics of the disturbed
  runs, and a row for each undisturbed lane, for all difficulties.
- `models.csv`: further folders of a difficulty are comparisons of the same runs with another monitor, which this table
  compares with charts and the best channels; `pooled.csv` has their AUROCs over clean lanes of all folds.
- `families.png` and `gaps.png`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

from basics import format_estimate, markdown, over_seeds, parse_arguments, save
from ordering import SLOW, lead, lead_rows, selected_detectors, weighted_median
from tool_share import difficulty_pairs, tool_share_rows, undisturbed_lanes

from jaxaudit.analysis.statistics import Estimate
from jaxaudit.monitoring.charts import Chart
from jaxaudit.monitoring.comparison import NEVER, DetectionSettings, compare, summarise
from jaxaudit.monitoring.detector import ALL_CHANNELS, MONITOR, MultichannelChart
from jaxaudit.monitoring.labelled_lanes import LabelledLanes, load_lanes
from jaxaudit.report import style

TAILS = ("ratio_max", "ratio_quantile", "weight_cvar", "weight_q999", "weight_top_share", "weight_tail")
MEANS = ("loss", "acting_performance", "entropy[all]", "kl[all]")
FAMILIES: dict[str, Callable[[str], bool]] = {
    "means": lambda name: name in MEANS,
    "ESS": lambda name: name.startswith("ratio_ess[all"),
    "tails": lambda name: name.startswith(tuple(f"{tail}[all" for tail in TAILS)),
    "tool": lambda name: "[tool" in name,
    "text": lambda name: "[text" in name,
    "unfamiliarity": lambda name: name == "tool_log_probability",
}
"""Families of channels: what trainers usually plot (loss, reward, entropy, KL), tails and effective sample size of an
update's ratios over all policy tokens, all token statistics of a stratum, and the reference's log-probability of a
tool's
words. The mismatch of sampler and trainer is in none of the first three, since it is only rounding in clean runs."""

CHARTS = {
    "MEWMA 0.05": Chart(),
    "max |z|": Chart(departure=(), outlier=(1.0,)),
}
ALONE = "deviation of "
"""The prefix by which `jaxaudit detect` names detectors of a single channel."""


def family(channel: str) -> str | None:
    """Returns the first of FAMILIES that contains a channel, or None."""
    return next((name for name, holds in FAMILIES.items() if holds(channel)), None)


def figures(rows: pd.DataFrame) -> dict[str, Estimate]:
    """Returns the detected share of disturbed lanes, the share of slow collapses with an earlier alarm, and leads.

    Alarms count from the onset on; a lead without an alarm is minus infinity. For several detectors, it is the median
    over them in every bootstrap sample of seeds.
    """
    disturbed = rows[~rows.clean]
    seeds = list(disturbed.seed.unique())
    collapsed = disturbed[np.isfinite(disturbed.collapse_time) & (disturbed.collapse_time - disturbed.onset >= SLOW)]

    def resampled(table: pd.DataFrame, figure: Callable[[pd.DataFrame, np.ndarray], float]) -> Estimate:
        parts = [(group, group.seed.map(seeds.index).to_numpy()) for _, group in table.groupby("detector", sort=False)]
        return over_seeds(
            lambda counts: _median([figure(group, counts[seed_index]) for group, seed_index in parts]), seeds
        )

    return {
        "detected": resampled(disturbed, lambda group, counts: _share((group.late_alarm != NEVER).to_numpy(), counts)),
        "before": resampled(collapsed, lambda group, counts: _share(lead(group) > 0, counts)),
        "lead": resampled(collapsed, lambda group, counts: weighted_median(lead(group), counts)),
    }


def _share(hit: np.ndarray, counts: np.ndarray) -> float:
    return float(hit @ counts / counts.sum()) if counts.sum() else np.nan


def _median(values: Sequence[float]) -> float:
    """Returns the lower median, which is defined for infinities."""
    finite = sorted(value for value in values if not np.isnan(value))
    return finite[(len(finite) - 1) // 2] if finite else np.nan


def row_of(rows: pd.DataFrame) -> dict[str, object]:
    """Returns the columns of one or several detectors: false alarms per clean run, and `figures` with intervals."""
    columns = {"false alarms": float((rows[rows.clean].alarm != NEVER).mean())}
    for name, estimate in figures(rows).items():
        columns |= {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}
    return columns


def channels_alone(lanes: pd.DataFrame, ranked: pd.DataFrame) -> list[dict]:
    """Returns a row for each family: results of its typical channel, and of its best one by AUROC."""
    alone = lanes[lanes.detector.str.startswith(ALONE)]
    alone = alone.assign(channel=alone.detector.str.removeprefix(ALONE))
    alone = alone.assign(kind=alone.channel.map(family))
    auroc = ranked.set_index("detector").auroc
    rows = []
    for name in FAMILIES:
        group = alone[alone.kind == name]
        if group.empty:
            continue
        scores = auroc[group.detector.unique()]
        best = scores.idxmax()
        row = {"family": name, "channels": len(scores), "AUROC, median": scores.median(), **row_of(group)}
        row |= {"best channel": best.removeprefix(ALONE), "its AUROC": scores[best]}
        rows.append(row | {f"its {k}": v for k, v in row_of(group[group.detector == best]).items()})
    return rows


def family_charts(lanes: LabelledLanes, settings: DetectionSettings, read: Sequence[str]) -> list[dict]:
    """Returns a row for each family and chart, a detector that reads exactly the channels of the family."""
    rows = []
    for name in FAMILIES:
        indices = [i for i, channel in enumerate(lanes.channels) if channel in read and family(channel) == name]
        if not indices:
            continue
        part = replace(lanes, channels=tuple(lanes.channels[i] for i in indices), values=lanes.values[..., indices])
        for title, chart in CHARTS.items():
            comparison = compare(part, [MultichannelChart(chart)], settings)
            rows.append({"family": name, "chart": title, "channels": len(indices), **row_of(comparison)})
    return rows


def strata(lanes: pd.DataFrame) -> list[dict]:
    """Returns a row for each statistic of both strata, which compares their first alarms after the onset.

    Disturbed lanes are counted as sooner in [tool], sooner in [text], at the same step, or in neither. A row also has
    the difference between the detected shares, with its interval over seeds.
    """
    alone = lanes[lanes.detector.str.startswith(ALONE) & ~lanes.clean].set_index("lane")
    alone = alone.assign(channel=alone.detector.str.removeprefix(ALONE))
    by_channel = dict(list(alone.groupby("channel", sort=False)))
    rows, gains = [], []
    for name, tool in by_channel.items():
        text = by_channel.get(name.replace("[tool", "[text"))
        if "[tool" not in name or text is None:
            continue
        text = text.loc[tool.index]
        tool_alarm, text_alarm = (np.where(x.late_alarm == NEVER, np.inf, x.late_alarm) for x in (tool, text))
        seeds = list(tool.seed.unique())
        gain = (np.isfinite(tool_alarm).astype(float) - np.isfinite(text_alarm)).astype(float)
        gains.append((gain, (tool_alarm < text_alarm).astype(float) - (text_alarm < tool_alarm)))
        seed_index = tool.seed.map(seeds.index).to_numpy()
        difference = over_seeds(
            lambda counts, gain=gain, seed_index=seed_index: _share(gain, counts[seed_index]), seeds
        )
        rows.append(
            {
                "statistic": name.replace("[tool, ", "[").replace("[tool]", ""),
                "sooner in tool": int((tool_alarm < text_alarm).sum()),
                "sooner in text": int((text_alarm < tool_alarm).sum()),
                "same step": int(((tool_alarm == text_alarm) & np.isfinite(tool_alarm)).sum()),
                "neither": int((~np.isfinite(tool_alarm) & ~np.isfinite(text_alarm)).sum()),
                "detected, tool": float(np.isfinite(tool_alarm).mean()),
                "detected, text": float(np.isfinite(text_alarm).mean()),
                "more in tool": format_estimate(difference),
            }
        )
    mean_gain, mean_sooner = (np.mean([g[i] for g in gains], axis=0) for i in (0, 1))
    for title, values in (
        ("mean of all: more detected in tool", mean_gain),
        ("mean of all: sooner in tool less text", mean_sooner),
    ):
        rows.append(
            {
                "statistic": title,
                "more in tool": format_estimate(
                    over_seeds(lambda c, values=values: _share(values, c[seed_index]), seeds)
                ),
            }
        )
    return rows


GAPS = {
    "detected, tool": "detected: [tool] less [text]",
    "sooner, tool": "first alarm sooner: [tool] less [text]",
    "before, tool": "alarm before a slow collapse: [tool] less [text]",
    "detected, tails": "detected: tails less means",
    "sooner, tails": "first alarm sooner: tails less means",
    "before, tails": "alarm before a slow collapse: tails less means",
}
"""Differences that should be above zero and grow with the share of tool states, if the claim holds."""


def gaps(lanes: pd.DataFrame) -> pd.DataFrame:
    """Returns for each disturbed lane the GAPS, means over pairs of channels of the difference between the two.

    A pair is the same statistic in [tool] and in [text], or one of the tails and one of the means. The mean over lanes
    is a difference of shares of lanes. Gaps before a slow collapse are NaN in lanes without one.

    Returns:
      a row for each lane, with columns seed and GAPS.
    """
    alone = lanes[lanes.detector.str.startswith(ALONE) & ~lanes.clean]
    alone = alone.assign(channel=alone.detector.str.removeprefix(ALONE))
    alarm = alone.pivot(index="lane", columns="channel", values="late_alarm").replace(NEVER, np.inf)
    lanes_ = alone.drop_duplicates("lane").set_index("lane").loc[alarm.index]
    slow_collapse = (np.isfinite(lanes_.collapse_time) & (lanes_.collapse_time - lanes_.onset >= SLOW)).to_numpy()
    collapse = lanes_.collapse_time.to_numpy()[:, None]
    tool = [name for name in alarm if "[tool" in name and name.replace("[tool", "[text") in alarm]
    kinds = {kind: [name for name in alarm if family(name) == kind] for kind in ("tails", "means")}
    pairs = {
        "tool": [(name, name.replace("[tool", "[text")) for name in tool],
        "tails": [(tail, mean) for tail in kinds["tails"] for mean in kinds["means"]],
    }
    columns = {"seed": lanes_.seed.to_numpy()}
    for kind, names in pairs.items():
        first, second = (alarm[[pair[i] for pair in names]].to_numpy() for i in (0, 1))
        columns[f"detected, {kind}"] = (np.isfinite(first).astype(float) - np.isfinite(second)).mean(1)
        columns[f"sooner, {kind}"] = ((first < second).astype(float) - (second < first)).mean(1)
        before = ((first < collapse).astype(float) - (second < collapse)).mean(1)
        columns[f"before, {kind}"] = np.where(slow_collapse, before, np.nan)
    return pd.DataFrame(columns)


def growth(tables: dict[str, pd.DataFrame], shares: dict[str, float]) -> list[dict]:
    """Returns a row for each gap and difficulty, and for its differences between difficulties.

    Args:
      found: by difficulty, the table of `gaps`.
      shares: by difficulty, the share of policy tokens in the stratum tool.

    Intervals are over seeds: all lanes of a seed are resampled together at all difficulties, since they begin from the
    same parameters.
    """
    seeds = sorted({seed for table in tables.values() for seed in table.seed})
    places = {difficulty: table.seed.map(seeds.index).to_numpy() for difficulty, table in tables.items()}

    def mean_gap(difficulty: str, gap: str, counts: np.ndarray) -> float:
        values, weights = tables[difficulty][gap].to_numpy(), counts[places[difficulty]]
        present = ~np.isnan(values)
        return _share(values[present], weights[present])

    rows = []
    for gap, title in GAPS.items():
        for difficulty, table in tables.items():
            estimate = over_seeds(
                lambda counts, difficulty=difficulty, gap=gap: mean_gap(difficulty, gap, counts), seeds
            )
            row = {
                "gap": title,
                "difficulty": difficulty,
                "tool share": shares[difficulty],
                "lanes": int(table[gap].notna().sum()),
            }
            rows.append(row | _with_ends(estimate))
        for a, b in difficulty_pairs(list(tables)):
            difference = over_seeds(
                lambda counts, gap=gap, a=a, b=b: mean_gap(b, gap, counts) - mean_gap(a, gap, counts), seeds
            )
            rows.append({"gap": title, "difficulty": f"{b} less {a}", **_with_ends(difference)})
    return rows


def _with_ends(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def draw_gaps(table: pd.DataFrame, path: Path) -> None:
    """Draws a panel for each gap, with its values by difficulty."""
    axis_options = {"title": "difference of shares of lanes", "axis": alt.Axis(format="+.0%")}
    axis_options["scale"] = alt.Scale(domain=[-0.6, 0.6], clamp=True)
    color = style.RAMP[2]
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y="y:Q")
    panels = []
    for title, rows in table.dropna(subset=["tool share"]).groupby("gap", sort=False):
        labels = [
            f"{difficulty} ({share:.0%})" for difficulty, share in zip(rows.difficulty, rows["tool share"], strict=True)
        ]
        base = alt.Chart(rows.assign(named=labels))
        x = alt.X("named:N", title="difficulty (tool share)", sort=labels, axis=alt.Axis(labelAngle=0))
        bars = base.mark_rule(strokeWidth=1.4, color=color).encode(x, alt.Y("low:Q", **axis_options), y2="high:Q")
        points = base.mark_point(filled=True, size=55, opacity=1, color=color).encode(
            x, alt.Y("value:Q", **axis_options)
        )
        panels.append(alt.layer(zero, bars, points).properties(title=title, width=230, height=160))
    save(alt.concat(*panels, columns=3), path)


def other_monitors(name: str, folders: Sequence[Path]) -> tuple[list[pd.DataFrame], list[dict]]:
    """Returns results of comparisons of the same runs with other monitors.

    These are the rows of the command's table for the monitor, charts, the best channels alone and performance (`gain`
    is the paired difference of the monitor and the row), and rows of `ordering.lead_rows` for the monitor.
    """
    tables, ordering_rows = [], []
    for folder in folders:
        monitor = json.loads((folder / "comparison.json").read_text())["monitor"]
        ranked = pd.read_csv(folder / "detectors.csv")
        selected = ranked.family.isin((MONITOR, ALL_CHANNELS)) | ranked.detector.isin(selected_detectors(folder))
        tables.append(ranked[selected].assign(monitor=monitor))
        ordering_rows += lead_rows(name, pd.read_csv(folder / "lanes.csv"), [monitor])
    return tables, ordering_rows


def pooled(folders: Sequence[Path]) -> pd.DataFrame:
    """Returns AUROCs over all clean lanes for each monitor, chart, best channel alone and detector of performance.

    `detectors.csv` compares lanes within folds that have disturbed seeds. Here, a disturbed lane is compared with clean
    lanes of all folds, and thus with scores of other fits. "gain" is the paired difference of the first folder's
    monitor and the row. Intervals are over seeds.
    """
    monitors = [json.loads((folder / "comparison.json").read_text())["monitor"] for folder in folders]
    lanes = pd.concat([pd.read_csv(folder / "lanes.csv") for folder in folders])
    lanes = lanes.drop_duplicates(["lane", "detector"])
    best = [name for folder in folders for name in selected_detectors(folder)]
    selected = lanes[(lanes.family == ALL_CHANNELS) | lanes.detector.isin([*monitors, *best])]
    ends = ("", "_low", "_high")
    return summarise(selected.assign(fold=0), monitors[0])[
        ["detector", *(f"{figure}{end}" for figure in ("auroc", "gain_auroc") for end in ends)]
    ]


def draw(alone: pd.DataFrame, charts: pd.DataFrame, shares: dict[str, float], path: Path) -> None:
    """Draws slow collapses with a warning and detected lanes, by family and difficulty."""
    labels = {
        difficulty: f"difficulty {difficulty}: {share:.0%} of policy tokens after a tool's result"
        for difficulty, share in shares.items()
    }
    shown_tables = {
        "a typical channel of the family, alone": alone,
        "one chart of the whole family (MEWMA)": charts[charts.chart == next(iter(CHARTS))],
    }
    colors = dict(zip(labels.values(), style.ramp(len(labels)), strict=True))
    panels = []
    for title, table in shown_tables.items():
        for figure, title_ in (
            ("before", "slow collapses with an alarm before them"),
            ("detected", "disturbed lanes with an alarm since the onset"),
        ):
            panels.append(_panel(table.assign(label=table.difficulty.map(labels)), figure, title, title_, colors))
    save(alt.concat(*panels, columns=2).resolve_scale(color="shared"), path)


def _panel(table: pd.DataFrame, figure: str, title: str, axis_title: str, colors: dict[str, str]) -> alt.LayerChart:
    frame = table[["family", "label", figure, f"{figure} low", f"{figure} high"]].copy()
    frame.columns = ["family", "label", "value", "low", "high"]
    axis_options = {"title": axis_title, "axis": alt.Axis(format=".0%"), "scale": alt.Scale(domain=[0, 1], nice=False)}
    y = alt.Y("family:N", title=None, sort=list(FAMILIES))
    scale, legend = (
        alt.Scale(domain=list(colors), range=list(colors.values())),
        alt.Legend(orient="bottom", labelLimit=400),
    )
    color = alt.Color("label:N", title=None, scale=scale, legend=legend)
    offset = alt.YOffset("label:N", sort=list(colors))
    base = alt.Chart(frame.dropna())
    bars = base.mark_rule(strokeWidth=1.4).encode(
        alt.X("low:Q", **axis_options), y, x2="high:Q", yOffset=offset, color=color
    )
    points = base.mark_point(filled=True, size=55, opacity=1).encode(
        alt.X("value:Q", **axis_options), y, yOffset=offset, color=color
    )
    return alt.layer(bars, points).properties(
        title=title, width=300, height=24 * len(FAMILIES) * max(1, len(colors) / 2)
    )


def main() -> None:
    """Writes the tables and draws the figures."""
    out, folders_by_difficulty = parse_arguments(__doc__, "folder of a difficulty, written by `jaxaudit detect`")
    alone, charts, strata_rows, ordering_rows, pooled_tables, gap_tables, clean_tables = [], [], [], [], [], {}, {}
    ranks, conditions, disturbed, models = [], [], [], []
    for difficulty, (folder, *others) in folders_by_difficulty.items():
        description = json.loads((folder / "comparison.json").read_text())
        runs = [Path(run) for run in description["runs"]]
        settings = DetectionSettings(**{name: description[name] for name in ("folds", "alpha", "fitted", "seed")})
        lanes, ranked = pd.read_csv(folder / "lanes.csv"), pd.read_csv(folder / "detectors.csv")
        alone += [{"difficulty": difficulty, **row} for row in channels_alone(lanes, ranked)]
        strata_rows += [{"difficulty": difficulty, **row} for row in strata(lanes)]
        gap_tables[difficulty] = gaps(lanes)
        ranks.append(ranked.assign(difficulty=difficulty))
        conditions.append(pd.read_csv(folder / "conditions.csv").assign(difficulty=difficulty))
        # Runs with undisturbed lanes only are left out of this table.
        metrics = [pd.read_csv(run / "metrics.csv") for run in runs]
        disturbed += [table.assign(difficulty=difficulty) for table in metrics if table.perturbation.nunique() > 1]
        ordering_rows += lead_rows(
            f"difficulty {difficulty}",
            lanes,
            list(dict.fromkeys([description["monitor"], *selected_detectors(folder)])),
        )
        tables, rows = other_monitors(f"difficulty {difficulty}", others)
        models += [table.assign(difficulty=difficulty) for table in tables]
        ordering_rows += rows
        pooled_tables.append(pooled([folder, *others]).assign(difficulty=difficulty))
        labelled = load_lanes(runs)[0]
        charts += [
            {"difficulty": difficulty, **row} for row in family_charts(labelled, settings, description["channels"])
        ]
        clean_tables[difficulty] = undisturbed_lanes(runs)
    mean_shares = {difficulty: table["mean"].mean() for difficulty, table in clean_tables.items()}
    tables = {
        name: pd.DataFrame(rows)
        for name, rows in (
            ("families", alone),
            ("charts", charts),
            ("strata", strata_rows),
            ("shares", tool_share_rows(clean_tables)),
            ("gaps", growth(gap_tables, mean_shares)),
            ("ordering", ordering_rows),
        )
    }
    concatenated = {
        "detectors": ranks,
        "conditions": conditions,
        "lanes": disturbed,
        "models": models,
        "pooled": pooled_tables,
    }
    concatenated["clean"] = [table.assign(difficulty=difficulty) for difficulty, table in clean_tables.items()]
    for name, parts in concatenated.items():
        if parts:
            pd.concat(parts).to_csv(out / f"{name}.csv", index=False, float_format="%.4g")
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, float_format="%.4g")
        print(markdown(table), end="\n\n")
    draw(tables["families"], tables["charts"], mean_shares, out / "families.png")
    draw_gaps(tables["gaps"], out / "gaps.png")


if __name__ == "__main__":
    main()
