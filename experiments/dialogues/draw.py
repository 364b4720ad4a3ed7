"""Figures of the experiments on dialogues, and the small tables that they are drawn of.

    python experiments/dialogues/draw.py collect ppo_lm=runs/a grpo=runs/b dapo=runs/c dpo=runs/d
    python experiments/dialogues/draw.py collect-hacking runs/e
    python experiments/dialogues/draw.py draw
    python experiments/dialogues/draw.py tables

The first two write tables into four_learners and reward_hacking, the third draws all figures whose tables are there,
the last prints what README has.
Means over seeds, with the lowest and the highest seed: of four seeds no interval says more.
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parent.parent))

from figures import markdown, save

from jaxaudit.report import style
from jaxaudit.stored import load

HERE = Path(__file__).parent

NAMES = {"ppo_lm": "PPO", "grpo": "GRPO", "dapo": "DAPO", "dpo": "DPO", "dpo-1e-4": "DPO, rate 1e-4"}
COLORS = dict(zip(NAMES.values(), ("#2c7fb8", "#b02f72", "#e8952c", "#4d4d4d", "#9aa0aa"), strict=True))
COUNTS = ("acting_performance", "own_tokens", "calls", "truncated")
"""Channels that count what was written: where they differ, rows do; while they are the same, rows may be."""

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
"""What the controls of the specs have."""


HACKING = {
    "proxy": "proxy",
    "performance": "gold, held-out",
    "part_markers": '"splendid" a row',
    "row_tokens": "own tokens a row",
    "accuracy": "reward model orders right",
    "kl": "KL, nats",
    "entropy": "entropy",
}
NOISE = {
    "acting_performance": "success",
    "row_tokens": "own tokens",
    "x_grad": "x_grad",
    "gradient_norm": "gradient norm",
    "gradient_norm_spread": "spread of its log",
}


def collect(**runs: str) -> None:
    """Final figures of all lanes, and how lanes with noise of 1e-6 part from their controls."""
    lanes, parting = [], []
    for name, folder in runs.items():
        data = load(Path(folder)).telemetry.load()
        last = data.isel(step=-1)
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
                        "performance": last["performance"].isel(condition=index).values,
                        "acting": data["acting_performance"].isel(condition=index, step=slice(-10, None)).mean("step"),
                        "entropy": entropy.isel(condition=index, step=-1).values,
                        "row_tokens": last["row_tokens"].isel(condition=index).values,
                        "calls": last["calls"].isel(condition=index).values,
                    }
                )
            )
        if "weight_noise" in data["perturbation"].values:
            parting.append(parted(name, data))
    pd.concat(lanes).round(4).to_csv(HERE / "four_learners" / "lanes.csv", index=False)
    pd.concat(parting).to_csv(HERE / "four_learners" / "parting.csv", index=False, float_format="%.3g")


def parted(name: str, data) -> pd.DataFrame:
    """Of each seed and step: whether rows have ever differed from the control's, and how far apart the lanes are."""
    noise = int(np.flatnonzero(data["perturbation"].values == "weight_noise")[0])
    control = int(np.flatnonzero(data["perturbation"].values == "control")[0])
    frames = []

    def both(channel: str) -> tuple[np.ndarray, np.ndarray]:
        found = data[channel].transpose("seed", "condition", "step", ...).values
        return found[:, noise], found[:, control]

    differs = []
    for channel in COUNTS:
        one, other = both(channel)
        differs.append((one != other).reshape(*one.shape[:2], -1).any(-1))
    rows = np.maximum.accumulate(np.any(differs, axis=0), axis=1)
    apart = {}
    for channel in ("performance", "entropy", "gradient_norm", "params_norm"):
        one, other = both(channel)
        far = np.abs(one - other)
        apart[channel] = far if far.ndim == 2 else far[..., 0]
    for number, seed in enumerate(data["seed"].values):
        frames.append(
            pd.DataFrame(
                {"learner": name, "seed": seed, "step": data["step"].values, "rows": rows[number].astype(int)}
                | {channel: values[number] for channel, values in apart.items()}
            )
        )
    return pd.concat(frames)


def collect_hacking(folder: str) -> None:
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
    pd.concat(frames).round(4).to_csv(HERE / "reward_hacking" / "steps.csv", index=False)


