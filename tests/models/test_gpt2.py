"""Tests GPT-2 and its checkpoints against transformers, by tests/data/gpt2.

The data are written by experiments/language_models/transformers_reference.py.
"""

import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from directories import DATA, EXPERIMENTS
from safetensors.numpy import load_file, save_file

from jaxaudit.kernels.attention import attention_entropy
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.models.gpt2 import GPT2, Size

REFERENCE = DATA / "gpt2"
SHARDS = REFERENCE.with_name("gpt2_shards")
"""A GPT-2 with 48 rows for 40 tokens, 32 positions and the activation gelu_pytorch_tanh, written by transformers 5.17
with save_pretrained(max_shard_size="12KB"), and its logits."""
sys.path.insert(0, str(EXPERIMENTS / "language_models"))

MODEL = GPT2(40, 16, Size(16, 2, 2))


def test_logits_loss_gradients_and_steps_equal_those_of_transformers():
    import parity

    deviations = parity.deviations(REFERENCE)
    # A wrong weight decay, moment rate or schedule would exceed the last two bounds 30 times.
    bounds = (1e-6, 5e-6, 1e-5, 2e-6, 2e-3)
    assert all(value < bound for value, bound in zip(deviations.values(), bounds, strict=True)), deviations


def test_a_saved_checkpoint_has_the_tensors_of_the_loaded_one(tmp_path):
    params = gpt2_checkpoint.load(REFERENCE, MODEL)
    gpt2_checkpoint.save(tmp_path, params, MODEL, end_of_text=7)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 7
    gpt2_checkpoint.save(tmp_path, params, MODEL)
    written, original = load_file(tmp_path / "model.safetensors"), load_file(REFERENCE / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(np.array_equal(written[name], original[name]) for name in original)
    original_config, saved_config = (
        json.loads((folder / "config.json").read_text()) for folder in (REFERENCE, tmp_path)
    )
    assert {k: original_config[k] for k in saved_config if k in original_config and k != "architectures"} == {
        k: v for k, v in saved_config.items() if k in original_config and k != "architectures"
    }


def test_tensors_in_float16_without_the_name_prefix_can_be_read(tmp_path):
    original = load_file(REFERENCE / "model.safetensors")
    save_file(
        {k.removeprefix("transformer."): v.astype(np.float16) for k, v in original.items()}, tmp_path / "w.safetensors"
    )
    half, single = (gpt2_checkpoint.load(path, MODEL) for path in (tmp_path / "w.safetensors", REFERENCE))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), half, single)


@pytest.mark.exhaustive
def test_logits_of_a_sharded_padded_checkpoint_equal_transformers():
    reference = np.load(SHARDS / "reference.npz")
    for model in (MODEL, GPT2(40, 32, MODEL.size), GPT2(48, 32, MODEL.size)):
        params = gpt2_checkpoint.load(SHARDS, model)
        hidden, _ = gpt2.apply(model, params, reference["tokens"])
        expected = reference["logits"][..., : model.vocabulary]
        np.testing.assert_allclose(gpt2.logits(params, hidden), expected, atol=1e-5)
        assert np.abs(expected).max() > 1
    assert gpt2_checkpoint.positions(SHARDS) == gpt2_checkpoint.positions(SHARDS / "model.safetensors.index.json") == 32
    assert gpt2_checkpoint.positions(REFERENCE) == 16


def test_a_tied_output_layer_with_padded_rows_is_accepted(tmp_path):
    def pad(tensors):
        rows = np.concatenate([tensors["transformer.wte.weight"], np.full((8, 16), np.nan, np.float32)])
        tensors.update({"transformer.wte.weight": rows, "lm_head.weight": rows})

    write_changed_tensors(tmp_path, pad)
    params = gpt2_checkpoint.load(tmp_path, MODEL)
    jax.tree.map(np.testing.assert_array_equal, params, gpt2_checkpoint.load(REFERENCE, MODEL))


