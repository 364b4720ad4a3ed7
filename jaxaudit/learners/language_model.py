"""GPT-2 trained on text with AdamW, as in the paper's Table S3."""

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
from jaxaudit.kernels.output_layer import CrossEntropy, cross_entropy
from jaxaudit.learners.rl import settings as checks
from jaxaudit.learners.rl.telemetry import when_due
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.runtime import registry
from jaxaudit.runtime.paths import groups_of, squares_by_group
from jaxaudit.text import Corpus, Text


def draw_sequences(key: jax.Array, tokens: jax.Array, batch: int, length: int) -> jax.Array:
    """Draws sequences of `tokens` `[N]` with independent, uniform starts: int32 `[batch, length]`."""
    starts = jax.random.randint(key, (batch,), 0, tokens.shape[0] - length + 1)
    return jax.vmap(lambda start: jax.lax.dynamic_slice(tokens, (start,), (length,)))(starts).astype(jnp.int32)


def evenly_spaced(tokens: np.ndarray, count: int, length: int) -> np.ndarray:
    """Returns `count` sequences of `length` consecutive tokens of `tokens` `[N]`: `[count, length]`.

    Their starts are evenly spaced, from the first token to N - `length`. Sequences overlap only if there are fewer than
    `count * length` tokens. N must be at least `length`.
    """
    starts = np.linspace(0, len(tokens) - length, count).astype(np.int64)
    return np.stack([tokens[start : start + length] for start in starts])


Params = gpt2.Params


@dataclass(frozen=True)
class LanguageModelSettings:
    """The settings of GPT-2's training; the defaults are those of the paper's Table S3 and section S4.

    Attributes:
      size: the model's size, a key of `gpt2.SIZES`.
      context: number of tokens in a sequence.
      positions: number of positions that the model embeds, at least the context; 0 means as many as the context.
        GPT-2's files have 1024, of which the first ones are loaded.
      batch_size: number of sequences in a step.
      accumulation: number of microbatches that a step's sequences are split into. With two or more, x_grad is measured
        over them.
      learning_rate: AdamW's peak learning rate.
      warmup: share of the run in which the learning rate rises.
      final_rate: the learning rate at the end of the cosine decay, as a share of the peak.
      beta1, beta2, epsilon: AdamW's.
      weight_decay: weight decay of kernels and embeddings; biases and norms have none.
      max_grad_norm: global norm above which the gradient is clipped.
      precision: dtype of activations and products. Parameters are float32.
      attention: "xla", or "cudnn" for cuDNN's fused attention, which needs bfloat16 and an NVIDIA GPU.
      remat: whether the backward pass computes layers again, which takes less memory and more time.
      checkpoint: a folder or safetensors file with GPT-2's parameters to start from, without the rows that pad its
        vocabulary. "" means random initial parameters.
      held_out: number of sequences whose mean loss, negated, is the performance. They are the same in every lane and
        step.
      evaluations: how many times in a run the validation perplexity is measured, evenly spaced. 0 means never.
      validation: the largest number of evenly spaced sequences to measure it on. 0 means all of the corpus's validation
        text.
      gram: whether "full" telemetry includes the dominant share of the microbatches' gradients, which holds all of them
        in memory.
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
        checks.one_of(self, size=tuple(gpt2.SIZES))
        checks.choices(self, leave_out=("size",))
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
    """The arrays that all lanes share: text as uint16 tokens, and initial parameters.

    Attributes:
      train: `[N]`.
      held_out: `[held_out, context + 1]`.
      validation: `[M, context + 1]`.
      second_corpus: `[S]`, or None.
      start: a checkpoint's parameters, float32. None means that every lane has random initial parameters.
    """

    train: Any
    held_out: Any
    validation: Any
    second_corpus: Any
    start: Any = None


@struct.dataclass
class LanguageModelState:
    """A lane's state between two steps: the parameters and the optimizer's state."""

    params: Any
    optimizer: Any


TINY = 1e-16
"""Second moments below this have a root below Adam's usual epsilon, 1e-8, so steps do not adapt to the gradient."""


