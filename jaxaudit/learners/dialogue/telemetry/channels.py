"""All channels of a learner on dialogues: names, dimensions and words, in one place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxaudit.core.channel_names import ACTING, PERFORMANCE, PERFORMANCE_ERROR
from jaxaudit.core.learner import Channel
from jaxaudit.dialogues.protocol import GOLD, ROLES, Dialogue, has_changes, has_demonstrations
from jaxaudit.learners.dialogue.network import Network
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.learners.dialogue.telemetry.measurement import SHOWN_ROWS
from jaxaudit.learners.dialogue.telemetry.policy import DISTANCE_LABELS, ESTIMATORS
from jaxaudit.learners.dialogue.telemetry.rewards import powers_of_two
from jaxaudit.learners.dialogue.telemetry.token_statistics import SOURCES, STRATA, LastSeen
from jaxaudit.runtime.paths import groups_of

FEATURES = (
    "tools",
    "parts",
    "reference",
    "ratios",
    "correction",
    "critic",
    "demonstrations",
    "reward_model",
    "pairs",
    "mismatch",
    "kl_loss",
    "sources",
    "changes",
)
"""What a run may have, and its channels with it: a dialogue's tools and parts of a reward, a reference policy, updates
by ratios, weights that correct them, a critic, a critic and demonstrations to try it on, a learned reward model, pairs
(DPO), log-probabilities both sampled and recomputed, a KL to the reference in the loss, updates
by ratios of a dialogue with tools, and a dialogue that changes its prompts."""

MOMENTS = ("visited", "after")
"""Over all minibatches as visited, and of all rows after the last update, which "full" telemetry alone looks at."""


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

TABLE: dict[str, Entry] = {
    # Success on held-out prompts, or on fixed ones of a dialogue that is not split; nothing disturbed.
    PERFORMANCE: Entry("gold reward of sampled rows on held-out or fixed prompts", basic=True, held_out=True),
    PERFORMANCE_ERROR: Entry("its standard error over rows", basic=True, held_out=True),
    "greedy_success": Entry("gold reward of greedy rows on the same prompts", held_out=True),
    "changed_prompt_success": Entry(
        "gold reward where one token of the prompt is another, by what is asked then", needs="changes", held_out=True
    ),
    "warm_start_success": Entry("sampled success at the end of the warm start", basic=True),
    # Rewards of the rows trained on.
    ACTING: Entry("gold reward of the rows sampled to train on, disturbed or not", basic=True),
    "proxy": Entry("the reward the learner sees", basic=True),
    "reward_gap": Entry(
        "proxy less gold reward; of a learned reward each in standard deviations above the warm start's mean",
        basic=True,
    ),
    "reward_part": Entry("parts of the gold reward", ("part",), needs="parts"),
    "success": Entry("share of rows that succeed", basic=True),
    "pass_at": Entry("share of prompts that one of k rows solves", ("k",)),
    "no_signal": Entry("share of rollout groups whose rewards are all equal", basic=True),
    "group_std": Entry("standard deviation of rewards within a rollout group", basic=True),
    "reward_model_accuracy": Entry("pairs of current rows that the reward model orders right", needs="reward_model"),
    # Lengths.
    "own_tokens": Entry("own tokens of all rows", _TOKENS, basic=True),
    "row_tokens": Entry("own tokens of a row", basic=True),
    "length_quantile": Entry("quantiles over rows of own tokens", ("quantile",)),
    "turns": Entry("turns of a row", basic=True),
    "calls": Entry("completed tool calls of a row", basic=True, needs="tools"),
    "truncated": Entry("share of rows that ran out of slots", basic=True),
    # The policy on its tokens.
    "entropy": Entry("entropy, nats", _TOKENS, basic=True),
    "entropy_after_result": Entry("entropy right after a tool's result, nats", basic=True, needs="tools"),
    "saturation": Entry("norm of the gradient of log pi(token) by the logits", _TOKENS),
    "mass_cut": Entry("probability that top-k and top-p cut off", _TOKENS),
    "kl": Entry("exact KL to the reference, nats", _TOKENS, basic=True, needs="reference"),
    "kl_largest": Entry("the largest token's exact KL to the reference", _TOKENS, needs="reference"),
    "kl_estimate": Entry("KL to the reference by k1, k2, k3", ("stratum", "estimator"), needs="reference"),
    "kl_spread": Entry("the largest of these less the smallest", _TOKENS, needs="reference"),
    "reference_log_probability": Entry("the reference's log-probability of own tokens", _TOKENS, needs="reference"),
    "tool_log_probability": Entry("the reference's log-probability of a tool's tokens", needs="tools"),
    "result_log_probability": Entry(
        "log-probability of a tool's tokens under bigrams counted at the warm start (unfamiliarity)", needs="tools"
    ),
    "update_kl": Entry("exact KL, the rows' policy to the updated one", _TOKENS),
    "greedy_churn": Entry("share of slots whose greedy token the update changed", _TOKENS),
    "high_entropy_share": Entry("squared score on the fifth of tokens with most entropy", _TOKENS),
    # Ratios of the update, and what weighs how much in its gradient.
    "ratio_max": Entry("largest ratio", _UPDATE, needs="ratios"),
    "ratio_quantile": Entry("quantiles of the ratio", (*_UPDATE, "upper_quantile"), needs="ratios"),
    "ratio_ess": Entry("effective sample size of the ratios, a share", _UPDATE, needs="ratios"),
    "clip_fraction": Entry("share of tokens clipped", (*_UPDATE, "side"), basic=True, needs="ratios"),
    "dual_clip_fraction": Entry("share of tokens at the dual clip", basic=True, needs="ratios"),
    "ratio_mean": Entry("mean ratio, over minibatches", basic=True, needs="ratios"),
    "approx_kl": Entry("KL of the old policy from the new one by k3, over minibatches", basic=True, needs="ratios"),
    "kl_loss": Entry("KL to the reference as it is in the loss", basic=True, needs="kl_loss"),
    "weight_cvar": Entry("mean of the top 1% of |d loss / d log pi(token)|", _UPDATE, needs="ratios"),
    "weight_q999": Entry("its 99.9% quantile", _UPDATE, needs="ratios"),
    "weight_top_share": Entry("the share of its sum in the top 1%", _UPDATE, needs="ratios"),
    "weight_tail": Entry("Hill's estimate of its 1 / tail index", _UPDATE, needs="ratios"),
    "weight_ess": Entry("its effective sample size, a share", _UPDATE, needs="ratios"),
    "source_gradient_norm": Entry(
        "norm of the gradient of tokens soon after a result, and of the rest", ("source",), needs="sources"
    ),
    "source_gradient_variance": Entry("variance of these gradients over minibatches", ("source",), needs="sources"),
    # The trainer's log-probabilities against the sampler's.
    "mismatch_kl": Entry("KL of the sampler from the trainer, by k3", _TOKENS, needs="mismatch"),
    "mismatch_chi2": Entry("mean squared ratio of trainer to sampler, less 1", _TOKENS, needs="mismatch"),
    "mismatch_ess": Entry("effective sample size of these ratios, a share", _TOKENS, needs="mismatch"),
    "correction_mean": Entry("mean weight that corrects it", basic=True, needs="correction"),
    "correction_zero": Entry("share of tokens whose weight is zero", basic=True, needs="correction"),
    # The critic.
    "value_loss": Entry("its loss", basic=True, needs="critic"),
    "critic_gradient_norm": Entry("norm of its gradient", basic=True, needs="critic"),
    "value_clip_fraction": Entry("share of tokens whose value loss is clipped", basic=True, needs="critic"),
    "explained_variance": Entry("variance of the critic's targets that values explain", basic=True, needs="critic"),
    "value_bias": Entry("values less the critic's targets", basic=True, needs="critic"),
    "score_explained_variance": Entry(
        "variance of the scores' returns, without KL, that values explain", basic=True, needs="critic"
    ),
    "score_value_bias": Entry("values less the scores' returns, without KL", basic=True, needs="critic"),
    "critic_error": Entry(
        "mean squared error of the updated critic's values, against returns", ("rows",), needs="critic", held_out=True
    ),
    "value_correlation": Entry("values with returns, by own tokens to the row's end", ("distance",), needs="critic"),
    "critic_separation": Entry(
        "value after a right token less after a wrong one", needs="demonstrations", held_out=True
    ),
    "critic_order": Entry("pairs in which the right token's value is higher", needs="demonstrations", held_out=True),
    # Gradients and hidden states.
    "loss": Entry("the objective, over minibatches", basic=True),
    "gradient_norm": Entry("norm of the policy's gradient, a mean over minibatches", basic=True),
    "gradient_norm_spread": Entry("standard deviation over minibatches of its logarithm"),
    "layer_gradient_norm": Entry("gradient norms by layer", ("layer",)),
    "x_grad": Entry("gradient coherence: mean pairwise cosine of minibatch gradients", basic=True),
    "x_mem": Entry("cosine of updates with the first moment", basic=True),
    "x_used": Entry("cosine of gradients as used with what they were undisturbed", basic=True),
    "learning_rate": Entry("as used, disturbed or not", basic=True),
    "clipped_fraction": Entry("share of updates whose gradient was clipped", basic=True),
    "params_norm": Entry("norm of the policy's parameters", basic=True),
    "update_norm": Entry("norm of their change in the iteration", basic=True),
    "effective_rank": Entry("effective rank of hidden states on the rows measured", held_out=True),
    "stable_rank": Entry("their stable rank", held_out=True),
    "representation_drift": Entry("1 - CKA of hidden states with the warm start's, undisturbed", held_out=True),
    # DPO.
    "pair_margin": Entry("implicit reward of chosen less rejected rows", basic=True, needs="pairs"),
    "pair_accuracy": Entry("share of pairs in which it is positive", basic=True, needs="pairs"),
    # Rows to read.
    "shown_token": Entry("tokens of rows measured", ("shown", "slot"), held_out=True, dtype="int32", monitored=False),
    "shown_role": Entry("who wrote them", ("shown", "slot"), held_out=True, dtype="int8", monitored=False),
    "shown_log_probability": Entry("own tokens' log-probability", ("shown", "slot"), held_out=True, monitored=False),
    "shown_reward": Entry("the rows' gold reward", ("shown",), held_out=True, monitored=False),
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
      split: whether held-out rows have prompts of their own; else labels call them fixed.
      words: a legible name for each token; () for numbers.
    """

    members: int
    slots: int
    parts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    shown: int = 2
    every: int = 1
    split: bool = True
    words: tuple[str, ...] = ()


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
    labels = _labels(telemetry, "tools" in features, extent)
    words = {"shown_token": extent.words, "shown_role": ROLES}
    found = {}
    for name, entry in TABLE.items():
        wanted = (telemetry == "full" or entry.basic) and (not entry.needs or entry.needs in features)
        if wanted and all(labels[dim] for dim in entry.dims):
            dims = tuple((dim, tuple(labels[dim])) for dim in entry.dims)
            every = extent.every if entry.held_out else 1
            found[name] = Channel(dims, entry.dtype, every, entry.monitored, words.get(name, ()))
    return found


