"""An iteration of a learner on dialogues once more: NumPy, float64, and nothing of the library.

Given are the rows that were written, the uniform numbers they were drawn with, the order of the minibatches, and
parameters. All else is worked out here, from the transformer to the parameters after an update, one named value after
the other, so that whoever compares them finds the first that differs. There is no gradient: `slopes` are finite
differences of the loss.

Parameters are flat, arrays by path: "h/attn/c_attn/kernel" `[depth, width, 3 width]`, "wte/embedding". Settings are
anything with the attributes of `DialogueSettings`, as they act: where something disturbs one, it is the disturbed one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

OWN, PROMPT, TOOL = range(3)
ALPHA = 16.0
"""Adapters' change is multiplied with this over their rank."""

Params = dict[str, np.ndarray]


# The transformer.


def merge_adapters(params: Params, base: Params | None) -> Params:
    """Parameters with adapters added to the base's kernels; without a base, as they are."""
    if base is None:
        return params
    found = base | {path: value for path, value in params.items() if path.startswith("head/")}
    for path, a in params.items():
        if path.endswith("/a"):
            b = params[path.removesuffix("a") + "b"]
            kernel = path.removesuffix("a") + "kernel"
            found[kernel] = base[kernel] + ALPHA / a.shape[-1] * a @ b
    return found


def norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Layer normalisation."""
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias


def gelu(x: np.ndarray) -> np.ndarray:
    """Its approximation by a hyperbolic tangent, as GPT-2 has it."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    chances = np.exp(scores - scores.max(-1, keepdims=True))
    return chances / chances.sum(-1, keepdims=True)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    scores = scores - scores.max(-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def hidden(params: Params, rows: Written, heads: int) -> np.ndarray:
    """The final hidden state at each slot, which has read the token there: `[N, T, width]`."""
    count, slots = rows.tokens.shape
    x = params["wte/embedding"][rows.tokens] + params["wpe/embedding"][rows.position]
    places = np.arange(slots)
    seen = (places <= places[:, None]) & (places >= rows.first[:, :, None])  # [N, queries, keys]
    depth = len(params["h/ln_1/scale"])
    for layer in range(depth):
        of = {path.removeprefix("h/"): value[layer] for path, value in params.items() if path.startswith("h/")}
        read = norm(x, of["ln_1/scale"], of["ln_1/bias"]) @ of["attn/c_attn/kernel"] + of["attn/c_attn/bias"]
        query, key, value = (part.reshape(count, slots, heads, -1) for part in np.split(read, 3, axis=-1))
        scores = np.einsum("nqhd,nkhd->nhqk", query, key) / np.sqrt(query.shape[-1])
        chances = softmax(np.where(seen[:, None], scores, -np.inf))
        mixed = np.einsum("nhqk,nkhd->nqhd", chances, value).reshape(x.shape)
        x = x + mixed @ of["attn/c_proj/kernel"] + of["attn/c_proj/bias"]
        inner = norm(x, of["ln_2/scale"], of["ln_2/bias"]) @ of["mlp/c_fc/kernel"] + of["mlp/c_fc/bias"]
        x = x + gelu(inner) @ of["mlp/c_proj/kernel"] + of["mlp/c_proj/bias"]
    return norm(x, params["ln_f/scale"], params["ln_f/bias"])


def logits(params: Params, rows: Written, heads: int) -> np.ndarray:
    """Those that each slot's token is drawn by, from the slot before: `[N, T, V]`, zeros at the first slot."""
    found = hidden(params, rows, heads)[:, :-1] @ params["wte/embedding"].T
    return np.pad(found, ((0, 0), (1, 0), (0, 0)))


def scalars(params: Params, rows: Written, heads: int) -> np.ndarray:
    """The head's value of each hidden state, `[N, T]`."""
    return hidden(params, rows, heads) @ params["head/kernel"] + params["head/bias"]


# Rows.


@dataclass
class Written:
    """Rows as they were written, `[N, T]`; `truncated` and each of `rewards` `[N]`."""

    tokens: np.ndarray
    role: np.ndarray
    position: np.ndarray
    first: np.ndarray
    truncated: np.ndarray
    rewards: dict[str, np.ndarray]

    @property
    def own(self) -> np.ndarray:
        """Whether the policy wrote a token."""
        return self.role == OWN

    def picked(self, index: np.ndarray) -> Written:
        """The rows of an index."""
        arrays = {name: getattr(self, name)[index] for name in ("tokens", "role", "position", "first", "truncated")}
        return Written(**arrays, rewards={name: reward[index] for name, reward in self.rewards.items()})


def of_token(logs: np.ndarray, rows: Written) -> np.ndarray:
    """The entries `[N, T]` of the tokens written in `[N, T, V]`."""
    return np.take_along_axis(logs, rows.tokens[..., None], -1)[..., 0]


def entropy(logs: np.ndarray) -> np.ndarray:
    """Of log-probabilities over the last axis."""
    return -np.sum(np.exp(logs) * logs, -1)


def scores(params: Params, rows: Written, heads: int) -> np.ndarray:
    """A reward model's of each row, where its last own token is: `[N]`; 0 without any."""
    read = scalars(params, rows, heads)
    return np.array([read[n, np.flatnonzero(own)[-1]] if own.any() else 0.0 for n, own in enumerate(rows.own)])


@dataclass
class Choice:
    """How each own token was chosen, `[N, T]`.

    Attributes:
      token: the one that its uniform number chooses.
      cut: the probability that top-k and top-p took away.
      margin: how far the number, or top-p's threshold, is from where the choice would be another.
    """

    token: np.ndarray
    cut: np.ndarray
    margin: np.ndarray


def sample_tokens(scores: np.ndarray, uniform: np.ndarray, top_k: int, top_p: float) -> Choice:
    """Tokens chosen by logits `[N, T, V]` at the temperature and uniform numbers `[N, T]`."""
    choice = Choice(*(np.zeros(uniform.shape, kind) for kind in (int, float, float)))
    for place in np.ndindex(*uniform.shape):
        chances, order = softmax(scores[place]), np.argsort(-scores[place])
        left = order[:top_k] if top_k else order
        mass = np.cumsum(chances[left[::-1]] / chances[left].sum())[::-1]  # of each with those less likely
        staying = (mass > 1 - top_p) | (top_p >= 1)
        staying[0] = True
        threshold = np.abs(mass - (1 - top_p)).min()
        staying = np.isin(np.arange(len(chances)), left[staying])
        rising = np.cumsum(np.where(staying, chances, 0)) / chances[staying].sum()
        choice.token[place] = np.argmax(rising > uniform[place])
        choice.cut[place] = chances[~staying].sum()
        choice.margin[place] = min(np.abs(rising - uniform[place]).min(), threshold)
    return choice


# From rows to what is learned from.


def overlong(settings: Any, dialogue: Any, rows: Written) -> np.ndarray:
    """The penalty on long rows, from 0 to -1, `[N]`: by all slots that were written after a row's own prompt."""
    found = []
    for role in rows.role:
        prompt = np.argmax(role != PROMPT)
        length, longest = np.sum(role[prompt:] <= TOOL), dialogue.length - prompt
        buffer = settings.overlong_buffer * longest
        found.append(-np.clip((length - (longest - buffer)) / buffer, 0, 1))
    return np.array(found)


def has_signal(scores: np.ndarray, kept: np.ndarray) -> bool:
    """Whether the kept scores of a group are not all the same."""
    return len(set(scores[kept])) > 1


def choice_of_rows(settings: Any, reward: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows that are learned from, and whether each counts."""
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


def divergence(estimator: str, new: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Estimates of the divergence from a reference by the tokens written."""
    gap = reference - new
    return {"k1": -gap, "k2": gap**2 / 2, "k3": np.exp(gap) - 1 - gap}[estimator]


def earned(settings: Any, score, own, penalty) -> np.ndarray:
    """What each own token earns, `[N, T]`: minus its divergence, and the last one its row's score."""
    found = np.where(own, -settings.kl_coefficient * penalty, 0.0)
    for n, mine in enumerate(own):
        found[n, np.flatnonzero(mine)[-1:]] += score[n]
    return found


def returns(reward: np.ndarray, own: np.ndarray, gamma: float) -> np.ndarray:
    """What comes from each own token on, discounted for each own one in between: `[N, T]`."""
    found = np.zeros(own.shape)
    for n, mine in enumerate(own):
        slots = np.flatnonzero(mine)
        for i, slot in enumerate(slots):
            found[n, slot] = np.sum(gamma ** np.arange(len(slots) - i) * reward[n, slots[i:]])
    return found


def by_critic(settings: Any, reward, own, value) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and the critic's targets, `[N, T]`: sums of temporal differences over each row's own tokens."""
    errors = np.zeros(own.shape)
    for n, mine in enumerate(own):
        slots = np.flatnonzero(mine)
        after = np.append(value[n, slots], 0.0)
        errors[n, slots] = reward[n, slots] + settings.gamma * after[1:] - after[:-1]
    advantage = returns(errors, own, settings.gamma * settings.gae_lambda)
    target = returns(errors, own, settings.gamma * settings.critic_lambda)
    return advantage, np.where(own, target + value, 0.0)


def by_group(settings: Any, score: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """The advantage of each row, `[N]`, by the others of its group."""
    found = np.zeros(len(score))
    for begin in range(0, len(score), settings.group_size):
        members = begin + np.flatnonzero(kept[begin : begin + settings.group_size])
        x = score[members]
        if len(set(x)) < 2:
            continue
        if settings.advantage == "leave_one_out":
            found[members] = [x[i] - np.delete(x, i).mean() for i in range(len(x))]
        else:
            found[members] = (x - x.mean()) / (
                x.std(ddof=1) + settings.std_epsilon if settings.advantage == "group" else 1
            )
    return found


def advantages(settings: Any, score, own, kept, value, penalty) -> tuple[np.ndarray, np.ndarray | None]:
    """The advantage of each token and, with a critic, its targets, `[N, T]`."""
    if settings.advantage == "gae":
        advantage, target = by_critic(settings, earned(settings, score, own, penalty), own, value)
        if settings.whiten:
            mean, variance = advantage[own].mean(), advantage[own].var(ddof=1)
            advantage = np.where(own, (advantage - mean) / np.sqrt(variance + 1e-8), 0.0)
        return advantage, target
    score = score - settings.kl_coefficient * np.sum(np.where(own, penalty, 0.0), -1)
    return np.where(own, by_group(settings, score, kept)[:, None], 0.0), None


@dataclass
class Models:
    """Flat parameters by use; `author` wrote the rows."""

    policy: Params
    reference: Params
    author: Params
    critic: Params | None = None
    reward_model: Params | None = None
    base: Params | None = None

    def __post_init__(self):
        for name in ("policy", "reference", "author", "critic", "reward_model"):
            if getattr(self, name) is not None:
                setattr(self, name, merge_adapters(getattr(self, name), self.base))


@dataclass
class Disturbed:
    """What is added on the way: to the sampler's log-probabilities `[N, T]`, and to the rewards `[N]`."""

    log_probability: Any = 0.0
    reward: Any = 0.0


def collected(
    settings: Any,
    dialogue: Any,
    heads: int,
    models: Models,
    rows: Written,
    uniform: np.ndarray,
    disturbed: Disturbed,
    deciding: np.ndarray | None = None,
) -> dict[str, Any]:
    """What is learned from, by name, in the order in which it is made.

    Rows are chosen by `deciding`, rewards that differ from the reference's in rounding, so that equal ones are equal in
    the same way: two rows of one last chunk score the same.

    Where there are no own tokens, what is found of tokens means nothing. Names that begin with "all " are of all rows
    that were sampled.
    """
    read = logits(models.author, rows, heads) / settings.temperature
    logs = log_softmax(read)
    sampled = np.where(rows.own, of_token(logs, rows), 0.0)
    choice = sample_tokens(read, uniform, settings.top_k, settings.top_p)
    found: dict[str, Any] = {
        "all sampler's log-probability": sampled,
        "all sampler's entropy": entropy(logs),
        "all mass cut": choice.cut,
        "all certain": choice.margin > 1e-5,
        "all token drawn": np.where(choice.margin > 1e-5, choice.token, rows.tokens),
    }
    gold = rows.rewards["gold"]
    scored = gold if settings.reward == "gold" else scores(models.reward_model, rows, heads)
    reward = scored + disturbed.reward
    kept = ~rows.truncated if settings.mask_truncated else np.ones_like(rows.truncated)
    found |= {"all scored": scored, "all reward": reward, "all kept": kept}
    score = reward
    if settings.overlong_buffer:
        score = reward + settings.overlong_coefficient * overlong(settings, dialogue, rows)
    index, kept = choice_of_rows(settings, reward if deciding is None else deciding, kept)
    rows, score, sampled = rows.picked(index), score[index], (sampled + disturbed.log_probability)[index]
    own = rows.own & kept[:, None]
    found |= {"index": index, "tokens": rows.tokens, "first": rows.first, "score": score, "own": own}
    now, then = (log_softmax(logits(x, rows, heads) / settings.temperature) for x in (models.policy, models.reference))
    recomputed, reference = of_token(now, rows), of_token(then, rows)
    found |= {"recomputed": recomputed, "entropy": entropy(now), "sampled": sampled, "reference": reference}
    found["old"] = sampled if settings.old_log_probability == "sampled" else recomputed
    found["value"] = None
    if models.critic is not None:
        found["value"] = np.pad(scalars(models.critic, rows, heads)[:, :-1], ((0, 0), (1, 0)))
    if settings.objective == "policy":
        in_reward = settings.kl != "none" and settings.kl_in == "reward"
        penalty = divergence(settings.kl, recomputed, reference) if in_reward else np.zeros(own.shape)
        found["returns"] = returns(earned(settings, score, own, penalty), own, settings.gamma)
        found["advantage"], found["target"] = advantages(settings, score, own, kept, found["value"], penalty)
    return found | {"rows": rows, "reference logs": then}


# The loss of a minibatch.


@dataclass
class Minibatch:
    """What a minibatch's loss knows of its rows.

    Attributes:
      rows: as written.
      own: bool `[N, T]`, own tokens in rows that count.
      share: own tokens of the iteration over the number of minibatches.
      longest: the most own tokens that a row can have.
      old, advantage, sampled, reference, value, target: `[N, T]`, where they are there.
      reference_logs: `[N, T, V]`.
    """

    rows: Written
    own: np.ndarray
    share: float
    longest: int
    old: Any
    advantage: Any
    sampled: Any
    reference: Any
    value: Any
    target: Any
    reference_logs: Any


def minibatch(settings: Any, dialogue: Any, found: dict[str, Any], index: np.ndarray) -> Minibatch:
    """The rows of an index of what was `collected`."""
    names = ("own", "old", "advantage", "sampled", "reference", "value", "target")
    picked = {name: found[name][index] if found.get(name) is not None else None for name in names}
    return Minibatch(
        rows=found["rows"].picked(index),
        share=found["own"].sum() / settings.minibatches,
        longest=dialogue.length - dialogue.prompt_length,
        reference_logs=found["reference logs"][index],
        **picked,
    )


def surrogate(settings: Any, ratio: np.ndarray, advantage: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """PPO's, with dual clipping; and where its bounds hold."""
    near = np.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    gain = np.minimum(ratio * advantage, near * advantage)
    with np.errstate(invalid="ignore"):  # infinity times zero, where it does not count
        gain = np.where(advantage < 0, np.maximum(gain, settings.dual_clip * advantage), gain)
    return gain, {
        "clip_low": (advantage < 0) & (ratio < 1 - settings.clip_low),
        "clip_high": (advantage > 0) & (ratio > 1 + settings.clip_high),
        "clip_dual": (advantage < 0) & (ratio > settings.dual_clip),
    }


def correction(settings: Any, log_weight: np.ndarray, own: np.ndarray) -> np.ndarray:
    """The weights of importance sampling from what sampled to what trains, `[N, T]`."""
    log_weight = np.where(own, log_weight, 0.0)
    total = log_weight.sum(-1, keepdims=True)
    by_level = {"token": log_weight, "sequence": total, "geometric": log_weight}
    weight = np.broadcast_to(np.exp(by_level[settings.correction_level]), own.shape)
    if settings.correction == "tis":
        return np.minimum(weight, settings.tis_cap)
    judged = weight
    if settings.correction_level == "geometric":
        judged = np.exp(total / np.maximum(own.sum(-1, keepdims=True), 1))
    return np.where((judged >= settings.mis_low) & (judged <= settings.mis_high), weight, 0.0)


def aggregated(settings: Any, x: np.ndarray, batch: Minibatch) -> float:
    """Losses of tokens `[N, T]` as one number."""
    own, rows = batch.own, max(batch.own.any(-1).sum(), 1)
    x = np.where(own, x, 0.0)
    if settings.aggregation == "token_minibatch":
        return x.sum() / max(own.sum(), 1)
    if settings.aggregation == "token_iteration":
        return x.sum() / max(batch.share, 1)
    if settings.aggregation == "constant":
        return x.sum() / (rows * batch.longest)
    return np.sum(x.sum(-1) / np.maximum(own.sum(-1), 1)) / rows


Frozen = dict[str, np.ndarray]
"""What the gradient takes for constants, of the point where it is taken."""


def losses(
    settings: Any,
    heads: int,
    policy: Params,
    critic: Params | None,
    batch: Minibatch,
    frozen: Frozen | None = None,
) -> tuple[dict[str, float], np.ndarray, Frozen]:
    """What a minibatch's "loss" is made of, and at last itself, the log-ratios `[N, T]`, and what is `frozen` here.

    `frozen` is that of the point whose gradient is asked for; of this one unless given.
    """
    own, rows = batch.own, batch.rows
    logs = log_softmax(logits(policy, rows, heads) / settings.temperature)
    new = of_token(logs, rows)
    if settings.objective == "preference":
        return preference(settings, new, batch), np.zeros(own.shape), {}

    def mean(x: np.ndarray) -> float:
        return np.where(own, x, 0.0).sum() / max(own.sum(), 1)

    tokens = np.where(own, new - batch.old, 0.0)
    frozen = {"log_ratio": tokens} if frozen is None else frozen
    log_ratio = tokens
    if settings.ratio == "sequence_sum":
        log_ratio = np.broadcast_to(tokens.sum(-1, keepdims=True), own.shape)
    elif settings.ratio == "sequence_mean":
        there = frozen["log_ratio"]
        row = there.sum(-1, keepdims=True) / np.maximum(own.sum(-1, keepdims=True), 1)
        log_ratio = np.where(own, row + tokens - there, 0.0)
    ratio = np.exp(log_ratio)
    gain, bounds = surrogate(settings, ratio, batch.advantage)
    told: dict[str, float] = {name: mean(x) for name, x in bounds.items()}
    told |= {"ratio_mean": mean(ratio), "old_kl": mean(divergence("k3", batch.old, new))}
    if settings.correction != "none":
        weight = correction(settings, batch.old - batch.sampled, own)
        gain = gain * weight
        told |= {"correction_mean": mean(weight), "correction_zero": mean(weight == 0)}
    loss = told["surrogate_loss"] = -aggregated(settings, gain, batch)
    if settings.kl != "none" and settings.kl_in == "loss":
        if settings.kl == "exact":
            estimate = np.sum(np.exp(logs) * (logs - batch.reference_logs), -1)
        else:
            estimate = divergence(settings.kl, new, batch.reference)
            by_weight = {"none": 0.0 * tokens, "ratio": tokens, "stopped_ratio": frozen["log_ratio"]}
            estimate = estimate * np.exp(by_weight[settings.kl_weight])
        told["kl_loss"] = aggregated(settings, estimate, batch)
        loss = loss + settings.kl_coefficient * told["kl_loss"]
    if settings.entropy_coefficient:
        told["entropy"] = mean(entropy(logs))
        loss = loss - settings.entropy_coefficient * told["entropy"]
    if critic is not None:
        value = np.pad(scalars(critic, rows, heads)[:, :-1], ((0, 0), (1, 0)))
        errors = (value - batch.target) ** 2
        told["value_clipped"] = 0.0
        if settings.clip_value:
            near = batch.value + np.clip(value - batch.value, -settings.value_clip, settings.value_clip)
            told["value_clipped"] = mean((near - batch.target) ** 2 > errors)
            errors = np.maximum(errors, (near - batch.target) ** 2)
        told["value_loss"] = mean(errors) / 2
        loss = loss + settings.value_coefficient * told["value_loss"]
    return told | {"loss": loss}, log_ratio, frozen


def preference(settings: Any, new: np.ndarray, batch: Minibatch) -> dict[str, float]:
    """DPO's loss and what it tells: means over the pairs that count."""
    gains = settings.beta * np.sum(np.where(batch.own, new - batch.reference, 0.0), -1)
    chosen, rejected = gains[::2], gains[1::2]
    counts = batch.own.any(-1)[::2] & batch.own.any(-1)[1::2]
    margin = chosen - rejected
    smoothing = settings.label_smoothing
    loss = (1 - smoothing) * np.log1p(np.exp(-margin)) + smoothing * np.log1p(np.exp(margin))
    named = {
        "chosen_reward": chosen,
        "rejected_reward": rejected,
        "margin": margin,
        "preference_accuracy": margin > 0,
        "loss": loss,
    }
    return {name: np.where(counts, x, 0.0).sum() / max(counts.sum(), 1) for name, x in named.items()}


# Gradients and updates.


def rate(settings: Any, peak: float, progress: float) -> float:
    """What an update is multiplied with when so much of the run is over, from 0 to 1."""
    warmup, final = settings.learning_rate_warmup, settings.learning_rate_final
    if progress < warmup:
        return peak * progress / warmup
    passed = (progress - warmup) / (1 - warmup)
    left = {"constant": 1.0, "linear": 1 - passed, "cosine": (1 + np.cos(np.pi * passed)) / 2}
    final = 0.0 if settings.learning_rate_decay == "constant" else final
    return peak * (final + (1 - final) * left[settings.learning_rate_decay])


@dataclass
class Slope:
    """A finite difference: where from, along what, how much."""

    name: str
    direction: Params
    slope: float


def slopes(
    loss: Callable[[Params], float],
    params: Params,
    random: np.random.Generator,
    everywhere: int = 16,
    step: float = 1e-6,
) -> Iterator[Slope]:
    """Central differences of a loss in normal directions: so many through all parameters, and one through each leaf.

    Of the former the mean square of what a gradient is off by is, expected, the square of the norm of its error.
    """
    random_ones = [("everywhere", list(params))] * everywhere + [(path, [path]) for path in params]
    for name, paths in random_ones:
        direction = {path: random.normal(size=params[path].shape) for path in paths}
        up, down = (
            loss(params | {path: params[path] + sign * step * d for path, d in direction.items()}) for sign in (1, -1)
        )
        yield Slope(name, direction, (up - down) / (2 * step))


@dataclass
class Adam:
    """Adam (Kingma and Ba, 2015), with decay of kernels and embeddings as AdamW has it, and a clipped gradient."""

    beta1: float
    beta2: float
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = np.inf

    def begun(self, params: Params) -> dict[str, Any]:
        """The moments before the first update."""
        return {
            "count": 0,
            "mu": {k: 0.0 * x for k, x in params.items()},
            "nu": {k: 0.0 * x for k, x in params.items()},
        }

    def updated(
        self, params: Params, moments: dict[str, Any], gradient: Params, rate: float
    ) -> tuple[Params, dict[str, Any], dict[str, float]]:
        """Parameters and moments after an update, and what it tells."""
        length = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        told = {"gradient_norm": length, "clipped": float(length > self.max_norm), "learning_rate": rate}
        gradient = {k: g * min(1.0, self.max_norm / max(length, 1e-12)) for k, g in gradient.items()}
        count = moments["count"] + 1
        mu = {k: self.beta1 * moments["mu"][k] + (1 - self.beta1) * g for k, g in gradient.items()}
        nu = {k: self.beta2 * moments["nu"][k] + (1 - self.beta2) * g**2 for k, g in gradient.items()}
        after = {}
        for path, x in params.items():
            root = np.sqrt(nu[path] / (1 - self.beta2**count))
            direction = mu[path] / (1 - self.beta1**count) / (root + self.epsilon)
            decay = self.weight_decay if path.endswith(("/kernel", "/embedding")) else 0.0
            after[path] = x - rate * (direction + decay * x)
        return after, {"count": count, "mu": mu, "nu": nu}, told


# What comes before the first iteration.


def imitation(settings: Any, heads: int, policy: Params, shown: Written) -> float:
    """The warm start's loss: minus the log-probability of a demonstration's own token."""
    logs = log_softmax(logits(policy, shown, heads) / settings.temperature)
    return -of_token(logs, shown)[shown.own].mean()


def judgement(heads: int, model: Params, one: Written, other: Written) -> float:
    """The reward model's loss: the row that is seen as better is to score more."""
    margins = scores(model, one, heads) - scores(model, other, heads)
    better, worse = (x.rewards.get("seen", x.rewards["gold"]) for x in (one, other))
    signs = np.sign(better - worse)
    return np.mean(np.where(signs == 0, 0.0, np.log1p(np.exp(-signs * margins))))


def expectation(heads: int, critic: Params, rows: Written, returned: np.ndarray) -> float:
    """Value pretraining's loss: half the squared error from what comes, each own token alike."""
    value = np.pad(scalars(critic, rows, heads)[:, :-1], ((0, 0), (1, 0)))
    return 0.5 * np.mean((value - returned)[rows.own] ** 2)
