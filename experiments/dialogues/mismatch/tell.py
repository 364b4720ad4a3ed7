"""What a late, noisy or coarse sampler costs, by the kind of old log-probability the ratios are relative to.

    python experiments/dialogues/mismatch/tell.py OUT recomputed=runs/a sampled=runs/b "recomputed, TIS"=runs/c

Of every condition: how many seeds collapse, success over the last LAST steps and what it has less than the same seed's
control, with the interval over seeds, and the share of tokens that are clipped since the onset. Writes `mismatch.csv`
and `margins.csv` (between which magnitudes half of the seeds begin to collapse) and draws `mismatch.png`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

from basics import asked, markdown, save

from jaxaudit.analysis import statistics
from jaxaudit.analysis.run_reader import CONTROL, load
from jaxaudit.report import style

LAST = 10
"""Steps whose mean success is the final one."""

TITLES = {
    "stale_policy": ("lag of the sampler, iterations", "log"),
    "sampler_noise": ("noise on the sampler's logits, std", "log"),
    "sampler_quantize": ("bits of the sampler's parameters", "linear"),
}

WEAK_IS_LARGE = ("sampler_quantize",)


def rows_of(name: str, folder: Path) -> list[dict]:
    """A row for each condition of a run."""
    run = load(folder)
    if run.metrics is None:
        raise SystemExit(f"{folder} has no metrics yet")
    success = run.channel("performance")
    clipped = run.telemetry["clip_fraction"].sel(stratum="all", moment="visited").sum("side")
    clipped = clipped.transpose("seed", "condition", "step").values
    times = run.metrics.pivot(index="seed", columns="condition", values="collapse_time")
    control = int(np.flatnonzero(run.conditions.perturbation == CONTROL)[0])
    final = success[..., -LAST:].mean(-1)
    rows = []
    for number, condition in run.conditions.iterrows():
        collapsed = np.isfinite(times[condition.condition].to_numpy())
        row = {"old log-probability": name, "perturbation": condition.perturbation, "magnitude": condition.magnitude}
        row |= {"seeds": len(final), "collapsed": int(collapsed.sum())}
        row |= _with_ends("final", statistics.bootstrap(final[:, number]))
        if number != control:
            row |= _with_ends("difference", statistics.paired_difference(final[:, number], final[:, control]))
            row["worse in"] = int((final[:, number] < final[:, control]).sum())
        row["clipped since the onset"] = float(clipped[:, number, int(condition.onset) :].mean())
        rows.append(row)
    return rows


def _with_ends(name: str, estimate: statistics.Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name} low": estimate.low, f"{name} high": estimate.high}


def margins(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind of old log-probability and perturbation: the weakest magnitude at which half of the seeds
    collapse or more, and the one tried before it; NaN where no magnitude tried does that.

    Of bits fewer are stronger. `cost from` is the weakest magnitude from which on each costs success: its interval, and
    those of all stronger ones, lie below zero.
    """
    rows = []
    for (name, kind), of in table[table.perturbation.isin(TITLES)].groupby(
        ["old log-probability", "perturbation"], sort=False
    ):
        of = of.sort_values("magnitude", ascending=kind not in WEAK_IS_LARGE)
        magnitudes = of.magnitude.to_numpy()
        half = (of.collapsed * 2 >= of.seeds).to_numpy()
        costs = np.logical_and.accumulate((of["difference high"] < 0).to_numpy()[::-1])[::-1]
        first = int(half.argmax()) if half.any() else None
        row = {"old log-probability": name, "perturbation": kind, "tried": " ".join(f"{m:g}" for m in magnitudes)}
        row["collapsed"] = " ".join(f"{c}/{n}" for c, n in zip(of.collapsed, of.seeds, strict=True))
        row["half collapse at"] = magnitudes[first] if first is not None else np.nan
        row["fewer at"] = magnitudes[first - 1] if first else np.nan
        row["monotone from there"] = bool(half[first:].all()) if first is not None else False
        row["cost from"] = magnitudes[costs.argmax()] if costs.any() else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Two panels for each perturbation, success and collapses; a line for each kind of old log-probability."""
    names = list(table["old log-probability"].unique())
    scale = alt.Scale(domain=names, range=[style.RAMP[0], style.RAMP[2], style.RAMP[4]][: len(names)])
    look = {
        "difference": (("difference low", "difference high"), "final success less the control's", (-1, 0.3), ".1f"),
        "share": (None, "share of seeds that collapse", (0, 1), ".0%"),
    }
    rows = []
    for figure, (ends, words, domain, form) in look.items():
        panels = []
        for kind, (title, axis) in TITLES.items():
            frame = table[table.perturbation == kind]
            columns = ["old log-probability", "magnitude", figure, *(ends or (figure, figure))]
            frame = pd.DataFrame({new: frame[old] for new, old in zip(SHORT, columns, strict=True)})
            panels.append(_panel(frame, kind, title, axis, alt.Scale(domain=domain, nice=False), words, form, scale))
        rows.append(alt.hconcat(*panels))
    save(alt.vconcat(*rows).resolve_scale(color="shared"), path)


SHORT = ("old", "magnitude", "value", "low", "high")


def _panel(
    frame: pd.DataFrame, kind: str, title: str, axis: str, domain: alt.Scale, words: str, form: str, scale: alt.Scale
) -> alt.LayerChart:
    """Of a frame with the columns SHORT, lines a little apart, so that their intervals do not hide each other."""
    names = list(frame.old.unique())
    values = sorted(frame.magnitude.unique())
    shift = frame.old.map({name: i - (len(names) - 1) / 2 for i, name in enumerate(names)}) * 0.05
    shifted = frame.magnitude + shift if axis == "linear" else frame.magnitude * np.exp(shift)
    base = alt.Chart(frame.assign(magnitude=shifted))
    x = alt.X(
        "magnitude:Q",
        title=title,
        scale=alt.Scale(type=axis, zero=False, nice=False, padding=12, reverse=kind in WEAK_IS_LARGE),
        axis=alt.Axis(values=values, format="~g", labelOverlap=False),
    )
    y = alt.Y("value:Q", title=words, scale=domain, axis=alt.Axis(format=form))
    color = alt.Color("old:N", title="old log-probability", scale=scale)
    bars = base.mark_rule(strokeWidth=1.2).encode(x=x, y=alt.Y("low:Q", scale=domain), y2="high:Q", color=color)
    lines = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color)
    points = base.mark_point(filled=True, size=45, opacity=1).encode(x=x, y=y, color=color)
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y="y:Q")
    return alt.layer(zero, bars, lines, points).properties(title=kind, width=240, height=180)


def main() -> None:
    """Tells and draws."""
    out, named = asked(__doc__, "of runs; those of a name are one run and its forks")
    table = pd.DataFrame(
        [row for name, folders in named.items() for folder in folders for row in rows_of(name, folder)]
    )
    if (earlier := out / "earlier.csv").is_file():  # rows of runs that are not kept, in the columns of mismatch.csv
        table = pd.concat([table, pd.read_csv(earlier)])
    table = table.drop_duplicates(["old log-probability", "perturbation", "magnitude"])  # a fork has its own control
    table.to_csv(out / "mismatch.csv", index=False, float_format="%.4g")
    reached = margins(table)
    reached.to_csv(out / "margins.csv", index=False)
    print(markdown(table.round(3)), markdown(reached), sep="\n\n")
    draw(table.assign(share=table.collapsed / table.seeds), out / "mismatch.png")


if __name__ == "__main__":
    main()
