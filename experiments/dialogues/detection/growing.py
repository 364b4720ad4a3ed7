"""Does trouble begin in tool states, in the tails of the update's weights or in unfamiliar results, before means show?

    python experiments/dialogues/detection/growing.py OUT runs/growing-clean runs/growing-disturbed

Of trainings in which the share of own tokens after a tool's result grows. Each family of channels is one chart, and
each channel another, of the steps from the disturbance's onset on; all are fitted to the first clean seeds and
calibrated on them by parts they were not fitted to, to the same false alarms a run, and tested on the other clean
lanes, the disturbed seeds' controls among them. Writes `share.csv` (how the tool share grows, and with it what tool
states weigh), `families.csv` (false alarms, lanes detected, delays and leads), `alone.csv` (the same of every channel),
`pairs.csv` (which of two families alarms first, lane by lane), `channels.csv` (the same statistic in two strata, and
tails and means, channel by channel), `alarms.csv` (first alarm of every family in every disturbed lane), `results.csv`
(how far the instrument of unfamiliarity moves), and draws `growing.png`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

from basics import over_seeds, save

from jaxaudit.analysis.run_reader import load
from jaxaudit.monitoring.charts import Chart
from jaxaudit.monitoring.detector import MultichannelChart
from jaxaudit.monitoring.labelled_lanes import LabelledLanes, load_lanes
from jaxaudit.monitoring.scoring import threshold
from jaxaudit.report import style

CALIBRATE = 23
"""Of the clean run's seeds, how many detectors are fitted to and calibrated on: the first."""

ALPHA = 0.05
"""False alarms per clean run that detectors are calibrated to."""

LIMITS = "calibrated", "matched"
"""How a detector's threshold is set: on the calibration lanes, out of what was fitted, or so that of the clean test
lanes a share ALPHA has an alarm, no more and no less, which no one could know beforehand, but is the same for all."""

PARTS = 8
"""Parts of the calibration lanes, each scored by detectors fitted to the others."""

CHARTS = {"MEWMA 0.2": Chart(departure=(0.2,)), "max |EWMA 0.2|": Chart(departure=(), outlier=(0.2,))}
"""Of a family; the first is told of first. Of one channel both are the same."""

LOST = 0.2
"""Success below the control's at the same step from which on a lane is in trouble."""

TURNS = ("turn_0", "turn_1", "turn_2", "turn_3+")
WEIGHTS = ("weight_cvar", "weight_q999", "weight_top_share", "weight_tail")
MEANS = ("loss", "acting_performance", "entropy[all]", "kl[all]")
BASELINES = ("truncated", "calls", "row_tokens", "acting_performance", "performance")


def base(channel: str) -> tuple[str, str]:
    """A channel's statistic without its stratum, and the stratum; "" where it has none."""
    name, bracket, rest = channel.partition("[")
    entries = rest.rstrip("]").split(", ") if bracket else []
    if not entries or entries[0] not in ("all", "tool", "text", *TURNS):
        return channel, ""
    others = ", ".join(entries[1:])
    return (f"{name}[{others}]" if others else name), entries[0]


def families(channels: Sequence[str], moving: set[str]) -> dict[str, list[str]]:
    """Channels by family; strata have the same statistics, all that move in each of them but the count of tokens."""
    by_stratum: dict[str, dict[str, str]] = {}
    for channel in channels:
        statistic, stratum = base(channel)
        if stratum and statistic != "own_tokens" and channel in moving:
            by_stratum.setdefault(stratum, {})[statistic] = channel
    common = set.intersection(*(set(by_stratum[s]) for s in ("tool", "text", *TURNS)))
    found = {
        "means: loss, reward, entropy, KL": [c for c in channels if c in MEANS],
        "weight tails": [c for c in channels if c.startswith(tuple(f"{w}[all" for w in WEIGHTS))],
        "weight and ratio ESS": [c for c in channels if c.startswith(("weight_ess[all", "ratio_ess[all"))],
        "ratio tails": [c for c in channels if c.startswith(("ratio_max[all", "ratio_quantile[all"))],
    }
    for stratum in ("tool", "text", *TURNS):
        found[f"[{stratum}]"] = [name for statistic, name in by_stratum[stratum].items() if statistic in common]
    for stratum in ("tool", "text"):
        tails = tuple(f"{w}[{stratum}" for w in WEIGHTS)
        found[f"weight tails in [{stratum}]"] = [c for c in channels if c.startswith(tails)]
    for source in ("tool", "rest"):
        found[f"gradient of {source}"] = [c for c in channels if c.startswith("source_") and c.endswith(f"[{source}]")]
    found = {name: [channel for channel in of if channel in moving] for name, of in found.items()}
    found["unfamiliarity of results"] = ["result_log_probability"]
    found["entropy after results"] = ["entropy_after_result"]
    for channel in BASELINES:
        found[f"{channel} alone"] = [channel]
    return {name: [c for c in of if c in channels] for name, of in found.items()}


