"""The numbers of a learner's objective. They are data: others are conditions of the same program."""

from __future__ import annotations

from typing import Any

from flax import struct


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
