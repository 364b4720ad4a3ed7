"""Tests the effect of each perturbation of dialogues on a value, and over steps against plain simulations.

test_promises.py tests that closed windows and neutral magnitudes change no bit of a learner.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny_dialogue import TINY_DIALOGUE

import jaxaudit as ja
from jaxaudit.learners.dialogue.advantages import estimate_advantages
from jaxaudit.learners.dialogue.collection import tap_coefficients
from jaxaudit.learners.dialogue.factories import PRESETS
from jaxaudit.learners.dialogue.objective import Coefficients
from jaxaudit.runtime import registry

KEY = jax.random.key(11)
N = 4000
NOTHING = -1
CALLED = np.arange(N) % 4 > 0
RESULTS = np.where(np.arange(3) < 1 + np.arange(N)[:, None] % 3, np.arange(N)[:, None] % 7 + np.arange(3), NOTHING)
RESULTS = RESULTS.astype(np.int32)
ERROR, TOKENS = np.array([20, 21, NOTHING]), np.array([30, 31, 32, 33])
RARE = np.where(np.arange(40) % 2, np.arange(40) - 1, np.arange(40))
TOOL = {"called": CALLED, "error": ERROR, "tokens": TOKENS, "rare": RARE}
STEPS = 14
OPEN = {"end": range(3, STEPS), "once": range(3, 9), "periodic": (3, 4, 5, 7, 8, 9, 11, 12, 13)}
WINDOWS = {"end": {"duration": "end"}, "once": {"duration": 6}, "periodic": {"duration": 3, "period": 4}}


def apply(name, value, magnitude=None, key=KEY, **context):
    perturbation = registry.perturbations[name](magnitude)
    return jax.jit(lambda key, value: perturbation.apply(value, key, **context))(key, value)


def disturbed_results(name, magnitude, key=KEY):
    """Returns the disturbed results of N rows, of which three in four have called."""
    context = {need: jnp.asarray(TOOL[need]) for need in registry.perturbations[name].needs}
    return np.asarray(apply(name, jnp.asarray(RESULTS), magnitude, key, **context))


def assert_share(hits, share):
    assert stats.binomtest(int(np.sum(hits)), np.size(hits), share).pvalue > 1e-3


# What tools and prompts show to the policy

REPLACED_RESULTS = {
    "tool_error": np.broadcast_to(ERROR, RESULTS.shape),
    "tool_timeout": np.full_like(RESULTS, NOTHING),
    "tool_shift": np.where(RESULTS < 0, NOTHING, RARE[RESULTS]),
}


@pytest.mark.parametrize("name", REPLACED_RESULTS)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_tool_perturbations_replace_the_given_share_of_results(name, share):
    disturbed = disturbed_results(name, share)
    assert disturbed.dtype == RESULTS.dtype
    differs = CALLED & (REPLACED_RESULTS[name] != RESULTS).any(axis=1)
    changed = (disturbed != RESULTS).any(axis=1)
    np.testing.assert_array_equal(disturbed[changed], REPLACED_RESULTS[name][changed])
    assert not changed[~CALLED].any(), "rows without a call keep their results"
    assert_share(changed[differs], share)


def test_tool_corruption_samples_result_tokens_of_the_same_length():
    disturbed = disturbed_results("tool_corruption", 0.3)
    np.testing.assert_array_equal(disturbed == NOTHING, RESULTS == NOTHING)
    changed = (disturbed != RESULTS).any(axis=1)
    assert not changed[~CALLED].any()
    assert_share(changed[CALLED], 0.3)
    corrupted = disturbed[changed]
    assert set(np.unique(corrupted)) == {NOTHING, *TOKENS}, "all tokens of a result are replaced, or none"
    assert stats.chisquare(np.bincount(corrupted[corrupted >= 0] - 30)).pvalue > 1e-3
    pairs = corrupted[corrupted[:, 1] >= 0][:, :2] - 30
    assert stats.chi2_contingency(np.histogram2d(*pairs.T, bins=4)[0]).pvalue > 1e-3, (
        "tokens of a result are independent"
    )


def test_tool_timeouts_are_random_in_each_call():
    def step(x, key, taps):
        def turn(taps, carry, _):
            result = jnp.zeros((200, 1), jnp.int32)
            return carry, taps("tool_result", result, called=jnp.ones(200, bool))

        _, results = taps.scan(turn, x, length=3)
        return x, {"performance": x, "results": results[..., 0]}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    results = ja.audit(learner, [ja.tool_timeout(0.5, onset=0)], seeds=2, steps=2).telemetry["results"].values[:, 1]
    patterns = results.reshape(-1, 200)
    assert len(np.unique(patterns, axis=0)) == 2 * 2 * 3, "turns, steps and seeds"
    assert_share(patterns == NOTHING, 0.5)


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_prompt_corruption_replaces_the_given_share_of_tokens(share):
    corrupted = np.asarray(apply("prompt_corruption", jnp.asarray(RESULTS), share, tokens=jnp.asarray(TOKENS)))
    assert corrupted.dtype == RESULTS.dtype
    np.testing.assert_array_equal(corrupted == NOTHING, RESULTS == NOTHING)
    is_token = RESULTS != NOTHING
    changed = (corrupted != RESULTS) & is_token
    assert_share(changed[is_token], share)
    assert stats.chisquare(np.bincount(corrupted[changed] - 30)).pvalue > 1e-3


def test_difficulty_shift_adds_and_is_clipped():
    harder = apply("difficulty_shift", jnp.array([0.0, 1.0, 2.5]), 1.0, lowest=0.0, highest=3.0)
    np.testing.assert_array_equal(harder, [1.0, 2.0, 3.0])
    easier = apply("difficulty_shift", jnp.array([0.0, 1.0, 2.5]), -2.0, lowest=0.0, highest=3.0)
    np.testing.assert_array_equal(easier, [0.0, 0.0, 0.5])


def difficulty_learner(**context):
    """Returns a learner with a single prompt, whose difficulty is the performance."""

    def step(x, key, taps):
        values = {name: value() if callable(value) else value for name, value in context.items()}
        return x, {"performance": taps("difficulty", jnp.ones(1), **values)[0]}

    return ja.Learner(lambda key: jnp.float32(0.0), step)


@pytest.mark.parametrize(
    ("context", "magnitude", "limits"),
    [
        ({"lowest": 0.0, "highest": 3.0, "usual": 1.0}, 2.5, "-1 to 2"),
        ({"lowest": 0.0, "highest": 3.0, "usual": 1.0}, -1.5, "-1 to 2"),
        ({"lowest": 0, "highest": np.float32(3.0)}, 3.5, "-3 to 3"),
        ({"lowest": 0.0, "highest": 0.0, "usual": 0.0}, 1.0, "0 to 0"),
        ({"lowest": lambda: jnp.float32(0.0), "highest": 3.0, "usual": 1.0}, 2.5, "-inf to 2"),
    ],
)
def test_difficulty_shifts_beyond_the_learners_range_are_refused(context, magnitude, limits):
    message = f"^magnitude {magnitude:g} of 'difficulty_shift' is outside its range {limits} for this learner$"
    with pytest.raises(ValueError, match=message):
        ja.plan(difficulty_learner(**context), [ja.difficulty_shift(ja.sweep(0.0, magnitude))], seeds=1, steps=10)


def test_difficulty_shifts_that_may_be_in_range_are_allowed():
    limits = {"lowest": 0.0, "highest": 3.0}
    for context, magnitude in ((limits | {"usual": 1.0}, 2.0), (limits, 3.0), (limits, -3.0)):
        ja.plan(difficulty_learner(**context), [ja.difficulty_shift(magnitude)], seeds=1, steps=10)
    traced = {name: lambda value=value: jnp.float32(value) for name, value in limits.items()}
    performance = ja.audit(
        difficulty_learner(**traced), [ja.difficulty_shift(7.0, onset=2)], seeds=1, steps=4
    ).telemetry["performance"]
    np.testing.assert_array_equal(performance.values[0, 1], [1, 1, 3, 3], "clipped in the program")


def test_the_range_of_difficulty_shift_depends_on_the_usual_difficulty():
    easy = dataclasses.replace(difficulty_learner(lowest=0.0, highest=3.0), numbers={"difficulty": {"usual": 0.5}})
    hard = dataclasses.replace(easy, numbers={"difficulty": {"usual": 2.2}})
    assert easy == hard
    ja.plan(easy, [ja.difficulty_shift(2.5)], seeds=1, steps=10)
    ja.plan(hard, [ja.difficulty_shift(0.8)], seeds=1, steps=10)  # in floating point 3 - 2.2 is less than 0.8
    with pytest.raises(ValueError, match=r"outside its range -2\.2 to 0\.8 for this learner"):
        ja.plan(hard, [ja.difficulty_shift(2.5)], seeds=1, steps=10)


# What samples the rows


def walking_learner(site="behaviour", keep=False, **context):
    """Returns a learner whose parameters at step t are 10 t plus constants, and whose telemetry has the tapped value.

    With `keep` the tapped value is the last one that the site returned, as for a reference, and not the parameters.
    """

    def init(key):
        params = {"a": jnp.float32(0.5), "b": jnp.array([0.25, 0.75])}
        return params, params

    def step(state, key, taps):
        params, last_passed = state
        arguments = dict.fromkeys(context, params)
        passed = taps(site, last_passed if keep else params, **arguments)
        after = jax.tree.map(lambda x: x + 10.0, params)
        return (after, passed), {"performance": params["a"], "a": passed["a"], "b": passed["b"][1]}

    return ja.Learner(init, step)


def steps_of_lagged_sampler(lag, when):
    """Returns the step whose parameters are used, for each step."""
    used, opening = [], None
    for t in range(STEPS):
        if t not in OPEN[when]:
            opening = None
        elif opening is None:
            opening = t
        used.append(t if opening is None else max(opening, t - lag))
    return used


def steps_of_synced_sampler(interval, when):
    used, opening = [], None
    for t in range(STEPS):
        if t not in OPEN[when]:
            opening = None
        elif opening is None:
            opening = t
        used.append(t if opening is None else t - (t - opening) % interval)
    return used


def test_stale_policy_and_sync_interval_equal_simulations():
    expected, perturbations = [], []
    for simulation, kind, magnitudes in (
        (steps_of_lagged_sampler, ja.stale_policy, (1, 3, 8)),
        (steps_of_synced_sampler, ja.sync_interval, (2, 3, 100)),
    ):
        for when, timing in WINDOWS.items():
            perturbations.append(kind(ja.sweep(*map(float, magnitudes)), onset=3, **timing))
            expected += [simulation(magnitude, when) for magnitude in magnitudes]
    telemetry = ja.audit(walking_learner(), perturbations, seeds=1, steps=STEPS).telemetry
    np.testing.assert_array_equal(telemetry["a"].values[0, 1:], 10.0 * np.array(expected) + 0.5)
    np.testing.assert_array_equal(telemetry["b"].values[0, 1:], 10.0 * np.array(expected) + 0.75)
    np.testing.assert_array_equal(telemetry["performance"].values[0], np.tile(10.0 * np.arange(STEPS) + 0.5, (19, 1)))


def test_stale_policy_with_a_target_delays_a_part_of_the_parameters():
    telemetry = ja.audit(walking_learner(), [ja.stale_policy(2, onset=3, target="a")], seeds=1, steps=STEPS).telemetry
    np.testing.assert_array_equal(telemetry["a"].values[0, 1], 10.0 * np.array(steps_of_lagged_sampler(2, "end")) + 0.5)
    np.testing.assert_array_equal(telemetry["b"].values[0, 1], 10.0 * np.arange(STEPS) + 0.75)


def test_stale_policy_keeps_one_copy_more_than_its_lag():
    value = {"kernel": jnp.zeros((2, 3))}
    for largest_lag in (0, 1, 5, 8):
        state = registry.perturbations["stale_policy"].init(value, float(largest_lag))
        assert state.values["kernel"].shape == (largest_lag + 1, 2, 3)
    assert registry.perturbations["sync_interval"].init(value).value["kernel"].shape == (2, 3)
    with pytest.raises(ValueError, match="magnitude 9 of 'stale_policy' is outside its range 0 to 8"):
        ja.stale_policy(9)
    with pytest.raises(ValueError, match=r"magnitude 1\.5 of 'sync_interval' must be a whole number"):
        ja.sync_interval(1.5)


def test_sampler_quantize_rounds_as_quantize():
    value = {"a": jax.random.normal(KEY, (50, 4)), "b": jnp.linspace(-3.0, 1.0, 30)}
    for bits in (2.0, 5.0):
        result, expected = (apply(name, value, bits) for name in ("sampler_quantize", "quantize"))
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        assert len(np.unique(result["b"])) <= 2**bits - 1
    telemetry = ja.audit(walking_learner(), [ja.sampler_quantize(2.0, onset=3)], seeds=1, steps=STEPS).telemetry
    assert (telemetry["b"].values[0, 1, 3:] == 10.0 * np.arange(3, STEPS) + 0.75).all(), (
        "the largest entry of a tensor is exact"
    )
    np.testing.assert_array_equal(telemetry["performance"].values[0, 1], telemetry["performance"].values[0, 0])


def test_sampler_noise_is_independent_at_every_slot():
    logits = jnp.linspace(-1.0, 1.0, 300).reshape(30, 10)

    def step(x, key, taps):
        _, disturbed = taps.scan(lambda taps, carry, _: (carry, taps("sampled_logits", logits)), x, length=4)
        return x, {"performance": x, "noise": (disturbed - logits).reshape(4, 300)}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    noise = ja.audit(learner, [ja.sampler_noise(0.5, onset=1)], seeds=1, steps=4).telemetry["noise"].values[0]
    assert (noise[0] == 0).all()
    assert (noise[1, 0] == 0).all()
    rows = noise[1, 1:].reshape(12, 300)
    assert stats.kstest(rows.ravel() / 0.5, "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(rows) - np.eye(12)).max() < 5 / np.sqrt(300)


@pytest.mark.parametrize("name", ["log_probability_noise", "advantage_noise"])
def test_noise_acts_on_response_tokens_only(name):
    response_mask = np.random.default_rng(0).random((100, 60)) < 0.6
    value = jnp.asarray(np.where(response_mask, -1.5, 0.0), jnp.float32)
    noise = np.asarray(apply(name, value, 0.3, own=jnp.asarray(response_mask)) - value)
    assert (noise[~response_mask] == 0).all()
    assert stats.kstest(noise[response_mask] / 0.3, "norm").pvalue > 1e-3
    unchanged = apply(name, jnp.full((2, 2), jnp.inf), float("inf"), own=jnp.zeros((2, 2), bool))
    assert (unchanged == jnp.inf).all(), "other tokens do not change"


# What is learned from the rows


@pytest.mark.parametrize("name", ["temperature_spike", "kl_failure", "ratio_clip_failure"])
def test_scaling_perturbations_multiply_by_their_magnitude(name):
    np.testing.assert_allclose(apply(name, jnp.array([0.2, 0.28]), 7.0), [1.4, 1.96], rtol=1e-6)


def test_signal_decay_changes_advantages_and_not_value_targets():
    """With lambda 0.8 times 0.5, the final reward reaches the token k steps earlier times 0.4^k. Value targets have a
    lambda of 0.9; the expected ones of a row are written out."""
    parts = PRESETS["ppo_lm"].config
    parts = dataclasses.replace(parts, whiten=False, kl="none", kl_in="loss")
    usual = Coefficients(gamma=1.0, gae_lambda=0.8, critic_lambda=0.9)
    loss_mask, score, value = jnp.ones((2, 5), bool), jnp.array([[1.0], [0.5]]), jnp.zeros((2, 5))

    def step(x, key, taps):
        advantage, target = estimate_advantages(
            parts, tap_coefficients(parts, usual, taps), score, loss_mask, value=value
        )
        return x, {"performance": x, "advantage": advantage, "targets": target}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    telemetry = ja.audit(learner, [ja.signal_decay(0.5, onset=1)], seeds=1, steps=3).telemetry
    before, after = telemetry["advantage"].values[0, 1, :2]
    later = np.arange(4, -1, -1)
    np.testing.assert_allclose(before, [0.8**later, 0.5 * 0.8**later], rtol=1e-5)
    np.testing.assert_allclose(after, [0.4**later, 0.5 * 0.4**later], rtol=1e-5)
    targets = telemetry["targets"].values[0, 1]
    np.testing.assert_array_equal(targets[1], targets[0])
    np.testing.assert_allclose(targets[1, 0], 0.9**later, rtol=1e-5)


def test_signal_decay_multiplies_lambda_up_to_one():
    for factor, expected in ((0.0, 0.0), (0.5, 0.475), (1.01, 0.9595), (2.0, 1.0)):
        assert float(apply("signal_decay", jnp.float32(0.95), factor)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_verifier_flip_has_the_given_probability(share):
    reward = jnp.asarray(np.tile([0.0, 1.0, 0.25], 2000), jnp.float32)
    flipped = np.asarray(apply("verifier_flip", reward, share, bound=1.0))
    wrong = flipped != np.asarray(reward)
    np.testing.assert_array_equal(flipped[wrong], 1 - np.asarray(reward)[wrong])
    for value in range(3):
        assert_share(wrong[value::3], share)


def test_length_bias_adds_a_reward_per_token():
    lengths = jnp.array([0.0, 3.0, 7.0])
    biased = apply("length_bias", jnp.array([1.0, 0.0, 0.5]), -0.125, lengths=lengths)
    np.testing.assert_array_equal(biased, [1.0, -0.375, -0.375])


REWARD_MODEL = {"a": jnp.linspace(-1.0, 1.0, 300), "b": jnp.ones((10, 20))}


def reward_model_change(x, key, taps):
    """A step whose telemetry is the change of the reward model's parameters."""
    change = jax.tree.map(lambda new, old: new - old, taps("reward_model", REWARD_MODEL), REWARD_MODEL)
    return x, {"performance": x, "change": jnp.concatenate([change["a"], change["b"].ravel()])}


