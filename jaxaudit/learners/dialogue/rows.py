"""What a policy wrote: rows of tokens, whose they are, and with what probability."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxaudit.dialogues.protocol import END, GOLD, POLICY, PROMPT
from jaxaudit.learners.dialogue import policy_loss
from jaxaudit.learners.dialogue.coefficients import Coefficients


@struct.dataclass
class Rows:
    """N rows of T slots, `[N, T]` where nothing else is said.

    Attributes:
      tokens: int32, 0 where nothing was written.
      role: int32, whose each is: `POLICY`, `PROMPT`, `TOOL`, or `END` where nothing was written.
      position: int32, in its chunk.
      first: int32, the first slot that it sees.
      log_probability: float32, of own tokens under the behaviour policy at its temperature, before truncation; else 0.
      entropy: float32, of that policy where its tokens were drawn, before truncation; else 0.
      cut: float32, the probability that top-k and top-p took from the policy there; 0 where a token was given.
      calls: float32 `[N]`, of tools, answered or not.
      truncated: bool `[N]`, whether the slots were used up before the dialogue was over.
      rewards: float32 `[N]` by name, "gold" among them.
    """

    tokens: Any
    role: Any
    position: Any
    first: Any
    log_probability: Any
    entropy: Any
    cut: Any
    calls: Any
    truncated: Any
    rewards: dict[str, Any]

    @property
    def own(self) -> jax.Array:
        """Whether the policy wrote a token: bool `[N, T]`."""
        return self.role == POLICY

    @property
    def gold(self) -> jax.Array:
        """What the dialogue's verifier says of each row: float32 `[N]`."""
        return self.rewards[GOLD]

    @property
    def lengths(self) -> jax.Array:
        """Own tokens of each row: float32 `[N]`."""
        return jnp.sum(self.own, axis=1, dtype=jnp.float32)

    @property
    def prompt_lengths(self) -> jax.Array:
        """Tokens of each row's prompt, without those of later chunks: float32 `[N]`."""
        return jnp.sum(jnp.cumprod(self.role == PROMPT, axis=1), axis=1, dtype=jnp.float32)

    @property
    def response_lengths(self) -> jax.Array:
        """Slots written after each row's prompt, whoever wrote them: float32 `[N]`."""
        return jnp.sum(self.role != END, axis=1, dtype=jnp.float32) - self.prompt_lengths

    @property
    def last_own(self) -> jax.Array:
        """Whether a token is the last own one of its row: bool `[N, T]`."""
        after = jnp.cumsum(self.own[:, ::-1], axis=1)[:, ::-1]
        return self.own & (after == 1)


@struct.dataclass
class TrainingBatch:
    """Some rows, `[N, T]`; pairs of a preference objective lie side by side, the better one first.

    Attributes:
      rows: what was written.
      loss_inputs: the objective's constants.
    """

    rows: Rows
    loss_inputs: policy_loss.LossInputs

    def picked(self, index: jax.Array) -> TrainingBatch:
        """Returns the rows at the positions `index`."""
        return jax.tree.map(lambda x: x[index], self)


@struct.dataclass
class Rollout:
    """All rows that were sampled, before any are left out, `[M]`.

    Attributes:
      rows: what was written.
      scored: the reward that the learner would see were it not disturbed.
      reward: the one it sees.
      kept: bool, whether it counts.
    """

    rows: Rows
    scored: Any
    reward: Any
    kept: Any


@struct.dataclass
class Recomputed:
    """What the trainer's parameters make of the rows before the first update.

    Attributes:
      log_probability, entropy: of each token and slot, `[N, T]`; None where nothing asks for them, see
        `settings.DialogueSettings.old_log_probability`.
      hidden: `[N, T, D]`; None where it is not asked for.
      reference_hidden: the reference's; likewise.
      score: what each row earned, `[N]`.
      returns: what each own token's row earned from there on, discounted, less the KL penalty where that is in the
        reward, `[N, T]`; None without a critic.
    """

    log_probability: Any
    entropy: Any
    hidden: Any
    reference_hidden: Any
    score: Any
    returns: Any


@struct.dataclass
class Experience:
    """An iteration's rows, and what is the same for all of them.

    Attributes:
      batch: the rows.
      coefficients: of the objective, disturbed or not.
      temperature: of the policy, disturbed or not.
      drawn: what the rows were chosen from.
      recomputed: of the rows.
    """

    batch: TrainingBatch
    coefficients: Coefficients
    temperature: Any
    drawn: Rollout
    recomputed: Recomputed
