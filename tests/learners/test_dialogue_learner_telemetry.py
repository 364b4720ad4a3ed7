"""What learners on dialogues tell of an iteration: all of the table, and the numbers that its rows and updates give."""

import copy
import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_dialogues
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
FEW = {"prompts": 2, "performance_rows": 4, "warm_start": 0, "critic_warm_start": 0}


EXHAUSTIVE = pytest.mark.exhaustive


@dataclass(frozen=True)
class Echo(Dialogue):
    """Say the prompt's token again; it holds out no prompts and changes none."""

    vocabulary, length, reply_length = 8, 3, 1

    def reset(self, key, difficulty):
        wanted = jax.random.randint(key, (), 0, self.vocabulary)
        return (wanted, jnp.int32(-1)), self.prompt(wanted[None])

    def respond(self, state, token):
        return (state[0], token), self.choose(state[1] >= 0, self.end(), self.own())

    def reward(self, state):
        return {"gold": (state[0] == state[1]).astype(jnp.float32)}


def made(preset, dialogue=SMALL_HOP, **settings):
    members = {} if preset == "dpo" else {"group_size": 4}
    return getattr(ja.learners, preset)(dialogue, **FEW | members | settings)


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
def test_every_channel_of_the_table_is_told_and_no_other(preset, dialogue, settings, level):
    learner = made(preset, dialogue, telemetry=level, **settings)
    found = telemetry_shapes(Program(learner.without_data, 4, (), ()))
    assert found == {name: channel.shape for name, channel in learner.channels.items()}
    assert {"performance", "acting_performance", "entropy", "x_grad", "x_mem", "x_used"} <= found.keys()


@pytest.fixture(scope="module")
def iteration():
    """An iteration of PPO in full: what it learned from, what the updates told, and the channels."""
    learner = made("ppo_lm", telemetry="full", kl_coefficient=0.3, gamma=0.9, overlong_buffer=0.5, minibatches=1)
    made_of = learner.step.__self__

    @jax.jit
    def run(key, data):
        state = made_of.init(key, data)
        reference = jax.tree.map(lambda x: x * 1.1, state.policy.params)
        models = Models(state.policy.params, state.critic.params, reference=reference, initial=state.initial)
        dialogue = made_of.dialogue.bind(data.dialogue)
        taps = Taps(0, 4, data=data)
        experience = made_of.collector.collect(models, dialogue, data.numbers, key, taps)
        after, visited = made_of.update_epochs(state, None, data.numbers, experience, key, taps)
        trained = Models(after.policy.params, after.critic.params, reference=reference, initial=state.initial)
        found = state.told.update(made_of.compute_telemetry(models, trained, state, experience, visited))[1]
        held = measurement.measure_held_out(made_of.collector, trained, dialogue, data.numbers, experience)
        found |= state.measured.update(held)[1]
        hidden = made_of.policy.hidden(after.policy.params, None, experience.batch.rows)
        embeddings = [x["wte"]["embedding"] for x in (models.policy, reference, after.policy.params)]
        first = visited.rows[0, 0]
        share = jnp.sum(experience.batch.loss_inputs.loss_mask)
        tool = made_of.instruments.masks(experience.batch.rows.role, experience.batch.loss_inputs.loss_mask)[1]
        alone = dataclasses.replace(
            experience.batch,
            loss_inputs=dataclasses.replace(
                experience.batch.loss_inputs, advantages=jnp.where(tool, experience.batch.loss_inputs.advantages, 0.0)
            ),
        )
        both = {"policy": state.policy, "critic": state.critic}
        gradients = [
            made_of.gradient(both, reference, None, experience, batch.take(first), share, taps)[0]["policy"]
            for batch in (experience.batch, alone)
        ]
        apart = [gradients[1], jax.tree.map(jnp.subtract, *gradients)]
        found["squares"] = jnp.stack([optax.tree.norm(one) ** 2 for one in apart])
        found["bigrams"] = state.results.log_prob(experience.batch.rows)
        found["returns"] = made_of.collector.returns(models, experience.batch.rows, data.numbers)
        found["updated_values"] = made_of.critic.values(after.critic.params, None, experience.batch.rows)
        return experience, visited, hidden, embeddings, found

    return jax.tree.map(np.asarray, run(jax.random.key(3), learner.data))


