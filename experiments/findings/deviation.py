"""Fig. S3 and Table 1: how far the meta-state moves, by outcome, disturbance and size of the model.

    python experiments/findings/deviation.py runs OUT PPO=runs/ppo-clean PPO=runs/ppo-disturbed ...
    python experiments/findings/deviation.py scale OUT    # trains GPT-2 at three widths, and a monitor for each

MSD is Table S5's, `raw`, and `corrected`: less the drift of the same seed's control lane, whitened by the clean runs'
covariance. A model is fitted to clean lanes of seeds that have no disturbed ones. MSD is taken over the whole run from
the onset, and as the paper does over the WINDOW steps before the collapse; a lane that does not collapse has for that
the run's last ones (the paper's choice), or those of the lanes that do. A collapse at its onset has no step between.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from basics import markdown, over_seeds, pairs, said, save
from small import small_gpt2

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.run_reader import load
from jaxaudit.analysis.statistics import median, whitening
from jaxaudit.cli.main import prepare_jax
from jaxaudit.monitoring.labelled_lanes import load_lanes
from jaxaudit.monitoring.meta_state import Training
from jaxaudit.monitoring.monitor import Expectation
from jaxaudit.monitoring.state_space import LRU
from jaxaudit.monitoring.telemetry import SHRINKAGE, stack_channels
from jaxaudit.report import style

WINDOW = 20
"""Steps before the collapse."""

FITTED = 80
"""The most clean lanes that a model is fitted to."""

MEASURES = ("raw", "corrected")
PAPER = {
    "lr_spike": (-1.0, 3.22, 5.01),
    "weight_noise": (-1.0, 3.60, 6.98),
    "gradient_sign_flip": (113.0, 8.35, 219.30),
}
"""Table 1: RT, MSD and SIP."""

SIZES = {"w24": 24, "w48": 48, "nano": 96}
SCALE_SEEDS, SCALE_STEPS = 20, 60


@dataclass(frozen=True)
class Moved:
    """Disturbed lanes, and how far the meta-state of each is from where its window opened.

    Attributes:
      table: a row for each lane: seed, condition, perturbation, onset, collapse_time.
      distance: by measure, `[lanes, T]`, zero before the onset.
    """

    table: pd.DataFrame
    distance: dict[str, np.ndarray]


def distances(latent: np.ndarray, control: np.ndarray, onset: int, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """By measure, the distance at each step from the onset on of a lane's latents `[T, m]`, `[T]`; zero before.

    h_{t_s} is the latent that the window opens on: by h_{t+1} = f(h_t, y_t) it has seen the steps before t_s.
    """
    drift = latent - latent[onset - 1]
    whitened = (drift - (control - control[onset - 1])) @ matrix
    since = np.arange(len(latent)) >= onset
    return {
        name: np.where(since, np.linalg.norm(moved, axis=1), 0.0)
        for name, moved in zip(MEASURES, (drift, whitened), strict=True)
    }


def moved(values: np.ndarray, channels: Sequence[str], table: pd.DataFrame) -> Moved:
    """Of the disturbed lanes of telemetry `[lanes, T, d]`; rows say seed, clean, condition, onset, collapse_time."""
    known_seeds = table.seed[~table.clean].unique()
    clean = {int(seed): number for number, seed in table.seed[table.clean].items()}
    fit = [number for seed, number in clean.items() if seed not in known_seeds][:FITTED]
    if len(fit) < 2:
        raise SystemExit("a model is fitted to clean lanes of two seeds or more that have no disturbed ones")
    known = Expectation.fit(values[fit], channels, LRU(), Training())
    latents = known.scores_and_latents(known.channels.select_columns(values, channels))[1].astype(np.float64)
    matrix = whitening(latents[fit], SHRINKAGE)
    rows = table[~table.clean]
    each = [
        distances(latents[number], latents[clean[int(row.seed)]], int(row.onset), matrix)
        for number, row in zip(rows.index, rows.itertuples(), strict=True)
    ]
    return Moved(rows.reset_index(drop=True), {name: np.array([one[name] for one in each]) for name in MEASURES})


def windows(table: pd.DataFrame, steps: int) -> list[slice]:
    """Of every lane that collapsed after its onset, the steps since the onset of the WINDOW before the collapse."""
    late = table[np.isfinite(table.collapse_time) & (table.collapse_time > table.onset)]
    return [slice(max(int(o), int(t) - WINDOW), int(t)) for o, t in zip(late.onset, late.collapse_time, strict=True)]


def largest(found: Moved, measure: str) -> dict[str, np.ndarray]:
    """The MSD of each lane, by which steps it is taken over; NaN where there are none of them."""
    series_of, table = found.distance[measure], found.table
    steps = series_of.shape[1]
    before = np.full(len(table), np.nan)
    late = np.isfinite(table.collapse_time) & (table.collapse_time > table.onset)
    chosen = windows(table, steps)
    before[late] = [series_of[i, window].max() for i, window in zip(np.flatnonzero(late), chosen, strict=True)]
    spared = np.isinf(table.collapse_time).to_numpy()
    same = np.array([[row[window].max() for window in chosen] for row in series_of[spared]]).reshape(spared.sum(), -1)
    at_same, at_end = before.copy(), before.copy()
    at_same[spared] = same.mean(axis=1) if len(chosen) else np.nan
    at_end[spared] = series_of[spared, -WINDOW:].max(axis=1)
    return {"whole": series_of.max(axis=1), "before collapse, or the end": at_end, "before collapse, or same": at_same}


def by_outcome(found: Moved, name: str) -> pd.DataFrame:
    """A row for each measure and choice of steps: medians of lanes that collapse and that do not, and their ratio."""
    rows = []
    collapsed = np.isfinite(found.table.collapse_time).to_numpy()
    seeds = list(found.table.seed.unique())
    of = found.table.seed.map({seed: i for i, seed in enumerate(seeds)}).to_numpy()
    for measure in MEASURES:
        for over, values in largest(found, measure).items():
            there = np.isfinite(values)

            def ratio(counts, values=values, there=there):
                taken = [np.repeat(values[k], counts[of[k]]) for k in (there & collapsed, there & ~collapsed)]
                return np.median(taken[0]) / np.median(taken[1]) if len(taken[0]) and len(taken[1]) else np.nan

            def above(counts, values=values, there=there):
                hit, spared = there & collapsed, there & ~collapsed
                weight = counts[of[hit]][:, None] * counts[of[spared]]
                greater = np.sign(values[hit][:, None] - values[spared]) / 2 + 0.5
                return (weight * greater).sum() / weight.sum() if weight.sum() else np.nan

            rows.append(
                {
                    "learner": name,
                    "measure": measure,
                    "steps": over,
                    "collapsed": f"{(there & collapsed).sum()} of {collapsed.sum()}",
                    "median": np.median(values[there & collapsed]) if (there & collapsed).any() else np.nan,
                    "not collapsed": int((there & ~collapsed).sum()),
                    "median ": np.median(values[there & ~collapsed]) if (there & ~collapsed).any() else np.nan,
                    "ratio": said(over_seeds(ratio, seeds)),
                    "AUROC": said(over_seeds(above, seeds)),
                }
            )
    return pd.DataFrame(rows)


def by_condition(found: Moved, metrics: pd.DataFrame, name: str) -> pd.DataFrame:
    """Table 1: medians over seeds of RT, MSD over the whole run and SIP by condition, and the paper's beside them."""
    rows = []
    lanes = found.table.merge(metrics[["seed", "condition", "duration", "recovery_time", "spike_intensity"]], "left")
    for (condition, duration), group in lanes.groupby(["condition", "duration"], sort=False):
        paper = PAPER.get(group.perturbation.iloc[0], (np.nan,) * 3)
        row = {
            "learner": name,
            "condition": condition,
            "steps": f"{duration:g}",
            "collapsed": f"{np.isfinite(group.collapse_time).sum()}/{len(group)}",
        }
        row["RT"] = said(median(group.recovery_time, missing="count"), ".0f")
        for measure in MEASURES:
            row[f"MSD, {measure}"] = said(median(found.distance[measure][group.index].max(axis=1)), ".3g")
        row["SIP"] = said(median(group.spike_intensity, missing="count"), ".3g")
        rows.append(row | {"paper's RT": paper[0], "its MSD": paper[1], "its SIP": paper[2]})
    return pd.DataFrame(rows)


