"""Tests dialogue learners' statistics of rows, tokens and values against float64 NumPy loops, and the channel table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit import learners
from jaxaudit.core.learner import Learner
from jaxaudit.dialogues.hop import Hop
from jaxaudit.dialogues.protocol import END, POLICY, PROMPT, TOOL
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.learners.dialogue.telemetry import policy, rewards, token_statistics
from jaxaudit.learners.dialogue.telemetry.channels import TABLE, RunDimensions, channels, run_features
from jaxaudit.learners.dialogue.telemetry.token_statistics import Bigrams

PROMPTS, MEMBERS, SLOTS = 5, 4, 24
ROWS = PROMPTS * MEMBERS


def rows(seed=0):
    """Returns arrays for `ROWS` rows: response tokens in up to five turns, tool results, and random numbers."""
    rng = np.random.default_rng(seed)
    role = np.zeros((ROWS, SLOTS), int)  # 0 response, 1 prompt, 2 tool result, 3 after the end
    role[:, :2] = 1
    for row in range(ROWS):
        for turn in range(row % 5):
            begin = 4 + 4 * turn + rng.integers(2)
            role[row, begin : begin + rng.integers(1, 3)] = 2
        role[row, rng.integers(14, SLOTS + 1) :] = 3
    response_mask, tool_mask = role == 0, role == 2
    shape = (ROWS, SLOTS)
    noise = rng.normal(size=(8, *shape))
    return {
        "response": response_mask,
        "tool": tool_mask,
        "entropy": np.exp(noise[0]),
        "log_probability": -np.exp(noise[1]),
        "reference": -np.exp(noise[1] + 0.3 * noise[2]),
        "exact": np.exp(noise[3]) / 10,
        "log_ratio": 0.3 * noise[4],
        "advantage": noise[5],
        "weight": np.where(noise[0] > 0.5, 0.0, np.exp(noise[5])),
        "values": noise[6],
        "returns": noise[6] + noise[7],
    }


def cast(arrays):
    return {name: x if x.dtype == bool else x.astype(np.float32) for name, x in arrays.items()}


@jax.jit
def token_metrics(r):
    """Computes all token statistics in one program."""
    masks = token_statistics.strata_masks(r["response"], r["tool"], 2)
    clip = jnp.array([0.2, 0.28])
    score = (r["advantage"] * policy.saturation(r["log_probability"], jnp.exp(r["log_probability"]) ** 2)) ** 2
    first_update = policy.ratio_statistics(r["log_ratio"], r["advantage"], r["weight"], clip, masks)
    second_update = policy.ratio_statistics(2 * r["log_ratio"], r["advantage"], 2 * r["weight"] ** 2, clip, masks)
    statistics = token_statistics.token_means(
        masks, kl=r["exact"], entropy=r["entropy"], saturation=score, mass_cut=r["exact"], update_kl=r["exact"]
    )
    statistics |= {"kl_largest": token_statistics.by_stratum(policy.largest, masks, r["exact"])}
    statistics |= policy.reference_statistics(r["log_probability"], r["reference"], masks)
    statistics |= policy.unfamiliarity(r["reference"], r["log_probability"], r["tool"])
    statistics |= policy.moments_last(jax.tree.map(lambda *x: jnp.stack(x), first_update, second_update))
    statistics |= policy.score_share(r["entropy"], score, masks)
    statistics |= policy.churn((r["values"] > 0).astype(int), (r["returns"] > 0).astype(int), masks)
    statistics |= policy.mismatch(r["log_probability"], r["reference"], masks)
    statistics |= policy.value_statistics(r["values"], r["returns"], r["response"])
    error = r["values"] - r["returns"]
    statistics |= policy.critic_errors(error, r["response"], error[:3], r["response"][:3])
    statistics |= policy.correlation_by_distance(r["values"], r["returns"], r["response"])
    statistics |= policy.separation(r["values"][:, 2], r["returns"][:, 2], r["response"][:, 2])
    return statistics


@jax.jit
def row_metrics(gold, proxy, response_mask, calls, truncated, row_mask):
    grouped = gold.reshape(PROMPTS, MEMBERS)
    prompts = row_mask.reshape(PROMPTS, MEMBERS)[:, 0]
    statistics = rewards.reward_statistics(gold, proxy, {"b": gold / 2, "a": gold**2}, row_mask)
    statistics |= rewards.success_statistics(grouped == 1, prompts)
    statistics |= rewards.group_statistics(proxy.reshape(PROMPTS, MEMBERS), prompts)
    return statistics | rewards.length_statistics(response_mask, calls, truncated, row_mask)


def row_arguments(seed=0):
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 2, ROWS).astype(np.float32)
    gold[:MEMBERS], gold[MEMBERS : 2 * MEMBERS] = 0.0, 1.0
    proxy = gold + rng.integers(0, 2, ROWS)
    proxy[2 * MEMBERS : 3 * MEMBERS] = 0.1
    row_mask = np.repeat(np.arange(PROMPTS) != 3, MEMBERS)
    response_mask = rows(seed)["response"]
    return gold, proxy.astype(np.float32), response_mask, rng.integers(0, 3, ROWS), rng.random(ROWS) < 0.3, row_mask


def stratum_masks(r, slots=2):
    """Computes the masks of the strata slot by slot."""
    after_result = np.zeros_like(r["response"])
    for row, t in np.argwhere(r["response"]):
        after_result[row, t] = r["tool"][row, max(t - slots, 0) : t].any()
    results = np.array([[count_of_runs(row[: t + 1]) for t in range(SLOTS)] for row in r["tool"]])
    turns = [r["response"] & (results == turn) for turn in range(3)]
    return [r["response"], after_result, r["response"] & ~after_result, *turns, r["response"] & (results >= 3)]


def count_of_runs(mask):
    return len("".join("x" if token else " " for token in mask).split())


def sum_of_largest_share(x, threshold_share):
    """Sums the largest share of `x`; the last value counts in part."""
    weights = np.clip(threshold_share * len(x) - np.arange(len(x)), 0, 1)
    return weights @ np.sort(x)[::-1]


def expected_token_statistics(r, m):
    """Computes every token statistic of one stratum from the tokens of that stratum alone."""
    x = {name: a[m] for name, a in r.items() if a.dtype != bool}
    d = x["reference"] - x["log_probability"]
    k = np.array([np.mean(-d), np.mean(d**2 / 2), np.mean(np.exp(d) - 1 - d)])
    score = (x["advantage"] * np.sqrt(1 - 2 * np.exp(x["log_probability"]) + np.exp(2 * x["log_probability"]))) ** 2
    order = np.argsort(-x["entropy"])
    high = np.clip(0.2 * len(d) - np.arange(len(d)), 0, 1)
    statistics = {
        "entropy": x["entropy"].mean(),
        "saturation": score.mean(),
        "kl": x["exact"].mean(),
        "kl_largest": x["exact"].max(),
        "kl_estimate": k,
        "kl_spread": k.max() - k.min(),
        "reference_log_probability": x["reference"].mean(),
        "high_entropy_share": high @ score[order] / score.sum(),
        "greedy_churn": np.mean((x["values"] > 0) != (x["returns"] > 0)),
        "mismatch_kl": k[2],
        "mismatch_chi2": np.mean(np.exp(2 * d)) - 1,
        "mismatch_ess": np.exp(d).sum() ** 2 / (len(d) * np.exp(2 * d).sum()),
    }
    moments = []
    for scale in (1, 2):
        ratio = np.exp(scale * x["log_ratio"])
        weight = x["weight"] if scale == 1 else 2 * x["weight"] ** 2
        tail = np.sort(weight)[::-1]
        size = int(np.sqrt((weight > 0).sum()))
        moments.append(
            {
                "ratio_max": ratio.max(),
                "ratio_quantile": np.quantile(ratio, [0.99, 0.999], method="inverted_cdf"),
                "ratio_ess": ratio.sum() ** 2 / (len(d) * (ratio**2).sum()),
                "clip_fraction": [
                    np.mean((ratio < 0.8) & (x["advantage"] < 0)),
                    np.mean((ratio > 1.28) & (x["advantage"] > 0)),
                ],
                "weight_cvar": sum_of_largest_share(weight, 0.01) / (0.01 * len(d)),
                "weight_q999": np.quantile(weight, 0.999, method="inverted_cdf"),
                "weight_top_share": sum_of_largest_share(weight, 0.01) / weight.sum(),
                "weight_tail": np.mean(np.log(tail[:size] / tail[size])),
                "weight_ess": weight.sum() ** 2 / (len(d) * (weight**2).sum()),
            }
        )
    return statistics | {name: np.stack([moment[name] for moment in moments]) for name in moments[0]}


@pytest.mark.parametrize("seed", [0, 1])
def test_token_statistics_of_every_stratum_equal_float64_loops(seed):
    r = rows(seed)
    metrics = token_metrics(cast(r))
    for stratum, m in enumerate(stratum_masks(r)):
        assert m.sum() > 5
        for name, expected in expected_token_statistics(r, m).items():
            statistic = metrics[name]
            assert (np.asarray(statistic.count)[stratum] == m.sum()).all()
            np.testing.assert_allclose(statistic.value[stratum], expected, rtol=2e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(metrics["tool_log_probability"].value, r["reference"][r["tool"]].mean(), rtol=1e-5)
    assert metrics["tool_log_probability"].count == r["tool"].sum()
    np.testing.assert_allclose(
        metrics["result_log_probability"].value, r["log_probability"][r["tool"]].mean(), rtol=1e-5
    )


def test_saturation_is_the_norm_of_the_gradient_by_the_logits():
    logits = 3 * jax.random.normal(jax.random.key(0), (50, 7))
    token = jnp.arange(50) % 7
    gradient = jax.vmap(jax.grad(lambda x, a: jax.nn.log_softmax(x)[a]))(logits, token)
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, token[:, None], 1)[:, 0]
    saturation = policy.saturation(chosen, jnp.sum(jnp.exp(log_p) ** 2, axis=1))
    np.testing.assert_allclose(saturation, jnp.linalg.norm(gradient, axis=1), rtol=1e-4)
    np.testing.assert_allclose(policy.saturation(jnp.array([0.0, -jnp.inf]), jnp.ones(2)), [0.0, 2**0.5])


def test_k1_and_k3_are_unbiased_estimates_of_the_kl_and_k2_is_not():
    log_p, log_q = (jax.nn.log_softmax(x) for x in 0.8 * jax.random.normal(jax.random.key(3), (2, 9)))
    exact = float(jnp.sum(jnp.exp(log_p) * (log_p - log_q)))
    tokens = jax.random.categorical(jax.random.key(4), log_p, shape=(40_000,))
    k = np.asarray(policy.kl_estimators(log_p[tokens], log_q[tokens]), np.float64)
    error = k.std(axis=1, ddof=1) / 200
    assert abs(k[0].mean() - exact) < 3 * error[0]
    assert abs(k[2].mean() - exact) < 3 * error[2]
    assert abs(k[1].mean() - exact) > 5 * error[1]


def test_statistics_of_ratios_beyond_float32_stay_finite():
    r = cast(rows())
    r["log_ratio"] = r["log_ratio"] + 500.0 * (np.arange(SLOTS) == 3)
    r["reference"] = r["reference"] + 300.0
    metrics = token_metrics(r)
    assert all(np.isfinite(statistic.value).all() for statistic in metrics.values())
    assert metrics["ratio_ess"].value[0, 0] < 0.2


def test_high_entropy_share_is_proportional_when_all_entropies_are_equal():
    r = cast(rows())
    mask = jnp.asarray(r["response"])[None]
    result = policy.score_share(jnp.zeros_like(r["entropy"]), jnp.ones_like(r["entropy"]), mask)["high_entropy_share"]
    np.testing.assert_allclose(result.value, 0.2, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_value_statistics_equal_numpy(seed):
    r = rows(seed)
    metrics, m = token_metrics(cast(r)), r["response"]
    v, g = r["values"][m], r["returns"][m]
    np.testing.assert_allclose(metrics["explained_variance"].value, 1 - np.var(g - v) / np.var(g), rtol=1e-4)
    np.testing.assert_allclose(metrics["value_bias"].value, np.mean(v - g), rtol=1e-4)
    held_out_error = (r["values"] - r["returns"])[:3][m[:3]]
    np.testing.assert_allclose(
        metrics["critic_error"].value, [np.mean((v - g) ** 2), np.mean(held_out_error**2)], rtol=1e-5
    )
    distance = np.array([[m[row, t + 1 :].sum() for t in range(SLOTS)] for row in range(ROWS)])
    for bin_index, (low, high) in enumerate([(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 999)]):
        in_bin = m & (distance >= low) & (distance <= high)
        assert metrics["value_correlation"].count[bin_index] == in_bin.sum()
        if in_bin.sum() > 1:
            expected = np.corrcoef(r["values"][in_bin], r["returns"][in_bin])[0, 1]
            np.testing.assert_allclose(metrics["value_correlation"].value[bin_index], expected, rtol=1e-4, atol=1e-6)
    pairs = m[:, 2]
    right, wrong = r["values"][pairs, 2], r["returns"][pairs, 2]
    np.testing.assert_allclose(metrics["critic_separation"].value, np.mean(right - wrong), rtol=1e-5)
    np.testing.assert_allclose(metrics["critic_order"].value, np.mean(right > wrong), rtol=1e-5)


def test_value_statistics_of_perfect_constant_and_tied_critics():
    mask = jnp.ones((6, 5), bool)
    returns = jnp.arange(30.0).reshape(6, 5)
    perfect = policy.value_statistics(returns, returns, mask)
    assert (float(perfect["explained_variance"].value), float(perfect["value_bias"].value)) == (1.0, 0.0)
    constant = policy.value_statistics(jnp.full_like(returns, 17.0), returns, mask)
    np.testing.assert_allclose(
        [constant["explained_variance"].value, constant["value_bias"].value], [0, 2.5], atol=1e-6
    )
    equal = policy.value_statistics(returns, jnp.ones_like(returns), mask)
    assert (equal["explained_variance"].count, equal["value_bias"].count) == (0, 30)
    nearly_equal = policy.value_statistics(returns, 1.0 + 1e-7 * returns, mask)
    assert nearly_equal["explained_variance"].count == 0
    distinct = policy.value_statistics(returns, 1.0 + 1e-2 * returns, mask)
    assert distinct["explained_variance"].count == 30
    tied = policy.separation(jnp.ones(4), jnp.array([1.0, 0.0, 2.0, 1.0]), jnp.ones(4, bool))
    assert float(tied["critic_order"].value) == 0.5
    assert list(policy.tokens_remaining(jnp.array([[False, True, False, True, True, False]]))[0]) == [3, 2, 2, 1, 0, 0]


def test_explained_variance_does_not_depend_on_the_scale_of_returns():
    """Returns near 1e-9 count as different, as large ones do; values at masked positions do not matter."""
    mask = jnp.ones((6, 5), bool).at[0].set(False)
    returns = jnp.arange(30.0).reshape(6, 5)
    large = policy.value_statistics(returns, 0.9 * returns, mask)["explained_variance"]
    small = policy.value_statistics(1e-9 * returns, 0.9e-9 * returns, mask)["explained_variance"]
    assert small.count == large.count == 25
    np.testing.assert_allclose(small.value, large.value, rtol=1e-5)


def choose(n, k):
    return np.prod([(n - i) / (i + 1) for i in range(k)]) if k <= n else 0.0


@pytest.mark.parametrize("seed", [0, 1])
def test_row_statistics_equal_numpy(seed):
    gold, proxy, response_mask, calls, truncated, row_mask = row_arguments(seed)
    metrics = {
        name: np.asarray(x.value)
        for name, x in row_metrics(gold, proxy, response_mask, calls, truncated, row_mask).items()
    }
    grouped = gold.reshape(PROMPTS, MEMBERS)[row_mask[::MEMBERS]]
    pass_at = [
        np.mean([1 - choose(MEMBERS - int(c), k) / choose(MEMBERS, k) for c in grouped.sum(1)]) for k in (1, 2, 4)
    ]
    turns = [
        sum(response_mask[row, t] and not response_mask[row, t - 1] for t in range(1, SLOTS)) + response_mask[row, 0]
        for row in range(ROWS)
    ]
    lengths = response_mask.sum(1)[row_mask]
    rewards_by_group = proxy.reshape(PROMPTS, MEMBERS)[row_mask[::MEMBERS]]
    expected = {
        "acting_performance": gold[row_mask].mean(),
        "proxy": proxy[row_mask].mean(),
        "reward_gap": (proxy - gold)[row_mask].mean(),
        "reward_part": [np.mean(gold[row_mask] ** 2), np.mean(gold[row_mask] / 2)],
        "success": (gold[row_mask] == 1).mean(),
        "pass_at": pass_at,
        "no_signal": np.mean([len(set(group)) == 1 for group in rewards_by_group]),
        "group_std": rewards_by_group.std(axis=1, ddof=1).mean(),
        "row_tokens": lengths.mean(),
        "turns": np.mean(np.array(turns)[row_mask]),
        "calls": calls[row_mask].mean(),
        "truncated": truncated[row_mask].mean(),
        "length_quantile": np.quantile(lengths, [0.1, 0.5, 0.9], method="inverted_cdf"),
    }
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert 0 < metrics["no_signal"] < 1 < metrics["turns"]


def test_pass_at_k_uses_powers_of_two_up_to_the_group_size():
    assert rewards.powers_of_two(1) == (1,)
    assert rewards.powers_of_two(6) == (1, 2, 4, 6)
    statistics = rewards.success_statistics(jnp.arange(8)[None] == 3, jnp.ones(1, bool))
    np.testing.assert_allclose(statistics["pass_at"].value, [1 / 8, 2 / 8, 4 / 8, 1.0], rtol=1e-6)


def test_statistics_without_tokens_or_rows_are_finite_with_count_zero():
    r = cast(rows())
    empty = {name: np.zeros_like(x) if x.dtype == bool else np.full_like(x, np.nan) for name, x in r.items()}
    for name, statistic in token_metrics(empty).items():
        np.testing.assert_array_equal(statistic.count, 0, err_msg=name)
        np.testing.assert_array_equal(np.isfinite(statistic.value), True, err_msg=name)
    gold, proxy, response_mask, calls, truncated, row_mask = row_arguments()
    statistics = row_metrics(
        np.full_like(gold, np.nan), proxy, response_mask, calls, truncated, np.zeros_like(row_mask)
    )
    for name, statistic in statistics.items():
        np.testing.assert_array_equal(statistic.count, 0, err_msg=name)
        np.testing.assert_array_equal(np.isfinite(statistic.value), True, err_msg=name)


def test_nan_ratios_make_the_ratio_statistics_nan():
    r = cast(rows())
    r["log_ratio"], r["weight"] = r["log_ratio"] * np.nan, r["weight"] * np.nan
    metrics = token_metrics(r)
    for name in (
        "ratio_max",
        "ratio_quantile",
        "ratio_ess",
        "weight_cvar",
        "weight_q999",
        "weight_top_share",
        "weight_tail",
    ):
        assert np.isnan(metrics[name].value).all(), name
    assert np.isfinite(metrics["entropy"].value).all()


def test_last_values_are_repeated_until_a_count_is_positive_again():
    last = token_statistics.LastValues.zeros({"a": (3, 2), "b": ()})

    def step(last, turn):
        count = jnp.stack([turn + 1, turn % 2, 0 * turn])
        value = jnp.where(turn == 3, jnp.nan, 1.0 + turn) * jnp.ones((3, 2))
        statistics = {"a": token_statistics.Statistic(value, count), "b": token_statistics.Statistic(10.0 * turn, turn)}
        return last.update(statistics)

    last, reported = jax.lax.scan(step, last, jnp.arange(5))
    nan = np.nan
    np.testing.assert_array_equal(reported["a"][..., 1].T, [[1, 2, 3, nan, 5], [0, 2, 2, nan, 2], [0] * 5])
    np.testing.assert_array_equal(reported["b"], [0, 10, 20, 30, 40])
    np.testing.assert_array_equal(last.values["a"][:, 0], [5, 2, 0])
    updated, reported_now = last.update({"b": token_statistics.Statistic(jnp.float32(7), jnp.int32(1))})
    assert (set(reported_now), set(updated.values)) == ({"b"}, {"a", "b"})


def test_soon_after_marks_response_slots_within_a_distance_of_a_result():
    tool_mask = np.array([[0, 1, 1, 0, 0, 0, 1, 0]], bool)
    response_mask = np.array([[1, 0, 0, 1, 1, 1, 0, 1]], bool)
    assert token_statistics.soon_after(tool_mask, response_mask, 1)[0].tolist() == [
        False,
        False,
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert token_statistics.soon_after(tool_mask, response_mask, 2)[0].tolist() == [
        False,
        False,
        False,
        True,
        True,
        False,
        False,
        True,
    ]
    np.testing.assert_array_equal(
        token_statistics.counts_of(token_statistics.strata_masks(response_mask, tool_mask, 2)), [5, 3, 2, 1, 3, 1, 0]
    )
    assert token_statistics.strata_masks(response_mask).shape == (1, 1, 8)


def test_bigram_probabilities_of_results_use_add_one_smoothing():
    """In rows a b | c d, where a tool wrote c and d: c follows b twice, d follows c once, and d follows b once."""
    tokens = np.array([[0, 1, 2, 3], [4, 1, 2, 0], [0, 1, 3, 0]])
    role = np.array([[PROMPT, POLICY, TOOL, TOOL], [PROMPT, POLICY, TOOL, POLICY], [PROMPT, POLICY, TOOL, END]])
    rows = Rows(**dict.fromkeys((f.name for f in dataclasses.fields(Rows)), None) | {"tokens": tokens, "role": role})
    bigrams = Bigrams.empty(5).add(rows)
    assert np.asarray(bigrams.counts).sum() == 4
    probs = np.exp(bigrams.log_prob(rows))
    np.testing.assert_allclose(probs[:, 0], 1.0)
    np.testing.assert_allclose(probs[0, 1:], [1 / 5, 3 / 8, 2 / 6], rtol=1e-6)
    np.testing.assert_allclose(probs[2, 2], 2 / 8, rtol=1e-6)
    large = Bigrams.empty(1000)
    assert large.counts.shape == (256, 256)
    shifted = rows.replace(tokens=tokens + 512)
    np.testing.assert_array_equal(large.add(shifted).counts, large.add(rows).counts)


DIMENSIONS = RunDimensions(group_size=MEMBERS, slots=SLOTS, parts=("a", "b"), layers=("wte", "h/0"), every=5)
FEATURE_NAMES = """
changes correction critic demonstrations kl_loss mismatch pairs parts ratios reference reward_model sources tools
"""
FEATURES = set(FEATURE_NAMES.split())


def test_each_feature_occurs_in_some_run():
    runs = [
        DialogueSettings(objective="preference"),
        DialogueSettings(correction="tis", kl="k3"),
        DialogueSettings(advantage="gae", reward="learned"),
    ]
    assert set().union(*(run_features(Hop(), settings, has_parts=True) for settings in runs)) == FEATURES


def test_the_channel_table_lists_exactly_the_computed_statistics():
    declared = channels("full", FEATURES, DIMENSIONS)
    assert declared.keys() == TABLE.keys()
    computed = jax.eval_shape(token_metrics, cast(rows())) | jax.eval_shape(row_metrics, *row_arguments())
    assert {name: x.value.shape for name, x in computed.items()} == {name: declared[name].shape for name in computed}
    Learner(
        lambda key: key, lambda state, key, taps: (state, {}), channels=declared
    )  # raises if two channels label a dimension differently


def test_channels_follow_from_the_features_of_a_run():
    full = channels("full", (), DIMENSIONS)
    assert full["entropy"].dims == (("stratum", ("all",)),)
    assert not {"kl", "ratio_max", "explained_variance", "calls", "reward_part", "pair_margin"} & full.keys()
    assert channels("full", ("tools",), DIMENSIONS)["entropy"].dims == (("stratum", token_statistics.STRATA),)
    assert "layer_gradient_norm" not in channels("full", (), RunDimensions(group_size=8, slots=3))
    basic = channels("basic", FEATURES, DIMENSIONS)
    assert basic.keys() < channels("full", FEATURES, DIMENSIONS).keys()
    assert {"performance", "entropy", "kl", "success", "x_grad"} < basic.keys()
    assert "changed_prompt_success" not in full
    assert channels("full", ("critic",), DIMENSIONS)["critic_error"].dims[0][1] == ("collected", "held_out")
    unsplit = channels("full", ("critic",), dataclasses.replace(DIMENSIONS, split=False))
    assert unsplit["critic_error"].dims[0][1] == ("collected", "fixed_prompts")
    assert (full["performance"].every, full["entropy"].every, full["shown_token"].monitored) == (5, 1, False)


def test_largest_is_nan_when_any_entry_is_nan():
    """XLA's CPU backend drops a NaN from the maximum of 4,096 or more entries."""
    x = jax.random.normal(jax.random.key(0), (64, 100)).at[3, 7].set(jnp.nan)
    largest = jax.jit(policy.largest)
    assert np.isnan(largest(x, jnp.ones(x.shape, bool)))
    assert largest(x, jnp.arange(64)[:, None] >= 4 + jnp.zeros((1, 100))) == np.nanmax(np.asarray(x[4:]))
    assert largest(x, jnp.zeros(x.shape, bool)) == 0


