"""Tests the messages about runs whose first steps give a dialogue learner nothing to learn from."""

import numpy as np
import pytest

from jaxaudit.learners.dialogue.factories import early_remarks


def constant_telemetry(proxy, truncated, no_signal):
    """Returns telemetry `[seed, step]` of three steps, with a constant for each seed."""
    constants = {"proxy": proxy, "truncated": truncated, "no_signal": no_signal}
    return {name: np.repeat(np.array(x, float)[:, None], 3, axis=1) for name, x in constants.items()}


def test_no_remark_when_there_is_something_to_learn_from():
    assert early_remarks(constant_telemetry([0.5, 0.01], [0.2, 0.9], [0.9, 0.99])) == []
    late = constant_telemetry([0.0], [0.0], [1.0])
    late["proxy"][0, 2], late["no_signal"][0, 2] = 0.02, 0.9
    assert early_remarks(late) == []


@pytest.mark.parametrize(
    ("telemetry", "words"),
    [
        (
            constant_telemetry([0, 0], [0, 0.5], [1, 1]),
            "in the first 3 steps no row is rewarded, so there is nothing to learn from;",
        ),
        (
            constant_telemetry([1, 0.5], [0, 0], [1, 0]),
            "in the first 3 steps of 1 of 2 seeds every row is rewarded in full, so noth",
        ),
        (
            constant_telemetry([0.5, 0.5], [0, 0], [1, 1]),
            "no rollout group has rewards that differ, so there is nothing to learn f",
        ),
        (constant_telemetry([0, 0], [1, 1], [1, 1]), "every row runs out of slots; a longer length"),
    ],
)
def test_the_remark_names_why_there_is_nothing_to_learn_from(telemetry, words):
    (sentence,) = early_remarks(telemetry)
    assert words in sentence


def test_each_seed_has_one_remark_and_a_critic_needs_no_groups():
    remarks = early_remarks(constant_telemetry([0, 1, 0.5], [1, 0, 0], [1, 1, 1]))
    assert [sentence.split(" seeds ")[1].split(",")[0].split(";")[0] for sentence in remarks] == [
        "every row runs out of slots",
        "every row is rewarded in full",
        "no rollout group has rewards that differ",
    ]
    assert early_remarks(constant_telemetry([0.5], [0], [1]), compares_within_groups=False) == []
