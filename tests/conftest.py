"""Two CPU devices for every test, as the command line sets them on a two-core machine; a text to train on.

What was compiled in one test is not compiled again in another, nor in the next run of the tests.
"""

import gc

import jax
import numpy as np
import pytest
from hurry import compile_in_a_hurry
from places import ROOT
from server import Done, Server

import jaxaudit.report
from jaxaudit.cli import main as cli
from jaxaudit.execution import engine
from jaxaudit.runtime.machine import collect_garbage_rarely
from jaxaudit.text import Text

collect_garbage_rarely()
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # small programs, too: every file has the same ones
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody looks for lines in these programs

AS_FOR_USERS = ("default_compilation", "slow")
"""Markers of tests whose programs are compiled as for users: promises bit for bit, and what trains for minutes."""

LATEST = {"quickly": False}
"""How the test before was compiled."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Has XLA compile quickly, or as for users; drops programs of the other way, whose roundings differ."""
    quickly = not any(item.get_closest_marker(name) for name in AS_FOR_USERS)
    if quickly != LATEST["quickly"]:
        compile_in_a_hurry(quickly)
        engine.forget_programs()
    LATEST["quickly"] = quickly


def pytest_collection_finish():
    """Modules are never garbage, and every run looks for some: it takes a third of the time without them."""
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Files that are compiled alike follow each other, and the longest are first, where several workers share them."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in (AS_FOR_USERS[0], "long")])


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Runs commands in processes of their own."""
    serving = Server(tmp_path_factory.mktemp("server"))
    yield serving
    serving.close()


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def here(capsys, monkeypatch):
    """Runs a command in this process, where most programs are compiled already."""

    def command(*argv):
        capsys.readouterr()
        code = cli.main([str(a) for a in argv])
        return Done(code, *capsys.readouterr(), 0.0)

    monkeypatch.setattr(cli, "prepare_jax", lambda: None)
    monkeypatch.setattr(cli, "claim_cores", lambda count: None)  # this process has other tests to run
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
