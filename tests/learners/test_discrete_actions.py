"""Tests PPO and TRPO with discrete actions: problems with known answers, perturbation sites, and CartPole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probe_tasks import UNNORMALIZED_SETTINGS, ProbeTask, train
from scipy import special

import jaxaudit as ja
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import Taps
from jaxaudit.learners.rl.ppo import PPO, PPOSettings
from jaxaudit.learners.rl.trpo import TRPO, TRPOSettings, fisher_product
from jaxaudit.tasks.cartpole import CartPole

SMALL = UNNORMALIZED_SETTINGS | {"hidden": (16,)}
REWARDS = np.array([0.1, 0.5, 0.2], np.float32)


class Bandit(ProbeTask):
    """A bandit with three arms: one observation, and episodes of one step."""

    action_low = action_high = None
    actions = len(REWARDS)

    def __init__(self):
        super().__init__(lambda action: jnp.asarray(REWARDS)[action], True)

    def step(self, state, action):
        assert action.dtype == jnp.int32
        return super().step(state, action[None])


def action_probs(agent, params):
    return special.softmax(np.asarray(agent.policy(params, jnp.ones(1)).logits, np.float64))


@pytest.mark.exhaustive
def test_the_policy_with_an_entropy_bonus_is_a_softmax_of_rewards():
    """The maximum of sum_a p(a) r(a) + c H(p) is at p = softmax(r / c)."""
    coefficient = 0.3
    settings = PPOSettings(**SMALL, entropy_coefficient=coefficient, normalize_advantages=False)
    agent = PPO(Bandit(), 16, settings)
    state, telemetry = jax.jit(lambda: train(agent, 200))()
    expected = special.softmax(REWARDS / coefficient)
    np.testing.assert_allclose(action_probs(agent, state.params), expected, atol=0.03)
    assert telemetry["entropy"][-1] == pytest.approx(-(expected * np.log(expected)).sum(), abs=0.02)


@pytest.mark.exhaustive
def test_trpo_finds_the_rewarded_action_within_its_trust_region():
    agent = TRPO(Bandit(), 16, TRPOSettings(**SMALL, max_kl=0.02))
    state, telemetry = jax.jit(lambda: train(agent, 60))()
    assert action_probs(agent, state.params)[1] > 0.95
    assert (telemetry["approximate_kl"] <= 0.02).all()
    assert telemetry["accepted"][:10].all()  # later steps gain nothing


def test_the_fisher_product_equals_jacobian_and_softmax_information():
    agent = TRPO(CartPole(), 500, TRPOSettings(hidden=(5,)))
    rng = np.random.default_rng(0)
    params = jax.jit(agent.init_params)(jax.random.key(0))
    policy = {"actor": jax.tree.map(lambda p: p + np.float32(rng.normal(0, 0.5, p.shape)), params["actor"])}
    observations = np.float32(rng.normal(size=(32, 4)))
    vector = jax.tree.map(lambda p: np.float32(rng.normal(size=p.shape)), policy)
    product = jax.jit(
        lambda v: fisher_product(lambda p: agent.policy(p, observations), agent.head.fisher, policy, 0.1)(v)
    )
    flat = lambda tree: np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]).astype(np.float64)  # noqa: E731
    leaves = jax.tree.leaves(jax.jacobian(lambda p: agent.policy(p, observations).logits)(policy))
    jacobian = np.concatenate([np.float64(leaf).reshape(32, 2, -1) for leaf in leaves], axis=-1)
    p = special.softmax(np.float64(agent.policy(policy, observations).logits), axis=-1)
    information = np.einsum("ni,ij->nij", p, np.eye(2)) - np.einsum("ni,nj->nij", p, p)
    expected = np.einsum("nia,nij,njb,b->a", jacobian, information, jacobian, flat(vector)) / 32 + 0.1 * flat(vector)
    np.testing.assert_allclose(flat(product(vector)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["ppo", "trpo"])
def test_discrete_actions_are_no_site_but_the_dynamics_are(name):
    learner = getattr(ja.learners, name)("CartPole-v1", num_envs=2, rollout_length=8, minibatch_size=8)
    sites = find_sites(learner)
    assert "action" not in sites
    assert sites.paths["dynamics"] == ("gear", "gravity", "mass")
    with pytest.raises(ValueError, match="action"):
        ja.plan(learner, [ja.action_noise(0.1, onset=1)], seeds=1, steps=4)


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_sac_and_td3_refuse_discrete_actions(name):
    with pytest.raises(
        ValueError, match=f"^learner '{name}' needs continuous actions; task 'CartPole-v1' has 2 discrete ones$"
    ):
        getattr(ja.learners, name)("CartPole-v1")


@pytest.mark.exhaustive
def test_performance_is_nan_when_the_policy_is_nan():
    agent = PPO(CartPole(), 500, PPOSettings(**SMALL))
    state = jax.jit(agent.init)(jax.random.key(0))
    broken = state.replace(params=state.params | {"actor": jax.tree.map(lambda p: p * np.nan, state.params["actor"])})
    step = jax.jit(lambda state: agent.step(state, jax.random.key(1), Taps(0, 10))[1]["performance"])
    assert np.isnan(step(broken))


@pytest.mark.exhaustive
def test_stronger_gravity_lowers_cartpoles_performance():
    learner = ja.learners.ppo("CartPole-v1", **(SMALL | {"learning_rate": 1e-3}), epochs=2)
    result = ja.audit(learner, [ja.dynamics_shift(4.0, target="gravity", onset=20)], seeds=2, steps=40)
    control, heavier = np.moveaxis(result.telemetry["acting_performance"].values, 1, 0)
    np.testing.assert_array_equal(control[:, :20], heavier[:, :20])
    assert (heavier[:, 30:] < control[:, 30:]).all()


CARTPOLE_SETTINGS = {
    "ppo": {"rollout_length": 64, "minibatch_size": 128, "epochs": 4, "learning_rate": 1e-3},
    "trpo": {"rollout_length": 128, "minibatch_size": 128, "max_kl": 0.02, "fisher_every": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CARTPOLE_SETTINGS)
def test_ppo_and_trpo_learn_cartpole(name):
    """The last evaluation return is at least 475 within 100,000 environment steps on at least 7 of 8 seeds."""
    learner = getattr(ja.learners, name)(
        "CartPole-v1", num_envs=8, telemetry="basic", evaluations=10, **CARTPOLE_SETTINGS[name]
    )
    steps = 100_000 // learner.samples_per_step
    grid = ja.plan(learner, [ja.lr_spike(1.0, onset=steps - 1, duration=1)], seeds=8, steps=steps, tail=0)
    baseline, _ = ja.compiled(grid.program)(ja.inputs(grid))
    evaluations = np.asarray(baseline["evaluation_return"])[:, :8]
    last = evaluations[np.isfinite(evaluations).all(axis=1)][-1]
    assert (last >= 475).sum() >= 7, last
