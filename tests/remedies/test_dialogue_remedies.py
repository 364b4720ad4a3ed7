"""Tests remedies in complete dialogue learners: settings, coefficients, collected values, and refused combinations."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from letter_dialogue import LetterDialogue, random_params
from token_loops import (
    advantages_by_loop,
    covariances_by_loop,
    lambdas_by_length,
    random_rows,
    settings_with_remedies,
)

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.taps import ROOT, Taps
from jaxaudit.learners.dialogue.collection import Models, sampled_entropy, tap_coefficients
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.objective import ObjectiveConfig
from jaxaudit.models import gpt2

# Settings and coefficients of learners with remedies.

SMALL = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "minibatches": 1, "microbatches": 1}
SMALL |= {"performance_rows": 2, "warm_start": 0, "telemetry": "basic"}


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
        yield


@functools.cache
def learner(preset, **settings):
    small = SMALL | ({"group_size": 2} if preset == "dpo" else {})
    return getattr(ja.learners, preset)(LetterDialogue(), **small | settings)


def algorithm_of(dialogue_learner):
    """Returns the dialogue learner inside a learner, with or without remedies."""
    algorithm = dialogue_learner.step.__self__
    return getattr(algorithm, "learner", dialogue_learner).step.__self__


TIS = {"correction": "tis", "correction_level": "token"}
MIS = {"correction": "mis", "correction_level": "token"}
MIS_BY_SEQUENCE = {"correction": "mis", "correction_level": "sequence"}
IN_REWARD = {"kl": "k1", "kl_in": "reward", "kl_weight": "none"}
IN_LOSS = {"kl": "k3", "kl_in": "loss", "kl_weight": "ratio"}
SETTINGS = [
    ("grpo", "dual_clip", 4.0, {}, {"dual_clip": 4.0}),
    ("ppo_lm", "dual_clip", None, {}, {"dual_clip": 3.0}),
    ("grpo", "truncated_importance", None, TIS, {"tis_cap": 2.0}),
    ("ppo_lm", "truncated_importance", 1.5, TIS, {"tis_cap": 1.5}),
    ("grpo", "masked_importance", None, MIS, {"mis_low": 0.5, "mis_high": 2.0}),
    ("grpo", "masked_importance", 4.0, MIS, {"mis_low": 0.25, "mis_high": 4.0}),
    ("grpo", "sequence_mask", None, MIS_BY_SEQUENCE, {"mis_low": 0.0, "mis_high": 3.0}),
    ("ppo_lm", "sequence_mask", 1.5, MIS_BY_SEQUENCE, {"mis_low": 0.0, "mis_high": 1.5}),
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
def test_a_remedy_changes_only_its_objective_parts_and_coefficients(preset, name, strength, parts, coefficients):
    base = learner(preset)
    remedied = ja.remedied(base, getattr(remedies, name)(strength))
    before, after = algorithm_of(base), algorithm_of(remedied)
    assert after.config == dataclasses.replace(before.config, **parts)
    data = remedied.data.learner if name in SLOW_TO_TRACE else remedied.data
    expected = dataclasses.replace(base.data.numbers.objective, **coefficients)
    expected = dataclasses.replace(base.data.numbers, objective=jax.tree.map(np.float32, expected))
    for number, expected_number in zip(jax.tree.leaves(data.numbers), jax.tree.leaves(expected), strict=True):
        assert (number, number.dtype) == (expected_number, np.float32)
    assert after.settings.critic_warm_start == (7 if name == "value_pretraining" else 0)


def test_value_pretraining_defaults_to_2000_updates():
    remedied = ja.remedied(learner("ppo_lm"), remedies.value_pretraining())
    assert algorithm_of(remedied).settings.critic_warm_start == 2000
    assert algorithm_of(remedied).config == algorithm_of(learner("ppo_lm")).config


NUMBERS = [(preset, name) for preset, name, *_ in SETTINGS if name not in ("value_pretraining", *SLOW_TO_TRACE)]


@pytest.mark.parametrize(("preset", "name"), sorted(set(NUMBERS)))
def test_learners_with_other_numeric_strengths_share_a_program(preset, name):
    kind = getattr(remedies, name)
    low, high = (0.3, 0.6) if kind.limits[1] <= 1 or name.startswith(("kl_", "length")) else (2.0, 3.0)
    weak, strong = (ja.remedied(learner(preset), kind(strength)) for strength in (low, high))
    assert weak.step == strong.step
    assert weak.init == strong.init
    assert weak.without_data == strong.without_data
    leaves = zip(jax.tree.leaves(weak.data), jax.tree.leaves(strong.data), strict=True)
    assert sum(bool(a != b) for a, b in leaves) >= 1
    if name != "dual_clip":
        assert weak.step != learner(preset).step


def test_learners_with_other_structural_strengths_do_not_share_a_program():
    three, four, three_again = (ja.remedied(learner("ppo_lm"), remedies.value_pretraining(n)) for n in (3, 4, 3))
    assert three.step != four.step
    assert three.step == three_again.step


def test_remedies_of_settings_are_combined():
    remedied = ja.remedied(
        learner("ppo_lm"), remedies.kl_in_both(), remedies.length_adaptive_lambda(), remedies.kl_cov()
    )
    nested = ja.remedied(ja.remedied(learner("ppo_lm"), remedies.kl_in_both()), remedies.length_adaptive_lambda())
    nested = ja.remedied(nested, remedies.kl_cov())
    assert remedied.without_data == nested.without_data
    assert isinstance(algorithm_of(remedied).config, ObjectiveConfig)
    config = algorithm_of(remedied).config
    assert (config.kl_in, config.adaptive_lambda, config.covariance) == ("both", True, "kl")


@pytest.mark.parametrize(
    ("preset", "remedy", "number", "strengths"),
    [
        ("grpo", remedies.clip_higher, "clip_high", {0.28: 0.28, 0.0: 0.15, 2.0: 2.0}),
        ("ppo_lm", remedies.decoupled_lambda, "critic_lambda", {1.0: 1.0, 0.0: 0.7, 0.3: 0.3}),
    ],
)
def test_a_remedy_of_a_coefficient_changes_only_that_one(preset, remedy, number, strengths):
    """The neutral strength 0 does not change the coefficient."""
    settings = settings_of(preset)(clip_low=0.1, clip_high=0.15, gae_lambda=0.8, critic_lambda=0.7)
    coefficients = jax.tree.map(jnp.float32, settings.coefficients)
    for strength, expected in strengths.items():
        taps = Taps().with_remedies(((remedy, jnp.float32(strength)),), {}, None)
        tapped = tap_coefficients(settings.objective_config, coefficients, taps)
        changes = dataclasses.replace(coefficients, **{number: jnp.float32(expected)})
        jax.tree.map(np.testing.assert_array_equal, tapped, changes)
    assert remedies.clip_higher().strength == 0.28


# The adaptive entropy bonus.


@pytest.mark.parametrize("target", [0.2, 1.0, 30.0])
def test_adaptive_entropy_raises_its_coefficient_below_the_target_only(target):
    rng = np.random.default_rng(3)
    entropies = np.float32(target + np.where(np.arange(900) < 450, -0.01, 0.012) * (rng.random(900) - 0.1))
    entropies[[5, 6, 700]] = np.float32(target)  # at exactly the target it falls, and still acts
    kind = remedies.adaptive_entropy

    def step(state, entropy):
        value, state = kind.apply(jnp.float32(0.3), jnp.float32(target), state, entropy=lambda: entropy)
        return state, (value, state)

    used, states = jax.lax.scan(step, kind.init(jnp.zeros(())), jnp.asarray(entropies))[1]
    state, expected = 0.0, []
    for entropy in entropies:
        state = min(max(state + (0.005 if entropy < np.float32(target) else -0.005), 0.0), 1.0)
        expected.append((state if entropy <= np.float32(target) else 0.0, state))
    np.testing.assert_allclose(np.stack([used, states], 1), expected, atol=1e-4)
    assert max(state for _, state in expected) == 1.0
    assert min(state for _, state in expected[450:]) == 0.0
    coefficients = np.asarray(used)
    assert ((coefficients > 0) == (np.array(expected)[:, 0] > 2e-4)).mean() > 0.99
    assert (coefficients[entropies > np.float32(target)] == 0).all()


def test_sampled_entropy_is_the_mean_over_response_tokens():
    response_mask, _, log_prob = random_rows()
    rows = SimpleNamespace(
        response_mask=jnp.asarray(response_mask), log_prob=jnp.asarray(np.where(response_mask, log_prob, np.nan))
    )
    assert float(sampled_entropy(rows)) == pytest.approx(-log_prob[response_mask].mean(), rel=1e-6)
    empty = SimpleNamespace(response_mask=jnp.zeros(response_mask.shape, bool), log_prob=rows.log_prob)
    assert float(sampled_entropy(empty)) == 0


@pytest.mark.parametrize("weight", [0.0, 0.02])
def test_adaptive_entropy_adds_a_bonus_of_weight_zero(weight):
    settings = settings_of("grpo")(entropy_coefficient=weight)
    after = settings_with_remedies(settings, remedies.adaptive_entropy())
    assert after.objective_config.entropy_bonus
    assert after.coefficients.entropy_coefficient == (weight or 1e-30)
    assert settings_with_remedies(after, remedies.adaptive_entropy()) == after


STEPS = 3


def train(dialogue_learner, steps=STEPS):
    """Returns a function of data: the telemetry `[steps, ...]` and the last state of a lane; it is compiled once."""
    begin = jax.jit(dialogue_learner.begin)
    step = jax.jit(lambda state, key, t, data: dialogue_learner.step(state, key, Taps(t, steps, data=data)))

    def run(data):
        state, telemetry = begin(jax.random.key(3), data), []
        for t in range(steps):
            state, metrics = step(state, jax.random.fold_in(jax.random.key(4), t), jnp.int32(t), data)
            telemetry.append(metrics)
        return jax.tree.map(lambda *x: np.stack(x), *telemetry), state

    return run


@functools.cache
def with_adaptive_entropy():
    """Returns lanes with the same key by the remedy's target: neutral, above and below the entropy."""
    remedied = ja.remedied(learner("grpo", learning_rate=5e-3), remedies.adaptive_entropy())
    run = train(remedied)
    targets = {"neutral": 0.0, "above": 50.0, "below": 1e-3}
    strengths = {name: {"adaptive_entropy": np.float32(target)} for name, target in targets.items()}
    return {name: run(dataclasses.replace(remedied.data, strengths=strength)) for name, strength in strengths.items()}


