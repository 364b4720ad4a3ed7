"""How lanes run: the fastest that was measured where a grid leaves it open, or "vmap" where "map" is for CPUs alone.

What was chosen is recorded, and kept. Tests have no GPU: they replace devices, or what is asked of them.
"""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from quadratic import quadratic
from small_runs import THREE_MAGNITUDES, spec_header

import jaxaudit as ja
from jaxaudit.cli import main as cli
from jaxaudit.execution import autotune as choice
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs import replay
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runs.run_opening import open_run
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import load, parse

LEARNER = quadratic(None, adam=False)


def grid(execution, devices=2):
    spikes = [ja.lr_spike(ja.sweep(2.0, 3.0), onset=3, duration=2)]
    return ja.plan(LEARNER, spikes, seeds=3, steps=12, execution=execution, devices=jax.devices()[:devices])


@pytest.fixture
def quick(monkeypatch):
    """Collecting the garbage of all tests takes a while, and has no part in what is chosen."""
    monkeypatch.setattr(choice, "release_memory", lambda: None)


@pytest.mark.parametrize("fastest", ["vmap", "map", "map on one device"])
def test_the_fastest_is_taken(monkeypatch, quick, fastest):
    candidates = choice.candidates(grid("auto"))
    speeds = {id(candidate): 2.0 if name == fastest else 1.0 for name, candidate in candidates.items()}
    monkeypatch.setattr(choice, "candidates", lambda grid: candidates)
    monkeypatch.setattr(choice, "_speed", lambda candidate, *_: (speeds[id(candidate)], 3))
    chosen, measured = choice.autotune(grid("auto"), 12)
    assert measured == {name: 2.0 if name == fastest else 1.0 for name in candidates}
    assert chosen.program.execution == fastest.split()[0]
    assert len(chosen.program.devices) == (1 if "one" in fastest else 2)


def test_what_was_chosen_is_not_measured():
    for execution in ("vmap", "map", 2):
        chosen, measured = choice.autotune(grid(execution), 12)
        assert chosen == grid(execution)
        assert measured == {}


def test_what_does_not_fit_is_left_out(monkeypatch, quick):
    def speed(grid, *_):
        if grid.program.execution == "vmap":
            raise UserError("too much")
        if len(grid.program.devices) > 1 or crowded:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return 1.0, 3

    monkeypatch.setattr(choice, "_speed", speed)
    crowded = False
    chosen, measured = choice.autotune(grid("auto"), 12)
    assert measured == {"map on one device": 1.0}
    assert len(chosen.program.devices) == 1
    crowded = True
    with pytest.raises(UserError, match="no way to run the lanes fits in memory: RESOURCE_EXHAUSTED"):
        choice.autotune(grid("auto", devices=1), 12)


@pytest.mark.exhaustive
def test_an_audit_tells_what_was_chosen():
    spikes = [ja.lr_spike(ja.sweep(2.0, 3.0), onset=3, duration=2)]  # the programs of `grid`
    chosen = ja.audit(LEARNER, spikes, seeds=3, steps=12, execution="auto").telemetry.attrs
    assert chosen["execution"] in ("vmap", "map")
    assert chosen["execution"] == max(chosen["measured"], key=chosen["measured"].get).split()[0]
    assert "measured" not in ja.audit(LEARNER, spikes, seeds=3, steps=12).telemetry.attrs


@pytest.mark.exhaustive
def test_speeds_are_lane_steps_per_second():
    chosen, measured = choice.autotune(grid("auto"), 12)
    assert set(measured) == {"vmap", "map", "map on one device"}
    assert all(0 < speed < 1e7 for speed in measured.values())
    assert chosen.program.execution in ("vmap", "map")
    alone, measured = choice.autotune(grid("auto", devices=1), 12)
    assert set(measured) == {"vmap", "map"}
    assert len(alone.program.devices) == 1


@pytest.mark.exhaustive
def test_a_run_records_it_and_is_replayed_by_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "_speed", lambda grid, *_: (2.0 if grid.program.execution == "map" else 1.0, 3))
    text = spec_header(audit='execution = "auto"') + THREE_MAGNITUDES
    durable.run(parse(text), tmp_path / "run")
    recorded = Folder(tmp_path / "run").read_environment()
    assert recorded["lane_layout"]["execution"] == "map"
    assert recorded["measured"] == {"vmap": 1.0, "map": 2.0, "map on one device": 2.0}
    monkeypatch.undo()
    found = replay.replay(tmp_path / "run")
    assert found.equal
    assert not found.differences


