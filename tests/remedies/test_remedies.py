"""Remedies against their published formulas, written out here in float64, and what `ja.remedied` makes of a learner."""

import functools
import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import PLAIN, Probe
from remedy_references import (
    AdamReference,
    adagc_reference,
    six_sigma_reference,
    spam_reference,
    zclip_reference,
)

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.optimizer import linear_to_zero
from jaxaudit.core.perturbation import nothing
from jaxaudit.core.remedied_learner import misfit, remedy_names
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import ROOT, Taps
from jaxaudit.learners.rl.ppo import PPO, PPOSettings
from jaxaudit.runtime import registry

SHAPES = {"actor": (3,), "critic": (2, 2)}
SIZE = 7


def tree(flat):
    """Parameters, or a series of them, from their entries: `[..., SIZE]`."""
    flat = jnp.asarray(flat, jnp.float32)
    return {"actor": flat[..., :3], "critic": flat[..., 3:].reshape(*flat.shape[:-1], 2, 2)}


def flat(params):
    """The entries of parameters, `[SIZE]`."""
    return jnp.concatenate([params["actor"].ravel(), params["critic"].ravel()])


def entries(series):
    """Those of a series of parameters, `[length, SIZE]`, in float64."""
    actor, critic = (np.asarray(series[name], np.float64) for name in SHAPES)
    return np.concatenate([actor, critic.reshape(len(critic), 4)], axis=1)


def begun(chosen, update):
    """The first states of some remedies, by name, where there is one optimizer."""
    values = {"guard": update, "penalty": update.gradient}
    return {kind.name: {ROOT: kind.init(values[kind.site])} for kind, _ in chosen if kind.keeps_state}


def driven(optimizer, chosen, params, gradients, **contexts):
    """One update after another, of gradients `[length, SIZE]` with each its context.

    Returns parameters and optimizer state after each, and what each did.
    """
    acting = tuple((one.kind, jnp.float32(one.strength)) for one in chosen)

    def turn(carry, given):
        params, state, states = carry
        gradient, context = given
        taps = Taps().with_remedies(acting, states, None)
        params, state, done = optimizer.update(params, state, gradient, taps, **context)
        return (params, state, taps.remedy_states), (params, state, done)

    params, series = tree(params), tree(gradients)
    state = optimizer.init(params)
    one = jnp.ones(())
    first = begun(acting, remedies.ProposedUpdate(params, state, one, one))
    contexts = {name: jnp.asarray(values, jnp.float32) for name, values in contexts.items()}
    return jax.jit(lambda *given: jax.lax.scan(turn, *given))((params, state, first), (series, contexts))[1]


def guarded(one, gradients):
    """What becomes of gradients `[length, SIZE]` in a remedy that guards them, one after another."""
    acting = ((one.kind, jnp.float32(one.strength)),)

    def turn(states, gradient):
        taps = Taps().with_remedies(acting, states, None)
        update = taps.remedy("guard", remedies.ProposedUpdate(gradient, (), jnp.ones(()), jnp.ones(())))
        return taps.remedy_states, update.gradient

    series = tree(gradients)
    first = begun(acting, remedies.ProposedUpdate(jax.tree.map(lambda g: g[0], series), (), 1.0, 1.0))
    return entries(jax.jit(lambda *given: jax.lax.scan(turn, *given)[1])(first, series))


def noise(length, seed=0, scale=1.0):
    """Gradients without a trend, `[length, SIZE]`."""
    return np.random.default_rng(seed).normal(0.0, scale, (length, SIZE)).astype(np.float32).astype(np.float64)


def close(found, expected, rtol=2e-4, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=rtol, atol=atol)


# A small learner, and audits of it with every remedy that it can have.

STEPS, UPDATES, ONSET, OPEN = 10, 4, 4, 3
RATE = 0.05
WINDOW = slice(ONSET, ONSET + OPEN)


@dataclass(frozen=True)
class SmallSettings:
    entropy_coefficient: float = 0.01


def fresh(key):
    return tree(jax.random.normal(key, (SIZE,)))


@functools.cache
def small(**settings):
    """Several updates of Adam a step, towards targets that are drawn anew; it tells all that it does."""
    chosen = SmallSettings(**settings)
    optimizer = ja.Optimizer(ja.Adam(), linear_to_zero(RATE))

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        old, moments = optimizer.disturb(*state, taps, fresh)
        weight = taps(
            "entropy_coefficient", jnp.float32(chosen.entropy_coefficient), entropy=lambda: jnp.sum(old["actor"])
        )
        bounds = taps("ratio_clip", jnp.float32([0.2, 0.2]))
        lam = taps("critic_lambda", jnp.float32(0.95))

        def update(taps, carry, target):
            params, moments = carry
            loss, gradient = jax.value_and_grad(lambda p: 0.5 * jnp.sum((flat(p) - target) ** 2))(params)
            kl = jnp.sum((flat(params) - flat(old)) ** 2)
            context = {"loss": loss, "approximate_kl": kl}
            params, moments, done = optimizer.update(params, moments, gradient, taps, **context)
            told = {"gradient": flat(gradient), "params": flat(params), "kl": kl, "used": done.used}
            told |= {"learning_rate": done.learning_rate, "update_norm": done.update_norm}
            return (params, moments), told | {"gradient_norm": done.gradient_norm}

        targets = 1.0 + jax.random.normal(key, (UPDATES, SIZE))
        (params, moments), told = taps.scan(update, (old, moments), targets)
        params, moments = optimizer.finish(params, moments, taps, fresh)
        settings = {"weight": weight, "bounds": bounds, "lambda": lam, "count": moments.count.astype(jnp.float32)}
        told |= {"begin": flat(old), "mu": flat(moments.mu), "nu": flat(moments.nu)} | settings
        return (params, moments), told | {"performance": -jnp.sum(flat(params) ** 2)}

    def changed(change):
        return small(**{"entropy_coefficient": chosen.entropy_coefficient, **change(chosen)})

    return ja.Learner(init, step, name="small", changed=changed)


def added(key, value, magnitude, state):
    return jax.tree.map(lambda x: x + magnitude, value), state


def poisoned(key, value, magnitude, state):
    return jax.tree.map(lambda x: x * jnp.where(magnitude > 0, jnp.nan, 1.0), value), state


SHIFTED_RATE = ja.Kind("shifted_rate", "optimization", "learning_rate", added)
PUSHED = ja.Kind("pushed", "signal", "gradient", added, target="critic")
POISONED = ja.Kind("poisoned", "signal", "gradient", poisoned)

CONDITIONS = {"control": None, "shifted": (SHIFTED_RATE, 0.5), "spike": (ja.lr_spike, 3.0)}
CONDITIONS |= {"pushed": (PUSHED, 2.0), "poisoned": (POISONED, 1.0)}


def perturbations(**magnitudes):
    return [
        kind(magnitudes.get(name, magnitude), onset=ONSET, duration=OPEN)
        for name, (kind, magnitude) in list(CONDITIONS.items())[1:]
    ]


def audited(learner, **magnitudes):
    """Telemetry by name, `[seed, condition, step, ...]`, float64."""
    telemetry = ja.audit(learner, perturbations(**magnitudes), seeds=2, steps=STEPS).telemetry
    return {
        name: np.asarray(values, np.float64) for name, values in telemetry.data_vars.items() if "step" in values.dims
    }


def kinds():
    return [registry.remedies[name] for name in registry.remedies]


