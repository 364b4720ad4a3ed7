"""Alignment of logged runs with clean ones: selected channels, the common grid of steps, and alarms without a score.

Non-finite values and channels that fall silent raise alarms without any score.
"""

import numpy as np
import pytest
from log_files import make_attempt, user_error

from jaxaudit.logs import Attempt, Series
from jaxaudit.monitoring import alignment
from jaxaudit.monitoring.alignment import NamedAttempt


def run(name="a", **channels):
    """A run whose channels are (steps, values)."""
    series = {
        name: Series(np.asarray(steps, np.int64), np.broadcast_to(np.asarray(values, float), np.shape(steps)))
        for name, (steps, values) in channels.items()
    }
    return NamedAttempt(name, Attempt(int(min(channel.steps[0] for channel in series.values())), series))


def noise(seed, count=50):
    return np.random.default_rng(seed).normal(size=count)


def test_constants_clocks_and_schedules_are_left_out():
    steps = np.arange(50)
    clean = [
        make_attempt(f"{i}", steps, loss=noise(i), seed=i, rate=1 / (1 + steps), seconds=steps * (1.1 + i), pid=7 + i)
        for i in range(3)
    ]
    channels, notes = alignment.select_channels(clean, None)
    assert channels == ["loss"]
    assert [note.partition(";")[0] for note in notes] == [
        "left out, the same at every step of each run: seed, pid",
        "left out, rising at every step like a clock or counter: seconds",
        "left out, the same function of the step in all clean runs, like a schedule: rate",
    ]
    note = f"{alignment.SCHEDULE}, so that only missing and non-finite values raise an alarm: rate"
    assert alignment.select_channels(clean, ["rate", "loss", "rate", "seed"]) == (["rate", "loss", "seed"], [note])
    assert "0 has no channel 'los' (did you mean 'loss'?)" in user_error(alignment.select_channels, clean, ["los"])


