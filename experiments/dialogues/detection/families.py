"""Which kinds of channels notice a disturbed training of a dialogue first, and does the share of tool states matter?

    python experiments/dialogues/detection/families.py OUT 1=runs/detect-1/grpo-on-hop 2.5=... 4=... 4=runs/lru-4/...

Reads what `jaxaudit detect` wrote of each difficulty (every channel alone, at equal false alarms), groups channels into
families, and compares beside it one chart of each whole family (the default monitor's MEWMA, and the largest |z|),
fitted and calibrated on the same lanes by the same functions as the channels. Writes `families.csv`, `charts.csv`,
`strata.csv` (the same statistic in [tool] and in [text], lane by lane), `shares.csv` (of own tokens that are in the
stratum tool, with what undisturbed lanes do), `gaps.csv` (what [tool] has more than [text] and tails more than means,
at each difficulty, and at one more than at another) and `ordering.csv` (finding III: when the monitor's first alarm
came), and of all difficulties together `detectors.csv` and `conditions.csv` as the command has them, `lanes.csv`, the
disturbed run's metrics, and `clean.csv`, a row for each undisturbed lane; draws `families.png` and `gaps.png`.
Further folders of a difficulty are comparisons of the same runs with another monitor, of which `models.csv` has the
figures beside charts and the best channels; `pooled.csv` has AUROCs of all of these over clean lanes of all folds.
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

from basics import asked, markdown, over_seeds, said, save
from ordering import SLOW, lead, middle, shown, tell
from tool_share import compared, tool_shares, undisturbed

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
"""Channels by what they are: what trainers plot (loss, reward, entropy, KL), tails and effective sample size of an
update's ratios over all own tokens, every token statistic of a stratum, and how little the reference expects a tool's
words. The mismatch of sampler and trainer is in none of the first three: it is nothing but rounding in a clean run."""

CHARTS = {
    "MEWMA 0.05": Chart(),
    "max |z|": Chart(departure=(), outlier=(1.0,)),
}
ALONE = "deviation of "
"""How `jaxaudit detect` calls a channel alone."""


def family(channel: str) -> str | None:
    """Of FAMILIES, the first that a channel belongs to; None for those of none."""
    return next((name for name, holds in FAMILIES.items() if holds(channel)), None)


def figures(rows: pd.DataFrame) -> dict[str, Estimate]:
    """Of one or several detectors' lanes: share of disturbed lanes detected, share of slow collapses that have
    an alarm before they come (and since the onset), and median lead on them, minus infinity for none.

    Of several detectors the median over them, in every draw of seeds.
    """
    disturbed = rows[~rows.clean]
    seeds = list(disturbed.seed.unique())
    collapsed = disturbed[np.isfinite(disturbed.collapse_time) & (disturbed.collapse_time - disturbed.onset >= SLOW)]

    def over(table: pd.DataFrame, figure: Callable[[pd.DataFrame, np.ndarray], float]) -> Estimate:
        parts = [(of, of.seed.map(seeds.index).to_numpy()) for _, of in table.groupby("detector", sort=False)]
        return over_seeds(lambda counts: _median([figure(of, counts[place]) for of, place in parts]), seeds)

    return {
        "detected": over(disturbed, lambda of, counts: _share((of.late_alarm != NEVER).to_numpy(), counts)),
        "before": over(collapsed, lambda of, counts: _share(lead(of) > 0, counts)),
        "lead": over(collapsed, lambda of, counts: middle(lead(of), counts)),
    }


def _share(hit: np.ndarray, counts: np.ndarray) -> float:
    return float(hit @ counts / counts.sum()) if counts.sum() else np.nan


def _median(values: Sequence[float]) -> float:
    """The lower median, which has no trouble with infinities."""
    known = sorted(value for value in values if not np.isnan(value))
    return known[(len(known) - 1) // 2] if known else np.nan


def row_of(rows: pd.DataFrame) -> dict[str, object]:
    """The columns of a detector or several: false alarms per clean run, and `figures`, with intervals."""
    found = {"false alarms": float((rows[rows.clean].alarm != NEVER).mean())}
    for name, estimate in figures(rows).items():
        found |= {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}
    return found


def channels_alone(lanes: pd.DataFrame, ranked: pd.DataFrame) -> list[dict]:
    """A row for each family: what a typical channel of it finds, and its best, picked afterwards by AUROC."""
    alone = lanes[lanes.detector.str.startswith(ALONE)]
    alone = alone.assign(channel=alone.detector.str.removeprefix(ALONE))
    alone = alone.assign(kind=alone.channel.map(family))
    auroc = ranked.set_index("detector").auroc
    rows = []
    for name in FAMILIES:
        of = alone[alone.kind == name]
        if of.empty:
            continue
        scores = auroc[of.detector.unique()]
        best = scores.idxmax()
        row = {"family": name, "channels": len(scores), "AUROC, median": scores.median(), **row_of(of)}
        row |= {"best channel": best.removeprefix(ALONE), "its AUROC": scores[best]}
        rows.append(row | {f"its {k}": v for k, v in row_of(of[of.detector == best]).items()})
    return rows


def family_charts(lanes: LabelledLanes, settings: DetectionSettings, read: Sequence[str]) -> list[dict]:
    """A row for each family and chart: one detector that reads all of the family's channels and no other."""
    rows = []
    for name in FAMILIES:
        chosen = [i for i, channel in enumerate(lanes.channels) if channel in read and family(channel) == name]
        if not chosen:
            continue
        part = replace(lanes, channels=tuple(lanes.channels[i] for i in chosen), values=lanes.values[..., chosen])
        for title, chart in CHARTS.items():
            told = compare(part, [MultichannelChart(chart)], settings)
            rows.append({"family": name, "chart": title, "channels": len(chosen), **row_of(told)})
    return rows


