"""Finding II: do all disturbances reduce the coherence of gradients in the same way, and performance in different ways?

    python experiments/findings/manifold.py OUT PPO=runs/ppo-disturbed PPO=runs/ppo-slow GPT-2=runs/gpt2-disturbed

For every condition, profiles of the channels x_grad (coherence of the gradients as computed), x_used (between them and
the gradients that were used) and x_inst around the onset are computed, as differences to the control lane of the same
seed in standard deviations of the control lanes; x_used, which is 1 in controls, is not scaled. Draws `manifold.png`,
and writes and prints `manifold.csv` (a row for each condition and channel) and `likeness.csv`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from basics import format_estimate, markdown, over_seeds, parse_arguments, save

from jaxaudit.analysis.run_reader import CONTROL, load
from jaxaudit.report import style

CHANNELS = ("x_grad", "x_used", "x_inst")
BEFORE, AFTER, AT_ONCE = 10, 40, 10
"""Steps before the onset that are drawn, steps after it in a profile, and the first of them that are averaged."""


@dataclass(frozen=True)
class Profiles:
    """A channel around the onset, by condition.

    Attributes:
      z: the difference to the control in standard deviations, `[seeds, BEFORE + AFTER]`.
      seeds: names of the seeds of the rows.
      collapsed: the number of lanes that collapsed.
    """

    z: dict[str, np.ndarray]
    seeds: dict[str, list[str]]
    collapsed: dict[str, int]


def profiles(folders: Sequence[Path], channel: str) -> Profiles:
    """Returns the profiles of all disturbed conditions of runs; each is compared with controls of the same run."""
    result = Profiles({}, {}, {})
    for folder in folders:
        run = load(folder)
        values, table = run.channel(channel), run.conditions
        if values is None or run.metrics is None:
            raise SystemExit(f"{folder} has no channel {channel}, or no metrics")
        times = run.metrics.set_index(["condition", "seed"])["collapse_time"]
        for number in np.flatnonzero(table.perturbation != CONTROL):
            onset, condition = int(table.onset[number]), str(table.condition[number])
            name = f"{condition}, {table.duration[number]} steps" if condition in result.z else condition
            control = np.flatnonzero((table.perturbation == CONTROL) & (table.onset == onset))[0]
            steps = slice(onset - BEFORE, onset + AFTER)
            result.z[name] = fill_forward(values[:, number, steps] - values[:, control, steps])
            result.z[name] /= spread(values[:, control], steps)
            result.seeds[name] = [str(seed) for seed in run.telemetry.seed.values]
            result.collapsed[name] = int(np.isfinite(times.loc[condition]).sum())
    return result


def fill_forward(series: np.ndarray) -> np.ndarray:
    """Replaces non-finite values of series `[seeds, T]` by the latest finite value, or 0."""
    finite = np.isfinite(series)
    latest = np.maximum.accumulate(np.where(finite, np.arange(series.shape[1]), -1), axis=1)
    filled = np.take_along_axis(np.where(finite, series, 0.0), np.maximum(latest, 0), axis=1)
    return np.where(latest >= 0, filled, 0.0)


def spread(control: np.ndarray, steps: slice) -> float:
    """Returns the standard deviation of control lanes `[seeds, T]` over some steps, or over the run if it is constant.

    It is estimated by the interquartile range, since some undisturbed lane may be an outlier. It is 1 for a constant
    channel.
    """
    low, high = np.nanpercentile(control[:, steps], [25, 75])
    return float((high - low) / 1.349 if high > low else np.nanstd(control)) or 1.0


def typical(z: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the median over lanes `[seeds, T]`, weighted by counts."""
    return np.median(z[np.repeat(np.arange(len(z)), counts)], axis=0)


def initial_mean(curve: np.ndarray) -> float:
    """Returns the mean of the first AT_ONCE steps after the onset of a profile `[BEFORE + AFTER]`."""
    return float(curve[BEFORE : BEFORE + AT_ONCE].mean())


def likeness(curves: Sequence[np.ndarray]) -> float:
    """Returns the mean correlation of all pairs of profiles `[AFTER]`, or NaN with fewer than two that vary."""
    usable = [c for c in curves if c.std() > 0]
    if len(usable) < 2:
        return np.nan
    matrix = np.corrcoef(usable)
    return float(matrix[np.triu_indices(len(usable), 1)].mean())


def distance(curves: Sequence[np.ndarray]) -> float:
    """Returns the mean over pairs of |a - b| / (|a| + |b|), which is 0 for equal and 1 for opposite profiles."""
    usable = [c for c in curves if np.abs(c).max() > 0]
    norm = np.linalg.norm
    distances = [norm(a - b) / (norm(a) + norm(b)) for a, b in itertools.combinations(usable, 2)]
    return float(np.mean(distances)) if distances else np.nan


def halves(z: np.ndarray) -> float:
    """Returns the correlation between profiles of two halves of a condition's seeds, the ceiling due to noise."""
    return likeness([np.median(half[:, BEFORE:], axis=0) for half in (z[::2], z[1::2])])


