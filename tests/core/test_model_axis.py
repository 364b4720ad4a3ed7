"""A lane that several devices share has the same numbers, takes less memory on each device, and is stored the same."""

import functools
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import EXPERIMENTS, HELPERS
from quadratic import quadratic
from small_runs import assert_runs_equal

import jaxaudit as ja
from jaxaudit.core.batches import layout
from jaxaudit.core.grid import plan
from jaxaudit.core.learner import Learner
from jaxaudit.dialogues import named
from jaxaudit.execution.device_layout import device_bytes
from jaxaudit.execution.engine import Engine
from jaxaudit.learners.language_model import Data, LanguageModel, LanguageModelSettings
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.models.sampling import generate
from jaxaudit.runs import checkpoint
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.sharding import device_mesh
from jaxaudit.spec.document import parse

pytestmark = [pytest.mark.long, pytest.mark.exhaustive]

VOCABULARY = 37
STEPS = 4
TINY = gpt2.GPT2(VOCABULARY, 12, gpt2.Size(16, 2, 4))


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", TINY.size)
        yield


@functools.cache
def learner(size="tiny", vocabulary=VOCABULARY, context=8, batch=4, **settings):
    """Returns GPT-2 on random tokens."""
    defaults = {"telemetry": "basic", "accumulation": 2, "held_out": 2, "validation": 2, "evaluations": 0}
    model = LanguageModel(vocabulary, LanguageModelSettings(size, context, batch_size=batch, **defaults | settings))
    tokens = np.random.default_rng(0).integers(0, vocabulary, 40 * (context + 1)).astype(np.uint16)
    rows = tokens[: 2 * (context + 1)].reshape(2, -1)
    indivisible = gpt2.indivisible(model.model)
    data = Data(tokens, rows, rows, None)
    return Learner(
        model.init, model.step, data=data, init_reads_data=True, partition=gpt2.partition, indivisible=indivisible
    )


def grid(shared, base_learner=None, devices=None, perturbations=None, **settings):
    conditions = perturbations or [ja.weight_noise(ja.sweep(0.0, 0.01), onset=1), ja.quantize(6.0, onset=1)]
    used_devices = jax.devices()[: devices or shared]
    return plan(
        base_learner or learner(),
        conditions,
        steps=STEPS,
        devices=used_devices,
        model_devices=shared,
        **{"seeds": 1} | settings,
    )


def train_baseline_and_fork(split_grid):
    """Returns the rows of baseline and fork, the states at the onset, and the fork's last states."""
    engine = Engine(split_grid, STEPS)
    baseline, fork = layout(split_grid)
    states, baseline_rows = engine.advance(baseline, engine.initial(baseline), 0, fork.onset)
    pieces = engine.copies(baseline, states)
    states, rows = engine.advance(fork, engine.begin(fork, lambda onset: lambda seeds: pieces), fork.onset, STEPS)
    return jax.tree.map(np.asarray, (baseline_rows, rows)), pieces, engine.copies(fork, states)


def assert_close(actual, expected, tolerance=1e-5):
    """Compares relative to each array's largest entry."""
    for actual_leaf, expected_leaf in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            actual_leaf, expected_leaf, rtol=0, atol=tolerance * np.nanmax(np.abs(expected_leaf), initial=1e-30)
        )


def run_shared(devices, function, *arguments):
    """Calls a function of one lane's arrays, traced for a number of devices that share the lane."""
    with jax.sharding.set_mesh(device_mesh(tuple(jax.devices()[:devices]), devices)):
        return jax.jit(function)(*arguments)


@pytest.mark.parametrize("devices", [2])
def test_losses_and_gradients_are_those_of_the_unsplit_model(devices):
    tokens = jnp.arange(18).reshape(2, 9) * 5 % VOCABULARY
    model = LanguageModel(VOCABULARY, LanguageModelSettings("tiny", 8, batch_size=2, accumulation=1))
    params = model.init_params(jax.random.key(0))

    def loss(params):
        return model.losses(model.observing, params, tokens)[0].loss

    split = run_shared(devices, jax.value_and_grad(loss), params)
    assert_close(split, jax.value_and_grad(loss)(params))