def test_rising_channels_are_clocks_by_name_or_if_equal_in_all_runs():
    """A reward, or a distance from a reference, is telemetry even if it rises in every clean run."""
    t = np.arange(1, 9)
    clean = [
        make_attempt(
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


def test_channels_of_machine_speed_are_left_out():
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
        make_attempt(str(i), range(9), **{name: noise(7 * i + k, 9) for k, name in enumerate(speeds + learning)})
        for i in range(3)
    ]
    channels, notes = alignment.select_channels(clean, None)
    assert channels == learning
    assert [note.partition(":")[0] for note in notes] == ["left out, measuring the speed of the machine"]
    assert alignment.select_channels(clean, ["mfu"]) == (["mfu"], [])


def test_channels_missing_in_some_clean_runs_are_noted():
    clean = [
        make_attempt("a", range(9), loss=noise(0, 9), kl=noise(1, 9)),
        make_attempt("b", range(9), loss=noise(2, 9)),
    ]
    assert alignment.select_channels(clean, None) == (["loss"], ["not read, not in all clean runs: kl"])
    assert user_error(
        alignment.select_channels, [make_attempt("a", range(9), x=1), make_attempt("b", range(9), y=1)], None
    ) == ("no channel is in all clean runs: a has x; b has y")


def test_changes_of_channels_constant_in_clean_runs_are_noted():
    clean = [make_attempt(str(i), range(9), loss=noise(i, 9), failures=0, seed=i) for i in range(3)]
    new = [make_attempt("new", range(9), loss=noise(5, 9), failures=[0, 0, 0, 2, 2, 0, 0, 0, 0], seed=7), clean[0]]
    assert alignment.changed_schedules(new, clean) == ["new: failures is 2 at step 3, and 0 in every clean run"]


def test_changes_of_a_schedule_are_noted():
    steps = np.arange(20)
    clean = [make_attempt(str(i), steps, loss=noise(i, 20), rate=1 / (1 + steps), own=noise(i, 20)) for i in range(3)]
    spike = 1 / (1 + steps) * np.where((steps >= 7) & (steps < 9), 10, 1)
    rounded = np.float32(1 / (1 + steps)).astype(float)
    new = [
        make_attempt("spike", steps, loss=noise(5, 20), rate=spike, own=noise(6, 20)),
        make_attempt("rounded", steps, loss=noise(5, 20), rate=rounded, own=noise(6, 20)),
        make_attempt("longer", np.arange(30), rate=np.r_[1 / (1 + steps), np.full(9, 5.0), np.nan]),
        make_attempt("lost", steps, rate=np.where(steps == 4, np.nan, 1 / (1 + steps))),
    ]
    assert alignment.changed_schedules(new, clean) == [
        "spike: rate is 1.25 at step 7, and 0.125 at this step in every clean run",
        "lost: rate is nan at step 4, and 0.2 at this step in every clean run",
    ]


def test_short_clean_runs_are_left_out():
    clean = [make_attempt(name, range(count), loss=1) for name, count in (("a", 100), ("b", 101), ("c", 60))]
    kept, notes = alignment.drop_short_runs(clean)
    assert [run.name for run in kept] == ["a", "b"]
    assert notes == ["c: left out, shorter than 90% of the clean runs' median length"]


def test_the_grid_has_the_steps_that_clean_runs_share():
    """Training metrics are logged every 50 steps, and validation at the ends of epochs of 287 steps."""
    train, validation = np.arange(49, 1400, 50), np.arange(286, 1400, 287)
    clean = [run(str(i), loss=(train, noise(i, len(train))), val=(validation, i)) for i in range(4)]
    grid = alignment.common_grid(clean, ["loss", "val"])
    np.testing.assert_array_equal(grid.steps, np.union1d(train, validation))
    values = grid.average(clean[2].series("val"))
    np.testing.assert_array_equal(grid.steps[np.isfinite(values)], validation)
    assert values[-1] != values[-1] or grid.steps[-1] in validation
    np.testing.assert_array_equal(
        grid.average(clean[1].series("loss"))[np.isin(grid.steps, train)], clean[1].series("loss").values
    )


def test_runs_with_irregular_steps_are_averaged_over_spans():
    clean = [run(str(i), ret=(np.cumsum(np.random.default_rng(i).integers(50, 150, 40)), i)) for i in range(5)]
    grid = alignment.common_grid(clean, ["ret"])
    assert len(grid.steps) == 40
    assert np.ptp(np.diff(grid.edges)) <= 1
    for clean_run in clean:
        assert np.isfinite(grid.average(clean_run.series("ret"))).mean() > 0.5
        assert set(grid.average(clean_run.series("ret"))[np.isfinite(grid.average(clean_run.series("ret")))]) == {
            float(clean_run.name)
        }


def test_long_runs_are_averaged_over_spans():
    clean = [make_attempt(str(i), range(2500), x=np.arange(2500) % 3) for i in range(2)]
    grid = alignment.common_grid(clean, ["x"])
    assert (len(grid.steps), grid.steps[0], grid.steps[-1]) == (834, 2, 2499)
    np.testing.assert_allclose(grid.average(clean[0].series("x"))[:-1], 1)


def test_the_first_non_finite_value_has_its_step_and_channels():
    loss, norm = np.ones(20), np.ones(20)
    loss[[12, 13]], norm[12], norm[15] = np.nan, np.inf, np.nan
    run = make_attempt("a", range(0, 200, 10), loss=loss, norm=norm)
    assert alignment.first_non_finite(run, ["loss", "norm"], {}) == (120, {"loss": "NaN", "norm": "infinite"})
    tolerated = alignment.tolerated_non_finite(
        [make_attempt("b", range(3), norm=[1, np.inf, 1], loss=1)], ["loss", "norm"]
    )
    assert tolerated == {"norm": frozenset({"infinite"})}
    assert alignment.first_non_finite(run, ["loss", "norm"], tolerated) == (120, {"loss": "NaN"})
    assert alignment.first_non_finite(run, ["norm"], tolerated) == (150, {"norm": "NaN"})
    assert alignment.first_non_finite(run, [], {}) is None


def test_text_in_place_of_a_number_is_non_finite():
    texts = {"loss": Series(np.array([3, 4]), np.full(2, np.nan))}
    run = NamedAttempt("a", Attempt(0, {"x": Series(np.arange(5), np.ones(5))}, texts))
    assert alignment.first_non_finite(run, ["loss", "x"], {}) == (3, {"loss": "NaN"})


def test_a_channel_is_silent_if_only_others_continue():
    steps, validation_steps = np.arange(0, 100), np.arange(9, 100, 10)
    clean = [run(str(i), loss=(steps, 1), val=(validation_steps, 1)) for i in range(3)]
    longest = alignment.longest_silences(clean, ["loss", "val"])
    assert longest == {"loss": 1, "val": 10}
    assert alignment.first_silence(run(loss=(steps, 1), val=(validation_steps, 1)), longest, ["loss", "val"]) is None
    silent = run(loss=(steps, 1), val=(validation_steps[:4], 1))
    assert alignment.first_silence(silent, longest, ["loss", "val"]) == (70, ["val"])
    with_gap = run(
        loss=(np.delete(steps, slice(40, 60)), 1),
        val=(validation_steps[(validation_steps < 40) | (validation_steps >= 60)], 1),
    )
    assert alignment.first_silence(with_gap, longest, ["loss", "val"]) is None, "all channels are silent in a gap"
    assert (
        alignment.first_silence(run(loss=(steps, 1), val=(validation_steps[::2], 1)), longest, ["loss", "val"]) is None
    ), "the channel is logged half as often"
    assert (
        alignment.first_silence(run(loss=(steps[:30], 1), val=(validation_steps[:2], 1)), longest, ["loss", "val"])
        is None
    ), "the run ended before the channel was due"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (range(0, 100, 10), None),
        (range(0, 50, 10), None),
        (range(0, 100, 20), [0, 20, 40, 60, 80]),
        (range(5, 100, 10), "at other steps (5, 15, ...) than in the clean runs (0, 10, ...)"),
    ],
)
def test_the_cadence_of_a_new_run_is_compared_with_clean_runs(steps, expected):
    clean = [make_attempt(str(i), range(0, 100, 10), x=1) for i in range(3)]
    result = alignment.ChannelCadence.of_runs(clean, "x").compare(make_attempt("new", steps, x=1).series("x"))
    assert (result.tolist() if isinstance(result, np.ndarray) else result) == expected


def test_irregular_channels_of_another_density_are_not_compared():
    clean = [run(str(i), x=(np.cumsum(np.random.default_rng(i).integers(8, 13, 50)), 1)) for i in range(3)]
    new = [run("new", x=(np.cumsum(np.random.default_rng(9).integers(8, 13, 50) * k), 1)) for k in (1, 4)]
    assert alignment.ChannelCadence.of_runs(clean, "x").compare(new[0].series("x")) is None
    assert alignment.ChannelCadence.of_runs(clean, "x").compare(new[1].series("x")).startswith("every 4")
