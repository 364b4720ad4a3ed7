"""Tests TRPO's step against float64 NumPy, its line search, its perturbation sites, and TRPO on InvertedPendulum."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe_tasks import UNNORMALIZED_SETTINGS, ProbeTask
from without_baseline import train_without_baseline

import jaxaudit as ja
from jaxaudit.core.perturbation import stateless
from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl.on_policy import Samples
from jaxaudit.learners.rl.trpo import TRPO, TRPOSettings, _root_mean_square_norm, line_search

WIDTH, SAMPLES, DELTA, DAMPING = 5, 64, 0.01, 0.1
OPEN = slice(4, 6)


class Wide(ProbeTask):
    """A task of which only the sizes matter: three observations and two actions."""

    action_low, action_high = np.full(2, -2.0, np.float32), np.full(2, 2.0, np.float32)
    observation_size, action_size = 3, 2


@pytest.fixture(scope="module")
def agent():
    settings = {
        "num_envs": 2,
        "rollout_length": SAMPLES // 2,
        "minibatch_size": 16,
        "hidden": (WIDTH,),
        "log_std": -0.3,
    }
    return TRPO(Wide(None, False), 16, TRPOSettings(**settings, cg_steps=60, critic_epochs=2))


@pytest.fixture(scope="module")
def params(agent):
    """Returns parameters that are perturbed away from their initial values."""
    rng = np.random.default_rng(0)
    initial = jax.jit(agent.init_params)(jax.random.key(0))
    return jax.tree.map(lambda p: jnp.asarray(p + np.float32(rng.normal(0, 0.3, p.shape))), initial)


@pytest.fixture(scope="module")
def policy(params):
    return {name: params[name] for name in ("actor", "log_std")}


@pytest.fixture(scope="module")
def batch(agent, params):
    rng = np.random.default_rng(1)
    observation = rng.normal(size=(SAMPLES, 3)).astype(np.float32)
    mean, log_std = map(np.asarray, jax.jit(agent.policy)(params, observation))
    action = mean + np.exp(log_std) * rng.normal(size=(SAMPLES, 2))
    z = (action - mean) * np.exp(-log_std)
    log_probability = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
    advantage = rng.normal(size=SAMPLES) + z[:, 0]
    advantage = (advantage - advantage.mean()) / advantage.std()
    target = rng.normal(size=SAMPLES)
    columns = (observation, action, log_probability, 0 * target, advantage, target)
    return Samples(*(jnp.asarray(x, jnp.float32) for x in columns))


def float64(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def flat64(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(float64(tree))])


def reference_policy(policy, observation):
    """Returns means, log standard deviations and hidden units of a network with one hidden layer, in float64."""
    p, x = float64(policy), np.asarray(observation, np.float64)
    first, second = p["actor"]["Dense_0"], p["actor"]["Dense_1"]
    hidden = np.tanh(x @ first["kernel"] + first["bias"])
    return hidden @ second["kernel"] + second["bias"], p["log_std"], hidden


def reference_fisher(policy, observation):
    """Returns E[score score'] of the Gaussian by the network's written-out Jacobian; leaves are in JAX's order."""
    _, log_std, hidden = reference_policy(policy, observation)
    x = np.asarray(observation, np.float64)
    n, actions = len(x), len(log_std)
    out = float64(policy)["actor"]["Dense_1"]["kernel"]
    inner = (1 - hidden**2)[:, :, None] * out[None]
    jacobian = np.zeros((n, actions, len(flat64(policy))))
    for k in range(actions):
        unit = np.eye(actions)[k]
        pieces = [
            inner[:, :, k],
            np.einsum("ni,nj->nij", x, inner[:, :, k]).reshape(n, -1),
            np.broadcast_to(unit, (n, actions)),
            np.einsum("nj,k->njk", hidden, unit).reshape(n, -1),
            np.zeros((n, actions)),
        ]
        jacobian[:, k] = np.concatenate(pieces, axis=1)
    fisher = np.einsum("nka,k,nkb->ab", jacobian, np.exp(-2 * log_std), jacobian) / n
    fisher[-actions:, -actions:] += 2 * np.eye(actions)
    return fisher


def reference_divergence(old, new, observation):
    """Returns the mean KL(old || new) by the textbook formula."""
    (a, la, _), (b, lb, _) = reference_policy(old, observation), reference_policy(new, observation)
    va, vb = np.exp(2 * la), np.exp(2 * lb)
    return (0.5 * (np.log(vb / va) + (va + (a - b) ** 2) / vb - 1)).sum(-1).mean()


def reference_surrogate(policy, batch):
    mean, log_std, _ = reference_policy(policy, batch.observation)
    z = (np.asarray(batch.action, np.float64) - mean) / np.exp(log_std)
    log_probability = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1)
    ratio = np.exp(log_probability - np.asarray(batch.log_probability, np.float64))
    return (ratio * np.asarray(batch.advantage, np.float64)).mean()


