"""Tests remedies of rates, updates and parameters against their published formulas in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from remedy_references import (
    AdamReference,
    adagc_reference,
    six_sigma_reference,
    spam_reference,
    zclip_reference,
)
from small_learner import (
    DURATION,
    ONSET,
    RATE,
    SIZE,
    STEPS,
    UPDATES,
    WINDOW,
    assert_close,
    guard_gradients,
    lane_telemetry,
    random_gradients,
    remedied_telemetry,
    run_updates,
    to_params,
    to_vectors,
)

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.optimizer import linear_to_zero
from jaxaudit.core.taps import ROOT, Taps


@pytest.mark.exhaustive
def test_the_learning_rate_is_scaled_and_warmed_up_over_a_run():
    plain = RATE * (1.0 - np.arange(STEPS) / STEPS)
    rising = np.minimum(1.0, (np.arange(STEPS) + 1) / (0.5 * STEPS))
    for strengths, factor in (
        ({}, np.ones(STEPS)),
        ({"learning_rate_scale": 0.3}, np.full(STEPS, 0.3)),
        ({"learning_rate_warmup": 0.5}, rising),
        ({"learning_rate_scale": 0.3, "learning_rate_warmup": 0.5}, 0.3 * rising),
    ):
        telemetry = lane_telemetry(remedied_telemetry(**strengths), "control")
        assert_close(telemetry["learning_rate"], np.repeat((plain * factor)[:, None], UPDATES, axis=1), rtol=1e-5)
    assert rising[0] == pytest.approx(1 / 5)
    assert (rising[4:] == 1).all()


def test_learning_rate_scale_acts_before_perturbations():
    """A spike multiplies the scaled rate; a shift, which is added to the scaled rate, shows the order."""
    telemetry = remedied_telemetry(learning_rate_scale=0.3)
    control, spike, shifted = (
        lane_telemetry(telemetry, name)["learning_rate"] for name in ("control", "spike", "shifted")
    )
    factor, shift = np.ones((STEPS, 1)), np.zeros((STEPS, 1))
    factor[WINDOW], shift[WINDOW] = 3.0, 0.5
    assert_close(spike, control * factor, rtol=1e-5)
    assert_close(shifted, control + shift, rtol=1e-5)
    assert_close(control[0], 0.3 * RATE, rtol=1e-5)


def test_learning_rate_scale_also_scales_a_shifted_schedule():
    """Otherwise the rate would be negative where the error subtracts more than the remedy leaves."""
    optimizer = ja.Optimizer(optax.identity(), linear_to_zero(RATE))

    def step(params, key, taps):
        params, _, metrics = optimizer.update(params, optax.EmptyState(), jnp.ones(1), taps)
        return params, {"performance": -params[0], "learning_rate": metrics.learning_rate}

    learner = ja.remedied(ja.Learner(lambda key: jnp.zeros(1), step), remedies.learning_rate_scale(0.1))
    result = ja.audit(learner, [ja.lr_schedule_error(0.3, onset=ONSET, duration=DURATION)], seeds=1, steps=STEPS)
    progress = np.arange(STEPS) / STEPS
    progress[WINDOW] += 0.3
    assert_close(result.telemetry["learning_rate"].values[0, 1], 0.1 * RATE * (1 - progress), rtol=1e-4)


PLANNED_KL = (
    (0.01, 0.02, 0.05, 0.01, 0.0, 0.01),
    (0.0, 0.01, 0.02, 0.01, 0.02, 0.029),
    (0.2, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.01, 0.01, 0.01, 0.01, 0.01, 0.9),
    (0.03, 0.03, 0.03, 0.0301, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
)
"""KL by step, for two epochs of three minibatches each."""


def test_target_kl_stop_ends_the_updates_of_a_step():
    optimizer = ja.Optimizer(optax.identity(), 1.0)
    kind = remedies.target_kl_stop

    def step(carry, kls):
        params, states = carry
        taps = Taps().with_remedies(((kind, jnp.float32(0.03)),), states, None)

        def update(taps, params, kl):
            params_after = optimizer.update(params, optax.EmptyState(), -jnp.ones(1), taps, approximate_kl=kl)[0]
            return params_after, params_after[0]

        params, params_after = taps.scan(lambda taps, params, kls: taps.scan(update, params, kls), params, kls)
        return (params, taps.remedy_states), params_after.ravel()

    kls = jnp.float32(PLANNED_KL).reshape(-1, 2, 3)
    updates = jax.jit(lambda: jax.lax.scan(step, (jnp.zeros(1), {kind.name: {ROOT: kind.init(None)}}), kls)[1])()
    n_updates, expected = 0, []
    for kls in PLANNED_KL:
        stopped = False
        for kl in kls:
            stopped = stopped or kl > 0.03
            n_updates += not stopped
            expected.append(n_updates)
    np.testing.assert_array_equal(np.ravel(updates), expected)
    assert [expected[6 * step + 5] for step in range(6)] == [2, 8, 8, 13, 16, 22]


def test_a_stopped_learner_continues_in_the_next_step():
    telemetry = lane_telemetry(remedied_telemetry(target_kl_stop=0.01), "control")
    too_far = np.maximum.accumulate(telemetry["kl"] > 0.01, axis=1)
    np.testing.assert_array_equal(telemetry["update_norm"] == 0, too_far)
    assert too_far[:, -1].sum() > 2
    assert not too_far[:, 0].any(), "before a step's first update the policy equals the old one"
    plain = lane_telemetry(remedied_telemetry(), "control")
    assert (plain["update_norm"] > 0).all()


def test_six_sigma_skip_equals_a_loop_over_recent_losses_and_norms():
    """The series have spikes of loss and norm, alone and together, around the 64th update, and low, NaN and inf."""
    length = 420
    rng = np.random.default_rng(4)
    losses, norms = rng.normal(2.0, 0.1, length), rng.normal(1.0, 0.05, length)
    for index in (40, 62, 150, 151, 310):
        losses[index] = 20.0
    for index in (63, 64, 230, 400):
        norms[index] = 15.0  # without the NaN at 20, 63 values precede the 65th update
    losses[200] = norms[200] = 20.0
    losses[350], norms[351] = -30.0, 1e-3
    losses[20], losses[170], losses[171] = math.nan, math.nan, math.inf
    norms[180] = math.inf
    for index, sigmas in ((380, 5.99), (381, 6.01)):  # between the limits by ddof 0 and 1, and above both
        recent = losses[index - 128 : index]
        losses[index] = recent.mean() + sigmas * recent.std(ddof=1)
    directions = random_gradients(length, seed=5)
    gradients = directions / np.linalg.norm(directions, axis=1, keepdims=True) * norms[:, None]
    optimizer = ja.Optimizer(optax.identity(), 1.0)
    after, _, metrics = run_updates(optimizer, [remedies.six_sigma_skip()], np.zeros(SIZE), gradients, loss=losses)
    keep, margins = six_sigma_reference(losses, norms, sigmas=6.0)
    assert min(margins) > 0.01, "no decision depends on rounding"
    np.testing.assert_array_equal(np.asarray(metrics.update_norm) > 0, keep)
    assert set(np.flatnonzero(~np.array(keep))) == {64, 150, 151, 170, 171, 180, 200, 230, 310, 381, 400}
    assert_close(after["actor"][-1], -np.where(np.array(keep)[:, None], gradients, 0.0).sum(0)[:3], atol=1e-4)


ADAM_WITH_DECAY = ja.Adam(rest=(optax.add_decayed_weights(0.1),))


@pytest.mark.parametrize(
    ("guard", "transform", "others"),
    [
        (remedies.nonfinite_skip(), ADAM_WITH_DECAY, ()),
        (remedies.nonfinite_skip(), ADAM_WITH_DECAY, (remedies.weight_decay(0.2), remedies.l2_init(0.1))),
        (remedies.target_kl_stop(0.03), ADAM_WITH_DECAY, (remedies.weight_decay(0.2), remedies.stable_adamw())),
    ],
    ids=["decay in the chain", "weight_decay", "finite"],
)
def test_a_skipped_update_changes_no_parameter_moment_count_or_decay(guard, transform, others):
    """The states before and after equal those of a series without the skipped update, bit for bit."""
    gradients, kls = random_gradients(8), np.zeros(8)
    if guard.kind is remedies.nonfinite_skip:
        gradients[3, 5] = math.nan
    else:
        kls[3] = 1.0
    optimizer, unskipped = ja.Optimizer(transform, 0.1), [0, 1, 2, 4, 5, 6, 7]
    all_remedies = (*others, guard)
    params, state, metrics = run_updates(optimizer, all_remedies, np.ones(SIZE), gradients, approximate_kl=kls)
    without = run_updates(optimizer, all_remedies, np.ones(SIZE), gradients[unskipped], approximate_kl=kls[unskipped])
    for result, expected in zip(jax.tree.leaves((params, state)), jax.tree.leaves(without[:2]), strict=True):
        assert np.isfinite(result).all()
        np.testing.assert_array_equal(result[3], result[2])
        np.testing.assert_array_equal(np.asarray(result)[unskipped], expected)
    np.testing.assert_array_equal(state[0].count, [1, 2, 3, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(np.asarray(metrics.update_norm) == 0, np.arange(8) == 3)


def test_a_zero_gradient_is_not_skipped():
    """If both had the same effect, the test above would not detect a skip."""
    gradients = random_gradients(4)
    gradients[3] = 0.0
    params, state, _ = run_updates(
        ja.Optimizer(ADAM_WITH_DECAY, 0.1), [remedies.nonfinite_skip()], np.ones(SIZE), gradients
    )
    for x in (params["actor"], state[0].mu["actor"], state[0].nu["actor"], state[0].count):
        assert (np.asarray(x[3]) != np.asarray(x[2])).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_skip_detects_every_entry_that_is_not_finite(value):
    gradients = np.tile(random_gradients(1), (SIZE + 1, 1))
    gradients[np.arange(SIZE), np.arange(SIZE)] = value
    *_, metrics = run_updates(
        ja.Optimizer(optax.identity(), 0.1), [remedies.nonfinite_skip()], np.ones(SIZE), gradients
    )
    np.testing.assert_array_equal(np.asarray(metrics.update_norm) == 0, [True] * SIZE + [False])


def test_zclip_equals_the_published_loop():
    gradients = random_gradients(220, seed=6) * np.linspace(1.0, 3.0, 220)[:, None]
    for index, factor in ((10, 8.0), (60, 6.0), (61, 6.0), (120, 30.0), (180, 2.5), (200, 0.01)):
        gradients[index] *= factor
    expected, clipped = zclip_reference(gradients, threshold=2.5)
    assert_close(guard_gradients(remedies.zclip(), gradients), expected)
    assert {60, 61, 120, 180} <= set(clipped)
    assert min(clipped) >= 25
    expected, clipped_lower = zclip_reference(gradients, threshold=1.5)
    assert_close(guard_gradients(remedies.zclip(1.5), gradients), expected)
    assert len(clipped_lower) > len(clipped) + 5, "a low threshold clips ordinary gradients, too"


def test_zclip_does_not_change_gradients_of_infinite_norm():
    gradients = random_gradients(30, seed=16)
    gradients[28] *= 1e25
    gradients[29, 3] = math.inf
    np.testing.assert_array_equal(guard_gradients(remedies.zclip(), gradients)[28:], np.float32(gradients[28:]))


@pytest.mark.parametrize("kind", [remedies.zclip, remedies.adagc], ids=lambda kind: kind.name)
def test_running_norms_ignore_gradients_that_are_not_finite(kind):
    gradients = random_gradients(130, seed=7)
    gradients[[70, 110]] *= 20.0
    with_nonfinite = np.insert(gradients, [12, 105], math.nan, axis=0)
    with_nonfinite[106, 2] = math.inf
    guarded_gradients = guard_gradients(kind(), with_nonfinite)
    others = np.delete(np.arange(132), [12, 106])
    np.testing.assert_array_equal(guarded_gradients[others], guard_gradients(kind(), gradients))
    assert not np.isfinite(guarded_gradients[[12, 106]]).all(axis=1).any()


def test_adagc_equals_the_published_loop_for_each_tensor():
    gradients = random_gradients(220, seed=8)
    gradients[:, :3] *= 0.1  # clipped jointly in the warm-up, and by its own norm later
    for index, factor in ((30, 10.0), (130, 10.0), (99, 5.0), (200, 0.1)):
        gradients[index] *= factor
    gradients[160, :3] *= 40.0
    gradients[170, 3:] *= 40.0
    tensors = (slice(0, 3), slice(3, SIZE))
    for strength in (1.05, 3.0):
        expected = adagc_reference(gradients, tensors, relative=strength)
        assert_close(guard_gradients(remedies.adagc(strength), gradients), expected)
    unclipped = np.isclose(expected, gradients).all(axis=1)
    assert 10 < unclipped[100:].sum() < 120


SPAM_LENGTH = 1180


SPAM_STRENGTH = 50.0


@functools.cache
def spam_run():
    gradients = random_gradients(SPAM_LENGTH, seed=9)
    for index in (8, 150, 505, 517, 518, 519, 700, 1010, 1100):
        gradients[index] *= np.where(np.arange(SIZE) % 2, 30.0, 1.0)
    optimizer = ja.Optimizer(ja.Adam(), RATE)
    results = run_updates(optimizer, [remedies.spam(SPAM_STRENGTH)], np.zeros(SIZE), gradients)
    return results, spam_reference(gradients, SPAM_STRENGTH)


def spam_factors():
    """Returns the factor of each update."""
    (_, _, metrics), reference = spam_run()
    return np.asarray(metrics.update_norm, np.float64) / (RATE * np.linalg.norm(reference.directions, axis=1))


def test_spam_clips_entries_and_resets_moments_as_in_the_paper():
    (_, state, _), reference = spam_run()
    assert_close(to_vectors(state.mu), reference.first, atol=1e-5)
    assert_close(to_vectors(state.nu), reference.second, atol=1e-6)
    np.testing.assert_array_equal(state.count, np.arange(SPAM_LENGTH) + 1)
    assert reference.clipped[150].any()
    assert reference.clipped[700].any()
    assert not reference.clipped[[*range(19), *range(499, 519), *range(999, 1019)]].any()
    assert reference.clipped[519].any(), "clipping resumes with the 20th update after a reset"


def test_spam_warms_up_over_150_updates_after_each_reset():
    factors = spam_factors()
    assert_close(factors[:499], np.ones(499), rtol=1e-3)
    for reset in (499, 999):
        assert factors[reset] == pytest.approx(0.01, abs=1e-3)
        expected = 1.0 - 0.99 * (1 + np.cos(np.pi * np.arange(150) / 151)) / 2
        assert_close(factors[reset : reset + 150], expected, rtol=1e-3, atol=0.99 * np.pi / 151 / 2)
        assert_close(factors[reset + 150 : reset + 181], np.ones(31), rtol=1e-3)


def test_spam_warms_up_as_the_authors_code():
    """The authors use `CosineAnnealingLR(lr=0.99, T_max=151)` from its epoch 0: the rate is 0.01 at the reset."""
    expected = 1.0 - 0.99 * (1 + np.cos(np.pi * np.arange(150) / 151)) / 2
    assert_close(spam_factors()[999:1149], expected, rtol=1e-3)


def test_l2_init_decays_towards_the_initial_parameters():
    gradients, first = random_gradients(30, seed=12), np.linspace(-2.0, 2.0, SIZE)
    params, *_ = run_updates(ja.Optimizer(optax.identity(), 0.1), [remedies.l2_init(0.3)], first, gradients)
    expected, current = [], first
    for g in gradients:
        current = current - 0.1 * (g + 2 * 0.3 * (current - first))
        expected.append(current)
    assert_close(to_vectors(params), expected, atol=1e-5)


def test_l2_init_keeps_the_initial_parameters_over_steps():
    telemetry = lane_telemetry(remedied_telemetry(l2_init=0.5), "control")
    adam, params, first = AdamReference(SIZE), telemetry["begin"][0], telemetry["begin"][0]
    for step in range(STEPS):
        for update in range(UPDATES):
            gradient = telemetry["gradient"][step, update] + 2 * 0.5 * (params - first)
            assert_close(telemetry["gradient_norm"][step, update], np.linalg.norm(gradient), rtol=1e-3)
            params = params - RATE * (1 - step / STEPS) * adam.direction(gradient)
            assert_close(telemetry["params"][step, update], params, rtol=1e-3, atol=1e-4)


def test_weight_decay_equals_adamw():
    gradients, first = random_gradients(30, seed=13), np.linspace(-2.0, 2.0, SIZE)
    params, *_ = run_updates(ja.Optimizer(ja.Adam(), RATE), [remedies.weight_decay(0.4)], first, gradients)
    adamw = optax.adamw(RATE, weight_decay=0.4)

    def turn(carry, gradient):
        params, state = carry
        change, state = adamw.update(gradient, state, params)
        params = optax.apply_updates(params, change)
        return (params, state), params

    begin = (to_params(first), adamw.init(to_params(first)))
    expected = jax.jit(lambda: jax.lax.scan(turn, begin, to_params(gradients))[1])()
    assert_close(to_vectors(params), to_vectors(expected), rtol=1e-5)
    adam, current = AdamReference(SIZE), first
    for g in gradients:
        current = current - RATE * (adam.direction(g) + 0.4 * current)
    assert_close(to_vectors(params)[-1], current, atol=1e-5)
