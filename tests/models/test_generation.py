"""Tests decoding against the forward pass, sampling against its definition, and generation against transformers."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import DATA, EXPERIMENTS
from fusion_emitters import emitters

import jaxaudit as ja
from jaxaudit.kernels.attention import attention_entropy
from jaxaudit.models import gpt2, gpt2_checkpoint, sampling
from jaxaudit.models.gpt2 import GPT2, Size

DATA = DATA
sys.path.insert(0, str(EXPERIMENTS / "dialogues"))

MODEL = GPT2(40, 16, Size(16, 2, 2))
LONG = GPT2(20, 80, Size(16, 2, 2))
LOG_PROB_DEVIATIONS = ("stored log-probabilities from a forward pass's", "stored log-probabilities from transformers'")


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 4 * x, gpt2_checkpoint.load(DATA / "gpt2", MODEL))


@pytest.mark.parametrize("name", ["plain", "adapted"])
def test_greedy_generation_equals_that_of_transformers(name):
    """Case `adapted` generates with separate adapters; transformers read them merged into a saved checkpoint."""
    import generation

    deviations = generation.deviations("tiny", generation.variants("tiny")[name], DATA / "generation" / f"{name}.npz")
    assert deviations["tokens that are others"] == 0
    assert deviations["tokens compared"] > 60
    assert deviations["rows that ended"] > 2
    assert all(deviations[key] < 1e-5 for key in LOG_PROB_DEVIATIONS), deviations


@functools.partial(jax.jit, static_argnums=(0, 3))
def token_by_token(model, params, tokens, n_prefilled, positions, first):
    """Returns the hidden states `[N, T, width]` of all slots, the first `n_prefilled` of which are prefilled."""
    slots = tokens.shape[1]
    unrolled = sampling.unstack_layers(params)
    prefilled = (x[:, :n_prefilled] for x in (tokens, positions, first))
    token, position, start = prefilled
    hidden, cache = sampling.prefill(model, unrolled, token, slots, position, start)

    def decode_slot(cache, slot):
        inputs = (x[:, slot] for x in (tokens, positions, first))
        hidden_of_slot, cache = sampling.decode(model, unrolled, *inputs, slot, cache)
        return cache, hidden_of_slot

    _, later = jax.lax.scan(decode_slot, cache, jnp.arange(n_prefilled, slots))
    return jnp.concatenate([hidden, later.swapaxes(0, 1)], axis=1)


def chunked_positions(rows, slots):
    """Returns positions and first visible slots, `[rows, slots]` each; every row begins a chunk at a different slot."""
    begins = 3 + 7 * np.arange(rows)[:, None]
    first = np.where(np.arange(slots) < begins, 0, begins)
    return (np.arange(slots) - first).astype(np.int32), first.astype(np.int32)


@pytest.mark.parametrize("n_prefilled", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_decoding_token_by_token_equals_the_forward_pass(n_prefilled):
    """There are more slots than in a block, and some rows attend to nothing in the first blocks."""
    model_params = jax.tree.map(lambda x: 4 * x, gpt2.init_params(LONG, jax.random.key(0)))
    tokens = jax.random.randint(jax.random.key(1), (8, 70), 0, LONG.vocabulary)
    positions, first = chunked_positions(8, 70)
    forward = jax.jit(functools.partial(gpt2.apply, LONG))(model_params, tokens, positions, first)[0]
    decoded = token_by_token(LONG, model_params, tokens, n_prefilled, positions, first)
    scale = max(1.0, float(jnp.abs(gpt2.logits(model_params, forward)).max()))
    np.testing.assert_allclose(
        gpt2.logits(model_params, decoded), gpt2.logits(model_params, forward), atol=1e-5 * scale
    )
    small = token_by_token(LONG, gpt2.init_params(LONG, jax.random.key(0)), tokens, n_prefilled, positions, first)
    plain = gpt2.apply(LONG, gpt2.init_params(LONG, jax.random.key(0)), tokens, positions, first)[0]
    np.testing.assert_allclose(small, plain, atol=1e-5)


@pytest.mark.exhaustive
def test_a_chunk_in_a_row_equals_the_chunk_alone(params):
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 40)
    positions, first = chunked_positions(2, 16)
    apply = jax.jit(functools.partial(gpt2.apply, MODEL))
    hidden, _ = apply(params, tokens, positions, first)
    for row in range(2):
        begin = 3 + 7 * row
        for part in (slice(0, begin), slice(begin, 16)):
            alone, _ = apply(params, tokens[row : row + 1, part])
            np.testing.assert_allclose(hidden[row, part], alone[0], atol=2e-5)
    assert np.abs(hidden - apply(params, tokens)[0])[0, 3:].max() > 0.1


@pytest.mark.exhaustive
def test_gradients_of_a_chunk_ignore_earlier_chunks(params):
    """A loss on the second chunk has no gradient by the first one's tokens; default positions are in order."""
    tokens = jax.random.randint(jax.random.key(0), (1, 16), 0, 20).at[0, 3:].add(20)
    positions, first = chunked_positions(1, 16)

    def loss(params, *arguments):
        return jnp.sum(gpt2.apply(MODEL, params, tokens, *arguments)[0][0, 3:] ** 3)

    gradient = jax.jit(jax.grad(loss))(params, positions, first)
    by_token = np.asarray(gradient["wte"]["embedding"])
    assert (by_token[:20] == 0).all()
    assert np.abs(by_token[20:]).max() > 0.1
    alone = jax.jit(jax.grad(lambda params: jnp.sum(gpt2.apply(MODEL, params, tokens[:, 3:])[0] ** 3)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), gradient, alone)
    explicit = jax.jit(jax.grad(loss))(params, np.arange(16)[None], np.zeros((1, 16), np.int32))
    default = jax.jit(jax.grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), explicit, default)


