"""Tests complete dialogue learners: what they learn, how they sample, and that lanes share programs."""

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
    """Guess a number from 0 to 3 in two tries; after the first, a tool tells whether it is higher or lower."""

    vocabulary, length, reply_length = 7, 4, 1
    result_tokens, result_error = (LOWER, HIGHER), (BEGIN,)

    def reset(self, key, difficulty):
        return (jax.random.randint(key, (), 0, 4), jnp.bool_(False)), self.prompt([BEGIN])

    def respond(self, state, token):
        secret, _ = state
        hint = self.result(jnp.where(secret > token, HIGHER, LOWER)[None])
        right = token == secret
        return (secret, right), self.choose(right, self.end(), self.choose(token < 4, hint, self.own()))

    def reward(self, state):
        return {"gold": state[1].astype(jnp.float32)}


@dataclass(frozen=True)
class Constant(ja.Dialogue):
    """A dialogue of one response token, which earns one half whatever it is."""

    vocabulary, length, reply_length = 3, 3, 1

    def reset(self, key, difficulty):
        return jnp.int32(0), self.prompt([0])

    def respond(self, state, token):
        return state + 1, self.choose(state >= 1, self.end(), self.own())

    def reward(self, state):
        return {"gold": jnp.float32(0.5)}


@dataclass(frozen=True)
class Short(ja.Dialogue):
    """One to five response tokens, whatever they are, with a new chunk after the second; 15 slots would fit."""

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


SMALL = {"size": "tiny", "prompts": 8, "group_size": 8, "epochs": 1, "warm_start": 0, "telemetry": "basic"}


def learner(preset="grpo", dialogue=None, **settings):
    return getattr(ja.learners, preset)(dialogue or Guess(), **SMALL | settings)


def train(learner, steps, seeds=2):
    """Trains lanes outside an audit, and returns their telemetry and last states."""

    def lane(key):
        def step(state, t):
            return learner.step(state, jax.random.fold_in(key, t), Taps(t, steps, data=learner.data))

        return jax.lax.scan(step, learner.begin(key, learner.data), jnp.arange(steps))

    state, telemetry = jax.jit(jax.vmap(lane))(jax.random.split(jax.random.key(0), seeds))
    return {name: np.asarray(x) for name, x in telemetry.items()}, state


