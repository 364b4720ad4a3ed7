"""GPT-2 by PyTorch and transformers: warms up, says "ready", trains at a word, gives seconds.

Called by `common.elsewhere`: `python torch_gpt2.py THREADS BATCH LENGTH STEPS WIDTH LAYERS HEADS VOCABULARY`.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch.nn.functional import cross_entropy
from transformers_reference import build


def main(
    threads: int, batch: int, length: int, steps: int, width: int, layers: int, heads: int, vocabulary: int
) -> None:
    """Trains."""
    torch.set_num_threads(threads)
    model = build(vocabulary, length, width, layers, heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=1e-4)

    def step() -> None:
        tokens = torch.randint(0, vocabulary, (batch, length + 1))
        optimizer.zero_grad()
        logits = model(tokens[:, :-1]).logits
        cross_entropy(logits.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    print(json.dumps({"seconds": time.perf_counter() - begun}), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
