"""Tests parts of dialogue losses against closed forms, enumeration of a small vocabulary, and float64 NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.learners.dialogue import advantages, loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.factories import PRESETS, settings_of
from jaxaudit.learners.dialogue.loss_terms import denominators
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss, score_weights

EXACT = {"rtol": 1e-10, "atol": 1e-12}


# KL estimators, in expectation over all tokens of a small vocabulary.


def kl_between(log_p, log_q):
    log_p, log_q = jax.nn.log_softmax(log_p), jax.nn.log_softmax(log_q)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q))


def random_logits(seed=0, size=5):
    """Returns logits of a policy, a reference and a sampler."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, size)))


def expected_loss(term, weights):
    """Returns a function of logits: the sum over all tokens of a token's loss times its weight, both `[V, 1]`."""
    return lambda logits: jnp.sum(weights * term(jax.nn.log_softmax(logits)[:, None]))


def test_k1_and_k3_are_unbiased_and_k2_is_not(float64):
    policy, reference, _ = random_logits()
    new, ref = jax.nn.log_softmax(policy), jax.nn.log_softmax(reference)
    mean = {name: float(jnp.sum(jnp.exp(new) * f(new, ref))) for name, f in loss_terms.KL_ESTIMATORS.items()}
    truth = float(kl_between(policy, reference))
    assert mean["k1"] == pytest.approx(truth, rel=1e-12)
    assert mean["k3"] == pytest.approx(truth, rel=1e-12)
    assert abs(mean["k2"] - truth) > 0.05 * truth
    assert float(jnp.min(loss_terms.k3(new, ref))) >= 0 > float(jnp.min(loss_terms.k1(new, ref)))


@pytest.mark.parametrize(
    ("name", "weight", "on_policy", "divergence"),
    [
        ("k1", "none", True, None),
        ("k2", "none", True, "reverse"),
        ("k3", "none", True, "forward"),
        ("k3", "ratio", True, "reverse"),
        ("k3", "ratio", False, "reverse"),
        ("k2", "stopped_ratio", False, "reverse"),
        ("k1", "ratio", False, "reverse"),
    ],
)
def test_gradients_of_kl_estimators_in_the_loss(float64, name, weight, on_policy, divergence):
    policy, reference, sampler = random_logits()
    ref, old = (jax.nn.log_softmax(x)[:, None] for x in (reference, policy if on_policy else sampler))
    loss_mask = jnp.ones_like(ref, bool)

    def term(new):
        return loss_terms.weighted_kl(
            loss_terms.KL_ESTIMATORS[name](new, ref), loss_terms.token_ratio(new, old, loss_mask), weight
        )

    truth = {
        None: lambda p: 0.0 * p[0],
        "reverse": lambda p: kl_between(p, reference),
        "forward": lambda p: kl_between(reference, p),
    }[divergence]
    terms = (
        expected_loss(term, jnp.exp(old)),
        truth,
        expected_loss(lambda new: loss_terms.KL_ESTIMATORS[name](new, ref), jnp.exp(old)),
    )
    gradient, expected_gradient, unweighted = jax.jit(lambda p: [jax.grad(f)(p) for f in terms])(policy)
    np.testing.assert_allclose(gradient, expected_gradient, **EXACT)
    if not on_policy:
        assert np.abs(unweighted - gradient).max() > 1e-2


