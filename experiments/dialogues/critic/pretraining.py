"""How much of the return's variance a pretrained value model explains, beside what `critic_bound.py` says is possible.

    python experiments/dialogues/critic/pretraining.py OUT.csv CASE SEEDS UPDATES [SETTING=VALUE ...]

Value pretraining as the learner does it, in its `init`; then explained variance of 2048 other rows of the same policy.
OUT.csv gets a row for each seed, and keeps what it has of other settings.
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
    """Pretrains, and writes after each seed."""
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
        found = value_statistics(critic.values(params, None, rows), returns, rows.response_mask)
        return {name: one.value for name, one in found.items()}

    for seed in range(int(seeds)):
        began = time.time()
        state = jax.block_until_ready(frozen.begun(seed))
        took = time.time() - began
        rows, _ = frozen.sampled(state.policy.params, jax.random.key(50_000 + seed), HELD)
        told = {name: float(value) for name, value in explained(state.critic.params, rows).items()}
        bound = bounds.get((case, seed), float("nan"))
        row = {"case": case, "seed": seed, "updates": int(updates), "settings": " ".join(settings)} | told
        row |= {"bound": bound, "share": told["explained_variance"] / bound, "seconds": round(took)}
        print(row, flush=True)
        found = [pd.read_csv(path)] if path.is_file() else []
        pd.concat([*found, pd.DataFrame([row])]).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
