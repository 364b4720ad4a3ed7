"""Reference advantages, losses and gradients of TRL's trainers for one set of rows. Needs trl 1.16, torch and numpy.

    python trl_reference.py OUT.npz

These methods are called: `_generate_and_score_completions`, `_get_per_token_logps_and_entropies` and `_compute_loss` of
`GRPOTrainer` and `RLOOTrainer`, `_compute_loss` of `DPOTrainer`, and the soft overlong punishment. Trainers are created
without `__init__`, with the attributes that these methods read. The rest is replaced:

- the model is a table of logits `[rows, slots, V]`, whose output has the class of TRL's fused head;
- `_generate` returns the rows of this script, and `_calculate_rewards` its rewards;
- the accelerator has one process;
- buffering is `split_tensor_dict` of the scored rows into two minibatches, without shuffling.

All computations are in float64. OUT has the inputs, and for each case under `CASE.` the results: `advantage` `[N]`,
`loss` `[2]` of the two minibatches, `gradient` `[N, C, V]` of the sum of both losses, and `weight` of corrections.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from trl import DPOTrainer, GRPOTrainer, RLOOTrainer
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.utils import FusedCausalLMOutput, split_tensor_dict

PROMPTS, MEMBERS, PROMPT, SLOTS, VOCABULARY, END, PADDING = 3, 4, 2, 7, 6, 5, 0
ROWS = PROMPTS * MEMBERS
COEFFICIENTS = {"epsilon_low": 0.2, "epsilon_high": 0.2, "beta": 0.0, "entropy_coef": 0.0}


def main() -> None:
    """Writes the reference."""
    torch.set_default_dtype(torch.float64)
    inputs = draw(np.random.default_rng(0))
    out = dict(inputs)
    token = {"scale_rewards": "group", "importance_sampling_level": "token", "loss_type": "grpo"}
    cases = {
        "grpo": token | {"beta": 0.04},
        "dual": token | {"delta": 1.5},
        "entropy": token | {"entropy_coef": 0.1},
        "weighted_kl": token | {"beta": 0.4, "use_bias_correction_kl": True},
        "truncated": token | {"mask_truncated_completions": True},
        "token_minibatch": token | {"loss_type": "bnpo"},
        "dr_grpo": token | {"loss_type": "dr_grpo", "scale_rewards": "none"},
        "dapo": token | {"loss_type": "dapo", "epsilon_high": 0.28},
        "gspo": token | {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        "tis_token": token | {"vllm": "token_truncate", "clip": (None, 1.3)},
        "tis_sequence": token | {"vllm": "sequence_truncate", "clip": (None, 1.3)},
        "mis_token": token | {"vllm": "token_mask", "clip": (0.7, 1.3)},
        "mis_sequence": token | {"vllm": "sequence_mask", "clip": (0.5, 2.0)},
    }
    for name, case in cases.items():
        out |= {f"{name}.{name_}": x for name_, x in group_results(GRPOTrainer, inputs, case).items()}
    out |= {f"rloo.{name_}": x for name_, x in group_results(RLOOTrainer, inputs, {"beta": 0.05}).items()}
    out |= {f"dpo.{name_}": x for name_, x in pair_results(inputs).items()}
    lengths = np.arange(1, 14)
    for buffer in (0, 4):
        punishment = get_soft_overlong_punishment(10, buffer)
        out[f"overlong.{buffer}"] = np.array(punishment([[1] * n for n in lengths]))
    np.savez_compressed(Path(sys.argv[1]), lengths=lengths, **out)


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Samples rows `[N, C]` with tool tokens, their masks, logits `[N, C, V]` of four policies, and rewards.

    One row is truncated, and one rollout group has equal rewards.
    """
    lengths = rng.integers(4, SLOTS, ROWS)
    lengths[1] = SLOTS
    tokens = rng.integers(1, END, (ROWS, SLOTS))
    slots = np.arange(SLOTS)
    written = slots < lengths[:, None]
    ended = lengths < SLOTS
    tokens[ended, lengths[ended] - 1] = END
    tokens = np.where(written, tokens, PADDING)
    tool = written & (slots >= 1) & (slots <= rng.integers(0, 3, ROWS)[:, None])
    rewards = rng.normal(size=(PROMPTS, MEMBERS))
    rewards[1] = 0.75
    old = rng.normal(size=(ROWS, SLOTS, VOCABULARY))
    policies = {name: old + 0.3 * rng.normal(size=old.shape) for name in ("new", "sampler", "reference")}
    policies = {f"{name}_logits": x for name, x in ({"old": old} | policies).items()}
    return {"tokens": tokens, "written": written, "own": written & ~tool, "rewards": rewards} | policies


