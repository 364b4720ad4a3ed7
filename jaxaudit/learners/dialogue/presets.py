"""Published algorithms as parts and coefficients.

Where a paper and a library differ, these are the paper's. Rates, epochs and group sizes are the learner's settings.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxaudit.learners.dialogue.coefficients import Coefficients
from jaxaudit.learners.dialogue.parts import Parts


class Preset(NamedTuple):
    """Attributes:
    parts: structure.
    coefficients: numbers, as defaults.
    """

    parts: Parts
    coefficients: Coefficients


PRESETS = {
    # Ouyang et al. (2022) as TRL and verl have it: KL in the reward, a critic, advantages normalised over tokens. Like
    # there, nothing is learned before the first iteration: value pretraining (VC-PPO) is `critic_warm_start`.
    "ppo_lm": Preset(
        Parts(advantage="gae", whiten=True, aggregation="token_minibatch", kl="k1", kl_in="reward"),
        Coefficients(kl_coefficient=0.05, gamma=1.0, gae_lambda=0.95, critic_lambda=0.95),
    ),
    # Shao et al. (2024).
    "grpo": Preset(Parts(advantage="group", kl="k3"), Coefficients(kl_coefficient=0.04)),
    # Liu et al. (2025): no division by a standard deviation or a row's length.
    "dr_grpo": Preset(Parts(advantage="group_mean", aggregation="constant"), Coefficients()),
    # Ahmadian et al. (2024) as TRL has it: a row is one action, KL in the reward, and the row's ratio is clipped. The
    # paper's is REINFORCE, one update on each row: epochs = 1 and minibatches = 1, where ratios are 1.
    "rloo": Preset(
        Parts(advantage="leave_one_out", ratio="sequence_sum", kl="k1", kl_in="reward"),
        Coefficients(kl_coefficient=0.05),
    ),
    # Yu et al. (2025).
    "dapo": Preset(
        Parts(advantage="group", aggregation="token_iteration", overlong=True, dynamic=True),
        Coefficients(clip_low=0.2, clip_high=0.28),
    ),
    # Zheng et al. (2025).
    "gspo": Preset(Parts(advantage="group", ratio="sequence_mean"), Coefficients(clip_low=3e-4, clip_high=4e-4)),
    # Rafailov et al. (2023).
    "dpo": Preset(Parts(objective="preference"), Coefficients(beta=0.1)),
}