@functools.cache
def fitting():
    """The kinds of remedies that act in the small learner."""
    return [kind for kind in kinds() if kind.apply is not None and misfit(kind, find_sites(small())) is None]


def helped(**strengths):
    """The small learner with every remedy that fits, each of the strength given, or of the neutral one."""
    return ja.remedied(small(), *(kind(strengths.get(kind.name, kind.neutral)) for kind in fitting()))


@functools.cache
def told(**strengths):
    return audited(helped(**strengths))


def lane(telemetry, condition, seed=0):
    return {
        name: values[seed, list(CONDITIONS).index(condition)]
        for name, values in telemetry.items()
        if name != "baseline_performance"
    }


def test_the_small_learner_has_the_remedies_of_an_optimizer():
    expected = {"learning_rate_scale", "learning_rate_warmup", "target_kl_stop", "nonfinite_skip", "six_sigma_skip"}
    expected |= {"zclip", "adagc", "spam", "adam_rel", "equal_betas", "stable_adamw", "l2_init", "weight_decay"}
    assert expected | {"clip_higher", "decoupled_lambda", "adaptive_entropy"} <= {kind.name for kind in fitting()}


# Learning rates.


def test_the_learning_rate_is_scaled_and_warmed_up_at_every_step_of_a_run():
    plain = RATE * (1.0 - np.arange(STEPS) / STEPS)
    rising = np.minimum(1.0, (np.arange(STEPS) + 1) / (0.5 * STEPS))
    for strengths, factor in (
        ({}, np.ones(STEPS)),
        ({"learning_rate_scale": 0.3}, np.full(STEPS, 0.3)),
        ({"learning_rate_warmup": 0.5}, rising),
        ({"learning_rate_scale": 0.3, "learning_rate_warmup": 0.5}, 0.3 * rising),
    ):
        found = lane(told(**strengths), "control")
        close(found["learning_rate"], np.repeat((plain * factor)[:, None], UPDATES, axis=1), rtol=1e-5)
    assert rising[0] == pytest.approx(1 / 5)
    assert (rising[4:] == 1).all()


def test_the_learning_rate_is_scaled_before_it_is_disturbed():
    """A spike multiplies what the remedy left; so does a shift add to it, which tells the order."""
    found = told(learning_rate_scale=0.3)
    control, spike, shifted = (lane(found, name)["learning_rate"] for name in ("control", "spike", "shifted"))
    factor, shift = np.ones((STEPS, 1)), np.zeros((STEPS, 1))
    factor[WINDOW], shift[WINDOW] = 3.0, 0.5
    close(spike, control * factor, rtol=1e-5)
    close(shifted, control + shift, rtol=1e-5)
    close(control[0], 0.3 * RATE, rtol=1e-5)


def test_a_schedule_that_is_read_at_a_wrong_time_is_scaled_too():
    """Or the rate would be negative wherever the error takes off more than the remedy leaves."""
    optimizer = ja.Optimizer(optax.identity(), linear_to_zero(RATE))

    def step(params, key, taps):
        params, _, done = optimizer.update(params, optax.EmptyState(), jnp.ones(1), taps)
        return params, {"performance": -params[0], "learning_rate": done.learning_rate}

    learner = ja.remedied(ja.Learner(lambda key: jnp.zeros(1), step), remedies.learning_rate_scale(0.1))
    result = ja.audit(learner, [ja.lr_schedule_error(0.3, onset=ONSET, duration=OPEN)], seeds=1, steps=STEPS)
    progress = np.arange(STEPS) / STEPS
    progress[WINDOW] += 0.3
    close(result.telemetry["learning_rate"].values[0, 1], 0.1 * RATE * (1 - progress), rtol=1e-4)


# Updates that are left out.

