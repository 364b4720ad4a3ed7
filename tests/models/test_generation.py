"""GPT-2 token by token against its forward pass, sampling against its definition, generation against transformers'."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fusion_emitters import emitters
from places import DATA, EXPERIMENTS

import jaxaudit as ja
from jaxaudit.kernels.attention import attention_entropy
from jaxaudit.models import gpt2, gpt2_checkpoint, sampling
from jaxaudit.models.gpt2 import GPT2, Size

DATA = DATA
sys.path.insert(0, str(EXPERIMENTS / "dialogues"))

MODEL = GPT2(40, 16, Size(16, 2, 2))
LONG = GPT2(20, 80, Size(16, 2, 2))
FOUND = ("stored log-probabilities from a forward pass's", "stored log-probabilities from transformers'")


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(lambda x: 4 * x, gpt2_checkpoint.load(DATA / "gpt2", MODEL))


@pytest.mark.parametrize("name", ["plain", "adapted"])
def test_greedy_generation_is_that_of_transformers(name):
    """`adapted` is generated from with its adapters apart, and was read by transformers as it is merged when saved."""
    import generation

    found = generation.deviations("tiny", generation.variants("tiny")[name], DATA / "generation" / f"{name}.npz")
    assert found["tokens that are others"] == 0
    assert found["tokens compared"] > 60
    assert found["rows that ended"] > 2
    assert all(found[one] < 1e-5 for one in FOUND), found


@functools.partial(jax.jit, static_argnums=(0, 3))
def token_by_token(model, params, tokens, begun, positions, first):
    """Hidden states of all slots, of which so many are prefilled: `[N, T, width]`."""
    slots = tokens.shape[1]
    unrolled = sampling.unstack_layers(params)
    given = (x[:, :begun] for x in (tokens, positions, first))
    token, position, start = given
    hidden, cache = sampling.prefill(model, unrolled, token, slots, position, start)

    def one(cache, slot):
        here = (x[:, slot] for x in (tokens, positions, first))
        found, cache = sampling.decode(model, unrolled, *here, slot, cache)
        return cache, found

    _, later = jax.lax.scan(one, cache, jnp.arange(begun, slots))
    return jnp.concatenate([hidden, later.swapaxes(0, 1)], axis=1)


def chunked(rows, slots):
    """Positions and first slots where every row begins anew somewhere else: `[rows, slots]` each."""
    begins = 3 + 7 * np.arange(rows)[:, None]
    first = np.where(np.arange(slots) < begins, 0, begins)
    return (np.arange(slots) - first).astype(np.int32), first.astype(np.int32)


@pytest.mark.parametrize("begun", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_token_by_token_is_the_forward_pass(begun):
    """More slots than one block has, some rows of which see nothing of the first blocks."""
    model_params = jax.tree.map(lambda x: 4 * x, gpt2.init_params(LONG, jax.random.key(0)))
    tokens = jax.random.randint(jax.random.key(1), (8, 70), 0, LONG.vocabulary)
    positions, first = chunked(8, 70)
    whole = jax.jit(functools.partial(gpt2.apply, LONG))(model_params, tokens, positions, first)[0]
    mine = token_by_token(LONG, model_params, tokens, begun, positions, first)
    scale = max(1.0, float(jnp.abs(gpt2.logits(model_params, whole)).max()))
    np.testing.assert_allclose(gpt2.logits(model_params, mine), gpt2.logits(model_params, whole), atol=1e-5 * scale)
    small = token_by_token(LONG, gpt2.init_params(LONG, jax.random.key(0)), tokens, begun, positions, first)
    plain = gpt2.apply(LONG, gpt2.init_params(LONG, jax.random.key(0)), tokens, positions, first)[0]
    np.testing.assert_allclose(small, plain, atol=1e-5)


@pytest.mark.exhaustive
def test_a_chunk_is_what_it_is_alone(params):
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 40)
    positions, first = chunked(2, 16)
    apply = jax.jit(functools.partial(gpt2.apply, MODEL))
    hidden, _ = apply(params, tokens, positions, first)
    for row in range(2):
        begin = 3 + 7 * row
        for part in (slice(0, begin), slice(begin, 16)):
            alone, _ = apply(params, tokens[row : row + 1, part])
            np.testing.assert_allclose(hidden[row, part], alone[0], atol=2e-5)
    assert np.abs(hidden - apply(params, tokens)[0])[0, 3:].max() > 0.1


@pytest.mark.exhaustive
def test_gradients_know_what_is_seen(params):
    """A loss on the second chunk moves nothing by the tokens of the first; defaults are positions in order."""
    tokens = jax.random.randint(jax.random.key(0), (1, 16), 0, 20).at[0, 3:].add(20)
    positions, first = chunked(1, 16)

    def loss(params, *how):
        return jnp.sum(gpt2.apply(MODEL, params, tokens, *how)[0][0, 3:] ** 3)

    gradient = jax.jit(jax.grad(loss))(params, positions, first)
    by_token = np.asarray(gradient["wte"]["embedding"])
    assert (by_token[:20] == 0).all()
    assert np.abs(by_token[20:]).max() > 0.1
    alone = jax.jit(jax.grad(lambda params: jnp.sum(gpt2.apply(MODEL, params, tokens[:, 3:])[0] ** 3)))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), gradient, alone)
    named = jax.jit(jax.grad(loss))(params, np.arange(16)[None], np.zeros((1, 16), np.int32))
    plain = jax.jit(jax.grad(loss))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), named, plain)


def test_the_entropy_of_attention_counts_what_is_seen():
    same = np.zeros((1, 6, 2, 8), np.float32)
    entropy = attention_entropy(same, same, np.array([[0, 0, 2, 2, 2, 5]]))
    assert float(entropy) == pytest.approx(np.mean(np.log([1, 2, 1, 2, 3, 1])), rel=1e-5)


@pytest.mark.exhaustive
def test_lanes_of_one_program_are_equal_to_the_last_bit(params):
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 40)
    positions, first = chunked(3, 16)
    lanes = jax.tree.map(lambda x: jnp.stack([x, 2 * x, x]), params)
    hidden = jax.vmap(lambda p: token_by_token(MODEL, p, tokens, 1, positions, first))(lanes)
    np.testing.assert_array_equal(hidden[0], hidden[2])
    assert not np.array_equal(hidden[0], hidden[1])
    written = jax.vmap(lambda p: ja.generate(MODEL, p, tokens[:, :4], jax.random.key(0), tokens=6))(lanes)
    np.testing.assert_array_equal(written[0][0], written[0][2])
    np.testing.assert_array_equal(written[1][0], written[1][2])


@pytest.mark.exhaustive
def test_a_write_under_lanes_stays_a_slice(params):
    """And copies no cache, as a scatter does, which a slot of each lane's own makes of it.

    It is compiled as for users: without fusion emitters XLA would make loops of scatters, and none would be found.
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
def test_half_precision_is_near(params):
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 40)
    positions, first = chunked(3, 16)
    half = MODEL.clone(dtype=jnp.bfloat16)
    small = jax.tree.map(lambda x: x / 4, params)
    mine = token_by_token(half, small, tokens, 4, positions, first)
    assert mine.dtype == jnp.bfloat16
    whole = token_by_token(MODEL, small, tokens, 4, positions, first)
    np.testing.assert_allclose(mine.astype(np.float32), whole, atol=0.1)


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
        # Among the two that top-k leaves, the likeliest has 4/7.
        (2, 0.5, ["1000", "0001", "1111", "1000"]),
    ],
)
def test_what_is_cut_off(top_k, top_p, kept):
    wanted = np.array([[sign == "1" for sign in row] for row in kept])
    for given in (top_p, jnp.float32(top_p)):
        left, mass = jax.jit(sampling.truncate_logits, static_argnums=1)(jnp.float32(LOGITS), top_k, given)
        np.testing.assert_array_equal(np.isfinite(left), wanted)
        np.testing.assert_array_equal(np.asarray(left)[wanted], np.float32(LOGITS)[wanted])
        np.testing.assert_allclose(mass, (np.exp(LOGITS) * ~wanted).sum(1), atol=1e-6)


