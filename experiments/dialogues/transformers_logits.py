"""Logits by transformers of the policy that `lora_124m.py` trained. Needs torch and transformers.

python transformers_logits.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2LMHeadModel


def main() -> None:
    """Compares."""
    folder = Path(sys.argv[1])
    given = np.load(folder / "logits.npz")
    model, told = GPT2LMHeadModel.from_pretrained(folder / "policy", output_loading_info=True)
    print({what: found for what, found in told.items() if found} or "every tensor was read, and no other is there")
    tokens = torch.tensor(given["tokens"], dtype=torch.long)
    largest = np.abs(given["logits"]).max()
    for precision in (torch.float32, torch.float64):
        with torch.no_grad():
            logits = model.eval().to(precision)(tokens).logits.numpy()
        apart = np.abs(logits - given["logits"]).max() / largest
        print(f"logits from transformers' in {precision}, of the largest: {apart:.3g}")


if __name__ == "__main__":
    main()
