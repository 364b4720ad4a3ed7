"""Statistics of dialogues' rows, tokens and values, against loops in float64 NumPy; and the table of their channels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaudit import learners
from jaxaudit.core.learner import Learner
from jaxaudit.dialogues.protocol import END, POLICY, PROMPT, TOOL
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.learners.dialogue.telemetry import policy, rewards, token_statistics
from jaxaudit.learners.dialogue.telemetry.channels import FEATURES, TABLE, RunDimensions, channels
from jaxaudit.learners.dialogue.telemetry.token_statistics import Bigrams

PROMPTS, MEMBERS, SLOTS = 5, 4, 24
ROWS = PROMPTS * MEMBERS


def rows(seed=0):
    """Arrays of some rows: own tokens in up to five turns, a tool's tokens between, and numbers of all kinds."""
    rng = np.random.default_rng(seed)
    role = np.zeros((ROWS, SLOTS), int)  # 0 own, 1 prompt, 2 tool, 3 over
    role[:, :2] = 1
    for row in range(ROWS):
        for turn in range(row % 5):
            begin = 4 + 4 * turn + rng.integers(2)
            role[row, begin : begin + rng.integers(1, 3)] = 2
        role[row, rng.integers(14, SLOTS + 1) :] = 3
    own, given = role == 0, role == 2
    shape = (ROWS, SLOTS)
    noise = rng.normal(size=(8, *shape))
    return {
        "own": own,
        "given": given,
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


def cast(found):
    return {name: x if x.dtype == bool else x.astype(np.float32) for name, x in found.items()}


@jax.jit
def told(r):
    """All token statistics of some rows, in one program."""
    masks = token_statistics.strata_masks(r["own"], r["given"], 2)
    clip = jnp.array([0.2, 0.28])
    score = (r["advantage"] * policy.saturation(r["log_probability"], jnp.exp(r["log_probability"]) ** 2)) ** 2
    visited = policy.ratio_statistics(r["log_ratio"], r["advantage"], r["weight"], clip, masks)
    after = policy.ratio_statistics(2 * r["log_ratio"], r["advantage"], 2 * r["weight"] ** 2, clip, masks)
    found = token_statistics.token_means(
        masks, entropy=r["entropy"], saturation=score, mass_cut=r["exact"], update_kl=r["exact"]
    )
    found |= policy.reference_statistics(r["log_probability"], r["reference"], r["exact"], masks)
    found |= policy.unfamiliarity(r["reference"], r["log_probability"], r["given"])
    found |= policy.moments_last(jax.tree.map(lambda *x: jnp.stack(x), visited, after))
    found |= policy.score_share(r["entropy"], score, masks)
    found |= policy.churn((r["values"] > 0).astype(int), (r["returns"] > 0).astype(int), masks)
    found |= policy.mismatch(r["log_probability"], r["reference"], masks)
    found |= policy.value_statistics(r["values"], r["returns"], r["own"])
    error = r["values"] - r["returns"]
    found |= policy.critic_errors(error, r["own"], error[:3], r["own"][:3])
    found |= policy.correlation_by_distance(r["values"], r["returns"], r["own"])
    found |= policy.separation(r["values"][:, 2], r["returns"][:, 2], r["own"][:, 2])
    return found


@jax.jit
def told_of_rows(gold, proxy, own, calls, truncated, kept):
    grouped = gold.reshape(PROMPTS, MEMBERS)
    prompts = kept.reshape(PROMPTS, MEMBERS)[:, 0]
    found = rewards.reward_statistics(gold, proxy, {"b": gold / 2, "a": gold**2}, kept)
    found |= rewards.success_statistics(grouped == 1, prompts)
    found |= rewards.group_statistics(proxy.reshape(PROMPTS, MEMBERS), prompts)
    return found | rewards.length_statistics(own, calls, truncated, kept)


def row_arguments(seed=0):
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 2, ROWS).astype(np.float32)
    gold[:MEMBERS], gold[MEMBERS : 2 * MEMBERS] = 0.0, 1.0
    proxy = gold + rng.integers(0, 2, ROWS)
    proxy[2 * MEMBERS : 3 * MEMBERS] = 0.1
    kept = np.repeat(np.arange(PROMPTS) != 3, MEMBERS)
    own = rows(seed)["own"]
    return gold, proxy.astype(np.float32), own, rng.integers(0, 3, ROWS), rng.random(ROWS) < 0.3, kept


