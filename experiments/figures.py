"""Figures and tables of the experiments, from runs' folders.

    python figures.py four-learners OUT ppo=runs/a trpo=runs/b sac=runs/c td3=runs/d
    python figures.py acting ppo=runs/a-data sac=runs/c-data
    python figures.py onset OUT ppo=runs/e
    python figures.py entropy OUT 0=runs/f 0.01=runs/g 0.1=runs/h
    python figures.py returns OUT returns/curves returns/sb3_curves
    python figures.py language-models OUT nano=runs/i mini=runs/j

Figures as PNG in the folder OUT, tables as Markdown on standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from PIL import Image

from jaxaudit.analysis import statistics
from jaxaudit.analysis.run_reader import load
from jaxaudit.report import style
from jaxaudit.report.line_panels import median_and_band

NAMES = {"ppo": "PPO", "ppo_500k": "PPO, 500k", "trpo": "TRPO", "sac": "SAC", "td3": "TD3"}


class Run:
    """The telemetry and tables of a run."""

    def __init__(self, folder: str):
        stored = load(Path(folder))
        if stored.metrics is None or stored.summary is None:
            raise SystemExit(f"{folder} has no metrics yet")
        self.data, self.lanes = stored.telemetry, stored.metrics
        self.summary = stored.summary.set_index("condition", drop=False)

    def series(self, condition: str, label: str) -> pd.DataFrame:
        """Returns median and quartiles over seeds of performance by env steps; non-finite seeds rank lowest."""
        values = self.data["performance"].sel(condition=condition).values
        first = np.isfinite(values).any(axis=0).argmax()  # no episode ends before this step
        middle, low, high = median_and_band(values, lost_is_worst=True)
        middle, low, high = (np.where(np.isfinite(x), x, np.nan) for x in (middle, low, high))
        steps = (self.data["step"].values + 1) * int(self.data.attrs["samples_per_step"])
        selected = slice(first, None, max(1, len(steps) // 150))
        return pd.DataFrame(
            {
                "steps": steps[selected],
                "low": low[selected],
                "median": middle[selected],
                "high": high[selected],
                "condition": label,
            }
        )

    def control(self, condition: str) -> str:
        """Returns the control with the onset of a condition."""
        onset = self.summary.loc[condition, "onset"]
        controls = self.summary[(self.summary["perturbation"] == "control") & (self.summary["onset"] == onset)]
        return str(controls["condition"].iloc[0])

    def collapsed(self, condition: str) -> str:
        """Formats the number of seeds that collapsed, or a dash if it is unknown."""
        row = self.summary.loc[condition]
        share = row["collapse_probability"]
        return f"{round(share * row['seeds'])}/{row['seeds']}" if np.isfinite(share) else "-"

    def loss(self, condition: str, acting: bool = False) -> statistics.Estimate:
        """Returns the final loss of performance against the control of the same seed, as a share of the controls' gain.

        With `acting`, it is the loss in the disturbed episodes. It is NaN if the controls gained nothing.
        """
        lanes_of = lambda c: self.lanes[self.lanes["condition"] == c].sort_values("seed")  # noqa: E731
        disturbed, control = lanes_of(condition), lanes_of(self.control(condition))
        series = self.data["performance"].sel(condition=self.control(condition)).values
        first = np.array([row[np.isfinite(row)][0] for row in series])
        gain = float(np.median(control["final_performance"].to_numpy() - first))
        lost = control["final_performance"].to_numpy() - disturbed["final_performance"].to_numpy()
        if acting:
            last = self.data["acting_performance"].isel(step=-1)
            lost = last.sel(condition=self.control(condition)).values - last.sel(condition=condition).values
        return statistics.bootstrap(lost / (gain if gain > 0 else np.nan))

    def cell(self, condition: str) -> str:
        """Formats the loss and collapses of a condition, or the final return of a control."""
        row = self.summary.loc[condition]
        if row["perturbation"] == "control":
            final = (row[f"iqm_final_performance{end}"] for end in ("", "_low", "_high"))
            return "{:,.0f} [{:,.0f}, {:,.0f}]".format(*final)
        lost = self.loss(condition)
        if np.isfinite(lost.value):
            text = with_interval(lost, "+.0%")
        else:
            gained = np.isfinite(self.loss(self.control(condition)).value)
            text = "became NaN" if gained else "no gain to lose"
        return f"{text}, {self.collapsed(condition)}"


def panel(frame: pd.DataFrame, title: str, onset: float, colors: dict[str, str]) -> alt.LayerChart:
    """Draws bands and medians of several conditions."""
    scale = alt.Scale(domain=list(colors), range=list(colors.values()))
    color = alt.Color("condition:N", scale=scale, title=None, legend=alt.Legend(symbolOpacity=1))
    x = alt.X("steps:Q", title="env steps", axis=alt.Axis(format="~s"))
    base = alt.Chart(frame)
    band = base.mark_area(opacity=0.14).encode(x=x, y=alt.Y("low:Q", title="mean return"), y2="high:Q", color=color)
    line = base.mark_line(strokeWidth=1.6).encode(x=x, y="median:Q", color=color)
    rule = alt.Chart(pd.DataFrame({"steps": [onset]})).mark_rule(color=style.INK, strokeWidth=0.8).encode(x="steps:Q")
    return alt.layer(band, line, rule).properties(title=title, width=230, height=170)


def learner_curves(runs: dict[str, Run], perturbation: str, out: Path) -> None:
    """Draws a panel for each learner with a line for each magnitude."""
    panels = []
    for name, run in runs.items():
        rows = run.summary[run.summary["perturbation"] == perturbation].sort_values("magnitude")
        labels = {str(c): f"{m:g}" for c, m in zip(rows["condition"], rows["magnitude"], strict=True)}
        control = run.control(next(iter(labels)))
        colors = {"control": style.GREY} | dict(zip(labels.values(), style.ramp(len(labels)), strict=True))
        frames = [run.series(control, "control"), *(run.series(c, label) for c, label in labels.items())]
        onset = rows["onset"].iloc[0] * int(run.data.attrs["samples_per_step"])
        panels.append(panel(pd.concat(frames), NAMES.get(name, name), onset, colors))
    chart = alt.concat(*panels, columns=4).resolve_scale(y="independent", color="shared")
    save(chart.properties(title=perturbation), out / f"{perturbation}.png")


def loss_table(runs: dict[str, Run]) -> str:
    """Returns a table by condition and run: the lost share of the gain and collapses, or final returns of controls."""
    summary = next(iter(runs.values())).summary
    frame = pd.DataFrame({"condition": summary["condition"]})
    for name, run in runs.items():
        frame[NAMES.get(name, name)] = [run.cell(str(condition)) for condition in summary["condition"]]
    return markdown(frame)


def cross_table(runs: dict[str, Run], out: Path) -> None:
    """Draws a table by condition and learner with the lost share of the gain and the number of collapses."""
    conditions = [c for c in next(iter(runs.values())).summary["condition"] if not str(c).startswith("control")]
    cells = []
    for condition in conditions:
        for name, run in runs.items():
            lost, collapsed = run.loss(condition), run.collapsed(condition)
            cells.append(
                {
                    "condition": condition,
                    "learner": NAMES.get(name, name),
                    "lost": float(np.clip(lost.value, -1, 1)),
                    "text": f"{lost.value:+.0%} ({collapsed})",
                }
            )
    frame = pd.DataFrame(cells)
    base = alt.Chart(frame).encode(
        x=alt.X("learner:N", sort=list(NAMES.values()), title=None, axis=alt.Axis(orient="top", labelAngle=0)),
        y=alt.Y("condition:N", sort=conditions, title=None),
    )
    boxes = base.mark_rect(stroke="white").encode(
        color=alt.Color(
            "lost:Q",
            title="share of the gain lost",
            scale=alt.Scale(domain=[-1, 0, 1], range=["#3b7f8c", "#f6f4f7", style.RAMP[3]]),
            legend=alt.Legend(format=".0%"),
        )
    )
    text = base.mark_text(fontSize=10.5).encode(
        text="text:N", color=alt.condition(abs(alt.datum.lost) > 0.55, alt.value("white"), alt.value(style.INK))
    )
    save((boxes + text).properties(width=440, height=26 * len(conditions)), out / "cross_table.png")


def onset_curves(runs: dict[str, Run], out: Path) -> None:
    """Draws the lost share of the gain by onset."""
    rows = []
    for name, run in runs.items():
        for condition, row in run.summary.iterrows():
            if row["perturbation"] != "control":
                lost = run.loss(str(condition))
                rows.append(
                    {
                        "learner": NAMES.get(name, name),
                        "perturbation": f"{row['perturbation']} {row['magnitude']:g}",
                        "onset": row["onset"] / run.data.sizes["step"],
                        "lost": lost.value,
                        "low": lost.low,
                        "high": lost.high,
                        "collapsed": run.collapsed(str(condition)),
                    }
                )
    frame = pd.DataFrame(rows)
    print(markdown(frame))
    # Points are shifted so that their intervals do not overlap.
    frame["onset"] += 0.012 * frame["perturbation"].rank(method="dense").sub(1)
    scale = alt.Scale(range=style.ramp(frame["perturbation"].nunique()))
    color = alt.Color("perturbation:N", title=None, scale=scale, legend=alt.Legend(symbolOpacity=1))
    x = alt.X("onset:Q", title="onset, share of the run", axis=alt.Axis(format=".0%"))
    base = alt.Chart(frame)
    line = base.mark_line(point=True).encode(x=x, y=alt.Y("lost:Q", title="share of the gain lost"), color=color)
    bars = base.mark_rule(opacity=0.5).encode(x=x, y="low:Q", y2="high:Q", color=color)
    save(
        (bars + line).properties(width=300, height=220).facet(column=alt.Column("learner:N", title=None)),
        out / "onset.png",
    )


def entropy_bars(runs: dict[str, Run], out: Path) -> None:
    """Draws the lost share of the gain for every entropy coefficient and disturbance."""
    rows = []
    for name, run in runs.items():
        for condition, row in run.summary.iterrows():
            if row["perturbation"] != "control":
                lost = run.loss(str(condition))
                rows.append(
                    {
                        "coefficient": name,
                        "condition": condition,
                        "lost": lost.value,
                        "low": lost.low,
                        "high": lost.high,
                    }
                )
    frame = pd.DataFrame(rows)
    color = alt.Color(
        "coefficient:N", sort=None, scale=alt.Scale(range=style.ramp(len(runs))), title="entropy coefficient"
    )
    base = alt.Chart(frame).encode(
        x=alt.X("coefficient:N", sort=None, title=None, axis=None),
        color=color,
    )
    points = base.mark_point(filled=True, size=60).encode(y=alt.Y("lost:Q", title="share of the gain lost"))
    bars = base.mark_rule().encode(y="low:Q", y2="high:Q")
    column = alt.Column("condition:N", sort=None, title=None, header=alt.Header(labelOrient="bottom"))
    save((bars + points).properties(width=80, height=200).facet(column=column), out / "entropy.png")


AROUND = (20, 60)
"""The numbers of steps before and after an onset that are drawn."""


def around_injection(runs: dict[str, Run], channel: str, title: str, out: Path) -> None:
    """Draws a channel around the onset for each perturbation's strongest condition, with a line for each run."""
    colors = dict(zip(runs, style.ramp(len(runs)), strict=True))
    strongest = [c for run in runs.values() for c in strongest_conditions(run)]
    panels = []
    for condition in dict.fromkeys(strongest):
        rows = []
        for name, run in runs.items():
            if condition in run.summary.index:
                rows += aligned(run, condition, channel, name)
                rows += aligned(run, run.control(condition), channel, name, "control")
        base = alt.Chart(pd.DataFrame(rows)).encode(
            x=alt.X("step:Q", title="steps since the injection"),
            color=alt.Color("run:N", title=None, scale=alt.Scale(domain=list(colors), range=list(colors.values()))),
        )
        lines = base.mark_line(strokeWidth=1.5).encode(
            y=alt.Y("median:Q", title=title, scale=alt.Scale(zero=False)),
            strokeDash=alt.StrokeDash("lanes:N", title=None, sort=None, scale=alt.Scale(range=[[1, 0], [3, 3]])),
        )
        disturbed = base.transform_filter("datum.lanes == 'disturbed'")
        band = disturbed.mark_area(opacity=0.14).encode(y="low:Q", y2="high:Q")
        rule = alt.Chart(pd.DataFrame({"step": [0]})).mark_rule(color=style.INK, strokeWidth=0.8).encode(x="step:Q")
        panels.append(alt.layer(band, lines, rule).properties(title=condition, width=200, height=140))
    save(alt.concat(*panels, columns=4), out / f"{channel}.png")