def test_k2_in_the_loss_misses_later_tokens_and_k1_in_the_reward_does_not(float64):
    """Rows have two tokens, and the first one decides the KL of the second."""
    rng = np.random.default_rng(1)
    policy, reference = ([jnp.asarray(rng.normal(size=(3,))), jnp.asarray(rng.normal(size=(3, 3)))] for _ in range(2))
    rows = jnp.asarray(list(itertools.product(range(3), repeat=2)))
    loss_mask = jnp.ones_like(rows, bool)

    def log_probs(logits):
        first, second = map(jax.nn.log_softmax, logits)
        return jnp.stack([first[rows[:, 0]], second[rows[:, 0], rows[:, 1]]], 1)

    def truth(logits):
        new = log_probs(logits)
        return jnp.sum(jnp.exp(new.sum(1)) * loss_terms.k1(new, log_probs(reference)).sum(1))

    prob = jax.lax.stop_gradient(jnp.exp(log_probs(policy).sum(1)))
    expected = jax.jit(jax.grad(truth))(policy)
    by_token = jax.jit(jax.grad(lambda p: jnp.sum(prob[:, None] * loss_terms.k2(log_probs(p), log_probs(reference)))))(
        policy
    )
    np.testing.assert_allclose(by_token[1], expected[1], **EXACT)
    assert np.abs(by_token[0] - expected[0]).max() > 1e-2

    def penalised(logits):
        new = log_probs(logits)
        reward = loss_terms.subtract_kl_penalty(
            jnp.zeros_like(new), loss_terms.k1(new, log_probs(reference)), loss_mask, 1.0
        ).sum(1)
        return -jnp.sum(prob * reward * new.sum(1))

    for result, expected_leaf in zip(jax.jit(jax.grad(penalised))(policy), expected, strict=True):
        np.testing.assert_allclose(result, expected_leaf, **EXACT)


def test_the_kl_in_the_loss_is_the_aggregated_estimate(float64):
    """Without advantages, the loss is the coefficient times the aggregated estimate; exact KL is one of the cases."""
    rng = np.random.default_rng(2)
    loss_mask = jnp.asarray(rng.random((4, 5)) < 0.6).at[:, 2].set(True)
    new, old, reference, exact = (jnp.asarray(rng.normal(size=loss_mask.shape)) for _ in range(4))
    counts = denominators(loss_mask, 5)
    for name in ("k1", "k2", "k3", "exact"):
        rows = LossInputs(loss_mask, old, jnp.zeros_like(new), ref_log_prob=reference)
        run = jax.jit(functools.partial(policy_loss, ObjectiveConfig(kl=name), Coefficients(kl_coefficient=0.3)))
        loss, metrics = run(Predictions(new, exact_kl=exact), rows, counts)
        estimate = np.asarray(exact if name == "exact" else loss_terms.KL_ESTIMATORS[name](new, reference))
        means = [np.mean(e[o]) for e, o in zip(estimate, np.asarray(loss_mask), strict=True)]
        np.testing.assert_allclose(metrics["kl_loss"], np.mean(means), **EXACT)
        np.testing.assert_allclose(loss, 0.3 * np.mean(means), **EXACT)


# Advantages.


def test_gae_with_gamma_and_lambda_one_is_return_minus_value(float64):
    rng = np.random.default_rng(3)
    loss_mask = rng.random((6, 9)) < 0.5
    reward, value = rng.normal(size=(2, 6, 9))
    advantage, target = advantages.gae(reward, value, jnp.asarray(loss_mask), 1.0, 1.0)
    returns = np.cumsum(np.where(loss_mask, reward, 0)[:, ::-1], 1)[:, ::-1]
    np.testing.assert_allclose(advantage, np.where(loss_mask, returns - value, 0), **EXACT)
    np.testing.assert_allclose(target, np.where(loss_mask, returns, 0), **EXACT)


def test_gae_skips_tokens_outside_the_loss_mask(float64):
    rng = np.random.default_rng(4)
    loss_mask = np.array([False, True, False, False, True, True, False])
    reward, value = rng.normal(size=(2, 1, 7))
    spread, target = advantages.gae(reward, value, jnp.asarray(loss_mask[None]), 0.9, 0.8, 1.0)
    dense, _ = advantages.gae(reward[:, loss_mask], value[:, loss_mask], jnp.ones((1, 3), bool), 0.9, 0.8)
    np.testing.assert_allclose(spread[0, loss_mask], dense[0], **EXACT)
    a, b, c = reward[0, loss_mask]
    first = a + 0.9 * b + 0.81 * c
    np.testing.assert_allclose(target[0, loss_mask][0], first, **EXACT)  # the lambda of value targets is 1


