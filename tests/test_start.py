"""What a process pays besides training: imports when they are wanted, programs compiled once for all, no long end."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

import jaxaudit as ja
from jaxaudit.execution import engine

HEAVY = {"jax", "numpy", "pandas", "xarray", "scipy", "mujoco", "brax", "altair"}


def loaded(code):
    """The heavy packages that a process has imported after some code."""
    words = f"{code}; import sys; print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


def test_help_and_the_package_alone_import_nothing_heavy():
    assert loaded("from jaxaudit.cli.main import main; main(['--help'])") == set()
    assert loaded("import jaxaudit") == set()


def test_an_own_learner_needs_no_physics():
    assert loaded("import jaxaudit as ja; ja.Learner, ja.Optimizer, ja.weight_noise, ja.audit").isdisjoint(
        {"mujoco", "brax", "altair"}
    )


def test_a_process_ends_without_taking_apart_what_it_has_but_for_what_was_asked_of_it():
    words = """if True:
        import atexit
        from jaxaudit.runtime.machine import collect_garbage_rarely

        class Circle:
            def __init__(self):
                self.itself = self

            def __del__(self):
                print("taken apart")

        collect_garbage_rarely()
        atexit.register(print, "asked for")
        circle = Circle()
    """
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "asked for\n"


def test_the_public_names_are_those_that_editors_are_told_of():
    tree = ast.parse(Path(ja.__file__).read_text())
    told = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in told.body for alias in node.names} - {"*"}
    assert names | set(ja.perturbations.__all__) == set(ja.__all__) == set(dir(ja))
    assert all(hasattr(ja, name) for name in ja.__all__)


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'adit'"):
        ja.adit  # noqa: B018


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """The folder that programs go to where the caller has said nothing."""
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(engine, "compilation_cache_folder", lambda: tmp_path / "ours")
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "ours"
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def an_audit(unlike):
    """A small one, of a program that is like no other's."""

    def step(x, key, taps):
        x = x - taps("learning_rate", 0.01) * unlike * x
        return x, {"performance": -jnp.sum(x**2)}

    ja.audit(ja.Learner(lambda key: jax.random.normal(key, (3,)), step), [ja.lr_spike(onset=2)], seeds=2, steps=20)


def test_programs_are_kept_between_processes(ours):
    an_audit(1.25)
    assert list(ours.glob("*train*"))
    assert jax.config.jax_compilation_cache_dir is None, "what the caller compiles is not our business"
    before = set(ours.iterdir())
    jax.jit(lambda x: x + 0.123)(jnp.ones(5))
    assert set(ours.iterdir()) == before


def test_not_where_the_caller_says_no(ours, monkeypatch):
    monkeypatch.setenv(engine.CACHE_VARIABLE, "off")
    an_audit(1.5)
    assert not ours.exists()


def test_the_callers_own_cache_stays(ours):
    jax.config.update("jax_compilation_cache_dir", str(ours.parent / "theirs"))
    an_audit(1.75)
    assert not ours.exists()
    assert list((ours.parent / "theirs").glob("*train*"))
    assert jax.config.jax_compilation_cache_dir == str(ours.parent / "theirs")


def test_a_cache_chosen_meanwhile_stays(ours):
    theirs = str(ours.parent / "theirs")
    engine._persistent_cache.enter()
    jax.config.update("jax_compilation_cache_dir", theirs)
    engine._persistent_cache.leave()
    assert jax.config.jax_compilation_cache_dir == theirs


def test_a_program_that_could_not_be_compiled_is_tried_again(monkeypatch):
    from jaxaudit.execution import engine

    def refused(lowered):
        pending = engine.Future()
        pending.set_exception(RuntimeError("RESOURCE_EXHAUSTED: no memory"))
        return pending

    with monkeypatch.context() as patched:
        patched.setattr(engine, "compile_in_background", refused)
        with pytest.raises(RuntimeError, match="no memory"):
            an_audit(2.25)
    an_audit(2.25)
