"""A monitor inside the training program, and the interventions it sets off."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import xarray as xr
from noisy import noisy_descent
from small_runs import arrays, assert_same, kill_through

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.analysis.run_reader import load as load_run
from jaxaudit.core.taps import Taps
from jaxaudit.monitoring.charts import Chart
from jaxaudit.monitoring.labelled_lanes import load_lanes
from jaxaudit.monitoring.meta_state import Training
from jaxaudit.monitoring.state_space import LRU
from jaxaudit.report.line_panels import panels
from jaxaudit.report.verdict import verdict
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.margins.folder import search_margins
from jaxaudit.runs.margins.search import MarginSettings
from jaxaudit.runs.replay import replay
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import load

pytestmark = [pytest.mark.long, pytest.mark.default_compilation]

STEPS, ONSET, ALPHA = 80, 40, 0.05
WINDOWS = MetricSettings(window=10, hold=10, horizon=20)
SMALL = LRU(size=2, hidden=(8,))


@pytest.fixture(scope="module")
def clean():
    """Of seeds 100 and above."""
    return ja.audit(noisy_descent(), [], seeds=range(100, 160), steps=STEPS).telemetry.isel(condition=0)


@pytest.fixture(scope="module")
def monitor(clean):
    return ja.Monitor.fit(clean, model=SMALL, training=Training(iterations=150))


def watched(monitor, perturbations, **settings):
    return ja.audit(noisy_descent(), perturbations, steps=STEPS, monitor=monitor, alpha=ALPHA, **settings).telemetry


def spike(magnitude):
    return ja.lr_spike(magnitude, onset=ONSET, duration="end")


@pytest.fixture(scope="module")
def rescued(monitor):
    """A mild and a destructive spike, each alone and with an intervention."""
    return watched(
        monitor,
        [
            spike(1.2),
            ja.chain(spike(1.2), ja.lower_learning_rate(0.02, onset=ONSET)),
            spike(60.0),
            ja.chain(spike(60.0), ja.lower_learning_rate(0.02, onset=ONSET)),
            ja.lower_learning_rate(0.02, onset=ONSET),
            ja.chain(spike(60.0), ja.roll_back(10, onset=ONSET)),
        ],
        seeds=12,
        settings=WINDOWS,
    )


def assert_online_is_offline(monitor, telemetry):
    """The scores in the program, against those of what was stored; each alarm is a step after its score."""
    outside = monitor.score(telemetry).score.transpose("seed", "condition", "step").values
    inside = telemetry.monitor_score.values + monitor.threshold(ALPHA)
    finite = np.isfinite(inside)
    np.testing.assert_array_equal(finite, np.isfinite(outside))
    assert finite.mean() > 0.8
    np.testing.assert_allclose(inside[finite], outside[finite], rtol=2e-3, atol=2e-3)
    raised = telemetry.monitor_score.values[..., :-1] > 0
    np.testing.assert_array_equal(telemetry.alarm.values[..., 1:] > 0, raised)


@pytest.mark.exhaustive
def test_the_score_inside_is_the_score_of_the_telemetry(monitor, rescued):
    assert_online_is_offline(monitor, rescued)


ONE = Chart(departure=(0.1,), outlier=(1.0,))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model", ["ensemble", pytest.param(ONE, marks=pytest.mark.exhaustive)], ids=["ensemble", "chart"]
)
def test_charts_set_off_interventions_as_a_model_does(clean, model):
    chart = ja.Monitor.fit(clean, model=model)
    acts = [ja.lower_learning_rate(0.02, onset=ONSET), ja.roll_back(10, onset=ONSET)]
    grid = [spike(60.0), *(ja.chain(spike(60.0), act) for act in acts)]
    found = watched(chart, grid, seeds=12, settings=WINDOWS)
    assert_online_is_offline(chart, found)
    for helped in (2, 3):
        alarmed, equal = pairs(found, 1, helped)
        assert alarmed.all()
        assert not equal.any()
    final = found.performance.isel(step=-1)
    assert not (final.isel(condition=1) > -100).any()
    assert (final.isel(condition=2) > -100).all()


def pairs(telemetry, alone, helped):
    """Where the two conditions' lanes were ever alarmed since the onset, and where all their telemetry is equal."""
    one, other = (telemetry.isel(condition=i) for i in (alone, helped))
    alarmed = (other.alarm.isel(step=slice(ONSET, None)) > 0).any("step").values
    own = [name for name in telemetry.data_vars if name != "baseline_performance"]
    equal = [
        all(np.array_equal(one[n].isel(seed=i), other[n].isel(seed=i), equal_nan=True) for n in own)
        for i in range(telemetry.sizes["seed"])
    ]
    return alarmed, np.array(equal)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("alone", "helped"), [(1, 2), (0, 5)], ids=["disturbed", "control"])
