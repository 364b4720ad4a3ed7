import datetime
import importlib.resources
import itertools
import tomllib
from pathlib import Path

import pytest
import quadratic  # noqa: F401  registers the learner
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxaudit as ja
from jaxaudit import dialogues
from jaxaudit.core.grid import Grid
from jaxaudit.runtime import registry
from jaxaudit.runtime.errors import UserError
from jaxaudit.spec.document import load, parse
from jaxaudit.spec.sections import DimensionEntry, PerturbationEntry
from jaxaudit.spec.tables import to_toml_text

HEAD = """
[audit]
seeds = 2
steps = 100
[task]
kind = "mujoco"
name = "InvertedPendulum-v5"
[learner]
kind = "{learner}"
"""


def spec_of(entries: str, learner: str = "quadratic"):
    return parse(HEAD.format(learner=learner) + entries, "spec.toml")


def conditions_of(spec):
    return [(c.name, c.magnitude, c.onset) for c in spec.build().conditions if c.parts]


def test_defaults_are_stored_in_the_spec():
    text = spec_of('[[perturbation]]\nkind = "lr_spike"', "ppo").to_toml()
    expected = {
        "audit": {"name": "audit", "telemetry": "full", "execution": "vmap"},
        "task": {"physics": "auto"},
        "learner": {"num_envs": 8, "clip": 0.2, "hidden": [64, 64], "anneal": True},
        "metrics": {"window": 50, "hold": 100, "horizon": 500},
        "run": {"chunk": 0, "checkpoint_every": 0},
    }
    written = tomllib.loads(text)
    assert list(written) == [*expected, "perturbation"]
    for name, values in expected.items():
        assert values.items() <= written[name].items()
    assert {"magnitude": 10.0, "onset": 0.3, "duration": 10}.items() <= written["perturbation"][0].items()
    assert text.count("telemetry") == 1


DIALOGUE = HEAD.replace('kind = "mujoco"\nname = "InvertedPendulum-v5"', 'kind = "dialogue"\n{task}').replace(
    "{learner}", "quadratic"
)


def test_the_name_of_a_dialogue_determines_its_keys():
    spec = parse(DIALOGUE.format(task='name = "hop"\ndifficulty = 2'))
    written = tomllib.loads(spec.to_toml())["task"]
    assert written == {
        "kind": "dialogue",
        "name": "hop",
        "difficulty": 2.0,
        "entities": 6,
        "hops": 4,
        "rare_share": 0.002,
        "scratch": 0,
        "length": 24,
    }
    assert parse(spec.to_toml()) == spec
    assert spec.task == dialogues.named("hop", difficulty=2.0)
    assert hash(spec.task) == hash(dialogues.named("hop", difficulty=2.0))


def test_files_of_a_dialogue_may_be_absent_when_a_spec_is_parsed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("lines.jsonl").write_text("")
    spec = parse(DIALOGUE.format(task='name = "text"\nfile = "lines.jsonl"\nverifier = "number"'))
    assert spec.task.settings.file == str(tmp_path / "lines.jsonl")
    assert parse(spec.to_toml()) == spec
    assert "content" not in spec.to_toml()
    assert parse(DIALOGUE.format(task='name = "text"\nfile = "gone.jsonl"')).task.settings.file == "gone.jsonl"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ('name = "hopp"', r"\[task\]: unknown dialogue 'hopp' \(did you mean 'hop'\?\)"),
        ("", r"\[task\]: 'name' is missing; it must be a string"),
        ('name = "hop"\nhop = 1', r"\[task\]: unknown key 'hop' \(did you mean 'hops'\?\)"),
        ('name = "hop"\nhops = "two"', r"\[task\]: hops must be a whole number, not the string 'two'"),
        ('name = "hop"\ndifficulty = 9', r"\[task\]: difficulty must be from 1 to the 4 hops, not 9"),
        ('name = "text"', r"\[task\]: 'file' is missing; it must be a string"),
    ],
)
def test_invalid_dialogues_are_refused(task, message):
    with pytest.raises(UserError, match=message):
        parse(DIALOGUE.format(task=task))


