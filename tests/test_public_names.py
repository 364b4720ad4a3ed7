"""The public names: each has a docstring, which is a sentence."""

import inspect
import subprocess
import sys

import pytest

import jaxaudit as ja
from jaxaudit.core.perturbation import Kind
from jaxaudit.core.remedy import RemedyKind

MODULES = ("dialogues", "learners", "metrics", "remedies", "statistics", "tasks", "text")


def public_names():
    """Dotted names with the objects of this package that they stand for."""
    for name in dir(ja):
        yield name, getattr(ja, name)
        if name in MODULES:
            module = getattr(ja, name)
            for inner in getattr(module, "__all__", None) or (n for n in dir(module) if not n.startswith("_")):
                found = getattr(module, inner)
                if (getattr(found, "__module__", None) or "").startswith("jaxaudit"):
                    yield f"{name}.{inner}", found


def described(found):
    return (
        inspect.isroutine(found) or inspect.isclass(found) or inspect.ismodule(found)
        or isinstance(found, Kind | RemedyKind)
    )  # fmt: skip


NAMES = {name: found for name, found in public_names() if described(found)}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring(name):
    text = inspect.getdoc(NAMES[name]) or ""
    first = text.split("\n\n")[0]
    assert len(first.split()) > 6, f"{name}: {first!r}"
    assert first.rstrip().endswith((".", "`", ")", ":")), f"{name}: {first!r}"


def test_the_public_modules_are_all_there():
    assert set(MODULES) <= set(dir(ja))
    assert len(NAMES) > 100


def test_what_the_package_registers_is_known_in_a_process_that_has_imported_nothing_else():
    """Other tests import modules that register something; a user's process does not."""
    code = "from jaxaudit.runtime import registry; print(*registry.tasks, *registry.task_kinds, *registry.learners)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = {
        "CartPole-v1",
        "HalfCheetah-v5",
        "brax",
        "gymnax",
        "playground",
        "dialogue",
        "text",
        "ppo",
        "grpo",
        "sac",
    }
    assert expected <= set(done.stdout.split())
