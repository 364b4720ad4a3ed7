"""A small learner that fits every remedy of updates, and optimizers that are run on artificial gradients."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

import jaxaudit as ja
from jaxaudit import remedies
from jaxaudit.core.optimizer import linear_to_zero
from jaxaudit.core.remedied_learner import remedy_misfit
from jaxaudit.core.sites import find_sites
from jaxaudit.core.taps import ROOT, Taps
from jaxaudit.runtime import registry

SHAPES = {"actor": (3,), "critic": (2, 2)}


SIZE = 7


def to_params(entries):
    """Returns parameters, or a series of them, from their entries `[..., SIZE]`."""
    entries = jnp.asarray(entries, jnp.float32)
    return {"actor": entries[..., :3], "critic": entries[..., 3:].reshape(*entries.shape[:-1], 2, 2)}


def to_vector(params):
    """Returns the entries of parameters, `[SIZE]`."""
    return jnp.concatenate([params["actor"].ravel(), params["critic"].ravel()])


def to_vectors(series):
    """Returns the entries of a series of parameters, `[length, SIZE]`, in float64."""
    actor, critic = (np.asarray(series[name], np.float64) for name in SHAPES)
    return np.concatenate([actor, critic.reshape(len(critic), 4)], axis=1)


def initial_remedy_states(applied, update):
    """Returns the first states of remedies by name, for a learner with one optimizer."""
    values = {"guard": update, "penalty": update.gradient}
    return {kind.name: {ROOT: kind.init(values[kind.site])} for kind, _ in applied if kind.keeps_state}


def run_updates(optimizer, active_remedies, params, gradients, **contexts):
    """Makes one update after another, from gradients `[length, SIZE]` and each update's context.

    Returns the parameters and the optimizer's state after each update, and the update's result.
    """
    applied = tuple((remedy.kind, jnp.float32(remedy.strength)) for remedy in active_remedies)

    def scan_step(carry, inputs):
        params, state, states = carry
        gradient, context = inputs
        taps = Taps().with_remedies(applied, states, None)
        params, state, update = optimizer.update(params, state, gradient, taps, **context)
        return (params, state, taps.remedy_states), (params, state, update)

    params, series = to_params(params), to_params(gradients)
    state = optimizer.init(params)
    scale = jnp.ones(())
    initial_states = initial_remedy_states(applied, remedies.ProposedUpdate(params, state, scale, scale))
    contexts = {name: jnp.asarray(values, jnp.float32) for name, values in contexts.items()}
    return jax.jit(lambda *inputs: jax.lax.scan(scan_step, *inputs))(
        (params, state, initial_states), (series, contexts)
    )[1]


def guard_gradients(remedy, gradients):
    """Returns gradients `[length, SIZE]` as a remedy at the site "guard" changes them, one after another."""
    applied = ((remedy.kind, jnp.float32(remedy.strength)),)

    def scan_step(states, gradient):
        taps = Taps().with_remedies(applied, states, None)
        update = taps.remedy("guard", remedies.ProposedUpdate(gradient, (), jnp.ones(()), jnp.ones(())))
        return taps.remedy_states, update.gradient

    series = to_params(gradients)
    initial_states = initial_remedy_states(
        applied, remedies.ProposedUpdate(jax.tree.map(lambda g: g[0], series), (), 1.0, 1.0)
    )
    return to_vectors(jax.jit(lambda *inputs: jax.lax.scan(scan_step, *inputs)[1])(initial_states, series))


def random_gradients(length, seed=0, scale=1.0):
    """Returns gradients without a trend, `[length, SIZE]`."""
    return np.random.default_rng(seed).normal(0.0, scale, (length, SIZE)).astype(np.float32).astype(np.float64)


def assert_close(actual, expected, rtol=2e-4, atol=1e-6):
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rtol, atol=atol)


STEPS, UPDATES, ONSET, DURATION = 10, 4, 4, 3


RATE = 0.05


WINDOW = slice(ONSET, ONSET + DURATION)


@dataclass(frozen=True)
class SmallSettings:
    entropy_coefficient: float = 0.01


def fresh(key):
    return to_params(jax.random.normal(key, (SIZE,)))


@functools.cache
def small_learner(**settings):
    """A learner that makes several updates of Adam a step, towards random targets, with detailed telemetry."""
    values = SmallSettings(**settings)
    optimizer = ja.Optimizer(ja.Adam(), linear_to_zero(RATE))

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        params_before, moments = optimizer.disturb(*state, taps, fresh)
        weight = taps(
            "entropy_coefficient",
            jnp.float32(values.entropy_coefficient),
            entropy=lambda: jnp.sum(params_before["actor"]),
        )
        bounds = taps("ratio_clip", jnp.float32([0.2, 0.2]))
        lam = taps("critic_lambda", jnp.float32(0.95))

        def update(taps, carry, target):
            params, moments = carry
            loss, gradient = jax.value_and_grad(lambda p: 0.5 * jnp.sum((to_vector(p) - target) ** 2))(params)
            kl = jnp.sum((to_vector(params) - to_vector(params_before)) ** 2)
            context = {"loss": loss, "approximate_kl": kl}
            params, moments, result = optimizer.update(params, moments, gradient, taps, **context)
            metrics = {
                "gradient": to_vector(gradient),
                "params": to_vector(params),
                "kl": kl,
                "used": result.used,
            }
            metrics |= {"learning_rate": result.learning_rate, "update_norm": result.update_norm}
            return (params, moments), metrics | {"gradient_norm": result.gradient_norm}

        targets = 1.0 + jax.random.normal(key, (UPDATES, SIZE))
        (params, moments), metrics = taps.scan(update, (params_before, moments), targets)
        params, moments = optimizer.finish(params, moments, taps, fresh)
        settings = {"weight": weight, "bounds": bounds, "lambda": lam, "count": moments.count.astype(jnp.float32)}
        metrics |= {
            "begin": to_vector(params_before),
            "mu": to_vector(moments.mu),
            "nu": to_vector(moments.nu),
        } | settings
        return (params, moments), metrics | {"performance": -jnp.sum(to_vector(params) ** 2)}

    def changed(change):
        return small_learner(**{"entropy_coefficient": values.entropy_coefficient, **change(values)})

    return ja.Learner(init, step, name="small", changed=changed)


def added(key, value, magnitude, state):
    return jax.tree.map(lambda x: x + magnitude, value), state


def poisoned(key, value, magnitude, state):
    return jax.tree.map(lambda x: x * jnp.where(magnitude > 0, jnp.nan, 1.0), value), state


SHIFTED_RATE = ja.Kind("shifted_rate", "optimization", "learning_rate", added)


PUSHED = ja.Kind("pushed", "signal", "gradient", added, target="critic")


POISONED = ja.Kind("poisoned", "signal", "gradient", poisoned)


CONDITIONS = {"control": None, "shifted": (SHIFTED_RATE, 0.5), "spike": (ja.lr_spike, 3.0)}


CONDITIONS |= {"pushed": (PUSHED, 2.0), "poisoned": (POISONED, 1.0)}


def perturbations(**magnitudes):
    return [
        kind(magnitudes.get(name, magnitude), onset=ONSET, duration=DURATION)
        for name, (kind, magnitude) in list(CONDITIONS.items())[1:]
    ]


def audit_telemetry(learner, **magnitudes):
    """Returns the telemetry of an audit by name, `[seed, condition, step, ...]`, in float64."""
    telemetry = ja.audit(learner, perturbations(**magnitudes), seeds=2, steps=STEPS).telemetry
    return {
        name: np.asarray(values, np.float64) for name, values in telemetry.data_vars.items() if "step" in values.dims
    }


def remedy_kinds():
    return [registry.remedies[name] for name in registry.remedies]


@functools.cache
def fitting_kinds():
    """Returns the kinds of remedies that act in the small learner."""
    return [
        kind
        for kind in remedy_kinds()
        if kind.apply is not None and remedy_misfit(kind, find_sites(small_learner())) is None
    ]


def with_fitting_remedies(**strengths):
    """Returns the small learner with every remedy that fits, with its strength in `strengths` or its neutral one."""
    return ja.remedied(small_learner(), *(kind(strengths.get(kind.name, kind.neutral)) for kind in fitting_kinds()))


@functools.cache
def remedied_telemetry(**strengths):
    return audit_telemetry(with_fitting_remedies(**strengths))


def lane_telemetry(telemetry, condition, seed=0):
    return {
        name: values[seed, list(CONDITIONS).index(condition)]
        for name, values in telemetry.items()
        if name != "baseline_performance"
    }