def stratum_masks(r, slots=2):
    """The strata, slot by slot."""
    tool = np.zeros_like(r["own"])
    for row, t in np.argwhere(r["own"]):
        tool[row, t] = r["given"][row, max(t - slots, 0) : t].any()
    results = np.array([[count_of_runs(row[: t + 1]) for t in range(SLOTS)] for row in r["given"]])
    turns = [r["own"] & (results == turn) for turn in range(3)]
    return [r["own"], tool, r["own"] & ~tool, *turns, r["own"] & (results >= 3)]


def count_of_runs(given):
    return len("".join("x" if token else " " for token in given).split())


def cut(x, threshold_share):
    """The sum of the largest share, the last value in part."""
    weights = np.clip(threshold_share * len(x) - np.arange(len(x)), 0, 1)
    return weights @ np.sort(x)[::-1]


def wanted_of_tokens(r, m):
    """Every token statistic of one stratum, from its tokens alone."""
    x = {name: a[m] for name, a in r.items() if a.dtype != bool}
    d = x["reference"] - x["log_probability"]
    k = np.array([np.mean(-d), np.mean(d**2 / 2), np.mean(np.exp(d) - 1 - d)])
    score = (x["advantage"] * np.sqrt(1 - 2 * np.exp(x["log_probability"]) + np.exp(2 * x["log_probability"]))) ** 2
    order = np.argsort(-x["entropy"])
    high = np.clip(0.2 * len(d) - np.arange(len(d)), 0, 1)
    found = {
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
                "weight_cvar": cut(weight, 0.01) / (0.01 * len(d)),
                "weight_q999": np.quantile(weight, 0.999, method="inverted_cdf"),
                "weight_top_share": cut(weight, 0.01) / weight.sum(),
                "weight_tail": np.mean(np.log(tail[:size] / tail[size])),
                "weight_ess": weight.sum() ** 2 / (len(d) * (weight**2).sum()),
            }
        )
    return found | {name: np.stack([moment[name] for moment in moments]) for name in moments[0]}


