"""Settings of dialogue learners: structural ones, which are compiled, and numeric ones, which are data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.learners.dialogue import packing
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig
from jaxaudit.learners.rl import settings as checks
from jaxaudit.models import gpt2


def number(default: float) -> Any:
    """Returns a dataclass field that is data: all its values share one compiled program."""
    return field(default=default, metadata={"data": True})


@struct.dataclass
class Numbers:
    """The numeric settings that are data, float32 scalars; see `DialogueSettings` and `Coefficients`."""

    objective: Coefficients
    difficulty: Any
    temperature: Any
    top_p: Any
    learning_rate: Any
    max_grad_norm: Any
    critic_learning_rate: Any
    critic_warm_start_learning_rate: Any
    warm_start_success: Any
    warm_start_right: Any
    warm_start_learning_rate: Any
    reward_model_learning_rate: Any


NETWORK_INITS = ("policy", "random")
"""The values of `critic_init` and `reward_model_init` that are not the path of a checkpoint."""

NETWORK_INIT_METADATA = {"path": True, "words": NETWORK_INITS}

REWARDS = ("gold", "learned")
"""Where a learner's rewards come from: the verifier, or a learned reward model."""


@dataclass(frozen=True)
class DialogueSettings:
    """The settings of all presets; a preset is a set of defaults.

    Attributes:
      size: size of the transformers of policy, value model and reward model.
      checkpoint: a folder or safetensors file with GPT-2's parameters to begin with; "" for random ones and a warm
        start.
      lora_rank: rank of adapters on the checkpoint's parameters, which are then all that is trained; 0 to train all
        parameters.
      precision: dtype of activations and matrix products; parameters are float32.
      remat: whether layers are recomputed in the backward pass, which takes less memory and more time.
      curriculum: fraction of the run over which the difficulty of prompts rises linearly from the dialogue's lowest to
        its own; 0 for a constant difficulty. Held-out rows always have the dialogue's own difficulty.
      prompts: number of rollout groups per iteration.
      group_size: number of rows per group.
      oversampling: factor by which more prompts are sampled than trained on; the first `prompts` groups whose rewards
        differ are kept, and missing ones are masked (DAPO's dynamic sampling). 1 keeps all groups.
      temperature: temperature of the policy, in sampling and in training.
      top_k: number of the likeliest tokens that are sampled from; 0 for all.
      top_p: probability mass that is sampled from.
      epochs: passes over an iteration's rows.
      minibatches: updates per pass.
      microbatches: number of equal pieces over which a minibatch's gradient is summed, to save memory; rows are packed
        into as few pieces as they fill. 0: half of the minibatch at once, and the rest, as far as it is filled, in
        eighths; for a preference objective, whose pairs are not packed, the whole minibatch.
      learning_rate: peak learning rate of the policy.
      beta1, beta2, epsilon: coefficients of Adam, for policy and value model.
      weight_decay: AdamW's weight decay, of kernels and embeddings; 0 for Adam.
      max_grad_norm: global norm to which gradients are clipped, those of policy and value model separately.
      learning_rate_warmup: fraction of the run over which both learning rates rise linearly from 0.
      learning_rate_decay: how the rates fall after the warmup, until the run's end: "constant", "linear" or "cosine".
      learning_rate_final: final learning rate as a fraction of the peak.
      critic_learning_rate: peak learning rate of the value model.
      critic_init: initial parameters of the value model's transformer: those of the "policy" before its first
        iteration, "random" ones, or a checkpoint, as in `checkpoint`. Its head begins with zeros.
      critic_warm_start: number of updates of the value model before the first iteration, on the returns of a fixed
        policy (value pretraining; VC-PPO: Yuan et al., 2025); 0 for none. The first thousands explain little: on "hop"
        12,800 reach 0.9 of the variance that the prefix explains, and long chains take more updates, on more rows.
      critic_warm_start_rows: number of rows for these updates, sampled beforehand.
      critic_warm_start_minibatch: number of rows per update, any of those.
      critic_warm_start_learning_rate: initial Adam learning rate of these updates; it falls linearly to 0.
      old_log_probability: log-probabilities that ratios are relative to: "recomputed" by the trainer's undisturbed
        parameters before the first update, or as "sampled" by the behaviour policy. With "sampled" the entropy is the
        sampler's, too, and without a reference and with basic telemetry the trainer does not read the rows before the
        first update at all.
      objective, advantage, whiten, ratio, correction, correction_level, aggregation, kl, kl_in, kl_weight, covariance,
      clip_value: see `objective.ObjectiveConfig`.
      clip_low, clip_high, dual_clip, kl_coefficient, entropy_coefficient, value_coefficient, value_clip, gamma,
      gae_lambda, gae_lambda_length, covariance_share, critic_lambda, std_epsilon, tis_cap, mis_low, mis_high, beta,
      label_smoothing, overlong_coefficient, overlong_buffer: see `objective.Coefficients`. With 0 for
        entropy_coefficient there is no bonus, for overlong_buffer no penalty, and for gae_lambda_length all rows have
        gae_lambda.
      mask_truncated: whether truncated rows are left out of the loss and the baselines.
      online: whether a preference objective's rows are sampled from the policy, and not from the reference.
      reward: "gold" for the verifier's reward, or "learned" for a reward model's score.
      reward_model_init: initial parameters of the reward model's transformer, as in `critic_init`.
      reward_model_warm_start: number of updates of the reward model on pairs of demonstrations before the first
        iteration.
      reward_model_pairs: number of pairs per update.
      reward_model_learning_rate: Adam learning rate of these updates.
      warm_start: largest number of updates of the policy on demonstrations before the first iteration.
      warm_start_rows: number of demonstrations per update.
      warm_start_success: success of sampled rows at which the warm start stops.
      warm_start_right: fraction of demonstrations that are right; the others show the format alone.
      warm_start_learning_rate: Adam learning rate of the warm start.
      performance_rows: number of held-out rows whose mean gold reward is the performance; for a dialogue that is not
        split, rows on fixed prompts.
      performance_every: iterations between two measurements on held-out rows.
      tool_window: number of slots after a tool's result whose response tokens are the stratum "tool".
      telemetry: "basic" or "full".
    """

    size: Literal["micro", "nano", "mini", "124m", "355m", "774m"] = "micro"
    checkpoint: str = field(default="", metadata={"path": True})
    lora_rank: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    curriculum: float = 0.0
    prompts: int = 8
    group_size: int = 8
    oversampling: int = 1
    temperature: float = number(1.0)
    top_k: int = 0
    top_p: float = number(1.0)
    epochs: int = 2
    minibatches: int = 2
    microbatches: int = 0
    learning_rate: float = number(3e-4)
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = number(1.0)
    learning_rate_warmup: float = 0.0
    learning_rate_decay: Literal["constant", "linear", "cosine"] = "constant"
    learning_rate_final: float = 0.0
    critic_learning_rate: float = number(1e-3)
    critic_init: str = field(default="policy", metadata=NETWORK_INIT_METADATA)
    critic_warm_start: int = 0
    critic_warm_start_rows: int = 16384
    critic_warm_start_minibatch: int = 16
    critic_warm_start_learning_rate: float = number(1e-3)
    old_log_probability: Literal["recomputed", "sampled"] = "recomputed"
    objective: Literal["policy", "preference"] = "policy"
    advantage: Literal["gae", "group", "group_mean", "leave_one_out"] = "group"
    whiten: bool = False
    ratio: Literal["token", "sequence_mean", "sequence_sum"] = "token"
    correction: Literal["none", "tis", "mis"] = "none"
    correction_level: Literal["token", "sequence", "geometric"] = "token"
    aggregation: Literal["token_minibatch", "token_iteration", "sequence", "constant"] = "sequence"
    kl: Literal["none", "k1", "k2", "k3", "exact"] = "none"
    kl_in: Literal["loss", "reward", "both"] = "loss"
    kl_weight: Literal["none", "ratio", "stopped_ratio"] = "none"
    covariance: Literal["none", "clip", "kl"] = "none"
    clip_value: bool = True
    clip_low: float = number(0.2)
    clip_high: float = number(0.2)
    dual_clip: float = number(float("inf"))
    kl_coefficient: float = number(0.0)
    entropy_coefficient: float = number(0.0)
    value_coefficient: float = number(0.5)
    value_clip: float = number(0.2)
    gamma: float = number(1.0)
    gae_lambda: float = number(0.95)
    gae_lambda_length: float = number(0.0)
    covariance_share: float = number(0.0)
    critic_lambda: float = number(0.95)
    std_epsilon: float = number(1e-4)
    tis_cap: float = number(2.0)
    mis_low: float = number(0.5)
    mis_high: float = number(2.0)
    beta: float = number(0.1)
    label_smoothing: float = number(0.0)
    overlong_coefficient: float = number(1.0)
    overlong_buffer: float = number(0.0)
    mask_truncated: bool = False
    online: bool = False
    reward: str = "gold"
    reward_model_init: str = field(default="policy", metadata=NETWORK_INIT_METADATA)
    reward_model_warm_start: int = 200
    reward_model_pairs: int = 64
    reward_model_learning_rate: float = number(1e-3)
    warm_start: int = 300
    warm_start_rows: int = 64
    warm_start_success: float = number(0.5)
    warm_start_right: float = number(0.5)
    warm_start_learning_rate: float = number(1e-3)
    performance_rows: int = 32
    performance_every: int = 1
    tool_window: int = 4
    telemetry: str = "full"

    def __post_init__(self):
        checks.at_least_one(self, "prompts", "group_size", "oversampling", "epochs", "minibatches")
        checks.at_least_one(self, "warm_start_rows", "performance_rows", "performance_every", "tool_window")
        checks.at_least_one(self, "reward_model_pairs", "critic_warm_start_rows", "critic_warm_start_minibatch")
        checks.not_negative(self, "lora_rank", "top_k", "weight_decay", "warm_start", "critic_warm_start")
        checks.not_negative(self, "microbatches", "reward_model_warm_start", "learning_rate", "critic_learning_rate")
        checks.not_negative(self, "critic_warm_start_learning_rate", "entropy_coefficient")
        checks.positive(self, "temperature", "epsilon", "max_grad_norm", "warm_start_learning_rate")
        checks.positive(self, "reward_model_learning_rate")
        checks.fractions(self, "warm_start_success", "warm_start_right", "learning_rate_final", "curriculum")
        checks.below_one(self, "beta1", "beta2", "learning_rate_warmup")
        checks.telemetry(self.telemetry)
        checks.one_of(self, size=tuple(gpt2.SIZES))
        checks.choices(self, leave_out=("size",))
        if self.reward not in REWARDS:
            raise ValueError(
                f"reward must be {' or '.join(map(repr, REWARDS))}, not {self.reward!r}: to write a reward in Python, "
                'register a dialogue with register("dialogue", name)'
            )
        checks.check_each(self, ("top_p",), lambda value: 0 < value <= 1, "lie in (0, 1]")
        unit_name = "pairs" if self.objective == "preference" else "rows (prompts * group_size)"
        self._check_divides("minibatches", self.minibatches, self.units, unit_name)
        minibatch_units = self.units // self.minibatches
        self._check_divides("microbatches", self.microbatches or 1, minibatch_units, f"{unit_name} of a minibatch")
        self._check_conflicts()
        self.coefficients.check()
        _ = self.objective_config

    def _check_divides(self, name: str, divisor: int, total: int, unit: str) -> None:
        if total % divisor:
            raise ValueError(f"{name} must divide the {total} {unit}, and {divisor} does not")

    def _check_conflicts(self) -> None:
        reader = "a preference objective" if self.objective == "preference" else f"advantage '{self.advantage}'"
        if self.compares_within_groups and self.group_size == 1:
            raise ValueError(f"group_size must be at least 2, not 1, for {reader}, which compares rows of one prompt")
        if self.kl == "none" and self.kl_coefficient > 0:
            raise ValueError(
                f"kl_coefficient {self.kl_coefficient:g} weighs a divergence from the reference, and "
                + (
                    "a preference objective has its own, weighed by beta; leave kl_coefficient at 0"
                    if self.objective == "preference"
                    else "kl is 'none'; choose k1, k2, k3 or exact, or kl_coefficient = 0"
                )
            )
        if self.kl == "exact" and self.kl_in != "loss":
            raise ValueError(
                f"kl 'exact' can only be in the loss, and kl_in is {self.kl_in!r}; in the reward kl must be "
                "k1, k2 or k3"
            )
        if (self.covariance == "none") != (self.covariance_share == 0):
            raise ValueError(
                f"covariance_share {self.covariance_share:g} is the fraction of tokens that covariance selects, and "
                f"covariance is {self.covariance!r}: covariance_share must be 0 if and only if covariance is 'none'"
            )
        if self.lora_rank > 0 and not self.checkpoint:
            raise ValueError(f"lora_rank {self.lora_rank} adapts the parameters of a checkpoint, and none is given")
        for name in ("critic_init", "reward_model_init"):
            if self.lora_rank > 0 and getattr(self, name) != "policy":
                raise ValueError(
                    f"{name} must be 'policy' with adapters, which all adapt the parameters of one checkpoint, not "
                    f"{getattr(self, name)!r}"
                )
        if self.online and self.objective != "preference":
            raise ValueError(
                f"online applies to a preference objective, and objective is {self.objective!r}, which always trains "
                "on the policy's own rows"
            )
        if self.oversampling > 1 and not self.compares_within_groups:
            raise ValueError(
                f"oversampling {self.oversampling} keeps rollout groups whose rewards differ, which advantage 'gae' "
                "does not compare"
            )

    @property
    def scheduled(self) -> bool:
        """Whether the learning rates change during the run."""
        return self.learning_rate_warmup > 0 or self.learning_rate_decay != "constant"

    @property
    def rows(self) -> int:
        """The number of rows that an iteration trains on."""
        return self.prompts * (2 if self.objective == "preference" else self.group_size)

    @property
    def units(self) -> int:
        """The number of pairs of a preference objective, or else of rows, that minibatches are made of."""
        return self.prompts if self.objective == "preference" else self.rows

    def piece_sizes(self, sequences: int) -> packing.PieceSizes:
        """Returns the sizes of the pieces (microbatches) into which this number of sequences is split."""
        if self.microbatches:
            size = self.rows // self.minibatches // self.microbatches
            return packing.PieceSizes(size, size)
        if self.objective == "preference":
            return packing.PieceSizes(sequences, sequences)
        return packing.PieceSizes.half_then_eighths(sequences)

    @property
    def uses_packing(self) -> bool:
        """Whether rows share sequences; with a single piece, packing would gain nothing."""
        minibatch = self.rows // self.minibatches
        return self.objective == "policy" and self.piece_sizes(minibatch).first < minibatch

    @property
    def compares_within_groups(self) -> bool:
        """Whether rows of one prompt are compared with each other."""
        return self.objective == "preference" or self.advantage != "gae"

    @property
    def objective_config(self) -> ObjectiveConfig:
        """The choices of the objective that the compiled program depends on."""
        return ObjectiveConfig(
            **self._values_of(ObjectiveConfig),
            entropy_bonus=self.entropy_coefficient > 0,
            adaptive_lambda=self.gae_lambda_length > 0,
            overlong_penalty=self.overlong_buffer > 0,
            dynamic_sampling=self.oversampling > 1,
        )

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients of the objective, which compile nothing when they change."""
        return Coefficients(**self._values_of(Coefficients))

    def numbers(self, difficulty: float) -> Numbers:
        """Returns all numeric settings that are data, with the difficulty of prompts."""
        values = self._values_of(Numbers) | {"objective": self.coefficients, "difficulty": difficulty}
        return jax.tree.map(jnp.float32, Numbers(**values))

    def _values_of(self, kind: Any) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(kind) if hasattr(self, f.name)}

    @property
    def structure(self) -> DialogueSettings:
        """These settings with standard numbers, which are the settings that a program depends on.

        A number that is zero and so removes a term stays zero.
        """
        standard: dict[str, Any] = {
            f.name: f.default for f in dataclasses.fields(DialogueSettings) if f.metadata.get("data")
        }
        standard["kl_coefficient"] = 0.0
        standard["entropy_coefficient"] = float(self.entropy_coefficient > 0)
        standard["gae_lambda_length"] = float(self.gae_lambda_length > 0)
        standard["covariance_share"] = 0.5 * (self.covariance_share > 0)
        standard["overlong_buffer"] = 0.5 * (self.overlong_buffer > 0)
        standard["top_p"] = 1.0 if self.top_p == 1.0 else 0.5
        standard["checkpoint"] = "a checkpoint" if self.checkpoint else ""
        for name in ("critic_init", "reward_model_init"):
            standard[name] = init if (init := getattr(self, name)) in NETWORK_INITS else "a checkpoint"
        return DialogueSettings(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | standard)
