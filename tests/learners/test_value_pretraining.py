"""Tests how much a pretrained value model explains of a return whose best prediction has a closed form."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.learners.dialogue.collection import Models
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.learner import DialogueData, DialogueLearner
from jaxaudit.learners.dialogue.telemetry.policy import value_statistics
from jaxaudit.models import gpt2

COIN = (2, 3)


@dataclass(frozen=True)
class Toss(ja.Dialogue):
    """A response token, a tossed coin, and a last token; the reward is 1 if coin equals prompt and the token is even.

    For a policy with uniform probabilities, the expected return is a quarter before its first token; before its second
    it is one half or zero, which explains a sixth of the variance. The second token, not visible yet, determines the
    rest.
    """

    vocabulary, length, reply_length = 6, 5, 1
    result_tokens, result_error = COIN, (4,)

    def reset(self, key, difficulty):
        guess, coin = jax.random.randint(key, (2,), 0, 2)
        return (guess, coin, jnp.int32(0), jnp.int32(0)), self.prompt(guess[None])

    def respond(self, state, token):
        guess, coin, written, _ = state
        toss = self.result(COIN[0] + coin[None])
        reply = self.choose(written == 1, toss, self.choose(written == 3, self.end(), self.own()))
        return (guess, coin, written + 1, token), reply

    def reward(self, state):
        guess, coin, _, last = state
        return {"gold": ((guess == coin) & (last % 2 == 0)).astype(jnp.float32)}


@pytest.mark.exhaustive
def test_a_pretrained_value_model_explains_all_predictable_variance(monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 2, 2))
    settings = settings_of("ppo_lm")(
        size="tiny",
        warm_start=0,
        critic_warm_start=1000,
        critic_warm_start_rows=1024,
        critic_warm_start_learning_rate=3e-3,
    )
    learner = DialogueLearner(Toss(), settings.structure)
    numbers = settings.numbers(0.0)

    @jax.jit
    def pretrained(key):
        init_key, rows_key = jax.random.split(key)
        state = learner.init(init_key, DialogueData(numbers))
        policy, critic = state.policy.params, state.critic.params
        rows = learner.collector.sample_undisturbed(policy, None, learner.dialogue, numbers, rows_key, 1024)
        returns = learner.collector.returns(Models(policy, reference=policy), rows, numbers)
        expected_second = 0.5 * (rows.tokens[:, 0] == rows.tokens[:, 2] - COIN[0])
        return learner.critic.values(critic, None, rows), returns, rows.response_mask, expected_second

    values, returns, response_mask, expected_second = map(np.asarray, pretrained(jax.random.key(0)))
    assert response_mask.sum() == 2 * 1024
    statistics = value_statistics(values, returns, response_mask)
    assert float(statistics["explained_variance"].value) == pytest.approx(1 / 6, abs=0.04)
    assert float(statistics["value_bias"].value) == pytest.approx(0.0, abs=0.05)
    first, second = (values[:, slot] for slot in (1, 3))
    assert np.sqrt(np.mean((first - 0.25) ** 2)) < 0.06
    assert np.sqrt(np.mean((second - expected_second) ** 2)) < 0.1
