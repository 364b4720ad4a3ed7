"""Value pretraining: how much a value model explains of a return whose best prediction is known in closed form."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxaudit as ja
from jaxaudit.learners.dialogue.collection import Models
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.learner import DialogueLearner
from jaxaudit.learners.dialogue.state import DialogueData
from jaxaudit.learners.dialogue.telemetry.values import value_statistics
from jaxaudit.models import gpt2

PROMPT, COIN = (0, 1), (2, 3)


@dataclass(frozen=True)
class Toss(ja.Dialogue):
    """Any token, a tossed coin, any token: 1 where the coin is the prompt's, whatever was written.

    Before the first own token the return is one half, before the second it is known: half of the variance.
    """

    vocabulary, length, reply_length = 5, 5, 1
    result_tokens, result_error = COIN, (4,)

    def reset(self, key, difficulty):
        asked, coin = jax.random.randint(key, (2,), 0, 2)
        return (asked, coin, jnp.int32(0)), self.prompt(asked[None])

    def respond(self, state, token):
        asked, coin, written = state
        toss = self.result(COIN[0] + coin[None])
        reply = self.choose(written == 1, toss, self.choose(written == 3, self.end(), self.own()))
        return (asked, coin, written + 1), reply

    def reward(self, state):
        return {"gold": (state[0] == state[1]).astype(jnp.float32)}


def test_a_pretrained_value_model_explains_what_can_be_known(monkeypatch):
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
        begin_key, rows_key = jax.random.split(key)
        state = learner.init(begin_key, DialogueData(numbers))
        policy, critic = state.policy.params, state.critic.params
        rows = learner.collector.undisturbed(policy, None, learner.dialogue, numbers, rows_key, 1024)
        returns = learner.collector.returns(Models(policy, reference=policy), rows, numbers)
        return learner.critic.values(critic, None, rows), returns, rows.own

    values, returns, own = pretrained(jax.random.key(0))
    assert np.asarray(own).sum() == 2 * 1024
    found = value_statistics(values, returns, own)
    assert float(found["explained_variance"].value) == pytest.approx(0.5, abs=0.03)
    assert float(found["value_bias"].value) == pytest.approx(0.0, abs=0.05)
    first, second = (np.asarray(values)[:, slot] for slot in (1, 3))
    np.testing.assert_allclose(first, 0.5, atol=0.1)
    np.testing.assert_allclose(second, np.asarray(returns)[:, 3], atol=0.1)