def strata(lanes: pd.DataFrame) -> list[dict]:
    """A row for each statistic that both strata have: in which the first alarm since the onset comes first.

    Of the disturbed lanes: sooner in [tool], sooner in [text], at the same step, in neither; and the difference between
    the shares that both detect, with its interval over seeds.
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
        first, second = (np.where(x.late_alarm == NEVER, np.inf, x.late_alarm) for x in (tool, text))
        seeds = list(tool.seed.unique())
        gain = (np.isfinite(first).astype(float) - np.isfinite(second)).astype(float)
        gains.append((gain, (first < second).astype(float) - (second < first)))
        place = tool.seed.map(seeds.index).to_numpy()
        more = over_seeds(lambda counts, gain=gain, place=place: _share(gain, counts[place]), seeds)
        rows.append(
            {
                "statistic": name.replace("[tool, ", "[").replace("[tool]", ""),
                "sooner in tool": int((first < second).sum()),
                "sooner in text": int((second < first).sum()),
                "same step": int(((first == second) & np.isfinite(first)).sum()),
                "neither": int((~np.isfinite(first) & ~np.isfinite(second)).sum()),
                "detected, tool": float(np.isfinite(first).mean()),
                "detected, text": float(np.isfinite(second).mean()),
                "more in tool": said(more),
            }
        )
    mean_gain, mean_sooner = (np.mean([g[i] for g in gains], axis=0) for i in (0, 1))
    for title, of in (
        ("mean of all: more detected in tool", mean_gain),
        ("mean of all: sooner in tool less text", mean_sooner),
    ):
        rows.append(
            {"statistic": title, "more in tool": said(over_seeds(lambda c, of=of: _share(of, c[place]), seeds))}
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
"""What the claim says is above zero, and grows with the share of tool states."""


def gaps(lanes: pd.DataFrame) -> pd.DataFrame:
    """Of each disturbed lane, by GAPS, the mean over pairs of channels alone of what the first has more than the other.

    A pair is the same statistic in [tool] and in [text], or any of the tails and any of the means. The mean over lanes
    is a difference of shares of lanes; what is before a slow collapse is NaN in a lane without one.

    Returns:
      a row for each lane, columns seed and GAPS.
    """
    alone = lanes[lanes.detector.str.startswith(ALONE) & ~lanes.clean]
    alone = alone.assign(channel=alone.detector.str.removeprefix(ALONE))
    alarm = alone.pivot(index="lane", columns="channel", values="late_alarm").replace(NEVER, np.inf)
    of = alone.drop_duplicates("lane").set_index("lane").loc[alarm.index]
    slow = (np.isfinite(of.collapse_time) & (of.collapse_time - of.onset >= SLOW)).to_numpy()
    collapse = of.collapse_time.to_numpy()[:, None]
    tool = [name for name in alarm if "[tool" in name and name.replace("[tool", "[text") in alarm]
    kinds = {kind: [name for name in alarm if family(name) == kind] for kind in ("tails", "means")}
    pairs = {
        "tool": [(name, name.replace("[tool", "[text")) for name in tool],
        "tails": [(tail, mean) for tail in kinds["tails"] for mean in kinds["means"]],
    }
    found = {"seed": of.seed.to_numpy()}
    for kind, names in pairs.items():
        first, second = (alarm[[pair[i] for pair in names]].to_numpy() for i in (0, 1))
        found[f"detected, {kind}"] = (np.isfinite(first).astype(float) - np.isfinite(second)).mean(1)
        found[f"sooner, {kind}"] = ((first < second).astype(float) - (second < first)).mean(1)
        before = ((first < collapse).astype(float) - (second < collapse)).mean(1)
        found[f"before, {kind}"] = np.where(slow, before, np.nan)
    return pd.DataFrame(found)


def growth(found: dict[str, pd.DataFrame], shares: dict[str, float]) -> list[dict]:
    """A row for each of GAPS and difficulty, and one for what it has more at one difficulty than at another.

    Args:
      found: by difficulty, what `gaps` tells.
      shares: of own tokens in the stratum tool, by difficulty.

    Intervals are over seeds: a seed's lanes are taken or left together, at all difficulties (it begins from the same
    parameters at each).
    """
    seeds = sorted({seed for table in found.values() for seed in table.seed})
    places = {one: table.seed.map(seeds.index).to_numpy() for one, table in found.items()}

    def at(one: str, gap: str, counts: np.ndarray) -> float:
        values, weights = found[one][gap].to_numpy(), counts[places[one]]
        there = ~np.isnan(values)
        return _share(values[there], weights[there])

    rows = []
    for gap, title in GAPS.items():
        for one, table in found.items():
            estimate = over_seeds(lambda counts, one=one, gap=gap: at(one, gap, counts), seeds)
            row = {"gap": title, "difficulty": one, "tool share": shares[one], "lanes": int(table[gap].notna().sum())}
            rows.append(row | _with_ends(estimate))
        for a, b in compared(list(found)):
            more = over_seeds(lambda counts, gap=gap, a=a, b=b: at(b, gap, counts) - at(a, gap, counts), seeds)
            rows.append({"gap": title, "difficulty": f"{b} less {a}", **_with_ends(more)})
    return rows


def _with_ends(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def draw_gaps(table: pd.DataFrame, path: Path) -> None:
    """A panel for each gap: what it is at each difficulty."""
    look = {"title": "difference of shares of lanes", "axis": alt.Axis(format="+.0%")}
    look["scale"] = alt.Scale(domain=[-0.6, 0.6], clamp=True)
    color = style.RAMP[2]
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y="y:Q")
    panels = []
    for title, rows in table.dropna(subset=["tool share"]).groupby("gap", sort=False):
        named = [f"{one} ({share:.0%})" for one, share in zip(rows.difficulty, rows["tool share"], strict=True)]
        base = alt.Chart(rows.assign(named=named))
        x = alt.X("named:N", title="difficulty (tool share)", sort=named, axis=alt.Axis(labelAngle=0))
        bars = base.mark_rule(strokeWidth=1.4, color=color).encode(x, alt.Y("low:Q", **look), y2="high:Q")
        points = base.mark_point(filled=True, size=55, opacity=1, color=color).encode(x, alt.Y("value:Q", **look))
        panels.append(alt.layer(zero, bars, points).properties(title=title, width=230, height=160))
    save(alt.concat(*panels, columns=3), path)


def other_monitors(name: str, folders: Sequence[Path]) -> tuple[list[pd.DataFrame], list[dict]]:
    """Of comparisons of the same runs with other monitors: their figures beside those of charts, of the best channels
    alone and of performance, as the command has them (`gain`: the monitor less that one, paired); and the rows of
    `ordering.tell` for the monitor itself."""
    tables, order = [], []
    for folder in folders:
        monitor = json.loads((folder / "comparison.json").read_text())["monitor"]
        ranked = pd.read_csv(folder / "detectors.csv")
        kept = ranked.family.isin((MONITOR, ALL_CHANNELS)) | ranked.detector.isin(shown(folder))
        tables.append(ranked[kept].assign(monitor=monitor))
        order += tell(name, pd.read_csv(folder / "lanes.csv"), [monitor])
    return tables, order


def pooled(folders: Sequence[Path]) -> pd.DataFrame:
    """A row for each monitor, chart, best channel alone and detector of performance: AUROC over all clean lanes.

    `detectors.csv` compares lanes within a fold, and only folds that hold disturbed seeds count there; here a disturbed
    lane is compared with clean lanes of all folds, so scores of different fits are, too. "gain" is what the first
    folder's monitor has more, paired. Intervals are over seeds.
    """
    monitors = [json.loads((folder / "comparison.json").read_text())["monitor"] for folder in folders]
    lanes = pd.concat([pd.read_csv(folder / "lanes.csv") for folder in folders])
    lanes = lanes.drop_duplicates(["lane", "detector"])
    best = [name for folder in folders for name in shown(folder)]
    kept = lanes[(lanes.family == ALL_CHANNELS) | lanes.detector.isin([*monitors, *best])]
    ends = ("", "_low", "_high")
    return summarise(kept.assign(fold=0), monitors[0])[
        ["detector", *(f"{figure}{end}" for figure in ("auroc", "gain_auroc") for end in ends)]
    ]


def draw(alone: pd.DataFrame, charts: pd.DataFrame, shares: dict[str, float], path: Path) -> None:
    """Slow collapses warned of and lanes detected, by family, a mark for each difficulty."""
    labels = {
        one: f"difficulty {one}: {share:.0%} of own tokens after a tool's result" for one, share in shares.items()
    }
    shown_tables = {
        "a typical channel of the family, alone": alone,
        "one chart of the whole family (MEWMA)": charts[charts.chart == next(iter(CHARTS))],
    }
    colors = dict(zip(labels.values(), style.ramp(len(labels)), strict=True))
    panels = []
    for title, table in shown_tables.items():
        for figure, words in (
            ("before", "slow collapses with an alarm before them"),
            ("detected", "disturbed lanes with an alarm since the onset"),
        ):
            panels.append(_panel(table.assign(label=table.difficulty.map(labels)), figure, title, words, colors))
    save(alt.concat(*panels, columns=2).resolve_scale(color="shared"), path)


def _panel(table: pd.DataFrame, figure: str, title: str, words: str, colors: dict[str, str]) -> alt.LayerChart:
    frame = table[["family", "label", figure, f"{figure} low", f"{figure} high"]].copy()
    frame.columns = ["family", "label", "value", "low", "high"]
    look = {"title": words, "axis": alt.Axis(format=".0%"), "scale": alt.Scale(domain=[0, 1], nice=False)}
    y = alt.Y("family:N", title=None, sort=list(FAMILIES))
    scale, legend = (
        alt.Scale(domain=list(colors), range=list(colors.values())),
        alt.Legend(orient="bottom", labelLimit=400),
    )
    color = alt.Color("label:N", title=None, scale=scale, legend=legend)
    apart = alt.YOffset("label:N", sort=list(colors))
    base = alt.Chart(frame.dropna())
    bars = base.mark_rule(strokeWidth=1.4).encode(alt.X("low:Q", **look), y, x2="high:Q", yOffset=apart, color=color)
    points = base.mark_point(filled=True, size=55, opacity=1).encode(
        alt.X("value:Q", **look), y, yOffset=apart, color=color
    )
    return alt.layer(bars, points).properties(
        title=title, width=300, height=24 * len(FAMILIES) * max(1, len(colors) / 2)
    )


def main() -> None:
    """Tells and draws."""
    out, named = asked(__doc__, "of a difficulty, in what `jaxaudit detect` wrote")
    alone, charts, apart, order, among, gap, clean = [], [], [], [], [], {}, {}
    ranks, conditions, disturbed, models = [], [], [], []
    for difficulty, (folder, *others) in named.items():
        described = json.loads((folder / "comparison.json").read_text())
        runs = [Path(run) for run in described["runs"]]
        settings = DetectionSettings(**{name: described[name] for name in ("folds", "alpha", "fitted", "seed")})
        lanes, ranked = pd.read_csv(folder / "lanes.csv"), pd.read_csv(folder / "detectors.csv")
        alone += [{"difficulty": difficulty, **row} for row in channels_alone(lanes, ranked)]
        apart += [{"difficulty": difficulty, **row} for row in strata(lanes)]
        gap[difficulty] = gaps(lanes)
        ranks.append(ranked.assign(difficulty=difficulty))
        conditions.append(pd.read_csv(folder / "conditions.csv").assign(difficulty=difficulty))
        # A run of nothing but undisturbed lanes has nothing to tell here.
        metrics = [pd.read_csv(run / "metrics.csv") for run in runs]
        disturbed += [table.assign(difficulty=difficulty) for table in metrics if table.perturbation.nunique() > 1]
        order += tell(f"difficulty {difficulty}", lanes, list(dict.fromkeys([described["monitor"], *shown(folder)])))
        tables, rows = other_monitors(f"difficulty {difficulty}", others)
        models += [table.assign(difficulty=difficulty) for table in tables]
        order += rows
        among.append(pooled([folder, *others]).assign(difficulty=difficulty))
        stored = load_lanes(runs)[0]
        charts += [{"difficulty": difficulty, **row} for row in family_charts(stored, settings, described["channels"])]
        clean[difficulty] = undisturbed(runs)
    mean_shares = {difficulty: table["mean"].mean() for difficulty, table in clean.items()}
    tables = {
        name: pd.DataFrame(rows)
        for name, rows in (
            ("families", alone),
            ("charts", charts),
            ("strata", apart),
            ("shares", tool_shares(clean)),
            ("gaps", growth(gap, mean_shares)),
            ("ordering", order),
        )
    }
    several = {"detectors": ranks, "conditions": conditions, "lanes": disturbed, "models": models, "pooled": among}
    several["clean"] = [table.assign(difficulty=difficulty) for difficulty, table in clean.items()]
    for name, parts in several.items():
        if parts:
            pd.concat(parts).to_csv(out / f"{name}.csv", index=False, float_format="%.4g")
    for name, table in tables.items():
        table.to_csv(out / f"{name}.csv", index=False, float_format="%.4g")
        print(markdown(table), end="\n\n")
    draw(tables["families"], tables["charts"], mean_shares, out / "families.png")
    draw_gaps(tables["gaps"], out / "gaps.png")


if __name__ == "__main__":
    main()
