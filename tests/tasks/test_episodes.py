"""Tests the episode wrapper and `evaluate` with an environment that counts steps, and against Gymnasium."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.core.taps import Taps
from jaxaudit.tasks import Episodes, evaluate, make, performance
from jaxaudit.tasks._brax import Env, State
from jaxaudit.tasks.episodes import mean_length


class Counter(Env):
    """Observes a random tag of the episode and the steps taken; rewards the action; ends after `lifetime` steps."""

    def __init__(self, lifetime=1000, cheap_reset=True):
        self.lifetime = lifetime
        self.cheap_reset = cheap_reset

    def reset(self, rng):
        tag = jax.random.uniform(rng)
        zero = jnp.zeros(())
        return State(pipeline_state=None, obs=jnp.stack([tag, zero]), reward=zero, done=zero)

    def step(self, state, action):
        observation = state.obs + jnp.array([0.0, 1.0])
        return state.replace(
            obs=observation, reward=action[0], done=(observation[1] >= self.lifetime).astype(jnp.float32)
        )

    observation_size, action_size, backend = 2, 1, "none"


def run(episodes, steps, taps=None, action=1.0, key=0):
    """Scans steps of a constant action; returns the first state, all states and all transitions."""
    actions = np.broadcast_to(np.asarray(action, np.float32), (episodes.num_envs,))[:, None]

    def step(state, key):
        state, transition = episodes.step(state, key, actions, taps or Taps())
        return state, (state, transition)

    @jax.jit
    def roll(key):
        init_key, key = jax.random.split(key)
        first = episodes.init(init_key)
        return first, *jax.lax.scan(step, first, jax.random.split(key, steps))[1]

    return roll(jax.random.key(key))


class TestEpisodes:
    def test_truncation_has_a_final_observation_and_is_no_termination(self):
        first, states, steps = run(Episodes(Counter(), 2, max_episode_steps=4), 8)
        np.testing.assert_array_equal(first.head_start, [0, 2])
        np.testing.assert_array_equal(steps.truncated[:, 0], [0, 0, 0, 1, 0, 0, 0, 1])
        np.testing.assert_array_equal(steps.truncated[:, 1], [0, 1, 0, 0, 0, 1, 0, 0])
        assert not steps.terminated.any()
        np.testing.assert_array_equal(steps.observation[:, 0, 1], [0, 1, 2, 3, 0, 1, 2, 3])
        np.testing.assert_array_equal(steps.final_observation[:, 0, 1], [1, 2, 3, 4, 1, 2, 3, 4])
        # Observations that were acted on are those of the state, and within an episode those after the step before.
        np.testing.assert_array_equal(steps.observation[1:], states.observation[:-1])
        continuing = ~steps.truncated[:-1]
        np.testing.assert_array_equal(steps.observation[1:][continuing], steps.final_observation[:-1][continuing])

    def test_termination_wins_over_the_time_limit(self):
        _, _, steps = run(Episodes(Counter(lifetime=4), 1, max_episode_steps=4), 4)
        np.testing.assert_array_equal(steps.terminated[:, 0], [0, 0, 0, 1])
        assert not steps.truncated.any()

    @pytest.mark.parametrize("cheap_reset", [True, False])
    def test_every_reset_is_sampled_anew(self, cheap_reset):
        _, states, steps = run(Episodes(Counter(2, cheap_reset), 64, max_episode_steps=100), 6)
        tags = np.asarray(steps.observation[::2, :, 0])  # one for each episode
        np.testing.assert_array_equal(states.env.obs[1::2, :, 1], 0)
        assert (states.pool is None) == cheap_reset
        if cheap_reset:
            assert len(np.unique(tags)) == tags.size
        else:  # first resets are new, later ones are samples of a pool of 64
            pool = np.asarray(states.pool.obs[0, :, 0])
            assert np.isin(tags[1:], pool).all()
            assert len(np.unique(tags[1])) > 30
            assert (tags[1] != tags[2]).mean() > 0.9

    def test_refresh_samples_a_new_pool(self):
        for cheap_reset in (True, False):
            episodes = Episodes(Counter(2, cheap_reset), 8, max_episode_steps=10)
            state = jax.jit(episodes.init)(jax.random.key(0))
            refreshed = jax.jit(episodes.refresh)(state, jax.random.key(1))
            assert jax.tree.structure(refreshed) == jax.tree.structure(state)
            if not cheap_reset:
                assert not np.isin(refreshed.pool.obs[:, 0], state.pool.obs[:, 0]).any()

    def test_returns_and_lengths_are_of_complete_episodes(self):
        episodes = Episodes(Counter(), 4, max_episode_steps=8)
        _, states, _ = run(episodes, 16, action=[1.0, 2.0, 3.0, 4.0])
        state_at = lambda t: jax.tree.map(lambda x: x[t], states)  # noqa: E731
        # Environment 3 starts at step 6 of 8, and is truncated after two steps, which does not count as an episode.
        np.testing.assert_array_equal(state_at(1).has_finished, [0, 0, 0, 0])
        np.testing.assert_array_equal(state_at(1).running_return, [2, 4, 6, 0])
        assert np.isnan(performance(state_at(6)))
        np.testing.assert_array_equal(state_at(7).has_finished, [1, 0, 0, 0])
        assert performance(state_at(7)) == 8.0
        np.testing.assert_array_equal(state_at(15).last_return, [8, 16, 24, 32])
        np.testing.assert_array_equal(state_at(15).last_length, [8, 8, 8, 8])
        assert performance(state_at(15)) == 20.0

    def test_mean_length_is_over_environments_with_a_finished_episode(self):
        state = Episodes(Counter(), 4, max_episode_steps=8).init(jax.random.key(0))
        assert np.isnan(mean_length(state))
        state = state.replace(
            has_finished=jnp.array([True, False, True, False]), last_length=jnp.array([8, 2, 5, 1], jnp.int32)
        )
        assert mean_length(state) == 6.5

    def test_a_staggered_first_episode_counts_if_it_terminates(self):
        _, states, _ = run(Episodes(Counter(lifetime=3), 2, max_episode_steps=8), 3)
        np.testing.assert_array_equal(states.has_finished[-1], [1, 1])
        np.testing.assert_array_equal(states.last_length[-1], [3, 3])

    def test_staggered_starts_spread_truncations_over_time(self):
        _, _, steps = run(Episodes(Counter(), 8, max_episode_steps=40), 80)
        ended = np.asarray(steps.truncated).sum(1)
        assert ended.max() == 1
        assert ended.sum() == 16

    def test_taps_disturb_transitions_and_not_measured_returns(self):
        sites = []

        def taps(site, value, **context):
            sites.append(site)
            return {"observation": value + 100, "action": value * 3, "reward": -value}[site]

        first, states, steps = run(Episodes(Counter(), 2, max_episode_steps=4), 6, taps)
        assert sorted(set(sites)) == ["action", "observation", "reward"]
        np.testing.assert_array_equal(steps.action, 1)  # as the policy chose it
        np.testing.assert_array_equal(steps.reward, -3)  # of the disturbed action
        assert states.last_return[-1, 0] == 12  # undisturbed
        np.testing.assert_array_equal(steps.observation[0], first.observation)
        np.testing.assert_array_equal(steps.observation[:, 0, 1], [0, 101, 102, 103, 100, 101])
        np.testing.assert_array_equal(steps.final_observation[:, 0, 1], [101, 102, 103, 104, 101, 102])
        np.testing.assert_array_equal(states.env.obs[:, 0, 1], [1, 2, 3, 0, 1, 2])

    def test_performance_is_nan_at_once_after_divergence(self):
        episodes = Episodes(Counter(), 4, max_episode_steps=4)
        _, states, _ = run(episodes, 8)
        state = jax.tree.map(lambda x: x[-1], states)
        assert np.isfinite(performance(state))
        advance = jax.jit(lambda state, action: episodes.step(state, jax.random.key(0), action, Taps()))
        action = np.ones((4, 1), np.float32)
        state, step = advance(state, np.where(np.arange(4)[:, None] == 2, np.float32(np.nan), action))
        assert not step.terminated.any()
        assert np.isnan(performance(state))
        for _ in range(4):  # after the reset the latest return is still NaN
            state, _ = advance(state, action)
        assert np.isnan(performance(state))
        for _ in range(4):
            state, _ = advance(state, action)
        assert performance(state) == 4.0

    def test_vmapped_lanes_are_independent(self):
        episodes = Episodes(Counter(lifetime=3), 4, max_episode_steps=5)

        def lane(key):
            state = episodes.init(key)
            step = lambda s, k: (episodes.step(s, k, jnp.ones((4, 1)), Taps())[0], None)  # noqa: E731
            return performance(jax.lax.scan(step, state, jax.random.split(key, 9))[0])

        np.testing.assert_array_equal(jax.jit(jax.vmap(lane))(jax.random.split(jax.random.key(0), 3)), 3.0)

    def test_invalid_sizes_are_refused(self):
        with pytest.raises(ValueError, match="num_envs must be at least 1, not 0"):
            Episodes(Counter(), 0, 10)
        with pytest.raises(ValueError, match="max_episode_steps must be at least 1, not -1"):
            Episodes(Counter(), 1, -1)

    def test_truncation_at_gymnasiums_limit(self):
        env = make("HalfCheetah-v5", "c")
        _, states, steps = run(Episodes(env, 1, env.max_episode_steps), 1001, action=0.0)
        reference = gymnasium.make("HalfCheetah-v5")
        reference.reset(seed=0)
        reference_ends = [reference.step(np.zeros(6))[2:4] for _ in range(1000)]
        np.testing.assert_array_equal(steps.terminated[:1000, 0], [t for t, _ in reference_ends])
        np.testing.assert_array_equal(steps.truncated[:1000, 0], [t for _, t in reference_ends])
        assert states.last_length[-1] == 1000
        np.testing.assert_allclose(states.last_return[-1], steps.reward[:1000].sum(0), rtol=1e-4, atol=1e-4)


def test_evaluate_stops_each_episode_at_its_end():
    policy = lambda observation: jnp.arange(1.0, 4.0)[:, None]  # noqa: E731
    for lifetime, limit, length in ((3, 10, 3), (10, 4, 4)):
        run = functools.partial(evaluate, Counter(lifetime), policy, episodes=3, max_episode_steps=limit)
        np.testing.assert_array_equal(jax.jit(run)(jax.random.key(0)), length * np.arange(1.0, 4.0))


def test_evaluate_balances_the_pendulum_with_a_controller():
    env = make("InvertedPendulum-v5", "c")
    returns = jax.jit(lambda gains: evaluate(env, lambda observation: observation @ gains, jax.random.key(0), 4, 200))
    balance = np.float32([[1.0], [30.0], [1.5], [3.0]])
    np.testing.assert_array_equal(returns(balance), 200.0)
    assert (np.asarray(returns(0 * balance)) < 200).all()
