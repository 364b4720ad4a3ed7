"""Lanes trained without a baseline: one program less to compile."""

import jaxaudit as ja
from jaxaudit.execution.engine import Engine
from jaxaudit.grid import Phase, blank_telemetry, place


def train_from_the_start(learner, perturbations, *, seeds, steps):
    """Telemetry `[seed, condition, step, ...]` of a grid whose perturbations all have onset 0, by channel."""
    grid = ja.plan(learner, perturbations, seeds=seeds, steps=steps, tail=0)
    (group,) = grid.forks
    assert group.onset == 0
    arrays = blank_telemetry(grid)
    engine, phase = Engine(grid, steps), Phase(0)
    _, rows = engine.advance(phase, engine.initial(phase), 0, steps)
    place(arrays.__getitem__, grid, phase, rows, 0, steps)
    return arrays