def log_softmax(hidden, embedding):
    """At each slot the distribution of its token, by the hidden state before: float64 `[N, T, V]`."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(embedding, np.float64).T
    logits = np.concatenate([np.zeros_like(logits[:, :1]), logits[:, :-1]], axis=1)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def strata(role, window=4):
    own = role == POLICY
    tool = np.zeros_like(own)
    for n, t in np.argwhere(own):
        tool[n, t] = (role[n, max(t - window, 0) : t] == TOOL).any()
    results = np.cumsum((role == TOOL) & ~np.pad(role == TOOL, ((0, 0), (1, 0)))[:, :-1], axis=1)
    return [own, own & tool, own & ~tool, *(own & (results == k) for k in range(3)), own & (results >= 3)]


@pytest.mark.exhaustive
def test_of_tokens(iteration):
    experience, _, hidden, embeddings, found = iteration
    rows, recomputed = experience.batch.rows, experience.trainer_outputs
    before = log_softmax(recomputed.hidden, embeddings[0])
    reference = log_softmax(recomputed.ref_hidden, embeddings[1])
    after = log_softmax(hidden, embeddings[2])
    entropy = -(np.exp(before) * before).sum(-1)
    kl = (np.exp(before) * (before - reference)).sum(-1)
    moved = (np.exp(before) * (before - after)).sum(-1)
    assert kl[rows.role == POLICY].min() > 1e-4
    assert moved[rows.role == POLICY].max() > 1e-6
    picked = np.take_along_axis(before, rows.tokens[..., None], -1)[..., 0]
    slope = np.linalg.norm(np.eye(before.shape[-1])[rows.tokens] - np.exp(before), axis=-1)
    for place, mask in enumerate(strata(rows.role)):
        assert found["own_tokens"][place] == mask.sum()
        if not mask.any():
            assert found["entropy"][place] == 0
            continue
        for name, wanted in (("entropy", entropy), ("kl", kl), ("saturation", slope)):
            np.testing.assert_allclose(found[name][place], wanted[mask].mean(), rtol=1e-4, err_msg=name)
        np.testing.assert_allclose(found["update_kl"][place], moved[mask].mean(), rtol=2e-2, atol=1e-7)
        np.testing.assert_allclose(found["kl_largest"][place], kl[mask].max(), rtol=1e-4)
        np.testing.assert_allclose(
            found["reference_log_probability"][place], log_of(reference, rows)[mask].mean(), rtol=1e-4
        )
    np.testing.assert_allclose(picked[rows.role == POLICY], recomputed.log_prob[rows.role == POLICY], atol=1e-5)


def log_of(logs, rows):
    return np.take_along_axis(logs, rows.tokens[..., None], -1)[..., 0]


@pytest.mark.exhaustive
def test_strata_add_up(iteration):
    found = iteration[-1]
    every = found["own_tokens"][0]
    for apart in (slice(1, 3), slice(3, None)):
        counts = found["own_tokens"][apart]
        assert every == counts.sum() > 0
        for name in ("entropy", "kl", "saturation", "mismatch_kl", "greedy_churn"):
            total = found[name][apart] @ counts
            np.testing.assert_allclose(found[name][0] * every, total, rtol=1e-4, atol=1e-7, err_msg=name)


@pytest.mark.exhaustive
def test_of_ratios_as_visited_and_after(iteration):
    experience, visited, hidden, embeddings, found = iteration
    rows, loss_inputs = experience.batch.rows, experience.batch.loss_inputs
    new = log_of(log_softmax(hidden, embeddings[2]), rows)
    last = np.exp(np.where(loss_inputs.loss_mask, new - loss_inputs.old_log_prob, 0.0))
    index, seen = visited.rows.reshape(-1), np.exp(visited.tokens.log_ratio.reshape(-1, rows.tokens.shape[1]))
    assert sorted(index) == sorted(list(range(8)) * 2)
    np.testing.assert_allclose(visited.tokens.log_ratio[0, 0], 0.0, atol=2e-6)  # nothing has moved yet
    for moment, (ratio, of) in enumerate([(seen, index), (last, np.arange(8))]):
        own, advantage = loss_inputs.loss_mask[of], loss_inputs.advantages[of]
        low, high = (advantage < 0) & (ratio < 0.8), (advantage > 0) & (ratio > 1.2)
        np.testing.assert_allclose(found["ratio_max"][0, moment], ratio[own].max(), rtol=1e-4)
        np.testing.assert_allclose(found["clip_fraction"][0, moment], [low[own].mean(), high[own].mean()], atol=1e-6)
        r = ratio[own].astype(np.float64)
        np.testing.assert_allclose(found["ratio_ess"][0, moment], r.sum() ** 2 / (r.size * (r**2).sum()), rtol=1e-4)
    assert found["ratio_max"][0, 0] > 1
    assert np.isfinite(found["ratio_ess"]).all()


def last_own(own):
    return own & (np.cumsum(own[:, ::-1], axis=1)[:, ::-1] == 1)


def discounted(reward, own, gamma):
    """The return of each own token, by a loop over them from the last."""
    found = np.zeros(own.shape)
    for n, row in enumerate(own):
        later = 0.0
        for t in reversed(np.flatnonzero(row)):
            later = found[n, t] = reward[n, t] + gamma * later
    return found


@pytest.mark.exhaustive
def test_of_rows_values_and_updates(iteration):
    experience, visited, _, _, found = iteration
    rows, loss_inputs, drawn = experience.batch.rows, experience.batch.loss_inputs, experience.rollout
    gold = drawn.rows.rewards["gold"]
    assert found["acting_performance"] == gold.mean()
    assert found["proxy"] == drawn.reward.mean()
    np.testing.assert_allclose(found["row_tokens"], (drawn.rows.role == POLICY).sum(1).mean(), rtol=1e-6)
    recomputed, own = experience.trainer_outputs, loss_inputs.loss_mask
    reward = np.where(own, -0.3 * (recomputed.log_prob - loss_inputs.ref_log_prob), 0.0)
    assert np.abs(reward).max() > 0.01, "a KL in the reward that can be seen"
    returned, scored = (discounted(x + last_own(own) * recomputed.score[:, None], own, 0.9) for x in (reward, 0.0))
    for name, wanted in (("value_bias", loss_inputs.value_target), ("score_value_bias", scored)):
        np.testing.assert_allclose(
            found[name], (loss_inputs.old_value - wanted)[own].mean(), rtol=1e-4, atol=1e-6, err_msg=name
        )
    for name, wanted in (("explained_variance", loss_inputs.value_target), ("score_explained_variance", scored)):
        explained = 1 - np.var((wanted - loss_inputs.old_value)[own]) / np.var(wanted[own])
        np.testing.assert_allclose(found[name], explained, rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(recomputed.returns[own], returned[own], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        found["returns"][own], returned[own], rtol=1e-4, atol=1e-5, err_msg="as of held-out rows"
    )
    error = (found["updated_values"] - returned)[own]
    np.testing.assert_allclose(found["critic_error"][0], (error**2).mean(), rtol=1e-4, atol=1e-8)
    norms = visited.optimizer["policy"].gradient_norm.reshape(-1)
    assert (norms > 0).all()
    np.testing.assert_allclose(found["gradient_norm"], norms.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["gradient_norm_spread"], np.log(norms).std(), rtol=1e-3)
    layers = visited.layers.reshape(len(norms), -1)
    np.testing.assert_allclose((layers**2).sum(1), norms**2, rtol=1e-4)
    assert found["representation_drift"] > 0
    assert 1 <= found["stable_rank"] <= found["effective_rank"] + 1e-4
    assert np.all([np.isfinite(x).all() for x in found.values()])
    assert rows.tokens.shape == (8, 13)


@pytest.mark.exhaustive
def test_gradients_of_tokens_after_a_result_and_of_the_rest(iteration):
    """By the gradient being linear in the advantages, which are left to the tokens after a result alone."""
    *_, visited, _, _, found = iteration
    assert (found["squares"] > 0).all()
    np.testing.assert_allclose(visited.squares[0, 0], found["squares"], rtol=1e-3)
    np.testing.assert_allclose(found["source_gradient_norm"], np.sqrt(visited.squares).mean((0, 1)), rtol=1e-5)
    squares = visited.squares.reshape(-1, 2)
    spread = (squares.mean(0) - visited.summed_squares / len(squares) ** 2) * len(squares) / (len(squares) - 1)
    np.testing.assert_allclose(found["source_gradient_variance"], spread, rtol=1e-4)


@pytest.mark.exhaustive
def test_what_follows_a_result_and_how_familiar_it_is(iteration):
    experience, *_, found = iteration
    rows, entropy = experience.batch.rows, experience.trainer_outputs.entropy
    after = (rows.role == POLICY) & np.pad(rows.role == TOOL, ((0, 0), (1, 0)))[:, :-1]
    assert after.any()
    np.testing.assert_allclose(found["entropy_after_result"], entropy[after].mean(), rtol=1e-5)
    np.testing.assert_allclose(found["result_log_probability"], found["bigrams"][rows.role == TOOL].mean(), rtol=1e-5)
    assert found["result_log_probability"] > np.log(1 / SMALL_HOP.vocabulary), "likelier than by chance"


@pytest.mark.exhaustive
def test_weights_are_coefficients_of_scores_in_the_gradient(iteration):
    """Of whitened advantages under a mean over a minibatch's tokens, where nothing has moved yet."""
    experience, visited, _, _, _ = iteration
    loss_inputs, index = experience.batch.loss_inputs, visited.rows[0, 0]
    own, advantage = loss_inputs.loss_mask[index], loss_inputs.advantages[index]
    np.testing.assert_allclose(visited.tokens.weight[0, 0][own], np.abs(advantage)[own] / own.sum(), rtol=1e-4)
    assert not visited.tokens.weight[0, 0][~own].any()


