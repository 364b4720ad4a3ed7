"""The share of the return's variance that a perfect value function of the prefix could explain.

    python experiments/dialogues/critic_bound.py experiments/dialogues/critic/bound.csv [CASE ...]

Rows of a frozen warm-started policy are continued from each policy token with new random numbers, where everything that
the prefix does not determine is sampled anew. The bound is the variance of the mean returns of prefixes, corrected for
the noise of few continuations, divided by the total variance of the return, over policy tokens and without discount and
KL. On `hop`, a prefix leaves the rest of the table open, which is sampled among the cycles with the results so far.
"known" is the same with the table of the row, which only a critic with access to it could use. OUT.csv gets a row for
each case and seed, and keeps its earlier rows.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from jaxaudit.dialogues import automaton
from jaxaudit.dialogues.chain import ChainDialogue
from jaxaudit.dialogues.hop import Hop
from jaxaudit.dialogues.protocol import POLICY, Dialogue
from jaxaudit.learners.dialogue import rollout
from jaxaudit.learners.dialogue.factories import settings_of, structure_of
from jaxaudit.learners.dialogue.learner import DialogueData, DialogueLearner
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.models import gpt2, sampling

CASES: dict[str, Dialogue] = {
    "chain 2": ChainDialogue(difficulty=2),
    "chain 8": ChainDialogue(difficulty=8),
    "chain 16": ChainDialogue(most_steps=16, difficulty=16, length=40),
    "hop": Hop(),
}
WARM_START = {"warm_start": 600, "warm_start_success": 0.35}
"""As in `chain_length`: stopped early enough to leave room for improvement."""

SEEDS, ROWS, CONTINUATIONS = 3, 256, 32
RESAMPLED = 1000
"""The number of bootstrap samples of rows for an interval."""


class Frozen:
    """The programs of a case, with `ppo_lm` and `changed` settings of the critic."""

    def __init__(self, case: str, **changed: Any):
        self.dialogue = CASES[case]
        settings = settings_of("ppo_lm")(**WARM_START | {"kl": "none", "kl_coefficient": 0.0} | changed)
        self.learner = DialogueLearner(structure_of(self.dialogue), settings.structure)
        self.numbers = settings.numbers(self.dialogue.difficulty)
        self.data = DialogueData(self.numbers)
        self.initial_state = jax.jit(lambda seed: self.learner.init(jax.random.key(seed), self.data))
        self.sample = jax.jit(self._sample, static_argnums=2)
        self.continue_rows = jax.jit(self._continue_rows)

    def _sample(self, params: Any, key: jax.Array, rows: int) -> tuple[Rows, automaton.AutomatonState]:
        """Returns rows of a policy, and the initial states of their dialogues."""
        initial = []
        rows_ = self.learner.collector.sample_undisturbed(
            params,
            None,
            self.learner.dialogue,
            self.numbers,
            key,
            rows,
            change_begun=lambda state: initial.append(state) or state,
        )
        return rows_, initial[0]

    def _continue_rows(
        self, params: Any, initial_state: automaton.AutomatonState, tokens: jax.Array, fork: jax.Array, key: jax.Array
    ) -> jax.Array:
        """Returns gold rewards `[N]` of rows with `tokens` `[N, T]` before slot `fork` `[N]` and new ones after it."""
        dialogue, model = self.learner.dialogue, self.learner.policy.model
        sampler = rollout.Sampler(model)
        unrolled = sampling.unstack_layers(params, model.size.heads)
        slots = dialogue.length
        uniform = jax.random.uniform(key, (slots, fork.shape[0]))

        def written(
            progress: automaton.AutomatonState, slot: Any, chosen: jax.Array
        ) -> tuple[automaton.AutomatonState, Any]:
            given, role = jax.vmap(automaton.next_token)(progress)
            token = jnp.where(role == POLICY, jnp.where(slot < fork, tokens[:, slot], chosen), given)
            at = token, progress.position, progress.chunk
            progress, reply = jax.vmap(lambda p, t: automaton.write(dialogue, p, t))(progress, token)
            return jax.vmap(lambda p, r: automaton.enqueue(p, r, slot))(progress, reply), at

        def turn(carry: Any, slot: Any) -> tuple[Any, None]:
            progress, cache, latest = carry
            hidden, cache = sampling.decode(model, unrolled, *latest, slot - 1, cache)
            chosen, _ = sampler.sample(gpt2.logits(params, hidden) / self.numbers.temperature, uniform[slot], 1.0)
            progress, latest = written(progress, slot, chosen)
            return (progress, cache, latest), None

        progress, latest = written(initial_state, 0, jnp.zeros_like(fork))
        cache = sampling.prefill(model, unrolled, latest[0][:, None], slots, latest[1][:, None], latest[2][:, None])[1]
        (progress, _, _), _ = jax.lax.scan(turn, (progress, cache, latest), jnp.arange(1, slots))
        return jax.vmap(dialogue.reward)(progress.state)["gold"]


def resample_tables(
    hop: Hop, initial: automaton.AutomatonState, tokens: np.ndarray, fork: np.ndarray, rng: Any
) -> automaton.AutomatonState:
    """Resamples the tables of dialogues of `hop`, except for entries that results before `fork` determine.

    The known results are pieces of the cycle. Arranged in random order, they form a random one of the possible cycles.
    """
    n, rows = hop.entities, np.arange(len(fork))
    results = np.full((len(fork), n), -1)
    for slot in range(2, tokens.shape[1] - 1):  # "call c result e"
        is_result = (
            (tokens[:, slot] == hop.token["result"]) & (slot + 1 < fork) & (tokens[:, slot - 2] == hop.token["call"])
        )
        source, target = tokens[:, slot - 1], tokens[:, slot + 1]
        is_result &= (source < 2 * n) & (target < 2 * n)
        results[rows[is_result], source[is_result] % n] = target[is_result] % n
    before = np.full_like(results, -1)
    row_index, entry = np.nonzero(results >= 0)
    before[row_index, results[row_index, entry]] = entry
    head, depth = np.broadcast_to(np.arange(n), results.shape).copy(), np.zeros_like(results)
    for _ in range(n - 1):
        earlier = np.take_along_axis(before, head, 1)
        depth += earlier >= 0
        head = np.where(earlier >= 0, earlier, head)
    piece_order = np.take_along_axis(rng.permuted(np.broadcast_to(np.arange(n), results.shape), axis=1), head, 1)
    order = np.argsort(piece_order * n + depth, axis=1)
    successor = np.empty_like(results)
    successor[rows[:, None], order] = np.roll(order, -1, axis=1)
    complete = (results >= 0).all(1)
    successor[complete] = results[complete]
    assert (successor == results)[results >= 0].all()
    table = np.asarray(initial.state.table)
    rare = np.zeros_like(results, bool)
    rare[rows[:, None], table % n] = table >= n
    hops, goal = tokens[:, 0] - hop.token["1"] + 1, tokens[:, 1] % n
    for hop_number in range(hop.hops):
        goal = np.where(hop_number < hops, successor[rows, goal], goal)
    table = successor + n * np.take_along_axis(rare, successor, 1)
    state = dataclasses.replace(initial.state, table=jnp.int32(table), goal=jnp.int32(goal))
    return dataclasses.replace(initial, state=state)


def means(frozen: Frozen, params: Any, seed: int, known: bool) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Returns mean returns of each policy token's prefix `[N, T]`, their variances over continuations, and the rows."""
    key = jax.random.key(7_000 + seed)
    rows, initial = frozen.sample(params, key, ROWS)
    tokens, mask = np.asarray(rows.tokens), np.asarray(rows.response_mask)
    initial = rollout.repeat_dialogues(initial, CONTINUATIONS)
    repeated = np.repeat(tokens, CONTINUATIONS, axis=0)
    rng = np.random.default_rng(seed)
    mean, variance = np.full(mask.shape, np.nan), np.full(mask.shape, np.nan)
    ordinal = np.cumsum(mask, axis=1)
    for number in range(1, ordinal.max() + 1):
        slots_ = mask & (ordinal == number)
        present = slots_.any(1)
        fork = np.where(present, slots_.argmax(1), mask.shape[1])
        forks = np.repeat(fork, CONTINUATIONS)
        redraws = isinstance(frozen.dialogue, Hop) and not known
        start = resample_tables(frozen.dialogue, initial, repeated, forks, rng) if redraws else initial
        fork_key = jax.random.fold_in(key, number)
        gold = np.asarray(frozen.continue_rows(params, start, repeated, forks, fork_key)).reshape(ROWS, CONTINUATIONS)
        mean[present, fork[present]], variance[present, fork[present]] = (
            gold.mean(1)[present],
            gold.var(1, ddof=1)[present],
        )
    return mean, variance, rows


