"""`jaxaudit margin` on a finished run: a search that stops or is killed and resumes, and what is refused."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from cli_errors import cli_error
from server import Server
from small_runs import spec_header
from worker_runs import InProcessBackend

import jaxaudit as ja
from jaxaudit.analysis.results import onsets_in_trend
from jaxaudit.analysis.run_reader import load
from jaxaudit.cli import main as cli
from jaxaudit.execution.engine import Engine
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.margins import folder
from jaxaudit.runs.margins.search import MarginSettings
from jaxaudit.runs.run_folder import Folder
from jaxaudit.spec.document import parse

SPEC = (
    spec_header(seeds=6, steps=40, learner='kind = "quadratic"\nadam = false')
    + """[run]
chunk = 10
[[perturbation]]
kind = "lr_spike"
magnitude = [1, 3, 30]
onset = 10
duration = 10
[[perturbation]]
kind = "weight_noise"
magnitude = 0.1
onset = [0.25, 12]
"""
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run, and a copy of it with the margins searched in it."""
    root = tmp_path_factory.mktemp("margins")
    durable.run(parse(SPEC), root / "run")
    shutil.copytree(root / "run", root / "searched")
    assert cli.main(["margin", str(root / "searched")]) == 0
    return root


@pytest.fixture
def run(finished, tmp_path, monkeypatch):
    """A copy of the run in the current folder."""
    shutil.copytree(finished / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _jax_as_configured(monkeypatch):
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)


@pytest.mark.exhaustive
def test_margins_of_a_run_use_its_lanes(finished):
    table = pd.read_csv(finished / "searched/margins/margins.csv")
    assert table.perturbation.tolist() == ["lr_spike @10", "weight_noise @10", "weight_noise @12"]
    assert (table.seeds == 6).all()
    outcomes = pd.read_csv(finished / "searched/margins/outcomes.csv")
    assert (outcomes.trained == 1).all()
    of_run = outcomes[outcomes["round"] == 0]
    assert sorted(set(of_run.perturbation)) == sorted({*table.perturbation, "control"})
    assert not (outcomes[outcomes["round"] > 0].purpose == "scan").any(), (
        "a magnitude that the run had trained was trained again"
    )
    assert (table.evaluations.sum() == (outcomes["round"] > 0).sum()).all()
    metrics = pd.read_csv(finished / "run/metrics.csv")
    stored = metrics[(metrics.perturbation == "lr_spike") & (metrics.magnitude == 30)].set_index("seed").collapse_time
    reported = (
        of_run[(of_run.perturbation == "lr_spike @10") & (of_run.magnitude == 30)].set_index("seed").collapse_time
    )
    pd.testing.assert_series_equal(stored, reported, check_index_type=False)


def test_a_run_and_a_call_give_the_same_margins(finished):
    spec = parse(SPEC)
    learner = spec.build().program.learner
    perturbations = [entry.perturbation for entry in spec.perturbations]
    margins = ja.margin(learner, perturbations, seeds=6, steps=40, settings=spec.metrics)
    searched = pd.read_csv(finished / "searched/margins/margins.csv")
    np.testing.assert_allclose(np.log(margins.table.margin), np.log(searched.margin), atol=0.03)
    stored = folder.search_margins(finished / "searched", None, None, MarginSettings())
    trending = onsets_in_trend(load(finished / "run").telemetry, spec.metrics.window)
    assert margins.trending == stored.trending == tuple(trending)
    assert trending == [10, 12]


def test_a_second_call_trains_nothing_and_a_finer_one_continues(finished, run, capsys, monkeypatch):
    shutil.copytree(finished / "searched/margins", run / "margins")
    before = (run / "margins/outcomes.csv").read_bytes()
    table = (run / "margins/margins.csv").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(folder.search, "prepare_engine", lambda *a, **k: pytest.fail("something was trained"))
        assert cli.main(["margin", "run"]) == 0
    assert capsys.readouterr().out.startswith("perturbation")
    assert (run / "margins/outcomes.csv").read_bytes() == before
    assert (run / "margins/margins.csv").read_bytes() == table
    assert cli.main(["margin", "run", "--tolerance", "0.005"]) == 0
    after = (run / "margins/outcomes.csv").read_bytes()
    assert after.startswith(before)
    assert len(after) > len(before)


