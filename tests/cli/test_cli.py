import errno
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_errors import cli_error, folder_digests
from small_runs import spec_header

from jaxaudit.cli import main as cli
from jaxaudit.cli.arguments import parser
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.run_folder import Folder
from jaxaudit.runtime import registry
from jaxaudit.spec.document import parse

VALID_SPEC = (
    spec_header(seeds=2)
    + """[[perturbation]]
kind = "lr_spike"
magnitude = [3, 30]
onset = 10
duration = 2
"""
)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Changes to an empty folder, and leaves JAX configured for the other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)


INVALID_SPECS = {
    "unknown table": (("[metrics]", "[metric]"), "unknown key 'metric' (did you mean 'metrics'?)"),
    "unknown key": (("steps", "stepps"), "[audit]: unknown key 'stepps' (did you mean 'steps'?)"),
    "unknown setting": (
        ('"quadratic"', '"ppo"\nlerning_rate = 1e-3'),
        "[learner]: unknown key 'lerning_rate' (did you mean 'learning_rate'?)",
    ),
    "telemetry in the learner": (('"quadratic"', '"ppo"\ntelemetry = "full"'), "unknown key 'telemetry'"),
    "unknown metric setting": (("hold", "holt"), "[metrics]: unknown key 'holt' (did you mean 'hold'?)"),
    "unknown perturbation key": (("onset", "onsett"), "[[perturbation]] 1: unknown key 'onsett'"),
    "unknown kind key": (
        ('kind = "lr', 'knid = "lr'),
        "[[perturbation]] 1: unknown key 'knid' (did you mean 'kind'?)",
    ),
    "unknown task": (
        ("Pendulum-v5", "Pendulum-v4"),
        "[task]: unknown task 'InvertedPendulum-v4' (did you mean",
    ),
    "unknown task kind": (('"mujoco"', '"mojuco"'), "unknown kind of task 'mojuco' (did you mean 'mujoco'?)"),
    "unknown physics": (('-v5"', '-v5"\nphysics = "bullet"'), 'physics must be "auto" or "c" or "mjx"'),
    "unknown learner": (('"quadratic"', '"pppo"'), "[learner]: unknown learner 'pppo' (did you mean 'ppo'?)"),
    "unknown perturbation": (
        ("lr_spike", "lr_spikes"),
        "1: unknown perturbation 'lr_spikes' (did you mean 'lr_spike'?)",
    ),
    "an intervention": (
        ('kind = "lr_spike"', 'kind = "lower_learning_rate"'),
        "'lower_learning_rate' waits for a monitor's alarm, so the spec must have a table [monitor]",
    ),
    "unknown intervention": (("lr_spike", "rollback"), "unknown perturbation 'rollback' (did you mean 'roll_back'?)"),
    "a monitor without a file": (("[metrics]", "[monitor]\n[metrics]"), "[monitor]: 'file' is missing; it must be a s"),
    "a monitor that is not there": (
        ("[metrics]", '[monitor]\nfile = "no/monitor.npz"\n[metrics]'),
        "[monitor]: there is no file no/monitor.npz",
    ),
    "a monitor that is a folder": (
        ("[metrics]", '[monitor]\nfile = "."\n[metrics]'),
        "[monitor]: . is not a file",
    ),
    "a monitor that is none": (
        ("[metrics]", '[monitor]\nfile = "spec.toml"\n[metrics]'),
        "[monitor]: spec.toml is not a monitor's file",
    ),
    "an alpha of 1": (
        ("[metrics]", '[monitor]\nfile = "m.npz"\nalpha = 1\n[metrics]'),
        "[monitor]: alpha must lie between 0 and 1, not 1",
    ),
    "unknown dimension": (
        ("[[perturbation]]", '[[perturbation]]\ndimension = "data set"\n[[perturbation]]'),
        "unknown dimension 'data set' (did you mean 'data'?); allowed: data, optimization",
    ),
    "missing table": (('[learner]\nkind = "quadratic"', ""), "the table [learner] is missing"),
    "missing steps": (("steps = 20", ""), "[audit]: 'steps' is missing"),
    "single brackets": (("[[perturbation]]", "[perturbation]"), "must be written [[perturbation]]"),
    "a perturbation that is a number": (
        (VALID_SPEC, VALID_SPEC[: VALID_SPEC.index("[[")].replace("[audit]", "perturbation = [3]\n[audit]")),
        "[[perturbation]] 1 must be a table, not the number 3",
    ),
    "a table that is a list": (
        ("[metrics]\nwindow = 4\nhold = 4\nhorizon = 4", "[[metrics]]"),
        "[metrics] must be a table",
    ),
    "seeds = 0": (("seeds = 2", "seeds = 0"), "seeds must be from 1 to"),
    "no seeds": (("seeds = 2", "seeds = []"), "seeds must list at least one seed"),
    "the same seed twice": (("seeds = 2", "seeds = [1, 1]"), "all different"),
    "a negative seed": (("seeds = 2", "seeds = [-1]"), "none negative"),
    "seeds of text": (
        ("seeds = 2", 'seeds = "2"'),
        "seeds must be a whole number or a list of whole numbers, not the string",
    ),
    "seeds beyond reason": (("seeds = 2", "seeds = 1000000000"), "seeds must be from 1 to 100000,"),
    "seeds beyond numbers": (("seeds = 2", f"seeds = {10**30}"), "whole number of at most 4294967295"),
    "steps = 0": (("steps = 20", "steps = 0"), "steps must be from 1 to"),
    "negative steps": (("steps = 20", "steps = -5"), "steps must be from 1 to"),
    "broken steps": (("steps = 20", "steps = 20.5"), "steps must be a whole number, not the number 20.5"),
    "steps of truth": (("steps = 20", "steps = true"), "steps must be a whole number, not true"),
    "a date": (("steps = 20", "steps = 2020-01-01"), "not the date or time 2020-01-01"),
    "an empty name": (('"small"', '""'), "name must be 1 to 100 printable characters"),
    "a long name": (('"small"', f'"{"x" * 101}"'), "name must be 1 to 100 printable characters"),
    "a name in two lines": (('"small"', r'"a\nb"'), "name must be 1 to 100 printable characters"),
    "telemetry": (
        ("steps", 'telemetry = "all"\nsteps'),
        'telemetry must be "basic" or "full", not the string',
    ),
    "execution": (
        ("steps", 'execution = "pmap"\nsteps'),
        'execution must be a whole number or "auto" or "vmap" or "map"',
    ),
    "execution = 0": (("steps", "execution = 0\nsteps"), "execution must be from 1 to"),
    "a negative size": (
        ('"quadratic"', '"quadratic"\nsize = -3'),
        "[learner]: size must be from 1 to 100, not -3",
    ),
    "a negative learning rate": (
        ('"quadratic"', '"ppo"\nlearning_rate = -1'),
        "learning_rate must be positive",
    ),
    "a batch that does not divide": (
        ('"quadratic"', '"ppo"\nminibatch_size = 100'),
        "minibatch_size 100 does not divide",
    ),
    "widths of text": (('"quadratic"', '"ppo"\nhidden = ["64"]'), "hidden must be a list of whole numbers"),
    "a setting that is nan": (('"quadratic"', '"ppo"\ngamma = nan'), "gamma must be a number, not nan"),
    "a window of one step": (("window = 4", "window = 1"), "[metrics]: window must be an integer of at least 2, not 1"),
    "a negative hold": (("hold = 4", "hold = -4"), "[metrics]: hold must be from 1"),
    "a negative chunk": (("[metrics]", "[run]\nchunk = -1\n[metrics]"), "[run]: chunk must be from 0"),
    "checkpoints never": (
        ("[metrics]", "[run]\ncheckpoint_every = -1\n[metrics]"),
        "checkpoint_every must be from 0",
    ),
    "an onset past the end": (("onset = 10", "onset = 20"), "onset 20 is outside the run of 20 steps"),
    "a negative onset": (("onset = 10", "onset = -1"), "onset -1 is negative"),
    "a fraction above one": (("onset = 10", "onset = 1.5"), "onset 1.5 as a fraction must lie in [0, 1)"),
    "the same onset twice": (("onset = 10", "onset = [10, 0.5]"), "onset = [10, 0.5] stands for the steps [10, 10]"),
    "no onset": (("onset = 10", "onset = []"), "onset must list at least one number"),
    "a window past the end": (
        ("duration = 2", "duration = 11"),
        "the window from step 10 for 11 steps ends past the run's 20",
    ),
    "duration = 0": (("duration = 2", "duration = 0"), "duration must be at least 1 step"),
    "a duration in words": (
        ("duration = 2", 'duration = "always"'),
        'duration must be a whole number or "once" or "end"',
    ),
    "a period too short": (
        ("duration = 2", "duration = 2\nperiod = 1"),
        "period 1 is shorter than the duration 2",
    ),
    "a period too long": (
        ("duration = 2", "duration = 2\nperiod = 21"),
        "period must be at most 20, the steps of the run, not 21",
    ),
    "magnitudes of text": (
        ("[3, 30]", '["3", "30"]'),
        "magnitude must be a number or a list of numbers, not the list",
    ),
    "no magnitude": (("[3, 30]", "[]"), "magnitude must list at least one number"),
    "the same magnitude twice": (
        ("[3, 30]", "[3, 3.0]"),
        "magnitude must list at least one number, and each once",
    ),
    "a magnitude out of range": (
        ("[3, 30]", "-3"),
        "1: magnitude -3.0 of 'lr_spike' is outside its range 0 to inf",
    ),
    "a magnitude that is nan": (("[3, 30]", "nan"), "magnitude must be a number, not nan"),
    "a site the learner lacks": (
        ("lr_spike", "reward_scale"),
        "acts at site 'reward', which the learner does not tap",
    ),
    "a dimension the learner lacks": (
        ("[[perturbation]]", '[[perturbation]]\ndimension = "data"\n[[perturbation]]'),
        "[[perturbation]] 1: no perturbation of 'data' fits the learner's sites",
    ),
    "a target that is nowhere": (
        ("onset = 10", 'onset = 10\ntarget = "actor"'),
        "target 'actor' of 'lr_spike' is in none",
    ),
    "moments the learner lacks": (
        ('"quadratic"', '"quadratic"\nadam = false\n[[perturbation]]\nkind = "momentum_noise"'),
        "[[perturbation]] 1: the optimizer state has no mu",
    ),
    "two forms": (
        ('kind = "lr', 'dimension = "data"\nkind = "lr'),
        "must have exactly one of 'kind', 'chain' and 'dimension', not 'kind' and 'dimension'",
    ),
    "an empty chain": (
        ("[[perturbation]]", "[[perturbation]]\nchain = []\n[[perturbation]]"),
        "chain must be a list of tables",
    ),
    "a chain of text": (
        ("[[perturbation]]", '[[perturbation]]\nchain = ["lr_spike"]\n[[perturbation]]'),
        "chain part 1 must be a table, not the string",
    ),
    "a chain in a chain": (
        ("[[perturbation]]", "[[perturbation]]\nchain = [{chain = []}]\n[[perturbation]]"),
        "chain part 1: unknown key 'chain'",
    ),
    "an unknown part": (
        ("[[perturbation]]", '[[perturbation]]\nchain = [{kind = "weight_noize"}]\n[[perturbation]]'),
        "chain part 1: unknown perturbation 'weight_noize' (did you mean 'weight_noise'?)",
    ),
    "an onset nobody uses": (
        (
            "[[perturbation]]",
            '[[perturbation]]\nonset = 1\nchain = [{kind = "lr_spike", onset = 2}]\n[[perturbation]]',
        ),
        "onset has no effect",
    ),
    "not TOML": (("[audit]", "[audit"), "spec.toml is not TOML: "),
    "a key given twice": (
        ("steps = 20", "steps = 20\nsteps = 30"),
        "is not TOML: Cannot overwrite a value (at line 6",
    ),
    "nested without end": (("seeds = 2", f"seeds = {'[' * 5000}"), "nested too deeply"),
    "a number without end": (("seeds = 2", f"seeds = {'9' * 5000}"), "is not TOML"),
}


