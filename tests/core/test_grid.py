"""The grid as a program: execution modes, devices, several onsets, and refused arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from quadratic import quadratic

import jaxaudit as ja
from jaxaudit.analysis.metrics import MetricSettings
from jaxaudit.core import sites
from jaxaudit.core.batches import layout
from jaxaudit.core.grid import lanes_of
from jaxaudit.core.perturbation import stateless
from jaxaudit.core.program import telemetry_shapes
from jaxaudit.core.sites import find_sites
from jaxaudit.execution.engine import Engine
from jaxaudit.perturbations import conditions
from jaxaudit.runtime import registry, sharding
from jaxaudit.spec.document import misfits

SLOW = pytest.mark.slow
LEARNER = quadratic(None, adam=False)
PERTURBATIONS = [
    ja.lr_spike(ja.sweep(3.0, 10.0), onset=5),
    ja.weight_noise(0.5, onset=12),
    ja.lr_spike(0.3, onset=12, duration=3),
]


def performance(**options):
    return ja.audit(LEARNER, PERTURBATIONS, seeds=3, steps=30, **options).telemetry["performance"].values


@pytest.fixture(scope="module")
def result():
    return ja.audit(LEARNER, PERTURBATIONS, seeds=3, steps=30)


@pytest.fixture(scope="module")
def expected(result):
    return result.telemetry["performance"].values


def test_without_perturbations_every_seed_is_trained_undisturbed(expected):
    """One call trains several seeds, and the control is the same as in a grid with perturbations."""
    telemetry = ja.audit(LEARNER, [], seeds=3, steps=30).telemetry
    assert list(telemetry.condition.values) == ["control"]
    np.testing.assert_allclose(telemetry["performance"].values[:, 0], expected[:, 0], rtol=1e-5)


@pytest.mark.parametrize("execution", ["map", 2, *(pytest.param(size, marks=SLOW) for size in (1, 5, 100))])
def test_all_execution_modes_give_the_same_lanes(expected, execution):
    np.testing.assert_allclose(performance(execution=execution), expected, rtol=1e-5)


def test_with_map_a_lane_without_open_window_is_bitwise_the_control():
    later = ja.chain(ja.lr_spike(1.0, onset=5), ja.weight_noise(0.5, onset=12))
    result = ja.audit(LEARNER, [ja.lr_spike(1.0, onset=5), later], seeds=3, steps=30, execution="map")
    control, neutral, noisy = np.moveaxis(result.telemetry["performance"].values, 1, 0)
    assert (neutral == control).all()
    assert (noisy[:, :12] == control[:, :12]).all()
    assert (noisy[:, 13:] != control[:, 13:]).all()


def test_one_device_gives_the_same_lanes_as_two(expected):
    assert len(jax.devices()) == 2
    np.testing.assert_allclose(performance(devices=jax.devices()[:1]), expected, rtol=1e-5)


def test_onsets_have_separate_controls_and_one_baseline(result):
    data = result.telemetry
    assert list(data["condition"].values) == [
        "control @5",
        "lr_spike 3 @5",
        "lr_spike 10 @5",
        "control @12",
        "weight_noise 0.5 @12",
        "lr_spike 0.3 @12",
    ]
    values = data["performance"].values
    assert (values[:, :, :5] == values[:, :1, :5]).all()
    assert (values[:, 3:, :12] == values[:, 3:4, :12]).all()
    np.testing.assert_allclose(values[:, 3], values[:, 0], rtol=1e-5)
    assert data.attrs["noise_floor"] < 1e-4


def test_fork_groups_of_unequal_width_have_separate_programs():
    plan = ja.plan(LEARNER, PERTURBATIONS[:2], seeds=3, steps=30)
    assert [batch.width for batch in layout(plan)] == [4, 10, 6]
    assert plan.lane_steps == 3 * (30 + 3 * 25 + 2 * 18)


def test_wide_groups_fill_entire_vectors():
    plan = ja.plan(LEARNER, [ja.lr_spike(ja.sweep(*map(float, range(2, 19))), onset=5)], seeds=2, steps=30)
    assert layout(plan)[1].width == 48
    values = ja.audit(LEARNER, [ja.lr_spike(1.0, onset=5)] * 17, seeds=2, steps=30).telemetry["performance"].values
    assert (values == values[:, :1]).all()


def small_network():
    """A learner that is sensitive to rounding, unlike the quadratic one."""
    optimizer = ja.Optimizer(optax.scale_by_adam(), 0.05)
    inputs = jax.random.normal(jax.random.key(9), (32, 7))

    def fresh(key):
        return {"a": jax.random.normal(key, (7, 33)), "b": jax.random.normal(key, (33,))}

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        params, moments = optimizer.disturb(*state, taps, fresh)
        noise = jax.random.normal(key, (32,))
        loss, gradient = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(inputs @ p["a"]) @ p["b"] - noise) ** 2))(
            params
        )
        params, moments, _ = optimizer.update(params, moments, gradient, taps)
        return (params, moments), {"performance": -loss}

    return ja.Learner(init, step)


NETWORK = small_network()


@pytest.mark.parametrize(
    ("execution", "lanes", "width"),
    [
        (4, 5, 8),
        ("vmap", 17, 24),
        (17, 20, 24),
        pytest.param(4, 3, 3, marks=SLOW),
        pytest.param("map", 19, 19, marks=SLOW),
        pytest.param(17, 40, 48, marks=SLOW),
    ],
)
def test_a_neutral_lane_is_the_control_in_all_execution_modes(execution, lanes, width):
    neutral = [ja.lr_spike(1.0, onset=5, duration=10)] * (lanes - 1)
    options = {"seeds": 1, "steps": 30, "execution": execution, "devices": jax.devices()[:1]}
    assert layout(ja.plan(NETWORK, neutral, **options))[1].width == width
    values = ja.audit(NETWORK, neutral, **options).telemetry["performance"].values
    assert values.shape[1] == lanes
    assert (values == values[:, :1]).all()


def test_a_chain_acts_in_its_order_at_a_shared_site():
    rounded = ja.chain(ja.weight_noise(0.3, onset=5), ja.quantize(2.0, onset=5))
    noisy = ja.chain(ja.quantize(2.0, onset=5), ja.weight_noise(0.3, onset=5))
    learner = weights_learner()

    def weights(*chains):
        return ja.audit(learner, chains, seeds=1, steps=6).telemetry["weights"].values[0, 1:, 5]

    separate = np.concatenate([weights(rounded), weights(noisy)])
    assert [len(np.unique(row)) for row in separate] == [3, 50]
    single = ja.quantize(2.0, onset=5)
    joint = weights(noisy, rounded, single)
    np.testing.assert_array_equal(joint[:2], separate[::-1])
    slots = [ja.plan(learner, chains, seeds=1, steps=6).program.slots for chains in ([single, noisy], [noisy, single])]
    assert slots[0] == slots[1]
    assert [slot.kind.name for slot in slots[0]] == ["quantize", "weight_noise"]


def queue_for(value, max_magnitude):
    return jnp.zeros((int(max_magnitude), *value.shape))


def delay(key, value, magnitude, queue):
    return queue[-1], jnp.concatenate([value[None], queue[:-1]])


def test_a_state_may_be_sized_by_the_grids_largest_magnitude():
    late = ja.Kind("late", "data", "observation", delay, 2.0, init=queue_for, sized=True)

    def step(x, key, taps):
        return x, {"performance": taps("observation", jnp.float32(taps.step))}

    learner = ja.Learner(lambda key: jnp.zeros(()), step)
    grid = ja.plan(learner, [late(ja.sweep(2.0, 3.0), onset=2, duration="end")], seeds=1, steps=9)
    assert [slot.max_magnitude for slot in grid.program.slots] == [3.0]
    values = ja.audit(learner, [late(3.0, onset=2, duration="end")], seeds=1, steps=9).telemetry["performance"].values
    np.testing.assert_array_equal(values[0, 1], [0, 1, 0, 0, 0, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="magnitude 4 of 'late' is above its grid's largest, 3"):
        lanes_of(grid.program, [0], [conditions([late(4.0, onset=2, duration="end")], 9)[0]])


def weights_learner():
    """A learner that never changes its 50 weights, and reports them in its telemetry."""

    def step(weights, key, taps):
        weights = taps("params", weights)
        return weights, {"performance": jnp.sum(weights), "weights": weights}

    channel = ja.Channel.vector("weight", map(str, range(50)))
    return ja.Learner(lambda key: jax.random.normal(key, (50,)), step, channels={"weights": channel})


def test_a_learner_may_store_keys_of_any_generator():
    def step(state, key, taps):
        samples = [jax.random.normal(jax.random.fold_in(stored_key, 1)) for stored_key in state]
        return state, {"performance": sum(samples) + taps("reward", 0.0)}

    learner = ja.Learner(lambda key: [jax.random.key(3, impl=name) for name in ("rbg", "threefry2x32")], step)
    values = ja.audit(learner, [ja.reward_scale(2.0, onset=2)], seeds=1, steps=4).telemetry["performance"].values
    assert (values == values[0, 0, 0]).all()


@pytest.mark.parametrize(
    ("execution", "disturbed"),
    [("vmap", True), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("vmap", False), (1, True)))],
)
def test_a_learner_may_have_arrays_of_size_zero(expected, execution, disturbed):
    """jaxlib 0.11 cannot compile such arrays for two devices, and `jax.lax.map` in batches refuses them."""
    constant = jnp.zeros(0)

    def init(key, data):
        empty = {"rows": jnp.zeros((0, 3)), "flags": jnp.zeros((2, 0), bool), "keys": jax.random.split(key, 2)[:0]}
        return LEARNER.init(key), empty | {"of_data": data["none"]}

    def step(state, key, taps):
        inner_state, telemetry = LEARNER.step(state[0], key, taps)
        rows = jax.lax.fori_loop(0, 2, lambda i, rows: rows + taps.data["some"], state[1]["rows"])
        empty_sum = rows.sum() + jnp.sum(constant * inner_state[0]["critic"]["bias"])
        return (inner_state, state[1] | {"rows": rows}), telemetry | {"empty_sum": empty_sum}

    data = {"some": np.ones(3, np.float32), "none": np.zeros((0, 4), np.int32)}
    learner = ja.Learner(init, step, name="with nothing", data=data, init_reads_data=True)
    perturbations = PERTURBATIONS if disturbed else []
    telemetry = ja.audit(learner, perturbations, seeds=3, steps=30, execution=execution).telemetry
    lanes = expected if disturbed else expected[:, :1]
    np.testing.assert_allclose(telemetry["performance"].values, lanes, rtol=1e-5)
    assert (telemetry["empty_sum"].values == 0).all()


def test_devices_can_create_arrays_of_size_zero_themselves(monkeypatch):
    """The workaround for XLA versions that cannot compile such arrays gives the same results."""

    constant = jnp.zeros((0, 3))

    def parts(data, lanes, rows):
        assert jax.tree.map(jnp.shape, (data, lanes, rows)) == ({"none": (0, 4)}, {"x": (2, 3), "none": (2, 0)}, (0, 2))
        turns = jax.lax.fori_loop(0, 3, lambda i, carry: jax.tree.map(lambda x: x + i, carry), lanes | {"row": rows})
        return turns["x"] + data["none"].sum() + jnp.sum(constant + lanes["x"][0]), turns["none"], turns["row"]

    specs, results = (sharding.REPLICATED, sharding.LANES, sharding.ROWS), (*[sharding.LANES] * 2, sharding.ROWS)
    lanes = {"x": np.arange(12, dtype=np.float32).reshape(4, 3), "none": np.zeros((4, 0), np.float32)}
    arguments = {"none": np.zeros((0, 4), np.float32)}, lanes, np.zeros((0, 4), np.int32)
    monkeypatch.setattr(sharding, "EMPTY_ARGUMENTS_CRASH", True)
    lowered = jax.jit(sharding.map_over_devices(tuple(jax.devices()), parts, specs, results)).lower(*arguments)
    assert lowered.as_text().count("sdy.manual_computation(%arg") == 1
    # The parameters of the mapped function.
    parameters = lowered.as_text().split("manual_axes")[1].split("{", 2)[1].split(")")[0]
    assert parameters.count("tensor<") == 1
    x, none, rows = lowered.compile()(*arguments)
    np.testing.assert_array_equal(x, lanes["x"] + 3)
    assert (none.shape, none.dtype, rows.shape, rows.dtype) == ((4, 0), np.float32, (0, 4), np.int32)


def test_a_skipped_loop_body_knows_the_runs_length():
    def step(state, key, taps):
        state, _ = taps.cond(taps.step > 1, lambda taps, x: (x + taps.step / taps.steps, x), state)
        return state, {"performance": taps("reward", state)}

    result = ja.audit(ja.Learner(lambda key: jnp.float32(0), step), [ja.reward_scale(2.0, onset=2)], seeds=1, steps=4)
    np.testing.assert_allclose(result.telemetry["performance"].values[0, 0], [0, 0, 0.5, 1.25])


def test_a_seed_gives_the_same_lane_in_any_list_of_seeds(expected):
    telemetry = ja.audit(LEARNER, PERTURBATIONS, seeds=[2, 40, 7], steps=30).telemetry
    assert list(telemetry["seed"].values) == [2, 40, 7]
    np.testing.assert_allclose(telemetry["performance"].values[0], expected[2], rtol=1e-5)


def test_the_onset_may_be_the_first_step():
    perturbations = [ja.weight_noise(1.0, onset=0), ja.lr_spike(3.0, onset=0)]
    values = ja.audit(LEARNER, perturbations, seeds=3, steps=30).telemetry["performance"].values
    assert np.isfinite(values).all()
    assert (values[:, 0] != values[:, 1]).all()


def test_the_result_has_metrics_per_lane_and_per_condition(result):
    assert result.metrics["collapse_time"].dims == ("seed", "condition")
    assert result.metrics["divergence_probability"].dims == ("condition",)
    assert {"x_inst", "x_gen", "baseline_performance"} <= set(result.telemetry)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be a positive whole number, not 0"),
        ({"steps": 2.5}, "steps must be a positive whole number"),
        ({"seeds": 0}, "seeds must be at least one"),
        ({"seeds": [1, 1]}, "all different"),
        ({"seeds": "eight"}, "seeds must be a positive whole number"),
        ({"seeds": 8.0}, "seeds must be a positive whole number"),
        ({"execution": "pmap"}, "execution must be 'auto', 'vmap', 'map' or a batch size"),
        ({"execution": 0}, "execution must be"),
        ({"perturbations": [ja.reward_noise()]}, "acts at site 'reward', which the learner does not tap"),
        ({"perturbations": [ja.weight_noise(target="actor")]}, "target 'actor' of 'weight_noise' is in none"),
        ({"perturbations": [ja.lr_spike(onset=95, duration=10)]}, "ends past the run's 100 steps"),
        ({"perturbations": [ja.lr_spike(onset=100)]}, "outside the run of 100 steps"),
        ({"perturbations": ja.lr_spike()}, r"must be a list, such as \[lr_spike(...)\], not a single perturbation"),
        ({"perturbations": [ja.lr_spike]}, "'lr_spike' is a kind of perturbation; call it: lr_spike()"),
    ],
)
def test_unfitting_arguments_are_refused_in_one_sentence(change, message):
    arguments = {"perturbations": PERTURBATIONS, "seeds": 2, "steps": 100} | change
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        ja.audit(LEARNER, arguments.pop("perturbations"), **arguments)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ja.lr_spike("fast"),
        lambda: ja.lr_spike(float("nan")),
        lambda: ja.lr_spike(-1.0),
        lambda: ja.sweep(),
        lambda: ja.lr_spike(onset=1.5),
        lambda: ja.lr_spike(onset=-1),
        lambda: ja.lr_spike(duration=0),
        lambda: ja.lr_spike(duration="forever"),
        lambda: ja.lr_spike(duration=5, period=3),
        lambda: ja.chain(),
        lambda: ja.quantize(64.0),
    ],
)
def test_invalid_perturbations_are_refused_at_creation(make):
    with pytest.raises(ValueError, match=r".+"):
        make()


@functools.cache
def steady(threshold, harm_is_up):
    """Performance is 1 until a tapped magnitude beyond a threshold sets it to 0 for ever."""

    def step(broken, key, taps):
        worst = taps("quality", jnp.float32(0.0))
        broken = broken | ((worst >= threshold) if harm_is_up else ((worst <= threshold) & (worst != 0)))
        noise = 0.01 * jax.random.normal(key)
        return broken, {"performance": jnp.where(broken, 0.0, 1.0) + noise}

    return ja.Learner(lambda key: jnp.bool_(False), step)


def override(neutral, *magnitudes, onset=60):
    """A perturbation that replaces the tapped value by its magnitude."""
    kind = ja.Kind("override", "data", "quality", stateless(replace_by_magnitude), neutral=neutral, limits=(0.0, 1e9))
    return kind(ja.sweep(*magnitudes), onset=onset, duration=1)


def replace_by_magnitude(key, value, magnitude):
    return magnitude


def run_steady_audit(learner, *perturbations):
    settings = MetricSettings(window=10, hold=10, horizon=10)
    return ja.audit(learner, perturbations, seeds=5, steps=100, settings=settings)


@pytest.mark.exhaustive
def test_the_critical_magnitude_is_searched_in_the_direction_of_harm():
    """The known threshold is 5, where larger or smaller magnitudes harm."""
    for harm_is_up, neutral in ((True, 0.0), (False, 64.0)):
        estimate = run_steady_audit(steady(5.0, harm_is_up), override(neutral, 2.0, 4.0, 8.0, 16.0)).critical_magnitude(
            "override"
        )
        assert estimate[:3] == pytest.approx((32**0.5, 4.0, 8.0))
    with pytest.raises(ValueError, match="the magnitudes lie on both sides of 64, which disturbs nothing"):
        run_steady_audit(steady(5.0, False), override(64.0, 2.0, 4.0, 8.0, 128.0)).critical_magnitude("override")


@pytest.mark.exhaustive
def test_the_critical_magnitude_is_of_one_onset_and_target():
    late = override(0.0, 1.0, 2.0, 8.0, 16.0, onset=80)
    result = run_steady_audit(steady(5.0, True), override(0.0, 2.0, 4.0, 8.0, 16.0), late)
    with pytest.raises(ValueError, match="'override' has several onsets, so onset must be one of them: 60, 80"):
        result.critical_magnitude("override")
    assert result.critical_magnitude("override", onset=80).value == pytest.approx(4.0)
    with pytest.raises(ValueError, match="no condition of 'override'"):
        result.critical_magnitude("override", onset=60, target="critic")


def test_medians_have_intervals_and_count_undefined_values():
    result = run_steady_audit(steady(5.0, True), override(0.0, 2.0, 4.0, 8.0, 16.0))
    row, lanes = result.summary.iloc[3], result.lanes.isel(condition=3)
    assert (row.never_left, row.never_back) == (0, 5)
    assert (row.recovery_time_median, row.recovery_time_median_low) == (np.inf, np.inf)
    assert row.recovery_rate_undefined == np.isnan(lanes["recovery_rate"]).sum() > 0
    intensity = np.sort(lanes["spike_intensity"].values)
    names = [f"spike_intensity_median{end}" for end in ("_low", "", "_high")]
    np.testing.assert_allclose([row[name] for name in names], intensity[[0, 2, 4]])
    row = run_steady_audit(steady(5.0, True), override(0.0, 2.0, 4.0, 8.0, 16.0, onset=1)).summary.iloc[3]
    assert np.isnan(row.recovery_rate_median)
    assert "recovery_rate_median: none of the 5 seeds has a value" in row.reason


def test_telemetry_without_performance_is_refused():
    learner = ja.Learner(lambda key: jnp.zeros(()), lambda x, key, taps: (taps("params", x), {"loss": x}))
    with pytest.raises(ValueError, match="no 'performance'; it has: loss"):
        ja.audit(learner, [ja.weight_noise()], seeds=1, steps=10)


def test_equal_learners_and_kinds_share_one_compiled_program():
    first = ja.plan(LEARNER, PERTURBATIONS, seeds=3, steps=30)
    second = ja.plan(LEARNER, [*PERTURBATIONS[1:], ja.lr_spike(ja.sweep(5.0, 7.0), onset=5)], seeds=3, steps=30)
    assert first.program == second.program
    assert ja.compiled(first.program) is ja.compiled(second.program)


def test_registered_metrics_are_measured_and_registered_tasks_made(monkeypatch):
    for entries in (registry.metrics, registry.tasks):  # reading the registry loads it, before it is replaced
        monkeypatch.setattr(entries, "_entries", {name: entries[name] for name in entries})

    @ja.register("metric", "largest_drop")
    def largest_drop(series, onset):
        """The largest fall of performance below its value at the onset."""
        after = jnp.arange(series.shape[0]) >= onset
        return series[onset] - jnp.min(jnp.where(after, series, series[onset]))

    result = ja.audit(LEARNER, PERTURBATIONS, seeds=3, steps=30)
    values = result.telemetry["performance"].values
    expected = values[:, 2, 5] - values[:, 2, 5:].min(axis=1)
    np.testing.assert_allclose(result.metrics["largest_drop"].values[:, 2], expected)
    ja.register("task", "mine")(lambda: "an environment")
    assert ja.tasks.make("mine") == "an environment"


@pytest.mark.exhaustive
def test_the_initial_state_is_made_once_a_seed(monkeypatch):
    """Forks at step 0 begin from the baseline's initial states, which are stored."""
    batch_sizes = []
    initial = Engine.initial

    def counted_initial(self, batch):
        batch_sizes.append(len(batch.seeds))
        return initial(self, batch)

    monkeypatch.setattr(Engine, "initial", counted_initial)
    spikes = ja.lr_spike(ja.sweep(2.0, 3.0), onset=0, duration=5)
    telemetry = ja.audit(
        NETWORK, [spikes, ja.lr_spike(1.0, onset=0), ja.lr_spike(2.0, onset=4)], seeds=3, steps=30
    ).telemetry
    assert batch_sizes == [3]
    values = telemetry["performance"].values
    np.testing.assert_array_equal(values[:, 3], values[:, 0])
    np.testing.assert_allclose(values[:, 0], telemetry["baseline_performance"].values, rtol=1e-4)
    assert (values[:, 1] != values[:, 0]).any()