def write_changed_index(folder, change):
    """Copies the sharded checkpoint, with a changed index."""
    shutil.copytree(SHARDS, folder, dirs_exist_ok=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


SHARD = "model-00002-of-00003.safetensors"
INVALID_INDICES = {
    "outside": (
        lambda m: m.update(x="../model.safetensors"),
        "names '../model.safetensors', which is not a safetensors file",
    ),
    "absolute": (
        lambda m: m.update(x="/etc/passwd"),
        "names '/etc/passwd', which is not a safetensors file in the same folder",
    ),
    "no name": (lambda m: m.update(x=7), "has no weight_map"),
    "nothing": (lambda m: m.clear(), "has no weight_map"),
    "not there": (
        lambda m: m.update(x="y.safetensors"),
        "y.safetensors: there is no such file, although model.safetensors.index",
    ),
    "many": (lambda m: m.update({str(i): f"{i}.safetensors" for i in range(1001)}), "names 1004 files; at most 1000"),
    "missing": (lambda m: m.update(x=SHARD), f"says that {SHARD} has tensor 'x', but it does not"),
    "a shard left out": (
        lambda m: [m.pop(name) for name in list(m) if m[name] == SHARD],
        r"index.json has no tensor 'transformer\.h\.[a-z0-9._]*', which this model has",
    ),
}


@pytest.mark.parametrize("case", INVALID_INDICES)
def test_an_invalid_shard_index_is_refused_with_a_one_line_message(tmp_path, case):
    change, message = INVALID_INDICES[case]
    write_changed_index(tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        gpt2_checkpoint.load(tmp_path, MODEL)
    assert "\n" not in str(error.value)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    write_changed_index(tmp_path, lambda m: m.update(more="model-4.safetensors"))
    save_file({"transformer.ln_f.bias": np.zeros(16, np.float32)}, tmp_path / "model-4.safetensors")
    with pytest.raises(ValueError, match=r"00003.safetensors and .* both have tensor 'transformer\.ln_f\.bias'"):
        gpt2_checkpoint.load(tmp_path, MODEL)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "ckpt.pt"])
def test_a_pickled_checkpoint_is_refused_with_the_reason(tmp_path, name):
    (tmp_path / "training_args.bin").touch()
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    message = f"{name} is a pickle, which can run code when it is loaded, and is therefore not read: save the model as"
    with pytest.raises(ValueError, match="there is no such file; " + message if name != "ckpt.pt" else "is a pickle"):
        gpt2_checkpoint.load(tmp_path, MODEL)
    with pytest.raises(ValueError, match=message):
        gpt2_checkpoint.load(tmp_path / name, MODEL)


def write_changed_tensors(folder, change):
    """Writes the reference checkpoint with changed tensors."""
    tensors = dict(load_file(REFERENCE / "model.safetensors"))
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 100])


INVALID_TENSORS = {
    "one too many": (
        lambda t: t.update({"transformer.h.2.ln_1.bias": np.zeros(16, np.float32)}),
        "has tensor 'transformer.h.2.ln_1.bias', which this model does not have",
    ),
    "an output layer": (
        lambda t: t.update({"lm_head.weight": np.zeros((40, 16), np.float32)}),
        "tensor 'lm_head.weight' is not the embedding",
    ),
    "missing": (lambda t: t.pop("transformer.h.1.mlp.c_fc.bias"), "no tensor 'transformer.h.1.mlp.c_fc.bias'"),
    "shape": (
        lambda t: t.update({"transformer.wpe.weight": np.zeros((8, 16), np.float32)}),
        r"'transformer.wpe.weight' has shape \[8, 16\], but this model needs \[16, 16\]: choose a context, or a length",
    ),
    "another vocabulary": (
        lambda t: t.update({"transformer.wte.weight": np.zeros((51, 16), np.float32)}),
        r"has shape \[51, 16\], but this model needs \[40, 16\]: it has the vocabulary of another tokenizer",
    ),
    "fewer tokens": (
        lambda t: t.update({"transformer.wte.weight": np.zeros((39, 16), np.float32)}),
        r"has shape \[39, 16\], but this model needs \[40, 16\]: it has the vocabulary",
    ),
    "type": (
        lambda t: t.update({"transformer.ln_f.bias": np.zeros(16, np.int32)}),
        "'transformer.ln_f.bias' has dtype I32, not one of F64, F32",
    ),
    "not finite": (
        lambda t: t.update({"transformer.ln_f.bias": np.full(16, np.nan, np.float32)}),
        "'transformer.ln_f.bias' has entries that are not finite",
    ),
}


