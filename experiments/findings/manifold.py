"""Finding II: do all disturbances take the gradients' coherence down one path, and performance down many?

    python experiments/findings/manifold.py OUT PPO=runs/ppo-disturbed PPO=runs/ppo-slow GPT-2=runs/gpt2-disturbed

Of every condition the channels x_grad (of the gradients as they were), x_used (between them and those that were used)
and x_inst around the onset, less the same seed's control lane, in standard deviations of the control lanes; x_used,
which is 1 in all of these, as it is. Draws `manifold.png`, writes `manifold.csv` (a row for each condition and channel)
and `likeness.csv`, and prints both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from basics import asked, markdown, over_seeds, said, save

from jaxaudit.analysis.run_reader import CONTROL, load
from jaxaudit.report import style

CHANNELS = ("x_grad", "x_used", "x_inst")
BEFORE, AFTER, AT_ONCE = 10, 40, 10
"""Steps before the onset that are drawn, steps after it that a profile has, and those that are "at once"."""


@dataclass(frozen=True)
class Profiles:
    """A channel around the onset, by condition.

    Attributes:
      z: of each condition `[seeds, BEFORE + AFTER]`, the difference to the control in its standard deviations.
      seeds: of each condition, by which its rows are known.
      collapsed: of each condition, how many of its lanes collapsed.
    """

    z: dict[str, np.ndarray]
    seeds: dict[str, list[str]]
    collapsed: dict[str, int]


def profiles(folders: Sequence[Path], channel: str) -> Profiles:
    """Those of all disturbed conditions of runs; a seed's control lane is the same run's."""
    found = Profiles({}, {}, {})
    for folder in folders:
        run = load(folder)
        values, table = run.channel(channel), run.conditions
        if values is None or run.metrics is None:
            raise SystemExit(f"{folder} has no channel {channel}, or no metrics")
        times = run.metrics.set_index(["condition", "seed"])["collapse_time"]
        for number in np.flatnonzero(table.perturbation != CONTROL):
            onset, condition = int(table.onset[number]), str(table.condition[number])
            name = f"{condition}, {table.duration[number]} steps" if condition in found.z else condition
            control = np.flatnonzero((table.perturbation == CONTROL) & (table.onset == onset))[0]
            steps = slice(onset - BEFORE, onset + AFTER)
            found.z[name] = held(values[:, number, steps] - values[:, control, steps])
            found.z[name] /= spread(values[:, control], steps)
            found.seeds[name] = [str(seed) for seed in run.telemetry.seed.values]
            found.collapsed[name] = int(np.isfinite(times.loc[condition]).sum())
    return found


def held(series: np.ndarray) -> np.ndarray:
    """Series `[seeds, T]` in which what is not finite is the value before, or 0: a lane that became NaN stays."""
    there = np.isfinite(series)
    latest = np.maximum.accumulate(np.where(there, np.arange(series.shape[1]), -1), axis=1)
    filled = np.take_along_axis(np.where(there, series, 0.0), np.maximum(latest, 0), axis=1)
    return np.where(latest >= 0, filled, 0.0)


def spread(control: np.ndarray, steps: slice) -> float:
    """The standard deviation of control lanes `[seeds, T]` over some steps; where most are flat, over the whole run.

    Over the steps from the interquartile range, as a normal would have it: an undisturbed lane may go astray, too. Of
    a channel that never moves in them, 1.
    """
    low, high = np.nanpercentile(control[:, steps], [25, 75])
    return float((high - low) / 1.349 if high > low else np.nanstd(control)) or 1.0


def typical(z: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The median over lanes `[seeds, T]`, each taken so many times."""
    return np.median(z[np.repeat(np.arange(len(z)), counts)], axis=0)


def at_once(curve: np.ndarray) -> float:
    """The mean of the AT_ONCE steps from the onset of a profile `[BEFORE + AFTER]`."""
    return float(curve[BEFORE : BEFORE + AT_ONCE].mean())


def likeness(curves: Sequence[np.ndarray]) -> float:
    """The mean correlation of all pairs of profiles `[AFTER]`; NaN under two that vary."""
    usable = [c for c in curves if c.std() > 0]
    if len(usable) < 2:
        return np.nan
    matrix = np.corrcoef(usable)
    return float(matrix[np.triu_indices(len(usable), 1)].mean())