@pytest.mark.exhaustive
def test_adaptive_entropy_raises_the_bonus_in_every_step_below_target():
    lanes = with_adaptive_entropy()
    coefficients = {name: float(state.remedies["adaptive_entropy"][ROOT]) for name, (_, state) in lanes.items()}
    assert coefficients == pytest.approx({"neutral": 0.0, "above": 0.005 * STEPS, "below": 0.0})
    neutral, above, below = (telemetry for telemetry, _ in lanes.values())
    entropy = neutral["entropy"][0, 0]
    assert entropy > 1
    np.testing.assert_array_equal(above["entropy"][0], neutral["entropy"][0])
    # In the first step all lanes have the same rows and parameters.
    np.testing.assert_allclose(above["loss"][0] - neutral["loss"][0], -0.005 * entropy, rtol=1e-4)
    assert (above["params_norm"] != neutral["params_norm"]).all()
    acted = {name: list(telemetry.pop("acted_adaptive_entropy")) for name, (telemetry, _) in lanes.items()}
    assert acted == {"neutral": STEPS * [0.0], "above": STEPS * [1.0], "below": STEPS * [1.0]}
    for name, x in neutral.items():
        np.testing.assert_array_equal(below[name], x, err_msg=f"{name}: there must be no bonus above the target")


