"""Tables and figures of the learners' sensitivity to settings, of flipped labels, and of how lanes diverge.

    python tell.py                            # from the stored tables
    python tell.py grpo=runs/a dpo=runs/b     # from these runs, and from the stored tables of other learners

Values are means over seeds, with the minimum and the maximum.
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawing import COLORS, NAMES, colored, format_range, markdown, save, seed_range

from jaxaudit.analysis.run_reader import load
from jaxaudit.report import style

HERE = Path(__file__).parent

COUNTS = ("acting_performance", "own_tokens", "calls", "truncated")
"""Channels that count tokens and calls: if they differ, rows differ; if they are equal, rows may be equal."""

MEASURED = {
    "lr_spike": "learning rate, times",
    "kl_failure": "KL weight, times",
    "ratio_clip_failure": "clip range, times",
    "temperature_spike": "temperature, times",
    "group_size": "rows of a prompt",
    "epochs": "epochs",
    "beta": "DPO's beta",
}
STANDARD = {
    "group_size": {"grpo": 8, "dapo": 8, "dpo": 2},
    "epochs": {"grpo": 2, "dapo": 2, "ppo_lm": 2, "dpo": 1},
    "beta": {"dpo": 0.1},
}
"""The values of the controls in the specs."""


def collect(**runs: str) -> None:
    """Stores final values of all lanes, and how lanes with noise of 1e-6 diverge from their controls.

    The tables keep their rows of other learners.
    """
    lanes, divergences = [], []
    for name, folder in runs.items():
        data = load(Path(folder)).telemetry.load()
        final = data.isel(step=-1)
        entropy = data["entropy"].sel(stratum="all")
        for index, condition in enumerate(data["condition"].values):
            lanes.append(
                pd.DataFrame(
                    {
                        "learner": name,
                        "perturbation": data["perturbation"].values[index],
                        "magnitude": data["magnitude"].values[index],
                        "condition": condition,
                        "seed": data["seed"].values,
                        "warm_start": data["warm_start_success"].isel(condition=index, step=0).values,
                        "first": data["performance"].isel(condition=index, step=4).values,
                        "performance": final["performance"].isel(condition=index).values,
                        "acting": data["acting_performance"].isel(condition=index, step=slice(-10, None)).mean("step"),
                        "entropy": entropy.isel(condition=index, step=-1).values,
                        "row_tokens": final["row_tokens"].isel(condition=index).values,
                        "calls": final["calls"].isel(condition=index).values,
                    }
                )
            )
        if "weight_noise" in data["perturbation"].values:
            divergences.append(divergence_table(name, data))
    for table, new_tables in (("lanes.csv", lanes), ("parting.csv", divergences)):
        merged = [pd.read_csv(HERE / table)] if (HERE / table).is_file() else []
        merged = [frame[~frame.learner.isin(runs)] for frame in merged] + new_tables
        merged = pd.concat(merged).sort_values("learner", key=lambda names: names.map(list(NAMES).index), kind="stable")
        if table == "lanes.csv":
            merged.round(4).to_csv(HERE / table, index=False)
        else:
            merged.to_csv(HERE / table, index=False, float_format="%.3g")


def divergence_table(name: str, data) -> pd.DataFrame:
    """Returns for each seed and step whether rows have differed from the control's, and the distance of the lanes."""
    noise = int(np.flatnonzero(data["perturbation"].values == "weight_noise")[0])
    control = int(np.flatnonzero(data["perturbation"].values == "control")[0])
    frames = []

    def series_of(channel: str) -> tuple[np.ndarray, np.ndarray]:
        series = data[channel].transpose("seed", "condition", "step", ...).values
        return series[:, noise], series[:, control]

    differences = []
    for channel in COUNTS:
        disturbed, controls = series_of(channel)
        differences.append((disturbed != controls).reshape(*disturbed.shape[:2], -1).any(-1))
    rows = np.maximum.accumulate(np.any(differences, axis=0), axis=1)
    distances = {}
    for channel in ("performance", "entropy", "gradient_norm", "params_norm"):
        disturbed, controls = series_of(channel)
        distance = np.abs(disturbed - controls)
        distances[channel] = distance if distance.ndim == 2 else distance[..., 0]
    for number, seed in enumerate(data["seed"].values):
        frames.append(
            pd.DataFrame(
                {"learner": name, "seed": seed, "step": data["step"].values, "rows": rows[number].astype(int)}
                | {channel: values[number] for channel, values in distances.items()}
            )
        )
    return pd.concat(frames)


def learner_colors(frame: pd.DataFrame) -> alt.Color:
    """Returns an encoding of the colours of the learners in a frame."""
    return colored({name: color for name, color in COLORS.items() if (frame.learner == name).any()})


