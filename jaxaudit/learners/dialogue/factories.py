"""The presets as functions that make learners, such as `grpo("hop", prompts=8, group_size=8)`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxaudit.core.learner import Learner
from jaxaudit.core.task_kinds import fitting
from jaxaudit.dialogues import named
from jaxaudit.dialogues.protocol import Dialogue
from jaxaudit.learners.dialogue import settings as settings_module
from jaxaudit.learners.dialogue.learner import GPT2_POSITIONS, DialogueData, DialogueLearner
from jaxaudit.learners.dialogue.objective import Coefficients, ObjectiveConfig
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.learners.rl import settings as checks
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.runtime import registry

EARLY_REMARKS = (
    (
        "every row runs out of slots",
        "; a longer length, or a warm start in which it learns to end its rows, would let it end them",
    ),
    (
        "no row is rewarded",
        ", so there is nothing to learn from; more warm_start updates, a larger warm_start_right or a lower difficulty "
        "would give it something",
    ),
    (
        "every row is rewarded in full",
        ", so nothing is left to learn; a lower warm_start_success or a higher difficulty would leave room",
    ),
    (
        "no rollout group has rewards that differ",
        ", so there is nothing to learn from; a larger group_size or another difficulty would give it something",
    ),
)
"""Reasons why a seed may have little to learn from, each with what would help; the first that holds is reported."""


def early_remarks(telemetry: Mapping[str, np.ndarray], compares_within_groups: bool = True) -> list[str]:
    """Returns a sentence for each reason why the learner has little signal to learn from, or an empty list.

    Args:
      telemetry: the first steps of undisturbed lanes, one per seed, `[seed, step, ...]` by channel. It needs the
        channels "proxy" (the reward that the learner receives), "truncated" and "no_signal" (the share of groups whose
        rewards are equal).
      compares_within_groups: whether rows of one prompt are compared, so that groups of equal rewards teach nothing.
    """
    reward, truncated = (np.asarray(telemetry[name], np.float64) for name in ("proxy", "truncated"))
    no_signal = np.asarray(telemetry["no_signal"], np.float64) if compares_within_groups else np.zeros(reward.shape)
    always = ((truncated, 1), (reward, 0), (reward, 1), (no_signal, 1))
    holds = np.stack([(channel == value).all(axis=1) for channel, value in always])
    seeds, steps = reward.shape
    remarks = []
    for number, (reason, advice) in enumerate(EARLY_REMARKS):
        count = int((holds[number] & ~holds[:number].any(axis=0)).sum())
        if count:
            of_seeds = "" if count == seeds else f" of {count} of {seeds} seeds"
            when = "step" if steps == 1 else f"{steps} steps"
            remarks.append(f"in the first {when}{of_seeds} {reason}{advice}")
    return remarks


class Preset(NamedTuple):
    """A published algorithm as structural choices and default coefficients."""

    config: ObjectiveConfig
    coefficients: Coefficients


PRESETS = {
    # Ouyang et al. (2022) as in TRL and verl: KL in the reward, a critic, advantages normalised over tokens. As there,
    # the critic is not pretrained: value pretraining (VC-PPO) is `critic_warm_start`.
    "ppo_lm": Preset(
        ObjectiveConfig(advantage="gae", whiten=True, aggregation="token_minibatch", kl="k1", kl_in="reward"),
        Coefficients(kl_coefficient=0.05, gamma=1.0, gae_lambda=0.95, critic_lambda=0.95),
    ),
    # Shao et al. (2024).
    "grpo": Preset(ObjectiveConfig(advantage="group", kl="k3"), Coefficients(kl_coefficient=0.04)),
    # Liu et al. (2025): no division by a standard deviation or a row's length.
    "dr_grpo": Preset(ObjectiveConfig(advantage="group_mean", aggregation="constant"), Coefficients()),
    # Ahmadian et al. (2024) as in TRL: a row is one action, KL in the reward, and the row's ratio is clipped. The
    # paper's algorithm is REINFORCE, one update on each row: epochs = 1 and minibatches = 1, where ratios are 1.
    "rloo": Preset(
        ObjectiveConfig(advantage="leave_one_out", ratio="sequence_sum", kl="k1", kl_in="reward"),
        Coefficients(kl_coefficient=0.05),
    ),
    # Yu et al. (2025).
    "dapo": Preset(
        ObjectiveConfig(advantage="group", aggregation="token_iteration", overlong_penalty=True, dynamic_sampling=True),
        Coefficients(clip_low=0.2, clip_high=0.28),
    ),
    # Zheng et al. (2025).
    "gspo": Preset(
        ObjectiveConfig(advantage="group", ratio="sequence_mean"), Coefficients(clip_low=3e-4, clip_high=4e-4)
    ),
    # Rafailov et al. (2023).
    "dpo": Preset(ObjectiveConfig(objective="preference"), Coefficients(beta=0.1)),
}

OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "dapo": {"oversampling": 2},
    "dpo": {"group_size": 2, "prompts": 32, "minibatches": 1, "epochs": 1},
}
"""Defaults of presets that are neither structural choices nor coefficients of the objective."""


def settings_of(preset: str) -> type[DialogueSettings]:
    """Returns the settings class of a preset: `DialogueSettings` with other defaults."""
    config, coefficients = PRESETS[preset]
    defaults = dataclasses.asdict(config) | vars(coefficients)
    if not config.overlong_penalty:
        defaults["overlong_buffer"] = 0.0
    defaults |= OTHER_DEFAULTS.get(preset, {})
    fields = [
        (f.name, f.type, dataclasses.field(default=defaults[f.name], metadata=f.metadata))
        for f in dataclasses.fields(DialogueSettings)
        if defaults.get(f.name, f.default) != f.default
    ]
    settings_class = dataclasses.make_dataclass(
        f"{preset.title().replace('_', '')}Settings",
        fields,
        bases=(DialogueSettings,),
        frozen=True,
        namespace={"__doc__": f"`DialogueSettings` with the defaults of {preset}."},
    )
    # Annotations are resolved in this module; from Python 3.12 on `make_dataclass` overrides the namespace's.
    settings_class.__module__ = settings_module.__name__
    return settings_class


def make_learner(preset: str, dialogue: Any, settings: DialogueSettings) -> Learner:
    """Makes a learner on a dialogue, which is given as a name, as a task that contains one, or as a `Dialogue`.

    Raises:
      ValueError: for a dialogue or checkpoint that does not exist, or settings that do not fit the dialogue.
    """
    if isinstance(dialogue, str):
        dialogue = named(dialogue)
    if not isinstance(dialogue, Dialogue):
        dialogue = fitting(dialogue, "dialogue", preset).make()
    check_fits(dialogue, settings)
    positions = _num_positions(dialogue, settings.checkpoint)
    functions = _cached_learner(structure_of(dialogue), settings.structure, positions)
    data, provenance = DialogueData(settings.numbers(dialogue.difficulty), dialogue.data), {}
    checkpoints = {"start": ("checkpoint", settings.checkpoint)}
    if functions.critic is not None and settings.critic_init not in settings_module.NETWORK_INITS:
        checkpoints["critic_start"] = ("critic_init", settings.critic_init)
    if functions.reward_model is not None and settings.reward_model_init not in settings_module.NETWORK_INITS:
        checkpoints["reward_model_start"] = ("reward_model_init", settings.reward_model_init)
    for name, (setting, path) in checkpoints.items():
        if path:
            start = gpt2_checkpoint.load(path, functions.policy.model)
            data = dataclasses.replace(data, **{name: start})  # type: ignore[arg-type]
            leaves = [hashlib.sha256(leaf).digest() for leaf in jax.tree.leaves(start)]
            provenance[setting] = hashlib.sha256(b"".join(leaves)).hexdigest()

    def changed(change: Callable[[Any], Mapping[str, Any]]) -> Learner:
        return make_learner(preset, dialogue, checks.changed(settings, change, preset))

    return Learner(
        functions.init,
        functions.step,
        name=preset,
        step_unit=f"{settings.rows} rows",
        performance_name=f"mean gold reward of rows on {'held-out' if dialogue.splits else 'fixed'} prompts",
        samples_per_step=settings.rows,
        sample="rows",
        channels=functions.channels,
        data=data,
        init_reads_data=True,
        provenance=provenance,
        remarks=functools.partial(early_remarks, compares_within_groups=settings.compares_within_groups),
        save=functions.save,
        changed=changed,
        partition=gpt2.partition,
        indivisible=gpt2.indivisible(functions.policy.model),
        absent=absent_sites(dialogue, settings),
        numbers={"difficulty": {"usual": float(dialogue.difficulty)}},
    )


def check_fits(dialogue: Dialogue, settings: DialogueSettings) -> None:
    """Raises ValueError, in one sentence, for settings that do not fit the dialogue."""
    if settings.top_k >= dialogue.vocabulary:
        raise ValueError(f"top_k must be below the vocabulary's {dialogue.vocabulary} tokens, not {settings.top_k}")
    if settings.overlong_buffer and dialogue.length <= dialogue.prompt_length + 1:
        raise ValueError(
            "overlong_buffer needs rows with at least two response tokens, and this dialogue has a length of "
            f"{dialogue.length} slots and a prompt_length of {dialogue.prompt_length}"
        )


def _num_positions(dialogue: Dialogue, checkpoint: str) -> int:
    """Returns the number of position embeddings of a checkpoint; at least the dialogue's length.

    So a checkpoint with too few positions is refused when it is loaded.
    """
    positions = gpt2_checkpoint.positions(checkpoint) if checkpoint else None
    return GPT2_POSITIONS if positions is None else max(positions, dialogue.length)


def absent_sites(dialogue: Dialogue, settings: DialogueSettings) -> dict[str, str]:
    """Returns, for sites, parameters and context of taps that the learner does not have, the reason why."""
    is_preference = settings.objective == "preference"
    objective = "a preference objective" if is_preference else f"advantage '{settings.advantage}'"
    reasons = {
        "ends": "a row has one reward, when it is over",
        "td_error": "the reward belongs to a row, not to a transition",
        "label_smoothing": "the policy's tokens are no labels",
        "tokens": "rows are written by the policy: see prompt_corruption and tool_corruption",
        "observation": "rows are made of tokens: see prompt_corruption and tool_corruption",
        "action": "rows are made of tokens: see sampler_noise and temperature_spike",
        "dynamics": "a dialogue has none: see tool_shift and difficulty_shift",
    }
    if not settings.scheduled:
        reasons["schedule"] = "its rate is the same at every step: see learning_rate_decay"
    if not dialogue.result_tokens:
        reasons["tool_result"] = "the dialogue has no tool"
    if settings.reward == "gold":
        reasons["reward_model"] = "reward is 'gold'"
    else:
        reasons["bound"] = f"reward is '{settings.reward}', whose scores have none"
    if settings.kl == "none":
        reasons["kl_coefficient"] = "kl is 'none'"
    config = settings.objective_config
    if not config.critic:
        reasons |= dict.fromkeys(("gae_lambda", "critic_lambda", "critic"), f"{objective} has no critic")
    elif config.adaptive_lambda:
        reasons["gae_lambda"] = "with gae_lambda_length each row's lambda depends on its length"
    if settings.covariance == "kl":
        reasons["ratio_clip"] = "covariance is 'kl', whose objective does not clip the ratio"
    if not config.needs_reference:
        reasons["reference"] = "kl is 'none'"
    if not config.entropy_bonus:
        reasons["entropy_coefficient"] = "there is no entropy bonus"
    if not config.uses_rollout_log_prob:
        reasons["log_probability"] = "correction is 'none' and old_log_probability is 'recomputed'"
    if is_preference:
        reasons["log_probability"] = "a preference objective does not read the sampler's log-probabilities"
        reasons |= dict.fromkeys(("advantage", "ratio_clip"), "a preference objective has none")
    return reasons


def structure_of(dialogue: Dialogue) -> Dialogue:
    """Returns the dialogue that a program depends on: one with its class's default difficulty, which is data.

    A dialogue whose class has no default difficulty, or whose other fields do not allow it, is returned as it is.
    """
    if not dataclasses.is_dataclass(dialogue) or isinstance(dialogue, type):
        return dialogue
    default = next((f.default for f in dataclasses.fields(dialogue) if f.name == "difficulty"), dataclasses.MISSING)
    if default is dataclasses.MISSING or default == dialogue.difficulty:
        return dialogue
    try:
        structure = dataclasses.replace(dialogue, difficulty=default)  # type: ignore[type-var]
    except ValueError:  # the default does not fit the dialogue's other fields
        return dialogue
    return structure if dialogue.splits else structure.held_out()  # held-out prompts stay held out


@functools.lru_cache(maxsize=64)
def _cached_learner(dialogue: Dialogue, settings: DialogueSettings, positions: int = GPT2_POSITIONS) -> DialogueLearner:
    """Returns the same object for equal arguments, because compiled programs are identified by its methods."""
    return DialogueLearner(dialogue, settings, positions)


def _register_preset(name: str) -> Callable[..., Learner]:
    settings_class = settings_of(name)

    def factory(dialogue: Any, **settings: Any) -> Learner:
        return make_learner(name, dialogue, checks.from_keywords(settings_class, settings, name))

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"""{SUMMARIES[name]}: `{name}("hop", learning_rate=1e-4)`.

    Args:
      dialogue: a registered dialogue's name, a task that contains one, or a `Dialogue`.
      **settings: fields of `DialogueSettings`, with this preset's defaults.

    Raises:
      ValueError: for a dialogue or setting that does not exist or is out of range.
    """
    factory.settings = settings_class  # type: ignore[attr-defined]
    return registry.learners.register(name, factory)


SUMMARIES = {
    "ppo_lm": "PPO with a value model on a dialogue",
    "grpo": "GRPO (Shao et al., 2024) on a dialogue",
    "dr_grpo": "Dr. GRPO (Liu et al., 2025) on a dialogue",
    "rloo": "REINFORCE leave-one-out (Ahmadian et al., 2024) on a dialogue",
    "dapo": "DAPO (Yu et al., 2025) on a dialogue",
    "gspo": "GSPO (Zheng et al., 2025) on a dialogue",
    "dpo": "DPO (Rafailov et al., 2023) on pairs of a dialogue's rows",
}

ppo_lm = _register_preset("ppo_lm")
grpo = _register_preset("grpo")
dr_grpo = _register_preset("dr_grpo")
rloo = _register_preset("rloo")
dapo = _register_preset("dapo")
gspo = _register_preset("gspo")
dpo = _register_preset("dpo")
