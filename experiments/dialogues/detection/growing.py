"""Do failures show in tool states, in tails of an update's weights, or in unfamiliar results, before means change?

    python experiments/dialogues/detection/growing.py OUT runs/growing-clean runs/growing-disturbed

The trainings have a growing share of policy tokens after a tool's result. Each family of channels is read by one chart,
and each channel by another, from the disturbance's onset on. All are fitted to the first clean seeds, calibrated on
them by cross-validation to the same rate of false alarms per run, and tested on the other clean lanes, which include
the controls of the disturbed seeds. The results are:

- `share.csv`: the growth of the tool share, and statistics of tool states.
- `families.csv`: false alarms, detected lanes, delays and leads by family; `alone.csv`: the same for every channel.
- `pairs.csv`: which of two families alarms first, lane by lane.
- `channels.csv`: the same statistic in two strata, and tails and means, channel by channel.
- `alarms.csv`: the first alarm of every family in every disturbed lane.
- `results.csv`: the change of the measure of unfamiliarity.
- `growing.png`.
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
"""The number of seeds of the clean run, the first ones, that detectors are fitted to and calibrated on."""

ALPHA = 0.05
"""The rate of false alarms per clean run that detectors are calibrated to."""

LIMITS = "calibrated", "matched"
"""Two kinds of thresholds: cross-validated on the calibration lanes, or set so that exactly a share ALPHA of the clean
test lanes has an alarm, which is unknown in practice but equal for all detectors."""

PARTS = 8
"""Parts of the calibration lanes, each scored by detectors that are fitted to the others."""

CHARTS = {"MEWMA 0.2": Chart(departure=(0.2,)), "max |EWMA 0.2|": Chart(departure=(), outlier=(0.2,))}
"""The charts of a family; for a single channel, both are equal."""

LOST = 0.2
"""The difference of success to the control at the same step from which on a lane counts as failing."""

TURNS = ("turn_0", "turn_1", "turn_2", "turn_3+")
WEIGHTS = ("weight_cvar", "weight_q999", "weight_top_share", "weight_tail")
MEANS = ("loss", "acting_performance", "entropy[all]", "kl[all]")
BASELINES = ("truncated", "calls", "row_tokens", "acting_performance", "performance")


def base(channel: str) -> tuple[str, str]:
    """Returns a channel's statistic without its stratum, and the stratum, or "" if it has none."""
    name, bracket, rest = channel.partition("[")
    entries = rest.rstrip("]").split(", ") if bracket else []
    if not entries or entries[0] not in ("all", "tool", "text", *TURNS):
        return channel, ""
    others = ", ".join(entries[1:])
    return (f"{name}[{others}]" if others else name), entries[0]


def families(channels: Sequence[str], varying: set[str]) -> dict[str, list[str]]:
    """Returns channels by family; all strata have the same varying statistics, without the count of tokens."""
    by_stratum: dict[str, dict[str, str]] = {}
    for channel in channels:
        statistic, stratum = base(channel)
        if stratum and statistic != "own_tokens" and channel in varying:
            by_stratum.setdefault(stratum, {})[statistic] = channel
    common = set.intersection(*(set(by_stratum[s]) for s in ("tool", "text", *TURNS)))
    by_family = {
        "means: loss, reward, entropy, KL": [c for c in channels if c in MEANS],
        "weight tails": [c for c in channels if c.startswith(tuple(f"{w}[all" for w in WEIGHTS))],
        "weight and ratio ESS": [c for c in channels if c.startswith(("weight_ess[all", "ratio_ess[all"))],
        "ratio tails": [c for c in channels if c.startswith(("ratio_max[all", "ratio_quantile[all"))],
    }
    for stratum in ("tool", "text", *TURNS):
        by_family[f"[{stratum}]"] = [name for statistic, name in by_stratum[stratum].items() if statistic in common]
    for stratum in ("tool", "text"):
        tails = tuple(f"{w}[{stratum}" for w in WEIGHTS)
        by_family[f"weight tails in [{stratum}]"] = [c for c in channels if c.startswith(tails)]
    for source in ("tool", "rest"):
        by_family[f"gradient of {source}"] = [
            c for c in channels if c.startswith("source_") and c.endswith(f"[{source}]")
        ]
    by_family = {name: [channel for channel in members if channel in varying] for name, members in by_family.items()}
    by_family["unfamiliarity of results"] = ["result_log_probability"]
    by_family["entropy after results"] = ["entropy_after_result"]
    for channel in BASELINES:
        by_family[f"{channel} alone"] = [channel]
    return {name: [c for c in members if c in channels] for name, members in by_family.items()}


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
"""Pairs of families whose first alarms are compared; by the claim, the first of each of the first three comes first."""


