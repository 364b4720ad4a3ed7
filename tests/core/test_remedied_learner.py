"""`ja.remedied`: neutral strengths, the order in which remedies act, nested remedies, and refusals."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_learner import (
    DURATION,
    ONSET,
    RATE,
    SIZE,
    STEPS,
    UPDATES,
    WINDOW,
    added,
    assert_close,
    audit_telemetry,
    fitting_kinds,
    fresh,
    lane_telemetry,
    random_gradients,
    remedied_telemetry,
    remedy_kinds,
    run_updates,
    small_learner,
    to_params,
    with_fitting_remedies,
)

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.perturbation import nothing
from jaxaudit.core.remedied_learner import remedy_misfit, remedy_names
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import ROOT, Taps
from jaxaudit.runtime import registry


def test_the_small_learner_fits_all_remedies_of_optimizers():
    expected = {"learning_rate_scale", "learning_rate_warmup", "target_kl_stop", "nonfinite_skip", "six_sigma_skip"}
    expected |= {"zclip", "adagc", "spam", "adam_rel", "equal_betas", "stable_adamw", "l2_init", "weight_decay"}
    assert expected | {"clip_higher", "decoupled_lambda", "adaptive_entropy"} <= {kind.name for kind in fitting_kinds()}


SPECIAL_FLOATS = [1.5, -0.0, math.nan, math.inf, -math.inf, 1e-42, -3e38]


def special_values():
    """Returns values that arithmetic changes, for each site of remedies."""
    params = to_params(SPECIAL_FLOATS)
    state = optax.ScaleByAdamState(jnp.int32(7), to_params(SPECIAL_FLOATS[::-1]), to_params(np.roll(SPECIAL_FLOATS, 2)))
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


@pytest.mark.parametrize("kind", [kind for kind in remedy_kinds() if kind.apply], ids=lambda kind: kind.name)
def test_a_neutral_strength_leaves_values_bitwise_unchanged(kind):
    """This holds for any state of the remedy, and at the run's beginning, middle and end."""
    values = special_values()
    others = {
        "params": to_params(np.roll(SPECIAL_FLOATS, 1)),
        "gradient": values["penalty"],
        "moments": values["optimizer_state"],
    }
    others |= {"betas": values["betas"], "loss": jnp.float32(math.nan), "approximate_kl": jnp.float32(math.inf)}
    others |= {"entropy": lambda: jnp.float32(math.nan), "gradient_of": lambda term, key: values["penalty"]}
    others |= {"reinitialise": fresh, "new_moments": lambda params: values["optimizer_state"]}
    value = values[kind.site]
    states = {kind.name: {ROOT: kind.init(value)}} if kind.keeps_state else {}

    def apply_remedy(value, strength, step, states):
        taps = Taps(step, 3, key=jax.random.key(0)).with_remedies(((kind, strength),), states, None)
        return taps.remedy(kind.site, value, **others), taps.remedy_states

    compiled = jax.jit(apply_remedy)
    for step in range(3):
        result, states = compiled(value, jnp.float32(kind.neutral), step, states)
        assert bits(result) == bits(value)
    strong = compiled(value, jnp.float32(kind.strength), 0, states)[0]
    assert bits(jax.jit(lambda: value)()) == bits(value)
    assert jax.tree.structure(strong) == jax.tree.structure(value)


OPTIMIZER_REMEDIES = [kind for kind in remedy_kinds() if kind.site in set(remedies.HOOKS) - {"trained"}]