class StoredLogits(torch.nn.Module):
    """A model that returns stored logits `[N, C, V]` for the slots after the prompt."""

    is_gradient_checkpointing = False

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, input_ids, labels, **_) -> FusedCausalLMOutput:
        """Returns log-probabilities, entropies and other statistics of next tokens, zero where labels are -100."""
        ahead = torch.zeros(len(input_ids), input_ids.shape[1] - 1 - self.logits.shape[1], VOCABULARY)
        logits = torch.cat([ahead, self.logits], 1)
        labels = labels[:, 1:]
        scored = labels != -100
        probabilities = torch.log_softmax(logits, -1)
        picked = probabilities.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        entropy = -(probabilities.exp() * probabilities).sum(-1)
        return FusedCausalLMOutput(
            log_probs=torch.where(scored, picked, 0.0),
            entropy=torch.where(scored, entropy, 0.0),
            mean_logits=logits.mean(-1).detach(),
            is_top1=logits.argmax(-1) == labels,
        )


ONE_PROCESS = SimpleNamespace(
    device=torch.device("cpu"),
    process_index=0,
    num_processes=1,
    is_main_process=False,
    sync_gradients=True,
    gather=lambda x: x,
    gather_for_metrics=lambda x: x,
    reduce=lambda x, reduction: x,
    autocast=nullcontext,
)


def without_init(trainer: type, **attributes) -> object:
    """Creates a trainer without its `__init__`."""
    instance = object.__new__(trainer)
    shared = {
        "accelerator": ONE_PROCESS,
        "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
        "_logs": defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "aux_loss_enabled": False,
        "pad_to_multiple_of": None,
        "_tokenizer": SimpleNamespace(pad_token_id=PADDING, batch_decode=lambda ids, **_: [""] * len(ids)),
        "processing_class": SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        "eos_token_ids": [END],
    }
    for name, value in (shared | attributes).items():
        object.__setattr__(instance, name, value)
    return instance


def group_results(trainer: type, inputs: dict[str, np.ndarray], case: dict) -> dict[str, np.ndarray]:
    """Computes advantages, losses and gradients of GRPO or RLOO."""
    logits = {name: torch.tensor(inputs[f"{name}_logits"]) for name in ("new", "old", "reference", "sampler")}
    new = logits["new"].requires_grad_()
    tools = trainer is GRPOTrainer
    instance = without_init(trainer, **attributes(case, tools))
    instance.model, instance.ref_model = StoredLogits(logits["old"]).train(), StoredLogits(logits["reference"]).train()
    instance._calculate_rewards = lambda *_: torch.tensor(inputs["rewards"]).reshape(-1, 1)
    instance._generate = lambda prompts: generated(inputs, logits["sampler"], tools, "vllm" in case)
    scored = instance._generate_and_score_completions([{"prompt": "a"} for _ in range(ROWS)])
    losses = []
    for minibatch, rows in zip(split_tensor_dict(scored, 2), new.chunk(2), strict=True):
        losses.append(instance._compute_loss(StoredLogits(rows).train(), minibatch))
    sum(losses).backward()
    out = {"advantage": scored["advantages"], "loss": torch.stack(losses).detach(), "gradient": new.grad}
    if "vllm" in case:
        out["weight"] = scored["importance_sampling_ratio"]
    return {name: x.numpy() for name, x in out.items()}


