"""Parts of losses on dialogues against closed forms, enumeration of a small vocabulary, and float64 NumPy."""

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


# KL estimators, over all tokens that there are.


def kl_of(one, other):
    one, other = jax.nn.log_softmax(one), jax.nn.log_softmax(other)
    return jnp.sum(jnp.exp(one) * (one - other))


def bandit(seed=0, size=5):
    """Logits of a policy, a reference and a sampler."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, size)))


def expected(term, weights):
    """The sum over all tokens of a loss of each times its weight, both `[V, 1]`."""
    return lambda logits: jnp.sum(weights * term(jax.nn.log_softmax(logits)[:, None]))


def test_the_estimators_means_are_those_known(float64):
    policy, reference, _ = bandit()
    new, ref = jax.nn.log_softmax(policy), jax.nn.log_softmax(reference)
    mean = {name: float(jnp.sum(jnp.exp(new) * f(new, ref))) for name, f in loss_terms.KL_ESTIMATORS.items()}
    truth = float(kl_of(policy, reference))
    assert mean["k1"] == pytest.approx(truth, rel=1e-12)
    assert mean["k3"] == pytest.approx(truth, rel=1e-12)
    assert abs(mean["k2"] - truth) > 0.05 * truth
    assert float(jnp.min(loss_terms.k3(new, ref))) >= 0 > float(jnp.min(loss_terms.k1(new, ref)))


@pytest.mark.parametrize(
    ("name", "weight", "on_policy", "wanted"),
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
def test_what_gradient_an_estimator_in_the_loss_follows(float64, name, weight, on_policy, wanted):
    policy, reference, sampler = bandit()
    ref, old = (jax.nn.log_softmax(x)[:, None] for x in (reference, policy if on_policy else sampler))
    own = jnp.ones_like(ref, bool)

    def term(new):
        return loss_terms.weighted_kl(
            loss_terms.KL_ESTIMATORS[name](new, ref), loss_terms.token_ratio(new, old, own), weight
        )

    truth = {
        None: lambda p: 0.0 * p[0],
        "reverse": lambda p: kl_of(p, reference),
        "forward": lambda p: kl_of(reference, p),
    }[wanted]
    terms = (
        expected(term, jnp.exp(old)),
        truth,
        expected(lambda new: loss_terms.KL_ESTIMATORS[name](new, ref), jnp.exp(old)),
    )
    gradient, known, unweighted = jax.jit(lambda p: [jax.grad(f)(p) for f in terms])(policy)
    np.testing.assert_allclose(gradient, known, **EXACT)
    if not on_policy:
        assert np.abs(unweighted - gradient).max() > 1e-2


def test_k2_is_right_for_a_token_and_wrong_for_a_row_where_k1_in_the_reward_is_right(float64):
    """Two tokens: the first decides which KL the second one pays."""
    rng = np.random.default_rng(1)
    policy, reference = ([jnp.asarray(rng.normal(size=(3,))), jnp.asarray(rng.normal(size=(3, 3)))] for _ in range(2))
    rows = jnp.asarray(list(itertools.product(range(3), repeat=2)))
    own = jnp.ones_like(rows, bool)

    def of_rows(logits):
        first, second = map(jax.nn.log_softmax, logits)
        return jnp.stack([first[rows[:, 0]], second[rows[:, 0], rows[:, 1]]], 1)

    def truth(logits):
        new = of_rows(logits)
        return jnp.sum(jnp.exp(new.sum(1)) * loss_terms.k1(new, of_rows(reference)).sum(1))

    chance = jax.lax.stop_gradient(jnp.exp(of_rows(policy).sum(1)))
    wanted = jax.jit(jax.grad(truth))(policy)
    by_token = jax.jit(jax.grad(lambda p: jnp.sum(chance[:, None] * loss_terms.k2(of_rows(p), of_rows(reference)))))(
        policy
    )
    np.testing.assert_allclose(by_token[1], wanted[1], **EXACT)
    assert np.abs(by_token[0] - wanted[0]).max() > 1e-2

    def penalised(logits):
        new = of_rows(logits)
        reward = loss_terms.subtract_kl_penalty(
            jnp.zeros_like(new), loss_terms.k1(new, of_rows(reference)), own, 1.0
        ).sum(1)
        return -jnp.sum(chance * reward * new.sum(1))

    for mine, known in zip(jax.jit(jax.grad(penalised))(policy), wanted, strict=True):
        np.testing.assert_allclose(mine, known, **EXACT)


def test_kl_is_in_the_loss_as_the_parts_say(float64):
    """Of rows without advantage, the loss is the coefficient times the aggregated estimate, exact KL included."""
    rng = np.random.default_rng(2)
    own = jnp.asarray(rng.random((4, 5)) < 0.6).at[:, 2].set(True)
    new, old, reference, exact = (jnp.asarray(rng.normal(size=own.shape)) for _ in range(4))
    counts = denominators(own, 5)
    for name in ("k1", "k2", "k3", "exact"):
        rows = LossInputs(own, old, jnp.zeros_like(new), ref_log_prob=reference)
        run = jax.jit(functools.partial(policy_loss, ObjectiveConfig(kl=name), Coefficients(kl_coefficient=0.3)))
        loss, told = run(Predictions(new, exact_kl=exact), rows, counts)
        estimate = np.asarray(exact if name == "exact" else loss_terms.KL_ESTIMATORS[name](new, reference))
        means = [np.mean(e[o]) for e, o in zip(estimate, np.asarray(own), strict=True)]
        np.testing.assert_allclose(told["kl_loss"], np.mean(means), **EXACT)
        np.testing.assert_allclose(loss, 0.3 * np.mean(means), **EXACT)


# Advantages.


def test_gamma_and_lambda_of_one_give_the_return_less_the_value(float64):
    rng = np.random.default_rng(3)
    own = rng.random((6, 9)) < 0.5
    reward, value = rng.normal(size=(2, 6, 9))
    advantage, target = advantages.gae(reward, value, jnp.asarray(own), 1.0, 1.0)
    to_come = np.cumsum(np.where(own, reward, 0)[:, ::-1], 1)[:, ::-1]
    np.testing.assert_allclose(advantage, np.where(own, to_come - value, 0), **EXACT)
    np.testing.assert_allclose(target, np.where(own, to_come, 0), **EXACT)


def test_given_tokens_between_own_ones_are_as_if_they_were_not_there(float64):
    rng = np.random.default_rng(4)
    own = np.array([False, True, False, False, True, True, False])
    reward, value = rng.normal(size=(2, 1, 7))
    spread, target = advantages.gae(reward, value, jnp.asarray(own[None]), 0.9, 0.8, 1.0)
    dense, _ = advantages.gae(reward[:, own], value[:, own], jnp.ones((1, 3), bool), 0.9, 0.8)
    np.testing.assert_allclose(spread[0, own], dense[0], **EXACT)
    one, two, three = reward[0, own]
    first = one + 0.9 * two + 0.81 * three
    np.testing.assert_allclose(target[0, own][0], first, **EXACT)  # the critic's lambda is 1


def test_a_score_is_paid_at_the_last_own_token():
    own = jnp.asarray([[False, True, True, False], [True, False, False, False], [False, False, False, False]])
    found = advantages.terminal_reward(jnp.asarray([2.0, 3.0, 4.0]), own)
    np.testing.assert_array_equal(found, [[0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0]])


def test_rows_that_are_not_kept_leave_means_deviations_and_counts(float64):
    rng = np.random.default_rng(5)
    score = rng.normal(size=(4, 6))
    kept = rng.random((4, 6)) < 0.7
    kept[2] = [True] + [False] * 5
    kept[3] = False
    spoilt = jnp.asarray(np.where(kept, score, np.nan))
    found = {
        "group": advantages.group(spoilt, jnp.asarray(kept), 1e-6),
        "group_mean": advantages.group_mean(spoilt, jnp.asarray(kept)),
        "leave_one_out": advantages.leave_one_out(spoilt, jnp.asarray(kept)),
    }
    for p in range(2):
        s = score[p, kept[p]]
        mean, std = s.mean(), s.std(ddof=1)
        np.testing.assert_allclose(found["group"][p, kept[p]], (s - mean) / (std + 1e-6), **EXACT)
        np.testing.assert_allclose(found["group_mean"][p, kept[p]], s - mean, **EXACT)
        others = [np.delete(s, i).mean() for i in range(len(s))]
        np.testing.assert_allclose(found["leave_one_out"][p, kept[p]], s - others, **EXACT)
    for x in found.values():
        np.testing.assert_array_equal(x[2:], 0)  # one row has no other to compare with
        np.testing.assert_array_equal(np.asarray(x)[~kept], 0)
    np.testing.assert_array_equal(advantages.has_signal(spoilt, jnp.asarray(kept)), [True, True, False, False])


def test_a_group_without_signal_has_advantages_of_exactly_zero():
    score = jnp.full((2, 7), 0.1, jnp.float32)  # 7 x 0.1 / 7 is not 0.1 in float32
    for name in ("group", "group_mean", "leave_one_out"):
        np.testing.assert_array_equal(getattr(advantages, name)(score), 0)


# Ratios and clipping.


@pytest.mark.parametrize("ratio", ["token", "sequence_sum"])
def test_a_bandit_s_gradient_is_the_softmax_policy_gradient(float64, ratio):
    """Every action once from a uniform sampler: the gradient of E_pi[A] by logit j is pi_j (A_j - E_pi[A])."""
    logits, advantage, _ = bandit(seed=6)
    own = jnp.ones((5, 1), bool)
    rows = LossInputs(own, jnp.full((5, 1), -jnp.log(5.0)), advantage[:, None])
    wide = Coefficients(clip_low=1.0, clip_high=100.0)

    def loss(logits):
        now = Predictions(jax.nn.log_softmax(logits)[:, None])
        return policy_loss(ObjectiveConfig(advantage="group_mean", ratio=ratio), wide, now, rows, denominators(own, 1))[
            0
        ]

    value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
    chance, advantage = np.exp(logits) / np.exp(logits).sum(), np.asarray(advantage)
    mean = np.sum(chance * advantage)
    np.testing.assert_allclose(value, -mean, **EXACT)
    np.testing.assert_allclose(gradient, -chance * (advantage - mean), **EXACT)


def test_where_the_surrogate_is_flat_and_what_it_is_there(float64):
    ratio = jnp.asarray([[0.5, 0.9, 1.2, 1.5, 5.0]])
    for sign, values, slopes in (
        (1.0, [0.5, 0.9, 1.2, 1.28, 1.28], [1, 1, 1, 0, 0]),
        (-1.0, [0.8, 0.9, 1.2, 1.5, 3.0], [0, 1, 1, 1, 0]),
    ):
        made = loss_terms.surrogate(jnp.log(ratio), jnp.full((1, 5), 2 * sign), 0.2, 0.28, 3.0)
        np.testing.assert_allclose(made.objective[0], 2 * sign * np.array(values), **EXACT)
        slope = jax.grad(lambda r, a: loss_terms.surrogate(jnp.log(r), a, 0.2, 0.28, 3.0).objective.sum())
        np.testing.assert_allclose(slope(ratio, jnp.full((1, 5), 2 * sign))[0], 2 * sign * np.array(slopes), **EXACT)
        flat = made.low | made.high | made.dual
        np.testing.assert_array_equal(flat[0], np.array(slopes) == 0)


def test_on_a_bound_the_gradient_goes_through(float64):
    """Ratios of exactly 1/2, 3/2 and 2, which are bounds for some sign of the advantage each."""
    ratio, advantage = jnp.asarray([[0.5, 1.5, 2.0]]), jnp.asarray([[-1.0, 1.0, -1.0]])

    def total(log_ratio):
        made = loss_terms.surrogate(log_ratio, advantage, 1 - jnp.exp(jnp.log(0.5)), jnp.exp(jnp.log(1.5)) - 1, bound)
        return made.objective.sum(), made

    log_ratio = jnp.log(ratio)
    bound = jnp.exp(log_ratio)[0, 2]  # as the surrogate computes the ratio
    (_, made), gradient = jax.value_and_grad(total, has_aux=True)(log_ratio)
    assert not (made.low | made.high | made.dual).any()
    np.testing.assert_allclose(gradient, advantage * ratio, **EXACT)


def test_no_dual_clipping_is_an_infinite_one(float64):
    log_ratio, advantage = jnp.asarray([[0.1, 3.0]]), jnp.asarray([[-1.0, -1.0]])
    off = loss_terms.surrogate(log_ratio, advantage, 0.2, 0.2)
    np.testing.assert_array_equal(
        off.objective, loss_terms.surrogate(log_ratio, advantage, 0.2, 0.2, jnp.inf).objective
    )
    np.testing.assert_allclose(off.objective, -jnp.exp(log_ratio), **EXACT)
    assert not off.dual.any()


def test_a_ratio_that_is_infinite_does_no_harm_where_it_does_not_count():
    def total(log_ratio):
        made = loss_terms.surrogate(log_ratio, jnp.asarray([[1.0, 0.0, -1.0]]), 0.2, 0.2, 3.0)
        return made.objective.sum(), made

    (value, made), gradient = jax.value_and_grad(total, has_aux=True)(jnp.full((1, 3), 200.0, jnp.float32))
    np.testing.assert_array_equal([made.low[0], made.high[0], made.dual[0]], [[0, 0, 0], [1, 0, 0], [0, 0, 1]])
    assert float(value) == pytest.approx(1.2 - 3.0)
    np.testing.assert_array_equal(gradient, 0)


def test_ratios_of_rows(float64):
    rng = np.random.default_rng(7)
    new, old = rng.normal(size=(2, 3, 5))
    own = rng.random((3, 5)) < 0.5
    own[2] = False
    total = np.where(own, new - old, 0).sum(1, keepdims=True)
    mean = total / np.maximum(own.sum(1, keepdims=True), 1)
    arrays = jnp.asarray(new), jnp.asarray(old), jnp.asarray(own)
    np.testing.assert_allclose(loss_terms.sequence_sum_ratio(*arrays), total, **EXACT)
    np.testing.assert_allclose(loss_terms.sequence_mean_ratio(*arrays), np.where(own, mean, 0), **EXACT)
    slope = jax.grad(lambda x: jnp.sum(jnp.exp(loss_terms.sequence_mean_ratio(x, *arrays[1:])) * arrays[2]))(arrays[0])
    np.testing.assert_allclose(slope, np.where(own, np.exp(mean), 0), **EXACT)


# Corrections and preferences.


def test_masks_by_a_row_s_geometric_mean_do_not_reject_it_for_being_long(float64):
    log_weight = jnp.full((2, 40), 0.05).at[1].set(0.5)
    own = jnp.ones_like(log_weight, bool)
    by_product = loss_terms.masked_importance_weight(log_weight, own, 0.5, 1.5, "sequence")
    by_mean = loss_terms.masked_importance_weight(log_weight, own, 0.5, 1.5, "geometric")
    np.testing.assert_array_equal(by_product, 0)
    np.testing.assert_allclose(by_mean, [[np.exp(0.05)] * 40, [0.0] * 40], **EXACT)


@pytest.mark.parametrize("kind", ["tis", "mis"])
def test_weights_are_constants_to_the_gradient(kind):
    bounds = {"tis": (2.0,), "mis": (0.5, 2.0)}[kind]
    function = {"tis": loss_terms.truncated_importance_weight, "mis": loss_terms.masked_importance_weight}[kind]
    weight = lambda x: jnp.sum(function(x, jnp.ones((1, 2), bool), *bounds))  # noqa: E731
    np.testing.assert_array_equal(jax.grad(weight)(jnp.asarray([[0.1, 0.2]])), 0)


def test_a_pair_of_which_one_row_does_not_count_does_not_count(float64):
    random = np.random.default_rng(3)
    new, reference = (jnp.asarray(random.normal(-1.0, 0.5, (4, 5))) for _ in range(2))
    own = jnp.ones((4, 5), bool).at[3].set(False)  # the second pair's rejected row
    parts, coefficients = PRESETS["dpo"]

    def loss(new):
        rows = LossInputs(own, ref_log_prob=reference)
        return policy_loss(parts, coefficients, Predictions(new), rows, denominators(own[:2], own.shape[1]))

    gradient, told = jax.grad(loss, has_aux=True)(new)
    first = loss_terms.dpo_of_rows(new[:2], reference[:2], own[:2], coefficients.beta, coefficients.label_smoothing)
    np.testing.assert_allclose(told["loss"], first.loss[0])
    np.testing.assert_allclose(told["margin"], first.margin[0])
    assert (gradient[:2] != 0).all()
    assert (gradient[2:] == 0).all()


def test_smoothed_preferences_are_a_cross_entropy(float64):
    made = loss_terms.dpo(*(jnp.asarray([x]) for x in (-3.0, -4.0, -3.5, -3.0)), beta=0.5, label_smoothing=0.1)
    chance = 1 / (1 + np.exp(-0.5 * (0.5 - -1.0)))
    np.testing.assert_allclose(made.loss, -0.9 * np.log(chance) - 0.1 * np.log(1 - chance), **EXACT)
    np.testing.assert_allclose(made.margin, 0.75, **EXACT)
    assert made.accuracy == 1


# What the whole does, whichever its parts.

WHOLES = PRESETS | {
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


def drawn(seed=8):
    """Own-mask, scores, and arrays by name, all float32; no gradient of them is zero for want of an own token."""
    rng = np.random.default_rng(seed)
    n = PAIRS * MEMBERS
    own = rng.random((n, SLOTS)) < 0.5
    own[:, 3] = True
    old = -np.abs(rng.normal(size=(n, SLOTS)))
    arrays = {"old": old} | {x: old + 0.3 * rng.normal(size=old.shape) for x in ("new", "sampled", "reference")}
    arrays |= {x: rng.normal(size=old.shape) for x in ("value", "new_value", "entropy", "exact_kl")}
    return own, np.float32(rng.normal(size=(PAIRS, MEMBERS))), {k: np.float32(v) for k, v in arrays.items()}


def advance(parts, coefficients, own, score, x, counts=None, kept=None):
    """Loss, statistics, and the gradients by all that the trained parameters say; jitted by the caller."""
    policy = parts.objective == "policy"
    penalty = loss_terms.k1(x["old"], x["reference"]) if policy and parts.kl_in == "reward" else None
    value = x["value"] if parts.critic else None
    both = estimate_advantages(parts, coefficients, score, own, kept, penalty, value) if policy else (None, None)
    rows = LossInputs(own, x["old"], both[0], x["sampled"], x["reference"], value, both[1])
    return of_minibatch(parts, coefficients, rows, x, denominators(own, SLOTS) if counts is None else counts)


def of_minibatch(parts, coefficients, rows, x, counts):
    def loss(now):
        return policy_loss(parts, coefficients, now, rows, counts)

    now = Predictions(x["new"], x["entropy"], x["new_value"], x["exact_kl"])
    gradient, told = jax.grad(loss, has_aux=True)(now)
    return told, gradient


@pytest.mark.parametrize("name", WHOLES)
def test_what_is_said_of_given_tokens_changes_no_bit(name):
    parts, coefficients = WHOLES[name]
    coefficients = jax.tree.map(jnp.float32, coefficients)
    own, score, x = drawn()
    run = jax.jit(lambda c, own, score, x: advance(parts, c, own, score, x))
    rng = np.random.default_rng(9)
    told, gradient = run(coefficients, own, score, x)
    assert float(np.abs(gradient.log_prob).max()) > 1e-4
    for other in (lambda a: a + rng.normal(0, 9, a.shape), lambda a: np.full(a.shape, np.nan)):
        spoilt = {k: np.where(own, v, np.float32(other(v))) for k, v in x.items()}
        again, gradients = run(coefficients, own, score, spoilt)
        for one, two in zip(jax.tree.leaves((told, gradient)), jax.tree.leaves((again, gradients)), strict=True):
            np.testing.assert_array_equal(one, two)
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(np.asarray(leaf)[~own], 0)
    assert {a.dtype for a in jax.tree.leaves((told, gradient))} == {jnp.dtype("float32")}


@pytest.mark.parametrize("name", [name for name, (parts, _) in WHOLES.items() if parts.objective == "policy"])
def test_a_weight_is_the_share_of_a_token_s_score_in_the_gradient(name):
    """The whole loss' gradient by the log-probabilities, where no KL in the loss has a part in it; by differences."""
    parts, coefficients = WHOLES[name]
    coefficients = dataclasses.replace(coefficients, kl_coefficient=0.0 if parts.kl_in == "loss" else 0.3)
    own, score, x = drawn()
    with jax.enable_x64(True):
        own, score, x = jax.tree.map(jnp.float64, (own, score, x))
        own = own > 0
        value = x["value"] if parts.critic else None
        penalty = loss_terms.k1(x["old"], x["reference"]) if parts.kl_in == "reward" else None
        advantage, target = estimate_advantages(parts, coefficients, score, own, None, penalty, value)
        rows = LossInputs(own, x["old"], advantage, x["sampled"], x["reference"], value, target)
        counts = denominators(own, SLOTS)

        def loss(new):
            now = Predictions(new, x["entropy"], x["new_value"], x["exact_kl"])
            return policy_loss(parts, coefficients, now, rows, counts)[0]

        steps = 1e-6 * jnp.eye(own.size).reshape(-1, *own.shape)
        slopes = jax.vmap(lambda d: (loss(x["new"] + d) - loss(x["new"] - d)) / 2e-6)(steps).reshape(own.shape)
        found = score_weights(parts, coefficients, Predictions(x["new"]), rows, counts)
    np.testing.assert_allclose(found, np.abs(slopes), rtol=1e-5, atol=1e-8)
    assert not np.asarray(found)[~np.asarray(own)].any()
    assert np.asarray(found)[np.asarray(own)].max() > 1e-3


