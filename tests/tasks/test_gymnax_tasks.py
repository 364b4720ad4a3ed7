"""Tests gymnax environments as tasks: the adapter on environments of this file, and on gymnax's if it is installed."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.core.taps import Taps
from jaxaudit.tasks import Episodes, foreign, make
from jaxaudit.tasks.cartpole import CartPole
from jaxaudit.tasks.foreign import GymnaxEnv

GYMNAX = pytest.mark.skipif(importlib.util.find_spec("gymnax") is None, reason="gymnax not installed")
PARAMS = SimpleNamespace(max_steps_in_episode=7)


class Walk:
    """Moves by action plus coin toss on a strip of 12 positions, shown as an image; Python numbers as in gymnax."""

    def reset_env(self, key, params):
        state = {"at": 4, "hit": False}
        return self.image(state), state

    def step_env(self, key, state, action, params):
        at = state["at"] + action + jax.random.bernoulli(key)
        state = {"at": jnp.clip(at, 0, 11), "hit": at > 11}
        return self.image(state), state, 1 * (action == 2), state["hit"], {}

    def image(self, state):
        return (jnp.arange(12) == state["at"]).reshape(3, 4)

    def action_space(self, params):
        return SimpleNamespace(n=3, shape=())

    def observation_space(self, params):
        return SimpleNamespace(shape=(3, 4))


class Numbered(Walk):
    """Observes the position's number, and takes an action of two real numbers."""

    def image(self, state):
        return jnp.int32(state["at"])

    def step_env(self, key, state, action, params):
        assert action.shape == (2, 1)
        return super().step_env(key, state, jnp.round(action.sum()).astype(int), params)

    def action_space(self, params):
        return SimpleNamespace(low=-1.0, high=np.array([[1.0], [2.0]]), shape=(2, 1))

    def observation_space(self, params):
        return SimpleNamespace(n=12, shape=())


def roll(env, actions, key=0, limit=100):
    """Returns the last state, and the transitions of actions `[steps, N]`."""
    episodes = Episodes(env, len(actions[0]), max_episode_steps=limit)

    def step(state, inputs):
        action, key = inputs
        return episodes.step(state, key, action, Taps())

    def run(key):
        return jax.lax.scan(step, episodes.init(key), (jnp.asarray(actions), jax.random.split(key, len(actions))))

    return jax.jit(run)(jax.random.key(key))


def test_images_are_flattened_and_integer_actions_discrete():
    env = GymnaxEnv(Walk(), PARAMS)
    assert (env.actions, env.action_size, env.observation_size, env.max_episode_steps) == (3, 1, 12, 7)
    _, steps = roll(env, np.ones((30, 64), np.int32))
    assert steps.observation.dtype == jnp.float32
    np.testing.assert_array_equal(steps.observation.sum(-1), 1.0)
    assert steps.terminated.any()
    coins = np.asarray(steps.final_observation.argmax(-1) - steps.observation.argmax(-1)) - 1
    assert set(np.unique(coins[~steps.terminated])) == {0, 1}
    assert coins[~steps.terminated].mean() == pytest.approx(0.5, abs=0.05)


def test_randomness_differs_between_steps_and_environments():
    _, steps = roll(GymnaxEnv(Walk(), PARAMS), np.zeros((4, 64), np.int32))
    coins = np.asarray(steps.final_observation.argmax(-1) - steps.observation.argmax(-1), float)
    assert (np.abs(np.corrcoef(coins)[np.triu_indices(4, 1)]) < 0.4).all()


def test_integer_observations_are_one_hot_and_actions_have_bounds():
    env = GymnaxEnv(Numbered(), PARAMS)
    assert (env.actions, env.action_size, env.observation_size) == (None, 2, 12)
    np.testing.assert_array_equal(env.action_low, [-1.0, -1.0])
    np.testing.assert_array_equal(env.action_high, [1.0, 2.0])
    _, steps = roll(env, np.full((5, 2, 2), 0.1, np.float32))
    np.testing.assert_array_equal(steps.observation[0], np.eye(12)[[4, 4]])


