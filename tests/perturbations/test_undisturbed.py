"""Performance is what the policy is worth: a disturbance of acting moves it only through what the learner learns."""

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
FEW = {
    "ppo": {"observation_noise", "observation_delayed", "action_noise", "dynamics_shift", "gradient_sign_flip"},
    "sac": {"observation_noise", "dynamics_shift"},
}
WRITES = {"params", "optimizer_state", "state", "learning_rate"}
"""Sites of what a learner is; at the last one a perturbation would set it learning again."""


STRONG = {"action_stuck": 1.0, "observation_stuck": 0.7}
"""Magnitudes at which the one actuator, or some of the four observations, are sure to be stuck."""


def frozen(learner, kinds, **window):
    """An audit of a learner whose rate is zero from the onset on, undisturbed first and then by every kind."""

    def still(*parts):
        return ja.chain(*parts, ja.lr_spike(0.0, onset=ONSET, duration="end"))

    strong = [still(registry.perturbations[name](STRONG.get(name), onset=ONSET, **window)) for name in kinds]
    return ja.audit(learner, [still(), *strong], seeds=2, steps=STEPS, settings=WINDOWS)


def kinds_of(learner):
    sites = find_sites(learner, STEPS)
    kinds = {name: registry.perturbations[name] for name in registry.perturbations}
    return {name: kind.site for name, kind in kinds.items() if site_misfit(kind(), sites) is None}


def assert_innocent(result, kinds):
    """The policy is what it was, so its performance is; and that of its acting is felt where acting is disturbed."""
    performance = result.telemetry["performance"].values
    for position, (name, site) in enumerate(kinds.items(), 2):
        assert np.nanmax(result.telemetry["update_norm"].values[:, position, ONSET:]) == 0, f"{name} unfroze it"
        np.testing.assert_array_equal(performance[:, position], performance[:, 1], err_msg=name)
        acting = result.telemetry["acting_performance"].values[:, position]
        assert np.array_equal(acting, performance[:, position], equal_nan=True) == (site not in ACTING_SITES), name
    collapsed = result.summary.set_index("condition")["divergence_probability"]
    assert (collapsed.iloc[1:] == collapsed.iloc[1]).all()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ppo", "sac"])
def test_a_learner_that_cannot_learn_keeps_its_performance_however_it_is_disturbed(name):
    learner = LEARNERS[name]()
    kinds = {k: site for k, site in kinds_of(learner).items() if k in FEW[name]}
    assert_innocent(frozen(learner, kinds, duration="end"), kinds)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_that_cannot_learn_keeps_its_performance_under_everything(name):
    learner = LEARNERS[name]()
    kinds = {k: site for k, site in kinds_of(learner).items() if site not in WRITES}
    assert_innocent(frozen(learner, kinds, duration="end"), kinds)


class Copycat(Env):
    """The reward is 1 less the squared distance of the action from the observation; an episode never ends itself."""

    cheap_reset = True
    observation_size, action_size, backend = 1, 1, "none"

    def reset(self, rng):
        return State(None, jax.random.normal(rng, (1,)), jnp.float32(0), jnp.float32(0), {}, {"rng": rng})

    def step(self, state, action):
        rng = jax.random.fold_in(state.info["rng"], 1)
        reward = 1.0 - jnp.sum((action - state.obs) ** 2)
        return state.replace(obs=jax.random.normal(rng, (1,)), reward=reward, info={"rng": rng})


LIMIT, TURNS = 10, 4
EPISODES = Episodes(Copycat(), 3, LIMIT)
UNDISTURBED = Undisturbed(EPISODES, TURNS)


def copycat_init(key):
    begin = EPISODES.init(key)
    return begin, UNDISTURBED.init(begin)


def copycat_step(state, key, taps):
    """The policy is to do as it sees, and it learns nothing: what it is worth is the time limit."""

    def turn(taps, episodes, index):
        after, seen = EPISODES.step(episodes, jax.random.fold_in(key, index), episodes.observation, taps)
        return after, seen.terminated | seen.truncated

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
def disturbed():
    wild = [
        ja.observation_noise(1.0, onset=ONSET, duration=CLOSE - ONSET),
        ja.action_noise(3.0, onset=ONSET, duration=1, period=2),
        ja.reward_noise(5.0, onset=ONSET, duration="end"),
        ja.observation_noise(0.0, onset=ONSET, duration="end"),
        ja.observation_delayed(1, onset=ONSET, duration=1),
    ]
    learner = ja.Learner(copycat_init, copycat_step)
    return ja.audit(learner, wild, seeds=2, steps=STEPS, settings=WINDOWS)


def lanes_of(result, position):
    return (result.telemetry[name].values[:, position] for name in ("performance", "acting_performance"))


@pytest.mark.exhaustive
def test_the_performance_of_a_policy_that_stays_is_its_worth(disturbed):
    clean = disturbed.telemetry["performance"].values[:, :, 2 * -(-LIMIT // TURNS) :]
    np.testing.assert_array_equal(clean, LIMIT)


def test_acting_is_worse_while_it_is_disturbed_and_until_no_return_is_of_then(disturbed):
    _, acting = lanes_of(disturbed, 1)
    longest = -(-LIMIT // TURNS)
    assert (acting[:, ONSET + longest : CLOSE] < LIMIT - 5).all()
    np.testing.assert_array_equal(acting[:, CLOSE + longest :], LIMIT)
    awaited = disturbed.telemetry["awaited"].values[:, 1]
    np.testing.assert_array_equal(awaited[:, ONSET:CLOSE], EPISODES.num_envs)
    assert (np.diff(awaited[:, CLOSE - 1 : CLOSE + longest]) <= 0).all()
    assert not awaited[:, :ONSET].any()
    assert not awaited[:, CLOSE + longest - 1 :].any()


def test_a_window_that_opens_again_and_again_keeps_the_copies(disturbed):
    _, acting = lanes_of(disturbed, 2)
    assert (acting[:, ONSET + LIMIT :] < LIMIT - 5).all()
    assert disturbed.telemetry["awaited"].values[:, 2, ONSET:].all()


def test_a_window_of_one_step_is_waited_out(disturbed):
    _, acting = lanes_of(disturbed, 5)
    assert (acting[:, ONSET : ONSET + 3] < LIMIT).any()
    np.testing.assert_array_equal(acting[:, ONSET + 1 + -(-LIMIT // TURNS) :], LIMIT)


def test_lanes_whose_acting_is_not_disturbed_have_one_performance(disturbed):
    for position in (0, 3, 4):
        clean, acting = lanes_of(disturbed, position)
        np.testing.assert_array_equal(clean, acting)
    assert not disturbed.telemetry["awaited"].values[:, [0, 3, 4]].any()


def test_the_collapse_of_acting_is_told_apart(disturbed):
    lanes = disturbed.lanes.isel(condition=1)
    assert np.isfinite(lanes["acting_collapse_time"]).all()
    assert not np.isfinite(lanes["collapse_time"]).any()


def test_a_learner_measures_through_closed_taps():
    def step(state, key, taps):
        seen = taps("observation", jnp.ones(3))
        return state, {
            "performance": jnp.sum(taps.closed("observation", jnp.ones(3))),
            "acting_performance": jnp.sum(seen),
        }

    noise = ja.observation_noise(1.0, onset=2, duration="end")
    told = ja.audit(ja.Learner(lambda key: jnp.zeros(()), step), [noise], seeds=2, steps=6).telemetry
    assert (told["performance"] == 3).all()
    assert (told["acting_performance"].values[:, 1, 2:] != 3).all()
