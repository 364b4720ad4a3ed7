"""What is said of dialogues that begin with nothing to learn from."""

import numpy as np
import pytest

from jaxaudit.learners.dialogue.factories import early_remarks


def begun(proxy, truncated, no_signal):
    """Telemetry `[seed, step]` of so many seeds over three steps, each constant."""
    given = {"proxy": proxy, "truncated": truncated, "no_signal": no_signal}
    return {name: np.repeat(np.array(x, float)[:, None], 3, axis=1) for name, x in given.items()}


def test_a_beginning_with_something_to_learn_from_is_not_remarked_on():
    assert early_remarks(begun([0.5, 0.01], [0.2, 0.9], [0.9, 0.99])) == []
    late = begun([0.0], [0.0], [1.0])
    late["proxy"][0, 2], late["no_signal"][0, 2] = 0.02, 0.9
    assert early_remarks(late) == []


@pytest.mark.parametrize(
    ("telemetry", "words"),
    [
        (
            begun([0, 0], [0, 0.5], [1, 1]),
            "in the first 3 steps no row is rewarded, so there is nothing to learn from;",
        ),
        (
            begun([1, 0.5], [0, 0], [1, 0]),
            "in the first 3 steps of 1 of 2 seeds every row is rewarded in full, so noth",
        ),
        (begun([0.5, 0.5], [0, 0], [1, 1]), "no rollout group has rewards that differ, so there is nothing to learn f"),
        (begun([0, 0], [1, 1], [1, 1]), "every row runs out of slots; a longer length"),
    ],
)
def test_a_beginning_with_nothing_to_learn_from_is_one_sentence(telemetry, words):
    (sentence,) = early_remarks(telemetry)
    assert words in sentence


def test_each_seed_is_told_of_once_and_a_critic_needs_no_groups():
    told = early_remarks(begun([0, 1, 0.5], [1, 0, 0], [1, 1, 1]))
    assert [sentence.split(" seeds ")[1].split(",")[0].split(";")[0] for sentence in told] == [
        "every row runs out of slots",
        "every row is rewarded in full",
        "no rollout group has rewards that differ",
    ]
    assert early_remarks(begun([0.5], [0], [1]), compares_within_groups=False) == []
