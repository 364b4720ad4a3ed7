"""Names of channels that have a meaning of their own, and when a channel is measured; imports nothing heavy."""

from typing import NamedTuple

PERFORMANCE = "performance"

ACTING = "acting_performance"
"""The channel in which a learner tells how it fares in training itself, disturbed or not, beside its performance."""

PERFORMANCE_ERROR = "performance_error"
"""The standard error of a performance that is measured on a sample."""

ACTED = "acted_"
"""Begins the names of channels, one for each remedy: the share of its applications in a step that changed a value."""


class Cadence(NamedTuple):
    """At which steps the performance J is measured.

    Attributes:
      every: at every so many steps, those t with (t + 1) % every == 0.
      sparse: only where it is not NaN.
    """

    every: int = 1
    sparse: bool = False