class LanguageModel:
    """Training of GPT-2, one batch per step, with microbatches whose gradients are accumulated.

    Args:
      vocabulary: number of tokens in the corpus's vocabulary.
      settings: the settings.
      end_of_text: the token that ends a document. None means the vocabulary's last token.
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
        """Writes the model as a folder that transformers can load."""
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
        """Draws a batch of text, int32 `[batch_size, context + 1]`, which perturbations may change."""
        settings, data = self.settings, taps.data
        size = settings.batch_size, settings.context + 1
        context: dict[str, Any] = {"mask": self.end_of_text, "vocabulary": self.model.vocabulary}
        if data.second_corpus is not None:
            context["second_corpus"] = lambda key: draw_sequences(key, data.second_corpus, *size)
        return taps("tokens", draw_sequences(key, data.train, *size), **context)

    def gradient(self, params: Params, tokens: jax.Array, taps: Taps) -> tuple[Params, dict[str, jax.Array]]:
        """Returns the mean gradient of a batch, and statistics of its microbatches at the same parameters."""
        settings = self.settings
        smoothing = taps("label_smoothing", jnp.zeros(()))
        microbatches = tokens.reshape(settings.accumulation, -1, tokens.shape[1])

        def loss(params: Params, tokens: jax.Array, taps: Taps) -> tuple[jax.Array, jax.Array]:
            value = self.losses(self.model, params, tokens, smoothing)[0].loss
            return taps("objective", value), value

        gradient_and_value = jax.grad(loss, has_aux=True)
        if settings.accumulation == 1:
            gradient, value = gradient_and_value(params, tokens, taps)
            return gradient, {"loss": value, "x_grad": jnp.float32(jnp.nan)}

        def accumulate(taps: Taps, total: CoherenceSum, tokens: jax.Array):
            gradient, value = gradient_and_value(params, tokens, taps)
            return total.add(gradient), (value, gradient if settings.telemetry == "full" and settings.gram else None)

        total, (values, gradients) = taps.scan(accumulate, CoherenceSum.zeros(params), microbatches)
        telemetry = {"loss": jnp.mean(values), "x_grad": total.mean_pairwise_cosine()}
        if settings.telemetry == "full":
            noise_scale = total.noise_scale(settings.batch_size // settings.accumulation).noise_scale
            telemetry |= {"gradient_noise_scale": noise_scale}
            telemetry |= {"x_grad_dominant": dominant_share(gradients)} if settings.gram else {}
        return jax.tree.map(lambda g: g / settings.accumulation, total.gradient_sum), telemetry

    def losses(
        self, model: gpt2.GPT2, params: Params, tokens: jax.Array, smoothing: jax.Array | float = 0.0
    ) -> tuple[CrossEntropy, jax.Array]:
        """Returns the mean cross entropy of each next token of `[B, T + 1]`, in nats, and attention's entropies."""
        hidden, entropies = gpt2.apply(model, params, tokens[:, :-1])
        hidden = hidden.reshape(-1, hidden.shape[-1])
        weights = jnp.full(hidden.shape[0], 1.0 / hidden.shape[0])
        embedding = gpt2.embedding(params).astype(hidden.dtype)
        return cross_entropy(hidden, embedding, tokens[:, 1:].reshape(-1), weights, smoothing), entropies

    def validation_loss(self, params: Params, sequences: jax.Array) -> jax.Array:
        """Returns the mean next-token cross entropy, in nats, of M sequences `[M, T + 1]`: a scalar.

        At most `settings.held_out` sequences are evaluated at the same time, which bounds the memory. M can be any
        number.
        """
        batch_size = min(self.settings.held_out, sequences.shape[0])

        def loss(row: jax.Array) -> jax.Array:
            return self.losses(self.model, params, row[None].astype(jnp.int32))[0].loss

        return jnp.mean(jax.lax.map(loss, sequences, batch_size=batch_size))


def model_of(vocabulary: int, settings: LanguageModelSettings) -> gpt2.GPT2:
    size, dtype = gpt2.SIZES[settings.size], jnp.dtype(settings.precision)
    context = settings.positions or settings.context
    return gpt2.GPT2(vocabulary, context, size, dtype, settings.remat, attention=settings.attention)


