"""Proxy and gold reward over training: tables of a run, and a figure.

python tell.py              # of the table that is there
python tell.py runs/a       # of this run
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import colored, markdown, said, save

from jaxaudit.analysis.run_reader import load
from jaxaudit.report import style

HERE = Path(__file__).parent

HACKING = {
    "proxy": "proxy",
    "performance": "gold, held-out",
    "part_markers": '"splendid" a row',
    "row_tokens": "own tokens a row",
    "accuracy": "reward model orders right",
    "kl": "KL, nats",
    "entropy": "entropy",
}


def collect(folder: str) -> None:
    """Every fifth step of all lanes."""
    data = load(Path(folder)).telemetry.load()
    frames = []
    for index in range(data.sizes["condition"]):
        for seed in data["seed"].values:
            one = data.isel(condition=index).sel(seed=seed)
            parts = {f"part_{p}": one["reward_part"].sel(part=p).values for p in data["part"].values}
            frame = pd.DataFrame(
                {
                    "perturbation": data["perturbation"].values[index],
                    "factor": data["magnitude"].values[index],
                    "seed": seed,
                    "step": data["step"].values,
                    "proxy": one["proxy"].values,
                    "gold": one["acting_performance"].values,
                    "performance": one["performance"].values,
                    "row_tokens": one["row_tokens"].values,
                    "truncated": one["truncated"].values,
                    "accuracy": one["reward_model_accuracy"].values,
                    "entropy": one["entropy"].sel(stratum="all").values,
                    "kl": one["kl"].sel(stratum="all").values,
                    **parts,
                }
            )
            frame["factor"] = frame["factor"].fillna(1.0)
            frames.append(frame.iloc[4::5])
    pd.concat(frames).round(4).to_csv(HERE / "steps.csv", index=False)


def draw() -> None:
    """Proxy and gold over training, and what the policy learned to write."""
    frame = pd.read_csv(HERE / "steps.csv")
    labels = {0.0: "no KL penalty", 1.0: "0.04, the preset's"}
    frame["kl weight"] = frame.factor.map(labels)
    colors = dict(zip(labels.values(), (style.RAMP[2], "#2c7fb8"), strict=True))
    panels = []
    for channel, title in (
        ("proxy", "learned reward (proxy)"),
        ("performance", "gold, held-out prompts"),
        ("part_markers", '"splendid" in a row'),
        ("row_tokens", "own tokens of a row"),
        ("part_coverage", "topic's words written, share"),
        ("accuracy", "pairs the reward model orders right"),
        ("kl", "exact KL to the warm start, nats"),
        ("entropy", "entropy, nats"),
    ):
        base = alt.Chart(frame).encode(x=alt.X("step:Q", title="iteration"), color=colored(colors, "kl weight"))
        y = alt.Y(f"{channel}:Q", title=title, scale=alt.Scale(zero=False))
        seeds = base.mark_line(strokeWidth=0.7, opacity=0.45).encode(y=y, detail="seed:N")
        mean = base.mark_line(strokeWidth=2.2).encode(y=alt.Y(f"mean({channel}):Q", title=title))
        panels.append(alt.layer(seeds, mean).properties(width=210, height=150))
    save(alt.concat(*panels, columns=4).resolve_scale(y="independent"), HERE / "hacking.png")


def tables() -> None:
    """Of the first and the last iterations, as Markdown."""
    steps = pd.read_csv(HERE / "steps.csv")
    rows = []
    for factor, of in steps.groupby("factor"):
        for when, part in (("first", of[of.step < 15]), ("last", of[of.step >= of.step.max() - 14])):
            means = part.groupby("seed")[list(HACKING)].mean()
            rows.append(
                {"KL weight": 0.04 * factor, "iterations": f"{when} 15"}
                | {title: said(means[channel].values) for channel, title in HACKING.items()}
            )
    print(markdown(pd.DataFrame(rows)), "\n")


def main(runs: list[str]) -> None:
    """Tells and draws, after the tables have been made of the runs where there are any."""
    if runs:
        collect(*runs)
    draw()
    tables()


if __name__ == "__main__":
    main(sys.argv[1:])
