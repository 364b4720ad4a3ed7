"""A reference for an iteration of the dialogue learners, in NumPy and float64, without any of the library's code.

Its inputs are the sampled rows, the uniform numbers they were sampled with, the order of the minibatches, and
parameters. Everything else is computed here, from the transformer to the parameters after an update, as a series of
named values, so that a comparison finds the first value that differs. Gradients are not computed: `directional_slopes`
are finite differences of the loss.

Parameters are flat, arrays by path: "h/attn/c_attn/kernel" `[depth, width, 3 width]`, "wte/embedding". Settings are any
object with the attributes of `DialogueSettings`, with the values that apply: where a perturbation changes a setting,
its changed value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

POLICY, PROMPT, TOOL = range(3)
ALPHA = 16.0
"""The change by adapters is multiplied by this, and divided by their rank."""

Params = dict[str, np.ndarray]


# The transformer.


def merge_adapters(params: Params, base: Params | None) -> Params:
    """Returns parameters with the adapters added to the base's kernels, or unchanged without a base."""
    if base is None:
        return params
    merged = base | {path: value for path, value in params.items() if path.startswith("head/")}
    for path, a in params.items():
        if path.endswith("/a"):
            b = params[path.removesuffix("a") + "b"]
            kernel = path.removesuffix("a") + "kernel"
            merged[kernel] = base[kernel] + ALPHA / a.shape[-1] * a @ b
    return merged


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Applies layer normalization."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def gelu(x: np.ndarray) -> np.ndarray:
    """Applies GELU in its approximation by a hyperbolic tangent, as in GPT-2."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Applies the softmax over the last axis."""
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Applies the log-softmax over the last axis."""
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def hidden_states(params: Params, rows: TokenRows, heads: int) -> np.ndarray:
    """Returns the final hidden state of each slot, which depends on the token of this slot: `[N, T, width]`."""
    count, slots = rows.tokens.shape
    x = params["wte/embedding"][rows.tokens] + params["wpe/embedding"][rows.position]
    positions = np.arange(slots)
    visible = (positions <= positions[:, None]) & (positions >= rows.first[:, :, None])  # [N, queries, keys]
    depth = len(params["h/ln_1/scale"])
    for layer in range(depth):
        layer_params = {
            path.removeprefix("h/"): value[layer] for path, value in params.items() if path.startswith("h/")
        }
        qkv = (
            layer_norm(x, layer_params["ln_1/scale"], layer_params["ln_1/bias"]) @ layer_params["attn/c_attn/kernel"]
            + layer_params["attn/c_attn/bias"]
        )
        query, key, value = (part.reshape(count, slots, heads, -1) for part in np.split(qkv, 3, axis=-1))
        scores = np.einsum("nqhd,nkhd->nhqk", query, key) / np.sqrt(query.shape[-1])
        attention = softmax(np.where(visible[:, None], scores, -np.inf))
        mixed = np.einsum("nhqk,nkhd->nqhd", attention, value).reshape(x.shape)
        x = x + mixed @ layer_params["attn/c_proj/kernel"] + layer_params["attn/c_proj/bias"]
        mlp_hidden = (
            layer_norm(x, layer_params["ln_2/scale"], layer_params["ln_2/bias"]) @ layer_params["mlp/c_fc/kernel"]
            + layer_params["mlp/c_fc/bias"]
        )
        x = x + gelu(mlp_hidden) @ layer_params["mlp/c_proj/kernel"] + layer_params["mlp/c_proj/bias"]
    return layer_norm(x, params["ln_f/scale"], params["ln_f/bias"])


def logits(params: Params, rows: TokenRows, heads: int) -> np.ndarray:
    """Returns the logits that each slot's token is sampled by, `[N, T, V]`, with zeros at the first slot."""
    outputs = hidden_states(params, rows, heads)[:, :-1] @ params["wte/embedding"].T
    return np.pad(outputs, ((0, 0), (1, 0), (0, 0)))


def head_values(params: Params, rows: TokenRows, heads: int) -> np.ndarray:
    """Returns the head's value of each hidden state, `[N, T]`."""
    return hidden_states(params, rows, heads) @ params["head/kernel"] + params["head/bias"]


# Rows.