def drawn(tables: dict[str, pd.DataFrame], path: Path) -> None:
    """The corrected MSD of every lane over the whole run, by condition and outcome: a panel a learner."""
    panels = []
    for name, table in tables.items():
        points = (
            alt.Chart(table)
            .mark_tick(thickness=1.5, size=11, opacity=0.7)
            .encode(
                x=alt.X("msd:Q", title="MSD, corrected", scale=alt.Scale(type="log", nice=False, padding=8)),
                y=alt.Y("condition:N", sort=list(table.condition.unique()), title=None),
                color=alt.Color(
                    "outcome:N",
                    title=None,
                    scale=alt.Scale(domain=["collapse", "none"], range=[style.RAMP[2], style.GREY]),
                ),
            )
        )
        panels.append(points.properties(title=name, width=280, height=18 * table.condition.nunique()))
    save(alt.concat(*panels, columns=2).resolve_scale(y="independent", x="independent"), path)


def points(found: Moved) -> pd.DataFrame:
    """What `drawn` draws."""
    collapsed = np.isfinite(found.table.collapse_time)
    largest_of = np.maximum(found.distance["corrected"].max(axis=1), 1e-3)
    return found.table.assign(msd=largest_of, outcome=np.where(collapsed, "collapse", "none"))


def of_runs(given: Sequence[str], out: Path) -> None:
    """Tables and the figure of stored runs."""
    outcomes, conditions, panels = [], [], {}
    for name, folders in pairs(given).items():
        found_lanes = load_lanes(folders)
        if len(found_lanes) > 1:
            raise SystemExit(f"the runs of {name} are of {len(found_lanes)} learners; name each")
        lanes = found_lanes[0]
        found = moved(lanes.values, lanes.channels, lanes.table)
        metrics = pd.concat([load(folder).metrics for folder in folders], ignore_index=True)
        outcomes.append(by_outcome(found, name))
        conditions.append(by_condition(found, metrics, name))
        panels[name] = points(found)
    for file, tables in (("outcomes", outcomes), ("table1", conditions)):
        table = pd.concat(tables)
        table.to_csv(out / f"{file}.csv", index=False, float_format="%.4g")
        print(markdown(table), end="\n\n")
    drawn(panels, out / "deviation.png")