def of_seeds(frame: pd.DataFrame, by: list[str], value: str) -> pd.DataFrame:
    """Mean, lowest and highest over seeds."""
    found = frame.groupby(by, sort=False)[value].agg(["mean", "min", "max"]).reset_index()
    return found


def band(
    frame: pd.DataFrame, x: alt.X, y: str, color: alt.Color, width: int = 230, height: int = 170, log: bool = False
) -> alt.LayerChart:
    """A line of means and a band from the lowest to the highest seed."""
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
    base = alt.Chart(frame).encode(x=x, color=color)
    line = base.mark_line(strokeWidth=1.8, clip=True).encode(y=alt.Y("mean:Q", title=y, scale=scale))
    area = base.mark_area(opacity=0.12).encode(y=alt.Y("min:Q", scale=scale, title=y), y2="max:Q")
    return alt.layer(area, line).properties(width=width, height=height)


def of_learners(frame: pd.DataFrame) -> alt.Color:
    """Colours of the learners that a frame has."""
    return colored({name: color for name, color in COLORS.items() if (frame.learner == name).any()})


def colored(names: dict[str, str], field: str = "learner", title: str | None = None) -> alt.Color:
    """Colours by name."""
    scale = alt.Scale(domain=list(names), range=list(names.values()))
    return alt.Color(f"{field}:N", title=title, scale=scale, legend=alt.Legend(symbolOpacity=1, symbolType="circle"))


def sensitivity_table() -> pd.DataFrame:
    """Final performance by learner, what is varied and seed, controls included."""
    lanes = pd.read_csv(HERE / "four_learners" / "lanes.csv")
    control = lanes[lanes.perturbation == "control"]
    rows = [lanes[lanes.perturbation.isin(MEASURED)].assign(setting=lanes.perturbation, value=lanes.magnitude)]
    for setting in ("lr_spike", "kl_failure", "ratio_clip_failure", "temperature_spike"):
        have = lanes[lanes.perturbation == setting].learner.unique()
        rows.append(control[control.learner.isin(have)].assign(setting=setting, value=1.0))
    path = HERE / "four_learners" / "structure.csv"
    if path.is_file():
        rows.append(pd.read_csv(path))
        for setting, values in STANDARD.items():
            for name, value in values.items():
                if ((rows[-1].learner == name) & (rows[-1].setting == setting)).any():
                    pass
                rows.insert(0, control[control.learner == name].assign(setting=setting, value=float(value)))
    return pd.concat(rows)[["learner", "setting", "value", "seed", "performance", "entropy"]]


def draw_sensitivity() -> None:
    """A panel for each setting, a line for each learner."""
    frame = sensitivity_table()
    color = of_learners(frame.assign(learner=frame.learner.map(NAMES)))
    panels = []
    for setting, title in MEASURED.items():
        one = frame[frame.setting == setting]
        if one.empty:
            continue
        means = of_seeds(one, ["learner", "value"], "performance")
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
    save(chart, HERE / "four_learners" / "sensitivity.png")


def draw_flipped() -> None:
    """Final performance against the share of flipped labels."""
    lanes = pd.read_csv(HERE / "four_learners" / "lanes.csv")
    flipped = lanes[lanes.perturbation == "verifier_flip"].learner.unique()
    one = lanes[lanes.perturbation.isin(["control", "verifier_flip"]) & lanes.learner.isin(flipped)]
    means = of_seeds(one.fillna({"magnitude": 0.0}), ["learner", "magnitude"], "performance")
    means["learner"] = means.learner.map(NAMES)
    means["x"] = means.magnitude + means.learner.map({n: 0.004 * i for i, n in enumerate(means.learner.unique())})
    start = lanes[lanes.perturbation == "control"].warm_start.mean()
    base = alt.Chart(means).encode(
        x=alt.X("x:Q", title="share of labels flipped", axis=alt.Axis(format=".0%", values=[0, 0.1, 0.2, 0.3])),
        color=of_learners(means),
    )
    y = alt.Y("mean:Q", title="final performance", scale=alt.Scale(domain=[0, 1]))
    warm = alt.Chart(pd.DataFrame({"mean": [start]})).mark_rule(color=style.GREY, strokeDash=[4, 3])
    chart = alt.layer(
        warm.encode(y=y),
        base.mark_line(strokeWidth=1.4).encode(y=y),
        base.mark_rule(strokeWidth=1.4).encode(y="min:Q", y2="max:Q"),
        base.mark_circle(size=46, opacity=1).encode(y=y),
    )
    title = alt.Title("Flipped labels", subtitle="dashes: after the warm start, mean")
    save(chart.properties(width=300, height=200, title=title), HERE / "four_learners" / "flipped_labels.png")


