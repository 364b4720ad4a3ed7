"""Learners on dialogues as a whole: what they learn, what they leave alone, and that a lane is what its seed says."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.protocol import END, NO_TOKEN, POLICY, TOOL
from jaxaudit.learners.dialogue import rollout
from jaxaudit.learners.dialogue.factories import _cached_learner, settings_of, structure_of
from jaxaudit.learners.dialogue.objective import ObjectiveConfig
from jaxaudit.models import gpt2, sampling

pytestmark = pytest.mark.long

LOWER, HIGHER, BEGIN = 4, 5, 6


@dataclass(frozen=True)
class Guess(ja.Dialogue):
    """Guess a number from 0 to 3 in two tries, told once whether it is higher or lower."""

    vocabulary, length, reply_length = 7, 4, 1
    result_tokens, result_error = (LOWER, HIGHER), (BEGIN,)

    def reset(self, key, difficulty):
        return (jax.random.randint(key, (), 0, 4), jnp.bool_(False)), self.prompt([BEGIN])

    def respond(self, state, token):
        secret, _ = state
        hint = self.result(jnp.where(secret > token, HIGHER, LOWER)[None])
        found = token == secret
        return (secret, found), self.choose(found, self.end(), self.choose(token < 4, hint, self.own()))

    def reward(self, state):
        return {"gold": state[1].astype(jnp.float32)}


@dataclass(frozen=True)
class Constant(ja.Dialogue):
    """One token, whatever it is, earns one half."""

    vocabulary, length, reply_length = 3, 3, 1

    def reset(self, key, difficulty):
        return jnp.int32(0), self.prompt([0])

    def respond(self, state, token):
        return state + 1, self.choose(state >= 1, self.end(), self.own())

    def reward(self, state):
        return {"gold": jnp.float32(0.5)}


@dataclass(frozen=True)
class Short(ja.Dialogue):
    """One to five tokens with the prompt, whatever they are, a new chunk after the second; 15 would fit."""

    vocabulary, length, reply_length = 5, 15, 1

    def reset(self, key, difficulty):
        return (jax.random.randint(key, (), 1, 6), jnp.int32(0)), self.prompt([0])

    def respond(self, state, token):
        most, count = state[0], state[1] + 1
        return (most, count), self.choose(
            count >= most, self.end(), self.choose(count == 2, self.prompt([3], fresh=True), self.own())
        )

    def reward(self, state):
        return {"gold": state[1].astype(jnp.float32)}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))


FEW = {"size": "tiny", "prompts": 8, "group_size": 8, "epochs": 1, "warm_start": 0, "telemetry": "basic"}


def learner(preset="grpo", dialogue=None, **settings):
    return getattr(ja.learners, preset)(dialogue or Guess(), **FEW | settings)


def trained(one, steps, seeds=2):
    """Telemetry of lanes trained alone, and their last states."""

    def lane(key):
        def step(state, t):
            return one.step(state, jax.random.fold_in(key, t), Taps(t, steps, data=one.data))

        return jax.lax.scan(step, one.begin(key, one.data), jnp.arange(steps))

    state, telemetry = jax.jit(jax.vmap(lane))(jax.random.split(jax.random.key(0), seeds))
    return {name: np.asarray(x) for name, x in telemetry.items()}, state


@pytest.fixture(scope="module")
def audited():
    """A grid with a neutral lane, a disturbed one, and one whose tool lies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
        conditions = [ja.tool_error(ja.sweep(0.0, 1.0), onset=100), ja.lr_spike(30.0, onset=100, duration=5)]
        return ja.audit(
            learner(learning_rate=5e-3, kl="none", kl_coefficient=0.0), conditions, seeds=2, steps=120
        ).telemetry


@pytest.mark.exhaustive
def test_it_learns_to_guess_better_than_chance(audited):
    """Blind guesses find one of four in two tries with 7/16; who uses the hint, with 3/4."""
    control = audited.performance.values[:, 0]
    assert control[:, :2].mean() < 0.55
    assert control[:, -10:].mean() > 0.6


@pytest.mark.exhaustive
def test_a_neutral_lane_is_bitwise_the_control_and_others_are_not(audited):
    told = [name for name in audited.data_vars if audited[name].dims[:2] == ("seed", "condition")]
    assert {"performance", "entropy", "x_grad"} <= set(told)
    for name in told:
        values = audited[name].values
        assert np.array_equal(values[:, 0], values[:, 1], equal_nan=True), name
    after = audited.performance.values[:, :, 101:]
    for condition in (2, 3):
        assert not np.array_equal(after[:, 0], after[:, condition])


