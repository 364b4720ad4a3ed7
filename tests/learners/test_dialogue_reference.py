"""Learners on dialogues against `dialogue_reference`: whole iterations, and what comes before the first.

A step is traced once, with what passes between its methods; each value of it is compared with the reference's, in the
order in which they are made. Updates are followed by induction: the loss and its gradient are compared at the
parameters that an update began with, and the parameters it ended with are those of the reference's optimizer.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import dialogue_reference as plain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from errand import CALL, Errand, random_params

from jaxaudit.core.taps import Taps
from jaxaudit.dialogues.protocol import POLICY, PROMPT, TOOL
from jaxaudit.learners.dialogue import demonstrations
from jaxaudit.learners.dialogue.factories import settings_of
from jaxaudit.learners.dialogue.learner import DialogueData, DialogueLearner, DialogueState, Trained
from jaxaudit.learners.dialogue.telemetry import measurement
from jaxaudit.learners.dialogue.telemetry.channels import initial_values
from jaxaudit.learners.dialogue.telemetry.rewards import Scale
from jaxaudit.learners.dialogue.telemetry.token_statistics import Bigrams
from jaxaudit.models import gpt2

pytestmark = pytest.mark.long

STEP, STEPS = 3, 10
"""When the iteration is, and of how many."""

CLOSE = {"rtol": 1e-5, "atol": 5e-6}
"""Of values of float32 against float64; the largest difference by default is a sixth of it."""

OFF = 1e-5
"""The most that a gradient's error may be, in norms: of the whole gradient's, or, of a leaf alone, of its own and a
tenth of the whole's. The largest by default are 6e-7 and 1e-6."""

AFTER = 1e-4
"""The most that parameters may be off after an update, of its rate. The largest by default is 3e-6."""


class Watched(DialogueLearner):
    """A learner whose `seen` holds, after a step was traced, what passed between its methods."""

    def update_epochs(self, state, base, numbers, experience, key, taps):
        after, visited = super().update_epochs(state, base, numbers, experience, key, taps)
        self.seen = {"experience": experience, "visited": visited}
        return after, visited

    def gradient(self, trained, *rest):
        gradient, told, *others = super().gradient(trained, *rest)
        return gradient, told | {"gradient": gradient, "trained": trained}, *others


class Altered(Taps):
    """Taps that do at each site what `altered` says, and nothing else."""

    altered: ClassVar[dict] = {}

    def __call__(self, site, value, *, label="", **context):
        return self.altered[site](value) if site in self.altered else value

    def disturbs(self, *sites):
        return any(site in self.altered for site in sites)


SCALED = ("temperature", "gae_lambda", "kl_coefficient", "ratio_clip")
"""Sites of numbers, which become `SCALE` times what they were."""

SCALE = 0.8

COMMON = {
    "size": "tiny",
    "prompts": 4,
    "group_size": 4,
    "epochs": 2,
    "minibatches": 2,
    "microbatches": 4,
    "temperature": 0.7,
    "top_k": 7,
    "top_p": 0.9,
    "learning_rate": 0.05,
    "epsilon": 3e-3,
    "weight_decay": 0.1,
    "max_grad_norm": 0.3,
    "critic_learning_rate": 0.02,
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "critic_lambda": 0.7,
    "entropy_coefficient": 0.05,
    "value_clip": 0.1,
    "dual_clip": 1.3,
    "overlong_buffer": 0.7,
    "overlong_coefficient": 0.6,
    "mask_truncated": True,
    "performance_rows": 2,
    "telemetry": "basic",
}
PREFERENCE = {"beta": 0.5, "label_smoothing": 0.1, "oversampling": 2, "entropy_coefficient": 0.0, "microbatches": 2}


@dataclass(frozen=True)
class Case:
    """A preset with settings, the sites that are disturbed, and how many layers a transformer has."""

    preset: str
    settings: dict
    sites: tuple[str, ...] = ()
    seed: int = 0
    layers: int = 2