PLANNED_KL = (
    (0.01, 0.02, 0.05, 0.01, 0.0, 0.01),
    (0.0, 0.01, 0.02, 0.01, 0.02, 0.029),
    (0.2, 0.0, 0.0, 0.0, 0.0, 0.0),
    (0.01, 0.01, 0.01, 0.01, 0.01, 0.9),
    (0.03, 0.03, 0.03, 0.0301, 0.0, 0.0),
    (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
)
"""By step, of two epochs with three minibatches each."""


def test_a_step_has_no_more_updates_once_a_minibatch_is_too_far_from_the_old_policy():
    optimizer = ja.Optimizer(optax.identity(), 1.0)
    kind = remedies.target_kl_stop

    def step(carry, kls):
        params, states = carry
        taps = Taps().with_remedies(((kind, jnp.float32(0.03)),), states, None)

        def update(taps, params, kl):
            after = optimizer.update(params, optax.EmptyState(), -jnp.ones(1), taps, approximate_kl=kl)[0]
            return after, after[0]

        params, after = taps.scan(lambda taps, params, kls: taps.scan(update, params, kls), params, kls)
        return (params, taps.remedy_states), after.ravel()

    kls = jnp.float32(PLANNED_KL).reshape(-1, 2, 3)
    found = jax.jit(lambda: jax.lax.scan(step, (jnp.zeros(1), {kind.name: {ROOT: kind.init(None)}}), kls)[1])()
    made, expected = 0, []
    for kls in PLANNED_KL:
        stopped = False
        for kl in kls:
            stopped = stopped or kl > 0.03
            made += not stopped
            expected.append(made)
    np.testing.assert_array_equal(np.ravel(found), expected)
    assert [expected[6 * step + 5] for step in range(6)] == [2, 8, 8, 13, 16, 22]


def test_a_learner_that_is_stopped_goes_on_in_the_next_step():
    found = lane(told(target_kl_stop=0.01), "control")
    too_far = np.maximum.accumulate(found["kl"] > 0.01, axis=1)
    np.testing.assert_array_equal(found["update_norm"] == 0, too_far)
    assert too_far[:, -1].sum() > 2
    assert not too_far[:, 0].any(), "the policy is the old one before a step's first update"
    plain = lane(told(), "control")
    assert (plain["update_norm"] > 0).all()


def test_the_six_sigma_skip_is_that_of_a_list_of_the_latest_losses_and_norms():
    """Planted: spikes of each alone and of both, before and from the 64th update, low values, and not-finite ones."""
    length = 420
    rng = np.random.default_rng(4)
    losses, norms = rng.normal(2.0, 0.1, length), rng.normal(1.0, 0.05, length)
    for index in (40, 62, 150, 151, 310):
        losses[index] = 20.0
    for index in (63, 64, 230, 400):
        norms[index] = 15.0  # the NaN at 20 is not remembered: the 65th update has 63 before it
    losses[200] = norms[200] = 20.0
    losses[350], norms[351] = -30.0, 1e-3
    losses[20], losses[170], losses[171] = math.nan, math.nan, math.inf
    norms[180] = math.inf
    for index, sigmas in ((380, 5.99), (381, 6.01)):  # between the deviations with ddof 0 and 1, and above
        recent = losses[index - 128 : index]
        losses[index] = recent.mean() + sigmas * recent.std(ddof=1)
    directions = noise(length, seed=5)
    gradients = directions / np.linalg.norm(directions, axis=1, keepdims=True) * norms[:, None]
    optimizer = ja.Optimizer(optax.identity(), 1.0)
    after, _, done = driven(optimizer, [remedies.six_sigma_skip()], np.zeros(SIZE), gradients, loss=losses)
    keep, margins = six_sigma_reference(losses, norms, sigmas=6.0)
    assert min(margins) > 0.01, "no decision hangs on rounding"
    np.testing.assert_array_equal(np.asarray(done.update_norm) > 0, keep)
    assert set(np.flatnonzero(~np.array(keep))) == {64, 150, 151, 170, 171, 180, 200, 230, 310, 381, 400}
    close(after["actor"][-1], -np.where(np.array(keep)[:, None], gradients, 0.0).sum(0)[:3], atol=1e-4)


DECAYING = ja.Adam(rest=(optax.add_decayed_weights(0.1),))


@pytest.mark.parametrize(
    ("guard", "transform", "others"),
    [
        (remedies.nonfinite_skip(), DECAYING, ()),
        (remedies.nonfinite_skip(), DECAYING, (remedies.weight_decay(0.2), remedies.l2_init(0.1))),
        (remedies.target_kl_stop(0.03), DECAYING, (remedies.weight_decay(0.2), remedies.stable_adamw())),
    ],
    ids=["decay in the chain", "weight_decay", "finite"],
)
def test_a_skip_freezes_parameters_moments_count_and_decay(guard, transform, others):
    """As if there had been no such update, bit for bit, before and after."""
    gradients, kls = noise(8), np.zeros(8)
    if guard.kind is remedies.nonfinite_skip:
        gradients[3, 5] = math.nan
    else:
        kls[3] = 1.0
    optimizer, same = ja.Optimizer(transform, 0.1), [0, 1, 2, 4, 5, 6, 7]
    chosen = (*others, guard)
    params, state, done = driven(optimizer, chosen, np.ones(SIZE), gradients, approximate_kl=kls)
    without = driven(optimizer, chosen, np.ones(SIZE), gradients[same], approximate_kl=kls[same])
    for found, expected in zip(jax.tree.leaves((params, state)), jax.tree.leaves(without[:2]), strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found[3], found[2])
        np.testing.assert_array_equal(np.asarray(found)[same], expected)
    np.testing.assert_array_equal(state[0].count, [1, 2, 3, 3, 4, 5, 6, 7])
    np.testing.assert_array_equal(np.asarray(done.update_norm) == 0, np.arange(8) == 3)


def test_a_gradient_of_zero_is_no_skip():
    """What the test before would miss, if it could not tell one from the other."""
    gradients = noise(4)
    gradients[3] = 0.0
    params, state, _ = driven(ja.Optimizer(DECAYING, 0.1), [remedies.nonfinite_skip()], np.ones(SIZE), gradients)
    for x in (params["actor"], state[0].mu["actor"], state[0].nu["actor"], state[0].count):
        assert (np.asarray(x[3]) != np.asarray(x[2])).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_is_left_out_for_any_entry_that_is_not_finite(bad):
    gradients = np.tile(noise(1), (SIZE + 1, 1))
    gradients[np.arange(SIZE), np.arange(SIZE)] = bad
    *_, done = driven(ja.Optimizer(optax.identity(), 0.1), [remedies.nonfinite_skip()], np.ones(SIZE), gradients)
    np.testing.assert_array_equal(np.asarray(done.update_norm) == 0, [True] * SIZE + [False])


# Gradients that are clipped by what came before.


def test_zclip_is_the_published_loop():
    gradients = noise(220, seed=6) * np.linspace(1.0, 3.0, 220)[:, None]
    for index, factor in ((10, 8.0), (60, 6.0), (61, 6.0), (120, 30.0), (180, 2.5), (200, 0.01)):
        gradients[index] *= factor
    expected, clipped = zclip_reference(gradients, threshold=2.5)
    close(guarded(remedies.zclip(), gradients), expected)
    assert {60, 61, 120, 180} <= set(clipped)
    assert min(clipped) >= 25
    expected, more = zclip_reference(gradients, threshold=1.5)
    close(guarded(remedies.zclip(1.5), gradients), expected)
    assert len(more) > len(clipped) + 5, "ordinary gradients are clipped a little, too"


def test_zclip_leaves_a_gradient_as_it_is_whose_norm_is_not_finite():
    gradients = noise(30, seed=16)
    gradients[28] *= 1e25
    gradients[29, 3] = math.inf
    np.testing.assert_array_equal(guarded(remedies.zclip(), gradients)[28:], np.float32(gradients[28:]))


@pytest.mark.parametrize("kind", [remedies.zclip, remedies.adagc], ids=lambda kind: kind.name)
def test_a_gradient_that_is_not_finite_leaves_no_trace_in_running_norms(kind):
    gradients = noise(130, seed=7)
    gradients[[70, 110]] *= 20.0
    bad = np.insert(gradients, [12, 105], math.nan, axis=0)
    bad[106, 2] = math.inf
    found = guarded(kind(), bad)
    others = np.delete(np.arange(132), [12, 106])
    np.testing.assert_array_equal(found[others], guarded(kind(), gradients))
    assert not np.isfinite(found[[12, 106]]).all(axis=1).any()


def test_adagc_is_the_published_loop_for_each_tensor():
    gradients = noise(220, seed=8)
    gradients[:, :3] *= 0.1  # in the warm-up, clipped with the other tensor, and otherwise by its own norm
    for index, factor in ((30, 10.0), (130, 10.0), (99, 5.0), (200, 0.1)):
        gradients[index] *= factor
    gradients[160, :3] *= 40.0
    gradients[170, 3:] *= 40.0
    tensors = (slice(0, 3), slice(3, SIZE))
    for strength in (1.05, 3.0):
        expected = adagc_reference(gradients, tensors, relative=strength)
        close(guarded(remedies.adagc(strength), gradients), expected)
    kept = np.isclose(expected, gradients).all(axis=1)
    assert 10 < kept[100:].sum() < 120


SPAM_LENGTH = 1180
SPAM_STRENGTH = 50.0


@functools.cache
def spam_run():
    gradients = noise(SPAM_LENGTH, seed=9)
    for index in (8, 150, 505, 517, 518, 519, 700, 1010, 1100):
        gradients[index] *= np.where(np.arange(SIZE) % 2, 30.0, 1.0)
    optimizer = ja.Optimizer(ja.Adam(), RATE)
    found = driven(optimizer, [remedies.spam(SPAM_STRENGTH)], np.zeros(SIZE), gradients)
    return found, spam_reference(gradients, SPAM_STRENGTH)


def spam_factors():
    """What the updates were multiplied with."""
    (_, _, done), reference = spam_run()
    return np.asarray(done.update_norm, np.float64) / (RATE * np.linalg.norm(reference.directions, axis=1))


def test_spam_clips_entries_and_resets_moments_as_published():
    (_, state, _), reference = spam_run()
    close(entries(state.mu), reference.first, atol=1e-5)
    close(entries(state.nu), reference.second, atol=1e-6)
    np.testing.assert_array_equal(state.count, np.arange(SPAM_LENGTH) + 1)
    assert reference.clipped[150].any()
    assert reference.clipped[700].any()
    assert not reference.clipped[[*range(19), *range(499, 519), *range(999, 1019)]].any()
    assert reference.clipped[519].any(), "the 20th update after a reset is clipped again"


def test_spams_rate_rises_over_150_updates_after_each_reset():
    factors = spam_factors()
    close(factors[:499], np.ones(499), rtol=1e-3)
    for reset in (499, 999):
        assert factors[reset] == pytest.approx(0.01, abs=1e-3)
        expected = 1.0 - 0.99 * (1 + np.cos(np.pi * np.arange(150) / 151)) / 2
        close(factors[reset : reset + 150], expected, rtol=1e-3, atol=0.99 * np.pi / 151 / 2)
        close(factors[reset + 150 : reset + 181], np.ones(31), rtol=1e-3)


def test_spams_rate_rises_as_in_its_authors_code():
    """From 0.01 at the update with the reset: `CosineAnnealingLR(lr=0.99, T_max=151)` from its epoch 0."""
    expected = 1.0 - 0.99 * (1 + np.cos(np.pi * np.arange(150) / 151)) / 2
    close(spam_factors()[999:1149], expected, rtol=1e-3)


# Adam.


def test_adams_count_begins_anew_in_each_step_and_its_moments_do_not():
    for strength in (0.0, 1.0):
        found = lane(told(adam_rel=strength), "control")
        adam, params = AdamReference(SIZE), found["begin"][0]
        for step in range(STEPS):
            adam.count *= strength == 0
            for update in range(UPDATES):
                params = params - RATE * (1 - step / STEPS) * adam.direction(found["gradient"][step, update])
                close(found["params"][step, update], params, rtol=1e-3, atol=1e-5)
            close(found["mu"][step], adam.first, atol=1e-5)
            close(found["nu"][step], adam.second, atol=1e-5)
            assert found["count"][step] == adam.count == (UPDATES if strength else UPDATES * (step + 1))


def test_equal_betas_are_those_of_both_moments():
    gradients = noise(40, seed=10)
    for beta in (0.5, 0.97):
        params, state, _ = driven(ja.Optimizer(ja.Adam(), RATE), [remedies.equal_betas(beta)], np.ones(SIZE), gradients)
        transform = optax.scale_by_adam(beta, beta)
        plain, plain_state, _ = driven(ja.Optimizer(transform, RATE), [], np.ones(SIZE), gradients)
        close(entries(params), entries(plain), rtol=1e-5)
        close(entries(state.nu), entries(plain_state.nu), rtol=1e-5)
        adam = AdamReference(SIZE, beta, beta)
        expected = 1.0 - RATE * np.cumsum([adam.direction(g) for g in gradients], axis=0)
        close(entries(params), expected, atol=1e-5)


def stable_reference(gradients, most, adam):
    """Steps of StableAdamW (Wortsman et al., 2023, Algorithm 2), and the RMS of each tensor."""
    found, roots = [], []
    for g in gradients:
        direction, second = adam.direction(g), adam.second / (1 - adam.betas[1] ** adam.count)
        tensors = (slice(0, 3), slice(3, SIZE))
        roots.append([math.sqrt(np.mean(g[t] ** 2 / np.maximum(second[t], 1e-16))) for t in tensors])
        found.append(
            np.concatenate([direction[t] / max(1.0, r / most) for t, r in zip(tensors, roots[-1], strict=True)])
        )
    return np.array(found), np.array(roots)


def test_stable_adamw_divides_each_tensors_step_by_how_far_its_gradient_is_above_the_second_moment():
    gradients = noise(60, seed=11)
    gradients[:, 6] = 0.0
    gradients[20] *= 8.0
    gradients[40, :3] *= 8.0
    gradients[50] *= 0.05
    for most in (1.0, 2.0):
        chosen = [remedies.stable_adamw(most)]
        params, _, done = driven(ja.Optimizer(ja.Adam(), RATE), chosen, np.zeros(SIZE), gradients)
        expected, roots = stable_reference(gradients, most, AdamReference(SIZE))
        close(entries(params), -RATE * np.cumsum(expected, axis=0), atol=1e-5)
        close(done.update_norm, RATE * np.linalg.norm(expected, axis=1))
        assert (roots[[20, 40], 0] > 2).all()
        assert (roots < most).any()
    both = [remedies.stable_adamw(), remedies.equal_betas(0.9)]
    params, *_ = driven(ja.Optimizer(ja.Adam(), RATE), both, np.zeros(SIZE), gradients)
    expected, _ = stable_reference(gradients, 1.0, AdamReference(SIZE, 0.9, 0.9))
    close(entries(params), -RATE * np.cumsum(expected, axis=0), atol=1e-5)


# What holds parameters back.


def test_l2_init_pulls_towards_the_parameters_of_the_first_update():
    gradients, first = noise(30, seed=12), np.linspace(-2.0, 2.0, SIZE)
    params, *_ = driven(ja.Optimizer(optax.identity(), 0.1), [remedies.l2_init(0.3)], first, gradients)
    expected, now = [], first
    for g in gradients:
        now = now - 0.1 * (g + 2 * 0.3 * (now - first))
        expected.append(now)
    close(entries(params), expected, atol=1e-5)


def test_l2_init_remembers_the_first_parameters_in_all_steps():
    found = lane(told(l2_init=0.5), "control")
    adam, params, first = AdamReference(SIZE), found["begin"][0], found["begin"][0]
    for step in range(STEPS):
        for update in range(UPDATES):
            gradient = found["gradient"][step, update] + 2 * 0.5 * (params - first)
            close(found["gradient_norm"][step, update], np.linalg.norm(gradient), rtol=1e-3)
            params = params - RATE * (1 - step / STEPS) * adam.direction(gradient)
            close(found["params"][step, update], params, rtol=1e-3, atol=1e-4)


def test_weight_decay_is_that_of_adamw():
    gradients, first = noise(30, seed=13), np.linspace(-2.0, 2.0, SIZE)
    params, *_ = driven(ja.Optimizer(ja.Adam(), RATE), [remedies.weight_decay(0.4)], first, gradients)
    theirs = optax.adamw(RATE, weight_decay=0.4)

    def turn(carry, gradient):
        params, state = carry
        change, state = theirs.update(gradient, state, params)
        params = optax.apply_updates(params, change)
        return (params, state), params

    begin = (tree(first), theirs.init(tree(first)))
    expected = jax.jit(lambda: jax.lax.scan(turn, begin, tree(gradients))[1])()
    close(entries(params), entries(expected), rtol=1e-5)
    adam, now = AdamReference(SIZE), first
    for g in gradients:
        now = now - RATE * (adam.direction(g) + 0.4 * now)
    close(entries(params)[-1], now, atol=1e-5)


# PPO's objective.

SMALL_PPO = PLAIN | {"hidden": (8,), "minibatch_size": 128, "epochs": 1, "max_grad_norm": 100.0}


@functools.cache
def probed():
    """PPO where the reward is known: every observation is the same, and an episode ends at its time limit alone."""
    agent = PPO(Probe(lambda a: -((a - 0.5) ** 2), False), 16, PPOSettings(**SMALL_PPO))
    return agent, jax.jit(agent.init)(jax.random.key(0))


def helping(*chosen):
    """Taps with remedies of the objective, which keep no state."""
    return Taps(0, 10).with_remedies(tuple((kind, strength) for kind, strength in chosen), {}, None)


@functools.cache
def collected():
    agent, state = probed()
    given = remedies.decoupled_lambda
    plain = jax.jit(lambda: agent.collect(state, jax.random.key(1), Taps(0, 10))[1])()
    collect = jax.jit(lambda lam: agent.collect(state, jax.random.key(1), helping((given, lam)))[1])
    return plain, {lam: collect(jnp.float32(lam)) for lam in (0.0, 0.5, 1.0)}


def advantages(rewards, ages, value, gamma, lam):
    """Of generalised advantage estimation, by its recursion; episodes of an age are cut off after 16 steps."""
    found, following = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = np.where((t + 1 + ages) % 16 == 0, 0.0, following)
        following = found[t] = rewards[t] + gamma * value - value + gamma * lam * following
    return found


def test_the_critics_targets_have_a_lambda_of_their_own():
    agent, state = probed()
    plain, helped = collected()
    ages = np.asarray(state.episodes.head_start)
    gamma, own = agent.settings.gamma, agent.settings.gae_lambda
    taken = np.clip(np.asarray(plain.action, np.float64)[..., 0], -2.0, 2.0)
    rewards, value = -((taken - 0.5) ** 2), float(plain.value[0, 0])
    close(plain.value, np.full(rewards.shape, value))
    for lam, samples in helped.items():
        np.testing.assert_array_equal(samples.advantage, plain.advantage)
        close(samples.advantage, advantages(rewards, ages, value, gamma, own), atol=1e-4)
        close(samples.target, advantages(rewards, ages, value, gamma, lam or own) + value, atol=1e-4)
    np.testing.assert_array_equal(helped[0.0].target, plain.target)


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.2, 0.28), (0.2, 0.05)], ids=str)
def test_the_ratio_gains_up_to_one_plus_the_strength_and_falls_to_one_minus_clip(bounds):
    _, state = probed()
    data = jax.tree.map(np.asarray, collected()[0])
    shift = np.random.default_rng(14).normal(0.0, 0.3, data.log_probability.shape).astype(np.float32)
    samples = data._replace(log_probability=data.log_probability - shift)
    ratio, advantage = np.exp(shift.astype(np.float64)), data.advantage.astype(np.float64)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    low, high = bounds
    clipped = np.clip(ratio, 1 - low, 1 + high)
    expected = -np.minimum(ratio * advantage, clipped * advantage).mean()
    strength = jnp.float32(0.0 if high == low else high)  # the neutral one is 0
    found = improve()(state, samples, strength)
    assert float(found["policy_loss"]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert float(found["clip_fraction"]) == pytest.approx(((ratio < 1 - low) | (ratio > 1 + high)).mean(), abs=1e-6)
    kl = (ratio - 1 - shift).mean()
    assert float(found["approximate_kl"]) == pytest.approx(kl, rel=1e-4)


@functools.cache
def improve():
    agent, _ = probed()

    def improved(state, samples, strength):
        taps = helping((remedies.clip_higher, strength))
        return agent.improve(state.params, state.optimizer, samples, jax.random.key(2), taps)[2]

    return jax.jit(improved)


def test_only_the_critics_layers_are_normalised():
    learner = ja.learners.ppo("CartPole-v1", hidden=(8, 8), num_envs=2, rollout_length=8, minibatch_size=8)
    for helped in (ja.remedied(learner, remedies.critic_layer_norm()), with_all_of_ppo(learner)):
        state = helped.state_shapes
        params = getattr(state, "learner", state).params
        norms = {whose: [name for name in layers if "LayerNorm" in name] for whose, layers in params.items()}
        assert norms == {"actor": [], "critic": ["LayerNorm_0", "LayerNorm_1"]}
    assert not any("LayerNorm" in name for layers in learner.state_shapes.params.values() for name in layers)


def with_all_of_ppo(learner):
    """Acting remedies first: what changes settings is to keep them."""
    acting = ja.remedied(learner, remedies.clip_higher(0.3), remedies.decoupled_lambda(0.9))
    helped = ja.remedied(acting, remedies.critic_layer_norm())
    assert helped.data.strengths == {"clip_higher": np.float32(0.3), "decoupled_lambda": np.float32(0.9)}
    return helped


# Neutral strengths.

BAD = [1.5, -0.0, math.nan, math.inf, -math.inf, 1e-42, -3e38]


def bad_values():
    """Values that arithmetic changes, for each place where remedies act."""
    params = tree(BAD)
    state = optax.ScaleByAdamState(jnp.int32(7), tree(BAD[::-1]), tree(np.roll(BAD, 2)))
    return {
        "penalty": params,
        "guard": remedies.ProposedUpdate(params, state, jnp.float32(1.0), jnp.float32(math.nan)),
        "betas": (jnp.float32(0.9), jnp.float32(math.nan)),
        "direction": params,
        "trained": remedies.Trained(params, state),
        "learning_rate": jnp.float32(-0.0),
        "optimizer_state": state,
        "ratio_clip": jnp.float32([0.2, math.inf]),
        "critic_lambda": jnp.float32(math.nan),
        "entropy_coefficient": jnp.float32(-math.inf),
    }


def bits(value):
    return [(x.dtype, x.shape, x.tobytes()) for x in map(np.asarray, jax.tree.leaves(value))]


@pytest.mark.parametrize("kind", [kind for kind in kinds() if kind.apply], ids=lambda kind: kind.name)
def test_a_value_is_the_same_bit_for_bit_at_the_neutral_strength(kind):
    """Whatever the remedy's state has become, and with a run's beginning, middle and end."""
    values = bad_values()
    others = {"params": tree(np.roll(BAD, 1)), "gradient": values["penalty"], "moments": values["optimizer_state"]}
    others |= {"betas": values["betas"], "loss": jnp.float32(math.nan), "approximate_kl": jnp.float32(math.inf)}
    others |= {"entropy": lambda: jnp.float32(math.nan), "gradient_of": lambda term, key: values["penalty"]}
    others |= {"reinitialise": fresh, "new_moments": lambda params: values["optimizer_state"]}
    value = values[kind.site]
    states = {kind.name: {ROOT: kind.init(value)}} if kind.keeps_state else {}

    def through(value, strength, step, states):
        taps = Taps(step, 3, key=jax.random.key(0)).with_remedies(((kind, strength),), states, None)
        return taps.remedy(kind.site, value, **others), taps.remedy_states

    compiled = jax.jit(through)
    for step in range(3):
        found, states = compiled(value, jnp.float32(kind.neutral), step, states)
        assert bits(found) == bits(value)
    other = compiled(value, jnp.float32(kind.strength), 0, states)[0]
    assert bits(jax.jit(lambda: value)()) == bits(value)
    assert jax.tree.structure(other) == jax.tree.structure(value)


OF_OPTIMIZERS = [kind for kind in kinds() if kind.site in set(remedies.HOOKS) - {"trained"}]


@pytest.mark.parametrize("kind", OF_OPTIMIZERS, ids=lambda kind: kind.name)
def test_a_neutral_remedy_leaves_updates_as_they_are(kind):
    optimizer, series = ja.Optimizer(ja.Adam(), RATE, max_norm=2.0), noise(30, seed=15)
    context = {"loss": np.linspace(3.0, 1.0, 30), "approximate_kl": np.linspace(0.0, 1.0, 30)}
    plain = driven(optimizer, [], np.ones(SIZE), series, **context)
    found = driven(optimizer, [kind(kind.neutral)], np.ones(SIZE), series, **context)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * float(jnp.max(jnp.abs(other))))


