"""Is a state-space model worth its cost? The monitor with a model against charts of all channels without one.

    python experiments/detection/charts.py OUT             # trains what OUT lacks, compares, and writes charts.csv
    python experiments/detection/charts.py OUT --smoke     # a smoke run with a few other seeds

Nothing was tuned on the three learners: PPO on CartPole-v1, a small GPT-2 with contexts of 16, and stochastic gradient
descent on a quadratic. Channels, envelopes, whitening, folds and thresholds are the same for all.

The decision rule was fixed before: a state-space model is the monitor's default only if its AUROC beats that of the
best chart, with a paired interval above zero, on at least two learners; otherwise the chart with the highest mean AUROC
is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
import xarray as xr

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.cli.main import prepare_jax
from jaxaudit.models import gpt2
from jaxaudit.monitoring.comparison import DetectionSettings, best_chart, compare, summarise
from jaxaudit.monitoring.detector import CHARTS, MonitorDetector
from jaxaudit.monitoring.labelled_lanes import LabelledLanes
from jaxaudit.monitoring.state_space import LRU
from jaxaudit.monitoring.telemetry import stack_channels, varying_channels

FIRST = {"clean": 71_000, "disturbed": 72_000}
"""The first seeds, which no earlier experiment used."""

SMOKE = {"clean": 100, "disturbed": 200}
MODEL_DETECTOR = MonitorDetector(LRU())
DIMENSIONS = 8


@dataclass(frozen=True)
class Study:
    """A learner, and its training and disturbances.

    Attributes:
      learner: a function that returns the learner.
      perturbations: perturbations whose windows open at half of the run.
      steps: the length of a run.
      clean, disturbed: the numbers of seeds.
      execution: the execution of the audit.
    """

    learner: Callable[[], ja.Learner]
    perturbations: Sequence[object]
    steps: int
    clean: int = 80
    disturbed: int = 16
    execution: str = "vmap"


def quadratic() -> ja.Learner:
    """Momentum descent on |x|^2 / 2 in DIMENSIONS dimensions, with noisy gradients."""
    optimizer = ja.Optimizer(optax.trace(decay=0.5), 0.1, max_norm=100.0)

    def fresh(key):
        return {"x": jax.random.normal(key, (DIMENSIONS,))}

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        params, memory = optimizer.disturb(*state, taps, fresh)
        gradient = {"x": params["x"] + 0.3 * jax.random.normal(key, (DIMENSIONS,))}
        params, memory, update = optimizer.update(params, memory, gradient, taps)
        telemetry = {
            "performance": -0.5 * jnp.sum(params["x"] ** 2),
            "gradient_norm": update.gradient_norm,
            "update_norm": update.update_norm,
            "position": params["x"],
        }
        return (params, memory), telemetry

    return ja.Learner(
        init, step, name="quadratic", channels={"position": ja.Channel.vector("entry", range(DIMENSIONS))}
    )


def cartpole() -> ja.Learner:
    """PPO on CartPole-v1."""
    small = {"num_envs": 8, "rollout_length": 32, "minibatch_size": 64, "epochs": 4, "learning_rate": 1e-3}
    return ja.learners.ppo("CartPole-v1", evaluations=2, evaluation_episodes=2, **small)


def language() -> ja.Learner:
    """GPT-2 with two layers of width 48, trained on 128 tokens per step."""
    gpt2.SIZES["w48"] = gpt2.Size(48, 2, 2)
    return ja.learners.language_model(
        "python-stdlib",
        size="w48",
        context=16,
        batch_size=4,
        accumulation=2,
        learning_rate=3e-3,
        warmup=0.05,
        held_out=4,
        validation=8,
    )


OPTIMIZER = (ja.lr_spike(ja.sweep(10.0, 30.0), onset=0.5), ja.momentum_noise(0.1, onset=0.5))
FLIPS = ja.gradient_sign_flip(ja.sweep(0.1, 0.3), onset=0.5, duration="end")
STUDIES = {
    "PPO": Study(
        cartpole,
        (
            *OPTIMIZER,
            FLIPS,
            ja.weight_noise(0.1, onset=0.5),
            ja.observation_noise(0.03, onset=0.5, duration="end"),
            ja.reward_noise(0.5, onset=0.5, duration="end"),
        ),
        steps=120,
    ),
    "GPT-2": Study(
        language,
        (*OPTIMIZER, FLIPS, ja.weight_noise(0.01, onset=0.5), ja.token_corruption(0.05, onset=0.5, duration="end")),
        steps=100,
        clean=64,
        disturbed=10,
        execution="map",
    ),
    "quadratic": Study(
        quadratic,
        (*OPTIMIZER, FLIPS, ja.weight_noise(0.1, onset=0.5), ja.gradient_scale(0.5, onset=0.5, duration="end")),
        steps=160,
    ),
}


def main() -> None:
    """Trains, compares and writes the tables."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("out", type=Path, help="folder of the results")
    options.add_argument("--smoke", action="store_true", help="a smoke run with a few other seeds")
    arguments = options.parse_args()
    prepare_jax()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tables = []
    for name, study in STUDIES.items():
        lanes = trained(name, study, arguments.out, arguments.smoke)
        settings = DetectionSettings(folds=2, alpha=0.3, fitted=0.5) if arguments.smoke else DetectionSettings()
        tables.append(
            summarise(compare(lanes, [MODEL_DETECTOR, *CHARTS], settings), MODEL_DETECTOR.name).assign(learner=name)
        )
        print(
            f"{name}: {lanes.table.clean.sum()} clean, {(~lanes.table.clean).sum()} disturbed, d={len(lanes.channels)}"
        )
    comparison = pd.concat(tables)[["learner", *tables[0].columns.drop("learner")]]
    comparison.to_csv(arguments.out / "charts.csv", index=False, float_format="%.4g")
    if not arguments.smoke:
        print(markdown(comparison), decision(comparison), sep="\n\n")


