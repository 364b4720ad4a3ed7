"""Tests that the effect of every perturbation ends with its window, except at sites whose values the learner keeps.

Learners train at a rate of zero, so that they learn nothing in the window. After it, a lane's channels equal those of
the undisturbed lane, up to the rounding of lanes at different positions in a batch.
"""

import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.core.grid import site_misfit
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import ACTING_SITES, PERSISTENT_SITES, SITES
from jaxaudit.dialogues.hop import Hop
from jaxaudit.models import gpt2
from jaxaudit.runtime import registry

pytestmark = pytest.mark.long

OPEN, CLOSE, STEPS = 2, 4, 6
MAGNITUDES = {
    "quantize": 2.0,
    "sampler_quantize": 2.0,
    "tool_error": 1.0,
    "tool_corruption": 1.0,
    "tool_timeout": 1.0,
    "tool_shift": 1.0,
}
MAGNITUDES |= {"prompt_corruption": 1.0, "verifier_flip": 1.0, "reward_model_noise": 0.3, "reward_model_drift": 0.3}
MAGNITUDES |= {"token_corruption": 0.5, "distribution_drift": 1.0, "clip_failure": 0.01}

WITHOUT_EFFECT = {"stale_policy", "sync_interval", "lr_spike", "lr_schedule_error", "kl_failure", "ratio_clip_failure"}
WITHOUT_EFFECT |= {"clip_failure", "objective_scale", "trust_region_failure"}
"""Kinds without effect on any channel if the policy never moves and equals its reference, or if the rate is zero."""

MOMENT_CHANNELS = {"x_mem", "second_moment_root_mean"}
"""Channels of the optimizer's moments, which depend on earlier disturbed gradients even if the rate is zero."""


TINY = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "minibatches": 1, "performance_rows": 4}
HOP = Hop(difficulty=1.0, entities=3, hops=2, length=13)


def dialogue_learner():
    """Returns a learner with all sites of dialogues: tools, a critic, a reward model, a reference and a schedule."""
    warm_starts = {"warm_start": 150, "warm_start_rows": 16, "warm_start_learning_rate": 3e-3}
    parts = {"reward": "learned", "reward_model_warm_start": 20, "correction": "tis", "entropy_coefficient": 0.01}
    rates = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "learning_rate_decay": "linear"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(8, 1, 2))
        return ja.learners.ppo_lm(HOP, telemetry="basic", **TINY, **warm_starts, **parts, **rates)


def model_learner():
    """Returns a learner with a reward model and without warm starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(8, 1, 2))
        untrained = {"warm_start": 0, "reward_model_warm_start": 0, "learning_rate": 0.0}
        return ja.learners.grpo(HOP, telemetry="basic", reward="learned", **TINY, **untrained)


def text_learner(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 2, 2))
        small = {"size": "tiny", "context": 8, "batch_size": 4, "accumulation": 2, "held_out": 2, "validation": 2}
        return ja.learners.language_model(text, learning_rate=1e-30, **small)


def ppo_learner():
    """Returns PPO without running moments of observations and rewards, which would keep disturbed values."""
    small = {"num_envs": 2, "rollout_length": 32, "minibatch_size": 32, "epochs": 2, "hidden": (8,), "evaluations": 0}
    small |= {"normalize_observations": False, "normalize_rewards": False}
    return ja.learners.ppo("InvertedPendulum-v5", learning_rate=1e-30, **small)


CASES = {
    "models": (lambda _: model_learner(), {"behaviour", "reward_model"}),
    "dialogue": (lambda _: dialogue_learner(), set(SITES)),
    "language model": (text_learner, set(SITES)),
    "ppo": (lambda _: ppo_learner(), set(SITES)),
}
"""Learners, and the sites that are disturbed."""


def kinds_that_end(learner, tested_sites):
    """Returns names of the kinds at some sites that fit a learner and whose effect ends with the window."""
    sites = find_sites(learner, STEPS)
    kinds = {name: registry.perturbations[name] for name in registry.perturbations}
    # Simulations keep the effects of actions and forces.
    lasting = set(PERSISTENT_SITES) | (set() if "difficulty" in sites else set(ACTING_SITES))
    fitting = [name for name, kind in kinds.items() if kind.site in tested_sites and not site_misfit(kind(), sites)]
    return [name for name in fitting if kinds[name].site not in lasting]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES],
)
def trained(request, corpus):
    """Returns the names of the kinds, and telemetry with a lane of each after an undisturbed one."""
    make, tested_sites = CASES[request.param]
    names = kinds_that_end(learner := make(corpus), tested_sites)
    windows = {"onset": OPEN, "duration": CLOSE - OPEN}
    conditions = [registry.perturbations[name](MAGNITUDES.get(name), **windows) for name in names]
    return names, ja.audit(learner, conditions, seeds=1, steps=STEPS).telemetry


def changed_channels(telemetry, condition, steps):
    """Returns the channels of a lane that differ from those of the undisturbed lane in some steps."""
    names = set()
    for channel_name, channel in telemetry.data_vars.items():
        if channel_name in MOMENT_CHANNELS or not {"condition", "step"} <= set(channel.dims):
            continue
        if "stratum" in channel.dims:  # an empty stratum repeats its last value
            channel = channel.sel(stratum="all")
        lanes = channel.transpose("seed", "condition", "step", ...).values[0][:, steps]
        if not np.allclose(lanes[condition], lanes[0], rtol=1e-5, atol=1e-6, equal_nan=True):
            names.add(str(channel_name))
    return names


def test_a_perturbation_acts_in_its_window_and_not_afterwards(trained):
    names, telemetry = trained
    without_effect, changed_later = [], {}
    for number, name in enumerate(names, start=1):
        if not changed_channels(telemetry, number, slice(OPEN, CLOSE)):
            without_effect.append(name)
        if channels := changed_channels(telemetry, number, slice(CLOSE, STEPS)):
            changed_later[name] = channels
    assert not changed_later
    assert set(without_effect) <= WITHOUT_EFFECT, "a perturbation without effect tests nothing"


@pytest.mark.exhaustive
def test_the_dialogue_learner_has_all_sites_of_dialogues():
    missing = set(SITES) - set(find_sites(dialogue_learner(), STEPS))
    assert missing == {"observation", "action", "dynamics", "tokens", "label_smoothing"}


def test_persistent_sites_are_standard_sites():
    assert set(PERSISTENT_SITES) < set(SITES)
