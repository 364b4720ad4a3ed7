"""Execution modes: the fastest measured one for "auto", and "vmap" on GPUs where a spec means "map" for CPUs only.

The choice is recorded in the run. The tests have no GPU, so they replace devices or their properties.
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
def no_garbage_collection(monkeypatch):
    """Skips garbage collection, which takes long among all tests and has no influence on the choice."""
    monkeypatch.setattr(choice, "release_memory", lambda: None)


@pytest.mark.parametrize("fastest", ["vmap", "map", "map on one device"])
def test_the_fastest_mode_is_chosen(monkeypatch, no_garbage_collection, fastest):
    candidates = choice.candidates(grid("auto"))
    speeds = {id(candidate): 2.0 if name == fastest else 1.0 for name, candidate in candidates.items()}
    monkeypatch.setattr(choice, "candidates", lambda grid: candidates)
    monkeypatch.setattr(choice, "_speed", lambda candidate, *_: (speeds[id(candidate)], 3))
    tuned, measured = choice.autotune(grid("auto"), 12)
    assert measured == {name: 2.0 if name == fastest else 1.0 for name in candidates}
    assert tuned.program.execution == fastest.split()[0]
    assert len(tuned.program.devices) == (1 if "one" in fastest else 2)


def test_a_mode_that_is_set_is_not_measured():
    for execution in ("vmap", "map", 2):
        tuned, measured = choice.autotune(grid(execution), 12)
        assert tuned == grid(execution)
        assert measured == {}


def test_modes_that_do_not_fit_in_memory_are_excluded(monkeypatch, no_garbage_collection):
    def speed(grid, *_):
        if grid.program.execution == "vmap":
            raise UserError("too much")
        if len(grid.program.devices) > 1 or one_device_is_full:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return 1.0, 3

    monkeypatch.setattr(choice, "_speed", speed)
    one_device_is_full = False
    tuned, measured = choice.autotune(grid("auto"), 12)
    assert measured == {"map on one device": 1.0}
    assert len(tuned.program.devices) == 1
    one_device_is_full = True
    with pytest.raises(UserError, match="no way to run the lanes fits in memory: RESOURCE_EXHAUSTED"):
        choice.autotune(grid("auto", devices=1), 12)


@pytest.mark.exhaustive
def test_an_audit_reports_the_chosen_mode():
    spikes = [ja.lr_spike(ja.sweep(2.0, 3.0), onset=3, duration=2)]  # the same programs as those of `grid`
    attrs = ja.audit(LEARNER, spikes, seeds=3, steps=12, execution="auto").telemetry.attrs
    assert attrs["execution"] in ("vmap", "map")
    assert attrs["execution"] == max(attrs["measured"], key=attrs["measured"].get).split()[0]
    assert "measured" not in ja.audit(LEARNER, spikes, seeds=3, steps=12).telemetry.attrs


@pytest.mark.exhaustive
def test_speeds_are_lane_steps_per_second():
    tuned, measured = choice.autotune(grid("auto"), 12)
    assert set(measured) == {"vmap", "map", "map on one device"}
    assert all(0 < speed < 1e7 for speed in measured.values())
    assert tuned.program.execution in ("vmap", "map")
    on_one_device, measured = choice.autotune(grid("auto", devices=1), 12)
    assert set(measured) == {"vmap", "map"}
    assert len(on_one_device.program.devices) == 1


@pytest.mark.exhaustive
def test_a_run_records_the_chosen_mode_and_replays_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "_speed", lambda grid, *_: (2.0 if grid.program.execution == "map" else 1.0, 3))
    text = spec_header(audit='execution = "auto"') + THREE_MAGNITUDES
    durable.run(parse(text), tmp_path / "run")
    recorded = Folder(tmp_path / "run").read_environment()
    assert recorded["lane_layout"]["execution"] == "map"
    assert recorded["measured"] == {"vmap": 1.0, "map": 2.0, "map on one device": 2.0}
    monkeypatch.undo()
    result = replay.replay(tmp_path / "run")
    assert result.equal
    assert not result.differences


def on_gpus(grid):
    devices = (SimpleNamespace(platform="gpu"),) * len(grid.program.devices)
    return replace(grid, program=replace(grid.program, devices=devices))


@pytest.mark.parametrize(
    ("lanes", "measured"),
    [
        (9, {"vmap"}),  # more than four lanes for each device fit in memory
        (8, {"vmap", "map"}),
        ("none", {"map"}),
    ],
)
def test_gpus_run_many_lanes_with_vmap(monkeypatch, no_garbage_collection, lanes, measured):
    def speed(grid, *_):
        if grid.program.execution == "map":
            return 1.0, 100
        if lanes == "none":
            raise UserError("too much")
        return 2.0, lanes

    monkeypatch.setattr(choice, "_speed", speed)
    tuned, speeds = choice.autotune(on_gpus(grid("auto")), 12)
    assert set(speeds) == measured
    assert tuned.program.execution == ("map" if lanes == "none" else "vmap")


def test_the_measured_number_of_lanes_is_what_fits_in_memory():
    two_devices = grid("auto")
    assert choice._speed(choice.candidates(two_devices)["vmap"], 12, choice.layout, False, 1)[1] == 9
    batches_of_four = replace(choice.candidates(two_devices)["vmap"], batch=4)
    assert choice._speed(batches_of_four, 12, choice.layout, False, 1)[1] == 3


def test_cpus_measure_all_modes_for_any_number_of_lanes(monkeypatch, no_garbage_collection):
    monkeypatch.setattr(choice, "_speed", lambda *_: (1.0, 1000))
    assert len(choice.autotune(grid("auto"), 12)[1]) == 3


MAPPED = spec_header(audit='execution = "map"') + THREE_MAGNITUDES


@pytest.fixture
def pretend_gpus(monkeypatch):
    """Makes the devices count as GPUs. The run's 12 lanes are many for two devices."""
    monkeypatch.setattr(choice, "accelerated", lambda grid: True)


