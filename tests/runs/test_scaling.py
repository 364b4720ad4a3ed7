"""The simulated schedule against closed forms, the driver's rules, and real runs; and the files for clusters."""

import itertools
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import yaml
from directories import ROOT

import jaxaudit as ja
from jaxaudit.cli import main as cli
from jaxaudit.cli.arguments import parser
from jaxaudit.core.batches import layout
from jaxaudit.core.grid import plan
from jaxaudit.execution import driver
from jaxaudit.models import gpt2
from jaxaudit.runs import attempts, workers
from jaxaudit.runs import disk_sink as trained
from jaxaudit.runtime import backends

ROOT = ROOT
SCALING = ROOT / "experiments" / "scaling"
DEPLOY = SCALING / "deploy"
sys.path.append(str(SCALING))

import engine  # noqa: E402
import gpt2_lanes  # noqa: E402
import measure  # noqa: E402
import recorded  # noqa: E402
import simulate as simulator  # noqa: E402
from schedule import Cluster, Shard, Work, bounds  # noqa: E402
from simulate import simulate  # noqa: E402


def baseline(number=0, stop=100, seeds=(0,), seconds=1.0, **settings):
    return Shard(number, 0, stop, None, frozenset(seeds), seconds, **settings)


def fork(number, onset=40, stop=100, seeds=(0,), seconds=1.0, group=0, **settings):
    return Shard(number, onset, stop, group, frozenset(seeds), seconds, **settings)


def equal_batches(count, **settings):
    return Work(tuple(baseline(number, seeds=(number,), **settings) for number in range(count)), chunk=10, every=1)


def test_one_worker_takes_the_sum():
    work = Work((baseline(), fork(1), fork(2, onset=60, group=1)), chunk=10, every=1)
    assert simulate(work, Cluster(1)).makespan == 100 + 60 + 40
    assert simulate(work, Cluster(1, start=2)).makespan == 3 * 2 + 200
    assert simulate(work, Cluster(1, accept=1)).makespan == 200 + 1, "workers should continue while the driver gathers"


