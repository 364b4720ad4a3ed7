"""All channels of a learner on dialogues: names, dimensions and words, in one place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from jaxaudit.learner import ACTING, PERFORMANCE, Channel
from jaxaudit.learners.dialogue import kl
from jaxaudit.learners.dialogue.telemetry.rewards import powers_of_two
from jaxaudit.learners.dialogue.telemetry.strata import STRATA
from jaxaudit.learners.dialogue.telemetry.values import DISTANCE_LABELS

FEATURES = ("tools", "parts", "reference", "ratios", "correction", "critic", "reward_model", "pairs")
"""What a run may have, and its channels with it: a dialogue's tools and parts of a reward, a reference policy, updates
by ratios, a correction of them, a critic, a learned reward model, a preference objective."""

MOMENTS = ("visited", "after")
"""Over all minibatches as visited, and of all rows after the last update."""


@dataclass(frozen=True)
class Entry:
    """A channel in the table.

    Attributes:
      words: what it is.
      dims: names of its dimensions.
      basic: whether "basic" telemetry has it.
      needs: one of FEATURES, or "" where every run has it.
      held_out: whether it is measured with the performance, at its cadence.
      dtype: that it is kept in.
      monitored: whether a monitor reads it unless told to.
    """

    words: str
    dims: tuple[str, ...] = ()
    basic: bool = False
    needs: str = ""
    held_out: bool = False
    dtype: str = "float32"
    monitored: bool = True


_TOKENS = ("stratum",)
_UPDATE = ("stratum", "moment")
_ROWS = ("held_out_row", "slot")

TABLE: dict[str, Entry] = {
    # Held-out prompts, nothing disturbed.
    PERFORMANCE: Entry("gold reward of sampled rows on held-out prompts", basic=True, held_out=True),
    "greedy_success": Entry("gold reward of greedy rows on held-out prompts", held_out=True),
    "changed_prompt_success": Entry("gold reward with one token of the prompt changed", held_out=True),
    "warm_start_success": Entry("sampled success when the policy was handed over", basic=True),
    # Rewards of the rows trained on.
    ACTING: Entry("gold reward of the rows trained on", basic=True),
    "reward": Entry("what the learner sees of it (proxy)", basic=True),
    "reward_gap": Entry("proxy less gold reward", basic=True),
    "reward_part": Entry("parts of the gold reward", ("part",), needs="parts"),
    "success": Entry("share of rows that succeed"),
    "pass_at": Entry("share of prompts that one of k rows solves", ("k",)),
    "groups_with_signal": Entry("share of rollout groups whose rewards differ", basic=True),
    "group_std": Entry("standard deviation of rewards within a rollout group"),
    "reward_model_accuracy": Entry("pairs of current rows that the reward model orders right", needs="reward_model"),
    # Lengths.
    "own_tokens": Entry("own tokens of a row", basic=True),
    "length_quantile": Entry("their quantiles over rows", ("quantile",)),
    "stratum_tokens": Entry("own tokens of all rows", _TOKENS),
    "turns": Entry("turns of a row", basic=True),
    "calls": Entry("tool calls of a row", basic=True),
    "truncated": Entry("share of rows that ran out of slots", basic=True),
    # The policy on its tokens.
    "entropy": Entry("entropy, nats", _TOKENS, basic=True),
    "saturation": Entry("norm of the gradient of log pi(token) by the logits", _TOKENS),
    "mass_cut": Entry("probability that top-k and top-p cut off", _TOKENS),
    "reference_kl": Entry("KL to the reference by k3, nats", basic=True, needs="reference"),
    "exact_kl": Entry("exact KL to the reference, nats", _TOKENS, needs="reference"),
    "exact_kl_max": Entry("that of the token where it is the largest", _TOKENS, needs="reference"),
    "kl_estimate": Entry("KL to the reference by k1, k2, k3", ("stratum", "estimator"), needs="reference"),
    "kl_spread": Entry("the largest of these less the smallest", _TOKENS, needs="reference"),
    "reference_log_probability": Entry("the reference's log-probability of own tokens", _TOKENS, needs="reference"),
    "tool_log_probability": Entry("the reference's log-probability of a tool's tokens (unfamiliarity)", needs="tools"),
    "update_kl": Entry("exact KL of the policy that is updated from the updated one", _TOKENS),
    "greedy_churn": Entry("share of slots whose greedy token the update changed", _TOKENS),
    "high_entropy_share": Entry("squared score on the fifth of tokens with most entropy", _TOKENS),
    # Ratios of the update, and |ratio x advantage|, a token's weight.
    "ratio_max": Entry("largest ratio", _UPDATE, needs="ratios"),
    "ratio_quantile": Entry("quantiles of the ratio", (*_UPDATE, "upper_quantile"), needs="ratios"),
    "ratio_ess": Entry("effective sample size of the ratios, a share", _UPDATE, needs="ratios"),
    "clip_fraction": Entry("share of tokens where a bound holds", (*_UPDATE, "bound"), needs="ratios"),
    "token_weight_cvar": Entry("mean of the top 1% of |ratio x advantage|", _UPDATE, needs="ratios"),
    "token_weight_q999": Entry("its 99.9% quantile", _UPDATE, needs="ratios"),
    "token_weight_top_share": Entry("the share of its sum in the top 1%", _UPDATE, needs="ratios"),
    "token_weight_tail": Entry("Hill's estimate of 1 / tail index", _UPDATE, needs="ratios"),
    "clip_low": Entry("share of tokens clipped below, over minibatches", basic=True, needs="ratios"),
    "clip_high": Entry("share of tokens clipped above", basic=True, needs="ratios"),
    "clip_dual": Entry("share of tokens at the dual clip", basic=True, needs="ratios"),
    "ratio_mean": Entry("mean ratio", basic=True, needs="ratios"),
    "old_kl": Entry("KL of the old policy from the trained one by k3", basic=True, needs="ratios"),
    # The trainer's log-probabilities against the sampler's.
    "sampler_gap": Entry("largest difference of the trainer's log-probabilities from the sampler's", basic=True),
    "mismatch_kl": Entry("KL of the sampler from the trainer, by k3", _TOKENS),
    "mismatch_chi2": Entry("mean squared ratio of trainer to sampler, less 1", _TOKENS),
    "mismatch_ess": Entry("effective sample size of these ratios, a share", _TOKENS),
    "correction_mean": Entry("mean weight of the correction", basic=True, needs="correction"),
    "correction_zero": Entry("share of tokens that it takes out", basic=True, needs="correction"),
    # The critic.
    "value_loss": Entry("the value loss", basic=True, needs="critic"),
    "value_clipped": Entry("share of tokens where the value is clipped", basic=True, needs="critic"),
    "explained_variance": Entry("variance of returns that values explain", basic=True, needs="critic"),
    "value_bias": Entry("values less returns", basic=True, needs="critic"),
    "critic_error": Entry("mean squared error of values", ("rows",), needs="critic"),
    "value_correlation": Entry("values with returns, by own tokens to the row's end", ("distance",), needs="critic"),
    "critic_separation": Entry("value after a right token less after a wrong one", needs="critic", held_out=True),
    "critic_order": Entry("pairs in which the right token's value is higher", needs="critic", held_out=True),
    "critic_gradient_norm": Entry("norm of the critic's gradient", basic=True, needs="critic"),
    # The update, and hidden states.
    "loss": Entry("the objective", basic=True),
    "surrogate_loss": Entry("the clipped surrogate's part of it", basic=True, needs="ratios"),
    "gradient_norm": Entry("norm of the policy's gradient, a mean over minibatches", basic=True),
    "gradient_norm_spread": Entry("its standard deviation over minibatches, relative to the mean", basic=True),
    "layer_gradient_norm": Entry("gradient norms by layer", ("layer",)),
    "clipped_fraction": Entry("share of gradients that were clipped", basic=True),
    "learning_rate": Entry("of the policy", basic=True),
    "x_grad": Entry("gradient coherence: mean pairwise cosine of minibatch gradients", basic=True),
    "x_mem": Entry("persistence: cosine of the update and the first moment", basic=True),
    "x_used": Entry("gradient as used", basic=True),
    "params_norm": Entry("norm of the policy's parameters", basic=True),
    "update_norm": Entry("norm of their change", basic=True),
    "effective_rank": Entry("effective rank of hidden states on held-out rows", held_out=True),
    "stable_rank": Entry("their stable rank", held_out=True),
    "representation_drift": Entry("1 - CKA of hidden states with the warm start's", held_out=True),
    # A preference objective.
    "margin": Entry("implicit reward of chosen less rejected rows", basic=True, needs="pairs"),
    "preference_accuracy": Entry("share of pairs in which it is positive", basic=True, needs="pairs"),
    "chosen_reward": Entry("implicit reward of chosen rows", basic=True, needs="pairs"),
    "rejected_reward": Entry("implicit reward of rejected rows", basic=True, needs="pairs"),
    # Rows to read.
    "held_out_tokens": Entry("tokens of held-out rows", _ROWS, held_out=True, dtype="int32", monitored=False),
    "held_out_role": Entry("who wrote them", _ROWS, held_out=True, dtype="int8", monitored=False),
    "held_out_log_probability": Entry("own tokens' log-probability", _ROWS, held_out=True, monitored=False),
    "held_out_reward": Entry("the rows' gold reward", _ROWS[:1], held_out=True, monitored=False),
}


@dataclass(frozen=True)
class Extent:
    """How long dimensions are that depend on a run.

    Attributes:
      members: G, rows of a prompt.
      parts: names of the parts of the gold reward.
      layers: groups of parameters, as `layer_gradient_norm` has them.
      shown: held-out rows that are stored.
      slots: T.
      every: cadence of what is measured on held-out rows, steps.
    """

    members: int
    slots: int
    parts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    shown: int = 2
    every: int = 1


def channels(telemetry: str, features: Collection[str], extent: Extent) -> dict[str, Channel]:
    """The channels of a run, in the table's order; those of a dimension without entries are left out.

    Args:
      telemetry: "basic" or "full".
      features: of FEATURES, those it has.
      extent: of its dimensions.

    Raises:
      ValueError: a feature is not one of them.
    """
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise ValueError(f"features are of {', '.join(FEATURES)}, not '{unknown[0]}'")
    labels = _labels("tools" in features, extent)
    found = {}
    for name, entry in TABLE.items():
        wanted = (telemetry == "full" or entry.basic) and (not entry.needs or entry.needs in features)
        if wanted and all(labels[dim] for dim in entry.dims):
            dims = tuple((dim, tuple(labels[dim])) for dim in entry.dims)
            found[name] = Channel(dims, entry.dtype, extent.every if entry.held_out else 1, entry.monitored)
    return found


def _labels(tools: bool, extent: Extent) -> dict[str, Sequence[str]]:
    return {
        "stratum": STRATA if tools else STRATA[:1],
        "moment": MOMENTS,
        "estimator": tuple(kl.ESTIMATORS),
        "upper_quantile": ("q99", "q999"),
        "quantile": ("q10", "q50", "q90"),
        "bound": ("low", "high", "dual"),
        "distance": DISTANCE_LABELS,
        "rows": ("collected", "held_out"),
        "k": [str(k) for k in powers_of_two(extent.members)],
        "part": sorted(extent.parts),
        "layer": extent.layers,
        "held_out_row": [str(row) for row in range(extent.shown)],
        "slot": [str(slot) for slot in range(extent.slots)],
    }