def of_size(size: str) -> Moved:
    """GPT-2 of a size trained on SCALE_SEEDS seeds, disturbed half-way; half of the seeds only undisturbed."""
    half = SCALE_STEPS // 2
    grid = [
        ja.lr_spike(30.0, onset=half, duration=10),
        ja.weight_noise(0.1, onset=half),
        ja.gradient_sign_flip(0.5, onset=half, duration="end"),
    ]
    result = ja.audit(
        small_gpt2(size, accumulation=2),
        grid,
        seeds=SCALE_SEEDS,
        steps=SCALE_STEPS,
        settings=MetricSettings(window=15, hold=20),
        execution="map",
    )
    telemetry = stack_channels(result.telemetry).transpose("seed", "condition", "step", "channel")
    conditions = result.telemetry
    rows = [
        {
            "seed": int(seed),
            "clean": column == 0,
            "condition": str(conditions.condition.values[column]),
            "perturbation": str(conditions.perturbation.values[column]),
            "onset": half,
            "collapse_time": float(result.metrics.collapse_time.values[number, column]),
        }
        for number, seed in enumerate(telemetry.seed.values)
        for column in range(telemetry.sizes["condition"])
    ]
    table = pd.DataFrame(rows)
    kept = (table.clean | (table.seed >= SCALE_SEEDS // 2)).to_numpy()
    values = telemetry.values.reshape(-1, *telemetry.shape[2:])[kept]
    return moved(values, [str(c) for c in telemetry.channel.values], table[kept].reset_index(drop=True))


def of_sizes(out: Path) -> None:
    """Trains what is not in the file yet, a size at a time; the table and the figure by size."""
    file = out / "scale_lanes.csv"
    for size in SIZES:
        known = pd.read_csv(file) if file.exists() else pd.DataFrame({"size": []})
        if size not in set(known["size"]):
            found = of_size(size)
            msd = {measure: found.distance[measure].max(axis=1) for measure in MEASURES}
            pd.concat([known, found.table.assign(size=size, **msd)]).to_csv(file, index=False, float_format="%.5g")
            print(f"{size} is trained")
    lanes = pd.read_csv(file)
    rows = []
    for (size, condition), group in lanes.groupby(["size", "condition"], sort=False):
        row = {"width": SIZES[size], "condition": condition}
        row["collapsed"] = f"{np.isfinite(group.collapse_time).sum()}/{len(group)}"
        for measure in MEASURES:
            found = median(group[measure])
            row |= {f"MSD, {measure}": found.value, f"{measure} low": found.low, f"{measure} high": found.high}
        rows.append(row)
    table = pd.DataFrame(rows)
    table.to_csv(out / "scale.csv", index=False, float_format="%.4g")
    print(markdown(table))
    base = alt.Chart(table.rename(columns={"MSD, corrected": "msd", "corrected low": "low", "corrected high": "high"}))
    color = alt.Color("condition:N", title=None, scale=alt.Scale(range=style.ramp(table.condition.nunique())))
    x = alt.X("width:Q", title="width of GPT-2", scale=alt.Scale(type="log", nice=False, padding=20))
    y = alt.Y("msd:Q", title="MSD, corrected", scale=alt.Scale(type="log"))
    chart = base.mark_line(point=True).encode(x=x, y=y, color=color) + base.mark_rule().encode(
        x=x, y="low:Q", y2="high:Q", color=color
    )
    save(chart.properties(width=280, height=200), out / "scale.png")


def main() -> None:
    """Of stored runs, or of sizes."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=("runs", "scale"))
    options.add_argument("out", type=Path)
    options.add_argument("runs", nargs="*", help="NAME=FOLDER, a name's runs together")
    chosen = options.parse_args()
    prepare_jax()
    chosen.out.mkdir(parents=True, exist_ok=True)
    if chosen.what == "runs":
        of_runs(chosen.runs, chosen.out)
    else:
        of_sizes(chosen.out)


if __name__ == "__main__":
    main()