@pytest.mark.parametrize(("env", "action"), [(Walk, -1), (Walk, 3), (Numbered, [np.nan, 0.0])])
def test_an_invalid_action_gives_nan_and_keeps_the_state(env, action):
    env = GymnaxEnv(env(), PARAMS)
    before = jax.jit(env.reset)(jax.random.key(0))
    after = jax.jit(env.step)(before, jnp.asarray(action))
    assert np.isnan(after.obs).all()
    assert np.isnan(after.reward)
    assert after.done == 0
    jax.tree.map(np.testing.assert_array_equal, after.pipeline_state.env, before.pipeline_state.env)


def test_the_message_names_a_missing_package(monkeypatch):
    monkeypatch.setattr(foreign.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need the package 'gymnax': pip install 'jaxaudit\[gymnax\]'"):
        make("gymnax:Breakout-MinAtar")


SIZES = {
    "CartPole-v1": (4, 2, 500),
    "Acrobot-v1": (6, 3, 500),
    "Breakout-MinAtar": (400, 3, 1000),
    "Asterix-MinAtar": (400, 5, 1000),
    "Freeway-MinAtar": (700, 3, 2500),
    "Seaquest-MinAtar": (1000, 6, 1000),
    "SpaceInvaders-MinAtar": (600, 4, 1000),
    "FrozenLake-misc": (16, 4, 100),
    "Pendulum-v1": (3, None, 200),
}


@GYMNAX
@pytest.mark.parametrize(("name", "sizes"), SIZES.items())
def test_gymnax_environments_are_tasks(name, sizes):
    env = make(f"gymnax:{name}")
    assert (env.observation_size, env.actions, env.max_episode_steps) == sizes
    rng = np.random.default_rng(0)
    actions = rng.integers(0, env.actions, (200, 4)) if env.actions else rng.uniform(-1, 1, (200, 4, env.action_size))
    _, steps = roll(env, actions, limit=50)
    assert steps.observation.shape == (200, 4, env.observation_size)
    assert np.isfinite(steps.observation).all()
    assert np.isfinite(steps.reward).all()
    assert (steps.terminated | steps.truncated).any()


@GYMNAX
def test_all_gymnax_environments_have_steps_that_keep_shapes():
    for name in foreign.GymnaxTask.names():
        env = make(f"gymnax:{name}")
        key = jax.random.key(0)
        action = jnp.zeros((), jnp.int32) if env.actions else jnp.zeros(env.action_size)
        before = jax.eval_shape(env.reset, key)
        after = jax.eval_shape(env.step, before, action)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), before)


@GYMNAX
def test_cartpole_equals_gymnaxs():
    gymnax_env, cartpole = make("gymnax:CartPole-v1"), CartPole()
    rng = np.random.default_rng(1)
    physics = jnp.asarray(rng.uniform(-1, 1, (1000, 4)) * [2.4, 2, 0.2, 2], jnp.float32)
    actions = jnp.asarray(rng.integers(0, 2, 1000))
    keys = jax.random.split(jax.random.key(0), 1000)
    result = jax.vmap(cartpole.reset)(keys).replace(pipeline_state=physics)
    expected = jax.vmap(gymnax_env.reset)(keys)
    inner = expected.pipeline_state.env.replace(
        **dict(zip(("x", "x_dot", "theta", "theta_dot"), physics.T, strict=True))
    )
    expected = expected.replace(pipeline_state=expected.pipeline_state.replace(env=inner))
    result, expected = (
        jax.jit(jax.vmap(env.step))(state, actions) for env, state in ((cartpole, result), (gymnax_env, expected))
    )
    np.testing.assert_allclose(result.obs, expected.obs, atol=1e-6)
    np.testing.assert_array_equal(result.done, expected.done)
