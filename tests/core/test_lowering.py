"""Grids lower for CUDA and TPU on a machine that has neither, and contain no calls of the host."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax import export

import jaxaudit as ja
from jaxaudit.core.program import Program, run
from jaxaudit.dialogues import sampling as drawing
from jaxaudit.execution.grid_program import inputs
from jaxaudit.kernels.layers import lookup
from jaxaudit.learners.dialogue import packing
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.learner import DialogueData, DialogueLearner
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.telemetry import token_statistics
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.spec.document import parse

pytestmark = pytest.mark.default_compilation

SPEC = """
[audit]
seeds = 32
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
SMALL = 'hidden = [8]\nnum_envs = 2\nkind = "{}"\n'
ON_POLICY = SMALL + "evaluations = 2\nevaluation_episodes = 1\nrollout_length = 8\nminibatch_size = 8"
OFF_POLICY = SMALL + "evaluations = 0\niteration_steps = 8\nlearning_starts = 8\nbatch_size = 4\nbuffer_size = 64"
PENDULUM = 'kind = "mujoco"\nname = "InvertedPendulum-v5"\nphysics = "mjx"'
CARTPOLE = 'kind = "mujoco"\nname = "CartPole-v1"'
LANGUAGE = 'kind = "language_model"\nsize = "micro"\ncontext = 64\nbatch_size = 4\naccumulation = 2\nvalidation = 2'
HOP = 'kind = "dialogue"\nname = "hop"\ndifficulty = 1\nentities = 3\nhops = 2\nlength = 13'
DIALOGUE = 'kind = "grpo"\nprompts = 2\ngroup_size = 2\nperformance_rows = 2\nwarm_start = 2\nwarm_start_rows = 2'
LINES = 'kind = "dialogue"\nname = "text"\ntool = "calculator"\nlength = 24\nfile = "{folder}/lines.jsonl"'
ADAPTED = DIALOGUE + '\nlora_rank = 2\ncheckpoint = "{folder}"'

CASES = {
    "ppo": (PENDULUM, ON_POLICY.format("ppo"), "observation_noise"),
    "ppo on discrete actions": (CARTPOLE, ON_POLICY.format("ppo"), "dynamics_shift"),
    "trpo": (PENDULUM, ON_POLICY.format("trpo"), "weight_noise"),
    "sac": (PENDULUM, OFF_POLICY.format("sac"), "dynamics_shift"),
    "td3": (PENDULUM, OFF_POLICY.format("td3") + "\nupdates_per_step = 1.0", "action_noise"),
    "language_model": ("", LANGUAGE, "token_corruption"),
    "grpo": (HOP, DIALOGUE, "tool_error"),
    "grpo with adapters": (LINES, ADAPTED, "tool_error"),
}


SLOW = ("trpo", "td3", "grpo with adapters")
EXHAUSTIVE = ("ppo", "sac", "grpo", "language_model", "ppo on discrete actions")
"""Of these cases, PPO, SAC and GRPO have the most programs."""


def with_mark(case):
    mark = pytest.mark.slow if case in SLOW else pytest.mark.exhaustive
    return pytest.param(case, marks=mark if case in (*SLOW, *EXHAUSTIVE) else ())


@pytest.mark.parametrize("case", [with_mark(case) for case in CASES])
def test_every_learners_grid_lowers_for_cuda_and_tpu_without_the_host(case, corpus, checkpoint):
    task, learner, disturbance = (text.format(folder=checkpoint) for text in CASES[case])
    task = task or f'kind = "text"\nname = "{corpus.name}"'
    assert_lowers(parse(SPEC.format(task=task, learner=learner, disturbance=disturbance)).build(), ["cuda", "tpu"])


class OnGpus(Program):
    """A program that is traced as for GPUs, on a machine without any."""

    on_gpus = True


def assert_lowers(grid, platforms):
    """Lowers a grid for platforms and checks the module. Inputs and data are given by their shapes only."""
    input_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs(grid))
    program = dataclasses.replace(grid.program, matmul_precision="float32")
    program = OnGpus(**{field.name: getattr(program, field.name) for field in dataclasses.fields(program)})
    exported = export.export(jax.jit(functools.partial(run, program)), platforms=platforms)(input_shapes)
    assert exported.platforms == tuple(platforms)
    text = exported.mlir_module()
    assert "callback" not in text
    assert "stablehlo.while" in text
    assert max(scatter_index_counts(text), default=0) <= MAX_SCATTER_INDICES
    matmuls = [line for line in text.splitlines() if "stablehlo.dot_general" in line and "xf32>" in line]
    assert matmuls
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in matmuls)


SCATTER = re.compile(
    r'"stablehlo\.scatter"\([^)]*\) <\{(?P<settings>.*?)\}> \(\{.*?\}\) : \((?P<types>[^)]*)\) ->', re.DOTALL
)

MAX_SCATTER_INDICES = 16
"""With deterministic operations, a GPU runs a scatter as a loop over its indices if these may repeat.

mujoco.mjx has scatters of up to four indices.
"""