PAIRS = (
    ("[tool]", "[text]"),
    ("weight tails in [tool]", "weight tails in [text]"),
    ("gradient of tool", "gradient of rest"),
    *((turn, "[turn_0]") for turn in ("[turn_1]", "[turn_2]", "[turn_3+]")),
    ("weight tails", "means: loss, reward, entropy, KL"),
    ("weight and ratio ESS", "means: loss, reward, entropy, KL"),
    ("ratio tails", "means: loss, reward, entropy, KL"),
    ("unfamiliarity of results", "means: loss, reward, entropy, KL"),
    ("[tool]", "means: loss, reward, entropy, KL"),
    ("weight tails", "calls alone"),
    ("[tool]", "calls alone"),
    ("[tool]", "acting_performance alone"),
    ("unfamiliarity of results", "acting_performance alone"),
    ("[tool]", "truncated alone"),
    ("means: loss, reward, entropy, KL", "calls alone"),
    ("means: loss, reward, entropy, KL", "acting_performance alone"),
)
"""Which comes first? The claim's first three lines say the first of each."""


@dataclass(frozen=True)
class Trial:
    """The lanes that a comparison is of, cut to the steps from the onset on.

    Attributes:
      lanes: all.
      onset: step.
      calibrate, clean, disturbed: numbers of lanes.
    """

    lanes: LabelledLanes
    onset: int
    calibrate: np.ndarray
    clean: np.ndarray
    disturbed: np.ndarray

    @property
    def table(self) -> pd.DataFrame:
        """Of the disturbed lanes."""
        return self.lanes.table.iloc[self.disturbed].reset_index(drop=True)

    def alarms(self, names: Sequence[str], chart: Chart) -> dict[str, np.ndarray]:
        """By LIMITS, the first step since the onset at which one chart of these channels alarms, `[lanes]`.

        Infinite for never. Those of the calibration lanes are not to be read.
        """
        place = [self.lanes.channels.index(name) for name in names]
        values = self.lanes.values[:, self.onset :, place]
        detector, own = MultichannelChart(chart), values[self.calibrate]
        part = np.arange(len(own)) % PARTS
        largest = np.empty(len(own))
        try:
            for i in range(PARTS):
                largest[part == i] = detector.fit(own[part != i], names)(own[part == i]).max(axis=1)
            scores = detector.fit(own, names)(values)
        except ValueError:  # nothing in these channels differs between clean lanes
            return {limit: np.full(len(values), np.inf) for limit in LIMITS}
        tested = np.sort(scores[self.clean].max(axis=1))
        limits = threshold(largest, ALPHA), tested[-1 - round(ALPHA * len(tested))]
        above = {limit: scores > value for limit, value in zip(LIMITS, limits, strict=True)}
        return {limit: np.where(x.any(axis=1), x.argmax(axis=1).astype(float), np.inf) for limit, x in above.items()}

    def moving(self) -> set[str]:
        """Channels that are not of one value in half of the steps of the calibration lanes, which a chart cannot read:
        where such a one moves at all it is thousands of standard deviations away."""
        values = self.lanes.values[self.calibrate][:, self.onset :].reshape(-1, len(self.lanes.channels))
        most = [np.unique(column, return_counts=True)[1].max() for column in values.T]
        return {name for name, count in zip(self.lanes.channels, most, strict=True) if count < len(values) / 2}


