"""Channels with several dimensions, of integers, or with a cadence: in memory, in a run's folder, and in a monitor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import spec_header

import jaxaudit as ja
from jaxaudit.analysis.run_reader import load as load_run
from jaxaudit.core.program import telemetry_shapes
from jaxaudit.monitoring.telemetry import stack_channels
from jaxaudit.monitoring.watch import channel_names
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runtime import registry
from jaxaudit.spec.document import parse

CHANNELS = {
    "performance": ja.Channel(every=5),
    "share": ja.Channel((("layer", ("a", "b", "c")), ("head", ("0", "1")))),
    "count": ja.Channel.vector("layer", "abc", dtype="int32"),
    "tries": ja.Channel(dtype="uint8", every=2),
    "words": ja.Channel((("slot", ("0", "1")),), dtype="int32", monitored=False),
}


def step(state, key, taps):
    noise = taps("reward", jax.random.normal(key))
    count = state + jnp.arange(3)
    telemetry = {
        "performance": noise,
        "share": noise * jnp.arange(6.0).reshape(3, 2),
        "count": count,
        "tries": count[0] % 7,
    }
    return state + 1, telemetry | {"plain": jnp.zeros((2, 2)), "words": count[:2]}


LEARNER = ja.Learner(lambda key: jnp.int32(70_000), step, channels=CHANNELS)


@pytest.fixture(scope="module")
def telemetry():
    return ja.audit(LEARNER, [ja.reward_scale(2.0, onset=4)], seeds=2, steps=10).telemetry


def test_an_audit_stores_channels_as_declared(telemetry):
    lanes = ("seed", "condition", "step")
    assert telemetry["share"].dims == (*lanes, "layer", "head")
    assert telemetry["count"].dims == (*lanes, "layer")
    assert telemetry["plain"].dims == (*lanes, "plain_0", "plain_1")
    assert list(telemetry["layer"].values) == ["a", "b", "c"]
    assert {name: str(telemetry[name].dtype) for name in CHANNELS} == {
        "performance": "float32",
        "share": "float32",
        "count": "int32",
        "tries": "uint8",
        "words": "int32",
    }
    np.testing.assert_array_equal(telemetry["count"].sel(layer="c")[1, 1], 70_002 + np.arange(10))
    np.testing.assert_allclose(telemetry["share"].sel(layer="b", head="1"), 3 * telemetry["performance"], rtol=1e-6)
    assert telemetry.attrs["performance_every"] == LEARNER.cadence.every == 5
    assert [telemetry[name].attrs for name in ("tries", "count", "words")] == [{"every": 2}, {}, {"monitored": 0}]


@pytest.mark.exhaustive
def test_a_runs_folder_stores_channels_as_declared(telemetry, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.learners._entries, "with_channels", lambda task: LEARNER)
    spec = spec_header(seeds=2, steps=10, learner='kind = "with_channels"') + (
        '[run]\nchunk = 3\n[[perturbation]]\nkind = "reward_scale"\nmagnitude = 2.0\nonset = 4'
    )
    durable.run(parse(spec), tmp_path / "run")
    run = load_run(tmp_path / "run")
    stored = run.telemetry
    for name in (*CHANNELS, "plain"):
        assert stored[name].dtype == telemetry[name].dtype
        assert stored[name].dims == telemetry[name].dims
        assert stored[name].attrs == telemetry[name].attrs
        np.testing.assert_array_equal(stored[name], telemetry[name])
    assert list(stored["head"].values) == ["0", "1"]
    np.testing.assert_array_equal(run.channel("performance"), stored["performance"])
    np.testing.assert_array_equal(run.channel("share[b, 1]"), stored["share"].sel(layer="b", head="1"))
    np.testing.assert_array_equal(run.channel("plain[0, 1]"), stored["plain"][..., 0, 1])
    for name in ("share", "share[b]", "share[b, 2]", "performance[b]", "baseline_performance", "other"):
        assert run.channel(name) is None


def test_a_monitor_has_the_same_entry_names_at_fit_and_in_training(telemetry):
    program = ja.plan(LEARNER, [], seeds=1, steps=10).program
    program_entries = [
        entry for name, shape in telemetry_shapes(program).items() for entry in channel_names(name, shape, CHANNELS)
    ]
    assert "share[b, 1]" in program_entries
    stored_entries = {str(name) for name in stack_channels(telemetry.drop_vars("baseline_performance")).channel.values}
    assert set(program_entries) - stored_entries == {"words[0]", "words[1]"}, (
        "unmonitored channels that a monitor reads only on request"
    )
    assert stored_entries < set(program_entries)
    assert list(stack_channels(telemetry, ["words"]).channel.values) == ["words[0]", "words[1]"]


@pytest.mark.parametrize(("dtype", "missing"), [("int8", -128), ("int32", -(2**31)), ("uint32", 2**32 - 1)])
def test_missing_integers_are_stored_as_the_most_extreme_value(dtype, missing):
    stored = ja.Channel(dtype=dtype).kept(np.array([3.0, np.nan], np.float32))
    assert (stored.dtype, stored.tolist()) == (np.dtype(dtype), [3, missing])


@pytest.mark.parametrize(
    ("channels", "sentence"),
    [
        (lambda: {"a": ja.Channel(dtype="complex64")}, "dtype must be one of float32, .*, not 'complex64'"),
        (lambda: {"performance": ja.Channel(every=0)}, "every must be a whole number of steps, at least 1, not 0"),
        (lambda: {"performance": ja.Channel(every=True)}, "every must be a whole number of steps"),
        (
            lambda: {"a": ja.Channel.vector("layer", "ab"), "b": ja.Channel.vector("layer", "abc")},
            "the dimension 'layer' has other labels in one channel than in another",
        ),
    ],
)
def test_invalid_channels_are_refused(channels, sentence):
    with pytest.raises(ValueError, match=sentence):
        ja.Learner(LEARNER.init, step, channels=channels())


def test_labels_that_do_not_fit_are_refused():
    learner = ja.Learner(LEARNER.init, step, channels={"count": ja.Channel.vector("layer", "ab")})
    with pytest.raises(ValueError, match=r"channel 'count' has shape \(3,\), and the labels of its dimensions \(2,\)"):
        ja.audit(learner, [], seeds=1, steps=2)


@pytest.mark.parametrize("name", ["count", "seed"])
def test_a_dimension_with_a_reserved_name_is_refused(name):
    learner = ja.Learner(LEARNER.init, step, channels={"count": ja.Channel.vector(name, "abc")})
    with pytest.raises(ValueError, match=f"a dimension of the learner's telemetry is called '{name}'"):
        ja.audit(learner, [], seeds=1, steps=2)
