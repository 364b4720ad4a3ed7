"""GPT-2 trained on text with AdamW, as the paper's Table S3 has it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jaxaudit.core.learner import Channel, Learner
from jaxaudit.core.optimizer import SECOND_MOMENT, Adam, Optimizer, warmup_decay
from jaxaudit.core.taps import Taps
from jaxaudit.core.task_kinds import fitting
from jaxaudit.kernels.coherence import CoherenceSum, dominant_share
from jaxaudit.kernels.cross_entropy import CrossEntropy, cross_entropy
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.telemetry import when_due
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.runtime import registry
from jaxaudit.runtime.paths import groups_of, squares_by_group
from jaxaudit.text import Corpus, Text


def draw(key: jax.Array, tokens: jax.Array, batch: int, length: int) -> jax.Array:
    """Sequences of `tokens` `[N]` that begin anywhere, independently: int32 `[batch, length]`."""
    starts = jax.random.randint(key, (batch,), 0, tokens.shape[0] - length + 1)
    return jax.vmap(lambda start: jax.lax.dynamic_slice(tokens, (start,), (length,)))(starts).astype(jnp.int32)


def evenly_spaced(tokens: np.ndarray, count: int, length: int) -> np.ndarray:
    """`count` sequences of `tokens` `[N]`, evenly spaced, which do not overlap if they fit: `[count, length]`."""
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return np.stack([tokens[start : start + length] for start in starts])


Params = gpt2.Params


@dataclass(frozen=True)
class LanguageModelSettings:
    """What GPT-2 is trained with; the defaults are Table S3's and section S4's.

    Attributes:
      size: of the model.
      context: tokens a sequence has.
      positions: places the model has an embedding for, at least the context; 0: as many. GPT-2's files have 1024, of
        which the first ones are taken.
      batch_size: sequences in a step.
      accumulation: microbatches a step's sequences are dealt with in; x_grad is measured over them, from two on.
      learning_rate: AdamW's, at its peak.
      warmup: share of the run in which the rate rises.
      final_rate: what the cosine falls to, as a share of the peak.
      beta1, beta2, epsilon: AdamW's.
      weight_decay: of kernels and embeddings, not of biases and norms.
      max_grad_norm: threshold on the gradient's global norm.
      precision: of activations and products; parameters are float32.
      attention: "xla"; or "cudnn", cuDNN's fused attention, in bfloat16 on NVIDIA's GPUs.
      remat: layers are computed again in the backward pass, which takes less memory and more time.
      checkpoint: a folder or safetensors file with GPT-2's parameters to begin with, of which rows that fill its
        vocabulary up are left out; "": random ones.
      held_out: sequences whose mean loss, negative, is the performance: the same ones in every lane and step.
      evaluations: how often in a run the validation perplexity is measured, evenly spaced; 0: never.
      validation: the most sequences it is of, evenly spaced; 0: all of the corpus's validation text.
      gram: whether "full" telemetry has the dominant share of the microbatches' gradients, which takes as much memory
        as all of them.
      telemetry: "basic", or "full", which adds norms by layer, the noise scale, logits, attention and second moments.
    """

    size: Literal["micro", "nano", "mini", "124m", "355m", "774m"] = "124m"
    context: int = 1024
    positions: int = 0
    batch_size: int = 32
    accumulation: int = 4
    learning_rate: float = 5e-4
    warmup: float = 0.02
    final_rate: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    precision: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["xla", "cudnn"] = "xla"
    remat: bool = False
    checkpoint: str = field(default="", metadata={"path": True})
    held_out: int = 8
    evaluations: int = 10
    validation: int = 0
    gram: bool = True
    telemetry: str = "full"

    def __post_init__(self):
        checks.at_least_one(self, "context", "batch_size", "accumulation", "held_out")
        checks.not_negative(self, "positions", "weight_decay", "evaluations", "validation")
        checks.positive(self, "learning_rate", "epsilon", "max_grad_norm")
        checks.fractions(self, "warmup", "final_rate")
        checks.below_one(self, "beta1", "beta2")
        checks.telemetry(self.telemetry)
        checks.one_of(self, size=tuple(gpt2.SIZES), precision=("float32", "bfloat16"), attention=("xla", "cudnn"))
        if self.attention == "cudnn" and self.precision != "bfloat16":
            raise ValueError("attention 'cudnn' needs precision 'bfloat16'")
        if 0 < self.positions < self.context:
            raise ValueError(f"positions must be at least the context, {self.context}, not {self.positions}")
        if self.batch_size % self.accumulation:
            raise ValueError(f"accumulation {self.accumulation} does not divide the batch_size {self.batch_size}")

    @property
    def step_tokens(self) -> int:
        """The number of tokens that are predicted in one step."""
        return self.batch_size * self.context


@struct.dataclass
class Data:
    """What all lanes read: text, uint16, and the parameters they begin with.

    Attributes:
      train: `[N]`.
      held_out: `[held_out, context + 1]`.
      validation: `[M, context + 1]`.
      second_corpus: `[S]`, or None.
      start: a checkpoint's parameters, float32; None: every lane begins with random ones.
    """

    train: Any
    held_out: Any
    validation: Any
    second_corpus: Any
    start: Any = None


@struct.dataclass
class LanguageModelState:
    """What a lane of the language model carries: parameters and the optimizer's state."""

    params: Any
    optimizer: Any