def trial(lanes: LabelledLanes, clean_seeds: Sequence[int]) -> Trial:
    """Which lanes serve what."""
    table = lanes.table.reset_index(drop=True)
    first = list(clean_seeds)[:CALIBRATE]
    calibrate = table.clean & table.seed.isin(first)
    onset = int(table.onset[~table.clean].iloc[0])
    return Trial(
        lanes,
        onset,
        np.flatnonzero(calibrate),
        np.flatnonzero(table.clean & ~calibrate),
        np.flatnonzero(~table.clean),
    )


def trouble(folder: Path, table: pd.DataFrame, onset: int) -> np.ndarray:
    """Steps from the onset to the first measured one with success `LOST` below the control's; infinite for never.

    Success is the mean of two neighbouring measurements, so that one of 32 rows is not enough.
    """
    run = load(folder)
    success = run.channel("performance")
    labels = list(run.conditions.condition)
    control = labels.index(run.conditions.condition[run.conditions.perturbation == "control"].iloc[0])
    seeds = list(run.telemetry.seed.values)
    steps = np.flatnonzero(np.isfinite(success[0, control]))
    found = []
    for lane in table.itertuples():
        row = seeds.index(lane.seed)
        less = success[row, control, steps] - success[row, labels.index(lane.condition), steps]
        less = (less[1:] + less[:-1]) / 2
        hit = (less >= LOST) & (steps[1:] >= onset)
        found.append(float(steps[1:][hit.argmax()] - onset) if hit.any() else np.inf)
    return np.array(found)


def share(counts: np.ndarray, of: np.ndarray) -> float:
    """The weighted mean; NaN without any weight."""
    return float(of @ counts / counts.sum()) if counts.sum() else np.nan


def middle(values: np.ndarray, counts: np.ndarray) -> float:
    """The lower median of values, each taken so many times."""
    order = np.argsort(values)
    total = counts[order].cumsum()
    return float(values[order][(total >= total[-1] / 2).argmax()]) if len(total) and total[-1] else np.nan


def with_ends(name: str, statistic: Callable[[np.ndarray], float], table: pd.DataFrame) -> dict[str, float]:
    """A figure of disturbed lanes with its interval over seeds; `statistic` takes each lane's count."""
    seeds = sorted(table.seed.unique())
    place = table.seed.map(seeds.index).to_numpy()
    if not len(seeds):
        return dict.fromkeys((name, f"{name} low", f"{name} high"), np.nan)
    estimate = over_seeds(lambda counts: statistic(counts[place]), seeds)
    return {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}


def of_family(name: str, size: int, alarm: np.ndarray, trial: Trial, lost: np.ndarray) -> dict:
    """A row of `families.csv`."""
    false = np.isfinite(alarm[trial.clean])
    exact = binomtest(int(false.sum()), len(false)).proportion_ci(method="exact")
    table, found = trial.table, alarm[trial.disturbed]
    row = {"family": name, "channels": size, "false alarms": int(false.sum()), "clean": len(false)}
    row |= {"rate": false.mean(), "rate low": exact.low, "rate high": exact.high}
    row |= with_ends("detected", lambda counts: share(counts, np.isfinite(found).astype(float)), table)
    for kind in table.perturbation.unique():
        row[f"detected, {kind}"] = np.isfinite(found[(table.perturbation == kind).to_numpy()]).mean()
        row[f"delay, {kind}"] = middle(
            found[(table.perturbation == kind).to_numpy()], np.ones((table.perturbation == kind).sum())
        )
    row |= with_ends("delay", lambda counts: middle(found, counts), table)
    hit = np.isfinite(lost)
    lead = lost[hit] - found[hit]
    some = table[hit]
    row |= {"in trouble": int(hit.sum())}
    row |= with_ends("before", lambda counts: share(counts, (lead > 0).astype(float)), some)
    row |= with_ends("lead", lambda counts: middle(lead, counts), some)
    return row


