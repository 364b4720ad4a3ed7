"""GRPO learns what can be learned of a dialogue, on every seed."""

import pytest

import jaxaudit as ja


@pytest.mark.slow
def test_grpo_follows_the_hidden_table():
    """From a warm start stopped at a sampled success of a half, in 120 iterations; 1,024 held-out rows."""
    learner = ja.learners.grpo(
        "hop",
        kl="none",
        kl_coefficient=0.0,
        prompts=16,
        beta2=0.99,
        performance_rows=1024,
        performance_every=2,
        telemetry="basic",
    )
    telemetry = ja.audit(learner, [], seeds=8, steps=120, execution="map").telemetry.isel(condition=0)
    assert float(telemetry.warm_start_success.isel(step=0).max()) < 0.65
    measured = telemetry.performance.isel(step=slice(1, None, 2)).isel(step=slice(-10, None)).mean("step")
    assert float(measured.mean()) >= 0.96
    assert float(measured.min()) >= 0.90