@pytest.fixture(scope="module")
def audited():
    """Returns telemetry of a grid with a neutral lane, a lane with tool errors, and one with a higher learning rate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
        conditions = [ja.tool_error(ja.sweep(0.0, 1.0), onset=100), ja.lr_spike(30.0, onset=100, duration=5)]
        return ja.audit(
            learner(learning_rate=5e-3, kl="none", kl_coefficient=0.0), conditions, seeds=2, steps=120
        ).telemetry


@pytest.mark.exhaustive
def test_grpo_learns_to_use_the_hint(audited):
    """Guesses without the hint are right with probability 7/16 in two tries; guesses that use it, with 3/4."""
    control = audited.performance.values[:, 0]
    assert control[:, :2].mean() < 0.55
    assert control[:, -10:].mean() > 0.6


@pytest.mark.exhaustive
def test_a_neutral_lane_equals_the_control_bitwise_and_others_differ(audited):
    channels = [name for name in audited.data_vars if audited[name].dims[:2] == ("seed", "condition")]
    assert {"performance", "entropy", "x_grad"} <= set(channels)
    for name in channels:
        values = audited[name].values
        assert np.array_equal(values[:, 0], values[:, 1], equal_nan=True), name
    after = audited.performance.values[:, :, 101:]
    for condition in (2, 3):
        assert not np.array_equal(after[:, 0], after[:, condition])


@pytest.mark.exhaustive
def test_tool_errors_lower_the_acting_performance_at_once(audited):
    acting = audited.acting_performance.values[:, :, 100:110].mean(axis=(0, 2))
    assert acting[2] < acting[0] - 0.05


@pytest.mark.exhaustive
def test_sampler_and_trainer_agree_after_fifty_iterations_at_rate_zero():
    settings = settings_of("grpo")(**SMALL, learning_rate=0.0)
    algorithm = _cached_learner(structure_of(Guess()), settings.structure)
    grpo = learner(learning_rate=0.0)
    telemetry, state = train(grpo, 50)
    assert np.ptp(telemetry["params_norm"], axis=1).max() == 0
    assert np.abs(telemetry["performance"] - telemetry["performance"][:, :1]).max() == 0

    def gap(params, key):
        rows = algorithm.collector.sample_undisturbed(
            params, None, grpo.data.dialogue or Guess(), grpo.data.numbers, key, 256
        )
        recomputed = algorithm.policy.log_prob_and_entropy(params, None, rows, grpo.data.numbers.temperature)[0]
        return jnp.max(jnp.where(rows.response_mask, jnp.abs(recomputed - rows.log_prob), 0.0)), rows

    gaps, rows = jax.jit(jax.vmap(gap))(state.policy.params, jax.random.split(jax.random.key(7), 2))
    assert float(gaps.max()) < 1e-5
    roles, tokens = np.asarray(rows.role), np.asarray(rows.tokens)
    assert set(np.unique(tokens[roles == TOOL])) == {LOWER, HIGHER}
    assert (roles == POLICY).any()
    assert (np.asarray(rows.log_prob)[roles != POLICY] == 0).all()


@pytest.mark.exhaustive
def test_sampled_log_probabilities_save_a_forward_pass_of_the_trainer():
    """The iteration is the same up to rounding, entropy included, with fewer matrix products."""
    settings = {"kl": "none", "kl_coefficient": 0.0, "microbatches": 1, "learning_rate": 5e-3}
    recomputed, sampled = (learner(**settings, old_log_probability=name) for name in ("recomputed", "sampled"))
    state = jax.jit(recomputed.begin)(jax.random.key(0), recomputed.data)

    def compile_and_step(dialogue_learner):
        step = jax.jit(lambda state, key: dialogue_learner.step(state, key, Taps(0, 1, data=dialogue_learner.data)))
        traced = step.trace(state, jax.random.key(1))
        return traced.lower().compile()(state, jax.random.key(1)), str(traced.jaxpr).count("dot_general")

    (after, telemetry), n_products = compile_and_step(recomputed)
    (after_sampled, telemetry_sampled), n_products_sampled = compile_and_step(sampled)
    assert n_products_sampled < n_products
    assert float(telemetry["entropy"][:3].min()) > 0.5, "the comparison needs some entropy"
    for name, x in telemetry.items():
        np.testing.assert_allclose(x, telemetry_sampled[name], rtol=1e-4, atol=1e-5, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), after.policy.params, after_sampled.policy.params
    )


def test_the_samplers_entropy_ignores_truncation_and_propagates_nan():
    logits = jnp.array([[jnp.log(3.0), -jnp.inf, 0.0], [0.0, jnp.nan, 0.0]])
    sampler = rollout.Sampler(_cached_learner(Guess(), settings_of("grpo")(**SMALL)).policy.model, top_k=1)
    entropy = sampler.sample(logits, jnp.zeros(2), 1.0)[1].entropy
    np.testing.assert_allclose(entropy, [np.log(4) - 0.75 * np.log(3), np.nan], rtol=1e-6)


def test_a_preference_objective_never_uses_sampled_log_probabilities():
    """A preference objective has no ratio, so its entropy is the trainer's, whichever policy sampled its rows."""
    assert not ObjectiveConfig(objective="preference", old_log_probability="sampled").old_log_prob_is_sampled
    assert ObjectiveConfig(old_log_probability="sampled").old_log_prob_is_sampled


def assert_same_rows(a, b):
    """Asserts equal tokens and roles, and floating-point values equal to a few units in the last place."""
    if np.issubdtype(a.dtype, np.floating):
        np.testing.assert_allclose(a, b, rtol=5e-7, atol=5e-7)
    else:
        np.testing.assert_array_equal(a, b)


