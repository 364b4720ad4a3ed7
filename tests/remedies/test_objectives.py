"""Tests remedies of PPO's objective against closed forms and loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe_tasks import UNNORMALIZED_SETTINGS, ProbeTask
from small_learner import assert_close

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl.ppo import PPO, PPOSettings

SMALL_PPO = UNNORMALIZED_SETTINGS | {"hidden": (8,), "minibatch_size": 128, "epochs": 1, "max_grad_norm": 100.0}


@functools.cache
def probe_agent():
    """Returns PPO on a task with a known reward, equal observations, and episodes that only the time limit ends."""
    agent = PPO(ProbeTask(lambda a: -((a - 0.5) ** 2), False), 16, PPOSettings(**SMALL_PPO))
    return agent, jax.jit(agent.init)(jax.random.key(0))


def taps_with_remedies(*chosen):
    """Returns taps with remedies of the objective, which keep no state."""
    return Taps(0, 10).with_remedies(tuple((kind, strength) for kind, strength in chosen), {}, None)


@functools.cache
def collect_samples():
    agent, state = probe_agent()
    kind = remedies.decoupled_lambda
    plain = jax.jit(lambda: agent.collect(state, jax.random.key(1), Taps(0, 10))[1])()
    collect = jax.jit(lambda lam: agent.collect(state, jax.random.key(1), taps_with_remedies((kind, lam)))[1])
    return plain, {lam: collect(jnp.float32(lam)) for lam in (0.0, 0.5, 1.0)}


def advantages(rewards, ages, value, gamma, lam):
    """Returns generalised advantage estimates by recursion; episodes are truncated at an age of 16 steps."""
    result, following = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = np.where((t + 1 + ages) % 16 == 0, 0.0, following)
        following = result[t] = rewards[t] + gamma * value - value + gamma * lam * following
    return result


def test_decoupled_lambda_changes_value_targets_only():
    agent, state = probe_agent()
    plain, with_remedy = collect_samples()
    ages = np.asarray(state.episodes.head_start)
    gamma, gae_lambda = agent.settings.gamma, agent.settings.gae_lambda
    clipped_action = np.clip(np.asarray(plain.action, np.float64)[..., 0], -2.0, 2.0)
    rewards, value = -((clipped_action - 0.5) ** 2), float(plain.value[0, 0])
    assert_close(plain.value, np.full(rewards.shape, value))
    for lam, samples in with_remedy.items():
        np.testing.assert_array_equal(samples.advantage, plain.advantage)
        assert_close(samples.advantage, advantages(rewards, ages, value, gamma, gae_lambda), atol=1e-4)
        assert_close(samples.target, advantages(rewards, ages, value, gamma, lam or gae_lambda) + value, atol=1e-4)
    np.testing.assert_array_equal(with_remedy[0.0].target, plain.target)


@pytest.mark.parametrize("bounds", [(0.2, 0.2), (0.2, 0.28), (0.2, 0.05)], ids=str)
def test_clip_higher_raises_the_upper_bound_of_the_ratio(bounds):
    _, state = probe_agent()
    data = jax.tree.map(np.asarray, collect_samples()[0])
    shift = np.random.default_rng(14).normal(0.0, 0.3, data.log_probability.shape).astype(np.float32)
    samples = data._replace(log_probability=data.log_probability - shift)
    ratio, advantage = np.exp(shift.astype(np.float64)), data.advantage.astype(np.float64)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    low, high = bounds
    clipped = np.clip(ratio, 1 - low, 1 + high)
    expected = -np.minimum(ratio * advantage, clipped * advantage).mean()
    strength = jnp.float32(0.0 if high == low else high)  # 0 is the neutral strength
    telemetry = improve()(state, samples, strength)
    assert float(telemetry["policy_loss"]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert float(telemetry["clip_fraction"]) == pytest.approx(((ratio < 1 - low) | (ratio > 1 + high)).mean(), abs=1e-6)
    kl = (ratio - 1 - shift).mean()
    assert float(telemetry["approximate_kl"]) == pytest.approx(kl, rel=1e-4)


@functools.cache
def improve():
    agent, _ = probe_agent()

    def improve_once(state, samples, strength):
        taps = taps_with_remedies((remedies.clip_higher, strength))
        return agent.improve(state.params, state.optimizer, samples, jax.random.key(2), taps)[2]

    return jax.jit(improve_once)


def test_critic_layer_norm_normalises_the_critics_layers_only():
    learner = ja.learners.ppo("CartPole-v1", hidden=(8, 8), num_envs=2, rollout_length=8, minibatch_size=8)
    for remedied in (ja.remedied(learner, remedies.critic_layer_norm()), with_all_ppo_remedies(learner)):
        state = remedied.state_shapes
        params = getattr(state, "learner", state).params
        norms = {part: [name for name in layers if "LayerNorm" in name] for part, layers in params.items()}
        assert norms == {"actor": [], "critic": ["LayerNorm_0", "LayerNorm_1"]}
    assert not any("LayerNorm" in name for layers in learner.state_shapes.params.values() for name in layers)


def with_all_ppo_remedies(learner):
    """Adds remedies that act first, since the one that changes settings must keep them."""
    acting = ja.remedied(learner, remedies.clip_higher(0.3), remedies.decoupled_lambda(0.9))
    all_remedies = ja.remedied(acting, remedies.critic_layer_norm())
    assert all_remedies.data.strengths == {"clip_higher": np.float32(0.3), "decoupled_lambda": np.float32(0.9)}
    return all_remedies