def equal(a, b):
    return all(
        np.array_equal(x, y, equal_nan=True) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.fixture(scope="module")
def gradient(agent, policy, batch):
    return jax.jit(jax.grad(agent.loss))(policy, batch)


@pytest.fixture(scope="module")
def propose(agent, policy, batch):
    """Returns a function from a gradient to the natural-gradient step that descends it."""
    return jax.jit(lambda gradient: agent.proposal(policy, gradient, batch, DELTA))


def test_the_natural_step_equals_a_dense_float64_solve(policy, batch, gradient, propose):
    proposal = propose(gradient)
    matrix = reference_fisher(policy, batch.observation) + DAMPING * np.eye(len(flat64(policy)))
    g = flat64(gradient)
    x = np.linalg.solve(matrix, g)
    expected = -np.sqrt(2 * DELTA / (x @ matrix @ x)) * x
    assert np.linalg.norm(flat64(proposal.change) - expected) < 1e-5 * np.linalg.norm(expected)
    assert float(proposal.residual) < 1e-5
    longer = propose(jax.tree.map(lambda leaf: np.float32(1e25) * np.asarray(leaf), gradient))
    np.testing.assert_allclose(flat64(longer.change), expected, rtol=1e-3, atol=1e-6)


def test_the_residual_of_few_conjugate_gradient_steps_is_reported(agent, policy, batch, gradient):
    short = TRPO(agent.env, 16, TRPOSettings(hidden=(WIDTH,), cg_steps=3))
    proposal = jax.jit(short.proposal)(policy, gradient, batch, DELTA)
    matrix = reference_fisher(policy, batch.observation) + DAMPING * np.eye(len(flat64(policy)))
    change, g = flat64(proposal.change), flat64(gradient)
    direction = g / np.linalg.norm(g)
    length = np.sqrt(change @ matrix @ change / (2 * DELTA))
    assert length == pytest.approx(1, rel=1e-5)
    fitted = matrix @ change / (change @ matrix @ change) * (change @ direction)
    assert float(proposal.residual) == pytest.approx(np.linalg.norm(direction - fitted), rel=1e-3)


def test_the_surrogates_gradient_and_the_kl_equal_float64(agent, policy, batch):
    parts = jax.jit(agent.gradients)(policy, batch)
    gradient = flat64(jax.tree.map(lambda g: np.asarray(g, np.float64).mean(0), parts))
    origin, structure = jax.tree.flatten(float64(policy))
    slopes = []
    for index, leaf in enumerate(origin):
        for position in np.ndindex(leaf.shape):
            ends = []
            for sign in (1, -1):
                moved = leaf.copy()
                moved[position] += sign * 1e-5
                changed = structure.unflatten([*origin[:index], moved, *origin[index + 1 :]])
                ends.append(reference_surrogate(changed, batch))
            slopes.append(-(ends[0] - ends[1]) / 2e-5)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-3, atol=1e-5)
    moved = jax.tree.map(lambda p: np.asarray(p) + np.float32(0.05), policy)
    divergence = jax.jit(lambda *policies: agent.head.kl(*(agent.policy(p, batch.observation) for p in policies)))
    expected = reference_divergence(policy, moved, batch.observation)
    assert np.mean(divergence(policy, moved)) == pytest.approx(expected, rel=1e-4)


