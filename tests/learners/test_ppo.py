"""Tests PPO's parts against independent implementations, its entropy bonus, and PPO on InvertedPendulum."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probe_tasks import UNNORMALIZED_SETTINGS, ProbeTask, train
from scipy import stats

import jaxaudit as ja
from jaxaudit.core.optimizer import Optimizer, linear_to_zero
from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl.on_policy import Moments, Samples
from jaxaudit.learners.rl.ppo import PPO, PPOSettings

SMALL = UNNORMALIZED_SETTINGS | {"hidden": (16,)}


@pytest.mark.parametrize("coefficient", [0.08, pytest.param(0.5, marks=pytest.mark.slow)])
def test_the_entropy_bonus_gives_the_closed_form_standard_deviation(coefficient):
    """The maximum of E[-(a - 0.5)^2] + c log(std) is at std = sqrt(c / 2)."""
    settings = PPOSettings(**SMALL, entropy_coefficient=coefficient, normalize_advantages=False)
    agent = PPO(ProbeTask(lambda a: -((a - 0.5) ** 2), True), 16, settings)
    state, _ = jax.jit(lambda: train(agent, 300))()
    assert float(jnp.exp(state.params["log_std"][0])) == pytest.approx((coefficient / 2) ** 0.5, rel=0.1)


def test_the_loss_equals_float64_numpy():
    rng = np.random.default_rng(1)
    agent = PPO(ProbeTask(lambda a: a, True), 16, PPOSettings())
    params = jax.jit(agent.init_params)(jax.random.key(0))
    n = 64
    batch = Samples(
        observation=rng.normal(size=(n, 1)),
        action=rng.normal(size=(n, 1)),
        log_probability=rng.normal(-1.4, 0.3, n),
        value=rng.normal(size=n),
        advantage=rng.normal(1.0, 2.0, n),
        target=rng.normal(size=n),
    )
    predict = jax.jit(lambda params, x: (*agent.policy(params, x), agent.value(params, x)))
    mean, log_std, value = (np.asarray(x, np.float64) for x in predict(params, np.float32(batch.observation)))
    ratio = np.exp(stats.norm(mean, np.exp(log_std)).logpdf(batch.action).sum(-1) - batch.log_probability)
    advantage = (batch.advantage - batch.advantage.mean()) / (batch.advantage.std() + 1e-8)
    policy = -np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage).mean()
    clipped_value = batch.value + np.clip(value - batch.value, -0.2, 0.2)
    critic = 0.5 * np.maximum((value - batch.target) ** 2, (clipped_value - batch.target) ** 2).mean()
    entropy = stats.norm(0, np.exp(log_std)).entropy().sum()
    loss, parts = jax.jit(agent.loss)(params, jax.tree.map(np.float32, batch), agent.settings.entropy_coefficient)
    np.testing.assert_allclose(parts["policy_loss"], policy, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(parts["value_loss"], critic, rtol=1e-4)
    np.testing.assert_allclose(loss, policy + 0.5 * critic - 0.01 * entropy, rtol=1e-4, atol=1e-6)


def test_the_optimizer_equals_optax_adam_after_clipping():
    optimizer = Optimizer(optax.scale_by_adam(eps=1e-5), linear_to_zero(0.01), max_norm=0.5)
    rng = np.random.default_rng(2)
    params = {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
    expected, result = params, params
    schedule = optax.linear_schedule(0.01, 0.0, 20)
    reference = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(schedule, eps=1e-5))
    reference_state, result_state = reference.init(params), optimizer.init(params)
    update = jax.jit(lambda params, state, gradient, index: optimizer.update(params, state, gradient, Taps(index, 20)))
    reference_update = jax.jit(reference.update)
    for index in range(20):
        gradient = {"w": jnp.asarray(rng.normal(size=(4, 3)) * (0.1 if index % 2 else 10), jnp.float32)}
        change, reference_state = reference_update(gradient, reference_state, expected)
        expected = optax.apply_updates(expected, change)
        result, result_state, metrics = update(result, result_state, gradient, index)
        norm = float(np.linalg.norm(gradient["w"]))
        assert float(metrics.gradient_norm) == pytest.approx(norm, rel=1e-5)
        assert float(metrics.clipped) == (norm > 0.5)
    np.testing.assert_allclose(result["w"], expected["w"], rtol=1e-5, atol=1e-7)


def test_running_moments_equal_numpy_and_ignore_nan():
    rng = np.random.default_rng(3)
    batches = rng.normal(5.0, 3.0, size=(6, 40, 2)).astype(np.float32)
    moments = Moments.zeros((2,))
    for batch in batches:
        moments = moments.update(jnp.asarray(batch))
    samples = batches.reshape(-1, 2).astype(np.float64)
    np.testing.assert_allclose(moments.mean, samples.mean(0), rtol=1e-5)
    np.testing.assert_allclose(moments.variance, samples.var(0), rtol=1e-4)
    poisoned = moments.update(jnp.array([[np.nan, 1.0], [np.inf, 2.0]]))
    assert np.isfinite(poisoned.mean).all()
    assert np.isfinite(poisoned.variance).all()
    assert float(poisoned.count[0]) == float(moments.count[0])


def test_running_moments_ignore_entries_too_large_to_square():
    moments = Moments.zeros((2,)).update(jnp.array([[1.0, 1.0], [3.0, 3.0]]))
    poisoned = moments.update(jnp.array([[1e20, 5.0]]))
    np.testing.assert_allclose(poisoned.mean, [2.0, 3.0])
    np.testing.assert_allclose(poisoned.variance, [1.0, np.var([1, 3, 5])], rtol=1e-6)
    np.testing.assert_allclose(poisoned.normalize(jnp.array([3.0, 3.0])), [1.0, 0.0], atol=1e-6)


@pytest.mark.parametrize("transform", [optax.scale_by_adam(), optax.trace(0.9), optax.scale_by_lion()])
def test_x_mem_is_the_cosine_between_update_and_first_moment(transform):
    optimizer = Optimizer(transform, 0.1)
    rng = np.random.default_rng(4)
    params, state = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}, None
    state = optimizer.init(params)
    for _ in range(3):
        gradient = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
        before = params
        params, state, metrics = optimizer.update(params, state, gradient, Taps())
    moment = state.mu if hasattr(state, "mu") else state.trace
    change, moment = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (jax.tree.map(jnp.subtract, before, params), moment)
    )
    expected = change @ moment / np.linalg.norm(change) / np.linalg.norm(moment)
    assert float(metrics.persistence) == pytest.approx(expected, abs=1e-5)


def test_the_learning_rate_outside_a_run_is_the_schedules_first():
    optimizer = Optimizer(optax.identity(), linear_to_zero(0.5))
    *_, metrics = optimizer.update({"w": jnp.ones(2)}, optimizer.init({"w": jnp.ones(2)}), {"w": jnp.ones(2)}, Taps(7))
    assert float(metrics.learning_rate) == 0.5


@pytest.mark.exhaustive
def test_x_grad_is_of_minibatch_gradients_at_the_first_parameters():
    """It does not depend on the telemetry level, nor on how far the updates move the parameters."""
    settings = SMALL | {"minibatch_size": 16, "learning_rate": 0.3}
    agents = {
        name: PPO(ProbeTask(lambda a: a, True), 16, PPOSettings(**settings | {"telemetry": name}))
        for name in ("basic", "full")
    }
    agent = agents["full"]
    state = jax.jit(agent.init)(jax.random.key(0))
    state, samples = jax.jit(lambda state: agent.collect(state, jax.random.key(1), Taps()))(state)
    key = jax.random.key(2)
    telemetry = {
        name: jax.jit(lambda state, agent=a: agent.improve(state.params, state.optimizer, samples, key, Taps(1, 10)))
        for name, a in agents.items()
    }
    telemetry = {name: improve(state)[2] for name, improve in telemetry.items()}
    rows = agent.order(jax.random.split(key, agent.settings.epochs)[0])
    data = agent.flat(samples)
    assert sorted(np.ravel(rows)) == list(range(128))
    bonus = agent.settings.entropy_coefficient
    gradient = jax.jit(lambda rows: jax.grad(agent.loss, has_aux=True)(state.params, select_rows(data, rows), bonus)[0])
    stack = np.array([np.concatenate([np.ravel(g) for g in jax.tree.leaves(gradient(r))]) for r in rows], np.float64)
    units = stack / np.linalg.norm(stack, axis=1, keepdims=True)
    cosines = units @ units.T
    expected = cosines[np.triu_indices(len(rows), 1)].mean()
    for metrics in telemetry.values():
        assert float(metrics["x_grad"]) == pytest.approx(expected, abs=1e-5)
    largest = np.linalg.eigvalsh(cosines)[-1] / len(rows)
    assert float(telemetry["full"]["x_grad_dominant"]) == pytest.approx(largest, abs=1e-4)
    sizes = [np.size(p) for p in jax.tree.leaves(state.params)]
    layers = np.split(stack, np.cumsum(sizes)[:-1], axis=1)
    norms = [np.sqrt((layer**2).sum(1).mean()) for layer in layers]
    np.testing.assert_allclose(telemetry["full"]["layer_gradient_norm"], norms, rtol=1e-4, atol=1e-7)


def select_rows(data, rows):
    return jax.tree.map(lambda x: x[rows], data)


@pytest.mark.slow
def test_ppo_learns_inverted_pendulum():
    """The evaluation return reaches 950 within 150,000 environment steps on at least 7 of 8 seeds."""
    learner = ja.learners.ppo("InvertedPendulum-v5", num_envs=4, rollout_length=128, evaluations=6, telemetry="basic")
    grid = ja.plan(learner, [ja.lr_spike(1.0, onset=291, duration=1)], seeds=8, steps=292, tail=0)
    baseline, _ = ja.compiled(grid.program)(ja.inputs(grid))
    assert 292 * learner.samples_per_step < 150_000
    evaluations = np.asarray(baseline["evaluation_return"])[:, :8]
    best = np.nanmax(evaluations, axis=0)
    assert (best >= 950).sum() >= 7, best
