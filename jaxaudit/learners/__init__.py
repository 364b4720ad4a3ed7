"""Learning algorithms; each function makes a `Learner` from a task and settings."""

from jaxaudit.learners.dialogue.factories import dapo as dapo
from jaxaudit.learners.dialogue.factories import dpo as dpo
from jaxaudit.learners.dialogue.factories import dr_grpo as dr_grpo
from jaxaudit.learners.dialogue.factories import grpo as grpo
from jaxaudit.learners.dialogue.factories import gspo as gspo
from jaxaudit.learners.dialogue.factories import ppo_lm as ppo_lm
from jaxaudit.learners.dialogue.factories import rloo as rloo
from jaxaudit.learners.dialogue.settings import DialogueSettings as DialogueSettings
from jaxaudit.learners.language_model import LanguageModelSettings as LanguageModelSettings
from jaxaudit.learners.language_model import language_model as language_model
from jaxaudit.learners.rl.ppo import PPOSettings as PPOSettings
from jaxaudit.learners.rl.ppo import ppo as ppo
from jaxaudit.learners.rl.sac import SACSettings as SACSettings
from jaxaudit.learners.rl.sac import sac as sac
from jaxaudit.learners.rl.td3 import TD3Settings as TD3Settings
from jaxaudit.learners.rl.td3 import td3 as td3
from jaxaudit.learners.rl.trpo import TRPOSettings as TRPOSettings
from jaxaudit.learners.rl.trpo import trpo as trpo