def test_a_lane_without_an_alarm_is_bitwise_as_without_interventions(rescued, alone, helped):
    alarmed, equal = pairs(rescued, alone, helped)
    assert (~alarmed).sum() >= 8
    assert equal[~alarmed].all()


@pytest.mark.exhaustive
def test_lanes_that_would_diverge_are_rescued(rescued):
    alarmed, equal = pairs(rescued, 3, 4)
    assert alarmed.all()
    assert not equal.any()
    final = rescued.performance.isel(step=-1)
    assert (final.isel(condition=3).values < -1e3).all() or np.isnan(final.isel(condition=3)).any()
    assert (final.isel(condition=4).values > -100).all()


ACTS = ["tighten_clip", "reset_moments", "roll_back", "lower_learning_rate"]


@pytest.fixture(scope="module")
def acting(monitor):
    """The control, a destructive spike, and for each intervention the spike with it and it alone."""
    acts = [getattr(ja, name)(onset=ONSET) for name in ACTS]
    helped = [condition for act in acts for condition in (ja.chain(spike(60.0), act), act)]
    return watched(monitor, [spike(60.0), *helped], seeds=12, settings=WINDOWS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ACTS)
def test_every_intervention_acts_on_alarm_alone(acting, name):
    helped = 2 + 2 * ACTS.index(name)
    alarmed, equal = pairs(acting, 1, helped)
    assert alarmed.all()
    assert not equal.any()
    alarmed, equal = pairs(acting, 0, helped + 1)
    assert equal[~alarmed].all()
    assert (~alarmed).any()


def rolled_back(magnitude, alarmed, steps=40):
    """The path of a state that tells its step, rolled back as the steps with an alarm have it."""
    state = ja.roll_back.init({"t": jax.numpy.float32(0)})

    @jax.jit
    def apply(value, state, alarm):
        return ja.roll_back.apply(None, value, jax.numpy.float32(magnitude), state, alarm=alarm)

    t, path = 0.0, []
    for step in range(steps):
        value, state = apply({"t": jax.numpy.float32(t)}, state, step in alarmed)
        path.append(float(value["t"]))
        t = path[-1] + 1
    restored = [step for step in range(1, steps) if path[step] != path[step - 1] + 1]
    return path, restored


def test_roll_back_goes_to_the_state_of_so_many_steps_ago():
    path, restored = rolled_back(4, range(20, 40))
    assert path[:20] == list(range(20))
    assert 4 <= 20 - path[20] <= 6
    assert restored == [20, 24, 28, 32, 36]
    assert {path[step] for step in restored} == {path[20]}


@pytest.mark.parametrize("step", range(12, 24))
def test_roll_back_heeds_an_alarm_of_one_step_whenever_it_comes(step):
    path, restored = rolled_back(6, {step})
    assert restored == [step]
    assert 6 <= step - path[step] <= 9


def test_roll_back_does_not_go_back_to_what_the_alarm_was_about():
    """A second alarm soon after the first finds the state gone back to, none of those between it and the alarm."""
    path, restored = rolled_back(6, {20, 27, 60}, steps=70)
    assert restored == [20, 27, 60]
    assert path[27] == path[20]
    assert 6 <= path[59] + 1 - path[60] <= 9


def test_roll_back_rests_between_alarms():
    _, restored = rolled_back(6, {20, 22, 24, 26, 28})
    assert restored == [20, 26]


@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_a_full_reset_heals_moments_that_are_not_finite(broken):
    state = {"mu": np.float32([1.0, broken]), "count": np.int32(7)}
    healed = ja.reset_moments(1.0).apply(state, alarm=True)
    assert (healed["mu"] == 0).all()
    assert healed["count"] == 0
    half = ja.reset_moments(0.5).apply(state, alarm=True)
    assert half["mu"][0] == 0.5
    np.testing.assert_array_equal(ja.reset_moments(1.0).apply(state, alarm=False)["mu"], state["mu"])


def test_an_intervention_without_a_monitor_is_refused():
    with pytest.raises(ValueError, match="'lower_learning_rate' waits for a monitor's alarm, and there is no monitor"):
        ja.audit(noisy_descent(), [ja.lower_learning_rate()], steps=STEPS, seeds=1)


@pytest.mark.exhaustive
def test_a_monitor_of_other_channels_is_refused(monitor):
    from quadratic import quadratic

    with pytest.raises(ValueError, match=r"the monitor reads channel '.*', which the learner's step does not give"):
        ja.audit(quadratic(None), [spike(2.0)], steps=STEPS, seeds=1, monitor=monitor)


def test_outside_an_audit_there_is_no_alarm():
    assert Taps()("learning_rate", 0.1) == 0.1


