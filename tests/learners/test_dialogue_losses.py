"""Losses on dialogues in float64 against TRL's trainers and verl's functions, recorded by `experiments/dialogues`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import DATA

from jaxaudit.learners.dialogue import advantages, loss_terms
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.factories import PRESETS
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig
from jaxaudit.learners.dialogue.policy_loss import LossInputs, Predictions, policy_loss

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
    "truncated": (dataclasses.replace(PLAIN, mask_truncated=True), Coefficients()),
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


def of_tokens(logits, tokens):
    """Log-probabilities and entropies, `[N, C]`."""
    every = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(every, tokens[..., None], -1)[..., 0], -jnp.sum(jnp.exp(every) * every, -1)


def halves(x):
    return jax.tree.map(lambda a: a[:6], x), jax.tree.map(lambda a: a[6:], x)


def ours(parts, coefficients, x, own, rows=6):
    """Advantages `[N]`, losses of the two minibatches `[2]`, gradient of their sum by logits; TRL counts all `rows`."""
    coefficients = jax.tree.map(jnp.asarray, coefficients)
    old, sampled, reference = (
        of_tokens(x[f"{name}_logits"], x["tokens"])[0] for name in ("old", "sampler", "reference")
    )
    penalty = loss_terms.k1(old, reference) if parts.kl_in == "reward" and parts.kl != "none" else None
    advantage, _ = estimate_advantages(parts, coefficients, x["rewards"], x["own"] | own, kl_penalty=penalty)
    given = LossInputs(own, old, advantage, sampled, reference)

    def losses(logits):
        told = []
        for half, constants in zip(halves(logits), halves((given, x["tokens"])), strict=True):
            batch, tokens = constants
            counts = loss_terms.denominators(batch.loss_mask, batch.loss_mask.shape[1], jnp.sum(own) / 2)
            counts = dataclasses.replace(counts, rows=counts.rows if rows is None else rows)
            log_probability, entropy = of_tokens(half, tokens)
            told.append(policy_loss(parts, coefficients, Predictions(log_probability, entropy), batch, counts)[0])
        return jnp.sum(jnp.stack(told)), jnp.stack(told)

    gradient, told = jax.grad(losses, has_aux=True)(x["new_logits"])
    return jnp.sum(advantage, -1) / jnp.sum(advantage != 0, -1), told, gradient


def run(case, trl, rows=6):
    parts, coefficients = CASES[case]
    # RLOO in TRL knows no given tokens between own ones.
    own = trl["written"] if case == "rloo" else trl["own"]
    if case == "truncated":
        own = own & (trl["written"].sum(1, keepdims=True) < own.shape[1])
    x = {name: jnp.asarray(value) for name, value in trl.items() if "." not in name}
    return jax.jit(lambda c, x, own: ours(parts, c, x, own, rows))(coefficients, x, jnp.asarray(own))


@pytest.mark.parametrize("case", CASES)
def test_advantages_losses_and_gradients_are_trl_s(case, trl):
    advantage, losses, gradient = run(case, trl)
    np.testing.assert_allclose(np.nan_to_num(advantage), trl[f"{case}.advantage"], **EXACT)
    np.testing.assert_allclose(losses, trl[f"{case}.loss"], **EXACT)
    np.testing.assert_allclose(gradient, trl[f"{case}.gradient"], **EXACT)


def test_a_row_that_is_masked_is_no_row_here_and_one_of_zeros_in_trl(trl):
    _, losses, _ = run("truncated", trl, rows=None)
    np.testing.assert_allclose(losses, trl["truncated.loss"] * np.array([6 / 5, 1]), **EXACT)


def test_the_reference_s_cases_tell_apart(trl):
    """Each recorded case has another gradient than plain GRPO's: none tests what is off."""
    plain = {name: trl[f"{name}.gradient"] for name in CASES}
    names = list(plain)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert np.abs(plain[one] - plain[other]).max() > 1e-4, (one, other)


