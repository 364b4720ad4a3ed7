"""Task kinds: one that is defined here and made known by its registration, and those of the package."""

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
import quadratic  # noqa: F401  registers the learner
from probe_tasks import ProbeTask

import jaxaudit as ja
from jaxaudit.cli import printing as listing
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.registry import Registry
from jaxaudit.spec.document import parse
from jaxaudit.tasks import Mujoco, Registered, named
from jaxaudit.tasks.cartpole import CartPole
from jaxaudit.tasks.foreign import BraxTask
from jaxaudit.text import Text

SPEC = """
[audit]
seeds = 1
steps = 4
[task]
{task}
[learner]
kind = "{learner}"
"""


@dataclass(frozen=True)
class Maze:
    """Mazes that are drawn in text files."""

    kind: ClassVar[str] = "maze"
    gives: ClassVar[str] = "environment"

    name: str = field(metadata={"path": True, "words": ("smallest",)})
    slippery: float = 0.0
    doors: tuple[int, ...] = ()

    def __post_init__(self):
        if not 0 <= self.slippery < 1:
            raise ValueError(f"slippery must lie in [0, 1), not {self.slippery}")

    def make(self):
        env = ProbeTask(lambda action: action, True)
        env.max_episode_steps = 8
        return env

    @classmethod
    def listing(cls):
        return [("smallest", "one corridor"), ("<path>", "a text file")]


class Proofs:
    kind, gives, name = "proofs", "proof", "Euclid's"


@pytest.fixture
def maze(monkeypatch):
    monkeypatch.setattr(registry.task_kinds, "_entries", dict(registry.task_kinds._entries))
    ja.register("task kind", "maze")(Maze)


def spec_of(task, learner="quadratic"):
    lines = 'kind = "mujoco"\nname = "Ant-v5"' if task is None else task.replace("; ", "\n")
    return parse(SPEC.format(task=lines, learner=learner), "spec.toml")


@pytest.mark.usefixtures("maze")
def test_one_registered_class_defines_a_kind(tmp_path, monkeypatch):
    spec = spec_of('kind = "maze"; name = "smallest"; doors = [1, 2]')
    assert spec.task == Maze("smallest", doors=(1, 2))
    assert '[task]\nkind = "maze"\nname = "smallest"\nslippery = 0.0\ndoors = [\n    1,\n    2,\n]\n' in spec.to_toml()
    assert parse(spec.to_toml()) == spec
    assert "  <path>    a text file" in listing.tasks()
    assert named("maze:smallest") == Maze("smallest")
    grid = spec_of('kind = "maze"; name = "smallest"', "ppo").build()
    assert grid.program.learner == ja.learners.ppo(Maze("smallest")) == ja.learners.ppo("maze:smallest")
    for task, sentence in (
        ('kind = "maze"', "spec.toml: [task]: 'name' is missing; it must be a string"),
        ('kind = "maze"; name = "smallest"; slipery = 0.1', "unknown key 'slipery' (did you mean 'slippery'?)"),
        ('kind = "maze"; name = "smallest"; slippery = "very"', "[task]: slippery must be a number, not the string"),
        ('kind = "maze"; name = "smallest"; slippery = 2', "spec.toml: [task]: slippery must lie in [0, 1), not 2.0"),
        ('kind = "mase"; name = "smallest"', "unknown kind of task 'mase' (did you mean 'maze'?)"),
    ):
        with pytest.raises(UserError) as error:
            spec_of(task)
        assert sentence in str(error.value)


@pytest.mark.usefixtures("maze")
def test_existing_paths_become_absolute_and_words_stay_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("smallest", "a.txt", "bytes"):
        Path(name).touch()
    for name, expected in (
        ("smallest", "smallest"),
        ("a.txt", str(tmp_path / "a.txt")),
        ("no.txt", "no.txt"),
        ("", ""),
    ):
        assert spec_of(f'kind = "maze"; name = "{name}"').task.name == expected
    text = spec_of('kind = "text"; name = "a.txt"; shift = "python-docstrings"').task
    assert text == Text(str(tmp_path / "a.txt"), shift="python-docstrings")
    assert text.tokenizer == "bytes"
    learner = spec_of(None, 'language_model"\ncheckpoint = "a.txt').learner
    assert learner.settings.checkpoint == str(tmp_path / "a.txt")


