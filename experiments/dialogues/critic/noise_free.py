"""How far a value model gets on `chain` where its targets have no noise: what is hard for it beside chance.

    python experiments/dialogues/critic/noise_free.py OUT.csv CASE SEED UPDATES

Targets are mean returns of rows that have come as far and have the same right so far: how many tokens are written,
whether the answer is announced or given, and whether all that is written is right, which a rule reads off the row. 64
rows an update, Adam at 1e-3 falling to 0, as value pretraining does it. OUT.csv gets explained variance of 2048 other
rows' returns after so many updates: of the network, of the classes themselves, and of the classes without the rule.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import fit
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from jaxaudit.dialogues.chain import ChainDialogue
from jaxaudit.learners.dialogue.demonstrations import pretrain_value_model
from jaxaudit.learners.dialogue.rollout import Rows


def classes(dialogue: ChainDialogue, rows: Rows) -> np.ndarray:
    """The class of the prefix before each own token, int `[N, T]`: an even number where something written is wrong."""
    tokens, own = np.asarray(rows.tokens), np.asarray(rows.response_mask)
    steps = int(dialogue.difficulty)
    path = [tokens[:, 0]]
    for step in range(steps):
        path.append(dialogue.table[tokens[:, 1 + step] - dialogue.values, path[-1]])
    found = np.zeros(own.shape, int)
    for row, slots in enumerate(own):
        stage, right = 0, True
        for written, slot in enumerate(np.flatnonzero(slots)):
            found[row, slot] = 2 * (3 * written + stage) + right
            token = tokens[row, slot]
            if stage == 0 and token == dialogue.token["answer"]:
                stage = 1
            elif token < dialogue.values and stage == 0:
                right &= written < steps and token == path[min(written + 1, steps)][row]
            elif token < dialogue.values and stage == 1:
                stage, right = 2, token == path[-1][row]
    return found


def main(out: str, case: str, seed: str, updates: str) -> None:
    """Fits the value model to the mean returns of classes, and writes a row."""
    fits, total = fit.Fits(case, int(seed)), int(updates)
    dialogue, critic, bank = fits.frozen.dialogue, fits.critic, fits.bank
    assert isinstance(dialogue, ChainDialogue), "the rule is of chains"
    own, held_own = np.asarray(bank.response_mask), np.asarray(fits.held.response_mask)
    gold, held_gold = (np.broadcast_to(np.asarray(x.gold)[:, None], x.response_mask.shape) for x in (bank, fits.held))
    of_bank, of_held = (np.where(x.response_mask, classes(dialogue, x), 0) for x in (bank, fits.held))
    most = 1 + max(of_bank.max(), of_held.max())

    def means(of: np.ndarray) -> np.ndarray:
        return np.bincount(of[own], gold[own], most) / np.maximum(np.bincount(of[own], minlength=most), 1)

    def explained(values: np.ndarray) -> float:
        return float(1 - np.var((held_gold - values)[held_own]) / np.var(held_gold[held_own]))

    with_rule, without = explained(means(of_bank)[of_held]), explained(means(of_bank // 2)[of_held // 2])
    targets = jnp.asarray(means(of_bank)[of_bank], jnp.float32)
    began = time.time()
    params = jax.jit(
        lambda params: pretrain_value_model(
            critic, params, None, bank, targets, jax.random.key(int(seed)), updates=total, minibatch=64, rate=1e-3
        )
    )(critic.with_head(fits.policy))
    row = {"case": case, "seed": int(seed), "updates": total}
    row |= {"explained_variance": explained(np.asarray(critic.values(params, None, fits.held)))}
    row |= {"classes": with_rule, "without_rule": without, "seconds": round(time.time() - began)}
    print(row)
    path = Path(out)
    lanes = [pd.read_csv(path)] if path.is_file() else []
    pd.concat([*lanes, pd.DataFrame([row])]).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
