"""The promises, each over all standard perturbations at once on tiny learners, and on PPO and a language model.

A learner's grid is one compiled program, fed different data: it has every perturbation that fits the learner as one
condition, forked at step 3, its window open from step 5 to step 7; the chain with an lr_spike of factor one at step 3
is what opens the fork before the window. Two tiny learners have all sites, one of them those of dialogues. Of the
others' a grid has one perturbation of each site that many learners have, and all that fit when the slow tests are run;
both are left out of the default run, which the two tiny ones are in.
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
# Some standard magnitudes do little within a window of two short steps; these are felt at once.
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
"""Sites that one optimizer or one wrapper of environments serves for all learners."""
KEPT = {
    "observation_stuck",
    "action_delayed",
    "reward_noise",
    "dynamics_drift",
    "gradient_sign_flip",
    "clip_failure",
    "momentum_noise",
    "weight_noise",
}
"""Of the perturbations there, those that every grid has: one of each site but the learning rate, which has lr_spike."""


def chained(name, magnitude=None, rate=1.0, fork=FORK):
    factory = registry.perturbations[name]
    return ja.chain(
        ja.lr_spike(rate, onset=fork, duration=1),
        factory(magnitude or STRONG.get(name), onset=OPEN, duration=CLOSE - OPEN),
    )


class Point(Env):
    """A point that actions push; an episode ends where it is far."""

    cheap_reset = True
    observation_size, action_size, backend = 8, 1, "none"
    dynamics = dict.fromkeys(("mass", "gear"), np.float32(1.0))

    def reset(self, rng):
        return State(None, jax.random.normal(rng, (8,)), jnp.float32(0), jnp.float32(0), {}, {})

    def step(self, state, action):
        mass = state.info.get("dynamics", self.dynamics)["mass"]
        place = 0.9 * state.obs + action[0] / mass
        far = (jnp.abs(place).max() > 2.0).astype(jnp.float32)
        return state.replace(obs=place, reward=-jnp.mean(place**2), done=far)


EPISODES = Episodes(Point(), 2, 6)
OPTIMIZER = Optimizer(ja.Adam(), linear_to_zero(0.01), max_norm=5.0)
"""Which clips some gradients and leaves others: were all clipped, a gradient's scale would not be felt."""


def fresh(key):
    """An actor and a critic, linear in the observation."""
    actor, critic = jax.random.normal(key, (2, 8))
    return {"actor": {"kernel": actor}, "critic": {"kernel": critic}}


def tiny_init(key):
    params = fresh(key)
    return params, OPTIMIZER.init(params), EPISODES.init(key)


def tiny_step(state, key, taps):
    """One update from four steps of two environments and a few tokens; all standard sites are tapped."""
    before, moments = OPTIMIZER.disturb(*state[:2], taps, fresh)

    def value(params, observation):
        return observation @ params["critic"]["kernel"]

    def act(params, observation):
        return jnp.tanh(observation @ params["actor"]["kernel"])[:, None]

    def turn(taps, episodes, index):
        action = act(before, episodes.observation)
        return EPISODES.step(
            episodes, jax.random.fold_in(key, index), action, taps, lambda seen: value(before, seen), 0.9
        )

    episodes, seen = taps.scan(turn, state[2], jnp.arange(4))
    tokens = taps(
        "tokens",
        jax.random.randint(key, (4, 8), 0, 50),
        mask=99,
        vocabulary=100,
        second_corpus=lambda key: jax.random.randint(key, (4, 8), 50, 99),
    )
    smoothing = taps("label_smoothing", jnp.float32(0.0))

    def loss(params):
        wanted = (1 - smoothing) * seen.reward + jnp.mean(tokens) / 100
        moved = jax.vmap(act, (None, 0))(params, seen.observation) - seen.final_observation
        return taps("objective", jnp.mean((value(params, seen.observation) - wanted) ** 2) + jnp.mean(moved**2))

    value_and_gradient = jax.value_and_grad(loss)(before)
    seen_by_remedies = {"loss": value_and_gradient[0], "approximate_kl": 0.02 * jnp.abs(value_and_gradient[0])}
    params, moments, done = OPTIMIZER.update(before, moments, value_and_gradient[1], taps, **seen_by_remedies)
    norm = optax.tree.norm(params)
    return (params, moments, episodes), {"performance": -norm, "params_norm": norm, "update_norm": done.update_norm}


TINY = ja.Learner(tiny_init, tiny_step, name="tiny")

