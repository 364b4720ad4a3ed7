"""Tests that every reinforcement learner learns a task that needs all of its parts, and some of these parts alone.

The best action in the task is the observation in standard units. Observations lie around 500 and rewards are in the
thousands, so that a network without normalisation of observations and rewards does not learn.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl.on_policy import Moments
from jaxaudit.learners.rl.ppo import PPO, PPOSettings
from jaxaudit.learners.rl.sac import SAC, SACSettings
from jaxaudit.learners.rl.td3 import TD3, TD3Settings
from jaxaudit.learners.rl.trpo import TRPO, TRPOSettings
from jaxaudit.tasks._brax import Env, State

LIMIT = 8


class Units(Env):
    """Pays -scale (action - x)^2, where x is the standardised observation, sampled anew at every step."""

    cheap_reset = True
    action_low, action_high = np.array([-4.0], np.float32), np.array([4.0], np.float32)
    max_episode_steps = LIMIT
    observation_size, action_size, backend = 1, 1, "none"
    offset, spread, scale = 500.0, 20.0, 1000.0

    def reset(self, rng):
        x = jax.random.normal(rng, (1,))
        return State(None, self.offset + self.spread * x, jnp.float32(0), jnp.float32(0), {}, {"rng": rng})

    def step(self, state, action):
        x = (state.obs[0] - self.offset) / self.spread
        rng = jax.random.fold_in(state.info["rng"], 1)
        observation = self.offset + self.spread * jax.random.normal(rng, (1,))
        return state.replace(obs=observation, reward=-self.scale * (action[0] - x) ** 2, info={"rng": rng})


class Standard(Units):
    """The same task in standard units, for learners without normalisation."""

    offset, spread, scale = 0.0, 1.0, 1.0


ON_POLICY = {"num_envs": 16, "rollout_length": 32, "gamma": 0.0, "hidden": (16,), "log_std": -1.0}
ON_POLICY |= {"evaluations": 1, "evaluation_episodes": 64, "telemetry": "basic"}
OFF_POLICY = {"num_envs": 8, "iteration_steps": 128, "learning_starts": 128, "batch_size": 64, "gamma": 0.0}
OFF_POLICY |= {"hidden": (32,), "learning_rate": 3e-3, "buffer_size": 8192}
OFF_POLICY |= {"evaluations": 1, "evaluation_episodes": 64, "telemetry": "basic"}

LEARNERS = {
    "ppo": lambda: (PPO(Units(), LIMIT, PPOSettings(**ON_POLICY, minibatch_size=64, learning_rate=3e-3)), 40),
    "trpo": lambda: (TRPO(Units(), LIMIT, TRPOSettings(**ON_POLICY, minibatch_size=64, max_kl=0.05)), 60),
    "sac": lambda: (SAC(Standard(), LIMIT, SACSettings(**OFF_POLICY, updates_per_step=0.5)), 40),
    "td3": lambda: (TD3(Standard(), LIMIT, TD3Settings(**OFF_POLICY, updates_per_step=0.5)), 40),
}


def return_of_doing_nothing(agent):
    """Returns the expected return of the action 0: minus the variance of x for each step of an episode."""
    return -agent.env.scale * LIMIT


def train_agent(agent, iterations, seeds):
    """Returns each seed's last state, and telemetry of shape `[seeds, iterations]` by channel."""

    def train_seed(key):
        def iterate(state, index):
            return agent.step(state, jax.random.fold_in(key, index + 1), Taps(index, iterations))

        return jax.lax.scan(iterate, agent.init(jax.random.fold_in(key, 0)), jnp.arange(iterations))

    state, telemetry = jax.jit(jax.vmap(train_seed))(jax.random.split(jax.random.key(0), seeds))
    return state, jax.tree.map(np.asarray, telemetry)


@pytest.fixture(scope="module")
def trained_agent():
    """Returns a function from a learner's name to its agent, final states and telemetry."""

    @functools.cache
    def train(name):
        agent, iterations = LEARNERS[name]()
        return agent, *train_agent(agent, iterations, seeds=2)

    return train


OFF_POLICY_NAMES = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sac", "td3")]


@pytest.mark.parametrize("name", ["ppo", pytest.param("trpo", marks=pytest.mark.exhaustive), *OFF_POLICY_NAMES])
def test_training_removes_85_percent_of_the_loss_of_doing_nothing(name, trained_agent):
    agent, _, telemetry = trained_agent(name)
    last_return = telemetry["evaluation_return"][:, -1]
    assert (last_return > 0.15 * return_of_doing_nothing(agent)).all(), (
        f"{last_return / return_of_doing_nothing(agent)} of the loss of doing nothing remain"
    )


