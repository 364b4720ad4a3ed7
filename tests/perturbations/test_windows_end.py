"""A disturbance ends with its window, but where a learner keeps what is disturbed: over all sites of all learners.

Learners are trained at a rate of zero, so that nothing else can be remembered: after the window a lane reads what the
undisturbed one does, but for the rounding of lanes that lie elsewhere in a batch.
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
STRONG = {
    "quantize": 2.0,
    "sampler_quantize": 2.0,
    "tool_error": 1.0,
    "tool_corruption": 1.0,
    "tool_timeout": 1.0,
    "tool_shift": 1.0,
}
STRONG |= {"prompt_corruption": 1.0, "verifier_flip": 1.0, "reward_model_noise": 0.3, "reward_model_drift": 0.3}
STRONG |= {"token_corruption": 0.5, "distribution_drift": 1.0, "clip_failure": 0.01}

UNFELT = {"stale_policy", "sync_interval", "lr_spike", "lr_schedule_error", "kl_failure", "ratio_clip_failure"}
UNFELT |= {"clip_failure", "objective_scale", "trust_region_failure"}
"""Kinds that change no channel while the policy stands still, where it is the reference, or at a rate of zero."""

OF_MOMENTS = {"x_mem", "second_moment_root_mean"}
"""Channels that read the optimizer's moments, which remember a disturbed gradient at any rate."""


TINY = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "minibatches": 1, "performance_rows": 4}
HOP = Hop(difficulty=1.0, entities=3, hops=2, length=13)


def dialogue():
    """A learner with every site of dialogues: tools, a critic, a reward model, a reference, a schedule."""
    before = {"warm_start": 150, "warm_start_rows": 16, "warm_start_learning_rate": 3e-3}
    parts = {"reward": "learned", "reward_model_warm_start": 20, "correction": "tis", "entropy_coefficient": 0.01}
    rates = {"learning_rate": 0.0, "critic_learning_rate": 0.0, "learning_rate_decay": "linear"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(8, 1, 2))
        return ja.learners.ppo_lm(HOP, telemetry="basic", **TINY, **before, **parts, **rates)


def models():
    """One with the models that rows are written and judged by, and nothing learned before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(8, 1, 2))
        nothing = {"warm_start": 0, "reward_model_warm_start": 0, "learning_rate": 0.0}
        return ja.learners.grpo(HOP, telemetry="basic", reward="learned", **TINY, **nothing)


def language_model(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 2, 2))
        few = {"size": "tiny", "context": 8, "batch_size": 4, "accumulation": 2, "held_out": 2, "validation": 2}
        return ja.learners.language_model(text, learning_rate=1e-30, **few)


def ppo():
    """Without the running moments of what it has seen, which remember it."""
    few = {"num_envs": 2, "rollout_length": 32, "minibatch_size": 32, "epochs": 2, "hidden": (8,), "evaluations": 0}
    few |= {"normalize_observations": False, "normalize_rewards": False}
    return ja.learners.ppo("InvertedPendulum-v5", learning_rate=1e-30, **few)


CASES = {
    "models": (lambda _: models(), {"behaviour", "reward_model"}),
    "dialogue": (lambda _: dialogue(), set(SITES)),
    "language model": (language_model, set(SITES)),
    "ppo": (lambda _: ppo(), set(SITES)),
}
"""Learners, and sites that are disturbed."""


def ending(learner, wanted):
    """Names of the kinds at the sites wanted that fit a learner and end with their window."""
    sites = find_sites(learner, STEPS)
    kinds = {name: registry.perturbations[name] for name in registry.perturbations}
    # Simulations keep what an action or a force has done to them.
    lasting = set(PERSISTENT_SITES) | (set() if "difficulty" in sites else set(ACTING_SITES))
    fitting = [name for name, kind in kinds.items() if kind.site in wanted and not site_misfit(kind(), sites)]
    return [name for name in fitting if kinds[name].site not in lasting]


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES],
)
def trained(request, corpus):
    """The kinds, and the telemetry of a lane of each beside an undisturbed one's."""
    make, wanted = CASES[request.param]
    names = ending(learner := make(corpus), wanted)
    windows = {"onset": OPEN, "duration": CLOSE - OPEN}
    conditions = [registry.perturbations[name](STRONG.get(name), **windows) for name in names]
    return names, ja.audit(learner, conditions, seeds=1, steps=STEPS).telemetry


def moved(telemetry, condition, steps):
    """Channels of a lane that differ from the undisturbed one's in some steps."""
    found = set()
    for name, channel in telemetry.data_vars.items():
        if name in OF_MOMENTS or not {"condition", "step"} <= set(channel.dims):
            continue
        if "stratum" in channel.dims:  # an empty one repeats what it said last, in its window or before
            channel = channel.sel(stratum="all")
        lanes = channel.transpose("seed", "condition", "step", ...).values[0][:, steps]
        if not np.allclose(lanes[condition], lanes[0], rtol=1e-5, atol=1e-6, equal_nan=True):
            found.add(str(name))
    return found


def test_what_is_disturbed_is_felt_in_its_window_and_not_after(trained):
    names, telemetry = trained
    unfelt, left = [], {}
    for number, name in enumerate(names, start=1):
        if not moved(telemetry, number, slice(OPEN, CLOSE)):
            unfelt.append(name)
        if after := moved(telemetry, number, slice(CLOSE, STEPS)):
            left[name] = after
    assert not left
    assert set(unfelt) <= UNFELT, "nothing is shown to end that was not felt"


@pytest.mark.exhaustive
def test_the_dialogue_has_all_sites_but_those_of_simulations_and_texts():
    missing = set(SITES) - set(find_sites(dialogue(), STEPS))
    assert missing == {"observation", "action", "dynamics", "tokens", "label_smoothing"}


def test_sites_that_last_are_standard_ones():
    assert set(PERSISTENT_SITES) < set(SITES)