@pytest.mark.parametrize("case", ["tis_token", "tis_sequence", "mis_token", "mis_sequence"])
def test_corrections_are_trl_s(case, trl):
    kind, level = case.split("_")
    old, sampled = (
        of_tokens(jnp.asarray(trl[f"{n}_logits"]), jnp.asarray(trl["tokens"]))[0] for n in ("old", "sampler")
    )
    own = jnp.asarray(trl["own"])
    bounds = {"tis_token": (1.3,), "tis_sequence": (1.3,), "mis_token": (0.7, 1.3), "mis_sequence": (0.5, 2.0)}[case]
    function = {"tis": loss_terms.truncated_importance_weight, "mis": loss_terms.masked_importance_weight}[kind]
    weight = function(old - sampled, own, *bounds, level)
    wanted = np.broadcast_to(trl[f"{case}.weight"], own.shape)
    np.testing.assert_allclose(weight, np.where(own, wanted, 0), **EXACT)


def test_preferences_are_trl_s(trl):
    parts, coefficients = PRESETS["dpo"]
    x = {name: jnp.asarray(value) for name, value in trl.items() if "." not in name}
    reference = of_tokens(x["reference_logits"], x["tokens"])[0]

    @jax.jit
    def loss(logits):
        now = Predictions(of_tokens(logits, x["tokens"])[0])
        counts = loss_terms.denominators(x["own"], x["own"].shape[1])
        return policy_loss(parts, coefficients, now, LossInputs(x["own"], ref_log_prob=reference), counts)

    gradient, told = jax.grad(loss, has_aux=True)(x["new_logits"])
    np.testing.assert_allclose(told["loss"], trl["dpo.loss"], **EXACT)
    np.testing.assert_allclose(gradient, trl["dpo.gradient"], **EXACT)
    names = {"margin": "margins", "preference_accuracy": "accuracies", "chosen_reward": "chosen"}
    for mine, theirs in (names | {"rejected_reward": "rejected"}).items():
        np.testing.assert_allclose(told[mine], trl[f"dpo.{theirs}"], **EXACT)


@pytest.mark.parametrize("buffer", [0, 4])
def test_the_penalty_on_long_rows_is_trl_s(buffer, trl):
    np.testing.assert_allclose(
        advantages.overlong_penalty(trl["lengths"], 10, buffer), trl[f"overlong.{buffer}"], **EXACT
    )


def test_advantages_over_given_tokens_are_verl_s(verl):
    own = jnp.asarray(verl["own"])
    np.testing.assert_array_equal(advantages.terminal_reward(verl["score"].reshape(-1), own), verl["reward"])
    advantage, target = jax.jit(advantages.gae)(verl["reward"], verl["value"], own, 0.97, 0.9)
    np.testing.assert_allclose(target[own], verl["returns"][own], **EXACT)
    # verl divides by a count + 1e-8.
    np.testing.assert_allclose(advantages.whiten(advantage, own)[own], verl["gae"][own], rtol=1e-8)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_whitened_advantages_have_numpy_s_deviation_however_few_tokens_there_are(count):
    advantage = np.random.default_rng(count).normal(2.0, 3.0, (2, 5))
    own = np.arange(10).reshape(2, 5) < count
    expected = (advantage[own] - advantage[own].mean()) / advantage[own].std(ddof=1)
    found = advantages.whiten(jnp.asarray(advantage), jnp.asarray(own))
    np.testing.assert_allclose(found[own], expected, rtol=1e-5)
    assert not np.asarray(found)[~own].any()


def test_one_token_alone_is_whitened_to_zero():
    """It is its own mean, whatever stands where it is not."""
    own = np.array([[False, True], [False, False]])
    found = advantages.whiten(jnp.asarray([[7.0, 5.0], [1.0, 2.0]]), jnp.asarray(own))
    np.testing.assert_array_equal(found, 0)


@pytest.mark.parametrize("name", ["group", "group_mean", "leave_one_out"])
def test_baselines_of_groups_are_verl_s(name, verl):
    kwargs = {"eps": 1e-6} if name == "group" else {}
    advantage = getattr(advantages, name)(jnp.asarray(verl["score"]), **kwargs)
    mine = advantages.broadcast_to_tokens(advantage, jnp.asarray(verl["own"]))
    np.testing.assert_allclose(mine, verl[name], **EXACT)