@pytest.mark.parametrize(("algorithm", "settings"), [(PPO, PPOSettings), (TRPO, TRPOSettings)])
@pytest.mark.exhaustive
def test_training_explores_and_the_evaluation_does_not(algorithm, settings):
    """At first the policy's mean is near zero and its deviation one: exploration doubles the cost of doing nothing."""
    slow = {"learning_rate": 1e-9} if algorithm is PPO else {"max_kl": 1e-9}
    agent = algorithm(Units(), LIMIT, settings(**ON_POLICY | {"log_std": 0.0, "minibatch_size": 64}, **slow))
    _, telemetry = train_agent(agent, 1, seeds=4)
    ratios = [telemetry[name].mean() / return_of_doing_nothing(agent) for name in ("performance", "evaluation_return")]
    np.testing.assert_allclose(ratios, [2.0, 1.0], rtol=0.15)


@pytest.mark.parametrize("name", OFF_POLICY_NAMES)
def test_the_evaluation_uses_the_policys_mean_action(name, trained_agent):
    """The evaluation return equals the mean action's return; exploring actions cost several times as much."""
    agent, states, telemetry = trained_agent(name)
    x = np.random.default_rng(0).normal(size=(4096, 1)).astype(np.float32)
    for seed, evaluation_return in enumerate(telemetry["evaluation_return"][:, -1]):
        params = jax.tree.map(lambda leaf, seed=seed: leaf[seed], states.networks.params)
        mean_action_return, exploring_return = (
            float(-LIMIT * jnp.mean((agent.to_action_space(action) - x) ** 2))
            for action in (agent.act(params, x), agent.explore(params, x, jax.random.key(1)))
        )
        assert exploring_return < 2.5 * mean_action_return
        assert evaluation_return == pytest.approx(mean_action_return, rel=0.5)


def test_normalised_values_are_clipped_at_ten_deviations():
    moments = Moments(jnp.float32([100.0]), jnp.float32([3.0]), jnp.float32([4.0]))
    np.testing.assert_allclose(moments.normalize(jnp.float32([[3.0], [7.0], [21.0], [99.0]]))[:, 0], [0, 2, 9, 10])
    np.testing.assert_allclose(moments.normalize(jnp.float32([[-99.0]]))[:, 0], [-10])


def first_rollout(agent, iterations=1):
    """Returns an agent's first state, the state after its first rollout, and the samples."""
    state = agent.init(jax.random.key(0))
    return state, *agent.collect(state, jax.random.key(1), Taps(0, iterations))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("algorithm", "settings"), [(PPO, PPOSettings), (TRPO, TRPOSettings)])
def test_log_probabilities_are_of_the_sampled_action_before_clipping(algorithm, settings):
    class Narrow(Standard):
        action_low, action_high = np.array([-0.1], np.float32), np.array([0.1], np.float32)

    agent = algorithm(Narrow(), LIMIT, settings(**ON_POLICY | {"log_std": 0.0, "minibatch_size": 64}))
    before, _, samples = first_rollout(agent)
    mean, log_std = agent.policy(before.params, samples.observation)
    expected = stats.norm.logpdf(np.float64(samples.action[..., 0]), np.float64(mean[..., 0]), np.exp(log_std[0]))
    np.testing.assert_allclose(samples.log_probability, expected, rtol=1e-4, atol=1e-4)
    assert (np.abs(samples.action) > 0.1).mean() > 0.8


def test_the_normaliser_counts_every_observation_once():
    agent = PPO(Units(), LIMIT, PPOSettings(**ON_POLICY, minibatch_size=64))
    _, after, _ = first_rollout(agent)
    assert after.observations.count[0] == 16 * 32
    assert abs(after.observations.mean[0] - 500) < 5
    assert after.observations.variance[0] == pytest.approx(400, rel=0.3)


def test_every_epoch_shuffles_the_samples_anew():
    agent = PPO(Standard(), LIMIT, PPOSettings(**ON_POLICY, minibatch_size=64, epochs=3))
    _, _, samples = first_rollout(agent)
    rows = samples._replace(advantage=jnp.arange(512.0).reshape(samples.advantage.shape))
    _, orders = agent.epochs(
        lambda taps, carry, batch: (carry, batch.advantage), jnp.zeros(()), rows, 3, jax.random.key(2), Taps(0, 1)
    )
    orders = np.asarray(orders).reshape(3, 512)
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), np.arange(512))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (orders[i] == orders[j]).mean() < 0.05