@dataclass
class TokenRows:
    """Rows of tokens: arrays `[N, T]`, where `truncated` and each of `rewards` are `[N]`."""

    tokens: np.ndarray
    role: np.ndarray
    position: np.ndarray
    first: np.ndarray
    truncated: np.ndarray
    rewards: dict[str, np.ndarray]

    @property
    def policy_mask(self) -> np.ndarray:
        """Whether the policy wrote a token."""
        return self.role == POLICY

    def select(self, index: np.ndarray) -> TokenRows:
        """Returns the rows at an index."""
        arrays = {name: getattr(self, name)[index] for name in ("tokens", "role", "position", "first", "truncated")}
        return TokenRows(**arrays, rewards={name: reward[index] for name, reward in self.rewards.items()})


def gather_tokens(logs: np.ndarray, rows: TokenRows) -> np.ndarray:
    """Returns the entries `[N, T]` of the rows' tokens in `[N, T, V]`."""
    return np.take_along_axis(logs, rows.tokens[..., None], -1)[..., 0]


def entropy(logs: np.ndarray) -> np.ndarray:
    """Returns the entropy of log-probabilities over the last axis."""
    return -np.sum(np.exp(logs) * logs, -1)


def reward_model_scores(params: Params, rows: TokenRows, heads: int) -> np.ndarray:
    """Returns a reward model's score of each row at its last token of the policy, `[N]`, or 0 without such a token."""
    values = head_values(params, rows, heads)
    return np.array(
        [
            values[n, np.flatnonzero(policy_mask)[-1]] if policy_mask.any() else 0.0
            for n, policy_mask in enumerate(rows.policy_mask)
        ]
    )


@dataclass
class TokenChoice:
    """How each token of the policy was sampled, `[N, T]`.

    Attributes:
      token: The token that the uniform number selects.
      cut: The probability mass that top-k and top-p removed.
      margin: The distance of the number, or of top-p's threshold, from where another token would be selected.
    """

    token: np.ndarray
    cut: np.ndarray
    margin: np.ndarray


def sample_tokens(scores: np.ndarray, uniform: np.ndarray, top_k: int, top_p: float) -> TokenChoice:
    """Samples tokens by logits `[N, T, V]` that are divided by the temperature, and uniform numbers `[N, T]`."""
    choice = TokenChoice(*(np.zeros(uniform.shape, dtype) for dtype in (int, float, float)))
    for position in np.ndindex(*uniform.shape):
        probs, order = softmax(scores[position]), np.argsort(-scores[position])
        candidates = order[:top_k] if top_k else order
        # The mass of each candidate and those less likely.
        mass = np.cumsum(probs[candidates[::-1]] / probs[candidates].sum())[::-1]
        kept = (mass > 1 - top_p) | (top_p >= 1)
        kept[0] = True
        threshold = np.abs(mass - (1 - top_p)).min()
        kept = np.isin(np.arange(len(probs)), candidates[kept])
        cumulative = np.cumsum(np.where(kept, probs, 0)) / probs[kept].sum()
        choice.token[position] = np.argmax(cumulative > uniform[position])
        choice.cut[position] = probs[~kept].sum()
        choice.margin[position] = min(np.abs(cumulative - uniform[position]).min(), threshold)
    return choice


# From rows to the training data.


def overlong_penalty(settings: Any, dialogue: Any, rows: TokenRows) -> np.ndarray:
    """Returns the penalty on long rows, from 0 to -1, `[N]`. It counts all slots after the row's first prompt."""
    penalties = []
    for role in rows.role:
        prompt = np.argmax(role != PROMPT)
        length, longest = np.sum(role[prompt:] <= TOOL), dialogue.length - prompt
        buffer = settings.overlong_buffer * longest
        penalties.append(-np.clip((length - (longest - buffer)) / buffer, 0, 1))
    return np.array(penalties)


def has_signal(scores: np.ndarray, kept: np.ndarray) -> bool:
    """Returns whether the kept scores of a group differ."""
    return len(set(scores[kept])) > 1