@pytest.mark.exhaustive
def test_draws_have_the_models_chances(params):
    """At a temperature and cut off; log-probabilities are before the cut."""
    prompt = np.array([[3, 1, 4]])
    settings = {"tokens": 1, "temperature": 1.5, "top_k": 5}
    tokens, logs = ja.generate(MODEL, params, np.repeat(prompt, 20_000, 0), jax.random.key(0), **settings)
    logits = np.float64(gpt2.logits(params, gpt2.apply(MODEL, params, prompt)[0][0, -1])) / 1.5
    chances = np.exp(logits - np.log(np.exp(logits).sum()))
    np.testing.assert_allclose(np.exp(logs[:, -1]), chances[tokens[:, -1]], rtol=1e-4)
    counts = np.bincount(tokens[:, -1], minlength=40)
    left = np.where(chances >= np.sort(chances)[-5], chances, 0)
    expected = 20_000 * left / left.sum()
    assert (counts[left == 0] == 0).all()
    # Chi squared with 4 degrees of freedom; its quantile at 1 - 1e-5 is 28.5.
    assert ((counts - expected)[left > 0] ** 2 / expected[left > 0]).sum() < 28.5


@pytest.mark.exhaustive
def test_rows_end_and_do_not_disturb_each_other(params):
    prompts = np.array([[7, 2, 9, 9], [5, -1, -1, -1], [1, 2, -1, -1]])
    free, _ = ja.generate(MODEL, params, prompts, jax.random.key(3), tokens=8)
    end = int(free[1, 4])
    tokens, logs = (np.asarray(x) for x in ja.generate(MODEL, params, prompts, jax.random.key(3), tokens=8, end=end))
    for row, length in enumerate((4, 1, 2)):
        np.testing.assert_array_equal(tokens[row, :length], prompts[row, :length])
        own = np.asarray(free[row, length : length + 8])
        stop = length + (int(np.argmax(own == end)) + 1 if end in own else 8)
        np.testing.assert_array_equal(tokens[row, length:stop], free[row, length:stop])
        assert (tokens[row, stop:] == -1).all()
        assert (logs[row, length:stop] < 0).all()
        assert (logs[row, :length] == 0).all()
        assert (logs[row, stop:] == 0).all()
    assert (tokens[1] != -1).sum() <= 5