@pytest.mark.exhaustive
def test_the_neutral_adaptive_entropy_equals_the_plain_learner():
    """The programs differ, so values are equal up to rounding."""
    telemetry, state = with_adaptive_entropy()["neutral"]
    plain = learner("grpo", learning_rate=5e-3)
    expected, expected_state = train(plain)(plain.data)
    assert set(telemetry) - set(expected) <= {"acted_adaptive_entropy"}
    for name, x in expected.items():
        np.testing.assert_allclose(telemetry[name], x, rtol=1e-6, atol=1e-7, err_msg=name)
    pairs = (jax.tree.leaves(s.policy.params) for s in (state.learner, expected_state))
    for actual, expected_leaf in zip(*pairs, strict=True):
        np.testing.assert_allclose(actual, expected_leaf, atol=1e-6)


# Values that a learner with remedies collects.


@pytest.fixture(scope="module")
def collect():
    """Returns a function of three strengths: an iteration of a learner with a critic and remedies of its objective.

    Its parameters are random, and its entropy coefficient was 0.3 before.
    """
    base = learner("ppo_lm", whiten=False, gamma=0.9, gae_lambda=0.3, critic_lambda=0.6, mask_truncated=True, prompts=8)
    settings = (remedies.kl_in_both(0.3), remedies.length_adaptive_lambda(0.5), remedies.kl_cov(0.2))
    remedied = ja.remedied(base, *settings)
    remedied = remedied.changed(lambda settings: remedies.adaptive_entropy.settings(settings, 0.2))
    algorithm, rng = algorithm_of(remedied), np.random.default_rng(6)
    policy = random_params(algorithm.policy, rng)
    reference, critic = random_params(algorithm.policy, rng, policy, 0.5), random_params(algorithm.critic, rng)
    params = jax.tree.map(jnp.asarray, {"policy": policy, "critic": critic, "reference": reference})
    kinds = (remedies.adaptive_entropy, remedies.decoupled_lambda, remedies.clip_higher)

    @jax.jit
    def run(strengths, data):
        states = {"adaptive_entropy": {ROOT: jnp.float32(0.3)}}
        taps = Taps(0, 3, data=data).with_remedies(tuple(zip(kinds, strengths, strict=True)), states, data)
        dialogue = algorithm.dialogue.bind(data.dialogue)
        experience = algorithm.collector.collect(Models(**params), dialogue, data.numbers, jax.random.key(1), taps)
        return experience, taps.remedy_states["adaptive_entropy"][ROOT]

    def collect_with(*strengths):
        return jax.tree.map(np.asarray, run(jnp.float32(strengths), remedied.data))

    return collect_with


