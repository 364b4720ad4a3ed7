"""The command line from a source tree, where neither the package nor the report's packages are installed."""

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
EXCLUDED = "jaxaudit", "__editable__", "altair", "vl_convert"
SPEC = (
    spec_header(seeds=1, steps=12).replace(
        'kind = "mujoco"\nname = "InvertedPendulum-v5"', 'kind = "registered"\nname = "CartPole-v1"'
    )
    + '[[perturbation]]\nkind = "weight_noise"\nmagnitude = 1.0\nonset = 6\n'
)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Returns a function that runs Python in a fresh folder, without the site module and editable packages."""
    folder = tmp_path_factory.mktemp("tree")
    (folder / "tree").mkdir()
    for name in ("jaxaudit", "kernels"):
        (folder / "tree" / name).symlink_to(SOURCE.parent / name)
    (folder / "packages").mkdir()
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(site).iterdir():
            if not path.name.startswith(EXCLUDED):
                (folder / "packages" / path.name).symlink_to(path)
    environment = install_plugin(folder / "plugins")
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(folder / "tree"), str(folder / "packages"), environment["PYTHONPATH"]]
    )
    (folder / "spec.toml").write_text(SPEC)

    def python(*argv):
        return subprocess.run(
            [sys.executable, "-S", *argv],
            cwd=folder,
            capture_output=True,
            text=True,
            env=os.environ | environment,
            check=False,
        )

    return python, folder


VERSION = "0.3.0 (source tree)"


@pytest.mark.exhaustive
def test_a_run_is_trained_and_its_missing_report_is_explained(command):
    python, folder = command
    process = python("-m", "jaxaudit", "run", "spec.toml", "-o", "run")
    assert process.returncode == 0, process.stderr
    assert process.stderr.splitlines()[-1] == (
        "note: the run is finished and stored in run, but its report was not drawn: altair and vl_convert are not "
        "installed; install with: pip install 'altair>=6.0,<7' 'vl-convert-python>=1.8,<2'; draw it later with: "
        "jaxaudit report run"
    )
    assert "Traceback" not in process.stderr
    environment = json.loads((folder / "run" / "environment.json").read_text())
    assert (environment["status"], environment["jaxaudit"]) == ("finished", VERSION)
    assert (folder / "run" / "summary.csv").exists()
    before = folder_digests(folder / "run")
    process = python("-m", "jaxaudit.cli.main", "report", "run")
    assert (process.returncode, len(process.stderr.splitlines())) == (2, 1)
    assert process.stderr.startswith("jaxaudit: the report cannot be drawn: altair and vl_convert are not installed;")
    assert folder_digests(folder / "run") == before


def test_kernels_are_importable_only_as_part_of_the_package(command):
    python, folder = command
    code = f"""if True:
        import importlib.util, sys
        import jaxaudit
        sys.path.remove({str(folder / "tree")!r})
        import jaxaudit.kernels.gae
        print(jaxaudit.kernels.gae.__file__, "kernels" in sys.modules, importlib.util.find_spec("kernels"))
    """
    process = python("-c", code)
    assert process.stdout.split() == [str(folder / "tree" / "kernels" / "gae.py"), "False", "None"], process.stderr


def test_the_version_is_that_of_the_source_tree(command):
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["project"]
    assert jaxaudit.__version__ == project["version"]
    assert f"{jaxaudit.__version__} (source tree)" == VERSION
    process = command[0]("-m", "jaxaudit", "--version")
    assert (process.returncode, process.stdout) == (0, f"jaxaudit {VERSION}\n")


def test_every_package_of_the_source_tree_is_packaged():
    setuptools = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = (path.parent.relative_to(SOURCE.parent) for path in SOURCE.rglob("__init__.py"))
    packages = {".".join(folder.parts) for folder in folders} | {"jaxaudit.kernels"}
    assert sorted(packages) == setuptools["packages"]