def test_reward_model_noise_is_new_each_step_and_drift_keeps_its_direction():
    learner = ja.Learner(lambda key: jnp.float32(0.0), reward_model_change)
    perturbations = [
        ja.reward_model_noise(0.1, onset=2, duration=4),
        ja.reward_model_drift(0.1, onset=2, duration=4),
        ja.reward_model_drift(0.1, onset=2, duration=2, period=4),
    ]
    change = ja.audit(learner, perturbations, seeds=2, steps=8).telemetry["change"].values
    assert (change[:, 0] == 0).all()
    assert (change[:, 1:, :2] == 0).all()
    assert (change[:, 1:3, 6:] == 0).all(), "nothing remains after the window"
    noise, drift, periodic_drift = (change[:, i] for i in (1, 2, 3))
    for sample in (noise[:, 2:6], drift[:, 5:6]):
        assert stats.kstest(sample.ravel() / 0.1, "norm").pvalue > 1e-3
    steps_and_seeds = noise[:, 2:6].reshape(8, 500)
    assert np.abs(np.corrcoef(steps_and_seeds) - np.eye(8)).max() < 5 / np.sqrt(500), (
        "noise is independent over steps and seeds"
    )
    for fraction, step in ((0.25, 2), (0.5, 3), (0.75, 4)):
        np.testing.assert_allclose(drift[:, step], fraction * drift[:, 5], rtol=1e-4, atol=1e-6)
    assert abs(np.corrcoef(drift[:, 5])[0, 1]) < 5 / np.sqrt(500), "seeds drift in different directions"
    assert (periodic_drift[:, 4:6] == 0).all()
    np.testing.assert_allclose(periodic_drift[:, 7], periodic_drift[:, 6] * 6 / 5, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(periodic_drift[:, 3], periodic_drift[:, 2] * 2, rtol=1e-4, atol=1e-6)
    assert abs(np.corrcoef(periodic_drift[0, 3], periodic_drift[0, 7])[0, 1]) < 5 / np.sqrt(500), (
        "each opening has a new direction"
    )


def test_reference_reset_acts_once_and_reference_drift_at_every_step():
    learner = walking_learner("reference", keep=True, policy=None)
    perturbations = [
        ja.reference_reset(onset=3),
        ja.reference_reset(0.25, onset=3),
        ja.reference_drift(0.25, onset=3, duration=6),
    ]
    references = ja.audit(learner, perturbations, seeds=1, steps=STEPS).telemetry["a"].values[0]

    def simulated(share, open_steps):
        value, series = 0.5, []
        for t in range(STEPS):
            if t in open_steps:
                value += share * (10.0 * t + 0.5 - value)
            series.append(value)
        return series

    expected = [simulated(0, ()), simulated(1.0, [3]), simulated(0.25, [3]), simulated(0.25, range(3, 9))]
    np.testing.assert_allclose(references, expected, rtol=1e-6)
    assert (references[1, 3:] == 30.5).all()
    nan_params = {"kernel": jnp.array([jnp.nan, 1.0])}
    healed = apply("reference_reset", nan_params, 1.0, policy={"kernel": jnp.array([2.0, 3.0])})
    np.testing.assert_array_equal(healed["kernel"], [2.0, 3.0])


def test_value_bias_shifts_the_critics_head_bias_once():
    def init(key):
        head = {"kernel": jnp.zeros(3), "bias": jnp.zeros(1)}
        return {"critic": {"head": head, "h": {"bias": jnp.zeros(2)}}, "policy": {"head": {"bias": jnp.zeros(1)}}}

    def step(params, key, taps):
        params = taps("params", params)
        biases = [params["critic"]["head"]["bias"], params["critic"]["head"]["kernel"]]
        biases += [params["critic"]["h"]["bias"], params["policy"]["head"]["bias"]]
        return params, {"performance": jnp.float32(0.0), "biases": jnp.stack([jnp.sum(x) for x in biases])}

    learner = ja.Learner(init, step)
    biases = ja.audit(learner, [ja.value_bias(-2.0, onset=2)], seeds=1, steps=5).telemetry["biases"].values[0, 1]
    np.testing.assert_array_equal(biases, [[0] * 4] * 2 + [[-2, 0, 0, 0]] * 3)
    with pytest.raises(ValueError, match="target 'critic/head/bias' of 'value_bias' is in none of the paths"):
        ja.plan(walking_learner("params"), [ja.value_bias()], seeds=1, steps=10)


# Perturbations that dialogue learners refuse


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reward_delay", "'reward_delay' needs ends at site 'reward', which the learner's tap there does not give"),
        (
            "adversarial_reward",
            "'adversarial_reward' needs td_error at site 'reward', which the learner's tap there does not give",
        ),
        ("label_smoothing", "'label_smoothing' acts at site 'label_smoothing', which the learner does not tap"),
        ("token_corruption", "'token_corruption' acts at site 'tokens', which the learner does not tap"),
        ("observation_noise", "'observation_noise' acts at site 'observation', which the learner does not tap"),
    ],
)
def test_perturbations_without_a_site_or_context_are_refused(name, message):
    with pytest.raises(ValueError, match=message) as error:
        ja.plan(TINY_DIALOGUE, [registry.perturbations[name]()], seeds=1, steps=10)
    assert len(str(error.value).splitlines()) == 1


def test_length_bias_is_refused_without_lengths():
    learner = ja.Learner(lambda key: jnp.float32(0), lambda x, key, taps: (x, {"performance": taps("reward", x)}))
    message = "'length_bias' needs lengths at site 'reward', which the learner's tap there does not give"
    with pytest.raises(ValueError, match=message):
        ja.plan(learner, [ja.length_bias()], seeds=1, steps=10)


def test_verifier_flip_is_refused_without_a_bound():
    """Rewards of environments and scores of reward models have no bound."""

    def step(x, key, taps, **bound):
        return x, {"performance": taps("reward", x, **bound)}

    def init(key):
        return jnp.float32(0)

    message = "'verifier_flip' needs bound at site 'reward', which the learner's tap there does not give"
    with pytest.raises(ValueError, match=message):
        ja.plan(ja.Learner(init, step), [ja.verifier_flip()], seeds=1, steps=10)
    bounded = ja.Learner(init, functools.partial(step, bound=1.0))
    telemetry = ja.audit(bounded, [ja.verifier_flip(1.0, onset=2)], seeds=1, steps=4).telemetry
    np.testing.assert_array_equal(telemetry["performance"].values[0], [[0, 0, 0, 0], [0, 0, 1, 1]])
