"""How much of the return's variance a perfect value function of the prefix could explain, of warm-started policies.

    python experiments/dialogues/critic_bound.py experiments/dialogues/critic/bound.csv [CASE ...]

Of rows of a frozen policy, the row is written anew from each own token on, with fresh draws and what the prefix does
not tell drawn anew: the variance of the mean returns of the prefixes, corrected for the noise of few continuations,
over the whole variance of the return, over own tokens, without discount and KL. What a prefix leaves open on `hop` is
the rest of the table: it is drawn anew among the cycles that have the results seen so far. "known" is the same with the
row's own table, which only a critic that sees it could explain. OUT.csv has a row for each case and seed and keeps what
it has.
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
"""As in `chain_length`: stopped where half of the rows may still become right."""

SEEDS, ROWS, CONTINUATIONS = 3, 256, 32
RESAMPLED = 1000
"""Draws of rows, with replacement, of an interval."""


class Frozen:
    """A case's programs: `ppo_lm` with `changed` settings, which are the critic's."""

    def __init__(self, case: str, **changed: Any):
        self.dialogue = CASES[case]
        settings = settings_of("ppo_lm")(**WARM_START | {"kl": "none", "kl_coefficient": 0.0} | changed)
        self.learner = DialogueLearner(structure_of(self.dialogue), settings.structure)
        self.numbers = settings.numbers(self.dialogue.difficulty)
        self.data = DialogueData(self.numbers)
        self.begun = jax.jit(lambda seed: self.learner.init(jax.random.key(seed), self.data))
        self.sampled = jax.jit(self._sampled, static_argnums=2)
        self.continued = jax.jit(self._continued)

    def _sampled(self, params: Any, key: jax.Array, rows: int) -> tuple[Rows, automaton.AutomatonState]:
        """Rows of a policy, and the dialogues as they had begun."""
        begun = []
        found = self.learner.collector.sample_undisturbed(
            params,
            None,
            self.learner.dialogue,
            self.numbers,
            key,
            rows,
            change_begun=lambda one: begun.append(one) or one,
        )
        return found, begun[0]

    def _continued(
        self, params: Any, begun: automaton.AutomatonState, tokens: jax.Array, fork: jax.Array, key: jax.Array
    ) -> jax.Array:
        """Gold of rows `[N]` that have `tokens` `[N, T]` before the slot `fork` `[N]` and the policy's after it."""
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

        progress, latest = written(begun, 0, jnp.zeros_like(fork))
        cache = sampling.prefill(model, unrolled, latest[0][:, None], slots, latest[1][:, None], latest[2][:, None])[1]
        (progress, _, _), _ = jax.lax.scan(turn, (progress, cache, latest), jnp.arange(1, slots))
        return jax.vmap(dialogue.reward)(progress.state)["gold"]


def redrawn(
    hop: Hop, begun: automaton.AutomatonState, tokens: np.ndarray, fork: np.ndarray, rng: Any
) -> automaton.AutomatonState:
    """Dialogues of `hop` whose tables are drawn anew where no result before `fork` tells them.

    The results known are pieces of the cycle; pieces in random order are a random one of the cycles that have them.
    """
    n, rows = hop.entities, np.arange(len(fork))
    known = np.full((len(fork), n), -1)
    for slot in range(2, tokens.shape[1] - 1):  # "call c result e"
        seen = (tokens[:, slot] == hop.token["result"]) & (slot + 1 < fork) & (tokens[:, slot - 2] == hop.token["call"])
        asked, found = tokens[:, slot - 1], tokens[:, slot + 1]
        seen &= (asked < 2 * n) & (found < 2 * n)
        known[rows[seen], asked[seen] % n] = found[seen] % n
    before = np.full_like(known, -1)
    row, at = np.nonzero(known >= 0)
    before[row, known[row, at]] = at
    head, depth = np.broadcast_to(np.arange(n), known.shape).copy(), np.zeros_like(known)
    for _ in range(n - 1):
        earlier = np.take_along_axis(before, head, 1)
        depth += earlier >= 0
        head = np.where(earlier >= 0, earlier, head)
    place = np.take_along_axis(rng.permuted(np.broadcast_to(np.arange(n), known.shape), axis=1), head, 1)
    order = np.argsort(place * n + depth, axis=1)
    successor = np.empty_like(known)
    successor[rows[:, None], order] = np.roll(order, -1, axis=1)
    complete = (known >= 0).all(1)
    successor[complete] = known[complete]
    assert (successor == known)[known >= 0].all()
    table = np.asarray(begun.state.table)
    rare = np.zeros_like(known, bool)
    rare[rows[:, None], table % n] = table >= n
    hops, goal = tokens[:, 0] - hop.token["1"] + 1, tokens[:, 1] % n
    for hop_number in range(hop.hops):
        goal = np.where(hop_number < hops, successor[rows, goal], goal)
    table = successor + n * np.take_along_axis(rare, successor, 1)
    state = dataclasses.replace(begun.state, table=jnp.int32(table), goal=jnp.int32(goal))
    return dataclasses.replace(begun, state=state)