def test_collected_advantages_targets_and_covariance_masks_equal_loops(collect):
    experience, _ = collect(0.0, 0.85, 0.28)
    loss_inputs = experience.batch.loss_inputs
    loss_mask, value = loss_inputs.loss_mask, np.float64(loss_inputs.old_value)
    assert 0 < loss_mask.any(1).mean() < 1, "some rows do not count"
    penalty = np.where(loss_mask, np.float64(loss_inputs.old_log_prob) - loss_inputs.ref_log_prob, 0)
    reward = -0.3 * penalty
    for row, slots in enumerate(map(np.flatnonzero, loss_mask)):
        reward[row, slots[-1:]] += experience.trainer_outputs.score[row]
    lambdas = lambdas_by_length(loss_mask, 0.5)
    assert len(np.unique(lambdas)) > 3
    close = {"rtol": 1e-4, "atol": 1e-5}
    advantage = advantages_by_loop(reward, value, loss_mask, 0.9, lambdas)
    np.testing.assert_allclose(loss_inputs.advantages, advantage, **close)
    target = advantages_by_loop(reward, value, loss_mask, 0.9, np.full(len(loss_mask), 0.85)) + np.where(
        loss_mask, value, 0
    )
    np.testing.assert_allclose(loss_inputs.value_target, target, **close)
    returns = advantages_by_loop(reward, 0 * value, loss_mask, 0.9, np.ones(len(loss_mask)))
    np.testing.assert_allclose(experience.trainer_outputs.returns, returns, **close)
    values = covariances_by_loop(loss_mask, advantage, np.float64(loss_inputs.old_log_prob))
    n_selected = math.floor(0.2 * loss_mask.sum())
    assert 1 < n_selected < 0.2 * loss_mask.sum() - 0.25, "the number of tokens is rounded down"
    ordered = np.sort(values[loss_mask])[::-1]
    assert ordered[n_selected - 1] - ordered[n_selected] > 1e-4, "the selection does not depend on rounding"
    np.testing.assert_array_equal(
        loss_inputs.covariance_mask, loss_mask & (np.nan_to_num(values, nan=-np.inf) >= ordered[n_selected - 1])
    )


