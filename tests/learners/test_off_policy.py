"""Tests SAC and TD3 on small tasks with known values, and their losses, targets and updates against references."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rooms import BEST, CHOICE, FOR_EVER, ONE_STEP, SECOND_STEP, TWO_STEPS, Rooms

import jaxaudit as ja
from jaxaudit.core.taps import Disturbance, Slot, Taps, Windows
from jaxaudit.learners.rl.replay_buffer import Transitions
from jaxaudit.learners.rl.sac import SAC, SACSettings
from jaxaudit.learners.rl.td3 import TD3, TD3Settings

pytestmark = pytest.mark.long

GAMMA = 0.9
TEMPERATURE = 0.02
TUNED_RATE = 3e-3
SMALL = {
    "num_envs": 8,
    "iteration_steps": 128,
    "learning_starts": 256,
    "batch_size": 64,
    "buffer_size": 2000,
    "learning_rate": 1e-3,
    "gamma": GAMMA,
    "tau": 0.02,
    "hidden": (32,),
    "telemetry": "basic",
}
EARLY = SMALL | {"learning_starts": 64}
DEEP = SMALL | {"hidden": (32, 32)}  # two layers learn the values within 90 iterations


def train_agent(agent, iterations):
    """Returns the state and telemetry of a training run; learning starts after its first iteration."""

    def iterate(state, index):
        return agent.step(state, jax.random.fold_in(jax.random.key(1), index), Taps(index, iterations))

    run = jax.jit(lambda key: jax.lax.scan(iterate, agent.init(key), jnp.arange(iterations)))
    return run(jax.random.key(0))


@pytest.fixture(scope="module")
def sac():
    settings = SACSettings(**DEEP, entropy_coefficient=TEMPERATURE)
    agent = SAC(Rooms(), Rooms.max_episode_steps, settings)
    return agent, *train_agent(agent, 90)


@pytest.fixture(scope="module")
def td3():
    agent = TD3(Rooms(), Rooms.max_episode_steps, TD3Settings(**DEEP, exploration_noise=0.3))
    return agent, *train_agent(agent, 90)


@pytest.fixture(scope="module", params=["sac", pytest.param("td3", marks=pytest.mark.exhaustive)])
def run(request):
    return request.getfixturevalue(request.param)


def test_td3_explores_within_the_action_space():
    agent = TD3(Rooms(), Rooms.max_episode_steps, TD3Settings(**DEEP, exploration_noise=5.0))
    params, rooms = agent.init_params(jax.random.key(0)), jnp.zeros((4096, 5))
    action = agent.explore(params, rooms, jax.random.key(1))
    assert (action.min(), action.max()) == (-1.0, 1.0)


def value(run, room):
    agent, state, _ = run
    return float(agent.value(state.networks.params, jax.nn.one_hot(room, 5)))


@pytest.mark.exhaustive
def test_the_value_before_termination_is_the_last_reward(run):
    assert value(run, ONE_STEP) == pytest.approx(1.0, abs=0.03)
    assert value(run, SECOND_STEP) == pytest.approx(1.0, abs=0.03)


def test_a_reward_one_step_away_is_discounted_once(run):
    assert value(run, TWO_STEPS) == pytest.approx(GAMMA, abs=0.04)


def test_the_value_at_truncation_is_bootstrapped(run):
    """A constant reward of one has the value 1 / (1 - gamma), whatever the time limit; SAC's entropy adds 2%."""
    assert value(run, FOR_EVER) == pytest.approx(1 / (1 - GAMMA), rel=0.04)


def test_the_policy_finds_the_rewarded_action_in_the_tasks_units(run):
    agent, state, _ = run
    action = agent.to_action_space(agent.act(state.networks.params, jax.nn.one_hot(CHOICE, 5)))
    assert float(action[0]) == pytest.approx(BEST, abs=0.12)


def test_sacs_policy_has_the_standard_deviation_of_the_closed_form(sac):
    """The best policy is proportional to exp(-(a - 0.5)^2 / alpha), of standard deviation sqrt(alpha / 2)."""
    agent, state, _ = sac
    _, log_std = agent.policy(state.networks.params["actor"], jax.nn.one_hot(CHOICE, 5))
    slope = 2.0 * (1.0 - (BEST / 2.0) ** 2)  # derivative of the task's action by the unsquashed one
    assert float(jnp.exp(log_std[0])) * slope == pytest.approx((TEMPERATURE / 2) ** 0.5, rel=0.25)


