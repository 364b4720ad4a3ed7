"""Compares transformers' logits with jaxaudit's, for the policy of `lora_124m.py`. Needs torch and transformers.

python transformers_logits.py OUT
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import GPT2LMHeadModel


def main() -> None:
    """Prints the differences."""
    folder = Path(sys.argv[1])
    stored = np.load(folder / "logits.npz")
    model, loading_info = GPT2LMHeadModel.from_pretrained(folder / "policy", output_loading_info=True)
    print(
        {kind: names for kind, names in loading_info.items() if names}
        or "all tensors were loaded, and there are no others"
    )
    tokens = torch.tensor(stored["tokens"], dtype=torch.long)
    largest = np.abs(stored["logits"]).max()
    for precision in (torch.float32, torch.float64):
        with torch.no_grad():
            logits = model.eval().to(precision)(tokens).logits.numpy()
        deviation = np.abs(logits - stored["logits"]).max() / largest
        print(f"logits from transformers' in {precision}, of the largest: {deviation:.3g}")


if __name__ == "__main__":
    main()
