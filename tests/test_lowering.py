"""Whole grids lower for CUDA and TPU, on a machine that has neither, with nothing in them that calls the host."""

import functools

import jax
import numpy as np
import pytest
from jax import export

from jaxaudit.program import run
from jaxaudit.specification.document import parse
from jaxaudit.whole import inputs

SPEC = """
[audit]
seeds = 2
steps = 12
telemetry = "full"
[task]
{task}
[learner]
{learner}
[[perturbation]]
kind = "lr_spike"
onset = 4
duration = 2
[[perturbation]]
kind = "{disturbance}"
onset = 4
duration = 2
"""
SMALL = 'hidden = [8]\nevaluations = 2\nevaluation_episodes = 1\nkind = "{}"\n'
ON_POLICY = SMALL + "num_envs = 2\nrollout_length = 8\nminibatch_size = 8"
OFF_POLICY = SMALL + "num_envs = 2\niteration_steps = 8\nlearning_starts = 8\nbatch_size = 4\nbuffer_size = 64"
PENDULUM = 'kind = "mujoco"\nname = "InvertedPendulum-v5"\nphysics = "mjx"'
CARTPOLE = 'kind = "mujoco"\nname = "CartPole-v1"'
LANGUAGE = 'kind = "language_model"\nsize = "nano"\ncontext = 16\nbatch_size = 4\naccumulation = 2\nvalidation = 2'

CASES = {
    "ppo": (PENDULUM, ON_POLICY.format("ppo"), "observation_noise"),
    "ppo on discrete actions": (CARTPOLE, ON_POLICY.format("ppo"), "dynamics_shift"),
    "trpo": (PENDULUM, ON_POLICY.format("trpo"), "weight_noise"),
    "sac": (PENDULUM, OFF_POLICY.format("sac"), "dynamics_shift"),
    "td3": (PENDULUM, OFF_POLICY.format("td3") + "\nupdates_per_step = 1.0", "action_noise"),
    "language_model": ("", LANGUAGE, "token_corruption"),
}


SLOW = ("trpo", "td3")
"""Of whose programs PPO and SAC have the most."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES])
def test_every_learners_grid_lowers_for_cuda_and_tpu_without_the_host(case, corpus):
    task, learner, disturbance = CASES[case]
    task = task or f'kind = "text"\nname = "{corpus.name}"'
    grid = parse(SPEC.format(task=task, learner=learner, disturbance=disturbance)).build()
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), inputs(grid))
    exported = export.export(jax.jit(functools.partial(run, grid.program)), platforms=["cuda", "tpu"])(given)
    assert exported.platforms == ("cuda", "tpu")
    text = exported.mlir_module()
    assert "callback" not in text
    assert "stablehlo.while" in text


def test_c_mujoco_is_what_calls_the_host():
    """Or the test above would see nothing."""
    task, learner, disturbance = CASES["ppo"]
    grid = parse(SPEC.format(task=task.replace("mjx", "c"), learner=learner, disturbance=disturbance)).build()
    assert "callback" in jax.jit(functools.partial(run, grid.program)).lower(inputs(grid)).as_text()
