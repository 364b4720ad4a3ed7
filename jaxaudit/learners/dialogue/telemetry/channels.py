"""The table of all telemetry channels of dialogue learners: names, dimensions, and when a run has them."""

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
from jaxaudit.learners.dialogue.telemetry.token_statistics import SOURCES, STRATA, LastValues
from jaxaudit.runtime.paths import groups_of

MOMENTS = ("visited", "after")
"""Moments of ratios: all minibatches as visited, and all rows after the last update; only "full" telemetry has both."""


@dataclass(frozen=True)
class Entry:
    """A channel in the table.

    Attributes:
      description: what the channel is.
      dims: names of its dimensions.
      basic: whether "basic" telemetry has it.
      needs: the feature of `run_features` that it depends on; "" if every run has it.
      held_out: whether it is measured on held-out rows, at the cadence of the performance.
      dtype: the dtype it is stored in.
      monitored: whether monitors read it by default.
    """

    description: str
    dims: tuple[str, ...] = ()
    basic: bool = False
    needs: str = ""
    held_out: bool = False
    dtype: str = "float32"
    monitored: bool = True


_TOKENS = ("stratum",)
_UPDATE = ("stratum", "moment")

TABLE: dict[str, Entry] = {
    # Success without perturbations on held-out prompts, or on fixed ones if the dialogue is not split.
    PERFORMANCE: Entry("gold reward of sampled rows on held-out or fixed prompts", basic=True, held_out=True),
    PERFORMANCE_ERROR: Entry("standard error of the performance over rows", basic=True, held_out=True),
    "greedy_success": Entry("gold reward of greedy rows on the same prompts", held_out=True),
    "changed_prompt_success": Entry(
        "gold reward where one token of the prompt is replaced, by the changed prompt", needs="changes", held_out=True
    ),
    "warm_start_success": Entry("success of sampled rows at the end of the warm start", basic=True),
    # Rewards of the rows trained on.
    ACTING: Entry("gold reward of all rows sampled for training", basic=True),
    "proxy": Entry("reward that the learner receives", basic=True),
    "reward_gap": Entry(
        "proxy minus gold reward; with a learned reward each in standard deviations above the warm start's mean",
        basic=True,
    ),
    "reward_part": Entry("parts of the gold reward", ("part",), needs="parts"),
    "success": Entry("share of rows that succeed", basic=True),
    "pass_at": Entry("share of prompts that one of k rows solves", ("k",)),
    "no_signal": Entry("share of rollout groups whose rewards are all equal", basic=True),
    "group_std": Entry("standard deviation of rewards within a rollout group", basic=True),
    "reward_model_accuracy": Entry("pairs of current rows that the reward model orders right", needs="reward_model"),
    # Lengths.
    "own_tokens": Entry("response tokens of all rows", _TOKENS, basic=True),
    "row_tokens": Entry("response tokens of a row", basic=True),
    "length_quantile": Entry("quantiles over rows of response tokens", ("quantile",)),
    "turns": Entry("turns of a row", basic=True),
    "calls": Entry("completed tool calls of a row", basic=True, needs="tools"),
    "truncated": Entry("share of rows that ran out of slots", basic=True),
    # The policy on its tokens.
    "entropy": Entry("entropy, nats", _TOKENS, basic=True),
    "entropy_after_result": Entry("entropy of the token right after a tool's result, nats", basic=True, needs="tools"),
    "saturation": Entry("norm of the gradient of log pi(token) by the logits", _TOKENS),
    "mass_cut": Entry("probability that top-k and top-p cut off", _TOKENS),
    "kl": Entry("exact KL to the reference, nats", _TOKENS, basic=True, needs="reference"),
    "kl_largest": Entry("the largest token's exact KL to the reference", _TOKENS, needs="reference"),
    "kl_estimate": Entry("KL to the reference by k1, k2, k3", ("stratum", "estimator"), needs="reference"),
    "kl_spread": Entry("the largest of these estimates minus the smallest", _TOKENS, needs="reference"),
    "reference_log_probability": Entry(
        "the reference's log-probability of response tokens", _TOKENS, needs="reference"
    ),
    "tool_log_probability": Entry("the reference's log-probability of a tool's tokens", needs="tools"),
    "result_log_probability": Entry(
        "log-probability of a tool's tokens under bigrams counted at the warm start (unfamiliarity)", needs="tools"
    ),
    "update_kl": Entry("exact KL(policy before the update || policy after)", _TOKENS),
    "greedy_churn": Entry("share of slots whose greedy token the update changed", _TOKENS),
    "high_entropy_share": Entry("squared score on the fifth of tokens with most entropy", _TOKENS),
    # Ratios of the update, and the weights of tokens in its gradient.
    "ratio_max": Entry("largest ratio", _UPDATE, needs="ratios"),
    "ratio_quantile": Entry("quantiles of the ratio", (*_UPDATE, "upper_quantile"), needs="ratios"),
    "ratio_ess": Entry("effective sample size of the ratios, a share", _UPDATE, needs="ratios"),
    "clip_fraction": Entry("share of tokens clipped", (*_UPDATE, "side"), basic=True, needs="ratios"),
    "dual_clip_fraction": Entry("share of tokens at the dual clip", basic=True, needs="ratios"),
    "ratio_mean": Entry("mean ratio, over minibatches", basic=True, needs="ratios"),
    "approx_kl": Entry("KL of the old policy from the new one by k3, over minibatches", basic=True, needs="ratios"),
    "kl_loss": Entry("KL to the reference in the loss", basic=True, needs="kl_loss"),
    "weight_cvar": Entry("mean of the top 1% of |d loss / d log pi(token)|", _UPDATE, needs="ratios"),
    "weight_q999": Entry("99.9% quantile of |d loss / d log pi(token)|", _UPDATE, needs="ratios"),
    "weight_top_share": Entry("share of the sum of these weights in the top 1%", _UPDATE, needs="ratios"),
    "weight_tail": Entry("Hill's estimate of the weights' 1 / tail index", _UPDATE, needs="ratios"),
    "weight_ess": Entry("effective sample size of the weights, a share", _UPDATE, needs="ratios"),
    "source_gradient_norm": Entry(
        "norm of the gradient of tokens soon after a result, and of the rest", ("source",), needs="sources"
    ),
    "source_gradient_variance": Entry("variance of these gradients over minibatches", ("source",), needs="sources"),
    # The trainer's log-probabilities against the sampler's.
    "mismatch_kl": Entry("KL of the sampler from the trainer, by k3", _TOKENS, needs="mismatch"),
    "mismatch_chi2": Entry("mean squared ratio of trainer to sampler, minus 1", _TOKENS, needs="mismatch"),
    "mismatch_ess": Entry("effective sample size of these ratios, a share", _TOKENS, needs="mismatch"),
    "correction_mean": Entry("mean importance weight", basic=True, needs="correction"),
    "correction_zero": Entry("share of tokens whose importance weight is zero", basic=True, needs="correction"),
    # The critic.
    "value_loss": Entry("loss of the critic", basic=True, needs="critic"),
    "critic_gradient_norm": Entry("norm of the critic's gradient", basic=True, needs="critic"),
    "value_clip_fraction": Entry("share of tokens whose value loss is clipped", basic=True, needs="critic"),
    "explained_variance": Entry("variance of the critic's targets that values explain", basic=True, needs="critic"),
    "value_bias": Entry("values minus the critic's targets", basic=True, needs="critic"),
    "score_explained_variance": Entry(
        "variance of the returns of scores, without KL, that values explain", basic=True, needs="critic"
    ),
    "score_value_bias": Entry("values minus the returns of scores, without KL", basic=True, needs="critic"),
    "critic_error": Entry(
        "mean squared error of the updated critic's values, against returns", ("rows",), needs="critic", held_out=True
    ),
    "value_correlation": Entry(
        "correlation of values and returns, by response tokens to the row's end", ("distance",), needs="critic"
    ),
    "critic_separation": Entry(
        "value after a right token minus value after a wrong one", needs="demonstrations", held_out=True
    ),
    "critic_order": Entry("pairs in which the right token's value is higher", needs="demonstrations", held_out=True),
    # Gradients and hidden states.
    "loss": Entry("the objective, over minibatches", basic=True),
    "gradient_norm": Entry("norm of the policy's gradient, a mean over minibatches", basic=True),
    "gradient_norm_spread": Entry("standard deviation over minibatches of the norm's logarithm"),
    "layer_gradient_norm": Entry("gradient norms by layer", ("layer",)),
    "x_grad": Entry("gradient coherence: mean pairwise cosine of minibatch gradients", basic=True),
    "x_mem": Entry("cosine of updates with the first moment", basic=True),
    "x_used": Entry("cosine of gradients as used with undisturbed gradients", basic=True),
    "learning_rate": Entry("learning rate as used, disturbed or not", basic=True),
    "clipped_fraction": Entry("share of updates whose gradient was clipped", basic=True),
    "params_norm": Entry("norm of the policy's parameters", basic=True),
    "update_norm": Entry("norm of the parameters' change in the iteration", basic=True),
    "effective_rank": Entry("effective rank of hidden states on the rows measured", held_out=True),
    "stable_rank": Entry("stable rank of hidden states on the rows measured", held_out=True),
    "representation_drift": Entry("1 - linear CKA of hidden states with those of the initial policy", held_out=True),
    # DPO.
    "pair_margin": Entry("implicit reward of chosen minus rejected rows", basic=True, needs="pairs"),
    "pair_accuracy": Entry("share of pairs whose margin is positive", basic=True, needs="pairs"),
    # Rows to read.
    "shown_token": Entry("tokens of held-out rows", ("shown", "slot"), held_out=True, dtype="int32", monitored=False),
    "shown_role": Entry("who wrote each token", ("shown", "slot"), held_out=True, dtype="int8", monitored=False),
    "shown_log_probability": Entry(
        "log-probability of response tokens", ("shown", "slot"), held_out=True, monitored=False
    ),
    "shown_reward": Entry("gold reward of these rows", ("shown",), held_out=True, monitored=False),
}