def draw_parting() -> None:
    """How lanes part that differ by 1e-6."""
    frame = pd.read_csv(HERE / "four_learners" / "parting.csv")
    frame["learner"] = frame.learner.map(NAMES)
    x = alt.X("step:Q", title="iteration")
    panels = []
    share = frame.groupby(["learner", "step"])["rows"].sum().reset_index()
    share["rows"] += share.learner.map({n: 0.04 * i for i, n in enumerate(COLORS)})
    panels.append(
        alt.Chart(share)
        .mark_line(interpolate="step-after", strokeWidth=1.6)
        .encode(x=x, y=alt.Y("rows:Q", title="seeds whose rows have differed"), color=of_learners(frame))
        .properties(width=230, height=170)
    )
    for channel, title in (
        ("gradient_norm", "|difference of gradient norm|"),
        ("entropy", "|difference of entropy|, nats"),
        ("performance", "|difference of performance|"),
    ):
        log = channel != "performance"
        one = frame.assign(**{channel: frame[channel].clip(lower=1e-9)}) if log else frame
        if channel == "performance":
            one = one[one.step % 5 == 4]
        middle = one.groupby(["learner", "step"])[channel].median().reset_index()
        scale = alt.Scale(type="log") if log else alt.Scale()
        panels.append(
            alt.Chart(middle)
            .mark_line(strokeWidth=1.6)
            .encode(
                x=x,
                y=alt.Y(f"{channel}:Q", title=title, scale=scale, axis=alt.Axis(format=".0e") if log else alt.Axis()),
                color=of_learners(frame),
            )
            .properties(width=230, height=170)
        )
    save(alt.concat(*panels, columns=4).resolve_scale(y="independent"), HERE / "four_learners" / "parting.png")


def draw_hacking() -> None:
    """Proxy and gold over training, and what the policy learned to write."""
    frame = pd.read_csv(HERE / "reward_hacking" / "steps.csv")
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
    save(alt.concat(*panels, columns=4).resolve_scale(y="independent"), HERE / "reward_hacking" / "hacking.png")


def draw_chain() -> None:
    """Value signals and the gradient's noise over the length."""
    lanes = pd.read_csv(HERE / "chain_length" / "lanes.csv")
    steps = pd.read_csv(HERE / "chain_length" / "steps.csv")
    ppo = lanes[lanes.learner == "ppo_lm"].copy()
    control = ppo[ppo.condition.str.startswith("control")]
    lengths = dict(zip(("2", "4", "8"), (style.RAMP[0], style.RAMP[2], style.RAMP[4]), strict=True))
    panels = []
    names = {"control": "control", "value_bias 3": "bias 3", "signal_decay 0": "lambda 0"}
    ppo["label"] = ppo.condition.map(names)
    for value, title, scale in (
        ("performance", "final performance (chance 1/6)", alt.Scale(domain=[0, 0.5])),
        ("explained_variance", "explained variance, last ten", alt.Scale()),
    ):
        means = of_seeds(ppo, ["steps", "label"], value).assign(steps=lambda f: f.steps.astype(str))
        base = alt.Chart(means).encode(
            x=alt.X("label:N", title=None, sort=list(names.values()), axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("steps:N", sort=list(lengths)),
            color=colored(lengths, "steps", "steps of the chain"),
        )
        panels.append(
            alt.layer(
                base.mark_rule(strokeWidth=1.4).encode(y=alt.Y("min:Q", scale=scale, title=title), y2="max:Q"),
                base.mark_circle(size=50, opacity=1).encode(y=alt.Y("mean:Q", title=title)),
            ).properties(width=200, height=170)
        )
    bins = [c for c in ppo.columns if c.startswith("correlation ")]
    long = control.melt(["steps", "seed"], bins, "distance", "correlation")
    long["distance"] = long.distance.str.removeprefix("correlation ")
    means = of_seeds(long, ["steps", "distance"], "correlation").assign(steps=lambda f: f.steps.astype(str))
    base = alt.Chart(means).encode(
        x=alt.X("distance:N", sort=None, title="own tokens to the row's end", axis=alt.Axis(labelAngle=0)),
        color=colored(lengths, "steps", "steps of the chain"),
    )
    y = alt.Y("mean:Q", title="correlation of values with returns")
    panels.append(
        alt.layer(
            base.mark_line(strokeWidth=1.6, point=True).encode(y=y),
            base.mark_rule(opacity=0.4).encode(y="min:Q", y2="max:Q"),
        ).properties(width=200, height=170)
    )
    save(alt.hconcat(*panels).resolve_scale(color="shared"), HERE / "chain_length" / "value_signals.png")
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
                color=colored(lengths, "steps", "steps of the chain"),
                strokeDash=alt.StrokeDash("learner:N", title=None, sort=["PPO", "GRPO"]),
            )
            .properties(width=230, height=170)
        )
    save(alt.hconcat(*panels).resolve_scale(color="shared"), HERE / "chain_length" / "gradient_noise.png")


