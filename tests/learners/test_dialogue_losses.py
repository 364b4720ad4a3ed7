"""Tests losses of dialogue learners in float64 against results of TRL and verl, recorded by `experiments/dialogues`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import DATA

from jaxaudit.learners.dialogue import advantages, loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.factories import PRESETS
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss
from jaxaudit.learners.dialogue.settings import DialogueSettings

DATA = DATA
pytestmark = pytest.mark.usefixtures("float64")

EXACT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.fixture(scope="module")
def trl():
    return dict(np.load(DATA / "dialogue_losses_trl.npz"))


@pytest.fixture(scope="module")
def verl():
    return dict(np.load(DATA / "dialogue_losses_verl.npz"))


GRPO = PRESETS["grpo"].config
PLAIN = dataclasses.replace(GRPO, kl="none")
RATIOS = {"clip_low": 0.2, "clip_high": 0.2}
CASES = {
    "grpo": (GRPO, PRESETS["grpo"].coefficients),
    "dual": (PLAIN, Coefficients(dual_clip=1.5)),
    "entropy": (dataclasses.replace(PLAIN, entropy_bonus=True), Coefficients(entropy_coefficient=0.1)),
    "weighted_kl": (dataclasses.replace(GRPO, kl_weight="ratio"), Coefficients(kl_coefficient=0.4)),
    "truncated": (PLAIN, Coefficients()),  # the learner masks truncated rows before the loss
    "token_minibatch": (dataclasses.replace(PLAIN, aggregation="token_minibatch"), Coefficients()),
    "dr_grpo": PRESETS["dr_grpo"],
    "dapo": PRESETS["dapo"],
    "gspo": PRESETS["gspo"],
    "tis_token": (dataclasses.replace(PLAIN, correction="tis"), Coefficients(tis_cap=1.3)),
    "tis_sequence": (
        dataclasses.replace(PLAIN, correction="tis", correction_level="sequence"),
        Coefficients(tis_cap=1.3),
    ),
    "mis_token": (dataclasses.replace(PLAIN, correction="mis"), Coefficients(mis_low=0.7, mis_high=1.3)),
    "mis_sequence": (
        dataclasses.replace(PLAIN, correction="mis", correction_level="sequence"),
        Coefficients(mis_low=0.5, mis_high=2.0),
    ),
    "rloo": PRESETS["rloo"],
}


def log_probs_and_entropies(logits, tokens):
    """Returns the tokens' log-probabilities and the distributions' entropies, `[N, C]`."""
    log_probs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0], -jnp.sum(jnp.exp(log_probs) * log_probs, -1)


def split_minibatches(x):
    return jax.tree.map(lambda a: a[:6], x), jax.tree.map(lambda a: a[6:], x)


def advantages_losses_and_gradient(parts, coefficients, x, loss_mask, rows=6):
    """Returns advantages `[N]`, losses of two minibatches `[2]`, and the gradient of their sum by the logits.

    TRL divides by `rows` rows, masked ones included; None divides by the rows that count.
    """
    coefficients = jax.tree.map(jnp.asarray, coefficients)
    old, sampled, reference = (
        log_probs_and_entropies(x[f"{name}_logits"], x["tokens"])[0] for name in ("old", "sampler", "reference")
    )
    penalty = loss_terms.k1(old, reference) if parts.kl_in == "reward" and parts.kl != "none" else None
    advantage, _ = estimate_advantages(parts, coefficients, x["rewards"], x["own"] | loss_mask, kl_penalty=penalty)
    inputs = LossInputs(loss_mask, old, advantage, sampled, reference)

    def total_loss(logits):
        minibatch_losses = []
        for half, constants in zip(split_minibatches(logits), split_minibatches((inputs, x["tokens"])), strict=True):
            batch, tokens = constants
            counts = loss_terms.denominators(batch.loss_mask, batch.loss_mask.shape[1], jnp.sum(loss_mask) / 2)
            counts = dataclasses.replace(counts, rows=counts.rows if rows is None else rows)
            log_probability, entropy = log_probs_and_entropies(half, tokens)
            minibatch_losses.append(
                policy_loss(parts, coefficients, Predictions(log_probability, entropy), batch, counts)[0]
            )
        return jnp.sum(jnp.stack(minibatch_losses)), jnp.stack(minibatch_losses)

    gradient, minibatch_losses = jax.grad(total_loss, has_aux=True)(x["new_logits"])
    return jnp.sum(advantage, -1) / jnp.sum(advantage != 0, -1), minibatch_losses, gradient


def run(case, trl, rows=6):
    parts, coefficients = CASES[case]
    # TRL's RLOO has no tool tokens between response tokens.
    loss_mask = trl["written"] if case == "rloo" else trl["own"]
    if case == "truncated":
        loss_mask = loss_mask & (trl["written"].sum(1, keepdims=True) < loss_mask.shape[1])
    x = {name: jnp.asarray(value) for name, value in trl.items() if "." not in name}
    return jax.jit(lambda c, x, loss_mask: advantages_losses_and_gradient(parts, c, x, loss_mask, rows))(
        coefficients, x, jnp.asarray(loss_mask)
    )


@pytest.mark.parametrize("case", CASES)
def test_advantages_losses_and_gradients_equal_trls(case, trl):
    advantage, losses, gradient = run(case, trl)
    np.testing.assert_allclose(np.nan_to_num(advantage), trl[f"{case}.advantage"], **EXACT)
    np.testing.assert_allclose(losses, trl[f"{case}.loss"], **EXACT)
    np.testing.assert_allclose(gradient, trl[f"{case}.gradient"], **EXACT)


def test_masked_rows_do_not_count_though_they_do_in_trl(trl):
    _, losses, _ = run("truncated", trl, rows=None)
    np.testing.assert_allclose(losses, trl["truncated.loss"] * np.array([6 / 5, 1]), **EXACT)


def test_recorded_gradients_differ_between_all_cases(trl):
    """Otherwise a case could pass although the setting that it tests has no effect."""
    gradients = {name: trl[f"{name}.gradient"] for name in CASES}
    names = list(gradients)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert np.abs(gradients[a] - gradients[b]).max() > 1e-4, (a, b)


@pytest.mark.parametrize("case", ["tis_token", "tis_sequence", "mis_token", "mis_sequence"])
def test_importance_weights_equal_trls(case, trl):
    kind, level = case.split("_")
    old, sampled = (
        log_probs_and_entropies(jnp.asarray(trl[f"{n}_logits"]), jnp.asarray(trl["tokens"]))[0]
        for n in ("old", "sampler")
    )
    loss_mask = jnp.asarray(trl["own"])
    bounds = {"tis_token": (1.3,), "tis_sequence": (1.3,), "mis_token": (0.7, 1.3), "mis_sequence": (0.5, 2.0)}[case]
    function = {"tis": loss_terms.truncated_importance_weight, "mis": loss_terms.masked_importance_weight}[kind]
    weight = function(old - sampled, loss_mask, *bounds, level)
    expected = np.broadcast_to(trl[f"{case}.weight"], loss_mask.shape)
    np.testing.assert_allclose(weight, np.where(loss_mask, expected, 0), **EXACT)


def test_preference_loss_and_gradient_equal_trls(trl):
    parts, coefficients = PRESETS["dpo"]
    x = {name: jnp.asarray(value) for name, value in trl.items() if "." not in name}
    reference = log_probs_and_entropies(x["reference_logits"], x["tokens"])[0]

    @jax.jit
    def loss(logits):
        predictions = Predictions(log_probs_and_entropies(logits, x["tokens"])[0])
        counts = loss_terms.denominators(x["own"], x["own"].shape[1])
        return policy_loss(parts, coefficients, predictions, LossInputs(x["own"], ref_log_prob=reference), counts)

    gradient, metrics = jax.grad(loss, has_aux=True)(x["new_logits"])
    np.testing.assert_allclose(metrics["loss"], trl["dpo.loss"], **EXACT)
    np.testing.assert_allclose(gradient, trl["dpo.gradient"], **EXACT)
    names = {"margin": "margins", "preference_accuracy": "accuracies", "chosen_reward": "chosen"}
    for metric, trl_name in (names | {"rejected_reward": "rejected"}).items():
        np.testing.assert_allclose(metrics[metric], trl[f"dpo.{trl_name}"], **EXACT)


@pytest.mark.parametrize("buffer", [0, 4])
def test_the_overlong_penalty_equals_trls(buffer, trl):
    np.testing.assert_allclose(
        advantages.overlong_penalty(trl["lengths"], 10, buffer), trl[f"overlong.{buffer}"], **EXACT
    )


def test_gae_across_tool_tokens_equals_verls(verl):
    loss_mask = jnp.asarray(verl["own"])
    np.testing.assert_array_equal(advantages.terminal_reward(verl["score"].reshape(-1), loss_mask), verl["reward"])
    advantage, target = jax.jit(advantages.gae)(verl["reward"], verl["value"], loss_mask, 0.97, 0.9)
    np.testing.assert_allclose(target[loss_mask], verl["returns"][loss_mask], **EXACT)
    # verl adds 1e-8 to the count that it divides by.
    np.testing.assert_allclose(advantages.whiten(advantage, loss_mask)[loss_mask], verl["gae"][loss_mask], rtol=1e-8)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_whitening_uses_the_unbiased_deviation_for_any_count(count):
    advantage = np.random.default_rng(count).normal(2.0, 3.0, (2, 5))
    loss_mask = np.arange(10).reshape(2, 5) < count
    expected = (advantage[loss_mask] - advantage[loss_mask].mean()) / advantage[loss_mask].std(ddof=1)
    whitened = advantages.whiten(jnp.asarray(advantage), jnp.asarray(loss_mask))
    np.testing.assert_allclose(whitened[loss_mask], expected, rtol=1e-5)
    assert not np.asarray(whitened)[~loss_mask].any()


def test_whitening_a_single_token_gives_zero():
    """The token equals its mean; values at masked positions do not matter."""
    loss_mask = np.array([[False, True], [False, False]])
    whitened = advantages.whiten(jnp.asarray([[7.0, 5.0], [1.0, 2.0]]), jnp.asarray(loss_mask))
    np.testing.assert_array_equal(whitened, 0)


@pytest.mark.parametrize("name", ["group", "group_mean", "leave_one_out"])
def test_group_advantages_equal_verls(name, verl):
    kwargs = {"eps": 1e-6} if name == "group" else {}
    advantage = getattr(advantages, name)(jnp.asarray(verl["score"]), **kwargs)
    result = advantages.broadcast_to_tokens(advantage, jnp.asarray(verl["own"]))
    np.testing.assert_allclose(result, verl[name], **EXACT)


@pytest.mark.parametrize("name", ["dual", "weighted", "gspo"])
def test_surrogate_losses_equal_verls(name, verl):
    x = {k: jnp.asarray(v) for k, v in verl.items() if "." not in k}
    # GSPO has no dual clipping, and verl always averages it by rows.
    low, high, dual = (3e-4, 4e-4, None) if name == "gspo" else (0.2, 0.28, 1.5)
    ratio = loss_terms.sequence_mean_ratio if name == "gspo" else loss_terms.token_ratio
    aggregation = "sequence" if name == "gspo" else "token_minibatch"
    counts = loss_terms.denominators(x["own"], x["own"].shape[1])

    @jax.jit
    def loss(new):
        surrogate = loss_terms.surrogate(ratio(new, x["old"], x["own"]), x["advantage"], low, high, dual)
        gain = surrogate.objective * (x["weight"] if name == "weighted" else 1)
        return -loss_terms.aggregate(aggregation, gain, x["own"], counts), [
            loss_terms.aggregate("token_minibatch", m.astype(float), x["own"], counts)
            for m in jax.tree.leaves((surrogate.low | surrogate.high, surrogate.dual))
        ]

    (value, (clipped_share, dual_share)), gradient = jax.value_and_grad(loss, has_aux=True)(x["new"])
    np.testing.assert_allclose(value, verl[f"{name}.loss"], rtol=1e-8)  # verl adds 1e-8 to a row's length
    np.testing.assert_allclose(gradient, verl[f"{name}.gradient"], rtol=1e-8, atol=1e-14)
    if name != "gspo":
        np.testing.assert_allclose(value, verl[f"{name}.loss"], **EXACT)
        np.testing.assert_allclose(clipped_share, verl[f"{name}.pg_clipfrac"], rtol=1e-9)
        np.testing.assert_allclose(dual_share, verl[f"{name}.pg_clipfrac_lower"], rtol=1e-9)


def test_aggregations_equal_verls(verl):
    x, loss_mask = jnp.asarray(verl["new"]), jnp.asarray(verl["own"])
    counts = loss_terms.denominators(loss_mask, x.shape[1], tokens_per_minibatch=100)
    total, by_row = verl["aggregation.total"], verl["aggregation.seq-mean-token-mean"]
    by_constant = verl["aggregation.seq-mean-token-sum-norm"] / len(x)  # verl does not divide by the number of rows
    aggregate = functools.partial(loss_terms.aggregate, loss=x, loss_mask=loss_mask, denominators=counts)
    np.testing.assert_allclose(aggregate("token_minibatch"), verl["aggregation.token-mean"], **EXACT)
    np.testing.assert_allclose(aggregate("token_iteration"), total, **EXACT)
    np.testing.assert_allclose(aggregate("sequence"), by_row, rtol=1e-8)
    np.testing.assert_allclose(aggregate("constant"), by_constant, **EXACT)


def test_the_value_loss_equals_verls(verl):
    x = {k: jnp.asarray(v) for k, v in verl.items() if "." not in k}

    @jax.jit
    def loss(value):
        error, clipped = loss_terms.clipped_value_loss(value, x["value"], x["advantage"], 0.2)
        counts = loss_terms.denominators(x["own"], x["own"].shape[1])
        mean = functools.partial(loss_terms.aggregate, "token_minibatch", loss_mask=x["own"], denominators=counts)
        return mean(error), mean(clipped.astype(float))

    (value, clipped), gradient = jax.value_and_grad(loss, has_aux=True)(x["new_value"])
    np.testing.assert_allclose(value, verl["value.loss"], **EXACT)
    np.testing.assert_allclose(gradient, verl["value.gradient"], **EXACT)
    np.testing.assert_allclose(clipped, verl["value.clipped"], rtol=1e-9)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators_equal_verls(name, verl):
    result = loss_terms.KL_ESTIMATORS[name](jnp.asarray(verl["new"]), jnp.asarray(verl["reference"]))
    np.testing.assert_allclose(result, verl[name], rtol=1e-10, atol=1e-15)


def test_the_kl_penalised_reward_equals_verls_at_response_tokens(verl):
    loss_mask = jnp.asarray(verl["own"])
    result = loss_terms.subtract_kl_penalty(
        jnp.asarray(verl["reward"]), loss_terms.k1(verl["old"], verl["reference"]), loss_mask, 0.05
    )
    np.testing.assert_allclose(result, np.where(loss_mask, verl["penalised"], 0), **EXACT)


def test_the_complete_ppo_loss_equals_numpy(verl):
    """Combines penalty, advantages, surrogate and value loss, which other tests compare with verl one by one."""
    parts, coefficients = PRESETS["ppo_lm"]
    x = {k: jnp.asarray(v) for k, v in verl.items() if "." not in k}
    counts = loss_terms.denominators(x["own"], x["own"].shape[1])

    def ppo_loss(new, value):
        penalty = loss_terms.k1(x["old"], x["reference"])
        advantage, target = estimate_advantages(
            parts, coefficients, x["score"], x["own"], kl_penalty=penalty, value=x["value"]
        )
        rows = LossInputs(x["own"], x["old"], advantage, old_value=x["value"], value_target=target)
        return policy_loss(parts, coefficients, Predictions(new, value=value), rows, counts)[0]

    loss, gradient = jax.jit(jax.value_and_grad(ppo_loss, argnums=(0, 1)))(x["new"], x["new_value"])
    loss_mask, n = verl["own"], verl["own"].sum()
    reward = np.where(loss_mask, verl["reward"] - 0.05 * (verl["old"] - verl["reference"]), 0)
    advantage = np.zeros(loss_mask.shape)
    for row in range(len(loss_mask)):
        slots, gae, next_value = np.flatnonzero(loss_mask[row]), 0.0, 0.0
        for t in slots[::-1]:
            gae = reward[row, t] + next_value - verl["value"][row, t] + 0.95 * gae
            advantage[row, t], next_value = gae, verl["value"][row, t]
    target = advantage + verl["value"]
    mean = advantage[loss_mask].mean()
    advantage = np.where(loss_mask, (advantage - mean) / np.sqrt(advantage[loss_mask].var(ddof=1) + 1e-8), 0)
    ratio = np.exp(verl["new"] - verl["old"])
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    clipped_value = verl["value"] + np.clip(verl["new_value"] - verl["value"], -0.2, 0.2)
    error = verl["new_value"] - target
    critic = 0.5 * np.maximum(error**2, (clipped_value - target) ** 2)
    np.testing.assert_allclose(loss, (-surrogate + 0.5 * critic)[loss_mask].sum() / n, **EXACT)
    policy_learns = loss_mask & ~((ratio > 1.2) & (advantage > 0)) & ~((ratio < 0.8) & (advantage < 0))
    np.testing.assert_allclose(gradient[0], np.where(policy_learns, -ratio * advantage, 0) / n, **EXACT)
    critic_learns = loss_mask & ~((clipped_value - target) ** 2 > error**2)
    np.testing.assert_allclose(gradient[1], np.where(critic_learns, 0.5 * error, 0) / n, **EXACT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"correction": "tis", "old_log_probability": "sampled"},
            "correction = 'tis' weighs tokens by recomputed over sampled",
        ),
        ({"objective": "preference", "kl": "k1"}, "so kl must be 'none', not 'k1'"),
        ({"correction": "tis", "correction_level": "geometric"}, "correction must be 'mis', not 'tis'"),
        ({"kl": "k3", "kl_in": "reward", "kl_weight": "ratio"}, "kl_weight = 'ratio' multiplies a KL in the loss"),
        ({"whiten": True}, "advantage must be 'gae', not 'group'"),
        ({"advantage": "gae", "ratio": "sequence_sum"}, "advantage must not be 'gae'"),
    ],
)
def test_inconsistent_objectives_are_refused_with_a_message(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**settings)


@pytest.mark.parametrize(
    "name", ["objective", "ratio", "kl", "covariance", "precision", "learning_rate_decay", "old_log_probability"]
)
def test_an_unknown_choice_is_refused_with_a_message(name):
    with pytest.raises(ValueError, match=rf"{name} must be \w+, \w+.*, not 'row'"):
        DialogueSettings(**{name: "row"})


@pytest.mark.parametrize("invalid", [{"gamma": 1.5}, {"dual_clip": 0.9}, {"mis_low": 3.0}, {"clip_high": float("nan")}])
def test_invalid_coefficients_are_refused(invalid):
    Coefficients().check()
    with pytest.raises(ValueError, match=next(iter(invalid))):
        Coefficients(**invalid).check()
