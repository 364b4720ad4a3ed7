"""Tests packing: rows that share a sequence are predicted as if alone, and gradients equal those of unpacked rows."""

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
    """A dialogue whose reward is 1 if the policy ended it, which a random policy does in some of the rows."""

    def reward(self, state):
        return super().reward(state) | {"gold": state.ended.astype(jnp.float32)}


def rows_of(lengths, seed=0):
    """Returns rows of these lengths, with one prompt token each; every second row begins a chunk at slot 3."""
    rng = np.random.default_rng(seed)
    slot = np.arange(SLOTS)
    exists = slot < np.asarray(lengths)[:, None]
    chunked = (np.arange(len(lengths)) % 2 == 1)[:, None] & (slot >= 3)
    role = np.where(exists, np.where(slot == 0, PROMPT, POLICY), END)
    zeros = np.zeros(len(lengths))
    return Rows(
        tokens=jnp.asarray(np.where(exists, rng.integers(0, VOCABULARY, exists.shape), 0)),
        role=jnp.asarray(role),
        position=jnp.asarray(np.where(chunked, slot - 3, slot) + 0 * exists),
        attention_start=jnp.asarray(np.where(chunked, 3, 0) + 0 * exists),
        log_prob=jnp.zeros(exists.shape),
        entropy=jnp.zeros(exists.shape),
        mass_cut=jnp.zeros(exists.shape),
        calls=zeros,
        truncated=zeros > 0,
        rewards={"gold": zeros},
    )


def first_fit_decreasing(lengths, room):
    """Returns the number of bins that the heuristic takes, in plain Python."""
    bins = []
    for length in sorted((n for n in lengths if n), reverse=True):
        fitting = next((i for i, free in enumerate(bins) if free >= length), None)
        if fitting is None:
            bins.append(room - length)
        else:
            bins[fitting] -= length
    return len(bins)


@pytest.mark.parametrize("seed", range(5))
def test_every_packed_slot_attends_exactly_to_its_rows_earlier_slots(seed):
    lengths = np.random.default_rng(seed).integers(0, SLOTS + 1, COUNT)
    lengths[lengths == 1] = 0
    rows = rows_of(lengths, seed)
    packed = jax.device_get(jax.jit(packing.pack)(rows, rows.response_mask))
    sequences, tokens = packed.sequences, np.asarray(rows.tokens)
    assert packed.used == first_fit_decreasing(np.maximum(lengths - 1, 0), SLOTS)
    assert (packed.slot[packed.used :] == packing.EMPTY).all()
    occupied = set()
    for row, length in enumerate(lengths):
        assert (packed.place[row, max(length, 1) :] == packing.EMPTY).all()
        for slot in range(1, length):
            place = packed.place[row, slot]
            sequence, at = divmod(place, SLOTS)
            assert packed.slot[sequence, at] == row * SLOTS + slot
            assert sequences.tokens[sequence, at] == tokens[row, slot - 1]
            assert sequences.target[sequence, at] == tokens[row, slot]
            assert sequences.position[sequence, at] == rows.position[row, slot - 1]
            visible = range(sequences.attention_start[sequence, at], at + 1)
            attended = [packed.slot[sequence, i] for i in visible]
            assert attended == [row * SLOTS + i + 1 for i in range(rows.attention_start[row, slot - 1], slot)]
            occupied.add(place)
    assert len(occupied) == np.maximum(lengths - 1, 0).sum() == (packed.slot != packing.EMPTY).sum()


@pytest.mark.exhaustive
def test_predictions_of_packed_rows_equal_those_of_rows_alone():
    lengths = [10, 4, 7, 0, 3, 6, 2, 10, 5, 5, 3, 8]
    rows = rows_of(lengths)
    network = Network(gpt2.GPT2(VOCABULARY, SLOTS, gpt2.Size(16, 2, 2)))
    params = jax.tree.map(lambda x: 3 * x, network.init(jax.random.key(0)))
    unpacked = network.log_prob_and_entropy(params, None, rows, jnp.float32(0.8))
    packed = packing.pack(rows, rows.response_mask)
    assert int(packed.used) < COUNT - 2
    for sizes in (
        packing.PieceSizes(12, 12),
        packing.PieceSizes(4, 4),
        packing.PieceSizes(1, 1),
        packing.PieceSizes(6, 2),
    ):
        repacked = packing.apply(packed, sizes, lambda s: network.predict(params, None, s, jnp.float32(0.8)))
        for result, expected in zip(repacked, unpacked, strict=True):
            np.testing.assert_allclose(result, np.where(rows.response_mask, expected, 0), atol=2e-6)


@pytest.mark.parametrize("sequences", range(1, 70))
def test_half_then_eighths_covers_all_sequences(sequences):
    sizes = packing.PieceSizes.half_then_eighths(sequences)
    remaining = sequences - sizes.first
    assert remaining % sizes.later == 0
    assert 0 <= remaining <= sequences / 2
    assert remaining == 0 if sequences == 1 else remaining >= 3 * sequences // 10