BASIC = """
acting_performance approx_kl calls clip_fraction clipped_fraction dual_clip_fraction entropy entropy_after_result
gradient_norm group_std kl learning_rate loss no_signal own_tokens params_norm performance performance_error proxy
ratio_mean reward_gap row_tokens success truncated turns update_norm warm_start_success x_grad x_mem x_used
"""
CRITIC_CHANNELS = """
critic_gradient_norm explained_variance score_explained_variance score_value_bias value_bias value_clip_fraction
value_loss
"""


def test_basic_telemetry_has_exactly_the_documented_channels():
    """Stored runs and monitors rely on these names; each preset adds channels for its parts of the loss."""
    declared = {
        preset: set(getattr(learners, preset)("hop", telemetry="basic").channels)
        for preset in ("ppo_lm", "grpo", "dpo", "dapo")
    }
    basic = set(BASIC.split())
    assert declared["ppo_lm"] == basic | set(CRITIC_CHANNELS.split())
    assert declared["grpo"] == basic | {"kl_loss"}
    ratio_channels = {"approx_kl", "clip_fraction", "dual_clip_fraction", "ratio_mean"}
    assert declared["dpo"] == basic - ratio_channels | {"pair_accuracy", "pair_margin"}
    assert declared["dapo"] == basic - {"kl"}
