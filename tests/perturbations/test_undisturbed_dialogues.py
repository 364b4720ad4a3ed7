"""Tests that a dialogue learner's performance on held-out rows is not changed by disturbances of the rows it collects.

Disturbances of sampling, rewards and losses change it only through what is learned.
"""

import numpy as np
import pytest
from test_undisturbed import LEARNER_SITES

import jaxaudit as ja
from jaxaudit.core.grid import site_misfit
from jaxaudit.core.sites import find_sites
from jaxaudit.dialogues.hop import Hop
from jaxaudit.models import gpt2
from jaxaudit.runtime import registry

pytestmark = pytest.mark.long

ONSET, STEPS = 2, 8
COLLECTED = {"tool_result", "difficulty", "prompt", "behaviour", "sampled_logits", "temperature"}
"""Sites at which a disturbance changes the collected rows."""
WITHOUT_EFFECT = {"stale_policy", "sync_interval"}
"""Kinds that sample by an earlier policy, which equals the current one if the learner does not learn."""
MAGNITUDES = {
    "tool_error": 1.0,
    "tool_corruption": 1.0,
    "tool_timeout": 1.0,
    "tool_shift": 1.0,
    "prompt_corruption": 0.5,
    "sampler_noise": 2.0,
    "sampler_quantize": 2.0,
    "temperature_spike": 3.0,
}
"""Magnitudes whose effect shows in a few dozen rows."""


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))


def learner(preset, **settings):
    """Returns a learner with a correction by the sampler's log-probabilities, so that it uses them."""
    small = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "minibatches": 1, "performance_rows": 16}
    warm_start = {"warm_start": 150, "warm_start_rows": 16, "warm_start_learning_rate": 1e-2}
    dialogue = Hop(difficulty=1.0, entities=3, hops=2, length=13)
    return getattr(ja.learners, preset)(dialogue, correction="tis", telemetry="basic", **small | warm_start | settings)


def fitting_kinds(dialogue_learner):
    """Returns the kinds that fit a learner and do not write its parameters, by name, with their sites."""
    sites = find_sites(dialogue_learner, STEPS)
    kinds = {name: registry.perturbations[name] for name in registry.perturbations}
    return {n: k.site for n, k in kinds.items() if k.site not in LEARNER_SITES and site_misfit(k(), sites) is None}


def assert_performance_unchanged(dialogue_learner, kinds):
    """Asserts that at rate zero the performance is constant under each kind, and that the acting performance differs
    from the undisturbed one exactly where rows are disturbed."""
    window = {"onset": ONSET, "duration": "end"}
    freeze = ja.lr_spike(0.0, **window)
    disturbed = [ja.chain(registry.perturbations[name](MAGNITUDES.get(name), **window), freeze) for name in kinds]
    settings = ja.metrics.MetricSettings(window=2, hold=2)
    telemetry = ja.audit(
        dialogue_learner, [freeze, *disturbed], seeds=2, steps=STEPS, settings=settings, execution="map"
    ).telemetry
    performance, acting = (telemetry[name].values[..., ONSET:] for name in ("performance", "acting_performance"))
    assert (telemetry["update_norm"].values[:, 1:, ONSET:] == 0).all()
    assert (telemetry["update_norm"].values[:, 0] > 0).any()
    assert ((performance[:, 1] > 0) & (performance[:, 1] < 1)).all(), "the policy can get better and worse"
    for position, (name, site) in enumerate(kinds.items(), 2):
        expected = np.broadcast_to(performance[:, 1, :1], performance[:, position].shape)
        np.testing.assert_array_equal(performance[:, position], expected, err_msg=name)
        acts = site in COLLECTED and name not in WITHOUT_EFFECT
        assert np.array_equal(acting[:, position], acting[:, 1]) != acts, name


DEFAULT_KINDS = (
    "tool_error",
    "difficulty_shift",
    "prompt_corruption",
    "sampler_quantize",
    "sampler_noise",
    "temperature_spike",
    "log_probability_noise",
    "verifier_flip",
)
"""A kind for each site of rows."""


@pytest.mark.exhaustive
def test_a_frozen_policy_keeps_its_performance_under_disturbed_rows():
    kinds = {name: registry.perturbations[name].site for name in DEFAULT_KINDS}
    assert set(kinds.values()) == COLLECTED | {"log_probability", "reward"}
    assert_performance_unchanged(learner("grpo"), kinds)


@pytest.mark.slow
def test_a_frozen_policy_keeps_its_performance_under_every_kind():
    """A value model, a learned reward, a KL penalty and an entropy bonus give the learner every site of dialogues."""
    warm_starts = {"critic_warm_start": 1, "reward_model_warm_start": 1}
    ppo = learner("ppo_lm", reward="learned", entropy_coefficient=0.01, **warm_starts)
    kinds = fitting_kinds(ppo)
    assert {"reference", "reward_model", "advantage", "gae_lambda", "gradient"} < set(kinds.values())
    assert set(MAGNITUDES) | WITHOUT_EFFECT < set(kinds)
    assert_performance_unchanged(ppo, kinds)