def trained(name: str, study: Study, out: Path, smoke: bool, first: Mapping[str, int] = FIRST) -> LabelledLanes:
    """Returns the lanes of a study, read from `out` or trained; `first` has the first seeds."""
    parts = []
    for kind, perturbations in (("clean", ()), ("disturbed", study.perturbations)):
        count = {"clean": 10, "disturbed": 2} if smoke else {"clean": study.clean, "disturbed": study.disturbed}
        first_seed = (SMOKE if smoke else first)[kind]
        file = out / f"{name}-{kind}.nc"
        if not file.exists():
            seeds = range(first_seed, first_seed + count[kind])
            parts.append(telemetry := rows(study, perturbations, seeds, kind == "clean"))
            telemetry.to_netcdf(file)
        else:
            parts.append(xr.load_dataset(file))
    values = np.concatenate([part["values"].values for part in parts])
    table = pd.concat([part.drop_dims(["step", "channel"]).to_dataframe() for part in parts], ignore_index=True)
    names = [str(channel) for channel in parts[0].channel.values]
    varying = varying_channels(values[table.clean.to_numpy()])
    return LabelledLanes(name, tuple(np.array(names)[varying]), values[..., varying], table)


def rows(study: Study, perturbations: Sequence[object], seeds: range, clean: bool) -> xr.Dataset:
    """Returns telemetry `[lane, step, channel]` of an audit: of the controls if `clean`, else of the other lanes."""
    result = ja.audit(
        study.learner(),
        list(perturbations),
        seeds=seeds,
        steps=study.steps,
        execution=study.execution,
        settings=MetricSettings(window=20, hold=30),
    )
    columns_ = [0] if clean else range(1, result.telemetry.sizes["condition"])
    values = (
        stack_channels(result.telemetry)
        .transpose("seed", "condition", "step", "channel")
        .isel(condition=list(columns_))
    )
    kinds = result.telemetry.isel(condition=list(columns_))
    condition_count, lanes = len(kinds.condition), len(seeds) * len(kinds.condition)
    columns = {name: np.tile(kinds[name].values, len(seeds)) for name in ("condition", "perturbation", "magnitude")}
    table = columns | {
        "seed": np.repeat(np.array(seeds), condition_count),
        "clean": np.full(lanes, clean),
        "onset": np.full(lanes, study.steps // 2),
        "collapse_time": result.metrics.collapse_time.values[:, list(columns_)].ravel(),
    }
    data = {name: ("lane", column) for name, column in table.items()}
    flat = values.values.reshape(lanes, *values.shape[2:])
    return xr.Dataset(data | {"values": (("lane", "step", "channel"), flat)}, {"channel": values.channel.values})


def markdown(comparison: pd.DataFrame) -> str:
    """Formats a row for each detector and learner."""
    head = ("learner", "detector", "AUROC", "detected", "false alarms", "monitor's gain in AUROC", "in share detected")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in comparison.to_dict("records"):
        is_model = row["detector"] == MODEL_DETECTOR.name
        gains = ["", ""] if is_model else [interval(row, "gain_auroc"), interval(row, "gain_detected")]
        cells = [row["learner"], row["detector"], interval(row, "auroc"), interval(row, "detected")]
        lines.append("| " + " | ".join([*cells, f"{row['false_alarms']:.3f}", *gains]) + " |")
    return "\n".join(lines)


def interval(row: dict, name: str) -> str:
    """Formats a value and its interval."""
    return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"


def decision(comparison: pd.DataFrame) -> str:
    """Applies the decision rule, and returns the result as text."""
    wins, lines = 0, []
    for learner, of_learner in comparison.groupby("learner", sort=False):
        best = best_chart(of_learner.reset_index(drop=True), MODEL_DETECTOR.name)
        wins += best.gain_auroc_low > 0
        lines.append(f"{learner}: {MODEL_DETECTOR.name} minus {best.detector}: {interval(best, 'gain_auroc')}")
    charts = (
        comparison[comparison.detector != MODEL_DETECTOR.name]
        .groupby("detector")
        .auroc.mean()
        .sort_values(ascending=False)
    )
    default = MODEL_DETECTOR.name if wins >= 2 else charts.index[0]
    means = ", ".join(f"{name} {value:.4f}" for name, value in charts.items())
    return "\n".join([*lines, f"mean AUROC of charts: {means}", f"the default: {default}"])


if __name__ == "__main__":
    main()