def _labels(telemetry: str, tools: bool, extent: Extent) -> dict[str, Sequence[str]]:
    return {
        "stratum": STRATA if tools else STRATA[:1],
        "moment": MOMENTS if telemetry == "full" else MOMENTS[:1],
        "estimator": ESTIMATORS,
        "upper_quantile": ("q99", "q999"),
        "quantile": ("q10", "q50", "q90"),
        "side": ("low", "high"),
        "source": SOURCES,
        "distance": DISTANCE_LABELS,
        "rows": ("collected", "held_out" if extent.split else "fixed_prompts"),
        "k": [str(k) for k in powers_of_two(extent.members)],
        "part": sorted(extent.parts),
        "layer": extent.layers,
        "shown": [str(row) for row in range(extent.shown)],
        "slot": [str(slot) for slot in range(extent.slots)],
    }


def channels_of(dialogue: Dialogue, settings: DialogueSettings, policy: Network) -> dict[str, Channel]:
    """What is known of the telemetry before it is measured."""
    parts = parts_of(dialogue)
    extent = Extent(
        members=settings.group_size,
        slots=dialogue.length,
        parts=parts,
        layers=groups_of(jax.eval_shape(policy.init, jax.random.key(0))),
        shown=min(SHOWN_ROWS, settings.performance_rows),
        every=settings.performance_every,
        split=dialogue.splits,
        words=dialogue.words,
    )
    return channels(settings.telemetry, features_of(dialogue, settings, bool(parts)), extent)


