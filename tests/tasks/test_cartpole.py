"""Tests CartPole against Gymnasium's, under changed dynamics, and with invalid actions and states."""

import functools

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.core.taps import Taps
from jaxaudit.tasks import Episodes, evaluate, make
from jaxaudit.tasks.cartpole import ANGLE_LIMIT, POSITION_LIMIT, CartPole

pytestmark = pytest.mark.default_compilation

STEPS = 1000


@functools.cache
def step():
    return jax.jit(jax.vmap(CartPole().step))


def states_at(physics, **factors):
    """Returns JAX states at the physics `[N, 4]`."""
    physics = jnp.asarray(physics, jnp.float32)
    state = jax.vmap(CartPole().reset)(jax.random.split(jax.random.key(0), len(physics)))
    ones = {name: jnp.full(len(physics), factors.get(name, 1.0)) for name in CartPole().dynamics}
    return state.replace(pipeline_state=physics, obs=physics, info={"dynamics": ones} if factors else {})


def gymnasium_steps(gear=1.0, gravity=1.0, mass=1.0):
    """Returns 1,000 steps of Gymnasium: states before, actions, observations, rewards, terminations."""
    rng = np.random.default_rng(0)
    env = gymnasium.make("CartPole-v1")
    unwrapped = env.unwrapped
    unwrapped.force_mag *= gear
    unwrapped.gravity *= gravity
    for name in ("masscart", "masspole", "total_mass", "polemass_length"):
        setattr(unwrapped, name, getattr(unwrapped, name) * mass)
    rows, episode = [], 0
    env.reset(seed=0)
    for _ in range(STEPS):
        before, action = unwrapped.state, int(rng.integers(2))
        observation, reward, terminated, truncated, _ = env.step(action)
        rows.append((before, action, observation, reward, terminated))
        if terminated or truncated:
            episode += 1
            env.reset(seed=episode)
    return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("factors", [{}, {"gear": 0.5, "gravity": 1.5, "mass": 3.0}], ids=["standard", "shifted"])
def test_a_step_equals_gymnasiums(factors):
    before, action, observation, reward, terminated = gymnasium_steps(**factors)
    assert terminated.sum() > 10
    result = step()(states_at(before, **factors), action.astype(np.int32))
    scale = np.maximum(np.abs(observation).max(axis=1, keepdims=True), 1.0)
    assert (np.abs(result.obs - observation) / scale).max() < 1e-6
    np.testing.assert_array_equal(result.reward, reward)
    np.testing.assert_array_equal(result.done, terminated)


def test_sizes_and_limits_equal_gymnasiums():
    env, reference = make("CartPole-v1"), gymnasium.make("CartPole-v1")
    assert env.actions == reference.action_space.n
    assert (env.observation_size,) == reference.observation_space.shape
    assert env.max_episode_steps == reference.spec.max_episode_steps
    assert pytest.approx(2 * np.array([POSITION_LIMIT, ANGLE_LIMIT])) == reference.observation_space.high[[0, 2]]


def test_initial_states_are_uniform():
    observations = jax.jit(jax.vmap(CartPole().reset))(jax.random.split(jax.random.key(1), 4096)).obs
    assert np.abs(observations).max() <= 0.05
    np.testing.assert_allclose(np.std(observations, axis=0), 0.05 / 3**0.5, rtol=0.05)


@pytest.mark.parametrize(
    ("action", "factors"),
    [(-1, {}), (2, {}), (1, {"mass": 0.0}), (0, {"gravity": np.nan}), (0, {"gear": np.inf})],
)
def test_invalid_actions_and_dynamics_give_nan_and_keep_the_state(action, factors):
    before = np.array([[0.1, -0.2, 0.05, 0.3]], np.float32)
    after = step()(states_at(before, **factors), jnp.full(1, action, jnp.int32))
    assert np.isnan(after.obs).all()
    assert np.isnan(after.reward).all()
    assert not after.done.any()
    np.testing.assert_array_equal(after.pipeline_state, before)


def test_a_diverging_state_gives_nan():
    after = step()(states_at([[0.0, 0.0, 0.1, 3e38]]), jnp.zeros(1, jnp.int32))
    assert np.isnan(after.reward).all()


def test_neutral_factors_change_nothing():
    before, action, *_ = gymnasium_steps()
    plain = step()(states_at(before), action.astype(np.int32))
    factored = step()(states_at(before, gear=1.0), action.astype(np.int32))
    np.testing.assert_array_equal(plain.obs, factored.obs)


def test_a_balancing_controller_reaches_the_time_limit():
    """A linear feedback on angle and angular velocity, and weakly on the cart, balances the pole for 500 steps."""

    def push(observation):
        return (observation @ jnp.array([0.1, 0.3, 3.0, 1.0]) > 0).astype(jnp.int32)

    returns = jax.jit(lambda key: evaluate(CartPole(), push, key, 8, 500))(jax.random.key(2))
    np.testing.assert_array_equal(returns, 500.0)


def test_episodes_restart_when_the_pole_falls():
    episodes = Episodes(CartPole(), 3, max_episode_steps=500)

    @jax.jit
    def roll(key):
        def advance(state, key):
            return episodes.step(state, key, jnp.ones(3, jnp.int32), Taps())

        return jax.lax.scan(advance, episodes.init(key), jax.random.split(key, 40))

    state, steps = roll(jax.random.key(3))
    assert steps.terminated.any(axis=0).all()
    assert not steps.truncated.any()
    assert state.has_finished.all()
    assert (state.last_return == state.last_length).all()
    assert (state.last_length < 15).all()
