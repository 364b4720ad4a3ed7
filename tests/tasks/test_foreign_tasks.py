"""Tests environments of brax and MuJoCo Playground as tasks."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit.core.taps import Taps
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.sections import read_task
from jaxaudit.spec.tables import TomlTable
from jaxaudit.tasks import Episodes, Mujoco, make
from jaxaudit.tasks.foreign import BraxTask

PLAYGROUND = pytest.mark.skipif(
    importlib.util.find_spec("mujoco_playground") is None, reason="mujoco_playground not installed"
)


@pytest.mark.parametrize(
    ("name", "physics", "sizes"),
    [
        ("brax:fast", "auto", (2, 1)),
        pytest.param("brax:inverted_pendulum", "spring", (4, 1), marks=pytest.mark.slow),
        pytest.param("brax:halfcheetah", "mjx", (17, 6), marks=pytest.mark.slow),
        pytest.param("playground:CartpoleBalance", "auto", (5, 1), marks=[pytest.mark.slow, PLAYGROUND]),
        pytest.param("playground:CheetahRun", "mjx", (17, 6), marks=[pytest.mark.slow, PLAYGROUND]),
    ],
)
def test_brax_and_playground_environments_are_tasks(name, physics, sizes):
    env = make(name, physics)
    assert (env.observation_size, env.action_size, env.max_episode_steps) == (*sizes, 1000)
    np.testing.assert_array_equal(env.action_high, np.ones(sizes[1]))
    np.testing.assert_array_equal(env.action_low, -env.action_high)
    episodes = Episodes(env, 3, max_episode_steps=4)

    @jax.jit
    def roll(key):
        def step(state, key):
            return episodes.step(episodes.refresh(state, key), key, jnp.full((3, sizes[1]), 0.3), Taps())

        return jax.lax.scan(step, episodes.init(key), jax.random.split(key, 9))

    _, steps = roll(jax.random.key(0))
    assert steps.observation.shape == (9, 3, sizes[0])
    assert np.isfinite(steps.observation).all()
    assert np.isfinite(steps.reward).all()
    np.testing.assert_array_equal(steps.truncated[:, 0], np.arange(1, 10) % 4 == 0)


def test_the_message_names_a_missing_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"need the package 'playground': pip install 'jaxaudit\[playground\]'"):
        make("playground:CheetahRun")


def read_task_table(**task):
    return read_task(TomlTable({"task": task}, "spec.toml"))


def test_a_spec_can_name_environments_of_other_packages():
    expected = BraxTask("ant", "spring")
    assert expected.name == "brax:ant"
    assert read_task_table(kind="brax", name="ant", physics="spring") == expected
    assert read_task_table(kind="brax", name="brax:ant", physics="spring") == expected
    assert read_task_table(kind="mujoco", name="Ant-v5") == Mujoco("Ant-v5", "auto")
    for task, message in (
        ({"kind": "brax", "name": "ants"}, r"\[task\]: unknown brax task 'ants' \(did you mean 'ant'\?\)"),
        ({"kind": "brax", "name": "ant", "physics": "c"}, "unknown physics of a brax task 'c'; allowed: auto"),
        ({"kind": "mujoco", "name": "brax:ant"}, "unknown task 'brax:ant'; allowed: Ant-v5"),
        ({"kind": "mujoco", "name": "Ant-v5", "physics": "spring"}, "physics must be"),
        ({"kind": "bracks", "name": "ant"}, r"unknown kind of task 'bracks' \(did you mean 'brax'\?\)"),
    ):
        with pytest.raises(UserError, match=message):
            read_task_table(**task)