def sensitivity_table() -> pd.DataFrame:
    """Returns final performance by learner, setting, value and seed, including controls."""
    lanes = pd.read_csv(HERE / "lanes.csv")
    control = lanes[lanes.perturbation == "control"]
    rows = [lanes[lanes.perturbation.isin(MEASURED)].assign(setting=lanes.perturbation, value=lanes.magnitude)]
    for setting in ("lr_spike", "kl_failure", "ratio_clip_failure", "temperature_spike"):
        present = lanes[lanes.perturbation == setting].learner.unique()
        rows.append(control[control.learner.isin(present)].assign(setting=setting, value=1.0))
    path = HERE / "structure.csv"
    if path.is_file():
        varied = pd.read_csv(path)
        for setting, values in STANDARD.items():
            for name, value in values.items():
                if ((varied.learner == name) & (varied.setting == setting)).any():
                    rows.append(control[control.learner == name].assign(setting=setting, value=float(value)))
        rows.append(varied)
    return pd.concat(rows)[["learner", "setting", "value", "seed", "performance", "entropy"]]


def draw_sensitivity() -> None:
    """Draws a panel for each setting with a line for each learner."""
    frame = sensitivity_table()
    color = learner_colors(frame.assign(learner=frame.learner.map(NAMES)))
    panels = []
    for setting, title in MEASURED.items():
        of_setting = frame[frame.setting == setting]
        if of_setting.empty:
            continue
        means = seed_range(of_setting, ["learner", "value"], "performance")
        means["learner"] = means.learner.map(NAMES)
        order = sorted(means.value.unique())
        means["label"] = means.value.map(lambda v: f"{v:g}")
        means["dx"] = means.learner.map({n: i for i, n in enumerate(COLORS)})
        x = alt.X("label:N", title=title, sort=[f"{v:g}" for v in order], axis=alt.Axis(labelAngle=0))
        offset = alt.XOffset("dx:Q", scale=alt.Scale(domain=[-3, 6]))
        base = alt.Chart(means).encode(x=x, color=color)
        y = alt.Y("mean:Q", title="final performance", scale=alt.Scale(domain=[0, 1]))
        panels.append(
            alt.layer(
                base.mark_line(strokeWidth=1.2, opacity=0.6).encode(y=y, xOffset=offset),
                base.mark_rule(strokeWidth=1.4).encode(y=alt.Y("min:Q"), y2="max:Q", xOffset=offset),
                base.mark_circle(size=46, opacity=1).encode(y=y, xOffset=offset),
            ).properties(width=52 * max(len(order), 3), height=160)
        )
    chart = alt.concat(*panels, columns=4).resolve_scale(y="shared", color="shared")
    save(chart, HERE / "sensitivity.png")


def draw_flipped() -> None:
    """Draws final performance against the share of flipped labels."""
    lanes = pd.read_csv(HERE / "lanes.csv")
    flipped = lanes[lanes.perturbation == "verifier_flip"].learner.unique()
    flipped_lanes = lanes[lanes.perturbation.isin(["control", "verifier_flip"]) & lanes.learner.isin(flipped)]
    means = seed_range(flipped_lanes.fillna({"magnitude": 0.0}), ["learner", "magnitude"], "performance")
    means["learner"] = means.learner.map(NAMES)
    means["x"] = means.magnitude + means.learner.map({n: 0.004 * i for i, n in enumerate(means.learner.unique())})
    warm_start = lanes[lanes.perturbation == "control"].warm_start.mean()
    base = alt.Chart(means).encode(
        x=alt.X("x:Q", title="share of labels flipped", axis=alt.Axis(format=".0%", values=[0, 0.1, 0.2, 0.3])),
        color=learner_colors(means),
    )
    y = alt.Y("mean:Q", title="final performance", scale=alt.Scale(domain=[0, 1]))
    warm = alt.Chart(pd.DataFrame({"mean": [warm_start]})).mark_rule(color=style.GREY, strokeDash=[4, 3])
    chart = alt.layer(
        warm.encode(y=y),
        base.mark_line(strokeWidth=1.4).encode(y=y),
        base.mark_rule(strokeWidth=1.4).encode(y="min:Q", y2="max:Q"),
        base.mark_circle(size=46, opacity=1).encode(y=y),
    )
    title = alt.Title("Flipped labels", subtitle="dashes: after the warm start, mean")
    save(chart.properties(width=300, height=200, title=title), HERE / "flipped_labels.png")


