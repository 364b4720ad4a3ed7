"""What each perturbation of dialogues does to a value, in numbers, and over steps against plain simulations.

That closed windows and neutral magnitudes leave a learner as it is, to the bit, is in the matrix of test_promises.py.
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


def applied(name, value, magnitude=None, key=KEY, **context):
    perturbation = registry.perturbations[name](magnitude)
    return jax.jit(lambda key, value: perturbation.apply(value, key, **context))(key, value)


def tool(name, magnitude, key=KEY):
    """Results after a perturbation, of N rows of which three in four were called for."""
    context = {need: jnp.asarray(TOOL[need]) for need in registry.perturbations[name].needs}
    return np.asarray(applied(name, jnp.asarray(RESULTS), magnitude, key, **context))


def assert_share(hits, share):
    assert stats.binomtest(int(np.sum(hits)), np.size(hits), share).pvalue > 1e-3


# What rows are told

OTHER = {
    "tool_error": np.broadcast_to(ERROR, RESULTS.shape),
    "tool_timeout": np.full_like(RESULTS, NOTHING),
    "tool_shift": np.where(RESULTS < 0, NOTHING, RARE[RESULTS]),
}


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_stated_share_of_the_calls_is_answered_otherwise(name, share):
    told = tool(name, share)
    assert told.dtype == RESULTS.dtype
    differs = CALLED & (OTHER[name] != RESULTS).any(axis=1)
    changed = (told != RESULTS).any(axis=1)
    np.testing.assert_array_equal(told[changed], OTHER[name][changed])
    assert not changed[~CALLED].any(), "who was not called says nothing else"
    assert_share(changed[differs], share)


def test_a_corrupted_result_is_as_long_and_drawn_from_the_results_tokens():
    told = tool("tool_corruption", 0.3)
    np.testing.assert_array_equal(told == NOTHING, RESULTS == NOTHING)
    changed = (told != RESULTS).any(axis=1)
    assert not changed[~CALLED].any()
    assert_share(changed[CALLED], 0.3)
    drawn = told[changed]
    assert set(np.unique(drawn)) == {NOTHING, *TOKENS}, "all of a result, or none of it"
    assert stats.chisquare(np.bincount(drawn[drawn >= 0] - 30)).pvalue > 1e-3
    pairs = drawn[drawn[:, 1] >= 0][:, :2] - 30
    assert stats.chi2_contingency(np.histogram2d(*pairs.T, bins=4)[0]).pvalue > 1e-3, "tokens of a result differ"


def test_each_call_draws_anew():
    def step(x, key, taps):
        def turn(taps, carry, _):
            result = jnp.zeros((200, 1), jnp.int32)
            return carry, taps("tool_result", result, called=jnp.ones(200, bool))

        _, told = taps.scan(turn, x, length=3)
        return x, {"performance": x, "told": told[..., 0]}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    told = ja.audit(learner, [ja.tool_timeout(0.5, onset=0)], seeds=2, steps=2).telemetry["told"].values[:, 1]
    patterns = told.reshape(-1, 200)
    assert len(np.unique(patterns, axis=0)) == 2 * 2 * 3, "turns, steps and seeds"
    assert_share(patterns == NOTHING, 0.5)


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_the_stated_share_of_a_prompts_tokens_is_replaced(share):
    corrupted = np.asarray(applied("prompt_corruption", jnp.asarray(RESULTS), share, tokens=jnp.asarray(TOKENS)))
    assert corrupted.dtype == RESULTS.dtype
    np.testing.assert_array_equal(corrupted == NOTHING, RESULTS == NOTHING)
    there = RESULTS != NOTHING
    changed = (corrupted != RESULTS) & there
    assert_share(changed[there], share)
    assert stats.chisquare(np.bincount(corrupted[changed] - 30)).pvalue > 1e-3


def test_difficulty_shift_adds_and_stays_within_what_there_is():
    harder = applied("difficulty_shift", jnp.array([0.0, 1.0, 2.5]), 1.0, lowest=0.0, highest=3.0)
    np.testing.assert_array_equal(harder, [1.0, 2.0, 3.0])
    easier = applied("difficulty_shift", jnp.array([0.0, 1.0, 2.5]), -2.0, lowest=0.0, highest=3.0)
    np.testing.assert_array_equal(easier, [0.0, 0.0, 0.5])


def asked(**context):
    """A learner of one prompt whose difficulty is told."""

    def step(x, key, taps):
        given = {name: value() if callable(value) else value for name, value in context.items()}
        return x, {"performance": taps("difficulty", jnp.ones(1), **given)[0]}

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
def test_a_difficulty_that_there_is_not_is_refused(context, magnitude, limits):
    said = f"^magnitude {magnitude:g} of 'difficulty_shift' is outside its range {limits} for this learner$"
    with pytest.raises(ValueError, match=said):
        ja.plan(asked(**context), [ja.difficulty_shift(ja.sweep(0.0, magnitude))], seeds=1, steps=10)


def test_a_difficulty_that_may_be_there_is_allowed():
    limits = {"lowest": 0.0, "highest": 3.0}
    for context, magnitude in ((limits | {"usual": 1.0}, 2.0), (limits, 3.0), (limits, -3.0)):
        ja.plan(asked(**context), [ja.difficulty_shift(magnitude)], seeds=1, steps=10)
    traced = {name: lambda value=value: jnp.float32(value) for name, value in limits.items()}
    told = ja.audit(asked(**traced), [ja.difficulty_shift(7.0, onset=2)], seeds=1, steps=4).telemetry["performance"]
    np.testing.assert_array_equal(told.values[0, 1], [1, 1, 3, 3], "clipped in the program")


def test_learners_that_are_equal_in_all_but_their_difficulty_have_ranges_of_their_own():
    easy = dataclasses.replace(asked(lowest=0.0, highest=3.0), numbers={"difficulty": {"usual": 0.5}})
    hard = dataclasses.replace(easy, numbers={"difficulty": {"usual": 2.2}})
    assert easy == hard
    ja.plan(easy, [ja.difficulty_shift(2.5)], seeds=1, steps=10)
    ja.plan(hard, [ja.difficulty_shift(0.8)], seeds=1, steps=10)  # 3 - 2.2 is less in floating point
    with pytest.raises(ValueError, match=r"outside its range -2\.2 to 0\.8 for this learner"):
        ja.plan(hard, [ja.difficulty_shift(2.5)], seeds=1, steps=10)


# Who writes the rows


def walked(site="behaviour", keep=False, **context):
    """A learner whose parameters at step t are 10 t + seed-free digits; what passes the site is told.

    With `keep` the value is what passed before, not the parameters, as of a reference.
    """

    def init(key):
        params = {"a": jnp.float32(0.5), "b": jnp.array([0.25, 0.75])}
        return params, params

    def step(state, key, taps):
        params, kept = state
        given = dict.fromkeys(context, params)
        passed = taps(site, kept if keep else params, **given)
        after = jax.tree.map(lambda x: x + 10.0, params)
        return (after, passed), {"performance": params["a"], "a": passed["a"], "b": passed["b"][1]}

    return ja.Learner(init, step)


def lagged(lag, when):
    """The step whose parameters are used at each step."""
    used, opened = [], None
    for t in range(STEPS):
        if t not in OPEN[when]:
            opened = None
        elif opened is None:
            opened = t
        used.append(t if opened is None else max(opened, t - lag))
    return used


def synced(interval, when):
    used, opened = [], None
    for t in range(STEPS):
        if t not in OPEN[when]:
            opened = None
        elif opened is None:
            opened = t
        used.append(t if opened is None else t - (t - opened) % interval)
    return used


def test_the_sampler_lags_behind_or_is_synced_rarely_as_a_simulation_has_it():
    expected, chosen = [], []
    for simulation, kind, magnitudes in (
        (lagged, ja.stale_policy, (1, 3, 8)),
        (synced, ja.sync_interval, (2, 3, 100)),
    ):
        for when, timing in WINDOWS.items():
            chosen.append(kind(ja.sweep(*map(float, magnitudes)), onset=3, **timing))
            expected += [simulation(magnitude, when) for magnitude in magnitudes]
    told = ja.audit(walked(), chosen, seeds=1, steps=STEPS).telemetry
    np.testing.assert_array_equal(told["a"].values[0, 1:], 10.0 * np.array(expected) + 0.5)
    np.testing.assert_array_equal(told["b"].values[0, 1:], 10.0 * np.array(expected) + 0.75)
    np.testing.assert_array_equal(told["performance"].values[0], np.tile(10.0 * np.arange(STEPS) + 0.5, (19, 1)))


def test_a_target_makes_part_of_the_sampler_lag():
    told = ja.audit(walked(), [ja.stale_policy(2, onset=3, target="a")], seeds=1, steps=STEPS).telemetry
    np.testing.assert_array_equal(told["a"].values[0, 1], 10.0 * np.array(lagged(2, "end")) + 0.5)
    np.testing.assert_array_equal(told["b"].values[0, 1], 10.0 * np.arange(STEPS) + 0.75)


def test_as_many_copies_are_kept_as_the_longest_lag_takes():
    value = {"kernel": jnp.zeros((2, 3))}
    for most in (0, 1, 5, 8):
        kept = registry.perturbations["stale_policy"].init(value, float(most))
        assert kept.values["kernel"].shape == (most + 1, 2, 3)
    assert registry.perturbations["sync_interval"].init(value).value["kernel"].shape == (2, 3)
    with pytest.raises(ValueError, match="magnitude 9 of 'stale_policy' is outside its range 0 to 8"):
        ja.stale_policy(9)
    with pytest.raises(ValueError, match=r"magnitude 1\.5 of 'sync_interval' must be a whole number"):
        ja.sync_interval(1.5)


def test_the_samplers_parameters_are_rounded_as_quantize_rounds():
    value = {"a": jax.random.normal(KEY, (50, 4)), "b": jnp.linspace(-3.0, 1.0, 30)}
    for bits in (2.0, 5.0):
        mine, other = (applied(name, value, bits) for name in ("sampler_quantize", "quantize"))
        jax.tree.map(np.testing.assert_array_equal, mine, other)
        assert len(np.unique(mine["b"])) <= 2**bits - 1
    told = ja.audit(walked(), [ja.sampler_quantize(2.0, onset=3)], seeds=1, steps=STEPS).telemetry
    assert (told["b"].values[0, 1, 3:] == 10.0 * np.arange(3, STEPS) + 0.75).all(), "the largest of its tensor"
    np.testing.assert_array_equal(told["performance"].values[0, 1], told["performance"].values[0, 0])


def test_the_samplers_logits_get_other_noise_at_every_slot():
    logits = jnp.linspace(-1.0, 1.0, 300).reshape(30, 10)

    def step(x, key, taps):
        _, seen = taps.scan(lambda taps, carry, _: (carry, taps("sampled_logits", logits)), x, length=4)
        return x, {"performance": x, "noise": (seen - logits).reshape(4, 300)}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    noise = ja.audit(learner, [ja.sampler_noise(0.5, onset=1)], seeds=1, steps=4).telemetry["noise"].values[0]
    assert (noise[0] == 0).all()
    assert (noise[1, 0] == 0).all()
    drawn = noise[1, 1:].reshape(12, 300)
    assert stats.kstest(drawn.ravel() / 0.5, "norm").pvalue > 1e-3
    assert np.abs(np.corrcoef(drawn) - np.eye(12)).max() < 5 / np.sqrt(300)


@pytest.mark.parametrize("name", ["log_probability_noise", "advantage_noise"])
def test_noise_on_own_tokens_alone(name):
    own = np.random.default_rng(0).random((100, 60)) < 0.6
    value = jnp.asarray(np.where(own, -1.5, 0.0), jnp.float32)
    noise = np.asarray(applied(name, value, 0.3, own=jnp.asarray(own)) - value)
    assert (noise[~own] == 0).all()
    assert stats.kstest(noise[own] / 0.3, "norm").pvalue > 1e-3
    spoilt = applied(name, jnp.full((2, 2), jnp.inf), float("inf"), own=jnp.zeros((2, 2), bool))
    assert (spoilt == jnp.inf).all(), "given tokens are out of reach"


# What is learned from them


@pytest.mark.parametrize("name", ["temperature_spike", "kl_failure", "ratio_clip_failure"])
def test_factors_multiply(name):
    np.testing.assert_allclose(applied(name, jnp.array([0.2, 0.28]), 7.0), [1.4, 1.96], rtol=1e-6)


def test_signal_decay_is_of_the_advantages_alone_and_what_the_critic_learns_stays():
    """Lambda 0.8 times 0.5: what a row ends with reaches the token k before its end times 0.4^k; lambda 0.9 of the
    critic's targets, by hand from one of the rows."""
    parts = PRESETS["ppo_lm"].config
    parts = dataclasses.replace(parts, whiten=False, kl="none", kl_in="loss")
    usual = Coefficients(gamma=1.0, gae_lambda=0.8, critic_lambda=0.9)
    own, score, value = jnp.ones((2, 5), bool), jnp.array([[1.0], [0.5]]), jnp.zeros((2, 5))

    def step(x, key, taps):
        advantage, target = estimate_advantages(parts, tap_coefficients(parts, usual, taps), score, own, value=value)
        return x, {"performance": x, "advantage": advantage, "targets": target}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    told = ja.audit(learner, [ja.signal_decay(0.5, onset=1)], seeds=1, steps=3).telemetry
    before, after = told["advantage"].values[0, 1, :2]
    later = np.arange(4, -1, -1)
    np.testing.assert_allclose(before, [0.8**later, 0.5 * 0.8**later], rtol=1e-5)
    np.testing.assert_allclose(after, [0.4**later, 0.5 * 0.4**later], rtol=1e-5)
    targets = told["targets"].values[0, 1]
    np.testing.assert_array_equal(targets[1], targets[0])
    np.testing.assert_allclose(targets[1, 0], 0.9**later, rtol=1e-5)


