"""Tests the telemetry of dialogue learners: its channels, and their values by independent computations."""

import copy
import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import dialogue_rules
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxaudit as ja
from jaxaudit.core.program import Program, telemetry_shapes
from jaxaudit.core.taps import Taps
from jaxaudit.dialogues import Dialogue
from jaxaudit.dialogues.hop import Hop
from jaxaudit.dialogues.preference import Preference
from jaxaudit.dialogues.protocol import END, POLICY, PROMPT, TOOL
from jaxaudit.learners.dialogue import rollout
from jaxaudit.learners.dialogue.collection import Models
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.telemetry import measurement, rewards, token_statistics

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

SMALL_HOP = Hop(difficulty=1.0, entities=3, hops=2, length=13)
SMALL = {"prompts": 2, "performance_rows": 4, "warm_start": 0, "critic_warm_start": 0}


EXHAUSTIVE = pytest.mark.exhaustive


@dataclass(frozen=True)
class Echo(Dialogue):
    """The task is to repeat the prompt's token; there are no held-out and no changed prompts."""

    vocabulary, length, reply_length = 8, 3, 1

    def reset(self, key, difficulty):
        target = jax.random.randint(key, (), 0, self.vocabulary)
        return (target, jnp.int32(-1)), self.prompt(target[None])

    def respond(self, state, token):
        return (state[0], token), self.choose(state[1] >= 0, self.end(), self.own())

    def reward(self, state):
        return {"gold": (state[0] == state[1]).astype(jnp.float32)}


def make_learner(preset, dialogue=SMALL_HOP, **settings):
    members = {} if preset == "dpo" else {"group_size": 4}
    return getattr(ja.learners, preset)(dialogue, **SMALL | members | settings)


@pytest.mark.parametrize("level", ["basic", "full"])
@pytest.mark.parametrize(
    ("preset", "dialogue", "settings"),
    [
        ("grpo", SMALL_HOP, {}),
        ("ppo_lm", SMALL_HOP, {"performance_every": 2}),
        pytest.param("dpo", SMALL_HOP, {}, marks=EXHAUSTIVE),
        ("dpo", SMALL_HOP, {"online": True, "performance_rows": 1}),
        pytest.param("dapo", SMALL_HOP, {"microbatches": 2, "correction": "tis"}, marks=EXHAUSTIVE),
        pytest.param("dr_grpo", Preference(), {"reward": "learned", "reward_model_warm_start": 0}, marks=EXHAUSTIVE),
        pytest.param("ppo_lm", Echo(), {}, marks=EXHAUSTIVE),
    ],
)
def test_telemetry_has_exactly_the_declared_channels(preset, dialogue, settings, level):
    learner = make_learner(preset, dialogue, telemetry=level, **settings)
    shapes = telemetry_shapes(Program(learner.without_data, 4, (), ()))
    assert shapes == {name: channel.shape for name, channel in learner.channels.items()}
    assert {"performance", "acting_performance", "entropy", "x_grad", "x_mem", "x_used"} <= shapes.keys()