@pytest.mark.exhaustive
def test_init_is_traced_once_for_shapes_and_once_to_run():
    """An `init` that trains, as a warm start does, takes long to trace."""
    traces = []

    def init(key):
        traces.append(key)
        return jax.random.normal(key, (3,))

    def step(x, key, taps):
        x = taps("params", x)
        return x, {"performance": -jnp.sum(x**2)}

    noise = ja.weight_noise(ja.sweep(0.1, 0.2), onset=2)
    ja.audit(ja.Learner(init, step), [noise, ja.weight_noise(0.3, onset=3)], seeds=2, steps=5)
    assert len(traces) == 2


def test_one_trace_of_a_step_gives_sites_and_telemetry_shapes():
    """Tracing a step of a dialogue's learner takes a second."""
    traces = []

    def step(x, key, taps):
        traces.append(key)
        x = taps("params", x)
        return x, {"performance": -jnp.sum(x**2)}

    learner = ja.Learner(lambda key: jax.random.normal(key, (3,)), step)
    noise = ja.weight_noise(0.1, onset=2)
    assert misfits(learner, [noise], 5) == [None]
    telemetry_shapes(ja.plan(learner, [noise], seeds=2, steps=5).program)
    assert len(traces) == 1


def test_sites_depend_on_the_runs_length():
    def step(x, key, taps):
        x = taps("params", x) if taps.steps > 5 else x
        return x, {"performance": -jnp.sum(x**2)}

    learner = ja.Learner(lambda key: jax.random.normal(key, (3,)), step)
    assert ["params" in find_sites(learner, steps) for steps in (5, 6, 5)] == [False, True, False]


def test_the_oldest_cached_trace_is_dropped(monkeypatch):
    monkeypatch.setattr(sites, "_MAX_TRACES", 2)
    monkeypatch.setattr(sites, "_TRACES", {})
    traces = []

    def step(x, key, taps):
        traces.append(taps.steps)
        return x, {"performance": -jnp.sum(x**2)}

    learner = ja.Learner(lambda key: jax.random.normal(key, (3,)), step)
    for steps in (5, 6, 7, 6, 7, 5):
        find_sites(learner, steps)
    assert traces == [5, 6, 7, 5]
