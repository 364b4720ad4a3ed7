"""Which learners each remedy fits, as docs/remedies.md says."""

import pytest

import jaxaudit as ja
from jaxaudit.core.remedied_learner import remedied
from jaxaudit.runtime import registry

GROUPS = {"dapo", "dr_grpo", "grpo", "gspo", "rloo"}
DIALOGUES = GROUPS | {"ppo_lm"}
LEARNERS = DIALOGUES | {"dpo", "language_model", "ppo", "trpo", "sac", "td3"}
FITTING = {
    "adam_rel": LEARNERS - {"sac", "td3"},
    "critic_layer_norm": {"ppo", "trpo", "sac", "td3"},
    "decoupled_lambda": {"ppo", "trpo", "ppo_lm"},
    "clip_higher": DIALOGUES | {"ppo"},
    "target_kl_stop": DIALOGUES | {"ppo"},
    "clip_cov": DIALOGUES - {"gspo", "rloo"},
    "kl_cov": DIALOGUES - {"gspo", "rloo"},
    "length_adaptive_lambda": {"ppo_lm"},
    "value_pretraining": {"ppo_lm"},
    **dict.fromkeys(("adaptive_entropy", "dual_clip", "kl_in_both", "kl_in_reward", "kl_off_policy"), DIALOGUES),
    **dict.fromkeys(("masked_importance", "sequence_mask", "truncated_importance"), DIALOGUES),
}
"""The learners that a remedy fits, where these are not all of them."""

TASKS = dict.fromkeys(("ppo", "trpo"), "CartPole-v1") | dict.fromkeys(("sac", "td3"), "InvertedPendulum-v5")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_a_learner_accepts_the_remedies_that_fit_it_and_refuses_the_others(name, corpus):
    if name == "language_model":
        learner = ja.learners.language_model(corpus, size="nano", context=32, batch_size=2, accumulation=1)
    else:
        learner = registry.learners[name](TASKS.get(name, "hop"))
    for remedy in set(registry.remedies) & set(ja.remedies.__all__):  # not those that other tests register
        kind = registry.remedies[remedy]
        if name in FITTING.get(remedy, LEARNERS):
            remedied(learner, kind())
        else:
            with pytest.raises(ValueError, match=remedy):
                remedied(learner, kind())
