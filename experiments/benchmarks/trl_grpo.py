"""TRL's GRPOTrainer at the shapes of `dialogues.py`: warms up, says "ready", trains at a word, gives seconds.

Called by `common.WarmProcesses`: `python trl_grpo.py THREADS WIDTH DEPTH HEADS ITERATIONS LENGTHS`, by a Python with
torch, transformers and trl. It trains on a GPU where there is one. An iteration is 8 prompts of 2 tokens, 8 rows of
each with up to 22 tokens more, and 2 epochs of 2 minibatches; no reference model, no tools and no held-out rows, which
the other side has. Rows end after as many tokens as LENGTHS says, numbers with commas between them, of which each row
draws one.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

del sys.path[0]  # this folder has a kernels.py, and transformers looks for a package of that name

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from tokenizers.pre_tokenizers import WhitespaceSplit  # noqa: E402
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

VOCABULARY, PROMPT, OWN, END = 21, 2, 22, 1
PROMPTS, MEMBERS, EPOCHS, MINIBATCHES = 8, 8, 2, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM = 5 if DEVICE == "cuda" else 20
WORDS = ("<pad>", "<end>", *(f"w{i}" for i in range(VOCABULARY - 2)))


def wait() -> None:
    """Until the device has done what it was given."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Clock(TrainerCallback):
    """Waits for the word after the warm iterations, and begins to count."""

    def __init__(self, say):
        self.say, self.begun = say, 0.0

    def on_step_end(self, args, state, control, **_):
        """At the end of the last warm update."""
        if state.global_step == WARM * EPOCHS * MINIBATCHES:
            wait()
            self.say("ready")
            sys.stdin.readline()
            self.begun = time.perf_counter()


class Ending(LogitsProcessor):
    """Lets each row end after so many tokens as it has drawn, and not before."""

    def __init__(self, lengths: list[int]):
        self.lengths = torch.tensor(lengths, device=DEVICE)
        self.drawn = self.lengths

    def __call__(self, input_ids, scores):
        """Scores `[N, V]` of the next tokens, of which the end is possible, or all that is."""
        written = input_ids.shape[1] - PROMPT
        if written == 0:
            self.drawn = self.lengths[torch.randint(len(self.lengths), (len(scores),), device=DEVICE)]
        ends = (self.drawn == written + 1)[:, None]
        is_end = (torch.arange(scores.shape[1], device=DEVICE) == END)[None]
        return scores.masked_fill(ends ^ is_end, -torch.inf)


class Model(GPT2LMHeadModel):
    """Whose rows end where `ending` says."""

    ending: Ending

    def generate(self, *args, **kwargs):
        """As its own, with one more processor."""
        return super().generate(*args, logits_processor=[self.ending], **kwargs)


def main(threads: int, width: int, depth: int, heads: int, iterations: int, lengths: list[int]) -> None:
    """Trains."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    out, sys.stdout = sys.stdout, sys.stderr  # what the trainer prints is none of the caller's

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    clock = Clock(say)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    with tempfile.TemporaryDirectory() as folder:
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=PROMPT + OWN,
            n_embd=width,
            n_layer=depth,
            n_head=heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=END,
            eos_token_id=END,
            pad_token_id=0,
        )
        model = Model(config)
        model.ending = Ending(lengths)
        settings = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * MEMBERS // MINIBATCHES,
            steps_per_generation=MINIBATCHES,
            num_generations=MEMBERS,
            num_iterations=EPOCHS,
            max_completion_length=OWN,
            max_steps=(WARM + iterations) * EPOCHS * MINIBATCHES,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            beta=0.0,
            loss_type="grpo",
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            use_cpu=DEVICE == "cpu",
            disable_tqdm=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
        )
        trainer = GRPOTrainer(
            model,
            lambda completions, **_: [float(len(set(text.split()))) for text in completions],
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": f"w{i % 19} w{i % 7}"} for i in range(1000)]),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
        wait()
        say(json.dumps({"seconds": time.perf_counter() - clock.begun}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:-1]), lengths=[int(length) for length in sys.argv[-1].split(",")])