@dataclass(frozen=True)
class RunDimensions:
    """Lengths and labels of the dimensions that depend on a run.

    Attributes:
      group_size: G, rows per prompt.
      slots: T, slots per row.
      parts: names of the parts of the gold reward.
      layers: names of the groups of parameters in `layer_gradient_norm`.
      shown: number of held-out rows whose tokens are stored.
      every: steps between two measurements on held-out rows.
      split: whether held-out rows have prompts that are never trained on; otherwise labels call them fixed.
      token_names: a readable name for each token; () to show numbers.
    """

    group_size: int
    slots: int
    parts: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    shown: int = 2
    every: int = 1
    split: bool = True
    token_names: tuple[str, ...] = ()


def channels(telemetry: str, features: Collection[str], dimensions: RunDimensions) -> dict[str, Channel]:
    """Returns the channels of a run in the table's order, without those that have an empty dimension.

    Args:
      telemetry: "basic" or "full".
      features: the features that the run has, as returned by `run_features`.
      dimensions: lengths and labels of its dimensions.
    """
    labels = _dimension_labels(telemetry, "tools" in features, dimensions)
    value_names = {"shown_token": dimensions.token_names, "shown_role": ROLES}
    chosen = {}
    for name, entry in TABLE.items():
        included = (telemetry == "full" or entry.basic) and (not entry.needs or entry.needs in features)
        if included and all(labels[dim] for dim in entry.dims):
            dims = tuple((dim, tuple(labels[dim])) for dim in entry.dims)
            every = dimensions.every if entry.held_out else 1
            chosen[name] = Channel(dims, entry.dtype, every, entry.monitored, value_names.get(name, ()))
    return chosen


