"""The package's guarantees, each tested over all standard perturbations on tiny learners, PPO and a language model.

A learner's grid is one compiled program with different inputs. It has a condition for each perturbation that fits the
learner. All fork at step 3, and their windows are open from step 5 to step 7. Each is chained with an lr_spike of
factor one at step 3, which makes the fork earlier than the window. The two tiny learners, one of which is for
dialogues, have all sites. The grids of the other learners have one perturbation for each site that many learners share,
and all that fit in the slow tests. Only the two tiny learners are in the default run.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_dialogue import TINY_DIALOGUE
from without_baseline import train_without_baseline

import jaxaudit as ja
from jaxaudit.core.grid import plan, site_misfit
from jaxaudit.core.optimizer import Optimizer, linear_to_zero
from jaxaudit.core.program import compiled
from jaxaudit.core.remedied_learner import remedy_misfit
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import SITES
from jaxaudit.dialogues.hop import Hop
from jaxaudit.execution.grid_program import arrange, inputs
from jaxaudit.models import gpt2
from jaxaudit.runtime import registry
from jaxaudit.tasks._brax import Env, State
from jaxaudit.tasks.episodes import Episodes

pytestmark = [pytest.mark.long, pytest.mark.default_compilation]

FORK, OPEN, CLOSE, STEPS = 3, 5, 7, 10
# Some standard magnitudes have little effect within a window of two short steps. These have a visible effect at once.
STRONG = {
    "quantize": 2.0,
    "quantize_float": 1.0,
    "clip_failure": 0.01,
    "reward_flip": 0.5,
    "lr_schedule_error": 0.4,
    "observation_stuck": 0.7,
    "action_stuck": 1.0,
    "distribution_drift": 1.0,
    "token_corruption": 0.5,
    "prompt_corruption": 0.5,
    "tool_corruption": 1.0,
    "tool_error": 1.0,
    "tool_shift": 1.0,
    "tool_timeout": 1.0,
    "verifier_flip": 0.5,
}


SHARED = {"observation", "action", "reward", "dynamics", "gradient", "clip_norm", "learning_rate"}
SHARED |= {"optimizer_state", "params"}
"""Sites that one optimizer or one environment wrapper implements for all learners."""
ALWAYS_INCLUDED = {
    "observation_stuck",
    "action_delayed",
    "reward_noise",
    "dynamics_drift",
    "gradient_sign_flip",
    "clip_failure",
    "momentum_noise",
    "weight_noise",
}
"""The perturbations at shared sites that every grid includes: one for each site, except the learning rate of lr_spike.
"""


def chained(name, magnitude=None, rate=1.0, fork=FORK):
    factory = registry.perturbations[name]
    return ja.chain(
        ja.lr_spike(rate, onset=fork, duration=1),
        factory(magnitude or STRONG.get(name), onset=OPEN, duration=CLOSE - OPEN),
    )


class Point(Env):
    """A point that actions push. An episode ends if it is far away."""

    cheap_reset = True
    observation_size, action_size, backend = 8, 1, "none"
    dynamics = dict.fromkeys(("mass", "gear"), np.float32(1.0))

    def reset(self, rng):
        return State(None, jax.random.normal(rng, (8,)), jnp.float32(0), jnp.float32(0), {}, {})

    def step(self, state, action):
        mass = state.info.get("dynamics", self.dynamics)["mass"]
        position = 0.9 * state.obs + action[0] / mass
        far = (jnp.abs(position).max() > 2.0).astype(jnp.float32)
        return state.replace(obs=position, reward=-jnp.mean(position**2), done=far)


EPISODES = Episodes(Point(), 2, 6)
OPTIMIZER = Optimizer(ja.Adam(), linear_to_zero(0.01), max_norm=5.0)
"""It clips some gradients only. If it clipped all, scaling the gradient would have no effect."""


def fresh(key):
    """Returns an actor and a critic that are linear in the observation."""
    actor, critic = jax.random.normal(key, (2, 8))
    return {"actor": {"kernel": actor}, "critic": {"kernel": critic}}


def tiny_init(key):
    params = fresh(key)
    return params, OPTIMIZER.init(params), EPISODES.init(key)


def tiny_step(state, key, taps):
    """Makes one update from four steps of two environments and a few tokens. All standard sites are tapped."""
    params_before, moments = OPTIMIZER.disturb(*state[:2], taps, fresh)

    def value(params, observation):
        return observation @ params["critic"]["kernel"]

    def act(params, observation):
        return jnp.tanh(observation @ params["actor"]["kernel"])[:, None]

    def environment_step(taps, episodes, index):
        action = act(params_before, episodes.observation)
        return EPISODES.step(
            episodes,
            jax.random.fold_in(key, index),
            action,
            taps,
            lambda transitions: value(params_before, transitions),
            0.9,
        )

    episodes, transitions = taps.scan(environment_step, state[2], jnp.arange(4))
    tokens = taps(
        "tokens",
        jax.random.randint(key, (4, 8), 0, 50),
        mask=99,
        vocabulary=100,
        second_corpus=lambda key: jax.random.randint(key, (4, 8), 50, 99),
    )
    smoothing = taps("label_smoothing", jnp.float32(0.0))

    def loss(params):
        target = (1 - smoothing) * transitions.reward + jnp.mean(tokens) / 100
        action_difference = jax.vmap(act, (None, 0))(params, transitions.observation) - transitions.final_observation
        return taps(
            "objective",
            jnp.mean((value(params, transitions.observation) - target) ** 2) + jnp.mean(action_difference**2),
        )

    value_and_gradient = jax.value_and_grad(loss)(params_before)
    context = {"loss": value_and_gradient[0], "approximate_kl": 0.02 * jnp.abs(value_and_gradient[0])}
    params, moments, update = OPTIMIZER.update(params_before, moments, value_and_gradient[1], taps, **context)
    norm = optax.tree.norm(params)
    return (params, moments, episodes), {"performance": -norm, "params_norm": norm, "update_norm": update.update_norm}


TINY = ja.Learner(tiny_init, tiny_step, name="tiny")

EXCLUDED_REMEDIES = ("nonfinite_skip", "six_sigma_skip", "target_kl_stop", "adagc", "periodic_reset")
"""Remedies that would prevent the NaN of the isolation tests, or hide the scale of a gradient.

