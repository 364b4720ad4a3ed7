"""Tests LoRA adapters: what they compute, their gradients, and how they are named, shared, merged and saved."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import DATA

from jaxaudit.models import gpt2, gpt2_checkpoint, sampling
from jaxaudit.models.gpt2 import GPT2, Size
from jaxaudit.runtime.paths import matches, paths_of

pytestmark = pytest.mark.exhaustive

MODEL = GPT2(40, 16, Size(16, 2, 2))
TOKENS = np.arange(20, dtype=np.int32).reshape(2, 10)


@pytest.fixture(scope="module")
def base():
    return gpt2_checkpoint.load(DATA / "gpt2", MODEL)


def random_adapters(seed=0):
    """Returns adapters with random entries, which change the model."""
    adapters, rng = gpt2.init_adapters(MODEL, 3, jax.random.key(0)), np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.float32(0.1 * rng.normal(size=x.shape)), adapters)


@jax.jit
def hidden_of(params):
    return gpt2.apply(MODEL, params, TOKENS)[0]


def test_initial_adapters_change_nothing_and_are_named_by_layer(base):
    adapters = gpt2.init_adapters(MODEL, 3, jax.random.key(0))
    np.testing.assert_array_equal(hidden_of(gpt2.Adapted(base, adapters)), hidden_of(base))
    assert "policy/h/1/attn/c_attn/a" in paths_of(adapters, "policy")
    assert sum(matches("policy/h/1", path) for path in paths_of(adapters, "policy")) == 8
    a = adapters["h"].layers["mlp"]["c_proj"]["a"]
    assert a.shape == (2, 64, 3)
    assert 0.9 / 8 < float(jnp.abs(a).max()) <= 1 / 8


def test_an_adapted_weight_changes_by_a_b_times_alpha_over_rank(base):
    """Compares `merged` with weights that are changed in float64, and hidden states of both with the adapters'."""
    adapted = gpt2.Adapted(base, random_adapters(), alpha=6.0)
    weights = {name: x.copy() for name, x in gpt2_checkpoint.tensors(base).items()}
    for path in gpt2.LORA_LAYERS:
        part, name = path.split("/")
        adapter = adapted.adapters["h"].layers[part][name]
        for layer in range(2):
            change = 2.0 * np.float64(adapter["a"][layer]) @ np.float64(adapter["b"][layer])
            weights[f"transformer.h.{layer}.{part}.{name}.weight"] += change.astype(np.float32)
    merged = gpt2_checkpoint.tensors(gpt2.merged(adapted))
    assert merged.keys() == weights.keys()
    for name, expected in weights.items():
        np.testing.assert_allclose(merged[name], expected, atol=1e-7, err_msg=name)
    hidden = hidden_of(adapted)
    np.testing.assert_allclose(hidden, hidden_of(gpt2.merged(adapted)), atol=1e-5)
    assert np.abs(hidden - hidden_of(base)).max() > 0.01


def test_prefill_and_decode_with_adapters_equal_the_forward_pass(base):
    adapted = gpt2.Adapted(base, random_adapters())
    hidden = hidden_of(adapted)
    unrolled = sampling.unstack_layers(adapted)
    first, cache = sampling.prefill(MODEL, unrolled, TOKENS[:, :9], 10)
    np.testing.assert_allclose(first, hidden[:, :9], atol=1e-5)
    position = np.full(2, 9)
    last, _ = sampling.decode(MODEL, unrolled, TOKENS[:, 9], position, 0 * position, 9, cache)
    np.testing.assert_allclose(last, hidden[:, 9], atol=1e-5)


def test_gradients_of_lanes_with_a_shared_base_follow_from_merged_ones(base):
    """By the chain rule the gradient is scale (gradient by W) b' for `a`, and scale a' (gradient by W) for `b`."""
    lanes = [random_adapters(0), random_adapters(1)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *lanes)

    def loss(params):
        return jnp.sum(gpt2.apply(MODEL, params, TOKENS)[0] ** 3)

    adapter_gradient = jax.grad(lambda adapters, base: loss(gpt2.Adapted(base, adapters)))
    gradients = jax.jit(jax.vmap(adapter_gradient, in_axes=(0, None)))(stacked, base)
    by_merged = jax.jit(jax.grad(loss))
    for lane, adapters in enumerate(lanes):
        by_weights = by_merged(gpt2.merged(gpt2.Adapted(base, adapters)))["h"].layers
        for path in gpt2.LORA_LAYERS:
            part, name = path.split("/")
            adapter, gradient = (tree["h"].layers[part][name] for tree in (adapters, gradients))
            scaled = 16 / 3 * np.float64(by_weights[part][name]["kernel"])
            by_a, by_b = scaled @ np.swapaxes(adapter["b"], 1, 2), np.swapaxes(adapter["a"], 1, 2) @ scaled
            for letter, expected in (("a", by_a), ("b", by_b)):
                assert np.abs(gradient[letter][lane] - expected).max() < 1e-4 * np.abs(expected).max(), (path, letter)


def test_merged_adapters_are_saved_and_loaded_as_a_checkpoint(base, tmp_path):
    adapted = gpt2.Adapted(base, random_adapters())
    gpt2_checkpoint.save(tmp_path, gpt2.merged(adapted), MODEL)
    loaded = gpt2_checkpoint.load(tmp_path, MODEL)
    np.testing.assert_allclose(hidden_of(loaded), hidden_of(adapted), atol=1e-5)