@pytest.mark.parametrize("kind", OPTIMIZER_REMEDIES, ids=lambda kind: kind.name)
def test_a_neutral_remedy_leaves_updates_unchanged(kind):
    optimizer, series = ja.Optimizer(ja.Adam(), RATE, max_norm=2.0), random_gradients(30, seed=15)
    context = {"loss": np.linspace(3.0, 1.0, 30), "approximate_kl": np.linspace(0.0, 1.0, 30)}
    plain = run_updates(optimizer, [], np.ones(SIZE), series, **context)
    remedied = run_updates(optimizer, [kind(kind.neutral)], np.ones(SIZE), series, **context)
    for remedied_leaf, plain_leaf in zip(jax.tree.leaves(remedied), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(
            remedied_leaf, plain_leaf, rtol=1e-6, atol=1e-6 * float(jnp.max(jnp.abs(plain_leaf)))
        )


def assert_equal_without_remedies(remedied, tolerance):
    plain = audit_telemetry(small_learner())
    extra_channels = set(remedied) - set(plain)
    assert set(plain) < set(remedied)
    assert not [name for name in extra_channels if not name.startswith("acted_") or (remedied[name] != 0).any()]
    for name, values in plain.items():
        scale = np.max(np.abs(values), where=np.isfinite(values), initial=0.0)
        np.testing.assert_allclose(remedied[name], values, rtol=tolerance, atol=tolerance * scale, err_msg=name)


def test_a_learner_with_neutral_remedies_trains_as_without():
    """This holds without perturbations, and where rate and gradient are perturbed or made NaN."""
    # If betas are data, 1 - beta2 is rounded differently.
    assert_equal_without_remedies(remedied_telemetry(), tolerance=1e-4)
    poison = lane_telemetry(remedied_telemetry(), "poisoned")
    assert np.isnan(poison["params"][ONSET:]).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [kind.name for kind in remedy_kinds() if kind.apply])
def test_a_learner_with_one_neutral_remedy_trains_as_without(name):
    kind = registry.remedies[name]
    if reason := remedy_misfit(kind, find_sites(small_learner())):
        pytest.skip(reason)
    assert_equal_without_remedies(audit_telemetry(ja.remedied(small_learner(), kind(kind.neutral))), tolerance=1e-6)


def test_a_periodic_reset_replaces_parameters_and_moments():
    telemetry = lane_telemetry(remedied_telemetry(periodic_reset=4.0), "control")
    resets = np.array([1, 3, 5, 7])  # in ten steps
    np.testing.assert_array_equal(telemetry["acted_periodic_reset"], np.isin(np.arange(STEPS), resets))
    np.testing.assert_array_equal(telemetry["count"][resets], 0)
    assert (telemetry["mu"][resets] == 0).all()
    last_params = telemetry["params"][:-1, -1]  # the parameters after each step's last update
    change = np.abs(telemetry["begin"][1:] - last_params).max(axis=1)
    np.testing.assert_array_equal(change > 0, np.isin(np.arange(STEPS - 1), resets))
    reset_params = telemetry["begin"][resets + 1]
    assert len(np.unique(reset_params)) == reset_params.size, "resets gave equal parameters"


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
def test_learners_support_periodic_resets(learner):
    instance = learner()
    labels = set(find_sites(instance).remedy_points["trained"])
    assert labels == ({"policy", "critic"} if instance.name == "ppo_lm" else {""})
    assert remedy_misfit(remedies.periodic_reset, find_sites(instance)) is None


def test_remedies_set_tapped_values_that_a_learner_does_not_use():
    telemetry = lane_telemetry(remedied_telemetry(clip_higher=0.5, decoupled_lambda=0.7), "control")
    assert_close(telemetry["bounds"], np.tile([0.2, 0.5], (STEPS, 1)))
    assert_close(telemetry["lambda"], np.full(STEPS, 0.7))


def test_the_entropy_bonus_follows_its_target():
    """The coefficient changes by 0.005 a step.

    It rises while the entropy is below the target, and is 0 while it is above.
    """
    entropy = lane_telemetry(remedied_telemetry(), "control")["begin"][:, :3].sum(1)
    target = float(np.median(entropy))
    telemetry, coefficient, expected = lane_telemetry(remedied_telemetry(adaptive_entropy=target), "control"), 0.0, []
    np.testing.assert_array_equal(telemetry["begin"][:, :3].sum(1), entropy)
    for value in entropy:
        coefficient = min(1.0, max(0.0, coefficient + (0.005 if value < target else -0.005)))
        expected.append(coefficient if value <= target else 0.0)
    assert_close(telemetry["weight"], expected)
    assert 0 < np.count_nonzero(expected) < STEPS