def test_the_terminal_reward_is_at_the_last_response_token():
    loss_mask = jnp.asarray([[False, True, True, False], [True, False, False, False], [False, False, False, False]])
    reward = advantages.terminal_reward(jnp.asarray([2.0, 3.0, 4.0]), loss_mask)
    np.testing.assert_array_equal(reward, [[0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0]])


def test_group_advantages_ignore_masked_rows(float64):
    rng = np.random.default_rng(5)
    score = rng.normal(size=(4, 6))
    row_mask = rng.random((4, 6)) < 0.7
    row_mask[2] = [True] + [False] * 5
    row_mask[3] = False
    score_with_nan = jnp.asarray(np.where(row_mask, score, np.nan))
    result = {
        "group": advantages.group(score_with_nan, jnp.asarray(row_mask), 1e-6),
        "group_mean": advantages.group_mean(score_with_nan, jnp.asarray(row_mask)),
        "leave_one_out": advantages.leave_one_out(score_with_nan, jnp.asarray(row_mask)),
    }
    for p in range(2):
        s = score[p, row_mask[p]]
        mean, std = s.mean(), s.std(ddof=1)
        np.testing.assert_allclose(result["group"][p, row_mask[p]], (s - mean) / (std + 1e-6), **EXACT)
        np.testing.assert_allclose(result["group_mean"][p, row_mask[p]], s - mean, **EXACT)
        others = [np.delete(s, i).mean() for i in range(len(s))]
        np.testing.assert_allclose(result["leave_one_out"][p, row_mask[p]], s - others, **EXACT)
    for x in result.values():
        np.testing.assert_array_equal(x[2:], 0)  # a single row has no baseline
        np.testing.assert_array_equal(np.asarray(x)[~row_mask], 0)
    np.testing.assert_array_equal(
        advantages.has_signal(score_with_nan, jnp.asarray(row_mask)), [True, True, False, False]
    )


def test_advantages_of_equal_rewards_are_exactly_zero():
    score = jnp.full((2, 7), 0.1, jnp.float32)  # 7 x 0.1 / 7 is not 0.1 in float32
    for name in ("group", "group_mean", "leave_one_out"):
        np.testing.assert_array_equal(getattr(advantages, name)(score), 0)


# Ratios and clipping.