@pytest.mark.parametrize("case", INVALID_TENSORS)
def test_the_message_about_an_invalid_tensor_names_it(tmp_path, case):
    change, message = INVALID_TENSORS[case]
    write_changed_tensors(tmp_path, change)
    with pytest.raises(ValueError, match=message) as error:
        gpt2_checkpoint.load(tmp_path, MODEL)
    assert "\n" not in str(error.value)


def write_changed_header(path, change):
    """Changes the header of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


BIAS = "transformer.ln_f.bias"
DAMAGED_HEADERS = {
    "shape": (lambda h: h[BIAS].update(shape=[17]), rf"tensor '{BIAS}' has 64 bytes, not 68 for F32 \[17\]"),
    "hole": (
        lambda h: h[BIAS].update(data_offsets=[x + 4 for x in h[BIAS]["data_offsets"]]),
        "is damaged: tensor 'transformer[a-z0-9._]*' begins at byte",
    ),
    "offsets": (lambda h: h[BIAS].update(data_offsets=[0]), "header is damaged"),
    "words": (lambda h: h[BIAS].update(data_offsets=["0", "64"]), "header is damaged"),
    "no shape": (lambda h: h[BIAS].pop("shape"), "header is damaged"),
    "type": (lambda h: h[BIAS].update(dtype="F7"), f"tensor '{BIAS}' has dtype F7, not one of F64"),
}


@pytest.mark.parametrize("case", DAMAGED_HEADERS)
def test_a_damaged_header_is_refused_with_a_one_line_message(tmp_path, case):
    change, message = DAMAGED_HEADERS[case]
    shutil.copytree(REFERENCE, tmp_path, dirs_exist_ok=True)
    write_changed_header(tmp_path / "model.safetensors", change)
    with pytest.raises(ValueError, match=message) as error:
        gpt2_checkpoint.load(tmp_path, MODEL)
    assert "\n" not in str(error.value)


def test_old_attention_masks_are_ignored_and_trailing_bytes_refused(tmp_path):
    write_changed_tensors(
        tmp_path, lambda t: t.update({"transformer.h.0.attn.bias": np.ones((1, 1, 16, 16), np.uint8)})
    )
    gpt2_checkpoint.load(tmp_path, MODEL)
    with open(tmp_path / "model.safetensors", "ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match="has 4 bytes after its last tensor"):
        gpt2_checkpoint.load(tmp_path, MODEL)


def test_a_tied_output_layer_is_accepted(tmp_path):
    write_changed_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"]}))
    gpt2_checkpoint.load(tmp_path, MODEL)


def test_the_message_about_a_truncated_file_names_its_last_tensor(tmp_path):
    shutil.copytree(REFERENCE, tmp_path, dirs_exist_ok=True)
    truncate(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"truncated: it ends within tensor 'transformer\."):
        gpt2_checkpoint.load(tmp_path, MODEL)


DEEP = (200_000).to_bytes(8, "little") + b"[" * 200_000 + b" "


@pytest.mark.parametrize("content", [b"", b"abc", b"\x10" + b"\0" * 7 + b"{not json}      ", DEEP, bytes(2000)])
def test_a_file_that_is_not_safetensors_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file, or its header is damaged"):
        gpt2_checkpoint.load(tmp_path, MODEL)


def test_a_config_of_another_model_is_refused(tmp_path):
    shutil.copytree(REFERENCE, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"n_head": 4}, "n_head is 4, but this model has 2"),
        ({"n_layer": 3}, "n_layer is 3, but this model has 2"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu', but this model has 'gelu_new'"),
        ({"model_type": "llama"}, "model_type is 'llama', but this model has 'gpt2'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=message):
            gpt2_checkpoint.load(tmp_path, MODEL)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="not a JSON object of settings"):
        gpt2_checkpoint.load(tmp_path, MODEL)
    with pytest.raises(ValueError, match="there is no such file"):
        gpt2_checkpoint.load(tmp_path / "nothing", MODEL)


@pytest.mark.parametrize(("name", "millions"), [("124m", 124.44), ("355m", 354.82), ("774m", 774.03)])
def test_sizes_have_the_published_parameter_counts(name, millions):
    model = GPT2(50257, 1024, gpt2.SIZES[name])
    shapes = jax.eval_shape(lambda key: gpt2.init_params(model, key), jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) / 1e6 == pytest.approx(millions, abs=0.01)


@pytest.mark.exhaustive
def test_initial_weights_have_gpt2s_standard_deviations():
    model = GPT2(512, 64, gpt2.SIZES["nano"])
    params = jax.jit(lambda key: gpt2.init_params(model, key))(jax.random.key(0))
    layers = params["h"].layers
    for kernel, std in [
        (params["wte"]["embedding"], 0.02),
        (layers["attn"]["c_attn"]["kernel"], 0.02),
        (layers["mlp"]["c_proj"]["kernel"], 0.02 / np.sqrt(8)),
        (layers["attn"]["c_proj"]["kernel"], 0.02 / np.sqrt(8)),
    ]:
        assert float(jnp.std(kernel)) == pytest.approx(std, rel=0.03)
    assert not np.array_equal(layers["mlp"]["c_fc"]["kernel"][0], layers["mlp"]["c_fc"]["kernel"][1])


@pytest.mark.exhaustive
def test_remat_and_bfloat16_give_the_same_results_to_rounding():
    params = gpt2_checkpoint.load(REFERENCE, MODEL)
    tokens = np.arange(256, dtype=np.int32).reshape(16, 16) % 40

    def compiled(model):
        def loss(params):
            hidden, _ = gpt2.apply(model, params, tokens)
            return jnp.sum(hidden**2), hidden

        return jax.jit(jax.grad(loss, has_aux=True)).lower(params).compile()

    plain, with_remat = compiled(MODEL), compiled(MODEL.clone(remat=True))
    assert with_remat.memory_analysis().temp_size_in_bytes < 0.8 * plain.memory_analysis().temp_size_in_bytes
    (gradient, hidden), (remat_gradient, _) = plain(params), with_remat(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, remat_gradient)
    half = jax.jit(lambda params: gpt2.apply(MODEL.clone(dtype=jnp.bfloat16), params, tokens)[0])(params)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), hidden, atol=0.1)


def test_attention_entropy_of_uniform_and_sharp_attention():
    """Equal scores attend uniformly to all earlier tokens, of entropy log n; a dominant score has entropy zero."""
    same, entropy = np.zeros((1, 8, 2, 8), np.float32), jax.jit(attention_entropy)
    assert float(entropy(same, same)) == pytest.approx(np.mean(np.log(np.arange(1, 9))), rel=1e-5)
    sharp = same + np.float32(100 * np.eye(8))[None, :, None, :]
    assert float(entropy(sharp, sharp)) == pytest.approx(0.0, abs=1e-4)


def test_attention_is_causal():
    params = gpt2_checkpoint.load(REFERENCE, MODEL)
    tokens_a = np.arange(12)[None]
    tokens_b = np.where(tokens_a == 7, 39, tokens_a)
    apply = jax.jit(lambda tokens: gpt2.apply(MODEL, params, tokens)[0])
    before, after = np.asarray(apply(tokens_a)), np.asarray(apply(tokens_b))
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    assert (before[0, 7:] != after[0, 7:]).any(axis=1).all()


@pytest.mark.exhaustive
def test_cudnn_attention_has_the_arguments_of_the_default_attention(monkeypatch):
    """Without a GPU there is no cuDNN: JAX's implementation replaces it, with the same arguments."""
    implementations, attention = [], jax.nn.dot_product_attention

    def recording_attention(*arrays, implementation, **options):
        implementations.append(implementation)
        return attention(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", recording_attention)
    model = gpt2.GPT2(257, 64, gpt2.SIZES["micro"], jnp.bfloat16)
    params = gpt2.init_params(model, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 257)
    default, _ = gpt2.apply(model, params, tokens)
    assert implementations == []
    cudnn, _ = gpt2.apply(model.clone(attention="cudnn"), params, tokens)
    assert set(implementations) == {"cudnn"}
    error = np.linalg.norm(np.asarray(default - cudnn, np.float64)) / np.linalg.norm(np.asarray(default, np.float64))
    assert error < 1e-2
    packed, _ = gpt2.apply(model.clone(attention="cudnn"), params, tokens, first=jnp.zeros_like(tokens))
    np.testing.assert_array_equal(
        np.asarray(packed, np.float32), np.asarray(default, np.float32)
    )  # packed rows use the default