def attributes(case: dict, tools: bool) -> dict:
    """Returns the attributes that the trainer's methods read: its defaults with the changes of a case."""
    options = COEFFICIENTS | case
    low, high = options.get("clip", (None, None))
    args = SimpleNamespace(
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        steps_per_generation=2,
        use_bias_correction_kl=options.get("use_bias_correction_kl", False),
        delta=options.get("delta"),
        report_to=[],
    )
    return options | {
        "args": args,
        "num_generations": MEMBERS,
        "num_iterations": 1,
        "current_gradient_accumulation_steps": 1,
        "environment_factories": None,
        "environments": None,
        "tools": [],
        "mask_truncated_completions": options.get("mask_truncated_completions", False),
        "use_vllm": "vllm" in options,
        "vllm_importance_sampling_correction": "vllm" in options,
        "vllm_importance_sampling_mode": options.get("vllm"),
        "vllm_importance_sampling_clip_min": low,
        "vllm_importance_sampling_clip_max": high,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": options["entropy_coef"] != 0,
        "use_adaptive_entropy": False,
        "max_completion_length": SLOTS,
        "multi_objective_aggregation": "sum_then_normalize",
        "reward_weights": torch.ones(1),
        "reward_funcs": [None],
        "reward_func_names": ["reward"],
        "reward_clip_range": None,
        "normalize_advantages": False,
        "log_multimodal": False,
        "_is_vlm": False,
    }


def generated(inputs: dict[str, np.ndarray], sampler: torch.Tensor, tools: bool, stored: bool) -> tuple:
    """Returns the ragged lists of `_generate`."""
    lengths = inputs["written"].sum(1)
    tokens = torch.tensor(inputs["tokens"])
    sampled = torch.log_softmax(sampler, -1).gather(-1, tokens[..., None])[..., 0]
    rows = [t[:n].tolist() for t, n in zip(tokens, lengths, strict=True)]
    prompts = [[1] * PROMPT] * ROWS
    texts = [""] * ROWS
    if not tools:
        return prompts, rows, texts
    masks = [m[:n].astype(int).tolist() for m, n in zip(inputs["own"], lengths, strict=True)]
    log_probabilities = [s[:n].tolist() for s, n in zip(sampled, lengths, strict=True)]
    return prompts, rows, masks, texts, log_probabilities if stored else None, {}, None, None


def pair_results(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Computes DPO's loss, gradient and metrics; rows 2p and 2p + 1 are a pair, with the chosen one first."""
    order = np.concatenate([np.arange(0, ROWS, 2), np.arange(1, ROWS, 2)])
    new = torch.tensor(inputs["new_logits"]).requires_grad_()
    model = StoredLogits(new[order]).train()
    instance = without_init(
        DPOTrainer, beta=0.1, ld_alpha=None, precompute_ref_logps=False, f_divergence_type="reverse_kl"
    )
    instance.model, instance.ref_model = model, StoredLogits(torch.tensor(inputs["reference_logits"])[order]).train()
    instance.loss_types, instance.loss_weights, instance.label_smoothing, instance.use_weighting = (
        ["sigmoid"],
        [1.0],
        0.0,
        False,
    )
    instance.args, instance._total_train_tokens, instance._tp_size = (
        SimpleNamespace(gradient_checkpointing_kwargs=None),
        0,
        1,
    )
    prompt = torch.ones(ROWS, PROMPT, dtype=torch.long)
    written, mask = (torch.tensor(inputs[name][order]).long() for name in ("written", "own"))
    batch = {
        "input_ids": torch.cat([prompt, torch.tensor(inputs["tokens"][order])], 1),
        "attention_mask": torch.cat([prompt, written], 1),
        "completion_mask": torch.cat([0 * prompt, mask], 1),
    }
    loss = instance._compute_loss(model, batch, False)
    loss.backward()
    metrics = {
        name: instance._metrics["train"][f"rewards/{name}"][0]
        for name in ("margins", "accuracies", "chosen", "rejected")
    }
    return {"loss": loss.detach().numpy(), "gradient": new.grad.numpy()} | {k: np.array(v) for k, v in metrics.items()}


if __name__ == "__main__":
    main()