STALE = ("behaviour", "log_probability")
CASES = {
    "ppo_lm": Case(
        "ppo_lm",
        {
            "old_log_probability": "sampled",
            "kl_coefficient": 0.3,
            "reward": "learned",
            "learning_rate_warmup": 0.1,
            "learning_rate_decay": "cosine",
            "learning_rate_final": 0.2,
        },
        (*STALE, "reward", "temperature", "gae_lambda", "kl_coefficient"),
        seed=2,
        layers=1,
    ),
    "dapo": Case(
        "dapo",
        {"correction": "tis", "tis_cap": 1.2, "kl": "exact", "kl_coefficient": 0.2},
        (*STALE, "ratio_clip"),
        seed=1,
        layers=1,
    ),
    "dpo": Case("dpo", PREFERENCE, seed=9, layers=1),
}
"""One of each structure; what else there is to choose is in `VARIANTS`."""

GROUPS = {"oversampling": 2, "kl_coefficient": 0.2, "microbatches": 0}
MASKED = {"correction": "mis"}
CAPPED = {"correction": "tis", "tis_cap": 1.2}


def variant(preset, *sites, **settings):
    return Case(preset, GROUPS | settings, (*STALE, *sites), seed=8)


def divergent(kl, weight, **settings):
    return variant("grpo", "kl_coefficient", kl=kl, kl_weight=weight, **settings)


CRITIC = CASES["ppo_lm"].settings
VARIANTS = {
    "grpo": variant("grpo", telemetry="full"),
    "dr_grpo": variant("dr_grpo", kl_coefficient=0.0),
    "rloo": variant("rloo", "temperature", old_log_probability="sampled"),
    "gspo": variant("gspo", "ratio_clip", kl_coefficient=0.0, clip_low=0.03, clip_high=0.04, dual_clip=1.02),
    "k1": divergent("k1", "none", **CAPPED, aggregation="token_minibatch"),
    "k1_ratio": divergent("k1", "ratio", **MASKED, mis_low=0.7, mis_high=1.4, aggregation="constant"),
    "k1_stopped": divergent("k1", "stopped_ratio", **MASKED, correction_level="sequence", mis_low=0.1, mis_high=3.0),
    "k2": divergent("k2", "none", **MASKED, correction_level="geometric", mis_low=0.9, mis_high=1.1),
    "k2_ratio": divergent("k2", "ratio", **CAPPED, correction_level="sequence", aggregation="token_iteration"),
    "k2_stopped": divergent("k2", "stopped_ratio", ratio="sequence_mean", aggregation="token_minibatch"),
    "k3": divergent("k3", "none", ratio="sequence_sum", aggregation="constant"),
    "k3_ratio": divergent("k3", "ratio", advantage="leave_one_out", microbatches=4),
    "k3_stopped": divergent(
        "k3", "stopped_ratio", ratio="sequence_mean", **MASKED, mis_low=0.7, mis_high=1.4, aggregation="constant"
    ),
    "exact": variant("rloo", "kl_coefficient", kl="exact", kl_in="loss", microbatches=1),
    "k2_in_reward": variant("grpo", kl="k2", kl_in="reward", reward="learned", advantage="group_mean"),
    "k3_in_reward": Case("ppo_lm", CRITIC | {"kl": "k3", "whiten": False, "clip_value": False}, STALE, seed=7),
    "ppo_in_loss": Case(
        "ppo_lm",
        CRITIC
        | CAPPED
        | {"kl": "k3", "kl_in": "loss", "old_log_probability": "recomputed", "value_clip": 0.02, "telemetry": "full"},
        (*STALE, "reward", "ratio_clip"),
        seed=7,
    ),
    "adapters": Case("ppo_lm", CRITIC | {"lora_rank": 2, "checkpoint": "there is one"}, CASES["ppo_lm"].sites, seed=7),
    "online": Case("dpo", PREFERENCE | {"online": True, "microbatches": 0}, ("temperature", "behaviour")),
    "offline_learned": Case("dpo", PREFERENCE | {"reward": "learned", "microbatches": 1, "telemetry": "full"}, seed=15),
}


HEADS = 2


def tiny(layers, monkeypatch):
    monkeypatch.setitem(gpt2.SIZES, "tiny", gpt2.Size(16, layers, HEADS))