@pytest.fixture(scope="module")
def iteration():
    """Runs an iteration of PPO, and returns experience, updates, hidden states, embeddings and telemetry."""
    learner = make_learner(
        "ppo_lm", telemetry="full", kl_coefficient=0.3, gamma=0.9, overlong_buffer=0.5, minibatches=1
    )
    algorithm = learner.step.__self__

    @jax.jit
    def run(key, data):
        state = algorithm.init(key, data)
        reference = jax.tree.map(lambda x: x * 1.1, state.policy.params)
        models = Models(state.policy.params, state.critic.params, reference=reference, initial=state.initial)
        dialogue = algorithm.dialogue.bind(data.dialogue)
        taps = Taps(0, 4, data=data)
        experience = algorithm.collector.collect(models, dialogue, data.numbers, key, taps)
        after, visited = algorithm.update_epochs(state, None, data.numbers, experience, key, taps)
        trained = Models(after.policy.params, after.critic.params, reference=reference, initial=state.initial)
        telemetry = state.told.update(algorithm.compute_telemetry(models, trained, state, experience, visited))[1]
        held_out = measurement.measure_held_out(algorithm.collector, trained, dialogue, data.numbers, experience)
        telemetry |= state.measured.update(held_out)[1]
        hidden = algorithm.policy.hidden(after.policy.params, None, experience.batch.rows)
        embeddings = [x["wte"]["embedding"] for x in (models.policy, reference, after.policy.params)]
        first = visited.rows[0, 0]
        n_tokens = jnp.sum(experience.batch.loss_inputs.loss_mask)
        after_result_mask = algorithm.instruments.masks(
            experience.batch.rows.role, experience.batch.loss_inputs.loss_mask
        )[1]
        after_result_batch = dataclasses.replace(
            experience.batch,
            loss_inputs=dataclasses.replace(
                experience.batch.loss_inputs,
                advantages=jnp.where(after_result_mask, experience.batch.loss_inputs.advantages, 0.0),
            ),
        )
        trained_parts = {"policy": state.policy, "critic": state.critic}
        gradients = [
            algorithm.gradient(trained_parts, reference, None, experience, batch.take(first), n_tokens, taps)[0][
                "policy"
            ]
            for batch in (experience.batch, after_result_batch)
        ]
        gradients_by_source = [gradients[1], jax.tree.map(jnp.subtract, *gradients)]
        telemetry["squares"] = jnp.stack([optax.tree.norm(g) ** 2 for g in gradients_by_source])
        telemetry["bigrams"] = state.results.log_prob(experience.batch.rows)
        telemetry["returns"] = algorithm.collector.returns(models, experience.batch.rows, data.numbers)
        telemetry["updated_values"] = algorithm.critic.values(after.critic.params, None, experience.batch.rows)
        return experience, visited, hidden, embeddings, telemetry

    return jax.tree.map(np.asarray, run(jax.random.key(3), learner.data))