def select_rows(settings: Any, reward: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the index of the rows that are trained on, and whether each counts in the loss."""
    size = settings.group_size
    groups = [np.arange(begin, begin + size) for begin in range(0, len(reward), size)]
    signal = [has_signal(reward[group], kept[group]) for group in groups]
    order = list(range(len(groups)))
    if settings.oversampling > 1:
        order = [g for g in order if signal[g]] + [g for g in order if not signal[g]]
    index, counts = [], []
    for g in order[: settings.prompts]:
        group = groups[g]
        if settings.objective == "preference":
            valid = group[kept[group]] if kept[group].any() else group[:1]
            index += [valid[np.argmax(reward[valid])], valid[np.argmin(reward[valid])]]
            counts += [signal[g]] * 2
        else:
            index += list(group)
            counts += list(kept[group] & (signal[g] or settings.oversampling == 1))
    return np.array(index), np.array(counts)


def kl_estimate(estimator: str, new: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Returns estimates of the KL divergence from a reference, by the log-probabilities of the rows' tokens."""
    gap = reference - new
    return {"k1": -gap, "k2": gap**2 / 2, "k3": np.exp(gap) - 1 - gap}[estimator]


def token_rewards(settings: Any, score, policy_mask, penalty) -> np.ndarray:
    """Returns the rewards of the policy's tokens, `[N, T]`: minus the KL penalty, and at the end the row's score."""
    rewards = np.where(policy_mask, -settings.kl_coefficient * penalty, 0.0)
    for n, row_mask in enumerate(policy_mask):
        rewards[n, np.flatnonzero(row_mask)[-1:]] += score[n]
    return rewards


def returns(reward: np.ndarray, policy_mask: np.ndarray, gamma: float) -> np.ndarray:
    """Returns the discounted sum of rewards from each token of the policy on, `[N, T]`.

    Only tokens of the policy discount.
    """
    discounted = np.zeros(policy_mask.shape)
    for n, row_mask in enumerate(policy_mask):
        slots = np.flatnonzero(row_mask)
        for i, slot in enumerate(slots):
            discounted[n, slot] = np.sum(gamma ** np.arange(len(slots) - i) * reward[n, slots[i:]])
    return discounted


def critic_advantages(settings: Any, reward, policy_mask, value) -> tuple[np.ndarray, np.ndarray]:
    """Returns GAE's advantages and the critic's targets, `[N, T]`, over the policy's tokens of each row."""
    errors = np.zeros(policy_mask.shape)
    for n, row_mask in enumerate(policy_mask):
        slots = np.flatnonzero(row_mask)
        values = np.append(value[n, slots], 0.0)
        errors[n, slots] = reward[n, slots] + settings.gamma * values[1:] - values[:-1]
    advantage = returns(errors, policy_mask, settings.gamma * settings.gae_lambda)
    target = returns(errors, policy_mask, settings.gamma * settings.critic_lambda)
    return advantage, np.where(policy_mask, target + value, 0.0)


def group_advantages(settings: Any, score: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """Returns the advantage of each row, `[N]`, relative to the others of its group."""
    advantages = np.zeros(len(score))
    for begin in range(0, len(score), settings.group_size):
        members = begin + np.flatnonzero(kept[begin : begin + settings.group_size])
        x = score[members]
        if len(set(x)) < 2:
            continue
        if settings.advantage == "leave_one_out":
            advantages[members] = [x[i] - np.delete(x, i).mean() for i in range(len(x))]
        else:
            advantages[members] = (x - x.mean()) / (
                x.std(ddof=1) + settings.std_epsilon if settings.advantage == "group" else 1
            )
    return advantages


def advantages(settings: Any, score, policy_mask, kept, value, penalty) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns the advantage of each token and, with a critic, its targets, `[N, T]`."""
    if settings.advantage == "gae":
        advantage, target = critic_advantages(
            settings, token_rewards(settings, score, policy_mask, penalty), policy_mask, value
        )
        if settings.whiten:
            mean, variance = advantage[policy_mask].mean(), advantage[policy_mask].var(ddof=1)
            advantage = np.where(policy_mask, (advantage - mean) / np.sqrt(variance + 1e-8), 0.0)
        return advantage, target
    score = score - settings.kl_coefficient * np.sum(np.where(policy_mask, penalty, 0.0), -1)
    return np.where(policy_mask, group_advantages(settings, score, kept)[:, None], 0.0), None


@dataclass
class Models:
    """Flat parameters by use. The rows were sampled with `sampler`."""

    policy: Params
    reference: Params
    sampler: Params
    critic: Params | None = None
    reward_model: Params | None = None
    base: Params | None = None

    def __post_init__(self):
        for name in ("policy", "reference", "sampler", "critic", "reward_model"):
            if getattr(self, name) is not None:
                setattr(self, name, merge_adapters(getattr(self, name), self.base))


@dataclass
class Disturbances:
    """What perturbations add to the sampler's log-probabilities `[N, T]` and to the rewards `[N]`."""

    log_probability: Any = 0.0
    reward: Any = 0.0


def prepare_training_data(
    settings: Any,
    dialogue: Any,
    heads: int,
    models: Models,
    rows: TokenRows,
    uniform: np.ndarray,
    disturbances: Disturbances,
    selection_rewards: np.ndarray | None = None,
) -> dict[str, Any]:
    """Returns the training data by name, in the order of computation.

    Rows are selected by `selection_rewards`, the learner's rewards, which differ from the reference's only in rounding.
    Equal rewards must be equal in both: two rows with the same last chunk have the same score.

    Values of tokens mean nothing in rows without a token of the policy. Names that begin with "all " cover all sampled
    rows.
    """
    rollout_logits = logits(models.sampler, rows, heads) / settings.temperature
    logs = log_softmax(rollout_logits)
    rollout_log_prob = np.where(rows.policy_mask, gather_tokens(logs, rows), 0.0)
    choice = sample_tokens(rollout_logits, uniform, settings.top_k, settings.top_p)
    values: dict[str, Any] = {
        "all sampler's log-probability": rollout_log_prob,
        "all sampler's entropy": entropy(logs),
        "all mass cut": choice.cut,
        "all certain": choice.margin > 1e-5,
        "all sampled tokens": np.where(choice.margin > 1e-5, choice.token, rows.tokens),
    }
    gold = rows.rewards["gold"]
    undisturbed_rewards = gold if settings.reward == "gold" else reward_model_scores(models.reward_model, rows, heads)
    reward = undisturbed_rewards + disturbances.reward
    kept = ~rows.truncated if settings.mask_truncated else np.ones_like(rows.truncated)
    values |= {"all scores": undisturbed_rewards, "all reward": reward, "all kept": kept}
    score = reward
    if settings.overlong_buffer:
        score = reward + settings.overlong_coefficient * overlong_penalty(settings, dialogue, rows)
    index, kept = select_rows(settings, reward if selection_rewards is None else selection_rewards, kept)
    rows, score, rollout_log_prob = (
        rows.select(index),
        score[index],
        (rollout_log_prob + disturbances.log_probability)[index],
    )
    policy_mask = rows.policy_mask & kept[:, None]
    values |= {"index": index, "tokens": rows.tokens, "first": rows.first, "score": score, "policy_mask": policy_mask}
    policy_log_probs, ref_log_probs = (
        log_softmax(logits(x, rows, heads) / settings.temperature) for x in (models.policy, models.reference)
    )
    new_log_prob, ref_log_prob = gather_tokens(policy_log_probs, rows), gather_tokens(ref_log_probs, rows)
    values |= {
        "recomputed": new_log_prob,
        "entropy": entropy(policy_log_probs),
        "sampled": rollout_log_prob,
        "reference": ref_log_prob,
    }
    values["old"] = rollout_log_prob if settings.old_log_probability == "sampled" else new_log_prob
    values["value"] = None
    if models.critic is not None:
        values["value"] = np.pad(head_values(models.critic, rows, heads)[:, :-1], ((0, 0), (1, 0)))
    if settings.objective == "policy":
        in_reward = settings.kl != "none" and settings.kl_in == "reward"
        penalty = kl_estimate(settings.kl, new_log_prob, ref_log_prob) if in_reward else np.zeros(policy_mask.shape)
        values["returns"] = returns(token_rewards(settings, score, policy_mask, penalty), policy_mask, settings.gamma)
        values["advantage"], values["target"] = advantages(settings, score, policy_mask, kept, values["value"], penalty)
    return values | {"rows": rows, "reference logs": ref_log_probs}


# The loss of a minibatch.


@dataclass
class Minibatch:
    """The data that a minibatch's loss depends on.

    Attributes:
      rows: The rows.
      policy_mask: The policy's tokens in rows that count, bool `[N, T]`.
      share: The iteration's number of the policy's tokens, divided by the number of minibatches.
      longest: The largest number of the policy's tokens in a row.
      old, advantage, sampled, reference, value, target: `[N, T]`, or None if the objective does not use them.
      reference_logs: `[N, T, V]`.
    """

    rows: TokenRows
    policy_mask: np.ndarray
    share: float
    longest: int
    old: Any
    advantage: Any
    sampled: Any
    reference: Any
    value: Any
    target: Any
    reference_logs: Any


def minibatch(settings: Any, dialogue: Any, data: dict[str, Any], index: np.ndarray) -> Minibatch:
    """Selects the minibatch with the rows at an index from what `prepare_training_data` returned."""
    names = ("policy_mask", "old", "advantage", "sampled", "reference", "value", "target")
    selected = {name: data[name][index] if data.get(name) is not None else None for name in names}
    return Minibatch(
        rows=data["rows"].select(index),
        share=data["policy_mask"].sum() / settings.minibatches,
        longest=dialogue.length - dialogue.prompt_length,
        reference_logs=data["reference logs"][index],
        **selected,
    )


def surrogate(settings: Any, ratio: np.ndarray, advantage: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns PPO's objective with dual clipping, and where each bound is active."""
    clipped = np.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    objective = np.minimum(ratio * advantage, clipped * advantage)
    with np.errstate(invalid="ignore"):  # infinity times zero, at tokens outside the mask
        objective = np.where(advantage < 0, np.maximum(objective, settings.dual_clip * advantage), objective)
    return objective, {
        "clip_low": (advantage < 0) & (ratio < 1 - settings.clip_low),
        "clip_high": (advantage > 0) & (ratio > 1 + settings.clip_high),
        "clip_dual": (advantage < 0) & (ratio > settings.dual_clip),
    }


def importance_weights(settings: Any, log_weight: np.ndarray, policy_mask: np.ndarray) -> np.ndarray:
    """Returns the importance weights from the sampler to the trainer, `[N, T]`."""
    log_weight = np.where(policy_mask, log_weight, 0.0)
    total = log_weight.sum(-1, keepdims=True)
    by_level = {"token": log_weight, "sequence": total, "geometric": log_weight}
    weight = np.broadcast_to(np.exp(by_level[settings.correction_level]), policy_mask.shape)
    if settings.correction == "tis":
        return np.minimum(weight, settings.tis_cap)
    bounded_weight = weight
    if settings.correction_level == "geometric":
        bounded_weight = np.exp(total / np.maximum(policy_mask.sum(-1, keepdims=True), 1))
    return np.where((bounded_weight >= settings.mis_low) & (bounded_weight <= settings.mis_high), weight, 0.0)


def aggregate_loss(settings: Any, x: np.ndarray, batch: Minibatch) -> float:
    """Aggregates the losses of tokens `[N, T]` to one number."""
    policy_mask, rows = batch.policy_mask, max(batch.policy_mask.any(-1).sum(), 1)
    x = np.where(policy_mask, x, 0.0)
    if settings.aggregation == "token_minibatch":
        return x.sum() / max(policy_mask.sum(), 1)
    if settings.aggregation == "token_iteration":
        return x.sum() / max(batch.share, 1)
    if settings.aggregation == "constant":
        return x.sum() / (rows * batch.longest)
    return np.sum(x.sum(-1) / np.maximum(policy_mask.sum(-1), 1)) / rows


Constants = dict[str, np.ndarray]
"""The values that the gradient treats as constants, taken at the point of the gradient."""


def losses(
    settings: Any,
    heads: int,
    policy: Params,
    critic: Params | None,
    batch: Minibatch,
    frozen: Constants | None = None,
) -> tuple[dict[str, float], np.ndarray, Constants]:
    """Returns the terms of a minibatch's loss and the "loss" itself, the log-ratios `[N, T]`, and the constants.

    `frozen` contains the constants of the point whose gradient is computed, which are this point's by default.
    """
    policy_mask, rows = batch.policy_mask, batch.rows
    logs = log_softmax(logits(policy, rows, heads) / settings.temperature)
    new = gather_tokens(logs, rows)
    if settings.objective == "preference":
        return preference_loss(settings, new, batch), np.zeros(policy_mask.shape), {}

    def mean(x: np.ndarray) -> float:
        return np.where(policy_mask, x, 0.0).sum() / max(policy_mask.sum(), 1)

    tokens = np.where(policy_mask, new - batch.old, 0.0)
    frozen = {"log_ratio": tokens} if frozen is None else frozen
    log_ratio = tokens
    if settings.ratio == "sequence_sum":
        log_ratio = np.broadcast_to(tokens.sum(-1, keepdims=True), policy_mask.shape)
    elif settings.ratio == "sequence_mean":
        frozen_log_ratio = frozen["log_ratio"]
        row_mean = frozen_log_ratio.sum(-1, keepdims=True) / np.maximum(policy_mask.sum(-1, keepdims=True), 1)
        log_ratio = np.where(policy_mask, row_mean + tokens - frozen_log_ratio, 0.0)
    ratio = np.exp(log_ratio)
    objective, bounds = surrogate(settings, ratio, batch.advantage)
    metrics: dict[str, float] = {name: mean(x) for name, x in bounds.items()}
    metrics |= {"ratio_mean": mean(ratio), "old_kl": mean(kl_estimate("k3", batch.old, new))}
    if settings.correction != "none":
        weight = importance_weights(settings, batch.old - batch.sampled, policy_mask)
        objective = objective * weight
        metrics |= {"correction_mean": mean(weight), "correction_zero": mean(weight == 0)}
    loss = metrics["surrogate_loss"] = -aggregate_loss(settings, objective, batch)
    if settings.kl != "none" and settings.kl_in == "loss":
        if settings.kl == "exact":
            estimate = np.sum(np.exp(logs) * (logs - batch.reference_logs), -1)
        else:
            estimate = kl_estimate(settings.kl, new, batch.reference)
            by_weight = {"none": 0.0 * tokens, "ratio": tokens, "stopped_ratio": frozen["log_ratio"]}
            estimate = estimate * np.exp(by_weight[settings.kl_weight])
        metrics["kl_loss"] = aggregate_loss(settings, estimate, batch)
        loss = loss + settings.kl_coefficient * metrics["kl_loss"]
    if settings.entropy_coefficient:
        metrics["entropy"] = mean(entropy(logs))
        loss = loss - settings.entropy_coefficient * metrics["entropy"]
    if critic is not None:
        value = np.pad(head_values(critic, rows, heads)[:, :-1], ((0, 0), (1, 0)))
        errors = (value - batch.target) ** 2
        metrics["value_clipped"] = 0.0
        if settings.clip_value:
            clipped = batch.value + np.clip(value - batch.value, -settings.value_clip, settings.value_clip)
            metrics["value_clipped"] = mean((clipped - batch.target) ** 2 > errors)
            errors = np.maximum(errors, (clipped - batch.target) ** 2)
        metrics["value_loss"] = mean(errors) / 2
        loss = loss + settings.value_coefficient * metrics["value_loss"]
    return metrics | {"loss": loss}, log_ratio, frozen


def preference_loss(settings: Any, new: np.ndarray, batch: Minibatch) -> dict[str, float]:
    """Returns DPO's loss and its metrics, as means over the pairs that count."""
    rewards = settings.beta * np.sum(np.where(batch.policy_mask, new - batch.reference, 0.0), -1)
    chosen, rejected = rewards[::2], rewards[1::2]
    counts = batch.policy_mask.any(-1)[::2] & batch.policy_mask.any(-1)[1::2]
    margin = chosen - rejected
    smoothing = settings.label_smoothing
    loss = (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))
    metrics = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margin,
        "preference_accuracy": margin > 0,
        "loss": loss,
    }
    return {name: np.where(counts, x, 0.0).sum() / max(counts.sum(), 1) for name, x in metrics.items()}


# Gradients and updates.


def learning_rate(settings: Any, peak: float, progress: float) -> float:
    """Returns the learning rate at a progress of the run from 0 to 1."""
    warmup, final = settings.learning_rate_warmup, settings.learning_rate_final
    if progress < warmup:
        return peak * progress / warmup
    decay_progress = (progress - warmup) / (1 - warmup)
    remaining = {"constant": 1.0, "linear": 1 - decay_progress, "cosine": (1 + np.cos(np.pi * decay_progress)) / 2}
    final = 0.0 if settings.learning_rate_decay == "constant" else final
    return peak * (final + (1 - final) * remaining[settings.learning_rate_decay])


@dataclass
class Slope:
    """A finite difference: the name of the parameters that vary, the direction, and the slope."""

    name: str
    direction: Params
    slope: float


def directional_slopes(
    loss: Callable[[Params], float],
    params: Params,
    random: np.random.Generator,
    everywhere: int = 16,
    step: float = 1e-6,
) -> Iterator[Slope]:
    """Yields central differences of a loss in normal directions.

    There are `everywhere` directions through all parameters, and one through each leaf. For the former, the expected
    squared error of a gradient's slope is the squared norm of the gradient's error.
    """
    directions = [("everywhere", list(params))] * everywhere + [(path, [path]) for path in params]
    for name, paths in directions:
        direction = {path: random.normal(size=params[path].shape) for path in paths}
        up, down = (
            loss(params | {path: params[path] + sign * step * d for path, d in direction.items()}) for sign in (1, -1)
        )
        yield Slope(name, direction, (up - down) / (2 * step))


@dataclass
class Adam:
    """Adam (Kingma and Ba, 2015) with a clipped gradient, and AdamW's weight decay of kernels and embeddings."""

    beta1: float
    beta2: float
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = np.inf

    def init(self, params: Params) -> dict[str, Any]:
        """Returns the moments before the first update."""
        return {
            "count": 0,
            "mu": {k: 0.0 * x for k, x in params.items()},
            "nu": {k: 0.0 * x for k, x in params.items()},
        }

    def update(
        self, params: Params, moments: dict[str, Any], gradient: Params, learning_rate: float
    ) -> tuple[Params, dict[str, Any], dict[str, float]]:
        """Returns parameters and moments after an update, and its metrics."""
        length = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        metrics = {"gradient_norm": length, "clipped": float(length > self.max_norm), "learning_rate": learning_rate}
        gradient = {k: g * min(1.0, self.max_norm / max(length, 1e-12)) for k, g in gradient.items()}
        count = moments["count"] + 1
        mu = {k: self.beta1 * moments["mu"][k] + (1 - self.beta1) * g for k, g in gradient.items()}
        nu = {k: self.beta2 * moments["nu"][k] + (1 - self.beta2) * g**2 for k, g in gradient.items()}
        after = {}
        for path, x in params.items():
            denominator = np.sqrt(nu[path] / (1 - self.beta2**count))
            direction = mu[path] / (1 - self.beta1**count) / (denominator + self.epsilon)
            decay = self.weight_decay if path.endswith(("/kernel", "/embedding")) else 0.0
            after[path] = x - learning_rate * (direction + decay * x)
        return after, {"count": count, "mu": mu, "nu": nu}, metrics


# The losses of what precedes the first iteration.


def imitation_loss(settings: Any, heads: int, policy: Params, demonstrations: TokenRows) -> float:
    """Returns the warm start's loss: minus the mean log-probability of the policy's tokens in demonstrations."""
    logs = log_softmax(logits(policy, demonstrations, heads) / settings.temperature)
    return -gather_tokens(logs, demonstrations)[demonstrations.policy_mask].mean()


def reward_model_loss(heads: int, model: Params, first: TokenRows, second: TokenRows) -> float:
    """Returns the reward model's loss: the row that the visible reward prefers is to get a higher score."""
    margins = reward_model_scores(model, first, heads) - reward_model_scores(model, second, heads)
    first_score, second_score = (x.rewards.get("seen", x.rewards["gold"]) for x in (first, second))
    signs = np.sign(first_score - second_score)
    return np.mean(np.where(signs == 0, 0.0, np.log1p(np.exp(-signs * margins))))


def value_pretraining_loss(heads: int, critic: Params, rows: TokenRows, mc_returns: np.ndarray) -> float:
    """Returns value pretraining's loss: half the mean squared error from the returns, over the policy's tokens."""
    value = np.pad(head_values(critic, rows, heads)[:, :-1], ((0, 0), (1, 0)))
    return 0.5 * np.mean((value - mc_returns)[rows.policy_mask] ** 2)
