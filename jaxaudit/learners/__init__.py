"""Learning algorithms; each function makes a `Learner` from a task and settings."""

from jaxaudit.learners.dialogue.factories import dapo, dpo, dr_grpo, grpo, gspo, ppo_lm, rloo
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.learners.language_model import LanguageModelSettings, language_model
from jaxaudit.learners.rl.ppo import PPOSettings, ppo
from jaxaudit.learners.rl.sac import SACSettings, sac
from jaxaudit.learners.rl.td3 import TD3Settings, td3
from jaxaudit.learners.rl.trpo import TRPOSettings, trpo

__all__ = [
    "DialogueSettings",
    "LanguageModelSettings",
    "PPOSettings",
    "SACSettings",
    "TD3Settings",
    "TRPOSettings",
    "dapo",
    "dpo",
    "dr_grpo",
    "grpo",
    "gspo",
    "language_model",
    "ppo",
    "ppo_lm",
    "rloo",
    "sac",
    "td3",
    "trpo",
]