def log_softmax(hidden, embedding):
    """Returns the distribution of the token at each slot, by the hidden state before it: float64 `[N, T, V]`."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(embedding, np.float64).T
    logits = np.concatenate([np.zeros_like(logits[:, :1]), logits[:, :-1]], axis=1)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def strata(role, window=4):
    response_mask = role == POLICY
    after_result = np.zeros_like(response_mask)
    for n, t in np.argwhere(response_mask):
        after_result[n, t] = (role[n, max(t - window, 0) : t] == TOOL).any()
    results = np.cumsum((role == TOOL) & ~np.pad(role == TOOL, ((0, 0), (1, 0)))[:, :-1], axis=1)
    return [
        response_mask,
        response_mask & after_result,
        response_mask & ~after_result,
        *(response_mask & (results == k) for k in range(3)),
        response_mask & (results >= 3),
    ]


@pytest.mark.exhaustive
def test_token_statistics_equal_float64_numpy(iteration):
    experience, _, hidden, embeddings, telemetry = iteration
    rows, recomputed = experience.batch.rows, experience.trainer_outputs
    before = log_softmax(recomputed.hidden, embeddings[0])
    reference = log_softmax(recomputed.ref_hidden, embeddings[1])
    after = log_softmax(hidden, embeddings[2])
    entropy = -(np.exp(before) * before).sum(-1)
    kl = (np.exp(before) * (before - reference)).sum(-1)
    update_kl = (np.exp(before) * (before - after)).sum(-1)
    assert kl[rows.role == POLICY].min() > 1e-4
    assert update_kl[rows.role == POLICY].max() > 1e-6
    log_prob = np.take_along_axis(before, rows.tokens[..., None], -1)[..., 0]
    slope = np.linalg.norm(np.eye(before.shape[-1])[rows.tokens] - np.exp(before), axis=-1)
    for stratum, mask in enumerate(strata(rows.role)):
        assert telemetry["own_tokens"][stratum] == mask.sum()
        if not mask.any():
            assert telemetry["entropy"][stratum] == 0
            continue
        for name, expected in (("entropy", entropy), ("kl", kl), ("saturation", slope)):
            np.testing.assert_allclose(telemetry[name][stratum], expected[mask].mean(), rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(telemetry["update_kl"][stratum], update_kl[mask].mean(), rtol=2e-2, atol=1e-7)
        np.testing.assert_allclose(telemetry["kl_largest"][stratum], kl[mask].max(), rtol=1e-4)
        np.testing.assert_allclose(
            telemetry["reference_log_probability"][stratum], token_log_probs(reference, rows)[mask].mean(), rtol=1e-4
        )
    np.testing.assert_allclose(log_prob[rows.role == POLICY], recomputed.log_prob[rows.role == POLICY], atol=1e-5)


def token_log_probs(logs, rows):
    return np.take_along_axis(logs, rows.tokens[..., None], -1)[..., 0]


@pytest.mark.exhaustive
def test_statistics_of_strata_add_up_to_those_of_all_tokens(iteration):
    telemetry = iteration[-1]
    n_tokens = telemetry["own_tokens"][0]
    for part in (slice(1, 3), slice(3, None)):
        counts = telemetry["own_tokens"][part]
        assert n_tokens == counts.sum() > 0
        for name in ("entropy", "kl", "saturation", "mismatch_kl", "greedy_churn"):
            total = telemetry[name][part] @ counts
            np.testing.assert_allclose(telemetry[name][0] * n_tokens, total, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.exhaustive
def test_ratio_statistics_of_visited_batches_and_after_the_updates(iteration):
    experience, visited, hidden, embeddings, telemetry = iteration
    rows, loss_inputs = experience.batch.rows, experience.batch.loss_inputs
    new = token_log_probs(log_softmax(hidden, embeddings[2]), rows)
    last_ratio = np.exp(np.where(loss_inputs.loss_mask, new - loss_inputs.old_log_prob, 0.0))
    index, visited_ratio = visited.rows.reshape(-1), np.exp(visited.tokens.log_ratio.reshape(-1, rows.tokens.shape[1]))
    assert sorted(index) == sorted(list(range(8)) * 2)
    np.testing.assert_allclose(visited.tokens.log_ratio[0, 0], 0.0, atol=2e-6)  # before the first update
    for moment, (ratio, rows_of_ratio) in enumerate([(visited_ratio, index), (last_ratio, np.arange(8))]):
        loss_mask, advantage = loss_inputs.loss_mask[rows_of_ratio], loss_inputs.advantages[rows_of_ratio]
        low, high = (advantage < 0) & (ratio < 0.8), (advantage > 0) & (ratio > 1.2)
        np.testing.assert_allclose(telemetry["ratio_max"][0, moment], ratio[loss_mask].max(), rtol=1e-4)
        np.testing.assert_allclose(
            telemetry["clip_fraction"][0, moment], [low[loss_mask].mean(), high[loss_mask].mean()], atol=1e-6
        )
        r = ratio[loss_mask].astype(np.float64)
        np.testing.assert_allclose(telemetry["ratio_ess"][0, moment], r.sum() ** 2 / (r.size * (r**2).sum()), rtol=1e-4)
    assert telemetry["ratio_max"][0, 0] > 1
    assert np.isfinite(telemetry["ratio_ess"]).all()


def last_response_token(loss_mask):
    return loss_mask & (np.cumsum(loss_mask[:, ::-1], axis=1)[:, ::-1] == 1)


def discounted_returns(reward, loss_mask, gamma):
    """Returns the return of each response token, by a loop from the last to the first."""
    returns = np.zeros(loss_mask.shape)
    for n, row in enumerate(loss_mask):
        later = 0.0
        for t in reversed(np.flatnonzero(row)):
            later = returns[n, t] = reward[n, t] + gamma * later
    return returns


@pytest.mark.exhaustive
def test_row_value_and_update_statistics_equal_numpy(iteration):
    experience, visited, _, _, telemetry = iteration
    rows, loss_inputs, rollout = experience.batch.rows, experience.batch.loss_inputs, experience.rollout
    gold = rollout.rows.rewards["gold"]
    assert telemetry["acting_performance"] == gold.mean()
    assert telemetry["proxy"] == rollout.reward.mean()
    np.testing.assert_allclose(telemetry["row_tokens"], (rollout.rows.role == POLICY).sum(1).mean(), rtol=1e-6)
    recomputed, loss_mask = experience.trainer_outputs, loss_inputs.loss_mask
    reward = np.where(loss_mask, -0.3 * (recomputed.log_prob - loss_inputs.ref_log_prob), 0.0)
    assert np.abs(reward).max() > 0.01, "the KL changes the reward"
    returns, score_returns = (
        discounted_returns(x + last_response_token(loss_mask) * recomputed.score[:, None], loss_mask, 0.9)
        for x in (reward, 0.0)
    )
    for name, expected in (("value_bias", loss_inputs.value_target), ("score_value_bias", score_returns)):
        np.testing.assert_allclose(
            telemetry[name], (loss_inputs.old_value - expected)[loss_mask].mean(), rtol=1e-4, atol=1e-6, err_msg=name
        )
    for name, expected in (
        ("explained_variance", loss_inputs.value_target),
        ("score_explained_variance", score_returns),
    ):
        explained = 1 - np.var((expected - loss_inputs.old_value)[loss_mask]) / np.var(expected[loss_mask])
        np.testing.assert_allclose(telemetry[name], explained, rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(recomputed.returns[loss_mask], returns[loss_mask], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        telemetry["returns"][loss_mask],
        returns[loss_mask],
        rtol=1e-4,
        atol=1e-5,
        err_msg="computed as for held-out rows",
    )
    error = (telemetry["updated_values"] - returns)[loss_mask]
    np.testing.assert_allclose(telemetry["critic_error"][0], (error**2).mean(), rtol=1e-4, atol=1e-8)
    norms = visited.optimizer["policy"].gradient_norm.reshape(-1)
    assert (norms > 0).all()
    np.testing.assert_allclose(telemetry["gradient_norm"], norms.mean(), rtol=1e-5)
    np.testing.assert_allclose(telemetry["gradient_norm_spread"], np.log(norms).std(), rtol=1e-3)
    layers = visited.layers.reshape(len(norms), -1)
    np.testing.assert_allclose((layers**2).sum(1), norms**2, rtol=1e-4)
    assert telemetry["representation_drift"] > 0
    assert 1 <= telemetry["stable_rank"] <= telemetry["effective_rank"] + 1e-4
    assert np.all([np.isfinite(x).all() for x in telemetry.values()])
    assert rows.tokens.shape == (8, 13)


@pytest.mark.exhaustive
def test_gradient_norms_by_source_equal_separate_gradients(iteration):
    """The gradient is linear in the advantages, so that zeroing them elsewhere leaves the part after a result."""
    *_, visited, _, _, telemetry = iteration
    assert (telemetry["squares"] > 0).all()
    np.testing.assert_allclose(visited.squares[0, 0], telemetry["squares"], rtol=1e-3)
    np.testing.assert_allclose(telemetry["source_gradient_norm"], np.sqrt(visited.squares).mean((0, 1)), rtol=1e-5)
    squares = visited.squares.reshape(-1, 2)
    spread = (squares.mean(0) - visited.summed_squares / len(squares) ** 2) * len(squares) / (len(squares) - 1)
    np.testing.assert_allclose(telemetry["source_gradient_variance"], spread, rtol=1e-4)


@pytest.mark.exhaustive
def test_entropy_after_results_and_bigram_probability_of_results(iteration):
    experience, *_, telemetry = iteration
    rows, entropy = experience.batch.rows, experience.trainer_outputs.entropy
    after = (rows.role == POLICY) & np.pad(rows.role == TOOL, ((0, 0), (1, 0)))[:, :-1]
    assert after.any()
    np.testing.assert_allclose(telemetry["entropy_after_result"], entropy[after].mean(), rtol=1e-5)
    np.testing.assert_allclose(
        telemetry["result_log_probability"], telemetry["bigrams"][rows.role == TOOL].mean(), rtol=1e-5
    )
    assert telemetry["result_log_probability"] > np.log(1 / SMALL_HOP.vocabulary), (
        "results are likelier than uniform tokens"
    )


@pytest.mark.exhaustive
def test_score_weights_of_the_first_update_are_scaled_advantages(iteration):
    """Advantages are whitened, the loss is a mean over a minibatch's tokens, and no update came before."""
    experience, visited, _, _, _ = iteration
    loss_inputs, index = experience.batch.loss_inputs, visited.rows[0, 0]
    loss_mask, advantage = loss_inputs.loss_mask[index], loss_inputs.advantages[index]
    np.testing.assert_allclose(
        visited.tokens.weight[0, 0][loss_mask], np.abs(advantage)[loss_mask] / loss_mask.sum(), rtol=1e-4
    )
    assert not visited.tokens.weight[0, 0][~loss_mask].any()


