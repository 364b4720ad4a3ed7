"""Runs of logs on the steps of clean ones: what is compared, where, and what is certain without a score."""

import numpy as np
import pytest
from log_files import made, refusal

from jaxaudit.logs import Attempt, Series
from jaxaudit.monitoring import alignment
from jaxaudit.monitoring.alignment import NamedAttempt


def run(name="a", **channels):
    """Of channels given as (steps, values)."""
    series = {
        name: Series(np.asarray(steps, np.int64), np.broadcast_to(np.asarray(values, float), np.shape(steps)))
        for name, (steps, values) in channels.items()
    }
    return NamedAttempt(name, Attempt(int(min(one.steps[0] for one in series.values())), series))


def noise(seed, count=50):
    return np.random.default_rng(seed).normal(size=count)


def test_channels_that_tell_how_a_run_goes():
    t = np.arange(50)
    clean = [
        made(f"{i}", t, loss=noise(i), seed=i, rate=1 / (1 + t), seconds=t * (1.1 + i), pid=7 + i) for i in range(3)
    ]
    channels, notes = alignment.select_channels(clean, None)
    assert channels == ["loss"]
    assert [note.partition(";")[0] for note in notes] == [
        "left out, the same at every step of each run: seed, pid",
        "left out, rising at every step like a clock or counter: seconds",
        "left out, the same function of the step in all runs, like a schedule: rate",
    ]
    assert alignment.select_channels(clean, ["rate", "loss", "rate"]) == (["rate", "loss"], [])
    assert "0 has no channel 'los' (did you mean 'loss'?)" in refusal(alignment.select_channels, clean, ["los"])


def test_what_rises_is_a_clock_by_its_name_or_where_all_runs_agree():
    """A reward, or a distance from a reference, that rises in every clean run is telemetry."""
    t = np.arange(1, 9)
    clean = [
        made(
            str(i),
            t,
            **{"kl": t * (1 + 0.2 * i), "eval/reward": t + noise(i, 8) / 9, "num_tokens": t * (90 + 20 * i)},
            n=t,
        )
        for i in range(3)
    ]
    channels, notes = alignment.select_channels(clean, None)
    assert channels == ["kl", "eval/reward"]
    assert notes[0].startswith("left out, rising at every step like a clock or counter: num_tokens, n;")


def test_how_fast_a_machine_is_is_not_read():
    speeds = [
        "time/fps",
        "charts/SPS",
        "mfu",
        "tokens_per_sec",
        "tok/sec",
        "train_steps_per_second",
        "step_time",
        "it/s",
    ]
    speeds += ["timing_s/gen", "eval_runtime", "throughput", "time per iteration", "iteration_time"]
    learning = ["loss", "time_penalty_reward", "steps_per_episode", "eval/return", "step_size", "rewards/s"]
    clean = [
        made(str(i), range(9), **{name: noise(7 * i + k, 9) for k, name in enumerate(speeds + learning)})
        for i in range(3)
    ]
    channels, notes = alignment.select_channels(clean, None)
    assert channels == learning
    assert [note.partition(":")[0] for note in notes] == ["left out, measuring the speed of the machine"]
    assert alignment.select_channels(clean, ["mfu"]) == (["mfu"], [])


def test_channels_of_some_clean_runs_alone_are_noted():
    clean = [made("a", range(9), loss=noise(0, 9), kl=noise(1, 9)), made("b", range(9), loss=noise(2, 9))]
    assert alignment.select_channels(clean, None) == (["loss"], ["not read, not in all clean runs: kl"])
    assert refusal(alignment.select_channels, [made("a", range(9), x=1), made("b", range(9), y=1)], None) == (
        "no channel is in all clean runs: a has x; b has y"
    )


def test_what_is_one_number_in_all_clean_runs_and_another_in_a_new_one_is_noted():
    clean = [made(str(i), range(9), loss=noise(i, 9), failures=0, seed=i) for i in range(3)]
    new = [made("new", range(9), loss=noise(5, 9), failures=[0, 0, 0, 2, 2, 0, 0, 0, 0], seed=7), clean[0]]
    assert alignment.changed_constants(new, clean) == ["new: failures is 2 at step 3, and 0 in every clean run"]


def test_a_clean_run_that_was_cut_short_is_left_out():
    clean = [made(name, range(count), loss=1) for name, count in (("a", 100), ("b", 101), ("c", 60))]
    kept, notes = alignment.drop_short_runs(clean)
    assert [one.name for one in kept] == ["a", "b"]
    assert notes == ["c: left out, shorter than 90% of the clean runs' median length"]


def test_the_grid_is_what_clean_runs_have_in_common():
    """Training every 50 steps, validation at the ends of epochs of 287."""
    train, val = np.arange(49, 1400, 50), np.arange(286, 1400, 287)
    clean = [run(str(i), loss=(train, noise(i, len(train))), val=(val, i)) for i in range(4)]
    grid = alignment.common_grid(clean, ["loss", "val"])
    np.testing.assert_array_equal(grid.steps, np.union1d(train, val))
    values = grid.average(clean[2].series("val"))
    np.testing.assert_array_equal(grid.steps[np.isfinite(values)], val)
    assert values[-1] != values[-1] or grid.steps[-1] in val
    np.testing.assert_array_equal(
        grid.average(clean[1].series("loss"))[np.isin(grid.steps, train)], clean[1].series("loss").values
    )


