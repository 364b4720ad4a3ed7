"""Tests the language-model learner: its gradient, optimizer, batches, metrics and settings."""

import dataclasses
import functools
import itertools
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from directories import EXPERIMENTS

import jaxaudit as ja
from jaxaudit.analysis.run_reader import load as load_run
from jaxaudit.core.batches import layout
from jaxaudit.core.grid import plan
from jaxaudit.core.optimizer import warmup_decay
from jaxaudit.core.taps import Taps
from jaxaudit.execution.engine import Engine
from jaxaudit.learners.language_model import LanguageModel, LanguageModelSettings
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.runs import lifecycle as durable
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import parse
from jaxaudit.text import load

pytestmark = pytest.mark.long

SMALL = {"size": "micro", "context": 16, "batch_size": 8, "accumulation": 4, "held_out": 2, "validation": 4}
KEY = jax.random.key(0)
EXPERIMENTS = EXPERIMENTS / "language_models"


@pytest.fixture(scope="module")
def model_params_tokens(corpus):
    """Returns the algorithm, its parameters, and a batch of tokens."""
    data = ja.learners.language_model(corpus, **SMALL).data
    model = LanguageModel(257, LanguageModelSettings(**SMALL))
    tokens = jax.jit(lambda data: model.read(KEY, ja.Taps(data=data)))(data)
    model.gradient = jax.jit(model.gradient, static_argnums=2)  # compiled once for all tests
    return model, jax.jit(model.init_params)(KEY), tokens


@functools.partial(jax.jit, static_argnums=0)
def losses(model, params, tokens, smoothing=0.0):
    """Returns the mean loss of sequences `[B, T + 1]`, computed from the full matrix of logits."""
    logits = gpt2.apply(model.model, params, tokens[:, :-1].astype(jnp.int32))[0] @ params["wte"]["embedding"].T
    target = optax.smooth_labels(jax.nn.one_hot(tokens[:, 1:], 257), smoothing)
    return optax.softmax_cross_entropy(logits, target).mean()


@functools.partial(jax.jit, static_argnums=0)
def losses_and_gradients_by_microbatch(model, params, tokens, smoothing):
    """Returns the loss and the gradient of each of four microbatches."""

    def loss_and_gradient(tokens):
        return jax.value_and_grad(lambda params: losses(model, params, tokens, smoothing))(params)

    return jax.vmap(loss_and_gradient)(tokens.reshape(4, 2, 17))