@pytest.mark.exhaustive
def test_score_weights_after_the_last_update_use_its_ratios(iteration):
    experience, _, hidden, embeddings, telemetry = iteration
    rows, loss_inputs = experience.batch.rows, experience.batch.loss_inputs
    ratio = np.exp(token_log_probs(log_softmax(hidden, embeddings[2]), rows) - loss_inputs.old_log_prob)[
        loss_inputs.loss_mask
    ]
    advantage = loss_inputs.advantages[loss_inputs.loss_mask]
    clipped = ((advantage < 0) & (ratio < 0.8)) | ((advantage > 0) & (ratio > 1.2))
    weight = np.where(clipped, 0.0, ratio * np.abs(advantage)) / ratio.size
    assert np.ptp(ratio) > 0.01, "updates change the ratios"
    np.testing.assert_allclose(telemetry["weight_q999"][0, 1], weight.max(), rtol=1e-4)
    np.testing.assert_allclose(
        telemetry["weight_ess"][0, 1], weight.sum() ** 2 / (weight.size * (weight**2).sum()), rtol=1e-4
    )


def test_select_slots_picks_response_tokens_up_to_a_limit():
    response_mask = np.random.default_rng(0).random((6, 8)) < 0.5
    slots = token_statistics.select_slots(jnp.asarray(response_mask), 10)
    selected = np.asarray(slots.mask)
    assert selected.sum() == 10
    assert not (selected & ~response_mask).any()
    x = np.arange(48.0).reshape(6, 8)
    np.testing.assert_array_equal(slots.scatter(slots.gather(jnp.asarray(x))), np.where(selected, x, 0))
    single = token_statistics.select_slots(jnp.asarray(np.arange(48).reshape(6, 8) == 5), 10)
    assert np.asarray(single.mask).sum() == 1
    assert np.asarray(single.mask)[0, 5]
    empty = token_statistics.select_slots(jnp.zeros((6, 8), bool), 10)
    assert not np.asarray(empty.mask).any()