def distance(curves: Sequence[np.ndarray]) -> float:
    """The mean over pairs of |a - b| / (|a| + |b|): 0 for equal profiles, 1 for opposite ones; size counts."""
    usable = [c for c in curves if np.abs(c).max() > 0]
    norm = np.linalg.norm
    apart = [norm(a - b) / (norm(a) + norm(b)) for a, b in itertools.combinations(usable, 2)]
    return float(np.mean(apart)) if apart else np.nan


def halves(z: np.ndarray) -> float:
    """The correlation between the profiles of two halves of a condition's seeds: what noise leaves of a likeness."""
    return likeness([np.median(half[:, BEFORE:], axis=0) for half in (z[::2], z[1::2])])


def drawn(seeds: list[str], everyone: list[str], counts: np.ndarray) -> np.ndarray:
    """How often each of a condition's seeds is taken."""
    of = dict(zip(everyone, counts, strict=True))
    return np.array([of[seed] for seed in seeds])


def tell(name: str, found: Profiles, channel: str) -> tuple[list[dict], dict]:
    """A row for each condition, and one of how alike they are, with intervals over seeds."""
    rows = []
    for condition, z in found.z.items():
        curve = typical(z, np.ones(len(z), int))
        least = int(curve[BEFORE:].argmin())
        moved = over_seeds(lambda counts, z=z: at_once(typical(z, counts)), found.seeds[condition])
        rows.append(
            {
                "learner": name,
                "channel": channel,
                "condition": condition,
                "collapsed": f"{found.collapsed[condition]}/{len(z)}",
                "ten steps": moved.value,
                "low": moved.low,
                "high": moved.high,
                "lowest": float(curve[BEFORE + least]),
                "lowest at": least,
                "verdict": "falls" if moved.high < 0 else "rises" if moved.low > 0 else "not told apart",
            }
        )
    everyone = sorted({seed for seeds in found.seeds.values() for seed in seeds})
    chosen = [row["condition"] for row in rows if row["verdict"] != "not told apart"]

    def over(figure, conditions):
        def statistic(counts):
            curves = []
            for condition in conditions:
                taken = drawn(found.seeds[condition], everyone, counts)
                if not taken.any():
                    return np.nan
                curves.append(typical(found.z[condition], taken)[BEFORE:])
            return figure(curves)

        return over_seeds(statistic, everyone)

    within = [halves(found.z[c]) for c in chosen]
    row = {
        "learner": name,
        "channel": channel,
        "conditions that move": f"{len(chosen)} of {len(rows)}",
        "falls": sum(row["verdict"] == "falls" for row in rows),
        "rises": sum(row["verdict"] == "rises" for row in rows),
        "correlation": said(over(likeness, chosen)),
        "distance": said(over(distance, chosen)),
        "correlation of halves of a condition's seeds": f"{np.nanmean(within):.2f}" if within else "-",
    }
    return rows, row


def panel(found: Profiles, name: str, channel: str) -> alt.LayerChart:
    """A line for each condition: the median over seeds, on an axis that is linear near zero."""
    steps = np.arange(-BEFORE, AFTER)
    rows = []
    for condition, z in found.z.items():
        curve = typical(z, np.ones(len(z), int))
        collapsed = found.collapsed[condition] > len(z) / 2
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
    """Draws and tells."""
    out, named = asked(__doc__, "of runs; those of a name together")
    rows, alike, panels = [], [], []
    for name, folders in named.items():
        for channel in CHANNELS:
            found = profiles(folders, channel)
            each, one = tell(name, found, channel)
            rows += each
            alike.append(one)
            panels.append(panel(found, name, channel))
    table, likenesses = pd.DataFrame(rows), pd.DataFrame(alike)
    table.to_csv(out / "manifold.csv", index=False, float_format="%.4g")
    likenesses.to_csv(out / "likeness.csv", index=False)
    print(markdown(table), markdown(likenesses), sep="\n\n")
    save(alt.concat(*panels, columns=len(CHANNELS)).resolve_scale(y="independent"), out / "manifold.png")


if __name__ == "__main__":
    main()