APART = ("nonfinite_skip", "six_sigma_skip", "target_kl_stop", "adagc", "periodic_reset")
"""Remedies that keep a lane from being driven to NaN, as the promise of isolation has it be, or from feeling the scale
of a gradient; `test_remedied_learner.py` and `tests/remedies/test_remedied_runs.py` have them.
"""


def with_every_remedy(learner):
    """A learner with all remedies that act in it while it trains, but for those APART."""
    sites = find_sites(learner)
    kinds = [registry.remedies[name] for name in registry.remedies if name not in APART]
    fitting = [kind() for kind in kinds if kind.apply and not kind.settings and remedy_misfit(kind, sites) is None]
    return ja.remedied(learner, *fitting)


def ppo(**settings):
    small = {"num_envs": 2, "rollout_length": 32, "minibatch_size": 32, "epochs": 2, "hidden": (8,)}
    return ja.learners.ppo("InvertedPendulum-v5", **{**small, "max_grad_norm": 0.05, **settings})


def language_model(text, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, 2, 2))
        small = {"size": "tiny", "context": 8, "batch_size": 4, "accumulation": 2, "held_out": 2, "validation": 2}
        return ja.learners.language_model(text, **{**small, "max_grad_norm": 0.5, **settings})


@dataclasses.dataclass(frozen=True)
class Case:
    """A learner and what fits it.

    Attributes:
      learner: the learner.
      smaller: it, with less telemetry.
      poisoned: perturbations of as many sites, and the magnitudes that drive a lane to NaN.
      compared: channels that both learners have.
      aim: a part of the parameters.
      left_out: perturbations that are not in its grid.
      felt: magnitudes that it feels at once, of perturbations whose strong ones it does not, by name.
    """

    learner: ja.Learner
    smaller: ja.Learner
    poisoned: dict
    compared: tuple
    aim: str
    left_out: frozenset = frozenset({"lr_spike"})
    felt: dict = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def names(self):
        sites = find_sites(self.learner, STEPS)
        return [
            name
            for name in registry.perturbations
            if name not in self.left_out and site_misfit(registry.perturbations[name](), sites) is None
        ]

    @property
    def conditions(self):
        return ["control", "lr_spike", *self.names]

    @property
    def stateful(self):
        return [name for name in self.names if registry.perturbations[name].keeps_state]

    def perturbations(self, magnitudes=None):
        """All of them, at the magnitudes given by name or else at strong ones."""
        given = self.felt | (magnitudes or {})
        first = ja.lr_spike(given.get("lr_spike", 10.0), onset=FORK, duration=CLOSE - FORK)
        return [first, *(chained(name, given.get(name)) for name in self.names)]

    def train(self, chosen):
        """Trains the whole grid with the perturbations given; all calls share one compiled program.

        States whose size depends on the grid's largest magnitude have that of the largest there is.
        """
        grid = plan(self.learner, chosen, seeds=2, steps=STEPS)
        slots = [
            dataclasses.replace(slot, max_magnitude=slot.kind.limits[1]) if slot.kind.sized else slot
            for slot in grid.program.slots
        ]
        return telemetry(dataclasses.replace(grid, program=dataclasses.replace(grid.program, slots=tuple(slots))))

    @functools.cached_property
    def strong(self):
        return self.train(self.perturbations())


