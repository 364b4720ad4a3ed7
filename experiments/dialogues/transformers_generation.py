"""Greedy generation by transformers: what `generation.py` and the tests compare with. Needs torch and transformers.

    python transformers_generation.py OUT

OUT has the folders `plain` and `adapted`, written by `generation.py`. `plain.npz` and `adapted.npz` get, of each row's
new tokens: which, -1 after the end; their log-probabilities; by how much the likeliest logit is above the next; and
once more (names with ".end") with `end`, a token that some rows write, ending them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2LMHeadModel


def main() -> None:
    """Writes the references."""
    folder = Path(sys.argv[1])
    for name in ("plain", "adapted"):
        model = GPT2LMHeadModel.from_pretrained(folder / name).eval()
        given = np.load(folder / name / "prompts.npz")
        whole = written(model, given["prompts"], int(given["tokens"]), None)
        # The token that most rows write, and not at once.
        later = whole["tokens"][:, 2:]
        end = max(np.unique(later), key=lambda token: ((later == token).any(axis=1).sum(), -token))
        ended = written(model, given["prompts"], int(given["tokens"]), int(end))
        ended = {f"{key}.end": value for key, value in ended.items()}
        np.savez_compressed(folder / f"{name}.npz", end=end, **whole, **ended)


def written(model: GPT2LMHeadModel, prompts: np.ndarray, tokens: int, end: int | None) -> dict[str, np.ndarray]:
    """What transformers generates after prompts `[N, P]`, which it wants padded on the left: `[N, tokens]` each."""
    lengths = (prompts >= 0).sum(1)
    padded = np.stack([np.roll(row, prompts.shape[1] - length) for row, length in zip(prompts, lengths, strict=True)])
    # It asks for some end, and its own default is the last token.
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        found = model.generate(
            torch.tensor(np.maximum(padded, 0), dtype=torch.long),
            attention_mask=torch.tensor(padded >= 0, dtype=torch.long),
            do_sample=False,
            max_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    new = found.sequences[:, prompts.shape[1] :].numpy()
    logits = torch.stack(found.logits, dim=1).double()
    logs = torch.log_softmax(logits, dim=-1).numpy()
    best = torch.topk(logits, 2, dim=-1).values.numpy()
    own = np.ones(new.shape, bool)
    if end is not None:
        own[:, 1:] = np.cumsum(new == end, axis=1)[:, :-1] == 0
    of_token = np.take_along_axis(logs, new[..., None], axis=-1)[..., 0]

    def whole(values: np.ndarray, missing: float) -> np.ndarray:
        """Rows may all have ended before the last token."""
        values = np.where(own, values, missing)
        return np.pad(values, ((0, 0), (0, tokens - new.shape[1])), constant_values=missing)

    return {
        "tokens": whole(new, -1).astype(np.int32),
        "log_probability": whole(of_token, 0.0),
        "margin": whole(best[..., 0] - best[..., 1], np.inf),
    }


if __name__ == "__main__":
    main()
