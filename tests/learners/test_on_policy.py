"""Tests what PPO and TRPO share, on tasks with known values."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe_tasks import UNNORMALIZED_SETTINGS, ProbeTask, train
from without_baseline import train_without_baseline

import jaxaudit as ja
from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl.on_policy import Moments
from jaxaudit.learners.rl.ppo import PPO, PPOSettings
from jaxaudit.learners.rl.telemetry import episode_telemetry, when_due
from jaxaudit.learners.rl.trpo import TRPO, TRPOSettings
from jaxaudit.tasks.episodes import EpisodeState

SMALL = UNNORMALIZED_SETTINGS | {"hidden": (16,)}
AGENTS = {
    "ppo": (PPO, PPOSettings(**SMALL, gamma=0.9, clip_value=False, anneal=False, entropy_coefficient=0.0)),
    "trpo": (TRPO, TRPOSettings(**SMALL, gamma=0.9)),
}
LIMIT = 4


@pytest.fixture(scope="module", params=["ppo", pytest.param("trpo", marks=pytest.mark.exhaustive)])
def trained(request):
    """Trains agents on three probes, and returns value, mean action and performance by the probe's name."""
    algorithm, settings = AGENTS[request.param]

    def lane(rewards_action, terminates):
        probe = ProbeTask(lambda a: jnp.where(rewards_action, -((a - 0.5) ** 2), 1.0), terminates)
        agent = algorithm(probe, LIMIT, settings)
        state, telemetry = train(agent, 200)
        observation = jnp.ones(1)
        return (
            agent.value(state.params, observation),
            agent.policy(state.params, observation)[0][0],
            telemetry["performance"],
        )

    results = jax.jit(jax.vmap(lane))(jnp.array([False, False, True]), jnp.array([True, False, True]))
    names = ("terminated", "truncated", "action")
    return {name: tuple(np.asarray(x)[index] for x in results) for index, name in enumerate(names)}


def test_the_value_before_termination_is_the_last_reward(trained):
    value, _, _ = trained["terminated"]
    assert value == pytest.approx(1.0, abs=0.02)


def test_the_value_at_truncation_is_bootstrapped(trained):
    """A constant reward of one has the value 1 / (1 - gamma), whatever the time limit."""
    value, _, _ = trained["truncated"]
    assert value == pytest.approx(10.0, rel=0.02)


def test_the_policy_finds_the_rewarded_action(trained):
    _, mean, performance = trained["action"]
    assert mean == pytest.approx(0.5, abs=0.1)
    assert performance[-1] > performance[0] + 0.3


@pytest.mark.exhaustive
def test_a_disturbed_reward_does_not_change_the_performance():
    settings = PPOSettings(**(SMALL | {"num_envs": 2, "epochs": 1}))
    agent = PPO(ProbeTask(lambda a: jnp.float32(1.0), False), 16, settings)
    learner = ja.Learner(agent.init, agent.step, name="probe")
    scaled = ja.reward_scale(100.0, onset=0, duration="end")
    telemetry = train_without_baseline(learner, [scaled], seeds=2, steps=6)
    assert (telemetry["performance"] == 16.0).all()
    losses = telemetry["value_loss"]
    assert (losses[:, 1] > 100 * losses[:, 0]).all()


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return():
    agent = PPO(ProbeTask(lambda a: a, True), 16, PPOSettings(**(SMALL | {"normalize_rewards": True, "gamma": 0.9})))
    rng = np.random.default_rng(0)
    rewards, done = rng.normal(2.0, 3.0, (2, 32, 4)), rng.random((2, 32, 4)) < 0.2
    state = jax.jit(agent.init)(jax.random.key(0))
    scale = jax.jit(agent.scaled_rewards)
    history, discounted = [], np.zeros(4)
    for half in range(2):
        for reward, ended in zip(rewards[half], done[half], strict=True):
            discounted = 0.9 * discounted + reward
            history.append(discounted)
            discounted = np.where(ended, 0.0, discounted)
        scaled, returns, new_discounted = scale(state, np.float32(rewards[half]), done[half])
        state = state.replace(returns=returns, discounted=new_discounted)
    np.testing.assert_allclose(scaled, np.clip(rewards[1] / np.std(history), -10, 10), rtol=1e-4)
    np.testing.assert_allclose(new_discounted, discounted, rtol=1e-4, atol=1e-5)