@pytest.mark.exhaustive
def test_a_tool_that_fails_harms_acting_at_once(audited):
    acting = audited.acting_performance.values[:, :, 100:110].mean(axis=(0, 2))
    assert acting[2] < acting[0] - 0.05


@pytest.mark.exhaustive
def test_at_rate_zero_sampler_and_trainer_agree_for_fifty_iterations():
    settings = settings_of("grpo")(**FEW, learning_rate=0.0)
    made = _cached_learner(structure_of(Guess()), settings.structure)
    one = learner(learning_rate=0.0)
    told, state = trained(one, 50)
    assert np.ptp(told["params_norm"], axis=1).max() == 0
    assert np.abs(told["performance"] - told["performance"][:, :1]).max() == 0

    def gap(params, key):
        rows = made.collector.sample_undisturbed(params, None, one.data.dialogue or Guess(), one.data.numbers, key, 256)
        again = made.policy.log_prob_and_entropy(params, None, rows, one.data.numbers.temperature)[0]
        return jnp.max(jnp.where(rows.response_mask, jnp.abs(again - rows.log_prob), 0.0)), rows

    found, rows = jax.jit(jax.vmap(gap))(state.policy.params, jax.random.split(jax.random.key(7), 2))
    assert float(found.max()) < 1e-5
    roles, tokens = np.asarray(rows.role), np.asarray(rows.tokens)
    assert set(np.unique(tokens[roles == TOOL])) == {LOWER, HIGHER}
    assert (roles == POLICY).any()
    assert (np.asarray(rows.log_prob)[roles != POLICY] == 0).all()


@pytest.mark.exhaustive
def test_the_samplers_log_probabilities_spare_the_trainer_a_reading_of_the_rows():
    """The same iteration to rounding, entropy included, with fewer products."""
    settings = {"kl": "none", "kl_coefficient": 0.0, "microbatches": 1, "learning_rate": 5e-3}
    read, spared = (learner(**settings, old_log_probability=name) for name in ("recomputed", "sampled"))
    state = jax.jit(read.begin)(jax.random.key(0), read.data)

    def stepped(one):
        step = jax.jit(lambda state, key: one.step(state, key, Taps(0, 1, data=one.data)))
        traced = step.trace(state, jax.random.key(1))
        return traced.lower().compile()(state, jax.random.key(1)), str(traced.jaxpr).count("dot_general")

    (after, told), products = stepped(read)
    (again, told_again), fewer = stepped(spared)
    assert fewer < products
    assert float(told["entropy"][:3].min()) > 0.5, "or there is none to compare"
    for name, x in told.items():
        np.testing.assert_allclose(x, told_again[name], rtol=1e-4, atol=1e-5, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), after.policy.params, again.policy.params)


def test_the_samplers_entropy_is_before_truncation_and_a_nan_comes_through():
    logits = jnp.array([[jnp.log(3.0), -jnp.inf, 0.0], [0.0, jnp.nan, 0.0]])
    one_left = rollout.Sampler(_cached_learner(Guess(), settings_of("grpo")(**FEW)).policy.model, top_k=1)
    entropy = one_left.sample(logits, jnp.zeros(2), 1.0)[1].entropy
    np.testing.assert_allclose(entropy, [np.log(4) - 0.75 * np.log(3), np.nan], rtol=1e-6)


def test_pairs_follow_no_sampler():
    """A preference objective has no ratio, so its entropy is the trainer's, whatever its rows were sampled from."""
    assert not ObjectiveConfig(objective="preference", old_log_probability="sampled").old_log_prob_is_sampled
    assert ObjectiveConfig(old_log_probability="sampled").old_log_prob_is_sampled


