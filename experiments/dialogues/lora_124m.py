"""GRPO of a GPT-2 of 124M parameters with adapters, from Hugging Face's format and back.

    python lora_124m.py write OUT                        # a tokenizer, a random checkpoint, prompts and answers, a spec
    JAX_NUM_CPU_DEVICES=1 python planned_memory.py OUT/spec.toml OUT/run    # like jaxaudit run; three iterations
    jaxaudit export OUT/run -o OUT/policy                # the policy with merged adapters
    python lora_124m.py read OUT                         # logits by jaxaudit, compared with the run's log-probabilities
    python transformers_logits.py OUT                    # with torch and transformers: the same logits

The checkpoint has the format of GPT-2, but is not trained. It has 50,257 tokens (byte pairs of the Python standard
library's sources) and 1,024 positions. Its matrices are random, and twice as large as usual initial ones.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
from tokenizers import ByteLevelBPETokenizer

from jaxaudit.analysis.run_reader import load
from jaxaudit.models import gpt2, gpt2_checkpoint

MODEL = gpt2.GPT2(50257, 1024, gpt2.SIZES["124m"])
END = "<|endoftext|>"
SPEC = """
[audit]
name = "lora-124m"
seeds = 1
steps = 3
[task]
kind = "dialogue"
name = "text"
file = "{folder}/lines.jsonl"
tokenizer = "{folder}/start"
verifier = "contains"
length = 32
[learner]
kind = "grpo"
size = "124m"
checkpoint = "{folder}/start"
lora_rank = 8
remat = true
prompts = 2
group_size = 4
learning_rate = 1e-3
performance_rows = 4
[metrics]
window = 2
hold = 1
horizon = 1
[run]
chunk = 1
"""


def main() -> None:
    """Runs a command."""
    {"write": write, "read": read}[sys.argv[1]](Path(sys.argv[2]))


def write(folder: Path) -> None:
    """Writes all files that a run needs."""
    start = folder / "start"
    start.mkdir(parents=True)
    _tokenizer().save_model(str(start))
    vocabulary = json.loads((start / "vocab.json").read_text()) | {END: MODEL.vocabulary - 1}
    assert len(vocabulary) == MODEL.vocabulary, f"{len(vocabulary)} byte pairs: too few sources"
    (start / "vocab.json").write_text(json.dumps(vocabulary))
    params = jax.jit(gpt2.init_params, static_argnums=0)(MODEL, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * (2 if path[-1].key in ("kernel", "embedding") else 1), params
    )
    gpt2_checkpoint.save(start, params, MODEL)
    lines = [{"prompt": f"Write a word with the letter {letter}:", "answer": letter} for letter in "jqzJKQWXYZ"]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "spec.toml").write_text(SPEC.format(folder=folder.resolve()))


def _tokenizer() -> ByteLevelBPETokenizer:
    """Trains byte pairs without an end of text, which gets the last number as in GPT-2."""
    encoder = ByteLevelBPETokenizer()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    texts = (file.read_text(errors="replace") for file in files if "site-packages" not in file.parts)
    encoder.train_from_iterator(texts, vocab_size=MODEL.vocabulary - 1, min_frequency=2, show_progress=False)
    return encoder


def read(folder: Path) -> None:
    """Compares the policy's log-probabilities with those that the run stored for its last rows; stores its logits."""
    telemetry = load(folder / "run").telemetry.isel(seed=0, condition=0, step=-1)
    tokens = np.maximum(telemetry["shown_token"].values, 0).astype(np.int32)
    policy_tokens = telemetry["shown_role"].values[:, 1:] == telemetry["shown_role"].attrs["words"].index("own")
    logits = {}
    for name in ("policy", "start"):
        params = gpt2_checkpoint.load(folder / name, MODEL)
        logits[name] = np.asarray(jax.jit(_logits)(params, tokens))
    np.savez(folder / "logits.npz", tokens=tokens, logits=logits["policy"])
    log_softmax = np.asarray(jax.nn.log_softmax(logits["policy"][:, :-1].astype(np.float64)))
    log_probs = np.take_along_axis(log_softmax, tokens[:, 1:, None], axis=-1)[..., 0]
    deviation = np.abs(log_probs - telemetry["shown_log_probability"].values[:, 1:])[policy_tokens].max()
    largest = np.abs(logits["policy"]).max()
    print(f"largest logit: {largest:.3g}")
    print(f"training moved logits by, of the largest: {np.abs(logits['policy'] - logits['start']).max() / largest:.3g}")
    print(
        f"{policy_tokens.sum()} policy tokens: log-probabilities minus those the run stored, at most: {deviation:.3g}"
    )


def _logits(params: gpt2.Params, tokens: jax.Array) -> jax.Array:
    return gpt2.logits(params, gpt2.apply(MODEL, params, tokens)[0])


if __name__ == "__main__":
    main()
