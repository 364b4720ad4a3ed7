"""Tests iterations of dialogue learners, and their warm starts, against `dialogue_reference` in float64 NumPy.

A step is traced once, together with the values that pass between its methods. Each value is compared with the
reference's, in the order of computation. Updates are compared one at a time: the loss and its gradient at the
parameters with which the learner began the update, and the parameters after it with the reference's.
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
from letter_dialogue import CALL, LetterDialogue, random_params

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
"""The number of the iteration that is tested, and how many there are."""

CLOSE = {"rtol": 1e-5, "atol": 5e-6}
"""Tolerances between values in float32 and in float64; the largest difference by default is a sixth of them."""

GRADIENT_TOLERANCE = 1e-5
"""The largest allowed error of a gradient, by norm: relative to the gradient's norm, or, for a single leaf, to the
leaf's norm plus a tenth of the gradient's. The largest errors by default are 6e-7 and 1e-6."""

PARAMS_TOLERANCE = 1e-4
"""The largest allowed error of parameters after an update, relative to the learning rate. By default it is 3e-6."""


class RecordingLearner(DialogueLearner):
    """A learner whose `recorded` has, after a step was traced, the values that passed between its methods."""

    def update_epochs(self, state, base, numbers, experience, key, taps):
        after, visited = super().update_epochs(state, base, numbers, experience, key, taps)
        self.recorded = {"experience": experience, "visited": visited}
        return after, visited

    def gradient(self, trained, *rest):
        gradient, metrics, *others = super().gradient(trained, *rest)
        return gradient, metrics | {"gradient": gradient, "trained": trained}, *others


class ChangingTaps(Taps):
    """Taps that apply the function `altered[site]` at each site in `altered`, and change nothing elsewhere."""

    altered: ClassVar[dict] = {}

    def __call__(self, site, value, *, label="", **context):
        return self.altered[site](value) if site in self.altered else value

    def disturbs(self, *sites):
        return any(site in self.altered for site in sites)


SCALED = ("temperature", "gae_lambda", "kl_coefficient", "ratio_clip")
"""Sites of numbers; a case that names such a site multiplies the number by `SCALE`."""

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
    """A preset with settings, the disturbed sites, and the number of the transformer's layers."""

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
"""A case of each structure; `VARIANTS` has the other settings."""

GROUP_SETTINGS = {"oversampling": 2, "kl_coefficient": 0.2, "microbatches": 0}
MASKED = {"correction": "mis"}
CAPPED = {"correction": "tis", "tis_cap": 1.2}


def variant(preset, *sites, **settings):
    return Case(preset, GROUP_SETTINGS | settings, (*STALE, *sites), seed=8)


def kl_variant(kl, weight, **settings):
    return variant("grpo", "kl_coefficient", kl=kl, kl_weight=weight, **settings)