def flat(tree):
    """Parameters as the reference has them; None as it is."""
    if tree is None:
        return None
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = (str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        found["/".join(name for name in names if name != "layers")] = np.asarray(leaf, np.float64)
    return found


def written(rows):
    """Rows as the reference has them."""
    names = {name: name for name in ("tokens", "role", "position", "truncated")} | {"first": "attention_start"}
    arrays = {name: np.asarray(getattr(rows, field)) for name, field in names.items()}
    return plain.Written(**arrays, rewards={name: np.float64(reward) for name, reward in rows.rewards.items()})


@dataclass
class Iteration:
    """What a step did, arrays of NumPy, and what the reference is given of it.

    Attributes:
      case, settings: the settings as they act.
      before, after: the states.
      author: what wrote the rows.
      rows: all that were sampled, as the reference has them.
      uniform: `[M, T]`.
      disturbed: what is added.
      experience, visited: the learner's.
      telemetry: its.
    """

    case: Case
    settings: object
    before: DialogueState
    after: DialogueState
    author: object
    base: object
    rows: plain.Written
    uniform: np.ndarray
    disturbed: plain.Disturbed
    experience: object
    visited: object
    telemetry: dict

    @property
    def drawn(self):
        return self.experience.rollout


def iteration(case, monkeypatch):
    """One step of the learner of a case."""
    tiny(case.layers, monkeypatch)
    settings = settings_of(case.preset)(**COMMON | case.settings)
    learner = Watched(Errand(), settings.structure, Errand.length)
    random = np.random.default_rng(case.seed)
    monkeypatch.setattr(
        measurement, "measure_held_out_when_due", lambda collector, latest, *rest: (latest, latest.values)
    )
    base = random_params(dataclasses.replace(learner.policy, rank=0), random) if settings.lora_rank else None
    policy = random_params(learner.policy, random)
    reference, stale = (random_params(learner.policy, random, policy, by) for by in (0.5, 0.3))
    critic, reward_model = (one and random_params(one, random) for one in (learner.critic, learner.reward_model))
    told, measured = initial_values(learner.channels, jnp.float32(0))
    scale, counts = Scale.of(jnp.arange(2.0)), settings.telemetry == "full"
    before = DialogueState(
        policy=Trained(policy, learner.transform.init(policy)),
        critic=critic and Trained(critic, learner.transform.init(critic)),
        reward_model=reward_model,
        reference=reference,
        initial=policy if learner.keeps_initial else None,
        scales={"proxy": scale, "gold": scale} if reward_model else {},
        results=Bigrams.empty(Errand.vocabulary) if counts else None,
        warm_start_success=jnp.float32(0),
        told=told,
        measured=measured,
    )
    count = settings.prompts * settings.oversampling * settings.group_size
    noise = {
        "log_probability": np.float32(0.3 * random.normal(size=(count, Errand.length))),
        "reward": np.float32(0.3 * random.normal(size=count)),
    }
    noise = {site: x for site, x in noise.items() if site in case.sites}
    data = DialogueData(settings.numbers(1.0), None, base)
    key = jax.random.key(case.seed)

    @jax.jit
    def step(state, key, data, stale, noise):
        taps = Altered(STEP, STEPS, data=data)
        taps.altered = {site: lambda x: SCALE * x for site in SCALED if site in case.sites}
        taps.altered |= {site: lambda x, more=more: x + more for site, more in noise.items()}
        taps.altered |= {"behaviour": lambda _: stale} if "behaviour" in case.sites else {}
        after, telemetry = learner.step(state, key, taps)
        return after, telemetry, learner.seen

    after, telemetry, seen = jax.tree.map(np.asarray, step(before, key, data, stale, noise))
    follows = settings.objective == "preference" and not settings.online
    names = {"ratio_clip": ("clip_low", "clip_high")}
    scaled = [name for site in SCALED if site in case.sites for name in names.get(site, (site,))]
    acting = dataclasses.replace(settings, **{name: SCALE * getattr(settings, name) for name in scaled})
    draws = jax.random.split(jax.random.split(key)[0])[1]
    return Iteration(
        case=case,
        settings=acting,
        before=before,
        after=after,
        author=stale if "behaviour" in case.sites else reference if follows else policy,
        base=base,
        rows=written(seen["experience"].rollout.rows),
        uniform=np.float64(jax.random.uniform(draws, (count, Errand.length))),
        disturbed=plain.Disturbed(**{site: np.float64(x) for site, x in noise.items()}),
        experience=seen["experience"],
        visited=seen["visited"],
        telemetry=telemetry,
    )


def same(name, mine, theirs, where=True, **tolerance):
    """Asserts that the learner's value, mine, is the reference's where it means something."""
    mine, theirs, where = np.broadcast_arrays(mine, theirs, where)
    if theirs.dtype.kind == "f":
        np.testing.assert_allclose(mine[where], theirs[where], err_msg=name, **CLOSE | tolerance)
    else:
        np.testing.assert_array_equal(mine[where], theirs[where], err_msg=name)


def compare_collected(it):
    """Asserts that what was sampled and what is learned from is the reference's, which is returned."""
    before = it.before
    models = plain.Models(
        policy=flat(before.policy.params),
        reference=flat(before.reference),
        author=flat(it.author),
        critic=before.critic and flat(before.critic.params),
        reward_model=flat(before.reward_model),
        base=flat(it.base),
    )
    found = plain.collected(it.settings, Errand(), HEADS, models, it.rows, it.uniform, it.disturbed, it.drawn.reward)
    drawn, own = it.drawn, it.rows.own
    same("all sampler's log-probability", drawn.rows.log_prob, found["all sampler's log-probability"], own)
    same("all sampler's entropy", drawn.rows.entropy, found["all sampler's entropy"], own)
    same("all mass cut", drawn.rows.mass_cut, found["all mass cut"], own)
    same("all token drawn", drawn.rows.tokens, found["all token drawn"], own)
    for name, field in {"scored": "undisturbed_reward", "reward": "reward", "kept": "row_mask"}.items():
        same(f"all {name}", getattr(drawn, field), found[f"all {name}"])
    loss_inputs, rows, recomputed = (
        it.experience.batch.loss_inputs,
        it.experience.batch.rows,
        it.experience.trainer_outputs,
    )
    own = found["own"]
    same("the rows that are learned from, by their own tokens that count", loss_inputs.loss_mask, own)
    for name, field in {"tokens": "tokens", "position": "position", "attention_start": "first"}.items():
        same(f"chosen rows' {name}", getattr(rows, name), getattr(found["rows"], field), own)
    same("score", recomputed.score, found["score"], own.any(-1))
    same("temperature", it.experience.temperature, np.float64(it.settings.temperature))
    if recomputed.log_prob is not None:
        same("recomputed log-probability", recomputed.log_prob, found["recomputed"], own)
        same("entropy", recomputed.entropy, found["entropy"], own)
    if it.settings.correction != "none" or it.settings.old_log_probability == "sampled":
        same("sampled log-probability as learned from", loss_inputs.rollout_log_prob, found["sampled"], own)
    if it.settings.kl != "none" or it.settings.objective == "preference":
        same("reference's log-probability", loss_inputs.ref_log_prob, found["reference"], own)
    if found["value"] is not None:
        same("value", loss_inputs.old_value, found["value"], own)
        same("returns", recomputed.returns, found["returns"])
        same("target", loss_inputs.value_target, found["target"])
    if it.settings.objective == "policy":
        same("old log-probability", loss_inputs.old_log_prob, found["old"], own)
        same("advantage", loss_inputs.advantages, found["advantage"], atol=2e-5)
    return found


def compare_gradient(what, gradient, loss, params, random):
    """Asserts that a gradient is that of a loss, by finite differences: all of it, and each leaf's part."""
    norm = max(np.sqrt(sum(np.sum(g**2) for g in gradient.values())), 1e-2)
    everywhere = []
    for slope in plain.slopes(loss, params, random):
        error = sum(np.sum(gradient[path] * d) for path, d in slope.direction.items()) - slope.slope
        if slope.name == "everywhere":
            everywhere.append(error)
            continue
        if len(everywhere) == 16:
            root = np.sqrt(np.mean(np.square(everywhere)))
            assert root < OFF * norm, f"{what} is off by {root:.2e}, and its norm is {norm:.2e}"
            everywhere.append(0.0)
        own = np.sqrt(np.sum(gradient[slope.name] ** 2))
        allowed = OFF * (own + 0.1 * norm)
        assert abs(error) < allowed, f"{what} by {slope.name} is off by {error:.2e}, and its norm is {own:.2e}"


UPDATE = ("clipped", "gradient_norm")


def rate_of(settings, label):
    """What an update is multiplied with."""
    peak = settings.learning_rate if label == "policy" else settings.critic_learning_rate
    return plain.rate(settings, peak, STEP / STEPS)


def compare_updates(it, found):
    """Asserts that each update is the reference's, and yields what the loss of each is made of."""
    settings, random = it.settings, np.random.default_rng(1)
    adam = plain.Adam(settings.beta1, settings.beta2, settings.epsilon, settings.weight_decay, settings.max_grad_norm)
    rates = {label: rate_of(settings, label) for label in ("policy", "critic")}
    start = {"policy": it.before.policy, "critic": it.before.critic}
    end = {"policy": it.after.policy, "critic": it.after.critic}
    labels = [label for label in start if start[label] is not None]
    params = {label: flat(start[label].params) for label in labels}
    moments = {label: adam.begun(params[label]) for label in labels}
    base, told_all = flat(it.base), []
    for epoch in range(settings.epochs):
        visited_rows = np.sort(it.visited.rows[epoch].reshape(-1))
        same(f"rows of epoch {epoch}", visited_rows, np.arange(settings.rows))
        for number in range(settings.minibatches):
            what = f"update {number} of epoch {epoch}: "
            index = it.visited.rows[epoch, number]
            if settings.objective == "preference":
                same(what + "pairs lie side by side", index[1::2], index[::2] + 1)
                same(what + "the better row is first", index[::2] % 2, np.zeros(len(index) // 2, int))
            told, done, tokens = jax.tree.map(
                lambda x: x[epoch, number],  # noqa: B023
                (it.visited.metrics, it.visited.optimizer, it.visited.tokens),
            )
            trained = {label: flat(one.params) for label, one in told.pop("trained").items()}
            gradient = {label: flat(one) for label, one in told.pop("gradient").items()}
            for label in labels:
                compare_params(what + f"parameters of the {label} before", trained[label], params[label], rates[label])
            batch = plain.minibatch(settings, Errand(), found, index)
            critic = trained.get("critic")

            def losses(policy, critic, frozen=None, batch=batch):
                return plain.losses(
                    settings, HEADS, plain.merge_adapters(policy, base), whole_of(critic, base), batch, frozen
                )

            theirs, log_ratio, frozen = losses(trained["policy"], critic)
            assert set(told) == set(theirs), "the parts of the loss have the reference's names"
            if tokens is not None:
                same(what + "log-ratio", tokens.log_ratio, log_ratio, batch.own)
            for name, value in theirs.items():
                same(what + name, told[name], value)
            of_policy = lambda p: losses(p, critic, frozen)[0]["loss"]  # noqa: B023, E731
            of_critic = lambda c: losses(trained["policy"], c, frozen)[0]["loss"]  # noqa: B023, E731
            for label in labels:
                loss = of_policy if label == "policy" else of_critic
                compare_gradient(what + f"gradient of the {label}", gradient[label], loss, trained[label], random)
                params[label], moments[label], update = adam.updated(
                    trained[label], moments[label], gradient[label], rates[label]
                )
                for name, value in update.items():
                    same(what + f"{name} of the {label}", getattr(done[label], name), value)
            of_updates = {f"{label} {name}": getattr(done[label], name) for label in labels for name in UPDATE}
            told_all.append(theirs | of_updates)
    for label in labels:
        compare_params(f"parameters of the {label} at the end", flat(end[label].params), params[label], rates[label])
        kept = end[label].moments[0]
        same(f"updates of the {label}", kept.count, moments[label]["count"])
        for name in ("mu", "nu"):
            for path, moment in flat(getattr(kept, name)).items():
                same(f"{name} of the {label}'s {path}", moment, moments[label][name][path], atol=1e-7)
    return told_all


def whole_of(params, base):
    return None if params is None else plain.merge_adapters(params, base)


def compare_params(what, mine, theirs, rate):
    """Asserts that parameters are the reference's, by the rate, the largest step that Adam takes at first."""
    for path, x in theirs.items():
        np.testing.assert_allclose(mine[path], x, rtol=1e-6, atol=AFTER * rate, err_msg=f"{what}: {path}")


def compare(it):
    """Asserts that an iteration is the reference's."""
    found = compare_collected(it)
    told = compare_updates(it, found)
    for name in ("reference", "reward_model"):
        before, after = (jax.tree.leaves(getattr(state, name)) for state in (it.before, it.after))
        for one, other in zip(before, after, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=name)
    if found["value"] is not None:
        own = found["own"]
        alone = plain.earned(it.settings, found["score"], own, np.zeros(own.shape))
        of_score = plain.returns(alone, own, it.settings.gamma)
        for name, wanted in {"value_bias": found["target"], "score_value_bias": of_score}.items():
            same(f"{name} of the telemetry", it.telemetry[name], (found["value"] - wanted)[own].mean())
    return found, told


def assert_it_says_something(it, found, told, every_bound=True):
    """Asserts that what could make no difference does; with `every_bound`, each bound of the ratio alone, too."""
    settings, rows = it.settings, it.rows
    assert 0.1 < rows.truncated.mean() < 0.9, "truncated rows and others"
    for role in (POLICY, PROMPT, TOOL):
        assert (rows.role == role).mean() > 0.02
    assert (rows.first > 0).any(), "chunks"
    assert (rows.role[:, 2] == PROMPT).any()
    assert (rows.role[:, 2] == POLICY).any(), "prompts of two lengths"
    assert (found["all mass cut"][rows.own] > 0.05).mean() > 0.2, "top-p"
    assert found["all certain"][rows.own].mean() > 0.95, "tokens that rounding does not decide"
    own = found["own"]
    dropped = found["rows"].own.any(-1) & ~own.any(-1)
    assert 0 < dropped.mean() < 0.8, "rows that do not count"
    gap = np.abs(found["recomputed"] - found["reference"])[own]
    assert np.median(gap) > 0.1, "another reference"
    if settings.objective == "policy":
        lengths = np.max(np.where(own, np.arange(Errand.length), 0), -1)
        taken = max(lengths[index].sum() for epoch in it.visited.rows for index in epoch) / Errand.length
        pieces = settings.piece_sizes(settings.rows // settings.minibatches)
        assert taken > pieces.first or not settings.microbatches > 1, "several pieces"
        penalty = plain.overlong(settings, Errand(), found["rows"])[own.any(-1)]
        assert len(set(penalty)) > 2, "penalties"
    if settings.oversampling > 1:
        size, groups = settings.group_size, settings.prompts * settings.oversampling
        reward, kept = (found[f"all {name}"].reshape(groups, size) for name in ("reward", "kept"))
        signal = np.array([plain.has_signal(*group) for group in zip(reward, kept, strict=True)])
        assert 0 < signal.sum() < groups, "groups without signal"
        assert not signal[: settings.prompts].all(), "that would have been taken"
    for label in ("policy", "critic"):
        norms = [one.get(f"{label} gradient_norm", 1.0) for one in told]
        assert np.mean(np.array(norms) > 0.02) > 0.5, "gradients"
    if settings.objective == "preference":
        return
    assert np.abs(found["sampled"] - found["recomputed"])[own].mean() > 0.1, "a stale sampler"
    shares = {name: np.mean([one[name] for one in told]) for name in told[0]}
    bounds = [shares[f"clip_{name}"] for name in ("low", "high", "dual")]
    assert sum(bounds) > 0.02, "clipped ratios"
    if every_bound:
        assert min(bounds) > 0.005
        assert shares["policy clipped"] > 0, "clipped gradients"
    if settings.advantage == "gae" and settings.clip_value:
        assert 0.02 < shares["value_clipped"] < 0.98
    if settings.correction == "tis":
        weight = plain.correction(settings, found["old"] - found["sampled"], own)[own]
        assert 0.05 < (weight == settings.tis_cap).mean() < 0.95
    if settings.correction == "mis":
        assert 0.02 < shares["correction_zero"] < 0.98


@pytest.mark.parametrize("name", CASES)
def test_an_iteration_is_the_references(name, monkeypatch):
    it = iteration(CASES[name], monkeypatch)
    assert_it_says_something(it, *compare(it))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_an_iteration_of_other_parts_is_the_references(name, monkeypatch):
    it = iteration(VARIANTS[name], monkeypatch)
    assert_it_says_something(it, *compare(it), every_bound=False)


# What comes before the first iteration.


class Pretraining:
    """One of Adam's, with all that it is told: the parameters it begins with, and the gradients.

    Attributes:
      start: flat parameters.
      gradients: flat.
      shown: rows that were made for it, in their order.
    """

    def __init__(self, transform):
        self.transform, self.start, self.gradients, self.shown = transform, None, [], []

    def init(self, params):
        jax.debug.callback(lambda params: setattr(self, "start", flat(params)), params, ordered=True)
        return self.transform.init(params)

    def update(self, gradient, moments):
        jax.debug.callback(lambda gradient: self.gradients.append(flat(gradient)), gradient, ordered=True)
        return self.transform.update(gradient, moments)

    def see(self, rows):
        jax.debug.callback(lambda rows: self.shown.append((written(rows), rows)), rows, ordered=True)
        return rows


def prepared(settings, monkeypatch):
    """The state of a learner before its first iteration, what each of its pretrainings did, in their order, and the
    rows, returns and key that the last had, value pretraining.

    No other rows are sampled to tell whether the warm start is over, which it never is, nor what a reward's scale is.
    """
    learner, stages = DialogueLearner(Errand(), settings.structure), []
    adam, demonstrated, undisturbed = (
        optax.scale_by_adam,
        demonstrations.demonstrate,
        learner.collector.sample_undisturbed,
    )
    monkeypatch.setattr(optax, "scale_by_adam", lambda *args: stages.append(Pretraining(adam(*args))) or stages[-1])
    monkeypatch.setattr(demonstrations, "demonstrate", lambda *args: stages[-1].see(demonstrated(*args)))

    given, returned, value_model = {}, learner.sample_returns, demonstrations.pretrain_value_model

    def unsampled(*args):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: undisturbed(*args)))

    def really_returned(*args):
        monkeypatch.setattr(learner.collector, "sample_undisturbed", undisturbed)
        return returned(*args)

    def fitted(network, params, base, rows, returns, key, **rest):
        seen = {"rows": rows, "returns": returns, "key": jax.random.key_data(key)}
        jax.debug.callback(given.update, seen, ordered=True)
        return value_model(network, params, base, rows, returns, key, **rest)

    monkeypatch.setattr(learner.collector, "sample_undisturbed", unsampled)
    monkeypatch.setattr(learner, "sample_returns", really_returned)
    monkeypatch.setattr(demonstrations, "pretrain_value_model", fitted)
    # A transformation of its own for the iterations' moments, which are not looked at here.
    monkeypatch.setattr(learner, "transform", optax.identity())
    state = jax.jit(learner.init)(jax.random.key(3), DialogueData(settings.numbers(1.0)))
    jax.effects_barrier()
    return jax.tree.map(np.asarray, state), stages, given


def follow(what, stage, updates, rate, loss_of, looked_at=(0, 1, 4), falls=False):
    """Asserts that the gradients of some of a pretraining's updates are those of `loss_of(number)`, and gives the
    parameters after the last. The rate `falls` to 0 or stays."""
    adam, params, random = plain.Adam(0.9, 0.95), stage.start, np.random.default_rng(2)
    moments = adam.begun(params)
    for number in range(updates):
        if number in looked_at:
            gradient = stage.gradients[number]
            assert max(np.abs(g).max() for g in gradient.values()) > 0.02
            compare_gradient(f"{what}, update {number}", gradient, loss_of(number), params, random)
        left = 1 - number / updates if falls else 1
        params, moments, _ = adam.updated(params, moments, stage.gradients[number], left * rate)
    return params


@pytest.mark.exhaustive
def test_what_comes_before_the_first_iteration_is_the_references(monkeypatch):
    given = {
        "reward": "learned",
        "warm_start": demonstrations.UPDATES_PER_CHECK,
        "warm_start_rows": 12,
        "warm_start_success": 1.0,
        "warm_start_learning_rate": 0.01,
        "reward_model_warm_start": 5,
        "reward_model_pairs": 10,
        "reward_model_learning_rate": 0.02,
        "critic_warm_start": 5,
        "critic_warm_start_rows": 24,
        "critic_warm_start_minibatch": 10,
        "critic_warm_start_learning_rate": 0.03,
    }
    tiny(1, monkeypatch)
    settings = settings_of("ppo_lm")(**COMMON | given)
    state, (warm, judge, critic), fitted = prepared(settings, monkeypatch)
    rate = settings.warm_start_learning_rate

    right = np.concatenate([rows.tokens == CALL for rows, _ in warm.shown]).any(-1)
    assert 0.3 < right.mean() < 0.7, "right demonstrations and others"
    policy = follow(
        "warm start",
        warm,
        demonstrations.UPDATES_PER_CHECK,
        rate,
        lambda n: lambda params: plain.imitation(settings, HEADS, params, warm.shown[n][0]),
    )
    compare_params("the policy after its warm start", flat(state.policy.params), policy, rate)
    for one, other in zip(jax.tree.leaves(state.reference), jax.tree.leaves(state.policy.params), strict=True):
        np.testing.assert_array_equal(one, other, err_msg="the reference is the policy that was warmed up")

    for stage in (judge, critic):
        head = {"head/kernel": np.zeros(16), "head/bias": np.zeros(())}
        compare_params("what a reward or value model begins as", stage.start, policy | head, rate)

    pairs = [(judge.shown[i][0], judge.shown[i + 1][0]) for i in range(0, len(judge.shown), 2)]
    signs = np.concatenate([np.sign(one.rewards["seen"] - other.rewards["seen"]) for one, other in pairs])
    assert set(signs) == {-1.0, 0.0, 1.0}, "pairs of all kinds"
    gold = np.concatenate([np.sign(one.rewards["gold"] - other.rewards["gold"]) for one, other in pairs])
    assert (gold != signs).any(), "what is seen is not gold"
    for one, other in pairs:
        same("pairs are of one prompt", one.tokens[:, :2], other.tokens[:, :2])
        assert (one.tokens == CALL).any(-1).all()
        assert not (other.tokens == CALL).any()
    rate = settings.reward_model_learning_rate
    model = follow(
        "the reward model's",
        judge,
        settings.reward_model_warm_start,
        rate,
        lambda n: lambda params: plain.judgement(HEADS, params, *pairs[n]),
    )
    compare_params("the reward model", flat(state.reward_model), model, rate)

    rows = written(fitted["rows"])
    assert len(rows.tokens) == 2 * settings.rows, "whole iterations' rows, as many as are asked for"
    logs = plain.log_softmax(plain.logits(policy, rows, HEADS) / settings.temperature)
    told = fitted["rows"].log_prob
    same("value pretraining's rows are the policy's", told, plain.of_token(logs, rows), rows.own)
    scored = plain.scores(model, rows, HEADS)
    assert np.std(scored) > 0.01
    # The policy is its own reference, from which it does not diverge.
    scored += settings.overlong_coefficient * plain.overlong(settings, Errand(), rows)
    returned = plain.returns(plain.earned(settings, scored, rows.own, 0.0 * rows.tokens), rows.own, settings.gamma)
    same("what value pretraining's rows return", fitted["returns"], returned)
    key, size = jax.random.wrap_key_data(fitted["key"]), settings.critic_warm_start_minibatch

    def expectation(number):
        """The loss of the rows that an update takes."""
        index = np.asarray(jax.random.randint(jax.random.fold_in(key, number), (size,), 0, len(rows.tokens)))
        return lambda params: plain.expectation(HEADS, params, rows.picked(index), returned[index])

    rate = settings.critic_warm_start_learning_rate
    values = follow("the critic's", critic, settings.critic_warm_start, rate, expectation, falls=True)
    compare_params("the critic", flat(state.critic.params), values, rate)