@pytest.mark.exhaustive
def test_weights_after_the_last_update_are_by_its_ratios(iteration):
    experience, _, hidden, embeddings, found = iteration
    rows, loss_inputs = experience.batch.rows, experience.batch.loss_inputs
    ratio = np.exp(log_of(log_softmax(hidden, embeddings[2]), rows) - loss_inputs.old_log_prob)[loss_inputs.loss_mask]
    advantage = loss_inputs.advantages[loss_inputs.loss_mask]
    flat = ((advantage < 0) & (ratio < 0.8)) | ((advantage > 0) & (ratio > 1.2))
    weight = np.where(flat, 0.0, ratio * np.abs(advantage)) / ratio.size
    assert np.ptp(ratio) > 0.01, "the policy has moved"
    np.testing.assert_allclose(found["weight_q999"][0, 1], weight.max(), rtol=1e-4)
    np.testing.assert_allclose(
        found["weight_ess"][0, 1], weight.sum() ** 2 / (weight.size * (weight**2).sum()), rtol=1e-4
    )


def test_a_large_vocabulary_is_looked_at_where_the_policy_wrote():
    own = np.random.default_rng(0).random((6, 8)) < 0.5
    slots = token_statistics.select_slots(jnp.asarray(own), 10)
    known = np.asarray(slots.mask)
    assert known.sum() == 10
    assert not (known & ~own).any()
    x = np.arange(48.0).reshape(6, 8)
    np.testing.assert_array_equal(slots.scatter(slots.gather(jnp.asarray(x))), np.where(known, x, 0))
    few = token_statistics.select_slots(jnp.asarray(np.arange(48).reshape(6, 8) == 5), 10)
    assert np.asarray(few.mask).sum() == 1
    assert np.asarray(few.mask)[0, 5]
    none = token_statistics.select_slots(jnp.zeros((6, 8), bool), 10)
    assert not np.asarray(none.mask).any()


