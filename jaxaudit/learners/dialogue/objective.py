"""The objective of dialogue learners: structural choices, which are compiled, and coefficients, which are data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import struct

from jaxaudit.learners.rl import settings as checks


@struct.dataclass
class Coefficients:
    """The numbers of the objective: Python floats as a user writes them, float32 scalars in a program.

    Other values share the same compiled program. A coefficient is read only if `ObjectiveConfig` has its term.

    Attributes:
      clip_low, clip_high: how far below and above 1 the probability ratio may move before it is clipped.
      dual_clip: the largest ratio that counts where the advantage is negative; infinity for no bound.
      kl_coefficient: weight of the KL, in the loss or in the reward.
      entropy_coefficient: weight of the entropy bonus.
      value_coefficient: weight of the value loss.
      value_clip: how far a value may move from the old value before it is clipped.
      gamma: discount per response token.
      gae_lambda: lambda of the advantages.
      gae_lambda_length: scale of the length-adaptive lambda, which a row of l response tokens has in the place of
        `gae_lambda`: max(0, 1 - 1 / (gae_lambda_length * l)).
      covariance_share: fraction of response tokens that Clip-Cov or KL-Cov selects.
      critic_lambda: lambda of the critic's targets.
      std_epsilon: number that is added to a group's standard deviation.
      tis_cap: the largest weight of truncated importance sampling.
      mis_low, mis_high: bounds of the weights that masked importance sampling keeps.
      beta: scale of the implicit reward of a preference objective.
      label_smoothing: probability that a preference label is wrong.
      overlong_coefficient: weight of the penalty on overlong responses.
      overlong_buffer: fraction of a response's largest length over which the penalty grows.
    """

    clip_low: Any = 0.2
    clip_high: Any = 0.2
    dual_clip: Any = float("inf")
    kl_coefficient: Any = 0.0
    entropy_coefficient: Any = 0.0
    value_coefficient: Any = 0.5
    value_clip: Any = 0.2
    gamma: Any = 1.0
    gae_lambda: Any = 0.95
    gae_lambda_length: Any = 0.0
    covariance_share: Any = 0.0
    critic_lambda: Any = 0.95
    std_epsilon: Any = 1e-4
    tis_cap: Any = 2.0
    mis_low: Any = 0.5
    mis_high: Any = 2.0
    beta: Any = 0.1
    label_smoothing: Any = 0.0
    overlong_coefficient: Any = 1.0
    overlong_buffer: Any = 0.2

    def check(self) -> None:
        """Raises ValueError, in one sentence, for the first coefficient that is out of range."""
        checks.fractions(
            self, "gamma", "gae_lambda", "critic_lambda", "overlong_buffer", "clip_low", "covariance_share"
        )
        checks.not_negative(self, "clip_high", "kl_coefficient", "value_coefficient", "overlong_coefficient")
        checks.not_negative(self, "std_epsilon", "gae_lambda_length")
        checks.check_each(self, ("value_clip", "beta", "tis_cap"), lambda value: value > 0, "be positive")
        checks.check_each(self, ("dual_clip",), lambda value: value > 1, "be above 1")
        checks.check_each(self, ("label_smoothing",), lambda value: 0 <= value < 0.5, "lie in [0, 0.5)")
        below_high = f"lie in [0, mis_high = {self.mis_high})"
        checks.check_each(self, ("mis_low",), lambda value: 0 <= value < self.mis_high, below_high)


@dataclass(frozen=True)
class ObjectiveConfig:
    """The structural choices of the objective, which decide what is compiled; its numbers are `Coefficients`.

    `DialogueSettings` has the same fields and checks that each has one of its values. This class checks that they go
    together.

    Attributes:
      objective: "policy", or "preference" (DPO), which reads none of the other choices.
      advantage: advantage estimator: "gae" (which trains a critic), "group", "group_mean" or "leave_one_out".
      whiten: whether token advantages are scaled to mean 0, variance 1 over an iteration's response tokens.
      ratio: probability ratio: "token", "sequence_mean" or "sequence_sum".
      correction: importance weights for a sampler that differs from the trainer: "none", "tis" or "mis".
      correction_level: what an importance weight belongs to: a "token"; a "sequence", as the product over its tokens;
        or for mis "geometric", a token of a row whose geometric mean is within the bounds, which does not reject rows
        for being long.
      aggregation: "token_minibatch", "token_iteration", "sequence" or "constant".
      kl: estimator of KL(policy || reference), "k1", "k2", "k3" or "exact"; "none" for no KL term.
      kl_in: where the KL is subtracted or added: "loss", "reward" or "both".
      kl_weight: factor of the KL in the loss: "none", "ratio" (unbiased off policy with k3) or "stopped_ratio" (with
        k2).
      covariance: treatment of tokens by the covariance of their advantage and log-probability: "clip" (Clip-Cov) takes
        some of them out of the gradient, "kl" (KL-Cov) adds the log-ratio of the highest to the loss; or "none".
      adaptive_lambda: whether a row's lambda depends on its number of response tokens.
      entropy_bonus: whether the loss has an entropy bonus.
      clip_value: whether the value loss is clipped, too.
      old_log_probability: where old log-probabilities come from: "recomputed" by the trainer, or as "sampled".
      overlong_penalty: whether the penalty on overlong responses is added to the score.
      dynamic_sampling: whether rollout groups without signal are replaced from a fixed surplus.
    """

    objective: str = "policy"
    advantage: str = "group"
    whiten: bool = False
    ratio: str = "token"
    correction: str = "none"
    correction_level: str = "token"
    aggregation: str = "sequence"
    kl: str = "none"
    kl_in: str = "loss"
    kl_weight: str = "none"
    covariance: str = "none"
    adaptive_lambda: bool = False
    entropy_bonus: bool = False
    clip_value: bool = True
    old_log_probability: str = "recomputed"
    overlong_penalty: bool = False
    dynamic_sampling: bool = False

    def __post_init__(self):
        if self.objective == "preference" and self.kl != "none":
            raise ValueError(f"a preference objective contains its own KL, so kl must be 'none', not {self.kl!r}")
        if self.objective == "preference" and (self.correction != "none" or self.entropy_bonus):
            raise ValueError(
                "a preference objective has no probability ratio and no entropy bonus, so correction must be 'none' "
                "and entropy_coefficient must be 0"
            )
        if self.correction != "none" and self.old_log_probability == "sampled":
            raise ValueError(
                f"correction = {self.correction!r} weighs tokens by recomputed over sampled probabilities, so "
                "old_log_probability must be 'recomputed', not 'sampled'"
            )
        if self.correction_level == "geometric" and self.correction != "mis":
            raise ValueError(
                f"correction_level = 'geometric' only masks, so correction must be 'mis', not {self.correction!r}"
            )
        if self.kl_weight != "none" and (self.kl == "none" or self.kl_in != "loss"):
            raise ValueError(
                f"kl_weight = {self.kl_weight!r} multiplies a KL in the loss, so kl must not be 'none' and kl_in must "
                f"be 'loss', not {self.kl!r} and {self.kl_in!r}"
            )
        if self.kl_weight != "none" and self.kl == "exact":
            raise ValueError(
                f"kl_weight = {self.kl_weight!r} multiplies an estimate from the sampled token, so kl must not be "
                "'exact'"
            )
        if self.covariance != "none" and (self.objective == "preference" or self.ratio != "token"):
            raise ValueError(
                f"covariance = {self.covariance!r} selects single tokens, so objective must be 'policy' and ratio "
                "'token'"
            )
        if self.adaptive_lambda and self.advantage != "gae":
            raise ValueError(
                f"gae_lambda_length applies to a critic's advantages, so advantage must be 'gae', not "
                f"{self.advantage!r}"
            )
        if self.whiten and self.advantage != "gae":
            raise ValueError(
                f"whiten applies to a critic's token advantages, so advantage must be 'gae', not {self.advantage!r}"
            )
        if self.advantage == "gae" and self.ratio == "sequence_sum":
            raise ValueError("ratio = 'sequence_sum' needs one advantage per row, so advantage must not be 'gae'")

    @property
    def kl_in_reward(self) -> bool:
        """Whether the KL estimate is subtracted from the tokens' rewards."""
        return self.kl != "none" and self.kl_in in ("reward", "both")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL is a term of the loss."""
        return self.kl != "none" and self.kl_in in ("loss", "both")

    @property
    def critic(self) -> bool:
        """Whether the objective trains a critic beside the policy."""
        return self.objective == "policy" and self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether the objective reads the reference's log-probabilities."""
        return self.objective == "preference" or self.kl != "none"

    @property
    def clips_ratio(self) -> bool:
        """Whether the objective reads the bounds of the probability ratio."""
        return self.objective == "policy" and self.covariance != "kl"

    @property
    def uses_rollout_log_prob(self) -> bool:
        """Whether the objective reads the log-probabilities that the sampler returned."""
        return self.old_log_prob_is_sampled or (self.objective == "policy" and self.correction != "none")

    @property
    def old_log_prob_is_sampled(self) -> bool:
        """Whether ratios are relative to the sampler's log-probabilities."""
        return self.objective == "policy" and self.old_log_probability == "sampled"
