"""`jaxaudit export`: a lane's model in Hugging Face's format tells of the run's rows what the run told of them."""

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
def place(tmp_path, monkeypatch):
    """The current folder, an empty one but for what specs name."""
    monkeypatch.chdir(tmp_path)
    lines = [{"prompt": f"{i}: ", "answer": "[a-z]"} for i in range(10)]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "text.txt").write_text(" ".join(map(str, range(2000))))
    return tmp_path


@pytest.fixture
def run(place, run_cli):
    """Runs a spec in the current folder, and gives its telemetry."""

    def done(spec):
        (place / "spec.toml").write_text(spec)
        ran = run_cli("run", "spec.toml", "-o", "run")
        assert ran.code == 0, ran.err
        return load(place / "run").telemetry

    return done


def exported(here, seed, condition):
    """The folder that a lane's model was written to."""
    out = f"policy-{seed}-{condition}"
    done = here("export", "run", "-o", out, "--seed", seed, "--condition", condition)
    assert done.code == 0, done.err
    assert done.out.splitlines()[0].endswith(f"{out}: seed {seed}, {condition}, after 2 steps")
    return out


def log_softmax(model, params, tokens):
    """Of each token's successors, float64 `[N, T, V]`."""
    logits = np.asarray(gpt2.logits(params, gpt2.apply(model, params, tokens)[0]), np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def moved(params, seed=0):
    """Parameters with noise, so that none are all alike."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.float32(0.1 * random.normal(size=x.shape)), params)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_policy_as_its_learner_saves_it(place, rank):
    start = moved(gpt2.init_params(MODEL, jax.random.key(0)))
    gpt2_checkpoint.save("start", start, MODEL)
    dialogue = ja.dialogues.named("text", file="lines.jsonl", verifier="regex", length=12)
    learner = ja.learners.grpo(dialogue, checkpoint="start", lora_rank=rank)
    params = moved(gpt2.init_adapters(MODEL, rank, jax.random.key(1)) if rank else start, seed=1)
    state = types.SimpleNamespace(policy=Trained(params, None))
    learner.save(Path("policy"), state, learner.data)
    assert json.loads(Path("policy/config.json").read_text())["eos_token_id"] == 256
    tokens = np.arange(20, dtype=np.int32).reshape(2, 10)
    wanted = log_softmax(MODEL, gpt2.Adapted(start, params) if rank else params, tokens)
    found = log_softmax(MODEL, gpt2_checkpoint.load("policy", MODEL), tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(found - log_softmax(MODEL, start, tokens)).max() > 0.1


@pytest.mark.slow
def test_a_policy_with_adapters(run, run_cli):
    gpt2_checkpoint.save("start", moved(gpt2.init_params(MODEL, jax.random.key(0))), MODEL)
    telemetry = run(ADAPTED).isel(step=-1)
    roles = telemetry["shown_role"].attrs["words"]
    gaps = np.zeros((len(LANES), len(LANES)))
    for place, (seed, condition) in enumerate(LANES):
        out = exported(run_cli, seed, condition)
        params = gpt2_checkpoint.load(out, MODEL)
        for other, lane in enumerate(LANES):
            shown = telemetry.sel(seed=lane[0]).isel(condition=list(telemetry["condition"].values).index(lane[1]))
            tokens, role = shown["shown_token"].values, shown["shown_role"].values
            mine = role[:, 1:] == roles.index("own")
            logs = log_softmax(MODEL, params, np.maximum(tokens, 0))[:, :-1]
            told = np.take_along_axis(logs, np.maximum(tokens, 0)[:, 1:, None], -1)[..., 0]
            gaps[place, other] = np.abs(told - shown["shown_log_probability"].values[:, 1:])[mine].max()
    assert np.diag(gaps).max() < 1e-4
    assert gaps[~np.eye(len(LANES), dtype=bool)].min() > 1e-2


@pytest.mark.exhaustive
def test_a_language_model(run, run_cli, monkeypatch):
    """Whose lanes come off the devices one by one, as large ones do."""
    telemetry = run(PLAIN).isel(step=-1)
    monkeypatch.setattr(engine, "PIECE", 1)
    tokens = load_spec("run/spec.toml").build().data.held_out.astype(np.int32)
    model = gpt2.GPT2(257, 16, gpt2.SIZES["micro"])
    found = []
    for seed, condition in LANES:
        logs = log_softmax(model, gpt2_checkpoint.load(exported(run_cli, seed, condition), model), tokens[:, :-1])
        found.append(np.take_along_axis(logs, tokens[:, 1:, None], -1).mean())
        lane = telemetry.sel(seed=seed).isel(condition=list(telemetry["condition"].values).index(condition))
        np.testing.assert_allclose(found[-1], lane["performance"], rtol=1e-5)
    assert np.abs(np.diff(found)).min() > 1e-3


def test_refusals(run, capsys):
    run(spec_header(seeds=1, steps=4))
    assert "learner 'quadratic' has nothing to export" in cli_error(capsys, "export", "run", "-o", "policy")