def test_coefficients_of_an_iteration_are_changed_by_remedies(collect):
    experience, state = collect(0.0, 0.0, 0.0)
    rows = experience.rollout.rows
    before = dataclasses.asdict(experience.coefficients)
    response_mask = rows.role == 0
    entropy = -np.float64(rows.log_prob[response_mask]).mean()
    assert state == pytest.approx(0.295), "the entropy is not measured at strength 0"
    assert before["entropy_coefficient"] == np.float32(1e-30)
    for target, bonus, coefficient in ((entropy * 1.001, 0.305, 0.305), (entropy * 0.999, 0.0, 0.295)):
        experience, state = collect(target, 0.85, 0.28)
        after = dataclasses.asdict(experience.coefficients)
        assert after["entropy_coefficient"] == pytest.approx(bonus)
        assert state == pytest.approx(coefficient)
        changed = {name: float(x) for name, x in after.items() if x != before[name] and name != "entropy_coefficient"}
        assert changed == {"critic_lambda": pytest.approx(0.85)}, (
            "clip_higher does nothing, because KL-Cov does not clip"
        )


@pytest.mark.parametrize(
    ("preset", "first", "second", "message"),
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
def test_remedies_that_would_disable_each_other_are_refused(preset, first, second, message):
    for order in ((first, second), (second, first)) if "does not clip" in message else ((first, second),):
        with pytest.raises(ValueError, match=message):
            ja.remedied(learner(preset), *order)


def test_signal_decay_is_refused_with_a_lambda_per_row():
    remedied = ja.remedied(learner("ppo_lm"), remedies.length_adaptive_lambda())
    with pytest.raises(ValueError, match=r"'gae_lambda', .* each row's lambda depends on its length"):
        ja.plan(remedied, [ja.signal_decay(onset=0)], seeds=1, steps=3)


# Remedies that a learner refuses.

REFUSED_REMEDIES = [
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


def assert_refused(dialogue_learner, remedy, message):
    with pytest.raises(ValueError, match=message) as error:
        ja.remedied(dialogue_learner, remedy)
    text = str(error.value)
    assert text.startswith("remedy '")
    assert "\n" not in text
    assert ". " not in text
    assert not text.endswith(".")


@pytest.mark.parametrize(("preset", "name", "message"), REFUSED_REMEDIES)
def test_remedies_that_do_not_fit_a_dialogue_learner_are_refused(preset, name, message):
    assert_refused(learner(preset), getattr(remedies, name)(), message)


@pytest.mark.parametrize("name", ["truncated_importance", "masked_importance", "sequence_mask"])
def test_corrections_are_refused_with_sampled_old_log_probabilities(name):
    sampled = learner("grpo", old_log_probability="sampled")
    assert_refused(sampled, getattr(remedies, name)(), "old_log_probability must be 'recomputed', not 'sampled'")


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
def test_invalid_strengths_are_refused(preset, name, strength):
    with pytest.raises(ValueError, match=f"'{name}'"):
        getattr(remedies, name)(strength)


# Several remedies at once.


@pytest.mark.exhaustive
def test_many_remedies_are_finite_and_neutral_lanes_equal_the_control():
    remedy_list = [
        remedies.target_kl_stop(1e-4),
        remedies.nonfinite_skip(),
        remedies.l2_init(0.1),
        remedies.decoupled_lambda(),
        remedies.kl_in_reward(),
        remedies.length_adaptive_lambda(0.5),
    ]
    base = learner("ppo_lm", prompts=2, minibatches=2, learning_rate=5e-3)
    assert algorithm_of(base).config.kl_in == "reward"
    remedied = ja.remedied(base, *remedy_list)
    settings = ja.metrics.MetricSettings(window=2, hold=1, horizon=1)
    spikes = [ja.lr_spike(ja.sweep(1.0, 30.0), onset=1, duration=1)]
    telemetry = ja.audit(remedied, spikes, seeds=2, steps=3, settings=settings).telemetry
    names = [name for name in telemetry.data_vars if telemetry[name].dims[:3] == ("seed", "condition", "step")]
    assert {"performance", "loss", "critic_gradient_norm", "value_loss", "params_norm"} <= set(names)
    for name in ("performance", "loss", "params_norm", "update_norm", "gradient_norm", "critic_gradient_norm"):
        assert np.isfinite(telemetry[name].values).all(), name
    for name in names:
        values = telemetry[name].values
        np.testing.assert_array_equal(values[:, 0], values[:, 1], err_msg=name)
    params_norm = telemetry["params_norm"].values
    assert (params_norm[:, 0, 1:] != params_norm[:, 2, 1:]).any()
    np.testing.assert_array_equal(params_norm[:, 0, 0], params_norm[:, 2, 0])