def test_attention_entropy_counts_visible_slots_only():
    same = np.zeros((1, 6, 2, 8), np.float32)
    entropy = attention_entropy(same, same, np.array([[0, 0, 2, 2, 2, 5]]))
    assert float(entropy) == pytest.approx(np.mean(np.log([1, 2, 1, 2, 3, 1])), rel=1e-5)


@pytest.mark.exhaustive
def test_equal_lanes_of_a_program_are_equal_bitwise(params):
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 40)
    positions, first = chunked_positions(3, 16)
    lanes = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x]), params)
    hidden = jax.vmap(lambda p: token_by_token(MODEL, p, tokens, 1, positions, first))(lanes)
    np.testing.assert_array_equal(hidden[0], hidden[2])
    assert not np.array_equal(hidden[0], hidden[1])
    generated = jax.vmap(lambda p: ja.generate(MODEL, p, tokens[:, :4], jax.random.key(0), tokens=6))(lanes)
    np.testing.assert_array_equal(generated[0][0], generated[0][2])
    np.testing.assert_array_equal(generated[1][0], generated[1][2])


@pytest.mark.exhaustive
def test_writing_the_cache_under_vmap_is_no_scatter(params):
    """A scatter, which results if lanes write at different slots, copies the cache.

    The program is compiled as for users: without fusion emitters XLA turns scatters into loops, which hides them.
    """
    lanes = jax.tree.map(lambda x: jnp.stack([x] * 5), params)

    def decoded(params, token, slot):
        unrolled = sampling.unstack_layers(params)
        _, cache = sampling.prefill(MODEL, unrolled, jnp.zeros((3, 1), jnp.int32), 16)
        return sampling.decode(MODEL, unrolled, token, token, 0 * token, slot, cache)

    def scatters(slots, axis):
        lowered = jax.jit(jax.vmap(decoded, in_axes=(0, None, axis))).lower(lanes, np.zeros(3, np.int32), slots)
        return lowered.compile(emitters(True)).as_text().count(" scatter(")

    assert scatters(np.int32(5), None) == 0
    assert scatters(np.arange(5), 0) > 0


@pytest.mark.exhaustive
def test_decoding_in_bfloat16_is_near_float32(params):
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 40)
    positions, first = chunked_positions(3, 16)
    half = MODEL.clone(dtype=jnp.bfloat16)
    small = jax.tree.map(lambda x: x / 4, params)
    half_hidden = token_by_token(half, small, tokens, 4, positions, first)
    assert half_hidden.dtype == jnp.bfloat16
    hidden = token_by_token(MODEL, small, tokens, 4, positions, first)
    np.testing.assert_allclose(half_hidden.astype(np.float32), hidden, atol=0.1)


LOGITS = np.log([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25], [0.97, 0.01, 0.01, 0.01]])


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, ["1111", "1111", "1111", "1111"]),
        (2, 1.0, ["1100", "0011", "1111", "1111"]),
        (1, 1.0, ["1000", "0001", "1111", "1000"]),
        (9, 1.0, ["1111", "1111", "1111", "1111"]),
        (0, 0.75, ["1110", "0111", "1111", "1000"]),
        (0, 0.65, ["1100", "0011", "1111", "1000"]),
        (0, 1e-9, ["1000", "0001", "1111", "1000"]),
        # Of the two tokens that top-k keeps, the likeliest has probability 4/7.
        (2, 0.5, ["1000", "0001", "1111", "1000"]),
    ],
)
def test_truncate_logits_keeps_the_top_k_within_top_p(top_k, top_p, kept):
    expected = np.array([[bit == "1" for bit in row] for row in kept])
    for top_p_value in (top_p, jnp.float32(top_p)):
        truncated, mass = jax.jit(sampling.truncate_logits, static_argnums=1)(jnp.float32(LOGITS), top_k, top_p_value)
        np.testing.assert_array_equal(np.isfinite(truncated), expected)
        np.testing.assert_array_equal(np.asarray(truncated)[expected], np.float32(LOGITS)[expected])
        np.testing.assert_allclose(mass, (np.exp(LOGITS) * ~expected).sum(1), atol=1e-6)