def test_a_search_stored_with_auto_physics_is_recognized(finished, run, capsys, monkeypatch):
    shutil.copytree(finished / "searched/margins", run / "margins")
    search_file = run / "margins/search.json"
    search = json.loads(search_file.read_text())
    assert 'physics = "c"' in search["spec"]
    search["spec"] = [line.replace('physics = "c"', 'physics = "auto"') for line in search["spec"]]
    search_file.write_text(json.dumps(search))
    monkeypatch.setattr(folder.search, "prepare_engine", lambda *a, **k: pytest.fail("something was trained"))
    assert cli.main(["margin", "run"]) == 0
    capsys.readouterr()
    search["environment"]["device_kind"] = "NVIDIA H200"
    search_file.write_text(json.dumps(search))
    assert "run/margins holds a search with another spec" in cli_error(capsys, "margin", "run")


@pytest.mark.exhaustive
def test_workers_give_the_results_of_one_process(run, monkeypatch):
    backend = InProcessBackend()
    monkeypatch.setattr(folder, "open_backend", backend.open_backend)
    monkeypatch.setattr(cli, "use_cpu_only", lambda: None)
    assert cli.main(["margin", "run", "--on", "local", "-o", "theirs"]) == 0
    lanes, pools = backend.submitted[0], backend.submitted[1:]
    assert lanes[1]["settings"]["lanes"] == 9, "half of 6 seeds x 3 perturbations for each worker"
    assert {call.rpartition(":")[2] for call, _ in pools} == {"collapse_times_of"}
    assert cli.main(["margin", "run", "--lanes", "9", "-o", "ours"]) == 0
    for name in ("outcomes.csv", "margins.csv"):
        assert Path("theirs", name).read_bytes() == Path("ours", name).read_bytes()
    count = len(backend.submitted)
    assert cli.main(["margin", "run", "--on", "local", "-o", "theirs"]) == 0
    assert len(backend.submitted) == count, "a finished search was trained again"


@pytest.mark.parametrize("stop", [9, *(pytest.param(stop, marks=pytest.mark.exhaustive) for stop in (1, 4, 16))])
def test_a_search_that_is_stopped_resumes_to_the_same_end(finished, run, stop, capsys, monkeypatch):
    calls = itertools.count(1)

    def advance(self, *arguments, original=Engine.advance):
        if next(calls) == stop:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Engine, "advance", advance)
    assert cli.main(["margin", "run"]) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (run / "margins/margins.csv").exists()
    (run / "margins/.unfinished-outcomes.csv").write_text("half wri")
    assert cli.main(["margin", "run"]) == 0
    for name in ("outcomes.csv", "margins.csv"):
        assert (run / "margins" / name).read_bytes() == (finished / "searched/margins" / name).read_bytes()
    assert sorted(p.name for p in (run / "margins").iterdir()) == ["margins.csv", "outcomes.csv", "search.json"]


