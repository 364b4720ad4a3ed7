"""Compares this package's GPT-2 with PyTorch's: logits, loss, gradients and AdamW steps from the same weights.

python transformers_reference.py 124m OUT     # with torch and transformers
python parity.py OUT                          # with jaxaudit
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxaudit as ja
from jaxaudit.learners.language_model import LanguageModel, LanguageModelSettings
from jaxaudit.models import gpt2, gpt2_checkpoint


def main() -> None:
    """Prints the deviations."""
    for name, value in deviations(Path(sys.argv[1])).items():
        print(f"{name}: {value:.2g}")


def deviations(folder: Path) -> dict[str, float]:
    """Returns the largest deviations, by description."""
    reference = np.load(folder / "reference.npz")
    learner, params = read(folder)
    tokens = reference["tokens"].astype(np.int32)
    hidden = jax.jit(lambda p, t: gpt2.apply(learner.model, p, t)[0])(params, tokens[0, :, :-1])
    logits = hidden @ params["wte"]["embedding"].T
    gradient, telemetry = jax.jit(learner.gradient, static_argnums=2)(params, tokens[0], ja.Taps())
    gradients = gpt2_checkpoint.tensors(gradient)
    expected = {name: reference[f"gradient.{name}"] for name in gradients}
    trained, losses = train(learner, params, tokens)
    trained, initial = gpt2_checkpoint.tensors(trained), gpt2_checkpoint.tensors(params)
    return {
        "logits, absolute": np.abs(logits - reference["logits"]).max(),
        "loss, absolute": abs(float(telemetry["loss"]) - float(reference["loss"])),
        "a parameter's gradient, relative to its largest entry": max(
            np.abs(gradients[name] - expected[name]).max() / np.abs(expected[name]).max() for name in gradients
        ),
        f"loss over {len(losses)} AdamW steps, relative": np.abs(losses / reference["losses"] - 1).max(),
        "what these steps changed, root mean square, relative": max(
            rms(trained[name] - reference[f"trained.{name}"]) / rms(reference[f"trained.{name}"] - initial[name])
            for name in trained
        ),
    }


def read(folder: Path) -> tuple[LanguageModel, gpt2.Params]:
    """Returns the learner with the settings of the reference, and its parameters."""
    config = json.loads((folder / "config.json").read_text())
    gpt2.SIZES["reference"] = gpt2.Size(config["n_embd"], config["n_layer"], config["n_head"])
    settings = LanguageModelSettings(
        size="reference",
        context=config["n_positions"],
        accumulation=1,
        learning_rate=5e-4,
        warmup=0.25,
        final_rate=0.1,
        weight_decay=0.1,
        telemetry="basic",
    )
    learner = LanguageModel(config["vocab_size"], settings)
    return learner, gpt2_checkpoint.load(folder, learner.model)


def rms(x: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def train(learner: LanguageModel, params: gpt2.Params, tokens: np.ndarray) -> tuple[gpt2.Params, np.ndarray]:
    """Trains a step on each batch `[steps, B, T + 1]`; returns the parameters, and the loss before each step."""

    @jax.jit
    def step(params, optimizer, batch, index):
        taps = ja.Taps(index, len(tokens))
        gradient, telemetry = learner.gradient(params, batch, taps)
        params, optimizer, _ = learner.optimizer.update(params, optimizer, gradient, taps)
        return params, optimizer, telemetry["loss"]

    optimizer, losses = learner.optimizer.init(params), []
    for index, batch in enumerate(tokens):
        params, optimizer, loss = step(params, optimizer, batch, jnp.int32(index))
        losses.append(float(loss))
    return params, np.array(losses)


if __name__ == "__main__":
    main()
