"""Which float32 matrix products may use a device's faster, less precise units, and which never do."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brax.envs.base import Env, State
from jaxpr_equations import equations
from quadratic import quadratic
from small_runs import SPEC

import jaxaudit as ja
from jaxaudit.core.program import run
from jaxaudit.core.taps import Taps
from jaxaudit.execution.grid_program import inputs
from jaxaudit.kernels import coherence, linear_algebra
from jaxaudit.monitoring.charts import Chart, _scan_runs
from jaxaudit.monitoring.meta_state import Training, _filter_runs, _train_members
from jaxaudit.monitoring.state_space import LRU
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runs.replay import replay
from jaxaudit.runtime import tracing
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import parse
from jaxaudit.tasks.episodes import Episodes, evaluate

GPU, CPU = SimpleNamespace(platform="gpu"), SimpleNamespace(platform="cpu")
PPO = """
[audit]
seeds = 2
steps = 4
[task]
kind = "mujoco"
name = "CartPole-v1"
[learner]
kind = "ppo"
num_envs = 2
hidden = [4]
rollout_length = 4
minibatch_size = 4
evaluations = 1
evaluation_episodes = 1
"""
FULL, TF32 = "HIGHEST", "HIGH"


class LinearSystem(Env):
    """A linear system whose step and reset multiply matrices."""

    observation_size, action_size, backend = 3, 2, "none"

    def reset(self, rng):
        x = jnp.eye(3) @ jax.random.normal(rng, (3,))
        return State(None, x, jnp.float32(0), jnp.float32(0))

    def step(self, state, action):
        x = jnp.eye(3) @ state.obs + jnp.ones((3, 2)) @ action
        return state.replace(obs=x, reward=x.sum())


def matmul_precisions(function, *arguments):
    """Returns the precisions of the float32 matrix products in a function's trace."""
    precisions = set()
    for equation in equations(jax.make_jaxpr(function)(*arguments).jaxpr):
        if equation.primitive.name == "dot_general" and equation.invars[0].aval.dtype == jnp.float32:
            precision = equation.params["precision"]
            precisions.add(None if precision is None else precision[0].name)
    return precisions


@pytest.mark.parametrize(
    ("devices", "requested", "resolved"),
    [
        ([CPU], "float32", None),
        ([CPU, CPU], "tf32", None),
        ([GPU], "float32", "float32"),
        ([GPU], "tf32", "tf32"),
        ([SimpleNamespace(platform="tpu")], "float32", "float32"),
    ],
)
def test_the_precision_depends_on_devices_and_jaxs_setting(devices, requested, resolved):
    assert tracing.resolve_precision(devices, requested) == resolved
    with jax.default_matmul_precision("high"):
        assert tracing.resolve_precision(devices, requested) == "high"


def test_unknown_precisions_are_refused():
    with pytest.raises(ValueError, match="matmul_precision must be 'float32' or 'tf32', not 'half'"):
        tracing.resolve_precision([CPU], "half")
    with pytest.raises(UserError, match="matmul_precision"):
        parse(SPEC.replace("[audit]", '[audit]\nmatmul_precision = "bfloat16"'))


@pytest.mark.parametrize(
    ("resolved", "networks", "physics"),
    [(None, None, None), ("float32", FULL, FULL), ("tf32", TF32, FULL), ("high", TF32, TF32)],
)
def test_networks_may_be_less_precise_than_physics(resolved, networks, physics):
    episodes, layer = Episodes(LinearSystem(), 2, 10), nn.Dense(4)
    params = layer.init(jax.random.key(0), jnp.ones((2, 3)))

    def with_resolved(function):
        def wrapped(*arguments):
            with tracing.with_precision(resolved):
                return function(*arguments)

        return wrapped

    def step_once(key):
        return episodes.step(episodes.init(key), key, jnp.ones((2, 2)), Taps())

    def evaluate_once(key):
        return evaluate(LinearSystem(), lambda x: x[:, :2], key, 2, 3)

    def gradient(params, x):
        return jax.grad(lambda params: jnp.sum(layer.apply(params, x)))(params)

    key = jax.random.key(0)
    assert matmul_precisions(with_resolved(gradient), params, jnp.ones((2, 3))) == {networks}
    assert matmul_precisions(with_resolved(step_once), key) == {physics}
    assert matmul_precisions(with_resolved(evaluate_once), key) == {physics}


