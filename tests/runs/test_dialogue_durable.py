"""A killed dialogue run resumes bitwise, with the rows of its full telemetry.

The run is replayed, forked and monitored from its folder only.
"""

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
BASELINE = 7  # chunks of the undisturbed lanes: until the onset, and a window after it
KILLED = BASELINE + 3
"""Chunks stored at the kill.

The windows are open, the ring of policies is full, and no policy has been synced again.
"""

ROWS = ("shown_token", "shown_role", "shown_log_probability", "shown_reward")
"""Held-out rows, which are stored as text to be read."""


def setup_code():
    """Returns code that makes a process compile as this one, with the same compilation cache."""
    cache = jax.config.jax_compilation_cache_dir
    compilation = f"import fast_compilation, jax; fast_compilation.set_fast_compilation({fast_compilation_enabled()})"
    return f"{compilation}; jax.config.update('jax_compilation_cache_dir', {cache!r})"


BASIC = pytest.param("basic", marks=pytest.mark.exhaustive)
FULL = pytest.param("full", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=[BASIC, FULL])
def level(request):
    """The level of telemetry. The full one contains rows as text, and takes minutes to compile."""
    return request.param


@pytest.fixture(scope="module")
def runs(server, level, tmp_path_factory):
    """A run without interruption, and one that was killed in another process and resumed in this one."""
    folder = tmp_path_factory.mktemp("dialogues")
    spec = folder / "spec.toml"
    spec.write_text(SPEC.replace("LEVEL", level))
    durable.run(load_spec(spec), folder / "whole")
    watch = signal_at_chunk(folder / "run", signal.SIGKILL, chunk=KILLED)
    killed = server("run", spec, "-o", folder / "run", setup=setup_code(), watch=watch)
    assert killed.code == -signal.SIGKILL, killed.err
    assert KILLED <= chunks_done(folder / "run") < chunks_done(folder / "whole")
    durable.resume(folder / "run")
    return folder


def test_a_killed_run_resumes_bitwise(runs, level):
    assert_runs_equal(runs / "run", runs / "whole")
    telemetry = load(runs / "run").telemetry
    assert (set(ROWS) <= set(telemetry.data_vars)) == (level == "full")
    control = telemetry.sel(condition="control")
    for condition in telemetry.condition.values[
        1:
    ]:  # the comparison above is meaningful only if the perturbations had an effect
        lane = telemetry.sel(condition=condition)
        assert not np.array_equal(lane["params_norm"], control["params_norm"]), condition


def test_the_run_is_replayed_and_forked_from_its_folder(runs, run_cli):
    """A part of the lanes, trained at the same width, is bitwise equal."""
    result = run_cli("replay", runs / "run", "--seed", "1", "--condition", "sync_interval 3")
    assert result.code == 0, result.out
    assert result.out.startswith("bitwise equal: 1 lanes, 6 lane steps\n")
    result = run_cli("fork", runs / "run", runs / "spec.toml", "-o", runs / "fork")
    assert result.code == 0, result.err
    forked, original = stored_arrays(runs / "fork"), stored_arrays(runs / "run")
    assert [name for name in original if not name.startswith("chunk") and forked[name] != original[name]] == []


def test_strata_are_stored_and_a_monitor_can_be_fitted(runs):
    telemetry = load(runs / "run").telemetry
    assert telemetry["entropy"].dims[-1] == "stratum"
    assert tuple(telemetry["stratum"].values) == STRATA
    assert telemetry["performance"].attrs["every"] == 2
    control = telemetry.isel(condition=0)
    assert np.isfinite(control["entropy"].values).all()
    assert (control["entropy"].sel(stratum="all") > 0).all()
    assert np.isfinite(control["x_grad"].values).all()
    monitor = ja.Monitor.fit(control)
    assert "entropy[all]" in monitor.expectation.channels.names