def same_as_plain(found, within):
    plain = audited(small())
    acted = set(found) - set(plain)
    assert set(plain) < set(found)
    assert not [name for name in acted if not name.startswith("acted_") or (found[name] != 0).any()]
    for name, values in plain.items():
        scale = np.max(np.abs(values), where=np.isfinite(values), initial=0.0)
        np.testing.assert_allclose(found[name], values, rtol=within, atol=within * scale, err_msg=name)


def test_a_learner_with_neutral_remedies_trains_as_without():
    """Undisturbed, and where rate and gradient are disturbed, made NaN among others."""
    same_as_plain(told(), within=1e-4)  # 1 - beta2 is rounded otherwise where betas are data
    poison = lane(told(), "poisoned")
    assert np.isnan(poison["params"][ONSET:]).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [kind.name for kind in kinds() if kind.apply])
def test_a_learner_with_one_neutral_remedy_trains_as_without(name):
    kind = registry.remedies[name]
    if reason := misfit(kind, find_sites(small())):
        pytest.skip(reason)
    same_as_plain(audited(ja.remedied(small(), kind(kind.neutral))), within=1e-6)


def test_a_periodic_reset_replaces_parameters_and_moments_after_equal_parts_of_the_run():
    found = lane(told(periodic_reset=4.0), "control")
    resets = np.array([1, 3, 5, 7])  # of ten steps
    np.testing.assert_array_equal(found["acted_periodic_reset"], np.isin(np.arange(STEPS), resets))
    np.testing.assert_array_equal(found["count"][resets], 0)
    assert (found["mu"][resets] == 0).all()
    last = found["params"][:-1, -1]  # those that the step's last update left
    moved = np.abs(found["begin"][1:] - last).max(axis=1)
    np.testing.assert_array_equal(moved > 0, np.isin(np.arange(STEPS - 1), resets))
    anew = found["begin"][resets + 1]
    assert len(np.unique(anew)) == anew.size, "each reset draws other parameters"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "learner",
    [
        lambda: ja.learners.ppo("CartPole-v1"),
        lambda: ja.learners.trpo("CartPole-v1"),
        lambda: ja.learners.language_model(),
        lambda: ja.learners.ppo_lm("hop"),
    ],
    ids=["ppo", "trpo", "language_model", "ppo_lm"],
)
def test_learners_can_be_reset(learner):
    made = learner()
    labels = set(find_sites(made).helped["trained"])
    assert labels == ({"policy", "critic"} if made.name == "ppo_lm" else {""})
    assert misfit(remedies.periodic_reset, find_sites(made)) is None