class Reader:
    """A collector whose policy answers hops without a call, and is right; or as if its prompts were the first ones."""

    settings, critic = SimpleNamespace(performance_rows=8, telemetry="full"), None

    def __init__(self, reads):
        self.reads, self.prompts = reads, None

    def sample_undisturbed(self, policy, base, dialogue, numbers, key, rows, greedy, altered):
        begun = rollout.begin_dialogues(dialogue, key, jnp.full(rows, numbers.difficulty), Taps())
        progress = altered(begun)
        self.prompts, self.greedy = np.asarray(progress.queue), np.asarray(greedy)
        first = np.asarray(begun.queue)[np.r_[:8, :4, :4]]
        gold, tokens = [], np.zeros((rows, dialogue.length), np.int32)
        for n, prompt in enumerate(self.prompts if self.reads else first):
            state = jax.tree.map(lambda leaf, n=n: leaf[n], progress.state)
            words = [dialogue.words[token] for token in prompt]
            answer = [dialogue.words.index(word) for word in plain_dialogues.HopRules(dialogue, state, words).right()]
            tokens[n, : 2 + len(answer)] = [*self.prompts[n], *answer]
            for token in tokens[n, : 2 + len(answer)]:
                state = dialogue.respond(state, token)[0]
            gold.append(dialogue.reward(state)["gold"])
        role = np.broadcast_to([PROMPT] * 2 + [POLICY] * 3 + [END] * (dialogue.length - 5), tokens.shape)
        nothing, rewards = jnp.zeros(tokens.shape), {"gold": jnp.stack(gold)}
        return Rows(jnp.asarray(tokens), role, nothing, nothing, nothing, nothing, nothing, nothing, nothing, rewards)


