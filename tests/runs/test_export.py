"""`jaxaudit export`: a lane's model in Hugging Face's format gives the log-probabilities that the run reported."""

import json
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cli_errors import cli_error
from small_runs import spec_header

import jaxaudit as ja
from jaxaudit.analysis.run_reader import load
from jaxaudit.execution import engine
from jaxaudit.learners.dialogue.learner import Trained
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.spec.document import load as load_spec

pytestmark = pytest.mark.exhaustive

SPIKE = '[[perturbation]]\nkind = "lr_spike"\nmagnitude = 10\nonset = 1\nduration = 1\n'
ADAPTED = f"""
[audit]
seeds = 2
steps = 2
[task]
kind = "dialogue"
name = "text"
file = "lines.jsonl"
verifier = "regex"
length = 12
[learner]
kind = "grpo"
checkpoint = "start"
lora_rank = 2
prompts = 2
group_size = 4
performance_rows = 2
epochs = 1
minibatches = 1
learning_rate = 1e-2
{SPIKE}"""
PLAIN = f"""
[audit]
seeds = 2
steps = 2
telemetry = "basic"
[task]
kind = "text"
name = "text.txt"
[learner]
kind = "language_model"
size = "micro"
context = 16
batch_size = 2
accumulation = 1
held_out = 2
evaluations = 0
{SPIKE}"""
MODEL = gpt2.GPT2(257, 1024, gpt2.SIZES["micro"])
LANES = ((0, "control"), (1, "control"), (1, "lr_spike 10"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder with the files that the specs name."""
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": f"{i}: ", "answer": "[a-z]"} for i in range(10)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(2000))))
    return tmp_path


@pytest.fixture
def train(folder, run_cli):
    """Returns a function that runs a spec in the current folder, and returns its telemetry."""

    def train_spec(spec):
        (folder / "spec.toml").write_text(spec)
        result = run_cli("run", "spec.toml", "-o", "run")
        assert result.code == 0, result.err
        return load(folder / "run").telemetry

    return train_spec


def export(run_cli, seed, condition):
    """Exports a lane's model, and returns its folder."""
    out = f"policy-{seed}-{condition}"
    result = run_cli("export", "run", "-o", out, "--seed", seed, "--condition", condition)
    assert result.code == 0, result.err
    assert result.out.splitlines()[0].endswith(f"{out}: seed {seed}, {condition}, after 2 steps")
    return out


def log_softmax(model, params, tokens):
    """Returns the log-probabilities of each token's successors, in float64, `[N, T, V]`."""
    logits = np.asarray(gpt2.logits(params, gpt2.apply(model, params, tokens)[0]), np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def with_noise(params, seed=0):
    """Returns parameters with noise, so that they are all different."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.float32(0.1 * random.normal(size=x.shape)), params)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_saved_policy_is_the_learners(folder, rank):
    start = with_noise(gpt2.init_params(MODEL, jax.random.key(0)))
    gpt2_checkpoint.save("start", start, MODEL)
    dialogue = ja.dialogues.named("text", file="lines.jsonl", verifier="regex", length=12)
    learner = ja.learners.grpo(dialogue, checkpoint="start", lora_rank=rank)
    params = with_noise(gpt2.init_adapters(MODEL, rank, jax.random.key(1)) if rank else start, seed=1)
    state = types.SimpleNamespace(policy=Trained(params, None))
    learner.save(Path("policy"), state, learner.data)
    assert json.loads(Path("policy/config.json").read_text())["eos_token_id"] == 256
    tokens = np.arange(20, dtype=np.int32).reshape(2, 10)
    expected = log_softmax(MODEL, gpt2.Adapted(start, params) if rank else params, tokens)
    actual = log_softmax(MODEL, gpt2_checkpoint.load("policy", MODEL), tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert np.abs(actual - log_softmax(MODEL, start, tokens)).max() > 0.1


@pytest.mark.slow
def test_a_policy_with_adapters_gives_the_reported_log_probabilities(train, run_cli):
    gpt2_checkpoint.save("start", with_noise(gpt2.init_params(MODEL, jax.random.key(0))), MODEL)
    telemetry = train(ADAPTED).isel(step=-1)
    roles = telemetry["shown_role"].attrs["words"]
    gaps = np.zeros((len(LANES), len(LANES)))
    for row, (seed, condition) in enumerate(LANES):
        out = export(run_cli, seed, condition)
        params = gpt2_checkpoint.load(out, MODEL)
        for column, lane in enumerate(LANES):
            shown = telemetry.sel(seed=lane[0]).isel(condition=list(telemetry["condition"].values).index(lane[1]))
            tokens, role = shown["shown_token"].values, shown["shown_role"].values
            is_policy = role[:, 1:] == roles.index("own")
            log_probs = log_softmax(MODEL, params, np.maximum(tokens, 0))[:, :-1]
            log_prob = np.take_along_axis(log_probs, np.maximum(tokens, 0)[:, 1:, None], -1)[..., 0]
            gaps[row, column] = np.abs(log_prob - shown["shown_log_probability"].values[:, 1:])[is_policy].max()
    assert np.diag(gaps).max() < 1e-4
    assert gaps[~np.eye(len(LANES), dtype=bool)].min() > 1e-2


@pytest.mark.exhaustive
def test_a_language_model_gives_the_reported_performance(train, run_cli, monkeypatch):
    """Its lanes are copied from the devices one by one, as large ones are."""
    telemetry = train(PLAIN).isel(step=-1)
    monkeypatch.setattr(engine, "PIECE", 1)
    tokens = load_spec("run/spec.toml").build().data.held_out.astype(np.int32)
    model = gpt2.GPT2(257, 16, gpt2.SIZES["micro"])
    performances = []
    for seed, condition in LANES:
        log_probs = log_softmax(model, gpt2_checkpoint.load(export(run_cli, seed, condition), model), tokens[:, :-1])
        performances.append(np.take_along_axis(log_probs, tokens[:, 1:, None], -1).mean())
        lane = telemetry.sel(seed=seed).isel(condition=list(telemetry["condition"].values).index(condition))
        np.testing.assert_allclose(performances[-1], lane["performance"], rtol=1e-5)
    assert np.abs(np.diff(performances)).min() > 1e-3


def test_a_learner_without_model_has_no_export(train, capsys):
    train(spec_header(seeds=1, steps=4))
    assert "learner 'quadratic' has nothing to export" in cli_error(capsys, "export", "run", "-o", "policy")
