"""Runs of a learner with remedies: watched, rolled back, killed and resumed, replayed, forked, searched."""

import pytest
from noisy import noisy_descent
from small_runs import arrays, assert_same, kill_through, one_sentence

import jaxaudit as ja
from jaxaudit.analysis.run_reader import load

pytestmark = pytest.mark.exhaustive

STEPS, SEEDS = 60, 6
REMEDIES = (ja.remedies.l2_init(0.01), ja.remedies.adagc(), ja.remedies.learning_rate_scale(0.9))
TABLES = "".join(f'[[remedy]]\nkind = "{one.name}"\nstrength = {one.strength}\n' for one in REMEDIES)
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
def place(server, tmp_path_factory):
    place = tmp_path_factory.mktemp("remedied")
    learner = ja.remedied(noisy_descent(), *REMEDIES)
    clean = ja.audit(learner, [], seeds=range(100, 150), steps=STEPS).telemetry.isel(condition=0)
    ja.Monitor.fit(clean).save(place / "fitted.npz")
    (place / "spec.toml").write_text(SPEC)
    done = server("run", place / "spec.toml", "-o", place / "run")
    assert done.code == 0, done.err
    return place


def test_the_run_is_the_audits_and_the_remedies_do_something(place):
    run = load(place / "run")
    assert run.remedies == " with l2_init 0.01, adagc 1.05, learning_rate_scale 0.9"
    rolled = run.conditions.condition.str.contains("roll_back")
    alarmed = (run.channel("alarm")[:, rolled.to_numpy()] > 0).any()
    assert alarmed
    plain = ja.audit(noisy_descent(), [ja.weight_noise(3.0, onset=30)], seeds=SEEDS, steps=STEPS).telemetry
    mine = run.channel("performance")[:, 0]
    assert abs(mine[:, -1] - plain.performance.values[:, 0, -1]).max() > 1e-4


def test_it_is_killed_and_resumed(server, place, tmp_path):
    (tmp_path / "fitted.npz").write_bytes((place / "fitted.npz").read_bytes())
    folder, landed = kill_through(server, tmp_path, SPEC, CHUNKS, kills=3)
    assert len(landed) >= 2
    assert_same(folder, place / "run")


def test_it_is_replayed_forked_and_searched(server, place, tmp_path):
    done = server("replay", place / "run")
    assert done.code == 0, done.err
    assert done.out.startswith("bitwise equal")
    (tmp_path / "spec.toml").write_text(SPEC.replace("fitted.npz", str(place / "fitted.npz")))
    done = server("fork", place / "run", tmp_path / "spec.toml", "-o", tmp_path / "fork")
    assert done.code == 0, done.err
    ours, theirs = arrays(tmp_path / "fork"), arrays(place / "run")
    assert [name for name in theirs if not name.startswith("chunk") and ours[name] != theirs[name]] == []
    done = server("margin", place / "run", "--tolerance", "0.5", "--reach", "10")
    assert done.code == 0, done.err
    assert "lr_spike" in done.out


def test_a_fork_keeps_the_remedies_of_its_run(server, place, tmp_path):
    text = SPEC.replace("fitted.npz", str(place / "fitted.npz")).replace("strength = 0.01", "strength = 0.02")
    (tmp_path / "spec.toml").write_text(text)
    done = server("fork", place / "run", tmp_path / "spec.toml", "-o", tmp_path / "fork")
    one_sentence(done, 2, "the spec must keep the run's remedies")
    assert not (tmp_path / "fork").exists()