def of_pair(names: tuple[str, str], first: np.ndarray, second: np.ndarray, table: pd.DataFrame) -> list[dict]:
    """Rows of `pairs.csv`: over all disturbed lanes, and over those of each condition."""
    rows = []
    through = table.perturbation.str.startswith("tool").to_numpy()
    kinds = {"all": np.full(len(table), True), "through the tool": through, "others": ~through}
    kinds |= {kind: (table.perturbation == kind).to_numpy() for kind in table.perturbation.unique()}
    for kind, chosen in kinds.items():
        a, b, of = first[chosen], second[chosen], table[chosen].reset_index(drop=True)
        sooner = (a < b).astype(float) - (b < a)
        net = pd.Series(sooner).groupby(of.seed).sum()
        decided = int((net != 0).sum())
        sign = binomtest(int((net > 0).sum()), decided).pvalue if decided else np.nan
        row = {"first": names[0], "second": names[1], "condition": kind, "lanes": len(of)}
        row |= {"first sooner": int((a < b).sum()), "second sooner": int((b < a).sum())}
        row |= {
            "same step": int(((a == b) & np.isfinite(a)).sum()),
            "neither": int((~np.isfinite(a) & ~np.isfinite(b)).sum()),
        }
        row |= with_ends("sooner", lambda counts, of=sooner: share(counts, of), of)
        row |= {"seeds for first": int((net > 0).sum()), "seeds for second": int((net < 0).sum()), "sign test": sign}
        both = np.isfinite(a) & np.isfinite(b)
        row["median steps sooner, of both"] = float(np.median(b[both] - a[both])) if both.any() else np.nan
        rows.append(row)
    return rows


def channel_pairs(alone: dict[str, np.ndarray], trial: Trial) -> list[dict]:
    """Rows of `channels.csv`: lanes in which the first is sooner less the second's, a mean over pairs of channels."""
    strata: dict[str, dict[str, np.ndarray]] = {}
    for name, alarm in alone.items():
        statistic, stratum = base(name)
        if stratum and statistic != "own_tokens":
            strata.setdefault(stratum, {})[statistic] = alarm
    kinds = {"means": [alone[c] for c in MEANS if c in alone]}
    kinds["weight tails"] = [v for c, v in alone.items() if c.startswith(tuple(f"{w}[all" for w in WEIGHTS))]
    kinds["ratio tails"] = [v for c, v in alone.items() if c.startswith(("ratio_max[all", "ratio_quantile[all"))]
    kinds["ESS"] = [v for c, v in alone.items() if c.startswith(("weight_ess[all", "ratio_ess[all"))]
    kinds["unfamiliarity"] = [alone["result_log_probability"]] if "result_log_probability" in alone else []

    def same(one: str, other: str, only: tuple[str, ...] = ("",)) -> list[tuple[np.ndarray, np.ndarray]]:
        there = [s for s in strata[one] if s in strata[other] and s.startswith(only)]
        return [(strata[one][s], strata[other][s]) for s in there]

    pairs = {"[tool] and [text]": same("tool", "text"), "[tool] and [text], weights": same("tool", "text", WEIGHTS)}
    pairs |= {f"[{turn}] and [turn_0]": same(turn, "turn_0") for turn in TURNS[1:]}
    pairs |= {
        f"{kind} and means": list(itertools.product(kinds[kind], kinds["means"]))
        for kind in ("weight tails", "ratio tails", "ESS", "unfamiliarity")
    }
    rows, table = [], trial.table
    for title, of in pairs.items():
        if not of:
            continue
        firsts, seconds = (np.array([pair[i] for pair in of]) for i in (0, 1))
        sooner = ((firsts < seconds).astype(float) - (seconds < firsts))[:, trial.disturbed].mean(0)
        gain = (np.isfinite(firsts).astype(float) - np.isfinite(seconds))[:, trial.disturbed].mean(0)
        false = (np.isfinite(firsts).astype(float) - np.isfinite(seconds))[:, trial.clean].mean()
        row = {"pair": title, "pairs of channels": len(of)}
        row |= with_ends("sooner", lambda counts, of=sooner: share(counts, of), table)
        row |= with_ends("detected", lambda counts, of=gain: share(counts, of), table) | {
            "false alarms, first less second": false
        }
        for kind in table.perturbation.unique():
            row[f"sooner, {kind}"] = sooner[(table.perturbation == kind).to_numpy()].mean()
        rows.append(row)
    return rows