They are tested in `test_remedied_learner.py` and `tests/remedies/test_remedied_runs.py`.
"""


def with_every_remedy(learner):
    """Returns a learner with all remedies that act in it during training, except EXCLUDED_REMEDIES."""
    sites = find_sites(learner)
    kinds = [registry.remedies[name] for name in registry.remedies if name not in EXCLUDED_REMEDIES]
    fitting = [kind() for kind in kinds if kind.apply and not kind.settings and remedy_misfit(kind, sites) is None]
    return ja.remedied(learner, *fitting)


def ppo(**settings):
    defaults = {"num_envs": 2, "rollout_length": 32, "minibatch_size": 32, "epochs": 2, "hidden": (8,)}
    return ja.learners.ppo("InvertedPendulum-v5", **{**defaults, "max_grad_norm": 0.05, **settings})


def language_model(text, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 2, 2))
        defaults = {"size": "tiny", "context": 8, "batch_size": 4, "accumulation": 2, "held_out": 2, "validation": 2}
        return ja.learners.language_model(text, **{**defaults, "max_grad_norm": 0.5, **settings})


@dataclasses.dataclass(frozen=True)
class Case:
    """A learner and the perturbations that fit it.

    Attributes:
      learner: The learner.
      smaller: The same learner with less telemetry.
      poisoned: The magnitudes by which perturbations of different sites drive a lane to NaN.
      compared: The channels that both learners have.
      aim: A part of the parameters, as a target.
      left_out: The perturbations that are not in the learner's grid.
      felt: The magnitudes of perturbations whose strong magnitude has no effect at once, by name.
    """

    learner: ja.Learner
    smaller: ja.Learner
    poisoned: dict
    compared: tuple
    target: str
    excluded: frozenset = frozenset({"lr_spike"})
    effective_magnitudes: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def names(self):
        sites = find_sites(self.learner, STEPS)
        return [
            name
            for name in registry.perturbations
            if name not in self.excluded and site_misfit(registry.perturbations[name](), sites) is None
        ]

    @property
    def conditions(self):
        return ["control", "lr_spike", *self.names]

    @property
    def stateful(self):
        return [name for name in self.names if registry.perturbations[name].keeps_state]

    def perturbations(self, magnitudes=None):
        """Returns all perturbations with the magnitudes in `magnitudes`, or else with strong ones."""
        strengths = self.effective_magnitudes | (magnitudes or {})
        spike = ja.lr_spike(strengths.get("lr_spike", 10.0), onset=FORK, duration=CLOSE - FORK)
        return [spike, *(chained(name, strengths.get(name)) for name in self.names)]

    def train(self, perturbations):
        """Trains the entire grid with these perturbations. All calls share one compiled program.

        States whose size depends on the grid's largest magnitude have the size for the largest possible one.
        """
        grid = plan(self.learner, perturbations, seeds=2, steps=STEPS)
        slots = [
            dataclasses.replace(slot, max_magnitude=slot.kind.limits[1]) if slot.kind.sized else slot
            for slot in grid.program.slots
        ]
        return grid_telemetry(dataclasses.replace(grid, program=dataclasses.replace(grid.program, slots=tuple(slots))))

    @functools.cached_property
    def strong(self):
        return self.train(self.perturbations())


def ppo_case(_):
    infinite = float("inf")
    return Case(
        ppo(evaluations=1, evaluation_episodes=1),
        ppo(evaluations=0, telemetry="basic"),  # the additional telemetry does not change the training
        {"momentum_noise": infinite, "weight_noise": infinite, "lr_spike": infinite},
        ("performance", "policy_loss", "value_loss", "entropy", "params_norm", "update_norm"),
        "actor",
        effective_magnitudes={"ratio_clip_failure": 1e-4},  # its ratios are within the default bounds
    )


def language_model_case(text, telemetry="full"):
    infinite = float("inf")
    return Case(
        language_model(text, evaluations=1, telemetry=telemetry),
        language_model(text, evaluations=0, telemetry="basic"),
        {"momentum_noise": infinite, "weight_noise": infinite, "lr_spike": infinite},
        ("performance", "loss", "params_norm", "update_norm"),
        "h/1",
    )


def tiny_case(_):
    infinite = float("inf")
    return Case(
        TINY,
        TINY,
        {"reward_scale": infinite, "weight_noise": infinite, "lr_spike": infinite},
        ("performance", "params_norm", "update_norm"),
        "actor",
    )


def remedied_case(_):
    infinite = float("inf")
    learner = with_every_remedy(TINY)
    poisoned = {"reward_scale": infinite, "weight_noise": infinite, "lr_spike": infinite}
    return Case(learner, learner, poisoned, ("performance", "params_norm", "update_norm"), "actor")


def dialogue_case(_):
    infinite = float("inf")
    return Case(
        TINY_DIALOGUE,
        TINY_DIALOGUE,
        {"advantage_noise": infinite, "weight_noise": infinite, "lr_spike": infinite},
        ("performance", "params_norm", "update_norm"),
        "policy",
    )


def dialogue_learner(preset, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(8, 1, 2))
        defaults = {
            "size": "tiny",
            "prompts": 4,
            "group_size": 4,
            "epochs": 1,
            "performance_rows": 4,
            "max_grad_norm": 0.05,
        }
        # Without a signal in any rollout group a gradient is only rounding. This epsilon keeps it from being
        # scaled up.
        defaults |= {"learning_rate": 1e-3, "epsilon": 1e-3}
        warm_up = {"warm_start": 150, "warm_start_rows": 16, "critic_warm_start": 2, "reward_model_warm_start": 2}
        warm_up["warm_start_learning_rate"] = 3e-3  # higher rates make the programs diverge by rounding before step 0
        dialogue = Hop(difficulty=1.0, entities=3, hops=2, length=13)
        return getattr(ja.learners, preset)(dialogue, **defaults | warm_up | settings)


def preset_case(preset, poison="advantage_noise", **settings):
    infinite = float("inf")
    return Case(
        dialogue_learner(preset, **settings),
        dialogue_learner(preset, **settings | {"telemetry": "basic"}),
        {poison: infinite, "weight_noise": infinite, "lr_spike": infinite},
        ("performance", "loss", "params_norm", "update_norm"),
        "policy/h/0",
        effective_magnitudes={"ratio_clip_failure": 1e-4},  # its ratios are within the default bounds
    )


def without_most_shared_sites(case):
    """Leaves out most perturbations at the sites that the first tiny learner also has."""
    shared = {name for name in tiny_case(None).names if registry.perturbations[name].site in SHARED}
    return dataclasses.replace(case, excluded=frozenset({"lr_spike"} | shared - ALWAYS_INCLUDED))


CASES = {
    "tiny": tiny_case,
    "tiny, remedied": remedied_case,
    "tiny dialogue": lambda corpus: without_most_shared_sites(dialogue_case(corpus)),
    "ppo": lambda corpus: without_most_shared_sites(ppo_case(corpus)),
    "language_model": lambda corpus: without_most_shared_sites(language_model_case(corpus, telemetry="basic")),
    "ppo, everything": ppo_case,
    "language_model, everything": language_model_case,
    "grpo, everything": lambda _: preset_case("grpo"),
    "ppo_lm, everything": lambda _: preset_case("ppo_lm", reward="learned"),
    "dr_grpo, everything": lambda _: preset_case("dr_grpo"),
    "rloo, everything": lambda _: preset_case("rloo"),
    "dapo, everything": lambda _: preset_case("dapo"),
    "gspo, everything": lambda _: preset_case("gspo"),
    "dpo, everything": lambda _: preset_case("dpo", poison="momentum_noise", online=True),
}


DEFAULT_CASES = ("tiny",)


def case_params(other_marks):
    """Returns all cases as parameters. `other_marks` mark the cases that are not tiny."""
    marks = {
        name: () if name in DEFAULT_CASES else pytest.mark.slow if "everything" in name else other_marks
        for name in CASES
    }
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.fixture(scope="module", params=case_params(pytest.mark.exhaustive))
def case(request, corpus):
    return CASES[request.param](corpus)


def grid_telemetry(grid):
    baseline, forks = compiled(grid.program)(inputs(grid))
    return arrange(grid, baseline, forks), {k: np.asarray(v)[:, : len(grid.seeds)] for k, v in baseline.items()}


def equal_with_nan(a, b):
    return np.array_equal(a, b, equal_nan=True)


def lanes_equal(first, second, condition, start=0, stop=STEPS):
    return all(equal_with_nan(first[k][:, condition, start:stop], second[k][:, condition, start:stop]) for k in first)


def test_tiny_learners_together_have_all_standard_perturbations(corpus):
    tiny, dialogue = ({*make_case(None).names, "lr_spike"} for make_case in (tiny_case, dialogue_case))
    assert tiny | dialogue == set(registry.perturbations)
    fitting = {name for make_case in (ppo_case, language_model_case) for name in make_case(corpus).names}
    sites = ("advantage", "gae_lambda", "ratio_clip")
    policy_gradient_names = {name for name in dialogue if registry.perturbations[name].site in sites}
    assert fitting | {"lr_spike"} == tiny | policy_gradient_names


def test_a_learner_is_perturbed_at_all_its_sites(case):
    sites = {registry.perturbations[name].site for name in case.names}
    sites |= {"learning_rate"}  # every grid contains lr_spike
    assert sites == set(find_sites(case.learner, STEPS)) & set(SITES)


def test_identity_a_neutral_lane_is_bitwise_the_control(case):
    neutral = []
    for perturbation in case.perturbations():
        parts = [dataclasses.replace(p, magnitude=p.neutral) for p in perturbation.parts]
        neutral.append(ja.chain(*parts))
    telemetry, _ = case.train(neutral)
    for condition, name in enumerate(case.conditions):
        for channel, values in telemetry.items():
            assert equal_with_nan(values[:, condition], values[:, 0]), f"{name} changed {channel}"


def test_pairing_before_the_fork_a_lane_is_the_baseline(case):
    telemetry, baseline = case.strong
    for channel, values in telemetry.items():
        for condition in range(len(case.conditions)):
            assert equal_with_nan(values[:, condition, :FORK], np.moveaxis(baseline[channel], 0, 1)[:, :FORK]), channel


def test_pairing_lanes_equal_the_control_until_the_window_and_differ_later(case):
    telemetry, _ = case.strong
    for condition, name in enumerate(case.conditions):
        if name in case.names:
            for channel, values in telemetry.items():
                assert equal_with_nan(values[:, condition, :OPEN], values[:, 0, :OPEN]), f"{name}: {channel}"
            pairs = [values[seed, [condition, 0], OPEN:] for values in telemetry.values() for seed in (0, 1)]
            differences = [not np.allclose(*pair, rtol=1e-5, atol=0, equal_nan=True) for pair in pairs]
            assert any(differences), f"{name} changed nothing beyond rounding"


def test_isolation_a_lane_driven_to_nan_changes_no_other(case):
    """Three sites drive lanes to NaN at once, and an infinite learning rate fills perturbations' states with NaN."""
    stateful = case.stateful[::2]
    perturbations = case.perturbations(case.poisoned)
    for name in stateful:
        perturbations[case.conditions.index(name) - 1] = chained(name, rate=float("inf"))
    telemetry, _ = case.train(perturbations)
    destroyed = [*case.poisoned, *stateful]
    for name in destroyed:
        values_after = telemetry["params_norm"][:, case.conditions.index(name), CLOSE:]
        assert not np.isfinite(values_after).any(), f"{name} should have destroyed its lane"
    for condition, name in enumerate(case.conditions):
        if name not in destroyed:
            assert lanes_equal(telemetry, case.strong[0], condition), f"{name} was changed by another lane's NaN"


