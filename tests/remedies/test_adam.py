"""Remedies of Adam: its count, its decay rates, and steps divided by how far a gradient is above its second moment."""

import math

import numpy as np
import optax
from remedy_references import (
    AdamReference,
)
from small_learner import RATE, SIZE, STEPS, UPDATES, close, driven, entries, lane, noise, told

import jaxaudit as ja
from jaxaudit import remedies


def test_adams_count_begins_anew_in_each_step_and_its_moments_do_not():
    for strength in (0.0, 1.0):
        found = lane(told(adam_rel=strength), "control")
        adam, params = AdamReference(SIZE), found["begin"][0]
        for step in range(STEPS):
            adam.count *= strength == 0
            for update in range(UPDATES):
                params = params - RATE * (1 - step / STEPS) * adam.direction(found["gradient"][step, update])
                close(found["params"][step, update], params, rtol=1e-3, atol=1e-5)
            close(found["mu"][step], adam.first, atol=1e-5)
            close(found["nu"][step], adam.second, atol=1e-5)
            assert found["count"][step] == adam.count == (UPDATES if strength else UPDATES * (step + 1))


def test_equal_betas_are_those_of_both_moments():
    gradients = noise(40, seed=10)
    for beta in (0.5, 0.97):
        params, state, _ = driven(ja.Optimizer(ja.Adam(), RATE), [remedies.equal_betas(beta)], np.ones(SIZE), gradients)
        transform = optax.scale_by_adam(beta, beta)
        plain, plain_state, _ = driven(ja.Optimizer(transform, RATE), [], np.ones(SIZE), gradients)
        close(entries(params), entries(plain), rtol=1e-5)
        close(entries(state.nu), entries(plain_state.nu), rtol=1e-5)
        adam = AdamReference(SIZE, beta, beta)
        expected = 1.0 - RATE * np.cumsum([adam.direction(g) for g in gradients], axis=0)
        close(entries(params), expected, atol=1e-5)


def stable_reference(gradients, most, adam):
    """Steps of StableAdamW (Wortsman et al., 2023, Algorithm 2), and the RMS of each tensor."""
    found, roots = [], []
    for g in gradients:
        direction, second = adam.direction(g), adam.second / (1 - adam.betas[1] ** adam.count)
        tensors = (slice(0, 3), slice(3, SIZE))
        roots.append([math.sqrt(np.mean(g[t] ** 2 / np.maximum(second[t], 1e-16))) for t in tensors])
        found.append(
            np.concatenate([direction[t] / max(1.0, r / most) for t, r in zip(tensors, roots[-1], strict=True)])
        )
    return np.array(found), np.array(roots)


def test_stable_adamw_divides_each_tensors_step_by_how_far_its_gradient_is_above_the_second_moment():
    gradients = noise(60, seed=11)
    gradients[:, 6] = 0.0
    gradients[20] *= 8.0
    gradients[40, :3] *= 8.0
    gradients[50] *= 0.05
    for most in (1.0, 2.0):
        chosen = [remedies.stable_adamw(most)]
        params, _, done = driven(ja.Optimizer(ja.Adam(), RATE), chosen, np.zeros(SIZE), gradients)
        expected, roots = stable_reference(gradients, most, AdamReference(SIZE))
        close(entries(params), -RATE * np.cumsum(expected, axis=0), atol=1e-5)
        close(done.update_norm, RATE * np.linalg.norm(expected, axis=1))
        assert (roots[[20, 40], 0] > 2).all()
        assert (roots < most).any()
    both = [remedies.stable_adamw(), remedies.equal_betas(0.9)]
    params, *_ = driven(ja.Optimizer(ja.Adam(), RATE), both, np.zeros(SIZE), gradients)
    expected, _ = stable_reference(gradients, 1.0, AdamReference(SIZE, 0.9, 0.9))
    close(entries(params), -RATE * np.cumsum(expected, axis=0), atol=1e-5)