@pytest.mark.parametrize("reads", [True, False])
def test_one_who_reads_changed_prompts_succeeds_with_them(monkeypatch, reads):
    monkeypatch.setattr(measurement, "representation_statistics", lambda *_: {})
    reader = Reader(reads)
    dialogue, numbers = Hop(), SimpleNamespace(difficulty=3.0)
    found = measurement.measure_held_out(reader, Models(*[None] * 5), dialogue, numbers, None)
    told = {name: float(found[name].value) for name in ("performance", "greedy_success", "changed_prompt_success")}
    assert told == {"performance": 1.0, "greedy_success": 1.0, "changed_prompt_success": float(reads)}
    prompts, changed = reader.prompts[:4], reader.prompts[12:]
    np.testing.assert_array_equal(reader.prompts[8:12], prompts)
    assert ((prompts != changed).sum(1) == 1).all()
    np.testing.assert_array_equal(reader.greedy, np.repeat([False, True, False], [8, 4, 4]))


@pytest.mark.parametrize(
    ("dialogue", "rows", "said", "changes"),
    [
        (SMALL_HOP, "held_out", "held-out", True),
        (SMALL_HOP.held_out(), "fixed_prompts", "fixed", True),
        (Echo(), "fixed_prompts", "fixed", False),
    ],
)
def test_channels_say_whether_prompts_are_held_out_and_changed(dialogue, rows, said, changes):
    learner = made("ppo_lm", dialogue, telemetry="full")
    assert learner.channels["critic_error"].dims == (("rows", ("collected", rows)),)
    assert learner.performance_name == f"mean gold reward of rows on {said} prompts"
    assert ("changed_prompt_success" in learner.channels) == changes


