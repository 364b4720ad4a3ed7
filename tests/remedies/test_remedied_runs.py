"""Tests runs of a learner with remedies: monitors, rolling back, resuming, replaying, forking and margins."""

import pytest
from noisy import noisy_descent
from small_runs import assert_runs_equal, error_sentence, run_through_kills, stored_arrays

import jaxaudit as ja
from jaxaudit.analysis.run_reader import load

pytestmark = pytest.mark.exhaustive

STEPS, SEEDS = 60, 6
REMEDIES = (ja.remedies.l2_init(0.01), ja.remedies.adagc(), ja.remedies.learning_rate_scale(0.9))
TABLES = "".join(f'[[remedy]]\nkind = "{remedy.name}"\nstrength = {remedy.strength}\n' for remedy in REMEDIES)
SPEC = f"""
[audit]
name = "remedied"
seeds = {SEEDS}
steps = {STEPS}
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "noisy_descent"
{TABLES}
[monitor]
file = "fitted.npz"
[metrics]
window = 10
hold = 10
horizon = 20
[run]
chunk = 10
checkpoint_every = 1
[[perturbation]]
kind = "weight_noise"
magnitude = 3.0
onset = 30
[[perturbation]]
onset = 30
chain = [{{kind = "weight_noise", magnitude = 30.0}}, {{kind = "roll_back", magnitude = 10}}]
[[perturbation]]
kind = "lr_spike"
magnitude = 60
onset = 30
duration = "end"
"""
CHUNKS = 3 + 1 + 3


@pytest.fixture(scope="module")
def base_folder(server, tmp_path_factory):
    base_folder = tmp_path_factory.mktemp("remedied")
    learner = ja.remedied(noisy_descent(), *REMEDIES)
    clean = ja.audit(learner, [], seeds=range(100, 150), steps=STEPS).telemetry.isel(condition=0)
    ja.Monitor.fit(clean).save(base_folder / "fitted.npz")
    (base_folder / "spec.toml").write_text(SPEC)
    done = server("run", base_folder / "spec.toml", "-o", base_folder / "run")
    assert done.code == 0, done.err
    return base_folder


def test_a_run_with_remedies_differs_from_the_plain_learner(base_folder):
    run = load(base_folder / "run")
    assert run.remedies == " with l2_init 0.01, adagc 1.05, learning_rate_scale 0.9"
    rolls_back = run.conditions.condition.str.contains("roll_back")
    has_alarm = (run.channel("alarm")[:, rolls_back.to_numpy()] > 0).any()
    assert has_alarm
    plain = ja.audit(noisy_descent(), [ja.weight_noise(3.0, onset=30)], seeds=SEEDS, steps=STEPS).telemetry
    performance = run.channel("performance")[:, 0]
    assert abs(performance[:, -1] - plain.performance.values[:, 0, -1]).max() > 1e-4


def test_a_killed_run_with_remedies_resumes_bitwise(server, base_folder, tmp_path):
    (tmp_path / "fitted.npz").write_bytes((base_folder / "fitted.npz").read_bytes())
    resumed, kills = run_through_kills(server, tmp_path, SPEC, CHUNKS, kills=3)
    assert len(kills) >= 2
    assert_runs_equal(resumed, base_folder / "run")


def test_a_run_with_remedies_is_replayed_forked_and_searched(server, base_folder, tmp_path):
    done = server("replay", base_folder / "run")
    assert done.code == 0, done.err
    assert done.out.startswith("bitwise equal")
    (tmp_path / "spec.toml").write_text(SPEC.replace("fitted.npz", str(base_folder / "fitted.npz")))
    done = server("fork", base_folder / "run", tmp_path / "spec.toml", "-o", tmp_path / "fork")
    assert done.code == 0, done.err
    fork_arrays, run_arrays = stored_arrays(tmp_path / "fork"), stored_arrays(base_folder / "run")
    assert [name for name in run_arrays if not name.startswith("chunk") and fork_arrays[name] != run_arrays[name]] == []
    done = server("margin", base_folder / "run", "--tolerance", "0.5", "--reach", "10")
    assert done.code == 0, done.err
    assert "lr_spike" in done.out


def test_a_fork_must_keep_the_remedies_of_its_run(server, base_folder, tmp_path):
    text = SPEC.replace("fitted.npz", str(base_folder / "fitted.npz")).replace("strength = 0.01", "strength = 0.02")
    (tmp_path / "spec.toml").write_text(text)
    done = server("fork", base_folder / "run", tmp_path / "spec.toml", "-o", tmp_path / "fork")
    error_sentence(done, 2, "the spec must keep the run's remedies")
    assert not (tmp_path / "fork").exists()