def scatter_index_counts(text):
    """Yields the number of indices of each scatter in StableHLO whose indices may repeat."""
    scatters = list(SCATTER.finditer(text))
    assert len(scatters) == text.count('"stablehlo.scatter"(')
    for scatter in scatters:
        if "unique_indices = true" not in scatter["settings"]:
            types = re.findall(r"tensor<([^>]*)>", scatter["types"])
            shape = [int(size) for size in types[(len(types) - 1) // 2].split("x")[:-1]]
            vector = re.search(r"index_vector_dim = (\d+)", scatter["settings"])
            dim = int(vector[1]) if vector else 0
            yield math.prod(size for axis, size in enumerate(shape) if axis != dim)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_an_embeddings_gradient_is_a_scatter_only_on_cpus(platform):
    def gradient(table, tokens):
        return jax.grad(lambda table: jnp.sum(lookup(table, tokens, jnp.bfloat16).astype(jnp.float32)))(table)

    shapes = jax.ShapeDtypeStruct((32, 50, 8), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.int32)
    module = export.export(jax.jit(jax.vmap(gradient)), platforms=[platform])(*shapes).mlir_module()
    assert list(scatter_index_counts(module)) == ([32 * 64] if platform == "cpu" else [])
    assert ("stablehlo.dot_general" in module) == (platform != "cpu")


def test_permutations_and_packing_have_no_repeated_indices():
    def packed(mask):
        return packing.pack(Rows(**{field.name: mask for field in dataclasses.fields(Rows)}), mask).place

    def selected(mask):
        return token_statistics.select_slots(mask, 10).scatter(jnp.ones(10))

    mask, uniforms = jax.ShapeDtypeStruct((32, 8, 16), bool), jax.ShapeDtypeStruct((32, 9), jnp.float32)
    for function, shape in ((drawing.cycle, uniforms), (packed, mask), (selected, mask)):
        module = export.export(jax.jit(jax.vmap(function)), platforms=["cuda"])(shape).mlir_module()
        assert list(scatter_index_counts(module)) == []


def test_a_scatter_with_possibly_repeated_indices_is_detected():
    def lanes(index, unique):
        return jax.vmap(lambda i: jnp.zeros(50).at[i].add(1.0, unique_indices=unique))(index)

    index = jax.ShapeDtypeStruct((32, 4), jnp.int32)
    for unique, expected in ((False, [128]), (True, [])):
        module = export.export(jax.jit(functools.partial(lanes, unique=unique)), platforms=["cuda"])(
            index
        ).mlir_module()
        assert list(scatter_index_counts(module)) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Returns a folder with a policy whose tokens are bytes, and with prompts and answers."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = gpt2.GPT2(257, 1024, gpt2.SIZES["micro"])
    gpt2_checkpoint.save(folder, gpt2.init_params(model, jax.random.key(0)), model)
    lines = [{"prompt": f"{i}*7: ", "answer": f"<<{i}*7>>{7 * i}"} for i in range(4)]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.mark.slow
def test_adapters_of_gpt2_124m_lower_for_cuda_from_shapes(checkpoint, tmp_path):
    """The vocabulary has all 50,257 tokens, of which those above 255 have no text."""
    characters = [
        chr(byte if 33 <= byte < 127 else 256 + byte) for byte in range(256)
    ]  # one character for each byte, as in GPT-2
    (tmp_path / "vocab.json").write_text(
        json.dumps({character: token for token, character in enumerate(characters)} | {"<|endoftext|>": 50256})
    )
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    file = str(checkpoint / "lines.jsonl")
    dialogue = ja.dialogues.named("text", file=file, tokenizer=str(tmp_path), length=64).make()
    settings = settings_of("grpo")(size="124m", lora_rank=8, checkpoint="x", prompts=2, group_size=4)
    dialogue_learner = DialogueLearner(dialogue, settings.structure)
    start = jax.eval_shape(functools.partial(gpt2.init_params, dialogue_learner.policy.model), jax.random.key(0))
    data = DialogueData(settings.numbers(dialogue.difficulty), dialogue.data, start)
    learner = ja.Learner(
        dialogue_learner.init,
        dialogue_learner.step,
        channels=dialogue_learner.channels,
        data=data,
        init_reads_data=True,
    )
    assert sum(x.size for x in jax.tree.leaves(start)) == 124_439_808
    assert_lowers(ja.plan(learner, [ja.lr_spike(10.0, onset=1, duration=1)], seeds=1, steps=3), ["cuda"])


@pytest.mark.exhaustive
def test_physics_in_c_calls_the_host():
    """This checks that the tests above would detect a callback."""
    task, learner, disturbance = CASES["ppo"]
    grid = parse(SPEC.format(task=task.replace("mjx", "c"), learner=learner, disturbance=disturbance)).build()
    assert "callback" in jax.jit(functools.partial(run, grid.program)).lower(inputs(grid)).as_text()