class LanguageModel:
    """One step: read a batch, add up its microbatches' gradients, update; then look at the held-out text.

    Args:
      vocabulary: of the corpus.
      settings: as given.
      end_of_text: the token that ends a document; the vocabulary's last unless given.
    """

    def __init__(self, vocabulary: int, settings: LanguageModelSettings, end_of_text: int | None = None):
        self.settings = settings
        self.end_of_text = vocabulary - 1 if end_of_text is None else end_of_text
        self.model = model_of(vocabulary, settings)
        self.observing = self.model.clone(observe=settings.telemetry == "full")
        self.optimizer = Optimizer(
            Adam(
                (settings.beta1, settings.beta2),
                settings.epsilon,
                (optax.add_decayed_weights(settings.weight_decay, decays),),
            ),
            warmup_decay(settings.learning_rate, settings.warmup, "cosine", settings.final_rate),
            settings.max_grad_norm,
            outside=settings.warmup,
        )

    def init_params(self, key: jax.Array) -> Params:
        return gpt2.init_params(self.model, key)

    def init(self, key: jax.Array, data: Data) -> LanguageModelState:
        params = self.init_params(key) if data.start is None else data.start
        return LanguageModelState(params, self.optimizer.init(params))

    def save(self, folder: Path, state: LanguageModelState, data: Data) -> None:
        """Writes the model as a folder that transformers reads."""
        gpt2_checkpoint.save(folder, state.params, self.model, self.end_of_text)

    def step(
        self, state: LanguageModelState, key: jax.Array, taps: Taps
    ) -> tuple[LanguageModelState, dict[str, jax.Array]]:
        before, optimizer = self.optimizer.disturb(state.params, state.optimizer, taps, self.init_params)
        tokens = self.read(key, taps)
        gradient, telemetry = self.gradient(before, tokens, taps)
        loss = telemetry["loss"]
        gradient, used = self.optimizer.gradient(before, gradient, taps, loss=loss)
        params, optimizer, update = self.optimizer.follow(before, optimizer, gradient, used, taps, loss=loss)
        params, optimizer = self.optimizer.finish(params, optimizer, taps, self.init_params)
        held_out, entropies = self.losses(self.observing, params, taps.data.held_out.astype(jnp.int32))
        telemetry |= {
            "performance": -held_out.loss,
            "validation_perplexity": when_due(
                taps, self.settings.evaluations, lambda: jnp.exp(self.validation_loss(params, taps.data.validation))
            ),
            "learning_rate": update.learning_rate,
            "gradient_norm": update.gradient_norm,
            "clipped_fraction": update.clipped,
            "x_mem": update.persistence,
            "x_used": update.used,
            "params_norm": optax.tree.norm(params),
            "update_norm": update.update_norm,
        }
        if self.settings.telemetry == "full":
            telemetry |= {
                "layer_gradient_norm": jnp.sqrt(squares_by_group(gradient)),
                "layer_update_norm": jnp.sqrt(squares_by_group(jax.tree.map(jnp.subtract, params, before))),
                "layer_params_norm": jnp.sqrt(squares_by_group(params)),
                "logit_scale": jnp.sqrt(held_out.square),
                "attention_entropy": entropies,
                **second_moment(optimizer),
            }
        return LanguageModelState(params, optimizer), telemetry

    def read(self, key: jax.Array, taps: Taps) -> jax.Array:
        """A batch of text, int32 `[batch_size, context + 1]`, disturbed or not."""
        settings, data = self.settings, taps.data
        size = settings.batch_size, settings.context + 1
        offered: dict[str, Any] = {"mask": self.end_of_text, "vocabulary": self.model.vocabulary}
        if data.second_corpus is not None:
            offered["second_corpus"] = lambda key: draw(key, data.second_corpus, *size)
        return taps("tokens", draw(key, data.train, *size), **offered)

    def gradient(self, params: Params, tokens: jax.Array, taps: Taps) -> tuple[Params, dict[str, jax.Array]]:
        """The mean gradient of a batch, and what its microbatches' gradients tell, all taken at one point."""
        settings = self.settings
        smoothing = taps("label_smoothing", jnp.zeros(()))
        microbatches = tokens.reshape(settings.accumulation, -1, tokens.shape[1])

        def loss(params: Params, tokens: jax.Array, taps: Taps) -> tuple[jax.Array, jax.Array]:
            found = self.losses(self.model, params, tokens, smoothing)[0].loss
            return taps("objective", found), found

        gradient_and_value = jax.grad(loss, has_aux=True)
        if settings.accumulation == 1:
            gradient, value = gradient_and_value(params, tokens, taps)
            return gradient, {"loss": value, "x_grad": jnp.float32(jnp.nan)}

        def one(taps: Taps, total: CoherenceSum, tokens: jax.Array):
            gradient, value = gradient_and_value(params, tokens, taps)
            return total.add(gradient), (value, gradient if settings.telemetry == "full" and settings.gram else None)

        total, (values, gradients) = taps.scan(one, CoherenceSum.zeros(params), microbatches)
        telemetry = {"loss": jnp.mean(values), "x_grad": total.mean_pairwise_cosine()}
        if settings.telemetry == "full":
            noise_scale = total.noise_scale(settings.batch_size // settings.accumulation).noise_scale
            telemetry |= {"gradient_noise_scale": noise_scale}
            telemetry |= {"x_grad_dominant": dominant_share(gradients)} if settings.gram else {}
        return jax.tree.map(lambda g: g / settings.accumulation, total.gradient_sum), telemetry

    def losses(
        self, model: gpt2.GPT2, params: Params, tokens: jax.Array, smoothing: jax.Array | float = 0.0
    ) -> tuple[CrossEntropy, jax.Array]:
        """Mean cross entropy, in nats, of predicting each next token of `[B, T + 1]`; and attention's entropies."""
        hidden, entropies = gpt2.apply(model, params, tokens[:, :-1])
        hidden = hidden.reshape(-1, hidden.shape[-1])
        weights = jnp.full(hidden.shape[0], 1.0 / hidden.shape[0])
        embedding = gpt2.embedding(params).astype(hidden.dtype)
        return cross_entropy(hidden, embedding, tokens[:, 1:].reshape(-1), weights, smoothing), entropies

    def validation_loss(self, params: Params, sequences: jax.Array) -> jax.Array:
        """Mean loss over sequences `[M, T + 1]`, as many at a time as are held out."""
        at_a_time = min(self.settings.held_out, sequences.shape[0])

        def loss(row: jax.Array) -> jax.Array:
            return self.losses(self.model, params, row[None].astype(jnp.int32))[0].loss

        return jnp.mean(jax.lax.map(loss, sequences, batch_size=at_a_time))


def model_of(vocabulary: int, settings: LanguageModelSettings) -> gpt2.GPT2:
    size, dtype = gpt2.SIZES[settings.size], jnp.dtype(settings.precision)
    context = settings.positions or settings.context
    return gpt2.GPT2(vocabulary, context, size, dtype, settings.remat, attention=settings.attention)


def decays(params: Params) -> Any:
    """Which parameters weight decay acts on: kernels and embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def second_moment(optimizer: Any) -> dict[str, jax.Array]:
    """Statistics of Adam's second moment over all parameters: the root of its mean, and the share that is tiny."""
    (moments,) = (found for name in SECOND_MOMENT for _, found in optax.tree.get_all_with_path(optimizer, name))
    leaves = jax.tree.leaves(moments)
    count = sum(leaf.size for leaf in leaves)
    return {
        "second_moment_root_mean": jnp.sqrt(sum(jnp.sum(leaf) for leaf in leaves) / count),
        "second_moment_tiny_fraction": sum(jnp.sum(leaf < TINY) for leaf in leaves) / count,
    }


TINY = 1e-16
"""A second moment whose root is below Adam's usual epsilon, 1e-8: the step no longer adapts to the gradient."""


def language_model(task: Any = "python-stdlib", **settings: Any) -> Learner:
    """GPT-2 on a text: `language_model("python-stdlib", size="nano", context=128, batch_size=8)`.

    Args:
      task: a corpus's name, or a task that gives a text, e.g. a `Text`.
      **settings: fields of `LanguageModelSettings`.

    Raises:
      ValueError: for a corpus, checkpoint or setting that does not exist or makes no sense.
    """
    text = fitting(Text(task) if isinstance(task, str) else task, "text", "language_model")
    chosen = checks.from_keywords(LanguageModelSettings, settings, "language_model")
    if chosen.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError(f"attention 'cudnn' needs an NVIDIA GPU, and JAX runs on '{jax.default_backend()}' here")
    corpus = text.make()
    provenance = {"corpus": corpus.sha256, "tokens": f"{len(corpus.train):,} of {corpus.available:,}"}
    made, data = _made(corpus.vocabulary, replace(chosen, checkpoint=""), corpus.end_of_text), data_of(corpus, chosen)
    if chosen.checkpoint:
        data = replace(data, start=gpt2_checkpoint.load(chosen.checkpoint, made.model))
        leaves = [hashlib.sha256(leaf).digest() for leaf in jax.tree.leaves(data.start)]
        provenance["checkpoint"] = hashlib.sha256(b"".join(leaves)).hexdigest()
    groups = groups_of(jax.eval_shape(made.init_params, jax.random.key(0)))
    layers = tuple(group for group in groups if group.startswith("h/"))
    by_group = ("layer_gradient_norm", "layer_update_norm", "layer_params_norm")
    channels = dict.fromkeys(by_group, Channel.vector("layer", groups))
    channels["attention_entropy"] = Channel.vector("attention_layer", layers)

    def changed(change: Callable[[Any], Mapping[str, Any]]) -> Learner:
        return language_model(text, **vars(checks.changed(chosen, change, "language_model")))

    return Learner(
        made.init,
        made.step,
        name="language_model",
        step_unit=f"{chosen.step_tokens} tokens",
        performance_name="minus the loss on held-out text",
        samples_per_step=chosen.step_tokens,
        sample="tokens",
        channels=channels if chosen.telemetry == "full" else {},
        data=data,
        init_reads_data=True,
        provenance=provenance,
        save=made.save,
        changed=changed,
        partition=gpt2.partition,
        indivisible=gpt2.indivisible(made.model),
    )


@functools.lru_cache(maxsize=64)
def _made(vocabulary: int, settings: LanguageModelSettings, end_of_text: int) -> LanguageModel:
    """The same object for equal arguments, for its methods are what programs are known by."""
    return LanguageModel(vocabulary, settings, end_of_text)


def data_of(corpus: Corpus, settings: LanguageModelSettings) -> Data:
    """What the lanes read of a corpus. Raises ValueError where it is too short for one batch."""
    length = settings.context + 1
    least = settings.batch_size * settings.context + 1
    for what, tokens in (("corpus", corpus.train), ("second corpus", corpus.shift)):
        if tokens is not None and len(tokens) < least:
            raise ValueError(f"the {what} has {len(tokens):,} tokens to train on, and one batch has {least:,}")
    most = len(corpus.validation) // length
    if most < settings.held_out:
        raise ValueError(
            f"the corpus has {len(corpus.validation):,} tokens to validate on, and held_out = {settings.held_out} "
            f"sequences have {settings.held_out * length:,}"
        )
    return Data(
        corpus.train,
        evenly_spaced(corpus.validation, settings.held_out, length),
        evenly_spaced(corpus.validation, min(settings.validation or most, most), length),
        corpus.shift,
    )


language_model.settings = LanguageModelSettings  # type: ignore[attr-defined]
registry.learners.register("language_model", language_model)