def test_signal_decay_multiplies_lambda_and_stays_one_at_most():
    for factor, expected in ((0.0, 0.0), (0.5, 0.475), (1.01, 0.9595), (2.0, 1.0)):
        assert float(applied("signal_decay", jnp.float32(0.95), factor)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_a_verifier_errs_with_the_stated_probability(share):
    reward = jnp.asarray(np.tile([0.0, 1.0, 0.25], 2000), jnp.float32)
    flipped = np.asarray(applied("verifier_flip", reward, share, bound=1.0))
    wrong = flipped != np.asarray(reward)
    np.testing.assert_array_equal(flipped[wrong], 1 - np.asarray(reward)[wrong])
    for value in range(3):
        assert_share(wrong[value::3], share)


def test_length_bias_pays_for_each_own_token():
    lengths = jnp.array([0.0, 3.0, 7.0])
    biased = applied("length_bias", jnp.array([1.0, 0.0, 0.5]), -0.125, lengths=lengths)
    np.testing.assert_array_equal(biased, [1.0, -0.375, -0.375])


JUDGE = {"a": jnp.linspace(-1.0, 1.0, 300), "b": jnp.ones((10, 20))}


def judged(x, key, taps):
    """Tells the change of the reward model's parameters."""
    moved = jax.tree.map(lambda new, old: new - old, taps("reward_model", JUDGE), JUDGE)
    return x, {"performance": x, "moved": jnp.concatenate([moved["a"], moved["b"].ravel()])}


def test_a_reward_model_is_noisy_anew_each_step_or_drifts_in_one_direction():
    learner = ja.Learner(lambda key: jnp.float32(0.0), judged)
    chosen = [
        ja.reward_model_noise(0.1, onset=2, duration=4),
        ja.reward_model_drift(0.1, onset=2, duration=4),
        ja.reward_model_drift(0.1, onset=2, duration=2, period=4),
    ]
    moved = ja.audit(learner, chosen, seeds=2, steps=8).telemetry["moved"].values
    assert (moved[:, 0] == 0).all()
    assert (moved[:, 1:, :2] == 0).all()
    assert (moved[:, 1:3, 6:] == 0).all(), "after the window"
    noise, drift, again = (moved[:, i] for i in (1, 2, 3))
    for drawn in (noise[:, 2:6], drift[:, 5:6]):
        assert stats.kstest(drawn.ravel() / 0.1, "norm").pvalue > 1e-3
    each = noise[:, 2:6].reshape(8, 500)
    assert np.abs(np.corrcoef(each) - np.eye(8)).max() < 5 / np.sqrt(500), "steps and seeds draw anew"
    for passed, step in ((0.25, 2), (0.5, 3), (0.75, 4)):
        np.testing.assert_allclose(drift[:, step], passed * drift[:, 5], rtol=1e-4, atol=1e-6)
    assert abs(np.corrcoef(drift[:, 5])[0, 1]) < 5 / np.sqrt(500), "seeds go their own ways"
    assert (again[:, 4:6] == 0).all()
    np.testing.assert_allclose(again[:, 7], again[:, 6] * 6 / 5, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(again[:, 3], again[:, 2] * 2, rtol=1e-4, atol=1e-6)
    assert abs(np.corrcoef(again[0, 3], again[0, 7])[0, 1]) < 5 / np.sqrt(500), "each opening has its direction"


def test_a_reference_is_reset_once_or_drifts_at_every_step():
    learner = walked("reference", keep=True, policy=None)
    chosen = [
        ja.reference_reset(onset=3),
        ja.reference_reset(0.25, onset=3),
        ja.reference_drift(0.25, onset=3, duration=6),
    ]
    told = ja.audit(learner, chosen, seeds=1, steps=STEPS).telemetry["a"].values[0]

    def simulated(share, opened):
        reference, seen = 0.5, []
        for t in range(STEPS):
            if t in opened:
                reference += share * (10.0 * t + 0.5 - reference)
            seen.append(reference)
        return seen

    expected = [simulated(0, ()), simulated(1.0, [3]), simulated(0.25, [3]), simulated(0.25, range(3, 9))]
    np.testing.assert_allclose(told, expected, rtol=1e-6)
    assert (told[1, 3:] == 30.5).all()
    broken = {"kernel": jnp.array([jnp.nan, 1.0])}
    healed = applied("reference_reset", broken, 1.0, policy={"kernel": jnp.array([2.0, 3.0])})
    np.testing.assert_array_equal(healed["kernel"], [2.0, 3.0])


def test_value_bias_moves_the_bias_of_the_critics_head_alone_and_once():
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
        ja.plan(walked("params"), [ja.value_bias()], seeds=1, steps=10)


# What means nothing here


@pytest.mark.parametrize(
    ("name", "sentence"),
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
def test_what_means_nothing_to_a_dialogue_learner_is_refused_in_one_sentence(name, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        ja.plan(TINY_DIALOGUE, [registry.perturbations[name]()], seeds=1, steps=10)
    assert len(str(refused.value).splitlines()) == 1


def test_length_bias_means_nothing_without_lengths():
    learner = ja.Learner(lambda key: jnp.float32(0), lambda x, key, taps: (x, {"performance": taps("reward", x)}))
    said = "'length_bias' needs lengths at site 'reward', which the learner's tap there does not give"
    with pytest.raises(ValueError, match=said):
        ja.plan(learner, [ja.length_bias()], seeds=1, steps=10)


def test_a_verifier_flip_means_nothing_without_a_bound():
    """As of an environment's rewards, or of a reward model's scores."""

    def step(x, key, taps, **bound):
        return x, {"performance": taps("reward", x, **bound)}

    def begin(key):
        return jnp.float32(0)

    said = "'verifier_flip' needs bound at site 'reward', which the learner's tap there does not give"
    with pytest.raises(ValueError, match=said):
        ja.plan(ja.Learner(begin, step), [ja.verifier_flip()], seeds=1, steps=10)
    bounded = ja.Learner(begin, functools.partial(step, bound=1.0))
    told = ja.audit(bounded, [ja.verifier_flip(1.0, onset=2)], seeds=1, steps=4).telemetry
    np.testing.assert_array_equal(told["performance"].values[0], [[0, 0, 0, 0], [0, 0, 1, 1]])
