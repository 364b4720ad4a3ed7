"""Names of telemetry channels with a special meaning, and when a channel is measured; imports nothing heavy."""

from typing import NamedTuple

PERFORMANCE = "performance"

ACTING = "acting_performance"
"""The channel of the performance during training, under perturbations, which a learner may have besides PERFORMANCE."""

PERFORMANCE_ERROR = "performance_error"
"""The channel of the standard error of a performance that is measured on a sample."""

ACTED = "acted_"
"""The prefix of the channels, one for each remedy, of the share of its applications in a step that changed a value."""


class Cadence(NamedTuple):
    """The steps at which the performance J is measured.

    Attributes:
      every: the interval: J is measured at the steps t with (t + 1) % every == 0.
      sparse: whether J is measured only at steps where it is not NaN.
    """

    every: int = 1
    sparse: bool = False
