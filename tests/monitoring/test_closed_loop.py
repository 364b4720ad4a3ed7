"""A monitor inside the training program, and the interventions that its alarms trigger."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import xarray as xr
from noisy import noisy_descent
from small_runs import assert_runs_equal, run_through_kills, stored_arrays

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
    """Telemetry of undisturbed lanes, with seeds that the audits do not use."""
    return ja.audit(noisy_descent(), [], seeds=range(100, 160), steps=STEPS).telemetry.isel(condition=0)


@pytest.fixture(scope="module")
def monitor(clean):
    return ja.Monitor.fit(clean, model=SMALL, training=Training(iterations=150))


def monitored_audit(monitor, perturbations, **settings):
    return ja.audit(noisy_descent(), perturbations, steps=STEPS, monitor=monitor, alpha=ALPHA, **settings).telemetry


def spike(magnitude):
    return ja.lr_spike(magnitude, onset=ONSET, duration="end")


@pytest.fixture(scope="module")
def rescued_lanes(monitor):
    """A mild and a destructive spike, each alone and with an intervention."""
    return monitored_audit(
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
    """Checks scores of the program against scores of the stored telemetry, and that alarms follow one step later."""
    offline = monitor.score(telemetry).score.transpose("seed", "condition", "step").values
    online = telemetry.monitor_score.values + monitor.threshold(ALPHA)
    finite = np.isfinite(online)
    np.testing.assert_array_equal(finite, np.isfinite(offline))
    assert finite.mean() > 0.8
    np.testing.assert_allclose(online[finite], offline[finite], rtol=2e-3, atol=2e-3)
    raised = telemetry.monitor_score.values[..., :-1] > 0
    np.testing.assert_array_equal(telemetry.alarm.values[..., 1:] > 0, raised)


@pytest.mark.exhaustive
def test_scores_in_the_program_equal_scores_of_the_telemetry(monitor, rescued_lanes):
    assert_online_is_offline(monitor, rescued_lanes)


CHART = Chart(departure=(0.1,), outlier=(1.0,))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "model", ["ensemble", pytest.param(CHART, marks=pytest.mark.exhaustive)], ids=["ensemble", "chart"]
)
def test_alarms_of_charts_trigger_interventions(clean, model):
    chart = ja.Monitor.fit(clean, model=model)
    interventions = [ja.lower_learning_rate(0.02, onset=ONSET), ja.roll_back(10, onset=ONSET)]
    grid = [spike(60.0), *(ja.chain(spike(60.0), intervention) for intervention in interventions)]
    telemetry = monitored_audit(chart, grid, seeds=12, settings=WINDOWS)
    assert_online_is_offline(chart, telemetry)
    for condition in (2, 3):
        alarmed, equal = pairs(telemetry, 1, condition)
        assert alarmed.all()
        assert not equal.any()
    final = telemetry.performance.isel(step=-1)
    assert not (final.isel(condition=1) > -100).any()
    assert (final.isel(condition=2) > -100).all()


def pairs(telemetry, alone, helped):
    """Returns by seed whether the helped lane had an alarm from the onset on, and whether both are bitwise equal."""
    lanes_alone, lanes_helped = (telemetry.isel(condition=i) for i in (alone, helped))
    alarmed = (lanes_helped.alarm.isel(step=slice(ONSET, None)) > 0).any("step").values
    channels = [name for name in telemetry.data_vars if name != "baseline_performance"]
    equal = [
        all(np.array_equal(lanes_alone[n].isel(seed=i), lanes_helped[n].isel(seed=i), equal_nan=True) for n in channels)
        for i in range(telemetry.sizes["seed"])
    ]
    return alarmed, np.array(equal)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("alone", "helped"), [(1, 2), (0, 5)], ids=["disturbed", "control"])
def test_without_an_alarm_interventions_change_no_bit(rescued_lanes, alone, helped):
    alarmed, equal = pairs(rescued_lanes, alone, helped)
    assert (~alarmed).sum() >= 8
    assert equal[~alarmed].all()


@pytest.mark.exhaustive
def test_interventions_rescue_lanes_that_would_diverge(rescued_lanes):
    alarmed, equal = pairs(rescued_lanes, 3, 4)
    assert alarmed.all()
    assert not equal.any()
    final = rescued_lanes.performance.isel(step=-1)
    assert (final.isel(condition=3).values < -1e3).all() or np.isnan(final.isel(condition=3)).any()
    assert (final.isel(condition=4).values > -100).all()


INTERVENTIONS = ["tighten_clip", "reset_moments", "roll_back", "lower_learning_rate"]


@pytest.fixture(scope="module")
def intervention_lanes(monitor):
    """The control, a destructive spike, and each intervention with the spike and alone."""
    interventions = [getattr(ja, name)(onset=ONSET) for name in INTERVENTIONS]
    helped = [
        condition for intervention in interventions for condition in (ja.chain(spike(60.0), intervention), intervention)
    ]
    return monitored_audit(monitor, [spike(60.0), *helped], seeds=12, settings=WINDOWS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", INTERVENTIONS)
def test_every_intervention_acts_only_on_an_alarm(intervention_lanes, name):
    helped = 2 + 2 * INTERVENTIONS.index(name)
    alarmed, equal = pairs(intervention_lanes, 1, helped)
    assert alarmed.all()
    assert not equal.any()
    alarmed, equal = pairs(intervention_lanes, 0, helped + 1)
    assert equal[~alarmed].all()
    assert (~alarmed).any()


def rollback_path(magnitude, alarmed, steps=40):
    """Returns the path of a state that counts steps and is rolled back by alarms, and the steps that restored it."""
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


def test_roll_back_restores_the_state_of_magnitude_steps_ago():
    path, restored = rollback_path(4, range(20, 40))
    assert path[:20] == list(range(20))
    assert 4 <= 20 - path[20] <= 6
    assert restored == [20, 24, 28, 32, 36]
    assert {path[step] for step in restored} == {path[20]}


@pytest.mark.parametrize("step", range(12, 24))
def test_roll_back_acts_on_an_alarm_of_a_single_step(step):
    path, restored = rollback_path(6, {step})
    assert restored == [step]
    assert 6 <= step - path[step] <= 9


def test_roll_back_does_not_restore_states_from_before_the_alarm():
    """A second alarm soon after the first restores the same state, and none from between that state and the alarm."""
    path, restored = rollback_path(6, {20, 27, 60}, steps=70)
    assert restored == [20, 27, 60]
    assert path[27] == path[20]
    assert 6 <= path[59] + 1 - path[60] <= 9


def test_roll_back_ignores_alarms_soon_after_a_rollback():
    _, restored = rollback_path(6, {20, 22, 24, 26, 28})
    assert restored == [20, 26]


@pytest.mark.parametrize("broken", [np.inf, -np.inf, np.nan])
def test_a_full_reset_clears_non_finite_moments(broken):
    state = {"mu": np.float32([1.0, broken]), "count": np.int32(7)}
    reset = ja.reset_moments(1.0).apply(state, alarm=True)
    assert (reset["mu"] == 0).all()
    assert reset["count"] == 0
    halved = ja.reset_moments(0.5).apply(state, alarm=True)
    assert halved["mu"][0] == 0.5
    np.testing.assert_array_equal(ja.reset_moments(1.0).apply(state, alarm=False)["mu"], state["mu"])


def test_an_intervention_without_a_monitor_is_refused():
    with pytest.raises(ValueError, match="'lower_learning_rate' waits for a monitor's alarm, and there is no monitor"):
        ja.audit(noisy_descent(), [ja.lower_learning_rate()], steps=STEPS, seeds=1)


@pytest.mark.exhaustive
def test_a_monitor_with_channels_of_another_learner_is_refused(monitor):
    from quadratic import quadratic

    with pytest.raises(ValueError, match=r"the monitor reads channel '.*', which the learner's step does not give"):
        ja.audit(quadratic(None), [spike(2.0)], steps=STEPS, seeds=1, monitor=monitor)


def test_taps_outside_an_audit_change_nothing():
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
"""The same grid as that of the fixture `rescued_lanes`."""
CHUNKS = 5 + 2 + 5


@pytest.fixture(scope="module")
def finished_run(server, monitor, tmp_path_factory):
    """The folder of a finished run, whose spec and monitor file were deleted elsewhere."""
    folder = tmp_path_factory.mktemp("watched")
    monitor.save(folder / "fitted.npz")
    (folder / "spec.toml").write_text(SPEC)
    process = server("run", folder / "spec.toml", "-o", folder / "run")
    assert process.code == 0, process.err
    (folder / "fitted.npz").unlink()
    (folder / "spec.toml").unlink()
    return folder / "run"


@pytest.mark.exhaustive
def test_a_run_of_a_spec_equals_the_audit(finished_run, rescued_lanes):
    stored = xr.open_zarr(finished_run / "telemetry.zarr").load()
    assert list(stored.condition.values) == list(rescued_lanes.condition.values)
    for name in rescued_lanes.data_vars:
        np.testing.assert_array_equal(stored[name].transpose(*rescued_lanes[name].dims), rescued_lanes[name])
    assert (stored.alarm.isel(condition=6) > 0).any("step").all()
    assert not np.array_equal(stored.performance.isel(condition=6), stored.performance.isel(condition=3))


@pytest.mark.exhaustive
def test_detectors_are_not_compared_on_lanes_with_interventions(finished_run, rescued_lanes):
    (lanes,) = load_lanes([finished_run])
    helped = [name for name in rescued_lanes.condition.values if "roll_back" in name or "lower_learning_rate" in name]
    assert helped
    assert set(lanes.table.condition) == set(rescued_lanes.condition.values) - set(helped)
    assert not {"alarm", "monitor_score"} & set(lanes.channels)


@pytest.mark.exhaustive
def test_a_plan_is_reused_with_the_monitor_in_another_file(server, finished_run, tmp_path):
    shutil.copyfile(finished_run / "monitor.npz", tmp_path / "fitted.npz")
    (tmp_path / "spec.toml").write_text(SPEC)
    process = server("run", tmp_path / "spec.toml", "-o", tmp_path / "again", "--plan", finished_run)
    assert process.code == 0, process.err
    assert_runs_equal(tmp_path / "again", finished_run)


@pytest.mark.exhaustive
def test_a_monitored_run_is_replayed_and_forked_from_its_folder(server, finished_run, tmp_path):
    shutil.copytree(finished_run, tmp_path / "moved")
    process = server("replay", tmp_path / "moved")
    assert (process.code, process.out) == (0, "bitwise equal: 84 lanes, 3960 lane steps\n")
    (tmp_path / "spec.toml").write_text(SPEC.replace("fitted.npz", "moved/monitor.npz"))
    process = server("fork", tmp_path / "moved", tmp_path / "spec.toml", "-o", tmp_path / "fork")
    assert process.code == 0, process.err
    forked, original = stored_arrays(tmp_path / "fork"), stored_arrays(finished_run)
    assert [name for name in original if not name.startswith("chunk") and forked[name] != original[name]] == []
    assert (tmp_path / "fork" / "monitor.npz").read_bytes() == (finished_run / "monitor.npz").read_bytes()


@pytest.mark.exhaustive
def test_a_killed_monitored_run_resumes_bitwise(server, finished_run, tmp_path):
    shutil.copy(finished_run / "monitor.npz", tmp_path / "fitted.npz")
    folder, kills = run_through_kills(server, tmp_path, SPEC, CHUNKS, kills=3)
    assert len(kills) >= 2
    assert_runs_equal(folder, finished_run)


@pytest.mark.exhaustive
def test_the_report_says_what_interventions_prevented(finished_run, rescued_lanes):
    run = load_run(finished_run)
    run_verdict = verdict(run, panels(run))
    assert "roll_back" not in run_verdict.lead
    assert "lower_learning_rate" not in run_verdict.lead
    times = run.metrics.pivot(index="seed", columns="condition", values="collapse_time")
    collapsed = np.isfinite(times).sum()
    helped, alone = collapsed["lr_spike+lower_learning_rate 60 0.02"], collapsed["lr_spike 60"]
    assert alone == 12
    expected = f"{alone} of 12 seeds collapse without the intervention and {helped} with it (share prevented "
    expected += f"{(alone - helped) / 12:.2f}"
    (sentence,) = [str(s) for s in run_verdict.sentences if "lower_learning_rate 60 0.02" in s]
    assert expected in sentence
    assert sentence.endswith("; 12 have an alarm.")
    alarmed = (rescued_lanes.alarm.values[:, 5, ONSET:] > 0).any(-1).sum()
    expected_alone = (
        f"<b>lower_learning_rate 0.02</b> with nothing disturbed: {alarmed} of 12 seeds have an alarm, 95% interval"
    )
    assert any(str(s).startswith(expected_alone) for s in run_verdict.sentences)
    assert not any(
        "bitwise equal to the control's" in s and "lower_learning_rate 0.02</b>" in s for s in run_verdict.sentences
    )


def spec_with(monitor, folder, alpha=0.05, learner="noisy_descent"):
    monitor.save(folder / "fitted.npz")
    text = SPEC.replace('"fitted.npz"', f'"fitted.npz"\nalpha = {alpha}').replace("noisy_descent", learner)
    (folder / "spec.toml").write_text(text)
    return load(folder / "spec.toml")


def assert_refused(message, function, *arguments):
    with pytest.raises(UserError, match=message) as raised:
        function(*arguments)
    assert "\n" not in str(raised.value)


def rewrite_description(path, **changed):
    """Changes the description in a monitor's file."""
    with np.load(path) as file:
        arrays_of_file = dict(file)
    description = json.loads(str(arrays_of_file.pop("description")))
    new_description = {name: value for name, value in (description | changed).items() if value is not None}
    np.savez(path, description=np.array(json.dumps(new_description)), **arrays_of_file)


