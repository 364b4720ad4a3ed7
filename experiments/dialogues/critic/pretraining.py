"""Variance of the return that a pretrained value model explains, compared with the bound of `critic_bound.py`.

    python experiments/dialogues/critic/pretraining.py OUT.csv CASE SEEDS UPDATES [SETTING=VALUE ...]

The value model is pretrained in the learner's `init`, and evaluated on 2048 other rows of the same policy. OUT.csv gets
a row for each seed, and keeps its rows of other settings.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pandas as pd

sys.path.insert(0, str(Path(__file__).parents[1]))

from critic_bound import Frozen

from jaxaudit.learners.dialogue.telemetry.policy import value_statistics

HELD = 2048
BOUND = Path(__file__).parent / "bound.csv"


def main(out: str, case: str, seeds: str, updates: str, *settings: str) -> None:
    """Pretrains, and stores the results after each seed."""
    path = Path(out)
    changed = {
        name: float(value) if "." in value or "e" in value else int(value)
        for name, value in (s.split("=") for s in settings)
    }
    frozen = Frozen(case, critic_warm_start=int(updates), **changed)
    critic = frozen.learner.critic
    bounds = pd.read_csv(BOUND).set_index(["case", "seed"])["bound"]

    @jax.jit
    def explained(params, rows):
        returns = jnp.broadcast_to(rows.gold[:, None], rows.response_mask.shape)
        tables = value_statistics(critic.values(params, None, rows), returns, rows.response_mask)
        return {name: statistic.value for name, statistic in tables.items()}

    for seed in range(int(seeds)):
        start = time.time()
        state = jax.block_until_ready(frozen.initial_state(seed))
        seconds = time.time() - start
        rows, _ = frozen.sample(state.policy.params, jax.random.key(50_000 + seed), HELD)
        values = {name: float(value) for name, value in explained(state.critic.params, rows).items()}
        bound = bounds.get((case, seed), float("nan"))
        row = {"case": case, "seed": seed, "updates": int(updates), "settings": " ".join(settings)} | values
        row |= {"bound": bound, "share": values["explained_variance"] / bound, "seconds": round(seconds)}
        print(row, flush=True)
        tables = [pd.read_csv(path)] if path.is_file() else []
        pd.concat([*tables, pd.DataFrame([row])]).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