@pytest.mark.parametrize(("count", "num_workers"), [(1, 1), (6, 3), (7, 3), (8, 3), (9, 16)])
def test_equal_batches_take_several_rounds(count, num_workers):
    rounds = -(-count // num_workers)
    assert simulate(equal_batches(count), Cluster(num_workers)).makespan == 100 * rounds
    assert simulate(equal_batches(count, setup=3), Cluster(num_workers, start=2)).makespan == 105 * rounds
    assert simulate(equal_batches(count, setup=3), Cluster(num_workers, start=2, again=1)).makespan == 105 + 101 * (
        rounds - 1
    )


def test_a_fork_begins_when_its_onset_is_stored():
    long = (baseline(seconds=1), fork(1, seconds=5), fork(2, onset=80, seconds=20, group=1))
    work = Work(long, chunk=30, every=1)
    assert simulate(work, Cluster(3)).makespan == 80 + 20 * 20
    slow = Work((baseline(keep=7, setup=3), fork(1, seconds=5, setup=3)), chunk=50, every=1)
    assert simulate(slow, Cluster(2, start=2)).makespan == (2 + 3 + 40 + 7) + (2 + 3 + 60 * 5)


def test_a_fork_needs_the_onsets_of_all_its_seeds():
    first_batch, second_batch = baseline(0, seeds=(0,), seconds=1), baseline(1, seeds=(1,), seconds=3)
    needs_both = Work((first_batch, second_batch, fork(2, seeds=(0, 1))), chunk=10, every=1)
    needs_first = Work((first_batch, second_batch, fork(2, seeds=(0,))), chunk=10, every=1)
    assert simulate(needs_both, Cluster(3)).makespan == max(300, 40 * 3 + 60)
    assert simulate(needs_both, Cluster(3)).trained == 100 + 300 + 60
    assert simulate(needs_first, Cluster(2)).makespan == 300, (
        "the fork should begin when the first batch's worker is free"
    )


def test_completed_batches_are_noticed_at_the_next_poll():
    work = Work((baseline(seconds=0.003), baseline(1, seconds=0.003)), chunk=10, every=1)
    assert simulate(work, Cluster(1)).makespan == 1.0  # two batches of 0.3 s, each noticed after 0.5 s


@pytest.mark.parametrize(("every", "stored_steps"), [(1, 30), (2, 20), (4, 0)])
def test_a_lost_worker_costs_the_steps_that_were_not_stored(every, stored_steps):
    work = Work((baseline(),), chunk=10, every=every)
    cluster = Cluster(1, start=2, repair=20, detect=5, losses={0: [35.0]})
    outcome = simulate(work, cluster)
    assert outcome.makespan == 35 + 20 + 2 + 100 - stored_steps, "the batch should wait for the worker's return"
    assert (outcome.trained, outcome.twice, outcome.starting) == (100, 33 - stored_steps, 2 * 2)
    spare = simulate(work, Cluster(2, start=2, repair=20, detect=5, losses={0: [35.0]}))
    assert spare.makespan == 35 + 5 + 2 + 100 - stored_steps, (
        "another worker should take the batch when the loss is noticed"
    )
    assert (outcome.losses, outcome.given_up, spare.losses) == (1, 0, 1)


def test_a_lost_batch_has_priority():
    work = Work((baseline(0), baseline(1), baseline(2)), chunk=10, every=1)
    outcome = simulate(work, Cluster(2, repair=65, losses={0: [55.0]}))
    # Batch 0 is lost at 55 with 50 steps stored. At 100 the worker of batch 1 continues it, and at 120 the other
    # takes 2.
    assert outcome.makespan == outcome.last == 120 + 100


def test_a_worker_lost_while_it_starts_has_trained_nothing():
    work = Work((baseline(setup=4),), chunk=10, every=1)
    outcome = simulate(work, Cluster(1, start=2, losses={0: [5.0]}))
    assert (outcome.starting, outcome.twice, outcome.makespan) == (5 + 6, 0, 5 + 6 + 100)


def test_a_returned_worker_has_no_compiled_programs():
    work = Work((baseline(), baseline(1), baseline(2)), chunk=100, every=1)
    assert simulate(work, Cluster(1, start=9, again=1)).makespan == 109 + 101 + 101
    after_loss = simulate(work, Cluster(1, start=9, again=1, losses={0: [160.0]}))
    assert after_loss.makespan == 160 + 109 + 101


def test_forks_of_stored_onsets_wait_for_nothing():
    assert simulate(Work((fork(0), fork(1)), chunk=10, every=1), Cluster(2)).makespan == 60


def test_an_onset_stored_before_a_loss_is_used():
    work = Work((baseline(), fork(1)), chunk=100, every=1)
    outcome = simulate(work, Cluster(2, repair=500, losses={0: [50.0]}))
    assert outcome.makespan == 100 + 60, "the fork runs from 40 to 100, and then the baseline continues from 40"
    assert outcome.twice == 10


def test_an_idle_worker_that_is_lost_costs_only_its_absence():
    work = Work((baseline(), fork(1)), chunk=10, every=1)
    outcome = simulate(work, Cluster(2, repair=70, losses={1: [10.0]}))
    assert (outcome.losses, outcome.twice) == (0, 0)
    assert outcome.makespan == 80 + 60


def test_a_batch_lost_twice_in_one_chunk_is_given_up_and_resumed():
    work = Work((baseline(), baseline(1, seconds=3)), chunk=10, every=1)
    outcome = simulate(work, Cluster(2, repair=4, resume=100, losses={0: [35.0, 45.0]}))
    # Batch 0 dies at 35 and, restarted at 39, at 45, both after step 30. Batch 1 stores step 20 at 60 and stops.
    assert outcome.given_up == 1
    assert outcome.makespan == 60 + 100 + 3 * (100 - 20)
    assert outcome.twice == 5 + 6
    further = simulate(work, Cluster(2, repair=4, resume=100, losses={0: [35.0, 55.0]}))
    assert further.given_up == 0, "the batch reached step 40 in between"
    assert further.twice == 5 + 6


def test_losses_before_a_resumption_do_not_count():
    work = Work((baseline(),), chunk=10, every=1)
    outcome = simulate(work, Cluster(1, repair=4, resume=100, losses={0: [35.0, 45.0, 150.0]}))
    assert (outcome.given_up, outcome.losses, outcome.makespan) == (1, 3, 154 + 70)


def test_bounds_are_the_total_work_and_the_longest_path():
    work = Work((baseline(seconds=2, setup=3), fork(1, seconds=4, setup=3), fork(2, seeds=(5,))), chunk=10, every=1)
    assert bounds(work, Cluster(2, start=1)) == ((204 + 244 + 61) / 2, (4 + 80) + (4 + 240))
    assert bounds(work, Cluster(2, start=1, again=2)) == ((202 + 242 + 61) / 2, (2 + 80) + (2 + 240))


def test_workers_store_their_states_before_they_stop():
    work = Work((baseline(), baseline(1, seconds=3, keep=2)), chunk=10, every=20)
    outcome = simulate(work, Cluster(2, repair=4, resume=100, losses={0: [5.0, 14.0]}))
    assert outcome.makespan == 30 + 2 + 100 + 3 * 90
    assert outcome.keeping == 2


def test_a_second_loss_before_training_begins_counts_at_the_first_steps():
    work = Work((baseline(),), chunk=10, every=2)
    assert simulate(work, Cluster(1, start=8, losses={0: [43.0, 47.0]})).given_up == 1, (
        "both losses are at 30 reported steps"
    )
    assert simulate(work, Cluster(1, start=8, losses={0: [43.0, 53.0]})).given_up == 0, (
        "the losses are at 30 reported and 20 adopted steps"
    )


def test_queued_batches_are_not_trained_after_a_run_is_given_up():
    work = Work((baseline(), baseline(1, seconds=3)), chunk=10, every=1)
    outcome = simulate(work, Cluster(2, repair=20, resume=100, losses={0: [3.0, 28.0], 1: [24.0]}))
    assert (outcome.given_up, outcome.makespan, outcome.trained) == (1, 28 + 100 + 300, 400)


def test_workers_that_do_not_stop_in_time_are_killed():
    work = Work((baseline(), baseline(1, seconds=10)), chunk=10, every=1)
    outcome = simulate(work, Cluster(2, repair=4, resume=100, losses={0: [35.0, 45.0]}))
    # Batch 1 would reach its first chunk's end at 100.
    assert outcome.makespan == 45 + simulator.PATIENCE + 100 + 1000
    assert outcome.twice == 5 + 6 + 75
    last = Work((baseline(), baseline(1, seconds=10)), chunk=100, every=1)
    outcome = simulate(last, Cluster(2, repair=4, resume=100, losses={0: [35.0, 45.0]}))
    assert (outcome.makespan, outcome.trained) == (45 + simulator.PATIENCE + 100 + 1000, 1100)
    assert outcome.twice == 35 + 6 + 75


def test_checkpoints_take_a_twentieth_of_the_time():
    work = Work((baseline(stop=100, keep=1.0),), chunk=5, every=0)
    outcome = simulate(work, Cluster(1))
    # At 5 s, and then every 20 s: after 26, 47, 68 and 89 seconds, including the checkpoints.
    assert (outcome.keeping, outcome.makespan) == (5, 105)


@pytest.mark.parametrize("seed", range(60))
def test_schedules_respect_the_bounds_and_account_for_all_time(seed):
    rng = random.Random(seed)
    work, cluster = sample_plan(rng), sample_cluster(rng)
    outcome = simulate(work, cluster, seed)
    assert outcome.makespan >= max(bounds(work, cluster)) - 1e-6
    steps = sum((shard.stop - shard.onset) * shard.step_seconds for shard in work.shards)
    assert outcome.trained == pytest.approx(steps), "steps were counted twice or not at all"
    busy = outcome.trained + outcome.twice + outcome.starting + outcome.keeping
    assert busy <= cluster.workers * outcome.makespan * (1 + 1e-9)
    assert outcome == simulate(work, cluster, seed)


def sample_plan(rng):
    """Returns a plan with a few batches of the baseline, and up to six of each of two fork groups."""
    number, seeds, share = itertools.count(), range(rng.randint(1, 6)), rng.randint(1, 3)
    keep, setup = rng.choice([0.0, 0.5]), rng.choice([0.0, 4.0])
    parts = [seeds[first : first + share] for first in range(0, len(seeds), share)]
    shards = [baseline(next(number), 80, part, rng.uniform(0.1, 2), keep=keep, setup=setup) for part in parts]
    for group, onset in enumerate((30, 60)):
        for _ in range(rng.randint(0, 6)):
            fork_seeds = rng.sample(seeds, rng.randint(1, len(seeds)))
            seconds = rng.uniform(0.1, 2)
            shards.append(fork(next(number), onset, 120, fork_seeds, seconds, group, keep=keep, setup=setup))
    return Work(tuple(shards), chunk=rng.choice([7, 10, 25]), every=rng.choice([0, 1, 2]))


def sample_cluster(rng):
    """Returns a cluster of one to six workers. In half of the cases some are lost."""
    mtbf = rng.choice([float("inf"), rng.uniform(80, 400)])
    restart = rng.choice([None, 0.5])
    return Cluster(rng.randint(1, 6), 1.5, restart, mtbf, repair=20, detect=3, accept=0.2, resume=10)


def test_the_rules_are_those_of_the_driver():
    assert simulator.POLL == workers.POLL_SECONDS
    assert simulator.PATIENCE == workers.STOP_SECONDS
    assert engine.KEEPING == trained.CHECKPOINT_TIME_SHARE
    assert recorded.CHUNKS_PER_RUN == driver.CHUNKS_PER_RUN


@pytest.mark.parametrize("chunk", [7, 10, 25, 200])
def test_chunks_are_those_of_the_driver(chunk):
    shards = (baseline(stop=130), fork(1, onset=50, stop=200), fork(2, onset=100, stop=200, group=1))
    grid = SimpleNamespace(forks=[SimpleNamespace(onset=50), SimpleNamespace(onset=100)])
    for shard in shards:
        batch = SimpleNamespace(disturbed=shard.fork is not None, onset=shard.onset, stop=shard.stop)
        assert Work(shards, chunk).spans(shard) == driver.spans(grid, batch, chunk)


PLAN = [
    {"id": 0, "onset": 0, "stop": 130, "fork": None, "lanes": [[0, -1], [1, -1]]},
    {"id": 1, "onset": 50, "stop": 200, "fork": 0, "lanes": [[0, 0], [1, 0]]},
    {"id": 2, "onset": 100, "stop": 200, "fork": 1, "lanes": [[1, 1]]},
]


def attempt_row(batch, begun, seconds, attempt=1, start=None, stop=None, outcome="complete"):
    batch_plan = PLAN[batch]
    start, stop = batch_plan["onset"] if start is None else start, batch_plan["stop"] if stop is None else stop
    row = {
        "batch": batch,
        "fork": batch_plan["fork"],
        "onset": batch_plan["onset"],
        "stop": batch_plan["stop"],
        "attempt": attempt,
    }
    row |= {"from_step": start, "to_step": stop, "begun": begun, "ended": begun + seconds, "compile_seconds": 1.0}
    return row | {"outcome": outcome}


def test_times_are_read_from_a_runs_table(tmp_path, monkeypatch, capsys):
    """There are five seconds of setup, steps take 0.1, 0.2 and 0.2 seconds, and two seconds pass between batches."""
    rows = [attempt_row(0, 10.0, 5 + 13.0), attempt_row(1, 30.0, 5 + 30.0), attempt_row(2, 67.0, 5 + 20.0)]
    (tmp_path / "plan.json").write_text(json.dumps({"threads": 1, "batches": PLAN}))
    (tmp_path / "spec.toml").write_text("[audit]\nsteps = 200\n")
    pd.DataFrame(rows).to_csv(tmp_path / "shards.csv", index=False)
    work = recorded.work_of(tmp_path)
    assert (work.chunk, work.every) == (5, 0)
    assert [shard.step_seconds for shard in work.shards] == pytest.approx([0.1, 0.2, 0.2])
    assert [shard.setup for shard in work.shards] == pytest.approx([5.0] * 3)
    assert [shard.seeds for shard in work.shards] == [{0, 1}, {0, 1}, {1}]
    start = recorded.start_seconds(pd.DataFrame(rows), 1, poll=0.5)
    assert start == 2 - 0.25
    assert recorded.workers_of(pd.DataFrame(rows)) == 1
    assert recorded.workers_of(pd.DataFrame([*rows, attempt_row(1, 60.0, 30.0), attempt_row(1, 65.0, 30.0)])) == 3
    monkeypatch.setattr(sys, "argv", ["simulate.py", str(tmp_path), "--workers", "1", "2", "--mtbf", "inf", "0.02"])
    simulator.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "simulated, in seconds; a process begins in 1.8 s"
    assert [line.split(" | ")[:2] for line in lines[4:]] == [
        ["| 1", "never"],
        ["| 1", "0.02 h"],
        ["| 2", "never"],
        ["| 2", "0.02 h"],
    ]
    assert simulate(work, Cluster(1, start)).span == pytest.approx(recorded.span(pd.DataFrame(rows)), abs=1)


def test_the_longest_of_several_attempts_gives_the_time_of_a_step():
    rows = [
        attempt_row(0, 10.0, 1 + 13.0),
        attempt_row(1, 30.0, 1 + 20.0, stop=150, outcome="lost"),
        attempt_row(1, 60.0, 1 + 15.0, attempt=2, start=150),
    ]
    shard = recorded._shard(PLAN[1], pd.DataFrame(rows[1:]), setup=1.0)
    assert shard.step_seconds == pytest.approx(0.2)
    assert recorded.setup_seconds(pd.DataFrame(rows)) == 1.0, (
        "the compilation time, if there are too few attempts for a fit"
    )


def test_real_runs_take_the_simulated_time():
    """The documented runs of one and of two workers, simulated with the times of their batches.

    Runs of two workers are also simulated with the times of one. In the second repetition with two workers, the machine
    had half its speed from the middle on.
    """
    results = SCALING / "results"
    rows = pd.read_csv(results / "shards.csv")
    runs = dict(list(rows.groupby(["workers", "repetition"])))
    own_errors = {key: predict_span(results, runs[key], key[0], key[0]) / recorded.span(runs[key]) - 1 for key in runs}
    assert len(own_errors) == 10
    assert [key for key, error in own_errors.items() if abs(error) > 0.02] == [(2, 1)]
    assert abs(own_errors[2, 1]) < 0.06
    errors_for_two = [predict_span(results, runs[1, n], 1, 2) / recorded.span(runs[2, n]) - 1 for n in range(5)]
    assert abs(np.median(errors_for_two)) < 0.2


def test_real_runs_with_a_killed_worker_take_the_simulated_time():
    results = SCALING / "results"
    shards = pd.read_csv(results / "shards-killed.csv")
    for run in pd.read_csv(results / "runs-killed.csv").itertuples():
        rows = shards[shards["repetition"] == run.repetition]
        prediction = measure._predicted(results, rows, 1, 1, run.killed_after)
        assert prediction == pytest.approx(recorded.span(rows), rel=0.05)
        assert prediction > measure._predicted(results, rows, 1, 1) + measure.GONE_SECONDS


@pytest.mark.exhaustive
def test_the_readme_has_the_simulated_tables():
    page = (SCALING / "README.md").read_text()
    table_lines = measure.compare(SCALING / "results").splitlines() + gpt2_lanes.sizes().splitlines()
    never = [line for line in gpt2_lanes.tables(1).splitlines() if "never" in line]
    assert all(line in page for line in table_lines if line.startswith("|"))
    assert sum(line in page for line in never) == 6, (
        "expected 8, 64 and 512 workers, with the spec's and with short chunks"
    )


@pytest.mark.parametrize(("max_lanes", "parts"), [(None, 1), (None, 4), (None, 7), (3, 1), (3, 4), (5, 64)])
def test_lanes_are_distributed_as_in_a_run(max_lanes, parts):
    learner = ja.Learner(lambda key: jnp.zeros(2), lambda x, key, taps: (taps("params", x), {"performance": x.sum()}))
    grid = plan(learner, [ja.weight_noise(ja.sweep(1.0, 2.0, 3.0), onset=2)], seeds=5, steps=6)
    batches = layout(grid, max_lanes, parts=parts)
    for disturbed, count in ((False, 5), (True, 20)):
        batch_sizes = [len(batch.seeds) for batch in batches if batch.disturbed is disturbed]
        assert batch_sizes == gpt2_lanes.shares(count, max_lanes or count, parts)


def test_gpt2_has_the_assumed_number_of_parameters():
    size, width, depth = gpt2.SIZES["124m"], 768, 12
    assert (size.width, size.depth) == (width, depth)
    layer = 12 * width**2 + 13 * width
    assert (50257 + 1024) * width + depth * layer + 2 * width == gpt2_lanes.PARAMETERS


def predict_span(run, rows, recorded_by, num_workers):
    start = recorded.start_seconds(rows, recorded_by, simulator.POLL)
    return simulate(recorded.work_of(run, rows), Cluster(num_workers, start)).span


def test_a_lost_attempt_ended_at_its_last_telemetry(tmp_path):
    attempt = attempts.BatchAttempt(tmp_path / "attempt-001", SimpleNamespace(seeds=[0]))
    attempt.path.mkdir()
    attempt.begin(0, "here:1", 1.0, None)
    attempt.write_rows({"performance": np.zeros((10, 1))}, 0, 10)
    attempt.state(10).mkdir()
    for path in attempt.path.iterdir():
        os.utime(path, (100, 100))
    attempt.remove_states()
    assert attempt.latest_write() == 100, "the time of the last telemetry is expected, not that of a later attempt"


COMMAND = re.compile(r"\bjaxaudit (?:run|resume|quickstart) [^\n'`\]#]+")


@pytest.mark.parametrize(
    "name", ["Dockerfile", "slurm.sh", "slurm_hosts.sh", "ray.yaml", "jobset.yaml", "../README.md"]
)
def test_commands_in_the_files_for_clusters_are_valid(name):
    commands = COMMAND.findall((DEPLOY / name).read_text())
    assert commands
    for command in commands:
        words = shlex.split(command)[1:]
        arguments = parser().parse_args([re.sub(r"\$\{?\w+\}?", "7", word) for word in words])
        if "--on" in words:
            assert cli._workers(arguments).engine in backends.ENGINES


@pytest.mark.parametrize("name", ["slurm.sh", "slurm_hosts.sh"])
def test_shell_scripts_are_valid(name):
    subprocess.run(["bash", "-n", DEPLOY / name], check=True)
    lines = (DEPLOY / name).read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    after = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[after:]), (
        "Slurm ignores directives after the first command"
    )