@pytest.fixture(scope="module")
def change(propose, gradient):
    return propose(gradient).change


@pytest.fixture(scope="module")
def search(agent, policy, batch):
    """Returns a line search along a change, which begins with a given step length."""
    measure = agent.comparison(policy, batch)
    limits = {"max_kl": DELTA, "factor": 0.8, "max_backtracks": 10}
    return jax.jit(lambda change, first: line_search(measure, policy, change, first_length=first, **limits))


@pytest.mark.parametrize("first_length", [0.5, 1.0, 3.0])
def test_the_line_search_takes_the_first_step_within_the_trust_region(search, policy, change, batch, first_length):
    result = search(change, first_length)
    before = reference_surrogate(policy, batch)
    for backtracks in range(11):
        length = first_length * 0.8**backtracks
        candidate = jax.tree.map(lambda p, c, length=length: p + length * c, float64(policy), float64(change))
        divergence = reference_divergence(policy, candidate, batch.observation)
        gain = reference_surrogate(candidate, batch) - before
        if divergence <= DELTA and gain > 0:
            break
    assert bool(result.accepted)
    assert int(result.backtracks) == backtracks
    assert float(result.length) == pytest.approx(length, rel=1e-6)
    assert float(result.kl) == pytest.approx(divergence, rel=1e-3)
    assert float(result.gain) == pytest.approx(gain, rel=1e-3)
    np.testing.assert_allclose(flat64(result.params), flat64(candidate), rtol=1e-5, atol=1e-6)
    assert reference_divergence(policy, result.params, batch.observation) <= DELTA * (1 + 1e-4)


