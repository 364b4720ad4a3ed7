"""The JSON schema of specs, held against the specs of this repository and against the reader of specs."""

import dataclasses
import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

import jaxaudit
from jaxaudit.cli import main as cli
from jaxaudit.learners import PPOSettings
from jaxaudit.runs.variants.folder import parse as parse_comparison
from jaxaudit.runs.variants.schema import schema
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import parse
from jaxaudit.spec.schema import DRAFT, documented_names, keys_of, learner_keys, perturbation_kinds

ROOT = Path(jaxaudit.__file__).parents[1]
SPECS = [
    path
    for pattern in ("experiments/**/*.toml", "jaxaudit/*.toml")
    for path in sorted(ROOT.glob(pattern))
    if "audit" in tomllib.loads(path.read_text())
]

GOOD = """
[audit]
seeds = 2
steps = 100
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "ppo"
num_envs = 2
[[perturbation]]
kind = "quantize"
magnitude = [4, 8]
onset = 0.3
[[perturbation]]
onset = [10, 20]
chain = [{ kind = "weight_noise", magnitude = 0.1 }, { kind = "lr_spike", duration = 2 }]
[[perturbation]]
dimension = "signal"
duration = "end"
[[remedy]]
kind = "target_kl_stop"
"""

WRONG = {
    "no audit": ("[audit]\nseeds = 2\nsteps = 100\n", ""),
    "no task": ('[task]\nkind = "mujoco"\nname = "InvertedPendulum-v5"\n', ""),
    "unknown table": ("[learner]", "[metric]\nwindow = 5\n[learner]"),
    "missing steps": ("steps = 100", ""),
    "steps are text": ("steps = 100", 'steps = "100"'),
    "no steps": ("steps = 100", "steps = 0"),
    "no seeds": ("seeds = 2", "seeds = []"),
    "a seed twice": ("seeds = 2", "seeds = [1, 1]"),
    "a negative seed": ("seeds = 2", "seeds = [0, -1]"),
    "unknown audit key": ("steps = 100", "steps = 100\nstep = 1"),
    "unknown execution": ("steps = 100", 'steps = 100\nexecution = "pmap"'),
    "unknown kind of task": ('"mujoco"', '"mojuco"'),
    "unknown physics": ('-v5"', '-v5"\nphysics = "bullet"'),
    "unknown learner": ('"ppo"', '"pppo"'),
    "unknown setting": ("num_envs", "num_env"),
    "setting of another type": ("num_envs = 2", "num_envs = 2.5"),
    "telemetry in the learner": ("num_envs = 2", 'telemetry = "full"'),
    "unknown perturbation": ('"quantize"', '"quantise"'),
    "magnitude out of range": ("[4, 8]", "[4, 0]"),
    "magnitude not whole": ('"quantize"\nmagnitude = [4, 8]', '"observation_delayed"\nmagnitude = 2.5'),
    "no magnitude": ("[4, 8]", "[]"),
    "a magnitude twice": ("[4, 8]", "[8, 8]"),
    "onset beyond the run": ("onset = 0.3", "onset = 1.5"),
    "negative onset": ("onset = 0.3", "onset = -1"),
    "unknown duration": ("onset = 0.3", 'duration = "ever"'),
    "no duration": ("onset = 0.3", "duration = 0"),
    "no period": ("onset = 0.3", "period = 0"),
    "target is a list": ("onset = 0.3", 'target = ["critic"]'),
    "kind and dimension": ('dimension = "signal"', 'dimension = "signal"\nkind = "lr_spike"'),
    "none of kind, chain and dimension": ('dimension = "signal"\n', ""),
    "unknown dimension": ('"signal"', '"signals"'),
    "several onsets in a chain's part": ("duration = 2", "onset = [1, 2]"),
    "a magnitude beside a chain": ("onset = [10, 20]", "onset = [10, 20]\nmagnitude = 3"),
    "an empty chain": ('[{ kind = "weight_noise", magnitude = 0.1 }, { kind = "lr_spike", duration = 2 }]', "[]"),
    "unknown remedy": ("target_kl_stop", "target_kl"),
    "negative strength": ('"target_kl_stop"', '"target_kl_stop"\nstrength = -1'),
    "alpha of one": ("[learner]", '[monitor]\nfile = "m.npz"\nalpha = 1.0\n[learner]'),
    "metrics without a window": ("[learner]", "[metrics]\nwindow = 0\n[learner]"),
    "a negative chunk": ("[learner]", "[run]\nchunk = -1\n[learner]"),
}
"""Replacements in `GOOD` that make a wrong spec."""


