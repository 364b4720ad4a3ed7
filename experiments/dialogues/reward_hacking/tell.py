"""Tables and a figure of proxy and gold reward over training.

python tell.py              # from the stored table
python tell.py runs/a       # from this run
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import colored, format_range, markdown, save

from jaxaudit.analysis.run_reader import load
from jaxaudit.report import style

HERE = Path(__file__).parent

HACKING = {
    "proxy": "proxy",
    "performance": "gold, held-out",
    "part_markers": '"splendid" a row',
    "row_tokens": "policy tokens a row",
    "accuracy": "reward model orders right",
    "kl": "KL, nats",
    "entropy": "entropy",
}


def collect(folder: str) -> None:
    """Stores every fifth step of all lanes."""
    data = load(Path(folder)).telemetry.load()
    frames = []
    for index in range(data.sizes["condition"]):
        for seed in data["seed"].values:
            lane = data.isel(condition=index).sel(seed=seed)
            parts = {f"part_{p}": lane["reward_part"].sel(part=p).values for p in data["part"].values}
            frame = pd.DataFrame(
                {
                    "perturbation": data["perturbation"].values[index],
                    "factor": data["magnitude"].values[index],
                    "seed": seed,
                    "step": data["step"].values,
                    "proxy": lane["proxy"].values,
                    "gold": lane["acting_performance"].values,
                    "performance": lane["performance"].values,
                    "row_tokens": lane["row_tokens"].values,
                    "truncated": lane["truncated"].values,
                    "accuracy": lane["reward_model_accuracy"].values,
                    "entropy": lane["entropy"].sel(stratum="all").values,
                    "kl": lane["kl"].sel(stratum="all").values,
                    **parts,
                }
            )
            frame["factor"] = frame["factor"].fillna(1.0)
            frames.append(frame.iloc[4::5])
    pd.concat(frames).round(4).to_csv(HERE / "steps.csv", index=False)


def draw() -> None:
    """Draws proxy and gold reward over training, and statistics of the policy's rows."""
    frame = pd.read_csv(HERE / "steps.csv")
    labels = {0.0: "no KL penalty", 1.0: "0.04, the preset's"}
    frame["kl weight"] = frame.factor.map(labels)
    colors = dict(zip(labels.values(), (style.RAMP[2], "#2c7fb8"), strict=True))
    panels = []
    for channel, title in (
        ("proxy", "learned reward (proxy)"),
        ("performance", "gold, held-out prompts"),
        ("part_markers", '"splendid" in a row'),
        ("row_tokens", "policy tokens of a row"),
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
    """Prints means of the first and the last iterations as Markdown."""
    steps = pd.read_csv(HERE / "steps.csv")
    rows = []
    for factor, group in steps.groupby("factor"):
        for phase, part in (("first", group[group.step < 15]), ("last", group[group.step >= group.step.max() - 14])):
            means = part.groupby("seed")[list(HACKING)].mean()
            rows.append(
                {"KL weight": 0.04 * factor, "iterations": f"{phase} 15"}
                | {title: format_range(means[channel].values) for channel, title in HACKING.items()}
            )
    print(markdown(pd.DataFrame(rows)), "\n")


def main(runs: list[str]) -> None:
    """Draws the figure and prints the table, after storing the results of a given run."""
    if runs:
        collect(*runs)
    draw()
    tables()


if __name__ == "__main__":
    main(sys.argv[1:])
