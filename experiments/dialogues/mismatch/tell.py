"""The cost of a stale, noisy or quantized sampler, by the kind of old log-probability in the ratios.

    python experiments/dialogues/mismatch/tell.py OUT recomputed=runs/a sampled=runs/b "recomputed, TIS"=runs/c

For every condition, `mismatch.csv` has the number of seeds that collapse, success over the last LAST steps and its
difference to the control of the same seed, with intervals over seeds, and the share of tokens that are clipped after
the onset. `margins.csv` has the magnitudes between which half of the seeds begin to collapse. `mismatch.png` is the
figure.
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

from basics import markdown, parse_arguments, save

from jaxaudit.analysis import statistics
from jaxaudit.analysis.run_reader import CONTROL, load
from jaxaudit.report import style

LAST = 10
"""The number of last steps over which final success is averaged."""

TITLES = {
    "stale_policy": ("lag of the sampler, iterations", "log"),
    "sampler_noise": ("noise on the sampler's logits, std", "log"),
    "sampler_quantize": ("bits of the sampler's parameters", "linear"),
}

WEAK_IS_LARGE = ("sampler_quantize",)


def rows_of(name: str, folder: Path) -> list[dict]:
    """Returns a row for each condition of a run."""
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
    """Returns a row for each kind of old log-probability and perturbation.

    It has the weakest magnitude at which at least half of the seeds collapse, and the next weaker one, or NaN. Fewer
    bits are stronger. `cost from` is the weakest magnitude whose interval, with those of all stronger ones, is below
    zero.
    """
    rows = []
    for (name, kind), group in table[table.perturbation.isin(TITLES)].groupby(
        ["old log-probability", "perturbation"], sort=False
    ):
        group = group.sort_values("magnitude", ascending=kind not in WEAK_IS_LARGE)
        magnitudes = group.magnitude.to_numpy()
        half = (group.collapsed * 2 >= group.seeds).to_numpy()
        costs = np.logical_and.accumulate((group["difference high"] < 0).to_numpy()[::-1])[::-1]
        first = int(half.argmax()) if half.any() else None
        row = {"old log-probability": name, "perturbation": kind, "tried": " ".join(f"{m:g}" for m in magnitudes)}
        row["collapsed"] = " ".join(f"{c}/{n}" for c, n in zip(group.collapsed, group.seeds, strict=True))
        row["half collapse at"] = magnitudes[first] if first is not None else np.nan
        row["fewer at"] = magnitudes[first - 1] if first else np.nan
        row["monotone from there"] = bool(half[first:].all()) if first is not None else False
        row["cost from"] = magnitudes[costs.argmax()] if costs.any() else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def draw(table: pd.DataFrame, path: Path) -> None:
    """Draws two panels for each perturbation, success and collapses, with a line for each old log-probability."""
    names = list(table["old log-probability"].unique())
    scale = alt.Scale(domain=names, range=[style.RAMP[0], style.RAMP[2], style.RAMP[4]][: len(names)])
    panel_options = {
        "difference": (("difference low", "difference high"), "final success less the control's", (-1, 0.3), ".1f"),
        "share": (None, "share of seeds that collapse", (0, 1), ".0%"),
    }
    rows = []
    for figure, (ends, axis_title, domain, number_format) in panel_options.items():
        panels = []
        for kind, (title, axis) in TITLES.items():
            frame = table[table.perturbation == kind]
            columns = ["old log-probability", "magnitude", figure, *(ends or (figure, figure))]
            frame = pd.DataFrame({new: frame[old] for new, old in zip(SHORT, columns, strict=True)})
            panels.append(
                _panel(frame, kind, title, axis, alt.Scale(domain=domain, nice=False), axis_title, number_format, scale)
            )
        rows.append(alt.hconcat(*panels))
    save(alt.vconcat(*rows).resolve_scale(color="shared"), path)


SHORT = ("old", "magnitude", "value", "low", "high")


def _panel(
    frame: pd.DataFrame,
    kind: str,
    title: str,
    axis: str,
    domain: alt.Scale,
    axis_title: str,
    number_format: str,
    scale: alt.Scale,
) -> alt.LayerChart:
    """Draws lines of a frame with the columns SHORT, shifted so that their intervals do not overlap."""
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
    y = alt.Y("value:Q", title=axis_title, scale=domain, axis=alt.Axis(format=number_format))
    color = alt.Color("old:N", title="old log-probability", scale=scale)
    bars = base.mark_rule(strokeWidth=1.2).encode(x=x, y=alt.Y("low:Q", scale=domain), y2="high:Q", color=color)
    lines = base.mark_line(strokeWidth=1.5).encode(x=x, y=y, color=color)
    points = base.mark_point(filled=True, size=45, opacity=1).encode(x=x, y=y, color=color)
    zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y="y:Q")
    return alt.layer(zero, bars, lines, points).properties(title=kind, width=240, height=180)


def main() -> None:
    """Writes the tables and draws the figure."""
    out, folders_by_name = parse_arguments(__doc__, "folders of runs; those of a name are a run and its forks")
    table = pd.DataFrame(
        [row for name, folders in folders_by_name.items() for folder in folders for row in rows_of(name, folder)]
    )
    if (
        earlier := out / "earlier.csv"
    ).is_file():  # rows of runs that are no longer stored, in the columns of mismatch.csv
        table = pd.concat([table, pd.read_csv(earlier)])
    table = table.drop_duplicates(["old log-probability", "perturbation", "magnitude"])  # a fork has its own control
    table.to_csv(out / "mismatch.csv", index=False, float_format="%.4g")
    margin_table = margins(table)
    margin_table.to_csv(out / "margins.csv", index=False)
    print(markdown(table.round(3)), markdown(margin_table), sep="\n\n")
    draw(table.assign(share=table.collapsed / table.seeds), out / "mismatch.png")


if __name__ == "__main__":
    main()
