"""A monitor in the training loop: does intervening at its alarms keep trainings from collapse?

    python experiments/detection/closed_loop.py ppo runs/ppo-clean -o OUT
    python experiments/detection/closed_loop.py gpt2 runs/gpt2-clean -o OUT

The monitor, the default chart or `--model lru`, is fitted to half of the clean run's lanes and calibrated on the
others; trained are other seeds.
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
    options.add_argument("learner", choices=tuple(DISTURBANCES), help="which")
    options.add_argument("clean", type=Path, help="the folder of its clean run's, experiments/detection/*-clean.toml")
    options.add_argument("-o", dest="out", type=Path, required=True, help="folder of the results")
    options.add_argument("--seeds", type=int, default=16, help="(%(default)s)")
    options.add_argument("--model", default=DEFAULT, help="what the monitor scores by (%(default)s)")
    arguments = options.parse_args()
    prepare_jax()
    clean = xr.open_zarr(arguments.clean / "telemetry.zarr").load()
    monitor = ja.Monitor.fit(clean.isel(condition=0), model=arguments.model)
    grid = []
    for disturb in DISTURBANCES[arguments.learner]:
        grid += [disturb, *(ja.chain(disturb, intervene) for intervene in INTERVENTIONS)]
    grid += INTERVENTIONS
    found = ja.audit(
        LEARNERS[arguments.learner](),
        grid,
        seeds=range(5000, 5000 + arguments.seeds),
        steps=clean.sizes["step"],
        execution="map" if arguments.learner == "gpt2" else "vmap",
        monitor=monitor,
        settings=MetricSettings(window=30, hold=50),
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    table = tell(found)
    table.to_csv(arguments.out / f"closed_loop_{arguments.learner}.csv", index=False)
    print(table.to_string(index=False))
    print("without an alarm, and not bitwise as without interventions:", unlike(found.telemetry))


def tell(found: ja.Result) -> pd.DataFrame:
    """A row for each condition: collapses (Wilson), alarms since the onset, and what an intervention prevents.

    P_div is Table S5's: the share of seeds that have collapsed by half of the training.
    """
    times = found.metrics.collapse_time.values
    collapsed, early = np.isfinite(times), times < found.telemetry.sizes["step"] / 2
    onset = int(found.telemetry.onset[-1])
    alarmed = (found.telemetry.alarm.values[..., onset:] > 0).any(-1)
    rows = []
    each = 1 + len(INTERVENTIONS)
    disturbed = found.telemetry.sizes["condition"] - len(INTERVENTIONS)
    for column, condition in enumerate(found.telemetry.condition.values):
        row = {
            "condition": condition,
            "P_div": share(early[:, column]),
            "collapsed": share(collapsed[:, column]),
            "alarmed": f"{alarmed[:, column].mean():.2f}",
            "final performance, median": f"{np.median(found.metrics.final_performance.values[:, column]):.4g}",
        }
        alone = 1 + (column - 1) // each * each
        if 0 < column < disturbed and column != alone:
            row["less P_div"] = less(early[:, alone], early[:, column])
            row["less collapsed"] = less(collapsed[:, alone], collapsed[:, column])
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def share(hits: np.ndarray) -> str:
    """Of seeds, with Wilson's interval."""
    found = ja.statistics.wilson(int(hits.sum()), len(hits))
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def less(without: np.ndarray, with_it: np.ndarray) -> str:
    """How much smaller the share is with an intervention, paired by seed, with a bootstrap interval."""
    found = ja.statistics.paired_difference(without.astype(float), with_it.astype(float), statistic=np.mean)
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def unlike(telemetry: xr.Dataset) -> str:
    """Of the lanes that had no alarm, how many differ from their twin whose interventions are switched off."""
    each, last = 1 + len(INTERVENTIONS), telemetry.sizes["condition"]
    disturbed = last - len(INTERVENTIONS)
    twins = [(d + i, d) for d in range(1, disturbed, each) for i in range(1, each)]
    twins += [(column, 0) for column in range(disturbed, last)]
    onset = int(telemetry.onset[-1])
    quiet = differ = 0
    own = [name for name in telemetry.data_vars if "condition" in telemetry[name].dims]
    for helped, alone in twins:
        for seed in range(telemetry.sizes["seed"]):
            if not (telemetry.alarm.values[seed, helped, onset:] > 0).any():
                quiet += 1
                pair = [[telemetry[name].values[seed, c] for name in own] for c in (helped, alone)]
                differ += not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*pair, strict=True))
    return f"{differ} of {quiet} lanes"


if __name__ == "__main__":
    main()