def r2(x: np.ndarray, y: np.ndarray) -> float:
    """Of y as x itself, not of a line fitted."""
    return 1 - float(np.sum((y - x) ** 2) / np.sum((y - y.mean()) ** 2))


def draw_entropy() -> None:
    """Predicted against actual changes, and how entropy falls."""
    frame = pd.read_csv(HERE / "entropy" / "iterations.csv")
    frame["lane"] = [f"bonus {c:g}, rate {r:.0e}" for c, r in zip(frame.coefficient, frame.rate, strict=True)]
    names = list(frame.lane.unique())
    colors = dict(zip(names, (style.RAMP[2], style.RAMP[0], "#2c7fb8", style.GREY), strict=False))
    panels, rows = [], []
    means = of_seeds(frame, ["lane", "step"], "entropy")
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
        one = frame[frame.lane == name]
        rows.append(
            {
                "lanes": name,
                "R^2, dz": r2(one.logits, one.change),
                "of each seed": ", ".join(f"{r2(of.logits, of.change):.2f}" for _, of in one.groupby("seed")),
                "correlation, dz": np.corrcoef(one.logits, one.change)[0, 1],
                "correlation, advantage": np.corrcoef(one.advantage, one.change)[0, 1],
                "R^2, probabilities (median)": one.probability_r2.median(),
                "entropy first": one[one.step == 0].entropy.mean(),
                "last five": one[one.step >= one.step.max() - 4].entropy.mean(),
                "reward": one[one.step >= one.step.max() - 4].reward.mean(),
                "trace of the Jacobian, first and last five": f"{one[one.step < 5].jacobian_trace.mean():.2f}, "
                f"{one[one.step >= one.step.max() - 4].jacobian_trace.mean():.2f}",
            }
        )
    print(markdown(pd.DataFrame(rows)))
    save(alt.hconcat(*panels).resolve_scale(color="shared"), HERE / "entropy" / "entropy.png")


def said(values: np.ndarray, form: str = ".2f") -> str:
    """A mean, with the lowest and the highest seed."""
    return f"{values.mean():{form}} [{values.min():{form}}, {values.max():{form}}]"