def draw_divergence() -> None:
    """Draws how lanes diverge that differ by 1e-6."""
    frame = pd.read_csv(HERE / "parting.csv")
    frame["learner"] = frame.learner.map(NAMES)
    x = alt.X("step:Q", title="iteration")
    panels = []
    share = frame.groupby(["learner", "step"])["rows"].sum().reset_index()
    share["rows"] += share.learner.map({n: 0.04 * i for i, n in enumerate(COLORS)})
    panels.append(
        alt.Chart(share)
        .mark_line(interpolate="step-after", strokeWidth=1.6)
        .encode(x=x, y=alt.Y("rows:Q", title="seeds whose rows have differed"), color=learner_colors(frame))
        .properties(width=230, height=170)
    )
    for channel, title in (
        ("gradient_norm", "|difference of gradient norm|"),
        ("entropy", "|difference of entropy|, nats"),
        ("performance", "|difference of performance|"),
    ):
        log = channel != "performance"
        channel_frame = frame.assign(**{channel: frame[channel].clip(lower=1e-9)}) if log else frame
        if channel == "performance":
            channel_frame = channel_frame[channel_frame.step % 5 == 4]
        medians = channel_frame.groupby(["learner", "step"])[channel].median().reset_index()
        scale = alt.Scale(type="log") if log else alt.Scale()
        panels.append(
            alt.Chart(medians)
            .mark_line(strokeWidth=1.6)
            .encode(
                x=x,
                y=alt.Y(f"{channel}:Q", title=title, scale=scale, axis=alt.Axis(format=".0e") if log else alt.Axis()),
                color=learner_colors(frame),
            )
            .properties(width=230, height=170)
        )
    save(alt.concat(*panels, columns=4).resolve_scale(y="independent"), HERE / "parting.png")


def tables() -> None:
    """Prints final performances, effects of flipped labels, and divergence of lanes as Markdown."""
    frame = sensitivity_table()
    keys = frame[["setting", "value"]].drop_duplicates()
    rows = []
    for setting in MEASURED:
        for value in sorted(keys[keys.setting == setting].value):
            row = {"setting": f"{MEASURED[setting]} {value:g}"}
            for name in frame.learner.unique():
                selected = frame[(frame.learner == name) & (frame.setting == setting) & (frame.value == value)]
                row[NAMES[name]] = (
                    format_range(selected.sort_values("seed").performance.values) if len(selected) else "-"
                )
            rows.append(row)
    print(markdown(pd.DataFrame(rows)), "\n")
    lanes = pd.read_csv(HERE / "lanes.csv")
    rows = []
    for name, group in lanes.groupby("learner", sort=False):
        control = group[group.perturbation == "control"].sort_values("seed")
        row = {
            "learner": NAMES[str(name)],
            "warm start": format_range(control.warm_start.values),
            "control": format_range(control.performance.values),
        }
        for share in (0.1, 0.2, 0.3):
            selected = group[(group.perturbation == "verifier_flip") & (group.magnitude == share)].sort_values("seed")
            if len(selected):
                difference = selected.performance.values - control.performance.values
                row[f"flipped {share:g}"] = (
                    f"{format_range(selected.performance.values)}; {format_range(difference, '+.2f')}"
                )
        rows.append(row)
    print(markdown(pd.DataFrame(rows).fillna("-")), "\n")
    divergence = pd.read_csv(HERE / "parting.csv")
    rows = []
    for name, group in divergence.groupby("learner", sort=False):
        control = lanes[(lanes.learner == name) & (lanes.perturbation == "control")]
        first_steps = [
            int(selected[selected.rows == 1].step.min()) if selected.rows.any() else "never"
            for _, selected in group.groupby("seed")
        ]
        last_steps = group[group.step >= group.step.max() - 19]
        measured = last_steps[last_steps.step % 5 == 4]
        rows.append(
            {
                "learner": NAMES[str(name)],
                "rows differ from iteration": ", ".join(map(str, first_steps)),
                "entropy apart at the first, the tenth iteration": ", ".join(
                    f"{group[group.step == step].entropy.median():.1e}" for step in (0, 9)
                ),
                "entropy apart, last 20": f"{last_steps.entropy.median():.3f}",
                "performance apart, last 20: median, largest": f"{measured.performance.median():.3f}, "
                f"{measured.performance.max():.3f}",
                "standard deviation of controls over seeds": f"{control.performance.std():.3f}",
            }
        )
    print(markdown(pd.DataFrame(rows)), "\n")


def main(runs: list[str]) -> None:
    """Draws figures and prints tables, after storing the results of the given runs."""
    if runs:
        collect(**dict(argument.split("=", 1) for argument in runs))
    draw_sensitivity()
    draw_flipped()
    draw_divergence()
    tables()


if __name__ == "__main__":
    main(sys.argv[1:])