@pytest.fixture(scope="module")
def validator():
    return jsonschema.Draft202012Validator(schema())


def errors(validator, text):
    return [error.message for error in validator.iter_errors(tomllib.loads(text))]


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["$schema"] == DRAFT


def test_specs_are_found():
    assert len(SPECS) > 60
    assert {"quickstart.toml", "quickstart_llm.toml"} <= {path.name for path in SPECS}


@pytest.mark.parametrize("path", SPECS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_spec_of_this_repository_fits(path, validator):
    assert not errors(validator, path.read_text())


def test_written_defaults_fit(validator):
    text = parse(GOOD).to_toml()
    assert not errors(validator, GOOD)
    assert not errors(validator, text)
    assert not errors(validator, parse(text.replace('physics = "auto"', 'physics = "c"')).to_toml())


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_does_not_fit(name, validator):
    old, new = WRONG[name]
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    with pytest.raises(UserError):
        parse(text)
    assert errors(validator, text)


VARIANT = '[[variant]]\nname = "slow"\nlearner = { learning_rate = 1e-4 }\n'
WRONG_COMPARISONS = {
    "no name": ('name = "slow"\n', ""),
    "no difference": ("learner = { learning_rate = 1e-4 }\n", ""),
    "unknown setting": ("learning_rate", "lerning_rate"),
    "unknown centre": ("[[variant]]", '[compare]\ncentre = "middle"\n[[variant]]'),
    "negative number of fresh seeds": ("[[variant]]", "[compare]\nfresh = -1\n[[variant]]"),
}


@pytest.mark.parametrize("name", WRONG_COMPARISONS)
def test_a_wrong_comparison_does_not_fit(name, validator):
    old, new = WRONG_COMPARISONS[name]
    text = GOOD + VARIANT.replace(old, new, 1)
    with pytest.raises(UserError):
        parse_comparison(text)
    assert errors(validator, text)
    assert not errors(validator, GOOD + VARIANT)


def test_every_name_of_the_registries_is_known(validator):
    learner = schema()["properties"]["learner"]["properties"]["kind"]["enum"]
    perturbation = schema()["properties"]["perturbation"]["items"]["properties"]["kind"]["enum"]
    assert learner == list(registry.learners)
    assert set(perturbation) == set(perturbation_kinds())
    assert {"lr_spike", "roll_back"} <= set(perturbation)


def test_keys_are_the_fields_with_their_defaults_and_meanings():
    keys = {key.name: key for key in keys_of(PPOSettings)}
    assert list(keys) == [field.name for field in dataclasses.fields(PPOSettings)]
    assert (keys["clip"].type_text, keys["clip"].default_text) == ("a number", "0.2")
    assert keys["hidden"].schema()["default"] == [64, 64]
    assert keys["epochs"].meaning == "Number of passes over an iteration's samples."


@pytest.mark.parametrize("kind", ["ppo", "trpo", "sac", "td3", "language_model", "ppo_lm", "grpo", "dapo", "dpo"])
def test_every_setting_has_a_meaning(kind):
    for key in learner_keys(kind):
        assert key.meaning, key.name
        assert not key.meaning.startswith("See `"), key.name


def test_names_that_share_a_description_are_divided():
    text = """First line.

    Attributes:
      a, b,
      c: shared by three,
        on two lines.
      d: one: with a colon.

    Raises:
      ValueError: never.
    """
    shared = "shared by three, on two lines."
    assert documented_names(text) == {"a": shared, "b": shared, "c": shared, "d": "one: with a colon."}
    assert documented_names("No section.") == {}


def test_the_command_prints_it(capsys):
    assert cli.main(["schema"]) == 0

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed == json.loads(json.dumps(schema()))
