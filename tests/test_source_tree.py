"""The command line from a source tree on the path: nothing of the package is installed, nor what draws reports."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from cli_errors import folder_digests
from small_runs import spec_header
from worker_runs import install_plugin

import jaxaudit

SOURCE = Path(jaxaudit.__file__).parent
LEFT_OUT = "jaxaudit", "__editable__", "altair", "vl_convert"
SPEC = (
    spec_header(seeds=1, steps=12).replace(
        'kind = "mujoco"\nname = "InvertedPendulum-v5"', 'kind = "registered"\nname = "CartPole-v1"'
    )
    + '[[perturbation]]\nkind = "weight_noise"\nmagnitude = 1.0\nonset = 6\n'
)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Runs Python without its site module, which loads editable installations, in a folder of its own."""
    place = tmp_path_factory.mktemp("tree")
    (place / "tree").mkdir()
    for name in ("jaxaudit", "kernels"):
        (place / "tree" / name).symlink_to(SOURCE.parent / name)
    (place / "packages").mkdir()
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(site).iterdir():
            if not path.name.startswith(LEFT_OUT):
                (place / "packages" / path.name).symlink_to(path)
    environment = install_plugin(place / "plugins")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(place / "tree"), str(place / "packages"), environment["PYTHONPATH"]]
    )
    (place / "spec.toml").write_text(SPEC)

    def python(*argv):
        return subprocess.run(
            [sys.executable, "-S", *argv],
            cwd=place,
            capture_output=True,
            text=True,
            env=os.environ | environment,
            check=False,
        )

    return python, place


VERSION = "0.3.0 (source tree)"


@pytest.mark.exhaustive
def test_a_run_is_trained_and_stored_and_the_report_is_told_to_be_missing(command):
    python, place = command
    done = python("-m", "jaxaudit", "run", "spec.toml", "-o", "run")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "note: the run is finished and stored in run, but its report was not drawn: altair and vl_convert are not "
        "installed; install with: pip install 'altair>=6.0,<7' 'vl-convert-python>=1.8,<2'; draw it later with: "
        "jaxaudit report run"
    )
    assert "Traceback" not in done.stderr
    environment = json.loads((place / "run" / "environment.json").read_text())
    assert (environment["status"], environment["jaxaudit"]) == ("finished", VERSION)
    assert (place / "run" / "summary.csv").exists()
    before = folder_digests(place / "run")
    done = python("-m", "jaxaudit.cli.main", "report", "run")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith("jaxaudit: the report cannot be drawn: altair and vl_convert are not installed;")
    assert folder_digests(place / "run") == before


def test_the_kernels_are_found_under_their_own_name_alone(command):
    python, place = command
    code = f"""if True:
        import importlib.util, sys
        import jaxaudit
        sys.path.remove({str(place / "tree")!r})
        import jaxaudit.kernels.gae
        print(jaxaudit.kernels.gae.__file__, "kernels" in sys.modules, importlib.util.find_spec("kernels"))
    """
    done = python("-c", code)
    assert done.stdout.split() == [str(place / "tree" / "kernels" / "gae.py"), "False", "None"], done.stderr


def test_the_version_is_that_of_the_tree(command):
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert jaxaudit.__version__ == project["version"]
    assert f"{jaxaudit.__version__} (source tree)" == VERSION
    done = command[0]("-m", "jaxaudit", "--version")
    assert (done.returncode, done.stdout) == (0, f"jaxaudit {VERSION}\n")


def test_every_package_of_the_tree_is_packaged():
    setuptools = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    places = (path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("__init__.py"))
    packages = {".".join(place.parts) for place in places} | {"jaxaudit.kernels"}
    assert sorted(packages) == setuptools["packages"]
