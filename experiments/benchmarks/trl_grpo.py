"""Times TRL's GRPOTrainer at the shapes of `dialogues.py`.

It warms up, prints "ready", trains when it gets a line of input, and prints the seconds. `common.WarmProcesses` calls
it as `python trl_grpo.py THREADS WIDTH DEPTH HEADS ITERATIONS LENGTHS`, by a Python with torch, transformers and trl.
It trains on a GPU if there is one. An iteration has 8 prompts of 2 tokens, 8 rows of each with up to 22 further tokens,
and 2 epochs of 2 minibatches. It has no reference model, no tools and no held-out rows, which jaxaudit's side has. The
length of each row is sampled from LENGTHS, numbers separated by commas.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

del sys.path[0]  # this folder has a kernels.py, which would shadow a package that transformers imports

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

VOCABULARY, PROMPT, COMPLETION, END = 21, 2, 22, 1
PROMPTS, MEMBERS, EPOCHS, MINIBATCHES = 8, 8, 2, 2
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM = 5 if DEVICE == "cuda" else 20
WORDS = ("<pad>", "<end>", *(f"w{i}" for i in range(VOCABULARY - 2)))


def wait() -> None:
    """Waits for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Clock(TrainerCallback):
    """Waits for input after the warm-up, and then takes the time."""

    def __init__(self, say):
        self.say, self.begun = say, 0.0

    def on_step_end(self, args, state, control, **_):
        """Waits at the end of the last update of the warm-up."""
        if state.global_step == WARM * EPOCHS * MINIBATCHES:
            wait()
            self.say("ready")
            sys.stdin.readline()
            self.begun = time.perf_counter()


class Ending(LogitsProcessor):
    """Lets each row end exactly at its sampled length."""

    def __init__(self, lengths: list[int]):
        self.lengths = torch.tensor(lengths, device=DEVICE)
        self.drawn = self.lengths

    def __call__(self, input_ids, scores):
        """Returns scores `[N, V]` of the next tokens that force the end, or exclude it."""
        position = input_ids.shape[1] - PROMPT
        if position == 0:
            self.drawn = self.lengths[torch.randint(len(self.lengths), (len(scores),), device=DEVICE)]
        ends = (self.drawn == position + 1)[:, None]
        is_end = (torch.arange(scores.shape[1], device=DEVICE) == END)[None]
        return scores.masked_fill(ends ^ is_end, -torch.inf)


class Model(GPT2LMHeadModel):
    """A model whose rows end as `ending` determines."""

    ending: Ending

    def generate(self, *args, **kwargs):
        """Generates with the additional processor."""
        return super().generate(*args, logits_processor=[self.ending], **kwargs)


def main(threads: int, width: int, depth: int, heads: int, iterations: int, lengths: list[int]) -> None:
    """Warms up and trains."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    out, sys.stdout = (
        sys.stdout,
        sys.stderr,
    )  # the caller reads standard output, so the trainer prints to standard error

    def print_line(line: str) -> None:
        print(line, file=out, flush=True)

    clock = Clock(print_line)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left"
    )
    with tempfile.TemporaryDirectory() as folder:
        config = GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=PROMPT + COMPLETION,
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
            max_completion_length=COMPLETION,
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
        print_line(json.dumps({"seconds": time.perf_counter() - clock.begun}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:-1]), lengths=[int(length) for length in sys.argv[-1].split(",")])
