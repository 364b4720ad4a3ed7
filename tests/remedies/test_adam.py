"""Tests remedies of Adam: resetting its count, equal decay rates, and steps divided by the gradient's relative size."""

import math

import numpy as np
import optax
from remedy_references import (
    AdamReference,
)
from small_learner import (
    RATE,
    SIZE,
    STEPS,
    UPDATES,
    assert_close,
    lane_telemetry,
    random_gradients,
    remedied_telemetry,
    run_updates,
    to_vectors,
)

import jaxaudit as ja
from jaxaudit import remedies


def test_adam_rel_resets_the_count_in_each_step_and_keeps_the_moments():
    for strength in (0.0, 1.0):
        telemetry = lane_telemetry(remedied_telemetry(adam_rel=strength), "control")
        adam, params = AdamReference(SIZE), telemetry["begin"][0]
        for step in range(STEPS):
            adam.count *= strength == 0
            for update in range(UPDATES):
                params = params - RATE * (1 - step / STEPS) * adam.direction(telemetry["gradient"][step, update])
                assert_close(telemetry["params"][step, update], params, rtol=1e-3, atol=1e-5)
            assert_close(telemetry["mu"][step], adam.first, atol=1e-5)
            assert_close(telemetry["nu"][step], adam.second, atol=1e-5)
            assert telemetry["count"][step] == adam.count == (UPDATES if strength else UPDATES * (step + 1))


def test_equal_betas_sets_both_decay_rates():
    gradients = random_gradients(40, seed=10)
    for beta in (0.5, 0.97):
        params, state, _ = run_updates(
            ja.Optimizer(ja.Adam(), RATE), [remedies.equal_betas(beta)], np.ones(SIZE), gradients
        )
        transform = optax.scale_by_adam(beta, beta)
        plain, plain_state, _ = run_updates(ja.Optimizer(transform, RATE), [], np.ones(SIZE), gradients)
        assert_close(to_vectors(params), to_vectors(plain), rtol=1e-5)
        assert_close(to_vectors(state.nu), to_vectors(plain_state.nu), rtol=1e-5)
        adam = AdamReference(SIZE, beta, beta)
        expected = 1.0 - RATE * np.cumsum([adam.direction(g) for g in gradients], axis=0)
        assert_close(to_vectors(params), expected, atol=1e-5)


def stable_reference(gradients, threshold, adam):
    """Returns StableAdamW's directions (Wortsman et al., 2023, Algorithm 2), and the RMS of each tensor."""
    directions, roots = [], []
    for g in gradients:
        direction, second = adam.direction(g), adam.second / (1 - adam.betas[1] ** adam.count)
        tensors = (slice(0, 3), slice(3, SIZE))
        roots.append([math.sqrt(np.mean(g[t] ** 2 / np.maximum(second[t], 1e-16))) for t in tensors])
        directions.append(
            np.concatenate([direction[t] / max(1.0, r / threshold) for t, r in zip(tensors, roots[-1], strict=True)])
        )
    return np.array(directions), np.array(roots)


def test_stable_adamw_equals_the_published_algorithm_for_each_tensor():
    gradients = random_gradients(60, seed=11)
    gradients[:, 6] = 0.0
    gradients[20] *= 8.0
    gradients[40, :3] *= 8.0
    gradients[50] *= 0.05
    for threshold in (1.0, 2.0):
        remedy_list = [remedies.stable_adamw(threshold)]
        params, _, metrics = run_updates(ja.Optimizer(ja.Adam(), RATE), remedy_list, np.zeros(SIZE), gradients)
        expected, roots = stable_reference(gradients, threshold, AdamReference(SIZE))
        assert_close(to_vectors(params), -RATE * np.cumsum(expected, axis=0), atol=1e-5)
        assert_close(metrics.update_norm, RATE * np.linalg.norm(expected, axis=1))
        assert (roots[[20, 40], 0] > 2).all()
        assert (roots < threshold).any()
    combined = [remedies.stable_adamw(), remedies.equal_betas(0.9)]
    params, *_ = run_updates(ja.Optimizer(ja.Adam(), RATE), combined, np.zeros(SIZE), gradients)
    expected, _ = stable_reference(gradients, 1.0, AdamReference(SIZE, 0.9, 0.9))
    assert_close(to_vectors(params), -RATE * np.cumsum(expected, axis=0), atol=1e-5)