@dataclass(frozen=True)
class Trial:
    """The lanes of a comparison and their roles.

    Attributes:
      lanes: all lanes.
      onset: the step of the onset; only later steps are used.
      calibrate, clean, disturbed: indices of the lanes for calibration, of clean test lanes, and of disturbed ones.
    """

    lanes: LabelledLanes
    onset: int
    calibrate: np.ndarray
    clean: np.ndarray
    disturbed: np.ndarray

    @property
    def table(self) -> pd.DataFrame:
        """The table of the disturbed lanes."""
        return self.lanes.table.iloc[self.disturbed].reset_index(drop=True)

    def alarms(self, names: Sequence[str], chart: Chart) -> dict[str, np.ndarray]:
        """Returns by LIMITS the steps from the onset to the first alarm of a chart of these channels, `[lanes]`.

        Lanes without an alarm have infinity. Values of the calibration lanes are meaningless.
        """
        columns = [self.lanes.channels.index(name) for name in names]
        values = self.lanes.values[:, self.onset :, columns]
        detector, calibration = MultichannelChart(chart), values[self.calibrate]
        fold = np.arange(len(calibration)) % PARTS
        largest = np.empty(len(calibration))
        try:
            for i in range(PARTS):
                largest[fold == i] = detector.fit(calibration[fold != i], names)(calibration[fold == i]).max(axis=1)
            scores = detector.fit(calibration, names)(values)
        except ValueError:  # these channels are the same in all clean lanes
            return {limit: np.full(len(values), np.inf) for limit in LIMITS}
        largest_of_clean = np.sort(scores[self.clean].max(axis=1))
        limits = threshold(largest, ALPHA), largest_of_clean[-1 - round(ALPHA * len(largest_of_clean))]
        above = {limit: scores > value for limit, value in zip(LIMITS, limits, strict=True)}
        return {limit: np.where(x.any(axis=1), x.argmax(axis=1).astype(float), np.inf) for limit, x in above.items()}

    def varying(self) -> set[str]:
        """Returns channels of which no value makes up half of the steps of the calibration lanes.

        A chart cannot read other channels, since any change of them is thousands of standard deviations.
        """
        values = self.lanes.values[self.calibrate][:, self.onset :].reshape(-1, len(self.lanes.channels))
        largest_counts = [np.unique(column, return_counts=True)[1].max() for column in values.T]
        return {
            name for name, count in zip(self.lanes.channels, largest_counts, strict=True) if count < len(values) / 2
        }


def trial(lanes: LabelledLanes, clean_seeds: Sequence[int]) -> Trial:
    """Assigns lanes to calibration and test."""
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


def failure_delays(folder: Path, table: pd.DataFrame, onset: int) -> np.ndarray:
    """Returns the steps from the onset until success is `LOST` below the control's, or infinity.

    Success is averaged over two consecutive measurements, since one of 32 rows is too noisy.
    """
    run = load(folder)
    success = run.channel("performance")
    labels = list(run.conditions.condition)
    control = labels.index(run.conditions.condition[run.conditions.perturbation == "control"].iloc[0])
    seeds = list(run.telemetry.seed.values)
    steps = np.flatnonzero(np.isfinite(success[0, control]))
    delays = []
    for lane in table.itertuples():
        row = seeds.index(lane.seed)
        difference = success[row, control, steps] - success[row, labels.index(lane.condition), steps]
        difference = (difference[1:] + difference[:-1]) / 2
        failed = (difference >= LOST) & (steps[1:] >= onset)
        delays.append(float(steps[1:][failed.argmax()] - onset) if failed.any() else np.inf)
    return np.array(delays)


def weighted_mean(counts: np.ndarray, of: np.ndarray) -> float:
    """Returns the weighted mean, or NaN without any weight."""
    return float(of @ counts / counts.sum()) if counts.sum() else np.nan


def weighted_median(values: np.ndarray, counts: np.ndarray) -> float:
    """Returns the lower weighted median."""
    order = np.argsort(values)
    cumulative = counts[order].cumsum()
    return (
        float(values[order][(cumulative >= cumulative[-1] / 2).argmax()])
        if len(cumulative) and cumulative[-1]
        else np.nan
    )


