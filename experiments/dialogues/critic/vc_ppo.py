"""Value pretraining and lambda 1 for the critic (VC-PPO: Yuan et al., 2025) against plain `ppo_lm`, on long chains.

    python experiments/dialogues/critic/vc_ppo.py OUT.csv [CASE ...]
    python experiments/dialogues/critic/vc_ppo.py tell OUT.csv

Undisturbed, with 3 added to the critic's bias before the first iteration, and with lambda 0 throughout. Both learners
have the seeds' warm starts, prompts and draws in common. OUT.csv has a row for each case, learner, condition and seed,
written seed by seed, and keeps what it has. `tell` prints means with 95% intervals (Student's t) of differences paired
by seed.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1]))

from critic_bound import CASES, WARM_START

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings

SEEDS, STEPS = 8, 60
LEARNERS = {
    "preset": {},
    "vc_ppo": {
        "critic_warm_start": 12_800,
        "critic_warm_start_minibatch": 64,
        "critic_lambda": 1.0,
        "gae_lambda": 0.95,
    },
}
"""On chains of 8 steps so much pretraining explains half of what the prefix allows; with 16 rows an update, a third."""

OF_CRITIC = ("explained_variance", "value_bias")


def trained(case: str, learner: str, seed: int, steps: int = STEPS) -> pd.DataFrame:
    """A seed's lanes, one row each."""
    made = ja.learners.ppo_lm(
        CASES[case],
        kl="none",
        kl_coefficient=0.0,
        **WARM_START,
        **LEARNERS[learner],
        performance_rows=128,
        performance_every=5,
        telemetry="basic",
    )
    conditions = [ja.value_bias(3.0, onset=0), ja.signal_decay(0.0, onset=0, duration="end")]
    settings = MetricSettings(2, 20, 20)
    data = ja.audit(made, conditions, seeds=[seed], steps=steps, execution="map", settings=settings).telemetry
    lanes = []
    for condition in data["condition"].values:
        one = data.sel(condition=condition, seed=seed)
        lane = {"case": case, "learner": learner, "condition": condition, "seed": seed}
        lane |= {"warm_start": one["warm_start_success"].values[0], "performance": one["performance"].values[-1]}
        lane |= {"acting": one["acting_performance"].values[-10:].mean()}
        for name in OF_CRITIC:
            values = one[name].values
            lane |= {f"{name}_first": values[0], f"{name}_mean": values.mean(), f"{name}_last": values[-10:].mean()}
        lanes.append(lane)
    return pd.DataFrame(lanes)


def said(values: np.ndarray) -> str:
    """A mean with its 95% interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return f"{values.mean():+.2f} [{values.mean() - half:+.2f}, {values.mean() + half:+.2f}]"


def tell(path: str) -> None:
    """Differences in performance, paired by seed: of the learners, and of each one's conditions from its control."""
    lanes = pd.read_csv(path)
    for case, of in lanes.groupby("case", sort=False):
        table = of.pivot_table("performance", "seed", ["learner", "condition"])
        control = next(c for c in of.condition if c.startswith("control"))
        for condition in of.condition.unique():
            both = (table["vc_ppo"][condition] - table["preset"][condition]).dropna()
            print(case, condition, "vc_ppo less preset", said(both.values), f"({len(both)} seeds)")
            if condition != control:
                lost = {name: (table[name][condition] - table[name][control]).dropna() for name in LEARNERS}
                for name, one in lost.items():
                    print(case, condition, name, "less its control", said(one.values))
                print(case, condition, "difference of these", said((lost["vc_ppo"] - lost["preset"]).dropna().values))


def main(out: str, *cases: str) -> None:
    """Trains and writes, seed by seed."""
    path = Path(out)
    for case in cases or ("chain 8", "chain 16"):
        for seed in range(SEEDS):
            for learner in LEARNERS:
                found = [pd.read_csv(path)] if path.is_file() else []
                names = ("case", "learner", "seed")
                if found and (found[0][list(names)] == [case, learner, seed]).all(axis=1).any():
                    continue
                began = time.time()
                pd.concat([*found, trained(case, learner, seed)]).round(4).to_csv(path, index=False)
                print(case, learner, seed, f"{time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "tell":
        tell(sys.argv[2])
    else:
        main(*sys.argv[1:])