def assert_same_rows(a, b):
    """Equal tokens and roles; floating-point values to a few units in their last place."""
    if np.issubdtype(a.dtype, np.floating):
        np.testing.assert_allclose(a, b, rtol=5e-7, atol=5e-7)
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.exhaustive
def test_sampling_leaves_off_when_all_rows_of_all_lanes_are_over(monkeypatch):
    """The rows of all slots, in as many turns as the longest of them has; what is computed with them, to rounding.

    These are three programs: jaxlib 0.10 gives them the same bits, 0.11 log-probabilities that differ in the last one.
    """
    made = learner(dialogue=Short()).step.__self__
    numbers = learner(dialogue=Short()).data.numbers
    params = made.policy.init(jax.random.key(0))
    decode, turns = sampling.decode, []

    def counted(model, unrolled, token, position, first, slot, cache):
        jax.debug.callback(turns.append, slot)
        return decode(model, unrolled, token, position, first, slot, cache)

    monkeypatch.setattr(sampling, "decode", counted)

    def sampled(count):
        turns.clear()
        lanes = jax.random.split(jax.random.key(4), count)
        draw = jax.jit(jax.vmap(lambda key: made.collector.sample_undisturbed(params, None, Short(), numbers, key, 2)))
        rows = jax.block_until_ready(draw(lanes))
        jax.effects_barrier()
        return rows, len({int(slot) for slot in turns})

    rows, few = sampled(1)
    more, most = sampled(4)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "all_finished", lambda over: jnp.zeros((), bool))
        every, all_turns = sampled(4)
    jax.tree.map(assert_same_rows, more, every)
    jax.tree.map(lambda a, b: assert_same_rows(a, b[:1]), rows, sampled(4)[0])
    written = np.sum(np.asarray(more.role) != END, axis=-1) - 1
    assert (few, most, all_turns) == (written[0].max(), written.max(), 14)
    assert few < most, "or lanes would not differ"


@pytest.mark.exhaustive
def test_tokens_are_drawn_with_the_policys_probabilities():
    """The first own token over many rows, against the softmax of the full forward pass."""
    from scipy import stats

    one = learner()
    made = _cached_learner(structure_of(Guess()), settings_of("grpo")(**FEW).structure)
    params = jax.tree.map(lambda x: 8.0 * x, made.policy.init(jax.random.key(3)))
    rows = jax.jit(lambda key: made.collector.sample_undisturbed(params, None, Guess(), one.data.numbers, key, 4096))(
        jax.random.key(5)
    )
    hidden = made.policy.hidden(params, None, jax.tree.map(lambda x: x[:1], rows))[0, 0]
    wanted = np.asarray(jax.nn.softmax(gpt2.logits(params, hidden)), np.float64)
    counts = np.bincount(np.asarray(rows.tokens)[:, 1], minlength=Guess.vocabulary)
    assert wanted.max() > 1.5 / Guess.vocabulary
    assert stats.chisquare(counts, 4096 * wanted / wanted.sum()).pvalue > 1e-3


@pytest.mark.exhaustive
def test_each_slot_of_each_row_has_a_draw_of_its_own():
    """Of a policy to which all tokens are alike: neither a row's next token nor the next row's tells anything."""
    from scipy import stats

    made, numbers = learner(dialogue=Short()).step.__self__, learner(dialogue=Short()).data.numbers
    params = jax.tree.map(jnp.zeros_like, made.policy.init(jax.random.key(0)))
    rows = made.collector.sample_undisturbed(params, None, Short(), numbers, jax.random.key(5), 4096)
    first, second = np.asarray(rows.tokens)[np.asarray(rows.role[:, 3]) == POLICY][:, [1, 3]].T
    pairs = {"slots": (first, second), "rows": (first[:-1], first[1:])}
    for name, (one, other) in pairs.items():
        counts = np.bincount(5 * one + other, minlength=25)
        assert stats.chisquare(counts).pvalue > 1e-3, name


@pytest.mark.exhaustive
def test_a_value_model_on_a_constant_reward_converges_to_it():
    one = learner("ppo_lm", Constant(), critic_warm_start=0, kl="none", kl_coefficient=0.0, learning_rate=0.0)
    _, state = trained(one, 60)
    made = _cached_learner(
        structure_of(Constant()),
        settings_of("ppo_lm")(**FEW, critic_warm_start=0, kl="none", kl_coefficient=0.0).structure,
    )
    numbers = one.data.numbers

    def values(params, critic):
        rows = made.collector.sample_undisturbed(params, None, Constant(), numbers, jax.random.key(1), 16)
        return made.critic.values(critic, None, rows), rows.response_mask

    found, own = jax.jit(jax.vmap(values))(state.policy.params, state.critic.params)
    assert np.abs(np.asarray(found)[np.asarray(own)] - 0.5).max() < 0.05


def test_other_numbers_compile_nothing():
    one, other = learner(), learner(learning_rate=1e-2, clip_high=0.3, temperature=0.9, kl_coefficient=0.2)
    assert one == other
    assert one.without_data == other.without_data
    assert learner(epochs=2) != one
    assert NO_TOKEN < 0
