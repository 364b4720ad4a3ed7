"""A small learner that every remedy of updates fits, and optimizers driven by hand-made gradients."""

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


def tree(flat):
    """Parameters, or a series of them, from their entries: `[..., SIZE]`."""
    flat = jnp.asarray(flat, jnp.float32)
    return {"actor": flat[..., :3], "critic": flat[..., 3:].reshape(*flat.shape[:-1], 2, 2)}


def flat(params):
    """The entries of parameters, `[SIZE]`."""
    return jnp.concatenate([params["actor"].ravel(), params["critic"].ravel()])


def entries(series):
    """Those of a series of parameters, `[length, SIZE]`, in float64."""
    actor, critic = (np.asarray(series[name], np.float64) for name in SHAPES)
    return np.concatenate([actor, critic.reshape(len(critic), 4)], axis=1)


def begun(chosen, update):
    """The first states of some remedies, by name, where there is one optimizer."""
    values = {"guard": update, "penalty": update.gradient}
    return {kind.name: {ROOT: kind.init(values[kind.site])} for kind, _ in chosen if kind.keeps_state}


def driven(optimizer, chosen, params, gradients, **contexts):
    """One update after another, of gradients `[length, SIZE]` with each its context.

    Returns parameters and optimizer state after each, and what each did.
    """
    acting = tuple((one.kind, jnp.float32(one.strength)) for one in chosen)

    def turn(carry, given):
        params, state, states = carry
        gradient, context = given
        taps = Taps().with_remedies(acting, states, None)
        params, state, done = optimizer.update(params, state, gradient, taps, **context)
        return (params, state, taps.remedy_states), (params, state, done)

    params, series = tree(params), tree(gradients)
    state = optimizer.init(params)
    one = jnp.ones(())
    first = begun(acting, remedies.ProposedUpdate(params, state, one, one))
    contexts = {name: jnp.asarray(values, jnp.float32) for name, values in contexts.items()}
    return jax.jit(lambda *given: jax.lax.scan(turn, *given))((params, state, first), (series, contexts))[1]


def guarded(one, gradients):
    """What becomes of gradients `[length, SIZE]` in a remedy that guards them, one after another."""
    acting = ((one.kind, jnp.float32(one.strength)),)

    def turn(states, gradient):
        taps = Taps().with_remedies(acting, states, None)
        update = taps.remedy("guard", remedies.ProposedUpdate(gradient, (), jnp.ones(()), jnp.ones(())))
        return taps.remedy_states, update.gradient

    series = tree(gradients)
    first = begun(acting, remedies.ProposedUpdate(jax.tree.map(lambda g: g[0], series), (), 1.0, 1.0))
    return entries(jax.jit(lambda *given: jax.lax.scan(turn, *given)[1])(first, series))


def noise(length, seed=0, scale=1.0):
    """Gradients without a trend, `[length, SIZE]`."""
    return np.random.default_rng(seed).normal(0.0, scale, (length, SIZE)).astype(np.float32).astype(np.float64)


def close(found, expected, rtol=2e-4, atol=1e-6):
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=rtol, atol=atol)


STEPS, UPDATES, ONSET, OPEN = 10, 4, 4, 3


RATE = 0.05


WINDOW = slice(ONSET, ONSET + OPEN)


@dataclass(frozen=True)
class SmallSettings:
    entropy_coefficient: float = 0.01


def fresh(key):
    return tree(jax.random.normal(key, (SIZE,)))


@functools.cache
def small(**settings):
    """Several updates of Adam a step, towards targets that are drawn anew; it tells all that it does."""
    chosen = SmallSettings(**settings)
    optimizer = ja.Optimizer(ja.Adam(), linear_to_zero(RATE))

    def init(key):
        params = fresh(key)
        return params, optimizer.init(params)

    def step(state, key, taps):
        old, moments = optimizer.disturb(*state, taps, fresh)
        weight = taps(
            "entropy_coefficient", jnp.float32(chosen.entropy_coefficient), entropy=lambda: jnp.sum(old["actor"])
        )
        bounds = taps("ratio_clip", jnp.float32([0.2, 0.2]))
        lam = taps("critic_lambda", jnp.float32(0.95))

        def update(taps, carry, target):
            params, moments = carry
            loss, gradient = jax.value_and_grad(lambda p: 0.5 * jnp.sum((flat(p) - target) ** 2))(params)
            kl = jnp.sum((flat(params) - flat(old)) ** 2)
            context = {"loss": loss, "approximate_kl": kl}
            params, moments, done = optimizer.update(params, moments, gradient, taps, **context)
            told = {"gradient": flat(gradient), "params": flat(params), "kl": kl, "used": done.used}
            told |= {"learning_rate": done.learning_rate, "update_norm": done.update_norm}
            return (params, moments), told | {"gradient_norm": done.gradient_norm}

        targets = 1.0 + jax.random.normal(key, (UPDATES, SIZE))
        (params, moments), told = taps.scan(update, (old, moments), targets)
        params, moments = optimizer.finish(params, moments, taps, fresh)
        settings = {"weight": weight, "bounds": bounds, "lambda": lam, "count": moments.count.astype(jnp.float32)}
        told |= {"begin": flat(old), "mu": flat(moments.mu), "nu": flat(moments.nu)} | settings
        return (params, moments), told | {"performance": -jnp.sum(flat(params) ** 2)}

    def changed(change):
        return small(**{"entropy_coefficient": chosen.entropy_coefficient, **change(chosen)})

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
        kind(magnitudes.get(name, magnitude), onset=ONSET, duration=OPEN)
        for name, (kind, magnitude) in list(CONDITIONS.items())[1:]
    ]


def audited(learner, **magnitudes):
    """Telemetry by name, `[seed, condition, step, ...]`, float64."""
    telemetry = ja.audit(learner, perturbations(**magnitudes), seeds=2, steps=STEPS).telemetry
    return {
        name: np.asarray(values, np.float64) for name, values in telemetry.data_vars.items() if "step" in values.dims
    }


def kinds():
    return [registry.remedies[name] for name in registry.remedies]


@functools.cache
def fitting():
    """The kinds of remedies that act in the small learner."""
    return [kind for kind in kinds() if kind.apply is not None and remedy_misfit(kind, find_sites(small())) is None]


def helped(**strengths):
    """The small learner with every remedy that fits, each of the strength given, or of the neutral one."""
    return ja.remedied(small(), *(kind(strengths.get(kind.name, kind.neutral)) for kind in fitting()))


@functools.cache
def told(**strengths):
    return audited(helped(**strengths))


def lane(telemetry, condition, seed=0):
    return {
        name: values[seed, list(CONDITIONS).index(condition)]
        for name, values in telemetry.items()
        if name != "baseline_performance"
    }
