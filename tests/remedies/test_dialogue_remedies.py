"""Remedies in whole learners on dialogues: settings, coefficients, what is collected, and what is refused."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errand import Errand, random_params
from token_loops import (
    advantages_by_loop,
    covariances_by_loop,
    lambdas_by_length,
    random_rows,
    with_remedies,
)

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.taps import ROOT, Taps
from jaxaudit.learners.dialogue.collection import Models, sampled_entropy, tap_coefficients
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.objective import ObjectiveConfig
from jaxaudit.models import gpt2

# Learners with remedies.

FEW = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "minibatches": 1, "microbatches": 1}
FEW |= {"performance_rows": 2, "warm_start": 0, "telemetry": "basic"}


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
        yield


@functools.cache
def learner(preset, **settings):
    few = FEW | ({"group_size": 2} if preset == "dpo" else {})
    return getattr(ja.learners, preset)(Errand(), **few | settings)


def inside(one):
    """The learner on a dialogue within one that remedies may act in."""
    made = one.step.__self__
    return getattr(made, "learner", one).step.__self__


TIS = {"correction": "tis", "correction_level": "token"}
MIS = {"correction": "mis", "correction_level": "token"}
OF_SEQUENCES = {"correction": "mis", "correction_level": "sequence"}
IN_REWARD = {"kl": "k1", "kl_in": "reward", "kl_weight": "none"}
IN_LOSS = {"kl": "k3", "kl_in": "loss", "kl_weight": "ratio"}
SETTINGS = [
    ("grpo", "dual_clip", 4.0, {}, {"dual_clip": 4.0}),
    ("ppo_lm", "dual_clip", None, {}, {"dual_clip": 3.0}),
    ("grpo", "truncated_importance", None, TIS, {"tis_cap": 2.0}),
    ("ppo_lm", "truncated_importance", 1.5, TIS, {"tis_cap": 1.5}),
    ("grpo", "masked_importance", None, MIS, {"mis_low": 0.5, "mis_high": 2.0}),
    ("grpo", "masked_importance", 4.0, MIS, {"mis_low": 0.25, "mis_high": 4.0}),
    ("grpo", "sequence_mask", None, OF_SEQUENCES, {"mis_low": 0.0, "mis_high": 3.0}),
    ("ppo_lm", "sequence_mask", 1.5, OF_SEQUENCES, {"mis_low": 0.0, "mis_high": 1.5}),
    ("grpo", "clip_cov", None, {"covariance": "clip"}, {"covariance_share": 0.01}),
    ("ppo_lm", "kl_cov", 0.02, {"covariance": "kl"}, {"covariance_share": 0.02}),
    ("grpo", "kl_in_reward", None, IN_REWARD, {"kl_coefficient": 0.05}),
    ("grpo", "kl_in_both", None, IN_REWARD | {"kl_in": "both"}, {"kl_coefficient": 0.05}),
    ("ppo_lm", "kl_off_policy", 0.1, IN_LOSS, {"kl_coefficient": 0.1}),
    ("ppo_lm", "length_adaptive_lambda", None, {"adaptive_lambda": True}, {"gae_lambda_length": 0.05}),
    ("ppo_lm", "value_pretraining", 7, {}, {}),
    ("grpo", "adaptive_entropy", None, {"entropy_bonus": True}, {"entropy_coefficient": 1e-30}),
]
SLOW_TO_TRACE = ("adaptive_entropy",)


@pytest.mark.parametrize(("preset", "name", "strength", "parts", "coefficients"), SETTINGS)
def test_a_learner_with_a_remedy_has_its_parts_and_coefficients_and_no_others(
    preset, name, strength, parts, coefficients
):
    base = learner(preset)
    one = ja.remedied(base, getattr(remedies, name)(strength))
    before, after = inside(base), inside(one)
    assert after.config == dataclasses.replace(before.config, **parts)
    data = one.data.learner if name in SLOW_TO_TRACE else one.data
    expected = dataclasses.replace(base.data.numbers.objective, **coefficients)
    expected = dataclasses.replace(base.data.numbers, objective=jax.tree.map(np.float32, expected))
    for found, wanted in zip(jax.tree.leaves(data.numbers), jax.tree.leaves(expected), strict=True):
        assert (found, found.dtype) == (wanted, np.float32)
    assert after.settings.critic_warm_start == (7 if name == "value_pretraining" else 0)


def test_a_pretrained_critic_is_trained_for_2000_updates_unless_told_otherwise():
    one = ja.remedied(learner("ppo_lm"), remedies.value_pretraining())
    assert inside(one).settings.critic_warm_start == 2000
    assert inside(one).config == inside(learner("ppo_lm")).config


NUMBERS = [(preset, name) for preset, name, *_ in SETTINGS if name not in ("value_pretraining", *SLOW_TO_TRACE)]


@pytest.mark.parametrize(("preset", "name"), sorted(set(NUMBERS)))
def test_strengths_that_are_numbers_share_a_program(preset, name):
    kind = getattr(remedies, name)
    low, high = (0.3, 0.6) if kind.limits[1] <= 1 or name.startswith(("kl_", "length")) else (2.0, 3.0)
    one, other = (ja.remedied(learner(preset), kind(strength)) for strength in (low, high))
    assert one.step == other.step
    assert one.init == other.init
    assert one.without_data == other.without_data
    leaves = zip(jax.tree.leaves(one.data), jax.tree.leaves(other.data), strict=True)
    assert sum(bool(a != b) for a, b in leaves) >= 1
    if name != "dual_clip":
        assert one.step != learner(preset).step


def test_strengths_that_are_structure_do_not():
    one, other, again = (ja.remedied(learner("ppo_lm"), remedies.value_pretraining(n)) for n in (3, 4, 3))
    assert one.step != other.step
    assert one.step == again.step


def test_remedies_of_settings_add_up():
    one = ja.remedied(learner("ppo_lm"), remedies.kl_in_both(), remedies.length_adaptive_lambda(), remedies.kl_cov())
    nested = ja.remedied(ja.remedied(learner("ppo_lm"), remedies.kl_in_both()), remedies.length_adaptive_lambda())
    nested = ja.remedied(nested, remedies.kl_cov())
    assert one.without_data == nested.without_data
    assert isinstance(inside(one).config, ObjectiveConfig)
    found = inside(one).config
    assert (found.kl_in, found.adaptive_lambda, found.covariance) == ("both", True, "kl")


@pytest.mark.parametrize(
    ("preset", "remedy", "number", "strengths"),
    [
        ("grpo", remedies.clip_higher, "clip_high", {0.28: 0.28, 0.0: 0.15, 2.0: 2.0}),
        ("ppo_lm", remedies.decoupled_lambda, "critic_lambda", {1.0: 1.0, 0.0: 0.7, 0.3: 0.3}),
    ],
)
def test_a_remedy_of_a_coefficient_changes_that_one_alone(preset, remedy, number, strengths):
    """The neutral strength, 0, leaves it."""
    settings = settings_of(preset)(clip_low=0.1, clip_high=0.15, gae_lambda=0.8, critic_lambda=0.7)
    coefficients = jax.tree.map(jnp.float32, settings.coefficients)
    for strength, expected in strengths.items():
        taps = Taps().with_remedies(((remedy, jnp.float32(strength)),), {}, None)
        found = tap_coefficients(settings.objective_config, coefficients, taps)
        changes = dataclasses.replace(coefficients, **{number: jnp.float32(expected)})
        jax.tree.map(np.testing.assert_array_equal, found, changes)
    assert remedies.clip_higher().strength == 0.28


# The entropy bonus that adapts.


@pytest.mark.parametrize("target", [0.2, 1.0, 30.0])
def test_the_coefficient_of_entropy_rises_below_the_target_and_falls_above_it_within_its_bounds(target):
    random = np.random.default_rng(3)
    entropies = np.float32(target + np.where(np.arange(900) < 450, -0.01, 0.012) * (random.random(900) - 0.1))
    entropies[[5, 6, 700]] = np.float32(target)  # exactly there it falls, and still acts
    kind = remedies.adaptive_entropy

    def step(state, entropy):
        value, state = kind.apply(jnp.float32(0.3), jnp.float32(target), state, entropy=lambda: entropy)
        return state, (value, state)

    used, kept = jax.lax.scan(step, kind.init(jnp.zeros(())), jnp.asarray(entropies))[1]
    state, expected = 0.0, []
    for entropy in entropies:
        state = min(max(state + (0.005 if entropy < np.float32(target) else -0.005), 0.0), 1.0)
        expected.append((state if entropy <= np.float32(target) else 0.0, state))
    np.testing.assert_allclose(np.stack([used, kept], 1), expected, atol=1e-4)
    assert max(state for _, state in expected) == 1.0
    assert min(state for _, state in expected[450:]) == 0.0
    found = np.asarray(used)
    assert ((found > 0) == (np.array(expected)[:, 0] > 2e-4)).mean() > 0.99
    assert (found[entropies > np.float32(target)] == 0).all()


def test_the_entropy_that_is_read_is_the_mean_of_what_own_tokens_were_sampled_with():
    own, _, logs = random_rows()
    rows = SimpleNamespace(response_mask=jnp.asarray(own), log_prob=jnp.asarray(np.where(own, logs, np.nan)))
    assert float(sampled_entropy(rows)) == pytest.approx(-logs[own].mean(), rel=1e-6)
    nothing = SimpleNamespace(response_mask=jnp.zeros(own.shape, bool), log_prob=rows.log_prob)
    assert float(sampled_entropy(nothing)) == 0


@pytest.mark.parametrize("weight", [0.0, 0.02])
def test_a_learner_gets_a_bonus_that_weighs_nothing_unless_it_has_one(weight):
    settings = settings_of("grpo")(entropy_coefficient=weight)
    after = with_remedies(settings, remedies.adaptive_entropy())
    assert after.objective_config.entropy_bonus
    assert after.coefficients.entropy_coefficient == (weight or 1e-30)
    assert with_remedies(after, remedies.adaptive_entropy()) == after


STEPS = 3


def trained(one, steps=STEPS):
    """`trained(data)`: telemetry of one lane, `[steps, ...]`, and its last state; compiled once."""
    begin = jax.jit(one.begin)
    step = jax.jit(lambda state, key, t, data: one.step(state, key, Taps(t, steps, data=data)))

    def run(data):
        state, told = begin(jax.random.key(3), data), []
        for t in range(steps):
            state, now = step(state, jax.random.fold_in(jax.random.key(4), t), jnp.int32(t), data)
            told.append(now)
        return jax.tree.map(lambda *x: np.stack(x), *told), state

    return run


@functools.cache
def with_adaptive_entropy():
    """Lanes of one key, with and without the remedy, by its target."""
    one = ja.remedied(learner("grpo", learning_rate=5e-3), remedies.adaptive_entropy())
    run = trained(one)
    targets = {"neutral": 0.0, "above": 50.0, "below": 1e-3}
    strengths = {name: {"adaptive_entropy": np.float32(target)} for name, target in targets.items()}
    return {name: run(dataclasses.replace(one.data, strengths=each)) for name, each in strengths.items()}


@pytest.mark.exhaustive
def test_a_policy_of_less_entropy_than_it_should_have_is_paid_for_it_more_with_every_step():
    lanes = with_adaptive_entropy()
    kept = {name: float(state.remedies["adaptive_entropy"][ROOT]) for name, (_, state) in lanes.items()}
    assert kept == pytest.approx({"neutral": 0.0, "above": 0.005 * STEPS, "below": 0.0})
    neutral, above, below = (told for told, _ in lanes.values())
    entropy = neutral["entropy"][0, 0]
    assert entropy > 1
    np.testing.assert_array_equal(above["entropy"][0], neutral["entropy"][0])
    # In the first step lanes have the same rows and parameters.
    np.testing.assert_allclose(above["loss"][0] - neutral["loss"][0], -0.005 * entropy, rtol=1e-4)
    assert (above["params_norm"] != neutral["params_norm"]).all()
    acted = {name: list(told.pop("acted_adaptive_entropy")) for name, (told, _) in lanes.items()}
    assert acted == {"neutral": STEPS * [0.0], "above": STEPS * [1.0], "below": STEPS * [1.0]}
    for name, x in neutral.items():
        np.testing.assert_array_equal(below[name], x, err_msg=f"{name}: there is no bonus above the target")


@pytest.mark.exhaustive
def test_without_strength_the_adaptive_bonus_is_none():
    """To rounding: it is another program."""
    told, state = with_adaptive_entropy()["neutral"]
    plain = learner("grpo", learning_rate=5e-3)
    expected, before = trained(plain)(plain.data)
    assert set(told) - set(expected) <= {"acted_adaptive_entropy"}
    for name, x in expected.items():
        np.testing.assert_allclose(told[name], x, rtol=1e-6, atol=1e-7, err_msg=name)
    pairs = (jax.tree.leaves(one.policy.params) for one in (state.learner, before))
    for found, wanted in zip(*pairs, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-6)


# What a learner collects with remedies.


@pytest.fixture(scope="module")
def collected():
    """`collected(target, of_critic, bound)`: an iteration of a critic's learner with remedies of its objective, from
    parameters that differ from each other; a coefficient of entropy of 0.3 so far."""
    base = learner("ppo_lm", whiten=False, gamma=0.9, gae_lambda=0.3, critic_lambda=0.6, mask_truncated=True, prompts=8)
    settings = (remedies.kl_in_both(0.3), remedies.length_adaptive_lambda(0.5), remedies.kl_cov(0.2))
    one = ja.remedied(base, *settings)
    one = one.changed(lambda settings: remedies.adaptive_entropy.settings(settings, 0.2))
    made, random = inside(one), np.random.default_rng(6)
    policy = random_params(made.policy, random)
    reference, critic = random_params(made.policy, random, policy, 0.5), random_params(made.critic, random)
    params = jax.tree.map(jnp.asarray, {"policy": policy, "critic": critic, "reference": reference})
    kinds = (remedies.adaptive_entropy, remedies.decoupled_lambda, remedies.clip_higher)

    @jax.jit
    def run(strengths, data):
        states = {"adaptive_entropy": {ROOT: jnp.float32(0.3)}}
        taps = Taps(0, 3, data=data).with_remedies(tuple(zip(kinds, strengths, strict=True)), states, data)
        dialogue = made.dialogue.bind(data.dialogue)
        found = made.collector.collect(Models(**params), dialogue, data.numbers, jax.random.key(1), taps)
        return found, taps.remedy_states["adaptive_entropy"][ROOT]

    def collected(*strengths):
        return jax.tree.map(np.asarray, run(jnp.float32(strengths), one.data))

    return collected


def test_an_iteration_s_advantages_targets_and_tokens_apart_are_those_of_loops(collected):
    experience, _ = collected(0.0, 0.85, 0.28)
    loss_inputs = experience.batch.loss_inputs
    own, value = loss_inputs.loss_mask, np.float64(loss_inputs.old_value)
    assert 0 < own.any(1).mean() < 1, "rows that do not count"
    penalty = np.where(own, np.float64(loss_inputs.old_log_prob) - loss_inputs.ref_log_prob, 0)
    reward = -0.3 * penalty
    for row, slots in enumerate(map(np.flatnonzero, own)):
        reward[row, slots[-1:]] += experience.trainer_outputs.score[row]
    lambdas = lambdas_by_length(own, 0.5)
    assert len(np.unique(lambdas)) > 3
    close = {"rtol": 1e-4, "atol": 1e-5}
    advantage = advantages_by_loop(reward, value, own, 0.9, lambdas)
    np.testing.assert_allclose(loss_inputs.advantages, advantage, **close)
    target = advantages_by_loop(reward, value, own, 0.9, np.full(len(own), 0.85)) + np.where(own, value, 0)
    np.testing.assert_allclose(loss_inputs.value_target, target, **close)
    returned = advantages_by_loop(reward, 0 * value, own, 0.9, np.ones(len(own)))
    np.testing.assert_allclose(experience.trainer_outputs.returns, returned, **close)
    values = covariances_by_loop(own, advantage, np.float64(loss_inputs.old_log_prob))
    most = math.floor(0.2 * own.sum())
    assert 1 < most < 0.2 * own.sum() - 0.25, "rounded down"
    ordered = np.sort(values[own])[::-1]
    assert ordered[most - 1] - ordered[most] > 1e-4, "no decision hangs on rounding"
    np.testing.assert_array_equal(
        loss_inputs.covariance_mask, own & (np.nan_to_num(values, nan=-np.inf) >= ordered[most - 1])
    )


def test_an_iteration_s_coefficients_are_what_remedies_at_their_sites_make_of_them(collected):
    experience, state = collected(0.0, 0.0, 0.0)
    rows = experience.rollout.rows
    before = dataclasses.asdict(experience.coefficients)
    own = rows.role == 0
    entropy = -np.float64(rows.log_prob[own]).mean()
    assert state == pytest.approx(0.295), "it is not read"
    assert before["entropy_coefficient"] == np.float32(1e-30)
    for target, bonus, kept in ((entropy * 1.001, 0.305, 0.305), (entropy * 0.999, 0.0, 0.295)):
        experience, state = collected(target, 0.85, 0.28)
        after = dataclasses.asdict(experience.coefficients)
        assert after["entropy_coefficient"] == pytest.approx(bonus)
        assert state == pytest.approx(kept)
        other = {name: float(x) for name, x in after.items() if x != before[name] and name != "entropy_coefficient"}
        assert other == {"critic_lambda": pytest.approx(0.85)}, "KL-Cov does not clip the ratio"


@pytest.mark.parametrize(
    ("preset", "first", "second", "sentence"),
    [
        (
            "grpo",
            remedies.kl_cov(),
            remedies.clip_higher(),
            "'clip_higher' .* 'ratio_clip', .* does not clip the ratio",
        ),
        ("grpo", remedies.clip_cov(), remedies.kl_cov(), "'kl_cov': it changes the setting 'covariance', and so does"),
        ("ppo_lm", remedies.kl_in_reward(), remedies.kl_in_both(), "'kl_in_both': it changes the setting 'kl', and so"),
    ],
)
def test_remedies_of_which_one_would_undo_or_disable_the_other_are_refused(preset, first, second, sentence):
    for chosen in ((first, second), (second, first)) if "does not clip" in sentence else ((first, second),):
        with pytest.raises(ValueError, match=sentence):
            ja.remedied(learner(preset), *chosen)


def test_a_lambda_of_each_row_s_own_is_no_site():
    one = ja.remedied(learner("ppo_lm"), remedies.length_adaptive_lambda())
    with pytest.raises(ValueError, match=r"'gae_lambda', .* each row's lambda depends on its length"):
        ja.plan(one, [ja.signal_decay(onset=0)], seeds=1, steps=3)


# What a learner cannot have.

REFUSED = [
    ("grpo", "length_adaptive_lambda", "'length_adaptive_lambda': .* advantage must be 'gae', not 'group'"),
    ("dpo", "length_adaptive_lambda", "'length_adaptive_lambda': .* advantage must be 'gae'"),
    ("grpo", "critic_layer_norm", "it changes the setting 'critic_layer_norm', which learner 'grpo' does not have"),
    ("dpo", "kl_cov", "'kl_cov': .* objective must be 'policy'"),
    ("gspo", "clip_cov", "'clip_cov': .* ratio 'token'"),
    ("rloo", "kl_cov", "'kl_cov': .* ratio 'token'"),
    ("dpo", "kl_in_reward", "'kl_in_reward': a preference objective contains its own KL"),
    ("dpo", "kl_in_both", "'kl_in_both': a preference objective contains its own KL"),
    ("dpo", "kl_off_policy", "'kl_off_policy': a preference objective contains its own KL"),
    ("dpo", "truncated_importance", "'truncated_importance': a preference objective has no probability ratio"),
    ("dpo", "adaptive_entropy", "'adaptive_entropy': a preference objective has no .* entropy bonus"),
    ("grpo", "decoupled_lambda", "'decoupled_lambda' acts at site 'critic_lambda', which the learner does not tap"),
    ("dpo", "target_kl_stop", "'target_kl_stop' needs approximate_kl at 'guard'"),
    ("dpo", "clip_higher", "'clip_higher' acts at site 'ratio_clip', .*, for a preference objective has none"),
    ("grpo", "value_pretraining", "critic"),
    ("dpo", "value_pretraining", "critic"),
    ("dpo", "dual_clip", "ratio"),
]


def refused(one, remedy, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        ja.remedied(one, remedy)
    said = str(error.value)
    assert said.startswith("remedy '")
    assert "\n" not in said
    assert ". " not in said
    assert not said.endswith(".")


@pytest.mark.parametrize(("preset", "name", "sentence"), REFUSED)
def test_what_a_learner_on_dialogues_cannot_have_is_refused_in_a_sentence(preset, name, sentence):
    refused(learner(preset), getattr(remedies, name)(), sentence)


@pytest.mark.parametrize("name", ["truncated_importance", "masked_importance", "sequence_mask"])
def test_there_is_no_correction_where_ratios_are_the_sampler_s(name):
    one = learner("grpo", old_log_probability="sampled")
    refused(one, getattr(remedies, name)(), "old_log_probability must be 'recomputed', not 'sampled'")


@pytest.mark.parametrize(
    ("preset", "name", "strength"),
    [
        ("grpo", "clip_cov", 1.5),
        ("grpo", "dual_clip", 0.5),
        ("grpo", "masked_importance", 0.5),
        ("ppo_lm", "decoupled_lambda", 1.5),
        ("ppo_lm", "value_pretraining", 2.5),
        ("grpo", "kl_in_both", -0.1),
        ("grpo", "clip_higher", math.nan),
    ],
)
def test_a_strength_that_means_nothing_is_refused_before_there_is_a_learner(preset, name, strength):
    with pytest.raises(ValueError, match=f"'{name}'"):
        getattr(remedies, name)(strength)


# All at once.


@pytest.mark.exhaustive
def test_many_remedies_at_once_are_finite_and_a_neutral_disturbance_is_none_bit_for_bit():
    chosen = [
        remedies.target_kl_stop(1e-4),
        remedies.nonfinite_skip(),
        remedies.l2_init(0.1),
        remedies.decoupled_lambda(),
        remedies.kl_in_reward(),
        remedies.length_adaptive_lambda(0.5),
    ]
    base = learner("ppo_lm", prompts=2, minibatches=2, learning_rate=5e-3)
    assert inside(base).config.kl_in == "reward"
    one = ja.remedied(base, *chosen)
    settings = ja.metrics.MetricSettings(window=2, hold=1, horizon=1)
    spikes = [ja.lr_spike(ja.sweep(1.0, 30.0), onset=1, duration=1)]
    told = ja.audit(one, spikes, seeds=2, steps=3, settings=settings).telemetry
    names = [name for name in told.data_vars if told[name].dims[:3] == ("seed", "condition", "step")]
    assert {"performance", "loss", "critic_gradient_norm", "value_loss", "params_norm"} <= set(names)
    for name in ("performance", "loss", "params_norm", "update_norm", "gradient_norm", "critic_gradient_norm"):
        assert np.isfinite(told[name].values).all(), name
    for name in names:
        values = told[name].values
        np.testing.assert_array_equal(values[:, 0], values[:, 1], err_msg=name)
    moved = told["params_norm"].values
    assert (moved[:, 0, 1:] != moved[:, 2, 1:]).any()
    np.testing.assert_array_equal(moved[:, 0, 0], moved[:, 2, 0])