@pytest.mark.parametrize("precision", ["tf32", "tensorfloat32"])
def test_statistics_of_the_kernels_have_full_precision(precision):
    with tracing.with_precision(precision):
        stack = {"w": jnp.ones((3, 4, 5))}
        assert matmul_precisions(coherence.dominant_share, stack) == {FULL}
        assert matmul_precisions(linear_algebra.singular_values, jnp.ones((4, 3))) == {FULL}
        assert matmul_precisions(lambda key: linear_algebra.orthogonal(key, (4, 3)), jax.random.key(0)) == {FULL}


@pytest.mark.parametrize(
    ("resolved", "expected"),
    [
        pytest.param(None, {None, FULL}, marks=pytest.mark.exhaustive),
        pytest.param("float32", {FULL}, marks=pytest.mark.exhaustive),
        ("tf32", {TF32, FULL}),
    ],
)
def test_a_grid_is_traced_with_the_programs_precision(resolved, expected):
    grid = parse(PPO).build()
    assert grid.program.matmul_precision is None
    input_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs(grid))
    program = dataclasses.replace(grid.program, matmul_precision=resolved)
    assert matmul_precisions(functools.partial(run, program), input_shapes) | {FULL} == expected


@dataclasses.dataclass(frozen=True)
class MultiplyingWatch:
    """A monitor that multiplies matrices, in the program of a learner that does not."""

    provenance: str = ""

    def begin(self):
        return jnp.eye(3)

    def follow(self, state, telemetry):
        return state @ state, telemetry["performance"]


@pytest.mark.parametrize(("resolved", "expected"), [(None, None), ("float32", FULL), ("tf32", FULL), ("high", TF32)])
def test_a_monitor_has_full_precision_unless_jax_is_configured_otherwise(resolved, expected):
    grid = ja.plan(quadratic(None), [], seeds=1, steps=3, watch=lambda *_: MultiplyingWatch())
    program = dataclasses.replace(grid.program, matmul_precision=resolved)
    precisions = matmul_precisions(functools.partial(run, program), inputs(grid))
    assert precisions - {FULL} == {expected} - {FULL}, "the learner's cosines set their own precision"
    assert expected in precisions


def test_a_setting_takes_effect_on_gpus(monkeypatch):
    """The devices are this machine's. Only the resolution of the precision pretends to be on GPUs."""
    monkeypatch.setattr(tracing, "resolve_precision", lambda devices, requested: requested)
    for precision in ("float32", "tf32"):
        assert (
            parse(PPO.replace("[audit]", f'[audit]\nmatmul_precision = "{precision}"')).build().program.matmul_precision
            == precision
        )
    assert parse(PPO).build().program.matmul_precision == "float32"
    arguments = {"seeds": 1, "steps": 3, "matmul_precision": "tf32"}
    assert ja.plan(quadratic(None), [], **arguments).program.matmul_precision == "tf32"


@pytest.mark.exhaustive
def test_monitors_are_fitted_and_score_in_float32(monkeypatch):
    model, y = LRU(size=2, hidden=(4,)), np.ones((4, 6, 2), np.float32)
    params = model.init(jax.random.key(0), 2)
    clean = np.random.default_rng(0).normal(size=(20, 6, 2)).astype(np.float32)
    chart = Chart()
    reference = chart.fit_reference(None, clean, np.ones_like(clean))
    training, keys = Training(1, batch_size=2), jax.random.split(jax.random.key(0), 1)
    calls = (
        lambda y: _filter_runs(model, params, y, y),
        lambda y: _train_members(model, training, y, y, keys, jnp.ones((1, 4))),
        lambda y: _scan_runs(chart, None, reference, y, y),
    )
    for call in calls:
        assert None in matmul_precisions(call, y)
    monkeypatch.setattr(tracing, "resolve_precision", lambda devices, requested: requested)
    jax.clear_caches()
    for call in calls:
        assert matmul_precisions(call, y) == {FULL}


@pytest.mark.exhaustive
def test_the_precision_is_stored_and_compared_by_replay(tmp_path):
    durable.run(parse(SPEC), tmp_path / "run")
    path = tmp_path / "run" / "environment.json"
    stored = json.loads(path.read_text())
    assert stored["matmul_precision"] == "float32"
    path.write_text(json.dumps(stored | {"matmul_precision": "tf32"}))
    assert replay(tmp_path / "run").differences == (("matmul_precision", "tf32", "float32"),)
    del stored["matmul_precision"]
    path.write_text(json.dumps(stored))
    assert replay(tmp_path / "run").differences == ()
