"""Specs of learners on dialogues: every mistake gives one sentence, and the stored spec has every default."""

import dataclasses
import json
from pathlib import Path
from typing import get_type_hints

import jax
import pytest
from cli_errors import cli_error
from directories import DATA

from jaxaudit.cli import main as cli
from jaxaudit.cli import printing as listing
from jaxaudit.core.grid import site_misfit
from jaxaudit.core.sites import find_sites
from jaxaudit.learners import grpo
from jaxaudit.learners.dialogue.factories import PRESETS, settings_of
from jaxaudit.learners.dialogue.settings import DialogueSettings
from jaxaudit.models import gpt2, gpt2_checkpoint
from jaxaudit.runtime.registry import perturbations
from jaxaudit.spec.document import parse

LEARNER = 'kind = "grpo"\nwarm_start = 0\nepochs = 1'
PERTURBATION = '[[perturbation]]\nkind = "verifier_flip"\nmagnitude = 0.3\n'
VALID_SPEC = f"""
[audit]
name = "rows"
seeds = 2
steps = 20
telemetry = "basic"
[task]
kind = "dialogue"
name = "hop"
[learner]
{LEARNER}
{PERTURBATION}onset = 10
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Changes to an empty folder, and keeps the settings of JAX."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "prepare_jax", lambda: None)


def task(name, settings=""):
    return 'name = "hop"', f'name = "{name}"\n{settings}'


def learner(settings, kind="grpo"):
    return LEARNER, f'kind = "{kind}"\n{settings}'


def perturbation(kind, magnitude):
    return PERTURBATION, f'[[perturbation]]\nkind = "{kind}"\nmagnitude = {magnitude}\n'


WRONG_SPECS = {
    # The dialogue.
    "an unknown dialogue": (task("hopp"), "[task]: unknown dialogue 'hopp' (did you mean 'hop'?); allowed: calculator"),
    "an unknown setting": (task("hop", "hop = 3"), "[task]: unknown key 'hop' (did you mean 'hops'?)"),
    "a row too short": (task("hop", "length = 10"), "[task]: length must be at least 21 for 4 hops, not 10"),
    "a difficulty outside": (task("hop", "difficulty = 7"), "difficulty must be from 1 to the 4 hops, not 7"),
    "a share above one": (task("hop", "rare_share = 2"), "rare_share must lie in [0, 1], not 2"),
    "an operator": (task("calculator", 'operators = "/"'), "operators must be some of '+-*', each once, not '/'"),
    "a short chain": (task("chain", "length = 8"), "length must be at least 21 for 8 steps, not 8"),
    "too many topics": (task("preference", "difficulty = 3"), "difficulty must be from 1 to 2 topics, not 3"),
    "a text without its file": (task("text"), "[task]: 'file' is missing; it must be a string"),
    "a text that is not there": (task("text", 'file = "no.jsonl"'), "no.jsonl"),
    "a response that cannot fit": (
        task("text", 'file = "lines.jsonl"\nlength = 20'),
        "line 2: a prompt of 4 tokens, its demonstration of 40 and the end of text do not fit in rows of 20 slots",
    ),
    "a prompt that cannot fit": (
        task("text", 'file = "lines.jsonl"\nlength = 4'),
        "line 1: the prompt has 4 tokens; from 1 to 3 fit in rows of 4 slots",
    ),
    "a kind of task nobody knows": (
        ('kind = "dialogue"', 'kind = "dialog"'), "[task]: unknown kind of task 'dialog' (did you mean 'dialogue'?)",
    ),
    "a verifier nobody knows": (
        task("text", 'file = "no.jsonl"\nverifier = "judge"'),
        'verifier must be "exact" or "contains" or "number" or "regex", not the string \'judge\'',
    ),
    "another kind of task": (('kind = "dialogue"\nname = "hop"', 'kind = "mujoco"\nname = "Hopper-v5"'),
        "learner 'grpo' trains on a task of kind 'dialogue', not 'mujoco'"),
    "another kind of learner": (learner("", "ppo"), "learner 'ppo' trains on environments, not on a task of kind"),
    "a learner nobody knows": (learner("", "grop"), "unknown learner 'grop' (did you mean 'grpo'?); allowed"),
    # The learner's numbers.
    "a KL that pays": (learner("kl_coefficient = -0.1"), "kl_coefficient must not be negative, not -0.1"),
    "a clip range above one": (learner("clip_low = 1.5"), "clip_low must lie in [0, 1], not 1.5"),
    "no cap": (learner('correction = "tis"\ntis_cap = 0'), "tis_cap must be positive, not 0"),
    "never measured": (learner("performance_every = 0"), "performance_every must be at least 1, not 0"),
    "half a row": (learner("group_size = 4.5"), "group_size must be a whole number, not the number 4.5"),
    "a buffer longer than rows": (learner("overlong_buffer = 2", "dapo"), "overlong_buffer must lie in [0, 1], not 2"),
    "groups of one": (learner("group_size = 1"), "group_size must be at least 2, not 1, for advantage 'group'"),
    "pairs of one": (learner("group_size = 1", "dpo"), "group_size must be at least 2, not 1, for a pref"),
    "rows that do not divide": (learner("minibatches = 3"), "minibatches must divide the 64 rows (prompts * "),
    "pairs that do not divide": (learner("minibatches = 5", "dpo"), "minibatches must divide the 32 pairs, and 5 does"),
    "parts that do not divide": (learner("microbatches = 5"), "microbatches must divide the 32 rows (prompts * group_"),
    "top_k of all": (learner("top_k = 21"), "top_k must be below the vocabulary's 21 tokens, not 21"),
    "top_k of none": (learner("top_k = -1"), "top_k must not be negative, not -1"),
    "top_p of none": (learner("top_p = 0"), "top_p must lie in (0, 1], not 0"),
    "top_p above one": (learner("top_p = 1.5"), "top_p must lie in (0, 1], not 1.5"),
    "no temperature": (learner("temperature = 0"), "temperature must be positive, not 0"),
    "no rows to measure": (learner("performance_rows = 0"), "performance_rows must be at least 1, not 0"),
    "a warm start beyond": (learner("warm_start_success = 1.5"), "warm_start_success must lie in [0, 1], not 1.5"),
    "a dual clip below one": (learner("dual_clip = 0.5"), "dual_clip must be above 1, not 0.5"),
    "a mask the wrong way round": (learner("mis_low = 3"), "mis_low must lie in [0, mis_high = 2.0), not 3.0"),
    "labels half wrong": (learner("label_smoothing = 0.5", "dpo"), "label_smoothing must lie in [0, 0.5), not 0.5"),
    "a size nobody has": (learner('size = "tiny"'), 'size must be "micro" or "nano" or "mini" or "124m" or'),
    # Parts that do not fit each other.
    "a weight without its KL": (
        learner("kl_coefficient = 0.1", "dr_grpo"),
        "weighs a divergence from the reference, and kl is 'none'; choose k1, k2, k3 or exact, or kl_coefficient = 0",
    ),
    "the weight of a KL in DPO": (
        learner("kl_coefficient = 0.1", "dpo"),
        "from the reference, and a preference objective has its own, weighed by beta; leave kl_coefficient at 0",
    ),
    "an exact KL in the reward": (learner('kl = "exact"\nkl_in = "reward"'), "in the reward kl must be k1, k2 or k3"),
    "TIS with what was sampled": (
        learner('correction = "tis"\nold_log_probability = "sampled"'),
        "correction = 'tis' weighs tokens by recomputed over sampled probabilities, so old_log_probability must be",
    ),
    "a geometric TIS": (
        learner('correction = "tis"\ncorrection_level = "geometric"'),
        "correction_level = 'geometric' only masks, so correction must be 'mis', not 'tis'",
    ),
    "oversampling with a critic": (
        learner("oversampling = 2", "ppo_lm"),
        "oversampling 2 keeps rollout groups whose rewards differ, which advantage 'gae' does not compare",
    ),
    "sequences with a critic": (learner('ratio = "sequence_sum"', "ppo_lm"), "so advantage must not be 'gae'"),
    "a KL in DPO": (learner('kl = "k3"', "dpo"), "a preference objective contains its own KL, so kl must be 'none'"),
    "TIS in DPO": (
        learner('correction = "tis"', "dpo"),
        "a preference objective has no probability ratio and no entropy bonus, so correction must be 'none' and",
    ),
    "online GRPO": (learner("online = true"), "online applies to a preference objective"),
    "adapters of nothing": (learner("lora_rank = 4"), "lora_rank 4 adapts the parameters of a checkpoint, and none is"),
    "a word nobody knows": (
        learner('advantage = "grup"'),
        'advantage must be "gae" or "group" or "group_mean" or "leave_one_out", not the string \'grup\'',
    ),
    "a setting nobody knows": (learner("clip_hi = 0.2"), "unknown key 'clip_hi' (did you mean 'clip_high'?)"),
    "a reward in Python": (
        learner('reward = "mine:reward"'),
        "reward must be 'gold' or 'learned', not 'mine:reward': to write a reward in Python, register a dialogue",
    ),
    # The checkpoint.
    "a checkpoint that is not there": (learner('checkpoint = "nowhere"'), "nowhere: there is no such file"),
    "a checkpoint of other tokens": (learner('checkpoint = "checkpoint"'), "wpe.weight' has shape [16, 64]"),
    # Disturbances.
    "a tool that is not there": (
        (f'name = "hop"\n[learner]\n{LEARNER}\n{PERTURBATION}',
         f'name = "chain"\n[learner]\n{LEARNER}\n{perturbation("tool_error", 0.2)[1]}'),
        "'tool_error' acts at site 'tool_result', which the learner does not tap, for the dialogue has no tool; its",
    ),
    "a reward that comes late": (
        perturbation("reward_delay", 2),
        "'reward_delay' needs ends at site 'reward', which the learner's tap there does not give, for a row has one",
    ),
    "flips of scores that have no opposite": (
        learner('reward = "learned"\nwarm_start = 0\nreward_model_warm_start = 0'),
        "'verifier_flip' needs bound at site 'reward', which the learner's tap there does not give, for reward is "
        "'learned', whose scores have none",
    ),
    "a difficulty beyond": (
        perturbation("difficulty_shift", 9),
        "[[perturbation]] 1: magnitude 9 of 'difficulty_shift' is outside its range -2 to 1 for this learner",
    ),
    "a disturbance nobody knows": (perturbation("tool_eror", 0.2), "'tool_eror' (did you mean 'tool_error'?); allowed"),
    "a part of nothing": (
        perturbation("weight_noise", '0.1\ntarget = "critic"'),
        "of 'weight_noise' is in none of the paths at site 'params', for advantage 'group' has no critic: policy/... (",
    ),
    "no temperature for a while": (perturbation("temperature_spike", 0), "outside its range 0.01 to inf"),
    "rarely synced": (perturbation("sync_interval", 1.5), "magnitude 1.5 of 'sync_interval' must be a whole number"),
    "more bits than there are": (perturbation("sampler_quantize", 50), "outside its range 2 to 32"),
    "a policy too old": (perturbation("stale_policy", 9), "magnitude 9.0 of 'stale_policy' is outside its range 0 to"),
    "half a step": (perturbation("stale_policy", 2.5), "magnitude 2.5 of 'stale_policy' must be a whole number"),
    "more than all rewards": (perturbation("verifier_flip", 2), "magnitude 2.0 of 'verifier_flip' is outside its"),
}  # fmt: skip


REFUSED_LATE = (
    "a checkpoint of other tokens",
    "a tool that is not there",
    "a reward that comes late",
    "flips of scores that have no opposite",
)
"""Cases that are refused only when the learner was traced, which takes seconds."""


def with_mark(case):
    return pytest.param(case, marks=pytest.mark.exhaustive if case in REFUSED_LATE else ())


@pytest.mark.parametrize("case", map(with_mark, WRONG_SPECS))
def test_a_wrong_spec_is_refused_in_one_sentence(case, capsys):
    (old, new), message = WRONG_SPECS[case]
    assert old in VALID_SPEC
    if "lines.jsonl" in new:
        lines = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "four " * 8}]
        Path("lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    if case == "a checkpoint of other tokens":
        model = gpt2.GPT2(10, 16, gpt2.SIZES["micro"])
        gpt2_checkpoint.save(Path("checkpoint"), gpt2.init_params(model, jax.random.key(0)), model)
    Path("spec.toml").write_text(VALID_SPEC.replace(old, new, 1), encoding="utf-8")
    sentence = cli_error(capsys, "run", "spec.toml", "-o", "out")
    assert sentence.startswith("jaxaudit: spec.toml")
    assert message in sentence


def test_absent_sites_are_explained_by_the_settings(capsys):
    """One traced step of a learner serves all kinds."""
    kinds = {
        "label_smoothing": "for the policy's tokens are no labels",
        "token_corruption": "for rows are written by the policy",
        "adversarial_reward": "for the reward belongs to a row, not to a transition",
        "reward_model_noise": "for reward is 'gold'",
        "kl_failure": "for kl is 'none'",
        "lr_schedule_error": "for its rate is the same at every step",
        "value_bias": "for advantage 'group_mean' has no critic",
        "signal_decay": "for advantage 'group_mean' has no critic",
        "reference_drift": "for kl is 'none'",
        "log_probability_noise": "for correction is 'none' and old_log_probability is 'recomputed'",
        "observation_noise": "for rows are made of tokens: see prompt_corruption and tool_corruption",
        "action_noise": "for rows are made of tokens: see sampler_noise and temperature_spike",
        "dynamics_shift": "for a dialogue has none: see tool_shift and difficulty_shift",
    }
    spec = parse(VALID_SPEC.replace('kind = "grpo"', 'kind = "dr_grpo"'))
    sites = find_sites(spec._learner(), 20)
    for name, reason in kinds.items():
        assert reason in site_misfit(perturbations[name](), sites)
    target = perturbations["weight_noise"](target="critic")
    message = site_misfit(target, sites)
    assert "in none of the paths at site 'params', for advantage 'group_mean' has no critic: policy/... (" in message


def test_a_function_as_a_reward_is_refused_with_advice():
    with pytest.raises(ValueError, match="to write a reward in Python, register a dialogue with"):
        grpo("hop", reward=lambda row: 1.0)


@pytest.mark.parametrize("kind", PRESETS)
def test_the_stored_spec_has_every_default(kind):
    spec = parse(VALID_SPEC.replace(LEARNER, f'kind = "{kind}"'))
    text = spec.to_toml()
    assert parse(text) == spec
    for line in ("entities = 6", "rare_share = 0.002", "clip_low = ", 'advantage = "', "warm_start_success = 0.5"):
        assert line in text
    assert f'kind = "{kind}"' in text


@pytest.mark.parametrize("kind", PRESETS)
def test_defaults_equal_the_stored_ones(kind):
    """A change of a default, of the dataclass or of a preset, changes published results."""
    stored = json.loads((DATA / "dialogue_defaults.json").read_text())
    assert dataclasses.asdict(settings_of(kind)()) == stored["every"] | stored[kind]
    assert dataclasses.asdict(DialogueSettings()) == stored["every"]


def test_the_listing_has_presets_dialogues_and_perturbations():
    learners, tasks, disturbances = (
        getattr(listing, function_name)() for function_name in ("learners", "tasks", "perturbations")
    )
    for kind in PRESETS:
        assert any(line.startswith(f"{kind}  ") for line in learners)
    assert any(line.startswith("dialogue  ") for line in tasks)
    assert any(line.startswith("  hop ") and "table" in line for line in tasks)
    for name in ("tool_error", "stale_policy", "verifier_flip", "kl_failure", "reference_reset"):
        assert any(line.startswith(f"{name} ") for line in disturbances)


@pytest.mark.parametrize("preset", PRESETS)
def test_type_hints_of_preset_settings_resolve(preset):
    """From Python 3.12 on, `make_dataclass` sets a class's module to that of its caller, so that hints may fail."""
    settings_class = settings_of(preset)
    assert settings_class.__module__ == DialogueSettings.__module__
    assert get_type_hints(settings_class).keys() == get_type_hints(DialogueSettings).keys()


def test_the_packaged_specs_are_valid(capsys):
    assert cli.main(["quickstart", "llm", "--print-spec"]) == 0
    spec = parse(capsys.readouterr().out)
    assert (spec.learner.kind, spec.task.name, spec.audit.seeds, spec.audit.steps) == ("grpo", "hop", 8, 100)
    assert cli.main(["quickstart", "--print-spec"]) == 0
    assert parse(capsys.readouterr().out).learner.kind == "ppo"
    assert "invalid choice: 'ppo'" in cli_error(capsys, "quickstart", "ppo")