def test_lists_of_tables_get_headers_and_none_is_omitted():
    entries = [{"kind": "a", "target": None}, {"onset": 1, "chain": [{"kind": "b", "sweep": (1.0, 2.0)}, {"x": None}]}]
    text = to_toml_text({"audit": {"steps": 9, "lanes": None}, "monitor": None, "entry": entries})
    assert [line for line in text.splitlines() if line.startswith("[")] == [
        "[audit]", "[[entry]]", "[[entry]]", "[[entry.chain]]", "[[entry.chain]]"
    ]  # fmt: skip
    assert tomllib.loads(text) == {
        "audit": {"steps": 9},
        "entry": [{"kind": "a"}, {"onset": 1, "chain": [{"kind": "b", "sweep": [1.0, 2.0]}, {}]}],
    }


def test_the_path_of_a_monitor_is_relative_to_the_spec(tmp_path):
    (tmp_path / "spec.toml").write_text(HEAD.format(learner="quadratic") + '[monitor]\nfile = "m.npz"')
    spec = load(tmp_path / "spec.toml")
    assert spec.monitor.path == tmp_path / "m.npz"
    assert '[monitor]\nfile = "m.npz"\nalpha = 0.05\n' in spec.to_toml()
    elsewhere = parse(spec.to_toml().replace('"m.npz"', '"/m.npz"'), folder=tmp_path)
    assert str(elsewhere.monitor.path) == "/m.npz"
    assert "monitor" not in spec_of(ENTRY).to_toml()


def test_standard_perturbations_equal_calls_without_arguments():
    for kind in registry.perturbations:
        (entry,) = spec_of(f'[[perturbation]]\nkind = "{kind}"').perturbations
        standard = registry.perturbations[kind]
        assert entry.perturbation == standard()


def test_the_telemetry_of_an_audit_is_a_setting_of_the_learner():
    spec = parse(HEAD.format(learner="ppo").replace("steps", 'telemetry = "basic"\nsteps') + ENTRY)
    assert spec.learner.settings.telemetry == "basic"
    assert parse(spec.to_toml()) == spec


ENTRY = '[[perturbation]]\nkind = "lr_spike"\n'


@pytest.mark.parametrize(
    "entries",
    [
        ENTRY,
        ENTRY + "magnitude = [3, 1e9, 0.1]\nonset = [0, 0.5]\nduration = 3\nperiod = 7",
        ENTRY + "magnitude = inf\nonset = 17",
        '[[perturbation]]\nkind = "weight_noise"\nmagnitude = [0.5]\ntarget = "critic"\nduration = "end"',
        '[[perturbation]]\ndimension = "signal"\nonset = [0.2, 50]\nduration = "once"\n' + ENTRY,
        """[[perturbation]]
        onset = [0.2, 0.4]
        chain = [
          {kind = "lr_spike", magnitude = [2, 3]}, {kind = "weight_noise", onset = 60, target = "a/*"}
        ]""",
        '[[perturbation]]\nduration = 4\nchain = [{kind = "lr_spike", onset = 1}, {kind = "gradient_mask"}]',
        '[monitor]\nfile = "a/b.npz"\nalpha = 0.2\n' + ENTRY,
        '[[perturbation]]\nonset = 9\nchain = [{kind = "lr_spike"}, {kind = "roll_back", magnitude = [4, 8]}]',
        "[metrics]\nwindow = 5\n[run]\nchunk = 10\ncheckpoint_every = 3\n" + ENTRY,
    ],
)
def test_round_trip(entries):
    spec = spec_of(entries)
    assert parse(spec.to_toml()) == spec
    assert parse(spec.to_toml()).to_toml() == spec.to_toml()