@pytest.mark.exhaustive
def test_perturbed_lanes_are_those_of_the_unsplit_model():
    """Weights are perturbed by noise, rounding and a reset.

    Later steps may differ by what training makes of rounding.
    """
    perturbations = [
        ja.weight_noise(ja.sweep(0.0, 0.01), onset=1),
        ja.quantize(6.0, onset=1),
        ja.layer_reset(1.0, onset=1),
    ]
    expected, split = (train_baseline_and_fork(grid(shared, perturbations=perturbations)) for shared in (1, 2))
    for a, b in zip(expected[0], split[0], strict=True):
        assert_close(b["loss"][:1], a["loss"][:1])
        assert_close(b["performance"], a["performance"], 1e-4)
    control, neutral = (jax.tree.map(lambda x: x[i], split[2][0].states) for i in (0, 1))  # noqa: B023
    assert all(map(np.array_equal, jax.tree.leaves(control), jax.tree.leaves(neutral)))


def test_checkpoints_do_not_depend_on_the_number_of_devices(tmp_path):
    """Stored shapes have no padding of the odd vocabulary, and engines of either kind can load them."""
    (one_device, two_devices), path = (Engine(grid(shared), STEPS) for shared in (1, 2)), tmp_path / "states"
    batch = layout(two_devices.grid)[0]
    states = two_devices.initial(batch)
    padded = states.learner.params["wte"]["embedding"]
    assert padded.shape == (1, VOCABULARY + 1, 16)
    assert padded.addressable_shards[0].data.shape == (1, (VOCABULARY + 1) // 2, 16)
    stored = two_devices.copies(batch, states)
    assert stored[0].states.learner.params["wte"]["embedding"].shape == (1, VOCABULARY, 16)
    checkpoint.save(path, iter(stored), {})
    for engine in (one_device, two_devices):
        restored = engine.restored(checkpoint.load(path, engine.lane_shapes(batch)), batch)
        copied = engine.copies(batch, restored)
        assert all(map(np.array_equal, jax.tree.leaves(copied[0].states), jax.tree.leaves(stored[0].states)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [2])
@pytest.mark.parametrize("adapted", [False, True])
def test_sampled_tokens_are_those_of_the_unsplit_model(adapted, devices):
    params = gpt2.init_params(TINY, jax.random.key(0))
    if adapted:
        adapters = gpt2.init_adapters(TINY, 2, jax.random.key(1))
        params = gpt2.Adapted(params, jax.tree.map(lambda x: x + 0.05, adapters))
    prompts = jnp.array([[3, 14, 15], [9, 2, -1]])

    def sample(params, key):
        return generate(TINY, params, prompts, key, tokens=8, top_k=20)

    tokens, log_probability = sample(params, jax.random.key(2))
    split = run_shared(devices, sample, params, jax.random.key(2))
    np.testing.assert_array_equal(split[0], tokens)
    np.testing.assert_allclose(split[1], log_probability, rtol=0, atol=1e-5)


@pytest.mark.exhaustive
def test_state_and_argument_bytes_are_as_planned():
    for model_devices in (1, 2):
        engine = Engine(grid(model_devices), 1)
        batch = layout(engine.grid)[0]
        planned = device_bytes(engine.grid.program, engine.lane_shapes(batch))
        argument_bytes = engine.program(batch).memory_analysis().argument_size_in_bytes
        data_bytes = sum(x.nbytes for x in jax.tree.leaves(engine.grid.data))
        assert planned + data_bytes <= argument_bytes < planned + data_bytes + 2048
    ratio = planned / device_bytes(grid(1).program, engine.lane_shapes(batch))
    assert 0.5 < ratio < 0.6


def test_unsplittable_models_are_refused():
    with pytest.raises(ValueError, match=r"^model_devices is 3, which does not divide the model's 4 attention heads$"):
        grid(3, devices=2)
    with pytest.raises(ValueError, match=r"^model_devices is 2, which does not divide the number of devices, 1$"):
        grid(2, devices=1)
    with pytest.raises(ValueError, match=r"^model_devices must be a whole number of devices, at least 1, not 0$"):
        grid(0, devices=2)
    with pytest.raises(ValueError, match=r"cannot be split: it has no partition$"):
        grid(2, base_learner=quadratic(None, adam=False))


SPEC = """
audit = {{name = "split", seeds = 1, steps = 6, model_devices = 2, telemetry = "basic"}}
task = {{kind = "text", name = "{text}"}}
learner = {{kind = "language_model", size = "micro", context = 8, batch_size = 2, accumulation = 1, held_out = 1}}
metrics = {{window = 2, hold = 2, horizon = 2}}
run = {{chunk = 1, checkpoint_every = 1}}
perturbation = [{{kind = "lr_spike", magnitude = 3.0, onset = 3, duration = 1}}]
"""


@pytest.mark.exhaustive
def test_a_run_resumes_bitwise_and_stores_its_number_of_model_devices(corpus, tmp_path, monkeypatch):
    spec = parse(SPEC.format(text=corpus.name))
    durable.run(spec, tmp_path / "whole")
    environment = json.loads((tmp_path / "whole" / "environment.json").read_text())
    assert (environment["devices"], environment["model_devices"]) == (2, 2)
    advance, allowed_calls = Engine.advance, iter([True, True, True])

    def advance_three_times(self, *arguments):
        if not next(allowed_calls, False):
            raise KeyboardInterrupt
        return advance(self, *arguments)

    monkeypatch.setattr(Engine, "advance", advance_three_times)
    with pytest.raises(BaseException, match="resume"):
        durable.run(spec, tmp_path / "stopped")
    monkeypatch.setattr(Engine, "advance", advance)
    durable.resume(tmp_path / "stopped")
    assert_runs_equal(tmp_path / "stopped", tmp_path / "whole")


def test_indivisible_heads_in_a_spec_are_a_user_error(corpus):
    text = SPEC.format(text=corpus.name).replace("model_devices = 2", "model_devices = 3")
    with pytest.raises(UserError, match="does not divide the model's 4 attention heads"):
        parse(text).build()


@pytest.mark.slow
def test_a_774m_lane_takes_at_most_30_percent_on_each_of_four_devices():
    """Measured by the compiled programs' memory analysis, which `model_axis.py` predicts within a tenth."""
    script = EXPERIMENTS / "benchmarks" / "model_axis.py"
    process = subprocess.run([sys.executable, script, "--one", "774m"], check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    assert [row["devices"] for row in rows] == [1, 2, 4]
    assert rows[-1]["compiled"] <= 0.3 * rows[0]["compiled"]
    assert all(abs(row["compiled"] / row["planned"] - 1) < 0.1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_an_iteration_on_a_dialogue_is_that_of_the_unsplit_lane(rank, tmp_path):
    model = gpt2.GPT2(named("hop").make().vocabulary, 1024, TINY.size)
    start = jax.tree.map(np.asarray, gpt2.init_params(model, jax.random.key(0)))
    gpt2_checkpoint.save(tmp_path, start, model)
    settings = {"size": "tiny", "prompts": 2, "group_size": 2, "telemetry": "basic", "entropy_coefficient": 0.1}
    dialogue_learner = ja.learners.grpo("hop", checkpoint=str(tmp_path), lora_rank=rank, **settings)
    rows = []
    for model_devices in (1, 2):
        engine = Engine(
            grid(model_devices, base_learner=dialogue_learner, perturbations=[ja.lr_spike(3.0, onset=1, duration=1)]), 1
        )
        batch = layout(engine.grid)[0]
        states, telemetry = engine.advance(batch, engine.initial(batch), 0, 1)
        rows.append(
            ({name: telemetry[name] for name in ("performance", "gradient_norm")}, engine.copies(batch, states))
        )
    assert_close(*[row[0] for row in rows[::-1]], 1e-5)
    assert_close(*[row[1][0].states.learner.policy.params for row in rows[::-1]], 1e-4)


FOUR_DEVICES_SCRIPT = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
sys.path[:0] = {folders!r}
import test_model_axis as module
module.gpt2.SIZES["tiny"] = module.TINY.size
expected = module.train_baseline_and_fork(module.grid(1, seeds=2))
for devices, execution in ((4, "vmap"), (2, "vmap"), (2, "map")):
    result = module.train_baseline_and_fork(module.grid(devices, devices=4, seeds=2, execution=execution))
    for a, b in zip(expected[0], result[0]):
        for name in ("loss", "gradient_norm"):
            module.assert_close(b[name][:, :1], a[name][:, :1], 1e-5)
        module.assert_close(b["loss"][:, 1:2], a["loss"][:, 1:2], 1e-4)  # after an update that divides by the root of v
module.test_losses_and_gradients_are_those_of_the_unsplit_model(4)
for adapted in (False, True):
    module.test_sampled_tokens_are_those_of_the_unsplit_model(adapted, 4)
"""


@pytest.mark.slow
def test_four_devices_can_split_one_lane_or_two():
    subprocess.run(
        [sys.executable, "-c", FOUR_DEVICES_SCRIPT.format(folders=[str(HELPERS), str(HELPERS.parent / "core")])],
        check=True,
    )