def seed_counts(seeds: list[str], all_seeds: list[str], counts: np.ndarray) -> np.ndarray:
    """Returns the counts of a condition's seeds in a bootstrap sample."""
    count_by_seed = dict(zip(all_seeds, counts, strict=True))
    return np.array([count_by_seed[seed] for seed in seeds])


def condition_rows(name: str, profiles_: Profiles, channel: str) -> tuple[list[dict], dict]:
    """Returns a row for each condition, and one with their similarity, with intervals over seeds."""
    rows = []
    for condition, z in profiles_.z.items():
        curve = typical(z, np.ones(len(z), int))
        lowest_step = int(curve[BEFORE:].argmin())
        estimate = over_seeds(lambda counts, z=z: initial_mean(typical(z, counts)), profiles_.seeds[condition])
        rows.append(
            {
                "learner": name,
                "channel": channel,
                "condition": condition,
                "collapsed": f"{profiles_.collapsed[condition]}/{len(z)}",
                "ten steps": estimate.value,
                "low": estimate.low,
                "high": estimate.high,
                "lowest": float(curve[BEFORE + lowest_step]),
                "lowest at": lowest_step,
                "verdict": "falls" if estimate.high < 0 else "rises" if estimate.low > 0 else "not told apart",
            }
        )
    all_seeds = sorted({seed for seeds in profiles_.seeds.values() for seed in seeds})
    changed = [row["condition"] for row in rows if row["verdict"] != "not told apart"]

    def estimate_over(figure, conditions):
        def statistic(counts):
            curves = []
            for condition in conditions:
                counts_of_condition = seed_counts(profiles_.seeds[condition], all_seeds, counts)
                if not counts_of_condition.any():
                    return np.nan
                curves.append(typical(profiles_.z[condition], counts_of_condition)[BEFORE:])
            return figure(curves)

        return over_seeds(statistic, all_seeds)

    half_correlations = [halves(profiles_.z[c]) for c in changed]
    row = {
        "learner": name,
        "channel": channel,
        "conditions that move": f"{len(changed)} of {len(rows)}",
        "falls": sum(row["verdict"] == "falls" for row in rows),
        "rises": sum(row["verdict"] == "rises" for row in rows),
        "correlation": format_estimate(estimate_over(likeness, changed)),
        "distance": format_estimate(estimate_over(distance, changed)),
        "correlation of halves of a condition's seeds": f"{np.nanmean(half_correlations):.2f}"
        if half_correlations
        else "-",
    }
    return rows, row


def panel(profiles_: Profiles, name: str, channel: str) -> alt.LayerChart:
    """Draws a line for each condition, the median over seeds, on a symlog axis."""
    steps = np.arange(-BEFORE, AFTER)
    rows = []
    for condition, z in profiles_.z.items():
        curve = typical(z, np.ones(len(z), int))
        collapsed = profiles_.collapsed[condition] > len(z) / 2
        group = "most seeds collapse" if collapsed else "they do not"
        rows.append(pd.DataFrame({"step": steps, "z": curve, "condition": condition, "lanes": group}))
    frame = pd.concat(rows)
    colors = {"most seeds collapse": style.RAMP[2], "they do not": style.GREY}
    scale = alt.Scale(type="symlog", constant=1, nice=False)
    axis = alt.Axis(values=[sign * 10.0**k for sign in (1, -1) for k in range(0, 9, 2)] + [0, 3, -3, 10], format=",")
    lines = (
        alt.Chart(frame)
        .mark_line(strokeWidth=1.4, opacity=0.8)
        .encode(
            x=alt.X("step:Q", title="steps since the onset"),
            y=alt.Y("z:Q", title="from the control, in its std", scale=scale, axis=axis),
            color=alt.Color("lanes:N", title=None, scale=alt.Scale(domain=list(colors), range=list(colors.values()))),
            detail="condition:N",
        )
    )
    rule = alt.Chart(pd.DataFrame({"step": [0]})).mark_rule(color=style.INK, strokeWidth=0.8).encode(x="step:Q")
    return alt.layer(lines, rule).properties(title=f"{name}: {channel}", width=300, height=190)


def main() -> None:
    """Writes the tables and draws the figure."""
    out, folders_by_name = parse_arguments(__doc__, "folders of runs; those of a name belong together")
    rows, likeness_rows, panels = [], [], []
    for name, folders in folders_by_name.items():
        for channel in CHANNELS:
            profiles_ = profiles(folders, channel)
            condition_rows_, likeness_row = condition_rows(name, profiles_, channel)
            rows += condition_rows_
            likeness_rows.append(likeness_row)
            panels.append(panel(profiles_, name, channel))
    table, likenesses = pd.DataFrame(rows), pd.DataFrame(likeness_rows)
    table.to_csv(out / "manifold.csv", index=False, float_format="%.4g")
    likenesses.to_csv(out / "likeness.csv", index=False)
    print(markdown(table), markdown(likenesses), sep="\n\n")
    save(alt.concat(*panels, columns=len(CHANNELS)).resolve_scale(y="independent"), out / "manifold.png")


if __name__ == "__main__":
    main()