def test_what_a_learner_taps_but_does_not_use_is_given_its_strength():
    found = lane(told(clip_higher=0.5, decoupled_lambda=0.7), "control")
    close(found["bounds"], np.tile([0.2, 0.5], (STEPS, 1)))
    close(found["lambda"], np.full(STEPS, 0.7))


def test_the_entropy_bonus_follows_its_target():
    """By 0.005 a step, up while the entropy is below the target, and nothing while it is above."""
    entropy = lane(told(), "control")["begin"][:, :3].sum(1)
    target = float(np.median(entropy))
    found, coefficient, expected = lane(told(adaptive_entropy=target), "control"), 0.0, []
    np.testing.assert_array_equal(found["begin"][:, :3].sum(1), entropy)
    for latest in entropy:
        coefficient = min(1.0, max(0.0, coefficient + (0.005 if latest < target else -0.005)))
        expected.append(coefficient if latest <= target else 0.0)
    close(found["weight"], expected)
    assert 0 < np.count_nonzero(expected) < STEPS


# Order, and what is told.


def test_a_guard_sees_the_disturbed_gradient():
    """Bad gradients are disturbances here, and the guard leaves their updates out."""
    found = lane(told(nonfinite_skip=1.0, l2_init=0.1, weight_decay=0.1), "poisoned")
    skipped = np.zeros((STEPS, UPDATES), bool)
    skipped[WINDOW] = True
    np.testing.assert_array_equal(found["update_norm"] == 0, skipped)
    before = found["params"][ONSET - 1, -1]
    np.testing.assert_array_equal(found["params"][WINDOW], np.broadcast_to(before, (OPEN, UPDATES, SIZE)))
    for name in ("mu", "nu", "count"):
        np.testing.assert_array_equal(
            found[name][WINDOW], np.broadcast_to(found[name][ONSET - 1], found[name][WINDOW].shape)
        )
    for name in ("params", "mu", "nu", "performance"):
        assert np.isfinite(found[name]).all()


