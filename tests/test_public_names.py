"""Every public name has a docstring whose first paragraph is a sentence."""

import functools
import inspect
import subprocess
import sys

import pytest

import jaxaudit as ja
from jaxaudit.core.perturbation import Kind
from jaxaudit.core.remedy import RemedyKind

MODULES = ("dialogues", "learners", "metrics", "remedies", "statistics", "tasks", "text")


def public_names():
    """Yields dotted public names with their objects, where these are defined in this package."""
    for name in dir(ja):
        yield name, getattr(ja, name)
        if name in MODULES:
            module = getattr(ja, name)
            for inner in getattr(module, "__all__", None) or (n for n in dir(module) if not n.startswith("_")):
                value = getattr(module, inner)
                if (getattr(value, "__module__", None) or "").startswith("jaxaudit"):
                    yield f"{name}.{inner}", value


def needs_docstring(value):
    return (
        inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value)
        or isinstance(value, Kind | RemedyKind)
    )  # fmt: skip


NAMES = {name: value for name, value in public_names() if needs_docstring(value)}


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_docstring(name):
    text = inspect.getdoc(NAMES[name]) or ""
    first = text.split("\n\n")[0]
    assert len(first.split()) > 6, f"{name}: {first!r}"
    assert first.rstrip().endswith((".", "`", ")", ":")), f"{name}: {first!r}"


@pytest.mark.parametrize("name", [name for name, value in NAMES.items() if inspect.isclass(value)])
def test_no_property_of_a_public_class_begins_with_a_type(name):
    """Sphinx reads "text: more" in the first line of a property's docstring as its type."""
    for attribute in vars(NAMES[name]).values():
        if isinstance(attribute, property | functools.cached_property):
            assert ": " not in (inspect.getdoc(attribute) or "").split("\n")[0]


def test_all_public_modules_are_reachable():
    assert set(MODULES) <= set(dir(ja))
    assert len(NAMES) > 100


def test_the_package_alone_registers_its_tasks_and_learners():
    """Other tests import modules that register something, so this runs in a fresh process."""
    code = "from jaxaudit.runtime import registry; print(*registry.tasks, *registry.task_kinds, *registry.learners)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
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
    assert expected <= set(process.stdout.split())
