"""What a late, noisy or coarse sampler costs, by the kind of old log-probability the ratios are relative to.

    python experiments/dialogues/mismatch/tell.py OUT recomputed=runs/a sampled=runs/b "recomputed, TIS"=runs/c

Of every condition: how many seeds collapse, success over the last LAST steps and what it has less than the same seed's
control, with the interval over seeds, and the share of tokens that are clipped since the onset. Writes `mismatch.csv`
and draws `mismatch.png`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[2] / "findings"))

from basics import asked, markdown, save

from jaxaudit import statistics
from jaxaudit.report import style
from jaxaudit.stored import CONTROL, load

LAST = 10
"""Steps whose mean success is the final one."""

TITLES = {
    "stale_policy": ("lag of the sampler, iterations", "linear"),
    "sampler_noise": ("noise on the sampler's logits, std", "log"),
    "sampler_quantize": ("bits of the sampler's parameters", "linear"),
}


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


def draw(table: pd.DataFrame, path: Path) -> None:
    """A panel for each perturbation, a line for each kind of old log-probability."""
    names = list(table["old log-probability"].unique())
    scale = alt.Scale(domain=names, range=[style.RAMP[0], style.RAMP[2], style.RAMP[4]][: len(names)])
    panels = []
    for kind, (title, axis) in TITLES.items():
        frame = table[table.perturbation == kind]
        frame = frame[["old log-probability", "magnitude", "difference", "difference low", "difference high"]].copy()
        frame.columns = ["old", "magnitude", "value", "low", "high"]
        spread = 0.12 if axis == "linear" else 0.05
        shift = frame.old.map({name: i - (len(names) - 1) / 2 for i, name in enumerate(names)}) * spread
        frame["magnitude"] = frame.magnitude + shift if axis == "linear" else frame.magnitude * np.exp(shift)
        values = sorted(table[table.perturbation == kind].magnitude.unique())
        x = alt.X(
            "magnitude:Q",
            title=title,
            scale=alt.Scale(type=axis, zero=False, nice=False, padding=12, reverse=kind == "sampler_quantize"),
            axis=alt.Axis(values=values, format="~g", labelOverlap=False),
        )
        color = alt.Color("old:N", title="old log-probability", scale=scale)
        base = alt.Chart(frame)
        domain = alt.Scale(domain=[-1, 0.3])
        bars = base.mark_rule(strokeWidth=1.2).encode(
            x=x, y=alt.Y("low:Q", title="final success less the control's", scale=domain), y2="high:Q", color=color
        )
        lines = base.mark_line(strokeWidth=1.5).encode(x=x, y="value:Q", color=color)
        points = base.mark_point(filled=True, size=45, opacity=1).encode(x=x, y="value:Q", color=color)
        zero = alt.Chart(pd.DataFrame({"y": [0]})).mark_rule(color=style.GREY, strokeDash=[3, 3]).encode(y="y:Q")
        panels.append(alt.layer(zero, bars, lines, points).properties(title=kind, width=240, height=200))
    save(alt.hconcat(*panels).resolve_scale(color="shared"), path)


def main() -> None:
    """Tells and draws."""
    out, named = asked(__doc__, "of a run")
    table = pd.DataFrame([row for name, (folder, *_) in named.items() for row in rows_of(name, folder)])
    table.to_csv(out / "mismatch.csv", index=False, float_format="%.4g")
    print(markdown(table.round(3)))
    draw(table, out / "mismatch.png")


if __name__ == "__main__":
    main()