def test_a_penalty_is_added_before_a_gradient_is_disturbed_and_x_used_is_of_the_disturbance_alone():
    """The remedies change the gradient, too: L2 Init before, and AdaGC after the disturbance."""
    found = told(l2_init=0.5, adagc=1.05)
    assert (lane(found, "control")["used"] == 1).all()
    pushed = lane(found, "pushed")
    push = np.concatenate([np.zeros(3), np.full(4, 2.0)])
    first = pushed["begin"][0]
    for step in range(STEPS):
        for update in range(UPDATES):
            now = pushed["params"][step, update - 1] if update else pushed["begin"][step]
            with_penalty = pushed["gradient"][step, update] + 2 * 0.5 * (now - first)
            disturbed = with_penalty + push
            cosine = with_penalty @ disturbed / np.linalg.norm(with_penalty) / np.linalg.norm(disturbed)
            opened = ONSET <= step < ONSET + OPEN
            assert pushed["used"][step, update] == pytest.approx(cosine if opened else 1.0, abs=1e-4)
            norm = np.linalg.norm(disturbed if opened else with_penalty)
            assert pushed["gradient_norm"][step, update] == pytest.approx(min(1.0, norm), rel=1e-3), "clipped to 1"


def doubled(value, strength, state):
    return jax.tree.map(lambda x: strength * x, value), state


def raised(value, strength, state):
    return jax.tree.map(lambda x: x + strength, value), state


def counted(value, strength, state):
    """Adds how often it was there."""
    return value + strength * state, state + 1.0


DOUBLED = remedies.RemedyKind("doubled", 2.0, "reward", doubled, neutral=1.0)
RAISED = remedies.RemedyKind("raised", 1.0, "reward", raised, neutral=0.0)
COUNTED = remedies.RemedyKind("counted", 1.0, "reward", counted, neutral=0.0, init=lambda value: jnp.zeros(()))
STEERED = remedies.RemedyKind("steered", 1.0, "gradient", raised, neutral=0.0)


def test_x_used_is_of_the_disturbance_alone_where_a_remedy_acts_at_the_gradient_itself():
    found = lane(audited(ja.remedied(small(), STEERED(5.0))), "pushed")
    helped = found["gradient"] + 5.0
    disturbed = helped + np.concatenate([np.zeros(3), np.full(4, 2.0)])
    norms = np.linalg.norm(helped, axis=-1) * np.linalg.norm(disturbed, axis=-1)
    cosine = (helped * disturbed).sum(-1) / norms
    close(found["used"][WINDOW], cosine[WINDOW], rtol=1e-4)
    assert (found["used"][:ONSET] == 1).all()


# Learners of learners.


@functools.cache
def tapping():
    """A learner that taps a reward of 1 alone, in all the ways there are, and sums what it gets."""

    def step(state, key, taps):
        outside = taps("reward", jnp.ones(()))
        scanned = taps.scan(lambda taps, c, _: (c, taps("reward", jnp.ones(()))), 0.0, length=3)[1]
        repeated = taps.repeat(
            lambda taps, c, number: c.at[number].set(taps("reward", jnp.ones(()))), jnp.zeros(2), jnp.int32(2)
        )
        even = taps.step % 2 == 0
        _, branch = taps.cond(even, lambda taps, c: (c, taps("reward", jnp.ones(()))), 0.0)
        seen = jnp.concatenate([outside[None], scanned, repeated, branch[None]])
        return state + 1, {"performance": jnp.sum(seen), "seen": seen}

    return ja.Learner(lambda key: jnp.zeros(()), step, name="tapping")


def seen(learner, steps=4):
    return np.asarray(ja.audit(learner, [], seeds=1, steps=steps).telemetry["seen"].values[0, 0])