def test_a_guard_receives_the_perturbed_gradient():
    """The perturbation makes gradients NaN, and the guard skips their updates."""
    telemetry = lane_telemetry(remedied_telemetry(nonfinite_skip=1.0, l2_init=0.1, weight_decay=0.1), "poisoned")
    skipped = np.zeros((STEPS, UPDATES), bool)
    skipped[WINDOW] = True
    np.testing.assert_array_equal(telemetry["update_norm"] == 0, skipped)
    params_before = telemetry["params"][ONSET - 1, -1]
    np.testing.assert_array_equal(
        telemetry["params"][WINDOW], np.broadcast_to(params_before, (DURATION, UPDATES, SIZE))
    )
    for name in ("mu", "nu", "count"):
        np.testing.assert_array_equal(
            telemetry[name][WINDOW], np.broadcast_to(telemetry[name][ONSET - 1], telemetry[name][WINDOW].shape)
        )
    for name in ("params", "mu", "nu", "performance"):
        assert np.isfinite(telemetry[name]).all()


def test_x_used_compares_the_penalized_gradient_with_the_perturbed_one():
    """Two remedies change the gradient, too: L2 Init before, and AdaGC after the perturbation."""
    telemetry = remedied_telemetry(l2_init=0.5, adagc=1.05)
    assert (lane_telemetry(telemetry, "control")["used"] == 1).all()
    pushed = lane_telemetry(telemetry, "pushed")
    push = np.concatenate([np.zeros(3), np.full(4, 2.0)])
    initial = pushed["begin"][0]
    for step in range(STEPS):
        for update in range(UPDATES):
            params = pushed["params"][step, update - 1] if update else pushed["begin"][step]
            with_penalty = pushed["gradient"][step, update] + 2 * 0.5 * (params - initial)
            disturbed = with_penalty + push
            cosine = with_penalty @ disturbed / np.linalg.norm(with_penalty) / np.linalg.norm(disturbed)
            is_open = ONSET <= step < ONSET + DURATION
            assert pushed["used"][step, update] == pytest.approx(cosine if is_open else 1.0, abs=1e-4)
            norm = np.linalg.norm(disturbed if is_open else with_penalty)
            assert pushed["gradient_norm"][step, update] == pytest.approx(min(1.0, norm), rel=1e-3), "clipped to 1"


def multiply(value, strength, state):
    return jax.tree.map(lambda x: strength * x, value), state


def increase(value, strength, state):
    return jax.tree.map(lambda x: x + strength, value), state


def count_calls(value, strength, state):
    """Adds the number of earlier calls."""
    return value + strength * state, state + 1.0


MULTIPLIED = remedies.RemedyKind("multiplied", 2.0, "reward", multiply, neutral=1.0)


INCREASED = remedies.RemedyKind("increased", 1.0, "reward", increase, neutral=0.0)


COUNTED = remedies.RemedyKind("counted", 1.0, "reward", count_calls, neutral=0.0, init=lambda value: jnp.zeros(()))


STEERED = remedies.RemedyKind("steered", 1.0, "gradient", increase, neutral=0.0)


@pytest.mark.exhaustive
def test_x_used_excludes_a_remedy_at_the_gradient_site():
    telemetry = lane_telemetry(audit_telemetry(ja.remedied(small_learner(), STEERED(5.0))), "pushed")
    remedied = telemetry["gradient"] + 5.0
    disturbed = remedied + np.concatenate([np.zeros(3), np.full(4, 2.0)])
    norms = np.linalg.norm(remedied, axis=-1) * np.linalg.norm(disturbed, axis=-1)
    cosine = (remedied * disturbed).sum(-1) / norms
    assert_close(telemetry["used"][WINDOW], cosine[WINDOW], rtol=1e-4)
    assert (telemetry["used"][:ONSET] == 1).all()


