"""A lane that several devices share: the same numbers, less memory on each, the same states on disk."""

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
    """GPT-2 on random tokens."""
    usual = {"telemetry": "basic", "accumulation": 2, "held_out": 2, "validation": 2, "evaluations": 0}
    made = LanguageModel(vocabulary, LanguageModelSettings(size, context, batch_size=batch, **usual | settings))
    tokens = np.random.default_rng(0).integers(0, vocabulary, 40 * (context + 1)).astype(np.uint16)
    rows = tokens[: 2 * (context + 1)].reshape(2, -1)
    whole = gpt2.indivisible(made.model)
    data = Data(tokens, rows, rows, None)
    return Learner(made.init, made.step, data=data, init_reads_data=True, partition=gpt2.partition, indivisible=whole)


def grid(shared, of=None, devices=None, perturbations=None, **settings):
    chosen = perturbations or [ja.weight_noise(ja.sweep(0.0, 0.01), onset=1), ja.quantize(6.0, onset=1)]
    placed = jax.devices()[: devices or shared]
    return plan(of or learner(), chosen, steps=STEPS, devices=placed, model_devices=shared, **{"seeds": 1} | settings)


def trained(chosen):
    """The baseline's rows and states at the onset, and the fork's."""
    engine = Engine(chosen, STEPS)
    baseline, fork = layout(chosen)
    states, before = engine.advance(baseline, engine.initial(baseline), 0, fork.onset)
    pieces = engine.copies(baseline, states)
    states, rows = engine.advance(fork, engine.begin(fork, lambda onset: lambda seeds: pieces), fork.onset, STEPS)
    return jax.tree.map(np.asarray, (before, rows)), pieces, engine.copies(fork, states)


def assert_close(found, expected, within=1e-5):
    """Of each array's largest entry."""
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=within * np.nanmax(np.abs(other), initial=1e-30))


def shared_by(devices, function, *arguments):
    """A function of a lane's arrays, traced as where so many devices share it."""
    with jax.sharding.set_mesh(device_mesh(tuple(jax.devices()[:devices]), devices)):
        return jax.jit(function)(*arguments)


@pytest.mark.parametrize("devices", [2])
def test_losses_and_gradients_are_the_unsplit_models(devices):
    tokens = jnp.arange(18).reshape(2, 9) * 5 % VOCABULARY
    made = LanguageModel(VOCABULARY, LanguageModelSettings("tiny", 8, batch_size=2, accumulation=1))
    params = made.init_params(jax.random.key(0))

    def loss(params):
        return made.losses(made.observing, params, tokens)[0].loss

    found = shared_by(devices, jax.value_and_grad(loss), params)
    assert_close(found, jax.value_and_grad(loss)(params))


@pytest.mark.exhaustive
def test_perturbed_lanes_are_the_unsplit_ones_and_neutral_ones_the_control():
    """Weights with noise, rounded and reset; at each step after it, to what training makes of rounding."""
    perturbations = [
        ja.weight_noise(ja.sweep(0.0, 0.01), onset=1),
        ja.quantize(6.0, onset=1),
        ja.layer_reset(1.0, onset=1),
    ]
    expected, split = (trained(grid(shared, perturbations=perturbations)) for shared in (1, 2))
    for a, b in zip(expected[0], split[0], strict=True):
        assert_close(b["loss"][:1], a["loss"][:1])
        assert_close(b["performance"], a["performance"], 1e-4)
    control, neutral = (jax.tree.map(lambda x: x[i], split[2][0].states) for i in (0, 1))  # noqa: B023
    assert all(map(np.array_equal, jax.tree.leaves(control), jax.tree.leaves(neutral)))