@pytest.mark.exhaustive
def test_prompts_measured_are_held_out_and_all_others_are_not(monkeypatch):
    """Traced, not run: of whose tasks rows are made before the first iteration and in one."""
    settings = {"telemetry": "full", "warm_start": 15, "critic_warm_start": 1}
    learner = made("ppo_lm", reward="learned", reward_model_warm_start=1, **FEW | settings)
    begun, shown = [], []
    reset, demonstration = Hop.reset, Hop.demonstration

    def noted(dialogue, key, difficulty):
        begun.append(dialogue.for_evaluation)
        return reset(dialogue, key, difficulty)

    def noted_too(dialogue, key, difficulty, right):
        shown.append(dialogue.for_evaluation)
        return demonstration(dialogue, key, difficulty, right)

    monkeypatch.setattr(Hop, "reset", noted)
    monkeypatch.setattr(Hop, "demonstration", noted_too)
    state = jax.eval_shape(learner.init, jax.random.key(1), learner.data)
    assert len(shown) >= 3, "of the warm start, and of the reward model's pairs"
    assert not any(begun + shown)
    begun.clear()
    shown.clear()

    def step(state, key, data):
        collect, measure = learner.step.__self__.collector.collect, measurement.measure_held_out

        def collected(*arguments):
            found = collect(*arguments)
            assert begun
            assert not any(begun + shown)
            begun.clear()
            return found

        def measured(*arguments):
            found = measure(*arguments)
            assert begun
            assert all(begun + shown)
            return found

        monkeypatch.setattr(learner.step.__self__.collector, "collect", collected)
        monkeypatch.setattr(measurement, "measure_held_out", measured)
        return learner.step(state, key, Taps(0, 4, data=data))[1]

    jax.eval_shape(step, state, jax.random.key(2), learner.data)
    assert shown, "a right and a wrong one, which the critic is tried on"
    assert all(begun + shown)


@pytest.mark.parametrize("few", [True, False])
def test_ranks_and_drift_are_of_hidden_states_at_tokens_of_the_policy(few):
    """States at other slots are large, and would be seen; of a row with one token of its own nothing is known."""
    random = np.random.default_rng(0)
    own = np.arange(12).reshape(2, 6) == 4 if few else random.random((2, 6)) < 0.7
    now, then = (np.where(own[..., None], random.normal(size=(2, 6, 3)) + 5, 100.0) for _ in range(2))
    role = jnp.where(own, POLICY, PROMPT)
    rows = Rows(role, role, *[jnp.zeros((2, 6))] * 7, rewards={})
    collector = SimpleNamespace(policy=SimpleNamespace(hidden=lambda params, *_: jnp.asarray(params)))
    found = measurement.representation_statistics(collector, Models(now, initial=then), rows)
    assert [bool(one.count) for one in found.values()] == [not few] * 3
    if few:
        return
    x, y = (z[own] - z[own].mean(0) for z in (now, then))
    spectrum = np.linalg.svd(x, compute_uv=False)
    share = spectrum / spectrum.sum()
    wanted = {
        "effective_rank": np.exp(-np.sum(share * np.log(share))),
        "stable_rank": np.sum(spectrum**2) / spectrum[0] ** 2,
        "representation_drift": 1 - np.sum((x.T @ y) ** 2) / np.sqrt(np.sum((x.T @ x) ** 2) * np.sum((y.T @ y) ** 2)),
    }
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name].value, value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("masked", [True, False])
def test_critic_errors_leave_out_held_out_rows_as_the_loss_would(masked):
    """Errors of 3 in a row that was cut off, and of 1 in a finished one."""
    learner = made("ppo_lm", mask_truncated=masked, kl="none", kl_coefficient=0.0)
    collector = copy.copy(learner.step.__self__.collector)
    nothing = jnp.zeros((2, 4))
    of_rows = {"truncated": jnp.array([True, False]), "rewards": {"gold": jnp.array([3.0, 1.0])}}
    rows = Rows(nothing, jnp.full((2, 4), POLICY), *[nothing] * 6, **of_rows)
    collector.critic = SimpleNamespace(values=lambda *_: nothing)
    experience = SimpleNamespace(
        batch=SimpleNamespace(rows=rows, loss_inputs=SimpleNamespace(loss_mask=rows.response_mask)),
        trainer_outputs=SimpleNamespace(returns=nothing + 2.0),
    )
    found = measurement.held_out_critic_errors(collector, Models(None), rows, learner.data.numbers, experience)
    np.testing.assert_allclose(found["critic_error"].value, [4.0, 1.0 if masked else 5.0])


def test_pairs_that_a_reward_model_orders_right():
    score, gold = np.array([[3.0, 1.0, 2.0], [0.0, 0.0, 5.0]]), np.array([[1.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    found = rewards.order(jnp.asarray(score), jnp.asarray(gold))["reward_model_accuracy"]
    assert (float(found.value), int(found.count)) == ((1 + 1 + 0.5 + 0) / 4, 4)