@functools.cache
def tapping_learner():
    """Returns a learner that taps the constant 1 in all possible ways, and sums the results."""

    def step(state, key, taps):
        outside = taps("reward", jnp.ones(()))
        scanned = taps.scan(lambda taps, c, _: (c, taps("reward", jnp.ones(()))), 0.0, length=3)[1]
        repeated = taps.repeat(
            lambda taps, c, number: c.at[number].set(taps("reward", jnp.ones(()))), jnp.zeros(2), jnp.int32(2)
        )
        even = taps.step % 2 == 0
        _, branch = taps.cond(even, lambda taps, c: (c, taps("reward", jnp.ones(()))), 0.0)
        values = jnp.concatenate([outside[None], scanned, repeated, branch[None]])
        return state + 1, {"performance": jnp.sum(values), "seen": values}

    return ja.Learner(lambda key: jnp.zeros(()), step, name="tapping")


def tapped_values(learner, steps=4):
    return np.asarray(ja.audit(learner, [], seeds=1, steps=steps).telemetry["seen"].values[0, 0])


def test_states_of_remedies_pass_through_scan_repeat_cond_and_steps():
    count, expected = 0, []
    for step in range(4):
        row = []
        for tap in range(7):
            is_tapped = tap < 6 or step % 2 == 0
            row.append(1.0 + count if is_tapped else 0.0)
            count += is_tapped
        expected.append(row)
    np.testing.assert_array_equal(tapped_values(ja.remedied(tapping_learner(), COUNTED())), expected)


@pytest.mark.parametrize("stateful", [False, True], ids=["stateless", "stateful"])
def test_a_remedys_state_in_a_loop_is_independent_of_perturbations(stateful):
    """A loop with `until` runs all its turns if a perturbation at any site keeps state."""

    def step(state, key, taps):
        level = taps("difficulty", jnp.zeros(()))

        def turn(taps, carry, number):
            is_over = carry[0] >= 3  # the remaining turns change nothing, as `until` requires
            reward = jnp.where(is_over, 0.0, taps("reward", jnp.ones(())))
            return jnp.where(is_over, carry[0], number + 1), carry[1] + reward

        _, total = taps.repeat(turn, (jnp.int32(0), 0.0 * level), 7, until=lambda carry: carry[0] >= 3)
        return state, {"performance": total}

    kind = ja.Kind("added", "signal", "difficulty", added, init=(lambda value: ()) if stateful else nothing)
    result = ja.audit(ja.remedied(learner_of(step), COUNTED()), [kind(onset=2, duration=1)], seeds=1, steps=4)
    baseline, control = (result.telemetry[name].values for name in ("baseline_performance", "performance"))
    np.testing.assert_array_equal(control[0, 0], baseline[0])


def test_remedies_at_one_site_act_in_the_given_order():
    assert (tapped_values(ja.remedied(tapping_learner(), MULTIPLIED(3.0), INCREASED()), 1)[0, :6] == 4).all()
    assert (tapped_values(ja.remedied(tapping_learner(), INCREASED(), MULTIPLIED(3.0)), 1)[0, :6] == 6).all()


def test_a_remedy_at_a_site_acts_before_perturbations():
    learner = ja.remedied(learner_of(tap_once), INCREASED())
    result = ja.audit(learner, [ja.reward_scale(3.0, onset=1, duration=1)], seeds=1, steps=3)
    np.testing.assert_array_equal(result.telemetry["performance"].values[0], [[2, 2, 2], [2, 6, 2]])


def test_remedies_act_before_those_of_the_inner_learner():
    nested = ja.remedied(ja.remedied(tapping_learner(), MULTIPLIED(3.0)), INCREASED())
    np.testing.assert_array_equal(
        tapped_values(nested, 2), tapped_values(ja.remedied(tapping_learner(), INCREASED(), MULTIPLIED(3.0)), 2)
    )


@pytest.mark.exhaustive
def test_nested_remedies_are_bitwise_those_of_one_call():
    """The two remedies act at different sites."""
    first, second = remedies.l2_init(0.1), remedies.learning_rate_scale(0.5)
    nested = audit_telemetry(ja.remedied(ja.remedied(small_learner(), first), second))
    flat = audit_telemetry(ja.remedied(small_learner(), second, first))
    for name, values in flat.items():
        np.testing.assert_array_equal(nested[name], values)


