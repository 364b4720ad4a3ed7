"""Forks and replays of finished runs, from their folders only."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import zarr
from small_runs import SHORT_SPEC, SPEC, assert_runs_equal, error_sentence, flip_byte, stored_arrays

from jaxaudit.analysis import datasets
from jaxaudit.core.batches import layout
from jaxaudit.execution import memory
from jaxaudit.execution.engine import Engine
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.replay import replay
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import parse

pytestmark = [pytest.mark.long, pytest.mark.default_compilation]

ONE_ONSET = SPEC.replace("[5, 10]", "10")  # one onset, four conditions
LANES, LANE_STEPS = 24, 3 * 14 + 12 * 15 + 12 * 10


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    durable.run(parse(SPEC), folder)
    return folder


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def computed_steps(monkeypatch):
    """A list of the lane steps that the engine computes."""
    steps = []
    advance = Engine.advance

    def count_and_advance(self, batch, states, start, stop):
        steps.append(len(batch.seeds) * (stop - start))
        return advance(self, batch, states, start, stop)

    monkeypatch.setattr(Engine, "advance", count_and_advance)
    return steps


def test_a_replay_trains_all_lanes(finished, computed_steps):
    replayed = replay(finished)
    assert replayed.equal
    assert replayed.differences == ()
    assert (replayed.lanes, replayed.steps) == (LANES, LANE_STEPS)
    assert sum(computed_steps) == replayed.steps
    assert str(replayed) == "bitwise equal: 24 lanes, 342 lane steps"


@pytest.mark.parametrize(
    ("seed", "condition", "lanes", "steps", "computed"),
    [
        (1, None, 8, 14 + 4 * 15 + 4 * 10, LANE_STEPS),
        (None, "lr_spike 30 @5", 3, 3 * 15, 12 * 15),
        (2, "lr_spike 30 @5", 1, 15, 12 * 15),
        (0, "6", 1, 10, 12 * 10),
    ],
)
def test_a_replay_may_be_of_a_part(seed, condition, lanes, steps, computed, finished, computed_steps):
    replayed = replay(finished, seed, condition)
    assert replayed.equal
    assert (replayed.lanes, replayed.steps, sum(computed_steps)) == (lanes, steps, computed)


def add_to_telemetry(folder, channel, index, amount):
    array = zarr.open_group(folder / "telemetry.zarr", mode="r+")[channel]
    array[index] = array[index] + np.float32(amount)


def test_a_changed_value_is_detected(copied):
    add_to_telemetry(copied, "performance", (1, 5, 15), 0.5)
    add_to_telemetry(copied, "update_norm", (2, 2, 7), 0.25)
    replayed = replay(copied)
    assert replayed.deviations == {"performance": pytest.approx(0.5), "update_norm": pytest.approx(0.25)}
    words = str(replayed)
    assert "not equal: 24 lanes, 342 lane steps; largest deviation 0.5 in performance" in words
    assert words.endswith(
        "why:\n  software, device and lane layout are as recorded: the program is not deterministic here"
    )
    assert replay(copied, seed=0).equal
    assert replay(copied, condition="5").deviations.keys() == {"performance"}


@pytest.mark.parametrize("condition", [2, 6])
def test_a_changed_prefix_is_detected(condition, copied):
    add_to_telemetry(copied, "performance", (1, condition, 3), 1.0)
    assert replay(copied).deviations == {"performance": pytest.approx(1.0)}


def test_a_changed_baseline_is_detected(copied):
    add_to_telemetry(copied, "baseline_performance", (0, 12), 1.0)
    assert replay(copied).deviations == {"baseline_performance": pytest.approx(1.0)}


def test_a_nan_is_detected(copied):
    add_to_telemetry(copied, "performance", (0, 1, 19), np.nan)
    assert replay(copied, condition="1").deviations == {"performance": np.inf}


def test_another_environment_is_reported(copied, capsys):
    store = Folder(copied)
    environment = store.read_environment()
    environment["packages"]["jax"] = "0.4.1"
    store.environment.write_text(json.dumps(environment))
    version = __import__("jax").__version__
    assert str(replay(copied)).endswith(f"\n  package jax: 0.4.1 when it was run, {version} now")
    add_to_telemetry(copied, "performance", (0, 0, 19), 2.0)
    assert f"why:\n  package jax: 0.4.1 when it was run, {version} now" in str(replay(copied))


def test_a_damaged_onset_is_refused(copied):
    flip_byte(copied / "checkpoints" / "onset-00000010")
    assert replay(copied, condition="1").equal
    with pytest.raises(UserError, match="onset-00000010 is damaged"):
        replay(copied, condition="6")


def test_a_fork_computes_only_its_suffixes(copied, computed_steps, tmp_path):
    """The same conditions at the same width are bitwise equal."""
    out = tmp_path / "fork"
    durable.fork(copied, parse(SPEC), out)
    assert sum(computed_steps) == 12 * 15 + 12 * 10
    forked, original = stored_arrays(out), stored_arrays(copied)
    channels = [name for name in original if not name.startswith("chunk")]
    assert [name for name in channels if forked[name] != original[name]] == []
    for name in ("metrics.csv", "summary.csv"):
        assert (out / name).read_bytes() == (copied / name).read_bytes()
    environment = Folder(out).read_environment()
    assert environment["samples"] == 12 * 15 + 12 * 10
    assert environment["forked_from"] == str(copied)


@pytest.mark.exhaustive
def test_new_conditions_fork_from_the_stored_states(copied, computed_steps, tmp_path):
    out = tmp_path / "fork"
    durable.fork(copied, parse(ONE_ONSET.replace("[3, 30]", "100").replace("magnitude = 1.0", "magnitude = 0.1")), out)
    assert sum(computed_steps) == 9 * 10
    new, old = Folder(out).read_telemetry(), Folder(copied).read_telemetry()
    assert list(new["condition"].values) == ["control", "lr_spike 100", "weight_noise 0.1"]
    for name in ("performance", "update_norm"):
        for condition in range(3):
            np.testing.assert_array_equal(new[name][:, condition, :10], old[name][:, 4, :10])
        assert not np.array_equal(new[name][:, 1, 10:], new[name][:, 0, 10:])
        assert np.isfinite(new[name]).all()


@pytest.mark.exhaustive
def test_a_fork_at_the_first_step_is_replayed(tmp_path):
    text = SPEC.replace("[5, 10]", "[0, 10]")
    durable.run(parse(text), tmp_path / "run")
    durable.fork(tmp_path / "run", parse(text), tmp_path / "fork")
    assert replay(tmp_path / "run").equal
    assert replay(tmp_path / "fork").equal


@pytest.mark.exhaustive
def test_a_fork_does_not_need_the_original_run(copied, tmp_path, monkeypatch):
    """The fork is stopped at its beginning, moved, and resumed after the original run is deleted.

    It can be forked again.
    """
    durable.fork(copied, parse(SPEC), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_execute", lambda *arguments: None)
        durable.fork(copied, parse(SPEC), tmp_path / "fork")
    shutil.rmtree(copied)
    (tmp_path / "fork").rename(tmp_path / "moved")
    durable.resume(tmp_path / "moved")
    assert_runs_equal(tmp_path / "moved", tmp_path / "whole")
    assert replay(tmp_path / "moved").equal
    durable.fork(tmp_path / "moved", parse(ONE_ONSET), tmp_path / "again")
    assert replay(tmp_path / "again").equal


def set_free_memory(monkeypatch, lanes):
    """Sets the free memory to just enough for a number of lanes of SHORT_SPEC at a time, or to unlimited for None."""
    free = None
    if lanes:
        grid = replace(parse(SHORT_SPEC).build(), batch=lanes)
        free = int(memory.needs(Engine(grid, 4), layout(grid)).total / memory.SHARE) + 1
    monkeypatch.setattr(memory, "available_memory", lambda devices: free)


@pytest.mark.exhaustive
def test_batches_keep_their_size_whatever_memory_is_free(tmp_path, monkeypatch):
    """The size that was chosen remains the run's, for its replay and for the rest of it after a stop."""
    set_free_memory(monkeypatch, 2)
    durable.run(parse(SHORT_SPEC), tmp_path / "run")
    recorded = Folder(tmp_path / "run").read_environment()["lane_layout"]
    assert (recorded["lanes"], recorded["widths"]) == (2, [2])
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_execute", lambda *arguments: None)
        durable.run(parse(SHORT_SPEC), tmp_path / "begun")
    set_free_memory(monkeypatch, None)
    durable.resume(tmp_path / "begun")
    assert_runs_equal(tmp_path / "begun", tmp_path / "run")
    replayed = replay(tmp_path / "run")
    assert replayed.equal
    assert replayed.differences == ()
    one_lane = replay(tmp_path / "run", seed=1, condition="3")
    assert (one_lane.equal, one_lane.lanes, one_lane.steps) == (True, 1, 10)
    durable.fork(tmp_path / "run", parse(SHORT_SPEC), tmp_path / "fork")
    assert Folder(tmp_path / "fork").read_environment()["lane_layout"]["lanes"] == 12
    batches, in_one_batch = (Folder(tmp_path / name).read_telemetry() for name in ("run", "fork"))
    np.testing.assert_allclose(batches["performance"], in_one_batch["performance"], rtol=1e-5)
    assert replay(tmp_path / "fork").equal
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "onset-00000010-0001")
    assert replay(tmp_path / "run", condition="0", seed=0).equal
    with pytest.raises(UserError, match=r"onset-00000010 is without the seeds at positions \[2\], so nothing can be"):
        durable.fork(tmp_path / "run", parse(SHORT_SPEC), tmp_path / "again")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('"quadratic"', '"quadratic"\nsize = 4'), "must keep the run's learner"),
        (("seeds = 3", "seeds = 2"), "must keep the run's seeds"),
        (("InvertedPendulum-v5", "HalfCheetah-v5"), "must keep the run's task"),
        (("[5, 10]", "[5, 7]"), "no stored onset at step 7; the run in .* has 5, 10"),
    ],
)
def test_specs_that_cannot_be_forked_are_refused(change, words, finished, tmp_path):
    with pytest.raises(UserError, match=words):
        durable.fork(finished, parse(SPEC.replace(*change)), tmp_path / "fork")
    assert not any(tmp_path.iterdir())


