"""At every site of dialogues, the channels that say what the learner saw: they read the disturbed value.

One step of a learner, compiled once; what is done at each site is data, by taps that shift values by a strength.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.hop import Hop
from jaxaudit.models import gpt2

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

HOP = Hop(difficulty=1.0, entities=3, hops=2, length=13)


def scaled(value, strength, context):
    return jax.tree.map(lambda x: x * (1 + strength) if jnp.issubdtype(x.dtype, jnp.floating) else x, value)


def added(value, strength, context):
    return value + strength


def of_head(value, strength, context):
    return {**value, "head": {**value["head"], "bias": value["head"]["bias"] + strength}}


def moments(value, strength, context):
    return jax.tree.map(lambda x: x + strength if jnp.issubdtype(x.dtype, jnp.floating) else x, value)


def twins(value, strength, context):
    rare = context["rare"][jnp.maximum(value, 0)]
    return jnp.where((strength > 0) & context["called"][:, None] & (value >= 0), rare, value)


def rolled(value, strength, context):
    return jnp.where((strength > 0) & (value >= 0), (value + 1) % HOP.entities, value)


CHANGES = {
    "reward": added,
    "reward_model": of_head,
    "log_probability": lambda value, strength, context: value + jnp.where(context["own"], strength, 0.0),
    "sampled_logits": scaled,
    "behaviour": scaled,
    "temperature": scaled,
    "reference": scaled,
    "kl_coefficient": added,
    "entropy_coefficient": added,
    "gae_lambda": added,
    "critic_lambda": added,
    "ratio_clip": added,
    "advantage": scaled,
    "objective": scaled,
    "gradient": scaled,
    "clip_norm": scaled,
    "learning_rate": scaled,
    "params": scaled,
    "optimizer_state": moments,
    "tool_result": twins,
    "prompt": rolled,
    "difficulty": added,
}


class Shifted(Taps):
    """Taps that change the value at each site by the strength given for it; none at strength 0."""

    def __init__(self, strengths, **rest):
        super().__init__(**rest)
        self.strengths = strengths

    def __call__(self, site, value, *, label="", **context):
        return CHANGES[site](value, self.strengths[site], context) if site in CHANGES else value

    def disturbs(self, *sites):
        return any(site in CHANGES for site in sites)


@pytest.fixture(scope="module")
def learner():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))
        few = {"size": "tiny", "prompts": 8, "group_size": 4, "epochs": 1, "minibatches": 1, "performance_rows": 2}
        before = {"warm_start": 0, "reward_model_warm_start": 0, "max_grad_norm": 1e6, "learning_rate": 1e-3}
        parts = {"reward": "learned", "correction": "tis", "entropy_coefficient": 0.1, "whiten": False}
        return ja.learners.ppo_lm(HOP, **few, **before, **parts)


@pytest.fixture(scope="module")
def told(learner):
    """`told(site=strength, ...)`: the telemetry of a step with some sites disturbed."""
    made = learner.step.__self__
    state = jax.jit(made.init)(jax.random.key(0), learner.data)
    moved = jax.tree.map(lambda x: 1.01 * x, state.reference)  # as the policy is nowhere the reference in a run

    @jax.jit
    def run(strengths, state):
        taps = Shifted(strengths, step=jnp.int32(0), steps=4, data=learner.data)
        return made.step(state, jax.random.key(1), taps)[1]

    def one(**strengths):
        given = dict.fromkeys(CHANGES, 0.0) | strengths
        found = run(jax.tree.map(jnp.float32, given), state.replace(reference=moved))
        return {name: np.asarray(value) for name, value in found.items()}

    return one


@pytest.fixture(scope="module")
def before(told):
    return told()


@pytest.mark.exhaustive
def test_all_sites_are_looked_at(learner):
    assert set(find_sites(learner)) - {"state"} == set(CHANGES)


@pytest.mark.parametrize("strength", [0.5, -1.0])
def test_log_probabilities_that_the_loss_reads(told, before, strength):
    """Shifted by s from the trainer's, ratios are exp(-s): k3 of the sampler is exp(-s) - 1 + s."""
    np.testing.assert_allclose(before["mismatch_kl"][0], 0.0, atol=1e-6)
    found = told(log_probability=strength)
    np.testing.assert_allclose(found["mismatch_kl"][0], np.exp(-strength) - 1 + strength, rtol=1e-4)
    np.testing.assert_allclose(found["mismatch_chi2"][0], np.exp(-2 * strength) - 1, rtol=1e-4)
    np.testing.assert_allclose(found["correction_mean"], min(np.exp(-strength), 2.0), rtol=1e-4)