@pytest.mark.exhaustive
def test_sampling_stops_when_all_rows_of_all_lanes_have_ended(monkeypatch):
    """Sampling takes as many decoding steps as the longest row; rows equal those of a loop over all slots, to rounding.

    Three programs are compared: jaxlib 0.10 gives equal bits, 0.11 log-probabilities that differ in the last bit.
    """
    algorithm = learner(dialogue=Short()).step.__self__
    numbers = learner(dialogue=Short()).data.numbers
    params = algorithm.policy.init(jax.random.key(0))
    decode, decoded_slots = sampling.decode, []

    def recording_decode(model, unrolled, token, position, first, slot, cache):
        jax.debug.callback(decoded_slots.append, slot)
        return decode(model, unrolled, token, position, first, slot, cache)

    monkeypatch.setattr(sampling, "decode", recording_decode)

    def sampled(count):
        decoded_slots.clear()
        lanes = jax.random.split(jax.random.key(4), count)
        sample = jax.jit(
            jax.vmap(lambda key: algorithm.collector.sample_undisturbed(params, None, Short(), numbers, key, 2))
        )
        rows = jax.block_until_ready(sample(lanes))
        jax.effects_barrier()
        return rows, len({int(slot) for slot in decoded_slots})

    rows, turns_of_one = sampled(1)
    rows_of_four, turns_of_four = sampled(4)
    with monkeypatch.context() as patch:
        patch.setattr(sampling, "all_finished", lambda over: jnp.zeros((), bool))
        rows_of_full_loop, turns_of_full_loop = sampled(4)
    jax.tree.map(assert_same_rows, rows_of_four, rows_of_full_loop)
    jax.tree.map(lambda a, b: assert_same_rows(a, b[:1]), rows, sampled(4)[0])
    lengths = np.sum(np.asarray(rows_of_four.role) != END, axis=-1) - 1
    assert (turns_of_one, turns_of_four, turns_of_full_loop) == (lengths[0].max(), lengths.max(), 14)
    assert turns_of_one < turns_of_four, "the test needs lanes of different lengths"


@pytest.mark.exhaustive
def test_first_tokens_are_sampled_with_the_policys_probabilities():
    """Tests the first response tokens of many rows against the softmax of a complete forward pass."""
    from scipy import stats

    grpo = learner()
    algorithm = _cached_learner(structure_of(Guess()), settings_of("grpo")(**SMALL).structure)
    params = jax.tree.map(lambda x: 8.0 * x, algorithm.policy.init(jax.random.key(3)))
    rows = jax.jit(
        lambda key: algorithm.collector.sample_undisturbed(params, None, Guess(), grpo.data.numbers, key, 4096)
    )(jax.random.key(5))
    hidden = algorithm.policy.hidden(params, None, jax.tree.map(lambda x: x[:1], rows))[0, 0]
    probs = np.asarray(jax.nn.softmax(gpt2.logits(params, hidden)), np.float64)
    counts = np.bincount(np.asarray(rows.tokens)[:, 1], minlength=Guess.vocabulary)
    assert probs.max() > 1.5 / Guess.vocabulary
    assert stats.chisquare(counts, 4096 * probs / probs.sum()).pvalue > 1e-3


@pytest.mark.exhaustive
def test_sampled_tokens_are_independent_between_slots_and_rows():
    """For a policy with uniform probabilities, a token is independent of the row's next token and of the next row's."""
    from scipy import stats

    algorithm, numbers = learner(dialogue=Short()).step.__self__, learner(dialogue=Short()).data.numbers
    params = jax.tree.map(jnp.zeros_like, algorithm.policy.init(jax.random.key(0)))
    rows = algorithm.collector.sample_undisturbed(params, None, Short(), numbers, jax.random.key(5), 4096)
    first, second = np.asarray(rows.tokens)[np.asarray(rows.role[:, 3]) == POLICY][:, [1, 3]].T
    pairs = {"slots": (first, second), "rows": (first[:-1], first[1:])}
    for name, (x, y) in pairs.items():
        counts = np.bincount(5 * x + y, minlength=25)
        assert stats.chisquare(counts).pvalue > 1e-3, name


@pytest.mark.exhaustive
def test_a_value_model_converges_to_a_constant_reward():
    ppo = learner("ppo_lm", Constant(), critic_warm_start=0, kl="none", kl_coefficient=0.0, learning_rate=0.0)
    _, state = train(ppo, 60)
    algorithm = _cached_learner(
        structure_of(Constant()),
        settings_of("ppo_lm")(**SMALL, critic_warm_start=0, kl="none", kl_coefficient=0.0).structure,
    )
    numbers = ppo.data.numbers

    def values(params, critic):
        rows = algorithm.collector.sample_undisturbed(params, None, Constant(), numbers, jax.random.key(1), 16)
        return algorithm.critic.values(critic, None, rows), rows.response_mask

    predicted, response_mask = jax.jit(jax.vmap(values))(state.policy.params, state.critic.params)
    assert np.abs(np.asarray(predicted)[np.asarray(response_mask)] - 0.5).max() < 0.05


def test_learners_that_differ_in_numbers_alone_are_equal():
    default, changed = learner(), learner(learning_rate=1e-2, clip_high=0.3, temperature=0.9, kl_coefficient=0.2)
    assert default == changed
    assert default.without_data == changed.without_data
    assert learner(epochs=2) != default
    assert NO_TOKEN < 0
