"""A dialogue learner's performance is what its policy is worth on held-out rows: what disturbs the rows it collects, or
what it makes of them, moves the performance only through what is learned."""

import numpy as np
import pytest
from test_undisturbed import WRITES

import jaxaudit as ja
from jaxaudit.core.grid import site_misfit
from jaxaudit.core.sites import find_sites
from jaxaudit.dialogues.hop import Hop
from jaxaudit.models import gpt2
from jaxaudit.runtime import registry

pytestmark = pytest.mark.long

START, STEPS = 2, 8
COLLECTED = {"tool_result", "difficulty", "prompt", "behaviour", "sampled_logits", "temperature"}
"""Sites at which a disturbance changes the rows that are collected."""
UNFELT = {"stale_policy", "sync_interval"}
"""They sample by an earlier policy, and one that cannot learn was always what it is."""
STRONG = {
    "tool_error": 1.0,
    "tool_corruption": 1.0,
    "tool_timeout": 1.0,
    "tool_shift": 1.0,
    "prompt_corruption": 0.5,
    "sampler_noise": 2.0,
    "sampler_quantize": 2.0,
    "temperature_spike": 3.0,
}
"""Magnitudes that the success of a few dozen rows tells."""


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 1, 2))


def learner(preset, **settings):
    """It corrects by the sampler's log-probabilities, so that they are read."""
    few = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "minibatches": 1, "performance_rows": 16}
    begin = {"warm_start": 150, "warm_start_rows": 16, "warm_start_learning_rate": 1e-2}
    dialogue = Hop(difficulty=1.0, entities=3, hops=2, length=13)
    return getattr(ja.learners, preset)(dialogue, correction="tis", telemetry="basic", **few | begin | settings)


def innocent_kinds(one):
    """All that fit a learner and write nothing of what it trains, by name, with their sites."""
    sites = find_sites(one, STEPS)
    kinds = {name: registry.perturbations[name] for name in registry.perturbations}
    return {n: k.site for n, k in kinds.items() if k.site not in WRITES and site_misfit(k(), sites) is None}


def assert_innocent(one, kinds):
    """At rate zero the performance is the same number at every step under each; and that of what is collected is not
    where rows are disturbed, and is where they are not."""
    window = {"onset": START, "duration": "end"}
    still = ja.lr_spike(0.0, **window)
    chosen = [ja.chain(registry.perturbations[name](STRONG.get(name), **window), still) for name in kinds]
    settings = ja.metrics.MetricSettings(window=2, hold=2)
    told = ja.audit(one, [still, *chosen], seeds=2, steps=STEPS, settings=settings, execution="map").telemetry
    performance, acting = (told[name].values[..., START:] for name in ("performance", "acting_performance"))
    assert (told["update_norm"].values[:, 1:, START:] == 0).all()
    assert (told["update_norm"].values[:, 0] > 0).any()
    assert ((performance[:, 1] > 0) & (performance[:, 1] < 1)).all(), "a policy to which something can happen"
    for position, (name, site) in enumerate(kinds.items(), 2):
        wanted = np.broadcast_to(performance[:, 1, :1], performance[:, position].shape)
        np.testing.assert_array_equal(performance[:, position], wanted, err_msg=name)
        felt = site in COLLECTED and name not in UNFELT
        assert np.array_equal(acting[:, position], acting[:, 1]) != felt, name


FEW = (
    "tool_error",
    "difficulty_shift",
    "prompt_corruption",
    "sampler_quantize",
    "sampler_noise",
    "temperature_spike",
    "log_probability_noise",
    "verifier_flip",
)
"""One of each site of rows."""


@pytest.mark.exhaustive
def test_a_policy_that_cannot_learn_keeps_its_performance_however_its_rows_are_disturbed():
    kinds = {name: registry.perturbations[name].site for name in FEW}
    assert set(kinds.values()) == COLLECTED | {"log_probability", "reward"}
    assert_innocent(learner("grpo"), kinds)


@pytest.mark.slow
def test_a_policy_that_cannot_learn_keeps_its_performance_under_everything():
    """With a value model, a learned reward, a divergence and an entropy bonus every site of dialogues is there."""
    few = {"critic_warm_start": 1, "reward_model_warm_start": 1}
    one = learner("ppo_lm", reward="learned", entropy_coefficient=0.01, **few)
    kinds = innocent_kinds(one)
    assert {"reference", "reward_model", "advantage", "gae_lambda", "gradient"} < set(kinds.values())
    assert set(STRONG) | UNFELT < set(kinds)
    assert_innocent(one, kinds)