def test_new_strengths_compile_nothing():
    remedied_telemetry()
    compilations = []

    def listen(event, seconds, **_):
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        strong = audit_telemetry(with_fitting_remedies(**{kind.name: kind.strength for kind in fitting_kinds()}))
        assert not compilations
        jax.jit(lambda x: x * 4.75 + 3)(np.ones(11))
        assert compilations, "the listener does not count compilations"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert with_fitting_remedies(zclip=1.0) == with_fitting_remedies(zclip=2.0)
    assert not np.array_equal(strong["params"], remedied_telemetry()["params"])


def test_a_lane_of_nan_does_not_change_another_lanes_remedies():
    """One lane begins as NaN. The states of the other lane's remedies are bitwise those beside a healthy lane."""
    learner = with_fitting_remedies(**{kind.name: kind.strength for kind in fitting_kinds()} | {"nonfinite_skip": 0.0})
    keys = jax.random.split(jax.random.key(3), 2)

    @jax.jit
    def train(states):
        def step(states, index):
            def advance(state, key):
                taps = Taps(index, 6, data=learner.data, key=key)
                return learner.step(state, jax.random.fold_in(key, index), taps)

            return jax.vmap(advance)(states, keys)

        return jax.lax.scan(step, states, jnp.arange(6))

    healthy = jax.jit(jax.vmap(lambda key: learner.init(key, learner.data)))(keys)
    with_nan = jax.tree.map(lambda x: x.at[1].set(jnp.nan) if x.dtype == jnp.float32 else x, healthy)
    (states, _), (states_with_nan, _) = train(healthy), train(with_nan)
    first_lanes = [jax.tree.map(lambda x: x[0], s) for s in (states, states_with_nan)]
    assert bits(first_lanes[0]) == bits(first_lanes[1])
    assert np.isnan(states_with_nan.learner[0]["actor"][1]).all()
    stateful = {kind.name for kind in fitting_kinds() if kind.keeps_state}
    assert set(states.remedies) == stateful
    assert {"l2_init", "zclip", "adagc", "spam", "six_sigma_skip", "target_kl_stop"} <= stateful
    for name in stateful - {"target_kl_stop"}:
        initial, final = (jax.tree.map(lambda x: x[0], s.remedies[name]) for s in (healthy, states))
        assert bits(initial) != bits(final), f"{name} has an unchanged state"


def tap_once(state, key, taps):
    return state, {"performance": taps("reward", jnp.ones(()))}


def tap_in_plain_loop(state, key, taps):
    """A step whose loop does not carry the states of its taps."""

    def turn(total, _):
        return total + taps("reward", jnp.ones(())), None

    return state, {"performance": jax.lax.scan(turn, 0.0, length=3)[0]}


def tap_with_folded_key(state, key, taps):
    def turn(total, index):
        return total + taps.fold_in(index)("reward", jnp.ones(())), None

    return state, {"performance": jax.lax.scan(turn, 0.0, jnp.arange(3))[0]}


TWO_ADAMS = optax.chain(optax.scale_by_adam(), optax.scale_by_adam())


def learner_with_transform(transform):
    """Returns a learner that descends |x|^2 with an optax transformation."""
    optimizer = ja.Optimizer(transform)

    def step(state, key, taps):
        x, moments = optimizer.disturb(*state, taps, jax.random.normal)
        x, moments, _ = optimizer.update(x, moments, 2 * x, taps)
        return (x, moments), {"performance": -jnp.sum(x**2)}

    return ja.Learner(lambda key: (jnp.ones(3), optimizer.init(jnp.ones(3))), step)


def learner_of(step, **settings):
    return ja.Learner(lambda key: jnp.zeros(()), step, name="made", **settings)


