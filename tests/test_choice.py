"""How lanes run where a grid leaves it open: the fastest that was measured, recorded, and kept."""

import jax
import pytest
from quadratic import quadratic
from test_durable import SPEC

import jaxaudit as ja
from jaxaudit.execution import choice
from jaxaudit.runner import durable, replay
from jaxaudit.runner.store import Folder
from jaxaudit.specification.document import parse


def grid(execution, devices=2):
    spikes = [ja.lr_spike(ja.sweep(2.0, 3.0), onset=3, duration=2)]
    return ja.plan(quadratic(None), spikes, seeds=3, steps=12, execution=execution, devices=jax.devices()[:devices])


@pytest.mark.parametrize("fastest", ["vmap", "map", "map on one device"])
def test_the_fastest_is_taken(monkeypatch, fastest):
    candidates = choice._candidates(grid("auto"))
    speeds = {id(candidate): 2.0 if name == fastest else 1.0 for name, candidate in candidates.items()}
    monkeypatch.setattr(choice, "_candidates", lambda grid: candidates)
    monkeypatch.setattr(choice, "_speed", lambda candidate: speeds[id(candidate)])
    chosen, measured = choice.settle(grid("auto"))
    assert measured == {name: 2.0 if name == fastest else 1.0 for name in candidates}
    assert chosen.program.execution == fastest.split()[0]
    assert len(chosen.program.devices) == (1 if "one" in fastest else 2)


def test_what_was_chosen_is_not_measured():
    for execution in ("vmap", "map", 2):
        chosen, measured = choice.settle(grid(execution))
        assert chosen == grid(execution)
        assert measured == {}


def test_speeds_are_lane_steps_per_second():
    chosen, measured = choice.settle(grid("auto"))
    assert set(measured) == {"vmap", "map", "map on one device"}
    assert all(0 < speed < 1e7 for speed in measured.values())
    assert chosen.program.execution in ("vmap", "map")
    alone, measured = choice.settle(grid("auto", devices=1))
    assert set(measured) == {"vmap", "map"}
    assert len(alone.program.devices) == 1


def test_a_run_records_it_and_is_replayed_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "_speed", lambda grid: 2.0 if grid.program.execution == "map" else 1.0)
    text = SPEC.replace("[audit]", '[audit]\nexecution = "auto"')
    durable.run(parse(text), tmp_path / "run")
    recorded = Folder(tmp_path / "run").read_environment()
    assert recorded["lane_layout"]["execution"] == "map"
    assert recorded["measured"] == {"vmap": 1.0, "map": 2.0, "map on one device": 2.0}
    monkeypatch.undo()
    found = replay.replay(tmp_path / "run")
    assert found.equal
    assert not found.differences
