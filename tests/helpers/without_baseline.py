"""Training of lanes without a baseline, which saves the compilation of one program."""

import jaxaudit as ja
from jaxaudit.core.batches import layout
from jaxaudit.execution.engine import Engine
from jaxaudit.execution.grid_program import blank_telemetry, place


def train_without_baseline(learner, perturbations, *, seeds, steps):
    """Returns the telemetry `[seed, condition, step, ...]` by channel, of a grid whose perturbations have onset 0."""
    grid = ja.plan(learner, perturbations, seeds=seeds, steps=steps, tail=0)
    (group,) = grid.forks
    assert group.onset == 0
    telemetry = blank_telemetry(grid)
    engine, (batch,) = Engine(grid, steps), layout(grid, baseline=False)
    _, rows = engine.advance(batch, engine.initial(batch), 0, steps)
    place(telemetry.__getitem__, grid, batch, rows, 0, steps)
    return telemetry
