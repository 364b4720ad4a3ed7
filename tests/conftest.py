"""Two CPU devices for every test, as the command line sets them on a two-core machine; a text to train on.

What was compiled in one test is not compiled again in another, nor in the next run of the tests.
"""

import gc
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hurry import compile_in_a_hurry
from server import Done, Server

import jaxaudit.report
from jaxaudit.cli import main as cli
from jaxaudit.execution import engine
from jaxaudit.runtime.machine import collect_garbage_seldom
from jaxaudit.text import Text

sys.path.append(str(Path(__file__).parents[1] / "experiments" / "detection"))  # planted.py

collect_garbage_seldom()
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent.parent / ".pytest_cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # small programs, too: every file has the same ones
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody looks for lines in these programs


LONG = (
    "promises",
    "durable",
    "closed_loop",
    "replay",
    "runs_of_0_3",
    "language_model",
    "report",
    "off_policy",
    "off_policy_audit",
    "hosts",
    "tasks",
    "dialogue_beginnings",
    "dialogue_durable",
    "dialogue_learner",
    "dialogue_learner_telemetry",
    "dialogue_reference",
    "dialogue_sites",
    "windows_end",
    "model_axis",
    "undisturbed",
    "undisturbed_dialogues",
)
"""Files of half a minute and more. A worker runs whole files: begun late, one would keep it when the rest are done."""


AS_FOR_USERS = (
    "promises",
    "durable",
    "replay",
    "runs_of_0_3",
    "closed_loop",
    "lane_batches",
    "shards",
    "ray",
    "local_workers",
    "workers",
    "memory",
    "lowering",
    "cartpole",
)
"""Files whose promises, bit for bit or byte for byte, are of what XLA makes for users."""


LATEST: dict[str, bool] = {}
"""How the file before was compiled."""

NOT_SLOW = "not slow"
"""What the selections of the default run and of the exhaustive one have in common."""


@pytest.fixture(autouse=True, scope="module")
def compiled_in_a_hurry(request):
    """In all other files; not when slow tests are asked for: then everything is as for users."""
    quickly = _name(request.path) not in AS_FOR_USERS and NOT_SLOW in request.config.option.markexpr
    compile_in_a_hurry(quickly)
    if quickly != LATEST.get("quickly", False):  # or a program of another file would be taken, which rounds otherwise
        engine._compiled.cache_clear()
        engine._initial.cache_clear()
        jax.clear_caches()
    LATEST["quickly"] = quickly
    yield
    compile_in_a_hurry(False)


def pytest_collection_finish():
    """Modules are never garbage, and every run looks for some: it takes a third of the time without them."""
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Files that are compiled alike follow each other, and the longest are first, where several workers share them."""
    if not hasattr(config, "workerinput"):
        return

    def turn(item):
        name = _name(item.path)
        return name not in AS_FOR_USERS, LONG.index(name) if name in LONG else len(LONG)

    items.sort(key=turn)


def _name(path):
    return path.stem.removeprefix("test_")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Runs commands in processes of their own."""
    serving = Server(tmp_path_factory.mktemp("server"))
    yield serving
    serving.close()


@pytest.fixture
def here(capsys, monkeypatch):
    """Runs a command in this process, where most programs are compiled already."""

    def command(*argv):
        capsys.readouterr()
        code = cli.main([str(a) for a in argv])
        return Done(code, *capsys.readouterr(), 0.0)

    monkeypatch.setattr(cli, "prepare_jax", lambda: None)
    monkeypatch.setattr(cli, "occupy", lambda count: None)  # this process has other tests to run
    monkeypatch.setattr(jaxaudit.report, "build", lambda folder: folder)
    return command


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A text with structure, and another."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    words = ["training ", "is ", "stable ", "until ", "it ", "falls ", "over. "]
    (folder / "a.txt").write_text("".join(random.choice(words, 4000)))
    (folder / "b.txt").write_text("ZYX" * 500)
    return Text(name=str(folder / "a.txt"), shift=str(folder / "b.txt"))