def strongest_conditions(run: Run) -> list[str]:
    """Returns the condition of the largest magnitude of every perturbation."""
    disturbed = run.summary[run.summary["perturbation"] != "control"]
    fewer_is_more = disturbed["perturbation"].str.startswith("quantize")  # bits
    strength = disturbed["magnitude"].where(~fewer_is_more, -disturbed["magnitude"])
    return [str(c) for c in strength.groupby(disturbed["perturbation"], sort=False).idxmax()]


def aligned(run: Run, condition: str, channel: str, name: str, lanes: str = "disturbed") -> list[dict]:
    """Returns median and quartiles over seeds of a channel around a condition's onset."""
    onset = int(run.summary.loc[condition, "onset"])
    steps = range(max(0, onset - AROUND[0]), min(onset + AROUND[1], run.data.sizes["step"]))
    values = run.data[channel].sel(condition=condition).values[:, steps.start : steps.stop]
    low, middle, high = np.nanquantile(values, [0.25, 0.5, 0.75], axis=0)
    return [
        {"step": step - onset, "low": a, "median": b, "high": c, "run": name, "lanes": lanes}
        for step, a, b, c in zip(steps, low, middle, high, strict=True)
    ]


def responses(runs: dict[str, Run]) -> None:
    """Prints Table 1: recovery time, spike intensity, the initial change of x_grad, collapses, and the lost gain."""
    rows = []
    for name, run in runs.items():
        for condition, row in run.summary.iterrows():
            if row["perturbation"] == "control":
                continue
            onset, control = int(row["onset"]), run.control(str(condition))
            initial = [run.data["x_grad"].sel(condition=c).values[:, onset : onset + 10] for c in (condition, control)]
            change = statistics.bootstrap(np.nanmean(initial[0] - initial[1], axis=1))
            rows.append(
                {
                    "run": name,
                    "condition": condition,
                    "x_grad in ten steps, less control's": with_interval(change, "+.2f"),
                    "RT, median": recovery(row["recovery_time_median"]),
                    "SIP, median": row["spike_intensity_median"],
                    "share of the gain lost, collapsed": run.cell(str(condition)),
                }
            )
    print(markdown(pd.DataFrame(rows)))