def assert_equals_mean(gradient, per_microbatch):
    """Asserts that `gradient` is the mean of `per_microbatch` along its leading axis."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, np.mean(b, axis=0), rtol=1e-3, atol=1e-6), gradient, per_microbatch
    )


@pytest.mark.exhaustive
def test_gradient_is_of_the_batch_and_coherence_of_its_microbatches(model_params_tokens):
    model, params, tokens = model_params_tokens
    gradient, telemetry = model.gradient(params, tokens, Taps())
    loss, gradients = losses_and_gradients_by_microbatch(model, params, tokens, np.float32(0))
    assert_equals_mean(gradient, gradients)
    np.testing.assert_allclose(telemetry["loss"], np.mean(loss), rtol=1e-5)
    flat = np.concatenate([np.asarray(x, np.float64).reshape(4, -1) for x in jax.tree.leaves(gradients)], axis=1)
    units = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    cosines = [units[i] @ units[j] for i, j in itertools.combinations(range(4), 2)]
    assert float(telemetry["x_grad"]) == pytest.approx(np.mean(cosines), rel=1e-4)
    assert float(telemetry["x_grad_dominant"]) == pytest.approx(np.linalg.eigvalsh(units @ units.T)[-1] / 4, rel=1e-4)
    small, big = (flat**2).sum(1).mean(), (flat.mean(0) ** 2).sum()
    signal = (8 * big - 2 * small) / 6
    noise = (small - big) / (1 / 2 - 1 / 8)
    assert float(telemetry["gradient_noise_scale"]) == pytest.approx(noise / signal, rel=1e-3)


@pytest.mark.exhaustive
def test_coherence_is_nan_without_accumulation(model_params_tokens):
    model, params, tokens = model_params_tokens
    unaccumulated = LanguageModel(257, LanguageModelSettings(**SMALL | {"accumulation": 1, "telemetry": "basic"}))
    gradient, telemetry = jax.jit(unaccumulated.gradient, static_argnums=2)(params, tokens, Taps())
    assert np.isnan(telemetry["x_grad"])
    assert_equals_mean(gradient, losses_and_gradients_by_microbatch(model, params, tokens, np.float32(0))[1])


class Smoothing(Taps):
    """Taps that set the label smoothing to 0.2."""

    def __call__(self, site, value, **context):
        return np.float32(0.2) if site == "label_smoothing" else value


@pytest.mark.exhaustive
def test_label_smoothing_gives_the_gradient_of_the_smoothed_loss(model_params_tokens):
    model, params, tokens = model_params_tokens
    smooth, _ = model.gradient(params, tokens, Smoothing())
    assert_equals_mean(smooth, losses_and_gradients_by_microbatch(model, params, tokens, np.float32(0.2))[1])


def test_the_learning_rate_warms_up_and_decays_along_a_cosine():
    rate = warmup_decay(2.0, 0.1, "cosine", 0.25)
    assert [float(rate(jnp.float32(p))) for p in (0.0, 0.05, 0.1)] == pytest.approx([0.0, 1.0, 2.0])
    assert float(rate(jnp.float32(0.55))) == pytest.approx(2.0 * (0.25 + 0.75 / 2), rel=1e-5)
    assert float(rate(jnp.float32(1.0))) == pytest.approx(0.5)
    assert float(warmup_decay(2.0, 0.0, "cosine", 0.0)(jnp.float32(0.0))) == 2.0


@pytest.fixture(scope="module")
def trained(corpus):
    """Trains a learner for 60 steps, and returns the learner, the engine, the final states, and the telemetry.

    The first two lanes are controls; the last two are disturbed at three sites in the last two steps.
    """
    learner = ja.learners.language_model(corpus, **SMALL | {"learning_rate": 3e-3, "evaluations": 2, "warmup": 0.1})
    window = {"onset": 58, "duration": "end"}
    disturbed = ja.chain(
        ja.label_smoothing(0.5, **window), ja.token_corruption(0.9, **window), ja.gradient_mask(0.9, **window)
    )
    engine = Engine(plan(learner, [disturbed], seeds=2, steps=60), 60)
    batch = layout(engine.grid)[1]
    states, rows = engine.advance(batch, engine.initial(batch), 0, 60)
    return learner, engine, states, rows


def test_training_beats_unigrams_and_performance_is_on_held_out_text(model_params_tokens, trained, corpus):
    model = model_params_tokens[0]
    learner, _, states, rows = trained
    text = load(corpus)
    counts = np.bincount(text.train, minlength=257) / len(text.train)
    unigram = -np.sum(counts[counts > 0] * np.log(counts[counts > 0]))
    assert (rows["performance"][-1, :2] > -unigram + 0.8).all()
    params = jax.tree.map(lambda x: np.asarray(x)[0], states.learner.params)
    held_out = losses(model, params, learner.data.held_out)
    assert float(rows["performance"][-1, 0]) == pytest.approx(-float(held_out), rel=1e-4)
    perplexity = np.asarray(rows["validation_perplexity"])
    np.testing.assert_array_equal(np.isfinite(perplexity[:, 0]), [(t + 1) % 30 == 0 for t in range(60)])
    expected = np.exp(
        np.mean([losses(model, params, pair) for pair in np.split(np.asarray(learner.data.validation), 2)])
    )
    assert float(perplexity[-1, 0]) == pytest.approx(float(expected), rel=1e-4)
    labels = dict(dim for channel in learner.channels.values() for dim in channel.dims)
    for name in ("layer_gradient_norm", "layer_update_norm", "layer_params_norm"):
        total = np.sqrt((np.asarray(rows[name]) ** 2).sum(-1))
        np.testing.assert_allclose(total, rows[name.removeprefix("layer_")], rtol=1e-3)
        assert rows[name].shape[-1] == len(labels["layer"]) == 5
    assert rows["attention_entropy"].shape[-1] == len(labels["attention_layer"]) == 2
    assert (rows["clipped_fraction"] == (rows["gradient_norm"] > 1.0)).all()


def test_disturbed_telemetry_shows_the_disturbance_but_performance_does_not(model_params_tokens, trained):
    """The held-out text keeps its labels and tokens, and norms by layer are of the gradient that the optimizer gets."""
    learner, _, states, rows = trained
    for name, values in rows.items():
        np.testing.assert_array_equal(values[:58, :2], values[:58, 2:], err_msg=name)
    assert (rows["loss"][58:, :2] != rows["loss"][58:, 2:]).all()
    for lane in range(4):
        params = jax.tree.map(lambda x: np.asarray(x)[lane], states.learner.params)  # noqa: B023
        held_out = losses(model_params_tokens[0], params, learner.data.held_out)
        assert float(rows["performance"][-1, lane]) == pytest.approx(-float(held_out), rel=1e-5)
    by_layer = np.sqrt((np.asarray(rows["layer_gradient_norm"]) ** 2).sum(-1))
    np.testing.assert_allclose(by_layer, rows["gradient_norm"], rtol=1e-4)


class RecordingTaps:
    """Taps that change nothing and record the context of each site."""

    def __init__(self, data):
        self.data, self.contexts = data, {}

    def __call__(self, site, value, **context):
        self.contexts[site] = context
        return value


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_mask_token_of_a_text_is_its_end_of_text(corpus, tokenizer):
    text = dataclasses.replace(corpus, tokenizer=tokenizer, vocabulary=300 if tokenizer == "bpe" else None)
    loaded = load(text)
    learner = ja.learners.language_model(text, **SMALL)
    taps = RecordingTaps(learner.data)
    learner.step.__self__.read(KEY, taps)
    assert taps.contexts["tokens"]["mask"] == loaded.end_of_text
    assert (loaded.end_of_text == 256) == (tokenizer == "bytes")


@pytest.mark.slow
def test_bfloat16_with_remat_keeps_float32_parameters(corpus):
    learner = ja.learners.language_model(corpus, precision="bfloat16", remat=True, **SMALL)
    engine = Engine(plan(learner, [ja.lr_spike(1.0, onset=1, duration=1)], seeds=2, steps=2), 2)
    first = layout(engine.grid)[0]
    states, rows = engine.advance(first, engine.initial(first), 0, 2)
    assert {x.dtype for x in jax.tree.leaves(states.learner.params)} == {np.dtype(np.float32)}
    assert {x.dtype for x in jax.tree.leaves(states.learner.optimizer)} <= {np.dtype(np.float32), np.dtype(np.int32)}
    for name, values in rows.items():
        assert np.isfinite(values[:2]).all() or name == "validation_perplexity", name
    step = lambda state: learner.step(state, KEY, ja.Taps(data=learner.data))  # noqa: E731
    jaxpr = str(jax.make_jaxpr(step)(jax.eval_shape(learner.begin, KEY, learner.data)))
    assert "remat" in jaxpr
    assert "bf16" in jaxpr


def test_the_learning_rate_outside_a_run_is_its_peak(model_params_tokens):
    model, params, _ = model_params_tokens
    optimizer = model.optimizer
    update = jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params, ja.Taps())[2])
    assert float(update(params).learning_rate) == pytest.approx(5e-4)


@pytest.mark.exhaustive
def test_training_resumed_from_copied_states_samples_the_same_batches(trained):
    _, engine, _, rows = trained
    batch = layout(engine.grid)[1]
    states, _ = engine.advance(batch, engine.initial(batch), 0, 30)
    copies = engine.copies(batch, states)
    _, resumed = engine.advance(batch, engine.restored(copies, batch), 30, 60)
    for name in rows:
        np.testing.assert_array_equal(rows[name][30:60], resumed[name][:30])
    assert (rows["loss"][:, 0] != rows["loss"][:, 1]).all()


@pytest.mark.exhaustive
def test_training_begins_with_the_parameters_of_a_checkpoint(model_params_tokens, corpus, tmp_path):
    model, params, _ = model_params_tokens
    gpt2_checkpoint.save(tmp_path, params, model.model)
    learner = ja.learners.language_model(corpus, checkpoint=str(tmp_path), **SMALL)
    engine = Engine(plan(learner, [ja.lr_spike(2.0, onset=1, duration=1)], seeds=2, steps=2), 2)
    states = engine.initial(layout(engine.grid)[0]).learner
    for lane in range(2):
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[lane], y), states.params, params)  # noqa: B023
    assert learner.provenance.keys() == {"corpus", "tokens", "checkpoint"}
    for positions, n_positions in ((16, 16), (0, 8)):
        settings = SMALL | {"context": 8, "positions": positions}
        shorter = ja.learners.language_model(corpus, checkpoint=str(tmp_path), **settings)
        embedding = jax.eval_shape(shorter.begin, KEY, shorter.data).params["wpe"]["embedding"]
        assert embedding.shape == (n_positions, 64)
        np.testing.assert_array_equal(shorter.data.start["wpe"]["embedding"], params["wpe"]["embedding"][:n_positions])
    with pytest.raises(
        ValueError, match=r"'transformer.wpe.weight' has shape \[16, 64\], but this model needs \[32, 64\]"
    ):
        ja.learners.language_model(corpus, checkpoint=str(tmp_path), **SMALL | {"context": 32})


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", ["random", "checkpoint"])
def test_the_program_has_no_callbacks_and_no_large_constants(model_params_tokens, corpus, tmp_path, start):
    model, params, _ = model_params_tokens
    gpt2_checkpoint.save(tmp_path, params, model.model)
    settings = {"checkpoint": str(tmp_path)} if start == "checkpoint" else {}
    learner = ja.learners.language_model(corpus, **SMALL | settings)
    grid = plan(learner, [ja.lr_spike(2.0, onset=1, duration=1)], seeds=2, steps=3)
    run = functools.partial(ja.run, grid.program)
    assert "callback" not in str(jax.make_jaxpr(run)(ja.inputs(grid)))
    text = jax.jit(run).lower(ja.inputs(grid)).as_text()
    assert "callback" not in text
    constants = re.findall(r'dense<"0x([0-9A-F]+)">', text)  # a float32 has eight digits
    assert max((len(digits) // 8 for digits in constants), default=0) < 1_000


@pytest.mark.exhaustive
def test_learners_that_begin_with_checkpoints_share_a_program(model_params_tokens, corpus, tmp_path):
    model, params, _ = model_params_tokens
    for name, factor in (("a", 1.0), ("b", 1.5)):
        gpt2_checkpoint.save(tmp_path / name, jax.tree.map(lambda x: factor * x, params), model.model)  # noqa: B023
    learner_a, learner_b = (
        ja.learners.language_model(corpus, checkpoint=str(tmp_path / name), **SMALL) for name in ("a", "b")
    )
    assert learner_a.provenance != learner_b.provenance
    assert learner_a == learner_b != ja.learners.language_model(corpus, **SMALL)
    spike = [ja.lr_spike(2.0, onset=1, duration=1)]
    engines = [Engine(plan(learner, spike, seeds=1, steps=2), 2) for learner in (learner_a, learner_b)]
    assert engines[0].grid.program == engines[1].grid.program
    params_a, params_b = (engine.initial(layout(engine.grid)[0]).learner.params for engine in engines)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(1.5 * x, y, rtol=1e-6), params_a, params_b)
    assert [engine.grid.provenance["checkpoint"] for engine in engines] == [
        learner.provenance["checkpoint"] for learner in (learner_a, learner_b)
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": "huge"}, "size must be micro, nano, mini, 124m, 355m, 774m.*, not 'huge'"),
        ({"positions": 8}, "positions must be at least the context, 16, not 8"),
        ({"accumulation": 3}, "accumulation 3 does not divide the batch_size 8"),
        ({"context": 10**6}, "the corpus has [0-9,]+ training tokens, but one batch needs 8,000,001"),
        ({"context": 1500, "batch_size": 4}, "the second corpus has 1,[0-9]+ training tokens, but one batch"),
        ({"held_out": 1000}, "held_out = 1000 sequences need 17,000"),
        ({"beta2": 1.0}, r"beta2 must lie in \[0, 1\)"),
        ({"precision": "float16"}, "precision must be float32, bfloat16"),
        ({"attention": "cudnn"}, "attention 'cudnn' needs precision 'bfloat16'"),
        (
            {"attention": "cudnn", "precision": "bfloat16"},
            "attention 'cudnn' needs an NVIDIA GPU, and JAX runs on 'cpu'",
        ),
        ({"warmup": 1.5}, r"warmup must lie in \[0, 1\]"),
    ],
)
def test_invalid_settings_are_refused_with_a_message(corpus, settings, message):
    with pytest.raises(ValueError, match=message):
        ja.learners.language_model(corpus, **SMALL | settings)


SPEC = """
[audit]
seeds = 1
steps = 20
[task]
kind = "{kind}"
name = "{name}"
[learner]
kind = "{learner}"
[[perturbation]]
kind = "lr_spike"
"""


def test_a_learner_refuses_a_task_of_another_kind():
    for kind, name, learner, message in [
        ("text", "python-stdlib", "ppo", "learner 'ppo' trains on environments, not on a task of kind 'text'"),
        ("mujoco", "Hopper-v5", "language_model", "trains on a task of kind 'text', not 'mujoco'"),
        ("text", "nowhere.txt", "language_model", "'nowhere.txt' is neither a built-in corpus"),
    ]:
        with pytest.raises(UserError, match=message):
            parse(SPEC.format(kind=kind, name=name, learner=learner)).build()


def test_a_spec_with_a_text_is_written_with_its_defaults(corpus):
    spec = parse(SPEC.format(kind="text", name=corpus.name, learner="language_model"))
    assert parse(spec.to_toml()) == spec
    assert 'tokenizer = "bytes"' in spec.to_toml()


@pytest.mark.exhaustive
def test_distribution_shift_without_a_second_corpus_is_refused(corpus):
    text = SPEC.format(kind="text", name=corpus.name, learner="language_model")
    text = text.replace("lr_spike", "distribution_shift").replace(
        '"language_model"', '"language_model"\nsize = "micro"\ncontext = 16'
    )
    with pytest.raises(UserError, match="'distribution_shift' needs second_corpus at site 'tokens'"):
        parse(text).build()


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_specs_of_the_language_model_experiments_are_valid(path):
    spec = parse(path.read_text())
    assert spec.task.kind == "text"
    assert (spec.task.shift is not None) == any(
        e.perturbation.name.startswith("distribution") for e in spec.perturbations
    )


RUN = """
[audit]
seeds = 2
steps = 8
telemetry = "basic"
[task]
kind = "text"
name = "a.txt"
[learner]
kind = "language_model"
size = "micro"
context = 8
batch_size = 4
accumulation = 2
held_out = 2
evaluations = 0
[metrics]
window = 2
hold = 2
horizon = 2
[run]
chunk = 2
checkpoint_every = 1
[[perturbation]]
kind = "lr_spike"
onset = 4
duration = 2
"""


@pytest.mark.exhaustive
def test_resume_works_from_any_directory_and_refuses_another_corpus(tmp_path, monkeypatch):
    """Training itself is replaced: the run is created and opened up to the point where programs would be compiled."""
    executed = []
    monkeypatch.setattr(
        durable.memory, "fit", lambda grid, rows, laid_out, **_: (Engine(grid, rows), laid_out(None), None)
    )
    monkeypatch.setattr(durable, "_execute", lambda store, *_: executed.append(store.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    text, folder = tmp_path / "a.txt", tmp_path / "run"
    text.write_text("it is stable until it falls over. " * 100)
    monkeypatch.chdir(tmp_path)
    durable.run(parse(RUN), folder)
    monkeypatch.chdir("/")
    original = text.read_text()
    text.write_text(original + "and more")
    with pytest.raises(UserError, match=r"began with another corpus: [0-9a-f]{64}, and now it is"):
        durable.resume(folder)
    text.write_text(original)
    durable.resume(folder)
    assert executed == [folder, folder]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    # Equal settings share one object, so that their programs are compiled once.
    monkeypatch.setattr(sys.modules[LanguageModel.__module__], "LanguageModel", functools.cache(LanguageModel))
    text, folder = tmp_path / "a.txt", tmp_path / "stopped"
    text.write_text("it is stable until it falls over. " * 100)
    monkeypatch.chdir(tmp_path)
    durable.run(parse(RUN), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr("jaxaudit.runs.disk_sink.onset_source", raise_keyboard_interrupt)
        with pytest.raises(durable.Interrupted):
            durable.run(parse(RUN), folder)
    monkeypatch.chdir("/")
    durable.resume(folder)
    uninterrupted, resumed = (load_run(path).telemetry for path in (tmp_path / "whole", folder))
    assert uninterrupted.equals(resumed)


def raise_keyboard_interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_compile_time_does_not_grow_with_depth(corpus, monkeypatch, request):
    previous = jax.config.jax_persistent_cache_min_compile_time_secs
    request.addfinalizer(lambda: jax.config.update("jax_persistent_cache_min_compile_time_secs", previous))
    jax.config.update(
        "jax_persistent_cache_min_compile_time_secs", float("inf")
    )  # nothing is cached: every program is compiled
    names = ["lr_spike", "momentum_noise", "gradient_sign_flip", "weight_noise", "layer_reset", "token_corruption"]
    seconds = {}
    for depth in (12, 36):
        monkeypatch.setitem(gpt2.SIZES, f"{depth} layers", gpt2.Size(32, depth, 2))
        learner = ja.learners.language_model(corpus, **SMALL | {"size": f"{depth} layers"})
        kinds = [registry.perturbations[name](onset=1, duration=1) for name in names]
        engine = Engine(plan(learner, kinds, seeds=1, steps=4, lanes=1), 1)
        start = time.perf_counter()
        engine.program(layout(engine.grid)[1])
        seconds[depth] = time.perf_counter() - start
    assert seconds[36] < 1.5 * seconds[12], seconds
