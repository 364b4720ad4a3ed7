"""Tests the effect of each standard perturbation on a value, and windows, targets, sweeps and chains."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats
from without_baseline import train_without_baseline

import jaxaudit as ja
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import Taps
from jaxaudit.perturbations import conditions, data, dialogues, interventions, optimization, signal, transforms
from jaxaudit.runtime import registry
from jaxaudit.runtime.paths import matches, paths_of

N = 20_000
VALUE = {"a": jnp.linspace(-2.0, 3.0, N), "b": jnp.full((100, 200), 0.5)}
KEY = jax.random.key(7)


def apply(name, value=VALUE, magnitude=None, key=KEY, **context):
    perturbation = registry.perturbations[name](magnitude)
    return jax.jit(lambda key, value: perturbation.apply(value, key, **context))(key, value)


def apply_many(name, value, draws, magnitude=None, **context):
    """Returns the perturbed values under many keys, with a leading axis `[draws]`."""
    keys = jax.random.split(KEY, draws)
    perturbation = registry.perturbations[name](magnitude)
    apply_one = jax.jit(jax.vmap(lambda key: perturbation.apply(value, key, **context)))
    return jax.tree.map(np.asarray, apply_one(keys))


@pytest.mark.parametrize("name", ["observation_noise", "action_noise", "reward_noise", "weight_noise"])
def test_noise_is_gaussian_with_its_magnitude_as_standard_deviation(name):
    std = registry.perturbations[name].magnitude
    noise = jax.tree.map(lambda new, old: np.asarray(new - old, np.float64) / std, apply(name), VALUE)
    for leaf in (noise["a"], noise["b"].ravel()):
        assert stats.kstest(leaf, "norm").pvalue > 1e-3
    assert abs(np.corrcoef(noise["a"], noise["b"].ravel())[0, 1]) < 5 / np.sqrt(N)
    assert abs(np.corrcoef(noise["a"][1:], noise["a"][:-1])[0, 1]) < 5 / np.sqrt(N)


def test_momentum_noise_changes_the_first_moment_only():
    params = {"w": jnp.zeros(N)}
    state = optax.adam(1e-3).init(params)
    noisy = apply("momentum_noise", state, 0.1)
    assert stats.kstest(np.asarray(noisy[0].mu["w"]) / 0.1, "norm").pvalue > 1e-3
    assert (noisy[0].nu["w"] == 0).all()
    assert noisy[0].count == state[0].count


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"actor": state}])
def test_momentum_noise_ignores_layers_named_like_moments(wrap):
    params = {"mu": jnp.zeros(N), "nu": jnp.zeros(N), "trunk": jnp.zeros(N)}
    state = wrap(optax.adam(1e-3).init(params))
    noisy, old = (
        jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "mu"))
        for tree in (apply("momentum_noise", state, 0.1), state)
    )
    noisy, old = noisy[0], old[0]
    assert all(float(jnp.std(noisy.mu[name])) == pytest.approx(0.1, rel=0.1) for name in params)
    jax.tree.map(np.testing.assert_array_equal, noisy.nu, old.nu)


def test_second_moment_drift_scales_the_second_moment_only():
    state = optax.adam(1e-3).init({"w": jnp.zeros(3)})
    state = (state[0]._replace(nu={"w": jnp.array([1.0, 2.0, 3.0])}), *state[1:])
    drifted = apply("second_moment_drift", state, 0.01)
    np.testing.assert_allclose(drifted[0].nu["w"], [0.01, 0.02, 0.03], rtol=1e-6)
    assert (drifted[0].mu["w"] == 0).all()


def test_momentum_noise_refuses_an_optimizer_without_momentum():
    with pytest.raises(ValueError, match="no mu or trace or momentum"):
        apply("momentum_noise", optax.sgd(0.1).init({"w": jnp.zeros(3)}))


def test_gradient_scale_is_one_uniform_factor_for_all_leaves():
    scaled = apply_many("gradient_scale", {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, 400)
    result = np.concatenate([scaled["a"], scaled["b"]], axis=1)
    factors = result[:, 0]
    np.testing.assert_array_equal(result, np.repeat(factors[:, None], 5, axis=1))
    assert stats.kstest(factors, "uniform", args=(0.8, 0.4)).pvalue > 1e-3


@pytest.mark.parametrize("name", ["gradient_sign_flip", "reward_flip"])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_flips_invert_the_given_share(name, share):
    flipped = np.asarray(apply(name, VALUE, share)["b"]).ravel()
    assert set(np.unique(flipped)) == {-0.5, 0.5}
    assert stats.binomtest(int((flipped < 0).sum()), flipped.size, share).pvalue > 1e-3


def test_gradient_mask_zeroes_the_given_share():
    masked = np.asarray(apply("gradient_mask", VALUE, 0.3)["b"]).ravel()
    assert set(np.unique(masked)) == {0.0, 0.5}
    assert stats.binomtest(int((masked == 0).sum()), masked.size, 0.3).pvalue > 1e-3


@pytest.mark.parametrize("name", ["lr_spike", "clip_failure", "reward_scale"])
def test_scaling_perturbations_multiply_by_their_magnitude(name):
    np.testing.assert_allclose(apply(name, jnp.array([0.3, -2.0]), 7.0), [2.1, -14.0], rtol=1e-6)


def test_lr_schedule_error_shifts_the_progress_of_the_schedule():
    def schedule(progress):
        return 1.0 - progress

    def shifted_rate(progress, shift):
        rate = jnp.float32(schedule(progress))
        return float(apply("lr_schedule_error", rate, shift, schedule=schedule, progress=progress))

    assert shifted_rate(0.5, -0.3) == pytest.approx(0.8)
    assert shifted_rate(0.5, 0.2) == pytest.approx(0.3)
    assert shifted_rate(0.1, -0.3) == pytest.approx(1.0), "progress is clipped at 0"


def test_layer_reset_resets_complete_layers_in_the_target_only():
    params = {name: {"kernel": np.zeros((2, 2)), "bias": np.zeros(2)} for name in ("actor_0", "actor_1", "critic_0")}
    fresh = jax.tree.map(np.ones_like, params)
    selected = np.array([path.startswith("actor") for path in paths_of(params)])
    reset = apply_many("layer_reset", params, 60, 1.0, reinitialise=lambda key: fresh, selected=selected)
    counts = dict.fromkeys(params, 0)
    for index in range(60):
        changed = [name for name in params if reset[name]["kernel"][index].sum() > 0]
        assert len(changed) == 1
        assert reset[changed[0]]["bias"][index].sum() == 2, "a layer's bias is reset with its kernel"
        counts[changed[0]] += 1
    assert counts["critic_0"] == 0
    assert min(counts["actor_0"], counts["actor_1"]) > 10


def test_layer_reset_leaves_parameters_outside_layers():
    params = {"actor": {"kernel": np.zeros(2), "bias": np.zeros(1)}, "log_std": np.zeros(2)}
    fresh = jax.tree.map(np.ones_like, params)
    reset = apply_many("layer_reset", params, 20, 1.0, reinitialise=lambda key: fresh, selected=np.ones(3, bool))
    assert (reset["actor"]["kernel"] == 1).all()
    assert (reset["log_std"] == 0).all()
    single = apply(
        "layer_reset",
        {"w": np.zeros(2)},
        1.0,
        reinitialise=lambda key: {"w": jnp.ones(2)},
        selected=np.ones(1, bool),
    )
    assert float(single["w"][0]) == 1.0


@pytest.mark.exhaustive
def test_lr_schedule_error_is_refused_without_a_schedule():
    from quadratic import quadratic

    message = (
        "'lr_schedule_error' needs progress, schedule at site 'learning_rate', which the learner's tap there does not"
    )
    with pytest.raises(ValueError, match=message):
        ja.plan(quadratic(None), [ja.lr_schedule_error(0.1)], seeds=1, steps=10)
    for learner in (ja.learners.trpo, ja.learners.sac, ja.learners.td3):
        with pytest.raises(ValueError, match=message):
            ja.plan(learner("InvertedPendulum-v5"), [ja.lr_schedule_error(0.1)], seeds=1, steps=10)


def test_critic_reset_interpolates_to_new_initial_parameters():
    params = {"critic": {"kernel": jnp.full((2, 2), 2.0)}}

    def fresh(key):
        return {"critic": {"kernel": jax.random.normal(key, (2, 2))}}

    initial = np.asarray(fresh(KEY)["critic"]["kernel"])
    quarter = apply("critic_reset", params, 0.25, reinitialise=fresh)["critic"]["kernel"]
    np.testing.assert_allclose(quarter, 0.75 * 2.0 + 0.25 * initial, rtol=1e-6)
    nan_params = jax.tree.map(lambda x: x * jnp.nan, params)
    np.testing.assert_array_equal(
        apply("critic_reset", nan_params, 1.0, reinitialise=fresh)["critic"]["kernel"], initial
    )


def test_resets_act_separately_on_each_optimizers_parameters():
    """Two optimizers tap the parameters that they train: each has a layer reset, unless a target excludes it."""

    def init(key):
        return {part: {str(i): {"kernel": jnp.zeros(2), "bias": jnp.zeros(1)} for i in range(3)} for part in "ab"}

    def step(params, key, taps):
        for part, label in (("a", "actor"), ("b", "critic")):

            def fresh(key, like=params[part]):
                return jax.tree.map(jnp.ones_like, like)

            params = params | {part: taps("params", params[part], label=label, reinitialise=fresh)}
        reset = {part: sum(layer["kernel"][0] for layer in params[part].values()) for part in "ab"}
        return params, {"performance": reset["a"] + reset["b"], **reset}

    perturbations = [ja.layer_reset(2.0), ja.layer_reset(1.0, target="critic"), ja.critic_reset(1.0)]
    data = ja.audit(ja.Learner(init, step), perturbations, seeds=2, steps=5).telemetry.isel(step=-1)
    assert (data["a"].values[:, 1:] == [2, 0, 0]).all()
    assert (data["b"].values[:, 1:] == [2, 1, 3]).all()


def test_dynamics_shift_and_drift_change_mass_or_the_target():
    def step(x, key, taps):
        factors = taps("dynamics", dict.fromkeys(("friction", "gear", "gravity", "mass"), jnp.float32(1.0)))
        return x, {"performance": x, "factors": jnp.stack([factors[name] for name in sorted(factors)])}

    perturbations = [
        ja.dynamics_shift(-0.5, onset=2),
        ja.dynamics_shift(1.0, onset=2, target="*"),
        ja.dynamics_drift(0.8, onset=2, duration=4, target="gravity"),
    ]
    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    factors = ja.audit(learner, perturbations, seeds=1, steps=8).telemetry["factors"].values[0]
    assert (factors[:, :2] == 1).all()
    np.testing.assert_array_equal(factors[1, 2:], [[1, 1, 1, 0.5]] * 6)
    np.testing.assert_array_equal(factors[2, 2:], [[2, 2, 2, 2]] * 6)
    np.testing.assert_allclose(factors[3, :, 2], [1, 1, 1.2, 1.4, 1.6, 1.8, 1, 1], rtol=1e-6)
    np.testing.assert_array_equal(factors[3, :, [0, 1, 3]], np.ones((3, 8)))


def test_adversarial_observation_takes_the_lowest_of_eight_values():
    """The value is the entry itself: the change is the least of eight uniform numbers, or zero if all are positive."""
    observation = jnp.linspace(-5.0, 5.0, N)[:, None]
    perturbed = apply("adversarial_observation", observation, 0.5, state_value=lambda x: x[:, 0])
    change = np.asarray(perturbed - observation, np.float64)[:, 0] / 0.5
    assert change.min() >= -1 - 1e-5
    assert change.max() == 0
    changed = change[change < 0]
    assert stats.kstest(changed, lambda x: (1 - ((1 - x) / 2) ** 8) / (1 - 0.5**8)).pvalue > 1e-3
    assert stats.binomtest(N - changed.size, N, 0.5**8).pvalue > 1e-3


def test_adversarial_observation_stays_in_its_cube_and_lowers_the_value():
    observation = jax.random.normal(KEY, (200, 3))

    @jax.jit
    def value(x):
        return jnp.where(jnp.arange(200) % 2 == 0, jnp.sin(5 * x).sum(axis=1), jnp.nan)

    perturbed = apply("adversarial_observation", observation, 0.2, state_value=value)
    assert np.abs(perturbed - observation).max() <= 0.2 + 1e-6
    sane = np.arange(200) % 2 == 0
    assert (value(perturbed)[sane] <= value(observation)[sane]).all()
    assert (value(perturbed)[sane] < value(observation)[sane]).mean() > 0.9
    np.testing.assert_array_equal(perturbed[~sane], observation[~sane], "nothing changes where the value is NaN")


def test_adversarial_reward_opposes_the_temporal_difference_error():
    reward = jnp.linspace(-1.0, 1.0, N)

    def td_error(r):
        return r - 0.25

    perturbed = np.asarray(apply("adversarial_reward", reward, 0.5, td_error=td_error))
    change = (perturbed - np.asarray(reward)) / 0.5
    better = np.asarray(td_error(reward)) > 0
    assert (change[better] <= 0).all()
    assert (change[~better] >= 0).all()
    assert np.abs(change).max() <= 1 + 1e-6
    assert np.abs(change).mean() == pytest.approx(7 / 9, abs=0.01), "the mean of the largest of eight uniform numbers"
    unchanged = apply("adversarial_reward", reward, 0.5, td_error=lambda r: r * jnp.nan)
    np.testing.assert_array_equal(unchanged, reward)


SITE_VALUES = {
    "observation": jnp.linspace(-1.0, 2.0, 12).reshape(4, 3),
    "action": jnp.linspace(-1.0, 1.0, 8).reshape(4, 2),
    "reward": jnp.linspace(-1.0, 2.0, 4),
    "dynamics": {"mass": jnp.float32(1.0), "gear": jnp.float32(1.0)},
    "clip_norm": jnp.float32(0.5),
    "learning_rate": jnp.float32(1e-3),
    "optimizer_state": {"mu": jnp.linspace(0.0, 1.0, 5), "nu": jnp.linspace(1.0, 2.0, 5)},
    "params": {"a": {"kernel": jnp.linspace(-1.0, 1.0, 5)}, "critic": {"kernel": jnp.linspace(0.0, 1.0, 5)}},
    "gradient": {"a": jnp.linspace(-1.0, 1.0, 5)},
    "tokens": jnp.arange(12).reshape(3, 4),
    "objective": jnp.float32(2.0),
    "label_smoothing": jnp.zeros(()),
    "difficulty": jnp.linspace(0.0, 2.0, 3),
    "prompt": jnp.array([[1, 2, -1], [3, -1, -1]]),
    "tool_result": jnp.array([[1, 2, -1], [3, -1, -1], [-1, -1, -1], [4, 4, 4]]),
    "behaviour": {"wte": jnp.linspace(-1.0, 1.0, 5), "h": {"kernel": jnp.linspace(0.0, 1.0, 6)}},
    "sampled_logits": jnp.linspace(-1.0, 2.0, 12).reshape(4, 3),
    "temperature": jnp.float32(0.7),
    "log_probability": -jnp.linspace(0.0, 2.0, 12).reshape(4, 3),
    "reward_model": {"kernel": jnp.linspace(-1.0, 1.0, 5)},
    "advantage": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3),
    "gae_lambda": jnp.float32(0.9),
    "kl_coefficient": jnp.float32(0.1),
    "ratio_clip": jnp.array([0.2, 0.28]),
    "reference": {"kernel": jnp.linspace(-1.0, 1.0, 5)},
}
CONTEXT = {
    "begins": jnp.array([False, True, False, False]),
    "valid": jnp.array([True, True, False, True]),
    "ends": jnp.array([False, False, True, False]),
    "state_value": lambda observation: jnp.tanh(observation).sum(axis=-1),
    "td_error": lambda reward: reward - 0.5,
    "schedule": lambda progress: 1e-3 * (1.0 - progress),
    "progress": jnp.float32(0.5),
    "elapsed": jnp.float32(0.5),
    "mask": 99,
    "vocabulary": 100,
    "second_corpus": lambda key: jax.random.randint(key, (3, 4), 50, 60),
    "selected": jnp.array([True, True]),
    "lowest": 0.0,
    "highest": 3.0,
    "tokens": jnp.array([1, 2, 3]),
    "called": jnp.array([True, True, False, True]),
    "error": jnp.array([7, 8, -1]),
    "rare": jnp.arange(9)[::-1],
    "own": jnp.arange(12).reshape(4, 3) % 3 > 0,
    "lengths": jnp.array([1.0, 2.0, 3.0, 0.0]),
    "bound": 1.0,
    "policy": {"kernel": jnp.linspace(0.0, 2.0, 5)},
    "reinitialise": lambda key: jax.tree.map(lambda x: x + jax.random.normal(key, x.shape), SITE_VALUES["params"]),
}


@pytest.mark.exhaustive
def test_every_perturbation_is_the_same_under_jit_and_vmap():
    defaults = {name: registry.perturbations[name] for name in registry.perturbations}

    def apply_all(key, factor):
        changed = {}
        for name, default in defaults.items():
            value = jax.tree.map(
                lambda x: x * factor if jnp.issubdtype(x.dtype, jnp.floating) else x, SITE_VALUES[default.site]
            )
            context = {need: CONTEXT[need] for need in default.needs}

            def apply_again(state, turn, value=value, default=default, context=context):
                shifted = jax.tree.map(lambda x: x + turn, value)
                return default.apply(key, shifted, default.magnitude, state, **context)[::-1]

            sizes = (default.magnitude,) if default.sized else ()
            _, values = jax.lax.scan(apply_again, default.init(value, *sizes), jnp.arange(3))
            changed[name] = jax.tree.map(lambda x: x[-1], values)
        return changed

    keys, factors = jax.random.split(KEY, 3), jnp.array([1.0, 0.5, jnp.nan])
    batched = jax.jit(jax.vmap(apply_all))(keys, factors)
    apply_single = jax.jit(apply_all)
    for lane in range(3):
        expected = apply_single(keys[lane], factors[lane])
        for name in defaults:
            for result, expected_leaf in zip(
                jax.tree.leaves(batched[name]), jax.tree.leaves(expected[name]), strict=True
            ):
                np.testing.assert_allclose(result[lane], expected_leaf, rtol=1e-6, err_msg=name)
                assert lane == 2 or np.isfinite(result[lane]).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantize_rounds_to_a_uniform_grid(bits):
    values = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
    rounded = np.asarray(apply("quantize", values, float(bits)), np.float64)
    unit = np.abs(values).max() / (2 ** (bits - 1) - 1)
    assert len(np.unique(rounded)) <= 2**bits - 1
    assert np.abs(rounded - np.asarray(values)).max() <= unit / 2 * (1 + 1e-5)
    np.testing.assert_allclose(rounded / unit, np.round(rounded / unit), atol=1e-4)


def test_every_default_is_in_range_and_is_not_neutral():
    for name in registry.perturbations:
        default = registry.perturbations[name]
        assert default.limits[0] <= default.magnitude <= default.limits[1]
        assert default.magnitude != default.neutral
        assert registry.perturbations[name].__doc__


@pytest.mark.parametrize(
    ("window", "open_steps"),
    [
        (ja.window(3, 2), [3, 4]),
        (ja.window(0.5, "once"), [5]),
        (ja.window(7, "end"), [7, 8, 9]),
        (ja.window(1, 1, period=3), [1, 4, 7]),
        (ja.window(2, 2, period=5), [2, 3, 7, 8]),
    ],
)
def test_windows_are_open_at_the_right_steps(window, open_steps):
    scaled = ja.reward_scale(5.0, onset=window.onset, duration=window.duration, period=window.period)
    performance = ja.audit(REWARDED, [scaled], seeds=1, steps=10).telemetry["performance"].values[0, 1]
    assert [int(t) for t in np.flatnonzero(performance == 5.0)] == open_steps
    assert ((performance == 1.0) | (performance == 5.0)).all()


def rewarded(x, key, taps):
    return x, {"performance": taps("reward", jnp.float32(1.0))}


REWARDED = ja.Learner(lambda key: jnp.zeros(()), rewarded)


def test_sweeps_and_chains_expand_to_all_combinations():
    spike = ja.lr_spike(ja.sweep(3.0, 10.0))
    assert [c.magnitude for c in conditions([spike], 100)] == [3.0, 10.0]
    chained = conditions([ja.chain(spike, ja.weight_noise(ja.sweep(0.1, 0.2)))], 100)
    assert [tuple(p.magnitude for p in c.parts) for c in chained] == [(3, 0.1), (3, 0.2), (10, 0.1), (10, 0.2)]
    assert [c.magnitude for c in chained] == [3, 3, 10, 10]
    second = conditions([ja.chain(ja.lr_spike(5.0), ja.weight_noise(ja.sweep(0.1, 0.2)))], 100)
    assert [c.magnitude for c in second] == [0.1, 0.2]
    assert chained[0].name == "lr_spike+weight_noise"
    assert chained[0].dimension == "mixed"


def test_targets_match_consecutive_path_components():
    assert matches("critic", "critic/Dense_0/kernel")
    assert matches("Dense_*/kernel", "critic/Dense_0/kernel")
    assert not matches("kernel/critic", "critic/Dense_0/kernel")
    assert not matches("crit", "critic/Dense_0/kernel")


def test_a_target_limits_a_perturbation_to_part_of_the_tree():
    def init(key):
        return {"actor": jnp.ones(3), "critic": jnp.ones(3)}

    def step(params, key, taps):
        params = taps("params", params)
        return params, {"performance": jnp.sum(params["actor"]), "critic": jnp.sum(params["critic"])}

    noise = [ja.weight_noise(1.0, onset=2, target="critic"), ja.weight_noise(1.0, onset=2)]
    data = ja.audit(ja.Learner(init, step), noise, seeds=2, steps=5).telemetry
    targeted, everywhere = data.isel(condition=1), data.isel(condition=2)
    assert (targeted["performance"] == 3).all()
    assert (targeted["critic"][:, 2:] != 3).all()
    assert (everywhere["critic"][:, 2:].values == targeted["critic"][:, 2:].values).all(), (
        "the target does not change the random numbers"
    )
    assert (everywhere["performance"][:, 2:] != 3).all()


def test_taps_have_different_randomness_at_every_call_step_and_seed():
    def step(x, key, taps):
        first, second = taps("reward", x), taps("reward", x)
        looped, _ = (
            jax.lax.scan(
                lambda c, i: (c + 0 * taps.fold_in(i)("reward", x), taps.fold_in(i)("reward", x)), x, jnp.arange(3, 6)
            ),
            None,
        )
        _, first_loop = taps.scan(lambda taps, c, _: (c, taps("reward", x)), x, length=3)
        _, second_loop = taps.scan(lambda taps, c, _: (c, taps("reward", x)), x, length=3)
        draws = jnp.stack([first, second, *looped[1], *first_loop, *second_loop])
        return x, {"performance": x, "draws": draws}

    learner = ja.Learner(lambda key: jnp.float32(0.0), step)
    chained = ja.chain(ja.reward_noise(1.0, onset=0), ja.reward_noise(1.0, onset=0))
    data = train_without_baseline(learner, [ja.reward_noise(1.0, onset=0), chained], seeds=3, steps=4)["draws"]
    assert np.unique(data[:, 1]).size == data[:, 1].size
    assert np.unique(np.concatenate([data[:, 1].ravel(), data[:, 2].ravel()])).size == 2 * data[:, 1].size


def test_find_sites_lists_sites_paths_and_context():
    def step(x, key, taps):
        taps("params", {"w": x}, label="critic", reinitialise=None)
        return x, {"performance": taps("my_site", x).sum()}

    sites = find_sites(ja.Learner(lambda key: jnp.zeros(3), step))
    assert sites.paths == {"state": ("",), "params": ("critic/w",), "my_site": ("",)}
    assert sites.context["params"] == {"reinitialise"}


def test_taps_outside_an_audit_return_the_value_itself():
    value = {"w": jnp.arange(3.0)}
    assert Taps()("gradient", value) is value


TOKENS = jnp.arange(200 * 65).reshape(200, 65) % 90


@pytest.mark.parametrize("share", [0.05, 0.4])
def test_token_corruption_masks_the_given_share_uniformly(share):
    masked = np.asarray(apply("token_corruption", TOKENS, share, mask=99) == 99)
    assert stats.binomtest(int(masked.sum()), masked.size, share).pvalue > 1e-3
    for axis in (0, 1):
        counts = masked.sum(axis)
        expected = share * masked.shape[axis]
        assert stats.chisquare(counts, np.full(counts.shape, counts.mean())).pvalue > 1e-3, expected
    untouched = apply("token_corruption", TOKENS, share, mask=99)[~masked]
    np.testing.assert_array_equal(untouched, TOKENS[~masked])


def test_token_replacement_samples_the_vocabulary_uniformly():
    replaced = np.asarray(apply("token_replacement", TOKENS, 1.0, vocabulary=90))
    assert replaced.dtype == TOKENS.dtype
    assert stats.chisquare(np.bincount(replaced.ravel(), minlength=90)).pvalue > 1e-3
    differs = np.asarray(apply("token_replacement", TOKENS, 0.1, vocabulary=90) != TOKENS)
    assert stats.binomtest(int(differs.sum()), differs.size, 0.1 * 89 / 90).pvalue > 1e-3


@pytest.mark.parametrize(
    ("name", "context", "share"),
    [
        ("distribution_shift", {}, 0.3),
        ("distribution_drift", {"elapsed": 0.5}, 0.15),
    ],
)
def test_a_share_of_sequences_comes_from_the_second_corpus(name, context, share):

    def second_corpus(key):  # the tokens encode the key
        return jnp.full(TOKENS.shape, 100) + jax.random.key_data(key)[-1].astype(jnp.int32) % 2**30

    mixed = apply_many(name, TOKENS, 20, 0.3, second_corpus=second_corpus, **context)
    from_second = mixed >= 100
    assert (from_second.all(2) == from_second.any(2)).all()
    assert stats.binomtest(int(from_second.all(2).sum()), 20 * len(TOKENS), share).pvalue > 1e-3
    assert np.unique(mixed[from_second]).size == 20


def test_label_smoothing_replaces_the_value():
    assert apply("label_smoothing", jnp.zeros(()), 0.2) == jnp.float32(0.2)


@pytest.mark.parametrize(
    ("bits", "dtype"), [(7, jnp.bfloat16), (10, jnp.float16), (3, jnp.float8_e4m3fn), (2, jnp.float8_e5m2)]
)
def test_quantize_float_rounds_as_the_dtypes_with_these_bits(bits, dtype):
    value = {"w": jnp.asarray(np.random.default_rng(0).uniform(0.1, 2.0, 5000) * np.tile([1, -1], 2500), jnp.float32)}
    rounded = apply("quantize_float", value, float(bits))["w"]
    np.testing.assert_array_equal(rounded, value["w"].astype(dtype).astype(jnp.float32))
    zeros = apply("quantize_float", {"w": jnp.zeros(3)}, float(bits))["w"]
    np.testing.assert_array_equal(zeros, 0.0)


MODULES = (data, dialogues, interventions, dialogues, optimization, optimization, dialogues, signal)


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_doctests_pass(module):
    doctests = doctest.testmod(module)
    assert doctests.attempted > 0
    assert doctests.failed == 0


def test_every_kind_has_a_doctest():
    for registered in (registry.perturbations, registry.interventions):
        for name in registered:
            assert (
                f">>> {name}(" in registered[name].__doc__ or f"{name}(" in registered[name].__doc__.partition(">>>")[2]
            ), name


def test_a_custom_kind_has_its_defaults_and_docstring():
    @ja.perturbation("signal", "gradient", magnitude=0.5, neutral=0.0, duration=10)
    def gradient_bias(key, value, magnitude):
        """Adds a constant to every entry of the gradient."""
        return jax.tree.map(lambda g: g + magnitude, value)

    try:
        assert float(gradient_bias(2.0).apply(1.0)) == 3.0
        assert gradient_bias.__doc__ == "Adds a constant to every entry of the gradient."
        assert gradient_bias(onset=5).when == ja.window(5, 10)
    finally:
        del registry.perturbations._entries["gradient_bias"]


@pytest.mark.parametrize("jointly", [True, False])
@pytest.mark.parametrize("name", ["weight_noise", "gradient_sign_flip", "gradient_mask"])
def test_leaves_of_a_tree_are_disturbed_independently(monkeypatch, name, jointly):
    """Random numbers of a small tree are drawn jointly, of a large one by leaf; equal leaves get different ones."""
    monkeypatch.setattr(transforms, "JOINT_DRAW_LIMIT", 2**20 if jointly else 1)
    tree = {"a": jnp.ones((40, 50)), "b": jnp.ones((40, 50)), "c": jnp.ones(3), "d": jnp.float32(1.0)}
    changed = registry.perturbations[name](0.5).apply(tree, jax.random.key(3))
    assert jax.tree.map(jnp.shape, changed) == jax.tree.map(jnp.shape, tree)
    leaf_a, leaf_b = (np.ravel(changed[leaf]) for leaf in "ab")
    assert abs(stats.pearsonr(leaf_a, leaf_b).statistic) < 5 / np.sqrt(leaf_a.size)
    for leaf in (leaf_a, leaf_b):
        if name == "weight_noise":
            assert stats.kstest(leaf, stats.norm(1, 0.5).cdf).pvalue > 1e-4
        else:
            assert stats.binomtest(int((leaf != 1).sum()), leaf.size, 0.5).pvalue > 1e-4


def test_the_default_window_begins_at_30_percent():
    assert ja.lr_spike.when == ja.window(0.3, 10)