@pytest.mark.parametrize("name", ["dual", "weighted", "gspo"])
def test_surrogates_are_verl_s(name, verl):
    x = {k: jnp.asarray(v) for k, v in verl.items() if "." not in k}
    # GSPO has no dual clipping; verl always aggregates it by rows.
    low, high, dual = (3e-4, 4e-4, None) if name == "gspo" else (0.2, 0.28, 1.5)
    ratio = loss_terms.sequence_mean_ratio if name == "gspo" else loss_terms.token_ratio
    mean = loss_terms.sequence if name == "gspo" else loss_terms.token_minibatch

    @jax.jit
    def loss(new):
        made = loss_terms.surrogate(ratio(new, x["old"], x["own"]), x["advantage"], low, high, dual)
        gain = made.objective * (x["weight"] if name == "weighted" else 1)
        return -mean(gain, x["own"]), [
            loss_terms.token_minibatch(m.astype(float), x["own"])
            for m in jax.tree.leaves((made.low | made.high, made.dual))
        ]

    (value, (region, dual_share)), gradient = jax.value_and_grad(loss, has_aux=True)(x["new"])
    np.testing.assert_allclose(value, verl[f"{name}.loss"], rtol=1e-8)  # verl: a row's length + 1e-8
    np.testing.assert_allclose(gradient, verl[f"{name}.gradient"], rtol=1e-8, atol=1e-14)
    if name != "gspo":
        np.testing.assert_allclose(value, verl[f"{name}.loss"], **EXACT)
        np.testing.assert_allclose(region, verl[f"{name}.pg_clipfrac"], rtol=1e-9)
        np.testing.assert_allclose(dual_share, verl[f"{name}.pg_clipfrac_lower"], rtol=1e-9)


def test_aggregations_are_verl_s(verl):
    x, own = jnp.asarray(verl["new"]), jnp.asarray(verl["own"])
    np.testing.assert_allclose(loss_terms.token_minibatch(x, own), verl["aggregation.token-mean"], **EXACT)
    np.testing.assert_allclose(loss_terms.token_iteration(x, own, 100), verl["aggregation.total"], **EXACT)
    np.testing.assert_allclose(loss_terms.sequence(x, own), verl["aggregation.seq-mean-token-mean"], rtol=1e-8)
    # verl leaves the number of rows out.
    mine = loss_terms.constant(x, own, x.shape[1])
    np.testing.assert_allclose(mine, verl["aggregation.seq-mean-token-sum-norm"] / len(x), **EXACT)


def test_the_critic_s_loss_is_verl_s(verl):
    x = {k: jnp.asarray(v) for k, v in verl.items() if "." not in k}

    @jax.jit
    def loss(value):
        error, stopped = loss_terms.clipped_value_loss(value, x["value"], x["advantage"], 0.2)
        mean = loss_terms.token_minibatch
        return mean(error, x["own"]), mean(stopped.astype(float), x["own"])

    (value, stopped), gradient = jax.value_and_grad(loss, has_aux=True)(x["new_value"])
    np.testing.assert_allclose(value, verl["value.loss"], **EXACT)
    np.testing.assert_allclose(gradient, verl["value.gradient"], **EXACT)
    np.testing.assert_allclose(stopped, verl["value.clipped"], rtol=1e-9)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_estimators_are_verl_s(name, verl):
    mine = loss_terms.KL_ESTIMATORS[name](jnp.asarray(verl["new"]), jnp.asarray(verl["reference"]))
    np.testing.assert_allclose(mine, verl[name], rtol=1e-10, atol=1e-15)


def test_a_penalised_reward_is_verl_s_at_own_tokens(verl):
    own = jnp.asarray(verl["own"])
    mine = loss_terms.subtract_kl_penalty(
        jnp.asarray(verl["reward"]), loss_terms.k1(verl["old"], verl["reference"]), own, 0.05
    )
    np.testing.assert_allclose(mine, np.where(own, verl["penalised"], 0), **EXACT)