@pytest.mark.parametrize(("algorithm", "settings"), [(PPO, PPOSettings), (TRPO, TRPOSettings)])
def test_initial_layers_are_orthogonal_with_a_small_gain_for_the_policy(algorithm, settings):
    """The gain is sqrt(2), but in the last layer 0.01 (policy) or 1 (critic), as in Andrychowicz et al. (2021)."""
    agent = algorithm(Standard(), LIMIT, settings(num_envs=2, rollout_length=32))
    params = agent.init_params(jax.random.key(3))
    for part, gain in (("actor", 0.01), ("critic", 1.0)):
        kernels = [np.asarray(layer["kernel"], np.float64) for layer in params[part].values()]
        assert len(kernels) == 3
        for kernel, expected in zip(kernels, (np.sqrt(2), np.sqrt(2), gain), strict=True):
            singular = np.linalg.svd(kernel, compute_uv=False)
            np.testing.assert_allclose(singular, expected, rtol=1e-4)


TABLE_S2 = {
    PPOSettings: {"learning_rate": 3e-4, "minibatch_size": 64, "gamma": 0.99, "gae_lambda": 0.95}
    | {"entropy_coefficient": 0.01, "clip": 0.2},
    TRPOSettings: {"learning_rate": 1e-3, "minibatch_size": 64, "gamma": 0.99, "gae_lambda": 0.95, "max_kl": 0.01},
    SACSettings: {"learning_rate": 3e-4, "batch_size": 256, "buffer_size": 10**6, "gamma": 0.99, "tau": 5e-3}
    | {"entropy_coefficient": 0.2, "automatic_entropy": False},
    TD3Settings: {"learning_rate": 3e-4, "batch_size": 256, "buffer_size": 10**6, "gamma": 0.99, "tau": 5e-3},
}
PUBLISHED = {
    PPOSettings: {"epochs": 10, "num_envs": 8, "rollout_length": 256, "max_grad_norm": 0.5, "value_coefficient": 0.5}
    | {"anneal": True, "log_std": 0.0, "hidden": (64, 64), "normalize_advantages": True, "orthogonal": True},
    TRPOSettings: {"cg_steps": 15, "damping": 0.1, "backtrack_factor": 0.8, "max_backtracks": 10, "critic_epochs": 10},
    SACSettings: {"learning_starts": 10_000, "updates_per_step": 1.0, "hidden": (256, 256)},
    TD3Settings: {"policy_delay": 2, "exploration_noise": 0.1, "target_noise": 0.2, "target_noise_clip": 0.5}
    | {"learning_starts": 10_000, "updates_per_step": 1.0, "hidden": (256, 256)},
}
"""Settings not in Table S2: of Schulman et al. (2015, 2017), Haarnoja et al. (2018), Fujimoto et al. (2018)."""


@pytest.mark.parametrize("settings", TABLE_S2, ids=lambda settings: settings.__name__)
def test_default_settings_equal_the_published_ones(settings):
    defaults = settings()
    for name, value in (TABLE_S2[settings] | PUBLISHED[settings]).items():
        assert getattr(defaults, name) == value, name


@pytest.mark.exhaustive
@pytest.mark.parametrize(("algorithm", "settings"), [(SAC, SACSettings), (TD3, TD3Settings)])
def test_actions_are_uniform_before_learning_starts_and_the_policys_later(algorithm, settings):
    agent = algorithm(Standard(), LIMIT, settings(**OFF_POLICY | {"learning_starts": 512, "num_envs": 64}))
    state = agent.init(jax.random.key(4))
    random = [agent.collect(Taps(0, 9), state, jax.random.key(t), jnp.int32(0)).buffer.value[:64, 1] for t in range(8)]
    assert stats.kstest(np.concatenate(random), stats.uniform(-1, 2).cdf).pvalue > 1e-3
    later = agent.collect(Taps(0, 9), state, jax.random.key(9), jnp.int32(8))
    row = 8 * 64
    stored = np.asarray(later.buffer.value[row : row + 64, 1])
    key = jax.random.split(jax.random.key(9), 3)[0]
    np.testing.assert_allclose(stored, agent.explore(state.networks.params, state.episodes.observation, key)[:, 0])
    if algorithm is TD3:
        noise = stored - np.asarray(agent.act(state.networks.params, state.episodes.observation))[:, 0]
        assert stats.kstest(noise / 0.1, "norm").pvalue > 1e-3