@pytest.mark.parametrize("name", ["ppo_lm", "grpo", "dr_grpo", "dapo", "dpo", "mis"])
def test_parts_of_a_minibatch_add_up(name):
    parts, coefficients = WHOLES[name]
    own, _, x = drawn()
    own[:2] = False  # a pair that sampling did not keep
    counts = denominators(jnp.asarray(own), SLOTS, 7.0)
    rows = LossInputs(own, x["old"], x["entropy"], x["sampled"], x["reference"], x["value"], x["exact_kl"])
    cut = lambda tree, at: jax.tree.map(lambda a: a[at], tree)  # noqa: E731
    run = jax.jit(lambda rows, x: of_minibatch(parts, coefficients, rows, x, counts))
    whole, gradient = run(rows, x)
    halves = [run(cut(rows, at), cut(x, at)) for at in (slice(0, 4), slice(4, 8))]
    for key, value in whole.items():
        told = [float(half[0][key]) for half in halves]
        assert float(value) == pytest.approx(sum(told), rel=1e-5, abs=1e-6), key
    for one, *two in zip(*(jax.tree.leaves(g) for g in (gradient, *(half[1] for half in halves))), strict=True):
        np.testing.assert_allclose(one, np.concatenate(two), rtol=1e-5, atol=1e-7)


