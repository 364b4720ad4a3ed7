"""Greedy generation compared with transformers: the same tokens after prompts of mixed length, from the same weights.

    python generation.py write tiny|124m OUT     # with jaxaudit: OUT/plain and OUT/adapted, in Hugging Face's format
    python transformers_generation.py OUT        # with torch and transformers: OUT/plain.npz and OUT/adapted.npz
    python generation.py compare tiny|124m OUT   # with jaxaudit

All matrices are multiplied by four, so that the tokens' probabilities are far from equal. (With norms and biases
multiplied too, attention in 12 layers is so sharp that PyTorch's logits in float32 differ by 0.2 from those in
float64.) `adapted` is a model with adapters, which jaxaudit uses directly, and which are merged in the file.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.models.gpt2 import GPT2, Params, Size
from jaxaudit.models.sampling import PADDING, generate

TINY = Path(__file__).parents[2] / "tests" / "data" / "gpt2"
MODELS = {"tiny": GPT2(40, 16, Size(16, 2, 2)), "124m": GPT2(50257, 1024, gpt2.SIZES["124m"])}
PROMPTS = {"tiny": (1, 2, 3, 4, 6, 6), "124m": (1, 9, 24)}
"""The lengths of the prompts."""

TOKENS = {"tiny": 10, "124m": 32}
"""The numbers of generated tokens."""

MATRICES = ("kernel", "embedding")
"""Names of the parameters that are multiplied."""

CLOSE = 1e-4
"""If the two largest logits differ by less, the rest of a row is not compared."""


def main() -> None:
    """Writes the models, or compares the results."""
    task, size, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    for name, params in variants(size).items():
        if task == "write":
            plain = gpt2.merged(params) if isinstance(params, gpt2.Adapted) else params
            gpt2_checkpoint.save(folder / name, plain, MODELS[size])
            np.savez(folder / name / "prompts.npz", prompts=prompts(size), tokens=TOKENS[size])
        else:
            for name_, value in deviations(size, params, folder / f"{name}.npz").items():
                print(f"{name}: {name_}: {value:.3g}")


def variants(size: str) -> dict[str, Params | gpt2.Adapted]:
    """Returns the parameters without and with adapters."""
    model, random = MODELS[size], np.random.default_rng(0)
    if size == "tiny":
        params = gpt2_checkpoint.load(TINY, model)
    else:
        params = gpt2.init_params(model, jax.random.key(0))
        # Norms and biases are moved from their initial values, so that they have an effect.
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x if path[-1].key in MATRICES else x + jnp.float32(0.02 * random.normal(size=x.shape)),
            params,
        )
    params = jax.tree_util.tree_map_with_path(lambda path, x: x * (4 if path[-1].key in MATRICES else 1), params)
    shapes = gpt2.init_adapters(model, 2, jax.random.key(0))
    adapters = jax.tree.map(lambda x: jnp.float32(0.2 / np.sqrt(x.shape[1]) * random.normal(size=x.shape)), shapes)
    return {"plain": params, "adapted": gpt2.Adapted(params, adapters)}


def prompts(size: str) -> np.ndarray:
    """Returns prompts, int32 `[N, P]`, with `PADDING` after the last token of each."""
    lengths = np.array(PROMPTS[size])[:, None]
    sampled = np.random.default_rng(1).integers(0, MODELS[size].vocabulary, (len(lengths), lengths.max()))
    return np.where(np.arange(lengths.max()) < lengths, sampled, PADDING).astype(np.int32)


def deviations(size: str, params: Params | gpt2.Adapted, recorded: Path) -> dict[str, float]:
    """Returns deviations of generation from transformers, and from a forward pass over the generated tokens.

    Deviations of logits and log-probabilities are relative to max(1, the largest absolute logit).
    """
    model, reference = MODELS[size], np.load(recorded)
    wrong = compared = 0
    result: dict[str, float] = {}
    for suffix, end in (("", None), (".end", int(reference["end"]))):
        settings = {"tokens": TOKENS[size], "greedy": True, "end": end}
        tokens, stored = map(np.asarray, generate(model, params, prompts(size), jax.random.key(0), **settings))
        generated, unambiguous = (
            generated_part(size, tokens),
            np.cumsum(reference[f"margin{suffix}"] < CLOSE, axis=1) == 0,
        )
        expected = reference[f"tokens{suffix}"]
        wrong += int(np.sum((generated != expected) & unambiguous))
        compared += int(np.sum(unambiguous & (expected != PADDING)))
        if end is not None:
            result["rows that ended"] = int(np.sum((generated == end).any(axis=1)))
            continue
        logits = np.asarray(jax.jit(logits_of, static_argnums=0)(model, params, np.maximum(tokens, 0)), np.float64)
        log_softmax = logits - logits.max(-1, keepdims=True)
        log_softmax -= np.log(np.exp(log_softmax).sum(-1, keepdims=True))
        forward_log_probs = np.take_along_axis(log_softmax[:, :-1], np.maximum(tokens, 0)[:, 1:, None], axis=-1)[..., 0]
        forward_log_probs = generated_part(size, np.pad(forward_log_probs, ((0, 0), (1, 0))))
        largest = max(1.0, np.abs(logits).max())
        log_probs = generated_part(size, stored)
        result["largest logit"] = largest
        result["stored log-probabilities from a forward pass's"] = np.abs(log_probs - forward_log_probs).max() / largest
        reference_log_probs = np.where(generated == expected, reference["log_probability"], log_probs)
        result["stored log-probabilities from transformers'"] = (
            np.abs(log_probs - reference_log_probs)[unambiguous].max() / largest
        )
    return {"tokens that are others": wrong, "tokens compared": compared, **result}


def logits_of(model: GPT2, params: Params | gpt2.Adapted, tokens: jax.Array) -> jax.Array:
    """Returns the logits at every position, `[N, T, V]`."""
    return gpt2.logits(params, gpt2.apply(model, params, tokens)[0])


def generated_part(size: str, rows: np.ndarray) -> np.ndarray:
    """Selects the generated positions: `[N, P + tokens]` to `[N, tokens]`."""
    return np.take_along_axis(rows, np.array(PROMPTS[size])[:, None] + np.arange(TOKENS[size]), axis=1)


if __name__ == "__main__":
    main()