@pytest.mark.exhaustive
def test_no_token_is_computed_after_the_end_of_the_longest_row(params, monkeypatch):
    prompts, key = np.array([[7, 2, 9, 9], [5, -1, -1, -1]]), jax.random.key(3)
    free = np.asarray(ja.generate(MODEL, params, prompts, key, tokens=11))
    decode, turns = sampling.decode, []

    def counted(*arguments):
        jax.debug.callback(lambda: turns.append(1))
        return decode(*arguments)

    monkeypatch.setattr(sampling, "decode", counted)
    free = np.asarray(ja.generate(MODEL, params, prompts, key, tokens=12)[0])  # compiled with what counts
    jax.effects_barrier()
    assert len(turns) == 12
    own = np.stack([free[0, 4:16], free[1, 1:13]])
    last = np.array([[np.argmax(row == token) if token in row else 99 for row in own] for token in range(40)]).max(
        axis=1
    )
    end = int(np.argmin(last))
    turns.clear()
    tokens, _ = ja.generate(MODEL, params, prompts, key, tokens=12, end=end)
    jax.effects_barrier()
    assert len(turns) == last[end] + 1 < 12
    assert (np.asarray(tokens)[0] == end).any()


def test_that_all_are_over_is_of_all_lanes_and_not_batched():
    def loop(turns):
        """How many turns a loop takes whose only row is over after so many."""
        return jax.lax.while_loop(lambda c: ~sampling.all_finished((c >= turns)[None]), lambda c: c + 1, 0)

    assert loop(3) == 3
    np.testing.assert_array_equal(jax.vmap(jax.vmap(loop))(jnp.array([[2, 1], [4, 3]])), 4)
    np.testing.assert_array_equal(jax.vmap(loop)(jnp.array([3, 5, 1])), 5)


@pytest.mark.parametrize(
    ("prompts", "tokens", "sentence"),
    [
        ([1, 2], 4, "prompts must have two axes, \\[rows, tokens\\], not 1"),
        ([[1, 2]], 0, "tokens must be at least 1, not 0"),
        ([[1, -1, 2]], 4, "must have at least one token, and -1 only after its last token"),
        ([[-1, -1]], 4, "prompt must have at least one token"),
        ([[1, 40]], 4, "prompts must have tokens from 0 to 39, not from 1 to 40"),
        ([[1, 2, 3], [1, -1, -1]], 14, "prompts of up to 3 tokens and 14 more do not fit into the context of 16"),
    ],
)
def test_prompts_that_are_none(params, prompts, tokens, sentence):
    with pytest.raises(ValueError, match=sentence):
        ja.generate(MODEL, params, prompts, jax.random.key(0), tokens=tokens)