def with_ends(name: str, statistic: Callable[[np.ndarray], float], table: pd.DataFrame) -> dict[str, float]:
    """Returns a statistic of disturbed lanes with its interval over seeds; `statistic` gets the count of each lane."""
    seeds = sorted(table.seed.unique())
    seed_index = table.seed.map(seeds.index).to_numpy()
    if not len(seeds):
        return dict.fromkeys((name, f"{name} low", f"{name} high"), np.nan)
    estimate = over_seeds(lambda counts: statistic(counts[seed_index]), seeds)
    return {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}


def family_row(name: str, size: int, alarm: np.ndarray, trial: Trial, lost: np.ndarray) -> dict:
    """Returns a row of `families.csv`."""
    false_alarms = np.isfinite(alarm[trial.clean])
    exact = binomtest(int(false_alarms.sum()), len(false_alarms)).proportion_ci(method="exact")
    table, alarms_ = trial.table, alarm[trial.disturbed]
    row = {"family": name, "channels": size, "false alarms": int(false_alarms.sum()), "clean": len(false_alarms)}
    row |= {"rate": false_alarms.mean(), "rate low": exact.low, "rate high": exact.high}
    row |= with_ends("detected", lambda counts: weighted_mean(counts, np.isfinite(alarms_).astype(float)), table)
    for kind in table.perturbation.unique():
        row[f"detected, {kind}"] = np.isfinite(alarms_[(table.perturbation == kind).to_numpy()]).mean()
        row[f"delay, {kind}"] = weighted_median(
            alarms_[(table.perturbation == kind).to_numpy()], np.ones((table.perturbation == kind).sum())
        )
    row |= with_ends("delay", lambda counts: weighted_median(alarms_, counts), table)
    failed = np.isfinite(lost)
    lead = lost[failed] - alarms_[failed]
    failed_table = table[failed]
    row |= {"in trouble": int(failed.sum())}
    row |= with_ends("before", lambda counts: weighted_mean(counts, (lead > 0).astype(float)), failed_table)
    row |= with_ends("lead", lambda counts: weighted_median(lead, counts), failed_table)
    return row


def pair_rows_of(names: tuple[str, str], first: np.ndarray, second: np.ndarray, table: pd.DataFrame) -> list[dict]:
    """Returns rows of `pairs.csv`, for all disturbed lanes and for groups of conditions."""
    rows = []
    through_tool = table.perturbation.str.startswith("tool").to_numpy()
    kinds = {"all": np.full(len(table), True), "through the tool": through_tool, "others": ~through_tool}
    kinds |= {kind: (table.perturbation == kind).to_numpy() for kind in table.perturbation.unique()}
    for kind, mask in kinds.items():
        a, b, table_ = first[mask], second[mask], table[mask].reset_index(drop=True)
        sooner = (a < b).astype(float) - (b < a)
        net_by_seed = pd.Series(sooner).groupby(table_.seed).sum()
        decided = int((net_by_seed != 0).sum())
        sign_p_value = binomtest(int((net_by_seed > 0).sum()), decided).pvalue if decided else np.nan
        row = {"first": names[0], "second": names[1], "condition": kind, "lanes": len(table_)}
        row |= {"first sooner": int((a < b).sum()), "second sooner": int((b < a).sum())}
        row |= {
            "same step": int(((a == b) & np.isfinite(a)).sum()),
            "neither": int((~np.isfinite(a) & ~np.isfinite(b)).sum()),
        }
        row |= with_ends("sooner", lambda counts, table_=sooner: weighted_mean(counts, table_), table_)
        row |= {
            "seeds for first": int((net_by_seed > 0).sum()),
            "seeds for second": int((net_by_seed < 0).sum()),
            "sign test": sign_p_value,
        }
        both_alarm = np.isfinite(a) & np.isfinite(b)
        row["median steps sooner, of both"] = (
            float(np.median(b[both_alarm] - a[both_alarm])) if both_alarm.any() else np.nan
        )
        rows.append(row)
    return rows