def test_states_of_remedies_go_through_scan_repeat_and_cond_and_from_step_to_step():
    count, expected = 0, []
    for step in range(4):
        row = []
        for tap in range(7):
            taken = tap < 6 or step % 2 == 0
            row.append(1.0 + count if taken else 0.0)
            count += taken
        expected.append(row)
    np.testing.assert_array_equal(seen(ja.remedied(tapping(), COUNTED())), expected)


@pytest.mark.parametrize("kept", [False, True], ids=["stateless", "stateful"])
def test_what_a_remedy_remembers_of_a_loop_does_not_depend_on_what_else_is_in_the_grid(kept):
    """A loop that may leave off runs all its turns where a perturbation keeps state, at whatever site."""

    def step(state, key, taps):
        level = taps("difficulty", jnp.zeros(()))

        def turn(taps, carry, number):
            over = carry[0] >= 3  # the turns left change nothing, as `until` says
            reward = jnp.where(over, 0.0, taps("reward", jnp.ones(())))
            return jnp.where(over, carry[0], number + 1), carry[1] + reward

        _, total = taps.repeat(turn, (jnp.int32(0), 0.0 * level), 7, until=lambda carry: carry[0] >= 3)
        return state, {"performance": total}

    kind = ja.Kind("added", "signal", "difficulty", added, init=(lambda value: ()) if kept else nothing)
    result = ja.audit(ja.remedied(learner_of(step), COUNTED()), [kind(onset=2, duration=1)], seeds=1, steps=4)
    baseline, control = (result.telemetry[name].values for name in ("baseline_performance", "performance"))
    np.testing.assert_array_equal(control[0, 0], baseline[0])


def test_remedies_at_one_place_act_in_the_order_given():
    assert (seen(ja.remedied(tapping(), DOUBLED(3.0), RAISED()), 1)[0, :6] == 4).all()
    assert (seen(ja.remedied(tapping(), RAISED(), DOUBLED(3.0)), 1)[0, :6] == 6).all()


def test_a_remedy_at_a_site_acts_before_what_disturbs_it():
    learner = ja.remedied(learner_of(alone), RAISED())
    result = ja.audit(learner, [ja.reward_scale(3.0, onset=1, duration=1)], seeds=1, steps=3)
    np.testing.assert_array_equal(result.telemetry["performance"].values[0], [[2, 2, 2], [2, 6, 2]])


def test_remedies_act_before_those_that_a_learner_has_already():
    nested = ja.remedied(ja.remedied(tapping(), DOUBLED(3.0)), RAISED())
    np.testing.assert_array_equal(seen(nested, 2), seen(ja.remedied(tapping(), RAISED(), DOUBLED(3.0)), 2))


def test_a_nested_learner_is_that_with_both_remedies_bit_for_bit():
    """Of remedies that act at different places."""
    one, other = remedies.l2_init(0.1), remedies.learning_rate_scale(0.5)
    nested = audited(ja.remedied(ja.remedied(small(), one), other))
    flat = audited(ja.remedied(small(), other, one))
    for name, values in flat.items():
        np.testing.assert_array_equal(nested[name], values)


def test_other_strengths_compile_nothing():
    told()
    compilations = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        strong = audited(helped(**{kind.name: kind.strength for kind in fitting()}))
        assert not compilations
        jax.jit(lambda x: x * 4.75 + 3)(np.ones(11))
        assert compilations, "the listener hears compilations"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert helped(zclip=1.0) == helped(zclip=2.0)
    assert not np.array_equal(strong["params"], told()["params"])


def test_a_lane_that_is_lost_does_not_touch_another_ones_remedies():
    """One lane begins as NaN; the states of the other's remedies are the same bits as beside a healthy one."""
    learner = helped(**{kind.name: kind.strength for kind in fitting()} | {"nonfinite_skip": 0.0})
    keys = jax.random.split(jax.random.key(3), 2)

    @jax.jit
    def trained(states):
        def step(states, index):
            def advance(state, key):
                taps = Taps(index, 6, data=learner.data, key=key)
                return learner.step(state, jax.random.fold_in(key, index), taps)

            return jax.vmap(advance)(states, keys)

        return jax.lax.scan(step, states, jnp.arange(6))

    healthy = jax.jit(jax.vmap(lambda key: learner.init(key, learner.data)))(keys)
    lost = jax.tree.map(lambda x: x.at[1].set(jnp.nan) if x.dtype == jnp.float32 else x, healthy)
    (states, _), (other, _) = trained(healthy), trained(lost)
    first = [jax.tree.map(lambda x: x[0], s) for s in (states, other)]
    assert bits(first[0]) == bits(first[1])
    assert np.isnan(other.learner[0]["actor"][1]).all()
    kept = {kind.name for kind in fitting() if kind.keeps_state}
    assert set(states.remedies) == kept
    assert {"l2_init", "zclip", "adagc", "spam", "six_sigma_skip", "target_kl_stop"} <= kept
    for name in kept - {"target_kl_stop"}:
        begin, end = (jax.tree.map(lambda x: x[0], s.remedies[name]) for s in (healthy, states))
        assert bits(begin) != bits(end), f"{name} has remembered nothing"


def alone(state, key, taps):
    return state, {"performance": taps("reward", jnp.ones(()))}


def plain_loop(state, key, taps):
    """A learner whose loop carries no state of its taps."""

    def turn(total, _):
        return total + taps("reward", jnp.ones(())), None

    return state, {"performance": jax.lax.scan(turn, 0.0, length=3)[0]}


def folded(state, key, taps):
    def turn(total, index):
        return total + taps.fold_in(index)("reward", jnp.ones(())), None

    return state, {"performance": jax.lax.scan(turn, 0.0, jnp.arange(3))[0]}


TWO_ADAMS = optax.chain(optax.scale_by_adam(), optax.scale_by_adam())


def updated_by(transform):
    """A learner that descends |x|^2 with an optax transformation."""
    optimizer = ja.Optimizer(transform)

    def step(state, key, taps):
        x, moments = optimizer.disturb(*state, taps, jax.random.normal)
        x, moments, _ = optimizer.update(x, moments, 2 * x, taps)
        return (x, moments), {"performance": -jnp.sum(x**2)}

    return ja.Learner(lambda key: (jnp.ones(3), optimizer.init(jnp.ones(3))), step)


def learner_of(step, **rest):
    return ja.Learner(lambda key: jnp.zeros(()), step, name="made", **rest)