def on_gpus(grid):
    devices = (SimpleNamespace(platform="gpu"),) * len(grid.program.devices)
    return replace(grid, program=replace(grid.program, devices=devices))


@pytest.mark.parametrize(
    ("lanes", "measured"),
    [
        (9, {"vmap"}),  # more than four each, that memory has room for side by side
        (8, {"vmap", "map"}),
        ("none", {"map"}),
    ],
)
def test_gpus_with_many_lanes_run_them_side_by_side(monkeypatch, quick, lanes, measured):
    def speed(grid, *_):
        if grid.program.execution == "map":
            return 1.0, 100
        if lanes == "none":
            raise UserError("too much")
        return 2.0, lanes

    monkeypatch.setattr(choice, "_speed", speed)
    chosen, found = choice.autotune(on_gpus(grid("auto")), 12)
    assert set(found) == measured
    assert chosen.program.execution == ("map" if lanes == "none" else "vmap")


def test_it_is_the_lanes_that_memory_has_room_for_that_count():
    both = grid("auto")
    assert choice._speed(choice.candidates(both)["vmap"], 12, choice.layout, False, 1)[1] == 9
    few = replace(choice.candidates(both)["vmap"], batch=4)
    assert choice._speed(few, 12, choice.layout, False, 1)[1] == 3


def test_cpus_measure_all_ways_however_many_lanes(monkeypatch, quick):
    monkeypatch.setattr(choice, "_speed", lambda *_: (1.0, 1000))
    assert len(choice.autotune(grid("auto"), 12)[1]) == 3


MAPPED = spec_header(audit='execution = "map"') + THREE_MAGNITUDES


@pytest.fixture
def as_a_gpu(monkeypatch):
    """Devices that count as GPUs; the run's 12 lanes are many for two."""
    monkeypatch.setattr(choice, "accelerated", lambda grid: True)


@pytest.mark.exhaustive
def test_a_map_that_is_for_cpus_is_none_on_a_gpu_and_whoever_goes_on_keeps_that(
    tmp_path, as_a_gpu, monkeypatch, capsys
):
    folder = tmp_path / "run"
    durable.begin(MAPPED, "small.toml", str(folder), vars(durable.PlanOptions(map_is_for_cpus=True)))
    noted = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: execution")]
    assert noted == [
        'note: execution = "map" is meant for CPUs: up to 12 lanes run side by side ("vmap") on 2 cpu device(s)'
    ]
    monkeypatch.undo()  # goes on, is replayed and lends its plan wherever that is
    assert load(folder / "spec.toml").audit.execution == "vmap"
    assert Folder(folder).read_environment()["lane_layout"]["execution"] == "vmap"
    assert open_run(folder)[2].program.execution == "vmap"
    durable.resume(folder)
    assert replay.replay(folder).equal
    durable.run(parse(MAPPED), tmp_path / "alike", like=folder)
    assert load(tmp_path / "alike" / "spec.toml").audit.execution == "vmap"


def test_a_map_that_a_spec_asks_for_is_kept_and_what_it_costs_is_noted(tmp_path, as_a_gpu, capsys):
    durable.begin(MAPPED, "small.toml", str(tmp_path / "run"), vars(durable.PlanOptions()))
    assert '"map" runs up to 12 lanes on 2 cpu device(s) one after the other; "vmap" runs' in capsys.readouterr().err
    assert load(tmp_path / "run" / "spec.toml").audit.execution == "map"
    assert Folder(tmp_path / "run").read_environment()["lane_layout"]["execution"] == "map"


def test_on_cpus_a_map_is_a_map(tmp_path, capsys):
    durable.begin(MAPPED, "small.toml", str(tmp_path / "run"), vars(durable.PlanOptions(map_is_for_cpus=True)))
    assert "note: execution" not in capsys.readouterr().err
    assert load(tmp_path / "run" / "spec.toml").audit.execution == "map"


def test_the_packaged_specs_alone_have_a_map_for_cpus(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(durable, "run", lambda *arguments: told.append(arguments))
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)
    monkeypatch.setattr(cli, "_report_finished", lambda folder: 0)
    (tmp_path / "my.toml").write_text(MAPPED)
    assert cli.main(["quickstart", "llm", "-o", str(tmp_path / "run")]) == 0
    assert cli.main(["run", str(tmp_path / "my.toml"), "-o", str(tmp_path / "run")]) == 0
    assert [(spec.audit.execution, is_for_cpus) for spec, *_, is_for_cpus in told] == [("map", True), ("map", False)]
