"""A dialogue run that is killed ends as if nothing had been, the rows it stored to be read included; it is replayed,
forked and monitored from its folder alone."""

import signal

import jax
import numpy as np
import pytest
from fast_compilation import fast_compilation_enabled
from small_runs import assert_runs_equal, chunks_done, signal_at_chunk, stored_arrays

import jaxaudit as ja
from jaxaudit.analysis.run_reader import load
from jaxaudit.learners.dialogue.telemetry.token_statistics import STRATA
from jaxaudit.runs import lifecycle as durable
from jaxaudit.spec.document import load as load_spec

pytestmark = pytest.mark.long

SPEC = """
[audit]
name = "small"
seeds = 4
steps = 10
telemetry = "LEVEL"
execution = "map"
[task]
kind = "dialogue"
name = "hop"
entities = 3
hops = 2
difficulty = 1.0
length = 13
[learner]
kind = "grpo"
prompts = 2
group_size = 4
epochs = 1
warm_start = 20
warm_start_rows = 8
learning_rate = 1e-2
performance_rows = 4
performance_every = 2
[metrics]
window = 3
hold = 3
horizon = 3
[run]
chunk = 1
checkpoint_every = 1
[[perturbation]]
kind = "stale_policy"
magnitude = 2
onset = 4
duration = "end"
[[perturbation]]
kind = "sync_interval"
magnitude = 3
onset = 4
duration = "end"
[[perturbation]]
kind = "tool_error"
magnitude = 0.5
onset = 4
duration = "end"
"""
BASELINE = 7  # chunks of the undisturbed lanes: to the onset, and a window after it
KILLED = BASELINE + 3
"""Chunks done at the kill: the windows are open, the ring of policies is full, and nobody has been synced again."""

ROWS = ("shown_token", "shown_role", "shown_log_probability", "shown_reward")
"""Held-out rows, as they are stored to be read."""


def as_here():
    """What a process runs first to compile as this one does, and to find what was compiled here."""
    cache = jax.config.jax_compilation_cache_dir
    compile_so = f"import fast_compilation, jax; fast_compilation.set_fast_compilation({fast_compilation_enabled()})"
    return f"{compile_so}; jax.config.update('jax_compilation_cache_dir', {cache!r})"


BASIC = pytest.param("basic", marks=pytest.mark.exhaustive)
FULL = pytest.param("full", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[BASIC, FULL])
def level(request):
    """Of telemetry: the full one has rows to be read, and takes minutes to compile."""
    return request.param


@pytest.fixture(scope="module")
def runs(server, level, tmp_path_factory):
    """A run that was left alone, and one that was killed, in a process of its own, and went on in another."""
    place = tmp_path_factory.mktemp("dialogues")
    spec = place / "spec.toml"
    spec.write_text(SPEC.replace("LEVEL", level))
    durable.run(load_spec(spec), place / "whole")
    kill = signal_at_chunk(place / "run", signal.SIGKILL, chunk=KILLED)
    killed = server("run", spec, "-o", place / "run", setup=as_here(), watch=kill)
    assert killed.code == -signal.SIGKILL, killed.err
    assert KILLED <= chunks_done(place / "run") < chunks_done(place / "whole")
    durable.resume(place / "run")
    return place


def test_a_killed_run_goes_on_to_the_same_telemetry_and_checkpoints(runs, level):
    assert_runs_equal(runs / "run", runs / "whole")
    told = load(runs / "run").telemetry
    assert (set(ROWS) <= set(told.data_vars)) == (level == "full")
    control = told.sel(condition="control")
    for condition in told.condition.values[1:]:  # what was compared is of a run whose disturbances did something
        lane = told.sel(condition=condition)
        assert not np.array_equal(lane["params_norm"], control["params_norm"]), condition


def test_it_is_replayed_and_forked_from_its_folder(runs, run_cli):
    """In part, and at the same width: bit for bit."""
    done = run_cli("replay", runs / "run", "--seed", "1", "--condition", "sync_interval 3")
    assert done.code == 0, done.out
    assert done.out.startswith("bitwise equal: 1 lanes, 6 lane steps\n")
    done = run_cli("fork", runs / "run", runs / "spec.toml", "-o", runs / "fork")
    assert done.code == 0, done.err
    ours, theirs = stored_arrays(runs / "fork"), stored_arrays(runs / "run")
    assert [name for name in theirs if not name.startswith("chunk") and ours[name] != theirs[name]] == []


def test_a_run_is_stored_with_its_strata_and_a_monitor_takes_it(runs):
    found = load(runs / "run").telemetry
    assert found["entropy"].dims[-1] == "stratum"
    assert tuple(found["stratum"].values) == STRATA
    assert found["performance"].attrs["every"] == 2
    control = found.isel(condition=0)
    assert np.isfinite(control["entropy"].values).all()
    assert (control["entropy"].sel(stratum="all") > 0).all()
    assert np.isfinite(control["x_grad"].values).all()
    monitor = ja.Monitor.fit(control)
    assert "entropy[all]" in monitor.expectation.channels.names