@given(st.text(min_size=1, max_size=30), st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_strings_survive_a_round_trip(target, label):
    head = HEAD.format(learner="quadratic") + tomli_w.dumps({"label": label})
    spec = parse(f"{head}{ENTRY}{tomli_w.dumps({'target': target})}magnitude = 2", "spec.toml")
    assert (spec.perturbations[0].perturbation.target, spec.learner.settings.label) == (target, label)
    assert parse(spec.to_toml()) == spec


@pytest.mark.parametrize("text", ['"', "\\", "'''", "a\nb\r\n\tc", "\x00\x1f\x7f\x85\u2028", "ü 漢 🎉", '"""\\"', "#"])
def test_special_characters_survive_a_round_trip(text):
    spec = spec_of(ENTRY + tomli_w.dumps({"target": text}))
    assert spec.perturbations[0].perturbation.target == text
    assert parse(spec.to_toml()) == spec


def test_a_spec_may_have_a_byte_order_mark_and_crlf(tmp_path):
    path = tmp_path / "spec.toml"
    path.write_bytes(b"\xef\xbb\xbf" + (HEAD.format(learner="quadratic") + ENTRY).replace("\n", "\r\n").encode())
    assert load(path) == spec_of(ENTRY)


def test_magnitudes_and_onsets_are_unrolled_into_conditions():
    spec = spec_of(ENTRY + "magnitude = [3, 10]\nonset = [0.3, 50]")
    assert conditions_of(spec) == [("lr_spike", m, o) for o, m in itertools.product((30, 50), (3.0, 10.0))]


def test_onsets_are_fractions_or_steps_by_their_type():
    assert [o for *_, o in conditions_of(spec_of(ENTRY + "onset = 0"))] == [0]
    assert [o for *_, o in conditions_of(spec_of(ENTRY + "onset = 0.0"))] == [0]
    assert [o for *_, o in conditions_of(spec_of(ENTRY + "onset = 1"))] == [1]
    with pytest.raises(UserError, match="fraction"):
        spec_of(ENTRY + "onset = 1.0")


def test_a_chain_has_conditions_and_windows_of_its_parts():
    spec = spec_of(
        """[[perturbation]]
        onset = [0.2, 40]
        duration = 3
        chain = [
          {kind = "lr_spike", magnitude = [2, 3]}, {kind = "weight_noise", onset = 60, duration = "once"}
        ]"""
    )
    assert [type(entry.perturbation) for entry in spec.perturbations] == [ja.perturbations.Chain] * 2
    grid = spec.build()
    chains = [c for c in grid.conditions if c.parts]
    assert [(c.name, c.magnitude, c.onset) for c in chains] == [
        ("lr_spike+weight_noise", m, o) for o in (20, 40) for m in (2.0, 3.0)
    ]
    assert [p.when.resolve(100)[:2] for p in chains[0].parts] == [(20, 23), (60, 61)]


@pytest.mark.parametrize("key", ["onset", "duration"])
def test_an_onset_or_duration_without_effect_on_a_chain_is_refused(key):
    entry = f'[[perturbation]]\n{key} = 5\nchain = [{{kind = "lr_spike", onset = 3, duration = 4}}]'
    with pytest.raises(UserError, match=f"{key} has no effect, because every part of the chain has"):
        spec_of(entry)


def test_telemetry_is_refused_for_learners_without_that_setting(monkeypatch):
    monkeypatch.setitem(registry.learners._entries, "bare", lambda task: None)
    text = HEAD.format(learner="bare").replace("steps", 'telemetry = "basic"\nsteps') + ENTRY
    with pytest.raises(UserError, match="telemetry must be 'full' for learner 'bare', not 'basic'"):
        parse(text)


def test_a_dimension_omits_kinds_without_a_standard(monkeypatch):
    monkeypatch.setitem(registry.perturbations._entries, "bare", ja.lr_spike(3.0))
    kinds = [
        e.perturbation.name for e in spec_of('[[perturbation]]\ndimension = "optimization"').expanded().perturbations
    ]
    assert "lr_spike" in kinds
    assert "bare" not in kinds


def test_a_dimension_has_the_kinds_that_the_learner_allows():
    adam = spec_of('[[perturbation]]\ndimension = "optimization"\nonset = 0.5\nduration = 2').expanded()
    kinds = [entry.perturbation.name for entry in adam.perturbations]
    assert {"lr_spike", "momentum_noise", "second_moment_drift", "gradient_scale", "clip_failure"} <= set(kinds)
    assert all(entry.perturbation.when == ja.window(0.5, 2) for entry in adam.perturbations)
    assert parse(adam.to_toml()) == adam
    plain = HEAD.format(learner="quadratic") + 'adam = false\n[[perturbation]]\ndimension = "optimization"'
    kinds_without_adam = {entry.perturbation.name for entry in parse(plain).expanded().perturbations}
    assert set(kinds) - kinds_without_adam == {"momentum_noise", "second_moment_drift"}


def test_a_dimension_and_its_expansion_give_the_same_grid():
    spec = spec_of('[[perturbation]]\ndimension = "parametric"\n' + ENTRY)
    assert isinstance(spec.perturbations[0], DimensionEntry)
    expanded = spec.expanded()
    assert all(isinstance(entry, PerturbationEntry) for entry in expanded.perturbations)
    assert conditions_of(spec) == conditions_of(expanded)
    assert expanded.expanded() == expanded


def test_errors_number_perturbations_as_in_the_spec():
    with pytest.raises(UserError, match=r"spec.toml: \[\[perturbation\]\] 3: target 'actor'"):
        spec_of('[[perturbation]]\ndimension = "parametric"\n' + ENTRY + ENTRY + 'target = "actor"').build()


def test_a_missing_first_moment_is_refused_before_the_run():
    text = HEAD.format(learner="quadratic") + 'adam = false\n[[perturbation]]\nkind = "momentum_noise"'
    with pytest.raises(UserError, match=r"\[\[perturbation\]\] 1: the optimizer state has no mu"):
        parse(text).build()


def test_integers_are_numbers_and_booleans_are_not():
    head = HEAD.format(learner="quadratic")
    assert isinstance(parse(head + "learning_rate = 1\n" + ENTRY).learner.settings.learning_rate, float)
    for setting in (
        "learning_rate = true",
        "size = 3.0",
        "size = true",
        "adam = 1",
        "widths = 3",
        "widths = [1.5]",
    ):
        with pytest.raises(UserError, match="must be"):
            parse(f"{head}{setting}\n{ENTRY}")


def test_seeds_may_be_listed():
    spec = parse((HEAD.format(learner="quadratic") + ENTRY).replace("seeds = 2", "seeds = [7, 4294967295]"))
    assert spec.build().seeds == (7, 4294967295)
    assert parse(spec.to_toml()) == spec


def test_slugs_of_names():
    names = ["PPO on Hopper!", "../../etc", "ü漢", "漢字", ".hidden", "a" * 100]
    slugs = [
        parse(
            "[audit]\n" + tomli_w.dumps({"name": n}) + HEAD.format(learner="quadratic").replace("[audit]", "") + ENTRY
        ).audit.slug
        for n in names
    ]
    assert slugs == ["ppo-on-hopper", "etc", "u", "audit", "hidden", "a" * 100]


def test_the_quickstart_spec_is_valid():
    text = importlib.resources.files("jaxaudit").joinpath("quickstart.toml").read_text(encoding="utf-8")
    spec = parse(text)
    grid = spec.build()
    dimensions = {c.dimension for c in grid.conditions} - {"control"}
    assert len(grid.conditions) >= 7
    assert dimensions == {"optimization", "data", "parametric", "signal"}
    assert parse(spec.to_toml()) == spec


scalars = st.one_of(
    st.booleans(),
    st.integers(-3, 120),
    st.integers(-(10**25), 10**25),
    st.floats(allow_nan=True),
    st.floats(-1, 2),
    st.text(max_size=5),
    st.sampled_from([datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 12), datetime.time(1)]),
)
invalid = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=6,
)


