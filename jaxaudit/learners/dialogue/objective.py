"""Which parts a learner on dialogues is made of: the structure of its program, as words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import struct

from jaxaudit.learners.dialogue import loss_terms
from jaxaudit.learners.rl import settings as checks


@struct.dataclass
class Coefficients:
    """Scalars: Python floats as a user writes them, float32 in a program (`jax.tree.map(jnp.float32, coefficients)`).

    Those of parts that are not there are not read.

    Attributes:
      clip_low, clip_high: how far below and above 1 a ratio may gain.
      dual_clip: the largest ratio that counts where the advantage is negative; infinity for none.
      kl_coefficient: weight of the KL, in the loss or in the reward.
      entropy_coefficient: weight of the entropy bonus.
      value_coefficient: weight of the value loss.
      value_clip: how far a value may move from the old one.
      gamma: discount of an own token.
      gae_lambda: lambda of the advantages.
      gae_lambda_length: a row of l own tokens has the lambda max(0, 1 - 1 / (this l)) in the place of that.
      covariance_share: the share of own tokens that are treated apart for their covariance.
      critic_lambda: lambda of the critic's targets.
      std_epsilon: added to a group's standard deviation.
      tis_cap: the largest weight of truncated importance sampling.
      mis_low, mis_high: the weights that masked importance sampling lets through.
      beta: scale of the implicit reward of a preference objective.
      label_smoothing: probability that a pair is the wrong way round.
      overlong_coefficient: weight of the penalty on long rows.
      overlong_buffer: share of a response's longest length over which that penalty grows.
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
        """Raises ValueError, in one sentence, for the first number as written that makes no sense."""
        for name in ("gamma", "gae_lambda", "critic_lambda", "overlong_buffer", "clip_low", "covariance_share"):
            self._demand(name, 0 <= getattr(self, name) <= 1, "lie in [0, 1]")
        for name in (
            "clip_high",
            "kl_coefficient",
            "value_coefficient",
            "overlong_coefficient",
            "std_epsilon",
            "gae_lambda_length",
        ):
            self._demand(name, getattr(self, name) >= 0, "not be negative")
        for name in ("value_clip", "beta", "tis_cap"):
            self._demand(name, getattr(self, name) > 0, "be positive")
        self._demand("dual_clip", self.dual_clip > 1, "be above 1")
        self._demand("label_smoothing", 0 <= self.label_smoothing < 0.5, "lie in [0, 0.5)")
        self._demand("mis_low", 0 <= self.mis_low < self.mis_high, f"lie in [0, mis_high = {self.mis_high})")

    def _demand(self, name: str, met: bool, what: str) -> None:
        if not met:
            raise ValueError(f"{name} must {what}, not {getattr(self, name)}")


ADVANTAGES = ("gae", "group", "group_mean", "leave_one_out")
KLS = ("none", *loss_terms.KL_ESTIMATORS, "exact")