@pytest.mark.parametrize(
    ("learner", "chosen", "sentence"),
    [
        (
            lambda: learner_of(plain_loop),
            (COUNTED(),),
            "'counted' keeps state, and the learner taps 'reward' inside scan",
        ),
        (
            lambda: learner_of(folded),
            (COUNTED(),),
            "'counted' keeps state, and the learner taps 'reward' in a loop that does not carry it",
        ),
        (lambda: small(), (remedies.zclip(), remedies.zclip(2.0)), "remedy 'zclip' is there twice"),
        (lambda: ja.remedied(small(), remedies.zclip()), (remedies.zclip(2.0),), "remedy 'zclip' is there twice"),
        (lambda: small(), (remedies.zclip,), r"'zclip' is a kind of remedy; call it for a remedy: zclip\(\)"),
        (lambda: small(), (0.3,), "remedied.. takes remedies, such as .*, not 0.3"),
        (lambda: small(), (), "remedied.. needs at least one remedy"),
        (lambda: tapping(), (remedies.zclip(),), "'zclip' acts on what a jaxaudit.Optimizer does"),
        (lambda: updated_by(optax.identity()), (remedies.periodic_reset(),), "does not hand over at the end of a step"),
        (
            lambda: tapping(),
            (remedies.clip_higher(),),
            "site 'ratio_clip', which the learner does not tap; its sites: ",
        ),
        (
            lambda: tapping(),
            (remedies.critic_layer_norm(),),
            "'critic_layer_norm' changes settings, and 'tapping' has none",
        ),
        (lambda: ja.learners.trpo("CartPole-v1"), (remedies.target_kl_stop(),), "needs approximate_kl at 'guard'"),
        (lambda: updated_by(optax.scale_by_adam()), (remedies.equal_betas(),), "only with a jaxaudit.Adam"),
        (lambda: updated_by(optax.identity()), (remedies.adam_rel(),), "'adam_rel': .* state has no 'mu'"),
        (
            lambda: updated_by(optax.identity()),
            (remedies.stable_adamw(),),
            "'stable_adamw': .* decay rates are not known",
        ),
        (lambda: updated_by(TWO_ADAMS), (remedies.spam(),), "'spam': .* state has more than one 'mu'"),
    ],
    ids=[
        "scan",
        "fold_in",
        "twice",
        "nested twice",
        "kind",
        "number",
        "none",
        "no optimizer",
        "no finish",
        "no site",
        "no settings",
        "context",
        "no betas",
        "no count",
        "no second moment",
        "two Adams",
    ],
)
def test_what_a_learner_cannot_have_is_refused_in_one_sentence(learner, chosen, sentence):
    made = learner()
    with pytest.raises(ValueError, match=sentence) as error:
        ja.remedied(made, *chosen)
    assert "\n" not in str(error.value)
    assert not str(error.value).endswith(".")


def test_adams_count_alone_begins_anew():
    """A transformation behind Adam that counts updates, too, goes on counting."""
    schedule = optax.scale_by_schedule(lambda count: 1.0 / (1 + count))
    learner = ja.remedied(updated_by(optax.chain(optax.scale_by_adam(), schedule)), remedies.adam_rel())
    state = learner.init(jax.random.key(0), learner.data)
    for step in range(3):
        state, _ = learner.step(state, jax.random.key(step), Taps(step, 3, data=learner.data))
    adam, scheduled = state.learner[1]
    assert (adam.count, scheduled.count) == (1, 3)


def test_a_channel_tells_in_what_share_of_its_applications_a_remedy_acted():
    """Of one optimizer in a loop of four minibatches, and of another that is used outside of it."""
    inner, outer = ja.Optimizer(ja.Adam(), label="inner"), ja.Optimizer(ja.Adam(), label="outer")

    def step(state, key, taps):
        def turn(taps, carry, number):
            bad = jnp.where(number < taps.step, jnp.nan, 1.0)
            return inner.update(*carry, jnp.ones(3).at[1].set(bad), taps)[:2], None

        one, _ = taps.scan(turn, state[0], jnp.arange(4))
        other = outer.update(*state[1], jnp.ones(3), taps)[:2]
        return (one, other), {"performance": jnp.sum(one[0])}

    def begin(key):
        return tuple((jnp.ones(3), optimizer.init(jnp.ones(3))) for optimizer in (inner, outer))

    learner = ja.remedied(ja.Learner(begin, step), remedies.nonfinite_skip(), remedies.zclip())
    found = ja.audit(learner, [ja.lr_spike(3.0, onset=0, duration="end")], seeds=2, steps=5).telemetry
    for condition in range(2):
        acted = found["acted_nonfinite_skip"].values[:, condition]
        np.testing.assert_allclose(acted, np.tile([0.0, 0.2, 0.4, 0.6, 0.8], (2, 1)), rtol=1e-6)
        assert (found["acted_zclip"].values[:, condition] == 0).all()
    assert found["acted_zclip"].attrs["monitored"] == 0


def test_nested_remedies_are_counted_each_by_itself():
    rate = remedies.learning_rate_scale(0.5)
    inner_first = ja.remedied(ja.remedied(small(), remedies.nonfinite_skip()), rate)
    found = ja.audit(inner_first, [], seeds=1, steps=2).telemetry
    assert (found["acted_learning_rate_scale"].values == 1).all()
    assert (found["acted_nonfinite_skip"].values == 0).all()


def test_the_share_of_a_lane_counts_from_its_onset_on():
    """Resets after steps 1, 3, 5 and 7 of ten: two of the six steps from step 4 on, or one of four from step 6 on."""
    learner = ja.remedied(small(), remedies.periodic_reset())
    for onset, share in ((4, 2 / 6), (5, 2 / 5), (6, 1 / 4)):
        lanes = ja.audit(learner, [ja.lr_spike(1.5, onset=onset, duration="end")], seeds=1, steps=STEPS).lanes
        np.testing.assert_allclose(lanes["acted_periodic_reset"], share)


def test_a_remedy_whose_actions_cannot_be_counted_has_no_channel():
    learner = ja.remedied(learner_of(plain_loop), DOUBLED(3.0))
    assert "acted_doubled" not in ja.audit(learner, [], seeds=1, steps=2).telemetry


@pytest.mark.parametrize("nested", [False, True])
def test_two_remedies_that_change_one_setting_are_refused(nested):
    def make(*chosen):
        return ja.remedied(small(), *chosen)

    layers = remedies.setting(strength=1.0)
    first, second = layers(_more_entropy), layers(_less_entropy)
    try:
        with pytest.raises(ValueError, match="'_less_entropy': it changes the setting 'entropy_coefficient', and so"):
            ja.remedied(make(first(), remedies.zclip()), second()) if nested else make(first(), second())
        with pytest.raises(ValueError, match="'_more_entropy' is there twice"):
            ja.remedied(make(first(), remedies.zclip()), first()) if nested else make(first(), first())
    finally:
        for name in ("_more_entropy", "_less_entropy"):
            registry.remedies._entries.pop(name)


def test_a_remedy_that_acts_and_changes_a_setting_is_one_remedy():
    plain = small(entropy_coefficient=0.0)
    one = ja.remedied(plain, remedies.adaptive_entropy())
    assert remedy_names(one) == ("adaptive_entropy",)
    assert remedy_names(ja.remedied(one, remedies.zclip())) == ("zclip", "adaptive_entropy")


def _more_entropy(settings, strength):
    return {"entropy_coefficient": 0.5}


def _less_entropy(settings, strength):
    return {"entropy_coefficient": 0.25}


def test_a_stateless_remedy_acts_in_a_plain_loop():
    result = ja.audit(ja.remedied(learner_of(plain_loop), DOUBLED(3.0)), [], seeds=1, steps=2)
    assert (result.telemetry["performance"].values == 9).all()


@pytest.mark.parametrize("strength", [-0.1, math.nan, True, "much"])
def test_a_strength_that_means_nothing_is_refused(strength):
    with pytest.raises(ValueError, match="zclip"):
        remedies.zclip(strength)


def test_a_strength_may_be_a_number_of_numpy_and_a_switch_is_whole():
    assert remedies.zclip(np.float32(1.5)).strength == 1.5
    with pytest.raises(ValueError, match="must be a whole number"):
        remedies.nonfinite_skip(0.5)
    assert replace(remedies.zclip(), strength=3).strength == 3.0


def test_a_setting_that_a_learner_does_not_have_is_refused_with_the_nearest_one():
    with pytest.raises(
        ValueError, match=r"unknown setting of learner 'ppo' 'num_env' .did you mean 'num_envs'.*; allowed: "
    ):
        ja.learners.ppo("CartPole-v1", num_env=4)
