"""Learning algorithms, each a `Learner`, and the optimizer they share."""

from jaxaudit.learners.language_model import LanguageModelSettings, language_model
from jaxaudit.learners.optimizer import Optimizer
from jaxaudit.learners.ppo import PPOSettings, ppo
from jaxaudit.learners.sac import SACSettings, sac
from jaxaudit.learners.td3 import TD3Settings, td3
from jaxaudit.learners.trpo import TRPOSettings, trpo

__all__ = [
    "LanguageModelSettings",
    "Optimizer",
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