def test_before_learning_starts_updates_are_zero_and_metrics_nan(run):
    _, _, telemetry = run
    assert np.isnan(telemetry["critic_loss"][:2]).all()
    assert np.isnan(telemetry["x_grad"][:2]).all()
    assert (np.asarray(telemetry["update_norm"][:2]) == 0).all()
    assert np.isfinite(telemetry["critic_loss"][2:]).all()
    assert np.isfinite(telemetry["x_grad"][2:]).all()


def test_the_buffer_contains_transitions_of_the_task(run):
    """Each row is a possible transition, with the reward of its action in the task's units."""
    _, state, _ = run
    rows = np.asarray(state.buffer.value, np.float64)
    observation, action, reward, following, terminated = np.split(rows, [5, 6, 7, 12], axis=1)
    room = observation.argmax(1)
    expected = np.select([room == TWO_STEPS, room == CHOICE], [0.0, -((2 * action[:, 0] - BEST) ** 2)], 1.0)
    np.testing.assert_allclose(reward[:, 0], expected, atol=1e-5)
    np.testing.assert_array_equal(following.argmax(1), np.where(room == TWO_STEPS, SECOND_STEP, room))
    np.testing.assert_array_equal(terminated[:, 0], np.isin(room, [ONE_STEP, SECOND_STEP, CHOICE]))
    assert np.unique(room).size == 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", [-1.0, 0.3])
def test_a_tuned_temperature_drives_the_entropy_to_its_target(train_tuned, target):
    """Over 24 seeds the median is off by 0.005 (at most 0.025); one iteration may be off by 0.75, five in a row by 0.2.

    The telemetry has the mean temperature of an iteration of 128 updates. Adam moves the logarithm by about the
    learning rate in each, so that mean and last value are at most 128 learning rates apart.
    """
    state, telemetry = train_tuned(target)
    assert float(np.median(telemetry["entropy"][-80:])) == pytest.approx(target, abs=0.06)
    last = float(jnp.exp(state.networks.params["temperature"]))
    mean = float(telemetry["temperature"][-1])
    assert abs(np.log(mean / last)) < SMALL["iteration_steps"] * TUNED_RATE
    assert last < 0.2


@pytest.fixture(scope="module")
def train_tuned():
    """Returns a function that trains SAC with a tuned temperature towards a target; it compiles only once."""
    settings = SACSettings(**SMALL | {"learning_starts": 0, "learning_rate": TUNED_RATE}, automatic_entropy=True)
    agent = SAC(Rooms(), Rooms.max_episode_steps, settings)

    def iterate(state, index):
        return agent.step(state, jax.random.fold_in(jax.random.key(1), index), Taps(index, 120))

    @jax.jit
    def train(target):
        agent.target_entropy = target
        return jax.lax.scan(iterate, agent.init(jax.random.key(0)), jnp.arange(120))

    return train


def batch_of(rng, n=64):
    observation, following = rng.normal(size=(2, n, 5))
    action, reward = np.tanh(rng.normal(size=(n, 1))), rng.normal(size=n)
    return Transitions(observation, action, reward, following, (rng.random(n) < 0.3).astype(float))


def dense(params, x, hidden=1):
    for layer in range(hidden):
        x = np.maximum(x @ params[f"Dense_{layer}"]["kernel"] + params[f"Dense_{layer}"]["bias"], 0.0)
    return x @ params[f"Dense_{hidden}"]["kernel"] + params[f"Dense_{hidden}"]["bias"]


def critics(params, observation, action):
    inputs = np.concatenate([observation, action], axis=1)
    return np.stack([dense(params["first"], inputs)[:, 0], dense(params["second"], inputs)[:, 0]])


def networks_of(agent):
    """Returns networks whose targets differ from them, and the same in float64."""
    init = jax.jit(lambda seed: agent.init(jax.random.key(seed)).networks)
    networks = dataclasses.replace(init(3), target=init(4).target)
    return networks, jax.tree.map(lambda x: np.asarray(x, np.float64), networks)


def losses(agent, networks, batch, key):
    """Returns the undisturbed losses and metrics of critics and actor."""

    @jax.jit
    def both(networks, batch):
        arguments = networks, batch, key, agent.coefficients(networks.params)
        params = networks.params
        return agent.critic_loss(params["critic"], *arguments), agent.actor_loss(params["actor"], *arguments)

    return both(networks, jax.tree.map(np.float32, batch))


def squashed(output, noise):
    mean, log_std = np.split(output, 2, axis=1)
    action = np.tanh(mean + np.exp(log_std) * noise)
    log_density = -0.5 * (noise**2 + np.log(2 * np.pi)) - log_std - np.log(1 - action**2)
    return action, log_density.sum(1)