def test_rows_that_are_not_kept_are_as_if_never_drawn():
    """Two of four groups kept: advantages, loss and gradients are those of the two alone."""
    own, score, x = drawn()
    kept = np.array([[True] * 2, [False] * 2, [True] * 2, [False] * 2])
    rows = np.repeat(kept[:, 0], 2)
    for name in ("ppo_lm", "grpo"):
        parts, coefficients = PRESETS[name]
        run = jax.jit(functools.partial(advance, parts, coefficients))
        masked = jnp.asarray(own & rows[:, None])
        counts = denominators(masked, SLOTS)
        told, gradient = run(masked, jnp.asarray(score), x, counts, jnp.asarray(kept))
        fewer = {k: v[rows] for k, v in x.items()}
        alone, alone_gradient = run(jnp.asarray(own[rows]), jnp.asarray(score[kept[:, 0]]), fewer)
        np.testing.assert_allclose(told["loss"], alone["loss"], rtol=1e-5)
        for one, two in zip(jax.tree.leaves(gradient), jax.tree.leaves(alone_gradient), strict=True):
            np.testing.assert_allclose(np.asarray(one)[rows], two, rtol=1e-5, atol=1e-7)
            np.testing.assert_array_equal(np.asarray(one)[~rows], 0)


def test_tokens_of_rows_that_are_not_kept_do_not_enter_the_critic_s_advantages():
    """Nor what advantages are normalised by, though their own-mask says own."""
    parts, coefficients = PRESETS["ppo_lm"]
    own, score, x = drawn()
    kept = np.array([[True] * 2, [True, False], [True] * 2, [False] * 2])
    run = jax.jit(functools.partial(estimate_advantages, parts, coefficients))
    given = jnp.asarray(score), jnp.asarray(own)
    found = run(*given, jnp.asarray(kept), x["entropy"], x["value"])
    cut = run(given[0], jnp.asarray(own & kept.reshape(-1, 1)), jnp.ones_like(kept), x["entropy"], x["value"])
    for one, two in zip(found, cut, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(np.asarray(one)[~kept.reshape(-1)], 0)


def test_with_denominators_of_an_iteration_every_token_weighs_the_same():
    rng = np.random.default_rng(10)
    own = jnp.asarray(rng.random((8, 6)) < 0.5)
    loss = jnp.asarray(rng.normal(size=(8, 6)), jnp.float32)
    share = own.sum() / 4
    each = [loss_terms.token_iteration(loss[i : i + 2], own[i : i + 2], share) for i in range(0, 8, 2)]
    assert float(sum(each)) / 4 == pytest.approx(float(loss[own].mean()), rel=1e-5)
    with_own = [loss_terms.token_minibatch(loss[i : i + 2], own[i : i + 2]) for i in range(0, 8, 2)]
    assert abs(float(sum(with_own)) / 4 - float(loss[own].mean())) > 1e-3


def test_coefficients_are_data_of_one_program():
    """Lanes under vmap with other coefficients are those lanes alone."""
    parts, coefficients = WHOLES["ppo_lm"]
    own, score, x = drawn()
    lanes = jax.tree.map(lambda c: jnp.float32(c) * jnp.asarray([1.0, 0.5, 0.1]), coefficients)
    lanes = dataclasses.replace(lanes, dual_clip=jnp.asarray([jnp.inf, 3.0, 1.1]))
    run = lambda c: advance(parts, c, jnp.asarray(own), jnp.asarray(score), x)  # noqa: E731
    together = jax.jit(jax.vmap(run))(lanes)
    alone = jax.jit(run)
    for lane in range(3):
        single = alone(jax.tree.map(lambda c: c[lane], lanes))  # noqa: B023
        for one, two in zip(jax.tree.leaves(together), jax.tree.leaves(single), strict=True):
            np.testing.assert_allclose(one[lane], two, rtol=1e-4, atol=1e-6)
    assert len({float(v) for v in together[0]["loss"]}) == 3


@pytest.mark.parametrize(
    ("name", "left_out", "some"),
    [
        ("top_p", 1.0, (0.9, 0.5)),
        ("entropy_coefficient", 0.0, (0.01, 1.0)),
        ("gae_lambda_length", 0.0, (0.05, 1.0)),
        ("overlong_buffer", 0.0, (0.1, 0.9)),
    ],
)
def test_a_number_that_leaves_a_part_out_is_structure_and_any_other_is_data(name, left_out, some):
    """What a neutral number leaves out is not computed; learners with two other numbers share a program."""
    settings = settings_of("ppo_lm")
    without = settings(**{name: left_out}).structure
    one, other = (settings(**{name: value}).structure for value in some)
    assert getattr(without, name) == left_out
    assert one == other != without
