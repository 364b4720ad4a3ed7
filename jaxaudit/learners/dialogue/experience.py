"""What an iteration learns from: rows of tokens, and what the objective needs to know of them."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from jaxaudit.learners.dialogue import policy_loss
from jaxaudit.learners.dialogue.coefficients import Coefficients
from jaxaudit.learners.dialogue.rows import Rows


@struct.dataclass
class TrainingBatch:
    """Some rows, `[N, T]`; pairs of a preference objective lie side by side, the better one first.

    Attributes:
      rows: what was written.
      learnt: the objective's constants.
    """

    rows: Rows
    learnt: policy_loss.LossInputs

    def picked(self, index: jax.Array) -> TrainingBatch:
        """The rows of an index."""
        return jax.tree.map(lambda x: x[index], self)


@struct.dataclass
class Drawn:
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
    drawn: Drawn
    recomputed: Recomputed
