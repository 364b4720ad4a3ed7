"""Tests what the progress bar says about a run while it trains."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxaudit.analysis.metrics import Cadence
from jaxaudit.runs.progress import ProgressReporter


@pytest.mark.parametrize(("sparse", "collapsed"), [(False, 2), (True, 1)])
def test_lanes_two_deviations_below_their_seeds_level_count_as_collapsed(sparse, collapsed):
    """Seed k has the level 10 k before the onset, with a deviation of 1. Steps 1, 3, 5, ... are measured."""
    baseline = 10.0 * np.arange(3)[:, None] + np.array([np.nan, -1.0, np.nan, 1.0, np.nan, -500.0])
    grid = SimpleNamespace(program=SimpleNamespace(learner=SimpleNamespace(cadence=Cadence(2, sparse))))
    store = SimpleNamespace(read_channel=lambda name: baseline)
    advances = []
    progress = SimpleNamespace(advance=lambda batch, start, stop, count: advances.append(count))
    reporter = ProgressReporter(store, grid, 4, progress)
    batch = SimpleNamespace(disturbed=True, onset=4, seeds=np.array([2, 0, 1]))
    rows = np.full((3, 4), -100.0)  # of steps 4 to 6, of which 5 is measured; the last lane is padding
    rows[1] = 20 - 2.1, 0 - 1.9, np.nan, -100.0
    reporter.report(batch, {"performance": rows}, 4, 7)
    reporter.report(batch, {"performance": rows[:1]}, 6, 7)
    assert advances == [collapsed, None]