def means(frozen: Frozen, params: Any, seed: int, known: bool) -> tuple[np.ndarray, np.ndarray, Rows]:
    """Mean returns of each own token's prefix `[N, T]`, their variances over continuations, and the rows."""
    key = jax.random.key(7_000 + seed)
    rows, begun = frozen.sampled(params, key, ROWS)
    tokens, own = np.asarray(rows.tokens), np.asarray(rows.response_mask)
    begun = rollout.repeat_dialogues(begun, CONTINUATIONS)
    repeated = np.repeat(tokens, CONTINUATIONS, axis=0)
    rng = np.random.default_rng(seed)
    mean, spread = np.full(own.shape, np.nan), np.full(own.shape, np.nan)
    rank = np.cumsum(own, axis=1)
    for number in range(1, rank.max() + 1):
        there = own & (rank == number)
        has = there.any(1)
        fork = np.where(has, there.argmax(1), own.shape[1])
        forks = np.repeat(fork, CONTINUATIONS)
        redraws = isinstance(frozen.dialogue, Hop) and not known
        start = redrawn(frozen.dialogue, begun, repeated, forks, rng) if redraws else begun
        key_here = jax.random.fold_in(key, number)
        gold = np.asarray(frozen.continued(params, start, repeated, forks, key_here)).reshape(ROWS, CONTINUATIONS)
        mean[has, fork[has]], spread[has, fork[has]] = gold.mean(1)[has], gold.var(1, ddof=1)[has]
    return mean, spread, rows


def share(mean: np.ndarray, spread: np.ndarray) -> float:
    """Of the return's variance that lies between prefixes; NaN where there is no own token."""
    within = np.nanmean(spread)
    between = np.nanvar(mean) - within / CONTINUATIONS
    return between / (between + within)


def told(mean: np.ndarray, spread: np.ndarray, rows: Rows, rng: Any) -> dict[str, float]:
    """The share with its 95% interval over rows, and what it is of."""
    own = np.asarray(rows.response_mask)
    drawn = [share(mean[i], spread[i]) for i in rng.integers(0, len(mean), (RESAMPLED, len(mean)))]
    low, high = np.quantile(drawn, (0.025, 0.975))
    first = mean[np.arange(len(mean)), own.argmax(1)]
    gold = np.asarray(rows.gold)
    # A row's own return is one more draw, independent of the continuations: the same share, without a correction.
    errors = own * (gold[:, None] - np.nan_to_num(mean))
    noisy = 1 - (np.sum(errors**2) / own.sum()) / np.var(np.repeat(gold, own.sum(1)))
    return {
        "bound": share(mean, spread),
        "low": low,
        "high": high,
        "by_rows": noisy,
        "success": gold.mean(),
        "at_first": np.var(first) / (np.nanvar(mean)),
        "own_tokens": own.sum(1).mean(),
    }


def main(out: str, *cases: str) -> None:
    """Measures, and writes after each seed."""
    path = Path(out)
    found = [pd.read_csv(path)] if path.is_file() else []
    for case in cases or CASES:
        frozen = Frozen(case)
        for seed in range(SEEDS):
            if found and ((found[0].case == case) & (found[0].seed == seed)).any():
                continue
            began = time.time()
            params = frozen.begun(seed).policy.params
            warmed = time.time() - began
            row: dict[str, Any] = {"case": case, "seed": seed}
            row |= told(*means(frozen, params, seed, known=False), np.random.default_rng(seed))
            if isinstance(frozen.dialogue, Hop):
                row["known"] = share(*means(frozen, params, seed, known=True)[:2])
            print(row, f"warm start {warmed:.0f} s, in all {time.time() - began:.0f} s", flush=True)
            found = [pd.concat([*found, pd.DataFrame([row])])]
            found[0].round(4).to_csv(path, index=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
