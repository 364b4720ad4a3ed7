"""What a learner on dialogues carries from step to step, and what all its lanes read."""

from __future__ import annotations

from typing import Any

from flax import struct

from jaxaudit.core.remedy import Trained
from jaxaudit.learners.dialogue.settings import Numbers
from jaxaudit.learners.dialogue.telemetry.bigrams import Bigrams
from jaxaudit.learners.dialogue.telemetry.rewards import Scale
from jaxaudit.learners.dialogue.telemetry.strata import LastSeen


@struct.dataclass
class DialogueData:
    """What all lanes read.

    Attributes:
      numbers: the settings that are data.
      dialogue: the dialogue's arrays.
      start: a checkpoint's parameters, float32; None: every lane begins with random ones.
      critic_start, reward_model_start: likewise those of checkpoints that the value or reward model begins as; None:
        they begin as the policy, or with random ones.
    """

    numbers: Numbers
    dialogue: Any = None
    start: Any = None
    critic_start: Any = None
    reward_model_start: Any = None


@struct.dataclass
class DialogueState:
    """What a lane carries.

    Attributes:
      policy, critic: what is trained; critic is None without a value model.
      reward_model: parameters; None without one.
      reference: the policy's parameters that divergence is measured from.
      initial: the policy's before its first update, which nothing disturbs; None where only data has them, those of a
        checkpoint, or nothing asks for them.
      scales: with a reward model, where its scores ("proxy") and the gold rewards ("gold") lay before the first update;
        empty without one.
      results: what tools said before the first update, counted; None without tools or with basic telemetry.
      warm_start_success: sampled success at which the policy was handed over.
      told: what the channels of rows and updates said last.
      measured: what those of held-out rows did.
    """

    policy: Trained
    critic: Trained | None
    reward_model: Any
    reference: Any
    initial: Any
    scales: dict[str, Scale]
    results: Bigrams | None
    warm_start_success: Any
    told: LastSeen
    measured: LastSeen