def test_sacs_losses_equal_float64_numpy():
    agent = SAC(Rooms(), 4, SACSettings(**SMALL))
    networks, exact = networks_of(agent)
    batch, key = batch_of(np.random.default_rng(0)), jax.random.key(5)
    noise = np.asarray(jax.random.normal(key, (64, 1)), np.float64)
    action, log_density = squashed(dense(exact.params["actor"], batch.next_observation), noise)
    after = critics(exact.target["critic"], batch.next_observation, action).min(0) - 0.2 * log_density
    target = batch.reward + GAMMA * (1 - batch.terminated) * after
    values = critics(exact.params["critic"], batch.observation, batch.action)
    (loss, metrics), (actor_loss, actor_metrics) = losses(agent, networks, batch, key)
    np.testing.assert_allclose(loss, 0.5 * ((values - target) ** 2).mean(1).sum(), rtol=1e-4)
    np.testing.assert_allclose(metrics["q_mean"], values.mean(), rtol=1e-4)

    action, log_density = squashed(dense(exact.params["actor"], batch.observation), noise)
    value = critics(exact.params["critic"], batch.observation, action).min(0)
    np.testing.assert_allclose(actor_loss, (0.2 * log_density - value).mean(), rtol=1e-4)
    np.testing.assert_allclose(actor_metrics["entropy"], -log_density.mean(), rtol=1e-4)


def test_td3s_losses_smooth_the_target_and_match_float64_numpy():
    agent = TD3(Rooms(), 4, TD3Settings(**SMALL, target_noise=0.4, target_noise_clip=0.5))
    networks, exact = networks_of(agent)
    batch, key = batch_of(np.random.default_rng(1)), jax.random.key(6)
    noise = np.clip(0.4 * np.asarray(jax.random.normal(key, (64, 1)), np.float64), -0.5, 0.5)
    assert (np.abs(noise) == 0.5).any()
    action = np.clip(np.tanh(dense(exact.target["actor"], batch.next_observation)) + noise, -1, 1)
    after = critics(exact.target["critic"], batch.next_observation, action).min(0)
    target = batch.reward + GAMMA * (1 - batch.terminated) * after
    values = critics(exact.params["critic"], batch.observation, batch.action)
    (loss, _), (actor_loss, _) = losses(agent, networks, batch, key)
    np.testing.assert_allclose(loss, ((values - target) ** 2).mean(1).sum(), rtol=1e-4)

    action = np.tanh(dense(exact.params["actor"], batch.observation))
    expected = -critics(exact.params["critic"], batch.observation, action)[0].mean()
    np.testing.assert_allclose(actor_loss, expected, rtol=1e-4)


def test_target_networks_are_exponential_moving_averages():
    agent = TD3(Rooms(), 4, TD3Settings(**SMALL))
    networks, exact = networks_of(agent)
    moved = jax.jit(lambda networks: jax.lax.fori_loop(0, 10, lambda _, n: agent.move_targets(n), networks))(networks)
    remaining = (1 - SMALL["tau"]) ** 10
    online = {name: exact.params[name] for name in ("actor", "critic")}
    expected = jax.tree.map(lambda fast, slow: fast + remaining * (slow - fast), online, exact.target)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), moved.target, expected)


@pytest.fixture(scope="module")
def learn():
    """Returns TD3, its jitted updates after a vector step with the learning rate as an argument, and three buffers."""
    agent = TD3(Rooms(), 4, TD3Settings(**SMALL))

    def learn(networks, store, key, rate):
        agent.optimizers = {k: dataclasses.replace(o, learning_rate=rate) for k, o in agent.optimizers.items()}
        return agent.learn(Taps(), networks, buffer=store, key=key, count=jnp.int32(40))[0]

    store = np.random.default_rng(0).normal(size=(3, *agent.buffer.init().shape)).astype(np.float32)
    return agent, jax.jit(learn), store


def test_target_networks_move_once_per_actor_update(learn):
    """Every second of eight critic updates updates the actor, so targets move four times; the rate is almost zero."""
    agent, learn, store = learn
    networks, exact = networks_of(agent)
    remaining = (1 - SMALL["tau"]) ** 4
    online = {name: exact.params[name] for name in ("actor", "critic")}
    expected = jax.tree.map(lambda fast, slow: fast + remaining * (slow - fast), online, exact.target)
    target = learn(networks, store[0], jax.random.key(1), np.float32(1e-12)).target
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), target, expected)