def test_one_program_new_magnitudes_windows_and_targets_compile_nothing(case):
    strong = case.strong
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compilations.append(event) if "backend_compile" in event else None
    )
    rng = np.random.default_rng(0)
    magnitudes = {n: float(m) for n, m in zip(case.names, rng.uniform(0.05, 0.95, len(case.names)), strict=True)}
    magnitudes |= {"quantize": 4.0, "sampler_quantize": 4.0}
    magnitudes |= {name: 3.0 for name in case.names if registry.perturbations[name].whole}
    case.train(case.perturbations(magnitudes))
    other_windows = [
        ja.chain(*(dataclasses.replace(p, when=ja.window(FORK, 2)) for p in x.parts)) for x in case.perturbations()
    ]
    case.train(other_windows)
    with_targets = [
        ja.chain(
            *(dataclasses.replace(p, target=case.target if p.site in ("params", "gradient") else None) for p in x.parts)
        )
        for x in case.perturbations()
    ]
    telemetry, _ = case.train(with_targets)
    assert not compilations
    jax.jit(lambda x: x * 3.25 + 1)(np.ones(7))
    assert compilations, "the listener does not count compilations"
    condition = case.conditions.index("weight_noise")
    assert not lanes_equal(telemetry, strong[0], condition), "the target was ignored"