def ppo_case(_):
    infinite = float("inf")
    return Case(
        ppo(evaluations=1, evaluation_episodes=1),
        ppo(evaluations=0, telemetry="basic"),  # what is measured besides does not change the training
        {"momentum_noise": infinite, "weight_noise": infinite, "lr_spike": infinite},
        ("performance", "policy_loss", "value_loss", "entropy", "params_norm", "update_norm"),
        "actor",
        felt={"ratio_clip_failure": 1e-4},  # its ratios are within the bounds
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


def on_dialogue(preset, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpt2.SIZES, "tiny", gpt2.Size(8, 1, 2))
        few = {"size": "tiny", "prompts": 4, "group_size": 4, "epochs": 1, "performance_rows": 4, "max_grad_norm": 0.05}
        # Where no rollout group has a signal a gradient is rounding alone: this epsilon keeps it from being scaled up.
        few |= {"learning_rate": 1e-3, "epsilon": 1e-3}
        before = {"warm_start": 150, "warm_start_rows": 16, "critic_warm_start": 2, "reward_model_warm_start": 2}
        before["warm_start_learning_rate"] = 3e-3  # at higher ones two programs' roundings part before the first step
        dialogue = Hop(difficulty=1.0, entities=3, hops=2, length=13)
        return getattr(ja.learners, preset)(dialogue, **few | before | settings)


def preset_case(preset, poison="advantage_noise", **settings):
    infinite = float("inf")
    return Case(
        on_dialogue(preset, **settings),
        on_dialogue(preset, **settings | {"telemetry": "basic"}),
        {poison: infinite, "weight_noise": infinite, "lr_spike": infinite},
        ("performance", "loss", "params_norm", "update_norm"),
        "policy/h/0",
        felt={"ratio_clip_failure": 1e-4},  # its ratios are within the bounds
    )


def quick(case):
    """With what is kept, of the perturbations that the first tiny learner has at shared sites."""
    shared = {name for name in tiny_case(None).names if registry.perturbations[name].site in SHARED}
    return dataclasses.replace(case, left_out=frozenset({"lr_spike"} | shared - KEPT))


CASES = {
    "tiny": tiny_case,
    "tiny, remedied": remedied_case,
    "tiny dialogue": lambda corpus: quick(dialogue_case(corpus)),
    "ppo": lambda corpus: quick(ppo_case(corpus)),
    "language_model": lambda corpus: quick(language_model_case(corpus, telemetry="basic")),
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


IN_EVERY_RUN = ("tiny",)


def cases(others):
    """All cases; `others` marks those that are not tiny."""
    marks = {
        name: () if name in IN_EVERY_RUN else pytest.mark.slow if "everything" in name else others for name in CASES
    }
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


@pytest.fixture(scope="module", params=cases(pytest.mark.exhaustive))
def case(request, corpus):
    return CASES[request.param](corpus)


def telemetry(grid):
    baseline, forks = compiled(grid.program)(inputs(grid))
    return arrange(grid, baseline, forks), {k: np.asarray(v)[:, : len(grid.seeds)] for k, v in baseline.items()}


def same(a, b):
    return np.array_equal(a, b, equal_nan=True)


def lane_same(arrays, other, condition, start=0, stop=STEPS):
    return all(same(arrays[k][:, condition, start:stop], other[k][:, condition, start:stop]) for k in arrays)


def test_every_standard_perturbation_fits_a_tiny_learner_and_those_not_of_dialogues_another(corpus):
    tiny, dialogue = ({*make(None).names, "lr_spike"} for make in (tiny_case, dialogue_case))
    assert tiny | dialogue == set(registry.perturbations)
    fitting = {name for make in (ppo_case, language_model_case) for name in make(corpus).names}
    sites = ("advantage", "gae_lambda", "ratio_clip")
    of_policy_gradients = {name for name in dialogue if registry.perturbations[name].site in sites}
    assert fitting | {"lr_spike"} == tiny | of_policy_gradients


def test_a_learner_is_disturbed_at_all_its_sites(case):
    sites = {registry.perturbations[name].site for name in case.names}
    sites |= {"learning_rate"}  # lr_spike is in every grid
    assert sites == set(find_sites(case.learner, STEPS)) & set(SITES)


def test_identity_a_neutral_lane_is_bitwise_the_control(case):
    chosen = []
    for perturbation in case.perturbations():
        parts = [dataclasses.replace(p, magnitude=p.neutral) for p in perturbation.parts]
        chosen.append(ja.chain(*parts))
    arrays, _ = case.train(chosen)
    for condition, name in enumerate(case.conditions):
        for channel, values in arrays.items():
            assert same(values[:, condition], values[:, 0]), f"{name} changed {channel}"


def test_pairing_before_the_fork_a_lane_is_the_baseline(case):
    arrays, baseline = case.strong
    for channel, values in arrays.items():
        for condition in range(len(case.conditions)):
            assert same(values[:, condition, :FORK], np.moveaxis(baseline[channel], 0, 1)[:, :FORK]), channel


def test_pairing_a_closed_window_is_bitwise_the_control_and_an_open_one_is_felt(case):
    arrays, _ = case.strong
    for condition, name in enumerate(case.conditions):
        if name in case.names:
            for channel, values in arrays.items():
                assert same(values[:, condition, :OPEN], values[:, 0, :OPEN]), f"{name}: {channel}"
            later = [values[seed, [condition, 0], OPEN:] for values in arrays.values() for seed in (0, 1)]
            apart = [not np.allclose(*pair, rtol=1e-5, atol=0, equal_nan=True) for pair in later]
            assert any(apart), f"{name} changed nothing but roundings"


def test_isolation_a_lane_driven_to_nan_changes_no_other(case):
    """Three sites drive lanes to NaN at once, and a broken learning rate fills kept states with it."""
    stateful = case.stateful[::2]
    chosen = case.perturbations(case.poisoned)
    for name in stateful:
        chosen[case.conditions.index(name) - 1] = chained(name, rate=float("inf"))
    arrays, _ = case.train(chosen)
    destroyed = [*case.poisoned, *stateful]
    for name in destroyed:
        after = arrays["params_norm"][:, case.conditions.index(name), CLOSE:]
        assert not np.isfinite(after).any(), f"{name} should have destroyed its lane"
    for condition, name in enumerate(case.conditions):
        if name not in destroyed:
            assert lane_same(arrays, case.strong[0], condition), f"{name} was touched by another lane's NaN"


def test_one_program_new_magnitudes_windows_and_targets_compile_nothing(case):
    strong = case.strong
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compilations.append(event) if "backend_compile" in event else None
    )
    rng = np.random.default_rng(0)
    other = {n: float(m) for n, m in zip(case.names, rng.uniform(0.05, 0.95, len(case.names)), strict=True)}
    other |= {"quantize": 4.0, "sampler_quantize": 4.0}
    other |= {name: 3.0 for name in case.names if registry.perturbations[name].whole}
    case.train(case.perturbations(other))
    retimed = [
        ja.chain(*(dataclasses.replace(p, when=ja.window(FORK, 2)) for p in x.parts)) for x in case.perturbations()
    ]
    case.train(retimed)
    aimed = [
        ja.chain(
            *(dataclasses.replace(p, target=case.aim if p.site in ("params", "gradient") else None) for p in x.parts)
        )
        for x in case.perturbations()
    ]
    arrays, _ = case.train(aimed)
    assert not compilations
    jax.jit(lambda x: x * 3.25 + 1)(np.ones(7))
    assert compilations, "the listener hears compilations"
    condition = case.conditions.index("weight_noise")
    assert not lane_same(arrays, strong[0], condition), "the target was ignored"


def test_equal_settings_make_equal_learners_which_share_one_program(corpus):
    pairs = [(ppo(), ppo(hidden=[8])), (language_model(corpus), language_model(corpus))]
    for one, same_again in pairs:
        assert one == same_again
        spikes = [ja.lr_spike(onset=FORK, duration=1)]
        first, second = (plan(learner, spikes, seeds=1, steps=STEPS) for learner in (one, same_again))
        assert compiled(first.program) is compiled(second.program)
    assert ppo() != ppo(epochs=3)
    assert language_model(corpus) != language_model(corpus, accumulation=4)


def test_exact_replay_the_same_program_gives_the_same_bits(case):
    arrays, baseline = case.train(case.perturbations())
    for condition in range(len(case.conditions)):
        assert lane_same(arrays, case.strong[0], condition)
    assert all(same(baseline[k], case.strong[1][k]) for k in baseline)


@pytest.mark.parametrize("case", cases(pytest.mark.slow), indirect=True, scope="module")
@pytest.mark.exhaustive
def test_common_randomness_adding_a_condition_leaves_the_others_equal_but_for_rounding(case):
    """A grid of some of the conditions, at another width and from step 0 on, follows the same path at first."""
    few = ["weight_noise", "gradient_sign_flip", *[n for n in case.names if n in ("reward_noise", "observation_stuck")]]
    chosen = [chained(name, fork=0) for name in few]
    smaller = train_without_baseline(case.smaller, chosen, seeds=2, steps=STEPS)
    for position, name in enumerate(["control", *few]):
        for channel in case.compared:
            mine = smaller[channel][:, position, : OPEN + 1]
            theirs = case.strong[0][channel][:, case.conditions.index(name), : OPEN + 1]
            np.testing.assert_allclose(mine, theirs, rtol=2e-3, atol=2e-4, err_msg=f"{name}: {channel}")


def test_lanes_of_a_seed_share_the_learners_randomness_and_seeds_do_not(case):
    arrays, _ = case.strong
    measured = arrays["performance"][:, :, FORK]
    assert same(measured[:, 2:], np.repeat(measured[:, :1], len(case.names), axis=1))
    assert not same(arrays["params_norm"][0, 0], arrays["params_norm"][1, 0])
