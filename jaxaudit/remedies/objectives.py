"""Remedies that change a policy-gradient objective: ratio bounds, entropy, KL, lambdas, corrections, the critic."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.core.remedy import remedy, setting

# Bounds of the ratio.


@remedy("ratio_clip", strength=0.28, neutral=0.0, limits=(0.0, math.inf))
def clip_higher(value, strength):
    """Sets the upper bound of the probability ratio to 1 + strength; the lower one stays (DAPO: Yu et al., 2025)."""
    return value.at[1].set(strength)


@setting(strength=3.0, limits=(1.0, math.inf))
def dual_clip(settings, strength):
    """Bounds the ratio by the strength where the advantage is negative (Ye et al., 2020; verl's `clip_ratio_c`)."""
    if getattr(settings, "objective", "policy") == "preference":
        raise ValueError("a preference objective has no probability ratio")
    return {"dual_clip": strength}


@setting(strength=0.01, limits=(0.0, 1.0))
def clip_cov(settings, strength):
    """Removes a random share of the tokens with high covariance from the gradient (Clip-Cov: Cui et al., 2025)."""
    return {"covariance": "clip", "covariance_share": strength}


@setting(strength=0.01, limits=(0.0, 1.0))
def kl_cov(settings, strength):
    """Adds |log ratio| to the loss of the share of tokens with the highest covariance (KL-Cov: Cui et al., 2025)."""
    return {"covariance": "kl", "covariance_share": strength}


# Entropy.

ENTROPY_STEP = 0.005


def _no_coefficient(value: jax.Array) -> jax.Array:
    return jnp.zeros(())


def _with_entropy_bonus(settings: Any, strength: float) -> dict[str, Any]:
    """Adds an entropy bonus with a negligible coefficient, which the remedy then replaces, if there is no bonus."""
    if not hasattr(settings, "entropy_coefficient"):
        raise ValueError("the learner has no entropy bonus")
    return {} if settings.entropy_coefficient > 0 else {"entropy_coefficient": 1e-30}


@remedy(
    "entropy_coefficient",
    strength=0.2,
    neutral=0.0,
    limits=(0.0, math.inf),
    needs=("entropy",),
    init=_no_coefficient,
    settings=_with_entropy_bonus,
)
def adaptive_entropy(value, strength, state, *, entropy):
    """Adapts the coefficient of the entropy bonus towards a target entropy, the strength, in nats.

    The coefficient rises by 0.005 in a step with less entropy than the target and falls by 0.005 otherwise, within
    [0, 1]; the bonus acts only while the entropy is at most the target (Skywork-OR1: He et al., 2025, as in TRL).
    """
    current = entropy()
    coefficient = jnp.clip(state + jnp.where(current < strength, ENTROPY_STEP, -ENTROPY_STEP), 0.0, 1.0)
    return jnp.where(current <= strength, coefficient, 0.0), coefficient


# The KL divergence from the reference.


@setting(strength=0.05, limits=(0.0, math.inf))
def kl_in_reward(settings, strength):
    """Subtracts strength * log(policy / reference) from the reward: k1 in the reward, and no KL term in the loss.

    Its gradient is the gradient of the sequence's KL divergence (Shah et al., 2025).
    """
    return {"kl": "k1", "kl_in": "reward", "kl_weight": "none", "kl_coefficient": strength}


@setting(strength=0.05, limits=(0.0, math.inf))
def kl_in_both(settings, strength):
    """Adds k1 to the reward and to the loss, each with the strength as coefficient (Shah et al., 2025).

    On policy, the gradient of the term in the loss has mean zero.
    """
    return {"kl": "k1", "kl_in": "both", "kl_weight": "none", "kl_coefficient": strength}


@setting(strength=0.05, limits=(0.0, math.inf))
def kl_off_policy(settings, strength):
    """Adds the differentiable ratio times k3 to the loss, which is also correct off policy (Tang and Munos, 2025)."""
    return {"kl": "k3", "kl_in": "loss", "kl_weight": "ratio", "kl_coefficient": strength}


# Corrections of a mismatch between sampler and trainer.


@setting(strength=2.0, limits=(0.0, math.inf))
def truncated_importance(settings, strength):
    """Weights tokens by the trainer's probability over the sampler's, at most the strength (TIS: Yao et al., 2025)."""
    return {"correction": "tis", "correction_level": "token", "tis_cap": strength}


@setting(strength=2.0, limits=(1.0, math.inf))
def masked_importance(settings, strength):
    """Weights tokens as `truncated_importance` does, but masks ratios outside [1 / strength, strength] (MIS)."""
    bounds = {"mis_low": 1.0 / strength, "mis_high": strength}
    return {"correction": "mis", "correction_level": "token"} | bounds


@setting(strength=3.0, limits=(0.0, math.inf))
def sequence_mask(settings, strength):
    """Weights rows by the product of their tokens' ratios, and masks rows above the strength (TRL's default: 3)."""
    return {"correction": "mis", "correction_level": "sequence", "mis_low": 0.0, "mis_high": strength}


# Values.


@remedy("critic_lambda", strength=1.0, neutral=0.0, limits=(0.0, 1.0))
def decoupled_lambda(value, strength):
    """Sets lambda of the critic's targets, but not of the advantages, to the strength (VC-PPO: Yuan et al., 2025).

    With 1 the targets are the returns of the samples.
    """
    return jnp.full_like(value, strength)


@setting(strength=0.05, limits=(0.0, math.inf))
def length_adaptive_lambda(settings, strength):
    """Sets lambda for advantages of rows with l own tokens to max(0, 1 - 1 / (strength l)) (VAPO: Yue et al., 2025).

    With 0.05 it is 0 for rows of up to 20 tokens.
    """
    return {"gae_lambda_length": strength}


@setting(strength=2000.0, limits=(1.0, math.inf), whole=True)
def value_pretraining(settings, strength):
    """Trains the critic for `strength` updates before the first iteration, on returns of the initial policy.

    From VC-PPO (Yuan et al., 2025). It sets the learner's setting `critic_warm_start`.
    """
    if hasattr(settings, "objective_config") and not settings.objective_config.critic:
        raise ValueError("the learner has no critic")
    return {"critic_warm_start": int(strength)}


@setting(limits=(1.0, 1.0))
def critic_layer_norm(settings, strength):
    """Normalises each hidden layer of the critic before its activation (Ball et al., 2023; Nauman et al., 2024)."""
    return {"critic_layer_norm": True}
