"""Learners that need no task: their specs have no table [task]."""

import pytest
import taskless  # noqa: F401  # registers the learner
from log_files import user_error

from jaxaudit.cli.main import main
from jaxaudit.spec.document import parse

SPEC = """
[audit]
seeds = 2
steps = 30
[learner]
kind = "taskless"
size = 2
[metrics]
window = 5
hold = 5
[[perturbation]]
kind = "lr_spike"
magnitude = 3.0
onset = 10
"""


@pytest.mark.exhaustive
def test_a_spec_without_task_is_valid_if_its_learner_needs_none(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxaudit.report.page.write_figures", lambda *_: None)
    spec = parse(SPEC)
    assert spec.task is None
    assert parse(spec.to_toml()) == spec
    assert "[task]" not in spec.to_toml()
    path = tmp_path / "spec.toml"
    path.write_text(SPEC)
    assert main(["run", str(path), "-o", str(tmp_path / "run")]) == 0
    assert main(["replay", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").exists()


def test_a_missing_or_superfluous_task_is_refused_in_one_sentence():
    with_task = SPEC.replace("[learner]", '[task]\nkind = "registered"\nname = "CartPole-v1"\n[learner]')
    assert user_error(lambda: parse(with_task)).endswith(
        "the table [task] must be left out, because learner 'taskless' takes no task"
    )
    without_task = SPEC.replace('kind = "taskless"\nsize = 2', 'kind = "ppo"')
    assert user_error(lambda: parse(without_task)).endswith("the table [task] is missing, which learner 'ppo' needs")
