"""Tests that a disturbance of acting changes the channel `performance` only through what the learner learns from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.core.grid import site_misfit
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import ACTING_SITES
from jaxaudit.runtime import registry
from jaxaudit.tasks._brax import Env, State
from jaxaudit.tasks.episodes import Episodes, Undisturbed, performance

pytestmark = pytest.mark.long

STEPS, ONSET, CLOSE = 80, 20, 35
WINDOWS = ja.metrics.MetricSettings(window=10, hold=10)
BARE = {"num_envs": 2, "evaluations": 0, "telemetry": "basic", "hidden": (8,)}
LEARNERS = {
    "ppo": lambda: ja.learners.ppo(
        "InvertedPendulum-v5",
        **BARE,
        rollout_length=32,
        minibatch_size=64,
        epochs=1,
        normalize_observations=False,
        normalize_rewards=False,
    ),
    "sac": lambda: ja.learners.sac(
        "InvertedPendulum-v5",
        **BARE,
        iteration_steps=32,
        batch_size=4,
        updates_per_step=0.5,
        learning_starts=64,
        buffer_size=400,
    ),
}
DEFAULT_KINDS = {
    "ppo": {"observation_noise", "observation_delayed", "action_noise", "dynamics_shift", "gradient_sign_flip"},
    "sac": {"observation_noise", "dynamics_shift"},
}
LEARNER_SITES = {"params", "optimizer_state", "state", "learning_rate"}
"""Sites of what is learned, and of the rate: a perturbation at the latter would let a frozen learner learn again."""


STRONG = {"action_stuck": 1.0, "observation_stuck": 0.7}
"""Magnitudes at which the single actuator, or some of the four observations, are sure to be stuck."""


def audit_frozen(learner, kinds, **window):
    """Audits a learner whose rate is zero from the onset on: a control, a frozen lane, and a lane for each kind."""

    def freeze(*parts):
        return ja.chain(*parts, ja.lr_spike(0.0, onset=ONSET, duration="end"))

    disturbed_lanes = [freeze(registry.perturbations[name](STRONG.get(name), onset=ONSET, **window)) for name in kinds]
    return ja.audit(learner, [freeze(), *disturbed_lanes], seeds=2, steps=STEPS, settings=WINDOWS)


def fitting_kinds(learner):
    sites = find_sites(learner, STEPS)
    kinds = {name: registry.perturbations[name] for name in registry.perturbations}
    return {name: kind.site for name, kind in kinds.items() if site_misfit(kind(), sites) is None}


def assert_performance_unchanged(result, kinds):
    """Asserts that performance equals the frozen lane's, and that only acting sites change acting performance."""
    performance = result.telemetry["performance"].values
    for position, (name, site) in enumerate(kinds.items(), 2):
        assert np.nanmax(result.telemetry["update_norm"].values[:, position, ONSET:]) == 0, (
            f"the lane of {name} has learned"
        )
        np.testing.assert_array_equal(performance[:, position], performance[:, 1], err_msg=name)
        acting = result.telemetry["acting_performance"].values[:, position]
        assert np.array_equal(acting, performance[:, position], equal_nan=True) == (site not in ACTING_SITES), name
    collapsed = result.summary.set_index("condition")["divergence_probability"]
    assert (collapsed.iloc[1:] == collapsed.iloc[1]).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_frozen_learner_keeps_its_performance_under_disturbed_acting(name):
    learner = LEARNERS[name]()
    kinds = {k: site for k, site in fitting_kinds(learner).items() if k in DEFAULT_KINDS[name]}
    assert_performance_unchanged(audit_frozen(learner, kinds, duration="end"), kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_a_frozen_learner_keeps_its_performance_under_every_kind(name):
    learner = LEARNERS[name]()
    kinds = {k: site for k, site in fitting_kinds(learner).items() if site not in LEARNER_SITES}
    assert_performance_unchanged(audit_frozen(learner, kinds, duration="end"), kinds)


class Copycat(Env):
    """The reward is 1 minus the squared distance of action and observation; only the time limit ends episodes."""

    cheap_reset = True
    observation_size, action_size, backend = 1, 1, "none"

    def reset(self, rng):
        return State(None, jax.random.normal(rng, (1,)), jnp.float32(0), jnp.float32(0), {}, {"rng": rng})

    def step(self, state, action):
        rng = jax.random.fold_in(state.info["rng"], 1)
        reward = 1.0 - jnp.sum((action - state.obs) ** 2)
        return state.replace(obs=jax.random.normal(rng, (1,)), reward=reward, info={"rng": rng})


TIME_LIMIT, TURNS = 10, 4
EPISODES = Episodes(Copycat(), 3, TIME_LIMIT)
UNDISTURBED = Undisturbed(EPISODES, TURNS)


def copycat_init(key):
    begin = EPISODES.init(key)
    return begin, UNDISTURBED.init(begin)


def copycat_step(state, key, taps):
    """The policy copies the observation and learns nothing, so that its return is the time limit."""

    def turn(taps, episodes, index):
        after, transition = EPISODES.step(episodes, jax.random.fold_in(key, index), episodes.observation, taps)
        return after, transition.terminated | transition.truncated

    begin, copies = state
    copies = UNDISTURBED.begin(copies, begin, taps)
    training, ended = taps.scan(turn, begin, jnp.arange(TURNS))
    copies, training = UNDISTURBED.follow(
        copies, training, ended.any(0), taps, lambda taps, begin: taps.scan(turn, begin, jnp.arange(TURNS))[0]
    )
    return (training, copies), {
        "performance": performance(UNDISTURBED.clean(copies, training)),
        "acting_performance": performance(training),
        "awaited": copies.awaited.sum(),
    }


@pytest.fixture(scope="module")
def disturbed_result():
    perturbations = [
        ja.observation_noise(1.0, onset=ONSET, duration=CLOSE - ONSET),
        ja.action_noise(3.0, onset=ONSET, duration=1, period=2),
        ja.reward_noise(5.0, onset=ONSET, duration="end"),
        ja.observation_noise(0.0, onset=ONSET, duration="end"),
        ja.observation_delayed(1, onset=ONSET, duration=1),
    ]
    learner = ja.Learner(copycat_init, copycat_step)
    return ja.audit(learner, perturbations, seeds=2, steps=STEPS, settings=WINDOWS)


def performance_and_acting(result, position):
    return (result.telemetry[name].values[:, position] for name in ("performance", "acting_performance"))


@pytest.mark.exhaustive
def test_the_performance_of_a_constant_policy_is_its_return(disturbed_result):
    clean = disturbed_result.telemetry["performance"].values[:, :, 2 * -(-TIME_LIMIT // TURNS) :]
    np.testing.assert_array_equal(clean, TIME_LIMIT)


@pytest.mark.exhaustive
def test_acting_is_worse_until_all_disturbed_episodes_have_ended(disturbed_result):
    _, acting = performance_and_acting(disturbed_result, 1)
    longest = -(-TIME_LIMIT // TURNS)
    assert (acting[:, ONSET + longest : CLOSE] < TIME_LIMIT - 5).all()
    np.testing.assert_array_equal(acting[:, CLOSE + longest :], TIME_LIMIT)
    awaited = disturbed_result.telemetry["awaited"].values[:, 1]
    np.testing.assert_array_equal(awaited[:, ONSET:CLOSE], EPISODES.num_envs)
    assert (np.diff(awaited[:, CLOSE - 1 : CLOSE + longest]) <= 0).all()
    assert not awaited[:, :ONSET].any()
    assert not awaited[:, CLOSE + longest - 1 :].any()


@pytest.mark.exhaustive
def test_a_periodic_window_keeps_the_undisturbed_copies(disturbed_result):
    _, acting = performance_and_acting(disturbed_result, 2)
    assert (acting[:, ONSET + TIME_LIMIT :] < TIME_LIMIT - 5).all()
    assert disturbed_result.telemetry["awaited"].values[:, 2, ONSET:].all()


@pytest.mark.exhaustive
def test_copies_are_kept_until_episodes_disturbed_in_one_step_end(disturbed_result):
    _, acting = performance_and_acting(disturbed_result, 5)
    assert (acting[:, ONSET : ONSET + 3] < TIME_LIMIT).any()
    np.testing.assert_array_equal(acting[:, ONSET + 1 + -(-TIME_LIMIT // TURNS) :], TIME_LIMIT)


def test_both_performances_are_equal_without_a_disturbance_of_acting(disturbed_result):
    for position in (0, 3, 4):
        clean, acting = performance_and_acting(disturbed_result, position)
        np.testing.assert_array_equal(clean, acting)
    assert not disturbed_result.telemetry["awaited"].values[:, [0, 3, 4]].any()


def test_a_collapse_of_acting_is_no_collapse_of_performance(disturbed_result):
    lanes = disturbed_result.lanes.isel(condition=1)
    assert np.isfinite(lanes["acting_collapse_time"]).all()
    assert not np.isfinite(lanes["collapse_time"]).any()


def test_closed_taps_return_undisturbed_values():
    def step(state, key, taps):
        observation = taps("observation", jnp.ones(3))
        return state, {
            "performance": jnp.sum(taps.closed("observation", jnp.ones(3))),
            "acting_performance": jnp.sum(observation),
        }

    noise = ja.observation_noise(1.0, onset=2, duration="end")
    telemetry = ja.audit(ja.Learner(lambda key: jnp.zeros(()), step), [noise], seeds=2, steps=6).telemetry
    assert (telemetry["performance"] == 3).all()
    assert (telemetry["acting_performance"].values[:, 1, 2:] != 3).all()