def decays(params: Params) -> Any:
    """Returns a tree of bools that tell which parameters weight decay applies to: kernels and embeddings."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def second_moment(optimizer: Any) -> dict[str, jax.Array]:
    """Returns the root mean of Adam's second moments over all parameters, and the share of them below `TINY`."""
    (moments,) = (tree for name in SECOND_MOMENT for _, tree in optax.tree.get_all_with_path(optimizer, name))
    leaves = jax.tree.leaves(moments)
    count = sum(leaf.size for leaf in leaves)
    return {
        "second_moment_root_mean": jnp.sqrt(sum(jnp.sum(leaf) for leaf in leaves) / count),
        "second_moment_tiny_fraction": sum(jnp.sum(leaf < TINY) for leaf in leaves) / count,
    }


def language_model(task: Any = "python-stdlib", **settings: Any) -> Learner:
    """Returns GPT-2 on a text, for example `language_model("python-stdlib", size="nano", context=128, batch_size=8)`.

    Args:
      task: a corpus's name, or a task that provides a text, for example a `Text`.
      **settings: fields of `LanguageModelSettings`.

    Raises:
      ValueError: the corpus, the checkpoint or a setting does not exist, or a setting has a value that is not allowed.
    """
    text = fitting(Text(task) if isinstance(task, str) else task, "text", "language_model")
    model_settings = checks.from_keywords(LanguageModelSettings, settings, "language_model")
    if model_settings.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError(f"attention 'cudnn' needs an NVIDIA GPU, and JAX runs on '{jax.default_backend()}'")
    corpus = text.make()
    provenance = {"corpus": corpus.sha256, "tokens": f"{len(corpus.train):,} of {corpus.available:,}"}
    instance = _cached(corpus.vocabulary, replace(model_settings, checkpoint=""), corpus.end_of_text)
    data = data_of(corpus, model_settings)
    if model_settings.checkpoint:
        data = replace(data, start=gpt2_checkpoint.load(model_settings.checkpoint, instance.model))
        leaves = [hashlib.sha256(leaf).digest() for leaf in jax.tree.leaves(data.start)]
        provenance["checkpoint"] = hashlib.sha256(b"".join(leaves)).hexdigest()
    groups = groups_of(jax.eval_shape(instance.init_params, jax.random.key(0)))
    layers = tuple(group for group in groups if group.startswith("h/"))
    by_group = ("layer_gradient_norm", "layer_update_norm", "layer_params_norm")
    channels = dict.fromkeys(by_group, Channel.vector("layer", groups))
    channels["attention_entropy"] = Channel.vector("attention_layer", layers)

    def changed(change: Callable[[Any], Mapping[str, Any]]) -> Learner:
        return language_model(text, **vars(checks.changed(model_settings, change, "language_model")))

    return Learner(
        instance.init,
        instance.step,
        name="language_model",
        step_unit=f"{model_settings.step_tokens} tokens",
        performance_name="minus the loss on held-out text",
        samples_per_step=model_settings.step_tokens,
        sample="tokens",
        channels=channels if model_settings.telemetry == "full" else {},
        data=data,
        init_reads_data=True,
        provenance=provenance,
        save=instance.save,
        changed=changed,
        partition=gpt2.partition,
        indivisible=gpt2.indivisible(instance.model),
    )


@functools.lru_cache(maxsize=64)
def _cached(vocabulary: int, settings: LanguageModelSettings, end_of_text: int) -> LanguageModel:
    """Returns the same object for equal arguments, because programs are identified by its bound methods."""
    return LanguageModel(vocabulary, settings, end_of_text)


def data_of(corpus: Corpus, settings: LanguageModelSettings) -> Data:
    """Returns the arrays that the lanes read from a corpus. Raises ValueError if it is too short for one batch."""
    length = settings.context + 1
    required = settings.batch_size * settings.context + 1
    for name, tokens in (("corpus", corpus.train), ("second corpus", corpus.shift)):
        if tokens is not None and len(tokens) < required:
            raise ValueError(f"the {name} has {len(tokens):,} training tokens, but one batch needs {required:,}")
    available = len(corpus.validation) // length
    if available < settings.held_out:
        raise ValueError(
            f"the corpus has {len(corpus.validation):,} validation tokens, but held_out = {settings.held_out} "
            f"sequences need {settings.held_out * length:,}"
        )
    return Data(
        corpus.train,
        evenly_spaced(corpus.validation, settings.held_out, length),
        evenly_spaced(corpus.validation, min(settings.validation or available, available), length),
        corpus.shift,
    )


language_model.settings = LanguageModelSettings  # type: ignore[attr-defined]
registry.learners.register("language_model", language_model)