def with_interval(estimate: statistics.Estimate, form: str) -> str:
    """Formats an estimate and its interval, if it has one."""
    if not np.isfinite(estimate.low):
        return format(estimate.value, form)
    return f"{estimate.value:{form}} [{estimate.low:{form}}, {estimate.high:{form}}]"


def recovery(steps: float) -> str:
    """Formats a recovery time."""
    if steps < 0:
        return "no delay"
    return f"{steps:.0f} steps" if np.isfinite(steps) else "never"


def returns(folder_: Path, sb3_folder: Path, out: Path) -> None:
    """Draws learning curves of this package and of Stable-Baselines3, if available, and prints their final values."""
    for folder in (folder_, sb3_folder):
        if not folder.is_dir():
            raise SystemExit(f"no such folder: {folder}")
    panels, rows = [], []
    for path in sorted(folder_.glob("*.csv")):
        learner, _, task = path.stem.partition("-")
        curves = {"jaxaudit": pd.read_csv(path)}
        sb3_curves = [
            pd.read_csv(p).assign(seed=i) for i, p in enumerate(sorted(sb3_folder.glob(f"{path.stem}-*.csv")))
        ]
        if sb3_curves:
            curves["Stable-Baselines3"] = pd.concat(sb3_curves)
        limit = min(c["env_steps"].max() for c in curves.values())
        for label, curve in curves.items():
            for end in dict.fromkeys((limit, curve["env_steps"].max())):
                rows.append(ending(learner, task, label, curve[curve["env_steps"] <= end]))
        frames = []
        for label, curve in curves.items():
            quantiles = curve.groupby("env_steps")["performance"].quantile([0.25, 0.5, 0.75]).unstack()
            frame = pd.DataFrame(
                {"steps": quantiles.index, "low": quantiles[0.25], "median": quantiles[0.5], "high": quantiles[0.75]}
            )
            frames.append(frame.iloc[:: max(1, len(frame) // 150)].assign(condition=label))
        colors = {"jaxaudit": style.RAMP[2], "Stable-Baselines3": style.GREY}
        panels.append(panel(pd.concat(frames), f"{NAMES[learner]} {task}", 0.0, colors))
    print(markdown(pd.DataFrame(rows)))
    save(alt.concat(*panels, columns=4).resolve_scale(y="independent", x="independent"), out / "returns.png")


def ending(learner: str, task: str, label: str, curve: pd.DataFrame) -> dict:
    """Returns means and standard deviations over seeds of the last performance and the latest evaluation."""
    by_seed = curve.sort_values("env_steps").groupby("seed")
    performance = by_seed["performance"].nth(-1)
    evaluation = by_seed["evaluation"].last()
    return {
        "learner": NAMES[learner],
        "task": task,
        "of": label,
        "env steps": int(curve["env_steps"].max()),
        "seeds": len(performance),
        "training return": f"{performance.mean():.0f} +- {performance.std():.0f}",
        "evaluation": f"{evaluation.mean():.0f} +- {evaluation.std():.0f}",
    }


def markdown(frame: pd.DataFrame) -> str:
    """Formats a frame as a Markdown table."""
    cell = lambda v: f"{v:.3g}" if isinstance(v, float) else str(v)  # noqa: E731
    lines = ["| " + " | ".join(frame.columns) + " |", "|" + "---|" * len(frame.columns)]
    return "\n".join(lines + ["| " + " | ".join(map(cell, row)) + " |" for row in frame.itertuples(index=False)])


def save(chart: alt.TopLevelMixin, path: Path) -> None:
    """Writes a PNG with 128 colours, which needs a fifth of the bytes and looks the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.configure(**style.CONFIG).save(path, scale_factor=2)  # type: ignore[attr-defined]
    with Image.open(path) as image:
        quantized = image.convert("RGB").quantize(128)
    quantized.save(path, optimize=True)


def read_runs(arguments: Sequence[str]) -> dict[str, Run]:
    """Reads the runs of arguments NAME=FOLDER, by name."""
    return {name: Run(path) for name, path in (argument.split("=", 1) for argument in arguments)}


def acting_table(runs: dict[str, Run]) -> str:
    """Returns a table by condition and run with the lost share of the gain, of performance and of disturbed acting."""
    summary = next(iter(runs.values())).summary
    frame = pd.DataFrame({"condition": summary["condition"][summary["perturbation"] != "control"]})
    for name, run in runs.items():
        for acting, quantity in ((False, "performance"), (True, "acting performance")):
            frame[f"{NAMES.get(name, name)}: {quantity} lost"] = [
                with_interval(run.loss(str(condition), acting), "+.0%") for condition in frame["condition"]
            ]
    return markdown(frame)


def main(experiment: str, *arguments: str) -> None:
    """Draws the figures of one experiment."""
    if experiment == "acting":
        print(acting_table(read_runs(arguments)))
        return
    if len(arguments) < 2:
        raise SystemExit(__doc__)
    folder, arguments = Path(arguments[0]), arguments[1:]
    if experiment == "returns":
        returns(Path(arguments[0]), Path(arguments[1]), folder)
        return
    runs = read_runs(arguments)
    if experiment == "four-learners":
        for perturbation in ("lr_spike", "action_noise", "reward_scale"):
            learner_curves(runs, perturbation, folder)
        cross_table(runs, folder)
        print(loss_table(runs))
    elif experiment == "onset":
        onset_curves(runs, folder)
    elif experiment == "entropy":
        entropy_bars(runs, folder)
        print(loss_table(runs))
    elif experiment == "language-models":
        for channel, title in (("x_grad", "x_grad"), ("x_inst", "x_inst"), ("performance", "minus the loss")):
            around_injection(runs, channel, title, folder)
        responses(runs)
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
