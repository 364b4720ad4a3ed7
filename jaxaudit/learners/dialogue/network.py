"""A transformer in one of its uses: policy, value model or reward model; its own parameters, or adapters on others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxaudit.kernels.output_layer import token_log_probability
from jaxaudit.learners.dialogue.packing import Sequences
from jaxaudit.learners.dialogue.rows import Rows
from jaxaudit.models import gpt2

HEAD = "head"
"""The parameters, beside the transformer's, that make a scalar of a hidden state."""


@dataclass(frozen=True)
class Network:
    """Pure functions of parameters.

    Attributes:
      model: the transformer.
      rank: of adapters, which are then all that is trained, on the `base` that functions are given; 0: none.
      scalar: whether it has a head that makes a scalar of each hidden state, as a value or reward model.
    """

    model: gpt2.GPT2
    rank: int = 0
    scalar: bool = False

    def init(self, key: jax.Array) -> gpt2.Params:
        """What is trained, before training: random parameters, or adapters that change nothing; a head of zeros."""
        if self.rank:
            params = gpt2.init_adapters(self.model, self.rank, key)
        else:
            params = gpt2.init_params(self.model, key)
        return self.with_head(params) if self.scalar else params

    def with_head(self, params: gpt2.Params) -> gpt2.Params:
        """A transformer's parameters, or adapters, and those of a head, zeros."""
        return {**params, HEAD: {"kernel": jnp.zeros(self.model.size.width), "bias": jnp.zeros(())}}

    def whole(self, params: gpt2.Params, base: Any = None) -> Any:
        """The transformer's parameters as `gpt2.apply` takes them."""
        trunk = {name: value for name, value in params.items() if name != HEAD}
        return gpt2.Adapted(base, trunk) if self.rank else trunk

    def hidden(self, params: gpt2.Params, base: Any, rows: Rows | Sequences) -> jax.Array:
        """The final hidden state at each slot, which has read the token there: `[N, T, width]`."""
        return gpt2.apply(self.model, self.whole(params, base), rows.tokens, rows.position, rows.first)[0]

    def log_probabilities(
        self, params: gpt2.Params, base: Any, rows: Rows, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns log-probability and entropy of each token given those before it, float32 `[N, T]`, 0 at the first
        slot.
        """
        return self.log_prob_and_entropy(self.hidden(params, base, rows), self.whole(params, base), rows, temperature)

    def log_prob_and_entropy(
        self, hidden: jax.Array, whole: Any, rows: Rows, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`log_probabilities` of hidden states that are there already."""
        found = _told(hidden[:, :-1], whole, rows.tokens[:, 1:], temperature)
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (1, 0))), found)

    def predicted(
        self, params: gpt2.Params, base: Any, sequences: Sequences, temperature: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The log-probability of each place's target, and the entropy there: float32 `[S, T]`."""
        hidden = self.hidden(params, base, sequences)
        return _told(hidden, self.whole(params, base), sequences.target, temperature)

    def scalars(self, params: gpt2.Params, base: Any, rows: Rows | Sequences) -> jax.Array:
        """The head's value of each hidden state: float32 `[N, T]`."""
        hidden = self.hidden(params, base, rows).astype(jnp.float32)
        return hidden @ params[HEAD]["kernel"] + params[HEAD]["bias"]

    def values(self, params: gpt2.Params, base: Any, rows: Rows) -> jax.Array:
        """What is to be expected before each slot's token is written: float32 `[N, T]`, 0 at the first slot."""
        return jnp.pad(self.scalars(params, base, rows)[:, :-1], ((0, 0), (1, 0)))

    def score(self, params: gpt2.Params, base: Any, rows: Rows) -> jax.Array:
        """A reward model's score of each row, read where its last own token is: float32 `[N]`."""
        return jnp.sum(jnp.where(rows.last_own, self.scalars(params, base, rows), 0.0), axis=1)


def _told(hidden: jax.Array, whole: Any, tokens: jax.Array, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of tokens `[S, T]` by hidden states `[S, T, width]`, and the entropies."""
    embedding = gpt2.embedding(whole).astype(hidden.dtype)
    found = token_log_probability(hidden.reshape(-1, hidden.shape[-1]), embedding, tokens.reshape(-1), temperature)
    return jax.tree.map(lambda x: x.reshape(tokens.shape), found)
