"""Learning algorithms, each a `Learner`, and the optimizer they share."""

from jaxaudit.learners.optimizer import Optimizer
from jaxaudit.learners.ppo import PPOSettings, ppo

__all__ = ["Optimizer", "PPOSettings", "ppo"]
