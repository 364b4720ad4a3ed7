"""The presets as learners: `grpo("hop", prompts=8, group_size=8)`."""

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
from jaxaudit.learners.dialogue.objective import Coefficients, Parts
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.learners.rl import settings as checks
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.runtime import registry

REASONS = (
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
"""What may be found, and what would help; of several that hold for a seed the first is told."""


def of_the_beginning(telemetry: Mapping[str, np.ndarray], compares: bool = True) -> list[str]:
    """A sentence for each reason why seeds have little to learn from; none where they have enough.

    Args:
      telemetry: the first steps of undisturbed lanes, one a seed, `[seed, step, ...]` by channel; read are "proxy",
        the reward that the learner sees, "truncated" and "no_signal".
      compares: whether rows of one prompt are compared, so that those without a difference teach nothing.
    """
    reward, truncated = (np.asarray(telemetry[name], np.float64) for name in ("proxy", "truncated"))
    quiet = np.asarray(telemetry["no_signal"], np.float64) if compares else np.zeros(reward.shape)
    holds = np.stack([(x == end).all(axis=1) for x, end in ((truncated, 1), (reward, 0), (reward, 1), (quiet, 1))])
    seeds, steps = reward.shape
    found = []
    for number, (what, rest) in enumerate(REASONS):
        count = int((holds[number] & ~holds[:number].any(axis=0)).sum())
        if count:
            whose = "" if count == seeds else f" of {count} of {seeds} seeds"
            when = "step" if steps == 1 else f"{steps} steps"
            found.append(f"in the first {when}{whose} {what}{rest}")
    return found


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


BESIDES: dict[str, dict[str, Any]] = {
    "dapo": {"oversampling": 2},
    "dpo": {"group_size": 2, "prompts": 32, "minibatches": 1, "epochs": 1},
}
"""Settings of presets that are no parts and no coefficients, where they are not the standard ones."""


def settings_of(preset: str) -> type[DialogueSettings]:
    """The settings of a preset: `DialogueSettings` with other defaults."""
    parts, coefficients = PRESETS[preset]
    chosen = dataclasses.asdict(parts) | vars(coefficients)
    if not parts.overlong:
        chosen["overlong_buffer"] = 0.0
    chosen |= BESIDES.get(preset, {})
    fields = [
        (f.name, f.type, dataclasses.field(default=chosen[f.name], metadata=f.metadata))
        for f in dataclasses.fields(DialogueSettings)
        if chosen.get(f.name, f.default) != f.default
    ]
    made = dataclasses.make_dataclass(
        f"{preset.title().replace('_', '')}Settings",
        fields,
        bases=(DialogueSettings,),
        frozen=True,
        namespace={"__doc__": f"`DialogueSettings` as {preset} has them."},
    )
    # Annotations are resolved in this module; from Python 3.12 on `make_dataclass` overrides what a namespace says.
    made.__module__ = settings_module.__name__
    return made


def on_dialogue(preset: str, dialogue: Any, settings: DialogueSettings) -> Learner:
    """The learner of some settings on a dialogue: a name, a task that gives one, or a `Dialogue`.

    Raises:
      ValueError: for a dialogue or checkpoint that does not exist, or settings that do not fit the dialogue.
    """
    if isinstance(dialogue, str):
        dialogue = named(dialogue)
    if not isinstance(dialogue, Dialogue):
        dialogue = fitting(dialogue, "dialogue", preset).make()
    check_fits(dialogue, settings)
    made = _made(structure_of(dialogue), settings.structure, _positions(dialogue, settings.checkpoint))
    data, provenance = DialogueData(settings.numbers(dialogue.difficulty), dialogue.data), {}
    checkpoints = {"start": ("checkpoint", settings.checkpoint)}
    if made.critic is not None and settings.critic_init not in settings_module.BEGINNINGS:
        checkpoints["critic_start"] = ("critic_init", settings.critic_init)
    if made.reward_model is not None and settings.reward_model_init not in settings_module.BEGINNINGS:
        checkpoints["reward_model_start"] = ("reward_model_init", settings.reward_model_init)
    for name, (setting, path) in checkpoints.items():
        if path:
            start = gpt2_checkpoint.load(path, made.policy.model)
            data = dataclasses.replace(data, **{name: start})  # type: ignore[arg-type]
            leaves = [hashlib.sha256(leaf).digest() for leaf in jax.tree.leaves(start)]
            provenance[setting] = hashlib.sha256(b"".join(leaves)).hexdigest()

    def changed(change: Callable[[Any], Mapping[str, Any]]) -> Learner:
        return on_dialogue(preset, dialogue, checks.changed(settings, change, preset))

    return Learner(
        made.init,
        made.step,
        name=preset,
        step_unit=f"{settings.rows} rows",
        performance_name=f"mean gold reward of rows on {'held-out' if dialogue.splits else 'fixed'} prompts",
        samples_per_step=settings.rows,
        sample="rows",
        channels=made.channels,
        data=data,
        init_reads_data=True,
        provenance=provenance,
        remarks=functools.partial(of_the_beginning, compares=settings.compares),
        save=made.save,
        changed=changed,
        partition=gpt2.partition,
        indivisible=gpt2.indivisible(made.policy.model),
        absent=absent(dialogue, settings),
        numbers={"difficulty": {"usual": float(dialogue.difficulty)}},
    )


def check_fits(dialogue: Dialogue, settings: DialogueSettings) -> None:
    """Raises ValueError, in one sentence, for settings that a dialogue cannot be trained with."""
    if settings.top_k >= dialogue.vocabulary:
        raise ValueError(f"top_k must be below the vocabulary's {dialogue.vocabulary} tokens, not {settings.top_k}")
    if settings.overlong_buffer and dialogue.length <= dialogue.prompt_length + 1:
        raise ValueError(f"overlong_buffer is of rows with several own tokens, and a row has {dialogue.length} slots")


def _positions(dialogue: Dialogue, checkpoint: str) -> int:
    """How many positions a checkpoint's model has; at least a row's slots, so that a smaller one is refused."""
    found = gpt2_checkpoint.positions(checkpoint) if checkpoint else None
    return GPT2_POSITIONS if found is None else max(found, dialogue.length)


def absent(dialogue: Dialogue, settings: DialogueSettings) -> dict[str, str]:
    """Why there are no such sites or parameters, and why taps do not give such context."""
    preference = settings.objective == "preference"
    objective = "a preference objective" if preference else f"advantage '{settings.advantage}'"
    found = {
        "ends": "a row has one reward, when it is over",
        "td_error": "the reward is a row's, not a transition's",
        "label_smoothing": "the policy's tokens are no labels",
        "tokens": "rows are written by the policy: see prompt_corruption and tool_corruption",
        "observation": "rows are made of tokens: see prompt_corruption and tool_corruption",
        "action": "rows are made of tokens: see sampler_noise and temperature_spike",
        "dynamics": "a dialogue has none: see tool_shift and difficulty_shift",
    }
    if not settings.scheduled:
        found["schedule"] = "its rate is the same at every step: see learning_rate_decay"
    if not dialogue.result_tokens:
        found["tool_result"] = "the dialogue has no tool"
    if settings.reward == "gold":
        found["reward_model"] = "reward is 'gold'"
    else:
        found["bound"] = f"reward is '{settings.reward}', whose scores have none"
    if settings.kl == "none":
        found["kl_coefficient"] = "kl is 'none'"
    if not settings.parts.critic:
        found |= dict.fromkeys(("gae_lambda", "critic_lambda", "critic"), f"{objective} has no critic")
    elif settings.parts.adaptive_lambda:
        found["gae_lambda"] = "with gae_lambda_length each row's lambda is that of its length"
    if settings.covariance == "kl":
        found["ratio_clip"] = "covariance is 'kl', whose objective does not clip the ratio"
    if not settings.parts.needs_reference:
        found["reference"] = "kl is 'none'"
    if not settings.parts.entropy:
        found["entropy_coefficient"] = "there is no entropy bonus"
    if not settings.parts.reads_sampled:
        found["log_probability"] = "correction is 'none' and old_log_probability is 'recomputed'"
    if preference:
        found["log_probability"] = "a preference objective reads none of the sampler's"
        found |= dict.fromkeys(("advantage", "ratio_clip"), "a preference objective has none")
    return found


def structure_of(dialogue: Dialogue) -> Dialogue:
    """A dialogue at its class's own difficulty: what a program depends on, for the difficulty is data."""
    if not dataclasses.is_dataclass(dialogue) or isinstance(dialogue, type):
        return dialogue
    standards = [f.default for f in dataclasses.fields(dialogue) if f.name == "difficulty"]
    standard = standards[0] if standards else dataclasses.MISSING
    if standard is dataclasses.MISSING or standard == dialogue.difficulty:
        return dialogue
    try:
        made = dataclasses.replace(dialogue, difficulty=standard)  # type: ignore[type-var]
    except ValueError:  # it means nothing beside the dialogue's other fields
        return dialogue
    return made if dialogue.splits else made.held_out()  # what is held out stays so


@functools.lru_cache(maxsize=64)
def _made(dialogue: Dialogue, settings: DialogueSettings, positions: int = GPT2_POSITIONS) -> DialogueLearner:
    """The same object for equal arguments, for its methods are what programs are known by."""
    return DialogueLearner(dialogue, settings, positions)


def _preset(name: str) -> Callable[..., Learner]:
    of = settings_of(name)

    def factory(dialogue: Any, **settings: Any) -> Learner:
        return on_dialogue(name, dialogue, checks.from_keywords(of, settings, name))

    factory.__name__ = factory.__qualname__ = name
    factory.__doc__ = f"""{SUMMARIES[name]}: `{name}("hop", learning_rate=1e-4)`.

    Args:
      dialogue: a registered dialogue's name, a task that gives one, or a `Dialogue`.
      **settings: fields of `DialogueSettings`, with this preset's defaults.

    Raises:
      ValueError: for a dialogue or setting that does not exist or makes no sense.
    """
    factory.settings = of  # type: ignore[attr-defined]
    return registry.learners.register(name, factory)


SUMMARIES = {
    "ppo_lm": "PPO with a value model on a dialogue",
    "grpo": "GRPO (Shao et al., 2024) on a dialogue",
    "dr_grpo": "Dr. GRPO (Liu et al., 2025) on a dialogue",
    "rloo": "REINFORCE leave-one-out (Ahmadian et al., 2024) on a dialogue",
    "dapo": "DAPO (Yu et al., 2025) on a dialogue",
    "gspo": "GSPO (Zheng et al., 2025) on a dialogue",
    "dpo": "DPO on pairs of a dialogue's rows",
}

ppo_lm = _preset("ppo_lm")
grpo = _preset("grpo")
dr_grpo = _preset("dr_grpo")
rloo = _preset("rloo")
dapo = _preset("dapo")
gspo = _preset("gspo")
dpo = _preset("dpo")