def _dimension_labels(telemetry: str, tools: bool, dimensions: RunDimensions) -> dict[str, Sequence[str]]:
    return {
        "stratum": STRATA if tools else STRATA[:1],
        "moment": MOMENTS if telemetry == "full" else MOMENTS[:1],
        "estimator": ESTIMATORS,
        "upper_quantile": ("q99", "q999"),
        "quantile": ("q10", "q50", "q90"),
        "side": ("low", "high"),
        "source": SOURCES,
        "distance": DISTANCE_LABELS,
        "rows": ("collected", "held_out" if dimensions.split else "fixed_prompts"),
        "k": [str(k) for k in powers_of_two(dimensions.group_size)],
        "part": sorted(dimensions.parts),
        "layer": dimensions.layers,
        "shown": [str(row) for row in range(dimensions.shown)],
        "slot": [str(slot) for slot in range(dimensions.slots)],
    }


def run_channels(dialogue: Dialogue, settings: DialogueSettings, policy: Network) -> dict[str, Channel]:
    """Returns the channels of a learner on a dialogue."""
    parts = reward_parts(dialogue)
    dimensions = RunDimensions(
        group_size=settings.group_size,
        slots=dialogue.length,
        parts=parts,
        layers=groups_of(jax.eval_shape(policy.init, jax.random.key(0))),
        shown=min(SHOWN_ROWS, settings.performance_rows),
        every=settings.performance_every,
        split=dialogue.splits,
        token_names=dialogue.words,
    )
    return channels(settings.telemetry, run_features(dialogue, settings, bool(parts)), dimensions)