@pytest.mark.parametrize("ratio", ["token", "sequence_sum"])
def test_the_loss_of_a_bandit_has_the_softmax_policy_gradient(float64, ratio):
    """With each action sampled once uniformly, the gradient of E_pi[A] by logit j is pi_j (A_j - E_pi[A])."""
    logits, advantage, _ = random_logits(seed=6)
    loss_mask = jnp.ones((5, 1), bool)
    rows = LossInputs(loss_mask, jnp.full((5, 1), -jnp.log(5.0)), advantage[:, None])
    wide = Coefficients(clip_low=1.0, clip_high=100.0)

    def loss(logits):
        predictions = Predictions(jax.nn.log_softmax(logits)[:, None])
        return policy_loss(
            ObjectiveConfig(advantage="group_mean", ratio=ratio), wide, predictions, rows, denominators(loss_mask, 1)
        )[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    probs, advantage = np.exp(logits) / np.exp(logits).sum(), np.asarray(advantage)
    mean = np.sum(probs * advantage)
    np.testing.assert_allclose(value, -mean, **EXACT)
    np.testing.assert_allclose(gradient, -probs * (advantage - mean), **EXACT)


def test_values_and_slopes_of_the_clipped_surrogate(float64):
    ratio = jnp.asarray([[0.5, 0.9, 1.2, 1.5, 5.0]])
    for sign, values, slopes in (
        (1.0, [0.5, 0.9, 1.2, 1.28, 1.28], [1, 1, 1, 0, 0]),
        (-1.0, [0.8, 0.9, 1.2, 1.5, 3.0], [0, 1, 1, 1, 0]),
    ):
        surrogate = loss_terms.surrogate(jnp.log(ratio), jnp.full((1, 5), 2 * sign), 0.2, 0.28, 3.0)
        np.testing.assert_allclose(surrogate.objective[0], 2 * sign * np.array(values), **EXACT)
        slope = jax.grad(lambda r, a: loss_terms.surrogate(jnp.log(r), a, 0.2, 0.28, 3.0).objective.sum())
        np.testing.assert_allclose(slope(ratio, jnp.full((1, 5), 2 * sign))[0], 2 * sign * np.array(slopes), **EXACT)
        flat = surrogate.low | surrogate.high | surrogate.dual
        np.testing.assert_array_equal(flat[0], np.array(slopes) == 0)


def test_the_surrogate_has_a_gradient_at_its_bounds(float64):
    """Ratios are exactly 1/2, 3/2 and 2, each of which is a bound for one sign of the advantage."""
    ratio, advantage = jnp.asarray([[0.5, 1.5, 2.0]]), jnp.asarray([[-1.0, 1.0, -1.0]])

    def total(log_ratio):
        surrogate = loss_terms.surrogate(
            log_ratio, advantage, 1 - jnp.exp(jnp.log(0.5)), jnp.exp(jnp.log(1.5)) - 1, bound
        )
        return surrogate.objective.sum(), surrogate

    log_ratio = jnp.log(ratio)
    bound = jnp.exp(log_ratio)[0, 2]  # computed as in the surrogate
    (_, surrogate), gradient = jax.value_and_grad(total, has_aux=True)(log_ratio)
    assert not (surrogate.low | surrogate.high | surrogate.dual).any()
    np.testing.assert_allclose(gradient, advantage * ratio, **EXACT)


def test_no_dual_clipping_equals_an_infinite_dual_clip(float64):
    log_ratio, advantage = jnp.asarray([[0.1, 3.0]]), jnp.asarray([[-1.0, -1.0]])
    off = loss_terms.surrogate(log_ratio, advantage, 0.2, 0.2)
    np.testing.assert_array_equal(
        off.objective, loss_terms.surrogate(log_ratio, advantage, 0.2, 0.2, jnp.inf).objective
    )
    np.testing.assert_allclose(off.objective, -jnp.exp(log_ratio), **EXACT)
    assert not off.dual.any()


def test_the_surrogate_is_finite_for_infinite_ratios():
    def total(log_ratio):
        surrogate = loss_terms.surrogate(log_ratio, jnp.asarray([[1.0, 0.0, -1.0]]), 0.2, 0.2, 3.0)
        return surrogate.objective.sum(), surrogate

    (value, surrogate), gradient = jax.value_and_grad(total, has_aux=True)(jnp.full((1, 3), 200.0, jnp.float32))
    np.testing.assert_array_equal(
        [surrogate.low[0], surrogate.high[0], surrogate.dual[0]], [[0, 0, 0], [1, 0, 0], [0, 0, 1]]
    )
    assert float(value) == pytest.approx(1.2 - 3.0)
    np.testing.assert_array_equal(gradient, 0)


def test_sequence_ratios_equal_numpy(float64):
    rng = np.random.default_rng(7)
    new, old = rng.normal(size=(2, 3, 5))
    loss_mask = rng.random((3, 5)) < 0.5
    loss_mask[2] = False
    total = np.where(loss_mask, new - old, 0).sum(1, keepdims=True)
    mean = total / np.maximum(loss_mask.sum(1, keepdims=True), 1)
    arrays = jnp.asarray(new), jnp.asarray(old), jnp.asarray(loss_mask)
    np.testing.assert_allclose(loss_terms.sequence_sum_ratio(*arrays), total, **EXACT)
    np.testing.assert_allclose(loss_terms.sequence_mean_ratio(*arrays), np.where(loss_mask, mean, 0), **EXACT)
    slope = jax.grad(lambda x: jnp.sum(jnp.exp(loss_terms.sequence_mean_ratio(x, *arrays[1:])) * arrays[2]))(arrays[0])
    np.testing.assert_allclose(slope, np.where(loss_mask, np.exp(mean), 0), **EXACT)


# Corrections and preferences.


def test_geometric_masks_do_not_depend_on_row_length(float64):
    log_weight = jnp.full((2, 40), 0.05).at[1].set(0.5)
    loss_mask = jnp.ones_like(log_weight, bool)
    by_product = loss_terms.masked_importance_weight(log_weight, loss_mask, 0.5, 1.5, "sequence")
    by_mean = loss_terms.masked_importance_weight(log_weight, loss_mask, 0.5, 1.5, "geometric")
    np.testing.assert_array_equal(by_product, 0)
    np.testing.assert_allclose(by_mean, [[np.exp(0.05)] * 40, [0.0] * 40], **EXACT)


@pytest.mark.parametrize("kind", ["tis", "mis"])
def test_importance_weights_have_no_gradient(kind):
    bounds = {"tis": (2.0,), "mis": (0.5, 2.0)}[kind]
    function = {"tis": loss_terms.truncated_importance_weight, "mis": loss_terms.masked_importance_weight}[kind]
    weight = lambda x: jnp.sum(function(x, jnp.ones((1, 2), bool), *bounds))  # noqa: E731
    np.testing.assert_array_equal(jax.grad(weight)(jnp.asarray([[0.1, 0.2]])), 0)


def test_dpo_drops_a_pair_with_a_masked_row(float64):
    rng = np.random.default_rng(3)
    new, reference = (jnp.asarray(rng.normal(-1.0, 0.5, (4, 5))) for _ in range(2))
    loss_mask = jnp.ones((4, 5), bool).at[3].set(False)  # the second pair's rejected row
    parts, coefficients = PRESETS["dpo"]

    def loss(new):
        rows = LossInputs(loss_mask, ref_log_prob=reference)
        return policy_loss(parts, coefficients, Predictions(new), rows, denominators(loss_mask[:2], loss_mask.shape[1]))

    gradient, metrics = jax.grad(loss, has_aux=True)(new)
    first = loss_terms.dpo(new[:2], reference[:2], loss_mask[:2], coefficients.beta, coefficients.label_smoothing)
    np.testing.assert_allclose(metrics["loss"], first["loss"][0])
    np.testing.assert_allclose(metrics["margin"], first["margin"][0])
    assert (gradient[:2] != 0).all()
    assert (gradient[2:] == 0).all()


def test_dpo_with_label_smoothing_is_a_cross_entropy(float64):
    log_prob, ref_log_prob = jnp.asarray([[-3.0], [-4.0]]), jnp.asarray([[-3.5], [-3.0]])
    result = loss_terms.dpo(log_prob, ref_log_prob, jnp.ones((2, 1), bool), beta=0.5, label_smoothing=0.1)
    prob = 1 / (1 + np.exp(-0.5 * (0.5 - -1.0)))
    np.testing.assert_allclose(result["loss"], -0.9 * np.log(prob) - 0.1 * np.log(1 - prob), **EXACT)
    np.testing.assert_allclose(result["margin"], 0.75, **EXACT)
    np.testing.assert_allclose([result["chosen_reward"], result["rejected_reward"]], [[0.25], [-0.5]], **EXACT)
    assert result["preference_accuracy"] == 1


# Properties of the complete loss for several objectives.

OBJECTIVES = PRESETS | {
    "tis": (
        ObjectiveConfig(correction="tis", correction_level="sequence", kl="k3", kl_weight="ratio"),
        Coefficients(kl_coefficient=0.1),
    ),
    "mis": (
        ObjectiveConfig(correction="mis", correction_level="geometric", entropy_bonus=True),
        Coefficients(entropy_coefficient=0.1),
    ),
    "exact": (ObjectiveConfig(kl="exact", aggregation="token_minibatch"), Coefficients(kl_coefficient=0.1)),
}
PAIRS, MEMBERS, SLOTS = 4, 2, 6


def random_arrays(seed=8):
    """Returns a loss mask, scores, and arrays by name, all float32; every row has a response token."""
    rng = np.random.default_rng(seed)
    n = PAIRS * MEMBERS
    loss_mask = rng.random((n, SLOTS)) < 0.5
    loss_mask[:, 3] = True
    old = -np.abs(rng.normal(size=(n, SLOTS)))
    arrays = {"old": old} | {x: old + 0.3 * rng.normal(size=old.shape) for x in ("new", "sampled", "reference")}
    arrays |= {x: rng.normal(size=old.shape) for x in ("value", "new_value", "entropy", "exact_kl")}
    return loss_mask, np.float32(rng.normal(size=(PAIRS, MEMBERS))), {k: np.float32(v) for k, v in arrays.items()}


def estimate_and_differentiate(parts, coefficients, loss_mask, score, x, counts=None, row_mask=None):
    """Returns metrics and the gradients of the loss by the models' predictions; callers jit it."""
    policy = parts.objective == "policy"
    penalty = loss_terms.k1(x["old"], x["reference"]) if policy and parts.kl_in == "reward" else None
    value = x["value"] if parts.critic else None
    advantages_and_target = (
        estimate_advantages(parts, coefficients, score, loss_mask, row_mask, penalty, value) if policy else (None, None)
    )
    rows = LossInputs(
        loss_mask, x["old"], advantages_and_target[0], x["sampled"], x["reference"], value, advantages_and_target[1]
    )
    return minibatch_metrics_and_gradient(
        parts, coefficients, rows, x, denominators(loss_mask, SLOTS) if counts is None else counts
    )


def minibatch_metrics_and_gradient(parts, coefficients, rows, x, counts):
    def loss(predictions):
        return policy_loss(parts, coefficients, predictions, rows, counts)

    predictions = Predictions(x["new"], x["entropy"], x["new_value"], x["exact_kl"])
    gradient, metrics = jax.grad(loss, has_aux=True)(predictions)
    return metrics, gradient


@pytest.mark.parametrize("name", OBJECTIVES)
def test_values_at_masked_tokens_do_not_change_the_loss(name):
    parts, coefficients = OBJECTIVES[name]
    coefficients = jax.tree.map(jnp.float32, coefficients)
    loss_mask, score, x = random_arrays()
    run = jax.jit(lambda c, loss_mask, score, x: estimate_and_differentiate(parts, c, loss_mask, score, x))
    rng = np.random.default_rng(9)
    metrics, gradient = run(coefficients, loss_mask, score, x)
    assert float(np.abs(gradient.log_prob).max()) > 1e-4
    for change in (lambda a: a + rng.normal(0, 9, a.shape), lambda a: np.full(a.shape, np.nan)):
        changed = {k: np.where(loss_mask, v, np.float32(change(v))) for k, v in x.items()}
        changed_metrics, changed_gradient = run(coefficients, loss_mask, score, changed)
        for left, right in zip(
            jax.tree.leaves((metrics, gradient)), jax.tree.leaves((changed_metrics, changed_gradient)), strict=True
        ):
            np.testing.assert_array_equal(left, right)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(np.asarray(leaf)[~loss_mask], 0)
    assert {a.dtype for a in jax.tree.leaves((metrics, gradient))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", [name for name, (parts, _) in OBJECTIVES.items() if parts.objective == "policy"])
def test_score_weights_equal_finite_differences_of_the_loss(name):
    """Differentiates the complete loss by the log-probabilities, without a KL term, which the weights leave out."""
    parts, coefficients = OBJECTIVES[name]
    coefficients = dataclasses.replace(coefficients, kl_coefficient=0.0 if parts.kl_in == "loss" else 0.3)
    loss_mask, score, x = random_arrays()
    with jax.enable_x64(True):
        loss_mask, score, x = jax.tree.map(jnp.float64, (loss_mask, score, x))
        loss_mask = loss_mask > 0
        value = x["value"] if parts.critic else None
        penalty = loss_terms.k1(x["old"], x["reference"]) if parts.kl_in == "reward" else None
        advantage, target = estimate_advantages(parts, coefficients, score, loss_mask, None, penalty, value)
        rows = LossInputs(loss_mask, x["old"], advantage, x["sampled"], x["reference"], value, target)
        counts = denominators(loss_mask, SLOTS)

        def loss(new):
            predictions = Predictions(new, x["entropy"], x["new_value"], x["exact_kl"])
            return policy_loss(parts, coefficients, predictions, rows, counts)[0]

        steps = 1e-6 * jnp.eye(loss_mask.size).reshape(-1, *loss_mask.shape)
        slopes = jax.vmap(lambda d: (loss(x["new"] + d) - loss(x["new"] - d)) / 2e-6)(steps).reshape(loss_mask.shape)
        weights = score_weights(parts, coefficients, Predictions(x["new"]), rows, counts)
    np.testing.assert_allclose(weights, np.abs(slopes), rtol=1e-5, atol=1e-8)
    assert not np.asarray(weights)[~np.asarray(loss_mask)].any()
    assert np.asarray(weights)[np.asarray(loss_mask)].max() > 1e-3


@pytest.mark.parametrize("name", ["ppo_lm", "grpo", "dr_grpo", "dapo", "dpo", "mis"])
def test_losses_and_gradients_of_microbatches_add_up(name):
    parts, coefficients = OBJECTIVES[name]
    loss_mask, _, x = random_arrays()
    loss_mask[:2] = False  # a masked pair
    counts = denominators(jnp.asarray(loss_mask), SLOTS, 7.0)
    rows = LossInputs(loss_mask, x["old"], x["entropy"], x["sampled"], x["reference"], x["value"], x["exact_kl"])
    slice_rows = lambda tree, at: jax.tree.map(lambda a: a[at], tree)  # noqa: E731
    run = jax.jit(lambda rows, x: minibatch_metrics_and_gradient(parts, coefficients, rows, x, counts))
    metrics, gradient = run(rows, x)
    halves = [run(slice_rows(rows, at), slice_rows(x, at)) for at in (slice(0, 4), slice(4, 8))]
    for key, value in metrics.items():
        terms = [float(half[0][key]) for half in halves]
        assert float(value) == pytest.approx(sum(terms), rel=1e-5, abs=1e-6), key
    for left, *right in zip(*(jax.tree.leaves(g) for g in (gradient, *(half[1] for half in halves))), strict=True):
        np.testing.assert_allclose(left, np.concatenate(right), rtol=1e-5, atol=1e-7)


def test_masked_groups_do_not_change_other_rows():
    """Two of four groups are kept: advantages, loss and gradients equal those of these two alone."""
    loss_mask, score, x = random_arrays()
    row_mask = np.array([[True] * 2, [False] * 2, [True] * 2, [False] * 2])
    rows = np.repeat(row_mask[:, 0], 2)
    for name in ("ppo_lm", "grpo"):
        parts, coefficients = PRESETS[name]
        run = jax.jit(functools.partial(estimate_and_differentiate, parts, coefficients))
        masked = jnp.asarray(loss_mask & rows[:, None])
        counts = denominators(masked, SLOTS)
        metrics, gradient = run(masked, jnp.asarray(score), x, counts, jnp.asarray(row_mask))
        kept_arrays = {k: v[rows] for k, v in x.items()}
        metrics_alone, gradient_alone = run(
            jnp.asarray(loss_mask[rows]), jnp.asarray(score[row_mask[:, 0]]), kept_arrays
        )
        np.testing.assert_allclose(metrics["loss"], metrics_alone["loss"], rtol=1e-5)
        for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(gradient_alone), strict=True):
            np.testing.assert_allclose(np.asarray(a)[rows], b, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(np.asarray(a)[~rows], 0)


def test_masked_rows_do_not_enter_whitened_gae():
    """The loss mask includes their tokens; the row mask does not."""
    parts, coefficients = PRESETS["ppo_lm"]
    loss_mask, score, x = random_arrays()
    row_mask = np.array([[True] * 2, [True, False], [True] * 2, [False] * 2])
    run = jax.jit(functools.partial(estimate_advantages, parts, coefficients))
    arguments = jnp.asarray(score), jnp.asarray(loss_mask)
    result = run(*arguments, jnp.asarray(row_mask), x["entropy"], x["value"])
    result_without_rows = run(
        arguments[0],
        jnp.asarray(loss_mask & row_mask.reshape(-1, 1)),
        jnp.ones_like(row_mask),
        x["entropy"],
        x["value"],
    )
    for a, b in zip(result, result_without_rows, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.asarray(a)[~row_mask.reshape(-1)], 0)


def test_token_iteration_weighs_all_tokens_of_an_iteration_equally():
    rng = np.random.default_rng(10)
    loss_mask = jnp.asarray(rng.random((8, 6)) < 0.5)
    loss = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)
    minibatches = [(loss[i : i + 2], loss_mask[i : i + 2]) for i in range(0, 8, 2)]

    def mean(aggregation):
        results = [
            loss_terms.aggregate(aggregation, x, mask, denominators(mask, 6, loss_mask.sum() / 4))
            for x, mask in minibatches
        ]
        return float(sum(results)) / 4

    assert mean("token_iteration") == pytest.approx(float(loss[loss_mask].mean()), rel=1e-5)
    assert abs(mean("token_minibatch") - float(loss[loss_mask].mean())) > 1e-3


def test_coefficients_may_differ_between_vmapped_lanes():
    """Lanes with different coefficients under vmap equal those lanes alone."""
    parts, coefficients = OBJECTIVES["ppo_lm"]
    loss_mask, score, x = random_arrays()
    lanes = jax.tree.map(lambda c: jnp.float32(c) * jnp.asarray([1.0, 0.5, 0.1]), coefficients)
    lanes = dataclasses.replace(lanes, dual_clip=jnp.asarray([jnp.inf, 3.0, 1.1]))
    run = lambda c: estimate_and_differentiate(parts, c, jnp.asarray(loss_mask), jnp.asarray(score), x)  # noqa: E731
    batched = jax.jit(jax.vmap(run))(lanes)
    run_single = jax.jit(run)
    for lane in range(3):
        single = run_single(jax.tree.map(lambda c: c[lane], lanes))  # noqa: B023
        for a, b in zip(jax.tree.leaves(batched), jax.tree.leaves(single), strict=True):
            np.testing.assert_allclose(a[lane], b, rtol=1e-4, atol=1e-6)
    assert len({float(v) for v in batched[0]["loss"]}) == 3


@pytest.mark.parametrize(
    ("name", "neutral", "values"),
    [
        ("top_p", 1.0, (0.9, 0.5)),
        ("entropy_coefficient", 0.0, (0.01, 1.0)),
        ("gae_lambda_length", 0.0, (0.05, 1.0)),
        ("overlong_buffer", 0.0, (0.1, 0.9)),
    ],
)
def test_neutral_settings_change_the_structure_and_others_do_not(name, neutral, values):
    """A part with a neutral setting is not computed; learners with two other values share a program."""
    settings = settings_of("ppo_lm")
    neutral_structure = settings(**{name: neutral}).structure
    first, second = (settings(**{name: number}).structure for number in values)
    assert getattr(neutral_structure, name) == neutral
    assert first == second != neutral_structure