@pytest.mark.usefixtures("maze")
@pytest.mark.parametrize(
    ("learner", "task", "sentence"),
    [
        ("language_model", Maze("smallest"), "trains on a task of kind 'text', not 'maze'"),
        ("language_model", Registered("CartPole-v1"), "trains on a task of kind 'text', not 'registered'"),
        ("language_model", None, "trains on a task of kind 'text', not None"),
        ("ppo", Text(), "trains on environments, not on a task of kind 'text'"),
        ("sac", Proofs(), "trains on environments, not on a task of kind 'proofs'"),
        ("td3", Registered("CartPole-v1"), "needs continuous actions; task 'CartPole-v1' has 2 discrete ones"),
    ],
)
def test_a_learner_states_which_tasks_it_needs(learner, task, sentence):
    with pytest.raises(ValueError, match=f"^learner '{learner}' {sentence}$"):
        getattr(ja.learners, learner)(task)


def test_a_name_implies_its_kind():
    assert named("CartPole-v1") == Registered("CartPole-v1")
    assert named("brax:ant", "spring") == BraxTask("ant", "spring") == BraxTask("brax:ant", "spring")
    assert named("mujoco:Ant-v5", "mjx") == Mujoco("Ant-v5", "mjx")
    with pytest.raises(registry.UnknownName, match="unknown task 'text:python-stdlib'"):
        named("text:python-stdlib")


def test_registered_tasks_are_available_as_registered_and_as_mujoco():
    for kind in ("registered", "mujoco"):
        spec = spec_of(f'kind = "{kind}"; name = "CartPole-v1"', "ppo")
        assert spec.task.kind == kind
        assert isinstance(spec.task.make(), CartPole)
        assert parse(spec.to_toml()) == spec
    assert spec_of('kind = "registered"; name = "Ant-v5"; physics = "mjx"').task == Registered("Ant-v5", "mjx")
    with pytest.raises(UserError, match=r"\[task\]: unknown task 'CartPole-v2' \(did you mean 'CartPole-v1'\?\)"):
        spec_of('kind = "registered"; name = "CartPole-v2"')


def test_every_kind_is_listed_under_its_name():
    lines = listing.tasks()
    for name in registry.task_kinds:
        kind = registry.task_kinds[name]
        assert kind.kind == name
        assert f"{name}  {registry.first_docstring_line(kind)}" in lines
    assert lines.index("  Ant-v5") > next(i for i, line in enumerate(lines) if line.startswith("mujoco  "))


def test_other_packages_add_kinds_through_an_entry_point_group(monkeypatch):
    points = [EntryPoint("maze", f"{__name__}:Maze", "jaxaudit.task_kinds")]
    monkeypatch.setattr(registry, "entry_points", lambda group: [p for p in points if p.group == group])
    assert list(Registry("task kind")) == ["maze"]
    assert list(Registry("task")) == []


def test_an_entry_point_may_be_a_module_that_registers_its_entry(monkeypatch, tmp_path):
    (tmp_path / "plugin_of_tests.py").write_text(
        "from jaxaudit.runtime import registry\nregistry.tasks.register('maze-v7', print)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    point = EntryPoint("maze-v7", "plugin_of_tests", "jaxaudit.tasks")
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    tasks = Registry("task")
    monkeypatch.setattr(registry, "tasks", tasks)
    assert tasks["maze-v7"] is print
    second_registry = Registry("task")
    with pytest.raises(ValueError, match="is the module plugin_of_tests, which registers no task of that name"):
        list(second_registry)