@pytest.mark.exhaustive
def test_a_fork_of_a_damaged_onset_is_refused(copied, tmp_path):
    flip_byte(copied / "checkpoints" / "onset-00000005")
    with pytest.raises(UserError, match="onset-00000005 is damaged, so nothing can be forked from step 5"):
        durable.fork(copied, parse(SPEC), tmp_path / "fork")
    durable.fork(copied, parse(ONE_ONSET), tmp_path / "fork")
    assert replay(tmp_path / "fork").equal


@pytest.mark.exhaustive
def test_the_command_line_forks_and_replays(run_cli, copied, tmp_path):
    (tmp_path / "one.toml").write_text(ONE_ONSET)
    result = run_cli("fork", copied, tmp_path / "one.toml", "-o", tmp_path / "fork")
    assert result.code == 0, result.err
    result = run_cli("replay", tmp_path / "fork")
    assert (result.code, result.out) == (0, "bitwise equal: 12 lanes, 120 lane steps\n")
    add_to_telemetry(copied, "performance", (0, 0, 19), 1.0)
    result = run_cli("replay", copied, "--seed", "0", "--condition", "control @5")
    assert result.code == 1
    assert "largest deviation 1 in performance" in result.out
    (tmp_path / "other.toml").write_text(ONE_ONSET.replace("seeds = 3", "seeds = [0, 1, 3]"))
    error_sentence(
        run_cli("fork", copied, tmp_path / "other.toml", "-o", tmp_path / "no"), 2, "must keep the run's seeds"
    )


@pytest.mark.exhaustive
def test_another_process_replays_bitwise(server, copied):
    result = server("replay", copied)
    assert result.code == 0, result.err
    assert result.out.startswith("bitwise equal: 24 lanes, 342 lane steps\n")


def test_conditions_are_found_by_label_or_index_and_seeds_by_number():
    labels = ["control", "1", "spike"]
    assert [datasets.find_index("condition", key, labels) for key in ("spike", "1", "0", 2)] == [2, 1, 0, 2]
    assert datasets.find_index("seed", 7, ["5", "7"]) == 1
    for kind, key, allowed in (("condition", 3, labels), ("condition", "-1", labels), ("seed", 0, ["5", "7"])):
        with pytest.raises(UserError, match=f"unknown {kind} .?{key}"):
            datasets.find_index(kind, key, allowed)
