"""GPT-2 of PyTorch and transformers, as the reference of `parity.py` and the tests. Needs torch and transformers.

    python transformers_reference.py SIZE OUT [--batch 2] [--length 64]

OUT gets `model.safetensors` and `config.json` (random weights), and `reference.npz`: tokens `[steps, B, T + 1]`, the
logits of the first batch, its loss and gradients, the losses of AdamW steps from these weights, and the resulting
parameters. Training has clipping at 1, weight decay of 0.1 on matrices only, and a warmup of 5 steps before a cosine.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

SIZES = {"tiny": (40, 16, 16, 2, 2), "124m": (50257, 1024, 768, 12, 12)}
"""Vocabulary, context, width, layers, heads."""

STEPS, WARMUP, RATE, FINAL, DECAY = 20, 5, 5e-4, 0.1, 0.1


def main() -> None:
    """Writes the reference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, help="64, or the model's context if it is shorter")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    vocabulary, context, *_ = SIZES[arguments.size]
    model = build(*SIZES[arguments.size])
    model.save_pretrained(arguments.out)
    length = arguments.length or min(64, context)
    tokens = torch.randint(0, vocabulary, (STEPS, arguments.batch, length + 1))
    logits = model(tokens[0, :, :-1]).logits
    loss = loss_of(model, tokens[0])
    loss.backward()
    gradients = {f"gradient.{name}": p.grad.numpy() for name, p in model.named_parameters()}
    results = {"tokens": tokens.numpy(), "logits": logits.detach().numpy(), "loss": loss.item(), **gradients}
    results = {name: np.array(value) for name, value in results.items()}
    losses = train(model, tokens)
    trained = {f"trained.{name}": p.detach().numpy() for name, p in model.named_parameters()}
    np.savez_compressed(arguments.out / "reference.npz", **results, losses=losses, **trained)


def build(vocabulary: int, context: int, width: int, layers: int, heads: int) -> GPT2LMHeadModel:
    """Returns a random model without dropout, with norms and biases moved from their initial values."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=context,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=vocabulary - 1,
        eos_token_id=vocabulary - 1,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def loss_of(model: GPT2LMHeadModel, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the mean cross entropy of predicting each next token of `[B, T + 1]`."""
    logits = model(tokens[:, :-1]).logits
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def train(model: GPT2LMHeadModel, tokens: torch.Tensor) -> np.ndarray:
    """Trains the model, and returns the loss before each AdamW step."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    for batch in tokens:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return np.array(losses)


def rate(step: int) -> float:
    """Returns the learning rate at a step as a share of its peak."""
    if step < WARMUP:
        return step / WARMUP
    passed = (step - WARMUP) / (STEPS - WARMUP)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * passed))


if __name__ == "__main__":
    main()
