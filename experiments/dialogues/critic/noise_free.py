"""A value model on `chain` with targets without noise: how much of its error is not due to chance.

    python experiments/dialogues/critic/noise_free.py OUT.csv CASE SEED UPDATES

The target of a prefix is the mean return of its class: the number of written tokens, whether the answer is announced or
given, and whether everything written is correct, which a rule determines. Training has 64 rows per update and Adam at
1e-3 decaying to 0, as in value pretraining. OUT.csv gets the explained variance of the returns of 2048 other rows, by
the network, by the classes, and by the classes without the rule.
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
    """Returns the class of the prefix before each policy token, int `[N, T]`, which is even if something is wrong."""
    tokens, mask = np.asarray(rows.tokens), np.asarray(rows.response_mask)
    steps = int(dialogue.difficulty)
    path = [tokens[:, 0]]
    for step in range(steps):
        path.append(dialogue.table[tokens[:, 1 + step] - dialogue.values, path[-1]])
    result = np.zeros(mask.shape, int)
    for row, slots in enumerate(mask):
        stage, right = 0, True
        for position, slot in enumerate(np.flatnonzero(slots)):
            result[row, slot] = 2 * (3 * position + stage) + right
            token = tokens[row, slot]
            if stage == 0 and token == dialogue.token["answer"]:
                stage = 1
            elif token < dialogue.values and stage == 0:
                right &= position < steps and token == path[min(position + 1, steps)][row]
            elif token < dialogue.values and stage == 1:
                stage, right = 2, token == path[-1][row]
    return result


def main(out: str, case: str, seed: str, updates: str) -> None:
    """Fits the value model to the mean returns of classes, and stores a row."""
    fits, total = fit.Fits(case, int(seed)), int(updates)
    dialogue, critic, bank = fits.frozen.dialogue, fits.critic, fits.bank
    assert isinstance(dialogue, ChainDialogue), "the rule applies only to chains"
    mask, held_mask = np.asarray(bank.response_mask), np.asarray(fits.held.response_mask)
    gold, held_gold = (np.broadcast_to(np.asarray(x.gold)[:, None], x.response_mask.shape) for x in (bank, fits.held))
    of_bank, of_held = (np.where(x.response_mask, classes(dialogue, x), 0) for x in (bank, fits.held))
    class_count = 1 + max(of_bank.max(), of_held.max())

    def means(class_numbers: np.ndarray) -> np.ndarray:
        return np.bincount(class_numbers[mask], gold[mask], class_count) / np.maximum(
            np.bincount(class_numbers[mask], minlength=class_count), 1
        )

    def explained(values: np.ndarray) -> float:
        return float(1 - np.var((held_gold - values)[held_mask]) / np.var(held_gold[held_mask]))

    with_rule, without = explained(means(of_bank)[of_held]), explained(means(of_bank // 2)[of_held // 2])
    targets = jnp.asarray(means(of_bank)[of_bank], jnp.float32)
    start = time.time()
    params = jax.jit(
        lambda params: pretrain_value_model(
            critic, params, None, bank, targets, jax.random.key(int(seed)), updates=total, minibatch=64, rate=1e-3
        )
    )(critic.with_head(fits.policy))
    row = {"case": case, "seed": int(seed), "updates": total}
    row |= {"explained_variance": explained(np.asarray(critic.values(params, None, fits.held)))}
    row |= {"classes": with_rule, "without_rule": without, "seconds": round(time.time() - start)}
    print(row)
    path = Path(out)
    lanes = [pd.read_csv(path)] if path.is_file() else []
    pd.concat([*lanes, pd.DataFrame([row])]).round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