CRITIC = CASES["ppo_lm"].settings
VARIANTS = {
    "grpo": variant("grpo", telemetry="full"),
    "dr_grpo": variant("dr_grpo", kl_coefficient=0.0),
    "rloo": variant("rloo", "temperature", old_log_probability="sampled"),
    "gspo": variant("gspo", "ratio_clip", kl_coefficient=0.0, clip_low=0.03, clip_high=0.04, dual_clip=1.02),
    "k1": kl_variant("k1", "none", **CAPPED, aggregation="token_minibatch"),
    "k1_ratio": kl_variant("k1", "ratio", **MASKED, mis_low=0.7, mis_high=1.4, aggregation="constant"),
    "k1_stopped": kl_variant("k1", "stopped_ratio", **MASKED, correction_level="sequence", mis_low=0.1, mis_high=3.0),
    "k2": kl_variant("k2", "none", **MASKED, correction_level="geometric", mis_low=0.9, mis_high=1.1),
    "k2_ratio": kl_variant("k2", "ratio", **CAPPED, correction_level="sequence", aggregation="token_iteration"),
    "k2_stopped": kl_variant("k2", "stopped_ratio", ratio="sequence_mean", aggregation="token_minibatch"),
    "k3": kl_variant("k3", "none", ratio="sequence_sum", aggregation="constant"),
    "k3_ratio": kl_variant("k3", "ratio", advantage="leave_one_out", microbatches=4),
    "k3_stopped": kl_variant(
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


def reference_params(tree):
    """Returns parameters in the reference's form, and None for None."""
    if tree is None:
        return None
    params = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = (str(getattr(key, "key", getattr(key, "name", key))) for key in path)
        params["/".join(name for name in names if name != "layers")] = np.asarray(leaf, np.float64)
    return params


def reference_rows(rows):
    """Returns rows in the reference's form."""
    names = {name: name for name in ("tokens", "role", "position", "truncated")} | {"first": "attention_start"}
    arrays = {name: np.asarray(getattr(rows, field)) for name, field in names.items()}
    return plain.TokenRows(**arrays, rewards={name: np.float64(reward) for name, reward in rows.rewards.items()})


@dataclass
class Iteration:
    """Records a step in NumPy arrays, and the reference's inputs for it.

    Attributes:
      case: the case.
      settings: the settings, with the disturbances of numbers applied.
      before, after: the learner's states.
      author: the parameters that sampled the rows.
      base: the frozen parameters below adapters, or None.
      rows: all sampled rows, in the reference's form.
      uniform: the uniform numbers that sampled the tokens, `[M, T]`.
      disturbed: what the perturbations add.
      experience, visited: values that the learner computed.
      telemetry: the learner's telemetry.
    """

    case: Case
    settings: object
    before: DialogueState
    after: DialogueState
    author: object
    base: object
    rows: plain.TokenRows
    uniform: np.ndarray
    disturbed: plain.Disturbances
    experience: object
    visited: object
    telemetry: dict

    @property
    def rollout(self):
        return self.experience.rollout


def run_iteration(case, monkeypatch):
    """Runs one step of a case's learner."""
    tiny(case.layers, monkeypatch)
    settings = settings_of(case.preset)(**COMMON | case.settings)
    learner = RecordingLearner(LetterDialogue(), settings.structure, LetterDialogue.length)
    rng = np.random.default_rng(case.seed)
    monkeypatch.setattr(
        measurement, "measure_held_out_when_due", lambda collector, latest, *rest: (latest, latest.values)
    )
    base = random_params(dataclasses.replace(learner.policy, rank=0), rng) if settings.lora_rank else None
    policy = random_params(learner.policy, rng)
    reference, stale = (random_params(learner.policy, rng, policy, distance) for distance in (0.5, 0.3))
    critic, reward_model = (model and random_params(model, rng) for model in (learner.critic, learner.reward_model))
    initial_telemetry, measured = initial_values(learner.channels, jnp.float32(0))
    scale, counts = Scale.of(jnp.arange(2.0)), settings.telemetry == "full"
    before = DialogueState(
        policy=Trained(policy, learner.transform.init(policy)),
        critic=critic and Trained(critic, learner.transform.init(critic)),
        reward_model=reward_model,
        reference=reference,
        initial=policy if learner.keeps_initial else None,
        scales={"proxy": scale, "gold": scale} if reward_model else {},
        results=Bigrams.empty(LetterDialogue.vocabulary) if counts else None,
        warm_start_success=jnp.float32(0),
        told=initial_telemetry,
        measured=measured,
    )
    count = settings.prompts * settings.oversampling * settings.group_size
    noise = {
        "log_probability": np.float32(0.3 * rng.normal(size=(count, LetterDialogue.length))),
        "reward": np.float32(0.3 * rng.normal(size=count)),
    }
    noise = {site: x for site, x in noise.items() if site in case.sites}
    data = DialogueData(settings.numbers(1.0), None, base)
    key = jax.random.key(case.seed)

    @jax.jit
    def step(state, key, data, stale, noise):
        taps = ChangingTaps(STEP, STEPS, data=data)
        taps.altered = {site: lambda x: SCALE * x for site in SCALED if site in case.sites}
        taps.altered |= {
            site: lambda x, noise_of_site=noise_of_site: x + noise_of_site for site, noise_of_site in noise.items()
        }
        taps.altered |= {"behaviour": lambda _: stale} if "behaviour" in case.sites else {}
        after, telemetry = learner.step(state, key, taps)
        return after, telemetry, learner.recorded

    after, telemetry, recorded = jax.tree.map(np.asarray, step(before, key, data, stale, noise))
    follows_reference = settings.objective == "preference" and not settings.online
    names = {"ratio_clip": ("clip_low", "clip_high")}
    scaled = [name for site in SCALED if site in case.sites for name in names.get(site, (site,))]
    acting = dataclasses.replace(settings, **{name: SCALE * getattr(settings, name) for name in scaled})
    sampling_key = jax.random.split(jax.random.split(key)[0])[1]
    return Iteration(
        case=case,
        settings=acting,
        before=before,
        after=after,
        author=stale if "behaviour" in case.sites else reference if follows_reference else policy,
        base=base,
        rows=reference_rows(recorded["experience"].rollout.rows),
        uniform=np.float64(jax.random.uniform(sampling_key, (count, LetterDialogue.length))),
        disturbed=plain.Disturbances(**{site: np.float64(x) for site, x in noise.items()}),
        experience=recorded["experience"],
        visited=recorded["visited"],
        telemetry=telemetry,
    )


def assert_close(name, result, expected, where=True, **tolerance):
    """Asserts that the learner's value equals the reference's at the positions in `where`."""
    result, expected, where = np.broadcast_arrays(result, expected, where)
    if expected.dtype.kind == "f":
        np.testing.assert_allclose(result[where], expected[where], err_msg=name, **CLOSE | tolerance)
    else:
        np.testing.assert_array_equal(result[where], expected[where], err_msg=name)


def compare_collected(it):
    """Compares sampled rows and inputs of the loss with the reference's, and returns the reference's values."""
    before = it.before
    models = plain.Models(
        policy=reference_params(before.policy.params),
        reference=reference_params(before.reference),
        sampler=reference_params(it.author),
        critic=before.critic and reference_params(before.critic.params),
        reward_model=reference_params(before.reward_model),
        base=reference_params(it.base),
    )
    expected = plain.prepare_training_data(
        it.settings, LetterDialogue(), HEADS, models, it.rows, it.uniform, it.disturbed, it.rollout.reward
    )
    rollout, response_mask = it.rollout, it.rows.policy_mask
    assert_close(
        "all sampler's log-probability", rollout.rows.log_prob, expected["all sampler's log-probability"], response_mask
    )
    assert_close("all sampler's entropy", rollout.rows.entropy, expected["all sampler's entropy"], response_mask)
    assert_close("all mass cut", rollout.rows.mass_cut, expected["all mass cut"], response_mask)
    assert_close("all sampled tokens", rollout.rows.tokens, expected["all sampled tokens"], response_mask)
    for name, field in {"scores": "undisturbed_reward", "reward": "reward", "kept": "row_mask"}.items():
        assert_close(f"all {name}", getattr(rollout, field), expected[f"all {name}"])
    loss_inputs, rows, recomputed = (
        it.experience.batch.loss_inputs,
        it.experience.batch.rows,
        it.experience.trainer_outputs,
    )
    response_mask = expected["policy_mask"]
    assert_close("the loss mask of the rows that are learned from", loss_inputs.loss_mask, response_mask)
    for name, field in {"tokens": "tokens", "position": "position", "attention_start": "first"}.items():
        assert_close(f"chosen rows' {name}", getattr(rows, name), getattr(expected["rows"], field), response_mask)
    assert_close("score", recomputed.score, expected["score"], response_mask.any(-1))
    assert_close("temperature", it.experience.temperature, np.float64(it.settings.temperature))
    if recomputed.log_prob is not None:
        assert_close("recomputed log-probability", recomputed.log_prob, expected["recomputed"], response_mask)
        assert_close("entropy", recomputed.entropy, expected["entropy"], response_mask)
    if it.settings.correction != "none" or it.settings.old_log_probability == "sampled":
        assert_close(
            "sampled log-probability as learned from", loss_inputs.rollout_log_prob, expected["sampled"], response_mask
        )
    if it.settings.kl != "none" or it.settings.objective == "preference":
        assert_close("reference's log-probability", loss_inputs.ref_log_prob, expected["reference"], response_mask)
    if expected["value"] is not None:
        assert_close("value", loss_inputs.old_value, expected["value"], response_mask)
        assert_close("returns", recomputed.returns, expected["returns"])
        assert_close("target", loss_inputs.value_target, expected["target"])
    if it.settings.objective == "policy":
        assert_close("old log-probability", loss_inputs.old_log_prob, expected["old"], response_mask)
        assert_close("advantage", loss_inputs.advantages, expected["advantage"], atol=2e-5)
    return expected


def compare_gradient(name, gradient, loss, params, rng):
    """Compares a gradient with finite differences of a loss, in random directions and for each leaf."""
    norm = max(np.sqrt(sum(np.sum(g**2) for g in gradient.values())), 1e-2)
    errors = []
    for slope in plain.directional_slopes(loss, params, rng):
        error = sum(np.sum(gradient[path] * d) for path, d in slope.direction.items()) - slope.slope
        if slope.name == "everywhere":
            errors.append(error)
            continue
        if len(errors) == 16:
            root = np.sqrt(np.mean(np.square(errors)))
            assert root < GRADIENT_TOLERANCE * norm, f"{name} is off by {root:.2e}, and its norm is {norm:.2e}"
            errors.append(0.0)
        leaf_norm = np.sqrt(np.sum(gradient[slope.name] ** 2))
        allowed = GRADIENT_TOLERANCE * (leaf_norm + 0.1 * norm)
        assert abs(error) < allowed, f"{name} by {slope.name} is off by {error:.2e}, and its norm is {leaf_norm:.2e}"


UPDATE = ("clipped", "gradient_norm")


def rate_of(settings, label):
    """Returns the learning rate of the tested iteration."""
    peak = settings.learning_rate if label == "policy" else settings.critic_learning_rate
    return plain.learning_rate(settings, peak, STEP / STEPS)


def compare_updates(it, expected):
    """Compares each update with the reference's, and returns each update's parts of the loss."""
    settings, rng = it.settings, np.random.default_rng(1)
    adam = plain.Adam(settings.beta1, settings.beta2, settings.epsilon, settings.weight_decay, settings.max_grad_norm)
    rates = {label: rate_of(settings, label) for label in ("policy", "critic")}
    start = {"policy": it.before.policy, "critic": it.before.critic}
    end = {"policy": it.after.policy, "critic": it.after.critic}
    labels = [label for label in start if start[label] is not None]
    params = {label: reference_params(start[label].params) for label in labels}
    moments = {label: adam.init(params[label]) for label in labels}
    base, expected_metrics = reference_params(it.base), []
    for epoch in range(settings.epochs):
        visited_rows = np.sort(it.visited.rows[epoch].reshape(-1))
        assert_close(f"rows of epoch {epoch}", visited_rows, np.arange(settings.rows))
        for number in range(settings.minibatches):
            prefix = f"update {number} of epoch {epoch}: "
            index = it.visited.rows[epoch, number]
            if settings.objective == "preference":
                assert_close(prefix + "pairs lie side by side", index[1::2], index[::2] + 1)
                assert_close(prefix + "the better row is first", index[::2] % 2, np.zeros(len(index) // 2, int))
            metrics, optimizer_metrics, tokens = jax.tree.map(
                lambda x: x[epoch, number],  # noqa: B023
                (it.visited.metrics, it.visited.optimizer, it.visited.tokens),
            )
            trained = {label: reference_params(x.params) for label, x in metrics.pop("trained").items()}
            gradient = {label: reference_params(x) for label, x in metrics.pop("gradient").items()}
            for label in labels:
                compare_params(
                    prefix + f"parameters of the {label} before", trained[label], params[label], rates[label]
                )
            batch = plain.minibatch(settings, LetterDialogue(), expected, index)
            critic = trained.get("critic")

            def losses(policy, critic, frozen=None, batch=batch):
                return plain.losses(
                    settings, HEADS, plain.merge_adapters(policy, base), with_base(critic, base), batch, frozen
                )

            expected_losses, log_ratio, frozen = losses(trained["policy"], critic)
            assert set(metrics) == set(expected_losses), "names of the parts of the loss"
            if tokens is not None:
                assert_close(prefix + "log-ratio", tokens.log_ratio, log_ratio, batch.policy_mask)
            for name, value in expected_losses.items():
                assert_close(prefix + name, metrics[name], value)
            policy_loss = lambda p: losses(p, critic, frozen)[0]["loss"]  # noqa: B023, E731
            critic_loss = lambda c: losses(trained["policy"], c, frozen)[0]["loss"]  # noqa: B023, E731
            for label in labels:
                loss = policy_loss if label == "policy" else critic_loss
                compare_gradient(prefix + f"gradient of the {label}", gradient[label], loss, trained[label], rng)
                params[label], moments[label], update = adam.update(
                    trained[label], moments[label], gradient[label], rates[label]
                )
                for name, value in update.items():
                    assert_close(prefix + f"{name} of the {label}", getattr(optimizer_metrics[label], name), value)
            update_metrics = {
                f"{label} {name}": getattr(optimizer_metrics[label], name) for label in labels for name in UPDATE
            }
            expected_metrics.append(expected_losses | update_metrics)
    for label in labels:
        compare_params(
            f"parameters of the {label} at the end", reference_params(end[label].params), params[label], rates[label]
        )
        adam_state = end[label].moments[0]
        assert_close(f"updates of the {label}", adam_state.count, moments[label]["count"])
        for name in ("mu", "nu"):
            for path, moment in reference_params(getattr(adam_state, name)).items():
                assert_close(f"{name} of the {label}'s {path}", moment, moments[label][name][path], atol=1e-7)
    return expected_metrics


def with_base(params, base):
    return None if params is None else plain.merge_adapters(params, base)


def compare_params(name, result, expected, rate):
    """Asserts that parameters equal the reference's, relative to the rate, which is Adam's largest first step."""
    for path, x in expected.items():
        np.testing.assert_allclose(result[path], x, rtol=1e-6, atol=PARAMS_TOLERANCE * rate, err_msg=f"{name}: {path}")


def compare(it):
    """Compares an iteration with the reference's."""
    expected = compare_collected(it)
    metrics = compare_updates(it, expected)
    for name in ("reference", "reward_model"):
        before, after = (jax.tree.leaves(getattr(state, name)) for state in (it.before, it.after))
        for x, y in zip(before, after, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)
    if expected["value"] is not None:
        response_mask = expected["policy_mask"]
        reward = plain.token_rewards(it.settings, expected["score"], response_mask, np.zeros(response_mask.shape))
        score_returns = plain.returns(reward, response_mask, it.settings.gamma)
        for name, target in {"value_bias": expected["target"], "score_value_bias": score_returns}.items():
            assert_close(
                f"{name} of the telemetry", it.telemetry[name], (expected["value"] - target)[response_mask].mean()
            )
    return expected, metrics


def assert_the_case_is_informative(it, expected, metrics, every_bound=True):
    """Asserts that each feature of the case has an effect; with `every_bound`, also each bound of the ratio alone."""
    settings, rows = it.settings, it.rows
    assert 0.1 < rows.truncated.mean() < 0.9, "truncated and complete rows"
    for role in (POLICY, PROMPT, TOOL):
        assert (rows.role == role).mean() > 0.02
    assert (rows.first > 0).any(), "rows with several chunks"
    assert (rows.role[:, 2] == PROMPT).any()
    assert (rows.role[:, 2] == POLICY).any(), "prompts of two lengths"
    assert (expected["all mass cut"][rows.policy_mask] > 0.05).mean() > 0.2, "top-p"
    assert expected["all certain"][rows.policy_mask].mean() > 0.95, "sampled tokens that do not depend on rounding"
    response_mask = expected["policy_mask"]
    dropped = expected["rows"].policy_mask.any(-1) & ~response_mask.any(-1)
    assert 0 < dropped.mean() < 0.8, "rows without loss"
    gap = np.abs(expected["recomputed"] - expected["reference"])[response_mask]
    assert np.median(gap) > 0.1, "a reference that differs from the policy"
    if settings.objective == "policy":
        lengths = np.max(np.where(response_mask, np.arange(LetterDialogue.length), 0), -1)
        sequences_needed = (
            max(lengths[index].sum() for epoch in it.visited.rows for index in epoch) / LetterDialogue.length
        )
        pieces = settings.piece_sizes(settings.rows // settings.minibatches)
        assert sequences_needed > pieces.first or not settings.microbatches > 1, "packed rows in several pieces"
        penalty = plain.overlong_penalty(settings, LetterDialogue(), expected["rows"])[response_mask.any(-1)]
        assert len(set(penalty)) > 2, "several overlong penalties"
    if settings.oversampling > 1:
        size, groups = settings.group_size, settings.prompts * settings.oversampling
        reward, kept = (expected[f"all {name}"].reshape(groups, size) for name in ("reward", "kept"))
        signal = np.array([plain.has_signal(*group) for group in zip(reward, kept, strict=True)])
        assert 0 < signal.sum() < groups, "groups with and without signal"
        assert not signal[: settings.prompts].all(), "groups without signal among the first"
    for label in ("policy", "critic"):
        norms = [m.get(f"{label} gradient_norm", 1.0) for m in metrics]
        assert np.mean(np.array(norms) > 0.02) > 0.5, "gradients that are not zero"
    if settings.objective == "preference":
        return
    assert np.abs(expected["sampled"] - expected["recomputed"])[response_mask].mean() > 0.1, (
        "a sampler with stale parameters"
    )
    shares = {name: np.mean([m[name] for m in metrics]) for name in metrics[0]}
    bounds = [shares[f"clip_{name}"] for name in ("low", "high", "dual")]
    assert sum(bounds) > 0.02, "clipped ratios"
    if every_bound:
        assert min(bounds) > 0.005
        assert shares["policy clipped"] > 0, "clipped gradients"
    if settings.advantage == "gae" and settings.clip_value:
        assert 0.02 < shares["value_clipped"] < 0.98
    if settings.correction == "tis":
        weight = plain.importance_weights(settings, expected["old"] - expected["sampled"], response_mask)[response_mask]
        assert 0.05 < (weight == settings.tis_cap).mean() < 0.95
    if settings.correction == "mis":
        assert 0.02 < shares["correction_zero"] < 0.98


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name != "ppo_lm" else ()) for name in CASES]
)
def test_an_iteration_equals_the_references(name, monkeypatch):
    it = run_iteration(CASES[name], monkeypatch)
    assert_the_case_is_informative(it, *compare(it))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", VARIANTS)
def test_an_iteration_of_a_variant_equals_the_references(name, monkeypatch):
    it = run_iteration(VARIANTS[name], monkeypatch)
    assert_the_case_is_informative(it, *compare(it), every_bound=False)


# Before the first iteration.


class RecordedPretraining:
    """Records a pretraining with Adam: its initial parameters, gradients and rows.

    Attributes:
      start: the initial parameters, in the reference's form.
      gradients: the gradient of each update, in the reference's form.
      shown: the demonstrated rows, in their order.
    """

    def __init__(self, transform):
        self.transform, self.start, self.gradients, self.shown = transform, None, [], []

    def init(self, params):
        jax.debug.callback(lambda params: setattr(self, "start", reference_params(params)), params, ordered=True)
        return self.transform.init(params)

    def update(self, gradient, moments):
        jax.debug.callback(lambda gradient: self.gradients.append(reference_params(gradient)), gradient, ordered=True)
        return self.transform.update(gradient, moments)

    def see(self, rows):
        jax.debug.callback(lambda rows: self.shown.append((reference_rows(rows), rows)), rows, ordered=True)
        return rows


def initialise(settings, monkeypatch):
    """Initialises a learner.

    Returns the state before the first iteration, each recorded pretraining in order, and the rows, returns and key of
    the last of them, value pretraining. Rows that would be sampled to test whether the warm start is over (it never is)
    or to measure a reward's scale are replaced by zeros.
    """
    learner, stages = DialogueLearner(LetterDialogue(), settings.structure), []
    adam, demonstrate, undisturbed = (
        optax.scale_by_adam,
        demonstrations.demonstrate,
        learner.collector.sample_undisturbed,
    )
    monkeypatch.setattr(
        optax, "scale_by_adam", lambda *args: stages.append(RecordedPretraining(adam(*args))) or stages[-1]
    )
    monkeypatch.setattr(demonstrations, "demonstrate", lambda *args: stages[-1].see(demonstrate(*args)))

    value_pretraining, sample_returns, pretrain_value_model = (
        {},
        learner.sample_returns,
        demonstrations.pretrain_value_model,
    )

    def zero_rows(*args):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(lambda: undisturbed(*args)))

    def sample_real_returns(*args):
        monkeypatch.setattr(learner.collector, "sample_undisturbed", undisturbed)
        return sample_returns(*args)

    def recording_pretrain(network, params, base, rows, returns, key, **rest):
        recorded = {"rows": rows, "returns": returns, "key": jax.random.key_data(key)}
        jax.debug.callback(value_pretraining.update, recorded, ordered=True)
        return pretrain_value_model(network, params, base, rows, returns, key, **rest)

    monkeypatch.setattr(learner.collector, "sample_undisturbed", zero_rows)
    monkeypatch.setattr(learner, "sample_returns", sample_real_returns)
    monkeypatch.setattr(demonstrations, "pretrain_value_model", recording_pretrain)
    # Iterations get another transformation, so that theirs is not recorded as a pretraining.
    monkeypatch.setattr(learner, "transform", optax.identity())
    state = jax.jit(learner.init)(jax.random.key(3), DialogueData(settings.numbers(1.0)))
    jax.effects_barrier()
    return jax.tree.map(np.asarray, state), stages, value_pretraining


def replay_pretraining(name, stage, updates, rate, loss_of, checked=(0, 1, 4), decays=False):
    """Compares some gradients of a pretraining with those of `loss_of(i)`, and returns the last parameters.

    The learning rate is constant, or decays linearly to 0 if `decays`.
    """
    adam, params, rng = plain.Adam(0.9, 0.95), stage.start, np.random.default_rng(2)
    moments = adam.init(params)
    for i in range(updates):
        if i in checked:
            gradient = stage.gradients[i]
            assert max(np.abs(g).max() for g in gradient.values()) > 0.02
            compare_gradient(f"{name}, update {i}", gradient, loss_of(i), params, rng)
        factor = 1 - i / updates if decays else 1
        params, moments, _ = adam.update(params, moments, stage.gradients[i], factor * rate)
    return params


@pytest.mark.exhaustive
def test_warm_starts_and_value_pretraining_equal_the_references(monkeypatch):
    warm_starts = {
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
    settings = settings_of("ppo_lm")(**COMMON | warm_starts)
    state, (warm, judge, critic), value_pretraining = initialise(settings, monkeypatch)
    rate = settings.warm_start_learning_rate

    is_right = np.concatenate([rows.tokens == CALL for rows, _ in warm.shown]).any(-1)
    assert 0.3 < is_right.mean() < 0.7, "right and wrong demonstrations"
    policy = replay_pretraining(
        "warm start",
        warm,
        demonstrations.UPDATES_PER_CHECK,
        rate,
        lambda n: lambda params: plain.imitation_loss(settings, HEADS, params, warm.shown[n][0]),
    )
    compare_params("the policy after its warm start", reference_params(state.policy.params), policy, rate)
    for x, y in zip(jax.tree.leaves(state.reference), jax.tree.leaves(state.policy.params), strict=True):
        np.testing.assert_array_equal(x, y, err_msg="the reference is the policy after its warm start")

    for stage in (judge, critic):
        head = {"head/kernel": np.zeros(16), "head/bias": np.zeros(())}
        compare_params("initial parameters of the reward or value model", stage.start, policy | head, rate)

    pairs = [(judge.shown[i][0], judge.shown[i + 1][0]) for i in range(0, len(judge.shown), 2)]
    signs = np.concatenate([np.sign(right.rewards["seen"] - wrong.rewards["seen"]) for right, wrong in pairs])
    assert set(signs) == {-1.0, 0.0, 1.0}, "pairs of all orders"
    gold = np.concatenate([np.sign(right.rewards["gold"] - wrong.rewards["gold"]) for right, wrong in pairs])
    assert (gold != signs).any(), "the observed reward differs from gold"
    for right, wrong in pairs:
        assert_close("prompts of a pair", right.tokens[:, :2], wrong.tokens[:, :2])
        assert (right.tokens == CALL).any(-1).all()
        assert not (wrong.tokens == CALL).any()
    rate = settings.reward_model_learning_rate
    model = replay_pretraining(
        "the reward model's",
        judge,
        settings.reward_model_warm_start,
        rate,
        lambda n: lambda params: plain.reward_model_loss(HEADS, params, *pairs[n]),
    )
    compare_params("the reward model", reference_params(state.reward_model), model, rate)

    rows = reference_rows(value_pretraining["rows"])
    assert len(rows.tokens) == 2 * settings.rows, "the rows asked for, rounded up to complete iterations"
    all_log_probs = plain.log_softmax(plain.logits(policy, rows, HEADS) / settings.temperature)
    log_prob = value_pretraining["rows"].log_prob
    assert_close(
        "log-probability of value pretraining's rows",
        log_prob,
        plain.gather_tokens(all_log_probs, rows),
        rows.policy_mask,
    )
    scored = plain.reward_model_scores(model, rows, HEADS)
    assert np.std(scored) > 0.01
    # The policy equals its reference, so that their divergence is zero.
    scored += settings.overlong_coefficient * plain.overlong_penalty(settings, LetterDialogue(), rows)
    returned = plain.returns(
        plain.token_rewards(settings, scored, rows.policy_mask, 0.0 * rows.tokens), rows.policy_mask, settings.gamma
    )
    assert_close("returns of value pretraining's rows", value_pretraining["returns"], returned)
    key, size = jax.random.wrap_key_data(value_pretraining["key"]), settings.critic_warm_start_minibatch

    def expectation(number):
        """Returns the loss of the rows that an update samples."""
        index = np.asarray(jax.random.randint(jax.random.fold_in(key, number), (size,), 0, len(rows.tokens)))
        return lambda params: plain.value_pretraining_loss(HEADS, params, rows.select(index), returned[index])

    rate = settings.critic_warm_start_learning_rate
    values = replay_pretraining("the critic's", critic, settings.critic_warm_start, rate, expectation, decays=True)
    compare_params("the critic", reference_params(state.critic.params), values, rate)