@pytest.mark.parametrize("case", INVALID_SPECS)
def test_an_invalid_spec_is_refused_in_one_sentence(case, capsys):
    (old, new), words = INVALID_SPECS[case]
    assert old in VALID_SPEC
    Path("spec.toml").write_text(VALID_SPEC.replace(old, new, 1), encoding="utf-8")
    sentence = cli_error(capsys, "run", "spec.toml", "-o", "out")
    assert sentence.startswith("jaxaudit: spec.toml")
    assert words in sentence


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["rnu"], "invalid choice: 'rnu'"),
        (["run"], "the following arguments are required: SPEC"),
        (["run", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["run", "folder"], "folder is a folder, not a spec file"),
        (["run", "a\0b"], "cannot be read"),
        (["run", "x" * 5000], "cannot be read"),
        (["run", "binary"], "binary is not UTF-8 text"),
        (["run", "good.toml", "--force"], "unrecognized arguments: --force"),
        (["run", "good.toml", "-o"], "argument -o: expected one argument"),
        (["run", "good.toml", "-o", "folder"], "the folder folder exists and is not empty"),
        (["run", "good.toml", "-o", "good.toml"], "good.toml exists and is not a folder"),
        (["quickstart", "-o", "folder"], "the folder folder exists and is not empty"),
        (["quickstart", "--print"], "unrecognized arguments: --print"),
        (["resume"], "the following arguments are required: DIR"),
        (["resume", "nowhere"], "nowhere: there is no such folder"),
        (["resume", "good.toml"], "good.toml is not a folder"),
        (["resume", "folder"], "folder is not a run's folder: it has no spec.toml"),
        (["resume", "finished"], "the run in finished is already finished"),
        (["fork", "finished"], "the following arguments are required: SPEC"),
        (["fork", "folder", "good.toml"], "folder is not a run's folder"),
        (["fork", "unfinished", "good.toml"], "the run in unfinished is not finished"),
        (["fork", "finished", "nowhere.toml"], "nowhere.toml: there is no such file"),
        (["fork", "finished", "other.toml"], "no stored onset at step 7"),
        (["fork", "finished", "seeds.toml"], "must keep the run's seeds"),
        (["fork", "finished", "good.toml", "-o", "folder"], "the folder folder exists and is not empty"),
        (["replay", "folder"], "folder is not a run's folder"),
        (["replay", "unfinished"], "the run in unfinished is not finished"),
        (["replay", "finished", "--seed", "one"], "argument --seed: invalid int value: 'one'"),
        (["report", "nowhere"], "nowhere: there is no such folder"),
        (["report", "folder"], "folder is not a run's folder"),
        (["report", "unfinished"], "has no telemetry yet"),
        (["list", "tusks"], "invalid choice: 'tusks'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(argv, words, capsys):
    Path("good.toml").write_text(VALID_SPEC)
    Path("other.toml").write_text(VALID_SPEC.replace("onset = 10", "onset = 7"))
    Path("seeds.toml").write_text(VALID_SPEC.replace("seeds = 2", "seeds = 3"))
    Path("binary").write_bytes(b"[audit]\nname = '\xff'")
    for name, status in (("folder", None), ("finished", "finished"), ("unfinished", "started")):
        Path(name).mkdir()
        Path(name, "notes.txt").write_text("mine")
        if status:
            store = Folder(Path(name))
            store.spec.write_text(parse(VALID_SPEC).to_toml())
            store.update_environment(status=status)
    assert words in cli_error(capsys, *argv)


def test_a_run_from_start_to_report_replay_and_fork(capsys, monkeypatch):
    text = VALID_SPEC + "[run]\nchunk = 10\n"
    Path("spec.toml").write_text(text)
    assert cli.main(["run", "spec.toml"]) == 0
    assert "report: runs/small/report.html" in capsys.readouterr().out
    assert Path("runs/small/report.html").is_file()
    assert parse(Path("runs/small/spec.toml").read_text()) == parse(text).resolved()
    assert "already finished" in cli_error(capsys, "resume", "runs/small")
    assert "not empty" in cli_error(capsys, "run", "spec.toml")
    assert "unknown condition 'nothing'" in cli_error(capsys, "replay", "runs/small", "--condition", "nothing")
    assert "unknown seed 9" in cli_error(capsys, "replay", "runs/small", "--seed", "9")
    assert cli.main(["replay", "runs/small", "--seed", "1", "--condition", "lr_spike 30"]) == 0
    assert "bitwise equal" in capsys.readouterr().out
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)  # the figures were written above
    Path("more.toml").write_text(text.replace("[3, 30]", "[10, 100]").replace("small", "more"))
    assert cli.main(["fork", "runs/small", "more.toml"]) == 0
    assert Path("runs/more/report.html").is_file()
    assert cli.main(["report", "runs/more"]) == 0


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            durable.Interrupted("stopped; go on with: jaxaudit resume out"),
            130,
            "go on with: jaxaudit resume out",
        ),
        (KeyboardInterrupt(), 130, "stopped"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "the disk is full"),
        (ValueError("zarr: No space left on device"), 1, "the disk is full"),
        (PermissionError(errno.EACCES, "Permission denied", "out/x"), 1, "out/x: Permission denied"),
        (MemoryError(), 1, "out of memory"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n9 bytes"), 1, "out of memory"),
        (RuntimeError("one\ntwo"), 1, "unexpected RuntimeError: one (set JAXAUDIT_TRACEBACK=1"),
        (
            RuntimeError("Traceback (most recent call last):\n  line\nKeyError: 3\n"),
            1,
            "RuntimeError: KeyError: 3 (set",
        ),
    ],
)
def test_other_errors_are_reported_in_one_line(error, code, words, capsys, monkeypatch):
    def fail(*arguments):
        raise error

    monkeypatch.setattr(durable, "run", fail)
    Path("spec.toml").write_text(VALID_SPEC)
    assert cli.main(["run", "spec.toml", "-o", "out"]) == code
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1