def tables() -> None:
    """What README has in tables, as Markdown."""
    frame = sensitivity_table()
    keys = frame[["setting", "value"]].drop_duplicates()
    rows = []
    for setting in MEASURED:
        for value in sorted(keys[keys.setting == setting].value):
            row = {"setting": f"{MEASURED[setting]} {value:g}"}
            for name in frame.learner.unique():
                one = frame[(frame.learner == name) & (frame.setting == setting) & (frame.value == value)]
                row[NAMES[name]] = said(one.sort_values("seed").performance.values) if len(one) else "-"
            rows.append(row)
    print(markdown(pd.DataFrame(rows)), "\n")
    lanes = pd.read_csv(HERE / "four_learners" / "lanes.csv")
    rows = []
    for name, of in lanes.groupby("learner", sort=False):
        control = of[of.perturbation == "control"].sort_values("seed")
        row = {
            "learner": NAMES[str(name)],
            "warm start": said(control.warm_start.values),
            "control": said(control.performance.values),
        }
        for share in (0.1, 0.2, 0.3):
            one = of[(of.perturbation == "verifier_flip") & (of.magnitude == share)].sort_values("seed")
            if len(one):
                less = one.performance.values - control.performance.values
                row[f"flipped {share:g}"] = f"{said(one.performance.values)}; {said(less, '+.2f')}"
        rows.append(row)
    print(markdown(pd.DataFrame(rows).fillna("-")), "\n")
    apart = pd.read_csv(HERE / "four_learners" / "parting.csv")
    rows = []
    for name, of in apart.groupby("learner", sort=False):
        control = lanes[(lanes.learner == name) & (lanes.perturbation == "control")]
        first = [int(one[one.rows == 1].step.min()) if one.rows.any() else "never" for _, one in of.groupby("seed")]
        late = of[of.step >= of.step.max() - 19]
        measured = late[late.step % 5 == 4]
        rows.append(
            {
                "learner": NAMES[str(name)],
                "rows differ from iteration": ", ".join(map(str, first)),
                "entropy apart at the first, the tenth iteration": ", ".join(
                    f"{of[of.step == step].entropy.median():.1e}" for step in (0, 9)
                ),
                "entropy apart, last 20": f"{late.entropy.median():.3f}",
                "performance apart, last 20: median, largest": f"{measured.performance.median():.3f}, "
                f"{measured.performance.max():.3f}",
                "standard deviation of controls over seeds": f"{control.performance.std():.3f}",
            }
        )
    print(markdown(pd.DataFrame(rows)), "\n")
    if (HERE / "reward_hacking" / "steps.csv").is_file():
        steps = pd.read_csv(HERE / "reward_hacking" / "steps.csv")
        rows = []
        for factor, of in steps.groupby("factor"):
            for when, part in (("first", of[of.step < 15]), ("last", of[of.step >= of.step.max() - 14])):
                means = part.groupby("seed")[list(HACKING)].mean()
                rows.append(
                    {"KL weight": 0.04 * factor, "iterations": f"{when} 15"}
                    | {title: said(means[channel].values) for channel, title in HACKING.items()}
                )
        print(markdown(pd.DataFrame(rows)), "\n")
    if (HERE / "chain_length" / "lanes.csv").is_file():
        chain_tables()


def chain_tables() -> None:
    """Value signals and the gradient's noise, by length."""
    lanes = pd.read_csv(HERE / "chain_length" / "lanes.csv")
    columns = ("warm_start", "performance", "entropy", "explained_variance", "value_bias")
    rows = []
    for (learner, steps, condition), of in lanes.groupby(["learner", "steps", "condition"], sort=False):
        row = {"learner": NAMES[str(learner)], "steps": steps, "condition": condition}
        rows.append(row | {c: said(of[c].values) if of[c].notna().all() else "-" for c in columns})
    print(markdown(pd.DataFrame(rows)), "\n")
    steps = pd.read_csv(HERE / "chain_length" / "steps.csv")
    rows = []
    for (learner, length), of in steps.groupby(["learner", "steps"], sort=False):
        for when, part in (("first", of[of.step < 10]), ("last", of[of.step >= of.step.max() - 9])):
            means = part.groupby("seed")[list(NOISE)].mean()
            means["noise"] = 1 / means.x_grad.clip(lower=1e-3) - 1
            row = {"learner": NAMES[str(learner)], "steps": length, "iterations": f"{when} 10"}
            rows.append(
                row | {title: said(means[c].values) for c, title in (NOISE | {"noise": "noise/signal"}).items()}
            )
    print(markdown(pd.DataFrame(rows)), "\n")


def draw() -> None:
    """All figures whose tables are there."""
    for path, function in (
        ("four_learners/lanes.csv", draw_sensitivity),
        ("four_learners/lanes.csv", draw_flipped),
        ("four_learners/parting.csv", draw_parting),
        ("reward_hacking/steps.csv", draw_hacking),
        ("chain_length/lanes.csv", draw_chain),
        ("entropy/iterations.csv", draw_entropy),
    ):
        if (HERE / path).is_file():
            function()


def main(what: str, *given: str) -> None:
    """One command."""
    if what == "collect":
        collect(**dict(one.split("=", 1) for one in given))
    elif what == "collect-hacking":
        collect_hacking(*given)
    elif what in ("draw", "tables"):
        {"draw": draw, "tables": tables}[what]()
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
