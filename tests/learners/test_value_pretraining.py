"""Value pretraining: how much a value model explains of a return whose best prediction is known in closed form."""

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
    """Any token, a tossed coin, a last token: 1 where the coin is the prompt's and the last token is even.

    Of a policy to which all tokens are alike the return is a quarter before the first own token, and before the second
    a half or nothing: a sixth of its variance. The second token tells the rest, which is not to be looked at.
    """

    vocabulary, length, reply_length = 6, 5, 1
    result_tokens, result_error = COIN, (4,)

    def reset(self, key, difficulty):
        asked, coin = jax.random.randint(key, (2,), 0, 2)
        return (asked, coin, jnp.int32(0), jnp.int32(0)), self.prompt(asked[None])

    def respond(self, state, token):
        asked, coin, written, _ = state
        toss = self.result(COIN[0] + coin[None])
        reply = self.choose(written == 1, toss, self.choose(written == 3, self.end(), self.own()))
        return (asked, coin, written + 1, token), reply

    def reward(self, state):
        asked, coin, _, last = state
        return {"gold": ((asked == coin) & (last % 2 == 0)).astype(jnp.float32)}


@pytest.mark.exhaustive
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
        rows = learner.collector.sample_undisturbed(policy, None, learner.dialogue, numbers, rows_key, 1024)
        returns = learner.collector.returns(Models(policy, reference=policy), rows, numbers)
        known = 0.5 * (rows.tokens[:, 0] == rows.tokens[:, 2] - COIN[0])
        return learner.critic.values(critic, None, rows), returns, rows.response_mask, known

    values, returns, own, known = map(np.asarray, pretrained(jax.random.key(0)))
    assert own.sum() == 2 * 1024
    found = value_statistics(values, returns, own)
    assert float(found["explained_variance"].value) == pytest.approx(1 / 6, abs=0.04)
    assert float(found["value_bias"].value) == pytest.approx(0.0, abs=0.05)
    first, second = (values[:, slot] for slot in (1, 3))
    assert np.sqrt(np.mean((first - 0.25) ** 2)) < 0.06
    assert np.sqrt(np.mean((second - known) ** 2)) < 0.1