@pytest.mark.exhaustive
def test_a_map_for_cpus_becomes_vmap_on_gpus_and_stays_vmap(tmp_path, pretend_gpus, monkeypatch, capsys):
    folder = tmp_path / "run"
    durable.begin(MAPPED, "small.toml", str(folder), vars(durable.PlanOptions(map_is_for_cpus=True)))
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: execution")]
    assert notes == [
        'note: execution = "map" is meant for CPUs: up to 12 lanes run side by side ("vmap") on 2 cpu device(s)'
    ]
    monkeypatch.undo()  # the run is resumed, replayed and its plan reused on other devices
    assert load(folder / "spec.toml").audit.execution == "vmap"
    assert Folder(folder).read_environment()["lane_layout"]["execution"] == "vmap"
    assert open_run(folder)[2].program.execution == "vmap"
    durable.resume(folder)
    assert replay.replay(folder).equal
    durable.run(parse(MAPPED), tmp_path / "alike", like=folder)
    assert load(tmp_path / "alike" / "spec.toml").audit.execution == "vmap"


def test_a_map_in_a_users_spec_is_kept_with_a_note(tmp_path, pretend_gpus, capsys):
    durable.begin(MAPPED, "small.toml", str(tmp_path / "run"), vars(durable.PlanOptions()))
    assert '"map" runs up to 12 lanes on 2 cpu device(s) one after the other; "vmap" runs' in capsys.readouterr().err
    assert load(tmp_path / "run" / "spec.toml").audit.execution == "map"
    assert Folder(tmp_path / "run").read_environment()["lane_layout"]["execution"] == "map"


def test_on_cpus_a_map_stays_a_map(tmp_path, capsys):
    durable.begin(MAPPED, "small.toml", str(tmp_path / "run"), vars(durable.PlanOptions(map_is_for_cpus=True)))
    assert "note: execution" not in capsys.readouterr().err
    assert load(tmp_path / "run" / "spec.toml").audit.execution == "map"


def test_only_packaged_specs_mean_map_for_cpus(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(durable, "run", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)
    monkeypatch.setattr(cli, "_report_finished", lambda folder: 0)
    (tmp_path / "my.toml").write_text(MAPPED)
    assert cli.main(["quickstart", "llm", "-o", str(tmp_path / "run")]) == 0
    assert cli.main(["run", str(tmp_path / "my.toml"), "-o", str(tmp_path / "run")]) == 0
    assert [(spec.audit.execution, is_for_cpus) for spec, *_, is_for_cpus in calls] == [("map", True), ("map", False)]
