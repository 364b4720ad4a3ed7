"""The texts that `jaxaudit list` and `jaxaudit sample` print."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxaudit.analysis import metrics as metric_functions
from jaxaudit.analysis.datasets import find_index
from jaxaudit.analysis.run_reader import (
    CONTROL,
    HeldOutRow,
    RowToken,
    Run,
    has_held_out_rows,
    held_out_rows,
    load,
    nearest_step,
)
from jaxaudit.perturbations import Kind
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.runtime.registry import align_columns, first_docstring_line
from jaxaudit.spec.schema import REQUIRED, default_of
from jaxaudit.spec.sections import learner_settings
from jaxaudit.spec.tables import to_toml_value

TABLE_S5 = (
    "collapse_time",
    "instability_index",
    "divergence_probability",
    "recovery_rate",
    "recovery_time",
    "spike_intensity",
    "meta_state_deviation",
)
"""The metrics that every run has; see Table S5 of the paper."""

LINE_WIDTH = 110
"""The most characters in a line of a held-out row."""


def tasks() -> list[str]:
    """Returns the kinds of task, each followed by the names that a spec can give with it."""
    lines = []
    for name, kind in registry.task_kinds.items():
        lines += [f"{name}  {first_docstring_line(kind)}", *(f"  {line}" for line in align_columns(kind.listing()))]
    return lines


def learners() -> list[str]:
    """Returns the learners, each followed by its settings and their defaults."""
    lines = []
    for name in registry.learners:
        lines.append(f"{name}  {first_docstring_line(registry.learners[name])}")
        fields = [f for f in dataclasses.fields(learner_settings(name)) if f.name != "telemetry"]
        lines += align_columns([(f"  {f.name}", _default_text(f)) for f in fields])
    return lines


def _default_text(field: dataclasses.Field) -> str:
    default = default_of(field)
    return "(required)" if default is REQUIRED else to_toml_value(default)


_DIALOGUES = "dialogues but dpo"
REMEDY_LEARNERS = {
    "adam_rel": "all but sac, td3",
    "adaptive_entropy": _DIALOGUES,
    "clip_cov": "dialogues but dpo, gspo, rloo",
    "clip_higher": f"ppo, {_DIALOGUES}",
    "critic_layer_norm": "ppo, trpo, sac, td3",
    "decoupled_lambda": "ppo, trpo, ppo_lm",
    "dual_clip": _DIALOGUES,
    "kl_cov": "dialogues but dpo, gspo, rloo",
    "kl_in_both": _DIALOGUES,
    "kl_in_reward": _DIALOGUES,
    "kl_off_policy": _DIALOGUES,
    "length_adaptive_lambda": "ppo_lm",
    "masked_importance": _DIALOGUES,
    "sequence_mask": _DIALOGUES,
    "target_kl_stop": f"ppo, {_DIALOGUES}",
    "truncated_importance": _DIALOGUES,
    "value_pretraining": "ppo_lm",
}
"""The learners of this package that a remedy fits, where these are not all of them."""


def remedies() -> list[str]:
    """Returns a line for each remedy: where it acts, its default and neutral strengths, and the learners it fits.

    Which learners a remedy of another package fits is not known.
    """
    rows = [("name", "acts on", "strength", "neutral", "learners", "what it does")]
    for name, kind in registry.remedies.items():
        neutral = "" if kind.neutral is None else f"{kind.neutral:g}"
        is_own = str(getattr(kind, "__module__", "")).startswith("jaxaudit.")
        learners_cell = REMEDY_LEARNERS.get(name, "all") if is_own else ""
        site = kind.site or "settings"
        rows.append((name, site, f"{kind.strength:g}", neutral, learners_cell, first_docstring_line(kind)))
    return align_columns(rows)


def perturbations() -> list[str]:
    """Returns the perturbations with their default magnitudes and durations."""
    return _perturbation_kinds(registry.perturbations)


def interventions() -> list[str]:
    """Returns the interventions with their default magnitudes and durations."""
    return _perturbation_kinds(registry.interventions)


def _perturbation_kinds(kinds: registry.Registry) -> list[str]:
    rows = [("name", "dimension", "site", "magnitude", "duration", "what it does")]
    for name in kinds:
        kind = kinds[name]
        if isinstance(kind, Kind):
            magnitudes = ", ".join(f"{m:g}" for m in kind().magnitudes)
            rows.append(
                (name, kind.dimension, kind.site, magnitudes, str(kind.when.duration), first_docstring_line(kind))
            )
    return align_columns(rows)


def metrics() -> list[str]:
    """Returns the metrics: those of Table S5, and then the registered ones."""
    functions = {name: getattr(metric_functions, name) for name in TABLE_S5}
    functions |= dict(registry.metrics.items())
    return align_columns([(name, first_docstring_line(function)) for name, function in functions.items()])


def sample(folder: Path, seed: int | None = None, condition: str | None = None, step: int | None = None) -> str:
    """Returns the held-out rows of one lane at one step; below each generated token is its log-probability.

    Args:
      folder: the folder of a run.
      seed: the lane's seed; None for the first one.
      condition: the lane's condition, by its label or its number; None for the first control.
      step: the step, or the nearest one that was measured; None for the last one.

    Raises:
      UserError: the run stored no rows, or has no such seed, condition or step.
    """
    try:
        run = load(folder)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(str(error)) from None
    if not has_held_out_rows(run.telemetry):
        raise UserError(
            f'the run in {folder} stored no held-out rows: a dialogue does, with telemetry = "full" in [audit]'
        )
    seeds = [str(value) for value in run.telemetry["seed"].values]
    labels = list(run.conditions["condition"])
    lane = 0 if seed is None else find_index("seed", seed, seeds)
    controls = [i for i, name in enumerate(run.conditions["perturbation"]) if name == CONTROL]
    column = next(iter(controls), 0) if condition is None else find_index("condition", condition, labels)
    label = labels[column]
    last = int(run.computed[column]) - 1
    if last < 0:
        raise UserError(f"condition '{label}' has not been trained yet; continue with: jaxaudit resume {folder}")
    step = last if step is None else step
    if not 0 <= step <= last:
        raise UserError(f"step must be from 0 to {last}, the last that '{label}' was trained to, not {step}")
    try:
        measured = nearest_step(run.telemetry, step, last)
    except ValueError as error:
        raise UserError(f"{error}, the last that '{label}' was trained to") from None
    nearest = "" if measured == step else f" (the measured step nearest to {step})"
    since_onset = _since_onset(run, column, measured)
    heading = f"{run.name}: seed {seeds[lane]}, {label}, step {measured}{nearest}{since_onset}"
    rows = held_out_rows(run.telemetry, lane, column, measured)
    return "\n\n".join([heading, *("\n".join(_row_lines(row, number)) for number, row in enumerate(rows, 1))])


def _since_onset(run: Run, column: int, step: int) -> str:
    row = run.conditions.iloc[column]
    if row["perturbation"] == CONTROL:
        return ""
    since = step - int(row["onset"])
    return f", {-since} before the onset" if since < 0 else f", {since} after the onset"


def _row_lines(row: HeldOutRow, number: int) -> Iterator[str]:
    """Yields the lines of a row: a heading, and then the tokens of each turn.

    The heading has the row's number and reward, the number of generated tokens, and their total log-probability.
    """
    generated = [token.log_probability for token in row.tokens if token.is_own]
    yield (
        f"row {number}: reward {row.reward:g}, {len(generated)} generated tokens with a total log-probability of "
        f"{sum(generated):.2f}"
    )
    for role, turn in itertools.groupby(row.tokens, key=lambda token: token.role):
        yield from _turn_lines(role, list(turn))


def _turn_lines(role: str, tokens: Sequence[RowToken]) -> Iterator[str]:
    """Yields lines of a turn's tokens, each followed by a line of log-probabilities if the tokens are generated."""
    texts = ["".join(c if c.isprintable() else "\N{OPEN BOX}" for c in token.text) for token in tokens]
    numbers = [f"{token.log_probability:.2f}" if token.is_own else "" for token in tokens]
    widths = [max(len(text), len(number)) for text, number in zip(texts, numbers, strict=True)]
    start, margin = 0, f"  {'policy' if tokens[0].is_own else role:8}"
    while start < len(tokens):
        end, length = start, len(margin)
        while end < len(tokens) and (end == start or length + widths[end] + 1 <= LINE_WIDTH):
            length += widths[end] + 1
            end += 1
        for first, cells in ((margin, texts), (" " * len(margin), numbers)):
            if any(cells[start:end]):
                line = " ".join(c.ljust(w) for c, w in zip(cells[start:end], widths[start:end], strict=True))
                yield f"{first}{line}".rstrip()
        start, margin = end, " " * len(margin)