def test_a_slurm_script_resumes_a_run_that_has_begun(tmp_path):
    """A script replaces the command and prints its arguments."""
    (tmp_path / "jaxaudit").write_text('#!/bin/bash\necho "$@" slurm:${SLURM_JOB_ID-none}')
    (tmp_path / "jaxaudit").chmod(0o755)
    run = tmp_path / "run"

    def run_script():
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        command = ["bash", DEPLOY / "slurm.sh", "grid.toml", run, "64"]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert run_script().startswith(f"run grid.toml -o {run} --on slurm --workers 64 ")
    assert run_script().endswith("slurm:none\n"), "the submitted jobs see the script's own job id"
    run.mkdir()
    (run / "spec.toml").touch()
    assert run_script().startswith(f"resume {run} --on slurm --workers 64 ")


def test_extras_in_the_files_for_clusters_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = (DEPLOY / "Dockerfile").read_text()
    names = {extra for group in re.findall(r"EXTRAS=([\w,]+)", text) for extra in group.split(",")}
    assert {"cuda12", "ray", "slurm"} <= names <= set(extras)
    copied = re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
    assert all((ROOT / path).exists() for paths in copied for path in paths.split())


def test_the_jobset_resumes_and_its_workers_reach_the_driver():
    jobset = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    jobs = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    driver_pod, worker_pod = (jobs[name]["template"]["spec"] for name in ("driver", "worker"))
    script = driver_pod["containers"][0]["args"][0]
    subprocess.run(["bash", "-n"], input=script, check=True, text=True)
    assert script.index("jaxaudit resume") < script.index("jaxaudit run"), (
        "the script should run only if there is nothing to resume"
    )
    assert driver_pod["restartPolicy"] == "Never", "a pod failure policy requires this"
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["driver"]
    name = jobset["metadata"]["name"]
    assert f"--address={name}-driver-0-0.{name}:6379" in worker_pod["containers"][0]["command"]
    assert f"--workers {jobs['worker']['parallelism']} " in script
    claims = [pod["volumes"][0]["persistentVolumeClaim"] for pod in (driver_pod, worker_pod)]
    assert claims[0] == claims[1]


def test_rays_cluster_file_is_valid():
    cluster = yaml.safe_load((DEPLOY / "ray.yaml").read_text())
    assert {"cluster_name", "provider", "auth", "docker"} <= set(cluster)
    assert any("--num-cpus=0" in command for command in cluster["head_start_ray_commands"])
    util = pytest.importorskip("ray.autoscaler._private.util")
    pytest.importorskip("jsonschema")
    util.validate_config(util.prepare_config(cluster))