class ScriptedCollector:
    """A collector whose scripted policy answers hops correctly, by its prompts or by the unchanged ones."""

    settings, critic = SimpleNamespace(performance_rows=8, telemetry="full"), None

    def __init__(self, follows_prompts):
        self.follows_prompts, self.prompts = follows_prompts, None

    def sample_undisturbed(self, policy, base, dialogue, numbers, key, rows, greedy, altered):
        initial = rollout.begin_dialogues(dialogue, key, jnp.full(rows, numbers.difficulty), Taps())
        progress = altered(initial)
        self.prompts, self.greedy = np.asarray(progress.queue), np.asarray(greedy)
        first = np.asarray(initial.queue)[np.r_[:8, :4, :4]]
        gold, tokens = [], np.zeros((rows, dialogue.length), np.int32)
        for n, prompt in enumerate(self.prompts if self.follows_prompts else first):
            state = jax.tree.map(lambda leaf, n=n: leaf[n], progress.state)
            words = [dialogue.words[token] for token in prompt]
            answer = [
                dialogue.words.index(word) for word in dialogue_rules.HopRules(dialogue, state, words).correct_reply()
            ]
            tokens[n, : 2 + len(answer)] = [*self.prompts[n], *answer]
            for token in tokens[n, : 2 + len(answer)]:
                state = dialogue.respond(state, token)[0]
            gold.append(dialogue.reward(state)["gold"])
        role = np.broadcast_to([PROMPT] * 2 + [POLICY] * 3 + [END] * (dialogue.length - 5), tokens.shape)
        zeros, rewards = jnp.zeros(tokens.shape), {"gold": jnp.stack(gold)}
        return Rows(jnp.asarray(tokens), role, zeros, zeros, zeros, zeros, zeros, zeros, zeros, rewards)


