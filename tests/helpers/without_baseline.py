"""Lanes trained without a baseline: one program less to compile."""

import jaxaudit as ja
from jaxaudit.core.batches import layout
from jaxaudit.execution.engine import Engine
from jaxaudit.execution.grid_program import blank_telemetry, place


def train_from_the_start(learner, perturbations, *, seeds, steps):
    """Telemetry `[seed, condition, step, ...]` of a grid whose perturbations all have onset 0, by channel."""
    grid = ja.plan(learner, perturbations, seeds=seeds, steps=steps, tail=0)
    (group,) = grid.forks
    assert group.onset == 0
    arrays = blank_telemetry(grid)
    engine, (batch,) = Engine(grid, steps), layout(grid, baseline=False)
    _, rows = engine.advance(batch, engine.initial(batch), 0, steps)
    place(arrays.__getitem__, grid, batch, rows, 0, steps)
    return arrays