def share(mean: np.ndarray, spread: np.ndarray) -> float:
    """Returns the share of the return's variance between prefixes; values are NaN at slots without a policy token."""
    within = np.nanmean(spread)
    between = np.nanvar(mean) - within / CONTINUATIONS
    return between / (between + within)


def summary(mean: np.ndarray, spread: np.ndarray, rows: Rows, rng: Any) -> dict[str, float]:
    """Returns the share with its 95% interval over rows, and statistics of the rows."""
    mask = np.asarray(rows.response_mask)
    samples = [share(mean[i], spread[i]) for i in rng.integers(0, len(mean), (RESAMPLED, len(mean)))]
    low, high = np.quantile(samples, (0.025, 0.975))
    first = mean[np.arange(len(mean)), mask.argmax(1)]
    gold = np.asarray(rows.gold)
    # The return of a row is independent of its continuations, and gives the same share without a correction.
    errors = mask * (gold[:, None] - np.nan_to_num(mean))
    by_single_return = 1 - (np.sum(errors**2) / mask.sum()) / np.var(np.repeat(gold, mask.sum(1)))
    return {
        "bound": share(mean, spread),
        "low": low,
        "high": high,
        "by_rows": by_single_return,
        "success": gold.mean(),
        "at_first": np.var(first) / (np.nanvar(mean)),
        "own_tokens": mask.sum(1).mean(),
    }


def main(out: str, *cases: str) -> None:
    """Computes bounds, and stores the results after each seed."""
    path = Path(out)
    tables = [pd.read_csv(path)] if path.is_file() else []
    for case in cases or CASES:
        frozen = Frozen(case)
        for seed in range(SEEDS):
            if tables and ((tables[0].case == case) & (tables[0].seed == seed)).any():
                continue
            start = time.time()
            params = frozen.initial_state(seed).policy.params
            warm_seconds = time.time() - start
            row: dict[str, Any] = {"case": case, "seed": seed}
            row |= summary(*means(frozen, params, seed, known=False), np.random.default_rng(seed))
            if isinstance(frozen.dialogue, Hop):
                row["known"] = share(*means(frozen, params, seed, known=True)[:2])
            print(row, f"warm start {warm_seconds:.0f} s, in all {time.time() - start:.0f} s", flush=True)
            tables = [pd.concat([*tables, pd.DataFrame([row])])]
            tables[0].round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
