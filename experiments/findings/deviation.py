"""Fig. S3 and Table 1: the deviation of the meta-state by outcome, disturbance and model size.

    python experiments/findings/deviation.py runs OUT PPO=runs/ppo-clean PPO=runs/ppo-disturbed ...
    python experiments/findings/deviation.py scale OUT    # trains GPT-2 at three widths, and a monitor for each

MSD is that of Table S5 (`raw`), or `corrected`: without the drift of the same seed's control lane, and whitened by the
covariance of clean runs. A model is fitted to clean lanes of seeds without disturbed lanes. MSD is taken over the whole
run from the onset on, and, as in the paper, over the WINDOW steps before the collapse. For lanes that do not collapse,
these are the last steps of the run (the paper's choice), or the windows of the lanes that do. A collapse at its onset
has no such step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
from basics import folders_by_name, format_estimate, markdown, over_seeds, save
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
"""The number of steps before the collapse."""

FITTED = 80
"""The maximal number of clean lanes that a model is fitted to."""

MEASURES = ("raw", "corrected")
PAPER = {
    "lr_spike": (-1.0, 3.22, 5.01),
    "weight_noise": (-1.0, 3.60, 6.98),
    "gradient_sign_flip": (113.0, 8.35, 219.30),
}
"""RT, MSD and SIP in Table 1."""

SIZES = {"w24": 24, "w48": 48, "nano": 96}
SCALE_SEEDS, SCALE_STEPS = 20, 60


@dataclass(frozen=True)
class Displacement:
    """Disturbed lanes, and the distance of each one's meta-state from that at its onset.

    Attributes:
      table: a row for each lane, with seed, condition, perturbation, onset and collapse_time.
      distance: by measure, `[lanes, T]`, zero before the onset.
    """

    table: pd.DataFrame
    distance: dict[str, np.ndarray]


def distances(latent: np.ndarray, control: np.ndarray, onset: int, matrix: np.ndarray) -> dict[str, np.ndarray]:
    """Returns by measure the distance `[T]` of a lane's latents `[T, m]` at each step, which is zero before the onset.

    The reference is the latent h_{t_s} at the onset, which by h_{t+1} = f(h_t, y_t) depends on the steps before t_s.
    """
    drift = latent - latent[onset - 1]
    whitened = (drift - (control - control[onset - 1])) @ matrix
    since = np.arange(len(latent)) >= onset
    return {
        name: np.where(since, np.linalg.norm(movement, axis=1), 0.0)
        for name, movement in zip(MEASURES, (drift, whitened), strict=True)
    }


def measure_displacement(values: np.ndarray, channels: Sequence[str], table: pd.DataFrame) -> Displacement:
    """Computes the displacement of the disturbed lanes of telemetry `[lanes, T, d]`, which `table` describes."""
    disturbed_seeds = table.seed[~table.clean].unique()
    clean = {int(seed): number for number, seed in table.seed[table.clean].items()}
    fitted = [number for seed, number in clean.items() if seed not in disturbed_seeds][:FITTED]
    if len(fitted) < 2:
        raise SystemExit("fitting a model needs clean lanes of at least two seeds without disturbed lanes")
    expectation = Expectation.fit(values[fitted], channels, LRU(), Training())
    latents = expectation.scores_and_latents(expectation.channels.select_columns(values, channels))[1].astype(
        np.float64
    )
    matrix = whitening(latents[fitted], SHRINKAGE)
    rows = table[~table.clean]
    distances_of_lanes = [
        distances(latents[number], latents[clean[int(row.seed)]], int(row.onset), matrix)
        for number, row in zip(rows.index, rows.itertuples(), strict=True)
    ]
    return Displacement(
        rows.reset_index(drop=True),
        {name: np.array([distances_of_lane[name] for distances_of_lane in distances_of_lanes]) for name in MEASURES},
    )


def windows(table: pd.DataFrame, steps: int) -> list[slice]:
    """Returns the WINDOW steps before the collapse, from the onset on, of every lane that collapsed after its onset."""
    after_onset = table[np.isfinite(table.collapse_time) & (table.collapse_time > table.onset)]
    return [
        slice(max(int(onset), int(collapse) - WINDOW), int(collapse))
        for onset, collapse in zip(after_onset.onset, after_onset.collapse_time, strict=True)
    ]


def largest(displacement: Displacement, measure: str) -> dict[str, np.ndarray]:
    """Returns the MSD of each lane by the range of steps, or NaN if the range is empty."""
    series_of, table = displacement.distance[measure], displacement.table
    steps = series_of.shape[1]
    before = np.full(len(table), np.nan)
    after_onset = np.isfinite(table.collapse_time) & (table.collapse_time > table.onset)
    selected = windows(table, steps)
    before[after_onset] = [
        series_of[i, window].max() for i, window in zip(np.flatnonzero(after_onset), selected, strict=True)
    ]
    spared = np.isinf(table.collapse_time).to_numpy()
    in_same_windows = np.array([[row[window].max() for window in selected] for row in series_of[spared]]).reshape(
        spared.sum(), -1
    )
    at_same, at_end = before.copy(), before.copy()
    at_same[spared] = in_same_windows.mean(axis=1) if len(selected) else np.nan
    at_end[spared] = series_of[spared, -WINDOW:].max(axis=1)
    return {"whole": series_of.max(axis=1), "before collapse, or the end": at_end, "before collapse, or same": at_same}


def by_outcome(displacement: Displacement, name: str) -> pd.DataFrame:
    """Returns a row for each measure and range of steps: medians of lanes that collapse or not, and their ratio."""
    rows = []
    collapsed = np.isfinite(displacement.table.collapse_time).to_numpy()
    seeds = list(displacement.table.seed.unique())
    seed_index = displacement.table.seed.map({seed: i for i, seed in enumerate(seeds)}).to_numpy()
    for measure in MEASURES:
        for range_name, values in largest(displacement, measure).items():
            defined = np.isfinite(values)

            def ratio(counts, values=values, defined=defined):
                resampled = [
                    np.repeat(values[k], counts[seed_index[k]]) for k in (defined & collapsed, defined & ~collapsed)
                ]
                return (
                    np.median(resampled[0]) / np.median(resampled[1])
                    if len(resampled[0]) and len(resampled[1])
                    else np.nan
                )

            def above(counts, values=values, defined=defined):
                collapsed_mask, surviving_mask = defined & collapsed, defined & ~collapsed
                weight = counts[seed_index[collapsed_mask]][:, None] * counts[seed_index[surviving_mask]]
                greater = np.sign(values[collapsed_mask][:, None] - values[surviving_mask]) / 2 + 0.5
                return (weight * greater).sum() / weight.sum() if weight.sum() else np.nan

            rows.append(
                {
                    "learner": name,
                    "measure": measure,
                    "steps": range_name,
                    "collapsed": f"{(defined & collapsed).sum()} of {collapsed.sum()}",
                    "median": np.median(values[defined & collapsed]) if (defined & collapsed).any() else np.nan,
                    "not collapsed": int((defined & ~collapsed).sum()),
                    "median ": np.median(values[defined & ~collapsed]) if (defined & ~collapsed).any() else np.nan,
                    "ratio": format_estimate(over_seeds(ratio, seeds)),
                    "AUROC": format_estimate(over_seeds(above, seeds)),
                }
            )
    return pd.DataFrame(rows)


def by_condition(displacement: Displacement, metrics: pd.DataFrame, name: str) -> pd.DataFrame:
    """Returns medians over seeds of RT, MSD over the whole run and SIP by condition, with the values of Table 1."""
    rows = []
    lanes = displacement.table.merge(
        metrics[["seed", "condition", "duration", "recovery_time", "spike_intensity"]], "left"
    )
    for (condition, duration), group in lanes.groupby(["condition", "duration"], sort=False):
        paper = PAPER.get(group.perturbation.iloc[0], (np.nan,) * 3)
        row = {
            "learner": name,
            "condition": condition,
            "steps": f"{duration:g}",
            "collapsed": f"{np.isfinite(group.collapse_time).sum()}/{len(group)}",
        }
        row["RT"] = format_estimate(median(group.recovery_time, missing="count"), ".0f")
        for measure in MEASURES:
            row[f"MSD, {measure}"] = format_estimate(
                median(displacement.distance[measure][group.index].max(axis=1)), ".3g"
            )
        row["SIP"] = format_estimate(median(group.spike_intensity, missing="count"), ".3g")
        rows.append(row | {"paper's RT": paper[0], "its MSD": paper[1], "its SIP": paper[2]})
    return pd.DataFrame(rows)


def draw(tables: dict[str, pd.DataFrame], path: Path) -> None:
    """Draws the corrected MSD of every lane over the whole run, by condition and outcome, with a panel per learner."""
    panels = []
    for name, table in tables.items():
        ticks = (
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
        panels.append(ticks.properties(title=name, width=280, height=18 * table.condition.nunique()))
    save(alt.concat(*panels, columns=2).resolve_scale(y="independent", x="independent"), path)


def figure_table(displacement: Displacement) -> pd.DataFrame:
    """Returns the table that `draw` draws."""
    collapsed = np.isfinite(displacement.table.collapse_time)
    largest_of = np.maximum(displacement.distance["corrected"].max(axis=1), 1e-3)
    return displacement.table.assign(msd=largest_of, outcome=np.where(collapsed, "collapse", "none"))


def report_runs(arguments_: Sequence[str], out: Path) -> None:
    """Writes tables and the figure of stored runs."""
    outcomes, conditions, panels = [], [], {}
    for name, folders in folders_by_name(arguments_).items():
        labelled = load_lanes(folders)
        if len(labelled) > 1:
            raise SystemExit(f"the runs of {name} are of {len(labelled)} learners; name each")
        lanes = labelled[0]
        displacement = measure_displacement(lanes.values, lanes.channels, lanes.table)
        metrics = pd.concat([load(folder).metrics for folder in folders], ignore_index=True)
        outcomes.append(by_outcome(displacement, name))
        conditions.append(by_condition(displacement, metrics, name))
        panels[name] = figure_table(displacement)
    for file, tables in (("outcomes", outcomes), ("table1", conditions)):
        table = pd.concat(tables)
        table.to_csv(out / f"{file}.csv", index=False, float_format="%.4g")
        print(markdown(table), end="\n\n")
    draw(panels, out / "deviation.png")


def train_size(size: str) -> Displacement:
    """Trains GPT-2 of a size on SCALE_SEEDS seeds, disturbed half-way; half of the seeds are only undisturbed."""
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
    return measure_displacement(values, [str(c) for c in telemetry.channel.values], table[kept].reset_index(drop=True))


def report_sizes(out: Path) -> None:
    """Trains the sizes that the file lacks, and writes the table and the figure by size."""
    file = out / "scale_lanes.csv"
    for size in SIZES:
        stored = pd.read_csv(file) if file.exists() else pd.DataFrame({"size": []})
        if size not in set(stored["size"]):
            estimate = train_size(size)
            msd = {measure: estimate.distance[measure].max(axis=1) for measure in MEASURES}
            pd.concat([stored, estimate.table.assign(size=size, **msd)]).to_csv(file, index=False, float_format="%.5g")
            print(f"{size} is trained")
    lanes = pd.read_csv(file)
    rows = []
    for (size, condition), group in lanes.groupby(["size", "condition"], sort=False):
        row = {"width": SIZES[size], "condition": condition}
        row["collapsed"] = f"{np.isfinite(group.collapse_time).sum()}/{len(group)}"
        for measure in MEASURES:
            estimate = median(group[measure])
            row |= {f"MSD, {measure}": estimate.value, f"{measure} low": estimate.low, f"{measure} high": estimate.high}
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
    """Runs the chosen part."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=("runs", "scale"))
    options.add_argument("out", type=Path)
    options.add_argument("runs", nargs="*", help="NAME=FOLDER; runs of a name belong together")
    arguments = options.parse_args()
    prepare_jax()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.what == "runs":
        report_runs(arguments.runs, arguments.out)
    else:
        report_sizes(arguments.out)


if __name__ == "__main__":
    main()
