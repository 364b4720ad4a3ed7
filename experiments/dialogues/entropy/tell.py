"""Figure and table of predicted and actual changes of entropy, from the results of `entropy.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import colored, markdown, save, seed_range

from jaxaudit.report import style

HERE = Path(__file__).parent


def band(
    frame: pd.DataFrame, x: alt.X, y: str, color: alt.Color, width: int = 230, height: int = 170, log: bool = False
) -> alt.LayerChart:
    """Draws a line of means and a band from the minimum to the maximum over seeds."""
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
    base = alt.Chart(frame).encode(x=x, color=color)
    line = base.mark_line(strokeWidth=1.8, clip=True).encode(y=alt.Y("mean:Q", title=y, scale=scale))
    area = base.mark_area(opacity=0.12).encode(y=alt.Y("min:Q", scale=scale, title=y), y2="max:Q")
    return alt.layer(area, line).properties(width=width, height=height)


def r2(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the R^2 of x as a prediction of y, without fitting a line."""
    return 1 - float(np.sum((y - x) ** 2) / np.sum((y - y.mean()) ** 2))


def report() -> None:
    """Draws and prints predicted and actual changes, and the course of entropy."""
    frame = pd.read_csv(HERE / "iterations.csv")
    frame["lane"] = [f"bonus {c:g}, rate {r:.0e}" for c, r in zip(frame.coefficient, frame.rate, strict=True)]
    names = list(frame.lane.unique())
    colors = dict(zip(names, (style.RAMP[2], style.RAMP[0], "#2c7fb8", style.GREY), strict=False))
    panels, rows = [], []
    means = seed_range(frame, ["lane", "step"], "entropy")
    panels.append(band(means, alt.X("step:Q", title="iteration"), "entropy, nats", colored(colors, "lane"), 230, 200))
    for predictor, title in (
        ("logits", "-Cov(log pi, dz), nats"),
        ("advantage", "-Cov(log pi, A - bonus log pi)"),
    ):
        base = alt.Chart(frame).encode(
            x=alt.X(f"{predictor}:Q", title=title),
            y=alt.Y("change:Q", title="entropy's change in the iteration, nats"),
        )
        points = base.mark_circle(size=9, opacity=0.45, clip=True).encode(color=colored(colors, "lane"))
        layers = [points]
        if predictor == "logits":
            ends = [float(frame.change.min()), float(frame.change.max())]
            line = alt.Chart(pd.DataFrame({"x": ends, "y": ends}))
            layers.append(line.mark_line(color=style.INK, strokeWidth=0.8).encode(x="x:Q", y="y:Q"))
        panels.append(alt.layer(*layers).properties(width=230, height=200))
    for name in names:
        lane = frame[frame.lane == name]
        rows.append(
            {
                "lanes": name,
                "R^2, dz": r2(lane.logits, lane.change),
                "of each seed": ", ".join(
                    f"{r2(seed_rows.logits, seed_rows.change):.2f}" for _, seed_rows in lane.groupby("seed")
                ),
                "correlation, dz": np.corrcoef(lane.logits, lane.change)[0, 1],
                "correlation, advantage": np.corrcoef(lane.advantage, lane.change)[0, 1],
                "R^2, probabilities (median)": lane.probability_r2.median(),
                "entropy first": lane[lane.step == 0].entropy.mean(),
                "last five": lane[lane.step >= lane.step.max() - 4].entropy.mean(),
                "reward": lane[lane.step >= lane.step.max() - 4].reward.mean(),
                "trace of the Jacobian, first and last five": f"{lane[lane.step < 5].jacobian_trace.mean():.2f}, "
                f"{lane[lane.step >= lane.step.max() - 4].jacobian_trace.mean():.2f}",
            }
        )
    print(markdown(pd.DataFrame(rows)))
    save(alt.hconcat(*panels).resolve_scale(color="shared"), HERE / "entropy.png")


if __name__ == "__main__":
    report()