def growth(folder: Path) -> pd.DataFrame:
    """By tenth of the run, means over clean lanes: tool share, success, and what tool states weigh beside the rest."""
    telemetry = load(folder).telemetry.isel(condition=0)
    tokens = telemetry["own_tokens"]
    columns = {"tool share": tokens.sel(stratum="tool") / tokens.sel(stratum="all")}
    columns |= {name: telemetry[name] for name in ("calls", "performance", "acting_performance", "row_tokens")}
    for name in ("source_gradient_norm", "source_gradient_variance"):
        columns |= {f"{name}, {source}": telemetry[name].sel(source=source) for source in ("tool", "rest")}
    for name in ("weight_cvar", "weight_ess", "weight_top_share"):
        there = telemetry[name].sel(moment="visited")
        columns |= {f"{name}, {stratum}": there.sel(stratum=stratum) for stratum in ("tool", "text")}
    rows = []
    steps = telemetry.sizes["step"]
    for part in np.array_split(np.arange(steps), 10):
        row = {"from": int(part[0]), "to": int(part[-1])}
        for name, values in columns.items():
            of = np.nanmean(values.transpose("seed", "step").values[:, part], axis=1)
            row[name] = of.mean()
            if name == "tool share":
                row |= {"lowest": of.min(), "highest": of.max()}
        rows.append(row)
    return pd.DataFrame(rows)


def instrument(folder: Path, onset: int) -> pd.DataFrame:
    """How far `result_log_probability` and its like are from the control's, mean of steps since the onset."""
    rows, run = [], load(folder)
    control = int(np.flatnonzero(run.conditions.perturbation == "control")[0])
    for channel in ("result_log_probability", "tool_log_probability", "entropy_after_result"):
        values = run.channel(channel)[:, :, onset:].mean(-1)
        spread = values[:, control].std(ddof=1)
        for number, condition in enumerate(run.conditions.itertuples()):
            less = values[:, number] - values[:, control]
            row = {"channel": channel, "condition": condition.condition, "seeds": len(less)}
            row |= {"value": values[:, number].mean(), "less control": less.mean()}
            row |= {"smallest": less.min(), "largest": less.max(), "control's standard deviation over seeds": spread}
            rows.append(row)
    return pd.DataFrame(rows)


SHOWN = (
    "[tool]",
    "[text]",
    "weight tails",
    "means: loss, reward, entropy, KL",
    "unfamiliarity of results",
    "calls alone",
)


def draw(shares: np.ndarray, onset: int, alarms: pd.DataFrame, path: Path) -> None:
    """The clean lanes' tool share, and by condition the share of lanes with an alarm so many steps after the onset."""
    steps = np.arange(shares.shape[1])
    frame = pd.DataFrame({"step": steps, "mean": shares.mean(0), "low": shares.min(0), "high": shares.max(0)})
    scale = {"axis": alt.Axis(format=".0%"), "scale": alt.Scale(domain=[0, 1])}
    x = alt.X("step:Q", title="iteration")
    band = (
        alt.Chart(frame)
        .mark_area(opacity=0.25, color=style.RAMP[2])
        .encode(x, alt.Y("low:Q", title="own tokens after a tool's result", **scale), y2="high:Q")
    )
    line = alt.Chart(frame).mark_line(color=style.RAMP[2]).encode(x, alt.Y("mean:Q", **scale))
    rule = alt.Chart(pd.DataFrame({"step": [onset]})).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(x)
    panels = [alt.layer(band, line, rule).properties(title="clean lanes: mean and range", width=260, height=160)]
    colors = alt.Scale(domain=list(SHOWN), scheme="tableau10")
    for kind, of in alarms.groupby("perturbation", sort=False):
        rows = [
            {"family": name, "steps": step, "share": float((of[name] <= step).mean())}
            for name in SHOWN
            if name in of
            for step in range(len(steps) - onset)
        ]
        panels.append(
            alt.Chart(pd.DataFrame(rows))
            .mark_line(interpolate="step-after")
            .encode(
                alt.X("steps:Q", title="iterations since the onset"),
                alt.Y("share:Q", title="lanes with an alarm", **scale),
                alt.Color(
                    "family:N", title=None, scale=colors, legend=alt.Legend(orient="bottom", columns=3, labelLimit=260)
                ),
            )
            .properties(title=f"{kind}, {len(of)} lanes", width=260, height=160)
        )
    save(alt.concat(*panels, columns=3).resolve_scale(color="shared"), path)