def test_runs_of_steps_of_their_own_are_compared_in_spans():
    clean = [run(str(i), ret=(np.cumsum(np.random.default_rng(i).integers(50, 150, 40)), i)) for i in range(5)]
    grid = alignment.common_grid(clean, ["ret"])
    assert len(grid.steps) == 40
    assert np.ptp(np.diff(grid.edges)) <= 1
    for one in clean:
        assert np.isfinite(grid.average(one.series("ret"))).mean() > 0.5
        assert set(grid.average(one.series("ret"))[np.isfinite(grid.average(one.series("ret")))]) == {float(one.name)}


def test_long_runs_are_averaged():
    clean = [made(str(i), range(2500), x=np.arange(2500) % 3) for i in range(2)]
    grid = alignment.common_grid(clean, ["x"])
    assert (len(grid.steps), grid.steps[0], grid.steps[-1]) == (834, 2, 2499)
    np.testing.assert_allclose(grid.average(clean[0].series("x"))[:-1], 1)


def test_a_value_that_is_not_finite_is_told_by_its_step_and_channels():
    loss, norm = np.ones(20), np.ones(20)
    loss[[12, 13]], norm[12], norm[15] = np.nan, np.inf, np.nan
    one = made("a", range(0, 200, 10), loss=loss, norm=norm)
    assert alignment.first_non_finite(one, ["loss", "norm"], {}) == (120, {"loss": "NaN", "norm": "infinite"})
    known = alignment.tolerated_non_finite([made("b", range(3), norm=[1, np.inf, 1], loss=1)], ["loss", "norm"])
    assert known == {"norm": frozenset({"infinite"})}
    assert alignment.first_non_finite(one, ["loss", "norm"], known) == (120, {"loss": "NaN"})
    assert alignment.first_non_finite(one, ["norm"], known) == (150, {"norm": "NaN"})
    assert alignment.first_non_finite(one, [], {}) is None


def test_a_text_in_place_of_numbers_is_not_finite():
    texts = {"loss": Series(np.array([3, 4]), np.full(2, np.nan))}
    one = NamedAttempt("a", Attempt(0, {"x": Series(np.arange(5), np.ones(5))}, texts))
    assert alignment.first_non_finite(one, ["loss", "x"], {}) == (3, {"loss": "NaN"})


def test_a_channel_that_falls_silent_while_others_go_on():
    steps, val = np.arange(0, 100), np.arange(9, 100, 10)
    clean = [run(str(i), loss=(steps, 1), val=(val, 1)) for i in range(3)]
    longest = alignment.longest_silences(clean, ["loss", "val"])
    assert longest == {"loss": 1, "val": 10}
    assert alignment.first_silence(run(loss=(steps, 1), val=(val, 1)), longest, ["loss", "val"]) is None
    silent = run(loss=(steps, 1), val=(val[:4], 1))
    assert alignment.first_silence(silent, longest, ["loss", "val"]) == (70, ["val"])
    missing = run(loss=(np.delete(steps, slice(40, 60)), 1), val=(val[(val < 40) | (val >= 60)], 1))
    assert alignment.first_silence(missing, longest, ["loss", "val"]) is None, "nothing goes on in a gap"
    assert alignment.first_silence(run(loss=(steps, 1), val=(val[::2], 1)), longest, ["loss", "val"]) is None, "seldom"
    assert alignment.first_silence(run(loss=(steps[:30], 1), val=(val[:2], 1)), longest, ["loss", "val"]) is None, (
        "not due"
    )


@pytest.mark.parametrize(
    ("steps", "how"),
    [
        (range(0, 100, 10), None),
        (range(0, 50, 10), None),
        (range(0, 100, 20), [0, 20, 40, 60, 80]),
        (range(5, 100, 10), "at other steps (5, 15, ...) than in the clean runs (0, 10, ...)"),
    ],
)
def test_how_a_new_run_logs_a_channel(steps, how):
    clean = [made(str(i), range(0, 100, 10), x=1) for i in range(3)]
    found = alignment.ChannelCadence.of_runs(clean, "x").compare(made("new", steps, x=1).series("x"))
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == how


def test_a_channel_of_steps_of_their_own_at_another_density_is_not_compared():
    clean = [run(str(i), x=(np.cumsum(np.random.default_rng(i).integers(8, 13, 50)), 1)) for i in range(3)]
    new = [run("new", x=(np.cumsum(np.random.default_rng(9).integers(8, 13, 50) * k), 1)) for k in (1, 4)]
    assert alignment.ChannelCadence.of_runs(clean, "x").compare(new[0].series("x")) is None
    assert alignment.ChannelCadence.of_runs(clean, "x").compare(new[1].series("x")).startswith("every 4")
