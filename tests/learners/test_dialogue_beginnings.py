"""Tests initialisation, warm starts, curricula, schedules and reward scales of dialogue learners."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.core.optimizer import DECAYS, warmup_decay
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.hop import Hop
from jaxaudit.dialogues.protocol import POLICY
from jaxaudit.learners.dialogue import demonstrations
from jaxaudit.learners.dialogue.network import HEAD, Network
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.learners.dialogue.telemetry.rewards import Scale, reward_statistics
from jaxaudit.models import gpt2, gpt2_checkpoint

pytestmark = pytest.mark.long

HOP = Hop(difficulty=1.0, entities=3, hops=2, length=13)
SMALL = {"size": "tiny", "prompts": 2, "group_size": 2, "minibatches": 1, "epochs": 1, "performance_rows": 2}
SMALL |= {"warm_start": 0, "reward_model_warm_start": 0, "telemetry": "basic"}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(8, 1, 2))


def initial_state(**settings):
    learner = ja.learners.ppo_lm(HOP, **SMALL | {"reward": "learned"} | settings)
    return jax.jit(learner.init)(jax.random.key(0), learner.data)


def trunk(params):
    return {name: value for name, value in params.items() if name != HEAD}


def equal(tree_a, tree_b):
    pairs = zip(jax.tree.leaves(tree_a), jax.tree.leaves(tree_b), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.exhaustive
def test_value_and_reward_models_begin_as_policy_checkpoint_or_random(tmp_path):
    model = gpt2.GPT2(HOP.vocabulary, HOP.length, gpt2.SIZES["tiny"])
    stored = [gpt2.init_params(model, jax.random.key(seed)) for seed in (1, 2, 3)]
    paths = [str(tmp_path / name) for name in ("policy", "critic", "reward model")]
    for path, params in zip(paths, stored, strict=True):
        gpt2_checkpoint.save(path, params, model)
    default = initial_state(checkpoint=paths[0])
    for params in (default.critic.params, default.reward_model):
        assert equal(trunk(params), stored[0])
        assert not jax.tree.leaves(params[HEAD])[0].any()
    separate = initial_state(checkpoint=paths[0], critic_init=paths[1], reward_model_init=paths[2])
    assert equal(separate.policy.params, stored[0])
    assert equal(trunk(separate.critic.params), stored[1])
    assert equal(trunk(separate.reward_model), stored[2])
    random = initial_state(checkpoint=paths[0], critic_init="random", reward_model_init="random")
    trunks = [trunk(random.critic.params), trunk(random.reward_model), stored[0]]
    assert not any(equal(trunks[i], trunks[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    learner = ja.learners.ppo_lm(HOP, **SMALL, checkpoint=paths[0], critic_init=paths[1])
    assert set(learner.provenance) == {"checkpoint", "critic_init"}


@pytest.mark.exhaustive
def test_value_and_reward_models_begin_as_the_warm_started_policy():
    state = initial_state(warm_start=3, warm_start_rows=4)
    assert equal(trunk(state.critic.params), state.policy.params)
    assert equal(trunk(state.reward_model), state.policy.params)
    assert not equal(state.policy.params, initial_state().policy.params)


def test_critic_init_other_than_policy_is_refused_with_adapters():
    with pytest.raises(ValueError, match="critic_init must be 'policy' with adapters"):
        ja.learners.ppo_lm(HOP, **SMALL, checkpoint="somewhere", lora_rank=2, critic_init="random")


@pytest.mark.exhaustive
def test_reward_model_training_depends_on_its_own_settings_only():
    trained = {"reward_model_warm_start": 2, "reward_model_init": "random"}
    first = initial_state(**trained, reward_model_pairs=4)
    others = [
        initial_state(**trained, reward_model_pairs=4, warm_start_rows=7, warm_start_learning_rate=0.5),
        initial_state(**trained, reward_model_pairs=5),
        initial_state(**trained, reward_model_pairs=4, reward_model_learning_rate=0.5),
    ]
    assert [equal(first.reward_model, state.reward_model) for state in others] == [True, False, False]


@pytest.mark.parametrize(
    "updates", [pytest.param(1, marks=pytest.mark.exhaustive), demonstrations.UPDATES_PER_CHECK + 1]
)
@pytest.mark.exhaustive
def test_a_warm_start_makes_exactly_the_updates_of_its_setting(updates):
    """While a gradient keeps its sign, Adam moves by about the rate per step: the largest change counts steps."""
    policy = Network(gpt2.GPT2(HOP.vocabulary, HOP.length, gpt2.SIZES["tiny"]))
    params, rate = policy.init(jax.random.key(0)), 1e-5
    settings = DialogueSettings(warm_start=updates, warm_start_rows=4, warm_start_learning_rate=rate)
    numbers = dataclasses.replace(settings.numbers(difficulty=1.0), warm_start_success=1.0)

    @jax.jit
    def run(params):
        return demonstrations.warm_start_policy(
            policy,
            params,
            HOP,
            jax.random.key(1),
            lambda params, key: jnp.float32(0.0),
            settings,
            jax.tree.map(jnp.float32, numbers),
        )

    after, success = run(params)
    change = max(float(jnp.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (after, params)), strict=True))
    assert success == 0
    assert (updates - 0.7) * rate < change < (updates + 0.3) * rate


@pytest.mark.parametrize(("right", "direction"), [(0.9, 1), (0.1, -1)])
def test_a_warm_start_imitates_as_many_right_demonstrations_as_its_setting_says(right, direction, monkeypatch):
    """The policy has one parameter: it is the log-probability of right demonstrations, and minus that of wrong ones."""

    def demonstrate(dialogue, keys, difficulty, is_right):
        entries = dict.fromkeys(field.name for field in dataclasses.fields(Rows))
        return Rows(**entries | {"tokens": is_right[:, None], "role": jnp.full((len(keys), 1), POLICY)})

    def log_prob_and_entropy(params, base, rows, temperature):
        return jnp.where(rows.tokens, params, -params), None

    monkeypatch.setattr(demonstrations, "demonstrate", demonstrate)
    settings = DialogueSettings(
        warm_start=1, warm_start_rows=500, warm_start_right=right, warm_start_success=1.0, warm_start_learning_rate=0.1
    )
    after, _ = demonstrations.warm_start_policy(
        SimpleNamespace(log_prob_and_entropy=log_prob_and_entropy),
        jnp.float32(0.0),
        None,
        jax.random.key(0),
        lambda params, key: jnp.float32(0.0),
        settings,
        settings.numbers(1.0),
    )
    assert after == pytest.approx(0.1 * direction, rel=1e-3), "an update of Adam's first step has the learning rate"


def test_reward_gap_is_in_standard_deviations_of_each_reward():
    rng = np.random.default_rng(0)
    score, gold = 5 + 3 * rng.normal(size=50), rng.random(50)
    kept, later = np.arange(10) < 8, np.arange(10)
    scales = {"proxy": Scale.of(score), "gold": Scale.of(gold)}
    gap = reward_statistics(gold[later], score[later] + 6.0, {}, kept, scales)["reward_gap"]
    expected = (score[later] + 6 - score.mean()) / score.std() - (gold[later] - gold.mean()) / gold.std()
    np.testing.assert_allclose(gap.value, expected[kept].mean(), rtol=1e-5)
    np.testing.assert_allclose(Scale.of(np.ones(4))(3.0), 2.0)


@pytest.mark.exhaustive
def test_reward_scales_are_measured_on_rows_of_the_reference():
    state = initial_state(reward_model_warm_start=5)
    assert state.scales["proxy"].std > 0
    mean, std = state.scales["gold"].mean, state.scales["gold"].std
    np.testing.assert_allclose(std, np.sqrt(mean * (1 - mean)), rtol=1e-5, err_msg="gold rewards are 0 or 1")


@pytest.mark.exhaustive
def test_a_curriculum_raises_difficulty_to_the_dialogues():
    hop = Hop(difficulty=2.0, entities=3, hops=2, length=13)
    learner = ja.learners.grpo(hop, **SMALL, curriculum=0.5)
    algorithm, numbers = learner.step.__self__, learner.data.numbers
    difficulties = [float(algorithm.collector._difficulty(hop, numbers, Taps(t, 8))) for t in range(8)]
    np.testing.assert_allclose(difficulties, [1.0, 1.25, 1.5, 1.75, 2.0, 2.0, 2.0, 2.0])
    assert float(algorithm.collector._difficulty(hop, numbers, Taps(0))) == 2.0

    large = ja.learners.grpo(hop, **SMALL | {"prompts": 64}, curriculum=0.5)
    algorithm, data = large.step.__self__, large.data
    state = jax.jit(algorithm.init)(jax.random.key(0), data)

    @jax.jit
    def hops_in_prompts(step):
        """Returns the number of hops in each prompt of a step."""
        models = algorithm.models_of(state, data)
        rows = algorithm.collector._sample_rows(
            models, hop, data.numbers, 1.0, jax.random.key(1), Taps(step, 8, data=data)
        )
        return rows.tokens[:, 0]

    one_hop, two_hops = hop.token["1"], hop.token["2"]
    first, last = (np.asarray(hops_in_prompts(jnp.int32(t))) for t in (0, 7))
    assert (first == one_hop).all()
    assert 0.2 < np.mean(last == two_hops) < 0.8


@pytest.mark.parametrize("decay", DECAYS)
def test_learning_rates_warm_up_and_decay(decay):
    rate = warmup_decay(2.0, 0.25, decay, 0.5)
    falling = {"constant": [2.0, 2.0, 2.0], "linear": [2.0, 1.5, 1.0], "cosine": [2.0, 1.5, 1.0]}[decay]
    progress = [0.0, 0.125, 0.25, 0.625, 1.0]
    np.testing.assert_allclose([rate(jnp.float32(p)) for p in progress], [0.0, 1.0, *falling], rtol=1e-6)


@pytest.mark.exhaustive
def test_lr_schedule_error_shifts_a_runs_schedule():
    """At step 2 of 5 the schedule is shifted by 0.4 of the run, so that the rate is that of progress 0.8."""
    schedule = {"learning_rate_warmup": 0.2, "learning_rate_decay": "linear", "learning_rate_final": 0.1}
    learner = ja.learners.grpo(HOP, **SMALL, learning_rate=2e-3, **schedule)
    telemetry = ja.audit(learner, [ja.lr_schedule_error(0.4, onset=2, duration=1)], seeds=1, steps=5).telemetry
    rate = warmup_decay(2e-3, 0.2, "linear", 0.1)
    expected = [float(rate(jnp.float32(t / 5))) for t in range(5)]
    np.testing.assert_allclose(telemetry["learning_rate"].values[0, 0], expected, rtol=1e-5)
    disturbed = telemetry["learning_rate"].values[0, 1]
    np.testing.assert_allclose(np.delete(disturbed, 2), np.delete(expected, 2), rtol=1e-5)
    assert disturbed[2] != pytest.approx(expected[2], rel=0.1)
    with pytest.raises(ValueError, match="its rate is the same at every step: see learning_rate_decay"):
        ja.audit(ja.learners.grpo(HOP, **SMALL), [ja.lr_schedule_error()], seeds=1, steps=5)