@pytest.mark.parametrize("seed", [0, 1])
def test_token_statistics_of_every_stratum(seed):
    r = rows(seed)
    found = told(cast(r))
    for place, m in enumerate(stratum_masks(r)):
        assert m.sum() > 5
        for name, wanted in wanted_of_tokens(r, m).items():
            got = found[name]
            assert (np.asarray(got.count)[place] == m.sum()).all()
            np.testing.assert_allclose(got.value[place], wanted, rtol=2e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(found["tool_log_probability"].value, r["reference"][r["given"]].mean(), rtol=1e-5)
    assert found["tool_log_probability"].count == r["given"].sum()
    np.testing.assert_allclose(
        found["result_log_probability"].value, r["log_probability"][r["given"]].mean(), rtol=1e-5
    )


def test_saturation_is_the_norm_of_the_gradient_by_the_logits():
    logits = 3 * jax.random.normal(jax.random.key(0), (50, 7))
    token = jnp.arange(50) % 7
    gradient = jax.vmap(jax.grad(lambda x, a: jax.nn.log_softmax(x)[a]))(logits, token)
    log_p = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(log_p, token[:, None], 1)[:, 0]
    found = policy.saturation(chosen, jnp.sum(jnp.exp(log_p) ** 2, axis=1))
    np.testing.assert_allclose(found, jnp.linalg.norm(gradient, axis=1), rtol=1e-4)
    np.testing.assert_allclose(policy.saturation(jnp.array([0.0, -jnp.inf]), jnp.ones(2)), [0.0, 2**0.5])


def test_estimators_of_the_kl_agree_with_it_on_average():
    """k1 and k3 are unbiased for the exact KL; k2 is not."""
    log_p, log_q = (jax.nn.log_softmax(x) for x in 0.8 * jax.random.normal(jax.random.key(3), (2, 9)))
    exact = float(jnp.sum(jnp.exp(log_p) * (log_p - log_q)))
    tokens = jax.random.categorical(jax.random.key(4), log_p, shape=(40_000,))
    k = np.asarray(policy.kl_estimators(log_p[tokens], log_q[tokens]), np.float64)
    error = k.std(axis=1, ddof=1) / 200
    assert abs(k[0].mean() - exact) < 3 * error[0]
    assert abs(k[2].mean() - exact) < 3 * error[2]
    assert abs(k[1].mean() - exact) > 5 * error[1]


def test_ratios_that_leave_float32_stay_finite():
    r = cast(rows())
    r["log_ratio"] = r["log_ratio"] + 500.0 * (np.arange(SLOTS) == 3)
    r["reference"] = r["reference"] + 300.0
    found = told(r)
    assert all(np.isfinite(statistic.value).all() for statistic in found.values())
    assert found["ratio_ess"].value[0, 0] < 0.2


def test_equal_entropies_share_the_score_equally():
    r = cast(rows())
    mask = jnp.asarray(r["own"])[None]
    found = policy.score_share(jnp.zeros_like(r["entropy"]), jnp.ones_like(r["entropy"]), mask)["high_entropy_share"]
    np.testing.assert_allclose(found.value, 0.2, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_statistics_of_values(seed):
    r = rows(seed)
    found, m = told(cast(r)), r["own"]
    v, g = r["values"][m], r["returns"][m]
    np.testing.assert_allclose(found["explained_variance"].value, 1 - np.var(g - v) / np.var(g), rtol=1e-4)
    np.testing.assert_allclose(found["value_bias"].value, np.mean(v - g), rtol=1e-4)
    held_out = (r["values"] - r["returns"])[:3][m[:3]]
    np.testing.assert_allclose(found["critic_error"].value, [np.mean((v - g) ** 2), np.mean(held_out**2)], rtol=1e-5)
    distance = np.array([[m[row, t + 1 :].sum() for t in range(SLOTS)] for row in range(ROWS)])
    for place, (low, high) in enumerate([(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31), (32, 63), (64, 999)]):
        there = m & (distance >= low) & (distance <= high)
        assert found["value_correlation"].count[place] == there.sum()
        if there.sum() > 1:
            wanted = np.corrcoef(r["values"][there], r["returns"][there])[0, 1]
            np.testing.assert_allclose(found["value_correlation"].value[place], wanted, rtol=1e-4, atol=1e-6)
    pairs = m[:, 2]
    right, wrong = r["values"][pairs, 2], r["returns"][pairs, 2]
    np.testing.assert_allclose(found["critic_separation"].value, np.mean(right - wrong), rtol=1e-5)
    np.testing.assert_allclose(found["critic_order"].value, np.mean(right > wrong), rtol=1e-5)


def test_a_critic_that_knows_and_one_that_guesses_its_mean():
    own = jnp.ones((6, 5), bool)
    returns = jnp.arange(30.0).reshape(6, 5)
    perfect = policy.value_statistics(returns, returns, own)
    assert (float(perfect["explained_variance"].value), float(perfect["value_bias"].value)) == (1.0, 0.0)
    constant = policy.value_statistics(jnp.full_like(returns, 17.0), returns, own)
    np.testing.assert_allclose(
        [constant["explained_variance"].value, constant["value_bias"].value], [0, 2.5], atol=1e-6
    )
    equal = policy.value_statistics(returns, jnp.ones_like(returns), own)
    assert (equal["explained_variance"].count, equal["value_bias"].count) == (0, 30)
    wobbling = policy.value_statistics(returns, 1.0 + 1e-7 * returns, own)
    assert wobbling["explained_variance"].count == 0
    apart = policy.value_statistics(returns, 1.0 + 1e-2 * returns, own)
    assert apart["explained_variance"].count == 30
    unsure = policy.separation(jnp.ones(4), jnp.array([1.0, 0.0, 2.0, 1.0]), jnp.ones(4, bool))
    assert float(unsure["critic_order"].value) == 0.5
    assert list(policy.tokens_remaining(jnp.array([[False, True, False, True, True, False]]))[0]) == [3, 2, 2, 1, 0, 0]


def test_whether_returns_are_equal_is_judged_by_the_size_of_own_tokens_values_alone():
    """Very small returns differ as large ones do, whatever stands at given tokens."""
    own = jnp.ones((6, 5), bool).at[0].set(False)
    returns = jnp.arange(30.0).reshape(6, 5)
    large = policy.value_statistics(returns, 0.9 * returns, own)["explained_variance"]
    small = policy.value_statistics(1e-9 * returns, 0.9e-9 * returns, own)["explained_variance"]
    assert small.count == large.count == 25
    np.testing.assert_allclose(small.value, large.value, rtol=1e-5)


def choose(n, k):
    return np.prod([(n - i) / (i + 1) for i in range(k)]) if k <= n else 0.0


@pytest.mark.parametrize("seed", [0, 1])
def test_statistics_of_rows(seed):
    gold, proxy, own, calls, truncated, kept = row_arguments(seed)
    found = {name: np.asarray(x.value) for name, x in told_of_rows(gold, proxy, own, calls, truncated, kept).items()}
    grouped = gold.reshape(PROMPTS, MEMBERS)[kept[::MEMBERS]]
    passed = [
        np.mean([1 - choose(MEMBERS - int(c), k) / choose(MEMBERS, k) for c in grouped.sum(1)]) for k in (1, 2, 4)
    ]
    runs = [sum(own[row, t] and not own[row, t - 1] for t in range(1, SLOTS)) + own[row, 0] for row in range(ROWS)]
    lengths = own.sum(1)[kept]
    seen = proxy.reshape(PROMPTS, MEMBERS)[kept[::MEMBERS]]
    wanted = {
        "acting_performance": gold[kept].mean(),
        "proxy": proxy[kept].mean(),
        "reward_gap": (proxy - gold)[kept].mean(),
        "reward_part": [np.mean(gold[kept] ** 2), np.mean(gold[kept] / 2)],
        "success": (gold[kept] == 1).mean(),
        "pass_at": passed,
        "no_signal": np.mean([len(set(group)) == 1 for group in seen]),
        "group_std": seen.std(axis=1, ddof=1).mean(),
        "row_tokens": lengths.mean(),
        "turns": np.mean(np.array(runs)[kept]),
        "calls": calls[kept].mean(),
        "truncated": truncated[kept].mean(),
        "length_quantile": np.quantile(lengths, [0.1, 0.5, 0.9], method="inverted_cdf"),
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    assert 0 < found["no_signal"] < 1 < found["turns"]


def test_pass_at_k():
    assert rewards.powers_of_two(1) == (1,)
    assert rewards.powers_of_two(6) == (1, 2, 4, 6)
    one_of_eight = rewards.success_statistics(jnp.arange(8)[None] == 3, jnp.ones(1, bool))
    np.testing.assert_allclose(one_of_eight["pass_at"].value, [1 / 8, 2 / 8, 4 / 8, 1.0], rtol=1e-6)


def test_nothing_is_nan_where_there_is_nothing():
    r = cast(rows())
    nothing = {name: np.zeros_like(x) if x.dtype == bool else np.full_like(x, np.nan) for name, x in r.items()}
    for name, statistic in told(nothing).items():
        np.testing.assert_array_equal(statistic.count, 0, err_msg=name)
        np.testing.assert_array_equal(np.isfinite(statistic.value), True, err_msg=name)
    gold, proxy, own, calls, truncated, kept = row_arguments()
    of_rows = told_of_rows(np.full_like(gold, np.nan), proxy, own, calls, truncated, np.zeros_like(kept))
    for name, statistic in of_rows.items():
        np.testing.assert_array_equal(statistic.count, 0, err_msg=name)
        np.testing.assert_array_equal(np.isfinite(statistic.value), True, err_msg=name)


def test_a_policy_that_is_not_finite_is_told():
    r = cast(rows())
    r["log_ratio"], r["weight"] = r["log_ratio"] * np.nan, r["weight"] * np.nan
    found = told(r)
    for name in (
        "ratio_max",
        "ratio_quantile",
        "ratio_ess",
        "weight_cvar",
        "weight_q999",
        "weight_top_share",
        "weight_tail",
    ):
        assert np.isnan(found[name].value).all(), name
    assert np.isfinite(found["entropy"].value).all()


def test_what_was_seen_last():
    last = token_statistics.LastValues.zeros({"a": (3, 2), "b": ()})

    def step(last, turn):
        count = jnp.stack([turn + 1, turn % 2, 0 * turn])
        value = jnp.where(turn == 3, jnp.nan, 1.0 + turn) * jnp.ones((3, 2))
        found = {"a": token_statistics.Statistic(value, count), "b": token_statistics.Statistic(10.0 * turn, turn)}
        return last.update(found)

    last, said = jax.lax.scan(step, last, jnp.arange(5))
    nan = np.nan
    np.testing.assert_array_equal(said["a"][..., 1].T, [[1, 2, 3, nan, 5], [0, 2, 2, nan, 2], [0] * 5])
    np.testing.assert_array_equal(said["b"], [0, 10, 20, 30, 40])
    np.testing.assert_array_equal(last.values["a"][:, 0], [5, 2, 0])
    kept, only = last.update({"b": token_statistics.Statistic(jnp.float32(7), jnp.int32(1))})
    assert (set(only), set(kept.values)) == ({"b"}, {"a", "b"})


def test_slots_soon_after_a_result():
    given = np.array([[0, 1, 1, 0, 0, 0, 1, 0]], bool)
    own = np.array([[1, 0, 0, 1, 1, 1, 0, 1]], bool)
    assert token_statistics.soon_after(given, own, 1)[0].tolist() == [
        False,
        False,
        False,
        True,
        False,
        False,
        False,
        True,
    ]
    assert token_statistics.soon_after(given, own, 2)[0].tolist() == [
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
        token_statistics.counts_of(token_statistics.strata_masks(own, given, 2)), [5, 3, 2, 1, 3, 1, 0]
    )
    assert token_statistics.strata_masks(own).shape == (1, 1, 8)


def test_bigrams_of_results_are_counted_once_more_than_they_were():
    """Rows of tokens a b | c d, of which c and d are a tool's: c after b twice, d after c and after b once each."""
    tokens = np.array([[0, 1, 2, 3], [4, 1, 2, 0], [0, 1, 3, 0]])
    role = np.array([[PROMPT, POLICY, TOOL, TOOL], [PROMPT, POLICY, TOOL, POLICY], [PROMPT, POLICY, TOOL, END]])
    rows = Rows(**dict.fromkeys((f.name for f in dataclasses.fields(Rows)), None) | {"tokens": tokens, "role": role})
    counted = Bigrams.empty(5).add(rows)
    assert np.asarray(counted.counts).sum() == 4
    found = np.exp(counted.log_prob(rows))
    np.testing.assert_allclose(found[:, 0], 1.0)
    np.testing.assert_allclose(found[0, 1:], [1 / 5, 3 / 8, 2 / 6], rtol=1e-6)
    np.testing.assert_allclose(found[2, 2], 2 / 8, rtol=1e-6)
    large = Bigrams.empty(1000)
    assert large.counts.shape == (256, 256)
    many = rows.replace(tokens=tokens + 512)
    np.testing.assert_array_equal(large.add(many).counts, large.add(rows).counts)


EXTENT = RunDimensions(group_size=MEMBERS, slots=SLOTS, parts=("a", "b"), layers=("wte", "h/0"), every=5)


def test_the_table_has_the_channels_that_are_computed():
    declared = channels("full", FEATURES, EXTENT)
    assert declared.keys() == TABLE.keys()
    computed = jax.eval_shape(told, cast(rows())) | jax.eval_shape(told_of_rows, *row_arguments())
    assert {name: x.value.shape for name, x in computed.items()} == {name: declared[name].shape for name in computed}
    Learner(lambda key: key, lambda state, key, taps: (state, {}), channels=declared)  # one set of labels a dimension


def test_a_run_has_the_channels_of_what_it_has():
    full = channels("full", (), EXTENT)
    assert full["entropy"].dims == (("stratum", ("all",)),)
    assert not {"kl", "ratio_max", "explained_variance", "calls", "reward_part", "pair_margin"} & full.keys()
    assert channels("full", ("tools",), EXTENT)["entropy"].dims == (("stratum", token_statistics.STRATA),)
    assert "layer_gradient_norm" not in channels("full", (), RunDimensions(group_size=8, slots=3))
    basic = channels("basic", FEATURES, EXTENT)
    assert basic.keys() < channels("full", FEATURES, EXTENT).keys()
    assert {"performance", "entropy", "kl", "success", "x_grad"} < basic.keys()
    assert "changed_prompt_success" not in full
    assert channels("full", ("critic",), EXTENT)["critic_error"].dims[0][1] == ("collected", "held_out")
    unsplit = channels("full", ("critic",), dataclasses.replace(EXTENT, split=False))
    assert unsplit["critic_error"].dims[0][1] == ("collected", "fixed_prompts")
    assert (full["performance"].every, full["entropy"].every, full["shown_token"].monitored) == (5, 1, False)
    with pytest.raises(ValueError, match=r"features must be among tools, .*, not 'spoons'"):
        channels("full", ("spoons",), EXTENT)


def test_one_nan_among_many_is_the_largest():
    """XLA's CPU backend loses it from the largest of 4,096 entries."""
    x = jax.random.normal(jax.random.key(0), (64, 100)).at[3, 7].set(jnp.nan)
    told = jax.jit(policy.largest)
    assert np.isnan(told(x, jnp.ones(x.shape, bool)))
    assert told(x, jnp.arange(64)[:, None] >= 4 + jnp.zeros((1, 100))) == np.nanmax(np.asarray(x[4:]))
    assert told(x, jnp.zeros(x.shape, bool)) == 0


BASIC = """
acting_performance approx_kl calls clip_fraction clipped_fraction dual_clip_fraction entropy entropy_after_result
gradient_norm group_std kl learning_rate loss no_signal own_tokens params_norm performance performance_error proxy
ratio_mean reward_gap row_tokens success truncated turns update_norm warm_start_success x_grad x_mem x_used
"""
OF_A_CRITIC = """
critic_gradient_norm explained_variance score_explained_variance score_value_bias value_bias value_clip_fraction
value_loss
"""


def test_basic_telemetry_has_these_channels_and_no_others():
    """What stored runs and monitors rely on; a preset's own channels beside them."""
    found = {
        preset: set(getattr(learners, preset)("hop", telemetry="basic").channels)
        for preset in ("ppo_lm", "grpo", "dpo", "dapo")
    }
    basic = set(BASIC.split())
    assert found["ppo_lm"] == basic | set(OF_A_CRITIC.split())
    assert found["grpo"] == basic | {"kl_loss"}
    of_ratios = {"approx_kl", "clip_fraction", "dual_clip_fraction", "ratio_mean"}
    assert found["dpo"] == basic - of_ratios | {"pair_accuracy", "pair_margin"}
    assert found["dapo"] == basic - {"kl"}