@dataclass(frozen=True)
class Parts:
    """The structural choices; numbers are `Coefficients`, which are data.

    Attributes:
      objective: "policy", or "preference" (DPO), of whose other parts only the reference matters.
      advantage: "gae" (needs a critic), "group", "group_mean" or "leave_one_out".
      whiten: token advantages to mean 0, variance 1 over an iteration's own tokens.
      ratio: "token", "sequence_mean" or "sequence_sum".
      correction: of a mismatch of sampler and trainer, "none", "tis" or "mis".
      correction_level: "token", "sequence", or for mis "geometric".
      aggregation: "token_minibatch", "token_iteration", "sequence" or "constant".
      kl: estimator of KL(policy || reference), "k1", "k2", "k3" or "exact"; "none" for no such term.
      kl_in: "loss", "reward" or "both".
      kl_weight: in the loss, "none", "ratio" (unbiased off policy with k3) or "stopped_ratio" (with k2).
      covariance: which tokens are treated apart whose advantage and log-probability vary together, of `covariance`:
        "clip" takes some out of the gradient, "kl" adds the log-ratio of the highest to the loss; "none".
      adaptive_lambda: a row's lambda follows its number of own tokens.
      entropy: an entropy bonus.
      clip_value: the value loss, too.
      old: old log-probabilities are "recomputed" by the trainer or the "sampled" ones.
      reference: whether there is a reference policy.
      overlong: the penalty on long rows is added to the score.
      mask_truncated: rows that were cut off leave the loss and the baselines.
      dynamic: rollout groups without signal are drawn anew, from a fixed surplus.
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
    entropy: bool = False
    clip_value: bool = True
    old: str = "recomputed"
    reference: bool = True
    overlong: bool = False
    mask_truncated: bool = False
    dynamic: bool = False

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
            old=("recomputed", "sampled"),
            covariance=loss_terms.COVARIANCE_TREATMENTS,
        )
        for wrong, why in self._misfits():
            if wrong:
                raise ValueError(why)

    def _misfits(self):
        yield self.kl != "none" and not self.reference, f"kl = {self.kl!r} is measured from a reference, which is off"
        yield (
            self.objective == "preference" and not self.reference,
            "a preference objective compares with a reference, which is off",
        )
        yield (
            self.objective == "preference" and self.kl != "none",
            f"a preference objective has its KL within it, so kl must be 'none', not {self.kl!r}",
        )
        yield (
            self.objective == "preference" and (self.correction != "none" or self.entropy),
            "a preference objective has no ratio and no entropy bonus, so correction must be 'none' and "
            "entropy_coefficient 0",
        )
        yield (
            self.correction != "none" and self.old == "sampled",
            f"correction = {self.correction!r} weighs by recomputed over sampled probabilities, so "
            "old_log_probability must be 'recomputed', not 'sampled'",
        )
        yield (
            self.correction_level == "geometric" and self.correction != "mis",
            f"correction_level = 'geometric' is a mask, so correction must be 'mis', not {self.correction!r}",
        )
        yield (
            self.kl_weight != "none" and (self.kl == "none" or self.kl_in != "loss"),
            f"kl_weight = {self.kl_weight!r} is of a KL in the loss, and there is none",
        )
        yield (
            self.kl_weight != "none" and self.kl == "exact",
            f"kl_weight = {self.kl_weight!r} is of an estimate from the token written, which kl = 'exact' is not",
        )
        yield (
            self.covariance != "none" and (self.objective == "preference" or self.ratio != "token"),
            f"covariance = {self.covariance!r} is of tokens, so objective must be 'policy' and ratio 'token'",
        )
        yield (
            self.adaptive_lambda and self.advantage != "gae",
            f"gae_lambda_length is of a critic's advantages, so advantage must be 'gae', not {self.advantage!r}",
        )
        yield (
            self.whiten and self.advantage != "gae",
            f"whiten is of a critic's token advantages, so advantage must be 'gae', not {self.advantage!r}",
        )
        yield (
            self.advantage == "gae" and self.ratio == "sequence_sum",
            "ratio = 'sequence_sum' has one advantage for a row, so advantage must not be 'gae'",
        )

    @property
    def kl_in_reward(self) -> bool:
        """Whether a token's reward is less the KL's estimate."""
        return self.kl != "none" and self.kl_in in ("reward", "both")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL's estimate is a part of the loss."""
        return self.kl != "none" and self.kl_in in ("loss", "both")

    @property
    def critic(self) -> bool:
        """Whether the objective trains a critic."""
        return self.objective == "policy" and self.advantage == "gae"

    @property
    def needs_reference(self) -> bool:
        """Whether the objective asks for the reference's log-probabilities."""
        return self.objective == "preference" or self.kl != "none"

    @property
    def clips_ratio(self) -> bool:
        """Whether the objective reads bounds of the probability ratio."""
        return self.objective == "policy" and self.covariance != "kl"

    @property
    def reads_sampled(self) -> bool:
        """Whether the objective reads the log-probabilities that the sampler gave."""
        return self.follows_sampler or (self.objective == "policy" and self.correction != "none")

    @property
    def follows_sampler(self) -> bool:
        """Whether ratios are relative to the sampler's log-probabilities."""
        return self.objective == "policy" and self.old == "sampled"