@pytest.mark.parametrize(
    ("preset", "microbatches", "expected"),
    [("grpo", 0, (16, 4)), ("grpo", 4, (8, 8)), ("grpo", 1, (32, 32)), ("dpo", 0, (32, 32)), ("dpo", 4, (8, 8))],
)
def test_piece_sizes_follow_from_the_minibatch_and_microbatches(preset, microbatches, expected):
    prompts = 32 if preset == "dpo" else 8
    settings = settings_of(preset)(prompts=prompts, group_size=8, minibatches=2, microbatches=microbatches)
    assert settings.rows == 64
    assert settings.piece_sizes(32) == packing.PieceSizes(*expected)
    assert settings.uses_packing == (preset == "grpo" and microbatches != 1)


PRESETS = {
    "grpo": ("grpo", 0, {"kl": "none", "kl_coefficient": 0.0}),
    "the ratio of a sequence": ("gspo", 8, {}),
    "a critic, a divergence and a bonus": ("ppo_lm", 0, {"kl": "exact", "kl_in": "loss", "entropy_coefficient": 0.01}),
    "pairs": ("dpo", 4, {}),
}


EXHAUSTIVE = ("grpo", "the ratio of a sequence", "a critic, a divergence and a bonus", "pairs")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name in EXHAUSTIVE else ()) for name in PRESETS]
)
def test_gradients_of_packed_rows_equal_those_of_unpacked_rows(name, monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
    preset, parts, changes = PRESETS[name]
    small = {"size": "tiny", "prompts": 8, "group_size": 4, "minibatches": 1, "telemetry": "basic", "warm_start": 0}
    settings, dialogue = settings_of(preset), Ended()

    def learner(parts):
        return _cached_learner(structure_of(dialogue), settings(**small | changes, microbatches=parts).structure)

    unpacked, packed = learner(1), learner(parts)
    assert packed.settings.uses_packing == (preset != "dpo")
    numbers = settings(**small | changes).numbers(3.0)
    params = jax.tree.map(lambda x: 4 * x, unpacked.policy.init(jax.random.key(1)))
    reference = unpacked.policy.init(jax.random.key(2))
    trained = {"policy": Trained(params, None)}
    critic = None
    if unpacked.critic is not None:
        rng = np.random.default_rng(3)
        critic = unpacked.critic.init(jax.random.key(3))
        critic = jax.tree.map(lambda x: x + jnp.float32(0.1 * rng.normal(size=x.shape)), critic)
        trained["critic"] = Trained(critic, None)
    models = Models(params, critic, reference=reference)

    @jax.jit
    def both(key):
        first, second = (
            learner.collector.collect(models, dialogue, numbers, key, Taps()) for learner in (unpacked, packed)
        )
        loss_mask = (
            first.batch.rows.response_mask & (jnp.arange(first.batch.rows.response_mask.shape[0]) % 5 != 3)[:, None]
        )
        batch = first.batch.replace(loss_inputs=first.batch.loss_inputs.replace(loss_mask=loss_mask))
        changed = {label: Trained(jax.tree.map(lambda x: 1.05 * x, t.params), None) for label, t in trained.items()}
        return (first, second), tuple(
            learner.gradient(changed, reference, None, first, batch, jnp.sum(loss_mask), Taps())
            for learner in (unpacked, packed)
        )

    (first, second), (expected, result) = jax.device_get(both(jax.random.key(4)))
    response_mask = first.batch.rows.response_mask
    lengths = np.where(response_mask.any(1), dialogue.length - np.argmax(response_mask[:, ::-1], axis=1), 0)
    assert np.ptp(lengths) > 8, "rows of several lengths"
    for x, y in zip(jax.tree.leaves(first.batch.loss_inputs), jax.tree.leaves(second.batch.loss_inputs), strict=True):
        np.testing.assert_allclose(np.where(response_mask, x, 0), np.where(response_mask, y, 0), atol=1e-5)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected[0]))
    assert largest > 1e-3
    for x, y in zip(jax.tree.leaves(expected[0]), jax.tree.leaves(result[0]), strict=True):
        # The key bias of attention has no gradient except for rounding.
        assert np.abs(x - y).max() <= 1e-5 * np.abs(x).max() + 1e-6 * largest
    for part in expected[1]:
        np.testing.assert_allclose(result[1][part], expected[1][part], rtol=1e-4, atol=1e-6, err_msg=part)
    for x, y in zip(jax.tree.leaves(expected[2]), jax.tree.leaves(result[2]), strict=True):
        np.testing.assert_allclose(y, x, atol=1e-5)


@pytest.mark.exhaustive
def test_a_minibatch_with_an_empty_loss_mask_has_zero_gradient(monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
    small = {"size": "tiny", "prompts": 4, "group_size": 4, "minibatches": 1, "telemetry": "basic", "warm_start": 0}
    settings, dialogue = settings_of("grpo")(**small, kl="none", kl_coefficient=0.0), Hop()
    learner = _cached_learner(structure_of(dialogue), settings.structure)
    params = learner.policy.init(jax.random.key(1))
    models = Models(params, reference=params)
    experience = jax.jit(lambda key: learner.collector.collect(models, dialogue, settings.numbers(3.0), key, Taps()))(
        jax.random.key(0)
    )
    batch = experience.batch.replace(
        loss_inputs=experience.batch.loss_inputs.replace(loss_mask=jnp.zeros((16, dialogue.length), bool))
    )
    gradient = jax.jit(
        lambda batch: learner.gradient({"policy": Trained(params, None)}, None, None, experience, batch, 1.0, Taps())
    )(batch)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradient))
