"""How lanes run where a grid leaves it open: the fastest that was measured, recorded, and kept."""

import jax
import pytest
from quadratic import quadratic
from small_runs import THREE, header

import jaxaudit as ja
from jaxaudit.errors import UserError
from jaxaudit.execution import choice
from jaxaudit.runner import durable, replay
from jaxaudit.runner.store import Folder
from jaxaudit.specification.document import parse

LEARNER = quadratic(None, adam=False)


def grid(execution, devices=2):
    spikes = [ja.lr_spike(ja.sweep(2.0, 3.0), onset=3, duration=2)]
    return ja.plan(LEARNER, spikes, seeds=3, steps=12, execution=execution, devices=jax.devices()[:devices])


@pytest.fixture
def quick(monkeypatch):
    """Collecting the garbage of all tests takes a while, and has no part in what is chosen."""
    monkeypatch.setattr(choice, "give_back", lambda: None)


@pytest.mark.parametrize("fastest", ["vmap", "map", "map on one device"])
def test_the_fastest_is_taken(monkeypatch, quick, fastest):
    candidates = choice.candidates(grid("auto"))
    speeds = {id(candidate): 2.0 if name == fastest else 1.0 for name, candidate in candidates.items()}
    monkeypatch.setattr(choice, "candidates", lambda grid: candidates)
    monkeypatch.setattr(choice, "_speed", lambda candidate, *_: speeds[id(candidate)])
    chosen, measured = choice.settle(grid("auto"), 12)
    assert measured == {name: 2.0 if name == fastest else 1.0 for name in candidates}
    assert chosen.program.execution == fastest.split()[0]
    assert len(chosen.program.devices) == (1 if "one" in fastest else 2)


def test_what_was_chosen_is_not_measured():
    for execution in ("vmap", "map", 2):
        chosen, measured = choice.settle(grid(execution), 12)
        assert chosen == grid(execution)
        assert measured == {}


def test_what_does_not_fit_is_left_out(monkeypatch, quick):
    def speed(grid, *_):
        if grid.program.execution == "vmap":
            raise UserError("too much")
        if len(grid.program.devices) > 1 or crowded:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return 1.0

    monkeypatch.setattr(choice, "_speed", speed)
    crowded = False
    chosen, measured = choice.settle(grid("auto"), 12)
    assert measured == {"map on one device": 1.0}
    assert len(chosen.program.devices) == 1
    crowded = True
    with pytest.raises(UserError, match="no way to run the lanes fits in memory: RESOURCE_EXHAUSTED"):
        choice.settle(grid("auto", devices=1), 12)


def test_an_audit_tells_what_was_chosen():
    spikes = [ja.lr_spike(ja.sweep(2.0, 3.0), onset=3, duration=2)]  # the programs of `grid`
    chosen = ja.audit(LEARNER, spikes, seeds=3, steps=12, execution="auto").telemetry.attrs
    assert chosen["execution"] in ("vmap", "map")
    assert chosen["execution"] == max(chosen["measured"], key=chosen["measured"].get).split()[0]
    assert "measured" not in ja.audit(LEARNER, spikes, seeds=3, steps=12).telemetry.attrs


def test_speeds_are_lane_steps_per_second():
    chosen, measured = choice.settle(grid("auto"), 12)
    assert set(measured) == {"vmap", "map", "map on one device"}
    assert all(0 < speed < 1e7 for speed in measured.values())
    assert chosen.program.execution in ("vmap", "map")
    alone, measured = choice.settle(grid("auto", devices=1), 12)
    assert set(measured) == {"vmap", "map"}
    assert len(alone.program.devices) == 1


def test_a_run_records_it_and_is_replayed_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "_speed", lambda grid, *_: 2.0 if grid.program.execution == "map" else 1.0)
    text = header(audit='execution = "auto"') + THREE
    durable.run(parse(text), tmp_path / "run")
    recorded = Folder(tmp_path / "run").read_environment()
    assert recorded["lane_layout"]["execution"] == "map"
    assert recorded["measured"] == {"vmap": 1.0, "map": 2.0, "map on one device": 2.0}
    monkeypatch.undo()
    found = replay.replay(tmp_path / "run")
    assert found.equal
    assert not found.differences
