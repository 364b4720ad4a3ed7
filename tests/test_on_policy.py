"""What PPO and TRPO share, on tasks whose values are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import PLAIN, Probe, train

import jaxaudit as ja
from jaxaudit.learners.ppo import PPO, PPOSettings
from jaxaudit.learners.trpo import TRPO, TRPOSettings
from jaxaudit.taps import Taps

AGENTS = {
    "ppo": (PPO, PPOSettings(**PLAIN, gamma=0.9, clip_value=False, anneal=False, entropy_coefficient=0.0)),
    "trpo": (TRPO, TRPOSettings(**PLAIN, gamma=0.9)),
}
LIMIT = 4


@pytest.fixture(scope="module", params=AGENTS)
def learned(request):
    """Value, mean action and performance of agents trained side by side on three probes, by the probe's name."""
    algorithm, settings = AGENTS[request.param]

    def lane(rewards_action, terminates):
        probe = Probe(lambda a: jnp.where(rewards_action, -((a - 0.5) ** 2), 1.0), terminates)
        agent = algorithm(probe, LIMIT, settings)
        state, telemetry = train(agent, 200)
        seen = jnp.ones(1)
        return agent.value(state.params, seen), agent.policy(state.params, seen)[0][0], telemetry["performance"]

    found = jax.jit(jax.vmap(lane))(jnp.array([False, False, True]), jnp.array([True, False, True]))
    names = ("terminated", "truncated", "action")
    return {name: tuple(np.asarray(x)[index] for x in found) for index, name in enumerate(names)}


def test_a_terminated_episode_is_worth_its_reward_alone(learned):
    value, _, _ = learned["terminated"]
    assert value == pytest.approx(1.0, abs=0.02)


def test_a_truncated_episode_is_bootstrapped_through(learned):
    """A constant reward of one for ever is worth 1 / (1 - gamma), whatever the time limit."""
    value, _, _ = learned["truncated"]
    assert value == pytest.approx(10.0, rel=0.02)


def test_the_policy_finds_the_rewarded_action(learned):
    _, mean, performance = learned["action"]
    assert mean == pytest.approx(0.5, abs=0.1)
    assert performance[-1] > performance[0] + 0.3


def test_performance_is_not_contaminated_by_a_disturbed_reward():
    settings = PPOSettings(**(PLAIN | {"num_envs": 2, "epochs": 1}))
    agent = PPO(Probe(lambda a: jnp.float32(1.0), False), 16, settings)
    learner = ja.Learner(agent.init, agent.step, name="probe")
    result = ja.audit(learner, [ja.reward_scale(100.0, onset=5, duration="end")], seeds=2, steps=12)
    performance = result.telemetry["performance"].values
    assert (performance[:, :, 5:] == 16.0).all()
    losses = result.telemetry["value_loss"].values
    assert (losses[:, 1, 6:] > 100 * losses[:, 0, 6:]).all()


def test_an_environment_with_dear_resets_gets_new_ones_every_iteration():
    class Dear(Probe):
        cheap_reset = False

        def reset(self, rng):
            return super().reset(rng).replace(obs=jax.random.normal(rng, (1,)))

    agent = PPO(Dear(lambda a: a, True), 16, PPOSettings(**(PLAIN | {"num_envs": 2})))
    state = agent.init(jax.random.key(0))
    collect = jax.jit(lambda state, key: agent.collect(state, key, Taps())[0])
    pools = [np.asarray(state.episodes.pool.obs)]
    for index in range(2):
        state = collect(state, jax.random.key(index))
        pools.append(np.asarray(state.episodes.pool.obs))
    assert np.unique(np.stack(pools)).size == np.stack(pools).size