SPEC = """
[audit]
name = "watched"
seeds = 12
steps = 80
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "noisy_descent"
[monitor]
file = "fitted.npz"
[metrics]
window = 10
hold = 10
horizon = 20
[run]
chunk = 8
checkpoint_every = 1
[[perturbation]]
kind = "lr_spike"
magnitude = 1.2
onset = 40
duration = "end"
[[perturbation]]
onset = 40
chain = [
  {kind = "lr_spike", magnitude = 1.2, duration = "end"},
  {kind = "lower_learning_rate", magnitude = 0.02},
]
[[perturbation]]
kind = "lr_spike"
magnitude = 60
onset = 40
duration = "end"
[[perturbation]]
onset = 40
chain = [
  {kind = "lr_spike", magnitude = 60, duration = "end"},
  {kind = "lower_learning_rate", magnitude = 0.02},
]
[[perturbation]]
kind = "lower_learning_rate"
magnitude = 0.02
onset = 40
[[perturbation]]
onset = 40
chain = [{kind = "lr_spike", magnitude = 60, duration = "end"}, {kind = "roll_back", magnitude = 10}]
"""
"""The grid of `rescued`."""
CHUNKS = 5 + 2 + 5


@pytest.fixture(scope="module")
def finished(server, monitor, tmp_path_factory):
    """A run whose spec and monitor are gone: its folder is all there is."""
    place = tmp_path_factory.mktemp("watched")
    monitor.save(place / "fitted.npz")
    (place / "spec.toml").write_text(SPEC)
    done = server("run", place / "spec.toml", "-o", place / "run")
    assert done.code == 0, done.err
    (place / "fitted.npz").unlink()
    (place / "spec.toml").unlink()
    return place / "run"


@pytest.mark.exhaustive
def test_a_spec_trains_what_audit_trains(finished, rescued):
    stored = xr.open_zarr(finished / "telemetry.zarr").load()
    assert list(stored.condition.values) == list(rescued.condition.values)
    for name in rescued.data_vars:
        np.testing.assert_array_equal(stored[name].transpose(*rescued[name].dims), rescued[name])
    assert (stored.alarm.isel(condition=6) > 0).any("step").all()
    assert not np.array_equal(stored.performance.isel(condition=6), stored.performance.isel(condition=3))


@pytest.mark.exhaustive
def test_lanes_with_an_intervention_are_not_what_detectors_are_compared_on(finished, rescued):
    (lanes,) = load_lanes([finished])
    helped = [name for name in rescued.condition.values if "roll_back" in name or "lower_learning_rate" in name]
    assert helped
    assert set(lanes.table.condition) == set(rescued.condition.values) - set(helped)
    assert not {"alarm", "monitor_score"} & set(lanes.channels)


@pytest.mark.exhaustive
def test_a_monitored_runs_plan_is_taken_wherever_the_monitor_lies(server, finished, tmp_path):
    shutil.copyfile(finished / "monitor.npz", tmp_path / "fitted.npz")
    (tmp_path / "spec.toml").write_text(SPEC)
    done = server("run", tmp_path / "spec.toml", "-o", tmp_path / "again", "--plan", finished)
    assert done.code == 0, done.err
    assert_same(tmp_path / "again", finished)


@pytest.mark.exhaustive
def test_a_monitored_run_is_replayed_and_forked_from_its_folder_alone(server, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "moved")
    done = server("replay", tmp_path / "moved")
    assert (done.code, done.out) == (0, "bitwise equal: 84 lanes, 3960 lane steps\n")
    (tmp_path / "spec.toml").write_text(SPEC.replace("fitted.npz", "moved/monitor.npz"))
    done = server("fork", tmp_path / "moved", tmp_path / "spec.toml", "-o", tmp_path / "fork")
    assert done.code == 0, done.err
    ours, theirs = arrays(tmp_path / "fork"), arrays(finished)
    assert [name for name in theirs if not name.startswith("chunk") and ours[name] != theirs[name]] == []
    assert (tmp_path / "fork" / "monitor.npz").read_bytes() == (finished / "monitor.npz").read_bytes()


@pytest.mark.exhaustive
def test_a_monitored_run_is_killed_and_resumed(server, finished, tmp_path):
    shutil.copy(finished / "monitor.npz", tmp_path / "fitted.npz")
    folder, landed = kill_through(server, tmp_path, SPEC, CHUNKS, kills=3)
    assert len(landed) >= 2
    assert_same(folder, finished)