def run_features(dialogue: Dialogue, settings: DialogueSettings, has_parts: bool) -> list[str]:
    """Returns the features of a run that some channels depend on.

    `has_parts` says whether the reward has parts beside gold.
    """
    config, has_ratios = settings.objective_config, settings.objective == "policy"
    features = {
        "tools": bool(dialogue.result_tokens),
        "parts": has_parts,
        "reference": config.needs_reference or settings.telemetry == "full",
        "ratios": has_ratios,
        "correction": has_ratios and config.correction != "none",  # of ratios, by importance weights
        "critic": config.critic,
        "demonstrations": config.critic and has_demonstrations(dialogue),  # on which the critic is tested
        "reward_model": settings.reward == "learned",
        "pairs": not has_ratios,  # of DPO
        "mismatch": has_ratios or settings.online,  # of sampled and recomputed log-probabilities
        "sources": has_ratios and bool(dialogue.result_tokens),  # of the tokens before a ratio
        "kl_loss": has_ratios and config.kl_in_loss,
        "changes": has_changes(dialogue),  # of prompts
    }
    return [name for name, present in features.items() if present]


def reward_parts(dialogue: Dialogue) -> tuple[str, ...]:
    """Returns the names of the verifier's rewards beside gold."""

    def rewards(key: jax.Array, data: object) -> dict[str, jax.Array]:
        bound = dialogue.bind(data)
        return bound.reward(bound.reset(key, jnp.float32(dialogue.difficulty))[0])

    return tuple(sorted(jax.eval_shape(rewards, jax.random.key(0), dialogue.data).keys() - {GOLD}))


def initial_values(channels: Mapping[str, Channel], success: jax.Array) -> tuple[LastValues, LastValues]:
    """Returns the values before the first step of the channels of rows and updates, and of those of held-out rows.

    They are zeros, but for the performance, which is the initial policy's `success`.
    """
    trained, held_out = (
        LastValues.zeros({name: x.shape for name, x in channels.items() if TABLE[name].held_out == is_held_out})
        for is_held_out in (False, True)
    )
    return trained, LastValues(held_out.values | {PERFORMANCE: success})