def mostly_valid(good: st.SearchStrategy) -> st.SearchStrategy:
    return st.integers(0, 79).flatmap(lambda n: invalid if n == 79 else good)


def table(required: dict, optional: dict | None = None) -> st.SearchStrategy:
    """A table of mostly valid keys and values, with an occasional unknown key, missing key, or invalid value."""
    values = st.fixed_dictionaries(
        {k: mostly_valid(v) for k, v in required.items()},
        optional={k: mostly_valid(v) for k, v in (optional or {}).items()},
    )
    keys = st.sampled_from([*required, *(optional or {})])
    return st.tuples(values, st.integers(0, 79), st.text(max_size=5), keys, invalid).map(_spoiled)


def _spoiled(sample: tuple) -> dict:
    values, choice, name, key, value = sample
    if choice == 79:
        return values | {name: value}
    return {k: v for k, v in values.items() if not (choice == 78 and k == key)}


onset = st.sampled_from([0.3, 0.0, 0.99, 0, 5, 30]) | st.floats(0, 1, exclude_max=True) | st.integers(0, 100)
duration = st.sampled_from([1, 5, 10, "once", "end"])
magnitude = st.sampled_from([0.1, 1, 2.0, 8]) | st.lists(st.sampled_from([0.1, 0.5, 2, 4.0]), min_size=1, max_size=3)
part = {
    "kind": st.sampled_from(
        ["lr_spike", "weight_noise", "momentum_noise", "gradient_mask", "layer_reset", "reward_noise"]
    )
}
options = {
    "magnitude": magnitude,
    "duration": duration,
    "period": st.sampled_from([10, 20, 60]),
    "target": st.sampled_from(["critic", "*", "mu", "nowhere"]),
}
onsets = onset | st.lists(onset, min_size=1, max_size=2)
entry = st.one_of(
    table(part, options | {"onset": onsets}),
    table(part, {"onset": onsets}),
    table(
        {"dimension": st.sampled_from(["optimization", "parametric", "data"])},
        {"onset": onsets, "duration": duration},
    ),
    table(
        {"chain": st.lists(table(part, options | {"onset": onset}), min_size=1, max_size=3)},
        {"onset": onsets},
    ),
)
learner = st.one_of(
    table(
        {"kind": st.just("quadratic")},
        {
            "learning_rate": st.sampled_from([1e-4, 1]),  # few learners, since each one is traced
            "size": st.sampled_from([1, 5]),
            "adam": st.booleans(),
            "label": st.sampled_from(["", 'ü\n"']),
        },
    ),
    table({"kind": st.just("quadratic")}),
)
document = table(
    {
        "audit": table(
            {
                "seeds": st.integers(1, 4) | st.lists(st.integers(0, 9), min_size=1, unique=True),
                "steps": st.sampled_from([20, 40, 60, 100]),
            },
            {
                "name": st.text("ab\"\\'é漢#", min_size=1, max_size=5),
                "telemetry": st.sampled_from(["basic", "full"]),
                "execution": st.sampled_from(["vmap", "map", 2]),
            },
        ),
        "task": table({"kind": st.just("mujoco"), "name": st.just("InvertedPendulum-v5")}, {"physics": st.just("c")}),
        "learner": learner,
        "perturbation": st.lists(entry, min_size=1, max_size=3),
    },
    {
        "metrics": table({"window": st.integers(2, 50)}, {"hold": st.integers(1, 9)}),
        "run": table({"chunk": st.integers(0, 10)}, {"checkpoint_every": st.integers(0, 3)}),
    },
)
outcomes: list[str] = []


