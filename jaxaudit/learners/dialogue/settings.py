"""What a learner on dialogues is set by: structure, which is compiled, and numbers, which are data."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.core.optimizer import DECAYS
from jaxaudit.learners.dialogue import packing
from jaxaudit.learners.dialogue.objective import Coefficients, Parts
from jaxaudit.learners.rl import settings as checks
from jaxaudit.models import gpt2


def number(default: float) -> Any:
    """A field that is data: other values of it share one compiled program."""
    return field(default=default, metadata={"data": True})


@struct.dataclass
class Numbers:
    """All numbers that are data, float32 scalars; what each means is in `DialogueSettings` and `Coefficients`."""

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


BEGINNINGS = ("policy", "random")
"""What a value or reward model's transformer may begin as, beside a checkpoint of its own."""

BEGINNING = {"path": True, "words": BEGINNINGS}

REWARDS = ("gold", "learned")
"""What a learner may see of a row's worth: what the verifier says, or a reward model that is learned."""


@dataclass(frozen=True)
class DialogueSettings:
    """The settings of all presets; a preset is another choice of defaults.

    Attributes:
      size: of the policy's transformer, and of the value and reward models'.
      checkpoint: a folder or safetensors file with GPT-2's parameters to begin with; "": random ones, warmed up.
      lora_rank: of adapters, which are then all that is trained, on the checkpoint's parameters; 0: all parameters.
      precision: of activations and products; parameters are float32.
      remat: layers are computed again in the backward pass, which takes less memory and more time.
      curriculum: share of the run over which the difficulty of prompts rises linearly from the dialogue's lowest to its
        own; 0: it is the same throughout. What is measured on held-out rows is at its own difficulty.
      prompts: rollout groups in an iteration.
      group_size: rows of each.
      oversampling: how many times as many prompts are drawn, of which the first `prompts` rollout groups whose rewards
        differ are kept, and those missing masked (DAPO's dynamic sampling); 1: all are kept.
      temperature: of the policy, in sampling and training alike.
      top_k: tokens that sampling leaves; 0: all.
      top_p: share of the probability that sampling leaves.
      epochs: passes over an iteration's rows.
      minibatches: updates in each pass.
      microbatches: equal parts that a minibatch's gradient is added up over, for less memory, of which rows are packed
        into as few as they fill. 0: half of it at once, and the rest, as far as it is filled, in eighths. Pairs of a
        preference objective are not packed: 0 is a single part of them.
      learning_rate: Adam's.
      beta1, beta2, epsilon: Adam's.
      weight_decay: of kernels and embeddings.
      max_grad_norm: threshold on the gradient's global norm.
      learning_rate_warmup: share of the run over which both rates rise linearly from 0.
      learning_rate_decay: how they fall after that, until the run's end: "constant" for not at all, "linear" or
        "cosine".
      learning_rate_final: what they fall to, as a share of their peak.
      critic_learning_rate: the value model's.
      critic_init: what the value model's transformer begins as: the "policy" before its first iteration, "random"
        parameters, or a checkpoint of its own, as `checkpoint`. Its head begins with zeros.
      critic_warm_start: updates of the value model before the first iteration, on what rows of the fixed policy return
        (value pretraining; VC-PPO: Yuan et al., 2025), 0 for none. The first thousands explain little: on "hop" 12,800
        come to 0.9 of what the prefix allows, and long chains take more, of more rows.
      critic_warm_start_rows: rows that these are on, drawn beforehand in batches of an iteration's.
      critic_warm_start_minibatch: rows of each update, any of those.
      critic_warm_start_learning_rate: Adam's there at first; it falls linearly to 0.
      old_log_probability: what ratios are relative to: "recomputed" by the trainer's undisturbed parameters before the
        first update, or "sampled", as the behaviour policy gave them; so is the entropy then, and without a reference
        and with basic telemetry the trainer does not read the rows before the first update at all.
      objective, advantage, whiten, ratio, correction, correction_level, aggregation, kl, kl_in, kl_weight, covariance,
      clip_value: see `parts.Parts`.
      clip_low, clip_high, dual_clip, kl_coefficient, entropy_coefficient, value_coefficient, value_clip, gamma,
      gae_lambda, gae_lambda_length, covariance_share, critic_lambda, std_epsilon, tis_cap, mis_low, mis_high, beta,
      label_smoothing, overlong_coefficient, overlong_buffer: see `coefficients.Coefficients`; without an
        entropy_coefficient there is no bonus, without an overlong_buffer no penalty, and without a gae_lambda_length
        all rows have gae_lambda.
      mask_truncated: truncated rows are left out of the loss and the baselines.
      online: a preference objective's rows are the policy's, not the reference's.
      reward: the verifier's "gold", or a "learned" reward model's score.
      reward_model_init: what the reward model's transformer begins as, as with `critic_init`.
      reward_model_warm_start: updates of the reward model on pairs of demonstrations before the first iteration.
      reward_model_pairs: pairs of each.
      reward_model_learning_rate: Adam's there.
      warm_start: the most updates on demonstrations before the first iteration.
      warm_start_rows: demonstrations of each.
      warm_start_success: sampled success at which the warm start stops.
      warm_start_right: share of demonstrations that are right; the others show no more than the manner.
      warm_start_learning_rate: Adam's there.
      performance_rows: held-out rows whose mean gold reward is the performance; of a dialogue that is not split, rows
        on fixed prompts.
      performance_every: iterations from one measurement to the next.
      tool_window: slots after a tool's result whose own tokens are the stratum "tool".
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
    critic_init: str = field(default="policy", metadata=BEGINNING)
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
    reward_model_init: str = field(default="policy", metadata=BEGINNING)
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
        checks.not_negative(
            self, "lora_rank", "top_k", "weight_decay", "warm_start", "critic_warm_start", "microbatches"
        )
        checks.not_negative(self, "reward_model_warm_start", "learning_rate", "critic_learning_rate")
        checks.not_negative(self, "critic_warm_start_learning_rate")
        checks.not_negative(self, "entropy_coefficient")
        checks.positive(self, "temperature", "epsilon", "max_grad_norm", "warm_start_learning_rate")
        checks.positive(self, "reward_model_learning_rate")
        checks.fractions(self, "warm_start_success", "warm_start_right", "learning_rate_final", "curriculum")
        checks.below_one(self, "beta1", "beta2", "learning_rate_warmup")
        checks.telemetry(self.telemetry)
        checks.one_of(
            self,
            size=tuple(gpt2.SIZES),
            precision=("float32", "bfloat16"),
            old_log_probability=("recomputed", "sampled"),
            learning_rate_decay=tuple(DECAYS),
        )
        if self.reward not in REWARDS:
            raise ValueError(
                f"reward must be {' or '.join(map(repr, REWARDS))}, not {self.reward!r}: a reward in Python is that of "
                'a dialogue of one\'s own, registered by register("dialogue", name)'
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        self._divided("minibatches", self.minibatches, self.units, self._units)
        of_minibatch = f"{self._units} of a minibatch"
        self._divided("microbatches", self.microbatches or 1, self.units // self.minibatches, of_minibatch)
        for wrong, why in self._misfits():
            if wrong:
                raise ValueError(why)
        self.coefficients.check()
        _ = self.parts

    def _divided(self, name: str, parts: int, whole: int, what: str) -> None:
        if whole % parts:
            raise ValueError(f"{name} must divide the {whole} {what}, and {parts} does not")

    def _misfits(self):
        compared = "a preference objective" if self.objective == "preference" else f"advantage '{self.advantage}'"
        yield (
            self.compares and self.group_size == 1,
            f"group_size must be at least 2 for {compared}, which compares rows of one prompt, not 1",
        )
        yield (
            self.kl == "none" and self.kl_coefficient > 0,
            f"kl_coefficient {self.kl_coefficient:g} weighs a divergence from the reference, and "
            + (
                "a preference objective has its own, weighed by beta; leave it 0"
                if self.objective == "preference"
                else "kl is 'none'; choose k1, k2, k3 or exact, or kl_coefficient = 0"
            ),
        )
        yield (
            self.kl == "exact" and self.kl_in != "loss",
            "kl 'exact' goes into the loss; in the reward kl must be k1, k2 or k3",
        )
        yield (
            (self.covariance == "none") != (self.covariance_share == 0),
            f"covariance_share {self.covariance_share:g} is the share of tokens that are treated apart, and covariance "
            f"is {self.covariance!r}",
        )
        yield (
            self.lora_rank > 0 and not self.checkpoint,
            f"lora_rank {self.lora_rank} adapts the parameters of a checkpoint, and none is given",
        )
        for name in ("critic_init", "reward_model_init"):
            yield (
                self.lora_rank > 0 and getattr(self, name) != "policy",
                f"{name} must be 'policy' with adapters, which are all on the parameters of one checkpoint, not "
                f"{getattr(self, name)!r}",
            )
        yield (
            self.online and self.objective != "preference",
            "online is for a preference objective; others train on the policy's own rows always",
        )
        yield (
            self.oversampling > 1 and not self.compares,
            f"oversampling {self.oversampling} keeps rollout groups whose rewards differ, which advantage 'gae' does "
            "not compare",
        )

    @property
    def scheduled(self) -> bool:
        """Whether the rates change as the run goes on."""
        return self.learning_rate_warmup > 0 or self.learning_rate_decay != "constant"

    @property
    def rows(self) -> int:
        """The number of rows that an iteration trains on."""
        return self.prompts * (2 if self.objective == "preference" else self.group_size)

    @property
    def units(self) -> int:
        """What minibatches are made of: pairs of a preference objective, else rows."""
        return self.prompts if self.objective == "preference" else self.rows

    def pieces_of(self, sequences: int) -> packing.Sizes:
        """Of pieces that so many sequences, a minibatch's or an iteration's, are worked off in."""
        if self.microbatches:
            each = self.rows // self.minibatches // self.microbatches
            return packing.Sizes(each, each)
        if self.objective == "preference":
            return packing.Sizes(sequences, sequences)
        return packing.Sizes.halved(sequences)

    @property
    def packs(self) -> bool:
        """Whether rows share sequences; where there is but one piece, nothing is gained by it."""
        minibatch = self.rows // self.minibatches
        return self.objective == "policy" and self.pieces_of(minibatch).first < minibatch

    @property
    def _units(self) -> str:
        return "pairs" if self.objective == "preference" else "rows (prompts * group_size)"

    @property
    def compares(self) -> bool:
        """Whether rows of one prompt are compared."""
        return self.objective == "preference" or self.advantage != "gae"

    @property
    def parts(self) -> Parts:
        """The parts that the objective is made of."""
        same = {f.name: getattr(self, f.name) for f in dataclasses.fields(Parts) if hasattr(self, f.name)}
        return Parts(
            **same,
            entropy=self.entropy_coefficient > 0,
            old=self.old_log_probability,
            adaptive_lambda=self.gae_lambda_length > 0,
            overlong=self.overlong_buffer > 0,
            dynamic=self.oversampling > 1,
        )

    @property
    def coefficients(self) -> Coefficients:
        """The objective's coefficients, numbers that compile nothing when they change."""
        return Coefficients(**{f.name: getattr(self, f.name) for f in dataclasses.fields(Coefficients)})

    def numbers(self, difficulty: float) -> Numbers:
        """All numbers that are data, beside the difficulty of prompts."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(Numbers) if hasattr(self, f.name)}
        own |= {"objective": self.coefficients, "difficulty": difficulty}
        return jax.tree.map(jnp.float32, Numbers(**own))

    @property
    def structure(self) -> DialogueSettings:
        """Returns the settings with standard numbers, which is what a program depends on. What a zero leaves out stays
        left out.
        """
        standard: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(DialogueSettings) if _data(f)}
        standard["kl_coefficient"] = 0.0
        standard["entropy_coefficient"] = float(self.entropy_coefficient > 0)
        standard["gae_lambda_length"] = float(self.gae_lambda_length > 0)
        standard["covariance_share"] = 0.5 * (self.covariance_share > 0)
        standard["overlong_buffer"] = 0.5 * (self.overlong_buffer > 0)
        standard["top_p"] = 1.0 if self.top_p == 1.0 else 0.5
        standard["checkpoint"] = "a checkpoint" if self.checkpoint else ""
        for name in ("critic_init", "reward_model_init"):
            standard[name] = own if (own := getattr(self, name)) in BEGINNINGS else "a checkpoint"
        return DialogueSettings(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | standard)


def _data(f: dataclasses.Field) -> bool:
    return bool(f.metadata.get("data"))