def test_layer_norms_are_root_mean_squares_over_minibatches(params, batch):
    """The critic's norms are root mean squares over the minibatches of its first epoch, here a single one."""
    settings = {"num_envs": 2, "rollout_length": SAMPLES // 2, "minibatch_size": SAMPLES, "hidden": (WIDTH,)}
    agent, critic = TRPO(Wide(None, False), 16, TRPOSettings(**settings, critic_epochs=2)), params["critic"]
    optimizer = agent.optimizer.init(critic)
    samples = jax.tree.map(lambda x: x.reshape(SAMPLES // 2, 2, *x.shape[1:]), batch)
    *_, norms = jax.jit(lambda c: agent.fit_critic(c, optimizer, samples, jax.random.key(0), Taps(0, 1)))(critic)
    gradient = jax.jit(jax.grad(agent.value_loss))(critic, batch)
    chex.assert_trees_all_close(norms, jax.tree.map(lambda g: np.sqrt((g**2).sum()), gradient), rtol=1e-4)
    several = np.random.default_rng(0).normal(size=(5, 3, 2))
    expected = np.sqrt((several**2).sum((1, 2)).mean())
    assert float(_root_mean_square_norm(jnp.asarray(several))) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("max_backtracks", "accepted"), [(2, False), (3, True), (4, True)])
def test_the_line_search_backtracks_at_most_max_backtracks_times(max_backtracks, accepted):
    """The third backtrack is the first within the trust region: 0.5^3 <= 0.2 < 0.5^2."""
    result = line_search(
        lambda x: (jnp.abs(x), jnp.float32(1.0)),
        jnp.float32(0.0),
        jnp.float32(1.0),
        max_kl=0.2,
        first_length=1.0,
        factor=0.5,
        max_backtracks=max_backtracks,
    )
    assert (bool(result.accepted), int(result.backtracks)) == (accepted, min(max_backtracks, 3))
    assert float(result.params) == (0.125 if accepted else 0.0)


REJECTED_CHANGES = {
    "uphill": lambda change: jax.tree.map(lambda c: -c, change),
    "too far": lambda change: jax.tree.map(lambda c: np.float32(1e3) * c, change),
    "zero": lambda change: jax.tree.map(np.zeros_like, change),
    "nan": lambda change: change | {"log_std": np.r_[np.float32(np.nan), change["log_std"][1:]]},
    "infinite": lambda change: change | {"log_std": np.r_[np.float32(np.inf), change["log_std"][1:]]},
}


def test_a_rejected_step_keeps_the_old_policy_bitwise(search, policy, change):
    change = jax.tree.map(np.asarray, change)
    changes = jax.tree.map(
        lambda *leaves: np.stack(leaves), change, *(bad(change) for bad in REJECTED_CHANGES.values())
    )
    results = jax.jit(jax.vmap(search, (0, None)))(changes, 1.0)
    np.testing.assert_array_equal(results.accepted, [True] + len(REJECTED_CHANGES) * [False])
    for lane in range(1, 1 + len(REJECTED_CHANGES)):
        result = jax.tree.map(lambda leaf, lane=lane: np.asarray(leaf)[lane], results)
        assert equal(result.params, policy)
        assert (int(result.backtracks), float(result.length), float(result.kl), float(result.gain)) == (10, 0, 0, 0)


class ScalingTaps(Taps):
    """Taps that multiply the policy's gradient."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def __call__(self, site, value, *, label="", **context):
        return jax.tree.map(lambda g: self.factor * g, value) if (site, label) == ("gradient", "") else value


@pytest.fixture(scope="module")
def improve(agent, params, batch):
    """Returns a function from a factor of the policy's gradient to the improved parameters and the telemetry."""
    samples = jax.tree.map(lambda x: np.reshape(x, (SAMPLES // 2, 2, *x.shape[1:])), batch)
    optimizer = jax.jit(agent.optimizer.init)(params["critic"])

    def improve_once(factor):
        improved, _, telemetry = agent.improve(params, optimizer, samples, jax.random.key(0), ScalingTaps(factor))
        return improved, telemetry

    return improve_once


FACTORS = (1.0, jnp.nan, jnp.inf, 0.0)


@pytest.fixture(scope="module")
def lanes(improve):
    """Returns the improvements of all factors, computed by vmap."""
    return jax.jit(jax.vmap(improve))(jnp.array(FACTORS))


@pytest.mark.parametrize("lane", range(1, len(FACTORS)))
def test_an_invalid_policy_gradient_changes_the_critic_only(lanes, params, lane):
    (improved, telemetry), (normal, _) = (jax.tree.map(lambda x, k=k: np.asarray(x)[k], lanes) for k in (lane, 0))
    assert equal([improved["actor"], improved["log_std"]], [params["actor"], params["log_std"]])
    assert equal(improved["critic"], normal["critic"])
    assert not equal(improved["critic"], params["critic"])
    assert float(telemetry["accepted"]) == 0
    assert np.isfinite(telemetry["gradient_norm"]) == (FACTORS[lane] == 0)


@pytest.mark.slow
def test_a_vmapped_lane_equals_a_single_one_to_rounding(lanes, improve):
    for batched, single in zip(jax.tree.leaves(lanes), jax.tree.leaves(jax.jit(improve)(1.0)), strict=True):
        np.testing.assert_allclose(batched[0], single, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def audited():
    """Returns telemetry by condition of an audit of TRPO: forks at step 0, windows over steps 4 and 5 of 7."""
    settings = TRPOSettings(
        **(UNNORMALIZED_SETTINGS | {"num_envs": 2, "telemetry": "full"}), hidden=(8,), critic_epochs=2
    )
    probe = TRPO(ProbeTask(lambda a: -((a - 0.5) ** 2), False), 16, settings)
    layers = ja.Channel.vector("layer", probe.layers)
    learner = ja.Learner(probe.init, probe.step, channels={"layer_gradient_norm": layers})
    when = {"onset": OPEN.start, "duration": OPEN.stop - OPEN.start}
    tight = ja.Kind("tight", "optimization", "trust_region", stateless(scaled), 0.1, neutral=1.0)(**when)
    rate = ja.lr_spike(1.0, onset=0, duration="end")
    moments = ja.momentum_noise(0.0, onset=0, duration="end")
    conditions = {
        "neutral": ja.chain(rate, moments, dataclasses.replace(tight, magnitude=1.0)),
        "actor": ja.chain(moments, ja.lr_spike(1e6, target="actor", **when)),
        "critic": ja.chain(moments, ja.lr_spike(100.0, target="critic", **when)),
        "both": ja.chain(moments, ja.lr_spike(3.0, **when)),
        "tight": ja.chain(rate, tight),
        "moments": ja.chain(rate, ja.momentum_noise(10.0, target="critic", **when)),
    }
    telemetry = train_without_baseline(learner, list(conditions.values()), seeds=2, steps=7)
    return {
        name: {channel: values[:, index] for channel, values in telemetry.items()}
        for index, name in enumerate(["control", *conditions])
    }


def scaled(key, value, magnitude):
    return value * magnitude


@pytest.mark.exhaustive
def test_a_neutral_lane_equals_its_control_bitwise(audited):
    for name, series in audited["control"].items():
        np.testing.assert_array_equal(series, audited["neutral"][name], err_msg=name)


@pytest.mark.exhaustive
def test_a_perturbation_acts_from_the_start_of_its_window(audited):
    for lane, telemetry in audited.items():
        for name, series in audited["control"].items():
            np.testing.assert_array_equal(series[:, : OPEN.start], telemetry[name][:, : OPEN.start], err_msg=name)
        control = in_window(audited["control"])
        affected = [
            name for name, x in in_window(telemetry).items() if not np.array_equal(x, control[name], equal_nan=True)
        ]
        assert bool(affected) == (lane not in ("control", "neutral")), lane


def in_window(lane):
    """Returns the part of a lane's telemetry within the window."""
    return {name: series[:, OPEN] for name, series in lane.items()}


@pytest.mark.exhaustive
def test_the_line_search_rejects_steps_of_a_learning_rate_spike(audited):
    spiked, control = in_window(audited["actor"]), in_window(audited["control"])
    assert (spiked["accepted"] == 0).all()
    assert (spiked["approximate_kl"] == 0).all()
    assert (spiked["step_length"] == 0).all()
    assert (spiked["backtracks"] == 10).all()
    assert (control["accepted"] == 1).all()
    assert (control["approximate_kl"] <= DELTA).all()
    np.testing.assert_array_equal(spiked["learning_rate"], control["learning_rate"])


def test_lr_spike_acts_on_the_targeted_network_only(audited):
    control = in_window(audited["control"])
    for name, factor in (("critic", 100), ("both", 3)):
        np.testing.assert_allclose(in_window(audited[name])["learning_rate"], factor * control["learning_rate"])
    np.testing.assert_array_equal(in_window(audited["critic"])["step_length"][:, 0], control["step_length"][:, 0])
    assert (in_window(audited["both"])["backtracks"] > control["backtracks"]).all()


def test_trust_region_and_critic_moments_can_be_perturbed(audited):
    tight = in_window(audited["tight"])
    assert (tight["approximate_kl"] <= 0.1 * DELTA).all()
    assert (tight["accepted"] == 1).all()
    control, noisy = in_window(audited["control"])["value_loss"], in_window(audited["moments"])["value_loss"]
    assert (abs(noisy - control)[:, 1] > 1e-4).all()


@pytest.mark.parametrize("invalid", [{"max_kl": 0.0}, {"backtrack_factor": 1.0}, {"cg_steps": 0}, {"damping": -0.1}])
def test_invalid_settings_are_refused(invalid):
    with pytest.raises(ValueError, match=next(iter(invalid))):
        TRPOSettings(**invalid)


@pytest.mark.slow
def test_trpo_learns_inverted_pendulum():
    """The evaluation return reaches 950 within 60,000 environment steps on at least 3 of 4 seeds."""
    learner = ja.learners.trpo("InvertedPendulum-v5", num_envs=4, rollout_length=128, evaluations=6, telemetry="basic")
    steps = 115
    grid = ja.plan(learner, [ja.lr_spike(1.0, onset=steps - 1, duration=1)], seeds=4, steps=steps, tail=0)
    baseline, _ = ja.compiled(grid.program)(ja.inputs(grid))
    assert steps * learner.samples_per_step < 60_000
    best = np.nanmax(np.asarray(baseline["evaluation_return"])[:, :4], axis=0)
    assert (best >= 950).sum() >= 3, best
