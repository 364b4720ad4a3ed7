"""Tests that the telemetry of a dialogue learner shows the disturbed values at every site.

A single compiled step has taps that shift the value at each site by a strength, which is an argument of the program.
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


def scale(value, strength, context):
    return jax.tree.map(lambda x: x * (1 + strength) if jnp.issubdtype(x.dtype, jnp.floating) else x, value)


def add(value, strength, context):
    return value + strength


def shift_head_bias(value, strength, context):
    return {**value, "head": {**value["head"], "bias": value["head"]["bias"] + strength}}


def shift_floats(value, strength, context):
    return jax.tree.map(lambda x: x + strength if jnp.issubdtype(x.dtype, jnp.floating) else x, value)


def replace_by_rare(value, strength, context):
    rare = context["rare"][jnp.maximum(value, 0)]
    return jnp.where((strength > 0) & context["called"][:, None] & (value >= 0), rare, value)


def roll_tokens(value, strength, context):
    return jnp.where((strength > 0) & (value >= 0), (value + 1) % HOP.entities, value)


CHANGES = {
    "reward": add,
    "reward_model": shift_head_bias,
    "log_probability": lambda value, strength, context: value + jnp.where(context["own"], strength, 0.0),
    "sampled_logits": scale,
    "behaviour": scale,
    "temperature": scale,
    "reference": scale,
    "kl_coefficient": add,
    "entropy_coefficient": add,
    "gae_lambda": add,
    "critic_lambda": add,
    "ratio_clip": add,
    "advantage": scale,
    "objective": scale,
    "gradient": scale,
    "clip_norm": scale,
    "learning_rate": scale,
    "params": scale,
    "optimizer_state": shift_floats,
    "tool_result": replace_by_rare,
    "prompt": roll_tokens,
    "difficulty": add,
}


class ShiftingTaps(Taps):
    """Taps that change the value at each site by its strength; at strength 0 they change nothing."""

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
        small = {"size": "tiny", "prompts": 8, "group_size": 4, "epochs": 1, "minibatches": 1, "performance_rows": 2}
        warm_starts = {"warm_start": 0, "reward_model_warm_start": 0, "max_grad_norm": 1e6, "learning_rate": 1e-3}
        parts = {"reward": "learned", "correction": "tis", "entropy_coefficient": 0.1, "whiten": False}
        return ja.learners.ppo_lm(HOP, **small, **warm_starts, **parts)


@pytest.fixture(scope="module")
def step_telemetry(learner):
    """Returns a function from strengths by site to the telemetry of a step."""
    algorithm = learner.step.__self__
    state = jax.jit(algorithm.init)(jax.random.key(0), learner.data)
    reference = jax.tree.map(lambda x: 1.01 * x, state.reference)  # in a run the policy differs from its reference

    @jax.jit
    def run(strengths, state):
        taps = ShiftingTaps(strengths, step=jnp.int32(0), steps=4, data=learner.data)
        return algorithm.step(state, jax.random.key(1), taps)[1]

    def run_disturbed(**strengths):
        all_strengths = dict.fromkeys(CHANGES, 0.0) | strengths
        telemetry = run(jax.tree.map(jnp.float32, all_strengths), state.replace(reference=reference))
        return {name: np.asarray(value) for name, value in telemetry.items()}

    return run_disturbed


@pytest.fixture(scope="module")
def undisturbed(step_telemetry):
    return step_telemetry()


@pytest.mark.exhaustive
def test_every_site_has_a_change(learner):
    assert set(find_sites(learner)) - {"state"} == set(CHANGES)


@pytest.mark.parametrize("strength", [0.5, -1.0])
def test_shifted_log_probabilities_show_in_the_mismatch(step_telemetry, undisturbed, strength):
    """If the sampler's log-probabilities are shifted by s, ratios are exp(-s), and k3 is exp(-s) - 1 + s."""
    np.testing.assert_allclose(undisturbed["mismatch_kl"][0], 0.0, atol=1e-6)
    telemetry = step_telemetry(log_probability=strength)
    np.testing.assert_allclose(telemetry["mismatch_kl"][0], np.exp(-strength) - 1 + strength, rtol=1e-4)
    np.testing.assert_allclose(telemetry["mismatch_chi2"][0], np.exp(-2 * strength) - 1, rtol=1e-4)
    np.testing.assert_allclose(telemetry["correction_mean"], min(np.exp(-strength), 2.0), rtol=1e-4)


@pytest.mark.parametrize("site", ["sampled_logits", "behaviour"])
def test_a_disturbed_sampler_shows_in_the_mismatch(step_telemetry, undisturbed, site):
    telemetry = step_telemetry(**{site: 0.5})
    assert telemetry["mismatch_kl"][0] > 1e-3
    assert telemetry["mismatch_ess"][0] < 0.999
    np.testing.assert_allclose(telemetry["params_norm"], undisturbed["params_norm"], rtol=1e-2)