@pytest.mark.parametrize(
    ("learner", "chosen_remedies", "sentence"),
    [
        (
            lambda: learner_of(tap_in_plain_loop),
            (COUNTED(),),
            "'counted' keeps state, and the learner taps 'reward' inside scan",
        ),
        (
            lambda: learner_of(tap_with_folded_key),
            (COUNTED(),),
            "'counted' keeps state, and the learner taps 'reward' in a loop that does not carry it",
        ),
        (lambda: small_learner(), (remedies.zclip(), remedies.zclip(2.0)), "remedy 'zclip' is there twice"),
        (
            lambda: ja.remedied(small_learner(), remedies.zclip()),
            (remedies.zclip(2.0),),
            "remedy 'zclip' is there twice",
        ),
        (lambda: small_learner(), (remedies.zclip,), r"'zclip' is a kind of remedy; call it for a remedy: zclip\(\)"),
        (lambda: small_learner(), (0.3,), "remedied.. takes remedies, such as .*, not 0.3"),
        (lambda: small_learner(), (), "remedied.. needs at least one remedy"),
        (lambda: tapping_learner(), (remedies.zclip(),), "'zclip' acts on what a jaxaudit.Optimizer does"),
        (
            lambda: learner_with_transform(optax.identity()),
            (remedies.periodic_reset(),),
            "does not hand over at the end of a step",
        ),
        (
            lambda: tapping_learner(),
            (remedies.clip_higher(),),
            "site 'ratio_clip', which the learner does not tap; its sites: ",
        ),
        (
            lambda: tapping_learner(),
            (remedies.critic_layer_norm(),),
            "'critic_layer_norm' changes settings, and 'tapping' has none",
        ),
        (lambda: ja.learners.trpo("CartPole-v1"), (remedies.target_kl_stop(),), "needs approximate_kl at 'guard'"),
        (lambda: learner_with_transform(optax.scale_by_adam()), (remedies.equal_betas(),), "only with a jaxaudit.Adam"),
        (lambda: learner_with_transform(optax.identity()), (remedies.adam_rel(),), "'adam_rel': .* state has no 'mu'"),
        (
            lambda: learner_with_transform(optax.identity()),
            (remedies.stable_adamw(),),
            "'stable_adamw': .* decay rates are not known",
        ),
        (lambda: learner_with_transform(TWO_ADAMS), (remedies.spam(),), "'spam': .* state has more than one 'mu'"),
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
def test_remedies_that_do_not_fit_are_refused_in_one_sentence(learner, chosen_remedies, sentence):
    instance = learner()
    with pytest.raises(ValueError, match=sentence) as error:
        ja.remedied(instance, *chosen_remedies)
    assert "\n" not in str(error.value)
    assert not str(error.value).endswith(".")


def test_only_adams_count_is_reset():
    """A transformation behind Adam that also counts updates continues to count."""
    schedule = optax.scale_by_schedule(lambda count: 1.0 / (1 + count))
    learner = ja.remedied(learner_with_transform(optax.chain(optax.scale_by_adam(), schedule)), remedies.adam_rel())
    state = learner.init(jax.random.key(0), learner.data)
    for step in range(3):
        state, _ = learner.step(state, jax.random.key(step), Taps(step, 3, data=learner.data))
    adam, scheduled = state.learner[1]
    assert (adam.count, scheduled.count) == (1, 3)


def test_a_channel_reports_the_share_of_applications_in_which_a_remedy_acted():
    """One optimizer is used in a loop of four minibatches, and another outside of it."""
    inner, outer = ja.Optimizer(ja.Adam(), label="inner"), ja.Optimizer(ja.Adam(), label="outer")

    def step(state, key, taps):
        def turn(taps, carry, number):
            bad = jnp.where(number < taps.step, jnp.nan, 1.0)
            return inner.update(*carry, jnp.ones(3).at[1].set(bad), taps)[:2], None

        inner_state, _ = taps.scan(turn, state[0], jnp.arange(4))
        outer_state = outer.update(*state[1], jnp.ones(3), taps)[:2]
        return (inner_state, outer_state), {"performance": jnp.sum(inner_state[0])}

    def begin(key):
        return tuple((jnp.ones(3), optimizer.init(jnp.ones(3))) for optimizer in (inner, outer))

    learner = ja.remedied(ja.Learner(begin, step), remedies.nonfinite_skip(), remedies.zclip())
    telemetry = ja.audit(learner, [ja.lr_spike(3.0, onset=0, duration="end")], seeds=2, steps=5).telemetry
    for condition in range(2):
        acted = telemetry["acted_nonfinite_skip"].values[:, condition]
        np.testing.assert_allclose(acted, np.tile([0.0, 0.2, 0.4, 0.6, 0.8], (2, 1)), rtol=1e-6)
        assert (telemetry["acted_zclip"].values[:, condition] == 0).all()
    assert telemetry["acted_zclip"].attrs["monitored"] == 0


@pytest.mark.exhaustive
def test_nested_remedies_have_separate_channels():
    rate = remedies.learning_rate_scale(0.5)
    inner_first = ja.remedied(ja.remedied(small_learner(), remedies.nonfinite_skip()), rate)
    telemetry = ja.audit(inner_first, [], seeds=1, steps=2).telemetry
    assert (telemetry["acted_learning_rate_scale"].values == 1).all()
    assert (telemetry["acted_nonfinite_skip"].values == 0).all()


@pytest.mark.exhaustive
def test_a_lanes_share_counts_from_its_onset():
    """Resets follow steps 1, 3, 5 and 7 of ten: two of the six steps from step 4, or one of the four from step 6."""
    learner = ja.remedied(small_learner(), remedies.periodic_reset())
    for onset, share in ((4, 2 / 6), (5, 2 / 5), (6, 1 / 4)):
        lanes = ja.audit(learner, [ja.lr_spike(1.5, onset=onset, duration="end")], seeds=1, steps=STEPS).lanes
        np.testing.assert_allclose(lanes["acted_periodic_reset"], share)


def test_a_remedy_that_cannot_be_counted_has_no_channel():
    learner = ja.remedied(learner_of(tap_in_plain_loop), MULTIPLIED(3.0))
    assert "acted_multiplied" not in ja.audit(learner, [], seeds=1, steps=2).telemetry


@pytest.mark.parametrize("nested", [False, True])
def test_two_remedies_that_change_the_same_setting_are_refused(nested):
    def make(*chosen_remedies):
        return ja.remedied(small_learner(), *chosen_remedies)

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


def test_a_remedy_that_acts_and_changes_a_setting_counts_once():
    plain = small_learner(entropy_coefficient=0.0)
    remedied = ja.remedied(plain, remedies.adaptive_entropy())
    assert remedy_names(remedied) == ("adaptive_entropy",)
    assert remedy_names(ja.remedied(remedied, remedies.zclip())) == ("zclip", "adaptive_entropy")


def _more_entropy(settings, strength):
    return {"entropy_coefficient": 0.5}


def _less_entropy(settings, strength):
    return {"entropy_coefficient": 0.25}


def test_a_stateless_remedy_may_act_in_a_plain_loop():
    result = ja.audit(ja.remedied(learner_of(tap_in_plain_loop), MULTIPLIED(3.0)), [], seeds=1, steps=2)
    assert (result.telemetry["performance"].values == 9).all()


@pytest.mark.parametrize("strength", [-0.1, math.nan, True, "much"])
def test_invalid_strengths_are_refused(strength):
    with pytest.raises(ValueError, match="zclip"):
        remedies.zclip(strength)


def test_a_strength_may_be_a_numpy_number_and_a_switch_is_whole():
    assert remedies.zclip(np.float32(1.5)).strength == 1.5
    with pytest.raises(ValueError, match="must be a whole number"):
        remedies.nonfinite_skip(0.5)
    assert replace(remedies.zclip(), strength=3).strength == 3.0


def test_an_unknown_setting_is_refused_with_a_suggestion():
    with pytest.raises(
        ValueError, match=r"unknown setting of learner 'ppo' 'num_env' .did you mean 'num_envs'.*; allowed: "
    ):
        ja.learners.ppo("CartPole-v1", num_env=4)
