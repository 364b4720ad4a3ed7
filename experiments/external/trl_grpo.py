"""GRPO of TRL with a learning-rate spike by a callback; writes the performance of every update as CSV.

    python experiments/external/trl_grpo.py start DIR     # writes lines, a tokenizer, and a partly trained policy
    python experiments/external/trl_grpo.py run DIR OUT.csv --seeds 8 --magnitudes 10 30 100 300 --processes 2

The task is a prompt such as "3,4>" whose answer is the larger digit, for a GPT-2 of two layers on bytes. The settings
are those of `trl_grpo.toml`, which this package audits from the same lines, tokenizer and policy; see `compare.py`.
Needs torch, transformers and trl. Columns: seed, magnitude (1: undisturbed), step (update), performance (the share of
sampled rows that are correct).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from itertools import product
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trainings import write_trainings
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, MEMBERS, SLOTS, END = 8, 8, 4, "<|endoftext|>"
STEPS, ONSET, DURATION, RATE, MEASURED = 100, 50, 3, 3e-4, 64
LINES = [{"prompt": f"{a},{b}>", "answer": str(max(a, b))} for a in range(10) for b in range(10)]


def tokenizer_of() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of GPT-2's bytes without merges, with an end of text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*letters, END])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END, padding_side="left")


def is_right(text: str, answer: str) -> float:
    """Returns 1 if a completion is the answer up to white space, else 0."""
    return float(text.strip() == answer)


def reward(completions: list[str], answer: list[str], **_) -> list[float]:
    """Returns the reward of each completion."""
    return [is_right(text, expected) for text, expected in zip(completions, answer, strict=True)]


def sampled_share(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, lines: list[dict]) -> float:
    """Returns the share of sampled completions that are correct."""
    prompts = tokenizer([line["prompt"] for line in lines], return_tensors="pt")
    with torch.no_grad():
        rows = model.generate(
            **prompts, do_sample=True, max_new_tokens=SLOTS, top_k=0, pad_token_id=tokenizer.eos_token_id
        )
    texts = tokenizer.batch_decode(rows[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(is_right(text, line["answer"]) for text, line in zip(texts, lines, strict=True)) / len(lines)


def start(folder: Path) -> None:
    """Writes the lines, the tokenizer, and a policy trained on answers until half of its samples are correct."""
    folder.mkdir(parents=True)
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    tokenizer = tokenizer_of()
    tokenizer.save_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    size = {"n_layer": 2, "n_head": 4, "n_embd": 64, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, **size, **dropout)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    rows = torch.tensor([tokenizer.encode(line["prompt"] + line["answer"] + END) for line in LINES])
    labels = torch.where(torch.arange(rows.shape[1]) < rows.shape[1] - 2, -100, rows)
    for update in range(5000):
        picks = torch.randint(len(rows), (64,))
        model(input_ids=rows[picks], labels=labels[picks]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if update % 10 == 9 and sampled_share(model, tokenizer, LINES) >= 0.5:
            break
    model.save_pretrained(folder / "policy")
    print(f"{update + 1} updates; share of correct samples {sampled_share(model, tokenizer, LINES):.2f}")


class Spike(TrainerCallback):
    """Multiplies the rate of the updates in a window, and records the share of correct samples after each update.

    Prompts and random numbers are the same after every update, like those of this package's held-out rows.
    """

    def __init__(self, magnitude: float, tokenizer: PreTrainedTokenizerFast):
        self.magnitude, self.tokenizer = magnitude, tokenizer
        self.lines = random.Random(0).choices(LINES, k=MEASURED)
        self.performance: list[float] = []

    def on_pre_optimizer_step(self, args, state, control, optimizer, **_):
        """Multiplies the rate, which the scheduler sets again after every update."""
        if ONSET <= state.global_step < ONSET + DURATION:
            for group in optimizer.param_groups:
                group["lr"] *= self.magnitude

    def on_step_end(self, args, state, control, model, **_):
        """Records the performance without changing the trainer's random state."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.performance.append(sampled_share(model, self.tokenizer, self.lines))


def train(job: tuple[Path, int, float]) -> list[tuple[int, float, int, float]]:
    """Runs one training, and returns its rows."""
    folder, seed, magnitude = job
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", padding_side="left")
    spike = Spike(magnitude, tokenizer)
    with tempfile.TemporaryDirectory() as out:
        settings = GRPOConfig(
            output_dir=out,
            per_device_train_batch_size=PROMPTS * MEMBERS,
            num_generations=MEMBERS,
            max_completion_length=SLOTS,
            max_steps=STEPS,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            top_k=0,
            num_iterations=1,
            logging_steps=STEPS,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=seed,
            bf16=False,
            gradient_checkpointing=False,
        )
        trainer = GRPOTrainer(
            str(folder / "policy"),
            lambda completions, answer, **_: [
                is_right(text, one) for text, one in zip(completions, answer, strict=True)
            ],
            args=settings,
            train_dataset=Dataset.from_list(LINES),
            processing_class=tokenizer,
            callbacks=[spike],
        )
        trainer.train()
    return [(seed, magnitude, step, value) for step, value in enumerate(spike.performance)]


def main() -> None:
    """Writes the start, or trains every seed undisturbed and at every magnitude."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("what", choices=("start", "run"))
    options.add_argument("folder", type=Path)
    options.add_argument("out", type=Path, nargs="?")
    options.add_argument("--seeds", type=int, default=8)
    options.add_argument("--magnitudes", type=float, nargs="*", default=[10, 30, 100, 300])
    options.add_argument("--processes", type=int, default=2)
    arguments = options.parse_args()
    if arguments.what == "start":
        start(arguments.folder)
        return
    jobs = [
        (arguments.folder, seed, magnitude)
        for seed, magnitude in product(range(arguments.seeds), [1.0, *arguments.magnitudes])
    ]
    write_trainings(arguments.out, train, jobs, arguments.processes)


if __name__ == "__main__":
    main()
