"""Tests audits of SAC and TD3: neutral lanes, targets, states of perturbations, isolation of NaN, and rolling back.

By default the two have different perturbations, which together act at all sites; SAC has all of them in the slow tests.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from without_baseline import train_without_baseline

import jaxaudit as ja
from jaxaudit.core.batches import layout
from jaxaudit.execution.engine import Engine
from jaxaudit.runtime import registry

pytestmark = pytest.mark.long

OPEN, CLOSE, STEPS = 3, 5, 6
TINY = {
    "num_envs": 2,
    "iteration_steps": 32,
    "learning_starts": 40,
    "batch_size": 16,
    "buffer_size": 150,
    "hidden": (8,),
    "evaluations": 1,
    "evaluation_episodes": 1,
    "max_grad_norm": 0.5,
}


def fade_after_first(key, value, magnitude, count):
    """Multiplies every gradient except the first by 1 - magnitude."""
    factor = jnp.where(count > 0, 1.0 - magnitude, 1.0)
    return jax.tree.map(lambda x: factor * x, value), count + 1


FADING = ja.Kind("fading", "signal", "gradient", fade_after_first, target="critic", init=lambda value: jnp.int32(0))()


def in_window(perturbation):
    return dataclasses.replace(perturbation, when=ja.window(OPEN, CLOSE - OPEN))


def forked_from_a_baseline(learner, perturbations):
    """Returns telemetry `[condition, step, ...]` by channel, of lanes that fork where their windows open."""
    result = ja.audit(learner, perturbations, seeds=1, steps=STEPS, settings=ja.metrics.MetricSettings(2))
    return {k: v.values[0] for k, v in result.telemetry.items() if v.dims[:3] == ("seed", "condition", "step")}


def forked_at_step_0(learner, perturbations):
    """Returns the same for lanes that fork at step 0, where a neutral perturbation of another kind opens."""
    noise, rate = ja.weight_noise(0.0, onset=0, duration=1), ja.lr_spike(1.0, onset=0, duration=1)
    chains = [ja.chain(noise if p.name == "lr_spike" else rate, p) for p in perturbations]
    return {k: v[0] for k, v in train_without_baseline(learner, chains, seeds=1, steps=STEPS).items()}


def perturbations_of(*names):
    return [registry.perturbations[name]() for name in names]


SITES = {
    "sac": perturbations_of("adversarial_observation", "clip_failure", "layer_reset", "momentum_noise", "reward_delay"),
    "td3": perturbations_of("adversarial_reward", "action_delayed", "weight_noise"),
}
ALL_KINDS = [*SITES["sac"], *perturbations_of("critic_reset", "second_moment_drift")]


def audited(name, perturbations, train, **settings):
    learner = getattr(ja.learners, name)("InvertedPendulum-v5", **TINY, **settings)
    neutral = [dataclasses.replace(p, magnitude=p.neutral) for p in perturbations]
    spike = ja.lr_spike(100.0, target="critic")
    broken = ja.weight_noise(float("inf"), target="actor")
    untargeted = [dataclasses.replace(p, target=None) for p in perturbations]
    return learner, train(learner, [in_window(p) for p in [*neutral, spike, broken, FADING, *untargeted]]), len(neutral)


CASES = {
    "sac": lambda: audited("sac", SITES["sac"], forked_at_step_0, automatic_entropy=True),
    "td3": lambda: audited("td3", SITES["td3"], forked_at_step_0),
    "sac, everything": lambda: audited("sac", ALL_KINDS, forked_from_a_baseline, automatic_entropy=True),
}


SAC, TD3 = (pytest.param(name, marks=pytest.mark.exhaustive) for name in ("sac", "td3"))
ALL_KINDS = pytest.param("sac, everything", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[SAC, TD3, ALL_KINDS])
def audit(request):
    return CASES[request.param]()


def equal(a, b):
    return np.array_equal(a, b, equal_nan=True)


def test_a_neutral_lane_equals_the_control_bitwise(audit):
    _, telemetry, neutral = audit
    for channel, values in telemetry.items():
        for condition in range(1, 1 + neutral):
            assert equal(values[condition], values[0]), channel


def test_every_perturbation_acts_from_the_start_of_its_window(audit):
    _, telemetry, neutral = audit
    for condition in range(4 + neutral, 4 + 2 * neutral):
        for channel, values in telemetry.items():
            assert equal(values[condition, :OPEN], values[0, :OPEN]), channel
        assert any(not equal(values[condition, OPEN:], values[0, OPEN:]) for values in telemetry.values()), condition


def test_a_targeted_lr_spike_acts_on_the_critic_only(audit):
    _, telemetry, neutral = audit
    spiked = 1 + neutral
    rates = {name: telemetry[f"{name}_learning_rate"][spiked, 1:] for name in ("actor", "critic")}
    np.testing.assert_allclose(rates["actor"], 3e-4, rtol=1e-5)
    is_open = (np.arange(1, STEPS) >= OPEN) & (np.arange(1, STEPS) < CLOSE)
    np.testing.assert_allclose(rates["critic"], np.where(is_open, 3e-2, 3e-4), rtol=1e-5)


def test_a_perturbations_state_is_carried_through_the_updates(audit):
    """The critic's gradient is zero from the second update in the window on; the actor's never is."""
    _, telemetry, neutral = audit
    norms = {name: telemetry[f"{name}_gradient_norm"][[0, 3 + neutral]] for name in ("actor", "critic")}
    control, fading = norms["critic"]
    assert 0 < fading[OPEN] < 0.2 * control[OPEN]
    assert fading[OPEN + 1] == 0
    assert (fading[CLOSE:] > 0).all()
    assert (norms["actor"][1, 1:] > 0).all()


def test_a_lane_of_nan_changes_no_other_lane(audit):
    _, telemetry, neutral = audit
    assert np.isnan(telemetry["params_norm"][2 + neutral, OPEN:]).all()
    assert np.isfinite(telemetry["params_norm"][: 2 + neutral]).all()
    assert np.isfinite(telemetry["params_norm"][3 + neutral :]).all()


def test_telemetry_is_nan_until_learning_starts_and_finite_afterwards(audit):
    learner, telemetry, _ = audit
    channels = {"critic_loss", "actor_loss", "q_mean", "x_grad", "x_grad_dominant", "x_mem", "gradient_norm"}
    channels |= {"entropy", "temperature"} if learner.name == "sac" else set()
    for channel in channels:
        assert np.isnan(telemetry[channel][0, 0]), channel
        assert np.isfinite(telemetry[channel][0, 1:]).all(), channel
    ((_, layers),) = learner.channel("layer_gradient_norm").dims
    assert telemetry["layer_gradient_norm"].shape[-1] == len(layers) == 12
    assert np.isfinite(telemetry["evaluation_return"][0, STEPS - 1])


def test_clip_failure_is_refused_without_clipping():
    learner = ja.learners.td3("InvertedPendulum-v5", **TINY | {"max_grad_norm": 0.0})
    with pytest.raises(ValueError, match="acts at site 'clip_norm', which the learner does not tap"):
        ja.plan(learner, [in_window(ja.clip_failure(10.0))], seeds=1, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "exploration"), [("sac", {}), ("td3", {"exploration_noise": 0.3})])
def test_sac_and_td3_learn_inverted_pendulum(name, exploration):
    learner = getattr(ja.learners, name)(
        "InvertedPendulum-v5",
        hidden=(64, 64),
        learning_rate=1e-3,
        tau=0.02,
        learning_starts=1000,
        iteration_steps=512,
        buffer_size=50_000,
        evaluations=15,
        telemetry="basic",
        **exploration,
    )
    steps = 30
    grid = ja.plan(learner, [ja.lr_spike(1.0, onset=steps - 1, duration=1)], seeds=4, steps=steps, tail=0)
    baseline, _ = ja.compiled(grid.program)(ja.inputs(grid))
    best = np.nanmax(np.asarray(baseline["evaluation_return"])[:, :4], axis=0)
    assert steps * learner.samples_per_step < 16_000
    assert (best >= 950).sum() >= 3, best


@dataclasses.dataclass(frozen=True)
class AlarmAt:
    """A watch that raises an alarm at one step; it counts the steps itself."""

    step: int
    provenance: str = "none"

    def begin(self):
        return jax.numpy.int32(0)

    def follow(self, count, telemetry):
        return count + 1, jax.numpy.where(count == self.step, 1.0, -1.0)


@pytest.mark.exhaustive
def test_roll_back_keeps_the_replay_buffer():
    """SAC rolls back from step 9 to step 4: its buffer keeps all steps, and its networks are those of step 4."""
    learner = ja.learners.sac(
        "InvertedPendulum-v5",
        num_envs=2,
        iteration_steps=16,
        learning_starts=16,
        batch_size=4,
        hidden=(8,),
        updates_per_step=0.5,
        buffer_size=400,
        evaluations=0,
        telemetry="basic",
    )
    grid = ja.plan(learner, [ja.roll_back(4, onset=1)], seeds=1, steps=12, watch=lambda *_: AlarmAt(8))
    engine = Engine(grid, 12)
    first, batch = layout(grid)
    states, _ = engine.advance(first, engine.initial(first), 0, 1)
    copies = engine.copies(first, states)
    states, rows = engine.advance(batch, engine.forked(lambda seeds: copies, batch), 1, 12)
    lanes = jax.tree.map(np.asarray, states.learner)
    control, rolled_back = (jax.tree.map(lambda x, lane=lane: x[lane], lanes) for lane in (0, 1))
    written = 12 * 16
    for store in (control.buffer.value, rolled_back.buffer.value):
        assert (store[:written] != 0).any(1).all(), "every row up to here was written"
        assert not store[written:].any()
    before = 9 * 16
    np.testing.assert_array_equal(control.buffer.value[:before], rolled_back.buffer.value[:before])
    norms = np.asarray(rows["params_norm"])[:, :2]
    assert (norms[:8, 0] == norms[:8, 1]).all()
    assert norms[8, 0] != norms[8, 1]