class ErrorAsReward(Taps):
    """Taps that replace the reward by the temporal-difference error in the site's context."""

    def __call__(self, site, value, **context):
        return context["td_error"](value) if site == "reward" else value

    def scan(self, body, init, xs=None, length=None):
        return jax.lax.scan(lambda carry, x: body(self, carry, x), init, xs, length)


def test_td_errors_in_a_sites_context_are_in_the_tasks_units():
    """The critic predicts 2 deviations of 50 for a return of 100, so that the temporal-difference error is small."""
    settings = PPOSettings(**(SMALL | {"normalize_rewards": True, "gamma": 0.99, "gae_lambda": 0.0}))
    agent = PPO(ProbeTask(lambda a: jnp.float32(1.0), False), 1000, settings)
    state = jax.jit(agent.init)(jax.random.key(0))
    critic = jax.tree.map(np.zeros_like, state.params["critic"])
    critic["Dense_1"]["bias"] += 2.0
    state = state.replace(
        params=state.params | {"critic": critic},
        returns=Moments(jnp.float32(1e9), jnp.float32(0.0), jnp.float32(2500.0)),
    )
    _, samples = jax.jit(lambda state: agent.collect(state, jax.random.key(1), ErrorAsReward()))(state)
    np.testing.assert_allclose(samples.advantage, 0.0 + 0.99 * 2.0 - 2.0, atol=1e-3)


@pytest.mark.parametrize(("steps", "times"), [(29, 10), (489, 10), (7, 20), (10, 1), (12, 4)])
def test_measurements_are_evenly_spaced_and_end_with_the_last_step(steps, times):
    measured = jax.jit(jax.vmap(lambda t: when_due(Taps(t, steps), times, lambda: jnp.float32(0.5))))(jnp.arange(steps))
    due = np.flatnonzero(np.isfinite(measured))
    assert len(due) == min(steps, times)
    assert due[-1] == steps - 1
    assert np.ptp(np.diff(due, prepend=-1)) <= 1
    np.testing.assert_array_equal(np.asarray(measured)[due], 0.5)


def test_a_policy_is_evaluated_when_due():
    settings = PPOSettings(**(SMALL | {"evaluations": 4, "evaluation_episodes": 2}))
    agent = PPO(ProbeTask(lambda a: a, True), 3, settings)
    state = jax.jit(agent.init)(jax.random.key(1))

    def policy(observation):
        return jnp.full((2, 1), 0.5)

    def step(_, t):
        return None, episode_telemetry(agent, state, policy, jax.random.key(0), Taps(t, 12))["evaluation_return"]

    _, returns = jax.jit(lambda: jax.lax.scan(step, None, jnp.arange(12)))()
    np.testing.assert_array_equal(returns, [np.nan, np.nan, 0.5] * 4)


def test_performance_is_of_the_undisturbed_copies_and_acting_performance_of_the_disturbed_environments():
    def episodes(last_return, last_length):
        two = jnp.ones(2)
        return EpisodeState(None, two, two, two, two, two * last_return, two * last_length, two > 0, None)

    learner = SimpleNamespace(
        settings=PPOSettings(evaluations=0),
        env=None,
        max_episode_steps=3,
        undisturbed=SimpleNamespace(clean=lambda copies, episodes: copies),
    )
    state = SimpleNamespace(copies=episodes(5.0, 2), episodes=episodes(1.0, 3))
    telemetry = episode_telemetry(learner, state, None, jax.random.key(0), Taps(0, 12))
    values = {name: telemetry[name].item() for name in ("performance", "acting_performance", "episode_length")}
    assert values == {"performance": 5.0, "acting_performance": 1.0, "episode_length": 3.0}


def test_a_pool_of_expensive_resets_is_renewed_every_iteration():
    class ExpensiveReset(ProbeTask):
        cheap_reset = False

        def reset(self, rng):
            return super().reset(rng).replace(obs=jax.random.normal(rng, (1,)))

    agent = PPO(ExpensiveReset(lambda a: a, True), 16, PPOSettings(**(SMALL | {"num_envs": 2})))
    state = jax.jit(agent.init)(jax.random.key(0))
    collect = jax.jit(lambda state, key: agent.collect(state, key, Taps())[0])
    pools = [np.asarray(state.episodes.pool.obs)]
    for index in range(2):
        state = collect(state, jax.random.key(index))
        pools.append(np.asarray(state.episodes.pool.obs))
    assert np.unique(np.stack(pools)).size == np.stack(pools).size