@pytest.mark.exhaustive
def test_vmapped_lanes_learn_as_alone_and_the_actor_is_delayed(learn):
    agent, learn, store = learn
    keys, rate = jax.random.split(jax.random.key(1), 3), np.float32(SMALL["learning_rate"])
    networks = jax.jit(jax.vmap(lambda key: agent.init(key).networks))(keys)
    vmapped = jax.jit(jax.vmap(learn, (0, 0, 0, None)))
    results = vmapped(networks, store, keys, rate)
    for lane in range(3):
        initial, result = (jax.tree.map(lambda x, lane=lane: x[lane], tree) for tree in (networks, results))
        alone = learn(initial, store[lane], keys[lane], rate)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), result, alone)
        assert (int(result.optimizer["critic"].count), int(result.optimizer["actor"].count)) == (8, 4)
    assert learn._cache_size() == vmapped._cache_size() == 1


@pytest.mark.exhaustive
def test_raise_entropy_multiplies_sacs_temperature_during_an_alarm():
    """Updates at a temperature of 1/4 with the alarm on equal those at 2 without it, bit for bit."""
    agent = SAC(Rooms(), 4, SACSettings(**SMALL))
    store = jax.random.normal(jax.random.key(0), agent.buffer.init().shape)
    networks, _ = networks_of(agent)
    lane = Disturbance(jnp.array([8.0]), Windows(*jnp.array([[0], [9], [9], [9]])), (jnp.array([True]),))

    @jax.jit
    def learn(temperature, alarm):
        agent.temperature = lambda params: temperature
        taps = Taps(
            slots=(Slot(ja.raise_entropy),),
            paths={"entropy_coefficient": ("",)},
            key=jax.random.key(2),
            lane=lane,
            idle=jnp.array([0]),
            alarm=alarm,
        )
        return agent.learn(taps, networks, buffer=store, key=jax.random.key(1), count=jnp.int32(40))[0].params

    raised, hot, cold = learn(0.25, True), learn(2.0, False), learn(0.25, False)
    for part in ("actor", "critic"):
        jax.tree.map(np.testing.assert_array_equal, raised[part], hot[part])
        assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any()), raised[part], cold[part])))


@pytest.mark.parametrize(
    ("learner", "settings", "message"),
    [
        (ja.learners.sac, {"num_envs": 3}, "num_envs 3 does not divide iteration_steps 2048"),
        (ja.learners.sac, {"updates_per_step": 0.3}, "updates_per_step 0.3 times num_envs 8 must be a whole number"),
        (ja.learners.td3, {"policy_delay": 3}, "a whole number that policy_delay 3 divides"),
        (ja.learners.td3, {"buffer_size": 7}, "buffer_size must be at least num_envs, 8, not 7"),
        (ja.learners.td3, {"buffer_dtype": "int8"}, "buffer_dtype must be one of float32, bfloat16, float16"),
        (ja.learners.sac, {"automatic_entropy": True, "entropy_coefficient": 0.0}, "entropy_coefficient must be pos"),
        (ja.learners.sac, {"target_entropy": float("nan")}, "target_entropy must be finite"),
        (ja.learners.sac, {"hidden": [64, 0]}, r"hidden must be widths of at least 1, not \[64, 0\]"),
        (ja.learners.td3, {"hidden": []}, r"hidden must be widths of at least 1, not \[\]"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(learner, settings, message):
    with pytest.raises(ValueError, match=message):
        learner("InvertedPendulum-v5", **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "agent",
    [
        SAC(Rooms(), Rooms.max_episode_steps, SACSettings(**EARLY)),
        TD3(Rooms(), Rooms.max_episode_steps, TD3Settings(**EARLY)),
    ],
    ids=["sac", "td3"],
)
def test_periodic_reset_resets_target_networks_too(agent):
    learner = ja.remedied(ja.Learner(agent.init, agent.step), ja.remedies.periodic_reset(1))

    @jax.jit
    def advance(state, step):
        taps = Taps(step, 4, data=learner.data, key=jax.random.fold_in(jax.random.key(2), step))
        return learner.step(state, jax.random.fold_in(jax.random.key(1), step), taps)

    state = learner.init(jax.random.key(0), learner.data)
    for step in range(3):
        before, (state, telemetry) = state.learner.networks, advance(state, jnp.int32(step))
        after = state.learner.networks
        online = {name: after.params[name] for name in agent.targets}
        targets_equal_online = all(
            jax.tree.leaves(jax.tree.map(lambda x, y: bool((x == y).all()), after.target, online))
        )
        counts = [int(count) for _, count in optax.tree.get_all_with_path(after.optimizer, "count")]
        assert targets_equal_online == all(count == 0 for count in counts) == (step == 1), (
            "targets equal online networks only just after the reset"
        )
        assert telemetry["acted_periodic_reset"] == (step == 1)
        moved = jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x - y))), after.params, before.params)
        assert max(jax.tree.leaves(moved)) > 0
