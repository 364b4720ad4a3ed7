"""Statistics over seeds, each with its confidence interval."""

from jaxaudit.analysis.statistics.critical import FALLEN, critical_beside, critical_magnitude, harm_rises, isotonic
from jaxaudit.analysis.statistics.intervals import (
    Estimate,
    Ranks,
    bootstrap,
    collapsed,
    divergence,
    interquartile_mean,
    median,
    paired_difference,
    proportion,
    ranks,
    seeds_for,
    wilson,
)
from jaxaudit.analysis.statistics.paired import Excess, excess, paired_proportions
from jaxaudit.analysis.statistics.whitening import whitening

__all__ = [
    "FALLEN",
    "Estimate",
    "Excess",
    "Ranks",
    "bootstrap",
    "collapsed",
    "critical_beside",
    "critical_magnitude",
    "divergence",
    "excess",
    "harm_rises",
    "interquartile_mean",
    "isotonic",
    "median",
    "paired_difference",
    "paired_proportions",
    "proportion",
    "ranks",
    "seeds_for",
    "whitening",
    "wilson",
]
