"""Is a state-space model worth it? The monitor that has one against charts of all channels, which have none.

    python experiments/detection/charts.py OUT             # trains what is not in OUT yet, compares, writes charts.csv
    python experiments/detection/charts.py OUT --smoke     # a few seeds of others, to see that it runs

Three learners on which nothing was tuned: PPO on CartPole-v1, a small GPT-2 with contexts of 16, and stochastic
gradient descent on a quadratic. Channels, envelopes, whitening, folds and thresholds are the same for all.

The rule, fixed before: a state-space model is the monitor's default only if its AUROC beats that of the best chart,
with a paired interval above zero, on two learners or more; else the chart with the highest mean AUROC is.
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
"""Seeds that nothing has been run on before."""

SMOKE = {"clean": 100, "disturbed": 200}
MINE = MonitorDetector(LRU())
DIMENSIONS = 8


@dataclass(frozen=True)
class Study:
    """A learner, and how it is trained and disturbed.

    Attributes:
      learner: makes it.
      perturbations: each from half of the run on.
      steps: of a run.
      clean, disturbed: how many seeds.
      execution: of the audit.
    """

    learner: Callable[[], ja.Learner]
    perturbations: Sequence[object]
    steps: int
    clean: int = 80
    disturbed: int = 16
    execution: str = "vmap"


def quadratic() -> ja.Learner:
    """Momentum descent on |x|^2 / 2 in DIMENSIONS dimensions, with gradients that are noisy."""
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
    """GPT-2 of two layers of width 48, on 128 tokens a step."""
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
    options.add_argument("--smoke", action="store_true", help="a few seeds of others")
    arguments = options.parse_args()
    prepare_jax()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tables = []
    for name, study in STUDIES.items():
        lanes = trained(name, study, arguments.out, arguments.smoke)
        settings = DetectionSettings(folds=2, alpha=0.3, fitted=0.5) if arguments.smoke else DetectionSettings()
        tables.append(summarise(compare(lanes, [MINE, *CHARTS], settings), MINE.name).assign(learner=name))
        print(
            f"{name}: {lanes.table.clean.sum()} clean, {(~lanes.table.clean).sum()} disturbed, d={len(lanes.channels)}"
        )
    found = pd.concat(tables)[["learner", *tables[0].columns.drop("learner")]]
    found.to_csv(arguments.out / "charts.csv", index=False, float_format="%.4g")
    if not arguments.smoke:
        print(markdown(found), ruling(found), sep="\n\n")


def trained(name: str, study: Study, out: Path, smoke: bool, first: Mapping[str, int] = FIRST) -> LabelledLanes:
    """The lanes of a study, from `out` if they are there; `first` are the first seeds."""
    parts = []
    for kind, perturbations in (("clean", ()), ("disturbed", study.perturbations)):
        count = {"clean": 10, "disturbed": 2} if smoke else {"clean": study.clean, "disturbed": study.disturbed}
        begins = (SMOKE if smoke else first)[kind]
        file = out / f"{name}-{kind}.nc"
        if not file.exists():
            seeds = range(begins, begins + count[kind])
            parts.append(found := rows(study, perturbations, seeds, kind == "clean"))
            found.to_netcdf(file)
        else:
            parts.append(xr.load_dataset(file))
    values = np.concatenate([part["values"].values for part in parts])
    table = pd.concat([part.drop_dims(["step", "channel"]).to_dataframe() for part in parts], ignore_index=True)
    names = [str(channel) for channel in parts[0].channel.values]
    read = varying_channels(values[table.clean.to_numpy()])
    return LabelledLanes(name, tuple(np.array(names)[read]), values[..., read], table)


def rows(study: Study, perturbations: Sequence[object], seeds: range, clean: bool) -> xr.Dataset:
    """Telemetry `[lane, step, channel]` of all lanes of an audit; of one of disturbed seeds, all but the controls."""
    result = ja.audit(
        study.learner(),
        list(perturbations),
        seeds=seeds,
        steps=study.steps,
        execution=study.execution,
        settings=MetricSettings(window=20, hold=30),
    )
    chosen = [0] if clean else range(1, result.telemetry.sizes["condition"])
    values = (
        stack_channels(result.telemetry).transpose("seed", "condition", "step", "channel").isel(condition=list(chosen))
    )
    kinds = result.telemetry.isel(condition=list(chosen))
    each, lanes = len(kinds.condition), len(seeds) * len(kinds.condition)
    columns = {name: np.tile(kinds[name].values, len(seeds)) for name in ("condition", "perturbation", "magnitude")}
    table = columns | {
        "seed": np.repeat(np.array(seeds), each),
        "clean": np.full(lanes, clean),
        "onset": np.full(lanes, study.steps // 2),
        "collapse_time": result.metrics.collapse_time.values[:, list(chosen)].ravel(),
    }
    data = {name: ("lane", column) for name, column in table.items()}
    flat = values.values.reshape(lanes, *values.shape[2:])
    return xr.Dataset(data | {"values": (("lane", "step", "channel"), flat)}, {"channel": values.channel.values})


def markdown(found: pd.DataFrame) -> str:
    """A row for each detector and learner, the best first."""
    head = ("learner", "detector", "AUROC", "detected", "false alarms", "monitor's gain in AUROC", "in share detected")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in found.to_dict("records"):
        own = row["detector"] == MINE.name
        gains = ["", ""] if own else [interval(row, "gain_auroc"), interval(row, "gain_detected")]
        cells = [row["learner"], row["detector"], interval(row, "auroc"), interval(row, "detected")]
        lines.append("| " + " | ".join([*cells, f"{row['false_alarms']:.3f}", *gains]) + " |")
    return "\n".join(lines)


def interval(row: dict, name: str) -> str:
    """A figure and its interval."""
    return f"{row[name]:.3f} [{row[f'{name}_low']:.3f}, {row[f'{name}_high']:.3f}]"


def ruling(found: pd.DataFrame) -> str:
    """What the rule says."""
    wins, said = 0, []
    for learner, figures in found.groupby("learner", sort=False):
        best = best_chart(figures.reset_index(drop=True), MINE.name)
        wins += best.gain_auroc_low > 0
        said.append(f"{learner}: {MINE.name} minus {best.detector}: {interval(best, 'gain_auroc')}")
    charts = found[found.detector != MINE.name].groupby("detector").auroc.mean().sort_values(ascending=False)
    chosen = MINE.name if wins >= 2 else charts.index[0]
    means = ", ".join(f"{name} {value:.4f}" for name, value in charts.items())
    return "\n".join([*said, f"mean AUROC of charts: {means}", f"the default: {chosen}"])


if __name__ == "__main__":
    main()
