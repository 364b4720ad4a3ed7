"""Population statistics over seeds, each figure with its interval."""

from jaxaudit.statistics.critical import critical_magnitude, harm_rises, isotonic
from jaxaudit.statistics.intervals import (
    Estimate,
    Ranks,
    bootstrap,
    divergence,
    interquartile_mean,
    median,
    paired_difference,
    proportion,
    ranks,
    seeds_for,
    wilson,
)
from jaxaudit.statistics.whitening import whitening

__all__ = [
    "Estimate",
    "Ranks",
    "bootstrap",
    "critical_magnitude",
    "divergence",
    "harm_rises",
    "interquartile_mean",
    "isotonic",
    "median",
    "paired_difference",
    "proportion",
    "ranks",
    "seeds_for",
    "whitening",
    "wilson",
]