def test_disturbed_rewards_show_in_proxy_and_gap(step_telemetry, undisturbed):
    for site in ("reward", "reward_model"):
        telemetry = step_telemetry(**{site: 0.7})
        np.testing.assert_allclose(telemetry["proxy"] - undisturbed["proxy"], 0.7, rtol=1e-5)
        np.testing.assert_allclose(telemetry["reward_gap"] - undisturbed["reward_gap"], 0.7, rtol=1e-5)
        np.testing.assert_array_equal(telemetry["acting_performance"], undisturbed["acting_performance"])


def test_a_disturbed_temperature_acts_on_sampler_and_trainer(step_telemetry, undisturbed):
    telemetry = step_telemetry(temperature=3.0)
    assert telemetry["entropy"][0] > undisturbed["entropy"][0]
    np.testing.assert_allclose(telemetry["mismatch_kl"][0], 0.0, atol=1e-6)


def test_critic_lambda_changes_value_targets_and_not_the_advantages(step_telemetry, undisturbed):
    telemetry = step_telemetry(critic_lambda=-0.9)
    assert abs(telemetry["value_loss"] - undisturbed["value_loss"]) > 0.1 * undisturbed["value_loss"]
    np.testing.assert_allclose(telemetry["gradient_norm"], undisturbed["gradient_norm"], rtol=1e-4)


def test_disturbed_reference_and_kl_coefficient_show_in_their_channels(step_telemetry, undisturbed):
    telemetry = step_telemetry(reference=0.5)
    assert telemetry["kl"][0] > 2 * undisturbed["kl"][0] > 0
    without = {"kl_coefficient": -0.05}  # the reference does not influence the update
    drifts = [
        step_telemetry(**without)["representation_drift"],
        step_telemetry(**without, reference=0.5)["representation_drift"],
    ]
    assert drifts[0] == drifts[1] > 0, "drift is from the undisturbed initial policy"
    heavier = step_telemetry(kl_coefficient=5.0)
    np.testing.assert_array_equal(heavier["score_value_bias"], undisturbed["score_value_bias"])
    assert abs(heavier["value_bias"] - undisturbed["value_bias"]) > 1e-3


def test_disturbed_coefficients_show_in_loss_weights_and_clipping(step_telemetry, undisturbed):
    np.testing.assert_allclose(
        step_telemetry(entropy_coefficient=0.4)["loss"] - undisturbed["loss"],
        -0.4 * undisturbed["entropy"][0],
        rtol=1e-4,
    )
    assert step_telemetry(gae_lambda=-0.9)["weight_cvar"][0, 0] != undisturbed["weight_cvar"][0, 0]
    after = step_telemetry(ratio_clip=-0.2)["clip_fraction"][0, 1]  # ratios after the update, none of which is 1
    assert after.sum() > 0.3 > undisturbed["clip_fraction"][0, 1].sum()


def test_disturbed_advantages_show_in_the_score_weights(step_telemetry, undisturbed):
    telemetry = step_telemetry(advantage=2.0)
    for name in ("weight_cvar", "weight_q999"):
        np.testing.assert_allclose(telemetry[name][0, 0], 3 * undisturbed[name][0, 0], rtol=1e-4)
    np.testing.assert_allclose(telemetry["weight_ess"][0, 0], undisturbed["weight_ess"][0, 0], rtol=1e-4)


def test_disturbed_objective_and_gradient_double_the_norms(step_telemetry, undisturbed):
    telemetry = step_telemetry(objective=1.0)
    np.testing.assert_allclose(telemetry["loss"], 2 * undisturbed["loss"], rtol=1e-4)
    for telemetry in (step_telemetry(objective=1.0), step_telemetry(gradient=1.0)):
        np.testing.assert_allclose(telemetry["gradient_norm"], 2 * undisturbed["gradient_norm"], rtol=1e-4)
        np.testing.assert_allclose(
            telemetry["critic_gradient_norm"], 2 * undisturbed["critic_gradient_norm"], rtol=1e-4
        )


def test_disturbances_of_the_optimizer_show_in_its_channels(step_telemetry, undisturbed):
    assert (undisturbed["clipped_fraction"], step_telemetry(clip_norm=-1.0)["clipped_fraction"]) == (0, 1)
    telemetry = step_telemetry(learning_rate=1.0)
    np.testing.assert_allclose(telemetry["learning_rate"], 2 * undisturbed["learning_rate"], rtol=1e-6)
    np.testing.assert_allclose(telemetry["update_norm"], 2 * undisturbed["update_norm"], rtol=1e-3)
    assert abs(step_telemetry(optimizer_state=1.0)["x_mem"] - undisturbed["x_mem"]) > 0.01
    np.testing.assert_allclose(step_telemetry(params=0.5)["params_norm"], 1.5 * undisturbed["params_norm"], rtol=1e-2)


def test_disturbed_results_and_prompts_show_in_the_telemetry(step_telemetry, undisturbed):
    assert undisturbed["calls"] > 0
    assert step_telemetry(tool_result=1.0)["result_log_probability"] < undisturbed["result_log_probability"] - 0.2
    assert step_telemetry(prompt=1.0)["entropy"][0] != undisturbed["entropy"][0]
    assert step_telemetry(difficulty=1.0)["entropy"][0] != undisturbed["entropy"][0], (
        "prompts have other numbers of hops"
    )