@pytest.mark.exhaustive
@given(document)
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_spec_gives_a_plan_or_one_sentence(document):
    sentence, grid = try_spec(tomli_w.dumps(document))
    outcomes.append(sentence)
    if grid is None:
        assert sentence.startswith("spec.toml")
        assert "\n" not in sentence
        return
    assert all(0 <= fork.onset < grid.steps for fork in grid.forks)
    assert all(grid.conditions[fork.conditions[0]].name == "control" for fork in grid.forks)
    assert len(grid.conditions) > len(grid.forks) or not document.get("perturbation")  # a sweep over seeds only


def try_spec(text: str) -> tuple[str, Grid | None]:
    try:
        spec = parse(text, "spec.toml")
        assert parse(spec.to_toml()) == spec
        return "", spec.build()
    except UserError as error:
        return str(error), None


def test_both_outcomes_occurred():
    if outcomes:
        assert 40 < outcomes.count("") < len(outcomes) - 40


ppo = table(
    {"kind": st.just("ppo")},
    {
        "num_envs": st.sampled_from([1, 4, 0]),
        "rollout_length": st.sampled_from([64, 100]),
        "learning_rate": st.floats(0, 1) | st.integers(0, 1),
        "anneal": st.booleans(),
        "hidden": st.lists(st.integers(0, 64), max_size=3),
        "clip": st.floats(-1, 1),
    },
)


@given(ppo)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_any_ppo_table_gives_settings_or_one_sentence(learner):
    document = {
        "audit": {"seeds": 1, "steps": 10},
        "task": {"kind": "mujoco", "name": "InvertedPendulum-v5"},
        "learner": learner,
        "perturbation": [{"kind": "weight_noise"}],
    }
    text = tomli_w.dumps(document)
    try:
        spec = parse(text, "spec.toml")
    except UserError as error:
        assert str(error).startswith("spec.toml: [learner]"), error  # noqa: PT017
        return
    assert parse(spec.to_toml()) == spec
