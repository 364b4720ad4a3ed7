"""A transformer as policy, value model or reward model, with its own parameters or with adapters on a checkpoint's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.kernels.output_layer import token_log_probability
from jaxaudit.learners.dialogue.packing import Sequences
from jaxaudit.learners.dialogue.rollout import Rows
from jaxaudit.models import gpt2

HEAD = "head"
"""The name, beside the transformer's, of the parameters that map a hidden state to a scalar."""


@dataclass(frozen=True)
class Network:
    """Pure functions of parameters.

    Attributes:
      model: the transformer.
      rank: rank of the adapters, which are then the only trained parameters and adapt the `base` that functions take; 0
        for no adapters.
      scalar: whether the network has a head that maps each hidden state to a scalar, as a value or reward model has.
    """

    model: gpt2.GPT2
    rank: int = 0
    scalar: bool = False

    def init(self, key: jax.Array) -> gpt2.Params:
        """Returns initial trained parameters: random ones, or adapters that change nothing; a head is zeros."""
        if self.rank:
            params = gpt2.init_adapters(self.model, self.rank, key)
        else:
            params = gpt2.init_params(self.model, key)
        return self.with_head(params) if self.scalar else params

    def with_head(self, params: gpt2.Params) -> gpt2.Params:
        """Returns a transformer's parameters, or adapters, with a head of zeros."""
        return {**params, HEAD: {"kernel": jnp.zeros(self.model.size.width), "bias": jnp.zeros(())}}

    def transformer_params(self, params: gpt2.Params, base: Any = None) -> Any:
        """Returns the parameters for `gpt2.apply`: without the scalar head, and LoRA adapters paired with `base`."""
        trunk = {name: value for name, value in params.items() if name != HEAD}
        return gpt2.Adapted(base, trunk) if self.rank else trunk

    def hidden(self, params: gpt2.Params, base: Any, rows: Rows | Sequences) -> jax.Array:
        """Returns the final hidden state at each slot, after reading the token there: `[N, T, width]`."""
        full_params = self.transformer_params(params, base)
        return gpt2.apply(self.model, full_params, rows.tokens, rows.position, rows.attention_start)[0]

    def log_prob_and_entropy(
        self, params: gpt2.Params, base: Any, rows: Rows, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns log-probability and entropy of each token given the tokens before it, float32 `[N, T]`.

        Both are 0 at the first slot.
        """
        hidden = self.hidden(params, base, rows)
        return self.log_prob_and_entropy_from_hidden(hidden, self.transformer_params(params, base), rows, temperature)

    def log_prob_and_entropy_from_hidden(
        self, hidden: jax.Array, transformer_params: Any, rows: Rows, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns `log_prob_and_entropy` of hidden states that are already computed."""
        outputs = _log_prob_and_entropy(hidden[:, :-1], transformer_params, rows.tokens[:, 1:], temperature)
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), outputs)

    def predict(
        self, params: gpt2.Params, base: Any, sequences: Sequences, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the log-probability of each place's target, and the entropy there: float32 `[S, T]`."""
        hidden = self.hidden(params, base, sequences)
        return _log_prob_and_entropy(hidden, self.transformer_params(params, base), sequences.target, temperature)

    def exact_kl(
        self, params: gpt2.Params, reference: gpt2.Params, base: Any, sequences: Sequences, temperature: jax.Array
    ) -> jax.Array:
        """Returns KL(policy || reference) over the vocabulary at each place, `[S, T]`; constant in `reference`."""

        def log_distribution(params: gpt2.Params) -> jax.Array:
            hidden = self.hidden(params, base, sequences)
            logits = gpt2.logits(self.transformer_params(params, base), hidden) / temperature
            return jax.nn.log_softmax(logits)

        log_prob, ref_log_prob = log_distribution(params), jax.lax.stop_gradient(log_distribution(reference))
        return jnp.sum(jnp.exp(log_prob) * (log_prob - ref_log_prob), axis=-1)

    def head_outputs(self, params: gpt2.Params, base: Any, rows: Rows | Sequences) -> jax.Array:
        """Returns the head's scalar for each hidden state: float32 `[N, T]`."""
        hidden = self.hidden(params, base, rows).astype(jnp.float32)
        return hidden @ params[HEAD]["kernel"] + params[HEAD]["bias"]

    def values(self, params: gpt2.Params, base: Any, rows: Rows) -> jax.Array:
        """Returns the value before each slot's token is written: float32 `[N, T]`, 0 at the first slot."""
        return jnp.pad(self.head_outputs(params, base, rows)[:, :-1], ((0, 0), (1, 0)))

    def score(self, params: gpt2.Params, base: Any, rows: Rows) -> jax.Array:
        """Returns a reward model's score of each row, read at its last response token: float32 `[N]`."""
        return jnp.sum(jnp.where(rows.last_response_token, self.head_outputs(params, base, rows), 0.0), axis=1)


def _log_prob_and_entropy(
    hidden: jax.Array, transformer_params: Any, tokens: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log-probabilities of tokens `[S, T]`, and entropies, from hidden states `[S, T, width]`."""
    embedding = gpt2.embedding(transformer_params).astype(hidden.dtype)
    outputs = token_log_probability(hidden.reshape(-1, hidden.shape[-1]), embedding, tokens.reshape(-1), temperature)
    return jax.tree.map(lambda x: x.reshape(tokens.shape), outputs)
