"""The objective of dialogue learners: structural choices, which are compiled, and coefficients, which are data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax import struct

from jaxaudit.learners.dialogue import loss_terms
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
        for name in ("gamma", "gae_lambda", "critic_lambda", "overlong_buffer", "clip_low", "covariance_share"):
            self._require(name, 0 <= getattr(self, name) <= 1, "lie in [0, 1]")
        for name in (
            "clip_high",
            "kl_coefficient",
            "value_coefficient",
            "overlong_coefficient",
            "std_epsilon",
            "gae_lambda_length",
        ):
            self._require(name, getattr(self, name) >= 0, "not be negative")
        for name in ("value_clip", "beta", "tis_cap"):
            self._require(name, getattr(self, name) > 0, "be positive")
        self._require("dual_clip", self.dual_clip > 1, "be above 1")
        self._require("label_smoothing", 0 <= self.label_smoothing < 0.5, "lie in [0, 0.5)")
        self._require("mis_low", 0 <= self.mis_low < self.mis_high, f"lie in [0, mis_high = {self.mis_high})")

    def _require(self, name: str, condition: bool, requirement: str) -> None:
        if not condition:
            raise ValueError(f"{name} must {requirement}, not {getattr(self, name)}")


ADVANTAGES = ("gae", "group", "group_mean", "leave_one_out")
KLS = ("none", *loss_terms.KL_ESTIMATORS, "exact")


@dataclass(frozen=True)
class ObjectiveConfig:
    """The structural choices of the objective, which decide what is compiled; its numbers are `Coefficients`.

    Attributes:
      objective: "policy", or "preference" (DPO), which reads none of the other choices but the reference.
      advantage: advantage estimator: "gae" (which trains a critic), "group", "group_mean" or "leave_one_out".
      whiten: whether token advantages are scaled to mean 0, variance 1 over an iteration's response tokens.
      ratio: probability ratio: "token", "sequence_mean" or "sequence_sum".
      correction: importance weights for a sampler that differs from the trainer: "none", "tis" or "mis".
      correction_level: what has an importance weight: "token", "sequence", or for mis "geometric".
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
      reference: whether there is a reference policy.
      overlong_penalty: whether the penalty on overlong responses is added to the score.
      mask_truncated: whether truncated rows are left out of the loss and the baselines.
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
    reference: bool = True
    overlong_penalty: bool = False
    mask_truncated: bool = False
    dynamic_sampling: bool = False

    def __post_init__(self):
        checks.one_of(
            self,
            objective=("policy", "preference"),
            advantage=ADVANTAGES,
            ratio=tuple(loss_terms.RATIOS),
            correction=("none", "tis", "mis"),
            correction_level=loss_terms.CORRECTION_LEVELS,
            aggregation=loss_terms.AGGREGATIONS,
            kl=KLS,
            kl_in=("loss", "reward", "both"),
            kl_weight=loss_terms.KL_WEIGHTS,
            old_log_probability=("recomputed", "sampled"),
            covariance=loss_terms.COVARIANCE_TREATMENTS,
        )
        for conflict, message in self._conflicts():
            if conflict:
                raise ValueError(message)

    def _conflicts(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.kl != "none" and not self.reference,
            f"kl = {self.kl!r} needs a reference policy, so reference must be True",
        )
        yield (
            self.objective == "preference" and not self.reference,
            "a preference objective needs a reference policy, so reference must be True",
        )
        yield (
            self.objective == "preference" and self.kl != "none",
            f"a preference objective contains its own KL, so kl must be 'none', not {self.kl!r}",
        )
        yield (
            self.objective == "preference" and (self.correction != "none" or self.entropy_bonus),
            "a preference objective has no probability ratio and no entropy bonus, so correction must be 'none' and "
            "entropy_coefficient must be 0",
        )
        yield (
            self.correction != "none" and self.old_log_probability == "sampled",
            f"correction = {self.correction!r} weighs tokens by recomputed over sampled probabilities, so "
            "old_log_probability must be 'recomputed', not 'sampled'",
        )
        yield (
            self.correction_level == "geometric" and self.correction != "mis",
            f"correction_level = 'geometric' only masks, so correction must be 'mis', not {self.correction!r}",
        )
        yield (
            self.kl_weight != "none" and (self.kl == "none" or self.kl_in != "loss"),
            f"kl_weight = {self.kl_weight!r} multiplies a KL in the loss, so kl must not be 'none' and kl_in must be "
            f"'loss', not {self.kl!r} and {self.kl_in!r}",
        )
        yield (
            self.kl_weight != "none" and self.kl == "exact",
            f"kl_weight = {self.kl_weight!r} multiplies an estimate from the sampled token, so kl must not be 'exact'",
        )
        yield (
            self.covariance != "none" and (self.objective == "preference" or self.ratio != "token"),
            f"covariance = {self.covariance!r} selects single tokens, so objective must be 'policy' and ratio 'token'",
        )
        yield (
            self.adaptive_lambda and self.advantage != "gae",
            f"gae_lambda_length applies to a critic's advantages, so advantage must be 'gae', not {self.advantage!r}",
        )
        yield (
            self.whiten and self.advantage != "gae",
            f"whiten applies to a critic's token advantages, so advantage must be 'gae', not {self.advantage!r}",
        )
        yield (
            self.advantage == "gae" and self.ratio == "sequence_sum",
            "ratio = 'sequence_sum' needs one advantage per row, so advantage must not be 'gae'",
        )

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