def test_a_spec_selects_what_is_searched_and_where(run, capsys):
    spec = SPEC[: SPEC.index("[[")] + '[[perturbation]]\nkind = "gradient_mask"\nonset = 12\n'
    Path("other.toml").write_text(spec)
    assert cli.main(["margin", "run", "other.toml", "-o", "masks", "--criterion", "collapse", "--lanes", "4"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("gradient_mask")
    assert "any collapse counts" in out
    assert len(pd.read_csv("masks/margins.csv")) == 1
    assert json.loads(Path("masks/search.json").read_text())["criterion"] == "collapse"
    assert not (run / "margins").exists()


INVALID_ARGUMENTS = {
    "no folder": (["nowhere"], "there is no such folder"),
    "no run": (["folder"], "folder is not a run's folder"),
    "an unfinished run": (["unfinished"], "is not finished"),
    "no spec": (["run", "nowhere.toml"], "nowhere.toml: there is no such file"),
    "an onset that is not stored": (["run", "onset.toml"], "no stored onset at step 11; the run in run has 10, 12"),
    "another learner": (["run", "rate.toml"], "the spec must keep the run's learner"),
    "other seeds": (["run", "seeds.toml"], "the spec must keep the run's seeds"),
    "neutral magnitudes alone": (["run", "neutral.toml"], "magnitude 1 of 'lr_spike' disturbs nothing"),
    "an onset too early": (["early"], "onset 0 leaves no steps to measure J_pre on"),
    "a place that is taken": (["run", "-o", "folder"], "folder exists and is not empty; give another with -o"),
    "a place that is a file": (["run", "-o", "onset.toml"], "onset.toml exists and is not a folder"),
    "a place of another search": (["run", "-o", "done", "--reach", "7"], "holds a search with another reach"),
    "a place of another spec": (["run", "neutral2.toml", "-o", "done"], "holds a search with another spec"),
    "damaged outcomes": (["run", "-o", "damaged"], "outcomes.csv is damaged"),
    "a tolerance of nothing": (["run", "--tolerance", "0"], "tolerance must be from 0.00001 to 1, not 0.0"),
    "a tolerance in words": (["run", "--tolerance", "fine"], "argument --tolerance: invalid float value: 'fine'"),
    "an unknown criterion": (["run", "--criterion", "x"], "argument --criterion: invalid choice: 'x'"),
    "no lanes": (["run", "--lanes", "0"], "lanes must be at least 1, not 0"),
    "a lost onset": (["lost"], "so nothing can be searched from step 12"),
}


@pytest.mark.parametrize("case", INVALID_ARGUMENTS)
def test_invalid_arguments_are_refused_in_one_sentence(case, finished, run, capsys):
    argv, words = INVALID_ARGUMENTS[case]
    for name, (old, new) in {
        "onset": ("onset = 10", "onset = 11"),
        "rate": ("adam = false", "adam = true"),
        "seeds": ("seeds = 6", "seeds = 5"),
        "neutral": ("[1, 3, 30]", "1"),
        "neutral2": ("[1, 3, 30]", "3"),
    }.items():
        assert old in SPEC
        Path(f"{name}.toml").write_text(SPEC.replace(old, new))
    Path("folder").mkdir()
    Path("folder/notes.txt").write_text("mine")
    if argv[0] in ("unfinished", "early", "lost"):
        shutil.copytree("run", argv[0])
    if argv[0] == "unfinished":
        Folder(Path("unfinished")).update_environment(status="interrupted")
    if argv[0] == "early":
        Path("early/spec.toml").write_text(SPEC.replace("onset = 10", "onset = 0"))
    if argv[0] == "lost":
        shutil.rmtree("lost/checkpoints/onset-00000012")
    if argv[-1] in ("done", "7"):
        shutil.copytree(finished / "searched/margins", "done")
    if argv[-1] == "damaged":
        shutil.copytree(finished / "searched/margins", "damaged")
        Path("damaged/outcomes.csv").write_text("round,perturbation\n1,2\n")
    assert words in cli_error(capsys, "margin", *argv)


@pytest.mark.slow
def test_a_search_killed_at_any_instant_resumes_to_the_same_end(run, tmp_path_factory):
    server, outcomes = Server(tmp_path_factory.mktemp("server")), run / "margins/outcomes.csv"

    def count_rows():
        return outcomes.read_text().count("\n") if outcomes.exists() else 0

    def kill_at_row(row, wait):
        def watch(pid):
            while count_rows() < row and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.002)
            time.sleep(wait)
            os.kill(pid, signal.SIGKILL)

        return watch

    rng, rows_at_kill = random.Random(0), []
    try:
        reference = server("margin", run, "-o", "reference")
        assert reference.code == 0, reference.err
        last = Path("reference/outcomes.csv").read_text().count("\n")
        for target in sorted(rng.sample(range(last), 12)):
            result = server("margin", run, watch=kill_at_row(target, rng.uniform(0, 0.05)))
            assert "Traceback" not in result.err
            if result.code == 0:
                break
            assert result.code == -signal.SIGKILL
            rows_at_kill.append(count_rows())
        assert server("margin", run).code == 0
    finally:
        server.close()
    print("killed at rows of outcomes:", rows_at_kill)
    assert len(set(rows_at_kill)) > 5
    for name in ("outcomes.csv", "margins.csv"):
        assert (run / "margins" / name).read_bytes() == Path("reference", name).read_bytes()