@pytest.mark.parametrize("follows_prompts", [True, False])
def test_only_a_policy_that_follows_prompts_succeeds_on_changed_ones(monkeypatch, follows_prompts):
    monkeypatch.setattr(measurement, "representation_statistics", lambda *_: {})
    collector = ScriptedCollector(follows_prompts)
    dialogue, numbers = Hop(), SimpleNamespace(difficulty=3.0)
    statistics = measurement.measure_held_out(collector, Models(*[None] * 5), dialogue, numbers, None)
    values = {
        name: float(statistics[name].value) for name in ("performance", "greedy_success", "changed_prompt_success")
    }
    assert values == {"performance": 1.0, "greedy_success": 1.0, "changed_prompt_success": float(follows_prompts)}
    prompts, changed = collector.prompts[:4], collector.prompts[12:]
    np.testing.assert_array_equal(collector.prompts[8:12], prompts)
    assert ((prompts != changed).sum(1) == 1).all()
    np.testing.assert_array_equal(collector.greedy, np.repeat([False, True, False], [8, 4, 4]))


@pytest.mark.parametrize(
    ("dialogue", "rows", "kind", "changes"),
    [
        (SMALL_HOP, "held_out", "held-out", True),
        (SMALL_HOP.held_out(), "fixed_prompts", "fixed", True),
        (Echo(), "fixed_prompts", "fixed", False),
    ],
)
def test_channels_name_whether_prompts_are_held_out_or_changed(dialogue, rows, kind, changes):
    learner = make_learner("ppo_lm", dialogue, telemetry="full")
    assert learner.channels["critic_error"].dims == (("rows", ("collected", rows)),)
    assert learner.performance_name == f"mean gold reward of rows on {kind} prompts"
    assert ("changed_prompt_success" in learner.channels) == changes


@pytest.mark.exhaustive
def test_only_measurements_use_held_out_prompts(monkeypatch):
    """Traces the warm starts and a step, and records whether rows come from held-out dialogues."""
    settings = {"telemetry": "full", "warm_start": 15, "critic_warm_start": 1}
    learner = make_learner("ppo_lm", reward="learned", reward_model_warm_start=1, **SMALL | settings)
    resets, demonstrations = [], []
    reset, demonstration = Hop.reset, Hop.demonstration

    def recording_reset(dialogue, key, difficulty):
        resets.append(dialogue.for_evaluation)
        return reset(dialogue, key, difficulty)

    def recording_demonstration(dialogue, key, difficulty, right):
        demonstrations.append(dialogue.for_evaluation)
        return demonstration(dialogue, key, difficulty, right)

    monkeypatch.setattr(Hop, "reset", recording_reset)
    monkeypatch.setattr(Hop, "demonstration", recording_demonstration)
    state = jax.eval_shape(learner.init, jax.random.key(1), learner.data)
    assert len(demonstrations) >= 3, "the warm start's, and two for the reward model's pairs"
    assert not any(resets + demonstrations)
    resets.clear()
    demonstrations.clear()

    def step(state, key, data):
        collect, measure = learner.step.__self__.collector.collect, measurement.measure_held_out

        def checking_collect(*arguments):
            result = collect(*arguments)
            assert resets
            assert not any(resets + demonstrations)
            resets.clear()
            return result

        def checking_measure(*arguments):
            result = measure(*arguments)
            assert resets
            assert all(resets + demonstrations)
            return result

        monkeypatch.setattr(learner.step.__self__.collector, "collect", checking_collect)
        monkeypatch.setattr(measurement, "measure_held_out", checking_measure)
        return learner.step(state, key, Taps(0, 4, data=data))[1]

    jax.eval_shape(step, state, jax.random.key(2), learner.data)
    assert demonstrations, "right and wrong demonstrations, for the critic's separation"
    assert all(resets + demonstrations)