def test_equal_settings_make_equal_learners_which_share_one_program(corpus):
    pairs = [(ppo(), ppo(hidden=[8])), (language_model(corpus), language_model(corpus))]
    for first_learner, second_learner in pairs:
        assert first_learner == second_learner
        spikes = [ja.lr_spike(onset=FORK, duration=1)]
        first, second = (plan(learner, spikes, seeds=1, steps=STEPS) for learner in (first_learner, second_learner))
        assert compiled(first.program) is compiled(second.program)
    assert ppo() != ppo(epochs=3)
    assert language_model(corpus) != language_model(corpus, accumulation=4)


def test_exact_replay_the_same_program_gives_the_same_bits(case):
    telemetry, baseline = case.train(case.perturbations())
    for condition in range(len(case.conditions)):
        assert lanes_equal(telemetry, case.strong[0], condition)
    assert all(equal_with_nan(baseline[k], case.strong[1][k]) for k in baseline)


@pytest.mark.parametrize("case", case_params(pytest.mark.slow), indirect=True, scope="module")
@pytest.mark.exhaustive
def test_common_randomness_other_conditions_change_a_lane_only_by_rounding(case):
    """A grid of a few conditions, with another width and a fork at step 0, follows the same path at first."""
    names = [
        "weight_noise",
        "gradient_sign_flip",
        *[n for n in case.names if n in ("reward_noise", "observation_stuck")],
    ]
    perturbations = [chained(name, fork=0) for name in names]
    smaller = train_without_baseline(case.smaller, perturbations, seeds=2, steps=STEPS)
    for position, name in enumerate(["control", *names]):
        for channel in case.compared:
            actual = smaller[channel][:, position, : OPEN + 1]
            expected = case.strong[0][channel][:, case.conditions.index(name), : OPEN + 1]
            np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-4, err_msg=f"{name}: {channel}")


def test_lanes_of_a_seed_share_the_learners_randomness(case):
    telemetry, _ = case.strong
    performance = telemetry["performance"][:, :, FORK]
    assert equal_with_nan(performance[:, 2:], np.repeat(performance[:, :1], len(case.names), axis=1))
    assert not equal_with_nan(telemetry["params_norm"][0, 0], telemetry["params_norm"][1, 0])
