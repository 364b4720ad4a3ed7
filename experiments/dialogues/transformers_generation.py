"""Greedy generation by transformers, as the reference of `generation.py` and the tests. Needs torch and transformers.

    python transformers_generation.py OUT

OUT has the folders `plain` and `adapted`, written by `generation.py`. `plain.npz` and `adapted.npz` get for each row
the new tokens, with -1 after the end, their log-probabilities, and the margin between the two largest logits; and the
same (names with ".end") with `end`, a token that some rows contain, as the end of text.
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
        inputs = np.load(folder / name / "prompts.npz")
        complete = generate(model, inputs["prompts"], int(inputs["tokens"]), None)
        # The token that occurs in most rows, but not among the first two.
        later = complete["tokens"][:, 2:]
        end = max(np.unique(later), key=lambda token: ((later == token).any(axis=1).sum(), -token))
        ended = generate(model, inputs["prompts"], int(inputs["tokens"]), int(end))
        ended = {f"{key}.end": value for key, value in ended.items()}
        np.savez_compressed(folder / f"{name}.npz", end=end, **complete, **ended)


def generate(model: GPT2LMHeadModel, prompts: np.ndarray, tokens: int, end: int | None) -> dict[str, np.ndarray]:
    """Returns what transformers generates after prompts `[N, P]`, padded on the left: arrays `[N, tokens]`."""
    lengths = (prompts >= 0).sum(1)
    padded = np.stack([np.roll(row, prompts.shape[1] - length) for row, length in zip(prompts, lengths, strict=True)])
    # The default end of text is the last token.
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        output = model.generate(
            torch.tensor(np.maximum(padded, 0), dtype=torch.long),
            attention_mask=torch.tensor(padded >= 0, dtype=torch.long),
            do_sample=False,
            max_new_tokens=tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    new = output.sequences[:, prompts.shape[1] :].numpy()
    logits = torch.stack(output.logits, dim=1).double()
    log_softmax = torch.log_softmax(logits, dim=-1).numpy()
    best = torch.topk(logits, 2, dim=-1).values.numpy()
    before_end = np.ones(new.shape, bool)
    if end is not None:
        before_end[:, 1:] = np.cumsum(new == end, axis=1)[:, :-1] == 0
    token_log_probs = np.take_along_axis(log_softmax, new[..., None], axis=-1)[..., 0]

    def padded_to_end(values: np.ndarray, missing: float) -> np.ndarray:
        """Pads arrays to all positions, since all rows may end before the last one."""
        values = np.where(before_end, values, missing)
        return np.pad(values, ((0, 0), (0, tokens - new.shape[1])), constant_values=missing)

    return {
        "tokens": padded_to_end(new, -1).astype(np.int32),
        "log_probability": padded_to_end(token_log_probs, 0.0),
        "margin": padded_to_end(best[..., 0] - best[..., 1], np.inf),
    }


if __name__ == "__main__":
    main()