@pytest.mark.parametrize("site", ["sampled_logits", "behaviour"])
def test_a_sampler_of_its_own(told, before, site):
    found = told(**{site: 0.5})
    assert found["mismatch_kl"][0] > 1e-3
    assert found["mismatch_ess"][0] < 0.999
    np.testing.assert_allclose(found["params_norm"], before["params_norm"], rtol=1e-2)


def test_rewards(told, before):
    for site in ("reward", "reward_model"):
        found = told(**{site: 0.7})
        np.testing.assert_allclose(found["proxy"] - before["proxy"], 0.7, rtol=1e-5)
        np.testing.assert_allclose(found["reward_gap"] - before["reward_gap"], 0.7, rtol=1e-5)
        np.testing.assert_array_equal(found["acting_performance"], before["acting_performance"])


def test_temperature_is_the_trainer_s_too(told, before):
    found = told(temperature=3.0)
    assert found["entropy"][0] > before["entropy"][0]
    np.testing.assert_allclose(found["mismatch_kl"][0], 0.0, atol=1e-6)


def test_the_critic_s_lambda_changes_what_it_aims_at_and_not_the_advantages(told, before):
    found = told(critic_lambda=-0.9)
    assert abs(found["value_loss"] - before["value_loss"]) > 0.1 * before["value_loss"]
    np.testing.assert_allclose(found["gradient_norm"], before["gradient_norm"], rtol=1e-4)


def test_reference_and_its_weight(told, before):
    found = told(reference=0.5)
    assert found["kl"][0] > 2 * before["kl"][0] > 0
    without = {"kl_coefficient": -0.05}  # so that the reference has no part in the update
    drifts = [told(**without)["representation_drift"], told(**without, reference=0.5)["representation_drift"]]
    assert drifts[0] == drifts[1] > 0, "of the warm start, which nothing disturbs"
    heavier = told(kl_coefficient=5.0)
    np.testing.assert_array_equal(heavier["score_value_bias"], before["score_value_bias"])
    assert abs(heavier["value_bias"] - before["value_bias"]) > 1e-3


def test_coefficients(told, before):
    np.testing.assert_allclose(
        told(entropy_coefficient=0.4)["loss"] - before["loss"], -0.4 * before["entropy"][0], rtol=1e-4
    )
    assert told(gae_lambda=-0.9)["weight_cvar"][0, 0] != before["weight_cvar"][0, 0]
    after = told(ratio_clip=-0.2)["clip_fraction"][0, 1]  # of the ratios after the update, none of which is 1
    assert after.sum() > 0.3 > before["clip_fraction"][0, 1].sum()


def test_advantages_weigh(told, before):
    found = told(advantage=2.0)
    for name in ("weight_cvar", "weight_q999"):
        np.testing.assert_allclose(found[name][0, 0], 3 * before[name][0, 0], rtol=1e-4)
    np.testing.assert_allclose(found["weight_ess"][0, 0], before["weight_ess"][0, 0], rtol=1e-4)


def test_the_objective_and_its_gradient(told, before):
    found = told(objective=1.0)
    np.testing.assert_allclose(found["loss"], 2 * before["loss"], rtol=1e-4)
    for found in (told(objective=1.0), told(gradient=1.0)):
        np.testing.assert_allclose(found["gradient_norm"], 2 * before["gradient_norm"], rtol=1e-4)
        np.testing.assert_allclose(found["critic_gradient_norm"], 2 * before["critic_gradient_norm"], rtol=1e-4)


def test_the_optimizer(told, before):
    assert (before["clipped_fraction"], told(clip_norm=-1.0)["clipped_fraction"]) == (0, 1)
    found = told(learning_rate=1.0)
    np.testing.assert_allclose(found["learning_rate"], 2 * before["learning_rate"], rtol=1e-6)
    np.testing.assert_allclose(found["update_norm"], 2 * before["update_norm"], rtol=1e-3)
    assert abs(told(optimizer_state=1.0)["x_mem"] - before["x_mem"]) > 0.01
    np.testing.assert_allclose(told(params=0.5)["params_norm"], 1.5 * before["params_norm"], rtol=1e-2)


def test_what_rows_are_told(told, before):
    assert before["calls"] > 0
    assert told(tool_result=1.0)["result_log_probability"] < before["result_log_probability"] - 0.2
    assert told(prompt=1.0)["entropy"][0] != before["entropy"][0]
    assert told(difficulty=1.0)["entropy"][0] != before["entropy"][0], "other hops stand in prompts"
