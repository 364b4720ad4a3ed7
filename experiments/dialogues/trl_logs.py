"""Logs written by TRL: small runs of its GRPO, of which one has 100 times the learning rate in the second half.

    python trl_logs.py FOLDER

trains a random GPT-2 of two layers to write "yes", on a CPU in about a minute, and writes for every run

    FOLDER/<run>/trainer_state.json     the state that the trainer stores with a checkpoint, with `log_history`
    FOLDER/<run>/log.jsonl              the same logs from a callback, one object per line

It needs torch, transformers and trl; nothing is downloaded.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

CLEAN, STEPS, DISTURBED_FROM, FACTOR = 7, 30, 15, 100.0
WORDS = ("<pad>", "<end>", "yes", "no", "is", "it", "?", *(f"w{i}" for i in range(25)))


class Disturb(TrainerCallback):
    """Multiplies the learning rate of updates from a step on, without a change of the scheduler and the logged rate."""

    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        """Multiplies the rate, which the scheduler sets again after the update."""
        if state.global_step >= DISTURBED_FROM:
            for group in optimizer.param_groups:
                group["lr"] *= FACTOR


class Lines(TrainerCallback):
    """Writes what is logged as JSON lines."""

    def __init__(self, path):
        self.path = path

    def on_log(self, args, state, control, logs, **_):
        """Writes one object as a line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def says_yes(completions, **_):
    """Returns for each completion the share of its words that are "yes"."""
    return [sum(word == "yes" for word in text.split()) / max(len(text.split()), 1) for text in completions]


def train(folder: Path, seed: int, callbacks=()):
    """Trains one run, with its logs in `folder`."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words(), pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64}
    config = GPT2Config(vocab_size=len(WORDS), bos_token_id=1, eos_token_id=1, pad_token_id=0, **size)
    start = folder / "start"  # the trainer loads it again as the reference
    GPT2LMHeadModel(config).save_pretrained(start)
    settings = GRPOConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=8,
        max_steps=STEPS,
        learning_rate=3e-4,
        lr_scheduler_type="constant",
        beta=0.04,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=seed,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        str(start),
        says_yes,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": f"is it w{i} ?"} for i in range(25)] * 20),
        processing_class=tokenizer,
        callbacks=[Lines(folder / "log.jsonl"), *callbacks],
    )
    trainer.train()
    trainer.state.save_to_json(str(folder / "trainer_state.json"))


def words() -> Tokenizer:
    """Returns a tokenizer of words."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


if __name__ == "__main__":
    out = Path(sys.argv[1])
    for seed in range(CLEAN):
        train(out / f"clean-{seed}", seed)
    train(out / "disturbed", 100, [Disturb()])
