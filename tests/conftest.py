"""Pytest hooks and shared fixtures. Every test runs on two CPU devices, as the command line does on two cores.

Programs that one test compiles are stored in a persistent cache, for the other tests and for later test runs.
"""

import gc

import jax
import numpy as np
import pytest
from directories import ROOT
from fast_compilation import set_fast_compilation
from server import CommandResult, Server

import jaxaudit.report
from jaxaudit.cli import main as cli
from jaxaudit.execution import engine
from jaxaudit.runtime.machine import collect_garbage_rarely
from jaxaudit.text import Text

collect_garbage_rarely()
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # small programs are shared by many test files
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads these tracebacks

AS_FOR_USERS = ("default_compilation", "slow")
"""The markers of tests that are compiled as for users: they compare results bit for bit, or train for minutes."""

LAST_COMPILATION = {"fast": False}
"""Whether the programs of the previous test were compiled with `set_fast_compilation`."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Selects fast compilation or that of users, and drops all programs on a change, since they round differently."""
    fast = not any(item.get_closest_marker(name) for name in AS_FOR_USERS)
    if fast != LAST_COMPILATION["fast"]:
        set_fast_compilation(fast)
        engine.forget_programs()
    LAST_COMPILATION["fast"] = fast


def pytest_collection_finish():
    """Freezes the imported modules. They are never garbage, and searching them takes a third of the tests' time."""
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    """With several workers, groups tests by their way of compilation, and puts the longest files first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in (AS_FOR_USERS[0], "long")])


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """Returns a `Server`, which runs each command in a fresh process."""
    command_server = Server(tmp_path_factory.mktemp("server"))
    yield command_server
    command_server.close()


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def run_cli(capsys, monkeypatch):
    """Returns a function that runs a command in this process, where most programs are already compiled."""

    def command(*argv):
        capsys.readouterr()
        code = cli.main([str(argument) for argument in argv])
        return CommandResult(code, *capsys.readouterr(), 0.0)

    monkeypatch.setattr(cli, "prepare_jax", lambda: None)
    monkeypatch.setattr(cli, "claim_cores", lambda count: None)  # the other tests need this process's cores
    monkeypatch.setattr(jaxaudit.report, "build", lambda folder: folder)
    return command


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Returns a text with structure to train on, with another text for the distribution shift."""
    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(0)
    words = ["training ", "is ", "stable ", "until ", "it ", "falls ", "over. "]
    (folder / "a.txt").write_text("".join(random.choice(words, 4000)))
    (folder / "b.txt").write_text("ZYX" * 500)
    return Text(name=str(folder / "a.txt"), shift=str(folder / "b.txt"))