def features_of(dialogue: Dialogue, settings: DialogueSettings, parts: bool) -> list[str]:
    """Returns those of `channels.FEATURES` that a run has; `parts` says whether the reward has any beside gold."""
    objective, policy = settings.parts, settings.objective == "policy"
    had = {
        "tools": bool(dialogue.result_tokens),
        "parts": parts,
        "reference": objective.needs_reference or settings.telemetry == "full",
        "ratios": policy,
        "correction": policy and objective.correction != "none",
        "critic": objective.critic,
        "demonstrations": objective.critic and has_demonstrations(dialogue),
        "reward_model": settings.reward == "learned",
        "pairs": not policy,
        "mismatch": policy or settings.online,
        "sources": policy and bool(dialogue.result_tokens),
        "kl_loss": policy and objective.kl_in_loss,
        "changes": has_changes(dialogue),
    }
    return [name for name, there in had.items() if there]


def parts_of(dialogue: Dialogue) -> tuple[str, ...]:
    """Names of what the verifier tells beside the gold reward."""

    def rewarded(key: jax.Array, data: object) -> dict[str, jax.Array]:
        bound = dialogue.bind(data)
        return bound.reward(bound.reset(key, jnp.float32(dialogue.difficulty))[0])

    return tuple(sorted(jax.eval_shape(rewarded, jax.random.key(0), dialogue.data).keys() - {GOLD}))


def before_the_first(channels: Mapping[str, Channel], success: jax.Array) -> tuple[LastSeen, LastSeen]:
    """What channels of rows and updates, and those of held-out rows, say before the first step: a policy's success."""
    told, measured = (
        LastSeen.zeros({name: one.shape for name, one in channels.items() if TABLE[name].held_out == held_out})
        for held_out in (False, True)
    )
    return told, LastSeen(measured.values | {PERFORMANCE: success})