@pytest.mark.exhaustive
def test_unusable_monitors_are_refused_before_a_run_is_created(monitor, tmp_path):
    spec, out = spec_with(monitor, tmp_path), tmp_path / "run"
    rewrite_description(tmp_path / "fitted.npz", version=99)
    assert_refused(
        r"spec.toml: \[monitor\]: .*fitted.npz holds a monitor of version 99, and this package reads", spec.build
    )
    rewrite_description(tmp_path / "fitted.npz", version=None)
    assert_refused("fitted.npz is not a monitor's file", spec.build)
    np.save(tmp_path / "fitted.npy", np.zeros(3))
    (tmp_path / "fitted.npy").replace(tmp_path / "fitted.npz")
    assert_refused("fitted.npz is not a monitor's file", spec.build)
    spec = spec_with(monitor, tmp_path, alpha=0.01)
    assert_refused(
        r"spec.toml: \[monitor\]: 30 clean runs are too few for a false-alarm rate of 0.01", durable.run, spec, out
    )
    spec = spec_with(monitor, tmp_path, learner="quadratic")
    assert_refused(
        r"spec.toml: \[monitor\]: the monitor reads channel 'distance\[a\]', which the", durable.run, spec, out
    )
    assert not out.exists()


@pytest.mark.exhaustive
def test_forks_margins_replays_and_plans_keep_the_monitor(monitor, finished_run, tmp_path):
    out = tmp_path / "fork"
    assert_refused(r"must keep the run's \[monitor\], .*/run/monitor.npz, and its alpha", durable.fork, finished_run,
            spec_with(monitor, tmp_path, alpha=0.1), out)  # fmt: skip
    assert_refused(
        r"must keep the run's \[monitor\]",
        search_margins,
        finished_run,
        load(tmp_path / "spec.toml"),
        out,
        MarginSettings(),
    )
    other_monitor = dataclasses.replace(monitor, clean=monitor.clean + 1)
    assert_refused("must keep the run's", durable.fork, finished_run, spec_with(other_monitor, tmp_path), out)
    spec_without_monitor = (
        SPEC[: SPEC.index("[monitor]")] + SPEC[SPEC.index("[run]") : SPEC.index("[[perturbation]]\nonset")]
    )
    (tmp_path / "without.toml").write_text(spec_without_monitor)
    assert_refused("must keep the run's", durable.fork, finished_run, load(tmp_path / "without.toml"), out)
    shutil.copytree(finished_run, tmp_path / "changed")
    other_monitor.save(tmp_path / "changed" / "monitor.npz")
    changed = tmp_path / "changed"
    assert_refused("began with another monitor", durable.fork, changed, spec_with(monitor, tmp_path), out)
    assert_refused("began with another monitor", search_margins, changed, None, out, MarginSettings())
    assert_refused("began with another monitor", replay, changed)
    assert_refused("began with another monitor", durable.run, spec_with(other_monitor, tmp_path), out, None, changed)
    assert_refused("must keep the run's", durable.run, spec_with(other_monitor, tmp_path), out, None, finished_run)
    (tmp_path / "changed" / "spec.toml").write_text(spec_without_monitor)
    assert_refused("has no monitor to go on with, and the spec has a", durable.fork, tmp_path / "changed",
            spec_with(monitor, tmp_path), out)  # fmt: skip
    assert not out.exists()