def main() -> None:
    """Tells and draws."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("out", type=Path, help="folder of tables and the figure")
    options.add_argument("clean", type=Path, help="the clean run's folder")
    options.add_argument("disturbed", type=Path, help="the disturbed run's folder")
    chosen = options.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    lanes = load_lanes([chosen.clean, chosen.disturbed])[0]
    run = load(chosen.clean)
    of = trial(lanes, run.telemetry.seed.values.tolist())
    lost = trouble(chosen.disturbed, of.table, of.onset)
    groups = families(lanes.channels, of.moving())
    table = of.table
    rows, paired = [], []
    alarms = table.assign(trouble=lost, collapse=table.collapse_time - of.onset)
    for title, chart in CHARTS.items():
        found = {name: of.alarms(names, chart) for name, names in groups.items() if names}
        for limit in LIMITS:
            told = {name: alarm[limit][of.disturbed] for name, alarm in found.items()}
            given = {"chart": title, "threshold": limit}
            rows += [
                given | of_family(name, len(groups[name]), alarm[limit], of, lost) for name, alarm in found.items()
            ]
            for pair in PAIRS:
                if all(name in told for name in pair):
                    paired += [given | row for row in of_pair(pair, told[pair[0]], told[pair[1]], table)]
            if given == {"chart": next(iter(CHARTS)), "threshold": "matched"}:
                alarms = alarms.assign(**told)
    chart = next(iter(CHARTS.values()))
    alone = {name: of.alarms([name], chart) for name in sorted(of.moving())}
    channel, single = [], []
    for limit in LIMITS:
        told = {name: alarm[limit] for name, alarm in alone.items()}
        channel += [{"threshold": limit, **row} for row in channel_pairs(told, of)]
        single += [{"threshold": limit, **of_family(name, 1, alarm, of, lost)} for name, alarm in told.items()]
    kept = ["threshold", "family", "false alarms", "detected", "delay", "before", "lead"]
    tables = {
        "share": growth(chosen.clean),
        "families": pd.DataFrame(rows),
        "pairs": pd.DataFrame(paired),
        "channels": pd.DataFrame(channel),
        "alone": pd.DataFrame(single)[kept],
        "alarms": alarms,
        "results": instrument(chosen.disturbed, of.onset),
    }
    for name, frame in tables.items():
        frame.to_csv(chosen.out / f"{name}.csv", index=False, float_format="%.4g")
    tokens = run.telemetry["own_tokens"].isel(condition=0)
    shares = (tokens.sel(stratum="tool") / tokens.sel(stratum="all")).transpose("seed", "step").values
    draw(shares, of.onset, alarms, chosen.out / "growing.png")
    print(
        f"{len(of.calibrate)} lanes calibrate, {len(of.clean)} clean and {len(of.disturbed)} disturbed ones test; "
        f"{lanes.collapsing} controls collapse; {int(np.isfinite(lost).sum())} lanes are in trouble, "
        f"{int(np.isfinite(table.collapse_time).sum())} collapse"
    )


if __name__ == "__main__":
    main()
