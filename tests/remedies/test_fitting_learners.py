"""Which learners each remedy fits, as `jaxaudit list remedies` says."""

import pytest

import jaxaudit as ja
from jaxaudit.cli.printing import REMEDY_LEARNERS
from jaxaudit.core.remedied_learner import remedied
from jaxaudit.runtime import registry

GROUPS = {"dapo", "dr_grpo", "grpo", "gspo", "rloo"}
DIALOGUES = GROUPS | {"ppo_lm", "dpo"}
LEARNERS = DIALOGUES | {"language_model", "ppo", "trpo", "sac", "td3"}


def fitting(remedy):
    """Returns the learners that the listing names for a remedy."""
    names, _, exceptions = REMEDY_LEARNERS.get(remedy, "all").partition(" but ")
    sets = {"all": LEARNERS, "dialogues": DIALOGUES}
    included = set().union(*(sets.get(name, {name}) for name in names.split(", ")))
    return included - set(exceptions.split(", "))


TASKS = dict.fromkeys(("ppo", "trpo"), "CartPole-v1") | dict.fromkeys(("sac", "td3"), "InvertedPendulum-v5")


def test_the_listing_is_read_as_sets_of_learners():
    assert fitting("adagc") == LEARNERS
    assert fitting("clip_cov") == {"dapo", "dr_grpo", "grpo", "ppo_lm"}
    assert fitting("target_kl_stop") == DIALOGUES - {"dpo"} | {"ppo"}
    assert set(REMEDY_LEARNERS) <= set(registry.remedies)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(LEARNERS))
def test_a_learner_accepts_the_remedies_that_fit_it_and_refuses_the_others(name, corpus):
    if name == "language_model":
        learner = ja.learners.language_model(corpus, size="nano", context=32, batch_size=2, accumulation=1)
    else:
        learner = registry.learners[name](TASKS.get(name, "hop"))
    for remedy in set(registry.remedies) & set(ja.remedies.__all__):  # not those that other tests register
        kind = registry.remedies[remedy]
        if name in fitting(remedy):
            remedied(learner, kind())
        else:
            with pytest.raises(ValueError, match=remedy):
                remedied(learner, kind())