@pytest.mark.exhaustive
def test_the_report_tells_what_interventions_did(finished, rescued):
    run = load_run(finished)
    told = verdict(run, panels(run))
    assert "roll_back" not in told.lead
    assert "lower_learning_rate" not in told.lead
    times = run.metrics.pivot(index="seed", columns="condition", values="collapse_time")
    lost = np.isfinite(times).sum()
    helped, alone = lost["lr_spike+lower_learning_rate 60 0.02"], lost["lr_spike 60"]
    assert alone == 12
    words = f"{alone} of 12 seeds collapse without the intervention and {helped} with it (share prevented "
    words += f"{(alone - helped) / 12:.2f}"
    (sentence,) = [str(s) for s in told.sentences if "lower_learning_rate 60 0.02" in s]
    assert words in sentence
    assert sentence.endswith("; 12 have an alarm.")
    alarmed = (rescued.alarm.values[:, 5, ONSET:] > 0).any(-1).sum()
    idle = f"<b>lower_learning_rate 0.02</b> with nothing disturbed: {alarmed} of 12 seeds have an alarm, 95% interval"
    assert any(str(s).startswith(idle) for s in told.sentences)
    assert not any(
        "bitwise equal to the control's" in s and "lower_learning_rate 0.02</b>" in s for s in told.sentences
    )


def spec_with(monitor, place, alpha=0.05, learner="noisy_descent"):
    """A spec and its monitor, in a folder."""
    monitor.save(place / "fitted.npz")
    text = SPEC.replace('"fitted.npz"', f'"fitted.npz"\nalpha = {alpha}').replace("noisy_descent", learner)
    (place / "spec.toml").write_text(text)
    return load(place / "spec.toml")


def refused(words, act, *arguments):
    with pytest.raises(UserError, match=words) as raised:
        act(*arguments)
    assert "\n" not in str(raised.value)


def rewritten(path, **changed):
    """A monitor's file with another description."""
    with np.load(path) as file:
        held = dict(file)
    description = json.loads(str(held.pop("description")))
    kept = {name: value for name, value in (description | changed).items() if value is not None}
    np.savez(path, description=np.array(json.dumps(kept)), **held)


@pytest.mark.exhaustive
def test_a_monitor_that_cannot_be_used_is_refused_and_nothing_is_made(monitor, tmp_path):
    spec, out = spec_with(monitor, tmp_path), tmp_path / "run"
    rewritten(tmp_path / "fitted.npz", version=99)
    refused(r"spec.toml: \[monitor\]: .*fitted.npz holds a monitor of version 99, and this package reads", spec.build)
    rewritten(tmp_path / "fitted.npz", version=None)
    refused("fitted.npz is not a monitor's file", spec.build)
    np.save(tmp_path / "fitted.npy", np.zeros(3))
    (tmp_path / "fitted.npy").replace(tmp_path / "fitted.npz")
    refused("fitted.npz is not a monitor's file", spec.build)
    spec = spec_with(monitor, tmp_path, alpha=0.01)
    refused(r"spec.toml: \[monitor\]: 30 clean runs are too few for a false-alarm rate of 0.01", durable.run, spec, out)
    spec = spec_with(monitor, tmp_path, learner="quadratic")
    refused(r"spec.toml: \[monitor\]: the monitor reads channel 'distance\[a\]', which the", durable.run, spec, out)
    assert not out.exists()


@pytest.mark.exhaustive
def test_what_goes_on_from_a_run_keeps_its_monitor(monitor, finished, tmp_path):
    out = tmp_path / "fork"
    refused(r"must keep the run's \[monitor\], .*/run/monitor.npz, and its alpha", durable.fork, finished,
            spec_with(monitor, tmp_path, alpha=0.1), out)  # fmt: skip
    refused(
        r"must keep the run's \[monitor\]",
        search_margins,
        finished,
        load(tmp_path / "spec.toml"),
        out,
        MarginSettings(),
    )
    other = dataclasses.replace(monitor, clean=monitor.clean + 1)
    refused("must keep the run's", durable.fork, finished, spec_with(other, tmp_path), out)
    without = SPEC[: SPEC.index("[monitor]")] + SPEC[SPEC.index("[run]") : SPEC.index("[[perturbation]]\nonset")]
    (tmp_path / "without.toml").write_text(without)
    refused("must keep the run's", durable.fork, finished, load(tmp_path / "without.toml"), out)
    shutil.copytree(finished, tmp_path / "changed")
    other.save(tmp_path / "changed" / "monitor.npz")
    changed = tmp_path / "changed"
    refused("began with another monitor", durable.fork, changed, spec_with(monitor, tmp_path), out)
    refused("began with another monitor", search_margins, changed, None, out, MarginSettings())
    refused("began with another monitor", replay, changed)
    refused("began with another monitor", durable.run, spec_with(other, tmp_path), out, None, changed)
    refused("must keep the run's", durable.run, spec_with(other, tmp_path), out, None, finished)
    (tmp_path / "changed" / "spec.toml").write_text(without)
    refused("has no monitor to go on with, and the spec has a", durable.fork, tmp_path / "changed",
            spec_with(monitor, tmp_path), out)  # fmt: skip
    assert not out.exists()
