"""The costs of a process besides training: lazy imports, compiled programs that are cached, and a quick exit."""

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


def imported_heavy_packages(code):
    """Returns the heavy packages that a process has imported after running some code."""
    script = f"{code}; import sys; print(*({HEAVY!r} & set(sys.modules)), file=sys.stderr)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(process.stderr.split())


def test_help_and_the_package_import_nothing_heavy():
    assert imported_heavy_packages("from jaxaudit.cli.main import main; main(['--help'])") == set()
    assert imported_heavy_packages("import jaxaudit") == set()


def test_a_custom_learner_needs_no_physics():
    assert imported_heavy_packages(
        "import jaxaudit as ja; ja.Learner, ja.Optimizer, ja.weight_noise, ja.audit"
    ).isdisjoint({"mujoco", "brax", "altair"})


def test_exit_runs_registered_functions_and_no_destructors():
    script = """if True:
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
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout == "asked for\n"


def test_the_public_names_are_those_for_type_checkers():
    tree = ast.parse(Path(ja.__file__).read_text())
    type_checking = next(node for node in tree.body if isinstance(node, ast.If))
    names = {alias.name for node in type_checking.body for alias in node.names} - {"*"}
    assert names | set(ja.perturbations.__all__) == set(ja.__all__) == set(dir(ja))
    assert all(hasattr(ja, name) for name in ja.__all__)


def test_an_unknown_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'adit'"):
        ja.adit  # noqa: B018


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """Returns the folder of cached programs if the caller has set none."""
    previous = jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(engine, "compilation_cache_folder", lambda: tmp_path / "ours")
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield tmp_path / "ours"
    jax.config.update("jax_compilation_cache_dir", previous)
    compilation_cache.reset_cache()


def run_small_audit(factor):
    """Runs a small audit, whose program differs from others by `factor`."""

    def step(x, key, taps):
        x = x - taps("learning_rate", 0.01) * factor * x
        return x, {"performance": -jnp.sum(x**2)}

    ja.audit(ja.Learner(lambda key: jax.random.normal(key, (3,)), step), [ja.lr_spike(onset=2)], seeds=2, steps=20)


def test_programs_are_cached_between_processes(cache_folder):
    run_small_audit(1.25)
    assert list(cache_folder.glob("*train*"))
    assert jax.config.jax_compilation_cache_dir is None, "the caller's setting has changed"
    before = set(cache_folder.iterdir())
    jax.jit(lambda x: x + 0.123)(jnp.ones(5))
    assert set(cache_folder.iterdir()) == before


def test_no_cache_is_written_if_the_caller_disables_it(cache_folder, monkeypatch):
    monkeypatch.setenv(engine.CACHE_VARIABLE, "off")
    run_small_audit(1.5)
    assert not cache_folder.exists()


def test_the_callers_cache_folder_is_kept(cache_folder):
    jax.config.update("jax_compilation_cache_dir", str(cache_folder.parent / "theirs"))
    run_small_audit(1.75)
    assert not cache_folder.exists()
    assert list((cache_folder.parent / "theirs").glob("*train*"))
    assert jax.config.jax_compilation_cache_dir == str(cache_folder.parent / "theirs")


def test_a_cache_folder_set_during_an_audit_is_kept(cache_folder):
    callers_folder = str(cache_folder.parent / "theirs")
    engine._persistent_cache.enter()
    jax.config.update("jax_compilation_cache_dir", callers_folder)
    engine._persistent_cache.leave()
    assert jax.config.jax_compilation_cache_dir == callers_folder


def test_a_program_whose_compilation_failed_is_compiled_again(monkeypatch):
    from jaxaudit.execution import engine

    def fail_to_compile(lowered):
        pending = engine.Future()
        pending.set_exception(RuntimeError("RESOURCE_EXHAUSTED: no memory"))
        return pending

    with monkeypatch.context() as patch:
        patch.setattr(engine, "compile_in_background", fail_to_compile)
        with pytest.raises(RuntimeError, match="no memory"):
            run_small_audit(2.25)
    run_small_audit(2.25)