def test_ppo_is_its_parts_as_verl_has_them(verl):
    """Penalty, advantages, surrogate and value loss together, from the parts that were held against verl's."""
    parts, coefficients = PRESETS["ppo_lm"]
    x = {k: jnp.asarray(v) for k, v in verl.items() if "." not in k}
    counts = loss_terms.denominators(x["own"], x["own"].shape[1])

    def whole(new, value):
        penalty = loss_terms.k1(x["old"], x["reference"])
        advantage, target = estimate_advantages(
            parts, coefficients, x["score"], x["own"], kl_penalty=penalty, value=x["value"]
        )
        rows = LossInputs(x["own"], x["old"], advantage, old_value=x["value"], value_target=target)
        return policy_loss(parts, coefficients, Predictions(new, value=value), rows, counts)[0]

    loss, gradient = jax.jit(jax.value_and_grad(whole, argnums=(0, 1)))(x["new"], x["new_value"])
    own, n = verl["own"], verl["own"].sum()
    reward = np.where(own, verl["reward"] - 0.05 * (verl["old"] - verl["reference"]), 0)
    advantage = np.zeros(own.shape)
    for row in range(len(own)):
        slots, after, ahead = np.flatnonzero(own[row]), 0.0, 0.0
        for t in slots[::-1]:
            after = reward[row, t] + ahead - verl["value"][row, t] + 0.95 * after
            advantage[row, t], ahead = after, verl["value"][row, t]
    target = advantage + verl["value"]
    mean = advantage[own].mean()
    advantage = np.where(own, (advantage - mean) / np.sqrt(advantage[own].var(ddof=1) + 1e-8), 0)
    ratio = np.exp(verl["new"] - verl["old"])
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    near = verl["value"] + np.clip(verl["new_value"] - verl["value"], -0.2, 0.2)
    free = verl["new_value"] - target
    critic = 0.5 * np.maximum(free**2, (near - target) ** 2)
    np.testing.assert_allclose(loss, (-surrogate + 0.5 * critic)[own].sum() / n, **EXACT)
    moves = own & ~((ratio > 1.2) & (advantage > 0)) & ~((ratio < 0.8) & (advantage < 0))
    np.testing.assert_allclose(gradient[0], np.where(moves, -ratio * advantage, 0) / n, **EXACT)
    learns = own & ~((near - target) ** 2 > free**2)
    np.testing.assert_allclose(gradient[1], np.where(learns, 0.5 * free, 0) / n, **EXACT)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"ratio": "row"}, "ratio must be token, sequence_mean, sequence_sum, not 'row'"),
        ({"kl": "k3", "reference": False}, "kl = 'k3' needs a reference policy, so reference must be True"),
        (
            {"correction": "tis", "old_log_probability": "sampled"},
            "correction = 'tis' weighs tokens by recomputed over sampled",
        ),
        ({"objective": "preference", "reference": False}, "a preference objective needs a reference policy"),
        ({"objective": "preference", "kl": "k1"}, "so kl must be 'none', not 'k1'"),
        ({"correction": "tis", "correction_level": "geometric"}, "correction must be 'mis', not 'tis'"),
        ({"kl": "k3", "kl_in": "reward", "kl_weight": "ratio"}, "kl_weight = 'ratio' multiplies a KL in the loss"),
        ({"whiten": True}, "advantage must be 'gae', not 'group'"),
        ({"advantage": "gae", "ratio": "sequence_sum"}, "advantage must not be 'gae'"),
    ],
)
def test_parts_that_do_not_go_together_are_refused_in_a_sentence(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        ObjectiveConfig(**settings)


@pytest.mark.parametrize("wrong", [{"gamma": 1.5}, {"dual_clip": 0.9}, {"mis_low": 3.0}, {"clip_high": float("nan")}])
def test_coefficients_that_mean_nothing_are_refused(wrong):
    Coefficients().check()
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Coefficients(**wrong).check()