def test_an_environment_variable_enables_the_traceback(capsys, monkeypatch):
    monkeypatch.setenv(cli.TRACEBACK, "1")
    monkeypatch.setattr(durable, "run", lambda *arguments: 1 / 0)
    Path("spec.toml").write_text(VALID_SPEC)
    assert cli.main(["run", "spec.toml", "-o", "out"]) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.fixture
def no_drawing_packages(monkeypatch):
    """Pretends that the drawing packages are not installed and that the report's modules are not imported yet."""
    for name in [name for name in sys.modules if name.startswith("jaxaudit.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.setitem(sys.modules, "vl_convert", None)


MISSING_PACKAGES = (
    "altair and vl_convert are not installed; install with: pip install 'altair>=6.0,<7' 'vl-convert-python>=1.8,<2'"
)


@pytest.mark.parametrize("command", ["run", "quickstart", "resume", "fork"])
def test_a_run_succeeds_without_the_drawing_packages(command, no_drawing_packages, capsys, monkeypatch):
    Path("spec.toml").write_text(VALID_SPEC)
    for name in ("run", "resume", "fork"):
        monkeypatch.setattr(durable, name, lambda *arguments: Path("runs of mine").mkdir(exist_ok=True))
    if command in ("resume", "fork"):
        Path("runs of mine").mkdir()
        Path("runs of mine/spec.toml").write_text(VALID_SPEC)
    out = ["-o", "runs of mine"]
    argv = {
        "run": ["run", "spec.toml", *out],
        "quickstart": ["quickstart", *out],
        "resume": ["resume", "runs of mine"],
        "fork": ["fork", "runs of mine", "spec.toml", *out],
    }
    assert cli.main(argv[command]) == 0
    assert capsys.readouterr().err == (
        f"note: the run is finished and stored in runs of mine, but its report was not drawn: {MISSING_PACKAGES}; draw "
        "it later with: jaxaudit report 'runs of mine'\n"
    )


@pytest.mark.parametrize("command", ["monitor", "detect"])
def test_scores_are_stored_without_the_drawing_packages(command, no_drawing_packages, capsys, monkeypatch):
    monkeypatch.setattr("jaxaudit.monitoring.monitor_logs.monitor_logs", lambda *arguments: None)
    monkeypatch.setattr("jaxaudit.monitoring.detect.detect", lambda *arguments: [Path("out")])
    Path("mine").mkdir()
    Path("mine/spec.toml").write_text(VALID_SPEC)
    arguments_of = {"monitor": ["a.csv", "--clean", "b.csv"], "detect": ["mine"]}
    assert cli.main([command, *arguments_of[command], "-o", "out"]) == 0
    assert capsys.readouterr().err == (
        f"note: the results are stored in out, but their report was not drawn: {MISSING_PACKAGES}; draw it later in "
        "Python with: from jaxaudit.report.detection_page import build; build('out')\n"
    )


def test_a_report_without_the_drawing_packages_is_refused(no_drawing_packages, capsys):
    Path("mine/telemetry.zarr").mkdir(parents=True)
    Path("mine/spec.toml").write_text(VALID_SPEC)
    assert cli_error(capsys, "report", "mine") == f"jaxaudit: the report cannot be drawn: {MISSING_PACKAGES}\n"


def test_a_missing_dependency_of_the_drawing_packages_is_reported(no_drawing_packages, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "altair")
    monkeypatch.delitem(sys.modules, "vl_convert")
    monkeypatch.setitem(sys.modules, "markupsafe", None)
    Path("mine/telemetry.zarr").mkdir(parents=True)
    Path("mine/spec.toml").write_text(VALID_SPEC)
    sentence = cli_error(capsys, "report", "mine")
    assert "a package that draws figures and reports cannot be imported (import of markupsafe halted" in sentence
    assert sentence.endswith("pip install 'altair>=6.0,<7' 'vl-convert-python>=1.8,<2' 'jinja2>=3.1,<4'\n")


def test_an_import_error_in_the_report_is_an_unexpected_error(no_drawing_packages, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxaudit.report", None)
    Path("mine/telemetry.zarr").mkdir(parents=True)
    Path("mine/spec.toml").write_text(VALID_SPEC)
    assert cli.main(["report", "mine"]) == 1
    assert "unexpected ModuleNotFoundError" in capsys.readouterr().err


def test_the_drawing_packages_are_those_of_the_project():
    dependencies = tomllib.loads((Path(cli.__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "dependencies"
    ]
    assert set(cli.DRAWING_PACKAGES.values()) <= set(dependencies)


def test_print_spec_prints_a_valid_spec(capsys):
    assert cli.main(["quickstart", "--print-spec"]) == 0
    assert parse(capsys.readouterr().out).audit.name == "quickstart"


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_name_the_package(option, capsys):
    assert cli.main([option]) == 0
    assert "jaxaudit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tasks"], "InvertedPendulum-v5"),
        (["tasks"], "python-stdlib"),
        (["learners"], "clip_value true"),
        (["perturbations"], "weight_noise parametric params 0.01 once"),
        (["interventions"], "roll_back intervention state 10 end"),
        (["metrics"], "collapse_time Returns T_c"),
        ([], "perturbations: name "),
    ],
)
def test_list_prints_registered_entries(arguments, words, capsys):
    assert cli.main(["list", *arguments]) == 0
    out = capsys.readouterr().out
    assert words in " ".join(out.split())
    assert not any(line != line.rstrip() for line in out.splitlines())


def test_a_learner_without_docstring_is_listed_by_its_name(monkeypatch, capsys):
    monkeypatch.setitem(registry.learners._entries, "silent", lambda task: None)
    assert cli.main(["list", "learners"]) == 0
    assert "silent" in capsys.readouterr().out.splitlines()


def run_in_shell(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "jaxaudit.cli.main", *argv],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_control_characters_in_names_are_escaped():
    process = run_in_shell("report", "a\x1b]0;title\x07\tb \u202egnp \N{GREEK SMALL LETTER ALPHA}", LC_ALL="C.UTF-8")
    assert process.returncode == 2
    assert "a\\x1b]0;title\\x07 b \\u202egnp \N{GREEK SMALL LETTER ALPHA}" in process.stderr


@pytest.mark.parametrize(
    "argv",
    [["run", "nowhere.toml"], *(pytest.param(argv, marks=pytest.mark.slow) for argv in (["rnu"], ["resume", "."]))],
)
def test_a_shell_command_fails_with_one_line(argv):
    process = run_in_shell(*argv)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("jaxaudit: ")
    assert len(process.stderr.splitlines()) == 1
    assert folder_digests(Path.cwd()) == {}


def test_a_closed_output_pipe_ends_the_command():
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run(
        [sys.executable, "-m", "jaxaudit", "list", "metrics"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (process.returncode, process.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.exhaustive
def test_a_wrong_spec_in_a_shell_is_refused_in_one_line():
    Path("spec.toml").write_text(
        VALID_SPEC.replace('"quadratic"', '"ppo"\nnum_envs = 2').replace('spike"', 'spike"\ntarget = "x"')
    )
    process = run_in_shell("run", "spec.toml", XDG_CACHE_HOME=str(Path.cwd() / "cache"))
    assert process.returncode == 2
    assert "[[perturbation]] 1: target 'x' of 'lr_spike' is in none of the paths" in process.stderr
    assert len(process.stderr.splitlines()) == 1
    assert [path for path in folder_digests(Path.cwd()) if not path.startswith("cache")] == ["spec.toml"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({}, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        ({"JAX_NUM_CPU_DEVICES": "3"}, 3),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}, 4),
    ],
)
def test_there_is_one_device_for_each_core(environment, devices):
    code = (
        "import jax; from pathlib import Path; from jaxaudit.cli.main import prepare_jax; prepare_jax(); "
        "print(len(jax.devices('cpu')), Path(jax.config.jax_compilation_cache_dir).parent)"
    )
    inherited = {k: v for k, v in os.environ.items() if k not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=inherited | {"XDG_CACHE_HOME": "/somewhere", "JAX_PLATFORMS": "cpu"} | environment,
        check=True,
    )
    assert process.stdout.split() == [str(devices), "/somewhere/jaxaudit"]


@pytest.mark.exhaustive
def test_a_command_caches_no_programs_if_this_is_disabled():
    code = "import jax; from jaxaudit.cli.main import *; prepare_jax(); print(jax.config.jax_compilation_cache_dir)"
    inherited = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    env = inherited | {"JAXAUDIT_CACHE": "off", "JAX_PLATFORMS": "cpu"}
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert process.stdout.strip() == "None"


def test_workers_of_an_existing_run_have_the_planned_cores(tmp_path, capsys):
    def cpus(*options):
        arguments = parser().parse_args(["resume", str(tmp_path), "--on", "local", *options])
        return cli._workers(arguments, tmp_path).cpus

    assert cpus() == 1
    (tmp_path / "plan.json").write_text('{"threads": 3}')
    assert cpus() == 3
    assert cpus("--cpus", "3") == 3
    assert not capsys.readouterr().err
    assert cpus("--cpus", "2") == 2
    assert (
        "note: the run was planned for workers of 3 cores, not 2, so results may not be bitwise equal"
        in capsys.readouterr().err
    )
