"""Names of channels that have a meaning of their own."""

PERFORMANCE = "performance"

ACTING = "acting_performance"
"""The channel in which a learner tells how it fares in training itself, disturbed or not, beside its performance."""

PERFORMANCE_ERROR = "performance_error"
"""The standard error of a performance that is measured on a sample."""

ACTED = "acted_"
"""Begins the names of channels, one for each remedy: the share of its applications in a step that changed a value."""
