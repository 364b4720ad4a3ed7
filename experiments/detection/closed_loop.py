"""A monitor in the training loop: do interventions at its alarms prevent collapses?

    python experiments/detection/closed_loop.py ppo runs/ppo-clean -o OUT
    python experiments/detection/closed_loop.py gpt2 runs/gpt2-clean -o OUT

The monitor, the default chart or `--model lru`, is fitted to half of the lanes of a clean run and calibrated on the
others. The trained lanes have other seeds.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import xarray as xr

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.cli.main import prepare_jax
from jaxaudit.monitoring.monitor import DEFAULT

ONSET = 0.4
DISTURBANCES = {
    "ppo": (ja.weight_noise(0.3, onset=ONSET), ja.lr_spike(1000.0, onset=ONSET)),
    "gpt2": (ja.momentum_noise(0.1, onset=ONSET), ja.lr_spike(100.0, onset=ONSET)),
}
LEARNERS = {
    "ppo": lambda: ja.learners.ppo(
        "InvertedPendulum-v5", num_envs=4, rollout_length=64, evaluations=2, evaluation_episodes=2
    ),
    "gpt2": lambda: ja.learners.language_model(
        "python-stdlib",
        size="nano",
        context=32,
        batch_size=4,
        accumulation=4,
        learning_rate=3e-3,
        warmup=0.05,
        held_out=8,
        validation=64,
    ),
}
INTERVENTIONS = (ja.roll_back(10, onset=ONSET), ja.lower_learning_rate(0.0, onset=ONSET))


def main() -> None:
    """Trains, and writes the table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("learner", choices=tuple(DISTURBANCES), help="the learner")
    options.add_argument("clean", type=Path, help="the folder of its clean run, of experiments/detection/*-clean.toml")
    options.add_argument("-o", dest="out", type=Path, required=True, help="folder of the results")
    options.add_argument("--seeds", type=int, default=16, help="number of seeds (%(default)s)")
    options.add_argument("--model", default=DEFAULT, help="the model of the monitor (%(default)s)")
    arguments = options.parse_args()
    prepare_jax()
    clean = xr.open_zarr(arguments.clean / "telemetry.zarr").load()
    monitor = ja.Monitor.fit(clean.isel(condition=0), model=arguments.model)
    grid = []
    for disturbance in DISTURBANCES[arguments.learner]:
        grid += [disturbance, *(ja.chain(disturbance, intervention) for intervention in INTERVENTIONS)]
    grid += INTERVENTIONS
    result = ja.audit(
        LEARNERS[arguments.learner](),
        grid,
        seeds=range(5000, 5000 + arguments.seeds),
        steps=clean.sizes["step"],
        execution="map" if arguments.learner == "gpt2" else "vmap",
        monitor=monitor,
        settings=MetricSettings(window=30, hold=50),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = condition_table(result)
    table.to_csv(arguments.out / f"closed_loop_{arguments.learner}.csv", index=False)
    print(table.to_string(index=False))
    print("without an alarm, and not bitwise as without interventions:", different_lanes(result.telemetry))


def condition_table(result: ja.Result) -> pd.DataFrame:
    """Returns a row for each condition: collapses (Wilson), alarms after the onset, and prevented collapses.

    P_div is that of Table S5, the share of seeds that collapse in the first half of the training.
    """
    times = result.metrics.collapse_time.values
    collapsed, early = np.isfinite(times), times < result.telemetry.sizes["step"] / 2
    onset = int(result.telemetry.onset[-1])
    alarmed = (result.telemetry.alarm.values[..., onset:] > 0).any(-1)
    rows = []
    group_size = 1 + len(INTERVENTIONS)
    disturbed = result.telemetry.sizes["condition"] - len(INTERVENTIONS)
    for column, condition in enumerate(result.telemetry.condition.values):
        row = {
            "condition": condition,
            "P_div": share(early[:, column]),
            "collapsed": share(collapsed[:, column]),
            "alarmed": f"{alarmed[:, column].mean():.2f}",
            "final performance, median": f"{np.median(result.metrics.final_performance.values[:, column]):.4g}",
        }
        undisturbed_column = 1 + (column - 1) // group_size * group_size
        if 0 < column < disturbed and column != undisturbed_column:
            row["less P_div"] = reduction(early[:, undisturbed_column], early[:, column])
            row["less collapsed"] = reduction(collapsed[:, undisturbed_column], collapsed[:, column])
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def share(hits: np.ndarray) -> str:
    """Formats a share of seeds with its Wilson interval."""
    estimate = ja.statistics.wilson(int(hits.sum()), len(hits))
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def reduction(without: np.ndarray, with_intervention: np.ndarray) -> str:
    """Formats the reduction of a share by an intervention, paired by seed, with a bootstrap interval."""
    estimate = ja.statistics.paired_difference(
        without.astype(float), with_intervention.astype(float), statistic=np.mean
    )
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def different_lanes(telemetry: xr.Dataset) -> str:
    """Counts the lanes without an alarm that differ from the same lane without interventions."""
    group_size, last = 1 + len(INTERVENTIONS), telemetry.sizes["condition"]
    disturbed = last - len(INTERVENTIONS)
    twins = [(d + i, d) for d in range(1, disturbed, group_size) for i in range(1, group_size)]
    twins += [(column, 0) for column in range(disturbed, last)]
    onset = int(telemetry.onset[-1])
    without_alarm = different = 0
    channels = [name for name in telemetry.data_vars if "condition" in telemetry[name].dims]
    for with_intervention, without_intervention in twins:
        for seed in range(telemetry.sizes["seed"]):
            if not (telemetry.alarm.values[seed, with_intervention, onset:] > 0).any():
                without_alarm += 1
                pair = [
                    [telemetry[name].values[seed, c] for name in channels]
                    for c in (with_intervention, without_intervention)
                ]
                different += not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*pair, strict=True))
    return f"{different} of {without_alarm} lanes"


if __name__ == "__main__":
    main()
