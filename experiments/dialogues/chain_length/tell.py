"""Figures and tables of the results of `warm_start.py` and `chain_length.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import NAMES, colored, format_range, markdown, save, seed_range

from jaxaudit.report import style

HERE = Path(__file__).parent

LENGTHS = dict(zip(("2", "4", "8"), (style.RAMP[0], style.RAMP[2], style.RAMP[4]), strict=True))
CONDITIONS = {"control": "control", "value_bias 3": "bias 3", "signal_decay 0": "lambda 0"}
OF_CRITIC = {
    "explained_variance": "explained variance, last ten",
    "correlation 0": "values' correlation with returns at the last token",
    "correlation 4-7": "4 to 7 before",
}
NOISE = {
    "acting_performance": "success",
    "row_tokens": "policy tokens",
    "x_grad": "x_grad",
    "gradient_norm": "gradient norm",
    "gradient_norm_spread": "spread of its log",
}


LOGARITHMIC = alt.Axis(values=[-30, -3, -0.3, 0], format=".1~f")
"""An axis for explained variances, which have no lower bound if returns hardly vary."""


def draw_warm_start() -> None:
    """Draws success by the number of updates on demonstrations."""
    frame = pd.read_csv(HERE / "warm_start.csv").assign(steps=lambda f: f.steps.astype(str))
    means = frame.groupby(["steps", "right", "updates"])["success"].mean().reset_index()
    means["right"] = means.right.map(lambda share: f"{share:.0%} right")
    chance = alt.Chart(pd.DataFrame({"success": [1 / 6]})).mark_rule(color=style.GREY, strokeDash=[4, 3])
    lines = (
        alt.Chart(means)
        .mark_line(strokeWidth=1.6)
        .encode(
            x=alt.X("updates:Q", title="updates on demonstrations"),
            y=alt.Y("success:Q", title="sampled success", scale=alt.Scale(domain=[0, 1])),
            color=colored(LENGTHS, "steps", "steps of the chain"),
            strokeDash=alt.StrokeDash("right:N", title="demonstrations"),
        )
    )
    save(alt.layer(chance.encode(y="success:Q"), lines).properties(width=300, height=190), HERE / "warm_start.png")


def draw() -> None:
    """Draws value signals and gradient noise by the length of chains."""
    lanes = pd.read_csv(HERE / "lanes.csv")
    steps = pd.read_csv(HERE / "steps.csv")
    ppo = lanes[lanes.learner == "ppo_lm"].copy()
    control = ppo[ppo.condition.str.startswith("control")]
    panels = []
    ppo["label"] = ppo.condition.map(CONDITIONS)
    for value, title, scale, axis in (
        ("performance", "final performance (chance 1/6)", alt.Scale(domain=[0, 1]), alt.Axis()),
        (
            "explained_variance",
            "explained variance, last ten (symlog)",
            alt.Scale(type="symlog", constant=0.1),
            LOGARITHMIC,
        ),
    ):
        means = seed_range(ppo, ["steps", "label"], value).assign(steps=lambda f: f.steps.astype(str))
        base = alt.Chart(means).encode(
            x=alt.X("label:N", title=None, sort=list(CONDITIONS.values()), axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("steps:N", sort=list(LENGTHS)),
            color=colored(LENGTHS, "steps", "steps of the chain"),
        )
        panels.append(
            alt.layer(
                base.mark_rule(strokeWidth=1.4).encode(
                    y=alt.Y("min:Q", scale=scale, title=title, axis=axis), y2="max:Q"
                ),
                base.mark_circle(size=50, opacity=1).encode(y=alt.Y("mean:Q", title=title, axis=axis)),
            ).properties(width=200, height=170)
        )
    bins = [c for c in ppo.columns if c.startswith("correlation ")]
    long = control.melt(["steps", "seed"], bins, "distance", "correlation")
    long["distance"] = long.distance.str.removeprefix("correlation ")
    means = seed_range(long, ["steps", "distance"], "correlation").assign(steps=lambda f: f.steps.astype(str))
    base = alt.Chart(means).encode(
        x=alt.X("distance:N", sort=None, title="policy tokens to the row's end", axis=alt.Axis(labelAngle=0)),
        color=colored(LENGTHS, "steps", "steps of the chain"),
    )
    y = alt.Y("mean:Q", title="correlation of values with returns")
    panels.append(
        alt.layer(
            base.mark_line(strokeWidth=1.6, point=True).encode(y=y),
            base.mark_rule(opacity=0.4).encode(y="min:Q", y2="max:Q"),
        ).properties(width=200, height=170)
    )
    save(alt.hconcat(*panels).resolve_scale(color="shared"), HERE / "value_signals.png")
    steps["learner"] = steps.learner.map(NAMES)
    panels = []
    for channel, y in (
        ("acting_performance", "success of the rows trained on"),
        ("x_grad", "x_grad (coherence of 8 gradients)"),
        ("gradient_norm_spread", "spread of log gradient norms"),
    ):
        smooth = steps.assign(step=steps.step // 5 * 5 + 2).groupby(["learner", "steps", "step"])[channel].mean()
        smooth = smooth.reset_index().assign(steps=lambda f: f.steps.astype(str))
        panels.append(
            alt.Chart(smooth)
            .mark_line(strokeWidth=1.7)
            .encode(
                x=alt.X("step:Q", title="iteration"),
                y=alt.Y(f"{channel}:Q", title=y),
                color=colored(LENGTHS, "steps", "steps of the chain"),
                strokeDash=alt.StrokeDash("learner:N", title=None, sort=["PPO", "GRPO"]),
            )
            .properties(width=230, height=170)
        )
    save(alt.hconcat(*panels).resolve_scale(color="shared"), HERE / "gradient_noise.png")


def tables() -> None:
    """Prints tables of the warm start, value signals and gradient noise, by length."""
    frame = pd.read_csv(HERE / "warm_start.csv")
    frame = frame[frame.updates.isin([200, 300, 400, 500, 1000, 2000])]
    print(
        markdown(frame.pivot_table("success", ["steps", "right"], "updates").round(2).reset_index().rename(columns=str))
    )
    print()
    lanes, steps = pd.read_csv(HERE / "lanes.csv"), pd.read_csv(HERE / "steps.csv")
    rows = []
    for (learner, length), rows_of_group in lanes.groupby(["learner", "steps"], sort=False):
        control = rows_of_group[rows_of_group.condition == "control"]
        row = {"learner": NAMES[str(learner)], "steps": length, "warm start": format_range(control.warm_start.values)}
        for condition, title in CONDITIONS.items():
            of_condition = rows_of_group[rows_of_group.condition == condition]
            row[title] = format_range(of_condition.performance.values) if len(of_condition) else "-"
        if learner == "ppo_lm":
            row |= {title: format_range(control[c].values) for c, title in OF_CRITIC.items()}
        rows.append(row)
    print(markdown(pd.DataFrame(rows).fillna("-")), "\n")
    rows = []
    for (learner, length), rows_of_group in steps.groupby(["learner", "steps"], sort=False):
        means = rows_of_group.groupby("seed")[list(NOISE)].mean()
        row = {"learner": NAMES[str(learner)], "steps": length}
        rows.append(row | {title: format_range(means[c].values) for c, title in NOISE.items()})
    print(markdown(pd.DataFrame(rows)), "\n")
    rows = []
    for learner, rows_of_group in steps.groupby("learner", sort=False):
        means = rows_of_group.groupby(["steps", "seed"])[list(NOISE)].mean().reset_index()
        rows.append({"learner": NAMES[str(learner)]} | {NOISE[c]: slope(means, c) for c in NOISE if c != "row_tokens"})
    print("per doubling of the steps\n\n" + markdown(pd.DataFrame(rows)), "\n")


def slope(lanes: pd.DataFrame, channel: str) -> str:
    """Formats the slope of a least-squares line over log2 of the steps, with its 95% interval (Student's t)."""
    line = stats.linregress(np.log2(lanes.steps), lanes[channel])
    half = stats.t.ppf(0.975, len(lanes) - 2) * line.stderr
    return f"{line.slope:.2f} [{line.slope - half:.2f}, {line.slope + half:.2f}]"


if __name__ == "__main__":
    draw_warm_start()
    draw()
    tables()
