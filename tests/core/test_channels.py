"""Channels with several dimensions, of whole numbers, with a cadence: in memory, in a run's folder, for a monitor."""

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
    told = {"performance": noise, "share": noise * jnp.arange(6.0).reshape(3, 2), "count": count, "tries": count[0] % 7}
    return state + 1, told | {"plain": jnp.zeros((2, 2)), "words": count[:2]}


LEARNER = ja.Learner(lambda key: jnp.int32(70_000), step, channels=CHANNELS)


@pytest.fixture(scope="module")
def audited():
    return ja.audit(LEARNER, [ja.reward_scale(2.0, onset=4)], seeds=2, steps=10).telemetry


def test_an_audit_keeps_them_as_they_are_declared(audited):
    lanes = ("seed", "condition", "step")
    assert audited["share"].dims == (*lanes, "layer", "head")
    assert audited["count"].dims == (*lanes, "layer")
    assert audited["plain"].dims == (*lanes, "plain_0", "plain_1")
    assert list(audited["layer"].values) == ["a", "b", "c"]
    assert {name: str(audited[name].dtype) for name in CHANNELS} == {
        "performance": "float32",
        "share": "float32",
        "count": "int32",
        "tries": "uint8",
        "words": "int32",
    }
    np.testing.assert_array_equal(audited["count"].sel(layer="c")[1, 1], 70_002 + np.arange(10))
    np.testing.assert_allclose(audited["share"].sel(layer="b", head="1"), 3 * audited["performance"], rtol=1e-6)
    assert audited.attrs["performance_every"] == LEARNER.cadence.every == 5
    assert [audited[name].attrs for name in ("tries", "count", "words")] == [{"every": 2}, {}, {"monitored": 0}]


@pytest.mark.exhaustive
def test_a_runs_folder_keeps_them_too(audited, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.learners._entries, "told", lambda task: LEARNER)
    spec = spec_header(seeds=2, steps=10, learner='kind = "told"') + (
        '[run]\nchunk = 3\n[[perturbation]]\nkind = "reward_scale"\nmagnitude = 2.0\nonset = 4'
    )
    durable.run(parse(spec), tmp_path / "run")
    run = load_run(tmp_path / "run")
    stored = run.telemetry
    for name in (*CHANNELS, "plain"):
        assert stored[name].dtype == audited[name].dtype
        assert stored[name].dims == audited[name].dims
        assert stored[name].attrs == audited[name].attrs
        np.testing.assert_array_equal(stored[name], audited[name])
    assert list(stored["head"].values) == ["0", "1"]
    np.testing.assert_array_equal(run.channel("performance"), stored["performance"])
    np.testing.assert_array_equal(run.channel("share[b, 1]"), stored["share"].sel(layer="b", head="1"))
    np.testing.assert_array_equal(run.channel("plain[0, 1]"), stored["plain"][..., 0, 1])
    for name in ("share", "share[b]", "share[b, 2]", "performance[b]", "baseline_performance", "other"):
        assert run.channel(name) is None


def test_a_monitor_finds_their_entries_by_the_names_it_was_fitted_to(audited):
    program = ja.plan(LEARNER, [], seeds=1, steps=10).program
    inside = [
        entry for name, shape in telemetry_shapes(program).items() for entry in channel_names(name, shape, CHANNELS)
    ]
    assert "share[b, 1]" in inside
    read = {str(name) for name in stack_channels(audited.drop_vars("baseline_performance")).channel.values}
    assert set(inside) - read == {"words[0]", "words[1]"}, "what no monitor reads unless told to"
    assert read < set(inside)
    assert list(stack_channels(audited, ["words"]).channel.values) == ["words[0]", "words[1]"]


@pytest.mark.parametrize(("dtype", "missing"), [("int8", -128), ("int32", -(2**31)), ("uint32", 2**32 - 1)])
def test_whole_numbers_that_were_not_measured_are_the_farthest_there_is(dtype, missing):
    kept = ja.Channel(dtype=dtype).kept(np.array([3.0, np.nan], np.float32))
    assert (kept.dtype, kept.tolist()) == (np.dtype(dtype), [3, missing])


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
def test_channels_that_make_no_sense(channels, sentence):
    with pytest.raises(ValueError, match=sentence):
        ja.Learner(LEARNER.init, step, channels=channels())


def test_labels_that_do_not_fit_are_told():
    learner = ja.Learner(LEARNER.init, step, channels={"count": ja.Channel.vector("layer", "ab")})
    with pytest.raises(ValueError, match=r"channel 'count' has shape \(3,\), and the labels of its dimensions \(2,\)"):
        ja.audit(learner, [], seeds=1, steps=2)


@pytest.mark.parametrize("name", ["count", "seed"])
def test_a_dimension_with_a_name_that_is_taken_is_told(name):
    learner = ja.Learner(LEARNER.init, step, channels={"count": ja.Channel.vector(name, "abc")})
    with pytest.raises(ValueError, match=f"a dimension of the learner's telemetry is called '{name}'"):
        ja.audit(learner, [], seeds=1, steps=2)
