"""Rows that share sequences: each reads what it would alone, and gradients are those of rows side by side."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.hop import Hop
from jaxaudit.dialogues.protocol import END, POLICY, PROMPT
from jaxaudit.learners.dialogue import packing
from jaxaudit.learners.dialogue.collection import Models
from jaxaudit.learners.dialogue.factories import _cached_learner, settings_of, structure_of
from jaxaudit.learners.dialogue.learner import Trained
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.models import gpt2

COUNT, SLOTS, VOCABULARY = 12, 10, 17


class Ended(Hop):
    """Earns one when the policy has ended it, which a random one does of some rows only."""

    def reward(self, state):
        return super().reward(state) | {"gold": state.ended.astype(jnp.float32)}


def rows_of(lengths, seed=0):
    """Rows of so many slots, the first one of each given; every other one begins a chunk at slot 3."""
    rng = np.random.default_rng(seed)
    slot = np.arange(SLOTS)
    there = slot < np.asarray(lengths)[:, None]
    chunked = (np.arange(len(lengths)) % 2 == 1)[:, None] & (slot >= 3)
    role = np.where(there, np.where(slot == 0, PROMPT, POLICY), END)
    nothing = np.zeros(len(lengths))
    return Rows(
        tokens=jnp.asarray(np.where(there, rng.integers(0, VOCABULARY, there.shape), 0)),
        role=jnp.asarray(role),
        position=jnp.asarray(np.where(chunked, slot - 3, slot) + 0 * there),
        attention_start=jnp.asarray(np.where(chunked, 3, 0) + 0 * there),
        log_prob=jnp.zeros(there.shape),
        entropy=jnp.zeros(there.shape),
        mass_cut=jnp.zeros(there.shape),
        calls=nothing,
        truncated=nothing > 0,
        rewards={"gold": nothing},
    )


def first_fit_decreasing(lengths, room):
    """How many bins it takes, in plain Python."""
    bins = []
    for length in sorted((n for n in lengths if n), reverse=True):
        fitting = next((i for i, free in enumerate(bins) if free >= length), None)
        if fitting is None:
            bins.append(room - length)
        else:
            bins[fitting] -= length
    return len(bins)


@pytest.mark.parametrize("seed", range(5))
def test_every_slot_has_a_place_that_reads_its_row_up_to_it(seed):
    lengths = np.random.default_rng(seed).integers(0, SLOTS + 1, COUNT)
    lengths[lengths == 1] = 0
    rows = rows_of(lengths, seed)
    packed = jax.device_get(jax.jit(packing.pack)(rows, rows.response_mask))
    found, tokens = packed.sequences, np.asarray(rows.tokens)
    assert packed.used == first_fit_decreasing(np.maximum(lengths - 1, 0), SLOTS)
    assert (packed.slot[packed.used :] == packing.EMPTY).all()
    taken = set()
    for row, length in enumerate(lengths):
        assert (packed.place[row, max(length, 1) :] == packing.EMPTY).all()
        for slot in range(1, length):
            place = packed.place[row, slot]
            sequence, at = divmod(place, SLOTS)
            assert packed.slot[sequence, at] == row * SLOTS + slot
            assert found.tokens[sequence, at] == tokens[row, slot - 1]
            assert found.target[sequence, at] == tokens[row, slot]
            assert found.position[sequence, at] == rows.position[row, slot - 1]
            seen = range(found.attention_start[sequence, at], at + 1)
            read = [packed.slot[sequence, i] for i in seen]
            assert read == [row * SLOTS + i + 1 for i in range(rows.attention_start[row, slot - 1], slot)]
            taken.add(place)
    assert len(taken) == np.maximum(lengths - 1, 0).sum() == (packed.slot != packing.EMPTY).sum()


@pytest.mark.exhaustive
def test_rows_that_share_sequences_are_predicted_as_alone():
    lengths = [10, 4, 7, 0, 3, 6, 2, 10, 5, 5, 3, 8]
    rows = rows_of(lengths)
    network = Network(gpt2.GPT2(VOCABULARY, SLOTS, gpt2.Size(16, 2, 2)))
    params = jax.tree.map(lambda x: 3 * x, network.init(jax.random.key(0)))
    alone = network.log_prob_and_entropy(params, None, rows, jnp.float32(0.8))
    packed = packing.pack(rows, rows.response_mask)
    assert int(packed.used) < COUNT - 2
    for sizes in (
        packing.PieceSizes(12, 12),
        packing.PieceSizes(4, 4),
        packing.PieceSizes(1, 1),
        packing.PieceSizes(6, 2),
    ):
        shared = packing.apply(packed, sizes, lambda s: network.predict(params, None, s, jnp.float32(0.8)))
        for ours, wanted in zip(shared, alone, strict=True):
            np.testing.assert_allclose(ours, np.where(rows.response_mask, wanted, 0), atol=2e-6)


@pytest.mark.parametrize("sequences", range(1, 70))
def test_halves_and_eighths_come_out_even(sequences):
    sizes = packing.PieceSizes.half_then_eighths(sequences)
    rest = sequences - sizes.first
    assert rest % sizes.later == 0
    assert 0 <= rest <= sequences / 2
    assert rest == 0 if sequences == 1 else rest >= 3 * sequences // 10


@pytest.mark.parametrize(
    ("preset", "microbatches", "wanted"),
    [("grpo", 0, (16, 4)), ("grpo", 4, (8, 8)), ("grpo", 1, (32, 32)), ("dpo", 0, (32, 32)), ("dpo", 4, (8, 8))],
)
def test_pieces_are_of_a_minibatch(preset, microbatches, wanted):
    prompts = 32 if preset == "dpo" else 8
    settings = settings_of(preset)(prompts=prompts, group_size=8, minibatches=2, microbatches=microbatches)
    assert settings.rows == 64
    assert settings.piece_sizes(32) == packing.PieceSizes(*wanted)
    assert settings.uses_packing == (preset == "grpo" and microbatches != 1)


PRESETS = {
    "grpo": ("grpo", 0, {"kl": "none", "kl_coefficient": 0.0}),
    "the ratio of a sequence": ("gspo", 8, {}),
    "a critic, a divergence and a bonus": ("ppo_lm", 0, {"kl": "exact", "kl_in": "loss", "entropy_coefficient": 0.01}),
    "pairs": ("dpo", 4, {}),
}


EXHAUSTIVE = ("grpo", "a critic, a divergence and a bonus", "pairs")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ()) for name in PRESETS]
)
def test_gradients_are_those_of_rows_side_by_side(name, monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
    preset, parts, chosen = PRESETS[name]
    few = {"size": "tiny", "prompts": 8, "group_size": 4, "minibatches": 1, "telemetry": "basic", "warm_start": 0}
    settings, dialogue = settings_of(preset), Ended()

    def learner(parts):
        return _cached_learner(structure_of(dialogue), settings(**few | chosen, microbatches=parts).structure)

    side_by_side, shared = learner(1), learner(parts)
    assert shared.settings.uses_packing == (preset != "dpo")
    numbers = settings(**few | chosen).numbers(3.0)
    params = jax.tree.map(lambda x: 4 * x, side_by_side.policy.init(jax.random.key(1)))
    reference = side_by_side.policy.init(jax.random.key(2))
    trained = {"policy": Trained(params, None)}
    critic = None
    if side_by_side.critic is not None:
        rng = np.random.default_rng(3)
        critic = side_by_side.critic.init(jax.random.key(3))
        critic = jax.tree.map(lambda x: x + jnp.float32(0.1 * rng.normal(size=x.shape)), critic)
        trained["critic"] = Trained(critic, None)
    models = Models(params, critic, reference=reference)

    @jax.jit
    def both(key):
        first, second = (
            made.collector.collect(models, dialogue, numbers, key, Taps()) for made in (side_by_side, shared)
        )
        own = first.batch.rows.response_mask & (jnp.arange(first.batch.rows.response_mask.shape[0]) % 5 != 3)[:, None]
        batch = first.batch.replace(loss_inputs=first.batch.loss_inputs.replace(loss_mask=own))
        moved = {label: Trained(jax.tree.map(lambda x: 1.05 * x, one.params), None) for label, one in trained.items()}
        return (first, second), tuple(
            made.gradient(moved, reference, None, first, batch, jnp.sum(own), Taps()) for made in (side_by_side, shared)
        )

    (first, second), (wanted, found) = jax.device_get(both(jax.random.key(4)))
    own = first.batch.rows.response_mask
    lengths = np.where(own.any(1), dialogue.length - np.argmax(own[:, ::-1], axis=1), 0)
    assert np.ptp(lengths) > 8, "rows of several lengths"
    for one, other in zip(
        jax.tree.leaves(first.batch.loss_inputs), jax.tree.leaves(second.batch.loss_inputs), strict=True
    ):
        np.testing.assert_allclose(np.where(own, one, 0), np.where(own, other, 0), atol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted[0]))
    assert largest > 1e-3
    for one, other in zip(jax.tree.leaves(wanted[0]), jax.tree.leaves(found[0]), strict=True):
        # Attention's key bias has no gradient but for rounding.
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max() + 1e-6 * largest
    for part in wanted[1]:
        np.testing.assert_allclose(found[1][part], wanted[1][part], rtol=1e-4, atol=1e-6, err_msg=part)
    for one, other in zip(jax.tree.leaves(wanted[2]), jax.tree.leaves(found[2]), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


@pytest.mark.exhaustive
def test_a_minibatch_without_own_tokens_has_no_gradient(monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
    few = {"size": "tiny", "prompts": 4, "group_size": 4, "minibatches": 1, "telemetry": "basic", "warm_start": 0}
    settings, dialogue = settings_of("grpo")(**few, kl="none", kl_coefficient=0.0), Hop()
    made = _cached_learner(structure_of(dialogue), settings.structure)
    params = made.policy.init(jax.random.key(1))
    models = Models(params, reference=params)
    experience = jax.jit(lambda key: made.collector.collect(models, dialogue, settings.numbers(3.0), key, Taps()))(
        jax.random.key(0)
    )
    batch = experience.batch.replace(
        loss_inputs=experience.batch.loss_inputs.replace(loss_mask=jnp.zeros((16, dialogue.length), bool))
    )
    found = jax.jit(
        lambda batch: made.gradient({"policy": Trained(params, None)}, None, None, experience, batch, 1.0, Taps())
    )(batch)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(found))
