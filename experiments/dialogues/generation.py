"""Greedy generation beside transformers': the same tokens after prompts of mixed length, from one file of weights.

    python generation.py write tiny|124m OUT     # with jaxaudit: OUT/plain and OUT/adapted, as Hugging Face has them
    python transformers_generation.py OUT        # with torch and transformers: OUT/plain.npz and OUT/adapted.npz
    python generation.py compare tiny|124m OUT   # with jaxaudit

All matrices are four times as large as they began, so that tokens are far from equally likely. (With norms and biases
as large, attention in 12 layers is so sharp that PyTorch's own logits in float32 are 0.2 off those in float64.)
`adapted` is the model with adapters, which is generated from as it is here and merged in the file.
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
"""Their lengths."""

TOKENS = {"tiny": 10, "124m": 32}
"""How many are written."""

MATRICES = ("kernel", "embedding")
"""What is made larger."""

CLOSE = 1e-4
"""The two best logits' difference below which a row is no longer compared."""


def main() -> None:
    """Writes or compares."""
    task, size, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    for name, params in variants(size).items():
        if task == "write":
            plain = gpt2.merged(params) if isinstance(params, gpt2.Adapted) else params
            gpt2_checkpoint.save(folder / name, plain, MODELS[size])
            np.savez(folder / name / "prompts.npz", prompts=prompts(size), tokens=TOKENS[size])
        else:
            for what, value in deviations(size, params, folder / f"{name}.npz").items():
                print(f"{name}: {what}: {value:.3g}")


def variants(size: str) -> dict[str, Params | gpt2.Adapted]:
    """The parameters, without adapters and with them."""
    model, random = MODELS[size], np.random.default_rng(0)
    if size == "tiny":
        params = gpt2_checkpoint.load(TINY, model)
    else:
        params = gpt2.init_params(model, jax.random.key(0))
        # Norms and biases are moved from where they begin, to be seen.
        params = jax.tree_util.tree_map_with_path(
            lambda path, x: x if path[-1].key in MATRICES else x + jnp.float32(0.02 * random.normal(size=x.shape)),
            params,
        )
    params = jax.tree_util.tree_map_with_path(lambda path, x: x * (4 if path[-1].key in MATRICES else 1), params)
    shapes = gpt2.init_adapters(model, 2, jax.random.key(0))
    adapters = jax.tree.map(lambda x: jnp.float32(0.2 / np.sqrt(x.shape[1]) * random.normal(size=x.shape)), shapes)
    return {"plain": params, "adapted": gpt2.Adapted(params, adapters)}


def prompts(size: str) -> np.ndarray:
    """Int32 `[N, P]`, `PADDING` after each one's last token."""
    lengths = np.array(PROMPTS[size])[:, None]
    drawn = np.random.default_rng(1).integers(0, MODELS[size].vocabulary, (len(lengths), lengths.max()))
    return np.where(np.arange(lengths.max()) < lengths, drawn, PADDING).astype(np.int32)


def deviations(size: str, params: Params | gpt2.Adapted, recorded: Path) -> dict[str, float]:
    """How far generation is from transformers', and from a forward pass over what was generated.

    Logits and log-probabilities are told in parts of max(1, the largest logit's size).
    """
    model, reference = MODELS[size], np.load(recorded)
    wrong = compared = 0
    found: dict[str, float] = {}
    for suffix, end in (("", None), (".end", int(reference["end"]))):
        settings = {"tokens": TOKENS[size], "greedy": True, "end": end}
        tokens, stored = map(np.asarray, generate(model, params, prompts(size), jax.random.key(0), **settings))
        own, sure = written(size, tokens), np.cumsum(reference[f"margin{suffix}"] < CLOSE, axis=1) == 0
        wanted = reference[f"tokens{suffix}"]
        wrong += int(np.sum((own != wanted) & sure))
        compared += int(np.sum(sure & (wanted != PADDING)))
        if end is not None:
            found["rows that ended"] = int(np.sum((own == end).any(axis=1)))
            continue
        logits = np.asarray(jax.jit(logits_of, static_argnums=0)(model, params, np.maximum(tokens, 0)), np.float64)
        logs = logits - logits.max(-1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(-1, keepdims=True))
        of_token = np.take_along_axis(logs[:, :-1], np.maximum(tokens, 0)[:, 1:, None], axis=-1)[..., 0]
        of_token = written(size, np.pad(of_token, ((0, 0), (1, 0))))
        largest = max(1.0, np.abs(logits).max())
        mine = written(size, stored)
        found["largest logit"] = largest
        found["stored log-probabilities from a forward pass's"] = np.abs(mine - of_token).max() / largest
        theirs = np.where(own == wanted, reference["log_probability"], mine)
        found["stored log-probabilities from transformers'"] = np.abs(mine - theirs)[sure].max() / largest
    return {"tokens that are others": wrong, "tokens compared": compared, **found}


def logits_of(model: GPT2, params: Params | gpt2.Adapted, tokens: jax.Array) -> jax.Array:
    """Of every place, `[N, T, V]`."""
    return gpt2.logits(params, gpt2.apply(model, params, tokens)[0])


def written(size: str, rows: np.ndarray) -> np.ndarray:
    """What stands where tokens were generated: `[N, P + tokens]` to `[N, tokens]`."""
    return np.take_along_axis(rows, np.array(PROMPTS[size])[:, None] + np.arange(TOKENS[size]), axis=1)


if __name__ == "__main__":
    main()