@pytest.mark.exhaustive
def test_sampled_tokens_have_the_models_probabilities(params):
    """Samples at a temperature with top-k; log-probabilities are those before truncation."""
    prompt = np.array([[3, 1, 4]])
    settings = {"tokens": 1, "temperature": 1.5, "top_k": 5}
    tokens, log_probs = ja.generate(MODEL, params, np.repeat(prompt, 20_000, 0), jax.random.key(0), **settings)
    logits = np.float64(gpt2.logits(params, gpt2.apply(MODEL, params, prompt)[0][0, -1])) / 1.5
    probs = np.exp(logits - np.log(np.exp(logits).sum()))
    np.testing.assert_allclose(np.exp(log_probs[:, -1]), probs[tokens[:, -1]], rtol=1e-4)
    counts = np.bincount(tokens[:, -1], minlength=40)
    kept = np.where(probs >= np.sort(probs)[-5], probs, 0)
    expected = 20_000 * kept / kept.sum()
    assert (counts[kept == 0] == 0).all()
    # Chi squared with 4 degrees of freedom; its quantile at 1 - 1e-5 is 28.5.
    assert ((counts - expected)[kept > 0] ** 2 / expected[kept > 0]).sum() < 28.5


@pytest.mark.exhaustive
def test_rows_stop_at_the_end_token_independently(params):
    prompts = np.array([[7, 2, 9, 9], [5, -1, -1, -1], [1, 2, -1, -1]])
    unended, _ = ja.generate(MODEL, params, prompts, jax.random.key(3), tokens=8)
    end = int(unended[1, 4])
    tokens, log_probs = (
        np.asarray(x) for x in ja.generate(MODEL, params, prompts, jax.random.key(3), tokens=8, end=end)
    )
    for row, length in enumerate((4, 1, 2)):
        np.testing.assert_array_equal(tokens[row, :length], prompts[row, :length])
        response = np.asarray(unended[row, length : length + 8])
        stop = length + (int(np.argmax(response == end)) + 1 if end in response else 8)
        np.testing.assert_array_equal(tokens[row, length:stop], unended[row, length:stop])
        assert (tokens[row, stop:] == -1).all()
        assert (log_probs[row, length:stop] < 0).all()
        assert (log_probs[row, :length] == 0).all()
        assert (log_probs[row, stop:] == 0).all()
    assert (tokens[1] != -1).sum() <= 5


@pytest.mark.exhaustive
def test_generation_stops_when_the_longest_row_has_ended(params, monkeypatch):
    prompts, key = np.array([[7, 2, 9, 9], [5, -1, -1, -1]]), jax.random.key(3)
    unended = np.asarray(ja.generate(MODEL, params, prompts, key, tokens=11))
    decode, turns = sampling.decode, []

    def counting_decode(*arguments):
        jax.debug.callback(lambda: turns.append(1))
        return decode(*arguments)

    monkeypatch.setattr(sampling, "decode", counting_decode)
    unended = np.asarray(ja.generate(MODEL, params, prompts, key, tokens=12)[0])  # compiled with the counter
    jax.effects_barrier()
    assert len(turns) == 12
    responses = np.stack([unended[0, 4:16], unended[1, 1:13]])
    last = np.array(
        [[np.argmax(row == token) if token in row else 99 for row in responses] for token in range(40)]
    ).max(axis=1)
    end = int(np.argmin(last))
    turns.clear()
    tokens, _ = ja.generate(MODEL, params, prompts, key, tokens=12, end=end)
    jax.effects_barrier()
    assert len(turns) == last[end] + 1 < 12
    assert (np.asarray(tokens)[0] == end).any()


def test_all_finished_is_reduced_over_all_vmapped_lanes():
    def loop(turns):
        """Returns the number of turns of a loop whose only row ends after `turns` of them."""
        return jax.lax.while_loop(lambda c: ~sampling.all_finished((c >= turns)[None]), lambda c: c + 1, 0)

    assert loop(3) == 3
    np.testing.assert_array_equal(jax.vmap(jax.vmap(loop))(jnp.array([[2, 1], [4, 3]])), 4)
    np.testing.assert_array_equal(jax.vmap(loop)(jnp.array([3, 5, 1])), 5)


@pytest.mark.parametrize(
    ("prompts", "tokens", "message"),
    [
        ([1, 2], 4, "prompts must have two axes, \\[rows, tokens\\], not 1"),
        ([[1, 2]], 0, "tokens must be at least 1, not 0"),
        ([[1, -1, 2]], 4, "must have at least one token, and -1 only after its last token"),
        ([[-1, -1]], 4, "prompt must have at least one token"),
        ([[1, 40]], 4, "prompts must have tokens from 0 to 39, not from 1 to 40"),
        ([[1, 2, 3], [1, -1, -1]], 14, "prompts of up to 3 tokens and 14 more do not fit into the context of 16"),
    ],
)
def test_invalid_prompts_are_refused_with_a_message(params, prompts, tokens, message):
    with pytest.raises(ValueError, match=message):
        ja.generate(MODEL, params, prompts, jax.random.key(0), tokens=tokens)