def test_states_are_the_same_in_a_checkpoint_however_many_share_a_lane(tmp_path):
    """Of shapes without what fills the odd vocabulary up, and read by either."""
    (one, two), path = (Engine(grid(shared), STEPS) for shared in (1, 2)), tmp_path / "states"
    batch = layout(two.grid)[0]
    states = two.initial(batch)
    padded = states.learner.params["wte"]["embedding"]
    assert padded.shape == (1, VOCABULARY + 1, 16)
    assert padded.addressable_shards[0].data.shape == (1, (VOCABULARY + 1) // 2, 16)
    kept = two.copies(batch, states)
    assert kept[0].states.learner.params["wte"]["embedding"].shape == (1, VOCABULARY, 16)
    checkpoint.save(path, iter(kept), {})
    for engine in (one, two):
        back = engine.restored(checkpoint.load(path, engine.lane_shapes(batch)), batch)
        again = engine.copies(batch, back)
        assert all(map(np.array_equal, jax.tree.leaves(again[0].states), jax.tree.leaves(kept[0].states)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [2])
@pytest.mark.parametrize("adapted", [False, True])
def test_sampled_tokens_are_the_same(adapted, devices):
    params = gpt2.init_params(TINY, jax.random.key(0))
    if adapted:
        adapters = gpt2.init_adapters(TINY, 2, jax.random.key(1))
        params = gpt2.Adapted(params, jax.tree.map(lambda x: x + 0.05, adapters))
    prompts = jnp.array([[3, 14, 15], [9, 2, -1]])

    def sample(params, key):
        return generate(TINY, params, prompts, key, tokens=8, top_k=20)

    tokens, log_probability = sample(params, jax.random.key(2))
    found = shared_by(devices, sample, params, jax.random.key(2))
    np.testing.assert_array_equal(found[0], tokens)
    np.testing.assert_allclose(found[1], log_probability, rtol=0, atol=1e-5)


@pytest.mark.exhaustive
def test_state_and_argument_bytes_are_as_planned():
    for shared in (1, 2):
        engine = Engine(grid(shared), 1)
        batch = layout(engine.grid)[0]
        planned = device_bytes(engine.grid.program, engine.lane_shapes(batch))
        found = engine.program(batch).memory_analysis().argument_size_in_bytes
        besides = sum(x.nbytes for x in jax.tree.leaves(engine.grid.data))
        assert planned + besides <= found < planned + besides + 2048
    halved = planned / device_bytes(grid(1).program, engine.lane_shapes(batch))
    assert 0.5 < halved < 0.6


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match=r"^model_devices is 3, which does not divide the model's 4 attention heads$"):
        grid(3, devices=2)
    with pytest.raises(ValueError, match=r"^model_devices is 2, which does not divide the number of devices, 1$"):
        grid(2, devices=1)
    with pytest.raises(ValueError, match=r"^model_devices must be a whole number of devices, at least 1, not 0$"):
        grid(0, devices=2)
    with pytest.raises(ValueError, match=r"cannot be split: it has no partition$"):
        grid(2, of=quadratic(None, adam=False))


SPEC = """
audit = {{name = "split", seeds = 1, steps = 6, model_devices = 2, telemetry = "basic"}}
task = {{kind = "text", name = "{text}"}}
learner = {{kind = "language_model", size = "micro", context = 8, batch_size = 2, accumulation = 1, held_out = 1}}
metrics = {{window = 2, hold = 2, horizon = 2}}
run = {{chunk = 1, checkpoint_every = 1}}
perturbation = [{{kind = "lr_spike", magnitude = 3.0, onset = 3, duration = 1}}]
"""


@pytest.mark.exhaustive
def test_a_run_resumes_bitwise_and_its_folder_tells_of_the_axis(corpus, tmp_path, monkeypatch):
    spec = parse(SPEC.format(text=corpus.name))
    durable.run(spec, tmp_path / "whole")
    told = json.loads((tmp_path / "whole" / "environment.json").read_text())
    assert (told["devices"], told["model_devices"]) == (2, 2)
    advance, left = Engine.advance, iter([True, True, True])

    def stopping(self, *arguments):
        if not next(left, False):
            raise KeyboardInterrupt
        return advance(self, *arguments)

    monkeypatch.setattr(Engine, "advance", stopping)
    with pytest.raises(BaseException, match="resume"):
        durable.run(spec, tmp_path / "stopped")
    monkeypatch.setattr(Engine, "advance", advance)
    durable.resume(tmp_path / "stopped")
    assert_runs_equal(tmp_path / "stopped", tmp_path / "whole")


def test_uneven_heads_in_a_spec_are_the_users_error(corpus):
    text = SPEC.format(text=corpus.name).replace("model_devices = 2", "model_devices = 3")
    with pytest.raises(UserError, match="does not divide the model's 4 attention heads"):
        parse(text).build()


@pytest.mark.slow
def test_a_lane_of_774_million_takes_at_most_three_tenths_on_each_of_four():
    """By the compiled programs' memory analysis; within a tenth of what `model_axis.py` plans."""
    script = EXPERIMENTS / "benchmarks" / "model_axis.py"
    done = subprocess.run([sys.executable, script, "--one", "774m"], check=True, capture_output=True, text=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["devices"] for row in rows] == [1, 2, 4]
    assert rows[-1]["compiled"] <= 0.3 * rows[0]["compiled"]
    assert all(abs(row["compiled"] / row["planned"] - 1) < 0.1 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 2])
def test_an_iteration_on_a_dialogue_is_the_unsplit_lanes(rank, tmp_path):
    model = gpt2.GPT2(named("hop").make().vocabulary, 1024, TINY.size)
    start = jax.tree.map(np.asarray, gpt2.init_params(model, jax.random.key(0)))
    gpt2_checkpoint.save(tmp_path, start, model)
    small = {"size": "tiny", "prompts": 2, "group_size": 2, "telemetry": "basic", "entropy_coefficient": 0.1}
    made = ja.learners.grpo("hop", checkpoint=str(tmp_path), lora_rank=rank, **small)
    rows = []
    for shared in (1, 2):
        engine = Engine(grid(shared, of=made, perturbations=[ja.lr_spike(3.0, onset=1, duration=1)]), 1)
        batch = layout(engine.grid)[0]
        states, telemetry = engine.advance(batch, engine.initial(batch), 0, 1)
        rows.append(
            ({name: telemetry[name] for name in ("performance", "gradient_norm")}, engine.copies(batch, states))
        )
    assert_close(*[row[0] for row in rows[::-1]], 1e-5)
    assert_close(*[row[1][0].states.learner.policy.params for row in rows[::-1]], 1e-4)


FOUR = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
sys.path[:0] = {folders!r}
import test_model_axis as here
here.gpt2.SIZES["tiny"] = here.TINY.size
expected = here.trained(here.grid(1, seeds=2))
for shared, execution in ((4, "vmap"), (2, "vmap"), (2, "map")):
    found = here.trained(here.grid(shared, devices=4, seeds=2, execution=execution))
    for a, b in zip(expected[0], found[0]):
        for name in ("loss", "gradient_norm"):
            here.assert_close(b[name][:, :1], a[name][:, :1], 1e-5)
        here.assert_close(b["loss"][:, 1:2], a["loss"][:, 1:2], 1e-4)  # after an update, which divides by roots of v
here.test_losses_and_gradients_are_the_unsplit_models(4)
for adapted in (False, True):
    here.test_sampled_tokens_are_the_same(adapted, 4)
"""


@pytest.mark.slow
def test_four_devices_as_one_row_and_as_two():
    subprocess.run(
        [sys.executable, "-c", FOUR.format(folders=[str(HELPERS), str(HELPERS.parent / "core")])], check=True
    )
