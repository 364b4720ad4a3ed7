"""Times GPT-2 of PyTorch and transformers.

For each precision it warms up, prints "ready", trains when it gets a line of input, and prints the seconds.
`common.WarmProcesses` calls it as

    python torch_gpt2.py THREADS BATCH LENGTH STEPS WIDTH LAYERS HEADS VOCABULARY [PRECISION ...]

PRECISION is float32 (the default), tf32 (float32 whose products have 10 bits on a GPU), bfloat16 (autocast) or
bfloat16-compiled (the same under torch.compile). Attention is torch's sdpa. It runs on a GPU if there is one.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch.nn.functional import cross_entropy
from transformers_reference import build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP = 3


def main(
    threads: int,
    batch: int,
    length: int,
    steps: int,
    width: int,
    layers: int,
    heads: int,
    vocabulary: int,
    precisions: list[str],
) -> None:
    """Trains a new model in each precision."""
    torch.set_num_threads(threads)
    for precision in precisions:
        torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
        model = build(vocabulary, length, width, layers, heads).to(DEVICE)
        step = training_step(model, batch, length, vocabulary, precision)
        torch.cuda.reset_peak_memory_stats() if DEVICE == "cuda" else None
        for _ in range(WARM_UP if DEVICE == "cuda" else 1):
            step()
        wait()
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        for _ in range(steps):
            step()
        wait()
        peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else None
        print(json.dumps({"seconds": time.perf_counter() - start, "peak_bytes": peak}), flush=True)
        del model, step
        torch.cuda.empty_cache() if DEVICE == "cuda" else None


def training_step(model, batch: int, length: int, vocabulary: int, precision: str):
    """Returns a function that trains `model` on a batch of random tokens with AdamW and clipping."""
    bfloat16 = precision.startswith("bfloat16")
    forward = torch.compile(model) if precision.endswith("compiled") else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=1e-4, fused=DEVICE == "cuda"
    )

    def step() -> None:
        tokens = torch.randint(0, vocabulary, (batch, length + 1), device=DEVICE)
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=bfloat16):
            logits = forward(tokens[:, :-1]).logits
            loss = cross_entropy(logits.reshape(-1, vocabulary), tokens[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def wait() -> None:
    """Waits for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:9]), precisions=sys.argv[9:] or ["float32"])