@pytest.mark.parametrize("too_few", [True, False])
def test_ranks_and_drift_use_hidden_states_at_response_tokens_only(too_few):
    """States at other slots are large, and would show; a single response token per row gives no statistics."""
    rng = np.random.default_rng(0)
    response_mask = np.arange(12).reshape(2, 6) == 4 if too_few else rng.random((2, 6)) < 0.7
    now, initial = (np.where(response_mask[..., None], rng.normal(size=(2, 6, 3)) + 5, 100.0) for _ in range(2))
    role = jnp.where(response_mask, POLICY, PROMPT)
    rows = Rows(role, role, *[jnp.zeros((2, 6))] * 7, rewards={})
    collector = SimpleNamespace(policy=SimpleNamespace(hidden=lambda params, *_: jnp.asarray(params)))
    statistics = measurement.representation_statistics(collector, Models(now, initial=initial), rows)
    assert [bool(s.count) for s in statistics.values()] == [not too_few] * 3
    if too_few:
        return
    x, y = (z[response_mask] - z[response_mask].mean(0) for z in (now, initial))
    spectrum = np.linalg.svd(x, compute_uv=False)
    share = spectrum / spectrum.sum()
    expected = {
        "effective_rank": np.exp(-np.sum(share * np.log(share))),
        "stable_rank": np.sum(spectrum**2) / spectrum[0] ** 2,
        "representation_drift": 1 - np.sum((x.T @ y) ** 2) / np.sqrt(np.sum((x.T @ x) ** 2) * np.sum((y.T @ y) ** 2)),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(statistics[name].value, value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("masked", [True, False])
def test_critic_errors_mask_truncated_held_out_rows_as_the_loss_does(masked):
    """The error is 3 in a truncated row, and 1 in a finished one."""
    learner = make_learner("ppo_lm", mask_truncated=masked, kl="none", kl_coefficient=0.0)
    collector = copy.copy(learner.step.__self__.collector)
    zeros = jnp.zeros((2, 4))
    row_fields = {"truncated": jnp.array([True, False]), "rewards": {"gold": jnp.array([3.0, 1.0])}}
    rows = Rows(zeros, jnp.full((2, 4), POLICY), *[zeros] * 6, **row_fields)
    collector.critic = SimpleNamespace(values=lambda *_: zeros)
    experience = SimpleNamespace(
        batch=SimpleNamespace(rows=rows, loss_inputs=SimpleNamespace(loss_mask=rows.response_mask)),
        trainer_outputs=SimpleNamespace(returns=zeros + 2.0),
    )
    statistics = measurement.held_out_critic_errors(collector, Models(None), rows, learner.data.numbers, experience)
    np.testing.assert_allclose(statistics["critic_error"].value, [4.0, 1.0 if masked else 5.0])


def test_reward_model_accuracy_counts_correctly_ordered_pairs():
    score, gold = np.array([[3.0, 1.0, 2.0], [0.0, 0.0, 5.0]]), np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    accuracy = rewards.order(jnp.asarray(score), jnp.asarray(gold))["reward_model_accuracy"]
    assert (float(accuracy.value), int(accuracy.count)) == ((1 + 1 + 0.5 + 0) / 4, 4)
