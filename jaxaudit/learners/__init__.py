"""Learning algorithms, each a `Learner`."""

from jaxaudit.learners.language_model import LanguageModelSettings, language_model
from jaxaudit.learners.ppo import PPOSettings, ppo
from jaxaudit.learners.sac import SACSettings, sac
from jaxaudit.learners.td3 import TD3Settings, td3
from jaxaudit.learners.trpo import TRPOSettings, trpo

__all__ = [
    "LanguageModelSettings",
    "PPOSettings",
    "SACSettings",
    "TD3Settings",
    "TRPOSettings",
    "language_model",
    "ppo",
    "sac",
    "td3",
    "trpo",
]
