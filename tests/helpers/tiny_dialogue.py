"""A cheap learner with all perturbation sites of dialogues: short rows, and a policy linear in four features."""

import jax
import jax.numpy as jnp
import optax

from jaxaudit import Learner, Optimizer
from jaxaudit.core.optimizer import linear_to_zero

PROMPTS, MEMBERS, SLOTS, VOCABULARY, FEATURES = 2, 2, 3, 5, 4
NOTHING, END, CALL = -1, 0, 3
ERROR = (4, NOTHING)
RESULT_TOKENS, PROMPT_TOKENS = (1, 3, 4), (1, 2, 3, 4)
RARE = (0, 2, 2, 4, 4)
OPTIMIZER = Optimizer(optax.scale_by_adam(), linear_to_zero(0.01), max_norm=0.05)


def fresh(key):
    policy, critic = jax.random.split(key)
    return {
        "policy": {"kernel": jax.random.normal(policy, (FEATURES, VOCABULARY))},
        "critic": {"head": {"kernel": jax.random.normal(critic, (FEATURES,)), "bias": jnp.zeros(1)}},
    }


def init(key):
    params = fresh(key)
    return params, OPTIMIZER.init(params), params["policy"]


def generate(policy, key, taps, temperature):
    """Returns features `[N, SLOTS, FEATURES]`, and tokens and the policy mask `[N, SLOTS]`.

    Each row has a prompt of one or two tokens, and tokens of the policy up to the first END. Tokens from CALL on call a
    tool, whose result is the token itself and the token below it.
    """
    difficulty = taps("difficulty", jnp.ones(PROMPTS), lowest=0.0, highest=3.0, usual=1.0)
    prompt = jax.random.choice(jax.random.fold_in(key, 0), jnp.array(PROMPT_TOKENS), (PROMPTS, 2)).astype(jnp.int32)
    prompt = prompt.at[0, 1].set(NOTHING)
    prompt = taps("prompt", prompt, tokens=jnp.array(PROMPT_TOKENS))
    features = jnp.stack([prompt[:, 0] / 4, prompt[:, 1] / 4, difficulty, jnp.ones(PROMPTS)], axis=1)

    def turn(taps, carry, index):
        features, policy_mask = carry
        logits = taps("sampled_logits", features @ policy["kernel"] / temperature)
        token = jax.random.categorical(jax.random.fold_in(key, 1 + index), logits).astype(jnp.int32)
        called = policy_mask & (token >= CALL)
        result = jnp.where(called[:, None], jnp.stack([token, token - 1], axis=1), NOTHING)
        result = taps(
            "tool_result",
            result,
            called=called,
            error=jnp.array(ERROR),
            tokens=jnp.array(RESULT_TOKENS),
            rare=jnp.array(RARE),
        )
        after = features.at[:, 0].add(0.1 * result[:, 0]).at[:, 1].add(0.1 * result[:, 1])
        return (after, policy_mask & (token != END)), (features, token, policy_mask)

    rows = jnp.repeat(features, MEMBERS, axis=0)
    start = (rows, jnp.ones(rows.shape[0], bool))
    _, (features, tokens, policy_mask) = taps.scan(turn, start, jnp.arange(SLOTS))
    return jnp.moveaxis(features, 0, 1), tokens.T, policy_mask.T


def log_probability(policy, features, tokens, temperature):
    log_softmax = jax.nn.log_softmax(features @ policy["kernel"] / temperature)
    return jnp.take_along_axis(log_softmax, tokens[..., None], axis=-1)[..., 0]


def step(state, key, taps):
    """Makes one update from two rollout groups of two rows.

    The sampler has a lower temperature than the trainer, so the ratios differ from one.
    """
    params_before, moments = OPTIMIZER.disturb(*state[:2], taps, fresh)
    behaviour = taps("behaviour", params_before["policy"])
    reference = taps("reference", state[2], policy=params_before["policy"])
    temperature = taps("temperature", jnp.float32(1.0))
    features, tokens, policy_mask = generate(behaviour, key, taps, 0.5 * temperature)
    old_log_prob = log_probability(behaviour, features, tokens, 0.5 * temperature)
    old_log_prob = taps("log_probability", jnp.where(policy_mask, old_log_prob, 0.0), own=policy_mask)
    reward_model = taps("reward_model", {"kernel": jnp.linspace(-1.0, 1.0, VOCABULARY)})
    reward = jax.nn.sigmoid(jnp.sum(jnp.where(policy_mask, reward_model["kernel"][tokens], 0.0), axis=1))
    reward = taps("reward", reward, lengths=policy_mask.sum(axis=1).astype(jnp.float32), bound=1.0)
    decay = taps("gae_lambda", jnp.float32(0.9)) ** jnp.arange(SLOTS - 1.0, -1.0, -1.0)
    value = features @ params_before["critic"]["head"]["kernel"] + params_before["critic"]["head"]["bias"]
    advantage = taps("advantage", decay * (reward[:, None] - value), own=policy_mask)
    low, high = taps("ratio_clip", jnp.array([0.2, 0.2]))
    kl_coefficient = taps("kl_coefficient", jnp.float32(0.1))
    ref_log_prob = log_probability(reference, features, tokens, temperature)

    def loss(params):
        new_log_prob = log_probability(params["policy"], features, tokens, temperature)
        ratio = jnp.exp(new_log_prob - old_log_prob)
        surrogate = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - low, 1 + high) * advantage)
        kl = jnp.exp(ref_log_prob - new_log_prob) - 1 - (ref_log_prob - new_log_prob)
        value = features @ params["critic"]["head"]["kernel"] + params["critic"]["head"]["bias"]
        token_loss = -surrogate + kl_coefficient * kl + (value - reward[:, None]) ** 2
        return jnp.sum(jnp.where(policy_mask, token_loss, 0.0)) / policy_mask.sum()

    params, moments, update = OPTIMIZER.update(params_before, moments, jax.grad(loss)(params_before), taps)
    norm = optax.tree.norm(params)
    return (params, moments, reference), {"performance": -norm, "params_norm": norm, "update_norm": update.update_norm}


TINY_DIALOGUE = Learner(init, step, name="tiny_dialogue")