def channel_pair_rows(alone: dict[str, np.ndarray], trial: Trial) -> list[dict]:
    """Returns rows of `channels.csv`: the net share of lanes in which the first channel alarms sooner, by pairs."""
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

    def common_statistics(
        first_stratum: str, second_stratum: str, prefixes: tuple[str, ...] = ("",)
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        common = [s for s in strata[first_stratum] if s in strata[second_stratum] and s.startswith(prefixes)]
        return [(strata[first_stratum][s], strata[second_stratum][s]) for s in common]

    pairs = {
        "[tool] and [text]": common_statistics("tool", "text"),
        "[tool] and [text], weights": common_statistics("tool", "text", WEIGHTS),
    }
    pairs |= {f"[{turn}] and [turn_0]": common_statistics(turn, "turn_0") for turn in TURNS[1:]}
    pairs |= {
        f"{kind} and means": list(itertools.product(kinds[kind], kinds["means"]))
        for kind in ("weight tails", "ratio tails", "ESS", "unfamiliarity")
    }
    rows, table = [], trial.table
    for title, channel_pairs_ in pairs.items():
        if not channel_pairs_:
            continue
        firsts, seconds = (np.array([pair[i] for pair in channel_pairs_]) for i in (0, 1))
        sooner = ((firsts < seconds).astype(float) - (seconds < firsts))[:, trial.disturbed].mean(0)
        gain = (np.isfinite(firsts).astype(float) - np.isfinite(seconds))[:, trial.disturbed].mean(0)
        false_difference = (np.isfinite(firsts).astype(float) - np.isfinite(seconds))[:, trial.clean].mean()
        row = {"pair": title, "pairs of channels": len(channel_pairs_)}
        row |= with_ends("sooner", lambda counts, channel_pairs_=sooner: weighted_mean(counts, channel_pairs_), table)
        row |= with_ends(
            "detected", lambda counts, channel_pairs_=gain: weighted_mean(counts, channel_pairs_), table
        ) | {"false alarms, first less second": false_difference}
        for kind in table.perturbation.unique():
            row[f"sooner, {kind}"] = sooner[(table.perturbation == kind).to_numpy()].mean()
        rows.append(row)
    return rows


def growth(folder: Path) -> pd.DataFrame:
    """Returns means over clean lanes by tenth of the run: tool share, success, and statistics of strata and sources."""
    telemetry = load(folder).telemetry.isel(condition=0)
    tokens = telemetry["own_tokens"]
    columns = {"tool share": tokens.sel(stratum="tool") / tokens.sel(stratum="all")}
    columns |= {name: telemetry[name] for name in ("calls", "performance", "acting_performance", "row_tokens")}
    for name in ("source_gradient_norm", "source_gradient_variance"):
        columns |= {f"{name}, {source}": telemetry[name].sel(source=source) for source in ("tool", "rest")}
    for name in ("weight_cvar", "weight_ess", "weight_top_share"):
        visited = telemetry[name].sel(moment="visited")
        columns |= {f"{name}, {stratum}": visited.sel(stratum=stratum) for stratum in ("tool", "text")}
    rows = []
    steps = telemetry.sizes["step"]
    for part in np.array_split(np.arange(steps), 10):
        row = {"from": int(part[0]), "to": int(part[-1])}
        for name, values in columns.items():
            values_ = np.nanmean(values.transpose("seed", "step").values[:, part], axis=1)
            row[name] = values_.mean()
            if name == "tool share":
                row |= {"lowest": values_.min(), "highest": values_.max()}
        rows.append(row)
    return pd.DataFrame(rows)


def unfamiliarity(folder: Path, onset: int) -> pd.DataFrame:
    """Returns the differences of `result_log_probability` and similar channels to the control, after the onset."""
    rows, run = [], load(folder)
    control = int(np.flatnonzero(run.conditions.perturbation == "control")[0])
    for channel in ("result_log_probability", "tool_log_probability", "entropy_after_result"):
        values = run.channel(channel)[:, :, onset:].mean(-1)
        spread = values[:, control].std(ddof=1)
        for number, condition in enumerate(run.conditions.itertuples()):
            difference = values[:, number] - values[:, control]
            row = {"channel": channel, "condition": condition.condition, "seeds": len(difference)}
            row |= {"value": values[:, number].mean(), "less control": difference.mean()}
            row |= {
                "smallest": difference.min(),
                "largest": difference.max(),
                "control's standard deviation over seeds": spread,
            }
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
    """Draws the tool share of clean lanes, and by condition the share of lanes with an alarm after the onset."""
    steps = np.arange(shares.shape[1])
    frame = pd.DataFrame({"step": steps, "mean": shares.mean(0), "low": shares.min(0), "high": shares.max(0)})
    scale = {"axis": alt.Axis(format=".0%"), "scale": alt.Scale(domain=[0, 1])}
    x = alt.X("step:Q", title="iteration")
    band = (
        alt.Chart(frame)
        .mark_area(opacity=0.25, color=style.RAMP[2])
        .encode(x, alt.Y("low:Q", title="policy tokens after a tool's result", **scale), y2="high:Q")
    )
    line = alt.Chart(frame).mark_line(color=style.RAMP[2]).encode(x, alt.Y("mean:Q", **scale))
    rule = alt.Chart(pd.DataFrame({"step": [onset]})).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(x)
    panels = [alt.layer(band, line, rule).properties(title="clean lanes: mean and range", width=260, height=160)]
    colors = alt.Scale(domain=list(SHOWN), scheme="tableau10")
    for kind, group in alarms.groupby("perturbation", sort=False):
        rows = [
            {"family": name, "steps": step, "share": float((group[name] <= step).mean())}
            for name in SHOWN
            if name in group
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
            .properties(title=f"{kind}, {len(group)} lanes", width=260, height=160)
        )
    save(alt.concat(*panels, columns=3).resolve_scale(color="shared"), path)


def main() -> None:
    """Writes the tables and draws the figure."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("out", type=Path, help="folder of tables and the figure")
    options.add_argument("clean", type=Path, help="the clean run's folder")
    options.add_argument("disturbed", type=Path, help="the disturbed run's folder")
    arguments = options.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    lanes = load_lanes([arguments.clean, arguments.disturbed])[0]
    run = load(arguments.clean)
    trial_ = trial(lanes, run.telemetry.seed.values.tolist())
    delays = failure_delays(arguments.disturbed, trial_.table, trial_.onset)
    groups = families(lanes.channels, trial_.varying())
    table = trial_.table
    rows, pair_rows = [], []
    alarms = table.assign(trouble=delays, collapse=table.collapse_time - trial_.onset)
    for title, chart in CHARTS.items():
        alarms_by_family = {name: trial_.alarms(names, chart) for name, names in groups.items() if names}
        for limit in LIMITS:
            disturbed_alarms = {name: alarm[limit][trial_.disturbed] for name, alarm in alarms_by_family.items()}
            key = {"chart": title, "threshold": limit}
            rows += [
                key | family_row(name, len(groups[name]), alarm[limit], trial_, delays)
                for name, alarm in alarms_by_family.items()
            ]
            for pair in PAIRS:
                if all(name in disturbed_alarms for name in pair):
                    pair_rows += [
                        key | row
                        for row in pair_rows_of(pair, disturbed_alarms[pair[0]], disturbed_alarms[pair[1]], table)
                    ]
            if key == {"chart": next(iter(CHARTS)), "threshold": "matched"}:
                alarms = alarms.assign(**disturbed_alarms)
    chart = next(iter(CHARTS.values()))
    alone = {name: trial_.alarms([name], chart) for name in sorted(trial_.varying())}
    channel_rows, single_rows = [], []
    for limit in LIMITS:
        disturbed_alarms = {name: alarm[limit] for name, alarm in alone.items()}
        channel_rows += [{"threshold": limit, **row} for row in channel_pair_rows(disturbed_alarms, trial_)]
        single_rows += [
            {"threshold": limit, **family_row(name, 1, alarm, trial_, delays)}
            for name, alarm in disturbed_alarms.items()
        ]
    columns = ["threshold", "family", "false alarms", "detected", "delay", "before", "lead"]
    tables = {
        "share": growth(arguments.clean),
        "families": pd.DataFrame(rows),
        "pairs": pd.DataFrame(pair_rows),
        "channels": pd.DataFrame(channel_rows),
        "alone": pd.DataFrame(single_rows)[columns],
        "alarms": alarms,
        "results": unfamiliarity(arguments.disturbed, trial_.onset),
    }
    for name, frame in tables.items():
        frame.to_csv(arguments.out / f"{name}.csv", index=False, float_format="%.4g")
    tokens = run.telemetry["own_tokens"].isel(condition=0)
    shares = (tokens.sel(stratum="tool") / tokens.sel(stratum="all")).transpose("seed", "step").values
    draw(shares, trial_.onset, alarms, arguments.out / "growing.png")
    print(
        f"{len(trial_.calibrate)} lanes calibrate; {len(trial_.clean)} clean, {len(trial_.disturbed)} disturbed test; "
        f"{lanes.collapsing} controls collapse; {int(np.isfinite(delays).sum())} lanes fail, "
        f"{int(np.isfinite(table.collapse_time).sum())} collapse"
    )


if __name__ == "__main__":
    main()
